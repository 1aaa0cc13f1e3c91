//! How a driver freezes and thaws the processes of its sandbox, and for whom.
//!
//! A caller that reads the files of a sandbox, and must not see them change, holds the sandbox. The driver freezes the processes for
//! the first holder and thaws them after the last one. [`lifecycle::motion`](crate::sandbox::lifecycle::motion) decides what the
//! processes should do, so a paused sandbox stays frozen after a hold. The host's timeouts of commands stop counting meanwhile.
//!
//! A hold ends when its holder releases it, drops it or dies, and after [`HOLD_MAX`] at the latest.

use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use runtime::BackendError;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep, sleep_until};
use tracing::warn;
use wire::launch::Motion;

use crate::error::{EngineError, chain};
use crate::sandbox::calls::ask;
use crate::sandbox::driver::{Driver, Message, RETRY_MAX, RETRY_MIN, Work, panicked, within};
use crate::sandbox::lifecycle::{Goal, Kept, State, motion};
use crate::sandbox::live::LiveSandbox;
use crate::task::Task;

/// How long one hold may last. Reading all files of a large sandbox takes minutes; a holder that takes longer is stuck.
pub(crate) const HOLD_MAX: Duration = Duration::from_secs(3600);
/// How many holds of one sandbox may exist at the same time.
const HOLDERS_MAX: usize = 16;
/// How long freezing or thawing may take. A process that waits for a disk stops only when the disk has answered.
const MOTION_SECONDS: u64 = 30;

type Answer<T> = oneshot::Sender<Result<T, EngineError>>;

/// Keeps the processes of a sandbox frozen. Dropping it ends the hold; [`Hold::release`] also waits for the thaw.
pub(crate) struct Hold {
    token: Arc<Token>,
}

/// The driver ended a hold before its holder did: the sandbox failed or was deleted, or the hold lasted too long. Files may have
/// changed meanwhile.
#[derive(Debug, thiserror::Error)]
#[error("the sandbox did not stay frozen: it failed, was deleted, or took longer than {} seconds", HOLD_MAX.as_secs())]
pub(crate) struct HoldBroken;

/// What a holder and the driver share.
struct Token {
    end: Mutex<HoldEnd>,
    /// Wakes the driver.
    wake: Arc<Notify>,
}

enum HoldEnd {
    /// The hold lasts.
    Open,
    /// The holder has ended it, and may wait until the processes run again.
    Released(Option<oneshot::Sender<()>>),
    /// The driver has ended it.
    Broken,
}

impl Token {
    fn end(&self) -> MutexGuard<'_, HoldEnd> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hold {
    /// Ends the hold and waits until the processes run again, unless the sandbox is paused or another caller holds
    /// it.
    pub async fn release(self) -> Result<(), HoldBroken> {
        let (done, is_done) = oneshot::channel();
        match &mut *self.token.end() {
            end @ HoldEnd::Open => *end = HoldEnd::Released(Some(done)),
            HoldEnd::Released(_) | HoldEnd::Broken => return Err(HoldBroken),
        }
        self.token.wake.notify_one();
        let _ = is_done.await; // An error means that the driver is gone, and with it the need to wait.
        Ok(())
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut end = self.token.end();
        if let HoldEnd::Open = *end {
            *end = HoldEnd::Released(None);
            self.token.wake.notify_one();
        }
    }
}

/// Freezes the processes of a sandbox until the hold ends. A paused sandbox can be held too.
pub(crate) async fn hold(live: &LiveSandbox) -> Result<Hold, EngineError> {
    ask(live, |done| Message::Hold { done }).await
}

/// Thaws a sandbox whose holder died with an earlier daemon. Returns after the first attempt; the driver retries.
pub(crate) async fn end_old_holds(live: &LiveSandbox) -> Result<(), EngineError> {
    ask(live, |done| Message::EndOldHolds { done }).await
}

/// The holds of one sandbox, and what its processes do.
pub(super) struct Holds {
    /// What the processes do. `None`: not known, because a change failed or an earlier daemon died.
    motion: Option<Motion>,
    change: Option<(Motion, Task<Result<(), BackendError>>)>,
    /// Failed changes in a row.
    failures: u32,
    holders: Vec<Holder>,
    /// Callers to answer once the processes do what they should.
    waiting: Vec<Waiting>,
    wake: Arc<Notify>,
}

struct Holder {
    token: Arc<Token>,
    until: Instant,
    /// The caller, until the processes are frozen.
    asked: Option<Answer<Hold>>,
}

enum Waiting {
    /// The hold is over.
    Released(oneshot::Sender<()>),
    /// The processes could not be frozen.
    Refused(Answer<Hold>, EngineError),
    /// Answered after the next change, whether it worked or not.
    Tried(Answer<()>),
}

impl Waiting {
    fn answer(self) {
        // Callers that left need no answer.
        match self {
            Self::Released(done) => drop(done.send(())),
            Self::Refused(done, error) => drop(done.send(Err(error))),
            Self::Tried(done) => drop(done.send(Ok(()))),
        }
    }
}

/// What happened to holds.
pub(super) enum HoldEvent {
    /// The processes were frozen or thawed, or could not be.
    Moved(Result<(), BackendError>),
    /// A holder has ended its hold.
    Released,
    /// A hold has lasted for [`HOLD_MAX`].
    Expired,
}

impl Holds {
    /// What to expect of a sandbox that is in this state.
    pub fn of(state: State) -> Self {
        let motion = match state {
            State::Paused(Kept::Frozen) => Motion::Still,
            State::Creating
            | State::Running
            | State::Paused(Kept::Saved | Kept::Dropped)
            | State::Deleting
            | State::Failed { .. } => Motion::Going,
        };
        Self {
            motion: Some(motion),
            change: None,
            failures: 0,
            holders: Vec::new(),
            waiting: Vec::new(),
            wake: Arc::default(),
        }
    }

    /// Whether anyone holds the sandbox, or waits to.
    pub fn is_held(&self) -> bool {
        !self.holders.is_empty()
    }

    /// Whether the processes are known to do this, and nothing is about to change that.
    pub fn rests_in(&self, motion: Motion) -> bool {
        self.change.is_none() && self.motion == Some(motion)
    }

    /// The sandbox has new processes.
    pub fn start_over(&mut self) {
        (self.motion, self.failures) = (Some(Motion::Going), 0);
    }

    /// Nothing is known about the processes, because an earlier daemon may have died while it froze or thawed them.
    pub fn forget_motion(&mut self) {
        self.motion = None;
    }

    /// Waits for the next event. Cancel-safe: the future may be dropped and `next` called again.
    pub async fn next(&mut self) -> HoldEvent {
        let Self { change, holders, wake, .. } = self;
        let expires = holders.iter().map(|holder| holder.until).min();
        let moved = async {
            match change {
                Some((_, task)) => {
                    task.await.unwrap_or_else(|error| Err(panicked("freeze or thaw the sandbox", error)))
                }
                None => pending().await,
            }
        };
        let expired = async {
            match expires {
                Some(at) => sleep_until(at).await,
                None => pending().await,
            }
        };
        tokio::select! {
            result = moved => HoldEvent::Moved(result),
            () = wake.notified() => HoldEvent::Released,
            () = expired => HoldEvent::Expired,
        }
    }

    /// Removes the holds whose holders have ended them.
    fn remove_released(&mut self) {
        let Self { holders, waiting, .. } = self;
        holders.retain(|holder| match &mut *holder.token.end() {
            HoldEnd::Open => true,
            HoldEnd::Released(done) => {
                waiting.extend(done.take().map(Waiting::Released));
                false
            }
            HoldEnd::Broken => false,
        });
    }

    /// Ends the holds that have lasted too long.
    fn break_expired(&mut self) {
        let now = Instant::now();
        for holder in self.holders.iter().filter(|holder| holder.until <= now) {
            warn!("a sandbox was frozen for {} seconds; its processes run again now", HOLD_MAX.as_secs());
            break_hold(&holder.token);
        }
    }
}

fn break_hold(token: &Token) {
    let mut end = token.end();
    if let HoldEnd::Open = *end {
        *end = HoldEnd::Broken;
    }
}

impl Driver {
    /// A caller wants to hold the sandbox.
    pub(super) fn hold(&mut self, done: Answer<Hold>) {
        let refused = match self.live.state() {
            State::Running | State::Paused(_) if self.holds.holders.len() >= HOLDERS_MAX => {
                let what = format!("sandbox `{}` is already held by {HOLDERS_MAX} others", self.live.id);
                Some(EngineError::Full { what })
            }
            State::Running | State::Paused(_) => None,
            State::Creating | State::Deleting | State::Failed { .. } => Some(self.live.wrong_state()),
        };
        if let Some(error) = refused {
            let _ = done.send(Err(error)); // A caller that left needs no answer.
            return;
        }
        let token = Token { end: Mutex::new(HoldEnd::Open), wake: Arc::clone(&self.holds.wake) };
        let until = Instant::now() + HOLD_MAX;
        self.holds.holders.push(Holder { token: Arc::new(token), until, asked: Some(done) });
        self.settle_motion();
    }

    /// An earlier daemon may have died while it held the sandbox.
    pub(super) fn end_old_holds(&mut self, done: Answer<()>) {
        self.holds.waiting.push(Waiting::Tried(done));
        if self.holds.change.is_none() && self.holds.holders.is_empty() {
            self.holds.forget_motion();
        }
        self.settle_motion();
    }

    /// Freezes or thaws the processes if they do not do what they should, and answers callers if they do.
    pub(super) fn settle_motion(&mut self) {
        self.holds.remove_released();
        if self.holds.change.is_some() {
            return; // What comes next is decided when that is done.
        }
        let wanted = motion(self.live.state(), self.goal, !self.holds.holders.is_empty());
        match wanted {
            Some(wanted) if self.holds.motion != Some(wanted) => self.change_motion(wanted),
            // Processes are being started over the files: the hold begins when they can be frozen.
            None if matches!(self.work, Work::Making { .. }) => {}
            Some(_) | None => {
                self.grant_holds();
                self.holds.waiting.drain(..).for_each(Waiting::answer);
            }
        }
    }

    fn grant_holds(&mut self) {
        for holder in &mut self.holds.holders {
            if let Some(done) = holder.asked.take() {
                // If the caller has left, dropping the hold ends it.
                let _ = done.send(Ok(Hold { token: Arc::clone(&holder.token) }));
            }
        }
    }

    fn change_motion(&mut self, to: Motion) {
        if to == Motion::Still {
            self.live.commands.timeouts.stand_still();
        }
        let pause = match self.holds.failures {
            0 => Duration::ZERO,
            failures => RETRY_MIN.saturating_mul(1 << failures.min(16)).min(RETRY_MAX),
        };
        let live = Arc::clone(&self.live);
        let task = Task::spawn(async move {
            sleep(pause).await;
            let freeze = live.shared.backend.freeze(live.id, to);
            within(MOTION_SECONDS, "freeze or thaw the sandbox", freeze).await
        });
        self.holds.change = Some((to, task));
    }

    pub(super) async fn holds_changed(&mut self, event: HoldEvent) {
        match event {
            HoldEvent::Moved(result) => self.moved(result).await,
            HoldEvent::Released => {}
            HoldEvent::Expired => self.holds.break_expired(),
        }
        self.settle_motion();
    }

    /// The processes were frozen or thawed, or could not be.
    async fn moved(&mut self, result: Result<(), BackendError>) {
        let Some((to, _)) = self.holds.change.take() else { return };
        let (tried, waiting) = std::mem::take(&mut self.holds.waiting)
            .into_iter()
            .partition(|waiting| matches!(waiting, Waiting::Tried(_)));
        self.holds.waiting = waiting;
        match result {
            Ok(()) => {
                (self.holds.motion, self.holds.failures) = (Some(to), 0);
                if to == Motion::Going {
                    self.live.commands.timeouts.go_on();
                }
                self.motion_reached(to).await;
            }
            // The processes may be frozen by now all the same, so nothing is known about them.
            Err(error) => {
                warn!(error = chain(&error), "cannot freeze or thaw a sandbox");
                self.holds.motion = None;
                self.motion_failed(to, error).await;
            }
        }
        let tried: Vec<Waiting> = tried;
        tried.into_iter().for_each(Waiting::answer);
    }

    /// Records a pause or a resume that is complete now.
    async fn motion_reached(&mut self, motion: Motion) {
        match (self.live.state(), self.goal, motion) {
            (State::Running, Goal::Paused(Kept::Frozen), Motion::Still) => self.paused(Kept::Frozen).await,
            (State::Paused(Kept::Frozen), Goal::Running, Motion::Going) => self.thawed().await,
            _ => {}
        }
    }

    /// Reports a failed freeze to the caller that asked for it. Retries a failed thaw.
    async fn motion_failed(&mut self, motion: Motion, error: BackendError) {
        if motion == Motion::Going {
            self.holds.failures += 1;
            if (self.live.state(), self.goal) == (State::Paused(Kept::Frozen), Goal::Running) {
                self.thaw_failed(self.holds.failures, &error).await;
            }
            return;
        }
        let id = self.live.id;
        let text = chain(&error);
        let refused = || {
            let source = std::io::Error::other(text.clone());
            EngineError::Pause { id, source: BackendError::Refused { doing: "freeze it".into(), source } }
        };
        for mut holder in std::mem::take(&mut self.holds.holders) {
            match holder.asked.take() {
                Some(done) => self.holds.waiting.push(Waiting::Refused(done, refused())),
                None => break_hold(&holder.token),
            }
        }
        if self.goal == Goal::Paused(Kept::Frozen) {
            self.undo_pause(refused).await;
        }
    }

    /// Ends all holds, because the sandbox has failed or is being deleted.
    pub(super) fn break_holds(&mut self) {
        self.holds.change = None; // Dropping the task ends it.
        for mut holder in std::mem::take(&mut self.holds.holders) {
            break_hold(&holder.token);
            if let Some(done) = holder.asked.take() {
                let _ = done.send(Err(self.live.wrong_state())); // A caller that left needs no answer.
            }
        }
        self.holds.waiting.drain(..).for_each(Waiting::answer);
    }
}
