//! Ports: connections to what runs in a sandbox, which ports programs listen on, and links that open one.
//!
//! The launcher makes sockets in the sandbox's network namespace and this room connects them, always to loopback, so a
//! server need not listen on more than that. No descriptor is taken from the sandbox. An open connection is a use of the
//! sandbox.

mod connect;
mod links;
mod listening;

pub(crate) use connect::Ports;
pub use connect::{CONNECTIONS_PER_OWNER_MAX, CONNECTIONS_PER_SANDBOX_MAX, PortStream};
pub(crate) use links::Links;
pub use links::{LINKS_PER_SANDBOX_MAX, LinkEnd, LinkGrant};
pub use listening::WAIT_SECONDS_MAX;
