//! Bodies about webhooks.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::SandboxEvent;
use crate::WebhookId;

/// `POST /v1/webhooks`
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CreateWebhook {
    /// Where events are sent to, with `https` or `http`. Only a key with admin rights may name an address that is not on the
    /// public internet.
    pub url: String,
    /// The types of events to send, such as `sandbox` or `command_ended`. Default: all.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<String>,
}

/// An address that events are sent to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Webhook {
    /// A UUID.
    #[schema(value_type = String)]
    pub id: WebhookId,
    /// Where events are sent to.
    pub url: String,
    /// The types of events that are sent; all if empty.
    pub events: Vec<String>,
    /// What requests are signed with. Only in the response to its creation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
    /// When it was made.
    pub created_at: String,
    /// When an event was last delivered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delivered_at: Option<String>,
    /// Failed attempts since then.
    pub failed_attempts: u32,
    /// The error of the last attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// Response to `GET /v1/webhooks`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WebhookList {
    /// Oldest first.
    pub webhooks: Vec<Webhook>,
}

/// Response to `GET /v1/webhooks/{webhook}/dead-letters`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DeadLetterList {
    /// Oldest first; at most the newest 1,000.
    pub dead_letters: Vec<DeadLetter>,
}

/// An event that could not be delivered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DeadLetter {
    /// The event's id.
    pub id: String,
    /// When it was given up.
    pub given_up_at: String,
    /// How often it was tried.
    pub attempts: u32,
    /// Why the last attempt failed.
    pub reason: String,
    /// What would have been sent.
    pub body: WebhookBody,
}

/// What is sent to a webhook.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WebhookBody {
    /// The event's id. An event may be sent more than once, always under the same id.
    pub id: String,
    /// What happened.
    #[serde(flatten)]
    pub event: SandboxEvent,
}

/// Response to `POST /v1/webhooks/{webhook}/test`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WebhookTest {
    /// Whether the receiver accepted it.
    pub delivered: bool,
    /// What went wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// How long it took.
    pub took_ms: f64,
}
