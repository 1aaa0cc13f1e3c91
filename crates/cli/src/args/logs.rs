//! The arguments of `shoal logs`.

use std::time::Duration;

use clap::Args;

use super::value::duration;

/// Print the output of a command.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal logs work                  the newest command of the sandbox
  shoal logs -f work 46f65400      a command by its id, until it ends
  shoal logs --tail 20 work        only the last 20 lines
  shoal logs --since 10m work      every command of the last 10 minutes")]
pub struct Logs {
    /// Follow the output until the command ends
    #[arg(short, long)]
    pub follow: bool,
    /// Print only this many of the last lines
    #[arg(short = 'n', long, value_name = "LINES")]
    pub tail: Option<usize>,
    /// Print the output of every command that was started within this time, oldest first, each under a heading
    #[arg(long, value_name = "DURATION", value_parser = duration, conflicts_with_all = ["follow", "command", "json"])]
    pub since: Option<Duration>,
    /// The sandbox's id or name
    pub sandbox: String,
    /// The command's id [default: the newest command]
    pub command: Option<String>,
    /// Print one JSON object per chunk of output
    #[arg(long)]
    pub json: bool,
}
