//! Sockets in a sandbox's namespace: those that egress listens on, and those that the daemon connects to servers
//! inside.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::sockopt::{set_ipv6_freebind, set_ipv6_v6only};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with};
use wire::network::{
    DNS_PORT, Family, Listener, NetworkFault, OWN_V4, OWN_V6, PROXY_PORT, RESOLVER_V4, RESOLVER_V6,
};

use crate::sys::sockets::set_transparent;

/// How many connections may wait for egress: the kernel's default maximum, since a connection that does not fit waits a
/// second.
const BACKLOG: i32 = 4096;

/// The listeners that a namespace needs.
pub(super) fn needed(ipv6: bool) -> Vec<Listener> {
    use Listener::*;
    match ipv6 {
        true => vec![TcpV4, TcpV6, DnsV4, DnsV6],
        false => vec![TcpV4, DnsV4],
    }
}

/// Whether IPv6 sockets work in this namespace, whose loopback is up.
pub(super) fn has_ipv6() -> io::Result<bool> {
    let socket = socket_with(AddressFamily::INET6, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
    let bound = socket.and_then(|socket| bind(&socket, &SocketAddr::from((Ipv6Addr::LOCALHOST, 0))));
    match bound {
        Ok(()) => Ok(true),
        // This kernel does not have IPv6, or it is disabled.
        Err(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Opens a listener. The addresses and routes must exist.
pub(super) fn open(listener: Listener) -> Result<OwnedFd, NetworkFault> {
    let address = address(listener);
    try_open(listener, address).map_err(|e| match e.raw_os_error() {
        Some(libc::EADDRINUSE) => NetworkFault::PortTaken { port: address.port() },
        errno => {
            NetworkFault::Kernel { doing: format!("listen on {address}"), errno: errno.unwrap_or(libc::EIO) }
        }
    })
}

/// The address of a listener.
fn address(listener: Listener) -> SocketAddr {
    match listener {
        Listener::TcpV4 => (OWN_V4, PROXY_PORT).into(),
        Listener::TcpV6 => (OWN_V6, PROXY_PORT).into(),
        Listener::DnsV4 => (RESOLVER_V4, DNS_PORT).into(),
        Listener::DnsV6 => (RESOLVER_V6, DNS_PORT).into(),
    }
}

fn try_open(listener: Listener, address: SocketAddr) -> io::Result<OwnedFd> {
    let kind = match listener {
        Listener::TcpV4 | Listener::TcpV6 => SocketType::STREAM,
        Listener::DnsV4 | Listener::DnsV6 => SocketType::DGRAM,
    };
    let family = if address.is_ipv4() { Family::V4 } else { Family::V6 };
    let socket = make(family, kind)?;
    if family == Family::V6 {
        set_ipv6_v6only(&socket, true)?;
        // A route covers the address, but no interface has it.
        set_ipv6_freebind(&socket, true)?;
    }
    if kind == SocketType::STREAM {
        set_transparent(socket.as_fd(), family)?;
    }
    // Without SO_REUSEADDR: otherwise a program in the sandbox could bind the same port and take over questions.
    bind(&socket, &address)?;
    if kind == SocketType::STREAM {
        listen(&socket, BACKLOG)?;
    }
    Ok(socket)
}

/// A TCP socket that is not connected.
pub(super) fn unconnected(family: Family) -> Result<OwnedFd, NetworkFault> {
    make(family, SocketType::STREAM).map_err(|e| NetworkFault::Kernel {
        doing: "make a socket".into(),
        errno: e.raw_os_error().unwrap_or(libc::EIO),
    })
}

fn make(family: Family, kind: SocketType) -> io::Result<OwnedFd> {
    let family = match family {
        Family::V4 => AddressFamily::INET,
        Family::V6 => AddressFamily::INET6,
    };
    Ok(socket_with(family, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?)
}

/// Whether a TCP socket that listens here is one of ours.
pub(super) fn is_ours(address: IpAddr, port: u16) -> bool {
    port == PROXY_PORT && (address == OWN_V4 || address == OWN_V6)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn only_our_own_listener_is_ours() {
        assert!(is_ours(OWN_V4.into(), PROXY_PORT) && is_ours(OWN_V6.into(), PROXY_PORT));
        assert!(!is_ours(OWN_V4.into(), 80), "a server of the guest's");
        assert!(!is_ours(Ipv4Addr::LOCALHOST.into(), PROXY_PORT), "a server of the guest's");
    }
}
