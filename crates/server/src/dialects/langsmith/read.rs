//! Reading requests: bodies, names in paths and queries, each with its failure in this dialect's shape.
//!
//! Clients leave out what is not set and later versions send more than earlier ones, so unknown fields are ignored and `null` is the
//! same as absent.

use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use engine::{EngineError, Key, Sandbox, SandboxName};
use serde::de::DeserializeOwned;

use super::error::{Doing, Refusal};
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

/// A JSON body of the data plane.
pub struct DataBody<T>(pub T);

impl<T: DeserializeOwned> FromRequest<App> for DataBody<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, app: &App) -> Result<Self, Refusal> {
        let read = read(request, COMMAND_BODY_MAX, app).await;
        Ok(Self(read.map_err(|error| Refusal::data_api(Doing::Command, error))?))
    }
}

async fn read<T: DeserializeOwned>(request: Request, limit: usize, app: &App) -> Result<T, ApiError> {
    let body = read_bytes(request, limit, app).await?;
    parse_json(if body.bytes.trim_ascii().is_empty() { b"{}" } else { &body.bytes })
}

/// Something in a path, decoded.
pub struct InPath(pub String);

impl<S: Send + Sync> FromRequestParts<S> for InPath {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        text_in_path(parts, state, "name").await.map(Self).map_err(Refusal::from)
    }
}

/// Something that a path names by a name or an id, and the key that asks.
pub struct Named {
    /// Where it is.
    pub app: App,
    /// Whose.
    pub key: Key,
    /// Decoded.
    pub name: String,
}

impl FromRequestParts<App> for Named {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Refusal> {
        let Caller(key) = Caller::from_request_parts(parts, app).await?;
        let InPath(name) = InPath::from_request_parts(parts, app).await?;
        Ok(Self { app: app.clone(), key, name })
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
        let name = text_in_path(parts, app, "sandbox").await?;
        let sandbox = app.engine.find(&key.owner, &name).await?;
        tracing::Span::current().record("sandbox", tracing::field::display(sandbox.id));
        Ok(Self { key, sandbox })
    }
}

/// The sandbox that a path of the data plane names by its id, and the key that asks.
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
        let sandbox = app.engine.get(&key.owner, text.parse().map_err(|_| not_found())?).await?;
        tracing::Span::current().record("sandbox", tracing::field::display(sandbox.id));
        Ok(Self { key, sandbox })
    }
}
