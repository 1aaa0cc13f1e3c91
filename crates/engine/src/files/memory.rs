//! The state under the lock of a transfer's lane: the bytes that wait for its caller.

use std::collections::VecDeque;
use std::ops::ControlFlow;

use bytes::Bytes;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use wire::guest::{End, Handle, OUTPUT_WINDOW, StartError};

use crate::error::EngineError;
use crate::guest::{LaneState, Sink, Violation};

/// How far a transfer has come.
pub(super) type State = LaneState<MemorySink>;

/// Keeps output in memory until the caller takes it. See the module comment.
pub(crate) struct MemorySink {
    output: [Outgoing; 2],
    pub(super) ending: Option<Ending>,
    /// The caller is gone: output is dropped, and its end is acknowledged.
    pub(super) abandoned: bool,
    /// The caller took nothing for too long.
    pub(super) stalled: bool,
    /// When the caller last took something, or when there was nothing to take.
    pub(super) taken_at: Instant,
    /// Released at the end.
    pub(super) place: Option<OwnedSemaphorePermit>,
}

#[derive(Debug, Clone)]
pub(super) enum Ending {
    Guest(End),
    FailedToStart(StartError),
    SandboxGone,
}

/// What init has sent of a stream.
#[derive(Default)]
struct Outgoing {
    waiting: VecDeque<Bytes>,
    received: u64,
    taken: u64,
}

impl MemorySink {
    pub(super) fn new(place: Option<OwnedSemaphorePermit>) -> Self {
        Self {
            output: [Outgoing::default(), Outgoing::default()],
            ending: None,
            abandoned: false,
            stalled: false,
            taken_at: Instant::now(),
            place,
        }
    }

    /// The waiting bytes of a stream. Breaks with `None` at its end.
    #[allow(clippy::type_complexity)] // Only the two callers see it.
    pub(super) fn take(&mut self, at: usize) -> ControlFlow<Result<Option<Bytes>, EngineError>> {
        if self.stalled {
            return ControlFlow::Break(Err(EngineError::FileStalled));
        }
        let output = &mut self.output[at];
        if let Some(bytes) = output.waiting.pop_front() {
            output.taken += bytes.len() as u64;
            self.taken_at = Instant::now();
            return ControlFlow::Break(Ok(Some(bytes)));
        }
        match self.ending {
            Some(_) => ControlFlow::Break(Ok(None)),
            None => ControlFlow::Continue(()),
        }
    }

    /// Whether something waits for the caller.
    pub(super) fn is_waiting(&self) -> bool {
        self.output.iter().any(|output| !output.waiting.is_empty())
    }

    /// Drops waiting and future output.
    pub(super) fn abandon(&mut self) {
        self.abandoned = true;
        for output in &mut self.output {
            output.waiting.clear();
            output.taken = output.received;
        }
    }

    /// Whether streams that end there have arrived in full. An abandoned transfer need not have.
    pub(super) fn check_ends(&self, handle: Handle, ends: [u64; 2]) -> Result<(), Violation> {
        for (Outgoing { received, .. }, end) in self.output.iter().zip(ends) {
            if !self.abandoned && *received != end {
                return Err(Violation::BadEnd { handle, end, received: *received });
            }
        }
        Ok(())
    }
}

impl Sink for MemorySink {
    fn receive(&mut self, _handle: Handle, at: usize, offset: u64, bytes: &[u8]) -> Result<bool, Violation> {
        let end = offset + bytes.len() as u64;
        let output = &mut self.output[at];
        if self.abandoned {
            // The bytes are dropped, since the operation cannot end while they wait.
            output.received = output.received.max(end);
            output.taken = output.received;
            return Ok(false);
        }
        if offset > output.received {
            return Err(Violation::Gap { expected: output.received, found: offset });
        }
        if end > output.taken + OUTPUT_WINDOW as u64 {
            return Err(Violation::BeyondWindow { end, acknowledged: output.taken });
        }
        // On a new connection, init sends bytes again that arrived before.
        if end <= output.received {
            return Ok(false);
        }
        let known = (output.received - offset) as usize;
        if output.waiting.is_empty() {
            self.taken_at = Instant::now();
        }
        output.waiting.push_back(Bytes::copy_from_slice(&bytes[known..]));
        output.received = end;
        Ok(true)
    }

    fn granted(&self, at: usize) -> u64 {
        self.output[at].taken
    }

    fn is_over(&self) -> bool {
        self.ending.is_some()
    }

    fn is_abandoned(&self) -> bool {
        self.abandoned
    }

    fn is_untouched(&self) -> bool {
        self.output.iter().all(|output| output.received == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HANDLE: Handle = Handle(1 << 31);

    fn sink() -> MemorySink {
        MemorySink::new(None)
    }

    fn taken(sink: &mut MemorySink) -> Option<Bytes> {
        match sink.take(0) {
            ControlFlow::Break(taken) => taken.expect("nobody stalled"),
            ControlFlow::Continue(()) => None,
        }
    }

    #[tokio::test]
    async fn bytes_that_are_said_again_are_handed_out_once() {
        let mut sink = sink();
        assert_eq!(sink.receive(HANDLE, 0, 0, b"abc"), Ok(true));
        assert_eq!(sink.receive(HANDLE, 0, 0, b"abc"), Ok(false));
        assert_eq!(sink.receive(HANDLE, 0, 1, b"bcde"), Ok(true));
        assert_eq!(taken(&mut sink).as_deref(), Some(&b"abc"[..]));
        assert_eq!(sink.granted(0), 3);
        assert_eq!(taken(&mut sink).as_deref(), Some(&b"de"[..]));
    }

    #[tokio::test]
    async fn a_gap_and_more_than_the_window_are_violations() {
        let mut sink = sink();
        sink.receive(HANDLE, 0, 1, b"x").expect_err("a byte is missing");
        let window = vec![0; OUTPUT_WINDOW];
        assert_eq!(sink.receive(HANDLE, 0, 0, &window), Ok(true));
        sink.receive(HANDLE, 0, OUTPUT_WINDOW as u64, b"x").expect_err("nothing was taken");
        assert!(taken(&mut sink).is_some());
        assert_eq!(sink.receive(HANDLE, 0, OUTPUT_WINDOW as u64, b"x"), Ok(true));
    }

    #[tokio::test]
    async fn what_nobody_wants_is_dropped_and_granted() {
        let mut sink = sink();
        sink.receive(HANDLE, 0, 0, b"abc").expect("it fits");
        sink.abandon();
        assert_eq!(sink.granted(0), 3);
        assert_eq!(sink.receive(HANDLE, 0, 3, b"def"), Ok(false));
        assert_eq!(sink.granted(0), 6);
        assert!(!sink.is_waiting());
        sink.check_ends(HANDLE, [100, 0]).expect("nobody wants the rest");
    }
}
