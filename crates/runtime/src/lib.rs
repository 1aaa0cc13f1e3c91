//! A plan becomes an isolated process tree.
//!
//! Knows the kernel and nothing of HTTP, rows or owners. Read in this order: [`backend`] is what the engine sees.

pub mod backend;
#[cfg(feature = "fake")]
pub mod fake;

pub use backend::{Backend, BackendError, GuestStream, Spec};
