//! Rows of webhooks, and of deliveries that were given up.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::{Row, params};
use wire::WebhookId;

use super::Db;
use super::rows::{micros, owner_from, signed, time, unsigned};
use crate::error::EngineError;
use crate::model::webhook::{DeadLetter, Webhook};
use crate::observe::events::EventId;

impl Db {
    /// All webhooks.
    pub async fn load_webhooks(&self) -> Result<Vec<Webhook>, EngineError> {
        self.question("read the webhooks", |db| {
            db.prepare("SELECT * FROM webhooks ORDER BY created_at, id")?
                .query_map([], webhook_from)?
                .collect()
        })
        .await
    }

    /// Inserts a webhook.
    pub async fn insert_webhook(&self, webhook: Webhook) -> Result<(), EngineError> {
        self.change("write the webhook's row", move |db| {
            db.prepare_cached(
                "INSERT INTO webhooks (id, owner, url, secret, kinds, anywhere, created_at, start, serial)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
            )?
            .execute(params![
                bytes(webhook.id),
                webhook.owner.as_str(),
                webhook.url,
                webhook.secret,
                webhook.kinds.join(" "),
                webhook.anywhere,
                micros(webhook.created_at),
                signed(webhook.position.start),
                signed(webhook.position.serial),
            ])?;
            Ok(())
        })
        .await
    }

    /// Deletes a webhook, with the deliveries that were given up.
    pub async fn delete_webhook(&self, webhook: WebhookId) -> Result<(), EngineError> {
        self.vital("delete the webhook's row", move |db| {
            db.prepare_cached("DELETE FROM webhooks WHERE id = ?1")?.execute([bytes(webhook)])?;
            Ok(())
        })
        .await
    }

    /// Writes how far a webhook has come, and with `dead`, which delivery it has given up. Of those it keeps the newest
    /// `dead_max`.
    pub async fn note_webhook(
        &self,
        webhook: Webhook,
        dead: Option<DeadLetter>,
        dead_max: u32,
    ) -> Result<(), EngineError> {
        self.change("write how far the webhook has come", move |db| {
            let id = bytes(webhook.id);
            let changed = db
                .prepare_cached(
                    "UPDATE webhooks SET start = ?2, serial = ?3, attempts = ?4, failing_since = ?5, last_error = ?6,
                         delivered_at = ?7
                     WHERE id = ?1",
                )?
                .execute(params![
                    id,
                    signed(webhook.position.start),
                    signed(webhook.position.serial),
                    webhook.attempts,
                    webhook.failing_since.map(micros),
                    webhook.last_error,
                    webhook.delivered_at.map(micros),
                ])?;
            let Some(dead) = dead.filter(|_| changed == 1) else { return Ok(()) };
            db.prepare_cached(
                "INSERT OR REPLACE INTO webhook_dead_letters (webhook, serial, event, given_up_at, attempts, reason, body)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
            )?
            .execute(params![
                id,
                signed(dead.serial),
                dead.event,
                micros(dead.given_up_at),
                dead.attempts,
                dead.reason,
                dead.body,
            ])?;
            db.prepare_cached(
                "DELETE FROM webhook_dead_letters WHERE webhook = ?1 AND serial <= (
                     SELECT serial FROM webhook_dead_letters WHERE webhook = ?1 ORDER BY serial DESC LIMIT 1 OFFSET ?2)",
            )?
            .execute(params![id, dead_max])?;
            Ok(())
        })
        .await
    }

    /// The deliveries that a webhook has given up, oldest first.
    pub async fn dead_letters(&self, webhook: WebhookId) -> Result<Vec<DeadLetter>, EngineError> {
        self.question("read the deliveries that were given up", move |db| {
            db.prepare_cached("SELECT * FROM webhook_dead_letters WHERE webhook = ?1 ORDER BY serial")?
                .query_map([bytes(webhook)], dead_from)?
                .collect()
        })
        .await
    }
}

fn bytes(id: WebhookId) -> [u8; 16] {
    id.bits().to_be_bytes()
}

fn optional_time(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<SystemTime>> {
    Ok(row.get::<_, Option<i64>>(column)?.map(|at| UNIX_EPOCH + Duration::from_micros(at as u64)))
}

fn webhook_from(row: &Row<'_>) -> rusqlite::Result<Webhook> {
    let kinds: String = row.get("kinds")?;
    Ok(Webhook {
        id: WebhookId::from_bits(u128::from_be_bytes(row.get("id")?)),
        owner: owner_from(row)?,
        url: row.get("url")?,
        secret: row.get("secret")?,
        kinds: kinds.split_whitespace().map(str::to_owned).collect(),
        anywhere: row.get("anywhere")?,
        created_at: time(row, "created_at")?,
        position: EventId { start: unsigned(row, "start")?, serial: unsigned(row, "serial")? },
        attempts: row.get("attempts")?,
        failing_since: optional_time(row, "failing_since")?,
        last_error: row.get("last_error")?,
        delivered_at: optional_time(row, "delivered_at")?,
    })
}

fn dead_from(row: &Row<'_>) -> rusqlite::Result<DeadLetter> {
    Ok(DeadLetter {
        event: row.get("event")?,
        serial: unsigned(row, "serial")?,
        given_up_at: time(row, "given_up_at")?,
        attempts: row.get("attempts")?,
        reason: row.get("reason")?,
        body: row.get("body")?,
    })
}
