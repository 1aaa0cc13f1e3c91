//! An image reference becomes layers on disk: pull, verify, import, unpack. Reads hostile bytes.
//!
//! Owns what images are made of and how they are moved; who may use which image, and which are kept, is the engine's business, and
//! where layers are mounted the launcher's. Nothing here is believed because a registry or an archive says so: every blob is
//! compared with its digest, every size with what came, every name with where it leads.
//!
//! Read in this order: [`mod@reference`] is what people call an image, [`manifest`] what it is made of, [`registry`] where it is pulled
//! from with the [`credentials`] for that, [`blobs`] where its bytes wait, [`archive_file`] the way in without a registry,
//! [`layer`] how bytes become files, and [`dockerfile`] what is to be done where an image is built, with
//! [`ignore`] for what is left out of that. `layer` runs in a process that can reach nothing but the layer it makes; all else
//! runs in the daemon and creates no file under a foreign name.

#![forbid(unsafe_code)]

pub mod archive_file;
pub mod blobs;
pub mod credentials;
pub mod dockerfile;
pub mod hash;
pub mod ignore;
pub mod layer;
pub mod manifest;
pub mod reference;
pub mod registry;

pub use blobs::Blobs;
pub use credentials::{Credentials, DockerConfig};
pub use manifest::{BadImage, Image, ImageConfig, LayerBlob, Platform};
pub use reference::{BadReference, ImageRef};
pub use registry::{Registries, Registry, RegistryError};
pub use wire::Digest;
