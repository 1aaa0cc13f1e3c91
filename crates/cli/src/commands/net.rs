//! `shoal net`: what a sandbox may reach, and what it reached.

use client::{Client, SandboxId, api};

use crate::args::{Net, NetAction, NetAllow, NetLog, NetSet, NetWatch};
use crate::daemon::find;
use crate::environment::Environment;
use crate::output::print;
use crate::output::report::{self, hinted};

/// How long one request waits for events; it is asked again then.
const WAIT_SECONDS: u32 = 50;
/// How many events are read at once.
const EVENTS_MAX: u32 = 500;
/// The exit code for a destination that is refused.
const REFUSED: i32 = 1;

/// `shoal net`
pub async fn net(arguments: Net, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let sandbox = async |text: &str| anyhow::Ok(find::sandbox(&client, text).await?.id);
    match arguments.action {
        NetAction::Show(arguments) => show(&client, sandbox(&arguments.sandbox).await?, arguments.json).await,
        NetAction::Explain(arguments) => {
            let id = sandbox(&arguments.sandbox).await?;
            explain(&client, id, &arguments.sandbox, &arguments.to, arguments.json).await
        }
        NetAction::Allow(arguments) => allow(&client, sandbox(&arguments.sandbox).await?, arguments).await,
        NetAction::Set(arguments) => set(&client, sandbox(&arguments.sandbox).await?, arguments).await,
        NetAction::Requests(arguments) => {
            let id = sandbox(&arguments.sandbox).await?;
            requests(&client, id, &arguments.sandbox, arguments.json).await
        }
        NetAction::Log(arguments) => log(&client, sandbox(&arguments.sandbox).await?, arguments).await,
        NetAction::Watch(arguments) => watch(&client, sandbox(&arguments.sandbox).await?, arguments).await,
        NetAction::Presets(arguments) => presets(&client, arguments.json).await,
    }
}

async fn show(client: &Client, id: SandboxId, json: bool) -> anyhow::Result<i32> {
    let network = client.network(id).await?;
    if json {
        print::json(&network)?;
        return Ok(0);
    }
    print::line(&format!("mode      {}", print::word(&network.policy.mode)))?;
    if network.policy.audit {
        print::line("audit     what the rules refuse passes, and is reported")?;
    }
    for rule in &network.policy.rules {
        print::line(&format!("rule      {}", print::plain(&rule_text(rule))))?;
    }
    for rule in &network.preset {
        print::line(&format!("preset    {}", print::plain(rule)))?;
    }
    let totals = network.totals;
    print::line(&format!(
        "used      {} connections, {} bytes sent, {} bytes received, {} refused",
        totals.connections, totals.sent_bytes, totals.received_bytes, totals.refused
    ))?;
    if let Some(attempts) = network.attempts.filter(|attempts| *attempts > 0) {
        print::line(&format!("attempts  {attempts} to addresses that have no route"))?;
    }
    Ok(0)
}

/// A rule in one line.
pub fn rule_text(rule: &api::NetworkRule) -> String {
    let mut text = format!("{} {}", print::word(&rule.action), rule.to);
    if !rule.ports.is_empty() {
        text += &format!(" port {}", rule.ports.join(","));
    }
    if let Some(protocol) = &rule.protocol {
        text += &format!(" {protocol}");
    }
    if rule.private {
        text += " private";
    }
    text
}

async fn explain(client: &Client, id: SandboxId, sandbox: &str, to: &str, json: bool) -> anyhow::Result<i32> {
    let explained = client.explain_network(id, to).await?;
    if json {
        print::json(&explained)?;
    } else {
        print::line(&print::plain(&explained.sentence))?;
        if let Some(opens) = &explained.opens {
            print::line(&format!("open it with: shoal net allow {sandbox} {}", print::plain(opens)))?;
        }
    }
    Ok(if explained.allowed { 0 } else { REFUSED })
}

async fn allow(client: &Client, id: SandboxId, arguments: NetAllow) -> anyhow::Result<i32> {
    let NetAllow { sandbox: _, to, ports, protocol, private, json } = arguments;
    let rule = api::NetworkRule { action: api::NetworkAction::Allow, to, ports, protocol, private };
    let policy = client.allow_network(id, &rule).await?;
    match json {
        true => print::json(&policy)?,
        false => report::done(&format!("in force: {}", rule_text(&rule))),
    }
    Ok(0)
}

async fn set(client: &Client, id: SandboxId, arguments: NetSet) -> anyhow::Result<i32> {
    let update = api::UpdateSandbox { network: network(Some(&arguments.network))?, ..Default::default() };
    let sandbox = client.update_sandbox(id, &update).await?;
    match arguments.json {
        true => print::json(&sandbox.network)?,
        false => report::done(&format!("in force: mode {}", print::word(&sandbox.network.mode))),
    }
    Ok(0)
}

async fn requests(client: &Client, id: SandboxId, sandbox: &str, json: bool) -> anyhow::Result<i32> {
    let events = client.network_events(id, None, EVENTS_MAX, true, 0).await?.events;
    // The latest of each destination: programs try again and again.
    let mut latest: Vec<api::NetworkEvent> = Vec::new();
    for event in events.into_iter().rev() {
        let same = |other: &api::NetworkEvent| other.opens == event.opens && target(other) == target(&event);
        if !latest.iter().any(same) {
            latest.push(event);
        }
    }
    if json {
        print::json(&latest)?;
        return Ok(0);
    }
    let rows = latest.iter().map(|event| {
        let open =
            event.opens.as_ref().map(|opens| format!("shoal net allow {sandbox} {}", print::plain(opens)));
        vec![print::plain(&target(event)), print::plain(&reason(event)), open.unwrap_or_else(|| "-".into())]
    });
    print::table(&["DESTINATION", "REFUSED BY", "OPEN IT WITH"], &rows.collect::<Vec<_>>())?;
    Ok(0)
}

async fn log(client: &Client, id: SandboxId, arguments: NetLog) -> anyhow::Result<i32> {
    let events = client.network_events(id, None, arguments.limit, false, 0).await?.events;
    if arguments.json {
        print::json(&events)?;
        return Ok(0);
    }
    for event in &events {
        print::line(&event_line(event))?;
    }
    Ok(0)
}

async fn watch(client: &Client, id: SandboxId, arguments: NetWatch) -> anyhow::Result<i32> {
    let newest = client.network_events(id, None, 1, false, 0).await?.events;
    let mut after = newest.last().map_or(0, |event| event.id);
    loop {
        let events =
            client.network_events(id, Some(after), EVENTS_MAX, arguments.refused, WAIT_SECONDS).await?.events;
        for event in &events {
            after = event.id;
            match arguments.json {
                true => print::line(&serde_json::to_string(event)?)?,
                false => print::line(&event_line(event))?,
            }
        }
    }
}

async fn presets(client: &Client, json: bool) -> anyhow::Result<i32> {
    let hosts = client.network_presets().await?.hosts;
    if json {
        print::json(&hosts)?;
        return Ok(0);
    }
    let rows = hosts.iter().map(|host| {
        let ports: Vec<String> = host.ports.iter().map(ToString::to_string).collect();
        let source = host.source.as_deref().unwrap_or("default");
        vec![host.tool.clone(), print::plain(&host.host), ports.join(","), print::plain(source)]
    });
    print::table(&["TOOL", "HOST", "PORTS", "FOUND IN"], &rows.collect::<Vec<_>>())?;
    Ok(0)
}

/// What `--net` says: a mode, or a policy in a file.
pub fn network(text: Option<&str>) -> anyhow::Result<Option<api::Network>> {
    text.map(|text| read(text).map_err(|why| hinted(format!("`{text}` is not a network: {why}"), NET_HINT)))
        .transpose()
}

const NET_HINT: &str = "use none, registries or open, or see docs/guides/network.md for the file";

/// A mode, or a policy in a file.
fn read(text: &str) -> Result<api::Network, String> {
    if let Ok(mode) = serde_json::from_value(serde_json::Value::String(text.to_owned())) {
        return Ok(api::Network::Mode(mode));
    }
    let contents = match std::fs::read_to_string(text) {
        Ok(contents) => contents,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err("must be none, registries, open or a file with a policy".into());
        }
        Err(error) => return Err(format!("cannot read the file: {error}")),
    };
    let policy = match contents.trim_start().starts_with('{') {
        true => serde_json::from_str::<api::NetworkPolicy>(&contents).map_err(|error| error.to_string()),
        false => toml::from_str::<api::NetworkPolicy>(&contents).map_err(|error| error.message().to_owned()),
    };
    policy.map(api::Network::Policy).map_err(|why| format!("the file is not a policy: {why}"))
}

fn target(event: &api::NetworkEvent) -> String {
    let host = event.name.clone().or_else(|| event.address.clone()).unwrap_or_else(|| "?".into());
    match event.port {
        Some(port) => format!("{host}:{port}"),
        None => host,
    }
}

fn reason(event: &api::NetworkEvent) -> String {
    match &event.why {
        Some(why) => format!("{} ({why})", event.rule),
        None => event.rule.clone(),
    }
}

fn event_line(event: &api::NetworkEvent) -> String {
    let mut line = format!("{}  {:<12}  {}", event.at, event.what, print::plain(&target(event)));
    if let Some(protocol) = &event.protocol {
        line += &format!(" {protocol}");
    }
    line += &format!("  {}", print::plain(&reason(event)));
    if event.sent_bytes + event.received_bytes > 0 {
        line += &format!("  sent {} received {}", event.sent_bytes, event.received_bytes);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_reads_as_in_explanations() {
        let rule = api::NetworkRule {
            action: api::NetworkAction::Deny,
            to: "*.example.com".into(),
            ports: vec!["80".into(), "443".into()],
            protocol: Some("tls".into()),
            private: false,
        };
        assert_eq!(rule_text(&rule), "deny *.example.com port 80,443 tls");
    }

    #[test]
    fn a_network_is_a_word_or_a_file() {
        assert_eq!(read("open"), Ok(api::Network::Mode(api::NetworkMode::Open)));
        assert!(read("al").expect_err("no such file").contains("registries"));
        let directory = tempfile::tempdir().expect("a directory");
        let file = |name: &str, text: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, text).expect("it can be written");
            read(path.to_str().expect("a path"))
        };
        let toml =
            file("a.toml", "mode = \"registries\"\n[[rules]]\nto = \"example.com\"\nports = [\"443\"]\n");
        let json =
            file("a.json", r#"{"mode": "registries", "rules": [{"to": "example.com", "ports": ["443"]}]}"#);
        assert!(toml.is_ok());
        assert_eq!(toml, json);
        assert!(file("b.toml", "moed = \"open\"\n").expect_err("a misspelt key").contains("moed"));
    }
}
