//! A snapshot as one OCI archive that other tools read.
//!
//! A process of the backend that can reach nothing else packs the files into a pipe. What comes out is stored in a file first,
//! because an archive names each part by its digest and says its size before it. The daemon hashes these bytes and reads
//! none of them. The file is removed with the [`Exported`], and a file of a daemon that died at its successor's first sweep.

use std::io::{self, PipeReader, Read, Seek, SeekFrom, Write};
use std::sync::Arc;

use bytes::Bytes;
use image::Digest;
use image::blobs::{Blobs, FREE_MIN, Upload};
use image::hash::Hasher;
use image::oci_file::frame;
use runtime::BackendError;
use wire::SnapshotId;
use wire::launch::{DiffSide, Rootfs};

use super::SnapshotState;
use crate::Engine;
use crate::db::{Purpose, SnapshotRow};
use crate::error::{EngineError, shown};
use crate::image::ImageFault;
use crate::image::slots::Slot;
use crate::model::{Key, Owner};

/// Size of one read.
const PIECE_BYTES: usize = 256 << 10;
/// After this many bytes, check again whether the disk has room.
const ROOM_STEP: u64 = 16 << 20;

/// Whether an archive may contain the `/usr` of this machine, which is part of what sandboxes over the image `host` see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HostUsr {
    /// A snapshot over the image `host` is not exported.
    #[default]
    Refuse,
    /// It is, with these files.
    Include,
}

/// An archive that is ready to be read.
pub struct Exported {
    /// The name of the snapshot.
    pub name: String,
    /// The length of the archive.
    pub length: u64,
    front: Option<Vec<u8>>,
    layer: Option<Upload>,
    back: Option<Vec<u8>>,
    _slot: Slot,
}

impl Exported {
    /// The next bytes. `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>, EngineError> {
        if let Some(front) = self.front.take() {
            return Ok(Some(front.into()));
        }
        if let Some(layer) = self.layer.take() {
            let read = tokio::task::spawn_blocking(move || {
                let mut piece = vec![0; PIECE_BYTES];
                let length = (&layer.file).read(&mut piece)?;
                piece.truncate(length);
                io::Result::Ok((layer, piece))
            });
            let read = read.await.map_err(|_| EngineError::Stopping)?;
            let (layer, piece) = read.map_err(|source| failed(&self.name, not_kept(source)))?;
            if !piece.is_empty() {
                self.layer = Some(layer);
                return Ok(Some(piece.into()));
            }
        }
        Ok(self.back.take().map(Bytes::from))
    }
}

impl Engine {
    /// Packs a snapshot of the key's owner, by id or name. Returns when the archive is complete.
    pub async fn export_snapshot(
        &self,
        key: &Key,
        text: &str,
        usr: HostUsr,
    ) -> Result<Exported, EngineError> {
        let row = self.ready_snapshot(&key.owner, text).await?;
        let name = if row.name.is_empty() { row.id.to_string() } else { row.name.clone() };
        let shared = self.shared();
        let rootfs = self.rootfs_of(&row)?;
        let over_host = match &rootfs {
            Rootfs::Host | Rootfs::OverHost(_) => true,
            Rootfs::Layers(_) => false,
        };
        if over_host && usr == HostUsr::Refuse {
            return Err(EngineError::HostUsr { name });
        }
        let image = match row.purpose {
            Purpose::Named => self.image_of(&row),
            Purpose::Fork | Purpose::History => {
                row.sandbox.and_then(|id| shared.registry().get(id)).and_then(|live| live.stored_image())
            }
        };
        let config =
            image.as_ref().map_or_else(crate::build::host_config_text, |image| image.config_text.clone());
        let layers = image.iter().flat_map(|image| image.layers.iter().map(|layer| layer.layer));
        let _pins = shared.images.pin(layers.collect::<Vec<Digest>>());
        let slot = shared.images.exports.take(&key.owner).await;
        let packed = self.packed(&DiffSide { layers: row.over.all().collect(), rootfs }).await;
        let (layer, digest, bytes) = packed.map_err(|fault| match fault {
            ImageFault::Pack { source: BackendError::Refused { doing, source } }
                if source.raw_os_error() == Some(rustix::io::Errno::ILSEQ.raw_os_error()) =>
            {
                EngineError::NotExportable { name: name.clone(), why: doing }
            }
            fault => failed(&name, fault),
        })?;
        let frame = frame(&name, &config, digest, bytes)
            .map_err(|error| failed(&name, not_kept(io::Error::other(error))))?;
        Ok(Exported {
            name,
            length: frame.length,
            front: Some(frame.front),
            layer: Some(layer),
            back: Some(frame.back),
            _slot: slot,
        })
    }

    /// A snapshot that is complete, also one without files of its own.
    async fn ready_snapshot(&self, owner: &Owner, text: &str) -> Result<SnapshotRow, EngineError> {
        let not_found = || EngineError::SnapshotNotFound { name: shown(text) };
        let id = match text.parse::<SnapshotId>() {
            Ok(id) => id,
            Err(_) => self.snapshot(owner, text).await?.id.parse().map_err(|_| not_found())?,
        };
        let row = self.shared().db.snapshot(id).await?.filter(|row| row.owner == *owner);
        let row = row.ok_or_else(not_found)?;
        let state = match &row.state {
            SnapshotState::Ready => return Ok(row),
            SnapshotState::Building => "not complete",
            SnapshotState::Failed { .. } => "failed",
            SnapshotState::Deleting => return Err(not_found()),
        };
        Err(EngineError::SnapshotNotReady { name: shown(text), state })
    }

    /// Stores the packed files, and returns the digest and the number of these bytes.
    async fn packed(&self, side: &DiffSide) -> Result<(Upload, Digest, u64), ImageFault> {
        let shared = self.shared();
        let (from, to) = io::pipe().map_err(not_kept)?;
        let blobs = Arc::clone(&shared.images.blobs);
        let storing = tokio::task::spawn_blocking(move || stored(from, &blobs));
        let packed = shared.backend.export(side, to.into()).await;
        // If nothing reads any more because the disk is full, packing fails too: the disk is the reason.
        let stored = storing.await.map_err(|_| ImageFault::Stopping)?.map_err(not_kept)?;
        packed.map_err(|source| ImageFault::Pack { source })?;
        Ok(stored)
    }
}

fn failed(name: &str, fault: ImageFault) -> EngineError {
    EngineError::Image { doing: "export", name: name.to_owned(), source: Arc::new(fault) }
}

fn not_kept(source: io::Error) -> ImageFault {
    ImageFault::Keep { doing: "store the archive", source }
}

/// Stores a stream, as far as the disk has room. Blocks.
fn stored(mut from: PipeReader, blobs: &Arc<Blobs>) -> io::Result<(Upload, Digest, u64)> {
    let mut upload = blobs.upload()?;
    let (mut hasher, mut bytes, mut room) = (Hasher::new(), 0, 0);
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        if room < PIECE_BYTES as u64 {
            room = blobs.free()?.saturating_sub(FREE_MIN).min(ROOM_STEP);
            if room < PIECE_BYTES as u64 {
                return Err(io::ErrorKind::StorageFull.into());
            }
        }
        let length = from.read(&mut piece)?;
        if length == 0 {
            break;
        }
        hasher.update(&piece[..length]);
        upload.file.write_all(&piece[..length])?;
        bytes += length as u64;
        room -= length as u64;
    }
    upload.file.seek(SeekFrom::Start(0))?;
    Ok((upload, hasher.finish(), bytes))
}
