//! Reading requests: bodies and names in paths, each with its failure in this dialect's shape.
//!
//! Later versions of the client send more than earlier ones, so unknown fields are ignored, and `null` is the same as absent.

use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use engine::{EngineError, Key, Sandbox, SandboxName};
use serde::de::DeserializeOwned;

use super::error::Refusal;
use crate::http::app::{App, Caller};
use crate::http::body::{BODY_MAX, COMMAND_BODY_MAX, parse_json, read_bytes, text_in_path};
use crate::http::error::ApiError;

/// A JSON body of the control plane. An empty one is an empty object.
pub struct Body<T>(pub T);

impl<T: DeserializeOwned> FromRequest<App> for Body<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, app: &App) -> Result<Self, Refusal> {
        Ok(Self(read(request, BODY_MAX, app).await?))
    }
}

/// A JSON body of the toolbox.
pub struct ToolboxBody<T>(pub T);

impl<T: DeserializeOwned> FromRequest<App> for ToolboxBody<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, app: &App) -> Result<Self, Refusal> {
        Ok(Self(read(request, COMMAND_BODY_MAX, app).await.map_err(Refusal::toolbox_api)?))
    }
}

async fn read<T: DeserializeOwned>(request: Request, limit: usize, app: &App) -> Result<T, ApiError> {
    let body = read_bytes(request, limit, app).await?;
    parse_json(if body.bytes.trim_ascii().is_empty() { b"{}" } else { &body.bytes })
}

/// The sandbox that a path of the control plane names by its id or name, and the key that asks.
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
        let name = text_in_path(parts, app, "sandbox").await?;
        // An id goes first, so that no sandbox's name hides another sandbox.
        let sandbox = match name.parse() {
            Ok(id) => match app.engine.get(&key.owner, id).await {
                Err(EngineError::SandboxNotFound { .. }) => app.engine.find(&key.owner, &name).await?,
                found => found?,
            },
            Err(_) => app.engine.find(&key.owner, &name).await?,
        };
        tracing::Span::current().record("sandbox", tracing::field::display(sandbox.id));
        Ok(Self { key, sandbox })
    }
}

/// The sandbox that a path of the toolbox names by its id, and the key that asks.
pub struct Target {
    /// Whose.
    pub key: Key,
    /// As it is now.
    pub sandbox: Sandbox,
}

impl FromRequestParts<App> for Target {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Refusal> {
        let Caller(key) = Caller::from_request_parts(parts, app).await?;
        let text = text_in_path(parts, app, "sandbox").await?;
        let not_found =
            || EngineError::SandboxNotFound { id: text.chars().take(SandboxName::LENGTH_MAX).collect() };
        let id = text.parse().map_err(|_| not_found())?;
        let sandbox = app.engine.get(&key.owner, id).await.map_err(Refusal::toolbox)?;
        tracing::Span::current().record("sandbox", tracing::field::display(sandbox.id));
        Ok(Self { key, sandbox })
    }
}

/// A text in a path, decoded.
pub async fn in_path(parts: &mut Parts, app: &App, name: &'static str) -> Result<String, Refusal> {
    text_in_path(parts, app, name).await.map_err(Refusal::toolbox_api)
}
