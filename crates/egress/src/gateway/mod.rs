//! The gateway of one sandbox: its listeners, its policy, its names, its open connections.
//!
//! [`Gateway`] accepts connections and answers questions; `serve` handles one connection from its first bytes to its
//! end. A connection is registered before anything is decided about it, so that a change of policy misses none.

mod serve;
mod sniff;
mod terminate;

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener as StdTcpListener, UdpSocket as StdUdpSocket};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;
use wire::SandboxId;

use crate::ca::Ca;
use crate::control::{Attach, Event, LISTENERS_MAX, Listener, Totals, What};
use crate::credential::{Credential, Vault};
use crate::dial::Dialer;
use crate::dns::{self, Budget, Names, NoPlace, Pool, Transport, Zone};
use crate::limits::{Bucket, Limits};
use crate::outbox::Outbox;
use crate::policy::{Destination, Name, Policy, Protocol, Query, Ruleset};
use crate::relay::Share;

pub use sniff::{Kind, sniff};
pub use terminate::Hosts;

/// Concurrent DNS questions of one sandbox. More are dropped; resolvers retry.
const QUESTIONS_MAX: usize = 128;
/// How many events of one sandbox are recorded individually per second.
const EVENTS_PER_SECOND: u64 = 50;
/// The largest burst of events.
const EVENTS_BURST: u64 = 500;
/// How long to wait after a failed accept, for example when out of descriptors, before retrying.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// What all sandboxes share.
#[derive(Debug)]
pub struct Shared {
    /// Opens connections.
    pub dialer: Dialer,
    /// Signs refusals.
    pub ca: Ca,
    /// Where synthetic addresses lie.
    pub pool: Pool,
    /// Records that the daemon must store.
    pub outbox: Arc<Outbox>,
    /// Limits that the sandboxes of an owner share.
    pub owners: Mutex<HashMap<u64, Arc<Usage>>>,
    /// How hosts are verified whose requests are read.
    pub hosts: Hosts,
}

/// What a sandbox or an owner uses, and its limits.
#[derive(Debug)]
pub struct Usage {
    share: Arc<Share>,
    limits: RwLock<Limits>,
    open: AtomicU64,
    rate: Mutex<Bucket>,
}

impl Usage {
    /// Nothing used yet.
    pub fn new(limits: Limits) -> Self {
        let usage = Self {
            share: Arc::default(),
            limits: RwLock::new(limits),
            open: AtomicU64::new(0),
            rate: Mutex::new(bucket(limits)),
        };
        usage.set(limits);
        usage
    }

    /// Replaces the limits.
    pub fn set(&self, limits: Limits) {
        self.share.limit(limits.bytes_per_second, limits.bytes_max);
        *self.rate.lock().expect("nobody panics while holding it") = bucket(limits);
        *self.limits.write().expect("nobody panics while holding it") = limits;
    }

    /// Takes a place for one more connection, or returns which limit is reached.
    fn enter(&self) -> Result<(), &'static str> {
        let limits = *self.limits.read().expect("nobody panics while holding it");
        if self.share.is_used_up() {
            return Err("the limit on bytes is reached");
        }
        let open = self.open.fetch_add(1, Ordering::Relaxed);
        let refused = if limits.connections_max > 0 && open >= u64::from(limits.connections_max) {
            Some("the limit on open connections is reached")
        } else if limits.connections_per_second > 0
            && !self.rate.lock().expect("nobody panics while holding it").take(1, Instant::now())
        {
            Some("the limit on new connections per second is reached")
        } else {
            None
        };
        match refused {
            Some(why) => {
                self.leave();
                Err(why)
            }
            None => Ok(()),
        }
    }

    fn leave(&self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

fn bucket(limits: Limits) -> Bucket {
    let rate = u64::from(limits.connections_per_second);
    Bucket::new(rate, 2 * rate, Instant::now())
}

/// The destination of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
enum To {
    Name(Name),
    Address(std::net::IpAddr),
}

impl To {
    fn destination(&self) -> Destination<'_> {
        match self {
            Self::Name(name) => Destination::Name(name),
            Self::Address(address) => Destination::Address(*address),
        }
    }
}

/// A connection with its decision.
#[derive(Debug, Clone)]
struct Decided {
    to: To,
    port: u16,
    protocol: Protocol,
    address: Option<SocketAddr>,
}

/// Ends a connection from outside.
#[derive(Debug)]
struct Cut(watch::Sender<bool>);

impl Default for Cut {
    fn default() -> Self {
        Self(watch::Sender::new(false))
    }
}

impl Cut {
    fn cut(&self) {
        self.0.send_replace(true);
    }

    /// Waits until the connection is cut.
    async fn wait(&self) {
        // The sender lives in `self`.
        let _ = self.0.subscribe().wait_for(|cut| *cut).await;
    }
}

#[derive(Debug)]
struct Connection {
    cut: Arc<Cut>,
    decided: Option<Decided>,
}

#[derive(Debug, Default)]
struct Counts {
    connections: AtomicU64,
    refused: AtomicU64,
    unrecorded: AtomicU64,
}

/// One sandbox.
#[derive(Debug)]
pub struct Gateway {
    sandbox: SandboxId,
    shared: Arc<Shared>,
    policy: RwLock<Arc<Policy>>,
    vault: RwLock<Arc<Vault>>,
    names: Mutex<Names>,
    /// A name whose place may be stored already: the name must keep that place.
    unstored: tokio::sync::Mutex<Option<Name>>,
    budget: Mutex<Budget>,
    usage: Arc<Usage>,
    owner: Option<Arc<Usage>>,
    counts: Counts,
    events: Mutex<Bucket>,
    next_connection: AtomicU64,
    connections: Mutex<HashMap<u64, Connection>>,
    /// How many connections and questions are in progress.
    live: watch::Sender<usize>,
    questions: Arc<Semaphore>,
    /// Ends questions that are in progress.
    leaving: Cut,
    listening: Mutex<Listening>,
}

#[derive(Debug, Default)]
struct Listening {
    closed: bool,
    /// Copies to pass on.
    descriptors: Vec<(Listener, OwnedFd)>,
    tasks: Vec<JoinHandle<()>>,
}

/// Why a sandbox cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The number of descriptors differs from the announced one.
    #[error("{announced} listeners were announced and {came} descriptors came")]
    Count {
        /// In the message.
        announced: usize,
        /// With the packet.
        came: usize,
    },
    /// A listener cannot be used.
    #[error("cannot use a listener")]
    Listener(#[from] io::Error),
}

impl Gateway {
    /// Starts to serve a sandbox.
    pub fn attach(
        shared: Arc<Shared>,
        attach: Attach,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Arc<Self>, AttachError> {
        let (announced, came) = (attach.listeners.len(), descriptors.len());
        if announced != came || came > LISTENERS_MAX {
            return Err(AttachError::Count { announced, came });
        }
        let owner = attach.owner.map(|owner| {
            let mut owners = shared.owners.lock().expect("nobody panics while holding it");
            let usage =
                owners.entry(owner.owner).or_insert_with(|| Arc::new(Usage::new(owner.limits))).clone();
            usage.set(owner.limits);
            usage
        });
        let gateway = Arc::new(Self {
            sandbox: attach.sandbox,
            shared,
            policy: RwLock::new(Arc::new(Policy::new(attach.rules))),
            vault: RwLock::new(Arc::new(Vault::new(attach.credentials))),
            names: Mutex::new(Names::from_list(attach.names)),
            unstored: tokio::sync::Mutex::default(),
            budget: Mutex::default(),
            usage: Arc::new(Usage::new(attach.limits)),
            owner,
            counts: Counts::default(),
            events: Mutex::new(Bucket::new(EVENTS_PER_SECOND, EVENTS_BURST, Instant::now())),
            next_connection: AtomicU64::new(0),
            connections: Mutex::default(),
            live: watch::Sender::new(0),
            questions: Arc::new(Semaphore::new(QUESTIONS_MAX)),
            leaving: Cut::default(),
            listening: Mutex::default(),
        });
        for (kind, descriptor) in attach.listeners.into_iter().zip(descriptors) {
            gateway.listen(kind, descriptor)?;
        }
        Ok(gateway)
    }

    fn listen(self: &Arc<Self>, kind: Listener, descriptor: OwnedFd) -> io::Result<()> {
        rustix::io::ioctl_fionbio(&descriptor, true)?;
        let copy = descriptor.try_clone()?;
        let gateway = self.clone();
        let task = match kind {
            Listener::Tcp => {
                let listener = TcpListener::from_std(StdTcpListener::from(descriptor))?;
                tokio::spawn(async move { gateway.accept(listener).await })
            }
            Listener::Udp => {
                let socket = Arc::new(UdpSocket::from_std(StdUdpSocket::from(descriptor))?);
                tokio::spawn(async move { gateway.answer_packets(socket).await })
            }
        };
        let mut listening = self.listening.lock().expect("nobody panics while holding it");
        listening.descriptors.push((kind, copy));
        listening.tasks.push(task);
        Ok(())
    }

    /// Copies of the listeners, for the egress that serves the sandbox next.
    pub fn listeners(&self) -> io::Result<Vec<(Listener, OwnedFd)>> {
        let listening = self.listening.lock().expect("nobody panics while holding it");
        listening.descriptors.iter().map(|(kind, descriptor)| Ok((*kind, descriptor.try_clone()?))).collect()
    }

    async fn accept(self: Arc<Self>, listener: TcpListener) {
        loop {
            match listener.accept().await {
                Ok((client, _)) => self.clone().spawn(client),
                Err(error) => {
                    tracing::debug!(sandbox = %self.sandbox, %error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    /// Registers a connection and serves it in a new task.
    fn spawn(self: Arc<Self>, client: TcpStream) {
        let (id, cut) = (self.next_connection.fetch_add(1, Ordering::Relaxed), Arc::new(Cut::default()));
        self.live.send_modify(|live| *live += 1);
        let connection = Connection { cut: cut.clone(), decided: None };
        self.connections.lock().expect("nobody panics while holding it").insert(id, connection);
        // Checked after the registration: `close` first closes the gateway and then looks at the registered
        // connections.
        if self.listening.lock().expect("nobody panics while holding it").closed {
            cut.cut();
        }
        tokio::spawn(async move {
            // Boxed, since the state of a connection whose first bytes are read is large, and that of a long one is
            // small.
            Box::pin(serve::serve(&self, client, id, &cut)).await;
            self.connections.lock().expect("nobody panics while holding it").remove(&id);
            self.live.send_modify(|live| *live -= 1);
        });
    }

    async fn answer_packets(self: Arc<Self>, socket: Arc<UdpSocket>) {
        let mut packet = vec![0; dns::QUESTION_BYTES_MAX];
        loop {
            let (length, from) = match socket.recv_from(&mut packet).await {
                Ok(received) => received,
                Err(error) => {
                    tracing::debug!(sandbox = %self.sandbox, %error, "cannot receive a question");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Ok(place) = self.questions.clone().try_acquire_owned() else { continue };
            let (gateway, socket, question) = (self.clone(), socket.clone(), packet[..length].to_vec());
            self.live.send_modify(|live| *live += 1);
            tokio::spawn(async move {
                let answer = tokio::select! {
                    answer = gateway.answer(&question, Transport::Udp) => answer,
                    () = gateway.leaving.wait() => None,
                };
                if let Some(answer) = answer
                    && let Err(error) = socket.send_to(&answer, from).await
                {
                    tracing::debug!(sandbox = %gateway.sandbox, %error, "cannot answer a question");
                }
                drop((place, socket));
                gateway.live.send_modify(|live| *live -= 1);
            });
        }
    }

    /// Answers one DNS question, and records a refusal.
    async fn answer(&self, question: &[u8], transport: Transport) -> Option<Vec<u8>> {
        let (answer, asked) = dns::answer(question, transport, self, &self.shared.dialer.resolver).await;
        if let Some(asked) = asked
            && matches!(asked.outcome, dns::Outcome::Refused | dns::Outcome::OverBudget)
        {
            self.counts.refused.fetch_add(1, Ordering::Relaxed);
            let policy = self.policy();
            let mut event = self.event(What::NameRefused);
            event.rule = asked.verdict.map_or_else(String::new, |verdict| verdict.rule_text(&policy));
            event.why = (asked.outcome == dns::Outcome::OverBudget)
                .then(|| "too many different names below one registered name".to_owned());
            event.opens = (asked.outcome == dns::Outcome::Refused).then(|| asked.name.to_string());
            event.name = Some(asked.name);
            self.record(event);
        }
        answer
    }

    /// Replaces the policy, and cuts connections that have lost their rule.
    pub fn set_policy(&self, rules: Ruleset) {
        let policy = Arc::new(Policy::new(rules));
        *self.policy.write().expect("nobody panics while holding it") = policy.clone();
        let connections = self.connections.lock().expect("nobody panics while holding it");
        for connection in connections.values() {
            if connection.decided.as_ref().is_some_and(|decided| !self.still_allows(&policy, decided)) {
                connection.cut.cut();
            }
        }
    }

    /// Replaces the credentials. Requests on open connections get the new ones. A connection to a host that has just become
    /// one with credentials passes unread until it ends; it is cut, so that the next one is read.
    pub fn set_credentials(&self, credentials: Vec<Credential>) {
        let vault = Arc::new(Vault::new(credentials));
        let before = {
            let mut now = self.vault.write().expect("nobody panics while holding it");
            std::mem::replace(&mut *now, Arc::clone(&vault))
        };
        let connections = self.connections.lock().expect("nobody panics while holding it");
        for connection in connections.values() {
            if let Some(Decided { to: To::Name(name), port, protocol: Protocol::Tls, .. }) =
                &connection.decided
                && vault.covers(name, *port)
                && !before.covers(name, *port)
            {
                connection.cut.cut();
            }
        }
    }

    /// The credentials as they are now.
    fn vault(&self) -> Arc<Vault> {
        self.vault.read().expect("nobody panics while holding it").clone()
    }

    /// Whether a policy still allows a connection that was decided under another.
    fn still_allows(&self, policy: &Policy, decided: &Decided) -> bool {
        let verdict = policy.decide(Query {
            to: decided.to.destination(),
            port: decided.port,
            protocol: decided.protocol,
        });
        let table = self.shared.dialer.addresses();
        verdict.allows()
            && decided
                .address
                .is_none_or(|address| policy.may_dial(address.ip(), decided.port, &verdict, &table).is_ok())
    }

    /// Replaces the limits.
    pub fn set_limits(&self, limits: Limits) {
        self.usage.set(limits);
    }

    /// Stops accepting; open connections stay.
    pub fn close(&self) {
        let (tasks, descriptors) = {
            let mut listening = self.listening.lock().expect("nobody panics while holding it");
            listening.closed = true;
            (std::mem::take(&mut listening.tasks), std::mem::take(&mut listening.descriptors))
        };
        drop(descriptors);
        for task in tasks {
            task.abort();
        }
    }

    /// Cuts every connection.
    pub fn cut_all(&self) {
        for connection in self.connections.lock().expect("nobody panics while holding it").values() {
            connection.cut.cut();
        }
    }

    /// Stops accepting, cuts everything, and returns when egress holds no descriptor of the sandbox's namespace.
    pub async fn detach(&self) -> Totals {
        let tasks = {
            let mut listening = self.listening.lock().expect("nobody panics while holding it");
            listening.closed = true;
            listening.descriptors.clear();
            std::mem::take(&mut listening.tasks)
        };
        for task in &tasks {
            task.abort();
        }
        for task in tasks {
            // The task was aborted; its listener is closed once the task has ended.
            let _ = task.await;
        }
        self.leaving.cut();
        self.cut_all();
        self.idle().await;
        self.totals()
    }

    /// Waits until nothing is in progress.
    pub async fn idle(&self) {
        let mut live = self.live.subscribe();
        // The sender lives in `self`.
        let _ = live.wait_for(|live| *live == 0).await;
    }

    /// The number of connections and questions in progress.
    pub fn live(&self) -> usize {
        *self.live.borrow()
    }

    /// What the sandbox has used.
    pub fn totals(&self) -> Totals {
        Totals {
            sandbox: self.sandbox,
            sent: self.usage.share.sent.load(Ordering::Relaxed),
            received: self.usage.share.received.load(Ordering::Relaxed),
            connections: self.counts.connections.load(Ordering::Relaxed),
            refused: self.counts.refused.load(Ordering::Relaxed),
            unrecorded: self.counts.unrecorded.load(Ordering::Relaxed),
        }
    }

    fn event(&self, what: What) -> Event {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Event {
            sandbox: self.sandbox,
            at_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
            what,
            name: None,
            address: None,
            port: None,
            protocol: None,
            rule: String::new(),
            why: None,
            opens: None,
            sent: 0,
            received: 0,
        }
    }

    /// Records an event; if there are too many, only counts it.
    fn record(&self, event: Event) {
        if self.events.lock().expect("nobody panics while holding it").take(1, Instant::now()) {
            self.shared.outbox.event(event);
        } else {
            self.counts.unrecorded.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Zone for Gateway {
    fn pool(&self) -> Pool {
        self.shared.pool
    }

    fn policy(&self) -> Arc<Policy> {
        self.policy.read().expect("nobody panics while holding it").clone()
    }

    fn place(&self, name: &Name) -> Option<u32> {
        self.names.lock().expect("nobody panics while holding it").place(name)
    }

    fn name_at(&self, place: u32) -> Option<Name> {
        self.names.lock().expect("nobody panics while holding it").at(place).cloned()
    }

    fn within_budget(&self, name: &Name) -> bool {
        self.budget.lock().expect("nobody panics while holding it").allows(name, Instant::now())
    }

    async fn assign(&self, name: &Name) -> Result<u32, NoPlace> {
        // One at a time, so that places are stored in order.
        let mut unstored = self.unstored.lock().await;
        if let Some(earlier) = unstored.clone() {
            self.store(&earlier).await?;
            *unstored = None;
        }
        if let Some(place) = self.place(name) {
            return Ok(place);
        }
        *unstored = Some(name.clone());
        let place = self.store(name).await?;
        *unstored = None;
        Ok(place)
    }
}

impl Gateway {
    async fn store(&self, name: &Name) -> Result<u32, NoPlace> {
        let place = self.names.lock().expect("nobody panics while holding it").list().len();
        let place = u32::try_from(place)
            .ok()
            .filter(|place| (*place as usize) < dns::NAMES_MAX)
            .ok_or(NoPlace::Full)?;
        self.shared.outbox.store_name(self.sandbox, place, name.clone()).await.map_err(|error| {
            tracing::warn!(sandbox = %self.sandbox, %name, %error, "cannot store a name");
            NoPlace::NotStored
        })?;
        self.names.lock().expect("nobody panics while holding it").add(name.clone()).ok_or(NoPlace::Full)
    }
}
