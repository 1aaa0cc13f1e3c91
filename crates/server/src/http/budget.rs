//! Memory for bodies that are buffered whole: one budget for all, and one for each owner.
//!
//! A body reserves its memory before its first byte is read: as much as it announces, or as much as it may have. So a
//! body that is being read never waits for memory that another one holds, and callers that send slowly block only their
//! own owner.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use axum::http::StatusCode;
use engine::Owner;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::ApiError;

/// For all owners together.
const ALL_MAX: usize = 256 << 20;
/// For one owner: four bodies of the longest kind.
const OWNER_MAX: usize = 96 << 20;
/// How long a request waits for memory.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// The budgets.
#[derive(Debug)]
pub struct Budget {
    all: Arc<Semaphore>,
    /// The owners whose bodies are being read.
    owners: Mutex<HashMap<Owner, Weak<Semaphore>>>,
}

/// Memory for one body, released when dropped.
#[derive(Debug)]
pub struct Room {
    _owner: OwnedSemaphorePermit,
    _all: OwnedSemaphorePermit,
}

impl Default for Budget {
    fn default() -> Self {
        Self { all: Arc::new(Semaphore::new(ALL_MAX)), owners: Mutex::default() }
    }
}

impl Budget {
    /// Reserves this many bytes, which are at most the longest body.
    pub async fn room(&self, owner: &Owner, bytes: usize) -> Result<Room, ApiError> {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let own = self.owner(owner);
        let acquire = async {
            let _owner = own.acquire_many_owned(bytes).await.expect("the semaphore is never closed");
            let _all =
                self.all.clone().acquire_many_owned(bytes).await.expect("the semaphore is never closed");
            Room { _owner, _all }
        };
        tokio::time::timeout(WAIT_MAX, acquire).await.map_err(|_| {
            ApiError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "busy",
                "too many large requests are being received",
            )
            .hint("try again when others have been received")
        })
    }

    fn owner(&self, owner: &Owner) -> Arc<Semaphore> {
        // No code panics halfway through a change while it holds this lock.
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = owners.get(owner).and_then(Weak::upgrade) {
            return own;
        }
        owners.retain(|_, own| own.strong_count() > 0);
        let own = Arc::new(Semaphore::new(OWNER_MAX));
        owners.insert(owner.clone(), Arc::downgrade(&own));
        own
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(name: &str) -> Owner {
        Owner::parse(name).expect("a name")
    }

    #[tokio::test(start_paused = true)]
    async fn an_owner_waits_for_its_own_bodies_alone() {
        let budget = Budget::default();
        let held = budget.room(&owner("a"), OWNER_MAX).await.expect("there is room");
        let refused = budget.room(&owner("a"), 1).await.expect_err("it has no room left");
        assert_eq!(refused.into_body().code, "busy");
        budget.room(&owner("b"), OWNER_MAX).await.expect("another owner has its own");
        drop(held);
        budget.room(&owner("a"), OWNER_MAX).await.expect("it has room again");
    }

    #[tokio::test(start_paused = true)]
    async fn all_owners_together_have_a_budget() {
        let budget = Budget::default();
        let mut held = Vec::new();
        for at in 0..ALL_MAX / OWNER_MAX {
            held.push(budget.room(&owner(&format!("owner-{at}")), OWNER_MAX).await.expect("there is room"));
        }
        budget.room(&owner("one-more"), OWNER_MAX).await.expect_err("there is none for all");
        held.clear();
        budget.room(&owner("one-more"), OWNER_MAX).await.expect("there is room again");
        assert_eq!(budget.owners.lock().expect("nobody panicked").len(), 1, "idle owners are forgotten");
    }
}
