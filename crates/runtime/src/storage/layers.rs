//! The layers of images on disk, shared read-only by all sandboxes.
//!
//! ```text
//! <data>/images/layers/<digest>/          a layer, with guest ids; never changed once it has its name
//!                      unfinished-<pid>/  one in the making
//!               trash/                    what is being removed
//!               blobs/                    the daemon's: what layers are made from
//! ```
//!
//! A layer gets its name once it is complete and on disk, and loses it before its first file is removed. So a crash at any time leaves
//! complete layers, and leftovers that are recognised by their names. Every path is built from digests.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, RenameFlags, fsync, mkdirat, openat, renameat_with, syncfs};
use rustix::io::Errno;
use wire::Digest;

use crate::storage::directories::{DIRECTORY, make_and_open, names};
use crate::storage::remove::remove_tree;

/// Begins the name of a layer that is being made.
const UNFINISHED: &str = "unfinished-";

/// The directories, held open.
pub struct Layers {
    layers: OwnedFd,
    trash: OwnedFd,
    blobs: OwnedFd,
}

impl Layers {
    /// Opens the directories below `images`, and creates missing ones.
    pub fn open(images: BorrowedFd<'_>) -> io::Result<Self> {
        Ok(Self {
            layers: make_and_open(images, "layers")?,
            trash: make_and_open(images, "trash")?,
            blobs: make_and_open(images, "blobs")?,
        })
    }

    /// Removes what a killed launcher had begun to create or to remove. Its walkers died with it.
    pub fn sweep(&self) -> io::Result<()> {
        for name in names(self.trash.as_fd())? {
            remove_tree(self.trash.as_fd(), &name)?;
        }
        for name in names(self.layers.as_fd())?.iter().filter(|name| name.starts_with(UNFINISHED)) {
            remove_tree(self.layers.as_fd(), name)?;
        }
        Ok(())
    }

    /// The directory of layers, each under the digits of its digest.
    pub fn layers(&self) -> BorrowedFd<'_> {
        self.layers.as_fd()
    }

    /// Whether a layer exists.
    pub fn has(&self, layer: Digest) -> io::Result<bool> {
        match openat(&self.layers, layer.hex(), DIRECTORY, Mode::empty()) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// All layers, ordered by name.
    pub fn list(&self) -> io::Result<Vec<Digest>> {
        let mut list: Vec<Digest> =
            names(self.layers.as_fd())?.iter().filter_map(|name| Digest::from_hex(name)).collect();
        list.sort();
        Ok(list)
    }

    /// A blob, for reading.
    pub fn blob(&self, blob: Digest) -> io::Result<std::fs::File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(openat(&self.blobs, blob.hex(), flags, Mode::empty())?.into())
    }

    /// An empty directory that becomes a layer.
    pub fn begin(&self) -> io::Result<Unfinished<'_>> {
        let name = format!("{UNFINISHED}{}", rustix::process::getpid().as_raw_nonzero());
        // A process with the same id may have died in the middle.
        remove_tree(self.layers.as_fd(), &name)?;
        mkdirat(&self.layers, &name, Mode::from_raw_mode(0o755))?;
        let directory = openat(&self.layers, &name, DIRECTORY, Mode::empty())?;
        Ok(Unfinished { all: self, name, directory })
    }

    /// Removes a layer. No effect if there is none.
    pub fn remove(&self, layer: Digest) -> io::Result<()> {
        let name = layer.hex();
        let refuge = format!("{name}-{}", rustix::process::getpid().as_raw_nonzero());
        match renameat_with(&self.layers, &name, &self.trash, &refuge, RenameFlags::NOREPLACE) {
            Ok(()) => remove_tree(self.trash.as_fd(), &refuge),
            Err(Errno::NOENT) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }
}

/// A layer under construction.
pub struct Unfinished<'a> {
    all: &'a Layers,
    name: String,
    /// Its root.
    pub directory: OwnedFd,
}

impl Unfinished<'_> {
    /// Gives the layer its name, once all of it is on disk. If another process has created the same layer, that one is kept.
    pub fn finish(self, layer: Digest) -> io::Result<()> {
        syncfs(&self.directory)?;
        let layers = self.all.layers.as_fd();
        match renameat_with(layers, &self.name, layers, layer.hex(), RenameFlags::NOREPLACE) {
            Ok(()) => Ok(fsync(layers)?),
            Err(Errno::EXIST) => self.discard(),
            Err(e) => Err(e.into()),
        }
    }

    /// Removes it.
    pub fn discard(self) -> io::Result<()> {
        remove_tree(self.all.layers.as_fd(), &self.name)
    }
}
