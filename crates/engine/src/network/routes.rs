//! Which routes a policy needs. Pure.
//!
//! Egress decides about every connection. Routes only keep what a policy cannot open from reaching egress at all, so that
//! it fails in `connect` itself.

use egress::policy::{Cidr, Ruleset};
use wire::network::{Hole, HoleAnswer, Prefix, Routes};

/// Addresses that stay without a route while everything else has one. A block of these that a rule or the operator opens
/// in part is left to egress.
const CLOSED: &[(&str, HoleAnswer)] = &[
    ("0.0.0.0/8", HoleAnswer::Unreachable),
    ("10.0.0.0/8", HoleAnswer::Unreachable),
    ("100.64.0.0/10", HoleAnswer::Unreachable),
    ("169.254.0.0/16", HoleAnswer::Prohibited),
    ("172.16.0.0/12", HoleAnswer::Unreachable),
    ("192.168.0.0/16", HoleAnswer::Unreachable),
    ("224.0.0.0/4", HoleAnswer::Unreachable),
    ("240.0.0.0/4", HoleAnswer::Unreachable),
    ("64:ff9b::/32", HoleAnswer::Unreachable),
    ("2002::/16", HoleAnswer::Unreachable),
    ("fc00::/7", HoleAnswer::Unreachable),
    ("fe80::/10", HoleAnswer::Prohibited),
    ("ff00::/8", HoleAnswer::Unreachable),
];

/// The routes of a policy; `None` if it opens nothing. `opened` are blocks that the operator treats as public.
pub(super) fn routes(rules: &Ruleset, opened: &[Cidr]) -> Option<Routes> {
    let wanted = rules.routes();
    if !wanted.names {
        return None;
    }
    if !wanted.everything {
        return Some(Routes::Listed(wanted.blocks.iter().map(prefix).collect()));
    }
    let touched = |closed: &Cidr| {
        wanted.blocks.iter().chain(opened).any(|open| closed.covers(open) || open.covers(closed))
    };
    let holes = CLOSED.iter().filter_map(|(text, answer)| {
        let block: Cidr = text.parse().expect("the table holds blocks, as the test checks");
        (!touched(&block)).then(|| Hole { prefix: prefix(&block), answer: *answer })
    });
    Some(Routes::Open(holes.collect()))
}

fn prefix(block: &Cidr) -> Prefix {
    Prefix { address: block.address(), bits: block.length() }
}

#[cfg(test)]
mod tests {
    use egress::policy::{Action, Mode, Preset, RuleSpec, Spec};

    use super::*;

    fn of(mode: Mode, allow: &[&str], opened: &[Cidr]) -> Option<Routes> {
        let rules = allow.iter().map(|to| RuleSpec {
            action: Action::Allow,
            to: (*to).into(),
            ports: vec![],
            protocol: None,
            private: false,
        });
        let spec = Spec { mode, rules: rules.collect(), audit: false };
        routes(&spec.expand(&Preset::default()).expect("rules"), opened)
    }

    #[test]
    fn nothing_open_needs_no_route_and_names_need_no_address() {
        assert_eq!(of(Mode::None, &[], &[]), None);
        assert_eq!(of(Mode::None, &["example.com"], &[]), Some(Routes::Listed(vec![])));
        assert_eq!(of(Mode::Names, &[], &[]), Some(Routes::Listed(vec![])));
        let Some(Routes::Listed(blocks)) = of(Mode::None, &["10.9.0.0/16"], &[]) else { panic!("a list") };
        assert_eq!(blocks.iter().map(ToString::to_string).collect::<Vec<_>>(), ["10.9.0.0/16"]);
    }

    #[test]
    fn an_open_network_has_holes_except_where_a_rule_opens_a_part() {
        let holes = |routes| match routes {
            Some(Routes::Open(holes)) => holes.iter().map(|hole| hole.prefix.to_string()).collect::<Vec<_>>(),
            other => panic!("everything should have a route: {other:?}"),
        };
        let all = holes(of(Mode::Open, &[], &[]));
        assert_eq!(all.len(), CLOSED.len());
        let fewer = holes(of(Mode::Open, &["10.9.0.0/16"], &["fd00::/8".parse().expect("a block")]));
        assert!(!fewer.contains(&"10.0.0.0/8".to_owned()) && !fewer.contains(&"fc00::/7".to_owned()));
        assert_eq!(fewer.len(), CLOSED.len() - 2);
    }
}
