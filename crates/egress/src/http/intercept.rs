//! Requests that are read out of TLS on their way to one host, to add credentials and to apply rules.
//!
//! Both sides speak the same version of HTTP, the one that the host chose. hyper reads and writes both sides, so both agree
//! on each message. Bodies are streams: nothing is kept but what could be the beginning of a placeholder.
//! Credentials are looked up for every request, so a change acts on open connections too.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_LENGTH, EXPECT, HOST, TE, UPGRADE};
use http::request::Parts;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderValue, Request, Response, StatusCode, Uri, Version};
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinSet;

use super::check::{Peer, check};
use super::head::HEAD_BYTES_MAX;
use super::proxy::{HEAD_DEADLINE, HOP_BY_HOP, ProxyError, Upgrades, join, prepare};
use crate::ca::Speaks;
use crate::control::Used;
use crate::credential::{Applied, BODY_BUFFER_MAX, Masked, Refusal, Replaced, Value, Vault, mask};
use crate::policy::Name;

/// How much of a stream, and of a connection, may be on its way before the reader has taken it.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;
/// Requests at the same time on one HTTP/2 connection.
const STREAMS_MAX: u32 = 128;

/// What one connection is about, and who decides about its requests.
pub trait Site: Send + Sync + 'static {
    /// The host.
    fn name(&self) -> &Name;
    /// The port.
    fn port(&self) -> u16;
    /// The credentials as they are now.
    fn vault(&self) -> Arc<Vault>;
    /// Whether the use of a credential can be recorded now.
    fn can_record(&self) -> bool;
    /// Begins the record of a request that carries a credential.
    fn used(&self, of: Arc<crate::credential::Credential>) -> Used;
    /// Stores a record.
    fn record(&self, used: Used);
    /// A request was refused.
    fn refused(&self, why: &str);
}

/// The version that both sides speak.
pub type Intercepted = Speaks;

/// A body ended early.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Broken(String);

type Body = BoxBody<Bytes, Broken>;

/// Serves the requests of one connection until it ends.
pub async fn intercept<C, S, T>(
    client: C,
    server: S,
    speaks: Intercepted,
    site: Arc<T>,
) -> Result<(), ProxyError>
where
    C: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    T: Site,
{
    match speaks {
        Speaks::Http1 => over_http1(client, server, site).await,
        Speaks::Http2 => over_http2(client, server, site).await,
    }
}

async fn over_http1<C, S, T>(client: C, server: S, site: Arc<T>) -> Result<(), ProxyError>
where
    C: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    T: Site,
{
    let (sender, upstream) = http1::Builder::new()
        .preserve_header_case(true)
        .max_buf_size(HEAD_BYTES_MAX)
        .handshake::<_, Body>(TokioIo::new(server))
        .await
        .map_err(ProxyError::Upstream)?;
    let sender = Sender::Http1(Arc::new(tokio::sync::Mutex::new(sender)));
    let upgrades = Upgrades::default();
    let pending = upgrades.clone();
    let service = hyper::service::service_fn(move |request| {
        let (sender, site, pending) = (sender.clone(), site.clone(), pending.clone());
        async move { Ok::<_, Infallible>(one(request, sender, site, pending).await) }
    });
    let serving = hyper::server::conn::http1::Builder::new()
        .preserve_header_case(true)
        .max_buf_size(HEAD_BYTES_MAX)
        .half_close(true)
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_DEADLINE)
        .serve_connection(TokioIo::new(client), service)
        .with_upgrades();
    let upstream = upstream.with_upgrades();
    tokio::pin!(serving, upstream);
    let upgraded = || upgrades.lock().expect("nobody panics while holding it").take();
    tokio::select! {
        served = &mut serving => {
            served.map_err(ProxyError::Client)?;
            match upgraded() {
                Some(sides) => tokio::join!(upstream, join(sides)).0.map_err(ProxyError::Upstream),
                None => Ok(()),
            }
        }
        ended = &mut upstream => {
            // The host has closed or upgraded the connection. Close the client's side too, so that its next request
            // opens a new one.
            serving.as_mut().graceful_shutdown();
            serving.await.map_err(ProxyError::Client)?;
            if let Some(sides) = upgraded() {
                join(sides).await;
            }
            ended.map_err(ProxyError::Upstream)
        }
    }
}

async fn over_http2<C, S, T>(client: C, server: S, site: Arc<T>) -> Result<(), ProxyError>
where
    C: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    T: Site,
{
    // hyper serves each stream in a task; they all end with this connection.
    let tasks = Tasks::default();
    let _end = EndWith(tasks.clone());
    let (sender, upstream) = http2::Builder::new(tasks.clone())
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .handshake::<_, Body>(TokioIo::new(server))
        .await
        .map_err(ProxyError::Upstream)?;
    let sender = Sender::Http2(sender);
    let service = hyper::service::service_fn(move |request| {
        let (sender, site) = (sender.clone(), site.clone());
        async move { Ok::<_, Infallible>(one(request, sender, site, Upgrades::default()).await) }
    });
    let serving = hyper::server::conn::http2::Builder::new(tasks)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_concurrent_streams(STREAMS_MAX)
        .max_header_list_size(HEAD_BYTES_MAX as u32)
        .timer(TokioTimer::new())
        .serve_connection(TokioIo::new(client), service);
    tokio::pin!(serving, upstream);
    tokio::select! {
        served = &mut serving => served.map_err(ProxyError::Client),
        ended = &mut upstream => {
            serving.as_mut().graceful_shutdown();
            serving.await.map_err(ProxyError::Client)?;
            ended.map_err(ProxyError::Upstream)
        }
    }
}

/// The tasks of one HTTP/2 connection.
#[derive(Clone, Default)]
struct Tasks(Arc<Mutex<JoinSet<()>>>);

impl<F> hyper::rt::Executor<F> for Tasks
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, future: F) {
        let mut tasks = self.0.lock().expect("nobody panics while holding it");
        // Those that have ended are dropped here, so that a long connection keeps few of them.
        while tasks.try_join_next().is_some() {}
        tasks.spawn(async move {
            future.await;
        });
    }
}

/// Ends the tasks when it is dropped. Each task may hold a [`Tasks`], so dropping those would not end anything.
struct EndWith(Tasks);

impl Drop for EndWith {
    fn drop(&mut self) {
        self.0.0.lock().expect("nobody panics while holding it").abort_all();
    }
}

/// The connection to the host.
#[derive(Clone)]
enum Sender {
    /// One request at a time.
    Http1(Arc<tokio::sync::Mutex<http1::SendRequest<Body>>>),
    /// Many at a time.
    Http2(http2::SendRequest<Body>),
}

impl Sender {
    fn speaks(&self) -> Speaks {
        match self {
            Self::Http1(_) => Speaks::Http1,
            Self::Http2(_) => Speaks::Http2,
        }
    }

    async fn send(self, request: Request<Body>) -> Result<Response<Incoming>, hyper::Error> {
        match self {
            Self::Http1(sender) => {
                let mut sender = sender.lock_owned().await;
                sender.ready().await?;
                sender.send_request(request).await
            }
            Self::Http2(mut sender) => {
                sender.ready().await?;
                sender.send_request(request).await
            }
        }
    }
}

/// One request and its answer.
async fn one<T: Site>(
    request: Request<Incoming>,
    sender: Sender,
    site: Arc<T>,
    upgrades: Upgrades,
) -> Response<Body> {
    let (speaks, site) = (sender.speaks(), &site);
    let refuse = |status, why: &str| {
        site.refused(why);
        refusal(status, why, speaks)
    };
    let peer = Peer { name: Some(site.name()), port: site.port(), scheme: "https" };
    let (parts, body) = request.into_parts();
    if let Err(bad) = check(&parts.method, &parts.uri, parts.version, &parts.headers, peer) {
        return refuse(bad.status(), &bad.to_string());
    }
    let trailers = parts.headers.get(TE).is_some_and(|te| te.as_bytes().eq_ignore_ascii_case(b"trailers"));
    let upgrade = parts.headers.contains_key(UPGRADE) && speaks == Speaks::Http1;
    let mut request = Request::from_parts(parts, body);
    let client_side = upgrade.then(|| hyper::upgrade::on(&mut request));
    address(&mut request, site.as_ref(), speaks, upgrade);
    if trailers {
        request.headers_mut().insert(TE, HeaderValue::from_static("trailers"));
    }
    let (mut parts, body) = request.into_parts();
    let path = parts.uri.path().to_owned();
    let vault = site.vault();
    let applied = match vault.apply(site.name(), site.port(), &mut parts) {
        Ok(applied) => applied,
        Err(why @ Refusal::Method(_)) => return refuse(StatusCode::METHOD_NOT_ALLOWED, &why.to_string()),
        Err(why) => return refuse(StatusCode::FORBIDDEN, &why.to_string()),
    };
    let carries = !applied.used.is_empty() || !applied.perhaps.is_empty();
    if carries && !site.can_record() {
        let why = "the record of used credentials is full: the daemon is away";
        return refuse(StatusCode::SERVICE_UNAVAILABLE, why);
    }
    let stopped: Stopped = Arc::default();
    let Applied { used, perhaps, in_body, not_in_body, masked } = applied;
    let body = Replaced::new(body, in_body, not_in_body);
    let replaced = body.replaced();
    let mut ticket = Ticket {
        site: Arc::clone(site),
        used: used.into_iter().map(|credential| site.used(credential)).collect(),
        perhaps: perhaps.into_iter().map(|credential| site.used(credential)).collect(),
        replaced,
        sent: Arc::default(),
        received: 0,
    };
    ticket.of(&parts, &path);
    let sent = Arc::clone(&ticket.sent);
    let noted = Arc::clone(&stopped);
    let body = body.map_err(move |error| {
        if let crate::credential::BodyError::Refused(why) = &error {
            *noted.lock().expect("nobody panics while holding it") = Some(why.to_string());
        }
        Broken(error.to_string())
    });
    let body = Counted { body: body.boxed(), count: sent }.boxed();
    let body = match with_length(&mut parts, body, !ticket.perhaps.is_empty()).await {
        Ok(body) => body,
        Err(error) => {
            return match stopped.lock().expect("nobody panics while holding it").take() {
                Some(why) => refuse(StatusCode::FORBIDDEN, &why),
                None => {
                    tracing::debug!(%error, "the sandbox did not send the body of its request");
                    refusal(StatusCode::BAD_REQUEST, "the body of the request is incomplete", speaks)
                }
            };
        }
    };
    let answered = sender.send(Request::from_parts(parts, body)).await;
    let mut response = match answered {
        Ok(response) => response,
        Err(error) => {
            if let Some(why) = stopped.lock().expect("nobody panics while holding it").take() {
                return refuse(StatusCode::FORBIDDEN, &why);
            }
            tracing::debug!(%error, "the host did not answer");
            return refusal(
                StatusCode::BAD_GATEWAY,
                "the host ended the connection without an answer",
                speaks,
            );
        }
    };
    ticket.answered(response.status());
    cover(&mut response, &masked);
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let Some(client_side) = client_side else {
            return refusal(
                StatusCode::BAD_GATEWAY,
                "the host changed the protocol without being asked",
                speaks,
            );
        };
        let server_side = hyper::upgrade::on(&mut response);
        *upgrades.lock().expect("nobody panics while holding it") = Some((client_side, server_side));
        return response.map(|body| body.map_err(broken).boxed());
    }
    for header in HOP_BY_HOP {
        response.headers_mut().remove(header);
    }
    response.map(|body| {
        let body = Masked::new(body.map_err(broken), masked);
        Recorded { body, ticket }.boxed()
    })
}

fn broken(error: hyper::Error) -> Broken {
    Broken(error.to_string())
}

type Stopped = Arc<Mutex<Option<String>>>;

/// Turns a request to us into one to the host.
fn address<T: Site>(request: &mut Request<Incoming>, site: &T, speaks: Speaks, upgrade: bool) {
    let host = match site.port() {
        443 => site.name().to_string(),
        port => format!("{}:{port}", site.name()),
    };
    if !request.headers().contains_key(HOST)
        && let Ok(host) = HeaderValue::from_str(&host)
    {
        request.headers_mut().insert(HOST, host);
    }
    prepare(request, Some(site.name()), site.port(), upgrade);
    // The answer to it comes from hyper, as soon as the body is read.
    request.headers_mut().remove(EXPECT);
    match speaks {
        Speaks::Http1 => *request.version_mut() = Version::HTTP_11,
        Speaks::Http2 => {
            request.headers_mut().remove(HOST);
            let mut parts = request.uri().clone().into_parts();
            parts.scheme = Some(Scheme::HTTPS);
            parts.authority = host.parse::<Authority>().ok();
            parts.path_and_query = parts.path_and_query.or_else(|| Some(PathAndQuery::from_static("/")));
            if let Ok(uri) = Uri::from_parts(parts) {
                *request.uri_mut() = uri;
            }
            *request.version_mut() = Version::HTTP_2;
        }
    }
}

/// Gives a body whose length changes a new length if it is short, and none otherwise.
async fn with_length(parts: &mut Parts, body: Body, changes: bool) -> Result<Body, Broken> {
    if !changes {
        return Ok(body);
    }
    let announced = parts.headers.remove(CONTENT_LENGTH);
    let length = announced.and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    match length {
        Some(length) if length <= BODY_BUFFER_MAX => {
            let whole = body.collect().await?.to_bytes();
            parts.headers.insert(CONTENT_LENGTH, HeaderValue::from(whole.len()));
            Ok(Full::new(whole).map_err(|never| match never {}).boxed())
        }
        _ => Ok(body),
    }
}

/// Covers values in the headers of an answer.
fn cover(response: &mut Response<Incoming>, values: &[Value]) {
    for header in response.headers_mut().values_mut() {
        let mut bytes = header.as_bytes().to_vec();
        if mask(&mut bytes, values)
            && let Ok(covered) = HeaderValue::from_bytes(&bytes)
        {
            *header = covered;
        }
    }
}

fn refusal(status: StatusCode, why: &str, speaks: Speaks) -> Response<Body> {
    let body = Full::new(Bytes::from(format!("Refused by Shoal: {why}\n")));
    let mut response = Response::new(body.map_err(|never| match never {}).boxed());
    *response.status_mut() = status;
    response.headers_mut().insert("shoal-policy", HeaderValue::from_static("denied"));
    if speaks == Speaks::Http1 {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// The records of one request, stored when its answer has passed or broken.
struct Ticket<T: Site> {
    site: Arc<T>,
    used: Vec<Used>,
    /// For credentials that only the body may carry, in the order of `replaced`.
    perhaps: Vec<Used>,
    replaced: Arc<[AtomicBool]>,
    sent: Arc<AtomicU64>,
    received: u64,
}

impl<T: Site> Ticket<T> {
    fn of(&mut self, parts: &Parts, path: &str) {
        for used in self.used.iter_mut().chain(&mut self.perhaps) {
            used.method = parts.method.to_string();
            used.path = path.to_owned();
        }
    }

    fn answered(&mut self, status: StatusCode) {
        for used in self.used.iter_mut().chain(&mut self.perhaps) {
            used.status = status.as_u16();
        }
    }
}

impl<T: Site> Drop for Ticket<T> {
    fn drop(&mut self) {
        let known: Vec<u128> = self.used.iter().map(|used| used.secret).collect();
        let replaced = self.perhaps.drain(..).zip(self.replaced.iter());
        let replaced = replaced
            .filter(|(used, replaced)| replaced.load(Ordering::Relaxed) && !known.contains(&used.secret));
        self.used.extend(replaced.map(|(used, _)| used));
        for mut used in self.used.drain(..) {
            (used.sent, used.received) = (self.sent.load(Ordering::Relaxed), self.received);
            self.site.record(used);
        }
    }
}

/// A body whose bytes are counted.
struct Counted {
    body: Body,
    count: Arc<AtomicU64>,
}

impl HttpBody for Counted {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(bytes) = frame.data_ref()
        {
            self.count.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of an answer, at whose end the request is recorded.
struct Recorded<B, T: Site> {
    body: B,
    ticket: Ticket<T>,
}

impl<B, T: Site> HttpBody for Recorded<B, T>
where
    B: HttpBody<Data = Bytes, Error = Broken> + Unpin,
{
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(bytes) = frame.data_ref()
        {
            self.ticket.received += bytes.len() as u64;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
