//! Streams that are compressed in one of the ways that images know. What a stream says of itself counts, not what a manifest
//! calls it: registries are full of layers under the wrong name.

use std::io::{self, BufRead, Read};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use wire::launch::LayerFault;

/// How a stream is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    None,
    /// As gzip does, in one piece or many.
    Gzip,
    /// As zstd does, in one frame or many.
    Zstd,
}

/// How the streams begin that are known and not taken.
const REFUSED: [(&[u8], &str); 3] = [
    (b"\xfd7zXZ\0", "xz compression"),
    (b"BZh", "bzip2 compression"),
    (b"\x04\x22\x4d\x18", "lz4 compression"),
];

impl Compression {
    /// Of a stream that begins so.
    pub fn of(beginning: &[u8]) -> Result<Self, LayerFault> {
        if let Some((_, what)) = REFUSED.iter().find(|(magic, _)| beginning.starts_with(magic)) {
            return Err(LayerFault::Unsupported { what: (*what).into() });
        }
        // Frames that are to be skipped may come first.
        let skippable = matches!(beginning, [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..]);
        Ok(if beginning.starts_with(&[0x1f, 0x8b]) {
            Self::Gzip
        } else if skippable || beginning.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
            Self::Zstd
        } else {
            Self::None
        })
    }
}

/// What is in a stream, decompressed where it is compressed.
pub fn decompressed<'a>(mut from: impl BufRead + 'a) -> Result<Box<dyn Read + 'a>, LayerFault> {
    let read = |error: io::Error| LayerFault::Damaged { why: error.to_string() };
    // The buffers of our callers hold far more than the longest beginning.
    let beginning = from.fill_buf().map_err(read)?;
    Ok(match Compression::of(beginning)? {
        Compression::None => Box::new(from),
        Compression::Gzip => Box::new(MultiGzDecoder::new(from)),
        Compression::Zstd => Box::new(Zstd { from, decoder: FrameDecoder::new(), inside: false }),
    })
}

/// All frames of a zstd stream. The decoder allows windows of up to 128 MiB, as `zstd` does.
struct Zstd<R> {
    from: R,
    decoder: FrameDecoder,
    inside: bool,
}

impl<R: BufRead> Zstd<R> {
    /// Begins the next frame. `false`: there is none.
    fn next_frame(&mut self) -> io::Result<bool> {
        while !self.from.fill_buf()?.is_empty() {
            match self.decoder.reset(&mut self.from) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let length = u64::from(length);
                    if io::copy(&mut (&mut self.from).take(length), &mut io::sink())? != length {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(io::Error::other(error.to_string())),
            }
        }
        Ok(false)
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.inside && !self.next_frame()? {
                return Ok(0);
            }
            self.inside = true;
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                self.decoder
                    .decode_blocks(&mut self.from, BlockDecodingStrategy::UptoBlocks(1))
                    .map_err(|error| io::Error::other(error.to_string()))?;
            }
            let length = self.decoder.read(into)?;
            if length > 0 || into.is_empty() {
                return Ok(length);
            }
            self.inside = false; // An end of this frame, and perhaps not of the stream.
        }
    }
}
