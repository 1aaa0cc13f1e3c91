//! Pools: create, get, list, scale, rename, delete.

use std::time::Duration;

use axum::Json;
use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use engine::pool::{PoolInfo, PoolMember, PoolName, PoolState, PoolUpdate, Standing};
use serde::Deserialize;
use utoipa::IntoParams;
use wire::api;

use super::common::carried_on;
use crate::http::app::{App, Caller};
use crate::http::body::{self, Query, text_in_path};
use crate::http::clock::rfc3339;
use crate::http::error::ApiError;

/// How long a caller may wait for a pool to fill: proxies close connections that are silent for longer.
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
    Ok((StatusCode::CREATED, Json(to_api(carried_on(creating).await?))))
}

/// The pools of the key's owner, by name.
#[utoipa::path(get, path = "/v1/pools", tag = "pools", responses((status = 200, body = api::PoolList)))]
pub async fn list(State(app): State<App>, Caller(key): Caller) -> Json<api::PoolList> {
    let pools = app.engine.pools(&key.owner).into_iter().map(pool_listed).collect();
    Json(api::PoolList { pools })
}

/// Whether to wait.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct GetParams {
    /// Waits until the pool is `ready` or `failing`, at most this many seconds; 0 to 300.
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
            let why = format!("be between 0 and {WAIT_SECONDS_MAX}, got {seconds}");
            return Err(ApiError::must("wait_seconds", why));
        }
        Some(seconds) => {
            let mut stopping = app.stopping(&key);
            tokio::select! {
                pool = app.engine.wait_pool(&key.owner, &name, Duration::from_secs(seconds.into())) => pool?,
                _ = stopping.wait() => app.engine.pool(&key.owner, &name)?,
            }
        }
    };
    Ok(Json(to_api(pool)))
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
    let update = pool_update(body)?;
    let updating = async move { app.engine.update_pool(&key, &name, update).await };
    Ok(Json(to_api(carried_on(updating).await?)))
}

/// Deletes a pool and what waits in it. Sandboxes that were claimed from it stay.
#[utoipa::path(delete, path = "/v1/pools/{pool}", tag = "pools",
    params(("pool" = String, Path, description = "Its name, percent-encoded.")), responses(
    (status = 204, description = "It is gone."),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "It takes long, and continues in the background.", body = api::ErrorBody),
))]
pub async fn delete(
    State(app): State<App>,
    Caller(key): Caller,
    PoolPath(name): PoolPath,
) -> Result<StatusCode, ApiError> {
    carried_on(async move { app.engine.delete_pool(&key.owner, &name).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `PATCH /v1/pools/{pool}`
pub fn pool_update(body: api::UpdatePool) -> Result<PoolUpdate, ApiError> {
    let api::UpdatePool { name, replicas } = body;
    Ok(PoolUpdate { name: name.as_deref().map(PoolName::parse).transpose()?, replicas })
}

/// A pool as clients see it, without the sandboxes that wait in it.
pub fn pool_listed(pool: PoolInfo) -> api::Pool {
    api::Pool { members: None, ..to_api(pool) }
}

/// A pool as clients see it.
pub fn to_api(pool: PoolInfo) -> api::Pool {
    let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    api::Pool {
        ready: count(pool.ready()),
        making: count(pool.making()),
        id: pool.id.to_string(),
        name: pool.name.to_string(),
        template: pool.template,
        template_version: pool.template_version,
        replicas: pool.replicas,
        state: match pool.state {
            PoolState::Ready => api::PoolState::Ready,
            PoolState::Filling => api::PoolState::Filling,
            PoolState::Failing => api::PoolState::Failing,
            PoolState::Deleting => api::PoolState::Deleting,
        },
        reason: pool.reason,
        retry_at: pool.retry_at.map(rfc3339),
        members: Some(pool.members.into_iter().map(member).collect()),
        claims: pool.claims,
        misses: pool.misses,
        created_at: rfc3339(pool.created_at),
        updated_at: rfc3339(pool.updated_at),
    }
}

fn member(member: PoolMember) -> api::PoolMember {
    api::PoolMember {
        id: member.id,
        name: member.name,
        state: match member.standing {
            Standing::Making => api::PoolMemberState::Making,
            Standing::Ready => api::PoolMemberState::Ready,
            Standing::Broken => api::PoolMemberState::Broken,
            Standing::Going => api::PoolMemberState::Deleting,
        },
        template_version: member.template_version,
        created_at: rfc3339(member.created_at),
    }
}
