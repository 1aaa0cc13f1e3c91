//! What a walker does: it handles one request, in its own process.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::CWD;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use wire::launch::{
    Access, Answer, Ask, Failure, Found, HOST_LAYERS_MAX, INVENTORY_PAGE, LAYERS_MAX, LAYERS_PAGE,
    MOUNTS_MAX, Plan, Processes, Rootfs, SNAPSHOT_LAYERS_MAX, SNAPSHOTS_PAGE, VERSION, VOLUMES_PAGE,
    Writable, from_packet, to_packet,
};
use wire::{Digest, SandboxId, SnapshotId, VolumeId};

use super::{Launcher, Parts, failure, refused};
use crate::backend::DiskUsage;
use crate::ns::enter::{self, EnterError, Materials};
use crate::ns::network::held::Sockets;
use crate::ns::plan::{self, Tree};
use crate::ns::slots::{self, Slot};
use crate::storage::generations::PrepareError;
use crate::storage::host_image::{self, ImageError};
use crate::storage::pool::StoragePool;
use crate::sys::mounts::cut_out;
use crate::sys::{self, CloneOptions, Cloned};

/// Layers are mounted read-only, without devices or set-user-id programs.
pub(super) const READ_ONLY: u64 = libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOSUID;

impl Launcher {
    pub(super) fn walk(&mut self, serial: u64, ask: Ask, parts: Parts<'_>) -> Result<Answer, Failure> {
        let Parts { slot, given, handed } = parts;
        match ask {
            Ask::Hello { .. } => Ok(Answer::Hello { version: VERSION }),
            Ask::PrepareHostImage { thorough } => {
                let generation = self.places.prepare_host_image(thorough).map_err(image_failure)?;
                Ok(Answer::Prepared { generation })
            }
            Ask::PrepareSlot { base } => self.prepare_slot(base),
            Ask::Launch(plan) => self.launch(&plan, slot),
            Ask::Teardown { sandbox } => self.teardown(sandbox),
            Ask::Inventory { after } => self.inventory(after),
            Ask::UnpackLayer(wanted) => self.unpack_layer(serial, &wanted).map(Answer::Unpacked),
            Ask::RemoveLayer { layer } => {
                self.places.layers.remove(layer).map_err(refused("remove a layer"))?;
                Ok(Answer::Done)
            }
            Ask::Layers { after } => {
                let mut layers = self.places.layers.list().map_err(refused("list layers"))?;
                layers.retain(|layer| after.is_none_or(|after| *layer > after));
                layers.truncate(LAYERS_PAGE);
                Ok(Answer::Layers(layers))
            }
            Ask::OpenNetwork { sandbox, routes } => {
                Ok(Answer::Network(self.open_network(sandbox, &routes, handed)))
            }
            Ask::ChangeRoutes { sandbox, routes } => {
                Ok(Answer::Network(self.change_routes(sandbox, &routes)))
            }
            Ask::CloseNetwork { sandbox } => Ok(Answer::Network(self.close_network(sandbox))),
            Ask::StartEgress { id } => self.start_egress(id, given),
            Ask::EndEgress => {
                self.cgroups.end_egress().map_err(refused("end the egress process"))?;
                Ok(Answer::Done)
            }
            Ask::Sockets { sandbox, family, count } => {
                Ok(Answer::Network(self.sockets(sandbox, family, count, handed)))
            }
            Ask::EndProcesses { sandbox, which } => {
                let ended = match which {
                    Processes::All => self.cgroups.remove(sandbox),
                    Processes::OfCommand(command) => self.cgroups.end_command(sandbox, command),
                };
                ended.map(|()| Answer::Done).map_err(refused("end the sandbox's processes"))
            }
            Ask::Freeze { sandbox, motion } => {
                self.cgroups.freeze(sandbox, motion).map_err(refused("freeze or thaw the sandbox"))?;
                Ok(Answer::Done)
            }
            Ask::DiskUsage { sandbox } => {
                let DiskUsage { bytes, complete } =
                    self.places.disk_usage(sandbox).map_err(refused("look at the sandbox's files"))?;
                Ok(Answer::DiskUsage { bytes, complete })
            }
            Ask::CreateVolume { volume, size_bytes, from } => {
                self.places.pool.make_volume(volume, size_bytes, from).map_err(refused("make a volume"))?;
                Ok(Answer::Done)
            }
            Ask::ResizeVolume { volume, size_bytes } => {
                self.places.pool.resize_volume(volume, size_bytes).map_err(refused("resize a volume"))?;
                Ok(Answer::Done)
            }
            Ask::RemoveVolume { volume } => {
                self.places.pool.remove_volume(volume).map_err(refused("remove a volume"))?;
                Ok(Answer::Done)
            }
            Ask::VolumeUsage { volume } => {
                let files = self.volume(volume)?;
                let DiskUsage { bytes, complete } =
                    self.places.pool.usage(files).map_err(refused("look at a volume's files"))?;
                Ok(Answer::DiskUsage { bytes, complete })
            }
            Ask::Volumes { after } => {
                let mut volumes = self.places.pool.volumes().map_err(refused("list volumes"))?;
                volumes.retain(|volume| after.is_none_or(|after| *volume > after));
                volumes.truncate(VOLUMES_PAGE);
                Ok(Answer::Volumes(volumes))
            }
            Ask::SettleFiles { sandbox: _ } => {
                self.places.pool.settle().map_err(refused("write the store's changes to disk"))?;
                Ok(Answer::Done)
            }
            Ask::TakeSnapshot { sandbox, snapshot } => {
                let taken = self.places.pool.take_snapshot(sandbox, snapshot);
                Ok(Answer::FilesMark(Some(taken.map_err(refused("take a snapshot"))?)))
            }
            Ask::RemoveSnapshot { snapshot } => {
                self.places.pool.remove_snapshot(snapshot).map_err(refused("remove a snapshot"))?;
                Ok(Answer::Done)
            }
            Ask::Snapshots { after } => {
                let mut snapshots = self.places.pool.snapshots().map_err(refused("list snapshots"))?;
                snapshots.retain(|snapshot| after.is_none_or(|after| *snapshot > after));
                snapshots.truncate(SNAPSHOTS_PAGE);
                Ok(Answer::Snapshots(snapshots))
            }
            Ask::FilesMark { sandbox } => {
                let mark = self.places.pool.mark(sandbox).map_err(refused("look at the sandbox's files"))?;
                Ok(Answer::FilesMark(mark))
            }
            Ask::Diff(wanted) => self.diff(&wanted, given),
            Ask::Export(wanted) => self.export(&wanted, given),
            Ask::Store => {
                let StoragePool { facts, made_bytes, notes, .. } = &self.places.pool;
                Ok(Answer::Store { facts: *facts, made_bytes: *made_bytes, notes: notes.clone() })
            }
            Ask::StoreUsage => {
                let space = self.places.pool.space().map_err(refused("see how much the store holds"))?;
                let space = match space {
                    Some(space) => space,
                    None => self.places.space().map_err(refused("see how much is free"))?,
                };
                Ok(Answer::StoreUsage { bytes: space.0, available_bytes: space.1 })
            }
        }
    }

    fn prepare_slot(&self, base: u32) -> Result<Answer, Failure> {
        let slot = make_slot(base)?;
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds = [slot.user.as_fd(), slot.net.as_fd()];
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)), "there is room for two");
        let base = base.to_le_bytes();
        sendmsg(&self.slots_out, &[io::IoSlice::new(&base)], &mut ancillary, SendFlags::NOSIGNAL)
            .map_err(refused("hand a slot over"))?;
        Ok(Answer::Done)
    }

    fn launch(&self, plan: &Plan, slot: Option<Slot>) -> Result<Answer, Failure> {
        let Slot { user, net } = match slot {
            Some(slot) => slot,
            None => make_slot(plan.base)?,
        };
        let generation = match plan.rootfs {
            Rootfs::Host | Rootfs::OverHost(_) => self
                .places
                .host_images
                .current()
                .map_err(refused("find the image `host`"))?
                .ok_or_else(|| Failure { doing: "find the image `host`".into(), errno: libc::ENOENT })?,
            // Generations begin with 1.
            Rootfs::Layers(_) => 0,
        };
        let writable_layers: Vec<&str> =
            plan::overlays(&plan.rootfs, 0).iter().map(|overlay| overlay.upper).collect();
        let place = match plan.writable {
            Writable::New => self
                .places
                .make_sandbox(
                    plan.sandbox,
                    plan.base,
                    generation,
                    &writable_layers,
                    plan.limits.disk_bytes,
                    plan.over.copy,
                )
                .map_err(refused("make the sandbox's directory"))?,
            Writable::Kept => self
                .places
                .reopen_sandbox(plan.sandbox, plan.base, generation, &writable_layers)
                .map_err(refused("find the sandbox's files"))?,
        };
        let listener = place.listen().map_err(refused("make init's socket"))?;
        let groups =
            self.cgroups.make(plan.sandbox, plan.base, &plan.limits).map_err(refused("make the cgroups"))?;

        let mut trees = HashMap::new();
        let (directory, layers) = self.layers(&plan.rootfs, generation)?;
        for (number, layer) in layers.into_iter().enumerate() {
            let tree =
                idmapped(directory, &layer, READ_ONLY, &user).map_err(refused("map the ids of a layer"))?;
            trees.insert(Tree::Layer(number as u8), tree);
        }
        for tree in self.snapshot_layers(&plan.over.layers, &writable_layers, &user)? {
            trees.insert(Tree::Layer(trees.len() as u8), tree);
        }
        let flags = libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOSUID;
        let writable = idmapped(place.fs.as_fd(), "", flags, &user)
            .map_err(refused("map the ids of the writable layer"))?;
        trees.insert(Tree::Writable, writable);
        let host = idmapped(place.host.as_fd(), "", READ_ONLY | libc::MOUNT_ATTR_NOEXEC, &user)
            .map_err(refused("map the ids of the host's directory"))?;
        trees.insert(Tree::Host, host);
        if plan.mounts.len() > MOUNTS_MAX {
            let doing = format!("mount {} volumes", plan.mounts.len());
            return Err(Failure { doing, errno: libc::EINVAL });
        }
        for (number, mount) in plan.mounts.iter().enumerate() {
            let flags = match mount.access {
                Access::ReadWrite => flags,
                Access::ReadOnly => READ_ONLY,
            };
            let volume = self.volume(mount.volume)?;
            let tree =
                idmapped(volume.as_fd(), "", flags, &user).map_err(refused("map the ids of a volume"))?;
            trees.insert(Tree::Volume(number as u8), tree);
        }

        let steps = plan::steps(plan);
        let (mut errors, mut report) = io::pipe().map_err(refused("make a pipe"))?;
        let options = CloneOptions {
            flags: libc::CLONE_NEWNS
                | libc::CLONE_NEWPID
                | libc::CLONE_NEWIPC
                | libc::CLONE_NEWUTS
                // Makes it a child of the loop, which reaps it; this walker will have ended.
                | libc::CLONE_PARENT,
            cgroup: Some(groups.v2.as_fd()),
        };
        match sys::clone_process(&options).map_err(refused("clone init"))? {
            Cloned::Child => {
                drop(errors);
                let materials = Materials {
                    trees,
                    limits: groups.v1_tasks,
                    user,
                    net,
                    base: plan.base,
                    filters: &self.filters,
                    init: self.init.as_fd(),
                    listener,
                    cgroup: groups.v2,
                };
                let EnterError { doing, source } = enter::enter(&steps, materials);
                let failure = failure(&doing, &source);
                // If this cannot be written either, the exit code still reports the failure.
                let _ = report.write_all(&to_packet(&failure));
                sys::exit_now(1)
            }
            Cloned::Parent { pid } => {
                drop(report);
                let mut said = Vec::new();
                // Returns when init is executed, which closes the pipe, or when the process is gone.
                errors.read_to_end(&mut said).map_err(refused("hear of init's start"))?;
                match said.as_slice() {
                    [] => Ok(Answer::Launched { pid }),
                    said => Err(from_packet(said)
                        .unwrap_or(Failure { doing: "start init, for an unknown reason".into(), errno: 0 })),
                }
            }
        }
    }

    /// The layers of snapshots, for each writable layer, the uppermost snapshot first.
    pub(super) fn snapshot_layers(
        &self,
        snapshots: &[SnapshotId],
        writable_layers: &[&str],
        user: &OwnedFd,
    ) -> Result<Vec<OwnedFd>, Failure> {
        if snapshots.len() > SNAPSHOT_LAYERS_MAX {
            let doing = format!("mount {} snapshots", snapshots.len());
            return Err(Failure { doing, errno: libc::EINVAL });
        }
        let mut trees = Vec::new();
        for name in writable_layers {
            for snapshot in snapshots {
                trees.push(self.snapshot_layer(*snapshot, name, user)?);
            }
        }
        Ok(trees)
    }

    /// One writable layer of a snapshot, read-only.
    pub(super) fn snapshot_layer(
        &self,
        snapshot: SnapshotId,
        name: &str,
        user: &OwnedFd,
    ) -> Result<OwnedFd, Failure> {
        let files = self.places.pool.snapshot(snapshot).map_err(refused("open a snapshot"))?;
        idmapped(files.as_fd(), name, READ_ONLY, user).map_err(refused("map the ids of a snapshot"))
    }

    fn volume(&self, volume: VolumeId) -> Result<OwnedFd, Failure> {
        let found = self.places.pool.volume(volume).map_err(refused("open a volume"))?;
        found.ok_or_else(|| Failure { doing: "find a volume's files".into(), errno: libc::ENOENT })
    }

    fn teardown(&self, sandbox: SandboxId) -> Result<Answer, Failure> {
        // Only for a report: a teardown does not fail because of it.
        let sockets = Sockets::of(&self.cgroups, sandbox).unwrap_or_else(|error| {
            tracing::warn!(%sandbox, %error, "cannot list the sandbox's sockets");
            Sockets::default()
        });
        // Try both, so that one failure does not leave the other part behind.
        let groups = self.cgroups.remove(sandbox).map_err(refused("end the sandbox's processes"));
        let files = self.places.remove_sandbox(sandbox).map_err(refused("remove the sandbox's files"));
        groups.and(files)?;
        match sockets.held(&self.cgroups) {
            Ok(0) => Ok(Answer::Done),
            Ok(sockets) => Ok(Answer::Held { sockets }),
            Err(error) => {
                tracing::warn!(%sandbox, %error, "cannot look at what egress holds");
                Ok(Answer::Done)
            }
        }
    }

    fn inventory(&self, after: Option<SandboxId>) -> Result<Answer, Failure> {
        let mut found: HashMap<SandboxId, Found> = HashMap::new();
        for (sandbox, base) in self.places.list_sandboxes().map_err(refused("list sandboxes"))? {
            found.insert(sandbox, Found { sandbox, base, alive: false });
        }
        for (sandbox, alive) in self.cgroups.list().map_err(refused("list cgroups"))? {
            found.entry(sandbox).or_insert(Found { sandbox, base: None, alive }).alive = alive;
        }
        let mut found: Vec<Found> =
            found.into_values().filter(|f| after.is_none_or(|after| f.sandbox > after)).collect();
        found.sort_by_key(|f| f.sandbox);
        found.truncate(INVENTORY_PAGE);
        Ok(Answer::Inventory(found))
    }

    /// The layers of a root filesystem, in the numbering of `plan::overlays`, and what their paths are relative to.
    pub(super) fn layers(
        &self,
        rootfs: &Rootfs,
        generation: u64,
    ) -> Result<(BorrowedFd<'_>, Vec<String>), Failure> {
        let too_many = |layers: &[Digest], most: usize| match layers.len() {
            1.. if layers.len() <= most => Ok(()),
            count => Err(Failure { doing: format!("mount an image of {count} layers"), errno: libc::EINVAL }),
        };
        let text = |path: std::path::PathBuf| path.to_string_lossy().into_owned();
        let host = |name: &str| text(self.places.host_images.path(generation).join(name));
        Ok(match rootfs {
            Rootfs::Host => (CWD, vec![host("root"), host("usr"), host_image::USR.into()]),
            Rootfs::Layers(layers) => {
                too_many(layers, LAYERS_MAX)?;
                (self.places.layers.layers(), layers.iter().map(Digest::hex).collect())
            }
            Rootfs::OverHost(layers) => {
                too_many(layers, HOST_LAYERS_MAX)?;
                let layer = |layer: &Digest| self.places.layers_path().join(layer.hex());
                let roots = layers.iter().map(|digest| text(layer(digest)));
                let usrs = layers.iter().map(|digest| text(layer(digest).join(plan::USR)));
                let whole = roots.chain([host("root")]).chain(usrs);
                (CWD, whole.chain([host("usr"), host_image::USR.into()]).collect())
            }
        })
    }
}

fn image_failure(error: PrepareError) -> Failure {
    match error {
        PrepareError::Io { doing, source } => failure(doing, &source),
        PrepareError::Build(error) => {
            let errno = match &error {
                ImageError::Io { source, .. } => source.raw_os_error().unwrap_or(0),
                ImageError::NotMerged { .. } => 0,
            };
            Failure { doing: format!("build the image `host`: {error}"), errno }
        }
    }
}

pub(super) fn make_slot(base: u32) -> Result<Slot, Failure> {
    slots::make(base).map_err(|e| failure(e.doing, &e.source))
}

/// A copy of the mount at `path` that shows files with the ids of a user namespace.
pub(super) fn idmapped(dir: BorrowedFd<'_>, path: &str, flags: u64, user: &OwnedFd) -> io::Result<OwnedFd> {
    let tree = cut_out(dir, path, false)?;
    sys::set_mount_attributes(tree.as_fd(), flags, Some(user.as_fd()), false)?;
    Ok(tree)
}
