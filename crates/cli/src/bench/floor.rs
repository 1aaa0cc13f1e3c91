//! The floor in a process of its own: it forks, and this one has many threads.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::Context;
use clap::ValueEnum;

use crate::args::{BenchFloor, FloorKind};

/// What the floor works on.
pub struct Floor {
    /// A generation of the image `host`.
    pub image: PathBuf,
    /// A directory on the file system that sandboxes use.
    pub scratch: PathBuf,
}

impl Floor {
    /// The bare kernel work of one kind, ready to be done whenever it is asked for: by turns with ours, so that whatever else the
    /// machine is busy with meets both.
    pub fn start(&self, kind: FloorKind) -> anyhow::Result<Beside> {
        let name = kind.to_possible_value().context("a floor without a name")?;
        let mut process = Command::new(std::env::current_exe()?)
            .args(["bench-floor", "--kind", name.get_name(), "--image"])
            .arg(&self.image)
            .arg("--scratch")
            .arg(&self.scratch)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the floor")?;
        let asks = process.stdin.take().context("the floor has an input")?;
        let answers = BufReader::new(process.stdout.take().context("the floor has an output")?);
        Ok(Beside { process, asks: Some(asks), answers })
    }
}

/// A floor that waits to be asked.
pub struct Beside {
    process: Child,
    asks: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Beside {
    /// Does it once, and tells how long it took.
    pub fn round(&mut self) -> anyhow::Result<Duration> {
        let asks = self.asks.as_mut().context("the floor has an input until it is dropped")?;
        writeln!(asks).context("the floor has ended")?;
        let mut line = String::new();
        self.answers.read_line(&mut line).context("the floor does not answer")?;
        Ok(Duration::from_nanos(line.trim().parse().context("the floor failed, and has said why")?))
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        self.asks = None; // It ends when nobody can ask any more.
        if let Err(error) = self.process.wait() {
            eprintln!("the floor cannot be waited for: {error}");
        }
    }
}

/// `shoal bench-floor`, in its own process: for every line that it reads it does the work once and prints nanoseconds.
pub fn run(arguments: &BenchFloor) -> anyhow::Result<()> {
    let BenchFloor { kind, image, scratch } = arguments;
    for line in std::io::stdin().lines() {
        line.context("cannot read what is asked for")?;
        let took = match kind {
            FloorKind::Create => runtime::ns::floor::create(image, scratch),
            FloorKind::CreateMany => runtime::ns::floor::create_many(image, scratch, super::AT_ONCE),
            FloorKind::Command => runtime::ns::floor::command(),
        };
        println!("{}", took.context("the floor failed")?.as_nanos());
    }
    Ok(())
}
