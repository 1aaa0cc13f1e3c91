//! Ports of sandboxes: which are open, requests to them by path, tunnels, and links.

use std::time::Duration;

use axum::Json as Answer;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use axum::extract::{RawPathParams, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use axum::{Extension, body::Bytes};
use engine::port::{PortStream, WAIT_SECONDS_MAX};
use engine::{EngineError, Link, LinkSpec, OpenPort, Port};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tracing::Instrument;
use utoipa::IntoParams;
use wire::{LinkId, SandboxId, api};

use crate::http::app::{App, Arrival, Caller};
use crate::http::body::{Json, Query, SandboxPath};
use crate::http::clock::rfc3339;
use crate::http::error::ApiError;
use crate::http::port_names::Named;
use crate::http::websocket::{bounded, needs_upgrade};
use crate::ports::{self, ByPath, CHUNK, Grant, Token};

/// How long a link works if nothing else is asked for.
const TTL_DEFAULT: Duration = Duration::from_secs(3600);
/// How long a request waits for a port if nothing else is asked for.
const WAIT_DEFAULT: Duration = Duration::from_secs(30);
/// The longest message of a tunnel's client.
const TUNNEL_MESSAGE_MAX: usize = 1 << 20;
/// The text message by which either side of a tunnel says that it sends nothing more.
const TUNNEL_END: &str = "end";
/// How often the client of a tunnel is pinged, so that a client that is gone is noticed.
const PING_INTERVAL: Duration = Duration::from_secs(20);

/// What to wait for.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct PortParams {
    /// Wait until a program listens on this port, and list only this port.
    wait: Option<u16>,
    /// How long to wait, at most 3600; 30 by default.
    wait_seconds: Option<f64>,
}

/// The ports that programs in a sandbox listen on.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/ports", tag = "ports",
    params(("sandbox" = String, Path, description = "The sandbox's id."), PortParams), responses(
    (status = 200, body = api::PortList),
    (status = 404, body = api::ErrorBody),
    (status = 409, body = api::ErrorBody),
    (status = 504, body = api::ErrorBody, description = "`port_closed`: nothing listened in time."),
))]
pub async fn list(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(id): SandboxPath,
    Query(params): Query<PortParams>,
    headers: HeaderMap,
) -> Result<Answer<api::PortList>, ApiError> {
    let ports = match params.wait {
        None => app.engine.listening_ports(&key.owner, id).await?,
        Some(port) => {
            let wait = seconds("wait_seconds", params.wait_seconds, WAIT_DEFAULT)?;
            if wait > Duration::from_secs(WAIT_SECONDS_MAX) {
                return Err(ApiError::must("wait_seconds", format!("be at most {WAIT_SECONDS_MAX}")));
            }
            let mut stopping = app.stopping(&key);
            let port = Port::new(port)?;
            let open = tokio::select! {
                open = app.engine.wait_for_port(&key.owner, id, port, wait) => open?,
                halt = stopping.wait() => return Err(halt.into()),
            };
            vec![open]
        }
    };
    let ports = ports.into_iter().map(|open| port_info(&app, id, open, &headers)).collect();
    Ok(Answer(api::PortList { ports }))
}

fn port_info(app: &App, sandbox: SandboxId, open: OpenPort, headers: &HeaderMap) -> api::PortInfo {
    let port = Port::new(open.port).ok();
    let url = port.and_then(|port| app.ports().url(Named { sandbox, port }, app.scheme(), headers));
    api::PortInfo {
        port: open.port,
        addresses: open.addresses,
        reachable: open.reachable,
        process: open.process.map(|process| api::PortProcess { pid: process.pid, name: process.name }),
        url,
    }
}

fn seconds(field: &str, given: Option<f64>, default: Duration) -> Result<Duration, ApiError> {
    let Some(given) = given else { return Ok(default) };
    Duration::try_from_secs_f64(given)
        .map_err(|_| ApiError::must(field, format!("be a number of seconds, got {given}")))
}

/// A request to a server in a sandbox, by path.
///
/// With any method, and for WebSockets too; the path after the port is the server's. Only the key's header opens it. The
/// answer is the server's own, with `Content-Security-Policy: sandbox`, without cookies, and without headers that would
/// act on other answers of this host.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/ports/{port}/{path}", tag = "ports", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("port" = u16, Path, description = "The port."),
    ("path" = String, Path, description = "The path that the server gets, with any number of slashes; may be empty."),
), responses(
    (status = 200, description = "Whatever the server answers."),
    (status = 404, body = api::ErrorBody),
    (status = 502, body = api::ErrorBody, description = "`port_closed`: nothing listens; `port_bad_answer`: no HTTP."),
    (status = 504, body = api::ErrorBody, description = "`port_stuck` or `port_late`: the server does not answer."),
))]
pub async fn forward(
    State(app): State<App>,
    Caller(key): Caller,
    params: RawPathParams,
    mut request: Request,
) -> Result<Response, ApiError> {
    let named = named(&params)?;
    let prefix = format!("/v1/sandboxes/{}/ports/{}", named.sandbox, named.port);
    if !ports::strip_prefix(&mut request, &prefix) {
        return Err(ApiError::no_route());
    }
    ports::by_path(&app, named, Grant::of_key(&app, &key), ByPath { prefix }, request).await
}

fn named(params: &RawPathParams) -> Result<Named, ApiError> {
    let param = |name: &str| params.iter().find(|(key, _)| *key == name).map_or("", |(_, value)| value);
    let id = param("sandbox");
    let sandbox = id.parse().map_err(|_| EngineError::SandboxNotFound { id: engine::shown(id) })?;
    Ok(Named { sandbox, port: Port::parse(param("port"))? })
}

/// A TCP connection to a port of a sandbox, in a WebSocket.
///
/// Binary messages carry bytes; their boundaries have no meaning. A text message `end` says that its sender sends nothing more. The
/// daemon closes with 1000 when both sides have ended, and with 1012 when it stops.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/tunnels/{port}", tag = "ports", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("port" = u16, Path, description = "The port."),
), responses(
    (status = 101, description = "A WebSocket: bytes in binary messages, in both directions."),
    (status = 404, body = api::ErrorBody),
    (status = 426, body = api::ErrorBody),
    (status = 502, body = api::ErrorBody, description = "`port_closed`: nothing listens."),
))]
pub async fn tunnel(
    State(app): State<App>,
    Caller(key): Caller,
    params: RawPathParams,
    arrival: Option<Extension<Arrival>>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let upgrade = upgrade.map_err(needs_upgrade)?;
    let named = named(&params)?;
    // Before the upgrade, so that a port that is closed is an error and not a connection that ends.
    let stream = app.engine.connect_port(&key.owner, named.sandbox, named.port).await?;
    let mut stopping = app.stopping(&key);
    let session = move |socket: WebSocket| async move {
        let _place = arrival;
        let (sink, messages) = socket.split();
        let (read, write) = tokio::io::split(stream);
        let mut outgoing = Outgoing { sink, read };
        let code = tokio::select! {
            code = carry(&mut outgoing, messages, write) => code,
            halt = stopping.wait() => match halt {
                crate::http::app::Halt::Daemon => Some(close_code::RESTART),
                crate::http::app::Halt::Key => Some(close_code::POLICY),
            },
        };
        if let Some(code) = code {
            let frame = CloseFrame { code, reason: "".into() };
            // A client that is gone needs no farewell.
            let farewell = outgoing.sink.send(Message::Close(Some(frame)));
            let _ = tokio::time::timeout(PING_INTERVAL, farewell).await;
        }
    };
    let span = tracing::Span::current();
    Ok(bounded(upgrade, TUNNEL_MESSAGE_MAX).on_upgrade(move |socket| session(socket).instrument(span)))
}

struct Outgoing {
    sink: SplitSink<WebSocket, Message>,
    read: ReadHalf<PortStream>,
}

/// Carries bytes both ways until both sides have ended. Returns the code to close with, if the client is still there.
async fn carry(
    outgoing: &mut Outgoing,
    mut messages: SplitStream<WebSocket>,
    mut write: WriteHalf<PortStream>,
) -> Option<u16> {
    let from_client = into_sandbox(&mut messages, &mut write);
    let to_client = out_of_sandbox(outgoing);
    tokio::pin!(from_client, to_client);
    let (mut client_ended, mut server_ended) = (false, false);
    while !(client_ended && server_ended) {
        tokio::select! {
            ended = &mut from_client, if !client_ended => match ended {
                Side::Ended => client_ended = true,
                Side::Gone => return None,
                Side::Broken => return Some(close_code::ERROR),
            },
            ended = &mut to_client, if !server_ended => match ended {
                Side::Ended => server_ended = true,
                Side::Gone => return None,
                Side::Broken => return Some(close_code::ERROR),
            },
        }
    }
    Some(close_code::NORMAL)
}

/// How one direction has ended.
enum Side {
    /// Its sender has sent everything.
    Ended,
    /// The client has left.
    Gone,
    /// The server in the sandbox has broken the connection.
    Broken,
}

async fn into_sandbox(messages: &mut SplitStream<WebSocket>, write: &mut WriteHalf<PortStream>) -> Side {
    loop {
        let written = match messages.next().await {
            Some(Ok(Message::Binary(bytes))) => write.write_all(&bytes).await,
            Some(Ok(Message::Text(text))) if text.as_str() == TUNNEL_END => {
                // A server that has closed its end already needs not be told.
                let _ = write.shutdown().await;
                return Side::Ended;
            }
            Some(Ok(Message::Text(_))) => return Side::Broken,
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => Ok(()),
            Some(Ok(Message::Close(_)) | Err(_)) | None => return Side::Gone,
        };
        if written.is_err() {
            return Side::Broken;
        }
    }
}

async fn out_of_sandbox(Outgoing { sink, read }: &mut Outgoing) -> Side {
    let mut pings = tokio::time::interval(PING_INTERVAL);
    let mut buffer = vec![0; CHUNK];
    loop {
        let message = tokio::select! {
            length = read.read(&mut buffer) => match length {
                Ok(0) => Message::Text(TUNNEL_END.into()),
                Ok(length) => Message::Binary(Bytes::copy_from_slice(&buffer[..length])),
                Err(_) => return Side::Broken,
            },
            _ = pings.tick() => Message::Ping(Bytes::new()),
        };
        let ended = matches!(message, Message::Text(_));
        if sink.send(message).await.is_err() {
            return Side::Gone;
        }
        if ended {
            return Side::Ended;
        }
    }
}

/// Makes a link to a port.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/links", tag = "ports",
    params(("sandbox" = String, Path, description = "The sandbox's id.")),
    request_body = api::CreateLink, responses(
    (status = 201, body = api::CreatedLink),
    (status = 400, body = api::ErrorBody),
    (status = 403, body = api::ErrorBody, description = "`public_ports_off`: the operator does not allow public ports."),
    (status = 404, body = api::ErrorBody),
))]
pub async fn create_link(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(id): SandboxPath,
    headers: HeaderMap,
    Json(body): Json<api::CreateLink>,
) -> Result<(StatusCode, Answer<api::CreatedLink>), ApiError> {
    let api::CreateLink { port, ttl_seconds, methods, label, public } = body;
    if public && !app.ports().public {
        return Err(ApiError::new(
            StatusCode::FORBIDDEN,
            "public_ports_off",
            "the operator of this daemon does not allow public ports",
        )
        .hint(
            "leave `public` out for a link with a token, or set `public_ports = true` in the configuration",
        ));
    }
    let port = Port::new(port)?;
    let ttl = seconds("ttl_seconds", ttl_seconds, TTL_DEFAULT)?;
    let url = app.ports().url(Named { sandbox: id, port }, app.scheme(), &headers).ok_or_else(|| {
        ApiError::new(StatusCode::CONFLICT, "ports_url_needed", "ports of this daemon have no host names")
            .hint("set `ports_url` in the daemon's configuration, or ask the daemon on its own machine")
    })?;
    let spec = LinkSpec { port, label, methods, ttl, public };
    let (link, token) = app.engine.create_link(&key, id, spec).await?;
    let token = token.map(|token| Token::of(&token).0);
    let url = match &token {
        Some(token) => format!("{url}/?{}={token}", ports::TOKEN_PARAMETER),
        None => format!("{url}/"),
    };
    Ok((StatusCode::CREATED, Answer(api::CreatedLink { link: to_api(link), url, token })))
}

fn to_api(link: Link) -> api::PortLink {
    api::PortLink {
        id: link.id,
        sandbox_id: link.sandbox,
        port: link.port.number(),
        label: link.label,
        methods: link.methods,
        public: link.public,
        created_at: rfc3339(link.created_at),
        expires_at: rfc3339(link.expires_at),
    }
}

/// The links to a sandbox's ports that still work.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/links", tag = "ports",
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 200, body = api::LinkList),
    (status = 404, body = api::ErrorBody),
))]
pub async fn links(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(id): SandboxPath,
) -> Result<Answer<api::LinkList>, ApiError> {
    let links = app.engine.links(&key.owner, id)?.into_iter().map(to_api).collect();
    Ok(Answer(api::LinkList { links }))
}

/// Revokes a link. Its open connections end too.
#[utoipa::path(delete, path = "/v1/sandboxes/{sandbox}/links/{link}", tag = "ports", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("link" = String, Path, description = "The link's id."),
), responses(
    (status = 204),
    (status = 404, body = api::ErrorBody),
))]
pub async fn revoke_link(
    State(app): State<App>,
    Caller(key): Caller,
    params: RawPathParams,
) -> Result<StatusCode, ApiError> {
    let param = |name: &str| params.iter().find(|(key, _)| *key == name).map_or("", |(_, value)| value);
    let (sandbox, link) = (param("sandbox"), param("link"));
    let id: SandboxId =
        sandbox.parse().map_err(|_| EngineError::SandboxNotFound { id: engine::shown(sandbox) })?;
    let link: LinkId = link.parse().map_err(|_| EngineError::LinkNotFound { id: engine::shown(link) })?;
    app.engine.revoke_link(&key.owner, id, link).await?;
    Ok(StatusCode::NO_CONTENT)
}
