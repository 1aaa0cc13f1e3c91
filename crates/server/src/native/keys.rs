//! API keys. All of these calls need a key that may manage keys.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use engine::{Key, KeyLimits, KeySpec, Owner, OwnerUse, Revocation};
use wire::api;

use super::common::carried_on;
use crate::config::quantity::{Bytes, Cpu};
use crate::http::app::{App, Caller};
use crate::http::auth::require_admin;
use crate::http::body::{self, KeyPath};
use crate::http::clock::rfc3339;
use crate::http::error::ApiError;

/// A key with a lower limit could not create any sandbox.
const KEY_MEMORY_MIN: u64 = 16 << 20;

/// Creates a key. Its secret is shown in this answer and never again.
#[utoipa::path(post, path = "/v1/keys", tag = "keys", request_body = api::CreateKey, responses(
    (status = 201, body = api::CreatedKey),
    (status = 400, body = api::ErrorBody),
    (status = 403, description = "The key in use may not manage keys.", body = api::ErrorBody),
))]
pub async fn create(
    State(app): State<App>,
    Caller(key): Caller,
    body::Json(body): body::Json<api::CreateKey>,
) -> Result<Response, ApiError> {
    require_admin(&key)?;
    let spec = key_spec(body)?;
    let (key, secret) = carried_on(async move { app.engine.create_key(spec).await }).await?;
    let created = api::CreatedKey { key: to_api(key), secret: secret.reveal().to_owned() };
    Ok((StatusCode::CREATED, Json(created)).into_response())
}

/// All keys, without their secrets, and what their owners use.
#[utoipa::path(get, path = "/v1/keys", tag = "keys", responses(
    (status = 200, body = api::KeyList),
    (status = 403, body = api::ErrorBody),
))]
pub async fn list(State(app): State<App>, Caller(key): Caller) -> Result<Json<api::KeyList>, ApiError> {
    require_admin(&key)?;
    let mut keys = Vec::new();
    let mut used = BTreeMap::new();
    for key in app.engine.keys().await? {
        if !used.contains_key(key.owner.as_str()) {
            used.insert(key.owner.as_str().to_owned(), use_to_api(app.engine.use_of(&key.owner).await?));
        }
        let owner_use = used.get(key.owner.as_str()).copied();
        keys.push(api::Key { used: owner_use, ..to_api(key) });
    }
    Ok(Json(api::KeyList { keys }))
}

/// Deletes a key. It opens nothing from then on, also after a restart; its owner's sandboxes stay.
#[utoipa::path(delete, path = "/v1/keys/{key}", tag = "keys",
    params(("key" = String, Path, description = "The key's id, not its secret.")), responses(
    (status = 202, description = "It opens nothing any more. Its row could not be deleted, as on a full disk, and \
        will be."),
    (status = 204, description = "It is gone."),
    (status = 403, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "It is the key in use.", body = api::ErrorBody),
))]
pub async fn delete(
    State(app): State<App>,
    Caller(caller): Caller,
    KeyPath(id): KeyPath,
) -> Result<StatusCode, ApiError> {
    require_admin(&caller)?;
    if id == caller.id {
        return Err(ApiError::new(StatusCode::CONFLICT, "key_in_use", "a key cannot delete itself")
            .hint("use another key that may manage keys"));
    }
    Ok(match carried_on(async move { app.engine.delete_key(&id).await }).await? {
        Revocation::Done => StatusCode::NO_CONTENT,
        Revocation::Marked => StatusCode::ACCEPTED,
    })
}

fn use_to_api(used: OwnerUse) -> api::OwnerUse {
    api::OwnerUse {
        sandboxes: used.sandboxes,
        cpu_millis: used.cpu_millis,
        memory_bytes: used.memory_bytes,
        disk_bytes: used.disk_bytes,
        volume_bytes: used.volume_bytes,
        output_bytes: used.output_bytes,
        snapshots: used.snapshots,
        builds: used.builds,
    }
}

/// `POST /v1/keys`
pub fn key_spec(body: api::CreateKey) -> Result<KeySpec, ApiError> {
    let api::CreateKey {
        owner,
        metrics_only,
        sandboxes_max,
        cpu_max,
        memory_max,
        disk_max,
        volumes_max,
        output_max,
        snapshots_max,
        builds_max,
        connections_max,
    } = body;
    let size = |field: &'static str, text: Option<String>| {
        let parsed = text.map(|text| Bytes::parse(&text).map(|size| size.bytes)).transpose();
        parsed.map_err(|error| ApiError::invalid(field, error))
    };
    let cpu_millis = cpu_max
        .map(|text| Cpu::parse(&text).map(|cpu| cpu.millis))
        .transpose()
        .map_err(|error| ApiError::invalid("cpu_max", error))?;
    let memory_bytes = memory_max
        .map(|text| Bytes::parse(&text).map(|memory| memory.bytes))
        .transpose()
        .map_err(|error| ApiError::invalid("memory_max", error))?;
    if memory_bytes.is_some_and(|bytes| bytes < KEY_MEMORY_MIN) {
        let why =
            format!("{KEY_MEMORY_MIN} bytes is what one sandbox needs; was a unit such as `Gi` left out?");
        return Err(ApiError::invalid("memory_max", why));
    }
    let limits = KeyLimits {
        sandboxes: sandboxes_max,
        cpu_millis,
        memory_bytes,
        disk_bytes: size("disk_max", disk_max)?,
        volume_bytes: size("volumes_max", volumes_max)?,
        output_bytes: size("output_max", output_max)?,
        snapshots: snapshots_max,
        builds: builds_max,
        connections: connections_max,
    };
    Ok(KeySpec { owner: Owner::parse(&owner)?, admin: false, metrics_only, limits })
}

/// A key as clients see it.
pub fn to_api(key: Key) -> api::Key {
    api::Key {
        id: key.id,
        owner: key.owner.as_str().to_owned(),
        admin: key.admin,
        metrics_only: key.metrics_only,
        sandboxes_max: key.limits.sandboxes,
        cpu_millis_max: key.limits.cpu_millis,
        memory_bytes_max: key.limits.memory_bytes,
        disk_bytes_max: key.limits.disk_bytes,
        volume_bytes_max: key.limits.volume_bytes,
        output_bytes_max: key.limits.output_bytes,
        snapshots_max: key.limits.snapshots,
        builds_max: key.limits.builds,
        connections_max: key.limits.connections,
        used: None,
        created_at: rfc3339(key.created_at),
    }
}
