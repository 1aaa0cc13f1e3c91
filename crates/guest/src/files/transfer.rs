//! Reading and writing one file.
//!
//! A read returns as many bytes as the file had when it was opened: appended bytes are not included, and a file that
//! became shorter is an error. A write goes to an unnamed file, which gets its name when all bytes have arrived; so
//! an aborted write leaves nothing behind. On file systems without unnamed files, it has a name that begins with
//! `.shoal-`.

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{Access, AtFlags, CWD, FileType, Gid, Mode, OFlags, RenameFlags, ResolveFlags, Stat, Uid};
use rustix::io::Errno;
use rustix::pipe::SpliceFlags;
use wire::files::{
    ByteRange, Condition, FileDone, FileError, FileErrorKind, FileKind, Opened, WriteOptions, put_record,
};

use super::place::{Parents, Place};
use super::{At, Upload, failure, kind_of, refused, stat_of, unheard, write_all};

/// Size of the copy buffer.
const BUFFER: usize = 256 * 1024;
/// Permissions of a new file.
const MODE_DEFAULT: u32 = 0o644;
/// The permissions that a file keeps when its content is replaced: not setuid and setgid, which were meant for the
/// old content.
pub const MODE_KEPT: u32 = 0o777;

/// Sends the bytes of a file.
pub fn read(path: &[u8], range: ByteRange) -> Result<FileDone, FileError> {
    let (file, stat) = open_regular(path)?;
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    // Files of /proc and similar report 0 when they do not know their length.
    let unknown = size == 0 && range == ByteRange::Whole;
    let (start, length) =
        span(range, size).ok_or_else(|| failure(FileErrorKind::RangeNotSatisfiable { size }, path, ""))?;
    let opened = Opened { stat: stat_of(&stat, None), start, length: (!unknown).then_some(length) };
    let mut front = Vec::new();
    put_record(&opened, &mut front);
    write_all(rustix::stdio::stdout(), &front).map_err(unheard)?;
    let limit = if unknown { u64::MAX } else { length };
    let bytes = send(&file, start, limit, path)?;
    if !unknown && bytes < length {
        let detail = format!("it ended after {} of {size} bytes", start + bytes);
        return Err(failure(FileErrorKind::Changed, path, &detail));
    }
    Ok(FileDone::Sent { bytes, skipped: 0 })
}

/// Opens a regular file and nothing else, since opening some devices has effects. If the file is replaced between the
/// two checks, the open does not block and the second check rejects it.
pub fn open_regular(path: &[u8]) -> Result<(OwnedFd, Stat), FileError> {
    need_regular(&rustix::fs::stat(path).at(path)?, path)?;
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    // Not through `/proc/self/exe` and similar: they lead to files of init and not of the guest.
    let file = match rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS) {
        Err(Errno::NOSYS) => rustix::fs::open(path, flags, Mode::empty()),
        file => file,
    };
    let file = file.at(path)?;
    let stat = rustix::fs::fstat(&file).at(path)?;
    need_regular(&stat, path)?;
    Ok((file, stat))
}

/// Rejects everything but regular files.
pub fn need_regular(stat: &Stat, path: &[u8]) -> Result<(), FileError> {
    match kind_of(stat) {
        FileKind::File => Ok(()),
        FileKind::Directory => Err(failure(FileErrorKind::IsDirectory, path, "")),
        kind => {
            let what = match kind {
                FileKind::Fifo => "it is a FIFO",
                FileKind::Socket => "it is a socket",
                FileKind::Device => "it is a device",
                FileKind::Symlink => "it is a link",
                FileKind::File | FileKind::Directory | FileKind::Unknown => "",
            };
            Err(failure(FileErrorKind::NotARegularFile, path, what))
        }
    }
}

/// The first byte of a range and its length, in a file of this size. `None`: the range begins after the end.
fn span(range: ByteRange, size: u64) -> Option<(u64, u64)> {
    match range {
        ByteRange::Whole => Some((0, size)),
        ByteRange::Last(0) => None,
        ByteRange::Last(_) if size == 0 => None,
        ByteRange::Last(count) => {
            let count = count.min(size);
            Some((size - count, count))
        }
        ByteRange::Span { start, .. } if start >= size => None,
        ByteRange::Span { start, end } => {
            let end = end.unwrap_or(size).min(size);
            Some((start, end.checked_sub(start).filter(|length| *length > 0)?))
        }
    }
}

/// Copies at most `limit` bytes to stdout, and returns how many there were.
fn send(file: &OwnedFd, start: u64, limit: u64, path: &[u8]) -> Result<u64, FileError> {
    let mut sent = 0;
    // The kernel passes its own pages to the pipe if it can, which saves a copy.
    let mut position = start;
    while sent < limit {
        let length = (limit - sent).min(BUFFER as u64) as usize;
        let stdout = rustix::stdio::stdout();
        match rustix::pipe::splice(file, Some(&mut position), stdout, None, length, SpliceFlags::empty()) {
            Ok(0) => return Ok(sent),
            Ok(length) => sent += length as u64,
            Err(Errno::INTR) => {}
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => break,
            Err(errno) => return Err(refused(path, errno)),
        }
    }
    let mut buffer = if sent < limit { vec![0; BUFFER] } else { Vec::new() };
    while sent < limit {
        let length = (limit - sent).min(BUFFER as u64) as usize;
        match rustix::io::pread(file, &mut buffer[..length], start + sent) {
            Ok(0) => break,
            Ok(length) => {
                write_all(rustix::stdio::stdout(), &buffer[..length]).map_err(unheard)?;
                sent += length as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(refused(path, errno)),
        }
    }
    Ok(sent)
}

/// Receives the bytes of a file.
pub fn write(path: &[u8], options: &WriteOptions) -> Result<FileDone, FileError> {
    let place = Place::followed(path, Parents::wanted(options.parents))?;
    let before = place.stat().at(path)?;
    if let Some(before) = &before {
        need_regular(before, path)?;
        // A file that is not writable is not replaced either, even if its directory would allow that.
        rustix::fs::accessat(&place.parent, &place.name, Access::WRITE_OK, AtFlags::EACCESS).at(path)?;
    }
    check(&options.condition, before.as_ref(), path)?;
    let draft = Draft::begin(&place).at(path)?;
    let mut upload = Upload::new();
    let mut buffer = vec![0; BUFFER];
    // If the number of bytes is known, they need not be checked for the mark that ends them.
    let mut bytes = options.size.map_or(Ok(0), |size| move_in(&draft.file, size)).at(path)?;
    loop {
        let length = upload.take(&mut buffer).map_err(|broken| broken.with(path))?;
        if length == 0 {
            break;
        }
        bytes += length as u64;
        if options.size.is_some_and(|size| bytes > size) {
            return Err(failure(FileErrorKind::TooLarge, path, "more bytes came than were announced"));
        }
        write_all(&draft.file, &buffer[..length]).at(path)?;
    }
    if options.size.is_some_and(|size| bytes < size) {
        return Err(failure(FileErrorKind::Incomplete, path, "fewer bytes came than were announced"));
    }
    let mode = match (options.mode, &before) {
        (Some(mode), _) => mode & 0o7777,
        (None, Some(before)) => before.st_mode & MODE_KEPT,
        (None, None) => MODE_DEFAULT,
    };
    if let Some(before) = &before {
        // Only root may give files away; a new file of another user is that user's own, since the directory is
        // writable for that user.
        let owner = (Uid::from_raw(before.st_uid), Gid::from_raw(before.st_gid));
        let _ = rustix::fs::fchown(&draft.file, Some(owner.0), Some(owner.1));
    }
    // After the owner, since a change of owner clears setuid.
    rustix::fs::fchmod(&draft.file, Mode::from_raw_mode(mode)).at(path)?;
    // The file may have changed during the upload.
    let now = place.stat().at(path)?;
    if let Some(now) = &now {
        need_regular(now, path)?;
    }
    check(&options.condition, now.as_ref(), path)?;
    let file = draft.publish(&place, options.condition == Condition::Absent).at(path)?;
    let stat = rustix::fs::fstat(&file).at(path)?;
    Ok(FileDone::Written { stat: stat_of(&stat, None), created: now.is_none() })
}

/// Lets the kernel move up to `size` bytes from stdin into the file, as far as it can. The caller reads the rest.
fn move_in(file: &OwnedFd, size: u64) -> Result<u64, Errno> {
    let mut moved = 0;
    while moved < size {
        let length = usize::try_from(size - moved).unwrap_or(usize::MAX);
        match rustix::pipe::splice(rustix::stdio::stdin(), None, file, None, length, SpliceFlags::empty()) {
            Ok(0) | Err(Errno::INVAL | Errno::NOSYS) => break,
            Ok(length) => moved += length as u64,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(moved)
}

/// Whether the existing file meets the caller's condition.
pub fn check(condition: &Condition, stat: Option<&Stat>, path: &[u8]) -> Result<(), FileError> {
    let holds = match (condition, stat) {
        (Condition::None, _) => true,
        (Condition::Absent, stat) => stat.is_none(),
        (Condition::Present, stat) => stat.is_some(),
        (Condition::Is(_), None) => false,
        (Condition::Is(versions), Some(stat)) => versions.contains(&stat_of(stat, None).version()),
    };
    if holds { Ok(()) } else { Err(failure(FileErrorKind::ConditionFailed, path, "")) }
}

/// A file that has no name yet.
pub struct Draft<'a> {
    pub file: OwnedFd,
    place: &'a Place,
    /// Set on file systems where every file has a name.
    name: Option<CString>,
}

impl<'a> Draft<'a> {
    /// An empty file, in the directory where it will be.
    pub fn begin(place: &'a Place) -> Result<Self, Errno> {
        let private = Mode::from_raw_mode(0o600);
        let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        match rustix::fs::openat(&place.parent, c".", flags, private) {
            Ok(file) => return Ok(Self { file, place, name: None }),
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::WRONLY | OFlags::CLOEXEC;
        let (name, file) = place.beside(|name| rustix::fs::openat(&place.parent, name, flags, private))?;
        Ok(Self { file, place, name: Some(name) })
    }

    /// Gives it its name. `absent`: only if the name is free.
    pub fn publish(mut self, place: &Place, absent: bool) -> Result<OwnedFd, Errno> {
        let parent = place.parent.as_fd();
        if self.name.is_none() {
            match self.link(&place.name) {
                Ok(()) => {
                    return self
                        .file
                        .try_clone()
                        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::MFILE));
                }
                Err(Errno::EXIST) if !absent => {}
                Err(errno) => return Err(errno),
            }
            let (name, ()) = place.beside(|name| self.link(name))?;
            self.name = Some(name);
        }
        let name = self.name.as_ref().expect("it has one by now");
        let flags = if absent { RenameFlags::NOREPLACE } else { RenameFlags::empty() };
        rustix::fs::renameat_with(parent, name, parent, &place.name, flags)?;
        self.name = None;
        self.file.try_clone().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::MFILE))
    }

    fn link(&self, name: &std::ffi::CStr) -> Result<(), Errno> {
        let parent = &self.place.parent;
        // Linux 6.10 allows this to the process that opened the file; earlier kernels require a privilege.
        match rustix::fs::linkat(&self.file, c"", parent, name, AtFlags::EMPTY_PATH) {
            Err(Errno::NOENT | Errno::PERM | Errno::INVAL) => {}
            result => return result,
        }
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        rustix::fs::linkat(CWD, path, parent, name, AtFlags::SYMLINK_FOLLOW)
    }
}

impl Drop for Draft<'_> {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            // A failure here adds nothing to the error that led here.
            let _ = rustix::fs::unlinkat(&self.place.parent, name, AtFlags::empty());
        }
    }
}

/// Whether something is a directory.
pub fn is_directory(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_end_where_the_file_does() {
        let span_of = |start, end| ByteRange::Span { start, end };
        for (range, size, expected) in [
            (ByteRange::Whole, 10, Some((0, 10))),
            (ByteRange::Whole, 0, Some((0, 0))),
            (ByteRange::Last(3), 10, Some((7, 3))),
            (ByteRange::Last(30), 10, Some((0, 10))),
            (ByteRange::Last(0), 10, None),
            (ByteRange::Last(5), 0, None),
            (span_of(0, None), 10, Some((0, 10))),
            (span_of(4, Some(6)), 10, Some((4, 2))),
            (span_of(4, Some(u64::MAX)), 10, Some((4, 6))),
            (span_of(9, None), 10, Some((9, 1))),
            (span_of(10, None), 10, None),
            (span_of(u64::MAX, Some(u64::MAX)), 10, None),
            (span_of(5, Some(5)), 10, None),
            (span_of(0, None), 0, None),
        ] {
            assert_eq!(span(range, size), expected, "{range:?} of {size}");
        }
    }
}
