//! Creating, moving, copying and removing.
//!
//! A guest controls these trees and may change them during a walk: no link is followed, every step starts from a
//! directory that is held open, and only the path down to the current directory is held in memory.

use std::ffi::{CStr, CString};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, RenameFlags, Stat, Timespec, Timestamps};
use rustix::io::Errno;
use wire::files::{Condition, FileDone, FileError, FileErrorKind, Relocate};

use super::list::is_dots;
use super::place::{Parents, Place, open_directory_at};
use super::transfer::{Draft, check, is_directory};
use super::walk::DEPTH_MAX;
use super::{At, failure, refused, write_all};

/// Permissions of a new directory.
const DIRECTORY_MODE_DEFAULT: u32 = 0o755;
/// The permissions that a copy keeps: setuid and setgid were meant for the original.
const MODE_KEPT: u32 = 0o777;
/// Size of the copy buffer.
const BUFFER: usize = 256 * 1024;
/// Names of a directory that are held while it is emptied.
const BATCH: usize = 1024;
/// Directories held open while a tree is removed. Deeper ones are moved up to its top first.
const REMOVE_DEPTH: usize = 64;

/// Creates a directory.
pub fn make_directory(path: &[u8], parents: bool, mode: Option<u32>) -> Result<FileDone, FileError> {
    let trimmed = trimmed(path);
    if trimmed == b"/" {
        return if parents { Ok(FileDone::Done) } else { Err(refused(path, Errno::EXIST)) };
    }
    let place = Place::of(trimmed, Parents::wanted(parents))?;
    let wanted = Mode::from_raw_mode(mode.unwrap_or(DIRECTORY_MODE_DEFAULT) & 0o7777);
    match rustix::fs::mkdirat(&place.parent, &place.name, wanted) {
        Ok(()) if mode.is_some() => {
            // The umask has removed bits from the requested mode.
            let made = open_directory_at(&place.parent, &place.name).at(path)?;
            rustix::fs::fchmod(made, wanted).at(path)?;
        }
        Ok(()) => {}
        Err(Errno::EXIST) if parents => {
            // A link to a directory is accepted too.
            let stat = rustix::fs::statat(&place.parent, &place.name, AtFlags::empty()).at(path)?;
            if !is_directory(&stat) {
                return Err(refused(path, Errno::EXIST));
            }
        }
        Err(errno) => return Err(refused(path, errno)),
    }
    Ok(FileDone::Done)
}

/// Without trailing slashes: `a/` is the directory `a` to mkdir and rename.
fn trimmed(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|byte| *byte != b'/').map_or(1, |last| last + 1);
    &path[..end]
}

/// Renames something.
pub fn rename(from: &[u8], to: &[u8], wish: &Relocate) -> Result<FileDone, FileError> {
    let source = Place::of(trimmed(from), Parents::Need)?;
    let stat = rustix::fs::statat(&source.parent, &source.name, AtFlags::SYMLINK_NOFOLLOW).at(from)?;
    let target = Place::of(trimmed(to), Parents::wanted(wish.parents))?;
    let flags = if wish.overwrite { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
    let renamed =
        rustix::fs::renameat_with(&source.parent, &source.name, &target.parent, &target.name, flags);
    match renamed {
        Ok(()) => Ok(FileDone::Done),
        Err(Errno::XDEV) => {
            let wish = Relocate { recursive: true, ..wish.clone() };
            let mut copying = Copying::new(from, to, Attributes::Keep);
            copying.copy(&source, &stat, &target, &wish)?;
            if copying.skipped > 0 {
                // Nothing is removed that could not be copied.
                let detail = "it contains sockets or devices, which cannot move to another file system";
                return Err(failure(FileErrorKind::NotARegularFile, from, detail));
            }
            Removing::new(from).remove(&source, &stat)?;
            Ok(FileDone::Done)
        }
        Err(Errno::INVAL) => Err(failure(FileErrorKind::IntoItself, from, "")),
        // All of these concern the target.
        Err(errno @ (Errno::EXIST | Errno::NOTEMPTY | Errno::ISDIR | Errno::NOTDIR)) => {
            Err(refused(to, errno))
        }
        Err(errno) => Err(refused(from, errno)),
    }
}

/// Copies something.
pub fn copy(from: &[u8], to: &[u8], wish: &Relocate) -> Result<FileDone, FileError> {
    let source = Place::of(trimmed(from), Parents::Need)?;
    let stat = rustix::fs::statat(&source.parent, &source.name, AtFlags::SYMLINK_NOFOLLOW).at(from)?;
    let target = Place::of(trimmed(to), Parents::wanted(wish.parents))?;
    let mut copying = Copying::new(from, to, Attributes::New);
    copying.copy(&source, &stat, &target, wish)?;
    Ok(FileDone::Made { entries: copying.entries, bytes: copying.bytes, skipped: copying.skipped })
}

/// Whether a copy gets the owner of the original.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Attributes {
    Keep,
    New,
}

struct Copying<'a> {
    from: &'a [u8],
    to: &'a [u8],
    attributes: Attributes,
    /// The root of the copy, which the walk must not enter.
    made: Option<(u64, u64)>,
    entries: u64,
    bytes: u64,
    skipped: u64,
}

impl<'a> Copying<'a> {
    fn new(from: &'a [u8], to: &'a [u8], attributes: Attributes) -> Self {
        Self { from, to, attributes, made: None, entries: 0, bytes: 0, skipped: 0 }
    }

    fn copy(
        &mut self,
        source: &Place,
        stat: &Stat,
        target: &Place,
        wish: &Relocate,
    ) -> Result<(), FileError> {
        let there = target.stat().at(self.to)?;
        if there.as_ref().is_some_and(|there| (there.st_dev, there.st_ino) == (stat.st_dev, stat.st_ino)) {
            return Err(failure(FileErrorKind::IntoItself, self.from, "it is the same file"));
        }
        match (&there, is_directory(stat)) {
            (Some(_), _) if !wish.overwrite => return Err(refused(self.to, Errno::EXIST)),
            (Some(there), false) if is_directory(there) => return Err(refused(self.to, Errno::ISDIR)),
            (Some(there), true) if !is_directory(there) => return Err(refused(self.to, Errno::NOTDIR)),
            (Some(_) | None, _) => {}
        }
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory if !wish.recursive => Err(refused(self.from, Errno::ISDIR)),
            FileType::Directory => self.directory(source.parent.as_fd(), &source.name, stat, target, 0),
            FileType::RegularFile => self.file(source.parent.as_fd(), &source.name, target),
            FileType::Symlink => self.link(source.parent.as_fd(), &source.name, target),
            _ => Err(failure(FileErrorKind::NotARegularFile, self.from, "")),
        }
    }

    fn directory(
        &mut self,
        parent: BorrowedFd<'_>,
        name: &CStr,
        stat: &Stat,
        target: &Place,
        depth: usize,
    ) -> Result<(), FileError> {
        if depth >= DEPTH_MAX / 2 {
            return Err(failure(FileErrorKind::TooDeep, self.from, ""));
        }
        if self.made == Some((stat.st_dev, stat.st_ino)) {
            return Err(failure(FileErrorKind::IntoItself, self.from, ""));
        }
        let source = open_directory_at(parent, name).at(self.from)?;
        // Permissions are set last, since they may forbid writing to the directory.
        match rustix::fs::mkdirat(&target.parent, &target.name, Mode::from_raw_mode(0o700)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(refused(self.to, errno)),
        }
        let made = open_directory_at(&target.parent, &target.name).at(self.to)?;
        if self.made.is_none() {
            let own = rustix::fs::fstat(&made).at(self.to)?;
            self.made = Some((own.st_dev, own.st_ino));
        }
        self.entries += 1;
        let mut inside = Place { parent: made, name: CString::default() };
        let mut entries = Dir::new(source).at(self.from)?;
        while let Some(entry) = entries.read() {
            let entry = entry.at(self.from)?;
            let name = entry.file_name();
            if is_dots(name) {
                continue;
            }
            name.clone_into(&mut inside.name);
            let source = entries.fd().at(self.from)?;
            let stat = match rustix::fs::statat(source, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                Err(Errno::NOENT) => continue, // It has vanished.
                Err(errno) => return Err(refused(self.from, errno)),
            };
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => self.directory(source, name, &stat, &inside, depth + 1)?,
                FileType::RegularFile => self.file(source, name, &inside)?,
                FileType::Symlink => self.link(source, name, &inside)?,
                _ => self.skipped += 1,
            }
        }
        self.dress(inside.parent.as_fd(), stat)
    }

    fn file(&mut self, parent: BorrowedFd<'_>, name: &CStr, target: &Place) -> Result<(), FileError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(parent, name, flags, Mode::empty()).at(self.from)?;
        let stat = rustix::fs::fstat(&file).at(self.from)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            self.skipped += 1; // Something else replaced it.
            return Ok(());
        }
        if target.stat().at(self.to)?.is_some_and(|there| is_directory(&there)) {
            return Err(refused(self.to, Errno::ISDIR));
        }
        let draft = Draft::begin(target).at(self.to)?;
        self.bytes += self.contents(&file, &draft.file)?;
        self.dress(draft.file.as_fd(), &stat)?;
        draft.publish(target, false).at(self.to)?;
        self.entries += 1;
        Ok(())
    }

    fn contents(&self, from: &OwnedFd, to: &OwnedFd) -> Result<u64, FileError> {
        let mut bytes = 0;
        loop {
            match rustix::fs::copy_file_range(from, None, to, None, 1 << 30) {
                // Files of /proc report this size too, and still have content.
                Ok(0) => break,
                Ok(length) => bytes += length as u64,
                Err(Errno::INTR) => {}
                Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => break,
                Err(errno) => return Err(refused(self.to, errno)),
            }
        }
        let mut buffer = vec![0; BUFFER];
        loop {
            match rustix::io::read(from, &mut buffer) {
                Ok(0) => return Ok(bytes),
                Ok(length) => {
                    write_all(to, &buffer[..length]).at(self.to)?;
                    bytes += length as u64;
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(refused(self.from, errno)),
            }
        }
    }

    fn link(&mut self, parent: BorrowedFd<'_>, name: &CStr, target: &Place) -> Result<(), FileError> {
        let leads_to = rustix::fs::readlinkat(parent, name, Vec::new()).at(self.from)?;
        let (temporary, ()) =
            target.beside(|name| rustix::fs::symlinkat(&leads_to, &target.parent, name)).at(self.to)?;
        let renamed = rustix::fs::renameat(&target.parent, &temporary, &target.parent, &target.name);
        if let Err(errno) = renamed {
            // The first error is the one that is returned.
            let _ = rustix::fs::unlinkat(&target.parent, &temporary, AtFlags::empty());
            return Err(refused(self.to, errno));
        }
        self.entries += 1;
        Ok(())
    }

    /// Gives a copy the permissions and times of the original.
    fn dress(&self, made: BorrowedFd<'_>, stat: &Stat) -> Result<(), FileError> {
        let mut mode = stat.st_mode & MODE_KEPT;
        if self.attributes == Attributes::Keep {
            let owner = (rustix::fs::Uid::from_raw(stat.st_uid), rustix::fs::Gid::from_raw(stat.st_gid));
            // Only root may change owners; other users copy files of their own.
            let _ = rustix::fs::fchown(made, Some(owner.0), Some(owner.1));
            mode = stat.st_mode & 0o7777;
        }
        rustix::fs::fchmod(made, Mode::from_raw_mode(mode)).at(self.to)?;
        let time = |seconds, nanoseconds| Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
        let times = Timestamps {
            last_access: time(stat.st_atime, stat.st_atime_nsec as _),
            last_modification: time(stat.st_mtime, stat.st_mtime_nsec as _),
        };
        // A file system without times is no reason to fail.
        let _ = rustix::fs::futimens(made, &times);
        Ok(())
    }
}

/// Removes something.
pub fn remove(path: &[u8], recursive: bool, condition: &Condition) -> Result<FileDone, FileError> {
    let place = Place::of(trimmed(path), Parents::Need)?;
    let stat = rustix::fs::statat(&place.parent, &place.name, AtFlags::SYMLINK_NOFOLLOW).at(path)?;
    check(condition, Some(&stat), path)?;
    if is_directory(&stat) && !recursive {
        rustix::fs::unlinkat(&place.parent, &place.name, AtFlags::REMOVEDIR).at(path)?;
        return Ok(FileDone::Done);
    }
    Removing::new(path).remove(&place, &stat)?;
    Ok(FileDone::Done)
}

struct Removing<'a> {
    path: &'a [u8],
    /// Directories that were moved up, and how many there were when the current round began.
    moved: u64,
    round: u64,
}

impl<'a> Removing<'a> {
    fn new(path: &'a [u8]) -> Self {
        Self { path, moved: 0, round: 0 }
    }

    fn remove(mut self, place: &Place, stat: &Stat) -> Result<(), FileError> {
        if !is_directory(stat) {
            return rustix::fs::unlinkat(&place.parent, &place.name, AtFlags::empty()).at(self.path);
        }
        let top = open_directory_at(&place.parent, &place.name).at(self.path)?;
        // Each round empties what is not too deep; deeper directories are moved to the top for the next round.
        loop {
            self.round = self.moved;
            self.empty(&top, &top, 0)?;
            if self.moved == self.round {
                break;
            }
        }
        drop(top);
        match rustix::fs::unlinkat(&place.parent, &place.name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(refused(self.path, errno)),
        }
    }

    fn empty(&mut self, top: &OwnedFd, directory: &OwnedFd, depth: usize) -> Result<(), FileError> {
        // A directory that shrinks while it is read may hide entries, so it is read again from the start after each
        // batch.
        loop {
            let batch = batch(directory).at(self.path)?;
            if batch.is_empty() {
                return Ok(());
            }
            let mut left = 0;
            for (name, kind) in &batch {
                if depth > 0 || !is_refuge(name, self.round..self.moved) {
                    self.entry(top, directory, name, *kind, depth)?;
                } else {
                    left += 1;
                }
            }
            if left == batch.len() {
                return Ok(()); // Only moved directories are left, for the next round.
            }
        }
    }

    fn entry(
        &mut self,
        top: &OwnedFd,
        parent: &OwnedFd,
        name: &CStr,
        kind: FileType,
        depth: usize,
    ) -> Result<(), FileError> {
        if kind != FileType::Directory {
            match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => return Ok(()),
                // The kernel did not report the kind, or it changed: this is a directory.
                Err(Errno::ISDIR) => {}
                Err(errno) => return Err(refused(self.path, errno)),
            }
        }
        let deep = depth + 1 >= REMOVE_DEPTH;
        if deep && self.move_up(parent, name, top).at(self.path)? {
            return Ok(());
        }
        if depth + 1 >= DEPTH_MAX {
            return Err(failure(FileErrorKind::TooDeep, self.path, ""));
        }
        match open_directory_at(parent, name) {
            Ok(child) => self.empty(top, &child, depth + 1)?,
            Err(Errno::NOENT) => return Ok(()),
            Err(errno) => return Err(refused(self.path, errno)),
        }
        match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(refused(self.path, errno)),
        }
    }

    /// Moves a directory to a free name at the top. Returns whether that worked: an overlay does not move directories
    /// of its lower layers.
    fn move_up(&mut self, parent: &OwnedFd, name: &CStr, top: &OwnedFd) -> Result<bool, Errno> {
        loop {
            let refuge = refuge(self.moved);
            self.moved += 1;
            match rustix::fs::renameat_with(parent, name, top, &refuge, RenameFlags::NOREPLACE) {
                Ok(()) => return Ok(true),
                Err(Errno::EXIST) => {}
                Err(Errno::XDEV) => return Ok(false),
                Err(errno) => return Err(errno),
            }
        }
    }
}

fn refuge(number: u64) -> String {
    format!(".shoal-removing-{number}")
}

/// Whether something was moved to this name in the current round, and so belongs to the next.
fn is_refuge(name: &CStr, moved: Range<u64>) -> bool {
    let number =
        name.to_str().ok().and_then(|name| name.strip_prefix(".shoal-removing-")?.parse::<u64>().ok());
    number.is_some_and(|number| moved.contains(&number))
}

/// Some names, without `.` and `..`.
fn batch(directory: &OwnedFd) -> Result<Vec<(CString, FileType)>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        if !is_dots(entry.file_name()) {
            names.push((entry.file_name().to_owned(), entry.file_type()));
        }
        if names.len() == BATCH {
            break;
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slashes_at_the_end_are_taken_off() {
        for (path, expected) in
            [(&b"/a/"[..], &b"/a"[..]), (b"/a//", b"/a"), (b"/a", b"/a"), (b"/", b"/"), (b"//", b"/")]
        {
            assert_eq!(trimmed(path), expected);
        }
    }
}
