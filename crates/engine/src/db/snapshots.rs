//! Rows of snapshots, their names, and the snapshot that each tag refers to.

use std::time::{Duration, SystemTime};

use rusqlite::{Connection, OptionalExtension, Row, params};
use wire::launch::{FilesMark, Over};
use wire::{SandboxId, SnapshotId, TemplateId};

use super::Db;
use super::lineage::{self, Holder};
use super::rows::{from_json, json, micros, optional_unsigned, owner_from, signed, time, unreadable};
use crate::error::EngineError;
use crate::model::Owner;
use crate::model::labels::Labels;
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
    pub purpose: Purpose,
    pub labels: Labels,
    /// The snapshot that its source began with, or was rolled back to.
    pub parent: Option<SnapshotId>,
    /// What is known of its files, once the store has them.
    pub taken: Option<Taken>,
    /// What a sandbox begins with that is made from it. Empty if its files are in an image.
    pub over: Over,
}

/// What a snapshot is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A caller asked for it, and deletes it.
    Named,
    /// Sandboxes were forked from it. It goes with the last of them.
    Fork,
    /// It was taken before a command. It goes when there are newer ones, or with its sandbox.
    History,
}

impl Purpose {
    fn word(self) -> &'static str {
        match self {
            Self::Named => "named",
            Self::Fork => "fork",
            Self::History => "history",
        }
    }
}

/// What is known of a snapshot's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Taken {
    /// How far the changes of the source's files had got.
    pub mark: FilesMark,
    /// What the source had written.
    pub size_bytes: u64,
    /// How long the source stood still.
    pub stopped: Duration,
}

const COLUMNS: &str =
    "id, owner, name, wanted_tags, template, sandbox, image, state, reason, note, created_at, updated_at,
     purpose, labels, parent, subvolume, changed, size_bytes, stopped_us";

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
        purpose: match row.get_ref("purpose")?.as_str()? {
            "named" => Purpose::Named,
            "fork" => Purpose::Fork,
            "history" => Purpose::History,
            _ => return Err(unreadable(row, "purpose", "purpose of a snapshot")),
        },
        labels: Labels::new(from_json(row, "labels")?).map_err(|_| unreadable(row, "labels", "label"))?,
        parent: bits(row, "parent")?.map(SnapshotId::from_bits),
        taken: match (optional_unsigned(row, "subvolume")?, optional_unsigned(row, "changed")?) {
            (Some(subvolume), Some(transaction)) => Some(Taken {
                mark: FilesMark { subvolume, transaction },
                size_bytes: optional_unsigned(row, "size_bytes")?.unwrap_or(0),
                stopped: Duration::from_micros(optional_unsigned(row, "stopped_us")?.unwrap_or(0)),
            }),
            _ => None,
        },
        over: Over::default(),
    })
}

/// Adds what other tables have of snapshots.
fn complete(db: &Connection, rows: Vec<SnapshotRow>) -> rusqlite::Result<Vec<SnapshotRow>> {
    let mut layers = lineage::layers(db, Holder::Snapshot)?;
    let add = |mut row: SnapshotRow| {
        row.over = layers.remove(&id(row.id)).unwrap_or_default();
        with_tags(db, row)
    };
    rows.into_iter().map(add).collect()
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
                "INSERT INTO snapshots ({COLUMNS}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12,
                     ?13, ?14, ?15, NULL, NULL, NULL, NULL)"
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
                row.purpose.word(),
                json(row.labels.pairs()),
                row.parent.map(id),
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

    /// Records that the store has the files of a snapshot, and what sandboxes begin with that are made from it.
    pub async fn put_snapshot_files(
        &self,
        snapshot: SnapshotId,
        taken: Taken,
        over: Over,
    ) -> Result<(), EngineError> {
        self.change("write what the snapshot has", move |db| {
            db.prepare_cached(
                "UPDATE snapshots SET subvolume = ?1, changed = ?2, size_bytes = ?3, stopped_us = ?4 WHERE id = ?5",
            )?
            .execute(params![
                signed(taken.mark.subvolume),
                signed(taken.mark.transaction),
                signed(taken.size_bytes),
                signed(taken.stopped.as_micros() as u64),
                id(snapshot)
            ])?;
            lineage::put_layers(db, Holder::Snapshot, id(snapshot), &over)
        })
        .await
    }

    /// The newest snapshot of a sandbox with this purpose that was taken when its files had this mark.
    pub async fn snapshot_at(
        &self,
        sandbox: SandboxId,
        purpose: Purpose,
        mark: FilesMark,
    ) -> Result<Option<SnapshotRow>, EngineError> {
        self.question("look for a snapshot of the same files", move |db| {
            let row = db
                .prepare_cached(&format!(
                    "SELECT {COLUMNS} FROM snapshots
                     WHERE sandbox = ?1 AND purpose = ?2 AND subvolume = ?3 AND changed = ?4 AND state = 'ready'
                     ORDER BY created_at DESC LIMIT 1"
                ))?
                .query_row(
                    params![
                        sandbox.bits().to_be_bytes(),
                        purpose.word(),
                        signed(mark.subvolume),
                        signed(mark.transaction)
                    ],
                    snapshot_from,
                )
                .optional()?;
            Ok(complete(db, row.into_iter().collect())?.pop())
        })
        .await
    }

    /// Marks the oldest snapshots of a sandbox's history as deleted, until this many are left. Returns how many it marked.
    pub async fn trim_history(&self, sandbox: SandboxId, kept: u32) -> Result<usize, EngineError> {
        self.change("shorten the sandbox's history", move |db| {
            db.prepare_cached(
                "UPDATE snapshots SET state = 'deleting' WHERE id IN (
                     SELECT id FROM snapshots WHERE sandbox = ?1 AND purpose = 'history' AND state = 'ready'
                     ORDER BY created_at DESC, id LIMIT -1 OFFSET ?2)",
            )?
            .execute(params![sandbox.bits().to_be_bytes(), kept])
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
            Ok(complete(db, row.into_iter().collect())?.pop())
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
            complete(db, rows)
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
