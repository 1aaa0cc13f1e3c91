//! The only way out of a sandbox: DNS and TCP by policy.

#![forbid(unsafe_code)]

pub mod ca;
pub mod dial;
pub mod dns;
pub mod http;
pub mod limits;
pub mod policy;
pub mod relay;
pub mod tls;
