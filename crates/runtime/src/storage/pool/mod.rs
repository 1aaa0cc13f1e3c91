//! The storage pool: keeps volumes and the writable files of sandboxes. Users know it as the store, from the option `--store`.
//!
//! ```text
//! <data>/
//!   store.img               kind `loop`: a btrfs in a file, allocated in full
//!   store/                  kind `loop`: where the launcher mounts it, in its own namespace; kind `btrfs`: a plain directory
//!     sandboxes/<id>/       a subvolume for each sandbox, with its limit
//!     volumes/<id>/         a subvolume for each volume, with its size
//!     snapshots/<id>/       a read-only subvolume for each snapshot of a sandbox
//!   sandboxes/<id>/fs/      kind `directory`: the same without limits
//!   volumes/<id>/
//! ```
//!
//! The file is mounted in the launcher's namespace only. Every sandbox holds the mounted file system through its own mounts, so it
//! stays mounted as long as the launcher or any sandbox lives. After the last of them the kernel unmounts it and detaches the
//! device, even after a `kill -9`. The launcher locks the file before it attaches it, and the loop device keeps the locked
//! descriptor: a launcher that gets the lock knows that no device has the file; one that does not searches for that device.
//! Two devices on one file would destroy it.

mod image;
mod seed;
mod snapshots;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, IFlags, Mode, OFlags, RenameFlags, fchmod, fstatfs, ioctl_getflags, ioctl_setflags, openat,
    renameat_with, statat, syncfs, unlinkat,
};
use rustix::io::Errno;
use wire::launch::{StoreFacts, StoreKind, StoreWish};
use wire::{SandboxId, SnapshotId, VolumeId};

use crate::backend::DiskUsage;
use crate::storage::directories::{DIRECTORY, make_and_open, names};
use crate::storage::disk;
use crate::storage::remove::remove_tree;
use crate::sys::btrfs::{self, Quota};
use crate::sys::mounts::attach_onto;

pub use image::{IMAGE, SIZE_AUTO_MAX, SIZE_AUTO_MIN, SIZE_AUTO_PART, size_auto};
use image::{UNFINISHED_IMAGE, attach_image, grow, make_image, mount_device, remove_image};

/// Where it is mounted, or where subvolumes are.
const MOUNT: &str = "store";
const SANDBOXES: &str = "sandboxes";
const VOLUMES: &str = "volumes";
const SNAPSHOTS: &str = "snapshots";
/// Prefix of directories that are being removed, or were not finished.
const TRASH: &str = "trash-";
/// Space is short if less than this part of the store is free.
const SHORT_PART: u64 = 4;
/// The type that `statfs` returns for btrfs (linux/magic.h).
const BTRFS_MAGIC: i64 = 0x9123_683e;
/// How many bytes may wait to be written to a pool of kind `loop`. With a quarter of it, writes take 1.4 times as long;
/// with this much, 1.1.
const DIRTY_BYTES_MAX: u64 = 256 << 20;
/// A new volume belongs to root, and every user in the sandboxes that mount it may write to it, whatever user commands
/// run as.
const VOLUME_MODE: u32 = 0o777;

/// The requested store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreConfig {
    /// Which kind.
    pub wish: StoreWish,
    /// The size, for kind `loop`. By default a part of the free space. An existing store can grow but not shrink.
    pub size_bytes: Option<u64>,
}

/// Why the storage pool could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing}")]
pub struct StoragePoolError {
    /// As it reads after "cannot".
    pub doing: String,
    /// The error from the kernel.
    pub source: io::Error,
}

/// The note about a pool that fell back to plain directories.
fn without_limits(error: &StoragePoolError) -> String {
    let what = "writable files are kept in plain directories, without disk limits and cheap copies";
    format!("{what}: {error}: {}", error.source)
}

fn cannot<E: Into<io::Error>>(doing: impl Into<String>) -> impl FnOnce(E) -> StoragePoolError {
    move |source| StoragePoolError { doing: doing.into(), source: source.into() }
}

/// The storage pool, held open.
pub struct StoragePool {
    /// Its kind, and whether it has limits.
    pub facts: StoreFacts,
    /// The size of a pool of kind `loop` that was created just now.
    pub made_bytes: Option<u64>,
    /// What the pool cannot do on this machine, a sentence each.
    pub notes: Vec<String>,
    /// Subvolumes, if there are any.
    subvolumes: Option<Subvolumes>,
    /// Volumes in plain directories.
    plain_volumes: OwnedFd,
}

struct Subvolumes {
    root: OwnedFd,
    sandboxes: OwnedFd,
    volumes: OwnedFd,
    snapshots: OwnedFd,
    /// The kernel's own usage counters, in sysfs; `None` without quotas.
    counts: Option<OwnedFd>,
    /// The device, which stays attached while the launcher lives, and what is mounted from it.
    mounted: Option<(OwnedFd, OwnedFd)>,
}

impl StoragePool {
    /// Opens the pool, and creates it if needed. [`Self::attach`] attaches its mounts.
    pub fn open(data_dir: &Path, config: &StoreConfig) -> Result<Self, StoragePoolError> {
        let data = rustix::fs::open(data_dir, DIRECTORY, Mode::empty())
            .map_err(cannot("open the data directory"))?;
        let plain_volumes =
            make_and_open(data.as_fd(), VOLUMES).map_err(cannot("make a directory for volumes"))?;
        // An unfinished image holds nothing.
        remove_file(data.as_fd(), UNFINISHED_IMAGE).map_err(cannot("remove an unfinished store"))?;
        let exists = data_dir.join(IMAGE).exists();
        let on_btrfs = is_btrfs(data.as_fd()).map_err(cannot("look at the data directory's file system"))?;
        let (mut made_bytes, mut notes) = (None, Vec::new());
        let kind = match (config.wish, exists) {
            (StoreWish::Auto | StoreWish::Just(StoreKind::Loop), true) => StoreKind::Loop,
            (StoreWish::Just(StoreKind::Loop), false) => {
                made_bytes = Some(make_image(data_dir, data.as_fd(), config)?);
                StoreKind::Loop
            }
            (StoreWish::Just(kind), true) => {
                remove_image(data_dir, data.as_fd(), kind)?;
                kind
            }
            (StoreWish::Just(kind), false) => kind,
            (StoreWish::Auto, false) if on_btrfs => StoreKind::Btrfs,
            (StoreWish::Auto, false) => match make_image(data_dir, data.as_fd(), config) {
                Ok(size) => {
                    made_bytes = Some(size);
                    StoreKind::Loop
                }
                Err(error) => {
                    notes.push(without_limits(&error));
                    StoreKind::Directory
                }
            },
        };
        let facts = StoreFacts { kind, limits: false };
        let mut store = Self { facts, made_bytes, notes, subvolumes: None, plain_volumes };
        let is_choice = config.wish == StoreWish::Auto && !exists;
        match kind {
            StoreKind::Directory => {}
            StoreKind::Btrfs if !on_btrfs => {
                let source =
                    io::Error::other("the data directory is not on btrfs; `loop` makes one in a file");
                return Err(StoragePoolError { doing: "have a store of kind `btrfs`".into(), source });
            }
            StoreKind::Btrfs => {
                let root =
                    make_and_open(data.as_fd(), MOUNT).map_err(cannot("make the store's directory"))?;
                // The file system belongs to the user, so quotas are enabled only on request.
                let quota = config.wish == StoreWish::Just(StoreKind::Btrfs);
                store.subvolumes = Some(Subvolumes::open(root, None, quota)?);
            }
            StoreKind::Loop => match Subvolumes::of_image(data_dir, config) {
                Ok(subvolumes) => {
                    if let Err(error) = subvolumes.bound_dirty_pages() {
                        let what =
                            "cannot bound what the store has yet to write; snapshots may take seconds longer";
                        store.notes.push(format!("{what}: {error}"));
                    }
                    store.subvolumes = Some(subvolumes);
                }
                // The loop file was our own choice, and this machine cannot mount it.
                Err(error) if is_choice => {
                    remove_file(data.as_fd(), IMAGE)
                        .map_err(cannot("remove a store that cannot be mounted"))?;
                    store.facts.kind = StoreKind::Directory;
                    store.made_bytes = None;
                    store.notes.push(without_limits(&error));
                }
                Err(error) => return Err(error),
            },
        }
        store.facts.limits = store.subvolumes.as_ref().is_some_and(|held| held.counts.is_some());
        store.sweep().map_err(cannot("remove what is left of volumes"))?;
        Ok(store)
    }

    /// Attaches the mounts where they can be cloned: in this process' own mount namespace.
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

    /// Removes what interrupted changes left behind in subvolumes, which is quick. In plain directories, repeating the change does
    /// that.
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

    /// The total and the free space; `None` if the pool is on the data directory's own file system.
    pub fn space(&self) -> io::Result<Option<(u64, u64)>> {
        let Some(held) = self.subvolumes.as_ref().filter(|_| self.facts.kind == StoreKind::Loop) else {
            return Ok(None);
        };
        let found = fstatfs(&held.root)?;
        let unit = found.f_bsize as u64;
        Ok(Some((found.f_blocks.saturating_mul(unit), found.f_bavail.saturating_mul(unit))))
    }

    // Sandboxes.

    /// Creates a directory for a new sandbox's writable files, empty or as a copy of a snapshot, unless the pool uses
    /// plain directories elsewhere.
    pub fn make_sandbox(
        &self,
        id: SandboxId,
        limit: Option<u64>,
        copy: Option<SnapshotId>,
    ) -> io::Result<Option<OwnedFd>> {
        let from = copy.map(|snapshot| self.snapshot(snapshot)).transpose()?;
        let Some(held) = &self.subvolumes else { return Ok(None) };
        held.make(held.sandboxes.as_fd(), &id.to_string(), limit, from.as_ref()).map(Some)
    }

    /// A sandbox's writable files, if they are in the pool.
    pub fn sandbox(&self, id: SandboxId) -> io::Result<Option<OwnedFd>> {
        let Some(held) = &self.subvolumes else { return Ok(None) };
        open_if_there(held.sandboxes.as_fd(), &id.to_string())
    }

    /// Removes a sandbox's writable files, if they are in the pool. The kernel frees their space in the background.
    pub fn remove_sandbox(&self, id: SandboxId) -> io::Result<()> {
        let Some(held) = &self.subvolumes else { return Ok(()) };
        destroy(held.sandboxes.as_fd(), &id.to_string())?;
        held.free_soon()
    }

    /// The size of files that [`Self::sandbox`] or [`Self::volume`] returned.
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

    /// Creates a volume, empty or as a copy. It gets its name when all of it is on disk.
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
            // Without snapshots, a privileged walker would have to read what guests wrote.
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

    /// Changes the size of a volume. Existing files stay.
    pub fn resize_volume(&self, id: VolumeId, size_bytes: u64) -> io::Result<()> {
        let files = self.volume(id)?.ok_or(Errno::NOENT)?;
        match &self.subvolumes {
            Some(held) => held.limit(files.as_fd(), Some(size_bytes)),
            None => Ok(()),
        }
    }

    /// A volume's files, if the volume exists.
    pub fn volume(&self, id: VolumeId) -> io::Result<Option<OwnedFd>> {
        let name = id.to_string();
        if let Some(held) = &self.subvolumes
            && let Some(files) = open_if_there(held.volumes.as_fd(), &name)?
        {
            return Ok(Some(files));
        }
        open_if_there(self.plain_volumes.as_fd(), &name)
    }

    /// Removes a volume. It is renamed first, so that a half-removed volume is never used.
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

    /// All existing volumes, sorted.
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

/// Keeps btrfs from compressing files that are created below `made`, which threads of the kernel would do outside of
/// every cpu limit. Files that are overwritten in place, without checksums, cannot be compressed, and directories pass
/// the flag on. A pool of kind `loop` is mounted so that this holds for all of it.
fn forbid_compression(made: &OwnedFd) -> io::Result<()> {
    let flags = ioctl_getflags(made)?;
    Ok(ioctl_setflags(made, flags | IFlags::NOCOW)?)
}

impl Subvolumes {
    /// Mounts the store's file, and grows it if requested.
    fn of_image(data_dir: &Path, config: &StoreConfig) -> Result<Self, StoragePoolError> {
        let device = attach_image(data_dir)?;
        grow(data_dir, &device, config)?;
        let (tree, root) = mount_device(&device)?;
        btrfs::resize_to_device(root.as_fd()).map_err(cannot("grow the store"))?;
        Self::open(root, Some((device.file, tree)), true)
    }

    /// Limits how many written bytes of this file system the kernel may keep in memory. Otherwise the kernel gathers up
    /// to a fifth of the machine's memory, and a snapshot waits until all of that is on the disk. With the limit,
    /// writers that are faster than the disk wait instead. Only for a file system that belongs to the pool alone. The
    /// limit is gone after the last unmount. Linux 6.2.
    fn bound_dirty_pages(&self) -> io::Result<()> {
        let id = btrfs::file_system_id(self.root.as_fd())?;
        // The order matters: the kernel applies the number only once the limit is strict.
        for (file, value) in [("max_bytes", DIRTY_BYTES_MAX), ("strict_limit", 1)] {
            std::fs::write(format!("/sys/fs/btrfs/{id}/bdi/{file}"), value.to_string())?;
        }
        Ok(())
    }

    fn open(
        root: OwnedFd,
        mounted: Option<(OwnedFd, OwnedFd)>,
        quota: bool,
    ) -> Result<Self, StoragePoolError> {
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
        let (sandboxes, volumes, snapshots) = (make(SANDBOXES)?, make(VOLUMES)?, make(SNAPSHOTS)?);
        Ok(Self { sandboxes, volumes, snapshots, counts, root, mounted })
    }

    fn make(
        &self,
        dir: BorrowedFd<'_>,
        name: &str,
        limit: Option<u64>,
        from: Option<&OwnedFd>,
    ) -> io::Result<OwnedFd> {
        match from {
            Some(from) => btrfs::create_snapshot(dir, name, from.as_fd(), btrfs::Snapshot::Writable)?,
            None => btrfs::create_subvolume(dir, name)?,
        }
        let made = openat(dir, name, DIRECTORY, Mode::empty())?;
        if from.is_none() && self.mounted.is_none() {
            forbid_compression(&made)?;
        }
        if limit.is_some() {
            self.limit(made.as_fd(), limit)?;
        }
        Ok(made)
    }

    /// Frees destroyed subvolumes at once if space is short. Otherwise the kernel frees them later, and no delete waits for it.
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

/// The kernel's current count for a subvolume: bytes on disk, and bytes on their way there.
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

fn enable_quota(root: BorrowedFd<'_>) -> Result<(), StoragePoolError> {
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

/// Removes a subvolume, or the rest of one. Harmless if it does not exist.
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
