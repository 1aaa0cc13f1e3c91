//! Reading requests: whose sandbox is meant, as which user, and the bodies, each with its failure in this dialect's shape.
//!
//! A call of the agent names its sandbox in a header and carries the token that `create` returned. Unknown fields are
//! ignored and `null` is the same as absent: later clients send more than earlier ones.

use std::time::Duration;

use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use engine::{EngineError, Key, Sandbox, State};
use serde::de::DeserializeOwned;
use wire::SandboxId;

use super::error::Refusal;
use super::notes::Notes;
use super::{connect, names};
use crate::http::app::{App, Arrival, Caller};
use crate::http::body::{BODY_MAX, COMMAND_BODY_MAX, parse_json, read_bytes, text_in_path};

/// The header that names the sandbox of a call.
const SANDBOX: &str = "e2b-sandbox-id";
/// The header with the token of that sandbox.
const TOKEN: &str = "x-access-token";

/// A JSON body of the control plane. An empty one is an empty object.
pub struct Body<T>(pub T);

impl<T: DeserializeOwned> FromRequest<App> for Body<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, app: &App) -> Result<Self, Refusal> {
        let body = read_bytes(request, BODY_MAX, app).await?;
        Ok(Self(parse_json(if body.bytes.trim_ascii().is_empty() { b"{}" } else { &body.bytes })?))
    }
}

/// The message of a call with one answer.
pub struct Unary<T>(pub T);

impl<T: DeserializeOwned> FromRequest<App> for Unary<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, app: &App) -> Result<Self, Refusal> {
        check_codec(request.headers()).map_err(Refusal::rpc)?;
        let read = async {
            let body = read_bytes(request, COMMAND_BODY_MAX, app).await?;
            parse_json(if body.bytes.trim_ascii().is_empty() { b"{}" } else { &body.bytes })
        };
        read.await.map(Self).map_err(|error| Refusal::from(error).rpc())
    }
}

/// The one message of a call with a stream of answers.
pub struct Streamed<T>(pub T);

impl<T: DeserializeOwned> FromRequest<App> for Streamed<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, app: &App) -> Result<Self, Refusal> {
        check_codec(request.headers()).map_err(Refusal::rpc)?;
        let body = read_bytes(request, COMMAND_BODY_MAX, app).await;
        let body = body.map_err(|error| Refusal::from(error).rpc())?;
        let message = connect::one_message(&body.bytes).map_err(Refusal::rpc)?;
        parse_json(message).map(Self).map_err(|error| Refusal::from(error).rpc())
    }
}

/// Every published client speaks JSON; the other codec is refused by name and not as broken JSON.
fn check_codec(headers: &HeaderMap) -> Result<(), Refusal> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    match kind.split(';').next().unwrap_or_default().trim().ends_with("proto") {
        true => Err(Refusal::unsupported("this server speaks the JSON codec of Connect")),
        false => Ok(()),
    }
}

/// The sandbox that a path of the control plane names, and the key that asks.
pub struct Meant {
    /// Whose.
    pub key: Key,
    /// As it is now.
    pub sandbox: Sandbox,
}

impl FromRequestParts<App> for Meant {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Refusal> {
        let Caller(key) = Caller::from_request_parts(parts, app).await?;
        let text = text_in_path(parts, app, "sandbox").await?;
        let not_found = || Refusal::no_sandbox(&text);
        let id = names::parse_id(&text).ok_or_else(not_found)?;
        let sandbox = match app.engine.get(&key.owner, id).await {
            Ok(sandbox) if shown(&sandbox) => sandbox,
            Ok(_) | Err(EngineError::SandboxNotFound { .. }) => return Err(not_found()),
            Err(error) => return Err(Refusal::control(error)),
        };
        tracing::Span::current().record("sandbox", tracing::field::display(sandbox.id));
        Ok(Self { key, sandbox })
    }
}

/// Whether clients can see a sandbox. They have no word for one that failed or is being deleted.
pub fn shown(sandbox: &Sandbox) -> bool {
    match sandbox.state {
        State::Creating | State::Running | State::Paused(_) => true,
        State::Deleting | State::Failed { .. } => false,
    }
}

/// The sandbox whose agent is called, by whom, and as which user.
pub struct Target {
    /// Whose.
    pub key: Key,
    /// The sandbox.
    pub id: SandboxId,
    /// The user that the caller names, in the header for it.
    pub user: Option<String>,
    /// How long the call may take, if the caller says.
    pub timeout: Option<Duration>,
    /// How long a stream may say nothing.
    pub keepalive: Duration,
}

impl FromRequestParts<App> for Target {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Refusal> {
        let rpc = parts.uri.path().contains('.');
        let target = Self::read(parts, app).await;
        if rpc { target.map_err(Refusal::rpc) } else { target }
    }
}

impl Target {
    async fn read(parts: &mut Parts, app: &App) -> Result<Self, Refusal> {
        let text = |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok());
        let id = text(SANDBOX).ok_or_else(|| Refusal::invalid("the header `E2b-Sandbox-Id` is missing"))?;
        let refused = || Refusal::unauthorized("the access token does not open this sandbox");
        let id = names::parse_id(id).ok_or_else(refused)?;
        let key = text(TOKEN).and_then(|token| names::key(&app.engine, token, id)).ok_or_else(refused)?;
        tracing::Span::current().record("sandbox", tracing::field::display(id));
        let user = match text(header::AUTHORIZATION.as_str()) {
            Some(value) => user(value)?,
            None => None,
        };
        let timeout = text("connect-timeout-ms").and_then(|millis| millis.parse().ok());
        let keepalive = text("keepalive-ping-interval").and_then(|seconds| seconds.parse().ok());
        let keepalive =
            keepalive.filter(|seconds| *seconds > 0).unwrap_or(connect::KEEPALIVE_SECONDS_DEFAULT);
        if let Some(arrival) = parts.extensions.get::<Arrival>() {
            arrival.place.keep();
        }
        match app.engine.get(&key.owner, id).await {
            Ok(sandbox) => match sandbox.state {
                State::Creating | State::Running => {}
                State::Paused(_) if Notes::of(&sandbox).is_some_and(|notes| notes.auto_resume) => {
                    app.engine.resume(&key, id).await.map_err(|error| Refusal::agent(id, error))?;
                }
                State::Paused(_) | State::Deleting | State::Failed { .. } => return Err(Refusal::gone(id)),
            },
            Err(error) => return Err(Refusal::agent(id, error)),
        }
        // What reads the body counts it against the owner of this key.
        parts.extensions.insert(key.clone());
        Ok(Self {
            key,
            id,
            user,
            timeout: timeout.map(Duration::from_millis),
            keepalive: Duration::from_secs(keepalive),
        })
    }
}

/// The user in a `Basic` header, whose password is empty.
fn user(value: &str) -> Result<Option<String>, Refusal> {
    let wrong =
        || Refusal::unauthorized("the header `Authorization` must name a user as `Basic base64(user:)`");
    let (scheme, encoded) = value.split_once(' ').ok_or_else(wrong)?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return Ok(None);
    }
    let decoded = BASE64_STANDARD.decode(encoded.trim()).map_err(|_| wrong())?;
    let text = String::from_utf8(decoded).map_err(|_| wrong())?;
    let user = text.split(':').next().unwrap_or_default();
    Ok((!user.is_empty()).then(|| user.to_owned()))
}

/// The status of an answer without a body.
pub const DONE: StatusCode = StatusCode::NO_CONTENT;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_read_from_the_header_that_clients_send() {
        assert_eq!(user("Basic cm9vdDo=").expect("it is a user").as_deref(), Some("root"));
        assert_eq!(user("Basic Og==").expect("it names none"), None);
        assert_eq!(user("Bearer x").expect("it is no user"), None);
        for wrong in ["Basic", "Basic !", "Basic /w=="] {
            user(wrong).expect_err(wrong);
        }
    }
}
