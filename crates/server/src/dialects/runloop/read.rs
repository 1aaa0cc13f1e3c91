//! Reading requests: bodies and ids in paths, each with its failure in this dialect's shape.
//!
//! Clients leave out what is not set, and later versions send more than earlier ones, so unknown fields are ignored and `null` is the
//! same as absent. A body may be empty.

use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::HeaderMap;
use axum::http::request::Parts;
use engine::{CommandRef, EngineError, Key, Sandbox, shown};
use serde::de::DeserializeOwned;
use wire::SandboxId;

use super::error::Refusal;
use super::ids::{Devbox, read_devbox};
use crate::http::app::{App, Caller};
use crate::http::body::{COMMAND_BODY_MAX, parse_json, read_bytes, text_in_path};

/// The header under which the client repeats a request.
const REQUEST_ID: &str = "x-request-id";

/// A JSON body.
pub struct Body<T>(pub T);

impl<T: DeserializeOwned> FromRequest<App> for Body<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, app: &App) -> Result<Self, Refusal> {
        let body = read_bytes(request, COMMAND_BODY_MAX, app).await?;
        Ok(Self(parse_json(if body.bytes.trim_ascii().is_empty() { b"{}" } else { &body.bytes })?))
    }
}

/// What makes two requests the same one.
pub fn request_id(headers: &HeaderMap) -> Option<&str> {
    headers.get(REQUEST_ID).and_then(|id| id.to_str().ok()).filter(|id| !id.is_empty())
}

/// A devbox that a path names, and the key that asks. It may have been shut down.
pub enum Found {
    /// As it is now.
    Here(Key, Box<Sandbox>),
    /// It was shut down.
    Gone(Key, SandboxId),
}

impl FromRequestParts<App> for Found {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Refusal> {
        let Caller(key) = Caller::from_request_parts(parts, app).await?;
        let text = text_in_path(parts, app, "sandbox").await?;
        let not_found = || EngineError::SandboxNotFound { id: shown(&text) };
        let named = read_devbox(&app.engine, &key.owner, &text).ok_or_else(not_found)?;
        let (Devbox::Given(id) | Devbox::Perhaps(id)) = named;
        tracing::Span::current().record("sandbox", tracing::field::display(id));
        match (app.engine.get(&key.owner, id).await, named) {
            (Ok(sandbox), _) => Ok(Self::Here(key, Box::new(sandbox))),
            (Err(EngineError::SandboxNotFound { .. }), Devbox::Given(id)) => Ok(Self::Gone(key, id)),
            (Err(EngineError::SandboxNotFound { .. }), Devbox::Perhaps(_)) => Err(not_found().into()),
            (Err(error), _) => Err(error.into()),
        }
    }
}

/// A devbox that is there, and the key that asks.
pub struct Target {
    /// Whose.
    pub key: Key,
    /// As it is now.
    pub sandbox: Sandbox,
}

impl FromRequestParts<App> for Target {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Refusal> {
        match Found::from_request_parts(parts, app).await? {
            Found::Here(key, sandbox) => Ok(Self { key, sandbox: *sandbox }),
            Found::Gone(..) => Err(Refusal::unsupported("the devbox was shut down")),
        }
    }
}

/// An execution in a devbox.
pub struct Execution {
    /// Whose, and where.
    pub target: Target,
    /// The command that it is.
    pub command: CommandRef,
}

impl FromRequestParts<App> for Execution {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Refusal> {
        let target = Target::from_request_parts(parts, app).await?;
        let text = text_in_path(parts, app, "execution").await?;
        let not_found = |_| EngineError::CommandNotFound { id: shown(&text) };
        let id = text.parse().map_err(not_found)?;
        let command = app.engine.command(&target.key.owner, target.sandbox.id, &id).await?;
        Ok(Self { target, command })
    }
}
