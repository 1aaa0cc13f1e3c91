//! What rows look like, and how they are read and written.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension, Row, params};
use wire::guest::{ExitStatus, Handle, Start};
use wire::launch::Limits;
use wire::{CommandId, PoolId, SandboxId, TemplateId};

use crate::clock::{Moment, Stamp};
use crate::command::Attendance;
use crate::keys::KeyHash;
use crate::labels::Labels;
use crate::lifecycle::{Disk, Goal, Kept, State};
use crate::lifetime::Lifetime;
use crate::model::{Key, KeyLimits, Outcome, Owner, SandboxName, Span};
use crate::notes::Notes;

use super::life::Stamps;
use super::volumes::MountRow;

pub(super) type DigestBytes = [u8; 32];

/// A sandbox's row.
#[derive(Debug, Clone)]
pub(crate) struct SandboxRow {
    pub id: SandboxId,
    pub owner: Owner,
    pub name: SandboxName,
    /// What its template was called when it was made.
    pub template: String,
    /// Just which version that was; none for what is built in.
    pub template_version: Option<(TemplateId, u32)>,
    /// `host`, or a reference in its canonical spelling.
    pub image: String,
    /// What it was asked for as, if that was an alias.
    pub image_alias: Option<String>,
    /// Just which image, where the template says so. Not in the row: the image that is used is kept apart.
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
    /// Where it waits for whoever claims it.
    pub pool: Option<PoolId>,
    /// What the pool was called where it waited.
    pub claimed_from: Option<String>,
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
    /// The sandbox's memory kills when the command began, where that is known.
    pub oom_kills_before: Option<u64>,
    pub attendance: Attendance,
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

pub(super) const SANDBOX_COLUMNS: &str =
    "id, owner, name, template, image, cpu_millis, memory_bytes, pids, env, state, detail,
    goal, reason, idempotency_key, request_digest, oom_kills, created_at, disk_bytes";

/// A sandbox without what other tables have of it.
pub(super) fn sandbox_from(row: &Row<'_>, now: Moment) -> rusqlite::Result<SandboxRow> {
    let created_at = time(row, 16)?;
    let disk_bytes = row.get::<_, Option<i64>>(17)?.map(|_| unsigned(row, 17)).transpose()?;
    let limits =
        Limits { cpu_millis: row.get(5)?, memory_bytes: unsigned(row, 6)?, pids: row.get(7)?, disk_bytes };
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
        name: SandboxName::kept(row.get_ref(2)?.as_str()?),
        template: row.get(3)?,
        // In tables of their own, read apart.
        template_version: None,
        image: row.get(4)?,
        image_alias: None,
        image_held: None,
        limits,
        mounts: Vec::new(),
        env: from_json(row, 8)?,
        state,
        goal,
        reason: row.get(12)?,
        idempotency_key: row.get(13)?,
        request_digest: row.get(14)?,
        oom_kills: unsigned(row, 15)?,
        created_at,
        labels: Labels::default(),
        notes: Notes::default(),
        lifetime: Lifetime::default(),
        stamps: Stamps::born(Stamp::of_wall(created_at, now)),
        pool: None,
        claimed_from: None,
    })
}

pub(super) const COMMAND_COLUMNS: &str =
    "sandbox, handle, id, request_digest, start, created_at, ended_at, pid, outcome, code,
    signal, start_error, stdout_start, stdout_end, stderr_start, stderr_end, stdout_bytes, stderr_bytes,
    oom_kills_before, unattended_ms, kept_ms";
/// The same without the output, for lists.
pub(super) const COMMAND_COLUMNS_LISTED: &str =
    "sandbox, handle, id, request_digest, start, created_at, ended_at, pid, outcome,
    code, signal, start_error, stdout_start, stdout_end, stderr_start, stderr_end, NULL, NULL, oom_kills_before,
    unattended_ms, kept_ms";

pub(super) fn command_from(row: &Row<'_>) -> rusqlite::Result<CommandRow> {
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
        oom_kills_before: row.get::<_, Option<i64>>(18)?.map(|count| count as u64),
        attendance: Attendance { unattended: length(row, 19)?, kept: length(row, 20)? },
        result,
    })
}

/// Milliseconds.
fn length(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<Duration>> {
    Ok(row.get::<_, Option<i64>>(column)?.map(|length| Duration::from_millis(length as u64)))
}

pub(super) fn find_command(
    db: &Connection,
    sandbox: SandboxId,
    id: &str,
) -> rusqlite::Result<Option<CommandRow>> {
    db.prepare_cached(&format!("SELECT {COMMAND_COLUMNS} FROM commands WHERE sandbox = ?1 AND id = ?2"))?
        .query_row(params![id_bytes(sandbox), id], command_from)
        .optional()
}

pub(super) struct OutcomeWords {
    pub outcome: &'static str,
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub start_error: Option<String>,
}

pub(super) fn outcome_words(outcome: &Outcome) -> OutcomeWords {
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

pub(super) fn outcome_from(row: &Row<'_>) -> rusqlite::Result<Outcome> {
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
        ("timed_out", None) => Outcome::TimedOutUnheard,
        ("sandbox_gone", None) => Outcome::SandboxGone,
        _ => return Err(unreadable(8, "outcome")),
    })
}

pub(super) fn key_from(row: &Row<'_>) -> rusqlite::Result<(Key, KeyHash)> {
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
        metrics_only: row.get(8)?,
    };
    Ok((key, KeyHash(row.get(1)?)))
}

pub(super) fn state_words(state: State) -> (&'static str, &'static str) {
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

pub(super) fn goal_word(goal: Goal) -> &'static str {
    match goal {
        Goal::Running => "running",
        Goal::Paused(_) => "paused",
        Goal::Gone => "gone",
    }
}

pub(super) fn id_bytes(id: SandboxId) -> [u8; 16] {
    id.bits().to_be_bytes()
}

pub(super) fn sandbox_id(row: &Row<'_>, column: usize) -> rusqlite::Result<SandboxId> {
    Ok(SandboxId::from_bits(u128::from_be_bytes(row.get(column)?)))
}

/// SQLite's integers are signed; lengths and counts that reach the sign bit do not occur, and would survive the trip.
pub(super) fn signed(value: u64) -> i64 {
    value as i64
}

pub(super) fn unsigned(row: &Row<'_>, column: usize) -> rusqlite::Result<u64> {
    Ok(row.get::<_, i64>(column)? as u64)
}

pub(super) fn optional_unsigned(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<u64>> {
    Ok(row.get::<_, Option<i64>>(column)?.map(|value| value as u64))
}

pub(super) fn micros(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_micros()).unwrap_or(i64::MAX))
}

pub(super) fn bytes(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<Bytes>> {
    Ok(row.get::<_, Option<Vec<u8>>>(column)?.map(Bytes::from))
}

pub(super) fn time(row: &Row<'_>, column: usize) -> rusqlite::Result<SystemTime> {
    Ok(UNIX_EPOCH + Duration::from_micros(unsigned(row, column)?))
}

pub(super) fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("rows are made of types that JSON can write")
}

pub(super) fn from_json<T: serde::de::DeserializeOwned>(row: &Row<'_>, column: usize) -> rusqlite::Result<T> {
    let text = row.get_ref(column)?.as_str()?;
    serde_json::from_str(text).map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, Box::new(error))
    })
}

pub(super) fn unreadable(column: usize, what: &'static str) -> rusqlite::Error {
    let problem = format!("a {what} that this version does not know");
    rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, problem.into())
}
