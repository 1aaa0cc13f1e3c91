//! The launcher: the only privileged process, and the only one that forks.
//!
//! A loop of one thread that does nothing but read requests and clone a walker for each: a hung mount stops its own
//! walker and nobody else. Walkers answer the daemon themselves, over the socket they inherit; the loop
//! answers for a walker that died. It holds nothing that cannot be made again, so it may be killed at any time:
//! sandboxes outlive it, and the daemon starts another. It ends when the daemon's end of the socket closes.
//!
//! ```text
//! daemon ──Request──▶ loop ──clone──▶ walker ──clone, CLONE_PARENT──▶ init        (child of the loop, which reaps it)
//!    ▲                                   │
//!    └────────────────Reply──────────────┘
//! ```

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{
    CWD, MemfdFlags, Mode, OFlags, SealFlags, fchmod, fcntl_add_seals, memfd_create, mkdirat, mknodat,
    openat, symlinkat,
};
use rustix::io::Errno;
use rustix::mount::{MountAttrFlags, MountPropagationFlags, UnmountFlags, mount_change, unmount};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, send, sendmsg,
};
use rustix::process::{Pid, Signal, WaitOptions, set_parent_process_death_signal, wait};
use rustix::thread::UnshareFlags;
use wire::launch::{
    Access, Answer, Ask, Failure, Found, HOST_LAYERS_MAX, INVENTORY_PAGE, LAYERS_MAX, LAYERS_PAGE,
    LayerFacts, LayerFault, LayerSource, MOUNTS_MAX, PACKET_MAX, Plan, Processes, Reply, Request, Rootfs,
    UnpackLayer, VERSION, VOLUMES_PAGE, from_packet, to_packet,
};
use wire::{Digest, InstallationId, SandboxId, VolumeId};

use crate::backend::DiskUsage;
use crate::cgroup::Cgroups;
use crate::enter::{self, EnterError, Materials, cut_out};
use crate::host_image;
use crate::places::{Places, names};
use crate::plan::{self, Shared, Tree};
use crate::remove::remove_tree;
use crate::seccomp::Filters;
use crate::slot::{self, Slot};
use crate::store::{Store, StoreConfig, StoreError};
use crate::sys::{self, CloneOptions, Cloned};
use crate::unpacker;

/// Init, built by this crate's build script.
static INIT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/shoal-init"));

/// The daemon hands its end of the socket over as standard input: that needs no code between fork and exec.
const SOCKET: i32 = 0;
/// Numbers below this one are given to programs that are executed; the launcher's own descriptors lie above.
const OWN_DESCRIPTORS_FROM: i32 = 16;

/// What the launcher is started with.
#[derive(Debug, Clone)]
pub struct LauncherConfig {
    /// The daemon's data directory.
    pub data_dir: PathBuf,
    /// Whose sandboxes it makes.
    pub installation: InstallationId,
    /// Where writable files are kept.
    pub store: StoreConfig,
}

/// Why the launcher could not start or go on.
#[derive(Debug, thiserror::Error)]
#[error("the launcher cannot {doing}")]
pub struct LauncherError {
    /// As it reads after "cannot".
    pub doing: String,
    /// What the kernel said.
    pub source: io::Error,
}

fn fatal<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> LauncherError {
    move |source| LauncherError { doing: doing.into(), source: source.into() }
}

/// Runs the launcher until the daemon is gone.
pub fn run(config: &LauncherConfig) -> Result<(), LauncherError> {
    let socket = sys::inherited(SOCKET).map_err(fatal("take over its socket"))?;
    let socket =
        sys::duplicate_above(socket.as_fd(), OWN_DESCRIPTORS_FROM).map_err(fatal("keep its socket"))?;
    let to_daemon = socket.try_clone().map_err(fatal("share its socket"))?;
    match Launcher::start(config, socket) {
        Ok(launcher) => {
            drop(to_daemon);
            launcher.serve()
        }
        // Whoever waits for a greeting hears why there is none. If it cannot be told, it is said here.
        Err(error) => tell_why(&to_daemon, &error).map_err(|_| error),
    }
}

/// Answers the first request with the reason why there is no launcher.
fn tell_why(socket: &OwnedFd, error: &LauncherError) -> io::Result<()> {
    let mut packet = vec![0; PACKET_MAX];
    let (length, _) = rustix::net::recv(socket, packet.as_mut_slice(), RecvFlags::empty())?;
    let first = from_packet::<Request>(&packet[..length]).ok_or(io::ErrorKind::InvalidData)?;
    let failure = Failure { doing: format!("{}: {}", error.doing, error.source), errno: 0 };
    let reply = Reply { serial: first.serial, result: Err(failure) };
    send(socket, &to_packet(&reply), SendFlags::NOSIGNAL)?;
    Ok(())
}

struct Launcher {
    pid: Option<Pid>,
    /// Held by this process and every walker.
    _lock: std::fs::File,
    socket: OwnedFd,
    signals: OwnedFd,
    /// Walkers hand finished slots to the loop through this pair.
    slots_in: OwnedFd,
    slots_out: OwnedFd,
    places: Places,
    cgroups: Cgroups,
    filters: Filters,
    init: OwnedFd,
    /// Slots that are ready, by the base of their range.
    slots: HashMap<u32, Slot>,
    /// Walkers under way.
    walkers: HashMap<i32, Walker>,
    /// Teardowns that wait for the end of a launch of the same sandbox.
    waiting: Vec<Request>,
}

/// A request under way.
struct Walker {
    /// The request that it owes an answer.
    serial: u64,
    /// The sandbox that it makes, if it makes one.
    launches: Option<SandboxId>,
}

/// A walker of the launcher before may be in the middle of a removal; it is killed with its launcher, and needs a moment to go.
const LOCK_DEADLINE: std::time::Duration = std::time::Duration::from_secs(20);
/// Between two tries.
const LOCK_STEP: std::time::Duration = std::time::Duration::from_millis(1);
/// How layers are shown: to be read, and nothing else.
const READ_ONLY: u64 = libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOSUID;
/// Between two words about how far a layer is.
const PROGRESS_STEP: std::time::Duration = std::time::Duration::from_millis(100);
/// Begins the name of an image that is being built.
const UNFINISHED: &str = "unfinished-";

/// How a walker tells the loop that it has answered.
const ANSWERED: i32 = 0;
const UNANSWERED: i32 = 1;

impl Launcher {
    fn start(config: &LauncherConfig, socket: OwnedFd) -> Result<Self, LauncherError> {
        // Not to be ended with the daemon's terminal or process group.
        rustix::process::setsid().map_err(fatal("leave its session"))?;
        rustix::process::umask(Mode::empty());
        let signals = [libc::SIGCHLD, libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGPIPE];
        let signals = sys::signals_as_descriptor(&signals).map_err(fatal("listen to signals"))?;
        // Before anything is opened: mounts can be copied only out of the namespace that one is in.
        own_mounts().map_err(fatal("make a mount namespace of its own"))?;
        let lock = lock(&config.data_dir).map_err(fatal("take over from the launcher before"))?;
        // Before `/dev` and `/sys` are let go of.
        let store = Store::open(&config.data_dir, &config.store)
            .map_err(|StoreError { doing, source }| LauncherError { doing, source })?;
        let places = Places::open(&config.data_dir, store).map_err(fatal("open the data directory"))?;
        remove_unfinished_images(&places).map_err(fatal("remove unfinished images"))?;
        places.layers.sweep().map_err(fatal("remove unfinished layers"))?;
        let cgroups = Cgroups::open(config.installation).map_err(fatal("prepare cgroups"))?;
        let filters = Filters::compile().map_err(|e| fatal("compile filters")(io::Error::other(e)))?;
        let init = embedded_init().map_err(fatal("prepare init"))?;
        let system = harmless_sys().map_err(fatal("prepare /sys"))?;
        drop_foreign_mounts(&config.data_dir).map_err(fatal("let go of the machine's mounts"))?;
        places.store.attach(&config.data_dir).map_err(fatal("attach the store"))?;
        let devices = shared_dev().map_err(fatal("prepare /dev"))?;
        make_stage(&places, [(Shared::Devices, devices), (Shared::System, system)])
            .map_err(fatal("prepare its staging directory"))?;
        let (slots_in, slots_out) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .map_err(fatal("make a socket pair"))?;
        Ok(Self {
            pid: Some(rustix::process::getpid()),
            _lock: lock,
            socket,
            signals,
            slots_in,
            slots_out,
            places,
            cgroups,
            filters,
            init,
            slots: HashMap::new(),
            walkers: HashMap::new(),
            waiting: Vec::new(),
        })
    }

    fn serve(mut self) -> Result<(), LauncherError> {
        loop {
            let mut fds = [
                PollFd::new(&self.socket, PollFlags::IN),
                PollFd::new(&self.signals, PollFlags::IN),
                PollFd::new(&self.slots_in, PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(fatal("wait for requests")(e)),
            }
            let [requests, signals, slots] = fds.map(|fd| !fd.revents().is_empty());
            // Slots first, so that a launch finds what was made ready for it.
            if slots {
                self.take_slot().map_err(fatal("take a slot over"))?;
            }
            if signals {
                self.reap().map_err(fatal("reap"))?;
            }
            if requests && !self.take_request().map_err(fatal("read a request"))? {
                return Ok(());
            }
        }
    }

    /// Reads one request and clones its walker. `false` when the daemon has gone.
    fn take_request(&mut self) -> io::Result<bool> {
        let mut packet = vec![0; PACKET_MAX];
        let length = match rustix::net::recv(&self.socket, packet.as_mut_slice(), RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Ok(false),
            Ok((length, _)) => length,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(true),
            Err(Errno::CONNRESET) => return Ok(false),
            Err(e) => return Err(e.into()),
        };
        let Some(request) = from_packet::<Request>(&packet[..length]) else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a request that does not parse"));
        };
        if let Ask::Hello { version, .. } = request.ask {
            let result = if version == VERSION {
                Ok(Answer::Hello { version: VERSION })
            } else {
                Err(Failure {
                    doing: format!("speak version {version} with a launcher of {VERSION}"),
                    errno: 0,
                })
            };
            self.reply(request.serial, result)?;
            return Ok(true);
        }
        self.start_walker(request)?;
        Ok(true)
    }

    fn start_walker(&mut self, request: Request) -> io::Result<()> {
        if let Ask::Teardown { sandbox } = request.ask
            && self.end_launches_of(sandbox)
        {
            self.waiting.push(request);
            return Ok(());
        }
        let (slot, launches) = match &request.ask {
            Ask::Launch(plan) => (self.slots.remove(&plan.base), Some(plan.sandbox)),
            _ => (None, None),
        };
        match sys::fork_process() {
            Ok(Cloned::Parent { pid }) => {
                self.walkers.insert(pid as i32, Walker { serial: request.serial, launches });
                Ok(())
            }
            Ok(Cloned::Child) => {
                // A walker dies with the launcher, so that nothing goes on behind the back of whoever cleans up after it.
                // (Not so init: the signal is not inherited.)
                let bound = set_parent_process_death_signal(Some(Signal::KILL));
                // It may have died before it could be said.
                if bound.is_err() || rustix::process::getppid() != self.pid {
                    sys::exit_now(UNANSWERED);
                }
                let result = self.walk(request.serial, request.ask, slot);
                let code = if self.reply(request.serial, result).is_ok() { ANSWERED } else { UNANSWERED };
                sys::exit_now(code);
            }
            Err(e) => self.reply(request.serial, Err(failure("fork a walker", &e))),
        }
    }

    /// Ends the launches of a sandbox that is to go; tells whether there were any. A teardown beside a launch could finish first,
    /// and what the launch then makes would be nobody's, on ids that somebody else may have by then.
    fn end_launches_of(&self, sandbox: SandboxId) -> bool {
        let mut any = false;
        for (pid, _) in self.walkers.iter().filter(|(_, walker)| walker.launches == Some(sandbox)) {
            any = true;
            if let Some(pid) = Pid::from_raw(*pid) {
                // A child that is not reaped yet: the number is its own. If it has ended already, all the better.
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
        }
        any
    }

    /// Starts the teardowns whose launches have ended.
    fn start_waiting(&mut self) -> io::Result<()> {
        let waiting = std::mem::take(&mut self.waiting);
        waiting.into_iter().try_for_each(|request| self.start_walker(request))
    }

    /// Collects walkers and inits that ended. A walker that did not answer is answered for.
    fn reap(&mut self) -> io::Result<()> {
        let mut drained = [0u8; 1024];
        while matches!(rustix::io::read(&self.signals, &mut drained), Ok(1..)) {}
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => {
                    let Some(Walker { serial, .. }) = self.walkers.remove(&pid.as_raw_nonzero().get()) else {
                        continue;
                    };
                    if status.exit_status() != Some(ANSWERED) {
                        let died = Failure { doing: "finish: the walker died".into(), errno: 0 };
                        self.reply(serial, Err(died))?;
                    }
                }
                Ok(None) | Err(Errno::CHILD) => return self.start_waiting(),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    fn take_slot(&mut self) -> io::Result<()> {
        let mut base = [0; 4];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        match recvmsg(&self.slots_in, &mut [io::IoSliceMut::new(&mut base)], &mut ancillary, flags) {
            Ok(_) => {}
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(e) => return Err(e.into()),
        }
        let mut fds = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        if let Some(mut fds) = fds.next()
            && let (Some(user), Some(net)) = (fds.next(), fds.next())
        {
            self.slots.insert(u32::from_le_bytes(base), Slot { user, net });
        }
        Ok(())
    }

    fn reply(&self, serial: u64, result: Result<Answer, Failure>) -> io::Result<()> {
        match send(&self.socket, &to_packet(&Reply { serial, result }), SendFlags::NOSIGNAL) {
            // The daemon has gone; the loop will see that too.
            Ok(_) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }
}

/// What a walker does: one request, in a process of its own.
impl Launcher {
    fn walk(&mut self, serial: u64, ask: Ask, slot: Option<Slot>) -> Result<Answer, Failure> {
        match ask {
            Ask::Hello { .. } => Ok(Answer::Hello { version: VERSION }),
            Ask::PrepareHostImage { thorough } => self.prepare_host_image(thorough),
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
                self.places.store.make_volume(volume, size_bytes, from).map_err(refused("make a volume"))?;
                Ok(Answer::Done)
            }
            Ask::ResizeVolume { volume, size_bytes } => {
                self.places.store.resize_volume(volume, size_bytes).map_err(refused("resize a volume"))?;
                Ok(Answer::Done)
            }
            Ask::RemoveVolume { volume } => {
                self.places.store.remove_volume(volume).map_err(refused("remove a volume"))?;
                Ok(Answer::Done)
            }
            Ask::VolumeUsage { volume } => {
                let files = self.volume(volume)?;
                let DiskUsage { bytes, complete } =
                    self.places.store.usage(files).map_err(refused("look at a volume's files"))?;
                Ok(Answer::DiskUsage { bytes, complete })
            }
            Ask::Volumes { after } => {
                let mut volumes = self.places.store.volumes().map_err(refused("list volumes"))?;
                volumes.retain(|volume| after.is_none_or(|after| *volume > after));
                volumes.truncate(VOLUMES_PAGE);
                Ok(Answer::Volumes(volumes))
            }
            Ask::Store => {
                let Store { facts, note, .. } = &self.places.store;
                Ok(Answer::Store { facts: *facts, note: note.clone() })
            }
            Ask::StoreUsage => {
                let space = self.places.store.space().map_err(refused("see how much the store holds"))?;
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
                .current_generation()
                .map_err(refused("find the image `host`"))?
                .ok_or_else(|| Failure { doing: "find the image `host`".into(), errno: libc::ENOENT })?,
            // Generations begin with 1.
            Rootfs::Layers(_) => 0,
        };
        let overlays = plan::overlays(&plan.rootfs);
        let place = self
            .places
            .make_sandbox(plan.sandbox, plan.base, generation, &overlays, plan.limits.disk_bytes)
            .map_err(refused("make the sandbox's directory"))?;
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
        let flags = libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOSUID;
        let writable = idmapped(place.fs.as_fd(), "", flags, &user)
            .map_err(refused("map the ids of the writable layer"))?;
        trees.insert(Tree::Writable, writable);
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
                // A child of the loop, which lives and reaps; this walker will be gone.
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
                // If even this cannot be written, the exit code still says that it failed.
                let _ = report.write_all(&to_packet(&failure));
                sys::exit_now(1)
            }
            Cloned::Parent { pid } => {
                drop(report);
                let mut said = Vec::new();
                // Ends when init is executed, which closes the pipe, or when the process is gone.
                errors.read_to_end(&mut said).map_err(refused("hear of init's start"))?;
                match said.as_slice() {
                    [] => Ok(Answer::Launched { pid }),
                    said => Err(from_packet(said).unwrap_or(Failure {
                        doing: "start init for a reason it could not say".into(),
                        errno: 0,
                    })),
                }
            }
        }
    }

    fn volume(&self, volume: VolumeId) -> Result<OwnedFd, Failure> {
        let found = self.places.store.volume(volume).map_err(refused("open a volume"))?;
        found.ok_or_else(|| Failure { doing: "find a volume's files".into(), errno: libc::ENOENT })
    }

    fn teardown(&self, sandbox: SandboxId) -> Result<Answer, Failure> {
        // Both are tried, so that one obstacle does not leave more behind than it must.
        let groups = self.cgroups.remove(sandbox).map_err(refused("end the sandbox's processes"));
        let files = self.places.remove_sandbox(sandbox).map_err(refused("remove the sandbox's files"));
        groups.and(files).map(|()| Answer::Done)
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
    fn layers(&self, rootfs: &Rootfs, generation: u64) -> Result<(BorrowedFd<'_>, Vec<String>), Failure> {
        let too_many = |layers: &[Digest], most: usize| match layers.len() {
            1.. if layers.len() <= most => Ok(()),
            count => Err(Failure { doing: format!("mount an image of {count} layers"), errno: libc::EINVAL }),
        };
        let text = |path: std::path::PathBuf| path.to_string_lossy().into_owned();
        let host = |name: &str| text(self.places.host_images().1.join(generation.to_string()).join(name));
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

    /// Makes a layer, in a process that can reach nothing else. See `unpacker`.
    fn unpack_layer(
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
                let filters = &self.filters;
                let materials = unpacker::Materials { top, parts, user, net, filters, blob, report };
                unpacker::run(materials, &wanted.from)
            }
            Cloned::Parent { pid } => Pid::from_raw(pid as i32).expect("a child has a positive pid"),
        };
        drop((report, blob));
        let mut told: Option<std::time::Instant> = None;
        let done = unpacker::listen(&mut listening, |bytes| {
            // Whatever the process says, the daemon hears of it a few times a second.
            if told.is_some_and(|told| told.elapsed() < PROGRESS_STEP) {
                return Ok(());
            }
            told = Some(std::time::Instant::now());
            self.reply(serial, Ok(Answer::Unpacking { bytes }))
        });
        // It has said its last word, whatever it does now.
        let _ = rustix::process::kill_process(pid, Signal::KILL);
        rustix::process::waitpid(Some(pid), WaitOptions::empty()).map_err(refused("wait"))?;
        match done.map_err(refused("hear of a layer"))? {
            Some(done) => Ok(done),
            None => Err(Failure { doing: "unpack a layer: the process that read it died".into(), errno: 0 }),
        }
    }

    /// What a sandbox has written, each part with what it lies over.
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
        // The generation that it was made with, and not the newest.
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
        plan::overlays(&rootfs).into_iter().map(part).collect()
    }

    fn prepare_host_image(&self, thorough: bool) -> Result<Answer, Failure> {
        let (dir, path) = self.places.host_images();
        let stamp = host_image::stamp().map_err(refused("look at the machine"))?;
        let hidden = if thorough { Some(host_image::hidden().map_err(image_failure)?) } else { None };
        let current = self.current_generation().map_err(refused("list generations"))?;
        if let Some(current) = current {
            let image = path.join(current.to_string());
            let same = |file: &str, now: &str| {
                std::fs::read_to_string(image.join(file)).is_ok_and(|then| then == now)
            };
            if same("stamp", &stamp) && hidden.as_ref().is_none_or(|hidden| same("hidden", hidden)) {
                return Ok(Answer::Prepared { generation: current });
            }
        }
        // Two walkers may build at once; each has its own name, and the rename of one of them wins.
        let unfinished = format!("{UNFINISHED}{}", rustix::process::getpid().as_raw_nonzero());
        let next = current.map_or(1, |current| current + 1);
        remove_tree(dir, &unfinished).map_err(refused("remove an unfinished image"))?;
        let building = path.join(&unfinished);
        let built = std::fs::create_dir(&building)
            .map_err(refused("make a directory for the image"))
            .and_then(|()| host_image::build(&building).map_err(image_failure));
        let named = built.and_then(|()| {
            std::fs::write(building.join("stamp"), &stamp).map_err(refused("write the image's stamp"))?;
            match std::fs::rename(&building, path.join(next.to_string())) {
                Err(e)
                    if e.raw_os_error() == Some(libc::ENOTEMPTY)
                        || e.kind() == io::ErrorKind::AlreadyExists =>
                {
                    Ok(())
                }
                other => other.map_err(refused("name the image")),
            }
        });
        let cleaned = remove_tree(dir, &unfinished).map_err(refused("remove an unfinished image"));
        named.and(cleaned)?;
        self.drop_old_generations(next).map_err(refused("remove old images"))?;
        Ok(Answer::Prepared { generation: next })
    }

    fn current_generation(&self) -> io::Result<Option<u64>> {
        Ok(self.generations()?.into_iter().max())
    }

    fn generations(&self) -> io::Result<Vec<u64>> {
        let names = names(self.places.host_images().0)?;
        Ok(names.iter().filter_map(|name| name.parse().ok()).collect())
    }

    /// Keeps what sandboxes use, the newest, and the one before: a launch may just now be reading it.
    fn drop_old_generations(&self, newest: u64) -> io::Result<()> {
        let used = self.places.generations_in_use()?;
        for generation in self.generations()? {
            if generation + 1 < newest && !used.contains(&generation) {
                remove_tree(self.places.host_images().0, &generation.to_string())?;
            }
        }
        Ok(())
    }
}

/// Waits until the launcher before and all its walkers are gone: walkers inherit the lock, and init, which is executed, does not.
/// Otherwise a launch that the old one still works on could appear after the new daemon has taken its inventory.
fn lock(data_dir: &std::path::Path) -> io::Result<std::fs::File> {
    use std::os::unix::fs::OpenOptionsExt;
    let path = data_dir.join("launcher.lock");
    let file = std::fs::OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    let deadline = std::time::Instant::now() + LOCK_DEADLINE;
    loop {
        match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK) if std::time::Instant::now() < deadline => std::thread::sleep(LOCK_STEP),
            Err(e) => return Err(e.into()),
        }
    }
}

/// What a launcher that was killed had begun. Its walkers died with it.
fn remove_unfinished_images(places: &Places) -> io::Result<()> {
    let dir = places.host_images().0;
    let unfinished = names(dir)?.into_iter().filter(|name| name.starts_with(UNFINISHED));
    unfinished.into_iter().try_for_each(|name| remove_tree(dir, &name))
}

fn image_failure(error: host_image::ImageError) -> Failure {
    let errno = match &error {
        host_image::ImageError::Io { source, .. } => source.raw_os_error().unwrap_or(0),
        host_image::ImageError::NotMerged { .. } => 0,
    };
    Failure { doing: format!("build the image `host`: {error}"), errno }
}

fn make_slot(base: u32) -> Result<Slot, Failure> {
    slot::make(base).map_err(|e| failure(e.doing, &e.source))
}

fn idmapped(dir: rustix::fd::BorrowedFd<'_>, path: &str, flags: u64, user: &OwnedFd) -> io::Result<OwnedFd> {
    let tree = cut_out(dir, path, false)?;
    sys::set_mount_attributes(tree.as_fd(), flags, Some(user.as_fd()), false)?;
    Ok(tree)
}

/// Init in memory: sealed, so that nothing changes it, and executable but not readable for guests, so that none may
/// trace it either (CVE-2019-5736).
fn embedded_init() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = memfd_create("shoal-init", flags)?;
    io::Write::write_all(&mut std::fs::File::from(memory.try_clone()?), INIT)?;
    fchmod(&memory, Mode::from_raw_mode(0o111))?;
    fcntl_add_seals(&memory, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    // A file that is open for writing cannot be executed, so it is opened again and the first descriptor closed.
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    Ok(openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// A mount namespace of the launcher's own, in which the host's later mounts still appear and none of ours leave.
fn own_mounts() -> io::Result<()> {
    sys::unshare(UnshareFlags::NEWNS)?;
    Ok(mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?)
}

/// Every new sandbox copies the launcher's mounts and throws them away; fewer are quicker. What stays: the root, `/proc`, and what holds
/// the data directory or something that goes into the image `host`.
fn drop_foreign_mounts(data_dir: &std::path::Path) -> io::Result<()> {
    let mountinfo = std::fs::read_to_string("/proc/self/mountinfo")?;
    let points: Vec<&str> = mountinfo.lines().filter_map(|line| line.split(' ').nth(4)).collect();
    // The last mounted lies on top, so it goes first.
    for point in points.into_iter().rev() {
        let path = std::path::Path::new(point);
        let needed = point == "/"
            || path == std::path::Path::new("/proc")
            || data_dir.starts_with(path)
            || host_image::SOURCES.iter().any(|source| std::path::Path::new(source).starts_with(path))
            // Names with escaped characters are rare and harmless: they stay.
            || point.contains('\\');
        if !needed {
            match unmount(point, UnmountFlags::DETACH) {
                // Gone with one that it lay on.
                Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
    Ok(())
}

/// `/dev` for all sandboxes: device nodes made by the host's root, on a mount that allows them and is read-only.
fn shared_dev() -> io::Result<OwnedFd> {
    let flags = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let dev = enter::mount("tmpfs", &[("mode", "0755"), ("size", "64k")], flags)?;
    for (name, minor) in [("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9)] {
        let device = rustix::fs::makedev(1, minor);
        mknodat(&dev, name, rustix::fs::FileType::CharacterDevice, Mode::from_raw_mode(0o666), device)?;
    }
    let tty = rustix::fs::makedev(5, 0);
    mknodat(&dev, "tty", rustix::fs::FileType::CharacterDevice, Mode::from_raw_mode(0o666), tty)?;
    for (to, name) in [
        ("pts/ptmx", "ptmx"),
        ("/proc/self/fd", "fd"),
        ("/proc/self/fd/0", "stdin"),
        ("/proc/self/fd/1", "stdout"),
        ("/proc/self/fd/2", "stderr"),
    ] {
        symlinkat(to, &dev, name)?;
    }
    for name in ["pts", "shm"] {
        mkdirat(&dev, name, Mode::from_raw_mode(0o755))?;
    }
    sys::set_mount_attributes(dev.as_fd(), libc::MOUNT_ATTR_RDONLY, None, false)?;
    Ok(dev)
}

/// `/sys` for all sandboxes: what programs ask about processors, and nothing else.
fn harmless_sys() -> io::Result<OwnedFd> {
    let flags = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NOEXEC
        | MountAttrFlags::MOUNT_ATTR_NODEV;
    let sys = enter::mount("tmpfs", &[("mode", "0755"), ("size", "64k")], flags)?;
    for name in
        ["devices", "devices/system", "devices/system/cpu", "fs", "fs/cgroup", "kernel", "class", "block"]
    {
        mkdirat(&sys, name, Mode::from_raw_mode(0o755))?;
    }
    // Copied, not bound: these few files do not change while a machine runs, and a bind would bring sysfs in.
    for name in ["online", "possible", "present"] {
        let from = format!("/sys/devices/system/cpu/{name}");
        let Ok(text) = std::fs::read(&from) else { continue };
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
        let file = openat(&sys, format!("devices/system/cpu/{name}"), flags, Mode::from_raw_mode(0o444))?;
        rustix::io::write(&file, &text)?;
    }
    sys::set_mount_attributes(sys.as_fd(), libc::MOUNT_ATTR_RDONLY, None, false)?;
    Ok(sys)
}

/// The staging area: a small read-only file system with a place for every layer. The launcher stands in it, so that
/// whoever it clones stands in its own copy.
fn make_stage(places: &Places, shared: [(Shared, OwnedFd); 2]) -> io::Result<()> {
    let flags = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NOEXEC
        | MountAttrFlags::MOUNT_ATTR_NODEV;
    let stage = enter::mount("tmpfs", &[("mode", "0755"), ("size", "256k")], flags)?;
    for number in 0..enter::STAGE_LAYERS {
        mkdirat(&stage, enter::layer_name(number), Mode::from_raw_mode(0o555))?;
    }
    let fixed = [enter::STAGE_ROOT, enter::STAGE_WRITABLE, enter::STAGE_EMPTY_DIRECTORY];
    let shared_names = shared.iter().map(|(shared, _)| enter::stage_name(*shared));
    for name in fixed.into_iter().chain(shared_names) {
        mkdirat(&stage, name, Mode::from_raw_mode(0o555))?;
    }
    let create = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
    openat(&stage, enter::STAGE_EMPTY_FILE, create, Mode::from_raw_mode(0o444))?;
    sys::set_mount_attributes(stage.as_fd(), libc::MOUNT_ATTR_RDONLY, None, false)?;
    let onto =
        openat(CWD, places.stage(), OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    enter::attach_onto(&stage, &onto)?;
    rustix::process::fchdir(&stage)?;
    for (shared, tree) in shared {
        enter::attach(&tree, CWD, enter::stage_name(shared))?;
    }
    Ok(())
}

fn failure(doing: &str, source: &io::Error) -> Failure {
    let errno = source.raw_os_error().unwrap_or(0);
    // A message of our own says more than a number; the number alone is turned into words by the reader.
    let doing = if errno == 0 { format!("{doing}: {source}") } else { doing.into() };
    Failure { doing, errno }
}

fn refused<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> Failure {
    move |source| failure(doing, &source.into())
}
