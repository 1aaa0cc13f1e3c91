//! The only way out of a sandbox: DNS and TCP by policy.

#![forbid(unsafe_code)]

pub mod dns;
pub mod limits;
pub mod policy;
