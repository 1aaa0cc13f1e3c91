//! Rows: what must be known after the daemon has died. All SQL is here.
//!
//! One function per question or change. A change of state names the state it leaves, so that a lost race is seen.
//! Changes run on one thread that commits whatever has gathered in one transaction (*group commit*), each in a
//! savepoint of its own, and answers after the commit. Questions run on a second thread with a connection of its own,
//! which also carries the log of changes back into the database file, so that no change waits for a sync.
//!
//! Process death loses nothing that was answered. Power loss may lose the last moments (`synchronous=NORMAL`).

mod builds;
mod images;
mod life;
mod pools;
mod rows;
mod snapshots;
mod templates;
mod threads;
mod volumes;

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use rusqlite::{Connection, OpenFlags, params};
use tokio::sync::{mpsc, oneshot};
use wire::guest::Handle;
use wire::{CommandId, SandboxId};

use life::{add_life, insert_labels, insert_notes, insert_rules, put_stamp, put_stamps, put_use};
use rows::*;
use threads::{Job, job, read_loop, write_loop};

pub(crate) use builds::BuildRow;
pub(crate) use images::{AliasRow, ImageRow, ImageUseRow, LayerRow, LoadedImages, NameRow};
pub(crate) use life::{SandboxChange, Stamps};
pub(crate) use pools::{ClaimRow, PoolChange, PoolRow};
pub(crate) use rows::{CommandRow, Inserted, Loaded, ResultRow, SandboxRow, Tally};
pub(crate) use snapshots::SnapshotRow;
pub(crate) use templates::{LoadedTemplates, TemplateRow, VersionRow};
pub(crate) use volumes::{MountRow, VolumeRow, VolumeState};

use crate::clock::Moment;
use crate::error::EngineError;
use crate::keys::{BOOTSTRAP_ID, KeyHash};
use crate::lifecycle::{Goal, State};
use crate::lifetime::Since;
use crate::metrics::Metrics;
use crate::model::Key;

/// Changes that wait for the next commit, at most. Whoever comes later waits for room.
const QUEUE_MAX: usize = 4096;
/// How long one connection waits for another's lock.
const BUSY_WAIT: Duration = Duration::from_secs(5);

/// Each entry brings the database from its index to the next version. The list only grows.
const MIGRATIONS: &[&str] = &[
    "
    CREATE TABLE sandboxes (
        id              BLOB NOT NULL PRIMARY KEY,
        owner           TEXT NOT NULL,
        name            TEXT NOT NULL,
        template        TEXT NOT NULL,
        image           TEXT NOT NULL,
        cpu_millis      INTEGER NOT NULL,
        memory_bytes    INTEGER NOT NULL,
        pids            INTEGER NOT NULL,
        env             TEXT NOT NULL,
        state           TEXT NOT NULL,
        detail          TEXT NOT NULL,
        goal            TEXT NOT NULL,
        reason          TEXT,
        idempotency_key TEXT,
        request_digest  BLOB NOT NULL,
        oom_kills       INTEGER NOT NULL DEFAULT 0,
        created_at      INTEGER NOT NULL,
        UNIQUE (owner, name)
    ) WITHOUT ROWID;
    CREATE UNIQUE INDEX sandboxes_by_idempotency_key ON sandboxes (owner, idempotency_key)
        WHERE idempotency_key IS NOT NULL;
    CREATE TABLE commands (
        sandbox         BLOB NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
        handle          INTEGER NOT NULL,
        id              TEXT NOT NULL,
        request_digest  BLOB NOT NULL,
        start           TEXT NOT NULL,
        created_at      INTEGER NOT NULL,
        ended_at        INTEGER,
        pid             INTEGER,
        outcome         TEXT,
        code            INTEGER,
        signal          INTEGER,
        start_error     TEXT,
        stdout_start    INTEGER,
        stdout_end      INTEGER,
        stderr_start    INTEGER,
        stderr_end      INTEGER,
        stdout_bytes    BLOB,
        stderr_bytes    BLOB,
        PRIMARY KEY (sandbox, handle),
        UNIQUE (sandbox, id)
    ) WITHOUT ROWID;
    CREATE TABLE keys (
        id              TEXT NOT NULL PRIMARY KEY,
        hash            BLOB NOT NULL,
        owner           TEXT NOT NULL,
        admin           INTEGER NOT NULL,
        sandboxes_max   INTEGER,
        cpu_millis_max  INTEGER,
        memory_bytes_max INTEGER,
        created_at      INTEGER NOT NULL
    ) WITHOUT ROWID;
    ",
    "ALTER TABLE commands ADD COLUMN oom_kills_before INTEGER;",
    "
    CREATE TABLE labels (
        sandbox         BLOB NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
        key             TEXT NOT NULL,
        value           TEXT NOT NULL,
        PRIMARY KEY (sandbox, key)
    ) WITHOUT ROWID;
    CREATE TABLE rules (
        sandbox         BLOB NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
        position        INTEGER NOT NULL,
        since           TEXT NOT NULL,
        after_ms        INTEGER NOT NULL,
        action          TEXT NOT NULL,
        PRIMARY KEY (sandbox, position)
    ) WITHOUT ROWID;
    CREATE TABLE stamps (
        sandbox         BLOB NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
        since           TEXT NOT NULL,
        wall_at         INTEGER NOT NULL,
        boot            BLOB NOT NULL,
        since_boot      INTEGER NOT NULL,
        cpu             INTEGER,
        PRIMARY KEY (sandbox, since)
    ) WITHOUT ROWID;
    ",
    "
    ALTER TABLE keys ADD COLUMN metrics_only INTEGER NOT NULL DEFAULT FALSE;
",
    "
    -- What the last use was; NULL in rows that are older than this.
    ALTER TABLE stamps ADD COLUMN kind TEXT;
",
    images::TABLES,
    templates::TABLES,
    builds::TABLES,
    "ALTER TABLE images ADD COLUMN over_host INTEGER NOT NULL DEFAULT FALSE;",
    volumes::TABLES,
    pools::TABLES,
    life::NOTES,
    "
    -- For how long nobody may be attached to a command, and for how long it is kept; NULL is forever.
    ALTER TABLE commands ADD COLUMN unattended_ms INTEGER;
    ALTER TABLE commands ADD COLUMN kept_ms INTEGER;
    CREATE INDEX commands_by_expiry ON commands (ended_at) WHERE kept_ms IS NOT NULL;
",
    snapshots::TABLES,
    "
    CREATE TABLE secrets (
        name            TEXT NOT NULL PRIMARY KEY,
        bytes           BLOB NOT NULL
    ) WITHOUT ROWID;
",
];

/// What the database said.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file cannot be made.
    #[error("cannot create database `{}`", path.display())]
    Create {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file cannot be opened or brought up to date.
    #[error("cannot open database `{}`", path.display())]
    Open {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: rusqlite::Error,
    },
    /// A newer Shoal wrote it.
    #[error("database `{}` has version {found}, this program knows versions up to {known}", path.display())]
    Newer {
        /// Which file.
        path: PathBuf,
        /// What the file says.
        found: u32,
        /// What this build knows.
        known: u32,
    },
    /// The statement, or the commit that it was in, failed.
    #[error("the database refused")]
    Refused {
        /// Shared by all changes of one commit.
        source: Arc<rusqlite::Error>,
    },
    /// Someone else asked for the same thing at the same time, and this is what came of it.
    #[error(transparent)]
    Shared {
        /// What the other got.
        source: Arc<StoreError>,
    },
    /// The store was closed; the daemon is going down.
    #[error("the database is closed")]
    Closed,
    /// The operating system refused a thread.
    #[error("cannot start a thread for the database")]
    Thread {
        /// Why.
        source: std::io::Error,
    },
}

impl StoreError {
    /// Whether it could not be written because the disk is full.
    pub fn is_disk_full(&self) -> bool {
        match self {
            Self::Refused { source } => source.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull),
            Self::Shared { source } => source.is_disk_full(),
            Self::Create { .. }
            | Self::Open { .. }
            | Self::Newer { .. }
            | Self::Closed
            | Self::Thread { .. } => false,
        }
    }
}

/// The two threads. Shared through an `Arc`; closed by [`Store::close`].
pub(crate) struct Store {
    writer: mpsc::Sender<Job>,
    reader: mpsc::Sender<Job>,
    runtime: tokio::runtime::Handle,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Store {
    /// Whether [`Self::open`] would know the database, where there is one. Changes nothing, also while another daemon writes.
    /// Blocks.
    pub fn check(path: &Path) -> Result<(), StoreError> {
        if !path.exists() {
            return Ok(());
        }
        let open = |source| StoreError::Open { path: path.into(), source };
        let db = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY).map_err(open)?;
        db.busy_timeout(BUSY_WAIT).map_err(open)?;
        known_version(path, &db).map(drop)
    }

    /// Opens the database, brings it up to date and starts its threads. Blocks; call it where that is allowed.
    pub fn open(
        path: &Path,
        runtime: tokio::runtime::Handle,
        metrics: Arc<Metrics>,
    ) -> Result<Self, StoreError> {
        let open = |source| StoreError::Open { path: path.into(), source };
        // Rows hold environments. SQLite gives its other files the mode of this one.
        let create = fs::OpenOptions::new().append(true).create(true).mode(0o600).open(path);
        create.map_err(|source| StoreError::Create { path: path.into(), source })?;
        let mut writing = Connection::open(path).map_err(open)?;
        prepare(&writing).map_err(open)?;
        // The reader carries the log back, so that no commit waits for a sync.
        writing.pragma_update(None, "wal_autocheckpoint", 0).map_err(open)?;
        migrate(path, &mut writing)?;
        let reading = Connection::open(path).map_err(open)?;
        prepare(&reading).map_err(open)?;
        reading.pragma_update(None, "wal_autocheckpoint", 0).map_err(open)?;

        let (writer, changes) = mpsc::channel(QUEUE_MAX);
        let (reader, questions) = mpsc::channel(QUEUE_MAX);
        let log = PathBuf::from(format!("{}-wal", path.display()));
        let keeper = reader.clone();
        let spawn = |name: &str, body: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new()
                .name(name.into())
                .spawn(body)
                .map_err(|source| StoreError::Thread { source })
        };
        let threads = vec![
            spawn("store-write", Box::new(move || write_loop(&writing, changes, &keeper, &log, &metrics)))?,
            spawn("store-read", Box::new(move || read_loop(&reading, questions)))?,
        ];
        Ok(Self { writer, reader, runtime, threads: Mutex::new(threads) })
    }

    /// Lets what was asked before finish, then ends the threads. What is asked later is answered with `Closed`.
    pub fn close(&self) {
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for queue in [&self.writer, &self.reader] {
            // A full queue is being worked off, so room comes; a closed one needs no telling.
            while let Err(mpsc::error::TrySendError::Full(_)) = queue.try_send(Job::Stop) {
                std::thread::yield_now();
            }
        }
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a thread of the store had panicked");
            }
        }
    }

    /// Makes a change and hands its result to `done` once it is committed. `done` runs on the store's thread: be brief.
    /// Never waits: a full queue is waited for by a task of its own.
    pub fn submit<T: Send + 'static>(
        &self,
        change: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
        done: impl FnOnce(Result<T, StoreError>) + Send + 'static,
    ) {
        match self.writer.try_send(job(change, done)) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(job)) => {
                let writer = self.writer.clone();
                self.runtime.spawn(async move {
                    // If it is closed by now, dropping the job tells whoever waits.
                    let _ = writer.send(job).await;
                });
            }
            Err(mpsc::error::TrySendError::Closed(_)) => {} // Dropping the job tells whoever waits.
        }
    }

    async fn ask<T: Send + 'static>(
        queue: &mpsc::Sender<Job>,
        doing: &'static str,
        act: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, EngineError> {
        let (tell, told) = oneshot::channel();
        let closed = || EngineError::Store { doing, source: StoreError::Closed };
        // A caller that left needs no answer.
        let job = job(act, move |result| drop(tell.send(result)));
        queue.send(job).await.map_err(|_| closed())?;
        told.await.map_err(|_| closed())?.map_err(|source| EngineError::Store { doing, source })
    }

    async fn change<T: Send + 'static>(
        &self,
        doing: &'static str,
        act: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, EngineError> {
        Self::ask(&self.writer, doing, act).await
    }

    async fn question<T: Send + 'static>(
        &self,
        doing: &'static str,
        act: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, EngineError> {
        Self::ask(&self.reader, doing, act).await
    }

    // What follows: one function per question or change.

    /// All sandboxes, the commands without a result, and what the others add up to.
    pub async fn load(&self, now: Moment) -> Result<Loaded, EngineError> {
        self.question("read the rows", move |db| {
            let mut sandboxes = db
                .prepare(&format!("SELECT {SANDBOX_COLUMNS} FROM sandboxes"))?
                .query_map([], |row| sandbox_from(row, now))?
                .collect::<Result<Vec<_>, _>>()?;
            add_life(db, &mut sandboxes)?;
            volumes::add_mounts(db, &mut sandboxes)?;
            pools::add_pools(db, &mut sandboxes)?;
            let commands = db
                .prepare(&format!("SELECT {COMMAND_COLUMNS} FROM commands WHERE ended_at IS NULL"))?
                .query_map([], command_from)?
                .collect::<Result<_, _>>()?;
            let tallies = db
                .prepare(
                    "SELECT sandbox, max(handle), count(ended_at),
                            coalesce(sum(stdout_end - stdout_start + stderr_end - stderr_start), 0)
                     FROM commands GROUP BY sandbox",
                )?
                .query_map([], |row| {
                    let tally = Tally {
                        handle_max: row.get(1)?,
                        ended: unsigned(row, 2)?,
                        ended_bytes: unsigned(row, 3)?,
                    };
                    Ok((sandbox_id(row, 0)?, tally))
                })?
                .collect::<Result<_, _>>()?;
            Ok(Loaded { sandboxes, commands, tallies })
        })
        .await
    }

    /// A new sandbox. The caller has checked that name and idempotency key are free; the table checks again.
    /// Gives the image that it is made from, if that is here; then it cannot go before the sandbox does.
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

    /// From one state to another, with the goal that goes with it. `false`: the row was not in state `from`.
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

    /// What was changed about a sandbox, all of it or nothing. `false`: it is going, or gone.
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

    /// When a sandbox was last used, and the start that comes with its first use. Nobody waits for it, so it rides along with
    /// whatever is committed next.
    pub fn note_use(
        &self,
        id: SandboxId,
        stamps: Stamps,
        done: impl FnOnce(Result<(), StoreError>) + Send + 'static,
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

    /// The row of a sandbox of which nothing is left, and its commands' rows with it. It must be deleting.
    pub async fn delete_sandbox(&self, id: SandboxId) -> Result<bool, EngineError> {
        self.change("delete the sandbox's row", move |db| {
            let changed = db
                .prepare_cached("DELETE FROM sandboxes WHERE id = ?1 AND state = 'deleting'")?
                .execute(params![id_bytes(id)])?;
            Ok(changed == 1)
        })
        .await
    }

    /// A new command: the intent, before init is told. Answers through `done`, on the store's thread.
    pub fn insert_command(
        &self,
        row: CommandRow,
        done: impl FnOnce(Result<Inserted, StoreError>) + Send + 'static,
    ) {
        let insert = move |db: &Connection| {
            let sandbox = id_bytes(row.sandbox);
            // `OR IGNORE` leaves a used id alone; the foreign key is asked about first, since it would be an error.
            let changed = db
                .prepare_cached(
                    "INSERT OR IGNORE INTO commands (sandbox, handle, id, request_digest, start, created_at,
                         oom_kills_before, unattended_ms, kept_ms)
                     SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9
                     WHERE EXISTS (SELECT 1 FROM sandboxes WHERE id = ?1 AND state = 'running')",
                )?
                .execute(params![
                    sandbox,
                    row.handle.0,
                    row.id.as_str(),
                    row.request_digest,
                    json(&row.start),
                    micros(row.created_at),
                    row.oom_kills_before.map(signed),
                    row.attendance.unattended.map(|length| signed(length.as_millis() as u64)),
                    row.attendance.kept.map(|length| signed(length.as_millis() as u64)),
                ])?;
            if changed == 1 {
                return Ok(Inserted::Yes);
            }
            let existing = find_command(db, row.sandbox, row.id.as_str())?;
            Ok(existing.map_or(Inserted::NoSandbox, |row| Inserted::Exists(Box::new(row))))
        };
        self.submit(insert, done);
    }

    /// A command's result, and how many memory kills of its sandbox are accounted for. Answers through `done`.
    /// A command that has a result keeps it.
    pub fn end_command(
        &self,
        sandbox: SandboxId,
        handle: Handle,
        result: ResultRow,
        oom_kills: Option<u64>,
        done: impl FnOnce(Result<(), StoreError>) + Send + 'static,
    ) {
        let change = move |db: &Connection| {
            let words = outcome_words(&result.outcome);
            db.prepare_cached(
                "UPDATE commands SET ended_at = ?1, pid = ?2, outcome = ?3, code = ?4, signal = ?5, start_error = ?6,
                     stdout_start = ?7, stdout_end = ?8, stderr_start = ?9, stderr_end = ?10, stdout_bytes = ?11,
                     stderr_bytes = ?12
                 WHERE sandbox = ?13 AND handle = ?14 AND ended_at IS NULL",
            )?
            .execute(params![
                micros(result.ended_at),
                result.pid,
                words.outcome,
                words.code,
                words.signal,
                words.start_error,
                signed(result.stdout.start),
                signed(result.stdout.end),
                signed(result.stderr.start),
                signed(result.stderr.end),
                result.bytes[0].as_deref(),
                result.bytes[1].as_deref(),
                id_bytes(sandbox),
                handle.0,
            ])?;
            if let Some(count) = oom_kills {
                db.prepare_cached("UPDATE sandboxes SET oom_kills = ?1 WHERE id = ?2")?
                    .execute(params![signed(count), id_bytes(sandbox)])?;
            }
            Ok(())
        };
        self.submit(change, done);
    }

    /// The numbers of all commands of a sandbox.
    pub async fn handles(&self, sandbox: SandboxId) -> Result<HashSet<Handle>, EngineError> {
        self.question("read the commands' numbers", move |db| {
            db.prepare_cached("SELECT handle FROM commands WHERE sandbox = ?1")?
                .query_map(params![id_bytes(sandbox)], |row| Ok(Handle(row.get(0)?)))?
                .collect()
        })
        .await
    }

    /// Drops the ended commands of a sandbox that ended first: `count` of them, and more until `bytes` of output are freed.
    /// Tells which, and how many bytes of output they had.
    pub async fn drop_oldest_commands(
        &self,
        sandbox: SandboxId,
        count: u64,
        bytes: u64,
    ) -> Result<Vec<(Handle, u64)>, EngineError> {
        self.change("drop the oldest commands", move |db| {
            let mut dropped = Vec::new();
            let mut freed = 0;
            let mut oldest = db.prepare_cached(
                "SELECT handle, stdout_end - stdout_start + stderr_end - stderr_start FROM commands
                 WHERE sandbox = ?1 AND ended_at IS NOT NULL
                   -- The highest number must stay, since the next one is counted from it.
                   AND handle < (SELECT max(handle) FROM commands WHERE sandbox = ?1)
                 ORDER BY ended_at, handle",
            )?;
            let mut rows = oldest.query(params![id_bytes(sandbox)])?;
            while (dropped.len() as u64) < count || freed < bytes {
                let Some(row) = rows.next()? else { break };
                let length = unsigned(row, 1)?;
                dropped.push((Handle(row.get(0)?), length));
                freed += length;
            }
            drop(rows);
            let mut delete = db.prepare_cached("DELETE FROM commands WHERE sandbox = ?1 AND handle = ?2")?;
            for (handle, _) in &dropped {
                delete.execute(params![id_bytes(sandbox), handle.0])?;
            }
            Ok(dropped)
        })
        .await
    }

    /// Commands whose time is over, of all sandboxes, at most so many. They are dropped, with what they had written.
    pub async fn drop_expired_commands(
        &self,
        now: SystemTime,
        limit: usize,
    ) -> Result<Vec<(SandboxId, Handle, u64)>, EngineError> {
        self.change("drop commands whose time is over", move |db| {
            db.prepare_cached(
                    "DELETE FROM commands WHERE (sandbox, handle) IN (
                         SELECT sandbox, handle FROM commands
                         WHERE kept_ms IS NOT NULL AND ended_at IS NOT NULL AND ended_at + kept_ms * 1000 < ?1 LIMIT ?2)
                     RETURNING sandbox, handle, stdout_end - stdout_start + stderr_end - stderr_start",
                )?
                .query_map(params![micros(now), limit as i64], |row| {
                    Ok((sandbox_id(row, 0)?, Handle(row.get(1)?), unsigned(row, 2)?))
                })?
                .collect()
        })
        .await
    }

    /// A secret of this installation, or else this one from now on.
    pub async fn secret(&self, name: &'static str, fresh: [u8; 32]) -> Result<[u8; 32], EngineError> {
        self.change("read a secret", move |db| {
            db.prepare_cached("INSERT OR IGNORE INTO secrets VALUES (?1, ?2)")?
                .execute(params![name, fresh])?;
            db.prepare_cached("SELECT bytes FROM secrets WHERE name = ?1")?
                .query_row([name], |row| row.get(0))
        })
        .await
    }

    /// A command by its id.
    pub async fn command(
        &self,
        sandbox: SandboxId,
        id: CommandId,
    ) -> Result<Option<CommandRow>, EngineError> {
        self.question("read the command's row", move |db| find_command(db, sandbox, id.as_str())).await
    }

    /// Commands after a handle, oldest first.
    pub async fn commands(
        &self,
        sandbox: SandboxId,
        after: Option<Handle>,
        limit: usize,
    ) -> Result<Vec<CommandRow>, EngineError> {
        self.question("read the commands' rows", move |db| {
            db.prepare_cached(&format!(
                "SELECT {COMMAND_COLUMNS_LISTED} FROM commands WHERE sandbox = ?1 AND handle > ?2 ORDER BY handle LIMIT ?3"
            ))?
            .query_map(
                params![id_bytes(sandbox), after.map_or(-1, |handle| i64::from(handle.0)), limit as i64],
                command_from,
            )?
            .collect()
        })
        .await
    }

    /// All keys with what is kept of their secrets.
    pub async fn keys(&self) -> Result<Vec<(Key, KeyHash)>, EngineError> {
        self.question("read the keys", |db| {
            db.prepare(
                "SELECT id, hash, owner, admin, sandboxes_max, cpu_millis_max, memory_bytes_max, created_at, metrics_only
                 FROM keys
                 ORDER BY created_at, id",
            )?
            .query_map([], key_from)?
            .collect()
        })
        .await
    }

    /// A new key, or the bootstrap key in place of an earlier one. `false`: the id is taken.
    pub async fn put_key(&self, key: Key, hash: KeyHash) -> Result<bool, EngineError> {
        self.change("write the key", move |db| {
            let verb = if key.id == BOOTSTRAP_ID { "REPLACE" } else { "IGNORE" };
            let changed = db.execute(
                &format!("INSERT OR {verb} INTO keys VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)"),
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
                ],
            )?;
            Ok(changed == 1)
        })
        .await
    }

    /// `false`: there was none.
    pub async fn delete_key(&self, id: String) -> Result<bool, EngineError> {
        self.change("delete the key", move |db| {
            Ok(db.execute("DELETE FROM keys WHERE id = ?1", params![id])? == 1)
        })
        .await
    }
}

fn prepare(db: &Connection) -> rusqlite::Result<()> {
    db.busy_timeout(BUSY_WAIT)?;
    db.pragma_update(None, "journal_mode", "WAL")?;
    db.pragma_update(None, "synchronous", "NORMAL")?;
    db.pragma_update(None, "foreign_keys", "ON")?;
    db.pragma_update(None, "temp_store", "MEMORY")
}

/// The version of a database, unless this build does not know it.
fn known_version(path: &Path, db: &Connection) -> Result<u32, StoreError> {
    let open = |source| StoreError::Open { path: path.into(), source };
    let found: u32 = db.pragma_query_value(None, "user_version", |row| row.get(0)).map_err(open)?;
    let known = MIGRATIONS.len() as u32;
    if found > known {
        return Err(StoreError::Newer { path: path.into(), found, known });
    }
    Ok(found)
}

fn migrate(path: &Path, db: &mut Connection) -> Result<(), StoreError> {
    let open = |source| StoreError::Open { path: path.into(), source };
    let found = known_version(path, db)?;
    for (version, sql) in (1u32..).zip(MIGRATIONS).skip(found as usize) {
        let step = db.transaction().map_err(open)?;
        step.execute_batch(sql).map_err(open)?;
        step.pragma_update(None, "user_version", version).map_err(open)?;
        step.commit().map_err(open)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use bytes::Bytes;
    use wire::guest::{ExitStatus, Start};
    use wire::launch::Limits;

    use super::*;
    use crate::clock::Stamp;
    use crate::command::Attendance;
    use crate::labels::Labels;
    use crate::lifetime::{Action, LastUse, Lifetime, Rule};
    use crate::model::{Outcome, Owner, SandboxName, Span};
    use crate::notes::Notes;

    fn row(id: u128, name: &str) -> SandboxRow {
        SandboxRow {
            id: SandboxId::from_random(id),
            owner: Owner::default_owner(),
            name: SandboxName::parse(name).expect("a name"),
            template: "default".into(),
            template_version: None,
            image: "host".into(),
            image_alias: None,
            image_held: None,
            limits: Limits { cpu_millis: 1, memory_bytes: u64::MAX / 2, pids: 3, disk_bytes: Some(5) },
            mounts: Vec::new(),
            env: [("A".to_owned(), "ü\n".to_owned())].into(),
            state: State::Creating,
            goal: Goal::Running,
            reason: None,
            idempotency_key: Some(name.into()),
            request_digest: [7; 32],
            oom_kills: 0,
            created_at: UNIX_EPOCH + Duration::from_micros(1_234_567),
            labels: Labels::new([("thread".to_owned(), "ü".to_owned())].into()).expect("labels"),
            notes: Notes::one("dialect", "{}".into()).expect("notes"),
            lifetime: lifetime(&[
                (Since::LastUse, 90, Action::Delete),
                (Since::Start, 5, Action::PauseDropMemory),
            ]),
            stamps: Stamps { cpu: Some(Duration::from_micros(12)), ..Stamps::born(Stamp::of(NOW)) },
            pool: None,
            claimed_from: None,
        }
    }

    const NOW: Moment =
        Moment { wall: UNIX_EPOCH, boot: u128::MAX / 3, since_boot: Duration::from_micros(77_000_001) };

    fn lifetime(rules: &[(Since, u64, Action)]) -> Lifetime {
        let rule = |(since, seconds, action): &(Since, u64, Action)| Rule {
            since: *since,
            after: Duration::from_secs(*seconds),
            action: *action,
        };
        Lifetime::new(rules.iter().map(rule).collect()).expect("rules")
    }

    #[tokio::test]
    async fn labels_rules_and_times_are_kept_and_changed_together() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = open(&directory);
        let one = row(1, "one");
        let plain = SandboxRow {
            labels: Labels::default(),
            lifetime: Lifetime::default(),
            idempotency_key: None,
            ..row(2, "two")
        };
        for row in [&one, &plain] {
            store.insert_sandbox(row.clone()).await.expect("written");
        }
        let found =
            |loaded: Loaded, id| loaded.sandboxes.into_iter().find(|row| row.id == id).expect("a row");
        let kept = found(store.load(NOW).await.expect("it reads"), one.id);
        assert_eq!((&kept.labels, &kept.lifetime, kept.stamps), (&one.labels, &one.lifetime, one.stamps));
        assert_eq!(kept.notes, one.notes);
        let kept = found(store.load(NOW).await.expect("it reads"), plain.id);
        assert_eq!((&kept.labels, &kept.lifetime), (&plain.labels, &plain.lifetime));
        assert_eq!(
            kept.stamps,
            Stamps::born(Stamp::of_wall(plain.created_at, NOW)),
            "only the wall clock knows"
        );

        let stamps = Stamps { started: Some(one.stamps.used.plus(Duration::from_secs(1))), ..one.stamps };
        let change = SandboxChange {
            name: Some(SandboxName::parse("other").expect("a name")),
            labels: Some(Labels::new([("b".to_owned(), String::new())].into()).expect("labels")),
            notes: Some(Notes::default()),
            lifetime: Some(lifetime(&[(Since::Creation, 1, Action::Delete)])),
            stamps: Some(stamps),
        };
        assert!(store.change_sandbox(one.id, change.clone()).await.expect("written"));
        let clash = SandboxChange {
            name: Some(plain.name.clone()),
            labels: Some(Labels::default()),
            ..change.clone()
        };
        store.change_sandbox(one.id, clash).await.expect_err("the name is taken");
        let (tell, told) = oneshot::channel();
        let later = stamps.used.plus(Duration::from_secs(9));
        let used = Stamps { used: later, last_use: LastUse::Processor, cpu: None, ..stamps };
        store.note_use(one.id, used, move |done| drop(tell.send(done)));
        told.await.expect("it answers").expect("written");
        store.close();

        let store = open(&directory);
        let kept = found(store.load(NOW).await.expect("it reads"), one.id);
        assert_eq!(
            (kept.name, Some(kept.labels), Some(kept.lifetime)),
            (change.name.clone().expect("one"), change.labels.clone(), change.lifetime.clone())
        );
        assert_eq!(kept.stamps, used);
        let deleting = store.change_state(one.id, State::Creating, State::Deleting, Goal::Gone, None);
        assert!(deleting.await.expect("written"));
        assert!(!store.change_sandbox(one.id, change).await.expect("it is going"));
        assert!(store.delete_sandbox(one.id).await.expect("written"));
        let left = store.question("count", |db| {
            db.query_row("SELECT (SELECT count(*) FROM labels) + (SELECT count(*) FROM rules) + (SELECT count(*) FROM stamps)", [], |row| row.get::<_, i64>(0))
        });
        assert_eq!(left.await.expect("it reads"), 0);
        store.close();
    }

    fn command(sandbox: SandboxId, handle: u32, id: &str) -> CommandRow {
        CommandRow {
            sandbox,
            handle: Handle(handle),
            id: id.parse().expect("an id"),
            request_digest: [handle as u8; 32],
            start: Start::shell(Handle(handle), id, "true"),
            created_at: UNIX_EPOCH,
            oom_kills_before: Some(u64::from(handle)),
            attendance: Attendance::default(),
            result: None,
        }
    }

    fn open(directory: &tempfile::TempDir) -> Store {
        Store::open(&directory.path().join("db"), tokio::runtime::Handle::current(), Arc::default())
            .expect("it opens")
    }

    async fn insert(store: &Store, row: CommandRow) -> Inserted {
        let (tell, told) = oneshot::channel();
        store.insert_command(row, move |inserted| drop(tell.send(inserted)));
        told.await.expect("it answers").expect("the database takes it")
    }

    async fn end(store: &Store, sandbox: SandboxId, handle: u32, result: ResultRow) {
        let (tell, told) = oneshot::channel();
        store.end_command(sandbox, Handle(handle), result, Some(3), move |done| drop(tell.send(done)));
        told.await.expect("it answers").expect("the database takes it");
    }

    #[tokio::test]
    async fn what_was_answered_is_there_after_a_crash() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = open(&directory);
        let sandbox = row(1, "one");
        store.insert_sandbox(sandbox.clone()).await.expect("written");
        assert!(
            matches!(insert(&store, command(sandbox.id, 1, "a")).await, Inserted::NoSandbox),
            "not running"
        );
        let moved = |from, to, goal| store.change_state(sandbox.id, from, to, goal, None);
        assert!(moved(State::Creating, State::Running, Goal::Running).await.expect("written"));
        assert!(!moved(State::Creating, State::Running, Goal::Running).await.expect("a lost race is seen"));
        assert!(matches!(insert(&store, command(sandbox.id, 1, "a")).await, Inserted::Yes));
        assert!(matches!(insert(&store, command(sandbox.id, 2, "b")).await, Inserted::Yes));
        let Inserted::Exists(existing) = insert(&store, command(sandbox.id, 3, "a")).await else {
            panic!("the id was used before")
        };
        assert_eq!(existing.handle, Handle(1));
        let outcomes = [
            Outcome::Exited(-1),
            Outcome::Signaled(9),
            Outcome::TimedOut(ExitStatus::Signal(15)),
            Outcome::TimedOutUnheard,
            Outcome::IdleTimedOut(ExitStatus::Code(1)),
            Outcome::Killed(ExitStatus::Signal(9)),
            Outcome::OutOfMemory(ExitStatus::Code(137)),
            Outcome::FailedToStart(wire::guest::StartError::UnknownUser { user: "eve".into() }),
            Outcome::SandboxGone,
        ];
        let mut results = Vec::new();
        for (handle, outcome) in (10..).zip(outcomes) {
            insert(&store, command(sandbox.id, handle, &format!("c{handle}"))).await;
            let result = ResultRow {
                ended_at: UNIX_EPOCH + Duration::from_secs(u64::from(handle)),
                pid: Some(handle),
                outcome,
                stdout: Span { start: 5, end: 10 },
                stderr: Span::default(),
                bytes: [Some(Bytes::from_static(b"12345")), None],
            };
            end(&store, sandbox.id, handle, result.clone()).await;
            // A second result changes nothing.
            end(&store, sandbox.id, handle, ResultRow { outcome: Outcome::Exited(99), ..result.clone() })
                .await;
            results.push((handle, result));
        }
        store.close();
        let refused = store.keys().await.err();
        assert!(matches!(refused, Some(EngineError::Store { source: StoreError::Closed, .. })));

        let store = open(&directory);
        let loaded = store.load(NOW).await.expect("it reads");
        assert_eq!(loaded.commands.len(), 2);
        assert_eq!(loaded.commands[1].oom_kills_before, Some(2), "as it was written");
        let tally = Tally { handle_max: 18, ended: 9, ended_bytes: 45 };
        assert_eq!(loaded.tallies, [(sandbox.id, tally)]);
        let found = &loaded.sandboxes[0];
        assert_eq!((found.state, found.goal, found.oom_kills), (State::Running, Goal::Running, 3));
        assert_eq!(
            (&found.env, found.limits, found.created_at),
            (&sandbox.env, sandbox.limits, sandbox.created_at)
        );
        for (handle, result) in results {
            let id: CommandId = format!("c{handle}").parse().expect("an id");
            let row = store.command(sandbox.id, id).await.expect("it reads").expect("it is there");
            assert_eq!(row.result, Some(result));
        }
        let dropped = store.drop_oldest_commands(sandbox.id, 2, 11).await.expect("written");
        assert_eq!(dropped, [(Handle(10), 5), (Handle(11), 5), (Handle(12), 5)]);
        assert!(!store.delete_sandbox(sandbox.id).await.expect("it is not deleting"));
        let deleting = store.change_state(sandbox.id, State::Running, State::Deleting, Goal::Gone, None);
        assert!(deleting.await.expect("written"));
        assert!(store.delete_sandbox(sandbox.id).await.expect("written"));
        assert_eq!(store.commands(sandbox.id, None, 100).await.expect("it reads").len(), 0);
        store.close();
    }

    /// Those that ended first, whenever they began: a long command that has just ended is not old.
    #[tokio::test]
    async fn the_commands_that_ended_first_are_dropped_first() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = open(&directory);
        let sandbox = SandboxRow { state: State::Running, ..row(1, "one") };
        store.insert_sandbox(sandbox.clone()).await.expect("written");
        for (handle, ended_at) in
            [(1, Some(50)), (2, Some(10)), (3, Some(30)), (4, None), (5, Some(30)), (6, Some(5))]
        {
            insert(&store, command(sandbox.id, handle, &format!("c{handle}"))).await;
            let Some(ended_at) = ended_at else { continue };
            let result = ResultRow {
                ended_at: UNIX_EPOCH + Duration::from_secs(ended_at),
                pid: None,
                outcome: Outcome::Exited(0),
                stdout: Span { start: 0, end: 100 },
                stderr: Span::default(),
                bytes: [None, None],
            };
            end(&store, sandbox.id, handle, result).await;
        }
        let dropped = async |count, bytes| -> Vec<u32> {
            let dropped = store.drop_oldest_commands(sandbox.id, count, bytes).await.expect("written");
            dropped.into_iter().map(|(handle, _)| handle.0).collect()
        };
        assert_eq!(dropped(1, 0).await, [2], "the highest number stays, although it ended before");
        assert_eq!(dropped(0, 101).await, [3, 5], "as many as free so much");
        assert_eq!(dropped(10, 0).await, [1], "what runs stays");
        let left: Vec<u32> = store
            .commands(sandbox.id, None, 10)
            .await
            .expect("it reads")
            .iter()
            .map(|row| row.handle.0)
            .collect();
        assert_eq!(left, [4, 6]);
        store.close();
    }

    #[tokio::test]
    async fn an_answer_that_panics_takes_no_other_with_it() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = open(&directory);
        store.submit(|_| Ok(()), |_| panic!("a bug in whoever waits"));
        store.insert_sandbox(row(1, "one")).await.expect("the thread goes on");
        assert_eq!(store.load(NOW).await.expect("it reads").sandboxes.len(), 1);
        store.close();
    }

    #[tokio::test]
    async fn a_change_that_fails_takes_no_other_with_it() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = open(&directory);
        // Sent together, so that they share a transaction: the second and the fourth clash with the first.
        let (a, b, c, d, e) = tokio::join!(
            store.insert_sandbox(row(1, "one")),
            store.insert_sandbox(row(2, "one")),
            store.insert_sandbox(row(3, "three")),
            store.insert_sandbox(row(1, "four")),
            store.insert_sandbox(row(5, "five")),
        );
        assert_eq!([a.is_ok(), b.is_ok(), c.is_ok(), d.is_ok(), e.is_ok()], [true, false, true, false, true]);
        assert_eq!(store.load(NOW).await.expect("it reads").sandboxes.len(), 3);
        store.close();
    }

    #[tokio::test]
    async fn a_database_of_a_newer_version_is_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("db");
        Store::check(&path).expect("none yet");
        assert!(!path.exists(), "a look makes nothing");
        let store = open(&directory);
        Store::check(&path).expect("our own, while it is written to");
        store.close();
        let db = Connection::open(&path).expect("it opens");
        db.pragma_update(None, "user_version", 99).expect("written");
        drop(db);
        let refused = Store::check(&path);
        assert!(matches!(refused, Err(StoreError::Newer { found: 99, .. })), "{refused:?}");
        let refused = Store::open(&path, tokio::runtime::Handle::current(), Arc::default());
        assert!(matches!(refused, Err(StoreError::Newer { found: 99, .. })));
    }
}
