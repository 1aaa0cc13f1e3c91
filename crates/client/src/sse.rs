//! Server-sent events of one connection.

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Incoming;

use crate::error::ClientError;

/// The longest event. Among the longest are those that describe all images of an archive.
const EVENT_MAX: usize = 8 << 20;

/// One event.
pub(crate) struct Sse {
    /// The position from which a later connection continues.
    pub id: Option<String>,
    /// The event's data.
    pub data: Bytes,
}

/// Reads events.
pub(crate) struct SseReader {
    body: Incoming,
    url: String,
    buffer: BytesMut,
}

impl SseReader {
    pub fn new(body: Incoming, url: String) -> Self {
        Self { body, url, buffer: BytesMut::new() }
    }

    /// The source of the bytes.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the next event, `Some(None)` for a comment, which only shows that the stream is alive, or `None` at the
    /// end of the stream. Cancel-safe.
    pub async fn next(&mut self) -> Result<Option<Option<Sse>>, ClientError> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|two| two == b"\n\n") {
                let event = self.buffer.split_to(end + 2).freeze();
                return Ok(Some(parse(&event)));
            }
            if self.buffer.len() > EVENT_MAX {
                let what = "an event without an end".into();
                return Err(ClientError::Strange { url: self.url.clone(), what });
            }
            match next_bytes(&mut self.body, &self.url).await? {
                Some(bytes) => self.buffer.extend_from_slice(&bytes),
                None => return Ok(None),
            }
        }
    }
}

fn parse(event: &Bytes) -> Option<Sse> {
    let field = |name: &[u8]| {
        event.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(name)).map(<[u8]>::trim_ascii)
    };
    let data = event.slice_ref(field(b"data:")?);
    Some(Sse { id: field(b"id:").map(|id| String::from_utf8_lossy(id).into_owned()), data })
}

pub(crate) async fn next_bytes(body: &mut Incoming, url: &str) -> Result<Option<Bytes>, ClientError> {
    while let Some(frame) = body.frame().await {
        let frame =
            frame.map_err(|source| ClientError::Broken { url: url.to_owned(), source: source.into() })?;
        if let Ok(bytes) = frame.into_data() {
            return Ok(Some(bytes));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_its_data_and_its_id() {
        let event =
            parse(&Bytes::from_static(b"id: a-1\nevent: x\ndata: {\"a\": 1}\n\n")).expect("it has data");
        assert_eq!((event.id.as_deref(), &event.data[..]), (Some("a-1"), &b"{\"a\": 1}"[..]));
        assert!(parse(&Bytes::from_static(b":\n\n")).is_none());
        assert!(parse(&Bytes::from_static(b"data:x\n\n")).is_some_and(|event| event.id.is_none()));
    }
}
