//! Commands on the data plane: over a WebSocket, and over plain HTTP for clients without one.
//!
//! ```text
//! client                                            server
//! {"type":"execute","command":...}                  {"type":"started","command_id":...,"pid":...}   first, and at once
//! {"type":"reconnect","command_id":...,             the same
//!  "stdout_offset":n,"stderr_offset":n}
//! {"type":"input","data":...}                       {"type":"stdout"|"stderr","data":...,"offset":n}
//! {"type":"close_stdin"}                            {"type":"exit","exit_code":n}                    last, then close 1000
//! {"type":"kill"}                                   {"type":"error","error_type":...,"error":...}    in place of either
//! ```
//!
//! Offsets count bytes of the text as it was sent (`engine::text`). `execute` is idempotent on the `command_id` that newer clients
//! send: it finds a command that is there, and its output comes from the start. A connection that must be opened again is closed with
//! 1012, the one code after which every version of the client does so.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::extract::State;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use bytes::Bytes;
use engine::{
    Attendance, Command, CommandRef, CommandSpec, CommandState, EngineError, Field, Key, Must, Offsets,
    Outcome, Program, Sandbox, TextEvent, TextOutput,
};
use futures_util::StreamExt;
use futures_util::stream::SplitStream;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::Instrument;
use wire::CommandId;
use wire::guest::{ExitStatus, Stream, TerminalSize};

use super::error::{Doing, Refusal};
use super::json::{Notes, RunConfig};
use super::read::{DataBody, Target};
use crate::http::app::{App, Arrival, Stopping};
use crate::http::body::{COMMAND_BODY_MAX, parse_json};
use crate::http::websocket::{
    Close, FIRST_MESSAGE_MAX, Input, Line, Lost, Queued, STDIN_WRITE_MAX, StdinSender, bounded, converse,
    stdin_queue,
};

/// How long a command may take where the client does not say.
const TIMEOUT_SECONDS_DEFAULT: f64 = 60.0;
/// How long a command runs on that no client is attached to, where the client does not say.
const IDLE_SECONDS_DEFAULT: f64 = 300.0;
/// How long a command can be found after its end, where the client does not say.
const TTL_SECONDS_DEFAULT: f64 = 600.0;
/// Longer is as good as forever.
const LENGTH_MAX: Duration = Duration::from_secs(10 * 365 * 86_400);
/// The shell where the client names none.
const SHELL: &str = "/bin/bash";
/// No client ever says the size of its terminal.
const TERMINAL: TerminalSize = TerminalSize { rows: 24, columns: 80 };
/// What a killed command exits with, where the kernel does not say otherwise.
const KILLED: i32 = 137;
/// The longest text in one message. In the worst case JSON writes six bytes for one, which must fit into the buffer that a connection
/// has here (four times `OUTPUT_MESSAGE_MAX`), and into the 1 MiB that clients take.
const TEXT_MAX: usize = 32 << 10;
/// Input that was sent and that the command has not yet been given. There is no way to ask a client to wait, and the whole of any
/// message must fit.
const INPUT_QUEUE_BYTES_MAX: usize = COMMAND_BODY_MAX;
/// Output of one stream in the answer to a plain request. Those who expect more open a WebSocket.
const ANSWER_OUTPUT_MAX: usize = 16 << 20;

/// What to run.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Execute {
    command: Option<String>,
    command_id: Option<String>,
    /// Before 0.7.17, and over plain HTTP.
    timeout: Option<f64>,
    timeout_seconds: Option<f64>,
    idle_timeout_seconds: Option<f64>,
    kill_on_disconnect: Option<bool>,
    ttl_seconds: Option<f64>,
    shell: Option<String>,
    env: Option<BTreeMap<String, String>>,
    cwd: Option<String>,
    run_config: Option<RunConfig>,
    close_stdin: Option<bool>,
    pty: Option<bool>,
}

impl Execute {
    /// For the engine. `stdin`: whether the client can write to it unless it says that it will not.
    pub fn spec(self, sandbox: &Sandbox, stdin: bool) -> Result<CommandSpec, Refusal> {
        let wrong = |message: &str| Refusal::new(StatusCode::BAD_REQUEST, Doing::Command.error(), message);
        let command = self.command.ok_or_else(|| wrong("`command` is missing"))?;
        let id = self.command_id.map(|id| id.parse::<CommandId>()).transpose();
        let id = id.map_err(|error| wrong(&format!("`command_id` is not valid: {error}")))?;
        let own = match (self.run_config, self.env, self.cwd) {
            (Some(_), env, cwd) if env.is_some() || cwd.is_some() => {
                return Err(wrong("give either `run_config`, or `env` and `cwd`"));
            }
            (Some(own), ..) => own,
            (None, env, cwd) => RunConfig { user: None, work_dir: cwd, env_vars: env },
        };
        own.check().map_err(|refusal| wrong(refusal.message()))?;
        let run = Notes::of(sandbox).run_config.under(own);
        let seconds = self.timeout_seconds.or(self.timeout).unwrap_or(TIMEOUT_SECONDS_DEFAULT);
        let timeout = match seconds {
            0.0 => None,
            seconds => {
                let length = Duration::try_from_secs_f64(seconds);
                Some(length.map_err(|_| wrong("the timeout is not a length"))?.min(LENGTH_MAX))
            }
        };
        let pty = self.pty.unwrap_or(false);
        let shell = self.shell.filter(|shell| !shell.is_empty()).unwrap_or_else(|| SHELL.into());
        let broken = |field: Field| move |must: Must| wrong(&must.of(field).to_string());
        let argv = vec![shell, "-c".into(), command];
        Ok(CommandSpec {
            id,
            env: run.env().map_err(broken(Field::Env))?,
            cwd: run.work_dir().map_err(broken(Field::Cwd))?,
            user: run.user().map_err(broken(Field::User))?,
            stdin: pty || (stdin && !self.close_stdin.unwrap_or(false)),
            terminal: pty.then_some(TERMINAL),
            timeout,
            attendance: Attendance {
                unattended: match self.kill_on_disconnect {
                    Some(true) => Some(Duration::ZERO),
                    Some(false) | None => patience(self.idle_timeout_seconds, IDLE_SECONDS_DEFAULT)?,
                },
                kept: patience(self.ttl_seconds, TTL_SECONDS_DEFAULT)?,
            },
            ..CommandSpec::new(Program::argv(argv).map_err(broken(Field::Command))?)
        })
    }
}

/// A length in seconds; below zero is forever.
fn patience(seconds: Option<f64>, usual: f64) -> Result<Option<Duration>, Refusal> {
    let seconds = seconds.unwrap_or(usual);
    if seconds < 0.0 {
        return Ok(None);
    }
    let wrong =
        |_| Refusal::new(StatusCode::BAD_REQUEST, Doing::Command.error(), "a length is no number of seconds");
    Ok(Some(Duration::try_from_secs_f64(seconds).map_err(wrong)?.min(LENGTH_MAX)))
}

/// What a client says on a WebSocket.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Wish {
    Execute(Box<Execute>),
    Reconnect {
        command_id: String,
        #[serde(default)]
        stdout_offset: u64,
        #[serde(default)]
        stderr_offset: u64,
    },
    Input {
        #[serde(default)]
        data: String,
    },
    CloseStdin,
    Kill,
    /// What later clients may say. It is not for us.
    #[serde(other)]
    Unknown,
}

/// Starts a command, or finds the one that was started under its id, whatever it was: clients ask again when a connection broke before
/// they heard of it.
pub async fn start(
    app: &App,
    key: &Key,
    sandbox: &Sandbox,
    spec: CommandSpec,
) -> Result<CommandRef, Refusal> {
    let id = spec.id.clone();
    let (engine, owner, sandbox) = (app.engine.clone(), key.owner.clone(), sandbox.id);
    // A task of its own, so that nothing is left half done when the client leaves.
    let starting = tokio::spawn(
        async move {
            match (engine.run(&owner, sandbox, spec).await, id) {
                (Err(EngineError::CommandIdReused { .. }), Some(id)) => {
                    engine.command(&owner, sandbox, &id).await
                }
                (result, _) => result,
            }
        }
        .in_current_span(),
    );
    match starting.await {
        Ok(result) => result.map_err(|error| Refusal::data(Doing::Command, error)),
        Err(_) => Err(Refusal::bug()),
    }
}

/// How a command ended, in the client's words.
pub enum Verdict {
    /// With this code.
    Exit(i32),
    /// With this type of error, and in words.
    Error(&'static str, String),
}

impl Verdict {
    /// Of a command that is over.
    pub fn of(command: &Command) -> Self {
        let CommandState::Ended { outcome, .. } = &command.state else {
            return Self::Error(Doing::Command.error(), "the command has no result".into());
        };
        let code = |status: &ExitStatus| match status {
            ExitStatus::Code(code) => *code,
            ExitStatus::Signal(signal) => 128 + signal,
        };
        match outcome {
            Outcome::Exited(code) => Self::Exit(*code),
            Outcome::Signaled(signal) => Self::Exit(128 + signal),
            // The caller that killed it gets this answer, even if the command could still exit by itself.
            Outcome::Killed(status) => {
                Self::Exit(Some(code(status)).filter(|code| *code != 0).unwrap_or(KILLED))
            }
            Outcome::OutOfMemory(status) => {
                Self::Exit(Some(code(status)).filter(|code| *code != 0).unwrap_or(KILLED))
            }
            Outcome::TimedOut(_) | Outcome::TimedOutUnheard | Outcome::IdleTimedOut(_) => {
                let after = command.start.timeout_ms.map(|milliseconds| milliseconds as f64 / 1000.0);
                let after = after.map_or_else(String::new, |seconds| format!(" after {seconds} seconds"));
                Self::Error("CommandTimeout", format!("the command timed out{after}"))
            }
            Outcome::FailedToStart(error) => {
                Self::Error(Doing::Command.error(), format!("the command cannot start: {error}"))
            }
            Outcome::SandboxGone => {
                Self::Error(Doing::Command.error(), "the sandbox ended under the command".into())
            }
        }
    }

    fn message(&self) -> Value {
        match self {
            Self::Exit(code) => json!({"type": "exit", "exit_code": code}),
            Self::Error(kind, error) => json!({"type": "error", "error_type": kind, "error": error}),
        }
    }
}

/// `POST {dataplane}/execute`: runs a command and answers with all of its output.
pub async fn execute(
    State(app): State<App>,
    target: Target,
    DataBody(body): DataBody<Execute>,
) -> Result<Json<Value>, Refusal> {
    let mut stopping = app.stopping(&target.key);
    let spec = body.spec(&target.sandbox, false)?;
    let command = start(&app, &target.key, &target.sandbox, spec).await?;
    // Held for as long as the caller waits: a command that nobody watches may be ended.
    let watching = command.attach(Offsets { stdout: u64::MAX, stderr: u64::MAX });
    let ended = tokio::select! {
        ended = command.ended() => ended,
        _ = stopping.wait() => return Err(Refusal::data(Doing::Command, EngineError::Stopping)),
    };
    drop(watching);
    match Verdict::of(&ended) {
        Verdict::Exit(exit_code) => {
            let output = command
                .output(ANSWER_OUTPUT_MAX)
                .await
                .map_err(|error| Refusal::data(Doing::Command, error))?;
            if output.stdout_cut || output.stderr_cut {
                let message = format!(
                    "the command wrote more than {ANSWER_OUTPUT_MAX} bytes, and exited with {exit_code}"
                );
                return Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, Doing::Command.error(), message));
            }
            let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
            Ok(Json(
                json!({"stdout": text(output.stdout), "stderr": text(output.stderr), "exit_code": exit_code}),
            ))
        }
        Verdict::Error("CommandTimeout", message) => {
            Err(Refusal::new(StatusCode::REQUEST_TIMEOUT, Doing::Command.error(), message))
        }
        Verdict::Error(kind, message) => Err(Refusal::new(StatusCode::BAD_REQUEST, kind, message)),
    }
}

/// `GET {dataplane}/execute/ws`
pub async fn socket(
    State(app): State<App>,
    target: Result<Target, Refusal>,
    arrival: Option<Extension<Arrival>>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Refusal> {
    let upgrade = upgrade.map_err(|rejection| {
        Refusal::new(StatusCode::UPGRADE_REQUIRED, "UpgradeRequired", rejection.body_text())
    })?;
    let target = match target {
        Ok(target) => target,
        // Clients take a 404 for a server that knows no WebSockets, say so, and try for a quarter of a minute to come back to a
        // command. So the answer for a deleted sandbox is sent where these clients look for it.
        Err(refusal) if refusal.status() == StatusCode::NOT_FOUND => {
            let gone = text(&Verdict::Error("SandboxNotFound", refusal.message().to_owned()).message());
            let session = move |mut socket: WebSocket| async move {
                let _place = arrival;
                // They listen once they have said what they want.
                if let Ok(Ok(_)) = tokio::time::timeout(FIRST_MESSAGE_MAX, next_text(&mut socket)).await {
                    Close::Ended.say_after(gone, socket).await;
                }
            };
            return Ok(bounded(upgrade, COMMAND_BODY_MAX).on_upgrade(session).into_response());
        }
        Err(refusal) => return Err(refusal),
    };
    match target.sandbox.state {
        // A command resumes a paused sandbox.
        engine::State::Running | engine::State::Paused(_) => {}
        // Answered before anything is begun, so that clients try again by themselves.
        engine::State::Creating => return Err(Refusal::not_yet("the sandbox is not ready yet")),
        state => {
            let error = EngineError::WrongState { id: target.sandbox.id, state: state.word() };
            return Err(Refusal::data(Doing::Command, error));
        }
    }
    let span = tracing::Span::current();
    let session = move |mut socket: WebSocket| async move {
        let _place = arrival;
        let mut stopping = app.stopping(&target.key);
        let opened = tokio::select! {
            opened = open(&app, &target, &mut socket) => opened,
            halt = stopping.wait() => Err(Opening::Closed(Some(halt.into()))),
        };
        match opened {
            Ok(session) => session.serve(socket, stopping).await,
            Err(Opening::Closed(None)) => {}
            Err(Opening::Closed(Some(close))) => close.say(socket).await,
            Err(Opening::Refused(kind, error)) => {
                tracing::info!(kind, error, "refused");
                Close::Ended.say_after(text(&Verdict::Error(kind, error).message()), socket).await;
            }
        }
    };
    let upgrade = bounded(upgrade, COMMAND_BODY_MAX);
    Ok(upgrade.on_upgrade(move |socket| session(socket).instrument(span)).into_response())
}

/// Why a connection does not become a session.
enum Opening {
    Closed(Option<Close>),
    Refused(&'static str, String),
}

/// The next text that a client sends. Binary messages that hold text are taken too.
async fn next_text(socket: &mut WebSocket) -> Result<Bytes, Opening> {
    loop {
        match socket.recv().await {
            Some(Ok(Message::Text(text))) => return Ok(text.into()),
            Some(Ok(Message::Binary(bytes))) => return Ok(bytes),
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
            Some(Ok(Message::Close(_)) | Err(_)) | None => return Err(Opening::Closed(None)),
        }
    }
}

/// Reads what the client wants, and begins or finds it.
async fn open(app: &App, target: &Target, socket: &mut WebSocket) -> Result<Session, Opening> {
    let refused = |refusal: Refusal| {
        let kind = match refusal.error() {
            "CommandNotFound" => "CommandNotFound",
            "SessionExpired" => "SessionExpired",
            "NotReady" => "NotReady",
            _ => Doing::Command.error(),
        };
        Opening::Refused(kind, refusal.message().to_owned())
    };
    let wrong = |message: &str| Opening::Refused(Doing::Command.error(), message.to_owned());
    let deadline = Instant::now() + FIRST_MESSAGE_MAX;
    let mut end_stdin = false;
    loop {
        let first = tokio::time::timeout_at(deadline, next_text(socket)).await;
        let first = first.map_err(|_| wrong("the first message did not come in time"))??;
        let wish = parse_json(&first).map_err(|error| wrong(&error.into_body().message))?;
        let (command, from) = match wish {
            Wish::Execute(body) => {
                let spec = body.spec(&target.sandbox, true).map_err(refused)?;
                (start(app, &target.key, &target.sandbox, spec).await.map_err(refused)?, Offsets::default())
            }
            Wish::Reconnect { command_id, stdout_offset, stderr_offset } => {
                let not_found =
                    || Opening::Refused("CommandNotFound", format!("command `{command_id}` does not exist"));
                let id: CommandId = command_id.parse().map_err(|_| not_found())?;
                let found = app.engine.command(&target.key.owner, target.sandbox.id, &id).await;
                let command = found.map_err(|error| refused(Refusal::data(Doing::Command, error)))?;
                (command, Offsets { stdout: stdout_offset, stderr: stderr_offset })
            }
            // Said on a handle that was not attached yet; it holds once there is a command.
            Wish::CloseStdin => {
                end_stdin = true;
                continue;
            }
            Wish::Input { .. } | Wish::Kill | Wish::Unknown => {
                return Err(wrong("the first message must be `execute` or `reconnect`"));
            }
        };
        return Ok(Session { command, from, end_stdin });
    }
}

/// One client on one command.
struct Session {
    command: CommandRef,
    from: Offsets,
    end_stdin: bool,
}

impl Session {
    async fn serve(self, socket: WebSocket, stopping: Stopping) {
        let Self { command, from, end_stdin } = self;
        let output = command.attach_text(from);
        let (mut sink, mut stream) = socket.split();
        let (mut stdin, queued) = stdin_queue(INPUT_QUEUE_BYTES_MAX);
        let (lost, losses) = mpsc::channel(1);
        if end_stdin {
            // The queue is empty, so there is room.
            let _ = stdin.push(Input::End).await;
        }
        let (line, hearing) = Line::new(&mut sink);
        let key = stopping.key();
        let write = Writer { command: &command, line, output, losses }.write(stopping);
        let read = Reader { command: &command, stream: &mut stream, stdin, lost }.read(hearing);
        let close = converse(key, write, read, pump_stdin(command.clone(), queued)).await;
        if let Some(close) = close
            && let Ok(socket) = sink.reunite(stream)
        {
            close.say(socket).await;
        }
    }
}

fn text(message: &Value) -> Message {
    Message::Text(message.to_string().into())
}

/// Some output. Most of what is sent is this, so that it is written without a copy in between.
#[derive(Serialize)]
struct Piece<'a> {
    #[serde(rename = "type")]
    stream: &'static str,
    data: &'a str,
    offset: u64,
}

/// Output and pings, to the client.
struct Writer<'a> {
    command: &'a CommandRef,
    line: Line<'a>,
    output: TextOutput,
    /// Why input was lost.
    losses: mpsc::Receiver<String>,
}

impl Writer<'_> {
    async fn write(mut self, mut stopping: Stopping) -> Result<Close, Lost> {
        let mut started = false;
        loop {
            let event = tokio::select! {
                biased;
                halt = stopping.wait() => return Ok(halt.into()),
                () = self.line.ping_due() => {
                    self.line.ping().await?;
                    continue;
                }
                // Reported as the command's end, because the protocol has no other way: the client would wait for a command that cannot continue without its input.
                Some(why) = self.losses.recv() => {
                    self.line.send(text(&Verdict::Error(Doing::Command.error(), why).message())).await?;
                    return Ok(Close::Ended);
                }
                event = self.output.next() => event,
            };
            match event {
                Some(TextEvent::Started { pid }) => {
                    started = true;
                    self.say_started(pid).await?;
                }
                Some(TextEvent::Text { stream, offset, text }) => {
                    self.say_text(stream, offset, &text).await?
                }
                Some(TextEvent::Ended(command)) => {
                    let verdict = Verdict::of(&command);
                    // One that ended before anybody saw it run has begun all the same, unless it could not start.
                    if !started && let Verdict::Exit(_) = verdict {
                        self.say_started(0).await?;
                    }
                    self.line.send(text(&verdict.message())).await?;
                    return Ok(Close::Ended);
                }
                // The engine has let this reader go, or is itself on its way out.
                Some(TextEvent::Stalled) | None => return Ok(Close::Restart),
            }
        }
    }

    async fn say_started(&mut self, pid: u32) -> Result<(), Lost> {
        let id = self.command.now().id;
        self.line.send(text(&json!({"type": "started", "command_id": id.as_str(), "pid": pid}))).await
    }

    async fn say_text(&mut self, stream: Stream, mut offset: u64, mut rest: &str) -> Result<(), Lost> {
        let name = if stream == Stream::Stderr { "stderr" } else { "stdout" };
        while !rest.is_empty() {
            let mut end = rest.len().min(TEXT_MAX);
            while !rest.is_char_boundary(end) {
                end -= 1;
            }
            let (piece, behind) = rest.split_at(end);
            let message = serde_json::to_string(&Piece { stream: name, data: piece, offset })
                .expect("text and a number are JSON");
            self.line.send(Message::Text(message.into())).await?;
            (offset, rest) = (offset + piece.len() as u64, behind);
        }
        Ok(())
    }
}

/// What the client says.
struct Reader<'a> {
    command: &'a CommandRef,
    stream: &'a mut SplitStream<WebSocket>,
    stdin: StdinSender,
    lost: mpsc::Sender<String>,
}

impl Reader<'_> {
    /// Until the client closes or is gone.
    async fn read(mut self, hearing: watch::Sender<Instant>) {
        while let Some(Ok(message)) = self.stream.next().await {
            hearing.send_replace(Instant::now());
            let bytes = match message {
                Message::Text(text) => Bytes::from(text),
                Message::Binary(bytes) => bytes,
                Message::Ping(_) | Message::Pong(_) => continue,
                Message::Close(_) => return,
            };
            let given = match parse_json(&bytes) {
                Ok(Wish::Input { data }) => self.stdin.push(Input::Bytes(data.into())).await,
                Ok(Wish::CloseStdin) => self.stdin.push(Input::End).await,
                Ok(Wish::Kill) => {
                    self.kill();
                    Ok(())
                }
                // Said by a client that is newer than this.
                Ok(Wish::Execute(_) | Wish::Reconnect { .. } | Wish::Unknown) => Ok(()),
                // What it was meant to be is lost: text that is no text, most likely.
                Err(error) => Err(error),
            };
            if let Err(error) = given {
                // Once is enough.
                let _ = self.lost.try_send(error.into_body().message);
            }
        }
    }

    /// A task of its own: clients close the connection as soon as they have said it.
    fn kill(&self) {
        let command = self.command.clone();
        let killing = async move {
            match command.kill().await {
                Ok(()) | Err(EngineError::CommandEnded { .. }) => {}
                Err(error) => tracing::warn!(%error, "cannot kill a command"),
            }
        };
        tokio::spawn(killing.in_current_span());
    }
}

/// Hands stdin to the command, in order, until the client has no more or the command takes no more.
async fn pump_stdin(command: CommandRef, mut queue: mpsc::Receiver<Queued>) {
    while let Some(Queued { input, .. }) = queue.recv().await {
        let done = match input {
            Input::Bytes(bytes) => append(&command, bytes).await,
            Input::End => command.end_stdin().await,
        };
        if let Err(error) = done {
            tracing::info!(%error, "input was not taken");
            return;
        }
    }
}

async fn append(command: &CommandRef, mut bytes: Bytes) -> Result<(), EngineError> {
    while !bytes.is_empty() {
        command.append_stdin(bytes.split_to(bytes.len().min(STDIN_WRITE_MAX))).await?;
    }
    Ok(())
}
