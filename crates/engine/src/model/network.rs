//! What a sandbox may reach, as callers write it, and what it reached.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use egress::policy::{Preset, Ruleset};
use wire::SandboxId;
use wire::network::ROUTES_MAX;

use crate::error::{EngineError, Field, PolicyFault};
use crate::model::secret::{INJECT_MAX, SecretName};

pub use egress::policy::{
    Action as NetworkAction, Mode as NetworkMode, RuleSpec as NetworkRule, Spec as NetworkSpec,
};

/// Routes that are kept for the addresses that stay closed under `open`.
const ROUTES_RESERVED: usize = 64;

/// A policy that was checked: its rules parse and do not contradict each other. Cheap to clone. The default is no network.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetworkPolicy {
    spec: Arc<NetworkSpec>,
    /// Names of secrets that requests may carry.
    inject: Arc<[String]>,
    /// The first sandbox of the family, whose placeholders are in the files of all others. `None`: the sandbox itself.
    family: Option<SandboxId>,
}

impl NetworkPolicy {
    /// Checks a policy.
    pub fn new(spec: NetworkSpec) -> Result<Self, EngineError> {
        let policy = Self::kept(spec);
        let rules = policy.expand(&Preset::default())?;
        let blocks = rules.routes().blocks.len();
        let most = ROUTES_MAX - ROUTES_RESERVED;
        match blocks <= most {
            true => Ok(policy),
            false => Err(EngineError::Policy { fault: PolicyFault::Blocks { given: blocks, most } }),
        }
    }

    /// What a mode opens, without rules.
    pub fn of_mode(mode: NetworkMode) -> Self {
        Self::kept(NetworkSpec { mode, ..NetworkSpec::default() })
    }

    /// A policy from a row, which was checked when it was written.
    pub(crate) fn kept(spec: NetworkSpec) -> Self {
        Self { spec: Arc::new(spec), ..Self::default() }
    }

    /// The policy as it was written.
    pub fn spec(&self) -> &NetworkSpec {
        &self.spec
    }

    /// Names of secrets that requests may carry.
    pub fn inject(&self) -> &[String] {
        &self.inject
    }

    /// The same policy, with these secrets in addition.
    pub fn with_inject(&self, names: &[String]) -> Result<Self, EngineError> {
        let mut inject = self.inject.to_vec();
        for name in names {
            SecretName::parse(name)?;
            if !inject.contains(name) {
                inject.push(name.clone());
            }
        }
        if inject.len() > INJECT_MAX {
            return Err(
                Field::Inject.must(format!("name at most {INJECT_MAX} secrets, got {}", inject.len()))
            );
        }
        Ok(Self { inject: inject.into(), ..self.clone() })
    }

    /// The same policy in a sandbox that was made from another one of the family of `first`.
    pub(crate) fn of_family(&self, first: SandboxId) -> Self {
        Self { family: Some(first), ..self.clone() }
    }

    /// The first sandbox of the family of the sandbox `id`.
    pub(crate) fn family(&self, id: SandboxId) -> SandboxId {
        self.family.unwrap_or(id)
    }

    /// The family, if the sandbox is not its first.
    pub(crate) fn family_given(&self) -> Option<SandboxId> {
        self.family
    }

    /// The same policy with one more rule.
    pub fn with(&self, rule: NetworkRule) -> Result<Self, EngineError> {
        let mut spec = NetworkSpec::clone(&self.spec);
        // Asking twice is harmless.
        if !spec.rules.contains(&rule) {
            spec.rules.push(rule);
        }
        Ok(Self { inject: Arc::clone(&self.inject), family: self.family, ..Self::new(spec)? })
    }

    /// Whether it is `none` without rules and secrets, as if no policy had been given.
    pub fn is_none(&self) -> bool {
        *self.spec == NetworkSpec::default() && self.inject.is_empty()
    }

    /// The policy in the form that goes into a digest.
    pub(crate) fn words(&self) -> Vec<String> {
        let rule = |rule: &NetworkRule| {
            let NetworkRule { action, to, ports, protocol, private } = rule;
            format!("{action:?} {to} {ports:?} {protocol:?} {private}")
        };
        let head = format!("{} {}", self.spec.mode.word(), self.spec.audit);
        let inject = self.inject.iter().map(|name| format!("inject {name}"));
        std::iter::once(head).chain(self.spec.rules.iter().map(rule)).chain(inject).collect()
    }

    /// The rules that egress enforces.
    pub(crate) fn expand(&self, registries: &Preset) -> Result<Ruleset, EngineError> {
        let expanded = self.spec.expand(registries);
        expanded.map_err(|source| EngineError::Policy { fault: PolicyFault::Rules(source) })
    }
}

/// How a caller changes the policy of a sandbox.
#[derive(Debug, Clone)]
pub enum NetworkChange {
    /// This is the policy from now on.
    Replace(NetworkPolicy),
    /// One more rule.
    Add(NetworkRule),
}

/// The network of a sandbox at one moment.
#[derive(Debug, Clone)]
pub struct NetworkView {
    /// The policy as it was written.
    pub policy: NetworkPolicy,
    /// The rules that the mode stands for, as text. Hosts that only the operator should know are left out.
    pub preset: Vec<String>,
    /// How often programs tried an address without a route. `None` if the sandbox does not run.
    pub attempts: Option<u64>,
    /// What it has used so far.
    pub totals: NetworkTotals,
}

/// What a sandbox has used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NetworkTotals {
    /// Bytes from the sandbox.
    pub sent: u64,
    /// Bytes to the sandbox.
    pub received: u64,
    /// Connections that were opened.
    pub connections: u64,
    /// Connections and names that were refused.
    pub refused: u64,
}

/// One decision, or the end of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkEvent {
    /// Increases with every event.
    pub id: u64,
    /// When it happened.
    pub at: SystemTime,
    /// `opened`, `audited`, `refused`, `name_refused`, `unreachable`, `closed` or `cut`.
    pub what: String,
    /// The name, if there is one.
    pub name: Option<String>,
    /// The address that was dialled, or the literal address that the guest asked for.
    pub address: Option<IpAddr>,
    /// The port; `None` for questions about names.
    pub port: Option<u16>,
    /// `tls`, `http`, `ssh` or `tcp`.
    pub protocol: Option<String>,
    /// What decided.
    pub rule: String,
    /// Why, if the rule does not explain it.
    pub why: Option<String>,
    /// The arguments of `shoal net allow` that would open it.
    pub opens: Option<String>,
    /// Bytes from the sandbox.
    pub sent: u64,
    /// Bytes to the sandbox.
    pub received: u64,
}

/// Which events to read.
#[derive(Debug, Clone, Copy, Default)]
pub struct NetworkEventQuery {
    /// Only events with a larger id. Without it, the newest events.
    pub after: Option<u64>,
    /// Most entries; at most [`crate::PAGE_MAX`].
    pub limit: Option<u32>,
    /// Only what was refused.
    pub refused: bool,
}

/// A host that `registries` opens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PresetHostView {
    /// What uses it.
    pub tool: String,
    /// The host.
    pub host: String,
    /// The ports.
    pub ports: Vec<u16>,
    /// The file or variable that names it; `None` for a tool's default.
    pub source: Option<String>,
    /// Shown to admins only.
    pub private: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(to: &str) -> NetworkRule {
        NetworkRule {
            action: NetworkAction::Allow,
            to: to.into(),
            ports: vec![],
            protocol: None,
            private: false,
        }
    }

    #[test]
    fn a_rule_that_does_not_parse_is_refused_and_a_rule_twice_is_one() {
        let policy = NetworkPolicy::of_mode(NetworkMode::Registries);
        let once = policy.with(rule("example.com")).expect("a rule");
        assert_eq!(once.with(rule("example.com")).expect("again"), once);
        assert_eq!(once.spec().rules.len(), 1);
        for wrong in ["*.com", "a*.example.com", "10.0.0.1/8", "", "localhost"] {
            let error = once.with(rule(wrong)).expect_err(wrong);
            assert!(matches!(error, EngineError::Policy { .. }), "{wrong}: {error}");
        }
    }

    #[test]
    fn only_the_mode_none_without_rules_is_no_network() {
        assert!(NetworkPolicy::default().is_none());
        assert!(!NetworkPolicy::of_mode(NetworkMode::Open).is_none());
        assert!(!NetworkPolicy::default().with(rule("example.com")).expect("a rule").is_none());
    }
}
