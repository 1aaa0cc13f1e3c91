//! What sandboxes use.

use axum::Json;
use axum::extract::State;
use engine::ListQuery;
use serde::Deserialize;
use utoipa::IntoParams;
use wire::api;

use super::check_limit;
use crate::app::{App, Caller};
use crate::body::{Query, SandboxPath};
use crate::convert;
use crate::error::ApiError;

/// What a sandbox uses, beside what it may.
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
    Ok(Json(convert::stats(app.engine.stats(&key.owner, id).await?)))
}

/// Which page.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StatsParams {
    /// At most so many, 1 to 500.
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
    let machine = convert::machine(app.engine.machine_stats().await?, &key);
    let sandboxes = page.items.into_iter().map(convert::stats).collect();
    Ok(Json(api::StatsPage { sandboxes, machine, next_cursor: page.next_cursor }))
}
