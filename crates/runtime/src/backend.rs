//! What the engine sees of whatever isolates sandboxes.
//!
//! Nothing above this trait may assume that a sandbox is on this machine.

use std::io;
use std::time::Duration;

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncWrite};
use wire::launch::{
    LayerFacts, LayerFault, LayerSource, Limits, Motion, Mount, Processes, Rootfs, StoreFacts,
};
use wire::{Digest, SandboxId, VolumeId};

/// How sandboxes are isolated. Every call may be made again after a crash in its middle.
#[async_trait]
pub trait Backend: Send + Sync + 'static {
    /// Makes ready what sandboxes with this root filesystem need. Quick when that is so already.
    async fn prepare(&self, rootfs: &Rootfs) -> Result<(), BackendError>;

    /// Makes a sandbox and starts its init. If it fails, something may be left that [`Self::teardown`] removes.
    async fn launch(&self, spec: &Spec) -> Result<(), BackendError>;

    /// Opens the stream to a sandbox's init. A new stream replaces the one before.
    /// [`BackendError::Gone`] if there is no init to talk to, and there will not be one again.
    async fn connect(&self, sandbox: SandboxId) -> Result<GuestStream, BackendError>;

    /// Ends whatever exists of a sandbox and removes it. Harmless when nothing does.
    async fn teardown(&self, sandbox: SandboxId) -> Result<(), BackendError>;

    /// Ends processes of a sandbox without the help of its init, and keeps its files. Harmless when there are none.
    async fn end_processes(&self, sandbox: SandboxId, which: Processes) -> Result<(), BackendError>;

    /// Says that sandboxes like this are likely to be asked for, so that some may be made ahead of time.
    fn foresee(&self, rootfs: &Rootfs, limits: &Limits);

    /// The id of a sandbox like this that stands ready, for whoever launches it next under that id. It must be launched or torn
    /// down. `None` if none does, and then any id will do.
    fn reserve(&self, rootfs: &Rootfs, limits: &Limits) -> Option<SandboxId>;

    /// Makes every process of a sandbox stand still, or go on. Returns when that is so; asking twice is harmless.
    async fn freeze(&self, sandbox: SandboxId, motion: Motion) -> Result<(), BackendError>;

    /// Removes what was made ahead of time and is nobody's yet. Called once, when the daemon ends.
    async fn stop(&self);

    /// All sandboxes of this installation of which anything exists, save those that it keeps ready.
    async fn inventory(&self) -> Result<Vec<SandboxId>, BackendError>;

    /// How many processes of the sandbox were killed for want of memory since it was made, as the host counts. Asked before
    /// every command, so it must be quick.
    async fn oom_kills(&self, sandbox: SandboxId) -> Result<u64, BackendError>;

    /// Makes a layer, unless it is there. `read` hears how much of the blob was read.
    async fn unpack_layer(
        &self,
        layer: &LayerSpec,
        read: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<LayerFacts, BackendError>;

    /// Removes a layer that no sandbox uses. Harmless when there is none.
    async fn remove_layer(&self, layer: Digest) -> Result<(), BackendError>;

    /// All layers that are there.
    async fn layers(&self) -> Result<Vec<Digest>, BackendError>;

    /// What each of these sandboxes uses, in their order; `None` for one of which nothing runs. Quick: no sandbox is waited for.
    async fn usage(&self, sandboxes: &[SandboxId]) -> Result<Vec<Option<Usage>>, BackendError>;

    /// What a sandbox's writable files take on disk. Slow where there are many: the caller bounds how often and how many at once.
    async fn disk_usage(&self, sandbox: SandboxId) -> Result<DiskUsage, BackendError>;

    /// Where writable files are kept, and whether they can be limited there.
    fn store(&self) -> StoreFacts;

    /// Makes a volume, empty or with the files that another has now. Harmless when it is there: then it has this size afterwards.
    async fn create_volume(
        &self,
        volume: VolumeId,
        size_bytes: u64,
        from: Option<VolumeId>,
    ) -> Result<(), BackendError>;

    /// Lets a volume hold more, or less. Files stay, however many there are.
    async fn resize_volume(&self, volume: VolumeId, size_bytes: u64) -> Result<(), BackendError>;

    /// Removes a volume that no sandbox mounts, with all its files. Harmless when there is none.
    async fn remove_volume(&self, volume: VolumeId) -> Result<(), BackendError>;

    /// What a volume's files take on disk. As slow as [`Self::disk_usage`].
    async fn volume_usage(&self, volume: VolumeId) -> Result<DiskUsage, BackendError>;

    /// All volumes of which there are files.
    async fn volumes(&self) -> Result<Vec<VolumeId>, BackendError>;

    /// The machine that all sandboxes share.
    async fn machine(&self) -> Result<Machine, BackendError>;
}

/// What a sandbox uses at one instant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time of all its processes since it was made, those that ended included.
    pub cpu_time: Duration,
    /// For how long processes that could run were held back by its limit, since it was made.
    pub throttled_time: Duration,
    /// All that counts against its limit: memory, page cache and tmpfs.
    pub memory_bytes: u64,
    /// The part of it that the kernel gives back before anything is killed: pages of files that nobody used lately.
    pub memory_reclaimable_bytes: u64,
    /// Processes and threads.
    pub pids: u32,
}

/// What a sandbox's writable files take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskUsage {
    /// On disk: files with holes count what they hold, files with two names count once.
    pub bytes: u64,
    /// Whether all was counted. If not, it is at least so much: counting stops at a bound.
    pub complete: bool,
}

/// A machine, and what is left of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Machine {
    /// Processors.
    pub cpus: u32,
    /// Memory in all.
    pub memory_bytes: u64,
    /// What could be had without swapping.
    pub memory_available_bytes: u64,
    /// Of the file system that writable files are on.
    pub disk_bytes: u64,
    /// What is free there.
    pub disk_available_bytes: u64,
    /// What all sandboxes of this installation use together; in its processor time, those that are gone have their part.
    pub sandboxes: Usage,
}

/// A layer to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerSpec {
    /// What it will be called.
    pub layer: Digest,
    /// What it lies on, the uppermost first.
    pub below: Vec<Digest>,
    /// Whether the image `host` lies below those.
    pub over_host: bool,
    /// Where its contents come from.
    pub from: LayerSource,
}

/// What a backend is asked to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Names it.
    pub sandbox: SandboxId,
    /// What it sees as `/`.
    pub rootfs: Rootfs,
    /// What it may use.
    pub limits: Limits,
    /// Volumes that it sees. One below another comes after it.
    pub mounts: Vec<Mount>,
}

/// Bytes to and from init.
pub type GuestStream = Box<dyn Duplex>;

/// Both directions in one.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// What can go wrong in a backend.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The launcher tried and the kernel refused.
    #[error("cannot {doing}")]
    Refused {
        /// What was being done, as it reads after "cannot".
        doing: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// The launcher died with the request under way; it is started again. What was done is not known.
    #[error("the launcher died while it was asked to {doing}")]
    LauncherGone {
        /// What was asked.
        doing: &'static str,
    },
    /// No answer in time. What was done is not known.
    #[error("no answer within {seconds} s to the request to {doing}")]
    Late {
        /// What was asked.
        doing: &'static str,
        /// The deadline.
        seconds: u64,
    },
    /// The layer is not what it should be.
    #[error("cannot unpack layer {layer}")]
    Layer {
        /// Which one.
        layer: Digest,
        /// What is wrong with it.
        source: Box<LayerFault>,
    },
    /// There is no init, and there will not be one again.
    #[error("the sandbox has ended")]
    Gone,
    /// The machine has no room: id ranges, processes, descriptors.
    #[error("the machine has no room for another sandbox: {what} are used up")]
    Full {
        /// Which resource.
        what: &'static str,
    },
}
