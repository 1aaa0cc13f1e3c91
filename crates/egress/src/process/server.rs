//! The state of a running egress: the sandboxes it serves, and its connection to the daemon.
//!
//! There is one daemon at a time: the one that sent the latest hello. Without a daemon, sandboxes are served as before.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram as StdUnixDatagram;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::net::sockopt::socket_peercred;
use rustix::net::{SocketFlags, accept_with};
use tokio::io::Interest;
use tokio::net::UnixDatagram;
use tokio::sync::watch;
use tokio::time::{interval, timeout};
use wire::SandboxId;

use crate::control::{
    Answer, Ask, Attach, Channel, Failure, FromEgress, Request, Status, Totals, VERSION, from_bytes, to_bytes,
};
use crate::dial::{Changes, own_addresses};
use crate::gateway::{Gateway, Shared};

/// How often totals that have changed are recorded.
const TOTALS_EVERY: Duration = Duration::from_secs(10);
/// How long connections may take to end after they were cut.
const CUT_DEADLINE: Duration = Duration::from_secs(5);
/// How long to wait before reading the machine's addresses again after an error.
const OWN_ADDRESSES_RETRY: Duration = Duration::from_secs(10);
/// Concurrent requests of one daemon.
const REQUESTS_MAX: usize = 64;

/// A running egress.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    gateways: Mutex<HashMap<SandboxId, Arc<Gateway>>>,
    /// Increases with every daemon that connects; the connections of earlier ones are closed.
    daemon: watch::Sender<u64>,
    /// Set when everything has ended.
    done: watch::Sender<bool>,
    /// The totals that were recorded last.
    recorded: Mutex<HashMap<SandboxId, Totals>>,
}

fn failure(error: impl std::error::Error) -> Failure {
    let mut what = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        what = format!("{what}: {source}");
        cause = source.source();
    }
    Failure { what }
}

impl Server {
    /// Nothing attached yet.
    pub fn new(shared: Arc<Shared>) -> Arc<Self> {
        Arc::new(Self {
            shared,
            gateways: Mutex::default(),
            daemon: watch::Sender::new(0),
            done: watch::Sender::new(false),
            recorded: Mutex::default(),
        })
    }

    /// Waits until egress has been drained.
    pub async fn done(&self) {
        // The sender lives in `self`.
        let _ = self.done.subscribe().wait_for(|done| *done).await;
    }

    /// Accepts daemons on a listening socket: only root, and the user that the daemon runs as.
    pub async fn listen(self: Arc<Self>, listener: OwnedFd, daemon_uid: u32) -> io::Result<()> {
        let listener = UnixDatagram::from_std(StdUnixDatagram::from(listener))?;
        loop {
            listener.readable().await?;
            let accepted = listener.try_io(Interest::READABLE, || {
                accept_with(&listener, SocketFlags::CLOEXEC).map_err(io::Error::from)
            });
            let socket = match accepted {
                Ok(socket) => socket,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a daemon");
                    continue;
                }
            };
            match socket_peercred(&socket) {
                Ok(peer) if peer.uid.is_root() || peer.uid.as_raw() == daemon_uid => {}
                Ok(peer) => {
                    tracing::warn!(uid = peer.uid.as_raw(), "a stranger tried to control egress");
                    continue;
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot tell who tried to control egress");
                    continue;
                }
            }
            match Channel::new(socket) {
                Ok(channel) => drop(tokio::spawn(self.clone().serve(Arc::new(channel)))),
                Err(error) => tracing::warn!(%error, "cannot talk to a daemon"),
            }
        }
    }

    /// Serves one daemon until it disconnects or another connects.
    pub async fn serve(self: Arc<Self>, channel: Arc<Channel>) {
        let mut generation = None;
        let mut current = self.daemon.subscribe();
        let places = Arc::new(tokio::sync::Semaphore::new(REQUESTS_MAX));
        let mut pump: Option<tokio::task::JoinHandle<()>> = None;
        loop {
            let received = tokio::select! {
                received = channel.receive() => received,
                // Another daemon has sent its hello.
                _ = current.wait_for(|now| generation.is_some_and(|mine| *now != mine)) => break,
            };
            let (message, descriptors) = match received {
                Ok(Some(received)) => received,
                Ok(None) => break,
                Err(error) => {
                    tracing::warn!(%error, "cannot read from the daemon");
                    break;
                }
            };
            let Some(Request { serial, ask }) = from_bytes(&message) else {
                let what =
                    "the request does not parse: daemon and egress may be of different versions".to_owned();
                tracing::warn!("{what}");
                // The serial is the first field and never moves.
                let Some(serial) = serial_of(&message) else { break };
                answer(&channel, serial, Err(Failure { what }), &[]).await;
                continue;
            };
            match ask {
                Ask::Hello { version } => {
                    let attached = self.gateways().keys().copied().collect();
                    answer(&channel, serial, Ok(Answer::Hello { version: VERSION, attached }), &[]).await;
                    self.daemon.send_modify(|count| *count += 1);
                    generation = Some(*self.daemon.borrow());
                    if version == VERSION && pump.is_none() {
                        self.shared.outbox.online();
                        pump = Some(tokio::spawn(self.clone().send_records(channel.clone())));
                    }
                }
                Ask::Acknowledge { through } => self.shared.outbox.acknowledge(through),
                ask => {
                    if generation.is_none() {
                        let what = "the first request must be a greeting".to_owned();
                        answer(&channel, serial, Err(Failure { what }), &[]).await;
                        continue;
                    }
                    // The semaphore is closed only with the channel's task; there is no other way to fail.
                    let Ok(place) = places.clone().acquire_owned().await else { break };
                    let (server, channel) = (self.clone(), channel.clone());
                    tokio::spawn(async move {
                        let (result, descriptors) = server.handle(ask, descriptors).await;
                        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
                        answer(&channel, serial, result, &descriptors).await;
                        drop(place);
                    });
                }
            }
        }
        if let Some(pump) = pump {
            pump.abort();
            if generation == Some(*self.daemon.borrow()) {
                self.shared.outbox.offline();
            }
        }
        // The other side may be gone already.
        let _ = rustix::net::shutdown(channel.as_fd(), rustix::net::Shutdown::Both);
    }

    async fn send_records(self: Arc<Self>, channel: Arc<Channel>) {
        let mut after = 0;
        loop {
            let (sequence, record) = self.shared.outbox.next(after).await;
            let message = FromEgress::Record { sequence, record: record.as_ref().clone() };
            if channel.send(&to_bytes(&message), &[]).await.is_err() {
                return;
            }
            after = sequence;
        }
    }

    fn gateways(&self) -> std::sync::MutexGuard<'_, HashMap<SandboxId, Arc<Gateway>>> {
        self.gateways.lock().expect("nobody panics while holding it")
    }

    fn gateway(&self, sandbox: SandboxId) -> Result<Arc<Gateway>, Failure> {
        let what = || Failure { what: format!("sandbox {sandbox} is not attached") };
        self.gateways().get(&sandbox).cloned().ok_or_else(what)
    }

    async fn handle(&self, ask: Ask, descriptors: Vec<OwnedFd>) -> (Result<Answer, Failure>, Vec<OwnedFd>) {
        if let Ask::Listeners { sandbox } = ask {
            let listeners = self.gateway(sandbox).and_then(|gateway| gateway.listeners().map_err(failure));
            return match listeners {
                Ok(listeners) => {
                    let (kinds, descriptors) = listeners.into_iter().unzip();
                    (Ok(Answer::Listeners(kinds)), descriptors)
                }
                Err(error) => (Err(error), Vec::new()),
            };
        }
        let result = match ask {
            Ask::Attach(attach) => self.attach(*attach, descriptors).await.map(|()| Answer::Done),
            Ask::SetPolicy { sandbox, rules } => {
                self.gateway(sandbox).map(|gateway| gateway.set_policy(*rules)).map(|()| Answer::Done)
            }
            Ask::SetLimits { sandbox, limits } => {
                self.gateway(sandbox).map(|gateway| gateway.set_limits(limits)).map(|()| Answer::Done)
            }
            Ask::SetCredentials { sandbox, credentials } => self
                .gateway(sandbox)
                .map(|gateway| gateway.set_credentials(credentials))
                .map(|()| Answer::Done),
            Ask::Detach { sandbox } => Ok(Answer::Detached(self.detach(sandbox).await)),
            Ask::Drain { seconds } => {
                self.drain(Duration::from_secs(seconds.into()));
                Ok(Answer::Done)
            }
            Ask::Status => Ok(Answer::Status(self.status())),
            Ask::Hello { .. } | Ask::Acknowledge { .. } | Ask::Listeners { .. } => {
                Err(Failure { what: "this request is served elsewhere".to_owned() })
            }
        };
        (result, Vec::new())
    }

    async fn attach(&self, attach: Attach, descriptors: Vec<OwnedFd>) -> Result<(), Failure> {
        let sandbox = attach.sandbox;
        let earlier = self.gateways().remove(&sandbox);
        if let Some(earlier) = earlier {
            earlier.detach().await;
        }
        let gateway = Gateway::attach(self.shared.clone(), attach, descriptors).map_err(failure)?;
        let raced = self.gateways().insert(sandbox, gateway);
        if let Some(raced) = raced {
            raced.detach().await;
        }
        Ok(())
    }

    async fn detach(&self, sandbox: SandboxId) -> Totals {
        let gateway = self.gateways().remove(&sandbox);
        self.recorded.lock().expect("nobody panics while holding it").remove(&sandbox);
        match gateway {
            Some(gateway) => gateway.detach().await,
            None => unused(sandbox),
        }
    }

    fn status(&self) -> Status {
        let (waiting_records, spool_bytes, lost_events) = self.shared.outbox.counts();
        let gateways = self.gateways();
        Status {
            sandboxes: gateways.len() as u32,
            connections: gateways.values().map(|gateway| gateway.live() as u32).sum(),
            waiting_records,
            spool_bytes,
            lost_events,
            ca_pem: self.shared.ca.pem().to_owned(),
            totals: gateways.values().map(|gateway| gateway.totals()).collect(),
        }
    }

    /// Stops accepting, and ends when all connections have ended; those left after `patience` are cut.
    fn drain(&self, patience: Duration) {
        let gateways: Vec<_> = self.gateways().values().cloned().collect();
        for gateway in &gateways {
            gateway.close();
        }
        let (outbox, done) = (self.shared.outbox.clone(), self.done.clone());
        tokio::spawn(async move {
            let idle = async {
                for gateway in &gateways {
                    gateway.idle().await;
                }
            };
            if timeout(patience, idle).await.is_err() {
                for gateway in &gateways {
                    gateway.cut_all();
                }
                for gateway in &gateways {
                    // Connections that have not ended by then end with the process.
                    let _ = timeout(CUT_DEADLINE, gateway.idle()).await;
                }
            }
            for gateway in &gateways {
                outbox.totals(gateway.totals());
            }
            done.send_replace(true);
        });
    }

    /// Ends everything at once, for example when the system shuts down.
    pub fn stop(&self) {
        self.drain(Duration::ZERO);
    }

    /// Records totals that have changed, for as long as egress runs.
    pub async fn record_totals(self: Arc<Self>) {
        let mut ticks = interval(TOTALS_EVERY);
        loop {
            ticks.tick().await;
            let totals: Vec<Totals> = self.gateways().values().map(|gateway| gateway.totals()).collect();
            let mut recorded = self.recorded.lock().expect("nobody panics while holding it");
            for totals in totals {
                let before =
                    recorded.insert(totals.sandbox, totals).unwrap_or_else(|| unused(totals.sandbox));
                if before != totals {
                    self.shared.outbox.totals(totals);
                }
            }
        }
    }

    /// Reads the machine's own addresses again whenever they change.
    pub async fn follow_own_addresses(self: Arc<Self>) {
        loop {
            let follow = async {
                let changes = Changes::listen()?;
                loop {
                    // After starting to listen, so that no change is missed.
                    self.shared.dialer.set_own(own_addresses()?);
                    changes.next().await?;
                }
            };
            let ended: io::Result<()> = follow.await;
            if let Err(error) = ended {
                tracing::warn!(%error, "cannot follow the addresses of this machine");
            }
            tokio::time::sleep(OWN_ADDRESSES_RETRY).await;
        }
    }
}

/// The totals of a sandbox that has used nothing.
fn unused(sandbox: SandboxId) -> Totals {
    Totals { sandbox, sent: 0, received: 0, connections: 0, refused: 0, unrecorded: 0 }
}

/// The serial of a request of any version.
fn serial_of(message: &[u8]) -> Option<u64> {
    postcard::take_from_bytes::<u64>(message).ok().map(|(serial, _)| serial)
}

async fn answer(
    channel: &Channel,
    serial: u64,
    result: Result<Answer, Failure>,
    descriptors: &[std::os::fd::BorrowedFd<'_>],
) {
    let message = to_bytes(&FromEgress::Answer { serial, result });
    if let Err(error) = channel.send(&message, descriptors).await {
        tracing::debug!(%error, "the daemon is gone before its answer");
    }
}
