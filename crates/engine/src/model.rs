//! What goes into the engine and comes out of it. Checked types: whoever holds one need not check again.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use runtime::BackendError;
use wire::guest::{Start, Stream};
use wire::launch::Limits;
use wire::{CommandId, SandboxId};

/// Whose sandboxes. 1 to 64 of `A-Z a-z 0-9 - _ .`
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner(String);

impl Owner {
    /// Checks a name.
    pub fn parse(text: &str) -> Result<Self, EngineError> {
        let fits = (1..=64).contains(&text.len());
        if fits && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.')) {
            return Ok(Self(text.into()));
        }
        let why = "it is 1 to 64 of the characters A-Z a-z 0-9 - _ .".into();
        Err(EngineError::Invalid { what: "owner", why })
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Free text of 1 to 255 bytes, without control characters; never reaches a path.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SandboxName(String);

impl SandboxName {
    /// Checks a name.
    pub fn parse(text: &str) -> Result<Self, EngineError> {
        if (1..=255).contains(&text.len()) && !text.chars().any(char::is_control) {
            return Ok(Self(text.into()));
        }
        let why = "it is 1 to 255 bytes of text without control characters".into();
        Err(EngineError::Invalid { what: "name", why })
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What a new sandbox should be.
#[derive(Debug, Clone)]
pub struct SandboxSpec {
    pub name: Option<SandboxName>,
    /// `default` is the only template so far.
    pub template: String,
    pub env: BTreeMap<String, String>,
    pub cpu_millis: Option<u32>,
    pub memory_bytes: Option<u64>,
    /// Asking twice with one key makes one sandbox.
    pub idempotency_key: Option<String>,
}

/// When `create` answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait { Ready, No }

#[derive(Debug, Clone)]
pub struct Sandbox {
    pub id: SandboxId,
    pub owner: Owner,
    pub name: SandboxName,
    pub state: State,
    /// Why it failed.
    pub reason: Option<String>,
    pub template: String,
    pub image: String,
    pub limits: Limits,
    pub env: BTreeMap<String, String>,
    pub created_at: SystemTime,
}

/// See `lifecycle` (to be written there and re-exported).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State { Creating, Running, Paused(Kept), Deleting, Failed { disk: Disk } }
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept { Frozen, Saved, Dropped }
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disk { Whole, Lost }

#[derive(Debug, Clone, Default)]
pub struct ListQuery { pub limit: Option<u32>, pub cursor: Option<String>, pub name: Option<String> }
#[derive(Debug, Clone, Default)]
pub struct CommandQuery { pub limit: Option<u32>, pub cursor: Option<String> }
#[derive(Debug, Clone)]
pub struct Page<T> { pub items: Vec<T>, pub next_cursor: Option<String> }

#[derive(Debug, Clone)]
pub struct CommandSpec {
    pub id: Option<CommandId>,
    pub program: wire::guest::Program,
    pub env: BTreeMap<String, String>,
    pub cwd: Option<String>,
    pub user: Option<String>,
    pub stdin: bool,
    pub terminal: Option<wire::guest::TerminalSize>,
    pub timeout: Option<Duration>,
    pub idle_timeout: Option<Duration>,
}

#[derive(Debug, Clone)]
pub struct Command {
    pub id: CommandId,
    pub sandbox: SandboxId,
    pub state: CommandState,
    pub start: std::sync::Arc<Start>,
    pub stdout: Span,
    pub stderr: Span,
    pub created_at: SystemTime,
    pub ended_at: Option<SystemTime>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandState { Starting, Running { pid: u32 }, Ended { pid: Option<u32>, outcome: Outcome } }

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    Exited(i32),
    Signaled(i32),
    /// With what the kernel said of the main process.
    TimedOut(wire::guest::ExitStatus),
    IdleTimedOut(wire::guest::ExitStatus),
    Killed(wire::guest::ExitStatus),
    OutOfMemory(wire::guest::ExitStatus),
    FailedToStart(wire::guest::StartError),
    /// The sandbox ended under it.
    SandboxGone,
}

/// What is kept of a stream: from `start` to `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Span { pub start: u64, pub end: u64 }
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Offsets { pub stdout: u64, pub stderr: u64 }

/// A signal that may be sent: 1 to 64.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signal(i32);

impl Signal {
    /// A name such as `SIGINT` or `INT`, in any case, or a number as text.
    pub fn parse(text: &str) -> Result<Self, EngineError> {
        match text.parse() {
            Ok(number @ 1..=64) => Ok(Self(number)),
            Ok(_) | Err(_) => Err(EngineError::Invalid { what: "signal", why: "its number is 1 to 64".into() }),
        }
    }

    /// The number.
    pub fn number(self) -> i32 {
        self.0
    }
}

pub enum OutputEvent {
    /// State changed to running: the pid is known.
    Started { pid: u32 },
    Bytes { stream: Stream, offset: u64, bytes: Bytes },
    /// Bytes from `from` to `to` are no longer kept.
    Lost { stream: Stream, from: u64, to: u64 },
    StdinAck { offset: u64 },
    /// The reader was too slow for too long and was let go, so that it does not hold up the command. Reconnect with offsets.
    Stalled,
    Ended(Box<Command>),
}

pub struct Gathered { pub stdout: Vec<u8>, pub stdout_cut: bool, pub stderr: Vec<u8>, pub stderr_cut: bool }

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    pub id: String,
    pub owner: Owner,
    pub admin: bool,
    pub limits: KeyLimits,
    pub created_at: SystemTime,
}
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeyLimits { pub sandboxes: Option<u32>, pub cpu_millis: Option<u64>, pub memory_bytes: Option<u64> }
pub struct KeySpec { pub owner: Owner, pub admin: bool, pub limits: KeyLimits }
/// `shoal_<id>_<secret>`; printed only on purpose.
pub struct KeySecret(String);
impl KeySecret {
    /// A secret for a data directory that has none yet.
    pub fn random() -> Self {
        todo!()
    }

    /// A secret that an operator chose. Weak ones are refused.
    pub fn parse(text: &str) -> Result<Self, EngineError> {
        Ok(Self(text.into()))
    }

    /// The whole text, for the one answer that shows it and for the key file.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}
impl fmt::Debug for KeySecret { fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.write_str("KeySecret(..)") } }

/// What all sandboxes of a machine together may promise themselves. Memory and cpu may be overcommitted by the operator.
#[derive(Debug, Clone, Copy)]
pub struct Capacity { pub sandboxes: u32, pub cpu_millis: u64, pub memory_bytes: u64 }

/// Everything that can be refused or go wrong, one variant per thing a caller can act on.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("sandbox `{id}` does not exist")] SandboxNotFound { id: String },
    #[error("command `{id}` does not exist")] CommandNotFound { id: String },
    #[error("template `{name}` does not exist")] TemplateNotFound { name: String },
    #[error("key `{id}` does not exist")] KeyNotFound { id: String },
    #[error("a sandbox named `{name}` exists already")] NameTaken { name: String },
    #[error("command `{id}` was started before with another request")] CommandIdReused { id: CommandId },
    #[error("the idempotency key was used before with another request")] IdempotencyKeyReused,
    #[error("sandbox `{id}` is {state}")] WrongState { id: SandboxId, state: &'static str },
    #[error("sandbox `{id}` failed: {reason}")] SandboxFailed { id: SandboxId, reason: String },
    #[error("{what} is not valid: {why}")] Invalid { what: &'static str, why: String },
    #[error("the key's limit of {limit} {what} is reached")] Quota { what: &'static str, limit: u64 },
    #[error("the machine has no room: {what}")] Full { what: String },
    #[error("command `{id}` takes no input")] StdinClosed { id: CommandId },
    #[error("command `{id}` does not read its input")] StdinStalled { id: CommandId },
    #[error("command `{id}` is over")] CommandEnded { id: CommandId },
    #[error("command `{id}` has no terminal")] NoTerminal { id: CommandId },
    #[error("sandbox `{id}` does not answer")] Unresponsive { id: SandboxId },
    #[error("cannot create sandbox `{id}`")] Create { id: SandboxId, source: BackendError },
    #[error("cannot delete sandbox `{id}`")] Delete { id: SandboxId, source: BackendError },
    #[error("cannot {doing}")] Store { doing: &'static str, source: StoreError },
    #[error("cannot {doing} the output of command `{id}`")] Log { doing: &'static str, id: CommandId, source: std::io::Error },
    #[error("the engine is stopping")] Stopping,
}

/// What the database said (to be replaced by `store`'s own).
#[derive(Debug, thiserror::Error)]
#[error("database")]
pub struct StoreError;
