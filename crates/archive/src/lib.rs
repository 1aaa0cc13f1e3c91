//! Directories as tar streams, packed from and unpacked into trees that are not trusted.
//!
//! Used on both sides of a transfer: by init inside a sandbox, and by clients, which must not trust a stream from a sandbox.
//! Owns the format, the rules for unpacking, and the system calls that enforce them; knows nothing about sandboxes.
//! Memory use is bounded for every stream and every tree.
//!
//! Read in this order: [`header`](self) for blocks of 512 bytes, `read` for the entries of a stream, `unpack`, and
//! `pack` for the other direction.
//!
//! Writes the GNU format, which every tool reads. Reads GNU, ustar and pax.

#![forbid(unsafe_code)]

mod error;
mod header;
mod pack;
mod read;
mod unpack;

pub use error::UnpackError;
pub use header::BLOCK;
pub use pack::{
    PackError, Packed, attributes_header, entry_header, pack_directory, pack_directory_if, pack_file,
};
pub use read::{Entries, Entry, EntryKind};
pub use unpack::{Links, Unpacked, unpack};

/// The maximum number of entries in one stream.
pub const ENTRIES_MAX: u64 = 1_000_000;
/// Most nested directories. Each level takes a descriptor while it is packed.
pub const DEPTH_MAX: usize = 256;
