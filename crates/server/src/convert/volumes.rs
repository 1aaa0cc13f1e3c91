//! Volumes, as they come in and go out.

use engine::VolumeMount;
use engine::volumes::{Holder, Volume, VolumeName, VolumeSpec, VolumeUpdate};
use wire::api;
use wire::launch::Access;

use super::bytes;
use crate::clock::rfc3339;
use crate::error::ApiError;

/// `POST /v1/volumes`
pub fn volume_spec(body: api::CreateVolume) -> Result<VolumeSpec, ApiError> {
    let api::CreateVolume { name, size, from } = body;
    let size_bytes = bytes("size", Some(size))?.unwrap_or(0);
    Ok(VolumeSpec { name: VolumeName::parse(&name)?, size_bytes, from })
}

/// `PATCH /v1/volumes/{volume}`
pub fn volume_update(body: api::UpdateVolume) -> Result<VolumeUpdate, ApiError> {
    let api::UpdateVolume { name, size } = body;
    let name = name.as_deref().map(VolumeName::parse).transpose()?;
    Ok(VolumeUpdate { name, size_bytes: bytes("size", size)? })
}

/// A volume as clients see it.
pub fn volume(volume: Volume) -> api::Volume {
    let holder = |Holder { sandbox, name, path, access }| api::VolumeHolder {
        sandbox_id: sandbox,
        name,
        path,
        read_only: access == Access::ReadOnly,
    };
    api::Volume {
        id: volume.id.to_string(),
        name: volume.name.to_string(),
        size_bytes: volume.size_bytes,
        size_enforced: volume.enforced,
        used_bytes: volume.used.map(|used| used.bytes),
        mounted_by: volume.holders.into_iter().map(holder).collect(),
        created_at: rfc3339(volume.created_at),
        updated_at: rfc3339(volume.updated_at),
    }
}

/// A mount as it was asked for.
pub fn mount_spec(mount: api::VolumeMount) -> VolumeMount {
    let access = if mount.read_only { Access::ReadOnly } else { Access::ReadWrite };
    VolumeMount { volume: mount.volume, path: mount.path, access }
}

/// A mount as clients see it.
pub fn mount(mount: VolumeMount) -> api::VolumeMount {
    let VolumeMount { volume, path, access } = mount;
    api::VolumeMount { volume, path, read_only: access == Access::ReadOnly }
}
