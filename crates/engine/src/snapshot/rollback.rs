//! Rolls a sandbox back to a snapshot of itself, or of a sandbox that it was forked from.

use wire::{SandboxId, SnapshotId};

use super::SnapshotState;
use crate::Engine;
use crate::db::SnapshotRow;
use crate::error::EngineError;
use crate::model::{Owner, Sandbox};
use crate::sandbox::rollback::roll_back;

impl Engine {
    /// Replaces the files of a sandbox by those of a snapshot, and returns when it runs again. Id, name, labels, variables,
    /// limits and volumes stay; commands end, and `/dev/shm` is empty.
    pub async fn rollback(
        &self,
        owner: &Owner,
        sandbox: SandboxId,
        snapshot: &str,
    ) -> Result<Sandbox, EngineError> {
        let live = self.live(owner, sandbox)?;
        let row = self.stored_snapshot(owner, snapshot).await?;
        let source = row.sandbox.unwrap_or(sandbox);
        if !self.shared().db.descends(owner.clone(), sandbox, source).await? {
            return Err(EngineError::NotAncestor { id: sandbox, name: snapshot.to_owned() });
        }
        roll_back(&live, row.over).await?;
        Ok(live.describe())
    }

    /// A snapshot that is ready and has its files in the store, also one of a history or of a fork.
    pub(super) async fn stored_snapshot(
        &self,
        owner: &Owner,
        text: &str,
    ) -> Result<SnapshotRow, EngineError> {
        let not_found = || EngineError::SnapshotNotFound { name: crate::error::shown(text) };
        let id = match text.parse::<SnapshotId>() {
            Ok(id) => id,
            Err(_) => self.snapshot(owner, text).await?.id.parse().map_err(|_| not_found())?,
        };
        let row = self.shared().db.snapshot(id).await?.filter(|row| row.owner == *owner);
        let row = row.ok_or_else(not_found)?;
        let state = match &row.state {
            SnapshotState::Ready if row.over.is_empty() => {
                return Err(EngineError::SnapshotsUnsupported { what: "going back to a snapshot" });
            }
            SnapshotState::Ready => return Ok(row),
            SnapshotState::Building => "not complete",
            SnapshotState::Failed { .. } => "failed",
            SnapshotState::Deleting => return Err(not_found()),
        };
        Err(EngineError::SnapshotNotReady { name: text.to_owned(), state })
    }
}
