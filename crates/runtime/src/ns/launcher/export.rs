//! Packs a snapshot: a walker clones a process that can reach nothing else, and waits for its end. See `storage::exporter`.

use std::io;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, WaitOptions};
use wire::launch::{
    Answer, DiffSide, EXPORT_DEPTH, EXPORT_NAME, ExportSnapshot, Failure, SNAPSHOT_LAYERS_MAX,
};

use super::walk::{READ_ONLY, idmapped, make_slot};
use super::{Launcher, refused};
use crate::ns::enter;
use crate::ns::plan;
use crate::ns::slots::Slot;
use crate::storage::exporter::{self, ExportPart, Unfit};
use crate::sys::{self, CloneOptions, Cloned};

impl Launcher {
    pub(super) fn export(&self, wanted: &ExportSnapshot, given: Vec<OwnedFd>) -> Result<Answer, Failure> {
        let invalid = |doing: &str| Failure { doing: doing.into(), errno: libc::EINVAL };
        let out = given.into_iter().next().ok_or_else(|| invalid("pack without a pipe"))?;
        let ExportSnapshot { side: DiffSide { layers: snapshots, rootfs }, base } = wanted;
        if snapshots.len() > SNAPSHOT_LAYERS_MAX + 1 {
            return Err(invalid("pack so many snapshots"));
        }
        let Slot { user, net } = make_slot(*base)?;
        let generation =
            self.places.host_images.current().map_err(refused("find the image `host`"))?.unwrap_or(0);
        let (directory, layers) = self.layers(rootfs, generation)?;
        let mut parts = Vec::new();
        for overlay in plan::overlays(rootfs, 0) {
            let snapshots = snapshots.iter().map(|id| self.snapshot_layer(*id, overlay.upper, &user));
            let mut trees = snapshots.collect::<Result<Vec<_>, _>>()?;
            for number in &overlay.layers {
                let tree = idmapped(directory, &layers[*number as usize], READ_ONLY, &user);
                trees.push(tree.map_err(refused("map the ids of a layer"))?);
            }
            parts.push(ExportPart { at: overlay.at, layers: trees });
        }
        let flags = libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
        let pid = match sys::clone_process(&CloneOptions { flags, cgroup: None }).map_err(refused("clone"))? {
            Cloned::Child => {
                let give_up_privileges = |kept| {
                    enter::drop_privileges(kept)?;
                    self.filters.apply().map_err(io::Error::other)
                };
                let give_up_privileges = &give_up_privileges;
                exporter::run(exporter::Materials { parts, user, net, give_up_privileges, out })
            }
            Cloned::Parent { pid } => Pid::from_raw(pid as i32).expect("a child has a positive pid"),
        };
        drop((parts, out));
        let ended = rustix::process::waitpid(Some(pid), WaitOptions::empty()).map_err(refused("wait"))?;
        let failed = |doing: &str, errno| Err(Failure { doing: doing.into(), errno });
        match ended.and_then(|(_, status)| status.exit_status()) {
            Some(0) => Ok(Answer::Done),
            Some(code) if code == Unfit::Name as i32 => failed(EXPORT_NAME, libc::EILSEQ),
            Some(code) if code == Unfit::Depth as i32 => failed(EXPORT_DEPTH, libc::EILSEQ),
            _ => failed("pack the snapshot: the packing process died", 0),
        }
    }
}
