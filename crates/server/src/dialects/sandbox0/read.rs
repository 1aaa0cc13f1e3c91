//! Reading requests: bodies and ids in paths, each with its failure in this dialect's shape.
//!
//! Later versions of the client send more than earlier ones, so unknown fields are ignored, and `null` is the same as absent.

use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use engine::{EngineError, Key, Sandbox, State, shown};
use serde::de::DeserializeOwned;

use super::error::Refusal;
use super::names;
use super::notes::Notes;
use super::sandboxes::wake;
use crate::http::app::{App, Caller};
use crate::http::body::{COMMAND_BODY_MAX, parse_json, read_bytes, text_in_path};

/// A JSON body. An empty one is an empty object.
pub struct Body<T>(pub T);

impl<T: DeserializeOwned> FromRequest<App> for Body<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, app: &App) -> Result<Self, Refusal> {
        let body = read_bytes(request, COMMAND_BODY_MAX, app).await?;
        Ok(Self(parse_json(if body.bytes.trim_ascii().is_empty() { b"{}" } else { &body.bytes })?))
    }
}

/// The sandbox that a path names, in whatever state, and the key that asks.
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
        let not_found = || EngineError::SandboxNotFound { id: shown(&text) };
        let id = names::parse_sandbox(&text).ok_or_else(not_found)?;
        tracing::Span::current().record("sandbox", tracing::field::display(id));
        let sandbox = match app.engine.get(&key.owner, id).await {
            // By the name that the caller has for it.
            Err(EngineError::SandboxNotFound { .. }) => return Err(not_found().into()),
            found => found?,
        };
        Ok(Self { key, sandbox })
    }
}

/// The sandbox that a path names, running: one that is paused is resumed first, unless its caller has said otherwise.
pub struct Awake {
    /// Whose.
    pub key: Key,
    /// As it is now.
    pub sandbox: Sandbox,
}

impl FromRequestParts<App> for Awake {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Refusal> {
        let Meant { key, sandbox } = Meant::from_request_parts(parts, app).await?;
        match sandbox.state {
            State::Paused(_) if Notes::of(&sandbox).auto_resume => {
                let sandbox = wake(app, &key, &sandbox).await?;
                Ok(Self { key, sandbox })
            }
            State::Paused(_) => {
                let id = names::sandbox(sandbox.id);
                Err(Refusal::conflict(format!(
                    "sandbox `{id}` is paused and has `auto_resume` off: resume it"
                )))
            }
            State::Creating | State::Running | State::Deleting | State::Failed { .. } => {
                Ok(Self { key, sandbox })
            }
        }
    }
}
