//! The disk: whether the data directory's file system can hold the files of sandboxes.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::thread::UnshareFlags;

use super::finding::Finding;
use super::tries::{AS_ROOT, NEEDS_ROOT, in_child, open, probe_base};
use crate::ns::enter::mount_overlay;
use crate::ns::slots;
use crate::storage::host_image::USR;
use crate::storage::pool;
use crate::sys;
use crate::sys::mounts::{attach, cut_out};

/// Below this, the first image and a few sandboxes may already fill the disk.
const DISK_FREE_MIN: u64 = 2 << 30;
/// Each sandbox writes a few hundred small files of its own.
const FILES_FREE_MIN: u64 = 100_000;
/// File systems that cannot hold the writable layer of an overlay, or that are not on this machine.
const UNFIT_FILE_SYSTEMS: [&str; 8] = ["overlay", "nfs", "nfs4", "cifs", "9p", "vfat", "exfat", "fuseblk"];

/// Where sandboxes would be stored: the data directory, or the directory that it would be created in.
pub(super) struct Storage {
    place: PathBuf,
    mounted: Option<Mounted>,
}

/// A line of `/proc/self/mountinfo`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mounted {
    kind: String,
    point: PathBuf,
    read_only: bool,
}

impl Storage {
    pub(super) fn of(data_dir: &Path) -> Self {
        let exists = data_dir.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/"));
        let place = fs::canonicalize(exists).unwrap_or_else(|_| exists.into());
        let mountinfo = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        Self { mounted: mount_of(&mountinfo, &place), place }
    }

    pub(super) fn file_system(&self) -> Finding {
        judge_file_system(&self.place, self.mounted.as_ref())
    }

    fn kind(&self) -> &str {
        self.mounted.as_ref().map_or("this file system", |mounted| mounted.kind.as_str())
    }

    pub(super) fn idmapped(&self, tries: bool) -> Finding {
        let remedy = "put the data directory on ext4, xfs, btrfs or tmpfs, and use Linux 5.19 or newer";
        try_idmap("idmapped_mounts", &self.place, self.kind(), remedy, tries)
    }

    pub(super) fn idmapped_usr(&self, tries: bool) -> Finding {
        let mountinfo = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let kind = mount_of(&mountinfo, Path::new(USR)).map_or_else(String::new, |mounted| mounted.kind);
        let remedy = "the image `host` shows the machine's own /usr: keep it on ext4, xfs, btrfs or erofs";
        try_idmap("idmapped_usr", Path::new(USR), &kind, remedy, tries)
    }

    pub(super) fn overlay(&self, tries: bool) -> Finding {
        const NAME: &str = "overlayfs";
        if !tries {
            return Finding::unknown(NAME, NEEDS_ROOT, AS_ROOT);
        }
        let scratch = self.place.join(format!(".shoal-doctor-{}", std::process::id()));
        let tried = try_overlay(&scratch);
        if let Err(error) = fs::remove_dir_all(&scratch)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Finding::unknown(
                NAME,
                format!("cannot remove {}: {error}", scratch.display()),
                "remove it",
            );
        }
        match tried {
            Ok(()) => Finding::found(NAME, format!("with idmapped layers on {}", self.kind())),
            Err(error) => Finding::missing(
                NAME,
                format!("cannot be mounted on {}: {error}", self.kind()),
                "a sandbox has no writable layer of its own",
                "put the data directory on ext4, xfs or btrfs, and use Linux 5.19 or newer with the module `overlay`",
            ),
        }
    }

    pub(super) fn space(&self) -> Vec<Finding> {
        match rustix::fs::statvfs(&self.place) {
            Ok(stat) => judge_space(stat.f_bavail.saturating_mul(stat.f_frsize), stat.f_files, stat.f_favail),
            Err(error) => {
                vec![Finding::unknown("disk_space", format!("the kernel does not say: {error}"), "")]
            }
        }
    }

    /// Where a daemon here would keep writable files by default.
    pub(super) fn store(&self, data_dir: &Path) -> Finding {
        const NAME: &str = "store";
        let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30));
        if let Ok(image) = fs::metadata(data_dir.join(pool::IMAGE)) {
            return Finding::found(NAME, format!("loop, {} in {}", gib(image.len()), pool::IMAGE));
        }
        let cost = "sandboxes and volumes are not held to disk limits, and volumes cannot be copied at once; snapshots and forks copy files, and there are no rollbacks and no history";
        let plain = |why: String, remedy: &str| {
            Finding::limited(NAME, format!("plain directories: {why}"), cost, remedy)
        };
        if self.kind() == "btrfs" {
            return Finding::found(
                NAME,
                "btrfs, the data directory's own; `--store btrfs` turns its quotas on",
            );
        }
        if !has_btrfs() {
            return plain("the kernel has no btrfs".into(), "use a kernel with the module `btrfs`");
        }
        if !Path::new("/dev/loop-control").exists() {
            return plain(
                "there are no loop devices".into(),
                "load the module `loop`, or show /dev/loop* to the daemon",
            );
        }
        let available =
            rustix::fs::statvfs(&self.place).map_or(0, |stat| stat.f_bavail.saturating_mul(stat.f_frsize));
        match pool::size_auto(available) {
            Some(size) => Finding::found(NAME, format!("loop, {} are taken at the first start", gib(size))),
            None => plain(
                format!("{} are free", gib(available)),
                "free some, choose a larger disk with --data-dir, or a smaller store with --store loop --store-size",
            ),
        }
    }
}

/// Whether the kernel supports btrfs, or has a module that does.
fn has_btrfs() -> bool {
    let known = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let modules = || fs::read_to_string(format!("/lib/modules/{release}/modules.dep")).unwrap_or_default();
    known.lines().any(|line| line.trim() == "btrfs") || modules().contains("/btrfs.ko")
}

fn judge_file_system(place: &Path, mounted: Option<&Mounted>) -> Finding {
    const NAME: &str = "data_directory";
    let Some(mounted) = mounted else {
        return Finding::unknown(NAME, format!("the file system of {} is not known", place.display()), "");
    };
    let found = format!("{} on {}", mounted.kind, place.display());
    if mounted.read_only {
        let remedy = "choose another place with --data-dir, or mount it writable";
        return Finding::missing(NAME, format!("{found}, read-only"), "nothing can be kept", remedy);
    }
    if UNFIT_FILE_SYSTEMS.contains(&mounted.kind.as_str()) || mounted.kind.starts_with("fuse") {
        let remedy = "choose a place on ext4, xfs or btrfs with --data-dir";
        return Finding::missing(NAME, found, "sandboxes cannot have their writable layers there", remedy);
    }
    if matches!(mounted.kind.as_str(), "tmpfs" | "ramfs") {
        let cost = "what is written takes memory, and is lost when the machine restarts";
        return Finding::limited(NAME, found, cost, "choose a place on a disk with --data-dir");
    }
    Finding::found(NAME, found)
}

fn judge_space(bytes_free: u64, files: u64, files_free: u64) -> Vec<Finding> {
    let gib = |bytes: u64| format!("{:.1} GiB free", bytes as f64 / f64::from(1 << 30));
    let space = if bytes_free < DISK_FREE_MIN {
        let cost = "commands fail when the disk is full, in all sandboxes at once";
        Finding::limited(
            "disk_space",
            gib(bytes_free),
            cost,
            "free some, or choose a larger disk with --data-dir",
        )
    } else {
        Finding::found("disk_space", gib(bytes_free))
    };
    let mut findings = vec![space];
    // Some file systems allocate inodes on demand, and report 0.
    if files > 0 && files_free < FILES_FREE_MIN {
        findings.push(Finding::limited(
            "disk_files",
            format!("{files_free} more files"),
            "the disk is full when it has no more files, however much space is left",
            "remove some, or make the file system with more inodes",
        ));
    }
    findings
}

fn try_idmap(name: &'static str, place: &Path, kind: &str, remedy: &str, tries: bool) -> Finding {
    if !tries {
        return Finding::unknown(name, NEEDS_ROOT, AS_ROOT);
    }
    let tried = in_child(|| {
        let user = slots::user_namespace(probe_base()).map_err(|error| error.source)?;
        let tree = cut_out(open(place)?.as_fd(), "", false)?;
        sys::set_mount_attributes(tree.as_fd(), 0, Some(user.as_fd()), false)
    });
    match tried {
        Ok(()) => Finding::found(name, format!("on {kind}, {}", place.display())),
        Err(error) => Finding::missing(
            name,
            format!("not on {kind}, {}: {error}", place.display()),
            "sandboxes cannot each have their own ids",
            remedy,
        ),
    }
}

/// Mounts an overlay in the same way as a sandbox's root, writes through it, and unmounts it.
fn try_overlay(scratch: &Path) -> io::Result<()> {
    for name in ["", "tree", "tree/lower", "tree/upper", "tree/work", "stage"] {
        fs::create_dir(scratch.join(name))?;
    }
    in_child(|| {
        let base = probe_base();
        // Before anything is opened: a process can copy mounts only from its own mount namespace.
        sys::unshare(UnshareFlags::NEWNS)?;
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
        let user = slots::user_namespace(base).map_err(|error| error.source)?;
        let tree = cut_out(open(&scratch.join("tree"))?.as_fd(), "", false)?;
        sys::set_mount_attributes(tree.as_fd(), 0, Some(user.as_fd()), false)?;
        rustix::process::chdir(scratch)?;
        attach(&tree, CWD, "stage")?;
        mount_overlay(base, "stage/lower", "stage/upper", "stage/work").map(drop)
    })
}

/// The mount of a path: the deepest one whose mount point is above the path, and the last of these.
fn mount_of(mountinfo: &str, path: &Path) -> Option<Mounted> {
    let mut deepest: Option<Mounted> = None;
    for line in mountinfo.lines() {
        let Some((mount, rest)) = line.split_once(" - ") else { continue };
        let mut fields = mount.split(' ').skip(4);
        let (Some(point), Some(options)) = (fields.next(), fields.next()) else { continue };
        let Some(kind) = rest.split(' ').next() else { continue };
        // Spaces and similar characters are written as octal numbers.
        let point = PathBuf::from(point.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\"));
        let is_deeper = deepest.as_ref().is_none_or(|known| point.starts_with(&known.point));
        if path.starts_with(&point) && is_deeper {
            let read_only = options.split(',').any(|option| option == "ro");
            deepest = Some(Mounted { kind: kind.into(), point, read_only });
        }
    }
    deepest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::MIXED;
    use crate::doctor::finding::{Verdict, check};

    #[test]
    fn a_path_is_on_its_deepest_and_last_mount() {
        let kind = |path: &str| mount_of(MIXED, Path::new(path)).map(|mounted| mounted.kind);
        assert_eq!(kind("/var/lib/shoal").as_deref(), Some("ext4"));
        assert_eq!(kind("/mnt/x").as_deref(), Some("btrfs"));
        assert_eq!(kind("/mnt/with space/x").as_deref(), Some("xfs"));
        assert_eq!(kind("/mntx").as_deref(), Some("ext4"));
        assert_eq!(mount_of("rubbish\n1 2 - x", Path::new("/")), None);
    }

    #[test]
    fn file_systems_that_do_not_do_are_told() {
        let on = |kind: &str, read_only| {
            let mounted = Mounted { kind: kind.into(), point: "/".into(), read_only };
            judge_file_system(Path::new("/data"), Some(&mounted))
        };
        check(on("ext4", false), Verdict::Found, "ext4 on /data");
        check(on("ext4", true), Verdict::Missing, "read-only");
        check(on("overlay", false), Verdict::Missing, "overlay");
        check(on("fuse.sshfs", false), Verdict::Missing, "sshfs");
        check(on("tmpfs", false), Verdict::Limited, "tmpfs");
        check(judge_file_system(Path::new("/data"), None), Verdict::Unknown, "/data");
    }

    #[test]
    fn a_disk_with_little_left_is_told_with_its_cost() {
        check(judge_space(1 << 30, 0, 0)[0].clone(), Verdict::Limited, "1.0 GiB");
        assert_eq!(judge_space(1 << 40, 0, 0).len(), 1);
        assert_eq!(judge_space(1 << 40, 1000, 10).len(), 2);
    }
}
