//! What sandboxes use.

use axum::Json;
use axum::extract::State;
use engine::ListQuery;
use engine::{Capacity, Key, MachineStats, Stats};
use runtime::Usage;
use serde::Deserialize;
use utoipa::IntoParams;
use wire::api;

use super::common::check_limit;
use super::sandboxes::{sandbox_limits, sandbox_state};
use crate::http::app::{App, Caller};
use crate::http::body::{Query, SandboxPath};
use crate::http::clock::rfc3339;
use crate::http::error::ApiError;

/// What a sandbox uses, and its limits.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/stats", tag = "stats",
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 200, body = api::SandboxStats),
    (status = 404, body = api::ErrorBody),
))]
pub async fn one(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(id): SandboxPath,
) -> Result<Json<api::SandboxStats>, ApiError> {
    Ok(Json(to_api(app.engine.stats(&key.owner, id).await?)))
}

/// Which page.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StatsParams {
    /// The maximum number of items, 1 to 500.
    limit: Option<u32>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

/// What the sandboxes of the key's owner use, newest first, and the machine they share.
#[utoipa::path(get, path = "/v1/stats", tag = "stats", params(StatsParams), responses(
    (status = 200, body = api::StatsPage),
    (status = 400, body = api::ErrorBody),
))]
pub async fn all(
    State(app): State<App>,
    Caller(key): Caller,
    Query(params): Query<StatsParams>,
) -> Result<Json<api::StatsPage>, ApiError> {
    let query =
        ListQuery { limit: check_limit(params.limit)?, cursor: params.cursor, ..ListQuery::default() };
    let page = app.engine.stats_page(&key.owner, query).await?;
    let machine = machine_to_api(app.engine.machine_stats().await?, &key);
    let sandboxes = page.items.into_iter().map(to_api).collect();
    Ok(Json(api::StatsPage { sandboxes, machine, next_cursor: page.next_cursor }))
}

/// What a sandbox uses, as clients see it.
pub fn to_api(stats: Stats) -> api::SandboxStats {
    api::SandboxStats {
        sandbox_id: stats.sandbox,
        name: stats.name,
        state: sandbox_state(stats.state),
        limits: sandbox_limits(&stats.limits),
        usage: stats.usage.map(usage),
        disk: stats.disk.map(|disk| api::DiskUsage {
            bytes: disk.usage.bytes,
            complete: disk.usage.complete,
            counted_at: rfc3339(disk.at),
        }),
        commands_running: stats.commands_live as u64,
        at: rfc3339(stats.at),
    }
}

fn usage(usage: Usage) -> api::SandboxUsage {
    api::SandboxUsage {
        cpu_seconds: usage.cpu_time.as_secs_f64(),
        cpu_throttled_seconds: usage.throttled_time.as_secs_f64(),
        memory_bytes: usage.memory_bytes,
        memory_reclaimable_bytes: usage.memory_reclaimable_bytes,
        pids: usage.pids,
    }
}

/// The machine. Only admin keys see the totals of all owners.
pub fn machine_to_api(stats: MachineStats, key: &Key) -> api::MachineStats {
    let room = |room: Capacity| api::Room {
        sandboxes: room.sandboxes,
        cpu_millis: room.cpu_millis,
        memory_bytes: room.memory_bytes,
    };
    api::MachineStats {
        cpus: stats.machine.cpus,
        memory_bytes: stats.machine.memory_bytes,
        memory_available_bytes: stats.machine.memory_available_bytes,
        disk_bytes: stats.machine.disk_bytes,
        disk_available_bytes: stats.machine.disk_available_bytes,
        all_sandboxes: key.admin.then(|| api::AllSandboxes {
            states: stats.sandboxes.iter().map(|(state, count)| ((*state).to_owned(), *count)).collect(),
            usage: usage(stats.machine.sandboxes),
            promised: room(stats.promised),
            capacity: room(stats.capacity),
        }),
    }
}
