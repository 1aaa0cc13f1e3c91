//! Who uses a sandbox right now, and when the last use ended.
//!
//! A *use* is held by whatever works in a sandbox for a caller: a request, an open stream, the wait for a command. It is taken
//! before the work and dropped after it, which costs a lock and a look at the clock, and no message. Whether the time of
//! a sandbox is over is decided by its driver under the same lock, which then lets no use begin any more: so a use that
//! has begun is never overtaken by the end, and one that comes too late is told so.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::Guest;

/// The uses of one sandbox.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    state: Mutex<UsesNow>,
}

/// See the head of this file.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct UsesNow {
    /// Under way.
    pub open: u32,
    /// When the last of them ended, since the boot. `None`: there was none since the daemon started.
    pub last: Option<Duration>,
    /// The sandbox is about to go: no use begins.
    pub closed: bool,
}

impl Activity {
    fn lock(&self) -> MutexGuard<'_, UsesNow> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn now(&self) -> UsesNow {
        *self.lock()
    }

    /// Lets no use begin if `is_over` says so of those there are. Tells whether that is so.
    pub fn close_if(&self, is_over: impl FnOnce(UsesNow) -> bool) -> bool {
        let mut state = self.lock();
        if is_over(*state) {
            state.closed = true;
        }
        state.closed
    }

    /// The end did not come.
    pub fn reopen(&self) {
        self.lock().closed = false;
    }
}

/// A use under way. It ends when it is dropped.
pub(crate) struct Use {
    guest: Arc<Guest>,
}

impl Use {
    /// Begins a use. `None`: the sandbox is about to go.
    pub fn begin(guest: &Arc<Guest>) -> Option<Self> {
        let mut state = guest.uses.lock();
        if state.closed {
            return None;
        }
        state.open += 1;
        drop(state);
        Some(Self { guest: Arc::clone(guest) })
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        let now = self.guest.clock.now().since_boot;
        let mut state = self.guest.uses.lock();
        state.open -= 1;
        // Clocks of two threads may be read in one order and written in the other.
        state.last = state.last.max(Some(now));
    }
}
