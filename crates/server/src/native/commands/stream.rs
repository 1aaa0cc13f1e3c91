//! A command over a WebSocket: output, stdin and actions, on one connection.
//!
//! ```text
//! GET …/commands/stream             the first message says what to run (`start`)
//! GET …/commands/{command}/stream   joins a command, from `stdout_offset`, `stderr_offset` and `stdin_offset` on
//! ```
//!
//! Three parts run at once and none waits for another: reading the client's messages, passing its stdin to the command,
//! and writing output. So a kill gets through while output floods. The client's messages are documented at
//! `wire::api::CommandWish`, the daemon's at `CommandEvent`.
//!
//! | close code | meaning |
//! | --- | --- |
//! | 1000 | the command is over, `ended` was sent before |
//! | 1008 | the first message was refused, and a `refused` event was sent before; or the api key was deleted |
//! | 1012 | the daemon stops, or the client was too slow: connect again with the offsets reached |
//!
//! A message that is too long ends the connection without a close.

use axum::Extension;
use axum::extract::State;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::http::StatusCode;
use axum::response::Response;
use bytes::{BufMut, Bytes, BytesMut};
use engine::{CommandRef, CommandSpec, EngineError, Key, Offsets, Output, OutputEvent, Resume, Signal};
use futures_util::StreamExt;
use futures_util::stream::SplitStream;
use serde::Deserialize;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout};
use tracing::Instrument;
use utoipa::IntoParams;
use wire::SandboxId;
use wire::api::{CommandEvent, CommandState, CommandWish};

use super::{add_attempts, command_spec, output_stream, terminal_size, to_api};
use crate::http::app::{App, Arrival, Caller, Stopping};
use crate::http::body::{COMMAND_BODY_MAX, CommandPath, Query, SandboxPath, parse_json};
use crate::http::error::ApiError;
use crate::http::websocket::{
    Close, FIRST_MESSAGE_MAX, Input, Line, Lost, OUTPUT_MESSAGE_MAX, Queued, STDIN_WRITE_MAX, StdinSender,
    bounded, converse, needs_upgrade, stdin_queue,
};
use crate::native::common::resume_of;

/// The limit for a message from a client that joins a command; one that starts a command may send [`COMMAND_BODY_MAX`].
const MESSAGE_MAX: usize = 1 << 20;
/// How much received stdin may wait for the command. While the queue is full, nothing is read from the client.
const STDIN_QUEUE_BYTES_MAX: usize = 1 << 20;
/// How many responses to the client may wait to be written.
const ANSWERS_MAX: usize = 16;

/// Where to begin.
#[derive(Debug, Clone, Copy, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct StreamParams {
    /// How much of stdout the client has already.
    stdout_offset: u64,
    /// How much of stderr the client has already.
    stderr_offset: u64,
    /// Where the client's first stdin message begins, so that bytes sent again are written once. Left out: at the end
    /// of what was written, or at 0 where the connection starts the command.
    stdin_offset: Option<u64>,
    /// `never`: fail if the sandbox is paused, instead of resuming it first.
    #[param(inline)]
    resume: wire::api::ResumeWish,
}

/// Starts a command and streams it. The first message is a `CommandWish` of type `start`.
///
/// Close codes: 1000 the command is over; 1008 the first message was refused, or the api key was deleted; 1012 the daemon stops
/// or the client was too slow, connect again at the command's own stream with the offsets reached.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/commands/stream", tag = "commands", params(
    ("sandbox" = String, Path, description = "The sandbox's id."), StreamParams), responses(
    (status = 101, description = "A WebSocket: `CommandWish` in, `CommandEvent` and binary output out."),
    (status = 404, body = wire::api::ErrorBody),
    (status = 426, body = wire::api::ErrorBody),
))]
pub async fn start(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(sandbox): SandboxPath,
    Query(params): Query<StreamParams>,
    arrival: Option<Extension<Arrival>>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let upgrade = upgrade.map_err(needs_upgrade)?;
    // Checked now, so that a sandbox that does not exist is a plain 404.
    app.engine.get(&key.owner, sandbox).await?;
    let params = StreamParams { stdin_offset: Some(params.stdin_offset.unwrap_or(0)), ..params };
    let span = tracing::Span::current();
    let session = move |mut socket: WebSocket| async move {
        let _place = arrival;
        let mut stopping = app.stopping(&key);
        let first = tokio::select! {
            first = read_start(&app, &key, (sandbox, resume_of(params.resume)), &mut socket) => first,
            halt = stopping.wait() => Err(Opening::Closed(Some(halt.into()))),
        };
        match first {
            Ok(command) => Session { command, params, stopping }.serve(socket).await,
            Err(Opening::Closed(None)) => {}
            Err(Opening::Closed(Some(close))) => close.say(socket).await,
            Err(Opening::Refused(error)) => Close::Refused.say_after(refusal(error), socket).await,
        }
    };
    Ok(bounded(upgrade, COMMAND_BODY_MAX).on_upgrade(move |socket| session(socket).instrument(span)))
}

/// Streams a command that was started before, from the given offsets on.
///
/// Close codes as with the stream that starts a command.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/commands/{command}/stream", tag = "commands", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("command" = String, Path, description = "The command's id."), StreamParams), responses(
    (status = 101, description = "A WebSocket: `CommandWish` in, `CommandEvent` and binary output out."),
    (status = 404, body = wire::api::ErrorBody),
    (status = 426, body = wire::api::ErrorBody),
))]
pub async fn attach(
    State(app): State<App>,
    Caller(key): Caller,
    CommandPath(sandbox, command): CommandPath,
    Query(params): Query<StreamParams>,
    arrival: Option<Extension<Arrival>>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let upgrade = upgrade.map_err(needs_upgrade)?;
    let command = app.engine.command(&key.owner, sandbox, &command).await?;
    let command = command.with_resume(resume_of(params.resume));
    let session = Session { command, params, stopping: app.stopping(&key) };
    let session = move |socket: WebSocket| async move {
        let _place = arrival;
        session.serve(socket).await;
    };
    let span = tracing::Span::current();
    Ok(bounded(upgrade, MESSAGE_MAX).on_upgrade(move |socket| session(socket).instrument(span)))
}

/// Why a connection does not become a session.
enum Opening {
    Closed(Option<Close>),
    Refused(ApiError),
}

async fn read_start(
    app: &App,
    key: &Key,
    (sandbox, resume): (SandboxId, Resume),
    socket: &mut WebSocket,
) -> Result<CommandRef, Opening> {
    let refused = |why: &str| {
        Opening::Refused(
            ApiError::new(StatusCode::BAD_REQUEST, "invalid_message", why)
                .hint("send `{\"type\": \"start\", \"argv\": [...]}` first"),
        )
    };
    let first = async {
        loop {
            match socket.recv().await {
                Some(Ok(Message::Text(text))) => return Ok(text),
                Some(Ok(Message::Binary(_))) => return Err(refused("the first message must be text")),
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                Some(Ok(Message::Close(_)) | Err(_)) | None => return Err(Opening::Closed(None)),
            }
        }
    };
    let text = match timeout(FIRST_MESSAGE_MAX, first).await {
        Ok(text) => text?,
        Err(_) => return Err(refused("the first message did not come in time")),
    };
    let wish = parse_json(text.as_bytes()).map_err(Opening::Refused)?;
    let CommandWish::Start(body) = wish else { return Err(refused("the first message must be `start`")) };
    let spec = CommandSpec { resume, ..command_spec(*body).map_err(Opening::Refused)? };
    app.engine.run(&key.owner, sandbox, spec).await.map_err(|error| Opening::Refused(error.into()))
}

/// One client on one command.
struct Session {
    command: CommandRef,
    params: StreamParams,
    stopping: Stopping,
}

impl Session {
    async fn serve(self, socket: WebSocket) {
        let Self { command, params, stopping } = self;
        let output = command.attach(Offsets { stdout: params.stdout_offset, stderr: params.stderr_offset });
        let (mut sink, mut stream) = socket.split();
        let (answers, answered) = mpsc::channel(ANSWERS_MAX);
        let (stdin, queued) = stdin_queue(STDIN_QUEUE_BYTES_MAX);
        let (line, hearing) = Line::new(&mut sink);
        let key = stopping.key();
        let write = Writer { command: &command, line, output }.write(answered, stopping);
        let pump = pump_stdin(command.clone(), params.stdin_offset, queued, answers.clone());
        let read = Reader { command: &command, stream: &mut stream, stdin, answers }.read(hearing);
        let close = converse(key, write, read, pump).await;
        if let Some(close) = close
            && let Ok(socket) = sink.reunite(stream)
        {
            close.say(socket).await;
        }
    }
}

/// Sends output, responses and pings to the client.
struct Writer<'a> {
    command: &'a CommandRef,
    line: Line<'a>,
    output: Output,
}

impl Writer<'_> {
    /// Writes until the end.
    async fn write(
        mut self,
        mut answered: mpsc::Receiver<Message>,
        mut stopping: Stopping,
    ) -> Result<Close, Lost> {
        let first = to_api(self.command.now());
        // The output reports the start even if that was long ago; then the first event has said it already.
        let started = first.state != CommandState::Starting;
        self.line.send(event(&CommandEvent::Command(Box::new(first)))).await?;
        loop {
            tokio::select! {
                biased;
                halt = stopping.wait() => return Ok(halt.into()),
                Some(answer) = answered.recv() => self.line.send(answer).await?,
                () = self.line.ping_due() => self.line.ping().await?,
                output = self.output.next() => match output {
                    Some(OutputEvent::Started { .. }) if started => {}
                    Some(OutputEvent::Started { .. }) => {
                        let now = CommandEvent::Command(Box::new(to_api(self.command.now())));
                        self.line.send(event(&now)).await?;
                    }
                    Some(OutputEvent::Bytes { stream, offset, bytes }) => {
                        let mut offset = offset;
                        for piece in bytes.chunks(OUTPUT_MESSAGE_MAX) {
                            self.line.send(output_message(stream.number(), offset, piece)).await?;
                            offset += piece.len() as u64;
                        }
                    }
                    Some(OutputEvent::Lost { stream, from, to }) => {
                        let stream = output_stream(stream);
                        self.line.send(event(&CommandEvent::Lost { stream, from, to })).await?;
                    }
                    Some(OutputEvent::StdinAck { offset }) => {
                        self.line.send(event(&CommandEvent::StdinAck { offset })).await?;
                    }
                    Some(OutputEvent::Ended(command)) => {
                        let mut ended = to_api(*command);
                        add_attempts(&mut ended, self.command).await;
                        let ended = CommandEvent::Ended(Box::new(ended));
                        self.line.send(event(&ended)).await?;
                        return Ok(Close::Ended);
                    }
                    // Without an end: the engine has dropped this reader, or is stopping.
                    Some(OutputEvent::Stalled) | None => return Ok(Close::Restart),
                },
            }
        }
    }
}

fn output_message(stream: u8, offset: u64, piece: &[u8]) -> Message {
    let mut message = BytesMut::with_capacity(1 + 8 + piece.len());
    message.put_u8(stream);
    message.put_u64_le(offset);
    message.put_slice(piece);
    Message::Binary(message.freeze())
}

fn event(event: &CommandEvent) -> Message {
    let text = serde_json::to_string(event).expect("events are made of types that JSON can write");
    Message::Text(text.into())
}

fn refusal(error: impl Into<ApiError>) -> Message {
    let error = error.into();
    if let Some(chain) = error.chain() {
        tracing::info!(error = chain.0, "refused");
    }
    event(&CommandEvent::Refused(error.into_body()))
}

/// Reads the client's messages.
struct Reader<'a> {
    command: &'a CommandRef,
    stream: &'a mut SplitStream<WebSocket>,
    stdin: StdinSender,
    answers: mpsc::Sender<Message>,
}

impl Reader<'_> {
    /// Reads until the client closes or is gone.
    async fn read(mut self, hearing: watch::Sender<Instant>) {
        while let Some(Ok(message)) = self.stream.next().await {
            hearing.send_replace(Instant::now());
            let done = match message {
                Message::Binary(bytes) => self.stdin.push(Input::Bytes(bytes)).await,
                Message::Text(text) => match parse_json(text.as_bytes()) {
                    Ok(wish) => self.grant(wish).await,
                    Err(error) => Err(error),
                },
                Message::Ping(_) | Message::Pong(_) => Ok(()),
                Message::Close(_) => return,
            };
            if let Err(error) = done
                && self.answers.send(refusal(error)).await.is_err()
            {
                return;
            }
        }
    }

    async fn grant(&mut self, wish: CommandWish) -> Result<(), ApiError> {
        match wish {
            CommandWish::Start(_) => Err(ApiError::new(
                StatusCode::BAD_REQUEST,
                "invalid_message",
                "`start` is only for the first message of a connection that starts a command",
            )),
            CommandWish::StdinEnd => self.stdin.push(Input::End).await,
            CommandWish::Signal { signal } => Ok(self.command.signal(Signal::parse(&signal)?).await?),
            CommandWish::Kill => Ok(self.command.kill().await?),
            CommandWish::Resize { rows, columns } => {
                let size = terminal_size(rows, columns)?;
                Ok(self.command.resize(size.rows, size.columns).await?)
            }
        }
    }
}

/// Passes stdin to the command, in order, until the client has ended it or the command accepts no more.
async fn pump_stdin(
    command: CommandRef,
    mut at: Option<u64>,
    mut queue: mpsc::Receiver<Queued>,
    answers: mpsc::Sender<Message>,
) {
    while let Some(Queued { input, room: _room }) = queue.recv().await {
        let done = match input {
            Input::Bytes(bytes) => write_stdin(&command, &mut at, bytes).await,
            Input::End => command.end_stdin().await,
        };
        if let Err(error) = done {
            // If the session is over, the message is dropped.
            let _ = answers.send(refusal(error)).await;
            return;
        }
    }
}

async fn write_stdin(
    command: &CommandRef,
    at: &mut Option<u64>,
    mut bytes: Bytes,
) -> Result<(), EngineError> {
    while !bytes.is_empty() {
        let piece = bytes.split_to(bytes.len().min(STDIN_WRITE_MAX));
        loop {
            match command.write_stdin(*at, piece.clone()).await {
                Ok(_) => break,
                // A command that reads slowly is no failure here: the queue is bounded, and bytes with an offset can be
                // sent again.
                Err(EngineError::StdinStalled { .. }) if at.is_some() => {}
                Err(error) => return Err(error),
            }
        }
        *at = at.map(|at| at.saturating_add(piece.len() as u64));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_goes_with_its_stream_and_offset_in_front() {
        let Message::Binary(message) = output_message(2, 0x0102, b"abc") else { panic!("output is binary") };
        assert_eq!(&message[..], b"\x02\x02\x01\0\0\0\0\0\0abc");
    }
}
