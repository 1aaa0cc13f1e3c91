//! Server-sent events, one JSON document each.

use bytes::BytesMut;
use hyper::body::Incoming;
use serde::de::DeserializeOwned;

use crate::error::ClientError;
use crate::files::next_bytes;

/// An event at most. The longest tells of an image with a hundred layers.
const EVENT_MAX: usize = 8 << 20;

/// Events as they come.
pub(crate) struct EventStream {
    body: Incoming,
    url: String,
    buffer: BytesMut,
}

impl EventStream {
    pub fn new(body: Incoming, url: String) -> Self {
        Self { body, url, buffer: BytesMut::new() }
    }

    /// The next event. `None`: there are no more.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ClientError> {
        let strange = |url: &str, what: String| ClientError::Strange { url: url.to_owned(), what };
        loop {
            if let Some(end) = self.buffer.windows(2).position(|two| two == b"\n\n") {
                let event = self.buffer.split_to(end + 2);
                let data =
                    event[..].split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"data:"));
                // Comments have no data: they only show that the stream lives.
                let Some(data) = data else { continue };
                let event = serde_json::from_slice(data.trim_ascii());
                return event.map(Some).map_err(|error| strange(&self.url, error.to_string()));
            }
            if self.buffer.len() > EVENT_MAX {
                return Err(strange(&self.url, "an event without an end".into()));
            }
            match next_bytes(&mut self.body, &self.url).await? {
                Some(bytes) => self.buffer.extend_from_slice(&bytes),
                None => return Ok(None),
            }
        }
    }
}
