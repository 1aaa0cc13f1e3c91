//! The arguments of `shoal launcher`, which only the daemon gives.

use std::path::PathBuf;

use clap::Args;

/// What the daemon starts to have something done to the kernel.
#[derive(Debug, Args)]
pub struct Launcher {
    /// The daemon's data directory
    #[arg(long)]
    pub data_dir: PathBuf,
    /// Whose sandboxes it makes
    #[arg(long)]
    pub installation: wire::InstallationId,
    /// Where writable files are kept
    #[arg(long, value_parser = store_wish)]
    pub store: wire::launch::StoreWish,
    /// How large a store of kind loop is, in bytes
    #[arg(long)]
    pub store_size: Option<u64>,
}

fn store_wish(text: &str) -> Result<wire::launch::StoreWish, String> {
    wire::launch::StoreWish::parse(text).ok_or_else(|| "must be auto, btrfs, loop or directory".into())
}
