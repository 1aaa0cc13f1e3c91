//! The history of a sandbox, and how to go back in it.

use std::time::SystemTime;

use wire::{SandboxId, SnapshotId};

use super::SnapshotState;
use crate::Engine;
use crate::db::{Purpose, SnapshotRow};
use crate::error::{EngineError, Field};
use crate::model::{Owner, Sandbox};
use crate::sandbox::rollback::roll_back;

/// The files of a sandbox before a command.
#[derive(Debug, Clone)]
pub struct HistoryEntry {
    /// How many steps back: 1 is the newest.
    pub step: u32,
    /// The snapshot.
    pub snapshot: SnapshotId,
    /// When it was taken.
    pub taken_at: SystemTime,
    /// What the sandbox had written.
    pub size_bytes: u64,
}

impl Engine {
    /// The snapshots of a sandbox's history, newest first.
    pub async fn history(&self, owner: &Owner, sandbox: SandboxId) -> Result<Vec<HistoryEntry>, EngineError> {
        self.live(owner, sandbox)?;
        let rows = self.history_rows(owner, sandbox).await?;
        let entry = |(at, row): (usize, SnapshotRow)| HistoryEntry {
            step: at as u32 + 1,
            snapshot: row.id,
            taken_at: row.created_at,
            size_bytes: row.taken.map_or(0, |taken| taken.size_bytes),
        };
        Ok(rows.into_iter().enumerate().map(entry).collect())
    }

    /// Goes back to the files before the last command that changed something, or further. The steps that were undone are
    /// gone from the history.
    pub async fn undo(&self, owner: &Owner, sandbox: SandboxId, steps: u32) -> Result<Sandbox, EngineError> {
        let live = self.live(owner, sandbox)?;
        let rows = self.history_rows(owner, sandbox).await?;
        let count = rows.len() as u32;
        if !(1..=count).contains(&steps) {
            let rule = match count {
                0 => format!("be a step of the history, which is empty; got {steps}"),
                count => format!("be between 1 and {count}, the length of the history; got {steps}"),
            };
            return Err(Field::Steps.must(rule));
        }
        let row = &rows[steps as usize - 1];
        roll_back(&live, row.over.clone()).await?;
        for undone in &rows[..steps as usize] {
            let now = crate::observe::clock::now();
            self.shared().db.settle_snapshot(undone.id, SnapshotState::Deleting, now).await?;
        }
        self.shared().files_freed.notify_one();
        Ok(live.describe())
    }

    async fn history_rows(&self, owner: &Owner, sandbox: SandboxId) -> Result<Vec<SnapshotRow>, EngineError> {
        let rows = self.shared().db.snapshots(Some(owner.clone())).await?;
        let mine = |row: &SnapshotRow| {
            row.sandbox == Some(sandbox)
                && row.purpose == Purpose::History
                && row.state == SnapshotState::Ready
        };
        Ok(rows.into_iter().filter(mine).collect())
    }
}
