//! Connections: what passes, what is checked, what is refused.

use std::net::Ipv4Addr;
use std::sync::Arc;

use egress::control::{Record, What};
use egress::policy::Mode;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::harness::{Echo, Guest, World, exchange, name, rules, start, store, until};

#[tokio::test]
async fn bytes_pass_both_ways_and_are_counted() {
    let world = World::new().await;
    let echo = Echo::new().await;
    let (process, egress, records) = start(&world).await;
    let egress = Arc::new(egress);
    let kept = store(&egress, records);
    let guest = Guest::new(1, process.pool, &[echo.port]).await;
    egress
        .attach(guest.attach(rules(Mode::None, &["allow a.example"])), &guest.descriptors())
        .await
        .expect("attached");
    let mut stream = guest.connect("a.example", echo.port).await;
    let sent: Vec<u8> = (0..2 << 20).map(|at| at as u8).collect();
    let (mut reading, mut writing) = stream.split();
    let write = async {
        writing.write_all(&sent).await.expect("written");
        writing.shutdown().await.expect("half closed");
    };
    let mut got = Vec::new();
    let (_, read) = tokio::join!(write, reading.read_to_end(&mut got));
    read.expect("read");
    assert!(got == sent, "{} of {} bytes came back", got.len(), sent.len());
    let closed = |record: &Record| match record {
        Record::Event(event) if event.what == What::Closed => {
            (event.sent, event.received) == (2 << 20, 2 << 20)
        }
        _ => false,
    };
    until("the end is recorded", || kept.lock().expect("a lock").iter().any(closed)).await;
}

#[tokio::test]
async fn a_server_may_speak_first() {
    let world = World::new().await;
    let echo = Echo::on(Ipv4Addr::LOCALHOST, b"220 hello\r\n").await;
    let (process, egress, records) = start(&world).await;
    let egress = Arc::new(egress);
    store(&egress, records);
    let guest = Guest::new(1, process.pool, &[echo.port]).await;
    egress
        .attach(guest.attach(rules(Mode::None, &["allow a.example"])), &guest.descriptors())
        .await
        .expect("attached");
    let mut stream = guest.connect("a.example", echo.port).await;
    let mut greeting = [0; 11];
    stream.read_exact(&mut greeting).await.expect("a greeting");
    stream.write_all(b"EHLO guest\r\n").await.expect("written");
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.expect("an answer");
    assert_eq!((&greeting, &answer), (b"220 hello\r\n", b"EHLO guest\r\n"));
}

/// A TLS client that trusts the authority.
fn client(ca_pem: &str) -> tokio_rustls::TlsConnector {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca_pem.as_bytes()).expect("pem")).expect("a root");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    tokio_rustls::TlsConnector::from(Arc::new(config))
}

async fn over_tls(ca_pem: &str, stream: TcpStream, name: &str) -> String {
    let server = ServerName::try_from(name.to_owned()).expect("a name");
    let mut stream = client(ca_pem).connect(server, stream).await.expect("a handshake with our own leaf");
    let request = format!("GET / HTTP/1.1\r\nHost: {name}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("written");
    let mut page = String::new();
    stream.read_to_string(&mut page).await.expect("a page");
    page
}

#[tokio::test]
async fn a_refused_name_explains_itself_over_http_and_https() {
    let world = World::new().await;
    let echo = Echo::new().await;
    let (process, egress, records) = start(&world).await;
    let egress = Arc::new(egress);
    store(&egress, records);
    let guest = Guest::new(1, process.pool, &[echo.port]).await;
    egress.attach(guest.attach(rules(Mode::None, &[])), &guest.descriptors()).await.expect("attached");
    let stream = guest.connect("evil.example", echo.port).await;
    let page = exchange(stream, b"GET /x HTTP/1.1\r\nHost: evil.example\r\n\r\n").await.expect("a page");
    let page = String::from_utf8(page).expect("text");
    assert!(page.starts_with("HTTP/1.1 403 Refused by Shoal: evil.example is not in the policy"), "{page}");
    assert!(page.contains(&format!("shoal net allow {} evil.example", guest.id)), "{page}");
    let page =
        over_tls(&process.ca_pem, guest.connect("evil.example", echo.port).await, "evil.example").await;
    assert!(page.starts_with("HTTP/1.1 403 Refused by Shoal: evil.example is not in the policy"), "{page}");
    exchange(guest.connect("evil.example", echo.port).await, b"SSH-2.0-x\r\n")
        .await
        .expect_err("others are reset");
    assert_eq!(echo.connections(), 0, "nothing went upstream");
}

#[tokio::test]
async fn a_tls_client_must_ask_for_the_name_it_connected_to() {
    let world = World::new().await;
    let echo = Echo::new().await;
    let (process, egress, records) = start(&world).await;
    let egress = Arc::new(egress);
    let kept = store(&egress, records);
    let guest = Guest::new(1, process.pool, &[echo.port]).await;
    egress
        .attach(
            guest.attach(rules(Mode::None, &["allow a.example tls", "allow b.example tcp"])),
            &guest.descriptors(),
        )
        .await
        .expect("attached");
    let hello = |name: &str| {
        let server = ServerName::try_from(name.to_owned()).expect("a name");
        let config = client(&process.ca_pem);
        let mut connection =
            rustls::ClientConnection::new(config.config().clone(), server).expect("a client");
        let mut bytes = Vec::new();
        connection.write_tls(&mut bytes).expect("a hello");
        bytes
    };
    for other in ["fronted.example", "203.0.113.5"] {
        let answer =
            exchange(guest.connect("a.example", echo.port).await, &hello(other)).await.expect("an alert");
        assert_eq!(answer, [21, 3, 3, 0, 2, 2, 112], "{other}");
    }
    exchange(guest.connect("a.example", echo.port).await, b"\0\0not tls")
        .await
        .expect_err("only TLS is allowed");
    let page =
        exchange(guest.connect("a.example", echo.port).await, b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n")
            .await;
    assert!(page.expect("a page").starts_with(b"HTTP/1.1 403"), "only TLS is allowed");
    assert_eq!(echo.connections(), 0, "nothing went upstream");
    // The right name passes byte for byte, and so does anything where the operator vouches for it.
    let hellos = [("a.example", hello("a.example")), ("b.example", hello("whatever.example"))];
    for (host, bytes) in hellos {
        let mut stream = guest.connect(host, echo.port).await;
        stream.write_all(&bytes).await.expect("written");
        let mut back = vec![0; bytes.len()];
        stream.read_exact(&mut back).await.expect("an echo");
        assert!(back == bytes);
    }
    let fronted = |record: &Record| matches!(record, Record::Event(event) if event.why.as_deref().is_some_and(|why| why.contains("fronted.example")));
    until("the refusal is recorded", || kept.lock().expect("a lock").iter().any(fronted)).await;
}

/// A small HTTP server that answers every request and keeps the connection.
async fn http_server() -> (u16, Arc<std::sync::Mutex<String>>) {
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a listener");
    let port = listener.local_addr().expect("an address").port();
    let seen: Arc<std::sync::Mutex<String>> = Arc::default();
    let log = seen.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let log = log.clone();
            tokio::spawn(async move {
                let mut head = Vec::new();
                let mut byte = [0];
                while let Ok(1) = stream.read(&mut byte).await {
                    head.push(byte[0]);
                    if head.ends_with(b"\r\n\r\n") {
                        log.lock().expect("a lock").push_str(&String::from_utf8_lossy(&head));
                        let upgrade =
                            String::from_utf8_lossy(&head).to_lowercase().contains("upgrade: websocket");
                        head.clear();
                        if upgrade {
                            let answer = b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n";
                            stream.write_all(answer).await.expect("written");
                            let mut buffer = [0; 100];
                            while let Ok(count @ 1..) = stream.read(&mut buffer).await {
                                stream.write_all(&buffer[..count]).await.expect("written");
                            }
                            return;
                        }
                        stream
                            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                            .await
                            .expect("written");
                    }
                }
            });
        }
    });
    (port, seen)
}

async fn response(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    let mut byte = [0];
    while !text.ends_with(b"\r\n\r\n") {
        if stream.read(&mut byte).await.unwrap_or(0) == 0 {
            break;
        }
        text.push(byte[0]);
    }
    let text = String::from_utf8(text).expect("text");
    if text.to_lowercase().contains("content-length: 2\r\n") {
        let mut body = [0; 2];
        stream.read_exact(&mut body).await.expect("a body");
    }
    text
}

#[tokio::test]
async fn every_request_on_a_kept_connection_is_checked() {
    let world = World::new().await;
    let (port, seen) = http_server().await;
    let (process, egress, records) = start(&world).await;
    let egress = Arc::new(egress);
    store(&egress, records);
    let guest = Guest::new(1, process.pool, &[port]).await;
    egress
        .attach(guest.attach(rules(Mode::None, &["allow a.example"])), &guest.descriptors())
        .await
        .expect("attached");
    let host = format!("a.example:{port}");
    let second_requests = [
        ("GET /2 HTTP/1.1\r\nHost: evil.example\r\n\r\n".to_owned(), "421"),
        ("GET http://evil.example/2 HTTP/1.1\r\nHost: a.example\r\n\r\n".to_owned(), "421"),
        (format!("CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n"), "405"),
        (format!("GET /2 HTTP/1.1\r\nHost: {host}\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n"), "501"),
    ];
    for (second, status) in second_requests {
        let mut stream = guest.connect("a.example", port).await;
        stream
            .write_all(format!("GET http://{host}/1 HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes())
            .await
            .expect("written");
        assert!(response(&mut stream).await.starts_with("HTTP/1.1 200"), "before {second}");
        stream.write_all(second.as_bytes()).await.expect("written");
        let answer = response(&mut stream).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{second}: {answer}");
    }
    let seen = seen.lock().expect("a lock");
    assert!(seen.contains("GET /1 HTTP/1.1") && !seen.contains("/2"), "{seen}");
    assert!(!seen.contains("evil.example"), "{seen}");
}

#[tokio::test]
async fn a_request_with_two_lengths_reaches_the_host_with_one() {
    let world = World::new().await;
    let (port, seen) = http_server().await;
    let (process, egress, records) = start(&world).await;
    let egress = Arc::new(egress);
    store(&egress, records);
    let guest = Guest::new(1, process.pool, &[port]).await;
    egress
        .attach(guest.attach(rules(Mode::None, &["allow a.example"])), &guest.descriptors())
        .await
        .expect("attached");
    let smuggled = "GET /smuggled HTTP/1.1\r\nHost: evil.example\r\n\r\n";
    let heads = [
        "Content-Length: 3\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 3",
    ];
    for head in heads {
        let mut stream = guest.connect("a.example", port).await;
        let request =
            format!("POST /1 HTTP/1.1\r\nHost: a.example:{port}\r\n{head}\r\n\r\n0\r\n\r\n{smuggled}");
        stream.write_all(request.as_bytes()).await.expect("written");
        response(&mut stream).await;
        // Whatever follows is another request of the same connection, or nothing.
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest).await;
    }
    let seen = seen.lock().expect("a lock").to_lowercase();
    assert!(!(seen.contains("content-length") && seen.contains("transfer-encoding")), "{seen}");
    assert!(!seen.contains("smuggled"), "{seen}");
}

#[tokio::test]
async fn a_websocket_passes() {
    let world = World::new().await;
    let (port, _) = http_server().await;
    let (process, egress, records) = start(&world).await;
    let egress = Arc::new(egress);
    store(&egress, records);
    let guest = Guest::new(1, process.pool, &[port]).await;
    egress
        .attach(guest.attach(rules(Mode::None, &["allow a.example http"])), &guest.descriptors())
        .await
        .expect("attached");
    let mut stream = guest.connect("a.example", port).await;
    let request = format!(
        "GET /ws HTTP/1.1\r\nHost: a.example:{port}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.expect("written");
    assert!(response(&mut stream).await.starts_with("HTTP/1.1 101"));
    stream.write_all(b"frame").await.expect("written");
    let mut back = [0; 5];
    stream.read_exact(&mut back).await.expect("an echo");
    assert_eq!(&back, b"frame");
}

#[tokio::test]
async fn a_name_that_leads_to_a_closed_address_reaches_nothing() {
    let world = World::new().await;
    // As if loopback beyond 127.0.0.1 were the host's own services.
    let closed = Ipv4Addr::new(127, 0, 0, 2);
    let echo = Echo::on(closed, b"").await;
    world.points("rebound.example", closed);
    let (process, egress, records) = start(&world).await;
    let egress = Arc::new(egress);
    let kept = store(&egress, records);
    let guest = Guest::new(1, process.pool, &[echo.port]).await;
    egress
        .attach(guest.attach(rules(Mode::Open, &["allow rebound.example"])), &guest.descriptors())
        .await
        .expect("attached");
    let request = b"GET / HTTP/1.1\r\nHost: rebound.example\r\n\r\n";
    let page = exchange(guest.connect("rebound.example", echo.port).await, request).await.expect("a page");
    let page = String::from_utf8(page).expect("text");
    assert!(page.contains("127.0.0.2 is a loopback address") && page.starts_with("HTTP/1.1 403"), "{page}");
    exchange(guest.connect("rebound.example", echo.port).await, b"\0\0\0").await.expect_err("reset");
    assert_eq!(echo.connections(), 0, "nothing was dialled");
    let refused = |record: &Record| matches!(record, Record::Event(event) if event.what == What::Refused && event.name == Some(name("rebound.example")));
    until("the refusal is recorded", || kept.lock().expect("a lock").iter().any(refused)).await;
}

#[tokio::test]
async fn an_unreachable_host_is_a_502_for_http_and_a_reset_for_others() {
    let world = World::new().await;
    let port = {
        let gone = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a listener");
        gone.local_addr().expect("an address").port()
    };
    let (process, egress, records) = start(&world).await;
    let egress = Arc::new(egress);
    store(&egress, records);
    let guest = Guest::new(1, process.pool, &[port]).await;
    egress.attach(guest.attach(rules(Mode::Open, &[])), &guest.descriptors()).await.expect("attached");
    let request = b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n";
    let page = exchange(guest.connect("a.example", port).await, request).await.expect("a page");
    assert!(page.starts_with(b"HTTP/1.1 502 Shoal could not connect"), "{}", String::from_utf8_lossy(&page));
    exchange(guest.connect("a.example", port).await, b"\0\0").await.expect_err("reset");
}
