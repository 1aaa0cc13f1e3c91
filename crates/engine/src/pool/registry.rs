//! All pools in memory, by name and by template.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::Semaphore;
use wire::launch::Limits;
use wire::{PoolId, TemplateId};

use crate::db::PoolRow;
use crate::error::EngineError;
use crate::model::Owner;
use crate::observe::metrics::Metrics;
use crate::pool::{Pool, PoolName, Standing};
use crate::sandbox::live::{LiveSandbox, WaitingRoom};
use crate::template::{TemplateHead, Version};

/// How many sandboxes all pools together make at the same time. The number is small because creates that callers wait
/// for come first.
const REFILLS_MAX: usize = 4;

/// All pools of one data directory.
pub(crate) struct Pools {
    index: Mutex<PoolIndex>,
    /// Held from a change of the rows until the index matches them, as with templates.
    pub(super) changing: tokio::sync::Mutex<()>,
    /// One permit for each sandbox that a pool is making.
    pub(super) refills: Semaphore,
}

#[derive(Default)]
pub(super) struct PoolIndex {
    pub(super) by_name: BTreeMap<(Owner, PoolName), Arc<Pool>>,
    /// Lets a create find its pools in one lookup.
    by_template: BTreeMap<(Owner, Option<TemplateId>), Vec<Arc<Pool>>>,
}

impl PoolIndex {
    pub(super) fn insert(&mut self, pool: &Arc<Pool>) {
        self.by_name.insert((pool.owner.clone(), pool.name()), Arc::clone(pool));
        self.by_template.entry(template_key(pool)).or_default().push(Arc::clone(pool));
    }

    pub(super) fn remove(&mut self, pool: &Arc<Pool>) {
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
    /// Opens the pools from their rows. `head` finds a template by its id.
    pub fn open(rows: Vec<PoolRow>, head: impl Fn(TemplateId) -> Option<Arc<TemplateHead>>) -> Self {
        let mut index = PoolIndex::default();
        for row in rows {
            let head = row.template.and_then(&head);
            index.insert(&Pool::new(row, head));
        }
        Self {
            index: Mutex::new(index),
            changing: tokio::sync::Mutex::default(),
            refills: Semaphore::new(REFILLS_MAX),
        }
    }

    pub(super) fn index(&self) -> MutexGuard<'_, PoolIndex> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all tasks: no sandbox is made or removed from now on.
    pub fn halt(&self) {
        let pools: Vec<_> = self.index().by_name.values().cloned().collect();
        pools.iter().for_each(|pool| pool.stop());
    }

    /// The pool where a sandbox waits.
    pub fn waiting_room(&self, id: PoolId) -> Weak<dyn WaitingRoom> {
        match self.index().by_name.values().find(|pool| pool.id == id) {
            Some(pool) => {
                let pool: Arc<dyn WaitingRoom> = pool.clone();
                Arc::downgrade(&pool)
            }
            None => Weak::<Pool>::new(),
        }
    }

    /// An owner's pool by its name.
    pub fn find(&self, owner: &Owner, name: &str) -> Result<Arc<Pool>, EngineError> {
        let not_found = || EngineError::PoolNotFound { name: name.to_owned() };
        let name = PoolName::parse(name).map_err(|_| not_found())?;
        self.index().by_name.get(&(owner.clone(), name)).cloned().ok_or_else(not_found)
    }

    /// How many of the owner's pools are for a template.
    pub fn holding(&self, owner: &Owner, template: TemplateId) -> usize {
        self.index().by_template.get(&(owner.clone(), Some(template))).map_or(0, Vec::len)
    }

    /// Takes a ready sandbox of this version with these limits, from the named pool or from any of the owner's pools.
    /// No other caller can take it after that. A caller that does not use the sandbox puts it back. Never waits.
    pub fn take(
        &self,
        owner: &Owner,
        named: Option<&Arc<Pool>>,
        version: Option<&Arc<Version>>,
        limits: &Limits,
        metrics: &Metrics,
    ) -> Option<(Arc<Pool>, Arc<LiveSandbox>)> {
        let pools = match named {
            Some(pool) => vec![Arc::clone(pool)],
            None => {
                let template = version.map(|version| version.head.id);
                self.index().by_template.get(&(owner.clone(), template))?.clone()
            }
        };
        let open = pools.iter().filter(|pool| !pool.view().deleting);
        for pool in open.clone() {
            if let Some(live) = pool.take(version, limits) {
                return Some((Arc::clone(pool), live));
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

    /// How many sandboxes all pools have, by standing.
    pub fn counts(&self) -> [(Standing, usize); 4] {
        let mut counts = [Standing::Making, Standing::Ready, Standing::Broken, Standing::Going]
            .map(|standing| (standing, 0));
        let pools: Vec<_> = self.index().by_name.values().cloned().collect();
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
        self.index().by_name.len()
    }
}
