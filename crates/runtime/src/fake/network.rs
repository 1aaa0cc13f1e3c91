//! Networks of fake sandboxes: requests are recorded, and the listeners are real sockets on the machine's loopback, so
//! that a test can pass them on and connect to them.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;

use async_trait::async_trait;
use wire::SandboxId;
use wire::launch::Rootfs;
use wire::network::{Family, Listener, NetworkFault, Routes, SOCKETS_MAX};

use crate::backend::{BackendError, Listeners, ListeningPort, Network};
use crate::fake::faults::FakeStep;
use crate::fake::host::{FakeHost, FakeThing};

/// A request about a sandbox's network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FakeNetworkCall {
    /// To open it.
    Open(Routes),
    /// To change its routes.
    Change(Routes),
    /// To close it.
    Close,
    /// For this many sockets.
    Sockets(Family, u8),
}

/// The networks of all sandboxes.
#[derive(Default)]
pub(super) struct Networks {
    routes: HashMap<SandboxId, Routes>,
    calls: Vec<(SandboxId, FakeNetworkCall)>,
    attempts: HashMap<SandboxId, u64>,
    listening: HashMap<SandboxId, Vec<ListeningPort>>,
    fault: Option<NetworkFault>,
    policies: HashMap<SandboxId, Vec<u8>>,
    trusted: HashMap<SandboxId, String>,
    too_old: HashSet<SandboxId>,
    /// The descriptors of the running egress processes, the latest last.
    egress: Vec<Vec<OwnedFd>>,
}

impl Networks {
    /// A sandbox was removed.
    pub(super) fn forget(&mut self, sandbox: SandboxId) {
        self.routes.remove(&sandbox);
        self.attempts.remove(&sandbox);
        self.listening.remove(&sandbox);
        self.policies.remove(&sandbox);
        self.trusted.remove(&sandbox);
        self.too_old.remove(&sandbox);
    }
}

impl FakeHost {
    /// The routes that a sandbox has now. `None` while its network is closed.
    pub fn routes(&self, sandbox: SandboxId) -> Option<Routes> {
        self.state().networks.routes.get(&sandbox).cloned()
    }

    /// Every request about networks that succeeded, in order.
    pub fn network_calls(&self) -> Vec<(SandboxId, FakeNetworkCall)> {
        self.state().networks.calls.clone()
    }

    /// Sets how often a sandbox has tried to reach a network.
    pub fn set_attempts(&self, sandbox: SandboxId, attempts: u64) {
        self.state().networks.attempts.insert(sandbox, attempts);
    }

    /// Sets which ports programs of a sandbox listen on.
    pub fn set_listening(&self, sandbox: SandboxId, ports: Vec<ListeningPort>) {
        self.state().networks.listening.insert(sandbox, ports);
    }

    /// From now on no network can be opened or changed, for this reason. `None` stops that.
    pub fn lack_networks(&self, fault: Option<NetworkFault>) {
        self.state().networks.fault = fault;
    }

    /// The latest policy of a sandbox.
    pub fn policy(&self, sandbox: SandboxId) -> Option<Vec<u8>> {
        self.state().networks.policies.get(&sandbox).cloned()
    }

    /// The CA that a sandbox was shown.
    pub fn trusted(&self, sandbox: SandboxId) -> Option<String> {
        self.state().networks.trusted.get(&sandbox).cloned()
    }

    /// Makes a sandbox look as if it came from a version without networks.
    pub fn make_too_old(&self, sandbox: SandboxId) {
        self.state().networks.too_old.insert(sandbox);
    }

    /// How many egress processes run.
    pub fn egress_count(&self) -> usize {
        self.state().networks.egress.len()
    }

    /// The descriptors of the latest egress process, for a test that acts as egress. `None` if none runs, or if they
    /// were taken before.
    pub fn take_egress(&self) -> Option<Vec<OwnedFd>> {
        self.state().networks.egress.last_mut().map(std::mem::take).filter(|taken| !taken.is_empty())
    }

    /// Kills every egress process, as a crash would.
    pub fn kill_egress(&self) {
        self.state().networks.egress.clear();
    }

    /// Records a request about a running sandbox.
    async fn network_call(
        &self,
        sandbox: SandboxId,
        step: FakeStep,
        doing: &'static str,
        call: FakeNetworkCall,
    ) -> Result<(), BackendError> {
        self.step(step, doing).await?;
        let mut state = self.state();
        if !state.exists(sandbox, FakeThing::Process) {
            return Err(BackendError::Gone);
        }
        let networks = &mut state.networks;
        let too_old = networks.too_old.contains(&sandbox) && matches!(call, FakeNetworkCall::Open(_));
        if too_old {
            return Err(BackendError::Network { doing, source: Box::new(NetworkFault::TooOld) });
        }
        let needs_kernel = matches!(call, FakeNetworkCall::Open(_) | FakeNetworkCall::Change(_));
        if let Some(fault) = networks.fault.clone().filter(|_| needs_kernel) {
            return Err(BackendError::Network { doing, source: Box::new(fault) });
        }
        match &call {
            FakeNetworkCall::Open(routes) | FakeNetworkCall::Change(routes) => {
                networks.routes.insert(sandbox, routes.clone());
            }
            FakeNetworkCall::Close => {
                networks.routes.remove(&sandbox);
            }
            FakeNetworkCall::Sockets(..) => {}
        }
        networks.calls.push((sandbox, call));
        Ok(())
    }
}

#[async_trait]
impl Network for FakeHost {
    async fn open_network(&self, sandbox: SandboxId, routes: &Routes) -> Result<Listeners, BackendError> {
        const DOING: &str = "open a sandbox's network";
        let call = FakeNetworkCall::Open(routes.clone());
        self.network_call(sandbox, FakeStep::OpenNetwork, DOING, call).await?;
        listen(vec![Listener::TcpV4, Listener::TcpV6, Listener::DnsV4, Listener::DnsV6])
            .map_err(|source| BackendError::Refused { doing: DOING.into(), source })
    }

    async fn change_routes(&self, sandbox: SandboxId, routes: &Routes) -> Result<(), BackendError> {
        let doing = "change a sandbox's routes";
        let call = FakeNetworkCall::Change(routes.clone());
        self.network_call(sandbox, FakeStep::ChangeRoutes, doing, call).await
    }

    async fn close_network(&self, sandbox: SandboxId) -> Result<(), BackendError> {
        let doing = "close a sandbox's network";
        self.network_call(sandbox, FakeStep::CloseNetwork, doing, FakeNetworkCall::Close).await
    }

    async fn sockets(
        &self,
        sandbox: SandboxId,
        family: Family,
        count: u8,
    ) -> Result<Vec<OwnedFd>, BackendError> {
        const DOING: &str = "make sockets in a sandbox";
        let call = FakeNetworkCall::Sockets(family, count);
        self.network_call(sandbox, FakeStep::Sockets, DOING, call).await?;
        let family = match family {
            Family::V4 => rustix::net::AddressFamily::INET,
            Family::V6 => rustix::net::AddressFamily::INET6,
        };
        let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
        let make = |_| rustix::net::socket_with(family, rustix::net::SocketType::STREAM, flags, None);
        let made: Result<Vec<_>, _> = (0..count.min(SOCKETS_MAX)).map(make).collect();
        made.map_err(|e| BackendError::Refused { doing: DOING.into(), source: e.into() })
    }

    async fn attempts(&self, sandbox: SandboxId) -> Result<u64, BackendError> {
        self.step(FakeStep::Attempts, "count attempts to reach a network").await?;
        let state = self.state();
        match state.exists(sandbox, FakeThing::Process) {
            true => Ok(state.networks.attempts.get(&sandbox).copied().unwrap_or(0)),
            false => Err(BackendError::Gone),
        }
    }

    async fn can_have_network(&self, sandbox: SandboxId) -> Result<bool, BackendError> {
        let state = self.state();
        match state.exists(sandbox, FakeThing::Disk) {
            true => Ok(!state.networks.too_old.contains(&sandbox)),
            false => Err(BackendError::Gone),
        }
    }

    async fn show_policy(&self, sandbox: SandboxId, policy: &[u8]) -> Result<(), BackendError> {
        const DOING: &str = "show a sandbox its policy";
        self.step(FakeStep::ShowPolicy, DOING).await?;
        if !self.can_have_network(sandbox).await? {
            return Err(BackendError::Network { doing: DOING, source: Box::new(NetworkFault::TooOld) });
        }
        self.state().networks.policies.insert(sandbox, policy.to_vec());
        Ok(())
    }

    async fn show_trust(
        &self,
        sandbox: SandboxId,
        _rootfs: &Rootfs,
        ca: &str,
        _extra: &str,
    ) -> Result<(), BackendError> {
        self.step(FakeStep::ShowPolicy, "show a sandbox what to trust").await?;
        self.state().networks.trusted.insert(sandbox, ca.to_owned());
        Ok(())
    }

    async fn start_egress(&self, descriptors: Vec<OwnedFd>) -> Result<(), BackendError> {
        self.step(FakeStep::StartEgress, "start egress").await?;
        self.state().networks.egress.push(descriptors);
        Ok(())
    }

    async fn end_egress(&self) -> Result<(), BackendError> {
        self.step(FakeStep::EndEgress, "end egress").await?;
        self.kill_egress();
        Ok(())
    }

    async fn listening(&self, sandbox: SandboxId) -> Result<Vec<ListeningPort>, BackendError> {
        self.step(FakeStep::Listening, "list a sandbox's ports").await?;
        let state = self.state();
        match state.exists(sandbox, FakeThing::Process) {
            true => Ok(state.networks.listening.get(&sandbox).cloned().unwrap_or_default()),
            false => Err(BackendError::Gone),
        }
    }
}

fn listen(needed: Vec<Listener>) -> io::Result<Listeners> {
    let socket = |listener: Listener| -> io::Result<OwnedFd> {
        match listener {
            Listener::TcpV4 | Listener::TcpV6 => {
                let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
                socket.set_nonblocking(true)?;
                Ok(socket.into())
            }
            Listener::DnsV4 | Listener::DnsV6 => {
                let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
                socket.set_nonblocking(true)?;
                Ok(socket.into())
            }
        }
    };
    needed.into_iter().map(|listener| Ok((listener, socket(listener)?))).collect()
}
