//! Removes what is unused: images, then their layers, then blobs.
//!
//! A layer's row is removed first and its files after it, both under the layer's lock, so that a pull that needs the
//! layer finds either both or neither. Files that a crash leaves between the two have no row, and are removed at the
//! next start.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime};

use image::Digest;
use runtime::BackendError;
use tracing::{info, warn};

use super::Collected;
use crate::Shared;
use crate::error::{EngineError, chain};

/// Interval between two automatic collections.
const INTERVAL: Duration = Duration::from_secs(600);
/// Minimum age for these, since a failed pull is often retried.
const KEPT: Duration = Duration::from_secs(3600);
/// How long a layer of a build step stays after a build has used it, even if no image has it.
const RECENT: Duration = Duration::from_secs(3600);

/// What to do with layers of build steps that no image has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BuildCache {
    /// Keep those that a recent build has used.
    Keep,
    /// Remove them: the disk is full.
    Discard,
}

/// Whether a layer that a build used then still counts as recent.
pub(super) fn is_recent(used: SystemTime, now: SystemTime) -> bool {
    // A clock that was set back makes the time of use lie ahead.
    now.duration_since(used).unwrap_or_default() < RECENT
}

/// Compares rows and files once, then collects at intervals. `on_lost` gets the images whose files are gone.
pub(crate) async fn keep_collected(shared: Arc<Shared>, on_lost: impl Fn(&Arc<Shared>, &[Digest])) {
    match reconcile(&shared).await {
        Ok(lost) => on_lost(&shared, &lost),
        Err(error) => warn!(error = chain(&error), "cannot compare layers with their rows"),
    }
    loop {
        if let Err(error) = collect(&shared, KEPT, BuildCache::Keep).await {
            warn!(error = chain(&error), "cannot collect unused images; trying again later");
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// One collection of what is older than `kept`.
pub(super) async fn collect(
    shared: &Arc<Shared>,
    kept: Duration,
    cache: BuildCache,
) -> Result<Collected, EngineError> {
    let now = crate::observe::clock::now();
    let before = now.checked_sub(kept).unwrap_or(now);
    let naming = shared.images.naming.lock().await;
    let images = shared.db.collect_images(before).await?;
    {
        let mut stock = shared.images.stock();
        for image in &images {
            stock.images.remove(image);
        }
    }
    drop(naming);
    let mut collected = Collected { images: images.len(), ..Collected::default() };
    for layer in shared.db.unused_layers(before).await? {
        let lock = shared.images.lock_of(layer);
        // The holder of the lock is unpacking it.
        let Ok(_alone) = lock.try_lock() else { continue };
        let pins = Arc::clone(&shared.images.pins);
        // Checked within the change itself: a pull pins a layer before it looks it up.
        let recent = Arc::clone(&shared.images.recent);
        let is_kept = move || {
            let used = recent.lock().unwrap_or_else(PoisonError::into_inner).get(&layer).copied();
            let is_recent = cache == BuildCache::Keep && used.is_some_and(|used| is_recent(used, now));
            is_recent || pins.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&layer)
        };
        if let Some(bytes) = shared.db.remove_layer(layer, is_kept).await? {
            collected.layers += 1;
            collected.bytes += bytes;
            remove_files(shared, layer).await;
        }
    }
    let blobs = Arc::clone(&shared.images.blobs);
    match tokio::task::spawn_blocking(move || blobs.sweep(kept)).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => warn!(%error, "cannot sweep the blobs"),
        Err(error) => warn!(%error, "cannot sweep the blobs"),
    }
    if collected != Collected::default() {
        let Collected { images, layers, bytes } = collected;
        info!(images, layers, bytes, "removed unused images");
    }
    Ok(collected)
}

/// Files without a row are removed; rows without files are forgotten.
async fn reconcile(shared: &Arc<Shared>) -> Result<Vec<Digest>, EngineError> {
    let mut lost = Vec::new();
    let files: HashSet<Digest> = match shared.backend.layers().await {
        Ok(layers) => layers.into_iter().collect(),
        Err(error) => {
            warn!(error = chain(&error), "cannot list layers; the next start tries again");
            return Ok(Vec::new());
        }
    };
    let rows: HashSet<Digest> = shared.db.layers().await?.into_iter().collect();
    for layer in files.difference(&rows) {
        let lock = shared.images.lock_of(*layer);
        let Ok(_alone) = lock.try_lock() else { continue };
        if !shared.db.has_layer(*layer).await? {
            info!(%layer, "removing a layer that has no row");
            remove_files(shared, *layer).await;
        }
    }
    let missing: Vec<Digest> = rows.difference(&files).copied().collect();
    if missing.is_empty() {
        return Ok(lost);
    }
    // A layer that was made after the files were listed has a row by now, so look again before its image is given up.
    let files: HashSet<Digest> = match shared.backend.layers().await {
        Ok(layers) => layers.into_iter().collect(),
        Err(error) => {
            warn!(error = chain(&error), "cannot list layers; the next start tries again");
            return Ok(lost);
        }
    };
    for layer in missing.iter().filter(|layer| !files.contains(layer)) {
        // It may have been removed since the rows were read.
        if !shared.db.has_layer(*layer).await? {
            continue;
        }
        warn!(%layer, "the files of a layer are gone; its images have to be pulled again");
        let _naming = shared.images.naming.lock().await;
        let broken = shared.db.forget_images_of(*layer).await?;
        shared.images.stock().names.retain(|_, row| !broken.contains(&row.image));
        lost.extend(broken);
    }
    Ok(lost)
}

/// If this fails, the files have no row, and the next start tries again.
async fn remove_files(shared: &Arc<Shared>, layer: Digest) {
    let removed = match shared.backend.remove_layer(layer).await {
        Err(BackendError::LauncherGone { .. }) => shared.backend.remove_layer(layer).await,
        result => result,
    };
    if let Err(error) = removed {
        warn!(%layer, error = chain(&error), "cannot remove a layer's files; the next start tries again");
    }
}
