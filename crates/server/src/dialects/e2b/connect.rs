//! The Connect protocol with its JSON codec: one message after a prefix of five bytes.
//!
//! ```text
//! byte 0      flags: 1 compressed, 2 the end of the stream
//! bytes 1-4   the length of the message, big endian
//! ```

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::Stream;
use serde_json::{Value, json};

use super::error::Refusal;

/// How long a stream says nothing if the client does not say. As the vendor has it.
pub const KEEPALIVE_SECONDS_DEFAULT: u64 = 90;
/// Clients compare it letter by letter.
const STREAM: HeaderValue = HeaderValue::from_static("application/connect+json");
const PREFIX_BYTES: usize = 5;
const COMPRESSED: u8 = 1;
const END: u8 = 2;

/// One message in its envelope.
pub fn message(value: &Value) -> Bytes {
    envelope(0, value)
}

/// The end of a stream that went well.
pub fn end() -> Bytes {
    envelope(END, &json!({}))
}

/// The end of a stream that did not.
pub fn failed(refusal: &Refusal) -> Bytes {
    envelope(END, &json!({"error": refusal.in_stream()}))
}

fn envelope(flags: u8, value: &Value) -> Bytes {
    let text = value.to_string();
    // What is sent is at most one piece of output in base64, which is far from 4 GiB.
    let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
    let mut bytes = Vec::with_capacity(PREFIX_BYTES + text.len());
    bytes.push(flags);
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(text.as_bytes());
    bytes.into()
}

/// The message of a request that has exactly one.
pub fn one_message(body: &[u8]) -> Result<&[u8], Refusal> {
    let wrong = |why: &str| Refusal::invalid(format!("the request must be one enveloped message: {why}"));
    let (prefix, message) = body.split_at_checked(PREFIX_BYTES).ok_or_else(|| wrong("it is too short"))?;
    if prefix[0] & COMPRESSED != 0 {
        return Err(wrong("it is compressed"));
    }
    let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
    if message.len() != length {
        return Err(wrong("its length is not the one in its prefix"));
    }
    Ok(message)
}

/// A stream of envelopes.
pub fn stream(
    envelopes: impl Stream<Item = Result<Bytes, std::convert::Infallible>> + Send + 'static,
) -> Response {
    let mut response = Body::from_stream(envelopes).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, STREAM);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_read_as_it_was_written() {
        let sent = message(&json!({"a": 1}));
        assert_eq!(&sent[..], b"\0\0\0\0\x07{\"a\":1}");
        assert_eq!(one_message(&sent).expect("it is whole"), b"{\"a\":1}");
        assert_eq!(&end()[..], b"\x02\0\0\0\x02{}");
        for wrong in [&b""[..], b"\0\0\0\0", b"\0\0\0\0\x09{}", b"\x01\0\0\0\x02{}", b"\0\0\0\0\x01{}"] {
            one_message(wrong).expect_err("it is not one message");
        }
    }
}
