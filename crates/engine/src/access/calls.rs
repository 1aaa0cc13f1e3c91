//! Calls about API keys.

use std::sync::Arc;
use std::time::Duration;

use tracing::warn;

use crate::Shared;
use crate::access::keys::BOOTSTRAP_ID;
use crate::error::chain;
use crate::observe::clock::now;
use crate::{Engine, EngineError, Key, KeyEnd, KeyLimits, KeySecret, KeySpec, Owner, OwnerUse};

/// How long to wait before trying again to delete the row of a revoked key.
const REVOKE_RETRY: Duration = Duration::from_secs(5);

/// How far a revocation has come. In either case the key opens nothing any more, also after a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Revocation {
    /// The key's row is gone.
    Done,
    /// The row could not be deleted, as on a full disk. The key is marked; the row is deleted when that is possible.
    Marked,
}

impl Engine {
    /// Creates a key. The secret is returned only here.
    pub async fn create_key(&self, spec: KeySpec) -> Result<(Key, KeySecret), EngineError> {
        loop {
            let (id, secret) = KeySecret::generate();
            let KeySpec { owner, admin, metrics_only, limits } = spec.clone();
            let key = Key { id, owner, admin, metrics_only, limits, created_at: now() };
            // If the random id is taken, try another.
            if self.shared().db.put_key(key.clone(), secret.hash()).await? {
                self.shared().keys.put(key.clone(), secret.hash());
                apply_output_limit(self.shared(), &key.owner);
                return Ok((key, secret));
            }
        }
    }

    /// Makes `secret` a key of the owner `default` with admin rights, replacing an earlier bootstrap key. If it is that key
    /// already, the key stays as it is, with whatever was derived from it.
    pub async fn set_bootstrap_key(&self, secret: &KeySecret) -> Result<Key, EngineError> {
        // An earlier bootstrap key may have been revoked; this is another key.
        unmark(self.shared(), BOOTSTRAP_ID.to_owned()).await;
        if let Some(key) = self.authenticate(secret.reveal()).filter(|key| key.id == BOOTSTRAP_ID) {
            return Ok(key);
        }
        let key = Key {
            id: BOOTSTRAP_ID.into(),
            owner: Owner::default_owner(),
            admin: true,
            metrics_only: false,
            limits: KeyLimits::default(),
            created_at: now(),
        };
        self.shared().db.put_key(key.clone(), secret.hash()).await?;
        self.shared().keys.put(key.clone(), secret.hash());
        Ok(key)
    }

    /// All keys, oldest first.
    pub async fn keys(&self) -> Result<Vec<Key>, EngineError> {
        let keys = self.shared().db.keys().await?.into_iter().map(|(key, _)| key);
        Ok(keys.filter(|key| !self.shared().revoked.is_marked(&key.id)).collect())
    }

    /// Deletes a key, with effect at once. Sandboxes of its owner stay.
    pub async fn delete_key(&self, id: &str) -> Result<Revocation, EngineError> {
        let shared = self.shared();
        let owner = shared.keys.owner_of(id);
        let was_known = shared.keys.remove(id);
        if let Some(owner) = owner {
            apply_output_limit(shared, &owner);
        }
        match shared.db.delete_key(id.into()).await {
            Ok(true) => Ok(Revocation::Done),
            Ok(false) => Err(EngineError::KeyNotFound { id: id.into() }),
            Err(error) if was_known || shared.revoked.is_marked(id) => {
                let (marking, marked_id) = (Arc::clone(shared), id.to_owned());
                let marked = tokio::task::spawn_blocking(move || marking.revoked.mark(&marked_id)).await;
                if was_known {
                    shared.runtime.spawn(delete_row_in_the_end(Arc::clone(shared), id.to_owned()));
                }
                match marked {
                    Ok(Ok(())) => {
                        warn!(key = id, error = chain(&error), "a revoked key's row cannot be deleted yet");
                        Ok(Revocation::Marked)
                    }
                    // The key opens nothing until a restart at least, and the row is still tried.
                    Ok(Err(_)) | Err(_) => Err(error),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// The key with this id, for proofs that name a key instead of carrying its secret. Reads memory, not rows.
    pub fn key(&self, id: &str) -> Option<Key> {
        self.shared().keys.get(id)
    }

    /// What an owner uses of what keys limit.
    pub async fn use_of(&self, owner: &Owner) -> Result<OwnerUse, EngineError> {
        let shared = self.shared();
        let snapshots = self.snapshots(owner).await?.len() as u64;
        let sandboxes = shared.registry().use_of(owner);
        Ok(OwnerUse {
            volume_bytes: shared.volumes.bytes_of(owner),
            output_bytes: shared.output.used(owner),
            snapshots,
            builds: shared.builds.running(owner) as u64,
            ..sandboxes
        })
    }

    /// Notifies when a key is deleted.
    pub fn key_end(&self, key: &Key) -> KeyEnd {
        self.shared().keys.end_of(key)
    }

    /// The key with the secret `presented`, if there is one. Takes constant time; reads memory, not rows.
    pub fn authenticate(&self, presented: &str) -> Option<Key> {
        self.shared().keys.authenticate(presented)
    }
}

/// Output is kept for owners and not for keys: the smallest limit of an owner's keys holds.
pub(crate) fn apply_output_limit(shared: &Shared, owner: &Owner) {
    shared.output.limit(owner, shared.keys.smallest(owner, |limits| limits.output_bytes));
}

/// Deletes the row of a revoked key, however long that takes, and then its mark.
async fn delete_row_in_the_end(shared: Arc<Shared>, id: String) {
    loop {
        tokio::time::sleep(REVOKE_RETRY).await;
        match shared.db.delete_key(id.clone()).await {
            Ok(_) => return unmark(&shared, id).await,
            Err(EngineError::Store { source: crate::DbError::Closed, .. }) => return,
            Err(_) => {} // Logged when it was marked.
        }
    }
}

async fn unmark(shared: &Arc<Shared>, id: String) {
    let owned = Arc::clone(shared);
    match tokio::task::spawn_blocking(move || owned.revoked.unmark(&id)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => warn!(%error, "cannot remove the mark of a revoked key"),
        Err(error) => warn!(%error, "removing the mark of a revoked key panicked"),
    }
}

/// Deletes the rows of keys that an earlier daemon marked. Keys whose rows stay are retried, and open nothing.
pub(crate) async fn finish_revocations(shared: &Arc<Shared>) {
    for id in shared.revoked.marked() {
        shared.keys.remove(&id);
        match shared.db.delete_key(id.clone()).await {
            Ok(_) => unmark(shared, id).await,
            Err(error) => {
                warn!(key = id, error = chain(&error), "a revoked key's row cannot be deleted yet");
                shared.runtime.spawn(delete_row_in_the_end(Arc::clone(shared), id));
            }
        }
    }
}
