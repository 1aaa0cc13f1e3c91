//! One command: its streams, its result, and everyone who watches it.
//!
//! A [`Hub`] is where the link to init, the threads that write logs, and callers meet. Its lock is held for moments and
//! never over a wait. The order of things is: the row of the intent is committed, init is told, bytes come and are
//! handed to readers and to the disk, init hears what is on disk, the result comes, and when all output is on disk the
//! result is committed; only then do callers see the end, and init may forget the command.
//!
//! Readers that are attached hold back retention. When too much is kept for their sake, init is not told that bytes are
//! stored, so that the command waits at its full pipe; a reader that holds things up and does not move is let go.

use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};
use tracing::{debug, error, warn};
use wire::CommandId;
use wire::frame::CHUNK_MAX;
use wire::guest::{
    End, EndCause, ExitStatus, Handle, OUTPUT_WINDOW, STDIN_WINDOW, Start, StartError, Stream, TerminalSize,
    ToInit,
};

use crate::error::{EngineError, StoreError, chain};
use crate::guest::Violation;
use crate::home::Home;
use crate::log::{Again, Next, Retired, SHORT_PATIENCE, StreamLog, Writes};
use crate::model::{Command, CommandState, Gathered, Offsets, Outcome, OutputEvent, Signal, Span};
use crate::store::{CommandRow, Inserted, ResultRow};

/// How long a reader may hold up a command without taking anything.
pub const STALL_SECONDS: u64 = 30;
/// How long one request waits for init: a start, a signal, a kill.
pub const ANSWER_SECONDS: u64 = 10;
/// How long a write to stdin waits for the command to read.
pub const STDIN_SECONDS: u64 = 30;
/// How long the count of memory kills may take. It is read from a file on the host.
const OOM_SECONDS: u64 = 5;
/// A result that could not be committed is tried again after so long.
const RESULT_RETRY: Duration = Duration::from_secs(1);
/// What is kept of the words init found for a failure.
const START_ERROR_TEXT_MAX: usize = 4096;

const STREAMS: [Stream; 2] = [Stream::Stdout, Stream::Stderr];

/// Where a stream is in arrays of both.
fn index(stream: Stream) -> Option<usize> {
    match stream {
        Stream::Stdin => None,
        Stream::Stdout => Some(0),
        Stream::Stderr => Some(1),
    }
}

/// See the head of this file.
pub(crate) struct Hub {
    pub home: Arc<Home>,
    pub id: CommandId,
    pub handle: Handle,
    pub start: Arc<Start>,
    pub request_digest: [u8; 32],
    pub created_at: SystemTime,
    state: Mutex<HubState>,
    /// Told whenever something changed that someone may wait for.
    changed: Notify,
}

struct HubState {
    phase: Phase,
    pid: Option<u32>,
    logs: [StreamLog; 2],
    /// Counts chunks of both streams.
    serial: u64,
    /// What init said last about the command, or what became of its sandbox.
    ending: Option<Ending>,
    readers: BTreeMap<u64, Reader>,
    reader_next: u64,
    /// Since when too much is kept for the sake of a reader.
    held_since: Option<Instant>,
    /// Someone looks after readers that do not move.
    watched: bool,
    stdin: Stdin,
    /// A pass of the log writers is under way or queued.
    writing: bool,
    /// Short output waits for the end of the command before it is written.
    waiting: bool,
    /// What init was told of each log.
    acknowledged: [u64; 2],
    /// How far init has come with each log on this connection. It is not told of bytes that it has not yet said again.
    said: [u64; 2],
    /// In the link's list of those with acknowledgements, or with stdin, to send.
    ack_queued: bool,
    stdin_queued: bool,
    /// The disk refused, and that was logged.
    disk_refused: bool,
}

#[derive(Debug, Clone)]
enum Phase {
    /// The row is on its way to the store.
    Intended,
    /// There is no such row.
    Refused(Refusal),
    /// The row is there.
    Committed,
    /// The result is on its way to the store.
    Finishing,
    /// The result is there.
    Ended(Box<ResultRow>),
}

/// Why a command did not get a row.
#[derive(Debug, Clone)]
pub(crate) enum Refusal {
    /// The id was used before.
    Exists(Arc<CommandRow>),
    /// The sandbox is not running any more.
    NoSandbox,
    /// The store refused.
    Store(Arc<StoreError>),
}

#[derive(Debug, Clone)]
struct Ending {
    what: EndingKind,
    /// The lengths of both streams.
    ends: [u64; 2],
}

#[derive(Debug, Clone, PartialEq)]
enum EndingKind {
    Guest(End),
    FailedToStart(StartError),
    SandboxGone,
}

struct Reader {
    at: [u64; 2],
    moved: Instant,
    let_go: bool,
}

/// Bytes on their way to the command.
#[derive(Default)]
struct Stdin {
    /// Given to the command, as init says. The buffer begins at `base`.
    given: u64,
    base: u64,
    buffer: VecDeque<u8>,
    /// Sent to init on this connection.
    sent: u64,
    /// The end, once someone has set it.
    end: Option<u64>,
    /// Init knows of the end.
    end_sent: bool,
    /// The command closed it.
    closed: bool,
    /// After a restart of the daemon, it is not known how much was taken over until init says so.
    unknown: bool,
}

impl Stdin {
    fn accepted(&self) -> u64 {
        self.base + self.buffer.len() as u64
    }

    fn room(&self) -> u64 {
        (self.given + STDIN_WINDOW as u64).saturating_sub(self.accepted())
    }

    /// Frees what init has.
    fn forget_until(&mut self, offset: u64) {
        let length = offset.saturating_sub(self.base).min(self.buffer.len() as u64);
        self.buffer.drain(..length as usize);
        self.base += length;
    }
}

impl HubState {
    /// The first offset of a stream that an attached reader still wants.
    fn floor(&self, log: usize) -> Option<u64> {
        self.readers.values().filter(|reader| !reader.let_go).map(|reader| reader.at[log]).min()
    }

    /// What init may be told of a stream.
    fn ack_due(&self, log: usize) -> u64 {
        self.logs[log].granted().min(self.said[log])
    }

    /// The end of a stream for readers: where it ended, if it has.
    fn end(&self, log: usize) -> u64 {
        self.ending.as_ref().map_or(u64::MAX, |ending| ending.ends[log])
    }
}

impl Hub {
    /// A command that is about to get its row.
    pub fn intended(home: &Arc<Home>, id: CommandId, start: Start, request_digest: [u8; 32]) -> Arc<Self> {
        let stdin = Stdin { closed: !start.stdin, ..Stdin::default() };
        let logs = STREAMS.map(StreamLog::new);
        Self::new(home, id, start, request_digest, crate::now(), Phase::Intended, logs, stdin)
    }

    /// A command that a row and the files on disk tell of. Blocks.
    pub fn recovered(home: &Arc<Home>, row: CommandRow) -> std::io::Result<Arc<Self>> {
        let directory = home.command_directory(row.handle);
        let spans = row.result.as_ref().map(|result| [result.stdout, result.stderr]);
        let log = |at: usize| match (&row.result, spans) {
            (Some(result), Some(spans)) => {
                StreamLog::finished(&directory, STREAMS[at], spans[at], result.bytes[at].clone())
            }
            (None, _) | (_, None) => StreamLog::recover(&directory, STREAMS[at]),
        };
        let logs = [log(0)?, log(1)?];
        let stdin = Stdin { closed: !row.start.stdin, unknown: true, ..Stdin::default() };
        let pid = row.result.as_ref().and_then(|result| result.pid);
        let phase = match row.result {
            Some(result) => Phase::Ended(Box::new(result)),
            None => Phase::Committed,
        };
        let hub = Self::new(home, row.id, row.start, row.request_digest, row.created_at, phase, logs, stdin);
        hub.lock().pid = pid;
        if let Some(spans) = spans {
            let ends = spans.map(|span| span.end);
            hub.lock().ending = Some(Ending { what: EndingKind::SandboxGone, ends });
        }
        Ok(hub)
    }

    #[allow(clippy::too_many_arguments)] // Private, and called twice, right above.
    fn new(
        home: &Arc<Home>,
        id: CommandId,
        start: Start,
        request_digest: [u8; 32],
        created_at: SystemTime,
        phase: Phase,
        logs: [StreamLog; 2],
        stdin: Stdin,
    ) -> Arc<Self> {
        let acknowledged = [logs[0].granted(), logs[1].granted()];
        let state = HubState {
            phase,
            pid: None,
            logs,
            serial: 0,
            ending: None,
            readers: BTreeMap::new(),
            reader_next: 0,
            held_since: None,
            watched: false,
            stdin,
            writing: false,
            waiting: false,
            acknowledged,
            said: [0, 0],
            ack_queued: false,
            stdin_queued: false,
            disk_refused: false,
        };
        Arc::new(Self {
            home: Arc::clone(home),
            id,
            handle: start.handle,
            start: Arc::new(start),
            request_digest,
            created_at,
            state: Mutex::new(state),
            changed: Notify::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, HubState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn directory(&self) -> PathBuf {
        self.home.command_directory(self.handle)
    }

    /// Waits until `check` breaks.
    async fn until<T>(&self, mut check: impl FnMut(&mut HubState) -> ControlFlow<T>) -> T {
        loop {
            if let ControlFlow::Break(value) = check(&mut self.lock()) {
                return value;
            }
            let mut changed = std::pin::pin!(self.changed.notified());
            // From here on no change is missed; one before it is seen by the second look.
            changed.as_mut().enable();
            if let ControlFlow::Break(value) = check(&mut self.lock()) {
                return value;
            }
            changed.await;
        }
    }

    // The row.

    /// Sends the row to the store, and the command to init once the row is committed.
    pub fn commit_intent(self: &Arc<Self>) {
        let row = CommandRow {
            sandbox: self.home.id,
            handle: self.handle,
            id: self.id.clone(),
            request_digest: self.request_digest,
            start: Start::clone(&self.start),
            created_at: self.created_at,
            result: None,
        };
        let hub = Arc::clone(self);
        self.home.shared.store.insert_command(row, move |inserted| hub.intent_answered(inserted));
    }

    fn intent_answered(self: &Arc<Self>, inserted: Result<Inserted, StoreError>) {
        let refusal = match inserted {
            Ok(Inserted::Yes) => None,
            Ok(Inserted::Exists(row)) => Some(Refusal::Exists(row.into())),
            Ok(Inserted::NoSandbox) => Some(Refusal::NoSandbox),
            Err(error) => Some(Refusal::Store(Arc::new(error))),
        };
        let mut state = self.lock();
        // The sandbox may have been deleted meanwhile; then it stays ended.
        if matches!(state.phase, Phase::Intended) {
            state.phase = refusal.clone().map_or(Phase::Committed, Phase::Refused);
        }
        drop(state);
        if refusal.is_some() {
            self.home.forget_command(self);
        } else {
            self.home.outbox.start(self);
            self.finish_if_due(); // The sandbox may have failed meanwhile.
        }
        self.changed.notify_waiters();
    }

    /// Waits until it is known whether the row was written.
    pub async fn committed(&self) -> Result<(), Refusal> {
        self.until(|state| match &state.phase {
            Phase::Intended => ControlFlow::Continue(()),
            Phase::Refused(refusal) => ControlFlow::Break(Err(refusal.clone())),
            Phase::Committed | Phase::Finishing | Phase::Ended(_) => ControlFlow::Break(Ok(())),
        })
        .await
    }

    /// Whether init may be told to start it.
    pub fn is_committed(&self) -> bool {
        matches!(self.lock().phase, Phase::Committed | Phase::Finishing)
    }

    /// Waits until init has said anything about it.
    async fn answered(&self) {
        self.until(|state| {
            if state.pid.is_some() || state.ending.is_some() {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })
        .await;
    }

    /// Waits for init's first word about a command that was just started.
    /// If it does not come, a command that nobody can name is ended as soon as init can hear again.
    pub async fn started_in_time(self: &Arc<Self>, named: bool) -> Result<(), EngineError> {
        let deadline = Instant::now() + Duration::from_secs(ANSWER_SECONDS);
        if timeout_at(deadline, self.answered()).await.is_ok() {
            return Ok(());
        }
        if !named {
            self.home.outbox.abandon(self.handle);
        }
        Err(EngineError::Unresponsive { id: self.home.id })
    }

    // What init says. Untrusted.

    /// The command runs.
    pub fn started(&self, pid: u32) -> Result<(), Violation> {
        let mut state = self.lock();
        match state.pid {
            Some(known) if known != pid => return Err(Violation::AnotherPid { handle: self.handle }),
            Some(_) => return Ok(()),
            None => state.pid = Some(pid),
        }
        drop(state);
        self.changed.notify_waiters();
        Ok(())
    }

    /// Bytes of a stream.
    pub fn receive(self: &Arc<Self>, stream: Stream, offset: u64, bytes: &[u8]) -> Result<(), Violation> {
        let Some(log) = index(stream) else { return Err(Violation::StdinFromInit { handle: self.handle }) };
        let mut state = self.lock();
        if matches!(state.phase, Phase::Finishing | Phase::Ended(_)) {
            return Ok(()); // Said again on a new connection, while the result is being stored.
        }
        if offset + bytes.len() as u64 > state.end(log) {
            return Err(Violation::AfterEnd { handle: self.handle });
        }
        state.serial += 1;
        let serial = state.serial;
        let fresh = state.logs[log].receive(offset, bytes, serial)?;
        state.said[log] = state.said[log].max(offset + bytes.len() as u64);
        if !fresh {
            self.queue_ack(&mut state);
            return Ok(());
        }
        let short = state.logs.iter().all(StreamLog::is_short);
        let wait = short && !std::mem::replace(&mut state.waiting, true);
        let schedule = !short && !std::mem::replace(&mut state.writing, true);
        drop(state);
        self.changed.notify_waiters();
        if schedule {
            self.home.shared.logs.schedule(Arc::clone(self) as Arc<dyn Writes>);
        }
        if wait {
            let hub = Arc::downgrade(self);
            self.home.shared.runtime.spawn(async move {
                tokio::time::sleep(SHORT_PATIENCE).await;
                if let Some(hub) = hub.upgrade() {
                    hub.write_short();
                }
            });
        }
        Ok(())
    }

    /// Short output has waited for the end of its command long enough.
    fn write_short(self: &Arc<Self>) {
        let mut state = self.lock();
        state.waiting = false;
        let unstored = state.logs.iter().any(|log| !log.is_stored());
        let over = matches!(state.phase, Phase::Finishing | Phase::Ended(_));
        if unstored && !over && !std::mem::replace(&mut state.writing, true) {
            drop(state);
            self.home.shared.logs.schedule(Arc::clone(self) as Arc<dyn Writes>);
        }
    }

    /// The command is over.
    pub fn ended(self: &Arc<Self>, end: End, ends: [u64; 2]) -> Result<(), Violation> {
        self.set_ending(EndingKind::Guest(end), Some(ends))
    }

    /// The command did not start.
    pub fn failed_to_start(self: &Arc<Self>, error: StartError) -> Result<(), Violation> {
        self.set_ending(EndingKind::FailedToStart(clipped(error)), None)
    }

    fn set_ending(self: &Arc<Self>, what: EndingKind, ends: Option<[u64; 2]>) -> Result<(), Violation> {
        let mut state = self.lock();
        if state.ending.is_some() {
            return Ok(()); // Said again on a new connection. The first word counts.
        }
        let received = [state.logs[0].received(), state.logs[1].received()];
        let ends = ends.unwrap_or(received);
        for (log, end) in ends.into_iter().enumerate() {
            // Init holds a window of what was not acknowledged, so the end is not further away than that.
            let limit = state.logs[log].granted().saturating_add(OUTPUT_WINDOW as u64);
            if end < received[log] || end > limit {
                return Err(Violation::BadEnd { handle: self.handle, end, received: received[log] });
            }
        }
        state.ending = Some(Ending { what, ends });
        drop(state);
        self.finish_if_due();
        self.changed.notify_waiters();
        Ok(())
    }

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

    /// A new connection: init has the command and so much of its stdin. Tells where init should send on from.
    pub fn resume(self: &Arc<Self>, pid: Option<u32>, taken: u64) -> Result<ToInit, Violation> {
        let mut state = self.lock();
        if let (Some(known), Some(pid)) = (state.pid, pid)
            && known != pid
        {
            return Err(Violation::AnotherPid { handle: self.handle });
        }
        state.pid = state.pid.or(pid);
        let stdin = &mut state.stdin;
        if stdin.unknown {
            (stdin.given, stdin.base, stdin.sent, stdin.unknown) = (taken, taken, taken, false);
        } else if taken < stdin.base || taken > stdin.accepted() {
            return Err(Violation::BadStdinAck { handle: self.handle, offset: taken, sent: stdin.sent });
        } else {
            stdin.sent = taken;
            stdin.end_sent = false;
        }
        let lengths = [state.logs[0].granted(), state.logs[1].granted()];
        (state.acknowledged, state.said) = (lengths, lengths);
        drop(state);
        self.offer_stdin();
        self.changed.notify_waiters();
        Ok(ToInit::Resume { handle: self.handle, stdout: lengths[0], stderr: lengths[1] })
    }

    /// A new connection: init does not have the command, and is told again to start it.
    pub fn restart(self: &Arc<Self>) {
        let mut state = self.lock();
        let stdin = &mut state.stdin;
        (stdin.sent, stdin.end_sent, stdin.unknown) = (stdin.base, false, false);
        drop(state);
        self.offer_stdin();
    }

    /// Whether init has ever said that it has the command. Such a command is never started a second time.
    pub fn was_started(&self) -> bool {
        let state = self.lock();
        state.pid.is_some() || state.ending.is_some() || state.logs.iter().any(|log| log.received() > 0)
    }

    // What the link sends.

    /// Acknowledgements that init has not been told.
    pub fn take_acks(&self, mut put: impl FnMut(ToInit)) {
        let mut state = self.lock();
        state.ack_queued = false;
        if matches!(state.phase, Phase::Ended(_)) {
            return; // The result's acknowledgement covers everything.
        }
        for (log, stream) in STREAMS.into_iter().enumerate() {
            let offset = state.ack_due(log);
            if offset > state.acknowledged[log] {
                state.acknowledged[log] = offset;
                put(ToInit::Ack { handle: self.handle, stream, offset });
            }
        }
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
    fn offer_stdin(self: &Arc<Self>) {
        let mut state = self.lock();
        let stdin = &state.stdin;
        let window = stdin.given + STDIN_WINDOW as u64;
        let due = stdin.sent < stdin.accepted().min(window)
            || stdin.end.is_some_and(|end| end == stdin.sent && !stdin.end_sent);
        if !due || stdin.unknown || stdin.closed || state.stdin_queued {
            return;
        }
        state.stdin_queued = self.home.outbox.stdin(self);
    }

    /// The connection is gone, and the link's lists with it.
    pub fn unqueue(&self) {
        let mut state = self.lock();
        (state.ack_queued, state.stdin_queued) = (false, false);
    }

    // Retention.

    /// Lets the front fall off, frees memory, and grants acknowledgements unless a reader holds things up.
    /// The files are removed by whoever calls.
    fn settle(self: &Arc<Self>, state: &mut HubState, directory: &std::path::Path) -> Vec<PathBuf> {
        let mut files = Vec::new();
        let mut held = false;
        let over = state.ending.is_some();
        // What a finished command keeps is in its row, so it is settled for good.
        let finishing = !matches!(state.phase, Phase::Committed);
        for log in 0..STREAMS.len() {
            let floor = state.floor(log);
            let retired = if finishing {
                Retired::default()
            } else {
                state.logs[log].retire(directory, self.home.shared.config.output_kept_max, floor)
            };
            // When the command is over no more can come, so there is nobody to make wait.
            let must_wait = retired.held && !over;
            if !must_wait {
                state.logs[log].grant();
            }
            held |= must_wait;
            files.extend(retired.files);
            state.logs[log].trim(floor);
        }
        match (held, state.held_since) {
            (true, None) => state.held_since = Some(Instant::now()),
            (true, Some(_)) => {}
            (false, _) => state.held_since = None,
        }
        if held && !std::mem::replace(&mut state.watched, true) {
            let hub = Arc::clone(self);
            self.home.shared.runtime.spawn(async move { hub.watch_stalled().await });
        }
        self.queue_ack(state);
        files
    }

    /// Puts the command into the link's list if init may forget more than it was told.
    fn queue_ack(self: &Arc<Self>, state: &mut HubState) {
        // When the command is over, the result's acknowledgement covers everything.
        let due = (0..STREAMS.len()).any(|log| state.ack_due(log) > state.acknowledged[log]);
        if due && state.ending.is_none() && !state.ack_queued {
            state.ack_queued = self.home.outbox.ack(self);
        }
    }

    /// A reader moved or left: perhaps the front may fall off now. Files are removed by the log writers.
    fn reader_moved(self: &Arc<Self>, mut state: MutexGuard<'_, HubState>) {
        for log in 0..STREAMS.len() {
            let floor = state.floor(log);
            state.logs[log].trim(floor);
        }
        let schedule = state.held_since.is_some() && !std::mem::replace(&mut state.writing, true);
        drop(state);
        if schedule {
            self.home.shared.logs.schedule(Arc::clone(self) as Arc<dyn Writes>);
        }
    }

    /// While a reader holds the command up: lets go whoever has not moved for too long.
    async fn watch_stalled(self: Arc<Self>) {
        while let Some(soonest) = self.let_go_stalled() {
            tokio::time::sleep_until(soonest).await;
        }
    }

    /// Tells when to look again; `None` when nobody holds anything up.
    fn let_go_stalled(self: &Arc<Self>) -> Option<Instant> {
        let limit = Duration::from_secs(STALL_SECONDS);
        let kept_max = self.home.shared.config.output_kept_max;
        let now = Instant::now();
        let mut soonest = now + limit;
        let mut let_go = 0;
        let mut state = self.lock();
        let Some(since) = state.held_since else {
            state.watched = false;
            return None;
        };
        let HubState { logs, readers, .. } = &mut *state;
        for reader in readers.values_mut().filter(|reader| !reader.let_go) {
            let holds = logs.iter().zip(reader.at).any(|(log, at)| log.is_held_by(at, kept_max));
            let deadline = reader.moved.max(since) + limit;
            if holds && deadline <= now {
                reader.let_go = true;
                let_go += 1;
            } else if holds {
                soonest = soonest.min(deadline);
            }
        }
        if let_go > 0 {
            warn!(sandbox = %self.home.id, command = %self.id, readers = let_go,
                "readers that held up a command for {STALL_SECONDS} s were let go");
            self.reader_moved(state);
            self.changed.notify_waiters();
        }
        Some(soonest)
    }

    // The end.

    /// If the end has come and all output is on disk, or short enough for the row, sends the result to the store.
    fn finish_if_due(self: &Arc<Self>) {
        let mut state = self.lock();
        let Some(ending) = &state.ending else { return };
        let stored = (0..STREAMS.len())
            .all(|log| state.logs[log].is_kept() && state.logs[log].received() >= ending.ends[log]);
        if !stored || state.writing || !matches!(state.phase, Phase::Committed) {
            return;
        }
        let what = ending.what.clone();
        let spans = [state.logs[0].span(), state.logs[1].span()];
        let pid = state.pid;
        let bytes = [state.logs[0].short(), state.logs[1].short()];
        state.phase = Phase::Finishing;
        drop(state);
        let result = move |outcome| ResultRow {
            ended_at: crate::now(),
            pid,
            outcome,
            stdout: spans[0],
            stderr: spans[1],
            bytes,
        };
        match what {
            EndingKind::SandboxGone => self.commit_result(result(Outcome::SandboxGone), None),
            EndingKind::FailedToStart(error) => {
                self.commit_result(result(Outcome::FailedToStart(error)), None)
            }
            EndingKind::Guest(end) if may_be_out_of_memory(end) => {
                let hub = Arc::clone(self);
                self.home.shared.runtime.spawn(async move {
                    let (outcome, kills) = hub.outcome_of_kill(end).await;
                    hub.commit_result(result(outcome), kills);
                });
            }
            EndingKind::Guest(end) => self.commit_result(result(outcome(end)), None),
        }
    }

    /// Whether memory ran out is read on the host: init cannot be trusted to tell, and need not know.
    async fn outcome_of_kill(&self, end: End) -> (Outcome, Option<u64>) {
        let backend = &self.home.shared.backend;
        let asked = tokio::time::timeout(Duration::from_secs(OOM_SECONDS), backend.oom_kills(self.home.id));
        match asked.await {
            Ok(Ok(count)) if self.home.oom_kills_grown_to(count) => {
                (Outcome::OutOfMemory(end.status), Some(count))
            }
            Ok(Ok(_)) => (outcome(end), None),
            Ok(Err(error)) => {
                warn!(sandbox = %self.home.id, command = %self.id, error = chain(&error),
                    "cannot tell whether memory ran out");
                (outcome(end), None)
            }
            Err(_) => {
                warn!(sandbox = %self.home.id, command = %self.id, "cannot tell in time whether memory ran out");
                (outcome(end), None)
            }
        }
    }

    fn commit_result(self: &Arc<Self>, result: ResultRow, oom_kills: Option<u64>) {
        let hub = Arc::clone(self);
        let row = result.clone();
        let done = move |committed: Result<(), StoreError>| match committed {
            Ok(()) => hub.result_committed(result),
            Err(StoreError::Closed) => {} // Init keeps the result for the next daemon.
            Err(error) => {
                error!(sandbox = %hub.home.id, command = %hub.id, error = chain(&error),
                    "cannot store a result; it is tried again");
                let runtime = hub.home.shared.runtime.clone();
                runtime.spawn(async move {
                    tokio::time::sleep(RESULT_RETRY).await;
                    hub.commit_result(result, oom_kills);
                });
            }
        };
        self.home.shared.store.end_command(self.home.id, self.handle, row, oom_kills, done);
    }

    fn result_committed(self: &Arc<Self>, result: ResultRow) {
        let bytes = (result.stdout.end - result.stdout.start) + (result.stderr.end - result.stderr.start);
        self.lock().phase = Phase::Ended(Box::new(result));
        self.home.command_ended(self, bytes);
        self.home.outbox.acknowledge_result(self.handle);
        self.changed.notify_waiters();
        debug!(sandbox = %self.home.id, command = %self.id, "command ended");
    }

    /// The sandbox ended under it. Its result is stored as such.
    pub fn sandbox_gone(self: &Arc<Self>) {
        let mut state = self.lock();
        let ends = [state.logs[0].received(), state.logs[1].received()];
        // An end that came without all of its output will not get the rest.
        let complete = state.ending.as_ref().is_some_and(|ending| ending.ends == ends);
        if !complete {
            state.ending = Some(Ending { what: EndingKind::SandboxGone, ends });
        }
        drop(state);
        self.finish_if_due();
        self.changed.notify_waiters();
    }

    /// The sandbox is being deleted, rows and logs included: the command ends in memory alone.
    /// Returns when no thread touches its logs any more.
    pub async fn deleted(&self) {
        self.end_in_memory();
        self.changed.notify_waiters();
        self.until(|state| if state.writing { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
            .await;
    }

    fn end_in_memory(&self) {
        let mut state = self.lock();
        if matches!(state.phase, Phase::Ended(_)) {
            return;
        }
        let spans = [state.logs[0].span(), state.logs[1].span()];
        state.ending = Some(Ending { what: EndingKind::SandboxGone, ends: spans.map(|span| span.end) });
        state.phase = Phase::Ended(Box::new(ResultRow {
            ended_at: crate::now(),
            pid: state.pid,
            outcome: Outcome::SandboxGone,
            stdout: spans[0],
            stderr: spans[1],
            bytes: [None, None],
        }));
    }

    /// As it is now.
    pub fn now(&self) -> Command {
        self.describe(&self.lock())
    }

    fn describe(&self, state: &HubState) -> Command {
        let mut spans = [state.logs[0].span(), state.logs[1].span()];
        let (command_state, ended_at) = match &state.phase {
            Phase::Ended(result) => {
                spans = [result.stdout, result.stderr];
                let outcome = result.outcome.clone();
                (CommandState::Ended { pid: result.pid, outcome }, Some(result.ended_at))
            }
            Phase::Intended | Phase::Refused(_) | Phase::Committed | Phase::Finishing => match state.pid {
                Some(pid) => (CommandState::Running { pid }, None),
                None => (CommandState::Starting, None),
            },
        };
        Command {
            id: self.id.clone(),
            sandbox: self.home.id,
            state: command_state,
            start: Arc::clone(&self.start),
            stdout: spans[0],
            stderr: spans[1],
            created_at: self.created_at,
            ended_at,
        }
    }
}

impl Writes for Hub {
    fn write_pass(self: Arc<Self>) -> Again {
        let directory = self.directory();
        let appends = {
            let mut state = self.lock();
            if matches!(state.phase, Phase::Ended(_)) {
                state.writing = false;
                drop(state);
                self.changed.notify_waiters();
                return Again::Done;
            }
            [state.logs[0].unstored(), state.logs[1].unstored()]
        };
        let segment_max = crate::log::segment_max(self.home.shared.config.output_kept_max);
        let mut refused = None;
        let written = appends.map(|append| match append?.write(&directory, segment_max) {
            Ok(written) => Some(written),
            Err(error) => {
                refused = Some(error);
                None
            }
        });
        let mut state = self.lock();
        for (log, written) in written.into_iter().enumerate() {
            if let Some(written) = written {
                state.logs[log].record(written);
            }
        }
        let files = self.settle(&mut state, &directory);
        let more = state.logs.iter().any(|log| !log.is_stored());
        let reported = std::mem::replace(&mut state.disk_refused, refused.is_some());
        state.writing = more;
        drop(state);
        for file in files {
            if let Err(error) = std::fs::remove_file(&file) {
                warn!(sandbox = %self.home.id, command = %self.id, file = %file.display(), %error,
                    "cannot remove old output");
            }
        }
        self.finish_if_due();
        self.changed.notify_waiters();
        match refused {
            Some(error) => {
                if !reported {
                    error!(sandbox = %self.home.id, command = %self.id, %error,
                        "cannot store output; the command waits and it is tried again");
                }
                Again::Later
            }
            None if more => Again::Now,
            None => Again::Done,
        }
    }
}

/// What [`Hub::take_stdin`] found.
pub(crate) struct StdinTaken {
    pub offset: u64,
    pub bytes: Vec<u8>,
    /// Stdin ends here.
    pub end: Option<u64>,
    pub more: bool,
}

fn outcome(end: End) -> Outcome {
    match (end.cause, end.status) {
        (EndCause::Itself, ExitStatus::Code(code)) => Outcome::Exited(code),
        (EndCause::Itself, ExitStatus::Signal(signal)) => Outcome::Signaled(signal),
        (EndCause::Timeout, status) => Outcome::TimedOut(status),
        (EndCause::IdleTimeout, status) => Outcome::IdleTimedOut(status),
        (EndCause::Killed, status) => Outcome::Killed(status),
    }
}

/// The kernel ends whoever it chooses with SIGKILL; a shell says 137 when that was its child.
fn may_be_out_of_memory(end: End) -> bool {
    const SIGKILL: i32 = 9;
    const SHELL_SIGKILL: i32 = 128 + SIGKILL;
    end.cause == EndCause::Itself
        && matches!(end.status, ExitStatus::Signal(SIGKILL) | ExitStatus::Code(SHELL_SIGKILL))
}

/// Words of init end up in rows and answers, so they are kept short.
fn clipped(error: StartError) -> StartError {
    let clip = |mut text: String| {
        if text.len() > START_ERROR_TEXT_MAX {
            let end = (0..=START_ERROR_TEXT_MAX).rev().find(|at| text.is_char_boundary(*at));
            text.truncate(end.unwrap_or(0));
        }
        text
    };
    match error {
        StartError::ProgramNotFound { program } => StartError::ProgramNotFound { program: clip(program) },
        StartError::NotExecutable { program, reason } => {
            StartError::NotExecutable { program: clip(program), reason: clip(reason) }
        }
        StartError::ArgumentsTooLong => StartError::ArgumentsTooLong,
        StartError::BadCwd { path, reason } => StartError::BadCwd { path: clip(path), reason: clip(reason) },
        StartError::UnknownUser { user } => StartError::UnknownUser { user: clip(user) },
        StartError::NulByte { what } => StartError::NulByte { what: clip(what) },
        StartError::NoRoom { reason } => StartError::NoRoom { reason: clip(reason) },
    }
}

/// A command that can be watched and acted on. Holding it keeps nothing alive but memory.
#[derive(Clone)]
pub struct CommandRef {
    pub(crate) hub: Arc<Hub>,
}

impl CommandRef {
    /// As it is now.
    pub fn now(&self) -> Command {
        self.hub.now()
    }

    /// When it is over.
    pub async fn ended(&self) -> Command {
        let over = |state: &mut HubState| match state.phase {
            Phase::Ended(_) => ControlFlow::Break(()),
            Phase::Intended | Phase::Refused(_) | Phase::Committed | Phase::Finishing => {
                ControlFlow::Continue(())
            }
        };
        self.hub.until(over).await;
        self.hub.now()
    }

    /// Output from these offsets on, live, until the end. While one is attached and makes progress, what it has not yet
    /// read does not fall off the front; the command is made to wait instead.
    pub fn attach(&self, from: Offsets) -> Output {
        let mut state = self.hub.lock();
        let reader = state.reader_next;
        state.reader_next += 1;
        let at = [from.stdout, from.stderr];
        state.readers.insert(reader, Reader { at, moved: Instant::now(), let_go: false });
        drop(state);
        Output {
            hub: Arc::clone(&self.hub),
            reader,
            ahead: [Bytes::new(), Bytes::new()],
            started: false,
            stdin_given: None,
            turn: 0,
            over: false,
        }
    }

    /// All output that is kept now, at most `limit` bytes of each stream from where it begins.
    pub async fn output(&self, limit: usize) -> Result<Gathered, EngineError> {
        let reading = self.attach(Offsets::default());
        let spans = {
            let state = self.hub.lock();
            [state.logs[0].span(), state.logs[1].span()]
        };
        let mut all = [Vec::new(), Vec::new()];
        let mut cut = [false, false];
        for log in 0..STREAMS.len() {
            let Span { start, end } = spans[log];
            let until = end.min(start.saturating_add(limit as u64));
            cut[log] = start > 0 || until < end;
            let mut at = start;
            while at < until {
                let next = self.hub.lock().logs[log].next(&self.hub.directory(), at, until);
                let bytes = match next {
                    Next::Memory(bytes, _) => bytes,
                    Next::File(plan) => self.read_file(plan).await?,
                    Next::Lost(to) => {
                        cut[log] = true;
                        at = to;
                        continue;
                    }
                    Next::Nothing => break,
                };
                at += bytes.len() as u64;
                all[log].extend_from_slice(&bytes);
            }
        }
        drop(reading);
        let [stdout, stderr] = all;
        Ok(Gathered { stdout, stdout_cut: cut[0], stderr, stderr_cut: cut[1] })
    }

    async fn read_file(&self, plan: crate::log::ReadPlan) -> Result<Bytes, EngineError> {
        let read = tokio::task::spawn_blocking(move || plan.read()).await;
        let read = read.unwrap_or_else(|error| Err(std::io::Error::other(error)));
        read.map_err(|source| EngineError::Log { doing: "read", id: self.hub.id.clone(), source })
    }

    /// Hands bytes to stdin; waits while the command's window is full, at most [`STDIN_SECONDS`].
    /// `at`: where they begin, so that a retry writes once; `None` appends.
    /// Answers with the length of stdin so far.
    ///
    /// What was handed over is in the daemon's memory until [`OutputEvent::StdinAck`] covers it. A caller that must
    /// survive the daemon's death keeps what is not covered, and says it again with `at`.
    pub async fn write_stdin(&self, at: Option<u64>, bytes: Bytes) -> Result<u64, EngineError> {
        let deadline = Instant::now() + Duration::from_secs(STDIN_SECONDS);
        let mut at = at;
        let mut rest = bytes;
        let whole = async {
            loop {
                let step = self.hub.until(|state| self.take_input(state, &mut at, &mut rest)).await;
                self.hub.offer_stdin();
                if let Some(result) = step {
                    return result;
                }
            }
        };
        let late = |_| EngineError::StdinStalled { id: self.hub.id.clone() };
        timeout_at(deadline, whole).await.map_err(late)?
    }

    /// Moves what fits into the window. Breaks with `None` when more is left.
    #[allow(clippy::type_complexity)] // Only `write_stdin` sees it.
    fn take_input(
        &self,
        state: &mut HubState,
        at: &mut Option<u64>,
        rest: &mut Bytes,
    ) -> ControlFlow<Option<Result<u64, EngineError>>> {
        if let Err(error) = self.takes_input(state) {
            return ControlFlow::Break(Some(Err(error)));
        }
        if state.stdin.unknown {
            return ControlFlow::Continue(());
        }
        let accepted = state.stdin.accepted();
        if let Some(from) = at.take() {
            if from > accepted {
                let why = format!("it is {from}, but only {accepted} bytes have come");
                return ControlFlow::Break(Some(Err(EngineError::Invalid { what: "stdin offset", why })));
            }
            // What came before is not written twice.
            let again = usize::try_from(accepted - from).unwrap_or(usize::MAX).min(rest.len());
            let _ = rest.split_to(again);
        }
        if rest.is_empty() {
            return ControlFlow::Break(Some(Ok(accepted)));
        }
        let fits = usize::try_from(state.stdin.room()).unwrap_or(usize::MAX).min(rest.len());
        if fits == 0 {
            return ControlFlow::Continue(());
        }
        state.stdin.buffer.extend(rest.split_to(fits).iter());
        ControlFlow::Break(rest.is_empty().then(|| Ok(state.stdin.accepted())))
    }

    fn takes_input(&self, state: &HubState) -> Result<(), EngineError> {
        if state.ending.is_some() {
            return Err(EngineError::CommandEnded { id: self.hub.id.clone() });
        }
        if state.stdin.closed || state.stdin.end.is_some() {
            return Err(EngineError::StdinClosed { id: self.hub.id.clone() });
        }
        Ok(())
    }

    /// No more stdin. Answers when init knows; asking twice is harmless.
    pub async fn end_stdin(&self) -> Result<(), EngineError> {
        let deadline = Instant::now() + Duration::from_secs(STDIN_SECONDS);
        let stalled = |_| EngineError::StdinStalled { id: self.hub.id.clone() };
        let set = self.hub.until(|state| {
            if state.stdin.closed || state.stdin.end.is_some() {
                // It has no input, or gets no more: the wish is already true.
                return ControlFlow::Break(Ok(()));
            }
            if state.ending.is_some() {
                return ControlFlow::Break(Err(EngineError::CommandEnded { id: self.hub.id.clone() }));
            }
            if state.stdin.unknown {
                return ControlFlow::Continue(());
            }
            let end = state.stdin.accepted();
            state.stdin.end.get_or_insert(end);
            ControlFlow::Break(Ok(()))
        });
        timeout_at(deadline, set).await.map_err(stalled)??;
        self.hub.offer_stdin();
        let sent = self.hub.until(|state| {
            let done = state.stdin.end_sent || state.stdin.closed || state.ending.is_some();
            if done { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        timeout_at(deadline, sent).await.map_err(stalled)?;
        // The link sends it again on a new connection, so an answer to any later word shows that init has it.
        match self.request(None, Resend::Yes).await {
            Err(EngineError::CommandEnded { .. }) => Ok(()),
            result => result,
        }
    }

    /// Signals the command's process group. If the connection to init breaks at this moment, it is not known whether the
    /// signal was sent; it is not sent twice, and the answer is [`EngineError::Unresponsive`].
    pub async fn signal(&self, signal: Signal) -> Result<(), EngineError> {
        let message = ToInit::Signal { handle: self.hub.handle, signal: signal.number() };
        self.request(Some(message), Resend::No).await
    }

    /// Ends the command's whole tree at once. Answers when init has been told; the end itself comes as a result.
    pub async fn kill(&self) -> Result<(), EngineError> {
        self.request(Some(ToInit::Kill { handle: self.hub.handle }), Resend::Yes).await
    }

    /// Gives the command's terminal a new size.
    pub async fn resize(&self, rows: u16, columns: u16) -> Result<(), EngineError> {
        if self.hub.start.terminal.is_none() {
            return Err(EngineError::NoTerminal { id: self.hub.id.clone() });
        }
        let size = TerminalSize { rows, columns };
        self.request(Some(ToInit::Resize { handle: self.hub.handle, size }), Resend::Yes).await
    }

    /// Says something to init and waits until it has read it.
    async fn request(&self, message: Option<ToInit>, resend: Resend) -> Result<(), EngineError> {
        let deadline = Instant::now() + Duration::from_secs(ANSWER_SECONDS);
        let unresponsive = || EngineError::Unresponsive { id: self.hub.home.id };
        loop {
            if self.hub.lock().ending.is_some() {
                return Err(EngineError::CommandEnded { id: self.hub.id.clone() });
            }
            let said = timeout_at(deadline, self.hub.home.outbox.say(message.clone()));
            let ended = async {
                let over = |state: &mut HubState| {
                    if state.ending.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
                };
                self.hub.until(over).await;
            };
            let said = tokio::select! {
                biased;
                said = said => said.map_err(|_| unresponsive())?,
                () = ended => return Ok(()),
            };
            match (said, resend) {
                (Ok(()), _) => return Ok(()),
                (Err(crate::guest::Unsaid::Broken), Resend::Yes) => {}
                (Err(crate::guest::Unsaid::Broken), Resend::No) => return Err(unresponsive()),
                (Err(crate::guest::Unsaid::TooMany), _) => return Err(unresponsive()),
            }
        }
    }
}

/// Whether a request may be made twice.
#[derive(Clone, Copy)]
enum Resend {
    Yes,
    No,
}

/// A command's output as it comes. Dropping it lets the front fall off again.
pub struct Output {
    hub: Arc<Hub>,
    reader: u64,
    /// Read from files, not yet handed out.
    ahead: [Bytes; 2],
    started: bool,
    stdin_given: Option<u64>,
    /// Which stream comes first when both are old: they take turns.
    turn: usize,
    over: bool,
}

/// What a reader does next.
enum Step {
    Give(OutputEvent),
    Read(usize, crate::log::ReadPlan),
    Leave(OutputEvent),
}

impl Output {
    /// The next thing. After [`OutputEvent::Ended`] or [`OutputEvent::Stalled`] comes nothing more (`None`).
    /// At most 64 KiB of a stream at once. Cancel-safe.
    pub async fn next(&mut self) -> Option<OutputEvent> {
        if self.over {
            return None;
        }
        loop {
            let hub = Arc::clone(&self.hub);
            let step = hub.until(|state| self.step(state)).await;
            match step {
                Step::Give(event) => {
                    if matches!(event, OutputEvent::Bytes { .. } | OutputEvent::Lost { .. }) {
                        hub.reader_moved(hub.lock());
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
                        Err(error) => return Some(self.unreadable(log, &error)),
                    }
                }
            }
        }
    }

    fn step(&mut self, state: &mut HubState) -> ControlFlow<Step> {
        let give = |event| ControlFlow::Break(Step::Give(event));
        let Some(reader) = state.readers.get(&self.reader).filter(|reader| !reader.let_go) else {
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
        let directory = self.hub.directory();
        let next = |log: usize| state.logs[log].next(&directory, at[log], state.end(log));
        let first = self.turn;
        let second = 1 - first;
        let (log, next) = match (next(first), next(second)) {
            (Next::Nothing, Next::Nothing) => return self.step_idle(state),
            (Next::Nothing, other) => (second, other),
            (own, Next::Nothing) => (first, own),
            // Both in memory: in the order they came. Otherwise they take turns, since files do not tell the order.
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

    /// Nothing to read: stdin's acknowledgements, and the end.
    fn step_idle(&mut self, state: &mut HubState) -> ControlFlow<Step> {
        let given = state.stdin.given;
        if self.hub.start.stdin && !state.stdin.unknown && self.stdin_given != Some(given) {
            let first = self.stdin_given.replace(given).is_none();
            if !(first && given == 0) {
                return ControlFlow::Break(Step::Give(OutputEvent::StdinAck { offset: given }));
            }
        }
        match state.phase {
            Phase::Ended(_) => {
                ControlFlow::Break(Step::Leave(OutputEvent::Ended(Box::new(self.hub.describe(state)))))
            }
            Phase::Intended | Phase::Refused(_) | Phase::Committed | Phase::Finishing => {
                ControlFlow::Continue(())
            }
        }
    }

    fn take_ahead(&mut self, state: &mut HubState) -> Option<OutputEvent> {
        let log = [self.turn, 1 - self.turn].into_iter().find(|log| !self.ahead[*log].is_empty())?;
        let bytes = std::mem::take(&mut self.ahead[log]);
        Some(self.hand_out(state, log, bytes))
    }

    /// Hands out a chunk of `bytes` and keeps the rest for the next time.
    fn hand_out(&mut self, state: &mut HubState, log: usize, mut bytes: Bytes) -> OutputEvent {
        let offset = state.readers[&self.reader].at[log];
        let chunk = bytes.split_to(bytes.len().min(CHUNK_MAX));
        self.ahead[log] = bytes;
        self.move_to(state, log, offset + chunk.len() as u64);
        OutputEvent::Bytes { stream: STREAMS[log], offset, bytes: chunk }
    }

    fn move_to(&self, state: &mut HubState, log: usize, at: u64) {
        if let Some(reader) = state.readers.get_mut(&self.reader) {
            reader.at[log] = at;
            reader.moved = Instant::now();
        }
    }

    /// A log that cannot be read is reported as lost: what is not there cannot be waited for.
    fn unreadable(&mut self, log: usize, error: &std::io::Error) -> OutputEvent {
        error!(sandbox = %self.hub.home.id, command = %self.hub.id, %error, "cannot read stored output");
        let mut state = self.hub.lock();
        let from = state.readers.get(&self.reader).map_or(0, |reader| reader.at[log]);
        let to = state.logs[log].received();
        self.move_to(&mut state, log, to);
        OutputEvent::Lost { stream: STREAMS[log], from, to }
    }

    fn leave(&mut self) {
        if std::mem::replace(&mut self.over, true) {
            return;
        }
        let mut state = self.hub.lock();
        state.readers.remove(&self.reader);
        self.hub.reader_moved(state);
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        self.leave();
    }
}
