//! The only way out of a sandbox: DNS and TCP by policy.

#![forbid(unsafe_code)]

pub mod ca;
pub mod control;
pub mod dial;
pub mod dns;
pub mod gateway;
pub mod http;
pub mod limits;
pub mod outbox;
pub mod policy;
pub mod process;
pub mod relay;
pub mod tls;
