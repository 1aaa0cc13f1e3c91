//! Init: the first process inside every sandbox.
//!
//! Init starts commands, carries their streams, keeps their output until the daemon has stored it, ends what must
//! end, and reaps orphans. It has one thread and one loop, which blocks only in the kernel's watch. The protocol is
//! that of [`wire::guest`]. Init knows nothing of the daemon, of images or of other sandboxes, and the host does not
//! trust it once guest code has run.
//!
//! ```text
//! shoal-init [--no-cgroup] [--listen-fd N] [--cgroup-fd N] [--oom-score-fd N]
//! ```
//!
//! Descriptor 3 is a listening socket for connections of the daemon; descriptor 4 the directory of the sandbox's own
//! cgroup, in which every command gets a child; descriptor 5 init's own `/proc/self/oom_score_adj`, open for reading
//! and writing.
//!
//! Read in this order: this file is the loop and interprets messages; `command` is one command's life, `table` all of
//! them and their turns; `streams` windows and pipes, `pace` how often they are read; `connection` the daemon's
//! socket; `spawn` everything up to a running program, with `users`; `files` file operations in a child; `tree` a
//! command's processes; `timers` its deadlines; `netlink` how many sockets of that kind there may be; `watch` the kernel's watch; `sys`
//! everything unsafe.

mod command;
mod connection;
mod files;
mod netlink;
mod pace;
mod spawn;
mod streams;
mod sys;
mod table;
mod timers;
mod tree;
mod users;
mod watch;

use std::convert::Infallible;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::process::ExitCode;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use rustix::process::{DumpableBehavior, Resource, Rlimit, WaitOptions, WaitStatus};
use rustix::time::ClockId;
use wire::frame::Incoming;
use wire::guest::{
    COMMANDS_MAX, EndCause, ExitStatus, FromInit, Handle, Program, Start, StartError, Stream, ToInit,
    Versions, speaks, spoken,
};

use command::{Command, Life};
use connection::{Connection, Fault};
use netlink::Netlink;
use pace::Pace;
use spawn::{Report, Surroundings};
use table::Table;
use timers::{Clock, Deadlines, Due, Schedule};
use tree::{Groups, OomScore, Tree};
use watch::{Happening, Watch, Watched};

/// The protocol versions that this init speaks.
#[used]
static SPEAKS: [u8; 27] = speaks("shoal-init speaks ");
/// Reads from the daemon in one turn, before everything else gets a turn.
const READS_PER_TURN: usize = 4;
/// Children reaped in one turn, before everything else gets a turn.
const REAPS_PER_TURN: usize = 256;
/// After this long without any event, buffers are returned to the kernel: an idle init should cost next to nothing.
const RELEASE_AFTER_MS: u64 = 100;
/// How long to wait before accepting a connection again after a failure.
const ACCEPT_AGAIN_AFTER_MS: u64 = 50;

fn main() -> ExitCode {
    // The kernel named this process after the memory it was executed from; `ps` should show a useful name. A failure
    // does not matter.
    let _ = rustix::thread::set_name(c"shoal-init");
    sys::prefer_small_memory();
    let result = Options::parse(std::env::args().skip(1)).and_then(Init::set_up).and_then(Init::run);
    let Err(error) = result;
    // Before the loop runs, stderr belongs to the launcher; afterwards nothing here can fail.
    eprintln!("shoal-init: {error}");
    ExitCode::FAILURE
}

/// Why init could not start.
#[derive(Debug, thiserror::Error)]
enum InitError {
    #[error("unknown argument `{0}`")]
    Argument(String),
    #[error("cannot use descriptor {number}, the {what}: {source}")]
    Adopt { number: RawFd, what: &'static str, source: io::Error },
    #[error("cannot {doing}: {source}")]
    Kernel { doing: &'static str, source: io::Error },
}

fn cannot<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> InitError {
    move |error| InitError::Kernel { doing, source: error.into() }
}

/// The command line.
#[derive(Debug, PartialEq, Eq)]
struct Options {
    listener: RawFd,
    /// `None`: without cgroups.
    group: Option<RawFd>,
    oom_score: RawFd,
}

impl Options {
    fn parse(arguments: impl Iterator<Item = String>) -> Result<Self, InitError> {
        let mut options = Self { listener: 3, group: Some(4), oom_score: 5 };
        let mut arguments = arguments;
        while let Some(argument) = arguments.next() {
            let mut number = || {
                let text = arguments.next().unwrap_or_default();
                text.parse().ok().filter(|number| *number > 2).ok_or(InitError::Argument(text))
            };
            match argument.as_str() {
                "--no-cgroup" => options.group = None,
                "--listen-fd" => options.listener = number()?,
                "--cgroup-fd" => options.group = Some(number()?),
                "--oom-score-fd" => options.oom_score = number()?,
                _ => return Err(InitError::Argument(argument)),
            }
        }
        match options.group {
            Some(group) if group == options.listener => Err(InitError::Argument("--cgroup-fd".into())),
            _ if options.oom_score == options.listener || options.group == Some(options.oom_score) => {
                Err(InitError::Argument("--oom-score-fd".into()))
            }
            _ => Ok(options),
        }
    }
}

/// The whole state.
struct Init {
    watch: Watch,
    listener: OwnedFd,
    children: OwnedFd,
    surroundings: Surroundings,
    /// `None`: guests have no netlink sockets.
    netlink: Option<Netlink>,
    connection: Option<Connection>,
    table: Table,
    pace: Pace,
    clock: Clock,
    /// Where the kernel counts how long init waits for the processor, if it does.
    waits: Option<std::fs::File>,
    schedule: Schedule,
    /// How many commands have not executed their program yet.
    launched: usize,
    /// Commands whose cgroups should be checked once everything else is done.
    groups_to_remove: Vec<Handle>,
    /// The command that is likely to be requested next.
    next_handle: Handle,
    /// There may be more children to reap than one turn allows.
    reap_again: bool,
    /// There may be more calls to decide about than one turn allows.
    decide_again: bool,
    /// A connection is waiting that could not be accepted for lack of a resource.
    accept_again: bool,
    /// Something happened since memory was last returned.
    holds_memory: bool,
}

impl Init {
    fn set_up(options: Options) -> Result<Self, InitError> {
        let adopt =
            |number, what| sys::adopt(number).map_err(|source| InitError::Adopt { number, what, source });
        let listener = adopt(options.listener, "listening socket")?;
        let tree = match options.group {
            Some(number) => Tree::Groups(Groups::new(adopt(number, "cgroup directory")?)),
            None => Tree::Walk,
        };
        let oom_score = adopt(options.oom_score, "OOM score")?;
        sys::close_on_exec_from(3).map_err(cannot("mark descriptors"))?;
        rustix::fs::fcntl_setfl(&listener, OFlags::NONBLOCK)
            .map_err(cannot("set up the listening socket"))?;
        let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(cannot("open /dev/null"))?;
        let oom_score = OomScore::new(oom_score.into()).map_err(cannot("set the order of OOM victims"))?;
        // Guest processes must not inspect init through /proc, where its descriptors are.
        rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
            .map_err(cannot("hide from /proc"))?;
        // As process 1, init gets all orphans anyway; otherwise this makes it get them.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
            .map_err(cannot("become a reaper"))?;
        let descriptors = raise_descriptor_limit();
        rustix::process::chdir("/").map_err(cannot("enter /"))?;
        let (children, signals) = sys::listen_for_children().map_err(cannot("listen for children"))?;
        let watch = Watch::new().map_err(cannot("watch"))?;
        let netlink = Netlink::watch().map_err(cannot("limit netlink sockets"))?;
        if let Some(netlink) = &netlink {
            watch.add(netlink, Watched::Netlink).map_err(cannot("watch for netlink sockets"))?;
        }
        watch.add(&listener, Watched::Listener).map_err(cannot("watch the listening socket"))?;
        watch.add(&children, Watched::Children).map_err(cannot("watch children"))?;
        Ok(Self {
            watch,
            listener,
            children,
            surroundings: Surroundings { tree, null, descriptors, signals, oom_score },
            netlink,
            connection: None,
            table: Table::default(),
            pace: Pace::default(),
            clock: Clock::new(to_ms(monotonic())),
            waits: std::fs::File::open("/proc/self/schedstat").ok(),
            schedule: Schedule::default(),
            launched: 0,
            groups_to_remove: Vec::new(),
            next_handle: Handle(1),
            reap_again: false,
            decide_again: false,
            accept_again: false,
            holds_memory: true,
        })
    }

    fn run(mut self) -> Result<Infallible, InitError> {
        loop {
            let timeout = self.timeout_ms();
            let asleep = monotonic();
            let happenings = self.watch.wait(timeout).map_err(cannot("wait"))?;
            let awake = monotonic();
            // A gap in the clock only means something if the loop was ticking during that wait.
            self.clock.look(to_ms(awake), !self.schedule.is_empty(), || waited_ms(self.waits.as_ref()));
            if happenings.is_empty() && timeout != Some(0) {
                self.release_memory();
            }
            self.holds_memory |= !happenings.is_empty();
            for happening in happenings {
                self.dispatch(happening);
            }
            if self.reap_again {
                self.reap();
            }
            if self.decide_again {
                self.decide_about_netlink();
            }
            if self.accept_again {
                self.accept();
            }
            self.listen_to_daemon();
            let gained =
                self.table.read_turns(self.clock.now(), &self.watch).map_err(cannot("watch a pipe"))?;
            self.strike_deadlines();
            self.flush()?;
            self.tidy_groups();
            if self.pace.turn(awake.saturating_sub(asleep), gained) && self.timeout_ms() != Some(0) {
                std::thread::sleep(pace::NAP);
            }
        }
    }

    /// How long the loop may sleep.
    fn timeout_ms(&self) -> Option<u64> {
        let connection_busy = self.connection.as_ref().is_some_and(|connection| {
            connection.wants_read(&self.table) || connection.wants_write(&self.table)
        });
        if connection_busy || self.reap_again || self.decide_again || self.table.has_reading() {
            return Some(0);
        }
        let to_deadline = self.schedule.sleep_ms(self.clock.now());
        let to_release = self.holds_memory.then_some(RELEASE_AFTER_MS);
        let to_accept = self.accept_again.then_some(ACCEPT_AGAIN_AFTER_MS);
        [to_deadline, to_release, to_accept].into_iter().flatten().min()
    }

    fn dispatch(&mut self, happening: Happening) {
        let Happening { to, readable, writable, hung_up } = happening;
        match to {
            Watched::Listener => self.accept(),
            Watched::Children => self.reap(),
            Watched::Netlink => self.decide_about_netlink(),
            Watched::Connection | Watched::FullConnection => {
                if let Some(connection) = &mut self.connection {
                    connection.mark(readable, writable);
                }
            }
            Watched::Report(handle) => self.take_report(handle),
            Watched::Stdout(handle) => self.mark_readable(handle, Stream::Stdout, hung_up),
            Watched::Stderr(handle) => self.mark_readable(handle, Stream::Stderr, hung_up),
            Watched::Stdin(handle) if hung_up => self.stdin_hung_up(handle),
            Watched::Stdin(handle) => self.pump_stdin(handle),
            Watched::Terminal(handle) => {
                if readable {
                    self.mark_readable(handle, Stream::Stdout, false);
                }
                if writable {
                    self.pump_stdin(handle);
                }
            }
        }
    }

    fn decide_about_netlink(&mut self) {
        let now = self.clock.now();
        self.decide_again = self.netlink.as_mut().is_some_and(|netlink| netlink.decide(now));
    }

    // The daemon.

    /// Accepts the newest connection and drops the previous one, in any state.
    fn accept(&mut self) {
        loop {
            match rustix::net::accept_with(&self.listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                Ok(socket) => {
                    self.drop_connection();
                    if self.watch.add(&socket, Watched::Connection).is_ok() {
                        self.connection = Some(Connection::new(socket));
                    }
                }
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => {
                    // Out of memory or of the machine's descriptors: the kernel does not report when there are some
                    // again.
                    self.accept_again = error != Errno::AGAIN;
                    return;
                }
            }
        }
    }

    fn drop_connection(&mut self) {
        if self.connection.take().is_some() {
            self.table.detach_all();
        }
    }

    fn listen_to_daemon(&mut self) {
        let Some(mut connection) = self.connection.take() else { return };
        for _ in 0..READS_PER_TURN {
            if !connection.wants_read(&self.table) {
                break;
            }
            // The reason is of no use in here: the daemon sees that the connection ended, and connects again.
            if let Err(_fault) = self.listen_once(&mut connection) {
                self.table.detach_all();
                return;
            }
        }
        self.connection = Some(connection);
    }

    fn listen_once(&mut self, connection: &mut Connection) -> Result<(), Fault> {
        let mut decoder = connection.read()?;
        while let Some(incoming) = decoder.next()? {
            match incoming {
                Incoming::Message(ToInit::Hello { version_min, version_max }) => {
                    self.greet(connection, version_min, version_max)?;
                }
                _ if !connection.greeted => return Err(Fault::BeforeHello),
                Incoming::Message(message) => self.heed(connection, message)?,
                Incoming::Data { handle, stream: Stream::Stdin, offset, bytes } => {
                    self.receive_stdin(handle, offset, bytes)?;
                }
                Incoming::Data { handle, stream, .. } => return Err(Fault::WrongStream { handle, stream }),
            }
        }
        connection.put_back(decoder);
        Ok(())
    }

    fn greet(&mut self, connection: &mut Connection, oldest: u32, newest: u32) -> Result<(), Fault> {
        if connection.greeted || connection.parting {
            return Err(Fault::SecondHello);
        }
        let Versions { min: version_min, max: version_max } = spoken(&SPEAKS);
        let version = newest.min(version_max);
        if version < oldest || version < version_min {
            self.table.say(&FromInit::NoCommonVersion { version_min, version_max });
            connection.parting = true;
            return Ok(());
        }
        (connection.greeted, connection.version) = (true, version);
        self.table.say(&FromInit::Hello { version });
        self.table.introduce_all();
        Ok(())
    }

    /// Handles a message. A command that init does not know was forgotten at the daemon's own request while this
    /// message was on its way; then there is nothing to do.
    fn heed(&mut self, connection: &mut Connection, message: ToInit) -> Result<(), Fault> {
        match message {
            ToInit::Hello { .. } => return Err(Fault::SecondHello),
            // A message outside of the negotiated version is a protocol violation.
            ToInit::Start(start) if matches!(&start.program, Program::Files(op) if connection.version < op.since()) =>
            {
                return Err(Fault::NotAgreedOn);
            }
            ToInit::Start(start) => self.start(&start),
            ToInit::StdinEnd { handle, offset } => {
                if let Some(command) = self.table.get_mut(handle) {
                    command.stdin.end_at(offset);
                    self.pump_stdin(handle);
                }
            }
            ToInit::Signal { handle, signal } => {
                if !(1..=sys::SIGNAL_MAX).contains(&signal) {
                    return Err(Fault::BadSignal(signal));
                }
                self.signal(handle, signal);
            }
            ToInit::Kill { handle } => self.kill(handle),
            ToInit::Resize { handle, size } => {
                let command = self.table.get(handle).filter(|command| command.terminal);
                if let Some(terminal) =
                    command.and_then(|command| command.output(Stream::Stdout)?.descriptor())
                {
                    // This fails only if the terminal is gone, and then it has no size.
                    let _ = spawn::resize(terminal, size);
                }
            }
            ToInit::Ack { handle, stream, offset } => self.acknowledge(handle, stream, offset)?,
            ToInit::AckResult { handle } => {
                let Some(command) = self.table.get(handle) else { return Ok(()) };
                if !command.result_is_due() {
                    return Err(Fault::NoResultYet { handle });
                }
                connection.let_go_of(handle, &self.table);
                self.table.forget(handle);
            }
            ToInit::Resume { handle, stdout, stderr } => self.resume(handle, stdout, stderr)?,
            ToInit::Ping { serial } => self.table.say(&FromInit::Pong { serial }),
        }
        Ok(())
    }

    fn acknowledge(&mut self, handle: Handle, stream: Stream, offset: u64) -> Result<(), Fault> {
        let Some(command) = self.table.get(handle) else { return Ok(()) };
        let output = command.output(stream).ok_or(Fault::WrongStream { handle, stream })?;
        if offset > output.sent {
            return Err(Fault::AckBeyondSent { handle, offset, sent: output.sent });
        }
        self.table.acknowledge(handle, stream, offset);
        Ok(())
    }

    /// The daemon wants the command's output from these lengths on. If the daemon has less than it once acknowledged,
    /// it gets what is left, and sees from the offset what is missing.
    fn resume(&mut self, handle: Handle, stdout: u64, stderr: u64) -> Result<(), Fault> {
        let Some(command) = self.table.get(handle).filter(|command| !command.is_forgotten()) else {
            return Ok(());
        };
        for (stream, offset) in [(Stream::Stdout, stdout), (Stream::Stderr, stderr)] {
            let output = command.output(stream).ok_or(Fault::WrongStream { handle, stream })?;
            // A second resume on one connection is only an acknowledgement of what was sent on it.
            let known = if command.is_attached() { output.sent } else { output.window.end() };
            if offset > known {
                return Err(Fault::AckBeyondSent { handle, offset, sent: known });
            }
        }
        self.table.acknowledge(handle, Stream::Stdout, stdout);
        self.table.acknowledge(handle, Stream::Stderr, stderr);
        self.attach(handle);
        if let Some(news) = self.table.get(handle).and_then(Command::stdin_news) {
            self.table.say(&news);
        }
        Ok(())
    }

    fn attach(&mut self, handle: Handle) {
        if let Some(command) = self.table.get_mut(handle) {
            command.attach();
            self.table.want_send(handle, Stream::Stdout);
            self.table.want_send(handle, Stream::Stderr);
            self.table.tell(handle);
        }
    }

    fn flush(&mut self) -> Result<(), InitError> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        match connection.flush(&mut self.table) {
            Ok(()) => connection.watch_for_room(&self.watch).map_err(cannot("watch the connection")),
            Err(_fault) => {
                self.drop_connection();
                Ok(())
            }
        }
    }

    // Commands.

    fn start(&mut self, start: &Start) {
        let handle = start.handle;
        if let Some(command) = self.table.get(handle) {
            if !command.is_forgotten() {
                self.attach(handle);
            }
            return;
        }
        if self.table.len() >= COMMANDS_MAX {
            // Not remembered, or there would be no bound. If the daemon misses this answer, it will ask again.
            let error = StartError::NoRoom { reason: format!("it has {COMMANDS_MAX} commands already") };
            self.table.say(&FromInit::StartFailed { handle, error });
            return;
        }
        self.next_handle = Handle(start.handle.0.wrapping_add(1));
        let command = match spawn::spawn(start, &self.surroundings) {
            Ok(spawned) => {
                let now = self.clock.now();
                let deadlines = Deadlines::new(now, start.timeout_ms, start.idle_timeout_ms, start.grace_ms);
                let mut command = Command::starting(start, spawned, deadlines);
                if let Err(error) = self.watch_command(handle, &command) {
                    self.surroundings.tree.kill(command.root());
                    command.fail(StartError::NoRoom { reason: io::Error::from(error).to_string() });
                }
                command
            }
            Err(error) => Command::failed(start, error),
        };
        self.launched += usize::from(matches!(command.life, Life::Starting { .. }));
        self.table.insert(handle, command);
        self.schedule(handle);
        self.attach(handle);
    }

    fn watch_command(&self, handle: Handle, command: &Command) -> Result<(), Errno> {
        if let Life::Starting { report, .. } = &command.life {
            self.watch.add(report, Watched::Report(handle))?;
        }
        let descriptor = |stream| command.output(stream).and_then(|output| output.descriptor());
        if command.terminal {
            return descriptor(Stream::Stdout)
                .map_or(Ok(()), |terminal| self.watch.add(terminal, Watched::Terminal(handle)));
        }
        if let Some(stdout) = descriptor(Stream::Stdout) {
            self.watch.add(stdout, Watched::Stdout(handle))?;
        }
        if let Some(stderr) = descriptor(Stream::Stderr) {
            self.watch.add(stderr, Watched::Stderr(handle))?;
        }
        if let Some(stdin) = command.stdin.descriptor() {
            self.watch.add(stdin, Watched::Stdin(handle))?;
        }
        Ok(())
    }

    /// A stream has something to read. A command that writes has started, which is reported first.
    fn mark_readable(&mut self, handle: Handle, stream: Stream, hung_up: bool) {
        self.take_report(handle);
        self.table.mark_readable(handle, stream, hung_up);
    }

    /// Checks whether a child has executed its program or failed to.
    fn take_report(&mut self, handle: Handle) {
        let Some(command) = self.table.get_mut(handle) else { return };
        let Life::Starting { report, asked } = &command.life else { return };
        let mut bytes = [0; Report::LENGTH];
        let length = match rustix::io::read(report, &mut bytes) {
            Err(Errno::AGAIN | Errno::INTR) if !command.reaped => return,
            Ok(length) => length,
            Err(_) => 0,
        };
        self.launched -= 1;
        let report = if length == Report::LENGTH { Report::from_bytes(bytes) } else { None };
        match report {
            Some(report) => {
                let error = report.into_error(asked);
                command.fail(error);
                self.unschedule(handle);
            }
            // The pipe closed: the program runs, or the child was killed before, which its exit will show.
            None => {
                command.life = Life::Running;
                let pending = std::mem::take(&mut command.pending_signals);
                for signal in (1..=sys::SIGNAL_MAX).filter(|signal| pending & (1 << (signal - 1)) != 0) {
                    self.signal(handle, signal);
                }
            }
        }
        self.table.tell(handle);
    }

    fn signal(&mut self, handle: Handle, signal: i32) {
        self.take_report(handle);
        let Some(command) = self.table.get_mut(handle) else { return };
        if let Life::Starting { .. } = command.life {
            // The child still ignores what init ignores, and may not lead its process group yet.
            command.pending_signals |= 1 << (signal - 1);
            return;
        }
        // Only until the main process is reaped: afterwards its number may belong to another group.
        if let Some(main) = command.root().main.filter(|_| command.is_alive()) {
            // The process may have just ended, or may now run as a user whom init may not signal; both are fine.
            let _ = sys::kill(-main, signal);
        }
    }

    fn kill(&mut self, handle: Handle) {
        let Some(command) = self.table.get_mut(handle) else { return };
        if command.is_alive() && command.cause == EndCause::Itself {
            command.cause = EndCause::Killed;
        }
        self.surroundings.tree.kill(command.root());
    }

    /// Reaps every child that ended: main processes of commands, and orphans.
    fn reap(&mut self) {
        // The signal is read before the children: a child that ends after the last check below raises it again.
        let mut information = [0u8; 1024];
        while rustix::io::read(&self.children, &mut information).is_ok() {}
        self.reap_again = false;
        let mut orphans = false;
        for _ in 0..REAPS_PER_TURN {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => match self.table.take_main(pid.as_raw_pid()) {
                    Some(handle) => self.main_exited(handle, status),
                    None => orphans = true,
                },
                Err(Errno::INTR) => {}
                Ok(None) | Err(_) => {
                    if orphans {
                        // One of them may have been the last in its cgroup.
                        self.groups_to_remove = self.table.with_groups_left();
                    }
                    return;
                }
            }
        }
        self.reap_again = true;
        if orphans {
            self.groups_to_remove = self.table.with_groups_left();
        }
    }

    fn main_exited(&mut self, handle: Handle, status: WaitStatus) {
        self.take_report(handle);
        self.unschedule(handle);
        self.groups_to_remove.push(handle);
        let Some(command) = self.table.get_mut(handle) else { return };
        if let Life::Failed(_) = command.life {
            return;
        }
        command.exit(match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => ExitStatus::Code(code),
            (None, signal) => ExitStatus::Signal(signal.unwrap_or_default()),
        });
        if command.cause != EndCause::Itself {
            // The main process ended when it was asked to; the rest of its tree is killed with it.
            self.surroundings.tree.kill(command.root());
        }
        self.table.want_read(handle, Stream::Stdout);
        self.table.want_read(handle, Stream::Stderr);
        self.table.tell(handle);
    }

    /// Removes the cgroups of ended commands and creates the next one, outside of the path on which a caller waits
    /// for a result.
    fn tidy_groups(&mut self) {
        for handle in std::mem::take(&mut self.groups_to_remove) {
            if let Some(command) = self.table.get_mut(handle)
                && command.reaped
                && command.group_left
            {
                command.group_left = !self.surroundings.tree.remove(handle);
                self.table.remove_if_gone(handle);
            }
        }
        // Not while a child that will execute its program may wait for this processor.
        if self.launched == 0 {
            self.surroundings.tree.prepare_ahead(self.next_handle);
        }
    }

    // Stdin.

    fn receive_stdin(&mut self, handle: Handle, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        let Some(command) = self.table.get_mut(handle) else { return Ok(()) };
        if command.stdin.is_closed() || command.stdin.ends_by(offset) {
            if let Some(news) = command.refuse_stdin() {
                self.table.say(&news);
            }
            return Ok(());
        }
        command.stdin.receive(offset, bytes)?;
        self.pump_stdin(handle);
        Ok(())
    }

    fn pump_stdin(&mut self, handle: Handle) {
        let Some(command) = self.table.get_mut(handle) else { return };
        let pumped = command.stdin.pump();
        if pumped.advanced
            && let Some(news) = command.stdin_news()
        {
            self.table.say(&news);
        }
        if pumped.closed {
            self.table.tell(handle);
        }
    }

    fn stdin_hung_up(&mut self, handle: Handle) {
        if let Some(command) = self.table.get_mut(handle)
            && command.stdin.close()
        {
            self.table.tell(handle);
        }
    }

    // Deadlines.

    fn schedule(&mut self, handle: Handle) {
        let Some(command) = self.table.get_mut(handle).filter(|command| command.is_alive()) else { return };
        command.scheduled = command.deadlines.next();
        if let Some(at) = command.scheduled {
            self.schedule.add(at, handle);
        }
    }

    fn unschedule(&mut self, handle: Handle) {
        if let Some(at) = self.table.get_mut(handle).and_then(|command| command.scheduled.take()) {
            self.schedule.remove(at, handle);
        }
    }

    fn strike_deadlines(&mut self) {
        let now = self.clock.now();
        while let Some(handle) = self.schedule.take_due(now) {
            let Some(command) = self.table.get_mut(handle).filter(|command| command.is_alive()) else {
                continue;
            };
            command.scheduled = None;
            if command.is_held_up() {
                // The command has output that the daemon does not take: that is not silence.
                command.deadlines.heard(now);
            }
            let tree = &self.surroundings.tree;
            let cause = match command.deadlines.strike(now) {
                Due::Nothing => None,
                Due::Timeout => Some(EndCause::Timeout),
                Due::IdleTimeout => Some(EndCause::IdleTimeout),
                Due::Kill => {
                    tree.kill(command.root());
                    None
                }
            };
            if let Some(cause) = cause {
                if command.cause == EndCause::Itself {
                    command.cause = cause;
                }
                tree.terminate(command.root());
            }
            self.schedule(handle);
        }
    }

    // Memory.

    fn release_memory(&mut self) {
        if !std::mem::take(&mut self.holds_memory) {
            return;
        }
        self.table.release_memory();
        if let Some(connection) = &mut self.connection {
            connection.release_memory();
        }
        sys::trim_memory();
    }
}

/// Init's total waiting time for the processor: the second field of `/proc/self/schedstat`, in nanoseconds.
fn waited_ms(waits: Option<&std::fs::File>) -> u64 {
    let mut text = [0; 128];
    let length =
        waits.and_then(|file| std::os::unix::fs::FileExt::read_at(file, &mut text, 0).ok()).unwrap_or(0);
    let text = std::str::from_utf8(&text[..length]).unwrap_or_default();
    let nanos: u64 = text.split_ascii_whitespace().nth(1).and_then(|field| field.parse().ok()).unwrap_or(0);
    nanos / 1_000_000
}

/// Raises the descriptor limit as far as the host allows, and returns the old limit, which commands get back.
fn raise_descriptor_limit() -> Rlimit {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    // If it cannot be raised, there is room for fewer commands, and `spawn` reports that.
    let _ = rustix::process::setrlimit(Resource::Nofile, raised);
    limit
}

fn monotonic() -> Duration {
    let now = rustix::time::clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn to_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Option<Options> {
        Options::parse(line.split_whitespace().map(String::from)).ok()
    }

    #[test]
    fn the_command_line_is_short_and_strict() {
        let usual = || Options { listener: 3, group: Some(4), oom_score: 5 };
        assert_eq!(parse(""), Some(usual()));
        let without = Options { listener: 7, group: None, ..usual() };
        assert_eq!(parse("--no-cgroup --listen-fd 7"), Some(without));
        assert_eq!(parse("--cgroup-fd 6"), Some(Options { group: Some(6), ..usual() }));
        assert_eq!(parse("--oom-score-fd 8"), Some(Options { oom_score: 8, ..usual() }));
        let wrong = [
            "--help",
            "--listen-fd",
            "--listen-fd x",
            "--listen-fd 1",
            "--cgroup-fd 3",
            "--oom-score-fd 3",
            "--oom-score-fd 4",
        ];
        for wrong in wrong {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
