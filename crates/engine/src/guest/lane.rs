//! What a link carries: one command or one file operation, with its process and its streams.
//!
//! A [`Lane`] is everything that the two have in common: the process, the progress of init and of the daemon with each
//! stream, the bytes that wait for stdin, and the messages to send after a reconnect. A [`Sink`] handles output: a
//! command's goes to a log, a file operation's waits in memory for its caller. A [`Carrier`] owns a lane and reacts to
//! its events.

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use wire::guest::{End, Handle, Start, StartError, Stream, ToInit};

use super::{Guest, Stdin, Violation};

/// The output streams, in the order of every array that has one entry per stream.
pub(crate) const STREAMS: [Stream; 2] = [Stream::Stdout, Stream::Stderr];

/// See the module comment. The lock is held briefly and never across a wait.
pub(crate) struct Lane<S> {
    /// The start request for init.
    pub start: Arc<Start>,
    state: Mutex<LaneState<S>>,
    /// Notified whenever something changes that a task may wait for.
    changed: Notify,
}

/// The progress of a lane.
pub(crate) struct LaneState<S> {
    pub pid: Option<u32>,
    pub stdin: Stdin,
    pub sink: S,
    /// The offsets that were acknowledged to init, of each output stream.
    acknowledged: [u64; 2],
    /// How far init has sent each output stream on this connection. Bytes that init has not sent again yet are not
    /// acknowledged.
    said: [u64; 2],
    /// Whether the lane is in the link's list of lanes with acknowledgements, or with stdin, to send.
    ack_queued: bool,
    stdin_queued: bool,
}

/// Handles a lane's output. Output streams are numbered as in [`STREAMS`].
pub(crate) trait Sink: Send + 'static {
    /// Takes bytes of an output stream that init sent. `false`: all of them had arrived before.
    fn receive(&mut self, handle: Handle, at: usize, offset: u64, bytes: &[u8]) -> Result<bool, Violation>;

    /// The offset up to which init may forget an output stream.
    fn granted(&self, at: usize) -> u64;

    /// Whether its end is known. The acknowledgement of its result covers everything else.
    fn is_over(&self) -> bool;

    /// Whether the caller is gone, so that init should end it.
    fn is_abandoned(&self) -> bool;

    /// Whether no message from init so far shows that it was started.
    fn is_untouched(&self) -> bool;
}

/// Owns a lane, and reacts to its events. Messages from init are not trusted.
pub(crate) trait Carrier: Send + Sync + Sized + 'static {
    type Sink: Sink;

    fn lane(&self) -> &Lane<Self::Sink>;

    fn guest(&self) -> &Guest;

    /// The process runs.
    fn started(self: &Arc<Self>, pid: u32);

    /// After a new handshake: init still has it, and it may run.
    fn resumed(self: &Arc<Self>, state: &LaneState<Self::Sink>);

    /// New bytes of an output stream are in the sink.
    fn received(
        self: &Arc<Self>,
        state: MutexGuard<'_, LaneState<Self::Sink>>,
        stream: Stream,
        length: usize,
    );

    /// Bytes of stdin were sent to init.
    fn stdin_sent(&self, length: usize);

    /// Init could not start it.
    fn failed_to_start(self: &Arc<Self>, error: StartError) -> Result<(), Violation>;

    /// Init reports how it ended, and where its streams end.
    fn ended(self: &Arc<Self>, end: End, ends: [u64; 2]) -> Result<(), Violation>;

    /// After a new handshake: init does not know it, and must not start it again, because init had it before or its
    /// caller is gone.
    fn lost(self: &Arc<Self>) -> Result<(), Violation>;

    /// Asks the link to send the acknowledgements that are due.
    fn offer_acks(self: &Arc<Self>, state: &mut LaneState<Self::Sink>) {
        let due = (0..STREAMS.len()).any(|at| state.ack_due(at) > state.acknowledged[at]);
        if due && !state.sink.is_over() && !state.ack_queued {
            state.ack_queued = self.guest().outbox.ack(Arc::clone(self) as Arc<dyn AnyLane>);
        }
    }

    /// Asks the link to send the stdin that is due.
    fn offer_stdin(self: &Arc<Self>, state: &mut LaneState<Self::Sink>) {
        if state.stdin.is_due() && !state.sink.is_over() && !state.stdin_queued {
            state.stdin_queued = self.guest().outbox.stdin(Arc::clone(self) as Arc<dyn AnyLane>);
        }
    }
}

impl<S: Sink> LaneState<S> {
    /// The offset to acknowledge to init for an output stream.
    fn ack_due(&self, at: usize) -> u64 {
        self.sink.granted(at).min(self.said[at])
    }
}

impl<S: Sink> Lane<S> {
    pub fn new(start: Start, stdin: Stdin, sink: S) -> Self {
        let acknowledged = [sink.granted(0), sink.granted(1)];
        let state = LaneState {
            pid: None,
            stdin,
            sink,
            acknowledged,
            said: [0, 0],
            ack_queued: false,
            stdin_queued: false,
        };
        Self { start: Arc::new(start), state: Mutex::new(state), changed: Notify::new() }
    }

    pub fn handle(&self) -> Handle {
        self.start.handle
    }

    pub fn lock(&self) -> MutexGuard<'_, LaneState<S>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes every task that waits in [`Self::until`].
    pub fn notify(&self) {
        self.changed.notify_waiters();
    }

    /// Waits until `check` breaks.
    pub async fn until<T>(&self, mut check: impl FnMut(&mut LaneState<S>) -> ControlFlow<T>) -> T {
        loop {
            if let ControlFlow::Break(value) = check(&mut self.lock()) {
                return value;
            }
            let mut changed = std::pin::pin!(self.changed.notified());
            // From here on no change is missed; the second check sees changes before it.
            changed.as_mut().enable();
            if let ControlFlow::Break(value) = check(&mut self.lock()) {
                return value;
            }
            changed.await;
        }
    }

    /// Waits until init has reported anything about it, or its end is known otherwise.
    pub async fn answered(&self) {
        self.until(|state| match state.pid.is_some() || state.sink.is_over() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        })
        .await;
    }

    /// Waits for its end, however it becomes known.
    pub async fn over(&self) {
        self.until(|state| match state.sink.is_over() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        })
        .await;
    }

    fn set_pid(&self, state: &mut LaneState<S>, pid: u32) -> Result<(), Violation> {
        match state.pid.replace(pid) {
            Some(known) if known != pid => {
                state.pid = Some(known);
                Err(Violation::AnotherPid { handle: self.handle() })
            }
            Some(_) | None => Ok(()),
        }
    }
}

/// The index of an output stream in arrays with one entry per stream.
fn index(handle: Handle, stream: Stream) -> Result<usize, Violation> {
    STREAMS.iter().position(|own| *own == stream).ok_or(Violation::StdinFromInit { handle })
}

/// A lane as the link sees it, independent of its sink.
pub(crate) trait AnyLane: Send + Sync {
    /// The start request for init.
    fn start(&self) -> &Start;

    /// Passes the acknowledgements that are due to `put`.
    fn take_acks(&self, put: &mut dyn FnMut(ToInit));

    /// Appends a chunk of stdin and its end, if they are due. Returns whether there is more.
    fn put_stdin(&self, out: &mut Vec<u8>) -> bool;

    /// The connection is gone, with the link's lists.
    fn unqueue(&self);

    /// Init has started it.
    fn started(self: Arc<Self>, pid: u32) -> Result<(), Violation>;

    /// Init could not start it.
    fn failed_to_start(self: Arc<Self>, error: StartError) -> Result<(), Violation>;

    /// Init sent output.
    fn receive(self: Arc<Self>, stream: Stream, offset: u64, bytes: &[u8]) -> Result<(), Violation>;

    /// Init has passed stdin to the process up to `offset`.
    fn stdin_given(self: Arc<Self>, offset: u64) -> Result<(), Violation>;

    /// The process no longer reads its stdin.
    fn stdin_closed(&self);

    /// Init reports how it ended, and where its streams end.
    fn ended(self: Arc<Self>, end: End, ends: [u64; 2]) -> Result<(), Violation>;

    /// After a new handshake: init still has it. Returns the messages that init needs to continue.
    fn resume(self: Arc<Self>, pid: Option<u32>, stdin: u64) -> Result<Vec<ToInit>, Violation>;

    /// After a new handshake: init does not have it. Returns whether init should start it again.
    fn missing(self: Arc<Self>) -> Result<bool, Violation>;
}

impl<C: Carrier> AnyLane for C {
    fn start(&self) -> &Start {
        &self.lane().start
    }

    fn take_acks(&self, put: &mut dyn FnMut(ToInit)) {
        let handle = self.lane().handle();
        let mut state = self.lane().lock();
        state.ack_queued = false;
        if state.sink.is_over() {
            return;
        }
        for (at, stream) in STREAMS.into_iter().enumerate() {
            let offset = state.ack_due(at);
            if offset > state.acknowledged[at] {
                state.acknowledged[at] = offset;
                put(ToInit::Ack { handle, stream, offset });
            }
        }
    }

    fn put_stdin(&self, out: &mut Vec<u8>) -> bool {
        let lane = self.lane();
        let mut state = lane.lock();
        let (length, end) = match state.sink.is_over() {
            true => (0, false),
            false => state.stdin.put(lane.handle(), out),
        };
        let more = state.stdin.is_due() && !state.sink.is_over();
        state.stdin_queued = more;
        drop(state);
        if length > 0 {
            self.stdin_sent(length);
        }
        if end {
            lane.notify();
        }
        more
    }

    fn unqueue(&self) {
        let mut state = self.lane().lock();
        (state.ack_queued, state.stdin_queued) = (false, false);
    }

    fn started(self: Arc<Self>, pid: u32) -> Result<(), Violation> {
        let mut state = self.lane().lock();
        let known = state.pid.is_some();
        self.lane().set_pid(&mut state, pid)?;
        drop(state);
        if !known {
            Carrier::started(&self, pid);
            self.lane().notify();
        }
        Ok(())
    }

    fn failed_to_start(self: Arc<Self>, error: StartError) -> Result<(), Violation> {
        Carrier::failed_to_start(&self, error)
    }

    fn receive(self: Arc<Self>, stream: Stream, offset: u64, bytes: &[u8]) -> Result<(), Violation> {
        let handle = self.lane().handle();
        let at = index(handle, stream)?;
        let mut state = self.lane().lock();
        let fresh = state.sink.receive(handle, at, offset, bytes)?;
        state.said[at] = state.said[at].max(offset + bytes.len() as u64);
        if fresh {
            self.received(state, stream, bytes.len());
            self.lane().notify();
        } else {
            self.offer_acks(&mut state);
        }
        Ok(())
    }

    fn stdin_given(self: Arc<Self>, offset: u64) -> Result<(), Violation> {
        let mut state = self.lane().lock();
        state.stdin.give_until(self.lane().handle(), offset)?;
        self.offer_stdin(&mut state);
        drop(state);
        self.lane().notify();
        Ok(())
    }

    fn stdin_closed(&self) {
        self.lane().lock().stdin.close();
        self.lane().notify();
    }

    fn ended(self: Arc<Self>, end: End, ends: [u64; 2]) -> Result<(), Violation> {
        Carrier::ended(&self, end, ends)
    }

    fn resume(self: Arc<Self>, pid: Option<u32>, stdin: u64) -> Result<Vec<ToInit>, Violation> {
        let handle = self.lane().handle();
        let mut state = self.lane().lock();
        if let Some(pid) = pid {
            self.lane().set_pid(&mut state, pid)?;
        }
        state.stdin.resume(handle, stdin)?;
        let [stdout, stderr] = [state.sink.granted(0), state.sink.granted(1)];
        (state.acknowledged, state.said) = ([stdout, stderr], [stdout, stderr]);
        let kill = state.sink.is_abandoned().then_some(ToInit::Kill { handle });
        self.resumed(&state);
        self.offer_stdin(&mut state);
        drop(state);
        self.lane().notify();
        Ok(kill.into_iter().chain([ToInit::Resume { handle, stdout, stderr }]).collect())
    }

    fn missing(self: Arc<Self>) -> Result<bool, Violation> {
        let mut state = self.lane().lock();
        if state.sink.is_over() {
            return Ok(false); // It ended with an earlier init, and its result is being stored.
        }
        if state.pid.is_some() || state.sink.is_abandoned() || !state.sink.is_untouched() {
            drop(state);
            return self.lost().map(|()| false);
        }
        state.stdin.restart();
        self.offer_stdin(&mut state);
        Ok(true)
    }
}
