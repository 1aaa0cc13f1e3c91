//! Rows of commands: what was started, and with which result.

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde::{Deserialize, Serialize};
use wire::guest::{ExitStatus, Handle, Start};
use wire::{CommandId, SandboxId};

use super::Db;
use super::rows::{
    DigestBytes, bytes, from_json, id_bytes, json, micros, optional_unsigned, sandbox_id, signed, time,
    unreadable, unsigned,
};
use super::start::{StartErrorRecord, StartRecord};
use crate::error::{DbError, EngineError};
use crate::model::attendance::Attendance;
use crate::model::{Outcome, Span};

/// A command's row.
#[derive(Debug, Clone)]
pub(crate) struct CommandRow {
    pub sandbox: SandboxId,
    pub handle: Handle,
    pub id: CommandId,
    pub request_digest: DigestBytes,
    pub start: Start,
    pub created_at: SystemTime,
    /// How many OOM kills the sandbox had had when the command began, if known.
    pub oom_kills_before: Option<u64>,
    pub attendance: Attendance,
    /// Whether the history has no snapshot of the files before it, because that failed.
    pub not_undoable: bool,
    pub result: Option<ResultRow>,
}

/// The result of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ResultRow {
    pub ended_at: SystemTime,
    pub pid: Option<u32>,
    pub outcome: Outcome,
    pub stdout: Span,
    pub stderr: Span,
    /// Short output of stdout and stderr, kept here to save a file. Lists leave it out.
    pub bytes: [Option<Bytes>; 2],
}

/// Totals of the commands of a sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub handle_max: u32,
    pub ended: u64,
    pub ended_bytes: u64,
}

/// What happened to the row of a new command.
#[derive(Debug)]
pub(crate) enum Inserted {
    Yes,
    /// The sandbox has a command with this id already.
    Exists(Box<CommandRow>),
    /// The sandbox has no row, or does not run.
    NoSandbox,
}

impl Db {
    /// Inserts a command, before it is sent to init. Calls `done` on the writer's thread.
    pub fn insert_command(
        &self,
        row: CommandRow,
        done: impl FnOnce(Result<Inserted, DbError>) + Send + 'static,
    ) {
        let insert = move |db: &Connection| {
            let sandbox = id_bytes(row.sandbox);
            // `OR IGNORE` skips an id that exists. It does not cover the foreign key, so check the sandbox first.
            let changed = db
                .prepare_cached(
                    "INSERT OR IGNORE INTO commands (sandbox, handle, id, request_digest, start, created_at,
                         oom_kills_before, unattended_ms, kept_ms, not_undoable)
                     SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10
                     WHERE EXISTS (SELECT 1 FROM sandboxes WHERE id = ?1 AND state = 'running')",
                )?
                .execute(params![
                    sandbox,
                    row.handle.0,
                    row.id.as_str(),
                    row.request_digest,
                    json(&StartRecord::of(&row.start)),
                    micros(row.created_at),
                    row.oom_kills_before.map(signed),
                    row.attendance.unattended.map(|length| signed(length.as_millis() as u64)),
                    row.attendance.kept.map(|length| signed(length.as_millis() as u64)),
                    row.not_undoable,
                ])?;
            if changed == 1 {
                return Ok(Inserted::Yes);
            }
            let existing = find_command(db, row.sandbox, row.id.as_str())?;
            Ok(existing.map_or(Inserted::NoSandbox, |row| Inserted::Exists(Box::new(row))))
        };
        match self.check_room() {
            Ok(()) => self.submit(insert, done),
            Err(error) => done(Err(error)),
        }
    }

    /// Writes the result of a command, and how many OOM kills of its sandbox are attributed to commands. A command
    /// that already has a result keeps it. Calls `done` on the writer's thread.
    pub fn end_command(
        &self,
        sandbox: SandboxId,
        handle: Handle,
        result: ResultRow,
        oom_kills: Option<u64>,
        done: impl FnOnce(Result<(), DbError>) + Send + 'static,
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
                // Two commands that end at once commit in any order, so the higher count stays.
                db.prepare_cached("UPDATE sandboxes SET oom_kills = MAX(oom_kills, ?1) WHERE id = ?2")?
                    .execute(params![signed(count), id_bytes(sandbox)])?;
            }
            Ok(())
        };
        self.submit(change, done);
    }

    /// A command by its id.
    pub async fn command(
        &self,
        sandbox: SandboxId,
        id: CommandId,
    ) -> Result<Option<CommandRow>, EngineError> {
        self.question("read the command's row", move |db| find_command(db, sandbox, id.as_str())).await
    }

    /// Commands with a higher handle than `after`, in the order of handles.
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

    /// The handles of all commands of a sandbox.
    pub async fn handles(&self, sandbox: SandboxId) -> Result<HashSet<Handle>, EngineError> {
        self.question("read the commands' numbers", move |db| {
            db.prepare_cached("SELECT handle FROM commands WHERE sandbox = ?1")?
                .query_map(params![id_bytes(sandbox)], |row| Ok(Handle(row.get("handle")?)))?
                .collect()
        })
        .await
    }

    /// Deletes the commands of a sandbox that ended first: `count` of them, and more until `bytes` of output are
    /// freed. Returns the handle of each deleted command, and how many bytes of output it had.
    pub async fn drop_oldest_commands(
        &self,
        sandbox: SandboxId,
        count: u64,
    ) -> Result<Vec<(Handle, u64)>, EngineError> {
        self.vital("drop the oldest commands", move |db| {
            let mut dropped = Vec::new();
            let mut oldest = db.prepare_cached(
                "SELECT handle, stdout_end - stdout_start + stderr_end - stderr_start AS output_bytes
                 FROM commands
                 WHERE sandbox = ?1 AND ended_at IS NOT NULL
                   -- The highest handle must stay, because the next one is counted from it.
                   AND handle < (SELECT max(handle) FROM commands WHERE sandbox = ?1)
                 ORDER BY ended_at, handle",
            )?;
            let mut rows = oldest.query(params![id_bytes(sandbox)])?;
            while (dropped.len() as u64) < count {
                let Some(row) = rows.next()? else { break };
                dropped.push((Handle(row.get("handle")?), unsigned(row, "output_bytes")?));
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

    /// Records that the commands of a sandbox that ended first lost their output, as many as hold `bytes` bytes.
    /// Returns their handles and how many bytes each had.
    pub async fn drop_oldest_output(
        &self,
        sandbox: SandboxId,
        bytes: u64,
    ) -> Result<Vec<(Handle, u64)>, EngineError> {
        self.vital("drop the oldest output", move |db| {
            let mut dropped = Vec::new();
            let mut freed = 0;
            let mut oldest = db.prepare_cached(
                "SELECT handle, stdout_end - stdout_start + stderr_end - stderr_start AS output_bytes
                 FROM commands
                 WHERE sandbox = ?1 AND ended_at IS NOT NULL
                   AND stdout_end - stdout_start + stderr_end - stderr_start > 0
                 ORDER BY ended_at, handle",
            )?;
            let mut rows = oldest.query(params![id_bytes(sandbox)])?;
            while freed < bytes {
                let Some(row) = rows.next()? else { break };
                let length = unsigned(row, "output_bytes")?;
                dropped.push((Handle(row.get("handle")?), length));
                freed += length;
            }
            drop(rows);
            let mut empty = db.prepare_cached(
                "UPDATE commands SET stdout_start = stdout_end, stderr_start = stderr_end, stdout_bytes = NULL,
                     stderr_bytes = NULL
                 WHERE sandbox = ?1 AND handle = ?2",
            )?;
            for (handle, _) in &dropped {
                empty.execute(params![id_bytes(sandbox), handle.0])?;
            }
            Ok(dropped)
        })
        .await
    }

    /// Deletes commands of any sandbox whose retention time is over, at most `limit` of them. Returns the sandbox and
    /// the handle of each deleted command, and how many bytes of output it had.
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
                     RETURNING sandbox, handle,
                         stdout_end - stdout_start + stderr_end - stderr_start AS output_bytes",
                )?
                .query_map(params![micros(now), limit as i64], |row| {
                    Ok((sandbox_id(row, "sandbox")?, Handle(row.get("handle")?), unsigned(row, "output_bytes")?))
                })?
                .collect()
        })
        .await
    }
}

/// The commands without a result, of all sandboxes.
pub(super) fn unfinished(db: &Connection) -> rusqlite::Result<Vec<CommandRow>> {
    db.prepare(&format!("SELECT {COMMAND_COLUMNS} FROM commands WHERE ended_at IS NULL"))?
        .query_map([], command_from)?
        .collect()
}

/// Totals for each sandbox that has commands.
pub(super) fn tallies(db: &Connection) -> rusqlite::Result<Vec<(SandboxId, Tally)>> {
    db.prepare(
        "SELECT sandbox, max(handle) AS handle_max, count(ended_at) AS ended,
                coalesce(sum(stdout_end - stdout_start + stderr_end - stderr_start), 0) AS ended_bytes
         FROM commands GROUP BY sandbox",
    )?
    .query_map([], |row| {
        let tally = Tally {
            handle_max: row.get("handle_max")?,
            ended: unsigned(row, "ended")?,
            ended_bytes: unsigned(row, "ended_bytes")?,
        };
        Ok((sandbox_id(row, "sandbox")?, tally))
    })?
    .collect()
}

const COMMAND_COLUMNS: &str =
    "sandbox, handle, id, request_digest, start, created_at, ended_at, pid, outcome, code,
    signal, start_error, stdout_start, stdout_end, stderr_start, stderr_end, stdout_bytes, stderr_bytes,
    oom_kills_before, unattended_ms, kept_ms, not_undoable";
/// The same columns with `NULL` in place of the output, for lists.
const COMMAND_COLUMNS_LISTED: &str =
    "sandbox, handle, id, request_digest, start, created_at, ended_at, pid, outcome,
    code, signal, start_error, stdout_start, stdout_end, stderr_start, stderr_end, NULL AS stdout_bytes,
    NULL AS stderr_bytes, oom_kills_before, unattended_ms, kept_ms, not_undoable";

fn command_from(row: &Row<'_>) -> rusqlite::Result<CommandRow> {
    let result = match row.get::<_, Option<i64>>("ended_at")? {
        None => None,
        Some(_) => Some(ResultRow {
            ended_at: time(row, "ended_at")?,
            pid: row.get("pid")?,
            outcome: outcome_from(row)?,
            stdout: Span { start: unsigned(row, "stdout_start")?, end: unsigned(row, "stdout_end")? },
            stderr: Span { start: unsigned(row, "stderr_start")?, end: unsigned(row, "stderr_end")? },
            bytes: [bytes(row, "stdout_bytes")?, bytes(row, "stderr_bytes")?],
        }),
    };
    Ok(CommandRow {
        sandbox: sandbox_id(row, "sandbox")?,
        handle: Handle(row.get("handle")?),
        id: row.get_ref("id")?.as_str()?.parse().map_err(|_| unreadable(row, "id", "command id"))?,
        request_digest: row.get("request_digest")?,
        start: from_json::<StartRecord<'static>>(row, "start")?.into_start(),
        created_at: time(row, "created_at")?,
        oom_kills_before: optional_unsigned(row, "oom_kills_before")?,
        attendance: Attendance { unattended: length(row, "unattended_ms")?, kept: length(row, "kept_ms")? },
        not_undoable: row.get("not_undoable")?,
        result,
    })
}

/// Reads a column of milliseconds.
fn length(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<Duration>> {
    Ok(row.get::<_, Option<i64>>(column)?.map(|length| Duration::from_millis(length as u64)))
}

fn find_command(db: &Connection, sandbox: SandboxId, id: &str) -> rusqlite::Result<Option<CommandRow>> {
    db.prepare_cached(&format!("SELECT {COMMAND_COLUMNS} FROM commands WHERE sandbox = ?1 AND id = ?2"))?
        .query_row(params![id_bytes(sandbox), id], command_from)
        .optional()
}

struct OutcomeWords {
    pub outcome: &'static str,
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub start_error: Option<String>,
}

/// An outcome as it is stored in the row of an event.
#[derive(Serialize, Deserialize)]
pub(super) struct OutcomeText {
    outcome: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    code: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    signal: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    start_error: Option<StartErrorRecord>,
}

pub(super) fn outcome_text(outcome: &Outcome) -> OutcomeText {
    let OutcomeWords { outcome: word, code, signal, .. } = outcome_words(outcome);
    let start_error = match outcome {
        Outcome::FailedToStart(error) => Some(StartErrorRecord::from(error.clone())),
        _ => None,
    };
    OutcomeText { outcome: word.into(), code, signal, start_error }
}

/// `None` for an outcome that this version does not know.
pub(super) fn outcome_of(text: OutcomeText) -> Option<Outcome> {
    let status = match (text.code, text.signal) {
        (Some(code), _) => Some(ExitStatus::Code(code)),
        (None, Some(signal)) => Some(ExitStatus::Signal(signal)),
        (None, None) => None,
    };
    Some(match (text.outcome.as_str(), status, text.start_error) {
        ("exited", Some(ExitStatus::Code(code)), _) => Outcome::Exited(code),
        ("signaled", Some(ExitStatus::Signal(signal)), _) => Outcome::Signaled(signal),
        ("timed_out", Some(status), _) => Outcome::TimedOut(status),
        ("idle_timed_out", Some(status), _) => Outcome::IdleTimedOut(status),
        ("killed", Some(status), _) => Outcome::Killed(status),
        ("out_of_memory", Some(status), _) => Outcome::OutOfMemory(status),
        ("failed_to_start", None, Some(error)) => Outcome::FailedToStart(error.into()),
        ("timed_out", None, _) => Outcome::TimedOutUnheard,
        ("sandbox_gone", None, _) => Outcome::SandboxGone,
        _ => return None,
    })
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
            let start_error = Some(json(&StartErrorRecord::from(error.clone())));
            return OutcomeWords { outcome: "failed_to_start", code: None, signal: None, start_error };
        }
        Outcome::TimedOutUnheard => ("timed_out", None),
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
    let outcome: String = row.get("outcome")?;
    let start_error = match outcome.as_str() {
        "failed_to_start" => Some(from_json::<StartErrorRecord>(row, "start_error")?),
        _ => None,
    };
    let text = OutcomeText { outcome, code: row.get("code")?, signal: row.get("signal")?, start_error };
    outcome_of(text).ok_or_else(|| unreadable(row, "outcome", "outcome"))
}
