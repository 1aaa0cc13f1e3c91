//! Rows of builds and their results. Logs of builds are files.

use std::time::SystemTime;

use rusqlite::{Row, params};
use wire::BuildId;

use super::Db;
use super::rows::{micros, owner_from, time, unreadable};
use crate::error::EngineError;
use crate::model::Owner;
use crate::model::progress::BuildState;

/// A build's row.
#[derive(Debug, Clone)]
pub(crate) struct BuildRow {
    pub id: BuildId,
    pub owner: Owner,
    pub template: String,
    pub state: BuildState,
    pub created_at: SystemTime,
    pub ended_at: Option<SystemTime>,
}

fn id(build: BuildId) -> [u8; 16] {
    build.bits().to_be_bytes()
}

fn words(state: &BuildState) -> (&'static str, Option<&str>, Option<u32>) {
    match state {
        BuildState::Running => ("running", None, None),
        BuildState::Done { version } => ("done", None, Some(*version)),
        BuildState::Failed { reason } => ("failed", Some(reason), None),
    }
}

fn build_from(row: &Row<'_>) -> rusqlite::Result<BuildRow> {
    let state = match row.get_ref("state")?.as_str()? {
        "running" => BuildState::Running,
        "done" => BuildState::Done { version: row.get::<_, Option<u32>>("version")?.unwrap_or_default() },
        "failed" => {
            BuildState::Failed { reason: row.get::<_, Option<String>>("reason")?.unwrap_or_default() }
        }
        _ => return Err(unreadable(row, "state", "state")),
    };
    let ended: Option<i64> = row.get("ended_at")?;
    Ok(BuildRow {
        id: BuildId::from_bits(u128::from_be_bytes(row.get("id")?)),
        owner: owner_from(row)?,
        template: row.get("template")?,
        state,
        created_at: time(row, "created_at")?,
        ended_at: ended.map(|_| time(row, "ended_at")).transpose()?,
    })
}

impl Db {
    /// All builds, the oldest first.
    pub async fn builds(&self) -> Result<Vec<BuildRow>, EngineError> {
        self.question("read the builds' rows", |db| {
            db.prepare("SELECT id, owner, template, state, reason, version, created_at, ended_at FROM builds ORDER BY created_at, id")?
                .query_map([], build_from)?
                .collect()
        })
        .await
    }

    /// Inserts a build, or replaces its row.
    pub async fn put_build(&self, row: BuildRow) -> Result<(), EngineError> {
        self.change("write the build's row", move |db| {
            let (state, reason, version) = words(&row.state);
            db.prepare_cached(
                "INSERT OR REPLACE INTO builds (id, owner, template, state, reason, version, created_at,
                     ended_at)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
            )?
            .execute(params![
                id(row.id),
                row.owner.as_str(),
                row.template,
                state,
                reason,
                version,
                micros(row.created_at),
                row.ended_at.map(micros)
            ])?;
            Ok(())
        })
        .await
    }

    /// Deletes a build.
    pub async fn delete_build(&self, build: BuildId) -> Result<(), EngineError> {
        self.change("delete the build's row", move |db| {
            db.prepare_cached("DELETE FROM builds WHERE id = ?1")?.execute(params![id(build)])?;
            Ok(())
        })
        .await
    }

    /// Deletes the image names that builds gave to their intermediate images: all names with `prefix`.
    pub async fn remove_build_names(&self, prefix: String) -> Result<(), EngineError> {
        self.change("remove a build's names", move |db| {
            db.prepare_cached("DELETE FROM image_names WHERE substr(name, 1, length(?1)) = ?1")?
                .execute(params![prefix])?;
            Ok(())
        })
        .await
    }
}
