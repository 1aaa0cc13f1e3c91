//! A command's WebSocket over a real connection, on an engine whose backend is the fake one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use engine::{Engine, EngineConfig, KeySecret};
use futures_util::{SinkExt, StreamExt};
use hyper_util::rt::{TokioExecutor, TokioIo};
use runtime::fake::{FakeHost, pattern};
use serde_json::{Value, json};
use shoal_server::daemon::compose;
use shoal_server::daemon::listen::{Connections, Listener};
use shoal_server::http::app::App;
use shoal_server::{Config, Layers, Machine, Settings};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;

const KEY: &str = "a-key-for-the-tests-of-sockets";
/// Far longer than anything here takes.
const DEADLINE: Duration = Duration::from_secs(60);

struct World {
    app: App,
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
            connections_max: Some(4),
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
        Self { app, address, sandbox, _home: home }
    }

    async fn open(&self, path: &str) -> Socket {
        let request = axum::http::Request::builder()
            .uri(format!("ws://{}/v1/sandboxes/{}/commands{path}", self.address, self.sandbox))
            .header("host", self.address.to_string())
            .header("connection", "Upgrade")
            .header("upgrade", "websocket")
            .header("sec-websocket-version", "13")
            .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
            .header("authorization", format!("Bearer {KEY}"))
            .body(())
            .expect("a request");
        let tcp = TcpStream::connect(self.address).await.expect("it listens");
        let (socket, _) = tokio_tungstenite::client_async(request, tcp).await.expect("it opens");
        Socket(socket)
    }

    async fn start(&self, wish: Value) -> Socket {
        let mut socket = self.open("/stream").await;
        let mut wish = wish;
        wish["type"] = "start".into();
        socket.say(wish).await;
        socket
    }
}

struct Socket(WebSocketStream<TcpStream>);

#[derive(Debug)]
enum Said {
    Event(Value),
    Output(u8, u64, Vec<u8>),
    Closed(u16),
}

impl Socket {
    async fn say(&mut self, wish: Value) {
        self.0.send(Message::text(wish.to_string())).await.expect("it is sent");
    }

    async fn hear(&mut self) -> Said {
        loop {
            let message = tokio::time::timeout(DEADLINE, self.0.next()).await.expect("something is said");
            match message.expect("it is not cut").expect("it is not cut") {
                Message::Text(text) => return Said::Event(serde_json::from_str(&text).expect("JSON")),
                Message::Binary(bytes) => {
                    let offset = u64::from_le_bytes(bytes[1..9].try_into().expect("eight bytes"));
                    return Said::Output(bytes[0], offset, bytes[9..].to_vec());
                }
                Message::Close(Some(frame)) => return Said::Closed(frame.code.into()),
                Message::Close(None) => panic!("closed without a code"),
                Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
            }
        }
    }

    async fn until(&mut self, kind: &str) -> Value {
        loop {
            match self.hear().await {
                Said::Event(event) if event["type"] == kind => return event,
                Said::Event(_) | Said::Output(..) => {}
                Said::Closed(code) => panic!("closed with {code} before {kind}"),
            }
        }
    }

    async fn closed(&mut self) -> u16 {
        loop {
            if let Said::Closed(code) = self.hear().await {
                return code;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn output_comes_in_order_and_ends_with_a_close() {
    let world = World::new().await;
    let mut socket = world.start(json!({"script": "flood 1000000"})).await;
    let mut seen = 0u64;
    loop {
        match socket.hear().await {
            Said::Output(stream, offset, bytes) => {
                assert_eq!((stream, offset), (1, seen));
                assert!(bytes.len() <= 64 << 10, "a message of {}", bytes.len());
                assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == pattern(seen + at as u64)));
                seen += bytes.len() as u64;
            }
            Said::Event(event) if event["type"] == "ended" => break,
            Said::Event(event) => assert_eq!(event["type"], "command", "{event}"),
            Said::Closed(code) => panic!("closed with {code}"),
        }
    }
    assert_eq!(seen, 1_000_000);
    assert_eq!(socket.closed().await, 1000);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_gets_through_while_nobody_reads_the_flood() {
    let world = World::new().await;
    let mut socket = world.start(json!({"script": "flood 1000000000", "id": "flood"})).await;
    socket.until("command").await;
    // From here on nothing is read: the output stands in every buffer on the way.
    socket.say(json!({"type": "kill"})).await;
    let command = world.app.engine.authenticate(KEY).expect("our key").owner;
    let id = "flood".parse().expect("an id");
    let flood = world.app.engine.command(&command, world.sandbox, &id).await.expect("it is known");
    let ended = async {
        while !matches!(flood.now().state, engine::CommandState::Ended { .. }) {
            // Only a reader lets the log be finished, so read on.
            socket.hear().await;
        }
    };
    tokio::time::timeout(DEADLINE, ended).await.expect("it is killed");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_is_refused_and_the_stream_goes_on() {
    let world = World::new().await;
    let mut socket = world.start(json!({"script": "cat", "stdin": true})).await;
    socket.until("command").await;
    for (wish, code) in [
        (json!({"type": "dance"}), "invalid_request"),
        (json!({"type": "signal", "signal": "NOPE"}), "invalid_request"),
        (json!({"type": "resize", "rows": 1, "columns": 1}), "no_terminal"),
        (json!({"type": "start", "script": "cat"}), "invalid_message"),
    ] {
        socket.say(wish.clone()).await;
        assert_eq!(socket.until("refused").await["code"], code, "{wish}");
    }
    socket.0.send(Message::binary(b"still here".to_vec())).await.expect("it is sent");
    socket.say(json!({"type": "stdin_end"})).await;
    let mut heard = Vec::new();
    loop {
        match socket.hear().await {
            Said::Output(_, _, bytes) => heard.extend(bytes),
            Said::Event(event) if event["type"] == "ended" => break,
            Said::Event(_) => {}
            Said::Closed(code) => panic!("closed with {code}"),
        }
    }
    assert_eq!(heard, b"still here");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_message_that_is_no_start_is_refused_and_closed() {
    let world = World::new().await;
    for first in [json!({"type": "kill"}), json!({"type": "start"}), json!(7)] {
        let mut socket = world.open("/stream").await;
        socket.say(first.clone()).await;
        assert!(socket.until("refused").await["code"].is_string(), "{first}");
        assert_eq!(socket.closed().await, 1008);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopping_daemon_asks_its_streams_to_come_again() {
    let world = World::new().await;
    let mut socket = world.start(json!({"script": "hang"})).await;
    socket.until("command").await;
    let mut opening = world.open("/stream").await;
    world.app.stop();
    assert_eq!(socket.closed().await, 1012);
    assert_eq!(opening.closed().await, 1012);
    drop((socket, opening));
    tokio::time::timeout(DEADLINE, world.app.streams_closed()).await.expect("all streams are closed");
}

#[tokio::test(flavor = "multi_thread")]
async fn websockets_count_as_connections() {
    let world = World::new().await;
    let mut open = Vec::new();
    for _ in 0..4 {
        open.push(world.start(json!({"script": "hang"})).await);
    }
    for socket in &mut open {
        socket.until("command").await;
    }
    // All places are taken: the next connection waits in the kernel's queue until one is free.
    let mut next = TcpStream::connect(world.address).await.expect("the kernel takes it");
    let request = format!(
        "GET /v1/health HTTP/1.1\r\nhost: localhost\r\nx-api-key: {KEY}\r\nconnection: close\r\n\r\n"
    );
    next.write_all(request.as_bytes()).await.expect("the kernel takes it");
    let mut answer = String::new();
    let waits = tokio::time::timeout(Duration::from_millis(300), next.read_to_string(&mut answer)).await;
    assert!(waits.is_err(), "it was answered: {answer}");
    drop(open);
    tokio::time::timeout(DEADLINE, next.read_to_string(&mut answer))
        .await
        .expect("in time")
        .expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_keep_nobody_out_who_has_a_key() {
    let world = World::new().await;
    let mut silent = Vec::new();
    for _ in 0..12 {
        silent.push(TcpStream::connect(world.address).await.expect("the kernel takes it"));
    }
    let mut caller = TcpStream::connect(world.address).await.expect("the kernel takes it");
    let request = format!(
        "GET /v1/health HTTP/1.1\r\nhost: localhost\r\nx-api-key: {KEY}\r\nconnection: close\r\n\r\n"
    );
    caller.write_all(request.as_bytes()).await.expect("it is taken");
    let mut answer = String::new();
    // Far less than the time after which a silent connection is cut off.
    tokio::time::timeout(Duration::from_secs(10), caller.read_to_string(&mut answer))
        .await
        .expect("it does not wait for them")
        .expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn http2_is_served_with_prior_knowledge() {
    let world = World::new().await;
    let tcp = TcpStream::connect(world.address).await.expect("it listens");
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(tcp))
            .await
            .expect("it speaks HTTP/2");
    tokio::spawn(connection);
    for (host, key, status) in [
        (world.address.to_string(), KEY, 200),
        (world.address.to_string(), "another-key-than-the-one-it-has", 401),
        ("evil.example".into(), KEY, 421),
    ] {
        let request = axum::http::Request::get(format!("http://{host}/v1/sandboxes"))
            .header("x-api-key", key)
            .body(axum::body::Body::empty())
            .expect("a request");
        let answer = sender.send_request(request).await.expect("it answers");
        assert_eq!(answer.version(), axum::http::Version::HTTP_2);
        assert_eq!(answer.status().as_u16(), status, "{host}");
        assert!(answer.headers().contains_key("x-request-id"));
    }
}
