//! Rows of sandboxes, and what a starting daemon reads of them.
//!
//! Labels, notes, lifetime rules and times are in `life`; mounts, pools, images and templates in the files of those nouns.

use std::collections::BTreeMap;
use std::time::SystemTime;

use rusqlite::{Connection, Row, params};
use wire::launch::{Limits, Over};
use wire::{BuildId, PoolId, SandboxId, TemplateId};

use super::Db;
use super::commands::{CommandRow, Tally};
use super::life::{
    SandboxChange, Stamps, add_life, insert_labels, insert_notes, insert_rules, put_stamps, put_use,
};
use super::lineage::{self, Descent, Holder};
use super::rows::{
    DigestBytes, from_json, id_bytes, json, micros, optional_unsigned, owner_from, sandbox_id, signed, time,
    unreadable, unsigned,
};
use super::volumes::MountRow;
use super::{HookRows, commands, hooks, images, network, pools, templates, volumes};
use crate::error::{DbError, EngineError};
use crate::model::dialect_notes::Notes;
use crate::model::labels::Labels;
use crate::model::lifetime::Lifetime;
use crate::model::network::NetworkPolicy;
use crate::model::state::{Disk, Goal, Kept, State};
use crate::model::{Owner, SandboxName};
use crate::observe::clock::{Moment, Stamp};

/// A sandbox's row.
#[derive(Debug, Clone)]
pub(crate) struct SandboxRow {
    pub id: SandboxId,
    /// The sandbox's id on the host.
    pub incarnation: SandboxId,
    /// The daemon that owns the row.
    pub worker: String,
    pub generation: u32,
    pub visibility: Visibility,
    pub owner: Owner,
    pub name: SandboxName,
    /// The name that its template had when the sandbox was created.
    pub template: String,
    /// The version of the template; none for the built-in template.
    pub template_version: Option<(TemplateId, u32)>,
    /// `host`, or an image reference in canonical form.
    pub image: String,
    /// The alias that the caller used for the image, if any.
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
    pub network: NetworkPolicy,
    pub stamps: Stamps,
    /// The name of the pool that it was claimed from.
    pub claimed_from: Option<String>,
    /// The snapshots that it lies over.
    pub over: Over,
    /// Where a new sandbox comes from. Not read back: `lineage` has it.
    pub descent: Option<Descent>,
    /// How many snapshots of its history are kept; 0 for none.
    pub history: u32,
    pub hooks: HookRows,
}

/// The owner of rows in an installation that has one daemon.
pub(crate) const LOCAL: &str = "local";
/// The generation of a row that never changed its owner.
pub(crate) const GENERATION_FIRST: u32 = 1;

/// Identifies a row in a change. Once another daemon has taken the row over, the change finds no row, because a
/// takeover raises the generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowKey {
    pub id: SandboxId,
    pub generation: u32,
}

/// Who may find a sandbox. For everyone else the sandbox does not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Visibility {
    /// Its owner.
    Visible,
    /// Only the pool where the sandbox waits to be claimed.
    PoolMember(PoolId),
    /// Only the build whose step runs in the sandbox.
    Build(BuildId),
}

impl Visibility {
    fn word(self) -> &'static str {
        match self {
            Self::Visible => "visible",
            Self::PoolMember(_) => "pool_member",
            Self::Build(_) => "build",
        }
    }

    fn build(self) -> Option<[u8; 16]> {
        match self {
            Self::Build(build) => Some(build.bits().to_be_bytes()),
            Self::Visible | Self::PoolMember(_) => None,
        }
    }
}

impl SandboxRow {
    pub fn key(&self) -> RowKey {
        RowKey { id: self.id, generation: self.generation }
    }
}

/// The parts of a row that come from the request that created the sandbox, or claimed it from a pool.
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
    /// All sandboxes of this daemon, the commands without a result, and totals of all commands.
    pub async fn load(&self, now: Moment) -> Result<Loaded, EngineError> {
        self.question("read the rows", move |db| {
            let mut sandboxes = db
                .prepare(&format!(
                    "SELECT {SANDBOX_COLUMNS} FROM sandboxes LEFT JOIN pool_members ON sandbox = id WHERE worker = ?1"
                ))?
                .query_map(params![LOCAL], |row| sandbox_from(row, now))?
                .collect::<Result<Vec<_>, _>>()?;
            add_life(db, &mut sandboxes)?;
            volumes::add_mounts(db, &mut sandboxes)?;
            let mut policies = network::policies(db)?;
            for sandbox in &mut sandboxes {
                sandbox.network = policies.remove(&sandbox.id).unwrap_or_default();
            }
            lineage::add_layers(db, &mut sandboxes)?;
            hooks::add_hooks(db, &mut sandboxes)?;
            let (commands, tallies) = (commands::unfinished(db)?, commands::tallies(db)?);
            Ok(Loaded { sandboxes, commands, tallies })
        })
        .await
    }

    /// Inserts a sandbox. The caller has checked that name and idempotency key are free; the table checks again.
    /// Returns the image that the sandbox uses, if the image is on this machine. From then on the image stays until
    /// the sandbox is deleted.
    pub async fn insert_sandbox(&self, row: SandboxRow) -> Result<Option<image::Digest>, EngineError> {
        let doing = "write the sandbox's row";
        self.check_room().map_err(|source| EngineError::Store { doing, source })?;
        self.change(doing, move |db| {
            let ((state, detail), (goal, kept)) = (state_words(row.state), goal_words(row.goal));
            db.prepare_cached(
                "INSERT INTO sandboxes (id, owner, name, template, image, cpu_millis, memory_bytes, pids, env, state,
                     detail, goal, goal_kept, reason, idempotency_key, request_digest, oom_kills, created_at,
                     disk_bytes, visibility, build, worker, generation, incarnation)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20,
                     ?21, ?22, ?23, ?24)",
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
                goal,
                kept,
                row.reason,
                row.idempotency_key,
                row.request_digest,
                signed(row.oom_kills),
                micros(row.created_at),
                row.limits.disk_bytes.map(signed),
                row.visibility.word(),
                row.visibility.build(),
                row.worker,
                row.generation,
                id_bytes(row.incarnation),
            ])?;
            volumes::insert_mounts(db, row.id, &row.mounts)?;
            insert_labels(db, row.id, &row.labels)?;
            insert_notes(db, row.id, &row.notes)?;
            if !row.network.is_none() || row.network.family_given().is_some() {
                network::put_policy(db, row.id, &row.network)?;
            }
            if !row.lifetime.rules().is_empty() {
                insert_rules(db, row.id, &row.lifetime)?;
                put_stamps(db, row.id, &row.stamps)?;
            }
            if !row.over.is_empty() {
                lineage::put_layers(db, Holder::Sandbox, id_bytes(row.id), &row.over)?;
            }
            if let Some(descent) = row.descent {
                lineage::insert_descent(db, &row, descent)?;
                network::copy_names(db, descent.parent, row.id)?;
            }
            if row.history > 0 {
                lineage::put_history(db, row.id, row.history)?;
            }
            if !row.hooks.hooks.is_empty() {
                hooks::put_hooks(db, row.id, &row.hooks.hooks, row.hooks.due)?;
            }
            if let Some((template, version)) = row.template_version {
                templates::insert_template_use(db, row.id, template, version)?;
            }
            match row.visibility {
                Visibility::PoolMember(pool) => pools::insert_member(db, row.id, pool)?,
                Visibility::Visible | Visibility::Build(_) => {}
            }
            let (owner, alias) = (row.owner.as_str(), row.image_alias.as_deref());
            images::insert_use(db, row.id, owner, &row.image, alias, row.image_held)
        })
        .await
    }

    /// Changes the state and the goal of a row that is in state `from`.
    pub async fn change_state(
        &self,
        key: RowKey,
        from: State,
        to: State,
        goal: Goal,
        reason: Option<String>,
    ) -> Result<(), EngineError> {
        // A change of state is small, and a delete begins with one.
        self.vital_fenced("write the sandbox's state", move |db| {
            let ((from, from_detail), (to, to_detail)) = (state_words(from), state_words(to));
            let (goal, kept) = goal_words(goal);
            let changed = db
                .prepare_cached(
                    "UPDATE sandboxes SET state = ?1, detail = ?2, goal = ?3, goal_kept = ?4, reason = ?5
                     WHERE id = ?6 AND generation = ?7 AND state = ?8 AND detail = ?9",
                )?
                .execute(params![
                    to,
                    to_detail,
                    goal,
                    kept,
                    reason,
                    id_bytes(key.id),
                    key.generation,
                    from,
                    from_detail
                ])?;
            Ok(changed == 1)
        })
        .await
    }

    /// Writes what the driver is about to work towards, for a row that is in state `from`.
    pub async fn change_goal(&self, key: RowKey, from: State, goal: Goal) -> Result<(), EngineError> {
        self.fenced("write the sandbox's goal", move |db| {
            let ((from, detail), (goal, kept)) = (state_words(from), goal_words(goal));
            let changed = db
                .prepare_cached(
                    "UPDATE sandboxes SET goal = ?1, goal_kept = ?2
                     WHERE id = ?3 AND generation = ?4 AND state = ?5 AND detail = ?6",
                )?
                .execute(params![goal, kept, id_bytes(key.id), key.generation, from, detail])?;
            Ok(changed == 1)
        })
        .await
    }

    /// Writes all of a change, or nothing. `false` if the sandbox is being deleted, or gone.
    pub async fn change_sandbox(&self, key: RowKey, change: SandboxChange) -> Result<bool, EngineError> {
        self.change("write the sandbox's changes", move |db| {
            let id = key.id;
            let lives = db
                .prepare_cached(
                    "SELECT 1 FROM sandboxes WHERE id = ?1 AND generation = ?2 AND state != 'deleting'",
                )?
                .exists(params![id_bytes(id), key.generation])?;
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
            if let Some(policy) = &change.network {
                network::put_policy(db, id, policy)?;
            }
            Ok(true)
        })
        .await
    }

    /// Writes when a sandbox was last used, when it started and when it was paused. No caller waits, so it joins the next commit.
    pub fn note_use(
        &self,
        key: RowKey,
        stamps: Stamps,
        done: impl FnOnce(Result<(), DbError>) + Send + 'static,
    ) {
        let change = move |db: &Connection| {
            let id = key.id;
            let ours = db
                .prepare_cached("SELECT 1 FROM sandboxes WHERE id = ?1 AND generation = ?2")?
                .exists(params![id_bytes(id), key.generation])?;
            if !ours {
                return Ok(());
            }
            put_use(db, id, &stamps)
        };
        self.submit(change, done);
    }

    /// Deletes the row of a sandbox that is gone from the host, and those of its commands. Its state must be `deleting`.
    pub async fn delete_sandbox(&self, key: RowKey) -> Result<(), EngineError> {
        let now = crate::observe::clock::now();
        self.vital_fenced("delete the sandbox's row", move |db| {
            lineage::end_member(db, key.id, now)?;
            let changed = db
                .prepare_cached(
                    "DELETE FROM sandboxes WHERE id = ?1 AND generation = ?2 AND state = 'deleting'",
                )?
                .execute(params![id_bytes(key.id), key.generation])?;
            Ok(changed == 1)
        })
        .await
    }
}

const SANDBOX_COLUMNS: &str =
    "id, owner, name, template, image, cpu_millis, memory_bytes, pids, env, state, detail,
    goal, goal_kept, reason, idempotency_key, request_digest, oom_kills, created_at, disk_bytes, visibility, build,
    worker, generation, incarnation, pool, claimed_from";

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
    Ok(SandboxRow {
        id: sandbox_id(row, "id")?,
        incarnation: sandbox_id(row, "incarnation")?,
        worker: row.get("worker")?,
        generation: row.get("generation")?,
        visibility: visibility_from(row)?,
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
        state: state_from(row)?,
        goal: goal_from(row)?,
        reason: row.get("reason")?,
        idempotency_key: row.get("idempotency_key")?,
        request_digest: row.get("request_digest")?,
        oom_kills: unsigned(row, "oom_kills")?,
        created_at,
        labels: Labels::default(),
        notes: Notes::default(),
        lifetime: Lifetime::default(),
        network: NetworkPolicy::default(),
        stamps: Stamps::born(Stamp::of_wall(created_at, now)),
        claimed_from: row.get("claimed_from")?,
        over: Over::default(),
        descent: None,
        hooks: HookRows::default(),
        history: 0,
    })
}

fn state_from(row: &Row<'_>) -> rusqlite::Result<State> {
    let (state, detail) = (row.get_ref("state")?.as_str()?, row.get_ref("detail")?.as_str()?);
    state_from_words(state, detail).ok_or_else(|| unreadable(row, "state", "state"))
}

/// `None` for a state that this version does not know.
pub(super) fn state_from_words(state: &str, detail: &str) -> Option<State> {
    Some(match (state, detail) {
        ("creating", _) => State::Creating,
        ("running", _) => State::Running,
        ("paused", "frozen") => State::Paused(Kept::Frozen),
        ("paused", "saved") => State::Paused(Kept::Saved),
        ("paused", "dropped") => State::Paused(Kept::Dropped),
        ("deleting", _) => State::Deleting,
        ("failed", "whole") => State::Failed { disk: Disk::Whole },
        ("failed", _) => State::Failed { disk: Disk::Lost },
        _ => return None,
    })
}

fn goal_from(row: &Row<'_>) -> rusqlite::Result<Goal> {
    match row.get_ref("goal")?.as_str()? {
        "running" => Ok(Goal::Running),
        "paused" => Ok(Goal::Paused(kept_from(row, "goal_kept")?)),
        "gone" => Ok(Goal::Gone),
        _ => Err(unreadable(row, "goal", "goal")),
    }
}

/// Reads what a pause keeps. The state and the goal each have a column for it, because they may differ.
fn kept_from(row: &Row<'_>, column: &str) -> rusqlite::Result<Kept> {
    let word = row.get_ref(column)?.as_str_or_null()?;
    let all = [Kept::Frozen, Kept::Saved, Kept::Dropped];
    all.into_iter()
        .find(|kept| Some(kept_word(*kept)) == word)
        .ok_or_else(|| unreadable(row, column, "kind of pause"))
}

fn visibility_from(row: &Row<'_>) -> rusqlite::Result<Visibility> {
    let unreadable = || unreadable(row, "visibility", "visibility");
    let bits = |column| -> rusqlite::Result<u128> {
        row.get::<_, Option<[u8; 16]>>(column)?.map(u128::from_be_bytes).ok_or_else(unreadable)
    };
    match row.get_ref("visibility")?.as_str()? {
        "visible" => Ok(Visibility::Visible),
        "pool_member" => Ok(Visibility::PoolMember(PoolId::from_bits(bits("pool")?))),
        "build" => Ok(Visibility::Build(BuildId::from_bits(bits("build")?))),
        _ => Err(unreadable()),
    }
}

pub(super) fn state_words(state: State) -> (&'static str, &'static str) {
    let detail = match state {
        State::Creating | State::Running | State::Deleting => "",
        State::Paused(kept) => kept_word(kept),
        State::Failed { disk: Disk::Whole } => "whole",
        State::Failed { disk: Disk::Lost } => "lost",
    };
    (state.word(), detail)
}

fn goal_words(goal: Goal) -> (&'static str, Option<&'static str>) {
    match goal {
        Goal::Running => ("running", None),
        Goal::Paused(kept) => ("paused", Some(kept_word(kept))),
        Goal::Gone => ("gone", None),
    }
}

fn kept_word(kept: Kept) -> &'static str {
    match kept {
        Kept::Frozen => "frozen",
        Kept::Saved => "saved",
        Kept::Dropped => "dropped",
    }
}
