//! Calls about secrets. A change acts on all sandboxes that may use the secret before it is answered.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::error::{EngineError, Resource, chain};
use crate::model::check::page_limit;
use crate::model::secret::{LedgerCheck, LedgerLine, SECRETS_MAX, SecretSource, SecretSpec, SecretView};
use crate::model::{Key, Owner};
use crate::observe::clock::now;
use crate::{Engine, Shared};

/// How often the sources of secrets are looked at whose time is over.
const REFRESH_EVERY: Duration = Duration::from_secs(5);

impl Engine {
    /// Keeps a secret under a name, or gives the secret of this name another value. In force when this returns.
    pub async fn set_secret(&self, key: &Key, spec: SecretSpec) -> Result<SecretView, EngineError> {
        // A file or a variable of the daemon's machine is not for everyone who may make sandboxes.
        if !matches!(spec.source, SecretSource::Value(_)) && !key.admin {
            return Err(EngineError::AdminOnly {
                doing: "keep a secret that is read from the daemon's machine",
            });
        }
        let shared = self.shared();
        let name = spec.name.as_str().to_owned();
        let used = shared.secrets.count(&key.owner);
        if !shared.secrets.has(&key.owner, &name) && used >= SECRETS_MAX {
            return Err(EngineError::Quota { resource: Resource::Secrets, limit: SECRETS_MAX as u64 });
        }
        let row = shared.secrets.row(&key.owner, spec, now())?;
        shared.db.put_credential(row.clone()).await?;
        shared.secrets.put(row);
        apply(shared, &key.owner, &name).await?;
        self.secret(key, &name)
    }

    /// One of the owner's secrets, without its value.
    pub fn secret(&self, key: &Key, name: &str) -> Result<SecretView, EngineError> {
        let view = self.shared().secrets.view(&key.owner, name, key.admin);
        let view = view.ok_or_else(|| EngineError::SecretNotFound { name: name.into() })?;
        Ok(self.counted(&key.owner, view))
    }

    /// The owner's secrets by name, without their values.
    pub fn secrets(&self, key: &Key) -> Vec<SecretView> {
        let views = self.shared().secrets.list(&key.owner, key.admin);
        views.into_iter().map(|view| self.counted(&key.owner, view)).collect()
    }

    fn counted(&self, owner: &Owner, view: SecretView) -> SecretView {
        let sandboxes = users(self.shared(), owner, &view.name).len();
        SecretView { sandboxes, ..view }
    }

    /// Deletes a secret. When this returns, no request carries it any more.
    pub async fn delete_secret(&self, key: &Key, name: &str) -> Result<(), EngineError> {
        let shared = self.shared();
        if !shared.db.delete_credential(key.owner.clone(), name.into()).await? {
            return Err(EngineError::SecretNotFound { name: name.into() });
        }
        shared.secrets.remove(&key.owner, name);
        apply(shared, &key.owner, name).await
    }

    /// Requests that carried secrets of the owner, oldest first.
    pub async fn ledger(
        &self,
        owner: &Owner,
        after: Option<u64>,
        limit: Option<u32>,
    ) -> Result<Vec<LedgerLine>, EngineError> {
        self.shared().db.ledger(owner.clone(), after, page_limit(limit)?).await
    }

    /// Whether the ledger of this installation is whole.
    pub async fn verify_ledger(&self) -> Result<LedgerCheck, EngineError> {
        self.shared().db.verify_ledger().await
    }
}

/// The sandboxes of an owner whose policy names a secret.
fn users(shared: &Shared, owner: &Owner, name: &str) -> Vec<Arc<super::live::LiveSandbox>> {
    let all = shared.registry().all();
    all.into_iter()
        .filter(|live| live.owner == *owner && live.view().network.inject().iter().any(|it| it == name))
        .collect()
}

/// Puts a changed secret in force in every sandbox that may use it.
async fn apply(shared: &Arc<Shared>, owner: &Owner, name: &str) -> Result<(), EngineError> {
    let mut failed = None;
    for live in users(shared, owner, name) {
        if let Err(error) = live.apply_network().await {
            // A failure leaves that sandbox without a network, and so without the secret.
            tracing::error!(sandbox = %live.id, error = chain(&error), "cannot put a secret in force");
            failed = Some(error);
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Reads the sources of secrets again when their time is over, or when a host has rejected what was read.
pub(crate) async fn keep_fresh(shared: Weak<Shared>) {
    let mut ticks = tokio::time::interval(REFRESH_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(shared) = shared.upgrade() else { return };
        let rejected = shared.networks.take_rejected();
        for (owner, id) in shared.secrets.read_elsewhere() {
            let (secrets, of, at_once) = (Arc::clone(&shared.secrets), owner.clone(), rejected.contains(&id));
            let read = tokio::task::spawn_blocking(move || secrets.refresh(&of, id, at_once)).await;
            if read.is_ok_and(|changed| changed)
                && let Some(name) = shared.secrets.name_of(&owner, id)
                && let Err(error) = apply(&shared, &owner, &name).await
            {
                tracing::error!(secret = name, error = chain(&error), "cannot put a secret in force");
            }
        }
    }
}
