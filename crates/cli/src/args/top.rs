//! The arguments of `shoal top`.

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::value::interval;

/// Show a live view of sandboxes, pools and the machine.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal top                        until q is pressed
  shoal top --sort memory
  shoal top --once                 print a table once
  shoal top --json | jq .machine

Keys: c, m, d and n sort by cpu, memory, disk and name; arrows, PgUp and PgDn scroll; space pauses; q quits. If stdout is \
not a terminal, `shoal top` prints a table once.")]
pub struct Top {
    /// Print a table once
    #[arg(long)]
    pub once: bool,
    /// Time between two refreshes, for example 500ms or 10s
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = interval)]
    pub interval: Duration,
    /// Sort by
    #[arg(long, value_name = "BY", default_value = "cpu")]
    pub sort: TopSort,
    /// Print JSON once
    #[arg(long)]
    pub json: bool,
}

/// What the list is sorted by; the largest comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TopSort {
    /// Processors used now
    Cpu,
    /// Memory
    Memory,
    /// Disk
    Disk,
    /// Name, in alphabetical order
    Name,
}
