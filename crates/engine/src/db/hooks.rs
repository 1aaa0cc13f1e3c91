//! Rows of hooks: what runs in a sandbox when something is done to it, which is due, and how the last runs went.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, UNIX_EPOCH};

use rusqlite::{Connection, OptionalExtension, Row, params};
use serde::{Deserialize, Serialize};
use wire::SandboxId;

use super::Db;
use super::rows::{from_json, id_bytes, json, micros, unreadable};
use super::sandboxes::SandboxRow;
use crate::error::EngineError;
use crate::model::hook::{Hook, HookPoint, HookRun, Hooks};
use crate::model::{Argv, GuestUser, Program, Script};

/// Hooks as they are stored in a row, by their points.
#[derive(Default, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct HooksText(BTreeMap<String, HookText>);

#[derive(Serialize, Deserialize)]
struct HookText {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    script: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    argv: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    timeout_ms: u64,
    #[serde(default)]
    required: bool,
}

impl HooksText {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// `None` if one is for a point that this version does not know, or unreadable.
    pub fn hooks(self) -> Option<Hooks> {
        let hook = |(point, text): (String, HookText)| {
            let program = match text.script {
                Some(script) => Program::Script(Script::parse(script).ok()?),
                None => Program::Argv(Argv::kept(text.argv)),
            };
            let (user, timeout) = (text.user.map(GuestUser::kept), Duration::from_millis(text.timeout_ms));
            Some((HookPoint::parse(&point)?, Hook { program, user, timeout, required: text.required }))
        };
        self.0.into_iter().map(hook).collect::<Option<_>>().map(Hooks::kept)
    }
}

impl From<&Hooks> for HooksText {
    fn from(hooks: &Hooks) -> Self {
        let text = |(point, hook): (&HookPoint, &Hook)| {
            let (script, argv) = match &hook.program {
                Program::Script(script) => (Some(script.as_str().to_owned()), Vec::new()),
                Program::Argv(argv) => (None, argv.words().to_vec()),
                Program::Default => (None, Vec::new()),
            };
            let user = hook.user.as_ref().map(|user| user.as_str().to_owned());
            let timeout_ms = u64::try_from(hook.timeout.as_millis()).unwrap_or(u64::MAX);
            (point.word().to_owned(), HookText { script, argv, user, timeout_ms, required: hook.required })
        };
        Self(hooks.all().iter().map(text).collect())
    }
}

/// The last run of a hook, as it is stored in a row.
#[derive(Serialize, Deserialize)]
struct RunText {
    at: i64,
    took_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    command: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
}

impl From<&HookRun> for RunText {
    fn from(run: &HookRun) -> Self {
        Self {
            at: micros(run.at),
            took_ms: u64::try_from(run.took.as_millis()).unwrap_or(u64::MAX),
            command: run.command.as_ref().map(ToString::to_string),
            failure: run.failure.clone(),
        }
    }
}

/// What a row says about the hooks of a sandbox.
#[derive(Debug, Clone, Default)]
pub(crate) struct HookRows {
    pub hooks: Hooks,
    /// The hook that is to run next, or was running when its daemon died.
    pub due: Option<HookPoint>,
    pub runs: BTreeMap<HookPoint, HookRun>,
}

/// Adds the hooks of sandboxes to their rows.
pub(super) fn add_hooks(db: &Connection, sandboxes: &mut [SandboxRow]) -> rusqlite::Result<()> {
    let mut all: HashMap<[u8; 16], HookRows> = db
        .prepare("SELECT sandbox, hooks, due, runs FROM sandbox_hooks")?
        .query_map([], |row| Ok((row.get("sandbox")?, rows_from(row)?)))?
        .collect::<Result<_, _>>()?;
    for row in sandboxes {
        row.hooks = all.remove(&id_bytes(row.id)).unwrap_or_default();
    }
    Ok(())
}

fn rows_from(row: &Row<'_>) -> rusqlite::Result<HookRows> {
    let bad = |column| unreadable(row, column, "hook");
    let hooks = from_json::<HooksText>(row, "hooks")?.hooks().ok_or_else(|| bad("hooks"))?;
    let due = match row.get::<_, Option<String>>("due")? {
        Some(word) => Some(HookPoint::parse(&word).ok_or_else(|| bad("due"))?),
        None => None,
    };
    let run = |(point, text): (String, RunText)| {
        let command = match text.command {
            Some(id) => Some(id.parse().ok()?),
            None => None,
        };
        let at = UNIX_EPOCH + Duration::from_micros(text.at as u64);
        let took = Duration::from_millis(text.took_ms);
        Some((HookPoint::parse(&point)?, HookRun { at, took, command, failure: text.failure }))
    };
    let runs = from_json::<BTreeMap<String, RunText>>(row, "runs")?;
    let runs = runs.into_iter().map(run).collect::<Option<_>>().ok_or_else(|| bad("runs"))?;
    Ok(HookRows { hooks, due, runs })
}

/// Writes the hooks of a sandbox, and which is due if they are new.
pub(super) fn put_hooks(
    db: &Connection,
    sandbox: SandboxId,
    hooks: &Hooks,
    due: Option<HookPoint>,
) -> rusqlite::Result<()> {
    match hooks.is_empty() {
        true => db
            .prepare_cached("DELETE FROM sandbox_hooks WHERE sandbox = ?1")?
            .execute(params![id_bytes(sandbox)])?,
        false => db
            .prepare_cached(
                "INSERT INTO sandbox_hooks (sandbox, hooks, due) VALUES (?1, ?2, ?3)
                 ON CONFLICT (sandbox) DO UPDATE SET hooks = excluded.hooks",
            )?
            .execute(params![id_bytes(sandbox), json(&HooksText::from(hooks)), due.map(HookPoint::word)])?,
    };
    Ok(())
}

impl Db {
    /// Replaces the hooks of a sandbox.
    pub async fn set_hooks(&self, sandbox: SandboxId, hooks: Hooks) -> Result<(), EngineError> {
        self.change("write the sandbox's hooks", move |db| put_hooks(db, sandbox, &hooks, None)).await
    }

    /// Writes that a hook is to run, so that the next daemon runs it if this one dies.
    pub async fn set_hook_due(&self, sandbox: SandboxId, due: HookPoint) -> Result<(), EngineError> {
        self.change("write which hook is due", move |db| {
            db.prepare_cached("UPDATE sandbox_hooks SET due = ?1 WHERE sandbox = ?2")?
                .execute(params![due.word(), id_bytes(sandbox)])?;
            Ok(())
        })
        .await
    }

    /// Writes how a hook went. None is due then.
    pub async fn put_hook_run(
        &self,
        sandbox: SandboxId,
        point: HookPoint,
        run: HookRun,
    ) -> Result<(), EngineError> {
        self.change("write how a hook went", move |db| {
            let runs: Option<String> = db
                .prepare_cached("SELECT runs FROM sandbox_hooks WHERE sandbox = ?1")?
                .query_row(params![id_bytes(sandbox)], |row| row.get(0))
                .optional()?;
            let Some(runs) = runs else { return Ok(()) }; // The hooks were removed meanwhile.
            let mut runs: BTreeMap<String, RunText> = serde_json::from_str(&runs).map_err(|error| {
                rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, Box::new(error))
            })?;
            runs.insert(point.word().into(), RunText::from(&run));
            db.prepare_cached("UPDATE sandbox_hooks SET runs = ?1, due = NULL WHERE sandbox = ?2")?
                .execute(params![json(&runs), id_bytes(sandbox)])?;
            Ok(())
        })
        .await
    }
}
