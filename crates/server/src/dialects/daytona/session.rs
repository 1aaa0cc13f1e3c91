//! Sessions: a shell each, whose commands share its directory, variables and jobs.
//!
//! What runs in the sandbox is said in `shell`. A session is a note of the sandbox: the client's id, and the id of the command that is
//! the shell. The commands of a session are commands of the engine whose ids are the shell's and a number, so that they are found
//! without a list. After the shell has ended, its commands and their output can be read until the session is deleted.

use std::time::Duration;

use axum::Json;
use axum::extract::{FromRequestParts, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use engine::{
    CommandRef, CommandSpec, CommandState, EngineError, Field, Key, NoteChanges, Offsets, OutputEvent,
    Program, Sandbox, SandboxUpdate,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::timeout;
use tracing::Instrument;
use wire::CommandId;
use wire::files::{Condition, FileErrorKind};
use wire::guest;

use super::error::Refusal;
use super::execute::exit_code;
use super::logs::{Shape, output};
use super::read::{Target, ToolboxBody, in_path};
use super::sandboxes::user_of;
use super::shell;
use crate::http::app::App;

/// The keys of notes that are sessions begin with this.
const NOTES: &str = "daytona/session/";
/// The session that the vendor has for the image's own program.
const ENTRYPOINT: &str = "entrypoint";
/// In bytes.
const ID_MAX: usize = 255;
/// How long a shell may take to begin.
const READY_MAX: Duration = Duration::from_secs(30);
/// How long a command may take to end after the shell that ran it.
const SETTLE_MAX: Duration = Duration::from_secs(1);
/// How often a command is started under another number because somebody else was quicker.
const RACES_MAX: u64 = 64;

/// A session of a sandbox.
pub struct Session {
    app: App,
    key: Key,
    sandbox: Sandbox,
    id: String,
    shell: CommandId,
}

impl FromRequestParts<App> for Session {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Refusal> {
        let Target { key, sandbox } = Target::from_request_parts(parts, app).await?;
        let id = in_path(parts, app, "session").await?;
        let noted = sandbox.notes.get(&format!("{NOTES}{id}"));
        let shell = noted.and_then(|shell| shell.parse().ok()).ok_or_else(|| Refusal::no_session(&id))?;
        Ok(Self { app: app.clone(), key, sandbox, id, shell })
    }
}

/// A command of a session, and the session.
pub struct Ran {
    /// The session.
    pub session: Session,
    /// The command.
    pub command: CommandRef,
}

impl FromRequestParts<App> for Ran {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Refusal> {
        let session = Session::from_request_parts(parts, app).await?;
        let text = in_path(parts, app, "command").await?;
        let number = text.strip_prefix(session.shell.as_str()).and_then(|rest| rest.strip_prefix('.'));
        let number: u64 =
            number.and_then(|number| number.parse().ok()).ok_or_else(|| Refusal::no_command(&text))?;
        let command = session.numbered(number).await?.ok_or_else(|| Refusal::no_command(&text))?;
        Ok(Self { session, command })
    }
}

impl Session {
    /// Who asks.
    pub fn key(&self) -> &Key {
        &self.key
    }

    async fn found(&self, id: &CommandId) -> Result<Option<CommandRef>, Refusal> {
        match self.app.engine.command(&self.key.owner, self.sandbox.id, id).await {
            Ok(command) => Ok(Some(command)),
            Err(EngineError::CommandNotFound { .. }) => Ok(None),
            Err(error) => Err(Refusal::toolbox(error)),
        }
    }

    fn command_id(&self, number: u64) -> Result<CommandId, Refusal> {
        let id = format!("{}.{number}", self.shell);
        id.parse().map_err(|_| Refusal::no_command(&id))
    }

    /// A command by its number, from 1.
    async fn numbered(&self, number: u64) -> Result<Option<CommandRef>, Refusal> {
        self.found(&self.command_id(number)?).await
    }

    /// How many commands there are: doubled until there is none, then halved.
    async fn count(&self) -> Result<u64, Refusal> {
        let (mut there, mut not) = (0, 1);
        while self.numbered(not).await?.is_some() {
            (there, not) = (not, not * 2);
        }
        while not - there > 1 {
            let middle = there + (not - there) / 2;
            match self.numbered(middle).await? {
                Some(_) => there = middle,
                None => not = middle,
            }
        }
        Ok(there)
    }

    /// The shell, if it runs.
    async fn shell(&self) -> Result<Option<CommandRef>, Refusal> {
        let shell = self.found(&self.shell).await?;
        Ok(shell.filter(|shell| !is_over(shell)))
    }

    /// Ends a command that nobody will ever run, since its shell has ended.
    pub async fn settle(&self, command: &CommandRef) -> Result<(), Refusal> {
        if is_over(command) || self.shell().await?.is_some() {
            return Ok(());
        }
        // It may just be on its way out.
        if timeout(SETTLE_MAX, command.ended()).await.is_err() {
            end(command).await?;
            if timeout(SETTLE_MAX, command.ended()).await.is_err() {
                tracing::info!("a command of a session that has ended is still there");
            }
        }
        Ok(())
    }

    fn show(&self, command: &CommandRef) -> Value {
        let command = command.now();
        let text = match &command.start.program {
            guest::Program::Shell { script } => shell::text_of(script),
            guest::Program::Argv(_) | guest::Program::Files(_) => None,
        };
        let mut body = json!({"id": command.id.as_str(), "command": text.unwrap_or_default()});
        if let CommandState::Ended { outcome, .. } = &command.state {
            body["exitCode"] = exit_code(outcome).into();
        }
        body
    }

    async fn describe(&self) -> Result<Value, Refusal> {
        let mut commands = Vec::new();
        for number in 1..=self.count().await? {
            if let Some(command) = self.numbered(number).await? {
                self.settle(&command).await?;
                commands.push(self.show(&command));
            }
        }
        Ok(json!({"sessionId": self.id, "commands": commands}))
    }
}

fn is_over(command: &CommandRef) -> bool {
    matches!(command.now().state, CommandState::Ended { .. })
}

/// Kills a command with everything that it started.
async fn end(command: &CommandRef) -> Result<(), Refusal> {
    match command.kill().await {
        Ok(()) | Err(EngineError::CommandEnded { .. }) => Ok(()),
        Err(error) => Err(Refusal::toolbox(error)),
    }
}

/// Carries work on when its caller leaves in the middle.
async fn carried_on<T: Send + 'static>(
    work: impl Future<Output = Result<T, Refusal>> + Send + 'static,
) -> Result<T, Refusal> {
    // If it panicked, the panic hook has logged that: nobody aborts it.
    tokio::spawn(work.in_current_span()).await.unwrap_or_else(|_| Err(Refusal::bug()))
}

/// `POST {toolbox}/process/session`
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Create {
    session_id: String,
}

/// Starts the shell of a new session.
pub async fn create(
    State(app): State<App>,
    Target { key, sandbox }: Target,
    ToolboxBody(Create { session_id: id }): ToolboxBody<Create>,
) -> Result<StatusCode, Refusal> {
    let bad = |rule: &str| {
        let message = format!("`sessionId` must {rule}, got `{}`", engine::shown(&id));
        Err(Refusal::daemon(StatusCode::BAD_REQUEST, "BAD_REQUEST", message))
    };
    if id.is_empty() || id.len() > ID_MAX || id.chars().any(char::is_control) {
        return bad("be 1 to 255 bytes without control characters");
    }
    if id == ENTRYPOINT {
        return bad("not be `entrypoint`, which is reserved");
    }
    let note = format!("{NOTES}{id}");
    if sandbox.notes.get(&note).is_some() {
        let message = format!("session `{}` exists already", engine::shown(&id));
        return Err(Refusal::daemon(StatusCode::CONFLICT, "SESSION_ALREADY_EXISTS", message));
    }
    carried_on(async move {
        let shell = start_shell(&app, &key, &sandbox).await?;
        let notes = NoteChanges::set(&note, shell.now().id.to_string());
        let update = SandboxUpdate { notes, ..SandboxUpdate::default() };
        if let Err(error) = app.engine.update(&key.owner, sandbox.id, update).await {
            end(&shell).await?;
            return Err(Refusal::toolbox(error));
        }
        Ok(StatusCode::CREATED)
    })
    .await
}

/// Starts a shell, and waits until it listens.
async fn start_shell(app: &App, key: &Key, sandbox: &Sandbox) -> Result<CommandRef, Refusal> {
    let id = CommandId::from_random(random()?);
    let script = Program::script(shell::session(id.as_str()));
    let mut spec = CommandSpec::new(script.map_err(|must| Refusal::toolbox(must.of(Field::Command)))?);
    spec.id = Some(id);
    spec.user = user_of(sandbox).map_err(Refusal::toolbox)?;
    let shell = app.engine.run(&key.owner, sandbox.id, spec).await.map_err(Refusal::toolbox)?;
    let mut heard = shell.attach(Offsets::default());
    let ready = async {
        let mut said = Vec::new();
        while let Some(event) = heard.next().await {
            match event {
                OutputEvent::Bytes { bytes, .. } => said.extend_from_slice(&bytes),
                OutputEvent::Ended(_) => break,
                _ => {}
            }
            if said.starts_with(shell::READY.as_bytes()) {
                return Ok(());
            }
        }
        let message = format!("the shell of the session did not start: {}", String::from_utf8_lossy(&said));
        Err(Refusal::daemon(StatusCode::UNPROCESSABLE_ENTITY, "SESSION_NOT_STARTED", message))
    };
    match timeout(READY_MAX, ready).await {
        Ok(Ok(())) => Ok(shell),
        Ok(Err(refusal)) => Err(refusal),
        Err(_) => {
            end(&shell).await?;
            let message = format!("the shell of the session did not start within {} s", READY_MAX.as_secs());
            Err(Refusal::daemon(StatusCode::GATEWAY_TIMEOUT, "SESSION_NOT_STARTED", message))
        }
    }
}

/// Random bits for an id.
fn random() -> Result<u128, Refusal> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|_| Refusal::bug())?;
    Ok(u128::from_le_bytes(bytes))
}

/// The sessions of a sandbox.
pub async fn list(
    State(app): State<App>,
    Target { key, sandbox }: Target,
) -> Result<Json<Vec<Value>>, Refusal> {
    let mut sessions = Vec::new();
    for (note, shell) in sandbox.notes.pairs() {
        if let (Some(id), Ok(shell)) = (note.strip_prefix(NOTES), shell.parse()) {
            let (app, key, sandbox) = (app.clone(), key.clone(), sandbox.clone());
            sessions.push(Session { app, key, sandbox, id: id.to_owned(), shell }.describe().await?);
        }
    }
    Ok(Json(sessions))
}

/// A session with its commands.
pub async fn get(session: Session) -> Result<Json<Value>, Refusal> {
    Ok(Json(session.describe().await?))
}

/// Ends a session with everything that runs in it, and forgets it.
pub async fn delete(session: Session) -> Result<StatusCode, Refusal> {
    carried_on(async move {
        if let Some(shell) = session.shell().await? {
            end(&shell).await?;
        }
        for number in 1..=session.count().await? {
            if let Some(command) = session.numbered(number).await?
                && !is_over(&command)
            {
                end(&command).await?;
            }
        }
        let Session { app, key, sandbox, id, shell } = session;
        let notes = NoteChanges([(format!("{NOTES}{id}"), None)].into());
        let update = SandboxUpdate { notes, ..SandboxUpdate::default() };
        app.engine.update(&key.owner, sandbox.id, update).await.map_err(Refusal::toolbox)?;
        // Beside the answer: the client has a second, and what is left harms nobody.
        tokio::spawn(
            async move {
                let user = user_of(&sandbox);
                let removed = async {
                    let files = app.engine.files(&key.owner, sandbox.id, user?)?;
                    files.remove(shell::directory(shell.as_str()).as_bytes(), true, Condition::None).await
                };
                match removed.await {
                    Err(EngineError::File { source }) if source.kind == FileErrorKind::NotFound => {}
                    Err(error) => tracing::info!(%error, "the directory of a session stays"),
                    Ok(()) => {}
                }
            }
            .in_current_span(),
        );
        Ok(StatusCode::NO_CONTENT)
    })
    .await
}

/// `POST {toolbox}/process/session/{session}/exec`
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Exec {
    command: String,
    run_async: Option<bool>,
    /// What it was called before.
    r#async: Option<bool>,
}

/// Runs a command in a session's shell, behind those that were sent before it.
pub async fn exec(
    session: Session,
    headers: HeaderMap,
    ToolboxBody(body): ToolboxBody<Exec>,
) -> Result<Response, Refusal> {
    if body.command.trim().is_empty() {
        return Err(Refusal::toolbox(Field::Command.must("not be empty")));
    }
    let goes_on = body.run_async.or(body.r#async).unwrap_or(false);
    let mut stopping = session.app.stopping(&session.key);
    let (session, command) = carried_on(async move {
        let command = start(&session, &body.command, goes_on).await?;
        Ok((session, command))
    })
    .await?;
    let id = command.now().id;
    if goes_on {
        return Ok((StatusCode::ACCEPTED, Json(json!({"cmdId": id.as_str()}))).into_response());
    }
    let shell = session.shell().await?;
    let shell_ended = async {
        if let Some(shell) = shell {
            shell.ended().await;
        }
    };
    tokio::select! {
        _ = command.ended() => {}
        () = shell_ended => session.settle(&command).await?,
        _ = stopping.wait() => return Err(Refusal::toolbox(EngineError::Stopping)),
    }
    let mut answer = output(&command, Shape::of(&headers)).await?;
    answer["cmdId"] = id.as_str().into();
    answer["exitCode"] = session.show(&command)["exitCode"].clone();
    Ok(Json(answer).into_response())
}

async fn start(session: &Session, text: &str, stdin: bool) -> Result<CommandRef, Refusal> {
    let Some(shell) = session.shell().await? else {
        return Err(Refusal::session_ended(&session.id));
    };
    let nonce = random()? as u64;
    let user = user_of(&session.sandbox).map_err(Refusal::toolbox)?;
    let first = session.count().await? + 1;
    for number in first..first + RACES_MAX {
        let script = shell::command(session.shell.as_str(), number, nonce, text);
        let program = Program::script(script).map_err(|must| Refusal::toolbox(must.of(Field::Command)))?;
        let mut spec = CommandSpec::new(program);
        spec.id = Some(session.command_id(number)?);
        spec.stdin = stdin;
        spec.user = user.clone();
        match session.app.engine.run(&session.key.owner, session.sandbox.id, spec).await {
            Err(EngineError::CommandIdReused { .. }) => {}
            Err(error) => return Err(Refusal::toolbox(error)),
            Ok(command) => {
                tokio::select! {
                    () = queued(&command) => {}
                    _ = shell.ended() => {}
                    () = tokio::time::sleep(READY_MAX) => {
                        tracing::info!("a command of a session is slow to get into the queue");
                    }
                }
                return Ok(command);
            }
        }
    }
    let message = "too many commands are sent to this session at once; try again";
    Err(Refusal::daemon(StatusCode::SERVICE_UNAVAILABLE, "SESSION_BUSY", message))
}

/// Waits until a command stands in the queue of its shell, or is over.
async fn queued(command: &CommandRef) {
    let mut heard = command.attach(Offsets::default());
    while let Some(event) = heard.next().await {
        match event {
            OutputEvent::Started { .. } | OutputEvent::StdinAck { .. } => {}
            OutputEvent::Bytes { stream: guest::Stream::Stderr, .. } => {}
            OutputEvent::Bytes { offset, bytes, .. }
                if offset + (bytes.len() as u64) < shell::QUEUED.len() as u64 => {}
            // Later output, and the end, come after it.
            _ => return,
        }
    }
}

/// A command of a session. It has an exit code once it is over and all its output can be read.
pub async fn command(Ran { session, command }: Ran) -> Result<Json<Value>, Refusal> {
    session.settle(&command).await?;
    Ok(Json(session.show(&command)))
}

/// `POST {toolbox}/process/session/{session}/command/{command}/input`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Input {
    data: String,
}

/// A line for the stdin of a command.
pub async fn input(
    Ran { command, .. }: Ran,
    ToolboxBody(Input { mut data }): ToolboxBody<Input>,
) -> Result<StatusCode, Refusal> {
    if is_over(&command) {
        let error = EngineError::CommandEnded { id: command.now().id };
        return Err(Refusal::toolbox(error));
    }
    if !data.ends_with('\n') {
        data.push('\n');
    }
    command.write_stdin(None, data.into()).await.map_err(Refusal::toolbox)?;
    Ok(StatusCode::NO_CONTENT)
}
