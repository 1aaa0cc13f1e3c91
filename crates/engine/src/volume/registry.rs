//! All volumes in memory, by name and by id.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wire::VolumeId;

use crate::db::{MountRow, VolumeRow, VolumeState};
use crate::error::{EngineError, Resource};
use crate::model::Owner;
use crate::volume::{LiveVolume, Mounted, VolumeMount, VolumeName, check_mounts};

/// The maximum number of volumes of one owner.
const VOLUMES_MAX: usize = 10_000;

/// All volumes of one data directory.
#[derive(Default)]
pub(crate) struct Volumes {
    index: Mutex<VolumeIndex>,
    /// Held during a change of a name or a size, until rows, kernel and index match.
    pub(super) changing: tokio::sync::Mutex<()>,
}

#[derive(Default)]
pub(super) struct VolumeIndex {
    pub(super) by_name: BTreeMap<(Owner, VolumeName), Arc<LiveVolume>>,
    pub(super) by_id: BTreeMap<VolumeId, Arc<LiveVolume>>,
}

impl VolumeIndex {
    pub(super) fn insert(&mut self, volume: &Arc<LiveVolume>) {
        self.by_name.insert((volume.owner.clone(), volume.name()), Arc::clone(volume));
        self.by_id.insert(volume.id, Arc::clone(volume));
    }

    /// Adds a new volume, if its name is free and its owner may have another.
    /// `limit` is how many bytes the key allows for all volumes of the owner.
    pub(super) fn admit(&mut self, volume: &Arc<LiveVolume>, limit: Option<u64>) -> Result<(), EngineError> {
        let owner = &volume.owner;
        self.check_name(owner, &volume.name())?;
        if self.by_name.keys().filter(|(other, _)| other == owner).count() >= VOLUMES_MAX {
            return Err(EngineError::Quota { resource: Resource::Volumes, limit: VOLUMES_MAX as u64 });
        }
        let all = self.bytes_of(owner).saturating_add(volume.view().size_bytes);
        if let Some(limit) = limit.filter(|limit| all > *limit) {
            return Err(EngineError::Quota { resource: Resource::VolumeBytes, limit });
        }
        self.insert(volume);
        Ok(())
    }

    /// The sizes of all volumes of an owner.
    fn bytes_of(&self, owner: &Owner) -> u64 {
        let of_owner = self.by_id.values().filter(|volume| volume.owner == *owner);
        of_owner.map(|volume| volume.view().size_bytes).sum()
    }

    pub(super) fn remove(&mut self, volume: &LiveVolume) {
        self.by_name.remove(&(volume.owner.clone(), volume.name()));
        self.by_id.remove(&volume.id);
    }

    pub(super) fn check_name(&self, owner: &Owner, name: &VolumeName) -> Result<(), EngineError> {
        match self.by_name.contains_key(&(owner.clone(), name.clone())) {
            true => Err(EngineError::VolumeNameTaken { name: name.to_string() }),
            false => Ok(()),
        }
    }
}

impl Volumes {
    /// The sizes of all volumes of an owner.
    pub fn bytes_of(&self, owner: &Owner) -> u64 {
        self.index().bytes_of(owner)
    }

    /// Opens the volumes from their rows.
    pub fn open(rows: &[VolumeRow]) -> Self {
        let mut index = VolumeIndex::default();
        rows.iter().for_each(|row| index.insert(&LiveVolume::new(row)));
        Self { index: Mutex::new(index), changing: tokio::sync::Mutex::default() }
    }

    pub(super) fn index(&self) -> MutexGuard<'_, VolumeIndex> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A volume that can be used, by its name.
    pub(super) fn find(&self, owner: &Owner, name: &str) -> Result<Arc<LiveVolume>, EngineError> {
        let volume = self.find_any(owner, name)?;
        match volume.view().state {
            VolumeState::Ready => {}
            VolumeState::Creating | VolumeState::Deleting => {
                return Err(EngineError::VolumeNotFound { name: name.to_owned() });
            }
        }
        Ok(volume)
    }

    /// A volume in any state, by its name.
    pub(super) fn find_any(&self, owner: &Owner, name: &str) -> Result<Arc<LiveVolume>, EngineError> {
        let not_found = || EngineError::VolumeNotFound { name: name.to_owned() };
        let name = VolumeName::parse(name).map_err(|_| not_found())?;
        self.index().by_name.get(&(owner.clone(), name)).cloned().ok_or_else(not_found)
    }

    /// Finds the volumes of mounts. A create calls this under the registry's lock, so that no volume is deleted before the sandbox
    /// holds it.
    pub fn resolve(&self, owner: &Owner, mounts: Vec<VolumeMount>) -> Result<Vec<Mounted>, EngineError> {
        let mounts = check_mounts(mounts)?;
        let found = mounts.into_iter().map(|VolumeMount { volume, path, access }| {
            Ok(Mounted { volume: self.find(owner, &volume)?, path, access })
        });
        found.collect()
    }

    /// A sandbox's mounts, from their rows.
    pub fn recovered(&self, rows: &[MountRow]) -> Vec<Mounted> {
        let index = self.index();
        let found = rows.iter().filter_map(|MountRow { volume, path, access }| {
            let volume = Arc::clone(index.by_id.get(volume)?);
            Some(Mounted { volume, path: path.clone(), access: *access })
        });
        found.collect()
    }
}
