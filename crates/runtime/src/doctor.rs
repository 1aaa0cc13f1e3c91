//! What Shoal needs of this machine: each thing found or not, what it costs to lack it, how to get it.
//!
//! Looks and says; mends nothing. Where only a try tells, a child tries and leaves nothing behind. It forks, so it is
//! called while the process has one thread. How it is shown, and whether a daemon runs, is for the caller.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::process::{Pid, Resource, WaitOptions, getrlimit, waitpid};
use rustix::thread::UnshareFlags;

use crate::cgroup::Layout;
use crate::enter::{attach, cut_out, mount_overlay};
use crate::host_image::USR;
use crate::ranges::{self, CLAIMS};
use crate::slot;
use crate::store;
use crate::sys::{self, Cloned};

/// `cgroup.kill` came with it.
const KERNEL_MIN: (u32, u32) = (5, 14);
/// Below this, the first image and a few sandboxes may already fill the disk.
const DISK_FREE_MIN: u64 = 2 << 30;
/// Each sandbox writes a few hundred small files of its own.
const FILES_FREE_MIN: u64 = 100_000;
/// Descriptors that the daemon holds for one sandbox.
const DESCRIPTORS_PER_SANDBOX: u64 = 10;
/// Descriptors below this are fewer than the sandboxes that a daemon takes by default.
const DESCRIPTORS_WANTED: u64 = 20_000;
/// The number that distributions set on machines with much to do, and the most that the kernel takes.
const PID_MAX_BEST: u64 = 4_194_304;
/// Below this, some hundred busy sandboxes may use up all process ids.
const PID_MAX_WANTED: u64 = 65_536;
/// Namespaces of one kind that the machine should allow.
const NAMESPACES_WANTED: u64 = 10_000;
/// File systems on which an overlay cannot have its writable layer, or which are not on this machine.
const UNFIT_FILE_SYSTEMS: [&str; 8] = ["overlay", "nfs", "nfs4", "cifs", "9p", "vfat", "exfat", "fuseblk"];

/// Whether something is as Shoal needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// It is.
    Found,
    /// It could not be found out.
    Unknown,
    /// It is not, and Shoal works all the same, at a cost.
    Lacking,
    /// It is not, and Shoal does not work.
    Missing,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Short and stable, for programs: `idmapped_mounts`.
    pub name: &'static str,
    /// Whether it is as it should be.
    pub verdict: Verdict,
    /// What is there.
    pub found: String,
    /// What it costs to lack it. Empty where nothing is lacking.
    pub cost: String,
    /// How to get it. Empty where nothing is lacking.
    pub remedy: String,
}

impl Finding {
    /// It is as it should be.
    pub fn found(name: &'static str, found: impl Into<String>) -> Self {
        Self {
            name,
            verdict: Verdict::Found,
            found: found.into(),
            cost: String::new(),
            remedy: String::new(),
        }
    }

    /// It could not be found out.
    pub fn unknown(name: &'static str, why: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { verdict: Verdict::Unknown, remedy: remedy.into(), ..Self::found(name, why) }
    }

    /// Shoal works without it.
    pub fn lacking(
        name: &'static str,
        found: impl Into<String>,
        cost: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let (cost, remedy) = (cost.into(), remedy.into());
        Self { verdict: Verdict::Lacking, cost, remedy, ..Self::found(name, found) }
    }

    /// Shoal does not work without it.
    pub fn missing(
        name: &'static str,
        found: impl Into<String>,
        cost: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { verdict: Verdict::Missing, ..Self::lacking(name, found, cost, remedy) }
    }
}

/// Looks at everything that a daemon with this data directory would need. The directory need not exist.
pub fn examine(data_dir: &Path) -> Vec<Finding> {
    let mut findings = vec![kernel(), root()];
    let tries = rustix::process::geteuid().is_root();
    findings.extend(cgroups(tries));
    findings.push(namespaces(tries));
    findings.push(namespace_counts());
    findings.push(network(tries));
    findings.push(seccomp());
    let storage = Storage::of(data_dir);
    findings.push(storage.file_system());
    findings.push(storage.idmapped(tries));
    findings.push(storage.idmapped_usr(tries));
    findings.push(storage.overlay(tries));
    findings.extend(storage.space());
    findings.push(storage.store(data_dir));
    findings.push(descriptors());
    findings.push(process_ids());
    findings.push(id_ranges());
    findings.extend(host_image());
    findings
}

fn kernel() -> Finding {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    judge_kernel(&release)
}

fn judge_kernel(release: &str) -> Finding {
    let (major, minor) = KERNEL_MIN;
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|text| text.parse::<u32>().ok());
    let version = (numbers.next().flatten().unwrap_or(0), numbers.next().flatten().unwrap_or(0));
    let found = format!("Linux {release}");
    if version >= KERNEL_MIN {
        return Finding::found("kernel", found);
    }
    Finding::missing(
        "kernel",
        found,
        "a sandbox that forks fast cannot be ended",
        format!("install Linux {major}.{minor} or newer"),
    )
}

fn root() -> Finding {
    if !rustix::process::geteuid().is_root() {
        return Finding::missing(
            "root",
            format!("user {}", rustix::process::geteuid().as_raw()),
            "the daemon cannot make sandboxes, and most of what follows cannot be found out",
            "run it as root, with `sudo shoal doctor`",
        );
    }
    match rustix::thread::capabilities(None) {
        Ok(sets) if !sets.effective.contains(rustix::thread::CapabilitySet::SYS_ADMIN) => Finding::missing(
            "root",
            "root without CAP_SYS_ADMIN",
            "nothing can be mounted, so no sandbox can be made",
            "start it outside the container, or give the container CAP_SYS_ADMIN",
        ),
        Ok(_) | Err(_) => Finding::found("root", "root"),
    }
}

fn cgroups(tries: bool) -> Vec<Finding> {
    let mountinfo = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let layout = Layout::read(&mountinfo, |v2| {
        fs::read_to_string(Path::new(v2).join("cgroup.controllers")).unwrap_or_default()
    });
    let mut findings = judge_layout(&layout);
    if let (true, Some(v2)) = (tries, &layout.v2) {
        findings.push(try_group(v2, &layout));
    }
    findings
}

fn judge_layout(layout: &Layout) -> Vec<Finding> {
    let Some(v2) = &layout.v2 else {
        return vec![Finding::missing(
            "cgroup_v2",
            "not mounted",
            "a sandbox cannot be ended as a whole",
            "mount it: `mount -t cgroup2 none /sys/fs/cgroup/unified`, or boot with systemd.unified_cgroup_hierarchy=1",
        )];
    };
    let mut findings = vec![Finding::found("cgroup_v2", v2.clone())];
    for (controller, place) in &layout.controllers {
        let (name, what) = match *controller {
            "cpu" => ("cgroup_cpu", "processor time"),
            "memory" => ("cgroup_memory", "memory"),
            _ => ("cgroup_pids", "the number of processes"),
        };
        findings.push(match place {
            Some(place) if place == v2 => Finding::found(name, format!("v2, {place}")),
            Some(place) => Finding::found(name, format!("v1, {place}")),
            None => Finding::missing(
                name,
                "carried by no hierarchy",
                format!("{what} of a sandbox cannot be limited, and no sandbox is made without"),
                format!("boot with cgroup_enable={controller}, or a kernel that has it"),
            ),
        });
    }
    findings
}

/// Makes a group of every kind and removes it.
fn try_group(v2: &str, layout: &Layout) -> Finding {
    const NAME: &str = "cgroup_writable";
    let group = format!("shoal-doctor-{}", std::process::id());
    let mut places: Vec<&String> =
        layout.controllers.iter().filter_map(|(_, place)| place.as_ref()).collect();
    let v2_place = v2.to_owned();
    places.push(&v2_place);
    places.sort();
    places.dedup();
    let mut lacking = Vec::new();
    for place in places {
        let path = Path::new(place).join(&group);
        if let Err(error) = fs::create_dir(&path) {
            return Finding::missing(
                NAME,
                format!("cannot make a group in {place}: {error}"),
                "no sandbox can be made",
                "start the daemon where cgroups can be written to: on the machine itself, or in a container with its \
                 own writable cgroup namespace",
            );
        }
        if place == v2 {
            let absent = |file: &&str| !path.join(file).exists();
            lacking.extend(["cgroup.kill", "cgroup.freeze"].into_iter().filter(absent));
        }
        // The kernel removes the files in it. A group that was made just now and has nobody in it can be removed.
        if let Err(error) = fs::remove_dir(&path) {
            return Finding::unknown(NAME, format!("cannot remove {}: {error}", path.display()), "remove it");
        }
    }
    if lacking.is_empty() {
        return Finding::found(NAME, "groups can be made, ended and frozen");
    }
    Finding::missing(
        NAME,
        format!("groups have no {}", lacking.join(" and no ")),
        "a sandbox that forks fast cannot be ended",
        "install Linux 5.14 or newer",
    )
}

const NEEDS_ROOT: &str = "only root can find out";
const AS_ROOT: &str = "run `sudo shoal doctor`";

fn namespaces(tries: bool) -> Finding {
    const NAME: &str = "user_namespaces";
    if !tries {
        return Finding::unknown(NAME, NEEDS_ROOT, AS_ROOT);
    }
    match in_child(|| slot::user_namespace(probe_base()).map(drop).map_err(|error| error.source)) {
        Ok(()) => Finding::found(NAME, "ids can be mapped"),
        Err(error) => Finding::missing(
            NAME,
            format!("cannot be made: {error}"),
            "root of a sandbox would be root of the machine",
            "set `sysctl user.max_user_namespaces=100000`, and allow them in the container that Shoal runs in",
        ),
    }
}

fn namespace_counts() -> Finding {
    const NAME: &str = "namespace_counts";
    let counts: Vec<(&str, u64)> = ["user", "net", "mnt", "pid"]
        .into_iter()
        .filter_map(|kind| Some((kind, number(&format!("/proc/sys/user/max_{kind}_namespaces"))?)))
        .collect();
    match counts.iter().min_by_key(|(_, count)| *count) {
        None => Finding::unknown(NAME, "the kernel does not say", ""),
        Some((kind, count)) if *count < NAMESPACES_WANTED => Finding::lacking(
            NAME,
            format!("{count} of kind `{kind}`"),
            format!("no more than {count} sandboxes at once"),
            format!("set `sysctl user.max_{kind}_namespaces=100000`"),
        ),
        Some((_, count)) => Finding::found(NAME, format!("{count} of each kind")),
    }
}

fn network(tries: bool) -> Finding {
    const NAME: &str = "network_namespaces";
    if !tries {
        return Finding::unknown(NAME, NEEDS_ROOT, AS_ROOT);
    }
    match in_child(|| sys::unshare(UnshareFlags::NEWNET).and_then(|()| sys::loopback_up())) {
        Ok(()) => Finding::found(NAME, "can be made"),
        Err(error) => Finding::missing(
            NAME,
            format!("cannot be made: {error}"),
            "a sandbox could use the machine's network",
            "use a kernel with CONFIG_NET_NS, and allow it in the container that Shoal runs in",
        ),
    }
}

fn seccomp() -> Finding {
    const NAME: &str = "seccomp";
    let actions = fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail").unwrap_or_default();
    if actions.split_whitespace().any(|action| action == "errno") {
        return Finding::found(NAME, "filters with errno");
    }
    Finding::missing(
        NAME,
        "no filters",
        "guests could make system calls that reach far into the kernel",
        "use a kernel with CONFIG_SECCOMP_FILTER",
    )
}

/// The place where sandboxes would be kept: the data directory, or the directory that it would be made in.
struct Storage {
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
    fn of(data_dir: &Path) -> Self {
        let exists = data_dir.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/"));
        let place = fs::canonicalize(exists).unwrap_or_else(|_| exists.into());
        let mountinfo = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        Self { mounted: mount_of(&mountinfo, &place), place }
    }

    fn file_system(&self) -> Finding {
        judge_file_system(&self.place, self.mounted.as_ref())
    }

    fn kind(&self) -> &str {
        self.mounted.as_ref().map_or("this file system", |mounted| mounted.kind.as_str())
    }

    fn idmapped(&self, tries: bool) -> Finding {
        let remedy = "put the data directory on ext4, xfs, btrfs or tmpfs, and use Linux 5.19 or newer";
        try_idmap("idmapped_mounts", &self.place, self.kind(), remedy, tries)
    }

    fn idmapped_usr(&self, tries: bool) -> Finding {
        let mountinfo = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let kind = mount_of(&mountinfo, Path::new(USR)).map_or_else(String::new, |mounted| mounted.kind);
        let remedy = "the image `host` shows the machine's own /usr: keep it on ext4, xfs, btrfs or erofs";
        try_idmap("idmapped_usr", Path::new(USR), &kind, remedy, tries)
    }

    fn overlay(&self, tries: bool) -> Finding {
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

    fn space(&self) -> Vec<Finding> {
        match rustix::fs::statvfs(&self.place) {
            Ok(stat) => judge_space(stat.f_bavail.saturating_mul(stat.f_frsize), stat.f_files, stat.f_favail),
            Err(error) => {
                vec![Finding::unknown("disk_space", format!("the kernel does not say: {error}"), "")]
            }
        }
    }
}

impl Storage {
    /// Where a daemon here would keep writable files, if nobody says otherwise.
    fn store(&self, data_dir: &Path) -> Finding {
        const NAME: &str = "store";
        let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30));
        if let Ok(image) = fs::metadata(data_dir.join(store::IMAGE)) {
            return Finding::found(NAME, format!("loop, {} in {}", gib(image.len()), store::IMAGE));
        }
        let cost = "sandboxes and volumes are not held to disk limits, and volumes cannot be copied at once";
        let plain = |why: String, remedy: &str| {
            Finding::lacking(NAME, format!("plain directories: {why}"), cost, remedy)
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
        if store::make_program().is_none() {
            return plain("mkfs.btrfs is not installed".into(), "install it: apt install btrfs-progs");
        }
        let available =
            rustix::fs::statvfs(&self.place).map_or(0, |stat| stat.f_bavail.saturating_mul(stat.f_frsize));
        match store::size_auto(available) {
            Some(size) => Finding::found(NAME, format!("loop, {} are taken at the first start", gib(size))),
            None => plain(
                format!("{} are free", gib(available)),
                "free some, choose a larger disk with --data-dir, or a smaller store with --store loop --store-size",
            ),
        }
    }
}

/// Whether the kernel knows it, or has a module that does.
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
        return Finding::lacking(NAME, found, cost, "choose a place on a disk with --data-dir");
    }
    Finding::found(NAME, found)
}

fn judge_space(bytes_free: u64, files: u64, files_free: u64) -> Vec<Finding> {
    let gib = |bytes: u64| format!("{:.1} GiB free", bytes as f64 / f64::from(1 << 30));
    let space = if bytes_free < DISK_FREE_MIN {
        let cost = "commands fail when the disk is full, in all sandboxes at once";
        Finding::lacking(
            "disk_space",
            gib(bytes_free),
            cost,
            "free some, or choose a larger disk with --data-dir",
        )
    } else {
        Finding::found("disk_space", gib(bytes_free))
    };
    let mut findings = vec![space];
    // Some file systems make them as they go, and say 0.
    if files > 0 && files_free < FILES_FREE_MIN {
        findings.push(Finding::lacking(
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
        let user = slot::user_namespace(probe_base()).map_err(|error| error.source)?;
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

/// Mounts an overlay as a sandbox's root is mounted, writes through it, and lets go.
fn try_overlay(scratch: &Path) -> io::Result<()> {
    for name in ["", "tree", "tree/lower", "tree/upper", "tree/work", "stage"] {
        fs::create_dir(scratch.join(name))?;
    }
    in_child(|| {
        let base = probe_base();
        // Before anything is opened: mounts can be copied only out of the namespace that one is in.
        sys::unshare(UnshareFlags::NEWNS)?;
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
        let user = slot::user_namespace(base).map_err(|error| error.source)?;
        let tree = cut_out(open(&scratch.join("tree"))?.as_fd(), "", false)?;
        sys::set_mount_attributes(tree.as_fd(), 0, Some(user.as_fd()), false)?;
        rustix::process::chdir(scratch)?;
        attach(&tree, CWD, "stage")?;
        mount_overlay(base, "stage/lower", "stage/upper", "stage/work").map(drop)
    })
}

fn descriptors() -> Finding {
    judge_descriptors(getrlimit(Resource::Nofile).maximum)
}

fn judge_descriptors(most: Option<u64>) -> Finding {
    const NAME: &str = "descriptors";
    let Some(most) = most else { return Finding::found(NAME, "no limit") };
    if most >= DESCRIPTORS_WANTED {
        return Finding::found(NAME, format!("{most} per process"));
    }
    Finding::lacking(
        NAME,
        format!("{most} per process"),
        format!("about {} sandboxes at once", most / DESCRIPTORS_PER_SANDBOX),
        "raise it: `LimitNOFILE=1048576` in the systemd unit, or `ulimit -n` before `shoal serve`",
    )
}

fn process_ids() -> Finding {
    const NAME: &str = "process_ids";
    match number("/proc/sys/kernel/pid_max") {
        None => Finding::unknown(NAME, "the kernel does not say", ""),
        Some(most) if most < PID_MAX_WANTED => Finding::lacking(
            NAME,
            format!("pid_max is {most}"),
            "that is how many processes all sandboxes and the machine have together",
            format!("set `sysctl kernel.pid_max={PID_MAX_BEST}`"),
        ),
        Some(most) => Finding::found(NAME, format!("pid_max is {most}")),
    }
}

fn id_ranges() -> Finding {
    let lists = ["/etc/subuid", "/etc/subgid"].map(|path| fs::read_to_string(path).unwrap_or_default());
    let claimed = fs::read_dir(CLAIMS).map_or(0, |entries| {
        entries.flatten().filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok()).count()
    });
    judge_id_ranges(&lists.concat(), claimed)
}

/// Whether ids that sandboxes take were handed out to someone else, by the lines of `/etc/subuid` and `/etc/subgid`.
fn judge_id_ranges(subordinate: &str, blocks_claimed: usize) -> Finding {
    const NAME: &str = "id_ranges";
    let taken = (u64::from(ranges::FIRST), u64::from(ranges::END));
    let overlap = subordinate.lines().find(|line| {
        let mut parts = line.trim().split(':').skip(1).map(|part| part.parse::<u64>().ok());
        let (Some(Some(first)), Some(Some(count))) = (parts.next(), parts.next()) else { return false };
        first < taken.1 && first.saturating_add(count) > taken.0
    });
    let free = (ranges::BLOCKS as usize).saturating_sub(blocks_claimed);
    match overlap {
        Some(line) => Finding::lacking(
            NAME,
            format!("`{}` is handed out as subordinate ids too", line.trim()),
            "processes of a sandbox and of that user may have the same ids",
            format!("give that user ids below {}", ranges::FIRST),
        ),
        None if free == 0 => Finding::lacking(
            NAME,
            "all are claimed",
            "no new sandboxes beyond those that daemons have made room for",
            format!("remove the files of installations that are gone from {CLAIMS}"),
        ),
        None => Finding::found(NAME, format!("from {}, {free} blocks of 64 free", ranges::FIRST)),
    }
}

fn host_image() -> Vec<Finding> {
    let has = |program: &str| {
        ["/usr/bin", "/usr/local/bin"].iter().any(|dir| Path::new(dir).join(program).exists())
    };
    let mut findings = Vec::new();
    findings.push(if has("sh") && has("env") {
        Finding::found("host_programs", "/usr has a shell")
    } else {
        let remedy =
            "the image `host` needs a machine whose programs are in /usr, as Debian's and Fedora's are";
        Finding::missing("host_programs", "/usr has no shell", "the image `host` has no programs", remedy)
    });
    for (name, program, package, cost) in [
        ("host_python", "python3", "python3", "sandboxes of the image `host` have no Python"),
        ("host_bash", "bash", "bash", "sandboxes of the image `host` have no bash; scripts run in sh"),
        ("host_git", "git", "git", "sandboxes of the image `host` have no git"),
    ] {
        findings.push(if has(program) {
            Finding::found(name, program)
        } else {
            Finding::lacking(
                name,
                "not in /usr",
                cost,
                format!("`apt-get install {package}`, or what is like it here"),
            )
        });
    }
    findings
}

fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Ids for a try that lasts a moment: the last range of all, which is taken last.
fn probe_base() -> u32 {
    ranges::END - slot::IDS
}

fn open(path: &Path) -> io::Result<std::os::fd::OwnedFd> {
    Ok(openat(CWD, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Does something in a process of its own, which takes all its effects with it.
fn in_child(work: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    let child = match sys::fork_process()? {
        Cloned::Parent { pid } => Pid::from_raw(pid as i32).expect("a child has a positive pid"),
        Cloned::Child => sys::exit_now(match work() {
            Ok(()) => 0,
            Err(error) => error.raw_os_error().unwrap_or(libc::EIO),
        }),
    };
    let status = waitpid(Some(child), WaitOptions::empty())?.and_then(|(_, status)| status.exit_status());
    match status {
        Some(0) => Ok(()),
        Some(errno) => Err(io::Error::from_raw_os_error(errno)),
        None => Err(io::Error::other("the kernel ended the try")),
    }
}

/// The mount that a path is on: of those whose point is above it the deepest, and of these the last.
fn mount_of(mountinfo: &str, path: &Path) -> Option<Mounted> {
    let mut deepest: Option<Mounted> = None;
    for line in mountinfo.lines() {
        let Some((mount, rest)) = line.split_once(" - ") else { continue };
        let mut fields = mount.split(' ').skip(4);
        let (Some(point), Some(options)) = (fields.next(), fields.next()) else { continue };
        let Some(kind) = rest.split(' ').next() else { continue };
        // Spaces and their like are written as octal numbers.
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

    #[track_caller]
    fn check(finding: Finding, verdict: Verdict, word: &str) {
        assert_eq!(finding.verdict, verdict, "{finding:?}");
        assert!(finding.found.contains(word), "{finding:?}");
        let lacks = matches!(verdict, Verdict::Lacking | Verdict::Missing);
        assert!(!lacks || !finding.cost.is_empty() && !finding.remedy.is_empty(), "{finding:?}");
    }

    #[test]
    fn kernels_are_compared_by_their_numbers() {
        for (release, verdict) in [
            ("5.13.19-1-amd64", Verdict::Missing),
            ("5.14.0", Verdict::Found),
            ("6.1.0-28-cloud-amd64", Verdict::Found),
            ("10.0", Verdict::Found),
            ("5.9.16", Verdict::Missing),
            ("strange", Verdict::Missing),
        ] {
            check(judge_kernel(release), verdict, release);
        }
    }

    const MIXED: &str = "\
25 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 25 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
31 25 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
32 25 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
40 25 0:30 / /mnt/with\\040space ro - xfs /dev/sdb rw
41 25 0:31 / /mnt rw - tmpfs tmpfs rw
42 25 0:32 / /mnt rw - btrfs /dev/sdc rw
";

    #[test]
    fn each_controller_is_found_where_it_is() {
        let layout = Layout::read(MIXED, |_| "io pids".into());
        let findings = judge_layout(&layout);
        let of =
            |name: &str| findings.iter().find(|finding| finding.name == name).expect("it is there").clone();
        check(of("cgroup_v2"), Verdict::Found, "/sys/fs/cgroup/unified");
        check(of("cgroup_memory"), Verdict::Found, "v1, /sys/fs/cgroup/memory");
        check(of("cgroup_cpu"), Verdict::Found, "v1, /sys/fs/cgroup/cpu,cpuacct");
        check(of("cgroup_pids"), Verdict::Found, "v2");
        let layout = Layout::read(MIXED, |_| String::new());
        let pids = judge_layout(&layout).pop().expect("pids come last");
        check(pids, Verdict::Missing, "no hierarchy");
        let nothing = judge_layout(&Layout::read("", |_| String::new()));
        assert_eq!(nothing.len(), 1);
        check(nothing[0].clone(), Verdict::Missing, "not mounted");
    }

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
        check(on("tmpfs", false), Verdict::Lacking, "tmpfs");
        check(judge_file_system(Path::new("/data"), None), Verdict::Unknown, "/data");
    }

    #[test]
    fn little_of_anything_is_told_with_its_cost() {
        check(judge_descriptors(Some(1024)), Verdict::Lacking, "1024");
        check(judge_descriptors(Some(20_000)), Verdict::Found, "20000");
        check(judge_descriptors(None), Verdict::Found, "no limit");
        check(judge_space(1 << 30, 0, 0)[0].clone(), Verdict::Lacking, "1.0 GiB");
        assert_eq!(judge_space(1 << 40, 0, 0).len(), 1);
        assert_eq!(judge_space(1 << 40, 1000, 10).len(), 2);
    }

    #[test]
    fn subordinate_ids_that_meet_ours_are_told() {
        check(judge_id_ranges("user:100000:65536\n# no line\n", 0), Verdict::Found, "512 blocks");
        check(judge_id_ranges("user:100000:65536\nbig:1000000:4000000000\n", 0), Verdict::Lacking, "big");
        check(judge_id_ranges(&format!("next:{}:1\n", ranges::END), 3), Verdict::Found, "509 blocks");
        check(judge_id_ranges("", 512), Verdict::Lacking, "claimed");
    }
}
