//! Watches that outlive the request that began them, for protocols whose clients ask for events now and then.
//!
//! Events wait in the daemon's memory, at most [`KEPT_EVENTS_MAX`] for each watch. A watch that no caller asks about for
//! [`KEPT_SECONDS`] ends, and all of them end with the daemon.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout_at};
use wire::files::WatchEvent;

use super::transfer::Transfers;
use super::{Files, Watching};
use crate::error::EngineError;
use crate::model::random::random_u64;

/// The most events of one watch that wait for a caller. When there are more, the caller gets
/// [`WatchEvent::Overflow`] in their place.
pub const KEPT_EVENTS_MAX: usize = 4096;
/// How long a watch is kept that no caller asks about.
pub const KEPT_SECONDS: u64 = 600;

/// The kept watches of one sandbox. Each holds one of the sandbox's watches, so that their number is bounded.
#[derive(Default)]
pub(super) struct KeptWatches(Mutex<BTreeMap<String, Arc<Kept>>>);

struct Kept {
    waiting: Mutex<Waiting>,
    task: AbortHandle,
}

struct Waiting {
    events: VecDeque<WatchEvent>,
    asked: Instant,
}

impl KeptWatches {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Kept>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    fn add(&mut self, event: WatchEvent) {
        match self.events.len() {
            full if full > KEPT_EVENTS_MAX => {}
            KEPT_EVENTS_MAX => self.events.push_back(WatchEvent::Overflow),
            _ => self.events.push_back(event),
        }
    }

    fn expires(&self) -> Instant {
        self.asked + Duration::from_secs(KEPT_SECONDS)
    }
}

impl Files {
    /// Watches as [`Self::watch`] does, and keeps the events for [`Self::kept_events`]. Returns the watch's id.
    pub async fn keep_watching(&self, path: &[u8], recursive: bool) -> Result<String, EngineError> {
        let watching = self.watch(path, recursive).await?;
        let id = format!("{:016x}", random_u64());
        let mut kept = self.transfers.kept.lock();
        let following = follow(Arc::downgrade(&self.transfers), id.clone(), watching);
        // The task finds its watch only after the lock is free.
        let task = tokio::spawn(following).abort_handle();
        let waiting = Waiting { events: VecDeque::new(), asked: Instant::now() };
        kept.insert(id.clone(), Arc::new(Kept { waiting: Mutex::new(waiting), task }));
        Ok(id)
    }

    /// Takes the events of a kept watch since the last call.
    pub fn kept_events(&self, id: &str) -> Result<Vec<WatchEvent>, EngineError> {
        let kept = self.transfers.kept.lock().get(id).cloned();
        let kept = kept.ok_or_else(|| not_found(id))?;
        let mut waiting = kept.lock();
        waiting.asked = Instant::now();
        Ok(waiting.events.drain(..).collect())
    }

    /// Ends a kept watch.
    pub fn drop_watch(&self, id: &str) -> Result<(), EngineError> {
        let kept = self.transfers.kept.lock().remove(id).ok_or_else(|| not_found(id))?;
        kept.task.abort();
        Ok(())
    }
}

fn not_found(id: &str) -> EngineError {
    const SHOWN_MAX: usize = 64;
    EngineError::WatchNotFound { id: id.chars().take(SHOWN_MAX).collect() }
}

/// Keeps the events of one watch until it ends, its sandbox is gone, or no caller asks for them.
async fn follow(transfers: Weak<Transfers>, id: String, mut watching: Watching) {
    loop {
        let kept = transfers.upgrade().and_then(|transfers| transfers.kept.lock().get(&id).cloned());
        let Some(kept) = kept else { return };
        let expires = kept.lock().expires();
        match timeout_at(expires, watching.next()).await {
            Ok(Ok(Some(WatchEvent::Ready))) => {}
            Ok(Ok(Some(event))) => kept.lock().add(event),
            // The watched directory is gone, or its sandbox is. What was seen can be asked for until it expires.
            Ok(Ok(None) | Err(_)) => {
                drop(kept);
                return expire(transfers, id).await;
            }
            Err(_) if kept.lock().expires() <= Instant::now() => {
                if let Some(transfers) = transfers.upgrade() {
                    transfers.kept.lock().remove(&id);
                }
                return;
            }
            Err(_) => {}
        }
    }
}

/// Removes a watch that has ended once no caller has asked about it for long enough.
async fn expire(transfers: Weak<Transfers>, id: String) {
    loop {
        let expires = {
            let Some(transfers) = transfers.upgrade() else { return };
            let mut all = transfers.kept.lock();
            let Some(kept) = all.get(&id).cloned() else { return };
            let expires = kept.lock().expires();
            if expires <= Instant::now() {
                all.remove(&id);
                return;
            }
            expires
        };
        tokio::time::sleep_until(expires).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn more_events_than_are_kept_end_in_one_overflow() {
        let mut waiting = Waiting { events: VecDeque::new(), asked: Instant::now() };
        for _ in 0..KEPT_EVENTS_MAX + 10 {
            waiting.add(WatchEvent::Gone);
        }
        assert_eq!(waiting.events.len(), KEPT_EVENTS_MAX + 1);
        assert_eq!(waiting.events.back(), Some(&WatchEvent::Overflow));
        assert_eq!(waiting.expires() - waiting.asked, Duration::from_secs(KEPT_SECONDS));
    }
}
