//! Rows of links to ports.

use std::time::SystemTime;

use rusqlite::{Row, params};
use wire::{LinkId, SandboxId};

use super::Db;
use super::rows::{id_bytes, micros, owner_from, sandbox_id, time, unreadable};
use crate::error::EngineError;
use crate::model::port::{Link, Port};

impl Db {
    /// All links that have not expired.
    pub async fn load_links(&self, now: SystemTime) -> Result<Vec<Link>, EngineError> {
        self.question("read the links", move |db| {
            db.prepare(
                "SELECT id, sandbox, owner, port, key, label, methods, public, created_at, expires_at FROM port_links
                 WHERE expires_at > ?1",
            )?
            .query_map(params![micros(now)], link_from)?
            .collect()
        })
        .await
    }

    /// Inserts a link.
    pub async fn insert_link(&self, link: Link) -> Result<(), EngineError> {
        self.change("write the link's row", move |db| {
            db.prepare_cached(
                "INSERT INTO port_links (id, sandbox, owner, port, key, label, methods, public, created_at, expires_at)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
            )?
            .execute(params![
                link.id.bits().to_be_bytes(),
                id_bytes(link.sandbox),
                link.owner.as_str(),
                link.port.number(),
                link.key,
                link.label,
                link.methods.join(" "),
                link.public,
                micros(link.created_at),
                micros(link.expires_at),
            ])?;
            Ok(())
        })
        .await
    }

    /// Deletes a link.
    pub async fn delete_link(&self, link: LinkId) -> Result<(), EngineError> {
        self.change("delete the link's row", move |db| {
            db.prepare_cached("DELETE FROM port_links WHERE id = ?1")?
                .execute([link.bits().to_be_bytes()])?;
            Ok(())
        })
        .await
    }

    /// Deletes all links that have expired, and returns which.
    pub async fn delete_expired_links(&self, now: SystemTime) -> Result<Vec<LinkId>, EngineError> {
        self.change("delete rows of links that have expired", move |db| {
            db.prepare_cached("DELETE FROM port_links WHERE expires_at <= ?1 RETURNING id")?
                .query_map(params![micros(now)], link_id)?
                .collect()
        })
        .await
    }
}

fn link_id(row: &Row<'_>) -> rusqlite::Result<LinkId> {
    Ok(LinkId::from_bits(u128::from_be_bytes(row.get("id")?)))
}

fn link_from(row: &Row<'_>) -> rusqlite::Result<Link> {
    let sandbox: SandboxId = sandbox_id(row, "sandbox")?;
    let methods: String = row.get("methods")?;
    Ok(Link {
        id: link_id(row)?,
        sandbox,
        owner: owner_from(row)?,
        port: Port::new(row.get("port")?).map_err(|_| unreadable(row, "port", "port"))?,
        key: row.get("key")?,
        label: row.get("label")?,
        methods: methods.split_whitespace().map(str::to_owned).collect(),
        public: row.get("public")?,
        created_at: time(row, "created_at")?,
        expires_at: time(row, "expires_at")?,
    })
}
