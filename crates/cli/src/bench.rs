//! `shoal bench`: what things cost here, beside what they would cost without Shoal, in one run.
//!
//! A private daemon with a data directory of its own does the work, and is gone afterwards. Every figure stands beside its
//! comparators: a number of milliseconds means little on another machine, a ratio means much. Budgets are
//! those of the design; a missed one is shown, and does not fail the run: machines are noisy.

mod chart;
mod comparators;
mod floor;
mod images;
mod langsmith;
mod one_shot;
mod pause;
mod pools;
mod python;
mod report;
mod sandbox0;
mod store;
mod streams;
mod survival;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use client::Client;
use wire::SandboxId;
use wire::api::{CreateSandbox, RunCommand};

pub use floor::run as run_floor;
use report::{Figure, Report, Row, median};

use crate::args::{Bench, BenchPart, FloorKind};
use crate::daemon::private;

/// Rounds before those that count: caches fill, namespaces are made ahead.
const WARM_UP: usize = 10;
/// Sandboxes that are asked for at the same moment.
const AT_ONCE: usize = 100;
/// How often they are.
const AT_ONCE_ROUNDS: usize = 5;
/// How long the daemon may take to remove everything when the run is over.
const END_MAX: Duration = Duration::from_secs(60);
/// Between two looks.
const END_STEP: Duration = Duration::from_millis(10);
/// A one-shot run that starts a daemon takes a few hundred milliseconds.
const ONE_SHOT_ROUNDS_MAX: usize = 20;
/// Creates at the start and at the end of a crowd that are compared.
const ENDS: usize = 20;
/// Creates before those: by then the spares are used up, as they are at the end.
const SPARED: usize = 20;
const IDLE_MIN: usize = SPARED + 2 * ENDS;

/// `shoal bench`
pub async fn bench(arguments: &Bench) -> anyhow::Result<()> {
    // Before anything is measured: minutes of it would be lost over a directory that cannot be made.
    if let Some(directory) = &arguments.write {
        std::fs::create_dir_all(directory)
            .with_context(|| format!("cannot make `{}`", directory.display()))?;
    }
    // What a build has just written would go to the disk while we measure.
    eprintln!("waiting for the disk");
    tokio::task::spawn_blocking(rustix::fs::sync).await.context("the disk was not waited for")?;
    let scratch = Scratch::new()?;
    let base = scratch.0.join("daemon");
    // As `shoal serve` would keep them.
    let spares = server::config::SPARES_DEFAULT;
    let site = private::Site { base: base.clone(), spares, linger: Duration::ZERO };
    let private = private::join(site).await?;
    let client = &private.client;
    let data_dir = &base.join("data");
    let rounds = arguments.rounds;

    // The first sandbox also builds the image, which the floor uses too.
    let first = client.create_sandbox(&CreateSandbox::default()).await?;
    client.delete_sandbox(first.id).await?;
    let image = newest_image(&data_dir.join("images/host"))?;
    let floor = floor::Floor { image, scratch: data_dir.join("sandboxes") };

    let wanted = |part| arguments.only.is_empty() || arguments.only.contains(&part);
    let mut report = Report::new();
    if wanted(BenchPart::Create) {
        report.add(create(client, &floor, rounds, arguments, &scratch.0).await?);
    }
    if wanted(BenchPart::Command) {
        let (row, shell) = command(client, &floor, rounds, arguments).await?;
        report.add(row);
        match &arguments.langsmith_python {
            Some(python) => {
                progress("a command with LangSmith's client");
                report.add(langsmith::row(python, &client.url(), data_dir, rounds, shell).await?);
            }
            None => eprintln!(
                "left out: a command with LangSmith's client, since --langsmith-python names no Python that has it"
            ),
        }
        match &arguments.sandbox0_python {
            Some(python) => {
                progress("a command with Sandbox0's client");
                report.add(sandbox0::row(python, &client.url(), data_dir, rounds, shell).await?);
            }
            None => eprintln!(
                "left out: a command with Sandbox0's client, since --sandbox0-python names no Python that has it"
            ),
        }
    }
    if wanted(BenchPart::OneShot) {
        progress("`shoal run` without a daemon");
        report.add_all(one_shot::rows(&scratch.0, rounds.min(ONE_SHOT_ROUNDS_MAX), arguments)?);
    }
    if wanted(BenchPart::Pools) {
        progress("claims from a pool");
        report.add_all(pools::rows(client, rounds).await?);
    }
    if wanted(BenchPart::AtOnce) {
        report.add(at_once(client, &floor).await?);
    }
    if wanted(BenchPart::Bytes) {
        progress("output and files");
        report.add_all(streams::rows(client, data_dir, &scratch.0).await?);
    }
    if wanted(BenchPart::Freeze) {
        progress("freeze and thaw");
        report.add_all(survival::freeze(&scratch.0, rounds).await?);
    }
    if wanted(BenchPart::Pause) {
        progress("pauses and resumes");
        report.add_all(pause::rows(client, rounds).await?);
    }
    if wanted(BenchPart::Store) {
        progress("the store");
        report.add_all(store::rows(&scratch.0, rounds).await?);
    }
    if wanted(BenchPart::Images) && !arguments.without_comparators {
        progress("images");
        report.add_all(images::rows(client, &scratch.0).await?);
    }
    if wanted(BenchPart::Restart) {
        progress("restart");
        report.add(survival::restart(client, data_dir, arguments.restart).await?);
    }
    // Last: what the kernel does after the end of so many namespaces would disturb the others.
    if wanted(BenchPart::Idle) {
        report.add_all(idle(client, data_dir, arguments.idle).await?);
    }
    drop(private);
    wait_for_the_end_of(data_dir).await?;
    let printed = if arguments.json { report.print_json() } else { report.print() };
    // Whatever became of the one, the other is done.
    let written = match &arguments.write {
        Some(directory) => report.write(directory, &machine()),
        None => Ok(()),
    };
    printed.and(written)
}

/// What was measured, and on what machine.
fn machine() -> String {
    let said = |program: &str, arguments: &[&str]| {
        let output = std::process::Command::new(program).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map_or("unknown", |rest| rest.trim_start_matches([' ', '\t', ':']));
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let kernel = said("uname", &["-sr"]).unwrap_or_else(|| "unknown".into());
    let commit = said("git", &["rev-parse", "--short", "HEAD"]).unwrap_or_else(|| "unknown".into());
    let build = if cfg!(debug_assertions) { "debug" } else { "release" };
    format!(
        "- Shoal {} ({build} build), commit {commit}\n- {cores} cores, {model}\n- {kernel}\n",
        env!("CARGO_PKG_VERSION")
    )
}

/// The daemon removes its data directory last.
async fn wait_for_the_end_of(data_dir: &Path) -> anyhow::Result<()> {
    let deadline = Instant::now() + END_MAX;
    while data_dir.exists() {
        ensure!(Instant::now() < deadline, "the daemon has not removed `{}`", data_dir.display());
        tokio::time::sleep(END_STEP).await;
    }
    Ok(())
}

async fn create(
    client: &Client,
    floor: &floor::Floor,
    rounds: usize,
    arguments: &Bench,
    scratch: &Path,
) -> anyhow::Result<Row> {
    progress("create to first result");
    let (mut times, mut floors) = (Vec::new(), Vec::new());
    let mut bare = floor.start(FloorKind::Create)?;
    for round in 0..WARM_UP + rounds {
        let began = Instant::now();
        let sandbox = client.create_sandbox(&CreateSandbox::default()).await?;
        run_true(client, sandbox.id).await?;
        let took = began.elapsed();
        client.delete_sandbox(sandbox.id).await?;
        let theirs = bare.round()?;
        if round >= WARM_UP {
            times.push(took);
            floors.push(theirs);
        }
    }
    let mut row = Row::new("create to first result, over HTTP", Figure::Time(median(times)));
    row.compare("floor", Some(median(floors)));
    row.budget("at most 3x", "floor", 3.0);
    if !arguments.without_comparators {
        row.compare("bubblewrap", comparators::bubblewrap(rounds)?);
        row.compare("runc run", comparators::runc_run(&floor.image, rounds)?);
        row.compare("runsc run", comparators::runsc_run(&floor.image, rounds.min(20))?);
        row.compare("podman run", comparators::podman_run(scratch, rounds.min(20))?);
        row.budget_faster("at least 6x faster than", "runc run", 6.0);
    }
    Ok(row)
}

async fn command(
    client: &Client,
    floor: &floor::Floor,
    rounds: usize,
    arguments: &Bench,
) -> anyhow::Result<(Row, Duration)> {
    progress("command in a running sandbox");
    let sandbox = client.create_sandbox(&CreateSandbox::default()).await?;
    let (mut plain, mut shell, mut floors) = (Vec::new(), Vec::new(), Vec::new());
    let mut bare = floor.start(FloorKind::Command)?;
    for round in 0..WARM_UP + 3 * rounds {
        let began = Instant::now();
        run_true(client, sandbox.id).await?;
        let between = Instant::now();
        run(client, sandbox.id, RunCommand { script: Some("true".into()), ..Default::default() }).await?;
        let after = Instant::now();
        let theirs = bare.round()?;
        if round >= WARM_UP {
            plain.push(between - began);
            shell.push(after - between);
            floors.push(theirs);
        }
    }
    client.delete_sandbox(sandbox.id).await?;
    let mut row = Row::new("command `true`, over HTTP", Figure::Time(median(plain)));
    row.compare("floor", Some(median(floors)));
    let shell = median(shell);
    row.compare("through bash", Some(shell));
    row.budget("at most 2x", "floor", 2.0);
    if !arguments.without_comparators {
        row.compare("runc exec", comparators::runc_exec(&floor.image, rounds)?);
        row.budget_faster("at least 10x faster than", "runc exec", 10.0);
    }
    Ok((row, shell))
}

async fn at_once(client: &Client, floor: &floor::Floor) -> anyhow::Result<Row> {
    progress("100 creates at once");
    let (mut times, mut floors) = (Vec::new(), Vec::new());
    let mut bare = floor.start(FloorKind::CreateMany)?;
    for _ in 0..AT_ONCE_ROUNDS {
        let began = Instant::now();
        let creates = (0..AT_ONCE).map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.create_sandbox(&CreateSandbox::default()).await })
        });
        let mut made = Vec::new();
        for create in creates.collect::<Vec<_>>() {
            made.push(create.await.context("a create panicked")??.id);
        }
        times.push(began.elapsed());
        for id in made {
            client.delete_sandbox(id).await?;
        }
        floors.push(bare.round()?);
    }
    let mut row = Row::new("100 creates at once", Figure::Time(median(times)));
    row.compare("100 floors", Some(median(floors)));
    row.budget("at most 2x", "100 floors", 2.0);
    Ok(row)
}

async fn idle(client: &Client, data_dir: &Path, count: usize) -> anyhow::Result<Vec<Row>> {
    progress("idle sandboxes");
    ensure!(count >= IDLE_MIN, "--idle is at least {IDLE_MIN}");
    let before = available_memory()?;
    let mut times = Vec::new();
    let mut made = Vec::new();
    for _ in 0..count {
        let began = Instant::now();
        let sandbox = client.create_sandbox(&CreateSandbox::default()).await?;
        run_true(client, sandbox.id).await?;
        times.push(began.elapsed());
        made.push(sandbox.id);
    }
    let after = available_memory()?;
    let private = private_memory_of_inits(data_dir, &made)?;
    let first = median(times[SPARED..SPARED + ENDS].to_vec());
    let last = median(times[count - ENDS..].to_vec());
    for id in made {
        client.delete_sandbox(id).await?;
    }
    let each = before.saturating_sub(after) / count as u64;
    let mut machine =
        Row::new(&format!("idle sandbox, of {count}: all it costs the machine"), Figure::Bytes(each));
    machine.budget_bytes("at most 1 MiB", 1 << 20);
    let mut init = Row::new("idle sandbox: init's own memory", Figure::Bytes(private));
    init.budget_bytes("at most 128 KiB", 128 << 10);
    let mut crowd =
        Row::new(&format!("create to first result, the last {ENDS} of {count}"), Figure::Time(last));
    crowd.compare("the first", Some(first));
    crowd.budget("at most 2x", "the first", 2.0);
    Ok(vec![machine, init, crowd])
}

async fn run_true(client: &Client, sandbox: SandboxId) -> anyhow::Result<()> {
    run(client, sandbox, RunCommand { argv: Some(vec!["true".into()]), ..Default::default() }).await
}

async fn run(client: &Client, sandbox: SandboxId, wish: RunCommand) -> anyhow::Result<()> {
    let finished = client.run(sandbox, wish).await?;
    let code = finished.command.result.and_then(|result| result.exit_code);
    ensure!(code == Some(0), "`true` ended with {code:?}");
    Ok(())
}

fn newest_image(images: &Path) -> anyhow::Result<std::path::PathBuf> {
    let entries = std::fs::read_dir(images).with_context(|| format!("cannot list {}", images.display()))?;
    let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u64>().ok());
    let newest = numbers.max().context("the image `host` was not built")?;
    Ok(images.join(newest.to_string()))
}

/// What the kernel would still give to programs, in bytes.
fn available_memory() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    Ok(kib.context("no MemAvailable in /proc/meminfo")? * 1024)
}

/// The median private memory of the inits of these sandboxes, found by their cgroups.
fn private_memory_of_inits(data_dir: &Path, sandboxes: &[SandboxId]) -> anyhow::Result<u64> {
    let installation = std::fs::read_to_string(data_dir.join("installation"))?;
    let group = format!("shoal-{}", installation.trim());
    let root = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"]
        .into_iter()
        .map(|root| Path::new(root).join(&group))
        .find(|path| path.join("cgroup.procs").exists())
        .context("cannot find the sandboxes' cgroups")?;
    let mut sizes = Vec::new();
    for sandbox in sandboxes {
        let procs = std::fs::read_to_string(root.join(sandbox.to_string()).join("cgroup.procs"))?;
        let pid = procs.lines().next().context("a sandbox without init")?;
        let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
        let kib = |name: &str| {
            let line = rollup.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0)
        };
        sizes.push((kib("Private_Clean:") + kib("Private_Dirty:")) * 1024);
    }
    sizes.sort_unstable();
    Ok(sizes[sizes.len() / 2])
}

fn progress(what: &str) {
    eprintln!("measuring: {what}");
}

/// A directory for this run alone, removed at its end.
struct Scratch(std::path::PathBuf);

impl Scratch {
    fn new() -> anyhow::Result<Self> {
        let path = Path::new("/var/tmp").join(format!("shoal-bench-{}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            eprintln!("cannot remove {}: {error}", self.0.display());
        }
    }
}

/// The time that `what` takes, over and over.
fn time_rounds(rounds: usize, mut what: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<Vec<Duration>> {
    for _ in 0..rounds.min(3) {
        what()?;
    }
    (0..rounds)
        .map(|_| {
            let began = Instant::now();
            what()?;
            Ok(began.elapsed())
        })
        .collect()
}
