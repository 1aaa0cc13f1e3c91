//! Rows of snapshots, their names, and the snapshot that each tag refers to.

use std::time::SystemTime;

use rusqlite::{Connection, OptionalExtension, Row, params};
use wire::{SandboxId, SnapshotId, TemplateId};

use super::Db;
use super::rows::{micros, owner_from, time, unreadable};
use crate::error::EngineError;
use crate::model::Owner;
use crate::model::progress::SnapshotState;

/// A snapshot's row.
#[derive(Debug, Clone)]
pub(crate) struct SnapshotRow {
    pub id: SnapshotId,
    pub owner: Owner,
    pub name: String,
    pub wanted_tags: Vec<String>,
    pub template: Option<TemplateId>,
    pub sandbox: Option<SandboxId>,
    pub image: Option<String>,
    pub state: SnapshotState,
    pub note: String,
    pub created_at: SystemTime,
    pub updated_at: SystemTime,
    /// From the table `snapshot_tags`.
    pub tags: Vec<String>,
}

const COLUMNS: &str =
    "id, owner, name, wanted_tags, template, sandbox, image, state, reason, note, created_at, updated_at";

fn bits(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<u128>> {
    Ok(row.get::<_, Option<[u8; 16]>>(column)?.map(u128::from_be_bytes))
}

fn id(snapshot: SnapshotId) -> [u8; 16] {
    snapshot.bits().to_be_bytes()
}

fn words(state: &SnapshotState) -> (&'static str, Option<&str>) {
    match state {
        SnapshotState::Building => ("building", None),
        SnapshotState::Ready => ("ready", None),
        SnapshotState::Failed { reason } => ("failed", Some(reason)),
        SnapshotState::Deleting => ("deleting", None),
    }
}

fn snapshot_from(row: &Row<'_>) -> rusqlite::Result<SnapshotRow> {
    let lines: String = row.get("wanted_tags")?;
    let state = match row.get_ref("state")?.as_str()? {
        "building" => SnapshotState::Building,
        "ready" => SnapshotState::Ready,
        "failed" => {
            SnapshotState::Failed { reason: row.get::<_, Option<String>>("reason")?.unwrap_or_default() }
        }
        "deleting" => SnapshotState::Deleting,
        _ => return Err(unreadable(row, "state", "state of a snapshot")),
    };
    Ok(SnapshotRow {
        id: SnapshotId::from_bits(bits(row, "id")?.ok_or_else(|| unreadable(row, "id", "snapshot"))?),
        owner: owner_from(row)?,
        name: row.get("name")?,
        wanted_tags: lines.lines().map(str::to_owned).collect(),
        template: bits(row, "template")?.map(TemplateId::from_bits),
        sandbox: bits(row, "sandbox")?.map(SandboxId::from_bits),
        image: row.get("image")?,
        state,
        note: row.get("note")?,
        created_at: time(row, "created_at")?,
        updated_at: time(row, "updated_at")?,
        tags: Vec::new(),
    })
}

fn with_tags(db: &Connection, mut row: SnapshotRow) -> rusqlite::Result<SnapshotRow> {
    row.tags = db
        .prepare_cached("SELECT tag FROM snapshot_tags WHERE snapshot = ?1 ORDER BY tag")?
        .query_map(params![id(row.id)], |row| row.get("tag"))?
        .collect::<Result<_, _>>()?;
    Ok(row)
}

impl Db {
    /// Inserts a snapshot.
    pub async fn insert_snapshot(&self, row: SnapshotRow) -> Result<(), EngineError> {
        self.change("write the snapshot's row", move |db| {
            let (state, reason) = words(&row.state);
            db.prepare_cached(&format!(
                "INSERT INTO snapshots ({COLUMNS}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)"
            ))?
            .execute(params![
                id(row.id),
                row.owner.as_str(),
                row.name,
                row.wanted_tags.join("\n"),
                row.template.map(|template| template.bits().to_be_bytes()),
                row.sandbox.map(|sandbox| sandbox.bits().to_be_bytes()),
                row.image,
                state,
                reason,
                row.note,
                micros(row.created_at),
                micros(row.updated_at),
            ])?;
            Ok(())
        })
        .await
    }

    /// Writes the template from which sandboxes of a snapshot are made.
    pub async fn set_snapshot_template(
        &self,
        snapshot: SnapshotId,
        template: TemplateId,
    ) -> Result<(), EngineError> {
        self.change("write what the snapshot is", move |db| {
            db.prepare_cached("UPDATE snapshots SET template = ?1 WHERE id = ?2")?
                .execute(params![template.bits().to_be_bytes(), id(snapshot)])?;
            Ok(())
        })
        .await
    }

    /// Changes the state of a snapshot. A snapshot that becomes ready takes over its tags from other snapshots; one that is
    /// being deleted loses its tags. `false` if the snapshot is being deleted already, or gone.
    pub async fn settle_snapshot(
        &self,
        snapshot: SnapshotId,
        state: SnapshotState,
        now: SystemTime,
    ) -> Result<bool, EngineError> {
        self.change("write the snapshot's state", move |db| {
            let (word, reason) = words(&state);
            let changed = db
                .prepare_cached(
                    "UPDATE snapshots SET state = ?1, reason = ?2, updated_at = ?3 WHERE id = ?4 AND state != 'deleting'",
                )?
                .execute(params![word, reason, micros(now), id(snapshot)])?;
            if changed == 0 {
                return Ok(false);
            }
            match state {
                SnapshotState::Ready => {
                    let row = db
                        .prepare_cached(&format!("SELECT {COLUMNS} FROM snapshots WHERE id = ?1"))?
                        .query_row(params![id(snapshot)], snapshot_from)?;
                    for tag in &row.wanted_tags {
                        db.prepare_cached(
                            "INSERT OR REPLACE INTO snapshot_tags (owner, name, tag, snapshot)
                             VALUES (?1, ?2, ?3, ?4)",
                        )?
                            .execute(params![row.owner.as_str(), row.name, tag, id(snapshot)])?;
                    }
                }
                SnapshotState::Deleting => {
                    db.prepare_cached("DELETE FROM snapshot_tags WHERE snapshot = ?1")?
                        .execute(params![id(snapshot)])?;
                }
                SnapshotState::Building | SnapshotState::Failed { .. } => {}
            }
            Ok(true)
        })
        .await
    }

    /// Deletes the row of a snapshot.
    pub async fn delete_snapshot(&self, snapshot: SnapshotId) -> Result<(), EngineError> {
        self.change("delete the snapshot's row", move |db| {
            db.prepare_cached("DELETE FROM snapshots WHERE id = ?1")?.execute(params![id(snapshot)])?;
            Ok(())
        })
        .await
    }

    /// A snapshot by its id.
    pub async fn snapshot(&self, snapshot: SnapshotId) -> Result<Option<SnapshotRow>, EngineError> {
        self.question("read the snapshot's row", move |db| {
            let row = db
                .prepare_cached(&format!("SELECT {COLUMNS} FROM snapshots WHERE id = ?1"))?
                .query_row(params![id(snapshot)], snapshot_from)
                .optional()?;
            row.map(|row| with_tags(db, row)).transpose()
        })
        .await
    }

    /// All snapshots of one owner or of all, newest first.
    pub async fn snapshots(&self, owner: Option<Owner>) -> Result<Vec<SnapshotRow>, EngineError> {
        self.question("read the snapshots' rows", move |db| {
            let rows = db
                .prepare_cached(&format!(
                    "SELECT {COLUMNS} FROM snapshots WHERE ?1 IS NULL OR owner = ?1 ORDER BY created_at DESC, id"
                ))?
                .query_map(params![owner.as_ref().map(Owner::as_str)], snapshot_from)?
                .collect::<Result<Vec<_>, _>>()?;
            rows.into_iter().map(|row| with_tags(db, row)).collect()
        })
        .await
    }

    /// The tags of a name, and the snapshot that each refers to.
    pub async fn snapshot_tags(
        &self,
        owner: Owner,
        name: String,
    ) -> Result<Vec<(String, SnapshotId)>, EngineError> {
        self.question("read the snapshots' tags", move |db| {
            db.prepare_cached(
                "SELECT tag, snapshot FROM snapshot_tags WHERE owner = ?1 AND name = ?2 ORDER BY tag",
            )?
            .query_map(params![owner.as_str(), name], |row| {
                let id = bits(row, "snapshot")?.ok_or_else(|| unreadable(row, "snapshot", "snapshot"))?;
                Ok((row.get("tag")?, SnapshotId::from_bits(id)))
            })?
            .collect()
        })
        .await
    }
}
