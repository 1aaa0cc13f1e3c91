//! Where things are in the data directory. The launcher's paths are built here, from ids alone.
//!
//! ```text
//! <data>/
//!   stage/                  empty; the launcher's private staging area is mounted over it
//!   images/host/<n>/        generations of the image `host`, see `host_image`
//!   images/layers/          layers of all other images, see `layers`
//!   sandboxes/<id>/         0700; the attribute `trusted.shoal` holds the first host id of its range and the generation
//!     init.sock             where init listens
//!     host/                 what the daemon shows the sandbox, which sees it read-only as `/run/shoal`
//!     fs/{root,usr}[-work]  the writable layers, with guest ids, unless they are in the storage pool; see `pool`
//! ```

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, IFlags, Mode, XattrFlags, fgetxattr, fsetxattr, fstatvfs, ioctl_getflags, ioctl_setflags,
    mkdirat, openat, unlinkat,
};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use wire::{SandboxId, SnapshotId};

use crate::backend::DiskUsage;
use crate::storage::directories::{DIRECTORY, make_and_open, names};
use crate::storage::generations::{HostImages, PrepareError, cannot};
use crate::storage::layers::Layers;
use crate::storage::pool::StoragePool;
use crate::storage::remove::remove_tree;

/// Connections that may wait for init. The daemon makes one at a time.
const BACKLOG: i32 = 8;
/// Only the host's root may read or write attributes of this kind, and guests never see the directory.
const ATTRIBUTE: &str = "trusted.shoal";
/// The name of what the daemon shows a sandbox, in the sandbox's directory. Sandboxes of versions without networks have none.
pub const HOST_DIRECTORY: &str = "host";
/// The name of init's socket in a sandbox's directory.
pub const INIT_SOCKET: &str = "init.sock";

/// The data directory, held open.
pub struct Places {
    path: PathBuf,
    sandboxes: OwnedFd,
    /// Generations of the image `host`.
    pub host_images: HostImages,
    /// The layers of all other images.
    pub layers: Layers,
    /// Writable layers and volumes.
    pub pool: StoragePool,
}

impl Places {
    /// Opens the data directory and makes what is missing in it.
    pub fn open(path: &Path, pool: StoragePool) -> io::Result<Self> {
        let data = rustix::fs::open(path, DIRECTORY, Mode::empty())?;
        let sandboxes = make_and_open(data.as_fd(), "sandboxes")?;
        let images = make_and_open(data.as_fd(), "images")?;
        let host_images = make_and_open(images.as_fd(), "host")?;
        for parent in [&sandboxes, &host_images] {
            spread_out(parent.as_fd());
        }
        make_and_open(data.as_fd(), "stage")?;
        let layers = Layers::open(images.as_fd())?;
        let host_images = HostImages::new(host_images, path.join("images/host"));
        Ok(Self { path: path.to_owned(), sandboxes, host_images, layers, pool })
    }

    /// The data directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory over which the launcher mounts its staging area.
    pub fn stage(&self) -> PathBuf {
        self.path.join("stage")
    }

    /// Size and free space of the data directory's file system.
    pub fn space(&self) -> io::Result<(u64, u64)> {
        let found = fstatvfs(&self.sandboxes)?;
        Ok((found.f_blocks.saturating_mul(found.f_frsize), found.f_bavail.saturating_mul(found.f_frsize)))
    }

    /// Prepares the image `host`, and returns its generation. See [`HostImages::prepare`].
    pub fn prepare_host_image(&self, thorough: bool) -> Result<u64, PrepareError> {
        let before = self.host_images.current().map_err(cannot("list generations"))?;
        let generation = self.host_images.prepare(thorough)?;
        if before != Some(generation) {
            let used = self.generations_in_use();
            let dropped = used.and_then(|used| self.host_images.drop_old(generation, &used));
            dropped.map_err(cannot("remove old images"))?;
        }
        Ok(generation)
    }

    /// The directory of the layers of all other images.
    pub fn layers_path(&self) -> PathBuf {
        self.path.join("images/layers")
    }

    /// Creates the directory of a new sandbox. Its writable layers are empty, or those of a copy of a snapshot.
    pub fn make_sandbox(
        &self,
        id: SandboxId,
        base: u32,
        generation: u64,
        writable_layers: &[&str],
        disk_bytes: Option<u64>,
        copy: Option<SnapshotId>,
    ) -> io::Result<SandboxPlace> {
        let name = id.to_string();
        mkdirat(&self.sandboxes, &name, Mode::RWXU)?;
        let dir = openat(&self.sandboxes, &name, DIRECTORY, Mode::empty())?;
        // An attribute, since a new file costs more: some file systems search long for a free inode.
        fsetxattr(&dir, ATTRIBUTE, format!("{base} {generation}").as_bytes(), XattrFlags::empty())?;
        mkdirat(&dir, HOST_DIRECTORY, Mode::from_raw_mode(0o755))?;
        let host = openat(&dir, HOST_DIRECTORY, DIRECTORY, Mode::empty())?;
        // After the directory, so that nothing in the pool is without one.
        let fs = match self.pool.make_sandbox(id, disk_bytes, copy)? {
            Some(fs) => fs,
            None => {
                mkdirat(&dir, "fs", Mode::RWXU)?;
                openat(&dir, "fs", DIRECTORY, Mode::empty())?
            }
        };
        for name in writable_layers {
            let work = format!("{name}-work");
            if copy.is_some() {
                // The kernel rejects the working directory of another mount.
                remove_tree(fs.as_fd(), &work)?;
            }
            match mkdirat(&fs, *name, Mode::from_raw_mode(0o755)) {
                Err(Errno::EXIST) if copy.is_some() => {}
                made => made?,
            }
            mkdirat(&fs, work, Mode::RWXU)?;
        }
        Ok(SandboxPlace { dir, fs, host })
    }

    /// Opens the directory of a sandbox whose processes were ended, for another launch.
    ///
    /// Its files stay. The kernel's own directories beside them are made again, because a volatile overlay may not be mounted twice
    /// over the same one (`incompat/volatile`). The sandbox gets the current generation of the image `host`, which hides what has
    /// become private since.
    pub fn reopen_sandbox(
        &self,
        id: SandboxId,
        base: u32,
        generation: u64,
        writable_layers: &[&str],
    ) -> io::Result<SandboxPlace> {
        let dir = openat(&self.sandboxes, id.to_string(), DIRECTORY, Mode::empty())?;
        let fs = self.writable(id)?;
        for name in writable_layers {
            // Without its files, the sandbox must not start as if it had never written any.
            openat(&fs, *name, DIRECTORY, Mode::empty())?;
            let work = format!("{name}-work");
            remove_tree(fs.as_fd(), &work)?;
            mkdirat(&fs, work, Mode::RWXU)?;
        }
        fsetxattr(&dir, ATTRIBUTE, format!("{base} {generation}").as_bytes(), XattrFlags::empty())?;
        match mkdirat(&dir, HOST_DIRECTORY, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(e.into()),
        }
        let host = openat(&dir, HOST_DIRECTORY, DIRECTORY, Mode::empty())?;
        match unlinkat(&dir, INIT_SOCKET, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(e) => return Err(e.into()),
        }
        Ok(SandboxPlace { dir, fs, host })
    }

    /// Removes a sandbox's whole directory.
    pub fn remove_sandbox(&self, id: SandboxId) -> io::Result<()> {
        self.pool.remove_sandbox(id)?;
        remove_tree(self.sandboxes.as_fd(), &id.to_string())
    }

    /// Disk usage of a sandbox's writable layers; 0 if it has none.
    pub fn disk_usage(&self, id: SandboxId) -> io::Result<DiskUsage> {
        match self.writable(id) {
            Ok(fs) => self.pool.usage(fs),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(DiskUsage { bytes: 0, complete: true }),
            Err(e) => Err(e),
        }
    }

    /// The writable layers of a sandbox.
    pub fn writable(&self, id: SandboxId) -> io::Result<OwnedFd> {
        match self.pool.sandbox(id)? {
            Some(fs) => Ok(fs),
            None => Ok(openat(&self.sandboxes, format!("{id}/fs"), DIRECTORY, Mode::empty())?),
        }
    }

    /// The generation of the image `host` that a sandbox was created with; 0 if it was created from another image.
    pub fn generation(&self, id: SandboxId) -> io::Result<u64> {
        let dir = openat(&self.sandboxes, id.to_string(), DIRECTORY, Mode::empty())?;
        let numbers = read_numbers(&dir)?;
        numbers.map(|(_, generation)| generation).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Every sandbox that has a directory, with its range if that was recorded.
    pub fn list_sandboxes(&self) -> io::Result<Vec<(SandboxId, Option<u32>)>> {
        Ok(self.attributes()?.into_iter().map(|(id, numbers)| (id, numbers.map(|(base, _)| base))).collect())
    }

    /// The generations of the image `host` that sandboxes still use.
    fn generations_in_use(&self) -> io::Result<Vec<u64>> {
        Ok(self.attributes()?.into_iter().filter_map(|(_, numbers)| Some(numbers?.1)).collect())
    }

    /// What was recorded about each sandbox, if its creation got that far.
    fn attributes(&self) -> io::Result<Vec<(SandboxId, Option<Numbers>)>> {
        let mut list = Vec::new();
        for name in names(self.sandboxes.as_fd())? {
            let Ok(id) = name.parse::<SandboxId>() else { continue };
            let numbers = match openat(&self.sandboxes, &name, DIRECTORY, Mode::empty()) {
                Ok(dir) => read_numbers(&dir)?,
                // Removed just now.
                Err(Errno::NOENT) => continue,
                Err(e) => return Err(e.into()),
            };
            list.push((id, numbers));
        }
        Ok(list)
    }
}

/// The first host id of a range, and a generation.
type Numbers = (u32, u64);

fn read_numbers(dir: &OwnedFd) -> io::Result<Option<Numbers>> {
    let mut text = [0; 64];
    match fgetxattr(dir, ATTRIBUTE, &mut text) {
        Ok(length) => Ok(parse_numbers(&text[..length])),
        Err(Errno::NODATA) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

fn parse_numbers(text: &[u8]) -> Option<Numbers> {
    let (base, generation) = std::str::from_utf8(text).ok()?.split_once(' ')?;
    Some((base.parse().ok()?, generation.parse().ok()?))
}

/// The directory of one sandbox, held open.
pub struct SandboxPlace {
    dir: OwnedFd,
    /// The writable layers.
    pub fs: OwnedFd,
    /// What the daemon shows the sandbox.
    pub host: OwnedFd,
}

impl SandboxPlace {
    /// A socket on which init will listen. The path goes through the descriptor, since a data directory's path may be
    /// longer than the 108 bytes of a socket address.
    pub fn listen(&self) -> io::Result<OwnedFd> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        bind(&socket, &socket_address(self.dir.as_fd())?)?;
        listen(&socket, BACKLOG)?;
        Ok(socket)
    }
}

/// The address of init's socket in an open directory.
pub fn socket_address(dir: BorrowedFd<'_>) -> io::Result<SocketAddrUnix> {
    use std::os::fd::AsRawFd;
    Ok(SocketAddrUnix::new(format!("/proc/self/fd/{}/{INIT_SOCKET}", dir.as_raw_fd()))?)
}

/// Asks ext4 to put each child into another part of the disk, as with home directories. Sandboxes come and go as a
/// whole, and an ext4 without a journal searches through everything that was recently deleted nearby for each new
/// file: creating a sandbox took 25 ms after a few hundred deletions, and takes 3 ms with this. Other file systems
/// need no such hint and reject it.
fn spread_out(dir: BorrowedFd<'_>) {
    if let Ok(flags) = ioctl_getflags(dir)
        && let Err(error) = ioctl_setflags(dir, flags | IFlags::TOPDIR)
    {
        tracing::debug!(%error, "the file system does not support the hint to spread directories out");
    }
}
