//! The arguments of `shoal ps` and `shoal kill`.

use clap::Args;

/// List the running commands of a sandbox; without one, list sandboxes as `shoal ls` does.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal ps                      all sandboxes
  shoal ps work                 the running commands of a sandbox
  shoal ps -a work              also those that have ended
  shoal kill work $(shoal ps -q work)")]
pub struct Ps {
    /// The sandbox's id or name
    pub sandbox: Option<String>,
    /// Include commands that have ended
    #[arg(short, long)]
    pub all: bool,
    /// Print only the ids
    #[arg(short, long, conflicts_with = "json")]
    pub quiet: bool,
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// Kill commands, or send them a signal. The sandbox keeps running.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal kill work               the only running command of the sandbox
  shoal kill work 46f65400      a command by its id; `shoal ps work` lists them
  shoal kill -s TERM work       send SIGTERM instead of SIGKILL
  shoal kill --all work         every running command")]
pub struct Kill {
    /// The sandbox's id or name
    pub sandbox: String,
    /// Ids of the commands [default: the only one that is running]
    #[arg(value_name = "COMMAND", conflicts_with = "all")]
    pub commands: Vec<String>,
    /// Kill all running commands of the sandbox
    #[arg(short, long)]
    pub all: bool,
    /// Send this signal, for example TERM, instead of killing all processes of the command
    #[arg(short, long)]
    pub signal: Option<String>,
    /// Print nothing on success
    #[arg(short, long)]
    pub quiet: bool,
}
