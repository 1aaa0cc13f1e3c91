//! Forks a sandbox: one snapshot of its files, and any number of sandboxes that start from it.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::Semaphore;
use tracing::warn;
use wire::{SandboxId, SnapshotId};

use super::{NAMES, SnapshotState, capture};
use crate::db::{Descent, Purpose, SnapshotRow};
use crate::error::{EngineError, Field, chain};
use crate::image;
use crate::model::labels::Labels;
use crate::model::random::random_u128;
use crate::model::{Key, Sandbox};
use crate::observe::clock::now;
use crate::sandbox::calls::delete;
use crate::sandbox::fork::{ChildFiles, ChildSpec, admit_child};
use crate::sandbox::lifecycle::State;
use crate::sandbox::live::LiveSandbox;
use crate::sandbox::take::take;
use crate::template::Origin;
use crate::{Engine, SandboxEnv};

/// The most children of one fork.
pub const FORK_MAX: u32 = 100;
/// How many children are created at the same time.
const AT_ONCE: usize = 16;

/// A request to fork a sandbox.
#[derive(Debug, Clone)]
pub struct ForkSpec {
    /// How many children.
    pub count: u32,
    /// Variables that the children have in addition to those of the source.
    pub env: SandboxEnv,
    /// Labels that the children have in addition to those of the source.
    pub labels: Labels,
}

impl Default for ForkSpec {
    fn default() -> Self {
        Self { count: 1, env: SandboxEnv::default(), labels: Labels::default() }
    }
}

impl Engine {
    /// Makes children of a running or paused sandbox, which begin with its files as they are now. Returns a sandbox or an
    /// error for each child.
    pub async fn fork(
        &self,
        key: &Key,
        sandbox: SandboxId,
        spec: ForkSpec,
    ) -> Result<Vec<Result<Sandbox, EngineError>>, EngineError> {
        if !(1..=FORK_MAX).contains(&spec.count) {
            return Err(Field::Count.must(format!("be between 1 and {FORK_MAX}, got {}", spec.count)));
        }
        let live = self.live(&key.owner, sandbox)?;
        match live.state() {
            State::Running | State::Paused(_) => {}
            State::Creating | State::Deleting | State::Failed { .. } => return Err(live.wrong_state()),
        }
        let (engine, key) = (self.clone(), key.clone());
        // A task of its own, so that a caller who disconnects does not leave a snapshot without children.
        let forking = tokio::spawn(async move { engine.forked(&key, &live, spec).await });
        forking.await.map_err(|_| EngineError::Stopping)?
    }

    async fn forked(
        &self,
        key: &Key,
        live: &Arc<LiveSandbox>,
        spec: ForkSpec,
    ) -> Result<Vec<Result<Sandbox, EngineError>>, EngineError> {
        let _using = live.guest.begin_use()?;
        let id = SnapshotId::from_random(random_u128());
        let files = self.files_for_children(live, id).await?;
        let child = ChildSpec { env: BTreeMap::clone(spec.env.pairs()), labels: spec.labels };
        let places = Arc::new(Semaphore::new(AT_ONCE));
        let children: Vec<_> = (0..spec.count)
            .map(|_| {
                let (key, live, child) = (key.clone(), Arc::clone(live), child.clone());
                let (files, places) = (files.clone(), Arc::clone(&places));
                tokio::spawn(async move {
                    let _place = places.acquire().await;
                    make_child(&key, &live, &child, files).await
                })
            })
            .collect();
        let mut made = Vec::with_capacity(children.len());
        for child in children {
            made.push(child.await.unwrap_or(Err(EngineError::Stopping)));
        }
        // The children hold the files from now on; with the last of them they go.
        self.release(id, &files).await;
        Ok(made)
    }

    /// The source's files as a snapshot or, if the store has none, as an image.
    pub(super) async fn files_for_children(
        &self,
        live: &Arc<LiveSandbox>,
        id: SnapshotId,
    ) -> Result<ChildFiles, EngineError> {
        let shared = self.shared();
        let descent = Descent { parent: live.id, snapshot: id };
        if !shared.backend.store().kind.has_snapshots() {
            let name = format!("{NAMES}{id}");
            let made = capture::capture(live, &id.to_string(), name.clone()).await;
            let made = made.map_err(|source| EngineError::Image {
                doing: "capture",
                name: live.id.to_string(),
                source: source.into(),
            })?;
            let origin = Origin { over: Default::default(), descent };
            return Ok(ChildFiles { image: name, held: Some(made.digest), origin });
        }
        let at = now();
        let row = SnapshotRow {
            id,
            owner: live.owner.clone(),
            name: live.id.to_string(),
            wanted_tags: Vec::new(),
            template: None,
            sandbox: Some(live.id),
            image: None,
            state: SnapshotState::Building,
            note: String::new(),
            created_at: at,
            updated_at: at,
            tags: Vec::new(),
            purpose: Purpose::Fork,
            labels: Labels::default(),
            parent: live.over().all().next(),
            taken: None,
            over: Default::default(),
        };
        shared.db.insert_snapshot(row).await?;
        let (taken, over) = match take(live, id).await {
            Ok(taken) => taken,
            Err(error) => {
                shared.db.delete_snapshot(id).await?;
                return Err(error);
            }
        };
        shared.db.put_snapshot_files(id, taken, over.clone()).await?;
        shared.db.settle_snapshot(id, SnapshotState::Ready, now()).await?;
        let held = live.stored_image().map(|image| image.digest);
        Ok(ChildFiles { image: live.image.clone(), held, origin: Origin { over, descent } })
    }

    async fn release(&self, id: SnapshotId, files: &ChildFiles) {
        let shared = self.shared();
        let released = match files.origin.over.is_empty() {
            true => image::unname(shared, &files.image).await,
            false => shared.db.settle_snapshot(id, SnapshotState::Deleting, now()).await.map(drop),
        };
        if let Err(error) = released {
            warn!(snapshot = %id, error = chain(&error), "cannot release the snapshot of a fork; the next start does");
        }
        shared.files_freed.notify_one();
    }
}

/// Makes one child. A child that cannot be made leaves nothing.
async fn make_child(
    key: &Key,
    source: &Arc<LiveSandbox>,
    spec: &ChildSpec,
    files: ChildFiles,
) -> Result<Sandbox, EngineError> {
    let (child, created) = admit_child(key, source, spec, files)?;
    match created.await.map_err(|_| EngineError::Stopping)? {
        Ok(()) => Ok(child.describe()),
        Err(error) => {
            if let Err(left) = delete(&child).await {
                warn!(sandbox = %child.id, error = chain(&left), "cannot delete a child that could not be made");
            }
            Err(error)
        }
    }
}
