//! Bodies about pools.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::SandboxId;

/// `POST /v1/pools`
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreatePool {
    /// Free text up to 255 bytes, unique among the owner's pools.
    pub name: String,
    /// What its sandboxes are made from. One that mounts volumes is refused.
    pub template: String,
    /// How many should stand ready, 0 to 1000. They count against what the key allows.
    pub replicas: u32,
}

/// `PATCH /v1/pools/{pool}`. What is left out stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct UpdatePool {
    /// Another name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// How many should stand ready, 0 to 1000.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
}

/// A pool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Pool {
    /// A UUID that stays the same when the name changes.
    pub id: String,
    /// What it is called.
    pub name: String,
    /// What its sandboxes are made from.
    pub template: String,
    /// The newest version of that. What waits and is older is replaced.
    pub template_version: u32,
    /// How many should stand ready.
    pub replicas: u32,
    /// How many do.
    pub ready: u32,
    /// How many are being made.
    pub making: u32,
    /// How it is.
    pub state: PoolState,
    /// Why the last one could not be made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// When that is tried again; not there where something else must change first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_at: Option<String>,
    /// What waits in it, the next to be claimed first. Lists leave it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub members: Option<Vec<PoolMember>>,
    /// Creates since the daemon started that claimed a sandbox here.
    pub claims: u64,
    /// Creates since the daemon started that found none ready here.
    pub misses: u64,
    /// When it was made.
    pub created_at: String,
    /// When it was last changed.
    pub updated_at: String,
}

/// How a pool is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PoolState {
    /// As many stand ready as should.
    Ready,
    /// Some are still being made.
    Filling,
    /// The last one could not be made; `reason` says why, and it is tried again.
    Failing,
    /// It is being deleted.
    Deleting,
}

/// A sandbox that waits in a pool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PoolMember {
    /// A UUID. It stays the same when it is claimed; until then no route for sandboxes knows it.
    #[schema(value_type = String)]
    pub id: SandboxId,
    /// What it is called unless whoever claims it names it.
    pub name: String,
    /// How it stands.
    pub state: PoolMemberState,
    /// Which version of the template it was made from.
    pub template_version: u32,
    /// When it was made.
    pub created_at: String,
}

/// How a sandbox in a pool stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PoolMemberState {
    /// It is being made, or was found after a restart of the daemon and has not answered yet.
    Making,
    /// It can be claimed.
    Ready,
    /// It is broken, and will be replaced.
    Broken,
    /// It is going.
    Deleting,
}

/// `GET /v1/pools`, by name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PoolList {
    /// All that this key's owner has.
    pub pools: Vec<Pool>,
}
