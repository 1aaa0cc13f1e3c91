//! What the kernel watches for init, and how events are mapped back.

use std::os::fd::{AsFd, OwnedFd};

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use wire::guest::Handle;

/// Events read at once.
const EVENTS_MAX: usize = 64;

/// Something that is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watched {
    /// The socket on which the daemon connects.
    Listener,
    /// Children that ended.
    Children,
    /// The daemon.
    Connection,
    /// The daemon, while the socket has no room for what init has to send.
    FullConnection,
    /// A child that has not executed its program yet.
    Report(Handle),
    Stdin(Handle),
    Stdout(Handle),
    Stderr(Handle),
    /// Both directions of a terminal.
    Terminal(Handle),
    /// Calls of guests that wait for init's decision.
    Netlink,
}

/// What happened to it.
#[derive(Debug, Clone, Copy)]
pub struct Happening {
    pub to: Watched,
    pub readable: bool,
    pub writable: bool,
    /// The other side is closed, at least in one direction.
    pub hung_up: bool,
}

/// The kernel's watch. Closing a descriptor removes it.
pub struct Watch {
    epoll: OwnedFd,
    events: Vec<Event>,
}

impl Watch {
    pub fn new() -> Result<Self, Errno> {
        Ok(Self { epoll: epoll::create(CreateFlags::CLOEXEC)?, events: Vec::with_capacity(EVENTS_MAX) })
    }

    /// Watches a descriptor for as long as it is open. Each change is reported once (EPOLLET), in both directions.
    /// Pipes that commands write to report only the first; see [`Self::again`].
    pub fn add(&self, descriptor: impl AsFd, watched: Watched) -> Result<(), Errno> {
        epoll::add(&self.epoll, descriptor, EventData::new_u64(pack(watched)), flags(watched))
    }

    /// Asks for one more report, or for other events. What has come since is reported at once.
    ///
    /// Init re-arms pipes after it has read them until they were empty. Otherwise every write to a watched pipe would
    /// wake init, whether it was empty or not, and even while there is no room for more output: a command that writes
    /// 4 KiB at a time would wake init for each write.
    pub fn again(&self, descriptor: impl AsFd, watched: Watched) -> Result<(), Errno> {
        epoll::modify(&self.epoll, descriptor, EventData::new_u64(pack(watched)), flags(watched))
    }

    /// Waits until something happens, or for this many milliseconds. `None` means no limit.
    pub fn wait(&mut self, timeout_ms: Option<u64>) -> Result<Vec<Happening>, Errno> {
        let timeout = timeout_ms.map(|length| Timespec {
            tv_sec: (length / 1_000) as i64,
            tv_nsec: ((length % 1_000) * 1_000_000) as _,
        });
        self.events.clear();
        match epoll::wait(&self.epoll, spare_capacity(&mut self.events), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        let happenings = self.events.iter().filter_map(|event| {
            let (data, flags) = (event.data, event.flags);
            Some(Happening {
                to: unpack(data.u64())?,
                readable: flags
                    .intersects(EventFlags::IN | EventFlags::HUP | EventFlags::RDHUP | EventFlags::ERR),
                writable: flags.intersects(EventFlags::OUT | EventFlags::HUP | EventFlags::ERR),
                hung_up: flags.intersects(EventFlags::HUP | EventFlags::ERR),
            })
        });
        Ok(happenings.collect())
    }
}

/// The events to watch for.
fn flags(watched: Watched) -> EventFlags {
    EventFlags::ET
        | match watched {
            Watched::Listener | Watched::Children | Watched::Report(_) | Watched::Netlink => EventFlags::IN,
            Watched::Stdout(_) | Watched::Stderr(_) => EventFlags::IN | EventFlags::ONESHOT,
            Watched::Stdin(_) => EventFlags::OUT,
            Watched::Terminal(_) => EventFlags::IN | EventFlags::OUT,
            Watched::Connection => EventFlags::IN | EventFlags::RDHUP,
            Watched::FullConnection => EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP,
        }
}

fn pack(watched: Watched) -> u64 {
    let (kind, handle) = match watched {
        Watched::Listener => (0, 0),
        Watched::Children => (1, 0),
        Watched::Connection => (2, 0),
        Watched::Report(handle) => (3, handle.0),
        Watched::Stdin(handle) => (4, handle.0),
        Watched::Stdout(handle) => (5, handle.0),
        Watched::Stderr(handle) => (6, handle.0),
        Watched::Terminal(handle) => (7, handle.0),
        Watched::FullConnection => (8, 0),
        Watched::Netlink => (9, 0),
    };
    (kind << 32) | u64::from(handle)
}

fn unpack(data: u64) -> Option<Watched> {
    let handle = Handle(data as u32);
    Some(match data >> 32 {
        0 => Watched::Listener,
        1 => Watched::Children,
        2 => Watched::Connection,
        3 => Watched::Report(handle),
        4 => Watched::Stdin(handle),
        5 => Watched::Stdout(handle),
        6 => Watched::Stderr(handle),
        7 => Watched::Terminal(handle),
        8 => Watched::FullConnection,
        9 => Watched::Netlink,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_packed_is_unpacked() {
        for handle in [Handle(0), Handle(7), Handle(u32::MAX)] {
            for watched in [
                Watched::Listener,
                Watched::Children,
                Watched::Connection,
                Watched::FullConnection,
                Watched::Netlink,
                Watched::Report(handle),
                Watched::Stdin(handle),
                Watched::Stdout(handle),
                Watched::Stderr(handle),
                Watched::Terminal(handle),
            ] {
                assert_eq!(unpack(pack(watched)), Some(watched));
            }
        }
        assert_eq!(unpack(u64::MAX), None);
    }
}
