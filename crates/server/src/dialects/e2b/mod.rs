//! E2B's sandboxes: the protocol of `e2b` in Python and JavaScript, from the version on that can be sent elsewhere (2.10).
//!
//! ```text
//! /e2b/sandboxes, /e2b/v2/sandboxes, ...                     the control plane, with a key
//! /e2b/process.Process/..., /e2b/filesystem.Filesystem/...   a sandbox's agent: Connect with JSON, with a token
//! /e2b/files, /e2b/health                                    the agent over plain HTTP
//! ```
//!
//! The agent's sandbox is named by a header. There is no agent in the guest: the engine does what it would do. What the
//! engine has no word for is in the sandbox's notes, see [`notes`].

mod connect;
mod error;
mod files;
mod filesystem;
mod home;
pub mod locate;
mod names;
mod notes;
mod process;
mod read;
mod sandboxes;
mod unsupported;
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
use crate::http::error::ApiError;

/// Where this dialect lives.
pub const PREFIX: &str = "/e2b";
/// Everything below [`PREFIX`].
pub fn under_prefix() -> Router<App> {
    let control = Router::new()
        .route("/sandboxes", get(sandboxes::list).post(sandboxes::create_old))
        .route("/v2/sandboxes", get(sandboxes::list).post(sandboxes::create))
        .route("/sandboxes/{sandbox}", get(sandboxes::get).delete(sandboxes::kill))
        .route("/sandboxes/{sandbox}/connect", post(sandboxes::connect))
        .route("/v2/sandboxes/{sandbox}/connect", post(sandboxes::connect))
        .route("/sandboxes/{sandbox}/resume", post(sandboxes::resume))
        .route("/sandboxes/{sandbox}/pause", post(sandboxes::pause))
        .route("/sandboxes/{sandbox}/timeout", post(sandboxes::set_timeout))
        .route("/sandboxes/{sandbox}/metrics", get(sandboxes::metrics))
        .route("/sandboxes/{sandbox}/network", put(sandboxes::change_network))
        .route("/sandboxes/{sandbox}/snapshots", any(unsupported::snapshot))
        .route("/sandboxes/{sandbox}/fork", any(unsupported::snapshot))
        .route("/snapshots", any(unsupported::templates))
        .route("/templates", any(unsupported::templates))
        .route("/templates/{*rest}", any(unsupported::templates))
        .route("/v2/templates/{*rest}", any(unsupported::templates))
        .route("/v3/templates", any(unsupported::templates))
        .route("/volumes", any(unsupported::volumes))
        .route("/volumes/{name}", any(unsupported::volumes))
        .layer(middleware::from_fn(carried_on));
    let agent = Router::new()
        .route("/health", get(files::health))
        // A file is a stream of any size, and is written as it comes.
        .route("/files", get(files::read).post(files::write).layer(DefaultBodyLimit::disable()))
        .route("/process.Process/Start", post(process::start))
        .route("/process.Process/Connect", post(process::attach))
        .route("/process.Process/List", post(process::list))
        .route("/process.Process/SendInput", post(process::send_input))
        .route("/process.Process/StreamInput", post(process::stream_input))
        .route("/process.Process/SendSignal", post(process::send_signal))
        .route("/process.Process/CloseStdin", post(process::close_stdin))
        .route("/process.Process/Update", post(process::update))
        .route("/filesystem.Filesystem/Stat", post(filesystem::stat))
        .route("/filesystem.Filesystem/ListDir", post(filesystem::list_dir))
        .route("/filesystem.Filesystem/MakeDir", post(filesystem::make_dir))
        .route("/filesystem.Filesystem/Move", post(filesystem::rename))
        .route("/filesystem.Filesystem/Remove", post(filesystem::remove))
        .route("/filesystem.Filesystem/WatchDir", post(watch::watch))
        .route("/filesystem.Filesystem/CreateWatcher", post(watch::create))
        .route("/filesystem.Filesystem/GetWatcherEvents", post(watch::events))
        .route("/filesystem.Filesystem/RemoveWatcher", post(watch::remove))
        .route("/execute", any(unsupported::interpreter))
        .route("/contexts", any(unsupported::interpreter))
        .route("/contexts/{*rest}", any(unsupported::interpreter));
    control.merge(agent).fallback(nothing_there).method_not_allowed_fallback(wrong_method)
}

/// Carries a request on when its caller leaves in the middle, so that nothing is left half done.
async fn carried_on(request: Request, next: Next) -> Response {
    match tokio::spawn(next.run(request).in_current_span()).await {
        Ok(response) => response,
        // The task panicked, which the panic hook has logged: nobody aborts it.
        Err(_) => Refusal::bug().into_response(),
    }
}

/// A refusal of the layers around all routes, in the shape that belongs to a path.
pub fn refuse(path: &str, error: ApiError) -> Response {
    let refusal = Refusal::from(error);
    let called = path.contains("/process.Process/") || path.contains("/filesystem.Filesystem/");
    if called { refusal.rpc().into_response() } else { refusal.into_response() }
}

async fn nothing_there(request: Request) -> Response {
    refuse(
        request.uri().path(),
        ApiError::new(StatusCode::NOT_FOUND, "route_not_found", "no route has this path"),
    )
}

async fn wrong_method() -> Refusal {
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "this path does not support this method")
}
