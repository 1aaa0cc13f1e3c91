//! The kernel, the privileges of this process, and the features that isolate sandboxes.

use std::fs;

use rustix::thread::UnshareFlags;

use super::finding::Finding;
use super::tries::{AS_ROOT, NEEDS_ROOT, in_child, number, probe_base};
use crate::ns::slots;
use crate::sys;

/// The first version with `cgroup.kill`.
const KERNEL_MIN: (u32, u32) = (5, 14);
/// Namespaces of one kind that the machine should allow.
const NAMESPACES_WANTED: u64 = 10_000;

pub(super) fn kernel() -> Finding {
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

pub(super) fn root() -> Finding {
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

pub(super) fn namespaces(tries: bool) -> Finding {
    const NAME: &str = "user_namespaces";
    if !tries {
        return Finding::unknown(NAME, NEEDS_ROOT, AS_ROOT);
    }
    match in_child(|| slots::user_namespace(probe_base()).map(drop).map_err(|error| error.source)) {
        Ok(()) => Finding::found(NAME, "ids can be mapped"),
        Err(error) => Finding::missing(
            NAME,
            format!("cannot be made: {error}"),
            "root of a sandbox would be root of the machine",
            "set `sysctl user.max_user_namespaces=100000`, and allow them in the container that Shoal runs in",
        ),
    }
}

pub(super) fn namespace_counts() -> Finding {
    const NAME: &str = "namespace_counts";
    let counts: Vec<(&str, u64)> = ["user", "net", "mnt", "pid"]
        .into_iter()
        .filter_map(|kind| Some((kind, number(&format!("/proc/sys/user/max_{kind}_namespaces"))?)))
        .collect();
    match counts.iter().min_by_key(|(_, count)| *count) {
        None => Finding::unknown(NAME, "the kernel does not say", ""),
        Some((kind, count)) if *count < NAMESPACES_WANTED => Finding::limited(
            NAME,
            format!("{count} of kind `{kind}`"),
            format!("no more than {count} sandboxes at once"),
            format!("set `sysctl user.max_{kind}_namespaces=100000`"),
        ),
        Some((_, count)) => Finding::found(NAME, format!("{count} of each kind")),
    }
}

pub(super) fn network(tries: bool) -> Finding {
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

pub(super) fn seccomp() -> Finding {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::{Verdict, check};

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
}
