//! Frames: how messages and stream bytes share one duplex byte stream between daemon and init.
//!
//! ```text
//! frame   = length (u32, little endian, of what follows the kind) kind (u8) payload
//! kind 0  = the last or only piece of a message (postcard)
//! kind 1  = a piece of a message, more follow
//! kind 2  = stream bytes: handle (u32) stream (u8) offset (u64) bytes
//! ```
//!
//! A frame is at most [`PAYLOAD_MAX`] long, so that control messages never wait behind more than one chunk of data.
//! The reader trusts nothing: it checks every length before it stores anything, and its own limit bounds the size of
//! a message. This module does no I/O.

use std::marker::PhantomData;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::guest::{Handle, Stream};

/// The most stream bytes in one frame.
pub const CHUNK_MAX: usize = 64 * 1024;
/// Length and kind.
pub const HEADER_LENGTH: usize = 5;
/// Handle, stream and offset in front of stream bytes.
pub const DATA_PREFIX_LENGTH: usize = 4 + 1 + 8;
/// The longest payload after the kind.
pub const PAYLOAD_MAX: usize = CHUNK_MAX + DATA_PREFIX_LENGTH;
/// The largest message that the daemon accepts from init. Lists are sent as many messages, so this is enough.
pub const MESSAGE_FROM_INIT_MAX: usize = 1024 * 1024;
/// The largest message that init accepts from the daemon: a command line, its environment, its script.
pub const MESSAGE_TO_INIT_MAX: usize = 24 * 1024 * 1024;

const KIND_MESSAGE: u8 = 0;
const KIND_PIECE: u8 = 1;
const KIND_DATA: u8 = 2;

/// Why bytes are not a frame. The rest of the stream cannot be read after any of these.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// A length beyond [`PAYLOAD_MAX`].
    #[error("a frame must have at most {PAYLOAD_MAX} bytes, got {length}")]
    TooLong {
        /// What the header claimed.
        length: usize,
    },
    /// The pieces of one message add up to more than the reader allows.
    #[error("a message has more than {limit} bytes")]
    MessageTooLong {
        /// The reader's limit.
        limit: usize,
    },
    /// A kind that this version does not know.
    #[error("a frame has the unknown kind {0}")]
    UnknownKind(u8),
    /// A stream number that does not exist.
    #[error("a data frame names the unknown stream {0}")]
    UnknownStream(u8),
    /// A data frame too short to hold its prefix.
    #[error("a data frame of {length} bytes is too short")]
    TooShort {
        /// What the header claimed.
        length: usize,
    },
    /// An offset so large that the bytes would wrap around it.
    #[error("stream bytes at offset {offset} run past the end of all offsets")]
    OffsetOverflow {
        /// The offset in the frame.
        offset: u64,
    },
    /// The message does not parse.
    #[error("a message cannot be parsed")]
    Malformed,
}

/// One item of the stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Incoming<'a, M> {
    /// A whole message.
    Message(M),
    /// Bytes of a command's stream.
    Data {
        /// Which command.
        handle: Handle,
        /// Which stream.
        stream: Stream,
        /// Offset of the bytes in the stream.
        offset: u64,
        /// The bytes.
        bytes: &'a [u8],
    },
}

/// Reads frames from bytes that arrive in pieces of any size.
#[derive(Debug)]
pub struct Decoder<M> {
    buffer: Vec<u8>,
    /// `buffer[start..end]` holds bytes that are not decoded yet.
    start: usize,
    end: usize,
    message: Vec<u8>,
    message_max: usize,
    kind: PhantomData<fn() -> M>,
}

impl<M: DeserializeOwned> Decoder<M> {
    /// A decoder for messages of up to `message_max` bytes. It allocates nothing until bytes arrive.
    pub fn new(message_max: usize) -> Self {
        Self { buffer: Vec::new(), start: 0, end: 0, message: Vec::new(), message_max, kind: PhantomData }
    }

    /// Returns space to read into; pass the number of bytes read to [`Self::filled`]. Never empty.
    pub fn space(&mut self) -> &mut [u8] {
        // Two frames, so that a read seldom stops in the middle of one.
        const ROOM: usize = 2 * (HEADER_LENGTH + PAYLOAD_MAX);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        if self.buffer.is_empty() {
            self.buffer = vec![0; ROOM];
        }
        if self.end == self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.buffer[self.end..]
    }

    /// Records that `length` bytes were read into [`Self::space`].
    pub fn filled(&mut self, length: usize) {
        assert!(self.end + length <= self.buffer.len(), "more bytes were filled than there was space");
        self.end += length;
    }

    /// Feeds bytes that were read elsewhere, and passes each complete item to `take`.
    pub fn feed<E: From<FrameError>>(
        &mut self,
        mut bytes: &[u8],
        mut take: impl FnMut(Incoming<'_, M>) -> Result<(), E>,
    ) -> Result<(), E> {
        while !bytes.is_empty() {
            let space = self.space();
            let length = space.len().min(bytes.len());
            space[..length].copy_from_slice(&bytes[..length]);
            self.filled(length);
            bytes = &bytes[length..];
            while let Some(incoming) = self.next()? {
                take(incoming)?;
            }
        }
        Ok(())
    }

    /// The next complete item, or `None` if more bytes are needed. After an error the stream cannot be used.
    #[allow(clippy::should_implement_trait)] // The item borrows from the buffer, which an iterator cannot express.
    pub fn next(&mut self) -> Result<Option<Incoming<'_, M>>, FrameError> {
        loop {
            let Some((kind, from, to)) = self.whole_frame()? else { return Ok(None) };
            self.start = to;
            match kind {
                KIND_PIECE => self.gather(from, to)?,
                KIND_MESSAGE if self.message.is_empty() => {
                    self.check_message(to - from)?;
                    return parse(&self.buffer[from..to]).map(Some);
                }
                KIND_MESSAGE => {
                    self.gather(from, to)?;
                    let whole = std::mem::take(&mut self.message);
                    return parse(&whole).map(Some);
                }
                KIND_DATA => return data(&self.buffer[from..to]).map(Some),
                unknown => return Err(FrameError::UnknownKind(unknown)),
            }
        }
    }

    /// Frees the buffer if it is empty, so that an idle init holds no memory that it does not need.
    pub fn release_if_empty(&mut self) {
        if self.start == self.end {
            (self.buffer, self.start, self.end) = (Vec::new(), 0, 0);
        }
    }

    fn whole_frame(&self) -> Result<Option<(u8, usize, usize)>, FrameError> {
        let ready = &self.buffer[self.start..self.end];
        let Some((header, rest)) = ready.split_first_chunk::<HEADER_LENGTH>() else { return Ok(None) };
        let [a, b, c, d, kind] = *header;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        if length > PAYLOAD_MAX {
            return Err(FrameError::TooLong { length });
        }
        if rest.len() < length {
            return Ok(None);
        }
        let from = self.start + HEADER_LENGTH;
        Ok(Some((kind, from, from + length)))
    }

    fn check_message(&self, more: usize) -> Result<(), FrameError> {
        if self.message.len() + more > self.message_max {
            return Err(FrameError::MessageTooLong { limit: self.message_max });
        }
        Ok(())
    }

    fn gather(&mut self, from: usize, to: usize) -> Result<(), FrameError> {
        self.check_message(to - from)?;
        self.message.extend_from_slice(&self.buffer[from..to]);
        Ok(())
    }
}

fn parse<'a, M: DeserializeOwned>(bytes: &[u8]) -> Result<Incoming<'a, M>, FrameError> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(Incoming::Message(message)),
        Ok(_) | Err(_) => Err(FrameError::Malformed),
    }
}

fn data<M>(payload: &[u8]) -> Result<Incoming<'_, M>, FrameError> {
    let Some((prefix, bytes)) = payload.split_first_chunk::<DATA_PREFIX_LENGTH>() else {
        return Err(FrameError::TooShort { length: payload.len() });
    };
    let (handle, rest) = prefix.split_at(4);
    let (stream, offset) = rest.split_at(1);
    let handle = Handle(u32::from_le_bytes(handle.try_into().expect("four bytes")));
    let offset = u64::from_le_bytes(offset.try_into().expect("eight bytes"));
    let stream = Stream::from_number(stream[0]).ok_or(FrameError::UnknownStream(stream[0]))?;
    if offset.checked_add(bytes.len() as u64).is_none() {
        return Err(FrameError::OffsetOverflow { offset });
    }
    Ok(Incoming::Data { handle, stream, offset, bytes })
}

/// Appends `message` to `to`, in as many pieces as needed.
pub fn put_message<M: Serialize>(message: &M, to: &mut Vec<u8>) {
    let whole = postcard::to_allocvec(message).expect("messages are made of types that postcard can write");
    let mut rest = whole.as_slice();
    loop {
        let (piece, later) = rest.split_at(rest.len().min(PAYLOAD_MAX));
        let kind = if later.is_empty() { KIND_MESSAGE } else { KIND_PIECE };
        to.extend_from_slice(&(piece.len() as u32).to_le_bytes());
        to.push(kind);
        to.extend_from_slice(piece);
        if later.is_empty() {
            return;
        }
        rest = later;
    }
}

/// The header for `length` stream bytes, at most [`CHUNK_MAX`].
pub fn data_header(
    handle: Handle,
    stream: Stream,
    offset: u64,
    length: usize,
) -> [u8; HEADER_LENGTH + DATA_PREFIX_LENGTH] {
    assert!(length <= CHUNK_MAX, "stream bytes are cut into chunks before they are framed");
    let mut header = [0; HEADER_LENGTH + DATA_PREFIX_LENGTH];
    header[..4].copy_from_slice(&((length + DATA_PREFIX_LENGTH) as u32).to_le_bytes());
    header[4] = KIND_DATA;
    header[5..9].copy_from_slice(&handle.0.to_le_bytes());
    header[9] = stream.number();
    header[10..18].copy_from_slice(&offset.to_le_bytes());
    header
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::guest::ToInit;

    /// A decoded item with its bytes copied, so that it outlives the decoder's buffer.
    #[derive(Debug, Clone, PartialEq)]
    enum Out {
        Message(ToInit),
        Data(Handle, Stream, u64, Vec<u8>),
    }

    fn decode(bytes: &[u8], piece: usize, message_max: usize) -> Result<Vec<Out>, FrameError> {
        let mut decoder = Decoder::new(message_max);
        let mut out = Vec::new();
        for piece in bytes.chunks(piece.max(1)) {
            decoder.feed(piece, |incoming| {
                out.push(match incoming {
                    Incoming::Message(message) => Out::Message(message),
                    Incoming::Data { handle, stream, offset, bytes } => {
                        Out::Data(handle, stream, offset, bytes.to_vec())
                    }
                });
                Ok::<(), FrameError>(())
            })?;
        }
        Ok(out)
    }

    fn encode(out: &Out, to: &mut Vec<u8>) {
        match out {
            Out::Message(message) => put_message(message, to),
            Out::Data(handle, stream, offset, bytes) => {
                to.extend_from_slice(&data_header(*handle, *stream, *offset, bytes.len()));
                to.extend_from_slice(bytes);
            }
        }
    }

    fn any_out() -> impl Strategy<Value = Out> {
        let stream = prop_oneof![Just(Stream::Stdin), Just(Stream::Stdout), Just(Stream::Stderr)];
        let bytes = proptest::collection::vec(any::<u8>(), 0..3000);
        prop_oneof![
            (any::<u32>(), any::<u64>()).prop_map(|(h, at)| Out::Message(ToInit::Ack {
                handle: Handle(h),
                stream: Stream::Stdout,
                offset: at
            })),
            any::<u64>().prop_map(|serial| Out::Message(ToInit::Ping { serial })),
            (any::<u32>(), stream, 0..u64::MAX / 2, bytes).prop_map(|(h, s, at, bytes)| Out::Data(
                Handle(h),
                s,
                at,
                bytes
            )),
        ]
    }

    proptest! {
        #[test]
        fn whatever_was_sent_is_read_back_in_pieces_of_any_size(
            sent in proptest::collection::vec(any_out(), 0..20), piece in 1usize..5000,
        ) {
            let mut bytes = Vec::new();
            sent.iter().for_each(|out| encode(out, &mut bytes));
            prop_assert_eq!(decode(&bytes, piece, 4096).expect("what we sent parses"), sent);
        }

        #[test]
        fn rubbish_is_refused_without_a_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..4000), piece in 1usize..100,
        ) {
            let _ = decode(&bytes, piece, 1000);
        }
    }

    #[test]
    fn a_long_message_travels_in_pieces() {
        let message = ToInit::Signal { handle: Handle(1), signal: 15 };
        let script = "x".repeat(300_000);
        let start = ToInit::Start(Box::new(crate::guest::Start::shell(Handle(2), "c", &script)));
        let mut bytes = Vec::new();
        put_message(&start, &mut bytes);
        put_message(&message, &mut bytes);
        let out = decode(&bytes, 10_000, MESSAGE_TO_INIT_MAX).expect("it parses");
        assert_eq!(out, [Out::Message(start), Out::Message(message)]);
    }

    #[test]
    fn a_message_beyond_the_readers_limit_is_refused() {
        let mut bytes = Vec::new();
        let script = "x".repeat(300_000);
        put_message(
            &ToInit::Start(Box::new(crate::guest::Start::shell(Handle(2), "c", &script))),
            &mut bytes,
        );
        assert_eq!(decode(&bytes, 10_000, 200_000), Err(FrameError::MessageTooLong { limit: 200_000 }));
    }

    #[test]
    fn a_frame_that_claims_to_be_huge_is_refused_before_it_is_read() {
        assert_eq!(
            decode(&[0xff, 0xff, 0xff, 0x7f, 2], 5, 100),
            Err(FrameError::TooLong { length: 0x7fff_ffff })
        );
    }

    #[test]
    fn bytes_that_would_wrap_around_the_offset_are_refused() {
        let mut bytes = data_header(Handle(1), Stream::Stdout, u64::MAX, 1).to_vec();
        bytes.push(b'x');
        assert_eq!(decode(&bytes, 100, 100), Err(FrameError::OffsetOverflow { offset: u64::MAX }));
    }
}
