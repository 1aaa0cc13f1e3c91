//! The files of fake sandboxes: just enough for builds, which copy files in and capture what was written.
//!
//! A sandbox begins with the files of its layers, or of the machine; a captured layer has all files of its sandbox.
//! There are no permissions and no links.

use std::collections::BTreeMap;

use archive::{Entries, Entry, EntryKind};
use wire::files::{
    FileDone, FileError, FileErrorKind, FileKind, FileOp, FileStat, Links, Relocate, Timestamp,
};

/// A file or directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FakeFile {
    /// The user of the request that created it; `None` is root.
    pub user: Option<String>,
    /// `None` for a directory.
    pub contents: Option<Vec<u8>>,
}

/// Files by absolute path.
pub type FakeFiles = BTreeMap<String, FakeFile>;

/// Whether [`change`] supports an operation.
pub(super) fn is_known(operation: &FileOp) -> bool {
    use FileOp::{MakeDirectory, Move, Pack, Remove, Stat, Unpack};
    match operation {
        Stat { path, .. } => !path.starts_with(b"/flood/") && path != b"/hang",
        MakeDirectory { .. } | Move(_) | Remove { .. } | Pack { .. } | Unpack { .. } => true,
        _ => false,
    }
}

/// Does an operation. `input` is the input of an `Unpack`, `output` receives the output of a `Pack`.
pub(super) fn change(
    files: &mut FakeFiles,
    operation: &FileOp,
    user: Option<&str>,
    input: &[u8],
    output: &mut Vec<u8>,
) -> Result<FileDone, FileError> {
    match operation {
        FileOp::Stat { path, links: Links::Follow | Links::Keep } => {
            found(files, &text(path)).map(|file| FileDone::Stat(stat(file)))
        }
        FileOp::MakeDirectory { path, .. } => {
            make_directories(files, &text(path), user);
            Ok(FileDone::Done)
        }
        FileOp::Move(Relocate { from, to, overwrite, .. }) => {
            let (from, to) = (text(from), text(to));
            if files.contains_key(&to) && !overwrite {
                return Err(fault(FileErrorKind::AlreadyExists, &to));
            }
            let moved = take(files, &from);
            found(&moved, &from)?;
            take(files, &to);
            files.extend(moved.into_iter().map(|(path, file)| (path.replacen(&from, &to, 1), file)));
            Ok(FileDone::Done)
        }
        FileOp::Remove { path, .. } => match take(files, &text(path)).is_empty() {
            true => Err(fault(FileErrorKind::NotFound, &text(path))),
            false => Ok(FileDone::Done),
        },
        FileOp::Pack { path } => {
            pack(files, &text(path), output)?;
            Ok(FileDone::Sent { bytes: output.len() as u64, skipped: 0 })
        }
        FileOp::Unpack { path } => unpack(files, &text(path), user, input),
        other => panic!("the fake init does not know how to {other:?}"),
    }
}

fn text(path: &[u8]) -> String {
    let path = String::from_utf8_lossy(path);
    format!("/{}", path.trim_matches('/'))
}

fn fault(kind: FileErrorKind, path: &str) -> FileError {
    FileError { kind, path: path.as_bytes().to_vec(), detail: String::new() }
}

fn found<'a>(files: &'a FakeFiles, path: &str) -> Result<&'a FakeFile, FileError> {
    files.get(path).ok_or_else(|| fault(FileErrorKind::NotFound, path))
}

fn stat(file: &FakeFile) -> FileStat {
    FileStat {
        kind: if file.contents.is_some() { FileKind::File } else { FileKind::Directory },
        size: file.contents.as_ref().map_or(0, Vec::len) as u64,
        mode: 0o755,
        uid: 0,
        gid: 0,
        inode: 1,
        links: 1,
        modified: Timestamp { seconds: 0, nanoseconds: 0 },
        target: None,
    }
}

fn make_directories(files: &mut FakeFiles, path: &str, user: Option<&str>) {
    let mut at = String::new();
    for part in path.split('/').filter(|part| !part.is_empty()) {
        at = format!("{at}/{part}");
        let directory = || FakeFile { user: user.map(str::to_owned), contents: None };
        files.entry(at.clone()).or_insert_with(directory);
    }
}

/// Removes a file, or a directory with everything in it.
fn take(files: &mut FakeFiles, path: &str) -> FakeFiles {
    let inside = format!("{path}/");
    let (taken, left) =
        std::mem::take(files).into_iter().partition(|(name, _)| name == path || name.starts_with(&inside));
    *files = left;
    taken
}

fn pack(files: &FakeFiles, path: &str, output: &mut Vec<u8>) -> Result<(), FileError> {
    let packed: Vec<(String, &FakeFile)> = match &found(files, path)?.contents {
        Some(_) => {
            let name = path.rsplit('/').next().unwrap_or_default();
            vec![(name.to_owned(), &files[path])]
        }
        None => {
            let inside = format!("{path}/");
            let below = |name: &String| name.strip_prefix(&inside).map(str::to_owned);
            files.iter().filter_map(|(name, file)| Some((below(name)?, file))).collect()
        }
    };
    for (name, file) in packed {
        let entry = Entry {
            path: name.into_bytes(),
            kind: if file.contents.is_some() { EntryKind::File } else { EntryKind::Directory },
            mode: 0o755,
            size: file.contents.as_ref().map_or(0, Vec::len) as u64,
            modified: 0,
            link: Vec::new(),
            uid: 0,
            gid: 0,
            attributes: Vec::new(),
        };
        output.extend(archive::entry_header(&entry));
        output.extend(file.contents.iter().flatten());
        output.resize(output.len().next_multiple_of(archive::BLOCK), 0);
    }
    output.resize(output.len() + 2 * archive::BLOCK, 0);
    Ok(())
}

fn unpack(files: &mut FakeFiles, top: &str, user: Option<&str>, input: &[u8]) -> Result<FileDone, FileError> {
    let broken = |_| fault(FileErrorKind::InvalidArchive, top);
    make_directories(files, top, user);
    let mut entries = Entries::new(input);
    let mut made = 0;
    while let Some(entry) = entries.next_entry().map_err(broken)? {
        let mut contents = vec![0; entry.size as usize];
        let mut at = 0;
        while at < contents.len() {
            at += entries.read_contents(&mut contents[at..]).map_err(broken)?;
        }
        let name = String::from_utf8_lossy(&entry.path).into_owned();
        let path = format!("{}/{}", top.trim_end_matches('/'), name.trim_matches('/'));
        let parent = path.rsplit_once('/').map_or("", |(parent, _)| parent).to_owned();
        make_directories(files, &parent, user);
        match entry.kind {
            EntryKind::Directory => make_directories(files, &path, user),
            _ => {
                let file = FakeFile { user: user.map(str::to_owned), contents: Some(contents) };
                files.insert(path, file);
            }
        }
        made += 1;
    }
    Ok(FileDone::Made { entries: made, bytes: input.len() as u64, skipped: 0 })
}
