//! Images are built: the steps of a Dockerfile, each in a sandbox of its own, become layers.
//!
//! A step that changes files runs in an ordinary sandbox over the layers so far, as the owner's, with the limits that the template will
//! have; what it has written is then made a layer, by the process that makes all layers. The layer is called after what is below it
//! and what the step is, so that a step that was done before is not done again: that is the whole cache, and it is collected like any
//! layer. What is under way has a name under [`NAMES`], so that it is not collected; both go at the end, however that comes, and
//! after a crash at the next start.
//!
//! Files of the context never become files on the host: their archive is read, and the part that is meant is sent into the sandbox.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use archive::{Entries, Entry, EntryKind};
use bytes::Bytes;
use image::blobs::Upload;
use image::dockerfile::{self, Dockerfile, DockerfileError, Instruction, Program, Secret, Stage, Step};
use image::hash::{Hasher, chain as chained, digest_of};
use image::ignore::fits;
use image::layer::finish_digest;
use image::{Digest, Image, ImageConfig, Platform};
use runtime::{BackendError, LayerSpec};
use serde_json::json;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tracing::{Instrument, info, info_span, warn};
use wire::files::{Condition, FileErrorKind, Links, WriteOptions};
use wire::guest::Program as Run;
use wire::launch::{Finish, HOST_LAYERS_MAX, LAYERS_MAX, LayerFacts, LayerSource, Processes};
use wire::{BuildId, SandboxId};

use super::pull::{self, PullSpec};
use super::{Choice, ImageFault, ImageName, StoredImage, StoredLayer};
use crate::Engine;
use crate::error::{EngineError, chain};
use crate::home::Shared;
use crate::keys::random_u128;
use crate::labels::Labels;
use crate::model::{CommandSpec, CommandState, Key, Offsets, Outcome, OutputEvent, Owner, SandboxSpec, Wait};
use crate::store::BuildRow;
use crate::templates::{Prepared, TemplateName, TemplateSpec};

/// What is under way is called this, with the build's id and a stage behind it.
const NAMES: &str = "localhost/build:";
/// Builds that are remembered. The oldest that have ended fall off, rows and logs.
const BUILDS_KEPT_MAX: usize = 200;
/// Builds that run at the same time.
const BUILDS_RUNNING_MAX: usize = 8;
/// What is kept of a build's log.
const LOG_MAX: u64 = 16 << 20;
/// What is read of a log at once.
const LOG_PIECE: usize = 64 * 1024;
/// Where every sandbox has memory that looks like files.
const MEMORY: &str = "/dev/shm";
/// How long one step may take.
const STEP_SECONDS: u64 = 6 * 3600;
/// Secrets of one build, in all.
const SECRETS_BYTES_MAX: usize = 1 << 20;
/// What is read of a file of the context at once.
const PIECE: usize = 256 * 1024;
/// How often the end of a sandbox's processes is tried, and how long after one another.
const END_ATTEMPTS: u32 = 50;
const END_PAUSE: Duration = Duration::from_millis(20);
/// Counts up when steps are done in another way, so that they are done anew.
const VERSION: u32 = 1;

/// What is to be built.
pub struct BuildSpec {
    /// What it becomes: a template of this name, made or changed.
    pub template: TemplateName,
    /// What else is in the template. Its image is what is built.
    pub spec: TemplateSpec,
    /// A tar stream with the Dockerfile and what it copies.
    pub context: Upload,
    /// The path of the Dockerfile in it.
    pub dockerfile: String,
    /// The stage to build; the last where there is none.
    pub target: Option<String>,
    /// Values for `ARG`.
    pub arguments: BTreeMap<String, String>,
    /// By id. They are seen by the steps that name them, and kept nowhere.
    pub secrets: BTreeMap<String, Vec<u8>>,
}

/// Where a build is in its life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BuildState {
    /// Steps are done.
    Running,
    /// The template has it.
    Done {
        /// Of the template.
        version: u32,
    },
    /// It broke off. What was done is kept for a while, so that the next try is quicker.
    Failed {
        /// Why.
        reason: String,
    },
}

/// A build, as it is at one moment.
#[derive(Debug, Clone)]
pub struct BuildInfo {
    /// Names it.
    pub id: BuildId,
    /// What it becomes.
    pub template: String,
    /// Where it is in its life.
    pub state: BuildState,
    /// How long its log is so far.
    pub log_bytes: u64,
    /// When it was asked for.
    pub created_at: SystemTime,
    /// When it was over.
    pub ended_at: Option<SystemTime>,
}

/// What went wrong with a build.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The Dockerfile.
    #[error("the Dockerfile is not valid")]
    Dockerfile {
        /// What and where.
        #[from]
        source: DockerfileError,
    },
    /// The context that was sent.
    #[error("the context cannot be used: {why}")]
    Context {
        /// Why.
        why: String,
    },
    /// A step.
    #[error("line {line}: {why}")]
    Step {
        /// Of the Dockerfile.
        line: usize,
        /// What happened.
        why: String,
    },
}

/// All builds of one data directory.
pub(crate) struct Builds {
    directory: PathBuf,
    all: Mutex<VecDeque<Arc<Build>>>,
}

pub(crate) struct Build {
    id: BuildId,
    owner: Owner,
    template: String,
    created_at: SystemTime,
    face: watch::Sender<Face>,
    task: Mutex<Option<AbortHandle>>,
}

#[derive(Debug, Clone)]
struct Face {
    state: BuildState,
    log_bytes: u64,
    ended_at: Option<SystemTime>,
}

impl Build {
    fn info(&self) -> BuildInfo {
        let face = self.face.borrow().clone();
        BuildInfo {
            id: self.id,
            template: self.template.clone(),
            state: face.state,
            log_bytes: face.log_bytes,
            created_at: self.created_at,
            ended_at: face.ended_at,
        }
    }

    fn row(&self) -> BuildRow {
        let face = self.face.borrow().clone();
        BuildRow {
            id: self.id,
            owner: self.owner.clone(),
            template: self.template.clone(),
            state: face.state,
            created_at: self.created_at,
            ended_at: face.ended_at,
        }
    }

    fn is_running(&self) -> bool {
        self.face.borrow().state == BuildState::Running
    }
}

impl Builds {
    /// Makes the directory of logs.
    pub fn open(config: &crate::EngineConfig) -> io::Result<Self> {
        let directory = config.data_dir.join("builds");
        match std::fs::create_dir(&directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(Self { directory, all: Mutex::default() }),
        }
    }

    fn all(&self) -> MutexGuard<'_, VecDeque<Arc<Build>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all builds.
    pub fn halt(&self) {
        for build in self.all().iter() {
            if let Some(task) = build.task.lock().unwrap_or_else(PoisonError::into_inner).take() {
                task.abort();
            }
        }
    }

    fn log(&self, id: BuildId) -> PathBuf {
        self.directory.join(format!("{id}.log"))
    }
}

/// Reads what is kept, and clears away what a daemon before this one was building.
pub(crate) async fn recover(engine: &Engine) -> Result<(), EngineError> {
    let shared = engine.shared();
    shared.store.remove_build_names(NAMES.to_owned()).await?;
    shared.images.stock().names.retain(|(name, _), _| !name.starts_with(NAMES));
    for mut row in shared.store.builds().await? {
        if row.state == BuildState::Running {
            row.state =
                BuildState::Failed { reason: "the daemon was stopped in its middle; build it again".into() };
            row.ended_at = Some(crate::now());
            shared.store.put_build(row.clone()).await?;
            let (engine, owner, id) = (engine.clone(), row.owner.clone(), row.id);
            // Sandboxes are adopted behind the start, and so is their end.
            tokio::spawn(async move { remove_sandboxes(&engine, &owner, id).await });
        }
        let log_bytes = std::fs::metadata(shared.builds.log(row.id)).map_or(0, |meta| meta.len());
        let face = Face { state: row.state, log_bytes, ended_at: row.ended_at };
        shared.builds.all().push_back(Arc::new(Build {
            id: row.id,
            owner: row.owner,
            template: row.template,
            created_at: row.created_at,
            face: watch::Sender::new(face),
            task: Mutex::new(None),
        }));
    }
    Ok(())
}

/// The idempotency keys of a build's sandboxes begin like this.
fn sandbox_prefix(id: BuildId) -> String {
    format!("shoal build {id} ")
}

async fn remove_sandboxes(engine: &Engine, owner: &Owner, id: BuildId) {
    let prefix = sandbox_prefix(id);
    let homes = engine.shared().directory().all();
    let mine = |home: &&Arc<crate::home::Home>| {
        home.owner == *owner
            && home.identity().idempotency_key.as_ref().is_some_and(|key| key.starts_with(&prefix))
    };
    for home in homes.iter().filter(mine) {
        if let Err(error) = engine.delete(owner, home.id).await {
            warn!(build = %id, sandbox = %home.id, error = chain(&error), "cannot delete a build's sandbox");
        }
    }
}

/// What callers ask about builds.
impl Engine {
    /// Begins a build. Answers when its row is written.
    pub async fn build(&self, key: &Key, spec: BuildSpec) -> Result<BuildInfo, EngineError> {
        let shared = self.shared();
        crate::templates::check_limits(spec.spec.cpu_millis, spec.spec.memory_bytes)?;
        if spec.template.as_str() == crate::template::DEFAULT {
            return Err(EngineError::TemplateBuiltIn);
        }
        if spec.secrets.values().map(Vec::len).sum::<usize>() > SECRETS_BYTES_MAX {
            let why = format!("they have more than {SECRETS_BYTES_MAX} bytes");
            return Err(EngineError::Invalid { what: "secrets", why });
        }
        if shared.builds.all().iter().filter(|build| build.is_running()).count() >= BUILDS_RUNNING_MAX {
            return Err(EngineError::Full { what: format!("{BUILDS_RUNNING_MAX} builds run already") });
        }
        // What is wrong with the Dockerfile is told before there is a build.
        let (path, BuildSpec { template, spec, context, target, arguments, secrets, .. }) =
            (spec.dockerfile.clone(), spec);
        let read = tokio::task::spawn_blocking(move || {
            let context = Context::read(context)?;
            let text = context.text(&path)?;
            let file = dockerfile::parse(&text)?;
            let last = stage_number(&file, target.as_deref())?;
            Ok::<_, BuildError>((context, file, last))
        });
        let (context, file, last) = read.await.map_err(|_| EngineError::Stopping)??;
        let id = BuildId::from_random(random_u128());
        let path = shared.builds.log(id);
        let log = std::fs::OpenOptions::new().append(true).create_new(true).mode(0o600).open(path);
        let log = log.map_err(|source| EngineError::Image {
            doing: "build",
            name: template.to_string(),
            source: Arc::new(ImageFault::Keep { doing: "make a log", source }),
        })?;
        let build = Arc::new(Build {
            id,
            owner: key.owner.clone(),
            template: template.to_string(),
            created_at: crate::now(),
            face: watch::Sender::new(Face { state: BuildState::Running, log_bytes: 0, ended_at: None }),
            task: Mutex::new(None),
        });
        shared.store.put_build(build.row()).await?;
        shared.builds.all().push_back(Arc::clone(&build));
        self.forget_oldest_builds().await?;
        let builder = Builder {
            engine: self.clone(),
            key: key.clone(),
            build: Arc::clone(&build),
            context: Arc::new(context),
            file,
            arguments,
            secrets,
            spec,
            template,
            log: Mutex::new(log),
            serial: Mutex::new(0),
        };
        let span = info_span!("build", id = %id);
        let task = shared.runtime.spawn(builder.run(last).instrument(span)).abort_handle();
        *build.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
        Ok(build.info())
    }

    async fn forget_oldest_builds(&self) -> Result<(), EngineError> {
        let shared = self.shared();
        loop {
            let oldest = {
                let mut all = shared.builds.all();
                if all.len() <= BUILDS_KEPT_MAX {
                    return Ok(());
                }
                let Some(at) = all.iter().position(|build| !build.is_running()) else { return Ok(()) };
                all.remove(at)
            };
            if let Some(oldest) = oldest {
                self.forget_build(&oldest).await?;
            }
        }
    }

    async fn forget_build(&self, build: &Build) -> Result<(), EngineError> {
        self.shared().store.delete_build(build.id).await?;
        if let Err(error) = std::fs::remove_file(self.shared().builds.log(build.id))
            && error.kind() != io::ErrorKind::NotFound
        {
            warn!(build = %build.id, %error, "cannot remove a build's log");
        }
        Ok(())
    }

    fn find_build(&self, owner: &Owner, id: BuildId) -> Result<Arc<Build>, EngineError> {
        let all = self.shared().builds.all();
        let found = all.iter().find(|build| build.id == id && build.owner == *owner);
        found.cloned().ok_or_else(|| EngineError::BuildNotFound { id: id.to_string() })
    }

    /// An owner's builds, the newest first.
    pub fn builds(&self, owner: &Owner) -> Vec<BuildInfo> {
        let all = self.shared().builds.all();
        all.iter().rev().filter(|build| build.owner == *owner).map(|build| build.info()).collect()
    }

    /// A build.
    pub fn build_info(&self, owner: &Owner, id: BuildId) -> Result<BuildInfo, EngineError> {
        self.find_build(owner, id).map(|build| build.info())
    }

    /// Ends a build that runs, and forgets it with its log.
    pub async fn delete_build(&self, owner: &Owner, id: BuildId) -> Result<(), EngineError> {
        let build = self.find_build(owner, id)?;
        if let Some(task) = build.task.lock().unwrap_or_else(PoisonError::into_inner).take() {
            task.abort();
        }
        if build.is_running() {
            let state = BuildState::Failed { reason: "it was cancelled".into() };
            build.face.send_modify(|face| (face.state, face.ended_at) = (state, Some(crate::now())));
        }
        remove_sandboxes(self, owner, id).await;
        remove_names(self.shared(), id).await?;
        self.shared().builds.all().retain(|other| other.id != id);
        self.forget_build(&build).await
    }

    /// A build's log from an offset on.
    pub fn build_log(&self, owner: &Owner, id: BuildId, from: u64) -> Result<BuildLog, EngineError> {
        let build = self.find_build(owner, id)?;
        let log = |source| EngineError::Image {
            doing: "read the log of the build of",
            name: build.template.clone(),
            source: Arc::new(ImageFault::Keep { doing: "open its log", source }),
        };
        let file = File::open(self.shared().builds.log(id)).map_err(log)?;
        Ok(BuildLog { file: Arc::new(file), at: from, face: build.face.subscribe() })
    }
}

/// One who reads a log.
pub struct BuildLog {
    file: Arc<File>,
    at: u64,
    face: watch::Receiver<Face>,
}

impl BuildLog {
    /// What comes next. `follow`: waits for it, until the build is over. Cancel-safe.
    pub async fn next(&mut self, follow: bool) -> Result<Option<Bytes>, EngineError> {
        loop {
            let face = self.face.borrow_and_update().clone();
            if self.at < face.log_bytes {
                let (file, at) = (Arc::clone(&self.file), self.at);
                let length = usize::try_from(face.log_bytes - at).unwrap_or(LOG_PIECE).min(LOG_PIECE);
                let read = tokio::task::spawn_blocking(move || {
                    let mut piece = vec![0; length];
                    file.read_exact_at(&mut piece, at).map(|()| piece)
                });
                let piece = read.await.map_err(|_| EngineError::Stopping)?;
                // It was removed with its build.
                let Ok(piece) = piece else { return Ok(None) };
                self.at += piece.len() as u64;
                return Ok(Some(piece.into()));
            }
            if !follow || face.state != BuildState::Running {
                return Ok(None);
            }
            if self.face.changed().await.is_err() {
                return Ok(None);
            }
        }
    }
}

fn stage_number(file: &Dockerfile, target: Option<&str>) -> Result<usize, BuildError> {
    match target {
        None => Ok(file.stages.len() - 1),
        Some(name) => {
            let name = name.to_ascii_lowercase();
            file.stages.iter().position(|stage| stage.name.as_deref() == Some(&name)).ok_or_else(|| {
                BuildError::Context { why: format!("the Dockerfile has no stage named `{name}`") }
            })
        }
    }
}

async fn remove_names(shared: &Shared, id: BuildId) -> Result<(), EngineError> {
    let prefix = format!("{NAMES}{id}");
    shared.store.remove_build_names(prefix.clone()).await?;
    shared.images.stock().names.retain(|(name, _), _| !name.starts_with(&prefix));
    Ok(())
}

/// What was sent, as a list. Contents stay in the file.
struct Context {
    upload: Upload,
    entries: BTreeMap<String, ContextEntry>,
}

struct ContextEntry {
    entry: Entry,
    /// Where its contents begin.
    at: u64,
    contents: Digest,
}

/// Counts what is read through it.
struct Counting<R> {
    from: R,
    count: u64,
}

impl<R: Read> Read for Counting<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let length = self.from.read(into)?;
        self.count += length as u64;
        Ok(length)
    }
}

impl Context {
    /// Reads all of it once. Names that lead out of it are refused; devices and the like are passed over. Blocks.
    fn read(upload: Upload) -> Result<Self, BuildError> {
        let bad = |why: String| BuildError::Context { why };
        let file = upload.file.try_clone().map_err(|error| bad(error.to_string()))?;
        io::Seek::seek(&mut &file, io::SeekFrom::Start(0)).map_err(|error| bad(error.to_string()))?;
        let reader = Counting { from: io::BufReader::with_capacity(PIECE, file), count: 0 };
        let mut stream = Entries::new(reader);
        let mut entries = BTreeMap::new();
        let mut piece = vec![0; PIECE];
        while let Some(entry) = stream.next_entry().map_err(|error| bad(error.to_string()))? {
            let at = stream.get_mut().count;
            let mut hasher = Hasher::new();
            loop {
                match stream.read_contents(&mut piece).map_err(|error| bad(error.to_string()))? {
                    0 => break,
                    length => hasher.update(&piece[..length]),
                }
            }
            let path = std::str::from_utf8(&entry.path)
                .map_err(|_| bad(format!("`{}` is not UTF-8", String::from_utf8_lossy(&entry.path))))?;
            if path.split('/').any(|part| part == "..") {
                return Err(bad(format!("`{path}` leads out of it")));
            }
            let path = dockerfile::context_path(path).map_err(|problem| bad(problem.to_string()))?;
            let wanted = matches!(entry.kind, EntryKind::File | EntryKind::Directory | EntryKind::Symlink);
            if path.is_empty() || !wanted {
                continue;
            }
            entries.insert(path, ContextEntry { entry, at, contents: hasher.finish() });
        }
        Ok(Self { upload, entries })
    }

    /// A file as text.
    fn text(&self, path: &str) -> Result<String, BuildError> {
        let missing = || BuildError::Context { why: format!("there is no file `{path}` in it") };
        let inside = dockerfile::context_path(path).map_err(|_| missing())?;
        let found = self.entries.get(&inside).filter(|found| found.entry.kind == EntryKind::File);
        let found = found.ok_or_else(missing)?;
        let length = usize::try_from(found.entry.size).unwrap_or(usize::MAX);
        if length > dockerfile::LENGTH_MAX {
            return Err(BuildError::Context { why: format!("`{path}` is too long for a Dockerfile") });
        }
        let mut text = vec![0; length];
        let failed = |why: String| BuildError::Context { why };
        self.upload.file.read_exact_at(&mut text, found.at).map_err(|error| failed(error.to_string()))?;
        String::from_utf8(text).map_err(|_| failed(format!("`{path}` is not UTF-8")))
    }

    /// What a path or pattern means: files and directories, by their paths.
    fn matching(&self, pattern: &str) -> Vec<String> {
        if pattern.is_empty() {
            return vec![String::new()];
        }
        if !pattern.contains(['*', '?', '[']) {
            let is_directory = || self.entries.keys().any(|path| path.starts_with(&format!("{pattern}/")));
            let there = self.entries.contains_key(pattern) || is_directory();
            return if there { vec![pattern.to_owned()] } else { Vec::new() };
        }
        let depth = pattern.matches('/').count();
        let mut found: Vec<String> = Vec::new();
        for path in self.entries.keys() {
            // Directories may be implied by what is in them.
            let parts: Vec<&str> = path.split('/').collect();
            if parts.len() > depth {
                let front = parts[..=depth].join("/");
                if found.last() != Some(&front) && fits(pattern, &front) {
                    found.push(front);
                }
            }
        }
        found.dedup();
        found
    }

    fn is_directory(&self, path: &str) -> bool {
        match self.entries.get(path) {
            Some(found) => found.entry.kind == EntryKind::Directory,
            None => true,
        }
    }
}

/// What a stage has come to.
#[derive(Clone)]
struct Rootfs {
    /// Whether the layers lie over the image `host`.
    over_host: bool,
    layers: Vec<StoredLayer>,
    config: Config,
}

#[derive(Clone, Default)]
struct Config {
    os: String,
    architecture: String,
    variant: Option<String>,
    env: Vec<(String, String)>,
    user: Option<String>,
    cwd: Option<String>,
    entrypoint: Vec<String>,
    command: Vec<String>,
    labels: BTreeMap<String, String>,
}

impl Config {
    fn of(config: &ImageConfig) -> Self {
        Self {
            os: config.os.clone(),
            architecture: config.architecture.clone(),
            variant: config.variant.clone(),
            env: config.env.clone(),
            user: config.user.clone(),
            cwd: config.working_directory.clone(),
            entrypoint: config.entrypoint.clone(),
            command: config.command.clone(),
            labels: config.labels.clone(),
        }
    }

    /// Nothing, for programs of this machine.
    fn of_this_machine() -> Self {
        let Platform { os, architecture, .. } = Platform::this();
        Self { os, architecture, ..Self::default() }
    }

    fn text(&self) -> String {
        let env: Vec<String> = self.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        json!({
            "os": self.os, "architecture": self.architecture, "variant": self.variant,
            "config": {
                "Env": env, "User": self.user, "WorkingDir": self.cwd, "Entrypoint": self.entrypoint,
                "Cmd": self.command, "Labels": self.labels,
            },
            "rootfs": {"type": "layers", "diff_ids": []},
        })
        .to_string()
    }

    fn set(&mut self, name: String, value: String) {
        match self.env.iter_mut().find(|(known, _)| *known == name) {
            Some((_, old)) => *old = value,
            None => self.env.push((name, value)),
        }
    }
}

/// How programs of this machine run, as an image says it.
pub(super) fn host_config_text() -> String {
    Config::of_this_machine().text()
}

/// A stage while it is built.
struct Work {
    number: usize,
    rootfs: Rootfs,
    /// Variables of the build.
    arguments: BTreeMap<String, String>,
    /// Directories that the next sandbox makes first.
    pending: Vec<String>,
    /// Layers that must not go before an image has them.
    _pins: Vec<super::Pins>,
}

impl Work {
    fn lookup(&self, name: &str) -> Option<String> {
        let env =
            self.rootfs.config.env.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
        env.or_else(|| self.arguments.get(name).cloned())
    }

    fn cwd(&self) -> String {
        self.rootfs.config.cwd.clone().unwrap_or_else(|| "/".into())
    }

    fn resolve(&self, path: &str) -> String {
        let mut parts: Vec<String> = Vec::new();
        let whole = if path.starts_with('/') { path.to_owned() } else { format!("{}/{path}", self.cwd()) };
        for part in whole.split('/') {
            match part {
                "" | "." => {}
                ".." => drop(parts.pop()),
                part => parts.push(part.to_owned()),
            }
        }
        format!("/{}", parts.join("/"))
    }
}

struct Builder {
    engine: Engine,
    key: Key,
    build: Arc<Build>,
    context: Arc<Context>,
    file: Dockerfile,
    arguments: BTreeMap<String, String>,
    secrets: BTreeMap<String, Vec<u8>>,
    spec: TemplateSpec,
    template: TemplateName,
    log: Mutex<File>,
    serial: Mutex<u32>,
}

type Built<T> = Result<T, BuildError>;

impl Builder {
    async fn run(self, last: usize) {
        let began = Instant::now();
        let outcome = self.stages(last).await;
        let state = match outcome {
            Ok(version) => {
                self.say(&format!(
                    "template {} version {version} is ready ({:.1} s)\n",
                    self.template,
                    began.elapsed().as_secs_f64()
                ));
                info!(template = %self.template, version, "built");
                BuildState::Done { version }
            }
            Err(error) => {
                let reason = chain(&error);
                self.say(&format!("error: {reason}\n"));
                if let BuildError::Dockerfile { source } = &error {
                    self.say(&format!("hint: {}\n", source.hint()));
                }
                info!(template = %self.template, reason, "build failed");
                BuildState::Failed { reason }
            }
        };
        remove_sandboxes(&self.engine, &self.key.owner, self.build.id).await;
        if let Err(error) = remove_names(self.engine.shared(), self.build.id).await {
            warn!(error = chain(&error), "cannot remove a build's names; the next start does");
        }
        let row = BuildRow { state: state.clone(), ended_at: Some(crate::now()), ..self.build.row() };
        if let Err(error) = self.engine.shared().store.put_build(row.clone()).await {
            warn!(error = chain(&error), "cannot record what became of a build");
        }
        self.build.face.send_modify(|face| (face.state, face.ended_at) = (state, row.ended_at));
    }

    /// A line of the log. What cannot be kept is no reason to stop.
    fn say(&self, text: &str) {
        self.append(text.as_bytes());
    }

    fn append(&self, bytes: &[u8]) {
        let before = self.build.face.borrow().log_bytes;
        const CUT: &[u8] = b"\n[the log is longer than what is kept]\n";
        let bytes = match before {
            more if more >= LOG_MAX => return,
            more if more + bytes.len() as u64 >= LOG_MAX => CUT,
            _ => bytes,
        };
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        if log.write_all(bytes).is_ok() {
            let grown = if bytes == CUT {
                LOG_MAX.max(before + bytes.len() as u64)
            } else {
                before + bytes.len() as u64
            };
            let grown = grown.min(log.metadata().map_or(grown, |meta| meta.len()));
            self.build.face.send_modify(|face| face.log_bytes = grown);
        }
    }

    /// Builds what the last stage needs, and makes the template of it.
    async fn stages(&self, last: usize) -> Built<u32> {
        let needed = self.needed(last);
        let mut done: HashMap<usize, Rootfs> = HashMap::new();
        let steps: usize = needed.iter().map(|number| self.file.stages[*number].steps.len() + 1).sum();
        let mut at = 0;
        for number in needed {
            let stage = &self.file.stages[number];
            let rootfs = self.stage(number, stage, &done, &mut at, steps).await?;
            done.insert(number, rootfs);
        }
        let rootfs = done.remove(&last).expect("the last stage is always needed");
        let line = self.file.stages[last].line;
        let failed = |error: &dyn std::error::Error| BuildError::Step { line, why: chain(error) };
        let image = self.keep(last, &rootfs).await.map_err(|error| failed(&error))?;
        // Called after what it is, so that building the same again changes nothing.
        let resolved = format!("{NAMES}{}", &image.digest.hex()[..16]);
        let spec = TemplateSpec { image: resolved.clone(), ..self.spec.clone() };
        let prepared = Prepared { resolved, image: Some(image.digest) };
        let applied =
            self.engine.apply_template(&self.key.owner, self.template.clone(), spec, Some(prepared));
        Ok(applied.await.map_err(|error| failed(&error))?.version)
    }

    /// The stages that a stage is made from, in order, and itself.
    fn needed(&self, last: usize) -> Vec<usize> {
        let mut needed = vec![last];
        let mut at = 0;
        while let Some(number) = needed.get(at).copied() {
            let stage = &self.file.stages[number];
            let mut others: Vec<usize> = self.stage_named(&stage.from, number).into_iter().collect();
            for step in &stage.steps {
                if let Instruction::Copy { from: Some(from), .. } = &step.instruction {
                    others.extend(self.stage_named(from, number));
                }
            }
            for other in others {
                if !needed.contains(&other) {
                    needed.push(other);
                }
            }
            at += 1;
        }
        needed.sort_unstable();
        needed
    }

    /// An earlier stage, by name or by number.
    fn stage_named(&self, name: &str, before: usize) -> Option<usize> {
        let lower = name.to_ascii_lowercase();
        let named = self.file.stages[..before].iter().position(|stage| stage.name.as_deref() == Some(&lower));
        named.or_else(|| name.parse().ok().filter(|number| *number < before))
    }

    async fn stage(
        &self,
        number: usize,
        stage: &Stage,
        done: &HashMap<usize, Rootfs>,
        at: &mut usize,
        steps: usize,
    ) -> Built<Rootfs> {
        *at += 1;
        self.say(&format!("[{at}/{steps}] FROM {}\n", stage.from));
        let globals = self.globals();
        let from =
            dockerfile::expand(&stage.from, &|name| globals.get(name).cloned()).map_err(|problem| {
                BuildError::Dockerfile { source: DockerfileError { line: stage.line, problem } }
            })?;
        let rootfs = match self.stage_named(&from, number) {
            Some(other) => done.get(&other).cloned().expect("it was needed, and so it was built"),
            None => self.base(&from, stage.line).await?,
        };
        let mut work =
            Work { number, rootfs, arguments: BTreeMap::new(), pending: Vec::new(), _pins: Vec::new() };
        let layers = work.rootfs.layers.iter().map(|layer| layer.layer);
        work._pins.push(self.engine.shared().images.pin(layers));
        for step in &stage.steps {
            *at += 1;
            self.say(&format!("[{at}/{steps}] {}\n", step.text));
            let began = Instant::now();
            let how = self.step(&mut work, step, &globals, done).await?;
            match how {
                How::Noted => {}
                How::Cached => self.say("  cached\n"),
                How::Done => self.say(&format!("  done in {:.1} s\n", began.elapsed().as_secs_f64())),
            }
        }
        if !work.pending.is_empty() {
            let line = stage.steps.last().map_or(stage.line, |step| step.line);
            self.layer(&mut work, line, "WORKDIR", &[], async |_, _| Ok(())).await?;
        }
        Ok(work.rootfs)
    }

    /// `ARG` before the first `FROM`, with what the caller says.
    fn globals(&self) -> BTreeMap<String, String> {
        let given = |(name, default): &(String, Option<String>)| {
            let value = self.arguments.get(name).cloned().or_else(|| default.clone())?;
            Some((name.clone(), value))
        };
        self.file.arguments.iter().filter_map(given).collect()
    }

    /// The image that a stage begins with.
    async fn base(&self, from: &str, line: usize) -> Built<Rootfs> {
        let shared = self.engine.shared();
        let failed = |why: String| BuildError::Step { line, why };
        if from == "scratch" {
            let config = Config::of_this_machine();
            let finish = self.finish(None).await.map_err(|error| failed(chain(&error)))?;
            return Ok(Rootfs { over_host: false, layers: vec![finish], config });
        }
        let Choice { name, .. } = shared.images.choose(from).map_err(|error| failed(error.to_string()))?;
        let ImageName::Reference(reference) = &name else {
            return Ok(Rootfs { over_host: true, layers: Vec::new(), config: Config::of_this_machine() });
        };
        let owner = &self.key.owner;
        let image = match shared.images.find(owner, &name.canonical()) {
            Some(image) => image,
            None => {
                let pull = pull::pull(shared, owner, PullSpec::new(reference.clone()));
                let images = pull.finished().await.map_err(|error| failed(chain(&error)))?;
                images.into_iter().next().ok_or_else(|| failed("the image did not come".into()))?
            }
        };
        let (over_host, layers) = (image.over_host, image.layers.clone());
        Ok(Rootfs { over_host, layers, config: Config::of(&image.config) })
    }

    /// The layer that every image has, over another.
    async fn finish(&self, below: Option<Digest>) -> Result<StoredLayer, ImageFault> {
        let layer = finish_digest(below, &Finish::default());
        let spec = LayerSpec {
            layer,
            below: below.into_iter().collect(),
            over_host: false,
            from: LayerSource::Finish(Finish::default()),
        };
        let facts = self.have(&spec).await?;
        Ok(StoredLayer { layer, blob: None, size: 0, facts })
    }

    /// Makes a layer, unless it is here.
    async fn have(&self, spec: &LayerSpec) -> Result<LayerFacts, ImageFault> {
        let shared = self.engine.shared();
        let lock = shared.images.lock_of(spec.layer);
        let _alone = lock.lock().await;
        if shared.store.has_layer(spec.layer).await? {
            return Ok(LayerFacts::default());
        }
        let failed =
            |source| ImageFault::Layer { number: spec.below.len() + 1, count: spec.below.len() + 1, source };
        let facts = pull::unpack(shared, spec, &|_| ()).await.map_err(failed)?;
        shared.store.put_layer(pull::layer_row(spec.layer, None, facts)).await?;
        Ok(facts)
    }

    /// Writes down what a stage has come to, under a name that lasts as long as the build.
    async fn keep(&self, stage: usize, rootfs: &Rootfs) -> Result<Arc<StoredImage>, ImageFault> {
        let config_text = rootfs.config.text();
        let mut hasher = Hasher::new();
        hasher.update(config_text.as_bytes());
        if rootfs.over_host {
            hasher.update(super::HOST.as_bytes());
        }
        for layer in &rootfs.layers {
            hasher.update(layer.layer.to_string().as_bytes());
        }
        let config = ImageConfig::parse(config_text.as_bytes()).map_err(|error| ImageFault::Keep {
            doing: "write the image's configuration",
            source: io::Error::other(error),
        })?;
        let image = Image { digest: hasher.finish(), config, config_text, layers: Vec::new() };
        let names = vec![self.name_of(stage)];
        let owner = self.key.owner.to_string();
        let (over_host, layers) = (rootfs.over_host, rootfs.layers.clone());
        pull::name(self.engine.shared(), image, over_host, layers, owner, names).await
    }

    fn name_of(&self, stage: usize) -> String {
        format!("{NAMES}{}-{stage}", self.build.id)
    }

    async fn step(
        &self,
        work: &mut Work,
        step: &Step,
        globals: &BTreeMap<String, String>,
        done: &HashMap<usize, Rootfs>,
    ) -> Built<How> {
        let line = step.line;
        let expand = |work: &Work, text: &str| {
            dockerfile::expand(text, &|name| work.lookup(name))
                .map_err(|problem| BuildError::Dockerfile { source: DockerfileError { line, problem } })
        };
        match &step.instruction {
            Instruction::Env(pairs) => {
                // All of them see what was before the line.
                let values = pairs.iter().map(|(name, value)| Ok((name.clone(), expand(work, value)?)));
                for (name, value) in values.collect::<Built<Vec<_>>>()? {
                    work.rootfs.config.set(name, value);
                }
            }
            Instruction::Label(pairs) => {
                for (name, value) in pairs {
                    let (name, value) = (expand(work, name)?, expand(work, value)?);
                    work.rootfs.config.labels.insert(name, value);
                }
            }
            Instruction::Arg(arguments) => {
                for (name, default) in arguments {
                    let default = default.as_deref().map(|text| expand(work, text)).transpose()?;
                    let given = self.arguments.get(name).cloned();
                    if let Some(value) = given.or(default).or_else(|| globals.get(name).cloned()) {
                        work.arguments.insert(name.clone(), value);
                    }
                }
            }
            Instruction::Workdir(path) => {
                let path = work.resolve(&expand(work, path)?);
                if path != "/" && !work.pending.contains(&path) {
                    work.pending.push(path.clone());
                }
                work.rootfs.config.cwd = Some(path);
            }
            Instruction::User(user) => work.rootfs.config.user = Some(expand(work, user)?),
            Instruction::Cmd(program) => work.rootfs.config.command = argv(program),
            Instruction::Entrypoint(program) => {
                work.rootfs.config.entrypoint = argv(program);
                // What was an argument of another is none of this.
                work.rootfs.config.command.clear();
            }
            Instruction::Ignored(word) => self.say(&format!("  note: {word} has no effect here\n")),
            Instruction::Run { program, secrets } => {
                return self.run_step(work, line, program, secrets).await;
            }
            Instruction::Copy { from, sources, target, chown, chmod, unpack } => {
                if *unpack
                    && sources.iter().any(|source| {
                        [".tar", ".tgz", ".tar.gz", ".tar.xz"].iter().any(|end| source.ends_with(end))
                    })
                {
                    self.say("  note: archives are copied as they are; unpack them with RUN\n");
                }
                let sources = sources.iter().map(|source| expand(work, source)).collect::<Built<Vec<_>>>()?;
                let target = expand(work, target)?;
                let chown = chown.as_deref().map(|text| expand(work, text)).transpose()?;
                let mode = chmod.as_deref().and_then(|digits| u32::from_str_radix(digits, 8).ok());
                let wish = Copy { sources, target, chown, mode, line };
                return match from {
                    None => self.copy(work, &wish, Arc::clone(&self.context), None).await,
                    Some(from) => self.copy_from(work, &wish, &expand(work, from)?, done).await,
                };
            }
        }
        Ok(How::Noted)
    }

    async fn run_step(
        &self,
        work: &mut Work,
        line: usize,
        program: &Program,
        secrets: &[Secret],
    ) -> Built<How> {
        for secret in secrets {
            if secret.required && !self.secrets.contains_key(&secret.id) {
                let why = format!("the secret `{}` was not given", secret.id);
                return Err(BuildError::Step { line, why });
            }
        }
        let argv = match program {
            Program::Shell(script) => vec!["/bin/sh".into(), "-c".into(), script.clone()],
            Program::Argv(argv) => argv.clone(),
        };
        let arguments = work.arguments.clone();
        let places: Vec<String> =
            secrets.iter().map(|secret| format!("{} {}", secret.id, secret.target)).collect();
        let key = json!([argv, arguments, places]).to_string();
        let cwd = work.cwd();
        self.layer(work, line, "RUN", &[key.as_bytes()], async |builder, sandbox| {
            let given: Vec<(&Secret, &Vec<u8>)> = secrets
                .iter()
                .filter_map(|secret| Some((secret, builder.secrets.get(&secret.id)?)))
                .collect();
            let mut made = Vec::new();
            for (number, (secret, value)) in given.iter().enumerate() {
                made.push(builder.place_secret(sandbox, number, secret, value).await?);
            }
            let spec = CommandSpec {
                env: arguments.clone(),
                cwd: Some(cwd.clone()),
                timeout: Some(Duration::from_secs(STEP_SECONDS)),
                ..CommandSpec::new(Run::Argv(argv.clone()))
            };
            let outcome = builder.command(sandbox, spec).await?;
            // Before anything is kept of what the step wrote.
            let files = builder.engine.files(&builder.key.owner, sandbox, None)?;
            for path in made {
                match files.remove(path.as_bytes(), true, Condition::None).await {
                    Ok(()) => {}
                    Err(EngineError::File { source }) if source.kind == FileErrorKind::NotFound => {}
                    Err(error) => return Err(error.into()),
                }
            }
            match outcome {
                Outcome::Exited(0) => Ok(()),
                other => Err(Broken(ended(&other))),
            }
        })
        .await
    }

    /// Puts a secret where a step wants it: into memory that ends with the sandbox, and a link to it into the file system, so that
    /// its bytes are on no disk, and a step that moves it moves a link. Tells what has to be removed after it.
    async fn place_secret(
        &self,
        sandbox: SandboxId,
        number: usize,
        secret: &Secret,
        value: &[u8],
    ) -> Result<String, Broken> {
        let files = self.engine.files(&self.key.owner, sandbox, None)?;
        // The first directory on the way that is not there goes again, with what is in it.
        let mut removed = secret.target.clone();
        let parts: Vec<&str> = secret.target.split('/').filter(|part| !part.is_empty()).collect();
        let mut path = String::new();
        for part in &parts[..parts.len().saturating_sub(1)] {
            path = format!("{path}/{part}");
            match files.stat(path.as_bytes(), Links::Follow).await {
                Ok(_) => {}
                Err(EngineError::File { source }) if source.kind == FileErrorKind::NotFound => {
                    removed = path;
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
        let kept = format!("{MEMORY}/secret-{number}");
        let options = WriteOptions {
            path: kept.clone().into_bytes(),
            mode: Some(0o444),
            parents: true,
            size: Some(value.len() as u64),
            condition: Condition::None,
        };
        let mut writing = files.write(options).await?;
        writing.write(Bytes::copy_from_slice(value)).await?;
        writing.finish().await?;
        let (directory, name) = secret.target.rsplit_once('/').unwrap_or(("", &secret.target));
        if !directory.is_empty() {
            files.make_directory(directory.as_bytes(), true, None).await?;
        }
        let link = Entry {
            path: name.as_bytes().to_vec(),
            kind: EntryKind::Symlink,
            link: kept.into_bytes(),
            size: 0,
            mode: 0o777,
            uid: 0,
            gid: 0,
            modified: 0,
            attributes: Vec::new(),
        };
        let mut unpacking = files.unpack(format!("{directory}/").as_bytes()).await?;
        unpacking.write(archive::entry_header(&link).into()).await?;
        unpacking.write(vec![0; 2 * archive::BLOCK].into()).await?;
        unpacking.finish().await?;
        Ok(removed)
    }

    /// Runs a command, with its output in the log.
    async fn command(&self, sandbox: SandboxId, spec: CommandSpec) -> Result<Outcome, Broken> {
        let command = self.engine.run(&self.key.owner, sandbox, spec).await?;
        let mut output = command.attach(Offsets::default());
        while let Some(event) = output.next().await {
            match event {
                OutputEvent::Bytes { bytes, .. } => self.append(&bytes),
                OutputEvent::Lost { .. } => self.say("[output was lost]\n"),
                OutputEvent::Ended(command) => {
                    if let CommandState::Ended { outcome, .. } = command.state {
                        return Ok(outcome);
                    }
                }
                OutputEvent::Started { .. } | OutputEvent::StdinAck { .. } | OutputEvent::Stalled => {}
            }
        }
        match command.ended().await.state {
            CommandState::Ended { outcome, .. } => Ok(outcome),
            CommandState::Starting | CommandState::Running { .. } => {
                Err(Broken("the sandbox went away".into()))
            }
        }
    }

    async fn copy_from(
        &self,
        work: &mut Work,
        wish: &Copy,
        from: &str,
        done: &HashMap<usize, Rootfs>,
    ) -> Built<How> {
        let line = wish.line;
        let failed = |why: String| BuildError::Step { line, why };
        let (rootfs, number) = match self.stage_named(from, work.number) {
            Some(number) => (done.get(&number).cloned().expect("it was needed, and so it was built"), number),
            // A number that no stage has.
            None => (self.base(from, line).await?, self.file.stages.len() + line),
        };
        let top = rootfs.layers.last().map(|layer| layer.layer.to_string()).unwrap_or_default();
        // What is below says what is copied, so that nothing has to be read to know that it was done before.
        let key = json!([wish.sources, top]).to_string();
        let layer = self.layer_of(work, "COPY", &[key.as_bytes(), &wish.key()]);
        if self.engine.shared().store.has_layer(layer).await.map_err(|error| failed(chain(&error)))? {
            return self.copy(work, wish, Arc::clone(&self.context), Some((key, Vec::new()))).await;
        }
        let _pins = self.engine.shared().images.pin(rootfs.layers.iter().map(|layer| layer.layer));
        self.keep(number, &rootfs).await.map_err(|error| failed(chain(&error)))?;
        let sandbox = self.sandbox(number).await.map_err(|broken| failed(broken.0))?;
        let mut contexts = Vec::new();
        for source in &wish.sources {
            contexts.push(self.packed(sandbox, source).await.map_err(|broken| failed(broken.0))?);
        }
        self.remove(sandbox).await.map_err(|broken| failed(broken.0))?;
        self.copy(work, wish, Arc::clone(&self.context), Some((key, contexts))).await
    }

    /// A path of a sandbox as a context of its own.
    async fn packed(&self, sandbox: SandboxId, path: &str) -> Result<Packed, Broken> {
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        let files = self.engine.files(&self.key.owner, sandbox, None)?;
        let stat = files.stat(path.as_bytes(), Links::Follow).await?;
        let is_directory = stat.kind == wire::files::FileKind::Directory;
        let (upload, room) = self.engine.upload()?;
        let mut packing = files.pack(path.as_bytes()).await?;
        let mut file = upload.file.try_clone().map_err(|error| Broken(error.to_string()))?;
        let mut length = 0;
        while let Some(bytes) = packing.next().await? {
            length += bytes.len() as u64;
            if length > room {
                return Err(Broken("there is no room on the disk for what is copied".into()));
            }
            file.write_all(&bytes).map_err(|error| Broken(error.to_string()))?;
        }
        let read = tokio::task::spawn_blocking(move || Context::read(upload)).await;
        let context = read.map_err(|_| Broken("the engine is stopping".into()))?;
        let context = context.map_err(|error| Broken(error.to_string()))?;
        Ok(Packed { context: Arc::new(context), is_directory })
    }

    /// Sends files into a sandbox. `others`: in place of the context, one for each source, with what they are.
    async fn copy(
        &self,
        work: &mut Work,
        wish: &Copy,
        context: Arc<Context>,
        others: Option<(String, Vec<Packed>)>,
    ) -> Built<How> {
        let line = wish.line;
        let mut parts: Vec<Part> = Vec::new();
        let mut hasher = Hasher::new();
        match &others {
            Some((key, contexts)) => {
                hasher.update(key.as_bytes());
                for Packed { context, is_directory } in contexts {
                    let path = if *is_directory {
                        String::new()
                    } else {
                        context.entries.keys().next().cloned().unwrap_or_default()
                    };
                    parts.push(Part { context: Arc::clone(context), path, is_directory: *is_directory });
                }
            }
            None => {
                for source in &wish.sources {
                    let pattern = dockerfile::context_path(source).map_err(|problem| {
                        BuildError::Dockerfile { source: DockerfileError { line, problem } }
                    })?;
                    let matching = context.matching(&pattern);
                    if matching.is_empty() {
                        let why =
                            format!("`{source}` is not in the context (.dockerignore may leave it out)");
                        return Err(BuildError::Step { line, why });
                    }
                    for path in matching {
                        let is_directory = context.is_directory(&path);
                        hash_part(&context, &path, &mut hasher);
                        parts.push(Part { context: Arc::clone(&context), path, is_directory });
                    }
                }
            }
        }
        let contents = match &others {
            Some((key, _)) => key.as_bytes().to_vec(),
            None => hasher.finish().to_string().into_bytes(),
        };
        let target = work.resolve(&wish.target);
        let into_directory = wish.target.ends_with('/') || wish.target == "." || parts.len() > 1;
        let (chown, mode) = (wish.chown.clone(), wish.mode);
        self.layer(work, line, "COPY", &[&contents, &wish.key()], async |builder, sandbox| {
            let files = builder.engine.files(&builder.key.owner, sandbox, None)?;
            let mut touched = Vec::new();
            for part in &parts {
                let is_there = || async {
                    match files.stat(target.as_bytes(), Links::Follow).await {
                        Ok(stat) => stat.kind == wire::files::FileKind::Directory,
                        Err(_) => false,
                    }
                };
                // The contents of a directory go into the target; a file goes under its own name, or becomes the target.
                let (directory, name) = if part.is_directory {
                    (target.clone(), None)
                } else if into_directory || target == "/" || is_there().await {
                    let name = part.path.rsplit('/').next().unwrap_or_default().to_owned();
                    (target.clone(), Some(name))
                } else {
                    let (directory, name) = target.rsplit_once('/').unwrap_or(("", &target));
                    let directory = if directory.is_empty() { "/" } else { directory };
                    (directory.to_owned(), Some(name.to_owned()))
                };
                if directory != "/" {
                    files.make_directory(directory.as_bytes(), true, None).await?;
                }
                let made = builder.send(&files, part, &directory, name.as_deref(), mode).await?;
                touched.extend(
                    made.into_iter().map(|name| format!("{}/{name}", directory.trim_end_matches('/'))),
                );
            }
            if let Some(chown) = &chown
                && !touched.is_empty()
            {
                let mut argv: Vec<String> =
                    ["chown", "-R", "-h", chown.as_str(), "--"].map(Into::into).to_vec();
                argv.append(&mut touched);
                let spec = CommandSpec {
                    user: Some("root".into()),
                    cwd: Some("/".into()),
                    ..CommandSpec::new(Run::Argv(argv))
                };
                match builder.command(sandbox, spec).await? {
                    Outcome::Exited(0) => {}
                    other => {
                        return Err(Broken(format!("cannot give the files to `{chown}`: {}", ended(&other))));
                    }
                }
            }
            Ok(())
        })
        .await
    }

    /// Sends one part, and tells which names it has made in the directory.
    async fn send(
        &self,
        files: &crate::Files,
        part: &Part,
        directory: &str,
        name: Option<&str>,
        mode: Option<u32>,
    ) -> Result<Vec<String>, Broken> {
        let mut unpacking = files.unpack(directory.as_bytes()).await?;
        let mut names: Vec<String> = Vec::new();
        let inside = if part.path.is_empty() { String::new() } else { format!("{}/", part.path) };
        for (path, found) in &part.context.entries {
            let shown = match name {
                Some(name) if *path == part.path => name.to_owned(),
                None if path.starts_with(&inside) => path[inside.len()..].to_owned(),
                _ => continue,
            };
            if shown.is_empty() {
                continue;
            }
            let first = shown.split('/').next().unwrap_or_default().to_owned();
            if names.last() != Some(&first) {
                names.push(first);
            }
            let entry = Entry {
                path: shown.into_bytes(),
                mode: match (mode, found.entry.kind) {
                    (Some(mode), EntryKind::File | EntryKind::Directory) => mode,
                    _ => found.entry.mode,
                },
                uid: 0,
                gid: 0,
                attributes: Vec::new(),
                ..found.entry.clone()
            };
            unpacking.write(archive::entry_header(&entry).into()).await?;
            let mut at = found.at;
            let end = found.at + found.entry.size;
            while at < end {
                let length = usize::try_from(end - at).unwrap_or(PIECE).min(PIECE);
                let file = part.context.upload.file.try_clone().map_err(|error| Broken(error.to_string()))?;
                let read = tokio::task::spawn_blocking(move || {
                    let mut piece = vec![0; length];
                    file.read_exact_at(&mut piece, at).map(|()| piece)
                });
                let piece = read.await.map_err(|_| Broken("the engine is stopping".into()))?;
                let piece = piece.map_err(|error| Broken(error.to_string()))?;
                at += piece.len() as u64;
                unpacking.write(piece.into()).await?;
            }
            let padding =
                (archive::BLOCK as u64 - found.entry.size % archive::BLOCK as u64) % archive::BLOCK as u64;
            if padding > 0 {
                unpacking.write(vec![0; padding as usize].into()).await?;
            }
        }
        unpacking.write(vec![0; 2 * archive::BLOCK].into()).await?;
        unpacking.finish().await?;
        names.dedup();
        Ok(names)
    }

    /// What a step's layer is called: after what is below it, and all that the step depends on.
    fn layer_of(&self, work: &Work, word: &str, parts: &[&[u8]]) -> Digest {
        let config = &work.rootfs.config;
        let context =
            json!([VERSION, word, config.env, config.user, config.cwd, work.pending, work.rootfs.over_host])
                .to_string();
        let mut hasher = Hasher::new();
        for part in std::iter::once(context.as_bytes()).chain(parts.iter().copied()) {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        let below = work.rootfs.layers.last().map(|layer| layer.layer);
        chained(below, digest_of(format!("shoal build {}", hasher.finish()).as_bytes()))
    }

    /// Makes the layer of a step: in a sandbox, unless it was made before.
    async fn layer(
        &self,
        work: &mut Work,
        line: usize,
        word: &str,
        parts: &[&[u8]],
        act: impl AsyncFnOnce(&Self, SandboxId) -> Result<(), Broken>,
    ) -> Built<How> {
        let shared = self.engine.shared();
        let failed = |why: String| BuildError::Step { line, why };
        let layer = self.layer_of(work, word, parts);
        let most = if work.rootfs.over_host { HOST_LAYERS_MAX } else { LAYERS_MAX - 1 };
        if work.rootfs.layers.len() >= most {
            return Err(failed(format!("the image would have more than {most} layers")));
        }
        work._pins.push(shared.images.pin([layer]));
        let facts = shared.store.layer_facts(layer).await.map_err(|error| failed(chain(&error)))?;
        let (facts, how) = match facts {
            Some(facts) => (facts, How::Cached),
            None => {
                self.keep(work.number, &work.rootfs).await.map_err(|error| failed(chain(&error)))?;
                let sandbox = self.sandbox(work.number).await.map_err(|broken| failed(broken.0))?;
                let done = self.act(work, sandbox, act).await;
                let captured = match done {
                    Ok(()) => self.capture(work, sandbox, layer).await.map_err(|error| failed(chain(&error))),
                    Err(broken) => Err(failed(broken.0)),
                };
                self.remove(sandbox).await.map_err(|broken| failed(broken.0))?;
                (captured?, How::Done)
            }
        };
        work.pending.clear();
        work.rootfs.layers.push(StoredLayer { layer, blob: None, size: 0, facts });
        Ok(how)
    }

    async fn act(
        &self,
        work: &Work,
        sandbox: SandboxId,
        act: impl AsyncFnOnce(&Self, SandboxId) -> Result<(), Broken>,
    ) -> Result<(), Broken> {
        let files = self.engine.files(&self.key.owner, sandbox, None)?;
        for path in &work.pending {
            files.make_directory(path.as_bytes(), true, None).await?;
        }
        act(self, sandbox).await
    }

    /// What the sandbox has written becomes a layer. Its processes end first, so that nothing changes meanwhile.
    async fn capture(
        &self,
        work: &Work,
        sandbox: SandboxId,
        layer: Digest,
    ) -> Result<LayerFacts, ImageFault> {
        let shared = self.engine.shared();
        let failed = |source: BackendError| ImageFault::Layer { number: 1, count: 1, source };
        // Its driver sees the end too, and ends what is left; where the two meet, one finds gone what the other ended.
        let home = self.engine.home(&self.key.owner, sandbox)?;
        home.expect_end();
        let mut attempts = END_ATTEMPTS;
        while let Err(error) = shared.backend.end_processes(sandbox, Processes::All).await {
            attempts -= 1;
            if attempts == 0 {
                return Err(failed(error));
            }
            tokio::time::sleep(END_PAUSE).await;
        }
        let below = work.rootfs.layers.iter().rev().map(|layer| layer.layer).collect();
        let over_host = work.rootfs.over_host;
        let from = super::capture::written_by(&home);
        self.have(&LayerSpec { layer, below, over_host, from }).await
    }

    /// A sandbox over what a stage has come to.
    async fn sandbox(&self, stage: usize) -> Result<SandboxId, Broken> {
        let serial = {
            let mut serial = self.serial.lock().unwrap_or_else(PoisonError::into_inner);
            *serial += 1;
            *serial
        };
        let labels = [("shoal.build".to_owned(), self.build.id.to_string())].into();
        let spec = SandboxSpec {
            image: Some(self.name_of(stage)),
            cpu_millis: Some(self.spec.cpu_millis),
            memory_bytes: Some(self.spec.memory_bytes),
            labels: Labels::new(labels)?,
            idempotency_key: Some(format!("{}{serial}", sandbox_prefix(self.build.id))),
            ..SandboxSpec::default()
        };
        Ok(self.engine.create(&self.key, spec, Wait::Ready).await?.id)
    }

    async fn remove(&self, sandbox: SandboxId) -> Result<(), Broken> {
        Ok(self.engine.delete(&self.key.owner, sandbox).await?)
    }
}

/// What became of a step.
enum How {
    /// It changes no files.
    Noted,
    Cached,
    Done,
}

/// Why a step broke off, in words.
struct Broken(String);

impl From<EngineError> for Broken {
    fn from(error: EngineError) -> Self {
        Self(chain(&error))
    }
}

/// What a COPY asks for.
struct Copy {
    sources: Vec<String>,
    target: String,
    chown: Option<String>,
    mode: Option<u32>,
    line: usize,
}

impl Copy {
    /// What a layer depends on beside what is copied.
    fn key(&self) -> Vec<u8> {
        json!([self.target, self.chown, self.mode]).to_string().into_bytes()
    }
}

/// A path of a sandbox, packed.
struct Packed {
    context: Arc<Context>,
    is_directory: bool,
}

/// Something to send.
struct Part {
    context: Arc<Context>,
    path: String,
    is_directory: bool,
}

/// Names, modes and contents: what a layer of it depends on. Times are not among them, since every checkout has others.
fn hash_part(context: &Context, path: &str, hasher: &mut Hasher) {
    let inside = format!("{path}/");
    for (name, found) in &context.entries {
        if path.is_empty() || name == path || name.starts_with(&inside) {
            let entry = &found.entry;
            let kind = match entry.kind {
                EntryKind::File => 'f',
                EntryKind::Directory => 'd',
                _ => 'l',
            };
            let link = String::from_utf8_lossy(&entry.link);
            let text = json!([path, name, kind.to_string(), entry.mode, link, found.contents.to_string()])
                .to_string();
            hasher.update(text.as_bytes());
        }
    }
}

fn argv(program: &Program) -> Vec<String> {
    match program {
        Program::Shell(script) if script.is_empty() => Vec::new(),
        Program::Shell(script) => vec!["/bin/sh".into(), "-c".into(), script.clone()],
        Program::Argv(argv) => argv.clone(),
    }
}

fn ended(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Exited(code) => format!("the command exited with {code}"),
        Outcome::Signaled(signal) => format!("the command was ended by signal {signal}"),
        Outcome::TimedOut(_) | Outcome::TimedOutUnheard | Outcome::IdleTimedOut(_) => {
            format!("the command took longer than {STEP_SECONDS} seconds")
        }
        Outcome::Killed(_) => "the command was killed".into(),
        Outcome::OutOfMemory(_) => "the memory ran out; give the build more".into(),
        Outcome::FailedToStart(error) => format!("the command could not be started: {error}"),
        Outcome::SandboxGone => "the sandbox ended under the command".into(),
    }
}

/// What is wrong with a Dockerfile, for whoever tells it.
pub fn hint(error: &BuildError) -> Option<String> {
    match error {
        BuildError::Dockerfile { source } => Some(source.hint()),
        BuildError::Context { .. } | BuildError::Step { .. } => None,
    }
}
