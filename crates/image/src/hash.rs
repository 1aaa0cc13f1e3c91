//! Digests of bytes as they pass by.

use std::io::{self, Read};

use sha2::{Digest as _, Sha256};
use wire::Digest;

/// The digest of bytes that are all there.
pub fn digest_of(bytes: &[u8]) -> Digest {
    Digest::from_bytes(Sha256::digest(bytes).into())
}

/// A digest in the making.
#[derive(Debug, Clone, Default)]
pub struct Hasher(Sha256);

impl Hasher {
    /// Of nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Of these bytes too.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Of all bytes.
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
    /// From its beginning.
    pub fn new(from: R) -> Self {
        Self { from, hasher: Hasher::new(), bytes: 0 }
    }

    /// The digest of all that was read.
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

/// What a layer is called that lies on others: it stands for its own contents and for all that is below it, as the image
/// specification has it (*chain id*).
pub fn chain(below: Option<Digest>, contents: Digest) -> Digest {
    match below {
        None => contents,
        Some(below) => digest_of(format!("{below} {contents}").as_bytes()),
    }
}
