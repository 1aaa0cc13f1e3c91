//! Vendors' words for networks, as policies of ours.

use engine::{EngineError, NetworkAction, NetworkMode, NetworkPolicy, NetworkRule, NetworkSpec};

/// The public internet: the default of most vendors.
pub fn open() -> NetworkPolicy {
    NetworkPolicy::of_mode(NetworkMode::Open)
}

/// Every name, and no literal address.
pub fn names() -> NetworkPolicy {
    NetworkPolicy::of_mode(NetworkMode::Names)
}

/// Nothing.
pub fn closed() -> NetworkPolicy {
    NetworkPolicy::default()
}

/// A mode with some targets that are allowed and some that are denied: names, addresses or blocks of addresses.
pub fn with(mode: NetworkMode, allow: &[String], deny: &[String]) -> Result<NetworkPolicy, EngineError> {
    let rule = |action: NetworkAction| {
        move |to: &String| NetworkRule {
            action,
            to: to.trim().to_owned(),
            ports: Vec::new(),
            protocol: None,
            private: false,
        }
    };
    let allowed = allow.iter().map(rule(NetworkAction::Allow));
    let rules = allowed.chain(deny.iter().map(rule(NetworkAction::Deny))).collect();
    NetworkPolicy::new(NetworkSpec { mode, rules, audit: false })
}
