//! Commands: run, list, get, and the actions on a running one. Their streams are in `stream` and `events`.

pub mod events;
pub mod stream;

use std::time::Duration;

use axum::Json;
use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use engine::{
    Attendance, Command, CommandEnv, CommandSpec, CommandState, Gathered, Outcome, Program, Resume, Script,
    Span,
};
use engine::{CommandQuery, CommandRef, Signal};
use serde::Deserialize;
use utoipa::IntoParams;
use wire::api;
use wire::guest::{self, ExitStatus, StartError, Stream, TerminalSize};

use super::common::{ResumeParams, carried_on, check_limit, guest_path, guest_user};
use crate::http::app::{App, Caller};
use crate::http::body::{self, CommandJson, CommandPath, FoundSandbox, Query, Raw, SandboxPath};
use crate::http::clock::rfc3339;
use crate::http::error::ApiError;
use crate::http::text::text_or_base64;

/// How much of each stream the response to a waiting `POST` holds. The rest can be streamed.
const ANSWER_OUTPUT_MAX: usize = 1 << 20;
/// The longest script in a request.
pub const SCRIPT_MAX: usize = Script::BYTES_MAX;
/// `…/commands/stream` is where a command is started and streamed, so no command can be found there.
const RESERVED_COMMAND_ID: &str = "stream";
/// A year: a longer timeout is probably a mistake in units, and is rejected rather than rounded.
const TIMEOUT_SECONDS_MAX: f64 = 366.0 * 86_400.0;
/// How much of a script or of an argument list is shown, so that a page of commands stays small.
const REQUEST_SHOWN_MAX: usize = 4096;

/// Runs a command. If the caller disconnects, the command keeps running and can be found by its id.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/commands", tag = "commands", request_body = api::RunCommand,
    params(("sandbox" = String, Path, description = "The sandbox's id."), ResumeParams), responses(
    (status = 200, description = "The command has ended. The response holds at most 1 MiB of each stream.", body = api::FinishedCommand),
    (status = 202, description = "With `wait: false`: it was started.", body = api::Command),
    (status = 400, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "The sandbox does not run, or the id was used with another request.", body = api::ErrorBody),
    (status = 413, body = api::ErrorBody),
    (status = 503, body = api::ErrorBody),
))]
pub async fn run(
    State(app): State<App>,
    Caller(key): Caller,
    FoundSandbox(id): FoundSandbox,
    Query(resuming): Query<ResumeParams>,
    CommandJson(body): CommandJson<api::RunCommand>,
) -> Result<Response, ApiError> {
    let mut stopping = app.stopping(&key);
    let wait = body.wait.unwrap_or(true);
    let spec = CommandSpec { resume: resuming.resume(), ..command_spec(body)? };
    let command = carried_on(async move { app.engine.run(&key.owner, id, spec).await }).await?;
    if !wait {
        return Ok((StatusCode::ACCEPTED, Json(to_api(command.now()))).into_response());
    }
    tokio::select! {
        ended = command.ended() => {
            let output = command.output(ANSWER_OUTPUT_MAX).await?;
            let mut finished = finished(ended, output);
            add_attempts(&mut finished.command, &command).await;
            Ok(Json(finished).into_response())
        }
        halt = stopping.wait() => Err(ApiError::from(halt).detail("command_id", command.now().id.as_str())),
    }
}

/// Which commands to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListParams {
    /// The maximum number of items, 1 to 500.
    limit: Option<u32>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

/// The commands of a sandbox, oldest first.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/commands", tag = "commands", params(
    ("sandbox" = String, Path, description = "The sandbox's id."), ListParams), responses(
    (status = 200, body = api::CommandPage),
    (status = 404, body = api::ErrorBody),
))]
pub async fn list(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(id): SandboxPath,
    Query(params): Query<ListParams>,
) -> Result<Json<api::CommandPage>, ApiError> {
    let query = CommandQuery { limit: check_limit(params.limit)?, cursor: params.cursor };
    let page = app.engine.commands(&key.owner, id, query).await?;
    let commands = page.items.into_iter().map(to_api).collect();
    Ok(Json(api::CommandPage { commands, next_cursor: page.next_cursor }))
}

/// A command, without its output.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/commands/{command}", tag = "commands", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("command" = String, Path, description = "The command's id.")), responses(
    (status = 200, body = api::Command),
    (status = 404, body = api::ErrorBody),
))]
pub async fn get(
    State(app): State<App>,
    caller: Caller,
    path: CommandPath,
) -> Result<Json<api::Command>, ApiError> {
    Ok(Json(to_api(find(&app, &caller, &path).await?.now())))
}

/// Where the written bytes begin.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StdinParams {
    /// The offset in stdin at which the bytes begin, so that a repeated request writes once. Left out: at the end.
    offset: Option<u64>,
    /// `never`: fail if the sandbox is paused, instead of resuming it first.
    #[serde(default)]
    #[param(inline)]
    #[allow(dead_code)] // `FoundCommand` reads it.
    resume: api::ResumeWish,
}

/// Writes to a command's stdin: the body as it is, at most 1 MiB. Answers when the command's window has taken it.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/commands/{command}/stdin", tag = "commands", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("command" = String, Path, description = "The command's id."), StdinParams),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"), responses(
    (status = 200, body = api::StdinWritten),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "Stdin is closed, or the command has ended.", body = api::ErrorBody),
    (status = 413, body = api::ErrorBody),
    (status = 503, description = "The command does not read.", body = api::ErrorBody),
))]
pub async fn write_stdin(
    FoundCommand(command): FoundCommand,
    Query(params): Query<StdinParams>,
    Raw(bytes): Raw,
) -> Result<Json<api::StdinWritten>, ApiError> {
    if params.offset.is_some_and(|at| at.checked_add(bytes.len() as u64).is_none()) {
        return Err(ApiError::must("offset", "be smaller: the bytes would end beyond 2^64"));
    }
    let offset = carried_on(async move { command.write_stdin(params.offset, bytes).await }).await?;
    Ok(Json(api::StdinWritten { offset }))
}

/// Ends a command's stdin, after what was written before.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/commands/{command}/stdin/end", tag = "commands", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("command" = String, Path, description = "The command's id."), ResumeParams), responses(
    (status = 204, description = "Done."),
    (status = 404, body = api::ErrorBody),
    (status = 409, body = api::ErrorBody),
))]
pub async fn end_stdin(FoundCommand(command): FoundCommand) -> Result<StatusCode, ApiError> {
    carried_on(async move { command.end_stdin().await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Sends a signal to a command's process group.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/commands/{command}/signal", tag = "commands",
    request_body = api::SignalCommand, params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("command" = String, Path, description = "The command's id."), ResumeParams), responses(
    (status = 204, description = "Sent."),
    (status = 400, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "The command is over.", body = api::ErrorBody),
))]
pub async fn signal(
    FoundCommand(command): FoundCommand,
    body::Json(body): body::Json<api::SignalCommand>,
) -> Result<StatusCode, ApiError> {
    let signal = Signal::parse(&body.signal)?;
    carried_on(async move { command.signal(signal).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Ends a command's whole tree of processes at once.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/commands/{command}/kill", tag = "commands", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("command" = String, Path, description = "The command's id."), ResumeParams), responses(
    (status = 204, description = "Accepted; the command's result says when it has ended."),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "The command is over.", body = api::ErrorBody),
))]
pub async fn kill(FoundCommand(command): FoundCommand) -> Result<StatusCode, ApiError> {
    carried_on(async move { command.kill().await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Tells a command's terminal its new size.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/commands/{command}/resize", tag = "commands",
    request_body = api::TerminalSize, params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("command" = String, Path, description = "The command's id."), ResumeParams), responses(
    (status = 204, description = "Done."),
    (status = 400, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "The command has no terminal, or has ended.", body = api::ErrorBody),
))]
pub async fn resize(
    FoundCommand(command): FoundCommand,
    body::Json(body): body::Json<api::TerminalSize>,
) -> Result<StatusCode, ApiError> {
    let size = terminal_size(body.rows, body.columns)?;
    carried_on(async move { command.resize(size.rows, size.columns).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The command that a path names, for routes that act on it. Found before a body is read.
pub struct FoundCommand(CommandRef);

impl FromRequestParts<App> for FoundCommand {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let caller = Caller::from_request_parts(parts, app).await?;
        let path = CommandPath::from_request_parts(parts, app).await?;
        let Query(resuming) = Query::<ResumeParams>::from_request_parts(parts, app).await?;
        Ok(Self(find(app, &caller, &path).await?.with_resume(resuming.resume())))
    }
}

async fn find(app: &App, caller: &Caller, path: &CommandPath) -> Result<CommandRef, ApiError> {
    let CommandPath(sandbox, command) = path;
    Ok(app.engine.command(&caller.0.owner, *sandbox, command).await?)
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
        return Err(ApiError::must("id", format!("not be `{RESERVED_COMMAND_ID}`, which is a route")));
    }
    let program = match (argv, script) {
        (Some(argv), None) => Program::argv(argv).map_err(|must| ApiError::must("argv", must))?,
        (None, Some(script)) => Program::script(script).map_err(|must| ApiError::must("script", must))?,
        // The engine rejects it if neither the template nor the image has a command.
        (None, None) => Program::Default,
        (Some(_), Some(_)) => {
            return Err(ApiError::must("argv", "be left out where `script` is given"));
        }
    };
    let env = CommandEnv::new(env).map_err(|must| ApiError::must("env", must))?;
    let (cwd, user) = (guest_path(cwd)?, guest_user(user)?);
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
        resume: Resume::default(),
    })
}

/// A terminal without rows or columns breaks the programs in it.
pub fn terminal_size(rows: u16, columns: u16) -> Result<TerminalSize, ApiError> {
    if rows == 0 || columns == 0 {
        return Err(ApiError::must(
            "terminal",
            format!("have at least one row and one column, got {rows} and {columns}"),
        ));
    }
    Ok(TerminalSize { rows, columns })
}

fn timeout(field: &'static str, seconds: Option<f64>) -> Result<Option<Duration>, ApiError> {
    match seconds {
        None => Ok(None),
        Some(seconds) if !(0.0..=TIMEOUT_SECONDS_MAX).contains(&seconds) => Err(ApiError::must(
            field,
            format!("be between 0 (never) and {TIMEOUT_SECONDS_MAX} seconds, got {seconds}"),
        )),
        Some(0.0) => Ok(None),
        // Timers count milliseconds; a shorter timeout must not become "never".
        Some(seconds) => Ok(Some(Duration::from_secs_f64(seconds).max(Duration::from_millis(1)))),
    }
}

/// A command as clients see it.
pub fn to_api(command: Command) -> api::Command {
    let (state, pid, result) = match command.state {
        CommandState::Starting => (api::CommandState::Starting, None, None),
        CommandState::Running { pid } => (api::CommandState::Running, Some(pid), None),
        CommandState::Ended { pid, outcome } => {
            let result = api::CommandResult { not_undoable: command.not_undoable, ..result(&outcome) };
            (api::CommandState::Ended, pid, Some(result))
        }
    };
    let (argv, script, request_cut) = match &command.start.program {
        guest::Program::Argv(argv) => {
            let (shown, cut) = shown_argv(argv);
            (Some(shown), None, cut)
        }
        guest::Program::Shell { script } => {
            let shown = start_of(script, REQUEST_SHOWN_MAX);
            (None, Some(shown.to_owned()), shown.len() < script.len())
        }
        // The engine lists no file operation among commands.
        guest::Program::Files(_) => (None, None, false),
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

pub(super) fn result(outcome: &Outcome) -> api::CommandResult {
    let of = |outcome, status: Option<ExitStatus>, message| {
        let (exit_code, signal) = match status {
            Some(ExitStatus::Code(code)) => (Some(code), None),
            Some(ExitStatus::Signal(signal)) => (Some(128 + signal), Some(signal)),
            None => (None, None),
        };
        api::CommandResult { outcome, exit_code, signal, message, network: None, not_undoable: false }
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
            // The exit codes of a shell; a shell has no code for the other errors.
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

/// Adds to the result of a command how often programs tried to reach a network in a sandbox that has none.
pub async fn add_attempts(ended: &mut api::Command, command: &CommandRef) {
    let Some(result) = &mut ended.result else { return };
    match command.network_attempts().await {
        0 => {}
        attempts => result.network = Some(api::CommandNetwork { attempts }),
    }
}

/// A command with its output.
pub fn finished(ended: Command, output: Gathered) -> api::FinishedCommand {
    let (stdout_text, stdout_base64) = text_or_base64(output.stdout, output.stdout_cut);
    let (stderr_text, stderr_base64) = text_or_base64(output.stderr, output.stderr_cut);
    api::FinishedCommand {
        command: to_api(ended),
        stdout_text,
        stdout_base64,
        stderr_text,
        stderr_base64,
        stdout_cut: output.stdout_cut,
        stderr_cut: output.stderr_cut,
    }
}

/// Bytes of a stream in the form of a server-sent event.
pub fn output_event(stream: Stream, offset: u64, bytes: Vec<u8>) -> api::CommandEvent {
    let (text, base64) = text_or_base64(bytes, false);
    api::CommandEvent::Output { stream: output_stream(stream), offset, text, base64 }
}

/// The name of an output stream of a command.
pub fn output_stream(stream: Stream) -> api::OutputStream {
    match stream {
        Stream::Stderr => api::OutputStream::Stderr,
        // Stdin is no output; the engine never sends it.
        Stream::Stdout | Stream::Stdin => api::OutputStream::Stdout,
    }
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
        assert_eq!(spec.program, Program::argv(vec!["true".into()]).expect("a program"));
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
}
