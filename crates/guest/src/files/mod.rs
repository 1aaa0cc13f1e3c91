//! File operations: what a forked child of init does instead of executing a program.
//!
//! The child is in a cgroup of its own, has the requested user's rights, its three streams and nothing else of init,
//! and sees the files that guest code sees; so a link leads nowhere that guest code could not go. The child may wait
//! for a disk or a full pipe: init does not wait with it, and ends it when the daemon no longer wants its answer. Its
//! memory is bounded whatever the files are. The protocol is that of [`wire::files`].
//!
//! Read in this order: this file runs an operation and carries its streams; `transfer` is read and write, `place`
//! resolves a path that may not exist yet, `edit` replaces text in a file; then `list`, `change` (create, move, copy,
//! remove), `search` (glob and grep, with `pattern` and `walk`), `watch`, and `tar`.

mod change;
mod edit;
mod list;
mod pattern;
mod place;
mod search;
mod tar;
mod transfer;
mod walk;
mod watch;

use std::io;

use rustix::fs::{FileType, Stat};
use rustix::io::Errno;
use serde::Serialize;
use wire::files::{
    COMMIT, FileDone, FileError, FileErrorKind, FileKind, FileOp, FileStat, PATH_MAX, RESULT_MAX, Timestamp,
};

/// Bytes to buffer before a write to stdout.
const OUT_TARGET: usize = 32 * 1024;
/// The longest path in a result: the whole path, unless it comes from a very deep tree.
const PATH_TOLD_MAX: usize = 2 * PATH_MAX;
/// The longest detail.
const DETAIL_MAX: usize = 512;

/// Performs the operation, reports its result, and returns the exit code.
pub fn run(op: &FileOp) -> i32 {
    let mut result = perform(op);
    if let Err(error) = &mut result {
        error.path.truncate(PATH_TOLD_MAX);
        let end =
            (0..=DETAIL_MAX.min(error.detail.len())).rev().find(|at| error.detail.is_char_boundary(*at));
        error.detail.truncate(end.unwrap_or(0));
    }
    let bytes = wire::files::result_bytes(&result);
    debug_assert!(bytes.len() <= RESULT_MAX, "a result is a path, a target and a sentence");
    // If the result cannot be written, the daemon sees an end without a result.
    let told = write_all(rustix::stdio::stderr(), &bytes);
    i32::from(result.is_err() || told.is_err())
}

fn perform(op: &FileOp) -> Result<FileDone, FileError> {
    match op {
        FileOp::Read { path, range } => transfer::read(checked(path)?, *range),
        FileOp::Write(options) => transfer::write(checked(&options.path)?, options),
        FileOp::Stat { path, links } => list::stat(checked(path)?, *links),
        FileOp::List { path, after, limit } => list::list(checked(path)?, after, *limit),
        FileOp::MakeDirectory { path, parents, mode } => {
            change::make_directory(checked(path)?, *parents, *mode)
        }
        FileOp::Move(relocate) => change::rename(checked(&relocate.from)?, checked(&relocate.to)?, relocate),
        FileOp::Copy(relocate) => change::copy(checked(&relocate.from)?, checked(&relocate.to)?, relocate),
        FileOp::Remove { path, recursive, condition } => {
            change::remove(checked(path)?, *recursive, condition)
        }
        FileOp::Glob { root, pattern, limits } => search::glob(checked(root)?, pattern, limits),
        FileOp::Grep(grep) => search::grep(checked(&grep.root)?, grep),
        FileOp::Watch { path, recursive } => watch::watch(checked(path)?, *recursive),
        FileOp::Pack { path } => tar::pack(checked(path)?),
        FileOp::Unpack { path } => tar::unpack(checked(path)?),
        FileOp::Edit(edit) => edit::edit(checked(&edit.path)?, edit),
        FileOp::GrepWith(with) => search::grep_with(checked(&with.grep.root)?, with),
    }
}

/// Checks that the kernel accepts the path.
fn checked(path: &[u8]) -> Result<&[u8], FileError> {
    let wrong = if !path.starts_with(b"/") {
        "it must be absolute"
    } else if path.contains(&0) {
        "it contains a NUL byte"
    } else if path.len() > PATH_MAX {
        "it is longer than the kernel allows"
    } else {
        return Ok(path);
    };
    Err(failure(FileErrorKind::InvalidPath, path, wrong))
}

/// An error with a message of our own.
fn failure(kind: FileErrorKind, path: &[u8], detail: &str) -> FileError {
    FileError { kind, path: path.to_vec(), detail: detail.into() }
}

/// An error with the kernel's message.
fn refused(path: &[u8], errno: Errno) -> FileError {
    use FileErrorKind::*;
    let kind = match errno {
        Errno::NOENT => NotFound,
        Errno::ACCESS | Errno::PERM => PermissionDenied,
        Errno::ISDIR => IsDirectory,
        Errno::NOTDIR => NotADirectory,
        Errno::EXIST => AlreadyExists,
        Errno::NOTEMPTY => DirectoryNotEmpty,
        Errno::NAMETOOLONG | Errno::ILSEQ => InvalidPath,
        Errno::LOOP => TooManyLinks,
        Errno::NOSPC | Errno::DQUOT => NoSpace,
        Errno::NXIO | Errno::NODEV => NotARegularFile,
        Errno::FBIG | Errno::OVERFLOW => TooLarge,
        Errno::ROFS => ReadOnly,
        Errno::BUSY | Errno::TXTBSY => Busy,
        Errno::NOMEM | Errno::MFILE | Errno::NFILE => NoRoom,
        _ => Other,
    };
    let detail = if matches!(kind, Other | NoRoom | InvalidPath) { words(errno) } else { String::new() };
    FileError { kind, path: path.to_vec(), detail }
}

/// The kernel's error, without the number.
fn words(errno: Errno) -> String {
    let text = io::Error::from(errno).to_string();
    text.split(" (os error").next().unwrap_or_default().to_lowercase()
}

/// Adds the path to the kernel's error.
trait At<T> {
    fn at(self, path: &[u8]) -> Result<T, FileError>;
}

impl<T> At<T> for Result<T, Errno> {
    fn at(self, path: &[u8]) -> Result<T, FileError> {
        self.map_err(|errno| refused(path, errno))
    }
}

/// Converts the kernel's metadata.
#[allow(clippy::useless_conversion)] // The link count is shorter on other architectures.
fn stat_of(stat: &Stat, target: Option<Vec<u8>>) -> FileStat {
    FileStat {
        kind: kind_of(stat),
        size: u64::try_from(stat.st_size).unwrap_or(0),
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        inode: stat.st_ino,
        links: u64::from(stat.st_nlink),
        modified: Timestamp { seconds: stat.st_mtime, nanoseconds: stat.st_mtime_nsec as u32 },
        target,
    }
}

fn kind_of(stat: &Stat) -> FileKind {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => FileKind::File,
        FileType::Directory => FileKind::Directory,
        FileType::Symlink => FileKind::Symlink,
        FileType::Fifo => FileKind::Fifo,
        FileType::Socket => FileKind::Socket,
        FileType::CharacterDevice | FileType::BlockDevice => FileKind::Device,
        FileType::Unknown => FileKind::Unknown,
    }
}

fn write_all(to: impl std::os::fd::AsFd, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::write(&to, bytes) {
            Ok(length) => bytes = &bytes[length..],
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// The reader of stdout is gone.
fn unheard(errno: Errno) -> FileError {
    failure(FileErrorKind::Other, b"", &format!("cannot answer: {}", words(errno)))
}

/// Buffers records for stdout.
#[derive(Default)]
struct Records {
    gathered: Vec<u8>,
}

impl Records {
    fn put<T: Serialize>(&mut self, record: &T) -> Result<(), FileError> {
        wire::files::put_record(record, &mut self.gathered);
        if self.gathered.len() >= OUT_TARGET { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), FileError> {
        write_all(rustix::stdio::stdout(), &self.gathered).map_err(unheard)?;
        self.gathered.clear();
        Ok(())
    }
}

/// Reads stdin up to the mark of a complete upload. One byte is always held back, since the last one is the mark.
struct Upload {
    held: Option<u8>,
    over: bool,
}

/// Why there are no more bytes.
enum Broken {
    /// The end came without the mark.
    Incomplete,
    Kernel(Errno),
}

impl Upload {
    fn new() -> Self {
        Self { held: None, over: false }
    }

    /// Reads once into `buffer`, which holds at least two bytes. 0: end of the upload.
    fn take(&mut self, buffer: &mut [u8]) -> Result<usize, Broken> {
        assert!(buffer.len() >= 2, "a byte that is held back must not fill the buffer");
        while !self.over {
            let start = match self.held {
                None => 0,
                Some(held) => {
                    buffer[0] = held;
                    1
                }
            };
            match rustix::io::read(rustix::stdio::stdin(), &mut buffer[start..]) {
                Ok(0) => {
                    self.over = true;
                    if self.held != Some(COMMIT) {
                        return Err(Broken::Incomplete);
                    }
                }
                Ok(length) => {
                    let last = start + length - 1;
                    self.held = Some(buffer[last]);
                    if last > 0 {
                        return Ok(last);
                    }
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Broken::Kernel(errno)),
            }
        }
        Ok(0)
    }
}

impl Broken {
    fn with(self, path: &[u8]) -> FileError {
        match self {
            Self::Incomplete => failure(FileErrorKind::Incomplete, path, "the upload was aborted"),
            Self::Kernel(errno) => refused(path, errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_paths_are_taken() {
        assert!(checked(b"/").is_ok() && checked(b"/\xff/x").is_ok());
        for wrong in [&b""[..], b"a", b"./a", b"/a\0b", &[b'/'; PATH_MAX + 1]] {
            assert_eq!(checked(wrong).expect_err("it is wrong").kind, FileErrorKind::InvalidPath);
        }
    }
}
