//! Templates: an environment that is described once, and what it takes to have it ready.
//!
//! A template has a name, which may change, and versions, which do not: every change of what is in it makes another. Sandboxes are
//! made from the newest and keep the one they were made from. A new version is *prepared*: its image is pulled, if it is not here,
//! and held from then on, so that the name of the image may mean something else tomorrow and the template still means the same.
//! That happens beside whoever asked, and a daemon that was cut off in the middle takes it up again.
//!
//! Owns the rows' reflection in memory and the tasks that prepare; pulling is `images`' business, admitting sandboxes the engine's.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use image::Digest;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tracing::{Instrument, info, info_span, warn};
use wire::launch::Limits;
use wire::{SandboxId, TemplateId};

use crate::error::{EngineError, chain};
use crate::events::TemplateHappened;
use crate::home::Shared;
use crate::images::{self, Choice, ImageName, PullProgress, PullSpec};
use crate::keys::random_u128;
use crate::labels::Labels;
use crate::model::Owner;
use crate::store::{LoadedTemplates, TemplateRow, VersionRow};
use crate::template::{CPU_MILLIS_MIN, DEFAULT, DISK_BYTES_MAX, DISK_BYTES_MIN, LIMITS, MEMORY_BYTES_MIN};
use crate::volumes::{VolumeMount, check_mounts};
use crate::{SANDBOX_ENV_BYTES_MAX, check_env};

pub use crate::names::TemplateName;

/// Templates of one owner, at most.
const TEMPLATES_MAX: usize = 10_000;
/// How long an image may take to arrive.
const PULL_SECONDS: u64 = 3600;
/// How often an image that is removed as soon as it is here is pulled again.
const TAKES_MAX: usize = 3;
/// What the kernel takes as a path.
const PATH_MAX: usize = 4096;
/// Longer than any name in a passwd file, twice.
const USER_MAX: usize = 256;
/// The entry command, in all.
const COMMAND_BYTES_MAX: usize = 128 * 1024;
/// What is kept of the reason of a failure.
const REASON_MAX: usize = 4096;

/// What is in a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateSpec {
    /// `host`, a reference or an alias.
    pub image: String,
    /// Thousandths of a processor.
    pub cpu_millis: u32,
    /// Memory.
    pub memory_bytes: u64,
    /// What a sandbox's files may take, where the store has limits; the usual where there is none.
    pub disk_bytes: Option<u64>,
    /// Added to the image's environment.
    pub env: BTreeMap<String, String>,
    /// Where commands run; the image's where there is none.
    pub cwd: Option<String>,
    /// Who commands run as; the image's where there is none.
    pub user: Option<String>,
    /// What a command runs that names no program; the image's where it is empty.
    pub command: Vec<String>,
    /// Given to every sandbox that is made from it.
    pub labels: Labels,
    /// Volumes and where they are mounted.
    pub mounts: Vec<VolumeMount>,
}

impl Default for TemplateSpec {
    fn default() -> Self {
        Self {
            image: images::HOST.into(),
            cpu_millis: LIMITS.cpu_millis,
            memory_bytes: LIMITS.memory_bytes,
            disk_bytes: None,
            env: BTreeMap::new(),
            cwd: None,
            user: None,
            command: Vec::new(),
            labels: Labels::default(),
            mounts: Vec::new(),
        }
    }
}

/// What should change about a template, all of it or nothing. What is left out stays as it is.
#[derive(Debug, Clone, Default)]
pub struct TemplateUpdate {
    /// A new name.
    pub name: Option<TemplateName>,
    /// Another image.
    pub image: Option<String>,
    /// Thousandths of a processor.
    pub cpu_millis: Option<u32>,
    /// Memory.
    pub memory_bytes: Option<u64>,
    /// Another limit of the disk, or none.
    pub disk_bytes: Option<Option<u64>>,
    /// In place of all variables.
    pub env: Option<BTreeMap<String, String>>,
    /// Another place, or none.
    pub cwd: Option<Option<String>>,
    /// Another user, or none.
    pub user: Option<Option<String>>,
    /// In place of the whole command.
    pub command: Option<Vec<String>>,
    /// In place of all labels.
    pub labels: Option<Labels>,
    /// In place of all mounts.
    pub mounts: Option<Vec<VolumeMount>>,
}

impl TemplateUpdate {
    fn applied(self, spec: &TemplateSpec) -> TemplateSpec {
        let spec = spec.clone();
        TemplateSpec {
            image: self.image.unwrap_or(spec.image),
            cpu_millis: self.cpu_millis.unwrap_or(spec.cpu_millis),
            memory_bytes: self.memory_bytes.unwrap_or(spec.memory_bytes),
            disk_bytes: self.disk_bytes.unwrap_or(spec.disk_bytes),
            env: self.env.unwrap_or(spec.env),
            cwd: self.cwd.unwrap_or(spec.cwd),
            user: self.user.unwrap_or(spec.user),
            command: self.command.unwrap_or(spec.command),
            labels: self.labels.unwrap_or(spec.labels),
            mounts: self.mounts.unwrap_or(spec.mounts),
        }
    }
}

/// How far a version is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Preparation {
    /// Its image is on its way.
    Preparing,
    /// Sandboxes can be made from it at full speed.
    Ready(Prepared),
    /// It could not be prepared. It can be tried again.
    Failed {
        /// Why.
        reason: String,
    },
    /// There is a newer one.
    Replaced,
}

impl Preparation {
    /// As it is said.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Preparing => "preparing",
            Self::Ready(_) => "ready",
            Self::Failed { .. } => "failed",
            Self::Replaced => "replaced",
        }
    }
}

/// What came of a preparation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepared {
    /// What the image's name meant: `host`, or a reference in its canonical spelling.
    pub resolved: String,
    /// Just which image; none for `host`.
    pub image: Option<Digest>,
}

/// A template, as it is at one moment.
#[derive(Debug, Clone)]
pub struct Template {
    /// Names it whatever it is called. The built-in one has none.
    pub id: Option<TemplateId>,
    /// What it is called.
    pub name: String,
    /// The newest version, from 1 on.
    pub version: u32,
    /// What is in that.
    pub spec: TemplateSpec,
    /// How far that is.
    pub preparation: Preparation,
    /// How many sandboxes were made from it, whichever version, and still exist.
    pub sandboxes: usize,
    /// When it was first made.
    pub created_at: SystemTime,
    /// When its newest version was made.
    pub updated_at: SystemTime,
}

/// What stays the same in all versions.
#[derive(Debug)]
pub(crate) struct Head {
    pub id: TemplateId,
    pub owner: Owner,
    pub created_at: SystemTime,
    name: Mutex<TemplateName>,
}

impl Head {
    pub fn name(&self) -> TemplateName {
        self.name.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// One version. Whoever was made from it holds it.
pub(crate) struct Version {
    pub head: Arc<Head>,
    pub number: u32,
    pub spec: TemplateSpec,
    made_at: SystemTime,
    preparation: watch::Sender<Preparation>,
    progress: watch::Sender<PullProgress>,
    task: Mutex<Option<AbortHandle>>,
}

impl Version {
    fn new(head: &Arc<Head>, row: &VersionRow) -> Arc<Self> {
        Arc::new(Self {
            head: Arc::clone(head),
            number: row.version,
            spec: row.spec.clone(),
            made_at: row.made_at,
            preparation: watch::Sender::new(row.preparation.clone()),
            progress: watch::Sender::new(PullProgress::default()),
            task: Mutex::new(None),
        })
    }

    pub fn preparation(&self) -> Preparation {
        self.preparation.borrow().clone()
    }

    /// Tells whenever that changes.
    pub fn watch(&self) -> watch::Receiver<Preparation> {
        self.preparation.subscribe()
    }

    /// Waits until it is no longer being prepared.
    pub async fn settled(&self) -> Preparation {
        let mut preparation = self.preparation.subscribe();
        let settled = preparation.wait_for(|now| *now != Preparation::Preparing).await;
        // The sender is here, so it cannot have gone.
        settled.map_or(Preparation::Replaced, |now| now.clone())
    }

    fn stop(&self) {
        if let Some(task) = self.task.lock().unwrap_or_else(PoisonError::into_inner).take() {
            task.abort();
        }
    }
}

/// All templates of one data directory.
#[derive(Default)]
pub(crate) struct Templates {
    stock: Mutex<Stock>,
    /// Held from a change of rows until the stock says the same, as with images.
    changing: tokio::sync::Mutex<()>,
}

/// By owner and name.
type Stock = BTreeMap<(Owner, TemplateName), Arc<Version>>;

/// What a new sandbox is made from, as far as its template says.
pub(crate) enum Source {
    /// What is built in.
    BuiltIn,
    /// A version that people wrote.
    Version(Arc<Version>),
}

impl Source {
    pub fn spec(&self) -> TemplateSpec {
        match self {
            Self::BuiltIn => TemplateSpec::default(),
            Self::Version(version) => version.spec.clone(),
        }
    }
}

impl Templates {
    /// Reads what is here. Tells which version each sandbox was made from.
    pub fn open(loaded: LoadedTemplates) -> (Self, BTreeMap<SandboxId, Arc<Version>>) {
        let mut versions: BTreeMap<(TemplateId, u32), VersionRow> =
            loaded.versions.into_iter().map(|row| ((row.template, row.version), row)).collect();
        let mut stock = Stock::new();
        let mut heads = BTreeMap::new();
        let mut made = BTreeMap::new();
        for row in loaded.templates {
            let TemplateRow { id, owner, name, version, created_at } = row;
            let head =
                Arc::new(Head { id, owner: owner.clone(), created_at, name: Mutex::new(name.clone()) });
            if let Some(row) = versions.remove(&(id, version)) {
                let newest = Version::new(&head, &row);
                made.insert((id, version), Arc::clone(&newest));
                stock.insert((owner, name), newest);
            }
            heads.insert(id, head);
        }
        let mut uses = BTreeMap::new();
        for held in loaded.uses {
            let key = (held.template, held.version);
            if !made.contains_key(&key)
                && let (Some(row), Some(head)) = (versions.remove(&key), heads.get(&held.template))
            {
                made.insert(key, Version::new(head, &row));
            }
            if let Some(version) = made.get(&key) {
                uses.insert(held.sandbox, Arc::clone(version));
            }
        }
        (Self { stock: Mutex::new(stock), changing: tokio::sync::Mutex::default() }, uses)
    }

    fn stock(&self) -> MutexGuard<'_, Stock> {
        self.stock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all preparations.
    pub fn halt(&self) {
        self.stock().values().for_each(|version| version.stop());
    }

    /// What an owner means by a name.
    pub fn find(&self, owner: &Owner, name: &str) -> Result<Source, EngineError> {
        if name == DEFAULT {
            return Ok(Source::BuiltIn);
        }
        self.newest(owner, name).map(Source::Version)
    }

    fn newest(&self, owner: &Owner, name: &str) -> Result<Arc<Version>, EngineError> {
        let not_found = || EngineError::TemplateNotFound { name: name.to_owned() };
        let name = TemplateName::parse(name).map_err(|_| not_found())?;
        self.stock().get(&(owner.clone(), name)).cloned().ok_or_else(not_found)
    }

    /// What stays the same in all versions of a template.
    pub fn head(&self, template: TemplateId) -> Option<Arc<Head>> {
        let stock = self.stock();
        stock.values().find(|version| version.head.id == template).map(|version| Arc::clone(&version.head))
    }

    /// As long as this is held, no template comes, changes or goes.
    pub async fn unchanged(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.changing.lock().await
    }

    /// The names of an owner's templates that hold an image.
    pub fn holding(&self, image: Digest) -> usize {
        let holds = |version: &&Arc<Version>| matches!(version.preparation(), Preparation::Ready(prepared) if prepared.image == Some(image));
        self.stock().values().filter(holds).count()
    }
}

/// Goes on with what a daemon before this one began.
pub(crate) fn take_up(shared: &Arc<Shared>) {
    let all: Vec<_> = shared.templates.stock().values().cloned().collect();
    for version in all {
        if version.preparation() == Preparation::Preparing {
            info!(template = %version.head.name(), "goes on preparing a template");
            start_preparing(shared, &version);
        }
    }
}

/// The files of these images are gone: whatever holds one of them is prepared again. Its row says so already.
pub(crate) fn prepare_again(shared: &Arc<Shared>, broken: &[Digest]) {
    let all: Vec<_> = shared.templates.stock().values().cloned().collect();
    for version in all {
        let is_broken = matches!(version.preparation(),
            Preparation::Ready(Prepared { image: Some(image), .. }) if broken.contains(&image));
        if is_broken {
            tell(shared, &version, Preparation::Preparing);
            start_preparing(shared, &version);
        }
    }
}

fn start_preparing(shared: &Arc<Shared>, version: &Arc<Version>) {
    let span = info_span!("template", name = %version.head.name(), version = version.number);
    let task = prepare(Arc::clone(shared), Arc::clone(version)).instrument(span);
    let task = shared.runtime.spawn(task).abort_handle();
    *version.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
}

async fn prepare(shared: Arc<Shared>, version: Arc<Version>) {
    let late = || EngineError::Full { what: format!("its image did not come within {PULL_SECONDS} seconds") };
    let work = tokio::time::timeout(Duration::from_secs(PULL_SECONDS), hold_image(&shared, &version)).await;
    let preparation = match work.unwrap_or_else(|_| Err(late())) {
        Ok(prepared) => {
            info!("template is ready");
            Preparation::Ready(prepared)
        }
        Err(error) => {
            let mut reason = chain(&error);
            let end = (0..=reason.len().min(REASON_MAX)).rev().find(|at| reason.is_char_boundary(*at));
            reason.truncate(end.unwrap_or(0));
            warn!(reason, "cannot prepare template");
            let failed = Preparation::Failed { reason };
            let recorded =
                shared.store.record_preparation(version.head.id, version.number, failed.clone()).await;
            if let Err(error) = recorded {
                // The row still says that it is being prepared; the next daemon tries again.
                warn!(error = chain(&error), "cannot record that a template failed");
            }
            failed
        }
    };
    tell(&shared, &version, preparation);
}

/// Sees to it that the image is here and cannot go.
async fn hold_image(shared: &Arc<Shared>, version: &Version) -> Result<Prepared, EngineError> {
    let (head, store) = (&version.head, &shared.store);
    let Choice { name, .. } = shared.images.choose(&version.spec.image)?;
    let ImageName::Reference(reference) = &name else {
        let prepared = Prepared { resolved: images::HOST.into(), image: None };
        store.record_preparation(head.id, version.number, Preparation::Ready(prepared.clone())).await?;
        return Ok(prepared);
    };
    let resolved = name.canonical();
    for _ in 0..TAKES_MAX {
        if shared.images.find(&head.owner, &resolved).is_none() {
            let pull = images::pull(shared, &head.owner, PullSpec::new(reference.clone()));
            let mut progress = pull.progress();
            let mut finished = std::pin::pin!(pull.finished());
            loop {
                tokio::select! {
                    images = &mut finished => {
                        images?;
                        break;
                    }
                    Ok(()) = progress.changed() => {
                        version.progress.send_replace(progress.borrow_and_update().clone());
                    }
                }
            }
        }
        let taken = store.take_template_image(head.id, version.number, head.owner.clone(), resolved.clone());
        if let Some(image) = taken.await? {
            return Ok(Prepared { resolved, image: Some(image) });
        }
    }
    Err(EngineError::ImageNotFound { name: name.familiar() })
}

/// How far a version is now, for whoever waits or watches.
fn tell(shared: &Shared, version: &Version, preparation: Preparation) {
    let told = version.preparation.send_if_modified(|now| {
        // One that was replaced at this moment stays so.
        let stands = *now != Preparation::Replaced;
        if stands {
            *now = preparation.clone();
        }
        stands
    });
    if told {
        publish(shared, version, Some(preparation));
    }
}

fn publish(shared: &Shared, version: &Version, preparation: Option<Preparation>) {
    let what = TemplateHappened { name: version.head.name(), version: version.number, preparation };
    shared.events.publish_template(&version.head.owner, what);
}

/// Checks what is in a template, and gives it the spelling that rows keep.
fn checked(mut spec: TemplateSpec) -> Result<TemplateSpec, EngineError> {
    let invalid = |what, why: String| Err(EngineError::Invalid { what, why });
    spec.image = ImageName::parse(&spec.image)?.canonical();
    check_limits(spec.cpu_millis, spec.memory_bytes)?;
    spec.disk_bytes.map(check_disk).transpose()?;
    check_env(&spec.env, SANDBOX_ENV_BYTES_MAX)?;
    if let Some(cwd) = &spec.cwd
        && (!cwd.starts_with('/') || cwd.len() > PATH_MAX || cwd.contains('\0'))
    {
        return invalid("cwd", format!("it is an absolute path of at most {PATH_MAX} bytes"));
    }
    if let Some(user) = &spec.user
        && (!(1..=USER_MAX).contains(&user.len()) || user.contains('\0'))
    {
        return invalid("user", format!("it is a name or a number of 1 to {USER_MAX} bytes"));
    }
    if spec.command.first().is_some_and(String::is_empty) {
        return invalid("command", "it names no program".into());
    }
    if spec.command.iter().any(|argument| argument.contains('\0')) {
        return invalid("command", "an argument contains a NUL byte".into());
    }
    let length: usize = spec.command.iter().map(|argument| argument.len() + 1).sum();
    if length > COMMAND_BYTES_MAX {
        return invalid("command", format!("it has {length} bytes, the limit is {COMMAND_BYTES_MAX}"));
    }
    spec.mounts = check_mounts(spec.mounts)?;
    Ok(spec)
}

/// What a sandbox's files may be limited to.
pub(crate) fn check_disk(disk_bytes: u64) -> Result<(), EngineError> {
    if disk_bytes < DISK_BYTES_MIN {
        let why = format!("it is at least {DISK_BYTES_MIN} bytes; was a unit such as `Gi` left out?");
        return Err(EngineError::Invalid { what: "disk", why });
    }
    if disk_bytes > DISK_BYTES_MAX {
        return Err(EngineError::Invalid {
            what: "disk",
            why: format!("it is at most {DISK_BYTES_MAX} bytes"),
        });
    }
    Ok(())
}

/// What a sandbox may ask for, beside the key's limits and the machine's capacity.
pub(crate) fn check_limits(cpu_millis: u32, memory_bytes: u64) -> Result<(), EngineError> {
    if cpu_millis < CPU_MILLIS_MIN {
        let why = format!("it is at least {CPU_MILLIS_MIN} thousandths of a processor");
        return Err(EngineError::Invalid { what: "cpu", why });
    }
    // Rows keep signed numbers.
    if !(MEMORY_BYTES_MIN..=i64::MAX as u64).contains(&memory_bytes) {
        let why = format!("it is at least {MEMORY_BYTES_MIN} bytes; was a unit such as `Mi` left out?");
        return Err(EngineError::Invalid { what: "memory", why });
    }
    Ok(())
}

/// What a sandbox of a template may use.
pub(crate) fn limits_of(spec: &TemplateSpec) -> Limits {
    let disk_bytes = spec.disk_bytes.or(LIMITS.disk_bytes);
    Limits { cpu_millis: spec.cpu_millis, memory_bytes: spec.memory_bytes, pids: LIMITS.pids, disk_bytes }
}

/// What callers ask about templates.
impl crate::Engine {
    /// An owner's templates by name, the built-in one first.
    pub fn templates(&self, owner: &Owner) -> Vec<Template> {
        let stock: Vec<_> = self.shared().templates.stock().values().cloned().collect();
        let mine = stock.iter().filter(|version| version.head.owner == *owner);
        let counts = self.sandboxes_by_template(owner);
        let count = |id: Option<TemplateId>| counts.get(&id).copied().unwrap_or(0);
        let mut list = vec![built_in(count(None))];
        list.extend(mine.map(|version| described(version, count(Some(version.head.id)))));
        list
    }

    /// A template by its name.
    pub fn template(&self, owner: &Owner, name: &str) -> Result<Template, EngineError> {
        let counts = self.sandboxes_by_template(owner);
        let count = |id: Option<TemplateId>| counts.get(&id).copied().unwrap_or(0);
        Ok(match self.shared().templates.find(owner, name)? {
            Source::BuiltIn => built_in(count(None)),
            Source::Version(version) => described(&version, count(Some(version.head.id))),
        })
    }

    fn sandboxes_by_template(&self, owner: &Owner) -> BTreeMap<Option<TemplateId>, usize> {
        let mut counts = BTreeMap::new();
        for home in self.shared().directory().all() {
            if home.owner == *owner && !home.is_waiting() {
                *counts.entry(home.version.as_ref().map(|version| version.head.id)).or_default() += 1;
            }
        }
        counts
    }

    /// Makes a template. Answers when its row is written; preparing goes on behind it.
    pub async fn create_template(
        &self,
        owner: &Owner,
        name: TemplateName,
        spec: TemplateSpec,
    ) -> Result<Template, EngineError> {
        let _changing = self.shared().templates.changing.lock().await;
        self.check_template_name(owner, &name)?;
        self.insert_template(owner, name, spec, None).await
    }

    /// Makes a template, or gives one that exists just this content. One that has it already stays as it is, save for what failed,
    /// which is tried again. With what was prepared elsewhere, it is ready at once.
    pub async fn apply_template(
        &self,
        owner: &Owner,
        name: TemplateName,
        spec: TemplateSpec,
        prepared: Option<Prepared>,
    ) -> Result<Template, EngineError> {
        let _changing = self.shared().templates.changing.lock().await;
        match self.shared().templates.newest(owner, name.as_str()) {
            Ok(version) => self.change_template(version, None, spec, prepared).await,
            Err(_) => {
                self.check_template_name(owner, &name)?;
                self.insert_template(owner, name, spec, prepared).await
            }
        }
    }

    /// Changes a template. What sandboxes are made from is another version then; a name is not part of it.
    pub async fn update_template(
        &self,
        owner: &Owner,
        name: &str,
        mut update: TemplateUpdate,
    ) -> Result<Template, EngineError> {
        let _changing = self.shared().templates.changing.lock().await;
        if name == DEFAULT {
            return Err(EngineError::TemplateBuiltIn);
        }
        let version = self.shared().templates.newest(owner, name)?;
        let other = update.name.take().filter(|other| *other != version.head.name());
        if let Some(other) = &other {
            self.check_template_name(owner, other)?;
        }
        let spec = update.applied(&version.spec);
        self.change_template(version, other, spec, None).await
    }

    /// Tries a preparation again that failed. Anything else stays as it is.
    pub async fn prepare_template(&self, owner: &Owner, name: &str) -> Result<Template, EngineError> {
        let shared = self.shared();
        let _changing = shared.templates.changing.lock().await;
        if let Source::Version(version) = shared.templates.find(owner, name)? {
            self.try_again(&version).await?;
        }
        self.template(owner, name)
    }

    /// Removes a template. Refused while a sandbox was made from it, whichever version, or a pool is for it.
    pub async fn delete_template(&self, owner: &Owner, name: &str) -> Result<(), EngineError> {
        let shared = self.shared();
        let _changing = shared.templates.changing.lock().await;
        if name == DEFAULT {
            return Err(EngineError::TemplateBuiltIn);
        }
        let version = shared.templates.newest(owner, name)?;
        let key = (owner.clone(), version.head.name());
        {
            // Creates look the template up under the same lock, so none begins behind this.
            let directory = shared.directory();
            let id = version.head.id;
            let held = |home: &&Arc<crate::home::Home>| {
                home.version.as_ref().is_some_and(|version| version.head.id == id)
            };
            let pools = shared.pools.holding(owner, id);
            let ours = |home: &&Arc<crate::home::Home>| held(home) && (pools == 0 || !home.is_waiting());
            let sandboxes = directory.all().iter().filter(ours).count();
            if sandboxes > 0 || pools > 0 {
                return Err(EngineError::TemplateInUse { name: name.to_owned(), sandboxes, pools });
            }
            shared.templates.stock().remove(&key);
        }
        if let Err(error) = shared.store.delete_template(version.head.id).await {
            shared.templates.stock().insert(key, version);
            return Err(error);
        }
        version.stop();
        version.preparation.send_replace(Preparation::Replaced);
        publish(shared, &version, None);
        info!(template = name, "template deleted");
        Ok(())
    }

    /// How far a template is, now and whenever that changes.
    pub fn watch_template(&self, owner: &Owner, name: &str) -> Result<TemplateWatcher, EngineError> {
        let followed = match self.shared().templates.find(owner, name)? {
            Source::BuiltIn => None,
            Source::Version(version) => Some(Followed::new(version)),
        };
        Ok(TemplateWatcher { engine: self.clone(), owner: owner.clone(), followed, over: false })
    }

    fn check_template_name(&self, owner: &Owner, name: &TemplateName) -> Result<(), EngineError> {
        let stock = self.shared().templates.stock();
        if name.as_str() == DEFAULT {
            return Err(EngineError::TemplateBuiltIn);
        }
        if stock.contains_key(&(owner.clone(), name.clone())) {
            return Err(EngineError::TemplateNameTaken { name: name.to_string() });
        }
        if stock.keys().filter(|(other, _)| other == owner).count() >= TEMPLATES_MAX {
            return Err(EngineError::Quota { what: "templates", limit: TEMPLATES_MAX as u64 });
        }
        Ok(())
    }

    /// `changing` is held.
    async fn insert_template(
        &self,
        owner: &Owner,
        name: TemplateName,
        spec: TemplateSpec,
        prepared: Option<Prepared>,
    ) -> Result<Template, EngineError> {
        let (shared, spec, now) = (self.shared(), checked(spec)?, crate::now());
        // A name that means nothing is told at once, and not to whoever makes the first sandbox.
        shared.volumes.resolve(owner, spec.mounts.clone())?;
        let id = TemplateId::from_random(random_u128());
        let first = VersionRow {
            template: id,
            version: 1,
            preparation: first_preparation(shared, &spec, prepared)?,
            spec,
            made_at: now,
        };
        let row = TemplateRow { id, owner: owner.clone(), name: name.clone(), version: 1, created_at: now };
        shared.store.insert_template(row, first.clone()).await?;
        info!(template = %name, "template made");
        let head = Head { id, owner: owner.clone(), created_at: now, name: Mutex::new(name.clone()) };
        let version = Version::new(&Arc::new(head), &first);
        self.take_in(&version);
        Ok(described(&version, 0))
    }

    /// `changing` is held.
    async fn change_template(
        &self,
        version: Arc<Version>,
        name: Option<TemplateName>,
        spec: TemplateSpec,
        prepared: Option<Prepared>,
    ) -> Result<Template, EngineError> {
        let shared = self.shared();
        let (head, spec) = (&version.head, checked(spec)?);
        if spec.mounts != version.spec.mounts {
            shared.volumes.resolve(&head.owner, spec.mounts.clone())?;
        }
        let same_image = match (&prepared, version.preparation()) {
            (None, _) => true,
            (Some(next), Preparation::Ready(now)) => *next == now,
            (Some(_), _) => false,
        };
        let next = match spec != version.spec || !same_image {
            true => Some(VersionRow {
                template: head.id,
                version: version.number + 1,
                preparation: first_preparation(shared, &spec, prepared)?,
                spec,
                made_at: crate::now(),
            }),
            false => None,
        };
        if name.is_none() && next.is_none() {
            self.try_again(&version).await?;
            return self.template(&head.owner, head.name().as_str());
        }
        shared.store.change_template(head.id, name.clone(), next.clone()).await?;
        if let Some(name) = name {
            // Name and stock change together: whoever reads the new name finds it.
            let mut stock = shared.templates.stock();
            let before = std::mem::replace(
                &mut *head.name.lock().unwrap_or_else(PoisonError::into_inner),
                name.clone(),
            );
            stock.remove(&(head.owner.clone(), before));
            stock.insert((head.owner.clone(), name), Arc::clone(&version));
            drop(stock);
            if next.is_none() {
                publish(shared, &version, Some(version.preparation()));
            }
        }
        if let Some(next) = next {
            info!(template = %head.name(), version = next.version, "template has another version");
            let next = Version::new(head, &next);
            self.take_in(&next);
            // Whoever waits for the old one looks at the new one then.
            version.stop();
            version.preparation.send_replace(Preparation::Replaced);
        }
        self.template(&head.owner, head.name().as_str())
    }

    /// A version is in its row: from now on it is what its template means.
    fn take_in(&self, version: &Arc<Version>) {
        let shared = self.shared();
        let key = (version.head.owner.clone(), version.head.name());
        shared.templates.stock().insert(key, Arc::clone(version));
        publish(shared, version, Some(version.preparation()));
        if version.preparation() == Preparation::Preparing {
            start_preparing(shared, version);
        }
    }

    async fn try_again(&self, version: &Arc<Version>) -> Result<(), EngineError> {
        let shared = self.shared();
        if let Preparation::Failed { .. } = version.preparation() {
            let preparing = Preparation::Preparing;
            shared.store.record_preparation(version.head.id, version.number, preparing).await?;
            version.progress.send_replace(PullProgress::default());
            tell(shared, version, Preparation::Preparing);
            start_preparing(shared, version);
        }
        Ok(())
    }
}

/// The machine itself needs none.
fn first_preparation(
    shared: &Shared,
    spec: &TemplateSpec,
    prepared: Option<Prepared>,
) -> Result<Preparation, EngineError> {
    let choice = shared.images.choose(&spec.image)?;
    Ok(match (prepared, choice.name) {
        (Some(prepared), _) => Preparation::Ready(prepared),
        (None, ImageName::Host) => {
            Preparation::Ready(Prepared { resolved: images::HOST.into(), image: None })
        }
        (None, ImageName::Reference(_)) => Preparation::Preparing,
    })
}

fn built_in(sandboxes: usize) -> Template {
    Template {
        id: None,
        name: DEFAULT.into(),
        version: 1,
        spec: TemplateSpec::default(),
        preparation: Preparation::Ready(Prepared { resolved: images::HOST.into(), image: None }),
        sandboxes,
        created_at: SystemTime::UNIX_EPOCH,
        updated_at: SystemTime::UNIX_EPOCH,
    }
}

fn described(version: &Version, sandboxes: usize) -> Template {
    Template {
        id: Some(version.head.id),
        name: version.head.name().to_string(),
        version: version.number,
        spec: TemplateSpec { image: images::familiar(&version.spec.image), ..version.spec.clone() },
        preparation: version.preparation(),
        sandboxes,
        created_at: version.head.created_at,
        updated_at: version.made_at,
    }
}

/// How far a template is.
#[derive(Debug, Clone)]
pub enum TemplateTold {
    /// Its image is on its way, so far.
    Progress(PullProgress),
    /// It is ready, or it failed. Nothing follows.
    Settled(Box<Template>),
}

/// One who watches a template until it is ready or has failed.
pub struct TemplateWatcher {
    engine: crate::Engine,
    owner: Owner,
    followed: Option<Followed>,
    over: bool,
}

struct Followed {
    version: Arc<Version>,
    preparation: watch::Receiver<Preparation>,
    progress: watch::Receiver<PullProgress>,
}

impl Followed {
    fn new(version: Arc<Version>) -> Self {
        let (preparation, progress) = (version.preparation.subscribe(), version.progress.subscribe());
        Self { version, preparation, progress }
    }
}

impl TemplateWatcher {
    /// The next thing; `None` at the end. A version that is replaced meanwhile leads to the next one. Cancel-safe.
    pub async fn next(&mut self) -> Result<Option<TemplateTold>, EngineError> {
        if self.over {
            return Ok(None);
        }
        loop {
            let Some(followed) = &mut self.followed else {
                self.over = true;
                let template = self.engine.template(&self.owner, DEFAULT)?;
                return Ok(Some(TemplateTold::Settled(Box::new(template))));
            };
            let name = followed.version.head.name();
            let now = followed.preparation.borrow_and_update().clone();
            match now {
                Preparation::Preparing => {}
                Preparation::Ready(_) | Preparation::Failed { .. } => {
                    let template = self.engine.template(&self.owner, name.as_str())?;
                    if matches!(template.preparation, Preparation::Ready(_) | Preparation::Failed { .. }) {
                        self.over = true;
                        return Ok(Some(TemplateTold::Settled(Box::new(template))));
                    }
                    // It was replaced this moment, or is tried again.
                    let newest = self.engine.shared().templates.newest(&self.owner, name.as_str())?;
                    self.followed = Some(Followed::new(newest));
                    continue;
                }
                Preparation::Replaced => {
                    let newest = self.engine.shared().templates.newest(&self.owner, name.as_str())?;
                    self.followed = Some(Followed::new(newest));
                    continue;
                }
            }
            tokio::select! {
                changed = followed.preparation.changed() => {
                    changed.map_err(|_| EngineError::Stopping)?;
                }
                changed = followed.progress.changed() => {
                    changed.map_err(|_| EngineError::Stopping)?;
                    let progress = followed.progress.borrow_and_update().clone();
                    return Ok(Some(TemplateTold::Progress(progress)));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_of_an_update_stays() {
        let spec = TemplateSpec {
            cwd: Some("/srv".into()),
            user: Some("ada".into()),
            disk_bytes: Some(5),
            ..TemplateSpec::default()
        };
        assert_eq!(TemplateUpdate::default().applied(&spec), spec);
        let update = TemplateUpdate { cwd: Some(None), user: Some(Some("eve".into())), ..Default::default() };
        let expected = TemplateSpec { cwd: None, user: Some("eve".into()), ..spec.clone() };
        assert_eq!(update.applied(&spec), expected);
    }
}
