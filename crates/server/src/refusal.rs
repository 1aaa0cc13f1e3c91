//! Words for what hyper refuses by itself: bytes that are no HTTP, headers that are too many or too long.
//!
//! Such a request never becomes one, so no handler sees it, and hyper answers with a status and nothing else. [`Worded`] lies between
//! hyper and the socket and puts our own answer in the place of hyper's. It does so only until the first request of a connection
//! has reached a handler: up to then nothing but a refusal of hyper's can be on its way out, while later the same bytes might be
//! what a command has written. A second request on a connection that is no HTTP is thus refused without words.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use axum::http::StatusCode;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::error::ApiError;

/// See the head of this file.
pub struct Worded<S> {
    stream: S,
    begun: Arc<AtomicBool>,
    /// In place of what hyper has to say, and how much of it is written.
    answer: Option<(Vec<u8>, usize)>,
}

impl<S> Worded<S> {
    /// `begun` is set once a request has reached a handler.
    pub fn new(stream: S, begun: Arc<AtomicBool>) -> Self {
        Self { stream, begun, answer: None }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Worded<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Worded<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.answer.is_none() && !this.begun.load(Ordering::Relaxed) {
            this.answer = worded(bytes).map(|answer| (answer, 0));
        }
        let Some((answer, written)) = &mut this.answer else {
            return Pin::new(&mut this.stream).poll_write(context, bytes);
        };
        while *written < answer.len() {
            match ready!(Pin::new(&mut this.stream).poll_write(context, &answer[*written..]))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                length => *written += length,
            }
        }
        // Hyper closes after a refusal; whatever else it may have to say to this client is left out.
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.answer.is_none() && this.begun.load(Ordering::Relaxed) {
            return Pin::new(&mut this.stream).poll_write_vectored(context, slices);
        }
        let first = slices.iter().find(|slice| !slice.is_empty()).map_or(&[][..], |slice| slice);
        Pin::new(this).poll_write(context, first)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Our answer in place of a refusal without words; `None` for anything else.
fn worded(bytes: &[u8]) -> Option<Vec<u8>> {
    let status = bytes.strip_prefix(b"HTTP/1.1 ")?.get(..3)?;
    let status = StatusCode::from_bytes(status).ok()?;
    let error = match status {
        StatusCode::BAD_REQUEST => {
            ApiError::new(status, "malformed_request", "the request is not valid HTTP/1.1")
                .hint("speak HTTP/1.1; if the daemon has a certificate, speak TLS")
        }
        StatusCode::URI_TOO_LONG => ApiError::new(status, "uri_too_long", "the request's target is too long"),
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => {
            ApiError::new(status, "headers_too_large", "the request has too many headers, or too long ones")
        }
        _ => return None,
    };
    let body =
        serde_json::to_string(&error.into_body()).expect("a refusal is made of types that JSON can write");
    let reason = status.canonical_reason().unwrap_or_default();
    let head = format!(
        "HTTP/1.1 {} {reason}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        status.as_u16(),
        body.len()
    );
    Some((head + &body).into_bytes())
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const HYPERS: &[u8] = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

    async fn through(begun: bool, bytes: &[u8], room: usize) -> String {
        let (mut theirs, ours) = tokio::io::duplex(room);
        let mut ours = Worded::new(ours, Arc::new(AtomicBool::new(begun)));
        let write = async {
            ours.write_all(bytes).await.expect("it takes it");
            ours.shutdown().await.expect("it closes");
        };
        let mut seen = String::new();
        let (_, read) = tokio::join!(write, theirs.read_to_string(&mut seen));
        read.expect("it is text");
        seen
    }

    #[tokio::test]
    async fn a_refusal_without_words_gets_some_however_small_the_socket_is() {
        for room in [1, 7, 4096] {
            let seen = through(false, HYPERS, room).await;
            let (head, body) = seen.split_once("\r\n\r\n").expect("a head and a body");
            assert!(head.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{head}");
            let body: serde_json::Value = serde_json::from_str(body).expect("it is JSON");
            assert_eq!(body["code"], "malformed_request");
        }
    }

    #[tokio::test]
    async fn what_a_command_wrote_is_left_as_it_is() {
        assert_eq!(through(true, HYPERS, 16).await.as_bytes(), HYPERS);
    }

    #[tokio::test]
    async fn other_answers_are_left_as_they_are() {
        for other in
            ["HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 101 Switching Protocols\r\n\r\n", "HTTP/1.1 4", "x"]
        {
            assert_eq!(through(false, other.as_bytes(), 16).await, other);
        }
    }
}
