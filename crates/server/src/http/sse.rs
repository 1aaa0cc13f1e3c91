//! Server-sent events, as all streams of them are sent.

use std::time::Duration;

use axum::response::sse::Event;
use serde::Serialize;

/// A comment is sent after so long without an event, so that proxies do not take the stream for dead.
pub const HEARTBEAT: Duration = Duration::from_secs(15);
/// Between two events about how far something is.
pub const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// An event in JSON under a name.
pub fn event(name: &str, event: &impl Serialize) -> Event {
    // JSON has no line breaks outside of strings and escapes them inside, so that one event is one line.
    let data = serde_json::to_string(event).expect("events are made of types that JSON can write");
    Event::default().event(name).data(data)
}
