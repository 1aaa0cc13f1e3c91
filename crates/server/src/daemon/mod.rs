//! The daemon from its start to its end: the data directory, the listener, and the order in which all of it starts and stops.
//!
//! Knows every other folder of this crate, and none of them knows it.

pub mod compose;
mod connection;
pub mod data_dir;
pub mod listen;
pub mod private;
pub mod serve;
