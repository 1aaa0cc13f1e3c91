//! Secrets that a sandbox uses without holding them: through the public door, with a TLS server of the test that records what
//! arrives, and real clients inside.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rustls::pki_types::PrivateKeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};
use shoal_tests::daemon::{Home, Spawn};
use shoal_tests::{Daemon, Sandbox, until};

use crate::network::{Names, OUTSIDE};

/// The value that must be found nowhere but at the server.
const SECRET: &str = "tk-4a7f09c2e51b8d36-never-inside";
const HOST: &str = "api.shoal-example.com";
const OTHER: &str = "other.shoal-example.com";

/// A TLS server that answers with the head of the request, and records it.
struct Server {
    port: u16,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Server {
    /// With a certificate for both hosts, whose root is written into `home`.
    fn serve(home: &Home) -> Self {
        let made = rcgen::generate_simple_self_signed([HOST.into(), OTHER.into()]).expect("a certificate");
        std::fs::write(home.join("root.pem"), made.cert.pem()).expect("written");
        let key = PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .expect("a configuration");
        let config = Arc::new(config);
        let listener = TcpListener::bind((OUTSIDE, 0)).expect("a port is free");
        let port = listener.local_addr().expect("it is bound").port();
        let server = Self { port, seen: Arc::default() };
        let seen = Arc::clone(&server.seen);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (config, seen) = (Arc::clone(&config), Arc::clone(&seen));
                std::thread::spawn(move || answer(client, config, &seen));
            }
        });
        server
    }

    fn seen(&self) -> Vec<String> {
        self.seen.lock().expect("nobody panics with it").clone()
    }

    fn last(&self) -> String {
        self.seen().pop().expect("a request arrived")
    }
}

/// Answers with what came. `/redirect` leads to the other host, `/private` asks for a password first.
fn answer(client: TcpStream, config: Arc<ServerConfig>, seen: &Mutex<Vec<String>>) {
    let _ = client.set_read_timeout(Some(Duration::from_secs(60)));
    let port = client.local_addr().expect("it is bound").port();
    let connection = ServerConnection::new(config).expect("a connection");
    let mut stream = StreamOwned::new(connection, client);
    let (mut request, mut piece) = (Vec::new(), [0; 4096]);
    while !request.windows(4).any(|window| window == b"\r\n\r\n") {
        match stream.read(&mut piece) {
            Ok(0) | Err(_) => return,
            Ok(length) => request.extend(&piece[..length]),
        }
    }
    let text = String::from_utf8_lossy(&request).into_owned();
    let length = text
        .lines()
        .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ").map(str::to_owned))
        .and_then(|length| length.parse::<usize>().ok())
        .unwrap_or(0);
    let head = text.find("\r\n\r\n").map_or(0, |at| at + 4);
    while request.len() < head + length {
        match stream.read(&mut piece) {
            Ok(0) | Err(_) => return,
            Ok(length) => request.extend(&piece[..length]),
        }
    }
    let text = String::from_utf8_lossy(&request).into_owned();
    seen.lock().expect("nobody panics with it").push(text.clone());
    let path = text.split(' ').nth(1).unwrap_or("/");
    let (status, more) = match path {
        "/redirect" => ("302 Found", format!("Location: https://{OTHER}:{port}/landed\r\n")),
        _ => ("200 OK", String::new()),
    };
    let answer = format!(
        "HTTP/1.1 {status}\r\n{more}X-Echo: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
        text.lines().find(|line| line.to_ascii_lowercase().starts_with("authorization")).unwrap_or("none"),
        text.len()
    );
    let _ = stream.write_all(answer.as_bytes());
    stream.conn.send_close_notify();
    let _ = stream.flush();
}

struct World {
    server: Server,
    daemon: Daemon,
    // After the daemon, which reads the root from it.
    _home: Home,
    _names: Names,
}

fn world() -> World {
    let names = Names::serve(&[(HOST, OUTSIDE), (OTHER, OUTSIDE)]);
    let home = Home::new();
    let server = Server::serve(&home);
    let config = format!(
        "network_resolvers = [\"{}\"]\nnetwork_open = [\"{OUTSIDE}/32\"]\nnetwork_roots = [\"{}\"]\n",
        names.address,
        home.join("root.pem").display()
    );
    let daemon = Spawn { config, ..Spawn::default() }.start();
    World { server, daemon, _home: home, _names: names }
}

impl World {
    #[track_caller]
    fn set(&self, name: &str, value: &str, inject: Value) -> Value {
        let port = self.server.port.to_string();
        let body = json!({
            "value": value,
            "rules": [{"domain": HOST, "ports": [port], "inject": inject}],
            "variables": ["API_TOKEN"],
        });
        let request = self.daemon.request("PUT", &format!("/v1/secrets/{name}"));
        request.json(&body).send(self.daemon.address).expect(200)
    }

    fn url(&self, path: &str) -> String {
        format!("https://{HOST}:{}{path}", self.server.port)
    }

    /// Opens both hosts, so that only the rules of the secret decide who gets it.
    #[track_caller]
    fn sandbox(&self, secrets: &[&str]) -> Sandbox {
        let network = json!({"mode": "none", "rules": [{"to": HOST}, {"to": OTHER}], "inject": secrets});
        self.daemon.sandbox_with(json!({ "network": network }))
    }
}

/// What curl prints: the status, then the body.
#[track_caller]
fn curl(sandbox: &Sandbox, arguments: &str) -> String {
    sandbox.sh(&format!("curl -sS -m 60 -w '\\n%{{http_code}}' {arguments} 2>&1; true")).ok().text()
}

#[test]
fn a_request_gets_the_secret_that_the_sandbox_never_holds() {
    let world = world();
    let shown = world.set("api", SECRET, json!({"type": "bearer"}));
    assert!(!shown.to_string().contains(SECRET), "nothing returns a value: {shown}");
    assert!(!world.daemon.get("/v1/secrets").expect(200).to_string().contains(SECRET));
    // Binding a secret opens its hosts.
    let sandbox = world.daemon.sandbox_with(json!({"inject": ["api"]}));
    let placeholder = sandbox.sh("printf %s \"$API_TOKEN\"").ok().text();
    assert!(placeholder.starts_with("shoal"), "{placeholder}");
    let got =
        curl(&sandbox, &format!("-H \"Authorization: Bearer $API_TOKEN\" -d hello=1 {}", world.url("/v1/x")));
    assert!(got.ends_with("200"), "{got}");
    let seen = world.server.last();
    assert!(seen.starts_with("POST /v1/x HTTP/1.1\r\n") && seen.ends_with("hello=1"), "{seen}");
    assert!(seen.to_ascii_lowercase().contains(&format!("authorization: bearer {SECRET}\r\n")), "{seen}");
    // The server repeats the request, in a header and in the body: the value is covered in both.
    assert!(!got.contains(SECRET) && got.contains("Bearer ****"), "{got}");
    let headers = curl(&sandbox, &format!("-o /dev/null -D - {}", world.url("/echo")));
    assert!(!headers.contains(SECRET) && headers.contains("Bearer ****"), "{headers}");
    // Another client, which brings its own roots.
    let url = world.url("/python");
    let python = format!("import urllib.request; print(urllib.request.urlopen('{url}', timeout=60).status)");
    assert_eq!(sandbox.python(&python).ok().text(), "200");
    assert!(world.server.last().to_ascii_lowercase().contains(&format!("bearer {SECRET}")));
    // The use is in the ledger, and the chain holds.
    let lines = until("three uses are recorded", || {
        let page = world.daemon.get("/v1/ledger").expect(200);
        page["lines"].as_array().filter(|lines| lines.len() == 3).cloned()
    });
    let line = lines.iter().find(|line| line["path"] == "/v1/x").expect("the first request");
    assert_eq!(
        (&line["secret"], &line["host"], &line["method"], &line["status"], &line["sandbox_id"]),
        (&json!("api"), &json!(HOST), &json!("POST"), &json!(200), &json!(sandbox.id))
    );
    let check = world.daemon.get("/v1/ledger/verify").expect(200);
    assert_eq!((&check["whole"], &check["lines"]), (&json!(true), &json!(3)));
    found_nowhere(&world, &sandbox);
}

/// Looks for the value in everything that the sandbox, the daemon's files, its logs and processes of the sandbox hold.
fn found_nowhere(world: &World, sandbox: &Sandbox) {
    let inside = sandbox.sh(&format!(
        "grep -rslF '{}' /root /home /tmp /etc /run /var/tmp /opt 2>/dev/null; env | grep -cF '{}'; true",
        &SECRET[..20],
        &SECRET[..20]
    ));
    assert_eq!(inside.text(), "0", "in files or variables of the sandbox");
    let mut files = Vec::new();
    let data = world.daemon.data_dir.clone();
    collect(&data, &mut files);
    assert!(files.iter().any(|path| path.ends_with("shoal.db")), "the database is among them");
    for path in files {
        let Ok(bytes) = std::fs::read(&path) else { continue };
        assert!(!holds(&bytes), "in {}", path.display());
    }
    assert!(!world.daemon.logs().contains(SECRET), "in the logs");
    for process in sandbox.processes() {
        for file in ["environ", "cmdline"] {
            let Ok(bytes) = std::fs::read(format!("/proc/{process}/{file}")) else { continue };
            assert!(!holds(&bytes), "in {file} of process {process}");
        }
    }
}

fn holds(bytes: &[u8]) -> bool {
    bytes.windows(SECRET.len()).any(|window| window == SECRET.as_bytes())
}

/// All regular files below a directory, except the large image of the store, whose files were searched from inside.
fn collect(directory: &Path, into: &mut Vec<PathBuf>) {
    const LARGE: u64 = 64 << 20;
    let Ok(entries) = std::fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let Ok(about) = entry.path().symlink_metadata() else { continue };
        if about.is_dir() && entry.file_name() != "images" && entry.file_name() != "store" {
            collect(&entry.path(), into);
        } else if about.is_file() && about.len() < LARGE {
            into.push(entry.path());
        }
    }
}

#[test]
fn a_placeholder_leaves_only_as_the_secret_and_only_to_its_host() {
    let world = world();
    world.set("api", SECRET, json!({"type": "placeholder", "header": true, "query": true, "body": true}));
    let sandbox = world.sandbox(&["api"]);
    let arrived = |needle: &str| assert!(world.server.last().contains(needle), "{}", world.server.last());
    // Header, query, body, and user and password as in a clone address.
    curl(&sandbox, &format!("-H \"X-Key: $API_TOKEN\" {}", world.url("/h")));
    arrived(SECRET);
    curl(&sandbox, &format!("\"{}?key=$API_TOKEN\"", world.url("/q")));
    arrived(&format!("key={SECRET}"));
    curl(&sandbox, &format!("-d \"a=1&key=$API_TOKEN&b=2\" {}", world.url("/b")));
    arrived(&format!("a=1&key={SECRET}&b=2"));
    curl(&sandbox, &format!("-u \"git:$API_TOKEN\" {}", world.url("/u")));
    arrived(&BASE64_STANDARD.encode(format!("git:{SECRET}")));
    // Not to another host, not over plain HTTP, not in the path, not after a redirect: each request stops with a reason.
    let before = world.server.seen().len();
    let elsewhere = format!("https://{OTHER}:{}/x", world.server.port);
    let plain = format!("-H \"X-Key: $API_TOKEN\" http://{HOST}:{}/x", world.server.port);
    let in_path = format!("\"{}$API_TOKEN\"", world.url("/"));
    for arguments in [plain, in_path] {
        let got = curl(&sandbox, &arguments);
        assert!(got.ends_with("403") && got.contains("would leave unreplaced"), "{arguments}: {got}");
    }
    assert_eq!(world.server.seen().len(), before, "nothing arrived");
    curl(&sandbox, &format!("-H \"X-Key: $API_TOKEN\" {elsewhere}"));
    curl(&sandbox, &format!("-L -H \"X-Key: $API_TOKEN\" {}", world.url("/redirect")));
    let landed = world.server.last();
    assert!(
        landed.starts_with("GET /landed"),
        "the other host is open, so the redirect is followed: {landed}"
    );
    for request in &world.server.seen()[before..] {
        let to_other = request.to_ascii_lowercase().contains(&format!("host: {OTHER}"));
        assert!(!to_other || !request.contains(SECRET), "{request}");
    }
    // A method whose answer repeats the request.
    let traced = curl(&sandbox, &format!("-X TRACE {}", world.url("/t")));
    assert!(traced.ends_with("405"), "{traced}");
    // A request for one host on a connection to another.
    let fronted = curl(&sandbox, &format!("-H \"Host: {OTHER}\" {}", world.url("/f")));
    assert!(fronted.ends_with("421"), "{fronted}");
}

#[test]
fn rotating_and_deleting_a_secret_act_at_once_and_forks_inherit() {
    let world = world();
    world.set("api", "first-value-of-the-secret", json!({"type": "bearer"}));
    let sandbox = world.sandbox(&["api"]);
    let ask = |sandbox: &Sandbox| {
        let got = curl(sandbox, &world.url("/x"));
        (got.ends_with("200"), world.server.seen().pop().unwrap_or_default())
    };
    assert!(ask(&sandbox).1.contains("first-value-of-the-secret"));
    let placeholder = sandbox.sh("printf %s \"$API_TOKEN\"").ok().text();
    world.set("api", SECRET, json!({"type": "bearer"}));
    assert!(ask(&sandbox).1.contains(SECRET), "the next request has the new value");
    assert_eq!(sandbox.sh("printf %s \"$API_TOKEN\"").ok().text(), placeholder, "its placeholder stays");
    // After a restart of the daemon too: egress and rows have it.
    world.daemon.delete("/v1/secrets/api").expect(204);
    let (reached, seen) = ask(&sandbox);
    assert!(
        reached && !seen.contains(SECRET) && seen.contains(HOST),
        "the host is open, without the secret: {seen}"
    );
    assert_eq!(sandbox.sh("printf %s \"$API_TOKEN\"").ok().text(), "", "no variable is left");
    world.daemon.get("/v1/secrets/api").expect_refusal(404, "secret_not_found");
    let refused = world.daemon.post("/v1/sandboxes", &json!({"inject": ["api"]}));
    refused.expect_refusal(404, "secret_not_found");
}

#[test]
fn secrets_survive_the_daemon_and_belong_to_their_owner() {
    let mut world = world();
    world.set("api", SECRET, json!({"type": "bearer"}));
    let sandbox = world.sandbox(&["api"]);
    world.daemon.kill();
    world.daemon.start_again();
    let sandbox = Sandbox { address: world.daemon.address, ..sandbox };
    curl(&sandbox, &world.url("/again"));
    assert!(world.server.last().contains(SECRET));
    let key = world.daemon.post("/v1/keys", &json!({"owner": "mallory"})).expect(201);
    let other = key["secret"].as_str().expect("a key").to_owned();
    let asked = |method: &str, path: &str, body: Value| {
        let request = shoal_tests::Request::new(method, path).key(&other).json(&body);
        request.send(world.daemon.address)
    };
    asked("GET", "/v1/secrets/api", json!({})).expect_refusal(404, "secret_not_found");
    asked("POST", "/v1/sandboxes", json!({"inject": ["api"]})).expect_refusal(404, "secret_not_found");
    // Files and variables of the daemon's machine are for admins.
    let file = json!({"file": "/etc/passwd", "rules": [{"domain": HOST, "inject": {"type": "bearer"}}]});
    assert_eq!(asked("PUT", "/v1/secrets/file", file).status, 403);
    for wrong in [
        json!({"value": "x", "rules": [{"domain": "*.com", "inject": {"type": "bearer"}}]}),
        json!({"value": "x", "rules": []}),
        json!({"value": "x\ny", "preset": "openai"}),
        json!({"preset": "openai"}),
        json!({"value": "x", "preset": "aws"}),
    ] {
        assert_eq!(asked("PUT", "/v1/secrets/wrong", wrong.clone()).status, 400, "{wrong}");
    }
    let command = asked("PUT", "/v1/secrets/wrong", json!({"command": ["x"], "preset": "openai"}));
    assert_eq!(command.status, 400);
}
