//! Commands: run, list, get, and what can be done to one that runs. Their streams are in `stream` and `events`.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use engine::{CommandQuery, CommandRef, Signal};
use serde::Deserialize;
use utoipa::IntoParams;
use wire::api;

use super::{carried_on, check_limit};
use crate::app::{App, Caller};
use crate::body::{self, CommandJson, CommandPath, Query, Raw, SandboxPath};
use crate::convert;
use crate::error::ApiError;

/// How much of each stream the answer to a waiting `POST` holds. The rest can be streamed.
const ANSWER_OUTPUT_MAX: usize = 1 << 20;

/// Runs a command. If the caller goes away, the command goes on and can be found by its id.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/commands", tag = "commands", request_body = api::RunCommand,
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 200, description = "It is over. At most 1 MiB of each stream is in the answer.", body = api::FinishedCommand),
    (status = 202, description = "With `wait: false`: it was started.", body = api::Command),
    (status = 400, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "The sandbox does not run, or the id was used otherwise.", body = api::ErrorBody),
    (status = 413, body = api::ErrorBody),
    (status = 503, body = api::ErrorBody),
))]
pub async fn run(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(id): SandboxPath,
    CommandJson(body): CommandJson<api::RunCommand>,
) -> Result<Response, ApiError> {
    let mut stopping = app.stopping(&key);
    let wait = body.wait.unwrap_or(true);
    let spec = convert::command_spec(body)?;
    let command = carried_on(async move { app.engine.run(&key.owner, id, spec).await }).await?;
    if !wait {
        return Ok((StatusCode::ACCEPTED, Json(convert::command(command.now()))).into_response());
    }
    tokio::select! {
        ended = command.ended() => {
            let output = command.output(ANSWER_OUTPUT_MAX).await?;
            Ok(Json(convert::finished(ended, output)).into_response())
        }
        halt = stopping.wait() => Err(ApiError::from(halt).detail("command_id", command.now().id.as_str())),
    }
}

/// Which commands to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListParams {
    /// At most so many, 1 to 500.
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
    let commands = page.items.into_iter().map(convert::command).collect();
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
    Ok(Json(convert::command(find(&app, &caller, &path).await?.now())))
}

/// Where the written bytes begin.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StdinParams {
    /// The offset in stdin at which the bytes begin, so that a repeated request writes once. Left out: at the end.
    offset: Option<u64>,
}

/// Writes to a command's stdin: the body as it is, at most 1 MiB. Answers when the command's window has taken it.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/commands/{command}/stdin", tag = "commands", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("command" = String, Path, description = "The command's id."), StdinParams),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"), responses(
    (status = 200, body = api::StdinWritten),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "Stdin is closed, or the command is over.", body = api::ErrorBody),
    (status = 413, body = api::ErrorBody),
    (status = 503, description = "The command does not read.", body = api::ErrorBody),
))]
pub async fn write_stdin(
    State(app): State<App>,
    caller: Caller,
    path: CommandPath,
    Query(params): Query<StdinParams>,
    Raw(bytes): Raw,
) -> Result<Json<api::StdinWritten>, ApiError> {
    if params.offset.is_some_and(|at| at.checked_add(bytes.len() as u64).is_none()) {
        return Err(ApiError::invalid("offset", "it is too large"));
    }
    let command = find(&app, &caller, &path).await?;
    let offset = carried_on(async move { command.write_stdin(params.offset, bytes).await }).await?;
    Ok(Json(api::StdinWritten { offset }))
}

/// Ends a command's stdin, after what was written before.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/commands/{command}/stdin/end", tag = "commands", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("command" = String, Path, description = "The command's id.")), responses(
    (status = 204, description = "Done."),
    (status = 404, body = api::ErrorBody),
    (status = 409, body = api::ErrorBody),
))]
pub async fn end_stdin(
    State(app): State<App>,
    caller: Caller,
    path: CommandPath,
) -> Result<StatusCode, ApiError> {
    let command = find(&app, &caller, &path).await?;
    carried_on(async move { command.end_stdin().await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Sends a signal to a command's process group.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/commands/{command}/signal", tag = "commands",
    request_body = api::SignalCommand, params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("command" = String, Path, description = "The command's id.")), responses(
    (status = 204, description = "Sent."),
    (status = 400, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "The command is over.", body = api::ErrorBody),
))]
pub async fn signal(
    State(app): State<App>,
    caller: Caller,
    path: CommandPath,
    body::Json(body): body::Json<api::SignalCommand>,
) -> Result<StatusCode, ApiError> {
    let signal = Signal::parse(&body.signal)?;
    let command = find(&app, &caller, &path).await?;
    carried_on(async move { command.signal(signal).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Ends a command's whole tree of processes at once.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/commands/{command}/kill", tag = "commands", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("command" = String, Path, description = "The command's id.")), responses(
    (status = 204, description = "Asked for; the command's result says when it is over."),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "The command is over.", body = api::ErrorBody),
))]
pub async fn kill(State(app): State<App>, caller: Caller, path: CommandPath) -> Result<StatusCode, ApiError> {
    let command = find(&app, &caller, &path).await?;
    carried_on(async move { command.kill().await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Tells a command's terminal its new size.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/commands/{command}/resize", tag = "commands",
    request_body = api::TerminalSize, params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("command" = String, Path, description = "The command's id.")), responses(
    (status = 204, description = "Done."),
    (status = 400, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "The command has no terminal, or is over.", body = api::ErrorBody),
))]
pub async fn resize(
    State(app): State<App>,
    caller: Caller,
    path: CommandPath,
    body::Json(body): body::Json<api::TerminalSize>,
) -> Result<StatusCode, ApiError> {
    let size = convert::terminal_size(body.rows, body.columns)?;
    let command = find(&app, &caller, &path).await?;
    carried_on(async move { command.resize(size.rows, size.columns).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn find(app: &App, caller: &Caller, path: &CommandPath) -> Result<CommandRef, ApiError> {
    let CommandPath(sandbox, command) = path;
    Ok(app.engine.command(&caller.0.owner, *sandbox, command).await?)
}
