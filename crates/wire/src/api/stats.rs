//! What sandboxes use, beside what they may.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{SandboxLimits, SandboxState};
use crate::SandboxId;

/// `GET /v1/sandboxes/{id}/stats`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SandboxStats {
    /// Which sandbox.
    #[schema(value_type = String)]
    pub sandbox_id: SandboxId,
    /// Its name.
    pub name: String,
    /// Where it is in its life.
    pub state: SandboxState,
    /// What it may use.
    pub limits: SandboxLimits,
    /// What it uses; absent while nothing of it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<SandboxUsage>,
    /// What its own files take. Counted behind the scenes: absent until the first count is done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskUsage>,
    /// Commands that have no result yet.
    pub commands_running: u64,
    /// When this was looked up.
    pub at: String,
}

/// What a sandbox uses at one instant.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SandboxUsage {
    /// Processor time of all its processes since it was made, those that ended included.
    pub cpu_seconds: f64,
    /// For how long processes that could run were held back by its cpu limit, since it was made.
    pub cpu_throttled_seconds: f64,
    /// All that counts against its limit: memory, page cache and tmpfs.
    pub memory_bytes: u64,
    /// The part of it that is given back before anything is killed: pages of files that nobody used lately.
    pub memory_reclaimable_bytes: u64,
    /// Processes and threads.
    pub pids: u32,
}

/// What a sandbox's own files take on disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskUsage {
    /// Files with holes count what they hold, files with two names count once.
    pub bytes: u64,
    /// Whether all was counted. If not, it is at least so much.
    pub complete: bool,
    /// When it was counted.
    pub counted_at: String,
}

/// `GET /v1/stats`, one page, newest sandboxes first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StatsPage {
    /// The key owner's sandboxes.
    pub sandboxes: Vec<SandboxStats>,
    /// The machine that all sandboxes share.
    pub machine: MachineStats,
    /// Give it as `cursor` for the next page; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// A machine, and what is left of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MachineStats {
    /// Processors.
    pub cpus: u32,
    /// Memory in all.
    pub memory_bytes: u64,
    /// What could be had without swapping.
    pub memory_available_bytes: u64,
    /// Of the file system that sandboxes' own files are on.
    pub disk_bytes: u64,
    /// What is free there.
    pub disk_available_bytes: u64,
    /// The sandboxes of all owners together. Only for keys that may manage keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub all_sandboxes: Option<AllSandboxes>,
}

/// The sandboxes of all owners together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AllSandboxes {
    /// How many are in which state.
    pub states: BTreeMap<String, u64>,
    /// What they use together; in its processor time, those that are gone have their part.
    pub usage: SandboxUsage,
    /// What they may use in all.
    pub promised: Room,
    /// What that may come to.
    pub capacity: Room,
}

/// Room for sandboxes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Room {
    /// How many.
    pub sandboxes: u32,
    /// Thousandths of a processor.
    pub cpu_millis: u64,
    /// Memory.
    pub memory_bytes: u64,
}
