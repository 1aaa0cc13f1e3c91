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
    /// What it may hold, as `"1Gi"`: from 1 MiB up to what the whole store holds.
    pub size: String,
    /// Another volume, whose files it begins with as they are now. A snapshot: it copies nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
}

/// `PATCH /v1/volumes/{volume}`. What is left out stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct UpdateVolume {
    /// Another name. Sandboxes that mount it go on; templates name volumes by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Another size, up or down, not below what is in it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<String>,
}

/// A volume.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Volume {
    /// A UUID that stays the same when the name changes.
    pub id: String,
    /// What it is called.
    pub name: String,
    /// What it may hold.
    pub size_bytes: u64,
    /// Whether it is held to that. A store of plain directories cannot.
    pub size_enforced: bool,
    /// What its files take. In a list it is left out where it would have to be counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// The sandboxes that mount it, by name. While there is one, it cannot be deleted.
    pub mounted_by: Vec<VolumeHolder>,
    /// When it was made.
    pub created_at: String,
    /// When its name or size last changed.
    pub updated_at: String,
}

/// A sandbox that mounts a volume.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VolumeHolder {
    /// Which one.
    #[schema(value_type = String)]
    pub sandbox_id: SandboxId,
    /// What it is called.
    pub name: String,
    /// Where the volume is in it.
    pub path: String,
    /// Whether it can only look.
    pub read_only: bool,
}

/// `GET /v1/volumes`, by name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VolumeList {
    /// All of this key's owner.
    pub volumes: Vec<Volume>,
}

/// A volume, mounted somewhere.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeMount {
    /// Its name.
    pub volume: String,
    /// An absolute path, not at or below `/proc`, `/sys`, `/dev` and `/run/shoal`. Missing directories are made.
    pub path: String,
    /// Whether the sandbox can only look.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
}
