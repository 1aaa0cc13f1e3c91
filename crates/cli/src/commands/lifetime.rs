//! `shoal label`, `lifetime`, `touch` and `explain`.

use client::api;

use crate::args::{Explain, Label, Lifetime, Touch};
use crate::daemon::find;
use crate::environment::Environment;
use crate::output::print;

/// `shoal label`
pub async fn label(arguments: Label, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let mut sandbox = find::sandbox(&client, &arguments.sandbox).await?;
    if !arguments.changes.is_empty() {
        let labels = arguments.changes.into_iter().map(|change| (change.key, change.value)).collect();
        let wish = api::UpdateSandbox { labels, ..Default::default() };
        sandbox = client.update_sandbox(sandbox.id, &wish).await?;
    }
    if arguments.json {
        print::json(&sandbox)?;
        return Ok(0);
    }
    for (key, value) in &sandbox.labels {
        print::line(&print::plain(&format!("{key}={value}")))?;
    }
    Ok(0)
}

/// `shoal lifetime`
pub async fn lifetime(arguments: Lifetime, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let id = find::sandbox(&client, &arguments.sandbox).await?.id;
    let wish = api::UpdateSandbox { lifetime: Some(arguments.rules.list()), ..Default::default() };
    let sandbox = client.update_sandbox(id, &wish).await?;
    if arguments.json {
        print::json(&sandbox)?;
        return Ok(0);
    }
    say(&client.explain_sandbox(id).await?, false)
}

/// `shoal touch`
pub async fn touch(arguments: Touch, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let id = find::sandbox(&client, &arguments.sandbox).await?.id;
    say(&client.touch_sandbox(id).await?, arguments.json)
}

/// `shoal explain`
pub async fn explain(arguments: Explain, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let id = find::sandbox(&client, &arguments.sandbox).await?.id;
    say(&client.explain_sandbox(id).await?, arguments.json)
}

fn say(explanation: &api::Explanation, json: bool) -> anyhow::Result<i32> {
    match json {
        true => print::json(explanation)?,
        // Why a sandbox failed may be told in the words of others.
        false => print::line(&print::plain(&explanation.sentence))?,
    }
    Ok(0)
}
