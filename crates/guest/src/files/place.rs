//! Resolving a path that will be written: its directory, held open, and its name there.
//!
//! Once there is a [`Place`], nothing depends on the path any more: swapping a directory for a link during an
//! operation affects the next operation, not this one.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use wire::files::{FileError, FileErrorKind};

use super::{At, failure, refused};

/// Links followed at the end of a path, as many as the kernel follows.
const LINKS_MAX: usize = 40;
/// Names to try for a temporary file.
const NAMES_TRIED_MAX: usize = 16;
/// A directory to work in; it need not be readable.
const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// A directory and a name in it.
pub struct Place {
    pub parent: OwnedFd,
    pub name: CString,
}

/// Whether to create missing directories on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parents {
    Make,
    Need,
}

impl Parents {
    pub fn wanted(make: bool) -> Self {
        if make { Self::Make } else { Self::Need }
    }
}

impl Place {
    /// The place of `path`, whether or not it exists. A link at its end is not followed.
    pub fn of(path: &[u8], parents: Parents) -> Result<Self, FileError> {
        let root = rustix::fs::open("/", DIRECTORY, Mode::empty()).at(b"/")?;
        Self::below(root, path, path, parents)
    }

    /// The place of a file written to `path`: links at its end are followed, even if their target does not exist.
    pub fn followed(path: &[u8], parents: Parents) -> Result<Self, FileError> {
        let mut place = Self::of(path, parents)?;
        for _ in 0..LINKS_MAX {
            let Some(stat) = place.stat().at(path)? else { return Ok(place) };
            if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
                return Ok(place);
            }
            let target = rustix::fs::readlinkat(&place.parent, &place.name, Vec::new()).at(path)?;
            let target = target.as_bytes();
            let from = if target.starts_with(b"/") {
                rustix::fs::open("/", DIRECTORY, Mode::empty()).at(b"/")?
            } else {
                place.parent
            };
            place = Self::below(from, target, path, parents)?;
        }
        Err(refused(path, Errno::LOOP))
    }

    /// `told` is the path for error messages.
    fn below(from: OwnedFd, path: &[u8], told: &[u8], parents: Parents) -> Result<Self, FileError> {
        let mut components = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()).peekable();
        let directory = || failure(FileErrorKind::IsDirectory, told, "");
        let mut parent = from;
        while let Some(name) = components.next() {
            let last = components.peek().is_none();
            if last && (matches!(name, b"." | b"..") || path.ends_with(b"/")) {
                return Err(directory());
            }
            let name = CString::new(name).map_err(|_| failure(FileErrorKind::InvalidPath, told, ""))?;
            if last {
                return Ok(Self { parent, name });
            }
            parent = enter(parent, &name, parents).at(told)?;
        }
        Err(directory())
    }

    /// Metadata of what is there. Links are not followed.
    pub fn stat(&self) -> Result<Option<Stat>, Errno> {
        match rustix::fs::statat(&self.parent, &self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// A free name beside it: calls `attempt` with names until one is not taken.
    pub fn beside<T>(
        &self,
        mut attempt: impl FnMut(&CStr) -> Result<T, Errno>,
    ) -> Result<(CString, T), Errno> {
        for _ in 0..NAMES_TRIED_MAX {
            let mut random = [0; 8];
            rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
            let name = format!(".shoal-{:016x}", u64::from_ne_bytes(random));
            let name = CString::new(name).expect("digits have no NUL");
            match attempt(&name) {
                Err(Errno::EXIST) => {}
                result => return result.map(|made| (name, made)),
            }
        }
        Err(Errno::EXIST)
    }
}

/// Enters a directory, following links, and creates it first if it is missing.
fn enter(from: OwnedFd, name: &CStr, parents: Parents) -> Result<OwnedFd, Errno> {
    match rustix::fs::openat(&from, name, DIRECTORY, Mode::empty()) {
        Err(Errno::NOENT) if parents == Parents::Make => {
            match rustix::fs::mkdirat(&from, name, Mode::from_raw_mode(0o755)) {
                // Another process created it, or it is a dangling link, which stays not found.
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
            rustix::fs::openat(&from, name, DIRECTORY, Mode::empty())
        }
        result => result,
    }
}

/// Opens a directory to read it. `path` may lead through links.
pub fn open_directory(path: &[u8]) -> Result<OwnedFd, FileError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    rustix::fs::open(path, flags, Mode::empty()).at(path)
}

/// Opens a directory to read it, not a link.
pub fn open_directory_at(parent: impl AsFd, name: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(parent, name, flags, Mode::empty()) {
        // With both flags, the kernel reports a link as not a directory.
        Err(Errno::LOOP) => Err(Errno::NOTDIR),
        result => result,
    }
}
