//! Rows of snapshots: what was published under which name, and what each tag means now.

use std::time::SystemTime;

use rusqlite::{Connection, OptionalExtension, Row, params};
use wire::{SandboxId, SnapshotId, TemplateId};

use super::Store;
use super::rows::{micros, time, unreadable};
use crate::error::EngineError;
use crate::model::Owner;
use crate::snapshots::SnapshotState;

/// The tables, for the list of migrations.
pub(super) const TABLES: &str = "
    CREATE TABLE snapshots (
        id                 BLOB NOT NULL PRIMARY KEY,
        owner              TEXT NOT NULL,
        name               TEXT NOT NULL,
        -- Tags that are set when it is ready, one in a line.
        wanted_tags        TEXT NOT NULL,
        -- What sandboxes are made from, once there is that.
        template           BLOB,
        -- Where it was captured. That may be gone.
        sandbox            BLOB,
        image              TEXT,
        state              TEXT NOT NULL,
        reason             TEXT,
        note               TEXT NOT NULL,
        created_at         INTEGER NOT NULL,
        updated_at         INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX snapshots_by_name ON snapshots (owner, name);
    CREATE INDEX snapshots_by_template ON snapshots (template) WHERE template IS NOT NULL;
    CREATE TABLE snapshot_tags (
        owner              TEXT NOT NULL,
        name               TEXT NOT NULL,
        tag                TEXT NOT NULL,
        snapshot           BLOB NOT NULL REFERENCES snapshots (id) ON DELETE CASCADE,
        PRIMARY KEY (owner, name, tag)
    ) WITHOUT ROWID;
    CREATE INDEX snapshot_tags_by_snapshot ON snapshot_tags (snapshot);
";

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
    /// In a table of their own, and read with it.
    pub tags: Vec<String>,
}

const COLUMNS: &str =
    "id, owner, name, wanted_tags, template, sandbox, image, state, reason, note, created_at, updated_at";

fn bits(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<u128>> {
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
    let lines: String = row.get(3)?;
    let state = match row.get_ref(7)?.as_str()? {
        "building" => SnapshotState::Building,
        "ready" => SnapshotState::Ready,
        "failed" => SnapshotState::Failed { reason: row.get::<_, Option<String>>(8)?.unwrap_or_default() },
        "deleting" => SnapshotState::Deleting,
        _ => return Err(unreadable(7, "state of a snapshot")),
    };
    Ok(SnapshotRow {
        id: SnapshotId::from_bits(bits(row, 0)?.ok_or_else(|| unreadable(0, "snapshot"))?),
        owner: Owner::parse(row.get_ref(1)?.as_str()?).map_err(|_| unreadable(1, "owner"))?,
        name: row.get(2)?,
        wanted_tags: lines.lines().map(str::to_owned).collect(),
        template: bits(row, 4)?.map(TemplateId::from_bits),
        sandbox: bits(row, 5)?.map(SandboxId::from_bits),
        image: row.get(6)?,
        state,
        note: row.get(9)?,
        created_at: time(row, 10)?,
        updated_at: time(row, 11)?,
        tags: Vec::new(),
    })
}

fn with_tags(db: &Connection, mut row: SnapshotRow) -> rusqlite::Result<SnapshotRow> {
    row.tags = db
        .prepare_cached("SELECT tag FROM snapshot_tags WHERE snapshot = ?1 ORDER BY tag")?
        .query_map(params![id(row.id)], |row| row.get(0))?
        .collect::<Result<_, _>>()?;
    Ok(row)
}

impl Store {
    /// A new snapshot.
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

    /// What sandboxes of a snapshot are made from.
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

    /// What came of a snapshot. One that is ready takes its tags from whichever had them; one that goes gives them up.
    /// `false`: it is gone, or going.
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
                        db.prepare_cached("INSERT OR REPLACE INTO snapshot_tags VALUES (?1, ?2, ?3, ?4)")?
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

    /// A snapshot of which nothing is left.
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

    /// All snapshots of an owner, or of everyone, newest first.
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

    /// What the tags of a name mean.
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
                let id = bits(row, 1)?.ok_or_else(|| unreadable(1, "snapshot"))?;
                Ok((row.get(0)?, SnapshotId::from_bits(id)))
            })?
            .collect()
        })
        .await
    }
}
