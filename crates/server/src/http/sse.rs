//! Server-sent events, for all streams that use them.

use std::time::Duration;

use axum::response::sse::Event;
use serde::Serialize;

/// A comment is sent after this long without an event, so that proxies do not consider the stream dead.
pub const HEARTBEAT: Duration = Duration::from_secs(15);
/// The time between two progress events.
pub const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// A named event with JSON data.
pub fn event(name: &str, event: &impl Serialize) -> Event {
    // JSON has no line breaks outside of strings and escapes them inside, so one event is one line.
    let data = serde_json::to_string(event).expect("events are made of types that JSON can write");
    Event::default().event(name).data(data)
}
