//! The one place that sends netlink messages.
//!
//! The kernel handles a message while it is being sent, so all answers are in the socket when the call returns, and
//! reading them never blocks.

use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with,
};

use super::message::{Messages, received};

/// The kernel's answer to one message: a confirmation or an error.
const ERROR: u16 = 2;
/// The end of a list.
const DONE: u16 = 3;
/// Larger than any packet that the kernel makes for a list.
const BUFFER: usize = 64 * 1024;

/// The part of the kernel that a socket talks to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Subsystem {
    /// Interfaces, addresses, routes.
    Route,
    /// nf_tables.
    Netfilter,
}

/// A message that the kernel rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Refusal {
    /// The number of the message.
    pub number: u32,
    /// Why.
    pub errno: i32,
}

/// A socket to the kernel, in the network namespace of the thread that made it.
pub(super) struct Netlink(OwnedFd);

impl Netlink {
    pub fn open(subsystem: Subsystem) -> io::Result<Self> {
        let protocol: Option<Protocol> = match subsystem {
            // ROUTE is protocol 0, for which the parameter is `None`.
            Subsystem::Route => None,
            Subsystem::Netfilter => Some(netlink::NETFILTER),
        };
        Ok(Self(socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?))
    }

    /// Sends messages in one write and returns those that were rejected. At least one of the messages must ask for a
    /// confirmation, so that silence is not mistaken for success.
    pub fn send(&self, messages: &Messages) -> io::Result<Vec<Refusal>> {
        self.write(messages)?;
        let (mut refused, mut heard) = (Vec::new(), false);
        self.read(|kind, number, body| {
            if kind == ERROR
                && let Some(code) = body.first_chunk()
            {
                heard = true;
                let errno = -i32::from_ne_bytes(*code);
                if errno != 0 {
                    refused.push(Refusal { number, errno });
                }
            }
            false
        })?;
        if heard { Ok(refused) } else { Err(io::Error::other("the kernel did not answer")) }
    }

    /// Sends a request for a list and calls `each` with the kind and body of every entry.
    pub fn list(&self, request: &Messages, mut each: impl FnMut(u16, &[u8])) -> io::Result<()> {
        self.write(request)?;
        let (mut done, mut failed) = (false, 0);
        self.read(|kind, _, body| {
            match kind {
                DONE => done = true,
                ERROR => failed = body.first_chunk().map_or(libc::EBADMSG, |code| -i32::from_ne_bytes(*code)),
                kind => each(kind, body),
            }
            done
        })?;
        match failed {
            0 if done => Ok(()),
            0 => Err(io::Error::other("the kernel did not finish its list")),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    fn write(&self, messages: &Messages) -> io::Result<()> {
        let kernel = SocketAddrNetlink::new(0, 0);
        let sent = sendto(&self.0, messages.bytes(), SendFlags::empty(), &kernel)?;
        if sent == messages.bytes().len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// Reads until nothing is left, or `each` returns that it has enough.
    fn read(&self, mut each: impl FnMut(u16, u32, &[u8]) -> bool) -> io::Result<()> {
        let mut buffer = vec![0; BUFFER];
        loop {
            let length = match recv(&self.0, buffer.as_mut_slice(), RecvFlags::DONTWAIT) {
                Ok((length, _)) => length,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
            };
            for message in received(&buffer[..length]) {
                if each(message.kind, message.number, message.body) {
                    return Ok(());
                }
            }
        }
    }
}
