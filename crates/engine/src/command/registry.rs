//! A sandbox's commands that have no result yet, and the limits on how many ended commands are kept.
//!
//! The table has its own lock, which is held briefly: starting a command does not pass through the sandbox's driver, so
//! that the path to init is short.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tracing::warn;
use wire::CommandId;
use wire::guest::{COMMANDS_MAX, Handle, Start};

use super::LiveCommand;
use super::budget::Account;
use super::host_timeouts::Backstop;
use super::log::{LogWriters, RETRY};
use super::start::start_size;
use crate::db::{CommandRow, Db, Tally};
use crate::error::{EngineError, chain};
use crate::guest::{Guest, Violation};
use crate::model::attendance::Attendance;

/// How many ended commands a sandbox keeps. The oldest are dropped, with rows and logs.
const ENDED_MAX: u64 = 10_000;
/// The total size of the requests of running commands in one sandbox: scripts and environments stay in memory until the
/// end.
const STARTS_BYTES_MAX: usize = 64 * 1024 * 1024;

/// The commands of one sandbox.
pub(crate) struct Commands {
    pub guest: Arc<Guest>,
    pub(super) db: Arc<Db>,
    pub(super) logs: Arc<LogWriters>,
    /// Where the output of all of them is.
    pub directory: PathBuf,
    /// How many bytes of each stream are kept.
    pub(super) kept_max: u64,
    pub timeouts: Backstop,
    /// How much output they keep.
    pub(super) account: Account,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// No more commands may start: the sandbox failed or is being deleted.
    closed: bool,
    /// The engine is stopping, and lookups in the table fail.
    halted: bool,
    /// The output is being removed with the sandbox.
    gone: bool,
    handle_next: u32,
    live: BTreeMap<Handle, Arc<LiveCommand>>,
    by_id: HashMap<CommandId, Handle>,
    starts_bytes: usize,
    ended: u64,
    pruning: bool,
}

/// Resources that the commands of all sandboxes share.
pub(crate) struct Storage {
    pub db: Arc<Db>,
    pub logs: Arc<LogWriters>,
    /// Where the output of this sandbox's commands is.
    pub directory: PathBuf,
    /// How many bytes of each stream are kept.
    pub kept_max: u64,
    /// Holds what the commands that have ended keep.
    pub account: Account,
}

/// The result of registering a command.
pub(crate) enum Intent {
    /// The command is new; its row must be written.
    New(Arc<LiveCommand>),
    /// The command was requested before.
    Known(Arc<LiveCommand>),
}

/// A command that a caller wants to start.
pub(crate) struct Wish {
    pub id: CommandId,
    /// Without a handle.
    pub start: Start,
    pub request_digest: [u8; 32],
    /// The sandbox's memory kills so far, if known.
    pub oom_kills_before: Option<u64>,
    pub attendance: Attendance,
    /// Whether the history has no snapshot of the files before it, because that failed.
    pub not_undoable: bool,
}

impl Commands {
    /// `open`: whether the sandbox's state allows commands.
    pub fn new(guest: Arc<Guest>, storage: Storage, tally: Tally, open: bool) -> Arc<Self> {
        let Storage { db, logs, directory, kept_max, account } = storage;
        let table = Table {
            closed: !open,
            handle_next: tally.handle_max + 1,
            ended: tally.ended,
            ..Table::default()
        };
        let (timeouts, table) = (Backstop::default(), Mutex::new(table));
        let commands = Arc::new(Self { guest, db, logs, directory, kept_max, timeouts, account, table });
        commands.account.join(&commands);
        commands
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the output of one of them is.
    pub fn directory_of(&self, handle: Handle) -> PathBuf {
        self.directory.join(handle.0.to_string())
    }

    /// Adds a command to the table, or finds the one that has its id.
    pub fn intend(self: &Arc<Self>, wish: Wish) -> Result<Intent, EngineError> {
        let id = self.guest.id;
        if !self.guest.takes_commands() {
            return Err(self.guest.wrong_state());
        }
        let mut table = self.table();
        if let Some(command) = table.by_id.get(&wish.id).and_then(|handle| table.live.get(handle)) {
            return Ok(Intent::Known(Arc::clone(command)));
        }
        if table.closed {
            drop(table);
            return Err(self.guest.wrong_state());
        }
        if table.live.len() >= COMMANDS_MAX {
            let what = format!("sandbox `{id}` has {COMMANDS_MAX} commands under way");
            return Err(EngineError::Full { what });
        }
        let size = start_size(&wish.start);
        if table.starts_bytes + size > STARTS_BYTES_MAX {
            let what = format!("the commands under way in sandbox `{id}` are too long in all");
            return Err(EngineError::Full { what });
        }
        let handle = Handle(table.handle_next);
        table.starts_bytes += size;
        table.handle_next += 1;
        table.by_id.insert(wish.id.clone(), handle);
        let command = LiveCommand::intended(self, handle, wish);
        table.live.insert(handle, Arc::clone(&command));
        Ok(Intent::New(command))
    }

    /// Adds a command to the table that was found in a row. Blocks.
    pub fn adopt(self: &Arc<Self>, row: CommandRow) -> std::io::Result<()> {
        let command = LiveCommand::recovered(self, row)?;
        command.charge(&mut command.lane.lock());
        let mut table = self.table();
        table.starts_bytes += start_size(&command.lane.start);
        table.by_id.insert(command.id.clone(), command.lane.handle());
        table.live.insert(command.lane.handle(), command);
        Ok(())
    }

    /// The command got no row.
    pub(super) fn forget(&self, command: &LiveCommand) {
        let handle = command.lane.handle();
        self.timeouts.disarm(handle);
        let mut table = self.table();
        if table.live.remove(&handle).is_some() {
            table.starts_bytes -= start_size(&command.lane.start);
            table.by_id.remove(&command.id);
        }
    }

    /// The command's result is stored.
    pub(super) fn ended(self: &Arc<Self>, command: &LiveCommand, output_bytes: u64) {
        self.forget(command);
        // From now on, the row says how much is kept.
        let mut state = command.lane.lock();
        self.account.subtract(std::mem::take(&mut state.sink.charged));
        drop(state);
        self.account.add(output_bytes);
        self.table().ended += 1;
        self.prune_if_due();
    }

    /// Drops old commands and old output in the background, if there are too many or too much.
    pub(super) fn prune_if_due(self: &Arc<Self>) {
        let mut table = self.table();
        let due = table.ended > ENDED_MAX || self.account.is_over();
        if due && !std::mem::replace(&mut table.pruning, true) {
            drop(table);
            let commands = Arc::clone(self);
            self.guest.runtime.spawn(async move { commands.prune().await });
        }
    }

    /// Drops the commands that ended first until the limits hold; others may end in the meantime.
    async fn prune(self: Arc<Self>) {
        loop {
            let (count, victim) = {
                let mut table = self.table();
                let count = table.ended.saturating_sub(ENDED_MAX);
                let victim = self.account.victim(&self);
                if table.halted || table.gone || (count == 0 && victim.is_none()) {
                    table.pruning = false;
                    break;
                }
                (count, victim)
            };
            let dropped = match (count, victim) {
                (0, Some((victim, bytes))) => victim.drop_output(bytes).await,
                (count, _) => self.drop_commands(count).await,
            };
            match dropped {
                Ok(true) => {}
                Ok(false) => tokio::time::sleep(RETRY).await,
                Err(error) => {
                    warn!(sandbox = %self.guest.id, error = chain(&error), "cannot drop old commands");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
        // Commands that waited may go on.
        for commands in self.account.siblings() {
            commands.live().iter().for_each(LiveCommand::room_was_made);
        }
    }

    /// Drops the commands that ended first. Returns whether there were any.
    async fn drop_commands(&self, count: u64) -> Result<bool, EngineError> {
        let dropped = self.db.drop_oldest_commands(self.guest.id, count).await?;
        for (handle, bytes) in &dropped {
            self.dropped(*handle, *bytes).await;
        }
        Ok(!dropped.is_empty())
    }

    /// Drops output until `bytes` are freed: first that of the commands that ended first, then the oldest output of
    /// the running command that keeps the most. Returns whether anything was freed.
    async fn drop_output(self: Arc<Self>, bytes: u64) -> Result<bool, EngineError> {
        let dropped = self.db.drop_oldest_output(self.guest.id, bytes).await?;
        for (handle, bytes) in &dropped {
            self.remove_output(*handle, *bytes).await;
        }
        if !dropped.is_empty() {
            return Ok(true);
        }
        let freed = tokio::task::spawn_blocking(move || {
            let mut freed = 0;
            while freed < bytes {
                let largest =
                    self.live().into_iter().max_by_key(|command| command.lane.lock().sink.kept_bytes());
                match largest.map_or(0, |command| command.drop_front()) {
                    0 => break,
                    more => freed += more,
                }
            }
            freed
        });
        Ok(freed.await.map_err(|_| EngineError::Stopping)? > 0)
    }

    /// The row of an ended command was removed: removes its output too.
    pub async fn dropped(&self, handle: Handle, bytes: u64) {
        self.remove_output(handle, bytes).await;
        let mut table = self.table();
        table.ended = table.ended.saturating_sub(1);
    }

    /// Removes the output of an ended command.
    async fn remove_output(&self, handle: Handle, bytes: u64) {
        let directory = self.directory_of(handle);
        let removed = tokio::task::spawn_blocking(move || super::log::remove_directory(&directory)).await;
        if let Ok(Err(error)) = removed {
            warn!(sandbox = %self.guest.id, %error, "cannot remove the output of an old command");
        }
        self.account.subtract(bytes);
    }

    /// How much output they keep.
    pub fn output_bytes(&self) -> u64 {
        self.account.used()
    }

    /// Removes the output of all of them, for a delete. Blocks.
    pub fn remove_all_output(&self) -> std::io::Result<()> {
        self.table().gone = true;
        super::log::remove_directory(&self.directory)?;
        self.account.clear();
        Ok(())
    }

    /// A command by its number: `None` if it has its result, an error if init was never given such a command.
    pub fn by_handle(&self, handle: Handle) -> Result<Option<Arc<LiveCommand>>, Violation> {
        let table = self.table();
        if table.halted {
            // The command may be missing although it has no result, so init must not be told that it has one.
            return Err(Violation::NobodyListens);
        }
        let command = table.live.get(&handle).cloned();
        let used = handle.0 < table.handle_next && handle.0 > 0;
        drop(table);
        match command {
            Some(command) if command.is_committed() => Ok(Some(command)),
            None if used => Ok(None),
            // Init cannot know a command whose row is still being written.
            Some(_) | None => Err(Violation::UnknownHandle { handle }),
        }
    }

    /// A command by its id, while it has no result.
    pub fn by_id(&self, id: &CommandId) -> Option<Arc<LiveCommand>> {
        let table = self.table();
        table.by_id.get(id).and_then(|handle| table.live.get(handle)).cloned()
    }

    /// How many have no result.
    pub fn count(&self) -> usize {
        self.table().live.len()
    }

    /// All commands that have a row and no result.
    pub fn live(&self) -> Vec<Arc<LiveCommand>> {
        let commands: Vec<_> = self.table().live.values().cloned().collect();
        commands.into_iter().filter(|command| command.is_committed()).collect()
    }

    /// Rejects new commands from now on. Returns the commands that have no result.
    pub fn close(&self) -> Vec<Arc<LiveCommand>> {
        let mut table = self.table();
        table.closed = true;
        table.live.values().cloned().collect()
    }

    /// Commands may be started again, after a pause.
    pub fn reopen(&self) {
        self.table().closed = false;
    }

    /// The engine is stopping: all lookups fail from now on.
    pub fn halt(&self) {
        let mut table = self.table();
        table.halted = true;
        table.live.clear();
    }

    /// Whether the engine is stopping.
    pub(super) fn is_halted(&self) -> bool {
        self.table().halted
    }
}
