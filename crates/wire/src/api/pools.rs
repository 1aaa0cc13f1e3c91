//! Bodies about pools.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::SandboxId;

/// `POST /v1/pools`
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreatePool {
    /// Any text of up to 255 bytes, unique among the owner's pools.
    pub name: String,
    /// The template of its sandboxes. A template that mounts volumes is rejected.
    pub template: String,
    /// Number of sandboxes to keep ready, 0 to 1000. They count against the key's limits.
    pub replicas: u32,
}

/// `PATCH /v1/pools/{pool}`. Fields that are left out keep their values.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct UpdatePool {
    /// A new name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Number of sandboxes to keep ready, 0 to 1000.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
}

/// A pool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Pool {
    /// A UUID that stays the same when the name changes.
    pub id: String,
    /// The pool's name.
    pub name: String,
    /// The template of its sandboxes.
    pub template: String,
    /// The newest version of that template. Waiting sandboxes of older versions are replaced.
    pub template_version: u32,
    /// Number of sandboxes to keep ready.
    pub replicas: u32,
    /// Number of sandboxes that are ready.
    pub ready: u32,
    /// Number of sandboxes that are being created.
    pub making: u32,
    /// The pool's state.
    pub state: PoolState,
    /// Why the last sandbox could not be created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// When the next attempt is made; absent if something else must change first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_at: Option<String>,
    /// The waiting sandboxes, in the order they will be claimed. Lists leave it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub members: Option<Vec<PoolMember>>,
    /// Creates since the daemon started that claimed a sandbox here.
    pub claims: u64,
    /// Creates since the daemon started that found none ready here.
    pub misses: u64,
    /// When the pool was created.
    pub created_at: String,
    /// When the pool was last changed.
    pub updated_at: String,
}

/// State of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PoolState {
    /// The full number of sandboxes is ready.
    Ready,
    /// Some sandboxes are still being created.
    Filling,
    /// The last sandbox could not be created; `reason` says why. The daemon retries.
    Failing,
    /// The pool is being deleted.
    Deleting,
}

/// A sandbox that waits in a pool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PoolMember {
    /// A UUID. A claim keeps it; until then no route for sandboxes finds it.
    #[schema(value_type = String)]
    pub id: SandboxId,
    /// The sandbox's name, unless the claiming request gives another.
    pub name: String,
    /// The sandbox's state in the pool.
    pub state: PoolMemberState,
    /// Version of the template that it was made from.
    pub template_version: u32,
    /// When it was created.
    pub created_at: String,
}

/// State of a sandbox in a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PoolMemberState {
    /// It is being created, or was found after a restart of the daemon and has not responded yet.
    Making,
    /// It can be claimed.
    Ready,
    /// It is broken and will be replaced.
    Broken,
    /// It is being deleted.
    Deleting,
}

/// `GET /v1/pools`, by name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PoolList {
    /// All pools of this key's owner.
    pub pools: Vec<Pool>,
}
