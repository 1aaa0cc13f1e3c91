//! What is mounted below a tree is not part of it. Needs root; fails loudly without.

use std::fs;
use std::os::fd::AsFd;

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::UnshareFlags;
use shoal_runtime::storage::remove::remove_tree;
use shoal_runtime::sys;

#[test]
fn what_is_mounted_below_a_tree_is_not_emptied() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let tree = dir.path().join("tree");
    let path = dir.path().to_owned();
    // A thread of its own may have mounts of its own, which go with it.
    let removing = std::thread::spawn(move || {
        sys::unshare(UnshareFlags::NEWNS).expect("the test runs as root");
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).expect("it may");
        let point = path.join("tree/a/mounted");
        fs::create_dir_all(&point).expect("directories");
        mount("tmpfs", &point, "tmpfs", MountFlags::empty(), None).expect("it may");
        fs::write(point.join("kept"), "kept").expect("a file");
        fs::write(path.join("tree/a/file"), "").expect("a file");
        let parent = fs::File::open(&path).expect("it opens");
        let removed = remove_tree(parent.as_fd(), "tree");
        (removed.map_err(|error| error.raw_os_error()), fs::read_to_string(point.join("kept")).ok())
    });
    let (removed, kept) = removing.join().expect("no panic");
    assert_eq!(removed, Err(Some(libc::EXDEV)));
    assert_eq!(kept.as_deref(), Some("kept"));
    let parent = fs::File::open(dir.path()).expect("it opens");
    remove_tree(parent.as_fd(), "tree").expect("the mount went with the thread");
    assert!(!tree.exists());
}
