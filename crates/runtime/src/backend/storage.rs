//! What sandboxes have on disk: layers of images, writable files, volumes.

use std::os::fd::OwnedFd;

use async_trait::async_trait;
use wire::launch::{DiffSide, Difference, FilesMark, LayerFacts, LayerSource, StoreFacts};
use wire::{Digest, SandboxId, SnapshotId, VolumeId};

use crate::backend::BackendError;

/// Keeps files. Every call can be repeated after a crash in the middle of it.
#[async_trait]
pub trait Storage: Send + Sync + 'static {
    /// Where writable files are kept, and whether that place supports limits.
    fn store(&self) -> StoreFacts;

    /// What a sandbox's writable files take on disk. Slow for many files, so the caller limits how often and how many at once.
    async fn disk_usage(&self, sandbox: SandboxId) -> Result<DiskUsage, BackendError>;

    /// Creates a layer, unless it exists. Calls `read` with the number of bytes of the blob that were read so far.
    async fn unpack_layer(
        &self,
        layer: &LayerSpec,
        read: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<LayerFacts, BackendError>;

    /// Removes a layer that no sandbox uses. Harmless if it does not exist.
    async fn remove_layer(&self, layer: Digest) -> Result<(), BackendError>;

    /// Lists all layers.
    async fn layers(&self) -> Result<Vec<Digest>, BackendError>;

    /// Creates a volume, either empty or as a copy of another. If the volume exists, this only sets its size.
    async fn create_volume(
        &self,
        volume: VolumeId,
        size_bytes: u64,
        from: Option<VolumeId>,
    ) -> Result<(), BackendError>;

    /// Changes the size of a volume. Its files stay, even if they take more than the new size.
    async fn resize_volume(&self, volume: VolumeId, size_bytes: u64) -> Result<(), BackendError>;

    /// Removes a volume that no sandbox mounts, with all its files. Harmless if it does not exist.
    async fn remove_volume(&self, volume: VolumeId) -> Result<(), BackendError>;

    /// What a volume's files take on disk. As slow as [`Self::disk_usage`].
    async fn volume_usage(&self, volume: VolumeId) -> Result<DiskUsage, BackendError>;

    /// Lists all volumes that have files.
    async fn volumes(&self) -> Result<Vec<VolumeId>, BackendError>;

    /// Writes recent changes of a sandbox's files to disk while it runs, so that [`Self::take_snapshot`] is quick. Does
    /// nothing if that would slow down the whole machine.
    async fn settle_files(&self, sandbox: SandboxId) -> Result<(), BackendError>;

    /// Takes a read-only snapshot of a sandbox's writable files, and returns their mark. The caller has frozen the
    /// sandbox. Only for a store with snapshots ([`wire::launch::StoreKind::has_snapshots`]).
    async fn take_snapshot(
        &self,
        sandbox: SandboxId,
        snapshot: SnapshotId,
    ) -> Result<FilesMark, BackendError>;

    /// Removes a snapshot that no sandbox lies over. Harmless if it does not exist.
    async fn remove_snapshot(&self, snapshot: SnapshotId) -> Result<(), BackendError>;

    /// Lists all snapshots.
    async fn snapshots(&self) -> Result<Vec<SnapshotId>, BackendError>;

    /// Compares two snapshots that lie over the same image. Slow for many files.
    async fn diff(
        &self,
        before: &DiffSide,
        after: &DiffSide,
        contents: bool,
    ) -> Result<Differences, BackendError>;

    /// Packs all files of a snapshot, as a sandbox that starts from it would see them, into a pipe as a tar stream.
    /// Without `/run/shoal`. If this fails, what is in the pipe is incomplete. Slow for many files.
    async fn export(&self, side: &DiffSide, to: OwnedFd) -> Result<(), BackendError>;

    /// How far the changes of a sandbox's files have got; `None` if the store does not count them. Quick.
    async fn files_mark(&self, sandbox: SandboxId) -> Result<Option<FilesMark>, BackendError>;
}

/// The differences between two snapshots.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Differences {
    /// What differs, by path. At most [`Differences::ENTRIES_MAX`], and none is [`Difference::End`].
    pub entries: Vec<Difference>,
    /// Whether these are all.
    pub complete: bool,
}

impl Differences {
    /// The most entries.
    pub const ENTRIES_MAX: usize = 100_000;
    /// The most bytes of all entries together.
    pub const BYTES_MAX: usize = 64 << 20;
}

/// The specification of a layer to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerSpec {
    /// Its name.
    pub layer: Digest,
    /// The layers below it, topmost first.
    pub below: Vec<Digest>,
    /// Whether the image `host` lies below those.
    pub over_host: bool,
    /// Where its contents come from.
    pub from: LayerSource,
}

/// What a sandbox's writable files take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskUsage {
    /// Bytes on disk. A sparse file counts what it holds; a file with two names counts once.
    pub bytes: u64,
    /// Whether everything was counted. If not, `bytes` is a lower bound: counting stops at a limit.
    pub complete: bool,
}
