//! How a driver runs the hooks of its sandbox: commands of the owner, at points of the sandbox's life.
//!
//! A hook is a command like any other, with a time limit. The driver waits for it beside its inbox, so a delete is heard at
//! once. A hook *before* something runs before anything of that is written, and a hook *after* something is written to be
//! due first, so that the next daemon runs it if this one dies: it may then run twice, but not never.
//!
//! A failure is an event and is shown with the sandbox. Only if the hook is required, it has an effect: what was to follow
//! does not happen, and a sandbox whose hook ran after something becomes `failed`. Lifetime rules and operators are never
//! kept from what they do.

use std::future::pending;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::task::JoinError;
use tracing::{error, info, warn};

use crate::command::calls::run_in;
use crate::error::{EngineError, chain};
use crate::model::hook::{Hook, HookPoint, HookRun};
use crate::model::{CommandEnv, CommandSpec, CommandState, Outcome, Resume};
use crate::observe::clock::now;
use crate::observe::events::Happened;
use crate::sandbox::claim::Unclaimed;
use crate::sandbox::driver::{Driver, Work};
use crate::sandbox::lifecycle::{Disk, Goal, Kept, State};
use crate::sandbox::live::LiveSandbox;
use crate::sandbox::pause::Pausing;
use crate::task::Task;

/// How long the daemon waits beyond the time limit of a hook, which init keeps.
const BEYOND_TIMEOUT: Duration = Duration::from_secs(10);
/// The end of a failed hook's output that is shown.
const OUTPUT_SHOWN_MAX: usize = 512;
/// How much of its output is read for that.
const OUTPUT_READ_MAX: usize = 1024 * 1024;
/// The variable that tells a hook which one it is.
const VARIABLE: &str = "SHOAL_HOOK";

/// A hook that is running.
pub(super) struct Hooking {
    point: HookPoint,
    required: bool,
    task: Task<Ran>,
    then: Then,
}

/// What comes of a hook.
pub(super) enum Ran {
    Hook(HookRun),
    /// The claim failed, so no hook ran.
    Unclaimed(Unclaimed),
}

/// What follows a hook.
pub(super) enum Then {
    /// The creator, or the caller of a rollback, gets an answer.
    Made,
    /// Those who wait for a resume get an answer.
    Resumed,
    /// The claimer gets an answer.
    Claimed(oneshot::Sender<Result<(), Unclaimed>>),
    /// An earlier daemon was to run the hook, and nobody waits for it.
    Nothing,
    /// The pause.
    Pause(Pausing),
    /// The delete, and why, if no caller asked for it.
    Delete(Option<String>),
}

/// What came of a hook, or of the task that ran it.
pub(super) type Ended = Result<Ran, JoinError>;

/// Waits for the hook that is running, or forever if there is none.
pub(super) async fn ended(hooking: &mut Option<Hooking>) -> Ended {
    match hooking {
        Some(hooking) => (&mut hooking.task).await,
        None => pending().await,
    }
}

impl Driver {
    /// The hook that runs at this point, if there is one and the sandbox is somebody's.
    pub(super) fn hook_at(&self, point: HookPoint) -> Option<Hook> {
        let hook = self.live.hooks().at(point).cloned()?;
        // A sandbox in a pool runs what prepares it. All else is between it and its claimer.
        (point == HookPoint::AfterCreate || !self.live.is_hidden()).then_some(hook)
    }

    /// Whether a hook is to run before what is asked for, which is possible only while the sandbox runs.
    pub(super) fn runs_first(&self, point: HookPoint) -> bool {
        self.live.state() == State::Running
            && matches!(self.work, Work::Linked(_))
            && self.goal == Goal::Running
            && !self.holds.is_held()
            && self.hook_at(point).is_some()
    }

    /// Whether a delete follows the hook that is running.
    pub(super) fn deletes_after_hook(&self) -> bool {
        self.hooking.as_ref().is_some_and(|hooking| matches!(hooking.then, Then::Delete(_)))
    }

    /// Whether a pause that keeps this much follows the hook that is running.
    pub(super) fn pauses_after_hook(&self, kept: Kept) -> bool {
        let pausing = |then: &Then| matches!(then, Then::Pause(pausing) if pausing.spec.kept == kept);
        self.hooking.as_ref().is_some_and(|hooking| pausing(&hooking.then))
    }

    /// Begins to run a hook.
    pub(super) fn run_hook(&mut self, point: HookPoint, hook: Hook, then: Then) {
        info!(hook = point.word(), "running a hook");
        let (live, required) = (Arc::clone(&self.live), hook.required);
        let task = Task::spawn(async move { Ran::Hook(run(&live, point, hook).await) });
        self.hooking = Some(Hooking { point, required, task, then });
    }

    /// Runs the hook after a claim, when the claim has succeeded.
    pub(super) fn run_claim_hook(
        &mut self,
        hook: Hook,
        claimed: oneshot::Receiver<Result<(), Unclaimed>>,
        done: oneshot::Sender<Result<(), Unclaimed>>,
    ) {
        let (live, required, point) = (Arc::clone(&self.live), hook.required, HookPoint::AfterClaim);
        let task = Task::spawn(async move {
            match claimed.await {
                Ok(Ok(())) => Ran::Hook(run(&live, point, hook).await),
                Ok(Err(unclaimed)) => Ran::Unclaimed(unclaimed),
                Err(_) => Ran::Unclaimed(Unclaimed::Unwritten(EngineError::Stopping)),
            }
        });
        self.hooking = Some(Hooking { point, required, task, then: Then::Claimed(done) });
    }

    /// Writes that the hook after something is due. If that fails, the hook runs all the same, unless this daemon dies.
    pub(super) async fn hook_is_due(&mut self, point: HookPoint) {
        if self.hook_at(point).is_none() {
            return;
        }
        match self.live.shared.db.set_hook_due(self.live.id, point).await {
            Ok(()) => {}
            Err(error) => {
                warn!(error = chain(&error), hook = point.word(), "cannot write that a hook is due")
            }
        }
        self.live.set_hook_due(Some(point));
    }

    /// Runs the hook that is due. Returns what is to follow at once, if none is.
    pub(super) fn run_due(&mut self, then: Then) -> Option<Then> {
        let Some(point) = self.live.hook_due() else { return Some(then) };
        match self.hook_at(point) {
            Some(hook) => {
                self.run_hook(point, hook, then);
                None
            }
            None => Some(then),
        }
    }

    /// The hook has ended: records how, and does what follows.
    pub(super) async fn hooked(&mut self, ended: Ended) {
        let Some(Hooking { point, required, then, .. }) = self.hooking.take() else { return };
        let ran = match ended {
            Ok(Ran::Hook(run)) => run,
            Ok(Ran::Unclaimed(unclaimed)) => {
                if let Then::Claimed(done) = then {
                    let _ = done.send(Err(unclaimed)); // A caller that left needs no answer.
                }
                return;
            }
            Err(panic) => {
                error!(%panic, "running a hook panicked");
                let failure = Some("the daemon could not run it".into());
                HookRun { at: now(), took: Duration::ZERO, command: None, failure }
            }
        };
        let failure = ran.failure.clone();
        self.live.set_hook_run(point, ran.clone());
        if let Err(error) = self.live.shared.db.put_hook_run(self.live.id, point, ran).await {
            warn!(error = chain(&error), hook = point.word(), "cannot write how a hook went");
        }
        if let Some(reason) = &failure {
            warn!(hook = point.word(), reason, "a hook failed");
            self.live.tell(Happened::HookFailed { hook: point, reason: reason.clone() });
        }
        let refused = failure.filter(|_| required).map(|reason| Refused { point, reason });
        match then {
            Then::Pause(pausing) => self.pause_after_hook(pausing, refused).await,
            Then::Delete(reason) => self.delete_after_hook(reason, refused).await,
            Then::Made | Then::Resumed | Then::Claimed(_) | Then::Nothing => {
                self.answer_after_hook(then, refused).await;
            }
        }
    }

    /// Gives those who wait for the hook that is running an answer without it: something else comes first. The command goes
    /// on.
    pub(super) fn abandon_hook(&mut self) {
        let Some(Hooking { point, then, .. }) = self.hooking.take() else { return };
        info!(hook = point.word(), "not waiting for a hook any more");
        match then {
            Then::Made => self.tell_creator(Ok(())),
            Then::Resumed => self.tell_resumers(Ok(())),
            Then::Claimed(done) => drop(done.send(Ok(()))), // A caller that left needs no answer.
            Then::Pause(_) => self.refuse_waiting(),
            Then::Delete(_) | Then::Nothing => {}
        }
    }

    async fn pause_after_hook(&mut self, pausing: Pausing, refused: Option<Refused>) {
        let by_rule = pausing.reason.is_some();
        if self.live.state() != State::Running {
            return; // It failed meanwhile, and those who wait have their answer.
        }
        if by_rule && self.used_meanwhile() {
            self.deadlines.retry_later(self.live.shared.clock.now());
            return self.refuse_waiting();
        }
        match refused.filter(|_| !by_rule) {
            Some(refused) => self.tell_pausers(Err(refused.error(self))),
            None => drop(self.pause_now(pausing).await), // It tells callers what prevents it.
        }
    }

    async fn delete_after_hook(&mut self, reason: Option<String>, refused: Option<Refused>) {
        if reason.is_some() && self.deletes.is_empty() && self.used_meanwhile() {
            return self.deadlines.retry_later(self.live.shared.clock.now());
        }
        let refused = refused.filter(|_| reason.is_none() && !self.deletes.iter().any(|waits| waits.insists));
        match refused {
            Some(refused) => self.tell_deleters(Err(refused.error(self))),
            None => drop(self.delete_now(reason).await), // `tell_deleters` reports what prevents it.
        }
    }

    /// Whether somebody uses the sandbox, so that a rule that has struck before the hook would not strike now. The hook
    /// itself was a use, and does not count.
    fn used_meanwhile(&mut self) -> bool {
        let (uses, state) = (self.live.guest.uses.now(), self.live.state());
        let strike = self.deadlines.strike(state, uses, self.live.shared.clock.now());
        uses.open > 0 && !strike.is_some_and(|strike| strike.left.is_zero())
    }

    async fn answer_after_hook(&mut self, then: Then, refused: Option<Refused>) {
        if self.live.state() != State::Running {
            // It failed meanwhile. Those who wait for a pause or a resume have their answer.
            let error = self.live.wrong_state();
            match then {
                Then::Made => self.tell_creator(Err(error)),
                Then::Claimed(done) => drop(done.send(Err(Unclaimed::Unwritten(error)))), // As above.
                Then::Resumed | Then::Nothing | Then::Pause(_) | Then::Delete(_) => {}
            }
            return;
        }
        let Some(refused) = refused else {
            match then {
                Then::Made => self.tell_creator(Ok(())),
                Then::Resumed => self.tell_resumers(Ok(())),
                Then::Claimed(done) => drop(done.send(Ok(()))), // As above.
                Then::Nothing | Then::Pause(_) | Then::Delete(_) => {}
            }
            return self.judge().await;
        };
        // Callers that wait get an answer once the sandbox has failed, and it names the hook, not the failure.
        let (created, resumes) = match then {
            Then::Made => (self.created.take(), Vec::new()),
            Then::Resumed => (None, std::mem::take(&mut self.resumes)),
            Then::Claimed(_) | Then::Nothing | Then::Pause(_) | Then::Delete(_) => (None, Vec::new()),
        };
        self.work = Work::None; // Dropping the link ends it.
        self.fail(State::Failed { disk: Disk::Whole }, refused.words()).await;
        for done in created.into_iter().chain(resumes.into_iter().map(|resumer| resumer.done)) {
            let _ = done.send(Err(refused.error(self))); // As above.
        }
        if let Then::Claimed(done) = then {
            let _ = done.send(Err(Unclaimed::Unwritten(refused.error(self)))); // As above.
        }
    }
}

/// A required hook has failed.
struct Refused {
    point: HookPoint,
    reason: String,
}

impl Refused {
    fn words(&self) -> String {
        format!("the hook `{}` failed: {}", self.point, self.reason)
    }

    fn error(&self, driver: &Driver) -> EngineError {
        EngineError::HookFailed { id: driver.live.id, hook: self.point.word(), reason: self.reason.clone() }
    }
}

/// Runs a hook to its end.
async fn run(live: &Arc<LiveSandbox>, point: HookPoint, hook: Hook) -> HookRun {
    let (at, began) = (now(), Instant::now());
    let mut command = None;
    let failure = attempt(live, point, hook, &mut command).await.err();
    HookRun { at, took: began.elapsed(), command, failure }
}

async fn attempt(
    live: &Arc<LiveSandbox>,
    point: HookPoint,
    hook: Hook,
    started: &mut Option<wire::CommandId>,
) -> Result<(), String> {
    let env = [(VARIABLE.to_owned(), point.word().to_owned())].into();
    let spec = CommandSpec {
        env: CommandEnv::new(env).map_err(|must| must.to_string())?,
        user: hook.user,
        timeout: Some(hook.timeout),
        resume: Resume::Never,
        ..CommandSpec::new(hook.program)
    };
    let limit = hook.timeout + BEYOND_TIMEOUT;
    let running = async {
        let command = run_in(&live.shared, &live.commands, spec, |spec, id| live.start_of(spec, id)).await;
        let command = command.map_err(|error| chain(&error))?;
        *started = Some(command.now().id);
        let ended = command.ended().await;
        let CommandState::Ended { outcome, .. } = ended.state else {
            return Err("the sandbox ended before it".into());
        };
        let what = match outcome {
            Outcome::Exited(0) => return Ok(()),
            Outcome::Exited(code) => format!("it exited with {code}"),
            Outcome::Signaled(signal) => format!("signal {signal} ended it"),
            Outcome::TimedOut(_) | Outcome::TimedOutUnheard | Outcome::IdleTimedOut(_) => {
                format!("it took longer than {} seconds", hook.timeout.as_secs_f64())
            }
            Outcome::Killed(_) => "it was killed".into(),
            Outcome::OutOfMemory(_) => "it ran out of memory".into(),
            Outcome::FailedToStart(error) => error.to_string(),
            Outcome::SandboxGone => "the sandbox ended while it ran".into(),
        };
        // What it printed last often says why.
        let said = match command.output(OUTPUT_READ_MAX).await {
            Ok(output) if output.stderr.is_empty() => last_words(&output.stdout),
            Ok(output) => last_words(&output.stderr),
            Err(error) => format!("its output cannot be read: {}", chain(&error)),
        };
        Err(if said.is_empty() { what } else { format!("{what}: {said}") })
    };
    match tokio::time::timeout(limit, running).await {
        Ok(result) => result,
        Err(_) => Err(format!("it did not end within {} seconds", limit.as_secs_f64())),
    }
}

/// The end of some output, as text on one line.
fn last_words(output: &[u8]) -> String {
    let text = String::from_utf8_lossy(output);
    let text = text.trim_end();
    let from = text.len().saturating_sub(OUTPUT_SHOWN_MAX);
    let from = (from..=text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len());
    text[from..].split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_words_are_the_end_of_the_output_on_one_line() {
        assert_eq!(last_words(b"one\n two\n\n"), "one two");
        let long = "ü".repeat(OUTPUT_SHOWN_MAX);
        assert_eq!(last_words(long.as_bytes()).len(), OUTPUT_SHOWN_MAX);
        assert_eq!(last_words(b""), "");
    }
}
