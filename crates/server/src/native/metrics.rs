//! `/metrics`, for Prometheus and other tools that read its format.

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use wire::api::ErrorBody;

use crate::http::app::{App, Caller};
use crate::http::auth::require_metrics;
use crate::http::error::ApiError;
use crate::observe::log::chain_of;
use crate::observe::metrics::CONTENT_TYPE;

/// What the daemon counts, of all owners, as OpenMetrics text. For admin keys and for keys that open nothing else.
#[utoipa::path(get, path = "/metrics", tag = "stats", responses(
    (status = 200, description = "OpenMetrics.", body = String,
        content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8"),
    (status = 403, description = "The key opens sandboxes and no metrics.", body = ErrorBody),
))]
pub async fn metrics(State(app): State<App>, Caller(key): Caller) -> Result<Response, ApiError> {
    require_metrics(&key)?;
    let machine = app.engine.machine_stats().await;
    if let Err(error) = &machine {
        tracing::warn!(error = chain_of(error), "metrics are shown without those of the machine");
    }
    let text = app.metrics().text(&app.engine, machine.ok(), app.streams_open());
    match text {
        Ok(text) => Ok(([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response()),
        Err(_) => Err(ApiError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal",
            "the metrics cannot be written as text",
        )),
    }
}
