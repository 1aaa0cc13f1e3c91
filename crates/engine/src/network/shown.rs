//! The policy as the sandbox itself can read it. Pure.

use egress::policy::{Action, Preset};
use serde_json::json;
use wire::network::POLICY_BYTES_MAX;

use crate::model::network::{NetworkMode, NetworkPolicy};

/// The contents of `/run/shoal/network.json`. Hosts that only the operator should know are left out.
pub(super) fn text(policy: &NetworkPolicy, registries: &Preset) -> Vec<u8> {
    let spec = policy.spec();
    let rules: Vec<_> = spec
        .rules
        .iter()
        .map(|rule| {
            let action = if rule.action == Action::Allow { "allow" } else { "deny" };
            json!({ "action": action, "to": rule.to, "ports": rule.ports, "protocol": rule.protocol })
        })
        .collect();
    let mut hosts: Vec<_> = match spec.mode {
        NetworkMode::Registries => {
            registries.hosts.iter().filter(|host| !host.private).map(|host| host.host.as_str()).collect()
        }
        NetworkMode::None | NetworkMode::Names | NetworkMode::Open => Vec::new(),
    };
    hosts.dedup();
    let all = json!({
        "mode": spec.mode.word(),
        "rules": rules,
        "hosts": hosts,
        "audit": spec.audit,
        "credentials": policy.inject(),
        "hint": "Names that are not listed are refused. The person who runs this sandbox can open one with `shoal net allow`.",
    });
    let mut text = all.to_string().into_bytes();
    if text.len() >= POLICY_BYTES_MAX {
        text = json!({ "mode": spec.mode.word(), "truncated": true }).to_string().into_bytes();
    }
    text.push(b'\n');
    text
}
