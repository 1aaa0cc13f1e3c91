//! What one installation has on the machine, read from the kernel and not from Shoal.
//!
//! Looks only at what belongs to one data directory, so that tests run side by side. It can also remove what it
//! finds, after a test that failed half way.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal, kill_process};

use crate::wait::until_true;

/// Where id ranges are claimed; claims are host-wide, so that installations never share a range.
const CLAIMS: &str = "/run/shoal";

/// One installation, identified by names on the machine.
#[derive(Debug, Clone)]
pub struct Scope {
    /// Its id, once it has one.
    pub installation: Option<String>,
    /// Its data directory.
    pub data_dir: PathBuf,
}

/// What was found, one sorted line each, so that two audits can be compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Audit(pub BTreeSet<String>);

impl Audit {
    /// Runs an audit.
    pub fn of(scope: &Scope) -> Self {
        let mut found = BTreeSet::new();
        // Like the launcher, egress belongs to the installation and not to a sandbox: it stays until the daemon ends.
        let (egress, groups): (Vec<PathBuf>, Vec<PathBuf>) =
            scope.cgroups().into_iter().partition(|directory| directory.ends_with("egress"));
        let of_egress: BTreeSet<i32> = egress.iter().flat_map(|group| members(group)).collect();
        for directory in groups {
            found.insert(format!("cgroup {}", directory.display()));
        }
        for process in scope.processes().into_iter().filter(|process| !of_egress.contains(process)) {
            let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
            found.insert(format!("process {process} {}", name.trim()));
        }
        for mount in scope.mounts() {
            found.insert(format!("mount {}", mount.display()));
        }
        for directory in ["sandboxes", "run"] {
            for entry in entries(&scope.data_dir.join(directory)) {
                found.insert(format!("file {}", entry.display()));
            }
        }
        for device in scope.loops() {
            found.insert(format!("loop device {}", device.display()));
        }
        for claim in scope.claims() {
            found.insert(format!("claim {}", claim.display()));
        }
        Self(found)
    }

    /// What is here now and was not in `before`.
    pub fn beyond(&self, before: &Self) -> Vec<String> {
        self.0.difference(&before.0).cloned().collect()
    }
}

impl Scope {
    /// What a process can hold without a name: descriptors by kind, over all our processes outside sandboxes. Leaked
    /// namespaces and sockets show here.
    pub fn descriptors(&self) -> usize {
        self.processes()
            .iter()
            .filter(|process| !self.is_inside(**process))
            .map(|process| entries(Path::new(&format!("/proc/{process}/fd"))).len())
            .sum()
    }

    /// Network namespaces that our processes are in or hold, except the machine's own.
    pub fn network_namespaces(&self) -> BTreeSet<String> {
        let own = fs::read_link("/proc/self/ns/net").expect("a process has a network namespace");
        let mut found = BTreeSet::new();
        for process in self.processes() {
            let mut links = entries(Path::new(&format!("/proc/{process}/fd")));
            links.push(format!("/proc/{process}/ns/net").into());
            for link in links {
                if let Ok(target) = fs::read_link(link)
                    && target != own
                    && target.to_string_lossy().starts_with("net:[")
                {
                    found.insert(target.to_string_lossy().into_owned());
                }
            }
        }
        found
    }

    /// Every cgroup directory with the installation's name, in every hierarchy, deepest first.
    pub fn cgroups(&self) -> Vec<PathBuf> {
        let Some(installation) = &self.installation else { return Vec::new() };
        let mut found = Vec::new();
        for hierarchy in hierarchies() {
            find_cgroups(&hierarchy, installation, &mut found);
        }
        found.sort_by_key(|path| std::cmp::Reverse(path.components().count()));
        found
    }

    /// Processes in those groups, and others that were started on the data directory or hold it.
    pub fn processes(&self) -> BTreeSet<i32> {
        let mut found: BTreeSet<i32> = self.cgroups().iter().flat_map(|group| members(group)).collect();
        let data_dir = self.data_dir.to_string_lossy();
        for entry in entries(Path::new("/proc")) {
            let Some(process) =
                entry.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok())
            else {
                continue;
            };
            if process == std::process::id() as i32 || found.contains(&process) {
                continue;
            }
            let says = |file: &str| {
                fs::read(entry.join(file))
                    .is_ok_and(|bytes| String::from_utf8_lossy(&bytes).contains(data_dir.as_ref()))
            };
            let leads = |link: &Path| {
                fs::read_link(link)
                    .is_ok_and(|target| target.to_string_lossy().starts_with(data_dir.as_ref()))
            };
            let holds = || entries(&entry.join("fd")).iter().any(|link| leads(link));
            if leads(&entry.join("cwd")) || leads(&entry.join("root")) || says("cmdline") || holds() {
                found.insert(process);
            }
        }
        found
    }

    /// Loop devices on a file of the data directory.
    pub fn loops(&self) -> Vec<PathBuf> {
        let data_dir = self.data_dir.to_string_lossy();
        let behind = |device: &PathBuf| fs::read_to_string(device.join("loop/backing_file"));
        let ours = |device: &PathBuf| behind(device).is_ok_and(|file| file.starts_with(data_dir.as_ref()));
        entries(Path::new("/sys/block")).into_iter().filter(ours).collect()
    }

    /// Processes inside sandboxes, found by their cgroups.
    pub fn inside(&self) -> BTreeSet<i32> {
        self.processes().into_iter().filter(|process| self.is_inside(*process)).collect()
    }

    fn is_inside(&self, process: i32) -> bool {
        let own = fs::metadata("/proc/self/ns/pid").map(|meta| meta.ino()).ok();
        let theirs = fs::metadata(format!("/proc/{process}/ns/pid")).map(|meta| meta.ino()).ok();
        theirs.is_some() && own != theirs
    }

    /// Mount points that mention the data directory or the installation, seen from here and from our processes
    /// outside sandboxes: the launcher has its own mount namespace.
    pub fn mounts(&self) -> Vec<PathBuf> {
        let mut tables = vec![PathBuf::from("/proc/self/mountinfo")];
        let outside = self.processes().into_iter().filter(|process| !self.is_inside(*process));
        tables.extend(outside.map(|process| format!("/proc/{process}/mountinfo").into()));
        let mut found = Vec::new();
        for table in tables {
            for mount in self.mounts_in(&table) {
                if !found.contains(&mount) {
                    found.push(mount);
                }
            }
        }
        found
    }

    fn mounts_in(&self, table: &Path) -> Vec<PathBuf> {
        let data_dir = self.data_dir.to_string_lossy();
        let ours = |line: &str| {
            line.contains(data_dir.as_ref())
                || self.installation.as_ref().is_some_and(|id| line.contains(id.as_str()))
        };
        // A process may end before it is read.
        let table = fs::read_to_string(table).unwrap_or_default();
        table
            .lines()
            .filter(|line| ours(line))
            .filter_map(|line| line.split(' ').nth(4).map(PathBuf::from))
            .collect()
    }

    /// Files under `/run/shoal` with the installation's id in name, content or link.
    pub fn claims(&self) -> Vec<PathBuf> {
        let Some(installation) = &self.installation else { return Vec::new() };
        let mut found = Vec::new();
        let mut open = vec![PathBuf::from(CLAIMS)];
        while let Some(directory) = open.pop() {
            for entry in entries(&directory) {
                let name =
                    entry.file_name().is_some_and(|name| name.to_string_lossy().contains(installation));
                let link = fs::read_link(&entry).is_ok_and(|to| to.to_string_lossy().contains(installation));
                let kind = fs::symlink_metadata(&entry).map(|meta| meta.file_type());
                let text = kind.as_ref().is_ok_and(|kind| kind.is_file())
                    && fs::read(&entry)
                        .is_ok_and(|bytes| String::from_utf8_lossy(&bytes).contains(installation));
                if name || link || text {
                    found.push(entry);
                } else if kind.is_ok_and(|kind| kind.is_dir()) {
                    open.push(entry);
                }
            }
        }
        found
    }

    /// Ends and removes everything, in any state.
    pub fn remove(&self) {
        for group in self.cgroups() {
            // Exists in the v2 tree; kills even what forks faster than signals arrive.
            let _ = fs::write(group.join("cgroup.kill"), "1");
        }
        until_true("every process of the installation is gone", || {
            // Read again each time: a killed process may have forked a moment before.
            let living: Vec<i32> =
                self.processes().into_iter().filter(|process| !is_dead(*process)).collect();
            for process in &living {
                if let Some(pid) = Pid::from_raw(*process) {
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
            living.is_empty()
        });
        until_true("every cgroup of the installation is gone", || {
            let groups = self.cgroups();
            groups.iter().filter(|group| fs::remove_dir(group).is_err()).count() == 0
        });
        // The last mounted goes first.
        for mount in self.mounts_in(Path::new("/proc/self/mountinfo")).iter().rev() {
            let _ = rustix::mount::unmount(mount, rustix::mount::UnmountFlags::DETACH);
        }
        for claim in self.claims() {
            let _ = fs::remove_file(&claim).or_else(|_| fs::remove_dir_all(&claim));
        }
    }
}

/// Whether a process has ended, reaped or not.
pub fn is_dead(process: i32) -> bool {
    let Ok(status) = fs::read_to_string(format!("/proc/{process}/stat")) else { return true };
    status.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['Z', 'X']))
}

/// The processes in one cgroup.
pub fn members(group: &Path) -> Vec<i32> {
    let list = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    list.lines().filter_map(|line| line.parse().ok()).collect()
}

/// The mount points of every cgroup hierarchy, old and new.
fn hierarchies() -> Vec<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("a process can read its mounts");
    table
        .lines()
        .filter(|line| line.contains(" - cgroup ") || line.contains(" - cgroup2 "))
        .filter_map(|line| line.split(' ').nth(4).map(PathBuf::from))
        .collect()
}

fn find_cgroups(directory: &Path, installation: &str, found: &mut Vec<PathBuf>) {
    for entry in entries(directory) {
        if fs::symlink_metadata(&entry).is_ok_and(|meta| meta.is_dir()) {
            if entry.to_string_lossy().contains(installation) {
                found.push(entry.clone());
            }
            find_cgroups(&entry, installation, found);
        }
    }
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    fs::read_dir(directory)
        .map(|list| list.filter_map(|entry| Some(entry.ok()?.path())).collect())
        .unwrap_or_default()
}
