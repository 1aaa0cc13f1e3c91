//! Who may do what: API keys with their owners and limits, and signatures of links.

pub(crate) mod calls;
pub mod keys;
pub(crate) mod revoked;
pub mod signing;
