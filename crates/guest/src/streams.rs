//! The three streams of one command, and the memory they may hold.
//!
//! Owns windows, offsets and the reading and writing of pipes and terminals. `table` and `connection` decide which
//! stream gets a turn and what is sent.
//!
//! Descriptors are watched for edges (EPOLLET): a stream remembers that it is readable until a read says otherwise.
//! So a stream whose window is full costs no system call, and needs none to continue. A pipe reports once, and again
//! after it was read until it was empty: writes into a pipe that need not be read yet wake nothing.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use rustix::io::Errno;
use rustix::termios::{LocalModes, SpecialCodeIndex};
use wire::frame::CHUNK_MAX;
use wire::guest::{OUTPUT_WINDOW, STDIN_WINDOW};

use crate::sys;

/// Chunks kept for reuse while streams are busy, for all commands together.
const POOL_CHUNKS_MAX: usize = 32;
/// Large pieces before a pipe is enlarged. A pipe costs kernel memory, so only busy ones are.
const LARGE_BEFORE_GROWING: u8 = 8;
/// What a large piece is: a quarter of what a pipe holds at first.
const LARGE_MIN: usize = 16 * 1024;
/// Size of an enlarged pipe: the most that the kernel gives without privilege.
const BUSY_PIPE_SIZE: usize = 1024 * 1024;
/// How much a terminal can hold between a write to it and init's read, with a margin: the kernel's own buffers end at
/// 64 KiB and a line.
const TERMINAL_HELD_MAX: usize = 128 * 1024;

/// Buffers of one chunk each, reused by all streams.
#[derive(Debug, Default)]
pub struct Pool {
    free: Vec<Vec<u8>>,
}

impl Pool {
    fn take(&mut self) -> Vec<u8> {
        self.free.pop().unwrap_or_else(|| Vec::with_capacity(CHUNK_MAX))
    }

    fn give(&mut self, mut chunk: Vec<u8>) {
        if self.free.len() < POOL_CHUNKS_MAX {
            chunk.clear();
            self.free.push(chunk);
        }
    }

    /// Frees everything.
    pub fn release(&mut self) {
        self.free = Vec::new();
    }
}

/// The part of a stream that the daemon has not acknowledged: the bytes from `acked` to `end`.
#[derive(Debug, Default)]
pub struct Window {
    /// All but the last are filled to their capacity of [`CHUNK_MAX`].
    chunks: VecDeque<Vec<u8>>,
    /// How much of the first chunk is acknowledged.
    skip: usize,
    acked: u64,
    end: u64,
}

impl Window {
    /// The first offset that is held.
    pub fn acked(&self) -> u64 {
        self.acked
    }

    /// The offset after the last byte held.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// How many more bytes fit.
    pub fn room(&self) -> usize {
        OUTPUT_WINDOW - (self.end - self.acked) as usize
    }

    /// Lets `read` append at most `limit` bytes, and no more than there is room for.
    pub fn fill(
        &mut self,
        pool: &mut Pool,
        limit: usize,
        read: impl FnOnce(&mut Vec<u8>, usize) -> Result<usize, Errno>,
    ) -> Result<usize, Errno> {
        let limit = limit.min(self.room());
        if self.chunks.back().is_none_or(|last| last.len() == last.capacity()) {
            self.chunks.push_back(pool.take());
        }
        let last = self.chunks.back_mut().expect("there is a chunk, or one was just added");
        let limit = limit.min(last.capacity() - last.len());
        let result = read(last, limit);
        if let Ok(length) = result {
            self.end += length as u64;
        }
        if last.is_empty()
            && let Some(unused) = self.chunks.pop_back()
        {
            pool.give(unused);
        }
        result
    }

    /// Frees the bytes before `offset`, which is at most `end`.
    pub fn release_to(&mut self, offset: u64, pool: &mut Pool) {
        assert!(offset <= self.end, "an acknowledgement must not exceed what was received");
        if offset <= self.acked {
            return;
        }
        self.skip += (offset - self.acked) as usize;
        self.acked = offset;
        while let Some(first) = self.chunks.front()
            && (self.skip >= first.len())
        {
            // A partly filled last chunk is freed only if all of it is acknowledged, which it is here.
            self.skip -= first.len();
            let freed = self.chunks.pop_front().expect("it was just looked at");
            pool.give(freed);
        }
    }

    /// The bytes from `offset` on, at most `limit`, in at most two pieces. `offset` lies between `acked` and `end`.
    pub fn slices(&self, offset: u64, limit: usize) -> [&[u8]; 2] {
        assert!(offset >= self.acked && offset <= self.end, "only bytes in the window can be sent");
        let mut position = self.skip + (offset - self.acked) as usize;
        let mut pieces = [&[][..]; 2];
        let (mut filled, mut left) = (0, limit);
        for chunk in &self.chunks {
            if position >= chunk.len() {
                position -= chunk.len();
                continue;
            }
            let piece = &chunk[position..chunk.len().min(position + left)];
            pieces[filled] = piece;
            (filled, left, position) = (filled + 1, left - piece.len(), 0);
            if filled == pieces.len() || left == 0 {
                break;
            }
        }
        pieces
    }
}

/// The source of an output stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    Pipe,
    Terminal,
}

/// How much more of the output belongs to the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tail {
    /// Everything: the main process is alive.
    Open,
    /// The main process is gone and left this much in the pipe.
    Exactly(usize),
    /// The main process is gone; a terminal cannot report how much it holds, so init reads until it is empty, or
    /// until it has read this much.
    UntilDry(usize),
    /// Nothing. What leftover processes still write is discarded, so that they neither block nor die of it.
    Over,
}

/// Result of a turn of reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turn {
    /// Bytes added to the window.
    pub gained: usize,
    /// Another turn would have something to do at once.
    pub again: bool,
    /// It is a pipe and empty: the kernel shall report when it is not.
    pub dry: bool,
}

impl Turn {
    const NOTHING: Self = Self { gained: 0, again: false, dry: false };
}

/// Stdout or stderr of a command.
#[derive(Debug)]
pub struct Output {
    from: Option<Rc<OwnedFd>>,
    source: Source,
    pub window: Window,
    /// How far the stream was sent on the current connection, in whole frames.
    pub sent: u64,
    /// It waits in the queue of streams to read.
    pub waits_to_read: bool,
    /// It waits in the queue of streams to send.
    pub waits_to_send: bool,
    readable: bool,
    hung_up: bool,
    tail: Tail,
    growth: Growth,
}

/// Decides when a pipe is enlarged.
#[derive(Debug, Default)]
struct Growth {
    large: u8,
}

impl Growth {
    /// Records that this much was read at once.
    fn moved(&mut self, length: usize, pipe: &OwnedFd) {
        if length < LARGE_MIN {
            return;
        }
        self.large = self.large.saturating_add(1);
        if self.large == LARGE_BEFORE_GROWING {
            // The kernel may refuse when the guest's users have used up their share; then the pipe keeps its size. A
            // terminal has none.
            let _ = rustix::pipe::fcntl_setpipe_size(pipe, BUSY_PIPE_SIZE);
        }
    }
}

impl Output {
    /// A stream that is read from `from`; without it, an empty one.
    pub fn new(from: Option<Rc<OwnedFd>>, source: Source) -> Self {
        Self {
            from,
            source,
            window: Window::default(),
            sent: 0,
            waits_to_read: false,
            waits_to_send: false,
            readable: false,
            hung_up: false,
            tail: Tail::Open,
            growth: Growth::default(),
        }
    }

    /// Its source, while it is open.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.from.as_ref().map(|from| from.as_fd())
    }

    /// There is something to read, or all writers are gone.
    pub fn mark_readable(&mut self, hung_up: bool) {
        self.readable = true;
        self.hung_up |= hung_up;
    }

    /// Whether a turn of reading would do anything.
    pub fn wants_turn(&self) -> bool {
        self.from.is_some() && self.readable && !self.is_held_up()
    }

    /// Whether output waits because the daemon has not acknowledged what came before it.
    pub fn is_held_up(&self) -> bool {
        self.tail != Tail::Over && self.window.room() == 0
    }

    /// The main process has exited: determines how much of this stream belongs to the command.
    pub fn main_exited(&mut self) {
        let Some(from) = &self.from else {
            self.tail = Tail::Over;
            return;
        };
        self.tail = match self.source {
            Source::Terminal => Tail::UntilDry(TERMINAL_HELD_MAX),
            // Writers that are still alive may add to the pipe from now on, but only behind these bytes.
            Source::Pipe => match rustix::io::ioctl_fionread(from) {
                Ok(0) | Err(_) => Tail::Over,
                Ok(held) => Tail::Exactly(held as usize),
            },
        };
        self.readable = true;
    }

    /// Whether everything that belongs to the command is in the window.
    pub fn is_over(&self) -> bool {
        self.tail == Tail::Over
    }

    /// Whether there is nothing left to read or to discard.
    pub fn is_closed(&self) -> bool {
        self.from.is_none()
    }

    /// Stops reading. Processes that still write get an error from the kernel.
    pub fn close(&mut self) {
        self.from = None;
    }

    /// Reads at most one chunk.
    pub fn turn(&mut self, pool: &mut Pool) -> Turn {
        let Some(from) = self.from.clone() else { return Turn::NOTHING };
        let limit = match self.tail {
            Tail::Open => CHUNK_MAX,
            Tail::Exactly(held) => held.min(CHUNK_MAX),
            Tail::UntilDry(budget) => budget.min(CHUNK_MAX),
            Tail::Over => return self.drain(pool),
        };
        let mut asked = 0;
        let result = self.window.fill(pool, limit, |bytes, limit| {
            asked = limit;
            sys::read_onto(from.as_fd(), bytes, limit)
        });
        let gained = match result {
            Ok(0) => self.dried_up(true),
            Ok(length) => self.took(length, asked),
            Err(Errno::INTR) => 0,
            // A terminal returns EIO while no process has it open; the main process may open it again.
            Err(Errno::AGAIN) => self.dried_up(false),
            Err(_) => self.dried_up(self.source == Source::Pipe),
        };
        self.after(gained)
    }

    fn after(&self, gained: usize) -> Turn {
        let dry = self.source == Source::Pipe && self.from.is_some() && !self.readable;
        Turn { gained, again: self.wants_turn(), dry }
    }

    fn took(&mut self, length: usize, asked: usize) -> usize {
        match &mut self.tail {
            Tail::Exactly(left) | Tail::UntilDry(left) => {
                *left -= length;
                if *left == 0 {
                    self.tail = Tail::Over;
                }
            }
            Tail::Open if self.source == Source::Pipe && length < asked && !self.hung_up => {
                // A pipe that returns less than requested is empty, and the next write is an edge. epoll(7)
                self.readable = false;
            }
            Tail::Open | Tail::Over => {}
        }
        if let Some(from) = &self.from {
            self.growth.moved(length, from);
        }
        length
    }

    /// The read found nothing. `ended` says that nothing more will come.
    fn dried_up(&mut self, ended: bool) -> usize {
        self.readable = false;
        if self.tail != Tail::Open {
            // Another process may have read from the pipe what it held at the exit; then the stream ends here.
            self.tail = Tail::Over;
            // One more turn finds out whether any writer is left.
            self.readable = true;
        }
        if ended {
            self.from = None;
        }
        0
    }

    fn drain(&mut self, pool: &mut Pool) -> Turn {
        let Some(from) = &self.from else { return Turn::NOTHING };
        let mut scratch = pool.take();
        match sys::read_onto(from.as_fd(), &mut scratch, CHUNK_MAX) {
            Ok(1..) | Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => self.readable = false,
            Ok(0) | Err(_) => self.from = None,
        }
        pool.give(scratch);
        self.after(0)
    }
}

/// Stdin that the daemon must not send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StdinFault {
    #[error("stdin at offset {offset} leaves a gap after {received} bytes")]
    Gap { offset: u64, received: u64 },
    #[error("stdin exceeds its window of {STDIN_WINDOW} bytes")]
    BeyondWindow,
}

/// Result of a turn of writing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pumped {
    /// More bytes were delivered to the command.
    pub advanced: bool,
    /// The command has closed its stdin.
    pub closed: bool,
}

/// Stdin of a command.
#[derive(Debug)]
pub struct Input {
    to: Option<Rc<OwnedFd>>,
    source: Source,
    /// Received and not yet delivered to the command.
    waiting: VecDeque<u8>,
    /// Delivered to the command.
    taken: u64,
    /// Where it ends, once the daemon has sent that.
    end: Option<u64>,
    /// The last byte written to a terminal was not the end of a line.
    within_line: bool,
    /// The command closed it, or never had it.
    closed: bool,
    /// Some bytes were delivered on arrival.
    advanced: bool,
    growth: Growth,
}

impl Input {
    /// A stdin that is written to `to`; without it, one that discards everything.
    pub fn new(to: Option<Rc<OwnedFd>>, source: Source) -> Self {
        let closed = to.is_none();
        Self {
            to,
            source,
            waiting: VecDeque::new(),
            taken: 0,
            end: None,
            within_line: false,
            closed,
            advanced: false,
            growth: Growth::default(),
        }
    }

    /// Its target, while it is open.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.to.as_ref().map(|to| to.as_fd())
    }

    /// How much was delivered to the command.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Whether further bytes are discarded.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Bytes from the daemon. Bytes that arrived on an earlier connection are recognised by their offset.
    pub fn receive(&mut self, offset: u64, bytes: &[u8]) -> Result<(), StdinFault> {
        if self.closed {
            return Ok(());
        }
        let received = self.received();
        let known = received.checked_sub(offset).ok_or(StdinFault::Gap { offset, received })?;
        let mut fresh = bytes.get(known as usize..).unwrap_or_default();
        if let Some(end) = self.end {
            // A restarted daemon need not know that the end was sent.
            fresh = &fresh[..fresh.len().min(end.saturating_sub(received) as usize)];
        }
        if self.waiting.len() + fresh.len() > STDIN_WINDOW {
            return Err(StdinFault::BeyondWindow);
        }
        if self.waiting.is_empty() {
            let given = self.give(IoSlice::new(fresh), IoSlice::new(&[])).unwrap_or(0); // `pump` finds the reason of a failure.
            fresh = &fresh[given..];
            self.advanced |= given > 0;
        }
        self.waiting.extend(fresh);
        Ok(())
    }

    /// Delivers as much of the next bytes as the command accepts, in two pieces.
    fn give(&mut self, front: IoSlice<'_>, back: IoSlice<'_>) -> Result<usize, Errno> {
        let Some(to) = &self.to else { return Ok(0) };
        let length = rustix::io::writev(to, &[front, back])?;
        let last = match length.checked_sub(1) {
            None => return Ok(0),
            Some(last) if last < front.len() => front[last],
            Some(last) => back[last - front.len()],
        };
        self.within_line = last != b'\n';
        self.taken += length as u64;
        self.growth.moved(length, to);
        Ok(length)
    }

    /// Stdin ends after `offset` bytes, or after those received if they are more. The first end stands: a later one
    /// comes from a daemon that did not know of it.
    pub fn end_at(&mut self, offset: u64) {
        if !self.closed && self.end.is_none() {
            self.end = Some(offset.max(self.received()));
        }
    }

    /// Whether nothing more can come at this offset.
    pub fn ends_by(&self, offset: u64) -> bool {
        self.end.is_some_and(|end| offset >= end)
    }

    /// Delivers as much as the command accepts.
    pub fn pump(&mut self) -> Pumped {
        let mut pumped = Pumped { advanced: std::mem::take(&mut self.advanced), closed: false };
        let Some(to) = self.to.clone() else { return pumped };
        let mut waiting = std::mem::take(&mut self.waiting);
        while !waiting.is_empty() {
            let (front, back) = waiting.as_slices();
            match self.give(IoSlice::new(front), IoSlice::new(back)) {
                Ok(0) | Err(Errno::AGAIN) => {
                    self.waiting = waiting;
                    return pumped;
                }
                Err(Errno::INTR) => {}
                Ok(length) => {
                    waiting.drain(..length);
                    pumped.advanced = true;
                }
                Err(_) => {
                    pumped.closed = self.close();
                    return pumped;
                }
            }
        }
        self.waiting = waiting; // Its memory is reused until there is nothing to do.
        if self.end == Some(self.taken) {
            let ended = match self.source {
                Source::Pipe => true,
                Source::Terminal => self.end_terminal(&to),
            };
            if ended {
                self.to = None;
            }
        }
        pumped
    }

    /// The other side is closed, or the command has ended. Returns whether that is new.
    pub fn close(&mut self) -> bool {
        self.to = None;
        self.waiting = VecDeque::new();
        !std::mem::replace(&mut self.closed, true)
    }

    /// Frees memory that is held only for speed.
    pub fn release_memory(&mut self) {
        self.waiting.shrink_to_fit();
    }

    /// How much of the stream init has received, delivered or not.
    pub fn received(&self) -> u64 {
        self.taken + self.waiting.len() as u64
    }

    /// A terminal has no end; a reader treats its end-of-file character as one, at the beginning of a line. Within a
    /// line the first one only completes the line, so it takes two. Returns whether it was written.
    fn end_terminal(&self, to: &OwnedFd) -> bool {
        const CONTROL_D: u8 = 4;
        let modes = rustix::termios::tcgetattr(to);
        let character = modes.as_ref().map_or(CONTROL_D, |modes| modes.special_codes[SpecialCodeIndex::VEOF]);
        let canonical = modes.is_ok_and(|modes| modes.local_modes.contains(LocalModes::ICANON));
        let both = [character, character];
        let needed = if canonical && self.within_line { &both[..] } else { &both[..1] };
        // The terminal is too full now: the next edge tries again.
        rustix::io::write(to, needed) != Err(Errno::AGAIN)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    fn put(window: &mut Window, pool: &mut Pool, bytes: &[u8]) -> usize {
        let read = |to: &mut Vec<u8>, limit: usize| {
            let length = bytes.len().min(limit);
            to.extend_from_slice(&bytes[..length]);
            Ok(length)
        };
        window.fill(pool, usize::MAX, read).expect("this read cannot fail")
    }

    fn content(window: &Window, from: u64) -> Vec<u8> {
        let (mut at, mut all) = (from, Vec::new());
        while at < window.end() {
            let pieces = window.slices(at, CHUNK_MAX);
            let length: usize = pieces.iter().map(|piece| piece.len()).sum();
            assert!(length > 0 && length <= CHUNK_MAX);
            pieces.iter().for_each(|piece| all.extend_from_slice(piece));
            at += length as u64;
        }
        all
    }

    proptest! {
        #[test]
        fn a_window_holds_exactly_what_is_not_acknowledged(
            steps in proptest::collection::vec((0usize..100_000, 0.0..1.0f64), 1..40),
        ) {
            let (mut window, mut pool) = (Window::default(), Pool::default());
            let mut model: Vec<u8> = Vec::new();
            let mut counter = 0u32;
            for (length, fraction) in steps {
                let bytes: Vec<u8> = (0..length).map(|_| { counter += 1; ((counter * 7) >> 3) as u8 }).collect();
                let mut rest = &bytes[..];
                while !rest.is_empty() {
                    let taken = put(&mut window, &mut pool, rest);
                    if taken == 0 { break }
                    model.extend_from_slice(&rest[..taken]);
                    rest = &rest[taken..];
                }
                prop_assert!(rest.is_empty() || window.room() == 0);
                prop_assert_eq!(window.end(), model.len() as u64);
                let held = window.end() - window.acked();
                prop_assert!(held <= OUTPUT_WINDOW as u64);
                let acked = window.acked() + (held as f64 * fraction) as u64;
                window.release_to(acked, &mut pool);
                prop_assert_eq!(&content(&window, acked)[..], &model[acked as usize..]);
            }
            window.release_to(window.end(), &mut pool);
            prop_assert!(window.chunks.is_empty() && window.skip == 0);
            prop_assert!(pool.free.len() <= POOL_CHUNKS_MAX);
        }
    }

    #[test]
    fn a_full_window_takes_nothing_and_an_acknowledgement_makes_room() {
        let (mut window, mut pool) = (Window::default(), Pool::default());
        while window.room() > 0 {
            put(&mut window, &mut pool, &[1; CHUNK_MAX]);
        }
        assert_eq!(put(&mut window, &mut pool, &[2; 10]), 0);
        window.release_to(5, &mut pool);
        assert_eq!(put(&mut window, &mut pool, &[2; 10]), 5);
        window.release_to(3, &mut pool);
        assert_eq!(window.acked(), 5, "an acknowledgement never goes back");
    }

    fn pipe_to_read() -> (Output, OwnedFd) {
        let (reader, writer) = pipe_with(PipeFlags::NONBLOCK | PipeFlags::CLOEXEC).expect("a pipe");
        (Output::new(Some(Rc::new(reader)), Source::Pipe), writer)
    }

    #[test]
    fn an_output_ends_with_what_the_pipe_held_at_the_exit() {
        let (mut output, writer) = pipe_to_read();
        let mut pool = Pool::default();
        rustix::io::write(&writer, b"mine").expect("room");
        output.main_exited();
        rustix::io::write(&writer, b"of somebody else").expect("room");
        assert!(output.wants_turn() && !output.is_over());
        output.turn(&mut pool);
        assert!(output.is_over());
        assert_eq!(content(&output.window, 0), b"mine");
        while output.wants_turn() {
            output.turn(&mut pool);
        }
        assert!(!output.is_closed(), "a writer is left");
        rustix::io::write(&writer, b"more").expect("the writer gets no SIGPIPE");
        drop(writer);
        output.mark_readable(true);
        while output.wants_turn() {
            output.turn(&mut pool);
        }
        assert!(output.is_closed());
        assert_eq!(output.window.end(), 4);
    }

    #[test]
    fn bytes_that_somebody_else_took_from_the_pipe_do_not_keep_the_result_waiting() {
        let (reader, writer) = pipe_with(PipeFlags::NONBLOCK | PipeFlags::CLOEXEC).expect("a pipe");
        let thief = reader.try_clone().expect("a copy");
        let mut output = Output::new(Some(Rc::new(reader)), Source::Pipe);
        rustix::io::write(&writer, b"mine").expect("room");
        output.main_exited();
        assert_eq!(rustix::io::read(&thief, &mut [0u8; 8]), Ok(4));
        output.turn(&mut Pool::default());
        assert!(output.is_over());
        assert_eq!(output.window.end(), 0);
    }

    #[test]
    fn the_end_of_a_pipe_is_seen_though_the_last_bytes_came_with_it() {
        let (mut output, writer) = pipe_to_read();
        rustix::io::write(&writer, b"last").expect("room");
        drop(writer);
        output.mark_readable(true);
        let mut pool = Pool::default();
        while output.wants_turn() {
            output.turn(&mut pool);
        }
        assert!(output.is_closed());
        assert_eq!(content(&output.window, 0), b"last");
    }

    #[test]
    fn stdin_is_deduplicated_by_offset_and_bounded() {
        let (reader, writer) = pipe_with(PipeFlags::NONBLOCK | PipeFlags::CLOEXEC).expect("a pipe");
        let mut input = Input::new(Some(Rc::new(writer)), Source::Pipe);
        assert_eq!(input.receive(0, b"hello "), Ok(()));
        assert_eq!(input.receive(0, b"hello world"), Ok(()));
        assert_eq!(input.receive(3, b"lo"), Ok(()));
        assert_eq!(input.receive(12, b"!"), Err(StdinFault::Gap { offset: 12, received: 11 }));
        input.end_at(12);
        input.end_at(20);
        assert!(!input.ends_by(11) && input.ends_by(12));
        assert_eq!(input.receive(11, b"!!"), Ok(()), "bytes beyond the end are dropped");
        assert_eq!(input.receive(12, b"!"), Ok(()));
        assert_eq!(input.pump(), Pumped { advanced: true, closed: false });
        assert_eq!(input.taken(), 12);
        let mut read = [0u8; 64];
        assert_eq!(rustix::io::read(&reader, &mut read), Ok(12));
        assert_eq!(&read[..12], b"hello world!");
        assert_eq!(rustix::io::read(&reader, &mut read), Ok(0), "the end came after the bytes");
    }

    #[test]
    fn stdin_beyond_the_window_is_a_fault() {
        let (_reader, writer) = pipe_with(PipeFlags::NONBLOCK | PipeFlags::CLOEXEC).expect("a pipe");
        let mut input = Input::new(Some(Rc::new(writer)), Source::Pipe);
        assert_eq!(input.receive(0, &vec![0; STDIN_WINDOW]), Ok(()));
        let taken = input.taken() as usize;
        assert!(taken > 0 && taken < STDIN_WINDOW && input.pump().advanced, "the pipe took {taken}");
        let next = STDIN_WINDOW as u64;
        assert_eq!(input.receive(next, &vec![0; taken + 1]), Err(StdinFault::BeyondWindow));
        assert_eq!(input.receive(next, &vec![0; taken]), Ok(()));
        assert_eq!(input.pump(), Pumped::default(), "the reader has read nothing");
    }

    #[test]
    fn a_reader_that_went_away_closes_stdin_once() {
        let (reader, writer) = pipe_with(PipeFlags::NONBLOCK | PipeFlags::CLOEXEC).expect("a pipe");
        let mut input = Input::new(Some(Rc::new(writer)), Source::Pipe);
        drop(reader);
        input.receive(0, b"x").expect("within the window");
        assert_eq!(input.pump(), Pumped { advanced: false, closed: true });
        assert_eq!(input.receive(500, b"dropped"), Ok(()), "further bytes are dropped");
        assert_eq!(input.pump(), Pumped::default());
    }
}
