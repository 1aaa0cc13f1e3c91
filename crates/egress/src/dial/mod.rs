//! Connections to the outside. Every address is checked at the moment it is dialled, after resolution: names that
//! resolve to private addresses, or that change their addresses, reach nothing.

mod own;
mod proxy;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::dns::{ResolveError, Resolver};
use crate::policy::{Addresses, Class, Closed, Destination, DialDenied, Policy, Verdict};

pub use own::{Changes, own_addresses};
pub use proxy::{Host, Proxy, ProxyKind};

/// How long all attempts together may take.
pub const DIAL_DEADLINE: Duration = Duration::from_secs(15);
/// How long to wait for one address before the next is tried in parallel (RFC 8305 recommends 250 ms).
const NEXT_ADDRESS_AFTER: Duration = Duration::from_millis(250);
/// How many addresses of one name are tried.
const ADDRESSES_MAX: usize = 8;

/// Local addresses to dial from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bind {
    /// For IPv4 destinations.
    pub v4: Option<Ipv4Addr>,
    /// For IPv6 destinations.
    pub v6: Option<Ipv6Addr>,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The name has no address.
    #[error("the name has no address")]
    NoAddress,
    /// The name cannot be looked up.
    #[error("the name cannot be looked up: {0}")]
    Resolve(#[from] ResolveError),
    /// Every address is refused; this is the first.
    #[error(transparent)]
    Denied(#[from] DialDenied),
    /// No address answered.
    #[error("cannot connect to {address}: {source}")]
    Connect {
        /// The last address that was tried.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The proxy did not open the connection.
    #[error("cannot connect through the upstream proxy: {0}")]
    Proxy(#[source] io::Error),
    /// The deadline has passed.
    #[error("no connection within {} s", DIAL_DEADLINE.as_secs())]
    Late,
}

/// A connection and its remote address.
#[derive(Debug)]
pub struct Dialled {
    /// The connection.
    pub stream: TcpStream,
    /// The address that was dialled; `None` behind a proxy that resolved the name.
    pub address: Option<SocketAddr>,
}

/// Opens connections for all sandboxes.
#[derive(Debug)]
pub struct Dialer {
    /// Looks up names.
    pub resolver: Arc<Resolver>,
    addresses: RwLock<Arc<Addresses>>,
    proxy: Option<Proxy>,
    bind: Bind,
}

impl Dialer {
    /// A dialer with the operator's settings.
    pub fn new(resolver: Arc<Resolver>, addresses: Addresses, proxy: Option<Proxy>, bind: Bind) -> Self {
        Self { resolver, addresses: RwLock::new(Arc::new(addresses)), proxy, bind }
    }

    /// The current table of closed addresses.
    pub fn addresses(&self) -> Arc<Addresses> {
        self.addresses.read().expect("nobody panics while holding it").clone()
    }

    /// Replaces the machine's own addresses after a change.
    pub fn set_own(&self, own: Vec<IpAddr>) {
        let mut addresses = self.addresses.write().expect("nobody panics while holding it");
        *addresses = Arc::new(Addresses { own, ..Addresses::clone(&addresses) });
    }

    /// Connects to a destination that `policy` has allowed with `verdict`.
    pub async fn dial(
        &self,
        to: Destination<'_>,
        port: u16,
        policy: &Policy,
        verdict: &Verdict,
    ) -> Result<Dialled, DialError> {
        match timeout(DIAL_DEADLINE, self.dial_unhurried(to, port, policy, verdict)).await {
            Ok(dialled) => dialled,
            Err(_) => Err(DialError::Late),
        }
    }

    async fn dial_unhurried(
        &self,
        to: Destination<'_>,
        port: u16,
        policy: &Policy,
        verdict: &Verdict,
    ) -> Result<Dialled, DialError> {
        let table = self.addresses();
        let found = match (to, &self.proxy) {
            (Destination::Address(address), None) => vec![address],
            (Destination::Address(address), Some(proxy)) => {
                policy.may_dial(address, port, verdict, &table)?;
                let stream = proxy.connect(Host::Address(address), port).await.map_err(DialError::Proxy)?;
                return Ok(Dialled { stream, address: Some(SocketAddr::new(address, port)) });
            }
            (Destination::Name(name), Some(proxy)) => {
                let stream = proxy.connect(Host::Name(name), port).await.map_err(DialError::Proxy)?;
                return Ok(Dialled { stream, address: None });
            }
            (Destination::Name(name), None) => self.resolver.addresses(name).await?,
        };
        let (mut open, mut denied) = (Vec::new(), None);
        for address in found.into_iter().take(ADDRESSES_MAX) {
            // The checked address must be the dialled address: a mapped address is dialled as the address that it maps.
            let address = address.to_canonical();
            match policy.may_dial(address, port, verdict, &table) {
                Ok(()) => open.push(SocketAddr::new(address, port)),
                Err(why) => denied = denied.or(Some(why)),
            }
        }
        if open.is_empty() {
            return Err(denied.map_or(DialError::NoAddress, DialError::Denied));
        }
        let (stream, address) = self.race(&open).await?;
        refuse_own(&stream, address.ip(), &table)?;
        Ok(Dialled { stream, address: Some(address) })
    }

    /// Tries addresses in order, each with a head start over the next. The first that answers wins.
    async fn race(&self, addresses: &[SocketAddr]) -> Result<(TcpStream, SocketAddr), DialError> {
        let mut tries = JoinSet::new();
        let mut waiting = addresses.iter().copied();
        let mut last = None;
        loop {
            let next = waiting.next();
            if let Some(address) = next {
                let bind = self.bind;
                tries.spawn(async move { (address, connect(address, bind).await) });
            }
            let ended = match next {
                Some(_) => match timeout(NEXT_ADDRESS_AFTER, tries.join_next()).await {
                    Ok(ended) => ended,
                    Err(_) => continue,
                },
                None => tries.join_next().await,
            };
            match ended {
                Some(Ok((address, Ok(stream)))) => return Ok((stream, address)),
                Some(Ok((address, Err(source)))) => last = Some(DialError::Connect { address, source }),
                // One of our tasks panicked, which the runtime has reported.
                Some(Err(_)) => {}
                None => return Err(last.unwrap_or(DialError::NoAddress)),
            }
        }
    }
}

async fn connect(address: SocketAddr, bind: Bind) -> io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    let from = if address.is_ipv4() { bind.v4.map(IpAddr::V4) } else { bind.v6.map(IpAddr::V6) };
    if let Some(from) = from {
        socket.bind(SocketAddr::new(from, 0))?;
    }
    socket.connect(address).await
}

/// The second check for the machine's own addresses, in case one appeared a moment ago: the kernel connects to an own
/// address from that same address.
fn refuse_own(stream: &TcpStream, address: IpAddr, table: &Addresses) -> Result<(), DialError> {
    let known = table.class(address).is_some() || table.opened.iter().any(|block| block.contains(address));
    match stream.local_addr() {
        Ok(local) if !known && local.ip().to_canonical() == address => {
            Err(DialDenied::Closed(Closed { address, class: Class::Own }).into())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;
    use crate::dns::Upstream;
    use crate::policy::{Action, Mode, Preset, Protocol, Query, RuleSpec, Spec};

    fn dialer(addresses: Addresses) -> Dialer {
        Dialer::new(Arc::new(Resolver::new(Upstream::default(), None)), addresses, None, Bind::default())
    }

    fn policy(mode: Mode, rules: &[&str]) -> Policy {
        let rules = rules
            .iter()
            .map(|to| RuleSpec {
                action: Action::Allow,
                to: (*to).into(),
                ports: vec![],
                protocol: None,
                private: false,
            })
            .collect();
        Policy::new(Spec { mode, rules, audit: false }.expand(&Preset::default()).expect("a policy"))
    }

    async fn dial(dialer: &Dialer, policy: &Policy, to: SocketAddr) -> Result<Dialled, DialError> {
        let destination = Destination::Address(to.ip());
        let verdict = policy.decide(Query { to: destination, port: to.port(), protocol: Protocol::Tcp });
        dialer.dial(destination, to.port(), policy, &verdict).await
    }

    #[tokio::test]
    async fn a_listener_on_a_closed_address_sees_no_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
        let to = listener.local_addr().expect("an address");
        let dialer = dialer(Addresses::default());
        for policy in [
            policy(Mode::Open, &[]),
            policy(Mode::Open, &["127.0.0.0/8"]),
            policy(Mode::Open, &["0.0.0.0/0"]),
        ] {
            let error = dial(&dialer, &policy, to).await.expect_err("loopback is closed");
            assert!(matches!(error, DialError::Denied(_)), "{error}");
        }
        let mapped: SocketAddr = format!("[::ffff:127.0.0.1]:{}", to.port()).parse().expect("an address");
        dial(&dialer, &policy(Mode::Open, &[]), mapped).await.expect_err("mapped loopback is closed");
        let zero: SocketAddr = format!("0.0.0.0:{}", to.port()).parse().expect("an address");
        dial(&dialer, &policy(Mode::Open, &["0.0.0.0"]), zero).await.expect_err("zero is closed for ever");
        let accepted = timeout(Duration::from_millis(50), listener.accept()).await;
        assert!(accepted.is_err(), "nothing was dialled");
        dial(&dialer, &policy(Mode::None, &["127.0.0.1"]), to).await.expect("a rule names the address");
    }

    #[tokio::test]
    async fn an_own_address_that_nobody_listed_is_refused_after_the_connect() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
        let stream = TcpStream::connect(listener.local_addr().expect("an address")).await.expect("a stream");
        // As if loopback were a public address that this machine just got.
        let address: IpAddr = "127.0.0.1".parse().expect("v4");
        let open = Addresses { opened: vec!["127.0.0.1".parse().expect("a block")], ..Addresses::default() };
        assert!(refuse_own(&stream, address, &open).is_ok(), "the operator opened it");
        let local = stream.local_addr().expect("an address").ip();
        assert_eq!(local, address, "the kernel connects to an own address from itself");
    }

    #[tokio::test]
    async fn the_next_address_is_tried_when_one_refuses() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
        let to = listener.local_addr().expect("an address");
        let dead =
            TcpListener::bind("127.0.0.2:0").await.expect("a listener").local_addr().expect("an address");
        let dialer = dialer(Addresses::default());
        let (_, address) = dialer.race(&[dead, to]).await.expect("the second answers");
        assert_eq!(address, to);
        assert!(matches!(dialer.race(&[dead]).await, Err(DialError::Connect { .. })));
    }
}
