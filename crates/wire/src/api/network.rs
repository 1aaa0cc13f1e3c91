//! Bodies about networks: what a sandbox may reach, and what it reached.

use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

/// What a sandbox may reach: one word, or a policy with rules.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum Network {
    /// `none`, `registries` or `open`.
    Mode(NetworkMode),
    /// A mode with rules.
    Policy(NetworkPolicy),
}

impl<'de> Deserialize<'de> for Network {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error;
        // By hand, so that an error names the field that is wrong.
        match serde_json::Value::deserialize(deserializer)? {
            word @ serde_json::Value::String(_) => {
                NetworkMode::deserialize(word).map(Self::Mode).map_err(D::Error::custom)
            }
            policy @ serde_json::Value::Object(_) => {
                NetworkPolicy::deserialize(policy).map(Self::Policy).map_err(D::Error::custom)
            }
            _ => Err(D::Error::custom(
                "expected a mode such as \"registries\", or an object with `mode` and `rules`",
            )),
        }
    }
}

/// What is open without any rule.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum NetworkMode {
    /// Nothing.
    #[default]
    None,
    /// Package registries and code hosts, as found on the daemon's machine and listed by its operator.
    Registries,
    /// Every name on every port, but no literal address.
    Names,
    /// Every name and every public address.
    Open,
}

/// A policy.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NetworkPolicy {
    /// What is open without any rule. Default: `none`.
    pub mode: NetworkMode,
    /// Rules, at most 10,000. They take precedence over the mode; the most specific one decides.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<NetworkRule>,
    /// Let connections pass that the rules refuse, and report them. Private and metadata addresses stay closed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub audit: bool,
    /// Names of secrets that requests may carry, at most 32. Their hosts are opened.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub inject: Vec<String>,
}

/// A rule.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NetworkRule {
    /// Default: `allow`.
    #[serde(default)]
    pub action: NetworkAction,
    /// `example.com`, `*.example.com` (which includes `example.com`), `192.0.2.0/24`, `2001:db8::1` or `any`.
    pub to: String,
    /// Ports and ranges such as `443` or `8000-8999`. Default: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<String>,
    /// `tls`, `http`, `ssh` or `tcp`. Default: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
    /// The host may have private addresses. Only for allow rules with a host.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub private: bool,
}

/// What a rule decides.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum NetworkAction {
    /// Open it.
    #[default]
    Allow,
    /// Keep it closed.
    Deny,
}

/// `GET /v1/sandboxes/{sandbox}/network`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SandboxNetwork {
    /// The policy as it was written.
    pub policy: NetworkPolicy,
    /// The rules that the mode stands for, as text. Hosts that only the operator should know are left out.
    pub preset: Vec<String>,
    /// How often programs tried an address without a route; absent if the sandbox does not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempts: Option<u64>,
    /// What it has used so far.
    pub totals: NetworkTotals,
}

/// What a sandbox has used. At most ten seconds old.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkTotals {
    /// Bytes from the sandbox.
    pub sent_bytes: u64,
    /// Bytes to the sandbox.
    pub received_bytes: u64,
    /// Connections that were opened.
    pub connections: u64,
    /// Connections and names that were refused.
    pub refused: u64,
}

/// `GET /v1/sandboxes/{sandbox}/network/explain`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NetworkExplanation {
    /// Whether the connection passes.
    pub allowed: bool,
    /// Whether it passes only because the policy is in audit mode.
    pub audited: bool,
    /// The rule that decides.
    pub rule: String,
    /// One sentence.
    pub sentence: String,
    /// The arguments of `shoal net allow` that would open it; absent if it is open, or if no rule can open it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opens: Option<String>,
}

/// `GET /v1/sandboxes/{sandbox}/network/events`, oldest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NetworkEventList {
    /// The events.
    pub events: Vec<NetworkEvent>,
}

/// One decision, or the end of a connection.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NetworkEvent {
    /// Increases with every event; pass it as `after` to get later ones.
    pub id: u64,
    /// When it happened.
    pub at: String,
    /// `opened`, `audited`, `refused`, `name_refused`, `unreachable`, `closed` or `cut`.
    pub what: String,
    /// The name, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The address that was dialled, or the literal address that a program asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The port; absent for questions about names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// `tls`, `http`, `ssh` or `tcp`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
    /// What decided.
    pub rule: String,
    /// Why, if the rule does not explain it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// The arguments of `shoal net allow` that would open it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opens: Option<String>,
    /// Bytes from the sandbox.
    pub sent_bytes: u64,
    /// Bytes to the sandbox.
    pub received_bytes: u64,
}

/// `GET /v1/network/presets`: the hosts that `registries` opens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NetworkPresets {
    /// The hosts.
    pub hosts: Vec<PresetHost>,
}

/// A host that `registries` opens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PresetHost {
    /// What uses it.
    pub tool: String,
    /// The host.
    pub host: String,
    /// The ports.
    pub ports: Vec<u16>,
    /// The file or variable that names it, for keys with admin rights; absent for a tool's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

/// What a command tried, in a sandbox without a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CommandNetwork {
    /// How often programs in the sandbox tried to reach a network until the command ended, and since the command before ended.
    pub attempts: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_is_a_word_or_a_policy_and_errors_name_the_field() {
        let parse = |text: &str| serde_json::from_str::<Network>(text);
        assert_eq!(parse("\"registries\"").expect("a word"), Network::Mode(NetworkMode::Registries));
        let Network::Policy(policy) = parse(r#"{"rules": [{"to": "example.com"}]}"#).expect("a policy")
        else {
            panic!("it has rules");
        };
        assert_eq!(policy.rules[0].action, NetworkAction::Allow);
        for (text, field) in [
            ("\"all\"", "registries"),
            (r#"{"rule": []}"#, "rule"),
            (r#"{"rules": [{}]}"#, "to"),
            ("3", "mode"),
        ] {
            let error = parse(text).expect_err(text).to_string();
            assert!(error.contains(field), "{text}: {error}");
        }
    }
}
