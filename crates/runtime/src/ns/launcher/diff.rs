//! Compares two snapshots: a walker clones a process that can reach nothing else, and waits for its end. See `storage::differ`.

use std::io;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, WaitOptions};
use wire::launch::{Answer, DiffSide, DiffSnapshots, Failure, SNAPSHOT_LAYERS_MAX};

use super::walk::{READ_ONLY, idmapped, make_slot};
use super::{Launcher, refused};
use crate::ns::enter;
use crate::ns::plan;
use crate::ns::slots::Slot;
use crate::storage::differ;
use crate::sys::{self, CloneOptions, Cloned};

impl Launcher {
    pub(super) fn diff(&self, wanted: &DiffSnapshots, given: Vec<OwnedFd>) -> Result<Answer, Failure> {
        let invalid = |doing: &str| Failure { doing: doing.into(), errno: libc::EINVAL };
        let out = given.into_iter().next().ok_or_else(|| invalid("compare without a pipe"))?;
        let DiffSnapshots { before, after, base, contents } = wanted;
        // Layers of different images are not shared, however alike they are.
        let common = match before.rootfs == after.rootfs {
            true => {
                before.layers.iter().rev().zip(after.layers.iter().rev()).take_while(|(a, b)| a == b).count()
            }
            false => return Err(invalid("compare snapshots over different images")),
        };
        if [before, after].iter().any(|side| side.layers.len() > SNAPSHOT_LAYERS_MAX + 1) {
            return Err(invalid("compare so many snapshots"));
        }
        let Slot { user, net } = make_slot(*base)?;
        let generation =
            self.places.host_images.current().map_err(refused("find the image `host`"))?.unwrap_or(0);
        let (directory, layers) = self.layers(&before.rootfs, generation)?;
        let mut parts = Vec::new();
        for overlay in plan::overlays(&before.rootfs, 0) {
            let name = overlay.upper;
            let own = |side: &DiffSide| {
                let own = &side.layers[..side.layers.len() - common];
                own.iter().map(|id| self.snapshot_layer(*id, name, &user)).collect::<Result<Vec<_>, _>>()
            };
            let (own_before, own_after) = (own(before)?, own(after)?);
            let shared = before.layers[before.layers.len() - common..].iter();
            let mut shared =
                shared.map(|id| self.snapshot_layer(*id, name, &user)).collect::<Result<Vec<_>, _>>()?;
            for number in &overlay.layers {
                let tree = idmapped(directory, &layers[*number as usize], READ_ONLY, &user);
                shared.push(tree.map_err(refused("map the ids of a layer"))?);
            }
            parts.push(differ::DiffPart { at: overlay.at, before: own_before, after: own_after, shared });
        }
        let flags = libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
        let pid = match sys::clone_process(&CloneOptions { flags, cgroup: None }).map_err(refused("clone"))? {
            Cloned::Child => {
                let give_up_privileges = |kept| {
                    enter::drop_privileges(kept)?;
                    self.filters.apply().map_err(io::Error::other)
                };
                let give_up_privileges = &give_up_privileges;
                let contents = *contents;
                differ::run(differ::Materials { parts, user, net, give_up_privileges, out, contents })
            }
            Cloned::Parent { pid } => Pid::from_raw(pid as i32).expect("a child has a positive pid"),
        };
        drop((parts, out));
        let ended = rustix::process::waitpid(Some(pid), WaitOptions::empty()).map_err(refused("wait"))?;
        match ended.and_then(|(_, status)| status.exit_status()) {
            Some(0) => Ok(Answer::Done),
            _ => Err(Failure { doing: "compare: the comparing process died".into(), errno: 0 }),
        }
    }
}
