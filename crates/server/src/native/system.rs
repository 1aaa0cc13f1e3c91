//! Health, version and API description of the daemon.

use std::sync::LazyLock;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use wire::api::{ErrorBody, Health, Version};

use crate::http::app::App;
use crate::http::error::ApiError;
use crate::native::openapi;

/// The version of the native API.
const API_VERSION: &str = "v1";

/// What a person with a browser sees at `/`.
const WELCOME_PAGE: &str = "\
<!doctype html>
<html lang=\"en\">
<meta charset=\"utf-8\">
<title>Shoal</title>
<style>body { font: 16px/1.5 sans-serif; max-width: 40em; margin: 4em auto; padding: 0 1em }</style>
<h1>This is a Shoal daemon</h1>
<p>Shoal gives AI agents sandboxes. This address is for programs: it has an HTTP API under <code>/v1</code> and no web pages.</p>
<p>Use it with the <code>shoal</code> command line, the Python SDK or any HTTP client. On another machine, set
<code>SHOAL_URL</code> to this address and <code>SHOAL_API_KEY</code> to a key. The operator of this daemon creates keys with
<code>shoal key create</code>.</p>
<p>With a key, <code>/v1/openapi.json</code> describes the API. <a href=\"/v1/health\">/v1/health</a> and
<a href=\"/v1/ready\">/v1/ready</a> need no key.</p>
</html>
";
/// What a program sees there.
const WELCOME_TEXT: &str = "\
This is a Shoal daemon. Its HTTP API is under /v1; /v1/openapi.json describes it.
Requests need an API key, except /v1/health and /v1/ready.
";

/// `GET /`: what this is, for people who find the address. The same for everybody, so it names no version.
pub async fn welcome(headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    if accept.contains("text/html") {
        ([(header::CONTENT_TYPE, "text/html; charset=utf-8")], WELCOME_PAGE).into_response()
    } else {
        ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], WELCOME_TEXT).into_response()
    }
}

/// Whether the daemon answers. Needs no key.
#[utoipa::path(get, path = "/v1/health", tag = "system", security(()), responses((status = 200, body = Health)))]
pub async fn health() -> Json<Health> {
    Json(Health { status: "ok".into() })
}

/// Whether the daemon takes work. Needs no key.
#[utoipa::path(get, path = "/v1/ready", tag = "system", security(()), responses(
    (status = 200, body = Health),
    (status = 503, description = "It is stopping.", body = ErrorBody),
    (status = 507, description = "Its disk is full: it cannot write rows.", body = ErrorBody),
))]
pub async fn ready(State(app): State<App>) -> Result<Json<Health>, ApiError> {
    if app.is_stopping() {
        return Err(ApiError::stopping());
    }
    app.engine.check_writable().await?;
    Ok(Json(Health { status: "ok".into() }))
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
