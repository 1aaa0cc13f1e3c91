//! Webhooks: where to send an owner's events, the last event that each receiver accepted, and deliveries that failed for
//! good.
//!
//! Owns the rows, which outlive the daemon, and one copy of them in memory. `server::webhook` delivers, because a delivery
//! has the JSON form of the API.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use wire::WebhookId;

use crate::Engine;
use crate::error::{EngineError, Resource};
use crate::model::Owner;
use crate::model::random::{random, random_u128};
pub use crate::model::webhook::{DeadLetter, Webhook};
use crate::observe::clock::now;

pub use ::image::is_public;

/// The most webhooks of one owner.
pub const WEBHOOKS_MAX: usize = 20;
/// The most deliveries that are kept of those that a webhook has given up.
pub const DEAD_LETTERS_MAX: u32 = 1000;

/// All webhooks, in memory.
pub(crate) struct Webhooks {
    by_id: Mutex<BTreeMap<WebhookId, Webhook>>,
    /// Counts changes of which webhooks there are.
    changed: watch::Sender<u64>,
}

impl Webhooks {
    pub fn open(webhooks: Vec<Webhook>) -> Self {
        let by_id = webhooks.into_iter().map(|webhook| (webhook.id, webhook)).collect();
        Self { by_id: Mutex::new(by_id), changed: watch::Sender::new(0) }
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<WebhookId, Webhook>> {
        self.by_id.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request for a webhook, whose address the caller has checked.
#[derive(Debug, Clone)]
pub struct WebhookSpec {
    /// Where to deliver.
    pub url: String,
    /// The kinds of events that it is for; all if empty.
    pub kinds: Vec<String>,
    /// Whether it may lead to addresses that are not on the public internet.
    pub anywhere: bool,
}

impl Engine {
    /// Creates a webhook. It receives events that happen from now on.
    pub async fn create_webhook(&self, owner: &Owner, spec: WebhookSpec) -> Result<Webhook, EngineError> {
        let shared = self.shared();
        if self.webhooks(owner).len() >= WEBHOOKS_MAX {
            return Err(EngineError::Quota { resource: Resource::Webhooks, limit: WEBHOOKS_MAX as u64 });
        }
        let position = self.watch(owner, None, None)?.place();
        let webhook = Webhook {
            id: WebhookId::from_random(random_u128()),
            owner: owner.clone(),
            url: spec.url,
            secret: random(),
            kinds: spec.kinds,
            anywhere: spec.anywhere,
            created_at: now(),
            position,
            attempts: 0,
            failing_since: None,
            last_error: None,
            delivered_at: None,
        };
        shared.db.insert_webhook(webhook.clone()).await?;
        shared.webhooks.all().insert(webhook.id, webhook.clone());
        shared.webhooks.changed.send_modify(|changes| *changes += 1);
        Ok(webhook)
    }

    /// An owner's webhooks, oldest first.
    pub fn webhooks(&self, owner: &Owner) -> Vec<Webhook> {
        let mut found: Vec<Webhook> = self
            .shared()
            .webhooks
            .all()
            .values()
            .filter(|webhook| webhook.owner == *owner)
            .cloned()
            .collect();
        found.sort_by_key(|webhook| (webhook.created_at, webhook.id));
        found
    }

    /// A webhook by its id.
    pub fn webhook(&self, owner: &Owner, id: WebhookId) -> Result<Webhook, EngineError> {
        let found = self.shared().webhooks.all().get(&id).filter(|webhook| webhook.owner == *owner).cloned();
        found.ok_or_else(|| EngineError::WebhookNotFound { id: id.to_string() })
    }

    /// Deletes a webhook. Nothing more is delivered to it.
    pub async fn delete_webhook(&self, owner: &Owner, id: WebhookId) -> Result<(), EngineError> {
        self.webhook(owner, id)?;
        let shared = self.shared();
        shared.db.delete_webhook(id).await?;
        shared.webhooks.all().remove(&id);
        shared.webhooks.changed.send_modify(|changes| *changes += 1);
        Ok(())
    }

    /// The deliveries that a webhook has given up, oldest first; at most [`DEAD_LETTERS_MAX`].
    pub async fn dead_letters(&self, owner: &Owner, id: WebhookId) -> Result<Vec<DeadLetter>, EngineError> {
        self.webhook(owner, id)?;
        self.shared().db.dead_letters(id).await
    }

    /// The webhooks of all owners, for the deliveries.
    pub fn all_webhooks(&self) -> Vec<Webhook> {
        self.shared().webhooks.all().values().cloned().collect()
    }

    /// Changes whenever there are other webhooks than before.
    pub fn webhooks_changed(&self) -> watch::Receiver<u64> {
        self.shared().webhooks.changed.subscribe()
    }

    /// Records how far a webhook has come, and which delivery it has given up. Has no effect on one that was deleted.
    pub async fn note_webhook(&self, webhook: &Webhook, dead: Option<DeadLetter>) -> Result<(), EngineError> {
        if let Some(known) = self.shared().webhooks.all().get_mut(&webhook.id) {
            known.clone_from(webhook);
        }
        self.shared().db.note_webhook(webhook.clone(), dead, DEAD_LETTERS_MAX).await
    }
}
