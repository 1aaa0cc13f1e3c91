//! Turns a command's end into its result.
//!
//! The end is reported by init, which is not trusted, or follows from the end of the sandbox. The result is committed
//! once all output is kept; only then may init forget the command. Until then init can report the end again, so callers
//! see an ordinary end at once. If the result depends on more than init's report, callers see it once it is committed.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use tracing::{debug, error};
use wire::guest::{End, EndCause, ExitStatus, OUTPUT_WINDOW, StartError};

use super::LiveCommand;
use super::sink::Phase;
use crate::command::log::StreamLog;
use crate::db::ResultRow;
use crate::error::{DbError, chain};
use crate::guest::{STREAMS, Violation};
use crate::model::Outcome;
use crate::observe::events::Happened;

/// How long to wait before retrying to commit a result.
const RESULT_RETRY: Duration = Duration::from_secs(1);
/// How much of init's error text for a failed start is kept, in bytes.
const START_ERROR_TEXT_MAX: usize = 4096;

#[derive(Debug, Clone)]
pub(super) struct Ending {
    pub(super) what: EndingKind,
    /// The lengths of both streams.
    pub(super) ends: [u64; 2],
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum EndingKind {
    Guest(End),
    FailedToStart(StartError),
    SandboxGone,
    /// The host killed the command at its timeout, and init did not report how it ended.
    Unheard,
}

impl LiveCommand {
    pub(super) fn set_ending(
        self: &Arc<Self>,
        what: EndingKind,
        ends: Option<[u64; 2]>,
    ) -> Result<(), Violation> {
        let mut state = self.lane.lock();
        let what = match what {
            // The host sent the signal because of the timeout; init knows neither.
            EndingKind::Guest(End { status, cause: EndCause::Itself }) if state.sink.struck => {
                EndingKind::Guest(End { status, cause: EndCause::Timeout })
            }
            what => what,
        };
        if state.sink.ending.is_some() {
            return Ok(()); // Sent again on a new connection. The first report counts.
        }
        let received = state.sink.lengths();
        let ends = ends.unwrap_or(received);
        for (log, end) in ends.into_iter().enumerate() {
            // Init holds at most a window of unacknowledged output, so the end cannot be further away than that.
            let limit = state.sink.logs[log].granted().saturating_add(OUTPUT_WINDOW as u64);
            if end < received[log] || end > limit {
                return Err(Violation::BadEnd { handle: self.lane.handle(), end, received: received[log] });
            }
        }
        state.sink.ending = Some(Ending { what, ends });
        drop(state);
        self.finish_if_due();
        self.lane.notify();
        Ok(())
    }

    /// If the command has ended and all output is on disk, or short enough for the row, sends the result to the store.
    pub(super) fn finish_if_due(self: &Arc<Self>) {
        let mut state = self.lane.lock();
        let Some(ending) = &state.sink.ending else { return };
        let complete = (0..STREAMS.len()).all(|log| state.sink.logs[log].received() >= ending.ends[log]);
        if !complete || state.sink.writing || !matches!(state.sink.phase, Phase::Committed) {
            return;
        }
        if !state.sink.logs.iter().all(StreamLog::is_kept) {
            return self.store_when_due(state);
        }
        let what = ending.what.clone();
        let spans = [state.sink.logs[0].span(), state.sink.logs[1].span()];
        let pid = state.pid;
        let bytes = [state.sink.logs[0].short(), state.sink.logs[1].short()];
        let result = move |outcome| ResultRow {
            ended_at: crate::observe::clock::now(),
            pid,
            outcome,
            stdout: spans[0],
            stderr: spans[1],
            bytes,
        };
        let outcome = match what {
            EndingKind::SandboxGone => Outcome::SandboxGone,
            EndingKind::Unheard => Outcome::TimedOutUnheard,
            EndingKind::FailedToStart(error) => Outcome::FailedToStart(error),
            EndingKind::Guest(end) if may_be_out_of_memory(end) => {
                state.sink.phase = Phase::Finishing(None);
                drop(state);
                let command = Arc::clone(self);
                self.guest().runtime.spawn(async move {
                    let (outcome, kills) = command.outcome_of_kill(end).await;
                    command.commit_result(result(outcome), kills);
                });
                return;
            }
            EndingKind::Guest(end) => outcome(end),
        };
        // If asked again, init reports the same exit again. For the other outcomes init does not know everything.
        let is_inits_word = matches!(outcome, Outcome::Exited(_));
        let result = result(outcome);
        state.sink.phase = Phase::Finishing(is_inits_word.then(|| Box::new(result.clone())));
        drop(state);
        self.lane.notify();
        self.commit_result(result, None);
    }

    /// The outcome, and the memory kill that it accounts for.
    pub(super) async fn outcome_of_kill(&self, end: End) -> (Outcome, Option<u64>) {
        match self.guest().claim_oom_kill(self.oom_kills_before).await {
            Some(claimed) => (Outcome::OutOfMemory(end.status), Some(claimed)),
            None => (outcome(end), None),
        }
    }

    pub(super) fn commit_result(self: &Arc<Self>, result: ResultRow, oom_kills: Option<u64>) {
        let command = Arc::clone(self);
        let row = result.clone();
        let done = move |committed: Result<(), DbError>| match committed {
            Ok(()) => command.result_committed(result),
            Err(DbError::Closed) => {} // Init keeps the result for the next daemon.
            Err(error) => {
                error!(sandbox = %command.guest().id, command = %command.id, error = chain(&error),
                    "cannot store a result; it is tried again");
                let runtime = command.guest().runtime.clone();
                runtime.spawn(async move {
                    tokio::time::sleep(RESULT_RETRY).await;
                    command.commit_result(result, oom_kills);
                });
            }
        };
        self.commands.db.end_command(self.guest().id, self.lane.handle(), row, oom_kills, done);
    }

    pub(super) fn result_committed(self: &Arc<Self>, result: ResultRow) {
        let bytes = (result.stdout.end - result.stdout.start) + (result.stderr.end - result.stderr.start);
        // Init must not be allowed to forget an end that it has not reported yet; once it reports the end, `guest`
        // tells init to forget it.
        let told = result.outcome != Outcome::TimedOutUnheard;
        let took = result.ended_at.duration_since(self.created_at).unwrap_or_default();
        self.guest().metrics.command_ended(&result.outcome, took);
        let outcome = result.outcome.clone();
        self.lane.lock().sink.phase = Phase::Ended(Box::new(result));
        self.commands.ended(self, bytes);
        self.guest().tell(Happened::CommandEnded { command: self.id.clone(), outcome });
        if told {
            self.guest().outbox.acknowledge_result(self.lane.handle());
        }
        self.lane.notify();
        debug!(sandbox = %self.guest().id, command = %self.id, "command ended");
    }

    /// The host is about to kill the command at its timeout. `false` if the command has ended already.
    pub fn strike(&self) -> bool {
        let mut state = self.lane.lock();
        state.sink.struck |= state.sink.ending.is_none();
        state.sink.ending.is_none()
    }

    /// The host has killed the command, and init does not report the end. The output received so far is all there will
    /// be.
    pub fn unheard(self: &Arc<Self>) {
        let mut state = self.lane.lock();
        let ends = state.sink.lengths();
        state.sink.ending.get_or_insert(Ending { what: EndingKind::Unheard, ends });
        drop(state);
        self.finish_if_due();
        self.lane.notify();
    }

    /// The sandbox ended while the command was running. The result says so.
    pub fn sandbox_gone(self: &Arc<Self>) {
        let mut state = self.lane.lock();
        let ends = state.sink.lengths();
        // If the end was reported before all output arrived, the rest will not arrive.
        let complete = state.sink.ending.as_ref().is_some_and(|ending| ending.ends == ends);
        if !complete {
            state.sink.ending = Some(Ending { what: EndingKind::SandboxGone, ends });
        }
        drop(state);
        self.finish_if_due();
        self.lane.notify();
    }

    /// The sandbox is being deleted, with rows and logs: the command ends in memory only. Returns when no thread uses
    /// its logs any more.
    pub async fn deleted(&self) {
        self.end_in_memory();
        self.lane.notify();
        self.lane
            .until(
                |state| if state.sink.writing { ControlFlow::Continue(()) } else { ControlFlow::Break(()) },
            )
            .await;
    }

    pub(super) fn end_in_memory(&self) {
        let mut state = self.lane.lock();
        if matches!(state.sink.phase, Phase::Ended(_)) {
            return;
        }
        let spans = [state.sink.logs[0].span(), state.sink.logs[1].span()];
        state.sink.ending = Some(Ending { what: EndingKind::SandboxGone, ends: spans.map(|span| span.end) });
        state.sink.phase = Phase::Ended(Box::new(ResultRow {
            ended_at: crate::observe::clock::now(),
            pid: state.pid,
            outcome: Outcome::SandboxGone,
            stdout: spans[0],
            stderr: spans[1],
            bytes: [None, None],
        }));
    }
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

/// The kernel kills the process that it picks with SIGKILL; a shell exits with 137 if that process was its child.
fn may_be_out_of_memory(end: End) -> bool {
    const SIGKILL: i32 = 9;
    const SHELL_SIGKILL: i32 = 128 + SIGKILL;
    end.cause == EndCause::Itself
        && matches!(end.status, ExitStatus::Signal(SIGKILL) | ExitStatus::Code(SHELL_SIGKILL))
}

/// Init's error texts are stored in rows and sent to clients, so they are kept short.
pub(super) fn clipped(error: StartError) -> StartError {
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
