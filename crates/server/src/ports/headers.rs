//! Which headers pass between a client and a server in a sandbox. Pure.
//!
//! Both sides are strangers to each other and to us: what is ours must not reach the guest, and what the guest says
//! must not reach beyond its own origin.

use std::net::IpAddr;

use axum::http::header::{self, HeaderName};
use axum::http::{HeaderMap, HeaderValue};
use engine::Key;

use super::grant::{KEY_HEADER, SERVICE_TOKEN, TOKEN_HEADER, TOKEN_PARAMETER};

/// The cookie with a link's token, without TLS.
pub const COOKIE: &str = "shoal_port";
/// The same over TLS. Browsers accept a cookie of this prefix only for exactly the host that sets it.
pub const COOKIE_SECURE: &str = "__Host-shoal_port";
/// Marks an answer by path as the server's own, and not the daemon's.
pub const ANSWERED: &str = "x-shoal-port";
/// What every key that the daemon makes begins with.
const KEY_PREFIX: &str = "shoal_";

/// Headers of one connection, not of a request (RFC 9110, section 7.6.1).
const HOP_BY_HOP: [HeaderName; 5] = [
    header::CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];
const HOP_BY_HOP_OTHERS: [&str; 2] = ["keep-alive", "proxy-connection"];

/// Headers of an answer that would act beyond its port, or longer than its sandbox lives.
const REACHING: [&str; 8] = [
    "strict-transport-security",
    "alt-svc",
    "clear-site-data",
    "service-worker-allowed",
    "public-key-pins",
    "expect-ct",
    // Only the daemon says these.
    ANSWERED,
    "x-shoal-error",
];

/// What a client says about where it comes from. Replaced by what the daemon knows.
const FORWARDED: [&str; 7] = [
    "forwarded",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-port",
    "x-forwarded-prefix",
    "x-forwarded-proto",
    "x-real-ip",
];

/// Removes all keys of ours from a request. Returns the first that is valid.
pub fn take_keys(headers: &mut HeaderMap, authenticate: impl Fn(&str) -> Option<Key>) -> Option<Key> {
    let mut found = None;
    let mut look = |text: &str| {
        let key = authenticate(text);
        let ours = key.is_some() || text.starts_with(KEY_PREFIX);
        found = found.take().or(key);
        ours
    };
    for value in take_all(headers, KEY_HEADER) {
        look(&value);
    }
    for name in ["x-api-key", "authorization"] {
        let mut others = Vec::new();
        for value in headers.get_all(name) {
            let text = value.to_str().unwrap_or_default();
            let bearer = text.split_once(' ').filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
            let secret = if name == "authorization" { bearer.map(|(_, secret)| secret) } else { Some(text) };
            if !secret.is_some_and(|secret| look(secret.trim())) {
                others.push(value.clone());
            }
        }
        headers.remove(name);
        for value in others {
            headers.append(HeaderName::from_static(name), value);
        }
    }
    found
}

/// Removes all tokens of links from a request's headers.
pub fn take_tokens(headers: &mut HeaderMap) -> Vec<String> {
    let leaks = |value: &HeaderValue| {
        value.as_bytes().windows(TOKEN_PARAMETER.len()).any(|part| part == TOKEN_PARAMETER.as_bytes())
    };
    if headers.get_all(header::REFERER).iter().any(leaks) {
        headers.remove(header::REFERER);
    }
    [TOKEN_HEADER, SERVICE_TOKEN].into_iter().flat_map(|name| take_all(headers, name)).collect()
}

fn take_all(headers: &mut HeaderMap, name: &'static str) -> Vec<String> {
    let found = headers.get_all(name).iter().filter_map(|value| value.to_str().ok().map(str::to_owned));
    let found = found.collect();
    headers.remove(name);
    found
}

/// Removes our cookies from a request, and joins the others in one header. Returns the values of ours.
pub fn take_cookies(headers: &mut HeaderMap) -> Vec<String> {
    let (mut ours, mut others) = (Vec::new(), Vec::new());
    for value in headers.get_all(header::COOKIE) {
        for cookie in value.as_bytes().split(|byte| *byte == b';') {
            let cookie = cookie.trim_ascii();
            let (name, value) = match cookie.iter().position(|byte| *byte == b'=') {
                Some(at) => (&cookie[..at], &cookie[at + 1..]),
                None => (cookie, &b""[..]),
            };
            match is_ours(name) {
                true => ours.extend(std::str::from_utf8(value.trim_ascii()).map(str::to_owned)),
                false if cookie.is_empty() => {}
                false => others.push(cookie.to_vec()),
            }
        }
    }
    headers.remove(header::COOKIE);
    if let Ok(value) = HeaderValue::from_bytes(&others.join(&b"; "[..]))
        && !others.is_empty()
    {
        headers.insert(header::COOKIE, value);
    }
    ours
}

fn is_ours(name: &[u8]) -> bool {
    // Browsers compare the prefix without regard to case, and servers the whole name as they like.
    let name = name.trim_ascii();
    name.eq_ignore_ascii_case(COOKIE.as_bytes()) || name.eq_ignore_ascii_case(COOKIE_SECURE.as_bytes())
}

/// Removes the headers of one connection, and those that it lists.
pub fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let listed: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in listed {
        headers.remove(name);
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
    for name in HOP_BY_HOP_OTHERS {
        headers.remove(name);
    }
    let trailers = headers.get(header::TE).is_some_and(|te| {
        te.to_str().is_ok_and(|te| te.split(',').any(|part| part.trim().eq_ignore_ascii_case("trailers")))
    });
    headers.remove(header::TE);
    if trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
}

/// How a client reached the daemon.
pub struct Origin<'a> {
    /// Its address.
    pub peer: Option<IpAddr>,
    /// `http` or `https`.
    pub scheme: &'a str,
    /// The host that it named, with its port.
    pub host: &'a str,
    /// What precedes the path that the guest sees.
    pub prefix: Option<&'a str>,
}

/// Says where a request comes from.
pub fn set_forwarded(headers: &mut HeaderMap, origin: &Origin<'_>) {
    for name in FORWARDED {
        headers.remove(name);
    }
    // The daemon has asked for the body by itself.
    headers.remove(header::EXPECT);
    let peer = origin.peer.map(|peer| peer.to_canonical().to_string());
    for (name, text) in [
        ("x-forwarded-for", peer.as_deref()),
        ("x-forwarded-host", Some(origin.host)),
        ("x-forwarded-proto", Some(origin.scheme)),
        ("x-forwarded-prefix", origin.prefix),
    ] {
        if let Some(Ok(value)) = text.map(HeaderValue::from_str) {
            headers.insert(HeaderName::from_static(name), value);
        }
    }
}

/// Changes an answer by host name: nothing in it acts beyond its own host.
pub fn tame(headers: &mut HeaderMap) {
    remove_hop_by_hop(headers);
    headers.remove(header::TE);
    for name in REACHING {
        headers.remove(name);
    }
    let kept: Vec<HeaderValue> =
        headers.get_all(header::SET_COOKIE).iter().filter(|value| is_harmless(value)).cloned().collect();
    headers.remove(header::SET_COOKIE);
    for value in kept {
        headers.append(header::SET_COOKIE, value);
    }
}

/// Whether a cookie is for its own host alone, and not one of ours.
fn is_harmless(cookie: &HeaderValue) -> bool {
    let mut parts = cookie.as_bytes().split(|byte| *byte == b';');
    let name = parts.next().unwrap_or_default().split(|byte| *byte == b'=').next().unwrap_or_default();
    let mut attributes =
        parts.map(|part| part.split(|byte| *byte == b'=').next().unwrap_or_default().trim_ascii());
    !is_ours(name) && !attributes.any(|attribute| attribute.eq_ignore_ascii_case(b"domain"))
}

/// Changes an answer by path, which has the API's own origin: a browser runs none of it, and it sets no cookie.
pub fn confine(headers: &mut HeaderMap, prefix: &str) {
    tame(headers);
    headers.remove(header::SET_COOKIE);
    headers.remove("content-security-policy-report-only");
    let cors: Vec<HeaderName> =
        headers.keys().filter(|name| name.as_str().starts_with("access-control-")).cloned().collect();
    for name in cors {
        headers.remove(name);
    }
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static("sandbox"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    // The guest does not know that its paths have a prefix.
    let moved = headers
        .get(header::LOCATION)
        .and_then(|to| to.to_str().ok())
        .filter(|to| to.starts_with('/') && !to.starts_with("//") && !to.starts_with("/\\"))
        .and_then(|to| HeaderValue::from_str(&format!("{prefix}{to}")).ok());
    if let Some(moved) = moved {
        headers.insert(header::LOCATION, moved);
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use engine::{KeyLimits, Owner};

    use super::*;

    fn map(pairs: &[(&str, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in pairs {
            let name: HeaderName = name.parse().expect("a name");
            map.append(name, HeaderValue::from_str(value).expect("a value"));
        }
        map
    }

    fn shown(map: &HeaderMap) -> Vec<String> {
        let mut all: Vec<String> =
            map.iter().map(|(name, value)| format!("{name}: {}", value.to_str().expect("text"))).collect();
        all.sort();
        all
    }

    fn key() -> Key {
        Key {
            id: "id".into(),
            owner: Owner::default_owner(),
            admin: false,
            metrics_only: false,
            limits: KeyLimits::default(),
            created_at: SystemTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn our_keys_never_reach_the_guest_and_others_do() {
        let valid = |text: &str| (text == "the-operators-own").then(key);
        for (given, left, found) in [
            (&[("authorization", "Bearer the-operators-own")][..], &[][..], true),
            (&[("x-api-key", "the-operators-own"), ("accept", "x")], &["accept: x"], true),
            (
                &[("x-shoal-key", "the-operators-own"), ("authorization", "Basic eA==")],
                &["authorization: Basic eA=="],
                true,
            ),
            (&[("authorization", "Bearer shoal_old_key")], &[], false),
            (&[("x-api-key", "shoal_old_key")], &[], false),
            (
                &[("authorization", "Bearer theirs"), ("x-api-key", "theirs")],
                &["authorization: Bearer theirs", "x-api-key: theirs"],
                false,
            ),
            (&[("x-shoal-key", "wrong")], &[], false),
        ] {
            let mut headers = map(given);
            assert_eq!(take_keys(&mut headers, valid).is_some(), found, "{given:?}");
            assert_eq!(shown(&headers), left, "{given:?}");
        }
    }

    #[test]
    fn our_cookies_and_tokens_never_reach_the_guest_and_others_do() {
        let mut headers = map(&[
            ("cookie", "a=1; shoal_port=T1;b=2"),
            ("cookie", "__Host-shoal_port=T2; c"),
            ("cookie", "__HOST-SHOAL_PORT=T3"),
            ("x-shoal-token", "T4"),
            ("referer", "http://x/?shoal_token=T5"),
        ]);
        assert_eq!(take_cookies(&mut headers), ["T1", "T2", "T3"]);
        assert_eq!(take_tokens(&mut headers), ["T4"]);
        assert_eq!(shown(&headers), ["cookie: a=1; b=2; c"]);
        let mut none = map(&[("cookie", "shoal_port=T")]);
        take_cookies(&mut none);
        assert!(none.is_empty());
    }

    #[test]
    fn headers_of_a_connection_stay_on_it() {
        let mut headers = map(&[
            ("connection", "close, X-Secret"),
            ("x-secret", "1"),
            ("keep-alive", "timeout=5"),
            ("transfer-encoding", "chunked"),
            ("te", "gzip, Trailers"),
            ("upgrade", "h2c"),
            ("proxy-authorization", "x"),
            ("trailer", "x-sum"),
            ("x-plain", "2"),
        ]);
        remove_hop_by_hop(&mut headers);
        assert_eq!(shown(&headers), ["te: trailers", "trailer: x-sum", "x-plain: 2"]);
    }

    #[test]
    fn the_guest_learns_where_a_request_comes_from_and_not_what_the_client_says_about_it() {
        let mut headers =
            map(&[("x-forwarded-for", "6.6.6.6"), ("forwarded", "for=6.6.6.6"), ("x-real-ip", "6.6.6.6")]);
        let origin = Origin {
            peer: Some("::ffff:192.0.2.1".parse().expect("an address")),
            scheme: "https",
            host: "h:1",
            prefix: None,
        };
        set_forwarded(&mut headers, &origin);
        assert_eq!(
            shown(&headers),
            ["x-forwarded-for: 192.0.2.1", "x-forwarded-host: h:1", "x-forwarded-proto: https"]
        );
    }

    #[test]
    fn an_answer_acts_only_on_its_own_host() {
        let mut headers = map(&[
            ("set-cookie", "a=1; Path=/; HttpOnly"),
            ("set-cookie", "b=2; Domain=example.com"),
            ("set-cookie", "b=2;DOMAIN = .localhost; Path=/"),
            ("set-cookie", "b=2; domain"),
            ("set-cookie", "shoal_port=x"),
            ("set-cookie", " __host-shoal_port =x; Secure"),
            ("set-cookie", "domain=fine"),
            ("strict-transport-security", "max-age=1"),
            ("alt-svc", "h3=\":1\""),
            ("clear-site-data", "\"*\""),
            ("service-worker-allowed", "/"),
            ("content-type", "text/html"),
        ]);
        tame(&mut headers);
        assert_eq!(
            shown(&headers),
            ["content-type: text/html", "set-cookie: a=1; Path=/; HttpOnly", "set-cookie: domain=fine"]
        );
    }

    #[test]
    fn an_answer_by_path_is_nothing_that_a_browser_runs() {
        let mut headers = map(&[
            ("set-cookie", "a=1"),
            ("content-security-policy", "default-src *"),
            ("content-security-policy", "script-src *"),
            ("access-control-allow-origin", "*"),
            ("location", "/login?x=1"),
        ]);
        confine(&mut headers, "/p");
        assert_eq!(
            shown(&headers),
            ["content-security-policy: sandbox", "location: /p/login?x=1", "x-content-type-options: nosniff"]
        );
        for elsewhere in ["//evil.example", "/\\evil.example", "https://other.example/", "relative"] {
            let mut headers = map(&[("location", elsewhere)]);
            confine(&mut headers, "/p");
            assert_eq!(headers.get(header::LOCATION).expect("it is there"), elsewhere);
        }
    }
}
