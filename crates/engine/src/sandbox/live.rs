//! What a sandbox's driver, its link and its callers share.
//!
//! The driver alone assigns the state; others read it. The table of commands is under a lock of its own, held for
//! moments: starting a command does not pass through the driver, so that the way to init is short.

use std::collections::{BTreeMap, HashMap};
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use runtime::Backend;
use tokio::sync::{Notify, mpsc};
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tracing::warn;
use wire::guest::{COMMANDS_MAX, Handle, Start, Versions};
use wire::launch::{LayerSource, Limits};
use wire::{BuildId, CommandId, SandboxId};

use crate::Shared;
use crate::command::host_timeouts::Backstop;
use crate::command::{Attendance, LiveCommand};
use crate::db::{Identity, RowKey, SandboxRow, Tally, Visibility as RowVisibility};
use crate::error::{EngineError, chain};
use crate::files::transfer::{Transfers, is_transfer};
use crate::guest::{Lane, Outbox, Peer, Violation, versions};
use crate::image::StoredImage;
use crate::model::dialect_notes::Notes;
use crate::model::labels::Labels;
use crate::model::{Owner, Sandbox, SandboxName, Wait};
use crate::observe::events::Happened;
use crate::observe::metrics::Metrics;
use crate::observe::stats::Disk;
use crate::sandbox::activity::{Activity, Use};
use crate::sandbox::driver::Message;
use crate::sandbox::lifecycle::{Disk as DiskState, State};
use crate::sandbox::lifetime::Lifetime;
use crate::template::Version;
use crate::volume::Mounted;

/// Ended commands that a sandbox keeps. The oldest fall off, rows and logs.
const ENDED_MAX: u64 = 10_000;
/// How many full streams the output of all ended commands of a sandbox may add up to.
const ENDED_STREAMS_MAX: u64 = 64;
/// Requests of commands that have not ended, in one sandbox: scripts and environments are held in memory until then.
const STARTS_BYTES_MAX: usize = 64 * 1024 * 1024;
/// How long the count of memory kills may take. It is read from a file on the host.
const OOM_KILLS_WAIT: Duration = Duration::from_secs(5);

/// One sandbox.
pub(crate) struct LiveSandbox {
    pub shared: Arc<Shared>,
    pub id: SandboxId,
    /// Names its row in a change.
    pub row_key: RowKey,
    pub owner: Owner,
    /// What its template was called when it was made.
    template: String,
    /// What it was made from; none for what is built in.
    pub version: Option<Arc<Version>>,
    /// `host`, or a reference in its canonical spelling.
    pub image: String,
    /// What it was asked for as, where that was an alias, and what it is, once it is here.
    image_use: Mutex<(Option<String>, Option<Arc<StoredImage>>)>,
    pub limits: Limits,
    pub mounts: Vec<Mounted>,
    pub outbox: Outbox,
    pub transfers: Transfers,
    pub backstop: Arc<Backstop>,
    pub disk: Disk,
    pub uses: Activity,
    /// The driver's.
    pub inbox: mpsc::Sender<Message>,
    pub driver: Mutex<Option<AbortHandle>>,
    view: Mutex<View>,
    changed: Notify,
    table: Mutex<Table>,
    /// Of the sandbox's memory kills, in the order the kernel counts them: all up to this one are spoken for, each of them the
    /// reason of some command's end or from before the command that the last of them ended.
    oom_kills_claimed: Mutex<u64>,
    /// Held by a capture, so that the captures of one sandbox do not take several of the few places for unpacking.
    pub capturing: tokio::sync::Mutex<()>,
}

/// Where a sandbox waits that stands ready and belongs to no caller yet. It hears of every change instead of the owner's watchers.
pub(crate) trait WaitingRoom: Send + Sync {
    /// Something happened to a sandbox that waits here.
    fn wake(&self);

    /// A sandbox waits here since before this daemon started.
    fn adopt(&self, sandbox: &Arc<LiveSandbox>);
}

/// Who may find it, and who hears what happens to it.
#[derive(Debug, Clone)]
pub(crate) enum Visibility {
    /// Its owner.
    Visible,
    /// Only the pool in which it waits to be claimed.
    PoolMember(Weak<dyn WaitingRoom>),
    /// Only the build whose step runs in it.
    Build(BuildId),
}

/// What others see of it. Its driver alone writes this.
#[derive(Debug, Clone)]
pub(crate) struct View {
    pub name: SandboxName,
    pub state: State,
    pub reason: Option<String>,
    /// What its init speaks, where this daemon speaks none of it.
    pub unspoken: Option<Versions>,
    pub labels: Labels,
    pub notes: Notes,
    pub lifetime: Lifetime,
    /// Its row is written: what is said of it holds after a crash.
    pub recorded: bool,
    pub identity: Arc<Identity>,
    pub visibility: Visibility,
    /// What the pool was called where it waited.
    pub claimed_from: Option<String>,
}

/// The view at this moment, to read. Held for moments.
pub(crate) struct ViewNow<'a>(MutexGuard<'a, View>);

impl Deref for ViewNow<'_> {
    type Target = View;

    fn deref(&self) -> &View {
        &self.0
    }
}

/// Its commands that have no result yet.
#[derive(Default)]
struct Table {
    /// No more commands: the sandbox failed or goes.
    closed: bool,
    /// The engine stops, and the table says nothing any more.
    halted: bool,
    handle_next: u32,
    live: BTreeMap<Handle, Arc<LiveCommand>>,
    by_id: HashMap<CommandId, Handle>,
    starts_bytes: usize,
    ended: u64,
    ended_bytes: u64,
    pruning: bool,
}

/// What became of the wish to start a command.
pub(crate) enum Intent {
    /// It is new; its row must be written.
    New(Arc<LiveCommand>),
    /// It was asked for before.
    Known(Arc<LiveCommand>),
}

impl LiveSandbox {
    pub fn new(
        shared: Arc<Shared>,
        row: &SandboxRow,
        version: Option<Arc<Version>>,
        tally: Tally,
        inbox: mpsc::Sender<Message>,
    ) -> Arc<Self> {
        let view = View {
            name: row.name.clone(),
            state: row.state,
            reason: row.reason.clone(),
            unspoken: None,
            labels: row.labels.clone(),
            notes: row.notes.clone(),
            lifetime: row.lifetime.clone(),
            recorded: false,
            identity: Arc::new(Identity {
                env: row.env.clone(),
                created_at: row.created_at,
                idempotency_key: row.idempotency_key.clone(),
                request_digest: row.request_digest,
            }),
            visibility: match row.visibility {
                RowVisibility::Visible => Visibility::Visible,
                RowVisibility::PoolMember(pool) => Visibility::PoolMember(shared.pools.waiting_room(pool)),
                RowVisibility::Build(build) => Visibility::Build(build),
            },
            claimed_from: row.claimed_from.clone(),
        };
        let table = Table {
            closed: !matches!(row.state, State::Creating | State::Running),
            handle_next: tally.handle_max + 1,
            ended: tally.ended,
            ended_bytes: tally.ended_bytes,
            ..Table::default()
        };
        let mounts = shared.volumes.recovered(&row.mounts);
        Arc::new(Self {
            shared,
            mounts,
            id: row.id,
            row_key: row.key(),
            owner: row.owner.clone(),
            template: row.template.clone(),
            version,
            image: row.image.clone(),
            image_use: Mutex::new((row.image_alias.clone(), None)),
            limits: row.limits,
            outbox: Outbox::default(),
            transfers: Transfers::default(),
            backstop: Arc::default(),
            disk: Disk::default(),
            uses: Activity::default(),
            inbox,
            driver: Mutex::new(None),
            view: Mutex::new(view),
            changed: Notify::new(),
            table: Mutex::new(table),
            oom_kills_claimed: Mutex::new(row.oom_kills),
            capturing: tokio::sync::Mutex::default(),
        })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // The view.

    pub fn view(&self) -> ViewNow<'_> {
        ViewNow(self.change_view())
    }

    /// The driver's alone.
    pub(super) fn change_view(&self) -> MutexGuard<'_, View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn state(&self) -> State {
        self.view().state
    }

    pub fn identity(&self) -> Arc<Identity> {
        Arc::clone(&self.view().identity)
    }

    /// Whether no caller may find it, not even its owner: it waits in a pool, or a step of a build runs in it.
    pub fn is_hidden(&self) -> bool {
        match self.view().visibility {
            Visibility::Visible => false,
            Visibility::PoolMember(_) | Visibility::Build(_) => true,
        }
    }

    /// The build whose step runs in it.
    pub fn build(&self) -> Option<BuildId> {
        match self.view().visibility {
            Visibility::Build(build) => Some(build),
            Visibility::Visible | Visibility::PoolMember(_) => None,
        }
    }

    /// Its init speaks nothing that this daemon does. The row is left as it is, for a daemon that does.
    pub(super) fn set_unspoken(&self, theirs: Versions, reason: String) {
        let mut view = self.change_view();
        (view.state, view.reason) = (State::Failed { disk: DiskState::Whole }, Some(reason));
        view.unspoken = Some(theirs);
        drop(view);
        self.tell_state();
        self.changed.notify_waiters();
    }

    /// What its row says: what is shown, save where that is about this daemon alone.
    pub fn state_in_row(&self) -> State {
        let view = self.view();
        if view.unspoken.is_some() { State::Running } else { view.state }
    }

    /// The driver's alone, after the row says so.
    pub(super) fn set_state(&self, state: State, reason: Option<String>) {
        let mut view = self.change_view();
        (view.state, view.reason, view.unspoken) = (state, reason, None);
        drop(view);
        self.tell_state();
        self.changed.notify_waiters();
    }

    /// The driver's alone: the row is written.
    pub(super) fn set_recorded(&self) {
        self.change_view().recorded = true;
        self.changed.notify_waiters();
    }

    /// Tells whoever watches what its state and name are.
    pub fn tell_state(&self) {
        let View { name, state, reason, .. } = self.view().clone();
        self.tell(Happened::Sandbox { name, state, reason });
    }

    /// Tells whoever watches what happened to it; its pool alone, while it waits there.
    pub fn tell(&self, what: Happened) {
        let visibility = self.view().visibility.clone();
        match visibility {
            Visibility::Visible => self.shared.events.publish(&self.owner, self.id, what),
            Visibility::PoolMember(pool) => {
                if let Some(pool) = pool.upgrade() {
                    pool.wake();
                }
            }
            Visibility::Build(_) => {}
        }
    }

    pub fn describe(&self) -> Sandbox {
        let view = self.view().clone();
        Sandbox {
            id: self.id,
            owner: self.owner.clone(),
            name: view.name,
            state: view.state,
            reason: view.reason,
            template: match &self.version {
                Some(version) => version.head.name().to_string(),
                None => self.template.clone(),
            },
            template_version: self.version.as_ref().map_or(1, |version| version.number),
            image: crate::image::familiar(&self.image),
            image_alias: self.image_alias(),
            image_digest: self.stored_image().map(|image| image.digest),
            limits: self.limits,
            mounts: self.mounts.iter().map(Mounted::described).collect(),
            env: view.identity.env.clone(),
            labels: view.labels,
            notes: view.notes,
            lifetime: view.lifetime,
            claimed_from: view.claimed_from,
            created_at: view.identity.created_at,
        }
    }

    // The image.

    fn image_use(&self) -> MutexGuard<'_, (Option<String>, Option<Arc<StoredImage>>)> {
        self.image_use.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn image_alias(&self) -> Option<String> {
        self.image_use().0.clone()
    }

    /// What it has written, as the source of a layer, and how much that may be.
    pub fn written(&self) -> LayerSource {
        LayerSource::Sandbox { sandbox: self.id, bytes_max: self.limits.disk_bytes.unwrap_or(u64::MAX) }
    }

    /// What it was made from; none for the machine itself, and while the image is on its way.
    pub fn stored_image(&self) -> Option<Arc<StoredImage>> {
        self.image_use().1.clone()
    }

    /// Its row has the image.
    pub fn set_image(&self, image: Arc<StoredImage>) {
        self.image_use().1 = Some(image);
    }

    /// A row says what it was asked for as.
    pub fn set_image_alias(&self, alias: Option<String>) {
        self.image_use().0 = alias;
    }

    /// Waits until it is no longer being made.
    pub async fn made(&self) -> Result<(), EngineError> {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let (recorded, state) = {
                let view = self.view();
                (view.recorded, view.state)
            };
            match state {
                State::Creating => changed.await,
                State::Running | State::Paused(_) if recorded => return Ok(()),
                State::Running | State::Paused(_) => changed.await,
                State::Deleting | State::Failed { .. } => return Err(self.wrong_state()),
            }
        }
    }

    /// Waits for as much of it as a caller wants to be sure of.
    pub async fn awaited(&self, wait: Wait) -> Result<(), EngineError> {
        match wait {
            Wait::Ready => self.made().await,
            Wait::No => self.recorded().await,
        }
    }

    /// Waits until its row is written.
    async fn recorded(&self) -> Result<(), EngineError> {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let (recorded, state) = {
                let view = self.view();
                (view.recorded, view.state)
            };
            match state {
                _ if recorded => return Ok(()),
                State::Deleting => return Err(self.wrong_state()),
                State::Creating | State::Running | State::Paused(_) | State::Failed { .. } => changed.await,
            }
        }
    }

    /// Begins a use, or says that it is too late for one.
    pub fn begin_use(self: &Arc<Self>) -> Result<Use, EngineError> {
        let late = || EngineError::WrongState { id: self.id, state: State::Deleting.word() };
        Use::begin(self).ok_or_else(late)
    }

    /// Why it does not take commands.
    pub fn wrong_state(&self) -> EngineError {
        let view = self.view();
        if let Some(theirs) = view.unspoken {
            return EngineError::NoCommonVersion { id: self.id, theirs, ours: versions() };
        }
        match view.state {
            State::Failed { .. } => {
                let reason = view.reason.clone().unwrap_or_else(|| "the reason was not recorded".into());
                EngineError::SandboxFailed { id: self.id, reason }
            }
            State::Creating | State::Running | State::Paused(_) | State::Deleting => {
                EngineError::WrongState { id: self.id, state: view.state.word() }
            }
        }
    }

    // Commands.

    pub fn command_directory(&self, handle: Handle) -> PathBuf {
        self.output_directory().join(handle.0.to_string())
    }

    /// Where the output of all its commands is.
    pub fn output_directory(&self) -> PathBuf {
        self.shared.output_directory().join(self.id.to_string())
    }

    /// Takes a command into the table, or finds the one that has its id. `make` gets the new command's handle.
    pub fn intend(
        self: &Arc<Self>,
        id: CommandId,
        request_digest: [u8; 32],
        oom_kills_before: Option<u64>,
        attendance: Attendance,
        make: impl FnOnce(Handle) -> Start,
    ) -> Result<Intent, EngineError> {
        if !self.state().takes_commands() {
            return Err(self.wrong_state());
        }
        let mut table = self.table();
        if let Some(hub) = table.by_id.get(&id).and_then(|handle| table.live.get(handle)) {
            return Ok(Intent::Known(Arc::clone(hub)));
        }
        if table.closed {
            drop(table);
            return Err(self.wrong_state());
        }
        if table.live.len() >= COMMANDS_MAX {
            let what = format!("sandbox `{}` has {COMMANDS_MAX} commands under way", self.id);
            return Err(EngineError::Full { what });
        }
        let handle = Handle(table.handle_next);
        let start = make(handle);
        let size = start_size(&start);
        if table.starts_bytes + size > STARTS_BYTES_MAX {
            let what = format!("the commands under way in sandbox `{}` are too long in all", self.id);
            return Err(EngineError::Full { what });
        }
        table.starts_bytes += size;
        table.handle_next += 1;
        let hub =
            LiveCommand::intended(self, id.clone(), start, request_digest, oom_kills_before, attendance);
        table.by_id.insert(id, handle);
        table.live.insert(handle, Arc::clone(&hub));
        Ok(Intent::New(hub))
    }

    /// Takes a command into the table that a row told of.
    pub fn adopt_command(&self, hub: Arc<LiveCommand>) {
        let mut table = self.table();
        table.starts_bytes += start_size(&hub.start);
        table.by_id.insert(hub.id.clone(), hub.handle);
        table.live.insert(hub.handle, hub);
    }

    /// It has no row.
    pub fn forget_command(&self, hub: &LiveCommand) {
        self.backstop.disarm(hub.handle);
        let mut table = self.table();
        if table.live.remove(&hub.handle).is_some() {
            table.starts_bytes -= start_size(&hub.start);
            table.by_id.remove(&hub.id);
        }
    }

    /// Its result is stored.
    pub fn command_ended(self: &Arc<Self>, hub: &LiveCommand, output_bytes: u64) {
        self.forget_command(hub);
        let mut table = self.table();
        table.ended += 1;
        table.ended_bytes += output_bytes;
        if self.too_much(&table).is_some() && !std::mem::replace(&mut table.pruning, true) {
            drop(table);
            let live = Arc::clone(self);
            self.shared.runtime.spawn(async move { live.prune().await });
        }
    }

    /// How many ended commands, and how many bytes of their output, are more than is kept.
    fn too_much(&self, table: &Table) -> Option<(u64, u64)> {
        let bytes_max = ENDED_STREAMS_MAX.saturating_mul(self.shared.config.output_kept_max);
        let more = (table.ended.saturating_sub(ENDED_MAX), table.ended_bytes.saturating_sub(bytes_max));
        (more != (0, 0)).then_some(more)
    }

    /// Drops ended commands, those that ended first, until no more is kept than should be: others end in the meantime.
    async fn prune(self: Arc<Self>) {
        loop {
            let (count, bytes) = {
                let mut table = self.table();
                match self.too_much(&table) {
                    Some(more) => more,
                    None => {
                        table.pruning = false;
                        return;
                    }
                }
            };
            let dropped = match self.shared.db.drop_oldest_commands(self.id, count, bytes).await {
                Ok(dropped) => dropped,
                Err(error) => {
                    warn!(sandbox = %self.id, error = chain(&error), "cannot drop old commands");
                    Vec::new()
                }
            };
            for (handle, bytes) in &dropped {
                self.dropped(*handle, *bytes).await;
            }
            if dropped.is_empty() {
                // Nothing can be dropped now; the next end tries again.
                self.table().pruning = false;
                return;
            }
        }
    }

    /// An ended command has no row any more: its output goes too.
    pub async fn dropped(&self, handle: Handle, bytes: u64) {
        let directory = self.command_directory(handle);
        let removed =
            tokio::task::spawn_blocking(move || crate::command::log::remove_directory(&directory)).await;
        if let Ok(Err(error)) = removed {
            warn!(sandbox = %self.id, %error, "cannot remove the output of an old command");
        }
        let mut table = self.table();
        table.ended = table.ended.saturating_sub(1);
        table.ended_bytes = table.ended_bytes.saturating_sub(bytes);
    }

    /// A command by its number: `None` if it has its result, an error if there never was one that init was told of.
    pub fn live(&self, handle: Handle) -> Result<Option<Arc<LiveCommand>>, Violation> {
        let table = self.table();
        if table.halted {
            // That it is not in the table does not mean that it has its result: init must not be told so.
            return Err(Violation::NobodyListens);
        }
        let hub = table.live.get(&handle).cloned();
        let used = handle.0 < table.handle_next && handle.0 > 0;
        drop(table);
        match hub {
            Some(hub) if hub.is_committed() => Ok(Some(hub)),
            None if used => Ok(None),
            // A row that is about to be written is not known to init.
            Some(_) | None => Err(Violation::UnknownHandle { handle }),
        }
    }

    /// The engine stops: the table of commands answers nothing from now on, and file operations end.
    pub fn halt(&self) {
        let mut table = self.table();
        table.halted = true;
        table.live.clear();
        drop(table);
        self.transfers.close();
    }

    /// Whether the engine stops.
    pub fn is_halted(&self) -> bool {
        self.table().halted
    }

    /// A command by its id, while it has no result.
    pub fn live_by_id(&self, id: &CommandId) -> Option<Arc<LiveCommand>> {
        let table = self.table();
        table.by_id.get(id).and_then(|handle| table.live.get(handle)).cloned()
    }

    /// How many commands have no result.
    pub fn live_count(&self) -> usize {
        self.table().live.len()
    }

    /// All commands whose rows are written and that have no result.
    pub fn live_commands(&self) -> Vec<Arc<LiveCommand>> {
        let hubs: Vec<_> = self.table().live.values().cloned().collect();
        hubs.into_iter().filter(|hub| hub.is_committed()).collect()
    }

    /// Commands may be started again, after a pause.
    pub fn reopen_commands(&self) {
        self.table().closed = false;
    }

    /// No more commands and no more file operations. Gives the commands that have no result.
    pub fn close_commands(&self) -> Vec<Arc<LiveCommand>> {
        self.transfers.close();
        let mut table = self.table();
        table.closed = true;
        table.live.values().cloned().collect()
    }

    // Memory.

    /// How many of its processes were killed for want of memory so far, as the host counts: init cannot be trusted to tell, and
    /// need not know. `None` if that cannot be told.
    pub async fn oom_kills(&self) -> Option<u64> {
        match timeout(OOM_KILLS_WAIT, self.shared.backend.oom_kills(self.id)).await {
            Ok(Ok(count)) => Some(count),
            Ok(Err(error)) => {
                warn!(sandbox = %self.id, error = chain(&error), "cannot tell whether memory ran out");
                None
            }
            Err(_) => {
                warn!(sandbox = %self.id, "cannot tell in time whether memory ran out");
                None
            }
        }
    }

    /// Whether memory ran out under something that began when `before` kills had been counted, and has just been killed. If so,
    /// one kill is spoken for by it, and the number is what the sandbox's row should say.
    ///
    /// The kernel counts per sandbox. So of several commands at once, one that is killed by other means may be taken for the one
    /// whose child ran out of memory in the same time; but each kill is told of once, and never of what began after it.
    pub async fn claim_oom_kill(&self, before: Option<u64>) -> Option<u64> {
        let (before, count) = (before?, self.oom_kills().await?);
        let mut claimed = self.oom_kills_claimed.lock().unwrap_or_else(PoisonError::into_inner);
        let first = before.max(*claimed) + 1;
        (first <= count).then(|| {
            *claimed = first;
            first
        })
    }
}

/// About what a request takes in memory.
pub(crate) fn start_size(start: &Start) -> usize {
    let program = match &start.program {
        wire::guest::Program::Argv(argv) => argv.iter().map(|argument| argument.len() + 24).sum(),
        wire::guest::Program::Shell { script } => script.len(),
        // Not a command's: bounded by the length of a path.
        wire::guest::Program::Files(_) => 0,
    };
    let env: usize = start.env.iter().map(|(name, value)| name.len() + value.len() + 48).sum();
    program + env + 512
}

/// How long anything may wait in a driver's inbox before the engine says that it is stuck.
pub(crate) const INBOX_WAIT: Duration = Duration::from_secs(10);

impl Peer for LiveSandbox {
    fn id(&self) -> SandboxId {
        self.id
    }

    fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    fn backend(&self) -> &dyn Backend {
        self.shared.backend.as_ref()
    }

    fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }

    fn lane(&self, handle: Handle) -> Result<Option<Arc<dyn Lane>>, Violation> {
        if is_transfer(handle) {
            return Ok(self.transfers.live(handle).map(|transfer| transfer as Arc<dyn Lane>));
        }
        Ok(self.live(handle)?.map(|command| command as Arc<dyn Lane>))
    }

    fn lanes(&self) -> Vec<Arc<dyn Lane>> {
        let commands = self.live_commands().into_iter().map(|command| command as Arc<dyn Lane>);
        commands.chain(self.transfers.all().into_iter().map(|transfer| transfer as Arc<dyn Lane>)).collect()
    }

    fn adopt_orphan(self: Arc<Self>, handle: Handle) {
        if is_transfer(handle) && self.transfers.live(handle).is_none() {
            self.transfers.adopt_orphan(&self, handle);
        }
    }
}
