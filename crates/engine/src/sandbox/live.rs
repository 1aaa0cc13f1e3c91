//! What a sandbox's driver, its link and its callers share.
//!
//! The driver alone assigns the state; others read it. What runs in it, `commands` and `transfers`, knows of it only what
//! [`Host`] and [`Guest`] say.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use tokio::task::AbortHandle;
use wire::guest::{Handle, Start, Versions};
use wire::launch::{LayerSource, Limits};
use wire::{BuildId, CommandId, SandboxId};

use crate::Shared;
use crate::command::start::{Surroundings, start_of};
use crate::command::{Commands, LiveCommand, Storage};
use crate::db::{Identity, RowKey, SandboxRow, Tally, Visibility as RowVisibility};
use crate::error::EngineError;
use crate::files::transfer::{Transfers, is_transfer};
use crate::guest::{Activity, AnyLane, Guest, Host, MemoryKills, Outbox, Peer, Violation, versions};
use crate::image::StoredImage;
use crate::model::CommandSpec;
use crate::model::dialect_notes::Notes;
use crate::model::labels::Labels;
use crate::model::{Owner, Sandbox, SandboxName, Wait};
use crate::observe::events::Happened;
use crate::observe::stats::Disk;
use crate::sandbox::driver::Message;
use crate::sandbox::lifecycle::{Disk as DiskState, State};
use crate::sandbox::lifetime::Lifetime;
use crate::template::Version;
use crate::volume::Mounted;

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
    /// The sandbox for what runs in it.
    pub guest: Arc<Guest>,
    pub commands: Arc<Commands>,
    pub transfers: Arc<Transfers>,
    pub disk: Disk,
    /// The driver's.
    pub inbox: mpsc::Sender<Message>,
    pub driver: Mutex<Option<AbortHandle>>,
    view: Mutex<View>,
    changed: Notify,
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
        let mounts = shared.volumes.recovered(&row.mounts);
        let storage = Storage {
            db: Arc::clone(&shared.db),
            logs: Arc::clone(&shared.logs),
            directory: shared.output_directory().join(row.id.to_string()),
            kept_max: shared.config.output_kept_max,
        };
        Arc::new_cyclic(|live: &Weak<Self>| {
            let guest = Arc::new(Guest {
                id: row.id,
                outbox: Outbox::default(),
                uses: Activity::default(),
                memory_kills: MemoryKills::new(row.oom_kills),
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
                capturing: tokio::sync::Mutex::default(),
            }
        })
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

    // What runs in it.

    /// What its commands begin with where they name nothing else.
    pub fn with_surroundings<T>(&self, use_them: impl FnOnce(Surroundings<'_>) -> T) -> T {
        let (image, identity) = (self.stored_image(), self.identity());
        use_them(Surroundings {
            template: self.version.as_ref().map(|version| &version.spec),
            image: image.as_ref().map(|image| &image.config),
            env: &identity.env,
        })
    }

    /// What init gets to start a command.
    pub fn start_of(&self, spec: CommandSpec, id: &CommandId) -> Result<Start, EngineError> {
        self.with_surroundings(|around| start_of(around, spec, id))
    }

    /// Commands may be started again, after a pause.
    pub fn reopen_commands(&self) {
        self.commands.reopen();
    }

    /// No more commands and no more file operations. Gives the commands that have no result.
    pub fn close_commands(&self) -> Vec<Arc<LiveCommand>> {
        self.transfers.close();
        self.commands.close()
    }

    /// The engine stops: the table of commands answers nothing from now on, and file operations end.
    pub fn halt(&self) {
        self.commands.halt();
        self.transfers.close();
    }
}

/// How long anything may wait in a driver's inbox before the engine says that it is stuck.
pub(crate) const INBOX_WAIT: Duration = Duration::from_secs(10);

impl Host for LiveSandbox {
    fn takes_commands(&self) -> bool {
        self.state().takes_commands()
    }

    fn wrong_state(&self) -> EngineError {
        LiveSandbox::wrong_state(self)
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
