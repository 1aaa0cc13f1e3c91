//! The backend `ns`: namespaces on this machine, made by the launcher.
//!
//! This is the daemon's side. It starts the launcher, and starts it again when it dies; matches replies to requests; gives
//! out id ranges; connects to init. It does nothing to the kernel itself.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::sync::{oneshot, watch};
use wire::launch::{
    Answer, Ask, Failure, Found, INVENTORY_PAGE, LAYERS_PAGE, LayerFacts, Limits, Motion, PACKET_MAX, Plan,
    Processes, Reply, Request, Rootfs, StoreFacts, StoreKind, UnpackLayer, VERSION, VOLUMES_PAGE,
    from_packet, to_packet,
};
use wire::{Digest, InstallationId, SandboxId, VolumeId};

use crate::backend::{Backend, BackendError, DiskUsage, GuestStream, LayerSpec, Machine, Spec, Usage};
use crate::cgroup::{Cgroups, OomKills};
use crate::places::INIT_SOCKET;
use crate::ranges::{CLAIMS, Claimant, Ranges};
use crate::spares::{Claim, Made, Shape, Spares};
use crate::store::StoreConfig;
use crate::sys;

/// Building the image `host` reads all of `/usr`, from a cold disk if need be.
const IMAGE_DEADLINE: Duration = Duration::from_secs(300);
/// A launch takes milliseconds; a machine under heavy load takes longer.
const LAUNCH_DEADLINE: Duration = Duration::from_secs(30);
/// A teardown removes files, of which there may be millions.
const TEARDOWN_DEADLINE: Duration = Duration::from_secs(300);
/// A copy of a volume writes back what was written to it lately.
const VOLUME_DEADLINE: Duration = Duration::from_secs(120);
/// Unpacking reads and writes gigabytes.
const UNPACK_DEADLINE: Duration = Duration::from_secs(3600);
/// Everything else only reads.
const QUICK_DEADLINE: Duration = Duration::from_secs(30);
/// The launcher holds nothing that takes time to let go of.
const END_DEADLINE: Duration = Duration::from_secs(20);
/// Init's socket listens from before init starts, so only a full queue delays a connection.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// Slots kept ready: a burst of this many creates pays nothing for namespaces.
const SLOTS_READY: usize = 16;
/// After a create, spares are made again this much later: its first command comes first.
const SPARES_QUIET: Duration = Duration::from_millis(2);
/// After a spare could not be made, the next try waits this long, and twice as long after each further failure,
const SPARES_BACKOFF_MIN: Duration = Duration::from_secs(1);
/// up to this.
const SPARES_BACKOFF_MAX: Duration = Duration::from_secs(60);
/// For how long no file below `/usr` is taken to have become private without looking at each.
const IMAGE_TRUSTED_WHOLLY: Duration = Duration::from_secs(60);
/// For how long the image is taken to be up to date without looking.
const IMAGE_TRUSTED: Duration = Duration::from_secs(5);

/// What the backend is started with.
#[derive(Debug, Clone)]
pub struct NsConfig {
    /// The daemon's data directory.
    pub data_dir: PathBuf,
    /// Whose sandboxes these are.
    pub installation: InstallationId,
    /// The program that is the launcher when it is run with the arguments `launcher --data-dir DIR --installation ID`.
    pub launcher: PathBuf,
    /// How many sandboxes to keep ready before anybody has asked for them.
    pub spares: usize,
    /// Where writable files are kept.
    pub store: StoreConfig,
}

/// Namespaces on this machine.
#[derive(Clone)]
pub struct NsBackend(Arc<Inner>);

struct Inner {
    config: NsConfig,
    store: StoreFacts,
    /// The launcher as far as it is alive. Locked only to look or to replace, never while waiting for an answer.
    launcher: tokio::sync::Mutex<Option<Arc<Link>>>,
    /// No launcher is started any more.
    ended: AtomicBool,
    ranges: Mutex<Ids>,
    oom_kills: OomKills,
    image_checked: tokio::sync::Mutex<ImageChecked>,
    spares: Mutex<Spares>,
    /// Locked while a spare is being made.
    making_spare: tokio::sync::Mutex<()>,
    /// Whether somebody makes spares.
    refilling: AtomicBool,
    last_taken: Mutex<Instant>,
    /// Streams to the inits of spares, opened when they were claimed.
    greeted: Mutex<HashMap<SandboxId, UnixStream>>,
}

/// When the image was last compared with the machine.
#[derive(Default)]
struct ImageChecked {
    quickly: Option<Instant>,
    thoroughly: Option<Instant>,
    generation: u64,
}

/// Who has which ids.
struct Ids {
    ranges: Ranges,
    /// Taken, with slots being made for them.
    ready: VecDeque<u32>,
    used: HashMap<SandboxId, u32>,
}

impl NsBackend {
    /// Starts the launcher and learns what runs already.
    pub async fn start(config: NsConfig) -> Result<Self, BackendError> {
        let (link, store) = Link::open(&config).await?;
        let found = inventory(&link).await?;
        let used: HashMap<SandboxId, u32> =
            found.iter().filter_map(|found| found.base.map(|base| (found.sandbox, base))).collect();
        let claimant = Claimant { installation: config.installation, data_dir: config.data_dir.clone() };
        let in_use: HashSet<u32> = used.values().copied().collect();
        let ranges =
            Ranges::open(Path::new(CLAIMS), claimant, &in_use).map_err(refused("claim id ranges"))?;
        let spares = Mutex::new(Spares::new(config.spares));
        let oom_kills = OomKills::open(config.installation).map_err(refused("find the cgroups"))?;
        let backend = Self(Arc::new(Inner {
            config,
            store,
            spares,
            making_spare: tokio::sync::Mutex::default(),
            refilling: AtomicBool::new(false),
            last_taken: Mutex::new(Instant::now()),
            greeted: Mutex::default(),
            launcher: tokio::sync::Mutex::new(Some(link)),
            ended: AtomicBool::new(false),
            ranges: Mutex::new(Ids { ranges, ready: VecDeque::new(), used }),
            oom_kills,
            image_checked: tokio::sync::Mutex::new(ImageChecked::default()),
        }));
        backend.keep_slots_ready();
        Ok(backend)
    }

    /// Ends the launcher, whichever it is by now, and returns when it is dead. No other takes its place.
    pub async fn end(&self) -> Result<(), BackendError> {
        self.0.ended.store(true, Ordering::Relaxed);
        let Some(link) = self.0.launcher.lock().await.take() else { return Ok(()) };
        link.hang_up();
        let mut dead = link.dead.clone();
        let late = |_| BackendError::Late { doing: "end", seconds: END_DEADLINE.as_secs() };
        // Its sender is dropped when the process was waited for, and says nothing before.
        let ended = tokio::time::timeout(END_DEADLINE, dead.changed()).await.map_err(late)?;
        debug_assert!(ended.is_err(), "nothing is ever sent");
        Ok(())
    }

    async fn link(&self) -> Result<Arc<Link>, BackendError> {
        let mut launcher = self.0.launcher.lock().await;
        if self.0.ended.load(Ordering::Relaxed) {
            return Err(BackendError::LauncherGone { doing: "anything more" });
        }
        if let Some(link) = launcher.as_ref().filter(|link| link.is_alive()) {
            return Ok(link.clone());
        }
        tracing::warn!("the launcher has died and is started again");
        let (link, _) = Link::open(&self.0.config).await?;
        *launcher = Some(link.clone());
        Ok(link)
    }

    async fn ask(&self, doing: &'static str, ask: Ask, deadline: Duration) -> Result<Answer, BackendError> {
        self.link().await?.ask(doing, ask, deadline).await
    }

    /// Makes slots in the background until enough are ready.
    fn keep_slots_ready(&self) {
        let bases: Vec<u32> = {
            let mut ids = self.ids();
            let missing = SLOTS_READY.saturating_sub(ids.ready.len());
            let mut bases = Vec::new();
            for _ in 0..missing {
                match ids.ranges.take() {
                    Ok(Some(base)) => bases.push(base),
                    Ok(None) => break,
                    Err(error) => {
                        tracing::warn!(%error, "cannot claim id ranges ahead of time");
                        break;
                    }
                }
            }
            ids.ready.extend(&bases);
            bases
        };
        for base in bases {
            let backend = self.clone();
            tokio::spawn(async move {
                let ask = Ask::PrepareSlot { base };
                if let Err(error) = backend.ask("prepare a slot", ask, QUICK_DEADLINE).await {
                    // The launch that takes this range makes its namespaces itself, and reports what is wrong.
                    tracing::debug!(%error, base, "a slot was not made ready");
                }
            });
        }
    }

    /// Beside the creates, which need not wait for it: it reads all of `/usr`.
    fn check_image_thoroughly(&self) {
        let backend = self.clone();
        tokio::spawn(async move {
            let checked = match backend.prepare_host_image(true).await {
                Ok(generation) => generation,
                Err(error) => {
                    tracing::warn!(%error, "the image `host` could not be compared with the machine");
                    return;
                }
            };
            backend.note_generation(&mut *backend.0.image_checked.lock().await, checked);
        });
    }

    async fn prepare_host_image(&self, thorough: bool) -> Result<u64, BackendError> {
        const DOING: &str = "prepare the image `host`";
        match self.ask(DOING, Ask::PrepareHostImage { thorough }, IMAGE_DEADLINE).await? {
            Answer::Prepared { generation } => Ok(generation),
            other => Err(unexpected(DOING, &other)),
        }
    }

    /// Spares of the image before are not to be given out any more.
    fn note_generation(&self, checked: &mut ImageChecked, generation: u64) {
        if std::mem::replace(&mut checked.generation, generation) != generation {
            let outdated = self.spares().outdated();
            self.remove_spares(outdated);
            self.refill();
        }
    }

    // Spares.

    fn spares(&self) -> std::sync::MutexGuard<'_, Spares> {
        self.0.spares.lock().expect("nobody panics while holding the spares")
    }

    fn greeted(&self) -> std::sync::MutexGuard<'_, HashMap<SandboxId, UnixStream>> {
        self.0.greeted.lock().expect("nobody panics while holding the streams")
    }

    fn remove_spares(&self, spares: Vec<SandboxId>) {
        for sandbox in spares {
            let backend = self.clone();
            tokio::spawn(async move { backend.remove_spare(sandbox).await });
        }
    }

    async fn remove_spare(&self, sandbox: SandboxId) {
        if let Err(error) = self.teardown(sandbox).await {
            // It is held no longer, so the next sweep sees a stray.
            tracing::warn!(%sandbox, %error, "cannot remove a spare; the sweep tries again");
        }
    }

    /// Makes spares in the background until there are enough.
    fn refill(&self) {
        if self.0.config.spares == 0 || self.0.refilling.swap(true, Ordering::AcqRel) {
            return;
        }
        let inner = Arc::downgrade(&self.0);
        tokio::spawn(async move {
            let mut backoff = SPARES_BACKOFF_MIN;
            let mut pause = SPARES_QUIET;
            loop {
                tokio::time::sleep(pause).await;
                // The backend goes when its daemon lets go of it, not when there are enough spares.
                let Some(backend) = inner.upgrade().map(Self) else { return };
                pause = SPARES_QUIET.saturating_sub(backend.since_last_taken());
                if !pause.is_zero() {
                    continue;
                }
                match backend.make_spare().await {
                    Ok(Some(())) => backoff = SPARES_BACKOFF_MIN,
                    Ok(None) => {
                        backend.0.refilling.store(false, Ordering::Release);
                        // Whoever took one just before that saw this task as still at work.
                        if backend.spares().lacks() {
                            backend.refill();
                        }
                        return;
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot make a sandbox ahead of time; creates take a little longer");
                        pause = backoff;
                        backoff = (backoff * 2).min(SPARES_BACKOFF_MAX);
                    }
                }
            }
        });
    }

    fn since_last_taken(&self) -> Duration {
        self.0.last_taken.lock().expect("nobody panics while holding an instant").elapsed()
    }

    /// Makes one, unless there are enough.
    async fn make_spare(&self) -> Result<Option<()>, BackendError> {
        let _making = self.0.making_spare.lock().await;
        let sandbox = SandboxId::from_random(random_bits()?);
        // First the image: only then is it known which spares are of today.
        let Some(rootfs) = self.spares().next_rootfs() else { return Ok(None) };
        self.prepare(&rootfs).await?;
        let Some(made) = self.spares().begin(sandbox) else { return Ok(None) };
        let Made { shape: Shape { rootfs, limits }, .. } = made.clone();
        let launched = self.make(&Spec { sandbox, rootfs, limits, mounts: Vec::new() }).await;
        let wanted = self.spares().made(sandbox, &made);
        if launched.is_err() || !wanted {
            self.spares().forget(sandbox);
            self.remove_spare(sandbox).await;
        }
        launched.map(Some)
    }

    /// Makes a sandbox from nothing.
    async fn make(&self, spec: &Spec) -> Result<(), BackendError> {
        let plan = Plan {
            sandbox: spec.sandbox,
            base: self.take_range(spec.sandbox)?,
            rootfs: spec.rootfs.clone(),
            limits: spec.limits,
            hostname: hostname(spec.sandbox),
            mounts: spec.mounts.clone(),
        };
        let launched = self.ask("launch a sandbox", Ask::Launch(Box::new(plan)), LAUNCH_DEADLINE).await;
        self.keep_slots_ready();
        launched.map(|_| ())
    }

    /// A stream to an init that listens.
    async fn open_stream(&self, sandbox: SandboxId) -> Result<UnixStream, BackendError> {
        let path = self.0.config.data_dir.join("sandboxes").join(sandbox.to_string());
        let gone =
            |e: &io::Error| matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused);
        let connected = async {
            let dir =
                rustix::fs::open(&path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
            // Through the descriptor, since the whole path may be longer than a socket's address holds.
            UnixStream::connect(format!("/proc/self/fd/{}/{INIT_SOCKET}", dir.as_raw_fd())).await
        };
        match tokio::time::timeout(CONNECT_DEADLINE, connected).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(e)) if gone(&e) => Err(BackendError::Gone),
            Ok(Err(e)) => Err(refused("connect to init")(e)),
            Err(_) => {
                Err(BackendError::Late { doing: "connect to init", seconds: CONNECT_DEADLINE.as_secs() })
            }
        }
    }

    fn take_range(&self, sandbox: SandboxId) -> Result<u32, BackendError> {
        let mut ids = self.ids();
        let base = match ids.ready.pop_front() {
            Some(base) => base,
            None => ids
                .ranges
                .take()
                .map_err(refused("claim an id range"))?
                .ok_or(BackendError::Full { what: "id ranges" })?,
        };
        ids.used.insert(sandbox, base);
        Ok(base)
    }

    fn put_range_back(&self, sandbox: SandboxId) {
        let mut ids = self.ids();
        if let Some(base) = ids.used.remove(&sandbox) {
            ids.ranges.put_back(base);
        }
    }

    fn ids(&self) -> std::sync::MutexGuard<'_, Ids> {
        self.0.ranges.lock().expect("nobody panics while holding the ids")
    }
}

#[async_trait]
impl Backend for NsBackend {
    async fn prepare(&self, rootfs: &Rootfs) -> Result<(), BackendError> {
        match rootfs {
            Rootfs::Host | Rootfs::OverHost(_) => {}
            // Layers are unpacked before anybody can ask for a sandbox of them.
            Rootfs::Layers(_) => return Ok(()),
        }
        // One caller looks, the others wait for what it finds.
        let mut checked = self.0.image_checked.lock().await;
        let first = checked.quickly.is_none();
        if checked.quickly.is_none_or(|at| at.elapsed() > IMAGE_TRUSTED) {
            let generation = self.prepare_host_image(first).await?;
            checked.quickly = Some(Instant::now());
            self.note_generation(&mut checked, generation);
        }
        if first || checked.thoroughly.is_some_and(|at| at.elapsed() > IMAGE_TRUSTED_WHOLLY) {
            checked.thoroughly = Some(Instant::now());
            if !first {
                self.check_image_thoroughly();
            }
        }
        Ok(())
    }

    fn foresee(&self, rootfs: &Rootfs, limits: &Limits) {
        let shape = Shape { rootfs: rootfs.clone(), limits: *limits };
        let unwanted = self.spares().foresee(&shape);
        self.remove_spares(unwanted);
        self.refill();
    }

    fn reserve(&self, rootfs: &Rootfs, limits: &Limits) -> Option<SandboxId> {
        let taken = self.spares().take(&Shape { rootfs: rootfs.clone(), limits: *limits });
        *self.0.last_taken.lock().expect("nobody panics while holding an instant") = Instant::now();
        self.foresee(rootfs, limits);
        taken
    }

    async fn freeze(&self, sandbox: SandboxId, motion: Motion) -> Result<(), BackendError> {
        let ask = Ask::Freeze { sandbox, motion };
        self.ask("freeze or thaw a sandbox", ask, QUICK_DEADLINE).await.map(|_| ())
    }

    async fn stop(&self) {
        let ready = self.spares().close();
        // One that is being made just now is removed by whoever makes it.
        drop(self.0.making_spare.lock().await);
        for sandbox in ready {
            self.remove_spare(sandbox).await;
        }
    }

    async fn launch(&self, spec: &Spec) -> Result<(), BackendError> {
        let shape = Shape { rootfs: spec.rootfs.clone(), limits: spec.limits };
        let claim = self.spares().claim(spec.sandbox, &shape);
        let fit = match claim {
            Claim::Nothing => true,
            Claim::Unfit => false,
            Claim::Ready => match self.open_stream(spec.sandbox).await {
                Ok(stream) => {
                    self.greeted().insert(spec.sandbox, stream);
                    return Ok(());
                }
                Err(error) => {
                    tracing::warn!(sandbox = %spec.sandbox, %error, "a spare has died and is made again");
                    false
                }
            },
        };
        if !fit {
            self.teardown(spec.sandbox).await?;
        }
        self.make(spec).await
    }

    async fn connect(&self, sandbox: SandboxId) -> Result<GuestStream, BackendError> {
        let greeted = self.greeted().remove(&sandbox);
        match greeted {
            Some(stream) => Ok(Box::new(stream)),
            None => Ok(Box::new(self.open_stream(sandbox).await?)),
        }
    }

    async fn teardown(&self, sandbox: SandboxId) -> Result<(), BackendError> {
        self.spares().forget(sandbox);
        self.greeted().remove(&sandbox);
        self.0.oom_kills.forget(sandbox);
        self.ask("remove a sandbox", Ask::Teardown { sandbox }, TEARDOWN_DEADLINE).await?;
        self.put_range_back(sandbox);
        Ok(())
    }

    async fn end_processes(&self, sandbox: SandboxId, which: Processes) -> Result<(), BackendError> {
        let ask = Ask::EndProcesses { sandbox, which };
        self.ask("end processes of a sandbox", ask, QUICK_DEADLINE).await.map(|_| ())
    }

    async fn inventory(&self) -> Result<Vec<SandboxId>, BackendError> {
        let found = inventory(&*self.link().await?).await?;
        // Asked after the inventory was taken: what was made or taken meanwhile is held, or has a driver.
        let spares = self.spares();
        Ok(found.into_iter().map(|found| found.sandbox).filter(|sandbox| !spares.holds(*sandbox)).collect())
    }

    async fn oom_kills(&self, sandbox: SandboxId) -> Result<u64, BackendError> {
        // The kernel makes this file up when it is read: no disk is waited for.
        self.0.oom_kills.of(sandbox).map_err(refused("count memory kills"))
    }

    async fn usage(&self, sandboxes: &[SandboxId]) -> Result<Vec<Option<Usage>>, BackendError> {
        let (installation, sandboxes) = (self.0.config.installation, sandboxes.to_vec());
        // Anyone may read these files, so the launcher need not be asked, which would fork for each.
        let read = move || {
            let groups = Cgroups::look(installation)?;
            sandboxes.into_iter().map(|sandbox| groups.usage(sandbox)).collect()
        };
        beside(read).await.map_err(refused("read what sandboxes use"))
    }

    async fn disk_usage(&self, sandbox: SandboxId) -> Result<DiskUsage, BackendError> {
        const DOING: &str = "look at a sandbox's files";
        match self.ask(DOING, Ask::DiskUsage { sandbox }, QUICK_DEADLINE).await? {
            Answer::DiskUsage { bytes, complete } => Ok(DiskUsage { bytes, complete }),
            other => Err(unexpected(DOING, &other)),
        }
    }

    async fn unpack_layer(
        &self,
        wanted: &LayerSpec,
        read: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<LayerFacts, BackendError> {
        let doing = "unpack a layer";
        let LayerSpec { layer, below, over_host, from } = wanted.clone();
        let base = self.ids().ranges.take().map_err(refused("claim an id range"))?;
        let base = base.ok_or(BackendError::Full { what: "id ranges" })?;
        let ask = Ask::UnpackLayer(Box::new(UnpackLayer { layer, below, over_host, from, base }));
        let (tell, mut told) = watch::channel(0);
        let backend = self.clone();
        // A task of its own: if the caller leaves, the process goes on for a while, and nobody else may get its ids.
        let mut asking = tokio::spawn(async move {
            let answer = match backend.link().await {
                Ok(link) => link.ask_and_hear(doing, ask, UNPACK_DEADLINE, Some(tell)).await,
                Err(error) => Err(error),
            };
            // Without an answer the process may still live; the next start of the daemon takes the range back.
            if !matches!(&answer, Err(BackendError::LauncherGone { .. } | BackendError::Late { .. })) {
                backend.ids().ranges.put_back(base);
            }
            answer
        });
        let answer = loop {
            tokio::select! {
                Ok(()) = told.changed() => read(*told.borrow_and_update()),
                answer = &mut asking => break answer,
            }
        };
        let answer = answer.map_err(|error| refused(doing)(io::Error::other(error)))?;
        match answer? {
            Answer::Unpacked(Ok(facts)) => Ok(facts),
            Answer::Unpacked(Err(fault)) => Err(BackendError::Layer { layer, source: Box::new(fault) }),
            other => Err(unexpected(doing, &other)),
        }
    }

    async fn remove_layer(&self, layer: Digest) -> Result<(), BackendError> {
        // One that is being made from it would be made from nothing.
        let _none_is_made = self.0.making_spare.lock().await;
        let spares = self.spares().without(layer);
        for spare in spares {
            self.remove_spare(spare).await;
        }
        self.ask("remove a layer", Ask::RemoveLayer { layer }, TEARDOWN_DEADLINE).await?;
        Ok(())
    }

    async fn layers(&self) -> Result<Vec<Digest>, BackendError> {
        let mut all: Vec<Digest> = Vec::new();
        loop {
            let after = all.last().copied();
            match self.ask("list layers", Ask::Layers { after }, QUICK_DEADLINE).await? {
                Answer::Layers(page) => {
                    let last = page.len() < LAYERS_PAGE;
                    all.extend(page);
                    if last {
                        return Ok(all);
                    }
                }
                other => return Err(unexpected("list layers", &other)),
            }
        }
    }

    fn store(&self) -> StoreFacts {
        self.0.store
    }

    async fn create_volume(
        &self,
        volume: VolumeId,
        size_bytes: u64,
        from: Option<VolumeId>,
    ) -> Result<(), BackendError> {
        let ask = Ask::CreateVolume { volume, size_bytes, from };
        self.ask("make a volume", ask, VOLUME_DEADLINE).await.map(|_| ())
    }

    async fn resize_volume(&self, volume: VolumeId, size_bytes: u64) -> Result<(), BackendError> {
        self.ask("resize a volume", Ask::ResizeVolume { volume, size_bytes }, VOLUME_DEADLINE)
            .await
            .map(|_| ())
    }

    async fn remove_volume(&self, volume: VolumeId) -> Result<(), BackendError> {
        self.ask("remove a volume", Ask::RemoveVolume { volume }, TEARDOWN_DEADLINE).await.map(|_| ())
    }

    async fn volume_usage(&self, volume: VolumeId) -> Result<DiskUsage, BackendError> {
        const DOING: &str = "look at a volume's files";
        match self.ask(DOING, Ask::VolumeUsage { volume }, QUICK_DEADLINE).await? {
            Answer::DiskUsage { bytes, complete } => Ok(DiskUsage { bytes, complete }),
            other => Err(unexpected(DOING, &other)),
        }
    }

    async fn volumes(&self) -> Result<Vec<VolumeId>, BackendError> {
        let mut all: Vec<VolumeId> = Vec::new();
        loop {
            let after = all.last().copied();
            match self.ask("list volumes", Ask::Volumes { after }, QUICK_DEADLINE).await? {
                Answer::Volumes(page) => {
                    let last = page.len() < VOLUMES_PAGE;
                    all.extend(page);
                    if last {
                        return Ok(all);
                    }
                }
                other => return Err(unexpected("list volumes", &other)),
            }
        }
    }

    async fn machine(&self) -> Result<Machine, BackendError> {
        let config = self.0.config.clone();
        let mut machine = beside(move || machine(&config)).await.map_err(refused("look at the machine"))?;
        if self.0.store.kind == StoreKind::Loop {
            // Mounted in the launcher's namespace only.
            const DOING: &str = "look at the store";
            match self.ask(DOING, Ask::StoreUsage, QUICK_DEADLINE).await? {
                Answer::StoreUsage { bytes, available_bytes } => {
                    (machine.disk_bytes, machine.disk_available_bytes) = (bytes, available_bytes);
                }
                other => return Err(unexpected(DOING, &other)),
            }
        }
        Ok(machine)
    }
}

/// Work that blocks for a moment, on a thread where that harms nobody.
async fn beside<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(io::Error::other(error)))
}

fn machine(config: &NsConfig) -> io::Result<Machine> {
    let cpus = std::thread::available_parallelism()?;
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let memory = |word: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(word)?.strip_prefix(':'));
        let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
        kib.map(|kib| kib * 1024).ok_or_else(|| io::Error::other(format!("no {word} in /proc/meminfo")))
    };
    let disk = rustix::fs::statvfs(&config.data_dir)?;
    Ok(Machine {
        cpus: u32::try_from(cpus.get()).unwrap_or(u32::MAX),
        memory_bytes: memory("MemTotal")?,
        memory_available_bytes: memory("MemAvailable")?,
        disk_bytes: disk.f_blocks.saturating_mul(disk.f_frsize),
        disk_available_bytes: disk.f_bavail.saturating_mul(disk.f_frsize),
        sandboxes: Cgroups::look(config.installation)?.usage_of_all()?,
    })
}

/// Removes what an installation has on the machine beyond its data directory, once no sandbox of it is left.
pub fn forget_installation(installation: InstallationId) -> Result<(), BackendError> {
    Cgroups::remove_installation(installation).map_err(refused("remove the installation's cgroups"))?;
    Ranges::release_all(Path::new(CLAIMS), installation)
        .map_err(refused("release the installation's id ranges"))
}

/// From the id, so that it is settled before anybody has given the sandbox a name, and stays when that changes.
fn hostname(sandbox: SandboxId) -> String {
    format!("sandbox-{:08x}", sandbox.bits() >> 96)
}

fn random_bits() -> Result<u128, BackendError> {
    let mut bits = [0; 16];
    getrandom::fill(&mut bits).map_err(|e| refused("draw random bits")(io::Error::other(e)))?;
    Ok(u128::from_le_bytes(bits))
}

async fn inventory(link: &Link) -> Result<Vec<Found>, BackendError> {
    let mut all: Vec<Found> = Vec::new();
    loop {
        let after = all.last().map(|found| found.sandbox);
        match link.ask("list what exists", Ask::Inventory { after }, QUICK_DEADLINE).await? {
            Answer::Inventory(page) => {
                let last = page.len() < INVENTORY_PAGE;
                all.extend(page);
                if last {
                    return Ok(all);
                }
            }
            other => return Err(unexpected("list what exists", &other)),
        }
    }
}

/// One launcher process and the socket to it.
struct Link {
    socket: AsyncFd<OwnedFd>,
    /// Ends when the process was waited for.
    dead: watch::Receiver<()>,
    serial: AtomicU64,
    /// Who waits for which reply. `None` once the launcher is gone.
    waiting: Mutex<Option<HashMap<u64, Waiter>>>,
}

struct Waiter {
    answer: oneshot::Sender<Result<Answer, Failure>>,
    /// Who hears how far it is.
    progress: Option<watch::Sender<u64>>,
}

impl Link {
    async fn open(config: &NsConfig) -> Result<(Arc<Self>, StoreFacts), BackendError> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(|e| refused("make a socket pair")(e.into()))?;
        rustix::io::ioctl_fionbio(&ours, true).map_err(|e| refused("prepare a socket")(e.into()))?;
        let mut child = tokio::process::Command::new(&config.launcher)
            .arg0("shoal")
            .arg("launcher")
            .arg("--data-dir")
            .arg(&config.data_dir)
            .args(["--installation", &config.installation.to_string()])
            .args(["--store", config.store.wish.word()])
            .args(config.store.size_bytes.map(|bytes| format!("--store-size={bytes}")))
            .env_clear()
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn()
            .map_err(refused("start the launcher"))?;
        let (dies, is_dead) = watch::channel(());
        let replies = watched(ours.try_clone().map_err(refused("share a socket"))?)?;
        let link = Arc::new(Self {
            socket: watched(ours)?,
            dead: is_dead,
            serial: AtomicU64::new(0),
            waiting: Mutex::new(Some(HashMap::new())),
        });
        tokio::spawn(read_replies(replies, Arc::downgrade(&link)));
        let ended = Arc::downgrade(&link);
        tokio::spawn(async move {
            match child.wait().await {
                Ok(status) => tracing::debug!(%status, "the launcher has ended"),
                Err(error) => tracing::warn!(%error, "cannot wait for the launcher"),
            }
            // Its walkers share the socket, so that may stay open for a moment.
            if let Some(link) = ended.upgrade() {
                link.give_up();
            }
            drop(dies);
        });
        let hello = Ask::Hello { version: VERSION, installation: config.installation };
        match link.ask("greet the launcher", hello, QUICK_DEADLINE).await? {
            Answer::Hello { version: VERSION } => {}
            Answer::Hello { version } => {
                let source =
                    io::Error::other(format!("it speaks version {version} and this daemon {VERSION}"));
                return Err(refused("use the launcher")(source));
            }
            other => return Err(unexpected("greet the launcher", &other)),
        }
        match link.ask("ask for the store", Ask::Store, QUICK_DEADLINE).await? {
            Answer::Store { facts, note: Some(why) } => {
                let without =
                    "writable files are kept in plain directories, without disk limits and cheap copies";
                tracing::warn!(why, "{without}");
                Ok((link, facts))
            }
            Answer::Store { facts, note: None } => {
                tracing::debug!(kind = facts.kind.word(), limits = facts.limits, "the store is open");
                Ok((link, facts))
            }
            other => Err(unexpected("ask for the store", &other)),
        }
    }

    /// Says to everyone who waits that the launcher is gone, by dropping their senders.
    fn give_up(&self) {
        self.waiting.lock().expect("nobody panics while holding it").take();
    }

    fn is_alive(&self) -> bool {
        self.waiting.lock().expect("nobody panics while holding it").is_some()
    }

    async fn ask(&self, doing: &'static str, ask: Ask, deadline: Duration) -> Result<Answer, BackendError> {
        self.ask_and_hear(doing, ask, deadline, None).await
    }

    async fn ask_and_hear(
        &self,
        doing: &'static str,
        ask: Ask,
        deadline: Duration,
        progress: Option<watch::Sender<u64>>,
    ) -> Result<Answer, BackendError> {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        match self.waiting.lock().expect("nobody panics while holding it").as_mut() {
            Some(waiting) => waiting.insert(serial, Waiter { answer, progress }),
            None => return Err(BackendError::LauncherGone { doing }),
        };
        let packet = to_packet(&Request { serial, ask });
        let exchange = async {
            if self.send(&packet).await.is_err() {
                return Err(BackendError::LauncherGone { doing });
            }
            match answered.await {
                Ok(Ok(answer)) => Ok(answer),
                Ok(Err(failure)) => Err(failed(failure)),
                Err(_) => Err(BackendError::LauncherGone { doing }),
            }
        };
        let result = tokio::time::timeout(deadline, exchange).await;
        if let Some(waiting) = self.waiting.lock().expect("nobody panics while holding it").as_mut() {
            waiting.remove(&serial);
        }
        result.unwrap_or(Err(BackendError::Late { doing, seconds: deadline.as_secs() }))
    }

    async fn send(&self, packet: &[u8]) -> io::Result<()> {
        loop {
            let mut ready = self.socket.writable().await?;
            match send(self.socket.get_ref(), packet, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(_) => return Ok(()),
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

impl Link {
    /// Ends the launcher, and the task that reads its replies.
    fn hang_up(&self) {
        // It fails only where the launcher is gone already.
        let _ = rustix::net::shutdown(self.socket.get_ref(), rustix::net::Shutdown::Both);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.hang_up();
    }
}

fn watched(socket: OwnedFd) -> Result<AsyncFd<OwnedFd>, BackendError> {
    sys::watch_descriptor(socket).map_err(refused("watch the launcher's socket"))
}

/// Hands replies to whoever waits, until the launcher is gone or nobody holds the link.
async fn read_replies(socket: AsyncFd<OwnedFd>, link: Weak<Link>) {
    let mut packet = vec![0; PACKET_MAX];
    loop {
        let received = async {
            let mut ready = socket.readable().await?;
            match recv(socket.get_ref().as_fd(), packet.as_mut_slice(), RecvFlags::DONTWAIT) {
                Ok((0, _)) => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
                Ok((length, _)) => Ok(Some(length)),
                Err(Errno::AGAIN) => {
                    ready.clear_ready();
                    Ok(None)
                }
                Err(Errno::INTR) => Ok(None),
                Err(e) => Err(e.into()),
            }
        };
        let received = received.await;
        let Some(link) = link.upgrade() else { return };
        let gone = match received {
            Ok(None) => false,
            Ok(Some(length)) => match from_packet::<Reply>(&packet[..length]) {
                Some(Reply { serial, result: Ok(Answer::Unpacking { bytes }) }) => {
                    let waiting = link.waiting.lock().expect("nobody panics while holding it");
                    let waiter = waiting.as_ref().and_then(|waiting| waiting.get(&serial));
                    if let Some(progress) = waiter.and_then(|waiter| waiter.progress.as_ref()) {
                        progress.send_replace(bytes);
                    }
                    false
                }
                Some(Reply { serial, result }) => {
                    let mut waiting = link.waiting.lock().expect("nobody panics while holding it");
                    if let Some(waiter) = waiting.as_mut().and_then(|waiting| waiting.remove(&serial)) {
                        // Whoever asked may have stopped waiting.
                        let _ = waiter.answer.send(result);
                    }
                    false
                }
                None => {
                    tracing::error!("the launcher sent a reply that does not parse");
                    true
                }
            },
            Err(_) => true,
        };
        if gone {
            link.give_up();
            return;
        }
    }
}

/// A machine that is full is told apart from one that is broken.
fn failed(Failure { doing, errno }: Failure) -> BackendError {
    let full = match errno {
        libc::EAGAIN => "processes",
        libc::EMFILE | libc::ENFILE => "file descriptors",
        libc::ENOMEM => "memory",
        libc::ENOSPC | libc::EDQUOT => "disk space or kernel objects",
        0 => return BackendError::Refused { doing, source: io::Error::other("the launcher refused") },
        errno => return BackendError::Refused { doing, source: io::Error::from_raw_os_error(errno) },
    };
    BackendError::Full { what: full }
}

fn refused(doing: &'static str) -> impl FnOnce(io::Error) -> BackendError {
    move |source| BackendError::Refused { doing: doing.into(), source }
}

fn unexpected(doing: &'static str, answer: &Answer) -> BackendError {
    BackendError::Refused {
        doing: doing.into(),
        source: io::Error::other(format!("unexpected answer {answer:?}")),
    }
}
