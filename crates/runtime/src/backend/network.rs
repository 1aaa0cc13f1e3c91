//! The network of sandboxes: what has a route, the sockets through which egress serves it, and what can be seen of it.

use std::os::fd::OwnedFd;

use async_trait::async_trait;
use wire::SandboxId;
use wire::network::{Family, Listener, Routes};

use crate::backend::BackendError;

/// Gives sandboxes a network. A new sandbox has none, and none of this is needed to create one.
///
/// Each call is for a sandbox that runs, claimed or not; [`BackendError::Gone`] if it does not. What the machine or the sandbox
/// cannot do is [`BackendError::Network`].
#[async_trait]
pub trait Network: Send + Sync + 'static {
    /// Gives a sandbox routes and returns the sockets that connections and questions about names arrive on. As long as any of
    /// them is held, the sandbox's network namespace exists; the caller closes them before the sandbox is torn down.
    async fn open_network(&self, sandbox: SandboxId, routes: &Routes) -> Result<Listeners, BackendError>;

    /// Replaces the routes of a sandbox whose network is open, and returns further sockets that the new ones need. Repeating a call
    /// is harmless. Connections that have lost their route hang, so the caller ends them before.
    async fn change_routes(&self, sandbox: SandboxId, routes: &Routes) -> Result<Listeners, BackendError>;

    /// Takes all routes of a sandbox away. Repeating a call is harmless. The caller closes the sockets.
    async fn close_network(&self, sandbox: SandboxId) -> Result<(), BackendError>;

    /// Makes TCP sockets inside a sandbox, for the caller to connect to what listens there. At most
    /// [`wire::network::SOCKETS_MAX`] at once.
    async fn sockets(
        &self,
        sandbox: SandboxId,
        family: Family,
        count: u8,
    ) -> Result<Vec<OwnedFd>, BackendError>;

    /// How often programs of a sandbox tried to reach an address without a route, since it was created.
    async fn attempts(&self, sandbox: SandboxId) -> Result<u64, BackendError>;

    /// Whether a sandbox can have a network. Those that were made by a version without networks cannot.
    async fn can_have_network(&self, sandbox: SandboxId) -> Result<bool, BackendError>;

    /// Shows a sandbox its policy, in a file that it can read and not change: [`wire::network::POLICY_FILE`]. At most
    /// [`wire::network::POLICY_BYTES_MAX`].
    async fn show_policy(&self, sandbox: SandboxId, policy: &[u8]) -> Result<(), BackendError>;

    /// Starts the process that serves the listeners of all sandboxes. It gets these descriptors, from 3 up, runs under an id of the
    /// installation's own without any right, and lives on when the daemon ends. At most [`wire::launch::DESCRIPTORS_MAX`].
    async fn start_egress(&self, descriptors: Vec<OwnedFd>) -> Result<(), BackendError>;

    /// Kills every egress process of this installation, also those of daemons before. Harmless if there is none.
    async fn end_egress(&self) -> Result<(), BackendError>;

    /// The TCP ports that programs of a sandbox listen on, in order. Takes about a millisecond and reads what a guest controls, so
    /// the caller limits how often.
    async fn listening(&self, sandbox: SandboxId) -> Result<Vec<ListeningPort>, BackendError>;
}

/// Sockets, each with what arrives on it.
pub type Listeners = Vec<(Listener, OwnedFd)>;

/// A port that a program listens on.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ListeningPort {
    /// The port.
    pub port: u16,
    /// Where: loopback, all addresses, or one.
    pub address: std::net::IpAddr,
    /// Who listens. Not known for a process that changed or ended meanwhile.
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
