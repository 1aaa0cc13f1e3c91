//! The life of a sandbox, from the request to its end.
//!
//! Read in this order: [`lifecycle`] and [`lifetime`] decide, `driver` acts on one sandbox with `make`, `clean`,
//! `hold`, `pause`, `resume`, `rollback` and `judge`, `take` and `fork` copy its files, `live` is what a sandbox's driver, its link to init and its callers share, `registry`
//! holds all sandboxes in memory, `recovery` and `sweep` clean up after crashes.

pub mod admin;
pub(crate) mod admit;
pub(crate) mod calls;
pub(crate) mod claim;
mod clean;
pub(crate) mod deadlines;
pub(crate) mod driver;
pub(crate) mod fork;
pub(crate) mod history;
pub(crate) mod hold;
pub(crate) mod hooks;
mod judge;
pub mod lifecycle;
pub mod lifetime;
pub(crate) mod live;
mod make;
mod network;
pub(crate) mod pause;
pub(crate) mod recovery;
pub(crate) mod registry;
pub(crate) mod resume;
pub(crate) mod rollback;
pub(crate) mod secrets;
pub(crate) mod sweep;
pub(crate) mod take;
mod usage;
