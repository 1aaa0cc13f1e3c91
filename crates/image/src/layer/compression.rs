//! Streams in any compression that images use. The stream's first bytes decide, not the media type in the manifest:
//! registries contain many layers with a wrong type.

use std::io::{self, BufRead, Read};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use wire::launch::LayerFault;

/// How a stream is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// None.
    None,
    /// gzip, in one member or many.
    Gzip,
    /// zstd, in one frame or many.
    Zstd,
}

/// First bytes of formats that are recognised and rejected.
const REFUSED: [(&[u8], &str); 3] = [
    (b"\xfd7zXZ\0", "xz compression"),
    (b"BZh", "bzip2 compression"),
    (b"\x04\x22\x4d\x18", "lz4 compression"),
];

impl Compression {
    /// The compression of a stream with these first bytes.
    pub fn of(beginning: &[u8]) -> Result<Self, LayerFault> {
        if let Some((_, what)) = REFUSED.iter().find(|(magic, _)| beginning.starts_with(magic)) {
            return Err(LayerFault::Unsupported { what: (*what).into() });
        }
        // Skippable frames may come first.
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

/// The decompressed stream.
pub fn decompressed<'a>(mut from: impl BufRead + 'a) -> Result<Box<dyn Read + 'a>, LayerFault> {
    let read = |error: io::Error| LayerFault::Damaged { why: error.to_string() };
    // Callers' buffers hold far more than the longest prefix.
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
    /// Starts the next frame. `false`: there is none.
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
            self.inside = false; // The end of this frame, and perhaps not of the stream.
        }
    }
}
