//! The least kernel work that a sandbox and a command need, for comparison in the benchmark.
//!
//! Uses the same namespaces, layers and program, but no daemon, database, limits or ids.
//! Runs in its own single-threaded process, since it forks.

use std::ffi::CStr;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::mount::{MountAttrFlags, MountPropagationFlags, UnmountFlags, mount_change, unmount};
use rustix::process::{Pid, WaitOptions, fchdir, pivot_root, waitpid};

use crate::storage::host_image::USR;
use crate::sys::mounts::{attach, attach_onto, mount};
use crate::sys::{self, CloneOptions, Cloned};

/// What is executed.
const TRUE: &str = "/bin/true";

/// Times directories, namespaces, two overlays, `/proc`, a change of root, `/bin/true` and its end.
/// `image` is a generation of the image `host`; `scratch` a directory on the file system that sandboxes use.
pub fn create(image: &Path, scratch: &Path) -> io::Result<Duration> {
    create_many(image, scratch, 1)
}

/// Times `count` creations that are begun one after the other without waiting, until the last has ended.
pub fn create_many(image: &Path, scratch: &Path, count: usize) -> io::Result<Duration> {
    let began = Instant::now();
    let mut children = Vec::new();
    for number in 0..count {
        let dir = scratch.join(format!("floor-{number}"));
        for name in ["", "root", "root-work", "usr", "usr-work", "new"] {
            std::fs::create_dir(dir.join(name))?;
        }
        children.push(start(spaces(), || enter(image, &dir))?);
    }
    children.into_iter().try_for_each(end)?;
    let took = began.elapsed();
    for number in 0..count {
        std::fs::remove_dir_all(scratch.join(format!("floor-{number}")))?;
    }
    Ok(took)
}

/// Times fork, `/bin/true` and its end.
pub fn command() -> io::Result<Duration> {
    let began = Instant::now();
    end(start(0, execute_true)?)?;
    Ok(began.elapsed())
}

fn spaces() -> i32 {
    libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS | libc::CLONE_NEWNET
}

fn start(flags: i32, child: impl FnOnce() -> io::Result<()>) -> io::Result<Pid> {
    match sys::clone_process(&CloneOptions { flags, cgroup: None })? {
        Cloned::Parent { pid } => {
            Pid::from_raw(pid as i32).ok_or_else(|| io::Error::other("a child without a pid"))
        }
        Cloned::Child => {
            let failed = child();
            sys::exit_now(failed.err().and_then(|e| e.raw_os_error()).unwrap_or(libc::EIO))
        }
    }
}

fn end(pid: Pid) -> io::Result<()> {
    let status = waitpid(Some(pid), WaitOptions::empty())?.and_then(|(_, status)| status.exit_status());
    match status {
        Some(0) => Ok(()),
        Some(errno) => Err(io::Error::from_raw_os_error(errno)),
        None => Err(io::Error::other("the floor's child was killed")),
    }
}

fn enter(image: &Path, dir: &Path) -> io::Result<()> {
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let root = overlay(&text(&image.join("root")), dir, "root")?;
    attach(&root, CWD, text(&dir.join("new")))?;
    let usr = overlay(&format!("{}:{USR}", text(&image.join("usr"))), dir, "usr")?;
    attach_at(&root, &usr, "usr")?;
    attach_at(&root, &mount("proc", &[], MountAttrFlags::MOUNT_ATTR_NOSUID)?, "proc")?;
    fchdir(&root)?;
    pivot_root(".", ".")?;
    unmount(".", UnmountFlags::DETACH)?;
    execute_true()
}

fn overlay(lower: &str, dir: &Path, name: &str) -> io::Result<std::os::fd::OwnedFd> {
    let (upper, work) = (dir.join(name), dir.join(format!("{name}-work")));
    let options =
        [("lowerdir", lower), ("upperdir", &*upper.to_string_lossy()), ("workdir", &*work.to_string_lossy())];
    mount("overlay", &options, MountAttrFlags::MOUNT_ATTR_NODEV)
}

fn attach_at(root: &std::os::fd::OwnedFd, tree: &std::os::fd::OwnedFd, name: &str) -> io::Result<()> {
    let place = openat(root, name, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    attach_onto(tree, &place)
}

fn execute_true() -> io::Result<()> {
    let program = openat(CWD, TRUE, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    const ARGUMENTS: [&CStr; 1] = [c"true"];
    Err(sys::execute(program.as_fd(), &ARGUMENTS, &[]))
}
