//! The arguments of `shoal version`.

use clap::Args;

/// Print the version of this program and of the daemon.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal version\n  shoal version --json | jq -r .daemon")]
pub struct Version {
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
}
