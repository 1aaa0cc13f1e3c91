//! Types that cross between the processes of Shoal, and their encodings; no logic, no I/O.
//!
//! Read in this order: [`id`] and [`digest`] name things, [`frame`], [`guest`] and [`files`] are spoken between daemon and init,
//! [`launch`] between daemon and launcher, [`network`] is what launcher and egress agree on, `api` is spoken between clients and
//! the daemon.

#![forbid(unsafe_code)]

#[cfg(feature = "api")]
pub mod api;
pub mod digest;
pub mod files;
pub mod frame;
pub mod guest;
pub mod id;
pub mod launch;
pub mod network;

pub use digest::Digest;
pub use id::{
    BuildId, CommandId, InstallationId, LinkId, PoolId, SandboxId, SnapshotId, TemplateId, VolumeId,
    WebhookId,
};
