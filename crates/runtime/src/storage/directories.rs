//! Directories of the data directory: opened by descriptor, and never through a link.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{Dir, Mode, OFlags, mkdirat, openat};
use rustix::io::Errno;

/// Opens a directory, not a link.
pub(crate) const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Opens a directory, and creates it if missing.
pub(crate) fn make_and_open(parent: BorrowedFd<'_>, name: &str) -> io::Result<OwnedFd> {
    match mkdirat(parent, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(e) => return Err(e.into()),
    }
    Ok(openat(parent, name, DIRECTORY, Mode::empty())?)
}

/// The names in a directory that are UTF-8, as all of Shoal's are.
pub(crate) fn names(dir: BorrowedFd<'_>) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)? {
        if let Ok(name) = entry?.file_name().to_str()
            && name != "."
            && name != ".."
        {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}
