//! Api keys. All of these need a key that may manage keys.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use wire::api;

use super::carried_on;
use crate::app::{App, Caller};
use crate::auth::require_admin;
use crate::body::{self, KeyPath};
use crate::convert;
use crate::error::ApiError;

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
    let spec = convert::key_spec(body)?;
    let (key, secret) = carried_on(async move { app.engine.create_key(spec).await }).await?;
    let created = api::CreatedKey { key: convert::key(key), secret: secret.reveal().to_owned() };
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
    Ok(Json(api::KeyList { keys: keys.into_iter().map(convert::key).collect() }))
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
