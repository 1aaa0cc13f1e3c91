//! The arguments of `shoal snapshot`, and of what is made from snapshots.

use std::path::PathBuf;

use clap::Args;

use crate::args::value::{pair, variable};

/// Manage snapshots: copies of a sandbox's files that new sandboxes can start from.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal snapshot create work --name clean
  shoal snapshot ls
  shoal create --template clean     a new sandbox with these files
  shoal rollback work clean         the same sandbox, with these files again
  shoal snapshot export clean -o clean.tar
  shoal snapshot import clean.tar --name clean")]
pub struct Snapshot {
    #[command(subcommand)]
    pub action: SnapshotAction,
}

#[derive(Debug, clap::Subcommand)]
pub enum SnapshotAction {
    Create(CreateSnapshot),
    #[command(visible_alias = "list")]
    Ls(ListSnapshots),
    #[command(alias = "show", alias = "get")]
    Inspect(InspectSnapshot),
    #[command(visible_alias = "delete", alias = "remove")]
    Rm(RemoveSnapshots),
    Export(ExportSnapshot),
    Import(ImportSnapshot),
}

/// Take a snapshot of a sandbox's files. The sandbox stands still for milliseconds and runs on.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal snapshot create work
  shoal snapshot create work --name clean -l step=3")]
pub struct CreateSnapshot {
    /// Name or id of the sandbox
    pub sandbox: String,
    /// Name the snapshot [default: the sandbox's name]
    #[arg(short, long)]
    pub name: Option<String>,
    /// Set a label; repeatable
    #[arg(short, long = "label", value_name = "KEY=VALUE", value_parser = pair)]
    pub labels: Vec<(String, String)>,
    /// Print the snapshot as JSON
    #[arg(long)]
    pub json: bool,
}

/// List snapshots, newest first.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal snapshot ls\n  shoal snapshot ls -q")]
pub struct ListSnapshots {
    /// Print only the ids
    #[arg(short, long, conflicts_with = "json")]
    pub quiet: bool,
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// Show a snapshot.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  shoal snapshot inspect clean\n  shoal snapshot inspect --json clean | jq .size_bytes"
)]
pub struct InspectSnapshot {
    /// Id or name of the snapshot
    pub snapshot: String,
    /// Print the snapshot as JSON
    #[arg(long)]
    pub json: bool,
}

/// Delete snapshots. Their files stay as long as sandboxes or other snapshots need them.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal snapshot rm clean")]
pub struct RemoveSnapshots {
    /// Ids or names of the snapshots
    #[arg(required = true, value_name = "SNAPSHOT")]
    pub names: Vec<String>,
}

/// Write all files of a snapshot to one OCI archive, which other tools read.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal snapshot export clean -o clean.tar
  shoal snapshot export clean --usr include > clean.tar")]
pub struct ExportSnapshot {
    /// Id or name of the snapshot
    pub snapshot: String,
    /// Write to this file [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Include or refuse the `/usr` of this machine, which sandboxes over the image `host` see
    #[arg(long, value_enum, default_value_t = HostUsr::Refuse)]
    pub usr: HostUsr,
}

/// Whether an archive may contain the `/usr` of this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum HostUsr {
    Include,
    Refuse,
}

/// Make a snapshot of an OCI archive: an exported snapshot, or an image that another tool saved.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal snapshot import clean.tar --name clean
  shoal create --template clean")]
pub struct ImportSnapshot {
    /// The archive, compressed or not; `-` for standard input
    #[arg(value_name = "FILE")]
    pub from: PathBuf,
    /// Name the snapshot
    #[arg(short, long)]
    pub name: String,
    /// Set a label; repeatable
    #[arg(short, long = "label", value_name = "KEY=VALUE", value_parser = pair)]
    pub labels: Vec<(String, String)>,
    /// Print the snapshot as JSON
    #[arg(long)]
    pub json: bool,
}

/// Replace the files of a sandbox by those of a snapshot. Its id, name and settings stay; its commands end.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal rollback work clean")]
pub struct Rollback {
    /// Name or id of the sandbox
    pub sandbox: String,
    /// Id or name of the snapshot
    pub snapshot: String,
    /// Print the sandbox as JSON
    #[arg(long)]
    pub json: bool,
}

/// Create sandboxes that begin with the files of another one. Prints their ids.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal fork work
  shoal fork work -n 5 -e ATTEMPT=1")]
pub struct Fork {
    /// Name or id of the sandbox
    pub sandbox: String,
    /// How many children to create
    #[arg(short = 'n', long, default_value_t = 1)]
    pub count: u32,
    /// Set an environment variable of the children; repeatable
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = variable)]
    pub env: Vec<(String, String)>,
    /// Set a label of the children; repeatable
    #[arg(short, long = "label", value_name = "KEY=VALUE", value_parser = pair)]
    pub labels: Vec<(String, String)>,
    /// Print the children, or why there is none, as a JSON array
    #[arg(long)]
    pub json: bool,
}

/// Show which sandbox was forked from which.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal tree\n  shoal tree work")]
pub struct Tree {
    /// Name or id of a sandbox, to show its family only
    pub sandbox: Option<String>,
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// Compare the files of two sandboxes or snapshots.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal diff clean work          what `work` changed since the snapshot `clean`
  shoal diff first second --content
  shoal diff clean work --json | jq -r '.entries[].path'")]
pub struct Diff {
    /// Name or id of a sandbox or a snapshot
    pub a: String,
    /// Name or id of another one
    pub b: String,
    /// Show how text files differ
    #[arg(long)]
    pub content: bool,
    /// Print the differences as JSON
    #[arg(long)]
    pub json: bool,
}

/// Give a child the name and the labels of its parent. The parent gets another name.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal promote best
  shoal promote best --delete-parent")]
pub struct Promote {
    /// Name or id of the child
    pub sandbox: String,
    /// Delete the parent
    #[arg(long, conflicts_with = "pause_parent")]
    pub delete_parent: bool,
    /// Pause the parent
    #[arg(long)]
    pub pause_parent: bool,
    /// Print the child as JSON
    #[arg(long)]
    pub json: bool,
}

/// List the steps that `shoal undo` can go back to, newest first.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal history work")]
pub struct History {
    /// Name or id of the sandbox
    pub sandbox: String,
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// Go back to the files before the last command that changed something. Needs `shoal create --history`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal undo work\n  shoal undo work 3")]
pub struct Undo {
    /// Name or id of the sandbox
    pub sandbox: String,
    /// How many steps to go back
    #[arg(default_value_t = 1)]
    pub steps: u32,
    /// Print the sandbox as JSON
    #[arg(long)]
    pub json: bool,
}
