//! How a driver pauses its sandbox: it freezes the processes and keeps them in memory, or it ends them and keeps the files.
//!
//! The goal is in the row before anything happens to the processes, so a daemon that finds it finishes the pause or undoes it.
//! Processes that are to end get SIGTERM, and SIGKILL when the grace is over. Frozen ones cannot hear a signal and are killed at once.
//! `resume` is the way back.

use std::sync::Arc;
use std::time::Duration;

use runtime::BackendError;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tracing::{error, info, warn};
use wire::guest::ToInit;
use wire::launch::Processes;

use crate::command::LiveCommand;
use crate::error::{EngineError, Field, chain};
use crate::guest::LinkEnd;
use crate::model::PauseSpec;
use crate::model::hook::HookPoint;
use crate::sandbox::calls::ask;
use crate::sandbox::clean::END_SECONDS;
use crate::sandbox::driver::{Again, Driver, Message, Then, Work, within};
use crate::sandbox::hooks::Then as After;
use crate::sandbox::lifecycle::{Goal, Kept, State, Wish};
use crate::sandbox::live::LiveSandbox;
use crate::task::Task;

const SIGTERM: i32 = 15;

/// Pauses a sandbox, and returns when it is paused.
pub(crate) async fn pause(live: &LiveSandbox, spec: PauseSpec) -> Result<(), EngineError> {
    if spec.grace > PauseSpec::GRACE_MAX {
        let (most, given) = (PauseSpec::GRACE_MAX.as_secs(), spec.grace.as_secs_f64());
        let rule = format!("be at most {most} seconds, got {given}");
        return Err(Field::GraceSeconds.must(rule));
    }
    ask(live, |done| Message::Pause { spec, done }).await
}

/// A pause that is under way, or comes next.
pub(super) struct Pausing {
    pub spec: PauseSpec,
    /// Why, if no caller asked for it. Callers see it beside the state.
    pub reason: Option<String>,
}

impl Driver {
    /// A caller wants the sandbox to be paused.
    pub(super) async fn asked_to_pause(
        &mut self,
        spec: PauseSpec,
        done: oneshot::Sender<Result<(), EngineError>>,
    ) {
        let settled = self.goal == self.live.state().settled_goal();
        match self.live.state().goal(Wish::Pause(spec.kept)) {
            Ok(None) if settled => drop(done.send(Ok(()))), // A caller that left needs no answer.
            Ok(_) => {
                self.pauses.push(done);
                match self.pauses_after_hook(spec.kept) {
                    true => {} // It is what the hook that is running is for.
                    false => drop(self.pause(Pausing { spec, reason: None }).await), // `tell_pausers` reports what prevents it.
                }
            }
            Err(_) => drop(done.send(Err(self.live.wrong_state()))), // As above.
        }
    }

    /// Begins to pause the sandbox, or lets the pause follow what is under way; first its hook runs, if it has one. Returns
    /// whether a pause is under way afterwards.
    pub(super) async fn pause(&mut self, pausing: Pausing) -> bool {
        if self.hooking.is_some() {
            self.next_pause = Some(pausing);
            return true;
        }
        match self.hook_at(HookPoint::BeforePause) {
            Some(hook) if self.runs_first(HookPoint::BeforePause) => {
                // The hook is a command, which a sandbox that is being paused does not take.
                self.live.set_pausing(false);
                self.run_hook(HookPoint::BeforePause, hook, After::Pause(pausing));
                true
            }
            _ => self.pause_now(pausing).await,
        }
    }

    /// Begins to pause the sandbox, or lets the pause follow what is under way.
    pub(super) async fn pause_now(&mut self, pausing: Pausing) -> bool {
        let goal = Goal::Paused(pausing.spec.kept);
        if self.goal == goal && self.goal != self.live.state().settled_goal() {
            return true;
        }
        let refused = match pausing.spec.kept {
            Kept::Saved => Some(self.cannot_save()),
            Kept::Frozen | Kept::Dropped if self.goal != self.live.state().settled_goal() => {
                self.next_pause = Some(pausing);
                return true;
            }
            Kept::Frozen | Kept::Dropped => self.aim(goal).await.err(),
        };
        if let Some(error) = refused {
            match self.pauses.is_empty() {
                true => warn!(error = chain(&error), "cannot pause a sandbox"),
                false => self.tell_pausers(Err(error)),
            }
            return false;
        }
        self.live.set_pausing(true);
        self.pausing = pausing;
        self.act_on_pause();
        true
    }

    /// The backends of this version keep memory only while the machine runs.
    fn cannot_save(&self) -> EngineError {
        let source = std::io::Error::from(std::io::ErrorKind::Unsupported);
        let source = BackendError::Refused { doing: "save its memory".into(), source };
        EngineError::Pause { id: self.live.id, source }
    }

    /// Finishes a pause that an earlier daemon began. The row may say why it began.
    pub(super) fn finish_pause(&mut self, kept: Kept) {
        let reason = self.live.view().reason.clone();
        self.pausing = Pausing { spec: PauseSpec { kept, grace: Duration::ZERO }, reason };
        self.live.set_pausing(true);
        self.holds.forget_motion();
        self.act_on_pause();
    }

    /// The goal is in the row: acts on it. `carry_on` records a sandbox that is frozen already.
    fn act_on_pause(&mut self) {
        match self.pausing.spec.kept {
            Kept::Frozen | Kept::Saved => self.settle_motion(),
            Kept::Dropped => self.drop_processes(),
        }
    }

    /// Ends the processes for a pause that keeps the files. The link goes before their end, so that it is not taken for a failure.
    pub(super) fn drop_processes(&mut self) {
        let commands = self.live.close_commands();
        let link = match std::mem::replace(&mut self.work, Work::None) {
            Work::Linked(link) if self.live.state() == State::Running => Some(link),
            _ => None,
        };
        let (hurry, hurried) = oneshot::channel();
        let (live, grace) = (Arc::clone(&self.live), self.pausing.spec.grace);
        let task = Task::spawn(async move {
            if let Some(link) = link.filter(|_| !grace.is_zero()) {
                end_gently(&live, &commands, link, grace, hurried).await;
            }
            live.detach_network().await;
            let end = live.shared.backend.end_processes(live.id, Processes::All);
            within(END_SECONDS, "end the sandbox's processes", end).await
        });
        self.work = Work::Cleaning { task, then: Then::Paused, hurry: Some(hurry) };
    }

    /// The processes were ended for a pause, or could not be.
    pub(super) async fn dropped_processes(&mut self, result: Result<(), BackendError>) {
        match result {
            Ok(()) => {
                self.failures = 0;
                self.paused(Kept::Dropped).await;
            }
            Err(error) => {
                warn!(
                    error = chain(&error),
                    "cannot end the processes of a sandbox to pause it; trying again"
                );
                self.rest(Again::Pause);
            }
        }
    }

    /// The sandbox is paused now: records it and answers callers.
    pub(super) async fn paused(&mut self, kept: Kept) {
        self.deadlines.paused(self.live.shared.clock.now());
        if !self.deadlines.lifetime().rules().is_empty() {
            self.note_use();
        }
        let reason = self.pausing.reason.clone();
        if let Err(error) = self.record(State::Paused(kept), Goal::Paused(kept), reason).await {
            // The row still says that the pause is under way, so the next daemon finishes it, if this one does not.
            error!(error = chain(&error), "cannot record that a sandbox is paused; trying again");
            if kept == Kept::Dropped {
                self.rest(Again::Pause);
            }
            return self.tell_pausers(Err(error));
        }
        info!("sandbox is paused");
        if kept == Kept::Dropped {
            self.live.close_commands().iter().for_each(LiveCommand::sandbox_gone);
            self.live.shared.registry().release_compute(&self.live);
        }
        self.tell_pausers(Ok(()));
        self.settle_motion();
        self.judge().await;
    }

    /// The processes could not be frozen, so the sandbox goes on as before.
    pub(super) async fn undo_pause(&mut self, why: impl Fn() -> EngineError) {
        if let Err(error) = self.aim(self.live.state().settled_goal()).await {
            // The next daemon finds the goal to pause and tries again.
            error!(error = chain(&error), "cannot record that a sandbox is not paused");
            self.goal = self.live.state().settled_goal();
        }
        self.live.set_pausing(false);
        self.deadlines.retry_later(self.live.shared.clock.now());
        self.link_if_unlinked();
        for done in self.pauses.drain(..) {
            let _ = done.send(Err(why())); // A caller that left needs no answer.
        }
    }

    pub(super) fn tell_pausers(&mut self, result: Result<(), EngineError>) {
        let id = self.live.id;
        let again = |text: &str| {
            let source = std::io::Error::other(text.to_owned());
            let source = BackendError::Refused { doing: "pause it".into(), source };
            EngineError::Pause { id, source }
        };
        tell_all(self.pauses.drain(..), result, again);
    }
}

/// Answers callers that all wait for the same. The first caller gets the error itself, the others its text: errors cannot be cloned.
pub(super) fn tell_all(
    callers: impl Iterator<Item = oneshot::Sender<Result<(), EngineError>>>,
    result: Result<(), EngineError>,
    again: impl Fn(&str) -> EngineError,
) {
    let text = result.as_ref().err().map(|error| chain(error));
    let mut result = Some(result);
    for done in callers {
        let answer = result.take().unwrap_or_else(|| match &text {
            None => Ok(()),
            Some(text) => Err(again(text)),
        });
        let _ = done.send(answer); // A caller that left needs no answer.
    }
}

/// Sends SIGTERM to all commands and waits until they have ended, at most for the grace. `link` carries their results.
async fn end_gently(
    live: &LiveSandbox,
    commands: &[Arc<LiveCommand>],
    mut link: Task<LinkEnd>,
    grace: Duration,
    hurried: oneshot::Receiver<()>,
) {
    let ending = async {
        let outbox = &live.guest.outbox;
        let signal =
            |command: &LiveCommand| ToInit::Signal { handle: command.lane.handle(), signal: SIGTERM };
        for command in commands {
            // Without a connection nothing can be said; the kill comes at the end of the grace.
            if outbox.say(Some(signal(command))).await.is_err() {
                break;
            }
        }
        for command in commands {
            command.lane.over().await;
        }
    };
    tokio::select! {
        _ = timeout(grace, ending) => {}
        _ = hurried => {} // The sandbox is to be deleted.
        _ = &mut link => {} // Init has ended, and all processes with it.
    }
}
