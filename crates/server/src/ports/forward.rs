//! One HTTP request, from a client to a server in a sandbox and back.
//!
//! Each request has a connection of its own, so that no answer can be taken for another's. Towards the guest it is
//! HTTP/1.1; gRPC, and requests of clients that speak HTTP/2 without TLS, go on as HTTP/2. A connection that both sides
//! upgrade, such as a WebSocket, becomes a plain exchange of bytes.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::uri::PathAndQuery;
use axum::http::{HeaderValue, StatusCode, Uri, Version, header};
use axum::response::Response;
use engine::port::PortStream;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::task::JoinHandle;
use tracing::Instrument;

use super::grant::Grant;
use super::headers::{self, Origin};
use super::relay;
use crate::http::app::{App, Arrival};
use crate::http::error::ApiError;
use crate::http::origin::Host;
use crate::http::port_names::Named;

/// How long a server may take until its answer begins. Long, because some calls wait for something to happen.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(600);
/// The most headers of an answer.
const HEADERS_MAX: usize = 256;
/// The longest head of an answer.
const HEAD_BYTES_MAX: usize = 256 << 10;

/// How a request reached the daemon.
pub enum Form {
    /// By the host name of the port.
    Host {
        /// The name.
        host: Host,
    },
    /// By a path below the API.
    Path(ByPath),
}

/// A request by a path below the API.
pub struct ByPath {
    /// The path up to the port, without a slash at its end.
    pub prefix: String,
}

/// The host that a request by host name is for.
pub fn host_of(request: &Request) -> Option<Host> {
    Host::parse(request.headers().get(header::HOST)?.to_str().ok()?)
}

/// Removes `prefix`, which names the port, from the path of a request by path. The rest stays as it was written: a
/// guest may tell `%2F` from a slash. Returns false if the path does not begin with the prefix as written here.
pub fn strip_prefix(request: &mut Request, prefix: &str) -> bool {
    let target = request.uri().path_and_query().map_or("", |target| target.as_str());
    let Some(rest) = target.strip_prefix(prefix) else { return false };
    let rest = if rest.starts_with('/') { rest.to_owned() } else { format!("/{rest}") };
    let Ok(path) = rest.parse::<PathAndQuery>() else { return false };
    *request.uri_mut() = path.into();
    true
}

/// Passes on a request by path. `request` has the path that the guest is to see.
pub async fn by_path(
    app: &App,
    named: Named,
    grant: Grant,
    path: ByPath,
    mut request: Request,
) -> Result<Response, ApiError> {
    // The key was checked before, and is in one of these.
    let headers = request.headers_mut();
    headers::take_keys(headers, |text| app.engine.authenticate(text));
    headers::take_tokens(headers);
    headers.remove(header::COOKIE);
    forward(app, named, grant, Form::Path(path), request).await
}

/// Passes on a request, from which everything that was meant for the daemon was removed.
pub async fn forward(
    app: &App,
    named: Named,
    mut grant: Grant,
    form: Form,
    mut request: Request,
) -> Result<Response, ApiError> {
    let upgrade = upgrade_of(&request);
    if upgrade.is_some() && grant.limited {
        return Err(ApiError::new(
            StatusCode::FORBIDDEN,
            "method_not_allowed_by_link",
            "this link allows some methods only, and a WebSocket could carry anything",
        ));
    }
    let stream = app.engine.connect_port(&grant.owner, named.sandbox, named.port).await?;
    let client = upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
    let arrival = request.extensions().get::<Arrival>().cloned();
    let speaks_http2 = wants_http2(app, &request);
    let outgoing = outgoing(app, named, &form, request, upgrade.as_ref(), speaks_http2)?;
    let mut stopping = app.daemon_stopping();
    let (mut response, connection) = tokio::select! {
        answered = tokio::time::timeout(ANSWER_TIME_MAX, exchange(stream, outgoing, speaks_http2)) => match answered {
            Ok(answered) => answered.map_err(|error| bad_answer(named, &error))?,
            Err(_) => return Err(late(named)),
        },
        () = grant.end.wait() => return Err(ended()),
        _ = stopping.wait_for(|stopping| *stopping) => return Err(ApiError::stopping()),
    };
    let server = hyper::upgrade::on(&mut response);
    let (mut head, body) = response.into_parts();
    head.extensions.clear();
    head.version = Version::HTTP_11;
    let protocol = head.headers.get(header::UPGRADE).cloned();
    match &form {
        Form::Host { .. } => headers::tame(&mut head.headers),
        Form::Path(path) => {
            headers::confine(&mut head.headers, &path.prefix);
            head.headers.insert(headers::ANSWERED, HeaderValue::from(named.port.number()));
        }
    }
    if head.status == StatusCode::SWITCHING_PROTOCOLS {
        let (Some(client), Some(protocol)) = (client, protocol) else {
            return Err(strange(named, "it changed the protocol, and was not asked to"));
        };
        head.headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        head.headers.insert(header::UPGRADE, protocol);
        return Ok(switch(app, grant, arrival, client, server, head, connection));
    }
    let app = app.clone();
    let over = async move {
        let mut stopping = app.daemon_stopping();
        tokio::select! {
            () = grant.end.wait() => {}
            _ = stopping.wait_for(|stopping| *stopping) => {}
        }
    };
    let body = Passed { body, over: Box::pin(over), _connection: connection };
    Ok(Response::from_parts(head, Body::new(body)))
}

/// The protocol that a client of HTTP/1.1 wants to change to.
fn upgrade_of(request: &Request) -> Option<HeaderValue> {
    let asks = request.headers().get_all(header::CONNECTION).iter().any(|value| {
        let mut names = value.to_str().unwrap_or_default().split(',');
        names.any(|name| name.trim().eq_ignore_ascii_case("upgrade"))
    });
    let protocol = request.headers().get(header::UPGRADE)?;
    // HTTP/2 is spoken from the first byte or not at all.
    let is_http2 = protocol.as_bytes().eq_ignore_ascii_case(b"h2c");
    (asks && !is_http2 && request.version() == Version::HTTP_11).then(|| protocol.clone())
}

/// Whether the guest is spoken to in HTTP/2.
fn wants_http2(app: &App, request: &Request) -> bool {
    let kind = request.headers().get(header::CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    let is_grpc = kind.len() >= 16 && kind[..16].eq_ignore_ascii_case(b"application/grpc");
    // Over TLS a browser speaks HTTP/2 by itself, whatever the server in the sandbox speaks.
    request.version() == Version::HTTP_2 && (is_grpc || app.scheme() == "http")
}

/// The request as the guest gets it.
fn outgoing(
    app: &App,
    named: Named,
    form: &Form,
    request: Request,
    upgrade: Option<&HeaderValue>,
    http2: bool,
) -> Result<Request, ApiError> {
    let peer = request.extensions().get::<Arrival>().map(|arrival| arrival.peer.ip());
    let (mut head, body) = request.into_parts();
    head.extensions.clear();
    let asked =
        head.headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default().to_owned();
    headers::remove_hop_by_hop(&mut head.headers);
    let (scheme, host, prefix) = match form {
        Form::Host { host } => (app.ports().scheme(host, app.scheme()), asked.clone(), None),
        Form::Path(path) => (app.scheme(), format!("localhost:{}", named.port), Some(path.prefix.as_str())),
    };
    headers::set_forwarded(&mut head.headers, &Origin { peer, scheme, host: &asked, prefix });
    if let Some(protocol) = upgrade {
        head.headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        head.headers.insert(header::UPGRADE, protocol.clone());
    }
    let path = head.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    let invalid = |_| ApiError::invalid("path", "it cannot be sent on");
    let host_value = HeaderValue::from_str(&host).map_err(|_| {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_host", "the `Host` header is not valid")
    })?;
    if http2 {
        head.headers.remove(header::HOST);
        let uri = Uri::builder().scheme("http").authority(host).path_and_query(path);
        head.uri = uri.build().map_err(invalid)?;
        head.version = Version::HTTP_2;
    } else {
        head.headers.insert(header::HOST, host_value);
        head.uri = Uri::builder().path_and_query(path).build().map_err(invalid)?;
        head.version = Version::HTTP_11;
    }
    Ok(Request::from_parts(head, body))
}

/// Ends the connection to the guest when it is dropped.
struct Connection(JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn exchange(
    stream: PortStream,
    request: Request,
    speaks_http2: bool,
) -> hyper::Result<(axum::http::Response<Incoming>, Connection)> {
    let stream = TokioIo::new(stream);
    // The connection ends with an error whenever one of the two sides leaves; what matters arrives with the answer.
    if speaks_http2 {
        let (mut sender, connection) = http2::handshake(TokioExecutor::new(), stream).await?;
        let connection = Connection(tokio::spawn(async move { drop(connection.await) }));
        return Ok((sender.send_request(request).await?, connection));
    }
    let mut builder = http1::Builder::new();
    builder.max_headers(HEADERS_MAX).max_buf_size(HEAD_BYTES_MAX);
    let (mut sender, connection) = builder.handshake(stream).await?;
    let connection = Connection(tokio::spawn(async move { drop(connection.with_upgrades().await) }));
    Ok((sender.send_request(request).await?, connection))
}

/// Lets bytes pass once both sides have changed to another protocol.
fn switch(
    app: &App,
    grant: Grant,
    arrival: Option<Arrival>,
    client: hyper::upgrade::OnUpgrade,
    server: hyper::upgrade::OnUpgrade,
    head: axum::http::response::Parts,
    connection: Connection,
) -> Response {
    let app = app.clone();
    let pass = async move {
        let _held = (arrival, connection);
        match tokio::try_join!(client, server) {
            Ok((client, server)) => {
                relay::copy(&app, grant.end, TokioIo::new(client), TokioIo::new(server)).await;
            }
            Err(error) => tracing::debug!(%error, "a connection did not change its protocol"),
        }
    };
    tokio::spawn(pass.in_current_span());
    Response::from_parts(head, Body::empty())
}

/// The body of an answer. Ends early when the daemon stops or the right to use the port has ended.
struct Passed {
    body: Incoming,
    over: Pin<Box<dyn Future<Output = ()> + Send>>,
    _connection: Connection,
}

impl HttpBody for Passed {
    type Data = Bytes;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if self.over.as_mut().poll(context).is_ready() {
            return Poll::Ready(Some(Err("the right to use the port has ended, or the daemon stops".into())));
        }
        Pin::new(&mut self.body).poll_frame(context).map(|frame| frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

fn bad_answer(named: Named, error: &hyper::Error) -> ApiError {
    tracing::debug!(%error, "a server in a sandbox gave no usable answer");
    match error {
        error if error.is_parse() || error.is_parse_too_large() => {
            strange(named, "it answered in something other than HTTP")
        }
        error if error.is_incomplete_message() || error.is_closed() => {
            strange(named, "it closed the connection without an answer")
        }
        _ => strange(named, "the connection to it broke"),
    }
}

fn strange(named: Named, what: &str) -> ApiError {
    let Named { sandbox, port } = named;
    let message = format!("the server on port {port} of sandbox `{sandbox}` gave no usable answer: {what}");
    ApiError::new(StatusCode::BAD_GATEWAY, "port_bad_answer", message)
        .detail("port", port.number())
        .hint("use `shoal forward` for servers that do not speak HTTP")
}

fn late(named: Named) -> ApiError {
    let Named { sandbox, port } = named;
    let (code, seconds) = ("port_late", ANSWER_TIME_MAX.as_secs());
    let message =
        format!("the server on port {port} of sandbox `{sandbox}` gave no answer within {seconds} s");
    ApiError::new(StatusCode::GATEWAY_TIMEOUT, code, message).detail("port", port.number())
}

fn ended() -> ApiError {
    ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", "the key or the link has ended")
}
