//! The task that tends one pool.
//!
//! It compares the pool's members with what the pool should have, starts the work that `rules` names, and waits until something
//! changes: a claim, a caller's change, a new version of the template, a finished piece of work, or the time for a retry or a check.
//! Work runs beside the task (`work`), so that a slow create or removal delays nothing else.

use std::future::pending;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep_until};
use tracing::{Instrument, info, info_span, warn};
use wire::SandboxId;

use crate::Shared;
use crate::error::{EngineError, chain};
use crate::observe::events::PoolHappened;
use crate::pool::live::{Member, Retry, Trouble, is_made_from};
use crate::pool::rules::{Seen, Steps, Wanted, decide};
use crate::pool::work::{WorkDone, check_found, check_ready, make, remove, shortened};
use crate::pool::{Pool, Standing};
use crate::sandbox::lifecycle::State;
use crate::sandbox::live::Visibility;
use crate::template::{Preparation, Source, Version};

/// How many sandboxes one pool makes at the same time.
const MAKING_MAX: usize = 4;
/// How long after a claim the pool makes nothing, so that the caller's first command has the machine to itself.
const QUIET: Duration = Duration::from_millis(5);
/// The maximum time that the pool makes nothing after the first of many claims in a row.
const QUIET_MAX: Duration = Duration::from_millis(50);
/// How many sandboxes one pool deletes at the same time.
const REMOVALS_MAX: usize = 8;
/// How often the pool checks that its ready sandboxes still answer. The pool notices at once when an init ends; this
/// check finds an init that hangs.
const CHECK_INTERVAL: Duration = Duration::from_secs(15);

/// Starts the task of every pool after a start of the daemon. The registry holds all sandboxes by then.
pub(crate) fn resume_interrupted(shared: &Arc<Shared>) {
    let waiting = shared.registry().all();
    for live in waiting {
        let pool = match &live.view().visibility {
            Visibility::PoolMember(pool) => pool.upgrade(),
            Visibility::Visible | Visibility::Build(_) => None,
        };
        if let Some(pool) = pool {
            pool.adopt(&live);
        }
    }
    let pools: Vec<_> = shared.pools.index().by_name.values().cloned().collect();
    for pool in pools {
        start_tending(shared, &pool);
    }
}

/// Starts the task that tends a pool.
pub(super) fn start_tending(shared: &Arc<Shared>, pool: &Arc<Pool>) {
    let span = info_span!("pool", name = %pool.name());
    let task = tend(Arc::clone(shared), Arc::clone(pool)).instrument(span);
    let task = shared.runtime.spawn(task).abort_handle();
    *pool.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
}

/// Keeps a pool as it should be, until the pool is deleted.
async fn tend(shared: Arc<Shared>, pool: Arc<Pool>) {
    let mut tending = Tending::new(shared, Arc::clone(&pool));
    tending.start_checking_found();
    loop {
        let source = pool.source(&tending.shared);
        let version = match &source {
            Ok(Source::Version(version)) => Some(version),
            Ok(Source::BuiltIn) | Err(_) => None,
        };
        // Start to watch before reading the state, so that the wait below sees a change that comes in between.
        let mut preparation = version.map(|version| version.watch());
        let makeable = check_source(&pool, source.as_ref());
        let deleting = pool.view().deleting;
        let steps = pool.steps(version, makeable && !deleting);
        tending.start_removing(steps.remove);
        let make_at = tending.start_making(steps.make);
        if !deleting {
            tending.start_check_if_due();
        } else if tending.delete_if_empty().await {
            return;
        }
        pool.notify_watchers();
        tending.tell_trouble();
        let wake_at = tending.wake_at(make_at);
        tokio::select! {
            () = pool.wake.notified() => {}
            () = until(wake_at) => {}
            // The next round reads the new state. The sender lives as long as the version.
            Some(()) = changed(&mut preparation) => {}
            Some(done) = tending.work.join_next() => tending.record(done),
        }
    }
}

/// What the task knows from one round to the next.
struct Tending {
    shared: Arc<Shared>,
    pool: Arc<Pool>,
    work: JoinSet<WorkDone>,
    /// Removals in `work`.
    removing: usize,
    /// Whether a check is in `work`.
    checking: bool,
    /// When the next check is due.
    check_at: Instant,
    /// The trouble that watchers of events know of.
    trouble_told: Option<String>,
}

impl Tending {
    fn new(shared: Arc<Shared>, pool: Arc<Pool>) -> Self {
        let check_at = Instant::now() + CHECK_INTERVAL;
        Self {
            shared,
            pool,
            work: JoinSet::new(),
            removing: 0,
            checking: false,
            check_at,
            trouble_told: None,
        }
    }

    /// Tells watchers of events that the pool cannot be filled, or can be filled again.
    fn tell_trouble(&mut self) {
        let trouble = self.pool.view().trouble.as_ref().map(|trouble| trouble.reason.clone());
        if trouble != self.trouble_told && !self.pool.view().deleting {
            self.trouble_told = trouble;
            self.pool.tell(&self.shared);
        }
    }

    /// Asks the sandboxes that an earlier daemon left whether they still answer.
    fn start_checking_found(&mut self) {
        let found: Vec<_> = self.pool.members().all.values().map(|member| Arc::clone(&member.live)).collect();
        for live in found {
            self.work.spawn(check_found(Arc::clone(&self.pool), live).in_current_span());
        }
    }

    fn start_removing(&mut self, members: Vec<SandboxId>) {
        for id in members.into_iter().take(REMOVALS_MAX - self.removing) {
            let mut members = self.pool.members();
            members.set(id, Standing::Going);
            if let Some(live) = members.all.get(&id).map(|member| Arc::clone(&member.live)) {
                self.removing += 1;
                self.work.spawn(remove(Arc::clone(&self.pool), live).in_current_span());
            }
        }
    }

    /// Makes `count` sandboxes. Makes none shortly after a claim; then returns when it may.
    fn start_making(&mut self, count: usize) -> Option<Instant> {
        let quiet_at = self.pool.quiet_at();
        if quiet_at.is_some() {
            return quiet_at.filter(|_| count > 0);
        }
        for _ in 0..count {
            self.pool.members().begun += 1;
            self.work.spawn(make(Arc::clone(&self.shared), Arc::clone(&self.pool)).in_current_span());
        }
        None
    }

    fn start_check_if_due(&mut self) {
        if !self.checking && Instant::now() >= self.check_at {
            self.checking = true;
            self.work.spawn(check_ready(Arc::clone(&self.pool)).in_current_span());
        }
    }

    /// Deletes the pool's row once no member and no work is left. Returns whether the pool is gone.
    async fn delete_if_empty(&mut self) -> bool {
        if !self.work.is_empty() || !self.pool.members().all.is_empty() {
            return false;
        }
        if let Err(error) = self.shared.db.delete_pool(self.pool.id).await {
            self.pool.set_trouble(chain(&error), Retry::Later);
            return false;
        }
        self.shared.pools.index().remove(&self.pool);
        let gone = PoolHappened { name: self.pool.name().to_string(), replicas: None, trouble: None };
        self.shared.events.publish_pool(&self.pool.owner, gone);
        self.pool.changed.send_replace(true);
        info!("pool is gone");
        true
    }

    /// When the next round starts if nothing happens before.
    fn wake_at(&self, make_at: Option<Instant>) -> Option<Instant> {
        let retry = self.pool.view().trouble.as_ref().and_then(|trouble| trouble.retry).map(|(at, _)| at);
        let retry = retry.filter(|at| *at > Instant::now());
        let next_check = (!self.checking).then_some(self.check_at);
        [retry, next_check, make_at].into_iter().flatten().min()
    }

    /// Records the result of a piece of work.
    fn record(&mut self, done: Result<WorkDone, JoinError>) {
        match done {
            Ok(WorkDone::Made(made)) => self.record_made(made),
            Ok(WorkDone::Unneeded) => {}
            Ok(WorkDone::Removed) => self.removing -= 1,
            Ok(WorkDone::Checked) => {
                (self.checking, self.check_at) = (false, Instant::now() + CHECK_INTERVAL);
            }
            Err(error) => {
                warn!(%error, "work for the pool panicked");
                self.pool.set_trouble(error.to_string(), Retry::Later);
            }
        }
    }

    fn record_made(&self, made: Result<(), String>) {
        self.shared.metrics.refilled(&made);
        match made {
            Ok(()) => self.pool.view().trouble = None,
            Err(reason) => {
                warn!(reason, "cannot make a sandbox for the pool");
                self.pool.set_trouble(reason, Retry::Later);
            }
        }
    }
}

/// Waits until an instant, or forever if there is none.
async fn until(instant: Option<Instant>) {
    match instant {
        Some(instant) => sleep_until(instant).await,
        None => pending().await,
    }
}

/// Waits until a preparation changes; returns `None` if there is none to watch.
async fn changed(preparation: &mut Option<watch::Receiver<Preparation>>) -> Option<()> {
    preparation.as_mut()?.changed().await.ok()
}

/// Whether the pool can make sandboxes from its template now. If only a change can remove the obstacle, the pool's
/// trouble names it.
fn check_source(pool: &Pool, source: Result<&Source, &EngineError>) -> bool {
    let obstacle = match source {
        Ok(Source::BuiltIn) => None,
        Ok(Source::Version(version)) if !version.spec.mounts.is_empty() => {
            Some(EngineError::PoolVolumes { template: pool.template() }.to_string())
        }
        Ok(Source::Version(version)) => match version.preparation() {
            Preparation::Ready(_) => None,
            Preparation::Preparing | Preparation::Replaced => return false,
            Preparation::Failed { reason } => {
                Some(EngineError::TemplateFailed { name: pool.template(), reason }.to_string())
            }
        },
        Err(error) => Some(error.to_string()),
    };
    match obstacle {
        Some(reason) => {
            pool.set_trouble(shortened(reason), Retry::AfterChange);
            false
        }
        None => {
            pool.clear_obstacle();
            true
        }
    }
}

impl Pool {
    /// When the quiet time after the last claims ends, if it has not ended.
    fn quiet_at(&self) -> Option<Instant> {
        let mut members = self.members();
        let (first, last) = members.claimed?;
        let at = (last + QUIET).min(first + QUIET_MAX);
        if at > Instant::now() {
            return Some(at);
        }
        members.claimed = None;
        None
    }

    /// What to do now. `version` is the template's newest. Makes nothing unless `makeable`.
    fn steps(&self, version: Option<&Arc<Version>>, makeable: bool) -> Steps {
        let view = self.view().clone();
        let members = self.members();
        let seen = |id: &SandboxId| {
            let Member { live, standing } = members.all.get(id)?;
            let standing = match (live.state(), standing) {
                // The sandbox's driver noticed before the pool did.
                (State::Failed { .. } | State::Deleting | State::Paused(_), Standing::Ready) => {
                    Standing::Broken
                }
                (_, standing) => *standing,
            };
            Some(Seen { id: *id, standing, current: is_made_from(live, version) })
        };
        let others = members.all.iter().filter(|(_, member)| member.standing != Standing::Ready);
        let all = members.ready.iter().chain(others.map(|(id, _)| id));
        let wanted = Wanted {
            replicas: if view.deleting { 0 } else { view.replicas as usize },
            begun: members.begun,
            making_max: match &view.trouble {
                _ if !makeable => 0,
                None => MAKING_MAX,
                // After a failure, one sandbox shows whether it works again.
                Some(Trouble { retry: Some((at, _)), .. }) => usize::from(Instant::now() >= *at),
                Some(Trouble { retry: None, .. }) => 0,
            },
        };
        decide(wanted, &all.filter_map(seen).collect::<Vec<_>>())
    }
}
