//! Sandbox0's sandboxes: the protocol of the package `sandbox0` for Python, and of its adapter for Deep Agents.
//!
//! ```text
//! /sandbox0/api/v1/sandboxes/{sandbox}/...     sandboxes, and contexts and files in them
//! /sandbox0/api/v1/templates, ...              what they are made from
//! /sandbox0/before-0.10.3/api/v1/...           the same for clients before 0.10.3
//! ```
//!
//! A *context* is a command: a program (`cmd`), or an interpreter that takes one request after the other (`repl`). Its id says which. What
//! the engine has no word for is in the sandbox's notes (`notes`).
//!
//! Clients know one status for each success and a few for failures; with any other, they lose the answer. So statuses are part of the
//! protocol, and every success is written by [`answer::done`] or [`answer::with`].

mod account;
mod answer;
mod contexts;
mod error;
mod files;
pub mod locate;
mod names;
mod network;
mod notes;
mod output;
mod read;
mod repl;
mod sandboxes;
mod services;
mod snapshots;
mod stream;
mod templates;
mod unsupported;
mod volumes;
mod watch;

pub use error::Refusal;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post, put};
use tracing::Instrument;

use crate::http::app::App;

/// Where this dialect lives.
pub const PREFIX: &str = "/sandbox0";

/// Below the prefix, the same for clients before 0.10.3.
const OLDER: &str = "/before-0.10.3";

/// Everything below [`PREFIX`].
pub fn under_prefix() -> Router<App> {
    let all = || changes().merge(streams()).merge(refused());
    let routes = all().nest(OLDER, all().layer(middleware::from_fn(older_statuses)));
    routes.fallback(nothing_there).method_not_allowed_fallback(wrong_method)
}

/// Clients before 0.10.3 know another status for a deleted sandbox, and nothing in the request tells them from later ones.
async fn older_statuses(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    if response.status() == StatusCode::ACCEPTED
        && response.extensions().get::<sandboxes::Deleted>().is_some()
    {
        *response.status_mut() = StatusCode::OK;
    }
    response
}

/// What must not be left half done.
fn changes() -> Router<App> {
    Router::new()
        .route("/api/v1/sandboxes", get(sandboxes::list).post(sandboxes::claim))
        .route(
            "/api/v1/sandboxes/{sandbox}",
            get(sandboxes::get).put(sandboxes::update).delete(sandboxes::delete),
        )
        .route("/api/v1/sandboxes/{sandbox}/status", get(sandboxes::status))
        .route("/api/v1/sandboxes/{sandbox}/pause", post(sandboxes::pause))
        .route("/api/v1/sandboxes/{sandbox}/resume", post(sandboxes::resume))
        .route("/api/v1/sandboxes/{sandbox}/refresh", post(sandboxes::refresh))
        .route("/api/v1/sandboxes/{sandbox}/contexts/{context}/restart", post(contexts::restart))
        .route("/api/v1/sandboxes/{sandbox}/contexts/{context}/input", post(contexts::input))
        .route("/api/v1/sandboxes/{sandbox}/contexts/{context}/resize", post(contexts::resize))
        .route("/api/v1/sandboxes/{sandbox}/contexts/{context}/signal", post(contexts::signal))
        .route("/api/v1/sandboxes/{sandbox}/files/move", post(files::relocate))
        .route("/api/v1/sandboxes/{sandbox}/snapshots", get(snapshots::list).post(snapshots::create))
        .route("/api/v1/sandboxes/{sandbox}/rootfs/restore", post(snapshots::restore))
        .route("/api/v1/sandboxes/{sandbox}/fork", post(snapshots::fork))
        .route("/api/v1/sandbox-rootfs-snapshots/{snapshot}", get(snapshots::get).delete(snapshots::delete))
        .route("/api/v1/sandboxes/{sandbox}/network", get(network::get).put(network::update))
        .route("/api/v1/sandboxes/{sandbox}/services", get(services::get).put(services::update))
        .route("/api/v1/sandboxes/{sandbox}/previews", post(services::preview))
        .route("/api/v1/sandboxes/{sandbox}/previews/{preview}", put(services::renew).delete(services::end))
        .route("/api/v1/templates", get(templates::list).post(templates::create))
        .route("/api/v1/templates/from-sandbox", post(templates::capture))
        .route(
            "/api/v1/templates/{template}",
            get(templates::get).put(templates::update).delete(templates::delete),
        )
        .route("/api/v1/sandboxvolumes", get(volumes::list).post(volumes::create))
        .route("/api/v1/sandboxvolumes/{volume}", get(volumes::get).delete(volumes::delete))
        .route("/api/v1/sandboxvolumes/{volume}/fork", post(volumes::fork))
        .route("/api/v1/quotas", get(account::quotas))
        .route("/api/v1/quotas/{dimension}", get(account::quota))
        .route("/api-keys/current", get(account::key))
        .layer(middleware::from_fn(carried_on))
}

/// What ends when its caller leaves.
fn streams() -> Router<App> {
    Router::new()
        .route("/api/v1/sandboxes/{sandbox}/contexts", get(contexts::list).post(contexts::create))
        .route("/api/v1/sandboxes/{sandbox}/contexts/{context}", get(contexts::get).delete(contexts::delete))
        .route("/api/v1/sandboxes/{sandbox}/contexts/{context}/exec", post(contexts::exec))
        .route("/api/v1/sandboxes/{sandbox}/contexts/{context}/ws", get(stream::socket))
        // A file is written as it comes.
        .route(
            "/api/v1/sandboxes/{sandbox}/files",
            get(files::read).post(files::write).delete(files::remove).layer(DefaultBodyLimit::disable()),
        )
        .route("/api/v1/sandboxes/{sandbox}/files/stat", get(files::stat))
        .route("/api/v1/sandboxes/{sandbox}/files/list", get(files::list))
        .route("/api/v1/sandboxes/{sandbox}/files/watch", get(watch::socket))
}

/// What this server does not have.
fn refused() -> Router<App> {
    Router::new()
        .route("/api/v1/sandboxes/{sandbox}/rootfs/rebase", any(unsupported::rebase))
        .route("/api/v1/sandboxes/{sandbox}/sessions", any(unsupported::sessions))
        .route("/api/v1/sandboxes/{sandbox}/sessions/{*path}", any(unsupported::sessions))
        .route("/api/v1/sandboxes/{sandbox}/observability/{*path}", any(unsupported::observability))
        .route("/api/v1/sandboxes/{sandbox}/metrics", any(unsupported::observability))
        .route("/api/v1/sandboxes/{sandbox}/metrics/{*path}", any(unsupported::observability))
        .route("/api/v1/credential-sources", any(unsupported::credentials))
        .route("/api/v1/credential-sources/{name}", any(unsupported::credentials))
        .route("/api/v1/sandboxvolumes/{volume}/{*path}", any(unsupported::volumes))
        .route("/api/v1/usage/windows", any(unsupported::usage))
        .route("/api/v1/registry/credentials", any(unsupported::registry))
        .route("/api-keys", any(unsupported::keys))
        .route("/api-keys/{*path}", any(unsupported::keys))
        .route("/auth/{*path}", any(unsupported::accounts))
        .route("/users/{*path}", any(unsupported::accounts))
        .route("/teams", any(unsupported::accounts))
        .route("/teams/{*path}", any(unsupported::accounts))
        .route("/regions", any(unsupported::accounts))
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
