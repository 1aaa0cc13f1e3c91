//! Rows of volumes, and which sandboxes mount them.
//!
//! A volume cannot go before the sandboxes that mount it: the tables say so too.

use std::collections::HashMap;
use std::time::SystemTime;

use rusqlite::{Connection, Row, params};
use wire::launch::Access;
use wire::{SandboxId, VolumeId};

use super::Store;
use super::rows::{SandboxRow, id_bytes, micros, sandbox_id, signed, time, unreadable, unsigned};
use crate::error::EngineError;
use crate::model::Owner;
use crate::volumes::VolumeName;

/// The tables, for the list of migrations.
pub(super) const TABLES: &str = "
    CREATE TABLE volumes (
        id                 BLOB NOT NULL PRIMARY KEY,
        owner              TEXT NOT NULL,
        name               TEXT NOT NULL,
        size_bytes         INTEGER NOT NULL,
        state              TEXT NOT NULL,
        created_at         INTEGER NOT NULL,
        updated_at         INTEGER NOT NULL,
        UNIQUE (owner, name)
    ) WITHOUT ROWID;
    CREATE TABLE mounts (
        sandbox            BLOB NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
        path               TEXT NOT NULL,
        volume             BLOB NOT NULL REFERENCES volumes (id),
        access             TEXT NOT NULL,
        PRIMARY KEY (sandbox, path)
    ) WITHOUT ROWID;
    CREATE INDEX mounts_by_volume ON mounts (volume);
    -- NULL: no limit, as in all rows that are older than this.
    ALTER TABLE sandboxes ADD COLUMN disk_bytes INTEGER;
";

/// Where a volume is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VolumeState {
    /// Nobody was told of it yet.
    Creating,
    /// It can be mounted.
    Ready,
    /// It goes.
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

/// A volume in a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MountRow {
    pub volume: VolumeId,
    pub path: String,
    pub access: Access,
}

fn id(volume: VolumeId) -> [u8; 16] {
    volume.bits().to_be_bytes()
}

fn volume_id(row: &Row<'_>, column: usize) -> rusqlite::Result<VolumeId> {
    Ok(VolumeId::from_bits(u128::from_be_bytes(row.get(column)?)))
}

fn volume_from(row: &Row<'_>) -> rusqlite::Result<VolumeRow> {
    let state = match row.get_ref(4)?.as_str()? {
        "creating" => VolumeState::Creating,
        "ready" => VolumeState::Ready,
        "deleting" => VolumeState::Deleting,
        _ => return Err(unreadable(4, "state")),
    };
    Ok(VolumeRow {
        id: volume_id(row, 0)?,
        owner: Owner::parse(row.get_ref(1)?.as_str()?).map_err(|_| unreadable(1, "owner"))?,
        name: VolumeName::kept(row.get_ref(2)?.as_str()?),
        size_bytes: unsigned(row, 3)?,
        state,
        created_at: time(row, 5)?,
        updated_at: time(row, 6)?,
    })
}

/// In the change that inserts a sandbox: what it mounts.
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

/// Adds to sandboxes what they mount, in the order of paths.
pub(super) fn add_mounts(db: &Connection, sandboxes: &mut [SandboxRow]) -> rusqlite::Result<()> {
    let at: HashMap<SandboxId, usize> =
        sandboxes.iter().enumerate().map(|(at, sandbox)| (sandbox.id, at)).collect();
    let mut read = db.prepare("SELECT sandbox, path, volume, access FROM mounts ORDER BY sandbox, path")?;
    let mut rows = read.query([])?;
    while let Some(row) = rows.next()? {
        let Some(at) = at.get(&sandbox_id(row, 0)?) else { continue };
        let access = match row.get_ref(3)?.as_str()? {
            "rw" => Access::ReadWrite,
            "ro" => Access::ReadOnly,
            _ => return Err(unreadable(3, "access")),
        };
        let mount = MountRow { volume: volume_id(row, 2)?, path: row.get(1)?, access };
        sandboxes[*at].mounts.push(mount);
    }
    Ok(())
}

impl Store {
    /// All volumes.
    pub async fn load_volumes(&self) -> Result<Vec<VolumeRow>, EngineError> {
        self.question("read the volumes' rows", |db| {
            db.prepare("SELECT id, owner, name, size_bytes, state, created_at, updated_at FROM volumes")?
                .query_map([], volume_from)?
                .collect()
        })
        .await
    }

    /// A new volume. The caller has checked that the name is free; the table checks again.
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

    /// Where a volume is in its life from now on.
    pub async fn set_volume_state(&self, volume: VolumeId, state: VolumeState) -> Result<(), EngineError> {
        self.change("write the volume's state", move |db| {
            db.prepare_cached("UPDATE volumes SET state = ?1 WHERE id = ?2")?
                .execute(params![state.word(), id(volume)])?;
            Ok(())
        })
        .await
    }

    /// What a volume is called, and what it may hold.
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

    /// The row of a volume whose files are gone. Refused by the table while a sandbox mounts it.
    pub async fn delete_volume(&self, volume: VolumeId) -> Result<(), EngineError> {
        self.change("delete the volume's row", move |db| {
            db.prepare_cached("DELETE FROM volumes WHERE id = ?1")?.execute(params![id(volume)])?;
            Ok(())
        })
        .await
    }
}
