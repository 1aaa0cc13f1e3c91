//! The network of sandboxes: routes, the sockets that egress serves, and what the host can observe.

use std::os::fd::OwnedFd;

use async_trait::async_trait;
use wire::SandboxId;
use wire::launch::Rootfs;
use wire::network::{Family, Listener, Routes};

use crate::backend::BackendError;

/// Gives sandboxes a network. A new sandbox has none, and creating one needs none of this.
///
/// Each call is for a running sandbox, claimed or not; it returns [`BackendError::Gone`] if the sandbox does not run,
/// and [`BackendError::Network`] if the machine or the sandbox does not support the request.
#[async_trait]
pub trait Network: Send + Sync + 'static {
    /// Gives a sandbox routes and returns the sockets where its connections and DNS questions arrive. The sandbox's
    /// network namespace exists as long as any of the sockets is open; the caller closes them before the sandbox is
    /// torn down.
    async fn open_network(&self, sandbox: SandboxId, routes: &Routes) -> Result<Listeners, BackendError>;

    /// Replaces the routes of a sandbox whose network is open. Repeating a call is harmless. Connections that have lost
    /// their route hang, so the caller ends them before.
    async fn change_routes(&self, sandbox: SandboxId, routes: &Routes) -> Result<(), BackendError>;

    /// Removes all routes of a sandbox. Repeating a call is harmless. The caller closes the sockets.
    async fn close_network(&self, sandbox: SandboxId) -> Result<(), BackendError>;

    /// Creates TCP sockets inside a sandbox, which the caller can connect to servers there. At most
    /// [`wire::network::SOCKETS_MAX`] at once.
    async fn sockets(
        &self,
        sandbox: SandboxId,
        family: Family,
        count: u8,
    ) -> Result<Vec<OwnedFd>, BackendError>;

    /// How often programs of a sandbox tried to reach an address without a route, since it was created.
    async fn attempts(&self, sandbox: SandboxId) -> Result<u64, BackendError>;

    /// Whether a sandbox can have a network. Sandboxes from a version without networks cannot.
    async fn can_have_network(&self, sandbox: SandboxId) -> Result<bool, BackendError>;

    /// Writes a sandbox's policy to a file that the sandbox can read but not change: [`wire::network::POLICY_FILE`]. At
    /// most [`wire::network::POLICY_BYTES_MAX`].
    async fn show_policy(&self, sandbox: SandboxId, policy: &[u8]) -> Result<(), BackendError>;

    /// Writes the roots that programs of a sandbox trust: those of its image with these, in PEM. The variables that name the files are
    /// those of [`crate::storage::trust::trust_variables`].
    async fn show_trust(
        &self,
        sandbox: SandboxId,
        rootfs: &Rootfs,
        ca: &str,
        extra: &str,
    ) -> Result<(), BackendError>;

    /// Starts the process that serves the listeners of all sandboxes. The first of these descriptors is its standard
    /// input, the others are its own from 3 up. The process starts in [`EGRESS_DIRECTORY`] of the data directory, which belongs to it,
    /// runs without any privilege under the installation's own user id, and keeps running when the daemon ends. At most
    /// [`wire::launch::DESCRIPTORS_MAX`].
    async fn start_egress(&self, descriptors: Vec<OwnedFd>) -> Result<(), BackendError>;

    /// Kills every egress process of this installation, including those of earlier daemons. Harmless if there is none.
    async fn end_egress(&self) -> Result<(), BackendError>;

    /// The TCP ports that programs of a sandbox listen on, sorted. Takes about a millisecond and reads data that a
    /// guest controls, so the caller limits how often.
    async fn listening(&self, sandbox: SandboxId) -> Result<Vec<ListeningPort>, BackendError>;
}

/// The directory of egress in the data directory.
pub const EGRESS_DIRECTORY: &str = "egress";

/// Sockets, each with its purpose.
pub type Listeners = Vec<(Listener, OwnedFd)>;

/// A port that a program listens on.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ListeningPort {
    /// The port.
    pub port: u16,
    /// The address: loopback, all addresses, or one.
    pub address: std::net::IpAddr,
    /// The process that listens. Unknown if the process changed or ended in the meantime.
    pub process: Option<PortProcess>,
}

/// A process that listens.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PortProcess {
    /// Its id inside the sandbox.
    pub pid: u32,
    /// Its name, as the program chose it.
    pub name: String,
}
