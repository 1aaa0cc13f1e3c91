//! `shoal launcher`: what the daemon starts to have something done to the kernel. One thread, no runtime.

use runtime::StoreConfig;
use runtime::ns::launcher::LauncherConfig;

use crate::args::Launcher;

/// Runs until the daemon is gone.
pub fn run(arguments: &Launcher) -> anyhow::Result<()> {
    let config = LauncherConfig {
        data_dir: arguments.data_dir.clone(),
        installation: arguments.installation,
        store: StoreConfig { wish: arguments.store, size_bytes: arguments.store_size },
    };
    Ok(runtime::ns::launcher::run(&config)?)
}
