//! The arguments of `shoal watch`.

use clap::Args;

/// Print events of sandboxes and their commands as they happen.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal watch                      all sandboxes, until Ctrl-C
  shoal watch work                 one sandbox, until it is deleted
  shoal watch --json | jq 'select(.type == \"command_ended\") | .result'

The current state comes first, then every change. `shoal watch` survives a restart of the daemon.")]
pub struct Watch {
    /// Watch only this sandbox (id or name) [default: all]
    pub sandbox: Option<String>,
    /// Print one JSON object per event
    #[arg(long)]
    pub json: bool,
}
