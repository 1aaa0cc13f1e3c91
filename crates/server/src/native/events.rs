//! Live events of sandboxes, their commands, snapshots, templates, volumes and pools.

use std::convert::Infallible;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Sse;
use axum::response::sse::{Event, KeepAlive};
use engine::snapshot::SnapshotState;
use engine::{About, Event as SandboxEvent, Happened, PoolHappened, SnapshotHappened, VolumeHappened};
use engine::{EventId, Told, Watcher};
use futures_util::stream::{self, Stream};
use serde::Deserialize;
use utoipa::IntoParams;
use wire::api;

use super::commands::result;
use super::sandboxes::sandbox_state;
use super::snapshots::snapshot_state;
use super::templates::template_event;
use crate::http::app::{App, Caller, Stopping};
use crate::http::body::Query;
use crate::http::clock::rfc3339;
use crate::http::error::ApiError;
use crate::http::sse::{self, HEARTBEAT};

/// What to watch.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct WatchParams {
    /// The id of the sandbox to watch. Default: all sandboxes of the owner.
    sandbox: Option<String>,
    /// As the header `Last-Event-ID`, for clients that cannot set it.
    last_event_id: Option<String>,
}

/// What happens to the owner's sandboxes, their commands, snapshots, templates, volumes and pools, as server-sent events,
/// until the caller leaves.
///
/// Each event is a `SandboxEvent` in JSON under the name of its `type`, with an id. A stream that was cut goes on after the
/// event that `Last-Event-ID` names, also after a restart of the daemon, as long as the daemon still keeps what followed it;
/// else `missed` comes first, and the caller should look at the sandboxes themselves. The newest 8,192 events are kept.
#[utoipa::path(get, path = "/v1/events", tag = "sandboxes", params(
    WatchParams,
    ("Last-Event-ID" = Option<String>, Header, description = "The id of the last event that was seen."),
), responses(
    (status = 200, body = api::SandboxEvent, content_type = "text/event-stream"),
    (status = 400, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
))]
pub async fn watch(
    State(app): State<App>,
    Caller(key): Caller,
    Query(params): Query<WatchParams>,
    headers: HeaderMap,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>> + use<>>, ApiError> {
    let only = match &params.sandbox {
        Some(text) => Some(text.parse().map_err(|_| ApiError::must("sandbox", "be the id of a sandbox"))?),
        None => None,
    };
    let header = headers.get("last-event-id").map(|value| value.to_str().unwrap_or_default());
    let after = match header.or(params.last_event_id.as_deref()) {
        // Browsers send an empty id if they have seen none.
        None | Some("") => None,
        Some(text) => {
            Some(text.parse::<EventId>().map_err(|error| ApiError::invalid("Last-Event-ID", error))?)
        }
    };
    let watcher = app.engine.watch(&key.owner, only, after)?;
    let session = Session { watcher, stopping: app.stopping(&key), greeted: false };
    let events = stream::unfold(session, async |mut session| {
        let event = session.next().await?;
        Some((Ok(event), session))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(HEARTBEAT)))
}

struct Session {
    watcher: Watcher,
    stopping: Stopping,
    greeted: bool,
}

impl Session {
    async fn next(&mut self) -> Option<Event> {
        if !std::mem::replace(&mut self.greeted, true) {
            // With an id, so that a client can also resume a stream without events so far.
            return Some(to_event(self.watcher.place(), &api::SandboxEvent::Ready));
        }
        let told = tokio::select! {
            told = self.watcher.next() => told,
            _ = self.stopping.wait() => return None,
        };
        Some(match told {
            Told::Event(event) => to_event(event.id, &to_api(&event)),
            Told::Missed(id) => to_event(id, &api::SandboxEvent::Missed),
        })
    }
}

fn to_event(id: EventId, event: &api::SandboxEvent) -> Event {
    sse::event(kind(event), event).id(id.to_string())
}

/// The types of events that happen, for those who choose among them.
pub const KINDS: [&str; 14] = [
    "sandbox",
    "deleted",
    "command_started",
    "command_ended",
    "hook_failed",
    "snapshot",
    "snapshot_deleted",
    "template",
    "template_deleted",
    "volume",
    "volume_deleted",
    "pool",
    "pool_deleted",
    "missed",
];

/// The type of an event.
pub fn kind(event: &api::SandboxEvent) -> &'static str {
    match event {
        api::SandboxEvent::Ready => "ready",
        api::SandboxEvent::Missed => "missed",
        api::SandboxEvent::Sandbox { .. } => "sandbox",
        api::SandboxEvent::Deleted { .. } => "deleted",
        api::SandboxEvent::CommandStarted { .. } => "command_started",
        api::SandboxEvent::CommandEnded { .. } => "command_ended",
        api::SandboxEvent::Template { .. } => "template",
        api::SandboxEvent::TemplateDeleted { .. } => "template_deleted",
        api::SandboxEvent::HookFailed { .. } => "hook_failed",
        api::SandboxEvent::Snapshot { .. } => "snapshot",
        api::SandboxEvent::SnapshotDeleted { .. } => "snapshot_deleted",
        api::SandboxEvent::Volume { .. } => "volume",
        api::SandboxEvent::VolumeDeleted { .. } => "volume_deleted",
        api::SandboxEvent::Pool { .. } => "pool",
        api::SandboxEvent::PoolDeleted { .. } => "pool_deleted",
        api::SandboxEvent::Test { .. } => "test",
    }
}

/// Converts an event.
pub fn to_api(event: &SandboxEvent) -> api::SandboxEvent {
    let at = rfc3339(event.at);
    let (sandbox_id, what) = match &event.about {
        About::Sandbox(sandbox, what) => (*sandbox, what),
        About::Template(what) => return template_event(at, what),
        About::Snapshot(SnapshotHappened { id, name, sandbox, state }) => {
            let (snapshot_id, name) = (id.clone(), name.clone());
            let Some(state) = state else {
                return api::SandboxEvent::SnapshotDeleted { at, snapshot_id, name };
            };
            let reason = match state {
                SnapshotState::Failed { reason } => Some(reason.clone()),
                SnapshotState::Building | SnapshotState::Ready | SnapshotState::Deleting => None,
            };
            let (sandbox_id, state) = (*sandbox, snapshot_state(state));
            return api::SandboxEvent::Snapshot { at, snapshot_id, name, sandbox_id, state, reason };
        }
        About::Volume(VolumeHappened { name, size_bytes }) => {
            let name = name.clone();
            return match size_bytes {
                Some(size_bytes) => api::SandboxEvent::Volume { at, name, size_bytes: *size_bytes },
                None => api::SandboxEvent::VolumeDeleted { at, name },
            };
        }
        About::Pool(PoolHappened { name, replicas, trouble }) => {
            let name = name.clone();
            return match replicas {
                Some(replicas) => {
                    api::SandboxEvent::Pool { at, name, replicas: *replicas, reason: trouble.clone() }
                }
                None => api::SandboxEvent::PoolDeleted { at, name },
            };
        }
    };
    match what {
        Happened::Sandbox { name, state, reason } => api::SandboxEvent::Sandbox {
            at,
            sandbox_id,
            name: name.as_str().to_owned(),
            state: sandbox_state(*state),
            reason: reason.clone(),
        },
        Happened::Deleted { name } => {
            api::SandboxEvent::Deleted { at, sandbox_id, name: name.as_str().to_owned() }
        }
        Happened::CommandStarted { command, pid } => {
            api::SandboxEvent::CommandStarted { at, sandbox_id, command_id: command.clone(), pid: *pid }
        }
        Happened::CommandEnded { command, outcome } => api::SandboxEvent::CommandEnded {
            at,
            sandbox_id,
            command_id: command.clone(),
            result: result(outcome),
        },
        Happened::HookFailed { hook, reason } => {
            api::SandboxEvent::HookFailed { at, sandbox_id, hook: hook.word().into(), reason: reason.clone() }
        }
    }
}
