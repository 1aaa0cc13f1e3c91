//! Files on disk carry guest ids: a writable directory can be shown under any range of host ids, without a chown.
//! Needs root and a file system that can be idmapped; fails loudly where that is missing.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use shoal_runtime::sys;
use shoal_runtime::sys::mounts::cut_out;

/// A user namespace that maps 0 and up onto a range, held by a process that sleeps.
struct Range {
    base: u32,
    holder: Child,
}

impl Range {
    fn new(base: u32) -> Self {
        let mut holder = Command::new("unshare")
            .args(["--user", "cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare(1) starts, and the test runs as root");
        // `cat` echoes once it runs, and it runs only after the namespace was made.
        let (stdin, stdout) = (holder.stdin.as_mut().expect("piped"), holder.stdout.as_mut().expect("piped"));
        std::io::Write::write_all(stdin, b"x").expect("cat reads");
        std::io::Read::read_exact(stdout, &mut [0]).expect("cat echoes");
        for map in ["uid_map", "gid_map"] {
            fs::write(format!("/proc/{}/{map}", holder.id()), format!("0 {base} 65536"))
                .expect("root may map a range");
        }
        Self { base, holder }
    }

    /// `dir` as this range sees it: a path through an unattached idmapped mount.
    fn view(&self, dir: &Path) -> View {
        let user = fs::File::open(format!("/proc/{}/ns/user", self.holder.id())).expect("it is ours to open");
        let opened = fs::File::open(dir).expect("the directory opens");
        let tree = cut_out(opened.as_fd(), "", false).expect("a mount can be copied");
        sys::set_mount_attributes(tree.as_fd(), 0, Some(user.as_fd()), false)
            .expect("the file system can be idmapped");
        View(tree)
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

struct View(OwnedFd);

impl View {
    fn path(&self, name: &str) -> PathBuf {
        format!("/proc/self/fd/{}/{name}", self.0.as_raw_fd()).into()
    }

    fn owner(&self, name: &str) -> (u32, u32) {
        let meta = fs::symlink_metadata(self.path(name)).expect("the file is there");
        (meta.uid(), meta.gid())
    }
}

#[test]
fn a_writable_directory_moves_between_ranges_without_a_chown() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    // What a guest may write to: its root's, which is 0 on disk.
    fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).expect("ours");
    let (first, second) = (Range::new(0x7a00_0000), Range::new(0x7b00_0000));

    let view = first.view(dir.path());
    for (name, guest) in [("of-root", 0), ("of-user", 1000)] {
        sys::set_file_ids(first.base + guest, first.base + guest);
        let written = fs::write(view.path(name), "kept");
        sys::set_file_ids(0, 0);
        written.expect("a guest of the first range may write");
    }
    drop((view, first));

    let on_disk = |name: &str| fs::metadata(dir.path().join(name)).expect("it is on disk").uid();
    assert_eq!((on_disk("of-root"), on_disk("of-user")), (0, 1000), "files on disk carry guest ids");

    let view = second.view(dir.path());
    assert_eq!(view.owner("of-root"), (second.base, second.base));
    assert_eq!(view.owner("of-user"), (second.base + 1000, second.base + 1000));
    sys::set_file_ids(second.base + 1000, second.base + 1000);
    let changed = fs::write(view.path("of-user"), "changed");
    sys::set_file_ids(0, 0);
    changed.expect("the same guest owns its file under the second range");
    assert_eq!(fs::read(dir.path().join("of-user")).expect("readable"), b"changed");
}
