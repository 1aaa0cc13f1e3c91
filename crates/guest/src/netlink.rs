//! How many netlink sockets the sandbox may have.
//!
//! The kernel charges data that waits in a netlink socket to no cgroup, and no limit of the kernel counts these
//! sockets. So a system-call filter, which every process of the sandbox inherits, makes each `socket(AF_NETLINK, …)`
//! wait for init, and init refuses what is beyond [`SOCKETS_MAX`]. Init only decides: the calling process opens the
//! socket itself, so that init never waits for a guest.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::sys::{self, Verdict};

/// Netlink sockets of a sandbox. A program has one or two at a time, and only while it lists interfaces; full of
/// data, each holds about 200 KiB with the usual `net.core.rmem_default`.
const SOCKETS_MAX: usize = 128;
/// Calls decided in one turn, before everything else gets a turn.
const CALLS_PER_TURN: usize = 32;
/// How long an allowed call counts as a socket that the kernel does not show yet, unless its thread has ended or has
/// called again.
const OPENING_MS: u64 = 2_000;

/// Decides about calls that open netlink sockets.
pub struct Netlink {
    calls: OwnedFd,
    opening: Vec<Opening>,
}

/// A call that was allowed.
struct Opening {
    thread: i32,
    since_ms: u64,
}

impl Netlink {
    /// From now on, calls of init's children wait for [`Self::decide`]. `None` if a filter outside of the sandbox
    /// already decides about calls, since the kernel allows one such filter; netlink sockets are refused then.
    pub fn watch() -> io::Result<Option<Self>> {
        Ok(sys::hold_netlink_calls()?.map(|calls| Self { calls, opening: Vec::new() }))
    }

    /// Answers the calls that wait. `true` if there may be more of them.
    pub fn decide(&mut self, now_ms: u64) -> bool {
        for _ in 0..CALLS_PER_TURN {
            if !self.has_waiting() {
                return false;
            }
            // A caller may have been killed while it waited.
            let Ok(call) = sys::next_call(self.calls.as_fd()) else { continue };
            let verdict = self.verdict(call.thread, now_ms);
            if sys::answer_call(self.calls.as_fd(), &call, verdict).is_ok() && verdict == Verdict::Allow {
                self.opening.push(Opening { thread: call.thread, since_ms: now_ms });
            }
        }
        true
    }

    fn has_waiting(&self) -> bool {
        let mut watched = [PollFd::new(&self.calls, PollFlags::IN)];
        poll(&mut watched, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    fn verdict(&mut self, thread: i32, now_ms: u64) -> Verdict {
        self.opening.retain(|call| {
            call.thread != thread
                && now_ms.saturating_sub(call.since_ms) < OPENING_MS
                && is_alive(call.thread)
        });
        // Without the count nothing is bounded, so nothing is opened.
        let open = std::fs::read_to_string("/proc/net/protocols").ok().and_then(|table| sockets_in(&table));
        match open {
            Some(open) if open + self.opening.len() < SOCKETS_MAX => Verdict::Allow,
            _ => Verdict::Refuse,
        }
    }
}

impl AsFd for Netlink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.calls.as_fd()
    }
}

fn is_alive(thread: i32) -> bool {
    sys::kill(thread, 0).is_ok()
}

/// The number of netlink sockets in a table of protocols, which shows those of the reader's own network namespace.
fn sockets_in(table: &str) -> Option<usize> {
    let row = table.lines().find(|line| line.split_whitespace().next() == Some("NETLINK"))?;
    // name, size of a socket, sockets
    row.split_whitespace().nth(2)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_counted_in_the_table_of_protocols() {
        let table = "protocol  size sockets  memory press maxhdr  slab module     cl co\n\
                     UNIX      1152     21      -1   NI       0   yes  kernel      n  n\n\
                     NETLINK   1096      7      -1   NI       0   no   kernel      n  n\n";
        assert_eq!(sockets_in(table), Some(7));
        assert_eq!(sockets_in("protocol  size sockets\n"), None);
        assert_eq!(sockets_in("NETLINK\n"), None);
    }
}
