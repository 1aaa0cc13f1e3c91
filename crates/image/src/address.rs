//! Which addresses the daemon connects to for callers that are not operators: those of the public internet.
//!
//! A registry is a name or an address of the caller's choice, and so is wherever it redirects. Without this check,
//! anybody with a key could let the daemon connect to the machine itself, to its neighbours and to metadata services.

use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::vec;

use hyper_util::client::legacy::connect::dns::Name;
use tower::Service;

/// Where a caller may let the daemon connect to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reach {
    /// Anywhere, for operators.
    Anywhere,
    /// Public addresses, and registries and mirrors that the configuration names.
    Public,
}

/// Whether an address is on the public internet.
pub fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let closed = address.is_loopback()
        || address.is_private()
        || address.is_link_local()
        || address.is_broadcast()
        || address.is_documentation()
        || address.is_multicast()
        || a == 0
        || a >= 240
        || (a == 100 && (64..128).contains(&b)) // Shared by carriers.
        || (a == 192 && b == 0 && c == 0)
        || (a == 198 && (b == 18 || b == 19)); // Benchmarks.
    !closed
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let segments = address.segments();
    let low = Ipv4Addr::from((u32::from(segments[6]) << 16) | u32::from(segments[7]));
    // Addresses that lead to an IPv4 address: mapped, compatible, NAT64, 6to4.
    if let Some(mapped) = address.to_ipv4_mapped() {
        return is_public_v4(mapped);
    }
    match segments {
        [0, 0, 0, 0, 0, 0, ..] => false,
        [0x64, 0xff9b, 0, 0, 0, 0, ..] => is_public_v4(low),
        [0x64, 0xff9b, 1, ..] => false,
        [0x2002, high, low, ..] => is_public_v4(Ipv4Addr::from((u32::from(high) << 16) | u32::from(low))),
        [0x2001, 0..=0x1ff, ..] | [0x2001, 0xdb8, ..] => false,
        // All that is handed out to networks.
        [first, ..] => first & 0xe000 == 0x2000,
    }
}

/// Resolves names, and leaves out addresses that are out of reach.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resolver(pub Reach);

impl Service<Name> for Resolver {
    type Response = vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let Self(reach) = *self;
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let allowed = |address: &SocketAddr| reach == Reach::Anywhere || is_public(address.ip());
            let found: Vec<SocketAddr> = found.filter(allowed).collect();
            match found.is_empty() {
                true => Err(io::Error::from(io::ErrorKind::PermissionDenied)),
                false => Ok(found.into_iter()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_the_internet_are_public() {
        for address in ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "64:ff9b::101:101", "2002:101:101::1"]
        {
            assert!(is_public(address.parse().expect(address)), "{address}");
        }
        for address in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "100.64.0.1",
            "127.0.0.1",
            "127.9.9.9",
            "169.254.169.254",
            "172.16.0.1",
            "192.0.0.1",
            "192.168.1.1",
            "198.18.0.1",
            "203.0.113.9",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::127.0.0.1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b:1::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "2002:7f00:1::1",
            "2001:db8::1",
            "2001::1",
            "100::1",
        ] {
            assert!(!is_public(address.parse().expect(address)), "{address}");
        }
    }
}
