//! Metadata of one file, or of the entries of a directory.

use std::collections::BinaryHeap;
use std::ffi::{CStr, CString};
use std::os::fd::AsFd;

use rustix::fs::{AtFlags, Dir, FileType, Stat};
use rustix::io::Errno;
use wire::files::{FileDone, FileEntry, FileError, FileErrorKind, FileStat, LIST_MAX, Links};

use super::place::open_directory;
use super::{At, Records, failure, stat_of};

/// One file.
pub fn stat(path: &[u8], links: Links) -> Result<FileDone, FileError> {
    let stat = match links {
        Links::Follow => rustix::fs::stat(path),
        Links::Keep => rustix::fs::lstat(path),
    };
    let stat = stat.at(path)?;
    let target = match FileType::from_raw_mode(stat.st_mode) {
        FileType::Symlink => Some(rustix::fs::readlink(path, Vec::new()).at(path)?.into_bytes()),
        _ => None,
    };
    Ok(FileDone::Stat(stat_of(&stat, target)))
}

/// The first `limit` names of a directory after `after`. A directory may have any number of entries: all are read,
/// but only those that will be returned are kept.
pub fn list(path: &[u8], after: &[u8], limit: u32) -> Result<FileDone, FileError> {
    if !(1..=LIST_MAX).contains(&limit) {
        return Err(failure(FileErrorKind::Other, path, "the limit of a page is 0 or too large"));
    }
    let directory = open_directory(path)?;
    // The greatest name is on top, and is dropped when a smaller one comes.
    let mut names: BinaryHeap<CString> = BinaryHeap::new();
    for entry in Dir::read_from(&directory).at(path)? {
        let entry = entry.at(path)?;
        let name = entry.file_name();
        if is_dots(name) || name.to_bytes() <= after {
            continue;
        }
        let full = names.len() > limit as usize;
        if full && names.peek().is_some_and(|greatest| name >= greatest.as_c_str()) {
            continue;
        }
        names.push(name.to_owned());
        if full {
            names.pop();
        }
    }
    let more = names.len() > limit as usize;
    if more {
        names.pop();
    }
    let mut records = Records::default();
    for name in names.into_sorted_vec() {
        // Entries that have vanished are left out.
        if let Some(stat) = entry_stat(&directory, &name).at(path)? {
            records.put(&FileEntry { name: name.into_bytes(), stat })?;
        }
    }
    records.flush()?;
    Ok(FileDone::Listed { more })
}

/// Metadata of an entry. Links are not followed. `None`: it has vanished.
pub fn entry_stat(directory: impl AsFd, name: &CStr) -> Result<Option<FileStat>, Errno> {
    let stat = match rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(errno),
    };
    Ok(Some(stat_of(&stat, target_of(directory, name, &stat))))
}

/// Target of a link, if it still is one.
pub fn target_of(directory: impl AsFd, name: &CStr, stat: &Stat) -> Option<Vec<u8>> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Symlink => {
            rustix::fs::readlinkat(directory, name, Vec::new()).ok().map(CString::into_bytes)
        }
        _ => None,
    }
}

/// The two entries that every directory has.
pub fn is_dots(name: &CStr) -> bool {
    name == c"." || name == c".."
}
