//! How a driver applies the lifetime rules of its sandbox.
//!
//! `deadlines` computes when a rule strikes. Because the driver alone decides, a touch, a change of the rules and an end
//! by the rules happen one after the other, and the decision sees the uses that are under way at that moment. So a caller
//! whose touch succeeded can rely on it.

use std::sync::Arc;

use runtime::{BackendError, Usage};
use tracing::{info, warn};

use crate::db::SandboxChange;
use crate::error::{DbError, EngineError, chain};
use crate::model::PauseSpec;
use crate::model::hook::HookPoint;
use crate::sandbox::driver::{Driver, within};
use crate::sandbox::lifecycle::State;
use crate::sandbox::lifetime::{Deed, Explanation, deed};
use crate::sandbox::pause::Pausing;
use crate::task::Task;

/// How long reading the resource usage of a sandbox may take. The backend reads it from a file on the host.
const LOOK_SECONDS: u64 = 10;

impl Driver {
    pub(super) async fn touch(&mut self) -> Result<Explanation, EngineError> {
        self.check_lives()?;
        let now = self.live.shared.clock.now();
        let stamps = Some(self.deadlines.stamps_touched(now));
        let change = SandboxChange { stamps, ..SandboxChange::default() };
        // Written before the caller gets an answer: a crash must not undo a renewal.
        if !self.live.shared.db.change_sandbox(self.live.row_key, change).await? {
            return Err(self.live.wrong_state());
        }
        self.deadlines.touched(now);
        self.deadlines.stored();
        self.judge().await;
        // A touch does not restart the clock of creation, whose rule may have struck just now.
        self.check_lives()?;
        Ok(self.explain())
    }

    pub(super) fn explain(&mut self) -> Explanation {
        let face = self.live.view().clone();
        let now = self.live.shared.clock.now();
        self.deadlines.explain(face.state, self.live.guest.uses.now(), face.reason.as_deref(), now)
    }

    /// It is time to check the rules. Reads the processor time first, if the decision depends on it.
    pub(super) async fn wake(&mut self) {
        if !self.deadlines.asks_for_cpu(self.live.state(), self.live.guest.uses.now()) {
            return self.judge().await;
        }
        if self.look.is_none() {
            let live = Arc::clone(&self.live);
            self.look = Some(Task::spawn(async move {
                let usage = live.shared.backend.usage(std::slice::from_ref(&live.id));
                let usage = within(LOOK_SECONDS, "read what the sandbox uses", usage).await?;
                usage.into_iter().next().flatten().ok_or(BackendError::Gone)
            }));
        }
        self.deadlines.pause_looking();
    }

    /// The processor time was read, or could not be.
    pub(super) async fn looked(&mut self, looked: Result<Usage, BackendError>) {
        self.look = None;
        let now = self.live.shared.clock.now();
        match looked {
            Ok(usage) => self.deadlines.saw_cpu(usage.cpu_time, self.live.guest.uses.now(), now),
            Err(error) => {
                warn!(error = chain(&error), "cannot tell whether a command in the sandbox works");
                self.deadlines.saw_nothing(now);
            }
        }
        self.judge().await;
    }

    /// Carries out a rule that is due, unless a use under way prevents it. Otherwise plans the next check.
    pub(super) async fn judge(&mut self) {
        let state = self.live.state();
        if self.deadlines.lifetime().is_empty() || matches!(state, State::Creating | State::Deleting) {
            return self.deadlines.plan(state, None, self.live.shared.clock.now());
        }
        if self.hooking.is_some() {
            return self.deadlines.pause_looking(); // The rules are checked again when the hook has ended.
        }
        let now = self.live.shared.clock.now();
        let hook_first = self.runs_first(HookPoint::BeforeDelete);
        let deadlines = &mut self.deadlines;
        let mut strike = None;
        let live = Arc::clone(&self.live);
        // Decided under the lock of the uses, so that no use can begin between the decision and its effect. A use that begins after a
        // decision to pause resumes the sandbox; one that begins after a decision to delete is refused.
        self.live.guest.uses.close_if(|uses| {
            strike = deadlines.strike(state, uses, now);
            match strike.filter(|strike| strike.left.is_zero()).map(|strike| deed(strike.action)) {
                // A hook is a use itself.
                Some(Deed::Delete) => !hook_first,
                Some(Deed::Pause(_)) => {
                    live.set_pausing(true);
                    false
                }
                None => false,
            }
        });
        let over = strike.is_some_and(|strike| strike.left.is_zero());
        if self.deadlines.is_unstored() {
            self.note_use();
        }
        match strike {
            Some(strike) if over => {
                let reason = self.deadlines.lifetime().rules()[strike.rule].reason();
                info!(reason, action = strike.action.word(), "a lifetime rule acts");
                if !self.carry_out(deed(strike.action), reason).await {
                    self.deadlines.retry_later(now);
                }
            }
            strike => self.deadlines.plan(state, strike.map(|strike| strike.left), now),
        }
    }

    /// Carries out the action of a rule. Returns whether the action is under way.
    async fn carry_out(&mut self, deed: Deed, reason: String) -> bool {
        match deed {
            Deed::Delete => self.delete(Some(reason)).await,
            Deed::Pause(kept) => {
                let spec = PauseSpec { kept, grace: PauseSpec::GRACE_DEFAULT };
                let pausing = self.pause(Pausing { spec, reason: Some(reason) }).await;
                match pausing {
                    true => self.deadlines.pause_looking(), // The rules are checked again when it is paused.
                    false => self.live.set_pausing(false),
                }
                pausing
            }
        }
    }

    /// Writes to the row when the sandbox was last used. Does not wait for the commit.
    pub(super) fn note_use(&mut self) {
        let id = self.live.id;
        self.deadlines.stored();
        self.live.shared.db.note_use(self.live.row_key, self.deadlines.stamps(), move |noted| match noted {
            Ok(()) | Err(DbError::Closed) => {}
            // The next use is written again. Without one, the sandbox seems a little older after a restart.
            Err(error) => {
                warn!(sandbox = %id, error = chain(&error), "cannot write when a sandbox was last used")
            }
        });
    }
}
