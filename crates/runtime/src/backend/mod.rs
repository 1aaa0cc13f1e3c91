//! The interface between the engine and a backend, which isolates sandboxes and keeps their files.
//!
//! Two traits: [`Isolation`] covers processes, [`Storage`] covers files. Callers must not assume that a sandbox runs on this
//! machine.

mod isolation;
mod storage;

use std::io;

use wire::Digest;
use wire::launch::LayerFault;

pub use isolation::{Duplex, GuestStream, Isolation, Machine, Spec, Usage};
pub use storage::{DiskUsage, LayerSpec, Storage};

/// Both in one object, which is what the engine holds.
pub trait Backend: Isolation + Storage {}

impl<T: Isolation + Storage> Backend for T {}

/// Why a backend could not do what the engine asked for.
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
