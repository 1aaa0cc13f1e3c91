//! Secrets that sandboxes use without holding them, and the ledger of their use.

use http::Method;
use wire::api;

use crate::error::ClientError;
use crate::{Client, Repeat, in_query, json};

fn path(name: &str) -> String {
    format!("/v1/secrets/{}", in_query(name))
}

impl Client {
    /// Keeps a secret, or gives it another value.
    pub async fn set_secret(&self, name: &str, wish: &api::SetSecret) -> Result<api::Secret, ClientError> {
        self.call(json(Method::PUT, path(name), wish), Repeat::Harmless).await
    }

    /// Lists all secrets, sorted by name, without their values.
    pub async fn secrets(&self) -> Result<Vec<api::Secret>, ClientError> {
        let list: api::SecretList = self.read("/v1/secrets".into()).await?;
        Ok(list.secrets)
    }

    /// Returns a secret, without its value.
    pub async fn secret(&self, name: &str) -> Result<api::Secret, ClientError> {
        self.read(path(name)).await
    }

    /// Deletes a secret.
    pub async fn delete_secret(&self, name: &str) -> Result<(), ClientError> {
        self.act(Method::DELETE, path(name), Repeat::Never).await
    }

    /// Returns requests that carried a secret, oldest first: those after a number, or the newest.
    pub async fn ledger(&self, after: Option<u64>, limit: u32) -> Result<Vec<api::LedgerLine>, ClientError> {
        let after = after.map(|after| format!("&after={after}")).unwrap_or_default();
        let page: api::LedgerPage = self.read(format!("/v1/ledger?limit={limit}{after}")).await?;
        Ok(page.lines)
    }

    /// Checks whether a line of the ledger was changed or removed.
    pub async fn verify_ledger(&self) -> Result<api::LedgerCheck, ClientError> {
        self.read("/v1/ledger/verify".into()).await
    }
}
