//! The process that creates one layer, from a blob or from what a sandbox has written. It reads untrusted data, so it can reach
//! nothing else.
//!
//! A walker clones it for one layer. Before it reads the first byte it is in its own namespaces whose root is the
//! launcher's empty staging area, with the new layer mounted writable and the layers below mounted read-only, both
//! through idmapped mounts. It is root of a user namespace over a range of ids that no other process has: so it can
//! give files to guest ids, which unpacking needs, and has no rights on the host. It has no network, no descriptor
//! but the blob and a pipe, no way to start a program, and a memory limit. A layer that takes over the process can
//! only write into itself.
//!
//! This is not done in the daemon, which would need root to change owners of files, and not in the walker, which is root on the host.

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::AssertUnwindSafe;

use image::layer;
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, UnmountFlags, fsconfig_create, fsmount, fsopen, unmount,
};
use rustix::process::{
    Gid, Resource, Rlimit, Signal, Uid, chdir, pivot_root, set_parent_process_death_signal, setrlimit,
};
use rustix::thread::{
    CapabilitySet, LinkNameSpaceType, move_into_link_name_space, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};
use serde::{Deserialize, Serialize};
use wire::launch::{LayerFacts, LayerFault, LayerSource, from_packet, to_packet};

use crate::storage::stage::{
    STAGE_EMPTY_DIRECTORY, STAGE_ROOT, STAGE_WRITABLE, layer_name, lower_layers, set_lower_layers,
};
use crate::sys;
use crate::sys::mounts::attach;

/// The capabilities that are needed to give files to guests, within the ids of the process.
const KEPT: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::SETFCAP);
/// Address space: a zstd window is 128 MiB at most, and the rest of a stream passes through small buffers.
/// Descriptors: two for each directory on the way to an entry. Processes: none. Core dumps: as in `enter`.
const RESOURCES: [(Resource, u64); 4] =
    [(Resource::As, 1 << 30), (Resource::Nofile, 2048), (Resource::Nproc, 0), (Resource::Core, 1)];
/// The process reports its progress after this many bytes.
const STEP_BYTES: u64 = 4 << 20;
/// The longest message. Enforced by the reader, since the process may be taken over.
const MESSAGE_MAX: usize = 16 * 1024;

/// Numbers of the two descriptors that it keeps.
const BLOB: i32 = 3;
const REPORT: i32 = 4;

/// What the process needs, opened by the walker.
pub struct Materials<'a> {
    /// The new layer, writable, through an idmapped mount.
    pub top: OwnedFd,
    /// The parts below it. More than one if it becomes a layer over several unions.
    pub parts: Vec<Part>,
    /// The user namespace.
    pub user: OwnedFd,
    /// A network namespace with nothing in it.
    pub net: OwnedFd,
    /// Drops all capabilities but these for good, and filters system calls.
    pub give_up_privileges: &'a dyn Fn(CapabilitySet) -> io::Result<()>,
    /// The blob to read, if there is one.
    pub blob: Option<File>,
    /// Where messages go.
    pub report: PipeWriter,
}

/// A part of the tree below the new layer, read-only and through idmapped mounts.
pub struct Part {
    /// Path in the tree; `""` is the root.
    pub at: &'static str,
    /// The layers below, the uppermost first.
    pub below: Vec<OwnedFd>,
    /// What a sandbox has written, if that becomes a layer.
    pub upper: Option<OwnedFd>,
}

#[derive(Serialize, Deserialize)]
enum Message {
    Read(u64),
    Done(Result<LayerFacts, LayerFault>),
}

/// In the new process: confines itself, unpacks, reports, exits.
pub fn run(materials: Materials<'_>, from: &LayerSource) -> ! {
    // A panic in a parser rejects the layer; no code of the launcher may run after it.
    let result = std::panic::catch_unwind(AssertUnwindSafe(|| lock_in_and_unpack(materials, from)));
    sys::exit_now(if matches!(result, Ok(Ok(()))) { 0 } else { 1 })
}

fn lock_in_and_unpack(materials: Materials<'_>, from: &LayerSource) -> io::Result<()> {
    let Materials { top, parts, user, net, give_up_privileges, blob, report } = materials;
    move_into_link_name_space(net.as_fd(), Some(LinkNameSpaceType::Network))?;
    attach(&top, CWD, STAGE_WRITABLE)?;
    let mut stage = Stage { next: 0, unions: vec![STAGE_EMPTY_DIRECTORY.into(), STAGE_ROOT.into()] };
    let views = parts.iter().map(|part| stage.show(part)).collect::<io::Result<Vec<View>>>()?;
    drop(parts);
    confine(user, give_up_privileges, KEPT)?;

    // Close everything else that the launcher had open before reading the first untrusted byte.
    let null = openat(CWD, "dev/null", OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let keep = |fd: BorrowedFd<'_>| sys::duplicate_above(fd, REPORT + 1);
    let blob = blob.map(|blob| keep(blob.as_fd())).transpose()?;
    let (null, report) = (keep(null.as_fd())?, keep(report.as_fd())?);
    let (blob, mut report) =
        sys::close_all_but(null, blob.unwrap_or(report.try_clone()?), report, BLOB, REPORT)?;
    let mut blob = File::from(blob);

    let directory = |name: &str| {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        openat(CWD, name, flags, Mode::empty())
    };
    let top = directory(STAGE_WRITABLE)?;
    let below = views.first().and_then(|view| view.below.as_deref()).map(directory).transpose()?;
    let below = below.as_ref().map(AsFd::as_fd);
    let done = match from {
        LayerSource::Blob { contents, .. } => {
            let length = blob.metadata()?.len();
            let mut reading = Reading { blob: &mut blob, report: &mut report, read: 0, told: 0 };
            layer::unpack(&mut reading, length, *contents, top.as_fd(), below, &layer::Limits::default())
        }
        LayerSource::Finish(wanted) => layer::finish(top.as_fd(), below, wanted),
        LayerSource::Sandbox { bytes_max, .. } => {
            let written = views.iter().filter_map(|view| {
                let (upper, merged) = view.written.as_ref()?;
                Some((|| {
                    let below = view.below.as_deref().map(directory).transpose()?;
                    Ok(layer::Written {
                        at: view.at,
                        upper: directory(upper)?,
                        merged: directory(merged)?,
                        below,
                    })
                })())
            });
            let written = written.collect::<io::Result<Vec<_>>>()?;
            let limits = layer::Limits::default();
            let bytes_max = limits.bytes_max.min(*bytes_max);
            layer::capture(written, top.as_fd(), &layer::Limits { bytes_max, ..limits })
        }
    };
    tell(&mut report, &Message::Done(done))
}

/// Makes the staging area the root, becomes root of a user namespace alone, and gives up everything but these capabilities.
pub(super) fn confine(
    user: OwnedFd,
    give_up_privileges: &dyn Fn(CapabilitySet) -> io::Result<()>,
    kept: CapabilitySet,
) -> io::Result<()> {
    // The launcher's working directory is its staging area, and the clone inherits it: that becomes the root.
    pivot_root(".", ".")?;
    unmount(".", UnmountFlags::DETACH)?;
    chdir("/")?;

    move_into_link_name_space(user.as_fd(), Some(LinkNameSpaceType::User))?;
    set_thread_groups(&[])?;
    set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT)?;
    set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)?;
    // After the ids, whose change would clear it. If the walker died before this call, the other end of the pipe is
    // closed.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    for (resource, most) in RESOURCES {
        setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })?;
    }
    give_up_privileges(kept)
}

/// Free names in the staging area.
struct Stage {
    next: u8,
    /// Names for unions, the next one last. When they are used up, those for layers serve as well.
    unions: Vec<String>,
}

/// A part, by its name in the staging area.
struct View {
    at: &'static str,
    below: Option<String>,
    /// What was written, alone and over what is below.
    written: Option<(String, String)>,
}

impl Stage {
    fn number(&mut self) -> u8 {
        self.next += 1;
        self.next - 1
    }

    fn put(&mut self, tree: &OwnedFd) -> io::Result<u8> {
        let number = self.number();
        attach(tree, CWD, layer_name(number))?;
        Ok(number)
    }

    /// Layers as one tree. A single one is used directly.
    fn join(&mut self, numbers: &[u8]) -> io::Result<Option<String>> {
        match numbers {
            [] => Ok(None),
            [only] => Ok(Some(layer_name(*only))),
            _ => {
                let name = self.unions.pop().unwrap_or_else(|| layer_name(self.number()));
                attach(&joined(numbers)?, CWD, &name)?;
                Ok(Some(name))
            }
        }
    }

    fn show(&mut self, part: &Part) -> io::Result<View> {
        // What a sandbox has written is above all of them.
        let upper = part.upper.as_ref().map(|upper| self.put(upper)).transpose()?;
        let below = part.below.iter().map(|tree| self.put(tree)).collect::<io::Result<Vec<u8>>>()?;
        let all: Vec<u8> = upper.into_iter().chain(below.iter().copied()).collect();
        let below = self.join(&below)?;
        let written = match upper {
            Some(upper) => self.join(&all)?.map(|merged| (layer_name(upper), merged)),
            None => None,
        };
        Ok(View { at: part.at, below, written })
    }
}

/// Attached layers as one tree, for reading.
pub(super) fn joined(numbers: &[u8]) -> io::Result<OwnedFd> {
    let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    set_lower_layers(&context, &lower_layers(numbers))?;
    fsconfig_create(&context)?;
    let flags = MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NOEXEC
        | MountAttrFlags::MOUNT_ATTR_RDONLY;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, flags)?)
}

/// Reports how much was read.
struct Reading<'a> {
    blob: &'a mut File,
    report: &'a mut File,
    read: u64,
    told: u64,
}

impl Read for Reading<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let length = self.blob.read(into)?;
        self.read += length as u64;
        if self.read - self.told >= STEP_BYTES {
            self.told = self.read;
            tell(self.report, &Message::Read(self.read))?;
        }
        Ok(length)
    }
}

fn tell(report: &mut File, message: &Message) -> io::Result<()> {
    let packet = to_packet(message);
    report.write_all(&(packet.len() as u32).to_le_bytes())?;
    report.write_all(&packet)
}

/// In the walker: waits for the result. `None` if the process ended without one.
pub fn listen(
    report: &mut PipeReader,
    mut read: impl FnMut(u64) -> io::Result<()>,
) -> io::Result<Option<Result<LayerFacts, LayerFault>>> {
    loop {
        let mut length = [0; 4];
        match report.read_exact(&mut length) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        }
        let length = u32::from_le_bytes(length) as usize;
        if length > MESSAGE_MAX {
            return Ok(None);
        }
        let mut packet = vec![0; length];
        match report.read_exact(&mut packet) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        }
        match from_packet(&packet) {
            Some(Message::Read(bytes)) => read(bytes)?,
            Some(Message::Done(done)) => return Ok(Some(done)),
            None => return Ok(None),
        }
    }
}
