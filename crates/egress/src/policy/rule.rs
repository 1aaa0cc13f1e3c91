//! One rule: what it matches and what it decides.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{BadCidr, BadName, Cidr, Name};

/// The most port ranges in one rule.
pub const PORT_RANGES_MAX: usize = 16;

/// What a rule decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Action {
    /// Open it.
    Allow,
    /// Keep it closed.
    Deny,
}

/// The protocol of a connection, as its first bytes show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Protocol {
    /// TLS whose server name is the name of the connection.
    Tls,
    /// Plain HTTP/1 whose every request is for the name of the connection.
    Http,
    /// SSH.
    Ssh,
    /// Any bytes, unchecked. In a rule: the operator vouches for the traffic there.
    Tcp,
}

impl Protocol {
    /// The word in rules.
    pub fn word(self) -> &'static str {
        match self {
            Self::Tls => "tls",
            Self::Http => "http",
            Self::Ssh => "ssh",
            Self::Tcp => "tcp",
        }
    }
}

/// The destinations that a rule covers.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Target {
    /// One name: `example.com`.
    Host(Name),
    /// A name and all names below it: `*.example.com` is `example.com`, `a.example.com`, `a.b.example.com`.
    Suffix(Name),
    /// A block of addresses, or one.
    Block(Cidr),
    /// Every name and every address: `any`.
    Any,
}

/// Ports, as sorted, disjoint ranges. An empty list means every port.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Ports(Vec<(u16, u16)>);

/// One rule, checked.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Rule {
    /// What it decides.
    pub action: Action,
    /// For which destinations.
    pub target: Target,
    /// On which ports.
    pub ports: Ports,
    /// For which protocol; `None` means any, checked for the kinds that egress knows.
    pub protocol: Option<Protocol>,
    /// The host may have private addresses (RFC 1918, unique local, shared). Only for allow rules with a host or suffix.
    pub private: bool,
}

/// A rule as the user wrote it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleSpec {
    /// What it decides.
    pub action: Action,
    /// `example.com`, `*.example.com`, `192.0.2.0/24`, `2001:db8::1` or `any`.
    pub to: String,
    /// `443`, `8000-8999`; none means every port.
    pub ports: Vec<String>,
    /// `tls`, `http`, `ssh`, `tcp`; none means any.
    pub protocol: Option<String>,
    /// See [`Rule::private`].
    pub private: bool,
}

/// Why a rule is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadRule {
    /// Not the name of a host.
    #[error(transparent)]
    Name(#[from] BadName),
    /// Not a block of addresses.
    #[error(transparent)]
    Block(#[from] BadCidr),
    /// A wildcard that is not the first label.
    #[error("a wildcard must be the whole first label, as in `*.example.com`, got `{0}`")]
    Wildcard(String),
    /// Anyone could register a name there.
    #[error(
        "`*.{0}` would open names that anybody can register, because `{0}` is a public suffix: name the hosts or a longer suffix"
    )]
    PublicSuffix(Name),
    /// The sandbox itself.
    #[error("`{0}` is the sandbox itself and needs no rule")]
    Localhost(Name),
    /// Not a port or a range.
    #[error("ports must be numbers from 1 to 65535 or ranges such as 8000-8999, got `{0}`")]
    Port(String),
    /// Too many ranges.
    #[error("a rule has at most {PORT_RANGES_MAX} ranges of ports, got {0}")]
    Ports(usize),
    /// Not a known protocol.
    #[error("a protocol must be one of tls, http, ssh, tcp, got `{0}`")]
    Protocol(String),
    /// `private` where it has no meaning.
    #[error("`private` belongs to allow rules for a host; for addresses, name the block itself")]
    Private,
}

impl RuleSpec {
    /// Parses and checks the rule.
    pub fn check(&self) -> Result<Rule, BadRule> {
        let target = Target::parse(&self.to, self.action)?;
        let protocol = self.protocol.as_deref().map(Protocol::parse).transpose()?;
        let named = matches!(target, Target::Host(_) | Target::Suffix(_));
        if self.private && !(named && self.action == Action::Allow) {
            return Err(BadRule::Private);
        }
        let ports = Ports::parse(&self.ports)?;
        Ok(Rule { action: self.action, target, ports, protocol, private: self.private })
    }
}

impl Protocol {
    /// Parses the word.
    pub fn parse(word: &str) -> Result<Self, BadRule> {
        [Self::Tls, Self::Http, Self::Ssh, Self::Tcp]
            .into_iter()
            .find(|protocol| protocol.word() == word)
            .ok_or_else(|| BadRule::Protocol(word.chars().take(40).collect()))
    }
}

impl Target {
    /// Parses a target. A wildcard below a public suffix is rejected in allow rules; denying `*.zip` is harmless.
    pub fn parse(text: &str, action: Action) -> Result<Self, BadRule> {
        let text = text.trim();
        if text == "any" {
            return Ok(Self::Any);
        }
        if let Some(suffix) = text.strip_prefix("*.") {
            if suffix.contains('*') {
                return Err(BadRule::Wildcard(text.chars().take(80).collect()));
            }
            let suffix = Name::parse(suffix)?;
            if action == Action::Allow && suffix.is_public_suffix() {
                return Err(BadRule::PublicSuffix(suffix));
            }
            return Ok(Self::Suffix(suffix));
        }
        if text.contains('*') {
            return Err(BadRule::Wildcard(text.chars().take(80).collect()));
        }
        let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
        if bare.contains('/') || bare.contains(':') || bare.parse::<std::net::Ipv4Addr>().is_ok() {
            return Ok(Self::Block(bare.parse()?));
        }
        let name = Name::parse(text)?;
        if name.as_str() == "localhost" || name.as_str().ends_with(".localhost") {
            return Err(BadRule::Localhost(name));
        }
        Ok(Self::Host(name))
    }
}

impl Ports {
    /// Every port.
    pub fn any() -> Self {
        Self::default()
    }

    /// These ports.
    pub fn of(ports: &[u16]) -> Self {
        Self::merged(ports.iter().map(|port| (*port, *port)).collect())
    }

    /// Parses numbers and ranges; each text may itself be a comma-separated list.
    pub fn parse(texts: &[String]) -> Result<Self, BadRule> {
        let mut ranges = Vec::new();
        for text in texts.iter().flat_map(|text| text.split(',')) {
            let text = text.trim();
            let bad = || BadRule::Port(text.chars().take(40).collect());
            let number = |text: &str| {
                let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
                text.parse::<u16>().ok().filter(|port| plain && *port > 0).ok_or_else(bad)
            };
            let (first, last) = match text.split_once('-') {
                Some((first, last)) => (number(first.trim())?, number(last.trim())?),
                None => (number(text)?, number(text)?),
            };
            if first > last {
                return Err(bad());
            }
            ranges.push((first, last));
        }
        if ranges.len() > PORT_RANGES_MAX {
            return Err(BadRule::Ports(ranges.len()));
        }
        Ok(Self::merged(ranges))
    }

    fn merged(mut ranges: Vec<(u16, u16)>) -> Self {
        ranges.sort_unstable();
        let mut merged: Vec<(u16, u16)> = Vec::new();
        for (first, last) in ranges {
            match merged.last_mut() {
                Some(before) if u32::from(first) <= u32::from(before.1) + 1 => before.1 = before.1.max(last),
                _ => merged.push((first, last)),
            }
        }
        if merged == [(1, u16::MAX)] {
            merged.clear();
        }
        Self(merged)
    }

    /// Whether this is every port.
    pub fn is_any(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether `port` is one of them.
    pub fn contains(&self, port: u16) -> bool {
        self.is_any() || self.0.iter().any(|(first, last)| (*first..=*last).contains(&port))
    }

    /// How many they are.
    pub fn count(&self) -> u32 {
        if self.is_any() {
            65_535
        } else {
            self.0.iter().map(|(first, last)| u32::from(last - first) + 1).sum()
        }
    }
}

impl Rule {
    /// Allows `target` on `ports`.
    pub fn allow(target: Target, ports: Ports) -> Self {
        Self { action: Action::Allow, target, ports, protocol: None, private: false }
    }

    /// What it matches, without its decision. Two rules that match the same must decide the same.
    pub(super) fn matches_what(&self) -> (&Target, &Ports, Option<Protocol>) {
        (&self.target, &self.ports, self.protocol)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(name) => fmt::Display::fmt(name, f),
            Self::Suffix(name) => write!(f, "*.{name}"),
            Self::Block(block) if block.is_host() => write!(f, "{}", block.address()),
            Self::Block(block) => fmt::Display::fmt(block, f),
            Self::Any => f.write_str("any"),
        }
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (first, last)) in self.0.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            if first == last {
                write!(f, "{comma}{first}")?;
            } else {
                write!(f, "{comma}{first}-{last}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.action == Action::Allow { "allow " } else { "deny " })?;
        fmt::Display::fmt(&self.target, f)?;
        if !self.ports.is_any() {
            write!(f, " port {}", self.ports)?;
        }
        if let Some(protocol) = self.protocol {
            write!(f, " {}", protocol.word())?;
        }
        if self.private {
            f.write_str(" private")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(to: &str, ports: &[&str]) -> RuleSpec {
        RuleSpec {
            action: Action::Allow,
            to: to.into(),
            ports: ports.iter().map(|port| (*port).to_owned()).collect(),
            protocol: None,
            private: false,
        }
    }

    #[test]
    fn rules_are_read_and_written() {
        for (to, ports, text) in [
            ("Example.com", &[][..], "allow example.com"),
            ("*.Example.com", &["443"], "allow *.example.com port 443"),
            ("10.9.0.0/16", &["1-65535"], "allow 10.9.0.0/16"),
            ("[2001:db8::1]", &["80", "82", "81"], "allow 2001:db8::1 port 80-82"),
            ("any", &["22,443"], "allow any port 22,443"),
        ] {
            assert_eq!(spec(to, ports).check().expect("a rule").to_string(), text);
        }
    }

    #[test]
    fn bad_rules_are_refused_with_the_reason() {
        let refused = |to: &str| spec(to, &[]).check().expect_err("must be refused");
        assert!(matches!(refused("*.com"), BadRule::PublicSuffix(_)));
        assert!(matches!(refused("*.co.uk"), BadRule::PublicSuffix(_)));
        assert!(matches!(refused("*.github.io"), BadRule::PublicSuffix(_)));
        assert!(matches!(refused("a.*.com"), BadRule::Wildcard(_)));
        assert!(matches!(refused("*.*.example.com"), BadRule::Wildcard(_)));
        assert!(matches!(refused("*example.com"), BadRule::Wildcard(_)));
        assert!(matches!(refused("*"), BadRule::Wildcard(_)));
        assert!(matches!(refused("10.0.0.1/8"), BadRule::Block(BadCidr::HostBits { .. })));
        assert!(matches!(refused("127.1"), BadRule::Name(BadName::Number(_))));
        assert!(matches!(refused("localhost"), BadRule::Localhost(_)));
        assert!(matches!(refused("https://example.com/"), BadRule::Block(_)));
        for port in ["0", "65536", "a", "", "-1", "2-1", "1-2-3", "+1", "80-"] {
            assert!(matches!(spec("example.com", &[port]).check(), Err(BadRule::Port(_))), "{port}");
        }
        assert!(matches!(Protocol::parse("udp"), Err(BadRule::Protocol(_))));
        let private = RuleSpec { private: true, ..spec("10.0.0.0/8", &[]) };
        assert_eq!(private.check(), Err(BadRule::Private));
    }

    #[test]
    fn a_public_suffix_can_be_denied() {
        let deny = RuleSpec { action: Action::Deny, ..spec("*.zip", &[]) };
        assert!(deny.check().is_ok());
    }
}
