//! API keys: stored as hashes, looked up in memory.
//!
//! A key is `shoal_<id>_<secret>`; the id finds it, the whole text proves it. The operator may set one key of any
//! form, the *bootstrap key*. `db` owns the rows; this file knows how a text becomes a [`Key`].

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{PoisonError, RwLock};

use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::watch;

use crate::error::{EngineError, Field};
use crate::model::random::{random, random_u64};
use crate::model::{Key, KeyLimits, Owner};

/// The id of the key that the operator set.
pub const BOOTSTRAP_ID: &str = "bootstrap";

const PREFIX: &str = "shoal_";
/// 48 bits for the id: there are few keys, and the table rejects a collision.
const ID_DIGITS: usize = 12;
/// 128 bits would be enough; more cost nothing.
const SECRET_BYTES: usize = 24;
/// A shorter key can be guessed; this many random bytes cannot.
const LENGTH_MIN: usize = 16;
/// Fits into a header line with room to spare.
const LENGTH_MAX: usize = 512;

/// The secret text of a key. Printed only on purpose.
#[derive(Clone, PartialEq, Eq)]
pub struct KeySecret(String);

impl KeySecret {
    /// A new secret under a new id.
    pub(crate) fn generate() -> (String, Self) {
        let id = format!("{:0width$x}", random_u64() >> (64 - 4 * ID_DIGITS), width = ID_DIGITS);
        let secret: String = random::<SECRET_BYTES>().iter().map(|byte| format!("{byte:02x}")).collect();
        (id.clone(), Self(format!("{PREFIX}{id}_{secret}")))
    }

    /// A secret for a new data directory, which the daemon writes to its key file at its first start.
    pub fn random() -> Self {
        Self::generate().1
    }

    /// A secret that an operator chose: 16 to 512 visible ASCII characters that are not a well-known placeholder.
    pub fn parse(text: &str) -> Result<Self, EngineError> {
        // Documents and examples are full of these; a copied one is an open door.
        const PLACEHOLDERS: [&str; 9] = [
            "changeme",
            "change-me",
            "change_me",
            "placeholder",
            "your-api-key",
            "your_api_key",
            "api-key-here",
            "replace-me",
            "replace_me",
        ];
        const DISTINCT_MIN: usize = 5;
        let lower = text.to_ascii_lowercase();
        let mut seen = [false; 256];
        text.bytes().for_each(|byte| seen[usize::from(byte)] = true);
        let rule = if text.len() < LENGTH_MIN {
            format!("have at least {LENGTH_MIN} characters, got {}", text.len())
        } else if text.len() > LENGTH_MAX {
            format!("have at most {LENGTH_MAX} characters, got {}", text.len())
        } else if !text.bytes().all(|b| b.is_ascii_graphic()) {
            "contain nothing but visible ASCII characters".to_owned()
        } else if seen.iter().filter(|seen| **seen).count() < DISTINCT_MIN {
            format!("have at least {DISTINCT_MIN} different characters")
        } else if let Some(known) = PLACEHOLDERS.iter().find(|known| lower.contains(*known)) {
            format!("not contain the placeholder `{known}`")
        } else {
            return Ok(Self(text.into()));
        };
        Err(Field::ApiKey.must(rule))
    }

    /// The secret itself, to be shown once or written to its file.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    pub(crate) fn hash(&self) -> KeyHash {
        KeyHash::of(&self.0)
    }
}

impl fmt::Debug for KeySecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeySecret(..)")
    }
}

/// What is stored of a secret. Secrets are random and long, so a plain hash is as good as a slow one.
#[derive(Clone, Copy)]
pub(crate) struct KeyHash(pub [u8; 32]);

impl KeyHash {
    fn of(text: &str) -> Self {
        Self(Sha256::digest(text.as_bytes()).into())
    }

    fn is(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

/// All keys, in memory.
pub(crate) struct Keys {
    by_id: RwLock<HashMap<String, Known>>,
}

struct Known {
    key: Key,
    hash: KeyHash,
    /// Dropped with the key, which notifies waiters.
    lives: watch::Sender<()>,
}

/// Notifies when a key is deleted. Long operations of a key hold one.
#[derive(Debug, Clone)]
pub struct KeyEnd(Option<watch::Receiver<()>>);

impl KeyEnd {
    /// Returns when the key is deleted, at once if it already is. Cancel-safe.
    pub async fn wait(&mut self) {
        if let Some(lives) = &mut self.0 {
            // Nothing is ever sent; the error means the end.
            while lives.changed().await.is_ok() {}
        }
    }
}

impl Keys {
    pub fn new(keys: Vec<(Key, KeyHash)>) -> Self {
        let keys = keys
            .into_iter()
            .map(|(key, hash)| (key.id.clone(), Known { key, hash, lives: watch::Sender::new(()) }));
        Self { by_id: RwLock::new(keys.collect()) }
    }

    pub fn put(&self, key: Key, hash: KeyHash) {
        let known = Known { key, hash, lives: watch::Sender::new(()) };
        self.by_id.write().unwrap_or_else(PoisonError::into_inner).insert(known.key.id.clone(), known);
    }

    /// The key with this id.
    pub fn get(&self, id: &str) -> Option<Key> {
        self.by_id.read().unwrap_or_else(PoisonError::into_inner).get(id).map(|known| known.key.clone())
    }

    /// When a key ends. A key that replaced another under its id is a different key.
    pub fn end_of(&self, key: &Key) -> KeyEnd {
        let keys = self.by_id.read().unwrap_or_else(PoisonError::into_inner);
        KeyEnd(keys.get(&key.id).filter(|known| known.key == *key).map(|known| known.lives.subscribe()))
    }

    /// The most that any key of an owner allows, for requests that are not bound to one key. No limit if the owner has no key.
    pub fn limits_of(&self, owner: &Owner) -> KeyLimits {
        let keys = self.by_id.read().unwrap_or_else(PoisonError::into_inner);
        let owned = keys.values().filter(|known| known.key.owner == *owner && !known.key.metrics_only);
        let most = |a: KeyLimits, b: KeyLimits| KeyLimits {
            sandboxes: a.sandboxes.zip(b.sandboxes).map(|(a, b)| a.max(b)),
            cpu_millis: a.cpu_millis.zip(b.cpu_millis).map(|(a, b)| a.max(b)),
            memory_bytes: a.memory_bytes.zip(b.memory_bytes).map(|(a, b)| a.max(b)),
            ..KeyLimits::default()
        };
        owned.map(|known| known.key.limits).reduce(most).unwrap_or_default()
    }

    pub fn owner_of(&self, id: &str) -> Option<Owner> {
        let keys = self.by_id.read().unwrap_or_else(PoisonError::into_inner);
        keys.get(id).map(|known| known.key.owner.clone())
    }

    /// `false` if there is none.
    pub fn remove(&self, id: &str) -> bool {
        self.by_id.write().unwrap_or_else(PoisonError::into_inner).remove(id).is_some()
    }

    /// The smallest of a limit that the keys of an owner set, for what does not depend on the key of a request.
    pub fn smallest(&self, owner: &Owner, limit: impl Fn(&KeyLimits) -> Option<u64>) -> Option<u64> {
        let keys = self.by_id.read().unwrap_or_else(PoisonError::into_inner);
        let of_owner = keys.values().filter(|known| known.key.owner == *owner);
        of_owner.filter_map(|known| limit(&known.key.limits)).min()
    }

    /// All owners that have a key.
    pub fn owners(&self) -> HashSet<Owner> {
        let keys = self.by_id.read().unwrap_or_else(PoisonError::into_inner);
        keys.values().map(|known| known.key.owner.clone()).collect()
    }

    /// Whether an owner has a key with admin rights.
    pub fn has_admin(&self, owner: &Owner) -> bool {
        let keys = self.by_id.read().unwrap_or_else(PoisonError::into_inner);
        keys.values().any(|known| known.key.admin && known.key.owner == *owner)
    }

    /// The key with the secret `presented`. The id is not secret and is looked up directly; the rest is compared by
    /// hash, in constant time.
    pub fn authenticate(&self, presented: &str) -> Option<Key> {
        if !(LENGTH_MIN..=LENGTH_MAX).contains(&presented.len()) {
            return None;
        }
        let hash = KeyHash::of(presented);
        let keys = self.by_id.read().unwrap_or_else(PoisonError::into_inner);
        let named = presented.strip_prefix(PREFIX).and_then(|rest| rest.split_once('_')).map(|(id, _)| id);
        let candidates = [named.unwrap_or(BOOTSTRAP_ID), BOOTSTRAP_ID];
        candidates
            .iter()
            .filter_map(|id| keys.get(*id))
            .find(|known| known.hash.is(&hash))
            .map(|known| known.key.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    fn key(id: &str) -> Key {
        Key {
            id: id.into(),
            owner: Owner::default_owner(),
            admin: false,
            metrics_only: false,
            limits: KeyLimits::default(),
            created_at: SystemTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn a_key_opens_only_with_its_whole_secret() {
        let ((id, secret), (other_id, other)) = (KeySecret::generate(), KeySecret::generate());
        let keys = Keys::new(vec![(key(&id), secret.hash()), (key(&other_id), other.hash())]);
        assert_eq!(keys.authenticate(secret.reveal()).map(|key| key.id), Some(id.clone()));
        let (_, tail) = other.reveal().rsplit_once('_').expect("three parts");
        for wrong in ["", &id, &format!("shoal_{id}_"), &format!("shoal_{id}_{tail}"), &secret.reveal()[1..]]
        {
            assert_eq!(keys.authenticate(wrong), None, "{wrong}");
        }
        keys.remove(&id);
        assert_eq!(keys.authenticate(secret.reveal()), None);
    }

    #[tokio::test]
    async fn the_end_of_a_key_is_told_to_whoever_waits_for_it_and_to_nobody_else() {
        let ((id, secret), (other_id, other)) = (KeySecret::generate(), KeySecret::generate());
        let keys = Keys::new(vec![(key(&id), secret.hash()), (key(&other_id), other.hash())]);
        let (mut end, mut others) = (keys.end_of(&key(&id)), keys.end_of(&key(&other_id)));
        let waiting = tokio::spawn(async move { end.wait().await });
        keys.remove(&id);
        waiting.await.expect("no panic");
        keys.end_of(&key(&id)).wait().await;
        assert!(futures_now(others.wait()).is_none(), "the other key lives");
    }

    /// The value of a future that is ready.
    fn futures_now<T>(future: impl Future<Output = T>) -> Option<T> {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match std::pin::pin!(future).poll(&mut context) {
            std::task::Poll::Ready(value) => Some(value),
            std::task::Poll::Pending => None,
        }
    }

    #[test]
    fn the_bootstrap_key_may_be_any_long_text() {
        for text in ["correct-horse-battery", "shoal_looks_like_one_of_ours", "3f2b8c1e90ab4def"] {
            let secret = KeySecret::parse(text).expect(text);
            let keys = Keys::new(vec![(key(BOOTSTRAP_ID), secret.hash())]);
            assert!(keys.authenticate(text).is_some(), "{text}");
            assert!(keys.authenticate("another-text-of-some-length").is_none());
        }
    }

    #[test]
    fn short_and_placeholder_keys_are_refused() {
        for text in [
            "",
            "short",
            "fifteen-letters",
            "changeme-changeme-changeme",
            "YOUR-API-KEY-goes-here",
            "xxxxxxxxxxxxxxxxxxxxxxxx",
            "a key with spaces in it",
            "ä-key-that-is-not-ascii",
            &"k3y!".repeat(200),
        ] {
            KeySecret::parse(text).expect_err(text);
        }
    }

    #[test]
    fn a_secret_does_not_print_itself() {
        let secret = KeySecret::random();
        assert!(!format!("{secret:?}").contains(secret.reveal()));
    }
}
