//! Countable resources of the machine: descriptors, process ids, ids for users, programs.

use std::fs;
use std::path::Path;

use rustix::process::{Resource, getrlimit};

use super::finding::Finding;
use super::tries::number;
use crate::ns::ranges::{self, CLAIMS};

/// Descriptors that the daemon holds for one sandbox.
const DESCRIPTORS_PER_SANDBOX: u64 = 10;
/// Fewer descriptors than this are not enough for the sandboxes that a daemon takes by default.
const DESCRIPTORS_WANTED: u64 = 20_000;
/// The value that distributions set on busy machines, and the kernel's maximum.
const PID_MAX_BEST: u64 = 4_194_304;
/// Below this, some hundred busy sandboxes may use up all process ids.
const PID_MAX_WANTED: u64 = 65_536;

pub(super) fn descriptors() -> Finding {
    judge_descriptors(getrlimit(Resource::Nofile).maximum)
}

fn judge_descriptors(most: Option<u64>) -> Finding {
    const NAME: &str = "descriptors";
    let Some(most) = most else { return Finding::found(NAME, "no limit") };
    if most >= DESCRIPTORS_WANTED {
        return Finding::found(NAME, format!("{most} per process"));
    }
    Finding::limited(
        NAME,
        format!("{most} per process"),
        format!("about {} sandboxes at once", most / DESCRIPTORS_PER_SANDBOX),
        "raise it: `LimitNOFILE=1048576` in the systemd unit, or `ulimit -n` before `shoal serve`",
    )
}

pub(super) fn process_ids() -> Finding {
    const NAME: &str = "process_ids";
    match number("/proc/sys/kernel/pid_max") {
        None => Finding::unknown(NAME, "the kernel does not say", ""),
        Some(most) if most < PID_MAX_WANTED => Finding::limited(
            NAME,
            format!("pid_max is {most}"),
            "that is how many processes all sandboxes and the machine have together",
            format!("set `sysctl kernel.pid_max={PID_MAX_BEST}`"),
        ),
        Some(most) => Finding::found(NAME, format!("pid_max is {most}")),
    }
}

pub(super) fn id_ranges() -> Finding {
    let lists = ["/etc/subuid", "/etc/subgid"].map(|path| fs::read_to_string(path).unwrap_or_default());
    let claimed = fs::read_dir(CLAIMS).map_or(0, |entries| {
        entries.flatten().filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok()).count()
    });
    judge_id_ranges(&lists.concat(), claimed)
}

/// Whether ids that sandboxes use were assigned to another user, by the lines of `/etc/subuid` and `/etc/subgid`.
fn judge_id_ranges(subordinate: &str, blocks_claimed: usize) -> Finding {
    const NAME: &str = "id_ranges";
    let taken = (u64::from(ranges::FIRST), u64::from(ranges::OWN_IDS.end));
    let overlap = subordinate.lines().find(|line| {
        let mut parts = line.trim().split(':').skip(1).map(|part| part.parse::<u64>().ok());
        let (Some(Some(first)), Some(Some(count))) = (parts.next(), parts.next()) else { return false };
        first < taken.1 && first.saturating_add(count) > taken.0
    });
    let free = (ranges::BLOCKS as usize).saturating_sub(blocks_claimed);
    match overlap {
        Some(line) => Finding::limited(
            NAME,
            format!("`{}` is handed out as subordinate ids too", line.trim()),
            "processes of a sandbox and of that user may have the same ids",
            format!("give that user ids below {}", ranges::FIRST),
        ),
        None if free == 0 => Finding::limited(
            NAME,
            "all are claimed",
            "no new sandboxes beyond those that daemons have made room for",
            format!("remove the files of installations that are gone from {CLAIMS}"),
        ),
        None => Finding::found(NAME, format!("from {}, {free} blocks of 64 free", ranges::FIRST)),
    }
}

/// The programs of this machine that the image `host` would contain.
pub(super) fn host_programs() -> Vec<Finding> {
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
            Finding::limited(
                name,
                "not in /usr",
                cost,
                format!("`apt-get install {package}`, or what is like it here"),
            )
        });
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::{Verdict, check};

    #[test]
    fn few_descriptors_are_told_with_their_cost() {
        check(judge_descriptors(Some(1024)), Verdict::Limited, "1024");
        check(judge_descriptors(Some(20_000)), Verdict::Found, "20000");
        check(judge_descriptors(None), Verdict::Found, "no limit");
    }

    #[test]
    fn subordinate_ids_that_meet_ours_are_told() {
        check(judge_id_ranges("user:100000:65536\n# no line\n", 0), Verdict::Found, "512 blocks");
        check(judge_id_ranges("user:100000:65536\nbig:1000000:4000000000\n", 0), Verdict::Limited, "big");
        check(judge_id_ranges(&format!("next:{}:1\n", ranges::OWN_IDS.end), 3), Verdict::Found, "509 blocks");
        check(judge_id_ranges("", 512), Verdict::Limited, "claimed");
    }
}
