//! The context of a build: the tar stream that the caller uploaded.
//!
//! It is read once to list its entries. Contents stay in the uploaded file and are read from there when they are needed.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

use archive::{Entries, Entry, EntryKind};
use image::Digest;
use image::blobs::Upload;
use image::dockerfile;
use image::hash::Hasher;
use image::ignore::fits;

use crate::error::BuildError;

/// How much of the context is read at once.
pub(super) const PIECE: usize = 256 * 1024;

/// The most entries of a context. Each takes some memory while the build runs.
const ENTRIES_MAX: usize = 200_000;
/// The total length of all paths and link targets of a context.
const NAMES_BYTES_MAX: usize = 32 << 20;

/// The entries of a tar stream by their paths, without a leading slash.
pub(super) struct Context {
    pub(super) upload: Upload,
    pub(super) entries: BTreeMap<String, ContextEntry>,
}

pub(super) struct ContextEntry {
    pub(super) entry: Entry,
    /// Where its contents begin in the upload.
    pub(super) at: u64,
    pub(super) contents: Digest,
}

/// Counts the bytes that are read through it.
struct Counting<R> {
    from: R,
    count: u64,
}

impl<R: Read> Read for Counting<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let length = self.from.read(into)?;
        self.count += length as u64;
        Ok(length)
    }
}

impl Context {
    /// Lists all files, directories and symbolic links. Rejects paths that lead out of the context, skips all other kinds. Blocks.
    pub(super) fn read(upload: Upload) -> Result<Self, BuildError> {
        let bad = |why: String| BuildError::Context { why };
        let file = upload.file.try_clone().map_err(|error| bad(error.to_string()))?;
        io::Seek::seek(&mut &file, io::SeekFrom::Start(0)).map_err(|error| bad(error.to_string()))?;
        let reader = Counting { from: io::BufReader::with_capacity(PIECE, file), count: 0 };
        let mut stream = Entries::new(reader);
        let mut entries = BTreeMap::new();
        let mut piece = vec![0; PIECE];
        let (mut count, mut names_bytes) = (0, 0);
        while let Some(entry) = stream.next_entry().map_err(|error| bad(error.to_string()))? {
            (count, names_bytes) = (count + 1, names_bytes + entry.path.len() + entry.link.len());
            if count > ENTRIES_MAX || names_bytes > NAMES_BYTES_MAX {
                let most = format!("{ENTRIES_MAX} entries with names of {NAMES_BYTES_MAX} bytes in all");
                return Err(bad(format!(
                    "it must have at most {most}; leave out what the build does not need"
                )));
            }
            let at = stream.get_mut().count;
            let mut hasher = Hasher::new();
            loop {
                match stream.read_contents(&mut piece).map_err(|error| bad(error.to_string()))? {
                    0 => break,
                    length => hasher.update(&piece[..length]),
                }
            }
            let path = std::str::from_utf8(&entry.path).map_err(|_| {
                bad(format!("the path `{}` is not UTF-8", String::from_utf8_lossy(&entry.path)))
            })?;
            if path.split('/').any(|part| part == "..") {
                return Err(bad(format!("`{path}` leads out of the context")));
            }
            let path = dockerfile::context_path(path).map_err(|problem| bad(problem.to_string()))?;
            let wanted = matches!(entry.kind, EntryKind::File | EntryKind::Directory | EntryKind::Symlink);
            if path.is_empty() || !wanted {
                continue;
            }
            entries.insert(path, ContextEntry { entry, at, contents: hasher.finish() });
        }
        Ok(Self { upload, entries })
    }

    /// The Dockerfile at this path.
    pub(super) fn text(&self, path: &str) -> Result<String, BuildError> {
        let missing = || BuildError::Context { why: format!("it has no file `{path}`") };
        let inside = dockerfile::context_path(path).map_err(|_| missing())?;
        let found = self.entries.get(&inside).filter(|found| found.entry.kind == EntryKind::File);
        let found = found.ok_or_else(missing)?;
        let length = usize::try_from(found.entry.size).unwrap_or(usize::MAX);
        if length > dockerfile::LENGTH_MAX {
            let most = dockerfile::LENGTH_MAX;
            let why = format!("the Dockerfile `{path}` must have at most {most} bytes, got {length}");
            return Err(BuildError::Context { why });
        }
        let mut text = vec![0; length];
        let failed = |why: String| BuildError::Context { why };
        self.upload.file.read_exact_at(&mut text, found.at).map_err(|error| failed(error.to_string()))?;
        String::from_utf8(text).map_err(|_| failed(format!("`{path}` is not UTF-8")))
    }

    /// The paths of the files and directories that a path or pattern matches. An empty one matches the whole context.
    pub(super) fn matching(&self, pattern: &str) -> Vec<String> {
        if pattern.is_empty() {
            return vec![String::new()];
        }
        if !pattern.contains(['*', '?', '[']) {
            let is_directory = || self.entries.keys().any(|path| path.starts_with(&format!("{pattern}/")));
            let there = self.entries.contains_key(pattern) || is_directory();
            return if there { vec![pattern.to_owned()] } else { Vec::new() };
        }
        let depth = pattern.matches('/').count();
        let mut found: Vec<String> = Vec::new();
        for path in self.entries.keys() {
            // A tar stream need not list the directories of its files, so their names come from the paths.
            let parts: Vec<&str> = path.split('/').collect();
            if parts.len() > depth {
                let front = parts[..=depth].join("/");
                if found.last() != Some(&front) && fits(pattern, &front) {
                    found.push(front);
                }
            }
        }
        found.dedup();
        found
    }

    /// Whether a path that [`Context::matching`] found is a directory. A path without an entry is one, because files
    /// are in it.
    pub(super) fn is_directory(&self, path: &str) -> bool {
        match self.entries.get(path) {
            Some(found) => found.entry.kind == EntryKind::Directory,
            None => true,
        }
    }
}

/// Writes a context that is one file.
pub(super) fn write_file(mut to: &File, path: Vec<u8>, contents: &[u8]) -> io::Result<()> {
    let entry = Entry {
        path,
        kind: EntryKind::File,
        mode: 0o644,
        size: contents.len() as u64,
        modified: 0,
        link: Vec::new(),
        uid: 0,
        gid: 0,
        attributes: Vec::new(),
    };
    let mut bytes = archive::entry_header(&entry);
    bytes.extend_from_slice(contents);
    bytes.resize(bytes.len().next_multiple_of(archive::BLOCK), 0);
    // Two empty blocks end a stream.
    bytes.resize(bytes.len() + 2 * archive::BLOCK, 0);
    io::Write::write_all(&mut to, &bytes)
}
