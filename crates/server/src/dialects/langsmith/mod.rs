//! LangSmith's sandboxes: the protocol of `langsmith.sandbox` in Python and JavaScript, in the two forms that its clients speak.
//!
//! ```text
//! {base}/boxes, /templates, /snapshots, ...      the control plane; `base` is one of BASES
//! /langsmith/dp/{sandbox}/...                     the data plane: the `dataplane_url` of a sandbox
//! /langsmith/dl/{token}                           a signed link to one file
//! /langsmith/svc/{sandbox}/{port}/...             a service: requests to a port, with a token
//! ```
//!
//! Older clients (0.6.5 to 0.7.33) have templates, volumes and pools, newer ones (from 0.7.32 on) snapshots; both are served side by
//! side. A *template* of theirs is one of ours. A *snapshot* of theirs is a template too, published under a name and tags. A *box* is
//! a sandbox. What the engine has no word for is in the sandbox's notes, under [`NOTES`].

mod boxes;
mod error;
mod exec;
mod files;
mod json;
mod links;
pub mod locate;
mod pools;
mod read;
mod services;
mod snapshots;
mod sse;
mod templates;
mod tunnel;
mod unsupported;
mod volumes;

pub use error::Refusal;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use tracing::Instrument;

use crate::http::app::App;

/// Where this dialect lives.
pub const PREFIX: &str = "/langsmith";
/// Links that carry their own proof.
pub const LINKS: &str = "/langsmith/dl/";
/// Services below the API, which carry a token.
pub const SERVICES: &str = "/langsmith/svc/";
/// Below the prefix: what clients of various versions make of an endpoint.
const BASES: &[&str] = &["/v2/sandboxes", "/api/v2/sandboxes", "/api/v1/v2/sandboxes"];
/// The key of this dialect's notes.
const NOTES: &str = "langsmith";

/// Everything below [`PREFIX`].
pub fn under_prefix() -> Router<App> {
    let mut router = Router::new()
        .nest("/dp/{sandbox}", data_plane())
        // Any path and any method: what is there is for a server in the sandbox to say.
        .route("/svc/{sandbox}/{port}", any(services::forward))
        .route("/svc/{sandbox}/{port}/", any(services::forward))
        .route("/svc/{sandbox}/{port}/{*path}", any(services::forward))
        .route("/dl/{name}", get(links::follow).head(links::follow));
    for base in BASES {
        router = router.nest(base, control_plane());
    }
    router.fallback(nothing_there).method_not_allowed_fallback(wrong_method)
}

/// Everything below a base.
pub fn control_plane() -> Router<App> {
    Router::new()
        .route("/boxes", get(boxes::list).post(boxes::create))
        .route("/boxes/{sandbox}", get(boxes::get).patch(boxes::update).delete(boxes::delete))
        .route("/boxes/{sandbox}/status", get(boxes::status))
        .route("/boxes/{sandbox}/start", post(boxes::start))
        .route("/boxes/{sandbox}/stop", post(boxes::stop))
        .route("/boxes/{sandbox}/snapshot", post(snapshots::capture))
        .route("/boxes/{sandbox}/download-url", post(links::create))
        .route("/boxes/{sandbox}/service-url", post(services::create))
        .route("/boxes/{sandbox}/service-urls", get(services::list).delete(services::delete))
        .route("/snapshots", get(snapshots::list).post(snapshots::create))
        .route("/snapshots/{name}", get(snapshots::get).delete(snapshots::delete))
        .route("/snapshots-by-name/{name}", get(snapshots::tags))
        .route("/registries", get(unsupported::registries).post(unsupported::registry))
        .route(
            "/registries/{name}",
            get(unsupported::registry).patch(unsupported::registry).delete(unsupported::registry),
        )
        .route("/usage/costs", get(unsupported::costs))
        .route("/templates", get(templates::list).post(templates::create))
        .route("/templates/{name}", get(templates::get).patch(templates::update).delete(templates::delete))
        .route("/volumes", get(volumes::list).post(volumes::create))
        .route("/volumes/{name}", get(volumes::get).patch(volumes::update).delete(volumes::delete))
        .route("/pools", get(pools::list).post(pools::create))
        .route("/pools/{name}", get(pools::get).patch(pools::update).delete(pools::delete))
        .fallback(nothing_there)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn(carried_on))
}

/// Carries a request on when its caller leaves in the middle, so that nothing is left half done.
async fn carried_on(request: Request, next: Next) -> Response {
    match tokio::spawn(next.run(request).in_current_span()).await {
        Ok(response) => response,
        // The task panicked, which the panic hook has logged: nobody aborts it.
        Err(_) => Refusal::bug().into_response(),
    }
}

/// Everything below a sandbox's `dataplane_url`.
fn data_plane() -> Router<App> {
    Router::new()
        // A file is a stream of any size, and is written as it comes.
        .route("/upload", post(files::upload).layer(DefaultBodyLimit::disable()))
        .route("/download", get(files::download).head(files::stat))
        .route("/glob", post(files::glob))
        .route("/grep", post(files::grep))
        .route("/execute", post(exec::execute))
        .route("/tunnel", get(tunnel::tunnel))
        .route("/execute/ws", get(exec::socket))
        .route("/execute/stream/start", post(sse::begin))
        .route("/execute/stream/resume", post(sse::resume))
        .fallback(nothing_there)
        .method_not_allowed_fallback(wrong_method)
}

async fn nothing_there() -> Refusal {
    Refusal::no_route()
}

async fn wrong_method() -> Refusal {
    Refusal::wrong_method()
}
