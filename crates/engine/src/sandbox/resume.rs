//! How a driver lets a paused sandbox run again, and how requests resume the sandbox that they are for.
//!
//! A frozen sandbox is thawed. One whose processes were ended is launched again over the files that it has kept; its
//! processor and memory limits count again from then on, so a resume may be refused for want of room. A failed sandbox
//! whose files are whole is launched again too. If a launch fails, the driver ends what it has started and the sandbox
//! stays as it was.
//!
//! All callers that wait for a resume share it. A resume that is asked for during a pause follows the pause.

use std::sync::Arc;

use runtime::BackendError;
use tokio::sync::oneshot;
use tracing::{error, info, warn};

use crate::error::{EngineError, chain};
use crate::guest::LinkEnd;
use crate::model::KeyLimits;
use crate::model::hook::HookPoint;
use crate::sandbox::calls::ask;
use crate::sandbox::driver::{Driver, Message, Work};
use crate::sandbox::hooks::Then as After;
use crate::sandbox::lifecycle::{Goal, Kept, State, Wish};
use crate::sandbox::live::LiveSandbox;
use crate::sandbox::pause::tell_all;
use crate::task::Task;
use wire::launch::Motion;

/// After this many failed attempts to thaw a sandbox, its processes are given up. Its files stay.
pub(super) const THAWS_MAX: u32 = 5;

/// A caller that waits until the sandbox runs.
pub(crate) struct Resumer {
    /// The quota that the resume must fit into.
    pub limits: KeyLimits,
    pub done: oneshot::Sender<Result<(), EngineError>>,
}

/// Lets a sandbox run, and returns when it does.
pub(crate) async fn resume(live: &LiveSandbox, limits: KeyLimits) -> Result<(), EngineError> {
    ask(live, |done| Message::Resume(Resumer { limits, done })).await
}

impl Driver {
    /// Begins what callers have asked for and nothing under way prevents any more. The driver's loop calls this after every event.
    pub(super) async fn carry_on(&mut self) {
        if self.hooking.is_some() {
            return; // What follows the hook comes first.
        }
        let state = self.live.state();
        if self.goal != state.settled_goal() {
            // A sandbox that was frozen for a capture needs no other freeze.
            if (state, self.goal) == (State::Running, Goal::Paused(Kept::Frozen))
                && self.holds.rests_in(Motion::Still)
                && matches!(self.work, Work::None | Work::Linked(_))
            {
                self.paused(Kept::Frozen).await;
            }
            return;
        }
        if let Some(pausing) = self.next_pause.take() {
            match state.goal(Wish::Pause(pausing.spec.kept)) {
                Ok(Some(_)) => drop(self.pause(pausing).await), // `pause` tells callers what prevents it.
                Ok(None) => self.tell_pausers(Ok(())),
                Err(_) => self.refuse_waiting(),
            }
            return;
        }
        if self.resumes.is_empty() {
            return;
        }
        match state.goal(Wish::Resume) {
            Ok(None) => self.tell_resumers(Ok(())),
            Err(_) => self.refuse_waiting(),
            Ok(Some(_)) if state == State::Paused(Kept::Frozen) => self.thaw().await,
            // A capture reads the files, or processes are being ended: this comes again when that is done.
            Ok(Some(_)) if self.holds.is_held() => {}
            Ok(Some(_)) if matches!(self.work, Work::None | Work::Resting { .. }) => self.relaunch().await,
            Ok(Some(_)) => {}
        }
    }

    async fn thaw(&mut self) {
        match self.aim(Goal::Running).await {
            Ok(()) => self.settle_motion(),
            Err(error) => self.tell_resumers(Err(error)),
        }
    }

    /// Launches the sandbox over the files that it has kept.
    async fn relaunch(&mut self) {
        let (live, capacity) = (Arc::clone(&self.live), self.live.shared.config.capacity);
        let fits =
            |resumer: Resumer| match live.shared.registry().take_compute(&live, &resumer.limits, &capacity) {
                Ok(()) => Some(resumer),
                Err(error) => {
                    let _ = resumer.done.send(Err(error)); // A caller that left needs no answer.
                    None
                }
            };
        self.resumes = std::mem::take(&mut self.resumes).into_iter().filter_map(fits).collect();
        if self.resumes.is_empty() {
            return info!("there is no room to resume a sandbox");
        }
        if let Err(error) = self.aim(Goal::Running).await {
            self.live.shared.registry().release_compute(&self.live);
            return self.tell_resumers(Err(error));
        }
        self.failures = 0;
        self.make_again();
    }

    /// The launch succeeded. What belongs to a running sandbox beside its processes and files is given to it here: the network of its
    /// policy, and whatever else outlives its processes.
    pub(super) async fn relaunched(&mut self, link: Task<LinkEnd>) {
        self.work = Work::Linked(link);
        self.holds.start_over();
        self.live.commands.timeouts.go_on();
        self.live.guest.memory_kills.start_over();
        if let Err(error) = self.runs_again().await {
            let source = std::io::Error::other(chain(&error));
            let error = BackendError::Refused { doing: "record that the sandbox runs".into(), source };
            self.relaunch_failed(error).await;
        }
    }

    /// The launch failed: ends what it has started. The sandbox stays as it was.
    pub(super) async fn relaunch_failed(&mut self, error: BackendError) {
        warn!(error = chain(&error), "cannot resume a sandbox");
        self.work = Work::None; // Dropping a link ends it.
        self.live.close_commands();
        self.live.shared.registry().release_compute(&self.live);
        self.aim_at(self.live.state().settled_goal()).await;
        let id = self.live.id;
        self.tell_resumers(Err(EngineError::Resume { id, source: error }));
        self.end_processes();
    }

    /// The processes of a frozen sandbox run again: records it.
    pub(super) async fn thawed(&mut self) {
        self.link_if_unlinked();
        if let Err(error) = self.runs_again().await {
            // Its row says that it is paused, so it is.
            self.aim_at(self.live.state().settled_goal()).await;
            self.settle_motion();
            self.tell_resumers(Err(error));
        }
    }

    async fn runs_again(&mut self) -> Result<(), EngineError> {
        self.deadlines.started(self.live.shared.clock.now());
        if !self.deadlines.lifetime().rules().is_empty() {
            self.note_use();
        }
        self.hook_is_due(HookPoint::AfterResume).await;
        // Commands are refused until the state says that the sandbox runs.
        self.live.reopen_commands();
        if let Err(error) = self.record(State::Running, Goal::Running, None).await {
            error!(error = chain(&error), "cannot record that a sandbox runs again");
            return Err(error);
        }
        info!("sandbox runs again");
        self.settle_motion();
        if self.run_due(After::Resumed).is_some() {
            self.tell_resumers(Ok(()));
        }
        self.judge().await;
        Ok(())
    }

    /// The processes of a frozen sandbox cannot be thawed. The driver tries on, and at last gives them up.
    pub(super) async fn thaw_failed(&mut self, failures: u32, error: &BackendError) {
        let source = std::io::Error::other(chain(error));
        let source = BackendError::Refused { doing: "thaw it".into(), source };
        self.tell_resumers(Err(EngineError::Resume { id: self.live.id, source }));
        if failures >= THAWS_MAX {
            self.work = Work::None;
            self.lost(LinkEnd::Gone).await;
        }
    }

    pub(super) fn link_if_unlinked(&mut self) {
        if matches!(self.work, Work::None) {
            self.link();
        }
    }

    /// The state does not allow what callers wait for: each of them gets that error.
    pub(super) fn refuse_waiting(&mut self) {
        let resumes = self.resumes.drain(..).map(|resumer| resumer.done);
        for done in self.pauses.drain(..).chain(resumes) {
            let _ = done.send(Err(self.live.wrong_state())); // A caller that left needs no answer.
        }
    }

    pub(super) fn tell_resumers(&mut self, result: Result<(), EngineError>) {
        let id = self.live.id;
        let again = |text: &str| {
            let source = std::io::Error::other(text.to_owned());
            let source = BackendError::Refused { doing: "resume it".into(), source };
            EngineError::Resume { id, source }
        };
        tell_all(self.resumes.drain(..).map(|resumer| resumer.done), result, again);
    }
}
