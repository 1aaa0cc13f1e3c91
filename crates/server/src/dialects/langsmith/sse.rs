//! Commands over server-sent events, one way: for clients from 0.13 on that are configured not to use WebSockets.
//!
//! ```text
//! POST {dataplane}/execute/stream/start     runs a command, or finds it by its `command_id`
//! POST {dataplane}/execute/stream/resume    goes on at offsets
//! ```
//!
//! Output travels as base64 of the bytes as they are, so offsets are those of the bytes. A response carries at most
//! [`RESPONSE_OUTPUT_MAX`]; then it asks for an acknowledgement, which is the next request.

use std::convert::Infallible;

use axum::extract::State;
use axum::response::sse::{Event, KeepAlive};
use axum::response::{IntoResponse, Response, Sse};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use engine::{Command, CommandRef, Offsets, Output, OutputEvent};
use futures_util::stream;
use serde::Deserialize;
use serde_json::{Value, json};
use wire::CommandId;
use wire::guest::Stream;

use super::error::{Doing, Refusal};
use super::exec::{Execute, Verdict, start};
use super::read::{DataBody, Target};
use crate::dialects::common::ascii::ascii;
use crate::http::app::{App, Halt, Stopping};
use crate::http::sse::HEARTBEAT;

/// Output in one response. As the vendor's: what is kept there for a client that does not come back.
const RESPONSE_OUTPUT_MAX: u64 = 1 << 20;

/// Runs a command and streams it from its start.
pub async fn begin(
    State(app): State<App>,
    target: Target,
    DataBody(body): DataBody<Execute>,
) -> Result<Response, Refusal> {
    // One way: there is nothing to write to stdin with.
    let spec = body.spec(&target.sandbox, false)?;
    let command = start(&app, &target.key, &target.sandbox, spec).await?;
    Ok(respond(command, Offsets::default(), app.stopping(&target.key)))
}

/// Where to go on.
#[derive(Debug, Deserialize)]
pub struct Resume {
    command_id: String,
    #[serde(default)]
    stdout_offset: u64,
    #[serde(default)]
    stderr_offset: u64,
}

/// Streams a command from where the client is.
pub async fn resume(
    State(app): State<App>,
    target: Target,
    DataBody(body): DataBody<Resume>,
) -> Result<Response, Refusal> {
    let not_found = |_| {
        let message = format!("command `{}` does not exist", body.command_id);
        Refusal::new(axum::http::StatusCode::NOT_FOUND, "CommandNotFound", message)
    };
    let id: CommandId = body.command_id.parse().map_err(not_found)?;
    let command = app.engine.command(&target.key.owner, target.sandbox.id, &id).await;
    let command = command.map_err(|error| Refusal::data(Doing::Command, error))?;
    let from = Offsets { stdout: body.stdout_offset, stderr: body.stderr_offset };
    Ok(respond(command, from, app.stopping(&target.key)))
}

fn respond(command: CommandRef, from: Offsets, stopping: Stopping) -> Response {
    let output = command.attach(from);
    let sending =
        Sending { command, output, stopping, at: from, sent: 0, said: Said::Nothing, ready: Vec::new() };
    let events = stream::unfold(sending, async |mut sending| {
        let event = sending.next().await?;
        Some((Ok::<_, Infallible>(event), sending))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(HEARTBEAT).text("ping")).into_response()
}

/// How far a response is.
#[derive(PartialEq)]
enum Said {
    Nothing,
    Started,
    All,
}

struct Sending {
    command: CommandRef,
    output: Output,
    stopping: Stopping,
    at: Offsets,
    sent: u64,
    said: Said,
    /// What comes next, the last first.
    ready: Vec<Event>,
}

impl Sending {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop() {
                return Some(event);
            }
            if self.said == Said::All {
                return None;
            }
            if self.sent >= RESPONSE_OUTPUT_MAX {
                self.said = Said::All;
                let at = json!({"stdout_offset": self.at.stdout, "stderr_offset": self.at.stderr});
                return Some(event("ack_required", &at));
            }
            let next = tokio::select! {
                next = self.output.next() => next,
                halt = self.stopping.wait() => {
                    self.said = Said::All;
                    return Some(event("error", &told(halt)));
                }
            };
            match next {
                Some(OutputEvent::Started { pid }) => return Some(self.started(pid)),
                Some(OutputEvent::Bytes { stream, offset, bytes }) => {
                    let name = name(stream);
                    *self.reached(stream) = offset + bytes.len() as u64;
                    self.sent += bytes.len() as u64;
                    return Some(event(
                        name,
                        &json!({"offset": offset, "data": BASE64_STANDARD.encode(&bytes)}),
                    ));
                }
                Some(OutputEvent::Lost { stream, to, .. }) => *self.reached(stream) = to,
                Some(OutputEvent::StdinAck { .. }) => {}
                Some(OutputEvent::Ended(command)) => self.end(&command),
                // Cut: the client asks again with the offsets that it has.
                Some(OutputEvent::Stalled) | None => return None,
            }
        }
    }

    fn started(&mut self, pid: u32) -> Event {
        self.said = Said::Started;
        let id = self.command.now().id;
        event("started", &json!({"command_id": id.as_str(), "pid": pid}))
    }

    fn end(&mut self, command: &Command) {
        let last = match Verdict::of(command) {
            Verdict::Exit(code) => event("exit", &json!({"exit_code": code})),
            Verdict::Error(kind, error) => event("error", &json!({"error_type": kind, "error": error})),
        };
        self.ready.push(last);
        for (stream, end) in [("stderr", command.stderr.end), ("stdout", command.stdout.end)] {
            self.ready.push(event("stream_end", &json!({"stream": stream, "offset": end})));
        }
        if self.said == Said::Nothing {
            let started = self.started(0);
            self.ready.push(started);
        }
        self.said = Said::All;
    }

    fn reached(&mut self, stream: Stream) -> &mut u64 {
        match stream {
            Stream::Stderr => &mut self.at.stderr,
            // Nothing comes out of stdin; the engine never sends it.
            Stream::Stdout | Stream::Stdin => &mut self.at.stdout,
        }
    }
}

fn name(stream: Stream) -> &'static str {
    match stream {
        Stream::Stderr => "stderr",
        Stream::Stdout | Stream::Stdin => "stdout",
    }
}

/// Why a response ends before its command: a client comes again after the one, and need not after the other.
fn told(halt: Halt) -> Value {
    match halt {
        Halt::Daemon => json!({"error_type": "ServerShuttingDown", "error": "the daemon is stopping"}),
        Halt::Key => json!({"error_type": "Unauthorized", "error": "the api key was deleted"}),
    }
}

fn event(name: &str, data: &Value) -> Event {
    Event::default().event(name).data(ascii(&data.to_string()))
}
