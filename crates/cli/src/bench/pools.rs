//! What a claim from a pool costs, beside a command in a sandbox that runs and beside a create.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use client::Client;
use wire::SandboxId;
use wire::api::{CreatePool, CreateSandbox, PoolState};

use super::report::{Figure, Row, median, percentile};
use super::{WARM_UP, run_true};

const POOL: &str = "bench";
/// Sandboxes that stand ready: one for each of those who claim at the same time, and some more.
const REPLICAS: u32 = 24;
/// Who claim at the same time.
const CLAIMERS: usize = 20;
/// How long a pool may take to fill.
const FILL_SECONDS: u32 = 120;

/// Claims one after the other and many at once, to the first command's result.
pub async fn rows(client: &Client, rounds: usize) -> anyhow::Result<Vec<Row>> {
    let wish = CreatePool { name: POOL.into(), template: "default".into(), replicas: REPLICAS };
    client.create_pool(&wish).await?;
    let steady = client.create_sandbox(&CreateSandbox::default()).await?.id;
    // Claims and plain commands by turns, so that what else goes on meets both.
    let (mut claims, mut commands) = (Vec::new(), Vec::new());
    for round in 0..WARM_UP + rounds {
        full(client).await?;
        let (took, sandbox) = claim(client).await?;
        let began = Instant::now();
        run_true(client, steady).await?;
        if round >= WARM_UP {
            claims.push(took);
            commands.push(began.elapsed());
        }
        client.delete_sandbox(sandbox).await?;
    }
    let (mut at_once, mut commands_at_once) = (Vec::new(), Vec::new());
    for round in 0..1 + rounds.div_ceil(CLAIMERS) {
        full(client).await?;
        let (times, sandboxes) = together(client, |client| async move { claim(&client).await }).await?;
        let (plain, _) = together(client, move |client| async move {
            let began = Instant::now();
            run_true(&client, steady).await?;
            Ok((began.elapsed(), steady))
        })
        .await?;
        if round >= 1 {
            at_once.extend(times);
            commands_at_once.extend(plain);
        }
        for sandbox in sandboxes {
            client.delete_sandbox(sandbox).await?;
        }
    }
    client.delete_sandbox(steady).await?;
    client.delete_pool(POOL).await?;

    let command = "command `true`";
    let mut one =
        Row::new("claim from a pool to first result, over HTTP", Figure::Time(median(claims.clone())));
    one.compare(command, Some(median(commands.clone())));
    one.budget("at most 1.5x", command, 1.5);
    let mut slowest = Row::new("the same, p99", Figure::Time(percentile(claims, 99)));
    slowest.compare(command, Some(median(commands)));
    slowest.budget("at most 5x", command, 5.0);
    let many = format!("{CLAIMERS} {command} at once");
    let mut crowd = Row::new(
        &format!("{CLAIMERS} claims at once, to first result"),
        Figure::Time(median(at_once.clone())),
    );
    crowd.compare(&many, Some(median(commands_at_once.clone())));
    crowd.budget("at most 1.5x", &many, 1.5);
    let mut crowd_slowest = Row::new("the same, p99", Figure::Time(percentile(at_once, 99)));
    crowd_slowest.compare(&many, Some(median(commands_at_once)));
    crowd_slowest.budget("at most 5x", &many, 5.0);
    Ok(vec![one, slowest, crowd, crowd_slowest])
}

/// Waits until as many are ready as should be.
async fn full(client: &Client) -> anyhow::Result<()> {
    let pool = client.settled_pool(POOL, FILL_SECONDS).await?;
    ensure!(pool.state == PoolState::Ready, "the pool cannot be filled: {:?}", pool.reason);
    Ok(())
}

/// From the request for a sandbox to the result of a command in it.
async fn claim(client: &Client) -> anyhow::Result<(Duration, SandboxId)> {
    let began = Instant::now();
    let sandbox = client.create_sandbox(&CreateSandbox::default()).await?;
    run_true(client, sandbox.id).await?;
    let took = began.elapsed();
    ensure!(sandbox.claimed_from.as_deref() == Some(POOL), "a sandbox was made although the pool was full");
    Ok((took, sandbox.id))
}

/// The same by all claimers at the same time.
async fn together<F: Future<Output = anyhow::Result<(Duration, SandboxId)>> + Send + 'static>(
    client: &Client,
    act: impl Fn(Client) -> F,
) -> anyhow::Result<(Vec<Duration>, Vec<SandboxId>)> {
    let all: Vec<_> = (0..CLAIMERS).map(|_| tokio::spawn(act(client.clone()))).collect();
    let mut done = Vec::new();
    for one in all {
        done.push(one.await.context("a claimer panicked")??);
    }
    Ok(done.into_iter().unzip())
}
