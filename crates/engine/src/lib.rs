//! What happens to sandboxes, and when.
//!
//! Knows no HTTP and no kernel: it decides, keeps rows and logs, and asks a [`runtime::Backend`].
//! The public face is [`Engine`]; what goes in and comes out of it is in [`model`].
//!
//! Read in this order: [`lifecycle`] and [`lifetime`] decide, `driver` acts on one sandbox, `guest` talks to its init, `command` is
//! where a command's streams and watchers meet, `backstop` ends what init does not, `transfer` the same for a file operation, with [`files`] in front of it, `log` and `store` keep what must not be lost, `directory` holds all
//! sandboxes and their limits, [`pools`] keeps some ready, [`stats`] tells what they use, `events` what happens to them, `recovery` and `sweep` mend.

#![forbid(unsafe_code)]

mod backstop;
pub mod clock;
mod command;
mod directory;
mod driver;
mod error;
mod events;
pub mod files;
mod guest;
mod home;
pub mod images;
mod keeper;
pub mod keys;
pub mod labels;
pub mod lifecycle;
pub mod lifetime;
mod log;
mod measured;
mod metrics;
pub mod model;
mod names;
pub mod notes;
pub mod pools;
mod recovery;
pub mod signing;
mod slow;
pub mod snapshots;
pub mod stats;
mod store;
mod sweep;
pub mod template;
pub mod templates;
pub mod text;
mod transfer;
mod uses;
pub mod volumes;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use prometheus_client::registry::Registry;
use runtime::Backend;
use sha2::{Digest as _, Sha256};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use wire::guest::{Cwd, Handle, Program, Start};
use wire::launch::{Access, Limits, Rootfs};
use wire::{CommandId, SandboxId};

use crate::clock::{Clock, Stamp, SystemClock};
use crate::command::{Hub, Refusal};
use crate::directory::{Directory, Place};
use crate::driver::{Birth, INBOX_MAX, Message};
use crate::events::Events;
use crate::home::{Home, Identity, Intent, Shared};
use crate::images::{Builds, Choice, ImageName, ImageRef, ImageSettings, Images, PullSpec};
use crate::keeper::Keeper;
use crate::keys::{BOOTSTRAP_ID, Keys, random_u64, random_u128};
use crate::labels::SELECTORS_MAX;
use crate::lifecycle::Goal;
use crate::log::LogWriters;
use crate::measured::Measured;
use crate::metrics::{Metrics, Verb, Verdict};
use crate::pools::{Pool, Pools, Standing};
use crate::store::{ClaimRow, CommandRow, SandboxRow, Stamps, Store, Tally};
use crate::template::{LIMITS, WORKSPACE, made_up_name};
use crate::templates::{Preparation, Source, Templates, Version, limits_of};
use crate::uses::Use;
use crate::volumes::{Mounted, Volumes};

pub use command::{ANSWER_SECONDS, CommandRef, Output, STALL_SECONDS, STDIN_SECONDS};
pub use events::{
    About, BadEventId, EVENTS_KEPT_MAX, Event, EventId, Happened, TemplateHappened, Told, Watcher,
};
pub use files::Files;
pub use model::*;
pub use stats::{DiskCount, MachineStats, Stats};
pub use text::{TextEvent, TextOutput};
pub use transfer::{IDLE_SECONDS, TAKE_SECONDS, TRANSFERS_MAX, WATCHES_MAX};

/// The target of spans that are for traces, and not for logs. They cost nothing while nobody listens to it.
pub const TRACE_TARGET: &str = "shoal_trace";
/// The file with all rows, in the data directory.
const DATABASE: &str = "shoal.db";
/// Items on a page when the caller names no number.
pub const PAGE_DEFAULT: u32 = 100;
/// Items on a page at most.
pub const PAGE_MAX: u32 = 1000;
/// A command's program, arguments, script and environment together. Leaves room in a message to init.
pub const COMMAND_BYTES_MAX: usize = 20 * 1024 * 1024;
/// A sandbox's environment: it is added to every command's.
pub const SANDBOX_ENV_BYTES_MAX: usize = 256 * 1024;
/// In bytes.
pub const IDEMPOTENCY_KEY_MAX: usize = 255;
/// Between SIGTERM and the end of a command's whole tree, when a timeout strikes: time to flush a file.
const GRACE: Duration = Duration::from_secs(2);
/// Sandboxes that are connected to at the same time after a restart.
const ADOPTIONS_MAX: usize = 64;
/// Sandboxes that `delete_all` ends at the same time.
const DELETIONS_MAX: usize = 32;
/// Names that are tried for a sandbox that was given none.
const NAME_ATTEMPTS: usize = 100;
/// How often a sandbox is looked for by labels when those that were found go before they are ready.
const FIND_ATTEMPTS: usize = 5;

/// What an engine is built with.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Where rows and logs are kept. Exists, and belongs to this engine alone (the daemon holds its lock).
    pub data_dir: PathBuf,
    /// What all sandboxes together may promise themselves.
    pub capacity: Capacity,
    /// How many bytes of each stream are kept; 64 KiB at least.
    pub output_kept_max: u64,
    /// How images come here.
    pub images: ImageSettings,
}

/// All sandboxes of one data directory. Cheap to clone. Dropping the last clone ends its tasks as a crash would;
/// [`Engine::stop`] does so in good order. Neither harms a sandbox.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Arc<Shared>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.halt();
    }
}

impl Engine {
    /// Whether an engine of this build could start on the rows that are in a data directory, if there are any: they may be a newer
    /// one's. Changes nothing, and needs no lock. Blocks.
    pub fn check(data_dir: &Path) -> Result<(), EngineError> {
        Store::check(&data_dir.join(DATABASE))
            .map_err(|source| EngineError::Store { doing: "open the database", source })
    }

    /// Opens the store, adopts what runs, finishes or undoes what a crash interrupted.
    /// Returns when rows are read; connecting to sandboxes goes on behind it.
    pub async fn start(config: EngineConfig, backend: Arc<dyn Backend>) -> Result<Self, EngineError> {
        let clock = SystemClock::new().map_err(|source| EngineError::Clock { source })?;
        Self::start_at(config, backend, Arc::new(clock)).await
    }

    /// As [`Self::start`], with another clock than the machine's.
    pub async fn start_at(
        config: EngineConfig,
        backend: Arc<dyn Backend>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, EngineError> {
        if config.output_kept_max < log::KEPT_MIN {
            let why = format!("at least {} bytes of each stream are kept", log::KEPT_MIN);
            return Err(EngineError::Invalid { what: "output_kept_max", why });
        }
        let runtime = tokio::runtime::Handle::current();
        let path = config.data_dir.join(DATABASE);
        let metrics = Arc::new(Metrics::default());
        let (store_runtime, store_metrics) = (runtime.clone(), Arc::clone(&metrics));
        let store = tokio::task::spawn_blocking(move || Store::open(&path, store_runtime, store_metrics))
            .await
            .map_err(|_| EngineError::Stopping)?
            .map_err(|source| EngineError::Store { doing: "open the database", source })?;
        let thread = |source| EngineError::Store {
            doing: "start the threads that write output",
            source: StoreError::Thread { source },
        };
        let logs = LogWriters::start(runtime.clone()).map_err(thread)?;
        let keys = Keys::new(store.keys().await?);
        let loaded = store.load_images().await?;
        let images = Images::open(&config, &loaded)?;
        let builds = Builds::open(&config).map_err(|source| EngineError::Store {
            doing: "make the directory of builds",
            source: StoreError::Create { path: config.data_dir.join("builds"), source },
        })?;
        let fresh = [random_u128().to_be_bytes(), random_u128().to_be_bytes()].concat();
        let fresh = fresh.try_into().expect("two times 16 bytes are 32");
        let signer = signing::Signer::new(store.secret("links", fresh).await?);
        let volumes = Volumes::open(&store.load_volumes().await?);
        let (templates, versions) = Templates::open(store.load_templates().await?);
        let pools = Pools::open(store.load_pools().await?, |template| templates.head(template));
        let backend = Arc::new(Measured { backend, metrics: Arc::clone(&metrics) });
        let shared = Arc::new(Shared {
            config,
            backend,
            clock,
            metrics,
            store,
            logs,
            keys,
            images,
            templates,
            volumes,
            pools,
            signer,
            builds,
            runtime,
            directory: Mutex::new(Directory::default()),
            adoptions: Semaphore::new(ADOPTIONS_MAX),
            counts: Semaphore::new(stats::COUNTS_MAX),
            tasks: Mutex::default(),
            events: Arc::new(Events::new()),
        });
        let engine = Self { inner: Arc::new(Inner { shared: Arc::clone(&shared) }) };
        recovery::recover(&shared, loaded.uses, versions).await?;
        images::recover_builds(&engine).await?;
        templates::take_up(&shared);
        pools::take_up(&shared);
        snapshots::take_up(&engine).await?;
        volumes::take_up(&shared);
        shared.backend.foresee(&Rootfs::Host, &kept_limits(&shared, LIMITS));
        let sweeping = shared.runtime.spawn(sweep::keep_swept(Arc::clone(&shared)));
        let collecting = shared.runtime.spawn(images::keep_collected(Arc::clone(&shared)));
        let tasks = [sweeping.abort_handle(), collecting.abort_handle()];
        shared.tasks.lock().unwrap_or_else(PoisonError::into_inner).extend(tasks);
        Ok(engine)
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.inner.shared
    }

    pub(crate) fn home(&self, owner: &Owner, id: SandboxId) -> Result<Arc<Home>, EngineError> {
        self.shared().directory().find(owner, id)
    }

    /// Stops all drivers and flushes the store, without harm to any sandbox.
    pub async fn stop(&self) {
        let shared = Arc::clone(self.shared());
        if tokio::task::spawn_blocking(move || shared.halt()).await.is_err() {
            tracing::error!("stopping the engine panicked");
        }
        self.shared().backend.stop().await;
    }

    /// Compares kernel, disk and rows once, as happens at intervals anyway. Tells how many strays were removed.
    pub async fn sweep(&self) -> usize {
        sweep::sweep(self.shared()).await
    }

    /// Puts what the engine counts into a registry, for whoever shows it.
    pub fn register_metrics(&self, to: &mut Registry) {
        self.shared().metrics.register(to);
    }

    /// Brings those figures up to date that are looked up and not counted. To be called before they are shown.
    pub fn look_at_metrics(&self) {
        self.shared().metrics.look(self.shared());
    }

    /// Deletes every sandbox of every owner, and what daemons before this one have left: the end of a private daemon.
    pub async fn delete_all(&self) -> Result<(), EngineError> {
        // Pools must not fill again behind it.
        self.shared().pools.halt();
        let homes = self.shared().directory().all();
        let mut deletions = JoinSet::new();
        let mut result = Ok(());
        for home in homes {
            if deletions.len() >= DELETIONS_MAX {
                result = result.and(joined(deletions.join_next().await));
            }
            deletions.spawn(async move { delete(&home).await });
        }
        while !deletions.is_empty() {
            result = result.and(joined(deletions.join_next().await));
        }
        // One that ends as soon as it is ready may not have swept yet, and there is no next sweep.
        sweep::sweep(self.shared()).await;
        result
    }

    // Sandboxes.

    /// Makes a sandbox, within the limits of the key that asks. With an idempotency key that was used before, finds the
    /// one that was made then.
    pub async fn create(&self, key: &Key, spec: SandboxSpec, wait: Wait) -> Result<Sandbox, EngineError> {
        self.find_or_make(key, None, spec, wait).await.map(|(sandbox, _)| sandbox)
    }

    /// The owner's sandbox that has all of these labels, the oldest of several; or a new one, as `spec` says and with these
    /// labels too. However many ask at once, one is made. What was found counts as used. A sandbox that has failed or is going
    /// is not found.
    pub async fn get_or_create(
        &self,
        key: &Key,
        labels: Labels,
        spec: SandboxSpec,
        wait: Wait,
    ) -> Result<(Sandbox, Origin), EngineError> {
        if labels.is_empty() {
            let why = "at least one label says which sandbox is meant".into();
            return Err(EngineError::Invalid { what: "match_labels", why });
        }
        let spec = SandboxSpec { labels: spec.labels.with(&labels)?, ..spec };
        self.find_or_make(key, Some(labels), spec, wait).await
    }

    async fn find_or_make(
        &self,
        key: &Key,
        find: Option<Labels>,
        spec: SandboxSpec,
        wait: Wait,
    ) -> Result<(Sandbox, Origin), EngineError> {
        check_env(&spec.env, SANDBOX_ENV_BYTES_MAX)?;
        check_idempotency_key(spec.idempotency_key.as_deref())?;
        check_pool_spec(&spec)?;
        let asked = (
            spec.name.as_ref().map(SandboxName::as_str),
            &spec.template,
            &spec.image,
            &spec.env,
            spec.cpu_millis,
            spec.memory_bytes,
            spec.labels.pairs(),
            spec.lifetime
                .rules()
                .iter()
                .map(|rule| (rule.since.word(), rule.after, rule.action.word()))
                .collect::<Vec<_>>(),
            find.as_ref().map(Labels::pairs),
        );
        // What came later is added where it is asked for, so that requests of older daemons keep their digests.
        let request_digest = match &spec.pool {
            None => digest(&asked),
            Some(pool) => digest(&(asked, pool)),
        };
        let request_digest = match (spec.disk_bytes, spec.mounts.as_slice()) {
            (None, []) => request_digest,
            (disk_bytes, mounts) => digest(&(request_digest, disk_bytes, mount_words(mounts))),
        };
        // A caller who waits is told of an image that does not come before there is a sandbox that failed. For one who does not, the
        // driver pulls; and so it does for an image that is removed as soon as it is here.
        let mut pull = if wait == Wait::Ready { Lacking::Tell } else { Lacking::Pull };
        let mut attempts = FIND_ATTEMPTS;
        loop {
            attempts -= 1;
            match self.admit(key, find.as_ref(), spec.clone(), pull, request_digest, wait)? {
                Admitted::Unprepared(version) => {
                    // However it ends, the next look says so.
                    version.settled().await;
                    attempts = FIND_ATTEMPTS;
                }
                Admitted::Lacks(reference) => {
                    self.pull(key, PullSpec::new(reference)).finished().await?;
                    (pull, attempts) = (Lacking::Pull, FIND_ATTEMPTS);
                }
                Admitted::New(home, created) => {
                    // The driver answers also when this future is dropped: what was begun is finished.
                    created.await.map_err(|_| EngineError::Stopping)??;
                    return Ok((home.describe(), Origin::Made));
                }
                Admitted::Claimed(home, claimed) => {
                    match claimed.await.map_err(|_| EngineError::Stopping)? {
                        Ok(()) => return Ok((home.describe(), Origin::Made)),
                        // It broke this moment. The next one may be better, and if there is none, one is made.
                        Err(Unclaimed::Broken) => attempts = FIND_ATTEMPTS,
                        Err(Unclaimed::Unwritten(error)) => return Err(error),
                    }
                }
                Admitted::Known(home) => match home.awaited(wait).await {
                    Ok(()) => return Ok((home.describe(), Origin::Made)),
                    // The claim that came before this one came to nothing, and is tried again.
                    Err(_) if home.is_waiting() && attempts > 0 => {}
                    Err(error) => return Err(error),
                },
                Admitted::Found(home, _using) => match home.awaited(wait).await {
                    Ok(()) => return Ok((home.describe(), Origin::Found)),
                    // It was deleted while it was being made. That is no failure of what was asked for here.
                    Err(EngineError::WrongState { .. }) if attempts > 0 => {}
                    Err(error) => return Err(error),
                },
            }
        }
    }

    /// Finds the sandbox that is meant, or checks and takes the room, the name and the idempotency key, all in one step, and
    /// starts the driver.
    fn admit(
        &self,
        key: &Key,
        find: Option<&Labels>,
        spec: SandboxSpec,
        lacking: Lacking,
        request_digest: [u8; 32],
        wait: Wait,
    ) -> Result<Admitted, EngineError> {
        let shared = self.shared();
        let mut directory = shared.directory();
        if let Some(used) = &spec.idempotency_key
            && let Some(home) = directory.by_idempotency_key(&key.owner, used)
        {
            return match home.identity().request_digest == request_digest {
                true => Ok(Admitted::Known(home)),
                false => Err(EngineError::IdempotencyKeyReused),
            };
        }
        // One whose time is over this moment is as good as gone, and no use of it can begin.
        let begin = |home: &Arc<Home>| Use::begin(home).map(|using| Admitted::Found(Arc::clone(home), using));
        if let Some(found) = find.and_then(|labels| directory.first_labelled(&key.owner, labels, begin)) {
            return Ok(found);
        }
        let pool = spec.pool.as_ref().map(|pool| shared.pools.find(&key.owner, pool)).transpose()?;
        let spec = match &pool {
            Some(pool) => SandboxSpec { template: pool.template(), ..spec },
            None => spec,
        };
        // Under the directory's lock, so that no template goes between here and the sandbox that holds it.
        let source = shared.templates.find(&key.owner, &spec.template)?;
        let basis = match basis(shared, &key.owner, source, &spec, lacking)? {
            Based::On(basis) => *basis,
            Based::Unprepared(version) => return Ok(Admitted::Unprepared(version)),
        };
        if let Some(claimed) =
            claim(shared, &mut directory, key, pool.as_ref(), &spec, &basis, request_digest)?
        {
            return Ok(claimed);
        }
        directory.check_room(&key.owner, &basis.limits, &key.limits, &shared.config.capacity)?;
        let name = match spec.name {
            Some(name) if directory.name_is_free(&key.owner, &name) => name,
            Some(name) => return Err(EngineError::NameTaken { name: name.to_string() }),
            None => free_name(&directory, &key.owner)?,
        };
        let Basis { version, choice, held, limits, labels, mounts } = basis;
        let rootfs = match held.and_then(|image| shared.images.get(image)) {
            Some(image) => Some(image.rootfs()),
            None => shared.images.rootfs(&key.owner, &choice.name),
        };
        if let (None, Lacking::Tell, ImageName::Reference(reference)) = (&rootfs, lacking, &choice.name) {
            return Ok(Admitted::Lacks(reference.clone()));
        }
        let now = shared.clock.now();
        let row = SandboxRow {
            // One that stands ready brings its id along. None has volumes.
            id: rootfs
                .filter(|_| mounts.is_empty())
                .and_then(|rootfs| shared.backend.reserve(&rootfs, &limits))
                .unwrap_or_else(|| SandboxId::from_random(random_u128())),
            owner: key.owner.clone(),
            name,
            template: spec.template,
            template_version: version.as_ref().map(|version| (version.head.id, version.number)),
            image: choice.name.canonical(),
            image_alias: choice.alias,
            image_held: held,
            limits,
            mounts: mounts.iter().map(Mounted::row).collect(),
            env: spec.env,
            state: State::Creating,
            goal: Goal::Running,
            reason: None,
            idempotency_key: spec.idempotency_key,
            request_digest,
            oom_kills: 0,
            created_at: in_micros(now.wall),
            labels,
            notes: spec.notes,
            lifetime: spec.lifetime,
            stamps: Stamps::born(Stamp::of(now)),
            pool: None,
            claimed_from: None,
        };
        let (home, answer) = enter(shared, directory, row, version, wait);
        Ok(Admitted::New(home, answer))
    }

    /// A sandbox as it is now.
    pub async fn get(&self, owner: &Owner, id: SandboxId) -> Result<Sandbox, EngineError> {
        Ok(self.home(owner, id)?.describe())
    }

    /// A sandbox by its name, or by its id as text where none has such a name.
    pub async fn find(&self, owner: &Owner, text: &str) -> Result<Sandbox, EngineError> {
        let named = self.shared().directory().newest(owner, None, Some(text), &[], 1)?;
        if let Some(home) = named.first() {
            return Ok(home.describe());
        }
        let not_found =
            |_| EngineError::SandboxNotFound { id: text.chars().take(SandboxName::LENGTH_MAX).collect() };
        self.get(owner, text.parse().map_err(not_found)?).await
    }

    /// Where a sandbox's commands run that name no place.
    pub fn working_directory(&self, owner: &Owner, id: SandboxId) -> Result<String, EngineError> {
        Ok(working_directory(&*self.home(owner, id)?))
    }

    /// An owner's sandboxes, newest first.
    pub async fn list(&self, owner: &Owner, query: ListQuery) -> Result<Page<Sandbox>, EngineError> {
        let limit = page_limit(query.limit)?;
        let before = query.cursor.as_deref().map(Place::from_cursor).transpose()?;
        if query.selectors.len() > SELECTORS_MAX {
            let why = format!("there are {} selectors, the limit is {SELECTORS_MAX}", query.selectors.len());
            return Err(EngineError::Invalid { what: "label", why });
        }
        let name = query.name.as_deref();
        let mut homes = self.shared().directory().newest(owner, before, name, &query.selectors, limit + 1)?;
        let more = homes.len() > limit;
        homes.truncate(limit);
        let next_cursor = homes.last().filter(|_| more).map(|last| Place::of_home(last).to_cursor());
        Ok(Page { items: homes.iter().map(|home| home.describe()).collect(), next_cursor })
    }

    /// Gives a sandbox another name.
    pub async fn rename(
        &self,
        owner: &Owner,
        id: SandboxId,
        name: SandboxName,
    ) -> Result<Sandbox, EngineError> {
        self.update(owner, id, SandboxUpdate { name: Some(name), ..SandboxUpdate::default() }).await
    }

    /// Changes a sandbox's name, labels and lifetime, all of it or nothing.
    pub async fn update(
        &self,
        owner: &Owner,
        id: SandboxId,
        update: SandboxUpdate,
    ) -> Result<Sandbox, EngineError> {
        let home = self.home(owner, id)?;
        if update.is_empty() {
            return Ok(home.describe());
        }
        if let Some(name) = &update.name {
            self.shared().directory().reserve_name(&home, name)?;
        }
        // A task of its own: a caller that leaves in the middle must not leave a name reserved for nobody.
        let updating = tokio::spawn(async move {
            let name = update.name.clone();
            let updated = ask(&home, |done| Message::Update { update: Box::new(update), done }).await;
            if let (Err(_), Some(name)) = (&updated, name) {
                home.shared.directory().free_name(&home, &name);
            }
            updated.map(|()| home.describe())
        });
        updating.await.map_err(|_| EngineError::Stopping)?
    }

    /// Begins the clocks of its lifetime anew, all but the one of its creation. Tells what comes of that. A touch that was
    /// answered is never overtaken by an end.
    pub async fn touch(&self, owner: &Owner, id: SandboxId) -> Result<Explanation, EngineError> {
        ask(&*self.home(owner, id)?, |done| Message::Touch { done }).await
    }

    /// Why a sandbox lives, and when and how it ends. Not a use.
    pub async fn explain(&self, owner: &Owner, id: SandboxId) -> Result<Explanation, EngineError> {
        ask(&*self.home(owner, id)?, |done| Message::Explain { done }).await
    }

    /// Returns when nothing of it is left.
    pub async fn delete(&self, owner: &Owner, id: SandboxId) -> Result<(), EngineError> {
        let home = self.home(owner, id)?;
        delete(&home).await
    }

    /// What happens to an owner's sandboxes from now on, or after an event that was seen before; to all of them or to one.
    pub fn watch(
        &self,
        owner: &Owner,
        only: Option<SandboxId>,
        after: Option<EventId>,
    ) -> Result<Watcher, EngineError> {
        if let Some(id) = only {
            self.home(owner, id)?;
        }
        Ok(Watcher::new(Arc::clone(&self.shared().events), owner.clone(), only, after))
    }

    // Commands.

    /// Starts a command, or finds the one that was started under this id before. Answers once init has started it, or
    /// has said why not, and does not wait for its result.
    pub async fn run(
        &self,
        owner: &Owner,
        id: SandboxId,
        spec: CommandSpec,
    ) -> Result<CommandRef, EngineError> {
        let began = Instant::now();
        let result = self.run_unmeasured(owner, id, spec).await;
        self.shared().metrics.operation(Verb::Run, Verdict::of(&result), began.elapsed());
        result
    }

    async fn run_unmeasured(
        &self,
        owner: &Owner,
        id: SandboxId,
        spec: CommandSpec,
    ) -> Result<CommandRef, EngineError> {
        let home = self.home(owner, id)?;
        let _using = home.begin_use()?;
        let named = spec.id.is_some();
        let command_id = spec.id.clone().unwrap_or_else(|| CommandId::from_random(random_u128()));
        let attendance = spec.attendance;
        let start = start_of(&home, spec, &command_id)?;
        let request_digest = digest(&start);
        // Before init hears of it, so that no kill of its own is among them.
        let oom_kills = home.oom_kills().await;
        let intent = home
            .intend(command_id, request_digest, oom_kills, attendance, |handle| Start { handle, ..start })?;
        let hub = match intent {
            Intent::New(hub) => {
                hub.commit_intent();
                hub
            }
            Intent::Known(hub) => hub,
        };
        let metrics = &self.shared().metrics;
        let hub = match slow::ROW.watch(metrics, id, hub.committed()).await {
            Ok(()) => hub,
            Err(Refusal::Exists(row)) => self.found(&home, CommandRow::clone(&row)).await?,
            Err(Refusal::NoSandbox) => return Err(home.wrong_state()),
            Err(Refusal::Store(source)) => {
                let source = StoreError::Shared { source };
                return Err(EngineError::Store { doing: "write the command's row", source });
            }
        };
        if hub.request_digest != request_digest {
            return Err(EngineError::CommandIdReused { id: hub.id.clone() });
        }
        slow::START.watch(metrics, id, hub.started_in_time(named)).await?;
        Ok(CommandRef { hub })
    }

    /// A command by its id.
    pub async fn command(
        &self,
        owner: &Owner,
        id: SandboxId,
        command: &CommandId,
    ) -> Result<CommandRef, EngineError> {
        let home = self.home(owner, id)?;
        let not_found = || EngineError::CommandNotFound { id: command.to_string() };
        if let Some(hub) = home.live_by_id(command) {
            hub.committed().await.map_err(|_| not_found())?;
            return Ok(CommandRef { hub });
        }
        let row = self.shared().store.command(home.id, command.clone()).await?.ok_or_else(not_found)?;
        Ok(CommandRef { hub: self.found(&home, row).await? })
    }

    /// The command that a row tells of: in memory while it has no result, else from the row.
    async fn found(&self, home: &Arc<Home>, row: CommandRow) -> Result<Arc<Hub>, EngineError> {
        if row.result.is_none()
            && let Some(hub) = home.live_by_id(&row.id)
        {
            return Ok(hub);
        }
        // It may have ended since the row was read.
        let row = match row.result {
            Some(_) => row,
            None => {
                let id = row.id.to_string();
                let again = self.shared().store.command(home.id, row.id).await?;
                again.ok_or(EngineError::CommandNotFound { id })?
            }
        };
        if let (Some(result), Some(kept)) = (&row.result, row.attendance.kept)
            && result.ended_at + kept < now()
        {
            return Err(EngineError::CommandExpired { id: row.id });
        }
        let id = row.id.clone();
        let home = Arc::clone(home);
        let read = tokio::task::spawn_blocking(move || Hub::recovered(&home, row)).await;
        let read = read.unwrap_or_else(|error| Err(std::io::Error::other(error)));
        read.map_err(|source| EngineError::Log { doing: "find", id, source })
    }

    /// A sandbox's commands, oldest first.
    pub async fn commands(
        &self,
        owner: &Owner,
        id: SandboxId,
        query: CommandQuery,
    ) -> Result<Page<Command>, EngineError> {
        let home = self.home(owner, id)?;
        let limit = page_limit(query.limit)?;
        let bad = |_| EngineError::Invalid { what: "cursor", why: "it did not come from a page".into() };
        let after = query.cursor.map(|cursor| cursor.parse().map(Handle)).transpose().map_err(bad)?;
        let mut rows = self.shared().store.commands(home.id, after, limit + 1).await?;
        let more = rows.len() > limit;
        rows.truncate(limit);
        let next_cursor = rows.last().filter(|_| more).map(|last| last.handle.0.to_string());
        let mut items = Vec::with_capacity(rows.len());
        for row in rows {
            items.push(match row.result {
                Some(_) => described(row),
                None => self.found(&home, row).await?.now(),
            });
        }
        Ok(Page { items, next_cursor })
    }

    // Files.

    /// A sandbox's files, as a user of the sandbox sees them: a name or a number, optionally with `:group`; root if left out.
    pub fn files(&self, owner: &Owner, id: SandboxId, user: Option<String>) -> Result<Files, EngineError> {
        if user.as_ref().is_some_and(|user| user.is_empty() || user.contains('\0')) {
            let why = "it is a name or a number, optionally with a group".into();
            return Err(EngineError::Invalid { what: "user", why });
        }
        Ok(Files::new(self.home(owner, id)?, user))
    }

    // Keys.

    /// Makes a key. The secret is shown this once.
    pub async fn create_key(&self, spec: KeySpec) -> Result<(Key, KeySecret), EngineError> {
        loop {
            let (id, secret) = KeySecret::generate();
            let KeySpec { owner, admin, metrics_only, limits } = spec.clone();
            let key = Key { id, owner, admin, metrics_only, limits, created_at: now() };
            // An id that is taken by chance is made anew.
            if self.shared().store.put_key(key.clone(), secret.hash()).await? {
                self.shared().keys.put(key.clone(), secret.hash());
                return Ok((key, secret));
            }
        }
    }

    /// Makes `secret` a key of the owner `default` with admin rights, replacing an earlier bootstrap key.
    pub async fn set_bootstrap_key(&self, secret: &KeySecret) -> Result<Key, EngineError> {
        let key = Key {
            id: BOOTSTRAP_ID.into(),
            owner: Owner::default_owner(),
            admin: true,
            metrics_only: false,
            limits: KeyLimits::default(),
            created_at: now(),
        };
        self.shared().store.put_key(key.clone(), secret.hash()).await?;
        self.shared().keys.put(key.clone(), secret.hash());
        Ok(key)
    }

    /// All keys, oldest first.
    pub async fn keys(&self) -> Result<Vec<Key>, EngineError> {
        Ok(self.shared().store.keys().await?.into_iter().map(|(key, _)| key).collect())
    }

    /// Ends a key at once. Sandboxes of its owner stay.
    pub async fn delete_key(&self, id: &str) -> Result<(), EngineError> {
        self.shared().keys.remove(id);
        match self.shared().store.delete_key(id.into()).await? {
            true => Ok(()),
            false => Err(EngineError::KeyNotFound { id: id.into() }),
        }
    }

    /// Tells when a key is deleted.
    pub fn key_end(&self, key: &Key) -> KeyEnd {
        self.shared().keys.end_of(key)
    }

    /// The key that `presented` is, if it is one. Constant time in the secret; answers from memory, no row is read.
    pub fn authenticate(&self, presented: &str) -> Option<Key> {
        self.shared().keys.authenticate(presented)
    }
}

/// Takes a new sandbox into the directory and starts its driver. What it takes there was checked before.
fn enter(
    shared: &Arc<Shared>,
    mut directory: MutexGuard<'_, Directory>,
    row: SandboxRow,
    version: Option<Arc<Version>>,
    wait: Wait,
) -> (Arc<Home>, Created) {
    let keeper = Keeper::newborn(row.lifetime.clone(), shared.clock.now());
    let (inbox, messages) = mpsc::channel(INBOX_MAX);
    let home = Home::new(Arc::clone(shared), &row, version, Tally::default(), inbox);
    directory.insert(&home);
    drop(directory);
    let (created, answer) = oneshot::channel();
    driver::spawn(&home, messages, keeper, Birth::New { row: Box::new(row), wait, created });
    (home, answer)
}

/// Told when a sandbox is made, or why not.
type Created = oneshot::Receiver<Result<(), EngineError>>;

/// Admits a sandbox that will wait in a pool. It counts against what the pool's owner may have, and against the machine.
pub(crate) fn admit_member(
    shared: &Arc<Shared>,
    pool: &Arc<Pool>,
) -> Result<(Arc<Home>, Created), EngineError> {
    let directory = shared.directory();
    let spec = SandboxSpec { template: pool.template(), ..SandboxSpec::default() };
    let source = shared.templates.find(&pool.owner, &spec.template)?;
    let Based::On(basis) = basis(shared, &pool.owner, source, &spec, Lacking::Tell)? else {
        return Err(EngineError::Full { what: format!("template `{}` is not ready", spec.template) });
    };
    directory.check_room(&pool.owner, &basis.limits, &pool.limits(), &shared.config.capacity)?;
    let now = shared.clock.now();
    let row = SandboxRow {
        // Those that the backend has ready are for callers, who wait.
        id: SandboxId::from_random(random_u128()),
        owner: pool.owner.clone(),
        name: free_name(&directory, &pool.owner)?,
        template: spec.template,
        template_version: basis.version.as_ref().map(|version| (version.head.id, version.number)),
        image: basis.choice.name.canonical(),
        image_alias: basis.choice.alias,
        image_held: basis.held,
        limits: basis.limits,
        mounts: Vec::new(),
        env: BTreeMap::new(),
        state: State::Creating,
        goal: Goal::Running,
        reason: None,
        idempotency_key: None,
        request_digest: [0; 32],
        oom_kills: 0,
        created_at: in_micros(now.wall),
        labels: Labels::default(),
        notes: Notes::default(),
        lifetime: Lifetime::default(),
        stamps: Stamps::born(Stamp::of(now)),
        pool: Some(pool.id),
        claimed_from: None,
    };
    let (home, created) = enter(shared, directory, row, basis.version, Wait::Ready);
    pool.enroll(&home, Standing::Making);
    Ok((home, created))
}

/// Gives a create what stands ready in a pool, if there is something and it is just what was asked for.
fn claim(
    shared: &Arc<Shared>,
    directory: &mut Directory,
    key: &Key,
    named: Option<&Arc<Pool>>,
    spec: &SandboxSpec,
    basis: &Basis,
    request_digest: [u8; 32],
) -> Result<Option<Admitted>, EngineError> {
    // None that waits has volumes.
    if spec.image.is_some() || !basis.mounts.is_empty() {
        return Ok(None);
    }
    let version = basis.version.as_ref();
    while let Some((pool, home)) =
        shared.pools.take(&key.owner, named, version, &basis.limits, &shared.metrics)
    {
        // Whoever holds a place in its inbox is heard by its driver, or told that it is no more.
        let Ok(place) = home.inbox.clone().try_reserve_owned() else {
            pool.spoil(&home);
            continue;
        };
        let allowed = directory.check_claim(&key.owner, &key.limits);
        let named = allowed.and_then(|()| match &spec.name {
            Some(name) => directory.reserve_name(&home, name),
            None => Ok(()),
        });
        if let Err(error) = named {
            pool.put_back(&home);
            return Err(error);
        }
        let now = shared.clock.now();
        let identity = Arc::new(Identity {
            env: spec.env.clone(),
            created_at: in_micros(now.wall),
            idempotency_key: spec.idempotency_key.clone(),
            request_digest,
        });
        let row = ClaimRow {
            name: spec.name.clone(),
            labels: basis.labels.clone(),
            notes: spec.notes.clone(),
            lifetime: spec.lifetime.clone(),
            stamps: Stamps { started: Some(Stamp::of(now)), ..Stamps::born(Stamp::of(now)) },
            identity: Arc::clone(&identity),
            claimed_from: pool.name().to_string(),
        };
        let name_before = {
            let mut face = home.face();
            (face.identity, face.labels, face.lifetime) =
                (identity, row.labels.clone(), row.lifetime.clone());
            face.notes = row.notes.clone();
            (face.waits_in, face.claimed_from) = (None, Some(row.claimed_from.clone()));
            face.recorded = false;
            spec.name.clone().map(|name| std::mem::replace(&mut face.name, name))
        };
        directory.show(&home);
        pool.claimed();
        shared.metrics.claimed();
        let (done, claimed) = oneshot::channel();
        let (began, lifetime, claimer) = (Instant::now(), row.lifetime.clone(), Arc::clone(&home));
        // Not through its driver, which hears of it after: whoever claims waits for the row and for nobody else.
        shared.store.claim_sandbox(home.id, row, move |written| {
            let message = match &written {
                Ok(true) => Message::Claimed { lifetime, at: now },
                Ok(false) | Err(_) => Message::Unclaimed,
            };
            let result = end_claim(&claimer, written, name_before, began);
            place.send(message);
            let _ = done.send(result); // A caller that left has a sandbox all the same, as after any create.
        });
        return Ok(Some(Admitted::Claimed(home, claimed)));
    }
    Ok(None)
}

/// Says that a sandbox is somebody's, or lets nobody find it any more.
fn end_claim(
    home: &Arc<Home>,
    written: Result<bool, StoreError>,
    name_before: Option<SandboxName>,
    began: Instant,
) -> Result<(), Unclaimed> {
    if let Ok(true) = written {
        if let Some(before) = name_before {
            home.shared.directory().free_name(home, &before);
        }
        home.set_recorded();
        home.tell_state();
        home.shared.metrics.operation(Verb::Create, Verdict::Ok, began.elapsed());
        return Ok(());
    }
    {
        // Its name and its key are free for the next attempt.
        let mut directory = home.shared.directory();
        directory.hide(home);
        let mut face = home.face();
        face.waits_in = Some(Weak::new());
        let claimed_name = name_before.map(|before| std::mem::replace(&mut face.name, before));
        drop(face);
        if let Some(name) = claimed_name {
            directory.free_name(home, &name);
        }
    }
    Err(match written {
        Ok(_) => Unclaimed::Broken,
        Err(source) => {
            Unclaimed::Unwritten(EngineError::Store { doing: "write the claim of the sandbox", source })
        }
    })
}

fn free_name(directory: &Directory, owner: &Owner) -> Result<SandboxName, EngineError> {
    (0..NAME_ATTEMPTS)
        .map(|_| made_up_name(random_u64()))
        .find(|name| directory.name_is_free(owner, name))
        .ok_or_else(|| EngineError::Full { what: "no free name was found".into() })
}

/// What a new sandbox is made from: what its template says, and what the request says instead.
fn basis(
    shared: &Shared,
    owner: &Owner,
    source: Source,
    spec: &SandboxSpec,
    lacking: Lacking,
) -> Result<Based, EngineError> {
    let template = source.spec();
    let version = match source {
        Source::BuiltIn => None,
        Source::Version(version) => Some(version),
    };
    let (choice, held) = match (&spec.image, &version) {
        (Some(image), _) => (shared.images.choose(image)?, None),
        (None, None) => (shared.images.choose(&template.image)?, None),
        (None, Some(version)) => match version.preparation() {
            Preparation::Ready(prepared) => {
                let name = ImageName::parse(&prepared.resolved)?;
                let is_alias = prepared.resolved != template.image;
                let alias = is_alias.then(|| images::familiar(&template.image));
                (Choice { name, alias }, prepared.image)
            }
            Preparation::Failed { reason } => {
                return Err(EngineError::TemplateFailed { name: spec.template.clone(), reason });
            }
            // One that was replaced this moment has a successor at the next look.
            Preparation::Preparing | Preparation::Replaced if lacking == Lacking::Tell => {
                return Ok(Based::Unprepared(Arc::clone(version)));
            }
            Preparation::Preparing | Preparation::Replaced => (shared.images.choose(&template.image)?, None),
        },
    };
    let own = limits_of(&template);
    let limits = Limits {
        cpu_millis: spec.cpu_millis.unwrap_or(own.cpu_millis),
        memory_bytes: spec.memory_bytes.unwrap_or(own.memory_bytes),
        disk_bytes: spec.disk_bytes.or(own.disk_bytes),
        ..own
    };
    templates::check_limits(limits.cpu_millis, limits.memory_bytes)?;
    if let Some(bytes) = spec.disk_bytes {
        templates::check_disk(bytes)?;
        if !shared.backend.store().limits {
            return Err(EngineError::DiskLimitsUnsupported);
        }
    }
    let limits = kept_limits(shared, limits);
    let labels = template.labels.with(&spec.labels)?;
    let mounts = volumes::merged(template.mounts, spec.mounts.clone());
    let mounts = shared.volumes.resolve(owner, mounts)?;
    Ok(Based::On(Box::new(Basis { version, choice, held, limits, labels, mounts })))
}

/// What becomes of a create whose image is not here.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lacking {
    /// Nothing yet: it is told, and asked again.
    Tell,
    /// The driver pulls it.
    Pull,
}

/// What a new sandbox is made from.
struct Basis {
    version: Option<Arc<Version>>,
    choice: Choice,
    /// Just which image, where the template holds one.
    held: Option<::image::Digest>,
    limits: Limits,
    labels: Labels,
    mounts: Vec<Mounted>,
}

/// Limits as far as they are kept: what is said of a sandbox is what holds.
fn kept_limits(shared: &Shared, limits: Limits) -> Limits {
    let disk_bytes = limits.disk_bytes.filter(|_| shared.backend.store().limits);
    Limits { disk_bytes, ..limits }
}

/// Mounts in the words that a digest takes.
fn mount_words(mounts: &[VolumeMount]) -> Vec<(&str, &str, bool)> {
    let words = |mount: &VolumeMount| mount.access == Access::ReadOnly;
    mounts.iter().map(|mount| (mount.volume.as_str(), mount.path.as_str(), words(mount))).collect()
}

enum Based {
    On(Box<Basis>),
    /// The template is not ready yet.
    Unprepared(Arc<Version>),
}

/// Why a sandbox was not given to whoever claimed it. It goes then, and is nobody's.
enum Unclaimed {
    /// It broke before.
    Broken,
    /// The row could not be written.
    Unwritten(EngineError),
}

enum Admitted {
    /// This template must be ready first.
    Unprepared(Arc<Version>),
    /// This image is needed first.
    Lacks(ImageRef),
    New(Arc<Home>, Created),
    /// It stood ready, and is being given to whoever asked.
    Claimed(Arc<Home>, oneshot::Receiver<Result<(), Unclaimed>>),
    /// The idempotency key was used before.
    Known(Arc<Home>),
    /// It has the labels that were asked for, and is kept alive for whoever asked.
    Found(Arc<Home>, Use),
}

/// Asks a driver for something that it does in a moment.
async fn ask<T>(
    home: &Home,
    message: impl FnOnce(oneshot::Sender<Result<T, EngineError>>) -> Message,
) -> Result<T, EngineError> {
    let (done, answer) = oneshot::channel();
    let over = || match gone(home) {
        Ok(()) => EngineError::SandboxNotFound { id: home.id.to_string() },
        Err(error) => error,
    };
    match home.inbox.send_timeout(message(done), home::INBOX_WAIT).await {
        Ok(()) => answer.await.unwrap_or_else(|_| Err(over())),
        Err(mpsc::error::SendTimeoutError::Timeout(_)) => Err(EngineError::Unresponsive { id: home.id }),
        Err(mpsc::error::SendTimeoutError::Closed(_)) => Err(over()),
    }
}

async fn delete(home: &Home) -> Result<(), EngineError> {
    let (done, answer) = oneshot::channel();
    let sent = home
        .inbox
        .send_timeout(Message::Delete { done, cause: tracing::Span::current() }, home::INBOX_WAIT)
        .await;
    match sent {
        Ok(()) => {}
        Err(mpsc::error::SendTimeoutError::Timeout(_)) => {
            return Err(EngineError::Unresponsive { id: home.id });
        }
        Err(mpsc::error::SendTimeoutError::Closed(_)) => return gone(home),
    }
    match answer.await {
        Ok(result) => result,
        Err(_) => gone(home),
    }
}

/// The driver is no more: because the sandbox is gone, or because the engine stops.
fn gone(home: &Home) -> Result<(), EngineError> {
    let directory = home.shared.directory();
    match directory.get(home.id) {
        None if directory.is_stray(home.id) => Ok(()),
        None | Some(_) => Err(EngineError::Stopping),
    }
}

fn joined(
    result: Option<Result<Result<(), EngineError>, tokio::task::JoinError>>,
) -> Result<(), EngineError> {
    match result {
        Some(Ok(result)) => result,
        Some(Err(_)) => Err(EngineError::Stopping),
        None => Ok(()),
    }
}

/// Now, as a row can keep it.
pub(crate) fn now() -> SystemTime {
    in_micros(SystemTime::now())
}

/// A time as a row can keep it: in microseconds.
fn in_micros(time: SystemTime) -> SystemTime {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    UNIX_EPOCH + Duration::from_micros(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}

pub(crate) fn digest(request: &impl serde::Serialize) -> [u8; 32] {
    let text = serde_json::to_vec(request).expect("requests are made of types that JSON can write");
    Sha256::digest(&text).into()
}

fn page_limit(limit: Option<u32>) -> Result<usize, EngineError> {
    match limit.unwrap_or(PAGE_DEFAULT) {
        limit @ 1..=PAGE_MAX => Ok(limit as usize),
        limit => {
            let why = format!("it is 1 to {PAGE_MAX}, not {limit}");
            Err(EngineError::Invalid { what: "limit", why })
        }
    }
}

/// Whoever names a pool takes what is in it as it is.
fn check_pool_spec(spec: &SandboxSpec) -> Result<(), EngineError> {
    let limited = spec.cpu_millis.is_some() || spec.memory_bytes.is_some() || spec.disk_bytes.is_some();
    match &spec.pool {
        Some(_) if limited || spec.image.is_some() || !spec.mounts.is_empty() => {
            let why = "its sandboxes are made already: image, limits and mounts are its template's".into();
            Err(EngineError::Invalid { what: "pool", why })
        }
        Some(_) | None => Ok(()),
    }
}

fn check_idempotency_key(key: Option<&str>) -> Result<(), EngineError> {
    match key {
        Some(key)
            if key.is_empty() || key.len() > IDEMPOTENCY_KEY_MAX || key.chars().any(char::is_control) =>
        {
            let why = format!("it is 1 to {IDEMPOTENCY_KEY_MAX} bytes without control characters");
            Err(EngineError::Invalid { what: "idempotency key", why })
        }
        Some(_) | None => Ok(()),
    }
}

pub(crate) fn check_env(env: &BTreeMap<String, String>, bytes_max: usize) -> Result<(), EngineError> {
    let invalid = |why: String| Err(EngineError::Invalid { what: "env", why });
    for (name, value) in env {
        if name.is_empty() || name.contains(['=', '\0']) {
            return invalid(format!("{name:.64?} cannot be the name of a variable"));
        }
        if value.contains('\0') {
            return invalid(format!("the value of `{name:.64}` contains a NUL byte"));
        }
    }
    let size: usize = env.iter().map(|(name, value)| name.len() + value.len() + 2).sum();
    if size > bytes_max {
        return invalid(format!("it has {size} bytes, the limit is {bytes_max}"));
    }
    Ok(())
}

/// What init is told, save for the handle. Environment: ours, the image's, the template's, the sandbox's, the command's; the later
/// wins.
fn start_of(home: &Home, mut spec: CommandSpec, id: &CommandId) -> Result<Start, EngineError> {
    let invalid = |what, why: &str| Err(EngineError::Invalid { what, why: why.into() });
    check_env(&spec.env, COMMAND_BYTES_MAX)?;
    let image = home.stored_image();
    let config = image.as_ref().map(|image| &image.config);
    let template = home.version.as_ref().map(|version| &version.spec);
    if let Program::Argv(argv) = &mut spec.program
        && argv.is_empty()
    {
        match (template.filter(|template| !template.command.is_empty()), config) {
            (Some(template), _) => argv.extend(template.command.iter().cloned()),
            (None, Some(config)) => {
                argv.extend(config.entrypoint.iter().chain(&config.command).cloned());
            }
            (None, None) => {}
        }
    }
    match &spec.program {
        Program::Argv(argv) if argv.first().is_none_or(String::is_empty) => {
            return invalid("argv", "it names no program");
        }
        Program::Argv(argv) if argv.iter().any(|argument| argument.contains('\0')) => {
            return invalid("argv", "an argument contains a NUL byte");
        }
        Program::Shell { script } if script.contains('\0') => {
            return invalid("script", "it contains a NUL byte");
        }
        Program::Files(_) => return invalid("program", "a file operation is not a command"),
        Program::Argv(_) | Program::Shell { .. } => {}
    }
    let cwd = match spec.cwd {
        Some(path) if !path.starts_with('/') => return invalid("cwd", "it is not an absolute path"),
        Some(path) if path.contains('\0') => return invalid("cwd", "it contains a NUL byte"),
        Some(path) => Cwd::Named(path),
        None => Cwd::Default(working_directory(home)),
    };
    match spec.user.as_deref() {
        Some(user) if user.is_empty() || user.contains('\0') => {
            return invalid("user", "it is a name or a number, optionally with a group");
        }
        Some(_) | None => {}
    }
    let mut env: BTreeMap<String, String> = BTreeMap::new();
    env.extend(template::ENV.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    env.extend(config.into_iter().flat_map(|config| config.env.iter().cloned()));
    env.extend(template.into_iter().flat_map(|template| template.env.clone()));
    if spec.terminal.is_some() {
        env.insert("TERM".into(), "xterm-256color".into());
    }
    env.extend(home.identity().env.clone());
    env.extend(spec.env);
    let milliseconds = |length: Option<Duration>| {
        length.filter(|length| !length.is_zero()).map(|length| {
            // A length that is not zero stays one: rounding it down would mean "none".
            u64::try_from(length.as_millis()).unwrap_or(u64::MAX).max(1)
        })
    };
    let start = Start {
        handle: Handle(0),
        id: id.to_string(),
        program: spec.program,
        env: env.into_iter().collect(),
        cwd,
        user: spec
            .user
            .or_else(|| template.and_then(|template| template.user.clone()))
            .or_else(|| config.and_then(|config| config.user.clone())),
        stdin: spec.stdin,
        terminal: spec.terminal,
        timeout_ms: milliseconds(spec.timeout),
        idle_timeout_ms: milliseconds(spec.idle_timeout),
        grace_ms: GRACE.as_millis() as u64,
    };
    let size = home::start_size(&start);
    if size > COMMAND_BYTES_MAX {
        let why = format!("it has {size} bytes with its environment, the limit is {COMMAND_BYTES_MAX}");
        return Err(EngineError::Invalid { what: "command", why });
    }
    Ok(start)
}

/// The template's, or the image's unless that is the root, or [`WORKSPACE`].
fn working_directory(home: &Home) -> String {
    let template = home.version.as_ref().and_then(|version| version.spec.cwd.clone());
    template.unwrap_or_else(|| {
        let image = home.stored_image();
        let own = image.as_ref().and_then(|image| image.config.working_directory.as_deref());
        own.filter(|path| *path != "/").unwrap_or(WORKSPACE).to_owned()
    })
}

/// A command that is over, from its row alone.
fn described(row: CommandRow) -> Command {
    let result = row.result.expect("the caller has looked");
    Command {
        id: row.id,
        sandbox: row.sandbox,
        state: CommandState::Ended { pid: result.pid, outcome: result.outcome },
        start: Arc::new(row.start),
        stdout: result.stdout,
        stderr: result.stderr,
        created_at: row.created_at,
        ended_at: Some(result.ended_at),
    }
}
