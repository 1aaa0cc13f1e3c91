//! The arguments of `shoal completions`.

use clap::Args;

/// Print a shell completion script.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal completions bash > /etc/bash_completion.d/shoal
  shoal completions zsh > \"${fpath[1]}/_shoal\"
  shoal completions fish > ~/.config/fish/completions/shoal.fish")]
pub struct Completions {
    /// The shell
    pub shell: clap_complete::Shell,
}

/// What the scripts ask for while someone types.
#[derive(Debug, Args)]
pub struct CompleteNames {
    /// Of what
    pub kind: NameKind,
}

/// Things that have names.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum NameKind {
    Sandboxes,
    Templates,
    Volumes,
    Pools,
    Images,
}
