//! `shoal create`, `ls`, `inspect` and `rm`.

use client::api;
use serde::Serialize;

use crate::args::{Create, Inspect, List, Remove};
use crate::environment::Environment;
use crate::progress::Waiting;
use crate::{amount, find, images, print, report};

/// `shoal create`
pub async fn create(arguments: Create, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    if let (Some(image), false) = (&arguments.spec.image, arguments.no_wait) {
        images::have(&client, image, environment).await?;
    }
    let wish = api::CreateSandbox {
        image: arguments.spec.image,
        name: arguments.name,
        template: arguments.spec.template,
        pool: arguments.spec.pool,
        env: arguments.env.into_iter().collect(),
        cpu: arguments.spec.cpu,
        memory: arguments.spec.memory,
        disk: arguments.spec.disk,
        mounts: arguments.spec.mounts,
        match_labels: arguments.get_or_create.then(|| arguments.labels.iter().cloned().collect()),
        labels: arguments.labels.into_iter().collect(),
        lifetime: arguments.rules.list(),
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

/// `shoal ls`
pub async fn list(arguments: List, environment: &Environment) -> anyhow::Result<i32> {
    let sandboxes = find::daemon(environment)?.sandboxes_labelled(&arguments.labels).await?;
    if arguments.json {
        print::json(&sandboxes)?;
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
                word(&sandbox.state),
                sandbox.template,
                sandbox.created_at,
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
    let image = image_text(&sandbox);
    let template = match sandbox.template.as_str() {
        // What is built in has no versions.
        "default" => sandbox.template,
        _ => format!("{}, version {}", sandbox.template, sandbox.template_version),
    };
    let mut facts = vec![
        ("id", sandbox.id.to_string()),
        ("name", sandbox.name),
        ("state", word(&sandbox.state)),
        ("template", template),
        ("image", image),
        ("cpu", amount::cpu(sandbox.limits.cpu_millis.into())),
        ("memory", amount::memory(sandbox.limits.memory_bytes)),
        ("processes", sandbox.limits.pids.to_string()),
        ("created", sandbox.created_at),
    ];
    facts.extend(sandbox.claimed_from.map(|pool| ("claimed", format!("from pool {pool}"))));
    facts.extend(sandbox.limits.disk_bytes.map(|bytes| ("disk", amount::memory(bytes))));
    facts.extend(sandbox.mounts.iter().map(|mount| ("mount", crate::volumes::mount_text(mount))));
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
        let rows: Vec<Vec<String>> = commands.iter().map(command_row).collect();
        print::table(&["command", "state", "exit", "created", "program"], &rows)?;
    }
    Ok(0)
}

fn command_row(command: &api::Command) -> Vec<String> {
    let program = command.argv.as_ref().map(|argv| argv.join(" ")).or_else(|| command.script.clone());
    vec![
        command.id.to_string(),
        word(&command.state),
        command.result.as_ref().map(ending).unwrap_or_default(),
        command.created_at.clone(),
        program.unwrap_or_default(),
    ]
}

/// How a command ended: its exit code if it exited, else in words, since a number would say less than is known.
fn ending(result: &api::CommandResult) -> String {
    match (result.outcome, result.exit_code, result.signal) {
        (api::Outcome::Exited | api::Outcome::FailedToStart, Some(code), _) => code.to_string(),
        (api::Outcome::Signaled, _, Some(signal)) => format!("signal {signal}"),
        (outcome, _, _) => word(&outcome).replace('_', " "),
    }
}

/// A rule of a lifetime as `--rule` takes it.
fn rule_text(rule: &api::KeptRule) -> String {
    let idle = if rule.acts { "" } else { " (kept, does not act in this version)" };
    let typed = |word: String| word.replace('_', "-");
    let after = amount::length(rule.after_seconds);
    format!("{}:{after}:{}{idle}", typed(word(&rule.since)), typed(word(&rule.action)))
}

/// A state as the API spells it.
pub fn word<T: Serialize>(state: &T) -> String {
    match serde_json::to_value(state) {
        Ok(serde_json::Value::String(word)) => word,
        Ok(_) | Err(_) => String::new(),
    }
}

/// One line of what `shoal rm --json` prints.
#[derive(Serialize)]
struct Removed<'a> {
    sandbox: &'a str,
    deleted: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// `shoal rm`: each one, whatever becomes of the others.
pub async fn remove(arguments: Remove, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let mut all = Vec::new();
    for text in &arguments.sandboxes {
        let removed = async {
            let sandbox = match text.parse() {
                Ok(id) => id,
                Err(_) => find::sandbox(&client, text).await?.id,
            };
            anyhow::Ok(client.delete_sandbox(sandbox).await?)
        };
        let waiting = Waiting::new("deleting sandboxes");
        let error = removed.await.err();
        drop(waiting);
        if let Some(error) = &error {
            report::failure(error, environment.colour);
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
