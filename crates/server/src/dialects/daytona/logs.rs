//! The output of a session's command: all of it at once, or as it comes over a WebSocket.
//!
//! On the WebSocket, and for clients before 0.167, both streams are one: `01 01 01` begins a stretch of stdout, `02 02 02` one of
//! stderr.

use axum::Extension;
use axum::Json;
use axum::extract::State;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use engine::{CommandRef, Offsets, OutputEvent};
use futures_util::StreamExt;
use serde_json::{Value, json};
use tokio::time::Instant;
use tracing::Instrument;
use wire::guest::Stream;

use super::error::Refusal;
use super::execute::ANSWER_OUTPUT_MAX;
use super::session::Ran;
use super::shell::QUEUED;
use crate::http::app::{App, Arrival, Stopping};
use crate::http::body::BODY_MAX;
use crate::http::params::Params;
use crate::http::websocket::{Close, Line, Lost, OUTPUT_MESSAGE_MAX, bounded, converse};

const STDOUT: &[u8] = &[1; 3];
const STDERR: &[u8] = &[2; 3];
/// The header with the client's version.
const VERSION: &str = "x-daytona-sdk-version";
/// The first version for which the server separates the streams.
const SEPARATES: (u64, u64) = (0, 167);

/// How a client reads output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// The streams apart.
    Apart,
    /// One text with markers.
    Marked,
}

impl Shape {
    /// By the client's version. A client that does not say is as new as any.
    pub fn of(headers: &HeaderMap) -> Self {
        let version = headers.get(VERSION).and_then(|version| version.to_str().ok()).unwrap_or_default();
        let mut parts = version.split('.').map(str::parse::<u64>);
        match (parts.next(), parts.next()) {
            (Some(Ok(major)), Some(Ok(minor))) if (major, minor) < SEPARATES => Self::Marked,
            _ => Self::Apart,
        }
    }
}

/// All output of a command, as JSON.
pub async fn output(command: &CommandRef, shape: Shape) -> Result<Value, Refusal> {
    let all = command.output(ANSWER_OUTPUT_MAX + QUEUED.len()).await.map_err(Refusal::toolbox)?;
    if all.stdout_cut || all.stderr_cut {
        let message = format!(
            "the command wrote more than {ANSWER_OUTPUT_MAX} bytes; follow its output, or write it to a file"
        );
        return Err(Refusal::daemon(StatusCode::PAYLOAD_TOO_LARGE, "OUTPUT_TOO_LARGE", message));
    }
    let stdout = String::from_utf8_lossy(all.stdout.get(QUEUED.len()..).unwrap_or_default());
    let stderr = String::from_utf8_lossy(&all.stderr);
    let together = match shape {
        Shape::Apart => format!("{stdout}{stderr}"),
        Shape::Marked => {
            let (out, err) = (String::from_utf8_lossy(STDOUT), String::from_utf8_lossy(STDERR));
            format!("{out}{stdout}{err}{stderr}")
        }
    };
    Ok(json!({"output": together, "stdout": stdout, "stderr": stderr}))
}

/// `GET {toolbox}/process/session/{session}/command/{command}/logs`
pub async fn logs(
    State(app): State<App>,
    ran: Ran,
    mut params: Params,
    headers: HeaderMap,
    arrival: Option<Extension<Arrival>>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Refusal> {
    let follow = params.flag("follow", false).map_err(Refusal::toolbox_api)?;
    ran.session.settle(&ran.command).await?;
    let upgrade = match upgrade {
        Ok(upgrade) if follow => upgrade,
        _ => {
            let shape = Shape::of(&headers);
            let answer = output(&ran.command, shape).await?;
            return Ok(match shape {
                Shape::Apart => Json(answer).into_response(),
                Shape::Marked => answer["output"].as_str().unwrap_or_default().to_owned().into_response(),
            });
        }
    };
    let stopping = app.stopping(ran.session.key());
    let span = tracing::Span::current();
    let command = ran.command;
    let session = move |socket: WebSocket| async move {
        let _place = arrival;
        serve(socket, command, stopping).await;
    };
    let upgrade = bounded(upgrade, BODY_MAX);
    Ok(upgrade.on_upgrade(move |socket| session(socket).instrument(span)).into_response())
}

async fn serve(socket: WebSocket, command: CommandRef, stopping: Stopping) {
    let (mut sink, mut stream) = socket.split();
    let (line, hearing) = Line::new(&mut sink);
    let key = stopping.key();
    let read = async {
        while let Some(Ok(message)) = stream.next().await {
            hearing.send_replace(Instant::now());
            if matches!(message, Message::Close(_)) {
                return;
            }
        }
    };
    let close = converse(key, write(line, &command, stopping), read, std::future::ready(())).await;
    if let Some(close) = close
        && let Ok(socket) = sink.reunite(stream)
    {
        close.say(socket).await;
    }
}

/// Output and pings, to the client.
async fn write(mut line: Line<'_>, command: &CommandRef, mut stopping: Stopping) -> Result<Close, Lost> {
    let mut output = command.attach(Offsets { stdout: QUEUED.len() as u64, stderr: 0 });
    let mut current = None;
    loop {
        let event = tokio::select! {
            biased;
            halt = stopping.wait() => return Ok(halt.into()),
            () = line.ping_due() => {
                line.ping().await?;
                continue;
            }
            event = output.next() => event,
        };
        match event {
            Some(OutputEvent::Bytes { stream, bytes, .. }) => {
                send(&mut line, &mut current, stream, bytes).await?;
            }
            Some(OutputEvent::Ended(_)) => return Ok(Close::Ended),
            Some(OutputEvent::Started { .. } | OutputEvent::Lost { .. } | OutputEvent::StdinAck { .. }) => {}
            // The engine has let this reader go, or is itself on its way out.
            Some(OutputEvent::Stalled) | None => return Ok(Close::Restart),
        }
    }
}

/// Sends bytes of a stream, behind its marker if the other stream's came before.
async fn send(
    line: &mut Line<'_>,
    current: &mut Option<Stream>,
    stream: Stream,
    mut bytes: Bytes,
) -> Result<(), Lost> {
    if current.replace(stream) != Some(stream) {
        let marker = if stream == Stream::Stderr { STDERR } else { STDOUT };
        // In one message with what follows: clients up to 0.197 overlook a marker that comes alone.
        let piece = bytes.split_to(bytes.len().min(OUTPUT_MESSAGE_MAX - marker.len()));
        line.send(Message::Binary([marker, &piece[..]].concat().into())).await?;
    }
    while !bytes.is_empty() {
        let piece = bytes.split_to(bytes.len().min(OUTPUT_MESSAGE_MAX));
        line.send(Message::Binary(piece)).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn older_clients_separate_the_streams_themselves() {
        for (version, shape) in [
            (Some("0.150.0"), Shape::Marked),
            (Some("0.166.0"), Shape::Marked),
            (Some("0.167.0"), Shape::Apart),
            (Some("1.0.0"), Shape::Apart),
            (Some("odd"), Shape::Apart),
            (None, Shape::Apart),
        ] {
            let mut headers = HeaderMap::new();
            if let Some(version) = version {
                headers.insert(VERSION, HeaderValue::from_static(version));
            }
            assert_eq!(Shape::of(&headers), shape, "{version:?}");
        }
    }
}
