//! Tracks the current uses of a sandbox, and when the last use ended.
//!
//! Anything that works in a sandbox for a caller holds a *use*: a request, an open stream, the wait for a command. The
//! use is taken before the work and dropped after it, which costs a lock and a clock read, and no message. The
//! sandbox's driver decides under the same lock whether the sandbox has expired, and then rejects new uses: so a use
//! that has begun is never interrupted by the expiry, and one that comes too late gets an error.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::Guest;

/// The uses of one sandbox.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    state: Mutex<UsesNow>,
}

/// See the module comment.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct UsesNow {
    /// How many are open.
    pub open: u32,
    /// When the last of them ended, since the boot. `None`: there was none since the daemon started.
    pub last: Option<Duration>,
    /// The sandbox is about to be deleted: no new use may begin.
    pub closed: bool,
}

impl Activity {
    fn lock(&self) -> MutexGuard<'_, UsesNow> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn now(&self) -> UsesNow {
        *self.lock()
    }

    /// Rejects new uses if `is_over` returns true for the current ones. Returns whether it does.
    pub fn close_if(&self, is_over: impl FnOnce(UsesNow) -> bool) -> bool {
        let mut state = self.lock();
        if is_over(*state) {
            state.closed = true;
        }
        state.closed
    }

    /// The sandbox was not deleted after all.
    pub fn reopen(&self) {
        self.lock().closed = false;
    }
}

/// An open use. It ends when it is dropped.
pub(crate) struct Use {
    guest: Arc<Guest>,
}

impl Use {
    /// Begins a use. `None`: the sandbox is about to be deleted.
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
        // Two threads may read the clock in one order and take the lock in the other.
        state.last = state.last.max(Some(now));
    }
}
