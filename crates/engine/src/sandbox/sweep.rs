//! Compares what exists on the host with the rows, at intervals, and removes what no row owns.
//!
//! The sweep sees only its own installation, because the backend's inventory is limited to it. Every sandbox that
//! exists or is being created has a driver, and the sweep asks the registry after it has taken the inventory. So
//! anything without a driver at that point is a stray.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{info, warn};
use wire::SandboxId;
use wire::guest::Handle;

use crate::Shared;
use crate::error::{DbError, EngineError, chain};
use crate::observe::timing;
use crate::sandbox::clean::teardown_id;
use crate::sandbox::driver::Message;
use crate::sandbox::lifecycle::State;

/// The time between two sweeps. Strays are rare, so the interval only bounds how long the remains of a failed cleanup
/// stay.
const INTERVAL: Duration = Duration::from_secs(60);
/// How long the inventory may take.
const INVENTORY_SECONDS: u64 = 60;

/// How many commands are dropped in one commit.
const EXPIRED_MAX: usize = 500;

/// Sweeps at once, and then at intervals.
pub(crate) async fn keep_swept(shared: Arc<Shared>) {
    remove_dropped_output(&shared).await;
    loop {
        sweep(&shared).await;
        drop_expired_commands(&shared).await;
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Drops expired commands, with their rows and output.
pub(crate) async fn drop_expired_commands(shared: &Arc<Shared>) {
    loop {
        let dropped = match shared.db.drop_expired_commands(crate::observe::clock::now(), EXPIRED_MAX).await {
            Ok(dropped) => dropped,
            Err(error) => {
                warn!(
                    error = chain(&error),
                    "cannot drop commands whose time is over; the next sweep tries again"
                );
                return;
            }
        };
        let count = dropped.len();
        for (sandbox, handle, bytes) in dropped {
            // If the sandbox is gone by now, the output is gone too.
            let Some(live) = shared.registry().get(sandbox) else { continue };
            live.commands.dropped(handle, bytes).await;
        }
        if count < EXPIRED_MAX {
            return;
        }
    }
}

/// Runs one sweep. Returns how many strays were removed.
pub(crate) async fn sweep(shared: &Arc<Shared>) -> usize {
    let began = Instant::now();
    let removed = sweep_unmeasured(shared).await;
    let took = began.elapsed();
    shared.metrics.swept(removed, took);
    timing::SWEEP.check(&shared.metrics, None, took);
    removed
}

async fn sweep_unmeasured(shared: &Arc<Shared>) -> usize {
    // Sandboxes that run before the inventory is taken must be in it.
    let running: Vec<SandboxId> = {
        let sandboxes = shared.registry().all();
        sandboxes.iter().filter(|live| live.state() == State::Running).map(|live| live.id).collect()
    };
    let inventory = tokio::time::timeout(Duration::from_secs(INVENTORY_SECONDS), shared.backend.inventory());
    let found: HashSet<SandboxId> = match inventory.await {
        Ok(Ok(found)) => found.into_iter().collect(),
        Ok(Err(error)) => {
            warn!(error = chain(&error), "cannot take the inventory; the next sweep tries again");
            return 0;
        }
        Err(_) => {
            warn!("the inventory took longer than {INVENTORY_SECONDS} s; the next sweep tries again");
            return 0;
        }
    };
    let mut removed = 0;
    for id in &found {
        if shared.registry().is_stray(*id) {
            match teardown_id(shared.backend.as_ref(), *id).await {
                Ok(()) => {
                    info!(sandbox = %id, "removed what was left of a sandbox that has no row");
                    removed += 1;
                }
                Err(error) => {
                    warn!(sandbox = %id, error = chain(&error), "cannot remove a stray; trying again later")
                }
            }
        }
    }
    for live in shared.registry().all() {
        let message = match live.state() {
            State::Deleting | State::Failed { .. } => Message::Swept { present: found.contains(&live.id) },
            State::Running if running.contains(&live.id) && !found.contains(&live.id) => {
                Message::Swept { present: false }
            }
            State::Creating | State::Running | State::Paused(_) => continue,
        };
        // If the inbox is full, the driver is busy; the next sweep sends the message again.
        let _ = live.inbox.try_send(message);
    }
    remove_stray_logs(shared).await;
    removed
}

/// Removes the output of commands that have no row, because the previous daemon died while it was dropping them. Only
/// such a crash leaves any, so this runs once.
async fn remove_dropped_output(shared: &Arc<Shared>) {
    let sandboxes = shared.registry().all();
    for live in sandboxes {
        // List the output before reading the rows: a command's row is written before its first byte of output.
        let directory = live.commands.directory.clone();
        let there = match tokio::task::spawn_blocking(move || numbers_in(&directory)).await {
            Ok(Ok(there)) => there,
            Ok(Err(error)) => {
                warn!(sandbox = %live.id, %error, "cannot look for the output of dropped commands");
                continue;
            }
            Err(_) => return,
        };
        if there.is_empty() {
            continue;
        }
        let rows = match shared.db.handles(live.id).await {
            Ok(rows) => rows,
            Err(EngineError::Store { source: DbError::Closed, .. }) => return,
            Err(error) => {
                warn!(sandbox = %live.id, error = chain(&error), "cannot look for the output of dropped commands");
                continue;
            }
        };
        for handle in there.into_iter().filter(|handle| !rows.contains(handle)) {
            let directory = live.commands.directory_of(handle);
            let removed =
                tokio::task::spawn_blocking(move || crate::command::log::remove_directory(&directory)).await;
            if let Ok(Err(error)) = removed {
                warn!(sandbox = %live.id, %error, "cannot remove the output of a dropped command");
            }
        }
    }
}

/// The commands that have output in this directory. Blocks.
fn numbers_in(directory: &std::path::Path) -> std::io::Result<Vec<Handle>> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut numbers = Vec::new();
    for entry in entries {
        numbers.extend(entry?.file_name().to_str().and_then(|name| name.parse().ok()).map(Handle));
    }
    Ok(numbers)
}

/// Removes the logs of sandboxes that have no row.
async fn remove_stray_logs(shared: &Arc<Shared>) {
    let directory = shared.output_directory();
    let shared = Arc::clone(shared);
    let swept = tokio::task::spawn_blocking(move || {
        let entries = match std::fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        for entry in entries {
            let entry = entry?;
            let id = entry.file_name().to_str().and_then(|name| name.parse::<SandboxId>().ok());
            if id.is_some_and(|id| shared.registry().is_stray(id)) {
                crate::command::log::remove_directory(&entry.path())?;
            }
        }
        Ok(())
    });
    if let Ok(Err(error)) = swept.await {
        warn!(%error, "cannot sweep the logs");
    }
}
