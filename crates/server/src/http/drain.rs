//! What of a request nobody has read when it is answered.
//!
//! Many refusals come before the body was looked at. A connection that is closed over unread bytes is reset, so that the caller may
//! never see the answer; and one that is closed without a word breaks the next request of a caller who keeps it. So some of the rest
//! is read, and where it is too much, the answer says that the connection ends.

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

/// How much is read for nothing: enough for a caller that sends a file of the usual size before it listens.
const REST_MAX: usize = 64 << 20;
/// And for how long the answer waits for it.
const REST_TIME_MAX: Duration = Duration::from_secs(5);

/// The layer.
pub async fn read_rest(request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    // HTTP/2 resets the one stream, and the connection goes on.
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

/// Whether the caller sends nothing before somebody reads: reading the rest would ask for it.
fn waits_to_be_asked(headers: &HeaderMap) -> bool {
    headers.get(header::EXPECT).is_some_and(|expect| expect.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

/// Whether it came to its end.
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

/// A body that comes back when whoever reads it lets it go.
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
            // Nobody waits for it if the caller has left.
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
