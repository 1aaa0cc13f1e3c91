//! Rows: what must be known after the daemon has died. All SQL is here.
//!
//! One function per question or change. A change of state names the state it leaves, so that a lost race is seen.
//! Changes run on one thread that commits whatever has gathered in one transaction (*group commit*), each in a
//! savepoint of its own, and answers after the commit. Questions run on a second thread with a connection of its own,
//! which also carries the log of changes back into the database file, so that no change waits for a sync.
//!
//! Process death loses nothing that was answered. Power loss may lose the last moments (`synchronous=NORMAL`).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension, Row, params};
use tokio::sync::{mpsc, oneshot};
use wire::guest::{ExitStatus, Handle, Start};
use wire::launch::Limits;
use wire::{CommandId, SandboxId};

use crate::error::EngineError;
use crate::keys::{BOOTSTRAP_ID, KeyHash};
use crate::lifecycle::{Disk, Goal, Kept, State};
use crate::model::{Key, KeyLimits, Outcome, Owner, SandboxName, Span};

/// Changes that wait for the next commit, at most. Whoever comes later waits for room.
const QUEUE_MAX: usize = 4096;
/// Changes in one transaction, at most: bounds how long the first of them waits for the last.
const BATCH_MAX: usize = 256;
/// Commits between two rounds of carrying the log of changes back into the database file.
const COMMITS_PER_CHECKPOINT: u32 = 512;
/// If readers keep that from finishing, the writer does it itself at this size of the log.
const LOG_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// How long one connection waits for another's lock.
const BUSY_WAIT: Duration = Duration::from_secs(5);

/// Each entry brings the database from its index to the next version. The list only grows.
const MIGRATIONS: &[&str] = &["
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
"];

/// What the database said.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
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

type DigestBytes = [u8; 32];

/// A sandbox's row.
#[derive(Debug, Clone)]
pub(crate) struct SandboxRow {
    pub id: SandboxId,
    pub owner: Owner,
    pub name: SandboxName,
    pub template: String,
    pub image: String,
    pub limits: Limits,
    pub env: BTreeMap<String, String>,
    pub state: State,
    pub goal: Goal,
    pub reason: Option<String>,
    pub idempotency_key: Option<String>,
    pub request_digest: DigestBytes,
    pub oom_kills: u64,
    pub created_at: SystemTime,
}

/// A command's row.
#[derive(Debug, Clone)]
pub(crate) struct CommandRow {
    pub sandbox: SandboxId,
    pub handle: Handle,
    pub id: CommandId,
    pub request_digest: DigestBytes,
    pub start: Start,
    pub created_at: SystemTime,
    pub result: Option<ResultRow>,
}

/// What came of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ResultRow {
    pub ended_at: SystemTime,
    pub pid: Option<u32>,
    pub outcome: Outcome,
    pub stdout: Span,
    pub stderr: Span,
    /// Short output of stdout and stderr is kept here, where it costs no file. Lists leave it out.
    pub bytes: [Option<Bytes>; 2],
}

/// Everything a starting daemon reads.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub sandboxes: Vec<SandboxRow>,
    /// Those without a result.
    pub commands: Vec<CommandRow>,
    /// For each sandbox that ever ran a command.
    pub tallies: Vec<(SandboxId, Tally)>,
}

/// What a sandbox's commands add up to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub handle_max: u32,
    pub ended: u64,
    pub ended_bytes: u64,
}

/// What became of a new command's row.
#[derive(Debug)]
pub(crate) enum Inserted {
    Yes,
    /// The id was used before.
    Exists(Box<CommandRow>),
    /// The sandbox's row is not there, or not running.
    NoSandbox,
}

type Answer = Box<dyn FnOnce(Result<(), StoreError>) + Send>;
/// Is given the open transaction, or why there is none.
type Act = Box<dyn FnOnce(Result<&Connection, Arc<rusqlite::Error>>) -> (Fate, Answer) + Send>;

/// Whether a change goes into the commit.
#[derive(PartialEq, Eq)]
enum Fate {
    Keep,
    Undo,
}

enum Job {
    Act(Act),
    Stop,
}

/// The two threads. Cheap to clone through an `Arc`; closed by [`Store::close`].
pub(crate) struct Store {
    writer: mpsc::Sender<Job>,
    reader: mpsc::Sender<Job>,
    runtime: tokio::runtime::Handle,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Store {
    /// Opens the database, brings it up to date and starts its threads. Blocks; call it where that is allowed.
    pub fn open(path: &Path, runtime: tokio::runtime::Handle) -> Result<Self, StoreError> {
        let open = |source| StoreError::Open { path: path.into(), source };
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
            spawn("store-write", Box::new(move || write_loop(&writing, changes, &keeper, &log)))?,
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
    pub async fn load(&self) -> Result<Loaded, EngineError> {
        self.question("read the rows", |db| {
            let sandboxes = db
                .prepare(&format!("SELECT {SANDBOX_COLUMNS} FROM sandboxes"))?
                .query_map([], sandbox_from)?
                .collect::<Result<_, _>>()?;
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
    pub async fn insert_sandbox(&self, row: SandboxRow) -> Result<(), EngineError> {
        self.change("write the sandbox's row", move |db| {
            let (state, detail) = state_words(row.state);
            db.prepare_cached(
                "INSERT INTO sandboxes (id, owner, name, template, image, cpu_millis, memory_bytes, pids, env, state,
                     detail, goal, reason, idempotency_key, request_digest, oom_kills, created_at)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17)",
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
            ])?;
            Ok(())
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

    /// A new name. `false`: the row is gone.
    pub async fn rename_sandbox(&self, id: SandboxId, name: SandboxName) -> Result<bool, EngineError> {
        self.change("write the sandbox's name", move |db| {
            let changed = db
                .prepare_cached("UPDATE sandboxes SET name = ?1 WHERE id = ?2")?
                .execute(params![name.as_str(), id_bytes(id)])?;
            Ok(changed == 1)
        })
        .await
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
                    "INSERT OR IGNORE INTO commands (sandbox, handle, id, request_digest, start, created_at)
                     SELECT ?1, ?2, ?3, ?4, ?5, ?6
                     WHERE EXISTS (SELECT 1 FROM sandboxes WHERE id = ?1 AND state = 'running')",
                )?
                .execute(params![
                    sandbox,
                    row.handle.0,
                    row.id.as_str(),
                    row.request_digest,
                    json(&row.start),
                    micros(row.created_at),
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

    /// Drops the oldest ended commands of a sandbox: `count` of them, and more until `bytes` of output are freed.
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
                 WHERE sandbox = ?1 AND ended_at IS NOT NULL ORDER BY handle",
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
                "SELECT id, hash, owner, admin, sandboxes_max, cpu_millis_max, memory_bytes_max, created_at FROM keys
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
                &format!("INSERT OR {verb} INTO keys VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)"),
                params![
                    key.id,
                    hash.0,
                    key.owner.as_str(),
                    key.admin,
                    key.limits.sandboxes,
                    key.limits.cpu_millis.map(signed),
                    key.limits.memory_bytes.map(signed),
                    micros(key.created_at),
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

/// Wraps a change so that its result reaches `done` after the commit, or says why there was none.
/// A job that is dropped unasked tells `done` that the store is closed.
fn job<T: Send + 'static>(
    act: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    done: impl FnOnce(Result<T, StoreError>) + Send + 'static,
) -> Job {
    let mut done = Done(Some(done), std::marker::PhantomData);
    Job::Act(Box::new(move |db| {
        let result = db.and_then(|db| act(db).map_err(Arc::new));
        let fate = if result.is_ok() { Fate::Keep } else { Fate::Undo };
        let answer: Answer = Box::new(move |committed| {
            done.tell(match result {
                Ok(value) => committed.map(|()| value),
                Err(source) => Err(StoreError::Refused { source }),
            });
        });
        (fate, answer)
    }))
}

struct Done<T, F: FnOnce(Result<T, StoreError>)>(Option<F>, std::marker::PhantomData<fn(T)>);

impl<T, F: FnOnce(Result<T, StoreError>)> Done<T, F> {
    fn tell(&mut self, result: Result<T, StoreError>) {
        if let Some(done) = self.0.take() {
            done(result);
        }
    }
}

impl<T, F: FnOnce(Result<T, StoreError>)> Drop for Done<T, F> {
    fn drop(&mut self) {
        self.tell(Err(StoreError::Closed));
    }
}

fn prepare(db: &Connection) -> rusqlite::Result<()> {
    db.busy_timeout(BUSY_WAIT)?;
    db.pragma_update(None, "journal_mode", "WAL")?;
    db.pragma_update(None, "synchronous", "NORMAL")?;
    db.pragma_update(None, "foreign_keys", "ON")?;
    db.pragma_update(None, "temp_store", "MEMORY")
}

fn migrate(path: &Path, db: &mut Connection) -> Result<(), StoreError> {
    let open = |source| StoreError::Open { path: path.into(), source };
    let found: u32 = db.pragma_query_value(None, "user_version", |row| row.get(0)).map_err(open)?;
    let known = MIGRATIONS.len() as u32;
    if found > known {
        return Err(StoreError::Newer { path: path.into(), found, known });
    }
    for (version, sql) in (1u32..).zip(MIGRATIONS).skip(found as usize) {
        let step = db.transaction().map_err(open)?;
        step.execute_batch(sql).map_err(open)?;
        step.pragma_update(None, "user_version", version).map_err(open)?;
        step.commit().map_err(open)?;
    }
    Ok(())
}

fn write_loop(db: &Connection, mut changes: mpsc::Receiver<Job>, keeper: &mpsc::Sender<Job>, log: &Path) {
    let mut batch = Vec::with_capacity(BATCH_MAX);
    let mut commits = 0;
    loop {
        if changes.blocking_recv_many(&mut batch, BATCH_MAX) == 0 {
            return;
        }
        let mut stop = false;
        let acts = batch.drain(..).filter_map(|job| match job {
            Job::Act(act) => Some(act),
            Job::Stop => {
                stop = true;
                None
            }
        });
        commit(db, acts.collect());
        if stop {
            return;
        }
        commits += 1;
        if commits >= COMMITS_PER_CHECKPOINT {
            commits = 0;
            carry_back(db, keeper, log);
        }
    }
}

/// Runs the changes in one transaction, then answers each.
fn commit(db: &Connection, acts: Vec<Act>) {
    if acts.is_empty() {
        return;
    }
    let mut answers = Vec::with_capacity(acts.len());
    // IMMEDIATE: the lock is taken now and not at the first write, where it could be refused half-way.
    let mut result =
        db.prepare_cached("BEGIN IMMEDIATE").and_then(|mut begin| begin.execute([])).map_err(Arc::new);
    for act in acts {
        let done = match &result {
            Ok(_) => run_change(db, act),
            Err(error) => Ok(act(Err(Arc::clone(error))).1),
        };
        match done {
            Ok(answer) => answers.push(answer),
            Err((answer, error)) => {
                answers.push(answer);
                result = Err(Arc::new(error));
            }
        }
    }
    let result = result
        .and_then(|_| db.prepare_cached("COMMIT").and_then(|mut end| end.execute([])).map_err(Arc::new));
    let failure = result.err();
    if failure.is_some()
        && !db.is_autocommit()
        && let Err(error) = db.execute_batch("ROLLBACK")
    {
        tracing::error!(%error, "cannot roll back after a failed commit");
    }
    for answer in answers {
        answer(match &failure {
            None => Ok(()),
            Some(source) => Err(StoreError::Refused { source: Arc::clone(source) }),
        });
    }
}

/// Runs one change in a savepoint. A change that failed is undone and answers for
/// itself; an error here is one of the savepoint, which spoils the whole transaction.
fn run_change(db: &Connection, act: Act) -> Result<Answer, (Answer, rusqlite::Error)> {
    let step = |sql: &str| db.prepare_cached(sql).and_then(|mut step| step.execute([])).map(|_| ());
    if let Err(error) = step("SAVEPOINT change") {
        let (_, answer) = act(Err(Arc::new(error)));
        return Ok(answer);
    }
    let (fate, answer) = act(Ok(db));
    let undone = if fate == Fate::Undo { step("ROLLBACK TO change") } else { Ok(()) };
    match undone.and_then(|()| step("RELEASE change")) {
        Ok(()) => Ok(answer),
        Err(error) => Err((answer, error)),
    }
}

/// Asks the reader's thread to carry the log back; if that has not kept it small, does it here.
fn carry_back(db: &Connection, keeper: &mpsc::Sender<Job>, log: &Path) {
    let size = fs::metadata(log).map_or(0, |metadata| metadata.len());
    if size > LOG_BYTES_MAX {
        if let Err(error) = db.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())) {
            tracing::warn!(%error, size, "cannot carry the database's log back");
        }
        return;
    }
    let passive = |db: &Connection| db.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
    let logged = |result: Result<(), StoreError>| {
        if let Err(error) = result {
            tracing::warn!(error = crate::error::chain(&error), "cannot carry the database's log back");
        }
    };
    // A full or closed queue is no loss: the next round comes.
    let _ = keeper.try_send(job(passive, logged));
}

fn read_loop(db: &Connection, mut questions: mpsc::Receiver<Job>) {
    while let Some(Job::Act(act)) = questions.blocking_recv() {
        let (_, answer) = act(Ok(db));
        answer(Ok(()));
    }
}

const SANDBOX_COLUMNS: &str =
    "id, owner, name, template, image, cpu_millis, memory_bytes, pids, env, state, detail,
    goal, reason, idempotency_key, request_digest, oom_kills, created_at";

fn sandbox_from(row: &Row<'_>) -> rusqlite::Result<SandboxRow> {
    let limits = Limits { cpu_millis: row.get(5)?, memory_bytes: unsigned(row, 6)?, pids: row.get(7)? };
    let (state, detail, goal): (String, String, String) = (row.get(9)?, row.get(10)?, row.get(11)?);
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
        _ => return Err(unreadable(9, "state")),
    };
    let goal = match goal.as_str() {
        "running" => Goal::Running,
        "paused" => Goal::Paused(kept),
        "gone" => Goal::Gone,
        _ => return Err(unreadable(11, "goal")),
    };
    Ok(SandboxRow {
        id: sandbox_id(row, 0)?,
        owner: Owner::parse(row.get_ref(1)?.as_str()?).map_err(|_| unreadable(1, "owner"))?,
        name: SandboxName::parse(row.get_ref(2)?.as_str()?).map_err(|_| unreadable(2, "name"))?,
        template: row.get(3)?,
        image: row.get(4)?,
        limits,
        env: from_json(row, 8)?,
        state,
        goal,
        reason: row.get(12)?,
        idempotency_key: row.get(13)?,
        request_digest: row.get(14)?,
        oom_kills: unsigned(row, 15)?,
        created_at: time(row, 16)?,
    })
}

const COMMAND_COLUMNS: &str =
    "sandbox, handle, id, request_digest, start, created_at, ended_at, pid, outcome, code,
    signal, start_error, stdout_start, stdout_end, stderr_start, stderr_end, stdout_bytes, stderr_bytes";
/// The same without the output, for lists.
const COMMAND_COLUMNS_LISTED: &str =
    "sandbox, handle, id, request_digest, start, created_at, ended_at, pid, outcome,
    code, signal, start_error, stdout_start, stdout_end, stderr_start, stderr_end, NULL, NULL";

fn command_from(row: &Row<'_>) -> rusqlite::Result<CommandRow> {
    let result = match row.get::<_, Option<i64>>(6)? {
        None => None,
        Some(_) => Some(ResultRow {
            ended_at: time(row, 6)?,
            pid: row.get(7)?,
            outcome: outcome_from(row)?,
            stdout: Span { start: unsigned(row, 12)?, end: unsigned(row, 13)? },
            stderr: Span { start: unsigned(row, 14)?, end: unsigned(row, 15)? },
            bytes: [bytes(row, 16)?, bytes(row, 17)?],
        }),
    };
    Ok(CommandRow {
        sandbox: sandbox_id(row, 0)?,
        handle: Handle(row.get(1)?),
        id: row.get_ref(2)?.as_str()?.parse().map_err(|_| unreadable(2, "command id"))?,
        request_digest: row.get(3)?,
        start: from_json(row, 4)?,
        created_at: time(row, 5)?,
        result,
    })
}

fn find_command(db: &Connection, sandbox: SandboxId, id: &str) -> rusqlite::Result<Option<CommandRow>> {
    db.prepare_cached(&format!("SELECT {COMMAND_COLUMNS} FROM commands WHERE sandbox = ?1 AND id = ?2"))?
        .query_row(params![id_bytes(sandbox), id], command_from)
        .optional()
}

struct OutcomeWords {
    outcome: &'static str,
    code: Option<i32>,
    signal: Option<i32>,
    start_error: Option<String>,
}

fn outcome_words(outcome: &Outcome) -> OutcomeWords {
    let (word, status) = match outcome {
        Outcome::Exited(code) => ("exited", Some(ExitStatus::Code(*code))),
        Outcome::Signaled(signal) => ("signaled", Some(ExitStatus::Signal(*signal))),
        Outcome::TimedOut(status) => ("timed_out", Some(*status)),
        Outcome::IdleTimedOut(status) => ("idle_timed_out", Some(*status)),
        Outcome::Killed(status) => ("killed", Some(*status)),
        Outcome::OutOfMemory(status) => ("out_of_memory", Some(*status)),
        Outcome::FailedToStart(error) => {
            let start_error = Some(json(error));
            return OutcomeWords { outcome: "failed_to_start", code: None, signal: None, start_error };
        }
        Outcome::SandboxGone => ("sandbox_gone", None),
    };
    let (code, signal) = match status {
        Some(ExitStatus::Code(code)) => (Some(code), None),
        Some(ExitStatus::Signal(signal)) => (None, Some(signal)),
        None => (None, None),
    };
    OutcomeWords { outcome: word, code, signal, start_error: None }
}

fn outcome_from(row: &Row<'_>) -> rusqlite::Result<Outcome> {
    let status = match (row.get(9)?, row.get(10)?) {
        (Some(code), _) => Some(ExitStatus::Code(code)),
        (None, Some(signal)) => Some(ExitStatus::Signal(signal)),
        (None, None) => None,
    };
    Ok(match (row.get_ref(8)?.as_str()?, status) {
        ("exited", Some(ExitStatus::Code(code))) => Outcome::Exited(code),
        ("signaled", Some(ExitStatus::Signal(signal))) => Outcome::Signaled(signal),
        ("timed_out", Some(status)) => Outcome::TimedOut(status),
        ("idle_timed_out", Some(status)) => Outcome::IdleTimedOut(status),
        ("killed", Some(status)) => Outcome::Killed(status),
        ("out_of_memory", Some(status)) => Outcome::OutOfMemory(status),
        ("failed_to_start", None) => Outcome::FailedToStart(from_json(row, 11)?),
        ("sandbox_gone", None) => Outcome::SandboxGone,
        _ => return Err(unreadable(8, "outcome")),
    })
}

fn key_from(row: &Row<'_>) -> rusqlite::Result<(Key, KeyHash)> {
    let limits = KeyLimits {
        sandboxes: row.get(4)?,
        cpu_millis: row.get::<_, Option<i64>>(5)?.map(|value| value as u64),
        memory_bytes: row.get::<_, Option<i64>>(6)?.map(|value| value as u64),
    };
    let key = Key {
        id: row.get(0)?,
        owner: Owner::parse(row.get_ref(2)?.as_str()?).map_err(|_| unreadable(2, "owner"))?,
        admin: row.get(3)?,
        limits,
        created_at: time(row, 7)?,
    };
    Ok((key, KeyHash(row.get(1)?)))
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

fn id_bytes(id: SandboxId) -> [u8; 16] {
    id.bits().to_be_bytes()
}

fn sandbox_id(row: &Row<'_>, column: usize) -> rusqlite::Result<SandboxId> {
    Ok(SandboxId::from_bits(u128::from_be_bytes(row.get(column)?)))
}

/// SQLite's integers are signed; lengths and counts that reach the sign bit do not occur, and would survive the trip.
fn signed(value: u64) -> i64 {
    value as i64
}

fn unsigned(row: &Row<'_>, column: usize) -> rusqlite::Result<u64> {
    Ok(row.get::<_, i64>(column)? as u64)
}

fn micros(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_micros()).unwrap_or(i64::MAX))
}

fn bytes(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<Bytes>> {
    Ok(row.get::<_, Option<Vec<u8>>>(column)?.map(Bytes::from))
}

fn time(row: &Row<'_>, column: usize) -> rusqlite::Result<SystemTime> {
    Ok(UNIX_EPOCH + Duration::from_micros(unsigned(row, column)?))
}

fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("rows are made of types that JSON can write")
}

fn from_json<T: serde::de::DeserializeOwned>(row: &Row<'_>, column: usize) -> rusqlite::Result<T> {
    let text = row.get_ref(column)?.as_str()?;
    serde_json::from_str(text).map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, Box::new(error))
    })
}

fn unreadable(column: usize, what: &'static str) -> rusqlite::Error {
    let problem = format!("a {what} that this version does not know");
    rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, problem.into())
}
