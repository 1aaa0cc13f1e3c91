//! Authentication. Every route needs a key, except a few that tell everybody the same (`native::needs_no_key`).
//!
//! A key is sent in a header, never in a URL: URLs end up in logs, histories and `Referer`s.

use axum::http::{HeaderMap, StatusCode, header};
use engine::Key;

use crate::http::error::ApiError;

/// Longer than any key; longer values are rejected before they are hashed.
const KEY_LENGTH_MAX: usize = 512;
/// The alternative header.
const X_API_KEY: &str = "x-api-key";

/// The secret in a request, from either header.
///
/// If a header is repeated, or both headers are present with different values, there is no valid key: a proxy in front
/// might have checked another value than the one used here.
pub fn presented(headers: &HeaderMap) -> Option<&str> {
    let mut found = None;
    for value in headers.get_all(header::AUTHORIZATION) {
        let (scheme, key) = value.to_str().ok()?.split_once(' ')?;
        if !scheme.eq_ignore_ascii_case("bearer") || found.replace(key.trim()).is_some() {
            return None;
        }
    }
    for value in headers.get_all(X_API_KEY) {
        let key = value.to_str().ok()?.trim();
        if found.replace(key).is_some_and(|before| before != key) {
            return None;
        }
    }
    found.filter(|key| !key.is_empty() && key.len() <= KEY_LENGTH_MAX)
}

/// The error for a request without a valid key. The same for a missing, a wrong and a malformed key.
pub fn refused() -> ApiError {
    ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", "a valid api key is needed")
        .hint("send `Authorization: Bearer <key>`; the daemon keeps its first key in `api.key` in its data directory")
}

/// Whether a key may manage keys.
pub fn require_admin(key: &Key) -> Result<(), ApiError> {
    require_admin_to(key, "manage keys")
}

/// Whether a key may do things that concern all owners.
pub fn require_admin_to(key: &Key, doing: &str) -> Result<(), ApiError> {
    if key.admin {
        return Ok(());
    }
    Err(ApiError::new(StatusCode::FORBIDDEN, "admin_required", format!("this key may not {doing}"))
        .hint("use the key that the daemon made at its first start"))
}

/// Whether a key may read the metrics, which cover all owners.
pub fn require_metrics(key: &Key) -> Result<(), ApiError> {
    if key.admin || key.metrics_only {
        return Ok(());
    }
    Err(ApiError::new(StatusCode::FORBIDDEN, "metrics_not_allowed", "this key does not open the metrics")
        .hint("make one that does with `shoal key create --owner NAME --metrics-only`"))
}

/// The error for a metrics key on any other path.
pub fn metrics_only() -> ApiError {
    ApiError::new(StatusCode::FORBIDDEN, "metrics_only", "this key opens `/metrics` and nothing else")
        .hint("use another key")
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn of(headers: &[(&'static str, &'static str)]) -> Option<String> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, HeaderValue::from_static(value));
        }
        presented(&map).map(str::to_owned)
    }

    #[test]
    fn both_spellings_are_read() {
        assert_eq!(of(&[("authorization", "Bearer abc")]).as_deref(), Some("abc"));
        assert_eq!(of(&[("authorization", "bearer abc")]).as_deref(), Some("abc"));
        assert_eq!(of(&[("x-api-key", "abc")]).as_deref(), Some("abc"));
        assert_eq!(of(&[("authorization", "Bearer abc"), ("x-api-key", "abc")]).as_deref(), Some("abc"));
    }

    #[test]
    fn what_is_ambiguous_is_nobodys_key() {
        for headers in [
            &[][..],
            &[("authorization", "abc")],
            &[("authorization", "Basic YTpi")],
            &[("authorization", "Bearer ")],
            &[("x-api-key", "")],
            &[("authorization", "Bearer a"), ("authorization", "Bearer b")],
            &[("authorization", "Bearer a"), ("x-api-key", "b")],
            &[("authorization", "Basic a"), ("x-api-key", "b")],
            &[("x-api-key", "a"), ("x-api-key", "b")],
        ] {
            assert_eq!(of(headers), None, "{headers:?}");
        }
    }
}
