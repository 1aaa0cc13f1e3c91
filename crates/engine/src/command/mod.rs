//! One command: its streams, its result, and its readers.
//!
//! A [`LiveCommand`] connects the link to init, the threads that write logs, and callers. Its lock is held briefly and
//! never across a wait. The order of events is: the row of the intent is committed, init gets the command, bytes arrive
//! and go to readers and to the disk, init gets acknowledgements for bytes that are on disk, the result arrives, and
//! once all output is on disk the result is committed; only then do callers see the end, and may init forget the
//! command.
//!
//! Attached readers delay the dropping of old output. When too much is kept for them, the daemon stops acknowledging,
//! so that the command blocks on its full pipe; a reader that causes this and makes no progress is dropped.

mod attendance;
pub(crate) mod budget;
mod caller;
pub(crate) mod calls;
mod digest;
mod finish;
pub(crate) mod host_timeouts;
pub(crate) mod log;
mod output;
mod registry;
mod retention;
mod sink;
pub(crate) mod start;
pub mod text;

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, timeout_at};
use wire::CommandId;
use wire::guest::{End, Handle, Start, StartError, Stream};

use crate::command::log::StreamLog;
use crate::db::{CommandRow, Inserted};
use crate::error::{DbError, EngineError};
use crate::guest::{AnyLane, Carrier, Guest, Lane, STREAMS, Stdin, Violation};
use crate::model::{Command, CommandState};
use crate::observe::events::Happened;

use finish::{Ending, EndingKind};
use registry::Wish;
use sink::{LogSink, Phase, State};

pub use crate::guest::ANSWER_SECONDS;
pub use crate::model::attendance::Attendance;
pub use caller::CommandRef;
pub(crate) use calls::Saved;
pub use output::Output;
pub(crate) use registry::{Commands, Storage};
pub(crate) use sink::Refusal;

/// How long a reader may block a command without reading anything.
pub const STALL_SECONDS: u64 = 30;
/// How long a write to stdin waits for the command to read.
pub const STDIN_SECONDS: u64 = 30;

/// See the head of this file.
pub(crate) struct LiveCommand {
    /// All commands of its sandbox.
    pub(super) commands: Arc<Commands>,
    pub id: CommandId,
    pub lane: Lane<LogSink>,
    pub request_digest: [u8; 32],
    pub created_at: SystemTime,
    pub attendance: Attendance,
    /// Whether the history has no snapshot of the files before it, because that failed.
    pub not_undoable: bool,
    /// The sandbox's memory kills when the command started, if known.
    oom_kills_before: Option<u64>,
}

impl LiveCommand {
    /// A command whose row is about to be written.
    fn intended(commands: &Arc<Commands>, handle: Handle, wish: Wish) -> Arc<Self> {
        let start = Start { handle, ..wish.start };
        let stdin = Stdin::new(start.stdin);
        Arc::new(Self {
            commands: Arc::clone(commands),
            id: wish.id,
            lane: Lane::new(start, stdin, LogSink::new(Phase::Intended, STREAMS.map(StreamLog::new))),
            request_digest: wish.request_digest,
            created_at: crate::observe::clock::now(),
            attendance: wish.attendance,
            not_undoable: wish.not_undoable,
            oom_kills_before: wish.oom_kills_before,
        })
    }

    /// Restores a command from its row and the files on disk. Blocks.
    pub fn recovered(commands: &Arc<Commands>, mut row: CommandRow) -> std::io::Result<Arc<Self>> {
        let directory = commands.directory_of(row.handle);
        let spans = row.result.as_ref().map(|result| [result.stdout, result.stderr]);
        let log = |at: usize| match (&row.result, spans) {
            (Some(result), Some(spans)) => {
                StreamLog::finished(&directory, STREAMS[at], spans[at], result.bytes[at].clone())
            }
            (None, _) | (_, None) => StreamLog::recover(&directory, STREAMS[at]),
        };
        let logs = [log(0)?, log(1)?];
        let pid = row.result.as_ref().and_then(|result| result.pid);
        let phase = match row.result.take() {
            Some(result) => Phase::Ended(Box::new(result)),
            None => Phase::Committed,
        };
        let mut sink = LogSink::new(phase, logs);
        sink.ending =
            spans.map(|spans| Ending { what: EndingKind::SandboxGone, ends: spans.map(|span| span.end) });
        let stdin = Stdin::recovered(row.start.stdin);
        let command = Self {
            commands: Arc::clone(commands),
            id: row.id,
            lane: Lane::new(row.start, stdin, sink),
            request_digest: row.request_digest,
            created_at: row.created_at,
            attendance: row.attendance,
            not_undoable: row.not_undoable,
            oom_kills_before: row.oom_kills_before,
        };
        command.lane.lock().pid = pid;
        Ok(Arc::new(command))
    }

    pub fn guest(&self) -> &Arc<Guest> {
        &self.commands.guest
    }

    fn directory(&self) -> PathBuf {
        self.commands.directory_of(self.lane.handle())
    }

    // The row.

    /// Sends the row to the store, and the command to init once the row is committed.
    pub fn commit_intent(self: &Arc<Self>) {
        let row = CommandRow {
            sandbox: self.guest().id,
            handle: self.lane.handle(),
            id: self.id.clone(),
            request_digest: self.request_digest,
            start: Start::clone(&self.lane.start),
            created_at: self.created_at,
            oom_kills_before: self.oom_kills_before,
            attendance: self.attendance,
            not_undoable: self.not_undoable,
            result: None,
        };
        let command = Arc::clone(self);
        self.commands.db.insert_command(row, move |inserted| command.intent_answered(inserted));
    }

    fn intent_answered(self: &Arc<Self>, inserted: Result<Inserted, DbError>) {
        let refusal = match inserted {
            Ok(Inserted::Yes) => None,
            Ok(Inserted::Exists(row)) => Some(Refusal::Exists(row.into())),
            Ok(Inserted::NoSandbox) => Some(Refusal::NoSandbox),
            Err(error) => Some(Refusal::Store(Arc::new(error))),
        };
        let mut state = self.lane.lock();
        // The sandbox may have been deleted in the meantime; then the command stays ended.
        if matches!(state.sink.phase, Phase::Intended) {
            state.sink.phase = refusal.clone().map_or(Phase::Committed, Phase::Refused);
        }
        drop(state);
        if refusal.is_some() {
            self.commands.forget(self);
        } else {
            self.guest().outbox.start(Arc::clone(self) as Arc<dyn AnyLane>);
            self.finish_if_due(); // The sandbox may have failed meanwhile.
        }
        self.lane.notify();
    }

    /// Waits until it is known whether the row was written.
    pub async fn committed(&self) -> Result<(), Refusal> {
        self.lane
            .until(|state| match &state.sink.phase {
                Phase::Intended => ControlFlow::Continue(()),
                Phase::Refused(refusal) => ControlFlow::Break(Err(refusal.clone())),
                Phase::Committed | Phase::Finishing(_) | Phase::Ended(_) => ControlFlow::Break(Ok(())),
            })
            .await
    }

    /// Whether init may be told to start it.
    pub fn is_committed(&self) -> bool {
        matches!(self.lane.lock().sink.phase, Phase::Committed | Phase::Finishing(_))
    }

    /// Waits for init's first message about a command that was just started. If none arrives, a command that no caller
    /// can name is killed as soon as init responds again.
    pub async fn started_in_time(self: &Arc<Self>, named: bool) -> Result<(), EngineError> {
        let deadline = Instant::now() + Duration::from_secs(ANSWER_SECONDS);
        if timeout_at(deadline, self.lane.answered()).await.is_ok() {
            return Ok(());
        }
        if !named {
            self.guest().outbox.abandon(self.lane.handle());
        }
        Err(self.guest().unresponsive())
    }

    /// The command's current state.
    pub fn now(&self) -> Command {
        self.describe(&self.lane.lock())
    }

    fn describe(&self, state: &State) -> Command {
        let mut spans = [state.sink.logs[0].span(), state.sink.logs[1].span()];
        let (command_state, ended_at) = match state.sink.result() {
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
            sandbox: self.guest().id,
            state: command_state,
            start: Arc::clone(&self.lane.start),
            stdout: spans[0],
            stderr: spans[1],
            not_undoable: self.not_undoable,
            created_at: self.created_at,
            ended_at,
        }
    }
}

impl Carrier for LiveCommand {
    type Sink = LogSink;

    fn lane(&self) -> &Lane<LogSink> {
        &self.lane
    }

    fn guest(&self) -> &Guest {
        &self.commands.guest
    }

    fn started(self: &Arc<Self>, pid: u32) {
        self.commands.timeouts.arm(&self.commands, &self.lane.start);
        self.expect_someone(&self.lane.lock());
        self.guest().tell(Happened::CommandStarted { command: self.id.clone(), pid });
    }

    fn resumed(self: &Arc<Self>, state: &State) {
        if state.pid.is_some() && state.sink.ending.is_none() {
            self.commands.timeouts.arm(&self.commands, &self.lane.start);
            self.expect_someone(state);
        }
    }

    fn received(self: &Arc<Self>, state: MutexGuard<'_, State>, stream: Stream, length: usize) {
        self.guest().metrics.received(stream, length);
        self.store_when_due(state);
    }

    fn stdin_sent(&self, length: usize) {
        self.guest().metrics.stdin(length);
    }

    fn failed_to_start(self: &Arc<Self>, error: StartError) -> Result<(), Violation> {
        self.set_ending(EndingKind::FailedToStart(finish::clipped(error)), None)
    }

    fn ended(self: &Arc<Self>, end: End, ends: [u64; 2]) -> Result<(), Violation> {
        self.set_ending(EndingKind::Guest(end), Some(ends))
    }

    fn lost(self: &Arc<Self>) -> Result<(), Violation> {
        Err(Violation::Forgotten { handle: self.lane.handle() })
    }
}
