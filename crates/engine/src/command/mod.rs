//! One command: its streams, its result, and everyone who watches it.
//!
//! A [`LiveCommand`] is where the link to init, the threads that write logs, and callers meet. Its lock is held for moments and
//! never over a wait. The order of things is: the row of the intent is committed, init is told, bytes come and are
//! handed to readers and to the disk, init hears what is on disk, the result comes, and when all output is on disk the
//! result is committed; only then do callers see the end, and init may forget the command.
//!
//! Readers that are attached hold back retention. When too much is kept for their sake, init is not told that bytes are
//! stored, so that the command waits at its full pipe; a reader that holds things up and does not move is let go.

mod attendance;
mod caller;
mod calls;
mod finish;
pub(crate) mod host_timeouts;
mod lane;
pub(crate) mod log;
mod output;
mod retention;
pub(crate) mod start;
mod stdin;
pub mod text;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};
use wire::CommandId;
use wire::guest::{Handle, STDIN_WINDOW, Start, Stream, ToInit};

use crate::command::log::StreamLog;
use crate::db::{CommandRow, Inserted, ResultRow};
use crate::error::{DbError, EngineError};
use crate::guest::Violation;
use crate::model::{Command, CommandState};
use crate::observe::events::Happened;
use crate::sandbox::live::LiveSandbox;

use finish::{Ending, EndingKind};
use stdin::Stdin;

pub use crate::model::attendance::Attendance;
pub use caller::CommandRef;
pub use output::Output;

/// How long a reader may hold up a command without taking anything.
pub const STALL_SECONDS: u64 = 30;
/// How long one request waits for init: a start, a signal, a kill.
pub const ANSWER_SECONDS: u64 = 10;
/// How long a write to stdin waits for the command to read.
pub const STDIN_SECONDS: u64 = 30;
/// More than anyone can have written. What init says of stdin is counted on from, and must not run over.
const STDIN_LENGTH_MAX: u64 = 1 << 60;
/// In the order of every array of both.
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
pub(crate) struct LiveCommand {
    pub live: Arc<LiveSandbox>,
    pub id: CommandId,
    pub handle: Handle,
    pub start: Arc<Start>,
    pub request_digest: [u8; 32],
    pub created_at: SystemTime,
    pub attendance: Attendance,
    /// The sandbox's memory kills when it began, where that is known.
    oom_kills_before: Option<u64>,
    state: Mutex<LiveCommandState>,
    /// Told whenever something changed that someone may wait for.
    changed: Notify,
}

struct LiveCommandState {
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
    /// The host has ended it at its timeout, because init had not.
    struck: bool,
    /// A pass of the log writers is under way or queued.
    writing: bool,
    /// A little output waits for more, or for the end of the command, before it is written.
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
    /// The result is on its way to the store. It is here if callers may have it already: if this daemon died now, init would tell
    /// the next one the same again.
    Finishing(Option<Box<ResultRow>>),
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
    Store(Arc<DbError>),
}

struct Reader {
    at: [u64; 2],
    moved: Instant,
    let_go: bool,
}

impl LiveCommandState {
    /// The first offset of a stream that an attached reader still wants.
    fn floor(&self, log: usize) -> Option<u64> {
        self.readers.values().filter(|reader| !reader.let_go).map(|reader| reader.at[log]).min()
    }

    /// What init may be told of a stream.
    fn ack_due(&self, log: usize) -> u64 {
        self.logs[log].granted().min(self.said[log])
    }

    /// The result, once callers may have it.
    fn result(&self) -> Option<&ResultRow> {
        match &self.phase {
            Phase::Ended(result) => Some(result),
            Phase::Finishing(told) => told.as_deref(),
            Phase::Intended | Phase::Refused(_) | Phase::Committed => None,
        }
    }

    /// The end of a stream for readers: where it ended, if it has.
    fn end(&self, log: usize) -> u64 {
        self.ending.as_ref().map_or(u64::MAX, |ending| ending.ends[log])
    }
}

impl LiveCommand {
    /// A command that is about to get its row.
    pub fn intended(
        live: &Arc<LiveSandbox>,
        id: CommandId,
        start: Start,
        request_digest: [u8; 32],
        oom_kills_before: Option<u64>,
        attendance: Attendance,
    ) -> Arc<Self> {
        let row = CommandRow {
            sandbox: live.id,
            handle: start.handle,
            id,
            request_digest,
            start,
            created_at: crate::observe::clock::now(),
            oom_kills_before,
            attendance,
            result: None,
        };
        let stdin = Stdin { closed: !row.start.stdin, ..Stdin::default() };
        Self::new(live, row, Phase::Intended, STREAMS.map(StreamLog::new), stdin)
    }

    /// A command that a row and the files on disk tell of. Blocks.
    pub fn recovered(live: &Arc<LiveSandbox>, mut row: CommandRow) -> std::io::Result<Arc<Self>> {
        let directory = live.command_directory(row.handle);
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
        let phase = match row.result.take() {
            Some(result) => Phase::Ended(Box::new(result)),
            None => Phase::Committed,
        };
        let hub = Self::new(live, row, phase, logs, stdin);
        hub.lock().pid = pid;
        if let Some(spans) = spans {
            let ends = spans.map(|span| span.end);
            hub.lock().ending = Some(Ending { what: EndingKind::SandboxGone, ends });
        }
        Ok(hub)
    }

    fn new(
        live: &Arc<LiveSandbox>,
        row: CommandRow,
        phase: Phase,
        logs: [StreamLog; 2],
        stdin: Stdin,
    ) -> Arc<Self> {
        let acknowledged = [logs[0].granted(), logs[1].granted()];
        let state = LiveCommandState {
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
            struck: false,
            writing: false,
            waiting: false,
            acknowledged,
            said: [0, 0],
            ack_queued: false,
            stdin_queued: false,
            disk_refused: false,
        };
        Arc::new(Self {
            live: Arc::clone(live),
            id: row.id,
            handle: row.handle,
            start: Arc::new(row.start),
            request_digest: row.request_digest,
            created_at: row.created_at,
            attendance: row.attendance,
            oom_kills_before: row.oom_kills_before,
            state: Mutex::new(state),
            changed: Notify::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, LiveCommandState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn directory(&self) -> PathBuf {
        self.live.command_directory(self.handle)
    }

    /// Waits until `check` breaks.
    async fn until<T>(&self, mut check: impl FnMut(&mut LiveCommandState) -> ControlFlow<T>) -> T {
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
            sandbox: self.live.id,
            handle: self.handle,
            id: self.id.clone(),
            request_digest: self.request_digest,
            start: Start::clone(&self.start),
            created_at: self.created_at,
            oom_kills_before: self.oom_kills_before,
            attendance: self.attendance,
            result: None,
        };
        let hub = Arc::clone(self);
        self.live.shared.db.insert_command(row, move |inserted| hub.intent_answered(inserted));
    }

    fn intent_answered(self: &Arc<Self>, inserted: Result<Inserted, DbError>) {
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
            self.live.forget_command(self);
        } else {
            self.live.outbox.start(Arc::clone(self) as Arc<dyn crate::guest::Lane>);
            self.finish_if_due(); // The sandbox may have failed meanwhile.
        }
        self.changed.notify_waiters();
    }

    /// Waits until it is known whether the row was written.
    pub async fn committed(&self) -> Result<(), Refusal> {
        self.until(|state| match &state.phase {
            Phase::Intended => ControlFlow::Continue(()),
            Phase::Refused(refusal) => ControlFlow::Break(Err(refusal.clone())),
            Phase::Committed | Phase::Finishing(_) | Phase::Ended(_) => ControlFlow::Break(Ok(())),
        })
        .await
    }

    /// Whether init may be told to start it.
    pub fn is_committed(&self) -> bool {
        matches!(self.lock().phase, Phase::Committed | Phase::Finishing(_))
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
            self.live.outbox.abandon(self.handle);
        }
        Err(EngineError::Unresponsive { id: self.live.id })
    }

    // What init says. Untrusted.

    /// The command runs.
    pub fn started(self: &Arc<Self>, pid: u32) -> Result<(), Violation> {
        let mut state = self.lock();
        match state.pid {
            Some(known) if known != pid => return Err(Violation::AnotherPid { handle: self.handle }),
            Some(_) => return Ok(()),
            None => state.pid = Some(pid),
        }
        drop(state);
        self.live.backstop.arm(&self.live, &self.start);
        self.expect_someone();
        self.live.tell(Happened::CommandStarted { command: self.id.clone(), pid });
        self.changed.notify_waiters();
        Ok(())
    }

    /// Bytes of a stream.
    pub fn receive(self: &Arc<Self>, stream: Stream, offset: u64, bytes: &[u8]) -> Result<(), Violation> {
        let Some(log) = index(stream) else { return Err(Violation::StdinFromInit { handle: self.handle }) };
        let mut state = self.lock();
        if matches!(state.phase, Phase::Finishing(_) | Phase::Ended(_)) {
            return Ok(()); // Said again on a new connection, while the result is being stored.
        }
        let end = offset + bytes.len() as u64;
        if end > state.end(log) {
            return Err(Violation::AfterEnd { handle: self.handle });
        }
        state.serial += 1;
        let serial = state.serial;
        let fresh = state.logs[log].receive(offset, bytes, serial)?;
        state.said[log] = state.said[log].max(end);
        if !fresh {
            self.queue_ack(&mut state);
            return Ok(());
        }
        self.live.shared.metrics.received(stream, bytes.len());
        self.changed.notify_waiters();
        self.store_when_due(state);
        Ok(())
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
        if state.pid.is_some() && state.ending.is_none() {
            self.live.backstop.arm(&self.live, &self.start);
            self.expect_someone_from(&state);
        }
        let stdin = &mut state.stdin;
        if taken > STDIN_LENGTH_MAX {
            return Err(Violation::BadStdinAck { handle: self.handle, offset: taken, sent: stdin.sent });
        }
        if stdin.unknown {
            // Of what init holds, the command has been given all but a window at least. Init says more in a moment.
            let given = taken.saturating_sub(STDIN_WINDOW as u64);
            (stdin.given, stdin.base, stdin.sent, stdin.unknown) = (given, taken, taken, false);
        } else if stdin.closed {
            stdin.sent = stdin.sent.max(taken); // Nothing more is sent, so the two need not be in step.
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

    /// The connection is gone, and the link's lists with it.
    pub fn unqueue(&self) {
        let mut state = self.lock();
        (state.ack_queued, state.stdin_queued) = (false, false);
    }

    /// As it is now.
    pub fn now(&self) -> Command {
        self.describe(&self.lock())
    }

    fn describe(&self, state: &LiveCommandState) -> Command {
        let mut spans = [state.logs[0].span(), state.logs[1].span()];
        let (command_state, ended_at) = match state.result() {
            Some(result) => {
                spans = [result.stdout, result.stderr];
                let outcome = result.outcome.clone();
                (CommandState::Ended { pid: result.pid, outcome }, Some(result.ended_at))
            }
            None => match state.pid {
                Some(pid) => (CommandState::Running { pid }, None),
                None => (CommandState::Starting, None),
            },
        };
        Command {
            id: self.id.clone(),
            sandbox: self.live.id,
            state: command_state,
            start: Arc::clone(&self.start),
            stdout: spans[0],
            stderr: spans[1],
            created_at: self.created_at,
            ended_at,
        }
    }
}
