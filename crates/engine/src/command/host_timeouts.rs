//! The second guard of timeouts: the host kills commands that init should have killed.
//!
//! Init owns the timers of commands, because they must run while the daemon does not. But init shares the sandbox with
//! guests, which may starve it, stop it, or have taken it over. So the daemon watches too: if a command outlives its
//! timeout by [`MARGIN`] beyond its grace, the host kills its process group. Init then has [`REPORT_WAIT`] to report
//! how the command ended and to send the rest of its output; after that the result says that the end was not reported.
//!
//! The host may kill late but never early: the time starts when init reports that the command runs, or again when a new
//! daemon finds the command, and stops while the sandbox is frozen. An idle timeout has no such guard, since only init
//! sees that a command is silent.

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

/// How much later than init's own kill the host's kill comes: init may get no processor time for a while without being
/// stuck.
const MARGIN: Duration = Duration::from_secs(5);
/// How long init may take, after the host's kill, to report the end and to send the rest of the output.
const REPORT_WAIT: Duration = Duration::from_secs(10);
/// The shortest and the longest delay between two attempts to kill.
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(10);

/// The commands of a sandbox that have a timeout.
#[derive(Default)]
pub(crate) struct Backstop {
    state: Mutex<State>,
    /// Signals that the earliest deadline has moved forward.
    earlier: Arc<Notify>,
}

#[derive(Default)]
struct State {
    order: BTreeSet<(Instant, Handle)>,
    armed: HashMap<Handle, Instant>,
    /// Since when the sandbox is frozen.
    still_since: Option<Instant>,
    /// Whether a task watches the deadlines.
    watched: bool,
}

/// How long a command may run before the host kills it.
fn length(start: &Start) -> Option<Duration> {
    let milliseconds = start.timeout_ms?.saturating_add(start.grace_ms);
    Duration::from_millis(milliseconds).checked_add(MARGIN)
}

impl Backstop {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The command runs. Repeating the call is harmless.
    pub fn arm(&self, commands: &Arc<Commands>, start: &Start) {
        // A deadline that overflows the clock is never reached.
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

    /// The command has ended.
    pub fn disarm(&self, handle: Handle) {
        let mut state = self.lock();
        if let Some(at) = state.armed.remove(&handle) {
            state.order.remove(&(at, handle));
        }
    }

    /// The sandbox is frozen, which stops the clock of its commands.
    pub fn stand_still(&self) {
        self.lock().still_since.get_or_insert_with(Instant::now);
    }

    /// The sandbox is thawed.
    pub fn go_on(&self) {
        let mut state = self.lock();
        let Some(since) = state.still_since.take() else { return };
        let length = since.elapsed();
        let State { order, armed, .. } = &mut *state;
        for at in armed.values_mut() {
            *at = at.checked_add(length).unwrap_or(*at); // On overflow the deadline is never reached anyway.
        }
        *order = armed.iter().map(|(handle, at)| (*at, *handle)).collect();
    }

    /// The command that is due. `Err` is the time to check again; `None`: there is nothing left to watch.
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
            // Deadlines are moved when the sandbox is thawed; until then this one is only checked again.
            return Some(Err(now + MARGIN));
        }
        // The command stays armed until it ends, so that it is not killed twice.
        state.order.remove(&(at, handle));
        Some(Ok(handle))
    }
}

/// Holds a strong reference to the commands only while it checks them.
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

/// Kills a command that has outlived its timeout, and makes sure that it gets a result.
async fn strike(commands: Arc<Commands>, handle: Handle) {
    let Ok(Some(command)) = commands.by_handle(handle) else { return };
    if !command.strike() {
        return; // The command has ended; its result is being stored.
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

/// `false`: the command has ended by itself, or the engine is stopping and the next one will handle it.
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
