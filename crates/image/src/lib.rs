//! From an image reference to layers on disk: pull, verify, import, unpack. Reads untrusted bytes.
//!
//! Owns the formats of images and how they are transferred. The engine decides who may use which image and which are
//! kept; the launcher mounts layers. Nothing that a registry or an archive says is trusted: every blob is checked
//! against its digest, every size against the bytes, every name against where it leads.
//!
//! Read in this order: [`mod@reference`] parses references, [`manifest`] the documents of an image, [`registry`]
//! pulls with [`credentials`], [`blobs`] stores blobs until they are unpacked, [`archive_file`] imports without a
//! registry, [`layer`] turns bytes into files, and [`dockerfile`] parses builds, with [`ignore`] for what is left out
//! of a context. `layer` runs in a process that can reach nothing but the layer it makes; everything else runs in the
//! daemon and creates no file under a foreign name.

#![forbid(unsafe_code)]

mod address;
pub mod archive_file;
pub mod blobs;
pub mod credentials;
pub mod dockerfile;
pub mod hash;
pub mod ignore;
pub mod layer;
pub mod manifest;
pub mod oci_file;
pub mod reference;
pub mod registry;

pub use address::is_public;
pub use blobs::Blobs;
pub use credentials::{Credentials, DockerConfig};
pub use manifest::{BadImage, Image, ImageConfig, LayerBlob, Platform};
pub use reference::{BadReference, ImageRef};
pub use registry::{Registries, Registry, RegistryError};
pub use wire::Digest;
