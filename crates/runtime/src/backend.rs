//! What the engine sees of whatever isolates sandboxes.
//!
//! Nothing above this trait may assume that a sandbox is on this machine.

use std::io;

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncWrite};
use wire::SandboxId;
use wire::launch::{Limits, Processes, Rootfs};

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

    /// All sandboxes of this installation of which anything exists.
    async fn inventory(&self) -> Result<Vec<SandboxId>, BackendError>;

    /// How many processes of the sandbox were killed for want of memory since it was made, as the host counts. Asked before
    /// every command, so it must be quick.
    async fn oom_kills(&self, sandbox: SandboxId) -> Result<u64, BackendError>;
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
    /// Its host name.
    pub hostname: String,
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
