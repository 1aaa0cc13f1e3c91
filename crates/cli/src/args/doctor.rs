//! The arguments of `shoal doctor`.

use std::path::PathBuf;

use clap::Args;

/// Check whether this machine can run Shoal, and how to fix what is missing.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  sudo shoal doctor
  shoal doctor --data-dir /srv/shoal
  shoal doctor --json | jq '.[] | select(.verdict != \"ok\")'

It needs no daemon and changes nothing. Run it as root: other users cannot check everything.

The exit code is 0 if Shoal works here, even with warnings, and 1 if something required is missing.")]
pub struct Doctor {
    /// The data directory that a daemon would use [default: /var/lib/shoal]
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
    /// What was found of the machine, before there were threads
    #[arg(skip)]
    pub findings: Vec<runtime::doctor::Finding>,
}
