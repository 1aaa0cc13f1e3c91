//! Between `wire::api` and the engine: what comes in is checked, what goes out is written down.
//!
//! Everything here is pure. A request that passes is made of checked types and need not be looked at again.

mod builds;
mod lifetime;
mod pools;
mod templates;
mod volumes;

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use engine::files::{Found, Made};
use engine::images::{
    Alias, Collected, Credentials, ImageInfo, ImageRef, LayerProgress, LayerState, Platform, PullProgress,
    PullSpec, StoredLayer, Transport,
};
use engine::{
    About, Attendance, Capacity, Command, CommandSpec, CommandState, Event, Gathered, Happened, Key,
    KeyLimits, KeySpec, Labels, MachineStats, Notes, Outcome, Owner, Sandbox, SandboxName, SandboxSpec, Span,
    State, Stats,
};
use runtime::Usage;
use wire::api;
use wire::files::{Change, Cut, FileKind, FileStat, GrepMatch, WatchEvent};
use wire::guest::{ExitStatus, Program, StartError, Stream, TerminalSize};
use wire::launch::Limits;

use crate::clock::rfc3339;
use crate::conditions;
use crate::error::ApiError;
use crate::quantity::{Bytes, Cpu};

pub use builds::{build, build_wish};
pub use lifetime::{explanation, sandbox_update};
use lifetime::{kept_rule, lifetime_of};
pub use pools::{pool, pool_listed, pool_update};
pub use templates::{template, template_create, template_progress, template_spec, template_update};
pub use volumes::{mount, mount_spec, volume, volume_spec, volume_update};

/// A script of this length is the longest that may be asked for.
pub const SCRIPT_MAX: usize = 16 << 20;
/// `…/commands/stream` is where a command is started and streamed, so no command can be found there.
const RESERVED_COMMAND_ID: &str = "stream";
/// The kernel takes 2 MiB of arguments with the usual limit on a stack, and the shortest useful one takes ten bytes.
/// So many of them are a mistake, told before they travel.
const ARGUMENTS_MAX: usize = 150_000;
/// What the kernel takes as a path.
const PATH_MAX: usize = 4096;
/// Longer than any name in a passwd file, twice.
const USER_MAX: usize = 256;
/// A year: longer is a mistake in units, and is refused rather than rounded.
const TIMEOUT_SECONDS_MAX: f64 = 366.0 * 86_400.0;
/// What a client may use to make a create repeatable.
const IDEMPOTENCY_KEY_MAX: usize = 255;
/// A key with less could make no sandbox at all.
const KEY_MEMORY_MIN: u64 = 16 << 20;
/// How much of a script or of an argument list is shown, so that a page of commands stays small.
const REQUEST_SHOWN_MAX: usize = 4096;
/// The last second of the year 9999.
const CALENDAR_MAX: u64 = 253_402_300_799;

/// `POST /v1/sandboxes`
pub fn sandbox_spec(
    body: api::CreateSandbox,
    idempotency_key: Option<String>,
) -> Result<(SandboxSpec, Option<Labels>), ApiError> {
    let api::CreateSandbox {
        name,
        template,
        pool,
        image,
        env,
        cpu,
        memory,
        disk,
        mounts,
        labels,
        match_labels,
        lifetime,
        wait: _,
    } = body;
    let name = name.as_deref().map(SandboxName::parse).transpose()?;
    check_env(&env)?;
    let cpu_millis = cpu_millis(cpu)?;
    let memory_bytes = bytes("memory", memory)?;
    if let Some(key) = &idempotency_key
        && (!(1..=IDEMPOTENCY_KEY_MAX).contains(&key.len()) || !key.bytes().all(|b| b.is_ascii_graphic()))
    {
        let why = format!("it is 1 to {IDEMPOTENCY_KEY_MAX} visible ASCII characters");
        return Err(ApiError::invalid("Idempotency-Key", why));
    }
    if pool.is_some() && template.is_some() {
        return Err(ApiError::invalid("pool", "it says its template, so `template` is left out"));
    }
    let template = template.unwrap_or_else(|| "default".into());
    let labels = Labels::new(labels)?;
    let find = match_labels.map(Labels::new).transpose()?;
    let lifetime = lifetime_of(lifetime)?;
    let spec = SandboxSpec {
        name,
        template,
        image,
        env,
        cpu_millis,
        memory_bytes,
        disk_bytes: bytes("disk", disk)?,
        mounts: mounts.into_iter().map(mount_spec).collect(),
        labels,
        notes: Notes::default(),
        lifetime,
        idempotency_key,
        pool,
    };
    Ok((spec, find))
}

/// Processors, where they were said.
fn cpu_millis(text: Option<String>) -> Result<Option<u32>, ApiError> {
    let Some(text) = text else { return Ok(None) };
    let cpu = Cpu::parse(&text).map_err(|error| ApiError::invalid("cpu", error))?;
    u32::try_from(cpu.millis).map(Some).map_err(|_| ApiError::invalid("cpu", "it is too large"))
}

/// Memory or storage, where it was said.
fn bytes(field: &'static str, text: Option<String>) -> Result<Option<u64>, ApiError> {
    let Some(text) = text else { return Ok(None) };
    Bytes::parse(&text).map(|amount| Some(amount.bytes)).map_err(|error| ApiError::invalid(field, error))
}

/// `POST /v1/sandboxes/{sandbox}/commands`
pub fn command_spec(body: api::RunCommand) -> Result<CommandSpec, ApiError> {
    let api::RunCommand {
        id,
        argv,
        script,
        env,
        cwd,
        user,
        stdin,
        terminal,
        timeout_seconds,
        idle_timeout_seconds,
        wait: _,
    } = body;
    if id.as_ref().is_some_and(|id| id.as_str() == RESERVED_COMMAND_ID) {
        return Err(ApiError::invalid(
            "id",
            format!("`{RESERVED_COMMAND_ID}` is a route beside the commands"),
        ));
    }
    let program = match (argv, script) {
        (Some(argv), None) => {
            if argv.first().is_none_or(String::is_empty) {
                return Err(ApiError::invalid("argv", "it needs a program"));
            }
            if argv.len() > ARGUMENTS_MAX {
                return Err(ApiError::invalid("argv", format!("it has more than {ARGUMENTS_MAX} arguments")));
            }
            for argument in &argv {
                no_nul("argv", argument)?;
            }
            Program::Argv(argv)
        }
        (None, Some(script)) => {
            no_nul("script", &script)?;
            if script.len() > SCRIPT_MAX {
                return Err(ApiError::invalid("script", format!("it is longer than {SCRIPT_MAX} bytes")));
            }
            Program::Shell { script }
        }
        // What the image runs by itself; the engine refuses it where there is nothing.
        (None, None) => Program::Argv(Vec::new()),
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid("argv", "give either `argv` or `script`"));
        }
    };
    check_env(&env)?;
    if let Some(cwd) = &cwd {
        no_nul("cwd", cwd)?;
        if !cwd.starts_with('/') || cwd.len() > PATH_MAX {
            return Err(ApiError::invalid(
                "cwd",
                format!("it is an absolute path of at most {PATH_MAX} bytes"),
            ));
        }
    }
    if let Some(user) = &user {
        no_nul("user", user)?;
        if !(1..=USER_MAX).contains(&user.len()) {
            return Err(ApiError::invalid("user", format!("it is 1 to {USER_MAX} bytes")));
        }
    }
    let terminal = terminal.map(|size| terminal_size(size.rows, size.columns)).transpose()?;
    Ok(CommandSpec {
        id,
        program,
        env,
        cwd,
        user,
        stdin,
        terminal,
        timeout: timeout("timeout_seconds", timeout_seconds)?,
        idle_timeout: timeout("idle_timeout_seconds", idle_timeout_seconds)?,
        attendance: Attendance::default(),
    })
}

/// A terminal without lines or columns breaks the programs in it.
pub fn terminal_size(rows: u16, columns: u16) -> Result<TerminalSize, ApiError> {
    if rows == 0 || columns == 0 {
        return Err(ApiError::invalid("terminal", "rows and columns are more than zero"));
    }
    Ok(TerminalSize { rows, columns })
}

fn timeout(field: &'static str, seconds: Option<f64>) -> Result<Option<Duration>, ApiError> {
    match seconds {
        None => Ok(None),
        Some(seconds) if !(0.0..=TIMEOUT_SECONDS_MAX).contains(&seconds) => {
            Err(ApiError::invalid(field, format!("it is 0 (never) to {TIMEOUT_SECONDS_MAX} seconds")))
        }
        Some(0.0) => Ok(None),
        // Timers count milliseconds; less than one must not become "never".
        Some(seconds) => Ok(Some(Duration::from_secs_f64(seconds).max(Duration::from_millis(1)))),
    }
}

fn check_env(env: &BTreeMap<String, String>) -> Result<(), ApiError> {
    for (name, value) in env {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(ApiError::invalid("env", "a name is empty or contains `=` or a NUL byte"));
        }
        no_nul("env", value)?;
    }
    Ok(())
}

fn no_nul(field: &'static str, text: &str) -> Result<(), ApiError> {
    if text.contains('\0') { Err(ApiError::invalid(field, "it contains a NUL byte")) } else { Ok(()) }
}

/// `POST /v1/keys`
pub fn key_spec(body: api::CreateKey) -> Result<KeySpec, ApiError> {
    let api::CreateKey { owner, metrics_only, sandboxes_max, cpu_max, memory_max } = body;
    let cpu_millis = cpu_max
        .map(|text| Cpu::parse(&text).map(|cpu| cpu.millis))
        .transpose()
        .map_err(|error| ApiError::invalid("cpu_max", error))?;
    let memory_bytes = memory_max
        .map(|text| Bytes::parse(&text).map(|memory| memory.bytes))
        .transpose()
        .map_err(|error| ApiError::invalid("memory_max", error))?;
    if memory_bytes.is_some_and(|bytes| bytes < KEY_MEMORY_MIN) {
        let why =
            format!("{KEY_MEMORY_MIN} bytes is what one sandbox needs; was a unit such as `Gi` left out?");
        return Err(ApiError::invalid("memory_max", why));
    }
    let limits = KeyLimits { sandboxes: sandboxes_max, cpu_millis, memory_bytes };
    Ok(KeySpec { owner: Owner::parse(&owner)?, admin: false, metrics_only, limits })
}

/// A sandbox as clients see it.
pub fn sandbox(sandbox: Sandbox) -> api::Sandbox {
    api::Sandbox {
        id: sandbox.id,
        name: sandbox.name.as_str().to_owned(),
        state: sandbox_state(sandbox.state),
        reason: sandbox.reason,
        template: sandbox.template,
        template_version: sandbox.template_version,
        image: sandbox.image,
        image_alias: sandbox.image_alias,
        image_digest: sandbox.image_digest.map(|digest| digest.to_string()),
        limits: sandbox_limits(&sandbox.limits),
        mounts: sandbox.mounts.into_iter().map(mount).collect(),
        env: sandbox.env,
        labels: sandbox.labels.pairs().clone(),
        lifetime: sandbox.lifetime.rules().iter().map(kept_rule).collect(),
        claimed_from: sandbox.claimed_from,
        created_at: rfc3339(sandbox.created_at),
    }
}

/// Something that happened to a sandbox or a template.
pub fn sandbox_event(event: &Event) -> api::SandboxEvent {
    let at = rfc3339(event.at);
    let (sandbox_id, what) = match &event.about {
        About::Sandbox(sandbox, what) => (*sandbox, what),
        About::Template(what) => return templates::template_event(at, what),
    };
    match what {
        Happened::Sandbox { name, state, reason } => api::SandboxEvent::Sandbox {
            at,
            sandbox_id,
            name: name.as_str().to_owned(),
            state: sandbox_state(*state),
            reason: reason.clone(),
        },
        Happened::Deleted { name } => {
            api::SandboxEvent::Deleted { at, sandbox_id, name: name.as_str().to_owned() }
        }
        Happened::CommandStarted { command, pid } => {
            api::SandboxEvent::CommandStarted { at, sandbox_id, command_id: command.clone(), pid: *pid }
        }
        Happened::CommandEnded { command, outcome } => api::SandboxEvent::CommandEnded {
            at,
            sandbox_id,
            command_id: command.clone(),
            result: result(outcome),
        },
    }
}

fn sandbox_state(state: State) -> api::SandboxState {
    match state {
        State::Creating => api::SandboxState::Creating,
        State::Running => api::SandboxState::Running,
        State::Paused(_) => api::SandboxState::Paused,
        State::Deleting => api::SandboxState::Deleting,
        State::Failed { .. } => api::SandboxState::Failed,
    }
}

fn sandbox_limits(limits: &Limits) -> api::SandboxLimits {
    let Limits { cpu_millis, memory_bytes, pids, disk_bytes } = *limits;
    api::SandboxLimits { cpu_millis, memory_bytes, pids, disk_bytes }
}

/// What a sandbox uses, as clients see it.
pub fn stats(stats: Stats) -> api::SandboxStats {
    api::SandboxStats {
        sandbox_id: stats.sandbox,
        name: stats.name,
        state: sandbox_state(stats.state),
        limits: sandbox_limits(&stats.limits),
        usage: stats.usage.map(usage),
        disk: stats.disk.map(|disk| api::DiskUsage {
            bytes: disk.usage.bytes,
            complete: disk.usage.complete,
            counted_at: rfc3339(disk.at),
        }),
        commands_running: stats.commands_live as u64,
        at: rfc3339(stats.at),
    }
}

fn usage(usage: Usage) -> api::SandboxUsage {
    api::SandboxUsage {
        cpu_seconds: usage.cpu_time.as_secs_f64(),
        cpu_throttled_seconds: usage.throttled_time.as_secs_f64(),
        memory_bytes: usage.memory_bytes,
        memory_reclaimable_bytes: usage.memory_reclaimable_bytes,
        pids: usage.pids,
    }
}

/// The machine. What all owners have together is for those who run it.
pub fn machine(stats: MachineStats, key: &Key) -> api::MachineStats {
    let room = |room: Capacity| api::Room {
        sandboxes: room.sandboxes,
        cpu_millis: room.cpu_millis,
        memory_bytes: room.memory_bytes,
    };
    api::MachineStats {
        cpus: stats.machine.cpus,
        memory_bytes: stats.machine.memory_bytes,
        memory_available_bytes: stats.machine.memory_available_bytes,
        disk_bytes: stats.machine.disk_bytes,
        disk_available_bytes: stats.machine.disk_available_bytes,
        all_sandboxes: key.admin.then(|| api::AllSandboxes {
            states: stats.sandboxes.iter().map(|(state, count)| ((*state).to_owned(), *count)).collect(),
            usage: usage(stats.machine.sandboxes),
            promised: room(stats.promised),
            capacity: room(stats.capacity),
        }),
    }
}

/// A reference to an image.
pub fn reference(text: &str) -> Result<ImageRef, ApiError> {
    ImageRef::parse(text).map_err(|error| ApiError::invalid("reference", error))
}

/// `POST /v1/images/pull`
pub fn pull_spec(body: api::PullImage) -> Result<PullSpec, ApiError> {
    let api::PullImage { reference: text, platform, username, password, identity_token, insecure } = body;
    let platform = match platform {
        None => Platform::this(),
        Some(text) => Platform::parse(&text).ok_or_else(|| {
            ApiError::invalid("platform", "it is such as `linux/amd64` or `linux/arm64/v8`")
        })?,
    };
    let credentials = match (username, password, identity_token) {
        (None, None, None) => Credentials::Anonymous,
        (Some(username), Some(password), None) => {
            Credentials::basic(&username, &password).ok_or_else(|| {
                ApiError::invalid("username", "it or the password cannot be sent to a registry")
            })?
        }
        (None, None, Some(token)) if !token.is_empty() => Credentials::Identity { token },
        _ => {
            let why = "give `username` and `password`, or `identity_token`, or none of them";
            return Err(ApiError::invalid("username", why));
        }
    };
    let transport = if insecure { Transport::Clear } else { Transport::Encrypted };
    Ok(PullSpec { reference: reference(&text)?, platform, credentials, transport })
}

/// An image as clients see it.
pub fn image(info: ImageInfo) -> api::Image {
    let image = &info.image;
    let config = &image.config;
    let layer = |layer: &StoredLayer| api::ImageLayer {
        digest: layer.blob.map(|digest| digest.to_string()),
        size_bytes: layer.size,
        unpacked_bytes: layer.facts.bytes,
        entries: layer.facts.entries,
        devices_skipped: layer.facts.devices_skipped,
        owners_changed: layer.facts.owners_changed,
        attributes_dropped: layer.facts.attributes_dropped,
    };
    api::Image {
        digest: image.digest.to_string(),
        names: info.names,
        aliases: info.aliases,
        private: info.owner.is_some(),
        platform: config.platform().map_or_else(|| "unknown".into(), |platform| platform.to_string()),
        size_bytes: image.size(),
        unpacked_bytes: image.unpacked(),
        created_at: rfc3339(image.created_at),
        sandboxes: info.sandboxes as u64,
        config: api::ImageConfig {
            env: config.env.iter().cloned().collect(),
            user: config.user.clone(),
            working_directory: config.working_directory.clone(),
            entrypoint: config.entrypoint.clone(),
            command: config.command.clone(),
            labels: config.labels.clone(),
        },
        layers: image.layers.iter().map(layer).collect(),
    }
}

/// How far a pull is.
pub fn pull_progress(progress: &PullProgress) -> api::ImageEvent {
    api::ImageEvent::Progress { layers: progress.layers.iter().map(layer_progress).collect() }
}

fn layer_progress(layer: &LayerProgress) -> api::LayerProgress {
    api::LayerProgress {
        digest: layer.digest.to_string(),
        state: match layer.state {
            LayerState::Waiting => api::LayerState::Waiting,
            LayerState::Fetching => api::LayerState::Fetching,
            LayerState::Fetched => api::LayerState::Fetched,
            LayerState::Unpacking => api::LayerState::Unpacking,
            LayerState::Done => api::LayerState::Done,
            LayerState::Present => api::LayerState::Present,
        },
        bytes: layer.bytes,
        total_bytes: layer.total,
    }
}

/// What a collection removed.
pub fn collected(collected: Collected) -> api::CollectedImages {
    let Collected { images, layers, bytes } = collected;
    api::CollectedImages { images: images as u64, layers: layers as u64, bytes }
}

/// An alias as clients see it.
pub fn image_alias(alias: Alias) -> api::ImageAlias {
    api::ImageAlias { name: alias.name, target: alias.target, created_at: rfc3339(alias.created_at) }
}

/// A command as clients see it.
pub fn command(command: Command) -> api::Command {
    let (state, pid, result) = match command.state {
        CommandState::Starting => (api::CommandState::Starting, None, None),
        CommandState::Running { pid } => (api::CommandState::Running, Some(pid), None),
        CommandState::Ended { pid, outcome } => (api::CommandState::Ended, pid, Some(result(&outcome))),
    };
    let (argv, script, request_cut) = match &command.start.program {
        Program::Argv(argv) => {
            let (shown, cut) = shown_argv(argv);
            (Some(shown), None, cut)
        }
        Program::Shell { script } => {
            let shown = start_of(script, REQUEST_SHOWN_MAX);
            (None, Some(shown.to_owned()), shown.len() < script.len())
        }
        // The engine lists no file operation among commands.
        Program::Files(_) => (None, None, false),
    };
    api::Command {
        id: command.id,
        sandbox_id: command.sandbox,
        state,
        pid,
        argv,
        script,
        request_cut,
        terminal: command.start.terminal.is_some(),
        result,
        stdout: kept(command.stdout),
        stderr: kept(command.stderr),
        created_at: rfc3339(command.created_at),
        ended_at: command.ended_at.map(rfc3339),
    }
}

/// At most `length` bytes of a text, in whole characters.
fn start_of(text: &str, length: usize) -> &str {
    let mut end = text.len().min(length);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// As many whole arguments as fit, then the start of the next.
fn shown_argv(argv: &[String]) -> (Vec<String>, bool) {
    let mut room = REQUEST_SHOWN_MAX;
    let mut shown = Vec::new();
    for argument in argv {
        let part = start_of(argument, room);
        shown.push(part.to_owned());
        if part.len() < argument.len() {
            return (shown, true);
        }
        // An empty argument takes room too, or a million of them would be shown.
        room = room.saturating_sub(argument.len() + 1);
        if room == 0 {
            break;
        }
    }
    let cut = shown.len() < argv.len();
    (shown, cut)
}

fn kept(span: Span) -> api::Kept {
    api::Kept { start: span.start, end: span.end }
}

fn result(outcome: &Outcome) -> api::CommandResult {
    let of = |outcome, status: Option<ExitStatus>, message| {
        let (exit_code, signal) = match status {
            Some(ExitStatus::Code(code)) => (Some(code), None),
            Some(ExitStatus::Signal(signal)) => (Some(128 + signal), Some(signal)),
            None => (None, None),
        };
        api::CommandResult { outcome, exit_code, signal, message }
    };
    match outcome {
        Outcome::Exited(code) => of(api::Outcome::Exited, Some(ExitStatus::Code(*code)), None),
        Outcome::Signaled(signal) => of(api::Outcome::Signaled, Some(ExitStatus::Signal(*signal)), None),
        Outcome::TimedOut(status) => {
            of(api::Outcome::TimedOut, Some(*status), Some("its timeout struck".into()))
        }
        Outcome::TimedOutUnheard => {
            let why = "its timeout struck; the sandbox did not answer, so it was ended from outside, and what it wrote \
                       last may be missing";
            of(api::Outcome::TimedOut, None, Some(why.into()))
        }
        Outcome::IdleTimedOut(status) => {
            let why = "it was silent for longer than its idle timeout";
            of(api::Outcome::IdleTimedOut, Some(*status), Some(why.into()))
        }
        Outcome::Killed(status) => of(api::Outcome::Killed, Some(*status), None),
        Outcome::OutOfMemory(status) => {
            of(api::Outcome::OutOfMemory, Some(*status), Some("the sandbox's memory ran out".into()))
        }
        Outcome::FailedToStart(error) => {
            // What a shell would answer; a shell has no code for the others.
            let code = match error {
                StartError::ProgramNotFound { .. } => Some(ExitStatus::Code(127)),
                StartError::NotExecutable { .. } | StartError::ArgumentsTooLong => {
                    Some(ExitStatus::Code(126))
                }
                StartError::BadCwd { .. }
                | StartError::UnknownUser { .. }
                | StartError::NulByte { .. }
                | StartError::NoRoom { .. } => None,
            };
            of(api::Outcome::FailedToStart, code, Some(error.to_string()))
        }
        Outcome::SandboxGone => {
            of(api::Outcome::SandboxGone, None, Some("the sandbox ended under it".into()))
        }
    }
}

/// A command with its output.
pub fn finished(ended: Command, output: Gathered) -> api::FinishedCommand {
    let (stdout_text, stdout_base64) = text_or_base64(output.stdout, output.stdout_cut);
    let (stderr_text, stderr_base64) = text_or_base64(output.stderr, output.stderr_cut);
    api::FinishedCommand {
        command: command(ended),
        stdout_text,
        stdout_base64,
        stderr_text,
        stderr_base64,
        stdout_cut: output.stdout_cut,
        stderr_cut: output.stderr_cut,
    }
}

/// Text where the bytes are text. A cut through the middle of a character takes the whole character away.
fn text_or_base64(mut bytes: Vec<u8>, cut: bool) -> (Option<String>, Option<String>) {
    if cut
        && let Err(error) = std::str::from_utf8(&bytes)
        && error.error_len().is_none()
    {
        bytes.truncate(error.valid_up_to());
    }
    match String::from_utf8(bytes) {
        Ok(text) => (Some(text), None),
        Err(error) => (None, Some(BASE64.encode(error.as_bytes()))),
    }
}

/// Bytes of a stream as a server-sent event carries them.
pub fn output_event(stream: Stream, offset: u64, bytes: Vec<u8>) -> api::CommandEvent {
    let (text, base64) = text_or_base64(bytes, false);
    api::CommandEvent::Output { stream: output_stream(stream), offset, text, base64 }
}

/// The name of a stream that comes out of a command.
pub fn output_stream(stream: Stream) -> api::OutputStream {
    match stream {
        Stream::Stderr => api::OutputStream::Stderr,
        // Nothing comes out of stdin; the engine never sends it.
        Stream::Stdout | Stream::Stdin => api::OutputStream::Stdout,
    }
}

/// A key as clients see it.
pub fn key(key: Key) -> api::Key {
    api::Key {
        id: key.id,
        owner: key.owner.as_str().to_owned(),
        admin: key.admin,
        metrics_only: key.metrics_only,
        sandboxes_max: key.limits.sandboxes,
        cpu_millis_max: key.limits.cpu_millis,
        memory_bytes_max: key.limits.memory_bytes,
        created_at: rfc3339(key.created_at),
    }
}

/// Bytes as text with replacement characters, and in base64 where that is not what they are.
pub fn text_and_base64(bytes: &[u8]) -> (String, Option<String>) {
    match std::str::from_utf8(bytes) {
        Ok(text) => (text.to_owned(), None),
        Err(_) => (String::from_utf8_lossy(bytes).into_owned(), Some(BASE64.encode(bytes))),
    }
}

/// A path below another.
pub fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    [directory.strip_suffix(b"/").unwrap_or(directory), b"/", name].concat()
}

/// A file at a path.
pub fn file_info(path: &[u8], stat: &FileStat) -> api::FileInfo {
    let name = path.rsplit(|byte| *byte == b'/').find(|name| !name.is_empty()).unwrap_or(b"/");
    let (path, path_base64) = text_and_base64(path);
    let (name, name_base64) = text_and_base64(name);
    let (target, target_base64) = stat.target.as_deref().map(text_and_base64).unzip();
    let modified = u64::try_from(stat.modified.seconds).unwrap_or(0);
    // A guest can set any time; what the calendar has no words for is told as 1970.
    let since = Duration::from_secs(if modified > CALENDAR_MAX { 0 } else { modified })
        + Duration::from_nanos(u64::from(stat.modified.nanoseconds));
    api::FileInfo {
        path,
        path_base64,
        name,
        name_base64,
        kind: file_kind(stat.kind),
        size: stat.size,
        mode: format!("{:04o}", stat.mode),
        uid: stat.uid,
        gid: stat.gid,
        links: stat.links,
        modified_at: rfc3339(SystemTime::UNIX_EPOCH + since),
        etag: conditions::etag(&stat.version()),
        target,
        target_base64: target_base64.flatten(),
    }
}

fn file_kind(kind: FileKind) -> api::FileKind {
    match kind {
        FileKind::File => api::FileKind::File,
        FileKind::Directory => api::FileKind::Directory,
        FileKind::Symlink => api::FileKind::Symlink,
        FileKind::Fifo => api::FileKind::Fifo,
        FileKind::Socket => api::FileKind::Socket,
        FileKind::Device => api::FileKind::Device,
        FileKind::Unknown => api::FileKind::Unknown,
    }
}

/// What a copy or an archive made.
pub fn files_made(made: Made) -> api::FilesMade {
    api::FilesMade { entries: made.entries, bytes: made.bytes, skipped: made.skipped }
}

/// What a search did.
pub fn search<T>(found: &Found<T>) -> api::Search {
    let cut = found.cut.map(|cut| match cut {
        Cut::Matches => api::SearchCut::Matches,
        Cut::Entries => api::SearchCut::Entries,
        Cut::Bytes => api::SearchCut::Bytes,
        Cut::Time => api::SearchCut::Time,
    });
    api::Search { entries_looked_at: found.entries, bytes_read: found.bytes, skipped: found.skipped, cut }
}

/// A line in which something was found.
pub fn line_match(found: GrepMatch) -> api::LineMatch {
    let (path, path_base64) = text_and_base64(&found.path);
    let (text, text_base64) = text_and_base64(&found.text);
    api::LineMatch {
        path,
        path_base64,
        line: found.line,
        column: found.column,
        text,
        text_base64,
        text_start: found.text_start,
        text_cut: found.text_cut,
    }
}

/// What happened to a file. Nothing for what callers are not told.
pub fn file_event(event: WatchEvent) -> Option<api::FileEvent> {
    Some(match event {
        WatchEvent::Ready => return None, // Said when the stream began.
        WatchEvent::Changed { change, path, directory } => {
            let (path, path_base64) = text_and_base64(&path);
            let change = match change {
                Change::Created => api::FileChange::Created,
                Change::Modified => api::FileChange::Modified,
                Change::Written => api::FileChange::Written,
                Change::Attributes => api::FileChange::Attributes,
                Change::Removed => api::FileChange::Removed,
                Change::MovedFrom => api::FileChange::MovedFrom,
                Change::MovedTo => api::FileChange::MovedTo,
            };
            api::FileEvent::Changed { change, path, path_base64, directory }
        }
        WatchEvent::Overflow => api::FileEvent::Overflow,
        WatchEvent::NotWatched { path } => {
            let (path, path_base64) = text_and_base64(&path);
            api::FileEvent::NotWatched { path, path_base64 }
        }
        WatchEvent::Gone => api::FileEvent::Gone,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(body: api::RunCommand) -> Result<CommandSpec, String> {
        command_spec(body).map_err(|error| error.into_body().message)
    }

    fn argv(words: &[&str]) -> api::RunCommand {
        api::RunCommand {
            argv: Some(words.iter().map(|word| (*word).to_owned()).collect()),
            ..Default::default()
        }
    }

    #[test]
    fn a_plain_command_passes() {
        let spec = run(argv(&["true"])).expect("it is valid");
        assert_eq!(spec.program, Program::Argv(vec!["true".into()]));
        assert_eq!((spec.timeout, spec.stdin), (None, false));
    }

    #[test]
    fn what_would_break_on_the_way_to_the_kernel_is_refused_here() {
        let env = |name: &str, value: &str| api::RunCommand {
            env: [(name.to_owned(), value.to_owned())].into(),
            ..argv(&["a"])
        };
        for (body, field) in [
            (api::RunCommand { id: Some("stream".parse().expect("an id")), ..argv(&["a"]) }, "id"),
            (api::RunCommand { script: Some("true".into()), ..argv(&["true"]) }, "argv"),
            (argv(&[]), "argv"),
            (argv(&[""]), "argv"),
            (argv(&["a", "b\0c"]), "argv"),
            (api::RunCommand { script: Some("a\0".into()), ..Default::default() }, "script"),
            (api::RunCommand { script: Some("x".repeat(SCRIPT_MAX + 1)), ..Default::default() }, "script"),
            (env("", "v"), "env"),
            (env("A=B", "v"), "env"),
            (env("A", "\0"), "env"),
            (api::RunCommand { cwd: Some("relative".into()), ..argv(&["a"]) }, "cwd"),
            (api::RunCommand { cwd: Some("/a\0".into()), ..argv(&["a"]) }, "cwd"),
            (api::RunCommand { user: Some(String::new()), ..argv(&["a"]) }, "user"),
            (api::RunCommand { timeout_seconds: Some(-1.0), ..argv(&["a"]) }, "timeout_seconds"),
            (api::RunCommand { timeout_seconds: Some(f64::NAN), ..argv(&["a"]) }, "timeout_seconds"),
            (api::RunCommand { timeout_seconds: Some(1e300), ..argv(&["a"]) }, "timeout_seconds"),
            (api::RunCommand { idle_timeout_seconds: Some(-0.1), ..argv(&["a"]) }, "idle_timeout_seconds"),
            (
                api::RunCommand {
                    terminal: Some(api::TerminalSize { rows: 0, columns: 80 }),
                    ..argv(&["a"])
                },
                "terminal",
            ),
        ] {
            let message = run(body).expect_err(field);
            assert!(message.starts_with(&format!("`{field}`")), "{field}: {message}");
        }
    }

    #[test]
    fn a_timeout_of_zero_is_none_and_a_tiny_one_is_not() {
        let timeout = |seconds| {
            run(api::RunCommand { timeout_seconds: Some(seconds), ..argv(&["a"]) }).expect("valid").timeout
        };
        assert_eq!(timeout(0.0), None);
        assert_eq!(timeout(1e-9), Some(Duration::from_millis(1)));
        assert_eq!(timeout(1.5), Some(Duration::from_millis(1500)));
    }

    #[test]
    fn a_long_request_is_shown_in_part_and_says_so() {
        let words = |count: usize, word: &str| vec![word.to_owned(); count];
        let (shown, cut) = shown_argv(&words(3, "abc"));
        assert_eq!((shown, cut), (words(3, "abc"), false));
        let (shown, cut) = shown_argv(&words(1_000_000, ""));
        assert!(cut && shown.len() <= REQUEST_SHOWN_MAX);
        let (shown, cut) = shown_argv(&["ä".repeat(REQUEST_SHOWN_MAX)]);
        assert!(cut && shown[0].len() <= REQUEST_SHOWN_MAX && shown[0].chars().all(|c| c == 'ä'));
    }

    #[test]
    fn output_is_text_where_it_is_text() {
        assert_eq!(text_or_base64(b"abc".to_vec(), false), (Some("abc".into()), None));
        assert_eq!(text_or_base64(vec![0xff, 0], false), (None, Some("/wA=".into())));
        let half = "aä".as_bytes()[..2].to_vec();
        assert_eq!(text_or_base64(half.clone(), true), (Some("a".into()), None));
        assert_eq!(text_or_base64(half, false).0, None, "what was not cut is not made shorter");
    }
}
