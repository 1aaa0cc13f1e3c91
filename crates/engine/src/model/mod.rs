//! What goes into the engine and comes out of it. Checked types: whoever holds one need not check again.

pub mod attendance;
pub(crate) mod check;
pub mod defaults;
pub mod dialect_notes;
mod env;
mod guest_path;
mod idempotency;
pub mod labels;
pub mod lifetime;
pub(crate) mod names;
mod program;
pub mod progress;
pub(crate) mod random;
pub mod state;
pub mod template;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use wire::guest::{ExitStatus, Start, StartError, Stream, TerminalSize};
use wire::launch::Limits;
use wire::{CommandId, SandboxId};

pub use crate::model::names::{PoolName, SandboxName, TemplateName};

pub use crate::error::{DbError, EngineError, ErrorClass, Field, Must, Noun, Resource, shown};
pub use crate::model::attendance::Attendance;
pub use crate::model::dialect_notes::{NoteChanges, Notes};
pub use crate::model::env::{CommandEnv, Env, SandboxEnv};
pub use crate::model::guest_path::{GuestPath, GuestUser};
pub use crate::model::idempotency::IdempotencyKey;
pub use crate::model::labels::{LabelChanges, Labels, Selector};
pub use crate::model::lifetime::{Action, Explanation, LastUse, Lifetime, Renewal, Rule, Since};
pub use crate::model::program::{Argv, Program, Script};
pub use crate::model::state::{Disk, Kept, State};
pub use crate::model::template::VolumeMount;

/// Whose sandboxes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner(String);

impl Owner {
    /// Enough for a name, short enough for a log line.
    pub const LENGTH_MAX: usize = 64;

    /// Whose sandboxes are when nobody made owners.
    pub fn default_owner() -> Self {
        Self("default".into())
    }

    /// 1 to 64 of `A-Z a-z 0-9 - _ .`
    pub fn parse(text: &str) -> Result<Self, EngineError> {
        let plain = text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
        if plain && (1..=Self::LENGTH_MAX).contains(&text.len()) {
            return Ok(Self(text.into()));
        }
        let rule = format!(
            "be 1 to {} of the characters A-Z a-z 0-9 - _ ., got `{}`",
            Self::LENGTH_MAX,
            shown(text)
        );
        Err(Field::Owner.must(rule))
    }

    /// As it was written.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a new sandbox should be.
#[derive(Debug, Clone)]
pub struct SandboxSpec {
    /// Made up where there is none.
    pub name: Option<SandboxName>,
    /// The name of one of the owner's templates, or `default`.
    pub template: TemplateName,
    /// `host`, a reference or an alias; the template's where there is none.
    pub image: Option<String>,
    /// Added to the template's environment for every command.
    pub env: SandboxEnv,
    /// The template's where there is none.
    pub cpu_millis: Option<u32>,
    /// The template's where there is none.
    pub memory_bytes: Option<u64>,
    /// What its files may take; the template's where there is none. Refused where the store has no limits.
    pub disk_bytes: Option<u64>,
    /// Volumes, beside those of the template; at one path, these win.
    pub mounts: Vec<VolumeMount>,
    /// How it can be found.
    pub labels: Labels,
    /// What a dialect wants to find again.
    pub notes: Notes,
    /// How long it lives.
    pub lifetime: Lifetime,
    /// Asking twice with one key makes one sandbox, for as long as that sandbox exists.
    pub idempotency_key: Option<IdempotencyKey>,
    /// The name of one of the owner's pools, in place of a template; it is claimed there if one is ready.
    pub pool: Option<PoolName>,
}

impl Default for SandboxSpec {
    fn default() -> Self {
        Self {
            name: None,
            template: TemplateName::built_in(),
            image: None,
            env: SandboxEnv::default(),
            cpu_millis: None,
            memory_bytes: None,
            disk_bytes: None,
            mounts: Vec::new(),
            labels: Labels::default(),
            notes: Notes::default(),
            lifetime: Lifetime::default(),
            idempotency_key: None,
            pool: None,
        }
    }
}

/// When `create` answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// When the sandbox takes commands, or has failed.
    Ready,
    /// When its row is written.
    No,
}

/// Where the sandbox in an answer comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// It was made for this request, or for an earlier one with the same idempotency key.
    Made,
    /// It was there before.
    Found,
}

/// What should change about a sandbox, all of it or nothing. What is left out stays as it is.
#[derive(Debug, Clone, Default)]
pub struct SandboxUpdate {
    /// A new name.
    pub name: Option<SandboxName>,
    /// Labels to set and to remove.
    pub labels: LabelChanges,
    /// Notes to set and to remove.
    pub notes: NoteChanges,
    /// Rules in place of those that hold. It counts as a touch.
    pub lifetime: Option<Lifetime>,
}

impl SandboxUpdate {
    /// Whether nothing should change.
    pub fn is_empty(&self) -> bool {
        self.name.is_none() && self.labels.is_empty() && self.notes.is_empty() && self.lifetime.is_none()
    }
}

/// A sandbox, as it is at one moment.
#[derive(Debug, Clone)]
pub struct Sandbox {
    /// Names it.
    pub id: SandboxId,
    /// Whose it is.
    pub owner: Owner,
    /// What people call it.
    pub name: SandboxName,
    /// Where it is in its life.
    pub state: State,
    /// Why it failed.
    pub reason: Option<String>,
    /// What it was made from.
    pub template: String,
    /// Which version of that.
    pub template_version: u32,
    /// The image that it was made from, as people read it.
    pub image: String,
    /// What was asked for, where that was an alias of it.
    pub image_alias: Option<String>,
    /// Just which one, where it is not the machine itself.
    pub image_digest: Option<image::Digest>,
    /// What it may use.
    pub limits: Limits,
    /// Volumes that it mounts, by their names of today.
    pub mounts: Vec<VolumeMount>,
    /// Added to the environment of every command.
    pub env: BTreeMap<String, String>,
    /// How it can be found.
    pub labels: Labels,
    /// What dialects keep with it.
    pub notes: Notes,
    /// How long it lives.
    pub lifetime: Lifetime,
    /// The pool where it stood ready, as that was called when it was claimed.
    pub claimed_from: Option<String>,
    /// When it was asked for.
    pub created_at: SystemTime,
}

/// Which sandboxes to list, newest first.
#[derive(Debug, Clone, Default)]
pub struct ListQuery {
    /// At most so many; [`crate::PAGE_MAX`] at most.
    pub limit: Option<u32>,
    /// From the page before.
    pub cursor: Option<String>,
    /// Only the one with exactly this name.
    pub name: Option<String>,
    /// Only those that all of these mean; [`crate::model::labels::SELECTORS_MAX`] at most.
    pub selectors: Vec<Selector>,
}

/// Which commands to list, oldest first.
#[derive(Debug, Clone, Default)]
pub struct CommandQuery {
    /// At most so many; [`crate::PAGE_MAX`] at most.
    pub limit: Option<u32>,
    /// From the page before.
    pub cursor: Option<String>,
}

/// A part of a list.
#[derive(Debug, Clone)]
pub struct Page<T> {
    /// What is on it.
    pub items: Vec<T>,
    /// Where the next page begins; `None` on the last.
    pub next_cursor: Option<String>,
}

/// What to run, and how.
#[derive(Debug, Clone)]
pub struct CommandSpec {
    /// Starting is idempotent on it. Made up where there is none.
    pub id: Option<CommandId>,
    /// What to run.
    pub program: Program,
    /// Added to the sandbox's environment.
    pub env: CommandEnv,
    /// A directory that exists; the template's or the image's where there is none.
    pub cwd: Option<GuestPath>,
    /// The image's where there is none, and root where that names none.
    pub user: Option<GuestUser>,
    /// Whether stdin will be written to. If not, it is at its end from the start.
    pub stdin: bool,
    /// A terminal in place of pipes.
    pub terminal: Option<TerminalSize>,
    /// Ends the whole tree after so long. Zero means none.
    pub timeout: Option<Duration>,
    /// Ends it after so long without output. Zero means none.
    pub idle_timeout: Option<Duration>,
    /// What becomes of it when nobody looks.
    pub attendance: Attendance,
}

impl CommandSpec {
    /// A program with nothing else asked for.
    pub fn new(program: Program) -> Self {
        Self {
            id: None,
            program,
            env: CommandEnv::default(),
            cwd: None,
            user: None,
            stdin: false,
            terminal: None,
            timeout: None,
            idle_timeout: None,
            attendance: Attendance::default(),
        }
    }
}

/// A command, as it is at one moment.
#[derive(Debug, Clone)]
pub struct Command {
    /// Unique within its sandbox.
    pub id: CommandId,
    /// Its sandbox.
    pub sandbox: SandboxId,
    /// Where it is in its life.
    pub state: CommandState,
    /// What init was asked to start.
    pub start: Arc<Start>,
    /// What is kept of stdout.
    pub stdout: Span,
    /// What is kept of stderr.
    pub stderr: Span,
    /// When it was asked for.
    pub created_at: SystemTime,
    /// When its result was known.
    pub ended_at: Option<SystemTime>,
}

/// Where a command is in its life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandState {
    /// Asked for, not yet running.
    Starting,
    /// Runs.
    Running {
        /// Its process, in the guest's own numbers.
        pid: u32,
    },
    /// Over.
    Ended {
        /// Its process, if there ever was one.
        pid: Option<u32>,
        /// How it ended.
        outcome: Outcome,
    },
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// By itself, with this code.
    Exited(i32),
    /// By a signal that Shoal did not send.
    Signaled(i32),
    /// Its timeout struck. With what the kernel said of the main process.
    TimedOut(ExitStatus),
    /// Its timeout struck and its sandbox's init did nothing about it, so the host ended it. How it took that was not told, and
    /// what it wrote last may be missing.
    TimedOutUnheard,
    /// It was silent for too long.
    IdleTimedOut(ExitStatus),
    /// `kill` was asked for.
    Killed(ExitStatus),
    /// The sandbox's memory ran out, as the host counts.
    OutOfMemory(ExitStatus),
    /// It never ran.
    FailedToStart(StartError),
    /// The sandbox ended under it.
    SandboxGone,
}

/// What is kept of a stream: from `start` to `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Span {
    /// The first offset that can still be read.
    pub start: u64,
    /// The length of the stream so far.
    pub end: u64,
}

/// Where to read each stream from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Offsets {
    /// Of stdout.
    pub stdout: u64,
    /// Of stderr.
    pub stderr: u64,
}

/// A signal that may be sent: 1 to 64.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signal(i32);

impl Signal {
    /// The signals with a name, as Linux numbers them on x86-64 and most others.
    const NAMES: [(&'static str, i32); 31] = [
        ("HUP", 1),
        ("INT", 2),
        ("QUIT", 3),
        ("ILL", 4),
        ("TRAP", 5),
        ("ABRT", 6),
        ("BUS", 7),
        ("FPE", 8),
        ("KILL", 9),
        ("USR1", 10),
        ("SEGV", 11),
        ("USR2", 12),
        ("PIPE", 13),
        ("ALRM", 14),
        ("TERM", 15),
        ("STKFLT", 16),
        ("CHLD", 17),
        ("CONT", 18),
        ("STOP", 19),
        ("TSTP", 20),
        ("TTIN", 21),
        ("TTOU", 22),
        ("URG", 23),
        ("XCPU", 24),
        ("XFSZ", 25),
        ("VTALRM", 26),
        ("PROF", 27),
        ("WINCH", 28),
        ("IO", 29),
        ("PWR", 30),
        ("SYS", 31),
    ];
    /// The last real-time signal.
    const NUMBER_MAX: i32 = 64;

    /// A name such as `SIGINT` or `INT`, in any case, or a number as text.
    pub fn parse(text: &str) -> Result<Self, EngineError> {
        let upper = text.to_ascii_uppercase();
        let name = upper.strip_prefix("SIG").unwrap_or(&upper);
        let named = Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, number)| *number);
        // Only digits: `parse` alone would take a sign, too.
        let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let number = named.or_else(|| if digits { text.parse().ok() } else { None });
        match number {
            Some(number) if (1..=Self::NUMBER_MAX).contains(&number) => Ok(Self(number)),
            Some(_) | None => {
                let rule = format!(
                    "be a name such as SIGINT or a number from 1 to {}, got `{}`",
                    Self::NUMBER_MAX,
                    shown(text)
                );
                Err(Field::Signal.must(rule))
            }
        }
    }

    /// As the kernel numbers it.
    pub fn number(self) -> i32 {
        self.0
    }
}

/// One thing that happened to a command that someone watches.
#[derive(Debug, Clone)]
pub enum OutputEvent {
    /// It runs: the pid is known.
    Started {
        /// Its process, in the guest's own numbers.
        pid: u32,
    },
    /// Bytes of a stream.
    Bytes {
        /// Which one.
        stream: Stream,
        /// Where they begin.
        offset: u64,
        /// The bytes.
        bytes: Bytes,
    },
    /// Bytes from `from` to `to` are no longer kept.
    Lost {
        /// Of which stream.
        stream: Stream,
        /// The offset that was next.
        from: u64,
        /// The first that is kept.
        to: u64,
    },
    /// Stdin up to `offset` was given to the command.
    StdinAck {
        /// How many bytes in all.
        offset: u64,
    },
    /// The reader was too slow for too long and was let go, so that it does not hold up the command.
    /// Reconnect with offsets.
    Stalled,
    /// It is over, and all its output was handed out before this.
    Ended(Box<Command>),
}

/// Output that was collected at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gathered {
    /// From the first byte that is kept.
    pub stdout: Vec<u8>,
    /// Whether anything is missing from it, at the front or at the end.
    pub stdout_cut: bool,
    /// From the first byte that is kept.
    pub stderr: Vec<u8>,
    /// Whether anything is missing from it, at the front or at the end.
    pub stderr_cut: bool,
}

/// What proves whose sandboxes someone may use. Without its secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    /// Names it, and is not secret.
    pub id: String,
    /// Whose sandboxes it opens.
    pub owner: Owner,
    /// Whether it may manage keys.
    pub admin: bool,
    /// Whether it opens the metrics, and nothing else.
    pub metrics_only: bool,
    /// What its owner may have at once, when asking with this key.
    pub limits: KeyLimits,
    /// When it was made.
    pub created_at: SystemTime,
}

/// What an owner may have at once. `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeyLimits {
    /// Sandboxes.
    pub sandboxes: Option<u32>,
    /// Thousandths of a processor, in all.
    pub cpu_millis: Option<u64>,
    /// Memory, in all.
    pub memory_bytes: Option<u64>,
}

/// What a new key should be.
#[derive(Debug, Clone)]
pub struct KeySpec {
    /// Whose sandboxes it opens.
    pub owner: Owner,
    /// Whether it may manage keys.
    pub admin: bool,
    /// Whether it opens the metrics, and nothing else.
    pub metrics_only: bool,
    /// What its owner may have at once.
    pub limits: KeyLimits,
}

/// What all sandboxes of a machine together may promise themselves. Memory and cpu may be overcommitted by the operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// How many.
    pub sandboxes: u32,
    /// Thousandths of a processor.
    pub cpu_millis: u64,
    /// Memory.
    pub memory_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_read_by_name_and_by_number() {
        for (text, number) in [("TERM", 15), ("SIGTERM", 15), ("sigint", 2), ("9", 9), ("64", 64)] {
            assert_eq!(Signal::parse(text).expect(text).number(), number, "{text}");
        }
        for text in ["", "0", "65", "-1", "+9", "SIGNOTHING", "9 ", "SIG", "99999999999999999999"] {
            Signal::parse(text).expect_err(text);
        }
    }

    #[test]
    fn names_and_owners_are_bounded_and_plain() {
        assert!(SandboxName::parse("My build, number 4 – ünïcode").is_ok());
        for text in ["", "a\nb", "a\0b", "\u{85}", &"x".repeat(256)] {
            SandboxName::parse(text).expect_err(text);
        }
        assert!(Owner::parse("team-a.b_C9").is_ok());
        for text in ["", "a b", "a/b", "ä", &"x".repeat(65)] {
            Owner::parse(text).expect_err(text);
        }
    }
}
