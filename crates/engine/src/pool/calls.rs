//! Calls about pools: list, show, create, update, delete, wait.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};
use tracing::info;
use wire::PoolId;
use wire::launch::Limits;

use crate::Engine;
use crate::db::{PoolChange, PoolRow};
use crate::error::{EngineError, Field, Resource};
use crate::model::random::random_u128;
use crate::model::{Key, Owner};
use crate::pool::tend::start_tending;
use crate::pool::{Pool, PoolInfo, PoolName, PoolState, PoolUpdate, REPLICAS_MAX};
use crate::template::{Source, limits_of};

/// The maximum number of pools of one owner.
const POOLS_MAX: usize = 1000;
/// How long a delete keeps its caller waiting. The deletion goes on after that.
const DELETE_WAIT: Duration = Duration::from_secs(150);

impl Engine {
    /// An owner's pools, sorted by name.
    pub fn pools(&self, owner: &Owner) -> Vec<PoolInfo> {
        let pools: Vec<_> = self.shared().pools.index().by_name.values().cloned().collect();
        pools.iter().filter(|pool| pool.owner == *owner).map(|pool| pool.describe(self.shared())).collect()
    }

    /// A pool by its name.
    pub fn pool(&self, owner: &Owner, name: &str) -> Result<PoolInfo, EngineError> {
        Ok(self.shared().pools.find(owner, name)?.describe(self.shared()))
    }

    /// Makes a pool. Returns when its row is written; the pool fills afterwards.
    pub async fn create_pool(
        &self,
        key: &Key,
        name: PoolName,
        template: &str,
        replicas: u32,
    ) -> Result<PoolInfo, EngineError> {
        let shared = self.shared();
        let _changing = shared.pools.changing.lock().await;
        // Keeps the template from being deleted while a pool is made for it.
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
        let now = crate::observe::clock::now();
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
        shared.db.insert_pool(row.clone()).await?;
        info!(pool = %name, template, replicas, "pool made");
        let pool = Pool::new(row, head);
        shared.pools.index().insert(&pool);
        pool.tell(shared);
        start_tending(shared, &pool);
        Ok(pool.describe(shared))
    }

    /// Changes a pool's name, its number of ready sandboxes, or both.
    pub async fn update_pool(
        &self,
        key: &Key,
        name: &str,
        update: PoolUpdate,
    ) -> Result<PoolInfo, EngineError> {
        let shared = self.shared();
        let _changing = shared.pools.changing.lock().await;
        let pool = shared.pools.find(&key.owner, name)?;
        let view = pool.view().clone();
        if view.deleting {
            return Err(EngineError::PoolGoing { name: name.to_owned() });
        }
        let other = update.name.filter(|other| *other != view.name);
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
        let now = crate::observe::clock::now();
        let replicas = update.replicas.map(|replicas| (replicas, key.limits));
        let change = PoolChange { name: other.clone(), replicas, going: false };
        shared.db.change_pool(pool.id, change, now).await?;
        {
            let mut index = shared.pools.index();
            index.remove(&pool);
            let mut view = pool.view();
            view.updated_at = now;
            if let Some(other) = other {
                view.name = other;
            }
            if let Some((replicas, limits)) = replicas {
                (view.replicas, view.limits) = (replicas, limits);
                // Retries at once: a caller who scales a pool wants to see whether it works now.
                view.trouble = None;
            }
            drop(view);
            index.insert(&pool);
        }
        pool.tell(shared);
        pool.wake();
        Ok(pool.describe(shared))
    }

    /// Deletes a pool and the sandboxes in it. Sandboxes that were claimed from the pool stay. Returns when nothing
    /// of the pool is left.
    pub async fn delete_pool(&self, owner: &Owner, name: &str) -> Result<(), EngineError> {
        let shared = self.shared();
        let pool = {
            let _changing = shared.pools.changing.lock().await;
            let pool = shared.pools.find(owner, name)?;
            if !pool.view().deleting {
                let change = PoolChange { going: true, ..PoolChange::default() };
                shared.db.change_pool(pool.id, change, crate::observe::clock::now()).await?;
                pool.view().deleting = true;
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

    /// Waits until a pool is full or fails to fill, at most for `wait`, and returns its state at that time.
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

    /// Checks that the name is free, and that the owner may have another pool.
    fn check_pool_name(&self, owner: &Owner, name: &PoolName) -> Result<(), EngineError> {
        let index = self.shared().pools.index();
        if index.by_name.contains_key(&(owner.clone(), name.clone())) {
            return Err(EngineError::PoolNameTaken { name: name.to_string() });
        }
        if index.by_name.keys().filter(|(other, _)| other == owner).count() >= POOLS_MAX {
            return Err(EngineError::Quota { resource: Resource::Pools, limit: POOLS_MAX as u64 });
        }
        Ok(())
    }

    /// Checks that the owner may have this many ready sandboxes, of which `here` exist already.
    fn check_replicas(
        &self,
        key: &Key,
        limits: &Limits,
        replicas: u32,
        here: usize,
    ) -> Result<(), EngineError> {
        if replicas > REPLICAS_MAX {
            return Err(Field::Replicas.must(format!("be between 0 and {REPLICAS_MAX}, got {replicas}")));
        }
        let more = (replicas as usize).saturating_sub(here);
        self.shared().registry().check_quota(&key.owner, limits, more, &key.limits)
    }
}
