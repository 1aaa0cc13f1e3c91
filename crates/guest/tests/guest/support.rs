//! A real init in a process namespace of its own, and a small blocking client for its protocol.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use wire::frame::{self, Decoder, Incoming, MESSAGE_FROM_INIT_MAX};
use wire::guest::{
    End, EndCause, ExitStatus, FromInit, Handle, Program, Start, StartError, Stream, ToInit, VERSION,
};

/// Longer than anything here takes, even on a busy machine. A test that reaches it has failed.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// How init keeps the processes of its commands apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Walk,
    Groups,
}

/// Runs a test in both modes, as far as this machine and user allow.
pub fn in_both_modes(test: impl Fn(&Guest)) {
    in_both_modes_after(":", test);
}

/// The same, with a command that a shell runs first.
pub fn in_both_modes_after(first: &str, test: impl Fn(&Guest)) {
    test(&Guest::try_start_after(Mode::Walk, &default_init(), first).expect("this mode needs nothing"));
    match Guest::try_start_after(Mode::Groups, &default_init(), first) {
        Some(guest) => test(&guest),
        None => println!("skipped with cgroups: this needs root and a cgroup v2 tree"),
    }
}

/// The init under test: the one that cargo built, or another build of it.
pub fn default_init() -> PathBuf {
    std::env::var_os("SHOAL_TEST_INIT").map_or_else(|| env!("CARGO_BIN_EXE_shoal-init").into(), PathBuf::from)
}

/// Builds init as it goes into sandboxes: static, for size. Cached beside the other builds of this workspace.
pub fn static_init() -> PathBuf {
    if let Some(init) = std::env::var_os("SHOAL_TEST_INIT") {
        return init.into();
    }
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("static-init");
    let built = Command::new(env!("CARGO"))
        .args([
            "build",
            "--quiet",
            "--offline",
            "--locked",
            "--package",
            "shoal-guest",
            "--bin",
            "shoal-init",
        ])
        .args(["--profile", "release", "--target", "x86_64-unknown-linux-gnu", "--target-dir"])
        .arg(&target)
        .env("CARGO_ENCODED_RUSTFLAGS", "-Ctarget-feature=+crt-static\x1f-Crelocation-model=static")
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "s")
        .env("CARGO_PROFILE_RELEASE_LTO", "fat")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
        .env("CARGO_PROFILE_RELEASE_PANIC", "abort")
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .expect("cargo runs this test");
    assert!(built.success());
    target.join("x86_64-unknown-linux-gnu/release/shoal-init")
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// An init and everything it started. All of it ends when this is dropped.
pub struct Guest {
    unshare: Child,
    /// A directory that the guest can use too.
    pub directory: TempDir,
    group: Option<TestGroup>,
}

impl Guest {
    pub fn start(mode: Mode) -> Self {
        Self::try_start(mode, &default_init()).expect("this mode needs more than this user may do")
    }

    pub fn try_start(mode: Mode, init: &Path) -> Option<Self> {
        Self::try_start_after(mode, init, ":")
    }

    /// With a command that a shell runs first, such as setting limits.
    pub fn try_start_after(mode: Mode, init: &Path, first: &str) -> Option<Self> {
        let group = match mode {
            Mode::Walk => None,
            Mode::Groups => Some(TestGroup::make()?),
        };
        let directory = tempfile::Builder::new().prefix("shoal-guest-").tempdir().expect("a directory");
        // Guest users other than root need access too.
        fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777))
            .expect("it is ours");
        let listener = UnixListener::bind(directory.path().join("init.sock")).expect("a socket");
        let mut command = Command::new("unshare");
        if !is_root() {
            command.arg("--map-root-user");
        }
        // Process 1 of its own namespace, as in a sandbox, so that killing it leaves nothing behind.
        command.args(["--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c"]);
        // The shell moves the descriptors to where init expects them, opens its own OOM score, and becomes init.
        let enter = r#"[ -z "$GROUP" ] || echo 0 > "$GROUP/init/cgroup.procs"; unset GROUP"#;
        command.arg(format!(r#"{enter}; {first}; exec "$0" "$@" 3<&0 4<&1 5<>/proc/self/oom_score_adj 0</dev/null 1>/dev/null"#));
        command.arg(init);
        command.stdin(Stdio::from(OwnedFd::from(listener)));
        match &group {
            None => {
                command.arg("--no-cgroup").stdout(Stdio::null());
            }
            Some(group) => {
                let directory = fs::File::open(&group.path).expect("the group was just made");
                command.env("GROUP", &group.path).stdout(Stdio::from(directory));
            }
        }
        let unshare = command.spawn().expect("unshare is part of every system");
        Some(Self { unshare, directory, group })
    }

    pub fn connect(&self) -> Client {
        self.connect_knowing().0
    }

    /// Also returns the commands that init reported.
    pub fn connect_knowing(&self) -> (Client, Vec<Known>) {
        self.connect_silently().greet()
    }

    /// Without a hello.
    pub fn connect_silently(&self) -> Client {
        let stream = UnixStream::connect(self.directory.path().join("init.sock")).expect("init listens");
        Client::new(stream)
    }

    /// Init's number on the host.
    pub fn pid(&self) -> u32 {
        let unshare = self.unshare.id();
        let children =
            fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children")).expect("it lives");
        children.trim().parse().expect("one child")
    }

    /// A value in kilobytes from init's own status.
    pub fn status_kib(&self, name: &str) -> u64 {
        kib_of(&fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("init lives"), name)
    }

    /// Names of the cgroups of commands.
    pub fn command_groups(&self) -> Vec<String> {
        let group = self.group.as_ref().expect("a guest with groups");
        let entries = fs::read_dir(&group.path).expect("the group is there");
        let names = entries.flatten().filter(|entry| entry.path().is_dir());
        let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut names: Vec<_> = names.filter(|name| name.starts_with('c')).collect();
        names.sort();
        names
    }

    pub fn group_path(&self) -> &Path {
        &self.group.as_ref().expect("a guest with groups").path
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Makes a FIFO with a reader, which a thread drains until its last writer is gone.
    pub fn fifo(&self, name: &str) -> Fifo {
        let path = self.path(name);
        let made = Command::new("mkfifo").arg("-m").arg("666").arg(&path).status().expect("mkfifo");
        assert!(made.success());
        let opened = path.clone();
        let (sender, gone) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut all = Vec::new();
            if fs::File::open(opened).and_then(|mut fifo| fifo.read_to_end(&mut all)).is_ok() {
                // The receiver is gone if the test has failed already.
                let _ = sender.send(all);
            }
        });
        Fifo { path, gone }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Killing `unshare` ends init, and init its whole namespace.
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
    }
}

/// Held open by processes of the guest, to detect when the last of them is gone.
pub struct Fifo {
    pub path: PathBuf,
    gone: std::sync::mpsc::Receiver<Vec<u8>>,
}

impl Fifo {
    /// Waits until no process holds it, and returns what was written.
    pub fn until_released(&self) -> Vec<u8> {
        self.gone.recv_timeout(PATIENCE).expect("the last holder ends")
    }

    pub fn is_held(&self) -> bool {
        self.gone.try_recv().is_err()
    }
}

/// A cgroup of its own, removed with everything in it.
struct TestGroup {
    path: PathBuf,
}

impl TestGroup {
    fn make() -> Option<Self> {
        let roots = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"];
        let root = roots.into_iter().find(|root| Path::new(root).join("cgroup.procs").exists())?;
        let random = tempfile::Builder::new().prefix("shoal-guest-test-").tempdir().ok()?;
        let path = Path::new(root).join(random.path().file_name()?);
        fs::create_dir(&path).ok()?;
        let group = Self { path };
        fs::create_dir(group.path.join("init")).ok()?;
        Some(group)
    }
}

impl Drop for TestGroup {
    fn drop(&mut self) {
        // Dropped after the guest: its processes are dead, but may take a moment to leave the cgroup.
        let _ = fs::write(self.path.join("cgroup.kill"), "1");
        let deadline = Instant::now() + PATIENCE;
        while self.path.exists() && Instant::now() < deadline {
            for entry in fs::read_dir(&self.path).into_iter().flatten().flatten() {
                let _ = fs::remove_dir(entry.path());
            }
            let _ = fs::remove_dir(&self.path);
            std::thread::yield_now();
        }
    }
}

pub fn kib_of(text: &str, name: &str) -> u64 {
    let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {text}"));
    line.split_ascii_whitespace().nth(1).expect("a number").parse().expect("a number")
}

/// One item that init sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Message(FromInit),
    Data { handle: Handle, stream: Stream, offset: u64, bytes: Vec<u8> },
}

/// A command that init reported: its process, and how much stdin init has received for it.
pub type Known = (Handle, Option<u32>, u64);

/// The daemon's side.
pub struct Client {
    pub stream: UnixStream,
    decoder: Decoder<FromInit>,
    queue: VecDeque<Event>,
}

impl Client {
    pub fn new(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream.set_write_timeout(Some(PATIENCE)).expect("a timeout");
        Self { stream, decoder: Decoder::new(MESSAGE_FROM_INIT_MAX), queue: VecDeque::new() }
    }

    /// Sends a hello, and receives the commands that init knows.
    pub fn greet(mut self) -> (Self, Vec<Known>) {
        self.send(&ToInit::Hello { version_min: VERSION, version_max: VERSION });
        assert_eq!(self.message(), FromInit::Hello { version: VERSION });
        let mut known = Vec::new();
        loop {
            match self.message() {
                FromInit::Known { handle, pid, stdin } => known.push((handle, pid, stdin)),
                FromInit::KnownEnd => return (self, known),
                other => panic!("{other:?} among the commands that init knows"),
            }
        }
    }

    /// Waits for the result of a command, and acknowledges nothing.
    pub fn until_ended(&mut self, handle: u32) {
        let ended =
            |event| matches!(event, Event::Message(FromInit::Ended { handle: over, .. }) if over.0 == handle);
        while !ended(self.next()) {}
    }

    pub fn send(&mut self, message: &ToInit) {
        let mut bytes = Vec::new();
        frame::put_message(message, &mut bytes);
        self.stream.write_all(&bytes).expect("init reads");
    }

    pub fn send_stdin(&mut self, handle: u32, offset: u64, bytes: &[u8]) {
        for (index, chunk) in bytes.chunks(frame::CHUNK_MAX).enumerate() {
            let at = offset + (index * frame::CHUNK_MAX) as u64;
            let header = frame::data_header(Handle(handle), Stream::Stdin, at, chunk.len());
            self.stream.write_all(&[&header, chunk].concat()).expect("init reads");
        }
    }

    pub fn start(&mut self, start: Start) {
        self.send(&ToInit::Start(Box::new(start)));
    }

    /// The next item, or `None` if init has closed the connection.
    pub fn try_next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return Some(event);
            }
            let space = self.decoder.space();
            let length = match self.stream.read(space) {
                Ok(0) => return None,
                Ok(length) => length,
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("nothing came from init: {error}"),
            };
            self.decoder.filled(length);
            while let Some(incoming) = self.decoder.next().expect("init sends frames") {
                self.queue.push_back(match incoming {
                    Incoming::Message(message) => Event::Message(message),
                    Incoming::Data { handle, stream, offset, bytes } => {
                        Event::Data { handle, stream, offset, bytes: bytes.to_vec() }
                    }
                });
            }
        }
    }

    pub fn next(&mut self) -> Event {
        self.try_next().expect("init closed the connection")
    }

    pub fn message(&mut self) -> FromInit {
        match self.next() {
            Event::Message(message) => message,
            other => panic!("{other:?} instead of a message"),
        }
    }

    /// Waits until init answers; init answers in order, so everything sent before was handled.
    pub fn sync(&mut self) -> Vec<Event> {
        let serial = 0x5eed;
        self.send(&ToInit::Ping { serial });
        let mut before = Vec::new();
        loop {
            match self.next() {
                Event::Message(FromInit::Pong { serial: answer }) if answer == serial => return before,
                other => before.push(other),
            }
        }
    }

    /// Asserts that init closes this connection.
    pub fn until_dropped(&mut self) {
        while self.try_next().is_some() {}
    }

    /// Handles all messages until the command has ended, acknowledging as it goes, and makes init forget it.
    pub fn finish(&mut self, handle: u32) -> Outcome {
        self.finish_all(&[handle]).remove(&Handle(handle)).expect("it was waited for")
    }

    pub fn finish_all(&mut self, handles: &[u32]) -> BTreeMap<Handle, Outcome> {
        let mut outcomes: BTreeMap<Handle, Outcome> = BTreeMap::new();
        let mut left: Vec<Handle> = handles.iter().copied().map(Handle).collect();
        while !left.is_empty() {
            let event = self.next();
            let over = self.take(event, &mut outcomes);
            left.retain(|handle| Some(*handle) != over);
        }
        outcomes
    }

    /// Adds what came to its outcome and acknowledges it. Returns the command that ended, if one did.
    pub fn take(&mut self, event: Event, outcomes: &mut BTreeMap<Handle, Outcome>) -> Option<Handle> {
        match event {
            Event::Data { handle, stream, offset, bytes } => {
                let outcome = outcomes.entry(handle).or_default();
                let kept = outcome.stream(stream);
                assert_eq!(offset, kept.len() as u64, "the bytes of {stream:?} follow one another");
                kept.extend_from_slice(&bytes);
                let offset = kept.len() as u64;
                self.send(&ToInit::Ack { handle, stream, offset });
                None
            }
            Event::Message(FromInit::Started { handle, pid }) => {
                outcomes.entry(handle).or_default().pid = Some(pid);
                None
            }
            Event::Message(FromInit::StartFailed { handle, error }) => {
                outcomes.entry(handle).or_default().error = Some(error);
                self.send(&ToInit::AckResult { handle });
                Some(handle)
            }
            Event::Message(FromInit::Ended { handle, end, stdout_end, stderr_end }) => {
                let outcome = outcomes.entry(handle).or_default();
                assert_eq!(stdout_end, outcome.stdout.len() as u64, "all of stdout came before the end");
                assert_eq!(stderr_end, outcome.stderr.len() as u64, "all of stderr came before the end");
                outcome.end = Some(end);
                self.send(&ToInit::AckResult { handle });
                Some(handle)
            }
            Event::Message(FromInit::StdinAck { handle, offset }) => {
                outcomes.entry(handle).or_default().stdin = offset;
                None
            }
            Event::Message(FromInit::StdinClosed { handle }) => {
                outcomes.entry(handle).or_default().stdin_closed = true;
                None
            }
            Event::Message(other) => panic!("{other:?} was not asked for"),
        }
    }

    /// Handles the next item.
    pub fn take_next(&mut self, outcomes: &mut BTreeMap<Handle, Outcome>) -> Option<Handle> {
        let event = self.next();
        self.take(event, outcomes)
    }

    pub fn run(&mut self, start: Start) -> Outcome {
        let handle = start.handle.0;
        self.start(start);
        self.finish(handle)
    }
}

/// The outcome of a command.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub pid: Option<u32>,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub stdin: u64,
    pub stdin_closed: bool,
    pub end: Option<End>,
    pub error: Option<StartError>,
}

impl Outcome {
    pub fn stream(&mut self, stream: Stream) -> &mut Vec<u8> {
        match stream {
            Stream::Stdin => panic!("stdin does not come from init"),
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        }
    }

    pub fn stdout_text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    pub fn status(&self) -> ExitStatus {
        self.end.unwrap_or_else(|| panic!("it is over: {self:?}")).status
    }

    pub fn cause(&self) -> EndCause {
        self.end.unwrap_or_else(|| panic!("it is over: {self:?}")).cause
    }

    #[track_caller]
    pub fn assert_printed(&self, expected: &str) {
        assert_eq!(
            (self.stdout_text().as_str(), self.status()),
            (expected, ExitStatus::Code(0)),
            "stderr was {}",
            String::from_utf8_lossy(&self.stderr)
        );
    }
}

/// A script with this handle.
pub fn shell(handle: u32, script: &str) -> Start {
    let mut start = Start::shell(Handle(handle), &format!("test-{handle}"), script);
    start.env.push(("PATH".into(), std::env::var("PATH").unwrap_or_else(|_| "/usr/bin:/bin".into())));
    start
}

/// A program with its arguments.
pub fn argv(handle: u32, arguments: &[&str]) -> Start {
    let program = Program::Argv(arguments.iter().map(|argument| argument.to_string()).collect());
    Start { program, ..shell(handle, "") }
}

/// Good enough to choose offsets: xorshift.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound.max(1)
    }
}
