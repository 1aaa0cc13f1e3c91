//! The daemon from start to end: the data directory, the listener, and the order of startup and shutdown.
//!
//! This module uses every other folder of this crate, and none of them uses it.

pub mod compose;
mod connection;
pub mod data_dir;
pub mod listen;
mod memory;
pub mod private;
pub mod serve;
