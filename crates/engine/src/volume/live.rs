//! One volume in memory.
//!
//! The sandboxes that mount a volume hold it, so it stays in memory as long as they do.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use wire::VolumeId;

use crate::db::{VolumeRow, VolumeState};
use crate::model::Owner;
use crate::volume::VolumeName;

/// One volume.
pub(crate) struct LiveVolume {
    pub id: VolumeId,
    pub(super) owner: Owner,
    pub(super) created_at: SystemTime,
    view: Mutex<VolumeView>,
}

/// What may change about a volume.
#[derive(Clone)]
pub(super) struct VolumeView {
    pub(super) name: VolumeName,
    pub(super) size_bytes: u64,
    pub(super) state: VolumeState,
    pub(super) updated_at: SystemTime,
}

impl LiveVolume {
    pub(super) fn new(row: &VolumeRow) -> Arc<Self> {
        let view = VolumeView {
            name: row.name.clone(),
            size_bytes: row.size_bytes,
            state: row.state,
            updated_at: row.updated_at,
        };
        let (id, owner, created_at) = (row.id, row.owner.clone(), row.created_at);
        Arc::new(Self { id, owner, created_at, view: Mutex::new(view) })
    }

    pub(super) fn view(&self) -> MutexGuard<'_, VolumeView> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn name(&self) -> VolumeName {
        self.view().name.clone()
    }
}
