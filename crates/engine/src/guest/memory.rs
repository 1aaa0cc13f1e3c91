//! Attributes a sandbox's memory kills to commands and file operations.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::timeout;
use tracing::warn;

use super::Guest;
use crate::error::chain;

/// How long reading the count of memory kills may take. It is in a file on the host.
const COUNT_WAIT: Duration = Duration::from_secs(5);

/// The number of the sandbox's memory kills, in the order of the kernel's count, that are already attributed. Each
/// caused the end of some command, or happened before the command that the last of them ended.
pub(crate) struct MemoryKills {
    claimed: Mutex<u64>,
}

impl MemoryKills {
    /// `claimed` is the number in the sandbox's row.
    pub fn new(claimed: u64) -> Self {
        Self { claimed: Mutex::new(claimed) }
    }

    /// The sandbox was launched again: the kernel's count starts from zero.
    pub fn start_over(&self) {
        self.read(0);
    }

    /// The kernel's count was read. If it is lower than the number of claimed kills, it has started from zero since.
    fn read(&self, count: u64) {
        let mut claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        *claimed = (*claimed).min(count);
    }
}

impl Guest {
    /// How many of its processes were killed because memory ran out, as the host counts: init is not trusted to report
    /// it, and need not know. `None` if the count cannot be read.
    pub async fn oom_kills(&self) -> Option<u64> {
        match timeout(COUNT_WAIT, self.backend.oom_kills(self.id)).await {
            Ok(Ok(count)) => {
                self.memory_kills.read(count);
                Some(count)
            }
            Ok(Err(error)) => {
                warn!(sandbox = %self.id, error = chain(&error), "cannot tell whether memory ran out");
                None
            }
            Err(_) => {
                warn!(sandbox = %self.id, "cannot tell in time whether memory ran out");
                None
            }
        }
    }

    /// Whether memory ran out under something that began when `before` kills had been counted, and has just been
    /// killed. If so, claims one kill for it, and returns the number to store in the sandbox's row.
    ///
    /// The kernel counts per sandbox. So of several concurrent commands, one that is killed by other means may be
    /// mistaken for the one whose child ran out of memory at the same time; but each kill is reported once, and never
    /// for something that began after it.
    pub async fn claim_oom_kill(&self, before: Option<u64>) -> Option<u64> {
        let (before, count) = (before?, self.oom_kills().await?);
        let mut claimed = self.memory_kills.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        let first = before.max(*claimed) + 1;
        (first <= count).then(|| {
            *claimed = first;
            first
        })
    }
}
