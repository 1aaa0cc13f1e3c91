//! The second guard of timeouts: ends from outside what init should have ended.
//!
//! Init owns the timers of commands, because they must run while the daemon does not. But init lives with its guests: they may
//! starve it, stop it, or have taken it over. So the daemon looks on, and if a command outlives its timeout by
//! [`MARGIN`] beyond its grace, the host kills its group. Init then has [`REPORT_WAIT`] to say how it ended and to hand over what
//! it wrote; after that the result says that nobody heard.
//!
//! It may strike late and never early: the time begins when init says that the command runs, or anew when a new daemon finds it,
//! and stands still while the sandbox does. An idle timeout has no such guard, since nobody but init sees that a command is silent.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::warn;
use wire::guest::{Handle, Start};
use wire::launch::Processes;

use crate::command::{Commands, LiveCommand};
use crate::error::chain;

/// How much later than init's own kill the host's comes: init may be short of the processor for a while without being stuck.
const MARGIN: Duration = Duration::from_secs(5);
/// How long init may take, after the host's kill, to tell the end and to hand over the rest of the output.
const REPORT_WAIT: Duration = Duration::from_secs(10);
/// Between two attempts to kill, at first and at most.
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(10);

/// A sandbox's commands that have a timeout.
#[derive(Default)]
pub(crate) struct Backstop {
    state: Mutex<State>,
    /// There is an earlier deadline than before.
    earlier: Arc<Notify>,
}

#[derive(Default)]
struct State {
    order: BTreeSet<(Instant, Handle)>,
    armed: HashMap<Handle, Instant>,
    /// The sandbox stands still.
    still_since: Option<Instant>,
    /// A task looks after it.
    watched: bool,
}

/// When the host ends a command that init has not ended.
fn length(start: &Start) -> Option<Duration> {
    let milliseconds = start.timeout_ms?.saturating_add(start.grace_ms);
    Duration::from_millis(milliseconds).checked_add(MARGIN)
}

impl Backstop {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The command runs. Harmless when that is known.
    pub fn arm(&self, commands: &Arc<Commands>, start: &Start) {
        // A length beyond all time never strikes.
        let Some(at) = length(start).and_then(|length| Instant::now().checked_add(length)) else { return };
        let handle = start.handle;
        let mut state = self.lock();
        if state.armed.contains_key(&handle) {
            return;
        }
        state.armed.insert(handle, at);
        state.order.insert((at, handle));
        let first = state.order.first() == Some(&(at, handle));
        let watch = !std::mem::replace(&mut state.watched, true);
        drop(state);
        if watch {
            commands.guest.runtime.spawn(watch_over(Arc::downgrade(commands)));
        } else if first {
            self.earlier.notify_one();
        }
    }

    /// The command is over.
    pub fn disarm(&self, handle: Handle) {
        let mut state = self.lock();
        if let Some(at) = state.armed.remove(&handle) {
            state.order.remove(&(at, handle));
        }
    }

    /// The sandbox stands still, and its commands' time with it.
    pub fn stand_still(&self) {
        self.lock().still_since.get_or_insert_with(Instant::now);
    }

    /// The sandbox goes on.
    pub fn go_on(&self) {
        let mut state = self.lock();
        let Some(since) = state.still_since.take() else { return };
        let length = since.elapsed();
        let State { order, armed, .. } = &mut *state;
        for at in armed.values_mut() {
            *at = at.checked_add(length).unwrap_or(*at); // Beyond all time, it never strikes anyway.
        }
        *order = armed.iter().map(|(handle, at)| (*at, *handle)).collect();
    }

    /// What is due. `Err` tells when to look again; `None`: there is nothing more to look after.
    fn due(&self) -> Option<Result<Handle, Instant>> {
        let now = Instant::now();
        let mut state = self.lock();
        let Some((at, handle)) = state.order.first().copied() else {
            state.watched = false;
            return None;
        };
        if at > now {
            return Some(Err(at));
        }
        if state.still_since.is_some() {
            // Deadlines are moved when it goes on; until then this one only comes up again.
            return Some(Err(now + MARGIN));
        }
        // It stays armed until it is over, so that it is not struck twice.
        state.order.remove(&(at, handle));
        Some(Ok(handle))
    }
}

/// Holds the commands only while it looks.
async fn watch_over(commands: Weak<Commands>) {
    loop {
        let (at, earlier) = {
            let Some(commands) = commands.upgrade() else { return };
            match commands.timeouts.due() {
                None => return,
                Some(Ok(handle)) => {
                    commands.guest.runtime.spawn(strike(Arc::clone(&commands), handle));
                    continue;
                }
                Some(Err(at)) => (at, Arc::clone(&commands.timeouts.earlier)),
            }
        };
        tokio::select! {
            () = sleep_until(at) => {}
            () = earlier.notified() => {}
        }
    }
}

/// Ends a command that has outlived its timeout, and sees to it that it gets a result.
async fn strike(commands: Arc<Commands>, handle: Handle) {
    let Ok(Some(command)) = commands.by_handle(handle) else { return };
    if !command.strike() {
        return; // It is over; its result is on its way.
    }
    let sandbox = commands.guest.id;
    warn!(%sandbox, command = %command.id, "init has not ended a command at its timeout; the host does");
    if !end_from_outside(&commands, &command).await {
        return;
    }
    if timeout(REPORT_WAIT, command.lane.over()).await.is_err() {
        warn!(%sandbox, command = %command.id, "init does not say how a command ended");
        command.unheard();
    }
}

/// `false`: it has ended otherwise, or the engine stops, and the next one sees to it.
async fn end_from_outside(commands: &Commands, command: &LiveCommand) -> bool {
    let guest = &commands.guest;
    let mut pause = RETRY_MIN;
    loop {
        let ended = guest.backend.end_processes(guest.id, Processes::OfCommand(command.lane.handle())).await;
        let Err(error) = ended else { return true };
        warn!(sandbox = %guest.id, command = %command.id, error = chain(&error), "cannot end a command; trying again");
        if timeout(pause, command.lane.over()).await.is_ok() || commands.is_halted() {
            return false;
        }
        pause = (pause * 2).min(RETRY_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(handle: u32, timeout_ms: Option<u64>) -> Start {
        Start { timeout_ms, grace_ms: 2_000, ..Start::shell(Handle(handle), "id", "true") }
    }

    /// As `arm`, without the task.
    fn put(backstop: &Backstop, handle: u32, seconds: u64) {
        let at = Instant::now() + Duration::from_secs(seconds);
        let mut state = backstop.lock();
        state.armed.insert(Handle(handle), at);
        state.order.insert((at, Handle(handle)));
    }

    #[test]
    fn the_host_comes_after_inits_own_kill() {
        assert_eq!(length(&start(1, Some(500))), Some(Duration::from_millis(2_500) + MARGIN));
        assert_eq!(length(&start(1, None)), None);
        length(&start(1, Some(u64::MAX))).expect("it is long, and no overflow");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_over_is_not_struck_and_what_is_struck_is_struck_once() {
        let backstop = Backstop::default();
        (1..=3).for_each(|handle| put(&backstop, handle, u64::from(handle)));
        backstop.disarm(Handle(1));
        assert!(matches!(backstop.due(), Some(Err(_))));
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(backstop.due(), Some(Ok(Handle(2))));
        assert!(matches!(backstop.due(), Some(Err(_))), "the third is not due");
        backstop.disarm(Handle(2));
        backstop.disarm(Handle(3));
        assert_eq!(backstop.due(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn time_stands_still_with_the_sandbox() {
        let backstop = Backstop::default();
        put(&backstop, 1, 10);
        tokio::time::advance(Duration::from_secs(4)).await;
        backstop.stand_still();
        tokio::time::advance(Duration::from_secs(100)).await;
        assert!(matches!(backstop.due(), Some(Err(_))));
        backstop.go_on();
        tokio::time::advance(Duration::from_secs(5)).await;
        assert!(matches!(backstop.due(), Some(Err(_))), "a second is left");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(backstop.due(), Some(Ok(Handle(1))));
    }
}
