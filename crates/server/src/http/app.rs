//! What every handler has at hand, and the layers that every request passes.
//!
//! From the outside in: a request id and a log line, the checks of `Host` and `Origin`, the key, the route.
//! A path that does not exist passes them all, so that someone without a key learns nothing from it.

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
use engine::{Engine, Key, KeyEnd};
use futures_util::FutureExt;
use tokio::sync::watch;
use tracing::Instrument;

use crate::auth;
use crate::config::Config;
use crate::error::{ApiError, Chain, Code};
use crate::listen::Place;
use crate::metrics::Metrics;
use crate::origin::{Allowed, Refused};
use crate::{dialects, routes, traces, unread};

/// What every handler has at hand. Cheap to clone.
#[derive(Clone)]
pub struct App {
    /// All sandboxes.
    pub engine: Engine,
    shared: Arc<Shared>,
}

struct Shared {
    allowed: Allowed,
    /// How clients reach this daemon, where the operator has said so.
    public_origin: Option<String>,
    scheme: &'static str,
    metrics: Metrics,
    stopping: watch::Sender<bool>,
    request_prefix: u32,
    request_serial: AtomicU64,
}

impl App {
    /// Ready for requests.
    pub fn new(engine: Engine, config: &Config) -> Self {
        let mut allowed =
            Allowed { hosts: config.allowed_hosts.clone(), origins: config.allowed_origins.clone() };
        if let Some(url) = &config.public_url {
            allowed.hosts.push(url.host.clone());
            allowed.origins.push(url.origin.clone());
        }
        // Without randomness at hand two runs of the daemon may share request ids, which harms nobody.
        let request_prefix = getrandom::u32().unwrap_or(std::process::id());
        let stopping = watch::Sender::new(false);
        let metrics = Metrics::new(&engine);
        let public_origin = config.public_url.as_ref().map(|url| url.origin.to_string());
        let scheme = if config.tls.is_some() { "https" } else { "http" };
        let shared = Shared {
            allowed,
            public_origin,
            scheme,
            metrics,
            stopping,
            request_prefix,
            request_serial: AtomicU64::new(0),
        };
        Self { engine, shared: Arc::new(shared) }
    }

    /// All routes with all layers.
    pub fn router(&self) -> Router {
        dialects::mount(routes::all())
            .layer(middleware::from_fn_with_state(self.clone(), authenticate))
            .layer(middleware::from_fn_with_state(self.clone(), check_origin))
            .layer(middleware::from_fn(unread::read_rest))
            .layer(middleware::from_fn_with_state(self.clone(), log))
            .with_state(self.clone())
    }

    /// How the sender of a request reaches this daemon: what the operator said, or else the host that the request names, which was
    /// checked before.
    pub fn origin(&self, headers: &HeaderMap) -> String {
        match &self.shared.public_origin {
            Some(origin) => origin.clone(),
            None => {
                let host =
                    headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or("localhost");
                format!("{}://{host}", self.shared.scheme)
            }
        }
    }

    /// Tells long requests and streams that the daemon is on its way out.
    pub fn stop(&self) {
        self.shared.stopping.send_replace(true);
    }

    /// Whether [`Self::stop`] was called.
    pub fn is_stopping(&self) -> bool {
        *self.shared.stopping.borrow()
    }

    /// What is counted.
    pub fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }

    /// Streams and long requests that are open.
    pub fn streams_open(&self) -> usize {
        self.shared.stopping.receiver_count()
    }

    /// Waits until all streams are closed.
    pub async fn streams_closed(&self) {
        self.shared.stopping.closed().await;
    }

    /// Held by a long request or stream in the name of a key: says when it must end, and lets the daemon wait for the holder.
    pub fn stopping(&self, key: &Key) -> Stopping {
        Stopping { daemon: self.shared.stopping.subscribe(), key: self.engine.key_end(key) }
    }
}

/// Whether something long must end.
pub struct Stopping {
    daemon: watch::Receiver<bool>,
    key: KeyEnd,
}

/// Why something long must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Halt {
    /// The daemon is on its way out.
    Daemon,
    /// The key in whose name it goes on was deleted.
    Key,
}

impl Stopping {
    /// Returns when the holder must end. Cancel-safe.
    pub async fn wait(&mut self) -> Halt {
        tokio::select! {
            // The sender lives in the app that the holder also has; were it gone, that would be the end too.
            _ = self.daemon.wait_for(|stopping| *stopping) => Halt::Daemon,
            () = self.key.wait() => Halt::Key,
        }
    }

    /// The end of the key alone.
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

/// How a request came, put into it by the listener.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// The address that its connection arrived at.
    pub local: SocketAddr,
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

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

async fn log(State(app): State<App>, request: Request, next: Next) -> Response {
    let serial = app.shared.request_serial.fetch_add(1, Ordering::Relaxed);
    let id = format!("{:08x}-{serial:x}", app.shared.request_prefix);
    let method = request.method().clone();
    let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    // The route and not the path: a path may hold what a stranger wrote.
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
    // What the handler touched was its own, or the engine's, whose tasks fail on their own account.
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

async fn check_origin(State(app): State<App>, request: Request, next: Next) -> Response {
    let local: Option<IpAddr> = request.extensions().get::<Arrival>().map(|arrival| arrival.local.ip());
    let refused = match app.shared.allowed.check(request.uri(), request.headers(), local) {
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
    dialects::refuse(request.uri().path(), error)
}

async fn authenticate(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let key = auth::presented(request.headers()).and_then(|secret| app.engine.authenticate(secret));
    match key {
        Some(key) if key.metrics_only && request.uri().path() != routes::METRICS => {
            dialects::refuse(request.uri().path(), auth::metrics_only())
        }
        Some(key) => {
            request.extensions_mut().insert(key);
            next.run(request).await
        }
        None if dialects::needs_no_key(request.uri().path()) => next.run(request).await,
        None => dialects::refuse(request.uri().path(), auth::refused()),
    }
}
