//! The engine's calls for commands: run one, find one, list them.

use std::sync::Arc;
use std::time::Instant;

use wire::guest::{Handle, Start};
use wire::{CommandId, SandboxId};

use crate::command::digest::request_digest;
use crate::command::registry::{Intent, Wish};
use crate::command::{Commands, LiveCommand, Refusal};
use crate::db::CommandRow;
use crate::model::check::{bad_cursor, page_limit};
use crate::model::random::random_u128;
use crate::observe::clock::now;
use crate::observe::metrics::{Verb, Verdict};
use crate::{
    Command, CommandQuery, CommandRef, CommandSpec, CommandState, DbError, Engine, EngineError, Owner, Page,
    Shared,
};

impl Engine {
    /// Starts a command, or finds the one that was started under this id before. Returns once init has started the
    /// command or has reported why it could not, and does not wait for the result.
    pub async fn run(
        &self,
        owner: &Owner,
        id: SandboxId,
        spec: CommandSpec,
    ) -> Result<CommandRef, EngineError> {
        let began = Instant::now();
        let result = match self.live(owner, id) {
            Ok(live) => {
                let saved = live.before_command().await;
                let start_of = |spec, id: &CommandId| live.start_of(spec, id);
                run_after(self.shared(), &live.commands, spec, saved, start_of).await
            }
            Err(error) => Err(error),
        };
        self.shared().metrics.operation(Verb::Run, Verdict::of(&result), began.elapsed());
        result
    }

    /// A command by its id.
    pub async fn command(
        &self,
        owner: &Owner,
        id: SandboxId,
        command: &CommandId,
    ) -> Result<CommandRef, EngineError> {
        let live = self.live(owner, id)?;
        let not_found = || EngineError::CommandNotFound { id: command.to_string() };
        if let Some(found) = live.commands.by_id(command) {
            found.committed().await.map_err(|_| not_found())?;
            return Ok(CommandRef::new(found));
        }
        let row = self.shared().db.command(live.id, command.clone()).await?.ok_or_else(not_found)?;
        Ok(CommandRef::new(found_command(self.shared(), &live.commands, row).await?))
    }

    /// The commands of a sandbox that have no result yet, oldest first. Reads memory, not rows.
    pub fn running_commands(&self, owner: &Owner, id: SandboxId) -> Result<Vec<CommandRef>, EngineError> {
        let commands = self.live(owner, id)?.commands.live();
        Ok(commands.into_iter().map(CommandRef::new).collect())
    }

    /// A sandbox's commands, oldest first.
    pub async fn commands(
        &self,
        owner: &Owner,
        id: SandboxId,
        query: CommandQuery,
    ) -> Result<Page<Command>, EngineError> {
        let live = self.live(owner, id)?;
        let limit = page_limit(query.limit)?;
        let bad = |_| bad_cursor();
        let after = query.cursor.map(|cursor| cursor.parse().map(Handle)).transpose().map_err(bad)?;
        let mut rows = self.shared().db.commands(live.id, after, limit + 1).await?;
        let more = rows.len() > limit;
        rows.truncate(limit);
        let next_cursor = rows.last().filter(|_| more).map(|last| last.handle.0.to_string());
        let mut items = Vec::with_capacity(rows.len());
        for row in rows {
            items.push(match row.result {
                Some(_) => described(row),
                None => found_command(self.shared(), &live.commands, row).await?.now(),
            });
        }
        Ok(Page { items, next_cursor })
    }
}

/// As [`Engine::run`], in a sandbox that may be hidden. `start_of` completes the spec with the sandbox's own settings.
pub(crate) async fn run_in(
    shared: &Shared,
    commands: &Arc<Commands>,
    spec: CommandSpec,
    start_of: impl FnOnce(CommandSpec, &CommandId) -> Result<Start, EngineError>,
) -> Result<CommandRef, EngineError> {
    run_after(shared, commands, spec, Saved::Yes, start_of).await
}

/// Whether what a sandbox's history promises before a command was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Saved {
    /// The files can be brought back, or no history was asked for.
    Yes,
    /// No snapshot could be taken.
    No,
}

async fn run_after(
    shared: &Shared,
    commands: &Arc<Commands>,
    spec: CommandSpec,
    saved: Saved,
    start_of: impl FnOnce(CommandSpec, &CommandId) -> Result<Start, EngineError>,
) -> Result<CommandRef, EngineError> {
    let id = commands.guest.id;
    let (resume, _using) = (spec.resume, commands.guest.enter(spec.resume).await?);
    let named = spec.id.is_some();
    let command_id = spec.id.clone().unwrap_or_else(|| CommandId::from_random(random_u128()));
    let attendance = spec.attendance;
    let start = start_of(spec, &command_id)?;
    let request_digest = request_digest(&start);
    // Counted before init gets the command, so that the count includes none of the command's own kills.
    let oom_kills_before = commands.guest.oom_kills().await;
    let not_undoable = saved == Saved::No;
    let wish = Wish { id: command_id, start, request_digest, oom_kills_before, attendance, not_undoable };
    let intent = commands.intend(wish)?;
    let found = match intent {
        Intent::New(found) => {
            found.commit_intent();
            found
        }
        Intent::Known(found) => found,
    };
    let metrics = &shared.metrics;
    let found = match crate::observe::timing::ROW.watch(metrics, id, found.committed()).await {
        Ok(()) => found,
        Err(Refusal::Exists(row)) => found_command(shared, commands, CommandRow::clone(&row)).await?,
        Err(Refusal::NoSandbox) => return Err(commands.guest.wrong_state()),
        Err(Refusal::Store(source)) => {
            let source = DbError::Shared { source };
            return Err(EngineError::Store { doing: "write the command's row", source });
        }
    };
    if found.request_digest != request_digest {
        return Err(EngineError::CommandIdReused { id: found.id.clone() });
    }
    crate::observe::timing::START.watch(metrics, id, found.started_in_time(named)).await?;
    Ok(CommandRef::new(found).with_resume(resume))
}

/// The command of a row: from memory while it has no result, else from the row.
async fn found_command(
    shared: &Shared,
    commands: &Arc<Commands>,
    row: CommandRow,
) -> Result<Arc<LiveCommand>, EngineError> {
    if row.result.is_none()
        && let Some(found) = commands.by_id(&row.id)
    {
        return Ok(found);
    }
    // The command may have ended since the row was read.
    let row = match row.result {
        Some(_) => row,
        None => {
            let id = row.id.to_string();
            let again = shared.db.command(commands.guest.id, row.id).await?;
            again.ok_or(EngineError::CommandNotFound { id })?
        }
    };
    if let (Some(result), Some(kept)) = (&row.result, row.attendance.kept)
        && result.ended_at + kept < now()
    {
        return Err(EngineError::CommandExpired { id: row.id });
    }
    let id = row.id.clone();
    let commands = Arc::clone(commands);
    let read = tokio::task::spawn_blocking(move || LiveCommand::recovered(&commands, row)).await;
    let read = read.unwrap_or_else(|error| Err(std::io::Error::other(error)));
    read.map_err(|source| EngineError::Log { doing: "find", id, source })
}

/// A command that has ended, from its row alone.
pub(crate) fn described(row: CommandRow) -> Command {
    let result = row.result.expect("the caller has looked");
    Command {
        id: row.id,
        sandbox: row.sandbox,
        state: CommandState::Ended { pid: result.pid, outcome: result.outcome },
        start: Arc::new(row.start),
        stdout: result.stdout,
        stderr: result.stderr,
        not_undoable: row.not_undoable,
        created_at: row.created_at,
        ended_at: Some(result.ended_at),
    }
}
