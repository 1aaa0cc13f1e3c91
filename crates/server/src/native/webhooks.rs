//! Webhooks: create, list, delete, test, and what they could not deliver.

use std::time::{Instant, SystemTime};

use axum::Json;
use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use engine::webhook::{DeadLetter, Webhook, WebhookSpec};
use engine::{EngineError, Event, EventId, shown};
use wire::{WebhookId, api};

use super::common::carried_on;
use super::events::{KINDS, kind, to_api as event_to_api};
use crate::http::app::{App, Caller};
use crate::http::body::{self, text_in_path};
use crate::http::clock::rfc3339;
use crate::http::error::ApiError;
use crate::webhook::{Target, deliver};

/// Before a secret, as the specification of webhooks writes it.
const SECRET: &str = "whsec_";

/// A webhook's id in a path.
pub struct WebhookPath(pub WebhookId);

impl<S: Send + Sync> FromRequestParts<S> for WebhookPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let text = text_in_path(parts, state, "webhook").await?;
        let id = text.parse().map_err(|_| EngineError::WebhookNotFound { id: shown(&text) })?;
        Ok(Self(id))
    }
}

/// Creates a webhook: an address that every event from now on is sent to, one request for each event.
///
/// Requests are signed as the Standard Webhooks specification says. The response has the secret, which is shown only here.
/// An event that the receiver does not accept is sent again, with growing pauses, for six hours.
#[utoipa::path(post, path = "/v1/webhooks", tag = "webhooks", request_body = api::CreateWebhook, responses(
    (status = 201, body = api::Webhook),
    (status = 400, body = api::ErrorBody),
    (status = 429, description = "The owner has as many webhooks as are allowed.", body = api::ErrorBody),
))]
pub async fn create(
    State(app): State<App>,
    Caller(key): Caller,
    body::Json(body): body::Json<api::CreateWebhook>,
) -> Result<(StatusCode, Json<api::Webhook>), ApiError> {
    let api::CreateWebhook { url, events } = body;
    Target::parse(&url, key.admin).map_err(|error| ApiError::must("url", error.to_string()))?;
    if let Some(unknown) = events.iter().find(|event| !KINDS.contains(&event.as_str())) {
        let rule = format!("be some of {}, got `{}`", KINDS.join(", "), shown(unknown));
        return Err(ApiError::must("events", rule));
    }
    let mut kinds = events;
    kinds.sort();
    kinds.dedup();
    let spec = WebhookSpec { url, kinds, anywhere: key.admin };
    let made = carried_on(async move { app.engine.create_webhook(&key.owner, spec).await }).await?;
    let secret = format!("{SECRET}{}", STANDARD.encode(made.secret));
    Ok((StatusCode::CREATED, Json(api::Webhook { secret: Some(secret), ..to_api(made) })))
}

/// The webhooks of the key's owner, oldest first.
#[utoipa::path(get, path = "/v1/webhooks", tag = "webhooks", responses((status = 200, body = api::WebhookList)))]
pub async fn list(State(app): State<App>, Caller(key): Caller) -> Json<api::WebhookList> {
    Json(api::WebhookList { webhooks: app.engine.webhooks(&key.owner).into_iter().map(to_api).collect() })
}

/// A webhook.
#[utoipa::path(get, path = "/v1/webhooks/{webhook}", tag = "webhooks",
    params(("webhook" = String, Path, description = "Its id.")), responses(
    (status = 200, body = api::Webhook),
    (status = 404, body = api::ErrorBody),
))]
pub async fn get(
    State(app): State<App>,
    Caller(key): Caller,
    WebhookPath(id): WebhookPath,
) -> Result<Json<api::Webhook>, ApiError> {
    Ok(Json(to_api(app.engine.webhook(&key.owner, id)?)))
}

/// Deletes a webhook. Nothing more is sent to it.
#[utoipa::path(delete, path = "/v1/webhooks/{webhook}", tag = "webhooks",
    params(("webhook" = String, Path, description = "Its id.")), responses(
    (status = 204, description = "It is gone."),
    (status = 404, body = api::ErrorBody),
))]
pub async fn delete(
    State(app): State<App>,
    Caller(key): Caller,
    WebhookPath(id): WebhookPath,
) -> Result<StatusCode, ApiError> {
    carried_on(async move { app.engine.delete_webhook(&key.owner, id).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Sends a webhook an event of type `test` now, once, and answers what came of it.
#[utoipa::path(post, path = "/v1/webhooks/{webhook}/test", tag = "webhooks",
    params(("webhook" = String, Path, description = "Its id.")), responses(
    (status = 200, body = api::WebhookTest),
    (status = 404, body = api::ErrorBody),
))]
pub async fn test(
    State(app): State<App>,
    Caller(key): Caller,
    WebhookPath(id): WebhookPath,
) -> Result<Json<api::WebhookTest>, ApiError> {
    let webhook = app.engine.webhook(&key.owner, id)?;
    let target = Target::parse(&webhook.url, webhook.anywhere);
    let target = target.map_err(|error| ApiError::must("url", error.to_string()))?;
    let at = rfc3339(SystemTime::now());
    let body = api::WebhookBody { id: format!("test-{at}"), event: api::SandboxEvent::Test { at } };
    let began = Instant::now();
    let delivered = deliver(&target, &webhook, &body.id, text(&body)).await;
    let took_ms = began.elapsed().as_secs_f64() * 1000.0;
    Ok(Json(api::WebhookTest { delivered: delivered.is_ok(), error: delivered.err(), took_ms }))
}

/// The events that a webhook could not deliver, oldest first; of more than 1,000, the newest.
#[utoipa::path(get, path = "/v1/webhooks/{webhook}/dead-letters", tag = "webhooks",
    params(("webhook" = String, Path, description = "Its id.")), responses(
    (status = 200, body = api::DeadLetterList),
    (status = 404, body = api::ErrorBody),
))]
pub async fn dead_letters(
    State(app): State<App>,
    Caller(key): Caller,
    WebhookPath(id): WebhookPath,
) -> Result<Json<api::DeadLetterList>, ApiError> {
    let dead = app.engine.dead_letters(&key.owner, id).await?;
    let dead_letters = dead.into_iter().filter_map(dead_letter).collect();
    Ok(Json(api::DeadLetterList { dead_letters }))
}

/// What is sent to a webhook for an event, and the event's type. Without an event, that some were missed.
pub fn written(id: EventId, event: Option<&Event>) -> (&'static str, String) {
    let event = event.map_or(api::SandboxEvent::Missed, event_to_api);
    let kind = kind(&event);
    (kind, text(&api::WebhookBody { id: id.to_string(), event }))
}

fn text(body: &api::WebhookBody) -> String {
    serde_json::to_string(body).expect("it is made of types that JSON can write")
}

fn to_api(webhook: Webhook) -> api::Webhook {
    api::Webhook {
        id: webhook.id,
        url: webhook.url,
        events: webhook.kinds,
        secret: None,
        created_at: rfc3339(webhook.created_at),
        delivered_at: webhook.delivered_at.map(rfc3339),
        failed_attempts: webhook.attempts,
        last_error: webhook.last_error,
    }
}

fn dead_letter(dead: DeadLetter) -> Option<api::DeadLetter> {
    // Every body was written here, so all of them can be read.
    let body = serde_json::from_str(&dead.body).ok()?;
    Some(api::DeadLetter {
        id: dead.event,
        given_up_at: rfc3339(dead.given_up_at),
        attempts: dead.attempts,
        reason: dead.reason,
        body,
    })
}
