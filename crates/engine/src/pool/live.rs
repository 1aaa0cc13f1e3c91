//! One pool in memory: what callers may read and change, and its members.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;
use wire::launch::Limits;
use wire::{PoolId, SandboxId};

use crate::Shared;
use crate::db::PoolRow;
use crate::error::EngineError;
use crate::model::defaults::DEFAULT;
use crate::model::{KeyLimits, Owner};
use crate::observe::events::PoolHappened;
use crate::pool::rules::retry_pause;
use crate::pool::{PoolInfo, PoolMember, PoolName, PoolState, Standing};
use crate::sandbox::lifecycle::State;
use crate::sandbox::live::{LiveSandbox, WaitingRoom};
use crate::template::{Source, TemplateHead, Version};

/// One pool.
pub(crate) struct Pool {
    pub id: PoolId,
    pub owner: Owner,
    /// The template; `None` for the built-in one.
    pub(super) head: Option<Arc<TemplateHead>>,
    created_at: SystemTime,
    view: Mutex<PoolView>,
    members: Mutex<Members>,
    claims: AtomicU64,
    pub(super) misses: AtomicU64,
    /// Wakes the task that tends the pool.
    pub(super) wake: Notify,
    /// Notifies callers that wait for a change; `true` once the pool is gone.
    pub(super) changed: watch::Sender<bool>,
    pub(super) task: Mutex<Option<AbortHandle>>,
}

/// What may change about a pool.
#[derive(Debug, Clone)]
pub(super) struct PoolView {
    pub(super) name: PoolName,
    pub(super) replicas: u32,
    pub(super) limits: KeyLimits,
    pub(super) deleting: bool,
    pub(super) updated_at: SystemTime,
    pub(super) trouble: Option<Trouble>,
}

/// Why the pool is not full.
#[derive(Debug, Clone)]
pub(super) struct Trouble {
    /// Failures in a row.
    failures: u32,
    pub(super) reason: String,
    /// When the pool tries again; `None` if it waits for a change of the template or the pool.
    pub(super) retry: Option<(Instant, SystemTime)>,
}

/// The sandboxes in a pool.
#[derive(Default)]
pub(super) struct Members {
    pub(super) all: BTreeMap<SandboxId, Member>,
    /// The ones that can be claimed, the oldest first.
    pub(super) ready: VecDeque<SandboxId>,
    /// Creates that were started and have no row yet.
    pub(super) begun: usize,
    /// The first and the last claim since the pool last made a sandbox.
    pub(super) claimed: Option<(Instant, Instant)>,
}

pub(super) struct Member {
    pub(super) live: Arc<LiveSandbox>,
    pub(super) standing: Standing,
}

impl Member {
    fn described(&self) -> PoolMember {
        let live = &self.live;
        let name = live.view().name.to_string();
        PoolMember {
            id: live.id,
            name,
            standing: self.standing,
            template_version: live.version.as_ref().map_or(1, |version| version.number),
            created_at: live.identity().created_at,
        }
    }
}

impl Members {
    pub(super) fn set(&mut self, id: SandboxId, standing: Standing) {
        if let Some(member) = self.all.get_mut(&id) {
            member.standing = standing;
            self.ready.retain(|ready| *ready != id);
            if standing == Standing::Ready {
                self.ready.push_back(id);
            }
        }
    }

    /// All members, the ready ones first, in the order of their claims.
    fn described(&self) -> Vec<PoolMember> {
        let ready = self.ready.iter().filter_map(|id| self.all.get(id));
        let others = self.all.values().filter(|member| member.standing != Standing::Ready);
        ready.chain(others).map(Member::described).collect()
    }

    pub(super) fn standing(&self, id: SandboxId) -> Option<Standing> {
        self.all.get(&id).map(|member| member.standing)
    }
}

impl Pool {
    pub(super) fn new(row: PoolRow, head: Option<Arc<TemplateHead>>) -> Arc<Self> {
        let PoolRow { id, owner, name, template: _, replicas, limits, going, created_at, updated_at } = row;
        Arc::new(Self {
            id,
            owner,
            head,
            created_at,
            view: Mutex::new(PoolView { name, replicas, limits, deleting: going, updated_at, trouble: None }),
            members: Mutex::default(),
            claims: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            wake: Notify::new(),
            changed: watch::Sender::new(false),
            task: Mutex::new(None),
        })
    }

    pub(super) fn view(&self) -> MutexGuard<'_, PoolView> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held only briefly. Lock the registry of sandboxes before this, never while this is held.
    pub(super) fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn name(&self) -> PoolName {
        self.view().name.clone()
    }

    /// The quota of the owner's key, which covers sandboxes in pools too.
    pub fn limits(&self) -> KeyLimits {
        self.view().limits
    }

    /// The template's current name.
    pub fn template(&self) -> String {
        self.head.as_ref().map_or_else(|| DEFAULT.to_owned(), |head| head.name().to_string())
    }

    /// Makes the pool's task check its members.
    pub fn wake(&self) {
        self.wake.notify_one();
    }

    /// Adds a sandbox that the registry holds already.
    pub fn enroll(&self, live: &Arc<LiveSandbox>, standing: Standing) {
        let member = Member { live: Arc::clone(live), standing };
        self.members().all.insert(live.id, member);
    }

    /// Takes the next ready sandbox of this version with these limits. No other caller can take it after that.
    pub(super) fn take(&self, version: Option<&Arc<Version>>, limits: &Limits) -> Option<Arc<LiveSandbox>> {
        let mut members = self.members();
        let mut taken = None;
        while let Some(id) = members.ready.pop_front() {
            let Some(member) = members.all.get_mut(&id) else { continue };
            let live = &member.live;
            if is_made_from(live, version) && live.limits != *limits {
                // The sandbox is fine; the caller asks for other limits.
                members.ready.push_front(id);
                break;
            }
            if live.state() == State::Running
                && live.guest.outbox.is_connected()
                && is_made_from(live, version)
            {
                taken = members.all.remove(&id).map(|member| member.live);
                let now = Instant::now();
                members.claimed = Some((members.claimed.map_or(now, |(first, _)| first), now));
                break;
            }
            // The pool's task removes the sandbox.
            member.standing = Standing::Broken;
        }
        drop(members);
        self.wake();
        taken
    }

    /// Returns a sandbox that was taken and not used.
    pub fn put_back(&self, live: &Arc<LiveSandbox>) {
        let mut members = self.members();
        members.all.insert(live.id, Member { live: Arc::clone(live), standing: Standing::Ready });
        members.ready.push_front(live.id);
    }

    /// Returns a sandbox that was taken and is broken.
    pub fn return_broken(&self, live: &Arc<LiveSandbox>) {
        self.enroll(live, Standing::Broken);
        self.wake();
    }

    /// Counts a claim.
    pub fn claimed(&self) {
        self.claims.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn notify_watchers(&self) {
        self.changed.send_modify(|_| {});
    }

    /// Ends the pool's task.
    pub(super) fn stop(&self) {
        if let Some(task) = self.task.lock().unwrap_or_else(PoisonError::into_inner).take() {
            task.abort();
        }
    }

    /// Records why the last sandbox could not be made, and when the pool tries again.
    pub(super) fn set_trouble(&self, reason: String, retry: Retry) {
        let mut view = self.view();
        let failures = match (&view.trouble, retry) {
            (_, Retry::AfterChange) => 0,
            (Some(trouble), Retry::Later) => trouble.failures + 1,
            (None, Retry::Later) => 1,
        };
        let retry = (retry == Retry::Later).then(|| {
            let pause = retry_pause(failures);
            (Instant::now() + pause, crate::observe::clock::now() + pause)
        });
        view.trouble = Some(Trouble { failures, reason, retry });
    }

    /// Tells watchers of events what the pool is to be, and what prevents that.
    pub(super) fn tell(&self, shared: &Shared) {
        let view = self.view().clone();
        let what = PoolHappened {
            name: view.name.to_string(),
            replicas: Some(view.replicas),
            trouble: view.trouble.map(|trouble| trouble.reason),
        };
        shared.events.publish_pool(&self.owner, what);
    }

    /// Clears a trouble that only a change could end, now that the change has happened.
    pub(super) fn clear_obstacle(&self) {
        let mut view = self.view();
        if view.trouble.as_ref().is_some_and(|trouble| trouble.retry.is_none()) {
            view.trouble = None;
        }
    }

    pub(super) fn describe(&self, shared: &Shared) -> PoolInfo {
        let view = self.view().clone();
        let members = self.members();
        let list = members.described();
        let count = members.ready.len();
        drop(members);
        let trouble = view.trouble.as_ref();
        PoolInfo {
            id: self.id,
            name: view.name,
            template: self.template(),
            template_version: match self.source(shared) {
                Ok(Source::Version(version)) => version.number,
                Ok(Source::BuiltIn) | Err(_) => 1,
            },
            replicas: view.replicas,
            state: match trouble {
                _ if view.deleting => PoolState::Deleting,
                _ if count >= view.replicas as usize => PoolState::Ready,
                Some(_) => PoolState::Failing,
                None => PoolState::Filling,
            },
            reason: trouble.map(|trouble| trouble.reason.clone()),
            retry_at: trouble.and_then(|trouble| trouble.retry).map(|(_, at)| at),
            members: list,
            claims: self.claims.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            created_at: self.created_at,
            updated_at: view.updated_at,
        }
    }

    /// What the pool makes its sandboxes from now.
    pub(super) fn source(&self, shared: &Shared) -> Result<Source, EngineError> {
        let Some(head) = &self.head else { return Ok(Source::BuiltIn) };
        loop {
            let name = head.name();
            match shared.templates.find(&self.owner, name.as_str()) {
                // The template was renamed between the two calls.
                Err(_) if head.name() != name => {}
                found => return found,
            }
        }
    }
}

/// When the pool may try again.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Retry {
    /// After a pause.
    Later,
    /// After the template, or the pool, has changed.
    AfterChange,
}

/// Whether a sandbox was made from this version; `None` is the built-in template.
pub(super) fn is_made_from(live: &LiveSandbox, version: Option<&Arc<Version>>) -> bool {
    let of = |version: &Arc<Version>| (version.head.id, version.number);
    live.version.as_ref().map(of) == version.map(of)
}

impl WaitingRoom for Pool {
    fn wake(&self) {
        Pool::wake(self);
    }

    fn adopt(&self, sandbox: &Arc<LiveSandbox>) {
        self.enroll(sandbox, Standing::Making);
    }
}
