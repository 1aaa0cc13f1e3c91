//! Drains the unread rest of a request body before the response.
//!
//! Many errors occur before the body is read. Closing a connection with unread bytes resets it, so that the caller may
//! never see the response; and closing it without notice breaks the next request of a caller that reuses the
//! connection. So the server reads some of the rest, and if there is too much, the response announces that the
//! connection will be closed.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Version, header};
use axum::middleware::Next;
use axum::response::Response;
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};
use tokio::sync::oneshot;

/// How many bytes are drained: enough for a caller that sends a file of the usual size before it reads the response.
const REST_MAX: usize = 64 << 20;
/// How long the response waits for the drain.
const REST_TIME_MAX: Duration = Duration::from_secs(5);

/// The layer.
pub async fn read_rest(request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    // HTTP/2 resets only the one stream, and the connection stays usable.
    if body.is_end_stream() || head.version == Version::HTTP_2 {
        return next.run(Request::from_parts(head, body)).await;
    }
    let waits = waits_to_be_asked(&head.headers);
    let (back, mut returned) = oneshot::channel();
    let lent = Body::new(Lent { body: Some(body), back: Some(back) });
    let mut response = next.run(Request::from_parts(head, lent)).await;
    if let Ok(mut rest) = returned.try_recv()
        && (waits || !matches!(tokio::time::timeout(REST_TIME_MAX, read(&mut rest)).await, Ok(true)))
    {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Whether the caller sends no body until the server starts to read: reading the rest would request it.
fn waits_to_be_asked(headers: &HeaderMap) -> bool {
    headers.get(header::EXPECT).is_some_and(|expect| expect.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

/// Returns whether the body was read to its end.
async fn read(body: &mut Body) -> bool {
    let mut left = REST_MAX;
    while left > 0 {
        match body.frame().await {
            None => return true,
            Some(Ok(frame)) => left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len)),
            Some(Err(_)) => return false,
        }
    }
    false
}

/// A body that is returned when its reader drops it.
struct Lent {
    body: Option<Body>,
    back: Option<oneshot::Sender<Body>>,
}

impl HttpBody for Lent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        match &mut self.body {
            Some(body) => Pin::new(body).poll_frame(context),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map(HttpBody::size_hint).unwrap_or_default()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let (Some(body), Some(back)) = (self.body.take(), self.back.take())
            && !body.is_end_stream()
        {
            // If the caller has left, no task waits for the body.
            let _ = back.send(body);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_body_comes_back_with_what_was_not_read() {
        let pieces = ["one", "two"].map(|piece| Ok::<_, std::io::Error>(Bytes::from(piece)));
        let body = Body::from_stream(futures_util::stream::iter(pieces));
        let (back, mut returned) = oneshot::channel();
        let mut lent = Body::new(Lent { body: Some(body), back: Some(back) });
        let first = lent.frame().await.expect("a frame").expect("it is whole");
        assert_eq!(first.data_ref().map(|data| &data[..]), Some(&b"one"[..]));
        drop(lent);
        let rest = returned.try_recv().expect("it came back");
        assert_eq!(rest.collect().await.expect("it is whole").to_bytes(), "two");
    }

    #[tokio::test]
    async fn a_body_without_an_end_is_read_to_a_bound() {
        let endless =
            futures_util::stream::repeat_with(|| Ok::<_, std::io::Error>(Bytes::from(vec![0; 1 << 20])));
        assert!(!read(&mut Body::from_stream(endless)).await);
        assert!(read(&mut Body::from("all of it")).await);
    }
}
