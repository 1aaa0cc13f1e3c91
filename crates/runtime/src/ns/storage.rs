//! Layers, writable files and volumes: asks the launcher for them.

use std::io;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;
use wire::launch::{Answer, Ask, LAYERS_PAGE, LayerFacts, StoreFacts, UnpackLayer, VOLUMES_PAGE};
use wire::{Digest, SandboxId, VolumeId};

use crate::backend::{BackendError, DiskUsage, LayerSpec, Storage};
use crate::ns::link::{Call, refused, unexpected};
use crate::ns::{NsBackend, QUICK_DEADLINE, TEARDOWN_DEADLINE};

/// Copying a volume first writes its recent changes to disk.
const VOLUME_DEADLINE: Duration = Duration::from_secs(120);
/// Unpacking reads and writes gigabytes.
const UNPACK_DEADLINE: Duration = Duration::from_secs(3600);

#[async_trait]
impl Storage for NsBackend {
    fn store(&self) -> StoreFacts {
        self.0.store
    }

    async fn disk_usage(&self, sandbox: SandboxId) -> Result<DiskUsage, BackendError> {
        const DOING: &str = "look at a sandbox's files";
        match self.ask(DOING, Ask::DiskUsage { sandbox }, QUICK_DEADLINE).await? {
            Answer::DiskUsage { bytes, complete } => Ok(DiskUsage { bytes, complete }),
            other => Err(unexpected(DOING, &other)),
        }
    }

    async fn unpack_layer(
        &self,
        wanted: &LayerSpec,
        read: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<LayerFacts, BackendError> {
        let doing = "unpack a layer";
        let LayerSpec { layer, below, over_host, from } = wanted.clone();
        let base = self.ids().ranges.take().map_err(refused("claim an id range"))?;
        let base = base.ok_or(BackendError::Full { what: "id ranges" })?;
        let ask = Ask::UnpackLayer(Box::new(UnpackLayer { layer, below, over_host, from, base }));
        let (tell, mut told) = watch::channel(0);
        let backend = self.clone();
        // In its own task: if the caller gives up, the process runs on for a while, and its ids must not be reused.
        let mut asking = tokio::spawn(async move {
            let answer = match backend.link().await {
                Ok(link) => {
                    let call = Call { progress: Some(tell), ..Call::within(UNPACK_DEADLINE) };
                    link.exchange(doing, ask, call).await.map(|(answer, _)| answer)
                }
                Err(error) => Err(error),
            };
            // Without an answer the process may still be alive; the next start of the daemon frees the range.
            if !matches!(&answer, Err(BackendError::LauncherGone { .. } | BackendError::Late { .. })) {
                backend.ids().ranges.put_back(base);
            }
            answer
        });
        let answer = loop {
            tokio::select! {
                Ok(()) = told.changed() => read(*told.borrow_and_update()),
                answer = &mut asking => break answer,
            }
        };
        let answer = answer.map_err(|error| refused(doing)(io::Error::other(error)))?;
        match answer? {
            Answer::Unpacked(Ok(facts)) => Ok(facts),
            Answer::Unpacked(Err(fault)) => Err(BackendError::Layer { layer, source: Box::new(fault) }),
            other => Err(unexpected(doing, &other)),
        }
    }

    async fn remove_layer(&self, layer: Digest) -> Result<(), BackendError> {
        // A spare must not be made from a layer that is being removed.
        let _none_is_made = self.0.making_spare.lock().await;
        let spares = self.spares().without(layer);
        for spare in spares {
            self.remove_spare(spare).await;
        }
        self.ask("remove a layer", Ask::RemoveLayer { layer }, TEARDOWN_DEADLINE).await?;
        Ok(())
    }

    async fn layers(&self) -> Result<Vec<Digest>, BackendError> {
        let mut all: Vec<Digest> = Vec::new();
        loop {
            let after = all.last().copied();
            match self.ask("list layers", Ask::Layers { after }, QUICK_DEADLINE).await? {
                Answer::Layers(page) => {
                    let last = page.len() < LAYERS_PAGE;
                    all.extend(page);
                    if last {
                        return Ok(all);
                    }
                }
                other => return Err(unexpected("list layers", &other)),
            }
        }
    }

    async fn create_volume(
        &self,
        volume: VolumeId,
        size_bytes: u64,
        from: Option<VolumeId>,
    ) -> Result<(), BackendError> {
        let ask = Ask::CreateVolume { volume, size_bytes, from };
        self.ask("make a volume", ask, VOLUME_DEADLINE).await.map(|_| ())
    }

    async fn resize_volume(&self, volume: VolumeId, size_bytes: u64) -> Result<(), BackendError> {
        self.ask("resize a volume", Ask::ResizeVolume { volume, size_bytes }, VOLUME_DEADLINE)
            .await
            .map(|_| ())
    }

    async fn remove_volume(&self, volume: VolumeId) -> Result<(), BackendError> {
        self.ask("remove a volume", Ask::RemoveVolume { volume }, TEARDOWN_DEADLINE).await.map(|_| ())
    }

    async fn volume_usage(&self, volume: VolumeId) -> Result<DiskUsage, BackendError> {
        const DOING: &str = "look at a volume's files";
        match self.ask(DOING, Ask::VolumeUsage { volume }, QUICK_DEADLINE).await? {
            Answer::DiskUsage { bytes, complete } => Ok(DiskUsage { bytes, complete }),
            other => Err(unexpected(DOING, &other)),
        }
    }

    async fn volumes(&self) -> Result<Vec<VolumeId>, BackendError> {
        let mut all: Vec<VolumeId> = Vec::new();
        loop {
            let after = all.last().copied();
            match self.ask("list volumes", Ask::Volumes { after }, QUICK_DEADLINE).await? {
                Answer::Volumes(page) => {
                    let last = page.len() < VOLUMES_PAGE;
                    all.extend(page);
                    if last {
                        return Ok(all);
                    }
                }
                other => return Err(unexpected("list volumes", &other)),
            }
        }
    }
}
