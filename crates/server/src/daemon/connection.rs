//! One connection: its protocol, its limits, and its end.
//!
//! HTTP/1.1 and HTTP/2 share a port, in plain text and over TLS. A client that speaks HTTP/2 begins with a fixed
//! preface (RFC 9113, section 3.4), by prior knowledge or because ALPN agreed on it; any other connection is handled as
//! HTTP/1.1. Until its first bytes arrive, a connection costs little more than a task.

use std::convert::Infallible;
use std::future::Future;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderValue, Request, Response, Version, header};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::{http1, http2};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::http::app::{Arrival, HEAD_BYTES_MAX};
use crate::http::places::{Leave, Place};

/// From the first byte, or from the end of the previous request, to the end of the headers. Also how long a new
/// connection may be silent.
pub(super) const HEADERS_TIME_MAX: Duration = Duration::from_secs(30);
/// The most headers of one request that are parsed. The limit in `http::app` is lower; between the two, the request is
/// rejected with an error message.
const HEADERS_PARSED_MAX: usize = 256;
/// What one connection of HTTP/1.1 buffers while it reads headers: room for a head that is too long, so that it can be
/// rejected with an error message.
const READ_BUFFER_MAX: usize = 2 * HEAD_BYTES_MAX;
/// Concurrent requests on one connection of HTTP/2.
const STREAMS_MAX: u32 = 128;
/// How much of one body a client may send before the server reads it.
const STREAM_WINDOW: u32 = 256 << 10;
/// As above, of all bodies on one connection.
const CONNECTION_WINDOW: u32 = 1 << 20;
/// How much of a response that the client does not read is buffered per stream.
const SEND_BUFFER_MAX: usize = 256 << 10;
/// The most streams that the client has reset and that were not handled yet. More are a flood (CVE-2023-44487), and the
/// connection is closed.
const RESET_STREAMS_MAX: usize = 32;
/// The most streams that the server has reset because of a client's error. Beyond that the connection is closed.
const ERROR_STREAMS_MAX: usize = 64;
/// How often a client of HTTP/2 is pinged, and how long it may take to answer.
const PING_INTERVAL: Duration = Duration::from_secs(20);
const PING_TIME_MAX: Duration = Duration::from_secs(20);
/// How many times [`HEADERS_TIME_MAX`] a connection of HTTP/2 may be idle after it has shown a key: clients keep it for
/// their next call.
const IDLE_TIMES_MAX: u32 = 10;

/// The first bytes of a client of HTTP/2.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The state of a connection's task.
pub(super) struct Connection {
    pub router: Router,
    pub finish: watch::Receiver<bool>,
    pub place: Place,
    pub leave: Leave,
    pub peer: SocketAddr,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Protocol {
    Http1,
    Http2,
}

impl Connection {
    /// Serves until the client leaves, the daemon stops, or another connection needs the place.
    pub async fn serve(
        self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        local: SocketAddr,
    ) {
        let leave = self.leave.clone();
        tokio::select! {
            () = self.speak(stream, local) => {}
            () = leave.asked() => tracing::debug!("dropped a connection that showed no key, to make room"),
        }
    }

    async fn speak(
        self,
        mut stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        local: SocketAddr,
    ) {
        let Self { router, mut finish, place, leave: _, peer } = self;
        let finish = async move {
            // If the sender were gone, the daemon would be stopping too.
            let _ = finish.wait_for(|finish| *finish).await;
        };
        let mut finish = pin!(finish);
        let first = tokio::select! {
            first = timeout(HEADERS_TIME_MAX, first_bytes(&mut stream)) => first,
            () = &mut finish => return,
        };
        let (protocol, head) = match first {
            Ok(Ok(Some(first))) => first,
            Ok(Ok(None) | Err(_)) => return,
            Err(_) => return tracing::debug!("a connection said nothing for too long"),
        };
        let stream = TokioIo::new(Begun { head, stream });
        let arrival = Arrival { local, peer, place };
        let done = match protocol {
            Protocol::Http1 => {
                let connection = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEADERS_TIME_MAX)
                    .max_headers(HEADERS_PARSED_MAX)
                    .max_buf_size(READ_BUFFER_MAX)
                    .serve_connection(stream, service(router, arrival, None))
                    .with_upgrades();
                until(connection, finish, |connection| connection.graceful_shutdown()).await
            }
            Protocol::Http2 => {
                let traffic = Arc::new(Traffic::default());
                let idle = traffic.clone().idle(arrival.place.clone());
                let connection = http2::Builder::new(TokioExecutor::new())
                    .timer(TokioTimer::new())
                    .max_concurrent_streams(STREAMS_MAX)
                    .initial_stream_window_size(STREAM_WINDOW)
                    .initial_connection_window_size(CONNECTION_WINDOW)
                    .max_send_buf_size(SEND_BUFFER_MAX)
                    .max_header_list_size(HEAD_BYTES_MAX as u32)
                    .max_pending_accept_reset_streams(RESET_STREAMS_MAX)
                    .max_local_error_reset_streams(ERROR_STREAMS_MAX)
                    .keep_alive_interval(PING_INTERVAL)
                    .keep_alive_timeout(PING_TIME_MAX)
                    .serve_connection(stream, service(router, arrival, Some(traffic)));
                let over = async {
                    tokio::select! {
                        () = idle => {}
                        () = finish => {}
                    }
                };
                until(connection, over, |connection| connection.graceful_shutdown()).await
            }
        };
        // These errors are caused by the client: it disconnected, or did not speak HTTP. Errors of a handler are logged
        // there.
        if let Err(error) = done {
            tracing::debug!(%error, "a connection ended early");
        }
    }
}

/// Drives a connection to its end, or, once `over` resolves, to the end of its current requests.
async fn until<C: Future<Output = hyper::Result<()>>>(
    connection: C,
    over: impl Future<Output = ()>,
    shut: impl FnOnce(Pin<&mut C>),
) -> hyper::Result<()> {
    let mut connection = pin!(connection);
    tokio::select! {
        done = connection.as_mut() => return done,
        () = over => shut(connection.as_mut()),
    }
    connection.await
}

/// Reads until the client's protocol is known. `None` if the client disconnects before.
async fn first_bytes(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<(Protocol, Bytes)>> {
    let mut head = [0; PREFACE.len()];
    let mut read = 0;
    while read < head.len() {
        match stream.read(&mut head[read..]).await? {
            0 => return Ok(None),
            length => read += length,
        }
        if !PREFACE.starts_with(&head[..read]) {
            return Ok(Some((Protocol::Http1, Bytes::copy_from_slice(&head[..read]))));
        }
    }
    Ok(Some((Protocol::Http2, Bytes::copy_from_slice(&head))))
}

/// The router as hyper calls it. Adds to each request how it arrived.
fn service(
    router: Router,
    arrival: Arrival,
    traffic: Option<Arc<Traffic>>,
) -> impl Service<
    Request<Incoming>,
    Response = Response<Body>,
    Error = Infallible,
    Future = impl Future<Output = Result<Response<Body>, Infallible>> + Send + 'static,
> {
    let service = TowerToHyperService::new(router);
    service_fn(move |request: Request<Incoming>| {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(arrival.clone());
        name_host(&mut request);
        let answer = service.call(request);
        let busy = traffic.as_ref().map(Traffic::begin);
        async move {
            let response = answer.await?;
            Ok(match busy {
                Some(busy) => response.map(|body| Body::new(Held { body, _busy: busy })),
                None => response,
            })
        }
    })
}

/// HTTP/2 names the host in `:authority`. Code that checks hosts reads the header.
fn name_host(request: &mut Request<Body>) {
    if request.version() == Version::HTTP_2
        && !request.headers().contains_key(header::HOST)
        && let Some(authority) = request.uri().authority()
        && let Ok(host) = HeaderValue::from_str(authority.as_str())
    {
        request.headers_mut().insert(header::HOST, host);
    }
}

/// The activity on a connection of HTTP/2.
#[derive(Default)]
struct Traffic {
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Traffic {
    fn begin(self: &Arc<Self>) -> Busy {
        self.begun.fetch_add(1, Ordering::Relaxed);
        Busy(self.clone())
    }

    /// Returns when the connection was idle for too long.
    async fn idle(self: Arc<Self>, place: Place) {
        let (mut seen, mut idle) = (0, 0);
        loop {
            tokio::time::sleep(HEADERS_TIME_MAX).await;
            let (begun, ended) = (self.begun.load(Ordering::Relaxed), self.ended.load(Ordering::Relaxed));
            idle = if begun == ended && begun == seen { idle + 1 } else { 0 };
            seen = begun;
            if idle >= if place.is_known() { IDLE_TIMES_MAX } else { 1 } {
                return;
            }
        }
    }
}

/// A request that has not ended.
struct Busy(Arc<Traffic>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::Relaxed);
    }
}

/// A response body; its request ends when the body does.
struct Held {
    body: Body,
    _busy: Busy,
}

impl HttpBody for Held {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A stream whose first bytes were read already.
struct Begun<S> {
    head: Bytes,
    stream: S,
}

impl<S: AsyncRead + Unpin> AsyncRead for Begun<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.head.is_empty() {
            return Pin::new(&mut self.stream).poll_read(context, buffer);
        }
        let length = self.head.len().min(buffer.remaining());
        buffer.put_slice(&self.head.split_to(length));
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Begun<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
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

#[cfg(test)]
mod tests {
    use hyper_util::rt::TokioExecutor;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
    use tokio::time::Instant;

    use super::*;
    use crate::http::places::Places;

    /// A client on a connection, and the places that the connection has one of.
    async fn connected() -> (DuplexStream, Places) {
        let places = Places::new(1);
        let (place, leave) = places.take([127, 0, 0, 1].into()).await;
        let (client, ours) = tokio::io::duplex(4096);
        // Leaked, so that it never finishes by itself.
        let finish = Box::leak(Box::new(watch::Sender::new(false))).subscribe();
        let router = Router::new().fallback(|| async { "here" });
        let peer = SocketAddr::from(([127, 0, 0, 1], 2));
        let connection = Connection { router, finish, place, leave, peer };
        tokio::spawn(connection.serve(ours, SocketAddr::from(([127, 0, 0, 1], 1))));
        (client, places)
    }

    /// Waits until the connection has released its place by itself.
    async fn is_over(places: Places) {
        let over = async {
            while places.free() == 0 {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        timeout(10 * HEADERS_TIME_MAX, over).await.expect("it ends by itself");
    }

    /// The response to one request on a connection that stays open.
    async fn answer(client: &mut DuplexStream) -> String {
        let mut answer = String::new();
        while !answer.ends_with("here") {
            let mut byte = [0];
            client.read_exact(&mut byte).await.expect("it answers");
            answer.push(byte[0].into());
        }
        answer
    }

    #[tokio::test(start_paused = true)]
    async fn who_sends_headers_slowly_is_cut_off_however_busily() {
        let (mut client, places) = connected().await;
        let began = Instant::now();
        client.write_all(b"GET / HTTP/1.1\r\n").await.expect("it listens");
        // One more header each second would continue for ever.
        while client.write_all(b"x: y\r\n").await.is_ok() {
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert!(began.elapsed() < HEADERS_TIME_MAX * 2, "it is still listened to");
        }
        assert!(began.elapsed() >= HEADERS_TIME_MAX);
        // And its place is free again.
        is_over(places).await;
    }

    #[tokio::test(start_paused = true)]
    async fn who_says_nothing_is_cut_off_also_after_a_request() {
        for requests in [0, 2] {
            let (mut client, places) = connected().await;
            for _ in 0..requests {
                client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("it listens");
                assert!(answer(&mut client).await.starts_with("HTTP/1.1 200 "));
                // Idle for a while, which is allowed.
                tokio::time::sleep(HEADERS_TIME_MAX / 2).await;
            }
            let began = Instant::now();
            assert_eq!(client.read(&mut [0]).await.expect("it is closed in order"), 0);
            assert!(began.elapsed() <= HEADERS_TIME_MAX);
            is_over(places).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_begins_to_speak_http2_and_stops_is_cut_off() {
        for said in [&PREFACE[..10], PREFACE] {
            let (mut client, places) = connected().await;
            client.write_all(said).await.expect("it listens");
            let began = Instant::now();
            let mut answer = Vec::new();
            let _ = client.read_to_end(&mut answer).await;
            assert!(began.elapsed() <= 3 * HEADERS_TIME_MAX, "{said:?} took {:?}", began.elapsed());
            is_over(places).await;
        }
    }

    async fn http2(client: DuplexStream) -> hyper::client::conn::http2::SendRequest<Body> {
        let (sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(client))
                .await
                .expect("it speaks HTTP/2");
        tokio::spawn(connection);
        sender
    }

    fn get() -> Request<Body> {
        Request::get("http://localhost/").body(Body::empty()).expect("a request")
    }

    #[tokio::test(start_paused = true)]
    async fn http2_is_spoken_with_prior_knowledge_and_ends_when_it_is_idle() {
        let (client, places) = connected().await;
        let mut sender = http2(client).await;
        for _ in 0..3 {
            let response = sender.send_request(get()).await.expect("it answers");
            assert_eq!((response.status().as_u16(), response.version()), (200, Version::HTTP_2));
        }
        let began = Instant::now();
        is_over(places).await;
        assert!(began.elapsed() >= HEADERS_TIME_MAX && began.elapsed() <= 4 * HEADERS_TIME_MAX);
    }

    #[tokio::test]
    async fn a_stranger_leaves_when_its_place_is_needed() {
        let (mut client, places) = connected().await;
        client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("it listens");
        assert!(answer(&mut client).await.starts_with("HTTP/1.1 200 "));
        let taken = tokio::time::timeout(HEADERS_TIME_MAX / 2, places.take([192, 0, 2, 1].into()));
        taken.await.expect("it does not wait until the other is idle for too long");
        let mut rest = Vec::new();
        assert_eq!(client.read_to_end(&mut rest).await.expect("it is closed"), 0);
    }
}
