//! Which command or file operation a sandbox's memory kills belong to.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::timeout;
use tracing::warn;

use super::Guest;
use crate::error::chain;

/// How long the count of memory kills may take. It is read from a file on the host.
const COUNT_WAIT: Duration = Duration::from_secs(5);

/// Of the sandbox's memory kills, in the order in which the kernel counts them: all up to this one are attributed. Each is the
/// reason of some command's end, or happened before the command that the last of them ended.
pub(crate) struct MemoryKills {
    claimed: Mutex<u64>,
}

impl MemoryKills {
    /// `claimed`: what the sandbox's row says.
    pub fn new(claimed: u64) -> Self {
        Self { claimed: Mutex::new(claimed) }
    }
}

impl Guest {
    /// How many of its processes were killed for want of memory so far, as the host counts: init cannot be trusted to tell, and
    /// need not know. `None` if that cannot be told.
    pub async fn oom_kills(&self) -> Option<u64> {
        match timeout(COUNT_WAIT, self.backend.oom_kills(self.id)).await {
            Ok(Ok(count)) => Some(count),
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

    /// Whether memory ran out under something that began when `before` kills had been counted, and has just been killed. If so,
    /// one kill is spoken for by it, and the number is what the sandbox's row should say.
    ///
    /// The kernel counts per sandbox. So of several commands at once, one that is killed by other means may be taken for the one
    /// whose child ran out of memory in the same time; but each kill is told of once, and never of what began after it.
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
