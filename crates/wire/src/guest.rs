//! What daemon and init say to each other.
//!
//! ```text
//! daemon                                  init
//!   Hello{versions} ─────────────────────▶
//!   ◀───────────── Hello{version}, Known{...} for each command, KnownEnd
//!   Resume{lengths} for each known command, Start for those unknown
//!   ...
//!   Start ───────────────────────────────▶
//!   ◀──────────────────────────── Started{pid}, or StartFailed
//!   ◀──────────────────────────── stdout and stderr as data frames
//!   Ack{offset}, once the bytes are in the log ▶     init frees what was acknowledged
//!   ◀──────────────────────────── Ended{end, stdout_end, stderr_end}
//!   AckResult, once the result is in its row ──▶     init forgets the command
//! ```
//!
//! Init keeps every byte and every result until it is acknowledged; the daemon acknowledges what it has stored.
//! That rule is what makes output exact over the death of the daemon. Init takes one connection at a time,
//! and a new one replaces the old.
//!
//! Both enums only grow, at their ends: postcard numbers variants by their order. A variant that changes its
//! fields becomes a new variant, and the version goes up.

use serde::{Deserialize, Serialize};

use crate::files::FileOp;

/// The newest version that this build speaks. 2 added [`Program::Files`], 3 [`FileOp::Edit`] and [`FileOp::GrepWith`].
pub const VERSION: u32 = 3;
/// The oldest version that this build still speaks.
pub const VERSION_MIN: u32 = 1;

/// Versions from one to another, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Versions {
    /// The oldest.
    pub min: u32,
    /// The newest.
    pub max: u32,
}

impl Versions {
    /// Whether some version is in both.
    pub fn meet(self, other: Self) -> bool {
        self.min.max(other.min) <= self.max.min(other.max)
    }
}

/// How many characters [`speaks`] adds to its label: two numbers of four digits, with a dash between them.
const RANGE_LENGTH: usize = 9;

/// What a program speaks, as a text that lies in its executable: the label, then `0001-0003`. Nothing but tests ever changes it,
/// in a copy of the program, to have one of another age without building it.
pub const fn speaks<const LENGTH: usize>(label: &str) -> [u8; LENGTH] {
    let label = label.as_bytes();
    assert!(LENGTH == label.len() + RANGE_LENGTH, "the length is that of the label and the range");
    let mut text = [b'-'; LENGTH];
    let mut at = 0;
    while at < label.len() {
        text[at] = label[at];
        at += 1;
    }
    let (mut min, mut max, mut digit) = (VERSION_MIN, VERSION, 4);
    while digit > 0 {
        digit -= 1;
        text[label.len() + digit] = b'0' + (min % 10) as u8;
        text[label.len() + 5 + digit] = b'0' + (max % 10) as u8;
        (min, max) = (min / 10, max / 10);
    }
    text
}

/// The range in a text of [`speaks`]. Read at run time, whatever a compiler may think it knows of the text.
pub fn spoken(text: &'static [u8]) -> Versions {
    let text = std::hint::black_box(text);
    let number = |digits: &[u8]| digits.iter().fold(0, |number, digit| number * 10 + u32::from(digit - b'0'));
    let range = &text[text.len() - RANGE_LENGTH..];
    Versions { min: number(&range[..4]), max: number(&range[5..]) }
}

/// How much output of one stream init holds for the daemon. When it is full, the writing process blocks.
pub const OUTPUT_WINDOW: usize = 1024 * 1024;
/// How much stdin of one command may be under way to it, unacknowledged.
pub const STDIN_WINDOW: usize = 256 * 1024;
/// Commands that init runs or remembers at once. Each costs a cgroup and a few descriptors.
pub const COMMANDS_MAX: usize = 2048;

/// A command in the talk between daemon and init: a number that the daemon chose, never used twice in a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Handle(pub u32);

impl Handle {
    /// The name of the group that a command's processes are in, below the sandbox's own. Init makes it; the host knows it, so
    /// that it can end a command without init.
    pub fn group_name(self) -> String {
        format!("c{}", self.0)
    }
}

/// A stream of a command. With a terminal, all output is on `Stdout`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Stream {
    /// To the command.
    Stdin,
    /// From the command.
    Stdout,
    /// From the command.
    Stderr,
}

impl Stream {
    /// The number that stands for it, as with a process's own descriptors.
    pub fn number(self) -> u8 {
        match self {
            Self::Stdin => 0,
            Self::Stdout => 1,
            Self::Stderr => 2,
        }
    }

    /// The stream that a number stands for.
    pub fn from_number(number: u8) -> Option<Self> {
        match number {
            0 => Some(Self::Stdin),
            1 => Some(Self::Stdout),
            2 => Some(Self::Stderr),
            _ => None,
        }
    }
}

/// From the daemon to init.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToInit {
    /// The first thing on a connection: which versions the daemon speaks.
    Hello {
        /// The oldest.
        version_min: u32,
        /// The newest.
        version_max: u32,
    },
    /// Start a command. Harmless if init already knows the handle.
    Start(Box<Start>),
    /// Stdin ends after `offset` bytes.
    StdinEnd {
        /// Which command.
        handle: Handle,
        /// How many bytes there are in all.
        offset: u64,
    },
    /// Signal the command's process group.
    Signal {
        /// Which command.
        handle: Handle,
        /// The signal's number.
        signal: i32,
    },
    /// End the command's whole tree at once.
    Kill {
        /// Which command.
        handle: Handle,
    },
    /// The terminal has a new size.
    Resize {
        /// Which command.
        handle: Handle,
        /// The new size.
        size: TerminalSize,
    },
    /// The daemon has stored the stream up to `offset`.
    Ack {
        /// Which command.
        handle: Handle,
        /// Which stream.
        stream: Stream,
        /// How many bytes it has stored in all.
        offset: u64,
    },
    /// The daemon has stored the result; init may forget the command.
    AckResult {
        /// Which command.
        handle: Handle,
    },
    /// After a reconnect: send on from these lengths, which are also acknowledgements.
    Resume {
        /// Which command.
        handle: Handle,
        /// Stored bytes of stdout.
        stdout: u64,
        /// Stored bytes of stderr.
        stderr: u64,
    },
    /// Are you there?
    Ping {
        /// Comes back in the answer.
        serial: u64,
    },
}

/// From init to the daemon. Untrusted: a guest that took over init may say anything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromInit {
    /// The answer to the daemon's hello.
    Hello {
        /// The version both will speak: the newest that both know.
        version: u32,
    },
    /// No version in common; init closes after this.
    NoCommonVersion {
        /// The oldest that init speaks.
        version_min: u32,
        /// The newest that init speaks.
        version_max: u32,
    },
    /// After the hello: a command that init has.
    Known {
        /// Which command.
        handle: Handle,
        /// Its process in the guest's own numbers, where it was started.
        pid: Option<u32>,
        /// How much stdin init has received for it, whether the command has it yet or not: the daemon sends on from here.
        /// After the `Resume`, a `StdinAck` says how much of it the command was given.
        stdin: u64,
    },
    /// All commands have been named.
    KnownEnd,
    /// The command runs.
    Started {
        /// Which command.
        handle: Handle,
        /// Its process in the guest's own numbers.
        pid: u32,
    },
    /// The command did not start. This is its result and must be acknowledged.
    StartFailed {
        /// Which command.
        handle: Handle,
        /// Why.
        error: StartError,
    },
    /// Stdin up to `offset` was given to the command; as much more may be sent.
    StdinAck {
        /// Which command.
        handle: Handle,
        /// How many bytes in all.
        offset: u64,
    },
    /// The command closed its stdin; bytes sent from here on are dropped.
    StdinClosed {
        /// Which command.
        handle: Handle,
    },
    /// The command is over. Its output up to the ends was sent before this, or will be on a new connection.
    Ended {
        /// Which command.
        handle: Handle,
        /// How it ended.
        end: End,
        /// The length of stdout.
        stdout_end: u64,
        /// The length of stderr.
        stderr_end: u64,
    },
    /// The answer to a ping.
    Pong {
        /// From the ping.
        serial: u64,
    },
}

/// How a command ended, as init saw it. Whether memory ran out is read on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// What the kernel said of the main process.
    pub status: ExitStatus,
    /// Whether init ended it, and why.
    pub cause: EndCause,
}

/// What the kernel said of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitStatus {
    /// It exited with this code.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
}

/// Who ended a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum EndCause {
    /// Nobody but itself.
    Itself,
    /// It ran longer than its timeout.
    Timeout,
    /// It was silent for longer than its idle timeout.
    IdleTimeout,
    /// `Kill` was asked for.
    Killed,
}

/// Everything init needs to start a command. Also what the daemon keeps, so that it can say it again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// The daemon's number for it.
    pub handle: Handle,
    /// The caller's name for it, given to the command as `SHOAL_COMMAND_ID`.
    pub id: String,
    /// What to run.
    pub program: Program,
    /// The whole environment, in order; a later value wins. Init adds `HOME`, `USER`, `LOGNAME` and `SHELL` of the
    /// user where they are missing.
    pub env: Vec<(String, String)>,
    /// Where to run it. It must exist.
    pub cwd: Cwd,
    /// Who runs it: a name or a number, optionally with `:group`. `None` is root.
    pub user: Option<String>,
    /// Whether the caller will write to stdin. If not, stdin is at its end from the start.
    pub stdin: bool,
    /// A terminal in place of pipes.
    pub terminal: Option<TerminalSize>,
    /// End it after this long.
    pub timeout_ms: Option<u64>,
    /// End it after this long without output.
    pub idle_timeout_ms: Option<u64>,
    /// Between SIGTERM and the end of the whole tree, when a timeout strikes.
    pub grace_ms: u64,
}

impl Start {
    /// A script for the shell with nothing else set: what tests and examples start from.
    pub fn shell(handle: Handle, id: &str, script: &str) -> Self {
        Self {
            handle,
            id: id.into(),
            program: Program::Shell { script: script.into() },
            env: Vec::new(),
            cwd: Cwd::Default("/".into()),
            user: None,
            stdin: false,
            terminal: None,
            timeout_ms: None,
            idle_timeout_ms: None,
            grace_ms: 2_000,
        }
    }
}

/// Where a command runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cwd {
    /// The caller named it: that it is missing is an error.
    Named(String),
    /// The template's: if the guest has removed it, `/` does.
    Default(String),
}

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Program {
    /// A program and its arguments, looked up in the command's `PATH` when it has no slash.
    Argv(Vec<String>),
    /// A script for `/bin/bash`, or `/bin/sh` where there is none. Of any length.
    Shell {
        /// The script.
        script: String,
    },
    /// A file operation, done by a child of init that executes nothing. Since version 2.
    Files(Box<FileOp>),
}

/// The size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub columns: u16,
}

/// Why a command did not start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum StartError {
    /// No such program.
    #[error("program `{program}` was not found")]
    ProgramNotFound {
        /// As it was asked for.
        program: String,
    },
    /// It is there and cannot be executed.
    #[error("program `{program}` cannot be executed: {reason}")]
    NotExecutable {
        /// As it was asked for.
        program: String,
        /// What the kernel said.
        reason: String,
    },
    /// The arguments and environment are more than the kernel takes.
    #[error("the arguments and environment are too long for the kernel")]
    ArgumentsTooLong,
    /// The working directory is missing or not a directory, or the user may not enter it.
    #[error("cannot enter working directory `{path}`: {reason}")]
    BadCwd {
        /// As it was asked for.
        path: String,
        /// What the kernel said.
        reason: String,
    },
    /// The user is not in the guest's `/etc/passwd`.
    #[error("user `{user}` does not exist in the sandbox")]
    UnknownUser {
        /// As it was asked for.
        user: String,
    },
    /// Something that would be lost on the way to the kernel, such as a NUL.
    #[error("{what} contains a NUL byte")]
    NulByte {
        /// Which part.
        what: String,
    },
    /// The guest is out of processes, descriptors, memory or command slots.
    #[error("the sandbox has no room for another command: {reason}")]
    NoRoom {
        /// Which resource, in the kernel's words.
        reason: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_meet_where_a_version_is_in_both() {
        let meet = |a: (u32, u32), b: (u32, u32)| {
            Versions { min: a.0, max: a.1 }.meet(Versions { min: b.0, max: b.1 })
        };
        assert!(meet((1, 2), (2, 3)) && meet((2, 3), (1, 2)) && meet((1, 9), (4, 5)));
        assert!(!meet((1, 2), (3, 4)) && !meet((3, 4), (1, 2)));
        assert!(!meet((1, 9), (5, 4)), "a range that is none meets nothing");
    }

    #[test]
    fn what_is_spoken_is_what_this_build_says() {
        static TEXT: [u8; 22] = speaks("a test speaks");
        assert_eq!(TEXT, *b"a test speaks0001-0003");
        assert_eq!(spoken(&TEXT), Versions { min: VERSION_MIN, max: VERSION });
        assert_eq!(spoken(b"x0012-3456"), Versions { min: 12, max: 3456 });
    }
}
