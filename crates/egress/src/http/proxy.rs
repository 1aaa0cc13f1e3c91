//! Plain HTTP/1 between a sandbox and the host that its connection was opened to, request by request.
//!
//! hyper reads and writes both sides, so both sides agree on each message: nothing can be smuggled past the check
//! through message framing.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::header::{CONNECTION, HOST, HeaderName, UPGRADE};
use http::{HeaderValue, Request, Response, StatusCode, Uri};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};

use super::check::{BadRequest, Peer, check};
use super::head::HEAD_BYTES_MAX;
use crate::policy::Name;

/// How long a client may take for the head of a request.
pub(super) const HEAD_DEADLINE: std::time::Duration = std::time::Duration::from_secs(60);
/// Headers for one hop only (RFC 9110, 7.6.1). `Upgrade` is put back for WebSocket.
pub(super) const HOP_BY_HOP: [&str; 5] = ["connection", "proxy-connection", "keep-alive", "te", "upgrade"];

/// Why a proxied connection ended.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// The sandbox's side.
    #[error("the connection of the sandbox broke")]
    Client(#[source] hyper::Error),
    /// The other side.
    #[error("the connection to the host broke")]
    Upstream(#[source] hyper::Error),
}

/// Looks at the head of each request and says why it must not pass.
pub type Guard = Arc<dyn Fn(&http::request::Parts) -> Result<(), String> + Send + Sync>;

/// The reason if a request was refused, for events.
pub type Refused = Arc<Mutex<Option<BadRequest>>>;

/// Serves the requests of one connection until it ends. The first refused request also ends it.
pub async fn proxy<C, S>(
    client: C,
    server: S,
    name: Option<Name>,
    port: u16,
    guard: Guard,
    refused: Refused,
) -> Result<(), ProxyError>
where
    C: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, upstream) = hyper::client::conn::http1::Builder::new()
        .preserve_header_case(true)
        .max_buf_size(HEAD_BYTES_MAX)
        .handshake::<_, Incoming>(TokioIo::new(server))
        .await
        .map_err(ProxyError::Upstream)?;
    let sender = Arc::new(tokio::sync::Mutex::new(sender));
    let upgrades = Upgrades::default();
    let pending = upgrades.clone();
    let service = hyper::service::service_fn(move |request| {
        let (sender, name, refused, pending, guard) =
            (sender.clone(), name.clone(), refused.clone(), pending.clone(), guard.clone());
        async move {
            let peer = Peer { name: name.as_ref(), port, scheme: "http" };
            Ok::<_, Infallible>(one(request, &sender, peer, &guard, &refused, &pending).await)
        }
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
    // An upgraded connection runs here too, so that it ends with this future.
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
            // Upstream has closed or upgraded: its last bytes are still on their way to the client.
            serving.await.map_err(ProxyError::Client)?;
            if let Some(sides) = upgraded() {
                join(sides).await;
            }
            ended.map_err(ProxyError::Upstream)
        }
    }
}

/// The two sides of a connection that is no longer HTTP.
pub(super) type Sides = (hyper::upgrade::OnUpgrade, hyper::upgrade::OnUpgrade);
pub(super) type Upgrades = Arc<Mutex<Option<Sides>>>;

type Body = BoxBody<Bytes, hyper::Error>;

async fn one(
    request: Request<Incoming>,
    sender: &tokio::sync::Mutex<SendRequest<Incoming>>,
    peer: Peer<'_>,
    guard: &Guard,
    refused: &Refused,
    upgrades: &Upgrades,
) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let checked = check(&parts.method, &parts.uri, parts.version, &parts.headers, peer)
        .and_then(|()| guard(&parts).map_err(BadRequest::Stopped));
    let mut request = Request::from_parts(parts, body);
    if let Err(bad) = checked {
        let response = closing(bad.status(), &bad.to_string());
        *refused.lock().expect("nobody panics while holding it") = Some(bad);
        return response;
    }
    let upgrade = request.headers().get(UPGRADE).cloned();
    prepare(&mut request, peer.name, peer.port, upgrade.is_some());
    let client_side = upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
    let answered = {
        let mut sender = sender.lock().await;
        match sender.ready().await {
            Ok(()) => sender.send_request(request).await,
            Err(e) => Err(e),
        }
    };
    let mut response = match answered {
        Ok(response) => response,
        Err(error) => {
            tracing::debug!(%error, "upstream did not answer");
            return closing(StatusCode::BAD_GATEWAY, "the host ended the connection without an answer");
        }
    };
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let Some(client_side) = client_side else {
            return closing(StatusCode::BAD_GATEWAY, "the host changed the protocol without being asked");
        };
        let server_side = hyper::upgrade::on(&mut response);
        *upgrades.lock().expect("nobody panics while holding it") = Some((client_side, server_side));
        return response.map(|body| body.boxed());
    }
    for header in HOP_BY_HOP {
        response.headers_mut().remove(header);
    }
    response.map(|body| body.boxed())
}

/// Turns a request to us into one to the host: origin form, and no hop-by-hop header.
pub(super) fn prepare<B>(request: &mut Request<B>, name: Option<&Name>, port: u16, upgrade: bool) {
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    if let Ok(uri) = path.parse::<Uri>() {
        *request.uri_mut() = uri;
    }
    let also: Vec<HeaderName> = request
        .headers()
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|word| word.trim().parse().ok())
        .filter(|header| *header != HOST)
        .collect();
    let kept = request.headers().get(UPGRADE).cloned().filter(|_| upgrade);
    let headers = request.headers_mut();
    for header in also {
        headers.remove(header);
    }
    for header in HOP_BY_HOP {
        headers.remove(header);
    }
    if let Some(kept) = kept {
        headers.insert(UPGRADE, kept);
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    }
    if let (Some(name), false) = (name, headers.contains_key(HOST)) {
        let host = if port == 80 { name.to_string() } else { format!("{name}:{port}") };
        if let Ok(host) = HeaderValue::from_str(&host) {
            headers.insert(HOST, host);
        }
    }
}

/// A refusal that also ends the connection.
fn closing(status: StatusCode, why: &str) -> Response<Body> {
    let body = Full::new(Bytes::from(format!("Refused by Shoal: {why}\n"))).map_err(|never| match never {});
    let mut response = Response::new(body.boxed());
    *response.status_mut() = status;
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response.headers_mut().insert("shoal-policy", HeaderValue::from_static("denied"));
    response
}

/// Copies between the two sides of a WebSocket.
pub(super) async fn join((client, server): Sides) {
    match tokio::try_join!(client, server) {
        Ok((client, server)) => {
            let (mut client, mut server) = (TokioIo::new(client), TokioIo::new(server));
            if let Err(error) = tokio::io::copy_bidirectional(&mut client, &mut server).await {
                tracing::debug!(%error, "a WebSocket broke");
            }
        }
        Err(error) => tracing::debug!(%error, "cannot upgrade a connection"),
    }
}
