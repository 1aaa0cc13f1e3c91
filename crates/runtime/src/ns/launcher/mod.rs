//! The launcher: the only privileged process, and the only process that forks.
//!
//! Its one thread reads requests and clones a walker for each, so a hung mount blocks one walker and nothing else. Walkers answer
//! the daemon over the socket they inherit; the loop answers for a walker that died. The launcher holds no state that cannot be
//! rebuilt, so it may be killed at any time: sandboxes outlive it, and the daemon starts another. It ends when the daemon closes
//! its end of the socket.
//!
//! ```text
//! daemon ──Request──▶ loop ──clone──▶ walker ──clone, CLONE_PARENT──▶ init        (child of the loop, which reaps it)
//!    ▲                                   │
//!    └────────────────Reply──────────────┘
//! ```

mod diff;
mod egress;
mod export;
mod layers;
mod network;
mod walk;
mod world;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};
use rustix::process::{Pid, Signal, WaitOptions, set_parent_process_death_signal, wait};
use wire::launch::{Answer, Ask, Failure, PACKET_MAX, Reply, Request, VERSION, from_packet, to_packet};
use wire::{InstallationId, SandboxId};

use crate::ns::cgroup::Cgroups;
use crate::ns::packets;
use crate::ns::plan::Shared;
use crate::ns::seccomp::Filters;
use crate::ns::slots::Slot;
use crate::storage::places::Places;
use crate::storage::pool::{StoragePool, StoragePoolError, StoreConfig};
use crate::sys::{self, Cloned};

/// The daemon passes the socket as standard input, which needs no code between fork and exec.
const SOCKET: i32 = 0;
/// Descriptors below this number are for programs that are executed; the launcher's own are at or above it.
const OWN_DESCRIPTORS_FROM: i32 = 16;

/// What the launcher is started with.
#[derive(Debug, Clone)]
pub struct LauncherConfig {
    /// The daemon's data directory.
    pub data_dir: PathBuf,
    /// The installation that its sandboxes belong to.
    pub installation: InstallationId,
    /// Where writable files are kept.
    pub store: StoreConfig,
}

/// Why the launcher could not start or continue.
#[derive(Debug, thiserror::Error)]
#[error("the launcher cannot {doing}")]
pub struct LauncherError {
    /// As it reads after "cannot".
    pub doing: String,
    /// The error from the kernel.
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
        // The daemon waits for a greeting: answer with the reason instead. If that fails, the process reports it.
        Err(error) => tell_why(&to_daemon, &error).map_err(|_| error),
    }
}

/// Answers the first request with the reason why the launcher could not start.
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
    _lock: File,
    socket: OwnedFd,
    signals: OwnedFd,
    /// Walkers hand finished slots to the loop through this pair.
    slots_in: OwnedFd,
    slots_out: OwnedFd,
    places: Places,
    cgroups: Cgroups,
    filters: Filters,
    init: OwnedFd,
    /// The program of this process, which also contains egress.
    program: OwnedFd,
    /// The daemon's mount namespace.
    host_mounts: OwnedFd,
    /// Prepared slots, by the base of their range.
    slots: HashMap<u32, Slot>,
    /// Running walkers, by pid.
    walkers: HashMap<i32, Walker>,
    /// Teardowns that wait until a launch of the same sandbox has ended.
    waiting: Vec<Request>,
}

/// The inputs of a request, and the descriptors of its answer.
struct Parts<'a> {
    /// Namespaces that were made ahead of a launch.
    slot: Option<Slot>,
    /// Descriptors from the daemon.
    given: Vec<OwnedFd>,
    /// Descriptors for the daemon.
    handed: &'a mut Vec<OwnedFd>,
}

/// A request in progress.
struct Walker {
    /// The request to answer.
    serial: u64,
    /// The sandbox that it launches, if it launches one.
    launches: Option<SandboxId>,
}

/// The exit code of a walker that has answered.
const ANSWERED: i32 = 0;
const UNANSWERED: i32 = 1;

impl Launcher {
    fn start(config: &LauncherConfig, socket: OwnedFd) -> Result<Self, LauncherError> {
        // Signals to the daemon's terminal or process group must not end the launcher.
        rustix::process::setsid().map_err(fatal("leave its session"))?;
        rustix::process::umask(Mode::empty());
        let signals = [libc::SIGCHLD, libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGPIPE];
        let signals = sys::signals_as_descriptor(&signals).map_err(fatal("listen to signals"))?;
        let program = world::own_program().map_err(fatal("open its own program"))?;
        let host_mounts = world::mount_namespace().map_err(fatal("open the machine's mount namespace"))?;
        // Before anything else is opened: a process can copy mounts only from its own mount namespace.
        world::own_mounts().map_err(fatal("make a mount namespace of its own"))?;
        let lock = world::lock(&config.data_dir).map_err(fatal("take over from the launcher before"))?;
        // While `/dev` and `/sys` are still mounted.
        let pool = StoragePool::open(&config.data_dir, &config.store)
            .map_err(|StoragePoolError { doing, source }| LauncherError { doing, source })?;
        let places = Places::open(&config.data_dir, pool).map_err(fatal("open the data directory"))?;
        places.host_images.sweep().map_err(fatal("remove unfinished images"))?;
        places.layers.sweep().map_err(fatal("remove unfinished layers"))?;
        let cgroups = Cgroups::open(config.installation).map_err(fatal("prepare cgroups"))?;
        crate::ns::shown::prepare();
        let filters = Filters::compile().map_err(|e| fatal("compile filters")(io::Error::other(e)))?;
        let init = world::embedded_init().map_err(fatal("prepare init"))?;
        let system = world::harmless_sys().map_err(fatal("prepare /sys"))?;
        world::drop_foreign_mounts(&config.data_dir).map_err(fatal("drop the machine's mounts"))?;
        places.pool.attach(&config.data_dir).map_err(fatal("attach the store"))?;
        let devices = world::shared_dev().map_err(fatal("prepare /dev"))?;
        world::make_stage(&places, [(Shared::Devices, devices), (Shared::System, system)])
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
            program,
            host_mounts,
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
            // Slots first, so that a launch finds the slot that was prepared for it.
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
        let (length, given) = match packets::receive(&self.socket, &mut packet, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Ok(false),
            Ok(received) => received,
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
        if let Ask::FilesMark { sandbox } = request.ask {
            // Two quick questions to the file system; a history asks them before every command.
            let mark = self.places.pool.mark(sandbox).map_err(refused("look at the sandbox's files"));
            self.reply(request.serial, mark.map(Answer::FilesMark))?;
            return Ok(true);
        }
        self.start_walker(request, given)?;
        Ok(true)
    }

    /// `given` are the descriptors that came with the request.
    fn start_walker(&mut self, request: Request, given: Vec<OwnedFd>) -> io::Result<()> {
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
                // A walker dies with the launcher, so that nothing changes while its successor cleans up. Init does not die: it does
                // not inherit this signal.
                let bound = set_parent_process_death_signal(Some(Signal::KILL));
                // The launcher may have died before this call.
                if bound.is_err() || rustix::process::getppid() != self.pid {
                    sys::exit_now(UNANSWERED);
                }
                let mut handed = Vec::new();
                let result =
                    self.walk(request.serial, request.ask, Parts { slot, given, handed: &mut handed });
                let answered = self.reply_with(request.serial, result, &handed);
                let code = if answered.is_ok() { ANSWERED } else { UNANSWERED };
                sys::exit_now(code);
            }
            Err(e) => self.reply(request.serial, Err(failure("fork a walker", &e))),
        }
    }

    /// Kills the launches of a sandbox that is to be torn down; returns whether there were any. A teardown during a launch could
    /// finish first; the launch would then create things that belong to no sandbox, on ids that may be in use again.
    fn end_launches_of(&self, sandbox: SandboxId) -> bool {
        let mut any = false;
        for (pid, _) in self.walkers.iter().filter(|(_, walker)| walker.launches == Some(sandbox)) {
            any = true;
            if let Some(pid) = Pid::from_raw(*pid) {
                // The child is not reaped yet, so the pid is still its own. Failure means that it has ended already.
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
        }
        any
    }

    /// Starts the teardowns that were waiting for a launch.
    fn start_waiting(&mut self) -> io::Result<()> {
        let waiting = std::mem::take(&mut self.waiting);
        waiting.into_iter().try_for_each(|request| self.start_walker(request, Vec::new()))
    }

    /// Reaps walkers and inits that have ended, and answers for a walker that did not.
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
        self.reply_with(serial, result, &[])
    }

    fn reply_with(&self, serial: u64, result: Result<Answer, Failure>, handed: &[OwnedFd]) -> io::Result<()> {
        let packet = to_packet(&Reply { serial, result });
        match packets::send(&self.socket, &packet, handed, SendFlags::NOSIGNAL) {
            // The daemon is gone; the loop will notice.
            Ok(_) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }
}

fn failure(doing: &str, source: &io::Error) -> Failure {
    let errno = source.raw_os_error().unwrap_or(0);
    // Our own message says more than a number; the reader turns a bare number into words.
    let doing = if errno == 0 { format!("{doing}: {source}") } else { doing.into() };
    Failure { doing, errno }
}

fn refused<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> Failure {
    move |source| failure(doing, &source.into())
}
