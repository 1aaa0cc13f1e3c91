//! The arguments of `shoal config`.

use clap::Args;

use super::serve::DaemonFlags;

/// Show the effective configuration.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal config show\n  shoal config show --config new.toml")]
pub struct Config {
    #[command(subcommand)]
    pub action: ConfigAction,
}

#[derive(Debug, clap::Subcommand)]
pub enum ConfigAction {
    Show(Box<ShowConfig>),
}

/// Print every setting that `shoal serve` would use with the same flags, and where its value comes from.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal config show
  shoal config show --config new.toml       check a file before a restart
  shoal config show --json | jq '.[] | select(.source != \"default\")'

It fails where `shoal serve` would fail, with the same error.")]
pub struct ShowConfig {
    #[command(flatten)]
    pub flags: DaemonFlags,
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}
