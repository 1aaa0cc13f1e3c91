//! The arguments of `shoal shell` and `shoal attach`.

use clap::Args;

use super::run::Process;
use super::sandbox::Spec;
use crate::terminal::detach::{self, DetachKeys};

/// Open a login shell in a new sandbox that is deleted afterwards, or in an existing one.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal shell                      in a new sandbox, deleted afterwards
  shoal shell work                 in an existing one
  shoal shell -u nobody work
  echo 'id; pwd' | shoal shell work

Every key goes to the shell, including Ctrl-C. Ctrl-P Ctrl-Q leaves it running; `shoal attach work` returns to it. The \
shell survives a restart of the daemon. If stdin is not a terminal, the shell reads its commands from stdin.

The exit code is the shell's own, 128 + n if signal n ended it or `shoal`, 125 if Shoal failed, and 0 after Ctrl-P Ctrl-Q.")]
pub struct Shell {
    /// An existing sandbox (id or name) [default: a new one]
    #[arg(conflicts_with_all = ["template", "pool", "cpu", "memory", "disk", "mounts"])]
    pub sandbox: Option<String>,
    #[command(flatten)]
    pub process: Process,
    #[command(flatten)]
    pub detach: Detach,
    #[command(flatten)]
    pub spec: Spec,
}

/// Return to a command with a terminal that was left running.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal attach work                the newest terminal of the sandbox
  shoal attach work cmd-7          a command by its id (see `shoal inspect`)

Several people may attach to one terminal: all see the same output, and all may type. Exit codes are those of `shoal shell`.")]
pub struct Attach {
    /// The sandbox's id or name
    pub sandbox: String,
    /// The command's id [default: the newest running command with a terminal]
    pub command: Option<String>,
    #[command(flatten)]
    pub detach: Detach,
}

/// How to leave a terminal.
#[derive(Debug, Args)]
pub struct Detach {
    /// Keys that leave the terminal while the command keeps running; `none` for no such keys
    #[arg(long, value_name = "KEYS", default_value = detach::DEFAULT)]
    pub detach_keys: DetachKeys,
}
