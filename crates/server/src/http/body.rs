//! Reading requests: bodies, paths and queries, each bounded, each with errors in the native shape.

use std::str::FromStr;
use std::time::Duration;

use axum::body::HttpBody;
use axum::extract::{FromRequest, FromRequestParts, RawPathParams, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use bytes::Bytes;
use engine::Key;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use wire::{CommandId, SandboxId};

use super::app::{App, Caller};
use super::auth;
use super::budget::Room;
use super::error::ApiError;

/// The limit for a JSON body that starts a command or edits a file: a script of 16 MiB, escaped; or twice 1 MiB of
/// text, however it is escaped.
pub const COMMAND_BODY_MAX: usize = 24 << 20;
/// The limit for any other body, including one write to stdin.
pub const BODY_MAX: usize = 1 << 20;
/// How long a body may take to arrive in all. 24 MiB in this time is 400 KiB/s.
pub const BODY_TIME_MAX: Duration = Duration::from_secs(60);

/// Reads a whole body of at most `limit` bytes.
pub async fn read_bytes(request: Request, limit: usize, app: &App) -> Result<Buffered, ApiError> {
    let too_large = || {
        ApiError::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "body_too_large",
            format!("the body is longer than {limit} bytes"),
        )
        .detail("limit", limit)
    };
    let Some(Key { owner, .. }) = request.extensions().get::<Key>() else { return Err(auth::refused()) };
    let announced =
        request.headers().get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    // A body without an announced length reserves as much as it may need.
    let length = announced.or(request.body().size_hint().upper());
    let length = length.map_or(limit, |length| usize::try_from(length).unwrap_or(usize::MAX));
    if length > limit {
        return Err(too_large());
    }
    let room = app.bodies().room(owner, length).await?;
    let collected = Limited::new(request.into_body(), limit).collect();
    match tokio::time::timeout(BODY_TIME_MAX, collected).await {
        Ok(Ok(body)) => Ok(Buffered { bytes: body.to_bytes(), _room: room }),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
        Ok(Err(_)) => Err(ApiError::new(
            StatusCode::BAD_REQUEST,
            "body_incomplete",
            "the connection ended before the body did",
        )),
        Err(_) => Err(ApiError::new(
            StatusCode::REQUEST_TIMEOUT,
            "body_too_slow",
            format!("the body did not arrive within {} s", BODY_TIME_MAX.as_secs()),
        )),
    }
}

/// A body in memory, with its share of the budget.
pub struct Buffered {
    /// All of it.
    pub bytes: Bytes,
    _room: Room,
}

/// Reads a whole JSON body of at most `limit` bytes.
pub async fn read_json<T: DeserializeOwned>(
    request: Request,
    limit: usize,
    app: &App,
) -> Result<T, ApiError> {
    require_json(request.headers())?;
    let body = read_bytes(request, limit, app).await?;
    parse_json(&body.bytes)
}

/// A JSON body of at most [`BODY_MAX`].
pub struct Json<T>(pub T);

impl<T: DeserializeOwned> FromRequest<App> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        read_json(request, BODY_MAX, app).await.map(Self)
    }
}

/// A JSON body of at most [`COMMAND_BODY_MAX`].
pub struct CommandJson<T>(pub T);

impl<T: DeserializeOwned> FromRequest<App> for CommandJson<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        read_json(request, COMMAND_BODY_MAX, app).await.map(Self)
    }
}

/// A JSON body, or none at all if every field is optional.
pub struct OptionalJson<T>(pub T);

impl<T: DeserializeOwned + Default> FromRequest<App> for OptionalJson<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        let named = request.headers().contains_key(header::CONTENT_TYPE);
        if named {
            require_json(request.headers())?;
        }
        let body = read_bytes(request, BODY_MAX, app).await?;
        match (body.bytes.is_empty(), named) {
            // Many clients send the JSON content type even with an empty body.
            (true, _) => Ok(Self(T::default())),
            (false, true) => parse_json(&body.bytes).map(Self),
            (false, false) => Err(not_json()),
        }
    }
}

/// Bytes as they are, at most [`BODY_MAX`].
pub struct Raw(pub Bytes);

impl FromRequest<App> for Raw {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        Ok(Self(read_bytes(request, BODY_MAX, app).await?.bytes))
    }
}

/// A web page can post a form across sites without a preflight, but not with the content type of JSON, so that type is
/// required.
fn require_json(headers: &HeaderMap) -> Result<(), ApiError> {
    let essence = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .map(|value| value.split(';').next().unwrap_or_default().trim());
    match essence {
        Some(essence) if essence.eq_ignore_ascii_case("application/json") => Ok(()),
        Some(_) | None => Err(not_json()),
    }
}

fn not_json() -> ApiError {
    ApiError::new(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        "unsupported_media_type",
        "the body must be JSON with `Content-Type: application/json`",
    )
    .hint("send `Content-Type: application/json`")
}

/// Parses JSON, and reports where it is wrong.
pub fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    // serde would also accept the fields as an array, whose meaning would change with every change of ours.
    if bytes.trim_ascii_start().starts_with(b"[") {
        return Err(ApiError::must("body", "be a JSON object"));
    }
    let mut from = serde_json::Deserializer::from_slice(bytes);
    let parsed = serde_path_to_error::deserialize(&mut from).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        if inner.is_data() {
            let field = if path == "." { "body".to_owned() } else { path };
            ApiError::invalid(&field, inner)
        } else {
            invalid_json(&inner)
        }
    })?;
    from.end().map_err(|error| invalid_json(&error))?;
    Ok(parsed)
}

fn invalid_json(error: &serde_json::Error) -> ApiError {
    ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", format!("the body is not JSON: {error}"))
}

/// The ids in a path, checked: `{sandbox}`, and `{command}` where the route has one.
pub struct SandboxPath(pub SandboxId);

/// As [`SandboxPath`], for a sandbox that exists: for routes with a body, so that the body is not read if there is no
/// such sandbox.
pub struct FoundSandbox(pub SandboxId);

impl FromRequestParts<App> for FoundSandbox {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let Caller(key) = Caller::from_request_parts(parts, app).await?;
        let SandboxPath(id) = SandboxPath::from_request_parts(parts, app).await?;
        app.engine.get(&key.owner, id).await?;
        Ok(Self(id))
    }
}

/// As [`SandboxPath`], with a command.
pub struct CommandPath(pub SandboxId, pub CommandId);

/// The id of a key in a path. Any text: keys that do not exist are not found.
pub struct KeyPath(pub String);

impl<S: Send + Sync> FromRequestParts<S> for SandboxPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let id = checked(parts, state, "sandbox").await?;
        tracing::Span::current().record("sandbox", tracing::field::display(&id));
        Ok(Self(id))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for CommandPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let SandboxPath(sandbox) = SandboxPath::from_request_parts(parts, state).await?;
        Ok(Self(sandbox, checked(parts, state, "command").await?))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for KeyPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        checked::<String, S>(parts, state, "key").await.map(Self)
    }
}

/// Any text in a path, decoded.
pub async fn text_in_path<S: Send + Sync>(
    parts: &mut Parts,
    state: &S,
    name: &'static str,
) -> Result<String, ApiError> {
    checked::<String, S>(parts, state, name).await
}

async fn checked<T, S>(parts: &mut Parts, state: &S, name: &'static str) -> Result<T, ApiError>
where
    T: FromStr<Err: std::fmt::Display>,
    S: Send + Sync,
{
    let bad = |why: &dyn std::fmt::Display| {
        ApiError::new(
            StatusCode::BAD_REQUEST,
            "invalid_id",
            format!("the id in the path is not valid: {why}"),
        )
        .hint("paths take ids and not names; GET /v1/sandboxes?name=NAME finds the sandbox of a name")
        .detail("field", name)
    };
    let params =
        RawPathParams::from_request_parts(parts, state).await.map_err(|_| bad(&"it is not valid UTF-8"))?;
    let text = params.iter().find(|(key, _)| *key == name).map(|(_, value)| value);
    let text = text.expect("the extractor is used on routes that have the parameter");
    text.parse().map_err(|error: T::Err| bad(&error))
}

/// A query string. Unknown keys are rejected.
pub struct Query<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        match axum::extract::Query::<T>::from_request_parts(parts, state).await {
            Ok(axum::extract::Query(query)) => Ok(Self(query)),
            Err(error) => Err(ApiError::new(StatusCode::BAD_REQUEST, "invalid_query", error.body_text())),
        }
    }
}

#[cfg(test)]
mod tests {
    use wire::api::CreateSandbox;

    use super::*;

    fn error(json: &str) -> wire::api::ErrorBody {
        parse_json::<CreateSandbox>(json.as_bytes()).expect_err("it is wrong").into_body()
    }

    #[test]
    fn wrong_json_is_told_apart_and_located() {
        for json in ["", "{", "{\"name\": \"a\"", "{}}", "{} x", "\u{feff}{}", "{\"name\": \"\\ud800\"}"] {
            assert_eq!(error(json).code, "invalid_json", "{json:?}");
        }
        assert_eq!(
            parse_json::<CreateSandbox>(b"{\"name\": \"\xff\"}").unwrap_err().into_body().code,
            "invalid_json"
        );
        for (json, field) in [
            ("{\"nmae\": \"a\"}", "nmae"),
            ("{\"env\": {\"A\": 1}}", "env.A"),
            ("{\"wait\": \"yes\"}", "wait"),
            ("[]", "body"),
            ("null", "body"),
        ] {
            let body = error(json);
            assert_eq!(
                (body.code.as_str(), &body.details["field"]),
                ("invalid_request", &field.into()),
                "{json}"
            );
        }
    }

    #[test]
    fn deeply_nested_json_is_refused_without_harm() {
        let deep = format!("{{\"a\": {}", "[".repeat(100_000));
        assert!(parse_json::<serde_json::Value>(deep.as_bytes()).is_err());
    }
}
