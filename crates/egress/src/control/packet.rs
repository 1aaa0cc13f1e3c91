//! Packets with descriptors on a seqpacket socket. A message that does not fit into a packet is sent in a sealed memory
//! file, as one more descriptor: ten thousand rules, a list of names.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram as StdUnixDatagram;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use tokio::io::Interest;
use tokio::net::UnixDatagram;

use super::message::LISTENERS_MAX;

/// The largest message that is sent in a packet. Larger ones go into a memory file.
const INLINE_BYTES_MAX: usize = 32 * 1024;
/// The largest message: ten thousand rules and a hundred thousand names fit.
pub const MESSAGE_BYTES_MAX: u64 = 32 << 20;
/// The most descriptors in one packet: the listeners and a memory file.
const DESCRIPTORS_MAX: usize = LISTENERS_MAX + 1;
const INLINE: u8 = 0;
const IN_FILE: u8 = 1;

/// One end of a seqpacket socket.
#[derive(Debug)]
pub struct Channel(UnixDatagram);

/// A message and its descriptors.
pub type Received = (Vec<u8>, Vec<OwnedFd>);

impl Channel {
    /// Wraps a connected seqpacket socket. Call within a runtime.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        // tokio's type is used only to wait for readiness; packets go through `sendmsg` and `recvmsg`, which work with
        // any socket type.
        Ok(Self(UnixDatagram::from_std(StdUnixDatagram::from(socket))?))
    }

    /// Sends a message with descriptors.
    pub async fn send(&self, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let file;
        let mut all = descriptors.to_vec();
        let (kind, body) = if message.len() <= INLINE_BYTES_MAX {
            (INLINE, message)
        } else {
            file = in_file(message)?;
            all.push(file.as_fd());
            (IN_FILE, &[][..])
        };
        if all.len() > DESCRIPTORS_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        loop {
            self.0.writable().await?;
            let sent = self.0.try_io(Interest::WRITABLE, || send_now(&self.0, kind, body, &all));
            match sent {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                other => return other,
            }
        }
    }

    /// Waits for the next message. `None` when the other side has closed.
    pub async fn receive(&self) -> io::Result<Option<Received>> {
        loop {
            self.0.readable().await?;
            let received = self.0.try_io(Interest::READABLE, || receive_now(&self.0));
            match received {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
                other => return other,
            }
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A memory file that is sealed against changes.
fn in_file(message: &[u8]) -> io::Result<OwnedFd> {
    let file = memfd_create("shoal-egress-message", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut file = File::from(file);
    file.write_all(message)?;
    fcntl_add_seals(&file, SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE)?;
    Ok(file.into())
}

fn from_file(file: OwnedFd) -> io::Result<Vec<u8>> {
    let mut file = File::from(file);
    if file.metadata()?.len() > MESSAGE_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the message is too long"));
    }
    file.rewind()?;
    let mut message = Vec::new();
    file.take(MESSAGE_BYTES_MAX).read_to_end(&mut message)?;
    Ok(message)
}

/// Sends one packet.
pub fn send_now(socket: impl AsFd, kind: u8, body: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let parts = [IoSlice::new(std::slice::from_ref(&kind)), IoSlice::new(body)];
    sendmsg(socket, &parts, &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives one packet. Blocks if the socket is blocking.
pub fn receive_now(socket: impl AsFd) -> io::Result<Option<Received>> {
    let mut bytes = vec![0; INLINE_BYTES_MAX + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let mut descriptors: Vec<OwnedFd> = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        })
        .flatten()
        .collect();
    if received.bytes == 0 {
        return Ok(None);
    }
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a packet was cut off"));
    }
    bytes.truncate(received.bytes);
    match bytes.first() {
        Some(&INLINE) => Ok(Some((bytes.split_off(1), descriptors))),
        Some(&IN_FILE) => {
            let file = descriptors.pop().ok_or(io::ErrorKind::InvalidData)?;
            Ok(Some((from_file(file)?, descriptors)))
        }
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn pair() -> (Channel, Channel) {
        let (a, b) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .expect("a pair");
        (Channel::new(a).expect("a channel"), Channel::new(b).expect("a channel"))
    }

    #[tokio::test]
    async fn messages_of_every_size_arrive_with_their_descriptors() {
        let (a, b) = pair();
        let file = tempfile::tempfile().expect("a file");
        for size in [0, 1, INLINE_BYTES_MAX, INLINE_BYTES_MAX + 1, 3 << 20] {
            let message: Vec<u8> = (0..size).map(|at| at as u8).collect();
            a.send(&message, &[file.as_fd(), file.as_fd()]).await.expect("sent");
            let (got, descriptors) = b.receive().await.expect("received").expect("a message");
            assert!(got == message, "{size} bytes");
            assert_eq!(descriptors.len(), 2);
        }
        drop(a);
        assert!(b.receive().await.expect("the end").is_none());
    }

    #[tokio::test]
    async fn too_many_descriptors_are_not_sent() {
        let (a, _b) = pair();
        let file = tempfile::tempfile().expect("a file");
        let many = vec![file.as_fd(); DESCRIPTORS_MAX + 1];
        a.send(b"x", &many).await.expect_err("too many");
    }
}
