//! Attempts, for checks that only an attempt can answer: in a child, which leaves nothing behind.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::process::{Pid, WaitOptions, waitpid};

use crate::ns::{ranges, slots};
use crate::sys::{self, Cloned};

pub(super) const NEEDS_ROOT: &str = "only root can find out";
pub(super) const AS_ROOT: &str = "run `sudo shoal doctor`";

/// Runs `work` in a new process, whose effects end with it.
pub(super) fn in_child(work: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    let child = match sys::fork_process()? {
        Cloned::Parent { pid } => Pid::from_raw(pid as i32).expect("a child has a positive pid"),
        Cloned::Child => sys::exit_now(match work() {
            Ok(()) => 0,
            Err(error) => error.raw_os_error().unwrap_or(libc::EIO),
        }),
    };
    let status = waitpid(Some(child), WaitOptions::empty())?.and_then(|(_, status)| status.exit_status());
    match status {
        Some(0) => Ok(()),
        Some(errno) => Err(io::Error::from_raw_os_error(errno)),
        None => Err(io::Error::other("the kernel ended the try")),
    }
}

/// Ids for a short attempt: the last range of all, which is assigned last.
pub(super) fn probe_base() -> u32 {
    ranges::END - slots::IDS
}

pub(super) fn open(path: &Path) -> io::Result<OwnedFd> {
    Ok(openat(CWD, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

pub(super) fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}
