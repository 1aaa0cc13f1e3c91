//! Resource usage of sandboxes, with their limits.
//!
//! The kernel's counters are read on request. Disk usage has to be counted name by name, so it is counted in the
//! background, when it is requested and the last count is old, for a few sandboxes at a time; callers get the newest
//! count and its time.

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

/// Sandboxes whose files are counted at the same time. Counting is disk work that others should not notice.
pub(crate) const COUNTS_MAX: usize = 2;

/// Usage of one sandbox, with its limits.
#[derive(Debug, Clone)]
pub struct Stats {
    /// The sandbox.
    pub sandbox: SandboxId,
    /// Its name.
    pub name: String,
    /// Its state.
    pub state: State,
    /// Its limits.
    pub limits: Limits,
    /// Current usage; `None` if no process of it runs.
    pub usage: Option<Usage>,
    /// Disk usage, if it was counted in time.
    pub disk: Option<DiskCount>,
    /// Commands that have no result yet.
    pub commands_live: usize,
    /// When this was read.
    pub at: SystemTime,
}

/// Disk usage, and when it was counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskCount {
    /// What was counted.
    pub usage: DiskUsage,
    /// When.
    pub at: SystemTime,
}

/// The machine, and the sandboxes of all owners.
#[derive(Debug, Clone)]
pub struct MachineStats {
    /// As the backend sees it.
    pub machine: Machine,
    /// Number of sandboxes in each state.
    pub sandboxes: BTreeMap<&'static str, u64>,
    /// The sum of all limits.
    pub promised: Capacity,
    /// The most that this sum may reach.
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

    /// Waits for the first count, if it is in progress. The caller sets the deadline.
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

    /// Whether the caller should count now.
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
