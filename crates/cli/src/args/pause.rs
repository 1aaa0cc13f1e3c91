//! The arguments of `shoal pause` and `resume`.

use std::time::Duration;

use clap::Args;

use super::value::duration;

/// Pause sandboxes. Commands and file operations resume them.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal pause work                    freeze it; it goes on where it was
  shoal pause work --drop             end its processes and keep its files
  shoal pause work --drop --grace 1m  and give them a minute to end

A frozen sandbox keeps its memory and uses no processor time. With --drop it gives processor and memory back; files in /tmp \
are kept, files in /dev/shm are not.")]
pub struct Pause {
    /// Ids or names of the sandboxes
    #[arg(required = true, value_name = "SANDBOX")]
    pub sandboxes: Vec<String>,
    /// End the processes and keep only the files
    #[arg(long)]
    pub drop: bool,
    /// Time for processes to end after SIGTERM, for example 30s [default: 10s]
    #[arg(long, value_name = "DURATION", value_parser = duration, requires = "drop")]
    pub grace: Option<Duration>,
    /// Print the sandboxes as JSON
    #[arg(long)]
    pub json: bool,
}

/// Resume paused sandboxes, and failed ones that have all their files.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal resume work")]
pub struct Resume {
    /// Ids or names of the sandboxes
    #[arg(required = true, value_name = "SANDBOX")]
    pub sandboxes: Vec<String>,
    /// Print the sandboxes as JSON
    #[arg(long)]
    pub json: bool,
}
