//! Bodies of the routes about files.
//!
//! A name in a guest is bytes. Where it is not UTF-8, the text has replacement characters, and the bytes are beside it in
//! base64; in a query, such bytes are percent-encoded.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ErrorBody;

/// What a file is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileInfo {
    /// Absolute.
    pub path: String,
    /// The bytes of the path, where they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_base64: Option<String>,
    /// The last part of the path.
    pub name: String,
    /// The bytes of the name, where they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name_base64: Option<String>,
    /// Of which kind.
    pub kind: FileKind,
    /// In bytes.
    pub size: u64,
    /// Permissions in octal, as `0644`.
    pub mode: String,
    /// Owner, in the sandbox's numbers.
    pub uid: u32,
    /// Group, in the sandbox's numbers.
    pub gid: u32,
    /// How many names it has.
    pub links: u64,
    /// When it was last written to.
    pub modified_at: String,
    /// Tells this content from another; for `If-Match` and `If-None-Match`.
    pub etag: String,
    /// Where a symbolic link leads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// The bytes of the target, where they are not UTF-8.
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
    /// Something else.
    Unknown,
}

/// `GET /v1/sandboxes/{id}/files/list`, one page, by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileList {
    /// Links are not followed.
    pub entries: Vec<FileInfo>,
    /// Give it as `cursor` for the next page; absent on the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// `GET /v1/sandboxes/{id}/files/glob`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FoundFiles {
    /// By path.
    pub files: Vec<FileInfo>,
    /// What the search did.
    #[serde(flatten)]
    pub search: Search,
}

/// `GET /v1/sandboxes/{id}/files/grep`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FoundLines {
    /// By path and line.
    pub matches: Vec<LineMatch>,
    /// How many of the skipped were text at their front and binary further on: lines before that may have been told. Counted
    /// with `exclude_directory` or `carriage_returns` alone.
    #[serde(default)]
    pub mixed: u64,
    /// What the search did.
    #[serde(flatten)]
    pub search: Search,
}

/// What a search did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Search {
    /// Entries of directories that were looked at.
    pub entries_looked_at: u64,
    /// Bytes of files that were read.
    pub bytes_read: u64,
    /// What could not be looked into: binary files, directories without the right to, or too deep.
    pub skipped: u64,
    /// The limit that ended it before it was through; absent if none did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut: Option<SearchCut>,
}

/// Which limit ended a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SearchCut {
    /// `limit`
    Matches,
    /// A million entries.
    Entries,
    /// `bytes_max`
    Bytes,
    /// `timeout_seconds`
    Time,
}

/// A line in which something was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LineMatch {
    /// Absolute.
    pub path: String,
    /// The bytes of the path, where they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_base64: Option<String>,
    /// Counted from 1.
    pub line: u64,
    /// Where in the line the first match begins, in bytes from 0.
    pub column: u64,
    /// The line without its end, or 2 KiB of it around the match.
    pub text: String,
    /// The bytes of the text, where they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text_base64: Option<String>,
    /// Where in the line the text begins.
    pub text_start: u64,
    /// Whether the line goes on after the text.
    pub text_cut: bool,
}

/// `POST /v1/sandboxes/{id}/files/edit`
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EditFile {
    /// What to find, at most 1 MiB. Matches do not overlap, and are counted from the front.
    pub old: String,
    /// What takes its place, at most 1 MiB.
    pub new: String,
    /// Every match; if not, there must be one and no more. `false` if left out.
    #[serde(default)]
    pub all: bool,
    /// If there is no such text, it is looked for with its lines ended by CR LF, then by LF, and what takes its place is ended
    /// likewise. `false` if left out.
    #[serde(default)]
    pub adapt_line_ends: bool,
}

/// What an edit did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EditedFile {
    /// In how many places.
    pub replaced: u64,
    /// The file as it is now.
    #[serde(flatten)]
    pub file: FileInfo,
}

/// What a copy or an archive made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FilesMade {
    /// Files, links and directories.
    pub entries: u64,
    /// What the files hold.
    pub bytes: u64,
    /// Sockets, devices and FIFOs, which are left out.
    pub skipped: u64,
}

/// `GET /v1/sandboxes/{id}/files/watch`, each as a server-sent event under the name of its `type`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FileEvent {
    /// From here on, everything is told.
    Ready,
    /// Something happened.
    Changed {
        /// What.
        change: FileChange,
        /// Absolute.
        path: String,
        /// The bytes of the path, where they are not UTF-8.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        path_base64: Option<String>,
        /// Whether it is a directory.
        directory: bool,
    },
    /// More happened than could be told: look for yourself.
    Overflow,
    /// A directory is not watched: it is too deep, or there are too many.
    NotWatched {
        /// Absolute.
        path: String,
        /// The bytes of the path, where they are not UTF-8.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        path_base64: Option<String>,
    },
    /// What was watched is gone. The last event.
    Gone,
    /// The watch broke. The last event.
    Failed(ErrorBody),
}

/// What happened to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileChange {
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
    /// It has another name now.
    MovedFrom,
    /// It had another name.
    MovedTo,
}
