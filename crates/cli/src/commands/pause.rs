//! `shoal pause` and `resume`.

use client::{Client, api};

use crate::args::{Pause, Resume};
use crate::daemon::find;
use crate::environment::Environment;
use crate::output::progress::Waiting;
use crate::output::{print, report};

/// `shoal pause`
pub async fn pause(arguments: Pause, environment: &Environment) -> anyhow::Result<i32> {
    let memory = if arguments.drop { api::PauseMemory::Drop } else { api::PauseMemory::Keep };
    let grace_seconds = arguments.grace.map(|grace| grace.as_secs_f64());
    let wish = api::PauseSandbox { memory, grace_seconds };
    let done = match memory {
        api::PauseMemory::Keep => "paused sandbox",
        api::PauseMemory::Drop => "ended the processes of sandbox",
    };
    let (client, names) = (find::daemon(environment)?, &arguments.sandboxes);
    each(&client, names, ("pausing a sandbox", done), (arguments.json, environment), async |id| {
        Ok(client.pause_sandbox(id, &wish).await?)
    })
    .await
}

/// `shoal resume`
pub async fn resume(arguments: Resume, environment: &Environment) -> anyhow::Result<i32> {
    let (client, names) = (find::daemon(environment)?, &arguments.sandboxes);
    each(
        &client,
        names,
        ("resuming a sandbox", "resumed sandbox"),
        (arguments.json, environment),
        async |id| Ok(client.resume_sandbox(id).await?),
    )
    .await
}

/// Does something to each sandbox, whatever becomes of the others. The exit code.
async fn each(
    client: &Client,
    names: &[String],
    (doing, done): (&'static str, &str),
    (json, environment): (bool, &Environment),
    act: impl AsyncFn(wire::SandboxId) -> anyhow::Result<api::Sandbox>,
) -> anyhow::Result<i32> {
    let mut changed = Vec::new();
    for name in names {
        let waiting = Waiting::new(doing);
        let result = async { act(find::sandbox(client, name).await?.id).await }.await;
        drop(waiting);
        match result {
            Ok(sandbox) => {
                if !json {
                    report::done(&format!("{done} `{}`", sandbox.name));
                }
                changed.push(sandbox);
            }
            Err(error) => report::failure(&error, environment.colour),
        }
    }
    if json {
        print::json(&changed)?;
    }
    Ok(i32::from(changed.len() < names.len()))
}
