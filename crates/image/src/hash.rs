//! Digests of streams.

use std::io::{self, Read};

use sha2::{Digest as _, Sha256};
use wire::Digest;

/// The digest of bytes in memory.
pub fn digest_of(bytes: &[u8]) -> Digest {
    Digest::from_bytes(Sha256::digest(bytes).into())
}

/// A digest under construction.
#[derive(Debug, Clone, Default)]
pub struct Hasher(Sha256);

impl Hasher {
    /// Starts.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all bytes.
    pub fn finish(self) -> Digest {
        Digest::from_bytes(self.0.finalize().into())
    }
}

/// Hashes and counts what is read through it.
#[derive(Debug)]
pub struct Hashing<R> {
    from: R,
    hasher: Hasher,
    /// How many bytes were read.
    pub bytes: u64,
}

impl<R: Read> Hashing<R> {
    /// Wraps a reader.
    pub fn new(from: R) -> Self {
        Self { from, hasher: Hasher::new(), bytes: 0 }
    }

    /// The digest of everything that was read.
    pub fn finish(self) -> Digest {
        self.hasher.finish()
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let length = self.from.read(into)?;
        self.hasher.update(&into[..length]);
        self.bytes += length as u64;
        Ok(length)
    }
}

/// The name of a layer over others: it identifies the layer's own contents and everything below it, as in the image
/// specification (*chain id*).
pub fn chain(below: Option<Digest>, contents: Digest) -> Digest {
    match below {
        None => contents,
        Some(below) => digest_of(format!("{below} {contents}").as_bytes()),
    }
}
