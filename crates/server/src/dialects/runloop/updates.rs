//! Output as it comes, as server-sent events: a stream each, from an offset on, until the command is over.
//!
//! The offset in an event is that of the byte behind it, in the text as it was sent, so that a client which comes back with the last
//! one that it got misses nothing and gets nothing twice. Events have no ids: the client would take a heartbeat after one for an event.

use std::convert::Infallible;

use axum::extract::State;
use axum::response::sse::{Event, KeepAlive};
use axum::response::{IntoResponse, Response, Sse};
use engine::{Offsets, TextEvent, TextOutput};
use futures_util::stream;
use serde_json::json;
use wire::guest::Stream;

use super::error::Refusal;
use super::read::Execution;
use crate::dialects::common::ascii::ascii;
use crate::http::app::{App, Stopping};
use crate::http::params::Params;
use crate::http::sse::HEARTBEAT;

/// The longest text in one event.
const TEXT_MAX: usize = 64 << 10;

/// `GET .../executions/{execution}/stream_stdout_updates`
pub async fn stdout(
    State(app): State<App>,
    execution: Execution,
    params: Params,
) -> Result<Response, Refusal> {
    respond(&app, execution, params, Stream::Stdout)
}

/// `GET .../executions/{execution}/stream_stderr_updates`
pub async fn stderr(
    State(app): State<App>,
    execution: Execution,
    params: Params,
) -> Result<Response, Refusal> {
    respond(&app, execution, params, Stream::Stderr)
}

fn respond(app: &App, execution: Execution, mut params: Params, stream: Stream) -> Result<Response, Refusal> {
    let from = params.number("offset", 0..=u64::MAX)?.unwrap_or(0);
    let at = match stream {
        Stream::Stderr => Offsets { stdout: u64::MAX, stderr: from },
        Stream::Stdout | Stream::Stdin => Offsets { stdout: from, stderr: u64::MAX },
    };
    let sending = Sending {
        output: execution.command.attach_text(at),
        stopping: app.stopping(&execution.target.key),
        stream,
        at: from,
        rest: String::new(),
    };
    let events = stream::unfold(Some(sending), async |sending| {
        let mut sending = sending?;
        let next = sending.next().await?;
        Some(match next {
            Some(event) => (Ok::<_, Infallible>(event), Some(sending)),
            // The client comes back with the offset that it has.
            None => (Ok(broken()), None),
        })
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(HEARTBEAT).text("ping")).into_response())
}

fn broken() -> Event {
    let data = json!({"code": 408, "message": "the stream was interrupted; go on at the last offset"});
    Event::default().event("error").data(data.to_string())
}

struct Sending {
    output: TextOutput,
    stopping: Stopping,
    stream: Stream,
    at: u64,
    /// What did not fit into the last event.
    rest: String,
}

impl Sending {
    /// The next event; `Some(None)` if the stream is cut, `None` at its end.
    async fn next(&mut self) -> Option<Option<Event>> {
        while self.rest.is_empty() {
            let next = tokio::select! {
                next = self.output.next() => next,
                _ = self.stopping.wait() => return Some(None),
            };
            match next {
                Some(TextEvent::Text { stream, offset, text }) if stream == self.stream => {
                    (self.at, self.rest) = (offset, text);
                }
                Some(TextEvent::Text { .. } | TextEvent::Started { .. }) => {}
                Some(TextEvent::Ended(_)) => return None,
                Some(TextEvent::Stalled) | None => return Some(None),
            }
        }
        let mut end = self.rest.len().min(TEXT_MAX);
        while !self.rest.is_char_boundary(end) {
            end -= 1;
        }
        let behind = self.rest.split_off(end);
        let text = std::mem::replace(&mut self.rest, behind);
        self.at += text.len() as u64;
        let data = json!({"output": text, "offset": self.at});
        Some(Some(Event::default().data(ascii(&data.to_string()))))
    }
}
