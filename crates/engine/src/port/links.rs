//! Links: each opens one port of one sandbox to anyone who has its token, or to everybody, until it expires or is revoked.
//!
//! A token is the link's id and a tag that only this installation can make, so it is checked without a row. All else
//! about the link is in its row, which is also what is deleted to revoke it.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use wire::{LinkId, SandboxId};

use crate::access::keys::KeyEnd;
use crate::access::signing::TAG_LENGTH;
use crate::error::{EngineError, Resource};
use crate::model::port::{Link, LinkSpec, Port};
use crate::model::random::random_u128;
use crate::model::{Key, Owner};
use crate::observe::clock::now;
use crate::{Engine, State};

/// The most links of one sandbox.
pub const LINKS_PER_SANDBOX_MAX: usize = 256;
/// The length of a link's id in a token.
const ID_LENGTH: usize = 16;
/// The first part of what is signed, so that no other signature of this installation is a token.
const PURPOSE: &[u8] = b"port link";
/// How long a wait for an expiry sleeps at most: the wall clock may be changed meanwhile.
const EXPIRY_LOOK: Duration = Duration::from_secs(30);

/// All links, in memory.
pub(crate) struct Links {
    by_id: RwLock<HashMap<LinkId, Known>>,
}

struct Known {
    link: Arc<Link>,
    /// Dropped with the link, which notifies waiters.
    lives: watch::Sender<()>,
}

/// The proof that a caller may use a port.
#[derive(Debug, Clone)]
pub struct LinkGrant {
    /// The link.
    pub link: Arc<Link>,
    /// When the right ends.
    pub end: LinkEnd,
}

/// Notifies when a link is revoked or expires, or when its key is deleted.
#[derive(Debug, Clone)]
pub struct LinkEnd {
    lives: watch::Receiver<()>,
    key: KeyEnd,
    expires_at: SystemTime,
}

impl LinkEnd {
    /// Returns when the link has ended. Cancel-safe.
    pub async fn wait(&mut self) {
        let Self { lives, key, expires_at } = self;
        let revoked = async {
            // Nothing is ever sent; the error means the end.
            while lives.changed().await.is_ok() {}
        };
        let expired = async {
            while let Ok(left) = expires_at.duration_since(now()) {
                tokio::time::sleep(left.min(EXPIRY_LOOK)).await;
            }
        };
        tokio::select! {
            () = revoked => {}
            () = key.wait() => {}
            () = expired => {}
        }
    }
}

impl Links {
    pub fn open(links: Vec<Link>) -> Self {
        let known = |link: Link| (link.id, Known { link: Arc::new(link), lives: watch::Sender::new(()) });
        Self { by_id: RwLock::new(links.into_iter().map(known).collect()) }
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, HashMap<LinkId, Known>> {
        self.by_id.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, HashMap<LinkId, Known>> {
        self.by_id.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// A sandbox is gone, and its rows too.
    pub fn forget(&self, sandbox: SandboxId) {
        self.write().retain(|_, known| known.link.sandbox != sandbox);
    }

    fn of(&self, sandbox: SandboxId) -> Vec<Arc<Link>> {
        let now = now();
        let mut found: Vec<Arc<Link>> = self
            .read()
            .values()
            .filter(|known| known.link.sandbox == sandbox && known.link.expires_at > now)
            .map(|known| Arc::clone(&known.link))
            .collect();
        found.sort_by_key(|link| (link.created_at, link.id));
        found
    }
}

impl Engine {
    /// Makes a link. The token is returned only here; a public link has none.
    pub async fn create_link(
        &self,
        key: &Key,
        sandbox: SandboxId,
        spec: LinkSpec,
    ) -> Result<(Link, Option<Vec<u8>>), EngineError> {
        spec.check()?;
        let live = self.live(&key.owner, sandbox)?;
        match live.state() {
            State::Running | State::Paused(_) | State::Creating => {}
            State::Deleting | State::Failed { .. } => return Err(live.wrong_state()),
        }
        let shared = self.shared();
        // Rows of links that have expired are removed when another is made.
        let expired = shared.db.delete_expired_links(now()).await?;
        if !expired.is_empty() {
            shared.links.write().retain(|id, _| !expired.contains(id));
        }
        if shared.links.of(sandbox).len() >= LINKS_PER_SANDBOX_MAX {
            return Err(EngineError::Quota {
                resource: Resource::Links,
                limit: LINKS_PER_SANDBOX_MAX as u64,
            });
        }
        let created_at = now();
        let LinkSpec { port, label, methods, ttl, public } = spec;
        let link = Link {
            id: LinkId::from_random(random_u128()),
            sandbox,
            owner: key.owner.clone(),
            port,
            key: key.id.clone(),
            label,
            methods,
            public,
            created_at,
            expires_at: created_at + ttl,
        };
        shared.db.insert_link(link.clone()).await?;
        let known = Known { link: Arc::new(link.clone()), lives: watch::Sender::new(()) };
        shared.links.write().insert(link.id, known);
        if self.live(&key.owner, sandbox).is_err() {
            // It was deleted meanwhile, and its rows with it.
            shared.links.forget(sandbox);
            return Err(EngineError::SandboxNotFound { id: sandbox.to_string() });
        }
        let token = (!public).then(|| self.token(link.id));
        Ok((link, token))
    }

    /// The links of a sandbox that still work, oldest first.
    pub fn links(&self, owner: &Owner, sandbox: SandboxId) -> Result<Vec<Link>, EngineError> {
        self.live(owner, sandbox)?;
        Ok(self.shared().links.of(sandbox).iter().map(|link| Link::clone(link)).collect())
    }

    /// Revokes a link, with effect at once: its open connections end too.
    pub async fn revoke_link(
        &self,
        owner: &Owner,
        sandbox: SandboxId,
        link: LinkId,
    ) -> Result<(), EngineError> {
        self.live(owner, sandbox)?;
        let shared = self.shared();
        let known = shared.links.read().get(&link).is_some_and(|known| known.link.sandbox == sandbox);
        if !known {
            return Err(EngineError::LinkNotFound { id: link.to_string() });
        }
        shared.db.delete_link(link).await?;
        shared.links.write().remove(&link);
        Ok(())
    }

    /// The link that a token opens, if it still works.
    pub fn follow_link(&self, token: &[u8]) -> Option<LinkGrant> {
        let (id, tag) = token.split_at_checked(ID_LENGTH)?;
        let bits = u128::from_be_bytes(id.try_into().ok()?);
        let id = LinkId::from_bits(bits);
        // Checked first, so that the time that this takes says nothing about which links exist.
        if !self.shared().signer.is_tag_of_list([PURPOSE, &bits.to_be_bytes()], tag) {
            return None;
        }
        self.grant(|known| known.link.id == id && !known.link.public, Some(id))
    }

    /// The link that opens a port to everybody, if there is one.
    pub fn public_link(&self, sandbox: SandboxId, port: Port) -> Option<LinkGrant> {
        self.grant(
            |known| known.link.public && known.link.sandbox == sandbox && known.link.port == port,
            None,
        )
    }

    fn grant(&self, is_it: impl Fn(&Known) -> bool, id: Option<LinkId>) -> Option<LinkGrant> {
        let shared = self.shared();
        let now = now();
        let links = shared.links.read();
        let works = |known: &&Known| {
            is_it(known)
                && known.link.expires_at > now
                && shared.keys.get(&known.link.key).is_some_and(|key| key.owner == known.link.owner)
        };
        let known = match id {
            Some(id) => links.get(&id).filter(works),
            None => links.values().find(works),
        }?;
        let key = shared.keys.get(&known.link.key)?;
        let end = LinkEnd {
            lives: known.lives.subscribe(),
            key: shared.keys.end_of(&key),
            expires_at: known.link.expires_at,
        };
        Some(LinkGrant { link: Arc::clone(&known.link), end })
    }

    fn token(&self, id: LinkId) -> Vec<u8> {
        let id = id.bits().to_be_bytes();
        let tag: [u8; TAG_LENGTH] = self.shared().signer.tag_of_list([PURPOSE, &id]);
        [&id[..], &tag[..]].concat()
    }
}
