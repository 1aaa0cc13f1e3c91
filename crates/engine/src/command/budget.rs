//! How much output is kept on disk: of a sandbox, and of all sandboxes of an owner.
//!
//! A stream has its own limit (`log`). This file adds up what all commands keep, running ones included. If that is
//! too much, the commands that ended first lose their output, then the running command that keeps the most loses the
//! oldest part of it; if an owner has too much, this happens in the sandbox that keeps the most. Readers and rows
//! report what is missing. Until there is room again, init gets no acknowledgements, and the commands wait.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::Commands;
use crate::disk::HostDisk;
use crate::model::Owner;

/// How many full streams a sandbox may keep, and how many an owner.
const SANDBOX_STREAMS: u64 = 16;
const OWNER_STREAMS: u64 = 64;
/// Which part of the disk a sandbox may take at most, and which part an owner.
const SANDBOX_PART: u64 = 8;
const OWNER_PART: u64 = 4;
/// When too much is kept, this part of the limit becomes free, so that not every write drops something.
const FREED_PART: u64 = 8;

/// The accounts of all owners.
pub(crate) struct Budgets {
    sandbox_max: u64,
    owner_max: u64,
    pub(super) disk: Arc<HostDisk>,
    owners: Mutex<HashMap<Owner, Arc<OwnerAccount>>>,
}

impl Budgets {
    /// `kept_max` is how much is kept of one stream.
    pub fn new(kept_max: u64, disk: Arc<HostDisk>) -> Arc<Self> {
        let least = |streams: u64, part: u64| kept_max.saturating_mul(streams).min(disk.bytes() / part);
        let (sandbox_max, owner_max) =
            (least(SANDBOX_STREAMS, SANDBOX_PART), least(OWNER_STREAMS, OWNER_PART));
        Arc::new(Self { sandbox_max, owner_max, disk, owners: Mutex::default() })
    }

    /// The account of a new sandbox, which keeps `used` bytes already.
    pub fn account(self: &Arc<Self>, owner: &Owner, used: u64) -> Account {
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        let owner = owners.entry(owner.clone()).or_insert_with(|| {
            Arc::new(OwnerAccount {
                used: AtomicU64::new(0),
                max: AtomicU64::new(self.owner_max),
                sandboxes: Mutex::default(),
            })
        });
        let account =
            Account { used: AtomicU64::new(0), owner: Arc::clone(owner), budgets: Arc::clone(self) };
        account.add(used);
        account
    }

    /// Sets how much an owner may keep; `None` is the default.
    pub fn limit(&self, owner: &Owner, max: Option<u64>) {
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        let max = max.map_or(self.owner_max, |max| max.min(self.owner_max));
        let account = owners.entry(owner.clone()).or_insert_with(|| {
            Arc::new(OwnerAccount {
                used: AtomicU64::new(0),
                max: AtomicU64::new(max),
                sandboxes: Mutex::default(),
            })
        });
        account.max.store(max, Ordering::Relaxed);
    }

    /// How much an owner keeps.
    pub fn used(&self, owner: &Owner) -> u64 {
        let owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        owners.get(owner).map_or(0, |account| account.used.load(Ordering::Relaxed))
    }
}

struct OwnerAccount {
    used: AtomicU64,
    max: AtomicU64,
    sandboxes: Mutex<Vec<Weak<Commands>>>,
}

/// What the commands of one sandbox keep.
pub(crate) struct Account {
    used: AtomicU64,
    owner: Arc<OwnerAccount>,
    budgets: Arc<Budgets>,
}

impl Account {
    /// Lets the owner's other sandboxes find these commands when the owner keeps too much.
    pub(super) fn join(&self, commands: &Arc<Commands>) {
        let mut sandboxes = self.owner.sandboxes.lock().unwrap_or_else(PoisonError::into_inner);
        sandboxes.retain(|commands| commands.strong_count() > 0);
        sandboxes.push(Arc::downgrade(commands));
    }

    pub(super) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    pub(super) fn add(&self, bytes: u64) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
        self.owner.used.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn subtract(&self, bytes: u64) {
        // Both numbers change by the same amount, and never below zero.
        let before = self
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| Some(used.saturating_sub(bytes)));
        let freed = before.map_or(0, |before| before.min(bytes));
        self.owner.used.fetch_sub(freed, Ordering::Relaxed);
    }

    /// The sandbox is gone, and its output with it.
    pub(super) fn clear(&self) {
        self.subtract(u64::MAX);
    }

    /// Whether this many more bytes may be written to the disk at all.
    pub(super) fn disk_has_room_for(&self, bytes: u64) -> bool {
        self.budgets.disk.has_room_for(bytes)
    }

    /// Whether too much is kept.
    pub(super) fn is_over(&self) -> bool {
        self.sandbox_excess() > 0 || self.owner_excess() > 0
    }

    /// How many bytes to drop in this sandbox.
    fn sandbox_excess(&self) -> u64 {
        excess(self.used(), self.budgets.sandbox_max)
    }

    fn owner_excess(&self) -> u64 {
        excess(self.owner.used.load(Ordering::Relaxed), self.owner.max.load(Ordering::Relaxed))
    }

    /// In which sandbox to drop how much, if too much is kept. `own` are the commands of this account.
    pub(super) fn victim(&self, own: &Arc<Commands>) -> Option<(Arc<Commands>, u64)> {
        match (self.sandbox_excess(), self.owner_excess()) {
            (0, 0) => None,
            (0, bytes) => {
                let largest = self.siblings().into_iter().max_by_key(|commands| commands.account.used());
                Some((largest.unwrap_or_else(|| Arc::clone(own)), bytes))
            }
            (bytes, _) => Some((Arc::clone(own), bytes)),
        }
    }

    /// The commands of all sandboxes of the owner.
    pub(super) fn siblings(&self) -> Vec<Arc<Commands>> {
        let sandboxes = self.owner.sandboxes.lock().unwrap_or_else(PoisonError::into_inner);
        sandboxes.iter().filter_map(Weak::upgrade).collect()
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.clear();
    }
}

/// How much to drop: nothing up to the limit, and then enough that some room is left.
fn excess(used: u64, max: u64) -> u64 {
    if used > max { used - (max - max / FREED_PART) } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_owner_keeps_is_the_sum_of_the_sandboxes() {
        let directory = tempfile::tempdir().expect("a directory");
        let disk = Arc::new(HostDisk::open(directory.path()).expect("the disk can be asked"));
        let budgets = Budgets::new(1000, disk);
        let owner = Owner::default_owner();
        let (one, other) = (budgets.account(&owner, 15_000), budgets.account(&owner, 0));
        assert_eq!((one.is_over(), budgets.used(&owner)), (false, 15_000));
        one.add(2000);
        assert_eq!(one.sandbox_excess(), 3000, "an eighth of 16,000 becomes free");
        assert!(!other.is_over());
        other.add(14_000);
        budgets.limit(&owner, Some(24_000));
        assert!(other.is_over(), "the owner keeps too much");
        drop(one);
        assert_eq!((other.is_over(), budgets.used(&owner)), (false, 14_000));
        other.subtract(20_000);
        assert_eq!(budgets.used(&owner), 0);
    }
}
