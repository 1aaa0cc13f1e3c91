//! `shoal create`, `ls`, `inspect`, `rename` and `rm`.

use std::collections::BTreeMap;

use client::{ClientError, api};
use serde::Serialize;

use crate::args::{Create, Inspect, List, Remove, Rename};
use crate::commands::{command, image, net, variables};
use crate::daemon::find::{self, Sure};
use crate::environment::Environment;
use crate::output::progress::Waiting;
use crate::output::{age, amount, print, report};

/// `shoal create`
pub async fn create(arguments: Create, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    if let (Some(image), false) = (&arguments.spec.image, arguments.no_wait) {
        image::have(&client, image, environment).await?;
    }
    let wish = api::CreateSandbox {
        image: arguments.spec.image,
        name: arguments.name,
        template: arguments.spec.template,
        pool: arguments.spec.pool,
        env: variables::collect(arguments.env, &arguments.env_files, environment)?.into_iter().collect(),
        cpu: arguments.spec.cpu,
        memory: arguments.spec.memory,
        disk: arguments.spec.disk,
        mounts: arguments.spec.mounts,
        network: net::network(arguments.spec.net.as_deref())?,
        inject: arguments.spec.inject,
        match_labels: arguments.get_or_create.then(|| arguments.labels.iter().cloned().collect()),
        labels: arguments.labels.into_iter().collect(),
        lifetime: arguments.rules.list(),
        history: arguments.history,
        hooks: hooks(arguments.hooks, arguments.require_hooks),
        wait: Some(!arguments.no_wait),
    };
    let waiting = Waiting::new("creating a sandbox");
    // The same request in both cases; the answer tells the two apart.
    let created = client.get_or_create_sandbox(&wish).await?;
    drop(waiting);
    if arguments.json {
        print::json(&created)?
    } else {
        print::line(&created.sandbox.id.to_string())?
    }
    Ok(0)
}

/// Hooks of scripts, by when they run.
pub fn hooks(scripts: Vec<(String, String)>, required: bool) -> BTreeMap<String, api::Hook> {
    let hook = |script| api::Hook { script: Some(script), required, ..Default::default() };
    scripts.into_iter().map(|(point, script)| (point, hook(script))).collect()
}

/// `shoal ls`
pub async fn list(arguments: List, environment: &Environment) -> anyhow::Result<i32> {
    let sandboxes = find::daemon(environment)?.sandboxes_labelled(&arguments.labels).await?;
    if arguments.json {
        print::json(&sandboxes)?;
        return Ok(0);
    }
    if arguments.quiet {
        for sandbox in &sandboxes {
            print::line(&sandbox.id.to_string())?;
        }
        return Ok(0);
    }
    let labelled = sandboxes.iter().any(|sandbox| !sandbox.labels.is_empty());
    let imaged = sandboxes.iter().any(|sandbox| sandbox.image != "host" || sandbox.image_alias.is_some());
    let rows: Vec<Vec<String>> = sandboxes
        .into_iter()
        .map(|sandbox| {
            let image = image_text(&sandbox);
            let mut row = vec![
                sandbox.id.to_string(),
                sandbox.name,
                print::word(&sandbox.state),
                sandbox.template,
                age::ago(&sandbox.created_at),
            ];
            if imaged {
                row.push(image);
            }
            if labelled {
                let pairs: Vec<_> =
                    sandbox.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
                row.push(pairs.join(" "));
            }
            row
        })
        .collect();
    let mut header = vec!["id", "name", "state", "template", "created"];
    header.extend(imaged.then_some("image"));
    header.extend(labelled.then_some("labels"));
    print::table(&header, &rows)?;
    Ok(0)
}

/// The image of a sandbox, with the alias that it was asked for as.
fn image_text(sandbox: &api::Sandbox) -> String {
    match &sandbox.image_alias {
        Some(alias) => format!("{alias} (is {})", sandbox.image),
        None => sandbox.image.clone(),
    }
}

/// `shoal inspect`
pub async fn inspect(arguments: Inspect, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let sandbox = find::sandbox(&client, &arguments.sandbox).await?;
    if arguments.json {
        print::json(&sandbox)?;
        return Ok(0);
    }
    let commands = client.commands(sandbox.id).await?;
    let (image, state) = (image_text(&sandbox), state_text(&sandbox));
    let template = match sandbox.template.as_str() {
        // What is built in has no versions.
        "default" => sandbox.template,
        _ => format!("{}, version {}", sandbox.template, sandbox.template_version),
    };
    let mut facts = vec![
        ("id", sandbox.id.to_string()),
        ("name", sandbox.name),
        ("state", state),
        ("template", template),
        ("image", image),
        ("cpu", amount::cpu(sandbox.limits.cpu_millis.into())),
        ("memory", amount::memory(sandbox.limits.memory_bytes)),
    ];
    facts.extend(sandbox.limits.disk_bytes.map(|bytes| ("disk", amount::memory(bytes))));
    facts.push(("processes", sandbox.limits.pids.to_string()));
    facts.push(("created", age::ago_and_when(&sandbox.created_at)));
    facts.extend(sandbox.claimed_from.map(|pool| ("claimed", format!("from pool {pool}"))));
    facts.extend(sandbox.mounts.iter().map(|mount| ("mount", crate::commands::volume::mount_text(mount))));
    facts.extend(sandbox.image_digest.map(|digest| ("digest", digest)));
    facts.extend(sandbox.reason.map(|reason| ("reason", reason)));
    facts.extend(sandbox.labels.into_iter().map(|(key, value)| ("label", format!("{key}={value}"))));
    facts.extend(sandbox.lifetime.iter().map(|rule| ("lifetime", rule_text(rule))));
    facts.extend(sandbox.env.into_iter().map(|(name, value)| ("env", format!("{name}={value}"))));
    let rows: Vec<Vec<String>> =
        facts.into_iter().map(|(name, value)| vec![name.to_owned(), value]).collect();
    print::table(&["sandbox", ""], &rows)?;
    if !commands.is_empty() {
        print::line("")?;
        command::table(&commands)?;
    }
    Ok(0)
}

/// The state of a sandbox, with what it has kept if it is paused.
fn state_text(sandbox: &api::Sandbox) -> String {
    let state = print::word(&sandbox.state);
    match sandbox.memory {
        None => state,
        Some(api::PauseMemory::Keep) => format!("{state}, with its memory"),
        Some(api::PauseMemory::Drop) => format!("{state}, without its memory"),
    }
}

/// A rule of a lifetime as `--rule` takes it.
fn rule_text(rule: &api::KeptRule) -> String {
    let idle = if rule.acts { "" } else { " (inactive in the daemon's version)" };
    let typed = |word: String| word.replace('_', "-");
    let after = amount::length(rule.after_seconds);
    format!("{}:{after}:{}{idle}", typed(print::word(&rule.since)), typed(print::word(&rule.action)))
}

/// One line of what `shoal rm --json` prints.
#[derive(Serialize)]
struct Removed<'a> {
    sandbox: &'a str,
    deleted: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// `shoal rename`
pub async fn rename(arguments: Rename, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let before = find::sandbox(&client, &arguments.sandbox).await?;
    let wish = api::UpdateSandbox { name: Some(arguments.new), ..Default::default() };
    let sandbox = client.update_sandbox(before.id, &wish).await?;
    if arguments.json {
        print::json(&sandbox)?;
    } else {
        report::done(&format!("renamed `{}` to `{}`", before.name, sandbox.name));
    }
    Ok(0)
}

/// What to call a sandbox on the command line: its name, or the beginning of its id where a shell would read the name otherwise.
pub fn handle(sandbox: &api::Sandbox) -> String {
    let plain = |character: char| character.is_ascii_alphanumeric() || "._-".contains(character);
    let name = &sandbox.name;
    if !name.is_empty() && !name.starts_with('-') && name.chars().all(plain) {
        return name.clone();
    }
    print::short_id(&sandbox.id.to_string()).to_owned()
}

/// `shoal rm`: each one, whatever becomes of the others.
pub async fn remove(arguments: Remove, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    // What to delete, and what to call it.
    let chosen: Vec<(String, String)> = if arguments.all || !arguments.labels.is_empty() {
        let sandboxes = client.sandboxes_labelled(&arguments.labels).await?;
        sandboxes.into_iter().map(|sandbox| (sandbox.id.to_string(), sandbox.name)).collect()
    } else {
        arguments.sandboxes.into_iter().map(|text| (text.clone(), text)).collect()
    };
    let mut all = Vec::new();
    for (text, shown) in &chosen {
        let removed = async {
            let sandbox = match text.parse() {
                Ok(id) => id,
                Err(_) => find::sandbox_surely(&client, text, Sure::Whole).await?.id,
            };
            match arguments.tree {
                true => drop(client.delete_tree(sandbox).await?),
                false => client.delete_sandbox(sandbox).await?,
            }
            anyhow::Ok(())
        };
        let waiting = Waiting::new("deleting sandboxes");
        let error = removed.await.err().filter(|error| !(arguments.force && is_missing(error)));
        drop(waiting);
        match &error {
            Some(error) => report::failure(error, environment.colour),
            None if arguments.quiet => {}
            None => report::done(&format!("deleted sandbox `{shown}`")),
        }
        all.push(Removed {
            sandbox: text,
            deleted: error.is_none(),
            error: error.map(|error| error.to_string()),
        });
    }
    if arguments.json {
        print::json(&all)?;
    }
    Ok(i32::from(all.iter().any(|removed| !removed.deleted)))
}

/// Whether a sandbox was not deleted because there is none.
fn is_missing(error: &anyhow::Error) -> bool {
    let refused =
        error.downcast_ref::<ClientError>().is_some_and(|error| error.code() == Some("sandbox_not_found"));
    refused || find::is_missing(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_can_be_typed() {
        let sandbox = |name: &str| {
            let json = serde_json::json!({
                "id": "3f2b8c1e-90ab-4def-8123-456789abcdef", "name": name, "state": "running",
                "template": "default", "image": "host", "created_at": "2026-01-31T09:05:00.250Z",
                "limits": {"cpu_millis": 1000, "memory_bytes": 1, "pids": 1},
                "labels": {}, "lifetime": [], "env": {}, "mounts": [],
            });
            serde_json::from_value::<api::Sandbox>(json).expect("it is what the API answers")
        };
        assert_eq!(handle(&sandbox("silver-spoon.2")), "silver-spoon.2");
        for name in ["two words", "-x", "a:b", "$(x)"] {
            assert_eq!(handle(&sandbox(name)), "3f2b8c1e", "{name}");
        }
    }
}
