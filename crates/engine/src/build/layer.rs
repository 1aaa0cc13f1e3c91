//! The layer of a step: found by its name, or made in a sandbox.

use std::time::Duration;

use image::Digest;
use runtime::{BackendError, LayerSpec};
use wire::SandboxId;
use wire::launch::{HOST_LAYERS_MAX, LAYERS_MAX, LayerFacts, Processes};

use super::builder::{Builder, Built, How};
use super::sandbox::Broken;
use super::steps::Work;
use crate::error::{BuildError, chain};
use crate::image::{ImageFault, StoredLayer};

/// How often the builder tries to end the processes of a sandbox, and how long it waits between two attempts.
const END_ATTEMPTS: u32 = 50;
const END_PAUSE: Duration = Duration::from_millis(20);

impl Builder {
    /// Adds the layer of a step to the stage. If the layer does not exist, `act` runs in a sandbox and what it writes becomes the layer.
    /// `word` and `parts`: what the step depends on beside the stage so far.
    pub(super) async fn layer(
        &self,
        work: &mut Work,
        line: usize,
        word: &str,
        parts: &[&[u8]],
        act: impl AsyncFnOnce(&Self, SandboxId) -> Result<(), Broken>,
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
                (self.make_in_sandbox(work, layer, act).await.map_err(|broken| failed(broken.0))?, How::Done)
            }
        };
        shared.images.keep_recent(layer);
        work.pending.clear();
        work.rootfs.layers.push(StoredLayer { layer, blob: None, size: 0, facts });
        Ok(how)
    }

    /// Runs `act` in a new sandbox over the stage, and makes a layer of what it wrote. The sandbox is deleted, even if the step failed.
    async fn make_in_sandbox(
        &self,
        work: &Work,
        layer: Digest,
        act: impl AsyncFnOnce(&Self, SandboxId) -> Result<(), Broken>,
    ) -> Result<LayerFacts, Broken> {
        let broken = |error: ImageFault| Broken(chain(&error));
        self.store_stage(work.number, &work.rootfs).await.map_err(broken)?;
        let caches = self.open_caches(&work.caches).await?;
        let sandbox = self.create_sandbox(work.number, caches.mounts.clone()).await?;
        let captured = match self.act(work, sandbox, act).await {
            Ok(()) => self.capture(work, sandbox, layer).await.map_err(broken),
            Err(broken) => Err(broken),
        };
        self.delete_sandbox(sandbox).await?;
        drop(caches);
        captured
    }

    /// Makes the directories of earlier `WORKDIR` lines, then lets the step act.
    async fn act(
        &self,
        work: &Work,
        sandbox: SandboxId,
        act: impl AsyncFnOnce(&Self, SandboxId) -> Result<(), Broken>,
    ) -> Result<(), Broken> {
        let files = self.engine.files(&self.key.owner, sandbox, None)?;
        for path in &work.pending {
            files.make_directory(path.as_bytes(), true, None).await?;
        }
        act(self, sandbox).await
    }

    /// Makes a layer of what the sandbox has written. Ends its processes first, so that nothing changes meanwhile.
    async fn capture(
        &self,
        work: &Work,
        sandbox: SandboxId,
        layer: Digest,
    ) -> Result<LayerFacts, ImageFault> {
        let shared = self.engine.shared();
        let failed = |source: BackendError| ImageFault::Layer { number: 1, count: 1, source };
        // The sandbox's driver sees the end too and cleans up at the same time, so either of the two may fail because the other was
        // faster. Hence the attempts.
        let live = self.engine.live(&self.key.owner, sandbox)?;
        live.expect_end();
        let mut attempts = END_ATTEMPTS;
        while let Err(error) = shared.backend.end_processes(sandbox, Processes::All).await {
            attempts -= 1;
            if attempts == 0 {
                return Err(failed(error));
            }
            tokio::time::sleep(END_PAUSE).await;
        }
        let below = work.rootfs.layers.iter().rev().map(|layer| layer.layer).collect();
        let over_host = work.rootfs.over_host;
        let from = live.written();
        self.make_layer(&LayerSpec { layer, below, over_host, from }).await
    }
}
