//! Reads the resource usage of sandboxes: the kernel's counters, and the size of their files.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};
use tracing::debug;
use wire::SandboxId;

use crate::error::{EngineError, chain};
use crate::model::check::page_limit;
use crate::model::state::State;
use crate::model::{ListQuery, Owner, Page};
use crate::observe::stats::{MachineStats, Stats};
use crate::sandbox::live::LiveSandbox;
use crate::sandbox::registry::Place;
use crate::{Engine, Shared};

/// A file count that is older than this is repeated at the next request.
const COUNT_FRESH: Duration = Duration::from_secs(15);
/// The same limit for stores where the kernel counts, so that a count is one cheap read.
const LOOK_FRESH: Duration = Duration::from_secs(1);
/// How long a request waits for the first count of a sandbox's files. Most sandboxes have few files.
const COUNT_WAIT: Duration = Duration::from_secs(1);
/// How long reading counters may take. Each sandbox has a few small files to read.
const USAGE_SECONDS: u64 = 10;

/// Counts a sandbox's files in the background, unless a recent count exists.
fn count_files(live: &Arc<LiveSandbox>) {
    let has_files = match live.state() {
        State::Running | State::Paused(_) | State::Failed { .. } => true,
        State::Creating | State::Deleting => false,
    };
    let fresh_for = if live.shared.backend.store().limits { LOOK_FRESH } else { COUNT_FRESH };
    if !has_files || !live.disk.begin(fresh_for) {
        return;
    }
    let live = Arc::clone(live);
    live.shared.runtime.clone().spawn(async move {
        let place = live.shared.counts.acquire().await;
        // The sandbox may have been deleted while others were counted.
        let known = live.shared.registry().get(live.id).is_some();
        let usage = match known {
            true => live.shared.backend.disk_usage(live.id).await,
            false => return,
        };
        drop(place);
        if let Err(error) = &usage {
            debug!(sandbox = %live.id, error = chain(error), "cannot count the files of a sandbox");
        }
        live.disk.finish(usage.ok());
    });
}

impl Engine {
    /// The resource usage of a sandbox.
    pub async fn stats(&self, owner: &Owner, id: SandboxId) -> Result<Stats, EngineError> {
        let live = self.live(owner, id)?;
        let mut stats = stats_of(self.shared(), &[live]).await?;
        Ok(stats.pop().expect("one was asked for"))
    }

    /// The resource usage of an owner's sandboxes, newest first.
    pub async fn stats_page(&self, owner: &Owner, query: ListQuery) -> Result<Page<Stats>, EngineError> {
        let limit = page_limit(query.limit)?;
        let before = query.cursor.as_deref().map(Place::from_cursor).transpose()?;
        let mut sandboxes = self.shared().registry().newest(
            owner,
            before,
            query.name.as_deref(),
            &query.selectors,
            limit + 1,
        )?;
        let more = sandboxes.len() > limit;
        sandboxes.truncate(limit);
        let next_cursor = sandboxes.last().filter(|_| more).map(|last| Place::of_home(last).to_cursor());
        Ok(Page { items: stats_of(self.shared(), &sandboxes).await?, next_cursor })
    }

    /// The machine's resources, and the number and total limits of the sandboxes of all owners.
    pub async fn machine_stats(&self) -> Result<MachineStats, EngineError> {
        let shared = self.shared();
        let usage = |source| EngineError::Usage { source };
        let machine = shared.backend.machine().await.map_err(usage)?;
        let all = shared.registry().all();
        let mut sandboxes: BTreeMap<&'static str, u64> = BTreeMap::new();
        for live in &all {
            *sandboxes.entry(live.state().word()).or_default() += 1;
        }
        let promised = shared.registry().promised();
        Ok(MachineStats { machine, sandboxes, promised, capacity: shared.config.capacity })
    }
}

async fn stats_of(shared: &Shared, sandboxes: &[Arc<LiveSandbox>]) -> Result<Vec<Stats>, EngineError> {
    sandboxes.iter().for_each(count_files);
    let ids: Vec<SandboxId> = sandboxes.iter().map(|live| live.id).collect();
    let late = |_| runtime::BackendError::Late { doing: "read what sandboxes use", seconds: USAGE_SECONDS };
    let usage = timeout(Duration::from_secs(USAGE_SECONDS), shared.backend.usage(&ids)).await;
    let usage = usage.map_err(late).flatten().map_err(|source| EngineError::Usage { source })?;
    let deadline = Instant::now() + COUNT_WAIT;
    let mut all = Vec::with_capacity(sandboxes.len());
    for (live, usage) in sandboxes.iter().zip(usage) {
        // A count that takes longer is included in the next answer.
        let disk = timeout_at(deadline, live.disk.first()).await.ok().flatten();
        let face = live.view().clone();
        all.push(Stats {
            sandbox: live.id,
            name: face.name.to_string(),
            state: face.state,
            limits: live.limits,
            usage,
            disk,
            commands_live: live.commands.count(),
            at: crate::observe::clock::now(),
        });
    }
    Ok(all)
}
