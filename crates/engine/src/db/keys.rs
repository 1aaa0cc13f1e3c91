//! Rows of API keys, and the secrets of this installation.

use rusqlite::{Row, params};

use super::Db;
use super::rows::{micros, optional_unsigned, owner_from, signed, time};
use crate::access::keys::{BOOTSTRAP_ID, KeyHash};
use crate::error::EngineError;
use crate::model::{Key, KeyLimits};

impl Db {
    /// All keys, with the hashes of their secrets.
    pub async fn keys(&self) -> Result<Vec<(Key, KeyHash)>, EngineError> {
        self.question("read the keys", |db| {
            db.prepare(
                "SELECT id, hash, owner, admin, sandboxes_max, cpu_millis_max, memory_bytes_max, created_at, metrics_only,
                     disk_bytes_max, volume_bytes_max, output_bytes_max, snapshots_max, builds_max, connections_max
                 FROM keys
                 ORDER BY created_at, id",
            )?
            .query_map([], key_from)?
            .collect()
        })
        .await
    }

    /// Inserts a key. The bootstrap key replaces an earlier one. `false` if the id is taken.
    pub async fn put_key(&self, key: Key, hash: KeyHash) -> Result<bool, EngineError> {
        self.change("write the key", move |db| {
            let verb = if key.id == BOOTSTRAP_ID { "REPLACE" } else { "IGNORE" };
            let changed = db.execute(
                &format!(
                    "INSERT OR {verb} INTO keys (id, hash, owner, admin, sandboxes_max, cpu_millis_max,
                         memory_bytes_max, created_at, metrics_only, disk_bytes_max, volume_bytes_max, output_bytes_max,
                         snapshots_max, builds_max, connections_max)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15)",
                ),
                params![
                    key.id,
                    hash.0,
                    key.owner.as_str(),
                    key.admin,
                    key.limits.sandboxes,
                    key.limits.cpu_millis.map(signed),
                    key.limits.memory_bytes.map(signed),
                    micros(key.created_at),
                    key.metrics_only,
                    key.limits.disk_bytes.map(signed),
                    key.limits.volume_bytes.map(signed),
                    key.limits.output_bytes.map(signed),
                    key.limits.snapshots,
                    key.limits.builds,
                    key.limits.connections,
                ],
            )?;
            Ok(changed == 1)
        })
        .await
    }

    /// Deletes a key. `false` if there was none.
    pub async fn delete_key(&self, id: String) -> Result<bool, EngineError> {
        self.vital("delete the key", move |db| {
            Ok(db.execute("DELETE FROM keys WHERE id = ?1", params![id])? == 1)
        })
        .await
    }

    /// The secret of this installation with this name. Stores `fresh` if there is none yet.
    pub async fn secret(&self, name: &'static str, fresh: [u8; 32]) -> Result<[u8; 32], EngineError> {
        self.change("read a secret", move |db| {
            db.prepare_cached("INSERT OR IGNORE INTO secrets (name, bytes) VALUES (?1, ?2)")?
                .execute(params![name, fresh])?;
            db.prepare_cached("SELECT bytes FROM secrets WHERE name = ?1")?
                .query_row([name], |row| row.get("bytes"))
        })
        .await
    }
}

fn key_from(row: &Row<'_>) -> rusqlite::Result<(Key, KeyHash)> {
    let limits = KeyLimits {
        sandboxes: row.get("sandboxes_max")?,
        cpu_millis: optional_unsigned(row, "cpu_millis_max")?,
        memory_bytes: optional_unsigned(row, "memory_bytes_max")?,
        disk_bytes: optional_unsigned(row, "disk_bytes_max")?,
        volume_bytes: optional_unsigned(row, "volume_bytes_max")?,
        output_bytes: optional_unsigned(row, "output_bytes_max")?,
        snapshots: row.get("snapshots_max")?,
        builds: row.get("builds_max")?,
        connections: row.get("connections_max")?,
    };
    let key = Key {
        id: row.get("id")?,
        owner: owner_from(row)?,
        admin: row.get("admin")?,
        limits,
        created_at: time(row, "created_at")?,
        metrics_only: row.get("metrics_only")?,
    };
    Ok((key, KeyHash(row.get("hash")?)))
}
