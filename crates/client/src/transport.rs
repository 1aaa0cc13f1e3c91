//! Bytes to and from the daemon: pooled HTTP/1.1 connections and WebSockets, plain or over TLS.

use std::error::Error;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use http::header::{self, HeaderName, HeaderValue};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Method, Request, StatusCode, Uri};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tower::ServiceExt;
use wire::api::ErrorBody;

use crate::error::{Cause, ClientError};

/// How long connecting may take.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// How long a WebSocket's handshake may take, with the connection.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// The longest answer that is read: output of 1 MiB twice, with each byte escaped.
const ANSWER_MAX: usize = 32 << 20;
/// The longest message that is read from a stream; the daemon sends 64 KiB of output at most.
const MESSAGE_MAX: usize = 1 << 20;
/// An unused connection is dropped before the daemon drops it.
const IDLE_MAX: Duration = Duration::from_secs(15);

/// The body of a request: all at once, or piece by piece.
pub type Body = UnsyncBoxBody<Bytes, Cause>;

/// A body in memory.
pub fn whole(bytes: Bytes) -> Body {
    Full::new(bytes).map_err(|never| match never {}).boxed_unsync()
}

/// A WebSocket to the daemon.
pub type Socket = WebSocketStream<TokioIo<MaybeHttpsStream<TokioIo<TcpStream>>>>;

/// How long to wait for an answer.
#[derive(Debug, Clone, Copy)]
pub enum Wait {
    /// At most this long.
    AtMost(Duration),
    /// No limit: the answer comes when a command ends.
    Forever,
}

/// One request, ready to be sent and sent again.
#[derive(Debug, Clone)]
pub struct Call {
    pub method: Method,
    pub path: String,
    pub body: Option<(&'static str, Bytes)>,
    pub headers: Vec<(HeaderName, HeaderValue)>,
    pub wait: Wait,
}

pub struct Transport {
    endpoint: RwLock<Endpoint>,
    key: HeaderValue,
    connector: HttpsConnector<HttpConnector>,
    http: legacy::Client<HttpsConnector<HttpConnector>, Body>,
    /// Whether the daemon has ever answered: only then is its absence likely to pass.
    reached: AtomicBool,
}

#[derive(Debug, Clone)]
struct Endpoint {
    scheme: Scheme,
    authority: Authority,
    /// The path prefix, without a trailing slash.
    prefix: String,
}

impl Transport {
    pub fn new(url: &str, key: &str) -> Result<Self, ClientError> {
        let endpoint = Endpoint::parse(url)?;
        let mut key = HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| ClientError::BadKey)?;
        key.set_sensitive(true);
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT_MAX));
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls_config(&endpoint.scheme)?)
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        let http = legacy::Client::builder(TokioExecutor::new())
            .pool_idle_timeout(IDLE_MAX)
            .pool_timer(hyper_util::rt::TokioTimer::new())
            .build(connector.clone());
        Ok(Self { endpoint: RwLock::new(endpoint), key, connector, http, reached: AtomicBool::new(false) })
    }

    pub fn move_to(&self, url: &str) -> Result<(), ClientError> {
        let endpoint = Endpoint::parse(url)?;
        *self.endpoint.write().unwrap_or_else(PoisonError::into_inner) = endpoint;
        Ok(())
    }

    pub fn url(&self) -> String {
        self.endpoint().url()
    }

    pub fn was_reached(&self) -> bool {
        self.reached.load(Ordering::Relaxed)
    }

    fn endpoint(&self) -> Endpoint {
        self.endpoint.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sends a call once. Returns the body of a successful answer, or the error.
    pub async fn send(&self, call: &Call) -> Result<Bytes, ClientError> {
        let url = self.url();
        let exchange = async {
            let response = self.request(call, None).await?;
            let status = response.status();
            Ok((status, self.short_body(response).await?))
        };
        let (status, body) = match call.wait {
            Wait::Forever => exchange.await?,
            Wait::AtMost(longest) => timeout(longest, exchange)
                .await
                .map_err(|_| ClientError::Late { url: url.clone(), seconds: longest.as_secs() })??,
        };
        if status.is_success() { Ok(body) } else { Err(refused(&url, status, &body)) }
    }

    /// Sends a call once, with a body that comes piece by piece if there is one. Returns the response after its head;
    /// its body may take any time. An error response is read completely.
    pub async fn stream(&self, call: &Call, body: Option<Body>) -> Result<Response<Incoming>, ClientError> {
        let response = self.request(call, body).await?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let url = self.url();
        let late = |_| ClientError::Late { url: url.clone(), seconds: HANDSHAKE_MAX.as_secs() };
        let body = timeout(HANDSHAKE_MAX, self.short_body(response)).await.map_err(late)??;
        Err(refused(&url, status, &body))
    }

    async fn request(&self, call: &Call, body: Option<Body>) -> Result<Response<Incoming>, ClientError> {
        let endpoint = self.endpoint();
        let url = endpoint.url();
        let mut request = Request::builder()
            .method(call.method.clone())
            .uri(endpoint.uri(&endpoint.scheme, &call.path)?)
            .header(header::AUTHORIZATION, self.key.clone());
        for (name, value) in &call.headers {
            request = request.header(name, value);
        }
        let mut bytes = Bytes::new();
        if let Some((content_type, given)) = &call.body {
            request = request.header(header::CONTENT_TYPE, *content_type);
            bytes = given.clone();
        }
        let body = body.unwrap_or_else(|| whole(bytes));
        let request = request.body(body).map_err(|error| bad_url(&url, error))?;
        let response = self.http.request(request).await.map_err(|error| {
            if error.is_connect() {
                not_connected(&url, &error)
            } else {
                let source = Cause::from(chain_end(&error).to_string());
                ClientError::Broken { url: url.clone(), source }
            }
        })?;
        self.reached.store(true, Ordering::Relaxed);
        Ok(response)
    }

    /// The whole body of an answer that is not a stream.
    async fn short_body(&self, response: Response<Incoming>) -> Result<Bytes, ClientError> {
        let body = Limited::new(response.into_body(), ANSWER_MAX).collect().await;
        let body = body.map_err(|error| {
            let url = self.url();
            if error.is::<LengthLimitError>() {
                ClientError::Strange { url, what: format!("it is longer than {ANSWER_MAX} bytes") }
            } else {
                ClientError::Broken { url, source: error }
            }
        })?;
        Ok(body.to_bytes())
    }

    /// Opens a WebSocket.
    pub async fn open(&self, path: &str) -> Result<Socket, ClientError> {
        let endpoint = self.endpoint();
        let url = endpoint.url();
        match timeout(HANDSHAKE_MAX, self.handshake(&endpoint, &url, path)).await {
            Ok(result) => result,
            Err(_) => Err(ClientError::Late { url, seconds: HANDSHAKE_MAX.as_secs() }),
        }
    }

    async fn handshake(&self, endpoint: &Endpoint, url: &str, path: &str) -> Result<Socket, ClientError> {
        let uri = endpoint.uri(&endpoint.scheme, path)?;
        let stream =
            self.connector.clone().oneshot(uri).await.map_err(|error| not_connected(url, error.as_ref()))?;
        let scheme = if endpoint.scheme == Scheme::HTTPS { "wss" } else { "ws" };
        let scheme = scheme.parse().expect("a constant that is a scheme");
        let request = Request::builder()
            .uri(endpoint.uri(&scheme, path)?)
            .header(header::HOST, endpoint.authority.as_str())
            .header(header::CONNECTION, "Upgrade")
            .header(header::UPGRADE, "websocket")
            .header(header::SEC_WEBSOCKET_VERSION, "13")
            .header(header::SEC_WEBSOCKET_KEY, tungstenite::handshake::client::generate_key())
            .header(header::AUTHORIZATION, self.key.clone())
            .body(())
            .map_err(|error| bad_url(url, error))?;
        let config = WebSocketConfig::default()
            .max_message_size(Some(MESSAGE_MAX))
            .max_frame_size(Some(MESSAGE_MAX))
            .write_buffer_size(0);
        let handshake =
            tokio_tungstenite::client_async_with_config(request, TokioIo::new(stream), Some(config));
        match handshake.await {
            Ok((socket, _)) => {
                self.reached.store(true, Ordering::Relaxed);
                Ok(socket)
            }
            Err(tungstenite::Error::Http(response)) => {
                let status = response.status();
                Err(refused(url, status, response.body().as_deref().unwrap_or_default()))
            }
            Err(error) => Err(ClientError::Broken { url: url.to_owned(), source: error.into() }),
        }
    }
}

impl Endpoint {
    fn parse(url: &str) -> Result<Self, ClientError> {
        let uri = url.parse::<Uri>().map_err(|error| bad_url(url, error))?;
        let parts = uri.into_parts();
        let (Some(scheme), Some(authority)) = (parts.scheme, parts.authority) else {
            return Err(bad_url(url, "it needs a scheme and a host"));
        };
        if scheme != Scheme::HTTP && scheme != Scheme::HTTPS {
            return Err(bad_url(url, "its scheme must be http or https"));
        }
        if authority.as_str().contains('@') {
            return Err(bad_url(url, "it must not contain a key; pass the key separately"));
        }
        let path = parts.path_and_query.unwrap_or_else(|| PathAndQuery::from_static("/"));
        if path.query().is_some() {
            return Err(bad_url(url, "it must not have a query"));
        }
        Ok(Self { scheme, authority, prefix: path.path().trim_end_matches('/').to_owned() })
    }

    fn url(&self) -> String {
        format!("{}://{}{}", self.scheme, self.authority, self.prefix)
    }

    fn uri(&self, scheme: &Scheme, path: &str) -> Result<Uri, ClientError> {
        Uri::builder()
            .scheme(scheme.clone())
            .authority(self.authority.clone())
            .path_and_query(format!("{}{path}", self.prefix))
            .build()
            .map_err(|error| bad_url(&self.url(), error))
    }
}

/// Certificates are loaded only when needed: reading them takes longer than most calls.
fn tls_config(scheme: &Scheme) -> Result<rustls::ClientConfig, ClientError> {
    let trust = |source: Cause| ClientError::Trust { source };
    let mut roots = rustls::RootCertStore::empty();
    if *scheme == Scheme::HTTPS {
        let found = rustls_native_certs::load_native_certs();
        let (added, _) = roots.add_parsable_certificates(found.certs);
        if added == 0 {
            let why = found.errors.into_iter().next().map_or_else(|| "there are none".into(), Cause::from);
            return Err(trust(why));
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| trust(error.into()))?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

fn bad_url(url: &str, source: impl Into<Cause>) -> ClientError {
    ClientError::BadUrl { url: url.to_owned(), source: source.into() }
}

fn refused(url: &str, status: StatusCode, body: &[u8]) -> ClientError {
    match serde_json::from_slice::<ErrorBody>(body) {
        Ok(body) => ClientError::Refused { status: Some(status.as_u16()), body: Box::new(body) },
        Err(_) => ClientError::Strange { url: url.to_owned(), what: format!("status {status}") },
    }
}

/// Tells a missing listener from an untrusted certificate, because the remedies differ.
fn not_connected(url: &str, error: &(dyn Error + 'static)) -> ClientError {
    let (text, insecure) = (chain_end(error).to_string(), is_tls(error));
    let (url, source) = (url.to_owned(), Cause::from(text));
    if insecure { ClientError::Insecure { url, source } } else { ClientError::Unreachable { url, source } }
}

/// Whether TLS is among the causes. An I/O error passes over the error that it wraps when asked for its source.
fn is_tls(error: &(dyn Error + 'static)) -> bool {
    let wrapped = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    error.is::<rustls::Error>()
        || wrapped.is_some_and(|inner| is_tls(inner))
        || error.source().is_some_and(is_tls)
}

/// The innermost cause: the error of the kernel or of TLS. The layers between only say "client error (Connect)" and
/// similar.
fn chain_end<'a>(error: &'a (dyn Error + 'static)) -> &'a (dyn Error + 'static) {
    let mut end = error;
    while let Some(cause) = end.source() {
        end = cause;
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_read_with_its_prefix() {
        let endpoint = Endpoint::parse("https://shoal.example.com/team/").expect("it is valid");
        assert_eq!(endpoint.url(), "https://shoal.example.com/team");
        let uri = endpoint.uri(&Scheme::HTTPS, "/v1/health").expect("it is valid");
        assert_eq!(uri, "https://shoal.example.com/team/v1/health");
    }

    #[test]
    fn what_is_no_url_of_a_daemon_is_refused() {
        for url in
            ["", "127.0.0.1:7878", "/v1", "ftp://host", "http://key@host", "http://host/?key=1", "http://a b"]
        {
            assert!(matches!(Endpoint::parse(url), Err(ClientError::BadUrl { .. })), "{url}");
        }
    }
}
