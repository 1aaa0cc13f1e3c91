//! A command's output as server-sent events, for clients that cannot open a WebSocket.

use std::convert::Infallible;

use axum::extract::State;
use axum::response::Sse;
use axum::response::sse::{Event, KeepAlive};
use engine::{CommandRef, Offsets, Output, OutputEvent};
use futures_util::stream::{self, Stream};
use serde::Deserialize;
use utoipa::IntoParams;
use wire::api;

use super::{add_attempts, output_event, output_stream, to_api};
use crate::http::app::{App, Caller, Stopping};
use crate::http::body::{CommandPath, Query};
use crate::http::error::ApiError;
use crate::http::sse::{self, HEARTBEAT};

/// Where to begin.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct EventParams {
    /// How much of stdout the client has already.
    stdout_offset: u64,
    /// How much of stderr the client has already.
    stderr_offset: u64,
}

/// A command's output as server-sent events, from the given offsets on, until its end.
///
/// Each event is a `CommandEvent` in JSON under the name of its `type`. A stream that ends without `ended` was cut
/// (the daemon stops, the client was too slow, or its key was deleted): ask again with the offsets reached.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/commands/{command}/events", tag = "commands", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("command" = String, Path, description = "The command's id."), EventParams), responses(
    (status = 200, body = api::CommandEvent, content_type = "text/event-stream"),
    (status = 404, body = api::ErrorBody),
))]
pub async fn events(
    State(app): State<App>,
    Caller(key): Caller,
    CommandPath(sandbox, command): CommandPath,
    Query(params): Query<EventParams>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>> + use<>>, ApiError> {
    let command = app.engine.command(&key.owner, sandbox, &command).await?;
    let from = Offsets { stdout: params.stdout_offset, stderr: params.stderr_offset };
    let output = command.attach(from);
    let watcher = Watcher { command, output, stopping: app.stopping(&key), greeted: None };
    let events = stream::unfold(watcher, async |mut watcher| {
        let event = watcher.next().await?;
        Some((Ok(to_event(&event)), watcher))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(HEARTBEAT)))
}

struct Watcher {
    command: CommandRef,
    output: Output,
    stopping: Stopping,
    /// What the first event said. The output reports the start even if that was long ago.
    greeted: Option<api::CommandState>,
}

impl Watcher {
    async fn next(&mut self) -> Option<api::CommandEvent> {
        if self.greeted.is_none() {
            let command = to_api(self.command.now());
            self.greeted = Some(command.state);
            return Some(api::CommandEvent::Command(Box::new(command)));
        }
        loop {
            let event = tokio::select! {
                event = self.output.next() => event?,
                _ = self.stopping.wait() => return None,
            };
            return Some(match event {
                OutputEvent::Started { .. } if self.greeted != Some(api::CommandState::Starting) => continue,
                OutputEvent::Started { .. } => {
                    api::CommandEvent::Command(Box::new(to_api(self.command.now())))
                }
                OutputEvent::Bytes { stream, offset, bytes } => output_event(stream, offset, bytes.into()),
                OutputEvent::Lost { stream, from, to } => {
                    api::CommandEvent::Lost { stream: output_stream(stream), from, to }
                }
                OutputEvent::StdinAck { .. } => continue,
                OutputEvent::Stalled => return None,
                OutputEvent::Ended(command) => {
                    let mut ended = to_api(*command);
                    add_attempts(&mut ended, &self.command).await;
                    api::CommandEvent::Ended(Box::new(ended))
                }
            });
        }
    }
}

fn to_event(event: &api::CommandEvent) -> Event {
    let name = match event {
        api::CommandEvent::Command(_) => "command",
        api::CommandEvent::Output { .. } => "output",
        api::CommandEvent::Lost { .. } => "lost",
        api::CommandEvent::StdinAck { .. } => "stdin_ack",
        api::CommandEvent::Ended(_) => "ended",
        api::CommandEvent::Refused(_) => "refused",
    };
    sse::event(name, event)
}
