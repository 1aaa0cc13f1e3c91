//! Rows of sandboxes, and what a starting daemon reads of them.
//!
//! Labels, notes, lifetime rules and times are in `life`; mounts, pools, images and templates in the files of those nouns.

use std::collections::BTreeMap;
use std::time::SystemTime;

use rusqlite::{Connection, Row, params};
use wire::launch::Limits;
use wire::{PoolId, SandboxId, TemplateId};

use super::Db;
use super::commands::{CommandRow, Tally};
use super::life::{
    SandboxChange, Stamps, add_life, insert_labels, insert_notes, insert_rules, put_stamp, put_stamps,
    put_use,
};
use super::rows::{
    DigestBytes, from_json, id_bytes, json, micros, optional_unsigned, owner_from, sandbox_id, signed, time,
    unreadable, unsigned,
};
use super::volumes::MountRow;
use super::{commands, images, pools, templates, volumes};
use crate::error::{DbError, EngineError};
use crate::model::dialect_notes::Notes;
use crate::model::labels::Labels;
use crate::model::lifetime::{Lifetime, Since};
use crate::model::state::{Disk, Goal, Kept, State};
use crate::model::{Owner, SandboxName};
use crate::observe::clock::{Moment, Stamp};

/// A sandbox's row.
#[derive(Debug, Clone)]
pub(crate) struct SandboxRow {
    pub id: SandboxId,
    pub owner: Owner,
    pub name: SandboxName,
    /// The name that its template had when the sandbox was created.
    pub template: String,
    /// The version of the template; none for the built-in template.
    pub template_version: Option<(TemplateId, u32)>,
    /// `host`, or an image reference in canonical form.
    pub image: String,
    /// The alias that the caller used for the image, if it was one.
    pub image_alias: Option<String>,
    /// The image that the template holds, if it holds one. Not a column: `sandbox_images` has the image in use.
    pub image_held: Option<image::Digest>,
    pub limits: Limits,
    pub mounts: Vec<MountRow>,
    pub env: BTreeMap<String, String>,
    pub state: State,
    pub goal: Goal,
    pub reason: Option<String>,
    pub idempotency_key: Option<String>,
    pub request_digest: DigestBytes,
    pub oom_kills: u64,
    pub created_at: SystemTime,
    pub labels: Labels,
    pub notes: Notes,
    pub lifetime: Lifetime,
    pub stamps: Stamps,
    /// The pool in which it waits to be claimed.
    pub pool: Option<PoolId>,
    /// The name of the pool that it was claimed from.
    pub claimed_from: Option<String>,
}

/// What the request brought that created the sandbox, or claimed it from a pool.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    pub env: BTreeMap<String, String>,
    pub created_at: SystemTime,
    pub idempotency_key: Option<String>,
    pub request_digest: [u8; 32],
}

/// What a starting daemon reads about sandboxes and commands.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub sandboxes: Vec<SandboxRow>,
    /// Commands without a result.
    pub commands: Vec<CommandRow>,
    /// Totals for each sandbox that has commands.
    pub tallies: Vec<(SandboxId, Tally)>,
}

impl Db {
    /// All sandboxes, the commands without a result, and totals of all commands.
    pub async fn load(&self, now: Moment) -> Result<Loaded, EngineError> {
        self.question("read the rows", move |db| {
            let mut sandboxes = db
                .prepare(&format!("SELECT {SANDBOX_COLUMNS} FROM sandboxes"))?
                .query_map([], |row| sandbox_from(row, now))?
                .collect::<Result<Vec<_>, _>>()?;
            add_life(db, &mut sandboxes)?;
            volumes::add_mounts(db, &mut sandboxes)?;
            pools::add_pools(db, &mut sandboxes)?;
            let (commands, tallies) = (commands::unfinished(db)?, commands::tallies(db)?);
            Ok(Loaded { sandboxes, commands, tallies })
        })
        .await
    }

    /// Inserts a sandbox. The caller has checked that name and idempotency key are free; the table checks again.
    /// Returns the image that it uses, if the image is on this machine. From then on the image stays until the sandbox goes.
    pub async fn insert_sandbox(&self, row: SandboxRow) -> Result<Option<image::Digest>, EngineError> {
        self.change("write the sandbox's row", move |db| {
            let (state, detail) = state_words(row.state);
            db.prepare_cached(
                "INSERT INTO sandboxes (id, owner, name, template, image, cpu_millis, memory_bytes, pids, env, state,
                     detail, goal, reason, idempotency_key, request_digest, oom_kills, created_at, disk_bytes)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18)",
            )?
            .execute(params![
                id_bytes(row.id),
                row.owner.as_str(),
                row.name.as_str(),
                row.template,
                row.image,
                row.limits.cpu_millis,
                signed(row.limits.memory_bytes),
                row.limits.pids,
                json(&row.env),
                state,
                detail,
                goal_word(row.goal),
                row.reason,
                row.idempotency_key,
                row.request_digest,
                signed(row.oom_kills),
                micros(row.created_at),
                row.limits.disk_bytes.map(signed),
            ])?;
            volumes::insert_mounts(db, row.id, &row.mounts)?;
            insert_labels(db, row.id, &row.labels)?;
            insert_notes(db, row.id, &row.notes)?;
            if !row.lifetime.rules().is_empty() {
                insert_rules(db, row.id, &row.lifetime)?;
                put_stamps(db, row.id, &row.stamps)?;
            }
            if let Some((template, version)) = row.template_version {
                templates::insert_template_use(db, row.id, template, version)?;
            }
            if let Some(pool) = row.pool {
                pools::insert_member(db, row.id, pool)?;
            }
            let (owner, alias) = (row.owner.as_str(), row.image_alias.as_deref());
            images::insert_use(db, row.id, owner, &row.image, alias, row.image_held)
        })
        .await
    }

    /// Changes the state, with its goal. `false` if the row was not in state `from`.
    pub async fn change_state(
        &self,
        id: SandboxId,
        from: State,
        to: State,
        goal: Goal,
        reason: Option<String>,
    ) -> Result<bool, EngineError> {
        self.change("write the sandbox's state", move |db| {
            let ((from, from_detail), (to, to_detail)) = (state_words(from), state_words(to));
            let changed = db
                .prepare_cached(
                    "UPDATE sandboxes SET state = ?1, detail = ?2, goal = ?3, reason = ?4
                     WHERE id = ?5 AND state = ?6 AND detail = ?7",
                )?
                .execute(params![to, to_detail, goal_word(goal), reason, id_bytes(id), from, from_detail])?;
            Ok(changed == 1)
        })
        .await
    }

    /// Writes all of a change, or nothing. `false` if the sandbox is being deleted, or gone.
    pub async fn change_sandbox(&self, id: SandboxId, change: SandboxChange) -> Result<bool, EngineError> {
        self.change("write the sandbox's changes", move |db| {
            let lives = db
                .prepare_cached("SELECT 1 FROM sandboxes WHERE id = ?1 AND state != 'deleting'")?
                .exists(params![id_bytes(id)])?;
            if !lives {
                return Ok(false);
            }
            if let Some(name) = &change.name {
                db.prepare_cached("UPDATE sandboxes SET name = ?1 WHERE id = ?2")?
                    .execute(params![name.as_str(), id_bytes(id)])?;
            }
            if let Some(labels) = &change.labels {
                db.prepare_cached("DELETE FROM labels WHERE sandbox = ?1")?.execute(params![id_bytes(id)])?;
                insert_labels(db, id, labels)?;
            }
            if let Some(notes) = &change.notes {
                db.prepare_cached("DELETE FROM notes WHERE sandbox = ?1")?.execute(params![id_bytes(id)])?;
                insert_notes(db, id, notes)?;
            }
            if let Some(lifetime) = &change.lifetime {
                db.prepare_cached("DELETE FROM rules WHERE sandbox = ?1")?.execute(params![id_bytes(id)])?;
                insert_rules(db, id, lifetime)?;
            }
            if let Some(stamps) = &change.stamps {
                put_stamps(db, id, stamps)?;
            }
            Ok(true)
        })
        .await
    }

    /// Writes when a sandbox was last used and when it started. No caller waits, so it joins the next commit.
    pub fn note_use(
        &self,
        id: SandboxId,
        stamps: Stamps,
        done: impl FnOnce(Result<(), DbError>) + Send + 'static,
    ) {
        let change = move |db: &Connection| {
            put_use(db, id, &stamps)?;
            match stamps.started {
                Some(started) => put_stamp(db, id, Since::Start, &started),
                None => Ok(()),
            }
        };
        self.submit(change, done);
    }

    /// Deletes the row of a sandbox that is gone from the host, and those of its commands. `false` if its state is not
    /// `deleting`.
    pub async fn delete_sandbox(&self, id: SandboxId) -> Result<bool, EngineError> {
        self.change("delete the sandbox's row", move |db| {
            let changed = db
                .prepare_cached("DELETE FROM sandboxes WHERE id = ?1 AND state = 'deleting'")?
                .execute(params![id_bytes(id)])?;
            Ok(changed == 1)
        })
        .await
    }
}

const SANDBOX_COLUMNS: &str =
    "id, owner, name, template, image, cpu_millis, memory_bytes, pids, env, state, detail,
    goal, reason, idempotency_key, request_digest, oom_kills, created_at, disk_bytes";

/// Reads a sandbox without what other tables hold about it.
fn sandbox_from(row: &Row<'_>, now: Moment) -> rusqlite::Result<SandboxRow> {
    let created_at = time(row, "created_at")?;
    let disk_bytes = optional_unsigned(row, "disk_bytes")?;
    let limits = Limits {
        cpu_millis: row.get("cpu_millis")?,
        memory_bytes: unsigned(row, "memory_bytes")?,
        pids: row.get("pids")?,
        disk_bytes,
    };
    let (state, detail, goal): (String, String, String) =
        (row.get("state")?, row.get("detail")?, row.get("goal")?);
    let kept = match detail.as_str() {
        "saved" => Kept::Saved,
        "dropped" => Kept::Dropped,
        _ => Kept::Frozen,
    };
    let state = match (state.as_str(), detail.as_str()) {
        ("creating", _) => State::Creating,
        ("running", _) => State::Running,
        ("paused", _) => State::Paused(kept),
        ("deleting", _) => State::Deleting,
        ("failed", "whole") => State::Failed { disk: Disk::Whole },
        ("failed", _) => State::Failed { disk: Disk::Lost },
        _ => return Err(unreadable(row, "state", "state")),
    };
    let goal = match goal.as_str() {
        "running" => Goal::Running,
        "paused" => Goal::Paused(kept),
        "gone" => Goal::Gone,
        _ => return Err(unreadable(row, "goal", "goal")),
    };
    Ok(SandboxRow {
        id: sandbox_id(row, "id")?,
        owner: owner_from(row)?,
        name: SandboxName::kept(row.get_ref("name")?.as_str()?),
        template: row.get("template")?,
        // `load_templates` and `load_images` read which template and image a sandbox uses.
        template_version: None,
        image: row.get("image")?,
        image_alias: None,
        image_held: None,
        limits,
        mounts: Vec::new(),
        env: from_json(row, "env")?,
        state,
        goal,
        reason: row.get("reason")?,
        idempotency_key: row.get("idempotency_key")?,
        request_digest: row.get("request_digest")?,
        oom_kills: unsigned(row, "oom_kills")?,
        created_at,
        labels: Labels::default(),
        notes: Notes::default(),
        lifetime: Lifetime::default(),
        stamps: Stamps::born(Stamp::of_wall(created_at, now)),
        pool: None,
        claimed_from: None,
    })
}

fn state_words(state: State) -> (&'static str, &'static str) {
    let detail = match state {
        State::Creating | State::Running | State::Deleting => "",
        State::Paused(Kept::Frozen) => "frozen",
        State::Paused(Kept::Saved) => "saved",
        State::Paused(Kept::Dropped) => "dropped",
        State::Failed { disk: Disk::Whole } => "whole",
        State::Failed { disk: Disk::Lost } => "lost",
    };
    (state.word(), detail)
}

fn goal_word(goal: Goal) -> &'static str {
    match goal {
        Goal::Running => "running",
        Goal::Paused(_) => "paused",
        Goal::Gone => "gone",
    }
}
