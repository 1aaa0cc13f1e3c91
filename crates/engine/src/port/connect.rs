//! Connections into sandboxes, counted and limited.
//!
//! A socket costs a process of the launcher, so several are made at once and the others are kept for a while. A kept
//! socket belongs to the network namespace that the sandbox had when it was made: if it finds nothing, a new one is tried.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use runtime::BackendError;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{Instant, timeout};
use wire::SandboxId;
use wire::network::{Family, SOCKETS_MAX};

use crate::Engine;
use crate::error::EngineError;
use crate::guest::{Guest, Use};
use crate::model::port::Port;
use crate::model::{Owner, Resume};

/// The most connections to the ports of one sandbox at once. Each costs the daemon two descriptors.
pub const CONNECTIONS_PER_SANDBOX_MAX: usize = 1536;
/// As above, for all sandboxes of one owner.
pub const CONNECTIONS_PER_OWNER_MAX: usize = 4096;
/// How long a server may take to accept: longer than the kernel needs to repeat a lost attempt twice.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);
/// How long sockets of a sandbox are kept after its last connection. They keep its network namespace alive.
const SPARE_TIME: Duration = Duration::from_secs(10);
/// More sockets are made when fewer than this are left.
const SPARES_LOW: usize = 3;

/// The connections to the ports of all sandboxes.
#[derive(Default)]
pub(crate) struct Ports {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    sandboxes: HashMap<SandboxId, Entry>,
    owners: HashMap<Owner, usize>,
}

/// A sandbox that has connections or kept sockets.
struct Entry {
    open: usize,
    spares: Vec<OwnedFd>,
    /// Whether a task is making more sockets.
    filling: bool,
    /// Whether a task waits to drop the kept sockets.
    tidied: bool,
    used: Instant,
}

impl Ports {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a connection, or rejects it.
    fn enter(self: &Arc<Self>, owner: &Owner, sandbox: SandboxId) -> Result<Place, EngineError> {
        let mut state = self.lock();
        let of_owner = state.owners.get(owner).copied().unwrap_or(0);
        let of_sandbox = state.sandboxes.get(&sandbox).map_or(0, |entry| entry.open);
        let over = |whose, limit| EngineError::PortConnections { whose, limit };
        if of_sandbox >= CONNECTIONS_PER_SANDBOX_MAX {
            return Err(over("sandbox", CONNECTIONS_PER_SANDBOX_MAX));
        }
        if of_owner >= CONNECTIONS_PER_OWNER_MAX {
            return Err(over("owner", CONNECTIONS_PER_OWNER_MAX));
        }
        *state.owners.entry(owner.clone()).or_default() += 1;
        let entry = state.sandboxes.entry(sandbox).or_insert_with(Entry::new);
        entry.open += 1;
        entry.used = Instant::now();
        Ok(Place { ports: Arc::clone(self), owner: owner.clone(), sandbox })
    }

    /// A kept socket, and whether more should be made.
    fn take(&self, sandbox: SandboxId) -> (Option<OwnedFd>, bool) {
        let mut state = self.lock();
        let Some(entry) = state.sandboxes.get_mut(&sandbox) else { return (None, false) };
        let taken = entry.spares.pop();
        let low = taken.is_some() && entry.spares.len() < SPARES_LOW && !entry.filling;
        entry.filling |= low;
        (taken, low)
    }

    /// Keeps sockets, while the sandbox has a connection. Returns whether a task must be started that drops them.
    fn keep(&self, sandbox: SandboxId, sockets: Vec<OwnedFd>) -> bool {
        let mut state = self.lock();
        let Some(entry) = state.sandboxes.get_mut(&sandbox) else { return false };
        entry.filling = false;
        let room = usize::from(SOCKETS_MAX).saturating_sub(entry.spares.len());
        entry.spares.extend(sockets.into_iter().take(room));
        !entry.spares.is_empty() && !std::mem::replace(&mut entry.tidied, true)
    }

    /// Drops the sockets that are kept for a sandbox whose processes end, so that its network namespace can go.
    pub fn forget(&self, sandbox: SandboxId) {
        let mut state = self.lock();
        if let Some(entry) = state.sandboxes.get_mut(&sandbox) {
            entry.spares.clear();
            if entry.open == 0 {
                state.sandboxes.remove(&sandbox);
            }
        }
    }

    /// Drops kept sockets that were not used for a while.
    async fn tidy(self: Arc<Self>, sandbox: SandboxId) {
        loop {
            let used = {
                let mut state = self.lock();
                let Some(entry) = state.sandboxes.get_mut(&sandbox) else { return };
                if entry.used.elapsed() >= SPARE_TIME || entry.spares.is_empty() {
                    entry.spares.clear();
                    entry.tidied = false;
                    if entry.open == 0 {
                        state.sandboxes.remove(&sandbox);
                    }
                    return;
                }
                entry.used
            };
            tokio::time::sleep_until(used + SPARE_TIME).await;
        }
    }

    /// The open connections to a sandbox's ports.
    fn open(&self, sandbox: SandboxId) -> usize {
        self.lock().sandboxes.get(&sandbox).map_or(0, |entry| entry.open)
    }
}

impl Entry {
    fn new() -> Self {
        Self { open: 0, spares: Vec::new(), filling: false, tidied: false, used: Instant::now() }
    }
}

/// A counted connection.
struct Place {
    ports: Arc<Ports>,
    owner: Owner,
    sandbox: SandboxId,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.ports.lock();
        if let Some(open) = state.owners.get_mut(&self.owner) {
            *open -= 1;
            if *open == 0 {
                state.owners.remove(&self.owner);
            }
        }
        if let Some(entry) = state.sandboxes.get_mut(&self.sandbox) {
            entry.open -= 1;
            entry.used = Instant::now();
            if entry.open == 0 && entry.spares.is_empty() && !entry.filling {
                state.sandboxes.remove(&self.sandbox);
            }
        }
    }
}

/// A connection to a port of a sandbox. While it is open it counts as a use of the sandbox.
pub struct PortStream {
    stream: TcpStream,
    _place: Place,
    _using: Use,
}

impl AsyncRead for PortStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for PortStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

impl Engine {
    /// Connects to a port of a sandbox, on 127.0.0.1 or else on ::1.
    pub async fn connect_port(
        &self,
        owner: &Owner,
        id: SandboxId,
        port: Port,
    ) -> Result<PortStream, EngineError> {
        let live = self.live(owner, id)?;
        // A request to a port of a paused sandbox resumes it.
        let using = live.guest.enter(Resume::Auto).await?;
        if !live.state().takes_commands() {
            return Err(live.wrong_state());
        }
        let place = self.shared().ports.enter(owner, id)?;
        let stream = dial(&self.shared().ports, &live.guest, port.number()).await?;
        // Both ends decide themselves when to send.
        stream.set_nodelay(true).map_err(|source| EngineError::PortConnect {
            id,
            port: port.number(),
            source,
        })?;
        Ok(PortStream { stream, _place: place, _using: using })
    }

    /// How many connections to a sandbox's ports are open.
    pub fn port_connections(&self, owner: &Owner, id: SandboxId) -> Result<usize, EngineError> {
        Ok(self.shared().ports.open(self.live(owner, id)?.id))
    }
}

/// Why a socket was not connected.
enum Unconnected {
    Refused,
    Late,
    Failed(io::Error),
}

async fn dial(ports: &Arc<Ports>, guest: &Arc<Guest>, port: u16) -> Result<TcpStream, EngineError> {
    let id = guest.id;
    let (spare, low) = ports.take(id);
    if low {
        let (ports, guest) = (Arc::clone(ports), Arc::clone(guest));
        guest.runtime.clone().spawn(async move {
            let made = guest.backend.sockets(guest.id, Family::V4, SOCKETS_MAX).await;
            // The next connection that finds no kept socket reports the error.
            keep(&ports, &guest, made.unwrap_or_default());
        });
    }
    let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    if let Some(spare) = spare
        && let Ok(stream) = connect(spare, loopback).await
    {
        return Ok(stream);
    }
    let failed = |why| match why {
        Unconnected::Refused => EngineError::PortClosed { id, port },
        Unconnected::Late => EngineError::PortStuck { id, port },
        Unconnected::Failed(source) => EngineError::PortConnect { id, port, source },
    };
    let mut made = sockets(guest, Family::V4, SOCKETS_MAX).await?;
    let socket = made.pop();
    keep(ports, guest, made);
    if let Some(socket) = socket {
        match connect(socket, loopback).await {
            Ok(stream) => return Ok(stream),
            Err(Unconnected::Refused) => {}
            Err(why) => return Err(failed(why)),
        }
    }
    let made = match guest.backend.sockets(id, Family::V6, 1).await {
        Ok(made) => made,
        // This machine has no IPv6, so nothing listens there.
        Err(BackendError::Network { .. }) => Vec::new(),
        Err(source) => return Err(unmade(guest, source)),
    };
    let Some(socket) = made.into_iter().next() else { return Err(failed(Unconnected::Refused)) };
    let loopback = SocketAddr::from((Ipv6Addr::LOCALHOST, port));
    connect(socket, loopback).await.map_err(failed)
}

async fn sockets(guest: &Guest, family: Family, count: u8) -> Result<Vec<OwnedFd>, EngineError> {
    guest.backend.sockets(guest.id, family, count).await.map_err(|source| unmade(guest, source))
}

fn unmade(guest: &Guest, source: BackendError) -> EngineError {
    match source {
        // Its state says that it runs, and its init has just ended.
        BackendError::Gone => guest.unresponsive(),
        source => EngineError::PortSockets { id: guest.id, source },
    }
}

fn keep(ports: &Arc<Ports>, guest: &Guest, made: Vec<OwnedFd>) {
    if ports.keep(guest.id, made) {
        guest.runtime.spawn(Arc::clone(ports).tidy(guest.id));
    }
}

async fn connect(socket: OwnedFd, to: SocketAddr) -> Result<TcpStream, Unconnected> {
    let socket = TcpSocket::from_std_stream(std::net::TcpStream::from(socket));
    match timeout(CONNECT_TIME_MAX, socket.connect(to)).await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => Err(Unconnected::Refused),
        Ok(Err(error)) => Err(Unconnected::Failed(error)),
        Err(_) => Err(Unconnected::Late),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket() -> OwnedFd {
        std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket").into()
    }

    fn owner(name: &str) -> Owner {
        Owner::parse(name).expect("an owner")
    }

    #[test]
    fn a_sandbox_and_an_owner_have_so_many_connections() {
        let ports = Arc::new(Ports::default());
        let id = |number| SandboxId::from_random(number);
        let mut held: Vec<Place> = (0..CONNECTIONS_PER_SANDBOX_MAX)
            .map(|_| ports.enter(&owner("a"), id(1)).expect("there is room"))
            .collect();
        let over = ports.enter(&owner("a"), id(1)).err().expect("the sandbox is full");
        assert!(matches!(over, EngineError::PortConnections { whose: "sandbox", .. }), "{over}");
        for number in 200.. {
            match ports.enter(&owner("a"), id(number / 100)) {
                Ok(place) => held.push(place),
                Err(EngineError::PortConnections { whose: "owner", .. }) => break,
                Err(other) => panic!("{other}"),
            }
        }
        assert_eq!(held.len(), CONNECTIONS_PER_OWNER_MAX);
        ports.enter(&owner("b"), id(9_999)).expect("another owner has its own");
        held.clear();
        let state = ports.lock();
        assert!(state.sandboxes.is_empty() && state.owners.is_empty(), "nothing is left behind");
    }

    #[tokio::test(start_paused = true)]
    async fn kept_sockets_are_dropped_when_nobody_connects_any_more() {
        let ports = Arc::new(Ports::default());
        let id = SandboxId::from_random(1);
        let place = ports.enter(&owner("a"), id).expect("there is room");
        assert!(ports.keep(id, vec![socket(), socket()]));
        let tidying = tokio::spawn(Arc::clone(&ports).tidy(id));
        assert!(ports.take(id).0.is_some());
        drop(place);
        assert_eq!(ports.lock().sandboxes.len(), 1, "the other is kept");
        tidying.await.expect("it ends");
        assert!(ports.lock().sandboxes.is_empty());
        assert!(!ports.keep(id, vec![socket()]), "nothing is kept for a sandbox without connections");
    }

    #[test]
    fn a_sandbox_that_ends_leaves_no_socket() {
        let ports = Arc::new(Ports::default());
        let id = SandboxId::from_random(1);
        let place = ports.enter(&owner("a"), id).expect("there is room");
        ports.keep(id, vec![socket()]);
        ports.forget(id);
        assert!(ports.take(id).0.is_none());
        drop(place);
        assert!(ports.lock().sandboxes.is_empty());
    }
}
