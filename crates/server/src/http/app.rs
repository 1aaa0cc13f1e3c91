//! The state that every handler shares, and the layers that every request passes.
//!
//! From the outside in: a request id and a log line, the checks of `Host` and `Origin`, the key, the route. A path that
//! does not exist passes them all, so that a caller without a key learns nothing from it.

use std::net::{IpAddr, SocketAddr};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use axum::Router;
use axum::extract::{FromRequestParts, MatchedPath, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use engine::{Engine, EngineError, Key, KeyEnd, Resource};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::watch;
use tracing::Instrument;

use crate::http::auth;
use crate::http::budget::Budget;
use crate::http::drain;
use crate::http::error::{ApiError, Chain, Code};
use crate::http::origin::{Allowed, Refused};
use crate::http::places::Place;
use crate::http::port_names::PortNames;
use crate::observe::metrics::Metrics;
use crate::observe::traces;

/// The state that every handler shares. Cheap to clone.
#[derive(Clone)]
pub struct App {
    /// All sandboxes.
    pub engine: Engine,
    shared: Arc<Shared>,
}

struct Shared {
    reach: Reach,
    metrics: Metrics,
    bodies: Budget,
    stopping: watch::Sender<bool>,
    request_prefix: u32,
    request_serial: AtomicU64,
}

/// How clients reach this daemon.
#[derive(Debug, Clone)]
pub struct Reach {
    /// The hosts and origins that requests may name.
    pub allowed: Allowed,
    /// The origin that the operator has set, if any.
    pub public_origin: Option<String>,
    /// `http` or `https`.
    pub scheme: &'static str,
    /// How ports of sandboxes are reached by host name.
    pub ports: PortNames,
}

/// The routes behind the layers, and what the layers must know about them.
pub struct Surface {
    /// All routes.
    pub routes: Router<App>,
    /// What the layers must know.
    pub manners: Manners,
}

/// What the layers around all routes must know about the paths behind them.
#[derive(Clone, Copy)]
pub struct Manners {
    /// An error response in the shape that belongs to a path.
    pub refuse: fn(&str, ApiError) -> Response,
    /// Whether a path needs no key: it carries its own proof of access, or tells everybody the same.
    pub needs_no_key: fn(&str) -> bool,
    /// The only path that a metrics key may access.
    pub metrics: &'static str,
    /// Answers a request whose host name is that of a sandbox's port. Such a request reaches no route.
    pub serve_port: fn(App, Request) -> BoxFuture<'static, Response>,
}

impl App {
    /// Ready for requests.
    pub fn new(engine: Engine, reach: Reach) -> Self {
        // Without random bits, two runs of the daemon may share request ids, which is harmless.
        let request_prefix = getrandom::u32().unwrap_or(std::process::id());
        let stopping = watch::Sender::new(false);
        let metrics = Metrics::new(&engine);
        let shared = Shared {
            reach,
            metrics,
            bodies: Budget::default(),
            stopping,
            request_prefix,
            request_serial: AtomicU64::new(0),
        };
        Self { engine, shared: Arc::new(shared) }
    }

    /// All routes with all layers.
    pub fn router(&self, surface: Surface) -> Router {
        let Surface { routes, manners } = surface;
        let state = (self.clone(), manners);
        routes
            .layer(middleware::from_fn_with_state(state.clone(), authenticate))
            .layer(middleware::from_fn_with_state(state.clone(), check_origin))
            .layer(middleware::from_fn_with_state(state, divert))
            .layer(middleware::from_fn(drain::read_rest))
            .layer(middleware::from_fn_with_state(self.clone(), log))
            .with_state(self.clone())
    }

    /// How the sender of a request reaches this daemon: the origin that the operator set, or else the host that the
    /// request names, which was checked before.
    pub fn origin(&self, headers: &HeaderMap) -> String {
        match &self.shared.reach.public_origin {
            Some(origin) => origin.clone(),
            None => {
                let host =
                    headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or("localhost");
                format!("{}://{host}", self.shared.reach.scheme)
            }
        }
    }

    /// How ports of sandboxes are reached by host name.
    pub fn ports(&self) -> &PortNames {
        &self.shared.reach.ports
    }

    /// `http` or `https`, as the daemon itself speaks it.
    pub fn scheme(&self) -> &'static str {
        self.shared.reach.scheme
    }

    /// Notifies long requests and streams that the daemon is stopping.
    pub fn stop(&self) {
        self.shared.stopping.send_replace(true);
    }

    /// Whether [`Self::stop`] was called.
    pub fn is_stopping(&self) -> bool {
        *self.shared.stopping.borrow()
    }

    /// The metrics.
    pub fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }

    /// The memory budget for bodies that are buffered whole.
    pub fn bodies(&self) -> &Budget {
        &self.shared.bodies
    }

    /// The number of open streams and long requests.
    pub fn streams_open(&self) -> usize {
        self.shared.stopping.receiver_count()
    }

    /// Waits until all streams are closed.
    pub async fn streams_closed(&self) {
        self.shared.stopping.closed().await;
    }

    /// Held by a long request or stream of a key: signals when it must end, and lets the daemon wait for the holder.
    pub fn stopping(&self, key: &Key) -> Stopping {
        Stopping { daemon: self.shared.stopping.subscribe(), key: self.engine.key_end(key) }
    }
}

impl App {
    /// As [`Self::stopping`], for what no key limits: only the end of the daemon is signalled.
    pub fn daemon_stopping(&self) -> watch::Receiver<bool> {
        self.shared.stopping.subscribe()
    }
}

/// Signals that a long request or stream must end.
pub struct Stopping {
    daemon: watch::Receiver<bool>,
    key: KeyEnd,
}

/// Why a long request or stream must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Halt {
    /// The daemon is stopping.
    Daemon,
    /// The key that it uses was deleted.
    Key,
}

impl Stopping {
    /// Returns when the holder must end. Cancel-safe.
    pub async fn wait(&mut self) -> Halt {
        tokio::select! {
            // The sender lives in the app that the holder also has; if it were gone, the daemon would be stopping too.
            _ = self.daemon.wait_for(|stopping| *stopping) => Halt::Daemon,
            () = self.key.wait() => Halt::Key,
        }
    }

    /// Signals only the deletion of the key.
    pub fn key(&self) -> KeyEnd {
        self.key.clone()
    }
}

impl From<Halt> for ApiError {
    fn from(halt: Halt) -> Self {
        match halt {
            Halt::Daemon => Self::stopping(),
            Halt::Key => auth::refused(),
        }
    }
}

/// How a request arrived; the listener adds this to the request.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// The address that its connection arrived at.
    pub local: SocketAddr,
    /// The address that its connection came from.
    pub peer: SocketAddr,
    /// Its connection's place among those that may be open at once. A WebSocket keeps it.
    pub place: Place,
}

/// The key of a request that passed `authenticate`.
pub struct Caller(pub Key);

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        parts.extensions.get::<Key>().cloned().map(Self).ok_or_else(auth::refused)
    }
}

/// The most headers of one request.
const HEADERS_MAX: usize = 64;
/// The total size of one request's headers and their names, in bytes.
pub const HEAD_BYTES_MAX: usize = 64 << 10;
/// The longest path and query of a request: room for two paths of 4,095 bytes, each byte escaped, and some more.
const TARGET_MAX: usize = 32 << 10;

/// What requests to ports by host name are called in logs and metrics.
const PORT_ROUTE: &str = "(port)";

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

async fn log(State(app): State<App>, request: Request, next: Next) -> Response {
    let serial = app.shared.request_serial.fetch_add(1, Ordering::Relaxed);
    let id = format!("{:08x}-{serial:x}", app.shared.request_prefix);
    let method = request.method().clone();
    let route = match app.ports().concerns(&request) {
        // The path belongs to a server in a sandbox, whatever route it looks like.
        true => Some(PORT_ROUTE.to_owned()),
        false => request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned()),
    };
    // The route and not the path: a path may contain a stranger's text.
    let span = tracing::info_span!(
        "request",
        id,
        method = method.as_str(),
        route = route.as_deref().unwrap_or("none"),
        sandbox = tracing::field::Empty,
    );
    let trace = span.in_scope(|| traces::request_span(method.as_str(), route.as_deref(), request.headers()));
    let began = Instant::now();
    let answered = AssertUnwindSafe(next.run(request))
        .catch_unwind()
        .instrument(trace.clone())
        .instrument(span.clone())
        .await;
    // After a panic, the handler's own state is gone, and the engine's tasks fail independently.
    let mut response = answered.unwrap_or_else(|_| {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the daemon has a bug here")
            .hint("the daemon's log has the cause under this answer's x-request-id")
            .into_response()
    });
    let status = response.status();
    traces::answered(&trace, status);
    let took = began.elapsed();
    let micros = took.as_micros() as u64;
    app.shared.metrics.answered(route.as_deref(), &method, status, took);
    if let Some(Code(code)) = response.extensions().get::<Code>() {
        app.shared.metrics.refused(code);
    }
    let _entered = span.enter();
    match response.extensions().get::<Chain>() {
        Some(Chain(chain)) if status.is_server_error() => {
            tracing::error!(status = status.as_u16(), micros, error = chain, "failed");
        }
        Some(Chain(chain)) => tracing::info!(status = status.as_u16(), micros, error = chain, "refused"),
        None if status.is_success() && method == Method::GET => {
            tracing::debug!(status = status.as_u16(), micros, "answered");
        }
        None => tracing::info!(status = status.as_u16(), micros, "answered"),
    }
    let id = HeaderValue::from_str(&id).expect("a request id is made of digits and dashes");
    response.headers_mut().insert(X_REQUEST_ID, id);
    response
}

/// Keeps requests to ports by host name away from all routes.
async fn divert(State((app, manners)): State<(App, Manners)>, request: Request, next: Next) -> Response {
    if !app.ports().concerns(&request) {
        return next.run(request).await;
    }
    match check_head(&request) {
        Ok(()) => (manners.serve_port)(app, request).await,
        Err(error) => error.into_response(),
    }
}

async fn check_origin(
    State((app, manners)): State<(App, Manners)>,
    request: Request,
    next: Next,
) -> Response {
    if let Err(error) = check_head(&request) {
        return (manners.refuse)(request.uri().path(), error);
    }
    let local: Option<IpAddr> = request.extensions().get::<Arrival>().map(|arrival| arrival.local.ip());
    let refused = match app.shared.reach.allowed.check(request.uri(), request.headers(), local) {
        Ok(()) => return next.run(request).await,
        Err(refused) => refused,
    };
    let error = match refused {
        Refused::BadHost => ApiError::new(
            StatusCode::BAD_REQUEST,
            "invalid_host",
            "the request needs exactly one valid `Host` header",
        ),
        Refused::ForeignHost => ApiError::new(
            StatusCode::MISDIRECTED_REQUEST,
            "host_not_allowed",
            "the `Host` header names a host that is not this daemon's",
        )
        .hint("start the daemon with --public-url, or add the name to `allowed_hosts` in its configuration"),
        Refused::ForeignOrigin => ApiError::new(
            StatusCode::FORBIDDEN,
            "origin_not_allowed",
            "pages of this origin may not call this daemon",
        )
        .hint("add the origin to `allowed_origins` in the daemon's configuration"),
    };
    (manners.refuse)(request.uri().path(), error)
}

/// Checks that a request's head is not too long.
fn check_head(request: &Request) -> Result<(), ApiError> {
    let target = request.uri().path_and_query().map_or(0, |target| target.as_str().len());
    if target > TARGET_MAX {
        let message = format!("the request's target must be at most {TARGET_MAX} bytes, got {target}");
        return Err(ApiError::new(StatusCode::URI_TOO_LONG, "uri_too_long", message));
    }
    let headers = request.headers();
    let bytes: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    if headers.len() > HEADERS_MAX || bytes > HEAD_BYTES_MAX {
        let message = format!(
            "a request must have at most {HEADERS_MAX} headers of {HEAD_BYTES_MAX} bytes in all, got {} of {bytes}",
            headers.len()
        );
        let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
        return Err(ApiError::new(status, "headers_too_large", message));
    }
    Ok(())
}

async fn authenticate(
    State((app, manners)): State<(App, Manners)>,
    mut request: Request,
    next: Next,
) -> Response {
    let key = auth::presented(request.headers()).and_then(|secret| app.engine.authenticate(secret));
    let open = (manners.needs_no_key)(request.uri().path());
    match key {
        Some(key) if key.metrics_only && !open && request.uri().path() != manners.metrics => {
            (manners.refuse)(request.uri().path(), auth::metrics_only())
        }
        Some(key) => {
            let max = key.limits.connections;
            let place = request.extensions().get::<Arrival>().map(|arrival| arrival.place.clone());
            if place.is_some_and(|place| !place.keep_for(&key.id, max)) {
                let (resource, limit) = (Resource::Connections, u64::from(max.unwrap_or(0)));
                return (manners.refuse)(request.uri().path(), EngineError::Quota { resource, limit }.into());
            }
            request.extensions_mut().insert(key);
            next.run(request).await
        }
        None if open => next.run(request).await,
        None => (manners.refuse)(request.uri().path(), auth::refused()),
    }
}
