//! The first process of a fake sandbox: it speaks the real frames, and follows the rules of the real init.
//!
//! `crates/guest/tests/guest/protocol.rs` runs one suite against both, so that they cannot diverge.

mod connection;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use wire::frame;
use wire::guest::{End, FromInit, Handle, OUTPUT_WINDOW, STDIN_WINDOW, StartError, Stream};

use crate::fake::script::Gates;

pub(super) use connection::Connection;
pub use connection::Violation;

pub(super) const SIGKILL: i32 = 9;
pub(super) const SIGTERM: i32 = 15;

/// The first process of a fake sandbox.
pub(super) struct Init {
    state: Mutex<InitState>,
    /// Signals that a connection may have something to do.
    wake: Notify,
    /// Signals that a command may have something to do.
    progress: Notify,
    pub(super) gates: Arc<Gates>,
}

#[derive(Default)]
pub(super) struct InitState {
    pub(super) commands: BTreeMap<Handle, Command>,
    /// Counts connections; only the newest is served.
    generation: u64,
    silent: bool,
    dead: bool,
    says: Vec<u8>,
    says_now: bool,
    /// Handles that it claims to know.
    pub(super) claims: Vec<u32>,
    /// How much stdin it claims to have, of any command.
    pub(super) stdin_claimed: Option<u64>,
    pub(super) starts: HashMap<Handle, u32>,
    pub(super) violations: Vec<Violation>,
    pid_last: u32,
}

pub(super) struct Command {
    pid: Option<u32>,
    pub(super) output: [OutputBuffer; 2],
    takes_stdin: bool,
    pub(super) stdin: VecDeque<u8>,
    stdin_received: u64,
    pub(super) stdin_given: u64,
    pub(super) stdin_end: Option<u64>,
    killed: bool,
    signal: Option<i32>,
    result: Option<Result<End, StartError>>,
    /// Whether the daemon wants its output on this connection.
    attached: bool,
    told: Told,
}

/// What was sent on this connection.
#[derive(Default)]
struct Told {
    started: bool,
    ended: bool,
    stdin_closed: bool,
    /// How much stdin was acknowledged; `None` before the first time.
    stdin: Option<u64>,
}

#[derive(Default)]
pub(super) struct OutputBuffer {
    acknowledged: u64,
    /// The bytes from `acknowledged` on.
    pub(super) bytes: VecDeque<u8>,
    /// The offset up to which bytes were sent on this connection.
    sent: u64,
}

impl OutputBuffer {
    pub(super) fn end(&self) -> u64 {
        self.acknowledged + self.bytes.len() as u64
    }

    fn acknowledge(&mut self, offset: u64) {
        let length = offset.saturating_sub(self.acknowledged).min(self.bytes.len() as u64);
        self.bytes.drain(..length as usize);
        self.acknowledged += length;
        self.sent = self.sent.max(self.acknowledged);
    }

    /// Puts the next unsent bytes into a frame.
    fn put_chunk(&mut self, handle: Handle, stream: Stream, chunk_max: usize, out: &mut Vec<u8>) {
        let from = (self.sent - self.acknowledged) as usize;
        let length = self.bytes.len().saturating_sub(from).min(chunk_max);
        if length == 0 {
            return;
        }
        out.extend_from_slice(&frame::data_header(handle, stream, self.sent, length));
        let (front, back) = self.bytes.as_slices();
        let to = from + length;
        out.extend_from_slice(&front[from.min(front.len())..to.min(front.len())]);
        out.extend_from_slice(&back[from.saturating_sub(front.len())..to.saturating_sub(front.len())]);
        self.sent += length as u64;
    }
}

impl Command {
    /// How much it has written so far.
    pub(super) fn written(&self) -> u64 {
        self.output.iter().map(OutputBuffer::end).sum()
    }

    /// Whether it waits for the daemon to acknowledge its output.
    pub(super) fn is_held_up(&self) -> bool {
        self.output.iter().any(|output| output.bytes.len() >= OUTPUT_WINDOW)
    }

    fn output_of(&mut self, stream: Stream) -> Option<&mut OutputBuffer> {
        match stream {
            Stream::Stdin => None,
            Stream::Stdout => Some(&mut self.output[0]),
            Stream::Stderr => Some(&mut self.output[1]),
        }
    }

    /// The connection is gone: everything that was not acknowledged will be sent again.
    fn detach(&mut self) {
        self.attached = false;
        self.told = Told { started: self.pid.is_some(), ..Told::default() };
        for output in &mut self.output {
            output.sent = output.acknowledged;
        }
    }

    /// The daemon wants its output from these offsets on. If the connection has the output already, the offsets only
    /// acknowledge.
    fn resume(&mut self, handle: Handle, offsets: [u64; 2], hostile: bool) -> Result<(), Violation> {
        let attached = self.attached;
        for (output, offset) in self.output.iter_mut().zip(offsets) {
            let sent = if attached { output.sent } else { output.end() };
            // A hostile init has sent more than its own state records.
            if offset > sent && !hostile {
                return Err(Violation::AckBeyondSent { handle, offset, sent });
            }
        }
        self.output.iter_mut().zip(offsets).for_each(|(output, offset)| output.acknowledge(offset));
        self.attached = true;
        self.told.stdin = None;
        Ok(())
    }

    /// The first end counts, and bytes that have arrived stay.
    fn end_stdin(&mut self, offset: u64) {
        if self.stdin_end.is_none() {
            self.stdin_end = Some(offset.max(self.stdin_received));
        }
    }

    fn stdin_is_closed(&self) -> bool {
        !self.takes_stdin || self.result.is_some()
    }

    /// Takes bytes of stdin; bytes that arrived before are recognised by their offset.
    fn receive_stdin(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Violation> {
        let received = self.stdin_received;
        let known = received.checked_sub(offset).ok_or(Violation::StdinGap { offset, received })?;
        let mut fresh = bytes.get(known as usize..).unwrap_or_default();
        if let Some(end) = self.stdin_end {
            fresh = &fresh[..fresh.len().min(end.saturating_sub(received) as usize)];
        }
        if self.stdin.len() + fresh.len() > STDIN_WINDOW {
            return Err(Violation::StdinBeyondWindow);
        }
        self.stdin.extend(fresh);
        self.stdin_received += fresh.len() as u64;
        Ok(())
    }

    /// Encodes the pending messages about it, with a bounded part of its output.
    fn put_news(&mut self, handle: Handle, chunk_max: usize, out: &mut Vec<u8>) {
        if !self.attached {
            return;
        }
        if let (false, Some(pid)) = (self.told.started, self.pid) {
            self.told.started = true;
            frame::put_message(&FromInit::Started { handle, pid }, out);
        }
        if !self.stdin_is_closed() && self.told.stdin != Some(self.stdin_given) {
            self.told.stdin = Some(self.stdin_given);
            frame::put_message(&FromInit::StdinAck { handle, offset: self.stdin_given }, out);
        }
        for (output, stream) in self.output.iter_mut().zip([Stream::Stdout, Stream::Stderr]) {
            output.put_chunk(handle, stream, chunk_max, out);
        }
        let all_sent = self.output.iter().all(|output| output.sent == output.end());
        if let (true, false, Some(result)) = (all_sent, self.told.ended, &self.result) {
            self.told.ended = true;
            let message = match result {
                Ok(end) => FromInit::Ended {
                    handle,
                    end: *end,
                    stdout_end: self.output[0].end(),
                    stderr_end: self.output[1].end(),
                },
                Err(error) => FromInit::StartFailed { handle, error: error.clone() },
            };
            frame::put_message(&message, out);
        }
    }
}

/// Why a command does not continue.
pub(super) enum Interrupted {
    Dead,
    Killed,
    Signal(i32),
}

impl Init {
    pub(super) fn new(gates: Arc<Gates>) -> Self {
        Self { state: Mutex::default(), wake: Notify::new(), progress: Notify::new(), gates }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, InitState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends it, with all its commands.
    pub(super) fn end(&self) {
        self.state().dead = true;
        self.notify();
    }

    /// Breaks the connection between two frames.
    pub(super) fn disconnect(&self) {
        self.state().generation += 1;
        self.notify();
    }

    pub(super) fn silence(&self, silent: bool) {
        self.state().silent = silent;
        self.notify();
    }

    /// Sends these bytes on every connection, and at once on this one.
    pub(super) fn say(&self, bytes: Vec<u8>) {
        {
            let mut state = self.state();
            (state.says, state.says_now) = (bytes, true);
        }
        self.notify();
    }

    pub(super) fn signal(&self, handle: Handle, signal: i32) {
        self.change(handle, |command| command.signal = Some(signal));
    }

    pub(super) fn end_command(&self, handle: Handle, end: End) {
        self.change(handle, |command| command.result = Some(Ok(end)));
    }

    fn notify(&self) {
        self.wake.notify_waiters();
        self.progress.notify_waiters();
    }

    /// Changes a command, if it still exists.
    pub(super) fn change<T>(&self, handle: Handle, change: impl FnOnce(&mut Command) -> T) -> Option<T> {
        let result = self.state().commands.get_mut(&handle).map(change);
        self.notify();
        result
    }

    /// Waits until `check` returns something, unless the command ends before.
    pub(super) async fn until<T>(
        &self,
        handle: Handle,
        mut check: impl FnMut(&mut Command) -> Option<T>,
    ) -> Result<T, Interrupted> {
        loop {
            let mut progress = std::pin::pin!(self.progress.notified());
            progress.as_mut().enable();
            {
                let mut state = self.state();
                if state.dead {
                    return Err(Interrupted::Dead);
                }
                let Some(command) = state.commands.get_mut(&handle) else { return Err(Interrupted::Dead) };
                if command.killed {
                    return Err(Interrupted::Killed);
                }
                if let Some(signal) = command.signal {
                    return Err(Interrupted::Signal(signal));
                }
                if let Some(value) = check(command) {
                    drop(state);
                    self.wake.notify_waiters();
                    return Ok(value);
                }
            }
            progress.await;
        }
    }
}
