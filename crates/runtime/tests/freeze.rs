//! A sandbox stands still and goes on: the kernel's freezer, over every process in the sandbox's group. Needs root.

use std::fs;
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};

use shoal_runtime::ns::cgroup::Cgroups;
use wire::launch::{Limits, Motion};
use wire::{InstallationId, SandboxId};

/// A busy process in the group of a sandbox; both go at the end, also when the test fails.
struct Busy {
    groups: Cgroups,
    installation: InstallationId,
    sandbox: SandboxId,
    /// The group's directory.
    path: String,
    process: Child,
    _directory: std::os::fd::OwnedFd,
}

impl Busy {
    fn start() -> Self {
        let mut bits = [0; 24];
        getrandom::fill(&mut bits).expect("the kernel has random bits");
        let installation =
            InstallationId::from_random(u64::from_le_bytes(bits[..8].try_into().expect("8 bytes")));
        let sandbox = SandboxId::from_random(u128::from_le_bytes(bits[8..].try_into().expect("16 bytes")));
        let groups = Cgroups::open(installation).expect("cgroups can be made, and the test runs as root");
        let limits = Limits { cpu_millis: 1000, memory_bytes: 64 << 20, pids: 16, disk_bytes: None };
        let made = groups.make(sandbox, 1 << 30, &limits).expect("a group");
        let path = format!("/proc/self/fd/{}", made.v2.as_raw_fd());
        let process = Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .stdin(Stdio::null())
            .spawn()
            .expect("a shell starts");
        fs::write(format!("{path}/cgroup.procs"), process.id().to_string()).expect("it joins the group");
        Self { groups, installation, sandbox, path, process, _directory: made.v2 }
    }

    /// Processor time that the group has used.
    fn used(&self) -> u64 {
        let text = fs::read_to_string(format!("{}/cpu.stat", self.path)).expect("the group is there");
        let line = text.lines().find_map(|line| line.strip_prefix("usage_usec "));
        line.expect("it counts").parse().expect("a number")
    }

    fn until_it_runs(&self) {
        let before = self.used();
        while self.used() == before {
            std::thread::yield_now();
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if let Err(error) = self.groups.remove(self.sandbox) {
            eprintln!("the group is left: {error}");
        }
        if let Err(error) = Cgroups::remove_installation(self.installation) {
            eprintln!("the installation's groups are left: {error}");
        }
    }
}

#[test]
fn a_frozen_sandbox_uses_no_processor_and_goes_on_when_it_is_thawed() {
    let busy = Busy::start();
    for _ in 0..20 {
        busy.until_it_runs();
        busy.groups.freeze(busy.sandbox, Motion::Still).expect("it can be frozen");
        let before = busy.used();
        // A moment in which a process that runs would have used some: as much work as the loop above took to see a change.
        for _ in 0..1000 {
            assert_eq!(busy.used(), before, "a frozen process ran");
        }
        busy.groups.freeze(busy.sandbox, Motion::Still).expect("asking twice is harmless");
        busy.groups.freeze(busy.sandbox, Motion::Going).expect("it can be thawed");
    }
    busy.until_it_runs();
}

#[test]
fn a_frozen_sandbox_can_be_removed() {
    let mut busy = Busy::start();
    busy.groups.freeze(busy.sandbox, Motion::Still).expect("it can be frozen");
    // Reaped beside the removal, which waits until nobody is left.
    std::thread::scope(|scope| {
        let (groups, sandbox) = (&busy.groups, busy.sandbox);
        let removed = scope.spawn(move || groups.remove(sandbox));
        busy.process.wait().expect("it ends");
        removed.join().expect("no panic").expect("frozen processes can be killed");
    });
}
