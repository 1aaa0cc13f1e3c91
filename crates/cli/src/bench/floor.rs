//! The floor in a process of its own: it forks, and this one has many threads.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};

use crate::args::{BenchFloor, FloorKind};

/// What the floor works on.
pub struct Floor {
    /// A generation of the image `host`.
    pub image: PathBuf,
    /// A directory on the file system that sandboxes use.
    pub scratch: PathBuf,
}

impl Floor {
    /// Bare creates, one after the other.
    pub fn create(&self, rounds: usize) -> anyhow::Result<Vec<Duration>> {
        self.measure("create", rounds)
    }

    /// Bare creates, all begun at once; the time until the last has ended.
    pub fn create_many(&self, count: usize) -> anyhow::Result<Duration> {
        self.measure("create-many", count)?.pop().context("the floor measured nothing")
    }

    /// Bare commands, one after the other.
    pub fn command(&self, rounds: usize) -> anyhow::Result<Vec<Duration>> {
        self.measure("command", rounds)
    }

    fn measure(&self, kind: &str, rounds: usize) -> anyhow::Result<Vec<Duration>> {
        let output = Command::new(std::env::current_exe()?)
            .args(["bench-floor", "--kind", kind, "--rounds", &rounds.to_string(), "--image"])
            .arg(&self.image)
            .arg("--scratch")
            .arg(&self.scratch)
            .stderr(Stdio::inherit())
            .output()
            .context("cannot start the floor")?;
        ensure!(output.status.success(), "the floor ended with {}", output.status);
        let nanos: Vec<u64> =
            serde_json::from_slice(&output.stdout).context("the floor said something odd")?;
        Ok(nanos.into_iter().map(Duration::from_nanos).collect())
    }
}

/// `shoal bench-floor`, in its own process: prints nanoseconds as a JSON list.
pub fn run(arguments: &BenchFloor) -> anyhow::Result<()> {
    let BenchFloor { kind, rounds, image, scratch } = arguments;
    let times = match kind {
        FloorKind::Create => runtime::floor::create(image, scratch, *rounds),
        FloorKind::CreateMany => runtime::floor::create_many(image, scratch, *rounds).map(|time| vec![time]),
        FloorKind::Command => runtime::floor::command(*rounds),
    };
    let nanos: Vec<u128> = times.context("the floor failed")?.iter().map(Duration::as_nanos).collect();
    println!("{}", serde_json::to_string(&nanos)?);
    Ok(())
}
