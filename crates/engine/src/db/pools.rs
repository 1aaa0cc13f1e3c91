//! Rows of pools, of the sandboxes that wait in them, and of the pools that sandboxes were claimed from.
//!
//! A waiting sandbox refers to its pool, so the pool cannot be deleted before the sandbox; a pool refers to its template, so
//! the template cannot be deleted before the pool. A claim is one change: it takes a waiting sandbox out of its pool, and
//! writes its name, its labels and its lifetime.

use std::sync::Arc;
use std::time::SystemTime;

use rusqlite::{Connection, params};
use wire::{PoolId, SandboxId, TemplateId};

use super::life::{Stamps, insert_labels, insert_notes, insert_rules, put_stamps};
use super::rows::{id_bytes, json, micros, optional_unsigned, owner_from, signed, time};
use super::sandboxes::{Identity, RowKey};
use super::{Db, network};
use crate::error::EngineError;
use crate::model::dialect_notes::Notes;
use crate::model::labels::Labels;
use crate::model::lifetime::Lifetime;
use crate::model::names::PoolName;
use crate::model::network::NetworkPolicy;
use crate::model::{KeyLimits, Owner, SandboxName};

/// A pool's row.
#[derive(Debug, Clone)]
pub(crate) struct PoolRow {
    pub id: PoolId,
    pub owner: Owner,
    pub name: PoolName,
    /// None for the built-in template.
    pub template: Option<TemplateId>,
    pub replicas: u32,
    pub limits: KeyLimits,
    pub going: bool,
    pub created_at: SystemTime,
    pub updated_at: SystemTime,
}

/// A change of a pool, written in one commit.
#[derive(Debug, Clone, Default)]
pub(crate) struct PoolChange {
    pub name: Option<PoolName>,
    /// With the limits of the owner, from the key that asked for the change.
    pub replicas: Option<(u32, KeyLimits)>,
    pub going: bool,
}

/// What a claim writes to the row of a waiting sandbox.
#[derive(Debug, Clone)]
pub(crate) struct ClaimRow {
    /// The new name; none to keep the current one.
    pub name: Option<SandboxName>,
    pub labels: Labels,
    pub notes: Notes,
    pub lifetime: Lifetime,
    pub network: NetworkPolicy,
    pub stamps: Stamps,
    pub identity: Arc<Identity>,
    pub claimed_from: String,
}

fn id(pool: PoolId) -> [u8; 16] {
    pool.bits().to_be_bytes()
}

/// Part of the change that inserts a sandbox: writes the pool where it waits.
pub(super) fn insert_member(db: &Connection, sandbox: SandboxId, pool: PoolId) -> rusqlite::Result<()> {
    db.prepare_cached("INSERT INTO pool_members (sandbox, pool) VALUES (?1, ?2)")?
        .execute(params![id_bytes(sandbox), id(pool)])?;
    Ok(())
}

impl Db {
    /// All pools.
    pub async fn load_pools(&self) -> Result<Vec<PoolRow>, EngineError> {
        self.question("read the pools' rows", |db| {
            db.prepare(
                "SELECT id, owner, name, template, replicas, sandboxes_max, cpu_millis_max, memory_bytes_max, going,
                        created_at, updated_at, disk_bytes_max
                 FROM pools",
            )?
            .query_map([], |row| {
                let template: Option<[u8; 16]> = row.get("template")?;
                Ok(PoolRow {
                    id: PoolId::from_bits(u128::from_be_bytes(row.get("id")?)),
                    owner: owner_from(row)?,
                    name: PoolName::kept(row.get_ref("name")?.as_str()?),
                    template: template.map(|bits| TemplateId::from_bits(u128::from_be_bytes(bits))),
                    replicas: row.get("replicas")?,
                    limits: KeyLimits {
                        sandboxes: row.get("sandboxes_max")?,
                        cpu_millis: optional_unsigned(row, "cpu_millis_max")?,
                        memory_bytes: optional_unsigned(row, "memory_bytes_max")?,
                        disk_bytes: optional_unsigned(row, "disk_bytes_max")?,
                        // The rest does not limit sandboxes.
                        ..KeyLimits::default()
                    },
                    going: row.get("going")?,
                    created_at: time(row, "created_at")?,
                    updated_at: time(row, "updated_at")?,
                })
            })?
            .collect()
        })
        .await
    }

    /// Inserts a pool. The caller has checked that the name is free; the table checks again.
    pub async fn insert_pool(&self, row: PoolRow) -> Result<(), EngineError> {
        self.change("write the pool's row", move |db| {
            db.prepare_cached(
                "INSERT INTO pools (id, owner, name, template, replicas, sandboxes_max, cpu_millis_max,
                     memory_bytes_max, going, created_at, updated_at, disk_bytes_max)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
            )?
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
                row.limits.disk_bytes.map(signed),
            ])?;
            Ok(())
        })
        .await
    }

    /// Writes all of a change, or nothing.
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
                    "UPDATE pools SET replicas = ?1, sandboxes_max = ?2, cpu_millis_max = ?3, memory_bytes_max = ?4,
                         disk_bytes_max = ?6
                     WHERE id = ?5",
                )?
                .execute(params![
                    replicas,
                    limits.sandboxes,
                    limits.cpu_millis.map(signed),
                    limits.memory_bytes.map(signed),
                    id(pool),
                    limits.disk_bytes.map(signed),
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

    /// Deletes a pool. Fails while a sandbox waits in it.
    pub async fn delete_pool(&self, pool: PoolId) -> Result<(), EngineError> {
        self.change("delete the pool's row", move |db| {
            db.prepare_cached("DELETE FROM pools WHERE id = ?1")?.execute(params![id(pool)])?;
            Ok(())
        })
        .await
    }

    /// Claims a waiting sandbox. `false` if the sandbox no longer waits or no longer runs.
    pub async fn claim_sandbox(&self, key: RowKey, claim: Arc<ClaimRow>) -> Result<bool, EngineError> {
        self.change("write the claim of the sandbox", move |db| {
            let sandbox = key.id;
            let identity = &claim.identity;
            let taken = db
                .prepare_cached(
                    "UPDATE sandboxes SET visibility = 'visible', name = coalesce(?1, name), env = ?2,
                         idempotency_key = ?3, request_digest = ?4, created_at = ?5
                     WHERE id = ?6 AND generation = ?7 AND visibility = 'pool_member' AND state = 'running'",
                )?
                .execute(params![
                    claim.name.as_ref().map(SandboxName::as_str),
                    json(&identity.env),
                    identity.idempotency_key,
                    identity.request_digest,
                    micros(identity.created_at),
                    id_bytes(sandbox),
                    key.generation,
                ])?;
            if taken != 1 {
                return Ok(false);
            }
            db.prepare_cached("UPDATE pool_members SET pool = NULL, claimed_from = ?1 WHERE sandbox = ?2")?
                .execute(params![claim.claimed_from, id_bytes(sandbox)])?;
            insert_labels(db, sandbox, &claim.labels)?;
            insert_notes(db, sandbox, &claim.notes)?;
            network::put_policy(db, sandbox, &claim.network)?;
            if !claim.lifetime.rules().is_empty() {
                insert_rules(db, sandbox, &claim.lifetime)?;
                put_stamps(db, sandbox, &claim.stamps)?;
            }
            Ok(true)
        })
        .await
    }
}
