//! The connection to the daemon: reads and writes without ever blocking.
//!
//! Owns the socket, the decoder and the partly written frame. `main` interprets messages. A connection that violates
//! the protocol is dropped without loss: all state that matters is in `table`.

use std::io::IoSlice;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use wire::frame::{CHUNK_MAX, Decoder, FrameError, MESSAGE_TO_INIT_MAX, data_header};
use wire::guest::{Handle, Stream, ToInit};

use crate::streams::StdinFault;
use crate::table::{Chunk, Table};
use crate::watch::{Watch, Watched};

/// Writes in one turn, so that a daemon that reads as fast as init writes does not keep the loop from everything
/// else.
const WRITES_PER_TURN: usize = 4;
/// Size of the socket's send buffer: a few chunks, so that a flood does not stop after each; no more, since answers
/// wait behind it.
const SOCKET_SIZE: usize = 4 * CHUNK_MAX;
/// While this many bytes wait to be sent, init does not read: every answer is caused by a request.
const OUTBOX_MAX: usize = 256 * 1024;

/// Why a connection was dropped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("the daemon closed the connection")]
    Closed,
    #[error("cannot use the connection: {0}")]
    Socket(Errno),
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("a message came before the hello")]
    BeforeHello,
    #[error("a second hello came")]
    SecondHello,
    #[error("the daemon and init have no version in common")]
    NoCommonVersion,
    #[error("a message is not part of the negotiated version")]
    NotAgreedOn,
    #[error("the daemon sent bytes of command {} for {stream:?}, which it must not write", handle.0)]
    WrongStream { handle: Handle, stream: Stream },
    #[error("the daemon acknowledged {offset} bytes of command {}, but only {sent} were sent", handle.0)]
    AckBeyondSent { handle: Handle, offset: u64, sent: u64 },
    #[error("the result of command {} was acknowledged before there was one", handle.0)]
    NoResultYet { handle: Handle },
    #[error("signal {0} does not exist")]
    BadSignal(i32),
    #[error(transparent)]
    Stdin(#[from] StdinFault),
}

/// A chunk of which this much is written, header included.
#[derive(Debug)]
struct Partial {
    chunk: Chunk,
    written: usize,
}

/// One connection.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    decoder: Decoder<ToInit>,
    /// The hello was answered.
    pub greeted: bool,
    /// The negotiated version, once known.
    pub version: u32,
    /// Nothing more is sent after what is in the outbox.
    pub parting: bool,
    readable: bool,
    writable: bool,
    /// The kernel shall report when there is room.
    watched_for_room: bool,
    partial: Option<Partial>,
    /// The rest of a partly written frame whose command was forgotten.
    orphaned: Vec<u8>,
}

impl Connection {
    pub fn new(socket: OwnedFd) -> Self {
        // The kernel may allow less.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, SOCKET_SIZE);
        Self {
            socket,
            decoder: Decoder::new(MESSAGE_TO_INIT_MAX),
            greeted: false,
            version: 0,
            parting: false,
            readable: true,
            writable: true,
            watched_for_room: false,
            partial: None,
            orphaned: Vec::new(),
        }
    }

    pub fn mark(&mut self, readable: bool, writable: bool) {
        self.readable |= readable;
        self.writable |= writable;
    }

    /// Whether a read is allowed and would return something.
    pub fn wants_read(&self, table: &Table) -> bool {
        self.readable && !self.parting && table.outbox.len() < OUTBOX_MAX
    }

    /// Reads once, into the decoder that is lent out; the caller must return it through [`Self::put_back`].
    pub fn read(&mut self) -> Result<Decoder<ToInit>, Fault> {
        match rustix::io::read(&self.socket, self.decoder.space()) {
            Ok(0) => return Err(Fault::Closed),
            Ok(length) => self.decoder.filled(length),
            Err(Errno::AGAIN) => self.readable = false,
            Err(Errno::INTR) => {}
            Err(error) => return Err(Fault::Socket(error)),
        }
        Ok(std::mem::replace(&mut self.decoder, Decoder::new(MESSAGE_TO_INIT_MAX)))
    }

    /// Takes the decoder back.
    pub fn put_back(&mut self, decoder: Decoder<ToInit>) {
        self.decoder = decoder;
    }

    /// Whether a write is allowed and would send something.
    pub fn wants_write(&self, table: &Table) -> bool {
        let waiting = !table.outbox.is_empty() || self.partial.is_some() || !self.orphaned.is_empty();
        self.writable && (waiting || table.has_sending())
    }

    /// Writes what is waiting, messages before chunks, until the socket is full or the turn is over.
    pub fn flush(&mut self, table: &mut Table) -> Result<(), Fault> {
        for _ in 0..WRITES_PER_TURN {
            if !self.wants_write(table) {
                break;
            }
            self.write_once(table)?;
        }
        if self.parting && table.outbox.is_empty() { Err(Fault::NoCommonVersion) } else { Ok(()) }
    }

    /// Asks the kernel to report room only while there is none: otherwise every read of the daemon would wake init.
    pub fn watch_for_room(&mut self, watch: &Watch) -> Result<(), Errno> {
        let wanted = !self.writable;
        if std::mem::replace(&mut self.watched_for_room, wanted) == wanted {
            return Ok(());
        }
        let watched = if wanted { Watched::FullConnection } else { Watched::Connection };
        watch.again(&self.socket, watched)
    }

    /// The command's bytes are about to be freed: copies those that are partly written.
    pub fn let_go_of(&mut self, handle: Handle, table: &Table) {
        let Some(partial) = self.partial.take_if(|partial| partial.chunk.handle == handle) else { return };
        if partial.written == 0 {
            return;
        }
        let header = header_of(&partial.chunk);
        let [first, second] = table.chunk_bytes(&partial.chunk);
        let whole = [&header[..], first, second].concat();
        self.orphaned = whole[partial.written..].to_vec();
    }

    /// Frees memory that is held only for speed.
    pub fn release_memory(&mut self) {
        self.decoder.release_if_empty();
        self.orphaned.shrink_to_fit();
    }

    /// One write: the rest of a frame, then all messages, then a new chunk.
    fn write_once(&mut self, table: &mut Table) -> Result<(), Fault> {
        let begun = self.partial.as_ref().is_some_and(|partial| partial.written > 0);
        if self.partial.is_none() && self.greeted && self.orphaned.is_empty() {
            self.partial = table.next_chunk().map(|chunk| Partial { chunk, written: 0 });
        }
        let header = self.partial.as_ref().map(|partial| header_of(&partial.chunk));
        let mut frame = [&[][..]; 3];
        if let (Some(partial), Some(header)) = (&self.partial, &header) {
            let [first, second] = table.chunk_bytes(&partial.chunk);
            frame = skip([header, first, second], partial.written);
        }
        let frame_length: usize = frame.iter().map(|piece| piece.len()).sum();
        // A frame that was begun must be finished first; otherwise messages go before it.
        let order: [&[u8]; 5] = if begun {
            [&self.orphaned, frame[0], frame[1], frame[2], &table.outbox]
        } else {
            [&self.orphaned, &table.outbox, frame[0], frame[1], frame[2]]
        };
        let written = match rustix::io::writev(&self.socket, &order.map(IoSlice::new)) {
            Ok(written) => written,
            Err(Errno::AGAIN) => {
                self.writable = false;
                0
            }
            Err(Errno::INTR) => 0,
            Err(error) => return Err(Fault::Socket(error)),
        };
        let (orphaned, outbox) = (self.orphaned.len(), table.outbox.len());
        let lengths = if begun { [orphaned, frame_length, outbox] } else { [orphaned, outbox, frame_length] };
        let [of_orphaned, second, third] = share_out(written, lengths);
        let (of_frame, of_outbox) = if begun { (second, third) } else { (third, second) };
        self.orphaned.drain(..of_orphaned);
        table.outbox.drain(..of_outbox);
        if let Some(partial) = &mut self.partial {
            partial.written += of_frame;
            if of_frame == frame_length {
                let chunk = partial.chunk;
                self.partial = None;
                table.chunk_sent(&chunk);
            }
        }
        Ok(())
    }
}

fn header_of(chunk: &Chunk) -> [u8; wire::frame::HEADER_LENGTH + wire::frame::DATA_PREFIX_LENGTH] {
    data_header(chunk.handle, chunk.stream, chunk.offset, chunk.length)
}

/// The pieces without their first `count` bytes.
fn skip(pieces: [&[u8]; 3], mut count: usize) -> [&[u8]; 3] {
    pieces.map(|piece| {
        let skipped = count.min(piece.len());
        count -= skipped;
        &piece[skipped..]
    })
}

/// How much of each part the first `count` bytes cover.
fn share_out(mut count: usize, lengths: [usize; 3]) -> [usize; 3] {
    lengths.map(|length| {
        let share = count.min(length);
        count -= share;
        share
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_shared_out_in_order() {
        assert_eq!(share_out(0, [1, 2, 3]), [0, 0, 0]);
        assert_eq!(share_out(2, [1, 2, 3]), [1, 1, 0]);
        assert_eq!(share_out(6, [1, 2, 3]), [1, 2, 3]);
        assert_eq!(skip([b"ab", b"cd", b"ef"], 3), [&b""[..], b"d", b"ef"]);
    }
}
