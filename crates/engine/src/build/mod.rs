//! Builds images from Dockerfiles: each step that changes files runs in a sandbox of its own and becomes a layer.
//!
//! A step runs in a sandbox of the owner, over the layers so far, with the limits that the template will have.
//! Callers cannot find that sandbox, so only the build changes what the step writes. What the step wrote becomes a
//! layer in the same way as all other layers. The layer's name is computed from the owner, the layer below and
//! everything that the step depends on, so a step that the owner ran before is found by its name and does not run
//! again. That is the whole cache, and its layers are collected like any others.
//!
//! While a build runs, its stages are images with names under `recovery::NAMES`, so that their layers are not
//! collected. These names and the sandboxes are removed when the build ends, or at the next start after a crash.
//!
//! This file has the registry of builds and the calls of [`Engine`]. Continue with `builder` (the stages of one
//! build), `steps` (the instructions), `run` and `copy`, then with `layer`, `key`, `cache` and `sandbox`, which `run`
//! and `copy` use. `rootfs` is what a stage consists of, `context` is what the caller sent, `log` is what the caller
//! reads, and `recovery` removes what is left.
//!
//! Files of the context never become files on the host: the archive is read in place, and the sandbox gets the part
//! that it needs.

mod builder;
mod cache;
mod context;
mod copy;
mod key;
mod layer;
mod log;
mod recovery;
mod rootfs;
mod run;
mod sandbox;
mod steps;

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use image::blobs::Upload;
use image::dockerfile::{self, Dockerfile};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tracing::{Instrument, info_span, warn};
use wire::BuildId;

use self::builder::{Builder, stage_number};
use self::cache::CacheLocks;
use self::context::Context;
pub use self::log::BuildLog;
use self::log::LogFile;
pub(crate) use self::recovery::recover;
use self::recovery::{delete_sandboxes, remove_names};
pub(crate) use self::rootfs::host_config_text;
use crate::Engine;
use crate::db::BuildRow;
pub use crate::error::BuildError;
use crate::error::{EngineError, Field, Resource, chain};
use crate::image::ImageFault;
pub use crate::model::progress::BuildState;
use crate::model::random::random_u128;
use crate::model::{Key, NetworkPolicy, Owner};
use crate::template::{TemplateName, TemplateSpec};

/// How many builds of an owner are remembered. Beyond that, the oldest that have ended are forgotten with their rows and
/// logs.
const BUILDS_KEPT_MAX: usize = 200;
/// How many builds may run at the same time, and how many of one owner.
const BUILDS_RUNNING_MAX: usize = 16;
const BUILDS_OWNER_MAX: usize = 8;
/// The size of all secrets of one build together. They are held in memory while the build runs.
const SECRETS_BYTES_MAX: usize = 1 << 20;

/// A request for a build.
pub struct BuildSpec {
    /// The template that the build creates, or changes if it exists.
    pub template: TemplateName,
    /// The rest of the template. Its `image` is replaced by the image that is built.
    pub spec: TemplateSpec,
    /// A tar stream with the Dockerfile and the files that it copies.
    pub context: Upload,
    /// The path of the Dockerfile in the context.
    pub dockerfile: String,
    /// The stage to build; by default the last one.
    pub target: Option<String>,
    /// Values for `ARG`.
    pub arguments: BTreeMap<String, String>,
    /// Secrets by id. Only the steps that name a secret see it, and the build stores it nowhere.
    pub secrets: BTreeMap<String, Vec<u8>>,
    /// What `RUN` steps may reach; the operator's default for builds where there is none.
    pub network: Option<NetworkPolicy>,
}

/// A build at one moment.
#[derive(Debug, Clone)]
pub struct BuildInfo {
    /// The id of the build.
    pub id: BuildId,
    /// The name of the template that the build creates or changes.
    pub template: String,
    /// Whether it runs, or how it ended.
    pub state: BuildState,
    /// The length of its log so far.
    pub log_bytes: u64,
    /// When the caller asked for it.
    pub created_at: SystemTime,
    /// When it ended.
    pub ended_at: Option<SystemTime>,
}

/// All builds of one data directory.
pub(crate) struct Builds {
    directory: PathBuf,
    all: Mutex<VecDeque<Arc<Build>>>,
    /// The owners of builds that were admitted and are not in `all` yet. Locked after `all`.
    starting: Mutex<Vec<Owner>>,
    caches: CacheLocks,
}

/// The right to start one build. Counts as a running build until it is used or dropped.
struct Slot<'a> {
    builds: &'a Builds,
    owner: Owner,
}

impl Slot<'_> {
    /// Adds the build, which takes over the count of this slot.
    fn register(self, build: Arc<Build>) {
        let builds = self.builds;
        // Both under one lock, so that the build never counts twice.
        let mut all = builds.all();
        all.push_back(build);
        drop(self);
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        let mut starting = self.builds.starting();
        if let Some(at) = starting.iter().position(|owner| *owner == self.owner) {
            starting.swap_remove(at);
        }
    }
}

/// One build, running or ended.
pub(crate) struct Build {
    id: BuildId,
    owner: Owner,
    template: String,
    created_at: SystemTime,
    view: watch::Sender<View>,
    task: Mutex<Option<AbortHandle>>,
}

/// What changes during a build, for those who watch it.
#[derive(Debug, Clone)]
struct View {
    state: BuildState,
    log_bytes: u64,
    ended_at: Option<SystemTime>,
}

impl Build {
    fn info(&self) -> BuildInfo {
        let view = self.view.borrow().clone();
        BuildInfo {
            id: self.id,
            template: self.template.clone(),
            state: view.state,
            log_bytes: view.log_bytes,
            created_at: self.created_at,
            ended_at: view.ended_at,
        }
    }

    fn row(&self) -> BuildRow {
        let view = self.view.borrow().clone();
        BuildRow {
            id: self.id,
            owner: self.owner.clone(),
            template: self.template.clone(),
            state: view.state,
            created_at: self.created_at,
            ended_at: view.ended_at,
        }
    }

    fn is_running(&self) -> bool {
        self.view.borrow().state == BuildState::Running
    }

    fn abort(&self) {
        if let Some(task) = self.task.lock().unwrap_or_else(PoisonError::into_inner).take() {
            task.abort();
        }
    }
}

impl Builds {
    /// Opens an empty registry, and makes the directory of logs if it does not exist.
    pub fn open(config: &crate::EngineConfig) -> io::Result<Self> {
        let directory = config.data_dir.join("builds");
        match std::fs::create_dir(&directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(Self {
                directory,
                all: Mutex::default(),
                starting: Mutex::default(),
                caches: CacheLocks::default(),
            }),
        }
    }

    fn all(&self) -> MutexGuard<'_, VecDeque<Arc<Build>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits one more build, unless too many run already. Reserves the slot, because reading a context takes long
    /// and a check alone would admit any number meanwhile.
    fn admit(&self, key: &Key) -> Result<Slot<'_>, EngineError> {
        let all = self.all();
        let mut starting = self.starting();
        let running: Vec<&Owner> = {
            let running = all.iter().filter(|build| build.is_running()).map(|build| &build.owner);
            running.chain(starting.iter()).collect()
        };
        let own = running.iter().filter(|owner| ***owner == key.owner).count();
        if let Some(limit) = key.limits.builds.map(u64::from).filter(|limit| own as u64 >= *limit) {
            return Err(EngineError::Quota { resource: Resource::Builds, limit });
        }
        if own >= BUILDS_OWNER_MAX {
            let what = format!("{BUILDS_OWNER_MAX} builds of this owner are already running");
            return Err(EngineError::Full { what });
        }
        if running.len() >= BUILDS_RUNNING_MAX {
            let what = format!("{BUILDS_RUNNING_MAX} builds are already running");
            return Err(EngineError::Full { what });
        }
        starting.push(key.owner.clone());
        Ok(Slot { builds: self, owner: key.owner.clone() })
    }

    fn starting(&self) -> MutexGuard<'_, Vec<Owner>> {
        self.starting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many builds of an owner run.
    pub fn running(&self, owner: &Owner) -> usize {
        self.all().iter().filter(|build| build.owner == *owner && build.is_running()).count()
    }

    /// Aborts all builds that run.
    pub fn halt(&self) {
        for build in self.all().iter() {
            build.abort();
        }
    }

    fn log(&self, id: BuildId) -> PathBuf {
        self.directory.join(format!("{id}.log"))
    }

    fn create_log(&self, id: BuildId) -> io::Result<File> {
        std::fs::OpenOptions::new().append(true).create_new(true).mode(0o600).open(self.log(id))
    }
}

/// The calls about builds.
impl Engine {
    /// Starts a build. Returns as soon as its row is written; errors in the Dockerfile are found before that.
    pub async fn build(&self, key: &Key, spec: BuildSpec) -> Result<BuildInfo, EngineError> {
        let shared = self.shared();
        check(&spec)?;
        let slot = shared.builds.admit(key)?;
        let BuildSpec { template, spec, context, dockerfile, target, arguments, secrets, network } = spec;
        let read = tokio::task::spawn_blocking(move || read(context, &dockerfile, target.as_deref()));
        let (context, file, last) = read.await.map_err(|_| EngineError::Stopping)??;
        let id = BuildId::from_random(random_u128());
        let log = shared.builds.create_log(id).map_err(|source| EngineError::Image {
            doing: "build",
            name: template.to_string(),
            source: Arc::new(ImageFault::Keep { doing: "create the log file", source }),
        })?;
        let build = Arc::new(Build {
            id,
            owner: key.owner.clone(),
            template: template.to_string(),
            created_at: crate::observe::clock::now(),
            view: watch::Sender::new(View { state: BuildState::Running, log_bytes: 0, ended_at: None }),
            task: Mutex::new(None),
        });
        shared.db.put_build(build.row()).await?;
        let builder = Builder {
            engine: self.clone(),
            key: key.clone(),
            build: Arc::clone(&build),
            context: Arc::new(context),
            file,
            arguments,
            secrets,
            network: network.unwrap_or_else(|| shared.config.network.builds.clone()),
            spec,
            template,
            log: Mutex::new(LogFile { file: log, is_cut: false }),
            images: Mutex::default(),
        };
        let span = info_span!("build", id = %id);
        let task = shared.runtime.spawn(builder.run(last).instrument(span)).abort_handle();
        *build.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
        // Registered after its task exists, so that a delete that finds the build can abort it.
        slot.register(Arc::clone(&build));
        if let Err(error) = self.forget_oldest_builds(&key.owner).await {
            warn!(error = chain(&error), "cannot forget old builds; the next build tries again");
        }
        Ok(build.info())
    }

    /// An error if a build with this key would be refused now, so that nobody uploads a context in vain.
    pub fn check_build(&self, key: &Key) -> Result<(), EngineError> {
        self.shared().builds.admit(key).map(drop)
    }

    /// A context with a Dockerfile and no other file, for callers that have only its text.
    pub async fn dockerfile_context(&self, path: &str, text: &str) -> Result<Upload, EngineError> {
        let upload = self.upload()?;
        let (path, text) = (path.as_bytes().to_vec(), text.as_bytes().to_vec());
        let written = tokio::task::spawn_blocking(move || {
            context::write_file(&upload.file, path, &text)?;
            io::Result::Ok(upload)
        });
        let written = written.await.map_err(|_| EngineError::Stopping)?;
        written.map_err(|source| EngineError::Image {
            doing: "receive",
            name: "a Dockerfile".into(),
            source: Arc::new(ImageFault::Keep { doing: "write the context", source }),
        })
    }

    async fn forget_oldest_builds(&self, owner: &Owner) -> Result<(), EngineError> {
        let shared = self.shared();
        loop {
            let oldest = {
                let mut all = shared.builds.all();
                if all.iter().filter(|build| build.owner == *owner).count() <= BUILDS_KEPT_MAX {
                    return Ok(());
                }
                let oldest = |build: &Arc<Build>| build.owner == *owner && !build.is_running();
                let Some(at) = all.iter().position(oldest) else { return Ok(()) };
                all.remove(at)
            };
            if let Some(oldest) = oldest {
                self.forget_build(&oldest).await?;
            }
        }
    }

    async fn forget_build(&self, build: &Build) -> Result<(), EngineError> {
        self.shared().db.delete_build(build.id).await?;
        if let Err(error) = std::fs::remove_file(self.shared().builds.log(build.id))
            && error.kind() != io::ErrorKind::NotFound
        {
            warn!(build = %build.id, %error, "cannot remove the log of a build");
        }
        Ok(())
    }

    fn find_build(&self, owner: &Owner, id: BuildId) -> Result<Arc<Build>, EngineError> {
        let all = self.shared().builds.all();
        let found = all.iter().find(|build| build.id == id && build.owner == *owner);
        found.cloned().ok_or_else(|| EngineError::BuildNotFound { id: id.to_string() })
    }

    /// The builds of an owner, newest first.
    pub fn builds(&self, owner: &Owner) -> Vec<BuildInfo> {
        let all = self.shared().builds.all();
        all.iter().rev().filter(|build| build.owner == *owner).map(|build| build.info()).collect()
    }

    /// One build of an owner.
    pub fn build_info(&self, owner: &Owner, id: BuildId) -> Result<BuildInfo, EngineError> {
        self.find_build(owner, id).map(|build| build.info())
    }

    /// Aborts a build if it runs, and deletes it with its log.
    pub async fn delete_build(&self, owner: &Owner, id: BuildId) -> Result<(), EngineError> {
        let build = self.find_build(owner, id)?;
        build.abort();
        if build.is_running() {
            let state = BuildState::Failed { reason: "the build was cancelled".into() };
            build.view.send_modify(|view| {
                (view.state, view.ended_at) = (state, Some(crate::observe::clock::now()))
            });
        }
        delete_sandboxes(self.shared(), id).await;
        remove_names(self.shared(), id).await?;
        self.shared().builds.all().retain(|other| other.id != id);
        self.forget_build(&build).await
    }

    /// Opens the log of a build at an offset in bytes.
    pub fn build_log(&self, owner: &Owner, id: BuildId, from: u64) -> Result<BuildLog, EngineError> {
        let build = self.find_build(owner, id)?;
        let log = |source| EngineError::Image {
            doing: "read the build log of",
            name: build.template.clone(),
            source: Arc::new(ImageFault::Keep { doing: "open the log file", source }),
        };
        let file = File::open(self.shared().builds.log(id)).map_err(log)?;
        Ok(BuildLog { file: Arc::new(file), at: from, view: build.view.subscribe() })
    }
}

/// Checks what can be checked without reading the context.
fn check(spec: &BuildSpec) -> Result<(), EngineError> {
    crate::template::check_limits(spec.spec.cpu_millis, spec.spec.memory_bytes)?;
    if spec.template.as_str() == crate::model::defaults::DEFAULT {
        return Err(EngineError::TemplateBuiltIn);
    }
    let size = spec.secrets.values().map(Vec::len).sum::<usize>();
    if size > SECRETS_BYTES_MAX {
        let rule = format!("have at most {SECRETS_BYTES_MAX} bytes in all, got {size}");
        return Err(Field::Secrets.must(rule));
    }
    Ok(())
}

/// Reads the context, the Dockerfile in it, and the number of the stage to build. Blocks.
fn read(
    context: Upload,
    path: &str,
    target: Option<&str>,
) -> Result<(Context, Dockerfile, usize), BuildError> {
    let context = Context::read(context)?;
    let file = dockerfile::parse(&context.text(path)?)?;
    let last = stage_number(&file, target)?;
    Ok((context, file, last))
}

/// How to fix a Dockerfile that is not valid.
pub fn hint(error: &BuildError) -> Option<String> {
    match error {
        BuildError::Dockerfile { source } => Some(source.hint()),
        BuildError::Context { .. } | BuildError::Step { .. } => None,
    }
}
