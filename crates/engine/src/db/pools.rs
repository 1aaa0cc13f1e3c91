//! Rows of pools, of the sandboxes that wait in them, and of the pools that sandboxes were claimed from.
//!
//! A sandbox that waits refers to its pool, so a pool's row cannot go before them; a pool refers to its template, so that cannot go
//! before the pool. A claim is one change: whoever finds the sandbox waiting takes it out of the pool and gives it its name, its
//! labels and its life.

use std::collections::HashMap;
use std::time::SystemTime;

use rusqlite::{Connection, params};
use wire::{PoolId, SandboxId, TemplateId};

use super::life::{Stamps, insert_labels, insert_notes, insert_rules, put_stamps};
use super::rows::{
    SandboxRow, id_bytes, json, micros, optional_unsigned, sandbox_id, signed, time, unreadable,
};
use super::{Store, StoreError};
use crate::error::EngineError;
use crate::home::Identity;
use crate::labels::Labels;
use crate::lifetime::Lifetime;
use crate::model::{KeyLimits, Owner, SandboxName};
use crate::notes::Notes;
use crate::pools::PoolName;

/// The tables, for the list of migrations.
pub(super) const TABLES: &str = "
    CREATE TABLE pools (
        id                 BLOB NOT NULL PRIMARY KEY,
        owner              TEXT NOT NULL,
        name               TEXT NOT NULL,
        -- NULL is the built-in one.
        template           BLOB REFERENCES templates (id),
        replicas           INTEGER NOT NULL,
        -- What the owner may have in all, as the key said that made the pool or scaled it.
        sandboxes_max      INTEGER,
        cpu_millis_max     INTEGER,
        memory_bytes_max   INTEGER,
        -- It is being deleted: nothing is claimed from it, and it goes when it is empty.
        going              INTEGER NOT NULL,
        created_at         INTEGER NOT NULL,
        updated_at         INTEGER NOT NULL,
        UNIQUE (owner, name)
    ) WITHOUT ROWID;
    CREATE INDEX pools_by_template ON pools (template) WHERE template IS NOT NULL;
    CREATE TABLE pool_members (
        sandbox            BLOB NOT NULL PRIMARY KEY REFERENCES sandboxes (id) ON DELETE CASCADE,
        -- Where it waits; NULL once it is claimed.
        pool               BLOB REFERENCES pools (id),
        -- What that was called when it was claimed.
        claimed_from       TEXT,
        CHECK ((pool IS NULL) = (claimed_from IS NOT NULL))
    ) WITHOUT ROWID;
    CREATE INDEX pool_members_by_pool ON pool_members (pool) WHERE pool IS NOT NULL;
";

/// A pool's row.
#[derive(Debug, Clone)]
pub(crate) struct PoolRow {
    pub id: PoolId,
    pub owner: Owner,
    pub name: PoolName,
    /// None for the built-in one.
    pub template: Option<TemplateId>,
    pub replicas: u32,
    pub limits: KeyLimits,
    pub going: bool,
    pub created_at: SystemTime,
    pub updated_at: SystemTime,
}

/// What changes about a pool, in one commit.
#[derive(Debug, Clone, Default)]
pub(crate) struct PoolChange {
    pub name: Option<PoolName>,
    /// With what the owner may have in all.
    pub replicas: Option<(u32, KeyLimits)>,
    pub going: bool,
}

/// What a sandbox that waited becomes.
#[derive(Debug, Clone)]
pub(crate) struct ClaimRow {
    /// Where it is to be another than it has.
    pub name: Option<SandboxName>,
    pub labels: Labels,
    pub notes: Notes,
    pub lifetime: Lifetime,
    pub stamps: Stamps,
    pub identity: std::sync::Arc<Identity>,
    pub claimed_from: String,
}

fn id(pool: PoolId) -> [u8; 16] {
    pool.bits().to_be_bytes()
}

/// In the change that inserts a sandbox: where it waits.
pub(super) fn insert_member(db: &Connection, sandbox: SandboxId, pool: PoolId) -> rusqlite::Result<()> {
    db.prepare_cached("INSERT INTO pool_members (sandbox, pool) VALUES (?1, ?2)")?
        .execute(params![id_bytes(sandbox), id(pool)])?;
    Ok(())
}

/// Adds to all sandboxes where they wait, or where they were claimed.
pub(super) fn add_pools(db: &Connection, sandboxes: &mut [SandboxRow]) -> rusqlite::Result<()> {
    let places: HashMap<SandboxId, usize> =
        sandboxes.iter().enumerate().map(|(at, row)| (row.id, at)).collect();
    let mut rows = db.prepare("SELECT sandbox, pool, claimed_from FROM pool_members")?;
    let mut rows = rows.query([])?;
    while let Some(row) = rows.next()? {
        let Some(sandbox) = places.get(&sandbox_id(row, 0)?).map(|at| &mut sandboxes[*at]) else { continue };
        sandbox.pool =
            row.get::<_, Option<[u8; 16]>>(1)?.map(|bits| PoolId::from_bits(u128::from_be_bytes(bits)));
        sandbox.claimed_from = row.get(2)?;
    }
    Ok(())
}

impl Store {
    /// All pools.
    pub async fn load_pools(&self) -> Result<Vec<PoolRow>, EngineError> {
        self.question("read the pools' rows", |db| {
            db.prepare(
                "SELECT id, owner, name, template, replicas, sandboxes_max, cpu_millis_max, memory_bytes_max, going,
                        created_at, updated_at
                 FROM pools",
            )?
            .query_map([], |row| {
                let template: Option<[u8; 16]> = row.get(3)?;
                Ok(PoolRow {
                    id: PoolId::from_bits(u128::from_be_bytes(row.get(0)?)),
                    owner: Owner::parse(row.get_ref(1)?.as_str()?).map_err(|_| unreadable(1, "owner"))?,
                    name: PoolName::kept(row.get_ref(2)?.as_str()?),
                    template: template.map(|bits| TemplateId::from_bits(u128::from_be_bytes(bits))),
                    replicas: row.get(4)?,
                    limits: KeyLimits {
                        sandboxes: row.get(5)?,
                        cpu_millis: optional_unsigned(row, 6)?,
                        memory_bytes: optional_unsigned(row, 7)?,
                    },
                    going: row.get(8)?,
                    created_at: time(row, 9)?,
                    updated_at: time(row, 10)?,
                })
            })?
            .collect()
        })
        .await
    }

    /// A new pool. The caller has checked that the name is free; the table checks again.
    pub async fn insert_pool(&self, row: PoolRow) -> Result<(), EngineError> {
        self.change("write the pool's row", move |db| {
            db.prepare_cached("INSERT INTO pools VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)")?
                .execute(params![
                    id(row.id),
                    row.owner.as_str(),
                    row.name.as_str(),
                    row.template.map(|template| template.bits().to_be_bytes()),
                    row.replicas,
                    row.limits.sandboxes,
                    row.limits.cpu_millis.map(signed),
                    row.limits.memory_bytes.map(signed),
                    row.going,
                    micros(row.created_at),
                    micros(row.updated_at),
                ])?;
            Ok(())
        })
        .await
    }

    /// What was changed about a pool, all of it or nothing.
    pub async fn change_pool(
        &self,
        pool: PoolId,
        change: PoolChange,
        at: SystemTime,
    ) -> Result<(), EngineError> {
        self.change("write the pool's changes", move |db| {
            if let Some(name) = &change.name {
                db.prepare_cached("UPDATE pools SET name = ?1 WHERE id = ?2")?
                    .execute(params![name.as_str(), id(pool)])?;
            }
            if let Some((replicas, limits)) = &change.replicas {
                db.prepare_cached(
                    "UPDATE pools SET replicas = ?1, sandboxes_max = ?2, cpu_millis_max = ?3, memory_bytes_max = ?4
                     WHERE id = ?5",
                )?
                .execute(params![
                    replicas,
                    limits.sandboxes,
                    limits.cpu_millis.map(signed),
                    limits.memory_bytes.map(signed),
                    id(pool)
                ])?;
            }
            if change.going {
                db.prepare_cached("UPDATE pools SET going = TRUE WHERE id = ?1")?.execute(params![id(pool)])?;
            }
            db.prepare_cached("UPDATE pools SET updated_at = ?1 WHERE id = ?2")?
                .execute(params![micros(at), id(pool)])?;
            Ok(())
        })
        .await
    }

    /// The row of a pool in which nothing waits. Refused by the table while something does.
    pub async fn delete_pool(&self, pool: PoolId) -> Result<(), EngineError> {
        self.change("delete the pool's row", move |db| {
            db.prepare_cached("DELETE FROM pools WHERE id = ?1")?.execute(params![id(pool)])?;
            Ok(())
        })
        .await
    }

    /// Gives a sandbox that waits to whoever claims it. Answers through `done`, on the store's thread. `false`: it does not wait,
    /// or does not run any more.
    pub fn claim_sandbox(
        &self,
        sandbox: SandboxId,
        claim: ClaimRow,
        done: impl FnOnce(Result<bool, StoreError>) + Send + 'static,
    ) {
        let change = move |db: &Connection| {
            let taken = db
                .prepare_cached(
                    "UPDATE pool_members SET pool = NULL, claimed_from = ?1
                     WHERE sandbox = ?2 AND pool IS NOT NULL
                       AND EXISTS (SELECT 1 FROM sandboxes WHERE id = ?2 AND state = 'running')",
                )?
                .execute(params![claim.claimed_from, id_bytes(sandbox)])?;
            if taken != 1 {
                return Ok(false);
            }
            let identity = &claim.identity;
            db.prepare_cached(
                "UPDATE sandboxes SET name = coalesce(?1, name), env = ?2, idempotency_key = ?3, request_digest = ?4,
                     created_at = ?5
                 WHERE id = ?6",
            )?
            .execute(params![
                claim.name.as_ref().map(SandboxName::as_str),
                json(&identity.env),
                identity.idempotency_key,
                identity.request_digest,
                micros(identity.created_at),
                id_bytes(sandbox),
            ])?;
            insert_labels(db, sandbox, &claim.labels)?;
            insert_notes(db, sandbox, &claim.notes)?;
            if !claim.lifetime.rules().is_empty() {
                insert_rules(db, sandbox, &claim.lifetime)?;
                put_stamps(db, sandbox, &claim.stamps)?;
            }
            Ok(true)
        };
        self.submit(change, done);
    }
}
