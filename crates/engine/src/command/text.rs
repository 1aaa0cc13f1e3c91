//! A command's output as text, with offsets in the text.
//!
//! Some protocols carry output as text and count its UTF-8 bytes. As long as a command writes valid UTF-8 those are the
//! offsets of its bytes; an invalid byte becomes U+FFFD, which takes three bytes. So text has its own offsets. A reader
//! that reconnects with such an offset gets there by decoding again from the first kept byte. That is exact because
//! decoding does not depend on how the bytes were split: an incomplete character waits for its remaining bytes, or for
//! the end of the stream.

use std::collections::VecDeque;

use wire::guest::Stream;

use crate::command::{CommandRef, Output};
use crate::model::{Command, Offsets, OutputEvent};

/// Replaces invalid bytes.
const REPLACEMENT: &str = "\u{fffd}";

/// An event of a command whose output is read as text.
#[derive(Debug, Clone)]
pub enum TextEvent {
    /// The command runs: the pid is known.
    Started {
        /// Its process id, as the guest sees it.
        pid: u32,
    },
    /// Text of a stream, in whole characters.
    Text {
        /// Which stream.
        stream: Stream,
        /// The offset of its first byte, in bytes of UTF-8.
        offset: u64,
        /// The text. Never empty.
        text: String,
    },
    /// The reader was too slow for too long and was dropped. Reconnect with offsets.
    Stalled,
    /// The command has ended, and all its output was returned before this.
    Ended(Box<Command>),
}

impl CommandRef {
    /// As [`Self::attach`], with text, and with offsets in the text.
    pub fn attach_text(&self, from: Offsets) -> TextOutput {
        TextOutput {
            output: self.attach(Offsets::default()),
            streams: [Decoder::new(from.stdout), Decoder::new(from.stderr)],
            ready: VecDeque::new(),
        }
    }
}

/// A command's output as text, as it arrives.
pub struct TextOutput {
    output: Output,
    /// Stdout's and stderr's.
    streams: [Decoder; 2],
    ready: VecDeque<TextEvent>,
}

impl TextOutput {
    /// The next event. After [`TextEvent::Ended`] or [`TextEvent::Stalled`] the stream is over (`None`). Cancel-safe.
    pub async fn next(&mut self) -> Option<TextEvent> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            match self.output.next().await? {
                OutputEvent::Started { pid } => return Some(TextEvent::Started { pid }),
                OutputEvent::Bytes { stream, bytes, .. } => {
                    if let Some(decoder) = self.decoder(stream) {
                        let text = decoder.decode(&bytes);
                        self.give(stream, text);
                    }
                }
                OutputEvent::Lost { stream, from, to } => {
                    if let Some(decoder) = self.decoder(stream) {
                        let text = decoder.lose(to.saturating_sub(from));
                        self.give(stream, text);
                    }
                }
                OutputEvent::StdinAck { .. } => {}
                OutputEvent::Stalled => return Some(TextEvent::Stalled),
                OutputEvent::Ended(command) => {
                    for stream in [Stream::Stdout, Stream::Stderr] {
                        if let Some(decoder) = self.decoder(stream) {
                            let text = decoder.end();
                            self.give(stream, text);
                        }
                    }
                    self.ready.push_back(TextEvent::Ended(command));
                }
            }
        }
    }

    fn decoder(&mut self, stream: Stream) -> Option<&mut Decoder> {
        match stream {
            Stream::Stdin => None,
            Stream::Stdout => Some(&mut self.streams[0]),
            Stream::Stderr => Some(&mut self.streams[1]),
        }
    }

    fn give(&mut self, stream: Stream, text: Option<(u64, String)>) {
        if let Some((offset, text)) = text {
            self.ready.push_back(TextEvent::Text { stream, offset, text });
        }
    }
}

/// Bytes to text, for one stream.
struct Decoder {
    /// The first bytes of a character whose other bytes have not arrived.
    held: Vec<u8>,
    /// The length of the text so far.
    at: u64,
    /// The offset up to which the reader has the text already.
    from: u64,
}

impl Decoder {
    fn new(from: u64) -> Self {
        Self { held: Vec::new(), at: 0, from }
    }

    /// The text that these bytes complete, with its offset, without the part that the reader has already.
    fn decode(&mut self, bytes: &[u8]) -> Option<(u64, String)> {
        let joined;
        let mut rest = if self.held.is_empty() {
            bytes
        } else {
            self.held.extend_from_slice(bytes);
            joined = std::mem::take(&mut self.held);
            &joined
        };
        let mut text = String::with_capacity(rest.len());
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    break;
                }
                Err(error) => {
                    let (valid, behind) = rest.split_at(error.valid_up_to());
                    text.push_str(std::str::from_utf8(valid).expect("just looked at"));
                    let Some(length) = error.error_len() else {
                        self.held = behind.to_vec();
                        break;
                    };
                    text.push_str(REPLACEMENT);
                    rest = &behind[length..];
                }
            }
        }
        self.take(text)
    }

    /// The stream has ended.
    fn end(&mut self) -> Option<(u64, String)> {
        if std::mem::take(&mut self.held).is_empty() {
            return None;
        }
        self.take(REPLACEMENT.into())
    }

    /// This many bytes are no longer kept. Their text is unknown, so each counts as one byte.
    fn lose(&mut self, bytes: u64) -> Option<(u64, String)> {
        let text = self.end();
        self.at += bytes;
        text
    }

    fn take(&mut self, mut text: String) -> Option<(u64, String)> {
        let start = self.at;
        self.at += text.len() as u64;
        if self.at <= self.from || text.is_empty() {
            return None;
        }
        if start >= self.from {
            return Some((start, text));
        }
        let mut known = (self.from - start) as usize;
        // A reader that asks for the middle of a character gets the text from the next character on.
        while !text.is_char_boundary(known) {
            known += 1;
        }
        if known == text.len() {
            return None;
        }
        Some((start + known as u64, text.split_off(known)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Everything that a reader gets who already has the text up to `from`, if the bytes arrive in pieces of `piece`.
    fn read(bytes: &[u8], piece: usize, from: u64) -> (u64, String) {
        let mut decoder = Decoder::new(from);
        let mut at = None;
        let mut all = String::new();
        let mut got: Vec<_> = bytes.chunks(piece).map(|piece| decoder.decode(piece)).collect();
        got.push(decoder.end());
        for (offset, text) in got.into_iter().flatten() {
            assert!(!text.is_empty());
            assert_eq!(*at.get_or_insert(offset) + all.len() as u64, offset, "offsets are counted in text");
            all.push_str(&text);
        }
        (at.unwrap_or(from), all)
    }

    #[test]
    fn text_does_not_depend_on_how_bytes_were_cut() {
        let samples: [&[u8]; 8] = [
            b"plain",
            "aä€🐟z".as_bytes(),
            b"\xff\xfe\xfd",
            b"a\xe2\x82b\xf0\x9f\x90",
            b"\xf0\x9f\x90\x9f\xf0\x9f",
            b"\xe2\x82\xe2\x82\xac",
            b"\xed\xa0\x80\xc0\x80",
            b"",
        ];
        for bytes in samples {
            let whole = String::from_utf8_lossy(bytes).into_owned();
            for piece in 1..=bytes.len().max(1) {
                assert_eq!(read(bytes, piece, 0), (0, whole.clone()), "{bytes:?} by {piece}");
            }
        }
    }

    #[test]
    fn whoever_comes_back_gets_the_rest_and_nothing_twice() {
        let bytes = b"a\xffb\xe2\x82\xacc\xf0\x9f";
        let whole = String::from_utf8_lossy(bytes).into_owned();
        for (from, _) in whole.char_indices().chain([(whole.len(), ' ')]) {
            for piece in 1..=bytes.len() {
                let (at, rest) = read(bytes, piece, from as u64);
                assert_eq!((at, rest.as_str()), (from as u64, &whole[from..]));
            }
        }
        assert_eq!(read(bytes, 3, 2), (4, whole[4..].to_owned()), "the middle of a character");
        assert_eq!(read(bytes, 3, 1000), (1000, String::new()));
    }
}
