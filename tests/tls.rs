//! The daemon with its own certificate, and where it refuses to run without one.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::json;
use shoal_tests::daemon::{Home, binary};
use shoal_tests::{Daemon, Spawn};

/// A self-signed certificate for this machine, and its key.
struct Certificate {
    home: Home,
}

impl Certificate {
    fn new() -> Self {
        let home = Home::new();
        let made = rcgen::generate_simple_self_signed(["localhost".into(), "127.0.0.1".into()])
            .expect("a certificate can be made");
        fs::write(home.join("cert.pem"), made.cert.pem()).expect("a file");
        fs::write(home.join("key.pem"), made.signing_key.serialize_pem()).expect("a file");
        Self { home }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.home.join(name)
    }

    fn arguments(&self) -> Vec<String> {
        let path = |name| self.file(name).display().to_string();
        vec!["--tls-cert".into(), path("cert.pem"), "--tls-key".into(), path("key.pem")]
    }

    fn daemon(&self) -> Daemon {
        Spawn { arguments: self.arguments(), ..Spawn::default() }.start()
    }

    /// A connection that trusts only this certificate.
    fn connect(&self, daemon: &Daemon) -> StreamOwned<ClientConnection, TcpStream> {
        self.connect_with(daemon, &[])
    }

    /// As above, with these protocols offered.
    fn connect_with(&self, daemon: &Daemon, alpn: &[&str]) -> StreamOwned<ClientConnection, TcpStream> {
        let mut roots = RootCertStore::empty();
        let certificate = rustls::pki_types::CertificateDer::from_pem_file(self.file("cert.pem"));
        roots.add(certificate.expect("it was just written")).expect("it is one");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("it has some")
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = alpn.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        let name = ServerName::try_from("localhost").expect("a name");
        let tls = ClientConnection::new(Arc::new(config), name).expect("a connection");
        StreamOwned::new(tls, TcpStream::connect(daemon.address).expect("the daemon listens"))
    }
}

/// `shoal serve` that must end at once.
fn serve(home: &Home, arguments: &[&str]) -> Output {
    Command::new(binary())
        .arg("serve")
        .args(arguments)
        .arg("--data-dir")
        .arg(home.join("data"))
        .env("SHOAL_API_KEY", "a-key-for-one-test-alone")
        .stdin(Stdio::null())
        .output()
        .expect("the program can be started")
}

#[test]
fn a_daemon_with_a_certificate_speaks_tls_and_nothing_else() {
    let certificate = Certificate::new();
    let daemon = certificate.daemon();
    let ask = format!(
        "GET /v1/health HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {}\r\nconnection: close\r\n\r\n",
        daemon.key
    );
    let mut stream = certificate.connect(&daemon);
    stream.write_all(ask.as_bytes()).expect("it takes it");
    let mut answer = String::new();
    // A server that closes without a TLS close_notify would be an error here.
    stream.read_to_string(&mut answer).expect("it answers and closes well");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");

    // Without TLS there is no response, and the key is not checked.
    let mut plain = TcpStream::connect(daemon.address).expect("the daemon listens");
    plain.write_all(ask.as_bytes()).expect("it takes it");
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP/"), "{answer:?}");
    // Noise instead of a handshake does not affect other clients.
    for noise in [&b"\x16\x03\x01\xff\xff"[..], b"\x00", &[0x16; 70_000]] {
        let mut plain = TcpStream::connect(daemon.address).expect("the daemon listens");
        let _ = plain.write_all(noise);
        let _ = plain.shutdown(std::net::Shutdown::Write);
        let _ = plain.read_to_end(&mut Vec::new());
    }
    let mut stream = certificate.connect(&daemon);
    stream.write_all(ask.as_bytes()).expect("it takes it");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers and closes well");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
}

#[test]
fn commands_run_over_tls_with_streams_and_the_command_line() {
    let certificate = Certificate::new();
    let daemon = certificate.daemon();
    let shoal = |arguments: &[&str]| {
        let output = Command::new(binary())
            .args(arguments)
            .env("SHOAL_URL", format!("https://localhost:{}", daemon.address.port()))
            .env("SHOAL_API_KEY", &daemon.key)
            .env("SSL_CERT_FILE", certificate.file("cert.pem"))
            .env_remove("SHOAL_DATA_DIR")
            .stdin(Stdio::null())
            .output()
            .expect("the program can be started");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("it is text")
    };
    let id = shoal(&["create", "--name", "safe", "--json"]);
    let id: serde_json::Value = serde_json::from_str(&id).expect("it is JSON");
    let id = id["id"].as_str().expect("an id");
    // `run` streams over a WebSocket.
    assert_eq!(shoal(&["run", "--sandbox", id, "--", "echo", "over tls"]), "over tls\n");

    let target = format!("wss://localhost/v1/sandboxes/{id}/commands/stream");
    let mut request = tungstenite::client::IntoClientRequest::into_client_request(target).expect("a request");
    let bearer = format!("Bearer {}", daemon.key).parse().expect("a header");
    request.headers_mut().insert("authorization", bearer);
    let (mut socket, _) = tungstenite::client(request, certificate.connect(&daemon)).expect("it opens");
    let start = json!({"type": "start", "argv": ["head", "-c", "3000000", "/dev/zero"]});
    socket.send(tungstenite::Message::text(start.to_string())).expect("it takes it");
    let mut length = 0;
    let ended = loop {
        match socket.read().expect("it goes on") {
            tungstenite::Message::Binary(bytes) => length += bytes.len() - 9,
            tungstenite::Message::Text(text) if text.contains("\"ended\"") => break text,
            _ => {}
        }
    };
    assert_eq!(length, 3_000_000, "{ended}");
}

#[test]
fn beyond_loopback_a_certificate_is_needed_or_an_explicit_word() {
    let home = Home::new();
    for address in ["0.0.0.0:0", "[::]:0"] {
        let output = serve(&home, &["--listen", address]);
        assert!(!output.status.success(), "{address}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("without TLS") && said.contains("--tls-cert"), "{address}: {said}");
    }
    assert!(!home.join("data").exists(), "nothing was made for it");
    // With one, it listens on all addresses, and is reached by its name.
    let certificate = Certificate::new();
    let mut child = Command::new(binary())
        .args(["serve", "--listen", "0.0.0.0:0", "--data-dir"])
        .arg(home.join("data"))
        .args(certificate.arguments())
        .env("SHOAL_API_KEY", "a-key-for-one-test-alone")
        .env("SHOAL_STORE", "directory")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the program can be started");
    let mut said = String::new();
    let mut stdout = std::io::BufReader::new(child.stdout.take().expect("a pipe"));
    std::io::BufRead::read_line(&mut stdout, &mut said).expect("it says that it is ready");
    let _ = child.kill();
    let _ = child.wait();
    assert!(said.contains("ready") && said.contains("https://"), "{said}");
}

#[test]
fn certificates_that_cannot_be_used_end_the_start_with_a_sentence() {
    let home = Home::new();
    let (one, other) = (Certificate::new(), Certificate::new());
    fs::write(home.join("noise"), "noise").expect("a file");
    let path = |path: PathBuf| path.display().to_string();
    for (cert, key) in [
        (path(home.join("missing")), path(one.file("key.pem"))),
        (path(home.join("noise")), path(one.file("key.pem"))),
        (path(one.file("cert.pem")), path(home.join("noise"))),
        (path(one.file("cert.pem")), path(other.file("key.pem"))),
    ] {
        let output = serve(&home, &["--listen", "127.0.0.1:0", "--tls-cert", &cert, "--tls-key", &key]);
        assert!(!output.status.success(), "{cert} {key}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(&cert) || said.contains(&key), "{cert} {key}: {said}");
    }
    let output = serve(&home, &["--listen", "127.0.0.1:0", "--tls-cert", &path(one.file("cert.pem"))]);
    assert!(!output.status.success());
}

#[test]
fn http2_is_agreed_on_by_alpn() {
    let certificate = Certificate::new();
    let daemon = certificate.daemon();
    for (offered, agreed) in [(&["h2", "http/1.1"][..], &b"h2"[..]), (&["http/1.1"], b"http/1.1")] {
        let mut stream = certificate.connect_with(&daemon, offered);
        // The client's preface and its empty SETTINGS (RFC 9113, section 3.4), or a request without a key.
        let first: &[u8] = match agreed {
            b"h2" => b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
            _ => b"GET /v1/health HTTP/1.1\r\nhost: localhost\r\n\r\n",
        };
        stream.write_all(first).expect("it listens");
        let mut answer = [0; 9];
        stream.read_exact(&mut answer).expect("it answers");
        assert_eq!(stream.conn.alpn_protocol(), Some(agreed));
        match agreed {
            b"h2" => assert_eq!(answer[3], 4, "its first frame is SETTINGS: {answer:?}"),
            _ => assert_eq!(&answer, b"HTTP/1.1 "),
        }
    }
}
