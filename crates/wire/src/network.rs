//! What the launcher makes in the network namespace of a sandbox, and what egress finds there: addresses, ports, routes.
//!
//! A namespace has loopback only. *Routes* are the list of what may be reached: an address without a route fails in connect(2).
//! What has a route arrives at listeners that the launcher makes in the namespace and that egress holds.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use crate::SandboxId;

/// Synthetic addresses, which stand for names: the range for benchmarks (RFC 2544), which no network routes.
pub const POOL_V4: Prefix = Prefix { address: IpAddr::V4(Ipv4Addr::new(198, 18, 0, 0)), bits: 15 };
/// The same for IPv6: a part of the discard prefix (RFC 6666).
pub const POOL_V6: Prefix =
    Prefix { address: IpAddr::V6(Ipv6Addr::new(0x100, 0, 0, 1, 0, 0, 0, 0)), bits: 64 };

/// Where the name server of every sandbox is.
pub const RESOLVER_V4: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// The same for IPv6.
pub const RESOLVER_V6: Ipv6Addr = Ipv6Addr::new(0x100, 0, 0, 1, 0, 0, 0, 1);
/// The sandbox's own address. glibc looks up no names where there is only loopback (AI_ADDRCONFIG).
pub const OWN_V4: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
/// The same for IPv6.
pub const OWN_V6: Ipv6Addr = Ipv6Addr::new(0x100, 0, 0, 1, 0, 0, 0, 2);
/// Stands for every name that the policy refuses. Only the ports in [`REFUSED_PORTS`] answer there.
pub const REFUSED_V4: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 3);
/// The same for IPv6.
pub const REFUSED_V6: Ipv6Addr = Ipv6Addr::new(0x100, 0, 0, 1, 0, 0, 0, 3);
/// Where the page is that explains a refusal.
pub const REFUSED_PORTS: [u16; 2] = [80, 443];
/// The first number in either pool that stands for a name; those below are taken by the addresses above.
pub const FIRST_NAME: u32 = 256;

/// Where connections to any address and port arrive. `getsockname` tells where they were meant to go.
pub const PROXY_PORT: u16 = 61_000;
/// Where questions about names are answered.
pub const DNS_PORT: u16 = 53;

/// `/etc/resolv.conf` of every sandbox. The same for each policy, so that a change needs no file: without a route the resolver's
/// address fails at once. `search .` because glibc would otherwise search the domain of a host name that has one.
pub const RESOLV_CONF: &str = "nameserver 198.18.0.1\nsearch .\noptions timeout:1 attempts:2\n";
/// `/etc/hosts` of every sandbox.
pub const HOSTS: &str = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n";

/// The host name of a sandbox. Derived from the id, so that it exists before the sandbox has a name and does not change
/// with the name. No line of [`HOSTS`] names it, because all sandboxes of an image share that file: egress answers for it.
pub fn host_name(sandbox: SandboxId) -> String {
    format!("{HOST_NAME_PREFIX}{:08x}", sandbox.bits() >> 96)
}

/// Whether a name has the form of [`host_name`].
pub fn is_host_name(name: &str) -> bool {
    let digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    name.strip_prefix(HOST_NAME_PREFIX).is_some_and(|rest| rest.len() == 8 && rest.bytes().all(digit))
}

/// What every sandbox's host name begins with.
const HOST_NAME_PREFIX: &str = "sandbox-";

/// A directory that the host writes and a sandbox reads.
pub const HOST_DIRECTORY: &str = "/run/shoal";
/// The policy of a sandbox's network, as the sandbox sees it.
pub const POLICY_FILE: &str = "/run/shoal/network.json";
/// How long that file may be.
pub const POLICY_BYTES_MAX: usize = 1 << 20;

/// Routes of one sandbox, at most. A request must fit into one packet.
pub const ROUTES_MAX: usize = 2048;
/// Sockets in one answer, at most.
pub const SOCKETS_MAX: u8 = 8;

/// Addresses that begin with the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Prefix {
    /// The first of them.
    pub address: IpAddr,
    /// How many bits are the same.
    pub bits: u8,
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

/// What a sandbox can send to at all. What becomes of a connection then is up to egress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Routes {
    /// Names, and these addresses.
    Listed(Vec<Prefix>),
    /// Names, and all addresses but these.
    Open(Vec<Hole>),
}

impl Routes {
    /// How many there are.
    pub fn count(&self) -> usize {
        match self {
            Self::Listed(prefixes) => prefixes.len(),
            Self::Open(holes) => holes.len(),
        }
    }
}

/// Addresses that cannot be reached although everything else can.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Hole {
    /// Which.
    pub prefix: Prefix,
    /// The error that a program gets when it tries.
    pub answer: HoleAnswer,
}

/// The error of a connection into a [`Hole`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum HoleAnswer {
    /// EHOSTUNREACH, as for a machine that is switched off.
    Unreachable,
    /// EACCES, since it is forbidden.
    Prohibited,
}

/// A socket in a sandbox's namespace that egress reads from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Listener {
    /// TCP to any IPv4 address and port.
    TcpV4,
    /// TCP to any IPv6 address and port.
    TcpV6,
    /// UDP to port 53 of [`RESOLVER_V4`].
    DnsV4,
    /// UDP to port 53 of [`RESOLVER_V6`].
    DnsV6,
}

/// An address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// Why a sandbox has no network, or not the one that was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum NetworkFault {
    /// The kernel has no nf_tables.
    #[error("the kernel has no nf_tables; `shoal doctor` says how to get it")]
    NoNfTables,
    /// The kernel's nf_tables cannot redirect connections transparently.
    #[error("the kernel's nf_tables has no tproxy; `shoal doctor` says how to get it")]
    NoTproxy,
    /// The sandbox was made by a version that knew no networks.
    #[error("the sandbox was made before Shoal had networks")]
    TooOld,
    /// A program in the sandbox has a port that the network needs.
    #[error("a program in the sandbox listens on port {port}, or the network is open already")]
    PortTaken {
        /// Which one.
        port: u16,
    },
    /// The sandbox has no process.
    #[error("the sandbox does not run")]
    NotRunning,
    /// The routes are no routes.
    #[error("the routes are refused: {why}")]
    Routes {
        /// What is wrong.
        why: String,
    },
    /// The kernel refused.
    #[error("cannot {doing}: {}", std::io::Error::from_raw_os_error(*errno))]
    Kernel {
        /// As it reads after "cannot".
        doing: String,
        /// Why.
        errno: i32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_resolver_that_programs_read_of_is_the_one_that_answers() {
        assert!(RESOLV_CONF.starts_with(&format!("nameserver {RESOLVER_V4}\n")));
    }

    #[test]
    fn our_own_addresses_are_in_the_pools_and_stand_for_no_name() {
        for address in [RESOLVER_V4, OWN_V4, REFUSED_V4] {
            let IpAddr::V4(pool) = POOL_V4.address else { panic!("the pool is IPv4") };
            assert!(u32::from(address) - u32::from(pool) < FIRST_NAME);
        }
        for address in [RESOLVER_V6, OWN_V6, REFUSED_V6] {
            let IpAddr::V6(pool) = POOL_V6.address else { panic!("the pool is IPv6") };
            assert!(u128::from(address) - u128::from(pool) < u128::from(FIRST_NAME));
        }
    }
}
