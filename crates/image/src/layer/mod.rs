//! Turns the bytes of a layer into files.
//!
//! This runs in a process of its own that the launcher makes for one layer: in namespaces, without privileges, with
//! the new layer as the only directory it can write to and the layers below as the only ones it can read. Even so,
//! nothing in the stream is trusted: see `unpack` for what happens to names, links, owners and devices.
//!
//! Layers are unpacked one above the other, and a layer's name depends on its contents *and* on what is below. Only
//! then can a directory without an entry look like the one below it, a link lead where it leads in the whole image,
//! and a hard link refer to a file of an older layer; real archives do all three.

mod capture;
mod compression;
mod finish;
mod unpack;

use std::io::{BufReader, Read};
use std::os::fd::BorrowedFd;

use wire::Digest;
use wire::launch::{LayerFacts, LayerFault};

pub use capture::{Written, capture};
pub use compression::{Compression, decompressed};
pub use finish::{finish, finish_digest};
pub use unpack::{Below, Limits};

use crate::hash::Hashing;

/// Largest ratio of a layer to its compressed form, beyond [`RATIO_FREE`]. Programs shrink to a third, logs to a
/// twentieth; gigabytes that shrink to a hundredth are an attack.
pub const RATIO_MAX: u64 = 100;
/// Below this size a ratio means nothing: a file of zeroes is no bomb.
pub const RATIO_FREE: u64 = 8 << 30;
/// Most headers in one stream. In the worst case, two or three precede each entry.
const HEADERS_MAX: u64 = 8_000_000;
/// Size of the read buffer.
const BLOB_BUFFER: usize = 256 * 1024;

/// Unpacks a blob into the empty directory `top`, over the files of `below`.
pub fn unpack(
    blob: &mut dyn Read,
    blob_bytes: u64,
    contents: Digest,
    top: BorrowedFd<'_>,
    below: Below<'_>,
    limits: &Limits,
) -> Result<LayerFacts, LayerFault> {
    let bytes_max = limits.bytes_max.min(RATIO_FREE.saturating_add(blob_bytes.saturating_mul(RATIO_MAX)));
    let stream = decompressed(BufReader::with_capacity(BLOB_BUFFER, blob))?;
    let mut hashing = Hashing::new(Bounded { from: stream, left: bytes_max, limit: bytes_max });
    let facts = {
        let mut entries = archive::Entries::with_limit(&mut hashing, HEADERS_MAX);
        unpack::unpack(&mut entries, top, below, limits)?
    };
    let found = hashing.finish();
    if found != contents {
        return Err(LayerFault::Digest { expected: contents, found });
    }
    Ok(facts)
}

/// Returns an error instead of a byte beyond the limit.
struct Bounded<R> {
    from: R,
    left: u64,
    limit: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        // One byte more than allowed may be requested, so that the end of a stream of exactly that length is seen.
        let most = usize::try_from(self.left.saturating_add(1)).unwrap_or(usize::MAX).min(into.len());
        let length = self.from.read(&mut into[..most])?;
        match self.left.checked_sub(length as u64) {
            Some(left) => {
                self.left = left;
                Ok(length)
            }
            None => {
                let fault = LayerFault::TooLarge { what: "bytes".into(), limit: self.limit };
                Err(std::io::Error::other(fault))
            }
        }
    }
}

#[cfg(test)]
mod tests;
