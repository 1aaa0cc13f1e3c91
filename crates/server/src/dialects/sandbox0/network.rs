//! What a sandbox may reach, in the vendor's words, as a policy of ours.
//!
//! Theirs is an ordered list: the first rule that matches decides, and then the mode. Ours has no order: the most specific rule decides.
//! So a list is taken if the order makes no difference, or if it goes from the more to the less specific; any other is refused, since it
//! would mean something else here.

use axum::extract::State;
use engine::{
    NetworkAction, NetworkChange, NetworkMode, NetworkPolicy, NetworkRule, NetworkSpec, NoteChanges, Sandbox,
    SandboxUpdate,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::answer::{Answer, done};
use super::error::Refusal;
use super::notes::NETWORK;
use super::read::{Body, Meant};
use crate::http::app::App;

/// A policy as clients write it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Written {
    mode: Mode,
    egress: Option<Egress>,
    credential_bindings: Option<Vec<Value>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Mode {
    AllowAll,
    BlockAll,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Egress {
    allowed_domains: Option<Vec<String>>,
    allowed_cidrs: Option<Vec<String>>,
    allowed_ports: Option<Vec<Port>>,
    denied_domains: Option<Vec<String>>,
    denied_cidrs: Option<Vec<String>>,
    denied_ports: Option<Vec<Port>>,
    traffic_rules: Option<Vec<Rule>>,
    protocol_rules: Option<Vec<Value>>,
    credential_rules: Option<Vec<Value>>,
    proxy: Option<Value>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Action {
    Allow,
    Deny,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Rule {
    action: Action,
    #[serde(default)]
    domains: Option<Vec<String>>,
    #[serde(default)]
    cidrs: Option<Vec<String>>,
    #[serde(default)]
    ports: Option<Vec<Port>>,
    #[serde(default)]
    app_protocols: Option<Vec<String>>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Port {
    port: u16,
    #[serde(default)]
    end_port: Option<u16>,
    #[serde(default)]
    protocol: Option<String>,
}

impl Port {
    fn text(&self) -> Result<String, Refusal> {
        if self.protocol.as_deref().is_some_and(|protocol| protocol != "tcp") {
            return Err(Refusal::unsupported("sandboxes reach other hosts by TCP alone: a port is of `tcp`"));
        }
        Ok(match self.end_port {
            Some(end) if end != self.port => format!("{}-{end}", self.port),
            _ => self.port.to_string(),
        })
    }

    fn overlaps(&self, other: &Self) -> bool {
        let end = |port: &Self| port.end_port.unwrap_or(port.port);
        self.port <= end(other) && other.port <= end(self)
    }
}

/// The rules of ours that one of theirs becomes. `protocols` that we cannot tell apart are refused.
fn rules(rule: &Rule) -> Result<Vec<NetworkRule>, Refusal> {
    let action = match rule.action {
        Action::Allow => NetworkAction::Allow,
        Action::Deny => NetworkAction::Deny,
    };
    let listed = |list: &Option<Vec<String>>| list.clone().unwrap_or_default();
    let mut targets = listed(&rule.domains);
    targets.extend(listed(&rule.cidrs));
    let ports: Vec<String> = rule.ports.iter().flatten().map(Port::text).collect::<Result<_, _>>()?;
    let named = listed(&rule.app_protocols);
    if targets.is_empty() && ports.is_empty() && named.is_empty() {
        return Err(Refusal::must("trafficRules", "each have domains, cidrs, ports or appProtocols"));
    }
    if targets.is_empty() {
        targets.push("any".into());
    }
    let protocols = match named.is_empty() {
        true => vec![None],
        false => named.into_iter().map(protocol).collect::<Result<_, _>>()?,
    };
    let mut made = Vec::new();
    for to in &targets {
        for protocol in &protocols {
            let (to, ports, protocol) = (to.to_lowercase(), ports.clone(), protocol.clone());
            made.push(NetworkRule { action, to, ports, protocol, private: false });
        }
    }
    Ok(made)
}

fn protocol(word: String) -> Result<Option<String>, Refusal> {
    match word.as_str() {
        "tls" | "http" | "ssh" => Ok(Some(word)),
        _ => {
            let shown = engine::shown(&word);
            let message = format!(
                "this server cannot tell `{shown}` from other traffic: use `tls`, `http`, `ssh`, or ports"
            );
            Err(Refusal::unsupported(message))
        }
    }
}

/// Whether one target lies in another, and is not the same.
fn is_within(inner: &str, outer: &str) -> bool {
    match (inner, outer) {
        (inner, "any") => inner != "any",
        (inner, outer) => {
            let Some(suffix) = outer.strip_prefix("*.") else { return false };
            let name = inner.strip_prefix("*.").unwrap_or(inner);
            inner != outer && (name == suffix || name.ends_with(&format!(".{suffix}")))
        }
    }
}

fn is_block(to: &str) -> bool {
    to.split('/').next().is_some_and(|address| address.parse::<std::net::IpAddr>().is_ok())
}

/// Whether the earlier of two rules, which decide otherwise, decides here too, or both never match the same.
fn keeps_order(first: &Rule, second: &Rule) -> bool {
    let ports = |rule: &Rule| rule.ports.clone().unwrap_or_default();
    let (one, two) = (ports(first), ports(second));
    if !one.is_empty()
        && !two.is_empty()
        && !one.iter().any(|port| two.iter().any(|other| port.overlaps(other)))
    {
        return true;
    }
    let targets = |rule: &Rule| -> Vec<String> {
        let all = rule.domains.iter().chain(&rule.cidrs).flatten().map(|to| to.to_lowercase());
        let all: Vec<String> = all.collect();
        if all.is_empty() { vec!["any".into()] } else { all }
    };
    let (one, two) = (targets(first), targets(second));
    one.iter().all(|a| {
        two.iter().all(|b| match (is_block(a), is_block(b)) {
            // Which names lead to which addresses is not known here, and blocks may lie in each other.
            (true, _) | (_, true) => is_within(a, b),
            (false, false) => is_within(a, b) || (a != b && !is_within(b, a)),
        })
    })
}

/// The policy that a client's text means. Refused if it means what this server cannot do.
pub fn policy(text: &Value) -> Result<NetworkPolicy, Refusal> {
    let written = Written::deserialize(text);
    let Written { mode, egress, credential_bindings } =
        written.map_err(|error| Refusal::bad(format!("the network policy is not valid: {error}")))?;
    let egress = egress.unwrap_or_default();
    let some = |list: &Option<Vec<Value>>| list.as_ref().is_some_and(|list| !list.is_empty());
    for (field, given) in [
        ("credentialBindings", some(&credential_bindings)),
        ("egress.credentialRules", some(&egress.credential_rules)),
        ("egress.protocolRules", some(&egress.protocol_rules)),
        ("egress.proxy", egress.proxy.as_ref().is_some_and(|proxy| !proxy.is_null())),
    ] {
        if given {
            let message =
                format!("this server does not enforce `{field}`: name hosts and ports in `trafficRules`");
            return Err(Refusal::unsupported(message));
        }
    }
    let ordered = egress.traffic_rules.unwrap_or_default();
    let allowed = Rule {
        action: Action::Allow,
        domains: egress.allowed_domains,
        cidrs: egress.allowed_cidrs,
        ports: egress.allowed_ports,
        app_protocols: None,
    };
    // Each of the denied lists closes what it names.
    let denied = [
        Rule { domains: egress.denied_domains, ..deny() },
        Rule { cidrs: egress.denied_cidrs, ..deny() },
        Rule { ports: egress.denied_ports, ..deny() },
    ];
    let lists: Vec<Rule> = std::iter::once(allowed).chain(denied).filter(|rule| !is_empty(rule)).collect();
    let used: Vec<&Rule> = match (ordered.is_empty(), lists.is_empty()) {
        (false, false) => {
            return Err(Refusal::must(
                "trafficRules",
                "not be mixed with the lists of what is allowed and denied",
            ));
        }
        (false, true) => ordered.iter().collect(),
        // In the other mode, a list has no meaning.
        (true, _) => {
            lists.iter().filter(|rule| (rule.action == Action::Allow) == (mode == Mode::BlockAll)).collect()
        }
    };
    for (at, first) in used.iter().enumerate() {
        for second in used[at + 1..].iter().filter(|second| second.action != first.action) {
            if !keeps_order(first, second) {
                let message = "on this server the most specific rule decides, and not the first: write `trafficRules` from the \
                               more to the less specific, or with one action alone";
                return Err(Refusal::unsupported(message));
            }
        }
    }
    let rules = used.into_iter().map(rules).collect::<Result<Vec<_>, _>>()?.concat();
    let mode = if mode == Mode::AllowAll { NetworkMode::Open } else { NetworkMode::None };
    Ok(NetworkPolicy::new(NetworkSpec { mode, rules, audit: false })?)
}

fn deny() -> Rule {
    Rule { action: Action::Deny, domains: None, cidrs: None, ports: None, app_protocols: None }
}

fn is_empty(rule: &Rule) -> bool {
    let none = |list: &Option<Vec<String>>| list.as_ref().is_none_or(Vec::is_empty);
    none(&rule.domains) && none(&rule.cidrs) && rule.ports.as_ref().is_none_or(Vec::is_empty)
}

/// A policy of ours as clients read it.
pub fn view(policy: &NetworkPolicy) -> Value {
    let spec = policy.spec();
    let mode = match spec.mode {
        NetworkMode::None | NetworkMode::Registries => "block-all",
        NetworkMode::Names | NetworkMode::Open => "allow-all",
    };
    if spec.rules.is_empty() {
        return json!({"mode": mode});
    }
    let rule = |rule: &NetworkRule| {
        let mut view = json!({"action": if rule.action == NetworkAction::Allow { "allow" } else { "deny" }});
        match rule.to.as_str() {
            "any" => {}
            to if is_block(to) => view["cidrs"] = json!([to]),
            to => view["domains"] = json!([to]),
        }
        let ports: Vec<Value> = rule.ports.iter().filter_map(|text| port_view(text)).collect();
        if !ports.is_empty() {
            view["ports"] = ports.into();
        }
        if let Some(protocol) = rule.protocol.as_deref().filter(|protocol| *protocol != "tcp") {
            view["appProtocols"] = json!([protocol]);
        }
        view
    };
    let rules: Vec<Value> = spec.rules.iter().map(rule).collect();
    json!({"mode": mode, "egress": {"trafficRules": rules}})
}

fn port_view(text: &str) -> Option<Value> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last): (u16, u16) = (first.parse().ok()?, last.parse().ok()?);
    Some(match first == last {
        true => json!({"port": first, "protocol": "tcp"}),
        false => json!({"port": first, "endPort": last, "protocol": "tcp"}),
    })
}

/// What a client has written, if it still holds, or what holds.
fn shown(sandbox: &Sandbox) -> Value {
    let written = sandbox.notes.get(NETWORK).and_then(|text| serde_json::from_str::<Value>(text).ok());
    let holds = |written: &Value| policy(written).is_ok_and(|policy| policy == sandbox.network);
    written.filter(holds).unwrap_or_else(|| view(&sandbox.network))
}

/// What a sandbox may reach.
pub async fn get(Meant { sandbox, .. }: Meant) -> Answer {
    done(shown(&sandbox))
}

/// Changes that. In force when it is answered.
pub async fn update(
    State(app): State<App>,
    Meant { key, sandbox }: Meant,
    Body(body): Body<Value>,
) -> Result<Answer, Refusal> {
    let update = SandboxUpdate {
        network: Some(NetworkChange::Replace(policy(&body)?)),
        notes: NoteChanges::set(NETWORK, body.to_string()),
        ..SandboxUpdate::default()
    };
    let sandbox = app.engine.update(&key.owner, sandbox.id, update).await?;
    Ok(done(shown(&sandbox)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: Value, mode: NetworkMode, rules: &[&str]) {
        let policy = policy(&text).unwrap_or_else(|refusal| panic!("{}", refusal.message()));
        let words = |rule: &NetworkRule| {
            let action = if rule.action == NetworkAction::Allow { "allow" } else { "deny" };
            let protocol = rule.protocol.as_deref().unwrap_or("-");
            format!("{action} {} {} {protocol}", rule.to, rule.ports.join(","))
        };
        assert_eq!(policy.spec().mode, mode);
        assert_eq!(policy.spec().rules.iter().map(words).collect::<Vec<_>>(), rules);
        // What is read back means the same.
        let again = self::policy(&view(&policy)).unwrap_or_else(|refusal| panic!("{}", refusal.message()));
        assert_eq!(again, policy);
    }

    #[test]
    fn policies_mean_the_same_in_both_words() {
        check(json!({"mode": "allow-all"}), NetworkMode::Open, &[]);
        check(json!({"mode": "block-all", "egress": null}), NetworkMode::None, &[]);
        let rule = json!({"action": "allow", "name": "x", "domains": ["Example.com", "*.example.org"],
            "ports": [{"port": 443}, {"port": 8000, "endPort": 8010, "protocol": "tcp"}], "appProtocols": ["tls"]});
        check(
            json!({"mode": "block-all", "egress": {"trafficRules": [rule]}}),
            NetworkMode::None,
            &["allow example.com 443,8000-8010 tls", "allow *.example.org 443,8000-8010 tls"],
        );
        let lists = json!({"allowedDomains": ["example.com"], "deniedDomains": ["ignored.example.com"]});
        check(json!({"mode": "block-all", "egress": lists}), NetworkMode::None, &["allow example.com  -"]);
        let lists = json!({"deniedDomains": ["example.com"], "deniedPorts": [{"port": 22}]});
        check(
            json!({"mode": "allow-all", "egress": lists}),
            NetworkMode::Open,
            &["deny example.com  -", "deny any 22 -"],
        );
    }

    fn ordered(rules: Value) -> Value {
        json!({"mode": "block-all", "egress": {"trafficRules": rules}})
    }

    #[test]
    fn an_order_that_would_be_lost_is_refused() {
        let allow = |to: &str| json!({"action": "allow", "domains": [to]});
        let deny = |to: &str| json!({"action": "deny", "domains": [to]});
        for kept in [
            json!([deny("a.example.com"), allow("*.example.com")]),
            json!([allow("a.example.com"), deny("b.example.com")]),
            json!([allow("a.example.com"), {"action": "deny", "ports": [{"port": 22}]}]),
            json!([{"action": "deny", "domains": ["*.example.com"], "ports": [{"port": 22}]},
                   {"action": "allow", "domains": ["a.example.com"], "ports": [{"port": 443}]}]),
        ] {
            policy(&ordered(kept.clone())).unwrap_or_else(|refusal| panic!("{kept}: {}", refusal.message()));
        }
        for lost in [
            json!([allow("*.example.com"), deny("a.example.com")]),
            json!([allow("a.example.com"), deny("a.example.com")]),
            json!([{"action": "deny", "ports": [{"port": 22}]}, allow("a.example.com")]),
            json!([allow("a.example.com"), {"action": "deny", "cidrs": ["192.0.2.0/24"]}]),
        ] {
            policy(&ordered(lost.clone())).expect_err(&lost.to_string());
        }
    }

    #[test]
    fn what_cannot_be_enforced_is_refused() {
        for egress in [
            json!({"protocolRules": [{"protocol": "http"}]}),
            json!({"credentialRules": [{"credentialRef": "x"}]}),
            json!({"proxy": {"type": "socks5", "address": "h:1"}}),
            json!({"trafficRules": [{"action": "allow"}]}),
            json!({"trafficRules": [{"action": "allow", "domains": ["x.example.com"], "appProtocols": ["redis"]}]}),
            json!({"trafficRules": [{"action": "allow", "ports": [{"port": 53, "protocol": "udp"}]}]}),
            json!({"trafficRules": [{"action": "allow", "domains": ["a b"]}]}),
            json!({"trafficRules": [{"action": "deny", "domains": ["x.example.com"]}], "allowedDomains": ["y.example.com"]}),
        ] {
            policy(&json!({"mode": "block-all", "egress": egress})).expect_err("it cannot be enforced");
        }
        for wrong in [
            json!({}),
            json!({"mode": "open"}),
            json!([]),
            json!({"mode": "allow-all", "credentialBindings": [{}]}),
        ] {
            policy(&wrong).expect_err("it is no policy");
        }
    }
}
