//! Volumes: directory trees with a size that outlive sandboxes.
//!
//! A volume has an id, which names its files, and a name, which may change. Any number of sandboxes mount it at once, each through
//! its own range of ids, and all of them see the same owners. Its row says where it is in its life: one that was being made when
//! the daemon died is removed, since nobody was told of it; one that was being deleted is deleted. Files without a row are never
//! touched: a database that was lost must not take the data with it.
//!
//! Owns the rows' reflection in memory; what a volume is made of is the backend's business, admitting sandboxes the engine's.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use runtime::{BackendError, DiskUsage};
use tracing::{info, warn};
use wire::launch::{Access, MOUNTS_MAX, Mount};
use wire::{SandboxId, VolumeId};

use crate::error::{EngineError, chain};
use crate::files::Files;
use crate::home::{Home, Shared};
use crate::keys::random_u128;
use crate::labels::Labels;
use crate::lifetime::{Action, Lifetime, Rule, Since};
use crate::model::{Key, Owner, SandboxSpec, Wait};
use crate::store::{MountRow, VolumeRow, VolumeState};

pub use crate::names::VolumeName;

/// Volumes of one owner, at most.
const VOLUMES_MAX: usize = 10_000;
/// Less would be full before anything is in it.
pub const VOLUME_BYTES_MIN: u64 = 1 << 20;
/// Where the sandbox that reads or writes a volume's files mounts it.
const HELPER_PATH: &str = "/mnt/volume";
/// What such a sandbox is labelled with; the value is the volume's name.
const HELPER_LABEL: &str = "shoal.volume";
/// How long one that nobody ends, since the daemon was killed, stays.
const HELPER_IDLE_MAX: Duration = Duration::from_secs(300);
/// What the kernel takes as a path.
const PATH_MAX: usize = 4096;
/// How long whoever makes a volume and has not answered is left alone before what they made is removed.
const UNFINISHED_PAUSE: Duration = Duration::from_secs(300);
/// Places that are the sandbox's own, with all that is below them.
const PROTECTED: [&str; 4] = ["/proc", "/sys", "/dev", "/run/shoal"];

/// What a new volume should be.
#[derive(Debug, Clone)]
pub struct VolumeSpec {
    /// Unique among the owner's volumes.
    pub name: VolumeName,
    /// What it may hold; at least [`VOLUME_BYTES_MIN`], at most what the store holds.
    pub size_bytes: u64,
    /// Another of the owner's volumes, whose files it begins with as they are now.
    pub from: Option<String>,
}

/// What should change about a volume, all of it or nothing. What is left out stays as it is.
#[derive(Debug, Clone, Default)]
pub struct VolumeUpdate {
    /// Another name. Sandboxes go on with it; templates name volumes by name.
    pub name: Option<VolumeName>,
    /// Another size, not below what is in it.
    pub size_bytes: Option<u64>,
}

/// A volume, as it is at one moment.
#[derive(Debug, Clone)]
pub struct Volume {
    /// Names it whatever it is called.
    pub id: VolumeId,
    /// What it is called.
    pub name: VolumeName,
    /// What it may hold.
    pub size_bytes: u64,
    /// Whether it is held to that. A store of plain directories cannot.
    pub enforced: bool,
    /// What its files take, where that was asked for.
    pub used: Option<DiskUsage>,
    /// The sandboxes that mount it, by name.
    pub holders: Vec<Holder>,
    /// When it was made.
    pub created_at: SystemTime,
    /// When its name or size last changed.
    pub updated_at: SystemTime,
}

/// A sandbox that mounts a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Which one.
    pub sandbox: SandboxId,
    /// What it is called.
    pub name: String,
    /// Where the volume is in it.
    pub path: String,
    /// What it may do with it.
    pub access: Access,
}

/// A volume, mounted somewhere: as it is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct VolumeMount {
    /// Its name.
    pub volume: String,
    /// Where.
    pub path: String,
    /// What may be done with it.
    pub access: Access,
}

/// The same, found.
#[derive(Clone)]
pub(crate) struct Mounted {
    pub volume: Arc<Head>,
    pub path: String,
    pub access: Access,
}

impl Mounted {
    pub fn described(&self) -> VolumeMount {
        VolumeMount { volume: self.volume.name().to_string(), path: self.path.clone(), access: self.access }
    }

    pub fn row(&self) -> MountRow {
        MountRow { volume: self.volume.id, path: self.path.clone(), access: self.access }
    }

    pub fn plan(&self) -> Mount {
        Mount { volume: self.volume.id, path: self.path.clone(), access: self.access }
    }
}

/// One volume. Whoever mounts it holds it.
pub(crate) struct Head {
    pub id: VolumeId,
    owner: Owner,
    created_at: SystemTime,
    face: Mutex<Face>,
}

#[derive(Clone)]
struct Face {
    name: VolumeName,
    size_bytes: u64,
    state: VolumeState,
    updated_at: SystemTime,
}

impl Head {
    fn new(row: &VolumeRow) -> Arc<Self> {
        let face = Face {
            name: row.name.clone(),
            size_bytes: row.size_bytes,
            state: row.state,
            updated_at: row.updated_at,
        };
        let (id, owner, created_at) = (row.id, row.owner.clone(), row.created_at);
        Arc::new(Self { id, owner, created_at, face: Mutex::new(face) })
    }

    fn face(&self) -> MutexGuard<'_, Face> {
        self.face.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn name(&self) -> VolumeName {
        self.face().name.clone()
    }
}

/// All volumes of one data directory.
#[derive(Default)]
pub(crate) struct Volumes {
    stock: Mutex<Stock>,
    /// Held by whoever changes a name or a size, until rows, kernel and stock say the same.
    changing: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Stock {
    by_name: BTreeMap<(Owner, VolumeName), Arc<Head>>,
    by_id: BTreeMap<VolumeId, Arc<Head>>,
}

impl Stock {
    fn insert(&mut self, head: &Arc<Head>) {
        self.by_name.insert((head.owner.clone(), head.name()), Arc::clone(head));
        self.by_id.insert(head.id, Arc::clone(head));
    }

    fn remove(&mut self, head: &Head) {
        self.by_name.remove(&(head.owner.clone(), head.name()));
        self.by_id.remove(&head.id);
    }

    fn check_name(&self, owner: &Owner, name: &VolumeName) -> Result<(), EngineError> {
        match self.by_name.contains_key(&(owner.clone(), name.clone())) {
            true => Err(EngineError::VolumeNameTaken { name: name.to_string() }),
            false => Ok(()),
        }
    }
}

impl Volumes {
    /// Reads what is here.
    pub fn open(rows: &[VolumeRow]) -> Self {
        let mut stock = Stock::default();
        rows.iter().for_each(|row| stock.insert(&Head::new(row)));
        Self { stock: Mutex::new(stock), changing: tokio::sync::Mutex::default() }
    }

    fn stock(&self) -> MutexGuard<'_, Stock> {
        self.stock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One that can be used, by its name.
    fn find(&self, owner: &Owner, name: &str) -> Result<Arc<Head>, EngineError> {
        let head = self.find_any(owner, name)?;
        match head.face().state {
            VolumeState::Ready => {}
            VolumeState::Creating | VolumeState::Deleting => {
                return Err(EngineError::VolumeNotFound { name: name.to_owned() });
            }
        }
        Ok(head)
    }

    fn find_any(&self, owner: &Owner, name: &str) -> Result<Arc<Head>, EngineError> {
        let not_found = || EngineError::VolumeNotFound { name: name.to_owned() };
        let name = VolumeName::parse(name).map_err(|_| not_found())?;
        self.stock().by_name.get(&(owner.clone(), name)).cloned().ok_or_else(not_found)
    }

    /// What an owner means by mounts. Under the directory's lock, so that no volume goes between here and the sandbox that holds it.
    pub fn resolve(&self, owner: &Owner, mounts: Vec<VolumeMount>) -> Result<Vec<Mounted>, EngineError> {
        let mounts = check_mounts(mounts)?;
        let found = mounts.into_iter().map(|VolumeMount { volume, path, access }| {
            Ok(Mounted { volume: self.find(owner, &volume)?, path, access })
        });
        found.collect()
    }

    /// What rows say of a sandbox's mounts.
    pub fn recovered(&self, rows: &[MountRow]) -> Vec<Mounted> {
        let stock = self.stock();
        let found = rows.iter().filter_map(|MountRow { volume, path, access }| {
            let volume = Arc::clone(stock.by_id.get(volume)?);
            Some(Mounted { volume, path: path.clone(), access: *access })
        });
        found.collect()
    }
}

/// Mounts go to absolute paths without detours, to none twice, and to none that is the sandbox's own. They come back in one spelling,
/// and in an order in which none covers another that came before it.
pub(crate) fn check_mounts(mounts: Vec<VolumeMount>) -> Result<Vec<VolumeMount>, EngineError> {
    let invalid = |why: String| Err(EngineError::Invalid { what: "mounts", why });
    if mounts.len() > MOUNTS_MAX {
        return invalid(format!("there are {}, the limit is {MOUNTS_MAX}", mounts.len()));
    }
    let mut checked: Vec<VolumeMount> = Vec::new();
    for VolumeMount { volume, path, access } in mounts {
        if volume.is_empty() {
            return invalid(format!("the mount at `{path:.128}` names no volume"));
        }
        if !path.starts_with('/') {
            return invalid(format!("`{path:.128}` is not an absolute path"));
        }
        if path.len() > PATH_MAX || path.contains('\0') {
            return invalid(format!("a path has more than {PATH_MAX} bytes, or a NUL byte"));
        }
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        if parts.iter().any(|part| matches!(*part, "." | "..")) {
            return invalid(format!("`{path:.128}` has a `.` or `..` in it"));
        }
        let plain = format!("/{}", parts.join("/"));
        let below = |place: &str| plain == place || plain.starts_with(&format!("{place}/"));
        if plain == "/" || PROTECTED.iter().any(|place| below(place)) {
            return invalid(format!("nothing can be mounted over `{plain:.128}`"));
        }
        if checked.iter().any(|mount| mount.path == plain) {
            return invalid(format!("two of them are at `{plain:.128}`"));
        }
        checked.push(VolumeMount { volume, path: plain, access });
    }
    checked.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(checked)
}

/// What a template mounts and what the request does, which wins where both name one path.
pub(crate) fn merged(template: Vec<VolumeMount>, request: Vec<VolumeMount>) -> Vec<VolumeMount> {
    let plain = |path: &str| path.split('/').filter(|part| !part.is_empty()).collect::<Vec<_>>().join("/");
    let taken: Vec<String> = request.iter().map(|mount| plain(&mount.path)).collect();
    let kept = template.into_iter().filter(|mount| !taken.contains(&plain(&mount.path)));
    kept.chain(request).collect()
}

/// Finishes or undoes what a daemon before this one was cut off in.
pub(crate) fn take_up(shared: &Arc<Shared>) {
    // Before anybody can ask for new ones, which are unfinished for a moment too.
    let unfinished: Vec<Arc<Head>> = {
        let stock = shared.volumes.stock();
        let heads = stock.by_id.values();
        heads.filter(|head| head.face().state != VolumeState::Ready).cloned().collect()
    };
    let of_engine = Arc::clone(shared);
    shared.runtime.spawn(async move {
        for head in unfinished {
            info!(volume = %head.name(), "removes a volume that was being made or deleted");
            if let Err(error) = remove(&of_engine, &head).await {
                warn!(volume = %head.name(), error = chain(&error), "cannot remove a volume; the next start tries again");
            }
        }
    });
}

/// Files first, the row after: what is left by a crash in between is known.
async fn remove(shared: &Shared, head: &Head) -> Result<(), EngineError> {
    shared.backend.remove_volume(head.id).await.map_err(failed("delete", &head.name()))?;
    shared.store.delete_volume(head.id).await?;
    shared.volumes.stock().remove(head);
    Ok(())
}

/// Removes what was made of a volume. While somebody may still be at work on it, its row stays, so that what they leave is known.
async fn undo(shared: &Arc<Shared>, head: Arc<Head>, unfinished: bool) {
    head.face().state = VolumeState::Deleting;
    let of_engine = Arc::clone(shared);
    let removing = async move {
        if unfinished {
            tokio::time::sleep(UNFINISHED_PAUSE).await;
        }
        if let Err(left) = remove(&of_engine, &head).await {
            warn!(volume = %head.name(), error = chain(&left), "cannot remove what is left of a volume; the next start tries again");
        }
    };
    match unfinished {
        true => drop(shared.runtime.spawn(removing)),
        false => removing.await,
    }
}

fn failed(doing: &'static str, name: &VolumeName) -> impl FnOnce(BackendError) -> EngineError {
    let name = name.to_string();
    move |source| match source {
        BackendError::Full { .. } => {
            EngineError::Full { what: format!("cannot {doing} volume `{name}`: {source}") }
        }
        source => EngineError::Volume { doing, name, source },
    }
}

/// What callers ask about volumes.
impl crate::Engine {
    /// Makes a volume. Answers when it can be mounted.
    pub async fn create_volume(&self, key: &Key, spec: VolumeSpec) -> Result<Volume, EngineError> {
        let engine = self.clone();
        let owner = key.owner.clone();
        // A task of its own: a caller that leaves in the middle leaves nothing half-made.
        let making = tokio::spawn(async move { engine.make_volume(owner, spec).await });
        making.await.map_err(|_| EngineError::Stopping)?
    }

    async fn make_volume(&self, owner: Owner, spec: VolumeSpec) -> Result<Volume, EngineError> {
        let shared = self.shared();
        let VolumeSpec { name, size_bytes, from } = spec;
        self.check_volume_size(size_bytes).await?;
        let from = from.map(|from| shared.volumes.find(&owner, &from)).transpose()?;
        if let Some(from) = &from {
            self.check_fits(from, size_bytes).await?;
        }
        let now = crate::now();
        let row = VolumeRow {
            id: VolumeId::from_random(random_u128()),
            owner: owner.clone(),
            name: name.clone(),
            size_bytes,
            state: VolumeState::Creating,
            created_at: now,
            updated_at: now,
        };
        let head = Head::new(&row);
        {
            let mut stock = shared.volumes.stock();
            stock.check_name(&owner, &name)?;
            if stock.by_name.keys().filter(|(other, _)| *other == owner).count() >= VOLUMES_MAX {
                return Err(EngineError::Quota { what: "volumes", limit: VOLUMES_MAX as u64 });
            }
            stock.insert(&head);
        }
        if let Err(error) = shared.store.insert_volume(row).await {
            shared.volumes.stock().remove(&head);
            return Err(error);
        }
        let made = shared.backend.create_volume(head.id, size_bytes, from.map(|from| from.id)).await;
        if let Err(error) = made {
            let unfinished = matches!(error, BackendError::Late { .. } | BackendError::LauncherGone { .. });
            let error = match error {
                BackendError::Refused { source, .. } if source.kind() == std::io::ErrorKind::Unsupported => {
                    EngineError::CopiesUnsupported
                }
                error => failed("create", &name)(error),
            };
            undo(shared, head, unfinished).await;
            return Err(error);
        }
        if let Err(error) = shared.store.set_volume_state(head.id, VolumeState::Ready).await {
            undo(shared, head, false).await;
            return Err(error);
        }
        head.face().state = VolumeState::Ready;
        info!(volume = %name, size_bytes, "volume made");
        Ok(self.describe_volume(&head, None))
    }

    /// A volume by its name, with what its files take.
    pub async fn volume(&self, owner: &Owner, name: &str) -> Result<Volume, EngineError> {
        let head = self.shared().volumes.find(owner, name)?;
        let used = self.volume_used(&head).await?;
        Ok(self.describe_volume(&head, Some(used)))
    }

    /// An owner's volumes by name. What their files take is told where that costs nothing.
    pub async fn volumes(&self, owner: &Owner) -> Result<Vec<Volume>, EngineError> {
        let heads: Vec<Arc<Head>> = {
            let stock = self.shared().volumes.stock();
            let mine = stock.by_name.values().filter(|head| head.owner == *owner);
            mine.filter(|head| head.face().state == VolumeState::Ready).cloned().collect()
        };
        let counted = self.shared().backend.store().limits;
        let mut list = Vec::with_capacity(heads.len());
        for head in heads {
            // One that goes at this moment is listed without.
            let used = if counted { self.volume_used(&head).await.ok() } else { None };
            list.push(self.describe_volume(&head, used));
        }
        Ok(list)
    }

    /// Gives a volume another name or size, all of it or nothing.
    pub async fn update_volume(
        &self,
        owner: &Owner,
        name: &str,
        update: VolumeUpdate,
    ) -> Result<Volume, EngineError> {
        let (engine, owner, name) = (self.clone(), owner.clone(), name.to_owned());
        let changing = tokio::spawn(async move { engine.change_volume(&owner, &name, update).await });
        changing.await.map_err(|_| EngineError::Stopping)?
    }

    async fn change_volume(
        &self,
        owner: &Owner,
        name: &str,
        update: VolumeUpdate,
    ) -> Result<Volume, EngineError> {
        let shared = self.shared();
        let _changing = shared.volumes.changing.lock().await;
        let head = shared.volumes.find(owner, name)?;
        let before = head.face().clone();
        let size = update.size_bytes.filter(|size| *size != before.size_bytes);
        if let Some(size) = size {
            self.check_volume_size(size).await?;
            if size < before.size_bytes {
                self.check_fits(&head, size).await?;
            }
        }
        let other = update.name.filter(|other| *other != before.name);
        if let Some(other) = &other {
            // Taken at once, so that nobody else takes it meanwhile.
            let mut stock = shared.volumes.stock();
            stock.check_name(owner, other)?;
            stock.by_name.insert((owner.clone(), other.clone()), Arc::clone(&head));
        }
        if other.is_none() && size.is_none() {
            return Ok(self.describe_volume(&head, None));
        }
        let after = Face {
            name: other.clone().unwrap_or_else(|| before.name.clone()),
            size_bytes: size.unwrap_or(before.size_bytes),
            state: before.state,
            updated_at: crate::now(),
        };
        let changed = async {
            if let Some(size) = size {
                let resized = shared.backend.resize_volume(head.id, size).await;
                resized.map_err(failed("resize", &before.name))?;
            }
            let (name, size_bytes) = (after.name.clone(), after.size_bytes);
            shared.store.change_volume(head.id, name, size_bytes, after.updated_at).await
        };
        let changed = changed.await;
        let mut stock = shared.volumes.stock();
        if let Some(other) = other {
            let unused = if changed.is_ok() { &before.name } else { &other };
            stock.by_name.remove(&(owner.clone(), unused.clone()));
        }
        changed?;
        *head.face() = after;
        drop(stock);
        Ok(self.describe_volume(&head, None))
    }

    /// Deletes a volume with all its files. Refused while a sandbox mounts it.
    pub async fn delete_volume(&self, owner: &Owner, name: &str) -> Result<(), EngineError> {
        let (engine, owner, name) = (self.clone(), owner.clone(), name.to_owned());
        let deleting = tokio::spawn(async move { engine.end_volume(&owner, &name).await });
        deleting.await.map_err(|_| EngineError::Stopping)?
    }

    async fn end_volume(&self, owner: &Owner, name: &str) -> Result<(), EngineError> {
        let shared = self.shared();
        let _changing = shared.volumes.changing.lock().await;
        // One whose deletion failed is tried again.
        let head = shared.volumes.find_any(owner, name)?;
        {
            // Creates look volumes up under the same lock, so none begins behind this.
            let directory = shared.directory();
            let mut face = head.face();
            match face.state {
                VolumeState::Creating => return Err(EngineError::VolumeNotFound { name: name.to_owned() }),
                VolumeState::Ready | VolumeState::Deleting => {}
            }
            let holders = holders(&directory.all(), head.id);
            if !holders.is_empty() {
                let mut holders: Vec<String> = holders.into_iter().map(|holder| holder.name).collect();
                // By name, so one that mounts it twice stands side by side.
                holders.dedup();
                return Err(EngineError::VolumeInUse { name: name.to_owned(), holders });
            }
            face.state = VolumeState::Deleting;
        }
        if let Err(error) = shared.store.set_volume_state(head.id, VolumeState::Deleting).await {
            head.face().state = VolumeState::Ready;
            return Err(error);
        }
        remove(shared, &head).await?;
        info!(volume = name, "volume deleted");
        Ok(())
    }

    /// Opens a volume's files. It counts as a sandbox of the key's owner for as long as that lasts.
    pub async fn volume_files(
        &self,
        key: &Key,
        name: &str,
        access: Access,
    ) -> Result<VolumeFiles, EngineError> {
        let rule = Rule { since: Since::LastUse, after: HELPER_IDLE_MAX, action: Action::Delete };
        let labels = [(HELPER_LABEL.to_owned(), name.to_owned())].into();
        let spec = SandboxSpec {
            mounts: vec![VolumeMount { volume: name.into(), path: HELPER_PATH.into(), access }],
            labels: Labels::new(labels).unwrap_or_default(),
            lifetime: Lifetime::new(vec![rule])?,
            ..SandboxSpec::default()
        };
        // A task of its own: what it makes for a caller that has left in the middle is dropped, and so removed.
        let (engine, key) = (self.clone(), key.clone());
        let opening = tokio::spawn(async move {
            let helper = engine.create(&key, spec, Wait::Ready).await?.id;
            let files = engine.files(&key.owner, helper, None)?;
            Ok(VolumeFiles { files, helper, engine, owner: key.owner })
        });
        opening.await.map_err(|_| EngineError::Stopping)?
    }

    async fn check_volume_size(&self, size_bytes: u64) -> Result<(), EngineError> {
        let invalid = |why: String| Err(EngineError::Invalid { what: "size", why });
        if size_bytes < VOLUME_BYTES_MIN {
            return invalid(format!(
                "it is at least {VOLUME_BYTES_MIN} bytes; was a unit such as `Gi` left out?"
            ));
        }
        let machine = self.shared().backend.machine().await;
        let most = machine.map_err(|source| EngineError::Usage { source })?.disk_bytes;
        if size_bytes > most {
            return invalid(format!("it is {size_bytes} bytes, and the whole store holds {most}"));
        }
        Ok(())
    }

    /// Whether what is in a volume fits into so much.
    async fn check_fits(&self, head: &Head, size_bytes: u64) -> Result<(), EngineError> {
        let used = self.volume_used(head).await?;
        match used.bytes > size_bytes {
            true => Err(EngineError::VolumeTooSmall {
                name: head.name().to_string(),
                size_bytes,
                used_bytes: used.bytes,
            }),
            false => Ok(()),
        }
    }

    async fn volume_used(&self, head: &Head) -> Result<DiskUsage, EngineError> {
        let usage = self.shared().backend.volume_usage(head.id).await;
        usage.map_err(failed("look at", &head.name()))
    }

    fn describe_volume(&self, head: &Head, used: Option<DiskUsage>) -> Volume {
        let Face { name, size_bytes, updated_at, .. } = head.face().clone();
        let homes = self.shared().directory().all();
        Volume {
            id: head.id,
            name,
            size_bytes,
            enforced: self.shared().backend.store().limits,
            used,
            holders: holders(&homes, head.id),
            created_at: head.created_at,
            updated_at,
        }
    }
}

/// A volume's files, through a sandbox that mounts it and does nothing else: whatever guests have put there, nothing on the host
/// follows it. The sandbox goes when this does; should the daemon be killed, by its lifetime.
pub struct VolumeFiles {
    /// The files of that sandbox.
    pub files: Files,
    helper: SandboxId,
    engine: crate::Engine,
    owner: Owner,
}

impl VolumeFiles {
    /// Where a path of the volume is in the sandbox.
    pub fn path(&self, in_volume: &[u8]) -> Result<Vec<u8>, EngineError> {
        if !in_volume.starts_with(b"/") || in_volume.split(|byte| *byte == b'/').any(|part| part == b"..") {
            let why = "it is an absolute path in the volume, without `..`".into();
            return Err(EngineError::Invalid { what: "path", why });
        }
        let mut path = HELPER_PATH.as_bytes().to_vec();
        path.extend_from_slice(in_volume);
        Ok(path)
    }

    /// Ends the sandbox, and returns when it is gone: the volume can be deleted then.
    pub async fn close(self) -> Result<(), EngineError> {
        // What `drop` does again is harmless.
        self.engine.delete(&self.owner, self.helper).await
    }
}

impl Drop for VolumeFiles {
    fn drop(&mut self) {
        let (engine, owner, helper) = (self.engine.clone(), self.owner.clone(), self.helper);
        let runtime = engine.shared().runtime.clone();
        runtime.spawn(async move {
            match engine.delete(&owner, helper).await {
                Ok(()) | Err(EngineError::SandboxNotFound { .. } | EngineError::Stopping) => {}
                // Its lifetime ends it.
                Err(error) => {
                    warn!(sandbox = %helper, error = chain(&error), "cannot delete a volume's sandbox")
                }
            }
        });
    }
}

fn holders(homes: &[Arc<Home>], volume: VolumeId) -> Vec<Holder> {
    let mut holders: Vec<Holder> = Vec::new();
    for home in homes {
        for mount in home.mounts.iter().filter(|mount| mount.volume.id == volume) {
            let (path, access) = (mount.path.clone(), mount.access);
            holders.push(Holder { sandbox: home.id, name: home.face().name.to_string(), path, access });
        }
    }
    holders.sort_by(|a, b| (&a.name, &a.path).cmp(&(&b.name, &b.path)));
    holders
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(path: &str) -> VolumeMount {
        VolumeMount { volume: "v".into(), path: path.into(), access: Access::ReadWrite }
    }

    #[track_caller]
    fn check_mount(paths: &[&str], expected: Result<&[&str], &str>) {
        let mounts = paths.iter().map(|path| mount(path)).collect();
        match (check_mounts(mounts), expected) {
            (Ok(mounts), Ok(expected)) => {
                let paths: Vec<&str> = mounts.iter().map(|mount| mount.path.as_str()).collect();
                assert_eq!(paths, expected);
            }
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (result, _) => panic!("{paths:?}: {result:?}"),
        }
    }

    #[test]
    fn mounts_go_where_they_harm_nothing() {
        check_mount(
            &["/data/deeper/", "/data", "/process", "/home//a b"],
            Ok(&["/data", "/data/deeper", "/home/a b", "/process"]),
        );
        check_mount(&["data"], Err("not an absolute path"));
        check_mount(&["/"], Err("nothing can be mounted over `/`"));
        check_mount(&["//proc//"], Err("over `/proc`"));
        check_mount(&["/sys/fs/cgroup"], Err("over `/sys/fs/cgroup`"));
        check_mount(&["/dev/shm"], Err("over `/dev/shm`"));
        check_mount(&["/run/shoal/ca"], Err("over `/run/shoal/ca`"));
        check_mount(&["/data/../proc"], Err("`..`"));
        check_mount(&["/data", "/data/"], Err("two of them are at `/data`"));
    }

    #[test]
    fn what_a_request_mounts_wins_over_the_template() {
        let other = VolumeMount { volume: "other".into(), ..mount("/data/") };
        let both = merged(vec![mount("/data"), mount("/cache")], vec![other.clone()]);
        assert_eq!(both, [mount("/cache"), other]);
    }

    #[test]
    fn names_lead_nowhere() {
        assert!(VolumeName::parse("training data, ünïcode").is_ok());
        for text in ["", "a/b", "/", "..", ".", "a:b", "a\nb", "a\0b", &"x".repeat(256)] {
            VolumeName::parse(text).expect_err(text);
        }
    }
}
