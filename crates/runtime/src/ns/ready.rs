//! Prepares slots, spares and an up-to-date image `host` before a caller needs them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use wire::SandboxId;
use wire::launch::{Answer, Ask, Over, Writable};

use crate::backend::{BackendError, Isolation, Spec};
use crate::ns::link::{refused, unexpected};
use crate::ns::spares::{Made, Shape};
use crate::ns::{NsBackend, QUICK_DEADLINE};

/// Building the image `host` reads all of `/usr`, possibly from a cold disk.
const IMAGE_DEADLINE: Duration = Duration::from_secs(300);
/// Prepared slots: a burst of this many creates does not wait for namespaces.
const SLOTS_READY: usize = 16;
/// How long after a create the next spare is made, so that the first command of the new sandbox runs first.
const SPARES_QUIET: Duration = Duration::from_millis(2);
/// After a failure to make a spare, the next try waits this long, and twice as long after each further failure,
const SPARES_BACKOFF_MIN: Duration = Duration::from_secs(1);
/// up to this.
const SPARES_BACKOFF_MAX: Duration = Duration::from_secs(60);

/// When the image `host` was last compared with the machine.
#[derive(Default)]
pub(super) struct ImageChecked {
    pub quickly: Option<Instant>,
    pub thoroughly: Option<Instant>,
    pub generation: u64,
}

impl NsBackend {
    /// Makes slots in the background until enough are ready.
    pub(super) fn keep_slots_ready(&self) {
        let bases: Vec<u32> = {
            let mut ids = self.ids();
            let missing = SLOTS_READY.saturating_sub(ids.ready.len());
            let mut bases = Vec::new();
            for _ in 0..missing {
                match ids.ranges.take() {
                    Ok(Some(base)) => bases.push(base),
                    Ok(None) => break,
                    Err(error) => {
                        tracing::warn!(%error, "cannot claim id ranges ahead of time");
                        break;
                    }
                }
            }
            ids.ready.extend(&bases);
            bases
        };
        for base in bases {
            let backend = self.clone();
            tokio::spawn(async move {
                let ask = Ask::PrepareSlot { base };
                if let Err(error) = backend.ask("prepare a slot", ask, QUICK_DEADLINE).await {
                    // The launch that takes this range creates the namespaces itself, and reports the error.
                    tracing::debug!(%error, base, "a slot was not made ready");
                }
            });
        }
    }

    /// Checks the image in the background, since that reads all of `/usr` and creates need not wait for it.
    pub(super) fn check_image_thoroughly(&self) {
        let backend = self.clone();
        tokio::spawn(async move {
            let checked = match backend.prepare_host_image(true).await {
                Ok(generation) => generation,
                Err(error) => {
                    tracing::warn!(%error, "the image `host` could not be compared with the machine");
                    return;
                }
            };
            backend.note_generation(&mut *backend.0.image_checked.lock().await, checked);
        });
    }

    pub(super) async fn prepare_host_image(&self, thorough: bool) -> Result<u64, BackendError> {
        const DOING: &str = "prepare the image `host`";
        match self.ask(DOING, Ask::PrepareHostImage { thorough }, IMAGE_DEADLINE).await? {
            Answer::Prepared { generation } => Ok(generation),
            other => Err(unexpected(DOING, &other)),
        }
    }

    /// Drops the spares that were made from an older generation.
    pub(super) fn note_generation(&self, checked: &mut ImageChecked, generation: u64) {
        if std::mem::replace(&mut checked.generation, generation) != generation {
            let outdated = self.spares().outdated();
            self.remove_spares(outdated);
            self.refill();
        }
    }

    pub(super) fn remove_spares(&self, spares: Vec<SandboxId>) {
        for sandbox in spares {
            let backend = self.clone();
            tokio::spawn(async move { backend.remove_spare(sandbox).await });
        }
    }

    pub(super) async fn remove_spare(&self, sandbox: SandboxId) {
        if let Err(error) = self.teardown(sandbox).await {
            // The books no longer list it, so the next sweep removes it as a stray.
            tracing::warn!(%sandbox, %error, "cannot remove a spare; the next sweep retries");
        }
    }

    /// Makes spares in the background until there are enough.
    pub(super) fn refill(&self) {
        if self.0.config.spares == 0 || self.0.refilling.swap(true, Ordering::AcqRel) {
            return;
        }
        let inner = Arc::downgrade(&self.0);
        tokio::spawn(async move {
            let mut backoff = SPARES_BACKOFF_MIN;
            let mut pause = SPARES_QUIET;
            loop {
                tokio::time::sleep(pause).await;
                // This task must not keep the backend alive.
                let Some(backend) = inner.upgrade().map(Self) else { return };
                pause = SPARES_QUIET.saturating_sub(backend.since_last_taken());
                if !pause.is_zero() {
                    continue;
                }
                match backend.make_spare().await {
                    Ok(Some(())) => backoff = SPARES_BACKOFF_MIN,
                    Ok(None) => {
                        backend.0.refilling.store(false, Ordering::Release);
                        // A caller that took a spare just before that still saw this task running.
                        if backend.spares().lacks() {
                            backend.refill();
                        }
                        return;
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot make a sandbox ahead of time; creates take a little longer");
                        pause = backoff;
                        backoff = (backoff * 2).min(SPARES_BACKOFF_MAX);
                    }
                }
            }
        });
    }

    fn since_last_taken(&self) -> Duration {
        self.0.last_taken.lock().expect("nobody panics while holding an instant").elapsed()
    }

    /// Makes one spare, unless there are enough.
    async fn make_spare(&self) -> Result<Option<()>, BackendError> {
        let _making = self.0.making_spare.lock().await;
        let sandbox = SandboxId::from_random(random_bits()?);
        // The image comes first: it decides which spares are out of date.
        let Some(rootfs) = self.spares().next_rootfs() else { return Ok(None) };
        self.prepare(&rootfs).await?;
        let Some(made) = self.spares().begin(sandbox) else { return Ok(None) };
        let Made { shape: Shape { rootfs, limits }, .. } = made.clone();
        let launched = self
            .make(&Spec {
                sandbox,
                rootfs,
                limits,
                mounts: Vec::new(),
                over: Over::default(),
                writable: Writable::New,
            })
            .await;
        let wanted = self.spares().made(sandbox, &made);
        if launched.is_err() || !wanted {
            self.spares().forget(sandbox);
            self.remove_spare(sandbox).await;
        }
        launched.map(Some)
    }
}

fn random_bits() -> Result<u128, BackendError> {
    let mut bits = [0; 16];
    getrandom::fill(&mut bits).map_err(|e| refused("draw random bits")(io::Error::other(e)))?;
    Ok(u128::from_le_bytes(bits))
}
