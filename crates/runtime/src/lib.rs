//! Turns a plan into an isolated process tree, and keeps its files.
//!
//! This crate knows the kernel. It knows no HTTP, no database and no owners. Read in this order: [`backend`] is the interface that
//! the engine sees; [`ns`] isolates sandboxes with namespaces; [`storage`] keeps images, writable files and volumes; [`sys`] holds
//! the system calls that no safe crate wraps. [`doctor`] stands apart: it checks whether this machine has what the rest needs.
//! Folders depend on each other in one direction: `doctor` and `ns` on `storage`, all of them on `backend` and `sys`.

pub mod backend;
pub mod doctor;
#[cfg(feature = "fake")]
pub mod fake;
pub mod ns;
pub mod storage;
pub mod sys;

pub use backend::{
    Backend, BackendError, Differences, DiskUsage, EGRESS_DIRECTORY, GuestStream, Isolation, LayerSpec,
    Listeners, ListeningPort, Machine, Network, PortProcess, Spec, Storage, Usage,
};
pub use storage::pool::StoreConfig;
