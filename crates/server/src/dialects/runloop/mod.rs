//! Runloop's devboxes: the protocol of the package `runloop_api_client` for Python.
//!
//! ```text
//! /runloop/v1/devboxes, /runloop/v1/blueprints      below the client's `RUNLOOP_BASE_URL`
//! ```
//!
//! A *devbox* is a sandbox, an *execution* a command, a *blueprint* a template or a build that makes one. Ids say what they name
//! (`ids`). What the engine has no word for is in the sandbox's notes, under [`NOTES`].

mod blueprints;
mod devboxes;
mod error;
mod executions;
mod files;
mod ids;
mod json;
pub mod locate;
mod read;
mod unsupported;
mod updates;

pub use error::Refusal;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use tracing::Instrument;

use crate::http::app::App;

/// Where this dialect lives.
pub const PREFIX: &str = "/runloop";
/// The key of this dialect's notes.
const NOTES: &str = "runloop";

/// Everything below [`PREFIX`].
pub fn under_prefix() -> Router<App> {
    let routes = changes().merge(streams());
    routes.fallback(nothing_there).method_not_allowed_fallback(wrong_method)
}

/// What must not be left half done.
fn changes() -> Router<App> {
    Router::new()
        .route("/v1/devboxes", get(devboxes::list).post(devboxes::create))
        .route("/v1/devboxes/create_and_await_running", post(devboxes::create))
        .route("/v1/devboxes/{sandbox}", get(devboxes::get).post(devboxes::update))
        .route("/v1/devboxes/{sandbox}/shutdown", post(devboxes::shutdown))
        .route("/v1/devboxes/{sandbox}/suspend", post(devboxes::suspend))
        .route("/v1/devboxes/{sandbox}/resume", post(devboxes::resume))
        .route("/v1/devboxes/{sandbox}/keep_alive", post(devboxes::keep_alive))
        .route("/v1/devboxes/{sandbox}/executions/{execution}/kill", post(executions::kill))
        .route("/v1/devboxes/{sandbox}/executions/{execution}/send_std_in", post(executions::send))
        .route("/v1/devboxes/{sandbox}/snapshot_disk", any(unsupported::devbox))
        .route("/v1/devboxes/{sandbox}/snapshot_disk_async", any(unsupported::devbox))
        .route("/v1/devboxes/{sandbox}/create_ssh_key", any(unsupported::devbox))
        .route("/v1/devboxes/{sandbox}/enable_tunnel", any(unsupported::devbox))
        .route("/v1/devboxes/{sandbox}/remove_tunnel", any(unsupported::devbox))
        .route("/v1/devboxes/{sandbox}/create_pty_tunnel", any(unsupported::devbox))
        .route("/v1/devboxes/{sandbox}/logs", any(unsupported::devbox))
        .route("/v1/devboxes/{sandbox}/usage", any(unsupported::devbox))
        .route("/v1/devboxes/disk_snapshots", any(unsupported::daemon))
        .route("/v1/devboxes/disk_snapshots/{name}", any(unsupported::daemon))
        .route("/v1/blueprints", get(blueprints::list).post(blueprints::create))
        .route("/v1/blueprints/{name}", get(blueprints::get))
        .route("/v1/blueprints/{name}/delete", post(blueprints::delete))
        .route("/v1/blueprints/{name}/logs", get(blueprints::logs))
        .route("/v1/blueprints/list_public", get(blueprints::list_public))
        .route("/v1/secrets", any(unsupported::daemon))
        .route("/v1/secrets/{name}", any(unsupported::daemon))
        .route("/v1/objects", any(unsupported::daemon))
        .route("/v1/objects/{name}", any(unsupported::daemon))
        .route("/v1/network-policies", any(unsupported::daemon))
        .route("/v1/network-policies/{name}", any(unsupported::daemon))
        .layer(middleware::from_fn(carried_on))
}

/// What ends when its caller leaves.
fn streams() -> Router<App> {
    Router::new()
        .route("/v1/devboxes/{sandbox}/wait_for_status", post(devboxes::wait))
        .route("/v1/devboxes/{sandbox}/execute_async", post(executions::execute_async))
        .route("/v1/devboxes/{sandbox}/execute", post(executions::execute))
        .route("/v1/devboxes/{sandbox}/execute_sync", post(executions::execute_sync))
        .route("/v1/devboxes/{sandbox}/executions/{execution}", get(executions::get))
        .route("/v1/devboxes/{sandbox}/executions/{execution}/wait_for_status", post(executions::wait))
        .route("/v1/devboxes/{sandbox}/executions/{execution}/stream_stdout_updates", get(updates::stdout))
        .route("/v1/devboxes/{sandbox}/executions/{execution}/stream_stderr_updates", get(updates::stderr))
        // A file is a stream of any size, and is written as it comes.
        .route("/v1/devboxes/{sandbox}/upload_file", post(files::upload).layer(DefaultBodyLimit::disable()))
        .route("/v1/devboxes/{sandbox}/download_file", post(files::download))
        .route("/v1/devboxes/{sandbox}/read_file_contents", post(files::read))
        .route("/v1/devboxes/{sandbox}/write_file_contents", post(files::write))
}

/// Carries a request on when its caller leaves in the middle, so that nothing is left half done.
async fn carried_on(request: Request, next: Next) -> Response {
    match tokio::spawn(next.run(request).in_current_span()).await {
        Ok(response) => response,
        // The task panicked, which the panic hook has logged: nobody aborts it.
        Err(_) => Refusal::bug().into_response(),
    }
}

async fn nothing_there() -> Refusal {
    Refusal::no_route()
}

async fn wrong_method() -> Refusal {
    Refusal::wrong_method()
}
