//! Volumes: directory trees with a size that outlive sandboxes.
//!
//! A volume has an id, which names its files, and a name, which may change. Any number of sandboxes can mount a
//! volume at once, each through its own range of ids, and all of them see the same owners of files. The row holds the
//! state: after a crash, a volume that was being made is removed, because no caller knows of it, and a volume that
//! was being deleted is deleted. Files without a row are never touched: losing the database must not lose the data.
//!
//! Read in this order: `mounts` has the rules (pure), `live` is one volume in memory, `registry` holds all of them,
//! `remove` deletes and cleans up, `files` opens a volume's files, `calls` has the calls. The backend stores the
//! files; `sandbox` admits the sandboxes that mount them.

mod calls;
mod files;
mod live;
mod mounts;
mod registry;
mod remove;

use std::time::SystemTime;

use runtime::DiskUsage;
use wire::launch::Access;
use wire::{SandboxId, VolumeId};

pub use crate::model::names::VolumeName;
pub use crate::model::template::VolumeMount;
pub use files::VolumeFiles;

pub(crate) use live::LiveVolume;
pub(crate) use mounts::{Mounted, check_mounts, merged};
pub(crate) use registry::Volumes;
pub(crate) use remove::resume_interrupted;

/// The smallest size: a smaller volume would be full while it is still empty.
pub const VOLUME_BYTES_MIN: u64 = 1 << 20;

/// What a caller asks for in a new volume.
#[derive(Debug, Clone)]
pub struct VolumeSpec {
    /// Unique among the owner's volumes.
    pub name: VolumeName,
    /// How much it may hold: from [`VOLUME_BYTES_MIN`] up to the size of the store.
    pub size_bytes: u64,
    /// Another of the owner's volumes, whose current files are copied into the new one.
    pub from: Option<String>,
}

/// A change to a volume, applied as a whole or not at all. Fields that are `None` stay as they are.
#[derive(Debug, Clone, Default)]
pub struct VolumeUpdate {
    /// The new name. Sandboxes keep the volume; templates refer to it by name, and so must change too.
    pub name: Option<VolumeName>,
    /// The new size, not smaller than the contents.
    pub size_bytes: Option<u64>,
}

/// A volume at one moment.
#[derive(Debug, Clone)]
pub struct Volume {
    /// Stays the same when the name changes.
    pub id: VolumeId,
    /// Unique among the owner's volumes.
    pub name: VolumeName,
    /// How much it may hold.
    pub size_bytes: u64,
    /// Whether the size is enforced. A store of plain directories cannot do that.
    pub enforced: bool,
    /// The space that its files take, if the call asked for it.
    pub used: Option<DiskUsage>,
    /// The sandboxes that mount it, sorted by name.
    pub holders: Vec<Holder>,
    /// When it was made.
    pub created_at: SystemTime,
    /// When its name or size last changed.
    pub updated_at: SystemTime,
}

/// A sandbox that mounts a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// The sandbox's id.
    pub sandbox: SandboxId,
    /// The sandbox's name.
    pub name: String,
    /// Where the sandbox mounts the volume.
    pub path: String,
    /// Whether the sandbox may write.
    pub access: Access,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_nowhere() {
        assert!(VolumeName::parse("training data, ünïcode").is_ok());
        for text in ["", "a/b", "/", "..", ".", "a:b", "a\nb", "a\0b", &"x".repeat(256)] {
            VolumeName::parse(text).expect_err(text);
        }
    }
}
