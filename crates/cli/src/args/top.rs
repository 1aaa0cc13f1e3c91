//! The arguments of `shoal top`.

use clap::{Args, ValueEnum};

use super::interval;

/// Watch sandboxes, pools and the machine, live.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal top                        until q is pressed
  shoal top --sort memory
  shoal top --once                 one look, as a table
  shoal top --json | jq .machine

Keys: c, m, d and n sort by cpu, memory, disk and name; arrows, PgUp and PgDn move the list; space stands still; q leaves.
Into a pipe it prints one look, as with --once.")]
pub struct Top {
    /// Look once, and print a table
    #[arg(long)]
    pub once: bool,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = interval)]
    pub interval: f64,
    /// What comes first
    #[arg(long, value_name = "BY", default_value = "cpu")]
    pub sort: TopSort,
    /// Print one look as JSON
    #[arg(long)]
    pub json: bool,
}

/// What the list is sorted by, the largest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TopSort {
    /// Processors used now
    Cpu,
    /// Memory
    Memory,
    /// Disk
    Disk,
    /// The name, from A on
    Name,
}
