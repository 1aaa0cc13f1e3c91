//! Whether one request on a plain HTTP connection is for the host that the connection was opened to.
//!
//! Every request is checked, since a connection that is kept alive can carry requests for other hosts.

use http::header::{CONTENT_LENGTH, HOST, TRANSFER_ENCODING, UPGRADE};
use http::uri::Authority;
use http::{HeaderMap, Method, StatusCode, Uri, Version};

use crate::policy::Name;

/// The destination of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer<'a> {
    /// The name, or `None` for a literal address.
    pub name: Option<&'a Name>,
    /// The port.
    pub port: u16,
    /// `http` or `https`.
    pub scheme: &'static str,
}

/// Why a request is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadRequest {
    /// A tunnel could carry anything.
    #[error("CONNECT is not allowed: connections are opened directly, without a proxy")]
    Connect,
    /// The request is for another host.
    #[error("the request is for `{asked}`, but the connection was opened to `{opened}`")]
    OtherHost {
        /// The host of the request.
        asked: String,
        /// The host that the connection was opened to.
        opened: String,
    },
    /// The end of the body is ambiguous.
    #[error("a request must not have both Content-Length and Transfer-Encoding")]
    TwoLengths,
    /// No host, or several.
    #[error("a request must have exactly one Host header")]
    Host,
    /// An upgrade to something other than WebSocket.
    #[error("only an upgrade to websocket is allowed, not to `{0}`")]
    Upgrade(String),
    /// A rule of the policy, or a credential, stops it.
    #[error("{0}")]
    Stopped(String),
}

impl BadRequest {
    /// The status of the response.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Connect => StatusCode::METHOD_NOT_ALLOWED,
            Self::OtherHost { .. } => StatusCode::MISDIRECTED_REQUEST,
            Self::TwoLengths | Self::Host => StatusCode::BAD_REQUEST,
            Self::Upgrade(_) => StatusCode::NOT_IMPLEMENTED,
            Self::Stopped(_) => StatusCode::FORBIDDEN,
        }
    }
}

/// Checks one request.
pub fn check(
    method: &Method,
    uri: &Uri,
    version: Version,
    headers: &HeaderMap,
    peer: Peer<'_>,
) -> Result<(), BadRequest> {
    if method == Method::CONNECT {
        return Err(BadRequest::Connect);
    }
    if headers.contains_key(CONTENT_LENGTH) && headers.contains_key(TRANSFER_ENCODING) {
        return Err(BadRequest::TwoLengths);
    }
    let mut hosts = headers.get_all(HOST).iter();
    let host = match (hosts.next(), hosts.next()) {
        (Some(host), None) => Some(host.to_str().map_err(|_| BadRequest::Host)?),
        (None, None) if version <= Version::HTTP_10 => None,
        // HTTP/2 has the host in the address of the request.
        (None, None) if version >= Version::HTTP_2 && uri.authority().is_some() => None,
        _ => return Err(BadRequest::Host),
    };
    for authority in [host, uri.authority().map(Authority::as_str)].into_iter().flatten() {
        is_for(authority, peer)?;
    }
    if uri.scheme_str().is_some_and(|scheme| scheme != peer.scheme) {
        let opened = format!("{}://{}", peer.scheme, opened(peer));
        return Err(BadRequest::OtherHost { asked: uri.to_string(), opened });
    }
    for upgrade in headers.get_all(UPGRADE) {
        if !upgrade.as_bytes().eq_ignore_ascii_case(b"websocket") {
            return Err(BadRequest::Upgrade(String::from_utf8_lossy(upgrade.as_bytes()).into_owned()));
        }
    }
    Ok(())
}

fn opened(peer: Peer<'_>) -> String {
    peer.name.map_or_else(|| format!("port {}", peer.port), Name::to_string)
}

/// Whether `host[:port]` is the destination of the connection. Without a port, the connection's port is assumed.
fn is_for(authority: &str, peer: Peer<'_>) -> Result<(), BadRequest> {
    let other =
        || BadRequest::OtherHost { asked: authority.chars().take(200).collect(), opened: opened(peer) };
    if authority.contains('@') {
        return Err(other());
    }
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, Some(port)),
        _ => (authority, None),
    };
    if port.is_some_and(|port| port.parse() != Ok(peer.port)) {
        return Err(other());
    }
    match peer.name {
        Some(name) if Name::parse(host).as_ref() != Ok(name) => Err(other()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_request(request: http::request::Builder, expected: Option<u16>) {
        let request = request.body(()).expect("a request");
        let name = Name::parse("a.example").expect("a name");
        let peer = Peer { name: Some(&name), port: 80, scheme: "http" };
        let got = check(request.method(), request.uri(), request.version(), request.headers(), peer);
        assert_eq!(got.as_ref().err().map(|bad| bad.status().as_u16()), expected, "{request:?}: {got:?}");
    }

    fn to(host: &str) -> http::request::Builder {
        http::Request::builder().uri("/x").header("Host", host)
    }

    #[test]
    fn a_request_must_be_for_the_host_of_its_connection() {
        check_request(to("a.example"), None);
        check_request(to("A.Example:80"), None);
        check_request(to("b.example"), Some(421));
        check_request(to("a.example:81"), Some(421));
        check_request(to("user@a.example"), Some(421));
        check_request(to("a.example.evil.org"), Some(421));
        check_request(to("a.example").uri("http://a.example/x"), None);
        check_request(to("a.example").uri("http://b.example/x"), Some(421));
        check_request(to("a.example").uri("https://a.example/x"), Some(421));
        check_request(to("a.example").header("Host", "a.example"), Some(400));
        check_request(http::Request::builder().uri("/"), Some(400));
        check_request(http::Request::builder().uri("/").version(Version::HTTP_10), None);
    }

    #[test]
    fn tunnels_smuggling_and_unknown_upgrades_are_refused() {
        check_request(to("a.example").method("CONNECT").uri("a.example:443"), Some(405));
        check_request(
            to("a.example").header("Content-Length", "3").header("Transfer-Encoding", "chunked"),
            Some(400),
        );
        check_request(to("a.example").header("Upgrade", "h2c"), Some(501));
        check_request(to("a.example").header("Upgrade", "WebSocket"), None);
    }
}
