//! Shared parts of the black-box tests: a real `shoal serve` on a real kernel, tested through raw HTTP and WebSocket.
//!
//! Nothing here uses Shoal's own client or types, so that no shared mistake hides. Read in this order: [`daemon`]
//! starts one and cleans up after it, [`sandbox`] has what tests do with a sandbox, [`http`] and [`socket`] are the
//! clients, [`images`] makes images, [`audit`] finds leftovers on the machine, [`wait`] waits for conditions.
//! [`page`] and [`reader`] are for the documents, whose examples are run. [`fuzzed`] is separate: the functions that
//! read untrusted bytes, as fuzzers call them.
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
