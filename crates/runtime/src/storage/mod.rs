//! What sandboxes have on disk: images and their layers, writable files, volumes.
//!
//! Read [`places`] first: it says where everything is. [`pool`] keeps writable files and volumes; [`layers`] keeps the layers of
//! images, which [`unpacker`] creates; [`host_image`] builds the image `host` from this machine's own `/usr`, with its
//! [`package_config`]; [`trust`] makes programs in a sandbox trust a CA of ours; [`differ`] compares snapshots, and
//! [`exporter`] packs one.

pub mod differ;
mod directories;
pub mod disk;
pub mod exporter;
pub mod generations;
pub mod host_image;
pub mod layers;
pub mod package_config;
pub mod places;
pub mod pool;
mod private_files;
pub mod remove;
pub mod stage;
pub mod trust;
pub mod unpacker;
