//! Control groups: they limit a sandbox, and end all of its processes at once.
//!
//! ```text
//! v2    <mount>/shoal-<installation>/<sandbox>/           kill, freeze, and the limits where v2 carries them
//!                                              c<handle>/ one per command, made by init
//! v1    <cpu, memory, pids mount>/shoal-<installation>/<sandbox>/   the limits on machines that still use v1 for them
//! ```
//!
//! The launcher finds out once, at its start, which hierarchy has which controller. A limit that no hierarchy can
//! enforce is an error. v2 is always needed: only `cgroup.kill` ends a tree that forks.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, Dir, Gid, Mode, OFlags, Uid, chownat, mkdirat, openat, unlinkat};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use wire::guest::Handle;
use wire::launch::{Limits, Motion};
use wire::{InstallationId, SandboxId};

use crate::backend::Usage;

/// Groups that init may create below its own; more than the commands it can have, so that init reaches its own limit
/// first.
const DESCENDANTS_MAX: u32 = 2 * wire::guest::COMMANDS_MAX as u32;
/// Command groups are direct children.
const DEPTH_MAX: u32 = 1;
/// The group of the installation's egress process. No sandbox's id looks like it.
const EGRESS: &str = "egress";
/// The period over which cpu time is distributed, the kernel's default.
const CPU_PERIOD_US: u64 = 100_000;
/// How long killed processes may take to disappear. The kernel needs well below a millisecond each; a machine that
/// swaps needs longer.
const KILL_DEADLINE: Duration = Duration::from_secs(20);
/// How long processes may take to freeze. A process that waits for a disk freezes when that has answered.
const FREEZE_DEADLINE: Duration = Duration::from_secs(5);
/// Interval between two reads of a group's state.
const EVENT_LOOK: Duration = Duration::from_micros(300);
/// Longer than any file that is read here; the longest is `memory.stat`, with about 2 KiB.
const FILE_MAX: usize = 16 * 1024;
/// The percentage of the machine's process ids that all sandboxes of an installation together may use.
const PIDS_SHARE_PERCENT: u64 = 80;

/// The fraction of the machine's memory that all sandboxes of an installation together leave to the host: for the
/// daemon, for the kernel and for the operator's shell.
const MEMORY_RESERVE_PART: u64 = 16;
/// The least of it, for a small machine.
const MEMORY_RESERVE_MIN: u64 = 512 << 20;

/// The controllers that enforce limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Controller {
    /// Processor time.
    Cpu,
    /// Memory with page cache and tmpfs.
    Memory,
    /// Processes and threads.
    Pids,
}

impl Controller {
    const ALL: [Self; 3] = [Self::Cpu, Self::Memory, Self::Pids];

    fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Memory => "memory",
            Self::Pids => "pids",
        }
    }
}

/// The groups of one installation.
pub struct Cgroups {
    v2: OwnedFd,
    /// The v1 hierarchies that have a controller which v2 does not.
    v1: Vec<(Controller, OwnedFd)>,
}

/// The groups of one sandbox.
pub struct SandboxGroups {
    /// Init is started in this one, and may create groups below it.
    pub v2: OwnedFd,
    /// Init joins these by writing `0` to each, which is much quicker than moving it from outside (0.09 ms against 6
    /// ms).
    pub v1_tasks: Vec<OwnedFd>,
}

/// One value for one file of a group.
type Setting = (&'static str, String);

/// What to write where v2 has the controller.
fn settings_v2(controller: Controller, limits: &Limits) -> Vec<Setting> {
    match controller {
        Controller::Cpu => vec![("cpu.max", format!("{} {CPU_PERIOD_US}", quota_us(limits)))],
        Controller::Memory => vec![
            ("memory.max", limits.memory_bytes.to_string()),
            // Swap would let a sandbox use more than its limit, and slow its neighbours.
            ("memory.swap.max", "0".into()),
        ],
        Controller::Pids => vec![("pids.max", limits.pids.to_string())],
    }
}

/// What to write where v1 has the controller.
fn settings_v1(controller: Controller, limits: &Limits) -> Vec<Setting> {
    match controller {
        Controller::Cpu => vec![("cpu.cfs_quota_us", quota_us(limits).to_string())],
        Controller::Memory => vec![
            ("memory.limit_in_bytes", limits.memory_bytes.to_string()),
            // Memory and swap together; present only where the kernel accounts for swap.
            ("memory.memsw.limit_in_bytes", limits.memory_bytes.to_string()),
            // v1 counts socket buffers separately from other memory, and only in groups that limit them.
            ("memory.kmem.tcp.limit_in_bytes", limits.memory_bytes.to_string()),
        ],
        Controller::Pids => vec![("pids.max", limits.pids.to_string())],
    }
}

/// How much memory all sandboxes of an installation together may use on a machine with this much.
fn memory_of_all(machine: u64) -> u64 {
    let reserve = (machine / MEMORY_RESERVE_PART).max(MEMORY_RESERVE_MIN);
    // A machine too small for the reserve is shared evenly.
    machine.saturating_sub(reserve).max(machine / 2)
}

/// A number of bytes after a key in the text of `/proc/meminfo`.
pub fn memory_bytes(meminfo: &str, word: &str) -> io::Result<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(word)?.strip_prefix(':'));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| io::Error::other(format!("no {word} in /proc/meminfo")))
}

/// Files that a kernel without swap accounting does not have; then there is nothing to limit.
const MAY_BE_MISSING: [&str; 2] = ["memory.swap.max", "memory.memsw.limit_in_bytes"];

fn quota_us(limits: &Limits) -> u64 {
    // The kernel rejects quotas below a millisecond.
    (u64::from(limits.cpu_millis) * CPU_PERIOD_US / 1000).max(1000)
}

/// Where the hierarchies are mounted, from the text of `/proc/self/mountinfo`.
#[derive(Debug, PartialEq, Eq)]
struct Hierarchies {
    v2: String,
    v1: Vec<(Controller, String)>,
}

fn find_hierarchies(mountinfo: &str) -> Option<Hierarchies> {
    let mut v2 = None;
    let mut v1: Vec<(Controller, String)> = Vec::new();
    for line in mountinfo.lines() {
        let Some((mount, rest)) = line.split_once(" - ") else { continue };
        let mut rest = rest.split(' ');
        let (Some(kind), Some(_), Some(options)) = (rest.next(), rest.next(), rest.next()) else { continue };
        let Some(point) = mount.split(' ').nth(4) else { continue };
        match kind {
            "cgroup2" if v2.is_none() => v2 = Some(point.to_owned()),
            "cgroup" => {
                for controller in Controller::ALL {
                    let carries = options.split(',').any(|o| o == controller.name());
                    if carries && v1.iter().all(|(c, _)| *c != controller) {
                        v1.push((controller, point.to_owned()));
                    }
                }
            }
            _ => {}
        }
    }
    v2.map(|v2| Hierarchies { v2, v1 })
}

/// Where this machine has the controllers, for `doctor`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Where the v2 hierarchy is mounted.
    pub v2: Option<String>,
    /// Each controller and the mount point of the hierarchy that has it; `None` if none does.
    pub controllers: Vec<(&'static str, Option<String>)>,
}

impl Layout {
    /// From the text of `/proc/self/mountinfo`, and the controllers of the v2 hierarchy.
    pub fn read(mountinfo: &str, v2_controllers: impl Fn(&str) -> String) -> Self {
        let found = find_hierarchies(mountinfo);
        let on_v2 = found.as_ref().map(|found| v2_controllers(&found.v2)).unwrap_or_default();
        let place = |controller: Controller| {
            let found = found.as_ref()?;
            let on_v1 = found.v1.iter().find(|(c, _)| *c == controller).map(|(_, point)| point.clone());
            let has_v2 = on_v2.split_whitespace().any(|name| name == controller.name());
            on_v1.or_else(|| has_v2.then(|| found.v2.clone()))
        };
        Self {
            controllers: Controller::ALL.into_iter().map(|c| (c.name(), place(c))).collect(),
            v2: found.as_ref().map(|found| found.v2.clone()),
        }
    }
}

impl Cgroups {
    /// Opens or creates the groups of an installation.
    pub fn open(installation: InstallationId) -> io::Result<Self> {
        let mountinfo = std::fs::read_to_string("/proc/self/mountinfo")?;
        let missing = || io::Error::new(io::ErrorKind::Unsupported, "no cgroup v2 hierarchy is mounted");
        let found = find_hierarchies(&mountinfo).ok_or_else(missing)?;
        let name = format!("shoal-{installation}");

        let v2_root = open_dir(CWD, &found.v2)?;
        let on_v1 = |controller| found.v1.iter().any(|(c, _)| *c == controller);
        let on_v2: Vec<Controller> = Controller::ALL.into_iter().filter(|c| !on_v1(*c)).collect();
        make_dir(v2_root.as_fd(), &name)?;
        let v2 = open_dir(v2_root.as_fd(), &name)?;
        for controller in &on_v2 {
            let enable = format!("+{}", controller.name());
            for group in [&v2_root, &v2] {
                write_file(group.as_fd(), "cgroup.subtree_control", &enable).map_err(|e| {
                    let name = controller.name();
                    io::Error::new(e.kind(), format!("cgroup v2 cannot enable the controller `{name}`: {e}"))
                })?;
            }
        }
        let mut v1 = Vec::new();
        for (controller, point) in found.v1 {
            let root = open_dir(CWD, &point)?;
            make_dir(root.as_fd(), &name)?;
            v1.push((controller, open_dir(root.as_fd(), &name)?));
        }

        let cgroups = Self { v2, v1 };
        let pid_max = std::fs::read_to_string("/proc/sys/kernel/pid_max")?;
        let pid_max: u64 = pid_max.trim().parse().map_err(io::Error::other)?;
        let share = (pid_max * PIDS_SHARE_PERCENT / 100).to_string();
        write_file(cgroups.holder(Controller::Pids).as_fd(), "pids.max", &share)?;
        let machine = memory_bytes(&std::fs::read_to_string("/proc/meminfo")?, "MemTotal")?;
        let limit = memory_of_all(machine);
        let memory = cgroups.holder(Controller::Memory);
        let file = if std::ptr::eq(memory, &cgroups.v2) { "memory.max" } else { "memory.limit_in_bytes" };
        write_file(memory.as_fd(), file, &limit.to_string()).map_err(|e| {
            io::Error::new(e.kind(), format!("cannot limit all sandboxes to {limit} bytes of memory: {e}"))
        })?;
        Ok(cgroups)
    }

    /// Creates the groups of a sandbox and sets its limits. Init, which will have the host id `base`, may create
    /// groups below.
    pub fn make(&self, sandbox: SandboxId, base: u32, limits: &Limits) -> io::Result<SandboxGroups> {
        let name = sandbox.to_string();
        make_dir(self.v2.as_fd(), &name)?;
        let v2 = open_dir(self.v2.as_fd(), &name)?;
        write_file(v2.as_fd(), "cgroup.max.descendants", &DESCENDANTS_MAX.to_string())?;
        write_file(v2.as_fd(), "cgroup.max.depth", &DEPTH_MAX.to_string())?;
        let (uid, gid) = (Some(Uid::from_raw(base)), Some(Gid::from_raw(base)));
        chownat(&v2, "", uid, gid, AtFlags::EMPTY_PATH)?;
        // To start a command in a group of its own, init must own this file too.
        chownat(&v2, "cgroup.procs", uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;

        let mut v1_tasks = Vec::new();
        for controller in Controller::ALL {
            let Some((_, parent)) = self.v1.iter().find(|(c, _)| *c == controller) else {
                write_settings(&v2, settings_v2(controller, limits))?;
                continue;
            };
            make_dir(parent.as_fd(), &name)?;
            let group = open_dir(parent.as_fd(), &name)?;
            write_settings(&group, settings_v1(controller, limits))?;
            v1_tasks.push(openat(&group, "tasks", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?);
        }
        Ok(SandboxGroups { v2, v1_tasks })
    }

    /// Ends every process of a sandbox and removes its groups. No effect if there are none.
    pub fn remove(&self, sandbox: SandboxId) -> io::Result<()> {
        let name = sandbox.to_string();
        if let Some(group) = found(open_dir(self.v2.as_fd(), &name))? {
            let deadline = Instant::now() + KILL_DEADLINE;
            // Init is the first process of its pid namespace: when init is gone, so are all others in there. Watching
            // init is quicker than watching the group, whose changes the kernel reports at most every 10 ms.
            let inits = processes(&group)?;
            // `cgroup.kill` rather than a signal for each pid: a process that forks can outrun signals, but not its
            // group (Linux 5.14).
            write_file(group.as_fd(), "cgroup.kill", "1")?;
            for init in &inits {
                wait_for(&PollFd::new(init, PollFlags::IN), deadline)?;
            }
            wait_for_event(&group, says_unpopulated, deadline)?;
            for child in children(&group)? {
                remove_dir(group.as_fd(), &child, deadline)?;
            }
            remove_dir(self.v2.as_fd(), &name, deadline)?;
        }
        let deadline = Instant::now() + KILL_DEADLINE;
        for (_, parent) in &self.v1 {
            remove_dir(parent.as_fd(), &name, deadline)?;
        }
        Ok(())
    }

    /// The group of the egress process, made if it is missing.
    pub fn egress(&self) -> io::Result<OwnedFd> {
        make_dir(self.v2.as_fd(), EGRESS)?;
        open_dir(self.v2.as_fd(), EGRESS)
    }

    /// The egress processes.
    pub fn egress_processes(&self) -> io::Result<Vec<u32>> {
        self.processes_in(EGRESS)
    }

    /// Ends the egress process and removes its group. Harmless when there is none.
    pub fn end_egress(&self) -> io::Result<()> {
        end_group(self.v2.as_fd(), EGRESS)
    }

    /// Ends every process of one command. Its group stays: init, if it works, removes it.
    pub fn end_command(&self, sandbox: SandboxId, command: Handle) -> io::Result<()> {
        // The cgroup file system has no links, so a path in it cannot lead elsewhere.
        let path = format!("{sandbox}/{}", command.group_name());
        let Some(group) = found(open_dir(self.v2.as_fd(), &path))? else { return Ok(()) };
        let ended = write_file(group.as_fd(), "cgroup.kill", "1")
            .and_then(|()| wait_for_event(&group, says_unpopulated, Instant::now() + KILL_DEADLINE));
        match ended {
            // Removed just now, because it was empty.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => Ok(()),
            other => other,
        }
    }

    /// Freezes or thaws every process of a sandbox. Returns when that is done.
    pub fn freeze(&self, sandbox: SandboxId, motion: Motion) -> io::Result<()> {
        let group = open_dir(self.v2.as_fd(), &sandbox.to_string())?;
        let (value, is_so): (&str, fn(&[u8]) -> bool) = match motion {
            Motion::Still => ("1", says_frozen),
            Motion::Going => ("0", |text| !says_frozen(text)),
        };
        write_file(group.as_fd(), "cgroup.freeze", value)?;
        wait_for_event(&group, is_so, Instant::now() + FREEZE_DEADLINE)
    }

    /// Removes the groups of the installation itself, once no sandbox is left.
    pub fn remove_installation(installation: InstallationId) -> io::Result<()> {
        let mountinfo = std::fs::read_to_string("/proc/self/mountinfo")?;
        let Some(found) = find_hierarchies(&mountinfo) else { return Ok(()) };
        let name = format!("shoal-{installation}");
        let deadline = Instant::now() + KILL_DEADLINE;
        for point in found.v1.iter().map(|(_, point)| point).chain([&found.v2]) {
            let root = open_dir(CWD, point)?;
            if *point == found.v2
                && let Some(group) = self::found(open_dir(root.as_fd(), &name))?
            {
                end_group(group.as_fd(), EGRESS)?;
            }
            remove_dir(root.as_fd(), &name, deadline)?;
        }
        Ok(())
    }

    /// Sandboxes that have groups, each with whether a process is in them.
    pub fn list(&self) -> io::Result<Vec<(SandboxId, bool)>> {
        let mut list: Vec<(SandboxId, bool)> = Vec::new();
        for name in children(&self.v2)? {
            let Ok(id) = name.parse::<SandboxId>() else { continue };
            let Some(group) = found(open_dir(self.v2.as_fd(), &name))? else { continue };
            match is_populated(&group) {
                Ok(populated) => list.push((id, populated)),
                // Removed just now.
                Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => {}
                Err(e) => return Err(e),
            }
        }
        for (_, parent) in &self.v1 {
            for name in children(parent)? {
                if let Ok(id) = name.parse()
                    && list.iter().all(|(known, _)| *known != id)
                {
                    list.push((id, false));
                }
            }
        }
        Ok(list)
    }

    /// The processes directly in a sandbox's group, which is its init alone. None if there is no such group.
    pub fn processes(&self, sandbox: SandboxId) -> io::Result<Vec<u32>> {
        self.processes_in(&sandbox.to_string())
    }

    /// The processes of a sandbox, those of its commands included, `most` of them.
    pub fn all_processes(&self, sandbox: SandboxId, most: usize) -> io::Result<Vec<u32>> {
        let name = sandbox.to_string();
        let mut all = self.processes_in(&name)?;
        let Some(group) = found(open_dir(self.v2.as_fd(), &name))? else { return Ok(all) };
        for child in children(&group)? {
            if all.len() >= most {
                break;
            }
            all.extend(self.processes_in(&format!("{name}/{child}"))?);
        }
        all.truncate(most);
        Ok(all)
    }

    fn processes_in(&self, path: &str) -> io::Result<Vec<u32>> {
        let read = open_dir(self.v2.as_fd(), path).and_then(|group| read_file(&group, "cgroup.procs"));
        match read {
            Ok(text) => Ok(text.lines().filter_map(|line| line.parse().ok()).collect()),
            // Removed just now.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => Ok(Vec::new()),
            Err(e) => Err(e),
        }
    }

    /// Opens the existing groups of an installation for reading, which needs no privilege.
    pub fn look(installation: InstallationId) -> io::Result<Self> {
        let mountinfo = std::fs::read_to_string("/proc/self/mountinfo")?;
        let missing = || io::Error::new(io::ErrorKind::Unsupported, "no cgroup v2 hierarchy is mounted");
        let found = find_hierarchies(&mountinfo).ok_or_else(missing)?;
        let open = |point: &str| open_dir(CWD, &format!("{point}/shoal-{installation}"));
        let v1 = found.v1.iter().map(|(controller, point)| Ok((*controller, open(point)?)));
        Ok(Self { v2: open(&found.v2)?, v1: v1.collect::<io::Result<_>>()? })
    }

    /// Usage of a sandbox. `None` if it has no groups.
    pub fn usage(&self, sandbox: SandboxId) -> io::Result<Option<Usage>> {
        self.usage_in(&sandbox.to_string())
    }

    /// Usage of all sandboxes together.
    pub fn usage_of_all(&self) -> io::Result<Usage> {
        Ok(self.usage_in(".")?.unwrap_or_default())
    }

    fn usage_in(&self, name: &str) -> io::Result<Option<Usage>> {
        match self.read_usage(name) {
            Ok(usage) => Ok(Some(usage)),
            // Removed just now: the directory, or the group behind its files.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn read_usage(&self, name: &str) -> io::Result<Usage> {
        let v2 = open_dir(self.v2.as_fd(), name)?;
        // v2 counts processor time for every group, even where v1 has the controller.
        let cpu_time = Duration::from_micros(number_in(&read_file(&v2, "cpu.stat")?, "usage_usec")?);
        let groups = Controller::ALL.map(|controller| {
            let holder = self.holder(controller);
            let is_v2 = std::ptr::eq(holder, &self.v2);
            open_dir(holder.as_fd(), name).map(|group| (group, is_v2))
        });
        let [(cpu, cpu_v2), (memory, memory_v2), (pids, _)] = match groups {
            [Ok(cpu), Ok(memory), Ok(pids)] => [cpu, memory, pids],
            [Err(e), ..] | [_, Err(e), _] | [.., Err(e)] => return Err(e),
        };
        let throttled = read_file(&cpu, "cpu.stat")?;
        let throttled_time = match cpu_v2 {
            true => Duration::from_micros(number_in(&throttled, "throttled_usec")?),
            false => Duration::from_nanos(number_in(&throttled, "throttled_time")?),
        };
        let (current, inactive) = match memory_v2 {
            true => ("memory.current", "inactive_file"),
            false => ("memory.usage_in_bytes", "total_inactive_file"),
        };
        let memory_bytes = number(&read_file(&memory, current)?)?;
        let inactive = number_in(&read_file(&memory, "memory.stat")?, inactive)?;
        let pids = number(&read_file(&pids, "pids.current")?)?;
        Ok(Usage {
            cpu_time,
            throttled_time,
            memory_bytes,
            // The two are read one after the other.
            memory_reclaimable_bytes: inactive.min(memory_bytes),
            pids: u32::try_from(pids).unwrap_or(u32::MAX),
        })
    }

    /// The hierarchy that has a controller.
    fn holder(&self, controller: Controller) -> &OwnedFd {
        self.v1.iter().find(|(c, _)| *c == controller).map_or(&self.v2, |(_, group)| group)
    }
}

/// Reads how often the kernel killed a process because memory ran out. Needs no privilege, so the daemon does it
/// itself: it is read before every command, and a walker would cost more than the command.
pub struct OomKills {
    /// The installation's group with the memory controller.
    groups: OwnedFd,
    file: &'static str,
    /// Open files of recently used sandboxes: opening one takes longer than reading it.
    open: Mutex<HashMap<SandboxId, OwnedFd>>,
}

impl OomKills {
    /// Most files to keep open. Beyond this all are closed, and those in use are soon opened again.
    const OPEN_MAX: usize = 256;

    /// Finds the groups of an installation, which the launcher has created.
    pub fn open(installation: InstallationId) -> io::Result<Self> {
        let mountinfo = std::fs::read_to_string("/proc/self/mountinfo")?;
        let missing = || io::Error::new(io::ErrorKind::Unsupported, "no cgroup v2 hierarchy is mounted");
        let found = find_hierarchies(&mountinfo).ok_or_else(missing)?;
        let on_v1 = found.v1.iter().find(|(controller, _)| *controller == Controller::Memory);
        let (point, file) = match on_v1 {
            Some((_, point)) => (point, "memory.oom_control"),
            None => (&found.v2, "memory.events"),
        };
        let root = open_dir(CWD, point)?;
        Ok(Self {
            groups: open_dir(root.as_fd(), &format!("shoal-{installation}"))?,
            file,
            open: Mutex::default(),
        })
    }

    /// Number of processes of the sandbox that were killed since it was created.
    pub fn of(&self, sandbox: SandboxId) -> io::Result<u64> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if !open.contains_key(&sandbox) && open.len() >= Self::OPEN_MAX {
            open.clear();
        }
        let file = match open.entry(sandbox) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                let name = format!("{sandbox}/{}", self.file);
                place.insert(openat(&self.groups, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
            }
        };
        let mut text = [0; 1024];
        let length = match rustix::io::pread(&*file, &mut text, 0) {
            Ok(length) => length,
            Err(error) => {
                // That group is gone. If there is another under its name, the next call finds it.
                open.remove(&sandbox);
                return Err(error.into());
            }
        };
        let line =
            text[..length].split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"oom_kill "));
        line.and_then(|number| std::str::from_utf8(number).ok()?.trim().parse().ok())
            .ok_or_else(|| io::Error::other(format!("no oom_kill in {}", self.file)))
    }

    /// A sandbox is about to be removed. Its id is never used again, so its open file is closed.
    pub fn forget(&self, sandbox: SandboxId) {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).remove(&sandbox);
    }
}

/// Ends every process of a group and removes it. Harmless when there is none.
fn end_group(parent: rustix::fd::BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let Some(group) = found(open_dir(parent, name))? else { return Ok(()) };
    let deadline = Instant::now() + KILL_DEADLINE;
    write_file(group.as_fd(), "cgroup.kill", "1")?;
    wait_for_event(&group, says_unpopulated, deadline)?;
    remove_dir(parent, name, deadline)
}

fn write_settings(group: &OwnedFd, settings: Vec<Setting>) -> io::Result<()> {
    for (file, value) in settings {
        match write_file(group.as_fd(), file, &value) {
            Err(e) if e.kind() == io::ErrorKind::NotFound && MAY_BE_MISSING.contains(&file) => {}
            other => other.map_err(|e| io::Error::new(e.kind(), format!("{file} = {value}: {e}")))?,
        }
    }
    Ok(())
}

/// Waits until `cgroup.events` shows the expected value. The kernel reports changes at most every 10 ms, so it is
/// also read at an interval.
fn wait_for_event(group: &OwnedFd, is_so: fn(&[u8]) -> bool, deadline: Instant) -> io::Result<()> {
    let events = openat(group, "cgroup.events", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    loop {
        // Read first: a change after the read wakes the poll.
        let mut text = [0; 256];
        let length = rustix::io::pread(&events, &mut text, 0)?;
        if is_so(&text[..length]) {
            return Ok(());
        }
        let soon = deadline.min(Instant::now() + EVENT_LOOK);
        match wait_for(&PollFd::new(&events, PollFlags::PRI), soon) {
            Err(e) if e.kind() == io::ErrorKind::TimedOut && Instant::now() < deadline => {}
            other => other?,
        }
    }
}

fn wait_for(what: &PollFd<'_>, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [what.clone()], Some(&timeout)) {
            Ok(0) => {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "its processes did not reach the requested state in time",
                ));
            }
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Descriptors of the processes directly in a group.
fn processes(group: &OwnedFd) -> io::Result<Vec<OwnedFd>> {
    let text = read_file(group, "cgroup.procs")?;
    let pids = text.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?));
    // Processes that end while they are listed need not be waited for.
    Ok(pids.filter_map(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()).collect())
}

fn is_populated(group: &OwnedFd) -> io::Result<bool> {
    Ok(!says_unpopulated(read_file(group, "cgroup.events")?.as_bytes()))
}

fn says_frozen(events: &[u8]) -> bool {
    events.split(|byte| *byte == b'\n').any(|line| line == b"frozen 1")
}

fn says_unpopulated(events: &[u8]) -> bool {
    events.split(|b| *b == b'\n').any(|line| line == b"populated 0")
}

fn children(group: &OwnedFd) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(group)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy();
        if entry.file_type().is_dir() && name != "." && name != ".." {
            names.push(name.into_owned());
        }
    }
    Ok(names)
}

/// Removes an empty group. The kernel returns EBUSY for a moment after the last process has gone, so this retries.
fn remove_dir(parent: rustix::fd::BorrowedFd<'_>, name: &str, deadline: Instant) -> io::Result<()> {
    loop {
        match unlinkat(parent, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => return Ok(()),
            Err(Errno::BUSY) if Instant::now() < deadline => std::thread::sleep(Duration::from_micros(200)),
            Err(e) => return Err(e.into()),
        }
    }
}

fn make_dir(parent: rustix::fd::BorrowedFd<'_>, name: &str) -> io::Result<()> {
    match mkdirat(parent, name, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn open_dir(parent: rustix::fd::BorrowedFd<'_>, name: &str) -> io::Result<OwnedFd> {
    Ok(openat(parent, name, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

fn write_file(group: rustix::fd::BorrowedFd<'_>, name: &str, value: &str) -> io::Result<()> {
    let file = openat(group, name, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, value.as_bytes())?;
    Ok(())
}

/// A file with one number.
fn number(text: &str) -> io::Result<u64> {
    text.trim().parse().map_err(|_| io::Error::other(format!("expected a number, got {text:.64?}")))
}

/// A number in a file whose lines have a key and a number.
fn number_in(text: &str, word: &str) -> io::Result<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(word)?.strip_prefix(' '));
    number(line.ok_or_else(|| io::Error::other(format!("no `{word}`")))?)
}

fn read_file(group: &OwnedFd, name: &str) -> io::Result<String> {
    let file = openat(group, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut text = vec![0; FILE_MAX];
    let length = rustix::io::read(&file, text.as_mut_slice())?;
    text.truncate(length);
    String::from_utf8(text).map_err(io::Error::other)
}

/// `None` for what does not exist.
fn found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_memory_kills_are_read_anew_and_few_files_stay_open() {
        let home = tempfile::tempdir().expect("a directory");
        let groups = open_dir(CWD, home.path().to_str().expect("text")).expect("it opens");
        let kills = OomKills { groups, file: "memory.events", open: Mutex::default() };
        let tell = |sandbox: SandboxId, count: u64| {
            let group = home.path().join(sandbox.to_string());
            std::fs::create_dir_all(&group).expect("a directory");
            std::fs::write(group.join("memory.events"), format!("oom 9\noom_kill {count}\n"))
                .expect("a file");
        };
        for number in 0..OomKills::OPEN_MAX as u128 + 10 {
            let sandbox = SandboxId::from_random(number);
            assert!(kills.of(sandbox).is_err(), "there is no such group");
            tell(sandbox, 1);
            assert_eq!(kills.of(sandbox).expect("it is there"), 1);
            tell(sandbox, 2);
            assert_eq!(kills.of(sandbox).expect("it is there"), 2);
            assert!(kills.open.lock().expect("nobody panicked").len() <= OomKills::OPEN_MAX);
        }
        let last = SandboxId::from_random(OomKills::OPEN_MAX as u128 + 9);
        std::fs::remove_dir_all(home.path().join(last.to_string())).expect("it goes");
        kills.forget(last);
        assert!(kills.of(last).is_err());
    }

    const LIMITS: Limits = Limits { cpu_millis: 1500, memory_bytes: 512 << 20, pids: 256, disk_bytes: None };

    #[test]
    fn a_hybrid_machine_has_limits_on_v1_and_the_tree_on_v2() {
        let mountinfo = "\
            25 22 0:22 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n\
            26 22 0:23 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n\
            27 22 0:24 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n\
            28 22 0:25 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n\
            29 22 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let found = find_hierarchies(mountinfo).expect("there is a v2 tree");
        assert_eq!(found.v2, "/sys/fs/cgroup/unified");
        assert_eq!(
            found.v1,
            [
                (Controller::Cpu, "/sys/fs/cgroup/cpu,cpuacct".to_owned()),
                (Controller::Memory, "/sys/fs/cgroup/memory".to_owned()),
                (Controller::Pids, "/sys/fs/cgroup/pids".to_owned()),
            ]
        );
    }

    #[test]
    fn a_machine_with_v2_only_has_everything_there() {
        let mountinfo = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(
            find_hierarchies(mountinfo),
            Some(Hierarchies { v2: "/sys/fs/cgroup".into(), v1: vec![] })
        );
        assert_eq!(find_hierarchies("1 1 0:1 / / rw - ext4 /dev/sda rw\n"), None);
    }

    #[test]
    fn the_same_limits_are_said_in_the_words_of_each_version() {
        let v1: Vec<_> = Controller::ALL.iter().flat_map(|c| settings_v1(*c, &LIMITS)).collect();
        let v2: Vec<_> = Controller::ALL.iter().flat_map(|c| settings_v2(*c, &LIMITS)).collect();
        let text = |list: &[Setting]| {
            list.iter().map(|(file, value)| format!("{file}={value}")).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            text(&v1),
            "cpu.cfs_quota_us=150000 memory.limit_in_bytes=536870912 memory.memsw.limit_in_bytes=536870912 memory.kmem.tcp.limit_in_bytes=536870912 pids.max=256"
        );
        assert_eq!(text(&v2), "cpu.max=150000 100000 memory.max=536870912 memory.swap.max=0 pids.max=256");
    }

    #[test]
    fn all_sandboxes_together_leave_a_reserve_to_the_host() {
        const GIB: u64 = 1 << 30;
        assert_eq!(memory_of_all(64 * GIB), 60 * GIB);
        assert_eq!(memory_of_all(4 * GIB), 4 * GIB - MEMORY_RESERVE_MIN);
        assert_eq!(memory_of_all(GIB / 2), GIB / 4, "a small machine is shared evenly");
        let meminfo = "MemTotal:       24684100 kB\nMemFree:         3427720 kB\n";
        assert_eq!(memory_bytes(meminfo, "MemTotal").expect("it is there"), 24_684_100 * 1024);
        assert!(memory_bytes("MemFree: 1 kB\n", "MemTotal").is_err());
    }

    #[test]
    fn numbers_are_found_by_their_whole_word() {
        let stat = "usage_usec_total 9\nusage_usec 17\nuser_usec 12\n";
        assert_eq!(number_in(stat, "usage_usec").expect("it is there"), 17);
        assert!(number_in(stat, "usage").is_err());
        assert!(number_in("usage_usec max\n", "usage_usec").is_err());
        assert_eq!(number("42\n").expect("it is a number"), 42);
    }

    /// Groups made of plain files, as each version would show them.
    #[test]
    fn usage_reads_the_same_from_either_version() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let sandbox = SandboxId::from_random(7);
        let make = |hierarchy: &str, files: &[(&str, &str)]| {
            let group = dir.path().join(hierarchy).join(sandbox.to_string());
            std::fs::create_dir_all(&group).expect("it can be made");
            for (name, text) in files {
                std::fs::write(group.join(name), text).expect("it can be written");
            }
            open_dir(CWD, &dir.path().join(hierarchy).to_string_lossy()).expect("it opens")
        };
        let common = ("pids.current", "3\n");
        let v2 = make(
            "v2",
            &[
                ("cpu.stat", "usage_usec 1500000\nnr_throttled 1\nthrottled_usec 2500\n"),
                ("memory.current", "1000\n"),
                ("memory.stat", "anon 10\ninactive_file 400\n"),
                common,
            ],
        );
        let tree = make("unified", &[("cpu.stat", "usage_usec 1500000\nuser_usec 1\n")]);
        let cpu = make("cpu", &[("cpu.stat", "nr_periods 5\nthrottled_time 2500000\n")]);
        let memory = make(
            "memory",
            &[
                ("memory.usage_in_bytes", "1000\n"),
                ("memory.stat", "inactive_file 9\ntotal_inactive_file 400\n"),
            ],
        );
        let pids = make("pids", &[common]);
        let expected = Usage {
            cpu_time: Duration::from_millis(1500),
            throttled_time: Duration::from_micros(2500),
            memory_bytes: 1000,
            memory_reclaimable_bytes: 400,
            pids: 3,
        };
        let only_v2 = Cgroups { v2, v1: vec![] };
        assert_eq!(only_v2.usage(sandbox).expect("it is read"), Some(expected));
        let v1 = vec![(Controller::Cpu, cpu), (Controller::Memory, memory), (Controller::Pids, pids)];
        let hybrid = Cgroups { v2: tree, v1 };
        assert_eq!(hybrid.usage(sandbox).expect("it is read"), Some(expected));
        assert_eq!(hybrid.usage(SandboxId::from_random(8)).expect("there is none"), None);
    }

    #[test]
    fn a_tiny_cpu_share_is_still_one_the_kernel_takes() {
        assert_eq!(quota_us(&Limits { cpu_millis: 1, ..LIMITS }), 1000);
    }
}
