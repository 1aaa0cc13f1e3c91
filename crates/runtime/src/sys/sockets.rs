//! Options of sockets that no safe crate wraps.

use std::io;
use std::mem::size_of_val;
use std::os::fd::{AsRawFd, BorrowedFd};

use libc::{c_int, c_long, socklen_t};
use wire::network::Family;

use super::check;

/// Lets a socket take connections that were meant for other addresses. Needs CAP_NET_ADMIN over the network namespace.
pub fn set_transparent(socket: BorrowedFd<'_>, family: Family) -> io::Result<()> {
    match family {
        Family::V4 => set(socket, libc::SOL_IP, libc::IP_TRANSPARENT, 1),
        Family::V6 => set(socket, libc::SOL_IPV6, libc::IPV6_TRANSPARENT, 1),
    }
}

fn set(socket: BorrowedFd<'_>, level: c_int, option: c_int, value: c_int) -> io::Result<()> {
    // SAFETY: the kernel reads `value`, whose size is passed, and writes nothing.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of_val(&value) as socklen_t,
        )
    };
    check(c_long::from(result))
}
