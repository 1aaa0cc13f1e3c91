//! The arguments of `shoal key`.

use clap::Args;

/// Create, list and delete API keys.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal key create --owner alice\n  shoal key ls")]
pub struct Key {
    #[command(subcommand)]
    pub action: KeyAction,
}

#[derive(Debug, clap::Subcommand)]
pub enum KeyAction {
    Create(CreateKey),
    #[command(visible_alias = "list")]
    Ls(ListKeys),
    #[command(visible_alias = "delete", alias = "remove")]
    Rm(RemoveKey),
}

/// Create a key and print its secret, which is shown only once.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  shoal key create --owner alice\n  shoal key create --owner ci --sandboxes 20 --memory 16Gi --disk 100Gi\n  shoal key create --owner prometheus --metrics-only"
)]
pub struct CreateKey {
    /// The owner whose sandboxes the key gives access to
    #[arg(long)]
    pub owner: String,
    /// Give access to /metrics only, for Prometheus
    #[arg(long, conflicts_with_all = ["sandboxes", "cpu", "memory"])]
    pub metrics_only: bool,
    /// Limit the number of sandboxes
    #[arg(long, value_name = "COUNT")]
    pub sandboxes: Option<u32>,
    /// Limit the processors of all its sandboxes together, for example 4
    #[arg(long, visible_alias = "cpus")]
    pub cpu: Option<String>,
    /// Limit the memory of all its sandboxes together, for example 8Gi
    #[arg(long)]
    pub memory: Option<String>,
    /// Limit the disk of all its sandboxes together, for example 100Gi
    #[arg(long)]
    pub disk: Option<String>,
    /// Limit the sizes of all its volumes together, for example 100Gi
    #[arg(long, value_name = "SIZE")]
    pub volumes: Option<String>,
    /// Limit the output of commands that is kept, for example 1Gi
    #[arg(long, value_name = "SIZE")]
    pub output: Option<String>,
    /// Limit the number of snapshots
    #[arg(long, value_name = "COUNT")]
    pub snapshots: Option<u32>,
    /// Limit the number of builds at the same time
    #[arg(long, value_name = "COUNT")]
    pub builds: Option<u32>,
    /// Limit the number of connections at the same time
    #[arg(long, value_name = "COUNT")]
    pub connections: Option<u32>,
    /// Print the key as JSON
    #[arg(long)]
    pub json: bool,
}

/// List all keys (their secrets are not shown).
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal key ls\n  shoal key ls --json | jq -r '.[].owner'")]
pub struct ListKeys {
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// Delete keys. Requests with them are refused from then on.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal key rm 4f9d2c10a7e3b5d8")]
pub struct RemoveKey {
    /// Ids of the keys (not their secrets)
    #[arg(required = true, value_name = "KEY")]
    pub keys: Vec<String>,
    /// Print the deleted keys as JSON
    #[arg(long)]
    pub json: bool,
}
