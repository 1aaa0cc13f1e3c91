//! Bodies about snapshots, forks, history and differences.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{ErrorBody, Sandbox, SandboxState};
use crate::SandboxId;

/// `POST /v1/sandboxes/{sandbox}/snapshots`
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TakeSnapshot {
    /// 1 to 200 bytes without spaces and colons; several snapshots may share a name. Default: the sandbox's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Labels, as those of sandboxes.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// A snapshot of a sandbox's files.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Snapshot {
    /// A UUID.
    pub id: String,
    /// Its name. Several snapshots may share it.
    pub name: String,
    /// Its state.
    pub state: SnapshotState,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The sandbox that it was taken of, which may be gone; absent if it was made from an image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub sandbox_id: Option<SandboxId>,
    /// The snapshot that its sandbox began with, or was rolled back to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// The template that sandboxes are made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// The image that its files lie over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Its labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// What its sandbox had written; absent if its files are part of an image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// How long its sandbox stood still, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped_ms: Option<f64>,
    /// When it was taken.
    pub created_at: String,
}

/// State of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotState {
    /// It is being made.
    Building,
    /// Sandboxes can be made from it.
    Ready,
    /// It could not be made.
    Failed,
}

/// Response to `GET /v1/snapshots`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotList {
    /// Newest first.
    pub snapshots: Vec<Snapshot>,
}

/// `POST /v1/sandboxes/{sandbox}/rollback`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rollback {
    /// The id or the name of a snapshot, of the sandbox or of a sandbox that it was forked from.
    pub snapshot: String,
}

/// `POST /v1/sandboxes/{sandbox}/fork`
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Fork {
    /// How many children, 1 to 100. Default: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
    /// Variables that the children have in addition to those of the sandbox.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Labels that the children have in addition to those of the sandbox.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// Response to `POST /v1/sandboxes/{sandbox}/fork`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Forked {
    /// As many as the request named.
    pub children: Vec<ForkedChild>,
}

/// A child of a fork, or why there is none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ForkedChild {
    /// The child.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Box<Sandbox>>,
    /// Why it could not be created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorBody>,
}

/// Response to `GET /v1/tree` and `GET /v1/sandboxes/{sandbox}/tree`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Tree {
    /// Oldest first; a parent comes before its children.
    pub members: Vec<TreeMember>,
}

/// A sandbox in a family of forks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TreeMember {
    /// Its id.
    #[schema(value_type = String)]
    pub sandbox_id: SandboxId,
    /// Its name, or the name that it had.
    pub name: String,
    /// The sandbox that it was made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub parent: Option<SandboxId>,
    /// The snapshot that it was made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Its state; absent if it is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<SandboxState>,
    /// When it was requested.
    pub created_at: String,
    /// When it was deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deleted_at: Option<String>,
}

/// Response to `DELETE /v1/sandboxes/{sandbox}/tree`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DeletedTree {
    /// The sandboxes that were deleted.
    #[schema(value_type = Vec<String>)]
    pub deleted: Vec<SandboxId>,
}

/// `POST /v1/sandboxes/{sandbox}/promote`
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Promote {
    /// What becomes of the parent. Default: `keep`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<PromoteParent>,
}

/// What becomes of the parent of a promoted child.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PromoteParent {
    /// It goes on, under another name.
    Keep,
    /// It is paused, under another name.
    Pause,
    /// It is deleted.
    Delete,
}

/// Response to `GET /v1/sandboxes/{sandbox}/history`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct History {
    /// Newest first.
    pub steps: Vec<HistoryStep>,
}

/// The files of a sandbox before a command.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HistoryStep {
    /// How many steps back; the newest is 1.
    pub step: u32,
    /// The snapshot.
    pub snapshot: String,
    /// When it was taken.
    pub taken_at: String,
    /// What the sandbox had written.
    pub size_bytes: u64,
}

/// Response to `GET /v1/diff`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Diff {
    /// By path.
    pub entries: Vec<DiffEntry>,
    /// Whether these are all. At most 100,000 are listed.
    pub complete: bool,
}

/// A file that differs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiffEntry {
    /// Its path. Bytes that are not UTF-8 are replaced.
    pub path: String,
    /// How it differs.
    pub change: DiffChange,
    /// `file`, `directory`, `symlink` or `other`.
    pub kind: String,
    /// Its size in `a`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_before: Option<u64>,
    /// Its size in `b`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_after: Option<u64>,
    /// Its contents in `a`, with `content=true` and if they are text of at most 256 KiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// Its contents in `b`, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
}

/// How a file differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DiffChange {
    /// Only `b` has it.
    Added,
    /// Both have it, with other contents, owners or permissions.
    Changed,
    /// Only `a` has it.
    Removed,
}

/// `POST /v1/sandboxes/{sandbox}/undo`
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Undo {
    /// How many steps of the history to go back. Default: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u32>,
}
