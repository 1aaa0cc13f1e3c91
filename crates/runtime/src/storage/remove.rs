//! Removes a tree that a guest has filled, with any names, depth and links.
//!
//! Follows no link, enters no mount and opens one name at a time. A tree that is a million levels deep needs neither stack nor
//! descriptors: directories that are too deep are moved up first.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags, openat2, renameat_with, unlinkat,
};
use rustix::io::Errno;

/// Directories held open at once. Deeper ones are moved up to the top.
const DEPTH_MAX: usize = 32;

/// Names that are read at once.
const BATCH: usize = 4096;

/// Removes `name` in `parent` and everything below it. Harmless if it does not exist. If something is mounted
/// below it, this fails instead of emptying the mount.
pub fn remove_tree(parent: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let top = match open_dir(parent, name) {
        Ok(top) => top,
        Err(Errno::NOENT) => return Ok(()),
        Err(Errno::NOTDIR | Errno::LOOP) => return Ok(unlinkat(parent, name, AtFlags::empty())?),
        Err(e) => return Err(e.into()),
    };
    // What lies too deep is moved to the top, which is read again until it is empty.
    empty(top.as_fd(), top.as_fd(), 0, &mut 0)?;
    drop(top);
    match unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn empty(top: BorrowedFd<'_>, dir: BorrowedFd<'_>, depth: usize, moved: &mut u64) -> io::Result<()> {
    loop {
        let batch = some_entries(dir)?;
        if batch.is_empty() {
            return Ok(());
        }
        for (name, kind) in batch {
            remove_entry(top, dir, &name, kind, depth, moved)?;
        }
    }
}

/// A name that another process has removed counts as removed.
fn remove_entry(
    top: BorrowedFd<'_>,
    dir: BorrowedFd<'_>,
    name: &CStr,
    kind: FileType,
    depth: usize,
    moved: &mut u64,
) -> io::Result<()> {
    if kind != FileType::Directory {
        match unlinkat(dir, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => return Ok(()),
            // The kernel did not report the kind, or it has changed: it is a directory.
            Err(Errno::ISDIR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    if depth + 1 >= DEPTH_MAX {
        return move_up(dir, name, top, moved);
    }
    match open_dir(dir, name) {
        Ok(child) => empty(top, child.as_fd(), depth + 1, moved)?,
        Err(Errno::NOENT) => return Ok(()),
        Err(e) => return Err(e.into()),
    }
    match unlinkat(dir, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Moves a directory to a free name at the top. The guest may use any name there, so names in use are skipped.
fn move_up(dir: BorrowedFd<'_>, name: &CStr, top: BorrowedFd<'_>, moved: &mut u64) -> io::Result<()> {
    loop {
        let refuge = format!(".shoal-removing-{moved}");
        *moved += 1;
        match renameat_with(dir, name, top, refuge.as_str(), RenameFlags::NOREPLACE) {
            Ok(()) | Err(Errno::NOENT) => return Ok(()),
            Err(Errno::EXIST) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn open_dir(parent: BorrowedFd<'_>, name: impl rustix::path::Arg) -> Result<OwnedFd, Errno> {
    let within = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
    openat2(parent, name, DIRECTORY, Mode::empty(), within)
}

/// Some names other than `.` and `..`, or none. A batch is read before any of it is removed, since a directory
/// that shrinks under its reader may hide entries; and it is bounded, since a directory may hold more names than memory.
fn some_entries(dir: BorrowedFd<'_>) -> io::Result<Vec<(CString, FileType)>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." {
            names.push((name.to_owned(), entry.file_type()));
        }
        if names.len() == BATCH {
            break;
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::openat;
    use std::fs;
    use std::os::unix::ffi::OsStrExt;

    fn open(path: &std::path::Path) -> OwnedFd {
        rustix::fs::open(path, DIRECTORY, Mode::empty()).expect("the directory opens")
    }

    #[test]
    fn a_tree_of_any_depth_goes() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        fs::create_dir(dir.path().join("tree")).expect("it can be made");
        let mut at = open(&dir.path().join("tree"));
        for level in 0..1_000 {
            rustix::fs::mkdirat(&at, "d", Mode::RWXU).expect("it can be made");
            if level % 100 == 0 {
                let flags = OFlags::WRONLY | OFlags::CREATE;
                openat(&at, "file", flags, Mode::RWXU).expect("it can be made");
            }
            at = openat(&at, "d", DIRECTORY, Mode::empty()).expect("it opens");
        }
        drop(at);
        remove_tree(open(dir.path()).as_fd(), "tree").expect("it can be removed");
        assert!(!dir.path().join("tree").exists());
    }

    #[test]
    fn links_are_removed_and_not_followed() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let outside = dir.path().join("outside");
        fs::create_dir(&outside).expect("it can be made");
        fs::write(outside.join("kept"), "kept").expect("it can be written");
        let tree = dir.path().join("tree");
        fs::create_dir(&tree).expect("it can be made");
        std::os::unix::fs::symlink(&outside, tree.join("link")).expect("it can be linked");
        std::os::unix::fs::symlink("/", tree.join("root")).expect("it can be linked");
        fs::write(tree.join(std::ffi::OsStr::from_bytes(b"\xff\n..")), "").expect("it can be written");
        remove_tree(open(dir.path()).as_fd(), "tree").expect("it can be removed");
        assert!(!tree.exists());
        assert!(outside.join("kept").exists());
    }

    #[test]
    fn what_does_not_exist_is_removed_already() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        remove_tree(open(dir.path()).as_fd(), "nothing").expect("nothing to do");
    }

    #[test]
    fn a_link_in_the_place_of_the_tree_is_removed_itself() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let outside = dir.path().join("outside");
        fs::create_dir(&outside).expect("it can be made");
        std::os::unix::fs::symlink(&outside, dir.path().join("tree")).expect("it can be linked");
        remove_tree(open(dir.path()).as_fd(), "tree").expect("it can be removed");
        assert!(outside.exists() && !dir.path().join("tree").exists());
    }
}
