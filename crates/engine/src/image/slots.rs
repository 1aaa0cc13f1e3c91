//! Places for work that takes long and depends on strangers, such as downloads: a number for all owners together, and
//! a smaller one for each, so that one owner cannot make the others wait.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::model::Owner;

/// The places for one kind of work.
pub(crate) struct Slots {
    all: Arc<Semaphore>,
    per_owner: usize,
    owners: Mutex<HashMap<Owner, Weak<Semaphore>>>,
}

/// A place. It is free again when this is dropped.
pub(crate) struct Slot {
    _all: Option<OwnedSemaphorePermit>,
    _own: Option<OwnedSemaphorePermit>,
    /// Keeps the owner's count while any place is taken or waited for.
    _owner: Arc<Semaphore>,
}

impl Slots {
    pub fn new(all: usize, per_owner: usize) -> Self {
        Self { all: Arc::new(Semaphore::new(all)), per_owner, owners: Mutex::default() }
    }

    /// Waits for a place: first for one of the owner's, so that nobody who waits for that takes one of all.
    pub async fn take(&self, owner: &Owner) -> Slot {
        let own = {
            let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
            owners.retain(|_, own| own.strong_count() > 0);
            let known = owners.get(owner).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let own = Arc::new(Semaphore::new(self.per_owner));
                owners.insert(owner.clone(), Arc::downgrade(&own));
                own
            })
        };
        // The semaphores are never closed.
        let mine = Arc::clone(&own).acquire_owned().await.ok();
        let all = Arc::clone(&self.all).acquire_owned().await.ok();
        Slot { _all: all, _own: mine, _owner: own }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_owner_takes_only_a_part_of_the_places() {
        let slots = Slots::new(4, 2);
        let owner = |name: &str| Owner::parse(name).expect("an owner");
        let (bob, alice) = (owner("bob"), owner("alice"));
        let patience = Duration::from_secs(1);
        let held = [slots.take(&bob).await, slots.take(&bob).await];
        assert!(timeout(patience, slots.take(&bob)).await.is_err(), "bob has his places");
        let hers = timeout(patience, slots.take(&alice)).await.expect("alice has others");
        drop(held);
        let again = timeout(patience, slots.take(&bob)).await.expect("they are free again");
        drop((hers, again));
        assert_eq!(slots.all.available_permits(), 4);
    }
}
