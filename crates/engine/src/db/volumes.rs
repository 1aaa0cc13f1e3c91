//! Rows of volumes, and which sandboxes mount them.
//!
//! A volume cannot be deleted before the sandboxes that mount it: a foreign key ensures this.

use std::collections::HashMap;
use std::time::SystemTime;

use rusqlite::{Connection, Row, params};
use wire::launch::Access;
use wire::{SandboxId, VolumeId};

use super::Db;
use super::rows::{id_bytes, micros, owner_from, sandbox_id, signed, time, unreadable, unsigned};
use super::sandboxes::SandboxRow;
use crate::error::EngineError;
use crate::model::Owner;
use crate::model::names::VolumeName;

/// The state of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VolumeState {
    /// The volume is being created, and no caller knows of it yet.
    Creating,
    /// The volume can be mounted.
    Ready,
    /// The volume is being deleted.
    Deleting,
}

impl VolumeState {
    fn word(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Ready => "ready",
            Self::Deleting => "deleting",
        }
    }
}

/// A volume's row.
#[derive(Debug, Clone)]
pub(crate) struct VolumeRow {
    pub id: VolumeId,
    pub owner: Owner,
    pub name: VolumeName,
    pub size_bytes: u64,
    pub state: VolumeState,
    pub created_at: SystemTime,
    pub updated_at: SystemTime,
}

/// A volume that a sandbox mounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MountRow {
    pub volume: VolumeId,
    pub path: String,
    pub access: Access,
}

fn id(volume: VolumeId) -> [u8; 16] {
    volume.bits().to_be_bytes()
}

fn volume_id(row: &Row<'_>, column: &str) -> rusqlite::Result<VolumeId> {
    Ok(VolumeId::from_bits(u128::from_be_bytes(row.get(column)?)))
}

fn volume_from(row: &Row<'_>) -> rusqlite::Result<VolumeRow> {
    let state = match row.get_ref("state")?.as_str()? {
        "creating" => VolumeState::Creating,
        "ready" => VolumeState::Ready,
        "deleting" => VolumeState::Deleting,
        _ => return Err(unreadable(row, "state", "state")),
    };
    Ok(VolumeRow {
        id: volume_id(row, "id")?,
        owner: owner_from(row)?,
        name: VolumeName::kept(row.get_ref("name")?.as_str()?),
        size_bytes: unsigned(row, "size_bytes")?,
        state,
        created_at: time(row, "created_at")?,
        updated_at: time(row, "updated_at")?,
    })
}

/// Part of the change that inserts a sandbox: writes its mounts.
pub(super) fn insert_mounts(
    db: &Connection,
    sandbox: SandboxId,
    mounts: &[MountRow],
) -> rusqlite::Result<()> {
    for mount in mounts {
        let access = match mount.access {
            Access::ReadWrite => "rw",
            Access::ReadOnly => "ro",
        };
        db.prepare_cached("INSERT INTO mounts (sandbox, path, volume, access) VALUES (?1, ?2, ?3, ?4)")?
            .execute(params![id_bytes(sandbox), mount.path, id(mount.volume), access])?;
    }
    Ok(())
}

/// Adds mounts to sandboxes, in the order of paths.
pub(super) fn add_mounts(db: &Connection, sandboxes: &mut [SandboxRow]) -> rusqlite::Result<()> {
    let at: HashMap<SandboxId, usize> =
        sandboxes.iter().enumerate().map(|(at, sandbox)| (sandbox.id, at)).collect();
    let mut read = db.prepare("SELECT sandbox, path, volume, access FROM mounts ORDER BY sandbox, path")?;
    let mut rows = read.query([])?;
    while let Some(row) = rows.next()? {
        let Some(at) = at.get(&sandbox_id(row, "sandbox")?) else { continue };
        let access = match row.get_ref("access")?.as_str()? {
            "rw" => Access::ReadWrite,
            "ro" => Access::ReadOnly,
            _ => return Err(unreadable(row, "access", "access")),
        };
        let mount = MountRow { volume: volume_id(row, "volume")?, path: row.get("path")?, access };
        sandboxes[*at].mounts.push(mount);
    }
    Ok(())
}

impl Db {
    /// All volumes.
    pub async fn load_volumes(&self) -> Result<Vec<VolumeRow>, EngineError> {
        self.question("read the volumes' rows", |db| {
            db.prepare("SELECT id, owner, name, size_bytes, state, created_at, updated_at FROM volumes")?
                .query_map([], volume_from)?
                .collect()
        })
        .await
    }

    /// Inserts a volume. The caller has checked that the name is free; the table checks again.
    pub async fn insert_volume(&self, row: VolumeRow) -> Result<(), EngineError> {
        self.change("write the volume's row", move |db| {
            db.prepare_cached(
                "INSERT INTO volumes (id, owner, name, size_bytes, state, created_at, updated_at)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
            )?
            .execute(params![
                id(row.id),
                row.owner.as_str(),
                row.name.as_str(),
                signed(row.size_bytes),
                row.state.word(),
                micros(row.created_at),
                micros(row.updated_at),
            ])?;
            Ok(())
        })
        .await
    }

    /// Changes the state of a volume.
    pub async fn set_volume_state(&self, volume: VolumeId, state: VolumeState) -> Result<(), EngineError> {
        self.change("write the volume's state", move |db| {
            db.prepare_cached("UPDATE volumes SET state = ?1 WHERE id = ?2")?
                .execute(params![state.word(), id(volume)])?;
            Ok(())
        })
        .await
    }

    /// Changes the name and the size of a volume.
    pub async fn change_volume(
        &self,
        volume: VolumeId,
        name: VolumeName,
        size_bytes: u64,
        at: SystemTime,
    ) -> Result<(), EngineError> {
        self.change("write the volume's changes", move |db| {
            db.prepare_cached(
                "UPDATE volumes SET name = ?1, size_bytes = ?2, updated_at = ?3 WHERE id = ?4",
            )?
            .execute(params![name.as_str(), signed(size_bytes), micros(at), id(volume)])?;
            Ok(())
        })
        .await
    }

    /// Deletes the row of a volume whose files are gone. Fails while a sandbox mounts it.
    pub async fn delete_volume(&self, volume: VolumeId) -> Result<(), EngineError> {
        self.change("delete the volume's row", move |db| {
            db.prepare_cached("DELETE FROM volumes WHERE id = ?1")?.execute(params![id(volume)])?;
            Ok(())
        })
        .await
    }
}
