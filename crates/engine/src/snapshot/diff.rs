//! Compares the files of sandboxes and snapshots. A process of the backend that can reach nothing else reads them.

use std::sync::Arc;

use wire::SnapshotId;
use wire::launch::{DiffSide, Difference, DifferenceKind, FileSort, Rootfs};

use super::SnapshotState;
use crate::Engine;
use crate::db::{Purpose, SnapshotRow};
use crate::error::{EngineError, chain};
use crate::image::StoredImage;
use crate::model::Key;
use crate::model::random::random_u128;
use crate::sandbox::lifecycle::State;
use crate::template::Preparation;

/// The result of a comparison.
#[derive(Debug, Clone)]
pub struct Compared {
    /// What differs, by path.
    pub entries: Vec<Change>,
    /// Whether these are all.
    pub complete: bool,
}

/// A file that differs.
#[derive(Debug, Clone)]
pub struct Change {
    /// Its path, as a guest wrote it.
    pub path: Vec<u8>,
    /// How it differs.
    pub kind: DifferenceKind,
    /// What it is.
    pub sort: FileSort,
    /// Its size on the first side.
    pub size_before: Option<u64>,
    /// Its size on the second side.
    pub size_after: Option<u64>,
    /// Its contents on the first side, if they are text and wanted.
    pub before: Option<String>,
    /// Its contents on the second side, likewise.
    pub after: Option<String>,
}

/// One side, and the snapshot to remove afterwards.
struct Side {
    side: DiffSide,
    taken: Option<SnapshotId>,
}

impl Engine {
    /// Compares two sandboxes or snapshots of the key's owner, by id or name. A sandbox is compared as it is now.
    pub async fn diff(&self, key: &Key, a: &str, b: &str, contents: bool) -> Result<Compared, EngineError> {
        if !self.shared().backend.store().kind.has_snapshots() {
            return Err(EngineError::SnapshotsUnsupported { what: "a comparison" });
        }
        let before = self.side(key, a).await?;
        let after = match self.side(key, b).await {
            Ok(after) => after,
            Err(error) => {
                self.let_go(before.taken).await;
                return Err(error);
            }
        };
        let compared = match before.side.rootfs == after.side.rootfs {
            true => {
                let compared = self.shared().backend.diff(&before.side, &after.side, contents).await;
                compared.map_err(|source| EngineError::Usage { source })
            }
            false => Err(EngineError::OtherImage { a: a.to_owned(), b: b.to_owned() }),
        };
        for taken in [before.taken, after.taken] {
            self.let_go(taken).await;
        }
        let compared = compared?;
        let change = |difference| match difference {
            Difference::Entry { path, kind, sort, size_before, size_after, before, after } => {
                Some(Change { path, kind, sort, size_before, size_after, before, after })
            }
            Difference::End { .. } => None,
        };
        let entries = compared.entries.into_iter().filter_map(change).collect();
        Ok(Compared { entries, complete: compared.complete })
    }

    async fn side(&self, key: &Key, text: &str) -> Result<Side, EngineError> {
        match self.find(&key.owner, text).await {
            Ok(sandbox) => {
                let live = self.live(&key.owner, sandbox.id)?;
                match live.state() {
                    State::Running | State::Paused(_) => {}
                    State::Creating | State::Deleting | State::Failed { .. } => {
                        return Err(live.wrong_state());
                    }
                }
                let _using = live.guest.begin_use()?;
                let id = SnapshotId::from_random(random_u128());
                let files = self.files_for_children(&live, id).await?;
                let rootfs = live.stored_image().map_or(Rootfs::Host, |image| image.rootfs());
                Ok(Side {
                    side: DiffSide { layers: files.origin.over.all().collect(), rootfs },
                    taken: Some(id),
                })
            }
            Err(EngineError::SandboxNotFound { .. }) => {
                let row = self.stored_snapshot(&key.owner, text).await?;
                let rootfs = self.rootfs_of(&row)?;
                Ok(Side { side: DiffSide { layers: row.over.all().collect(), rootfs }, taken: None })
            }
            Err(error) => Err(error),
        }
    }

    /// What a snapshot lies over.
    pub(super) fn rootfs_of(&self, row: &SnapshotRow) -> Result<Rootfs, EngineError> {
        let shared = self.shared();
        if row.purpose != Purpose::Named {
            let live = row.sandbox.and_then(|sandbox| shared.registry().get(sandbox));
            let live = live.ok_or_else(|| EngineError::SnapshotNotFound { name: row.id.to_string() })?;
            return Ok(live.stored_image().map_or(Rootfs::Host, |image| image.rootfs()));
        }
        Ok(self.image_of(row).map_or(Rootfs::Host, |image| image.rootfs()))
    }

    /// The image that a named snapshot lies over, unless that is `host`.
    pub(super) fn image_of(&self, row: &SnapshotRow) -> Option<Arc<StoredImage>> {
        let image = self.template_of(row).and_then(|template| match template.preparation {
            Preparation::Ready(prepared) => prepared.image,
            Preparation::Preparing | Preparation::Failed { .. } | Preparation::Replaced => None,
        });
        image.and_then(|image| self.shared().images.get(image))
    }

    /// Removes a snapshot that was taken for the comparison.
    async fn let_go(&self, taken: Option<SnapshotId>) {
        let Some(id) = taken else { return };
        let now = crate::observe::clock::now();
        let settled = self.shared().db.settle_snapshot(id, SnapshotState::Deleting, now).await;
        if let Err(error) = settled {
            tracing::warn!(snapshot = %id, error = chain(&error), "cannot remove a snapshot; the next start does");
        }
        self.shared().files_freed.notify_one();
    }
}
