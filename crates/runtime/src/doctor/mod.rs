//! Checks whether this machine has what Shoal needs: for each item whether it is there, what its absence costs, how to get it.
//!
//! Changes nothing. Where only an attempt shows the answer, a child process makes it and leaves nothing behind. This forks, so call
//! it while the process has one thread. The caller prints the findings and checks whether a daemon runs.

mod cgroups;
mod disk;
mod finding;
mod kernel;
mod network;
mod room;
mod tries;

use std::path::Path;

pub use finding::{Finding, Verdict};

/// Checks everything that a daemon with this data directory needs. The directory need not exist.
pub fn examine(data_dir: &Path) -> Vec<Finding> {
    let mut findings = vec![kernel::kernel(), kernel::root()];
    let tries = rustix::process::geteuid().is_root();
    findings.extend(cgroups::cgroups(tries));
    findings.push(kernel::namespaces(tries));
    findings.push(kernel::namespace_counts());
    findings.push(kernel::network(tries));
    findings.extend(network::network(tries));
    findings.push(kernel::seccomp());
    let storage = disk::Storage::of(data_dir);
    findings.push(storage.file_system());
    findings.push(storage.idmapped(tries));
    findings.push(storage.idmapped_usr(tries));
    findings.push(storage.overlay(tries));
    findings.extend(storage.space());
    findings.push(storage.store(data_dir));
    findings.push(room::descriptors());
    findings.push(room::process_ids());
    findings.push(room::id_ranges());
    findings.extend(room::host_programs());
    findings
}

/// Mounts of many kinds, as the kernel lists them.
#[cfg(test)]
const MIXED: &str = "\
25 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 25 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
31 25 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
32 25 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
40 25 0:30 / /mnt/with\\040space ro - xfs /dev/sdb rw
41 25 0:31 / /mnt rw - tmpfs tmpfs rw
42 25 0:32 / /mnt rw - btrfs /dev/sdc rw
";
