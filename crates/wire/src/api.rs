//! The bodies of the native HTTP API, under `/v1`.
//!
//! Times are RFC 3339 in UTC. Numbers carry their unit in their name. Unknown fields are refused, so that a
//! misspelt wish is an error and not a surprise.

mod builds;
mod files;
mod images;
mod lifetime;
mod pools;
mod stats;
mod templates;
mod volumes;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{CommandId, SandboxId};

pub use builds::*;
pub use files::*;
pub use images::*;
pub use lifetime::*;
pub use pools::*;
pub use stats::*;
pub use templates::*;
pub use volumes::*;

/// What every failed request answers with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// Stable, for programs: `sandbox_not_found`, `wrong_state`, ...
    pub code: String,
    /// One sentence for people.
    pub message: String,
    /// What to do about it, where there is something.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// More for programs, by code.
    #[serde(default, skip_serializing_if = "serde_json::Map::is_empty")]
    #[schema(value_type = Object)]
    pub details: serde_json::Map<String, serde_json::Value>,
}

/// `POST /v1/sandboxes`. Everything may be left out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CreateSandbox {
    /// Free text up to 255 bytes, unique among the owner's sandboxes.
    pub name: Option<String>,
    /// The template's name; `default` if left out. If there is a pool for it, a sandbox that stands ready there is claimed.
    pub template: Option<String>,
    /// A pool's name, in place of a template, an image and limits: one that stands ready there is claimed; if none does, one is
    /// made from the pool's template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// `host`, a reference such as `python:3.12`, or an alias; the template's if left out. It is pulled if it is not here.
    pub image: Option<String>,
    /// Added to the template's environment for every command.
    pub env: BTreeMap<String, String>,
    /// Processors, as `"500m"` or `"2"`; the template's if left out.
    pub cpu: Option<String>,
    /// Memory, as `"512Mi"` or `"2Gi"`; the template's if left out.
    pub memory: Option<String>,
    /// What its files may take, as `"5Gi"`; the template's if left out. Refused where the store has no limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// Volumes to mount beside the template's, at most 64 in all; at one path, these win.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<VolumeMount>,
    /// Free text to find it by: at most 64 labels, keys of 1 to 128 bytes without `=` and `!`, values of up to 1024.
    pub labels: BTreeMap<String, String>,
    /// Makes this a get-or-create: if a sandbox of the owner has all of these labels, it is the answer, and nothing is
    /// created; the oldest of several, and none that has failed or is being deleted. Otherwise the new sandbox gets
    /// these beside `labels`. However many ask at once, one is created.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub match_labels: Option<BTreeMap<String, String>>,
    /// How long it lives: at most 8 rules. Without one it lives until it is deleted.
    pub lifetime: Vec<LifetimeRule>,
    /// Whether the answer waits until the sandbox runs; `true` if left out.
    pub wait: Option<bool>,
}

/// `PATCH /v1/sandboxes/{id}`
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct UpdateSandbox {
    /// A new name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Labels to set, and with `null` to remove. Others stay.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, Option<String>>,
    /// Rules in place of those that hold; an empty list removes them. It counts as a touch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lifetime: Option<Vec<LifetimeRule>>,
}

/// The answer to `POST /v1/sandboxes`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CreatedSandbox {
    /// The sandbox.
    #[serde(flatten)]
    pub sandbox: Sandbox,
    /// Whether this request made it, or an earlier one with the same idempotency key. `false`: it was found by
    /// `match_labels`.
    pub created: bool,
}

/// A sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Sandbox {
    /// A UUID.
    #[schema(value_type = String)]
    pub id: SandboxId,
    /// Free text; generated where none was given.
    pub name: String,
    /// Where it is in its life.
    pub state: SandboxState,
    /// Why it is `failed`, or `deleting` by a rule of its lifetime.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What it was made from.
    pub template: String,
    /// Which version of that. It stays the same when the template changes.
    #[serde(default)]
    pub template_version: u32,
    /// The image that it was made from.
    pub image: String,
    /// What was asked for, where that is an alias of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_alias: Option<String>,
    /// Just which image, once it is known; not there for `host`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_digest: Option<String>,
    /// What it may use.
    pub limits: SandboxLimits,
    /// Volumes that it mounts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<VolumeMount>,
    /// Added to the environment of every command.
    pub env: BTreeMap<String, String>,
    /// What it can be found by.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// How long it lives. Empty: until it is deleted.
    #[serde(default)]
    pub lifetime: Vec<KeptRule>,
    /// The pool where it stood ready, as that was called when it was claimed; not there where it was made when it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claimed_from: Option<String>,
    /// When it was asked for.
    pub created_at: String,
}

/// Where a sandbox is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SandboxState {
    /// Being made.
    Creating,
    /// Takes commands.
    Running,
    /// Kept, and not running.
    Paused,
    /// Going.
    Deleting,
    /// Broken; `reason` says why. It can be deleted.
    Failed,
}

/// What a sandbox may use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SandboxLimits {
    /// Thousandths of a processor.
    pub cpu_millis: u32,
    /// Memory with page cache and tmpfs.
    pub memory_bytes: u64,
    /// Processes and threads.
    pub pids: u32,
    /// What its own files may take on disk; not there where nothing limits them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
}

/// `GET /v1/sandboxes`, one page, newest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SandboxPage {
    /// The sandboxes of this page.
    pub sandboxes: Vec<Sandbox>,
    /// Give it as `cursor` for the next page; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// `POST /v1/sandboxes/{id}/commands`, and the first message of a command's WebSocket.
/// One of `argv` and `script` is given at most; without either, the image's own entrypoint runs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RunCommand {
    /// Chosen by the caller, so that asking twice starts once.
    #[schema(value_type = Option<String>)]
    pub id: Option<CommandId>,
    /// A program and its arguments.
    pub argv: Option<Vec<String>>,
    /// A script for the shell, of up to 16 MiB.
    pub script: Option<String>,
    /// Added to the sandbox's environment.
    pub env: BTreeMap<String, String>,
    /// An absolute path that exists; the image's if left out, or `/workspace`.
    pub cwd: Option<String>,
    /// A name or number in the sandbox, optionally with `:group`; the image's if left out, or root.
    pub user: Option<String>,
    /// Whether stdin will be written to. If not, it is at its end from the start.
    pub stdin: bool,
    /// A terminal in place of pipes.
    pub terminal: Option<TerminalSize>,
    /// Ends the command's whole tree after so long; 0 or left out: never.
    pub timeout_seconds: Option<f64>,
    /// Ends it after so long without output; 0 or left out: never.
    pub idle_timeout_seconds: Option<f64>,
    /// `POST` only: whether the answer waits for the result; `true` if left out.
    pub wait: Option<bool>,
}

/// The size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TerminalSize {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub columns: u16,
}

/// A command, without its output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Command {
    /// Unique within its sandbox.
    #[schema(value_type = String)]
    pub id: CommandId,
    /// Its sandbox.
    #[schema(value_type = String)]
    pub sandbox_id: SandboxId,
    /// Where it is in its life.
    pub state: CommandState,
    /// Its process, in the sandbox's own numbers, once it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The program and its arguments, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub argv: Option<Vec<String>>,
    /// The start of the script, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub script: Option<String>,
    /// Whether `argv` or `script` is longer than what is shown here.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub request_cut: bool,
    /// Whether it has a terminal in place of pipes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub terminal: bool,
    /// How it ended, once it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub result: Option<CommandResult>,
    /// What is kept of stdout.
    pub stdout: Kept,
    /// What is kept of stderr.
    pub stderr: Kept,
    /// When it was asked for.
    pub created_at: String,
    /// When its result was known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<String>,
}

/// What is kept of a stream: bytes from `start` up to `end`. What lies before `start` fell off the front.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Kept {
    /// The first offset that can still be read.
    pub start: u64,
    /// The length of the stream so far.
    pub end: u64,
}

/// Where a command is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CommandState {
    /// Asked for, not yet running.
    Starting,
    /// Runs.
    Running,
    /// Over; `result` says how.
    Ended,
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CommandResult {
    /// What happened.
    pub outcome: Outcome,
    /// What a shell would report: the code, 128 + the signal, 127 where the program was not found, 126 where it could
    /// not be executed. Absent where there is no honest number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// A sentence, where the outcome needs one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// What happened to a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It exited by itself.
    Exited,
    /// A signal ended it that Shoal did not send.
    Signaled,
    /// Its timeout struck.
    TimedOut,
    /// It was silent for longer than its idle timeout.
    IdleTimedOut,
    /// `kill` was asked for.
    Killed,
    /// The sandbox's memory ran out while it ran, and it was killed. The kernel counts this per sandbox: of several commands
    /// at once, one that was killed by other means may be taken for one whose child ran out of memory at that time.
    OutOfMemory,
    /// It never ran; `message` says why.
    FailedToStart,
    /// The sandbox ended under it.
    SandboxGone,
}

/// `POST /v1/sandboxes/{id}/commands` with `wait`: the command and its output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FinishedCommand {
    /// The command.
    #[serde(flatten)]
    pub command: Command,
    /// Its output, where it is valid UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stdout_text: Option<String>,
    /// Its output in base64, where it is not valid UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stdout_base64: Option<String>,
    /// As with stdout.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stderr_text: Option<String>,
    /// As with stdout.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stderr_base64: Option<String>,
    /// Whether output was left out of this answer because it is longer than an answer may be. The rest can be streamed.
    pub stdout_cut: bool,
    /// As with stdout.
    pub stderr_cut: bool,
}

/// `GET /v1/sandboxes/{id}/commands`, oldest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CommandPage {
    /// The commands of this page.
    pub commands: Vec<Command>,
    /// Give it as `cursor` for the next page; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// `POST /v1/sandboxes/{id}/commands/{command}/signal`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SignalCommand {
    /// A name such as `SIGINT` or `INT`, or a number as text.
    pub signal: String,
}

/// `POST /v1/sandboxes/{id}/commands/{command}/stdin`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StdinWritten {
    /// How many bytes of stdin there are in all, with those just written.
    pub offset: u64,
}

/// What the server says on a command's WebSocket in text messages, and as server-sent events.
///
/// Output is in binary messages: one byte for the stream (1 stdout, 2 stderr), the offset as eight bytes in little
/// endian, then at most 64 KiB of the stream. In server-sent events it is `output`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum CommandEvent {
    /// First on every connection, and again when the command gets its pid.
    Command(Box<Command>),
    /// Server-sent events only: bytes of a stream.
    Output {
        /// `stdout` or `stderr`.
        stream: OutputStream,
        /// Where they begin.
        offset: u64,
        /// The bytes, where they are valid UTF-8.
        #[serde(skip_serializing_if = "Option::is_none")]
        text: Option<String>,
        /// The bytes in base64, where they are not.
        #[serde(skip_serializing_if = "Option::is_none")]
        base64: Option<String>,
    },
    /// The bytes up to `to` are no longer kept; output goes on there.
    Lost {
        /// `stdout` or `stderr`.
        stream: OutputStream,
        /// The offset that was asked for.
        from: u64,
        /// The first that is kept.
        to: u64,
    },
    /// WebSocket only: stdin up to `offset` was taken over.
    StdinAck {
        /// How many bytes in all.
        offset: u64,
    },
    /// The command is over and all its output was sent. The last event.
    Ended(Box<Command>),
    /// Something that the client sent was refused; the stream goes on.
    Refused(ErrorBody),
}

/// A stream that comes out of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OutputStream {
    /// Standard output, or the terminal.
    Stdout,
    /// Standard error.
    Stderr,
}

/// What a client says on a command's WebSocket in text messages. Stdin goes in binary messages, as it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum CommandWish {
    /// First on `/v1/sandboxes/{id}/commands/stream`: what to run.
    Start(Box<RunCommand>),
    /// No more stdin.
    StdinEnd,
    /// A signal for the command's process group.
    Signal {
        /// A name such as `SIGINT` or `INT`, or a number as text.
        signal: String,
    },
    /// The end of the command's whole tree.
    Kill,
    /// The terminal has a new size.
    Resize {
        /// Lines.
        rows: u16,
        /// Characters in a line.
        columns: u16,
    },
}

/// What happens to sandboxes, their commands and templates: `GET /v1/events`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum SandboxEvent {
    /// First on every connection: what comes after happens from now on, or after the event that was named.
    Ready,
    /// Events were missed: too many came, or the daemon was started anew. What follows happens from now on.
    Missed,
    /// A sandbox has a new state or a new name.
    Sandbox {
        /// When.
        at: String,
        /// Which.
        #[schema(value_type = String)]
        sandbox_id: SandboxId,
        /// Its name.
        name: String,
        /// Its state.
        state: SandboxState,
        /// Why it is `failed`, or `deleting` by a rule of its lifetime. Long reasons are cut here.
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// Nothing of a sandbox is left.
    Deleted {
        /// When.
        at: String,
        /// Which.
        #[schema(value_type = String)]
        sandbox_id: SandboxId,
        /// The name it had.
        name: String,
    },
    /// A command runs.
    CommandStarted {
        /// When.
        at: String,
        /// In which sandbox.
        #[schema(value_type = String)]
        sandbox_id: SandboxId,
        /// Which.
        #[schema(value_type = String)]
        command_id: CommandId,
        /// Its process, in the sandbox's own numbers.
        pid: u32,
    },
    /// A command has its result.
    CommandEnded {
        /// When.
        at: String,
        /// In which sandbox.
        #[schema(value_type = String)]
        sandbox_id: SandboxId,
        /// Which.
        #[schema(value_type = String)]
        command_id: CommandId,
        /// How it ended.
        result: CommandResult,
    },
    /// A template has a new version, a new state or a new name.
    Template {
        /// When.
        at: String,
        /// Its name.
        name: String,
        /// Its newest version.
        version: u32,
        /// How far that is.
        state: TemplateState,
        /// Why it is `failed`. Long reasons are cut here.
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// A template is gone.
    TemplateDeleted {
        /// When.
        at: String,
        /// The name it had.
        name: String,
    },
}

/// `GET /v1/version`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Version {
    /// Of the program.
    pub version: String,
    /// Of the native API.
    pub api: String,
}

/// `GET /v1/health` and `GET /v1/ready`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// `ok`, or what is missing.
    pub status: String,
}

/// `POST /v1/keys`
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CreateKey {
    /// Whose sandboxes it opens. Letters, digits, `-`, `_` and `.`.
    pub owner: String,
    /// Whether it opens `/metrics` and nothing else: for whatever collects them.
    pub metrics_only: bool,
    /// At most so many sandboxes at once.
    pub sandboxes_max: Option<u32>,
    /// At most so much cpu in all, as `"4"`.
    pub cpu_max: Option<String>,
    /// At most so much memory in all, as `"8Gi"`.
    pub memory_max: Option<String>,
}

/// A key, without its secret.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Key {
    /// Names it, and is not secret.
    pub id: String,
    /// Whose sandboxes it opens.
    pub owner: String,
    /// Whether it may manage keys.
    pub admin: bool,
    /// Whether it opens `/metrics` and nothing else.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub metrics_only: bool,
    /// As in [`CreateKey`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandboxes_max: Option<u32>,
    /// Thousandths of a processor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_millis_max: Option<u64>,
    /// Bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes_max: Option<u64>,
    /// When it was made.
    pub created_at: String,
}

/// The answer to `POST /v1/keys`: the only time that the secret is shown.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CreatedKey {
    /// The key.
    #[serde(flatten)]
    pub key: Key,
    /// What to put into `SHOAL_API_KEY`.
    pub secret: String,
}

/// `GET /v1/keys`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct KeyList {
    /// All keys.
    pub keys: Vec<Key>,
}
