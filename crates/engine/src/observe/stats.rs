//! What sandboxes use, beside what they may.
//!
//! The kernel's counters are read when someone asks. What files take on disk has to be counted name by name, so it is
//! counted behind the scenes, when someone asks and the last count is old, a few sandboxes at a time; what is told is the
//! newest count and when it was taken.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use runtime::{DiskUsage, Machine, Usage};
use tokio::sync::Notify;
use tokio::time::Instant;
use wire::SandboxId;
use wire::launch::Limits;

use crate::model::Capacity;
use crate::model::state::State;

/// Sandboxes whose files are counted at the same time. Counting is disk work that others should not feel.
pub(crate) const COUNTS_MAX: usize = 2;

/// What one sandbox uses, beside what it may.
#[derive(Debug, Clone)]
pub struct Stats {
    /// Which one.
    pub sandbox: SandboxId,
    /// Its name.
    pub name: String,
    /// Where it is in its life.
    pub state: State,
    /// What it may use.
    pub limits: Limits,
    /// What it uses; `None` where nothing of it runs.
    pub usage: Option<Usage>,
    /// What its files take, if they were counted in time.
    pub disk: Option<DiskCount>,
    /// Commands that have no result yet.
    pub commands_live: usize,
    /// When this was looked up.
    pub at: SystemTime,
}

/// What files take, and when that was counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskCount {
    /// What was counted.
    pub usage: DiskUsage,
    /// When.
    pub at: SystemTime,
}

/// The machine, and what all sandboxes of all owners make of it.
#[derive(Debug, Clone)]
pub struct MachineStats {
    /// As the backend sees it.
    pub machine: Machine,
    /// How many sandboxes are in which state.
    pub sandboxes: BTreeMap<&'static str, u64>,
    /// The sum of all limits.
    pub promised: Capacity,
    /// What that sum may be.
    pub capacity: Capacity,
}

/// The newest count of a sandbox's files.
#[derive(Default)]
pub(crate) struct Disk {
    state: Mutex<DiskState>,
    counted: Notify,
}

#[derive(Default)]
struct DiskState {
    newest: Option<(DiskCount, Instant)>,
    under_way: bool,
}

impl Disk {
    fn lock(&self) -> MutexGuard<'_, DiskState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the first count, if it is under way. The caller brings the deadline.
    pub(crate) async fn first(&self) -> Option<DiskCount> {
        loop {
            let mut counted = std::pin::pin!(self.counted.notified());
            counted.as_mut().enable();
            let DiskState { newest, under_way } = *self.lock();
            match newest {
                None if under_way => counted.await,
                newest => return newest.map(|(count, _)| count),
            }
        }
    }

    /// Whether the caller is to count now.
    pub(crate) fn begin(&self, fresh_for: Duration) -> bool {
        let mut state = self.lock();
        let fresh = state.newest.is_some_and(|(_, at)| at.elapsed() < fresh_for);
        !fresh && !std::mem::replace(&mut state.under_way, true)
    }

    pub(crate) fn finish(&self, usage: Option<DiskUsage>) {
        let mut state = self.lock();
        state.under_way = false;
        if let Some(usage) = usage {
            state.newest = Some((DiskCount { usage, at: crate::observe::clock::now() }, Instant::now()));
        }
        drop(state);
        self.counted.notify_waiters();
    }
}
