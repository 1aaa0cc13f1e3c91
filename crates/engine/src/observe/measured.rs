//! Wraps a backend and times every request, for metrics and for the log.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use runtime::{
    Backend, BackendError, Differences, DiskUsage, GuestStream, Isolation, LayerSpec, Listeners,
    ListeningPort, Machine, Network, Spec, Storage, Usage,
};
use wire::launch::{DiffSide, FilesMark, LayerFacts, Limits, Motion, Processes, Rootfs, StoreFacts};
use wire::network::{Family, Routes};
use wire::{Digest, SandboxId, SnapshotId, VolumeId};

use crate::observe::metrics::Metrics;
use crate::observe::timing;

/// Calls another backend, and times the calls.
pub(crate) struct Measured {
    pub backend: Arc<dyn Backend>,
    pub metrics: Arc<Metrics>,
}

#[async_trait::async_trait]
impl Isolation for Measured {
    async fn prepare(&self, rootfs: &Rootfs) -> Result<(), BackendError> {
        timing::PREPARE.request(&self.metrics, None, self.backend.prepare(rootfs)).await
    }

    async fn launch(&self, spec: &Spec) -> Result<(), BackendError> {
        timing::LAUNCH.request(&self.metrics, Some(spec.sandbox), self.backend.launch(spec)).await
    }

    async fn connect(&self, sandbox: SandboxId) -> Result<GuestStream, BackendError> {
        timing::CONNECT.request(&self.metrics, Some(sandbox), self.backend.connect(sandbox)).await
    }

    async fn teardown(&self, sandbox: SandboxId) -> Result<(), BackendError> {
        timing::TEARDOWN.request(&self.metrics, Some(sandbox), self.backend.teardown(sandbox)).await
    }

    async fn end_processes(&self, sandbox: SandboxId, which: Processes) -> Result<(), BackendError> {
        timing::END_PROCESSES
            .request(&self.metrics, Some(sandbox), self.backend.end_processes(sandbox, which))
            .await
    }

    async fn freeze(&self, sandbox: SandboxId, motion: Motion) -> Result<(), BackendError> {
        timing::FREEZE.request(&self.metrics, Some(sandbox), self.backend.freeze(sandbox, motion)).await
    }

    fn foresee(&self, rootfs: &Rootfs, limits: &Limits) {
        self.backend.foresee(rootfs, limits);
    }

    fn reserve(&self, rootfs: &Rootfs, limits: &Limits) -> Option<SandboxId> {
        self.backend.reserve(rootfs, limits)
    }

    async fn stop(&self) {
        self.backend.stop().await;
    }

    async fn inventory(&self) -> Result<Vec<SandboxId>, BackendError> {
        timing::INVENTORY.request(&self.metrics, None, self.backend.inventory()).await
    }

    async fn oom_kills(&self, sandbox: SandboxId) -> Result<u64, BackendError> {
        timing::OOM_KILLS.request(&self.metrics, Some(sandbox), self.backend.oom_kills(sandbox)).await
    }

    async fn usage(&self, sandboxes: &[SandboxId]) -> Result<Vec<Option<Usage>>, BackendError> {
        timing::USAGE.request(&self.metrics, None, self.backend.usage(sandboxes)).await
    }

    async fn machine(&self) -> Result<Machine, BackendError> {
        timing::MACHINE.request(&self.metrics, None, self.backend.machine()).await
    }
}

#[async_trait::async_trait]
impl Storage for Measured {
    fn store(&self) -> StoreFacts {
        self.backend.store()
    }

    async fn disk_usage(&self, sandbox: SandboxId) -> Result<DiskUsage, BackendError> {
        timing::DISK_USAGE.request(&self.metrics, Some(sandbox), self.backend.disk_usage(sandbox)).await
    }

    async fn unpack_layer(
        &self,
        layer: &LayerSpec,
        read: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<LayerFacts, BackendError> {
        timing::UNPACK_LAYER.request(&self.metrics, None, self.backend.unpack_layer(layer, read)).await
    }

    async fn remove_layer(&self, layer: Digest) -> Result<(), BackendError> {
        timing::REMOVE_LAYER.request(&self.metrics, None, self.backend.remove_layer(layer)).await
    }

    async fn layers(&self) -> Result<Vec<Digest>, BackendError> {
        timing::LAYERS.request(&self.metrics, None, self.backend.layers()).await
    }

    async fn create_volume(
        &self,
        volume: VolumeId,
        size_bytes: u64,
        from: Option<VolumeId>,
    ) -> Result<(), BackendError> {
        timing::VOLUME
            .request(&self.metrics, None, self.backend.create_volume(volume, size_bytes, from))
            .await
    }

    async fn resize_volume(&self, volume: VolumeId, size_bytes: u64) -> Result<(), BackendError> {
        timing::VOLUME.request(&self.metrics, None, self.backend.resize_volume(volume, size_bytes)).await
    }

    async fn remove_volume(&self, volume: VolumeId) -> Result<(), BackendError> {
        timing::VOLUME.request(&self.metrics, None, self.backend.remove_volume(volume)).await
    }

    async fn volume_usage(&self, volume: VolumeId) -> Result<DiskUsage, BackendError> {
        timing::DISK_USAGE.request(&self.metrics, None, self.backend.volume_usage(volume)).await
    }

    async fn volumes(&self) -> Result<Vec<VolumeId>, BackendError> {
        timing::VOLUME.request(&self.metrics, None, self.backend.volumes()).await
    }

    async fn settle_files(&self, sandbox: SandboxId) -> Result<(), BackendError> {
        timing::SNAPSHOT.request(&self.metrics, Some(sandbox), self.backend.settle_files(sandbox)).await
    }

    async fn take_snapshot(
        &self,
        sandbox: SandboxId,
        snapshot: SnapshotId,
    ) -> Result<FilesMark, BackendError> {
        timing::SNAPSHOT
            .request(&self.metrics, Some(sandbox), self.backend.take_snapshot(sandbox, snapshot))
            .await
    }

    async fn remove_snapshot(&self, snapshot: SnapshotId) -> Result<(), BackendError> {
        timing::SNAPSHOT.request(&self.metrics, None, self.backend.remove_snapshot(snapshot)).await
    }

    async fn snapshots(&self) -> Result<Vec<SnapshotId>, BackendError> {
        timing::SNAPSHOT.request(&self.metrics, None, self.backend.snapshots()).await
    }

    async fn diff(
        &self,
        before: &DiffSide,
        after: &DiffSide,
        contents: bool,
    ) -> Result<Differences, BackendError> {
        timing::UNPACK_LAYER.request(&self.metrics, None, self.backend.diff(before, after, contents)).await
    }

    async fn export(&self, side: &DiffSide, to: OwnedFd) -> Result<(), BackendError> {
        timing::UNPACK_LAYER.request(&self.metrics, None, self.backend.export(side, to)).await
    }

    async fn files_mark(&self, sandbox: SandboxId) -> Result<Option<FilesMark>, BackendError> {
        timing::DISK_USAGE.request(&self.metrics, Some(sandbox), self.backend.files_mark(sandbox)).await
    }
}

#[async_trait::async_trait]
impl Network for Measured {
    async fn open_network(&self, sandbox: SandboxId, routes: &Routes) -> Result<Listeners, BackendError> {
        timing::NETWORK
            .request(&self.metrics, Some(sandbox), self.backend.open_network(sandbox, routes))
            .await
    }

    async fn change_routes(&self, sandbox: SandboxId, routes: &Routes) -> Result<(), BackendError> {
        timing::NETWORK
            .request(&self.metrics, Some(sandbox), self.backend.change_routes(sandbox, routes))
            .await
    }

    async fn close_network(&self, sandbox: SandboxId) -> Result<(), BackendError> {
        timing::NETWORK.request(&self.metrics, Some(sandbox), self.backend.close_network(sandbox)).await
    }

    async fn sockets(
        &self,
        sandbox: SandboxId,
        family: Family,
        count: u8,
    ) -> Result<Vec<OwnedFd>, BackendError> {
        timing::SOCKETS
            .request(&self.metrics, Some(sandbox), self.backend.sockets(sandbox, family, count))
            .await
    }

    async fn attempts(&self, sandbox: SandboxId) -> Result<u64, BackendError> {
        timing::ATTEMPTS.request(&self.metrics, Some(sandbox), self.backend.attempts(sandbox)).await
    }

    async fn can_have_network(&self, sandbox: SandboxId) -> Result<bool, BackendError> {
        self.backend.can_have_network(sandbox).await
    }

    async fn show_policy(&self, sandbox: SandboxId, policy: &[u8]) -> Result<(), BackendError> {
        timing::NETWORK.request(&self.metrics, Some(sandbox), self.backend.show_policy(sandbox, policy)).await
    }

    async fn show_trust(
        &self,
        sandbox: SandboxId,
        rootfs: &Rootfs,
        ca: &str,
        extra: &str,
    ) -> Result<(), BackendError> {
        let shown = self.backend.show_trust(sandbox, rootfs, ca, extra);
        timing::NETWORK.request(&self.metrics, Some(sandbox), shown).await
    }

    async fn start_egress(&self, descriptors: Vec<OwnedFd>) -> Result<(), BackendError> {
        timing::EGRESS.request(&self.metrics, None, self.backend.start_egress(descriptors)).await
    }

    async fn end_egress(&self) -> Result<(), BackendError> {
        timing::EGRESS.request(&self.metrics, None, self.backend.end_egress()).await
    }

    async fn listening(&self, sandbox: SandboxId) -> Result<Vec<ListeningPort>, BackendError> {
        timing::LISTENING.request(&self.metrics, Some(sandbox), self.backend.listening(sandbox)).await
    }
}
