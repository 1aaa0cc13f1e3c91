//! File operations: what the daemon asks init to do to files, and what comes back.
//!
//! An operation travels as [`crate::guest::Program::Files`] and has the streams of a command, so that flow control, kill and
//! deadlines are those of commands:
//!
//! ```text
//! stdin    upload bytes, then one byte COMMIT: an end without it is an upload that was broken off
//! stdout   Read: a record with Opened, then bytes.  Pack: bytes.  List, Glob, Grep, Watch: records
//! stderr   the result, once, at the end: Result<FileDone, FileError> in postcard
//! ```
//!
//! A record is its length (u32, little endian) and that much postcard. Both enums only grow, at their ends. Paths and names
//! are bytes: a guest may call a file whatever its kernel allows.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The oldest version that knows `Program::Files`.
pub const VERSION_WITH_FILES: u32 = 2;
/// The oldest version that knows [`FileOp::Edit`] and [`FileOp::GrepWith`].
pub const VERSION_WITH_EDIT: u32 = 3;

/// The kernel's PATH_MAX without the NUL: a longer path cannot be said to it at once.
pub const PATH_MAX: usize = 4095;
/// One record at most: a path, a target and a line of a match, with room to spare.
pub const RECORD_MAX: usize = 64 * 1024;
/// The result at most.
pub const RESULT_MAX: usize = 32 * 1024;
/// The last byte of an upload that is whole.
pub const COMMIT: u8 = 1;
/// What is said of a line in which something was found, at most.
pub const MATCH_TEXT_MAX: usize = 2048;
/// Entries of one page of a listing at most.
pub const LIST_MAX: u32 = 1000;
/// A file that is edited, before and after, at most: both are held in memory at once.
pub const EDIT_FILE_MAX: u64 = 16 * 1024 * 1024;
/// What is looked for in an edit, and what takes its place, at most: each travels in the message that starts it.
pub const EDIT_TEXT_MAX: usize = 1024 * 1024;

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileOp {
    /// The bytes of a regular file, as many as it had when it was opened.
    Read {
        /// Absolute.
        path: Vec<u8>,
        /// Which of them.
        range: ByteRange,
    },
    /// Puts a file in the place of whatever regular file was there, whole or not at all.
    Write(WriteOptions),
    /// What there is.
    Stat {
        /// Absolute.
        path: Vec<u8>,
        /// Whether a link at the end is followed.
        links: Links,
    },
    /// The entries of a directory, by name, from after one on.
    List {
        /// Absolute.
        path: Vec<u8>,
        /// The last name of the page before; empty for the first.
        after: Vec<u8>,
        /// At most [`LIST_MAX`].
        limit: u32,
    },
    /// Makes a directory.
    MakeDirectory {
        /// Absolute.
        path: Vec<u8>,
        /// Makes what leads to it too; then it may exist already.
        parents: bool,
        /// Its permissions; 0755 if left out.
        mode: Option<u32>,
    },
    /// Gives something another name, on another file system by copying it.
    Move(Relocate),
    /// Copies a file, a link or a tree.
    Copy(Relocate),
    /// Removes something. Links are removed, not what they lead to.
    Remove {
        /// Absolute.
        path: Vec<u8>,
        /// A directory with everything in it, however deep.
        recursive: bool,
        /// What must be true of it.
        condition: Condition,
    },
    /// Paths below a directory that match a pattern.
    Glob {
        /// Absolute.
        root: Vec<u8>,
        /// Relative to the root. `*`, `?`, `[a-z]`, `{a,b}`, and `**` for any directories.
        pattern: Vec<u8>,
        /// Where to stop.
        limits: SearchLimits,
    },
    /// Lines of files below a directory, or of one file, that match a pattern.
    Grep(Grep),
    /// Says what happens to a file, or below a directory, until it is ended.
    Watch {
        /// Absolute.
        path: Vec<u8>,
        /// Directories below it too, and those that come to be.
        recursive: bool,
    },
    /// A directory, or one file, as a tar stream.
    Pack {
        /// Absolute.
        path: Vec<u8>,
    },
    /// Unpacks a tar stream, without trust in it, into a directory that is made where it is missing.
    Unpack {
        /// Absolute.
        path: Vec<u8>,
    },
    /// Replaces text in a file. Since version 3.
    Edit(Edit),
    /// As `Grep`, with more to say. Since version 3.
    GrepWith(GrepWith),
}

impl FileOp {
    /// Whether the caller sends bytes.
    pub fn takes_input(&self) -> bool {
        matches!(self, Self::Write(_) | Self::Unpack { .. })
    }

    /// The oldest version of [`crate::guest`] that knows it.
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

/// Which bytes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ByteRange {
    /// All of them.
    Whole,
    /// From `start`, and no further than `end`, which is not included.
    Span {
        /// The first.
        start: u64,
        /// The one after the last; `None`: to the end.
        end: Option<u64>,
    },
    /// The last so many.
    Last(u64),
}

/// Whether a link at the end of a path is followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Links {
    /// What it leads to.
    Follow,
    /// The link itself.
    Keep,
}

/// How to write a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteOptions {
    /// Absolute. A link at its end is followed, also to a file that is yet to be.
    pub path: Vec<u8>,
    /// Permissions. `None`: those of the file that was there, else 0644.
    pub mode: Option<u32>,
    /// Makes missing directories on the way.
    pub parents: bool,
    /// How long it will be, where that is known: space is taken at once, and another length is an error.
    pub size: Option<u64>,
    /// What must be true of the file that is there.
    pub condition: Condition,
}

/// What must be true of a file for something to be done to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Condition {
    /// Nothing.
    None,
    /// There is no such file.
    Absent,
    /// There is one.
    Present,
    /// It is one of these versions.
    Is(Vec<FileVersion>),
}

/// Tells one content of a file from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileVersion {
    /// Of its inode.
    pub inode: u64,
    /// When it was last written to.
    pub modified: Timestamp,
    /// Its length.
    pub size: u64,
}

/// A time in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Timestamp {
    /// Since 1970.
    pub seconds: i64,
    /// Less than a second.
    pub nanoseconds: u32,
}

/// From where to where.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Relocate {
    /// Absolute. A link at its end is meant itself.
    pub from: Vec<u8>,
    /// Absolute, the new name itself and not a directory to put it in.
    pub to: Vec<u8>,
    /// Whether a file that is there gives way. A directory that is not empty never does.
    pub overwrite: bool,
    /// Makes missing directories on the way to it.
    pub parents: bool,
    /// `Copy`: directories with everything in them.
    pub recursive: bool,
}

/// Where a search stops. What was cut is said in its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SearchLimits {
    /// Matches that are told.
    pub matches: u32,
    /// Entries of directories that are looked at.
    pub entries: u64,
    /// Bytes of files that are read.
    pub bytes: u64,
    /// How long it takes.
    pub milliseconds: u64,
    /// Whether names that begin with a dot are looked at where the pattern does not name the dot.
    pub hidden: bool,
}

/// What to look for in files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grep {
    /// Absolute: a directory, or one file.
    pub root: Vec<u8>,
    /// What to find.
    pub pattern: String,
    /// Whether the pattern is a regular expression.
    pub regex: bool,
    /// Whether `a` also finds `A`.
    pub ignore_case: bool,
    /// Only files that match one of these; a pattern without a slash is matched against the name alone.
    pub include: Vec<Vec<u8>>,
    /// Where to stop.
    pub limits: SearchLimits,
}

/// What to look for in files, where not, and how lines are told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrepWith {
    /// What.
    pub grep: Grep,
    /// Directories that are not entered: those whose name, without the way to it, matches one of these.
    pub exclude_directories: Vec<Vec<u8>>,
    /// Whether the CR at the end of a line is told with it.
    pub carriage_returns: bool,
}

/// What to replace in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Edit {
    /// Absolute. A link at its end is followed. There must be a regular file of UTF-8 text of at most [`EDIT_FILE_MAX`].
    pub path: Vec<u8>,
    /// What to find, at most [`EDIT_TEXT_MAX`], and not nothing. Matches do not overlap, and are counted from the front.
    pub old: String,
    /// What takes its place, at most [`EDIT_TEXT_MAX`].
    pub new: String,
    /// Every match. If not, there must be one and no more.
    pub all: bool,
    /// How the ends of lines in both texts are taken.
    pub line_ends: LineEnds,
    /// What must be true of the file that is there.
    pub condition: Condition,
}

/// How the ends of lines in a text stand to those of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LineEnds {
    /// As they are.
    Exact,
    /// As they are; if there is no such text in the file, all as CR LF; if there is none either, all as LF.
    Adapted,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileDone {
    /// Nothing more to say.
    Done,
    /// `Stat`
    Stat(FileStat),
    /// `Read`, `Pack`: all was sent.
    Sent {
        /// Without the record at the front.
        bytes: u64,
        /// Entries that a tar stream does not hold: sockets, devices, what vanished.
        skipped: u64,
    },
    /// `Write`
    Written {
        /// The file as it is now.
        stat: FileStat,
        /// Whether there was none before.
        created: bool,
    },
    /// `List`
    Listed {
        /// Whether there are names after the last one sent.
        more: bool,
    },
    /// `Glob`, `Grep`
    Searched {
        /// Entries looked at.
        entries: u64,
        /// Bytes read.
        bytes: u64,
        /// What could not be looked into: no right to, too deep, binary.
        skipped: u64,
        /// Why it stopped before the end.
        cut: Option<Cut>,
    },
    /// `Copy`, `Unpack`
    Made {
        /// Files, links and directories.
        entries: u64,
        /// What the files hold.
        bytes: u64,
        /// What was left out: sockets, devices.
        skipped: u64,
    },
    /// `Edit`
    Edited {
        /// The file as it is now.
        stat: FileStat,
        /// In how many places.
        replaced: u64,
    },
    /// `GrepWith`: as `Searched`.
    Grepped {
        /// Entries looked at.
        entries: u64,
        /// Bytes read.
        bytes: u64,
        /// What could not be looked into.
        skipped: u64,
        /// Why it stopped before the end.
        cut: Option<Cut>,
        /// How many of the skipped were text at their front and binary further on: lines before that may have been told.
        mixed: u64,
    },
}

/// Which limit ended a search.
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

/// What a file is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileStat {
    /// Of which kind.
    pub kind: FileKind,
    /// In bytes.
    pub size: u64,
    /// Permissions, with setuid, setgid and sticky.
    pub mode: u32,
    /// Owner, in the guest's numbers.
    pub uid: u32,
    /// Group, in the guest's numbers.
    pub gid: u32,
    /// Of its inode.
    pub inode: u64,
    /// How many names it has.
    pub links: u64,
    /// When it was last written to.
    pub modified: Timestamp,
    /// Where a symbolic link leads.
    pub target: Option<Vec<u8>>,
}

impl FileStat {
    /// Tells this content from another.
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
    /// Something that this version does not know.
    Unknown,
}

/// The first record of `Read`: what was opened, and which of its bytes follow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    /// The file.
    pub stat: FileStat,
    /// The first byte that follows.
    pub start: u64,
    /// How many follow. `None`: the kernel does not tell the length of this file (`/proc`), it is read to its end.
    pub length: Option<u64>,
}

/// A record of `List` (with a name) and `Glob` (with a path relative to the root).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its name or path.
    pub name: Vec<u8>,
    /// What it is. Links are not followed.
    pub stat: FileStat,
}

/// A record of `Grep`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrepMatch {
    /// Absolute.
    pub path: Vec<u8>,
    /// Counted from 1.
    pub line: u64,
    /// Where in the line the match begins, in bytes from 0.
    pub column: u64,
    /// The line, without its end.
    pub text: Vec<u8>,
    /// Where in the line the text begins: not at 0 if the line is long and what comes before was left out.
    pub text_start: u64,
    /// Whether the line goes on after the text.
    pub text_cut: bool,
}

/// A record of `Watch`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum WatchEvent {
    /// From here on, everything is told.
    Ready,
    /// Something happened.
    Changed {
        /// What.
        change: Change,
        /// Absolute.
        path: Vec<u8>,
        /// Whether it is a directory.
        directory: bool,
    },
    /// More happened than could be told.
    Overflow,
    /// A directory is not watched: it is too deep, or there are too many.
    NotWatched {
        /// Absolute.
        path: Vec<u8>,
    },
    /// What was watched is gone. The last event.
    Gone,
}

/// What happened to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// It came to be.
    Created,
    /// It was written to.
    Modified,
    /// It was closed after it had been open for writing.
    Written,
    /// Permissions, owner or times changed.
    Attributes,
    /// It is gone.
    Removed,
    /// It has another name now, which is told too if it is watched.
    MovedFrom,
    /// It had another name.
    MovedTo,
}

/// Why it was not done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("`{}` {kind}{}", String::from_utf8_lossy(path), Because(detail))]
pub struct FileError {
    /// What is wrong.
    pub kind: FileErrorKind,
    /// With which file.
    pub path: Vec<u8>,
    /// More, for people; empty where there is no more.
    pub detail: String,
}

struct Because<'a>(&'a str);

impl std::fmt::Display for Because<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, ": {}", self.0) }
    }
}

/// What is wrong with a file. The words follow its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum FileErrorKind {
    /// It does not exist, or something on the way to it does not.
    #[error("does not exist")]
    NotFound,
    /// The user may not.
    #[error("may not be used so by this user")]
    PermissionDenied,
    /// A file was needed.
    #[error("is a directory")]
    IsDirectory,
    /// A directory was needed, here or on the way.
    #[error("is not a directory, or leads through something that is none")]
    NotADirectory,
    /// It should not.
    #[error("exists already")]
    AlreadyExists,
    /// Only with `recursive`.
    #[error("is a directory that is not empty")]
    DirectoryNotEmpty,
    /// Relative, with a NUL, too long.
    #[error("is not a path that can be used")]
    InvalidPath,
    /// Links that lead to one another.
    #[error("leads through too many links")]
    TooManyLinks,
    /// Of the disk, of the quota, of inodes.
    #[error("has no space left to be written")]
    NoSpace,
    /// A FIFO, a socket, a device.
    #[error("is not a regular file")]
    NotARegularFile,
    /// It became shorter while it was read.
    #[error("changed while it was read")]
    Changed,
    /// Larger than the file system takes, or than the request said.
    #[error("is too large")]
    TooLarge,
    /// Deeper than can be walked.
    #[error("is nested too deep")]
    TooDeep,
    /// A file system that takes no writes.
    #[error("is on a read-only file system")]
    ReadOnly,
    /// A mount point, a running program.
    #[error("is in use")]
    Busy,
    /// The range begins behind its end.
    #[error("ends before the range that was asked for, at {size} bytes")]
    RangeNotSatisfiable {
        /// Its length.
        size: u64,
    },
    /// It is not what the condition says.
    #[error("is not what the request's condition says")]
    ConditionFailed,
    /// A glob or regular expression that is none.
    #[error("cannot be searched with this pattern")]
    InvalidPattern,
    /// Not a tar stream, or one that may not be unpacked.
    #[error("cannot be unpacked from this archive")]
    InvalidArchive,
    /// The upload was broken off.
    #[error("did not arrive whole")]
    Incomplete,
    /// The guest is out of memory, descriptors or watches.
    #[error("needs more than the sandbox has left")]
    NoRoom,
    /// A copy or move of a directory into itself.
    #[error("cannot be put into itself")]
    IntoItself,
    /// Anything else that the kernel said.
    #[error("failed")]
    Other,
    /// It is not UTF-8.
    #[error("is not UTF-8 text")]
    NotText,
    /// It does not have the text that is to be replaced.
    #[error("does not have the text that is to be replaced")]
    NoMatch,
    /// It has the text more than once, and one place was meant.
    #[error("has the text that is to be replaced {count} times")]
    SeveralMatches {
        /// How often.
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

/// Why bytes are not a record. The stream cannot be read on after any of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Longer than [`RECORD_MAX`].
    #[error("a record of {length} bytes, the limit is {RECORD_MAX}")]
    TooLong {
        /// What it claimed.
        length: usize,
    },
    /// It does not parse.
    #[error("a record that does not parse")]
    Malformed,
}

/// The record at the front of `bytes` and its length there, or `None` if it is not whole yet.
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

/// The result as it goes over stderr.
pub fn result_bytes(result: &Result<FileDone, FileError>) -> Vec<u8> {
    postcard::to_allocvec(result).expect("results are made of types that postcard can write")
}

/// The result that came over stderr; `None` if it is none.
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
        assert_eq!(error.to_string(), "`/a/b` has no space left to be written: x");
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
