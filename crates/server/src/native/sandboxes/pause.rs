//! Pauses and resumes of sandboxes.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use engine::{Kept, PauseSpec, State as Life};
use wire::api;

use super::to_api;
use crate::http::app::{App, Caller};
use crate::http::body::{OptionalJson, SandboxPath};
use crate::http::error::ApiError;
use crate::native::common::carried_on;

/// Pauses a sandbox. Answers when it is paused. Requests to its commands and files resume it, unless they say `resume=never`.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/pause", tag = "sandboxes", request_body = api::PauseSandbox,
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 200, body = api::Sandbox),
    (status = 400, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "It is being created or deleted, or has failed.", body = api::ErrorBody),
))]
pub async fn pause(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(id): SandboxPath,
    OptionalJson(body): OptionalJson<api::PauseSandbox>,
) -> Result<Json<api::Sandbox>, ApiError> {
    let spec = pause_spec(&body)?;
    let paused = carried_on(async move { app.engine.pause(&key.owner, id, spec).await }).await?;
    Ok(Json(to_api(paused)))
}

/// Lets a paused sandbox run again, or one that has failed and has all its files. Answers when it runs.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/resume", tag = "sandboxes",
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 200, body = api::Sandbox),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "It is being created or deleted, or its files are lost.", body = api::ErrorBody),
    (status = 429, description = "A limit of the key is reached.", body = api::ErrorBody),
    (status = 503, description = "The machine is full.", body = api::ErrorBody),
))]
pub async fn resume(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(id): SandboxPath,
) -> Result<Json<api::Sandbox>, ApiError> {
    let resumed = carried_on(async move { app.engine.resume(&key, id).await }).await?;
    Ok(Json(to_api(resumed)))
}

fn pause_spec(body: &api::PauseSandbox) -> Result<PauseSpec, ApiError> {
    let kept = match body.memory {
        api::PauseMemory::Keep => Kept::Frozen,
        api::PauseMemory::Drop => Kept::Dropped,
    };
    let grace = match body.grace_seconds {
        None => PauseSpec::default().grace,
        Some(seconds) => Duration::try_from_secs_f64(seconds)
            .map_err(|_| ApiError::must("grace_seconds", format!("be a number of seconds, got {seconds}")))?,
    };
    Ok(PauseSpec { kept, grace })
}

/// What a sandbox in this state has kept, if it is paused.
pub fn memory(state: Life) -> Option<api::PauseMemory> {
    match state {
        Life::Paused(Kept::Frozen | Kept::Saved) => Some(api::PauseMemory::Keep),
        Life::Paused(Kept::Dropped) => Some(api::PauseMemory::Drop),
        Life::Creating | Life::Running | Life::Deleting | Life::Failed { .. } => None,
    }
}
