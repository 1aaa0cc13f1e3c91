//! Cache mounts of `RUN`: volumes of the owner, which outlive builds and are in no layer.
//!
//! They are ordinary volumes with a name that begins with [`PREFIX`]. The owner sees them, and may resize or delete them while no step
//! uses them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use image::dockerfile::{CacheMount, Sharing};
use image::hash::digest_of;
use tokio::sync::OwnedMutexGuard;
use wire::launch::Access;

use super::builder::Builder;
use super::sandbox::Broken;
use crate::error::EngineError;
use crate::model::Owner;
use crate::model::names::VolumeName;
use crate::model::template::VolumeMount;
use crate::volume::{VOLUME_BYTES_MIN, VolumeSpec};

/// The prefix of the name of each cache's volume.
const PREFIX: &str = "build-cache-";
/// The size of a new cache, if the store is not smaller: enough for the packages of several projects.
const BYTES: u64 = 10 << 30;
/// How much of a cache's id is in the name of its volume, so that people can recognize it.
const READABLE_MAX: usize = 40;
/// How many digits of the id's digest are in the name, to distinguish ids.
const DIGITS: usize = 12;

/// One lock per cache. Held while the cache's volume is created, and by a step that needs exclusive access.
#[derive(Default)]
pub(super) struct CacheLocks(Mutex<HashMap<(Owner, String), Weak<CacheLock>>>);

type CacheLock = tokio::sync::Mutex<()>;

impl CacheLocks {
    fn of(&self, owner: &Owner, volume: &str) -> Arc<CacheLock> {
        let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (owner.clone(), volume.to_owned());
        if let Some(lock) = locks.get(&key).and_then(Weak::upgrade) {
            return lock;
        }
        locks.retain(|_, lock| lock.strong_count() > 0);
        let lock = Arc::default();
        locks.insert(key, Arc::downgrade(&lock));
        lock
    }
}

/// The mounts of a step. Other steps that need exclusive access to one of them wait until this is dropped.
pub(super) struct Caches {
    pub(super) mounts: Vec<VolumeMount>,
    _alone: Vec<OwnedMutexGuard<()>>,
}

impl Builder {
    /// Finds the volumes of a step's caches, and creates those that do not exist.
    pub(super) async fn open_caches(&self, caches: &[CacheMount]) -> Result<Caches, Broken> {
        let mut open = Caches { mounts: Vec::new(), _alone: Vec::new() };
        let mut caches: Vec<(String, &CacheMount)> =
            caches.iter().map(|cache| (volume_name(&cache.id), cache)).collect();
        // In the same order for all steps, so that no two of them wait for each other. Of several mounts of one
        // cache, a locked one comes first.
        caches.sort_by_key(|(volume, cache)| (volume.clone(), cache.sharing == Sharing::Shared));
        caches.dedup_by(|(one, later), (other, first)| one == other && later.target == first.target);
        let mut last = None;
        for (volume, cache) in caches {
            // A step that mounts one cache twice must not wait for itself.
            if last.as_ref() != Some(&volume) {
                let lock = self.engine.shared().builds.caches.of(&self.key.owner, &volume);
                let alone = lock.lock_owned().await;
                self.create_cache(&volume).await?;
                if cache.sharing == Sharing::Locked {
                    open._alone.push(alone);
                }
            }
            last = Some(volume.clone());
            open.mounts.push(VolumeMount { volume, path: cache.target.clone(), access: Access::ReadWrite });
        }
        Ok(open)
    }

    async fn create_cache(&self, volume: &str) -> Result<(), Broken> {
        let machine = self.engine.shared().backend.machine().await;
        let store = machine.map_err(|source| EngineError::Usage { source })?.disk_bytes;
        let name = VolumeName::parse(volume)?;
        let size_bytes = BYTES.min(store).max(VOLUME_BYTES_MIN);
        match self.engine.create_volume(&self.key, VolumeSpec { name, size_bytes, from: None }).await {
            Ok(_) | Err(EngineError::VolumeNameTaken { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// The name of a cache's volume: readable, and different for each id.
fn volume_name(id: &str) -> String {
    let plain = |byte: u8| if byte.is_ascii_alphanumeric() { char::from(byte) } else { '-' };
    let readable: String = id.trim_matches('/').bytes().take(READABLE_MAX).map(plain).collect();
    format!("{PREFIX}{readable}-{}", &digest_of(id.as_bytes()).hex()[..DIGITS])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_has_a_volume_of_its_own_with_a_valid_name() {
        let ids =
            ["/root/.cache/pip", "root--cache-pip", "a:b/c", "Ä\n", &"x".repeat(1000), &"x".repeat(1001)];
        let names: std::collections::BTreeSet<String> = ids.iter().map(|id| volume_name(id)).collect();
        assert_eq!(names.len(), ids.len());
        for name in &names {
            VolumeName::parse(name).expect("a valid name");
        }
        assert!(volume_name("/root/.cache/pip").starts_with("build-cache-root--cache-pip-"));
    }
}
