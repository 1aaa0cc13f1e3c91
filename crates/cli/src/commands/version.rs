//! `shoal version`

use serde::Serialize;

use crate::args::Version;
use crate::daemon::find;
use crate::environment::Environment;
use crate::output::print;

/// The versions for programs.
#[derive(Serialize)]
struct Versions {
    client: &'static str,
    /// Not there if no daemon was found.
    #[serde(skip_serializing_if = "Option::is_none")]
    daemon: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<String>,
}

/// `shoal version`: that no daemon answers is an answer, and no failure.
pub async fn version(arguments: Version, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::named_or_living(environment).ok().flatten();
    let (daemon, url) = match &client {
        Some(client) => (client.version().await.ok().map(|version| version.version), Some(client.url())),
        None => (None, None),
    };
    let versions = Versions { client: server::version(), daemon, url };
    if arguments.json {
        print::json(&versions)?;
        return Ok(0);
    }
    print::line(&format!("shoal {}", versions.client))?;
    match (&versions.daemon, &versions.url) {
        (Some(daemon), Some(url)) => print::line(&format!("daemon {} at {url}", print::plain(daemon)))?,
        (None, Some(url)) => print::line(&format!("daemon at {url} does not answer"))?,
        _ => print::line("daemon not running")?,
    }
    Ok(0)
}
