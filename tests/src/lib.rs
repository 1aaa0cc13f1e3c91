//! What the black-box tests share: a real `shoal serve` on a real kernel, spoken to by raw HTTP and WebSocket.
//!
//! Nothing here uses Shoal's own client or types, so that no shared mistake hides. Read in this order: [`daemon`]
//! starts one and cleans up after it, [`sandbox`] is what tests do with it, [`http`] and [`socket`] are how they
//! talk, [`images`] is what they make sandboxes from, [`audit`] is what is left on the machine, [`wait`] is how they
//! wait. [`page`] and [`reader`] are for the documents, whose examples are run. [`fuzzed`] is apart: the functions that
//! read foreign bytes, as fuzzers call them.
//!
//! The tests need root and a kernel with the features that Shoal needs. Without them they fail; they never skip.

#![forbid(unsafe_code)]

pub mod ages;
pub mod audit;
pub mod collector;
pub mod daemon;
pub mod fuzzed;
pub mod http;
pub mod images;
pub mod page;
pub mod reader;
pub mod sandbox;
pub mod socket;
pub mod wait;

pub use audit::Audit;
pub use daemon::{Daemon, Spawn};
pub use http::{Request, Response};
pub use sandbox::{Finished, Sandbox};
pub use socket::{Collected, Said, Socket};
pub use wait::{DEADLINE, until};
