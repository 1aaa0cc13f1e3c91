//! Health, version and API description of the daemon.

use std::sync::LazyLock;

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use wire::api::{ErrorBody, Health, Version};

use crate::http::app::App;
use crate::http::error::ApiError;
use crate::native::openapi;

/// The version of the native API.
const API_VERSION: &str = "v1";

/// Whether the daemon answers.
#[utoipa::path(get, path = "/v1/health", tag = "system", responses((status = 200, body = Health)))]
pub async fn health() -> Json<Health> {
    Json(Health { status: "ok".into() })
}

/// Whether the daemon takes work.
#[utoipa::path(get, path = "/v1/ready", tag = "system", responses(
    (status = 200, body = Health),
    (status = 503, description = "It is stopping.", body = ErrorBody),
))]
pub async fn ready(State(app): State<App>) -> Result<Json<Health>, ApiError> {
    if app.is_stopping() { Err(ApiError::stopping()) } else { Ok(Json(Health { status: "ok".into() })) }
}

/// What is running here.
#[utoipa::path(get, path = "/v1/version", tag = "system", responses((status = 200, body = Version)))]
pub async fn version() -> Json<Version> {
    Json(Version { version: crate::version().into(), api: API_VERSION.into() })
}

/// This description.
#[utoipa::path(get, path = "/v1/openapi.json", tag = "system", responses((status = 200, body = Object)))]
pub async fn openapi() -> Response {
    static TEXT: LazyLock<String> = LazyLock::new(openapi::json);
    ([(header::CONTENT_TYPE, "application/json")], TEXT.as_str()).into_response()
}
