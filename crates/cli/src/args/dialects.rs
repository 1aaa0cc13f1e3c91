//! The arguments of `shoal dialects`.

use clap::Args;

/// Print the variables that switch another system's client over to this daemon.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal dialects\n  eval \"$(shoal dialects daytona)\"")]
pub struct Dialects {
    /// The system, such as `daytona`; without it, list all of them
    pub name: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
