//! The file that holds a btrfs: created from the seed, attached to a loop device, grown, mounted.
//!
//! The file is allocated in full, and none of its blocks is ever released (`nodiscard`). Otherwise a full disk of the
//! host would make writes fail, and a btrfs whose device fails becomes read-only for all sandboxes.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FlockOperation, Mode, OFlags, RenameFlags, fallocate, flock, openat,
    renameat_with, statat,
};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string,
    fsmount, fsopen,
};
use wire::launch::{STORE_BYTES_MIN, StoreKind};

use super::{SANDBOXES, StoragePoolError, StoreConfig, VOLUMES, cannot, open_if_there, remove_file, seed};
use crate::storage::directories::{DIRECTORY, names};
use crate::sys::loops;

/// The file with the btrfs, in the data directory.
pub const IMAGE: &str = "store.img";
/// The same while it is being created.
pub(super) const UNFINISHED_IMAGE: &str = "store.img.unfinished";
/// By default a store takes this part of the free space on the data directory's file system,
pub const SIZE_AUTO_PART: u64 = 4;
/// not less than this, since a few sandboxes fill less; with less space there is no store,
pub const SIZE_AUTO_MIN: u64 = 2 << 30;
/// and not more than this, since users do not expect more to be taken from a large disk.
pub const SIZE_AUTO_MAX: u64 = 64 << 30;
/// A store's size is a multiple of this.
const SIZE_STEP: u64 = 1 << 20;
/// What stays free for the host when a store is created or grows.
const HOST_FREE_MIN: u64 = 1 << 30;
/// How long the previous launcher may take to release the mounted file.
const ATTACH_DEADLINE: Duration = Duration::from_secs(20);
/// The time between two attempts.
const ATTACH_STEP: Duration = Duration::from_millis(2);
/// The most devices that are checked.
const LOOPS_MAX: u32 = 4096;
/// The default size of a store on a file system with this much free space. `None` if there is too little.
pub fn size_auto(available_bytes: u64) -> Option<u64> {
    let size = (available_bytes / SIZE_AUTO_PART).min(SIZE_AUTO_MAX) / SIZE_STEP * SIZE_STEP;
    (size >= SIZE_AUTO_MIN).then_some(size)
}

fn available(data: BorrowedFd<'_>) -> Result<u64, StoragePoolError> {
    let found = rustix::fs::fstatvfs(data).map_err(cannot("see how much is free"))?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Creates the file, and returns its size. It gets its name once it holds a file system.
pub(super) fn make_image(
    data_dir: &Path,
    data: BorrowedFd<'_>,
    config: &StoreConfig,
) -> Result<u64, StoragePoolError> {
    let refused =
        |doing: &str, why: String| StoragePoolError { doing: doing.into(), source: io::Error::other(why) };
    let doing = "make a store of kind `loop`";
    let available = available(data)?;
    let size = match config.size_bytes {
        Some(size) => size / SIZE_STEP * SIZE_STEP,
        None => size_auto(available).ok_or_else(|| {
            let needed = SIZE_AUTO_MIN * SIZE_AUTO_PART;
            refused(doing, format!("{available} bytes are free; a store of default size needs {needed}"))
        })?,
    };
    if size < STORE_BYTES_MIN || available < size.saturating_add(HOST_FREE_MIN.min(size)) {
        let why =
            format!("a store of {size} bytes does not fit into {available} free bytes with room to spare");
        return Err(refused(doing, why));
    }
    let path = data_dir.join(UNFINISHED_IMAGE);
    let named = format(&path, size).and_then(|()| {
        renameat_with(data, UNFINISHED_IMAGE, data, IMAGE, RenameFlags::NOREPLACE)
            .map_err(cannot("name the store's file"))
    });
    if named.is_err() {
        remove_file(data, UNFINISHED_IMAGE).map_err(cannot("remove an unfinished store"))?;
    }
    named.map(|()| size)
}

/// Writes an empty file system, which grows to the file's size when it is first mounted.
fn format(path: &Path, size: u64) -> Result<(), StoragePoolError> {
    let open = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let file = open.map_err(cannot("make the store's file"))?;
    seed::write(&file).map_err(cannot("write an empty file system to the store's file"))?;
    fallocate(&file, FallocateFlags::empty(), 0, size).map_err(cannot("allocate the store's file"))?;
    file.sync_all().map_err(cannot("write the store's file to the disk"))
}

/// Removes a store of kind `loop` that is no longer wanted, if it is empty.
pub(super) fn remove_image(
    data_dir: &Path,
    data: BorrowedFd<'_>,
    wanted: StoreKind,
) -> Result<(), StoragePoolError> {
    let device = attach_image(data_dir)?;
    let (_tree, root) = mount_device(&device)?;
    let mut held = [0, 0];
    for (count, name) in held.iter_mut().zip([SANDBOXES, VOLUMES]) {
        if let Some(dir) = open_if_there(root.as_fd(), name).map_err(cannot("look into the store"))? {
            *count = names(dir.as_fd()).map_err(cannot("look into the store"))?.len();
        }
    }
    let [sandboxes, volumes] = held;
    if sandboxes + volumes > 0 {
        let doing = format!("use a store of kind `{}`", wanted.word());
        let why = format!(
            "this data directory has one of kind `loop` with {sandboxes} sandboxes and {volumes} volumes in it; \
             delete them first, or keep it"
        );
        return Err(StoragePoolError { doing, source: io::Error::other(why) });
    }
    remove_file(data, IMAGE).map_err(cannot("remove the store's file"))
}

pub(super) struct Device {
    path: String,
    pub(super) file: OwnedFd,
}

/// The loop device of the store's file, attached if needed.
pub(super) fn attach_image(data_dir: &Path) -> Result<Device, StoragePoolError> {
    let doing = "attach the store's file";
    let deadline = Instant::now() + ATTACH_DEADLINE;
    let file = File::options().read(true).write(true).open(data_dir.join(IMAGE)).map_err(cannot(doing))?;
    let facts = file.metadata().map_err(cannot(doing))?;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                if let Some(device) = attach_to_free(&file).map_err(cannot(doing))? {
                    return Ok(device);
                }
            }
            Err(Errno::WOULDBLOCK) => {
                if let Some(device) = device_of((facts.dev(), facts.ino())).map_err(cannot(doing))? {
                    return Ok(device);
                }
            }
            Err(e) => return Err(cannot(doing)(e)),
        }
        // Another process took the free device, or the device of the file is being detached.
        if Instant::now() >= deadline {
            let why = "the file is locked, but no loop device has it; does another program use it?";
            return Err(cannot(doing)(io::Error::other(why)));
        }
        std::thread::sleep(ATTACH_STEP);
    }
}

/// `None` if another process took the device first.
fn attach_to_free(file: &File) -> io::Result<Option<Device>> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let control = openat(CWD, "/dev/loop-control", flags, Mode::empty())?;
    let path = format!("/dev/loop{}", loops::free_number(control.as_fd())?);
    let device = openat(CWD, path.as_str(), flags, Mode::empty())?;
    match loops::attach(device.as_fd(), file.as_fd()) {
        Ok(()) => Ok(Some(Device { path, file: device })),
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => Ok(None),
        Err(e) => Err(e),
    }
}

/// The device that a file is attached to. While it is open here, it stays attached.
fn device_of(wanted: (u64, u64)) -> io::Result<Option<Device>> {
    for number in 0..LOOPS_MAX {
        match statat(CWD, format!("/sys/block/loop{number}"), AtFlags::empty()) {
            Ok(_) => {}
            Err(Errno::NOENT) => continue,
            Err(e) => return Err(e.into()),
        }
        let path = format!("/dev/loop{number}");
        let device = match openat(CWD, path.as_str(), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
            Ok(device) => device,
            // No device node, no file attached, or opened exclusively by another process.
            Err(Errno::NOENT | Errno::NXIO | Errno::BUSY | Errno::ACCESS | Errno::ROFS) => continue,
            Err(e) => return Err(e.into()),
        };
        if loops::file_behind(device.as_fd())? == Some(wanted) {
            return Ok(Some(Device { path, file: device }));
        }
    }
    Ok(None)
}

pub(super) fn grow(data_dir: &Path, device: &Device, config: &StoreConfig) -> Result<(), StoragePoolError> {
    let Some(wanted) = config.size_bytes.map(|size| size / SIZE_STEP * SIZE_STEP) else { return Ok(()) };
    let file =
        File::options().write(true).open(data_dir.join(IMAGE)).map_err(cannot("open the store's file"))?;
    let size = file.metadata().map_err(cannot("look at the store's file"))?.len();
    if wanted <= size {
        return Ok(());
    }
    let available = available(file.as_fd())?;
    if available < (wanted - size).saturating_add(HOST_FREE_MIN.min(wanted)) {
        let why = format!("{available} bytes are free");
        return Err(cannot(format!("grow the store to {wanted} bytes"))(io::Error::other(why)));
    }
    fallocate(&file, FallocateFlags::empty(), 0, wanted)
        .map_err(cannot("allocate more for the store's file"))?;
    loops::take_new_size(device.file.as_fd()).map_err(cannot("grow the store's device"))
}

/// Mounts the file system. If it is mounted already, the kernel returns the same file system.
pub(super) fn mount_device(device: &Device) -> Result<(OwnedFd, OwnedFd), StoragePoolError> {
    let doing = || format!("mount the store from `{}`", device.path);
    let deadline = Instant::now() + ATTACH_DEADLINE;
    loop {
        match try_mount(&device.path) {
            Ok(tree) => {
                // The descriptor of fsmount(2) only refers to the mount; ioctls need an open directory.
                let root = openat(&tree, ".", DIRECTORY, Mode::empty()).map_err(cannot(doing()))?;
                return Ok((tree, root));
            }
            // The previous launcher is just being unmounted from it.
            Err(Errno::BUSY) if Instant::now() < deadline => std::thread::sleep(ATTACH_STEP),
            Err(e) => return Err(cannot(doing())(e)),
        }
    }
}

fn try_mount(device: &str) -> Result<OwnedFd, Errno> {
    let context = fsopen("btrfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "source", device)?;
    fsconfig_set_flag(&context, "nodiscard")?;
    fsconfig_set_flag(&context, "skip_balance")?;
    // A guest may ask btrfs to compress its files (the attribute `btrfs.compression`), which threads of the kernel would
    // do, outside of every cpu limit. Files without checksums cannot be compressed; they share blocks as others do.
    fsconfig_set_flag(&context, "nodatasum")?;
    fsconfig_create(&context)?;
    let flags = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOATIME;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, flags)
}
