//! HTTP/2 and gRPC to a port by host name, over real connections. The fake backend's sockets are on the machine's own
//! loopback, so the server in the sandbox is one of the test.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderValue, Request, Response, Version};
use engine::{Engine, EngineConfig, KeySecret};
use futures_util::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use runtime::fake::FakeHost;
use shoal_server::daemon::compose;
use shoal_server::daemon::listen::{Connections, Listener};
use shoal_server::{Config, Layers, Machine, Settings};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

const KEY: &str = "a-key-for-the-tests-of-ports";
/// Far longer than anything here takes.
const DEADLINE: Duration = Duration::from_secs(60);

struct World {
    address: SocketAddr,
    sandbox: wire::SandboxId,
    _home: tempfile::TempDir,
}

impl World {
    async fn new() -> Self {
        let home = tempfile::tempdir().expect("a temporary directory");
        let flags = Settings {
            listen: Some("127.0.0.1:0".into()),
            data_dir: Some(home.path().into()),
            ..Settings::default()
        };
        let machine = Machine { cpus: 2, memory_bytes: 8 << 30 };
        let config = Config::check(&Layers { flags, ..Layers::default() }, machine).expect("it is valid");
        let engine_config = EngineConfig {
            data_dir: home.path().into(),
            capacity: config.capacity,
            output_kept_max: config.output_kept_max,
            images: Default::default(),
            network: Default::default(),
        };
        let engine =
            Engine::start(engine_config, Arc::new(FakeHost::new())).await.expect("the engine starts");
        let secret = KeySecret::parse(KEY).expect("it is long enough");
        let key = engine.set_bootstrap_key(&secret).await.expect("it can be set");
        let spec = engine::SandboxSpec::default();
        let sandbox = engine.create(&key, spec, engine::Wait::Ready).await.expect("it can be made").id;
        let app = compose::app(engine, &config);
        let listener = Listener::bind(&config).await.expect("there is a port");
        let address = listener.local_url().trim_start_matches("http://").parse().expect("an address");
        let router = compose::router(&app);
        tokio::spawn(async move { listener.serve(router, &Connections::new()).await });
        Self { address, sandbox, _home: home }
    }

    /// A client of HTTP/2 that has connected to the daemon.
    async fn http2(&self) -> hyper::client::conn::http2::SendRequest<Body> {
        let tcp = TcpStream::connect(self.address).await.expect("it listens");
        let (sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(tcp))
                .await
                .expect("it speaks HTTP/2");
        tokio::spawn(connection);
        sender
    }

    fn request(&self, port: u16) -> axum::http::request::Builder {
        let host = format!("{port}-{}.localhost:{}", self.sandbox, self.address.port());
        Request::post(format!("http://{host}/a.Service/Method")).header("x-shoal-key", KEY)
    }
}

/// A server of HTTP/2 that sends every piece back as it comes, says what it was asked, and ends with a trailer.
async fn echo() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("it has one").port();
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            let answer = service_fn(async |request: Request<Incoming>| {
                let seen = format!(
                    "{:?} {} {}",
                    request.version(),
                    request.uri(),
                    request.headers().contains_key("x-shoal-key")
                );
                let mut trailers = HeaderMap::new();
                trailers.insert("grpc-status", HeaderValue::from_static("0"));
                let pieces =
                    stream::unfold((request.into_body(), Some(trailers)), async |(mut body, trailers)| {
                        match body.frame().await {
                            Some(Ok(frame)) => Some((Ok::<_, Infallible>(frame), (body, trailers))),
                            Some(Err(_)) => None,
                            None => trailers.map(|trailers| (Ok(Frame::trailers(trailers)), (body, None))),
                        }
                    });
                let response =
                    Response::builder().header("content-type", "application/grpc").header("x-seen", seen);
                Ok::<_, Infallible>(response.body(StreamBody::new(Box::pin(pieces))).expect("an answer"))
            });
            tokio::spawn(
                hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(tcp), answer),
            );
        }
    });
    port
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_passes_in_both_directions_at_once_with_its_trailers() {
    let world = World::new().await;
    let port = echo().await;
    let mut sender = world.http2().await;
    let (send, receive) = mpsc::channel::<Bytes>(1);
    let pieces = stream::unfold(receive, async |mut receive| {
        receive.recv().await.map(|piece| (Ok::<_, Infallible>(piece), receive))
    });
    let request = world
        .request(port)
        .header("content-type", "application/grpc+proto")
        .header("te", "trailers")
        .body(Body::from_stream(pieces))
        .expect("a request");
    let exchange = async {
        let response = sender.send_request(request).await.expect("it answers");
        assert_eq!((response.status().as_u16(), response.version()), (200, Version::HTTP_2));
        let host = format!("{port}-{}.localhost:{}", world.sandbox, world.address.port());
        assert_eq!(response.headers()["x-seen"], format!("HTTP/2.0 http://{host}/a.Service/Method false"));
        let mut body = response.into_body();
        for piece in ["one", "two"] {
            send.send(Bytes::from(piece)).await.expect("it is taken");
            let frame = body.frame().await.expect("it goes on").expect("it is whole");
            assert_eq!(frame.into_data().expect("bytes"), piece);
        }
        drop(send);
        let last = body.frame().await.expect("there are trailers").expect("it is whole");
        assert_eq!(last.into_trailers().expect("trailers")["grpc-status"], "0");
    };
    tokio::time::timeout(DEADLINE, exchange).await.expect("nothing waits for the end of the other");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_without_a_key_or_a_server_is_refused_over_http2_too() {
    let world = World::new().await;
    let mut sender = world.http2().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let closed = listener.local_addr().expect("it has one").port();
    drop(listener);
    let response = sender.send_request(world.request(closed).body(Body::empty()).expect("a request"));
    let response = response.await.expect("it answers");
    assert_eq!(
        (response.status().as_u16(), &response.headers()["x-shoal-error"]),
        (502, &HeaderValue::from_static("port_closed"))
    );
    let mut request = world.request(closed).body(Body::empty()).expect("a request");
    request.headers_mut().remove("x-shoal-key");
    let response = sender.send_request(request).await.expect("it answers");
    assert_eq!(response.status().as_u16(), 401);
}
