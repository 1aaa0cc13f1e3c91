//! Each byte once, over connections that are cut at any point.
//!
//! A proxy between client and daemon cuts every connection after a few bytes more than the previous one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use engine::{Engine, EngineConfig, KeySecret};
use runtime::fake::{FakeHost, pattern};
use server::daemon::compose;
use server::daemon::listen::{Connections, Listener};
use server::{Config, Layers, Machine, Settings};
use shoal_client::{Client, StreamEvent, api};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const KEY: &str = "a-key-for-the-tests-of-clients";

/// A daemon in this process, and its data directory.
async fn daemon() -> (SocketAddr, tempfile::TempDir) {
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
    let engine = Engine::start(engine_config, Arc::new(FakeHost::new())).await.expect("the engine starts");
    let secret = KeySecret::parse(KEY).expect("it is long enough");
    engine.set_bootstrap_key(&secret).await.expect("it can be set");
    let app = compose::app(engine, &config);
    let listener = Listener::bind(&config).await.expect("there is a port");
    let address = listener.local_url().trim_start_matches("http://").parse().expect("an address");
    let router = compose::router(&app);
    tokio::spawn(async move { listener.serve(router, &Connections::new()).await });
    (address, home)
}

/// A proxy that cuts each connection after this many bytes in either direction; `step` more for each further one.
async fn cutting_proxy(to: SocketAddr, first: u64, step: u64) -> (SocketAddr, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("there is a port");
    let address = listener.local_addr().expect("it is bound");
    let count = Arc::new(AtomicU64::new(0));
    let counted = count.clone();
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let most = first + step * counted.fetch_add(1, Ordering::Relaxed);
            tokio::spawn(async move {
                let Ok(far) = TcpStream::connect(to).await else { return };
                let ((near_read, near_write), (far_read, far_write)) = (near.into_split(), far.into_split());
                // The direction that reaches its bound first ends both.
                tokio::select! {
                    () = copy(near_read, far_write, most) => {}
                    () = copy(far_read, near_write, most) => {}
                }
            });
        }
    });
    (address, count)
}

async fn copy(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, most: u64) {
    let mut left = most;
    let mut buffer = vec![0; 8192];
    while left > 0 {
        let room = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let Ok(length @ 1..) = from.read(&mut buffer[..room]).await else { return };
        if to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
        left -= length as u64;
    }
}

async fn sandbox_through(proxy: SocketAddr) -> (Client, shoal_client::SandboxId) {
    let client = Client::new(&format!("http://{proxy}"), KEY).expect("the URL is valid");
    let sandbox =
        client.create_sandbox(&api::CreateSandbox::default()).await.expect("it is made, in the end");
    (client, sandbox.id)
}

#[tokio::test(flavor = "multi_thread")]
async fn output_is_seen_once_over_connections_that_are_cut_at_any_point() {
    let (daemon, _home) = daemon().await;
    // The first connections are too short for a response.
    let (proxy, count) = cutting_proxy(daemon, 700, 1777).await;
    let (client, sandbox) = sandbox_through(proxy).await;
    let length = 1_500_000u64;
    let script = format!("flood {length}; flooderr 100000");
    let mut stream = client.stream(sandbox, api::RunCommand { script: Some(script), ..Default::default() });
    let (mut stdout, mut stderr) = (0u64, 0u64);
    loop {
        match stream.next().await.expect("it goes on to the end").expect("it is continued each time") {
            StreamEvent::Output { stream, offset, bytes } => {
                let seen = match stream {
                    api::OutputStream::Stdout => &mut stdout,
                    api::OutputStream::Stderr => &mut stderr,
                };
                assert_eq!(offset, *seen);
                assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == pattern(offset + at as u64)));
                *seen += bytes.len() as u64;
            }
            StreamEvent::Ended(command) => {
                assert_eq!(command.result.and_then(|result| result.exit_code), Some(0));
                break;
            }
            StreamEvent::Command(_) => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((stdout, stderr), (length, 100_000));
    assert!(count.load(Ordering::Relaxed) > 10, "too few connections were cut to prove anything");
}

#[tokio::test(flavor = "multi_thread")]
async fn stdin_is_written_once_over_connections_that_are_cut_at_any_point() {
    let (daemon, _home) = daemon().await;
    let (proxy, count) = cutting_proxy(daemon, 5_000, 4_111).await;
    let (client, sandbox) = sandbox_through(proxy).await;
    let wish = api::RunCommand { script: Some("cat".into()), stdin: true, ..Default::default() };
    let mut stream = client.stream(sandbox, wish);
    let sent: Vec<u8> = (0..1_000_000u64).map(pattern).collect();
    let input = stream.input();
    let writer = tokio::spawn({
        let sent = sent.clone();
        async move {
            for piece in sent.chunks(10_007) {
                input.write(Bytes::copy_from_slice(piece)).await.expect("it is taken");
            }
            input.end().await.expect("it is taken");
        }
    });
    let mut heard = Vec::new();
    loop {
        match stream.next().await.expect("it goes on to the end").expect("it is continued each time") {
            StreamEvent::Output { bytes, .. } => heard.extend_from_slice(&bytes),
            StreamEvent::Ended(_) => break,
            StreamEvent::Command(_) => {}
            other => panic!("{other:?}"),
        }
    }
    writer.await.expect("the writer does not panic");
    assert!(heard == sent, "{} bytes came back of {}", heard.len(), sent.len());
    assert!(count.load(Ordering::Relaxed) > 10, "too few connections were cut to prove anything");
}

/// A daemon that answers one request and cuts every connection after that, and the number of changes that were
/// requested.
async fn one_that_answers_once() -> (SocketAddr, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("there is a port");
    let address = listener.local_addr().expect("it is bound");
    let changes = Arc::new(AtomicU64::new(0));
    let counted = changes.clone();
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            let mut request = vec![0; 8192];
            let length = near.read(&mut request).await.unwrap_or(0);
            if request[..length].starts_with(b"GET ") {
                let answer =
                    b"HTTP/1.1 200 OK\r\ncontent-length: 14\r\nconnection: close\r\n\r\n{\"volumes\":[]}";
                near.write_all(answer).await.expect("the client listens");
            } else if length > 0 {
                counted.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    (address, changes)
}

#[tokio::test]
async fn a_new_name_is_asked_for_once() {
    let (daemon, changes) = one_that_answers_once().await;
    let client = Client::new(&format!("http://{daemon}"), KEY).expect("the URL is valid");
    let client = client.with_patience(Duration::from_millis(500));
    client.volumes().await.expect("it answers once");
    let rename = api::UpdateVolume { name: Some("other".into()), ..Default::default() };
    client.update_volume("one", &rename).await.expect_err("it is cut");
    assert_eq!(changes.load(Ordering::Relaxed), 1, "a second try would not find the old name");
    let resize = api::UpdateVolume { size: Some("1Gi".into()), ..Default::default() };
    client.update_volume("one", &resize).await.expect_err("it is cut");
    assert!(changes.load(Ordering::Relaxed) > 2, "setting a size may be repeated");
}
