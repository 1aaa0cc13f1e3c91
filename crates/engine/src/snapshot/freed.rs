//! Removes snapshots that nothing needs any more.

use std::collections::HashSet;
use std::sync::Weak;
use std::time::Duration;

use tracing::{info, warn};
use wire::SnapshotId;

use super::SnapshotState;
use crate::db::Purpose;
use crate::error::{EngineError, chain};
use crate::observe::clock::now;
use crate::{Engine, Inner};

/// The longest time between two rounds.
const INTERVAL: Duration = Duration::from_secs(60);

/// Whether a round also removes files that have no row. Only a crash leaves any.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Strays {
    Remove,
    Leave,
}

/// Looks for snapshots to remove whenever a sandbox is gone, and at intervals.
pub(crate) async fn keep_freed(inner: Weak<Inner>) {
    let mut strays = Strays::Remove;
    loop {
        let Some(engine) = inner.upgrade().map(|inner| Engine { inner }) else { return };
        let shared = std::sync::Arc::clone(engine.shared());
        if let Err(error) = engine.free_snapshots(strays).await {
            warn!(
                error = chain(&error),
                "cannot remove snapshots that nothing needs; the next round tries again"
            );
        }
        drop(engine);
        strays = tokio::select! {
            () = shared.files_freed.notified() => Strays::Leave,
            () = tokio::time::sleep(INTERVAL) => Strays::Remove,
        };
    }
}

impl Engine {
    /// One round.
    async fn free_snapshots(&self, strays: Strays) -> Result<(), EngineError> {
        let shared = self.shared();
        // Before the rows: a snapshot has a row before it has files.
        let there = match shared.backend.store().kind.has_snapshots() {
            true if strays == Strays::Remove => {
                shared.backend.snapshots().await.map_err(|source| EngineError::Usage { source })?
            }
            true | false => Vec::new(),
        };
        let rows = shared.db.snapshots(None).await?;
        for row in rows.iter().filter(|row| row.purpose == Purpose::History) {
            let lives = row.sandbox.is_some_and(|sandbox| shared.registry().get(sandbox).is_some());
            if !lives && row.state == SnapshotState::Ready {
                shared.db.settle_snapshot(row.id, SnapshotState::Deleting, now()).await?;
            }
        }
        self.finish_snapshot_deletes().await;
        let known: HashSet<SnapshotId> = rows.iter().map(|row| row.id).collect();
        for stray in there.into_iter().filter(|id| !known.contains(id)) {
            match shared.backend.remove_snapshot(stray).await {
                Ok(()) => info!(snapshot = %stray, "removed a snapshot that has no row"),
                Err(error) => {
                    warn!(snapshot = %stray, error = chain(&error), "cannot remove a stray snapshot");
                }
            }
        }
        Ok(())
    }
}
