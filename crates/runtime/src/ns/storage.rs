//! Layers, writable files and volumes: asks the launcher for them.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;
use wire::launch::{
    Answer, Ask, DiffSide, DiffSnapshots, Difference, ExportSnapshot, FilesMark, LAYERS_PAGE, LayerFacts,
    SNAPSHOTS_PAGE, StoreFacts, UnpackLayer, VOLUMES_PAGE, from_packet,
};
use wire::{Digest, SandboxId, SnapshotId, VolumeId};

use crate::backend::{BackendError, Differences, DiskUsage, LayerSpec, Storage};
use crate::ns::link::{Call, refused, unexpected};
use crate::ns::{NsBackend, QUICK_DEADLINE, TEARDOWN_DEADLINE};

/// Copying a volume first writes its recent changes to disk.
const VOLUME_DEADLINE: Duration = Duration::from_secs(120);
/// A snapshot first writes recent changes to disk.
const SNAPSHOT_DEADLINE: Duration = Duration::from_secs(120);
/// Comparing reads every file that may differ.
const DIFF_DEADLINE: Duration = Duration::from_secs(300);
/// The longest difference: a path and two small files.
const DIFFERENCE_MAX: usize = 1 << 20;
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

    async fn settle_files(&self, sandbox: SandboxId) -> Result<(), BackendError> {
        let ask = Ask::SettleFiles { sandbox };
        self.ask("write a sandbox's files to disk", ask, SNAPSHOT_DEADLINE).await.map(|_| ())
    }

    async fn take_snapshot(
        &self,
        sandbox: SandboxId,
        snapshot: SnapshotId,
    ) -> Result<FilesMark, BackendError> {
        const DOING: &str = "take a snapshot";
        match self.ask(DOING, Ask::TakeSnapshot { sandbox, snapshot }, SNAPSHOT_DEADLINE).await? {
            Answer::FilesMark(Some(mark)) => Ok(mark),
            other => Err(unexpected(DOING, &other)),
        }
    }

    async fn remove_snapshot(&self, snapshot: SnapshotId) -> Result<(), BackendError> {
        self.ask("remove a snapshot", Ask::RemoveSnapshot { snapshot }, TEARDOWN_DEADLINE).await.map(|_| ())
    }

    async fn snapshots(&self) -> Result<Vec<SnapshotId>, BackendError> {
        let mut all: Vec<SnapshotId> = Vec::new();
        loop {
            let after = all.last().copied();
            match self.ask("list snapshots", Ask::Snapshots { after }, QUICK_DEADLINE).await? {
                Answer::Snapshots(page) => {
                    let last = page.len() < SNAPSHOTS_PAGE;
                    all.extend(page);
                    if last {
                        return Ok(all);
                    }
                }
                other => return Err(unexpected("list snapshots", &other)),
            }
        }
    }

    async fn diff(
        &self,
        before: &DiffSide,
        after: &DiffSide,
        contents: bool,
    ) -> Result<Differences, BackendError> {
        const DOING: &str = "compare snapshots";
        let base = self.ids().ranges.take().map_err(refused("claim an id range"))?;
        let base = base.ok_or(BackendError::Full { what: "id ranges" })?;
        let wanted = DiffSnapshots { before: before.clone(), after: after.clone(), contents, base };
        let (from, to) = io::pipe().map_err(refused("make a pipe"))?;
        let reading = tokio::task::spawn_blocking(move || read_differences(from));
        let backend = self.clone();
        // In its own task: if the caller gives up, the process runs on for a while, and its ids must not be reused.
        let asking = tokio::spawn(async move {
            let ask = Ask::Diff(Box::new(wanted));
            let answer = backend.exchange(DOING, ask, vec![to.into()], DIFF_DEADLINE).await;
            // Without an answer the process may still be alive; the next start of the daemon frees the range.
            if !matches!(&answer, Err(BackendError::LauncherGone { .. } | BackendError::Late { .. })) {
                backend.ids().ranges.put_back(base);
            }
            answer.map(drop)
        });
        let (read, answer) = tokio::join!(reading, asking);
        let failed = |error: tokio::task::JoinError| refused(DOING)(io::Error::other(error));
        let read = read.map_err(failed)?;
        let (differences, cut) = match read {
            Ok(read) => read,
            Err(error) => {
                answer.map_err(failed)??;
                return Err(refused(DOING)(error));
            }
        };
        // The process fails to write once the reader has enough.
        if !cut {
            answer.map_err(failed)??;
        }
        Ok(differences)
    }

    async fn export(&self, side: &DiffSide, to: OwnedFd) -> Result<(), BackendError> {
        const DOING: &str = "pack a snapshot";
        let base = self.ids().ranges.take().map_err(refused("claim an id range"))?;
        let base = base.ok_or(BackendError::Full { what: "id ranges" })?;
        let ask = Ask::Export(Box::new(ExportSnapshot { side: side.clone(), base }));
        let backend = self.clone();
        // In its own task: if the caller gives up, the process runs on for a while, and its ids must not be reused.
        let asking = tokio::spawn(async move {
            let answer = backend.exchange(DOING, ask, vec![to], UNPACK_DEADLINE).await;
            // Without an answer the process may still be alive; the next start of the daemon frees the range.
            if !matches!(&answer, Err(BackendError::LauncherGone { .. } | BackendError::Late { .. })) {
                backend.ids().ranges.put_back(base);
            }
            answer.map(drop)
        });
        asking.await.map_err(|error| refused(DOING)(io::Error::other(error)))?
    }

    async fn files_mark(&self, sandbox: SandboxId) -> Result<Option<FilesMark>, BackendError> {
        const DOING: &str = "look at a sandbox's files";
        match self.ask(DOING, Ask::FilesMark { sandbox }, QUICK_DEADLINE).await? {
            Answer::FilesMark(mark) => Ok(mark),
            other => Err(unexpected(DOING, &other)),
        }
    }
}

/// Reads what the comparing process writes, which may be anything. Also returns whether there was more than fits. Blocks.
fn read_differences(mut from: io::PipeReader) -> io::Result<(Differences, bool)> {
    use std::io::Read;
    let strange =
        || io::Error::new(io::ErrorKind::InvalidData, "the comparing process sent something strange");
    let (mut entries, mut bytes) = (Vec::new(), 0);
    loop {
        let mut length = [0; 4];
        from.read_exact(&mut length)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > DIFFERENCE_MAX {
            return Err(strange());
        }
        let mut packet = vec![0; length];
        from.read_exact(&mut packet)?;
        match from_packet(&packet).ok_or_else(strange)? {
            Difference::End { complete } => return Ok((Differences { entries, complete }, false)),
            entry @ Difference::Entry { .. } => {
                bytes += length;
                if entries.len() >= Differences::ENTRIES_MAX || bytes > Differences::BYTES_MAX {
                    return Ok((Differences { entries, complete: false }, true));
                }
                entries.push(entry);
            }
        }
    }
}
