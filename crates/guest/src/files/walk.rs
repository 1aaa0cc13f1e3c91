//! Walking a tree that a guest controls: no link is followed, and only the path down to the current directory is
//! held.

use std::ffi::CStr;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, FileType, Stat};
use rustix::io::Errno;
use wire::files::FileError;

use super::list::is_dots;
use super::place::open_directory_at;
use super::refused;

/// Most nested directories. Each needs a descriptor, of which a process has about a thousand.
pub const DEPTH_MAX: usize = 256;

/// An entry of the walk.
pub struct Found<'a> {
    pub parent: BorrowedFd<'a>,
    pub name: &'a CStr,
    /// Relative to the top of the walk, without a leading slash.
    pub path: &'a [u8],
    pub stat: &'a Stat,
}

/// What to do after an entry.
pub enum Next {
    /// Continue, and enter it if it is a directory.
    Enter,
    /// Continue, but do not enter it.
    Pass,
    /// Stop.
    Stop,
}

/// What was skipped, and whether the walk is complete.
#[derive(Debug, Default)]
pub struct Walked {
    pub skipped: u64,
    pub stopped: bool,
}

/// Walks everything below `top`, each directory before its contents. Directories that cannot be opened are counted
/// and skipped.
pub fn walk(
    top: OwnedFd,
    visit: &mut dyn FnMut(Found<'_>) -> Result<Next, FileError>,
) -> Result<Walked, FileError> {
    let mut walked = Walked::default();
    let mut path = Vec::new();
    let first = Dir::new(top).map_err(|errno| refused(b"", errno))?;
    let mut open = vec![(first, 0)];
    'directories: while let Some((directory, length)) = open.last_mut() {
        path.truncate(*length);
        loop {
            let entry = match directory.read() {
                None => break,
                Some(Ok(entry)) => entry,
                Some(Err(_)) => {
                    walked.skipped += 1;
                    break;
                }
            };
            let name = entry.file_name();
            if is_dots(name) {
                continue;
            }
            let Ok(parent) = directory.fd() else { break };
            let stat = match rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                Err(Errno::NOENT) => continue, // It has vanished.
                Err(_) => {
                    walked.skipped += 1;
                    continue;
                }
            };
            path.truncate(*length);
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name.to_bytes());
            match visit(Found { parent, name, path: &path, stat: &stat })? {
                Next::Stop => {
                    walked.stopped = true;
                    return Ok(walked);
                }
                Next::Pass => continue,
                Next::Enter if FileType::from_raw_mode(stat.st_mode) != FileType::Directory => continue,
                Next::Enter => {}
            }
            let child = open_directory_at(parent, name).and_then(Dir::new);
            let deep = open.len() >= DEPTH_MAX;
            match child {
                Ok(child) if !deep => {
                    let length = path.len();
                    open.push((child, length));
                    continue 'directories;
                }
                Err(Errno::NOENT) => {}
                Ok(_) | Err(_) => walked.skipped += 1,
            }
            // The borrow of the directory ended with the check of how many are open, so borrow it again.
            continue 'directories;
        }
        open.pop();
    }
    Ok(walked)
}
