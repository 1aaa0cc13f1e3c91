//! Calls about webhooks: URLs to which the daemon sends events.

use http::Method;
use wire::api;

use crate::error::ClientError;
use crate::{Client, Repeat, in_query, json, plain};

fn path(webhook: &str) -> String {
    format!("/v1/webhooks/{}", in_query(webhook))
}

impl Client {
    /// Creates a webhook. The secret in the answer is shown only once.
    pub async fn create_webhook(&self, wish: &api::CreateWebhook) -> Result<api::Webhook, ClientError> {
        self.call(json(Method::POST, "/v1/webhooks".into(), wish), Repeat::Never).await
    }

    /// Lists all webhooks, oldest first.
    pub async fn webhooks(&self) -> Result<Vec<api::Webhook>, ClientError> {
        let list: api::WebhookList = self.read("/v1/webhooks".into()).await?;
        Ok(list.webhooks)
    }

    /// Deletes a webhook.
    pub async fn delete_webhook(&self, webhook: &str) -> Result<(), ClientError> {
        self.act(Method::DELETE, path(webhook), Repeat::Never).await
    }

    /// Sends a webhook a test, and returns what came of it.
    pub async fn test_webhook(&self, webhook: &str) -> Result<api::WebhookTest, ClientError> {
        self.call(plain(Method::POST, format!("{}/test", path(webhook))), Repeat::Never).await
    }

    /// Lists the events that a webhook could not deliver, oldest first.
    pub async fn dead_letters(&self, webhook: &str) -> Result<Vec<api::DeadLetter>, ClientError> {
        let list: api::DeadLetterList = self.read(format!("{}/dead-letters", path(webhook))).await?;
        Ok(list.dead_letters)
    }
}
