//! The arguments of `shoal stats`.

use std::time::Duration;

use clap::Args;

use super::value::interval;

/// Show resource usage and limits.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal stats                      all sandboxes and the machine
  shoal stats work                 one sandbox
  shoal stats --watch              refresh until Ctrl-C
  shoal stats --json | jq '.sandboxes[] | {name, pids: .usage.pids}'

CPU is the number of processors in use during a short sample, beside the limit; TIME is the processor time used so far. MEMORY \
includes the page cache and tmpfs, as the limit does. DISK is measured in the background and may be some seconds old; `>` \
before it means that the measurement was incomplete and there is more.")]
pub struct Stats {
    /// Show only this sandbox (id or name) [default: all]
    pub sandbox: Option<String>,
    /// Refresh until Ctrl-C
    #[arg(short, long)]
    pub watch: bool,
    /// Time between two refreshes, for example 500ms or 10s
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = interval)]
    pub interval: Duration,
    /// Print one JSON object; with --watch, one per line and refresh
    #[arg(long)]
    pub json: bool,
}
