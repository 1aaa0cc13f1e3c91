//! `shoal dialects`: how to switch other systems' clients over.

use std::collections::BTreeMap;

use serde::Serialize;
use server::config::LISTEN_DEFAULT;
use server::dialects::systems::{SYSTEMS, System};

use crate::args::Dialects;
use crate::daemon::{find, settings};
use crate::environment::Environment;
use crate::output::print;
use crate::output::report::hinted;

/// A system for programs.
#[derive(Serialize)]
struct Shown {
    name: &'static str,
    title: &'static str,
    page: &'static str,
    variables: BTreeMap<&'static str, String>,
}

/// `shoal dialects`: all systems in a table, or one as lines that a shell can evaluate.
pub async fn dialects(arguments: Dialects, environment: &Environment) -> anyhow::Result<i32> {
    let chosen: Vec<&System> = match &arguments.name {
        None => SYSTEMS.iter().collect(),
        Some(name) => vec![named(name)?],
    };
    let (url, key) = (url(environment), key(environment));
    if arguments.json {
        let shown = |system: &&System| Shown {
            name: system.name,
            title: system.title,
            page: system.page,
            variables: system.variables(&url, &key).into_iter().collect(),
        };
        print::json(&chosen.iter().map(shown).collect::<Vec<_>>())?;
        return Ok(0);
    }
    if arguments.name.is_some() {
        for (name, value) in chosen.iter().flat_map(|system| system.variables(&url, &key)) {
            print::line(&format!("export {name}={value}"))?;
        }
        return Ok(0);
    }
    let row = |system: &&System| {
        let names: Vec<&str> = system.variables.iter().map(|(name, _)| *name).collect();
        vec![system.name.to_owned(), system.title.to_owned(), names.join(" ")]
    };
    print::table(&["NAME", "SYSTEM", "VARIABLES"], &chosen.iter().map(row).collect::<Vec<_>>())?;
    Ok(0)
}

fn named(name: &str) -> anyhow::Result<&'static System> {
    let names: Vec<&str> = SYSTEMS.iter().map(|system| system.name).collect();
    let found = SYSTEMS.iter().find(|system| system.name == name);
    found.ok_or_else(|| {
        hinted(
            format!("`{name}` is not a system that Shoal speaks for"),
            format!("choose one of: {}", names.join(", ")),
        )
    })
}

/// The address of the daemon, or the default address.
fn url(environment: &Environment) -> String {
    match find::named_or_living(environment) {
        Ok(Some(client)) => client.url(),
        Ok(None) | Err(_) => environment.url.clone().unwrap_or_else(|| format!("http://{LISTEN_DEFAULT}")),
    }
}

/// A shell expression for the key: the key itself is not printed, since a terminal remembers what it shows.
fn key(environment: &Environment) -> String {
    if environment.api_key.as_ref().is_some_and(|key| !key.is_empty()) {
        return "\"$SHOAL_API_KEY\"".into();
    }
    let path = settings::data_dir(environment).join("api.key");
    format!("\"$(cat '{}')\"", path.display().to_string().replace('\'', r"'\''"))
}
