//! The networks of sandboxes: joins the backend, which makes routes and listeners, with egress, which serves them.
//!
//! [`attach`] puts a sandbox's policy in force and [`detach`] takes its network away; whatever starts or ends the processes of a
//! sandbox calls them: a create, a resume, an adoption after a restart, a teardown. A change of a policy calls [`change`]. `link`
//! starts egress and keeps it alive.
//!
//! ```text
//! open     routes and listeners by the backend ─▶ listeners and rules to egress ─▶ the file that the sandbox reads
//! change   rules to egress, which cuts connections ─▶ routes          (a connection without a route would only hang)
//! close    egress lets go of the listeners ─▶ ours are closed ─▶ teardown     (a listener keeps the namespace alive)
//! ```
//!
//! Every failure leaves the sandbox without a network, never with more than its policy says.

mod calls;
mod link;
mod routes;
mod shown;

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use egress::control::{Attach, Listener as Served, OwnerLimits, Settings};
use egress::credential::Credential;
use egress::limits::Limits;
use egress::policy::{Addresses, Name, Preset, Ruleset};
use egress::presets::Found;
use runtime::BackendError;
use tokio::sync::{Notify, OwnedMutexGuard};
use tracing::warn;
use wire::launch::Rootfs;
use wire::network::{Listener, Routes};
use wire::{InstallationId, SandboxId};

use crate::Shared;
use crate::error::{EngineError, chain};
use crate::model::Owner;
use crate::model::network::NetworkPolicy;
use link::Links;

pub use calls::EVENTS_WAIT_MAX;
pub(crate) use calls::{closes, rest, tend};

/// How the hosts of package registries are found, and the types of settings.
pub mod presets {
    pub use egress::dial::{Proxy, ProxyKind};
    pub use egress::dns::Upstream;
    pub use egress::policy::{Cidr, Name};
    pub use egress::presets::{Where, find, hosts};
}

/// The operator's settings for networks, and what was found on the machine.
#[derive(Debug, Clone)]
pub struct NetworkSettings {
    /// The installation, which is part of the authority's name.
    pub installation: InstallationId,
    /// The policy of sandboxes whose request and template name none. Where there is none, native sandboxes have no
    /// network, and those of a dialect its vendor's default.
    pub default: Option<NetworkPolicy>,
    /// The policy of steps of builds whose request names none.
    pub builds: NetworkPolicy,
    /// Resolvers, proxy, addresses and roots for egress.
    pub egress: Settings,
    /// The hosts that `registries` opens.
    pub registries: Vec<Found>,
    /// What each sandbox may use.
    pub limits: Limits,
    /// What all sandboxes of an owner together may use.
    pub owner_limits: Limits,
}

impl Default for NetworkSettings {
    /// No default network, and no registries.
    fn default() -> Self {
        let none =
            Limits { connections_max: 0, connections_per_second: 0, bytes_per_second: 0, bytes_max: 0 };
        Self {
            installation: InstallationId::from_random(0),
            default: None,
            builds: NetworkPolicy::default(),
            egress: Settings::default(),
            registries: Vec::new(),
            limits: Limits::default(),
            owner_limits: none,
        }
    }
}

/// The networks of all sandboxes.
pub(crate) struct Networks {
    preset: Preset,
    doors: Mutex<HashMap<SandboxId, Door>>,
    /// One change of a sandbox's network at a time.
    turns: Mutex<HashMap<SandboxId, Weak<tokio::sync::Mutex<()>>>>,
    links: Links,
    /// Secrets that hosts rejected since the sources were last read.
    rejected: Mutex<HashSet<u128>>,
    /// Notified when events were stored.
    pub stored: Notify,
}

/// The network of one sandbox that has processes.
#[derive(Default)]
struct Door {
    /// `None` while the policy opens nothing.
    open: Option<Open>,
}

struct Open {
    owner: Owner,
    policy: NetworkPolicy,
    rules: Ruleset,
    routes: Routes,
    /// Copies of the listeners, for the next egress if this one ends.
    listeners: Vec<(Served, OwnedFd)>,
}

impl Networks {
    pub fn new(settings: &NetworkSettings, data_dir: &std::path::Path) -> Self {
        Self {
            preset: egress::presets::preset(&settings.registries),
            doors: Mutex::default(),
            turns: Mutex::default(),
            links: Links::new(data_dir),
            rejected: Mutex::default(),
            stored: Notify::new(),
        }
    }

    fn doors(&self) -> MutexGuard<'_, HashMap<SandboxId, Door>> {
        self.doors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hosts rejected these secrets.
    fn note_rejected(&self, secrets: Vec<u128>) {
        self.rejected.lock().unwrap_or_else(PoisonError::into_inner).extend(secrets);
    }

    /// The secrets that hosts rejected since this was last asked.
    pub fn take_rejected(&self) -> HashSet<u128> {
        std::mem::take(&mut *self.rejected.lock().unwrap_or_else(PoisonError::into_inner))
    }

    async fn turn(&self, id: SandboxId) -> OwnedMutexGuard<()> {
        let turn = {
            let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
            match turns.get(&id).and_then(Weak::upgrade) {
                Some(turn) => turn,
                None => {
                    turns.retain(|_, turn| turn.strong_count() > 0);
                    let turn = Arc::default();
                    turns.insert(id, Arc::downgrade(&turn));
                    turn
                }
            }
        };
        turn.lock_owned().await
    }
}

/// Puts the policy of a sandbox in force. Call this whenever the sandbox has got processes. `policy` is asked for while no other change can come between.
pub(crate) async fn attach(
    shared: &Arc<Shared>,
    id: SandboxId,
    owner: &Owner,
    policy: impl Fn() -> NetworkPolicy,
) -> Result<(), BackendError> {
    let networks = &shared.networks;
    // Nothing to wait for: a sandbox without a policy costs nothing here.
    let _turn = networks.turn(id).await;
    put_in_force(shared, id, owner, &policy()).await
}

/// Puts a policy in force that has changed, if the sandbox has been attached. One that has not gets it when it is.
pub(crate) async fn change(
    shared: &Arc<Shared>,
    id: SandboxId,
    owner: &Owner,
    policy: impl Fn() -> NetworkPolicy,
) -> Result<(), BackendError> {
    let _turn = shared.networks.turn(id).await;
    if !shared.networks.doors().contains_key(&id) {
        return Ok(());
    }
    put_in_force(shared, id, owner, &policy()).await
}

/// Shows the programs of a sandbox which roots to trust, so that they can read why something was refused.
pub(crate) async fn show_trust(
    shared: &Arc<Shared>,
    id: SandboxId,
    rootfs: &Rootfs,
) -> Result<(), BackendError> {
    let link = shared.networks.links.egress(shared).await?;
    let extra = shared.config.network.egress.extra_roots.concat();
    shared.backend.show_trust(id, rootfs, &link.ca, &extra).await
}

/// Takes the network of a sandbox away. Call this before its processes are ended. Harmless if it has none.
pub(crate) async fn detach(shared: &Arc<Shared>, id: SandboxId) {
    let networks = &shared.networks;
    // An attach that is under way ends first, so that nothing is opened after this.
    let _turn = networks.turn(id).await;
    let door = networks.doors().remove(&id);
    let was_open = door.as_ref().is_some_and(|door| door.open.is_some());
    networks.links.forget_shown(id);
    // Our copies of the listeners close before egress's do; both must be gone before the teardown.
    drop(door);
    if was_open || networks.links.may_serve(id) {
        release(shared, id).await;
    }
}

/// Makes egress let go of a sandbox.
async fn release(shared: &Arc<Shared>, id: SandboxId) {
    let Some(link) = shared.networks.links.living(shared).await else { return };
    if let Err(error) = link.egress.detach(id).await {
        // If egress has died, it holds nothing. If it hangs, the teardown goes on and its namespace stays until egress ends.
        warn!(sandbox = %id, error = chain(&error), "egress did not let go of a sandbox");
    }
    link.forget(id);
}

async fn put_in_force(
    shared: &Arc<Shared>,
    id: SandboxId,
    owner: &Owner,
    policy: &NetworkPolicy,
) -> Result<(), BackendError> {
    let networks = &shared.networks;
    let settings = &shared.config.network;
    let mut rules = policy.expand(&networks.preset).map_err(refused("expand the policy"))?;
    // Binding a secret opens its hosts; rules that the caller wrote still take precedence.
    rules.preset.extend(shared.secrets.opened(owner, policy));
    let routes = routes::routes(&rules, &settings.egress.addresses.opened);
    let before =
        networks.doors().get(&id).and_then(|door| door.open.as_ref().map(|open| open.routes.clone()));
    let done = match (before, routes) {
        // An egress that outlived the former daemon may serve it with an older policy.
        (None, None) if networks.links.serves(shared, id).await => close(shared, id).await,
        (None, None) => {
            networks.doors().insert(id, Door::default());
            Ok(())
        }
        (Some(_), None) => close(shared, id).await,
        (Some(before), Some(routes)) => replace(shared, id, policy, rules, &before, routes).await,
        (None, Some(routes)) => open(shared, id, (owner, policy), rules, routes).await,
    };
    if let Err(error) = done {
        // Fails closed. A sandbox whose processes have ended has no namespace that could be open.
        if let Err(left) = close(shared, id).await
            && !matches!(left, BackendError::Gone)
        {
            warn!(sandbox = %id, error = chain(&left), "cannot close a sandbox's network");
        }
        if matches!(error, BackendError::Gone) {
            networks.doors().remove(&id);
        }
        return Err(error);
    }
    let was_shown = networks.links.was_shown(id);
    if !policy.is_none() || was_shown {
        let text = shown::text(policy, &networks.preset);
        shared.backend.show_policy(id, &text).await?;
        networks.links.set_shown(id);
    }
    Ok(())
}

async fn open(
    shared: &Arc<Shared>,
    id: SandboxId,
    (owner, policy): (&Owner, &NetworkPolicy),
    rules: Ruleset,
    routes: Routes,
) -> Result<(), BackendError> {
    let networks = &shared.networks;
    let link = networks.links.egress(shared).await?;
    // An egress that outlived the former daemon serves it already, perhaps with an older policy.
    let served = match link.serves(id) {
        true => link.egress.listeners(id).await.ok(),
        false => None,
    };
    let taken = served.is_some();
    let listeners = match served.or_else(|| networks.links.take_handed(id)) {
        Some(listeners) => listeners,
        None => served_kinds(shared.backend.open_network(id, &routes).await?),
    };
    let (owner, policy) = (owner.clone(), policy.clone());
    let open = Open { owner, policy, rules: rules.clone(), routes: routes.clone(), listeners };
    networks.doors().insert(id, Door { open: Some(open) });
    if taken {
        let credentials = credentials(shared, id).await;
        link.egress.set_credentials(id, credentials).await.map_err(refused("pass credentials"))?;
        link.egress.set_policy(id, rules).await.map_err(refused("put a policy in force"))?;
        return shared.backend.change_routes(id, &routes).await;
    }
    networks.links.serve(shared, id).await
}

/// Egress first: a connection that has lost its route would only hang.
async fn replace(
    shared: &Arc<Shared>,
    id: SandboxId,
    policy: &NetworkPolicy,
    rules: Ruleset,
    before: &Routes,
    routes: Routes,
) -> Result<(), BackendError> {
    let networks = &shared.networks;
    if let Some(open) = networks.doors().get_mut(&id).and_then(|door| door.open.as_mut()) {
        (open.policy, open.rules, open.routes) = (policy.clone(), rules.clone(), routes.clone());
    }
    networks.links.set_policy(shared, id, rules).await?;
    if *before != routes {
        shared.backend.change_routes(id, &routes).await?;
    }
    Ok(())
}

async fn close(shared: &Arc<Shared>, id: SandboxId) -> Result<(), BackendError> {
    let door = shared.networks.doors().insert(id, Door::default());
    release(shared, id).await;
    drop(door);
    shared.backend.close_network(id).await
}

/// The sandboxes whose network is open.
fn open_doors(shared: &Shared) -> impl Iterator<Item = SandboxId> + use<> {
    let doors = shared.networks.doors();
    let open: Vec<_> = doors.iter().filter(|(_, door)| door.open.is_some()).map(|(id, _)| *id).collect();
    open.into_iter()
}

/// The secrets of a sandbox whose network is open, with their values.
async fn credentials(shared: &Arc<Shared>, id: SandboxId) -> Vec<Credential> {
    let found = shared
        .networks
        .doors()
        .get(&id)
        .and_then(|door| door.open.as_ref().map(|open| (open.owner.clone(), open.policy.clone())));
    let Some((owner, policy)) = found.filter(|(_, policy)| !policy.inject().is_empty()) else {
        return Vec::new();
    };
    let secrets = Arc::clone(&shared.secrets);
    let reading = tokio::task::spawn_blocking(move || secrets.credentials(&owner, &policy, id));
    // A panic there means no credentials: requests that need them are refused.
    reading.await.unwrap_or_default()
}

/// What the daemon sends to egress about a sandbox.
async fn attachment(
    shared: &Arc<Shared>,
    id: SandboxId,
) -> Result<Option<(Attach, Vec<OwnedFd>)>, EngineError> {
    let names = shared.db.network_names(id).await?;
    let names = names.iter().enumerate().map(|(place, name)| {
        Name::from_wire(name)
            .or_else(|_| Name::parse(&format!("lost-{place}.invalid")))
            .map_err(|_| EngineError::Stopping)
    });
    let names = names.collect::<Result<Vec<_>, _>>()?;
    let credentials = credentials(shared, id).await;
    let settings = &shared.config.network;
    let doors = shared.networks.doors();
    let Some(open) = doors.get(&id).and_then(|door| door.open.as_ref()) else { return Ok(None) };
    let copies: Result<Vec<_>, _> =
        open.listeners.iter().map(|(kind, fd)| Ok::<_, std::io::Error>((*kind, fd.try_clone()?))).collect();
    let copies = copies.map_err(|source| EngineError::Network {
        id,
        source: BackendError::Refused { doing: "copy a sandbox's listeners".into(), source },
    })?;
    let (kinds, descriptors) = copies.into_iter().unzip();
    let attach = Attach {
        sandbox: id,
        listeners: kinds,
        rules: open.rules.clone(),
        names,
        limits: settings.limits,
        owner: Some(OwnerLimits { owner: owner_number(&open.owner), limits: settings.owner_limits }),
        credentials,
    };
    Ok(Some((attach, descriptors)))
}

/// A number for an owner, the same in every daemon.
fn owner_number(owner: &Owner) -> u64 {
    let digest = crate::model::check::digest(&owner.as_str());
    u64::from_be_bytes(digest[..8].try_into().expect("a digest has more than eight bytes"))
}

/// The listeners that egress serves.
fn served_kinds(listeners: runtime::Listeners) -> Vec<(Served, OwnedFd)> {
    listeners
        .into_iter()
        .map(|(listener, socket)| match listener {
            Listener::TcpV4 | Listener::TcpV6 => (Served::Tcp, socket),
            Listener::DnsV4 | Listener::DnsV6 => (Served::Udp, socket),
        })
        .collect()
}

/// Turns an error of egress into one of the backend, which is what drivers record.
fn refused<E: std::error::Error>(doing: &'static str) -> impl FnOnce(E) -> BackendError {
    move |error| BackendError::Refused { doing: doing.into(), source: std::io::Error::other(chain(&error)) }
}

impl Networks {
    /// The table of closed addresses, as far as the daemon knows it, for explanations.
    fn addresses(&self, shared: &Shared) -> Addresses {
        shared.config.network.egress.addresses.clone()
    }
}
