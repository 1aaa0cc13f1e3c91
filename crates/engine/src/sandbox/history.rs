//! The history of a sandbox: a snapshot before each command that finds something changed.

use std::sync::{Arc, Mutex, PoisonError};

use tracing::warn;
use wire::SnapshotId;
use wire::launch::FilesMark;

use crate::command::Saved;
use crate::db::{Purpose, SnapshotRow};
use crate::error::{EngineError, chain};
use crate::model::check::check_history;
use crate::model::progress::SnapshotState;
use crate::model::random::random_u128;
use crate::observe::clock::now;
use crate::sandbox::live::LiveSandbox;
use crate::sandbox::take::take;
use crate::{Engine, Labels};

/// The mark of the files at the newest snapshot of the history.
#[derive(Default)]
pub(crate) struct HistoryMark(Mutex<Option<FilesMark>>);

impl HistoryMark {
    fn get(&self) -> Option<FilesMark> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, mark: FilesMark) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(mark);
    }
}

impl Engine {
    /// Checks that this daemon can keep as much history.
    pub(crate) fn check_history(&self, kept: u32) -> Result<(), EngineError> {
        let has_snapshots = self.shared().backend.store().kind.has_snapshots();
        if check_history(kept)? > 0 && !has_snapshots {
            return Err(EngineError::SnapshotsUnsupported { what: "a history" });
        }
        Ok(())
    }
}

impl LiveSandbox {
    /// Takes a snapshot for the history if the sandbox has one and its files have changed since the last snapshot. If that
    /// fails, the command runs all the same, and its result says that it cannot be undone.
    pub async fn before_command(self: &Arc<Self>) -> Saved {
        if self.history() == 0 || !self.state().takes_commands() {
            return Saved::Yes;
        }
        match self.remember_files().await {
            Ok(()) => Saved::Yes,
            Err(error) => {
                warn!(sandbox = %self.id, error = chain(&error), "cannot take a snapshot before a command; it cannot be undone");
                Saved::No
            }
        }
    }

    async fn remember_files(self: &Arc<Self>) -> Result<(), EngineError> {
        let shared = &self.shared;
        let failed = |source| EngineError::Snapshot { id: self.id, source };
        let mark = shared.backend.files_mark(self.id).await.map_err(failed)?;
        if mark.is_none() || self.history_mark.get() == mark {
            return Ok(());
        }
        let at = now();
        let row = SnapshotRow {
            id: SnapshotId::from_random(random_u128()),
            owner: self.owner.clone(),
            name: self.id.to_string(),
            wanted_tags: Vec::new(),
            template: None,
            sandbox: Some(self.id),
            image: None,
            state: SnapshotState::Building,
            note: String::new(),
            created_at: at,
            updated_at: at,
            tags: Vec::new(),
            purpose: Purpose::History,
            labels: Labels::default(),
            parent: self.over().all().next(),
            taken: None,
            over: Default::default(),
        };
        let id = row.id;
        shared.db.insert_snapshot(row).await?;
        match take(self, id).await {
            Ok((taken, over)) => {
                shared.db.put_snapshot_files(id, taken, over).await?;
                shared.db.settle_snapshot(id, SnapshotState::Ready, now()).await?;
                self.history_mark.set(taken.mark);
                if shared.db.trim_history(self.id, self.history()).await? > 0 {
                    shared.files_freed.notify_one();
                }
                Ok(())
            }
            Err(error) => {
                shared.db.delete_snapshot(id).await?;
                Err(error)
            }
        }
    }
}
