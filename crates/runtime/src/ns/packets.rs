//! Packets between daemon and launcher, with the descriptors that come along.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use wire::launch::DESCRIPTORS_MAX;

/// Sends one packet.
pub(super) fn send(
    socket: impl AsFd,
    packet: &[u8],
    descriptors: &[OwnedFd],
    flags: SendFlags,
) -> rustix::io::Result<()> {
    assert!(descriptors.len() <= DESCRIPTORS_MAX, "each request has its own, lower bound");
    let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() {
        let pushed = ancillary.push(SendAncillaryMessage::ScmRights(&borrowed));
        assert!(pushed, "the space is for as many");
    }
    sendmsg(socket, &[IoSlice::new(packet)], &mut ancillary, flags).map(|_| ())
}

/// Receives one packet: its length, and the descriptors. They are closed when a program is executed.
pub(super) fn receive(
    socket: impl AsFd,
    packet: &mut [u8],
    flags: RecvFlags,
) -> rustix::io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(packet)], &mut ancillary, flags)?;
    let descriptors = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok((received.bytes, descriptors.flatten().collect()))
}

/// The descriptors of an answer that must have this many.
pub(super) fn exactly(descriptors: Vec<OwnedFd>, count: usize) -> io::Result<Vec<OwnedFd>> {
    match descriptors.len() == count {
        true => Ok(descriptors),
        false => {
            Err(io::Error::other(format!("{count} descriptors were expected, got {}", descriptors.len())))
        }
    }
}
