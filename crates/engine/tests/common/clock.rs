//! Clocks that stand still until a test moves them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use shoal_engine::observe::clock::{Clock, Moment};
use tokio::sync::Notify;

/// Long enough after a boot that the wall clock is believed.
const UP: Duration = Duration::from_secs(5000);
/// Some day in 2027.
const TODAY: Duration = Duration::from_secs(1_800_000_000);

/// Clones are the same clocks.
#[derive(Clone)]
pub struct StillClock {
    inner: Arc<Inner>,
}

struct Inner {
    state: Mutex<State>,
    moved: Notify,
}

struct State {
    now: Moment,
    /// What timers go by: it stands still while the machine is suspended.
    ticked: Duration,
    /// When those who sleep want to wake.
    sleepers: BTreeMap<u64, Duration>,
    next: u64,
}

impl StillClock {
    pub fn new() -> Self {
        let now = Moment { wall: UNIX_EPOCH + TODAY, boot: 1, since_boot: UP };
        let state = State { now, ticked: Duration::ZERO, sleepers: BTreeMap::new(), next: 0 };
        Self { inner: Arc::new(Inner { state: Mutex::new(state), moved: Notify::new() }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.inner.moved.notify_waiters();
    }

    /// What a person would read off it.
    pub fn now_wall(&self) -> SystemTime {
        self.state().now.wall
    }

    /// Time passes.
    pub fn advance(&self, seconds: f64) {
        let length = Duration::from_secs_f64(seconds);
        self.change(|state| {
            state.now.wall += length;
            state.now.since_boot += length;
            state.ticked += length;
        });
    }

    /// Time passes while the machine is suspended: no timer notices.
    pub fn suspend(&self, seconds: u64) {
        let length = Duration::from_secs(seconds);
        self.change(|state| {
            state.now.wall += length;
            state.now.since_boot += length;
        });
    }

    /// Somebody sets the wall clock.
    pub fn set_wall(&self, wall: SystemTime) {
        self.change(|state| state.now.wall = wall);
    }

    /// The machine was off, and is up since so many seconds.
    pub fn reboot(&self, off_seconds: u64, up_seconds: u64) {
        self.change(|state| {
            state.now.boot += 1;
            state.now.since_boot = Duration::from_secs(up_seconds);
            state.now.wall += Duration::from_secs(off_seconds + up_seconds);
        });
    }

    /// Waits until every task that is due has run and sleeps again.
    pub async fn settled(&self) {
        super::eventually("all who sleep sleep on", async || {
            let state = self.state();
            !state.sleepers.is_empty() && state.sleepers.values().all(|until| *until > state.ticked)
        })
        .await;
    }
}

/// Takes a sleeper off the list, also when it is not waited for any more.
struct Sleeper<'a>(&'a StillClock, u64);

impl Drop for Sleeper<'_> {
    fn drop(&mut self) {
        self.0.state().sleepers.remove(&self.1);
    }
}

#[async_trait::async_trait]
impl Clock for StillClock {
    fn now(&self) -> Moment {
        self.state().now
    }

    async fn sleep(&self, length: Duration) {
        let (until, sleeper) = {
            let mut state = self.state();
            let (until, number) = (state.ticked + length, state.next);
            state.next += 1;
            state.sleepers.insert(number, until);
            (until, Sleeper(self, number))
        };
        loop {
            let mut moved = std::pin::pin!(self.inner.moved.notified());
            moved.as_mut().enable();
            if self.state().ticked >= until {
                return drop(sleeper);
            }
            moved.await;
        }
    }
}
