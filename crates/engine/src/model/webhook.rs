//! Webhooks: URLs to which the daemon sends an owner's events.

use std::time::SystemTime;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use wire::WebhookId;

use crate::model::Owner;
use crate::model::event::EventId;

/// A URL to which the daemon sends events.
#[derive(Clone)]
pub struct Webhook {
    /// Its id.
    pub id: WebhookId,
    /// Whose events it receives.
    pub owner: Owner,
    /// Where to.
    pub url: String,
    /// What deliveries are signed with.
    pub secret: [u8; 32],
    /// The kinds of events that it is for; all if empty.
    pub kinds: Vec<String>,
    /// Whether it may lead to addresses that are not on the public internet.
    pub anywhere: bool,
    /// When it was made.
    pub created_at: SystemTime,
    /// The last event that was delivered, given up or not meant.
    pub position: EventId,
    /// Failed attempts since the last success.
    pub attempts: u32,
    /// When the first of them was.
    pub failing_since: Option<SystemTime>,
    /// What the last of them said.
    pub last_error: Option<String>,
    /// When an event was last delivered.
    pub delivered_at: Option<SystemTime>,
}

impl Webhook {
    /// The signature of a message.
    pub fn tag(&self, message: &[u8]) -> [u8; 32] {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.secret).expect("a key may have any length");
        mac.update(message);
        mac.finalize().into_bytes().into()
    }
}

impl std::fmt::Debug for Webhook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Webhook").field("id", &self.id).field("url", &self.url).finish_non_exhaustive()
    }
}

/// A delivery that was given up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadLetter {
    /// The id of its event.
    pub event: String,
    /// Its number among the owner's events.
    pub serial: u64,
    /// When it was given up.
    pub given_up_at: SystemTime,
    /// How often it was tried.
    pub attempts: u32,
    /// Why the last attempt failed.
    pub reason: String,
    /// What would have been delivered.
    pub body: String,
}
