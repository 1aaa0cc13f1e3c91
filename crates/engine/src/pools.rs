//! Pools: sandboxes of a template that are made before anybody asks for them, and claimed by whoever does.
//!
//! A sandbox that waits in a pool is a sandbox like any other: it has a row, a driver and a link to its init, survives the daemon,
//! and is torn down like all. It belongs to the pool's owner and counts against what that owner may have, but nobody finds it
//! until it is claimed. A claim takes it out of the queue of those that are ready, under a lock, and then writes one row; it
//! waits for nothing else. So none is given to two, and what a crash leaves is either claimed or waits still.
//!
//! Each pool has a task that tends it: it compares what is there with what should be (`decide`, a pure function), makes what is
//! missing and removes what is broken, of an older version, or too much. What cannot be made is tried again after a while, longer
//! each time, and the pool says why. Admitting and claiming is the engine's business, what a sandbox does is its driver's.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{Instrument, info, info_span, warn};
use wire::launch::Limits;
use wire::{PoolId, SandboxId, TemplateId};

use crate::Engine;
use crate::error::{EngineError, chain};
use crate::guest::Unsaid;
use crate::home::{Home, Shared};
use crate::keys::random_u128;
use crate::lifecycle::State;
use crate::metrics::Metrics;
use crate::model::{Key, KeyLimits, Owner};
use crate::store::{PoolChange, PoolRow};
use crate::template::DEFAULT;
use crate::templates::{Head, Preparation, Source, Version, limits_of};
use crate::transfer::rehearse;

pub use crate::names::PoolName;

/// Sandboxes in one pool, at most: as many as a machine of ordinary size takes at all.
pub const REPLICAS_MAX: u32 = 1000;
/// Pools of one owner, at most.
const POOLS_MAX: usize = 1000;
/// Sandboxes that one pool has made for it at the same time.
const MAKING_MAX: usize = 4;
/// Sandboxes that are made for all pools together at the same time: callers' creates come first.
const REFILLS_MAX: usize = 4;
/// After a claim, nothing is made for so long, since the first command of whoever claimed comes first;
const QUIET: Duration = Duration::from_millis(5);
/// but never longer than this after the first of many claims.
const QUIET_MAX: Duration = Duration::from_millis(50);
/// Sandboxes that one pool has deleted at the same time.
const REMOVALS_MAX: usize = 8;
/// Between two attempts to make what could not be made, at first and at most.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// How often those that are ready are asked whether they are. An init that ends is noticed at once; this is for one that hangs.
const CHECK_INTERVAL: Duration = Duration::from_secs(15);
/// How long an init may take to say that it is there.
const CHECK_WAIT: Duration = Duration::from_secs(5);
/// How long a delete may keep its caller waiting. It goes on behind that.
const DELETE_WAIT: Duration = Duration::from_secs(150);
/// What is kept of the reason of a failure.
const REASON_MAX: usize = 4096;

/// What should change about a pool, all of it or nothing. What is left out stays as it is.
#[derive(Debug, Clone, Default)]
pub struct PoolUpdate {
    /// A new name.
    pub name: Option<PoolName>,
    /// How many should stand ready.
    pub replicas: Option<u32>,
}

/// How a pool is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolState {
    /// As many stand ready as should.
    Ready,
    /// Some are still being made.
    Filling,
    /// The last one could not be made. It is tried again.
    Failing,
    /// It is being deleted.
    Deleting,
}

impl PoolState {
    /// As it is said.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Filling => "filling",
            Self::Failing => "failing",
            Self::Deleting => "deleting",
        }
    }
}

/// A pool, as it is at one moment.
#[derive(Debug, Clone)]
pub struct PoolInfo {
    /// Names it whatever it is called.
    pub id: PoolId,
    /// What it is called.
    pub name: PoolName,
    /// What its sandboxes are made from.
    pub template: String,
    /// The newest version of that.
    pub template_version: u32,
    /// How many should stand ready.
    pub replicas: u32,
    /// How it is.
    pub state: PoolState,
    /// Why the last one could not be made.
    pub reason: Option<String>,
    /// When that is tried again.
    pub retry_at: Option<SystemTime>,
    /// What waits in it, the next to be claimed first.
    pub members: Vec<PoolMember>,
    /// Creates since the daemon started that found one ready here.
    pub claims: u64,
    /// Creates since the daemon started that found none.
    pub misses: u64,
    /// When it was made.
    pub created_at: SystemTime,
    /// When it was last changed.
    pub updated_at: SystemTime,
}

impl PoolInfo {
    /// How many stand ready.
    pub fn ready(&self) -> usize {
        self.count(Standing::Ready)
    }

    /// How many are being made, or looked at after a restart.
    pub fn making(&self) -> usize {
        self.count(Standing::Making)
    }

    fn count(&self, standing: Standing) -> usize {
        self.members.iter().filter(|member| member.standing == standing).count()
    }
}

/// A sandbox that waits in a pool.
#[derive(Debug, Clone)]
pub struct PoolMember {
    /// It keeps it when it is claimed.
    pub id: SandboxId,
    /// What it is called unless whoever claims it names it.
    pub name: String,
    /// How it stands.
    pub standing: Standing,
    /// Which version of the template it was made from.
    pub template_version: u32,
    /// When it was made.
    pub created_at: SystemTime,
}

/// How a sandbox in a pool stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It is being made, or was found after a restart and has not answered yet.
    Making,
    /// It can be claimed.
    Ready,
    /// It is broken, and will be removed.
    Broken,
    /// It is being removed.
    Going,
}

impl Standing {
    /// As it is said.
    pub fn word(self) -> &'static str {
        match self {
            Self::Making => "making",
            Self::Ready => "ready",
            Self::Broken => "broken",
            Self::Going => "deleting",
        }
    }
}

/// One pool.
pub(crate) struct Pool {
    pub id: PoolId,
    pub owner: Owner,
    /// None for the built-in one.
    head: Option<Arc<Head>>,
    created_at: SystemTime,
    face: Mutex<Face>,
    members: Mutex<Members>,
    claims: AtomicU64,
    misses: AtomicU64,
    /// Whoever tends it has something to look at.
    wake: Notify,
    /// Something about it is different, for those who wait; `true` when it is gone.
    changed: watch::Sender<bool>,
    task: Mutex<Option<AbortHandle>>,
}

/// What may change about it.
#[derive(Debug, Clone)]
struct Face {
    name: PoolName,
    replicas: u32,
    limits: KeyLimits,
    going: bool,
    updated_at: SystemTime,
    trouble: Option<Trouble>,
}

/// Why there are too few.
#[derive(Debug, Clone)]
struct Trouble {
    /// In a row.
    failures: u32,
    reason: String,
    /// When it is tried again; none where something else has to change first.
    retry: Option<(Instant, SystemTime)>,
}

/// What waits in it.
#[derive(Default)]
struct Members {
    all: BTreeMap<SandboxId, Member>,
    /// Those that can be claimed, the oldest first.
    ready: VecDeque<SandboxId>,
    /// To be made, and without a row yet.
    begun: usize,
    /// The first claim since something was last made, and the last.
    claimed: Option<(Instant, Instant)>,
}

struct Member {
    home: Arc<Home>,
    standing: Standing,
}

impl Members {
    fn set(&mut self, id: SandboxId, standing: Standing) {
        if let Some(member) = self.all.get_mut(&id) {
            member.standing = standing;
            self.ready.retain(|ready| *ready != id);
            if standing == Standing::Ready {
                self.ready.push_back(id);
            }
        }
    }

    fn standing(&self, id: SandboxId) -> Option<Standing> {
        self.all.get(&id).map(|member| member.standing)
    }
}

impl Pool {
    fn new(row: PoolRow, head: Option<Arc<Head>>) -> Arc<Self> {
        let PoolRow { id, owner, name, template: _, replicas, limits, going, created_at, updated_at } = row;
        Arc::new(Self {
            id,
            owner,
            head,
            created_at,
            face: Mutex::new(Face { name, replicas, limits, going, updated_at, trouble: None }),
            members: Mutex::default(),
            claims: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            wake: Notify::new(),
            changed: watch::Sender::new(false),
            task: Mutex::new(None),
        })
    }

    fn face(&self) -> MutexGuard<'_, Face> {
        self.face.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held for moments, and never while the directory is asked for: that is locked before this.
    fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn name(&self) -> PoolName {
        self.face().name.clone()
    }

    /// What the owner may have in all, pools included.
    pub fn limits(&self) -> KeyLimits {
        self.face().limits
    }

    /// The template's name, as it is now.
    pub fn template(&self) -> String {
        self.head.as_ref().map_or_else(|| DEFAULT.to_owned(), |head| head.name().to_string())
    }

    /// Something happened that its task should look at.
    pub fn wake(&self) {
        self.wake.notify_one();
    }

    /// One is being made for it, and has a place in the directory.
    pub fn enroll(&self, home: &Arc<Home>, standing: Standing) {
        let member = Member { home: Arc::clone(home), standing };
        self.members().all.insert(home.id, member);
    }

    /// Takes the next one that is ready and just so. Whoever took it has it alone.
    fn take(&self, version: Option<&Arc<Version>>, limits: &Limits) -> Option<Arc<Home>> {
        let mut members = self.members();
        let mut taken = None;
        while let Some(id) = members.ready.pop_front() {
            let Some(member) = members.all.get_mut(&id) else { continue };
            let home = &member.home;
            if is_made_from(home, version) && home.limits != *limits {
                // It is as it should be, and another is asked for.
                members.ready.push_front(id);
                break;
            }
            if home.state() == State::Running && home.outbox.is_connected() && is_made_from(home, version) {
                taken = members.all.remove(&id).map(|member| member.home);
                let now = Instant::now();
                members.claimed = Some((members.claimed.map_or(now, |(first, _)| first), now));
                break;
            }
            // Its task sees to it.
            member.standing = Standing::Broken;
        }
        drop(members);
        self.wake();
        taken
    }

    /// It was taken, and then not wanted.
    pub fn put_back(&self, home: &Arc<Home>) {
        let mut members = self.members();
        members.all.insert(home.id, Member { home: Arc::clone(home), standing: Standing::Ready });
        members.ready.push_front(home.id);
    }

    /// It was taken, and cannot be used.
    pub fn spoil(&self, home: &Arc<Home>) {
        self.enroll(home, Standing::Broken);
        self.wake();
    }

    pub fn claimed(&self) {
        self.claims.fetch_add(1, Ordering::Relaxed);
    }

    fn tell(&self) {
        self.changed.send_modify(|_| {});
    }

    fn stop(&self) {
        if let Some(task) = self.task.lock().unwrap_or_else(PoisonError::into_inner).take() {
            task.abort();
        }
    }

    fn set_trouble(&self, reason: String, retry: Retry) {
        let mut face = self.face();
        let failures = match (&face.trouble, retry) {
            (_, Retry::AfterChange) => 0,
            (Some(trouble), Retry::Later) => trouble.failures + 1,
            (None, Retry::Later) => 1,
        };
        let retry = (retry == Retry::Later).then(|| {
            let pause = RETRY_MIN.saturating_mul(1 << (failures - 1).min(16)).min(RETRY_MAX);
            (Instant::now() + pause, crate::now() + pause)
        });
        face.trouble = Some(Trouble { failures, reason, retry });
    }

    fn describe(&self, shared: &Shared) -> PoolInfo {
        let face = self.face().clone();
        let members = self.members();
        let described = |member: &Member| {
            let home = &member.home;
            let name = home.face().name.to_string();
            PoolMember {
                id: home.id,
                name,
                standing: member.standing,
                template_version: home.version.as_ref().map_or(1, |version| version.number),
                created_at: home.identity().created_at,
            }
        };
        let ready = members.ready.iter().filter_map(|id| members.all.get(id));
        let others = members.all.values().filter(|member| member.standing != Standing::Ready);
        let list: Vec<PoolMember> = ready.chain(others).map(described).collect();
        let count = members.ready.len();
        drop(members);
        let trouble = face.trouble.as_ref();
        PoolInfo {
            id: self.id,
            name: face.name,
            template: self.template(),
            template_version: match self.source(shared) {
                Ok(Source::Version(version)) => version.number,
                Ok(Source::BuiltIn) | Err(_) => 1,
            },
            replicas: face.replicas,
            state: match trouble {
                _ if face.going => PoolState::Deleting,
                _ if count >= face.replicas as usize => PoolState::Ready,
                Some(_) => PoolState::Failing,
                None => PoolState::Filling,
            },
            reason: trouble.map(|trouble| trouble.reason.clone()),
            retry_at: trouble.and_then(|trouble| trouble.retry).map(|(_, at)| at),
            members: list,
            claims: self.claims.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            created_at: self.created_at,
            updated_at: face.updated_at,
        }
    }

    /// What its sandboxes are made from now.
    fn source(&self, shared: &Shared) -> Result<Source, EngineError> {
        let Some(head) = &self.head else { return Ok(Source::BuiltIn) };
        loop {
            let name = head.name();
            match shared.templates.find(&self.owner, name.as_str()) {
                // It got another name since that was asked.
                Err(_) if head.name() != name => {}
                found => return found,
            }
        }
    }
}

/// Whether something else must happen before the next attempt.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Retry {
    Later,
    AfterChange,
}

fn is_made_from(home: &Home, version: Option<&Arc<Version>>) -> bool {
    let of = |version: &Arc<Version>| (version.head.id, version.number);
    home.version.as_ref().map(of) == version.map(of)
}

/// All pools of one data directory.
pub(crate) struct Pools {
    stock: Mutex<Stock>,
    /// Held from a change of rows until the stock says the same, as with templates.
    changing: tokio::sync::Mutex<()>,
    /// Bounds how many sandboxes are made for pools at once.
    refills: Semaphore,
}

#[derive(Default)]
struct Stock {
    by_name: BTreeMap<(Owner, PoolName), Arc<Pool>>,
    /// So that a create finds its pools at once, or none.
    by_template: BTreeMap<(Owner, Option<TemplateId>), Vec<Arc<Pool>>>,
}

impl Stock {
    fn insert(&mut self, pool: &Arc<Pool>) {
        self.by_name.insert((pool.owner.clone(), pool.name()), Arc::clone(pool));
        self.by_template.entry(template_key(pool)).or_default().push(Arc::clone(pool));
    }

    fn remove(&mut self, pool: &Arc<Pool>) {
        self.by_name.remove(&(pool.owner.clone(), pool.name()));
        if let Some(pools) = self.by_template.get_mut(&template_key(pool)) {
            pools.retain(|other| other.id != pool.id);
            if pools.is_empty() {
                self.by_template.remove(&template_key(pool));
            }
        }
    }
}

fn template_key(pool: &Pool) -> (Owner, Option<TemplateId>) {
    (pool.owner.clone(), pool.head.as_ref().map(|head| head.id))
}

impl Pools {
    /// Reads what is here.
    pub fn open(rows: Vec<PoolRow>, head: impl Fn(TemplateId) -> Option<Arc<Head>>) -> Self {
        let mut stock = Stock::default();
        for row in rows {
            let head = row.template.and_then(&head);
            stock.insert(&Pool::new(row, head));
        }
        Self {
            stock: Mutex::new(stock),
            changing: tokio::sync::Mutex::default(),
            refills: Semaphore::new(REFILLS_MAX),
        }
    }

    fn stock(&self) -> MutexGuard<'_, Stock> {
        self.stock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing is made or removed from now on.
    pub fn halt(&self) {
        let pools: Vec<_> = self.stock().by_name.values().cloned().collect();
        pools.iter().for_each(|pool| pool.stop());
    }

    pub fn by_id(&self, id: PoolId) -> Option<Arc<Pool>> {
        self.stock().by_name.values().find(|pool| pool.id == id).cloned()
    }

    /// An owner's pool.
    pub fn find(&self, owner: &Owner, name: &str) -> Result<Arc<Pool>, EngineError> {
        let not_found = || EngineError::PoolNotFound { name: name.to_owned() };
        let name = PoolName::parse(name).map_err(|_| not_found())?;
        self.stock().by_name.get(&(owner.clone(), name)).cloned().ok_or_else(not_found)
    }

    /// How many pools have a template.
    pub fn holding(&self, owner: &Owner, template: TemplateId) -> usize {
        self.stock().by_template.get(&(owner.clone(), Some(template))).map_or(0, Vec::len)
    }

    /// Takes a sandbox that stands ready and is just so, from the pool that was named or from any that the owner has. Whoever took
    /// it has it alone, and puts it back if it is not wanted. Never waits.
    pub fn take(
        &self,
        owner: &Owner,
        named: Option<&Arc<Pool>>,
        version: Option<&Arc<Version>>,
        limits: &Limits,
        metrics: &Metrics,
    ) -> Option<(Arc<Pool>, Arc<Home>)> {
        let pools = match named {
            Some(pool) => vec![Arc::clone(pool)],
            None => {
                let template = version.map(|version| version.head.id);
                self.stock().by_template.get(&(owner.clone(), template))?.clone()
            }
        };
        let open = pools.iter().filter(|pool| !pool.face().going);
        for pool in open.clone() {
            if let Some(home) = pool.take(version, limits) {
                return Some((Arc::clone(pool), home));
            }
        }
        let mut missed = false;
        for pool in open {
            pool.misses.fetch_add(1, Ordering::Relaxed);
            missed = true;
        }
        if missed {
            metrics.missed();
        }
        None
    }

    /// What all pools have, by how it stands.
    pub fn counts(&self) -> [(Standing, usize); 4] {
        let mut counts = [Standing::Making, Standing::Ready, Standing::Broken, Standing::Going]
            .map(|standing| (standing, 0));
        let pools: Vec<_> = self.stock().by_name.values().cloned().collect();
        for pool in pools {
            for member in pool.members().all.values() {
                for (standing, count) in &mut counts {
                    *count += usize::from(*standing == member.standing);
                }
            }
        }
        counts
    }

    pub fn count(&self) -> usize {
        self.stock().by_name.len()
    }
}

/// Goes on with what a daemon before this one began. All sandboxes are in the directory.
pub(crate) fn take_up(shared: &Arc<Shared>) {
    let waiting = shared.directory().all();
    for home in waiting {
        let pool = home.face().waits_in.as_ref().and_then(Weak::upgrade);
        if let Some(pool) = pool {
            pool.enroll(&home, Standing::Making);
        }
    }
    let pools: Vec<_> = shared.pools.stock().by_name.values().cloned().collect();
    for pool in pools {
        start_tending(shared, &pool);
    }
}

fn start_tending(shared: &Arc<Shared>, pool: &Arc<Pool>) {
    let span = info_span!("pool", name = %pool.name());
    let task = tend(Arc::clone(shared), Arc::clone(pool)).instrument(span);
    let task = shared.runtime.spawn(task).abort_handle();
    *pool.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
}

/// What is there, for `decide`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    id: SandboxId,
    standing: Standing,
    /// Made from what the template says now.
    current: bool,
}

/// What should be, for `decide`.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    replicas: usize,
    /// To be made, and without a row yet.
    begun: usize,
    /// How many may be made at the same time now.
    making_max: usize,
}

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
struct Steps {
    remove: Vec<SandboxId>,
    make: usize,
}

/// What is missing, and what is too much: the broken and the outdated, then those that are being made, then the ready, of each
/// the last first. `seen` has the ready in the order in which they will be claimed.
fn decide(wanted: Wanted, seen: &[Seen]) -> Steps {
    let is_good = |seen: &&Seen| seen.current && matches!(seen.standing, Standing::Making | Standing::Ready);
    let bad = seen.iter().filter(|seen| seen.standing != Standing::Going && !is_good(seen));
    let mut remove: Vec<SandboxId> = bad.map(|seen| seen.id).collect();
    let good: Vec<&Seen> = seen.iter().filter(is_good).collect();
    let being_made = good.iter().filter(|seen| seen.standing == Standing::Making).count();
    let have = good.len() + wanted.begun;
    let excess = good.len().saturating_sub(wanted.replicas);
    let last_first = |standing| good.iter().rev().filter(move |seen| seen.standing == standing);
    let unneeded = last_first(Standing::Making).chain(last_first(Standing::Ready)).take(excess);
    remove.extend(unneeded.map(|seen| seen.id));
    let missing = wanted.replicas.saturating_sub(have);
    Steps { remove, make: missing.min(wanted.making_max.saturating_sub(being_made + wanted.begun)) }
}

/// What became of work beside the task.
enum Done {
    /// One was made, or not; or was found, or not.
    Made(Result<(), String>),
    /// Nobody needs it any more.
    Unneeded,
    Removed,
    Checked,
}

/// Sees to it that there is what should be, until the pool is gone.
async fn tend(shared: Arc<Shared>, pool: Arc<Pool>) {
    let mut work: JoinSet<Done> = JoinSet::new();
    // Those that a daemon before this one left.
    let found: Vec<_> = pool.members().all.values().map(|member| Arc::clone(&member.home)).collect();
    for home in found {
        work.spawn(look_at(Arc::clone(&pool), home).in_current_span());
    }
    let mut check_at = Instant::now() + CHECK_INTERVAL;
    let (mut removing, mut checking) = (0, false);
    loop {
        let source = pool.source(&shared);
        let mut preparation = match &source {
            Ok(Source::Version(version)) => Some(version.watch()),
            Ok(Source::BuiltIn) | Err(_) => None,
        };
        let makeable = look_at_source(&pool, source.as_ref());
        let going = pool.face().going;
        let version = match &source {
            Ok(Source::Version(version)) => Some(version),
            Ok(Source::BuiltIn) | Err(_) => None,
        };
        let steps = pool.steps(version, makeable && !going);
        for id in steps.remove.into_iter().take(REMOVALS_MAX - removing) {
            let mut members = pool.members();
            members.set(id, Standing::Going);
            if let Some(home) = members.all.get(&id).map(|member| Arc::clone(&member.home)) {
                removing += 1;
                work.spawn(remove(Arc::clone(&pool), home).in_current_span());
            }
        }
        let quiet_at = pool.quiet_at();
        let now = if quiet_at.is_some() { 0 } else { steps.make };
        for _ in 0..now {
            pool.members().begun += 1;
            work.spawn(make(Arc::clone(&shared), Arc::clone(&pool)).in_current_span());
        }
        if !going && !checking && Instant::now() >= check_at {
            checking = true;
            work.spawn(check(Arc::clone(&pool)).in_current_span());
        }
        if going && work.is_empty() && pool.members().all.is_empty() {
            match shared.store.delete_pool(pool.id).await {
                Ok(()) => {
                    shared.pools.stock().remove(&pool);
                    pool.changed.send_replace(true);
                    info!("pool is gone");
                    return;
                }
                Err(error) => pool.set_trouble(chain(&error), Retry::Later),
            }
        }
        pool.tell();
        let retry = pool.face().trouble.as_ref().and_then(|trouble| trouble.retry).map(|(at, _)| at);
        let retry = retry.filter(|at| *at > Instant::now());
        let next_check = (!checking).then_some(check_at);
        let wake_at = [retry, next_check, quiet_at.filter(|_| steps.make > 0)].into_iter().flatten().min();
        tokio::select! {
            () = pool.wake.notified() => {}
            () = sleep_until(wake_at.unwrap_or(check_at)), if wake_at.is_some() => {}
            // Whichever way it changed, the next look sees it. The sender lives as long as the version.
            Some(_) = changed(&mut preparation) => {}
            Some(done) = work.join_next() => match done {
                Ok(Done::Made(made)) => {
                    shared.metrics.refilled(&made);
                    match made {
                        Ok(()) => pool.face().trouble = None,
                        Err(reason) => {
                            warn!(reason, "cannot make a sandbox for the pool");
                            pool.set_trouble(reason, Retry::Later);
                        }
                    }
                }
                Ok(Done::Unneeded) => {}
                Ok(Done::Removed) => removing -= 1,
                Ok(Done::Checked) => (checking, check_at) = (false, Instant::now() + CHECK_INTERVAL),
                Err(error) => {
                    warn!(%error, "work for the pool panicked");
                    pool.set_trouble(error.to_string(), Retry::Later);
                }
            },
        }
    }
}

async fn changed(preparation: &mut Option<watch::Receiver<Preparation>>) -> Option<()> {
    preparation.as_mut()?.changed().await.ok()
}

/// Whether sandboxes can be made from the template as it is. If not for a reason, the pool says which.
fn look_at_source(pool: &Pool, source: Result<&Source, &EngineError>) -> bool {
    let standing_in_the_way = match source {
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
    let mut face = pool.face();
    let in_the_way = face.trouble.as_ref().is_some_and(|trouble| trouble.retry.is_none());
    match standing_in_the_way {
        Some(reason) => {
            drop(face);
            pool.set_trouble(shortened(reason), Retry::AfterChange);
            false
        }
        None => {
            // What stood in the way does not any more.
            if in_the_way {
                face.trouble = None;
            }
            true
        }
    }
}

impl Pool {
    /// Until when whoever claimed is left alone, if that is not over.
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

    fn steps(&self, version: Option<&Arc<Version>>, makeable: bool) -> Steps {
        let face = self.face().clone();
        let members = self.members();
        let seen = |id: &SandboxId| {
            let Member { home, standing } = members.all.get(id)?;
            let standing = match (home.state(), standing) {
                // Its driver has found out first.
                (State::Failed { .. } | State::Deleting | State::Paused(_), Standing::Ready) => {
                    Standing::Broken
                }
                (_, standing) => *standing,
            };
            Some(Seen { id: *id, standing, current: is_made_from(home, version) })
        };
        let others = members.all.iter().filter(|(_, member)| member.standing != Standing::Ready);
        let all = members.ready.iter().chain(others.map(|(id, _)| id));
        let wanted = Wanted {
            replicas: if face.going { 0 } else { face.replicas as usize },
            begun: members.begun,
            making_max: match &face.trouble {
                _ if !makeable => 0,
                None => MAKING_MAX,
                // One tells whether it works again.
                Some(Trouble { retry: Some((at, _)), .. }) => usize::from(Instant::now() >= *at),
                Some(Trouble { retry: None, .. }) => 0,
            },
        };
        decide(wanted, &all.filter_map(seen).collect::<Vec<_>>())
    }
}

/// Makes one, unless nobody needs it by the time that there is room for the work.
async fn make(shared: Arc<Shared>, pool: Arc<Pool>) -> Done {
    let _place = shared.pools.refills.acquire().await;
    let begun = {
        let wanted = !pool.face().going;
        let admitted = wanted.then(|| crate::admit_member(&shared, &pool));
        // From here on it counts as a member, or not at all.
        pool.members().begun -= 1;
        admitted
    };
    let (home, created) = match begun {
        None => return Done::Unneeded,
        Some(Err(error)) => return Done::Made(Err(shortened(chain(&error)))),
        Some(Ok(admitted)) => admitted,
    };
    let made = match created.await {
        Ok(Ok(())) => {
            rehearse(&home).await;
            Ok(())
        }
        Ok(Err(error)) => Err(shortened(chain(&error))),
        Err(_) => return Done::Unneeded, // The engine stops.
    };
    settle(&pool, &home, made)
}

/// It is ready from now on, or broken; unless it is on its way out already.
fn settle(pool: &Pool, home: &Home, result: Result<(), String>) -> Done {
    let mut members = pool.members();
    if members.standing(home.id) != Some(Standing::Making) {
        return Done::Unneeded;
    }
    members.set(home.id, if result.is_ok() { Standing::Ready } else { Standing::Broken });
    Done::Made(result)
}

/// One that a daemon before this one left: it is as good as new if it answers.
async fn look_at(pool: Arc<Pool>, home: Arc<Home>) -> Done {
    let result = match home.made().await {
        Ok(()) if answers(&home).await => Ok(()),
        Ok(()) => Err(format!("sandbox `{}` does not answer after a restart", home.id)),
        Err(error) => Err(shortened(chain(&error))),
    };
    match settle(&pool, &home, result) {
        // What broke while nobody looked says nothing about the template.
        Done::Made(Err(reason)) => info!(reason, "a sandbox in the pool is replaced"),
        Done::Made(Ok(())) | Done::Unneeded | Done::Removed | Done::Checked => {}
    }
    Done::Unneeded
}

async fn remove(pool: Arc<Pool>, home: Arc<Home>) -> Done {
    while let Err(error) = crate::delete(&home).await {
        if home.shared.directory().get(home.id).is_none() {
            break;
        }
        warn!(sandbox = %home.id, error = chain(&error), "cannot remove a sandbox from the pool; trying again");
        tokio::time::sleep(RETRY_MIN).await;
    }
    pool.members().all.remove(&home.id);
    Done::Removed
}

/// Asks all that are ready whether they are.
async fn check(pool: Arc<Pool>) -> Done {
    let ready: Vec<Arc<Home>> = {
        let members = pool.members();
        members
            .ready
            .iter()
            .filter_map(|id| members.all.get(id))
            .map(|member| Arc::clone(&member.home))
            .collect()
    };
    let mut asked: JoinSet<Option<SandboxId>> = JoinSet::new();
    for home in ready {
        asked.spawn(async move { (!answers(&home).await).then_some(home.id) });
    }
    while let Some(answer) = asked.join_next().await {
        if let Ok(Some(id)) = answer {
            let mut members = pool.members();
            // It may have been claimed in the meantime, and is somebody's then.
            if members.standing(id) == Some(Standing::Ready) {
                warn!(sandbox = %id, "a sandbox in the pool does not answer, and is replaced");
                members.set(id, Standing::Broken);
            }
        }
    }
    Done::Checked
}

/// Whether its init listens. A connection that breaks is made anew, so that is asked twice.
async fn answers(home: &Home) -> bool {
    let asked = async {
        match home.outbox.say(None).await {
            Err(Unsaid::Broken) => home.outbox.say(None).await.is_ok(),
            said => said.is_ok(),
        }
    };
    timeout(CHECK_WAIT, asked).await.unwrap_or(false)
}

fn shortened(mut reason: String) -> String {
    let end = (0..=reason.len().min(REASON_MAX)).rev().find(|at| reason.is_char_boundary(*at));
    reason.truncate(end.unwrap_or(0));
    reason
}

/// What callers ask about pools.
impl Engine {
    /// An owner's pools by name.
    pub fn pools(&self, owner: &Owner) -> Vec<PoolInfo> {
        let pools: Vec<_> = self.shared().pools.stock().by_name.values().cloned().collect();
        pools.iter().filter(|pool| pool.owner == *owner).map(|pool| pool.describe(self.shared())).collect()
    }

    /// A pool by its name.
    pub fn pool(&self, owner: &Owner, name: &str) -> Result<PoolInfo, EngineError> {
        Ok(self.shared().pools.find(owner, name)?.describe(self.shared()))
    }

    /// Makes a pool. Answers when its row is written; it fills behind that.
    pub async fn create_pool(
        &self,
        key: &Key,
        name: PoolName,
        template: &str,
        replicas: u32,
    ) -> Result<PoolInfo, EngineError> {
        let shared = self.shared();
        let _changing = shared.pools.changing.lock().await;
        // No template goes while a pool is made for it.
        let _templates = shared.templates.unchanged().await;
        let source = shared.templates.find(&key.owner, template)?;
        let spec = source.spec();
        if !spec.mounts.is_empty() {
            return Err(EngineError::PoolVolumes { template: template.to_owned() });
        }
        self.check_pool_name(&key.owner, &name)?;
        self.check_replicas(key, &limits_of(&spec), replicas, 0)?;
        let head = match &source {
            Source::BuiltIn => None,
            Source::Version(version) => Some(Arc::clone(&version.head)),
        };
        let now = crate::now();
        let row = PoolRow {
            id: PoolId::from_random(random_u128()),
            owner: key.owner.clone(),
            name: name.clone(),
            template: head.as_ref().map(|head| head.id),
            replicas,
            limits: key.limits,
            going: false,
            created_at: now,
            updated_at: now,
        };
        shared.store.insert_pool(row.clone()).await?;
        info!(pool = %name, template, replicas, "pool made");
        let pool = Pool::new(row, head);
        shared.pools.stock().insert(&pool);
        start_tending(shared, &pool);
        Ok(pool.describe(shared))
    }

    /// Changes a pool's name, how many should stand ready, or both.
    pub async fn update_pool(
        &self,
        key: &Key,
        name: &str,
        update: PoolUpdate,
    ) -> Result<PoolInfo, EngineError> {
        let shared = self.shared();
        let _changing = shared.pools.changing.lock().await;
        let pool = shared.pools.find(&key.owner, name)?;
        let face = pool.face().clone();
        if face.going {
            return Err(EngineError::PoolGoing { name: name.to_owned() });
        }
        let other = update.name.filter(|other| *other != face.name);
        if let Some(other) = &other {
            self.check_pool_name(&key.owner, other)?;
        }
        if let Some(replicas) = update.replicas {
            let limits = limits_of(&pool.source(shared)?.spec());
            let here = pool.members().all.len();
            self.check_replicas(key, &limits, replicas, here)?;
        }
        if other.is_none() && update.replicas.is_none() {
            return Ok(pool.describe(shared));
        }
        let now = crate::now();
        let replicas = update.replicas.map(|replicas| (replicas, key.limits));
        let change = PoolChange { name: other.clone(), replicas, going: false };
        shared.store.change_pool(pool.id, change, now).await?;
        {
            let mut stock = shared.pools.stock();
            stock.remove(&pool);
            let mut face = pool.face();
            face.updated_at = now;
            if let Some(other) = other {
                face.name = other;
            }
            if let Some((replicas, limits)) = replicas {
                (face.replicas, face.limits) = (replicas, limits);
                // Whoever scales it wants to see at once whether it works now.
                face.trouble = None;
            }
            drop(face);
            stock.insert(&pool);
        }
        pool.wake();
        Ok(pool.describe(shared))
    }

    /// Deletes a pool and what waits in it. Sandboxes that were claimed from it stay. Returns when nothing of it is left.
    pub async fn delete_pool(&self, owner: &Owner, name: &str) -> Result<(), EngineError> {
        let shared = self.shared();
        let pool = {
            let _changing = shared.pools.changing.lock().await;
            let pool = shared.pools.find(owner, name)?;
            if !pool.face().going {
                let change = PoolChange { going: true, ..PoolChange::default() };
                shared.store.change_pool(pool.id, change, crate::now()).await?;
                pool.face().going = true;
            }
            pool
        };
        pool.wake();
        let mut changed = pool.changed.subscribe();
        let gone = timeout(DELETE_WAIT, changed.wait_for(|gone| *gone)).await;
        match gone {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) => Err(EngineError::Stopping),
            Err(_) => Err(EngineError::PoolGoing { name: name.to_owned() }),
        }
    }

    /// A pool once it is as full as it should be, or cannot be filled for a reason that it tells; or as it is after `wait`.
    pub async fn wait_pool(
        &self,
        owner: &Owner,
        name: &str,
        wait: Duration,
    ) -> Result<PoolInfo, EngineError> {
        let pool = self.shared().pools.find(owner, name)?;
        let mut changed = pool.changed.subscribe();
        let deadline = Instant::now() + wait;
        loop {
            let info = pool.describe(self.shared());
            if *changed.borrow_and_update() {
                return Err(EngineError::PoolNotFound { name: name.to_owned() });
            }
            match info.state {
                PoolState::Ready | PoolState::Failing => return Ok(info),
                PoolState::Filling | PoolState::Deleting => {}
            }
            if tokio::time::timeout_at(deadline, changed.changed()).await.is_err() {
                return Ok(info);
            }
        }
    }

    fn check_pool_name(&self, owner: &Owner, name: &PoolName) -> Result<(), EngineError> {
        let stock = self.shared().pools.stock();
        if stock.by_name.contains_key(&(owner.clone(), name.clone())) {
            return Err(EngineError::PoolNameTaken { name: name.to_string() });
        }
        if stock.by_name.keys().filter(|(other, _)| other == owner).count() >= POOLS_MAX {
            return Err(EngineError::Quota { what: "pools", limit: POOLS_MAX as u64 });
        }
        Ok(())
    }

    /// Whether so many may stand ready, of which some are here already.
    fn check_replicas(
        &self,
        key: &Key,
        limits: &Limits,
        replicas: u32,
        here: usize,
    ) -> Result<(), EngineError> {
        if replicas > REPLICAS_MAX {
            let why = format!("it is 0 to {REPLICAS_MAX}, not {replicas}");
            return Err(EngineError::Invalid { what: "replicas", why });
        }
        let more = (replicas as usize).saturating_sub(here);
        self.shared().directory().check_quota(&key.owner, limits, more, &key.limits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `R` ready, `M` being made, `B` broken, `G` going; in lower case, made from an older version.
    #[track_caller]
    fn check(replicas: usize, begun: usize, members: &str, remove: &str, make: usize) {
        let seen: Vec<Seen> = members
            .chars()
            .enumerate()
            .map(|(at, letter)| Seen {
                id: SandboxId::from_random(at as u128),
                standing: match letter.to_ascii_uppercase() {
                    'R' => Standing::Ready,
                    'M' => Standing::Making,
                    'B' => Standing::Broken,
                    _ => Standing::Going,
                },
                current: letter.is_ascii_uppercase(),
            })
            .collect();
        let steps = decide(Wanted { replicas, begun, making_max: 4 }, &seen);
        let removed: String = members
            .chars()
            .enumerate()
            .map(|(at, _)| if steps.remove.contains(&SandboxId::from_random(at as u128)) { 'x' } else { '.' })
            .collect();
        assert_eq!((removed.as_str(), steps.make), (remove, make), "{replicas} of {members:?}");
    }

    #[test]
    fn what_is_missing_is_made_a_few_at_a_time() {
        check(0, 0, "", "", 0);
        check(3, 0, "", "", 3);
        check(100, 0, "", "", 4);
        check(100, 3, "M", ".", 0);
        check(100, 1, "RRM", "...", 2);
        check(3, 1, "RM", "..", 0);
        check(3, 0, "RRG", "...", 1);
    }

    #[test]
    fn what_is_broken_or_old_goes_and_is_replaced() {
        check(3, 0, "RRR", "...", 0);
        check(3, 0, "RRB", "..x", 1);
        check(3, 0, "rrm", "xxx", 3);
        check(2, 0, "rRg", "x..", 1);
    }

    #[test]
    fn what_is_too_much_goes_beginning_with_what_is_not_ready() {
        check(1, 0, "RRR", ".xx", 0);
        check(2, 0, "RRM", "..x", 0);
        check(0, 0, "RMBG", "xxx.", 0);
        check(1, 0, "RRMM", ".xxx", 0);
    }
}
