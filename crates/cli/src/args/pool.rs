//! The arguments of `shoal pool`.

use clap::Args;

/// Keep sandboxes ready before anybody asks for them.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal pool create warm --template python --replicas 5 --wait
  shoal create --template python                     claims one that stands ready
  shoal pool scale warm 10
  shoal pool ls

`shoal create` and `shoal run` take what stands ready for their template; another is made in its place.")]
pub struct Pool {
    #[command(subcommand)]
    pub action: PoolAction,
}

#[derive(Debug, clap::Subcommand)]
pub enum PoolAction {
    Create(CreatePool),
    Ls(ListPools),
    Get(GetPool),
    Scale(ScalePool),
    Rename(RenamePool),
    Rm(RemovePool),
}

/// Make a pool.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal pool create warm --replicas 3
  shoal pool create python-pool --template python --replicas 10 --wait

Its sandboxes are made in the background; --wait waits for them, and fails if they cannot be made. They count against the limits
of the key and of the machine.")]
pub struct CreatePool {
    /// What to call it
    pub name: String,
    /// What its sandboxes are made from
    #[arg(long, default_value = "default")]
    pub template: String,
    /// How many should stand ready
    #[arg(long, value_name = "NUMBER")]
    pub replicas: u32,
    /// Wait until it is full
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
    /// Print an array of objects
    #[arg(long)]
    pub json: bool,
}

/// Show a pool, and what waits in it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal pool get warm\n  shoal pool get --json warm | jq .members")]
pub struct GetPool {
    /// Its name
    pub name: String,
    /// Wait until it is full
    #[arg(long)]
    pub wait: bool,
    /// Print it as JSON
    #[arg(long)]
    pub json: bool,
}

/// Change how many should stand ready.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal pool scale warm 20 --wait\n  shoal pool scale warm 0")]
pub struct ScalePool {
    /// Its name
    pub name: String,
    /// How many should stand ready
    pub replicas: u32,
    /// Wait until it is full
    #[arg(long)]
    pub wait: bool,
    /// Print the pool as JSON
    #[arg(long)]
    pub json: bool,
}

/// Give a pool another name.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal pool rename warm hot")]
pub struct RenamePool {
    /// Its name
    pub name: String,
    /// Another name for it
    #[arg(value_name = "NEW")]
    pub new: String,
    /// Print the pool as JSON
    #[arg(long)]
    pub json: bool,
}

/// Delete pools and what waits in them. Sandboxes that were claimed stay.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal pool rm warm")]
pub struct RemovePool {
    /// Their names
    #[arg(value_name = "NAME", required = true)]
    pub names: Vec<String>,
}
