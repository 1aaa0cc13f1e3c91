//! Decides what happens to sandboxes, and when.
//!
//! This crate knows neither HTTP nor the kernel: it decides, keeps rows and logs, and calls a [`runtime::Backend`].
//! The public interface is [`Engine`]; its methods are in the folders of the nouns that they act on.
//!
//! There is one folder per noun, and each uses only those before it: `error`, [`model`] (inputs and outputs),
//! [`observe`], [`access`], `disk`, `credential`, `db`, [`network`], `guest` (the link to init), `command`, [`files`], [`port`],
//! [`image`], [`volume`], [`template`], [`sandbox`] (which joins the ones before), [`pool`], [`build`], [`snapshot`].

#![forbid(unsafe_code)]

pub mod access;
pub mod build;
mod command;
mod credential;
mod db;
mod disk;
mod error;
pub mod files;
mod guest;
pub mod image;
pub mod model;
pub mod network;
pub mod observe;
pub mod pool;
pub mod port;
pub mod sandbox;
pub mod snapshot;
mod task;
pub mod template;
pub mod volume;
pub mod webhook;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::registry::Registry as MetricsRegistry;
use runtime::{Backend, BackendError};
use tokio::sync::Semaphore;
use wire::SandboxId;
use wire::launch::Rootfs;

use crate::access::keys::Keys;
use crate::access::revoked::Revoked;
use crate::access::signing::Signer;
use crate::build::Builds;
use crate::command::budget::Budgets;
use crate::command::log::LogWriters;
use crate::credential::Secrets;
use crate::credential::keyring::Keyring;
use crate::db::Db;
use crate::disk::HostDisk;
use crate::image::{ImageSettings, Images};
use crate::model::defaults::LIMITS;
use crate::model::random::random;
use crate::network::{NetworkSettings, Networks};
use crate::observe::clock::{Clock, SystemClock, now};
use crate::observe::events::{Events, Keeper};
use crate::observe::measured::Measured;
use crate::observe::metrics::Metrics;
use crate::pool::Pools;
use crate::port::{Links, Ports};
use crate::sandbox::live::LiveSandbox;
use crate::sandbox::registry::Registry;
use crate::template::Templates;
use crate::volume::Volumes;
use crate::webhook::Webhooks;
use std::sync::MutexGuard;
use tokio::task::AbortHandle;

pub use access::calls::Revocation;
pub use access::keys::{KeyEnd, KeySecret};
pub use access::signing::TAG_LENGTH;
pub use command::text::{TextEvent, TextOutput};
pub use command::{ANSWER_SECONDS, CommandRef, Output, STALL_SECONDS, STDIN_SECONDS};
pub use files::Files;
pub use files::transfer::{IDLE_SECONDS, TAKE_SECONDS, TRANSFERS_MAX, WATCHES_MAX};
pub use model::port::{Link, LinkSpec, OpenPort, Port, PortHolder};
pub use model::*;
pub use observe::events::{
    About, BadEventId, Deletion, EVENTS_KEPT_MAX, Event, EventId, Happened, PoolHappened, SnapshotHappened,
    TemplateHappened, Told, VolumeHappened, Watcher,
};
pub use observe::stats::{DiskCount, MachineStats, Stats};

/// The target of spans that are for traces and not for logs. These spans cost nothing unless a subscriber enables the
/// target.
pub const TRACE_TARGET: &str = "shoal_trace";
/// The name of the database file in the data directory.
const DATABASE: &str = "shoal.db";
/// The default number of items on a page.
pub const PAGE_DEFAULT: u32 = 100;
/// The maximum number of items on a page.
pub const PAGE_MAX: u32 = 1000;
/// The maximum total size of a command's program, arguments, script and environment. Leaves room in a message to
/// init.
pub const COMMAND_BYTES_MAX: usize = 20 * 1024 * 1024;
/// The maximum size of a sandbox's environment, which is added to the environment of every command.
pub const SANDBOX_ENV_BYTES_MAX: usize = 256 * 1024;
/// How long a successful check that rows can be written holds.
const WRITABLE_CHECKED: Duration = Duration::from_secs(1);
/// How many sandboxes the engine connects to at the same time after a restart.
const ADOPTIONS_MAX: usize = 64;
/// How many sandboxes are searched for listening ports at the same time. A search takes about a millisecond.
const PORT_LOOKS_MAX: usize = 4;

/// The configuration of an engine.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// The directory for rows and logs. It must exist, and belongs to this engine alone (the daemon holds its lock).
    pub data_dir: PathBuf,
    /// The maximum number of sandboxes, and the maximum sum of their limits.
    pub capacity: Capacity,
    /// How many bytes of each output stream are kept; at least 64 KiB.
    pub output_kept_max: u64,
    /// The settings for images.
    pub images: ImageSettings,
    /// The settings for networks.
    pub network: NetworkSettings,
}

/// All sandboxes of one data directory. Cheap to clone. Dropping the last clone ends the engine's tasks as a crash
/// would; [`Engine::stop`] shuts them down cleanly. Neither affects a running sandbox.
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
    /// Checks that an engine of this build could start with the database in a data directory, if there is one: a
    /// newer build may have written it. Changes nothing, and needs no lock. Blocks.
    pub fn check(data_dir: &Path) -> Result<(), EngineError> {
        Db::check(&data_dir.join(DATABASE))
            .map_err(|source| EngineError::Store { doing: "open the database", source })
    }

    /// Opens the database, adopts running sandboxes, and finishes or undoes what a crash interrupted. Returns when
    /// the rows are read; connecting to sandboxes continues in the background.
    pub async fn start(config: EngineConfig, backend: Arc<dyn Backend>) -> Result<Self, EngineError> {
        let clock = SystemClock::new().map_err(|source| EngineError::Clock { source })?;
        Self::start_at(config, backend, Arc::new(clock)).await
    }

    /// Like [`Self::start`], with a given clock instead of the machine's.
    pub async fn start_at(
        config: EngineConfig,
        backend: Arc<dyn Backend>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, EngineError> {
        if config.output_kept_max < command::log::KEPT_MIN {
            let (least, given) = (command::log::KEPT_MIN, config.output_kept_max);
            return Err(Field::OutputKeptMax.must(format!("be at least {least} bytes, got {given}")));
        }
        let runtime = tokio::runtime::Handle::current();
        let path = config.data_dir.join(DATABASE);
        let metrics = Arc::new(Metrics::default());
        let (store_runtime, store_metrics) = (runtime.clone(), Arc::clone(&metrics));
        let directory = config.data_dir.clone();
        let opened = tokio::task::spawn_blocking(move || {
            let create = |source| DbError::Create { path: directory.clone(), source };
            let disk = Arc::new(HostDisk::open(&directory).map_err(create)?);
            let revoked = Revoked::open(&directory).map_err(create)?;
            let keyring = Keyring::open(&directory).map_err(create)?;
            let db = Db::open(&path, store_runtime, store_metrics, Arc::clone(&disk))?;
            Ok((disk, revoked, keyring, db))
        });
        let (disk, revoked, keyring, db) = opened
            .await
            .map_err(|_| EngineError::Stopping)?
            .map_err(|source| EngineError::Store { doing: "open the database", source })?;
        let thread = |source| EngineError::Store {
            doing: "start the threads that write output",
            source: DbError::Thread { source },
        };
        let logs = LogWriters::start(runtime.clone()).map_err(thread)?;
        let keys = Keys::new(db.keys().await?);
        let loaded = db.load_images().await?;
        let images = Images::open(&config, &loaded)?;
        let builds = Builds::open(&config).map_err(|source| EngineError::Store {
            doing: "make the directory of builds",
            source: DbError::Create { path: config.data_dir.join("builds"), source },
        })?;
        let signer = Signer::new(db.secret("links", random()).await?);
        let layer_names = Signer::new(db.secret("layers", random()).await?);
        let placeholders = Signer::new(db.secret("placeholders", random()).await?);
        let rows = db.load_credentials().await?;
        let secrets = Secrets::new(keyring, placeholders, config.network.registries.clone(), rows);
        let volumes = Volumes::open(&db.load_volumes().await?);
        let (templates, versions) = Templates::open(db.load_templates().await?);
        let links = Links::open(db.load_links(now()).await?);
        let pools = Pools::open(db.load_pools().await?, |template| templates.head(template));
        let output = Budgets::new(config.output_kept_max, disk);
        let backend = Arc::new(Measured { backend, metrics: Arc::clone(&metrics) });
        let networks = Networks::new(&config.network, &config.data_dir);
        let db = Arc::new(db);
        let keeper: Arc<dyn Keeper> = Arc::clone(&db) as _;
        let events = Events::new(db.load_events().await?, Some(keeper));
        let webhooks = Webhooks::open(db.load_webhooks().await?);
        let shared = Arc::new(Shared {
            config,
            networks,
            secrets: Arc::new(secrets),
            backend,
            clock,
            metrics,
            db,
            logs: Arc::new(logs),
            output,
            writable: tokio::sync::Mutex::new(None),
            keys,
            revoked,
            images,
            templates,
            volumes,
            pools,
            ports: Arc::default(),
            port_looks: Semaphore::new(PORT_LOOKS_MAX),
            links,
            signer,
            layer_names,
            builds,
            runtime,
            registry: Mutex::new(Registry::default()),
            adoptions: Semaphore::new(ADOPTIONS_MAX),
            counts: Semaphore::new(observe::stats::COUNTS_MAX),
            tasks: Mutex::default(),
            events,
            webhooks,
            files_freed: tokio::sync::Notify::new(),
        });
        let engine = Self { inner: Arc::new(Inner { shared: Arc::clone(&shared) }) };
        access::calls::finish_revocations(&shared).await;
        for owner in shared.keys.owners() {
            access::calls::apply_output_limit(&shared, &owner);
        }
        sandbox::recovery::recover(&shared, loaded.uses, versions).await?;
        sandbox::recovery::tell_untold(&shared);
        let tending = shared.runtime.spawn(network::tend(Arc::clone(&shared)));
        build::recover(&engine).await?;
        template::resume_interrupted(&shared);
        pool::resume_interrupted(&shared);
        snapshot::resume_interrupted(&engine).await?;
        volume::resume_interrupted(&shared);
        shared.backend.foresee(&Rootfs::Host, &sandbox::admit::kept_limits(&shared, LIMITS));
        let sweeping = shared.runtime.spawn(sandbox::sweep::keep_swept(Arc::clone(&shared)));
        let collecting =
            shared.runtime.spawn(image::keep_collected(Arc::clone(&shared), template::prepare_again));
        let freeing = shared.runtime.spawn(snapshot::keep_freed(Arc::downgrade(&engine.inner)));
        let reading = shared.runtime.spawn(sandbox::secrets::keep_fresh(Arc::downgrade(&shared)));
        let tasks = [sweeping, collecting, tending, freeing, reading].map(|task| task.abort_handle());
        shared.tasks.lock().unwrap_or_else(PoisonError::into_inner).extend(tasks);
        Ok(engine)
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.inner.shared
    }

    pub(crate) fn live(&self, owner: &Owner, id: SandboxId) -> Result<Arc<LiveSandbox>, EngineError> {
        self.shared().registry().find(owner, id)
    }

    /// Whether nothing exists that a caller made: no sandbox, volume, image, template, build or key.
    pub async fn is_empty(&self) -> Result<bool, EngineError> {
        self.shared().db.is_empty().await
    }

    /// An error if rows cannot be written, for example because the disk is full. A success holds for a second.
    pub async fn check_writable(&self) -> Result<(), EngineError> {
        let mut last = self.shared().writable.lock().await;
        if last.is_some_and(|at| at.elapsed() < WRITABLE_CHECKED) {
            return Ok(());
        }
        self.shared().db.check_writable().await?;
        *last = Some(Instant::now());
        Ok(())
    }

    /// Compares the image `host` with the machine, as creates do. For a daemon that keeps sandboxes ready without
    /// creates.
    pub async fn check_host_image(&self) -> Result<(), BackendError> {
        self.shared().backend.prepare(&Rootfs::Host).await
    }

    /// Stops all drivers and flushes the database. Sandboxes keep running.
    pub async fn stop(&self) {
        network::rest(self.shared()).await;
        let shared = Arc::clone(self.shared());
        if tokio::task::spawn_blocking(move || shared.halt()).await.is_err() {
            tracing::error!("stopping the engine panicked");
        }
        self.shared().backend.stop().await;
    }

    /// Compares kernel, disk and rows once, as the engine also does at intervals. Returns how many strays were
    /// removed.
    pub async fn sweep(&self) -> usize {
        sandbox::sweep::sweep(self.shared()).await
    }

    /// Adds the engine's metrics to a registry.
    pub fn register_metrics(&self, to: &mut MetricsRegistry) {
        self.shared().metrics.register(to);
    }

    /// Updates the metrics that are read on demand and not counted. Call this before the metrics are shown.
    pub fn look_at_metrics(&self) {
        self.shared().metrics.look(self.shared());
    }
}

/// What all sandboxes share.
pub(crate) struct Shared {
    pub config: EngineConfig,
    pub backend: Arc<dyn Backend>,
    pub clock: Arc<dyn Clock>,
    pub metrics: Arc<Metrics>,
    pub db: Arc<Db>,
    pub logs: Arc<LogWriters>,
    /// How much output sandboxes and owners keep.
    pub output: Arc<Budgets>,
    /// When a check last found that rows can be written.
    pub writable: tokio::sync::Mutex<Option<Instant>>,
    pub keys: Keys,
    pub revoked: Revoked,
    pub images: Images,
    pub templates: Templates,
    pub volumes: Volumes,
    pub networks: Networks,
    pub secrets: Arc<Secrets>,
    pub pools: Pools,
    pub ports: Arc<Ports>,
    /// Bounds how many sandboxes are searched for listening ports at once.
    pub port_looks: Semaphore,
    pub links: Links,
    pub signer: Signer,
    /// Computes the names of layers that are made on this machine.
    pub layer_names: Signer,
    pub builds: Builds,
    pub runtime: tokio::runtime::Handle,
    pub registry: Mutex<Registry>,
    /// Bounds how many sandboxes are adopted at once after a restart.
    pub adoptions: Semaphore,
    /// Bounds how many sandboxes have their files counted at once.
    pub counts: Semaphore,
    /// Tasks to end with the engine, besides the drivers.
    pub tasks: Mutex<Vec<AbortHandle>>,
    pub events: Arc<Events>,
    pub webhooks: Webhooks,
    /// A sandbox is gone, and perhaps the last that needed some snapshot.
    pub files_freed: tokio::sync::Notify,
}

impl Shared {
    pub fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn output_directory(&self) -> PathBuf {
        self.config.data_dir.join("output")
    }

    /// Ends all tasks and threads. Sandboxes are not touched. Blocks for as long as one write takes.
    pub fn halt(&self) {
        let sandboxes = self.registry().close();
        for live in &sandboxes {
            if let Some(driver) = live.driver.lock().unwrap_or_else(PoisonError::into_inner).take() {
                driver.abort();
            }
        }
        self.images.halt();
        self.templates.halt();
        self.pools.halt();
        self.builds.halt();
        for task in self.tasks.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            task.abort();
        }
        self.logs.stop();
        self.db.close();
        for live in sandboxes {
            live.halt();
        }
    }
}
