//! Creates a layer: a walker clones a process that can reach nothing else, and waits for its report. See `storage::unpacker`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::process::{Pid, Signal, WaitOptions};
use wire::SandboxId;
use wire::launch::{Answer, Failure, LAYERS_MAX, LayerFacts, LayerFault, LayerSource, Rootfs, UnpackLayer};

use super::walk::{READ_ONLY, idmapped, make_slot};
use super::{Launcher, refused};
use crate::ns::enter;
use crate::ns::plan;
use crate::ns::slots::Slot;
use crate::storage::unpacker;
use crate::sys::{self, CloneOptions, Cloned};

/// The shortest time between two progress reports.
const PROGRESS_STEP: std::time::Duration = std::time::Duration::from_millis(100);

impl Launcher {
    /// Creates a layer, in a process that can reach nothing else. See `unpacker`.
    pub(super) fn unpack_layer(
        &self,
        serial: u64,
        wanted: &UnpackLayer,
    ) -> Result<Result<LayerFacts, LayerFault>, Failure> {
        if self.places.layers.has(wanted.layer).map_err(refused("look for a layer"))? {
            return Ok(Ok(LayerFacts::default()));
        }
        let unfinished = self.places.layers.begin().map_err(refused("make a directory for a layer"))?;
        let result = self.run_unpacker(serial, wanted, unfinished.directory.as_fd());
        match result {
            Ok(Ok(facts)) => {
                unfinished.finish(wanted.layer).map_err(refused("write a layer to disk"))?;
                Ok(Ok(facts))
            }
            other => {
                unfinished.discard().map_err(refused("remove an unfinished layer"))?;
                other
            }
        }
    }

    fn run_unpacker(
        &self,
        serial: u64,
        wanted: &UnpackLayer,
        top: BorrowedFd<'_>,
    ) -> Result<Result<LayerFacts, LayerFault>, Failure> {
        if wanted.below.len() >= LAYERS_MAX {
            let doing = format!("unpack a layer over {} others", wanted.below.len());
            return Err(Failure { doing, errno: libc::EINVAL });
        }
        let blob = match wanted.from {
            LayerSource::Blob { blob, .. } => {
                Some(self.places.layers.blob(blob).map_err(refused("open a blob"))?)
            }
            LayerSource::Finish(_) | LayerSource::Sandbox { .. } => None,
        };
        let Slot { user, net } = make_slot(wanted.base)?;
        let parts = match wanted.from {
            LayerSource::Sandbox { sandbox, .. } => self.written_parts(sandbox, wanted, &user)?,
            LayerSource::Blob { .. } | LayerSource::Finish(_) => {
                let layers = self.places.layers.layers();
                let below = wanted.below.iter().map(|layer| idmapped(layers, &layer.hex(), READ_ONLY, &user));
                let below = below.collect::<io::Result<_>>().map_err(refused("map the ids of a layer"))?;
                vec![unpacker::Part { at: "", below, upper: None }]
            }
        };
        let flags = libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC;
        let top = idmapped(top, "", flags, &user).map_err(refused("map the ids of a new layer"))?;
        let (mut listening, report) = io::pipe().map_err(refused("make a pipe"))?;
        let flags = libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
        let pid = match sys::clone_process(&CloneOptions { flags, cgroup: None }).map_err(refused("clone"))? {
            Cloned::Child => {
                let give_up_privileges = |kept| {
                    enter::drop_privileges(kept)?;
                    self.filters.apply().map_err(io::Error::other)
                };
                let give_up_privileges = &give_up_privileges;
                let materials =
                    unpacker::Materials { top, parts, user, net, give_up_privileges, blob, report };
                unpacker::run(materials, &wanted.from)
            }
            Cloned::Parent { pid } => Pid::from_raw(pid as i32).expect("a child has a positive pid"),
        };
        drop((report, blob));
        let mut told: Option<std::time::Instant> = None;
        let done = unpacker::listen(&mut listening, |bytes| {
            // However often the process reports, the daemon gets only a few reports a second.
            if told.is_some_and(|told| told.elapsed() < PROGRESS_STEP) {
                return Ok(());
            }
            told = Some(std::time::Instant::now());
            self.reply(serial, Ok(Answer::Unpacking { bytes }))
        });
        // The process has reported its result, so it is not needed any more.
        let _ = rustix::process::kill_process(pid, Signal::KILL);
        rustix::process::waitpid(Some(pid), WaitOptions::empty()).map_err(refused("wait"))?;
        match done.map_err(refused("hear of a layer"))? {
            Some(done) => Ok(done),
            None => Err(Failure { doing: "unpack a layer: the unpacking process died".into(), errno: 0 }),
        }
    }

    /// What a sandbox has written: each part with the layers below it.
    fn written_parts(
        &self,
        sandbox: SandboxId,
        wanted: &UnpackLayer,
        user: &OwnedFd,
    ) -> Result<Vec<unpacker::Part>, Failure> {
        let rootfs = match (wanted.over_host, wanted.below.as_slice()) {
            (false, below) => Rootfs::Layers(below.to_vec()),
            (true, []) => Rootfs::Host,
            (true, below) => Rootfs::OverHost(below.to_vec()),
        };
        let writable = self.places.writable(sandbox).map_err(refused("open a sandbox's files"))?;
        // The generation that the sandbox was created with, which need not be the newest.
        let generation = self.places.generation(sandbox).map_err(refused("read of a sandbox's image"))?;
        let (directory, layers) = self.layers(&rootfs, generation)?;
        let part = |overlay: plan::Overlay| {
            let upper = idmapped(writable.as_fd(), overlay.upper, READ_ONLY, user)
                .map_err(refused("map the ids of a sandbox's files"))?;
            let below = overlay.layers.iter().map(|number| {
                idmapped(directory, &layers[*number as usize], READ_ONLY, user)
                    .map_err(refused("map the ids of a layer"))
            });
            let below = below.collect::<Result<_, _>>()?;
            Ok(unpacker::Part { at: overlay.at, below, upper: Some(upper) })
        };
        plan::overlays(&rootfs, 0).into_iter().map(part).collect()
    }
}
