//! Finds the first process of a sandbox from the host, and through it the sandbox's network namespace.
//!
//! Init is the only process directly in the sandbox's cgroup; the kernel and not init reports which one it is. A
//! process id may be reused by the time it is checked, so the process is held by its directory of `/proc` and checked
//! once more.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags, fstat, openat};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use wire::SandboxId;

use crate::ns::cgroup::Cgroups;

/// The network namespace, in a process's directory of `/proc`.
const NAMESPACE: &str = "ns/net";

/// The first process of a sandbox.
pub(super) struct Init {
    /// Its directory of `/proc`. It keeps referring to that process even after the process has ended.
    proc: OwnedFd,
    /// The kernel's number of its network namespace.
    pub namespace: u64,
}

impl Init {
    /// `None` if the sandbox has no process, or one that is not in its namespace yet.
    pub fn find(groups: &Cgroups, sandbox: SandboxId) -> io::Result<Option<Self>> {
        let Some(&pid) = groups.processes(sandbox)?.first() else { return Ok(None) };
        let proc = match open_in(CWD, &format!("/proc/{pid}"), OFlags::DIRECTORY) {
            Ok(proc) => proc,
            Err(e) if is_gone(&e) => return Ok(None),
            Err(e) => return Err(e),
        };
        if !groups.processes(sandbox)?.contains(&pid) {
            return Ok(None);
        }
        let namespace = match open_in(proc.as_fd(), NAMESPACE, OFlags::empty()) {
            Ok(namespace) => number(&namespace)?,
            Err(e) if is_gone(&e) => return Ok(None),
            Err(e) => return Err(e),
        };
        // A process that is being launched begins in the launcher's namespace, which is the host's.
        let own = number(&open_in(CWD, &format!("/proc/self/{NAMESPACE}"), OFlags::empty())?)?;
        Ok((namespace != own).then_some(Self { proc, namespace }))
    }

    /// Moves the calling thread into the sandbox's network namespace.
    pub fn join_network(&self) -> io::Result<()> {
        let namespace = open_in(self.proc.as_fd(), NAMESPACE, OFlags::empty())?;
        if number(&namespace)? != self.namespace {
            return Err(io::Error::other("the sandbox's network namespace is another one now"));
        }
        Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
    }

    /// A file in its directory of `/proc`, at most `most` bytes of it.
    pub fn read(&self, name: &str, most: usize) -> io::Result<String> {
        use std::io::Read;
        let file = std::fs::File::from(open_in(self.proc.as_fd(), name, OFlags::empty())?);
        let mut text = String::new();
        file.take(most as u64).read_to_string(&mut text)?;
        Ok(text)
    }
}

fn open_in(dir: rustix::fd::BorrowedFd<'_>, name: &str, kind: OFlags) -> io::Result<OwnedFd> {
    Ok(openat(dir, name, OFlags::RDONLY | OFlags::CLOEXEC | kind, Mode::empty())?)
}

fn number(namespace: &OwnedFd) -> io::Result<u64> {
    Ok(fstat(namespace)?.st_ino)
}

/// Whether a process ended while it was being read.
pub(super) fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}
