//! Measures the disk usage of a tree that a guest has filled.
//!
//! Follows no link, opens one name at a time, and stops at bounds: a guest can create more names than are worth
//! reading, and can continue during the count. The result says whether everything was counted.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, openat, statat};
use rustix::io::Errno;

use crate::backend::DiskUsage;

/// Most names to count: a few seconds of work with a warm cache, and a hundred times a small project.
const NAMES_MAX: u64 = 1_000_000;
/// Longest time, since a cold disk is slower. Well below the deadline of a request to the launcher.
const TIME_MAX: Duration = Duration::from_secs(10);
/// Directories held open at once. A process may have at least a thousand descriptors.
const DEPTH_MAX: usize = 256;
/// The unit of `st_blocks`, on every file system.
const BLOCK_BYTES: u64 = 512;

/// Disk usage of the tree below `top`, without `top` itself.
pub fn usage(top: OwnedFd) -> io::Result<DiskUsage> {
    let deadline = Instant::now() + TIME_MAX;
    let mut usage = DiskUsage { bytes: 0, complete: true };
    let mut names = 0;
    // Files with more than one name, which count once.
    let mut linked = HashSet::new();
    let mut open = vec![Dir::new(top)?];
    while let Some(dir) = open.last_mut() {
        let Some(entry) = dir.read().transpose()? else {
            open.pop();
            continue;
        };
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        names += 1;
        if names > NAMES_MAX || Instant::now() > deadline {
            usage.complete = false;
            return Ok(usage);
        }
        let parent = dir.fd()?;
        let stat = match statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            // The guest has removed it since.
            Err(Errno::NOENT) => continue,
            Err(e) => return Err(e.into()),
        };
        let is_dir = FileType::from_raw_mode(stat.st_mode).is_dir();
        if is_dir || stat.st_nlink == 1 || linked.insert(stat.st_ino) {
            usage.bytes += stat.st_blocks as u64 * BLOCK_BYTES;
        }
        if !is_dir {
            continue;
        }
        if open.len() >= DEPTH_MAX {
            usage.complete = false;
            continue;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match openat(open[open.len() - 1].fd()?.as_fd(), name, flags, Mode::empty()) {
            Ok(child) => open.push(Dir::new(child)?),
            // Removed, or replaced by something else.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(usage)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    fn measure(path: &Path) -> DiskUsage {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        usage(rustix::fs::open(path, flags, Mode::empty()).expect("the directory opens"))
            .expect("it is counted")
    }

    #[test]
    fn files_count_what_they_hold_and_once() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let tree = dir.path();
        assert_eq!(measure(tree), DiskUsage { bytes: 0, complete: true });
        fs::write(tree.join("file"), vec![1; 1 << 20]).expect("it can be written");
        let one = measure(tree).bytes;
        assert!((1 << 20..=2 << 20).contains(&one), "{one}");
        fs::hard_link(tree.join("file"), tree.join("again")).expect("it can be linked");
        assert_eq!(measure(tree).bytes, one, "a second name takes nothing");
        fs::File::create(tree.join("holes")).and_then(|f| f.set_len(1 << 40)).expect("it can be made");
        let with_holes = measure(tree).bytes;
        assert!(with_holes < one + (1 << 20), "{with_holes}");
    }

    #[test]
    fn links_lead_nowhere() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (tree, outside) = (dir.path().join("tree"), dir.path().join("outside"));
        fs::create_dir(&tree).expect("it can be made");
        fs::create_dir(&outside).expect("it can be made");
        fs::write(outside.join("file"), vec![1; 1 << 20]).expect("it can be written");
        std::os::unix::fs::symlink(&outside, tree.join("link")).expect("it can be linked");
        std::os::unix::fs::symlink(".", tree.join("loop")).expect("it can be linked");
        assert!(measure(&tree).bytes < 1 << 20);
    }

    #[test]
    fn a_tree_that_is_too_deep_says_so() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let mut at = rustix::fs::open(dir.path(), flags, Mode::empty()).expect("it opens");
        for _ in 0..DEPTH_MAX + 10 {
            rustix::fs::mkdirat(&at, "d", Mode::RWXU).expect("it can be made");
            at = openat(&at, "d", flags, Mode::empty()).expect("it opens");
        }
        assert!(!measure(dir.path()).complete);
        crate::storage::remove::remove_tree(
            rustix::fs::open(dir.path(), flags, Mode::empty()).expect("it opens").as_fd(),
            "d",
        )
        .expect("it can be removed");
    }
}
