//! What pauses and resumes cost, over HTTP, beside a command in a sandbox that runs and beside a create from nothing.

use std::time::{Duration, Instant};

use client::Client;
use wire::SandboxId;
use wire::api::{CreateSandbox, PauseMemory, PauseSandbox};

use super::report::{Figure, Row, median};
use super::{WARM_UP, run_true};

/// The memory of the first sandbox that is made from nothing. Each next one has a different limit, so that no spare fits.
const MEMORY_MIB: usize = 600;

/// Freezing, thawing, and resuming without memory, by turns with what they are compared with.
pub async fn rows(client: &Client, rounds: usize) -> anyhow::Result<Vec<Row>> {
    let sandbox = client.create_sandbox(&CreateSandbox::default()).await?.id;
    let pause = |memory| async move {
        let wish = PauseSandbox { memory, grace_seconds: Some(0.0) };
        client.pause_sandbox(sandbox, &wish).await
    };
    let (mut freezes, mut thaws, mut commands) = (Vec::new(), Vec::new(), Vec::new());
    let (mut drops, mut resumes, mut creates) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..WARM_UP + rounds {
        let began = Instant::now();
        pause(PauseMemory::Keep).await?;
        let frozen = began.elapsed();
        let began = Instant::now();
        client.resume_sandbox(sandbox).await?;
        let thawed = began.elapsed();
        let began = Instant::now();
        run_true(client, sandbox).await?;
        let command = began.elapsed();
        let began = Instant::now();
        pause(PauseMemory::Drop).await?;
        let dropped = began.elapsed();
        let began = Instant::now();
        run_true(client, sandbox).await?; // It resumes the sandbox first.
        let resumed = began.elapsed();
        let (created, other) = create(client, round).await?;
        client.delete_sandbox(other).await?;
        if round >= WARM_UP {
            freezes.push(frozen);
            thaws.push(thawed);
            commands.push(command);
            drops.push(dropped);
            resumes.push(resumed);
            creates.push(created);
        }
    }
    client.delete_sandbox(sandbox).await?;

    let (command, create) = ("command `true`", "create from nothing");
    let mut freeze = Row::new("pause with memory, over HTTP", Figure::Time(median(freezes)));
    freeze.compare(command, Some(median(commands.clone())));
    let mut thaw = Row::new("resume with memory, over HTTP", Figure::Time(median(thaws)));
    thaw.compare(command, Some(median(commands)));
    let mut drop = Row::new("pause without memory, over HTTP", Figure::Time(median(drops)));
    drop.compare(create, Some(median(creates.clone())));
    let mut resume = Row::new("resume without memory to first result", Figure::Time(median(resumes)));
    resume.compare(create, Some(median(creates)));
    resume.budget("at most 2x", create, 2.0);
    Ok(vec![freeze, thaw, drop, resume])
}

/// From the request for a sandbox that no spare fits to the result of a command in it.
async fn create(client: &Client, round: usize) -> anyhow::Result<(Duration, SandboxId)> {
    let memory = Some(format!("{}Mi", MEMORY_MIB + round));
    let began = Instant::now();
    let sandbox = client.create_sandbox(&CreateSandbox { memory, ..CreateSandbox::default() }).await?;
    run_true(client, sandbox.id).await?;
    Ok((began.elapsed(), sandbox.id))
}
