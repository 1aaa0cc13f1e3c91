//! What sandboxes use, beside what they may.
//!
//! The kernel's counters are read when someone asks. What files take on disk has to be counted name by name, so it is
//! counted behind the scenes, when someone asks and the last count is old, a few sandboxes at a time; what is told is the
//! newest count and when it was taken.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use runtime::{DiskUsage, Machine, Usage};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::debug;
use wire::SandboxId;
use wire::launch::Limits;

use crate::directory::Place;
use crate::error::{EngineError, chain};
use crate::home::{Home, Shared};
use crate::lifecycle::State;
use crate::model::{Capacity, ListQuery, Owner, Page};
use crate::{Engine, page_limit};

/// Sandboxes whose files are counted at the same time. Counting is disk work that others should not feel.
pub(crate) const COUNTS_MAX: usize = 2;
/// A count that is older is taken anew when someone asks.
const COUNT_FRESH: Duration = Duration::from_secs(15);
/// The same where the kernel counts, and a look is enough.
const LOOK_FRESH: Duration = Duration::from_secs(1);
/// How long an answer waits for the first count of a sandbox's files. Most sandboxes hold little.
const COUNT_WAIT: Duration = Duration::from_secs(1);
/// How long reading counters may take. They are a few small files each.
const USAGE_SECONDS: u64 = 10;

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
    async fn first(&self) -> Option<DiskCount> {
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
    fn begin(&self, fresh_for: Duration) -> bool {
        let mut state = self.lock();
        let fresh = state.newest.is_some_and(|(_, at)| at.elapsed() < fresh_for);
        !fresh && !std::mem::replace(&mut state.under_way, true)
    }

    fn finish(&self, usage: Option<DiskUsage>) {
        let mut state = self.lock();
        state.under_way = false;
        if let Some(usage) = usage {
            state.newest = Some((DiskCount { usage, at: crate::now() }, Instant::now()));
        }
        drop(state);
        self.counted.notify_waiters();
    }
}

/// Has a sandbox's files counted, unless that was done lately.
fn count_files(home: &Arc<Home>) {
    let has_files = match home.state() {
        State::Running | State::Paused(_) | State::Failed { .. } => true,
        State::Creating | State::Deleting => false,
    };
    let fresh_for = if home.shared.backend.store().limits { LOOK_FRESH } else { COUNT_FRESH };
    if !has_files || !home.disk.begin(fresh_for) {
        return;
    }
    let home = Arc::clone(home);
    home.shared.runtime.clone().spawn(async move {
        let place = home.shared.counts.acquire().await;
        // It may have gone while others were counted.
        let known = home.shared.directory().get(home.id).is_some();
        let usage = match known {
            true => home.shared.backend.disk_usage(home.id).await,
            false => return,
        };
        drop(place);
        if let Err(error) = &usage {
            debug!(sandbox = %home.id, error = chain(error), "cannot count the files of a sandbox");
        }
        home.disk.finish(usage.ok());
    });
}

impl Engine {
    /// What a sandbox uses.
    pub async fn stats(&self, owner: &Owner, id: SandboxId) -> Result<Stats, EngineError> {
        let home = self.home(owner, id)?;
        let mut stats = stats_of(self.shared(), &[home]).await?;
        Ok(stats.pop().expect("one was asked for"))
    }

    /// What an owner's sandboxes use, newest first.
    pub async fn stats_page(&self, owner: &Owner, query: ListQuery) -> Result<Page<Stats>, EngineError> {
        let limit = page_limit(query.limit)?;
        let before = query.cursor.as_deref().map(Place::from_cursor).transpose()?;
        let mut homes = self.shared().directory().newest(
            owner,
            before,
            query.name.as_deref(),
            &query.selectors,
            limit + 1,
        )?;
        let more = homes.len() > limit;
        homes.truncate(limit);
        let next_cursor = homes.last().filter(|_| more).map(|last| Place::of_home(last).to_cursor());
        Ok(Page { items: stats_of(self.shared(), &homes).await?, next_cursor })
    }

    /// The machine, and what sandboxes of all owners make of it.
    pub async fn machine_stats(&self) -> Result<MachineStats, EngineError> {
        let shared = self.shared();
        let usage = |source| EngineError::Usage { source };
        let machine = shared.backend.machine().await.map_err(usage)?;
        let homes = shared.directory().all();
        let mut sandboxes: BTreeMap<&'static str, u64> = BTreeMap::new();
        for home in &homes {
            *sandboxes.entry(home.state().word()).or_default() += 1;
        }
        let promised = shared.directory().promised();
        Ok(MachineStats { machine, sandboxes, promised, capacity: shared.config.capacity })
    }
}

async fn stats_of(shared: &Shared, homes: &[Arc<Home>]) -> Result<Vec<Stats>, EngineError> {
    homes.iter().for_each(count_files);
    let ids: Vec<SandboxId> = homes.iter().map(|home| home.id).collect();
    let late = |_| runtime::BackendError::Late { doing: "read what sandboxes use", seconds: USAGE_SECONDS };
    let usage = timeout(Duration::from_secs(USAGE_SECONDS), shared.backend.usage(&ids)).await;
    let usage = usage.map_err(late).flatten().map_err(|source| EngineError::Usage { source })?;
    let deadline = Instant::now() + COUNT_WAIT;
    let mut all = Vec::with_capacity(homes.len());
    for (home, usage) in homes.iter().zip(usage) {
        // What comes too late is told the next time.
        let disk = timeout_at(deadline, home.disk.first()).await.ok().flatten();
        let face = home.face().clone();
        all.push(Stats {
            sandbox: home.id,
            name: face.name.to_string(),
            state: face.state,
            limits: home.limits,
            usage,
            disk,
            commands_live: home.live_count(),
            at: crate::now(),
        });
    }
    Ok(all)
}
