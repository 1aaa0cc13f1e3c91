//! One delivery: a signed POST over a connection of its own.
//!
//! The headers are those of the Standard Webhooks specification, so that receivers can use its libraries: `webhook-id`,
//! `webhook-timestamp`, and `webhook-signature`, which is `v1,` and the base64 of an HMAC-SHA256 of
//! `{id}.{timestamp}.{body}`.
//!
//! Owners choose the address, so it is checked at the moment it is dialled, whatever its name meant before, and a redirect
//! is a failure.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use engine::webhook::{Webhook, is_public};
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{CONTENT_TYPE, HOST, USER_AGENT};
use hyper::{Method, Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// How long one delivery may take, from the name to the end of the response.
const DELIVERY_MAX: Duration = Duration::from_secs(30);
/// How long one address may take to accept a connection.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// How much of a response is read. It means nothing.
const RESPONSE_MAX: usize = 64 * 1024;
/// The longest address.
const URL_MAX: usize = 2048;

/// The result of a delivery, or why it failed.
pub type Delivery = Result<(), String>;

/// Where a webhook leads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    tls: bool,
    host: String,
    port: u16,
    /// As it is sent in the `Host` header.
    authority: String,
    /// With the query.
    path: String,
    /// Whether it may be an address that is not on the public internet.
    anywhere: bool,
}

/// Why an address cannot be that of a webhook. Continues "must".
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadUrl(&'static str);

impl Target {
    /// Reads an address.
    pub fn parse(url: &str, anywhere: bool) -> Result<Self, BadUrl> {
        if url.len() > URL_MAX {
            return Err(BadUrl("have at most 2048 bytes"));
        }
        let uri: Uri = url.parse().map_err(|_| BadUrl("be a URL such as https://example.com/hook"))?;
        let tls = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(BadUrl("begin with https:// or http://")),
        };
        let authority = uri.authority().ok_or(BadUrl("name a host"))?;
        if authority.as_str().contains('@') {
            return Err(BadUrl("contain no user and no password: requests are signed instead"));
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        if host.is_empty() {
            return Err(BadUrl("name a host"));
        }
        let closed = |address: IpAddr| !anywhere && !is_public(address);
        if host.parse().is_ok_and(closed) || (!anywhere && host.eq_ignore_ascii_case("localhost")) {
            return Err(BadUrl("lead to an address on the public internet, unless the key has admin rights"));
        }
        let port = authority.port_u16().unwrap_or(if tls { 443 } else { 80 });
        let path = uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
        Ok(Self { tls, host, port, authority: authority.as_str().to_owned(), path, anywhere })
    }
}

/// Delivers a body once.
pub async fn deliver(target: &Target, webhook: &Webhook, id: &str, body: String) -> Delivery {
    match tokio::time::timeout(DELIVERY_MAX, attempt(target, webhook, id, body)).await {
        Ok(result) => result,
        Err(_) => Err(format!("it took longer than {} seconds", DELIVERY_MAX.as_secs())),
    }
}

async fn attempt(target: &Target, webhook: &Webhook, id: &str, body: String) -> Delivery {
    let timestamp = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let tag = webhook.tag(format!("{id}.{timestamp}.{body}").as_bytes());
    let request = Request::builder()
        .method(Method::POST)
        .uri(&target.path)
        .header(HOST, &target.authority)
        .header(USER_AGENT, concat!("shoal/", env!("CARGO_PKG_VERSION")))
        .header(CONTENT_TYPE, "application/json")
        .header("webhook-id", id)
        .header("webhook-timestamp", timestamp)
        .header("webhook-signature", format!("v1,{}", STANDARD.encode(tag)))
        .body(Full::new(Bytes::from(body)))
        .map_err(|error| format!("the request cannot be written: {error}"))?;
    let tcp = dial(target).await.map_err(|error| match error.kind() {
        // What is there is not told.
        io::ErrorKind::PermissionDenied => "its address is not on the public internet".to_owned(),
        _ if target.anywhere => format!("cannot connect: {error}"),
        _ => "cannot connect".to_owned(),
    })?;
    let status = if target.tls {
        let name =
            ServerName::try_from(target.host.clone()).map_err(|_| "its host is not a name".to_owned())?;
        let connector = TlsConnector::from(client_config()?);
        let tls = connector.connect(name, tcp).await;
        send(tls.map_err(|error| format!("cannot establish TLS: {error}"))?, request).await?
    } else {
        send(tcp, request).await?
    };
    match status {
        status if status.is_success() => Ok(()),
        status if status.is_redirection() => {
            Err(format!("it answered {status}, and redirects are not followed"))
        }
        status => Err(format!("it answered {status}")),
    }
}

/// Connects to the target, if one of the addresses that its name means at this moment is within reach.
async fn dial(target: &Target) -> io::Result<TcpStream> {
    let found = tokio::net::lookup_host((target.host.as_str(), target.port)).await?;
    let allowed: Vec<SocketAddr> =
        found.filter(|address| target.anywhere || is_public(address.ip())).collect();
    let mut last = io::Error::from(io::ErrorKind::PermissionDenied);
    for address in allowed {
        match tokio::time::timeout(CONNECT_MAX, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error,
            Err(_) => last = io::Error::from(io::ErrorKind::TimedOut),
        }
    }
    Err(last)
}

async fn send<S>(stream: S, request: Request<Full<Bytes>>) -> Result<StatusCode, String>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let broken = |error: hyper::Error| format!("the connection broke: {error}");
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
    let exchange = async {
        let response = sender.send_request(request).await.map_err(broken)?;
        let status = response.status();
        // Read to its end where it is short, so that the receiver sees no broken connection.
        if Limited::new(response.into_body(), RESPONSE_MAX).collect().await.is_err() {
            tracing::debug!("the response of a webhook is long or broken");
        }
        Ok(status)
    };
    tokio::pin!(connection);
    tokio::pin!(exchange);
    tokio::select! {
        done = &mut exchange => done,
        ended = &mut connection => match ended {
            // The response is complete, or there will be none, which the exchange reports.
            Ok(()) => exchange.await,
            Err(error) => Err(broken(error)),
        },
    }
}

/// The roots that the machine trusts, read once.
fn client_config() -> Result<Arc<ClientConfig>, String> {
    static CONFIG: OnceLock<Arc<ClientConfig>> = OnceLock::new();
    if let Some(config) = CONFIG.get() {
        return Ok(Arc::clone(config));
    }
    let mut roots = rustls::RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        return Err("this machine trusts no certificate authority".into());
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| format!("TLS cannot be set up: {error}"))?;
    let config = Arc::new(config.with_root_certificates(roots).with_no_client_auth());
    Ok(Arc::clone(CONFIG.get_or_init(|| config)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_meant() {
        let target = Target::parse("https://example.com/a?b=c", false).expect("an address");
        assert_eq!((target.tls, target.host.as_str(), target.port), (true, "example.com", 443));
        assert_eq!((target.authority.as_str(), target.path.as_str()), ("example.com", "/a?b=c"));
        let local = Target::parse("http://[::1]:8080", true).expect("an address");
        assert_eq!((local.host.as_str(), local.port, local.path.as_str()), ("::1", 8080, "/"));
        for bad in
            ["", "example.com", "ftp://example.com", "https://", "https://u:p@example.com", "https:///x"]
        {
            Target::parse(bad, true).expect_err(bad);
        }
        let closed = [
            "http://127.0.0.1/",
            "http://[::1]/",
            "http://169.254.169.254/",
            "http://localhost/",
            "http://10.1.2.3/",
        ];
        for closed in closed {
            Target::parse(closed, false).expect_err(closed);
            Target::parse(closed, true).expect("operators may");
        }
    }

    /// The name of a webhook may lead elsewhere each time it is resolved, so the check is where it is dialled.
    #[tokio::test]
    async fn a_closed_address_is_not_dialled() {
        let receiver = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a socket");
        let port = receiver.local_addr().expect("an address").port();
        let url = format!("http://127.0.0.1:{port}/");
        let open = Target::parse(&url, true).expect("an address");
        let closed = Target { anywhere: false, ..open.clone() };
        assert_eq!(dial(&closed).await.expect_err("it is closed").kind(), io::ErrorKind::PermissionDenied);
        dial(&open).await.expect("operators may");
    }
}
