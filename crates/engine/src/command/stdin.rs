//! Bytes on their way to a command's stdin.
//!
//! They stay here until init says that the command has them, so that a new connection can send them again; init skips
//! what it has. What a caller may hand over ahead of the command is bounded by the window.

use std::collections::VecDeque;
use std::sync::Arc;

use wire::frame::CHUNK_MAX;
use wire::guest::STDIN_WINDOW;

use super::LiveCommand;
use crate::guest::Violation;

/// Bytes on their way to the command.
#[derive(Default)]
pub(super) struct Stdin {
    /// Given to the command, as init says. The buffer begins at `base`.
    pub(super) given: u64,
    pub(super) base: u64,
    pub(super) buffer: VecDeque<u8>,
    /// Sent to init on this connection.
    pub(super) sent: u64,
    /// The end, once someone has set it.
    pub(super) end: Option<u64>,
    /// Init knows of the end.
    pub(super) end_sent: bool,
    /// The command closed it.
    pub(super) closed: bool,
    /// After a restart of the daemon, it is not known how much was taken over until init says so.
    pub(super) unknown: bool,
}

impl Stdin {
    pub(super) fn accepted(&self) -> u64 {
        self.base + self.buffer.len() as u64
    }

    pub(super) fn room(&self) -> u64 {
        (self.given + STDIN_WINDOW as u64).saturating_sub(self.accepted())
    }

    /// Frees what init has.
    pub(super) fn forget_until(&mut self, offset: u64) {
        let length = offset.saturating_sub(self.base).min(self.buffer.len() as u64);
        self.buffer.drain(..length as usize);
        self.base += length;
    }
}

/// What [`LiveCommand::take_stdin`] found.
pub(crate) struct StdinTaken {
    pub offset: u64,
    pub bytes: Vec<u8>,
    /// Stdin ends here.
    pub end: Option<u64>,
    pub more: bool,
}

impl LiveCommand {
    /// Stdin up to `offset` was given to the command.
    pub fn stdin_given(self: &Arc<Self>, offset: u64) -> Result<(), Violation> {
        let mut state = self.lock();
        let stdin = &mut state.stdin;
        if offset < stdin.given || offset > stdin.sent {
            return Err(Violation::BadStdinAck { handle: self.handle, offset, sent: stdin.sent });
        }
        stdin.given = offset;
        stdin.forget_until(offset);
        drop(state);
        self.offer_stdin();
        self.changed.notify_waiters();
        Ok(())
    }

    /// The command closed its stdin.
    pub fn stdin_closed(&self) {
        let mut state = self.lock();
        state.stdin.closed = true;
        state.stdin.buffer.clear();
        drop(state);
        self.changed.notify_waiters();
    }

    /// Stdin that init may be sent, a chunk at most, and whether there is more. `None`: nothing.
    pub fn take_stdin(&self) -> StdinTaken {
        let mut state = self.lock();
        let stdin = &mut state.stdin;
        let nothing = StdinTaken { offset: stdin.sent, bytes: Vec::new(), end: None, more: false };
        if stdin.unknown || stdin.closed {
            state.stdin_queued = false;
            return nothing;
        }
        let window = stdin.given + STDIN_WINDOW as u64;
        let until = stdin.accepted().min(window).min(stdin.sent + CHUNK_MAX as u64);
        let (from, to) = ((stdin.sent - stdin.base) as usize, (until.max(stdin.sent) - stdin.base) as usize);
        let bytes: Vec<u8> = stdin.buffer.range(from..to).copied().collect();
        let offset = stdin.sent;
        stdin.sent += bytes.len() as u64;
        let end = stdin.end.filter(|end| *end == stdin.sent && !stdin.end_sent);
        stdin.end_sent |= end.is_some();
        let more = stdin.sent < stdin.accepted().min(window);
        state.stdin_queued = more;
        drop(state);
        if end.is_some() {
            self.changed.notify_waiters();
        }
        StdinTaken { offset, bytes, end, more }
    }

    /// Puts the command into the link's list if it has stdin to send.
    pub(super) fn offer_stdin(self: &Arc<Self>) {
        let mut state = self.lock();
        let stdin = &state.stdin;
        let window = stdin.given + STDIN_WINDOW as u64;
        let due = stdin.sent < stdin.accepted().min(window)
            || stdin.end.is_some_and(|end| end == stdin.sent && !stdin.end_sent);
        if !due || stdin.unknown || stdin.closed || state.stdin_queued {
            return;
        }
        state.stdin_queued = self.live.outbox.stdin(Arc::clone(self) as Arc<dyn crate::guest::Lane>);
    }
}
