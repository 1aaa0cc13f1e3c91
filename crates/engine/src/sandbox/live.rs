//! What a sandbox's driver, its link and its callers share.
//!
//! Only the driver sets the state; others read it. `commands` and `transfers`, which manage what runs in the sandbox,
//! use the sandbox only through [`Host`] and [`Guest`].

use std::ops::Deref;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use tokio::sync::{Notify, mpsc};
use tokio::task::AbortHandle;
use wire::guest::{Handle, Start, Versions};
use wire::launch::{LayerSource, Limits, Over};
use wire::{BuildId, CommandId, SandboxId};

use crate::Shared;
use crate::command::start::{Surroundings, start_of};
use crate::command::{Commands, LiveCommand, Storage};
use crate::db::{HookRows, Identity, RowKey, SandboxRow, Tally, Visibility as RowVisibility};
use crate::error::EngineError;
use crate::files::transfer::{Transfers, is_transfer};
use crate::guest::{Activity, AnyLane, Gate, Guest, Host, MemoryKills, Outbox, Peer, Violation, versions};
use crate::image::StoredImage;
use crate::model::CommandSpec;
use crate::model::dialect_notes::Notes;
use crate::model::hook::{HookPoint, HookRun, Hooks};
use crate::model::labels::Labels;
use crate::model::network::NetworkPolicy;
use crate::model::{Owner, Sandbox, SandboxName, Wait};
use crate::observe::events::Happened;
use crate::observe::stats::Disk;
use crate::sandbox::driver::Message;
use crate::sandbox::history::HistoryMark;
use crate::sandbox::lifecycle::{Disk as DiskState, Kept, State};
use crate::sandbox::lifetime::Lifetime;
use crate::sandbox::resume::resume;
use crate::template::Version;
use crate::volume::Mounted;

/// One sandbox.
pub(crate) struct LiveSandbox {
    pub shared: Arc<Shared>,
    pub id: SandboxId,
    /// Identifies the sandbox's row in a change.
    pub row_key: RowKey,
    pub owner: Owner,
    /// The name that the template had when the sandbox was created.
    template: String,
    /// The version of the template that the sandbox was made from; `None` for the built-in template.
    pub version: Option<Arc<Version>>,
    /// `host`, or an image reference in canonical form.
    pub image: String,
    /// The alias by which the caller requested the image, if any, and the image itself once it is on this machine.
    image_use: Mutex<(Option<String>, Option<Arc<StoredImage>>)>,
    pub limits: Limits,
    pub mounts: Vec<Mounted>,
    /// The sandbox as its commands and file transfers see it.
    pub guest: Arc<Guest>,
    pub commands: Arc<Commands>,
    pub transfers: Arc<Transfers>,
    pub disk: Disk,
    /// The inbox of the driver.
    pub inbox: mpsc::Sender<Message>,
    pub driver: Mutex<Option<AbortHandle>>,
    view: Mutex<View>,
    changed: Notify,
    /// The snapshots that the sandbox lies over. Only the driver changes them.
    over: Mutex<Over>,
    /// How many snapshots of its history are kept; 0 for none.
    history: AtomicU32,
    pub(super) history_mark: HistoryMark,
    hooks: Mutex<HookRows>,
    /// Held by a capture, so that the captures of one sandbox do not take several of the few places for unpacking.
    pub capturing: tokio::sync::Mutex<()>,
}

/// Holds ready sandboxes that belong to no caller yet. It is notified of every change, in place of the owner's
/// watchers.
pub(crate) trait WaitingRoom: Send + Sync {
    /// Something happened to a sandbox that waits here.
    fn wake(&self);

    /// Adds a sandbox that was waiting here before this daemon started.
    fn adopt(&self, sandbox: &Arc<LiveSandbox>);
}

/// Who may find the sandbox, and who is notified of its changes.
#[derive(Debug, Clone)]
pub(crate) enum Visibility {
    /// Its owner.
    Visible,
    /// Only the pool where the sandbox waits to be claimed.
    PoolMember(Weak<dyn WaitingRoom>),
    /// Only the build whose step runs in it.
    Build(BuildId),
}

/// What others see of a sandbox. Only its driver writes this.
#[derive(Debug, Clone)]
pub(crate) struct View {
    pub name: SandboxName,
    pub state: State,
    pub reason: Option<String>,
    /// Whether a pause is under way. The state still says that the sandbox runs.
    pub pausing: bool,
    /// When it was paused, if it is.
    pub paused_at: Option<SystemTime>,
    /// When it was last resumed, if this daemon did that.
    pub resumed_at: Option<Instant>,
    /// The protocol versions of the sandbox's init, if this daemon supports none of them.
    pub unspoken: Option<Versions>,
    pub labels: Labels,
    pub notes: Notes,
    pub lifetime: Lifetime,
    pub network: NetworkPolicy,
    /// Whether the row is written, so that everything shown here survives a crash.
    pub recorded: bool,
    pub identity: Arc<Identity>,
    pub visibility: Visibility,
    /// The name of the pool that the sandbox was claimed from.
    pub claimed_from: Option<String>,
}

/// Read access to the view. Held only briefly.
pub(crate) struct ViewNow<'a>(MutexGuard<'a, View>);

impl Deref for ViewNow<'_> {
    type Target = View;

    fn deref(&self) -> &View {
        &self.0
    }
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
            pausing: false,
            paused_at: match row.state {
                State::Paused(_) => row.stamps.paused.map(|stamp| stamp.wall()),
                State::Creating | State::Running | State::Deleting | State::Failed { .. } => None,
            },
            resumed_at: None,
            unspoken: None,
            labels: row.labels.clone(),
            notes: row.notes.clone(),
            lifetime: row.lifetime.clone(),
            network: row.network.clone(),
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
        let mounts = shared.volumes.recovered(&row.mounts);
        let storage = Storage {
            db: Arc::clone(&shared.db),
            logs: Arc::clone(&shared.logs),
            directory: shared.output_directory().join(row.id.to_string()),
            kept_max: shared.config.output_kept_max,
            account: shared.output.account(&row.owner, tally.ended_bytes),
        };
        Arc::new_cyclic(|live: &Weak<Self>| {
            let guest = Arc::new(Guest {
                id: row.id,
                outbox: Outbox::default(),
                uses: Activity::default(),
                memory_kills: MemoryKills::new(row.oom_kills),
                attempts_told: Default::default(),
                backend: Arc::clone(&shared.backend),
                metrics: Arc::clone(&shared.metrics),
                clock: Arc::clone(&shared.clock),
                runtime: shared.runtime.clone(),
                host: Weak::<Self>::clone(live),
            });
            let open = matches!(row.state, State::Creating | State::Running);
            Self {
                commands: Commands::new(Arc::clone(&guest), storage, tally, open),
                transfers: Transfers::new(Arc::clone(&guest)),
                guest,
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
                disk: Disk::default(),
                inbox,
                driver: Mutex::new(None),
                view: Mutex::new(view),
                changed: Notify::new(),
                over: Mutex::new(row.over.clone()),
                history: AtomicU32::new(row.history),
                history_mark: HistoryMark::default(),
                hooks: Mutex::new(row.hooks.clone()),
                capturing: tokio::sync::Mutex::default(),
            }
        })
    }

    // The view.

    pub fn view(&self) -> ViewNow<'_> {
        ViewNow(self.change_view())
    }

    /// Only the driver calls this.
    pub(super) fn change_view(&self) -> MutexGuard<'_, View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn state(&self) -> State {
        self.view().state
    }

    pub fn identity(&self) -> Arc<Identity> {
        Arc::clone(&self.view().identity)
    }

    /// Whether the sandbox is hidden from all callers, even its owner: it waits in a pool, or a step of a build runs
    /// in it.
    pub fn is_hidden(&self) -> bool {
        match self.view().visibility {
            Visibility::Visible => false,
            Visibility::PoolMember(_) | Visibility::Build(_) => true,
        }
    }

    /// The build whose step runs in the sandbox.
    pub fn build(&self) -> Option<BuildId> {
        match self.view().visibility {
            Visibility::Build(build) => Some(build),
            Visibility::Visible | Visibility::PoolMember(_) => None,
        }
    }

    /// Shows the sandbox as failed because its init and this daemon share no protocol version. The row stays as it
    /// is, for a daemon that supports one.
    pub(super) fn set_unspoken(&self, theirs: Versions, reason: String) {
        let mut view = self.change_view();
        (view.state, view.reason) = (State::Failed { disk: DiskState::Whole }, Some(reason));
        view.unspoken = Some(theirs);
        drop(view);
        self.tell_state();
        self.changed.notify_waiters();
    }

    /// The state in the row. It differs from the state that is shown if this daemon shares no protocol version with
    /// init.
    pub fn state_in_row(&self) -> State {
        let view = self.view();
        if view.unspoken.is_some() { State::Running } else { view.state }
    }

    /// Only the driver calls this, after it has written the row.
    pub(super) fn set_state(&self, state: State, reason: Option<String>) {
        let mut view = self.change_view();
        if let (State::Paused(_), State::Running) = (view.state, state) {
            view.resumed_at = Some(Instant::now());
        }
        (view.state, view.reason, view.unspoken) = (state, reason, None);
        view.pausing = false;
        view.paused_at = match state {
            State::Paused(_) => Some(self.shared.clock.now().wall),
            State::Creating | State::Running | State::Deleting | State::Failed { .. } => None,
        };
        drop(view);
        self.tell_state();
        self.changed.notify_waiters();
    }

    /// A pause begins, or has failed. Only the driver calls this.
    pub(super) fn set_pausing(&self, pausing: bool) {
        self.change_view().pausing = pausing;
    }

    /// Only the driver calls this, after it has written the row.
    pub(super) fn set_recorded(&self) {
        self.change_view().recorded = true;
        self.changed.notify_waiters();
    }

    /// Notifies watchers of the current state and name.
    pub fn tell_state(&self) {
        let View { name, state, reason, .. } = self.view().clone();
        self.tell(Happened::Sandbox { name, state, reason });
    }

    /// Notifies watchers of an event; while the sandbox waits in a pool, only the pool.
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
        let HookRows { hooks, runs: hook_runs, .. } = self.hook_rows().clone();
        Sandbox {
            id: self.id,
            owner: self.owner.clone(),
            name: view.name,
            state: view.state,
            reason: view.reason,
            paused_at: view.paused_at,
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
            network: view.network,
            claimed_from: view.claimed_from,
            history: self.history(),
            hooks,
            hook_runs,
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

    /// The snapshots that the sandbox lies over.
    pub fn over(&self) -> Over {
        self.over.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Only the driver calls this, after it has written the row.
    pub(super) fn set_over(&self, over: Over) {
        *self.over.lock().unwrap_or_else(PoisonError::into_inner) = over;
    }

    /// How many snapshots of its history are kept; 0 for none.
    pub fn history(&self) -> u32 {
        self.history.load(Ordering::Relaxed)
    }

    /// Sets how many snapshots of its history are kept, which the row has already.
    pub fn set_history(&self, kept: u32) {
        self.history.store(kept, Ordering::Relaxed);
    }

    fn hook_rows(&self) -> MutexGuard<'_, HookRows> {
        self.hooks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn hooks(&self) -> Hooks {
        self.hook_rows().hooks.clone()
    }

    /// Sets the hooks, which the row has already.
    pub fn set_hooks(&self, hooks: Hooks) {
        self.hook_rows().hooks = hooks;
    }

    /// The hook that is to run when the sandbox runs.
    pub fn hook_due(&self) -> Option<HookPoint> {
        self.hook_rows().due
    }

    pub(super) fn set_hook_due(&self, due: Option<HookPoint>) {
        self.hook_rows().due = due;
    }

    /// A hook has run.
    pub(super) fn set_hook_run(&self, point: HookPoint, run: HookRun) {
        let mut rows = self.hook_rows();
        rows.due = None;
        rows.runs.insert(point, run);
    }

    /// The files that the sandbox has written, as the source of a layer, with their size limit.
    pub fn written(&self) -> LayerSource {
        LayerSource::Sandbox { sandbox: self.id, bytes_max: self.limits.disk_bytes.unwrap_or(u64::MAX) }
    }

    /// The image that the sandbox was made from; `None` for `host`, and until the image is pulled.
    pub fn stored_image(&self) -> Option<Arc<StoredImage>> {
        self.image_use().1.clone()
    }

    /// Sets the image, which the row has already.
    pub fn set_image(&self, image: Arc<StoredImage>) {
        self.image_use().1 = Some(image);
    }

    /// Sets the alias by which the image was requested, from the row.
    pub fn set_image_alias(&self, alias: Option<String>) {
        self.image_use().0 = alias;
    }

    /// Waits until the sandbox is no longer being created.
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

    /// Waits until the sandbox has reached the point that the caller asked for.
    pub async fn awaited(&self, wait: Wait) -> Result<(), EngineError> {
        match wait {
            Wait::Ready => self.made().await,
            Wait::No => self.recorded().await,
        }
    }

    /// Waits until the sandbox's row is written.
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

    /// The error that explains why the sandbox accepts no commands.
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
                // A request that a pause turns away should read why, although the pause is not complete.
                let state = if view.pausing { PAUSED } else { view.state.word() };
                EngineError::WrongState { id: self.id, state }
            }
        }
    }

    // What runs in the sandbox.

    /// The defaults for commands that do not set their own.
    pub fn with_surroundings<T>(&self, use_them: impl FnOnce(Surroundings<'_>) -> T) -> T {
        let (image, identity) = (self.stored_image(), self.identity());
        let policy = self.view().network.clone();
        let placeholders = self.shared.secrets.variables(&self.owner, &policy, self.id);
        use_them(Surroundings {
            template: self.version.as_ref().map(|version| &version.spec),
            image: image.as_ref().map(|image| &image.config),
            env: &identity.env,
            placeholders: &placeholders,
            trust: !crate::network::closes(&self.shared, &policy),
        })
    }

    /// The message to init that starts a command.
    pub fn start_of(&self, spec: CommandSpec, id: &CommandId) -> Result<Start, EngineError> {
        self.with_surroundings(|around| start_of(around, spec, id))
    }

    /// Commands and file operations may be started again, after a pause or a rollback.
    pub fn reopen_commands(&self) {
        self.commands.reopen();
        self.transfers.reopen();
    }

    /// Stops new commands and file operations. Returns the commands that have no result yet.
    pub fn close_commands(&self) -> Vec<Arc<LiveCommand>> {
        self.transfers.close();
        self.commands.close()
    }

    /// The engine is stopping: the table of commands answers no more requests, and file operations end.
    pub fn halt(&self) {
        self.commands.halt();
        self.transfers.close();
    }
}

/// How long a message may wait for room in a driver's inbox before the engine reports that the driver is stuck.
pub(crate) const INBOX_WAIT: Duration = Duration::from_secs(10);

/// The word for a sandbox that is paused, whatever it has kept.
const PAUSED: &str = State::Paused(Kept::Dropped).word();

#[async_trait]
impl Host for LiveSandbox {
    fn takes_commands(&self) -> bool {
        self.state().takes_commands()
    }

    fn gate(&self) -> Gate {
        let view = self.view();
        match view.state {
            State::Paused(_) => Gate::Asleep,
            State::Running if view.pausing => Gate::Asleep,
            State::Running => Gate::Open,
            State::Creating | State::Deleting | State::Failed { .. } => Gate::Shut,
        }
    }

    fn stood_still(&self, within: Duration) -> bool {
        let view = self.view();
        match view.state {
            State::Paused(Kept::Frozen) => true,
            State::Running => view.pausing || view.resumed_at.is_some_and(|at| at.elapsed() < within),
            State::Creating | State::Paused(_) | State::Deleting | State::Failed { .. } => false,
        }
    }

    async fn wake(&self) -> Result<(), EngineError> {
        resume(self, self.shared.keys.limits_of(&self.owner)).await
    }

    fn wrong_state(&self) -> EngineError {
        LiveSandbox::wrong_state(self)
    }

    fn has_no_network(&self) -> bool {
        let policy = self.view().network.clone();
        crate::network::closes(&self.shared, &policy)
    }

    fn tell(&self, what: Happened) {
        LiveSandbox::tell(self, what);
    }
}

impl Peer for LiveSandbox {
    fn guest(&self) -> &Guest {
        &self.guest
    }

    fn lane(&self, handle: Handle) -> Result<Option<Arc<dyn AnyLane>>, Violation> {
        if is_transfer(handle) {
            return Ok(self.transfers.live(handle).map(|transfer| transfer as Arc<dyn AnyLane>));
        }
        Ok(self.commands.by_handle(handle)?.map(|command| command as Arc<dyn AnyLane>))
    }

    fn lanes(&self) -> Vec<Arc<dyn AnyLane>> {
        let commands = self.commands.live().into_iter().map(|command| command as Arc<dyn AnyLane>);
        let transfers = self.transfers.all().into_iter().map(|transfer| transfer as Arc<dyn AnyLane>);
        commands.chain(transfers).collect()
    }

    fn adopt_orphan(&self, handle: Handle) {
        if is_transfer(handle) {
            self.transfers.adopt_orphan(handle);
        }
    }
}
