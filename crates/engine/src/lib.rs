//! What happens to sandboxes, and when.
//!
//! Knows no HTTP and no kernel: it decides, keeps rows and logs, and asks a [`runtime::Backend`].
//! The public face is [`Engine`]; its methods are beside the noun they are about.
//!
//! One folder per noun, each of which uses only those before it: `error`, [`model`] (what goes in and comes out), [`observe`],
//! [`access`], `db`, `guest` (the link to init), `command`, [`files`], [`image`], [`volume`], [`template`], [`sandbox`] (where they
//! meet), [`pool`], [`build`], [`snapshot`].

#![forbid(unsafe_code)]

pub mod access;
pub mod build;
mod command;
mod db;
mod error;
pub mod files;
mod guest;
pub mod image;
pub mod model;
pub mod observe;
pub mod pool;
pub mod sandbox;
pub mod snapshot;
mod task;
pub mod template;
pub mod volume;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::registry::Registry as MetricsRegistry;
use runtime::{Backend, BackendError};
use tokio::sync::Semaphore;
use wire::SandboxId;
use wire::launch::Rootfs;

use crate::access::keys::Keys;
use crate::access::signing::Signer;
use crate::build::Builds;
use crate::command::log::LogWriters;
use crate::db::Db;
use crate::image::{ImageSettings, Images};
use crate::model::defaults::LIMITS;
use crate::model::random::random;
use crate::observe::clock::{Clock, SystemClock};
use crate::observe::events::Events;
use crate::observe::measured::Measured;
use crate::observe::metrics::Metrics;
use crate::pool::Pools;
use crate::sandbox::live::LiveSandbox;
use crate::sandbox::registry::Registry;
use crate::template::Templates;
use crate::volume::Volumes;
use std::sync::MutexGuard;
use tokio::task::AbortHandle;

pub use access::keys::{KeyEnd, KeySecret};
pub use command::text::{TextEvent, TextOutput};
pub use command::{ANSWER_SECONDS, CommandRef, Output, STALL_SECONDS, STDIN_SECONDS};
pub use files::Files;
pub use files::transfer::{IDLE_SECONDS, TAKE_SECONDS, TRANSFERS_MAX, WATCHES_MAX};
pub use model::*;
pub use observe::events::{
    About, BadEventId, EVENTS_KEPT_MAX, Event, EventId, Happened, TemplateHappened, Told, Watcher,
};
pub use observe::stats::{DiskCount, MachineStats, Stats};

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
/// Sandboxes that are connected to at the same time after a restart.
const ADOPTIONS_MAX: usize = 64;

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
        Db::check(&data_dir.join(DATABASE))
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
        if config.output_kept_max < command::log::KEPT_MIN {
            let (least, given) = (command::log::KEPT_MIN, config.output_kept_max);
            return Err(Field::OutputKeptMax.must(format!("be at least {least} bytes, got {given}")));
        }
        let runtime = tokio::runtime::Handle::current();
        let path = config.data_dir.join(DATABASE);
        let metrics = Arc::new(Metrics::default());
        let (store_runtime, store_metrics) = (runtime.clone(), Arc::clone(&metrics));
        let db = tokio::task::spawn_blocking(move || Db::open(&path, store_runtime, store_metrics))
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
        let volumes = Volumes::open(&db.load_volumes().await?);
        let (templates, versions) = Templates::open(db.load_templates().await?);
        let pools = Pools::open(db.load_pools().await?, |template| templates.head(template));
        let backend = Arc::new(Measured { backend, metrics: Arc::clone(&metrics) });
        let shared = Arc::new(Shared {
            config,
            backend,
            clock,
            metrics,
            db: Arc::new(db),
            logs: Arc::new(logs),
            keys,
            images,
            templates,
            volumes,
            pools,
            signer,
            layer_names,
            builds,
            runtime,
            registry: Mutex::new(Registry::default()),
            adoptions: Semaphore::new(ADOPTIONS_MAX),
            counts: Semaphore::new(observe::stats::COUNTS_MAX),
            tasks: Mutex::default(),
            events: Arc::new(Events::new()),
        });
        let engine = Self { inner: Arc::new(Inner { shared: Arc::clone(&shared) }) };
        sandbox::recovery::recover(&shared, loaded.uses, versions).await?;
        build::recover(&engine).await?;
        template::resume_interrupted(&shared);
        pool::resume_interrupted(&shared);
        snapshot::resume_interrupted(&engine).await?;
        volume::resume_interrupted(&shared);
        shared.backend.foresee(&Rootfs::Host, &sandbox::admit::kept_limits(&shared, LIMITS));
        let sweeping = shared.runtime.spawn(sandbox::sweep::keep_swept(Arc::clone(&shared)));
        let collecting =
            shared.runtime.spawn(image::keep_collected(Arc::clone(&shared), template::prepare_again));
        let tasks = [sweeping.abort_handle(), collecting.abort_handle()];
        shared.tasks.lock().unwrap_or_else(PoisonError::into_inner).extend(tasks);
        Ok(engine)
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.inner.shared
    }

    pub(crate) fn live(&self, owner: &Owner, id: SandboxId) -> Result<Arc<LiveSandbox>, EngineError> {
        self.shared().registry().find(owner, id)
    }

    /// Whether nothing is here that a caller made: no sandbox, volume, image, template, build or key.
    pub async fn is_empty(&self) -> Result<bool, EngineError> {
        self.shared().db.is_empty().await
    }

    /// Compares the image `host` with the machine, as creates do: a daemon that keeps sandboxes ready without creates asks for it.
    pub async fn check_host_image(&self) -> Result<(), BackendError> {
        self.shared().backend.prepare(&Rootfs::Host).await
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
        sandbox::sweep::sweep(self.shared()).await
    }

    /// Puts what the engine counts into a registry, for whoever shows it.
    pub fn register_metrics(&self, to: &mut MetricsRegistry) {
        self.shared().metrics.register(to);
    }

    /// Brings those figures up to date that are looked up and not counted. To be called before they are shown.
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
    pub keys: Keys,
    pub images: Images,
    pub templates: Templates,
    pub volumes: Volumes,
    pub pools: Pools,
    pub signer: Signer,
    /// Names the layers that are made here.
    pub layer_names: Signer,
    pub builds: Builds,
    pub runtime: tokio::runtime::Handle,
    pub registry: Mutex<Registry>,
    /// Bounds how many sandboxes are adopted at once after a restart.
    pub adoptions: Semaphore,
    /// Bounds how many sandboxes have their files counted at once.
    pub counts: Semaphore,
    /// Tasks to be ended with the engine, besides the drivers.
    pub tasks: Mutex<Vec<AbortHandle>>,
    pub events: Arc<Events>,
}

impl Shared {
    pub fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn output_directory(&self) -> PathBuf {
        self.config.data_dir.join("output")
    }

    /// Ends all tasks and threads. Sandboxes are not touched. Blocks for the moment that a write takes.
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
