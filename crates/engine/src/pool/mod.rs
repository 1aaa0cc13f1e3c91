//! Pools: sandboxes of a template that are made ahead of time, ready to be claimed.
//!
//! A sandbox in a pool is a sandbox like any other: it has a row, a driver and a link to its init, it survives the daemon, and the
//! same teardown removes it. It belongs to the pool's owner and counts against the owner's quota, but no call finds it until it is
//! claimed. A claim takes it from the queue of ready sandboxes, under a lock, and then writes one row; it waits for nothing else.
//! So no sandbox is given to two callers, and after a crash each one is either claimed or still waiting.
//!
//! Read in this order: `rules` decides (pure), `live` is one pool in memory, `registry` holds all of them, `tend` is the task that
//! keeps a pool full, `work` is what that task starts, `member` admits a sandbox to a pool, `claim` gives one away, `calls` is what
//! callers ask. The task retries a failed create after a pause that grows, and the pool reports the reason. What a sandbox does is
//! its driver's business.

mod calls;
mod claim;
mod live;
mod member;
mod registry;
mod rules;
mod tend;
mod work;

use std::time::SystemTime;

use wire::{PoolId, SandboxId};

pub use crate::model::names::PoolName;

pub(crate) use live::Pool;
pub(crate) use registry::Pools;
pub(crate) use tend::resume_interrupted;

/// The maximum number of sandboxes in one pool: about as many as an ordinary machine can run.
pub const REPLICAS_MAX: u32 = 1000;

/// A change to a pool, applied as a whole or not at all. Fields that are `None` stay as they are.
#[derive(Debug, Clone, Default)]
pub struct PoolUpdate {
    /// The new name.
    pub name: Option<PoolName>,
    /// How many sandboxes should be ready.
    pub replicas: Option<u32>,
}

/// The state of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolState {
    /// The pool has as many ready sandboxes as it should.
    Ready,
    /// Some sandboxes are still being made.
    Filling,
    /// The last sandbox could not be made. The pool retries.
    Failing,
    /// The pool is being deleted.
    Deleting,
}

impl PoolState {
    /// The name of the state in the API.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Filling => "filling",
            Self::Failing => "failing",
            Self::Deleting => "deleting",
        }
    }
}

/// A pool at one moment.
#[derive(Debug, Clone)]
pub struct PoolInfo {
    /// Stays the same when the name changes.
    pub id: PoolId,
    /// Unique among the owner's pools.
    pub name: PoolName,
    /// The name of the template that its sandboxes are made from.
    pub template: String,
    /// The newest version of the template.
    pub template_version: u32,
    /// How many sandboxes should be ready.
    pub replicas: u32,
    /// Whether it is full, and if not, why.
    pub state: PoolState,
    /// Why the last sandbox could not be made.
    pub reason: Option<String>,
    /// When the pool tries again.
    pub retry_at: Option<SystemTime>,
    /// The sandboxes in it, the next one to be claimed first.
    pub members: Vec<PoolMember>,
    /// Creates since the daemon started that found a ready sandbox here.
    pub claims: u64,
    /// Creates since the daemon started that found no ready sandbox here.
    pub misses: u64,
    /// When the pool was made.
    pub created_at: SystemTime,
    /// When the pool was last changed.
    pub updated_at: SystemTime,
}

impl PoolInfo {
    /// How many sandboxes are ready.
    pub fn ready(&self) -> usize {
        self.count(Standing::Ready)
    }

    /// How many sandboxes are being made, or checked after a restart.
    pub fn making(&self) -> usize {
        self.count(Standing::Making)
    }

    fn count(&self, standing: Standing) -> usize {
        self.members.iter().filter(|member| member.standing == standing).count()
    }
}

/// A sandbox in a pool.
#[derive(Debug, Clone)]
pub struct PoolMember {
    /// The id, which a claim does not change.
    pub id: SandboxId,
    /// The sandbox's name, unless the claim sets another.
    pub name: String,
    /// Whether the sandbox can be claimed.
    pub standing: Standing,
    /// The version of the template that the sandbox was made from.
    pub template_version: u32,
    /// When the sandbox was made.
    pub created_at: SystemTime,
}

/// Whether a sandbox in a pool can be claimed, and if not, why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// The sandbox is being made, or an earlier daemon left it and it has not answered yet.
    Making,
    /// The sandbox can be claimed.
    Ready,
    /// The sandbox is broken and will be removed.
    Broken,
    /// The sandbox is being removed.
    Going,
}

impl Standing {
    /// The name of the standing in the API.
    pub fn word(self) -> &'static str {
        match self {
            Self::Making => "making",
            Self::Ready => "ready",
            Self::Broken => "broken",
            Self::Going => "deleting",
        }
    }
}
