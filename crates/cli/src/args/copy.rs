//! The arguments of `shoal cp`.

use clap::Args;

/// Copy files and directories between this machine and a sandbox.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal cp notes.txt work:/workspace/        a file into a directory
  shoal cp src work:/workspace/              a directory and everything in it
  shoal cp work:/workspace/out.csv .         from the sandbox to this machine
  shoal cp work:/workspace/logs - | tar t    a directory as tar, on stdout
  pg_dump | shoal cp - work:/tmp/dump.sql    stdin into a file

As with cp, a copy into an existing directory keeps its name. Missing directories are created. A file appears under its \
name only when it is complete. Owners are not copied. Files from a sandbox are not trusted: links that point outside the \
target directory are skipped, and so are devices and sockets in both directions.")]
pub struct Copy {
    /// A local path, SANDBOX:/path, or `-` for stdin
    pub from: String,
    /// A local path, SANDBOX:/path, or `-` for stdout
    pub to: String,
    /// Copy as this user of the sandbox, optionally with `:group` [default: root]
    #[arg(short, long)]
    pub user: Option<String>,
    /// Print the number of copied entries and bytes as JSON
    #[arg(long)]
    pub json: bool,
}
