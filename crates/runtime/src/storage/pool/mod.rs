//! The store: where the writable files of sandboxes, and volumes, are kept.
//!
//! ```text
//! <data>/
//!   store.img               kind `loop`: a btrfs in a file, allocated in full
//!   store/                  kind `loop`: where the launcher mounts it, in its own namespace; kind `btrfs`: a plain directory
//!     sandboxes/<id>/       a subvolume for each sandbox, with its limit
//!     volumes/<id>/         a subvolume for each volume, with its size
//!   sandboxes/<id>/fs/      kind `directory`: the same without limits
//!   volumes/<id>/
//! ```
//!
//! A loop file that is not allocated in full could not keep its promises when the host's disk is full, and a btrfs whose disk fails
//! is read-only for everyone: so all of it is taken at once, and nothing is ever given back piece by piece (`nodiscard`).
//!
//! The file is mounted in the launcher's namespace only. Every sandbox holds the mounted file system through its own mounts, so it
//! lives as long as the launcher or any sandbox does; with the last of them it is unmounted and the device lets go of the file, by
//! the kernel's own doing, also after a `kill -9`. The lock that is taken on the file before it is attached belongs to the very
//! descriptor that the device holds: whoever gets the lock knows that no device has the file, and whoever does not looks for the device that has it.
//! Two devices on one file would destroy it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FlockOperation, Mode, OFlags, RenameFlags, fallocate, fchmod, flock,
    fstatfs, openat, renameat_with, statat, syncfs, unlinkat,
};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string,
    fsmount, fsopen,
};
use wire::launch::{STORE_BYTES_MIN, StoreFacts, StoreKind, StoreWish};
use wire::{SandboxId, VolumeId};

use crate::backend::DiskUsage;
use crate::disk;
use crate::enter::attach_onto;
use crate::places::{DIRECTORY, make_and_open, names};
use crate::remove::remove_tree;
use crate::sys::btrfs::{self, Quota};
use crate::sys::loops;

/// The file with the btrfs, in the data directory.
pub const IMAGE: &str = "store.img";
/// The same while it is being made.
const UNFINISHED_IMAGE: &str = "store.img.unfinished";
/// Where it is mounted, or where subvolumes are.
const MOUNT: &str = "store";
const SANDBOXES: &str = "sandboxes";
const VOLUMES: &str = "volumes";
/// What is being removed, or was not finished, begins with this.
const TRASH: &str = "trash-";
/// Of what is free on the data directory's file system, a store that nobody gave a size takes this part:
pub const SIZE_AUTO_PART: u64 = 4;
/// not less than this, which a handful of sandboxes fill; where that is not to be had, there is none,
pub const SIZE_AUTO_MIN: u64 = 2 << 30;
/// and not more than this, so that a large disk is not taken by surprise.
pub const SIZE_AUTO_MAX: u64 = 64 << 30;
/// Room is short where less than this part of the store is free.
const SHORT_PART: u64 = 4;
/// A store's size is a multiple of this.
const SIZE_STEP: u64 = 1 << 20;
/// What the host keeps for itself when a store is made or grows.
const HOST_FREE_MIN: u64 = 1 << 30;
/// How long the launcher before may take to let go of the mounted file.
const ATTACH_DEADLINE: Duration = Duration::from_secs(20);
/// Between two tries.
const ATTACH_STEP: Duration = Duration::from_millis(2);
/// Devices that are looked at.
const LOOPS_MAX: u32 = 4096;
/// `statfs` says this of btrfs (linux/magic.h).
const BTRFS_MAGIC: i64 = 0x9123_683e;
/// Where `mkfs.btrfs` may be; the launcher has no environment.
const PROGRAM_PLACES: [&str; 5] = ["/usr/sbin", "/sbin", "/usr/local/sbin", "/usr/bin", "/bin"];
/// A new volume belongs to root, and everyone in the sandboxes that mount it may write to it, whoever commands run as.
const VOLUME_MODE: u32 = 0o777;

/// What a store should be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreConfig {
    /// Which kind.
    pub wish: StoreWish,
    /// Of kind `loop`: how large. A part of what is free where nobody says. A store that exists may grow, and does not shrink.
    pub size_bytes: Option<u64>,
}

/// Why there is no store.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing}")]
pub struct StoreError {
    /// As it reads after "cannot".
    pub doing: String,
    /// What the kernel said.
    pub source: io::Error,
}

fn cannot<E: Into<io::Error>>(doing: impl Into<String>) -> impl FnOnce(E) -> StoreError {
    move |source| StoreError { doing: doing.into(), source: source.into() }
}

/// The store, held open.
pub struct Store {
    /// What it is.
    pub facts: StoreFacts,
    /// Why it is not a better one, where `auto` was asked for.
    pub note: Option<String>,
    /// Subvolumes, if there are any.
    subvolumes: Option<Subvolumes>,
    /// Volumes in plain directories.
    plain_volumes: OwnedFd,
}

struct Subvolumes {
    root: OwnedFd,
    sandboxes: OwnedFd,
    volumes: OwnedFd,
    /// The kernel's own count of each, in sysfs; none where there are no quotas.
    counts: Option<OwnedFd>,
    /// The device, which stays attached while the launcher lives, and what is mounted from it.
    mounted: Option<(OwnedFd, OwnedFd)>,
}

impl Store {
    /// Finds the store, or makes it. What it mounts is not attached anywhere until [`Self::attach`].
    pub fn open(data_dir: &Path, config: &StoreConfig) -> Result<Self, StoreError> {
        let data = rustix::fs::open(data_dir, DIRECTORY, Mode::empty())
            .map_err(cannot("open the data directory"))?;
        let plain_volumes =
            make_and_open(data.as_fd(), VOLUMES).map_err(cannot("make a directory for volumes"))?;
        // What was begun and not finished holds nothing.
        remove_file(data.as_fd(), UNFINISHED_IMAGE).map_err(cannot("remove an unfinished store"))?;
        let exists = data_dir.join(IMAGE).exists();
        let on_btrfs = is_btrfs(data.as_fd()).map_err(cannot("look at the data directory's file system"))?;
        let (kind, note) = match (config.wish, exists) {
            (StoreWish::Auto | StoreWish::Just(StoreKind::Loop), true) => (StoreKind::Loop, None),
            (StoreWish::Just(StoreKind::Loop), false) => {
                make_image(data_dir, data.as_fd(), config)?;
                (StoreKind::Loop, None)
            }
            (StoreWish::Just(kind), true) => {
                remove_image(data_dir, data.as_fd(), kind)?;
                (kind, None)
            }
            (StoreWish::Just(kind), false) => (kind, None),
            (StoreWish::Auto, false) if on_btrfs => (StoreKind::Btrfs, None),
            (StoreWish::Auto, false) => match make_image(data_dir, data.as_fd(), config) {
                Ok(()) => (StoreKind::Loop, None),
                Err(error) => (StoreKind::Directory, Some(format!("{error}: {}", error.source))),
            },
        };
        let mut store =
            Self { facts: StoreFacts { kind, limits: false }, note, subvolumes: None, plain_volumes };
        let is_choice = config.wish == StoreWish::Auto && !exists;
        match kind {
            StoreKind::Directory => {}
            StoreKind::Btrfs if !on_btrfs => {
                let source =
                    io::Error::other("the data directory is not on btrfs; `loop` makes one in a file");
                return Err(StoreError { doing: "have a store of kind `btrfs`".into(), source });
            }
            StoreKind::Btrfs => {
                let root =
                    make_and_open(data.as_fd(), MOUNT).map_err(cannot("make the store's directory"))?;
                // A file system that is somebody's own gets quotas when that was asked for in so many words.
                let quota = config.wish == StoreWish::Just(StoreKind::Btrfs);
                store.subvolumes = Some(Subvolumes::open(root, None, quota)?);
            }
            StoreKind::Loop => match Subvolumes::of_image(data_dir, config) {
                Ok(subvolumes) => store.subvolumes = Some(subvolumes),
                // Nobody asked for a file system in a file, and this machine cannot mount one.
                Err(error) if is_choice => {
                    remove_file(data.as_fd(), IMAGE).map_err(cannot("remove a store that is of no use"))?;
                    store.facts.kind = StoreKind::Directory;
                    store.note = Some(format!("{error}: {}", error.source));
                }
                Err(error) => return Err(error),
            },
        }
        store.facts.limits = store.subvolumes.as_ref().is_some_and(|held| held.counts.is_some());
        store.sweep().map_err(cannot("remove what is left of volumes"))?;
        Ok(store)
    }

    /// Attaches what was mounted, where copies of it can be cut out: in this process' own mount namespace.
    pub fn attach(&self, data_dir: &Path) -> io::Result<()> {
        let Some((_, tree)) = self.subvolumes.as_ref().and_then(|held| held.mounted.as_ref()) else {
            return Ok(());
        };
        match rustix::fs::mkdir(data_dir.join(MOUNT), Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(e.into()),
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let onto = openat(CWD, data_dir.join(MOUNT), flags, Mode::empty())?;
        attach_onto(tree, &onto)
    }

    /// Removes what an interrupted change has left, where that takes no time. Of plain directories whoever asks again for the change
    /// removes it.
    fn sweep(&self) -> io::Result<()> {
        if let Some(held) = &self.subvolumes {
            for dir in [held.volumes.as_fd(), held.sandboxes.as_fd()] {
                for name in names(dir)?.iter().filter(|name| name.starts_with(TRASH)) {
                    destroy(dir, name)?;
                }
            }
        }
        Ok(())
    }

    /// How much there is, and how much is free; `None` where that is the data directory's own file system.
    pub fn space(&self) -> io::Result<Option<(u64, u64)>> {
        let Some(held) = self.subvolumes.as_ref().filter(|_| self.facts.kind == StoreKind::Loop) else {
            return Ok(None);
        };
        let found = fstatfs(&held.root)?;
        let unit = found.f_bsize as u64;
        Ok(Some((found.f_blocks.saturating_mul(unit), found.f_bavail.saturating_mul(unit))))
    }

    // Sandboxes.

    /// A directory for a new sandbox's writable files, unless that is a plain one in its own place.
    pub fn make_sandbox(&self, id: SandboxId, limit: Option<u64>) -> io::Result<Option<OwnedFd>> {
        let Some(held) = &self.subvolumes else { return Ok(None) };
        held.make(held.sandboxes.as_fd(), &id.to_string(), limit, None).map(Some)
    }

    /// A sandbox's writable files, if they are here.
    pub fn sandbox(&self, id: SandboxId) -> io::Result<Option<OwnedFd>> {
        let Some(held) = &self.subvolumes else { return Ok(None) };
        open_if_there(held.sandboxes.as_fd(), &id.to_string())
    }

    /// Removes a sandbox's writable files, if they are here. Their space is freed behind the scenes.
    pub fn remove_sandbox(&self, id: SandboxId) -> io::Result<()> {
        let Some(held) = &self.subvolumes else { return Ok(()) };
        destroy(held.sandboxes.as_fd(), &id.to_string())?;
        held.free_soon()
    }

    /// What files take that [`Self::sandbox`] or [`Self::volume`] gave.
    pub fn usage(&self, files: OwnedFd) -> io::Result<DiskUsage> {
        if let Some(counts) = self.subvolumes.as_ref().and_then(|held| held.counts.as_ref())
            && let Ok(number) = btrfs::subvolume_number(files.as_fd())
            && let Some(bytes) = counted(counts, number)?
        {
            return Ok(DiskUsage { bytes, complete: true });
        }
        disk::usage(files)
    }

    // Volumes.

    /// Makes a volume, empty or as a copy. It has its name when all of it is on disk.
    pub fn make_volume(&self, id: VolumeId, size_bytes: u64, from: Option<VolumeId>) -> io::Result<()> {
        if self.volume(id)?.is_some() {
            return self.resize_volume(id, size_bytes);
        }
        let (name, unfinished) = (id.to_string(), format!("{TRASH}{id}"));
        let source = match from {
            Some(from) => Some(self.volume(from)?.ok_or(Errno::NOENT)?),
            None => None,
        };
        let dir = match &self.subvolumes {
            Some(held) => {
                let dir = held.volumes.as_fd();
                destroy(dir, &unfinished)?;
                let made = held.make(dir, &unfinished, Some(size_bytes), source.as_ref())?;
                if source.is_none() {
                    fchmod(&made, Mode::from_raw_mode(VOLUME_MODE))?;
                }
                dir
            }
            // Without snapshots a copy would be the work of a walker that reads what guests wrote.
            None if source.is_some() => return Err(Errno::OPNOTSUPP.into()),
            None => {
                let dir = self.plain_volumes.as_fd();
                remove_tree(dir, &unfinished)?;
                let made = make_and_open(dir, &unfinished)?;
                fchmod(&made, Mode::from_raw_mode(VOLUME_MODE))?;
                dir
            }
        };
        renameat_with(dir, &unfinished, dir, &name, RenameFlags::NOREPLACE)?;
        Ok(syncfs(dir)?)
    }

    /// Another size. Files that are there stay.
    pub fn resize_volume(&self, id: VolumeId, size_bytes: u64) -> io::Result<()> {
        let files = self.volume(id)?.ok_or(Errno::NOENT)?;
        match &self.subvolumes {
            Some(held) => held.limit(files.as_fd(), Some(size_bytes)),
            None => Ok(()),
        }
    }

    /// A volume's files, if it is here.
    pub fn volume(&self, id: VolumeId) -> io::Result<Option<OwnedFd>> {
        let name = id.to_string();
        if let Some(held) = &self.subvolumes
            && let Some(files) = open_if_there(held.volumes.as_fd(), &name)?
        {
            return Ok(Some(files));
        }
        open_if_there(self.plain_volumes.as_fd(), &name)
    }

    /// Removes a volume. It is renamed first, so that half of one is never taken for a whole one.
    pub fn remove_volume(&self, id: VolumeId) -> io::Result<()> {
        let (name, trash) = (id.to_string(), format!("{TRASH}{id}"));
        if let Some(held) = &self.subvolumes {
            destroy(held.volumes.as_fd(), &name)?;
            held.free_soon()?;
        }
        let plain = self.plain_volumes.as_fd();
        remove_tree(plain, &trash)?;
        match renameat_with(plain, &name, plain, &trash, RenameFlags::NOREPLACE) {
            Ok(()) => remove_tree(plain, &trash),
            Err(Errno::NOENT) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// All volumes that are here, in their order.
    pub fn volumes(&self) -> io::Result<Vec<VolumeId>> {
        let mut found = names(self.plain_volumes.as_fd())?;
        if let Some(held) = &self.subvolumes {
            found.extend(names(held.volumes.as_fd())?);
        }
        let mut ids: Vec<VolumeId> = found.iter().filter_map(|name| name.parse().ok()).collect();
        ids.sort();
        Ok(ids)
    }
}

impl Subvolumes {
    /// Mounts the store's file, and grows it where that is wished for.
    fn of_image(data_dir: &Path, config: &StoreConfig) -> Result<Self, StoreError> {
        let device = attach_image(data_dir)?;
        grow(data_dir, &device, config)?;
        let (tree, root) = mount_device(&device)?;
        btrfs::resize_to_device(root.as_fd()).map_err(cannot("grow the store"))?;
        Self::open(root, Some((device.file, tree)), true)
    }

    fn open(root: OwnedFd, mounted: Option<(OwnedFd, OwnedFd)>, quota: bool) -> Result<Self, StoreError> {
        let id = btrfs::file_system_id(root.as_fd()).map_err(cannot("find the store's id"))?;
        let path = format!("/sys/fs/btrfs/{id}/qgroups");
        let mut counts = openat(CWD, &path, DIRECTORY, Mode::empty()).ok();
        if counts.is_none() && quota {
            enable_quota(root.as_fd())?;
            counts = Some(
                openat(CWD, &path, DIRECTORY, Mode::empty()).map_err(cannot("find the store's counts"))?,
            );
        }
        let make = |name| make_and_open(root.as_fd(), name).map_err(cannot("make the store's directories"));
        let (sandboxes, volumes) = (make(SANDBOXES)?, make(VOLUMES)?);
        Ok(Self { sandboxes, volumes, counts, root, mounted })
    }

    fn make(
        &self,
        dir: BorrowedFd<'_>,
        name: &str,
        limit: Option<u64>,
        from: Option<&OwnedFd>,
    ) -> io::Result<OwnedFd> {
        match from {
            Some(from) => btrfs::create_snapshot(dir, name, from.as_fd())?,
            None => btrfs::create_subvolume(dir, name)?,
        }
        let made = openat(dir, name, DIRECTORY, Mode::empty())?;
        if limit.is_some() {
            self.limit(made.as_fd(), limit)?;
        }
        Ok(made)
    }

    /// Has what was destroyed freed at once where room is short; otherwise the kernel does so in its own time, and no delete pays for it.
    fn free_soon(&self) -> io::Result<()> {
        let found = fstatfs(&self.root)?;
        match found.f_bavail < found.f_blocks / SHORT_PART {
            true => btrfs::begin_sync(self.root.as_fd()),
            false => Ok(()),
        }
    }

    fn limit(&self, files: BorrowedFd<'_>, bytes: Option<u64>) -> io::Result<()> {
        if self.counts.is_none() || !is_btrfs(files)? {
            return Ok(());
        }
        btrfs::limit_subvolume(files, btrfs::subvolume_number(files)?, bytes)
    }
}

/// What the kernel has counted of a subvolume by now: what is on disk, and what is on its way there.
fn counted(counts: &OwnedFd, number: u64) -> io::Result<Option<u64>> {
    let mut bytes = 0;
    for file in ["referenced", "rsv_data"] {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = match openat(counts, format!("0_{number}/{file}"), flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        let mut text = [0; 32];
        let length = rustix::io::read(&file, &mut text)?;
        let number = std::str::from_utf8(&text[..length]).ok().and_then(|text| text.trim().parse().ok());
        bytes += number.unwrap_or(0u64);
    }
    Ok(Some(bytes))
}

fn enable_quota(root: BorrowedFd<'_>) -> Result<(), StoreError> {
    match btrfs::enable_quota(root, Quota::Simple) {
        // A kernel before 6.7.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => btrfs::enable_quota(root, Quota::Full),
        other => other,
    }
    .map_err(cannot("count what is in the store"))
}

fn is_btrfs(dir: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(fstatfs(dir)?.f_type as i64 == BTRFS_MAGIC)
}

fn open_if_there(dir: BorrowedFd<'_>, name: &str) -> io::Result<Option<OwnedFd>> {
    match openat(dir, name, DIRECTORY, Mode::empty()) {
        Ok(files) => Ok(Some(files)),
        Err(Errno::NOENT) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Removes a subvolume, or what is left of one. Harmless when it is not there.
fn destroy(dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    match statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => return Ok(()),
        Err(e) => return Err(e.into()),
        Ok(_) => {}
    }
    match btrfs::destroy_subvolume(dir, name) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn remove_file(dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    match unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Where `mkfs.btrfs` is, if it is there.
pub fn make_program() -> Option<PathBuf> {
    PROGRAM_PLACES.iter().map(|place| Path::new(place).join("mkfs.btrfs")).find(|path| path.exists())
}

/// How large a store would be on a file system with so much free, where nobody says how large. `None`: there is no room for one.
pub fn size_auto(available_bytes: u64) -> Option<u64> {
    let size = (available_bytes / SIZE_AUTO_PART).min(SIZE_AUTO_MAX) / SIZE_STEP * SIZE_STEP;
    (size >= SIZE_AUTO_MIN).then_some(size)
}

fn available(data: BorrowedFd<'_>) -> Result<u64, StoreError> {
    let found = rustix::fs::fstatvfs(data).map_err(cannot("see how much is free"))?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Makes the file. It has its name when there is a file system in it.
fn make_image(data_dir: &Path, data: BorrowedFd<'_>, config: &StoreConfig) -> Result<(), StoreError> {
    let refused =
        |doing: &str, why: String| StoreError { doing: doing.into(), source: io::Error::other(why) };
    let doing = "make a store of kind `loop`";
    let Some(program) = make_program() else {
        return Err(refused(doing, "`mkfs.btrfs` is not installed (package `btrfs-progs`)".into()));
    };
    let available = available(data)?;
    let size = match config.size_bytes {
        Some(size) => size / SIZE_STEP * SIZE_STEP,
        None => size_auto(available).ok_or_else(|| {
            let needed = SIZE_AUTO_MIN * SIZE_AUTO_PART;
            refused(
                doing,
                format!("{available} bytes are free, {needed} are needed for one of its own accord"),
            )
        })?,
    };
    if size < STORE_BYTES_MIN || available < size.saturating_add(HOST_FREE_MIN.min(size)) {
        let why = format!("a store of {size} bytes needs room beyond it, and {available} bytes are free");
        return Err(refused(doing, why));
    }
    let path = data_dir.join(UNFINISHED_IMAGE);
    let made = allocate(&path, size).and_then(|()| format(&program, &path));
    let named = made.and_then(|()| {
        renameat_with(data, UNFINISHED_IMAGE, data, IMAGE, RenameFlags::NOREPLACE)
            .map_err(cannot("name the store's file"))
    });
    if named.is_err() {
        remove_file(data, UNFINISHED_IMAGE).map_err(cannot("remove an unfinished store"))?;
    }
    named
}

fn allocate(path: &Path, size: u64) -> Result<(), StoreError> {
    let open = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let file = open.map_err(cannot("make the store's file"))?;
    fallocate(&file, FallocateFlags::empty(), 0, size).map_err(cannot("allocate the store's file"))
}

/// The one place where a program of the machine is run, once in the life of a data directory.
fn format(program: &Path, path: &Path) -> Result<(), StoreError> {
    // `-K`: a discard would give the file's blocks back to the host.
    let arguments = ["-q", "-f", "-K", "-L", "shoal", "-m", "single", "-d", "single"];
    let output = Command::new(program).args(arguments).arg(path).stdin(Stdio::null()).output();
    let output = output.map_err(cannot("run mkfs.btrfs"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
    Err(cannot("run mkfs.btrfs")(io::Error::other(format!("{}: {said}", output.status))))
}

/// A store of kind `loop` that is not wanted any more goes, if nothing is in it.
fn remove_image(data_dir: &Path, data: BorrowedFd<'_>, wanted: StoreKind) -> Result<(), StoreError> {
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
        return Err(StoreError { doing, source: io::Error::other(why) });
    }
    remove_file(data, IMAGE).map_err(cannot("remove the store's file"))
}

struct Device {
    path: String,
    file: OwnedFd,
}

/// The device that has the store's file, or a new one for it.
fn attach_image(data_dir: &Path) -> Result<Device, StoreError> {
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
        // Somebody else was quicker with a free device, or the one that has the file is letting go of it.
        if Instant::now() >= deadline {
            let why = "it is locked, and no loop device has it: does another program use it?";
            return Err(cannot(doing)(io::Error::other(why)));
        }
        std::thread::sleep(ATTACH_STEP);
    }
}

/// `None`: the device that was free is not free any more.
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

/// The device that has a file. While it is open here, it does not let go of it.
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
            // Without a node, without a file, or somebody else's alone.
            Err(Errno::NOENT | Errno::NXIO | Errno::BUSY | Errno::ACCESS | Errno::ROFS) => continue,
            Err(e) => return Err(e.into()),
        };
        if loops::file_behind(device.as_fd())? == Some(wanted) {
            return Ok(Some(Device { path, file: device }));
        }
    }
    Ok(None)
}

fn grow(data_dir: &Path, device: &Device, config: &StoreConfig) -> Result<(), StoreError> {
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

/// Mounts the file system, or finds it mounted: to the kernel both are the same.
fn mount_device(device: &Device) -> Result<(OwnedFd, OwnedFd), StoreError> {
    let doing = || format!("mount the store from `{}`", device.path);
    let deadline = Instant::now() + ATTACH_DEADLINE;
    loop {
        match try_mount(&device.path) {
            Ok(tree) => {
                // What fsmount(2) gives only names the mount; requests need an open directory.
                let root = openat(&tree, ".", DIRECTORY, Mode::empty()).map_err(cannot(doing()))?;
                return Ok((tree, root));
            }
            // The launcher before is unmounting it just now.
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
    fsconfig_create(&context)?;
    let flags = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOATIME;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, flags)
}
