//! `shoal run -- true` as a person types it, without a daemon: with the private daemon of an earlier run, and with a new one.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::ensure;

use super::comparators::{self, quietly};
use super::report::{Figure, Row, median};
use super::{END_MAX, END_STEP, time_rounds};
use crate::args::Bench;

/// This program, whatever has become of its name.
const OWN_PROGRAM: &str = "/proc/self/exe";
/// Longer than all rounds take; the last one ends the daemon.
const LINGER: &str = "10m";
/// What a person hardly notices.
const WARM_MAX: Duration = Duration::from_millis(50);
/// What a person does not wait for.
const COLD_MAX: Duration = Duration::from_millis(300);

/// Both.
pub fn rows(scratch: &Path, rounds: usize, arguments: &Bench) -> anyhow::Result<Vec<Row>> {
    let base = scratch.join("one-shot");
    let mut cold = Vec::new();
    for _ in 0..rounds {
        let began = Instant::now();
        quietly(&mut run(&base, "0"))?;
        cold.push(began.elapsed());
        // The next round starts when nothing is left of this one.
        until_gone(&base)?;
    }
    let warm = time_rounds(rounds, || quietly(&mut run(&base, LINGER)));
    end(&base)?;
    let mut warm = Row::new("`shoal run -- true`, after another", Figure::Time(median(warm?)));
    warm.budget_time("at most 50 ms", WARM_MAX);
    if !arguments.without_comparators {
        warm.compare("bubblewrap", comparators::bubblewrap(rounds)?);
        warm.compare("podman run", comparators::podman_run(&scratch.join("one-shot-podman"), rounds)?);
    }
    let mut cold = Row::new("`shoal run -- true`, the first", Figure::Time(median(cold)));
    cold.budget_time("at most 300 ms", COLD_MAX);
    Ok(vec![warm, cold])
}

fn run(base: &Path, linger: &str) -> Command {
    let mut command = Command::new(OWN_PROGRAM);
    command.arg0("shoal").args(["run", "--", "true"]);
    for name in ["SHOAL_URL", "SHOAL_API_KEY"] {
        command.env_remove(name);
    }
    // No daemon lives in a directory that is not there.
    command.env("SHOAL_DATA_DIR", base.join("none")).env("SHOAL_PRIVATE_DIR", base);
    command.env("SHOAL_PRIVATE_LINGER", linger);
    command
}

/// Ends the daemon that stayed.
fn end(base: &Path) -> anyhow::Result<()> {
    if let Ok(daemon) = std::fs::read_to_string(base.join("data/daemon.json")) {
        let listening: server::Listening = serde_json::from_str(&daemon)?;
        let pid = i32::try_from(listening.pid).ok().and_then(rustix::process::Pid::from_raw);
        if let Some(pid) = pid {
            rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        }
    }
    until_gone(base)
}

/// The daemon removes its directory last.
fn until_gone(base: &Path) -> anyhow::Result<()> {
    let deadline = Instant::now() + END_MAX;
    while base.join("data").exists() {
        ensure!(Instant::now() < deadline, "the daemon has not removed `{}`", base.display());
        std::thread::sleep(END_STEP);
    }
    Ok(())
}
