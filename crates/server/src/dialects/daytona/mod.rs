//! Daytona's sandboxes: the protocol of the package `daytona` for Python, in the two planes that it has.
//!
//! ```text
//! /daytona/sandbox, ...                      the control plane, below the client's `DAYTONA_API_URL`
//! /daytona/toolbox/{sandbox}/process, ...    the toolbox: the `toolboxProxyUrl` of a sandbox
//! ```
//!
//! Ids of sandboxes are UUIDs there too. A *session* is a shell that runs as a command, and each command of a session is one too
//! (`session`). What the engine has no word for is in the sandbox's notes: one under [`NOTES`], and one for each session.

mod error;
mod execute;
mod files;
mod json;
pub mod locate;
mod logs;
mod read;
mod sandboxes;
mod session;
mod shell;
mod unsupported;

pub use error::Refusal;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post, put};
use tracing::Instrument;

use crate::http::app::App;

/// Where this dialect lives.
pub const PREFIX: &str = "/daytona";
/// The key of this dialect's notes.
const NOTES: &str = "daytona";

/// Everything below [`PREFIX`].
pub fn under_prefix() -> Router<App> {
    Router::new()
        .nest("/toolbox/{sandbox}", toolbox())
        .merge(control_plane())
        .fallback(nothing_there)
        .method_not_allowed_fallback(wrong_method)
}

fn control_plane() -> Router<App> {
    Router::new()
        .route("/config", get(sandboxes::config))
        .route("/sandbox", get(sandboxes::list).post(sandboxes::create))
        .route("/sandbox/paginated", get(sandboxes::paginated))
        .route("/sandbox/{sandbox}", get(sandboxes::get).delete(sandboxes::delete))
        .route("/sandbox/{sandbox}/start", post(sandboxes::start))
        .route("/sandbox/{sandbox}/stop", post(sandboxes::stop))
        .route("/sandbox/{sandbox}/labels", put(sandboxes::labels))
        .route("/sandbox/{sandbox}/autostop/{minutes}", post(sandboxes::auto_stop))
        .route("/sandbox/{sandbox}/autopause/{minutes}", post(sandboxes::auto_pause))
        .route("/sandbox/{sandbox}/autoarchive/{minutes}", post(sandboxes::auto_archive))
        .route("/sandbox/{sandbox}/autodelete/{minutes}", post(sandboxes::auto_delete))
        .route("/sandbox/{sandbox}/ttl/{minutes}", post(sandboxes::ttl))
        .route("/sandbox/{sandbox}/last-activity", post(sandboxes::touch))
        .route("/sandbox/{sandbox}/toolbox-proxy-url", get(sandboxes::toolbox_url))
        .route("/sandbox/{sandbox}/archive", any(unsupported::archive))
        .route("/sandbox/{sandbox}/recover", any(unsupported::sandbox))
        .route("/sandbox/{sandbox}/resize", any(unsupported::sandbox))
        .route("/sandbox/{sandbox}/snapshot", any(unsupported::sandbox))
        .route("/sandbox/{sandbox}/fork", any(unsupported::sandbox))
        .route("/sandbox/{sandbox}/pause", any(unsupported::sandbox))
        .route("/sandbox/{sandbox}/secrets", any(unsupported::sandbox))
        .route("/sandbox/{sandbox}/network-settings", post(sandboxes::change_network))
        .route("/sandbox/{sandbox}/public/{name}", any(unsupported::ports))
        .route("/sandbox/{sandbox}/ports/{name}/preview-url", any(unsupported::ports))
        .route("/sandbox/{sandbox}/ports/{name}/signed-preview-url", any(unsupported::ports))
        .route("/sandbox/{sandbox}/ssh-access", any(unsupported::ports))
        .route("/sandbox/{sandbox}/signing-key", any(unsupported::sandbox))
        .route("/snapshots", any(unsupported::daemon))
        .route("/snapshots/{name}", any(unsupported::daemon))
        .route("/volumes", any(unsupported::daemon))
        .route("/volumes/{name}", any(unsupported::daemon))
        .route("/volumes/by-name/{name}", any(unsupported::daemon))
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

/// Everything below a sandbox's `toolboxProxyUrl`.
fn toolbox() -> Router<App> {
    Router::new()
        .route("/work-dir", get(files::work_dir))
        .route("/user-home-dir", get(files::home_dir))
        .route("/version", get(files::version))
        .route("/process/execute", post(execute::execute))
        .route("/process/session", get(session::list).post(session::create))
        .route("/process/session/{session}", get(session::get).delete(session::delete))
        .route("/process/session/{session}/exec", post(session::exec))
        .route("/process/session/{session}/command/{command}", get(session::command))
        .route("/process/session/{session}/command/{command}/logs", get(logs::logs))
        .route("/process/session/{session}/command/{command}/input", post(session::input))
        .route("/process/code-run", any(unsupported::toolbox))
        .route("/process/pty", any(unsupported::toolbox))
        .route("/process/pty/create-connect", any(unsupported::toolbox))
        .route("/process/interpreter/execute", any(unsupported::toolbox))
        .route("/process/interpreter/context", any(unsupported::toolbox))
        // Files are streams of any size, and are written as they come.
        .route("/files/bulk-upload", post(files::upload).layer(DefaultBodyLimit::disable()))
        .route("/files/bulk-download", post(files::download))
        .route("/files", get(files::list).delete(files::remove))
        .route("/files/info", get(files::info))
        .route("/files/folder", post(files::folder))
        .route("/files/move", post(files::relocate))
        .route("/files/find", get(files::find))
        .route("/files/search", get(files::search))
        .route("/files/replace", post(files::replace))
        .route("/files/permissions", any(unsupported::toolbox))
        .fallback(nothing_there)
        .method_not_allowed_fallback(wrong_method)
}

async fn nothing_there(request: Request) -> Refusal {
    Refusal::no_route(request.uri().path())
}

async fn wrong_method() -> Refusal {
    Refusal::wrong_method()
}
