//! Takes snapshots of a sandbox's files.
//!
//! The store first writes recent changes to disk while the sandbox runs, so that the sandbox stands still only for the
//! snapshot itself. The sandbox is held meanwhile (`hold`): a running one goes on, and a paused one stays paused.

use std::sync::Arc;
use std::time::{Duration, Instant};

use runtime::BackendError;
use tracing::warn;
use wire::SnapshotId;
use wire::launch::Over;

use crate::db::Taken;
use crate::error::{EngineError, chain};
use crate::sandbox::driver::within;
use crate::sandbox::hold::hold;
use crate::sandbox::lifecycle::State;
use crate::sandbox::live::LiveSandbox;

/// How long a snapshot may take. It writes recent changes to disk.
const TAKE_SECONDS: u64 = 120;

/// Takes a snapshot of a running or paused sandbox. The caller has written a row with this id. Returns what is known of the
/// snapshot, and what a sandbox begins with that is made from it.
pub(crate) async fn take(
    live: &Arc<LiveSandbox>,
    snapshot: SnapshotId,
) -> Result<(Taken, Over), EngineError> {
    let failed = |source| EngineError::Snapshot { id: live.id, source };
    let _alone = live.capturing.lock().await;
    let backend = &live.shared.backend;
    let settle = backend.settle_files(live.id);
    within(TAKE_SECONDS, "write the sandbox's files to disk", settle).await.map_err(failed)?;
    let held = hold(live).await?;
    let (began, runs) = (Instant::now(), live.state() == State::Running);
    let take = backend.take_snapshot(live.id, snapshot);
    let mark = within(TAKE_SECONDS, "take a snapshot", take).await;
    // Before the sandbox runs on: a rollback may change what it lies over.
    let over = live.over().with(snapshot);
    let lasted = held.release().await;
    let stopped = if runs { began.elapsed() } else { Duration::ZERO };
    let taken = match (mark, lasted) {
        (Ok(mark), Ok(())) => Ok(mark),
        (Err(error), _) => Err(error),
        (Ok(_), Err(broken)) => Err(BackendError::Refused {
            doing: "read the files of a frozen sandbox".into(),
            source: std::io::Error::other(broken),
        }),
    };
    let mark = match taken {
        Ok(mark) => mark,
        Err(source) => {
            if let Err(error) = backend.remove_snapshot(snapshot).await {
                warn!(%snapshot, error = chain(&error), "cannot remove a snapshot that failed; the sweep tries again");
            }
            return Err(failed(source));
        }
    };
    // The size is for people to read, so a snapshot does not fail for want of it.
    let size_bytes = match backend.disk_usage(live.id).await {
        Ok(usage) => usage.bytes,
        Err(error) => {
            warn!(%snapshot, error = chain(&error), "cannot measure a snapshot");
            0
        }
    };
    Ok((Taken { mark, size_bytes, stopped }, over))
}
