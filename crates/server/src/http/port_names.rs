//! Host names of ports: `{port}-{sandbox}.DOMAIN`.
//!
//! Browsers keep pages apart by host name, so each port of each sandbox has its own. The domain is `localhost`, whose
//! names lead to the own machine everywhere, and the one of `ports_url`. A name that is not exactly of this form is not
//! a port's.

use axum::http::{HeaderMap, Request, Uri, header};
use engine::Port;
use wire::SandboxId;

use super::origin::Host;

/// The domain that works without any setup.
const LOCAL_DOMAIN: &str = "localhost";

/// How the ports of sandboxes are reached by host name.
#[derive(Debug, Clone, Default)]
pub struct PortNames {
    /// The operator's domain, if there is one.
    pub set: Option<PortDomain>,
    /// Whether ports may be opened to everybody.
    pub public: bool,
}

/// The domain of `ports_url`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortDomain {
    /// `http` or `https`.
    pub scheme: String,
    /// Its name.
    pub host: Host,
    /// The port of the URL, with its colon; empty if it has none.
    pub port: String,
}

impl PortDomain {
    /// From `https://ports.example.com` or `http://ports.example.com:8080`.
    pub fn parse(url: &str) -> Option<Self> {
        let (scheme, authority) = url.trim_end_matches('/').split_once("://")?;
        let host = Host::parse(authority)?;
        let name = host.as_str();
        let is_name = name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.'))
            && name.bytes().any(|b| b.is_ascii_alphabetic());
        if !matches!(scheme, "http" | "https") || !is_name || name == LOCAL_DOMAIN {
            return None;
        }
        let port = authority.rsplit_once(':').map(|(_, port)| format!(":{port}")).unwrap_or_default();
        Some(Self { scheme: scheme.to_owned(), host, port })
    }
}

/// A port of a sandbox, as a host name says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Named {
    /// The sandbox.
    pub sandbox: SandboxId,
    /// The port.
    pub port: Port,
}

impl PortNames {
    /// The port that a host name stands for.
    pub fn named(&self, host: &Host) -> Option<Named> {
        let (label, domain) = host.as_str().split_once('.')?;
        let ours = domain == LOCAL_DOMAIN || self.set.as_ref().is_some_and(|set| set.host.as_str() == domain);
        let (port, sandbox) = label.split_once('-').filter(|_| ours)?;
        Some(Named { sandbox: sandbox.parse().ok()?, port: Port::parse(port).ok()? })
    }

    /// Whether any part of a request names a port's host. Such a request must not reach the API.
    pub fn concerns<T>(&self, request: &Request<T>) -> bool {
        hosts(request.uri(), request.headers())
            .any(|host| host.is_some_and(|host| self.named(&host).is_some()))
    }

    /// The port that a request is for. `None` if its parts disagree.
    pub fn meant<T>(&self, request: &Request<T>) -> Option<Named> {
        let mut all = hosts(request.uri(), request.headers());
        let first = self.named(&all.next()??)?;
        all.all(|host| host.and_then(|host| self.named(&host)) == Some(first)).then_some(first)
    }

    /// The URL of a port, without a path. Without a domain of the operator's, it works on this machine only, which is
    /// where `headers` must come from: `None` otherwise.
    pub fn url(&self, named: Named, scheme: &str, headers: &HeaderMap) -> Option<String> {
        let Named { sandbox, port } = named;
        if let Some(PortDomain { scheme, host, port: at }) = &self.set {
            return Some(format!("{scheme}://{port}-{sandbox}.{host}{at}"));
        }
        let text = headers.get(header::HOST)?.to_str().ok()?;
        let host = Host::parse(text)?;
        let at = text.rsplit_once(':').filter(|(_, at)| at.bytes().all(|b| b.is_ascii_digit()));
        let at = at.map(|(_, at)| format!(":{at}"));
        host.is_loopback()
            .then(|| format!("{scheme}://{port}-{sandbox}.{LOCAL_DOMAIN}{}", at.unwrap_or_default()))
    }

    /// The scheme that browsers use for a host: the one of `ports_url` for its names, else the daemon's own.
    pub fn scheme<'a>(&'a self, host: &Host, own: &'a str) -> &'a str {
        match &self.set {
            Some(set) if host.as_str().ends_with(set.host.as_str()) => &set.scheme,
            Some(_) | None => own,
        }
    }
}

/// All hosts that a request names: in each `Host` header and in its first line.
fn hosts<'a>(uri: &'a Uri, headers: &'a HeaderMap) -> impl Iterator<Item = Option<Host>> + 'a {
    let in_headers =
        headers.get_all(header::HOST).iter().map(|value| value.to_str().ok().and_then(Host::parse));
    in_headers.chain(uri.authority().map(|authority| Host::parse(authority.as_str())))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "3f2b8c1e-90ab-4def-8123-456789abcdef";

    fn names() -> PortNames {
        PortNames { set: PortDomain::parse("https://ports.example.com:8443"), public: false }
    }

    fn port_of(host: &str) -> Option<u16> {
        names().named(&Host::parse(host)?).map(|named| named.port.number())
    }

    #[test]
    fn a_host_name_is_a_ports_only_if_it_is_exactly_of_that_form() {
        for host in [
            format!("8080-{ID}.localhost"),
            format!("8080-{ID}.localhost:7878"),
            format!("8080-{ID}.LOCALHOST."),
            format!("8080-{}.ports.example.com:8443", ID.to_uppercase()),
        ] {
            assert_eq!(port_of(&host), Some(8080), "{host}");
        }
        for host in [
            "localhost".to_owned(),
            "127.0.0.1:7878".to_owned(),
            "ports.example.com".to_owned(),
            format!("{ID}.localhost"),
            format!("8080-{ID}"),
            format!("08080-{ID}.localhost"),
            format!("0-{ID}.localhost"),
            format!("65536-{ID}.localhost"),
            format!("+80-{ID}.localhost"),
            format!("8080--{ID}.localhost"),
            format!("8080-{ID}x.localhost"),
            format!("8080-{ID}.localhost.evil.example"),
            format!("8080-{ID}.evil.localhost"),
            format!("8080-{ID}.example.com"),
            format!("x.8080-{ID}.localhost"),
            format!("8080-{}.localhost", ID.replace('-', "")),
        ] {
            assert_eq!(port_of(&host), None, "{host}");
        }
    }

    fn request(first_line: &str, hosts: &[&str]) -> Request<()> {
        let mut request = Request::builder().uri(first_line);
        for host in hosts {
            request = request.header(header::HOST, *host);
        }
        request.body(()).expect("a request")
    }

    #[test]
    fn a_request_that_names_two_hosts_is_no_ports_and_concerns_one_all_the_same() {
        let (port, other) = (format!("8080-{ID}.localhost"), format!("8081-{ID}.localhost"));
        let absolute = format!("http://{port}/x");
        let clear = [request("/", &[&port]), request(&absolute, &[&port])];
        for request in &clear {
            assert!(names().concerns(request) && names().meant(request).is_some());
        }
        let confused = [
            request("/", &[&port, "localhost"]),
            request("/", &["localhost", &port]),
            request("/", &[&port, &other]),
            request(&absolute, &["localhost"]),
            request("http://localhost/v1/sandboxes", &[&port]),
            request("/", &[&port, "not a host"]),
        ];
        for request in &confused {
            assert!(names().concerns(request) && names().meant(request).is_none(), "{request:?}");
        }
        assert!(!names().concerns(&request("/v1/sandboxes", &["localhost:7878"])));
    }

    #[test]
    fn the_url_of_a_port_is_one_that_the_caller_can_reach() {
        let named = Named { sandbox: ID.parse().expect("an id"), port: Port::new(8080).expect("a port") };
        let url = |names: PortNames, host: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, axum::http::HeaderValue::from_static(host));
            names.url(named, "http", &headers)
        };
        assert_eq!(
            url(names(), "shoal.example.com").as_deref(),
            Some(format!("https://8080-{ID}.ports.example.com:8443").as_str())
        );
        let local = format!("http://8080-{ID}.localhost:7878");
        for host in ["127.0.0.1:7878", "localhost:7878", "[::1]:7878"] {
            assert_eq!(url(PortNames::default(), host).as_deref(), Some(local.as_str()), "{host}");
        }
        assert_eq!(
            url(PortNames::default(), "[::1]").as_deref(),
            Some(format!("http://8080-{ID}.localhost").as_str())
        );
        assert_eq!(url(PortNames::default(), "shoal.example.com"), None);
    }

    #[test]
    fn a_domain_is_a_name_and_not_localhost() {
        for url in
            ["ftp://x.example", "https://", "https://localhost", "http://127.0.0.1", "https://a b", "x.y"]
        {
            assert_eq!(PortDomain::parse(url), None, "{url}");
        }
    }
}
