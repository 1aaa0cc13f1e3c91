//! A plan becomes an isolated process tree.
//!
//! Knows the kernel and nothing of HTTP, rows or owners. Read in this order: [`backend`] is what the engine sees; [`ns`] is
//! the daemon's half of the backend `ns`, [`launcher`] the privileged half; [`plan`] says what is done to make a
//! sandbox, [`enter`] does it; the rest are its tools. [`doctor`] is apart: whether this
//! machine has what all of it needs.

pub mod backend;
pub mod cgroup;
pub mod disk;
pub mod doctor;
pub mod enter;
#[cfg(feature = "fake")]
pub mod fake;
pub mod floor;
pub mod host_image;
pub mod launcher;
pub mod layer_store;
pub mod ns;
pub mod places;
pub mod plan;
pub mod ranges;
pub mod remove;
pub mod seccomp;
pub mod slot;
pub mod spares;
pub mod store;
pub mod sys;
pub mod unpacker;

pub use backend::{Backend, BackendError, DiskUsage, GuestStream, LayerSpec, Machine, Spec, Usage};
pub use store::StoreConfig;
