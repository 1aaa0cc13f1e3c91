//! Bytes on their way to a lane's stdin.
//!
//! Bytes stay here until init reports that the process has them, so that they can be sent again on a new connection;
//! init skips bytes that it has. The window bounds how far a caller may write ahead of the process.

use std::collections::VecDeque;

use bytes::{Buf, Bytes, BytesMut};
use wire::frame::{self, CHUNK_MAX};
use wire::guest::{Handle, STDIN_WINDOW, Stream, ToInit};

use super::Violation;

/// More than can ever be written. Offsets from init are used in sums, which must not overflow.
const LENGTH_MAX: u64 = 1 << 60;
/// Pieces smaller than this are joined. A piece may keep alive a much larger buffer that it was read into, and bytes
/// that arrive one by one should not cost a piece each.
const JOIN_MAX: usize = 512;

/// See the module comment.
#[derive(Default)]
pub(crate) struct Stdin {
    /// Bytes that were accepted and not given to the process, from `base` to `accepted`.
    chunks: VecDeque<Bytes>,
    base: u64,
    accepted: u64,
    /// How much the process was given, as init reports.
    given: u64,
    /// Sent to init on this connection.
    sent: u64,
    /// The end offset, once a caller has set it.
    end: Option<u64>,
    /// Whether init was sent the end.
    end_sent: bool,
    /// Whether the process no longer reads its stdin.
    closed: bool,
    /// After a restart of the daemon, it is unknown how much init has until init reports it.
    unknown: bool,
}

impl Stdin {
    /// For a process that was not started yet.
    pub fn new(open: bool) -> Self {
        Self { closed: !open, ..Self::default() }
    }

    /// For a process that an earlier daemon started.
    pub fn recovered(open: bool) -> Self {
        Self { closed: !open, unknown: true, ..Self::default() }
    }

    /// How many bytes callers have written.
    pub fn accepted(&self) -> u64 {
        self.accepted
    }

    /// How many bytes the process was given. `None` while that is unknown.
    pub fn given(&self) -> Option<u64> {
        (!self.unknown).then_some(self.given)
    }

    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Whether callers may write no more: the process does not read, or a caller has ended stdin.
    pub fn is_ended(&self) -> bool {
        self.closed || self.end.is_some()
    }

    /// Whether init knows the end, or need not.
    pub fn is_end_known(&self) -> bool {
        self.closed || self.end_sent
    }

    /// Whether more can be accepted only after init reports how much it has.
    pub fn is_unknown(&self) -> bool {
        self.unknown
    }

    /// How many more bytes may be written.
    pub fn room(&self) -> usize {
        usize::try_from(self.window().saturating_sub(self.accepted)).unwrap_or(usize::MAX)
    }

    fn window(&self) -> u64 {
        self.given + STDIN_WINDOW as u64
    }

    /// Takes bytes from a caller, which has checked [`Self::room`].
    pub fn push(&mut self, bytes: Bytes) {
        self.accepted += bytes.len() as u64;
        if bytes.len() > JOIN_MAX {
            self.chunks.push_back(bytes);
            return;
        }
        match self.chunks.back_mut() {
            Some(last) if last.len() + bytes.len() <= JOIN_MAX => {
                let mut joined = BytesMut::with_capacity(last.len() + bytes.len());
                joined.extend_from_slice(last);
                joined.extend_from_slice(&bytes);
                *last = joined.freeze();
            }
            Some(_) | None => self.chunks.push_back(Bytes::copy_from_slice(&bytes)),
        }
    }

    /// Ends stdin after the accepted bytes.
    pub fn end(&mut self) {
        self.end.get_or_insert(self.accepted);
    }

    /// The process does not read its stdin.
    pub fn close(&mut self) {
        self.closed = true;
        self.chunks.clear();
    }

    /// Whether there is something to send.
    pub(super) fn is_due(&self) -> bool {
        let bytes = self.sent < self.accepted.min(self.window());
        !self.unknown && !self.closed && (bytes || self.is_end_due())
    }

    fn is_end_due(&self) -> bool {
        self.end.is_some_and(|end| end == self.sent && !self.end_sent)
    }

    /// Appends up to a chunk of unsent bytes, and the end if it follows. Returns how many bytes, and whether the end.
    pub(super) fn put(&mut self, handle: Handle, out: &mut Vec<u8>) -> (usize, bool) {
        if self.unknown || self.closed {
            return (0, false);
        }
        let until = self.accepted.min(self.window()).min(self.sent + CHUNK_MAX as u64);
        let length = until.saturating_sub(self.sent) as usize;
        if length > 0 {
            out.extend_from_slice(&frame::data_header(handle, Stream::Stdin, self.sent, length));
            self.put_bytes(length, out);
            self.sent += length as u64;
        }
        let end = self.is_end_due();
        if end {
            self.end_sent = true;
            frame::put_message(&ToInit::StdinEnd { handle, offset: self.sent }, out);
        }
        (length, end)
    }

    fn put_bytes(&self, length: usize, out: &mut Vec<u8>) {
        let (mut skip, mut left) = ((self.sent - self.base) as usize, length);
        for chunk in &self.chunks {
            if skip >= chunk.len() {
                skip -= chunk.len();
                continue;
            }
            let piece = &chunk[skip..chunk.len().min(skip + left)];
            out.extend_from_slice(piece);
            (skip, left) = (0, left - piece.len());
            if left == 0 {
                break;
            }
        }
    }

    /// Init reports that the process was given everything up to `offset`.
    pub(super) fn give_until(&mut self, handle: Handle, offset: u64) -> Result<(), Violation> {
        if offset < self.given || offset > self.sent {
            return Err(Violation::BadStdinAck { handle, offset, sent: self.sent });
        }
        self.given = offset;
        while let Some(first) = self.chunks.front_mut()
            && self.base < offset
        {
            let length = (offset - self.base).min(first.len() as u64);
            first.advance(length as usize);
            self.base += length;
            if first.is_empty() {
                self.chunks.pop_front();
            }
        }
        Ok(())
    }

    /// A new connection: init has taken everything up to `taken`.
    pub(super) fn resume(&mut self, handle: Handle, taken: u64) -> Result<(), Violation> {
        let bad = Violation::BadStdinAck { handle, offset: taken, sent: self.sent };
        if taken > LENGTH_MAX {
            return Err(bad);
        }
        if self.unknown {
            // The process was given all but at most a window of what init holds. Init reports the exact number in a
            // moment.
            self.given = taken.saturating_sub(STDIN_WINDOW as u64);
            (self.base, self.accepted, self.sent, self.unknown) = (taken, taken, taken, false);
        } else if self.closed {
            self.sent = self.sent.max(taken); // Nothing more is sent, so the two need not be in step.
        } else if taken < self.base || taken > self.accepted {
            return Err(bad);
        } else {
            (self.sent, self.end_sent) = (taken, false);
        }
        Ok(())
    }

    /// A new connection: init does not know the process.
    pub(super) fn restart(&mut self) {
        (self.sent, self.end_sent, self.unknown) = (self.base, false, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HANDLE: Handle = Handle(1);

    fn sent(stdin: &mut Stdin) -> Vec<u8> {
        let mut out = Vec::new();
        let (length, _) = stdin.put(HANDLE, &mut out);
        // A data frame ends with its bytes; the message of the end follows, which this test does not check.
        let header = frame::data_header(HANDLE, Stream::Stdin, 0, length).len();
        out[header.min(out.len())..(header + length).min(out.len())].to_vec()
    }

    #[test]
    fn small_pieces_are_joined_and_sent_in_order() {
        let mut stdin = Stdin::new(true);
        for byte in 0..=255u8 {
            stdin.push(Bytes::copy_from_slice(&[byte]));
        }
        stdin.push(Bytes::from(vec![7; 1000]));
        assert_eq!(stdin.chunks.len(), 2);
        let mut expected: Vec<u8> = (0..=255).collect();
        expected.extend([7; 1000]);
        assert_eq!(sent(&mut stdin), expected);
        assert!(!stdin.is_due());
    }

    #[test]
    fn what_init_has_not_taken_is_sent_again_on_a_new_connection() {
        let mut stdin = Stdin::new(true);
        stdin.push(Bytes::from_static(b"one two three"));
        assert_eq!(sent(&mut stdin), b"one two three");
        stdin.give_until(HANDLE, 4).expect("it was sent");
        stdin.resume(HANDLE, 8).expect("it lies between what was given and what was accepted");
        assert_eq!(sent(&mut stdin), b"three");
        stdin.resume(HANDLE, 3).expect_err("the process has more than that");
        stdin.resume(HANDLE, 14).expect_err("nobody has handed over that much");
    }

    #[test]
    fn the_window_bounds_what_is_accepted_after_a_restart_of_the_daemon() {
        let mut stdin = Stdin::recovered(true);
        assert!(stdin.is_unknown() && !stdin.is_due());
        let taken = 3 * STDIN_WINDOW as u64;
        stdin.resume(HANDLE, taken).expect("it is the first word");
        assert_eq!((stdin.accepted(), stdin.room()), (taken, 0));
        stdin.give_until(HANDLE, taken).expect("it was taken");
        assert_eq!(stdin.room(), STDIN_WINDOW);
        stdin.resume(HANDLE, u64::MAX).expect_err("nobody can have written that much");
    }

    #[test]
    fn the_end_follows_the_last_byte_once_per_connection() {
        let mut stdin = Stdin::new(true);
        stdin.push(Bytes::from_static(b"x"));
        stdin.end();
        assert_eq!(stdin.put(HANDLE, &mut Vec::new()), (1, true));
        assert_eq!(stdin.put(HANDLE, &mut Vec::new()), (0, false));
        stdin.resume(HANDLE, 1).expect("it was sent");
        assert_eq!(stdin.put(HANDLE, &mut Vec::new()), (0, true));
    }
}
