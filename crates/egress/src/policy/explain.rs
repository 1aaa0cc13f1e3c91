//! Explains decisions in sentences: what decided, and what would open the destination.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{Addresses, Destination, DialDenied, Name, Policy, Protocol, Query, Verdict, Why};

/// A decision for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    /// Whether it passes.
    pub allowed: bool,
    /// Whether it passes only because the policy is in audit mode.
    pub audited: bool,
    /// The rule that decides, as text.
    pub rule: String,
    /// One sentence.
    pub sentence: String,
    /// The arguments of `shoal net allow ID` that would open it; `None` if it is open or if no rule can open it.
    pub opens: Option<String>,
}

/// Why a destination to explain does not parse.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadDestination {
    /// The form is wrong.
    #[error(
        "a destination must look like https://host, http://host, ssh://host or tcp://host:port, got `{0}`"
    )]
    Shape(String),
    /// Plain TCP has no default port.
    #[error("tcp:// needs a port, as in tcp://db.example.com:5432")]
    Port,
}

/// A destination that was read from an address such as `https://example.com/x`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    host: Host,
    port: u16,
    protocol: Protocol,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Host {
    Name(Name),
    Address(IpAddr),
}

impl Asked {
    /// Parses `https://host[:port][/path]` and the like; a host alone means HTTPS.
    pub fn parse(text: &str) -> Result<Self, BadDestination> {
        let shape = || BadDestination::Shape(text.chars().take(80).collect());
        let (scheme, rest) = text.split_once("://").unwrap_or(("https", text));
        let (protocol, default) = match scheme {
            "https" | "wss" | "tls" => (Protocol::Tls, Some(443)),
            "http" | "ws" => (Protocol::Http, Some(80)),
            "ssh" | "git+ssh" => (Protocol::Ssh, Some(22)),
            "tcp" => (Protocol::Tcp, None),
            _ => return Err(shape()),
        };
        let authority = rest.split(['/', '?', '#']).next().unwrap_or(rest);
        let authority = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
        let (host, port) = match authority.strip_prefix('[') {
            Some(rest) => {
                let (host, after) = rest.split_once(']').ok_or_else(shape)?;
                (host, after.strip_prefix(':'))
            }
            None => match authority.split_once(':') {
                // A bare IPv6 address has several colons and no port.
                Some((_, rest)) if rest.contains(':') => (authority, None),
                Some((host, port)) => (host, Some(port)),
                None => (authority, None),
            },
        };
        let port = match port {
            Some(port) => port.parse().ok().filter(|port| *port != 0).ok_or_else(shape)?,
            None => default.ok_or(BadDestination::Port)?,
        };
        let host = match host.parse() {
            Ok(address) => Host::Address(address),
            Err(_) => Host::Name(Name::parse(host).map_err(|_| shape())?),
        };
        Ok(Self { host, port, protocol })
    }

    /// The question.
    pub fn query(&self) -> Query<'_> {
        let to = match &self.host {
            Host::Name(name) => Destination::Name(name),
            Host::Address(address) => Destination::Address(*address),
        };
        Query { to, port: self.port, protocol: self.protocol }
    }
}

impl Policy {
    /// Explains what would happen and why.
    pub fn explain(&self, query: Query<'_>, addresses: &Addresses) -> Explanation {
        let verdict = self.decide(query);
        let rule = verdict.rule_text(self);
        let what = destination(query);
        // A literal address is dialled as it is, so its class is part of the answer.
        if let (true, Destination::Address(address)) = (verdict.allows(), query.to)
            && let Err(denied) = self.may_dial(address, query.port, &verdict, addresses)
        {
            let opens = matches!(&denied, DialDenied::Closed(_)).then(|| address.to_string());
            return Explanation {
                allowed: false,
                audited: false,
                rule,
                sentence: format!("{what} is refused: {denied}"),
                opens,
            };
        }
        Explanation {
            allowed: verdict.allows(),
            audited: verdict.audited,
            sentence: sentence(&verdict, &what, &rule),
            opens: (!verdict.allows() || verdict.audited).then(|| opener(query)),
            rule,
        }
    }
}

fn sentence(verdict: &Verdict, what: &str, rule: &str) -> String {
    if verdict.audited {
        return format!("{what} passes only because the policy is in audit mode; {rule} would refuse it");
    }
    let verb = if verdict.allows() { "allowed" } else { "refused" };
    match verdict.why {
        Why::Rule(_) | Why::Preset => format!("{what} is {verb} by {rule}"),
        Why::Default => format!("{what} is {verb}: no rule names it, and {rule} decides"),
    }
}

/// The destination as text.
pub fn destination(query: Query<'_>) -> String {
    let protocol = query.protocol.word();
    match query.to {
        Destination::Name(name) => format!("{name} port {} ({protocol})", query.port),
        Destination::Address(address) => format!("{address} port {} ({protocol})", query.port),
    }
}

/// The arguments of the command `shoal net allow ID ...`. The usual ports of web hosts are omitted, since a rule for a
/// host covers them too.
pub fn opener(query: Query<'_>) -> String {
    let host = match query.to {
        Destination::Name(name) => name.to_string(),
        Destination::Address(address) => address.to_string(),
    };
    match query.port {
        80 | 443 => host,
        port => format!("{host} --port {port}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Action, Mode, Preset, RuleSpec, Spec};
    use super::*;

    fn policy(mode: Mode, rules: &[(&str, Action)]) -> Policy {
        let rules = rules
            .iter()
            .map(|(to, action)| RuleSpec {
                action: *action,
                to: (*to).into(),
                ports: vec![],
                protocol: None,
                private: false,
            })
            .collect();
        Policy::new(Spec { mode, rules, audit: false }.expand(&Preset::default()).expect("a policy"))
    }

    #[track_caller]
    fn check(policy: &Policy, to: &str, allowed: bool, opens: Option<&str>) {
        let asked = Asked::parse(to).expect("a destination");
        let said = policy.explain(asked.query(), &Addresses::default());
        assert_eq!((said.allowed, said.opens.as_deref()), (allowed, opens), "{said:?}");
    }

    #[test]
    fn explanations_name_the_rule_and_what_opens_it() {
        let closed = policy(Mode::None, &[("db.example.com", Action::Allow)]);
        check(&closed, "https://example.com/path?x", false, Some("example.com"));
        check(&closed, "ssh://git@example.com", false, Some("example.com --port 22"));
        check(&closed, "tcp://db.example.com:5432", true, None);
        let open = policy(Mode::Open, &[("*.bad.example", Action::Deny)]);
        check(&open, "https://[2606:4700::1]:8443/", true, None);
        check(&open, "http://10.0.0.1/", false, Some("10.0.0.1"));
        check(&open, "http://169.254.169.254/latest", false, Some("169.254.169.254"));
        let asked = Asked::parse("https://a.bad.example").expect("a destination");
        let said = open.explain(asked.query(), &Addresses::default());
        assert_eq!(said.sentence, "a.bad.example port 443 (tls) is refused by rule 1: deny *.bad.example");
    }

    #[test]
    fn what_is_no_destination_is_refused() {
        for text in [
            "ftp://example.com",
            "tcp://example.com",
            "https://",
            "https://a b",
            "https://example.com:0",
            "http://127.1/",
        ] {
            assert!(Asked::parse(text).is_err(), "{text}");
        }
    }
}
