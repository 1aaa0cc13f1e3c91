//! The two threads of the database: one commits changes in groups, the other answers questions.
//!
//! A job carries the work and the callback for its result. A change calls back only after the commit that includes it.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rusqlite::Connection;
use tokio::sync::mpsc;

use crate::error::DbError;
use crate::error::chain;
use crate::observe::metrics::Metrics;
use crate::observe::timing;

pub(super) type Answer = Box<dyn FnOnce(Result<(), DbError>) + Send>;
/// Takes the open transaction, or the error that prevented one.
pub(super) type Act = Box<dyn FnOnce(Result<&Connection, Arc<rusqlite::Error>>) -> (Fate, Answer) + Send>;

/// Whether the commit includes a change.
#[derive(PartialEq, Eq)]
pub(super) enum Fate {
    Keep,
    Undo,
}

pub(super) enum Job {
    Act(Act),
    Stop,
}

/// How many changes one transaction may hold. Bounds how long the first of them waits for the last.
pub(super) const BATCH_MAX: usize = 256;
/// Commits between two checkpoints, which copy the write-ahead log back into the database file.
pub(super) const COMMITS_PER_CHECKPOINT: u32 = 512;
/// If readers keep checkpoints from finishing, the writer runs one itself when the log exceeds this size.
pub(super) const LOG_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// Wraps a change so that `done` gets its result after the commit, or the error that prevented the commit.
/// If the job is dropped before it runs, `done` gets `Closed`.
pub(super) fn job<T: Send + 'static>(
    act: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    done: impl FnOnce(Result<T, DbError>) + Send + 'static,
) -> Job {
    let mut done = Done(Some(done), std::marker::PhantomData);
    Job::Act(Box::new(move |db| {
        let result = db.and_then(|db| act(db).map_err(Arc::new));
        let fate = if result.is_ok() { Fate::Keep } else { Fate::Undo };
        let answer: Answer = Box::new(move |committed| {
            done.tell(match result {
                Ok(value) => committed.map(|()| value),
                Err(source) => Err(DbError::Refused { source }),
            });
        });
        (fate, answer)
    }))
}

pub(super) struct Done<T, F: FnOnce(Result<T, DbError>)>(Option<F>, std::marker::PhantomData<fn(T)>);

impl<T, F: FnOnce(Result<T, DbError>)> Done<T, F> {
    fn tell(&mut self, result: Result<T, DbError>) {
        if let Some(done) = self.0.take() {
            done(result);
        }
    }
}

impl<T, F: FnOnce(Result<T, DbError>)> Drop for Done<T, F> {
    fn drop(&mut self) {
        self.tell(Err(DbError::Closed));
    }
}

pub(super) fn write_loop(
    db: &Connection,
    mut changes: mpsc::Receiver<Job>,
    checkpoints: &mpsc::Sender<Job>,
    log: &Path,
    metrics: &Metrics,
) {
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
        let acts: Vec<Act> = acts.collect();
        let (count, began) = (acts.len(), Instant::now());
        commit(db, acts);
        if count > 0 {
            let took = began.elapsed();
            metrics.committed(count, took);
            timing::COMMIT.check(metrics, None, took);
        }
        if stop {
            return;
        }
        commits += 1;
        if commits >= COMMITS_PER_CHECKPOINT {
            commits = 0;
            carry_back(db, checkpoints, log);
        }
    }
}

/// Runs the changes in one transaction, then calls back for each.
pub(super) fn commit(db: &Connection, acts: Vec<Act>) {
    if acts.is_empty() {
        return;
    }
    let mut answers = Vec::with_capacity(acts.len());
    // IMMEDIATE takes the lock now. At the first write, SQLite could refuse it when part of the work is done.
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
        let committed = match &failure {
            None => Ok(()),
            Some(source) => Err(DbError::Refused { source: Arc::clone(source) }),
        };
        // The callback is code of the caller. If it panics, the thread must go on for all other callers.
        if catch_unwind(AssertUnwindSafe(|| answer(committed))).is_err() {
            tracing::error!("the callback of a database change panicked");
        }
    }
}

/// Runs one change in a savepoint. A change that fails is rolled back and reports its own error. An error of this
/// function is one of the savepoint itself, and fails the whole transaction.
pub(super) fn run_change(db: &Connection, act: Act) -> Result<Answer, (Answer, rusqlite::Error)> {
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

/// Asks the reader's thread for a checkpoint. Runs one here if the reader's checkpoints have not kept the log small.
pub(super) fn carry_back(db: &Connection, checkpoints: &mpsc::Sender<Job>, log: &Path) {
    let size = fs::metadata(log).map_or(0, |metadata| metadata.len());
    if size > LOG_BYTES_MAX {
        if let Err(error) = db.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())) {
            tracing::warn!(%error, size, "cannot carry the database's log back");
        }
        return;
    }
    let passive = |db: &Connection| db.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
    let logged = |result: Result<(), DbError>| {
        if let Err(error) = result {
            tracing::warn!(error = chain(&error), "cannot carry the database's log back");
        }
    };
    // If the queue is full or closed, the next round makes up for it.
    let _ = checkpoints.try_send(job(passive, logged));
}

pub(super) fn read_loop(db: &Connection, mut questions: mpsc::Receiver<Job>) {
    while let Some(Job::Act(act)) = questions.blocking_recv() {
        let (_, answer) = act(Ok(db));
        answer(Ok(()));
    }
}
