//! Messages between daemon and init.
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
//! Init keeps every byte and every result until the daemon acknowledges it; the daemon acknowledges what it has
//! stored. So output stays exact when the daemon dies. Init accepts one connection at a time, and a new connection
//! replaces the old.
//!
//! Both enums only grow, at their ends, since postcard numbers variants by their order. A variant whose fields change
//! becomes a new variant, and the version goes up.

use serde::{Deserialize, Serialize};

use crate::files::FileOp;

/// The newest version that this build speaks. 2 added [`Program::Files`], 3 [`FileOp::Edit`] and [`FileOp::GrepWith`].
pub const VERSION: u32 = 3;
/// The oldest version that this build still speaks.
pub const VERSION_MIN: u32 = 1;

/// A range of versions, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Versions {
    /// The oldest.
    pub min: u32,
    /// The newest.
    pub max: u32,
}

impl Versions {
    /// Whether two ranges have a version in common.
    pub fn meet(self, other: Self) -> bool {
        self.min.max(other.min) <= self.max.min(other.max)
    }
}

/// Number of characters that [`speaks`] adds to its label: two numbers of four digits and a dash.
const RANGE_LENGTH: usize = 9;

/// The versions that a program speaks, as text in its executable: the label, then `0001-0003`. Tests change this text
/// in a copy of the program to get a program of another version without building one.
pub const fn speaks<const LENGTH: usize>(label: &str) -> [u8; LENGTH] {
    let label = label.as_bytes();
    assert!(LENGTH == label.len() + RANGE_LENGTH, "the length must be that of the label and the range");
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

/// Reads the range from a text of [`speaks`]. Reads at run time, so that the compiler does not assume the text's
/// value.
pub fn spoken(text: &'static [u8]) -> Versions {
    let text = std::hint::black_box(text);
    let number = |digits: &[u8]| digits.iter().fold(0, |number, digit| number * 10 + u32::from(digit - b'0'));
    let range = &text[text.len() - RANGE_LENGTH..];
    Versions { min: number(&range[..4]), max: number(&range[5..]) }
}

/// How much output of one stream init holds for the daemon. When this is full, the writing process blocks.
pub const OUTPUT_WINDOW: usize = 1024 * 1024;
/// How much unacknowledged stdin of one command may be on its way.
pub const STDIN_WINDOW: usize = 256 * 1024;
/// Commands that init runs or remembers at once. Each costs a cgroup and a few descriptors.
pub const COMMANDS_MAX: usize = 2048;

/// A command between daemon and init: a number that the daemon chose, never used twice in a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Handle(pub u32);

impl Handle {
    /// Name of the cgroup of a command's processes, below the sandbox's own. Init creates it; the host knows the
    /// name, so that it can end a command without init.
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
    /// The stream's number, the same as that of a process's descriptor.
    pub fn number(self) -> u8 {
        match self {
            Self::Stdin => 0,
            Self::Stdout => 1,
            Self::Stderr => 2,
        }
    }

    /// The stream with this number.
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
    /// The first message on a connection: the versions that the daemon speaks.
    Hello {
        /// The oldest.
        version_min: u32,
        /// The newest.
        version_max: u32,
    },
    /// Start a command. No effect if init already knows the handle.
    Start(Box<Start>),
    /// Stdin ends after `offset` bytes.
    StdinEnd {
        /// Which command.
        handle: Handle,
        /// Total number of bytes.
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
        /// Total number of stored bytes.
        offset: u64,
    },
    /// The daemon has stored the result; init may forget the command.
    AckResult {
        /// Which command.
        handle: Handle,
    },
    /// After a reconnect: continue from these lengths, which also acknowledge.
    Resume {
        /// Which command.
        handle: Handle,
        /// Stored bytes of stdout.
        stdout: u64,
        /// Stored bytes of stderr.
        stderr: u64,
    },
    /// Check that init responds.
    Ping {
        /// Returned in the answer.
        serial: u64,
    },
}

/// From init to the daemon. Untrusted: a guest that took over init may send anything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromInit {
    /// The answer to the daemon's hello.
    Hello {
        /// The version to speak: the newest that both know.
        version: u32,
    },
    /// No common version; init closes the connection after this.
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
        /// Its process id inside the guest, if the command was started.
        pid: Option<u32>,
        /// How much stdin init has received for the command, delivered or not: the daemon continues from here. After
        /// the `Resume`, a `StdinAck` says how much was delivered to the command.
        stdin: u64,
    },
    /// The list of commands is complete.
    KnownEnd,
    /// The command runs.
    Started {
        /// Which command.
        handle: Handle,
        /// Its process id inside the guest.
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
    /// The command has ended. All output up to these lengths was sent before, or will be sent on a new connection.
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

/// How a command ended, as init saw it. The host determines whether memory ran out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// The exit status of the main process.
    pub status: ExitStatus,
    /// Whether init ended the command, and why.
    pub cause: EndCause,
}

/// Exit status of a process, as the kernel reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitStatus {
    /// It exited with this code.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
}

/// What ended a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum EndCause {
    /// The command itself.
    Itself,
    /// It ran longer than its timeout.
    Timeout,
    /// It was silent for longer than its idle timeout.
    IdleTimeout,
    /// A `Kill` message.
    Killed,
}

/// Everything init needs to start a command. The daemon stores it too, so that it can send it again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// The daemon's number for it.
    pub handle: Handle,
    /// The caller's id for it, passed to the command as `SHOAL_COMMAND_ID`.
    pub id: String,
    /// What to run.
    pub program: Program,
    /// The whole environment, in order; a later value replaces an earlier one. Init adds `HOME`, `USER`, `LOGNAME`
    /// and `SHELL` of the user if they are missing.
    pub env: Vec<(String, String)>,
    /// Where to run it. It must exist.
    pub cwd: Cwd,
    /// The user: a name or a number, optionally with `:group`. `None` is root.
    pub user: Option<String>,
    /// Whether the caller will write to stdin. If not, stdin is empty.
    pub stdin: bool,
    /// A terminal instead of pipes.
    pub terminal: Option<TerminalSize>,
    /// End it after this long.
    pub timeout_ms: Option<u64>,
    /// End it after this long without output.
    pub idle_timeout_ms: Option<u64>,
    /// The time between SIGTERM and the end of the whole tree, after a timeout.
    pub grace_ms: u64,
}

impl Start {
    /// A shell script with no other settings: a starting point for tests and examples.
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
    /// The caller named it: a missing directory is an error.
    Named(String),
    /// The template named it: `/` is used if the guest has removed it.
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
        /// As requested.
        program: String,
    },
    /// The program exists but cannot be executed.
    #[error("program `{program}` cannot be executed: {reason}")]
    NotExecutable {
        /// As requested.
        program: String,
        /// The kernel's error.
        reason: String,
    },
    /// The arguments and environment are longer than the kernel allows.
    #[error("the arguments and environment are too long for the kernel")]
    ArgumentsTooLong,
    /// The working directory is missing or not a directory, or the user may not enter it.
    #[error("cannot enter working directory `{path}`: {reason}")]
    BadCwd {
        /// As requested.
        path: String,
        /// The kernel's error.
        reason: String,
    },
    /// The user is not in the guest's `/etc/passwd`.
    #[error("user `{user}` does not exist in the sandbox")]
    UnknownUser {
        /// As requested.
        user: String,
    },
    /// A value that system calls cannot pass on, such as one with a NUL.
    #[error("{what} contains a NUL byte")]
    NulByte {
        /// Which part.
        what: String,
    },
    /// The guest is out of processes, descriptors, memory or command slots.
    #[error("the sandbox has no room for another command: {reason}")]
    NoRoom {
        /// The resource, in the kernel's words.
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
        assert!(!meet((1, 9), (5, 4)), "an empty range overlaps nothing");
    }

    #[test]
    fn what_is_spoken_is_what_this_build_says() {
        static TEXT: [u8; 22] = speaks("a test speaks");
        assert_eq!(TEXT, *b"a test speaks0001-0003");
        assert_eq!(spoken(&TEXT), Versions { min: VERSION_MIN, max: VERSION });
        assert_eq!(spoken(b"x0012-3456"), Versions { min: 12, max: 3456 });
    }
}
