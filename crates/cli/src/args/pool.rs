//! The arguments of `shoal pool`.

use clap::Args;

/// Manage pools: sandboxes that are ready before anyone asks for them.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal pool create warm --template python --replicas 5 --wait
  shoal create --template python            claims a ready sandbox
  shoal pool scale warm 10
  shoal pool ls

`shoal create` and `shoal run` claim a ready sandbox of their template, and the pool creates another in its place.")]
pub struct Pool {
    #[command(subcommand)]
    pub action: PoolAction,
}

#[derive(Debug, clap::Subcommand)]
pub enum PoolAction {
    Create(CreatePool),
    #[command(visible_alias = "list")]
    Ls(ListPools),
    #[command(visible_alias = "inspect", alias = "show")]
    Get(GetPool),
    Scale(ScalePool),
    Rename(RenamePool),
    #[command(visible_alias = "delete", alias = "remove")]
    Rm(RemovePool),
}

/// Create a pool.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal pool create warm --replicas 3
  shoal pool create python-pool --template python --replicas 10 --wait

The pool is filled in the background; --wait waits for it, and fails if a sandbox cannot be created. Sandboxes in a pool \
count against the limits of the key and of the machine.")]
pub struct CreatePool {
    /// Name of the pool
    pub name: String,
    /// Create its sandboxes from this template
    #[arg(long, default_value = "default")]
    pub template: String,
    /// Number of sandboxes to keep ready
    #[arg(long, value_name = "NUMBER")]
    pub replicas: u32,
    /// Wait until the pool is full
    #[arg(long)]
    pub wait: bool,
    /// Print the pool as JSON
    #[arg(long)]
    pub json: bool,
}

/// List pools by name.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal pool ls\n  shoal pool ls --json | jq '.[] | {name, ready}'")]
pub struct ListPools {
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// Show a pool and the sandboxes in it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal pool get warm\n  shoal pool get --json warm | jq .members")]
pub struct GetPool {
    /// Name of the pool
    pub name: String,
    /// Wait until the pool is full
    #[arg(long)]
    pub wait: bool,
    /// Print the pool as JSON
    #[arg(long)]
    pub json: bool,
}

/// Change the number of sandboxes that a pool keeps ready.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal pool scale warm 20 --wait\n  shoal pool scale warm 0")]
pub struct ScalePool {
    /// Name of the pool
    pub name: String,
    /// Number of sandboxes to keep ready
    pub replicas: u32,
    /// Wait until the pool is full
    #[arg(long)]
    pub wait: bool,
    /// Print the pool as JSON
    #[arg(long)]
    pub json: bool,
}

/// Rename a pool.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal pool rename warm hot")]
pub struct RenamePool {
    /// Name of the pool
    pub name: String,
    /// The new name
    #[arg(value_name = "NEW")]
    pub new: String,
    /// Print the pool as JSON
    #[arg(long)]
    pub json: bool,
}

/// Delete pools and the sandboxes in them. Claimed sandboxes stay.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal pool rm warm")]
pub struct RemovePool {
    /// Names of the pools
    #[arg(value_name = "NAME", required = true)]
    pub names: Vec<String>,
}
