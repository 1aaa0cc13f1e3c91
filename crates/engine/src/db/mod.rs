//! The database: everything that must survive the daemon. All SQL is in this folder.
//!
//! This file opens the database, migrates it and passes jobs to its two threads (`threads`). Each other file holds the
//! rows and the SQL of one noun, with one function per question or change. A change of state names the state it leaves,
//! so that a lost race is noticed.
//!
//! Changes run on one thread. It commits all changes that have arrived in one transaction (*group commit*), each in its
//! own savepoint, and answers after the commit. Questions run on a second thread with its own connection. That thread also
//! copies the write-ahead log back into the database file, so that no change waits for a sync.
//!
//! If the process dies, no answered change is lost. If the power fails, the last commits may be (`synchronous=NORMAL`).

mod builds;
mod commands;
mod credentials;
mod events;
mod hooks;
mod images;
mod keys;
mod life;
mod lineage;
mod links;
mod machine;
mod network;
mod pools;
mod rows;
mod sandboxes;
mod snapshots;
mod start;
mod templates;
#[cfg(test)]
mod tests;
mod threads;
mod volumes;
mod webhooks;

use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};
use tokio::sync::{mpsc, oneshot};

use threads::{Job, job, read_loop, write_loop};

pub(crate) use builds::BuildRow;
pub(crate) use commands::{CommandRow, Inserted, ResultRow, Tally};
pub(crate) use hooks::HookRows;
pub(crate) use images::{AliasRow, ImageRow, ImageUseRow, LayerOrigin, LayerRow, LoadedImages, NameRow};
pub(crate) use life::{SandboxChange, Stamps};
pub(crate) use lineage::Descent;
pub(crate) use pools::{ClaimRow, PoolChange, PoolRow};
pub(crate) use sandboxes::{GENERATION_FIRST, Identity, LOCAL, RowKey, SandboxRow, Visibility};
pub(crate) use snapshots::{Purpose, SnapshotRow, Taken};
pub(crate) use templates::{LoadedTemplates, TemplateRow, VersionRow};
pub(crate) use volumes::{MountRow, VolumeRow, VolumeState};

use crate::disk::HostDisk;
use crate::error::{DbError, EngineError};
use crate::observe::metrics::Metrics;

/// How many jobs may wait for each thread. Later callers wait until there is room.
const QUEUE_MAX: usize = 4096;
/// How long one connection waits for another's lock.
const BUSY_WAIT: Duration = Duration::from_secs(5);

/// Entry N migrates a database from version N to version N + 1. The list only grows, and a file never changes once it
/// has landed: SQLite keeps the text of each `CREATE` statement, indentation included, in the schema.
const MIGRATIONS: &[&str] = &[
    include_str!("migrations/01_sandboxes_commands_keys.sql"),
    include_str!("migrations/02_command_oom_kills.sql"),
    include_str!("migrations/03_labels_rules_stamps.sql"),
    include_str!("migrations/04_keys_metrics_only.sql"),
    include_str!("migrations/05_stamps_kind.sql"),
    include_str!("migrations/06_images.sql"),
    include_str!("migrations/07_templates.sql"),
    include_str!("migrations/08_builds.sql"),
    include_str!("migrations/09_images_over_host.sql"),
    include_str!("migrations/10_volumes.sql"),
    include_str!("migrations/11_pools.sql"),
    include_str!("migrations/12_notes.sql"),
    include_str!("migrations/13_command_attendance.sql"),
    include_str!("migrations/14_snapshots.sql"),
    include_str!("migrations/15_secrets.sql"),
    include_str!("migrations/16_sandboxes_owned.sql"),
    include_str!("migrations/17_network_pause_snapshots_limits_ports.sql"),
    include_str!("migrations/18_events_webhooks_hooks.sql"),
    include_str!("migrations/19_credentials.sql"),
    include_str!("migrations/20_next.sql"),
];

/// The queues of the two threads. Shared through an `Arc`; [`Db::close`] ends the threads.
pub(crate) struct Db {
    writer: mpsc::Sender<Job>,
    reader: mpsc::Sender<Job>,
    runtime: tokio::runtime::Handle,
    threads: Mutex<Vec<JoinHandle<()>>>,
    disk: Arc<HostDisk>,
}

impl Db {
    /// Checks that [`Self::open`] supports the version of the database, if there is one. Changes nothing, and may run while
    /// another daemon writes. Blocks.
    pub fn check(path: &Path) -> Result<(), DbError> {
        if !path.exists() {
            return Ok(());
        }
        let open = |source| DbError::Open { path: path.into(), source };
        let db = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY).map_err(open)?;
        db.busy_timeout(BUSY_WAIT).map_err(open)?;
        known_version(path, &db).map(drop)
    }

    /// Opens the database, migrates it to the newest version and starts its threads. Blocks.
    pub fn open(
        path: &Path,
        runtime: tokio::runtime::Handle,
        metrics: Arc<Metrics>,
        disk: Arc<HostDisk>,
    ) -> Result<Self, DbError> {
        let open = |source| DbError::Open { path: path.into(), source };
        // Rows hold environments, which may hold secrets. SQLite gives its other files the mode of this file.
        let create = fs::OpenOptions::new().append(true).create(true).mode(0o600).open(path);
        create.map_err(|source| DbError::Create { path: path.into(), source })?;
        let mut writing = Connection::open(path).map_err(open)?;
        prepare(&writing).map_err(open)?;
        // The reader runs the checkpoints, so that no commit waits for a sync.
        writing.pragma_update(None, "wal_autocheckpoint", 0).map_err(open)?;
        migrate(path, &mut writing)?;
        let reading = Connection::open(path).map_err(open)?;
        prepare(&reading).map_err(open)?;
        reading.pragma_update(None, "wal_autocheckpoint", 0).map_err(open)?;

        let (writer, changes) = mpsc::channel(QUEUE_MAX);
        let (reader, questions) = mpsc::channel(QUEUE_MAX);
        let log = PathBuf::from(format!("{}-wal", path.display()));
        let checkpoints = reader.clone();
        let spawn = |name: &str, body: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new()
                .name(name.into())
                .spawn(body)
                .map_err(|source| DbError::Thread { source })
        };
        let threads = vec![
            spawn(
                "store-write",
                Box::new(move || write_loop(&writing, changes, &checkpoints, &log, &metrics)),
            )?,
            spawn("store-read", Box::new(move || read_loop(&reading, questions)))?,
        ];
        Ok(Self { writer, reader, runtime, threads: Mutex::new(threads), disk })
    }

    /// Finishes the queued jobs, then ends the threads. Later jobs fail with `Closed`.
    pub fn close(&self) {
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for queue in [&self.writer, &self.reader] {
            // The thread is working on a full queue, so there will be room. A closed queue has no thread to stop.
            while let Err(mpsc::error::TrySendError::Full(_)) = queue.try_send(Job::Stop) {
                std::thread::yield_now();
            }
        }
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a thread of the database panicked");
            }
        }
    }

    /// Makes a change and passes its result to `done` after the commit. `done` runs on the writer's thread, so it must be
    /// short. Returns at once: if the queue is full, a task waits for room.
    pub fn submit<T: Send + 'static>(
        &self,
        change: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
        done: impl FnOnce(Result<T, DbError>) + Send + 'static,
    ) {
        match self.writer.try_send(job(change, done)) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(job)) => {
                let writer = self.writer.clone();
                self.runtime.spawn(async move {
                    // If the queue has been closed, dropping the job reports `Closed` to `done`.
                    let _ = writer.send(job).await;
                });
            }
            Err(mpsc::error::TrySendError::Closed(_)) => {} // Dropping the job reports `Closed` to `done`.
        }
    }

    async fn ask<T: Send + 'static>(
        queue: &mpsc::Sender<Job>,
        doing: &'static str,
        act: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, EngineError> {
        let (tell, told) = oneshot::channel();
        let closed = || EngineError::Store { doing, source: DbError::Closed };
        // A caller that left needs no answer.
        let job = job(act, move |result| drop(tell.send(result)));
        queue.send(job).await.map_err(|_| closed())?;
        told.await.map_err(|_| closed())?.map_err(|source| EngineError::Store { doing, source })
    }

    /// Whether no table has a row except the key and the secrets of a daemon that has just started, and events of what is
    /// gone. Tables that are added later are checked too, without a change here.
    pub async fn is_empty(&self) -> Result<bool, EngineError> {
        self.question("look whether the database is empty", |db| {
            let mut tables = db.prepare(
                "SELECT name FROM sqlite_master
                 WHERE type = 'table' AND substr(name, 1, 7) <> 'sqlite_' AND name NOT IN ('keys', 'secrets', 'machine', 'events', 'event_logs')",
            )?;
            let tables: Vec<String> = tables.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?;
            for table in tables {
                let has_rows = format!("SELECT EXISTS (SELECT 1 FROM \"{table}\")");
                if db.query_row(&has_rows, [], |row| row.get(0))? {
                    return Ok(false);
                }
            }
            db.query_row("SELECT count(*) <= 1 FROM keys", [], |row| row.get(0))
        })
        .await
    }

    async fn change<T: Send + 'static>(
        &self,
        doing: &'static str,
        act: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, EngineError> {
        Self::ask(&self.writer, doing, act).await
    }

    /// Makes a change that frees room or takes a right away. If the disk is full, this is written from the reserve.
    async fn vital<T: Send + 'static>(
        &self,
        doing: &'static str,
        act: impl Fn(&Connection) -> rusqlite::Result<T> + Clone + Send + 'static,
    ) -> Result<T, EngineError> {
        match Self::ask(&self.writer, doing, act.clone()).await {
            Err(EngineError::Store { source, .. }) if source.is_disk_full() => {
                let disk = Arc::clone(&self.disk);
                if tokio::task::spawn_blocking(move || disk.release()).await.is_err() {
                    tracing::error!("releasing the reserve of the disk panicked");
                }
                Self::ask(&self.writer, doing, act).await
            }
            result => result,
        }
    }

    /// An error while only deletes may be written.
    pub fn check_room(&self) -> Result<(), DbError> {
        if self.disk.is_whole() { Ok(()) } else { Err(DbError::Reserved) }
    }

    /// Writes a row that changes nothing. An error means that no change can be made at present.
    pub async fn check_writable(&self) -> Result<(), EngineError> {
        let doing = "write a row";
        self.check_room().map_err(|source| EngineError::Store { doing, source })?;
        self.change(doing, |db| {
            let version: u32 = db.pragma_query_value(None, "user_version", |row| row.get(0))?;
            db.pragma_update(None, "user_version", version)
        })
        .await
    }

    /// Makes a change to one row, whose expected contents the change names. `act` returns whether it found such a
    /// row.
    async fn fenced(
        &self,
        doing: &'static str,
        act: impl FnOnce(&Connection) -> rusqlite::Result<bool> + Send + 'static,
    ) -> Result<(), EngineError> {
        match self.change(doing, act).await? {
            true => Ok(()),
            false => Err(EngineError::Store { doing, source: DbError::Superseded }),
        }
    }

    /// As [`Self::fenced`], for a change that frees room.
    async fn vital_fenced(
        &self,
        doing: &'static str,
        act: impl Fn(&Connection) -> rusqlite::Result<bool> + Clone + Send + 'static,
    ) -> Result<(), EngineError> {
        match self.vital(doing, act).await? {
            true => Ok(()),
            false => Err(EngineError::Store { doing, source: DbError::Superseded }),
        }
    }

    async fn question<T: Send + 'static>(
        &self,
        doing: &'static str,
        act: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, EngineError> {
        Self::ask(&self.reader, doing, act).await
    }
}

fn prepare(db: &Connection) -> rusqlite::Result<()> {
    db.busy_timeout(BUSY_WAIT)?;
    db.pragma_update(None, "journal_mode", "WAL")?;
    db.pragma_update(None, "synchronous", "NORMAL")?;
    db.pragma_update(None, "foreign_keys", "ON")?;
    db.pragma_update(None, "temp_store", "MEMORY")
}

/// The version of a database. An error if it is newer than this build.
fn known_version(path: &Path, db: &Connection) -> Result<u32, DbError> {
    let open = |source| DbError::Open { path: path.into(), source };
    let found: u32 = db.pragma_query_value(None, "user_version", |row| row.get(0)).map_err(open)?;
    let known = MIGRATIONS.len() as u32;
    if found > known {
        return Err(DbError::Newer { path: path.into(), found, known });
    }
    Ok(found)
}

fn migrate(path: &Path, db: &mut Connection) -> Result<(), DbError> {
    let open = |source| DbError::Open { path: path.into(), source };
    let found = known_version(path, db)?;
    for (version, sql) in (1u32..).zip(MIGRATIONS).skip(found as usize) {
        let step = db.transaction().map_err(open)?;
        step.execute_batch(sql).map_err(open)?;
        step.pragma_update(None, "user_version", version).map_err(open)?;
        step.commit().map_err(open)?;
    }
    Ok(())
}
