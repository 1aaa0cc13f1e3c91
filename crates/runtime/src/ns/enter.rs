//! Walks the steps into a sandbox. Runs in a new process that becomes init.
//!
//! Until `BecomeGuest` the process is the host's root in its own namespaces, and works on a root filesystem that a
//! guest may have written to before. So every path in it is opened beneath its root descriptor without following a
//! link, and mounts are attached by descriptor (CVE-2025-31133 and similar).

use std::collections::HashMap;
use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, StatVfsMountFlags, fstatvfs, mkdirat, openat, openat2};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, open_tree, unmount,
};
use rustix::process::{
    Gid, Resource, Rlimit, Uid, fchdir, pivot_root, setpriority_process, setrlimit, setsid,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, LinkNameSpaceType, UnshareFlags, capabilities,
    clear_ambient_capability_set, move_into_link_name_space, remove_capability_from_bounding_set,
    set_capabilities, set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};

use wire::network::HOST_DIRECTORY;

use crate::ns::plan::{Overlay, Shared, Step, Tree};
use crate::ns::seccomp::Filters;
use crate::ns::shown;
use crate::ns::slots::IDS;
use crate::storage::stage::{
    STAGE_EMPTY_DIRECTORY, STAGE_EMPTY_FILE, STAGE_ROOT, STAGE_WRITABLE, layer_name, lower_layers,
    set_lower_layers,
};
use crate::sys;
use crate::sys::mounts::{attach, attach_onto, cut_out, mount};

/// Names in the staging directory for what all sandboxes share.
pub fn stage_name(shared: Shared) -> &'static str {
    match shared {
        Shared::Devices => "dev",
        Shared::System => "sys",
    }
}

/// Number of init's listening socket.
const LISTENER: i32 = 3;
/// Number of init's cgroup descriptor.
const CGROUP: i32 = 4;
/// Number of init's OOM score file, open for reading and writing.
const OOM_SCORE: i32 = 5;

/// Init's place in the order of OOM victims (proc_pid_oom_score_adj(5)): after its commands, which init puts higher,
/// and before the rest of the host when the whole machine runs short.
const INIT_OOM_SCORE: i32 = 200;
/// The end of the scale: a process with this score is killed first.
const OOM_SCORE_MAX: i32 = 1000;
/// The longest text in such a file: `-1000` and a newline.
const OOM_SCORE_TEXT_MAX: usize = 8;

/// What package managers, builds and servers on loopback need. Each of these reaches only what the sandbox owns.
const KEPT: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::NET_BIND_SERVICE)
    .union(CapabilitySet::SYS_CHROOT);

/// Limits that a guest cannot raise. Descriptors: plenty for a server, and far below what a machine can hold. Core
/// dumps: 1 is the only value at which the kernel neither writes a file nor starts the host's handler (core(5));
/// `seccomp` keeps it there.
const RESOURCES: [(Resource, u64); 2] = [(Resource::Nofile, 16_384), (Resource::Core, 1)];
/// Init runs at a higher priority than its commands, so that a busy sandbox still reacts to kills and timers. Init
/// puts commands back to 0.
const INIT_NICE: i32 = -15;
/// Terminals of one sandbox. All sandboxes share the machine's limit, 4096 by default.
const TERMINALS_MAX: &str = "256";

/// The size of the file system with the files that show the limits.
const SHOWN_BYTES: &str = "1m";

/// Files of `/proc` that reveal or affect the host. Covered by an empty file.
const COVERED_FILES: [&str; 18] = [
    "buddyinfo",
    "cmdline",
    "config.gz",
    "diskstats",
    "interrupts",
    "modules",
    "partitions",
    "softirqs",
    "zoneinfo",
    "kcore",
    "keys",
    "key-users",
    "kmsg",
    "kallsyms",
    "sched_debug",
    "sysrq-trigger",
    "timer_list",
    "latency_stats",
];
/// Directories of `/proc` that reveal or affect the host. Covered by an empty directory. `pressure` shows how busy
/// the machine is, and a process that may write to it can make the kernel monitor that on its behalf, outside of
/// every limit.
const COVERED_DIRECTORIES: [&str; 7] = ["acpi", "asound", "bus", "fs", "irq", "pressure", "scsi"];

/// Everything that the steps refer to, opened by the launcher.
pub struct Materials<'a> {
    /// Trees by name.
    pub trees: HashMap<Tree, OwnedFd>,
    /// Files to write `0` to.
    pub limits: Vec<OwnedFd>,
    /// The user namespace.
    pub user: OwnedFd,
    /// The network namespace.
    pub net: OwnedFd,
    /// The first host id of the range.
    pub base: u32,
    /// The compiled filters.
    pub filters: &'a Filters,
    /// The executable of init.
    pub init: BorrowedFd<'a>,
    /// Init's listening socket.
    pub listener: OwnedFd,
    /// Init's cgroup.
    pub cgroup: OwnedFd,
}

/// A step that failed.
pub struct EnterError {
    /// What was being done; reads after "cannot".
    pub doing: String,
    /// The kernel's error.
    pub source: io::Error,
}

/// Walks the steps. On success, this process has become init and the function does not return.
pub fn enter(steps: &[Step], materials: Materials<'_>) -> EnterError {
    let mut walker = Walker { materials, root: None, oom_score: None };
    for step in steps {
        if let Err(source) = walker.walk(step) {
            return EnterError { doing: describe(step), source };
        }
    }
    EnterError { doing: "execute init".into(), source: io::Error::other("the plan has no such step") }
}

fn describe(step: &Step) -> String {
    match step {
        Step::OrderVictims => "set the order of OOM victims".into(),
        Step::JoinLimits => "join the limits".into(),
        Step::HideCgroups => "make a cgroup namespace".into(),
        Step::JoinNetwork => "join the network namespace".into(),
        Step::Stage(tree) => format!("stage {tree:?}"),
        Step::Overlay(overlay) => format!("mount the overlay at `/{}`", overlay.at),
        Step::Attach(tree, at) => format!("attach {tree:?} at `/{at}`"),
        Step::Processes => "mount `/proc`".into(),
        Step::ShowLimits { .. } => "show the limits in `/proc`".into(),
        Step::Terminals => "mount `/dev/pts`".into(),
        Step::SharedMemory { .. } => "mount `/dev/shm`".into(),
        Step::HostDirectory => format!("mount `{HOST_DIRECTORY}`"),
        Step::Volume(_, path) => format!("mount a volume at `{path}`"),
        Step::ChangeRoot => "change the root".into(),
        Step::Hostname(_) => "set the host name".into(),
        Step::BecomeGuest => "enter the user namespace".into(),
        Step::DropPrivileges => "drop privileges".into(),
        Step::Filter => "filter system calls".into(),
        Step::Execute => "execute init".into(),
    }
}

struct Walker<'a> {
    materials: Materials<'a>,
    root: Option<OwnedFd>,
    /// The score file of this process, which is init's after the exec.
    oom_score: Option<OwnedFd>,
}

impl Walker<'_> {
    fn walk(&mut self, step: &Step) -> io::Result<()> {
        match step {
            Step::OrderVictims => {
                self.oom_score = Some(order_victims()?);
                Ok(())
            }
            Step::JoinLimits => {
                for tasks in &self.materials.limits {
                    rustix::io::write(tasks, b"0")?;
                }
                Ok(())
            }
            Step::HideCgroups => sys::unshare(UnshareFlags::NEWCGROUP),
            Step::JoinNetwork => {
                Ok(move_into_link_name_space(self.materials.net.as_fd(), Some(LinkNameSpaceType::Network))?)
            }
            Step::Stage(tree) => match tree {
                Tree::Layer(number) => attach(self.tree(*tree)?, CWD, layer_name(*number)),
                Tree::Writable => attach(self.tree(*tree)?, CWD, STAGE_WRITABLE),
                Tree::Host | Tree::Volume(_) => Err(io::Error::other("only layers are staged")),
            },
            Step::Overlay(overlay) => self.overlay(overlay),
            Step::Attach(shared, at) => {
                let place = self.place(at)?;
                Ok(move_mount(CWD, stage_name(*shared), &place, "", MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH)?)
            }
            Step::Processes => self.processes(),
            Step::ShowLimits { cpu_millis, memory_bytes } => self.show_limits(*cpu_millis, *memory_bytes),
            Step::Terminals => {
                // Terminals belong to the user who opens them; their group is `tty`, 5 as on Debian.
                let gid = (self.materials.base + 5).to_string();
                let options = [("ptmxmode", "0666"), ("mode", "0620"), ("gid", &gid), ("max", TERMINALS_MAX)];
                let flags = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
                let mounted = mount("devpts", &options, flags)?;
                attach_onto(&mounted, &self.place("dev/pts")?)
            }
            Step::SharedMemory { bytes } => {
                let options = [("mode", "1777"), ("size", &bytes.to_string())];
                let flags = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
                let mounted = mount("tmpfs", &options, flags)?;
                attach_onto(&mounted, &self.place("dev/shm")?)
            }
            Step::HostDirectory => match self.place_for_guest(HOST_DIRECTORY) {
                Ok(place) => attach_onto(self.tree(Tree::Host)?, &place),
                // Our own error, for something that is not a directory.
                Err(e) if e.raw_os_error().is_none() => Ok(()),
                Err(e) => Err(e),
            },
            Step::Volume(number, path) => {
                let place = self.place_for_guest(path)?;
                attach_onto(self.tree(Tree::Volume(*number))?, &place)
            }
            Step::ChangeRoot => {
                fchdir(self.root()?)?;
                // The same path for new and old root: the old root ends up on top and is detached from there, so the
                // guest's root needs no directory for it (pivot_root(2)).
                pivot_root(".", ".")?;
                unmount(".", UnmountFlags::DETACH)?;
                Ok(rustix::process::chdir("/")?)
            }
            Step::Hostname(name) => Ok(rustix::system::sethostname(name.as_bytes())?),
            Step::BecomeGuest => {
                setpriority_process(None, INIT_NICE)?;
                move_into_link_name_space(self.materials.user.as_fd(), Some(LinkNameSpaceType::User))?;
                set_thread_groups(&[])?;
                set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT)?;
                set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)?;
                setsid()?;
                Ok(())
            }
            Step::DropPrivileges => {
                for (resource, most) in RESOURCES {
                    setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })?;
                }
                drop_privileges(KEPT)
            }
            Step::Filter => self.materials.filters.apply().map_err(io::Error::other),
            Step::Execute => self.execute(),
        }
    }

    fn overlay(&mut self, overlay: &Overlay) -> io::Result<()> {
        // Layers are named relative to the staging directory, which is the working directory: short, and free of
        // characters that the option's own syntax would need escaped.
        let lower = lower_layers(&overlay.layers);
        let upper = format!("{STAGE_WRITABLE}/{}", overlay.upper);
        let work = format!("{upper}-work");
        let mounted = mount_overlay(self.materials.base, &lower, &upper, &work)?;
        if overlay.at.is_empty() {
            attach(&mounted, CWD, STAGE_ROOT)?;
            self.root = Some(mounted);
            return Ok(());
        }
        let place = self.place(overlay.at)?;
        attach_onto(&mounted, &place)
    }

    fn processes(&mut self) -> io::Result<()> {
        let flags = MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        let proc = mount("proc", &[], flags)?;
        // System V segments disappear with the last process that has them attached, like other shared memory. The
        // setting belongs to the ipc namespace, which is the sandbox's own by now.
        write_setting(&proc, "kernel/shm_rmid_forced", "1")?;
        attach_onto(&proc, &self.place("proc")?)?;
        let read_only = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let sys = open_tree(&proc, "sys", read_only)?;
        sys::set_mount_attributes(sys.as_fd(), libc::MOUNT_ATTR_RDONLY, None, false)?;
        attach_onto(&sys, &proc_place(&proc, "sys", OFlags::DIRECTORY)?)?;
        for (names, kind) in
            [(&COVERED_FILES[..], OFlags::empty()), (&COVERED_DIRECTORIES[..], OFlags::DIRECTORY)]
        {
            for name in names {
                let place = match proc_place(&proc, name, kind) {
                    Ok(place) => place,
                    // Which of these exist depends on the kernel's configuration.
                    Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                    Err(e) => return Err(e),
                };
                let cover = if kind.is_empty() { STAGE_EMPTY_FILE } else { STAGE_EMPTY_DIRECTORY };
                attach_onto(&cut_out(CWD, cover, false)?, &place)?;
            }
        }
        Ok(())
    }

    /// Covers files of `/proc` with ones that show the limits, and keeps init and its commands on as many processors.
    fn show_limits(&mut self, cpu_millis: u32, memory_bytes: u64) -> io::Result<()> {
        let turn = self.materials.base / IDS;
        let cpus = shown::processors(cpu_millis, turn);
        if let Some(cpus) = &cpus {
            shown::run_on(cpus)?;
        }
        let flags = MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        let files = mount("tmpfs", &[("mode", "0755"), ("size", SHOWN_BYTES)], flags)?;
        let named = shown::files(memory_bytes, cpus.as_deref());
        for (name, text) in &named {
            let create = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
            let mut file = File::from(openat(&files, *name, create, Mode::from_raw_mode(0o444))?);
            file.write_all(text.as_bytes())?;
        }
        sys::set_mount_attributes(files.as_fd(), libc::MOUNT_ATTR_RDONLY, None, false)?;
        // Only what is attached can be cut out. Nothing else uses this place from here on, and it goes with the old root.
        attach(&files, CWD, STAGE_EMPTY_DIRECTORY)?;
        let proc = self.place("proc")?;
        for (name, _) in &named {
            let place = proc_place(&proc, name, OFlags::empty())?;
            attach_onto(&cut_out(CWD, &format!("{STAGE_EMPTY_DIRECTORY}/{name}"), false)?, &place)?;
        }
        Ok(())
    }

    fn execute(&mut self) -> io::Result<()> {
        let materials = &self.materials;
        // The originals may have the very numbers that are assigned here.
        let keep = |fd: BorrowedFd<'_>| sys::duplicate_above(fd, OOM_SCORE + 1);
        let (listener, cgroup) = (keep(materials.listener.as_fd())?, keep(materials.cgroup.as_fd())?);
        let oom_score =
            self.oom_score.as_ref().ok_or_else(|| io::Error::other("the OOM score is not set yet"))?;
        let oom_score = keep(oom_score.as_fd())?;
        let init = keep(materials.init)?;
        let null =
            openat(CWD, "/dev/null", OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let null = keep(null.as_fd())?;
        for standard in 0..=2 {
            sys::inherit_as(null.as_fd(), standard)?;
        }
        sys::inherit_as(listener.as_fd(), LISTENER)?;
        sys::inherit_as(cgroup.as_fd(), CGROUP)?;
        sys::inherit_as(oom_score.as_fd(), OOM_SCORE)?;
        sys::close_on_exec_from(OOM_SCORE + 1)?;
        sys::reset_signals();
        const ARGUMENTS: [&CStr; 1] = [c"shoal-init"];
        Err(sys::execute(init.as_fd(), &ARGUMENTS, &[]))
    }

    /// A directory in the new root, created with its parents if missing, as the guest's root would create them. It
    /// may be in a volume that was mounted before. No link is followed.
    fn place_for_guest(&self, path: &str) -> io::Result<OwnedFd> {
        let (root, base) = (self.root()?.as_fd(), self.materials.base);
        let mut at = open_place(root, ".")?;
        for name in path.split('/').filter(|name| !name.is_empty()) {
            let next = match open_place(at.as_fd(), name) {
                Err(Errno::NOENT) => {
                    with_file_ids(base, || Ok(mkdirat(&at, name, Mode::from_raw_mode(0o755))?))?;
                    open_place(at.as_fd(), name)
                }
                other => other,
            };
            at = next.map_err(|errno| match errno {
                Errno::LOOP | Errno::NOTDIR => {
                    io::Error::other(format!("`{name}` is a link, or no directory"))
                }
                errno => errno.into(),
            })?;
        }
        Ok(at)
    }

    fn root(&self) -> io::Result<&OwnedFd> {
        self.root.as_ref().ok_or_else(|| io::Error::other("the root overlay is not mounted yet"))
    }

    fn tree(&self, tree: Tree) -> io::Result<&OwnedFd> {
        self.materials.trees.get(&tree).ok_or_else(|| io::Error::other(format!("{tree:?} was not prepared")))
    }

    /// A directory in the new root, created if missing. No link of the guest is followed.
    fn place(&self, path: &str) -> io::Result<OwnedFd> {
        let root = self.root()?.as_fd();
        match open_place(root, path) {
            Err(Errno::NOENT) => {
                match mkdirat(root, path, Mode::from_raw_mode(0o755)) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(e) => return Err(e.into()),
                }
                Ok(open_place(root, path)?)
            }
            other => Ok(other?),
        }
    }
}

/// Gives this process, and the init that it becomes, its place in the order of OOM victims. Returns the open file.
fn order_victims() -> io::Result<OwnedFd> {
    let file = openat(CWD, "/proc/self/oom_score_adj", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    match rustix::io::write(&file, INIT_OOM_SCORE.to_string().as_bytes()) {
        Ok(_) => return Ok(file),
        // Without CAP_SYS_RESOURCE, root may not go below the score that a process with it once set: the current
        // score stays, if there is room for commands above it.
        Err(Errno::ACCESS) => {}
        Err(e) => return Err(e.into()),
    }
    let mut text = [0; OOM_SCORE_TEXT_MAX];
    let length = rustix::io::pread(&file, &mut text, 0)?;
    let own: i32 = std::str::from_utf8(&text[..length])
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "oom_score_adj does not hold a number"))?;
    if own >= OOM_SCORE_MAX {
        return Err(io::Error::other(format!(
            "the daemon has oom_score_adj {own} and no right to lower it; start it with a lower score or with CAP_SYS_RESOURCE"
        )));
    }
    Ok(file)
}

/// Runs `work` with the file system ids of the guest's root and the capabilities of the host's root.
fn with_file_ids<T>(base: u32, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    // Changing the ids drops capabilities; those are restored.
    let before = capabilities(None)?;
    sys::set_file_ids(base, base);
    let result = set_capabilities(None, CapabilitySets { effective: before.permitted, ..before })
        .map_err(io::Error::from)
        .and_then(|()| work());
    sys::set_file_ids(0, 0);
    set_capabilities(None, before)?;
    result
}

fn open_place(root: BorrowedFd<'_>, path: &str) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    openat2(root, path, flags, Mode::empty(), resolve)
}

/// Opens a file or directory in a fresh procfs, and checks its kind.
fn proc_place(proc: &OwnedFd, name: &str, kind: OFlags) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC | kind;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    Ok(openat2(proc, name, flags, Mode::empty(), resolve)?)
}

/// Drops all capabilities but these for good, and sets no_new_privs.
pub fn drop_privileges(kept: CapabilitySet) -> io::Result<()> {
    bound_capabilities(kept)?;
    keep_capabilities(kept)
}

/// No program that is executed from now on gets other capabilities than these. Needs CAP_SETPCAP.
pub(super) fn bound_capabilities(kept: CapabilitySet) -> io::Result<()> {
    for capability in CapabilitySet::all().iter().filter(|c| !kept.contains(*c)) {
        match remove_capability_from_bounding_set(capability) {
            // The kernel may not know the newest ones.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Keeps these of the capabilities that this process has, and sets no_new_privs.
pub(super) fn keep_capabilities(kept: CapabilitySet) -> io::Result<()> {
    clear_ambient_capability_set()?;
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets)?;
    Ok(set_no_new_privs(true)?)
}

/// An unattached overlay for guests with ids from `base` up.
pub(crate) fn mount_overlay(base: u32, lower: &str, upper: &str, work: &str) -> io::Result<OwnedFd> {
    // The overlay later works with the mounter's own file ids, so these must exist in the writable layer. Changing
    // them drops capabilities that copying files up needs; those are restored.
    let before = capabilities(None)?;
    sys::set_file_ids(base, base);
    set_capabilities(None, CapabilitySets { effective: before.permitted, ..before })?;
    // Without `volatile`, unmounting would sync the whole file system below. In exchange, fsync does nothing.
    let options = [("upperdir", upper), ("workdir", work), ("redirect_dir", "on")];
    let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    set_lower_layers(&context, lower)?;
    for (key, value) in options {
        fsconfig_set_string(&context, key, value)?;
    }
    fsconfig_set_flag(&context, "volatile")?;
    fsconfig_create(&context)?;
    let mounted = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_NODEV)?;
    sys::set_file_ids(0, 0);
    set_capabilities(None, before)?;
    if fstatvfs(&mounted)?.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Err(Errno::ROFS.into());
    }
    Ok(mounted)
}

/// Changes a kernel setting through an open `/proc`.
pub(crate) fn write_setting(proc: &OwnedFd, name: &str, value: &str) -> io::Result<()> {
    let file = openat(
        proc,
        format!("sys/{name}"),
        OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let written = rustix::io::write(&file, value.as_bytes())?;
    if written == value.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}
