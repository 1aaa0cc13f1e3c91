//! Starts egress, finds the one that an earlier daemon left, keeps it alive and stores its records.
//!
//! Egress outlives the daemon. A daemon that starts connects to it; if it speaks another version, the daemon takes its listeners over,
//! lets it finish its connections and starts a new one. If egress dies, the daemon starts another and hands it the copies of all
//! listeners: connections that waited are served, those that were open have ended.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use egress::control::{Attach, ControlError, Egress, Listener, Records, SOCKET_FILE, Start, VERSION};
use egress::policy::Ruleset;
use runtime::BackendError;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tracing::{error, info, warn};
use wire::SandboxId;

use super::{attachment, refused};
use crate::Shared;
use crate::error::{DbError, EngineError, chain};

/// How long the connections of an egress that is replaced may take to end.
const DRAIN_SECONDS: u32 = 60;
/// Worker threads of egress, at most: a connection needs little, and sandboxes need the processors.
const THREADS_MAX: usize = 4;
/// How many records are stored in one change.
const BATCH_MAX: usize = 256;
/// The first and the longest pause between two attempts to start egress, or to store records.
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(10);

/// A connection to egress.
pub(super) struct Link {
    pub egress: Egress,
    /// The authority that sandboxes should trust, in PEM.
    pub ca: String,
    /// Set when the connection has ended.
    gone: AtomicBool,
    /// The sandboxes that it serves.
    served: Mutex<HashSet<SandboxId>>,
}

impl Link {
    fn served(&self) -> MutexGuard<'_, HashSet<SandboxId>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn serves(&self, id: SandboxId) -> bool {
        self.served().contains(&id)
    }

    pub fn forget(&self, id: SandboxId) {
        self.served().remove(&id);
    }

    async fn attach(&self, attach: Attach, descriptors: &[OwnedFd]) -> Result<(), ControlError> {
        let id = attach.sandbox;
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        self.egress.attach(attach, &descriptors).await?;
        self.served().insert(id);
        Ok(())
    }
}

/// The current egress, and what is known of sandboxes about it.
pub(super) struct Links {
    directory: PathBuf,
    now: tokio::sync::Mutex<Option<Arc<Link>>>,
    /// Whether an egress may run that this daemon is not connected to yet.
    unseen: AtomicBool,
    /// Listeners that an egress of another version gave back.
    handed: Mutex<HashMap<SandboxId, Vec<(Listener, OwnedFd)>>>,
    /// Sandboxes that have the file with their policy.
    shown: Mutex<HashSet<SandboxId>>,
}

impl Links {
    pub fn new(data_dir: &Path) -> Self {
        let directory = data_dir.join(runtime::EGRESS_DIRECTORY);
        let unseen = AtomicBool::new(directory.join(SOCKET_FILE).exists());
        Self {
            directory,
            now: tokio::sync::Mutex::default(),
            unseen,
            handed: Mutex::default(),
            shown: Mutex::default(),
        }
    }

    /// Whether an egress may hold something of a sandbox.
    pub fn may_serve(&self, id: SandboxId) -> bool {
        self.unseen.load(Ordering::Relaxed)
            || self.now.try_lock().map_or(true, |now| now.as_ref().is_some_and(|link| link.serves(id)))
    }

    /// Whether the egress that runs serves a sandbox. Connects to it if need be.
    pub async fn serves(&self, shared: &Arc<Shared>, id: SandboxId) -> bool {
        self.may_serve(id) && self.living(shared).await.is_some_and(|link| link.serves(id))
    }

    pub fn was_shown(&self, id: SandboxId) -> bool {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner).contains(&id)
    }

    pub fn set_shown(&self, id: SandboxId) {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
    }

    pub fn forget_shown(&self, id: SandboxId) {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }

    pub fn take_handed(&self, id: SandboxId) -> Option<Vec<(Listener, OwnedFd)>> {
        self.handed.lock().unwrap_or_else(PoisonError::into_inner).remove(&id)
    }

    /// The egress that runs, if one does.
    pub async fn living(&self, shared: &Arc<Shared>) -> Option<Arc<Link>> {
        let mut now = self.now.lock().await;
        if let Some(link) = now.as_ref().filter(|link| !link.gone.load(Ordering::Relaxed)) {
            return Some(Arc::clone(link));
        }
        *now = self.find(shared).await;
        now.clone()
    }

    /// Egress, started if none runs.
    pub async fn egress(&self, shared: &Arc<Shared>) -> Result<Arc<Link>, BackendError> {
        let mut now = self.now.lock().await;
        if let Some(link) = now.as_ref().filter(|link| !link.gone.load(Ordering::Relaxed)) {
            return Ok(Arc::clone(link));
        }
        let link = match self.find(shared).await {
            Some(link) => link,
            None => self.start(shared).await?,
        };
        *now = Some(Arc::clone(&link));
        // Attach the sandboxes that had a network before, then accept requests for others.
        for id in super::open_doors(shared) {
            if !link.serves(id)
                && let Err(error) = serve_on(shared, &link, id).await
            {
                error!(sandbox = %id, error = chain(&error), "cannot hand a sandbox to the new egress");
            }
        }
        Ok(link)
    }

    /// Connects to the egress that an earlier daemon left.
    async fn find(&self, shared: &Arc<Shared>) -> Option<Arc<Link>> {
        if !self.unseen.swap(false, Ordering::Relaxed) {
            return None;
        }
        let (egress, records) = match Egress::connect(&self.directory).await {
            Ok(found) => found,
            Err(error) => {
                info!(error = chain(&error), "no egress of an earlier daemon answers");
                return None;
            }
        };
        let greeting = egress.greeting().clone();
        info!(sandboxes = greeting.attached.len(), version = greeting.version, "found egress");
        if egress.check_version().is_err() {
            self.take_over(egress, records).await;
            return None;
        }
        let ca = match egress.status().await {
            Ok(status) => status.ca_pem,
            Err(error) => {
                warn!(error = chain(&error), "egress does not say how it does");
                return None;
            }
        };
        Some(follow(shared, egress, ca, records, greeting.attached.into_iter().collect()))
    }

    /// Takes the listeners of an egress of another version, and lets it finish its connections.
    async fn take_over(&self, egress: Egress, records: Records) {
        for id in egress.greeting().attached.clone() {
            match egress.listeners(id).await {
                Ok(listeners) => {
                    self.handed.lock().unwrap_or_else(PoisonError::into_inner).insert(id, listeners);
                }
                Err(error) => warn!(sandbox = %id, error = chain(&error), "cannot take listeners over"),
            }
        }
        if let Err(error) = egress.drain(DRAIN_SECONDS).await {
            warn!(error = chain(&error), "cannot drain egress; its connections end");
        }
        // Its records are of another version too: it keeps them, and so does its spool.
        drop((egress, records));
    }

    async fn start(&self, shared: &Arc<Shared>) -> Result<Arc<Link>, BackendError> {
        let settings = &shared.config.network;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (ours, theirs) =
            pair.map_err(|e| refused("make a socket for egress")(std::io::Error::from(e)))?;
        shared.backend.start_egress(vec![theirs]).await?;
        let threads =
            std::thread::available_parallelism().map_or(1, |threads| threads.get().min(THREADS_MAX));
        let start = Start {
            version: VERSION,
            installation: settings.installation,
            // The launcher starts it in its directory.
            directory: ".".into(),
            identity: None,
            daemon_uid: rustix::process::getuid().as_raw(),
            threads: threads as u16,
            settings: settings.egress.clone(),
        };
        let started = Egress::start(ours, &start).await;
        let (egress, records, started) = started.map_err(refused("start egress"))?;
        Ok(follow(shared, egress, started.ca_pem, records, HashSet::new()))
    }

    /// Makes egress serve a sandbox whose network is open. If egress dies meanwhile, the next one serves it.
    pub async fn serve(&self, shared: &Arc<Shared>, id: SandboxId) -> Result<(), BackendError> {
        let link = self.egress(shared).await?;
        if link.serves(id) {
            return Ok(());
        }
        match serve_on(shared, &link, id).await {
            Err(ServeError::Control(ControlError::Gone { .. })) => {
                link.gone.store(true, Ordering::Relaxed);
                // The next egress gets all listeners at its start, this sandbox's too.
                let link = self.egress(shared).await?;
                match link.serves(id) {
                    true => Ok(()),
                    false => serve_on(shared, &link, id).await.map_err(refused("serve a sandbox's network")),
                }
            }
            result => result.map_err(refused("serve a sandbox's network")),
        }
    }

    /// Gives egress another policy for a sandbox. Connections that lost their rule are cut when this returns.
    pub async fn set_policy(
        &self,
        shared: &Arc<Shared>,
        id: SandboxId,
        rules: Ruleset,
    ) -> Result<(), BackendError> {
        let link = self.egress(shared).await?;
        let credentials = super::credentials(shared, id).await;
        // Credentials first: a connection that the new rules open must not pass unread.
        let changed = match link.egress.set_credentials(id, credentials).await {
            Ok(()) => link.egress.set_policy(id, rules).await,
            Err(error) => Err(error),
        };
        match changed {
            Ok(()) => Ok(()),
            Err(ControlError::Gone { .. }) => {
                link.gone.store(true, Ordering::Relaxed);
                // The next egress starts with the new rules.
                self.serve(shared, id).await
            }
            Err(error) => Err(refused("put a policy in force")(error)),
        }
    }

    /// Ends egress if nothing needs it.
    pub async fn end_if_idle(&self, shared: &Arc<Shared>) {
        let mut now = self.now.lock().await;
        let Some(link) = now.as_ref() else { return };
        if !link.served().is_empty() || super::open_doors(shared).next().is_some() {
            return;
        }
        link.gone.store(true, Ordering::Relaxed);
        *now = None;
        if let Err(error) = shared.backend.end_egress().await {
            warn!(error = chain(&error), "cannot end egress");
        }
    }
}

/// Why egress does not serve a sandbox.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error(transparent)]
    Control(ControlError),
    #[error(transparent)]
    Engine(EngineError),
}

async fn serve_on(shared: &Arc<Shared>, link: &Link, id: SandboxId) -> Result<(), ServeError> {
    let attachment = attachment(shared, id).await.map_err(ServeError::Engine)?;
    // A sandbox that was closed meanwhile needs nothing.
    let Some((attach, descriptors)) = attachment else { return Ok(()) };
    link.attach(attach, &descriptors).await.map_err(ServeError::Control)
}

/// Starts the task that stores the records of an egress, and replaces the egress when it ends.
fn follow(
    shared: &Arc<Shared>,
    egress: Egress,
    ca: String,
    records: Records,
    served: HashSet<SandboxId>,
) -> Arc<Link> {
    let link = Arc::new(Link { egress, ca, gone: AtomicBool::new(false), served: Mutex::new(served) });
    let task = shared.runtime.spawn(keep(Arc::downgrade(shared), Arc::downgrade(&link), records));
    let mut tasks = shared.tasks.lock().unwrap_or_else(PoisonError::into_inner);
    tasks.retain(|task| !task.is_finished());
    tasks.push(task.abort_handle());
    link
}

async fn keep(shared: Weak<Shared>, link: Weak<Link>, mut records: Records) {
    while let Some((sequence, record)) = records.recv().await {
        let (mut last, mut batch) = (sequence, vec![record]);
        while batch.len() < BATCH_MAX
            && let Ok((sequence, record)) = records.try_recv()
        {
            last = sequence;
            batch.push(record);
        }
        let (Some(shared), Some(link)) = (shared.upgrade(), link.upgrade()) else { return };
        let rejected: Vec<u128> = batch.iter().filter_map(rejected).collect();
        if !store(&shared, batch).await {
            return;
        }
        shared.networks.stored.notify_waiters();
        shared.networks.note_rejected(rejected);
        // An egress that is gone sends the records again to the next daemon; they are stored once.
        if let Err(error) = link.egress.acknowledge(last).await {
            warn!(error = chain(&error), "cannot acknowledge records of egress");
        }
    }
    // Its connection has ended: egress died, or another daemon has connected to it.
    let Some(shared) = shared.upgrade() else { return };
    // The task that gave the connection up already knows that egress ends.
    if link.upgrade().is_none_or(|link| link.gone.swap(true, Ordering::Relaxed)) {
        return;
    }
    warn!("egress has ended");
    let mut pause = RETRY_MIN;
    while super::open_doors(&shared).next().is_some() {
        match shared.networks.links.egress(&shared).await {
            Ok(_) => return info!("a new egress serves the sandboxes"),
            Err(error) => error!(error = chain(&error), "cannot start egress; sandboxes have no network"),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RETRY_MAX);
    }
}

/// The secret that a host rejected.
fn rejected(record: &egress::control::Record) -> Option<u128> {
    const UNAUTHORIZED: u16 = 401;
    match record {
        egress::control::Record::Used(used) if used.status == UNAUTHORIZED => Some(used.secret),
        _ => None,
    }
}

/// Stores records, and tries until it succeeds. `false` if the engine stops.
async fn store(shared: &Arc<Shared>, records: Vec<egress::control::Record>) -> bool {
    let mut pause = RETRY_MIN;
    loop {
        match shared.db.store_network_records(records.clone()).await {
            Ok(()) => return true,
            Err(EngineError::Store { source: DbError::Closed, .. }) => return false,
            Err(error) => error!(error = chain(&error), "cannot store records of egress; trying again"),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RETRY_MAX);
    }
}
