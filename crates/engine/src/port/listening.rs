//! Which ports programs of a sandbox listen on, read on the host. Init is not asked.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use runtime::{BackendError, ListeningPort};
use tokio::time::{Instant, sleep};
use wire::SandboxId;

use crate::Engine;
use crate::error::{EngineError, Field};
use crate::model::port::{OpenPort, Port, PortHolder};
use crate::model::{Owner, Resume};

/// The longest wait for a port.
pub const WAIT_SECONDS_MAX: u64 = 3600;
/// The pause between two looks while a caller waits: the first, and the longest.
const LOOK_PAUSE_MIN: Duration = Duration::from_millis(10);
const LOOK_PAUSE_MAX: Duration = Duration::from_millis(250);

impl Engine {
    /// The ports that programs of a sandbox listen on, sorted. This does not count as a use.
    pub async fn listening_ports(&self, owner: &Owner, id: SandboxId) -> Result<Vec<OpenPort>, EngineError> {
        let live = self.live(owner, id)?;
        if !live.state().takes_commands() {
            return Err(live.wrong_state());
        }
        // The search is bounded by the backend; this bounds how many run at once.
        let _look = self.shared().port_looks.acquire().await.map_err(|_| EngineError::Stopping)?;
        match self.shared().backend.listening(id).await {
            Ok(listening) => Ok(by_port(listening)),
            Err(BackendError::Gone) => Err(live.guest.unresponsive()),
            Err(source) => Err(EngineError::PortSockets { id, source }),
        }
    }

    /// Waits until a program listens on a port where a connection can reach it. Counts as a use, and resumes a paused
    /// sandbox.
    pub async fn wait_for_port(
        &self,
        owner: &Owner,
        id: SandboxId,
        port: Port,
        wait: Duration,
    ) -> Result<OpenPort, EngineError> {
        if wait > Duration::from_secs(WAIT_SECONDS_MAX) {
            let given = wait.as_secs();
            return Err(Field::Wait.must(format!("be at most {WAIT_SECONDS_MAX} seconds, got {given}")));
        }
        let _using = self.live(owner, id)?.guest.enter(Resume::Auto).await?;
        let deadline = Instant::now() + wait;
        let mut pause = LOOK_PAUSE_MIN;
        loop {
            let found = self.listening_ports(owner, id).await?;
            if let Some(open) = found.into_iter().find(|open| open.port == port.number() && open.reachable) {
                return Ok(open);
            }
            if Instant::now() >= deadline {
                return Err(EngineError::PortWait { id, port: port.number(), seconds: wait.as_secs_f64() });
            }
            sleep(pause.min(deadline - Instant::now())).await;
            pause = (pause * 2).min(LOOK_PAUSE_MAX);
        }
    }
}

/// One entry for each port, however many addresses a program listens on.
fn by_port(listening: Vec<ListeningPort>) -> Vec<OpenPort> {
    let mut ports: BTreeMap<u16, OpenPort> = BTreeMap::new();
    for ListeningPort { port, address, process } in listening {
        let open = ports.entry(port).or_insert(OpenPort {
            port,
            addresses: Vec::new(),
            reachable: false,
            process: None,
        });
        open.addresses.push(address);
        open.reachable |= is_reachable(address);
        open.process = open
            .process
            .take()
            .or_else(|| process.map(|process| PortHolder { pid: process.pid, name: process.name }));
    }
    let mut ports: Vec<OpenPort> = ports.into_values().collect();
    for open in &mut ports {
        open.addresses.sort();
        open.addresses.dedup();
    }
    ports
}

/// Whether a connection to 127.0.0.1 or ::1 arrives there.
fn is_reachable(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(v4) => v4.is_unspecified() || v4 == Ipv4Addr::LOCALHOST,
        IpAddr::V6(v6) => v6.is_unspecified() || v6 == Ipv6Addr::LOCALHOST,
    }
}

#[cfg(test)]
mod tests {
    use runtime::PortProcess;

    use super::*;

    #[test]
    fn a_port_is_told_once_with_all_its_addresses() {
        let at = |port, address: &str, name: Option<&str>| ListeningPort {
            port,
            address: address.parse().expect("an address"),
            process: name.map(|name| PortProcess { pid: 7, name: name.into() }),
        };
        let ports = by_port(vec![
            at(80, "::", Some("nginx")),
            at(80, "0.0.0.0", None),
            at(22, "127.0.0.2", None),
            at(81, "::1", None),
        ]);
        let told: Vec<_> =
            ports.iter().map(|port| (port.port, port.addresses.len(), port.reachable)).collect();
        assert_eq!(told, [(22, 1, false), (80, 2, true), (81, 1, true)]);
        assert_eq!(ports[1].process, Some(PortHolder { pid: 7, name: "nginx".into() }));
    }
}
