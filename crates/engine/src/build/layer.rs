//! The layer of a step: found by its name, or made in a sandbox.

use std::sync::Arc;
use std::time::Duration;

use image::Digest;
use runtime::{BackendError, LayerSpec};
use tokio::time::timeout;
use wire::launch::{HOST_LAYERS_MAX, LAYERS_MAX, LayerFacts};

use super::builder::{Builder, Built, How};
use super::sandbox::Broken;
use super::steps::Work;
use crate::error::{BuildError, chain};
use crate::files::Files;
use crate::image::{ImageFault, StoredLayer};
use crate::model::{NetworkPolicy, PauseSpec};
use crate::sandbox::lifecycle::Kept;
use crate::sandbox::live::LiveSandbox;
use crate::sandbox::pause::pause;

/// How long the driver may take to end the processes of a sandbox. It retries until then.
const END_SECONDS: u64 = 120;

impl Builder {
    /// Adds the layer of a step to the stage. If the layer does not exist, `act` runs in a sandbox and what it writes
    /// becomes the layer. `word` and `parts`: what the step depends on besides the stage so far.
    pub(super) async fn layer(
        &self,
        work: &mut Work,
        line: usize,
        word: &str,
        parts: &[&[u8]],
        act: impl AsyncFnOnce(&Self, &Arc<LiveSandbox>) -> Result<(), Broken>,
    ) -> Built<How> {
        let shared = self.engine.shared();
        let failed = |why: String| BuildError::Step { line, why };
        let layer = self.layer_name(work, word, parts);
        let most = if work.rootfs.over_host { HOST_LAYERS_MAX } else { LAYERS_MAX - 1 };
        if work.rootfs.layers.len() >= most {
            return Err(failed(format!("the image would have more than {most} layers")));
        }
        work.pins.push(shared.images.pin([layer]));
        let facts = shared.db.layer_facts(layer).await.map_err(|error| failed(chain(&error)))?;
        let (facts, how) = match facts {
            Some(facts) => (facts, How::Cached),
            None => {
                // Only `RUN` runs programs of the image.
                let network = if word == "RUN" { self.network.clone() } else { NetworkPolicy::default() };
                (
                    self.make_in_sandbox(work, layer, network, act)
                        .await
                        .map_err(|broken| failed(broken.0))?,
                    How::Done,
                )
            }
        };
        shared.images.keep_recent(layer);
        work.pending.clear();
        work.rootfs.layers.push(StoredLayer { layer, blob: None, size: 0, facts });
        Ok(how)
    }

    /// Runs `act` in a new sandbox over the stage, and makes a layer of what it wrote. Deletes the sandbox, even if
    /// the step failed.
    async fn make_in_sandbox(
        &self,
        work: &Work,
        layer: Digest,
        network: NetworkPolicy,
        act: impl AsyncFnOnce(&Self, &Arc<LiveSandbox>) -> Result<(), Broken>,
    ) -> Result<LayerFacts, Broken> {
        let broken = |error: ImageFault| Broken(chain(&error));
        self.store_stage(work.number, &work.rootfs).await.map_err(broken)?;
        let caches = self.open_caches(&work.caches).await?;
        let sandbox = self.create_sandbox(work.number, caches.mounts.clone(), network).await?;
        let captured = match self.act(work, &sandbox, act).await {
            Ok(()) => self.capture(work, &sandbox, layer).await.map_err(broken),
            Err(broken) => Err(broken),
        };
        self.delete_sandbox(&sandbox).await?;
        drop(caches);
        captured
    }

    /// Makes the directories of earlier `WORKDIR` lines, then lets the step act.
    async fn act(
        &self,
        work: &Work,
        sandbox: &Arc<LiveSandbox>,
        act: impl AsyncFnOnce(&Self, &Arc<LiveSandbox>) -> Result<(), Broken>,
    ) -> Result<(), Broken> {
        let files = Files::new(Arc::clone(&sandbox.transfers), None);
        for path in &work.pending {
            files.make_directory(path.as_bytes(), true, None).await?;
        }
        act(self, sandbox).await
    }

    /// Makes a layer of what the sandbox has written. The sandbox's driver ends all processes first, so that nothing
    /// changes meanwhile.
    async fn capture(
        &self,
        work: &Work,
        sandbox: &Arc<LiveSandbox>,
        layer: Digest,
    ) -> Result<LayerFacts, ImageFault> {
        let late = |_| {
            let source = BackendError::Late { doing: "end the processes of the step", seconds: END_SECONDS };
            ImageFault::Layer { number: 1, count: 1, source }
        };
        let ended = PauseSpec { kept: Kept::Dropped, grace: Duration::ZERO };
        timeout(Duration::from_secs(END_SECONDS), pause(sandbox, ended)).await.map_err(late)??;
        let below = work.rootfs.layers.iter().rev().map(|layer| layer.layer).collect();
        let over_host = work.rootfs.over_host;
        let from = sandbox.written();
        self.make_layer(&LayerSpec { layer, below, over_host, from }).await
    }
}
