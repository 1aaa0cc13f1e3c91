//! How a driver pauses its sandbox: it freezes the processes and keeps them in memory, or it ends them and keeps the files.
//!
//! The goal is in the row before anything happens to the processes, so a daemon that finds it finishes the pause or undoes it.

use std::sync::Arc;

use runtime::BackendError;
use tokio::sync::oneshot;
use tracing::{error, info, warn};
use wire::launch::Processes;

use crate::error::{EngineError, chain};
use crate::sandbox::calls::ask;
use crate::sandbox::clean::END_SECONDS;
use crate::sandbox::driver::{Again, Driver, Message, Then, Work, within};
use crate::sandbox::lifecycle::{Goal, Kept, State, Wish};
use crate::sandbox::live::LiveSandbox;
use crate::task::Task;

/// Pauses a sandbox, and returns when it is paused.
pub(crate) async fn pause(live: &LiveSandbox, kept: Kept) -> Result<(), EngineError> {
    ask(live, |done| Message::Pause { kept, done }).await
}

impl Driver {
    /// A caller wants the sandbox to be paused.
    pub(super) async fn asked_to_pause(
        &mut self,
        kept: Kept,
        done: oneshot::Sender<Result<(), EngineError>>,
    ) {
        match self.live.state().goal(Wish::Pause(kept)) {
            Ok(None) => drop(done.send(Ok(()))), // A caller that left needs no answer.
            Ok(Some(_)) => {
                self.pauses.push(done);
                self.pause(kept).await;
            }
            Err(_) => drop(done.send(Err(self.live.wrong_state()))), // As above.
        }
    }

    /// Begins to pause the sandbox, unless something else is under way. Returns whether a pause is under way afterwards.
    pub(super) async fn pause(&mut self, kept: Kept) -> bool {
        let goal = Goal::Paused(kept);
        if self.goal == goal {
            return true;
        }
        let refused = match kept {
            Kept::Saved => Some(self.cannot_save()),
            Kept::Frozen | Kept::Dropped if self.goal != self.live.state().settled_goal() => {
                Some(self.live.wrong_state())
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
        self.act_on_pause(kept);
        true
    }

    /// The backends of this version keep memory only while the machine runs.
    fn cannot_save(&self) -> EngineError {
        let source = std::io::Error::from(std::io::ErrorKind::Unsupported);
        let source = BackendError::Refused { doing: "save its memory".into(), source };
        EngineError::Pause { id: self.live.id, source }
    }

    /// The goal is in the row: acts on it.
    pub(super) fn act_on_pause(&mut self, kept: Kept) {
        match kept {
            Kept::Frozen | Kept::Saved => self.settle_motion(),
            Kept::Dropped => self.drop_processes(),
        }
    }

    /// Ends the processes for a pause that keeps the files. The link goes first, so that their end is not taken for a failure.
    pub(super) fn drop_processes(&mut self) {
        self.live.close_commands();
        let live = Arc::clone(&self.live);
        let task = Task::spawn(async move {
            let end = live.shared.backend.end_processes(live.id, Processes::All);
            within(END_SECONDS, "end the sandbox's processes", end).await
        });
        self.work = Work::Cleaning { task, then: Then::Paused };
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
        if let Err(error) = self.record(State::Paused(kept), Goal::Paused(kept), None).await {
            // The row still says that the pause is under way, so the next daemon finishes it.
            error!(error = chain(&error), "cannot record that a sandbox is paused");
            return self.tell_pausers(Err(error));
        }
        info!("sandbox is paused");
        if kept == Kept::Dropped {
            self.live.close_commands().iter().for_each(crate::command::LiveCommand::sandbox_gone);
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
        for done in self.pauses.drain(..) {
            let _ = done.send(Err(why())); // A caller that left needs no answer.
        }
    }

    /// The processes of a frozen sandbox run again: records it.
    pub(super) async fn resumed(&mut self) {
        self.live.reopen_commands();
        self.deadlines.started(self.live.shared.clock.now());
        match self.record(State::Running, Goal::Running, None).await {
            Ok(()) => info!("sandbox runs again"),
            // The row still says that a resume is under way, so the next daemon finishes it.
            Err(error) => error!(error = chain(&error), "cannot record that a sandbox runs again"),
        }
        self.judge().await;
    }

    pub(super) fn tell_pausers(&mut self, result: Result<(), EngineError>) {
        let text = result.as_ref().err().map(|error| chain(error));
        let mut result = Some(result);
        let id = self.live.id;
        for done in self.pauses.drain(..) {
            // The first caller gets the error itself, the others its text: errors cannot be cloned.
            let answer = result.take().unwrap_or_else(|| match &text {
                None => Ok(()),
                Some(text) => {
                    let source = std::io::Error::other(text.clone());
                    let source = BackendError::Refused { doing: "pause it".into(), source };
                    Err(EngineError::Pause { id, source })
                }
            });
            let _ = done.send(answer); // A caller that left needs no answer.
        }
    }
}
