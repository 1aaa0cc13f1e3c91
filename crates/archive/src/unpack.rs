//! Unpacks a stream into a tree, and never touches anything outside that tree, whatever the stream contains.
//!
//! The rules:
//! - A name must be relative and must not contain `..`; otherwise unpacking stops at this entry.
//! - Nothing is ever written through a link: every directory of a path is opened without following links, whether it existed
//!   before or came in the stream.
//! - A new file or link replaces an existing file or link, but never a directory; a directory replaces neither.
//! - Only the permissions of user, group and others are kept: no setuid, no setgid. Files belong to the unpacking user.
//! - Devices, FIFOs and unknown entries are counted and skipped. Sparse files are rejected, so that every byte on disk was sent.
//! - A hard link must lead to a regular file below the same top, opened in the same way.

use std::ffi::CString;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Timespec, Timestamps};
use rustix::io::Errno;

use crate::DEPTH_MAX;
use crate::error::UnpackError;
use crate::read::{Entries, Entry, EntryKind};

/// The size of one read.
const BUFFER: usize = 256 * 1024;
/// How often to remove something that keeps appearing under the name of a new file.
const ATTEMPTS_MAX: usize = 8;
/// Directories that get their permissions at the end, because they could not be written to otherwise.
const LATER_MAX: usize = 65_536;

/// Which symbolic links are created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Links {
    /// All of them.
    Any,
    /// Only those that stay below the top. Others are counted and skipped.
    Inside,
}

/// The result of unpacking a stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Unpacked {
    /// Files, links and directories.
    pub entries: u64,
    /// Bytes of contents.
    pub bytes: u64,
    /// Skipped entries.
    pub skipped: u64,
}

/// Unpacks a stream into the directory `top`.
pub fn unpack(from: &mut dyn Read, top: &OwnedFd, links: Links) -> Result<Unpacked, UnpackError> {
    let mut entries = Entries::new(from);
    let mut unpacking =
        Unpacking { top: top.as_fd(), links, parent: None, later: Vec::new(), unpacked: Unpacked::default() };
    let mut buffer = vec![0; BUFFER];
    while let Some(entry) = entries.next_entry()? {
        unpacking.entry(&entry, &mut entries, &mut buffer)?;
    }
    unpacking.finish()
}

struct Unpacking<'a> {
    top: BorrowedFd<'a>,
    links: Links,
    /// The directory of the last entry, which is often that of the next one too.
    parent: Option<(Vec<CString>, OwnedFd)>,
    /// Directories and the permissions they get at the end.
    later: Vec<(Vec<CString>, u32)>,
    unpacked: Unpacked,
}

impl Unpacking<'_> {
    fn entry(
        &mut self,
        entry: &Entry,
        contents: &mut Entries<&mut dyn Read>,
        buffer: &mut [u8],
    ) -> Result<(), UnpackError> {
        if matches!(entry.kind, EntryKind::Fifo | EntryKind::Other) {
            self.unpacked.skipped += 1;
            return Ok(());
        }
        let mut names = names(&entry.path)?;
        let Some(name) = names.pop() else {
            // The top itself keeps the permissions that its creator gave it.
            return match entry.kind {
                EntryKind::Directory => Ok(()),
                _ => Err(UnpackError::Name { path: entry.path.clone(), why: "it names nothing" }),
            };
        };
        if entry.kind == EntryKind::Symlink
            && self.links == Links::Inside
            && !leads_inside(&entry.link, names.len())
        {
            self.unpacked.skipped += 1;
            return Ok(());
        }
        let parent = self.parent(names, entry)?;
        match entry.kind {
            EntryKind::File => {
                let file = make_file(&parent, &name, entry)?;
                loop {
                    let length = contents.read_contents(buffer)?;
                    if length == 0 {
                        break;
                    }
                    let written = write_all(&file, &buffer[..length]);
                    written.map_err(|source| created(entry, source))?;
                    self.unpacked.bytes += length as u64;
                }
                let mode = Mode::from_raw_mode(entry.mode & 0o777);
                rustix::fs::fchmod(&file, mode).map_err(|source| created(entry, source))?;
                set_time(&file, entry.modified);
            }
            EntryKind::Directory => self.directory(&parent, &name, entry)?,
            EntryKind::Symlink => {
                in_its_place(&parent, &name, entry, || {
                    rustix::fs::symlinkat(entry.link.as_slice(), &parent, &name)
                })?;
            }
            EntryKind::HardLink => self.hard_link(&parent, &name, entry)?,
            EntryKind::Fifo | EntryKind::Other => unreachable!("it was left out above"),
        }
        self.unpacked.entries += 1;
        Ok(())
    }

    /// Opens the directory of an entry, and creates it if needed.
    fn parent(&mut self, names: Vec<CString>, entry: &Entry) -> Result<OwnedFd, UnpackError> {
        if let Some((known, parent)) = &self.parent
            && *known == names
        {
            return duplicate(parent.as_fd(), entry);
        }
        let parent = self.descend(&names, entry, Missing::Make)?;
        let kept = duplicate(parent.as_fd(), entry)?;
        self.parent = Some((names, kept));
        Ok(parent)
    }

    fn descend(&self, names: &[CString], entry: &Entry, missing: Missing) -> Result<OwnedFd, UnpackError> {
        let mut directory = duplicate(self.top, entry)?;
        for name in names {
            let opened = match rustix::fs::openat(&directory, name, DIRECTORY, Mode::empty()) {
                Err(Errno::NOENT) if missing == Missing::Make => {
                    match rustix::fs::mkdirat(&directory, name, Mode::from_raw_mode(0o755)) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(source) => return Err(created(entry, source)),
                    }
                    rustix::fs::openat(&directory, name, DIRECTORY, Mode::empty())
                }
                opened => opened,
            };
            directory = match opened {
                Ok(opened) => opened,
                Err(Errno::NOTDIR | Errno::LOOP) => return Err(obstacle(&directory, name, entry)),
                Err(source) => return Err(created(entry, source)),
            };
        }
        Ok(directory)
    }

    fn directory(&mut self, parent: &OwnedFd, name: &CString, entry: &Entry) -> Result<(), UnpackError> {
        match rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(source) => return Err(created(entry, source)),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = match rustix::fs::openat(parent, name, flags, Mode::empty()) {
            Ok(directory) => directory,
            Err(Errno::NOTDIR | Errno::LOOP) => return Err(obstacle(parent, name, entry)),
            Err(source) => return Err(created(entry, source)),
        };
        let mode = entry.mode & 0o777;
        if mode & 0o300 != 0o300 && self.later.len() < LATER_MAX {
            self.later.push((names(&entry.path)?, mode));
            return Ok(());
        }
        rustix::fs::fchmod(&directory, Mode::from_raw_mode(mode)).map_err(|source| created(entry, source))
    }

    fn hard_link(&mut self, parent: &OwnedFd, name: &CString, entry: &Entry) -> Result<(), UnpackError> {
        let mut target = names(&entry.link)?;
        let Some(target_name) = target.pop() else {
            return Err(UnpackError::Name { path: entry.link.clone(), why: "it names nothing" });
        };
        let target_parent = self.descend(&target, entry, Missing::Refuse)?;
        let stat = rustix::fs::statat(&target_parent, &target_name, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|source| created(entry, source))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(UnpackError::Name {
                path: entry.link.clone(),
                why: "the target of a hard link must be a file",
            });
        }
        let there = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW);
        if there.is_ok_and(|there| (there.st_dev, there.st_ino) == (stat.st_dev, stat.st_ino)) {
            return Ok(()); // It is that file already.
        }
        in_its_place(parent, name, entry, || {
            rustix::fs::linkat(&target_parent, &target_name, parent, name, AtFlags::empty())
        })
    }

    /// Sets the postponed permissions of directories, the deepest first.
    fn finish(mut self) -> Result<Unpacked, UnpackError> {
        while let Some((names, mode)) = self.later.pop() {
            let path: Vec<u8> = names.iter().map(|name| name.to_bytes()).collect::<Vec<_>>().join(&b'/');
            let entry = Entry { mode, ..Entry::directory(path) };
            let (name, parents) = names.split_last().expect("the top is not among them");
            let parent = self.descend(parents, &entry, Missing::Refuse)?;
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            rustix::fs::openat(parent, name, flags, Mode::empty())
                .and_then(|directory| rustix::fs::fchmod(directory, Mode::from_raw_mode(mode)))
                .map_err(|source| created(&entry, source))?;
        }
        Ok(self.unpacked)
    }
}

/// Whether to create missing directories.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    Make,
    Refuse,
}

/// Opens a directory of a path, never through a link.
const DIRECTORY: OFlags =
    OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn duplicate(directory: BorrowedFd<'_>, entry: &Entry) -> Result<OwnedFd, UnpackError> {
    rustix::io::fcntl_dupfd_cloexec(directory, 0).map_err(|source| created(entry, source))
}

fn created(entry: &Entry, source: Errno) -> UnpackError {
    UnpackError::Create { path: entry.path.clone(), source }
}

/// Finds out what exists instead of a directory: a link, or something else.
fn obstacle(parent: &OwnedFd, name: &CString, entry: &Entry) -> UnpackError {
    let stat = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW);
    match stat.map(|stat| FileType::from_raw_mode(stat.st_mode)) {
        Ok(FileType::Symlink) => UnpackError::ThroughLink { path: entry.path.clone() },
        Ok(_) | Err(_) => UnpackError::InTheWay { path: entry.path.clone() },
    }
}

fn make_file(parent: &OwnedFd, name: &CString, entry: &Entry) -> Result<OwnedFd, UnpackError> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    in_its_place(parent, name, entry, || rustix::fs::openat(parent, name, flags, Mode::from_raw_mode(0o600)))
}

/// Creates an entry under a name. Removes an existing one first, unless it is a directory.
fn in_its_place<T>(
    parent: &OwnedFd,
    name: &CString,
    entry: &Entry,
    mut make: impl FnMut() -> Result<T, Errno>,
) -> Result<T, UnpackError> {
    for _ in 0..ATTEMPTS_MAX {
        match make() {
            Ok(made) => return Ok(made),
            Err(Errno::EXIST) => {}
            Err(source) => return Err(created(entry, source)),
        }
        match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::ISDIR) => return Err(UnpackError::InTheWay { path: entry.path.clone() }),
            Err(source) => return Err(created(entry, source)),
        }
    }
    // Another process creates it again as fast as we remove it.
    Err(UnpackError::InTheWay { path: entry.path.clone() })
}

/// The checked components of a path. Empty for the top itself.
fn names(path: &[u8]) -> Result<Vec<CString>, UnpackError> {
    let refused = |why| UnpackError::Name { path: path.to_vec(), why };
    if path.starts_with(b"/") {
        return Err(refused("it is absolute"));
    }
    let mut names = Vec::new();
    for name in path.split(|byte| *byte == b'/') {
        match name {
            b"" | b"." => {}
            b".." => return Err(refused("it contains `..`")),
            name => names.push(CString::new(name).map_err(|_| refused("it contains a NUL byte"))?),
        }
        if names.len() > DEPTH_MAX {
            return Err(refused("it is nested too deep"));
        }
    }
    Ok(names)
}

/// Whether a link that is `depth` directories below the top stays below it. `..` is allowed only at the front, where it leads
/// through real directories; after another name, which may itself be a link, it could lead anywhere.
fn leads_inside(target: &[u8], depth: usize) -> bool {
    if target.starts_with(b"/") {
        return false;
    }
    let mut names = target.split(|byte| *byte == b'/').filter(|name| !matches!(*name, b"" | b"."));
    let mut up = 0;
    let mut behind = false;
    names.all(|name| {
        if name == b".." {
            up += 1;
            !behind && up <= depth
        } else {
            behind = true;
            true
        }
    })
}

fn set_time(file: &OwnedFd, seconds: i64) {
    let time = Timespec { tv_sec: seconds, tv_nsec: 0 };
    // A time that the file system cannot store is no reason to fail.
    let _ = rustix::fs::futimens(file, &Timestamps { last_access: time, last_modification: time });
}

fn write_all(to: &OwnedFd, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::write(to, bytes) {
            Ok(length) => bytes = &bytes[length..],
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
