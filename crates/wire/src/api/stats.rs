//! Resource usage of sandboxes, with their limits.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{SandboxLimits, SandboxState};
use crate::SandboxId;

/// `GET /v1/sandboxes/{id}/stats`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SandboxStats {
    /// The sandbox's id.
    #[schema(value_type = String)]
    pub sandbox_id: SandboxId,
    /// The sandbox's name.
    pub name: String,
    /// The sandbox's state.
    pub state: SandboxState,
    /// The sandbox's limits.
    pub limits: SandboxLimits,
    /// Current usage; absent while no process of the sandbox runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<SandboxUsage>,
    /// Disk usage of the sandbox's own files. Counted in the background: absent until the first count is done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskUsage>,
    /// Number of commands that have no result yet.
    pub commands_running: u64,
    /// When these numbers were read.
    pub at: String,
}

/// What a sandbox uses at one instant.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SandboxUsage {
    /// Processor time of all processes since the sandbox was created, ended processes included.
    pub cpu_seconds: f64,
    /// How long runnable processes were throttled by the cpu limit, since the sandbox was created.
    pub cpu_throttled_seconds: f64,
    /// Everything that counts against the memory limit: memory, page cache and tmpfs.
    pub memory_bytes: u64,
    /// The part of it that the kernel reclaims before it kills anything: file pages that were not used lately.
    pub memory_reclaimable_bytes: u64,
    /// Number of processes and threads.
    pub pids: u32,
}

/// Disk usage of a sandbox's own files.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskUsage {
    /// Sparse files count the blocks they use; files with several names count once.
    pub bytes: u64,
    /// Whether the count covers everything. If not, `bytes` is a lower bound.
    pub complete: bool,
    /// When the files were counted.
    pub counted_at: String,
}

/// `GET /v1/stats`, one page, newest sandboxes first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StatsPage {
    /// The key owner's sandboxes.
    pub sandboxes: Vec<SandboxStats>,
    /// The machine that all sandboxes share.
    pub machine: MachineStats,
    /// Pass it as `cursor` to get the next page; absent on the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// A machine and its free resources.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MachineStats {
    /// Number of processors.
    pub cpus: u32,
    /// Total memory.
    pub memory_bytes: u64,
    /// Memory that is available without swapping.
    pub memory_available_bytes: u64,
    /// Size of the file system that stores the sandboxes' own files.
    pub disk_bytes: u64,
    /// Free space on that file system.
    pub disk_available_bytes: u64,
    /// All owners' sandboxes together. Only for keys that may manage keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub all_sandboxes: Option<AllSandboxes>,
}

/// All owners' sandboxes together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AllSandboxes {
    /// Number of sandboxes in each state.
    pub states: BTreeMap<String, u64>,
    /// Total usage. The processor time includes deleted sandboxes.
    pub usage: SandboxUsage,
    /// Sum of the limits of all sandboxes.
    pub promised: Room,
    /// The most that this sum may reach.
    pub capacity: Room,
}

/// Limits of sandboxes, summed up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Room {
    /// Number of sandboxes.
    pub sandboxes: u32,
    /// Thousandths of a processor.
    pub cpu_millis: u64,
    /// Memory in bytes.
    pub memory_bytes: u64,
}
