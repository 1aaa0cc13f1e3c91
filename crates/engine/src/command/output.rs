//! A command's output as one reader gets it.
//!
//! Recent output comes from memory; older output is read from files, a few chunks at a time. The reader's position is
//! kept in the command, because retention depends on it.

use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::sync::Arc;

use bytes::Bytes;
use tokio::time::Instant;
use tracing::error;
use wire::frame::CHUNK_MAX;

use super::LiveCommand;
use super::sink::{Reader, State};
use crate::command::log::{Next, ReadPlan};
use crate::guest::{STREAMS, Use};
use crate::model::{Offsets, OutputEvent};

/// A command's output as it arrives. Once this is dropped, output it has not read may be dropped too.
pub struct Output {
    command: Arc<LiveCommand>,
    reader: u64,
    /// Read from files, not yet returned.
    ahead: [Bytes; 2],
    started: bool,
    stdin_given: Option<u64>,
    /// The stream that comes first when both are read from files: they take turns.
    turn: usize,
    over: bool,
    /// An open stream is a use. `None` if the sandbox is about to be deleted; kept output can be read until then.
    using: Option<Use>,
}

/// What a reader does next.
enum Step {
    Give(OutputEvent),
    Read(usize, ReadPlan),
    Leave(OutputEvent),
}

impl Output {
    pub(super) fn attach(command: &Arc<LiveCommand>, from: Offsets) -> Self {
        let mut state = command.lane.lock();
        let reader = state.sink.reader_next;
        state.sink.reader_next += 1;
        let at = [from.stdout, from.stderr];
        state.sink.readers.insert(reader, Reader { at, moved: Instant::now(), let_go: false });
        drop(state);
        Self {
            command: Arc::clone(command),
            reader,
            ahead: [Bytes::new(), Bytes::new()],
            started: false,
            stdin_given: None,
            turn: 0,
            over: false,
            using: Use::begin(command.guest()),
        }
    }

    /// The next event. After [`OutputEvent::Ended`] or [`OutputEvent::Stalled`] the stream is over (`None`). Returns at
    /// most 64 KiB of a stream at once. Cancel-safe.
    pub async fn next(&mut self) -> Option<OutputEvent> {
        if self.over {
            return None;
        }
        loop {
            let command = Arc::clone(&self.command);
            let step = command.lane.until(|state| self.step(state)).await;
            match step {
                Step::Give(event) => {
                    if matches!(event, OutputEvent::Bytes { .. } | OutputEvent::Lost { .. }) {
                        command.reader_moved(command.lane.lock());
                    }
                    return Some(event);
                }
                Step::Leave(event) => {
                    self.leave();
                    return Some(event);
                }
                Step::Read(log, plan) => {
                    let read = tokio::task::spawn_blocking(move || plan.read()).await;
                    match read.unwrap_or_else(|error| Err(std::io::Error::other(error))) {
                        Ok(bytes) => self.ahead[log] = bytes,
                        // Too much output was kept, and this part was dropped meanwhile: report it as lost.
                        Err(error) if error.kind() == ErrorKind::NotFound && self.was_dropped(log) => {}
                        Err(error) => return Some(self.unreadable(log, &error)),
                    }
                }
            }
        }
    }

    fn step(&mut self, state: &mut State) -> ControlFlow<Step> {
        let give = |event| ControlFlow::Break(Step::Give(event));
        let Some(reader) = state.sink.readers.get(&self.reader).filter(|reader| !reader.let_go) else {
            return ControlFlow::Break(Step::Leave(OutputEvent::Stalled));
        };
        let at = reader.at;
        if let (false, Some(pid)) = (self.started, state.pid) {
            self.started = true;
            return give(OutputEvent::Started { pid });
        }
        if let Some(event) = self.take_ahead(state) {
            return give(event);
        }
        let directory = self.command.directory();
        let next = |log: usize| state.sink.logs[log].next(&directory, at[log], state.sink.end(log));
        let first = self.turn;
        let second = 1 - first;
        let (log, next) = match (next(first), next(second)) {
            (Next::Nothing, Next::Nothing) => return self.step_idle(state),
            (Next::Nothing, other) => (second, other),
            (own, Next::Nothing) => (first, own),
            // If both are in memory, they come in the order of arrival. Otherwise they take turns, since files do not
            // record the order.
            (Next::Memory(_, came), Next::Memory(bytes, other_came)) if other_came < came => {
                (second, Next::Memory(bytes, other_came))
            }
            (own, _) => (first, own),
        };
        self.turn = 1 - log;
        match next {
            Next::Nothing => ControlFlow::Continue(()),
            Next::Lost(to) => {
                self.move_to(state, log, to);
                give(OutputEvent::Lost { stream: STREAMS[log], from: at[log], to })
            }
            Next::Memory(bytes, _) => give(self.hand_out(state, log, bytes)),
            Next::File(plan) => ControlFlow::Break(Step::Read(log, plan)),
        }
    }

    /// With no output to read, checks for stdin's acknowledgements and for the end.
    fn step_idle(&mut self, state: &mut State) -> ControlFlow<Step> {
        if let Some(given) = state.stdin.given()
            && self.command.lane.start.stdin
            && self.stdin_given != Some(given)
        {
            let first = self.stdin_given.replace(given).is_none();
            if !(first && given == 0) {
                return ControlFlow::Break(Step::Give(OutputEvent::StdinAck { offset: given }));
            }
        }
        match state.sink.result() {
            Some(_) => {
                ControlFlow::Break(Step::Leave(OutputEvent::Ended(Box::new(self.command.describe(state)))))
            }
            None => ControlFlow::Continue(()),
        }
    }

    fn take_ahead(&mut self, state: &mut State) -> Option<OutputEvent> {
        let log = [self.turn, 1 - self.turn].into_iter().find(|log| !self.ahead[*log].is_empty())?;
        let bytes = std::mem::take(&mut self.ahead[log]);
        Some(self.hand_out(state, log, bytes))
    }

    /// Returns a chunk of `bytes` and keeps the rest for the next call.
    fn hand_out(&mut self, state: &mut State, log: usize, mut bytes: Bytes) -> OutputEvent {
        let offset = state.sink.readers[&self.reader].at[log];
        let chunk = bytes.split_to(bytes.len().min(CHUNK_MAX));
        self.ahead[log] = bytes;
        self.command.guest().metrics.read(chunk.len());
        self.move_to(state, log, offset + chunk.len() as u64);
        OutputEvent::Bytes { stream: STREAMS[log], offset, bytes: chunk }
    }

    fn move_to(&self, state: &mut State, log: usize, at: u64) {
        if let Some(reader) = state.sink.readers.get_mut(&self.reader) {
            reader.at[log] = at;
            reader.moved = Instant::now();
        }
    }

    /// Whether the log no longer has the reader's next byte.
    fn was_dropped(&self, log: usize) -> bool {
        let state = self.command.lane.lock();
        let at = state.sink.readers.get(&self.reader).map_or(0, |reader| reader.at[log]);
        at < state.sink.logs[log].span().start
    }

    /// A log that cannot be read is reported as lost, since waiting for it would never end.
    fn unreadable(&mut self, log: usize, error: &std::io::Error) -> OutputEvent {
        error!(sandbox = %self.command.guest().id, command = %self.command.id, %error, "cannot read stored output");
        let mut state = self.command.lane.lock();
        let from = state.sink.readers.get(&self.reader).map_or(0, |reader| reader.at[log]);
        let to = state.sink.logs[log].received();
        self.move_to(&mut state, log, to);
        OutputEvent::Lost { stream: STREAMS[log], from, to }
    }

    fn leave(&mut self) {
        if std::mem::replace(&mut self.over, true) {
            return;
        }
        self.using = None;
        let mut state = self.command.lane.lock();
        state.sink.readers.remove(&self.reader);
        self.command.left(&state);
        self.command.reader_moved(state);
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        self.leave();
    }
}
