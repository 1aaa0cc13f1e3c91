//! Refusals: JSON for programs, and a small page for people, which tries again by itself while a server starts.

use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::http::error::ApiError;

/// Tells a refusal of the daemon from an answer of the server.
const ERROR_HEADER: &str = "x-shoal-error";
/// How long the page waits before it tries again, in seconds.
const RETRY_SECONDS: u32 = 2;

/// Whether a browser is about to show the answer as a page.
pub fn is_visit(method: &Method, headers: &HeaderMap) -> bool {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    match text("sec-fetch-mode") {
        Some(mode) => *method == Method::GET && mode == "navigate",
        None => is_wanted(method, headers),
    }
}

/// Whether the caller prefers a page to JSON.
pub fn is_wanted(method: &Method, headers: &HeaderMap) -> bool {
    let accepts = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    *method == Method::GET && accepts.split(',').any(|kind| kind.trim().starts_with("text/html"))
}

/// The answer for a request that did not reach a server.
pub fn refuse(error: ApiError, wants_page: bool) -> Response {
    if !wants_page {
        return marked(error.into_response());
    }
    let plain = error.into_response();
    let status = plain.status();
    let code = plain.extensions().get::<crate::http::error::Code>().map(|code| code.0.clone());
    let (title, advice, retries) = match (status, code.as_deref()) {
        (StatusCode::BAD_GATEWAY, Some("port_closed")) => (
            "Nothing listens here yet",
            "No program in the sandbox listens on this port. This page tries again by itself.",
            true,
        ),
        (StatusCode::UNAUTHORIZED, _) => (
            "This port is private",
            "Open it with a link from <code>shoal url</code>. A link that worked before has expired or was revoked.",
            false,
        ),
        (StatusCode::NOT_FOUND, _) => ("No such sandbox", "It does not exist, or it was deleted.", false),
        (StatusCode::FORBIDDEN, _) => ("Not allowed", "This link does not allow it.", false),
        (StatusCode::CONFLICT, _) => ("The sandbox does not run", "This page tries again by itself.", true),
        (StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT, _) => {
            ("The server does not answer", "This page tries again by itself.", true)
        }
        _ => ("The server gave no usable answer", "See what it does in the sandbox.", false),
    };
    let refresh = match retries {
        true => format!("<meta http-equiv=\"refresh\" content=\"{RETRY_SECONDS}\">"),
        false => String::new(),
    };
    // Nothing that a stranger has said is in it.
    let html = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>{title}</title>{refresh}\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <style>body{{font:16px/1.5 system-ui,sans-serif;max-width:36rem;margin:20vh auto;padding:0 1rem}}\
         code{{background:#8883;padding:0 .25em}}</style><h1>{title}</h1><p>{advice}</p></html>\n"
    );
    let mut response = (status, html).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    headers.insert(
        header::CONTENT_SECURITY_POLICY,
        HeaderValue::from_static("default-src 'none'; style-src 'unsafe-inline'"),
    );
    *response.extensions_mut() = plain.extensions().clone();
    marked(response)
}

fn marked(mut response: Response) -> Response {
    let code = response.extensions().get::<crate::http::error::Code>().map(|code| code.0.clone());
    let headers = response.headers_mut();
    if let Some(Ok(code)) = code.as_deref().map(HeaderValue::from_str) {
        headers.insert(ERROR_HEADER, code);
    }
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pairs = pairs.iter().map(|(name, value)| {
            (axum::http::HeaderName::from_static(name), HeaderValue::from_static(value))
        });
        pairs.collect()
    }

    #[test]
    fn people_get_a_page_and_programs_json() {
        let browser = headers(&[("accept", "text/html,application/xhtml+xml,*/*;q=0.8")]);
        assert!(is_wanted(&Method::GET, &browser) && is_visit(&Method::GET, &browser));
        assert!(!is_wanted(&Method::POST, &browser));
        assert!(!is_wanted(&Method::GET, &headers(&[("accept", "*/*")])));
        let script = headers(&[("accept", "text/html"), ("sec-fetch-mode", "cors")]);
        assert!(!is_visit(&Method::GET, &script));
        let error = || ApiError::new(StatusCode::BAD_GATEWAY, "port_closed", "nothing listens");
        let page = refuse(error(), true);
        assert_eq!(page.headers()[header::CONTENT_TYPE], "text/html; charset=utf-8");
        let json = refuse(error(), false);
        assert_eq!(json.headers()[header::CONTENT_TYPE], "application/json");
        for response in [page, json] {
            assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
            assert_eq!(response.headers()[ERROR_HEADER], "port_closed");
        }
    }
}
