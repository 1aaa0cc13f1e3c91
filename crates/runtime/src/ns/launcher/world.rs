//! Sets the launcher up before it takes requests: its lock, its mounts, and the mounts that all sandboxes share.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{
    CWD, MemfdFlags, Mode, OFlags, SealFlags, fchmod, fcntl_add_seals, memfd_create, mkdirat, mknodat,
    openat, symlinkat,
};
use rustix::io::Errno;
use rustix::mount::{MountAttrFlags, MountPropagationFlags, UnmountFlags, mount_change, unmount};
use rustix::thread::UnshareFlags;

use crate::ns::enter;
use crate::ns::lock::lock_file;
use crate::ns::plan::Shared;
use crate::storage::host_image;
use crate::storage::places::Places;
use crate::storage::stage::{
    STAGE_EMPTY_DIRECTORY, STAGE_EMPTY_FILE, STAGE_LAYERS, STAGE_ROOT, STAGE_WRITABLE, layer_name,
};
use crate::sys;
use crate::sys::mounts::{attach, attach_onto, mount};

/// Init, built by this crate's build script.
static INIT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/shoal-init"));

/// How long walkers of the previous launcher, which are killed with it, may take to end.
const LOCK_DEADLINE: Duration = Duration::from_secs(20);

/// Waits until the previous launcher and all its walkers have ended: walkers inherit the lock; init, which is executed, does not.
/// Otherwise a launch of the old launcher could appear after the new daemon has listed the sandboxes.
pub(super) fn lock(data_dir: &Path) -> io::Result<File> {
    lock_file(&data_dir.join("launcher.lock"), LOCK_DEADLINE)
}

/// Init in memory: sealed against changes, and executable but not readable for guests, so that guests cannot trace it either
/// (CVE-2019-5736).
pub(super) fn embedded_init() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = memfd_create("shoal-init", flags)?;
    File::from(memory.try_clone()?).write_all(INIT)?;
    fchmod(&memory, Mode::from_raw_mode(0o111))?;
    fcntl_add_seals(&memory, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    // A file that is open for writing cannot be executed, so it is opened again and the first descriptor closed.
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    Ok(openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// The program of this process, by its open file: its path may refer to another version by now.
pub(super) fn own_program() -> io::Result<OwnedFd> {
    Ok(openat(CWD, "/proc/self/exe", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
}

/// The mount namespace of this process.
pub(super) fn mount_namespace() -> io::Result<OwnedFd> {
    Ok(openat(CWD, "/proc/self/ns/mnt", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Gives the launcher its own mount namespace: later mounts of the host appear in it, its own mounts do not leave it.
pub(super) fn own_mounts() -> io::Result<()> {
    sys::unshare(UnshareFlags::NEWNS)?;
    Ok(mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?)
}

/// Every new sandbox copies the launcher's mounts and discards them, so fewer mounts are quicker. These stay: the root,
/// `/proc`, and mounts that hold the data directory or a source of the image `host`.
pub(super) fn drop_foreign_mounts(data_dir: &Path) -> io::Result<()> {
    let mountinfo = std::fs::read_to_string("/proc/self/mountinfo")?;
    let points: Vec<&str> = mountinfo.lines().filter_map(|line| line.split(' ').nth(4)).collect();
    // The latest mount is on top, so it is removed first.
    for point in points.into_iter().rev() {
        let path = Path::new(point);
        let needed = point == "/"
            || path == Path::new("/proc")
            || data_dir.starts_with(path)
            || host_image::SOURCES.iter().any(|source| Path::new(source).starts_with(path))
            // Mount points with escaped characters are rare; keeping them is harmless.
            || point.contains('\\');
        if !needed {
            match unmount(point, UnmountFlags::DETACH) {
                // The mount was below one that is gone.
                Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
    Ok(())
}

/// `/dev` for all sandboxes: device nodes made by the host's root, on a mount that allows them and is read-only.
pub(super) fn shared_dev() -> io::Result<OwnedFd> {
    let flags = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let dev = mount("tmpfs", &[("mode", "0755"), ("size", "64k")], flags)?;
    for (name, minor) in [("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9)] {
        let device = rustix::fs::makedev(1, minor);
        mknodat(&dev, name, rustix::fs::FileType::CharacterDevice, Mode::from_raw_mode(0o666), device)?;
    }
    let tty = rustix::fs::makedev(5, 0);
    mknodat(&dev, "tty", rustix::fs::FileType::CharacterDevice, Mode::from_raw_mode(0o666), tty)?;
    for (to, name) in [
        ("pts/ptmx", "ptmx"),
        ("/proc/self/fd", "fd"),
        ("/proc/self/fd/0", "stdin"),
        ("/proc/self/fd/1", "stdout"),
        ("/proc/self/fd/2", "stderr"),
    ] {
        symlinkat(to, &dev, name)?;
    }
    for name in ["pts", "shm"] {
        mkdirat(&dev, name, Mode::from_raw_mode(0o755))?;
    }
    sys::set_mount_attributes(dev.as_fd(), libc::MOUNT_ATTR_RDONLY, None, false)?;
    Ok(dev)
}

/// `/sys` for all sandboxes: only what programs read about processors.
pub(super) fn harmless_sys() -> io::Result<OwnedFd> {
    let flags = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NOEXEC
        | MountAttrFlags::MOUNT_ATTR_NODEV;
    let sys = mount("tmpfs", &[("mode", "0755"), ("size", "64k")], flags)?;
    for name in
        ["devices", "devices/system", "devices/system/cpu", "fs", "fs/cgroup", "kernel", "class", "block"]
    {
        mkdirat(&sys, name, Mode::from_raw_mode(0o755))?;
    }
    // Copied, not bound: these few files do not change while a machine runs, and a bind would bring sysfs in.
    for name in ["online", "possible", "present"] {
        let from = format!("/sys/devices/system/cpu/{name}");
        let Ok(text) = std::fs::read(&from) else { continue };
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
        let file = openat(&sys, format!("devices/system/cpu/{name}"), flags, Mode::from_raw_mode(0o444))?;
        rustix::io::write(&file, &text)?;
    }
    sys::set_mount_attributes(sys.as_fd(), libc::MOUNT_ATTR_RDONLY, None, false)?;
    Ok(sys)
}

/// The staging area: a small read-only file system with a mount point for every layer. It is the launcher's working directory,
/// so each clone has its own copy as its working directory.
pub(super) fn make_stage(places: &Places, shared: [(Shared, OwnedFd); 2]) -> io::Result<()> {
    let flags = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NOEXEC
        | MountAttrFlags::MOUNT_ATTR_NODEV;
    let stage = mount("tmpfs", &[("mode", "0755"), ("size", "256k")], flags)?;
    for number in 0..STAGE_LAYERS {
        mkdirat(&stage, layer_name(number), Mode::from_raw_mode(0o555))?;
    }
    let fixed = [STAGE_ROOT, STAGE_WRITABLE, STAGE_EMPTY_DIRECTORY];
    let shared_names = shared.iter().map(|(shared, _)| enter::stage_name(*shared));
    for name in fixed.into_iter().chain(shared_names) {
        mkdirat(&stage, name, Mode::from_raw_mode(0o555))?;
    }
    let create = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
    openat(&stage, STAGE_EMPTY_FILE, create, Mode::from_raw_mode(0o444))?;
    sys::set_mount_attributes(stage.as_fd(), libc::MOUNT_ATTR_RDONLY, None, false)?;
    let onto =
        openat(CWD, places.stage(), OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    attach_onto(&stage, &onto)?;
    rustix::process::fchdir(&stage)?;
    for (shared, tree) in shared {
        attach(&tree, CWD, enter::stage_name(shared))?;
    }
    Ok(())
}
