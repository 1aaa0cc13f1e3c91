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
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags, RenameFlags, fsync, mkdirat, openat, renameat_with, syncfs};
use rustix::io::Errno;
use wire::Digest;

use crate::storage::directories::{DIRECTORY, make_and_open, names};
use crate::storage::remove::remove_tree;

/// Begins the name of a layer that is being made.
const UNFINISHED: &str = "unfinished-";

/// How long the process that unpacks a layer may live on after its walker. The kernel kills it when the walker has ended, which is
/// after the walker's lock is released, so it can still write for a moment.
const UNPACKER_END: Duration = Duration::from_secs(10);
/// Interval between two attempts to remove a tree that still grows.
const RETRY: Duration = Duration::from_millis(5);

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
            remove_abandoned(self.trash.as_fd(), &name)?;
        }
        for name in names(self.layers.as_fd())?.iter().filter(|name| name.starts_with(UNFINISHED)) {
            remove_abandoned(self.layers.as_fd(), name)?;
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

/// Removes a tree whose writer may live for a moment longer. Once the tree has no name, the writer can add nothing to it.
fn remove_abandoned(parent: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let deadline = Instant::now() + UNPACKER_END;
    loop {
        match remove_tree(parent, name) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty && Instant::now() < deadline => {
                sleep(RETRY);
            }
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, create_dir, create_dir_all};

    use super::*;

    /// The unpacker of a killed launcher may write for a moment after the next launcher has begun to clean up.
    #[test]
    fn a_tree_that_still_grows_is_removed() {
        const DIRECTORIES: u32 = 5_000;
        let images = tempfile::tempdir().expect("a directory");
        let layers = Layers::open(File::open(images.path()).expect("it opens").as_fd()).expect("they open");
        let unfinished = images.path().join("layers/unfinished-1");
        create_dir(&unfinished).expect("a directory");
        let writer = std::thread::spawn({
            let tree = File::open(&unfinished).expect("it opens");
            move || {
                // By descriptor, as an unpacker writes: it fails once the tree is gone.
                let grow = |number: u32| mkdirat(&tree, format!("{number}"), Mode::RWXU);
                (0..DIRECTORIES).map_while(|number| grow(number).ok()).count()
            }
        });
        layers.sweep().expect("the tree is removed");
        writer.join().expect("the writer ends");
        assert!(!unfinished.exists());
        create_dir_all(images.path().join("trash/a/b")).expect("directories");
        layers.sweep().expect("the trash is emptied");
        assert_eq!(names(layers.trash.as_fd()).expect("a list"), Vec::<String>::new());
    }
}
