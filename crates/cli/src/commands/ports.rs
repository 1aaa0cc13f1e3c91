//! `shoal ports` and `shoal url`.

use client::api;

use crate::args::{Ports, Url};
use crate::daemon::find;
use crate::environment::Environment;
use crate::output::print;
use crate::output::report::{self, hinted};

/// `shoal ports`
pub async fn ports(arguments: Ports, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let sandbox = find::sandbox(&client, &arguments.sandbox).await?.id;
    if arguments.links {
        let links = client.links(sandbox).await?;
        if arguments.json {
            print::json(&api::LinkList { links })?;
            return Ok(0);
        }
        let rows: Vec<Vec<String>> = links.iter().map(link_row).collect();
        print::table(&["id", "port", "methods", "expires", "label"], &rows)?;
        return Ok(0);
    }
    let ports = match arguments.wait {
        Some(port) => vec![client.wait_for_port(sandbox, port, arguments.timeout).await?],
        None => client.ports(sandbox).await?,
    };
    if arguments.json {
        print::json(&api::PortList { ports })?;
        return Ok(0);
    }
    let rows: Vec<Vec<String>> = ports.iter().map(port_row).collect();
    print::table(&["port", "address", "process", "url"], &rows)?;
    Ok(0)
}

fn port_row(info: &api::PortInfo) -> Vec<String> {
    let addresses: Vec<String> = info.addresses.iter().map(ToString::to_string).collect();
    let process = info.process.as_ref().map(|process| format!("{} ({})", process.name, process.pid));
    let url = match info.reachable {
        true => info.url.clone(),
        false => Some("not reachable: it listens elsewhere than 127.0.0.1 and ::1".into()),
    };
    // A program chooses its own name.
    let text = |text: Option<String>| print::plain(&text.unwrap_or_else(|| "-".into()));
    vec![info.port.to_string(), addresses.join(","), text(process), text(url)]
}

fn link_row(link: &api::PortLink) -> Vec<String> {
    let methods = if link.methods.is_empty() { "all".into() } else { link.methods.join(",") };
    let label = print::plain(link.label.as_deref().unwrap_or("-"));
    let label = if link.public { format!("public {label}") } else { label };
    vec![link.id.to_string(), link.port.to_string(), methods, link.expires_at.clone(), label]
}

/// `shoal url`
pub async fn url(arguments: Url, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let sandbox = find::sandbox(&client, &arguments.sandbox).await?.id;
    if let Some(text) = &arguments.revoke {
        let wrong = |_| hinted(format!("`{text}` is not the id of a link"), "see `shoal ports --links`");
        client.revoke_link(sandbox, text.parse().map_err(wrong)?).await?;
        report::done(&format!("revoked link `{text}`"));
        return Ok(0);
    }
    let Some(port) = arguments.port else {
        return Err(hinted("a port is missing", "write `shoal url SANDBOX PORT`"));
    };
    let wish = api::CreateLink {
        port,
        ttl_seconds: Some(arguments.ttl.as_secs_f64()),
        methods: arguments.methods,
        label: arguments.label,
        public: arguments.public,
    };
    let link = client.create_link(sandbox, &wish).await?;
    match arguments.json {
        true => print::json(&link)?,
        false => print::line(&link.url)?,
    }
    Ok(0)
}
