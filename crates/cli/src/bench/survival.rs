//! What a life costs beside creates and commands: a daemon that is killed and comes back, and standing still.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use client::{Client, Offsets, StreamEvent};
use runtime::ns::{NsBackend, NsConfig, forget_installation};
use runtime::{Isolation, Spec, StoreConfig};
use rustix::process::{Pid, Signal, kill_process};
use wire::api::{CreateSandbox, RunCommand};
use wire::launch::{Limits, Motion, Rootfs, StoreKind, StoreWish};
use wire::{CommandId, InstallationId, SandboxId};

use super::report::{Figure, Row, median};

/// Commands in each sandbox.
const WRITERS: usize = 5;
/// Sandboxes that are made or asked at once.
const AT_ONCE: usize = 16;
/// How long a daemon may take to come back before the benchmark gives up.
const BACK_MAX: Duration = Duration::from_secs(60);
/// Between two looks.
const STEP: Duration = Duration::from_millis(2);
/// All must be adopted again within this.
const ADOPTED_MAX: Duration = Duration::from_secs(1);
/// Freezing and thawing may take this long each.
const FREEZE_MAX: Duration = Duration::from_millis(2);
/// Counts once a second, without a process for each wait.
const COUNT: &str = "exec 3<> <(:); i=0; while :; do echo $((i += 1)); read -t 1 -u 3; done";

/// A daemon that is killed beside many sandboxes, each with commands that write.
pub async fn restart(client: &Client, data_dir: &Path, count: usize) -> anyhow::Result<Row> {
    let places = Arc::new(tokio::sync::Semaphore::new(AT_ONCE));
    let made = at_once(&places, vec![(); count], client, |client, ()| async move {
        let sandbox = client.create_sandbox(&CreateSandbox::default()).await?.id;
        let mut commands = Vec::new();
        for _ in 0..WRITERS {
            let wish = RunCommand {
                argv: Some(["bash", "-c", COUNT].map(str::to_owned).to_vec()),
                ..Default::default()
            };
            commands.push(client.start(sandbox, wish).await?.id);
        }
        Ok((sandbox, commands))
    })
    .await?;

    let old = daemon_pid(data_dir)?;
    kill_process(Pid::from_raw(old).context("the daemon has a pid")?, Signal::KILL)
        .context("cannot kill the daemon")?;
    let deadline = Instant::now() + BACK_MAX;
    // The holder of the lease starts another.
    while daemon_pid(data_dir).map_or(true, |pid| pid == old) || client.ready().await.is_err() {
        ensure!(Instant::now() < deadline, "the daemon did not come back");
        tokio::time::sleep(STEP).await;
    }
    let began = Instant::now();
    // A sandbox is adopted when it takes a command again.
    let sandboxes: Vec<SandboxId> = made.iter().map(|(sandbox, _)| *sandbox).collect();
    at_once(
        &places,
        sandboxes,
        client,
        |client, sandbox| async move { super::run_true(&client, sandbox).await },
    )
    .await?;
    let took = began.elapsed();

    at_once(&places, made, client, |client, (sandbox, commands)| async move {
        for command in &commands {
            check_count(&client, sandbox, command).await?;
        }
        client.delete_sandbox(sandbox).await?;
        Ok(())
    })
    .await?;
    let name = format!(
        "restart with {count} sandboxes and {} writing commands: each takes a command again",
        count * WRITERS
    );
    let mut row = Row::new(&name, Figure::Time(took));
    row.budget_time("within a second, no byte lost", ADOPTED_MAX);
    Ok(row)
}

/// Does the same to all, some at a time.
async fn at_once<T, U, F>(
    places: &Arc<tokio::sync::Semaphore>,
    items: Vec<T>,
    client: &Client,
    work: impl Fn(Client, T) -> F + Copy + Send + 'static,
) -> anyhow::Result<Vec<U>>
where
    T: Send + 'static,
    U: Send + 'static,
    F: Future<Output = anyhow::Result<U>> + Send,
{
    let mut tasks = Vec::new();
    for item in items {
        let (client, places) = (client.clone(), Arc::clone(places));
        tasks.push(tokio::spawn(async move {
            let _place = places.acquire_owned().await.context("nobody closes it")?;
            work(client, item).await
        }));
    }
    let mut all = Vec::new();
    for task in tasks {
        all.push(task.await.context("a task of the benchmark panicked")??);
    }
    Ok(all)
}

/// The pid of the daemon that lives on this data directory.
fn daemon_pid(data_dir: &Path) -> anyhow::Result<i32> {
    let text = std::fs::read(data_dir.join("daemon.json")).context("no daemon listens")?;
    let listening: serde_json::Value = serde_json::from_slice(&text)?;
    let pid = listening["pid"].as_i64().context("a daemon without a pid")?;
    Ok(i32::try_from(pid)?)
}

/// That what a command has written so far is 1, 2, 3 and so on, without a gap.
async fn check_count(client: &Client, sandbox: SandboxId, command: &CommandId) -> anyhow::Result<()> {
    let so_far = client.command(sandbox, command).await?;
    let end = so_far.stdout.end;
    ensure!(end > 0, "command {command} has written nothing");
    let mut stream = client.attach(sandbox, command.clone(), Offsets::default());
    let mut text = Vec::new();
    while (text.len() as u64) < end {
        match stream.next().await.context("the stream ended early")?? {
            StreamEvent::Output { bytes, .. } => text.extend_from_slice(&bytes),
            StreamEvent::Lost { from, to, .. } => bail!("the bytes from {from} to {to} were lost"),
            StreamEvent::Command(_) | StreamEvent::Refused(_) | StreamEvent::Ended(_) => {}
        }
    }
    let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    for (number, line) in (1u64..).zip(std::str::from_utf8(&text[..whole])?.lines()) {
        ensure!(line == number.to_string(), "command {command} wrote `{line}` where {number} was due");
    }
    Ok(())
}

/// Standing still and going on, asked of the backend itself: no route leads there yet.
pub async fn freeze(scratch: &Path, rounds: usize) -> anyhow::Result<Vec<Row>> {
    let data_dir = scratch.join("freeze");
    std::fs::create_dir(&data_dir).context("cannot make a directory")?;
    let mut bits = [0; 24];
    getrandom::fill(&mut bits).map_err(|error| anyhow::anyhow!("no random bits: {error}"))?;
    let installation = InstallationId::from_random(u64::from_le_bytes(bits[..8].try_into()?));
    let sandbox = SandboxId::from_random(u128::from_le_bytes(bits[8..].try_into()?));
    let store = StoreConfig { wish: StoreWish::Just(StoreKind::Directory), size_bytes: None };
    let config = NsConfig { data_dir, installation, launcher: std::env::current_exe()?, spares: 0, store };
    let backend = NsBackend::start(config).await?;
    let measured = freeze_rounds(&backend, sandbox, rounds).await;
    backend.teardown(sandbox).await?;
    drop(backend);
    forget_installation(installation)?;
    let (frozen, thawed) = measured?;
    let mut rows = vec![Row::new("freeze", Figure::Time(frozen)), Row::new("thaw", Figure::Time(thawed))];
    for row in &mut rows {
        row.budget_time("at most 2 ms", FREEZE_MAX);
    }
    Ok(rows)
}

async fn freeze_rounds(
    backend: &NsBackend,
    sandbox: SandboxId,
    rounds: usize,
) -> anyhow::Result<(Duration, Duration)> {
    let limits = Limits { cpu_millis: 1000, memory_bytes: 1 << 30, pids: 64, disk_bytes: None };
    backend.prepare(&Rootfs::Host).await?;
    let (over, writable) = Default::default();
    let spec = Spec { sandbox, rootfs: Rootfs::Host, limits, mounts: Vec::new(), over, writable };
    backend.launch(&spec).await?;
    let (mut frozen, mut thawed) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let began = Instant::now();
        backend.freeze(sandbox, Motion::Still).await?;
        let between = Instant::now();
        backend.freeze(sandbox, Motion::Going).await?;
        frozen.push(between - began);
        thawed.push(between.elapsed());
    }
    Ok((median(frozen), median(thawed)))
}
