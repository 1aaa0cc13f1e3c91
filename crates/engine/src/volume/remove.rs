//! Removes volumes: those that a caller deletes, and those that a failure or a crash left half-made.

use std::sync::Arc;
use std::time::Duration;

use runtime::BackendError;
use tracing::{info, warn};

use crate::Shared;
use crate::db::VolumeState;
use crate::error::{EngineError, chain};
use crate::volume::{LiveVolume, VolumeName};

/// How long the backend has to finish a volume after it failed to answer in time, before the volume is removed.
const UNFINISHED_PAUSE: Duration = Duration::from_secs(300);

/// Removes the volumes that an earlier daemon was making or deleting when it ended.
pub(crate) fn resume_interrupted(shared: &Arc<Shared>) {
    // Collected before calls come in: new volumes are unfinished for a moment too.
    let unfinished: Vec<Arc<LiveVolume>> = {
        let index = shared.volumes.index();
        let volumes = index.by_id.values();
        volumes.filter(|volume| volume.view().state != VolumeState::Ready).cloned().collect()
    };
    let of_engine = Arc::clone(shared);
    shared.runtime.spawn(async move {
        for volume in unfinished {
            info!(volume = %volume.name(), "removing a volume that was being made or deleted");
            if let Err(error) = remove(&of_engine, &volume).await {
                warn!(volume = %volume.name(), error = chain(&error), "cannot remove a volume; the next start retries");
            }
        }
    });
}

/// Removes the files first and the row afterwards, so that a crash in between leaves a row for the remaining files.
pub(super) async fn remove(shared: &Shared, volume: &LiveVolume) -> Result<(), EngineError> {
    shared.backend.remove_volume(volume.id).await.map_err(failed("delete", &volume.name()))?;
    shared.db.delete_volume(volume.id).await?;
    shared.volumes.index().remove(volume);
    Ok(())
}

/// Removes a volume that could not be made.
pub(super) async fn undo(shared: &Shared, volume: &LiveVolume) {
    volume.view().state = VolumeState::Deleting;
    remove_unfinished(shared, volume).await;
}

/// Like `undo`, but after a pause: the backend has not answered and may still be making the volume. The row stays
/// until then, so that the backend's remains stay known.
pub(super) fn undo_later(shared: &Arc<Shared>, volume: Arc<LiveVolume>) {
    volume.view().state = VolumeState::Deleting;
    let of_engine = Arc::clone(shared);
    shared.runtime.spawn(async move {
        tokio::time::sleep(UNFINISHED_PAUSE).await;
        remove_unfinished(&of_engine, &volume).await;
    });
}

async fn remove_unfinished(shared: &Shared, volume: &LiveVolume) {
    if let Err(left) = remove(shared, volume).await {
        warn!(volume = %volume.name(), error = chain(&left), "cannot remove an unfinished volume; the next start retries");
    }
}

/// The error for a volume that the backend could not make.
pub(super) fn not_made(name: &VolumeName, error: BackendError) -> EngineError {
    match error {
        BackendError::Refused { source, .. } if source.kind() == std::io::ErrorKind::Unsupported => {
            EngineError::CopiesUnsupported
        }
        error => failed("create", name)(error),
    }
}

/// Turns an error of the backend into one that names the volume.
pub(super) fn failed(doing: &'static str, name: &VolumeName) -> impl FnOnce(BackendError) -> EngineError {
    let name = name.to_string();
    move |source| match source {
        BackendError::Full { .. } => {
            EngineError::Full { what: format!("cannot {doing} volume `{name}`: {source}") }
        }
        source => EngineError::Volume { doing, name, source },
    }
}
