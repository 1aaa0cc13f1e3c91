//! Changes of files over a WebSocket: any number of watches on one connection.
//!
//! ```text
//! client                                                  server
//! {"action":"subscribe","path":...,"recursive":...}       {"type":"subscribed","watch_id":...,"path":...}
//! {"action":"unsubscribe","watch_id":...}                 {"type":"unsubscribed","watch_id":...}
//!                                                         {"type":"event","watch_id":...,"event":...,"path":...}
//!                                                         {"type":"error","error":...}
//! ```

use std::collections::BTreeMap;

use axum::Extension;
use axum::extract::State;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::response::{IntoResponse, Response};
use engine::Files;
use futures_util::StreamExt;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::Instrument;
use wire::files::{Change, WatchEvent};

use super::error::Refusal;
use super::files::absolute;
use super::read::Awake;
use crate::http::app::{App, Arrival, Stopping};
use crate::http::body::{BODY_MAX, parse_json};
use crate::http::websocket::{Close, Line, Lost, bounded, converse, needs_upgrade};

/// Watches on one connection.
const WATCHES_MAX: usize = 64;
/// Messages that wait for a client that reads slowly; then its watches wait.
const QUEUE_MAX: usize = 256;

/// What a client says.
#[derive(Debug, Deserialize)]
#[serde(tag = "action", rename_all = "snake_case")]
enum Wish {
    Subscribe {
        path: String,
        #[serde(default)]
        recursive: bool,
    },
    Unsubscribe {
        watch_id: String,
    },
}

/// `GET .../files/watch`
pub async fn socket(
    State(app): State<App>,
    awake: Awake,
    arrival: Option<Extension<Arrival>>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Refusal> {
    let upgrade = upgrade.map_err(needs_upgrade)?;
    let files = app.engine.files(&awake.key.owner, awake.sandbox.id, None)?;
    let span = tracing::Span::current();
    let session = move |socket: WebSocket| async move {
        let _place = arrival;
        serve(socket, files, app.stopping(&awake.key)).await;
    };
    Ok(bounded(upgrade, BODY_MAX).on_upgrade(move |socket| session(socket).instrument(span)).into_response())
}

async fn serve(socket: WebSocket, files: Files, stopping: Stopping) {
    let (mut sink, mut stream) = socket.split();
    let (line, hearing) = Line::new(&mut sink);
    let (say, said) = mpsc::channel(QUEUE_MAX);
    let key = stopping.key();
    let read = async {
        let mut watches = Watches { files, say, running: BTreeMap::new(), begun: 0 };
        while let Some(Ok(message)) = stream.next().await {
            hearing.send_replace(Instant::now());
            match message {
                Message::Text(text) => watches.hear(text.as_bytes()).await,
                Message::Binary(bytes) => watches.hear(&bytes).await,
                Message::Ping(_) | Message::Pong(_) => {}
                Message::Close(_) => return,
            }
        }
    };
    let close = converse(key, write(line, said, stopping), read, std::future::ready(())).await;
    if let Some(close) = close
        && let Ok(socket) = sink.reunite(stream)
    {
        close.say(socket).await;
    }
}

async fn write(
    mut line: Line<'_>,
    mut said: mpsc::Receiver<Value>,
    mut stopping: Stopping,
) -> Result<Close, Lost> {
    loop {
        tokio::select! {
            biased;
            halt = stopping.wait() => return Ok(halt.into()),
            () = line.ping_due() => line.ping().await?,
            message = said.recv() => match message {
                Some(message) => line.send(Message::Text(message.to_string().into())).await?,
                None => return Ok(Close::Ended),
            },
        }
    }
}

struct Watches {
    files: Files,
    say: mpsc::Sender<Value>,
    running: BTreeMap<String, JoinHandle<()>>,
    begun: u64,
}

impl Drop for Watches {
    fn drop(&mut self) {
        for watch in self.running.values() {
            watch.abort();
        }
    }
}

impl Watches {
    async fn hear(&mut self, message: &[u8]) {
        let wrong = match parse_json(message) {
            Err(error) => Err(error.into_body().message),
            Ok(Wish::Subscribe { path, recursive }) => self.begin(&path, recursive).await,
            Ok(Wish::Unsubscribe { watch_id }) => match self.running.remove(&watch_id) {
                Some(watch) => {
                    watch.abort();
                    self.answer(json!({"type": "unsubscribed", "watch_id": watch_id})).await;
                    Ok(())
                }
                None => Err(format!("watch `{}` does not exist", engine::shown(&watch_id))),
            },
        };
        if let Err(why) = wrong {
            self.answer(json!({"type": "error", "error": why})).await;
        }
    }

    async fn answer(&self, message: Value) {
        // Who is gone needs no answer.
        let _ = self.say.send(message).await;
    }

    async fn begin(&mut self, path: &str, recursive: bool) -> Result<(), String> {
        self.running.retain(|_, watch| !watch.is_finished());
        if self.running.len() >= WATCHES_MAX {
            return Err(format!("a connection has at most {WATCHES_MAX} watches"));
        }
        let bytes = absolute(path.as_bytes()).map_err(|refusal| refusal.message().to_owned())?;
        let mut watching = self.files.watch(&bytes, recursive).await.map_err(|error| error.to_string())?;
        self.begun += 1;
        let (id, say) = (format!("watch-{}", self.begun), self.say.clone());
        let answer = json!({"type": "subscribed", "watch_id": id, "path": String::from_utf8_lossy(&bytes)});
        // Before the first event, which the task sends.
        self.answer(answer).await;
        let name = id.clone();
        let watch = tokio::spawn(
            async move {
                loop {
                    let message = match watching.next().await {
                        Ok(Some(event)) => shown(&id, &event),
                        Ok(None) => return,
                        Err(error) => {
                            let _ = say
                                .send(json!({"type": "error", "watch_id": id, "error": error.to_string()}))
                                .await;
                            return;
                        }
                    };
                    if let Some(message) = message
                        && say.send(message).await.is_err()
                    {
                        return;
                    }
                }
            }
            .in_current_span(),
        );
        self.running.insert(name, watch);
        Ok(())
    }
}

/// An event as clients read it.
fn shown(id: &str, event: &WatchEvent) -> Option<Value> {
    let (word, path) = match event {
        WatchEvent::Changed { change, path, .. } => {
            let word = match change {
                Change::Created | Change::MovedTo => "create",
                Change::Modified => "write",
                Change::Removed => "remove",
                Change::MovedFrom => "rename",
                Change::Attributes => "chmod",
                // It follows the events of what was written.
                Change::Written => return None,
            };
            (word, path)
        }
        WatchEvent::NotWatched { path } => {
            let why = format!("`{}` is not watched: there are too many", String::from_utf8_lossy(path));
            return Some(json!({"type": "error", "watch_id": id, "error": why}));
        }
        WatchEvent::Overflow => {
            return Some(json!({"type": "error", "watch_id": id, "error": "some events were lost"}));
        }
        WatchEvent::Ready | WatchEvent::Gone => return None,
    };
    Some(json!({"type": "event", "watch_id": id, "event": word, "path": String::from_utf8_lossy(path)}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_have_whole_paths_and_the_vendors_words() {
        let event = |change| WatchEvent::Changed { change, path: b"/a/b".to_vec(), directory: false };
        let told = shown("w", &event(Change::Created)).expect("it is an event");
        assert_eq!(told, json!({"type": "event", "watch_id": "w", "event": "create", "path": "/a/b"}));
        assert_eq!(shown("w", &event(Change::Written)), None);
        assert_eq!(shown("w", &WatchEvent::Overflow).expect("an event")["type"], "error");
    }
}
