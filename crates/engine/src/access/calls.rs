//! Calls about API keys.

use crate::access::keys::BOOTSTRAP_ID;
use crate::observe::clock::now;
use crate::{Engine, EngineError, Key, KeyEnd, KeyLimits, KeySecret, KeySpec, Owner};

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
                return Ok((key, secret));
            }
        }
    }

    /// Makes `secret` a key of the owner `default` with admin rights, replacing an earlier bootstrap key.
    pub async fn set_bootstrap_key(&self, secret: &KeySecret) -> Result<Key, EngineError> {
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
        Ok(self.shared().db.keys().await?.into_iter().map(|(key, _)| key).collect())
    }

    /// Deletes a key, with effect at once. Sandboxes of its owner stay.
    pub async fn delete_key(&self, id: &str) -> Result<(), EngineError> {
        self.shared().keys.remove(id);
        match self.shared().db.delete_key(id.into()).await? {
            true => Ok(()),
            false => Err(EngineError::KeyNotFound { id: id.into() }),
        }
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
