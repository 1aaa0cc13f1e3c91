//! The interface between the engine and a backend, which isolates sandboxes and keeps their files.
//!
//! Three traits: [`Isolation`] covers processes, [`Storage`] files, [`Network`] what sandboxes can reach. Callers must
//! not assume that a sandbox runs on this machine.

mod isolation;
mod network;
mod storage;

use std::io;

use wire::Digest;
use wire::launch::LayerFault;
use wire::network::NetworkFault;

pub use isolation::{Duplex, GuestStream, Isolation, Machine, Spec, Usage};
pub use network::{EGRESS_DIRECTORY, Listeners, ListeningPort, Network, PortProcess};
pub use storage::{Differences, DiskUsage, LayerSpec, Storage};

/// All traits in one object, which the engine holds.
pub trait Backend: Isolation + Storage + Network {}

impl<T: Isolation + Storage + Network> Backend for T {}

/// Why a backend could not do what the engine asked for.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The kernel rejected a request of the launcher.
    #[error("cannot {doing}")]
    Refused {
        /// What was being done, as it reads after "cannot".
        doing: String,
        /// The error from the kernel.
        source: io::Error,
    },
    /// The launcher died during the request and will be restarted. How far the request got is unknown.
    #[error("the launcher died while handling the request to {doing}")]
    LauncherGone {
        /// What was asked.
        doing: &'static str,
    },
    /// The launcher did not answer in time. How far the request got is unknown.
    #[error("no answer within {seconds} s to the request to {doing}")]
    Late {
        /// What was asked.
        doing: &'static str,
        /// The deadline.
        seconds: u64,
    },
    /// The layer is damaged or malformed.
    #[error("cannot unpack layer {layer}")]
    Layer {
        /// Which one.
        layer: Digest,
        /// The fault in it.
        source: Box<LayerFault>,
    },
    /// The machine or the sandbox does not support the requested network.
    #[error("cannot {doing}")]
    Network {
        /// What was asked.
        doing: &'static str,
        /// The cause.
        source: Box<NetworkFault>,
    },
    /// Init has ended and will not come back.
    #[error("the sandbox has ended")]
    Gone,
    /// The machine has run out of id ranges, processes or descriptors.
    #[error("the machine has no room for another sandbox: it has run out of {what}")]
    Full {
        /// Which resource.
        what: &'static str,
    },
}
