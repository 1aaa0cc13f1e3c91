//! Inputs and outputs of the engine. Checked types: code that holds one need not check again.

pub mod attendance;
pub(crate) mod check;
pub mod defaults;
pub mod dialect_notes;
mod env;
pub(crate) mod event;
mod guest_path;
pub mod hook;
mod idempotency;
pub mod labels;
pub mod lifetime;
pub(crate) mod names;
pub mod network;
pub mod port;
mod program;
pub mod progress;
pub(crate) mod random;
pub mod secret;
pub mod state;
pub mod template;
pub mod webhook;

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
pub use crate::model::hook::{Hook, HookPoint, HookRun, Hooks};
pub use crate::model::idempotency::IdempotencyKey;
pub use crate::model::labels::{LabelChanges, Labels, Selector};
pub use crate::model::lifetime::{Action, Explanation, LastUse, Lifetime, Renewal, Rule, Since};
pub use crate::model::network::{
    NetworkAction, NetworkChange, NetworkEvent, NetworkEventQuery, NetworkMode, NetworkPolicy, NetworkRule,
    NetworkSpec, NetworkTotals, NetworkView, PresetHostView,
};
pub use crate::model::program::{Argv, Program, Script};
pub use crate::model::state::{Disk, Kept, State};
pub use crate::model::template::VolumeMount;

/// The owner of sandboxes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner(String);

impl Owner {
    /// Enough for a name, short enough for a log line.
    pub const LENGTH_MAX: usize = 64;

    /// The owner if none is configured.
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
    /// Generated if there is none.
    pub name: Option<SandboxName>,
    /// The name of one of the owner's templates, or `default`.
    pub template: TemplateName,
    /// `host`, a reference or an alias; the template's where there is none.
    pub image: Option<String>,
    /// Added to the template's environment for every command.
    pub env: SandboxEnv,
    /// The template's where there is none.
    pub cpu_millis: Option<u32>,
    /// Default: the template's.
    pub memory_bytes: Option<u64>,
    /// Disk limit for its files. Default: the template's. Rejected if the store cannot enforce limits.
    pub disk_bytes: Option<u64>,
    /// Volumes in addition to the template's; at the same path, these take precedence.
    pub mounts: Vec<VolumeMount>,
    /// How it can be found.
    pub labels: Labels,
    /// Notes of a dialect.
    pub notes: Notes,
    /// Lifetime rules.
    pub lifetime: Lifetime,
    /// What it may reach; the template's where there is none, and the operator's default where that names none.
    pub network: Option<NetworkPolicy>,
    /// What it may reach where request, template and operator say nothing: the default of a dialect's vendor.
    pub network_default: NetworkPolicy,
    /// Names of the owner's secrets that it may use without holding them, in addition to those of `network`.
    pub inject: Vec<String>,
    /// Asking twice with one key makes one sandbox, for as long as that sandbox exists.
    pub idempotency_key: Option<IdempotencyKey>,
    /// The name of one of the owner's pools, in place of a template; it is claimed there if one is ready.
    pub pool: Option<PoolName>,
    /// How many snapshots to keep of those that are taken before commands; 0 to take none, the template's where there is none.
    pub history: Option<u32>,
    /// What runs in it when something is done to it. At points where there is none, the template's.
    pub hooks: Hooks,
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
            network: None,
            network_default: NetworkPolicy::default(),
            inject: Vec::new(),
            idempotency_key: None,
            pool: None,
            history: None,
            hooks: Hooks::default(),
        }
    }
}

/// When `create` returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// When the sandbox accepts commands, or has failed.
    Ready,
    /// When its row is written.
    No,
}

/// Where the sandbox in a response comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// It was created for this request, or for an earlier one with the same idempotency key.
    Made,
    /// It existed before.
    Found,
}

/// A change to a sandbox, applied as a whole or not at all. Fields that are `None` stay as they are.
#[derive(Debug, Clone, Default)]
pub struct SandboxUpdate {
    /// A new name.
    pub name: Option<SandboxName>,
    /// Labels to set and to remove.
    pub labels: LabelChanges,
    /// Notes to set and to remove.
    pub notes: NoteChanges,
    /// Replaces all rules. Counts as a touch.
    pub lifetime: Option<Lifetime>,
    /// Changes what it may reach. In force when the change is answered.
    pub network: Option<NetworkChange>,
    /// How many snapshots of its history to keep; 0 for none.
    pub history: Option<u32>,
    /// Replaces all hooks.
    pub hooks: Option<Hooks>,
}

impl SandboxUpdate {
    /// Whether nothing should change.
    pub fn is_empty(&self) -> bool {
        let Self { name, labels, notes, lifetime, network, history, hooks } = self;
        let unchanged = name.is_none() && labels.is_empty() && notes.is_empty() && lifetime.is_none();
        unchanged && network.is_none() && history.is_none() && hooks.is_none()
    }
}

/// A sandbox, as it is at one moment.
#[derive(Debug, Clone)]
pub struct Sandbox {
    /// Its id.
    pub id: SandboxId,
    /// Its owner.
    pub owner: Owner,
    /// Its name.
    pub name: SandboxName,
    /// Its state.
    pub state: State,
    /// Why it failed, or why it is paused or deleted if no caller asked for that.
    pub reason: Option<String>,
    /// When it was paused, if it is and that is known.
    pub paused_at: Option<SystemTime>,
    /// The template that it was made from.
    pub template: String,
    /// Version of that template.
    pub template_version: u32,
    /// The image that it was made from, as people read it.
    pub image: String,
    /// The requested name, if that was an alias.
    pub image_alias: Option<String>,
    /// The image's digest, unless it is the machine itself.
    pub image_digest: Option<image::Digest>,
    /// Its limits.
    pub limits: Limits,
    /// Volumes that it mounts, by their current names.
    pub mounts: Vec<VolumeMount>,
    /// Variables for every command.
    pub env: BTreeMap<String, String>,
    /// How it can be found.
    pub labels: Labels,
    /// Notes of dialects.
    pub notes: Notes,
    /// Lifetime rules.
    pub lifetime: Lifetime,
    /// What it may reach.
    pub network: NetworkPolicy,
    /// The pool that it was claimed from, by its name at that time.
    pub claimed_from: Option<String>,
    /// How many snapshots of its history are kept; 0 for none.
    pub history: u32,
    /// What runs in it when something is done to it.
    pub hooks: Hooks,
    /// How the last run of each hook went.
    pub hook_runs: BTreeMap<HookPoint, HookRun>,
    /// When it was requested.
    pub created_at: SystemTime,
}

/// Which sandboxes to list, newest first.
#[derive(Debug, Clone, Default)]
pub struct ListQuery {
    /// Most entries; at most [`crate::PAGE_MAX`].
    pub limit: Option<u32>,
    /// From the previous page.
    pub cursor: Option<String>,
    /// Only the one with exactly this name.
    pub name: Option<String>,
    /// Only those that match all of these; at most [`crate::model::labels::SELECTORS_MAX`].
    pub selectors: Vec<Selector>,
}

/// Which commands to list, oldest first.
#[derive(Debug, Clone, Default)]
pub struct CommandQuery {
    /// Most entries; at most [`crate::PAGE_MAX`].
    pub limit: Option<u32>,
    /// From the previous page.
    pub cursor: Option<String>,
}

/// A part of a list.
#[derive(Debug, Clone)]
pub struct Page<T> {
    /// The entries.
    pub items: Vec<T>,
    /// Where the next page begins; `None` on the last.
    pub next_cursor: Option<String>,
}

/// What to run, and how.
#[derive(Debug, Clone)]
pub struct CommandSpec {
    /// Starting is idempotent on it. Generated if there is none.
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
    /// A terminal instead of pipes.
    pub terminal: Option<TerminalSize>,
    /// Ends the whole process tree after this long. Zero means never.
    pub timeout: Option<Duration>,
    /// Ends it after this long without output. Zero means never.
    pub idle_timeout: Option<Duration>,
    /// What happens to it when no caller is attached.
    pub attendance: Attendance,
    /// Whether it resumes a paused sandbox first.
    pub resume: Resume,
}

/// Whether a request resumes a paused sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Resume {
    /// It does, and waits until the sandbox runs.
    #[default]
    Auto,
    /// It fails.
    Never,
}

/// How to pause a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PauseSpec {
    /// What to keep.
    pub kept: Kept,
    /// How long processes may take to end, if only files are kept.
    pub grace: Duration,
}

impl PauseSpec {
    /// How long processes may take to end by default. Most programs need a moment to write their files.
    pub const GRACE_DEFAULT: Duration = Duration::from_secs(10);
    /// The longest grace. The caller waits for it.
    pub const GRACE_MAX: Duration = Duration::from_secs(600);
}

impl Default for PauseSpec {
    fn default() -> Self {
        Self { kept: Kept::Frozen, grace: Self::GRACE_DEFAULT }
    }
}

impl CommandSpec {
    /// A program with default settings.
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
            resume: Resume::default(),
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
    /// Its state.
    pub state: CommandState,
    /// The request to init.
    pub start: Arc<Start>,
    /// The range of stdout that is stored.
    pub stdout: Span,
    /// The range of stderr that is stored.
    pub stderr: Span,
    /// Whether the history has no snapshot of the files before it, because that failed.
    pub not_undoable: bool,
    /// When it was requested.
    pub created_at: SystemTime,
    /// When its result was known.
    pub ended_at: Option<SystemTime>,
}

/// State of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandState {
    /// Requested, not running yet.
    Starting,
    /// Running.
    Running {
        /// Its process id inside the guest.
        pid: u32,
    },
    /// Ended.
    Ended {
        /// Its process id, if it ever had one.
        pid: Option<u32>,
        /// How it ended.
        outcome: Outcome,
    },
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It exited on its own, with this code.
    Exited(i32),
    /// By a signal that Shoal did not send.
    Signaled(i32),
    /// Its timeout expired. With the exit status of the main process.
    TimedOut(ExitStatus),
    /// Its timeout expired and its sandbox's init did not react, so the host ended it. How it reacted is unknown, and
    /// its last output may be missing.
    TimedOutUnheard,
    /// It produced no output for too long.
    IdleTimedOut(ExitStatus),
    /// A caller killed it.
    Killed(ExitStatus),
    /// The sandbox's memory ran out, as counted on the host.
    OutOfMemory(ExitStatus),
    /// It never ran.
    FailedToStart(StartError),
    /// The sandbox ended while it ran.
    SandboxGone,
}

/// The range of a stream that is stored: from `start` to `end`.
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
    /// The named signals, with their Linux numbers on x86-64 and most others.
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
        // Only digits: `parse` alone would accept a sign.
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

    /// The kernel's number.
    pub fn number(self) -> i32 {
        self.0
    }
}

/// An event of a command, for an attached caller.
#[derive(Debug, Clone)]
pub enum OutputEvent {
    /// It runs: the process id is known.
    Started {
        /// Its process id inside the guest.
        pid: u32,
    },
    /// Bytes of a stream.
    Bytes {
        /// Which one.
        stream: Stream,
        /// Their offset.
        offset: u64,
        /// The bytes.
        bytes: Bytes,
    },
    /// Bytes from `from` to `to` are no longer stored.
    Lost {
        /// Of which stream.
        stream: Stream,
        /// The next offset.
        from: u64,
        /// The first offset that is stored.
        to: u64,
    },
    /// Stdin up to `offset` was delivered to the command.
    StdinAck {
        /// Total number of bytes.
        offset: u64,
    },
    /// The reader was too slow for too long and was disconnected, so that it does not hold up the command. Reconnect
    /// with offsets.
    Stalled,
    /// It has ended, and all its output was delivered before this.
    Ended(Box<Command>),
}

/// Output that was collected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gathered {
    /// From the first byte that is stored.
    pub stdout: Vec<u8>,
    /// Whether anything is missing, at the start or at the end.
    pub stdout_cut: bool,
    /// From the first byte that is stored.
    pub stderr: Vec<u8>,
    /// Whether anything is missing, at the start or at the end.
    pub stderr_cut: bool,
}

/// An API key, without its secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    /// Its id; not secret.
    pub id: String,
    /// The owner whose sandboxes it opens.
    pub owner: Owner,
    /// Whether it may manage keys.
    pub admin: bool,
    /// Whether it opens the metrics only.
    pub metrics_only: bool,
    /// Quota of its owner, for requests with this key.
    pub limits: KeyLimits,
    /// When it was created.
    pub created_at: SystemTime,
}

/// A quota. `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeyLimits {
    /// Sandboxes.
    pub sandboxes: Option<u32>,
    /// Thousandths of a processor, in total.
    pub cpu_millis: Option<u64>,
    /// Memory, in total.
    pub memory_bytes: Option<u64>,
    /// The disk limits of all sandboxes, in total.
    pub disk_bytes: Option<u64>,
    /// The sizes of all volumes, in total.
    pub volume_bytes: Option<u64>,
    /// The output of commands that is kept, in total. Beyond that, the oldest is dropped.
    pub output_bytes: Option<u64>,
    /// Snapshots.
    pub snapshots: Option<u32>,
    /// Builds that run at the same time.
    pub builds: Option<u32>,
    /// Connections that use the key at the same time.
    pub connections: Option<u32>,
}

/// What an owner uses of what keys limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OwnerUse {
    /// Sandboxes.
    pub sandboxes: u64,
    /// Thousandths of a processor.
    pub cpu_millis: u64,
    /// Memory limits.
    pub memory_bytes: u64,
    /// Disk limits.
    pub disk_bytes: u64,
    /// Sizes of volumes.
    pub volume_bytes: u64,
    /// Output that is kept.
    pub output_bytes: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// Builds that run.
    pub builds: u64,
}

/// What a new key should be.
#[derive(Debug, Clone)]
pub struct KeySpec {
    /// The owner whose sandboxes it opens.
    pub owner: Owner,
    /// Whether it may manage keys.
    pub admin: bool,
    /// Whether it opens the metrics only.
    pub metrics_only: bool,
    /// Quota of its owner.
    pub limits: KeyLimits,
}

/// The limits of all sandboxes of a machine together. The operator may overcommit memory and cpu.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Number of sandboxes.
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
        assert!(SandboxName::parse("My-build,-number-4–ünïcode").is_ok());
        for text in ["", "a\nb", "a\0b", "\u{85}", &"x".repeat(256)] {
            SandboxName::parse(text).expect_err(text);
        }
        assert!(Owner::parse("team-a.b_C9").is_ok());
        for text in ["", "a b", "a/b", "ä", &"x".repeat(65)] {
            Owner::parse(text).expect_err(text);
        }
    }
}
