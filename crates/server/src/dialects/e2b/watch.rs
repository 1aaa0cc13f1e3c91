//! Events of directories: as a stream for clients that keep one open, and in the engine's memory for those that ask.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use bytes::Bytes;
use engine::EngineError;
use engine::files::Watching;
use futures_util::stream;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until};
use wire::files::{Change, FileKind, Links, WatchEvent};

use super::connect;
use super::error::Refusal;
use super::filesystem::Place;
use super::read::{Streamed, Target, Unary};
use crate::http::app::{App, Stopping};
use crate::http::error::ApiError;

/// `WatchDir` and `CreateWatcher`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Watch {
    path: String,
    recursive: bool,
}

/// `GetWatcherEvents` and `RemoveWatcher`
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Watcher {
    watcher_id: String,
}

/// The directory to watch, which must be one.
async fn directory(place: &Place, path: &str) -> Result<Vec<u8>, Refusal> {
    let path = place.path(path);
    let stat = place.files.stat(&path, Links::Follow).await.map_err(|error| place.refused(error))?;
    match stat.kind {
        FileKind::Directory => Ok(path),
        _ => {
            let message = format!("path is not a directory: {}", String::from_utf8_lossy(&path));
            Err(Refusal::invalid(message).rpc())
        }
    }
}

/// Begins to watch, for a client that asks for events later.
pub async fn create(
    State(app): State<App>,
    target: Target,
    Unary(wish): Unary<Watch>,
) -> Result<Json<Value>, Refusal> {
    let place = Place::of(&app, &target, None).await.map_err(Refusal::rpc)?;
    let path = directory(&place, &wish.path).await?;
    let id = place.files.keep_watching(&path, wish.recursive).await;
    let id = id.map_err(|error| place.refused(error))?;
    // Events carry names relative to the directory, so the id holds the directory's path.
    let watcher = format!("{id}:{}", String::from_utf8_lossy(&path));
    Ok(Json(json!({"watcherId": watcher})))
}

fn parts(watcher: &str) -> (&str, &str) {
    watcher.split_once(':').unwrap_or((watcher, ""))
}

/// What has happened since the last call.
pub async fn events(
    State(app): State<App>,
    target: Target,
    Unary(wish): Unary<Watcher>,
) -> Result<Json<Value>, Refusal> {
    let files = app.engine.files(&target.key.owner, target.id, None);
    let files = files.map_err(|error| Refusal::agent(target.id, error).rpc())?;
    let (id, path) = parts(&wish.watcher_id);
    let events = files.kept_events(id).map_err(|error| Refusal::agent(target.id, error).rpc())?;
    let events: Vec<Value> = events.iter().filter_map(|event| shown(path.as_bytes(), event)).collect();
    Ok(Json(json!({"events": events})))
}

/// Ends a watch.
pub async fn remove(
    State(app): State<App>,
    target: Target,
    Unary(wish): Unary<Watcher>,
) -> Result<Json<Value>, Refusal> {
    let refused = |error: EngineError| Refusal::agent(target.id, error).rpc();
    let files = app.engine.files(&target.key.owner, target.id, None).map_err(refused)?;
    files.drop_watch(parts(&wish.watcher_id).0).map_err(refused)?;
    Ok(Json(json!({})))
}

/// Streams events as they happen.
pub async fn watch(
    State(app): State<App>,
    target: Target,
    Streamed(wish): Streamed<Watch>,
) -> Result<Response, Refusal> {
    let place = Place::of(&app, &target, None).await.map_err(Refusal::rpc)?;
    let path = directory(&place, &wish.path).await?;
    let watching = place.files.watch(&path, wish.recursive).await.map_err(|error| place.refused(error))?;
    let sending = Sending {
        watching,
        path,
        keepalive: target.keepalive,
        deadline: target.timeout.map(|timeout| Instant::now() + timeout),
        stopping: app.stopping(&target.key),
        place,
        said: Said::Nothing,
    };
    Ok(connect::stream(stream::unfold(sending, async |mut sending| {
        let envelope = sending.next().await?;
        Some((Ok::<_, Infallible>(envelope), sending))
    })))
}

#[derive(PartialEq)]
enum Said {
    Nothing,
    Started,
    All,
}

struct Sending {
    watching: Watching,
    path: Vec<u8>,
    keepalive: Duration,
    deadline: Option<Instant>,
    stopping: Stopping,
    place: Place,
    said: Said,
}

impl Sending {
    async fn next(&mut self) -> Option<Bytes> {
        match self.said {
            Said::All => return None,
            Said::Nothing => {
                self.said = Said::Started;
                return Some(connect::message(&json!({"start": {}})));
            }
            Said::Started => {}
        }
        loop {
            let deadline = async {
                match self.deadline {
                    Some(deadline) => sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            let event = tokio::select! {
                biased;
                halt = self.stopping.wait() => Err(Refusal::from(ApiError::from(halt))),
                event = self.watching.next() => event.map_err(|error| self.place.refused(error)),
                () = deadline => Err(Refusal::new(StatusCode::GATEWAY_TIMEOUT, "the stream's time is over")),
                () = sleep_until(Instant::now() + self.keepalive) => {
                    return Some(connect::message(&json!({"keepalive": {}})));
                }
            };
            match event {
                Ok(Some(event)) => {
                    if let Some(shown) = shown(&self.path, &event) {
                        return Some(connect::message(&json!({"filesystem": shown})));
                    }
                }
                Ok(None) => {
                    self.said = Said::All;
                    return Some(connect::end());
                }
                Err(refusal) => {
                    self.said = Said::All;
                    return Some(connect::failed(&refusal));
                }
            }
        }
    }
}

/// An event as clients read it. They have no word for events that were lost.
fn shown(directory: &[u8], event: &WatchEvent) -> Option<Value> {
    let WatchEvent::Changed { change, path, .. } = event else { return None };
    let kind = match change {
        Change::Created | Change::MovedTo => "EVENT_TYPE_CREATE",
        Change::Modified => "EVENT_TYPE_WRITE",
        Change::Attributes => "EVENT_TYPE_CHMOD",
        Change::Removed => "EVENT_TYPE_REMOVE",
        Change::MovedFrom => "EVENT_TYPE_RENAME",
        // It follows the events of what was written.
        Change::Written => return None,
    };
    let name = path.strip_prefix(directory).unwrap_or(path);
    let name = name.strip_prefix(b"/").unwrap_or(name);
    Some(json!({"name": String::from_utf8_lossy(name), "type": kind}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_told_by_names_below_the_directory() {
        let event = |change| WatchEvent::Changed { change, path: b"/a/b/c".to_vec(), directory: false };
        let told = shown(b"/a", &event(Change::Created)).expect("it is an event");
        assert_eq!(told, json!({"name": "b/c", "type": "EVENT_TYPE_CREATE"}));
        assert_eq!(shown(b"/a", &event(Change::Written)), None);
        assert_eq!(shown(b"/a", &WatchEvent::Overflow), None);
    }
}
