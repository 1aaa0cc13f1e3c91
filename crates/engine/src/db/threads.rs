//! The two threads of the store: one commits changes in groups, the other answers questions.
//!
//! A job carries what to do and whom to tell. Nobody is told before the commit that covers the change.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rusqlite::Connection;
use tokio::sync::mpsc;

use super::StoreError;
use crate::error::chain;
use crate::metrics::Metrics;
use crate::slow;

pub(super) type Answer = Box<dyn FnOnce(Result<(), StoreError>) + Send>;
/// Is given the open transaction, or why there is none.
pub(super) type Act = Box<dyn FnOnce(Result<&Connection, Arc<rusqlite::Error>>) -> (Fate, Answer) + Send>;

/// Whether a change goes into the commit.
#[derive(PartialEq, Eq)]
pub(super) enum Fate {
    Keep,
    Undo,
}

pub(super) enum Job {
    Act(Act),
    Stop,
}

/// Changes in one transaction, at most: bounds how long the first of them waits for the last.
pub(super) const BATCH_MAX: usize = 256;
/// Commits between two rounds of carrying the log of changes back into the database file.
pub(super) const COMMITS_PER_CHECKPOINT: u32 = 512;
/// If readers keep that from finishing, the writer does it itself at this size of the log.
pub(super) const LOG_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// Wraps a change so that its result reaches `done` after the commit, or says why there was none.
/// A job that is dropped unasked tells `done` that the store is closed.
pub(super) fn job<T: Send + 'static>(
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

pub(super) struct Done<T, F: FnOnce(Result<T, StoreError>)>(Option<F>, std::marker::PhantomData<fn(T)>);

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

pub(super) fn write_loop(
    db: &Connection,
    mut changes: mpsc::Receiver<Job>,
    keeper: &mpsc::Sender<Job>,
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
            slow::COMMIT.check(metrics, None, took);
        }
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
pub(super) fn commit(db: &Connection, acts: Vec<Act>) {
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
        let committed = match &failure {
            None => Ok(()),
            Some(source) => Err(StoreError::Refused { source: Arc::clone(source) }),
        };
        // Whoever is told does more than listen. A bug there must not take the thread from all others.
        if catch_unwind(AssertUnwindSafe(|| answer(committed))).is_err() {
            tracing::error!("whoever waited for a change of a row panicked");
        }
    }
}

/// Runs one change in a savepoint. A change that failed is undone and answers for
/// itself; an error here is one of the savepoint, which spoils the whole transaction.
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

/// Asks the reader's thread to carry the log back; if that has not kept it small, does it here.
pub(super) fn carry_back(db: &Connection, keeper: &mpsc::Sender<Job>, log: &Path) {
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
            tracing::warn!(error = chain(&error), "cannot carry the database's log back");
        }
    };
    // A full or closed queue is no loss: the next round comes.
    let _ = keeper.try_send(job(passive, logged));
}

pub(super) fn read_loop(db: &Connection, mut questions: mpsc::Receiver<Job>) {
    while let Some(Job::Act(act)) = questions.blocking_recv() {
        let (_, answer) = act(Ok(db));
        answer(Ok(()));
    }
}
