//! Who may do what: API keys with their owners and limits, and signatures of links.

mod calls;
pub mod keys;
pub mod signing;
