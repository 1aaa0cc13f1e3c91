//! Pools: create, get, list, scale, rename, delete.

use std::time::Duration;

use axum::Json;
use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use engine::pools::PoolName;
use serde::Deserialize;
use utoipa::IntoParams;
use wire::api;

use super::carried_on;
use crate::app::{App, Caller};
use crate::body::{self, Query, text_in_path};
use crate::convert;
use crate::error::ApiError;

/// How long a caller may wait for a pool to fill: longer than a proxy keeps a silent connection is no use.
const WAIT_SECONDS_MAX: u32 = 300;

/// A name in a path, percent-encoded.
pub struct PoolPath(pub String);

impl<S: Send + Sync> FromRequestParts<S> for PoolPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        text_in_path(parts, state, "pool").await.map(Self)
    }
}

/// Creates a pool. Answers at once; its sandboxes are made in the background.
#[utoipa::path(post, path = "/v1/pools", tag = "pools", request_body = api::CreatePool, responses(
    (status = 201, description = "It is there, and fills.", body = api::Pool),
    (status = 400, description = "Also for a template that mounts volumes.", body = api::ErrorBody),
    (status = 404, description = "No such template.", body = api::ErrorBody),
    (status = 409, description = "The name is taken.", body = api::ErrorBody),
    (status = 429, description = "A limit of the key is reached.", body = api::ErrorBody),
))]
pub async fn create(
    State(app): State<App>,
    Caller(key): Caller,
    body::Json(body): body::Json<api::CreatePool>,
) -> Result<(StatusCode, Json<api::Pool>), ApiError> {
    let api::CreatePool { name, template, replicas } = body;
    let name = PoolName::parse(&name)?;
    let creating = async move { app.engine.create_pool(&key, name, &template, replicas).await };
    Ok((StatusCode::CREATED, Json(convert::pool(carried_on(creating).await?))))
}

/// The pools of the key's owner, by name.
#[utoipa::path(get, path = "/v1/pools", tag = "pools", responses((status = 200, body = api::PoolList)))]
pub async fn list(State(app): State<App>, Caller(key): Caller) -> Json<api::PoolList> {
    let pools = app.engine.pools(&key.owner).into_iter().map(convert::pool_listed).collect();
    Json(api::PoolList { pools })
}

/// Whether to wait.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct GetParams {
    /// Waits until the pool is `ready` or `failing`, at most so long; 0 to 300.
    wait_seconds: Option<u32>,
}

/// A pool, with what waits in it.
#[utoipa::path(get, path = "/v1/pools/{pool}", tag = "pools",
    params(("pool" = String, Path, description = "Its name, percent-encoded."), GetParams), responses(
    (status = 200, body = api::Pool),
    (status = 400, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
))]
pub async fn get(
    State(app): State<App>,
    Caller(key): Caller,
    PoolPath(name): PoolPath,
    Query(GetParams { wait_seconds }): Query<GetParams>,
) -> Result<Json<api::Pool>, ApiError> {
    let pool = match wait_seconds {
        None => app.engine.pool(&key.owner, &name)?,
        Some(seconds) if seconds > WAIT_SECONDS_MAX => {
            let why = format!("it is 0 to {WAIT_SECONDS_MAX}, not {seconds}");
            return Err(ApiError::invalid("wait_seconds", why));
        }
        Some(seconds) => {
            let mut stopping = app.stopping(&key);
            tokio::select! {
                pool = app.engine.wait_pool(&key.owner, &name, Duration::from_secs(seconds.into())) => pool?,
                _ = stopping.wait() => app.engine.pool(&key.owner, &name)?,
            }
        }
    };
    Ok(Json(convert::pool(pool)))
}

/// Scales a pool, renames it, or both.
#[utoipa::path(patch, path = "/v1/pools/{pool}", tag = "pools", request_body = api::UpdatePool,
    params(("pool" = String, Path, description = "Its name, percent-encoded.")), responses(
    (status = 200, body = api::Pool),
    (status = 400, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "The name is taken, or the pool is being deleted.", body = api::ErrorBody),
    (status = 429, description = "A limit of the key is reached.", body = api::ErrorBody),
))]
pub async fn update(
    State(app): State<App>,
    Caller(key): Caller,
    PoolPath(name): PoolPath,
    body::Json(body): body::Json<api::UpdatePool>,
) -> Result<Json<api::Pool>, ApiError> {
    let update = convert::pool_update(body)?;
    let updating = async move { app.engine.update_pool(&key, &name, update).await };
    Ok(Json(convert::pool(carried_on(updating).await?)))
}

/// Deletes a pool and what waits in it. Sandboxes that were claimed from it stay.
#[utoipa::path(delete, path = "/v1/pools/{pool}", tag = "pools",
    params(("pool" = String, Path, description = "Its name, percent-encoded.")), responses(
    (status = 204, description = "It is gone."),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "It takes long, and goes on.", body = api::ErrorBody),
))]
pub async fn delete(
    State(app): State<App>,
    Caller(key): Caller,
    PoolPath(name): PoolPath,
) -> Result<StatusCode, ApiError> {
    carried_on(async move { app.engine.delete_pool(&key.owner, &name).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}
