//! Rows of secrets and of the ledger.

use std::time::{Duration, UNIX_EPOCH};

use egress::control::Used;
use egress::policy::Name;
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::Db;
use super::rows::{
    from_json, id_bytes, json, micros, owner_from, sandbox_id, signed, time, unreadable, unsigned,
};
use crate::credential::ledger::{BEGINNING, LINES_MAX, hash};
use crate::credential::{ENVIRONMENT, FILE, SecretRow, VALUE};
use crate::error::EngineError;
use crate::model::Owner;
use crate::model::secret::{LedgerCheck, LedgerLine};

/// How many lines are read at once while the chain is checked.
const CHECKED_AT_ONCE: i64 = 1000;

impl Db {
    /// All secrets.
    pub async fn load_credentials(&self) -> Result<Vec<SecretRow>, EngineError> {
        self.question("read the secrets", |db| {
            db.prepare("SELECT * FROM credentials")?.query_map([], secret_from)?.collect()
        })
        .await
    }

    /// Writes a secret. One with the same name is replaced.
    pub async fn put_credential(&self, row: SecretRow) -> Result<(), EngineError> {
        self.change("write the secret's row", move |db| {
            db.prepare_cached(
                "INSERT OR REPLACE INTO credentials (id, owner, name, source, origin, sealed, key, rules, cache_seconds,
                     version, created_at, updated_at)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
            )?
            .execute(params![
                row.id.to_be_bytes(),
                row.owner.as_str(),
                row.name,
                row.source,
                row.origin,
                row.sealed,
                row.key,
                json(&row.bindings),
                signed(row.cache_seconds),
                row.version,
                micros(row.created_at),
                micros(row.updated_at),
            ])?;
            Ok(())
        })
        .await
    }

    /// Deletes a secret. `false` if there was none.
    pub async fn delete_credential(&self, owner: Owner, name: String) -> Result<bool, EngineError> {
        self.vital("delete the secret's row", move |db| {
            let deleted = db
                .prepare_cached("DELETE FROM credentials WHERE owner = ?1 AND name = ?2")?
                .execute(params![owner.as_str(), name])?;
            Ok(deleted == 1)
        })
        .await
    }

    /// Lines of an owner's ledger, oldest first: the first ones after a number, or the newest.
    pub async fn ledger(
        &self,
        owner: Owner,
        after: Option<u64>,
        limit: usize,
    ) -> Result<Vec<LedgerLine>, EngineError> {
        self.question("read the ledger", move |db| {
            let order = if after.is_some() { "ASC" } else { "DESC" };
            let mut lines = db
                .prepare_cached(&format!(
                    "SELECT * FROM ledger WHERE owner = ?1 AND number > ?2 ORDER BY number {order} LIMIT ?3"
                ))?
                .query_map(
                    params![owner.as_str(), signed(after.unwrap_or(0)), signed(limit as u64)],
                    |row| {
                        let (number, used, hash) = line_from(row)?;
                        Ok(LedgerLine {
                            number,
                            at: UNIX_EPOCH + Duration::from_millis(used.at_ms),
                            sandbox: used.sandbox,
                            secret: used.secret_name,
                            host: used.host.to_string(),
                            port: used.port,
                            method: used.method,
                            path: used.path,
                            status: Some(used.status).filter(|status| *status > 0),
                            sent: used.sent,
                            received: used.received,
                            hash,
                        })
                    },
                )?
                .collect::<Result<Vec<_>, _>>()?;
            if after.is_none() {
                lines.reverse();
            }
            Ok(lines)
        })
        .await
    }

    /// Recomputes every hash of the ledger.
    pub async fn verify_ledger(&self) -> Result<LedgerCheck, EngineError> {
        self.question("check the ledger", move |db| {
            let Some(ends) = ends(db)? else {
                let first =
                    db.query_row("SELECT min(number) FROM ledger", [], |row| row.get::<_, Option<i64>>(0))?;
                return Ok(LedgerCheck { lines: 0, broken_at: first.map(|number| number as u64) });
            };
            let (mut number, mut before, mut lines) = (ends.first_number, ends.first_hash, 0);
            loop {
                let batch = db
                    .prepare_cached("SELECT * FROM ledger WHERE number >= ?1 ORDER BY number LIMIT ?2")?
                    .query_map(params![signed(number), CHECKED_AT_ONCE], |row| {
                        Ok((line_from(row)?, row.get::<_, String>("owner")?))
                    })?
                    .collect::<Result<Vec<_>, _>>()?;
                if batch.is_empty() {
                    break;
                }
                for ((found, used, kept), owner) in batch {
                    if found != number || hash(&before, number, &owner, &used) != kept {
                        return Ok(LedgerCheck { lines, broken_at: Some(number) });
                    }
                    (number, before, lines) = (number + 1, kept, lines + 1);
                }
            }
            let whole = (number, before) == (ends.last_number + 1, ends.last_hash);
            Ok(LedgerCheck { lines, broken_at: (!whole).then_some(number) })
        })
        .await
    }
}

struct Ends {
    first_number: u64,
    first_hash: [u8; 32],
    last_number: u64,
    last_hash: [u8; 32],
}

fn ends(db: &Connection) -> rusqlite::Result<Option<Ends>> {
    db.prepare_cached("SELECT * FROM ledger_ends")?
        .query_row([], |row| {
            Ok(Ends {
                first_number: unsigned(row, "first_number")?,
                first_hash: row.get("first_hash")?,
                last_number: unsigned(row, "last_number")?,
                last_hash: row.get("last_hash")?,
            })
        })
        .optional()
}

/// Adds a line to the ledger, once, and drops the oldest beyond the limit. A sandbox that is gone keeps its lines: the owner
/// comes from the secret then, and a line of which neither exists has no owner.
pub(super) fn put_used(db: &Connection, used: &Used) -> rusqlite::Result<()> {
    let known = db
        .prepare_cached("SELECT 1 FROM ledger WHERE record = ?1")?
        .exists(params![used.id.to_be_bytes()])?;
    if known {
        return Ok(());
    }
    let owner: Option<String> = db
        .prepare_cached(
            "SELECT owner FROM sandboxes WHERE id = ?1 UNION ALL SELECT owner FROM credentials WHERE id = ?2 LIMIT 1",
        )?
        .query_row(params![id_bytes(used.sandbox), used.secret.to_be_bytes()], |row| row.get(0))
        .optional()?;
    let owner = owner.unwrap_or_default();
    let now = ends(db)?.unwrap_or(Ends {
        first_number: 1,
        first_hash: BEGINNING,
        last_number: 0,
        last_hash: BEGINNING,
    });
    let number = now.last_number + 1;
    let line = hash(&now.last_hash, number, &owner, used);
    db.prepare_cached(
        "INSERT INTO ledger (number, record, at_ms, owner, sandbox, secret, secret_name, host, port, method, path, status,
             sent, received, hash)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15)",
    )?
    .execute(params![
        signed(number),
        used.id.to_be_bytes(),
        signed(used.at_ms),
        owner,
        id_bytes(used.sandbox),
        used.secret.to_be_bytes(),
        used.secret_name,
        used.host.as_str(),
        used.port,
        used.method,
        used.path,
        used.status,
        signed(used.sent),
        signed(used.received),
        line,
    ])?;
    let (mut first_number, mut first_hash) = (now.first_number, now.first_hash);
    if number - first_number >= LINES_MAX {
        first_hash = db
            .prepare_cached("SELECT hash FROM ledger WHERE number = ?1")?
            .query_row(params![signed(first_number)], |row| row.get("hash"))?;
        db.prepare_cached("DELETE FROM ledger WHERE number = ?1")?.execute(params![signed(first_number)])?;
        first_number += 1;
    }
    db.prepare_cached(
        "INSERT OR REPLACE INTO ledger_ends (id, first_number, first_hash, last_number, last_hash)
         VALUES (1, ?1, ?2, ?3, ?4)",
    )?
    .execute(params![signed(first_number), first_hash, signed(number), line])?;
    Ok(())
}

fn line_from(row: &Row<'_>) -> rusqlite::Result<(u64, Used, [u8; 32])> {
    let host: String = row.get("host")?;
    let used = Used {
        id: u128::from_be_bytes(row.get("record")?),
        sandbox: sandbox_id(row, "sandbox")?,
        at_ms: unsigned(row, "at_ms")?,
        secret: u128::from_be_bytes(row.get("secret")?),
        secret_name: row.get("secret_name")?,
        // A changed line may hold anything; its hash does not match then.
        host: Name::from_wire(&host)
            .or_else(|_| Name::from_wire("changed.invalid"))
            .map_err(|_| unreadable(row, "host", "host"))?,
        port: row.get("port")?,
        method: row.get("method")?,
        path: row.get("path")?,
        status: row.get("status")?,
        sent: unsigned(row, "sent")?,
        received: unsigned(row, "received")?,
    };
    Ok((unsigned(row, "number")?, used, row.get("hash")?))
}

fn secret_from(row: &Row<'_>) -> rusqlite::Result<SecretRow> {
    let source: String = row.get("source")?;
    let source = [VALUE, FILE, ENVIRONMENT].into_iter().find(|known| *known == source);
    Ok(SecretRow {
        id: u128::from_be_bytes(row.get("id")?),
        owner: owner_from(row)?,
        name: row.get("name")?,
        source: source.ok_or_else(|| unreadable(row, "source", "source of a secret"))?,
        origin: row.get("origin")?,
        sealed: row.get("sealed")?,
        key: row.get("key")?,
        bindings: from_json(row, "rules")?,
        cache_seconds: unsigned(row, "cache_seconds")?,
        version: row.get("version")?,
        created_at: time(row, "created_at")?,
        updated_at: time(row, "updated_at")?,
    })
}
