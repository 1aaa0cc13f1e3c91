//! Mounts by descriptor, not by path: a tree is made or copied unattached, and attached where it belongs.
//!
//! Safe code over fsopen(2), open_tree(2) and move_mount(2), shared by everything that mounts.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create,
    fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
};

/// A new file system that is not attached anywhere.
pub fn mount(kind: &str, options: &[(&str, &str)], flags: MountAttrFlags) -> io::Result<OwnedFd> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        fsconfig_set_string(&context, *key, *value)?;
    }
    fsconfig_create(&context)?;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, flags)?)
}

/// Attaches an unattached tree at a name.
pub fn attach(tree: &OwnedFd, dir: BorrowedFd<'_>, name: impl rustix::path::Arg) -> io::Result<()> {
    Ok(move_mount(tree, "", dir, name, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}

/// Attaches an unattached tree to an open file or directory.
pub fn attach_onto(tree: &OwnedFd, place: &OwnedFd) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(move_mount(tree, "", place, "", flags)?)
}

/// An unattached copy of the mount at `path` in `dir`; an empty `path` means `dir` itself.
pub fn cut_out(dir: BorrowedFd<'_>, path: &str, recursive: bool) -> io::Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_SYMLINK_NOFOLLOW;
    if path.is_empty() {
        flags |= OpenTreeFlags::AT_EMPTY_PATH;
    }
    if recursive {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    Ok(open_tree(dir, path, flags)?)
}
