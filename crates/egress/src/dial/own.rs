//! The addresses of this machine, read from the kernel and again whenever they change (rtnetlink(7)).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram as StdUnixDatagram;
use std::time::Duration;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, sendto, socket_with,
};
use tokio::net::UnixDatagram;

const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST_DUMP: u16 = 0x301;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
/// RTMGRP_IPV4_IFADDR and RTMGRP_IPV6_IFADDR.
const ADDRESS_GROUPS: u32 = 0x10 | 0x100;
const HEADER_BYTES: usize = 16;
const BODY_BYTES: usize = 8;
/// The size of the kernel's largest packet.
const PACKET_BYTES: usize = 64 * 1024;
/// How long the kernel may take; it usually answers at once.
const DEADLINE: Duration = Duration::from_secs(5);

/// The addresses of all interfaces but loopback.
pub fn own_addresses() -> io::Result<Vec<IpAddr>> {
    // NETLINK_ROUTE is protocol zero.
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(DEADLINE))?;
    let mut request = Vec::with_capacity(HEADER_BYTES + BODY_BYTES);
    request.extend_from_slice(&((HEADER_BYTES + BODY_BYTES) as u32).to_ne_bytes());
    request.extend_from_slice(&RTM_GETADDR.to_ne_bytes());
    request.extend_from_slice(&NLM_F_REQUEST_DUMP.to_ne_bytes());
    // Sequence, port and an empty address message, which asks for both families.
    request.resize(HEADER_BYTES + BODY_BYTES, 0);
    sendto(&socket, &request, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut own = Vec::new();
    let mut packet = vec![0; PACKET_BYTES];
    loop {
        let (length, _) = recv(&socket, packet.as_mut_slice(), RecvFlags::empty())?;
        if read_addresses(&packet[..length], &mut own)? {
            break;
        }
    }
    own.retain(|address| !address.is_loopback());
    own.sort_unstable();
    own.dedup();
    Ok(own)
}

/// Collects addresses from one packet; true when it was the last.
fn read_addresses(mut packet: &[u8], own: &mut Vec<IpAddr>) -> io::Result<bool> {
    while let Some(header) = packet.first_chunk::<HEADER_BYTES>() {
        let length = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let kind = u16::from_ne_bytes([header[4], header[5]]);
        if length < HEADER_BYTES || length > packet.len() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        match kind {
            NLMSG_DONE => return Ok(true),
            NLMSG_ERROR => return Err(io::Error::other("the kernel refused to list addresses")),
            RTM_NEWADDR => own.extend(address(&packet[HEADER_BYTES..length])),
            _ => {}
        }
        packet = &packet[length.next_multiple_of(4).min(packet.len())..];
    }
    Ok(false)
}

/// The address in one message. On point-to-point links `IFA_ADDRESS` is the other end, and `IFA_LOCAL` is ours.
fn address(message: &[u8]) -> Option<IpAddr> {
    let mut rest = message.get(BODY_BYTES..)?;
    let mut found = None;
    while let Some(head) = rest.first_chunk::<4>() {
        let length = usize::from(u16::from_ne_bytes([head[0], head[1]]));
        let kind = u16::from_ne_bytes([head[2], head[3]]);
        let value = rest.get(4..length)?;
        let address = match value.len() {
            4 => value.first_chunk::<4>().map(|bytes| IpAddr::V4(Ipv4Addr::from(*bytes))),
            16 => value.first_chunk::<16>().map(|bytes| IpAddr::V6(Ipv6Addr::from(*bytes))),
            _ => None,
        };
        match kind {
            IFA_LOCAL => return address,
            IFA_ADDRESS => found = address,
            _ => {}
        }
        rest = &rest[length.next_multiple_of(4).min(rest.len())..];
    }
    found
}

/// Signals changes of the addresses.
#[derive(Debug)]
pub struct Changes(UnixDatagram);

impl Changes {
    /// Starts to listen.
    pub fn listen() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket: OwnedFd = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        bind(&socket, &SocketAddrNetlink::new(0, ADDRESS_GROUPS))?;
        // tokio's type is used only for waiting, which is the same for every kind of socket.
        Ok(Self(UnixDatagram::from_std(StdUnixDatagram::from(socket))?))
    }

    /// Waits for the next change.
    pub async fn next(&self) -> io::Result<()> {
        let mut packet = vec![0; PACKET_BYTES];
        loop {
            self.0.readable().await?;
            let received = self.0.try_io(tokio::io::Interest::READABLE, || {
                recv(&self.0, packet.as_mut_slice(), RecvFlags::DONTWAIT).map_err(io::Error::from)
            });
            match received {
                Ok(_) => return Ok(()),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                // There were so many changes that some notifications were dropped, which means a change.
                Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => return Ok(()),
                Err(e) => return Err(e),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_lists_addresses_without_loopback() {
        let own = own_addresses().expect("addresses");
        assert!(own.iter().all(|address| !address.is_loopback()), "{own:?}");
    }

    #[test]
    fn a_message_names_its_local_address() {
        let attribute = |kind: u16, value: &[u8]| {
            [&(4 + value.len() as u16).to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat()
        };
        let message = [vec![0; 8], attribute(1, &[192, 0, 2, 1]), attribute(2, &[192, 0, 2, 2])].concat();
        assert_eq!(address(&message), Some("192.0.2.2".parse().expect("v4")));
        let message = [vec![0; 8], attribute(1, &[0; 16])].concat();
        assert_eq!(address(&message), Some("::".parse().expect("v6")));
        assert_eq!(address(&[0; 11]), None);
        assert_eq!(address(&[vec![0; 8], vec![200, 0, 1, 0]].concat()), None, "a length beyond the message");
    }
}
