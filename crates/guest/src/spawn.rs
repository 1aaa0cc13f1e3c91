//! From a [`Start`] to a process: everything between the request and the moment the program runs.
//!
//! Whatever can be prepared is prepared before the fork: strings, candidates from `PATH`, the user, pipes. The child
//! then makes a fixed list of system calls, whose order is explained where it matters, and reports an error through a
//! pipe that closes when the program starts. It is a fork and not a vfork: entering the directory and executing may
//! wait for a slow file system, or for a guest process that stops the child, and init must not wait with it. Init is
//! small, so the copy is cheap.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;

use rustix::fs::{Access, AtFlags, CWD, Gid, MemfdFlags, Mode, OFlags, SealFlags, Uid};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Resource, Rlimit};
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;
use wire::files::FileOp;
use wire::guest::{Cwd, Program, Start, StartError, TerminalSize};

use crate::files;
use crate::sys::{self, Ignored, Inherited, Placed, Strings};
use crate::tree::{self, OomScore, Tree};
use crate::users::{Files, User};

/// The `PATH` of a command whose environment has none; also used to look the program up.
const PATH_DEFAULT: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// The `TERM` of a terminal whose environment has none.
const TERM_DEFAULT: &str = "xterm-256color";
/// The shells for scripts, the preferred one first.
const SHELLS: [&CStr; 2] = [c"/bin/bash", c"/bin/sh"];
/// A longer script does not fit into one argument (the kernel's MAX_ARG_STRLEN is 128 KiB) and is passed as a file.
const SCRIPT_ARGUMENT_MAX: usize = 100 * 1024;
/// The descriptor of such a script in the shell: below the numbers that shells use themselves. The script closes it
/// first.
const SCRIPT_DESCRIPTOR: RawFd = 9;
/// Where the child keeps the pipe for its report while it closes all other descriptors.
const REPORT_DESCRIPTOR: RawFd = 3;
/// Descriptors that commands must leave to init, for connections, kills and the user database.
const DESCRIPTORS_RESERVED: u64 = 32;

/// What is the same for all commands.
#[derive(Debug)]
pub struct Surroundings {
    pub tree: Tree,
    /// `/dev/null`, opened before any guest code ran, since guest code might replace it.
    pub null: OwnedFd,
    /// The limit on descriptors that init was started with and commands get, before init raised its own.
    pub descriptors: Rlimit,
    /// Signals that init ignores and commands must receive.
    pub signals: Ignored,
    pub oom_score: OomScore,
}

/// A process that was started.
#[derive(Debug)]
pub struct Spawned {
    pub pid: i32,
    /// Closes when the program runs; an error is reported through it before.
    pub report: OwnedFd,
    pub stdin: Option<Rc<OwnedFd>>,
    pub stdout: Rc<OwnedFd>,
    pub stderr: Option<Rc<OwnedFd>>,
}

/// The request, in the words that an error needs.
#[derive(Debug)]
pub struct Asked {
    program: String,
    cwd: String,
    user: String,
}

impl Asked {
    /// Remembers them.
    pub fn new(start: &Start) -> Self {
        let program = match &start.program {
            Program::Argv(arguments) => arguments.first().cloned().unwrap_or_default(),
            Program::Shell { .. } => SHELLS[1].to_string_lossy().into_owned(),
            Program::Files(_) => "file operation".into(),
        };
        let (Cwd::Named(cwd) | Cwd::Default(cwd)) = &start.cwd;
        Self { program, cwd: cwd.clone(), user: start.user.clone().unwrap_or_default() }
    }
}

/// What the child was doing when it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Group = 1,
    Descriptors = 2,
    Terminal = 3,
    Identity = 4,
    Directory = 5,
    Execute = 6,
    /// The program exists, but the interpreter that its first line or header names does not.
    Interpreter = 7,
}

/// The child's report: a stage and an error number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    stage: Stage,
    errno: Errno,
}

impl Report {
    /// How many bytes it is on the pipe.
    pub const LENGTH: usize = 8;

    fn to_bytes(self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[..4].copy_from_slice(&(self.stage as u32).to_le_bytes());
        bytes[4..].copy_from_slice(&self.errno.raw_os_error().to_le_bytes());
        bytes
    }

    /// Parses the report; `None` if it is incomplete, as when the child was killed while writing it.
    pub fn from_bytes(bytes: [u8; Self::LENGTH]) -> Option<Self> {
        let [a, b, c, d, e, f, g, h] = bytes;
        let stage = match u32::from_le_bytes([a, b, c, d]) {
            1 => Stage::Group,
            2 => Stage::Descriptors,
            3 => Stage::Terminal,
            4 => Stage::Identity,
            5 => Stage::Directory,
            6 => Stage::Execute,
            7 => Stage::Interpreter,
            _ => return None,
        };
        Some(Self { stage, errno: Errno::from_raw_os_error(i32::from_le_bytes([e, f, g, h])) })
    }

    /// The error for the daemon.
    pub fn into_error(self, asked: &Asked) -> StartError {
        let reason = words(self.errno);
        let program = asked.program.clone();
        match (self.stage, self.errno) {
            (_, Errno::AGAIN | Errno::NOMEM | Errno::MFILE | Errno::NFILE | Errno::NOSPC) => {
                StartError::NoRoom { reason }
            }
            (Stage::Group, _) => StartError::NoRoom { reason: format!("cannot enter its cgroup: {reason}") },
            (Stage::Descriptors, _) => StartError::NoRoom { reason },
            (Stage::Terminal, _) => {
                StartError::NoRoom { reason: format!("cannot take its terminal: {reason}") }
            }
            // The sandbox's range of ids does not include the user's number.
            (Stage::Identity, _) => StartError::UnknownUser { user: asked.user.clone() },
            (Stage::Directory, _) => StartError::BadCwd { path: asked.cwd.clone(), reason },
            (Stage::Execute, Errno::TOOBIG) => StartError::ArgumentsTooLong,
            (Stage::Execute, Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG) => {
                StartError::ProgramNotFound { program }
            }
            (Stage::Execute, _) => StartError::NotExecutable { program, reason },
            (Stage::Interpreter, _) => {
                StartError::NotExecutable { program, reason: "its interpreter was not found".into() }
            }
        }
    }
}

/// Starts the process. It is in its cgroup when this returns; the report says whether the program runs.
pub fn spawn(start: &Start, surroundings: &Surroundings) -> Result<Spawned, StartError> {
    let mut launch = Launch::prepare(start)?;
    let streams = Streams::open(start, launch.user.uid).map_err(no_room)?;
    let (report, report_end) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(no_room)?;
    let limit = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    // The kernel always assigns the lowest free number, so a high one means that few are left.
    if report_end.as_raw_fd() as u64 + DESCRIPTORS_RESERVED > limit {
        return Err(no_room(Errno::MFILE));
    }
    let group = surroundings.tree.prepare(start.handle).map_err(no_room)?;
    let child = |placed| {
        let group = group.as_ref().map(AsFd::as_fd).filter(|_| placed == Placed::No);
        launch.become_program(&streams, &Place { group, surroundings, report: &report_end })
    };
    let forked = surroundings.oom_score.as_command(|| sys::fork(group.as_ref().map(AsFd::as_fd), child));
    match forked.and_then(std::convert::identity) {
        Ok(pid) => {
            Ok(Spawned { pid, report, stdin: streams.stdin, stdout: streams.stdout, stderr: streams.stderr })
        }
        Err(error) => {
            surroundings.tree.remove(start.handle);
            Err(no_room(Errno::from_io_error(&error).unwrap_or(Errno::AGAIN)))
        }
    }
}

/// Exit code of a child that could not execute the program. Not used if there is a report.
const EXIT_NOT_STARTED: i32 = 127;

/// Resources that the child needs.
#[derive(Debug, Clone, Copy)]
struct Place<'a> {
    /// The cgroup to enter, if the child was not created in it.
    group: Option<BorrowedFd<'a>>,
    surroundings: &'a Surroundings,
    report: &'a OwnedFd,
}

/// Everything that the child needs, in the form that the kernel expects.
#[derive(Debug)]
struct Launch {
    user: User,
    /// Whether to change ids: an init without the privilege runs everything as itself.
    change_user: bool,
    groups: Vec<Gid>,
    cwd: CString,
    cwd_may_be_missing: bool,
    /// Paths to try to execute, in order.
    candidates: Vec<CString>,
    /// Pass the path that was found as `argv[0]`, and not what the caller wrote.
    named_by_path: bool,
    arguments: Strings,
    environment: Strings,
    /// A script that is too long for an argument.
    script: Option<OwnedFd>,
    /// What the child does itself, instead of executing a program.
    operation: Option<Box<FileOp>>,
}

impl Launch {
    fn prepare(start: &Start) -> Result<Self, StartError> {
        let files = Files::read();
        let own = rustix::process::geteuid();
        let user = match &start.user {
            // In a sandbox, init is root.
            None => files.user_by_number(own.as_raw()),
            Some(wish) => {
                files.resolve(wish).ok_or_else(|| StartError::UnknownUser { user: wish.clone() })?
            }
        };
        let change_user = own.is_root() || user.uid != own.as_raw();
        let groups = user.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();

        let (path, cwd_may_be_missing) = match &start.cwd {
            Cwd::Named(path) => (path, false),
            Cwd::Default(path) => (path, true),
        };
        let cwd = c_string(path.clone(), "the working directory")?;
        let (environment, path) = environment(start, &user)?;
        let mut script = None;
        let mut operation = None;
        let (candidates, arguments) = match &start.program {
            Program::Argv(arguments) => {
                let candidates = candidates(arguments.first().map_or("", String::as_str), &path);
                let arguments = arguments.iter().map(|argument| c_string(argument.clone(), "an argument"));
                (candidates, arguments.collect::<Result<_, _>>()?)
            }
            Program::Shell { script: text } => {
                let text = c_string(text.clone(), "the script")?;
                let what = if text.as_bytes().len() > SCRIPT_ARGUMENT_MAX {
                    script = Some(script_file(text.as_bytes()).map_err(no_room)?);
                    c_string(format!(". /proc/self/fd/{SCRIPT_DESCRIPTOR}"), "the script")?
                } else {
                    text
                };
                let candidates: Vec<CString> = SHELLS.map(CString::from).into();
                (candidates, vec![SHELLS[0].into(), c"-c".into(), what])
            }
            Program::Files(wish) => {
                operation = Some(wish.clone());
                (Vec::new(), Vec::new())
            }
        };
        Ok(Self {
            user,
            change_user,
            groups,
            cwd,
            cwd_may_be_missing,
            candidates,
            named_by_path: matches!(start.program, Program::Shell { .. }),
            arguments: Strings::new(arguments),
            environment: Strings::new(environment),
            script,
            operation,
        })
    }

    /// In the child: everything up to the exec. Returns only an exit code, after an error was reported or after the
    /// child has done the work itself.
    fn become_program(&mut self, streams: &Streams, place: &Place<'_>) -> i32 {
        let mut report_to = place.report.as_raw_fd();
        match self.try_become_program(streams, place, &mut report_to) {
            Ok(code) => code,
            Err((stage, errno)) => {
                // If this fails, the error cannot be reported; the pipe closes, and only the exit code remains.
                let _ = sys::write_in_child(report_to, &Report { stage, errno }.to_bytes());
                EXIT_NOT_STARTED
            }
        }
    }

    fn try_become_program(
        &mut self,
        streams: &Streams,
        place: &Place<'_>,
        report_to: &mut RawFd,
    ) -> Result<i32, (Stage, Errno)> {
        let at = |stage: Stage| move |errno: Errno| (stage, errno);
        if let Some(group) = place.group {
            Tree::enter(group).map_err(at(Stage::Group))?;
        }
        self.arrange_descriptors(streams, place, report_to).map_err(at(Stage::Descriptors))?;
        // A session of its own: no terminal but the one below, and a process group that `Signal` can name.
        rustix::process::setsid().map_err(at(Stage::Terminal))?;
        if streams.terminal.is_some() {
            rustix::process::ioctl_tiocsctty(rustix::stdio::stdin()).map_err(at(Stage::Terminal))?;
        }
        // Only lowers a limit that init raised for itself, so this needs no privilege.
        let _ = rustix::process::setrlimit(Resource::Nofile, place.surroundings.descriptors);
        rustix::process::umask(Mode::from_raw_mode(0o022));
        // Init runs at a higher priority than its commands. Lowering the priority is always allowed.
        let _ = rustix::process::setpriority_process(None, 0);
        if self.change_user {
            // Groups first: after the user has changed, changing groups is not permitted.
            let (uid, gid) = (Uid::from_raw(self.user.uid), Gid::from_raw(self.user.gid));
            match rustix::thread::set_thread_groups(&self.groups) {
                // A user namespace that was made without privilege denies this to every process in it; then there is
                // only one user.
                Err(Errno::PERM) if rustix::process::getuid() == uid => {}
                other => other.map_err(at(Stage::Identity))?,
            }
            rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(at(Stage::Identity))?;
            rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(at(Stage::Identity))?;
        }
        // After the user has changed, so that the user's own permissions apply.
        if let Err(errno) = rustix::process::chdir(self.cwd.as_c_str()) {
            if !self.cwd_may_be_missing {
                return Err((Stage::Directory, errno));
            }
            rustix::process::chdir(c"/").map_err(at(Stage::Directory))?;
        }
        place.surroundings.signals.reset_in_child();
        if let Some(operation) = &self.operation {
            // An exec would close the report pipe.
            sys::close_in_child(*report_to, *report_to);
            return Ok(files::run(operation));
        }
        Err(self.execute())
    }

    /// Leaves open the three streams, the script and the report, and nothing else. The others are closed here and not
    /// only at the exec, because the working directory may be named through `/proc/self/fd`, and one of init's
    /// descriptors is a directory outside the sandbox's root.
    fn arrange_descriptors(
        &self,
        streams: &Streams,
        place: &Place<'_>,
        report_to: &mut RawFd,
    ) -> Result<(), Errno> {
        // Descriptors with a fixed target number are first moved beyond all targets, so that no copy overwrites the
        // source of a later one.
        let beyond = SCRIPT_DESCRIPTOR + 1;
        let report = rustix::io::fcntl_dupfd_cloexec(place.report, beyond)?;
        let script =
            self.script.as_ref().map(|script| rustix::io::fcntl_dupfd_cloexec(script, beyond)).transpose()?;
        for (number, end) in streams.ends_of_child(&place.surroundings.null).into_iter().enumerate() {
            sys::duplicate_in_child(end, number as RawFd, Inherited::Yes)?;
        }
        sys::duplicate_in_child(report.as_raw_fd(), REPORT_DESCRIPTOR, Inherited::No)?;
        *report_to = REPORT_DESCRIPTOR;
        // The calls below close these two as well.
        std::mem::forget(report);
        match script {
            None => sys::close_in_child(REPORT_DESCRIPTOR + 1, RawFd::MAX),
            Some(script) => {
                sys::duplicate_in_child(script.as_raw_fd(), SCRIPT_DESCRIPTOR, Inherited::Yes)?;
                std::mem::forget(script);
                sys::close_in_child(REPORT_DESCRIPTOR + 1, SCRIPT_DESCRIPTOR - 1);
                sys::close_in_child(SCRIPT_DESCRIPTOR + 1, RawFd::MAX);
            }
        }
        Ok(())
    }

    /// Tries each candidate, as execvp(3) does, and returns the most telling error.
    fn execute(&mut self) -> (Stage, Errno) {
        let mut worst = (Stage::Execute, Errno::NOENT);
        for candidate in &self.candidates {
            // A check is cheaper than an execve that fails, and most directories of PATH do not have the program.
            if self.candidates.len() > 1 && !exists(candidate) {
                continue;
            }
            if self.named_by_path {
                self.arguments.replace_first(candidate);
            }
            let errno = sys::execute(candidate, &self.arguments, &self.environment);
            match errno {
                Errno::NOENT if exists(candidate) => worst = (Stage::Interpreter, errno),
                Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG | Errno::NODEV | Errno::STALE => {}
                Errno::ACCESS => {
                    if worst.1 == Errno::NOENT && worst.0 == Stage::Execute {
                        worst = (Stage::Execute, errno);
                    }
                }
                other => return (Stage::Execute, other),
            }
        }
        worst
    }
}

fn exists(path: &CStr) -> bool {
    rustix::fs::accessat(CWD, path, Access::EXISTS, AtFlags::empty()).is_ok()
}

/// The whole environment, where a later value replaces an earlier one, and the `PATH` in it.
fn environment(start: &Start, user: &User) -> Result<(Vec<CString>, String), StartError> {
    let mut variables: Vec<(&str, &str)> = Vec::with_capacity(start.env.len() + 7);
    let defaults = [
        ("PATH", PATH_DEFAULT),
        ("HOME", user.home.as_str()),
        ("USER", user.name.as_str()),
        ("LOGNAME", user.name.as_str()),
        ("SHELL", user.shell.as_str()),
    ];
    variables.extend(defaults);
    if start.terminal.is_some() {
        variables.push(("TERM", TERM_DEFAULT));
    }
    variables.extend(start.env.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    // Last, so that it takes precedence: `tree` finds leftover processes of a command by it.
    variables.push((tree::COMMAND_ID_VARIABLE, &start.id));

    // For each name, the position of the first and the value of the last.
    let mut places: BTreeMap<&str, usize> = BTreeMap::new();
    let mut unique: Vec<(&str, &str)> = Vec::with_capacity(variables.len());
    for (name, value) in variables {
        match places.get(name) {
            Some(place) => unique[*place].1 = value,
            None => {
                places.insert(name, unique.len());
                unique.push((name, value));
            }
        }
    }
    let path = places.get("PATH").map_or(PATH_DEFAULT, |place| unique[*place].1).to_owned();
    let environment =
        unique.into_iter().map(|(name, value)| c_string(format!("{name}={value}"), "the environment"));
    Ok((environment.collect::<Result<_, _>>()?, path))
}

/// Where a program may be: at its own path if it has a slash, otherwise in each directory of `PATH`; an empty one is
/// the current directory.
fn candidates(program: &str, path: &str) -> Vec<CString> {
    let place = |directory: &str| match directory {
        "" => format!("./{program}"),
        directory => format!("{directory}/{program}"),
    };
    let all: Vec<String> = match program {
        "" => Vec::new(),
        program if program.contains('/') => vec![program.into()],
        _ => path.split(':').map(place).collect(),
    };
    // A NUL in the program is rejected with the arguments; a NUL in PATH hides that directory, as it would for
    // execvp(3).
    all.into_iter().filter_map(|path| CString::new(path).ok()).collect()
}

fn c_string(text: String, what: &str) -> Result<CString, StartError> {
    CString::new(text).map_err(|_| StartError::NulByte { what: what.into() })
}

/// The script as an unnamed, sealed file. Its first line keeps its number and closes the descriptor of the script.
fn script_file(script: &[u8]) -> Result<OwnedFd, Errno> {
    let file = rustix::fs::memfd_create("script", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let prefix = format!("exec {SCRIPT_DESCRIPTOR}<&-; ");
    for mut rest in [prefix.as_bytes(), script] {
        while !rest.is_empty() {
            let written = rustix::io::write(&file, rest)?;
            rest = &rest[written..];
        }
    }
    rustix::fs::fcntl_add_seals(
        &file,
        SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL,
    )?;
    Ok(file)
}

fn no_room(errno: Errno) -> StartError {
    StartError::NoRoom { reason: words(errno) }
}

/// The kernel's error, without the number.
fn words(errno: Errno) -> String {
    let text = io::Error::from(errno).to_string();
    text.split(" (os error").next().unwrap_or_default().to_lowercase()
}

/// Both ends of a command's streams. Init's ends do not block, the child's do: they are separate open file
/// descriptions.
#[derive(Debug)]
struct Streams {
    stdin: Option<Rc<OwnedFd>>,
    stdout: Rc<OwnedFd>,
    stderr: Option<Rc<OwnedFd>>,
    child_stdin: Option<OwnedFd>,
    child_stdout: Option<OwnedFd>,
    child_stderr: Option<OwnedFd>,
    /// The child's side of a terminal, instead of all three.
    terminal: Option<OwnedFd>,
}

impl Streams {
    fn open(start: &Start, uid: u32) -> Result<Self, Errno> {
        if let Some(size) = start.terminal {
            return Self::open_terminal(size, uid);
        }
        let (stdout, child_stdout) = pipe_with(PipeFlags::CLOEXEC)?;
        let (stderr, child_stderr) = pipe_with(PipeFlags::CLOEXEC)?;
        let (child_stdin, stdin) = if start.stdin {
            let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
            (Some(reader), Some(writer))
        } else {
            (None, None)
        };
        for ours in [Some(&stdout), Some(&stderr), stdin.as_ref()].into_iter().flatten() {
            rustix::fs::fcntl_setfl(ours, OFlags::NONBLOCK)?;
        }
        Ok(Self {
            stdin: stdin.map(Rc::new),
            stdout: Rc::new(stdout),
            stderr: Some(Rc::new(stderr)),
            child_stdin,
            child_stdout: Some(child_stdout),
            child_stderr: Some(child_stderr),
            terminal: None,
        })
    }

    fn open_terminal(size: TerminalSize, uid: u32) -> Result<Self, Errno> {
        let master = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        rustix::pty::unlockpt(&master)?;
        // By descriptor, since the guest controls what the path leads to.
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let terminal = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
        resize(master.as_fd(), size)?;
        // The user should be able to open its own terminal by name. An init without the privilege is that user.
        let _ = rustix::fs::fchown(&terminal, Some(Uid::from_raw(uid)), None);
        rustix::fs::fcntl_setfl(&master, OFlags::NONBLOCK)?;
        let master = Rc::new(master);
        Ok(Self {
            stdin: Some(master.clone()),
            stdout: master,
            stderr: None,
            child_stdin: None,
            child_stdout: None,
            child_stderr: None,
            terminal: Some(terminal),
        })
    }

    fn ends_of_child(&self, null: &OwnedFd) -> [i32; 3] {
        if let Some(terminal) = &self.terminal {
            return [terminal.as_raw_fd(); 3];
        }
        let end = |end: &Option<OwnedFd>| end.as_ref().unwrap_or(null).as_raw_fd();
        [end(&self.child_stdin), end(&self.child_stdout), end(&self.child_stderr)]
    }
}

/// Sets a terminal's size; the kernel sends a SIGWINCH to its foreground processes.
pub fn resize(terminal: BorrowedFd<'_>, size: TerminalSize) -> Result<(), Errno> {
    let size = Winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 };
    rustix::termios::tcsetwinsize(terminal, size)
}

#[cfg(test)]
mod tests {
    use wire::guest::Handle;

    use super::*;

    #[track_caller]
    fn check_candidates(program: &str, path: &str, expected: &[&str]) {
        let found = candidates(program, path);
        let found: Vec<&str> = found.iter().map(|path| path.to_str().expect("text")).collect();
        assert_eq!(found, expected, "`{program}` in `{path}`");
    }

    #[test]
    fn a_program_is_looked_for_in_every_directory_of_path() {
        check_candidates("ls", "/bin:/usr/bin", &["/bin/ls", "/usr/bin/ls"]);
        check_candidates("ls", "", &["./ls"]);
        check_candidates("ls", ":/bin:", &["./ls", "/bin/ls", "./ls"]);
        check_candidates("/bin/ls", "/usr/bin", &["/bin/ls"]);
        check_candidates("./ls", "/usr/bin", &["./ls"]);
        check_candidates("", "/bin", &[]);
        check_candidates("ls", "/a\0b:/bin", &["/bin/ls"]);
    }

    fn variables(env: &[(&str, &str)], terminal: bool) -> Vec<String> {
        let user = Files::default().user_by_number(0);
        let mut start = Start::shell(Handle(1), "id", "");
        start.env = env.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        start.terminal = terminal.then_some(TerminalSize { rows: 1, columns: 1 });
        let (environment, _) = environment(&start, &user).expect("no NUL");
        environment.iter().map(|variable| variable.to_str().expect("text").to_owned()).collect()
    }

    #[test]
    fn a_later_value_wins_and_what_is_given_is_not_replaced() {
        let all = variables(&[("A", "1"), ("HOME", "/x"), ("A", "2"), ("TERM", "dumb")], true);
        let count = |name: &str| all.iter().filter(|variable| variable.starts_with(name)).count();
        assert!(all.contains(&"A=2".to_owned()) && all.contains(&"HOME=/x".to_owned()), "{all:?}");
        assert!(all.contains(&"TERM=dumb".to_owned()), "{all:?}");
        assert_eq!((count("A="), count("HOME="), count("TERM=")), (1, 1, 1), "{all:?}");
    }

    #[test]
    fn the_users_variables_and_the_commands_id_are_always_there() {
        let all = variables(&[], false);
        let path = format!("PATH={PATH_DEFAULT}");
        let expected =
            [&path, "HOME=/root", "USER=root", "LOGNAME=root", "SHELL=/bin/sh", "SHOAL_COMMAND_ID=id"];
        assert_eq!(all, expected);
    }

    #[test]
    fn reports_survive_the_pipe_and_become_errors() {
        let start = Start { cwd: Cwd::Named("/x".into()), ..Start::shell(Handle(1), "id", "") };
        let asked = Asked::new(&start);
        let check = |stage, errno, expected: StartError| {
            let report = Report::from_bytes(Report { stage, errno }.to_bytes()).expect("it is one");
            assert_eq!(report.into_error(&asked), expected);
        };
        let denied = "permission denied".to_owned();
        let (path, program) = ("/x".to_owned(), "/bin/sh".to_owned());
        check(Stage::Directory, Errno::ACCESS, StartError::BadCwd { path, reason: denied.clone() });
        check(Stage::Execute, Errno::TOOBIG, StartError::ArgumentsTooLong);
        check(Stage::Execute, Errno::NOENT, StartError::ProgramNotFound { program: program.clone() });
        check(Stage::Execute, Errno::ACCESS, StartError::NotExecutable { program, reason: denied });
        let busy = "resource temporarily unavailable".to_owned();
        check(Stage::Execute, Errno::AGAIN, StartError::NoRoom { reason: busy });
        check(Stage::Identity, Errno::INVAL, StartError::UnknownUser { user: String::new() });
        assert_eq!(Report::from_bytes([0; Report::LENGTH]), None);
        assert_eq!(Report::from_bytes([0xff; Report::LENGTH]), None);
    }
}
