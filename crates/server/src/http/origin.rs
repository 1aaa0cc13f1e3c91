//! Which `Host` and `Origin` a request may carry.
//!
//! A browser sends requests for any page that it has open. Two checks keep such pages out: a page that points its own
//! name at this machine (DNS rebinding) is recognized by its `Host`, a cross-site page by its `Origin`. A request
//! without an `Origin` does not come from a page's script. The key is required as well.

use std::fmt;
use std::net::IpAddr;

use axum::http::{HeaderMap, Uri, header, uri::Authority};

/// A host without its port, in lower case and without a dot at its end.
#[derive(Clone, PartialEq, Eq)]
pub struct Host(String);

impl Host {
    /// The host of `host`, `host:port` or `[v6]:port`.
    pub fn parse(text: &str) -> Option<Self> {
        let authority = text.parse::<Authority>().ok()?;
        // User information in an authority only serves to disguise the host.
        if text.contains('@') {
            return None;
        }
        // The parser ignores text after an address in brackets.
        let port = text.strip_prefix(authority.host())?;
        if !port.is_empty()
            && port.strip_prefix(':').is_none_or(|port| !port.bytes().all(|b| b.is_ascii_digit()))
        {
            return None;
        }
        let host = authority.host().trim_end_matches('.').to_ascii_lowercase();
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b':' | b'[' | b']');
        if host.is_empty() || !host.bytes().all(plain) {
            return None;
        }
        Some(Self(host))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it is `localhost` or an address of loopback.
    pub fn is_loopback(&self) -> bool {
        self.0 == "localhost" || self.ip().is_some_and(|ip| ip.to_canonical().is_loopback())
    }

    /// The address, if the host is one.
    fn ip(&self) -> Option<IpAddr> {
        self.0.trim_start_matches('[').trim_end_matches(']').parse().ok()
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Scheme, host and port of a page.
#[derive(Clone, PartialEq, Eq)]
pub struct Origin(String);

impl Origin {
    /// An origin as browsers write it: `https://host` or `http://host:port`, with nothing after it.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.to_ascii_lowercase();
        let (scheme, authority) = text.split_once("://")?;
        if !matches!(scheme, "http" | "https") {
            return None;
        }
        Host::parse(authority)?;
        // Browsers omit the default port of the scheme.
        let implied = if scheme == "https" { ":443" } else { ":80" };
        let authority = authority.strip_suffix(implied).unwrap_or(authority);
        Some(Self(format!("{scheme}://{authority}")))
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a request is rejected before anything else is checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refused {
    /// No `Host`, several, or one that does not parse.
    BadHost,
    /// A host that is not ours.
    ForeignHost,
    /// An origin that is not allowed.
    ForeignOrigin,
}

/// The hosts and origins that are ours.
#[derive(Debug, Clone, Default)]
pub struct Allowed {
    /// Names and addresses besides loopback.
    pub hosts: Vec<Host>,
    /// Origins.
    pub origins: Vec<Origin>,
}

impl Allowed {
    /// Whether a request may proceed. `local` is the address that it arrived at: a page's name cannot be that.
    pub fn check(&self, uri: &Uri, headers: &HeaderMap, local: Option<IpAddr>) -> Result<(), Refused> {
        let mut hosts = headers.get_all(header::HOST).iter();
        let (Some(host), None) = (hosts.next(), hosts.next()) else { return Err(Refused::BadHost) };
        let host = host.to_str().ok().and_then(Host::parse).ok_or(Refused::BadHost)?;
        self.check_host(&host, local)?;
        // A request in the form for proxies names a second host, in its first line.
        if let Some(authority) = uri.authority() {
            let host = Host::parse(authority.as_str()).ok_or(Refused::BadHost)?;
            self.check_host(&host, local)?;
        }
        for origin in headers.get_all(header::ORIGIN) {
            let origin = origin.to_str().ok().and_then(Origin::parse).ok_or(Refused::ForeignOrigin)?;
            if !self.origins.contains(&origin) {
                return Err(Refused::ForeignOrigin);
            }
        }
        Ok(())
    }

    fn check_host(&self, host: &Host, local: Option<IpAddr>) -> Result<(), Refused> {
        let ip = host.ip().map(|ip| ip.to_canonical());
        let ours = host.0 == "localhost"
            || ip.is_some_and(|ip| ip.is_loopback())
            || (ip.is_some() && ip == local.map(|ip| ip.to_canonical()))
            || self.hosts.contains(host);
        if ours { Ok(()) } else { Err(Refused::ForeignHost) }
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn allowed() -> Allowed {
        Allowed {
            hosts: vec![Host::parse("shoal.example.com").expect("a host")],
            origins: vec![Origin::parse("https://shoal.example.com").expect("an origin")],
        }
    }

    fn check(host: &str, origin: Option<&str>) -> Result<(), Refused> {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, HeaderValue::from_str(host).expect("a header"));
        if let Some(origin) = origin {
            headers.insert(header::ORIGIN, HeaderValue::from_str(origin).expect("a header"));
        }
        allowed().check(
            &Uri::from_static("/v1/health"),
            &headers,
            Some("192.0.2.7".parse().expect("an address")),
        )
    }

    #[test]
    fn our_own_names_pass() {
        for host in [
            "localhost",
            "LOCALHOST:7878",
            "127.0.0.1:7878",
            "[::1]:7878",
            "192.0.2.7:1",
            "shoal.example.com",
            "Shoal.Example.com.:443",
        ] {
            assert_eq!(check(host, None), Ok(()), "{host}");
        }
    }

    #[test]
    fn a_rebound_name_is_refused() {
        for host in [
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "192.0.2.8",
            "notlocalhost",
            "shoal.example.com.evil.example",
            "0.0.0.0:7878",
        ] {
            assert_eq!(check(host, None), Err(Refused::ForeignHost), "{host}");
        }
        for host in [
            "",
            "localhost@evil.example",
            "a b",
            "evil.example#localhost",
            "[::1]x",
            "[0:0:0:0:0:0:0:1]x:7878",
        ] {
            assert_eq!(check(host, None), Err(Refused::BadHost), "{host}");
        }
    }

    #[test]
    fn a_foreign_page_is_refused() {
        assert_eq!(check("localhost", Some("https://shoal.example.com")), Ok(()));
        assert_eq!(check("localhost", Some("https://shoal.example.com:443")), Ok(()));
        for origin in [
            "null",
            "",
            "https://evil.example",
            "http://shoal.example.com",
            "https://shoal.example.com:8443",
            "https://shoal.example.com.evil.example",
            "http://localhost:3000",
            "file://",
        ] {
            assert_eq!(check("localhost", Some(origin)), Err(Refused::ForeignOrigin), "{origin}");
        }
    }

    #[test]
    fn a_second_host_is_refused() {
        let mut headers = HeaderMap::new();
        headers.append(header::HOST, HeaderValue::from_static("localhost"));
        assert_eq!(
            allowed().check(&Uri::from_static("http://evil.example/v1/health"), &headers, None),
            Err(Refused::ForeignHost)
        );
        headers.append(header::HOST, HeaderValue::from_static("evil.example"));
        assert_eq!(allowed().check(&Uri::from_static("/"), &headers, None), Err(Refused::BadHost));
        assert_eq!(allowed().check(&Uri::from_static("/"), &HeaderMap::new(), None), Err(Refused::BadHost));
    }
}
