//! The bodies of the native HTTP API, under `/v1`.
//!
//! Times are RFC 3339 in UTC. Numbers have their unit in their name. Requests with unknown fields are rejected, so
//! that a misspelt field is an error and not ignored.

mod builds;
mod files;
mod hooks;
mod images;
mod lifetime;
mod network;
mod pools;
mod ports;
mod secrets;
mod snapshots;
mod stats;
mod templates;
mod volumes;
mod webhooks;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{CommandId, SandboxId};

pub use builds::*;
pub use files::*;
pub use hooks::*;
pub use images::*;
pub use lifetime::*;
pub use network::*;
pub use pools::*;
pub use ports::*;
pub use secrets::*;
pub use snapshots::*;
pub use stats::*;
pub use templates::*;
pub use volumes::*;
pub use webhooks::*;

/// The body of every error response.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// Stable, for programs: `sandbox_not_found`, `wrong_state`, ...
    pub code: String,
    /// One sentence for people.
    pub message: String,
    /// What to do about it, if there is something to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Details for programs, depending on the code.
    #[serde(default, skip_serializing_if = "serde_json::Map::is_empty")]
    #[schema(value_type = Object)]
    pub details: serde_json::Map<String, serde_json::Value>,
}

/// `POST /v1/sandboxes`. All fields are optional.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CreateSandbox {
    /// Up to 255 bytes without spaces, `/` and `:`, and not `-` first. Unique among the owner's sandboxes.
    pub name: Option<String>,
    /// The template's name, or the id or name of a snapshot. Default: `default`. If the template has a pool, the request claims a sandbox that is
    /// ready there.
    pub template: Option<String>,
    /// A pool's name, instead of a template, an image and limits. The request claims a sandbox that is ready there;
    /// if none is, it creates one from the pool's template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// `host`, a reference such as `python:3.12`, or an alias. Default: the template's. Pulled if it is not stored
    /// yet.
    pub image: Option<String>,
    /// Variables for every command, added to the template's environment.
    pub env: BTreeMap<String, String>,
    /// Processors, as `"500m"` or `"2"`. Default: the template's.
    pub cpu: Option<String>,
    /// Memory, as `"512Mi"` or `"2Gi"`. Default: the template's.
    pub memory: Option<String>,
    /// Disk limit for its files, as `"5Gi"`. Default: the template's. Rejected if the store cannot enforce limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// Volumes to mount in addition to the template's, at most 64 in all; at the same path, these take precedence.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<VolumeMount>,
    /// Labels to find it by: at most 64, keys of 1 to 128 bytes without `=` and `!`, values of up to 1024 bytes.
    pub labels: BTreeMap<String, String>,
    /// Makes this a get-or-create: if a sandbox of the owner has all of these labels, it is returned and nothing is
    /// created. Of several the oldest is returned; failed sandboxes and those being deleted do not count. Otherwise
    /// the new sandbox gets these labels in addition to `labels`. Concurrent requests create one sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub match_labels: Option<BTreeMap<String, String>>,
    /// Lifetime rules, at most 8. Without a rule the sandbox lives until it is deleted.
    pub lifetime: Vec<LifetimeRule>,
    /// What it may reach: `"none"`, `"registries"`, `"open"` or an object with `mode`, `rules` and `audit`. Default: the
    /// template's, otherwise the operator's default, which is `none` unless the configuration says otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
    /// Names of secrets that it may use without holding them, in addition to those of `network`. Their hosts are opened.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub inject: Vec<String>,
    /// How many snapshots to keep of those that are taken before commands, 0 to 100; `undo` goes back to them.
    /// Default: the template's, otherwise 0, which takes none. Needs a store with snapshots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub history: Option<u32>,
    /// Commands that run in it when something is done to it. At points where there is none, the template's run.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub hooks: BTreeMap<String, Hook>,
    /// Whether to wait until the sandbox runs. Default: `true`.
    pub wait: Option<bool>,
}

/// `PATCH /v1/sandboxes/{id}`
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct UpdateSandbox {
    /// A new name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Labels to set, or to remove with `null`. Other labels stay.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, Option<String>>,
    /// Replaces all lifetime rules; an empty list removes them. Counts as a touch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lifetime: Option<Vec<LifetimeRule>>,
    /// Replaces what it may reach. In force when it is answered; open connections that lost their rule are cut.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
    /// How many snapshots of its history to keep, 0 to 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub history: Option<u32>,
    /// Replaces all hooks; an empty object removes them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hooks: Option<BTreeMap<String, Hook>>,
}

/// Response to `POST /v1/sandboxes`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CreatedSandbox {
    /// The sandbox.
    #[serde(flatten)]
    pub sandbox: Sandbox,
    /// Whether this request, or an earlier one with the same idempotency key, created the sandbox. `false`: it was
    /// found by `match_labels`.
    pub created: bool,
}

/// A sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Sandbox {
    /// A UUID.
    #[schema(value_type = String)]
    pub id: SandboxId,
    /// The sandbox's name; generated if the request gave none.
    pub name: String,
    /// The sandbox's state.
    pub state: SandboxState,
    /// What it has kept, if it is `paused`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<PauseMemory>,
    /// Why it is `failed`, why it is `paused` if no caller asked for that, or which rule deletes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The template that it was made from.
    pub template: String,
    /// Version of that template. It stays the same when the template changes.
    #[serde(default)]
    pub template_version: u32,
    /// The image that it was made from.
    pub image: String,
    /// The requested image, if that is an alias.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_alias: Option<String>,
    /// The image's digest, once known; absent for `host`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_digest: Option<String>,
    /// Limits.
    pub limits: SandboxLimits,
    /// Volumes that it mounts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<VolumeMount>,
    /// Variables for every command.
    pub env: BTreeMap<String, String>,
    /// Labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Lifetime rules. If empty, the sandbox lives until it is deleted.
    #[serde(default)]
    pub lifetime: Vec<KeptRule>,
    /// What it may reach.
    #[serde(default)]
    pub network: NetworkPolicy,
    /// The pool that it was claimed from, by the pool's name at that time; absent if it was created on request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claimed_from: Option<String>,
    /// How many snapshots of its history are kept; absent if it has none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub history: u32,
    /// Commands that run in it when something is done to it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub hooks: BTreeMap<String, Hook>,
    /// How the last run of each hook went.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub hook_runs: BTreeMap<String, HookRun>,
    /// When it was requested.
    pub created_at: String,
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// State of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SandboxState {
    /// It is being created.
    Creating,
    /// It accepts commands.
    Running,
    /// It is kept, but not running.
    Paused,
    /// It is being deleted.
    Deleting,
    /// It failed; `reason` says why. It can be deleted, and resumed if its files are whole.
    Failed,
}

/// What a pause does with the memory of a sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PauseMemory {
    /// Processes stand still in memory, and go on where they were.
    #[default]
    Keep,
    /// Processes end. Files stay, those in `/tmp` included, those in `/dev/shm` not. Processor and memory count no more.
    Drop,
}

/// Whether a request to a sandbox's commands or files resumes a paused sandbox first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResumeWish {
    /// It does, and waits until the sandbox runs.
    #[default]
    Auto,
    /// It fails with `wrong_state`.
    Never,
}

/// `POST /v1/sandboxes/{id}/pause`
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PauseSandbox {
    /// What happens to its memory. Default: `keep`.
    pub memory: PauseMemory,
    /// With `drop`: how long processes may take to end after SIGTERM, 0 to 600 seconds. Default: 10.
    pub grace_seconds: Option<f64>,
}

/// Limits of a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SandboxLimits {
    /// Thousandths of a processor.
    pub cpu_millis: u32,
    /// Memory, including page cache and tmpfs.
    pub memory_bytes: u64,
    /// Processes and threads.
    pub pids: u32,
    /// Disk limit for its own files; absent if nothing limits them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
}

/// `GET /v1/sandboxes`, one page, newest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SandboxPage {
    /// The sandboxes of this page.
    pub sandboxes: Vec<Sandbox>,
    /// Pass it as `cursor` to get the next page; absent on the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// `GET /v1/admin/sandboxes`, one page, newest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AdminSandboxPage {
    /// The sandboxes of this page.
    pub sandboxes: Vec<AdminSandbox>,
    /// Pass it as `cursor` to get the next page; absent on the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// A sandbox of any owner, as an operator sees it, without its contents.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AdminSandbox {
    /// Its id.
    #[schema(value_type = String)]
    pub id: SandboxId,
    /// Whose it is.
    pub owner: String,
    /// Its name.
    pub name: String,
    /// Its state.
    pub state: SandboxState,
    /// `sandbox`; `pool` if it waits in a pool; `build` if a step of a build runs in it.
    pub role: String,
    /// How much output of its commands is kept on the host's disk.
    pub output_bytes: u64,
    /// When it was created, as RFC 3339.
    pub created_at: String,
}

/// `POST /v1/sandboxes/{id}/commands`, and the first message of a command's WebSocket.
/// Give at most one of `argv` and `script`; without either, the image's entrypoint runs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RunCommand {
    /// Chosen by the caller, so that a retry does not start the command twice.
    #[schema(value_type = Option<String>)]
    pub id: Option<CommandId>,
    /// A program and its arguments.
    pub argv: Option<Vec<String>>,
    /// A shell script of up to 16 MiB.
    pub script: Option<String>,
    /// Variables, added to the sandbox's environment.
    pub env: BTreeMap<String, String>,
    /// An existing absolute path. Default: the image's, otherwise `/workspace`.
    pub cwd: Option<String>,
    /// A user name or number in the sandbox, optionally with `:group`. Default: the image's, otherwise root.
    pub user: Option<String>,
    /// Whether stdin will be written to. If not, stdin is empty.
    pub stdin: bool,
    /// A terminal instead of pipes.
    pub terminal: Option<TerminalSize>,
    /// Ends the command's whole process tree after this long; 0 or left out: never.
    pub timeout_seconds: Option<f64>,
    /// Ends it after this long without output; 0 or left out: never.
    pub idle_timeout_seconds: Option<f64>,
    /// `POST` only: whether to wait for the result. Default: `true`.
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
    /// State of the command.
    pub state: CommandState,
    /// Its process id inside the sandbox, once it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The program and its arguments, if the request gave them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub argv: Option<Vec<String>>,
    /// The beginning of the script, if the request gave one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub script: Option<String>,
    /// Whether `argv` or `script` is longer than shown here.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub request_cut: bool,
    /// Whether it has a terminal instead of pipes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub terminal: bool,
    /// How it ended, once it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub result: Option<CommandResult>,
    /// The range of stdout that is stored.
    pub stdout: Kept,
    /// The range of stderr that is stored.
    pub stderr: Kept,
    /// When it was requested.
    pub created_at: String,
    /// When its result was known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<String>,
}

/// The range of a stream that is stored: bytes from `start` up to `end`. Bytes before `start` were dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Kept {
    /// The first offset that can still be read.
    pub start: u64,
    /// The length of the stream so far.
    pub end: u64,
}

/// State of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CommandState {
    /// Requested, not running yet.
    Starting,
    /// Running.
    Running,
    /// Ended; `result` says how.
    Ended,
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CommandResult {
    /// What happened.
    pub outcome: Outcome,
    /// What a shell would report: the exit code, 128 + the signal, 127 if the program was not found, 126 if it could
    /// not be executed. Absent if none of these applies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// A sentence, if the outcome needs one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Present if the sandbox has no network and programs tried to reach one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<CommandNetwork>,
    /// Present and true if the snapshot before the command could not be taken, so that the sandbox's history cannot undo it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub not_undoable: bool,
}

/// What happened to a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It exited on its own.
    Exited,
    /// A signal ended it that Shoal did not send.
    Signaled,
    /// It ran longer than its timeout.
    TimedOut,
    /// It produced no output for longer than its idle timeout.
    IdleTimedOut,
    /// A caller killed it.
    Killed,
    /// The sandbox's memory ran out while it ran, and it was killed. The kernel counts this per sandbox: if several
    /// commands run at once, a command that was killed in another way may be reported as one whose child ran out of
    /// memory at that time.
    OutOfMemory,
    /// It never ran; `message` says why.
    FailedToStart,
    /// The sandbox ended while the command ran.
    SandboxGone,
}

/// `POST /v1/sandboxes/{id}/commands` with `wait`: the command and its output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FinishedCommand {
    /// The command.
    #[serde(flatten)]
    pub command: Command,
    /// Its stdout, if it is valid UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stdout_text: Option<String>,
    /// Its stdout in base64, if it is not valid UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stdout_base64: Option<String>,
    /// As for stdout.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stderr_text: Option<String>,
    /// As for stdout.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stderr_base64: Option<String>,
    /// Whether output was left out because it is longer than a response may be. The rest can be streamed.
    pub stdout_cut: bool,
    /// As for stdout.
    pub stderr_cut: bool,
}

/// `GET /v1/sandboxes/{id}/commands`, oldest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CommandPage {
    /// The commands of this page.
    pub commands: Vec<Command>,
    /// Pass it as `cursor` to get the next page; absent on the last page.
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
    /// Total number of stdin bytes, including those just written.
    pub offset: u64,
}

/// What the server sends on a command's WebSocket in text messages, and as server-sent events.
///
/// Output is sent in binary messages: one byte for the stream (1 stdout, 2 stderr), the offset as eight bytes in
/// little endian, then at most 64 KiB of the stream. In server-sent events it is `output`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum CommandEvent {
    /// First on every connection, and again when the command gets its process id.
    Command(Box<Command>),
    /// Server-sent events only: bytes of a stream.
    Output {
        /// `stdout` or `stderr`.
        stream: OutputStream,
        /// Offset of the bytes.
        offset: u64,
        /// The bytes, if they are valid UTF-8.
        #[serde(skip_serializing_if = "Option::is_none")]
        text: Option<String>,
        /// The bytes in base64, if they are not.
        #[serde(skip_serializing_if = "Option::is_none")]
        base64: Option<String>,
    },
    /// The bytes up to `to` are no longer stored; output continues there.
    Lost {
        /// `stdout` or `stderr`.
        stream: OutputStream,
        /// The requested offset.
        from: u64,
        /// The first offset that is stored.
        to: u64,
    },
    /// WebSocket only: stdin up to `offset` was accepted.
    StdinAck {
        /// Total number of bytes.
        offset: u64,
    },
    /// The command has ended and all its output was sent. The last event.
    Ended(Box<Command>),
    /// A message of the client was rejected; the stream continues.
    Refused(ErrorBody),
}

/// An output stream of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OutputStream {
    /// Standard output, or the terminal.
    Stdout,
    /// Standard error.
    Stderr,
}

/// What a client sends on a command's WebSocket in text messages. Stdin is sent in binary messages, unchanged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum CommandWish {
    /// First on `/v1/sandboxes/{id}/commands/stream`: what to run.
    Start(Box<RunCommand>),
    /// End of stdin.
    StdinEnd,
    /// A signal for the command's process group.
    Signal {
        /// A name such as `SIGINT` or `INT`, or a number as text.
        signal: String,
    },
    /// End the command's whole process tree.
    Kill,
    /// The terminal has a new size.
    Resize {
        /// Lines.
        rows: u16,
        /// Characters in a line.
        columns: u16,
    },
}

/// Events of sandboxes, their commands, snapshots, templates, volumes and pools: `GET /v1/events`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum SandboxEvent {
    /// First on every connection: later events happened from now on, or after the event that the request named.
    Ready,
    /// Events were missed: there were too many, or the daemon could not keep them. Later events happened from now on.
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
        /// Why it is `failed`, or which rule deletes it. Long reasons are shortened here.
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// A sandbox was deleted completely.
    Deleted {
        /// When.
        at: String,
        /// Which.
        #[schema(value_type = String)]
        sandbox_id: SandboxId,
        /// Its last name.
        name: String,
    },
    /// A command started.
    CommandStarted {
        /// When.
        at: String,
        /// In which sandbox.
        #[schema(value_type = String)]
        sandbox_id: SandboxId,
        /// Which.
        #[schema(value_type = String)]
        command_id: CommandId,
        /// Its process id inside the sandbox.
        pid: u32,
    },
    /// A command ended.
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
    /// A hook failed.
    HookFailed {
        /// When.
        at: String,
        /// In which sandbox.
        #[schema(value_type = String)]
        sandbox_id: SandboxId,
        /// Which: `before_pause`, for example.
        hook: String,
        /// How. Long reasons are shortened here.
        reason: String,
    },
    /// A snapshot can be used, or could not be made.
    Snapshot {
        /// When.
        at: String,
        /// Its id.
        snapshot_id: String,
        /// Its name.
        name: String,
        /// The sandbox that it was taken of.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(value_type = Option<String>)]
        sandbox_id: Option<SandboxId>,
        /// Its state.
        state: SnapshotState,
        /// Why it is `failed`. Long reasons are shortened here.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// A snapshot was deleted. Its files stay as long as something needs them.
    SnapshotDeleted {
        /// When.
        at: String,
        /// Its id.
        snapshot_id: String,
        /// Its name.
        name: String,
    },
    /// A volume was created, or has a new name or a new size.
    Volume {
        /// When.
        at: String,
        /// Its name.
        name: String,
        /// Its size.
        size_bytes: u64,
    },
    /// A volume was deleted.
    VolumeDeleted {
        /// When.
        at: String,
        /// Its last name.
        name: String,
    },
    /// A pool was created or changed, or cannot be filled, or can be filled again.
    Pool {
        /// When.
        at: String,
        /// Its name.
        name: String,
        /// How many sandboxes it keeps ready.
        replicas: u32,
        /// Why it cannot be filled. Long reasons are shortened here.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// A pool was deleted.
    PoolDeleted {
        /// When.
        at: String,
        /// Its last name.
        name: String,
    },
    /// A test of a webhook. It comes to webhooks only.
    Test {
        /// When.
        at: String,
    },
    /// A template has a new version, a new state or a new name.
    Template {
        /// When.
        at: String,
        /// Its name.
        name: String,
        /// Its newest version.
        version: u32,
        /// State of that version.
        state: TemplateState,
        /// Why it is `failed`. Long reasons are shortened here.
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// A template was deleted.
    TemplateDeleted {
        /// When.
        at: String,
        /// Its last name.
        name: String,
    },
}

/// `GET /v1/version`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Version {
    /// Version of the program.
    pub version: String,
    /// Version of the native API.
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
    /// Owner whose sandboxes the key opens. Letters, digits, `-`, `_` and `.`.
    pub owner: String,
    /// Whether the key opens `/metrics` only: for metrics collectors.
    pub metrics_only: bool,
    /// Most sandboxes at once.
    pub sandboxes_max: Option<u32>,
    /// Most cpu in total, as `"4"`.
    pub cpu_max: Option<String>,
    /// Most memory in total, as `"8Gi"`.
    pub memory_max: Option<String>,
    /// Most disk in total: the sum of the disk limits of sandboxes, as `"100Gi"`.
    pub disk_max: Option<String>,
    /// Most bytes of volumes in total, as `"100Gi"`.
    pub volumes_max: Option<String>,
    /// Most output of commands that is kept, as `"1Gi"`. Beyond that, the oldest is dropped.
    pub output_max: Option<String>,
    /// Most snapshots.
    pub snapshots_max: Option<u32>,
    /// Most builds at once.
    pub builds_max: Option<u32>,
    /// Most connections at once.
    pub connections_max: Option<u32>,
}

/// What an owner uses of what keys limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct OwnerUse {
    /// Sandboxes.
    pub sandboxes: u64,
    /// The sum of their cpu limits, in thousandths of a processor.
    pub cpu_millis: u64,
    /// The sum of their memory limits.
    pub memory_bytes: u64,
    /// The sum of their disk limits.
    pub disk_bytes: u64,
    /// The sum of the sizes of volumes.
    pub volume_bytes: u64,
    /// Output of commands that is kept.
    pub output_bytes: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// Builds that run.
    pub builds: u64,
}

/// A key, without its secret.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Key {
    /// Identifies the key; not secret.
    pub id: String,
    /// Owner whose sandboxes the key opens.
    pub owner: String,
    /// Whether it may manage keys.
    pub admin: bool,
    /// Whether the key opens `/metrics` only.
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
    /// Bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes_max: Option<u64>,
    /// Bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_bytes_max: Option<u64>,
    /// Bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_bytes_max: Option<u64>,
    /// As in [`CreateKey`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots_max: Option<u32>,
    /// As in [`CreateKey`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub builds_max: Option<u32>,
    /// As in [`CreateKey`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections_max: Option<u32>,
    /// What the key's owner uses, in a list of keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<OwnerUse>,
    /// When the key was created.
    pub created_at: String,
}

/// Response to `POST /v1/keys`: the only time that the secret is shown.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CreatedKey {
    /// The key.
    #[serde(flatten)]
    pub key: Key,
    /// The value for `SHOAL_API_KEY`.
    pub secret: String,
}

/// `GET /v1/keys`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct KeyList {
    /// All keys.
    pub keys: Vec<Key>,
}
