//! The snapshots that sandboxes lie over, which sandbox was made from which, and how much history is kept.

use std::collections::HashMap;
use std::time::SystemTime;

use rusqlite::{Connection, OptionalExtension, Row, params};
use wire::launch::Over;
use wire::{SandboxId, SnapshotId};

use super::Db;
use super::rows::{id_bytes, micros, sandbox_id, time, unreadable};
use super::sandboxes::{RowKey, SandboxRow, state_words};
use crate::error::EngineError;
use crate::model::Owner;
use crate::model::state::State;

/// The most generations between a sandbox and an ancestor.
const GENERATIONS_MAX: u32 = 1_000;
/// The most members of a family that are listed.
const FAMILY_MAX: u32 = 10_000;

const LAYER: &str = "layer";
const COPY: &str = "copy";

/// The sandbox and the snapshot that a new sandbox comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Descent {
    pub parent: SandboxId,
    pub snapshot: SnapshotId,
}

/// A member of a family of sandboxes.
#[derive(Debug, Clone)]
pub(crate) struct LineageRow {
    pub sandbox: SandboxId,
    /// The name that it had when it was deleted, or when the row was written.
    pub name: String,
    pub parent: Option<SandboxId>,
    pub snapshot: Option<SnapshotId>,
    pub created_at: SystemTime,
    pub ended_at: Option<SystemTime>,
}

fn bytes(id: SnapshotId) -> [u8; 16] {
    id.bits().to_be_bytes()
}

fn snapshot_from(row: &Row<'_>, column: &str) -> rusqlite::Result<SnapshotId> {
    Ok(SnapshotId::from_bits(u128::from_be_bytes(row.get(column)?)))
}

/// Whose layers they are.
#[derive(Clone, Copy)]
pub(super) enum Holder {
    Sandbox,
    Snapshot,
}

impl Holder {
    fn table(self) -> (&'static str, &'static str) {
        match self {
            Self::Sandbox => ("sandbox_layers", "sandbox"),
            Self::Snapshot => ("snapshot_layers", "snapshot"),
        }
    }
}

/// Replaces the layers of a sandbox or a snapshot.
pub(super) fn put_layers(db: &Connection, holder: Holder, of: [u8; 16], over: &Over) -> rusqlite::Result<()> {
    let (table, column) = holder.table();
    db.prepare_cached(&format!("DELETE FROM {table} WHERE {column} = ?1"))?.execute(params![of])?;
    let copy = over.copy.into_iter().map(|snapshot| (snapshot, COPY));
    let layers = over.layers.iter().map(|snapshot| (*snapshot, LAYER));
    for (position, (snapshot, role)) in copy.chain(layers).enumerate() {
        db.prepare_cached(&format!(
            "INSERT INTO {table} ({column}, position, layer, role) VALUES (?1, ?2, ?3, ?4)"
        ))?
        .execute(params![of, position as i64, bytes(snapshot), role])?;
    }
    Ok(())
}

/// The layers of all sandboxes, or of all snapshots.
pub(super) fn layers(db: &Connection, holder: Holder) -> rusqlite::Result<HashMap<[u8; 16], Over>> {
    let (table, column) = holder.table();
    let mut all: HashMap<[u8; 16], Over> = HashMap::new();
    let mut rows = db.prepare_cached(&format!("SELECT * FROM {table} ORDER BY {column}, position"))?;
    let mut rows = rows.query([])?;
    while let Some(row) = rows.next()? {
        let over = all.entry(row.get(column)?).or_default();
        let snapshot = snapshot_from(row, "layer")?;
        match row.get_ref("role")?.as_str()? {
            LAYER => over.layers.push(snapshot),
            COPY => over.copy = Some(snapshot),
            _ => return Err(unreadable(row, "role", "role of a layer")),
        }
    }
    Ok(all)
}

/// Adds the layers of sandboxes to their rows.
pub(super) fn add_layers(db: &Connection, sandboxes: &mut [SandboxRow]) -> rusqlite::Result<()> {
    let mut all = layers(db, Holder::Sandbox)?;
    let mut kept: HashMap<[u8; 16], u32> = db
        .prepare("SELECT sandbox, kept FROM histories")?
        .query_map([], |row| Ok((row.get("sandbox")?, row.get("kept")?)))?
        .collect::<Result<_, _>>()?;
    for row in sandboxes {
        row.over = all.remove(&id_bytes(row.id)).unwrap_or_default();
        row.history = kept.remove(&id_bytes(row.id)).unwrap_or(0);
    }
    Ok(())
}

/// Writes how many snapshots are kept for the history of a sandbox.
pub(super) fn put_history(db: &Connection, sandbox: SandboxId, kept: u32) -> rusqlite::Result<()> {
    match kept {
        0 => {
            db.prepare_cached("DELETE FROM histories WHERE sandbox = ?1")?.execute(params![id_bytes(sandbox)])
        }
        kept => db
            .prepare_cached("INSERT OR REPLACE INTO histories (sandbox, kept) VALUES (?1, ?2)")?
            .execute(params![id_bytes(sandbox), kept]),
    }?;
    Ok(())
}

/// Writes where a new sandbox comes from. Its parent becomes part of the family, even if it is gone already.
pub(super) fn insert_descent(db: &Connection, row: &SandboxRow, from: Descent) -> rusqlite::Result<()> {
    let parent = id_bytes(from.parent);
    db.prepare_cached(
        "INSERT OR IGNORE INTO lineage (sandbox, owner, name, created_at)
         SELECT id, owner, name, created_at FROM sandboxes WHERE id = ?1",
    )?
    .execute(params![parent])?;
    db.prepare_cached(
        "INSERT OR IGNORE INTO lineage (sandbox, owner, name, created_at, ended_at) VALUES (?1, ?2, '', ?3, ?3)",
    )?
    .execute(params![parent, row.owner.as_str(), micros(row.created_at)])?;
    db.prepare_cached(
        "INSERT OR REPLACE INTO lineage (sandbox, owner, name, parent, snapshot, created_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    )?
    .execute(params![
        id_bytes(row.id),
        row.owner.as_str(),
        row.name.as_str(),
        parent,
        bytes(from.snapshot),
        micros(row.created_at)
    ])?;
    Ok(())
}

/// All members of the family of ?1, from its root down.
const FAMILY: &str = "WITH RECURSIVE up (sandbox, parent, depth) AS (
         SELECT sandbox, parent, 0 FROM lineage WHERE sandbox = ?1
         UNION ALL
         SELECT lineage.sandbox, lineage.parent, depth + 1 FROM lineage JOIN up ON lineage.sandbox = up.parent
         WHERE depth < ?2
     ), down (sandbox) AS (
         SELECT sandbox FROM (SELECT sandbox FROM up ORDER BY depth DESC LIMIT 1)
         UNION
         SELECT lineage.sandbox FROM lineage JOIN down ON lineage.parent = down.sandbox
     )";

/// A sandbox is about to be deleted: its family remembers its name. A family without living members is forgotten.
pub(super) fn end_member(db: &Connection, sandbox: SandboxId, now: SystemTime) -> rusqlite::Result<()> {
    let ended = db
        .prepare_cached(
            "UPDATE lineage SET ended_at = ?2, name = (SELECT name FROM sandboxes WHERE id = ?1) WHERE sandbox = ?1",
        )?
        .execute(params![id_bytes(sandbox), micros(now)])?;
    if ended == 0 {
        return Ok(());
    }
    let lives = db
        .prepare_cached(&format!(
            "{FAMILY} SELECT 1 FROM down JOIN sandboxes ON sandboxes.id = down.sandbox WHERE sandboxes.id != ?1"
        ))?
        .exists(params![id_bytes(sandbox), GENERATIONS_MAX])?;
    if !lives {
        db.prepare_cached(&format!(
            "{FAMILY} DELETE FROM lineage WHERE sandbox IN (SELECT sandbox FROM down)"
        ))?
        .execute(params![id_bytes(sandbox), GENERATIONS_MAX])?;
    }
    Ok(())
}

fn lineage_from(row: &Row<'_>) -> rusqlite::Result<LineageRow> {
    let optional = |column| -> rusqlite::Result<Option<u128>> {
        Ok(row.get::<_, Option<[u8; 16]>>(column)?.map(u128::from_be_bytes))
    };
    let ended = row.get::<_, Option<i64>>("ended_at")?.is_some();
    Ok(LineageRow {
        sandbox: sandbox_id(row, "sandbox")?,
        name: row.get("name")?,
        parent: optional("parent")?.map(SandboxId::from_bits),
        snapshot: optional("snapshot")?.map(SnapshotId::from_bits),
        created_at: time(row, "created_at")?,
        ended_at: if ended { Some(time(row, "ended_at")?) } else { None },
    })
}

impl Db {
    /// Moves a sandbox onto other snapshots: its files become those of the snapshots, and it is made again. One commit,
    /// before anything is done to the sandbox, so that a daemon that starts after a crash finishes it.
    pub async fn begin_rollback(&self, key: RowKey, from: State, over: Over) -> Result<(), EngineError> {
        self.fenced("write what the sandbox is rolled back to", move |db| {
            let ((from, detail), (to, to_detail)) = (state_words(from), state_words(State::Creating));
            let changed = db
                .prepare_cached(
                    "UPDATE sandboxes
                     SET state = ?1, detail = ?2, goal = 'running', goal_kept = NULL, reason = NULL, oom_kills = 0
                     WHERE id = ?3 AND generation = ?4 AND state = ?5 AND detail = ?6",
                )?
                .execute(params![to, to_detail, id_bytes(key.id), key.generation, from, detail])?;
            if changed == 1 {
                put_layers(db, Holder::Sandbox, id_bytes(key.id), &over)?;
            }
            Ok(changed == 1)
        })
        .await
    }

    /// Changes how many snapshots are kept for the history of a sandbox.
    pub async fn set_history(&self, sandbox: SandboxId, kept: u32) -> Result<(), EngineError> {
        self.change("write how much history is kept", move |db| put_history(db, sandbox, kept)).await
    }

    /// Whether a sandbox is itself, or descends from, another one of the same owner.
    pub async fn descends(
        &self,
        owner: Owner,
        sandbox: SandboxId,
        from: SandboxId,
    ) -> Result<bool, EngineError> {
        if sandbox == from {
            return Ok(true);
        }
        self.question("read the sandbox's ancestors", move |db| {
            db.prepare_cached(
                "WITH RECURSIVE up (sandbox, parent, depth) AS (
                     SELECT sandbox, parent, 0 FROM lineage WHERE sandbox = ?1 AND owner = ?3
                     UNION ALL
                     SELECT lineage.sandbox, lineage.parent, depth + 1
                     FROM lineage JOIN up ON lineage.sandbox = up.parent WHERE depth < ?4
                 ) SELECT 1 FROM up WHERE parent = ?2",
            )?
            .exists(params![id_bytes(sandbox), id_bytes(from), owner.as_str(), GENERATIONS_MAX])
        })
        .await
    }

    /// The family of a sandbox, or all families of an owner; oldest first.
    pub async fn lineage(
        &self,
        owner: Owner,
        sandbox: Option<SandboxId>,
    ) -> Result<Vec<LineageRow>, EngineError> {
        self.question("read the families of sandboxes", move |db| {
            let Some(sandbox) = sandbox else {
                return db
                    .prepare_cached(
                        "SELECT * FROM lineage WHERE owner = ?1 ORDER BY created_at, sandbox LIMIT ?2",
                    )?
                    .query_map(params![owner.as_str(), FAMILY_MAX], lineage_from)?
                    .collect();
            };
            db.prepare_cached(&format!(
                "{FAMILY} SELECT lineage.* FROM lineage JOIN down USING (sandbox) WHERE owner = ?3
                 ORDER BY created_at, sandbox LIMIT ?4"
            ))?
            .query_map(params![id_bytes(sandbox), GENERATIONS_MAX, owner.as_str(), FAMILY_MAX], lineage_from)?
            .collect()
        })
        .await
    }

    /// Whether a sandbox or another snapshot lies over a snapshot, so that its files must stay.
    pub async fn snapshot_is_held(&self, snapshot: SnapshotId) -> Result<bool, EngineError> {
        self.question("look who needs a snapshot", move |db| {
            let held = db
                .prepare_cached(
                    "SELECT 1 FROM sandbox_layers WHERE layer = ?1
                     UNION ALL SELECT 1 FROM snapshot_layers WHERE layer = ?1 AND snapshot != ?1",
                )?
                .query_row(params![bytes(snapshot)], |_| Ok(()))
                .optional()?;
            Ok(held.is_some())
        })
        .await
    }
}
