//! gRPC over the daemon's own HTTP/2 listener: a message after a prefix of five bytes, a status in the trailers.
//!
//! ```text
//! byte 0      1 if the message is compressed, which no client here does
//! bytes 1-4   the length of the message, big endian
//! ```

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use engine::{EngineError, ErrorClass};
use futures_util::{Stream, StreamExt, stream};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use prost::Message;

use crate::dialects::common::error::Trail;
use crate::http::app::App;
use crate::http::body::read_bytes;
use crate::http::error::ApiError;

/// The longest message: 16 MiB of a file or of input, and what is around it.
const MESSAGE_MAX: usize = 24 << 20;
/// How long the sender of a stream may say nothing. Longer than a program takes that reads its input slowly.
const SILENCE_MAX: Duration = Duration::from_secs(600);
const PREFIX_BYTES: usize = 5;
const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const CONTENT_TYPE: HeaderValue = HeaderValue::from_static("application/grpc");

/// What a call ended with, as far as it is used here. The numbers are gRPC's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    InvalidArgument = 3,
    NotFound = 5,
    AlreadyExists = 6,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
    DataLoss = 15,
    Unauthenticated = 16,
}

/// Why a call failed. Clients show the message as it is.
#[derive(Debug)]
pub struct Status {
    code: Code,
    message: String,
    trail: Trail,
}

impl Status {
    /// A failure without causes.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), trail: Trail::new(format!("{code:?}")) }
    }

    /// A part of a request that cannot be taken as it is.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    /// What a request names does not exist.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(Code::NotFound, message)
    }

    /// What this server cannot do.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(Code::Unimplemented, message)
    }

    /// Something here panicked.
    pub fn bug() -> Self {
        Self::new(Code::Internal, "the daemon has a bug here")
    }

    /// What kind of failure it is.
    pub fn code(&self) -> Code {
        self.code
    }

    /// The sentence.
    pub fn message(&self) -> &str {
        &self.message
    }

    fn headers(&self) -> HeaderMap {
        let message = HeaderValue::from_str(&escaped(&self.message));
        let mut headers = status(self.code as u8);
        headers.insert(MESSAGE, message.unwrap_or_else(|_| HeaderValue::from_static("failed")));
        headers
    }
}

/// The class decides.
impl From<EngineError> for Status {
    fn from(error: EngineError) -> Self {
        let code = match error.class() {
            ErrorClass::NotFound => Code::NotFound,
            ErrorClass::Exists => Code::AlreadyExists,
            ErrorClass::Invalid => Code::InvalidArgument,
            ErrorClass::InUse | ErrorClass::WrongState | ErrorClass::Incompatible => Code::FailedPrecondition,
            ErrorClass::Forbidden => Code::PermissionDenied,
            ErrorClass::Unsupported => Code::Unimplemented,
            ErrorClass::Quota | ErrorClass::Full | ErrorClass::DiskFull => Code::ResourceExhausted,
            ErrorClass::Unavailable => Code::Unavailable,
            ErrorClass::Internal => Code::Internal,
        };
        let mut status = Self::new(code, error.to_string());
        status.trail.caused_by(&error);
        status
    }
}

/// What the layers around all routes refuse, and what is wrong with a request as such.
impl From<ApiError> for Status {
    fn from(error: ApiError) -> Self {
        let (http, body, chain) = error.into_parts();
        let code = match http.as_u16() {
            401 => Code::Unauthenticated,
            403 => Code::PermissionDenied,
            404 | 405 => Code::Unimplemented,
            413 | 429 => Code::ResourceExhausted,
            503 => Code::Unavailable,
            400..=499 => Code::InvalidArgument,
            _ => Code::Internal,
        };
        Self { code, message: body.message, trail: Trail { code: body.code, chain } }
    }
}

impl IntoResponse for Status {
    fn into_response(self) -> Response {
        // Trailers alone: they are the headers of an answer without a body.
        let mut response = Body::empty().into_response();
        response.headers_mut().extend(self.headers());
        response.headers_mut().insert(header::CONTENT_TYPE, CONTENT_TYPE);
        self.trail.mark(&mut response);
        response
    }
}

/// Trailers take visible ASCII; the rest is percent-encoded.
fn escaped(text: &str) -> String {
    text.bytes().fold(String::with_capacity(text.len()), |mut escaped, byte| {
        match byte {
            b' '..=b'~' if byte != b'%' => escaped.push(char::from(byte)),
            byte => escaped.push_str(&format!("%{byte:02X}")),
        }
        escaped
    })
}

fn status(code: u8) -> HeaderMap {
    HeaderMap::from_iter([(STATUS, HeaderValue::from(u16::from(code)))])
}

/// A message with its prefix.
pub fn framed(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX_BYTES + length);
    bytes.put_u8(0);
    // What is sent is bounded far below 4 GiB: pieces of output, pages of lists.
    bytes.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    // The buffer grows as it must, so encoding cannot fail.
    message.encode_raw(&mut bytes);
    bytes.freeze()
}

/// The answer to a call with one.
pub fn one(message: &impl Message) -> Response {
    many(stream::iter([Ok(framed(message))]))
}

/// The answer to a call with a stream of them: what [`framed`] has made, until the end or a failure.
pub fn many(messages: impl Stream<Item = Result<Bytes, Status>> + Send + 'static) -> Response {
    let frames = messages.map(Some).chain(stream::iter([None])).scan(false, |over, next| {
        let frame = match next {
            _ if *over => None,
            Some(Ok(bytes)) => Some(Frame::data(bytes)),
            Some(Err(why)) => {
                *over = true;
                tracing::info!(code = ?why.code, message = why.message, "a stream failed");
                Some(Frame::trailers(why.headers()))
            }
            None => Some(Frame::trailers(status(0))),
        };
        std::future::ready(frame.map(Ok::<_, Infallible>))
    });
    let mut response = Body::new(StreamBody::new(frames)).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, CONTENT_TYPE);
    response
}

/// The message of a call that has one.
pub async fn read<M: Message + Default>(request: Request, app: &App) -> Result<M, Status> {
    let body = read_bytes(request, MESSAGE_MAX + PREFIX_BYTES, app).await?;
    let mut bytes = body.bytes;
    match split(&mut bytes)? {
        Some(message) if bytes.is_empty() => decode(message),
        // A message without fields may be left out.
        None if bytes.is_empty() => Ok(M::default()),
        Some(_) | None => Err(Status::invalid("the request must be one message")),
    }
}

fn decode<M: Message + Default>(bytes: Bytes) -> Result<M, Status> {
    M::decode(bytes).map_err(|error| Status::invalid(format!("the message cannot be read: {error}")))
}

/// The first message of some bytes, if it is there whole.
fn split(bytes: &mut Bytes) -> Result<Option<Bytes>, Status> {
    let Some(prefix) = bytes.get(..PREFIX_BYTES) else { return Ok(None) };
    if prefix[0] != 0 {
        return Err(Status::unsupported("this server takes no compressed messages"));
    }
    let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
    if length > MESSAGE_MAX {
        return Err(Status::new(
            Code::ResourceExhausted,
            format!("a message must have at most {MESSAGE_MAX} bytes, got {length}"),
        ));
    }
    if bytes.len() < PREFIX_BYTES + length {
        return Ok(None);
    }
    bytes.advance(PREFIX_BYTES);
    Ok(Some(bytes.split_to(length)))
}

/// The messages of a call that has a stream of them, as they come.
pub struct Incoming {
    body: Body,
    buffer: BytesMut,
}

impl Incoming {
    /// Of a request.
    pub fn of(request: Request) -> Self {
        Self { body: request.into_body(), buffer: BytesMut::new() }
    }

    /// The next message; `None` at the end, also if the client has left or says nothing any more.
    pub async fn next<M: Message + Default>(&mut self) -> Result<Option<M>, Status> {
        loop {
            let mut bytes = std::mem::take(&mut self.buffer).freeze();
            let message = split(&mut bytes)?;
            self.buffer = bytes.into();
            if let Some(message) = message {
                return decode(message).map(Some);
            }
            match tokio::time::timeout(SILENCE_MAX, self.body.frame()).await {
                Ok(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
                Ok(Some(Err(_)) | None) | Err(_) => return Ok(None),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::messages::TaskRequest;
    use super::*;

    #[test]
    fn a_message_is_read_as_it_was_written() {
        let sent = framed(&TaskRequest { task_id: "ta-1".into() });
        assert_eq!(&sent[..], b"\0\0\0\0\x06\n\x04ta-1");
        for cut in 0..sent.len() {
            assert_eq!(split(&mut sent.slice(..cut)).expect("it may still come"), None, "{cut}");
        }
        let mut twice = Bytes::from([&sent[..], &sent[..]].concat());
        let first = split(&mut twice).expect("it is whole").expect("it is there");
        assert_eq!(decode::<TaskRequest>(first).expect("it is a message").task_id, "ta-1");
        assert_eq!(twice, sent);
        split(&mut Bytes::from_static(b"\x01\0\0\0\0")).expect_err("it is compressed");
        split(&mut Bytes::from_static(b"\0\xff\xff\xff\xff")).expect_err("it is too long");
    }

    #[test]
    fn a_sentence_fits_into_a_trailer() {
        assert_eq!(escaped("100 % of `ü`\n"), "100 %25 of `%C3%BC`%0A");
    }
}
