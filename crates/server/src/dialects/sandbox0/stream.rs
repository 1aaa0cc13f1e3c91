//! A context over a WebSocket: its output from the start, its end, and input, signals and sizes on the way in.
//!
//! ```text
//! client                                                server
//! {"type":"input","data":...,"request_id":...}          {"type":"output","source":"stdout"|"stderr"|"pty","data":...}
//! {"type":"resize","rows":n,"cols":n}                   {"type":"done","request_id":...}               of an interpreter's request
//! {"type":"signal","signal":...}                        {"type":"done","exit_code":n,"state":...}      last, then close 1000
//! ```
//!
//! Clients make a context first and connect then, so the output comes from its start. They keep no offsets: who connects again gets
//! it all again.

use axum::Extension;
use axum::extract::State;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use engine::{CommandRef, CommandState, EngineError, Offsets, Signal, TextEvent, TextOutput};
use futures_util::StreamExt;
use futures_util::stream::SplitStream;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::Instrument;
use wire::guest::Stream;

use super::contexts::Context;
use super::error::Refusal;
use super::output::end;
use super::repl::{self, Filter, Piece, REQUEST_ID_MAX};
use crate::http::app::{App, Arrival, Stopping};
use crate::http::body::{COMMAND_BODY_MAX, parse_json};
use crate::http::websocket::{
    Close, Input, Line, Lost, Queued, STDIN_WRITE_MAX, StdinSender, bounded, converse, needs_upgrade,
    stdin_queue,
};

/// The longest text in one message. In the worst case JSON writes six bytes for one, which must fit into the buffer that a connection
/// has here (four times `OUTPUT_MESSAGE_MAX`), and into the 1 MiB that clients take.
const TEXT_MAX: usize = 32 << 10;
/// Input that was sent and that the command has not yet been given. There is no way to ask a client to wait.
const INPUT_QUEUE_BYTES_MAX: usize = COMMAND_BODY_MAX;
/// Complaints that wait to be told.
const COMPLAINTS_MAX: usize = 16;

/// What a client says.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Wish {
    Input {
        #[serde(default)]
        data: String,
        #[serde(default)]
        request_id: Option<String>,
    },
    Resize {
        #[serde(default)]
        rows: u16,
        #[serde(default)]
        cols: u16,
    },
    Signal {
        #[serde(default)]
        signal: String,
    },
    /// What later clients may say. It is not for us.
    #[serde(other)]
    Unknown,
}

/// `GET .../contexts/{context}/ws`
pub async fn socket(
    State(app): State<App>,
    context: Context,
    arrival: Option<Extension<Arrival>>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Refusal> {
    let upgrade = upgrade.map_err(needs_upgrade)?;
    let span = tracing::Span::current();
    let session = move |socket: WebSocket| async move {
        let _place = arrival;
        let stopping = app.stopping(&context.key);
        serve(context, socket, stopping).await;
    };
    let upgrade = bounded(upgrade, COMMAND_BODY_MAX);
    Ok(upgrade.on_upgrade(move |socket| session(socket).instrument(span)).into_response())
}

async fn serve(context: Context, socket: WebSocket, stopping: Stopping) {
    let interprets = context.is_interpreter();
    let command = context.command;
    let (mut sink, mut stream) = socket.split();
    let (stdin, queued) = stdin_queue(INPUT_QUEUE_BYTES_MAX);
    let (complain, complaints) = mpsc::channel(COMPLAINTS_MAX);
    let (line, hearing) = Line::new(&mut sink);
    let key = stopping.key();
    let writer = Writer {
        output: command.attach_text(Offsets::default()),
        terminal: command.now().start.terminal.is_some(),
        filter: interprets.then(Filter::default),
        line,
        complaints,
    };
    let reader = Reader { command: &command, stream: &mut stream, stdin, complain, interprets };
    let close =
        converse(key, writer.write(stopping), reader.read(hearing), pump(command.clone(), queued)).await;
    if let Some(close) = close
        && let Ok(socket) = sink.reunite(stream)
    {
        close.say(socket).await;
    }
}

fn text(message: &Value) -> Message {
    Message::Text(message.to_string().into())
}

/// Some output. Most of what is sent is this, so that it is written without a copy in between.
#[derive(Serialize)]
struct Output<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    source: &'static str,
    data: &'a str,
}

struct Writer<'a> {
    output: TextOutput,
    terminal: bool,
    /// For interpreters.
    filter: Option<Filter>,
    line: Line<'a>,
    /// What was wrong with messages of the client.
    complaints: mpsc::Receiver<String>,
}

impl Writer<'_> {
    async fn write(mut self, mut stopping: Stopping) -> Result<Close, Lost> {
        loop {
            let event = tokio::select! {
                biased;
                halt = stopping.wait() => return Ok(halt.into()),
                () = self.line.ping_due() => {
                    self.line.ping().await?;
                    continue;
                }
                Some(why) = self.complaints.recv() => {
                    self.line.send(text(&json!({"type": "error", "error": why}))).await?;
                    continue;
                }
                event = self.output.next() => event,
            };
            match event {
                Some(TextEvent::Started { .. }) => {}
                Some(TextEvent::Text { stream, text, .. }) => self.say(stream, &text).await?,
                Some(TextEvent::Ended(command)) => {
                    if let Some(filter) = &mut self.filter {
                        let rest = filter.end();
                        self.tell(Stream::Stdout, rest).await?;
                    }
                    if let CommandState::Ended { outcome, .. } = &command.state {
                        let (code, state) = end(outcome);
                        self.line
                            .send(text(&json!({"type": "done", "exit_code": code, "state": state})))
                            .await?;
                    }
                    return Ok(Close::Ended);
                }
                // The engine has let this reader go, or is itself on its way out.
                Some(TextEvent::Stalled) | None => return Ok(Close::Restart),
            }
        }
    }

    async fn say(&mut self, stream: Stream, text: &str) -> Result<(), Lost> {
        match &mut self.filter {
            Some(filter) => {
                let pieces = filter.take(text);
                self.tell(stream, pieces).await
            }
            None => self.send(stream, text).await,
        }
    }

    async fn tell(&mut self, stream: Stream, pieces: Vec<Piece>) -> Result<(), Lost> {
        for piece in pieces {
            match piece {
                Piece::Text(text) => self.send(stream, &text).await?,
                Piece::Over(request) => {
                    self.line.send(text(&json!({"type": "done", "request_id": request}))).await?;
                }
                Piece::Begun(_) => {}
            }
        }
        Ok(())
    }

    async fn send(&mut self, stream: Stream, mut rest: &str) -> Result<(), Lost> {
        let source = match (self.terminal, stream) {
            (true, _) => "pty",
            (false, Stream::Stderr) => "stderr",
            (false, _) => "stdout",
        };
        while !rest.is_empty() {
            let mut end = rest.len().min(TEXT_MAX);
            while !rest.is_char_boundary(end) {
                end -= 1;
            }
            let (data, behind) = rest.split_at(end);
            let message =
                serde_json::to_string(&Output { kind: "output", source, data }).expect("text is JSON");
            self.line.send(Message::Text(message.into())).await?;
            rest = behind;
        }
        Ok(())
    }
}

/// What the client says.
struct Reader<'a> {
    command: &'a CommandRef,
    stream: &'a mut SplitStream<WebSocket>,
    stdin: StdinSender,
    complain: mpsc::Sender<String>,
    interprets: bool,
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
            let wrong = match parse_json(&bytes) {
                Ok(wish) => self.fulfil(wish).await.err(),
                Err(error) => Some(error.into_body().message),
            };
            if let Some(why) = wrong {
                // A client that reads nothing is not told more.
                let _ = self.complain.try_send(why);
            }
        }
    }

    async fn fulfil(&mut self, wish: Wish) -> Result<(), String> {
        let done = match wish {
            Wish::Input { data, request_id } if self.interprets => {
                // An empty one would look like the end of the interpreter.
                let request = request_id.filter(|id| !id.is_empty()).unwrap_or_else(|| "input".into());
                if request.len() > REQUEST_ID_MAX {
                    return Err(format!("`request_id` must have at most {REQUEST_ID_MAX} bytes"));
                }
                return self.push(repl::line(&request, &data)).await;
            }
            Wish::Input { data, .. } => return self.push(data).await,
            Wish::Resize { rows, cols } if rows > 0 && cols > 0 => self.command.resize(rows, cols).await,
            Wish::Resize { .. } => return Err("`rows` and `cols` must be above zero".into()),
            Wish::Signal { signal } => match Signal::parse(&signal) {
                Ok(signal) => self.command.signal(signal).await,
                Err(error) => Err(error),
            },
            Wish::Unknown => Ok(()),
        };
        done.map_err(|error| error.to_string())
    }

    async fn push(&mut self, text: String) -> Result<(), String> {
        let pushed = self.stdin.push(Input::Bytes(text.into())).await;
        pushed.map_err(|error| error.into_body().message)
    }
}

/// Hands input to the command, in order, until the client has no more or the command takes no more.
async fn pump(command: CommandRef, mut queue: mpsc::Receiver<Queued>) {
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
