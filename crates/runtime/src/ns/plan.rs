//! The steps into a sandbox, as data.
//!
//! Building the list is pure, so it can be read, printed and compared; walking it is `enter`'s job.
//! **The order is the security**: a step that must precede another says why.

use wire::launch::{Plan, Rootfs};

/// The writable layer of a sandbox's root.
pub const UPPER: &str = "root";
/// What is a union of its own over the image `host`: there, and as a writable layer.
pub const USR: &str = "usr";

/// A mount tree that the launcher cut out beforehand and that is not attached anywhere yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tree {
    /// A read-only layer of the root filesystem, through an idmapped mount.
    Layer(u8),
    /// The sandbox's own directory of writable layers, through an idmapped mount.
    Writable,
    /// What the daemon shows the sandbox, read-only, through an idmapped mount.
    Host,
    /// A volume, through an idmapped mount: whatever range a sandbox has, all see the same owners.
    Volume(u8),
}

/// A mount that every sandbox gets as it is: the launcher keeps one in its staging directory, and each sandbox moves its own
/// copy of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shared {
    /// A few device nodes, read-only.
    Devices,
    /// The harmless part of `/sys`, read-only.
    System,
}

/// A union of layers with one writable directory on top.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overlay {
    /// Layers, the uppermost first.
    pub layers: Vec<u8>,
    /// The directory of the writable tree that takes changes. Its neighbour `<name>-work` is the kernel's.
    pub upper: &'static str,
    /// Where it goes in the new root; `""` is the root itself.
    pub at: &'static str,
}

/// One thing done to the kernel on the way in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Takes init's place in the order of OOM victims, whatever the daemon's own is, and keeps the file open in which init
    /// will give commands theirs. While the host's `/proc` and rights are at hand: inside, init may not open its own file.
    OrderVictims,
    /// Joins the limits of v1. First of what uses anything, so that everything below is already paid for by the sandbox.
    JoinLimits,
    /// The guest sees its own cgroup as the root. After joining: the namespace begins where the process is.
    HideCgroups,
    /// Enters the network namespace. Before the user namespace: the guest must not own it.
    JoinNetwork,
    /// Attaches a tree in the staging directory, where overlays look for their layers.
    Stage(Tree),
    /// Mounts a union. Under the range's own ids: an overlay whose mounter has no id in its writable layer silently
    /// becomes read-only, so that is checked.
    Overlay(Overlay),
    /// Moves a shared mount into the new root.
    Attach(Shared, &'static str),
    /// A process file system for the new pid namespace, with what concerns the host covered.
    Processes,
    /// Shows the limits in place of the machine's memory and processors. After `/proc` is there.
    ShowLimits {
        /// Thousandths of a processor.
        cpu_millis: u32,
        /// Memory.
        memory_bytes: u64,
    },
    /// Terminals of its own.
    Terminals,
    /// Shared memory of its own. It counts to the memory limit and stays when its makers have ended, so it may take only a part
    /// of that: were it to take all, nothing that could be killed would free any, and init would die for it.
    SharedMemory {
        /// How much there is.
        bytes: u64,
    },
    /// Attaches the directory that the daemon shows the sandbox at `/run/shoal`. Left out if an image has anything but
    /// directories there: the file only describes the policy, and the sandbox works without it.
    HostDirectory,
    /// Attaches a volume at a path, whose missing directories are made as the guest's root. After everything that is the sandbox's
    /// own, so that none of it lands in a volume; without following a link, since a guest may have made it.
    Volume(u8, String),
    /// Makes the new root the root and unmounts the old one. After all mounts: their sources are in the old root.
    ChangeRoot,
    /// Names the machine.
    Hostname(String),
    /// Enters the user namespace and becomes its root. Last of the namespaces: until here the process owns, as the host's
    /// root, all that the guest must not own.
    BecomeGuest,
    /// Keeps the capabilities that package managers and builds need, and sets no_new_privs.
    DropPrivileges,
    /// Filters system calls. After everything that the filter forbids.
    Filter,
    /// Executes init with its listening socket, its cgroup and its OOM score, and not one descriptor more.
    Execute,
}

/// The steps for a plan.
pub fn steps(plan: &Plan) -> Vec<Step> {
    let mut steps = vec![
        Step::OrderVictims,
        Step::JoinLimits,
        Step::HideCgroups,
        Step::JoinNetwork,
        Step::Stage(Tree::Writable),
    ];
    let overlays = overlays(&plan.rootfs, plan.over.layers.len());
    let layers = overlays.iter().flat_map(|overlay| &overlay.layers);
    steps.extend(layers.map(|layer| Step::Stage(Tree::Layer(*layer))));
    steps.extend(overlays.into_iter().map(Step::Overlay));
    steps.extend([
        Step::Attach(Shared::Devices, "dev"),
        Step::Attach(Shared::System, "sys"),
        Step::Processes,
        Step::ShowLimits { cpu_millis: plan.limits.cpu_millis, memory_bytes: plan.limits.memory_bytes },
        Step::Terminals,
        Step::SharedMemory { bytes: plan.limits.memory_bytes / 2 },
        Step::HostDirectory,
    ]);
    let mounts = plan.mounts.iter().enumerate();
    steps.extend(mounts.map(|(number, mount)| Step::Volume(number as u8, mount.path.clone())));
    steps.extend([
        Step::ChangeRoot,
        Step::Hostname(plan.hostname.clone()),
        Step::BecomeGuest,
        Step::DropPrivileges,
        Step::Filter,
        Step::Execute,
    ]);
    steps
}

/// The overlays that make up a root filesystem, the root first. The layers of the root filesystem come first in the
/// numbering; after them, for each overlay, the snapshots that lie over it.
pub fn overlays(rootfs: &Rootfs, snapshots: usize) -> Vec<Overlay> {
    let mut overlays = overlays_of_image(rootfs);
    let mut next = overlays.iter().map(|overlay| overlay.layers.len()).sum::<usize>() as u8;
    for overlay in &mut overlays {
        let after = next + snapshots as u8;
        overlay.layers.splice(..0, next..after);
        next = after;
    }
    overlays
}

fn overlays_of_image(rootfs: &Rootfs) -> Vec<Overlay> {
    match rootfs {
        // Lower layers do not cross mounts and one overlay over `/` is refused, so there are two.
        Rootfs::Host => vec![
            Overlay { layers: vec![0], upper: UPPER, at: "" },
            Overlay { layers: vec![1, 2], upper: USR, at: USR },
        ],
        Rootfs::Layers(layers) => {
            let layers = (0..layers.len() as u8).collect();
            vec![Overlay { layers, upper: UPPER, at: "" }]
        }
        // Each layer twice: its root among those of the first, its `usr` among those of the second.
        Rootfs::OverHost(layers) => {
            let count = layers.len() as u8;
            vec![
                Overlay { layers: (0..=count).collect(), upper: UPPER, at: "" },
                Overlay { layers: (count + 1..count * 2 + 3).collect(), upper: USR, at: USR },
            ]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::launch::{Access, Limits, Mount, Over, Writable};
    use wire::{SandboxId, SnapshotId, VolumeId};

    fn plan() -> Plan {
        Plan {
            sandbox: SandboxId::from_random(1),
            base: 1 << 30,
            rootfs: Rootfs::Host,
            limits: Limits { cpu_millis: 1000, memory_bytes: 1 << 30, pids: 100, disk_bytes: None },
            hostname: "h".into(),
            mounts: vec![Mount {
                volume: VolumeId::from_random(2),
                path: "/data".into(),
                access: Access::ReadOnly,
            }],
            over: Over::default(),
            writable: Writable::New,
        }
    }

    fn position(steps: &[Step], step: &Step) -> usize {
        steps.iter().position(|s| s == step).unwrap_or_else(|| panic!("{step:?} is missing"))
    }

    #[test]
    fn the_user_namespace_is_entered_after_everything_that_the_guest_must_not_own() {
        let steps = steps(&plan());
        let guest = position(&steps, &Step::BecomeGuest);
        for earlier in [
            Step::OrderVictims,
            Step::JoinLimits,
            Step::HideCgroups,
            Step::JoinNetwork,
            Step::Processes,
            Step::HostDirectory,
            Step::Volume(0, "/data".into()),
            Step::ChangeRoot,
        ] {
            assert!(position(&steps, &earlier) < guest, "{earlier:?}");
        }
        assert_eq!(
            steps[guest..],
            [Step::BecomeGuest, Step::DropPrivileges, Step::Filter, Step::Execute],
            "nothing is mounted as a guest"
        );
    }

    #[test]
    fn every_layer_is_staged_before_an_overlay_uses_it() {
        let steps = steps(&plan());
        for (at, step) in steps.iter().enumerate() {
            let Step::Overlay(overlay) = step else { continue };
            assert!(position(&steps, &Step::Stage(Tree::Writable)) < at);
            for layer in &overlay.layers {
                assert!(position(&steps, &Step::Stage(Tree::Layer(*layer))) < at);
            }
        }
    }

    /// A network costs a create nothing: it joins the namespace that was made ahead, and that is all.
    #[test]
    fn a_create_does_nothing_for_a_network() {
        let steps = steps(&plan());
        let of_network: Vec<&Step> = steps.iter().filter(|step| matches!(step, Step::JoinNetwork)).collect();
        assert_eq!(of_network, [&Step::JoinNetwork]);
        let text = format!("{steps:?}").to_lowercase();
        for word in ["route", "rule", "listen", "address", "egress"] {
            assert!(!text.contains(word), "{word}");
        }
    }

    #[test]
    fn what_the_daemon_shows_is_covered_by_a_volume_and_not_written_into_it() {
        let steps = steps(&plan());
        assert!(position(&steps, &Step::HostDirectory) < position(&steps, &Step::Volume(0, "/data".into())));
    }

    #[test]
    fn snapshots_lie_over_each_union_and_every_layer_is_staged_once() {
        let snapshots = [3, 4].map(SnapshotId::from_random);
        let over = Over { layers: snapshots.to_vec(), copy: None };
        let steps = steps(&Plan { over, ..plan() });
        let unions: Vec<Vec<u8>> = steps
            .iter()
            .filter_map(|step| match step {
                Step::Overlay(overlay) => Some(overlay.layers.clone()),
                _ => None,
            })
            .collect();
        assert_eq!(unions, [vec![3, 4, 0], vec![5, 6, 1, 2]]);
        let mut staged: Vec<u8> = steps
            .iter()
            .filter_map(|step| match step {
                Step::Stage(Tree::Layer(number)) => Some(*number),
                _ => None,
            })
            .collect();
        staged.sort();
        assert_eq!(staged, (0..7).collect::<Vec<u8>>());
    }

    #[test]
    fn the_host_image_is_two_unions() {
        let steps = steps(&plan());
        let unions: Vec<_> = steps.iter().filter(|s| matches!(s, Step::Overlay(_))).collect();
        assert_eq!(unions.len(), 2);
    }
}
