//! The backend `ns`: namespaces on this machine, made by the launcher.
//!
//! This is the daemon's side. It starts the launcher, restarts it when it dies, hands out id ranges and connects to init. It changes
//! nothing in the kernel itself: [`launcher`] is the privileged half. [`plan`] lists the steps that create a sandbox, [`enter`]
//! takes them; the other modules are their tools.

pub mod cgroup;
pub mod enter;
pub mod floor;
mod isolation;
pub mod launcher;
mod link;
mod lock;
pub mod network;
mod networking;
mod packets;
pub mod plan;
pub mod ranges;
mod ready;
pub mod seccomp;
mod shown;
pub mod slots;
pub mod spares;
mod storage;

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::net::UnixStream;
use wire::launch::{Answer, Ask, StoreFacts};
use wire::{InstallationId, SandboxId};

use crate::backend::BackendError;
use crate::ns::cgroup::{Cgroups, OomKills};
use crate::ns::link::{Call, Link, refused};
use crate::ns::ranges::{CLAIMS, Claimant, Ranges};
use crate::ns::ready::ImageChecked;
use crate::ns::spares::Spares;
use crate::storage::pool::StoreConfig;

/// For requests that only read, or change little.
const QUICK_DEADLINE: Duration = Duration::from_secs(30);
/// A teardown removes files, of which there may be millions.
const TEARDOWN_DEADLINE: Duration = Duration::from_secs(300);
/// The launcher has nothing to clean up when it ends.
const END_DEADLINE: Duration = Duration::from_secs(20);

/// What the backend is started with.
#[derive(Debug, Clone)]
pub struct NsConfig {
    /// The daemon's data directory.
    pub data_dir: PathBuf,
    /// The installation that the sandboxes belong to.
    pub installation: InstallationId,
    /// The program to run as the launcher, with the arguments `launcher --data-dir DIR --installation ID`.
    pub launcher: PathBuf,
    /// How many sandboxes to prepare before a caller asks for one.
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
    /// The living launcher, if any. Locked only to read or replace it, never while waiting for an answer.
    launcher: tokio::sync::Mutex<Option<Arc<Link>>>,
    /// Set once no launcher may be started any more.
    ended: AtomicBool,
    ranges: Mutex<Ids>,
    oom_kills: OomKills,
    image_checked: tokio::sync::Mutex<ImageChecked>,
    spares: Mutex<Spares>,
    /// Locked while a spare is being made.
    making_spare: tokio::sync::Mutex<()>,
    /// Whether a task is making spares.
    refilling: AtomicBool,
    last_taken: Mutex<Instant>,
    /// Streams to the inits of spares, opened when they were claimed.
    greeted: Mutex<HashMap<SandboxId, UnixStream>>,
}

/// Who has which ids.
struct Ids {
    ranges: Ranges,
    /// Taken, with slots being made for them.
    ready: VecDeque<u32>,
    used: HashMap<SandboxId, u32>,
}

impl NsBackend {
    /// Starts the launcher and finds out which sandboxes exist.
    pub async fn start(config: NsConfig) -> Result<Self, BackendError> {
        let (link, store) = Link::open(&config).await?;
        let found = isolation::inventory(&link).await?;
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

    /// Ends the current launcher, returns once it is dead, and starts no other.
    pub async fn end(&self) -> Result<(), BackendError> {
        self.0.ended.store(true, Ordering::Relaxed);
        let Some(link) = self.0.launcher.lock().await.take() else { return Ok(()) };
        link.hang_up();
        let mut dead = link.dead.clone();
        let late = |_| BackendError::Late { doing: "end", seconds: END_DEADLINE.as_secs() };
        // The sender sends nothing; it is dropped once the process has been reaped.
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
        tracing::warn!("the launcher has died and is restarted");
        let (link, _) = Link::open(&self.0.config).await?;
        *launcher = Some(link.clone());
        Ok(link)
    }

    async fn ask(&self, doing: &'static str, ask: Ask, deadline: Duration) -> Result<Answer, BackendError> {
        self.link().await?.ask(doing, ask, deadline).await
    }

    async fn exchange(
        &self,
        doing: &'static str,
        ask: Ask,
        given: Vec<OwnedFd>,
        deadline: Duration,
    ) -> Result<(Answer, Vec<OwnedFd>), BackendError> {
        self.link().await?.exchange(doing, ask, Call { given, ..Call::within(deadline) }).await
    }

    fn spares(&self) -> std::sync::MutexGuard<'_, Spares> {
        self.0.spares.lock().expect("nobody panics while holding the spares")
    }

    fn greeted(&self) -> std::sync::MutexGuard<'_, HashMap<SandboxId, UnixStream>> {
        self.0.greeted.lock().expect("nobody panics while holding the streams")
    }

    fn take_range(&self, sandbox: SandboxId) -> Result<u32, BackendError> {
        let mut ids = self.ids();
        // A sandbox that is launched again keeps its range.
        if let Some(base) = ids.used.get(&sandbox) {
            return Ok(*base);
        }
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

/// Removes what an installation has on the machine beyond its data directory, once no sandbox of it is left.
pub fn forget_installation(installation: InstallationId) -> Result<(), BackendError> {
    Cgroups::remove_installation(installation).map_err(refused("remove the installation's cgroups"))?;
    Ranges::release_all(Path::new(CLAIMS), installation)
        .map_err(refused("release the installation's id ranges"))
}
