//! File operations: what the daemon asks init to do with files, and what init returns.
//!
//! An operation travels as [`crate::guest::Program::Files`] and has the streams of a command, so that flow control,
//! kill and deadlines work as for commands:
//!
//! ```text
//! stdin    upload bytes, then one byte COMMIT: an end without it means that the upload was aborted
//! stdout   Read: a record with Opened, then bytes.  Pack: bytes.  List, Glob, Grep, Watch: records
//! stderr   the result, once, at the end: Result<FileDone, FileError> in postcard
//! ```
//!
//! A record is its length (u32, little endian) and that many bytes of postcard. Both enums only grow, at their ends.
//! Paths and names are bytes, since the kernel of a guest allows any.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The oldest protocol version with `Program::Files`.
pub const VERSION_WITH_FILES: u32 = 2;
/// The oldest protocol version with [`FileOp::Edit`] and [`FileOp::GrepWith`].
pub const VERSION_WITH_EDIT: u32 = 3;

/// The kernel's PATH_MAX without the NUL: system calls reject longer paths.
pub const PATH_MAX: usize = 4095;
/// The largest record: a path, a link target and a matching line, with room to spare.
pub const RECORD_MAX: usize = 64 * 1024;
/// The largest result.
pub const RESULT_MAX: usize = 32 * 1024;
/// The last byte of a complete upload.
pub const COMMIT: u8 = 1;
/// The most that is returned of a matching line.
pub const MATCH_TEXT_MAX: usize = 2048;
/// The most entries in one page of a listing.
pub const LIST_MAX: u32 = 1000;
/// The largest file that can be edited, before and after the edit: init holds both in memory at once.
pub const EDIT_FILE_MAX: u64 = 16 * 1024 * 1024;
/// The longest text to find and the longest replacement in an edit: both travel in the message that starts it.
pub const EDIT_TEXT_MAX: usize = 1024 * 1024;

/// The operations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileOp {
    /// Reads a regular file, as many bytes as it had when it was opened.
    Read {
        /// Absolute path.
        path: Vec<u8>,
        /// The range to read.
        range: ByteRange,
    },
    /// Writes a file, replacing an existing regular file, completely or not at all.
    Write(WriteOptions),
    /// Returns metadata.
    Stat {
        /// Absolute path.
        path: Vec<u8>,
        /// Whether to follow a link at the end of the path.
        links: Links,
    },
    /// Lists a directory by name, starting after a given name.
    List {
        /// Absolute path.
        path: Vec<u8>,
        /// The last name of the previous page; empty for the first page.
        after: Vec<u8>,
        /// At most [`LIST_MAX`].
        limit: u32,
    },
    /// Creates a directory.
    MakeDirectory {
        /// Absolute path.
        path: Vec<u8>,
        /// Also creates missing parents, and accepts an existing directory.
        parents: bool,
        /// Permissions; 0755 by default.
        mode: Option<u32>,
    },
    /// Renames something; copies and removes it if the target is on another file system.
    Move(Relocate),
    /// Copies a file, a link or a tree.
    Copy(Relocate),
    /// Removes something. Links are removed, not their targets.
    Remove {
        /// Absolute path.
        path: Vec<u8>,
        /// Removes a directory with everything in it, however deep.
        recursive: bool,
        /// The condition that the file must meet.
        condition: Condition,
    },
    /// Finds paths below a directory that match a pattern.
    Glob {
        /// Absolute path.
        root: Vec<u8>,
        /// Relative to the root. `*`, `?`, `[a-z]`, `{a,b}`, and `**` for any number of directories.
        pattern: Vec<u8>,
        /// Where to stop.
        limits: SearchLimits,
    },
    /// Finds lines that match a pattern, in one file or in all files below a directory.
    Grep(Grep),
    /// Reports changes of a file, or below a directory, until the operation is ended.
    Watch {
        /// Absolute path.
        path: Vec<u8>,
        /// Also watches directories below it, including new ones.
        recursive: bool,
    },
    /// Sends a directory, or one file, as a tar stream.
    Pack {
        /// Absolute path.
        path: Vec<u8>,
    },
    /// Unpacks an untrusted tar stream into a directory, which is created if missing.
    Unpack {
        /// Absolute path.
        path: Vec<u8>,
    },
    /// Replaces text in a file. Since version 3.
    Edit(Edit),
    /// `Grep` with more options. Since version 3.
    GrepWith(GrepWith),
}

impl FileOp {
    /// Whether the caller sends bytes.
    pub fn takes_input(&self) -> bool {
        matches!(self, Self::Write(_) | Self::Unpack { .. })
    }

    /// The oldest version of [`crate::guest`] that knows this operation.
    pub fn since(&self) -> u32 {
        match self {
            Self::Edit(_) | Self::GrepWith(_) => VERSION_WITH_EDIT,
            Self::Read { .. }
            | Self::Write(_)
            | Self::Stat { .. }
            | Self::List { .. }
            | Self::MakeDirectory { .. }
            | Self::Move(_)
            | Self::Copy(_)
            | Self::Remove { .. }
            | Self::Glob { .. }
            | Self::Grep(_)
            | Self::Watch { .. }
            | Self::Pack { .. }
            | Self::Unpack { .. } => VERSION_WITH_FILES,
        }
    }
}

/// A range of bytes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ByteRange {
    /// The whole file.
    Whole,
    /// From `start` up to `end`, which is excluded.
    Span {
        /// The first byte.
        start: u64,
        /// The byte after the last; `None` means the end of the file.
        end: Option<u64>,
    },
    /// The last bytes of the file, this many.
    Last(u64),
}

/// Whether to follow a link at the end of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Links {
    /// Follow it.
    Follow,
    /// Use the link itself.
    Keep,
}

/// How to write a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteOptions {
    /// Absolute path. A link at its end is followed, even if its target does not exist yet.
    pub path: Vec<u8>,
    /// Permissions. `None`: those of the existing file, otherwise 0644.
    pub mode: Option<u32>,
    /// Creates missing parent directories.
    pub parents: bool,
    /// The length, if known: init reserves the space at once, and any other length is an error.
    pub size: Option<u64>,
    /// The condition that the existing file must meet.
    pub condition: Condition,
}

/// A condition that a file must meet before an operation changes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Condition {
    /// No condition.
    None,
    /// The file must not exist.
    Absent,
    /// The file must exist.
    Present,
    /// The file must have one of these versions.
    Is(Vec<FileVersion>),
}

/// Identifies one content of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileVersion {
    /// Inode number.
    pub inode: u64,
    /// When the file was last written to.
    pub modified: Timestamp,
    /// Length.
    pub size: u64,
}

/// A time in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Timestamp {
    /// Seconds since 1970.
    pub seconds: i64,
    /// Nanoseconds within the second.
    pub nanoseconds: u32,
}

/// Source and target of a move or copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Relocate {
    /// Absolute path. A link at its end is not followed.
    pub from: Vec<u8>,
    /// Absolute path: the new name itself, not a directory to put it in.
    pub to: Vec<u8>,
    /// Whether to replace an existing file. A directory that is not empty is never replaced.
    pub overwrite: bool,
    /// Creates missing parent directories of the target.
    pub parents: bool,
    /// `Copy`: copies directories with everything in them.
    pub recursive: bool,
}

/// Limits of a search. The result says which limit ended the search.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SearchLimits {
    /// Matches to return.
    pub matches: u32,
    /// Directory entries to examine.
    pub entries: u64,
    /// Bytes to read from files.
    pub bytes: u64,
    /// Time.
    pub milliseconds: u64,
    /// Whether to include hidden names (with a leading dot) that the pattern does not name with their dot.
    pub hidden: bool,
}

/// What to search for in files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grep {
    /// Absolute path of a directory or a file.
    pub root: Vec<u8>,
    /// The pattern.
    pub pattern: String,
    /// Whether the pattern is a regular expression.
    pub regex: bool,
    /// Whether to ignore case.
    pub ignore_case: bool,
    /// Only files that match one of these globs; a glob without a slash is matched against the file name alone.
    pub include: Vec<Vec<u8>>,
    /// Where to stop.
    pub limits: SearchLimits,
}

/// What to search for in files, what to skip, and how to return lines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrepWith {
    /// The search.
    pub grep: Grep,
    /// Directories to skip: those whose name, without its parents, matches one of these.
    pub exclude_directories: Vec<Vec<u8>>,
    /// Whether lines are returned with the CR at their end.
    pub carriage_returns: bool,
}

/// An edit of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Edit {
    /// Absolute path. A link at its end is followed. The file must be a regular file of UTF-8 text of at most
    /// [`EDIT_FILE_MAX`].
    pub path: Vec<u8>,
    /// The text to find, 1 byte to [`EDIT_TEXT_MAX`]. Matches do not overlap and are counted from the start.
    pub old: String,
    /// The replacement, at most [`EDIT_TEXT_MAX`].
    pub new: String,
    /// Replaces every match. If false, the text must occur exactly once.
    pub all: bool,
    /// How line endings in both texts are matched.
    pub line_ends: LineEnds,
    /// The condition that the existing file must meet.
    pub condition: Condition,
}

/// How line endings in a text match those of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LineEnds {
    /// Exactly.
    Exact,
    /// Exactly; if the text does not occur, with CR LF; if it still does not occur, with LF.
    Adapted,
}

/// Result of an operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileDone {
    /// Success, without details.
    Done,
    /// `Stat`
    Stat(FileStat),
    /// `Read`, `Pack`: everything was sent.
    Sent {
        /// Bytes sent, without the record at the front.
        bytes: u64,
        /// Entries that a tar stream cannot hold: sockets, devices, files that vanished.
        skipped: u64,
    },
    /// `Write`
    Written {
        /// The file after the write.
        stat: FileStat,
        /// Whether the file is new.
        created: bool,
    },
    /// `List`
    Listed {
        /// Whether there are more names after the last one sent.
        more: bool,
    },
    /// `Glob`, `Grep`
    Searched {
        /// Entries examined.
        entries: u64,
        /// Bytes read.
        bytes: u64,
        /// Entries skipped: not permitted, nested too deep, binary.
        skipped: u64,
        /// The limit that ended the search early.
        cut: Option<Cut>,
    },
    /// `Copy`, `Unpack`
    Made {
        /// Files, links and directories.
        entries: u64,
        /// Total size of the files.
        bytes: u64,
        /// Entries left out: sockets, devices.
        skipped: u64,
    },
    /// `Edit`
    Edited {
        /// The file after the edit.
        stat: FileStat,
        /// Number of replaced matches.
        replaced: u64,
    },
    /// `GrepWith`: as `Searched`.
    Grepped {
        /// Entries examined.
        entries: u64,
        /// Bytes read.
        bytes: u64,
        /// Entries skipped.
        skipped: u64,
        /// The limit that ended the search early.
        cut: Option<Cut>,
        /// Number of skipped files that begin as text and turn out to be binary later: lines before that point may
        /// have been returned.
        mixed: u64,
    },
}

/// A limit that ends a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cut {
    /// [`SearchLimits::matches`]
    Matches,
    /// [`SearchLimits::entries`]
    Entries,
    /// [`SearchLimits::bytes`]
    Bytes,
    /// [`SearchLimits::milliseconds`]
    Time,
}

/// Metadata of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileStat {
    /// Kind.
    pub kind: FileKind,
    /// Size in bytes.
    pub size: u64,
    /// Permissions, with setuid, setgid and sticky.
    pub mode: u32,
    /// Owner id inside the guest.
    pub uid: u32,
    /// Group id inside the guest.
    pub gid: u32,
    /// Inode number.
    pub inode: u64,
    /// Number of hard links.
    pub links: u64,
    /// When the file was last written to.
    pub modified: Timestamp,
    /// Target of a symbolic link.
    pub target: Option<Vec<u8>>,
}

impl FileStat {
    /// Identifies this content of the file.
    pub fn version(&self) -> FileVersion {
        FileVersion { inode: self.inode, modified: self.modified, size: self.size }
    }
}

/// Kinds of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A FIFO.
    Fifo,
    /// A socket.
    Socket,
    /// A character or block device.
    Device,
    /// A kind that this version does not know.
    Unknown,
}

/// The first record of `Read`: which file was opened, and which of its bytes follow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    /// The file.
    pub stat: FileStat,
    /// Offset of the first byte that follows.
    pub start: u64,
    /// How many bytes follow. `None`: the kernel does not report the length of this file (`/proc`), so init reads to
    /// its end.
    pub length: Option<u64>,
}

/// A record of `List` (with a name) and `Glob` (with a path relative to the root).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Name or path.
    pub name: Vec<u8>,
    /// Metadata. Links are not followed.
    pub stat: FileStat,
}

/// A record of `Grep`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrepMatch {
    /// Absolute path.
    pub path: Vec<u8>,
    /// Line number, from 1.
    pub line: u64,
    /// Offset of the match in the line, in bytes from 0.
    pub column: u64,
    /// The line, without its line ending.
    pub text: Vec<u8>,
    /// Offset in the line at which the text begins: above 0 if the line is long and its start was left out.
    pub text_start: u64,
    /// Whether the line continues after the text.
    pub text_cut: bool,
}

/// A record of `Watch`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum WatchEvent {
    /// From here on, every change is reported.
    Ready,
    /// Something changed.
    Changed {
        /// What changed.
        change: Change,
        /// Absolute path.
        path: Vec<u8>,
        /// Whether it is a directory.
        directory: bool,
    },
    /// More happened than could be reported.
    Overflow,
    /// A directory is not watched: it is nested too deep, or there are too many.
    NotWatched {
        /// Absolute path.
        path: Vec<u8>,
    },
    /// The watched file or directory is gone. The last event.
    Gone,
}

/// What happened to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// It was created.
    Created,
    /// It was written to.
    Modified,
    /// It was closed after it had been open for writing.
    Written,
    /// Permissions, owner or times changed.
    Attributes,
    /// It was removed.
    Removed,
    /// It was renamed away from this path; the new path is reported too if it is watched.
    MovedFrom,
    /// It was renamed to this path.
    MovedTo,
}

/// Why an operation failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("`{}` {kind}{}", String::from_utf8_lossy(path), Because(detail))]
pub struct FileError {
    /// What is wrong.
    pub kind: FileErrorKind,
    /// The file.
    pub path: Vec<u8>,
    /// Details for people; may be empty.
    pub detail: String,
}

struct Because<'a>(&'a str);

impl std::fmt::Display for Because<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, ": {}", self.0) }
    }
}

/// What is wrong with a file. The message follows the file's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum FileErrorKind {
    /// The file, or a directory on the way to it, does not exist.
    #[error("does not exist")]
    NotFound,
    /// The user has no permission.
    #[error("cannot be accessed this way by this user: permission denied")]
    PermissionDenied,
    /// The operation needs a file.
    #[error("is a directory")]
    IsDirectory,
    /// The operation needs a directory, here or on the way.
    #[error("is not a directory, or a part of the path is not one")]
    NotADirectory,
    /// The file must not exist.
    #[error("exists already")]
    AlreadyExists,
    /// Removing it needs `recursive`.
    #[error("is a directory that is not empty")]
    DirectoryNotEmpty,
    /// Relative, with a NUL, or too long.
    #[error("is not a valid path")]
    InvalidPath,
    /// Links that form a loop, or too many of them.
    #[error("leads through too many links")]
    TooManyLinks,
    /// On the disk, in the quota, or of inodes.
    #[error("cannot be written: no space left")]
    NoSpace,
    /// A FIFO, a socket, a device.
    #[error("is not a regular file")]
    NotARegularFile,
    /// The file became shorter during the read.
    #[error("changed while it was read")]
    Changed,
    /// Larger than the file system allows, or than the request said.
    #[error("is too large")]
    TooLarge,
    /// Deeper than can be walked.
    #[error("is nested too deep")]
    TooDeep,
    /// The file system rejects writes.
    #[error("is on a read-only file system")]
    ReadOnly,
    /// A mount point or a running program.
    #[error("is in use")]
    Busy,
    /// The range begins after the end of the file.
    #[error("has {size} bytes and ends before the requested range")]
    RangeNotSatisfiable {
        /// The file's length.
        size: u64,
    },
    /// The file does not meet the condition.
    #[error("does not meet the condition of the request")]
    ConditionFailed,
    /// An invalid glob or regular expression.
    #[error("cannot be searched: the pattern is not valid")]
    InvalidPattern,
    /// Not a tar stream, or a tar stream that must not be unpacked.
    #[error("cannot be unpacked from this archive")]
    InvalidArchive,
    /// The upload was aborted.
    #[error("was not uploaded completely")]
    Incomplete,
    /// The guest is out of memory, descriptors or watches.
    #[error("needs more than the sandbox has left")]
    NoRoom,
    /// A copy or move of a directory into itself.
    #[error("cannot be moved or copied into itself")]
    IntoItself,
    /// Any other error of the kernel.
    #[error("failed")]
    Other,
    /// The file is not UTF-8.
    #[error("is not UTF-8 text")]
    NotText,
    /// The text to replace does not occur in the file.
    #[error("does not contain the text to replace")]
    NoMatch,
    /// The text to replace occurs more than once, and `every` was not requested.
    #[error("contains the text to replace {count} times, not once")]
    SeveralMatches {
        /// Number of occurrences.
        count: u64,
    },
}

/// Appends a record to `to`.
pub fn put_record<T: Serialize>(record: &T, to: &mut Vec<u8>) {
    let start = to.len();
    to.extend_from_slice(&[0; 4]);
    let body = postcard::to_allocvec(record).expect("records are made of types that postcard can write");
    to.extend_from_slice(&body);
    let length = (to.len() - start - 4) as u32;
    to[start..start + 4].copy_from_slice(&length.to_le_bytes());
}

/// Why bytes are not a record. The rest of the stream cannot be read after any of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Longer than [`RECORD_MAX`].
    #[error("a record must have at most {RECORD_MAX} bytes, got {length}")]
    TooLong {
        /// The length that the record claims.
        length: usize,
    },
    /// The record does not parse.
    #[error("the record cannot be parsed")]
    Malformed,
}

/// The record at the front of `bytes` and its length there, or `None` if it is still incomplete.
pub fn take_record<T: DeserializeOwned>(bytes: &[u8]) -> Result<Option<(T, usize)>, RecordError> {
    let Some((length, rest)) = bytes.split_first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    if length > RECORD_MAX {
        return Err(RecordError::TooLong { length });
    }
    let Some(body) = rest.get(..length) else { return Ok(None) };
    match postcard::take_from_bytes(body) {
        Ok((record, [])) => Ok(Some((record, 4 + length))),
        Ok(_) | Err(_) => Err(RecordError::Malformed),
    }
}

/// Encodes the result for stderr.
pub fn result_bytes(result: &Result<FileDone, FileError>) -> Vec<u8> {
    postcard::to_allocvec(result).expect("results are made of types that postcard can write")
}

/// Decodes the result from stderr; `None` if the bytes are not a result.
pub fn result_from_bytes(bytes: &[u8]) -> Option<Result<FileDone, FileError>> {
    match postcard::take_from_bytes(bytes) {
        Ok((result, [])) => Some(result),
        Ok(_) | Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(name: &[u8]) -> FileEntry {
        let stat = FileStat {
            kind: FileKind::Symlink,
            size: 3,
            mode: 0o777,
            uid: 0,
            gid: 0,
            inode: 7,
            links: 1,
            modified: Timestamp { seconds: -1, nanoseconds: 5 },
            target: Some(b"\xff".to_vec()),
        };
        FileEntry { name: name.to_vec(), stat }
    }

    #[test]
    fn records_are_read_back_one_after_the_other() {
        let mut bytes = Vec::new();
        put_record(&entry(b"a\xfe"), &mut bytes);
        put_record(&entry(b""), &mut bytes);
        let (first, length) = take_record::<FileEntry>(&bytes).expect("it parses").expect("it is whole");
        assert_eq!(first, entry(b"a\xfe"));
        let (second, rest) = take_record::<FileEntry>(&bytes[length..]).expect("it parses").expect("whole");
        assert_eq!((second, length + rest), (entry(b""), bytes.len()));
        for short in 0..length {
            assert_eq!(take_record::<FileEntry>(&bytes[..short]), Ok(None), "{short} bytes of it");
        }
    }

    #[test]
    fn a_record_that_claims_to_be_huge_is_refused_before_it_is_read() {
        let claim = (RECORD_MAX as u32 + 1).to_le_bytes();
        let length = RECORD_MAX + 1;
        assert_eq!(take_record::<FileEntry>(&claim), Err(RecordError::TooLong { length }));
    }

    #[test]
    fn an_error_reads_as_a_sentence() {
        let error =
            FileError { kind: FileErrorKind::NotFound, path: b"/a/b".to_vec(), detail: String::new() };
        assert_eq!(error.to_string(), "`/a/b` does not exist");
        let detail = "x".into();
        let error = FileError { kind: FileErrorKind::NoSpace, detail, ..error };
        assert_eq!(error.to_string(), "`/a/b` cannot be written: no space left: x");
    }

    proptest! {
        #[test]
        fn rubbish_is_refused_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = take_record::<FileEntry>(&bytes);
            let _ = take_record::<WatchEvent>(&bytes);
            let _ = take_record::<GrepMatch>(&bytes);
            let _ = result_from_bytes(&bytes);
        }
    }
}
