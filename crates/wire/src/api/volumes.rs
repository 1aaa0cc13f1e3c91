//! Bodies about volumes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::SandboxId;

/// `POST /v1/volumes`
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateVolume {
    /// Up to 255 bytes without `/` and `:`, unique among the owner's volumes.
    pub name: String,
    /// Size limit, as `"1Gi"`: from 1 MiB up to the size of the store.
    pub size: String,
    /// A volume whose current files the new one starts with. A snapshot, which copies nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
}

/// `PATCH /v1/volumes/{volume}`. Fields that are left out keep their values.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct UpdateVolume {
    /// A new name. Sandboxes that mount the volume are not affected; templates refer to volumes by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// A new size, larger or smaller, but not below what the volume holds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<String>,
}

/// A volume.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Volume {
    /// A UUID that stays the same when the name changes.
    pub id: String,
    /// The volume's name.
    pub name: String,
    /// Size limit.
    pub size_bytes: u64,
    /// Whether the limit is enforced. A store of plain directories cannot enforce it.
    pub size_enforced: bool,
    /// Disk usage of its files. Lists leave it out where the files would have to be counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// The sandboxes that mount it, by name. A mounted volume cannot be deleted.
    pub mounted_by: Vec<VolumeHolder>,
    /// When the volume was created.
    pub created_at: String,
    /// When its name or size last changed.
    pub updated_at: String,
}

/// A sandbox that mounts a volume.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VolumeHolder {
    /// The sandbox's id.
    #[schema(value_type = String)]
    pub sandbox_id: SandboxId,
    /// The sandbox's name.
    pub name: String,
    /// Path in the sandbox where the volume is mounted.
    pub path: String,
    /// Whether it is mounted read-only.
    pub read_only: bool,
}

/// `GET /v1/volumes`, by name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VolumeList {
    /// All volumes of this key's owner.
    pub volumes: Vec<Volume>,
}

/// A mount of a volume.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeMount {
    /// The volume's name.
    pub volume: String,
    /// An absolute path, not at or below `/proc`, `/sys`, `/dev` and `/run/shoal`. Missing directories are created.
    pub path: String,
    /// Whether to mount it read-only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
}
