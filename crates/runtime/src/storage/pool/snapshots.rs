//! Snapshots of sandboxes in the pool: read-only subvolumes, which sandboxes use as layers.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::syncfs;
use rustix::io::Errno;
use wire::launch::{FilesMark, StoreKind};
use wire::{SandboxId, SnapshotId};

use super::{StoragePool, Subvolumes, destroy, open_if_there};
use crate::storage::directories::names;
use crate::sys::btrfs;

impl StoragePool {
    /// Writes everything that waits in memory to disk, so that a snapshot has little left to write. Only if the file system
    /// belongs to the pool alone: elsewhere it would flush the data of the whole machine.
    pub fn settle(&self) -> io::Result<()> {
        match (&self.subvolumes, self.facts.kind) {
            (Some(held), StoreKind::Loop) => Ok(syncfs(&held.root)?),
            (Some(_), StoreKind::Btrfs | StoreKind::Directory) | (None, _) => Ok(()),
        }
    }

    /// Takes a read-only snapshot of a sandbox's files, and returns the mark of the files. The kernel first writes what
    /// waits in memory of this one subvolume.
    pub fn take_snapshot(&self, sandbox: SandboxId, snapshot: SnapshotId) -> io::Result<FilesMark> {
        let held = self.with_snapshots()?;
        let files = self.sandbox(sandbox)?.ok_or(Errno::NOENT)?;
        let name = snapshot.to_string();
        btrfs::create_snapshot(held.snapshots.as_fd(), &name, files.as_fd(), btrfs::Snapshot::ReadOnly)?;
        // After the snapshot, which ended a transaction: every later change has a higher number.
        mark(files.as_fd())
    }

    /// A snapshot's files.
    pub fn snapshot(&self, id: SnapshotId) -> io::Result<OwnedFd> {
        let held = self.with_snapshots()?;
        Ok(open_if_there(held.snapshots.as_fd(), &id.to_string())?.ok_or(Errno::NOENT)?)
    }

    /// Removes a snapshot. Harmless if it does not exist.
    pub fn remove_snapshot(&self, id: SnapshotId) -> io::Result<()> {
        let Some(held) = &self.subvolumes else { return Ok(()) };
        destroy(held.snapshots.as_fd(), &id.to_string())?;
        held.free_soon()
    }

    /// All existing snapshots, sorted.
    pub fn snapshots(&self) -> io::Result<Vec<SnapshotId>> {
        let Some(held) = &self.subvolumes else { return Ok(Vec::new()) };
        let found = names(held.snapshots.as_fd())?;
        let mut ids: Vec<SnapshotId> = found.iter().filter_map(|name| name.parse().ok()).collect();
        ids.sort();
        Ok(ids)
    }

    /// How far the changes of a sandbox's files have got; `None` if its files are not in a subvolume.
    pub fn mark(&self, sandbox: SandboxId) -> io::Result<Option<FilesMark>> {
        self.sandbox(sandbox)?.map(|files| mark(files.as_fd())).transpose()
    }

    fn with_snapshots(&self) -> io::Result<&Subvolumes> {
        self.subvolumes.as_ref().ok_or_else(|| Errno::OPNOTSUPP.into())
    }
}

fn mark(files: BorrowedFd<'_>) -> io::Result<FilesMark> {
    Ok(FilesMark { subvolume: btrfs::subvolume_number(files)?, transaction: btrfs::last_change(files)? })
}
