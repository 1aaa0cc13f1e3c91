//! Cgroups: which controllers exist, and whether groups can be created.

use std::fs;
use std::path::Path;

use super::finding::Finding;
use crate::ns::cgroup::Layout;

pub(super) fn cgroups(tries: bool) -> Vec<Finding> {
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

/// Creates a group of every kind and removes it.
fn try_group(v2: &str, layout: &Layout) -> Finding {
    const NAME: &str = "cgroup_writable";
    let group = format!("shoal-doctor-{}", std::process::id());
    let mut places: Vec<&String> =
        layout.controllers.iter().filter_map(|(_, place)| place.as_ref()).collect();
    let v2_place = v2.to_owned();
    places.push(&v2_place);
    places.sort();
    places.dedup();
    let mut missing = Vec::new();
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
            missing.extend(["cgroup.kill", "cgroup.freeze"].into_iter().filter(absent));
        }
        // The kernel removes the files in it. A group that was just created and has no processes can be removed.
        if let Err(error) = fs::remove_dir(&path) {
            return Finding::unknown(NAME, format!("cannot remove {}: {error}", path.display()), "remove it");
        }
    }
    if missing.is_empty() {
        return Finding::found(NAME, "groups can be made, ended and frozen");
    }
    Finding::missing(
        NAME,
        format!("groups have no {}", missing.join(" and no ")),
        "a sandbox that forks fast cannot be ended",
        "install Linux 5.14 or newer",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::MIXED;
    use crate::doctor::finding::{Verdict, check};

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
}
