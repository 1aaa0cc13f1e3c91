//! Who may use a port: the owner's key, anyone who has a link's token, or everybody if the port is public.
//!
//! A token is sent in a header by programs, in the query of a URL by a person who follows a link, and in a cookie by a
//! browser that has followed one. A cookie proves less than the others, because a browser adds it to requests that a
//! page of somebody else caused; so it counts only for requests of the port's own pages and for visits.

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use engine::port::{LinkEnd, LinkGrant};
use engine::{Key, KeyEnd, Owner};

use super::headers::{self, COOKIE, COOKIE_SECURE};
use super::page;
use crate::http::app::{App, Arrival};
use crate::http::auth;
use crate::http::error::ApiError;
use crate::http::origin::{Host, Origin};
use crate::http::port_names::Named;

/// The API key, for requests whose `Authorization` is for the server in the sandbox.
pub const KEY_HEADER: &str = "x-shoal-key";
/// A link's token.
pub const TOKEN_HEADER: &str = "x-shoal-token";
/// The same, as LangSmith's clients call it.
pub const SERVICE_TOKEN: &str = "x-langsmith-sandbox-service-token";
/// A link's token in the query of a URL.
pub const TOKEN_PARAMETER: &str = "shoal_token";
/// Longer than any token.
const TOKEN_LENGTH_MAX: usize = 256;

/// A link's token as text.
pub struct Token(pub String);

impl Token {
    /// From the bytes that the engine made.
    pub fn of(bytes: &[u8]) -> Self {
        Self(BASE64_URL_SAFE_NO_PAD.encode(bytes))
    }

    /// The link that a text opens.
    pub fn follow(app: &App, text: &str) -> Option<LinkGrant> {
        if text.len() > TOKEN_LENGTH_MAX {
            return None;
        }
        app.engine.follow_link(&BASE64_URL_SAFE_NO_PAD.decode(text).ok()?)
    }
}

/// The right to use a port.
pub struct Grant {
    /// Whose sandbox it is.
    pub owner: Owner,
    /// When the right ends.
    pub end: End,
    /// Whether it is limited to some methods, so that a connection that can carry anything is not included.
    pub limited: bool,
}

/// When the right to use a port ends.
pub enum End {
    /// With a key.
    Key(KeyEnd),
    /// With a link.
    Link(LinkEnd),
}

impl End {
    /// Returns when the right has ended. Cancel-safe.
    pub async fn wait(&mut self) {
        match self {
            Self::Key(end) => end.wait().await,
            Self::Link(end) => end.wait().await,
        }
    }
}

impl Grant {
    /// The right of a key's owner.
    pub fn of_key(app: &App, key: &Key) -> Self {
        Self { owner: key.owner.clone(), end: End::Key(app.engine.key_end(key)), limited: false }
    }

    /// The right that a link gives.
    pub fn of_link(grant: LinkGrant) -> Self {
        let LinkGrant { link, end } = grant;
        Self { owner: link.owner.clone(), end: End::Link(end), limited: !link.methods.is_empty() }
    }
}

/// What becomes of a request.
pub enum Admitted {
    /// It may pass. Everything that proved so was removed from it.
    Granted(Grant),
    /// A browser has followed a link, and gets a cookie in place of the token in its address bar.
    Redirect(Box<Response>),
}

/// Decides about a request by host name, and removes from it what was meant for the daemon.
pub fn admit(app: &App, named: Named, host: &Host, request: &mut Request) -> Result<Admitted, ApiError> {
    let scheme = app.ports().scheme(host, app.scheme()).to_owned();
    let (uri, in_query) = without_token(request.uri());
    let keys = headers::take_keys(request.headers_mut(), |text| app.engine.authenticate(text));
    let tokens = headers::take_tokens(request.headers_mut());
    let cookies = headers::take_cookies(request.headers_mut());
    if let Some(uri) = uri {
        *request.uri_mut() = uri;
    }
    let (method, headers) = (request.method(), request.headers());
    let keep = || {
        if let Some(arrival) = request.extensions().get::<Arrival>() {
            arrival.place.keep();
        }
    };
    if let Some(key) = keys {
        if key.metrics_only {
            return Err(auth::metrics_only());
        }
        keep();
        return Ok(Admitted::Granted(Grant::of_key(app, &key)));
    }
    let opens = |grant: &LinkGrant| grant.link.sandbox == named.sandbox && grant.link.port == named.port;
    let follow = |text: &str| Token::follow(app, text).filter(opens);
    if let Some(token) = &in_query
        && let Some(grant) = follow(token)
        && page::is_visit(method, headers)
    {
        keep();
        return Ok(Admitted::Redirect(Box::new(welcome(&grant, token, request.uri(), scheme == "https"))));
    }
    let shown = tokens.iter().chain(in_query.as_ref()).find_map(|text| follow(text));
    let own = || may_use_cookie(method, headers, &scheme);
    let remembered = || cookies.iter().find_map(|text| follow(text)).filter(|_| own());
    let public = || app.engine.public_link(named.sandbox, named.port).filter(|_| app.ports().public);
    let grant = match shown.or_else(remembered) {
        Some(grant) => {
            keep();
            Some(grant)
        }
        None => public(),
    };
    let Some(grant) = grant else { return Err(refused(!cookies.is_empty() || in_query.is_some())) };
    if !grant.link.allows(method.as_str()) {
        return Err(ApiError::new(
            StatusCode::FORBIDDEN,
            "method_not_allowed_by_link",
            format!("this link does not allow {method}"),
        )
        .hint("make a link that allows it, with `shoal url --method`"));
    }
    Ok(Admitted::Granted(Grant::of_link(grant)))
}

/// The same whether the sandbox exists or not.
fn refused(had_one: bool) -> ApiError {
    let message = match had_one {
        true => "the link to this port has expired, was revoked, or is for another port",
        false => "this port is private",
    };
    ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message)
        .hint("open it with a link from `shoal url`, or send `X-Shoal-Key: <key>`")
}

/// Whether a request that a cookie came with was caused by the port's own pages, or by a visit.
fn may_use_cookie(method: &Method, headers: &HeaderMap, scheme: &str) -> bool {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let own = text("host").and_then(|host| Origin::parse(&format!("{scheme}://{host}")));
    // Present in every request of a script that is not a plain GET, and in every WebSocket's.
    for origin in headers.get_all(header::ORIGIN) {
        let origin = origin.to_str().ok().and_then(Origin::parse);
        if origin.is_none() || origin != own {
            return false;
        }
    }
    match text("sec-fetch-site") {
        // Browsers of the last years always send it to `localhost` and over TLS. Without it, only a plain read may pass.
        None => headers.contains_key(header::ORIGIN) || matches!(*method, Method::GET | Method::HEAD),
        Some("same-origin" | "none") => true,
        Some(_) => {
            *method == Method::GET
                && text("sec-fetch-mode") == Some("navigate")
                && text("sec-fetch-dest") == Some("document")
        }
    }
}

/// Sends a browser to the same address without the token, with a cookie.
fn welcome(grant: &LinkGrant, token: &str, to: &Uri, secure: bool) -> Response {
    let left = grant.link.expires_at.duration_since(std::time::SystemTime::now()).unwrap_or_default();
    let (name, more) = if secure { (COOKIE_SECURE, "; Secure") } else { (COOKIE, "") };
    let cookie =
        format!("{name}={token}; Path=/; HttpOnly; SameSite=Lax; Max-Age={}{more}", left.as_secs().max(1));
    let path = to.path_and_query().map_or("/", |path| path.as_str());
    // A path that begins with two slashes would be another host.
    let path = format!("/{}", path.trim_start_matches(['/', '\\']));
    let mut response = StatusCode::SEE_OTHER.into_response();
    let headers = response.headers_mut();
    for (name, text) in [
        (header::LOCATION, path.as_str()),
        (header::SET_COOKIE, cookie.as_str()),
        (header::CACHE_CONTROL, "no-store"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        if let Ok(value) = HeaderValue::from_str(text) {
            headers.insert(name, value);
        }
    }
    response
}

/// Separates the token from a URL: the URL without it, if it had one, and the token.
fn without_token(uri: &Uri) -> (Option<Uri>, Option<String>) {
    let prefix = format!("{TOKEN_PARAMETER}=");
    let Some(query) = uri.query().filter(|query| query.contains(&prefix)) else { return (None, None) };
    let (tokens, rest): (Vec<&str>, Vec<&str>) = query.split('&').partition(|part| part.starts_with(&prefix));
    let token = tokens.first().and_then(|part| part.strip_prefix(&prefix)).map(str::to_owned);
    let path = match rest.is_empty() {
        true => uri.path().to_owned(),
        false => format!("{}?{}", uri.path(), rest.join("&")),
    };
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = path.parse().ok();
    (Uri::from_parts(parts).ok(), token)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn may(method: Method, headers: &[(&'static str, &'static str)]) -> bool {
        let mut map = HeaderMap::new();
        map.insert(header::HOST, HeaderValue::from_static("8080-x.localhost:7878"));
        for (name, value) in headers {
            map.append(*name, HeaderValue::from_static(value));
        }
        may_use_cookie(&method, &map, "http")
    }

    #[test]
    fn a_cookie_counts_for_a_ports_own_pages_and_for_visits() {
        let own = ("origin", "http://8080-x.localhost:7878");
        let other = ("origin", "http://8081-y.localhost:7878");
        assert!(may(Method::GET, &[]));
        assert!(may(Method::GET, &[("sec-fetch-site", "none")]));
        assert!(may(Method::POST, &[own, ("sec-fetch-site", "same-origin")]));
        assert!(may(Method::GET, &[own]), "a WebSocket of its own page");
        let visit = [("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document")];
        for site in ["same-site", "cross-site"] {
            assert!(may(Method::GET, &[("sec-fetch-site", site), visit[0], visit[1]]), "{site}");
            assert!(!may(Method::POST, &[("sec-fetch-site", site), visit[0], visit[1]]), "{site}");
            assert!(!may(Method::GET, &[("sec-fetch-site", site), ("sec-fetch-mode", "no-cors")]), "{site}");
            let frame = [("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "iframe")];
            assert!(!may(Method::GET, &[("sec-fetch-site", site), frame[0], frame[1]]), "{site}");
        }
        assert!(!may(Method::POST, &[]), "a form of somebody's page, in an old browser");
        for origin in [other, ("origin", "null"), ("origin", "https://8080-x.localhost:7878")] {
            assert!(!may(Method::GET, &[origin]), "{origin:?}");
            assert!(!may(Method::GET, &[own, origin]), "{origin:?}");
            assert!(!may(Method::POST, &[origin, ("sec-fetch-site", "same-origin")]), "{origin:?}");
        }
    }

    #[test]
    fn a_token_is_taken_out_of_a_url() {
        let check = |uri: &'static str, rest: Option<&str>, token: Option<&str>| {
            let (uri, found) = without_token(&Uri::from_static(uri));
            assert_eq!(uri.map(|uri| uri.to_string()).as_deref(), rest);
            assert_eq!(found.as_deref(), token);
        };
        check("/a?b=1", None, None);
        check("/", None, None);
        check("/?shoal_token=T", Some("/"), Some("T"));
        check("/a?b=1&shoal_token=T&c=%26", Some("/a?b=1&c=%26"), Some("T"));
        check("/a?shoal_token=T&shoal_token=U", Some("/a"), Some("T"));
        check("/a?xshoal_token=T", Some("/a?xshoal_token=T"), None);
        check("http://h/a?shoal_token=T", Some("http://h/a"), Some("T"));
    }
}
