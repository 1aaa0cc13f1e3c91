//! Calls about volumes: create, show, list, update, delete.

use std::sync::Arc;

use runtime::{BackendError, DiskUsage};
use tracing::{info, warn};
use wire::VolumeId;

use crate::db::{VolumeRow, VolumeState};
use crate::error::{EngineError, Field, Resource, chain};
use crate::model::random::random_u128;
use crate::model::{Key, Owner};
use crate::observe::events::VolumeHappened;
use crate::volume::live::VolumeView;
use crate::volume::remove::{failed, not_made, remove, undo, undo_later};
use crate::volume::{LiveVolume, VOLUME_BYTES_MIN, Volume, VolumeName, VolumeSpec, VolumeUpdate};

impl crate::Engine {
    /// Makes a volume. Returns when it can be mounted.
    pub async fn create_volume(&self, key: &Key, spec: VolumeSpec) -> Result<Volume, EngineError> {
        let engine = self.clone();
        let owner = key.owner.clone();
        let limit = key.limits.volume_bytes;
        // A task of its own: it finishes even if the caller disconnects, so nothing stays half-made.
        let making = tokio::spawn(async move { engine.make_volume(owner, limit, spec).await });
        making.await.map_err(|_| EngineError::Stopping)?
    }

    async fn make_volume(
        &self,
        owner: Owner,
        limit: Option<u64>,
        spec: VolumeSpec,
    ) -> Result<Volume, EngineError> {
        let shared = self.shared();
        let VolumeSpec { name, size_bytes, from } = spec;
        self.check_volume_size(size_bytes).await?;
        let from = from.map(|from| shared.volumes.find(&owner, &from)).transpose()?;
        if let Some(from) = &from {
            self.check_fits(from, size_bytes).await?;
        }
        let now = crate::observe::clock::now();
        let row = VolumeRow {
            id: VolumeId::from_random(random_u128()),
            owner,
            name: name.clone(),
            size_bytes,
            state: VolumeState::Creating,
            created_at: now,
            updated_at: now,
        };
        let volume = LiveVolume::new(&row);
        shared.volumes.index().admit(&volume, limit)?;
        if let Err(error) = shared.db.insert_volume(row).await {
            shared.volumes.index().remove(&volume);
            return Err(error);
        }
        let made = shared.backend.create_volume(volume.id, size_bytes, from.map(|from| from.id)).await;
        if let Err(error) = made {
            match error {
                BackendError::Late { .. } | BackendError::LauncherGone { .. } => undo_later(shared, volume),
                _ => undo(shared, &volume).await,
            }
            return Err(not_made(&name, error));
        }
        if let Err(error) = shared.db.set_volume_state(volume.id, VolumeState::Ready).await {
            undo(shared, &volume).await;
            return Err(error);
        }
        volume.view().state = VolumeState::Ready;
        info!(volume = %name, size_bytes, "volume made");
        self.tell_volume(&volume.owner, &name, Some(size_bytes));
        Ok(self.describe_volume(&volume, None))
    }

    /// A volume by its name, with the space that its files take.
    pub async fn volume(&self, owner: &Owner, name: &str) -> Result<Volume, EngineError> {
        let volume = self.shared().volumes.find(owner, name)?;
        let used = self.volume_used(&volume).await?;
        Ok(self.describe_volume(&volume, Some(used)))
    }

    /// An owner's volumes, sorted by name. Includes the space that their files take if the backend counts it anyway.
    pub async fn volumes(&self, owner: &Owner) -> Result<Vec<Volume>, EngineError> {
        let volumes: Vec<Arc<LiveVolume>> = {
            let index = self.shared().volumes.index();
            let mine = index.by_name.values().filter(|volume| volume.owner == *owner);
            mine.filter(|volume| volume.view().state == VolumeState::Ready).cloned().collect()
        };
        let counted = self.shared().backend.store().limits;
        let mut list = Vec::with_capacity(volumes.len());
        for volume in volumes {
            // A volume that is being deleted at this moment is listed without its usage.
            let used = if counted { self.volume_used(&volume).await.ok() } else { None };
            list.push(self.describe_volume(&volume, used));
        }
        Ok(list)
    }

    /// Changes a volume's name, its size, or both. If the row cannot be written, both stay as they were.
    pub async fn update_volume(
        &self,
        owner: &Owner,
        name: &str,
        update: VolumeUpdate,
    ) -> Result<Volume, EngineError> {
        let (engine, owner, name) = (self.clone(), owner.clone(), name.to_owned());
        let changing = tokio::spawn(async move { engine.change_volume(&owner, &name, update).await });
        changing.await.map_err(|_| EngineError::Stopping)?
    }

    async fn change_volume(
        &self,
        owner: &Owner,
        name: &str,
        update: VolumeUpdate,
    ) -> Result<Volume, EngineError> {
        let shared = self.shared();
        let _changing = shared.volumes.changing.lock().await;
        let volume = shared.volumes.find(owner, name)?;
        let before = volume.view().clone();
        let size = update.size_bytes.filter(|size| *size != before.size_bytes);
        if let Some(size) = size {
            self.check_volume_size(size).await?;
            let limit = shared.keys.smallest(owner, |limits| limits.volume_bytes);
            let others = shared.volumes.bytes_of(owner).saturating_sub(before.size_bytes);
            if let Some(limit) =
                limit.filter(|limit| size > before.size_bytes && others.saturating_add(size) > *limit)
            {
                return Err(EngineError::Quota { resource: Resource::VolumeBytes, limit });
            }
            if size < before.size_bytes {
                self.check_fits(&volume, size).await?;
            }
        }
        let other = update.name.filter(|other| *other != before.name);
        if let Some(other) = &other {
            // Reserve the name now, so that no other call takes it in the meantime.
            let mut index = shared.volumes.index();
            index.check_name(owner, other)?;
            index.by_name.insert((owner.clone(), other.clone()), Arc::clone(&volume));
        }
        if other.is_none() && size.is_none() {
            return Ok(self.describe_volume(&volume, None));
        }
        let after = VolumeView {
            name: other.clone().unwrap_or_else(|| before.name.clone()),
            size_bytes: size.unwrap_or(before.size_bytes),
            state: before.state,
            updated_at: crate::observe::clock::now(),
        };
        let changed = async {
            if let Some(size) = size {
                let resized = shared.backend.resize_volume(volume.id, size).await;
                resized.map_err(failed("resize", &before.name))?;
            }
            let (name, size_bytes) = (after.name.clone(), after.size_bytes);
            let written = shared.db.change_volume(volume.id, name, size_bytes, after.updated_at).await;
            if written.is_err()
                && size.is_some()
                && let Err(error) = shared.backend.resize_volume(volume.id, before.size_bytes).await
            {
                let error = chain(&error);
                warn!(volume = %before.name, error, "cannot undo a change of size; the next change of size corrects it");
            }
            written
        };
        let changed = changed.await;
        let mut index = shared.volumes.index();
        if let Some(other) = other {
            let unused = if changed.is_ok() { &before.name } else { &other };
            index.by_name.remove(&(owner.clone(), unused.clone()));
        }
        changed?;
        let (name, size_bytes) = (after.name.clone(), after.size_bytes);
        *volume.view() = after;
        drop(index);
        self.tell_volume(owner, &name, Some(size_bytes));
        Ok(self.describe_volume(&volume, None))
    }

    /// Deletes a volume with all its files. Fails while a sandbox mounts it.
    pub async fn delete_volume(&self, owner: &Owner, name: &str) -> Result<(), EngineError> {
        let (engine, owner, name) = (self.clone(), owner.clone(), name.to_owned());
        let deleting = tokio::spawn(async move { engine.end_volume(&owner, &name).await });
        deleting.await.map_err(|_| EngineError::Stopping)?
    }

    async fn end_volume(&self, owner: &Owner, name: &str) -> Result<(), EngineError> {
        let shared = self.shared();
        let _changing = shared.volumes.changing.lock().await;
        // Also finds a volume whose deletion failed, so that the caller can retry.
        let volume = shared.volumes.find_any(owner, name)?;
        {
            // Creates look volumes up under the same lock, so none can start using this one now.
            let registry = shared.registry();
            let mut view = volume.view();
            match view.state {
                VolumeState::Creating => return Err(EngineError::VolumeNotFound { name: name.to_owned() }),
                VolumeState::Ready | VolumeState::Deleting => {}
            }
            let holders = registry.holders(volume.id);
            if !holders.is_empty() {
                let mut holders: Vec<String> = holders.into_iter().map(|holder| holder.name).collect();
                // The holders are sorted by name, so a sandbox that mounts the volume twice is listed once.
                holders.dedup();
                return Err(EngineError::VolumeInUse { name: name.to_owned(), holders });
            }
            view.state = VolumeState::Deleting;
        }
        if let Err(error) = shared.db.set_volume_state(volume.id, VolumeState::Deleting).await {
            volume.view().state = VolumeState::Ready;
            return Err(error);
        }
        let last_name = volume.name();
        remove(shared, &volume).await?;
        info!(volume = name, "volume deleted");
        self.tell_volume(owner, &last_name, None);
        Ok(())
    }

    fn tell_volume(&self, owner: &Owner, name: &VolumeName, size_bytes: Option<u64>) {
        let what = VolumeHappened { name: name.to_string(), size_bytes };
        self.shared().events.publish_volume(owner, what);
    }

    async fn check_volume_size(&self, size_bytes: u64) -> Result<(), EngineError> {
        let invalid = |rule: String| Err(Field::Size.must(rule));
        if size_bytes < VOLUME_BYTES_MIN {
            return invalid(format!(
                "be at least {VOLUME_BYTES_MIN} bytes, got {size_bytes}; was a unit such as `Gi` left out?"
            ));
        }
        let machine = self.shared().backend.machine().await;
        let most = machine.map_err(|source| EngineError::Usage { source })?.disk_bytes;
        if size_bytes > most {
            return invalid(format!("be at most {most} bytes, the size of the store, got {size_bytes}"));
        }
        Ok(())
    }

    /// Checks that the contents of a volume fit into this many bytes.
    async fn check_fits(&self, volume: &LiveVolume, size_bytes: u64) -> Result<(), EngineError> {
        let used = self.volume_used(volume).await?;
        match used.bytes > size_bytes {
            true => Err(EngineError::VolumeTooSmall {
                name: volume.name().to_string(),
                size_bytes,
                used_bytes: used.bytes,
            }),
            false => Ok(()),
        }
    }

    async fn volume_used(&self, volume: &LiveVolume) -> Result<DiskUsage, EngineError> {
        let usage = self.shared().backend.volume_usage(volume.id).await;
        usage.map_err(failed("look at", &volume.name()))
    }

    fn describe_volume(&self, volume: &LiveVolume, used: Option<DiskUsage>) -> Volume {
        let VolumeView { name, size_bytes, updated_at, .. } = volume.view().clone();
        Volume {
            id: volume.id,
            name,
            size_bytes,
            enforced: self.shared().backend.store().limits,
            used,
            holders: self.shared().registry().holders(volume.id),
            created_at: volume.created_at,
            updated_at,
        }
    }
}
