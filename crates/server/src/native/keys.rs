//! API keys. All of these calls need a key that may manage keys.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use engine::{Key, KeyLimits, KeySpec, Owner};
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

/// All keys, without their secrets.
#[utoipa::path(get, path = "/v1/keys", tag = "keys", responses(
    (status = 200, body = api::KeyList),
    (status = 403, body = api::ErrorBody),
))]
pub async fn list(State(app): State<App>, Caller(key): Caller) -> Result<Json<api::KeyList>, ApiError> {
    require_admin(&key)?;
    let keys = app.engine.keys().await?;
    Ok(Json(api::KeyList { keys: keys.into_iter().map(to_api).collect() }))
}

/// Deletes a key. It opens nothing from then on; its owner's sandboxes stay.
#[utoipa::path(delete, path = "/v1/keys/{key}", tag = "keys",
    params(("key" = String, Path, description = "The key's id, not its secret.")), responses(
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
    carried_on(async move { app.engine.delete_key(&id).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /v1/keys`
pub fn key_spec(body: api::CreateKey) -> Result<KeySpec, ApiError> {
    let api::CreateKey { owner, metrics_only, sandboxes_max, cpu_max, memory_max } = body;
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
    let limits = KeyLimits { sandboxes: sandboxes_max, cpu_millis, memory_bytes };
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
        created_at: rfc3339(key.created_at),
    }
}
