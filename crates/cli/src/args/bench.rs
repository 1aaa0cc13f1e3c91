//! The arguments of `shoal bench`.

use std::path::PathBuf;

use clap::Args;

/// Measure the cost of sandboxes on this machine, next to the bare kernel and other tools.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal bench
  shoal bench --only create,command
  shoal bench --rounds 30 --idle 100 --restart 20 --json
  shoal bench --write docs

It needs root, and runs on a private daemon with a data directory of its own, which it removes afterwards. bubblewrap, \
runc, runsc and podman are measured where they are installed.")]
pub struct Bench {
    /// Measure only these parts, separated by commas [default: all]
    #[arg(long, value_name = "WHAT", value_delimiter = ',', conflicts_with = "write")]
    pub only: Vec<BenchPart>,
    /// Rounds per measurement; the report shows medians
    #[arg(long, default_value_t = 100)]
    pub rounds: usize,
    /// Number of idle sandboxes
    #[arg(long, default_value_t = 1000)]
    pub idle: usize,
    /// Number of sandboxes during the restart test, each with five writing commands
    #[arg(long, value_name = "SANDBOXES", default_value_t = 200)]
    pub restart: usize,
    /// Write `benchmarks.md` and `benchmarks.svg` into this directory
    #[arg(long, value_name = "DIR")]
    pub write: Option<PathBuf>,
    /// A Python interpreter with `langsmith[sandbox]`, to measure a command with that client
    #[arg(long, value_name = "PROGRAM")]
    pub langsmith_python: Option<PathBuf>,
    /// A Python interpreter with `sandbox0`, to measure a command with that client
    #[arg(long, value_name = "PROGRAM")]
    pub sandbox0_python: Option<PathBuf>,
    /// Measure only Shoal and the bare kernel
    #[arg(long)]
    pub without_comparators: bool,
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum BenchPart {
    /// From the request for a sandbox to the result of its first command
    Create,
    /// A command in a running sandbox
    Command,
    /// `shoal run` without a daemon, from a shell
    OneShot,
    /// Claims from a pool, one after another and 20 at once
    Pools,
    /// 100 creates at once
    AtOnce,
    /// Throughput of command output, uploads and downloads
    Bytes,
    /// Freezing and thawing
    Freeze,
    /// Pauses and resumes over HTTP, with and without memory
    Pause,
    /// Storage: sandboxes and volumes with and without btrfs
    Store,
    /// Images: pull, unpack, and the first create from one
    Images,
    /// Killing the daemon while many commands write
    Restart,
    /// Memory of an idle sandbox, and the last create of many
    Idle,
}

/// The benchmark's floor, in a process of its own.
#[derive(Debug, Args)]
pub struct BenchFloor {
    /// What to measure
    #[arg(long)]
    pub kind: FloorKind,
    /// A generation of the image `host`
    #[arg(long)]
    pub image: PathBuf,
    /// Where directories may be made
    #[arg(long)]
    pub scratch: PathBuf,
}

/// What the floor measures.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum FloorKind {
    /// A bare create.
    Create,
    /// Bare creates, all begun at once.
    CreateMany,
    /// A bare command.
    Command,
}
