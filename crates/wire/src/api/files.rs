//! Bodies of the routes about files.
//!
//! File names in a guest are bytes. If a name is not UTF-8, the text contains replacement characters, and a second
//! field holds the bytes in base64; in a query, such bytes are percent-encoded.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ErrorBody;

/// Metadata of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileInfo {
    /// Absolute path.
    pub path: String,
    /// The bytes of the path, if they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_base64: Option<String>,
    /// The last part of the path.
    pub name: String,
    /// The bytes of the name, if they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name_base64: Option<String>,
    /// Kind of the file.
    pub kind: FileKind,
    /// Size in bytes.
    pub size: u64,
    /// Permissions in octal, as `0644`.
    pub mode: String,
    /// Owner id inside the sandbox.
    pub uid: u32,
    /// Group id inside the sandbox.
    pub gid: u32,
    /// Number of hard links.
    pub links: u64,
    /// When the file was last written to.
    pub modified_at: String,
    /// Identifies this content of the file; for `If-Match` and `If-None-Match`.
    pub etag: String,
    /// Target of a symbolic link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// The bytes of the target, if they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_base64: Option<String>,
}

/// Kinds of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
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
    /// A device.
    Device,
    /// Another kind.
    Unknown,
}

/// `GET /v1/sandboxes/{id}/files/list`, one page, by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileList {
    /// Entries. Symbolic links are not followed.
    pub entries: Vec<FileInfo>,
    /// Pass it as `cursor` to get the next page; absent on the last page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// `GET /v1/sandboxes/{id}/files/glob`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FoundFiles {
    /// Matches, sorted by path.
    pub files: Vec<FileInfo>,
    /// Statistics of the search.
    #[serde(flatten)]
    pub search: Search,
}

/// `GET /v1/sandboxes/{id}/files/grep`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FoundLines {
    /// Matches, sorted by path and line.
    pub matches: Vec<LineMatch>,
    /// Number of skipped files that begin as text and turn out to be binary later: lines before that point may have
    /// been returned. Counted only with `exclude_directory` or `carriage_returns`.
    #[serde(default)]
    pub mixed: u64,
    /// Statistics of the search.
    #[serde(flatten)]
    pub search: Search,
}

/// Statistics of a search.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Search {
    /// Number of directory entries that were examined.
    pub entries_looked_at: u64,
    /// Number of bytes that were read from files.
    pub bytes_read: u64,
    /// Number of entries that were skipped: binary files, directories that could not be read or are nested too deep.
    pub skipped: u64,
    /// The limit that ended the search early; absent if it is complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut: Option<SearchCut>,
}

/// A limit that ends a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SearchCut {
    /// `limit`
    Matches,
    /// One million entries.
    Entries,
    /// `bytes_max`
    Bytes,
    /// `timeout_seconds`
    Time,
}

/// A matching line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LineMatch {
    /// Absolute path.
    pub path: String,
    /// The bytes of the path, if they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_base64: Option<String>,
    /// Line number, from 1.
    pub line: u64,
    /// Offset of the first match in the line, in bytes from 0.
    pub column: u64,
    /// The line without its line ending, or 2 KiB of it around the match.
    pub text: String,
    /// The bytes of the text, if they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text_base64: Option<String>,
    /// Offset in the line at which the text begins.
    pub text_start: u64,
    /// Whether the line continues after the text.
    pub text_cut: bool,
}

/// `POST /v1/sandboxes/{id}/files/edit`
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EditFile {
    /// The text to find, at most 1 MiB. Matches do not overlap and are counted from the start of the file.
    pub old: String,
    /// The replacement, at most 1 MiB.
    pub new: String,
    /// Replace every match. If `false`, the text must occur exactly once. Default: `false`.
    #[serde(default)]
    pub all: bool,
    /// If the text does not occur as given, search for it with CR LF line endings, then with LF, and convert the
    /// replacement likewise. Default: `false`.
    #[serde(default)]
    pub adapt_line_ends: bool,
}

/// Result of an edit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EditedFile {
    /// Number of replaced matches.
    pub replaced: u64,
    /// The file after the edit.
    #[serde(flatten)]
    pub file: FileInfo,
}

/// Result of a copy or of unpacking an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FilesMade {
    /// Number of files, links and directories.
    pub entries: u64,
    /// Total size of the files.
    pub bytes: u64,
    /// Number of sockets, devices and FIFOs, which are left out.
    pub skipped: u64,
}

/// `GET /v1/sandboxes/{id}/files/watch`: server-sent events, each named after its `type`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FileEvent {
    /// From here on, every change is reported.
    Ready,
    /// Something changed.
    Changed {
        /// What changed.
        change: FileChange,
        /// Absolute path.
        path: String,
        /// The bytes of the path, if they are not UTF-8.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        path_base64: Option<String>,
        /// Whether it is a directory.
        directory: bool,
    },
    /// More happened than could be reported: list the directory again.
    Overflow,
    /// A directory is not watched: it is nested too deep, or there are too many.
    NotWatched {
        /// Absolute path.
        path: String,
        /// The bytes of the path, if they are not UTF-8.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        path_base64: Option<String>,
    },
    /// The watched file or directory is gone. The last event.
    Gone,
    /// The watch failed. The last event.
    Failed(ErrorBody),
}

/// What happened to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileChange {
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
    /// It was renamed away from this path.
    MovedFrom,
    /// It was renamed to this path.
    MovedTo,
}
