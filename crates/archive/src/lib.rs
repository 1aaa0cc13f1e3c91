//! Directories as tar streams, packed from and unpacked into trees that are not trusted.
//!
//! Used on both sides of a transfer: by init inside a sandbox, and by clients, who get their streams from a sandbox and must not
//! believe a byte of them. Owns the format, the rules of what is unpacked, and the system calls that keep to them; knows nothing
//! of sandboxes. Memory is bounded whatever the stream or the tree is.
//!
//! Read in this order: [`header`](self) blocks of 512 bytes, `read` entries of a stream, `unpack` what becomes of them, `pack`
//! the way back.
//!
//! What is written is the GNU format, which everybody reads. What is read is that, ustar, and pax.

#![forbid(unsafe_code)]

mod header;
mod pack;
mod read;
mod unpack;

pub use header::BLOCK;
pub use pack::{PackError, Packed, entry_header, pack_directory, pack_directory_if, pack_file};
pub use read::{Entries, Entry, EntryKind};
pub use unpack::{Links, UnpackError, Unpacked, unpack};

/// Entries of one stream.
pub const ENTRIES_MAX: u64 = 1_000_000;
/// Directories inside one another. Each is a descriptor while it is packed.
pub const DEPTH_MAX: usize = 256;
