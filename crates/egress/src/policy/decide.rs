//! Decides about destinations: defines the one order of rules.
//!
//! For a destination (a name, or an address that was not looked up), a port and a protocol:
//!
//! 1. **Written rules before the mode.** The rules of the policy are checked first, then those that the mode stands
//!    for, then the mode's own default.
//! 2. **The most specific target first.** For names: the exact host, then the longest suffix, then `any`. For addresses: the
//!    longest block, then `any`. The order in which rules are written does not matter.
//! 3. **On one target, the most specific rule first.** Fewer ports before more; a rule for `tls`, `http` or `ssh` before one
//!    for `tcp` before one without a protocol.
//! 4. **Deny before allow** where all of that is equal.
//!
//! The first rule that matches decides. After that, the address that is about to be dialled is checked by
//! [`Policy::may_dial`], for names too: a deny rule for a block holds for whatever name leads there, and closed
//! addresses ([`super::address`]) stay closed unless a rule names them exactly.
//!
//! In audit mode, connections that a rule or a default would refuse pass, and are marked; closed addresses stay closed.

use std::collections::HashMap;
use std::net::IpAddr;

use super::cidr::{bits, masked};
use super::{Action, Addresses, Cidr, Closed, Name, Named, Protocol, Rule, Ruleset, Target};

/// Where a connection or a lookup goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Destination<'a> {
    /// A name that was looked up.
    Name(&'a Name),
    /// A literal address.
    Address(IpAddr),
}

/// A question to the policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Query<'a> {
    /// Where to.
    pub to: Destination<'a>,
    /// On which port.
    pub port: u16,
    /// The protocol. [`Protocol::Tcp`] if it was not recognised.
    pub protocol: Protocol,
}

/// A decision, and its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// Whether it passes.
    pub action: Action,
    /// The rule that decided; `None` when the mode did.
    pub rule: Option<Rule>,
    /// Where the decision comes from.
    pub why: Why,
    /// The rules refuse it, but audit mode lets it pass.
    pub audited: bool,
}

/// Where a decision comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// A rule of the policy, counted from 1.
    Rule(usize),
    /// A rule that the mode stands for.
    Preset,
    /// No rule matched, so the mode's default decided.
    Default,
}

impl Verdict {
    /// Whether it passes.
    pub fn allows(&self) -> bool {
        self.action == Action::Allow
    }

    /// Whether a rule, and not the mode, allows it.
    pub fn is_by_written_rule(&self) -> bool {
        matches!(self.why, Why::Rule(_))
    }

    /// The rule in words, for events and pages.
    pub fn rule_text(&self, policy: &Policy) -> String {
        match (&self.rule, self.why) {
            (Some(rule), Why::Rule(number)) => format!("rule {number}: {rule}"),
            (Some(rule), Why::Preset | Why::Default) => format!("{}: {rule}", policy.rules.mode.word()),
            (None, _) => format!("mode {}", policy.rules.mode.word()),
        }
    }
}

/// A policy, ready for decisions. Ten thousand rules cost no more than ten: rules are looked up by their target.
#[derive(Debug, Default)]
pub struct Policy {
    rules: Ruleset,
    written: Index,
    preset: Index,
}

/// Rules by target. Each list holds indices into a list of rules.
#[derive(Debug, Default)]
struct Index {
    hosts: HashMap<Name, Vec<usize>>,
    suffixes: HashMap<Name, Vec<usize>>,
    /// By family, then by length: the longest first.
    v4: Vec<(u8, HashMap<u128, Vec<usize>>)>,
    v6: Vec<(u8, HashMap<u128, Vec<usize>>)>,
    any: Vec<usize>,
}

impl Index {
    fn of(rules: &[Rule]) -> Self {
        let mut index = Self::default();
        for (at, rule) in rules.iter().enumerate() {
            match &rule.target {
                Target::Host(name) => index.hosts.entry(name.clone()).or_default().push(at),
                Target::Suffix(name) => index.suffixes.entry(name.clone()).or_default().push(at),
                Target::Any => index.any.push(at),
                Target::Block(block) => {
                    let family = if block.address().is_ipv4() { &mut index.v4 } else { &mut index.v6 };
                    let place = family.binary_search_by(|(length, _)| block.length().cmp(length));
                    let place = place.unwrap_or_else(|place| {
                        family.insert(place, (block.length(), HashMap::new()));
                        place
                    });
                    let key = masked(block.address(), block.length());
                    family[place].1.entry(key).or_default().push(at);
                }
            }
        }
        let lists = index.hosts.values_mut().chain(index.suffixes.values_mut()).chain([&mut index.any]);
        let blocks = index.v4.iter_mut().chain(&mut index.v6).flat_map(|(_, blocks)| blocks.values_mut());
        for list in lists.chain(blocks) {
            list.sort_by_key(|at| rank(&rules[*at]));
        }
        index
    }

    /// The lists that match a destination, the most specific first.
    fn about<'a>(&'a self, to: Destination<'a>) -> Box<dyn Iterator<Item = &'a [usize]> + 'a> {
        let any = std::iter::once(self.any.as_slice());
        match to {
            Destination::Name(name) => {
                let exact = self.hosts.get(name.as_str());
                let suffixes = name.and_parents().filter_map(|parent| self.suffixes.get(parent));
                Box::new(exact.into_iter().chain(suffixes).map(Vec::as_slice).chain(any))
            }
            Destination::Address(address) => Box::new(self.blocks(address).chain(any)),
        }
    }

    fn blocks(&self, address: IpAddr) -> impl Iterator<Item = &[usize]> {
        let family = if bits(address) == 32 { &self.v4 } else { &self.v6 };
        family
            .iter()
            .filter_map(move |(length, blocks)| blocks.get(&masked(address, *length)))
            .map(Vec::as_slice)
    }
}

/// Steps 3 and 4 of the order.
fn rank(rule: &Rule) -> (u32, u8, bool) {
    let protocol = match rule.protocol {
        Some(Protocol::Tls | Protocol::Http | Protocol::Ssh) => 0,
        Some(Protocol::Tcp) => 1,
        None => 2,
    };
    (rule.ports.count(), protocol, rule.action == Action::Allow)
}

fn matches(rule: &Rule, port: u16, protocol: Protocol) -> bool {
    rule.ports.contains(port)
        && rule.protocol.is_none_or(|wanted| wanted == protocol || wanted == Protocol::Tcp)
}

impl Policy {
    /// Prepares a set of rules.
    pub fn new(rules: Ruleset) -> Self {
        let (written, preset) = (Index::of(&rules.rules), Index::of(&rules.preset));
        Self { rules, written, preset }
    }

    /// The rules.
    pub fn rules(&self) -> &Ruleset {
        &self.rules
    }

    fn layers(&self) -> [(&Index, &[Rule], bool); 2] {
        [(&self.written, &self.rules.rules, true), (&self.preset, &self.rules.preset, false)]
    }

    /// Decides, in the order that this module documents.
    pub fn decide(&self, query: Query<'_>) -> Verdict {
        let to = canonical(query.to);
        for (index, rules, written) in self.layers() {
            let found =
                index.about(to).flatten().find(|at| matches(&rules[**at], query.port, query.protocol));
            if let Some(at) = found {
                let why = if written { Why::Rule(at + 1) } else { Why::Preset };
                return self.verdict(rules[*at].action, Some(rules[*at].clone()), why);
            }
        }
        self.verdict(self.default_for(to), None, Why::Default)
    }

    /// Whether a name may be looked up: whether any port and protocol of it is open. Other names are never asked
    /// upstream.
    pub fn resolves(&self, name: &Name) -> Verdict {
        for (index, rules, written) in self.layers() {
            for at in index.about(Destination::Name(name)).flatten() {
                let rule = &rules[*at];
                // A rule that denies some ports or protocols leaves others to the rules after it.
                if rule.action == Action::Allow || (rule.ports.is_any() && is_every_protocol(rule)) {
                    let why = if written { Why::Rule(at + 1) } else { Why::Preset };
                    return self.verdict(rule.action, Some(rule.clone()), why);
                }
            }
        }
        self.verdict(self.rules.default_for_names(), None, Why::Default)
    }

    /// Whether an address may be dialled for a connection that [`decide`](Self::decide) has allowed with `verdict`.
    pub fn may_dial(
        &self,
        address: IpAddr,
        port: u16,
        verdict: &Verdict,
        addresses: &Addresses,
    ) -> Result<(), DialDenied> {
        let address = address.to_canonical();
        let mut blocks: Vec<Cidr> = Vec::new();
        let mut decided = false;
        for at in self.written.blocks(address).flatten() {
            let rule = &self.rules.rules[*at];
            if !rule.ports.contains(port) {
                continue;
            }
            match (&rule.target, rule.action) {
                (Target::Block(_), Action::Deny) if !decided => {
                    if !self.rules.audit {
                        return Err(DialDenied::Rule { address, rule: rule.clone() });
                    }
                    decided = true;
                }
                (Target::Block(block), Action::Allow) => {
                    decided = true;
                    blocks.push(*block);
                }
                _ => {}
            }
        }
        let private_host = verdict.allows() && verdict.rule.as_ref().is_some_and(|rule| rule.private);
        addresses.may_dial(address, Named { blocks: &blocks, private_host }).map_err(DialDenied::Closed)
    }

    fn default_for(&self, to: Destination<'_>) -> Action {
        match to {
            Destination::Name(_) => self.rules.default_for_names(),
            Destination::Address(_) => self.rules.default_for_addresses(),
        }
    }

    fn verdict(&self, action: Action, rule: Option<Rule>, why: Why) -> Verdict {
        let audited = action == Action::Deny && self.rules.audit;
        Verdict { action: if audited { Action::Allow } else { action }, rule, why, audited }
    }
}

fn is_every_protocol(rule: &Rule) -> bool {
    matches!(rule.protocol, None | Some(Protocol::Tcp))
}

fn canonical(to: Destination<'_>) -> Destination<'_> {
    match to {
        Destination::Address(address) => Destination::Address(address.to_canonical()),
        name @ Destination::Name(_) => name,
    }
}

/// Why an address is not dialled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DialDenied {
    /// The address is closed.
    #[error(transparent)]
    Closed(Closed),
    /// A rule denies the block that the name led to.
    #[error("{address} is refused by `{rule}`")]
    Rule {
        /// The address.
        address: IpAddr,
        /// The rule.
        rule: Rule,
    },
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::super::{Mode, PolicyError, Ports, Preset, PresetHost, RuleSpec, Spec};
    use super::*;

    /// `allow *.example.com 443 tls private` and the like.
    fn rule(text: &str) -> RuleSpec {
        let mut words = text.split(' ');
        let action = match words.next() {
            Some("allow") => Action::Allow,
            Some("deny") => Action::Deny,
            other => panic!("{other:?}"),
        };
        let to = words.next().expect("a target").to_owned();
        let mut spec = RuleSpec { action, to, ports: vec![], protocol: None, private: false };
        for word in words {
            match word {
                "private" => spec.private = true,
                word if word.starts_with(|c: char| c.is_ascii_digit()) => spec.ports.push(word.to_owned()),
                word => spec.protocol = Some(word.to_owned()),
            }
        }
        spec
    }

    fn preset() -> Preset {
        let host = |host: &str, ports: &[u16], ssh| PresetHost {
            host: Name::parse(host).expect("a name"),
            ports: ports.to_vec(),
            ssh,
            private: false,
        };
        Preset {
            hosts: vec![
                host("index.example", &[443], false),
                host("code.example", &[443], false),
                host("code.example", &[22], true),
            ],
        }
    }

    fn policy(mode: Mode, rules: &[&str]) -> Policy {
        let spec = Spec { mode, rules: rules.iter().map(|text| rule(text)).collect(), audit: false };
        Policy::new(spec.expand(&preset()).expect("a policy"))
    }

    #[track_caller]
    fn check(policy: &Policy, to: &str, expected: Action) {
        let (host, rest) = to.rsplit_once(':').expect("host:port");
        let (port, protocol) = rest.split_once(' ').unwrap_or((rest, "tls"));
        let port = port.parse().expect("a port");
        let protocol = Protocol::parse(protocol).expect("a protocol");
        let bare = host.trim_matches(['[', ']']);
        let verdict = match bare.parse() {
            Ok(address) => policy.decide(Query { to: Destination::Address(address), port, protocol }),
            Err(_) => {
                let name = Name::parse(host).expect("a name");
                policy.decide(Query { to: Destination::Name(&name), port, protocol })
            }
        };
        assert_eq!(verdict.action, expected, "{to}: {verdict:?}");
    }

    use Action::{Allow, Deny};

    #[test]
    fn modes_open_what_they_say() {
        let none = policy(Mode::None, &[]);
        check(&none, "index.example:443", Deny);
        check(&none, "8.8.8.8:443", Deny);
        let registries = policy(Mode::Registries, &[]);
        check(&registries, "index.example:443", Allow);
        check(&registries, "index.example:80 http", Deny);
        check(&registries, "evil.index.example:443", Deny);
        check(&registries, "code.example:22 ssh", Allow);
        check(&registries, "code.example:22 tcp", Deny);
        check(&registries, "8.8.8.8:443", Deny);
        let names = policy(Mode::Names, &[]);
        check(&names, "example.com:12345 tcp", Allow);
        check(&names, "8.8.8.8:443", Deny);
        let open = policy(Mode::Open, &[]);
        check(&open, "example.com:12345 tcp", Allow);
        check(&open, "8.8.8.8:443", Allow);
    }

    #[test]
    fn a_wildcard_matches_its_apex_and_whole_labels_only() {
        let policy = policy(Mode::None, &["allow *.example.com"]);
        check(&policy, "example.com:443", Allow);
        check(&policy, "a.example.com:443", Allow);
        check(&policy, "a.b.example.com:443", Allow);
        check(&policy, "notexample.com:443", Deny);
        check(&policy, "example.com.evil.org:443", Deny);
        check(&policy, "com:443", Deny);
    }

    #[test]
    fn the_most_specific_target_decides() {
        let rules = [
            "deny *.example.com",
            "allow api.example.com",
            "allow *.ok.example.com",
            "deny x.ok.example.com",
        ];
        let policy = policy(Mode::Open, &rules);
        check(&policy, "example.com:443", Deny);
        check(&policy, "api.example.com:443", Allow);
        check(&policy, "a.ok.example.com:443", Allow);
        check(&policy, "x.ok.example.com:443", Deny);
        check(&policy, "other.org:443", Allow);
    }

    #[test]
    fn written_rules_come_before_the_mode() {
        let policy = policy(Mode::Registries, &["deny *.index.example", "deny any 22"]);
        check(&policy, "index.example:443", Deny);
        check(&policy, "code.example:443", Allow);
        check(&policy, "code.example:22 ssh", Deny);
    }

    #[test]
    fn ports_and_protocols_narrow_a_rule() {
        let rules = [
            "allow a.example 443 tls",
            "allow b.example 8000-8100",
            "deny b.example 8080",
            "allow c.example tcp",
            "deny c.example http",
        ];
        let policy = policy(Mode::None, &rules);
        check(&policy, "a.example:443", Allow);
        check(&policy, "a.example:443 http", Deny);
        check(&policy, "a.example:443 tcp", Deny);
        check(&policy, "a.example:444", Deny);
        check(&policy, "b.example:8000 tcp", Allow);
        check(&policy, "b.example:8080 tcp", Deny);
        check(&policy, "b.example:8101 tcp", Deny);
        check(&policy, "c.example:9 tls", Allow);
        check(&policy, "c.example:9 http", Deny);
    }

    #[test]
    fn the_longest_block_decides_for_addresses() {
        let rules =
            ["allow 192.0.2.0/24", "deny 192.0.2.128/25", "allow 192.0.2.200 443", "allow 2001:db8::/32 22"];
        let policy = policy(Mode::None, &rules);
        check(&policy, "192.0.2.1:80", Allow);
        check(&policy, "192.0.2.129:80", Deny);
        check(&policy, "192.0.2.200:443", Allow);
        check(&policy, "192.0.2.200:80", Deny);
        check(&policy, "[::ffff:192.0.2.1]:80", Allow);
        check(&policy, "[2001:db8::1]:22 ssh", Allow);
        check(&policy, "[2001:db8::1]:23 ssh", Deny);
        check(&policy, "name.example:80", Deny);
    }

    #[test]
    fn a_name_resolves_when_some_port_of_it_is_open() {
        let policy = policy(
            Mode::None,
            &["allow a.example 443", "deny b.example", "allow *.example 1", "deny c.example 80"],
        );
        let resolves = |name: &str| policy.resolves(&Name::parse(name).expect("a name")).allows();
        assert!(resolves("a.example") && resolves("c.example") && resolves("z.example"));
        assert!(!resolves("b.example") && !resolves("a.other"));
    }

    #[test]
    fn a_denied_block_holds_for_whatever_name_leads_there() {
        let policy =
            policy(Mode::Open, &["deny 192.0.2.0/24", "allow 192.0.2.7 443", "allow db.example private"]);
        let allowed = policy.decide(Query {
            to: Destination::Name(&Name::parse("a.example").expect("a name")),
            port: 443,
            protocol: Protocol::Tls,
        });
        let dial = |address: &str, port, verdict: &Verdict| {
            policy
                .may_dial(address.parse().expect("an address"), port, verdict, &Addresses::default())
                .is_ok()
        };
        assert!(!dial("192.0.2.1", 443, &allowed));
        assert!(!dial("::ffff:192.0.2.1", 443, &allowed));
        assert!(dial("192.0.2.7", 443, &allowed));
        assert!(!dial("192.0.2.7", 80, &allowed));
        assert!(dial("198.51.100.1", 443, &allowed));
        assert!(!dial("10.0.0.1", 443, &allowed), "a name must not lead to a private address");
        let private = policy.decide(Query {
            to: Destination::Name(&Name::parse("db.example").expect("a name")),
            port: 443,
            protocol: Protocol::Tls,
        });
        assert!(dial("10.0.0.1", 443, &private));
        assert!(!dial("169.254.169.254", 443, &private));
    }

    #[test]
    fn audit_lets_pass_and_marks_but_opens_no_closed_address() {
        let spec = Spec { mode: Mode::None, rules: vec![rule("deny 192.0.2.0/24")], audit: true };
        let policy = Policy::new(spec.expand(&Preset::default()).expect("a policy"));
        let name = Name::parse("a.example").expect("a name");
        let verdict = policy.decide(Query { to: Destination::Name(&name), port: 1, protocol: Protocol::Tcp });
        assert!(verdict.allows() && verdict.audited);
        assert!(policy.resolves(&name).audited);
        let dial = |text: &str| {
            policy.may_dial(text.parse().expect("an address"), 1, &verdict, &Addresses::default())
        };
        assert!(dial("192.0.2.1").is_ok());
        assert!(dial("10.0.0.1").is_err() && dial("169.254.169.254").is_err() && dial("127.0.0.1").is_err());
    }

    #[test]
    fn contradictions_are_refused_and_repetitions_are_not() {
        let expand = |rules: &[&str]| {
            Spec { rules: rules.iter().map(|text| rule(text)).collect(), ..Spec::default() }
                .expand(&Preset::default())
        };
        assert!(matches!(
            expand(&["allow a.example 443", "allow b.example", "deny A.example 443"]),
            Err(PolicyError::Contradiction { first: 1, second: 3, .. })
        ));
        assert!(expand(&["allow a.example", "allow a.example", "deny a.example 80"]).is_ok());
        assert!(matches!(
            expand(&["allow a.example", "allow *.com"]),
            Err(PolicyError::Rule { number: 2, .. })
        ));
    }

    #[test]
    fn ten_thousand_rules_are_as_quick_as_ten() {
        let rules: Vec<RuleSpec> = (0..10_000)
            .map(|at| match at % 3 {
                0 => rule(&format!("allow host{at}.example.com 443")),
                1 => rule(&format!("allow *.suffix{at}.example.org")),
                _ => rule(&format!("allow 10.{}.{}.0/24", at / 256, at % 256)),
            })
            .collect();
        let policy =
            Policy::new(Spec { rules, ..Spec::default() }.expand(&Preset::default()).expect("a policy"));
        let name = Name::parse("a.b.c.suffix9997.example.org").expect("a name");
        let began = std::time::Instant::now();
        for _ in 0..1_000 {
            assert!(
                policy
                    .decide(Query { to: Destination::Name(&name), port: 443, protocol: Protocol::Tls })
                    .allows()
            );
            let to = Destination::Address(IpAddr::V4(Ipv4Addr::new(10, 39, 14, 9)));
            assert!(policy.decide(Query { to, port: 1, protocol: Protocol::Tcp }).allows());
        }
        // A scan of the list would take a hundred times as long, even on a busy machine.
        assert!(began.elapsed().as_millis() < 500, "{:?}", began.elapsed());
    }

    fn names() -> impl Strategy<Value = Name> {
        "[ab](\\.[ab]){0,3}\\.example".prop_map(|text| Name::parse(&text).expect("a name"))
    }

    fn rules() -> impl Strategy<Value = Vec<Rule>> {
        let target = prop_oneof![
            names().prop_map(Target::Host),
            names().prop_map(Target::Suffix),
            Just(Target::Any),
            (0u32..8, 29u8..=32).prop_map(|(low, length)| {
                let mask = u32::MAX << (32 - length);
                let base = u32::from_be_bytes([192, 0, 2, 0]) | low;
                Target::Block(
                    format!("{}/{length}", Ipv4Addr::from_bits(base & mask)).parse().expect("a block"),
                )
            }),
        ];
        let ports = prop_oneof![
            Just(Ports::any()),
            (1u16..4).prop_map(|port| Ports::of(&[port])),
            Just(Ports::of(&[1, 2]))
        ];
        let protocol = prop_oneof![Just(None), Just(Some(Protocol::Tls)), Just(Some(Protocol::Tcp))];
        let action = prop_oneof![Just(Allow), Just(Deny)];
        let rule = (action, target, ports, protocol).prop_map(|(action, target, ports, protocol)| Rule {
            action,
            target,
            ports,
            protocol,
            private: false,
        });
        proptest::collection::vec(rule, 0..12)
    }

    /// The documented order, implemented as slowly and plainly as possible.
    fn slowly(rules: &Ruleset, query: Query<'_>) -> Action {
        let specific = |rule: &Rule| match (&rule.target, query.to) {
            (Target::Host(host), Destination::Name(name)) if host == name => Some(1000),
            (Target::Suffix(suffix), Destination::Name(name)) if name.is_within(suffix) => {
                Some(1 + suffix.as_str().len())
            }
            (Target::Block(block), Destination::Address(address)) if block.contains(address) => {
                Some(1 + usize::from(block.length()))
            }
            (Target::Any, _) => Some(0),
            _ => None,
        };
        for layer in [&rules.rules, &rules.preset] {
            let matching = layer.iter().filter(|rule| matches(rule, query.port, query.protocol));
            let best = matching
                .filter_map(|rule| specific(rule).map(|by| (std::cmp::Reverse(by), rank(rule), rule.action)))
                .min_by_key(|(by, rank, _)| (*by, *rank));
            if let Some((_, _, action)) = best {
                return action;
            }
        }
        match query.to {
            Destination::Name(_) => rules.default_for_names(),
            Destination::Address(_) => rules.default_for_addresses(),
        }
    }

    proptest! {
        #[test]
        fn decisions_follow_the_documented_order(
            rules in rules(), preset in rules(), mode in 0usize..4, name in names(), low in 0u8..8, port in 1u16..5, tls: bool, by_name: bool,
        ) {
            let mode = [Mode::None, Mode::Registries, Mode::Names, Mode::Open][mode];
            let set = Ruleset { mode, rules, preset, audit: false };
            let policy = Policy::new(set.clone());
            let to = if by_name { Destination::Name(&name) } else { Destination::Address(IpAddr::V4(Ipv4Addr::new(192, 0, 2, low))) };
            let query = Query { to, port, protocol: if tls { Protocol::Tls } else { Protocol::Tcp } };
            prop_assert_eq!(policy.decide(query).action, slowly(&set, query));
        }

        #[test]
        fn the_order_of_rules_does_not_matter(rules in rules(), name in names(), port in 1u16..5) {
            let query = Query { to: Destination::Name(&name), port, protocol: Protocol::Tls };
            let mut turned = rules.clone();
            turned.reverse();
            let decide = |rules| Policy::new(Ruleset { rules, ..Ruleset::default() }).decide(query).action;
            prop_assert_eq!(decide(rules), decide(turned));
        }

        #[test]
        fn what_does_not_resolve_is_open_on_no_port(rules in rules(), name in names(), port in 1u16..5, tls: bool) {
            let policy = Policy::new(Ruleset { rules, ..Ruleset::default() });
            if !policy.resolves(&name).allows() {
                let protocol = if tls { Protocol::Tls } else { Protocol::Tcp };
                let verdict = policy.decide(Query { to: Destination::Name(&name), port, protocol });
                prop_assert!(!verdict.allows());
            }
        }

        #[test]
        fn a_deny_rule_more_never_opens_anything(rules in rules(), name in names(), port in 1u16..5, which: bool) {
            let query = Query { to: Destination::Name(&name), port, protocol: Protocol::Tls };
            let before = Policy::new(Ruleset { rules: rules.clone(), mode: Mode::Open, ..Ruleset::default() }).decide(query).action;
            let target = if which { Target::Host(name.clone()) } else { Target::Any };
            let mut more = rules;
            more.push(Rule { action: Deny, target, ports: Ports::any(), protocol: None, private: false });
            let after = Policy::new(Ruleset { rules: more, mode: Mode::Open, ..Ruleset::default() }).decide(query).action;
            prop_assert!(before == Allow || after == Deny);
        }
    }
}
