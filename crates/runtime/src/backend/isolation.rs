//! How sandboxes are kept apart: their processes, their limits, the stream to their init.

use std::time::Duration;

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncWrite};
use wire::SandboxId;
use wire::launch::{Limits, Motion, Mount, Over, Processes, Rootfs, Writable};

use crate::backend::BackendError;

/// Creates and ends sandboxes. Every call can be repeated after a crash in the middle of it.
#[async_trait]
pub trait Isolation: Send + Sync + 'static {
    /// Prepares what sandboxes with this root filesystem need. Quick if it is prepared already.
    async fn prepare(&self, rootfs: &Rootfs) -> Result<(), BackendError>;

    /// Creates a sandbox and starts its init, or starts init again over the files that [`Self::end_processes`] has kept. A failed
    /// launch may leave something behind: [`Self::teardown`] removes all of it, [`Self::end_processes`] all but the files.
    async fn launch(&self, spec: &Spec) -> Result<(), BackendError>;

    /// Opens the stream to a sandbox's init. A new stream replaces the one before.
    /// Returns [`BackendError::Gone`] if init has ended.
    async fn connect(&self, sandbox: SandboxId) -> Result<GuestStream, BackendError>;

    /// Ends a sandbox and removes everything that belongs to it. Harmless if nothing does.
    async fn teardown(&self, sandbox: SandboxId) -> Result<(), BackendError>;

    /// Kills processes of a sandbox from the host, without init, and keeps its files. Harmless if there are none.
    async fn end_processes(&self, sandbox: SandboxId, which: Processes) -> Result<(), BackendError>;

    /// Freezes or thaws every process of a sandbox, and returns once that is done. Repeating a call is harmless.
    async fn freeze(&self, sandbox: SandboxId, motion: Motion) -> Result<(), BackendError>;

    /// Announces that callers will probably create sandboxes like this, so that the backend can prepare some.
    fn foresee(&self, rootfs: &Rootfs, limits: &Limits);

    /// Reserves a prepared sandbox like this and returns its id. The caller must launch or tear down that id. `None` if no sandbox
    /// is prepared; the caller then chooses an id.
    fn reserve(&self, rootfs: &Rootfs, limits: &Limits) -> Option<SandboxId>;

    /// Removes prepared sandboxes that no caller has claimed. The daemon calls this once, when it ends.
    async fn stop(&self);

    /// Lists the sandboxes of this installation of which anything exists, without the prepared ones.
    async fn inventory(&self) -> Result<Vec<SandboxId>, BackendError>;

    /// Counts the processes of a sandbox that the kernel has killed because memory ran out. The engine asks before every command,
    /// so this must be quick.
    async fn oom_kills(&self, sandbox: SandboxId) -> Result<u64, BackendError>;

    /// What each of these sandboxes uses, in the given order; `None` for a sandbox without processes. Never waits for a sandbox.
    async fn usage(&self, sandboxes: &[SandboxId]) -> Result<Vec<Option<Usage>>, BackendError>;

    /// The machine that all sandboxes share.
    async fn machine(&self) -> Result<Machine, BackendError>;
}

/// The specification of a sandbox to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Its id.
    pub sandbox: SandboxId,
    /// What it sees as `/`.
    pub rootfs: Rootfs,
    /// What it may use.
    pub limits: Limits,
    /// Volumes to mount. A mount below another one comes after it.
    pub mounts: Vec<Mount>,
    /// The snapshots that it lies over.
    pub over: Over,
    /// Whether the sandbox is new, or one whose processes were ended and whose files were kept.
    pub writable: Writable,
}

/// What a sandbox uses at one instant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time of all its processes since it was created, including processes that have ended.
    pub cpu_time: Duration,
    /// How long its cpu limit has kept runnable processes waiting, since it was created.
    pub throttled_time: Duration,
    /// Everything that counts against its limit: memory, page cache and tmpfs.
    pub memory_bytes: u64,
    /// The part that the kernel reclaims before it kills anything: file pages that were not used recently.
    pub memory_reclaimable_bytes: u64,
    /// Processes and threads.
    pub pids: u32,
}

/// A machine, and what it has left.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Machine {
    /// Processors.
    pub cpus: u32,
    /// Total memory.
    pub memory_bytes: u64,
    /// Memory that is available without swapping.
    pub memory_available_bytes: u64,
    /// Size of the file system that holds writable files.
    pub disk_bytes: u64,
    /// Free space on it.
    pub disk_available_bytes: u64,
    /// What all sandboxes of this installation use together. Its processor time includes deleted sandboxes.
    pub sandboxes: Usage,
}

/// The byte stream between daemon and init.
pub type GuestStream = Box<dyn Duplex>;

/// A stream that can be read and written.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}
