//! Ports of sandboxes: by path, by host name, by tunnel and by the command line; who may, and what passes.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use shoal_tests::daemon::{binary, send_signal};
use shoal_tests::http::{Request, Response};
use shoal_tests::sandbox::Sandbox;
use shoal_tests::wait::{DEADLINE, until_true};
use shoal_tests::{Daemon, Spawn, until};
use tungstenite::client::IntoClientRequest;
use tungstenite::{Message, WebSocket};

const SERVER: &str = include_str!("src/server.py");
const HTTP: u16 = 8000;

/// A sandbox in which the servers of `server.py` listen.
#[track_caller]
fn serving(daemon: &Daemon) -> Sandbox {
    let sandbox = daemon.sandbox();
    sandbox.spawn(json!({"argv": ["python3", "-c", SERVER]}));
    for port in [HTTP, 8001, 8002, 8003, 8004, 8005] {
        let listed =
            sandbox.request("GET", &format!("/ports?wait={port}&wait_seconds=60")).send(daemon.address);
        let listed = listed.expect(200);
        assert_eq!(listed["ports"][0]["addresses"], json!(["127.0.0.1"]), "{listed}");
        assert_eq!(listed["ports"][0]["process"]["name"], "python3", "{listed}");
    }
    sandbox
}

fn host(sandbox: &Sandbox, port: u16) -> String {
    format!("{port}-{}.localhost:{}", sandbox.id, sandbox.address.port())
}

/// A request by host name, without a key.
fn by_host(sandbox: &Sandbox, port: u16, method: &str, target: &str) -> Request {
    Request::new(method, target).header("host", &host(sandbox, port))
}

fn by_path(sandbox: &Sandbox, port: u16, method: &str, target: &str) -> Request {
    sandbox.request(method, &format!("/ports/{port}{target}"))
}

/// What the server saw of a request.
struct Seen(Value);

impl Seen {
    #[track_caller]
    fn of(response: &Response) -> Self {
        Self(response.expect(200))
    }

    fn header(&self, name: &str) -> Vec<String> {
        let all = self.0["headers"].as_array().expect("a list").iter();
        all.filter(|pair| pair[0] == name).map(|pair| pair[1].as_str().expect("text").to_owned()).collect()
    }
}

/// A key of another owner.
fn stranger(daemon: &Daemon) -> String {
    let key = daemon.post("/v1/keys", &json!({"owner": "stranger"})).expect(201);
    key["secret"].as_str().expect("a secret").to_owned()
}

#[track_caller]
fn link(sandbox: &Sandbox, body: Value) -> Value {
    sandbox.request("POST", "/links").json(&body).send(sandbox.address).expect(201)
}

fn uses(sandbox: &Sandbox) -> u64 {
    let told = sandbox.request("GET", "/explain").send(sandbox.address).expect(200);
    told["uses"].as_u64().expect("a number")
}

#[test]
fn a_server_on_loopback_only_is_reached_by_path_and_by_host_name() {
    let daemon = Daemon::start();
    let sandbox = serving(&daemon);
    let request = by_path(&sandbox, HTTP, "POST", "/a%2Fb/c?d=1&e")
        .header("cookie", "theirs=1")
        .header("x-forwarded-for", "6.6.6.6")
        .body("hello");
    let answer = request.send(daemon.address);
    let seen = Seen::of(&answer);
    assert_eq!(
        (&seen.0["method"], &seen.0["path"], &seen.0["body"]),
        (&json!("POST"), &json!("/a%2Fb/c?d=1&e"), &json!("hello"))
    );
    assert_eq!(seen.header("host"), [format!("localhost:{HTTP}")]);
    assert_eq!(seen.header("x-forwarded-for"), ["127.0.0.1"]);
    assert_eq!(seen.header("x-forwarded-prefix"), [sandbox.path(&format!("/ports/{HTTP}"))]);
    for secret in ["authorization", "cookie", "connection", "x-api-key"] {
        assert!(seen.header(secret).is_empty(), "{secret}: {}", seen.0);
    }
    assert_eq!(answer.header("content-security-policy"), Some("sandbox"));
    assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
    for target in ["", "/", "?x=1"] {
        let seen = Seen::of(&by_path(&sandbox, HTTP, "GET", target).send(daemon.address));
        assert_eq!(seen.0["path"], format!("/{}", target.trim_start_matches('/')), "{target:?}");
    }

    let answer = by_host(&sandbox, HTTP, "PUT", "/v1/sandboxes?x=1")
        .key(&sandbox.key)
        .header("cookie", "theirs=1")
        .body("more")
        .send(daemon.address);
    let seen = Seen::of(&answer);
    assert_eq!((&seen.0["method"], &seen.0["path"]), (&json!("PUT"), &json!("/v1/sandboxes?x=1")));
    assert_eq!(seen.header("host"), [host(&sandbox, HTTP)]);
    assert_eq!(seen.header("x-forwarded-host"), [host(&sandbox, HTTP)]);
    assert_eq!(seen.header("x-forwarded-proto"), ["http"]);
    assert_eq!(seen.header("cookie"), ["theirs=1"]);
    assert!(seen.header("authorization").is_empty(), "{}", seen.0);
    assert_eq!(answer.header("content-security-policy"), None);
    until("no use is left", || (uses(&sandbox) == 0).then_some(()));
}

#[test]
fn nothing_of_ours_reaches_the_guest_and_nothing_of_the_guest_acts_elsewhere() {
    let daemon = Daemon::start();
    let sandbox = serving(&daemon);
    let made = link(&sandbox, json!({"port": HTTP}));
    let token = made["token"].as_str().expect("a token");
    let seen = Seen::of(
        &by_host(&sandbox, HTTP, "GET", &format!("/x?a=1&shoal_token={token}"))
            .header("cookie", &format!("a=1; shoal_port={token}; __Host-shoal_port={token}; b=2"))
            .header("x-shoal-token", token)
            .header("x-shoal-key", &sandbox.key)
            .header("x-api-key", &sandbox.key)
            .header("referer", &format!("http://x/?shoal_token={token}"))
            .header("authorization", "Basic dGhlaXJzOnRoZWlycw==")
            .send(daemon.address),
    );
    let text = seen.0.to_string();
    assert!(!text.contains(token) && !text.contains(&sandbox.key), "{text}");
    assert_eq!(seen.0["path"], "/x?a=1");
    assert_eq!(seen.header("cookie"), ["a=1; b=2"]);
    assert_eq!(seen.header("authorization"), ["Basic dGhlaXJzOnRoZWlycw=="]);

    let answer = by_host(&sandbox, HTTP, "GET", "/strict").key(&sandbox.key).send(daemon.address);
    let cookies: Vec<_> = answer.headers.iter().filter(|(name, _)| name == "set-cookie").collect();
    assert_eq!(cookies, [&("set-cookie".to_owned(), "mine=1; Path=/".to_owned())]);
    let gone = ["strict-transport-security", "alt-svc", "clear-site-data", "service-worker-allowed", "x-hop"];
    for name in gone {
        assert_eq!(answer.header(name), None, "{name}");
    }
    assert_eq!(answer.header("access-control-allow-origin"), Some("*"), "its own origin is its own");
    let answer = by_path(&sandbox, HTTP, "GET", "/strict").send(daemon.address);
    for name in gone.iter().chain(&["set-cookie", "access-control-allow-origin"]) {
        assert_eq!(answer.header(name), None, "{name}");
    }
}

#[test]
fn a_port_is_private_and_another_owners_does_not_exist() {
    let daemon = Daemon::start();
    let sandbox = serving(&daemon);
    by_host(&sandbox, HTTP, "GET", "/").send(daemon.address).expect_refusal(401, "unauthorized");
    let nobody = Sandbox { id: "3f2b8c1e-90ab-4def-8123-456789abcdef".into(), ..sandbox.clone() };
    by_host(&nobody, HTTP, "GET", "/").send(daemon.address).expect_refusal(401, "unauthorized");
    Request::new("GET", &sandbox.path(&format!("/ports/{HTTP}/")))
        .send(daemon.address)
        .expect_refusal(401, "unauthorized");
    let made = link(&sandbox, json!({"port": HTTP}));
    let id = made["id"].as_str().expect("an id").to_owned();

    let theirs = Sandbox { key: stranger(&daemon), ..sandbox.clone() };
    let missing = |request: Request| request.send(daemon.address).expect_refusal(404, "sandbox_not_found");
    missing(by_host(&theirs, HTTP, "GET", "/").key(&theirs.key));
    missing(by_path(&theirs, HTTP, "GET", "/"));
    missing(theirs.request("GET", "/ports"));
    missing(theirs.request("GET", "/ports?wait=8000"));
    missing(theirs.request("GET", "/links"));
    missing(theirs.request("POST", "/links").json(&json!({"port": HTTP})));
    missing(theirs.request("DELETE", &format!("/links/{id}")));
    assert_eq!(theirs.open_socket(&format!("/tunnels/{HTTP}")).err(), Some(404));
    // A token in the query or a cookie opens nothing on the API's own host.
    let token = made["token"].as_str().expect("a token");
    for request in [
        Request::new("GET", &sandbox.path(&format!("/ports/{HTTP}/?shoal_token={token}"))),
        Request::new("GET", &sandbox.path(&format!("/ports/{HTTP}/")))
            .header("cookie", &format!("shoal_port={token}")),
        Request::new("GET", &sandbox.path(&format!("/ports/{HTTP}/"))).header("x-shoal-token", token),
        Request::new("GET", "/v1/sandboxes").header("cookie", &format!("shoal_port={token}")),
    ] {
        request.send(daemon.address).expect_refusal(401, "unauthorized");
    }
}

#[test]
fn a_ports_host_name_never_reaches_the_api_and_no_other_name_reaches_a_port() {
    let daemon = Daemon::start();
    let sandbox = serving(&daemon);
    let own = host(&sandbox, HTTP);
    for path in ["/v1/sandboxes", "/metrics", "/langsmith/v2/sandboxes/boxes", "/v2/sandboxes/boxes"] {
        let seen = Seen::of(&by_host(&sandbox, HTTP, "GET", path).key(&sandbox.key).send(daemon.address));
        assert_eq!(seen.0["path"], path);
    }
    let api = format!("http://{}/v1/sandboxes", daemon.address);
    for (target, hosts) in [
        ("/v1/sandboxes", &[own.as_str(), "localhost"][..]),
        ("/v1/sandboxes", &["localhost", own.as_str()]),
        (api.as_str(), &[own.as_str()]),
        (&format!("http://{own}/v1/sandboxes"), &["localhost"]),
    ] {
        let mut request = Request::new("GET", target).key(&sandbox.key);
        for host in hosts {
            request = request.header("host", host);
        }
        let answer = request.send(daemon.address);
        assert_eq!(answer.status, 400, "{target} {hosts:?}: {}", answer.describe());
    }
    let id = &sandbox.id;
    for host in [
        format!("{id}.localhost"),
        format!("08000-{id}.localhost"),
        format!("8000-{id}.localhost.evil.example"),
        format!("8000-{id}.evil.example"),
        format!("x.8000-{id}.localhost"),
        format!("8000_{id}.localhost"),
        "anything.localhost".to_owned(),
    ] {
        let answer =
            Request::new("GET", "/v1/sandboxes").header("host", &host).key(&sandbox.key).send(daemon.address);
        answer.expect_refusal(421, "host_not_allowed");
    }
}

#[test]
fn a_link_opens_one_port_for_its_methods_until_it_is_revoked() {
    let daemon = Daemon::start();
    let sandbox = serving(&daemon);
    let made =
        link(&sandbox, json!({"port": HTTP, "methods": ["GET"], "label": "for a test", "ttl_seconds": 600}));
    let (token, id) = (made["token"].as_str().expect("a token"), made["id"].as_str().expect("an id"));
    assert_eq!(made["url"], format!("http://{}/?shoal_token={token}", host(&sandbox, HTTP)));
    let with = |port, method: &str| {
        by_host(&sandbox, port, method, "/").header("x-shoal-token", token).send(daemon.address)
    };
    Seen::of(&with(HTTP, "GET"));
    with(HTTP, "POST").expect_refusal(403, "method_not_allowed_by_link");
    with(8001, "GET").expect_refusal(401, "unauthorized");
    let upgrade = open(&daemon, &host(&sandbox, HTTP), "/socket", &[("x-shoal-token", token)]);
    assert_eq!(upgrade.err(), Some(403), "a WebSocket could carry anything");
    let listed = sandbox.request("GET", "/links").send(daemon.address).expect(200);
    assert_eq!((&listed["links"][0]["label"], &listed["links"][0]["id"]), (&json!("for a test"), &json!(id)));
    assert!(listed["links"][0]["token"].is_null(), "it is shown once");

    // An open answer ends with its link, and other uses of the sandbox do not.
    let mut open = by_host(&sandbox, HTTP, "GET", "/events")
        .header("x-shoal-token", token)
        .open(daemon.address)
        .expect("it answers");
    assert_eq!(open.chunk().expect("the first comes").expect("a piece"), b"data: first\n\n");
    assert_eq!(sandbox.request("DELETE", &format!("/links/{id}")).send(daemon.address).status, 204);
    assert!(open.chunk().is_err(), "it is cut off");
    with(HTTP, "GET").expect_refusal(401, "unauthorized");
    sandbox
        .request("DELETE", &format!("/links/{id}"))
        .send(daemon.address)
        .expect_refusal(404, "link_not_found");
    by_host(&sandbox, HTTP, "GET", "/?shoal_token=x")
        .send(daemon.address)
        .expect_refusal(401, "unauthorized");

    sandbox
        .request("POST", "/links")
        .json(&json!({"port": HTTP, "public": true}))
        .send(daemon.address)
        .expect_refusal(403, "public_ports_off");
    for body in
        [json!({"port": 0}), json!({"port": 80, "ttl_seconds": 0}), json!({"port": 80, "methods": ["get"]})]
    {
        sandbox
            .request("POST", "/links")
            .json(&body)
            .send(daemon.address)
            .expect_refusal(400, "invalid_request");
    }
}

#[test]
fn a_port_is_public_only_where_the_operator_allows_it() {
    let mut daemon = Spawn {
        config: "public_ports = true\nports_url = \"https://ports.example.com\"\n".into(),
        ..Spawn::default()
    }
    .start();
    let sandbox = serving(&daemon);
    let made = link(&sandbox, json!({"port": HTTP, "public": true}));
    assert!(made["token"].is_null(), "{made}");
    let outside = format!("{HTTP}-{}.ports.example.com", sandbox.id);
    assert_eq!(made["url"], format!("https://{outside}/"));
    let answer = Request::new("GET", "/").header("host", &outside).send(daemon.address);
    assert_eq!(Seen::of(&answer).header("x-forwarded-proto"), ["https"]);
    by_host(&sandbox, 8005, "GET", "/").send(daemon.address).expect_refusal(401, "unauthorized");
    daemon.stop();
    daemon.spawn.config = "public_ports = false\n".into();
    daemon.start_again();
    Request::new("GET", "/")
        .header("host", &host(&daemon.sandbox_of(&sandbox.id), HTTP))
        .send(daemon.address)
        .expect_refusal(401, "unauthorized");
}

#[test]
fn a_browser_that_follows_a_link_gets_a_cookie_that_no_other_page_can_use() {
    let daemon = Daemon::start();
    let sandbox = serving(&daemon);
    let made = link(&sandbox, json!({"port": HTTP}));
    let token = made["token"].as_str().expect("a token");
    let visit = by_host(&sandbox, HTTP, "GET", &format!("//evil.example/?shoal_token={token}&q=1"))
        .header("accept", "text/html")
        .header("sec-fetch-mode", "navigate")
        .send(daemon.address);
    assert_eq!(visit.status, 303, "{}", visit.describe());
    assert_eq!(visit.header("location"), Some("/evil.example/?q=1"), "it stays on its own host");
    let cookie = visit.header("set-cookie").expect("a cookie");
    for part in [&format!("shoal_port={token}; "), "HttpOnly", "SameSite=Lax", "Path=/", "Max-Age="] {
        assert!(cookie.contains(part), "{cookie}");
    }
    assert!(!cookie.contains("Domain") && !cookie.contains("Secure"), "{cookie}");

    let cookie = format!("shoal_port={token}");
    let with = |headers: &[(&str, &str)], method: &str| {
        let mut request = by_host(&sandbox, HTTP, method, "/").header("cookie", &cookie);
        for (name, value) in headers {
            request = request.header(name, value);
        }
        request.send(daemon.address).status
    };
    let own = format!("http://{}", host(&sandbox, HTTP));
    let other = format!("http://{}", host(&sandbox, 8001));
    assert_eq!(with(&[], "GET"), 200);
    assert_eq!(with(&[("origin", &own), ("sec-fetch-site", "same-origin")], "POST"), 200);
    assert_eq!(with(&[("origin", &other), ("sec-fetch-site", "same-site")], "POST"), 401);
    assert_eq!(with(&[("sec-fetch-site", "same-site"), ("sec-fetch-mode", "no-cors")], "GET"), 401);
    assert_eq!(with(&[("origin", "null")], "GET"), 401);
    let mine = [("cookie", cookie.as_str()), ("origin", own.as_str())];
    open(&daemon, &host(&sandbox, HTTP), "/socket", &mine).expect("its own page may");
    let foreign = [("cookie", cookie.as_str()), ("origin", other.as_str())];
    assert_eq!(open(&daemon, &host(&sandbox, HTTP), "/socket", &foreign).err(), Some(401));
    // For people there is a page, and it tries again while nothing listens.
    let page =
        by_host(&sandbox, 9, "GET", "/").key(&sandbox.key).header("accept", "text/html").send(daemon.address);
    assert_eq!((page.status, page.header("x-shoal-error")), (502, Some("port_closed")));
    assert!(String::from_utf8_lossy(&page.body).contains("http-equiv=\"refresh\""));
    let page = by_host(&sandbox, HTTP, "GET", "/").header("accept", "text/html").send(daemon.address);
    assert_eq!((page.status, page.header("content-type")), (401, Some("text/html; charset=utf-8")));
}

/// Opens a WebSocket at a host name. The status if it is refused.
fn open(
    daemon: &Daemon,
    host: &str,
    path: &str,
    headers: &[(&str, &str)],
) -> Result<WebSocket<TcpStream>, u16> {
    let stream = TcpStream::connect(daemon.address).expect("it listens");
    stream.set_read_timeout(Some(DEADLINE)).expect("a socket takes it");
    let mut request = format!("ws://{host}{path}").into_client_request().expect("a URL");
    for (name, value) in headers {
        let name: tungstenite::http::HeaderName = name.parse().expect("a name");
        request.headers_mut().insert(name, value.parse().expect("a value"));
    }
    match tungstenite::client(request, stream) {
        Ok((socket, _)) => Ok(socket),
        Err(tungstenite::HandshakeError::Failure(tungstenite::Error::Http(answer))) => {
            Err(answer.status().as_u16())
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn a_websocket_passes_both_ways_by_host_name_and_by_path() {
    let daemon = Daemon::start();
    let sandbox = serving(&daemon);
    let key = format!("Bearer {}", sandbox.key);
    let path = sandbox.path(&format!("/ports/{HTTP}/socket"));
    for (host, path) in [(host(&sandbox, HTTP), "/socket"), (daemon.address.to_string(), path.as_str())] {
        let mut socket = open(&daemon, &host, path, &[("authorization", &key)]).expect("it opens");
        for text in ["hello", &"x".repeat(10_000)] {
            socket.send(Message::text(text)).expect("it is sent");
            assert_eq!(socket.read().expect("it comes back"), Message::text(text));
        }
        assert!(uses(&sandbox) >= 1, "an open connection is a use");
        socket.close(None).expect("it is sent");
        while socket.read().is_ok() {}
        drop(socket);
        until_true("the use has ended", || uses(&sandbox) == 0);
    }
}

#[test]
fn events_and_trailers_arrive_as_they_come() {
    let daemon = Daemon::start();
    let sandbox = serving(&daemon);
    let mut events =
        by_host(&sandbox, HTTP, "GET", "/events").key(&sandbox.key).open(daemon.address).expect("it answers");
    assert_eq!(events.header("content-type"), Some("text/event-stream"));
    assert_eq!(events.chunk().expect("it comes").expect("a piece"), b"data: first\n\n");
    sandbox.sh("touch /tmp/go").ok();
    assert_eq!(events.chunk().expect("it comes").expect("a piece"), b"data: second\n\n");
    assert_eq!(events.chunk().expect("it ends"), None);
    let mut trailers = by_host(&sandbox, HTTP, "GET", "/trailers")
        .key(&sandbox.key)
        .header("te", "trailers")
        .open(daemon.address)
        .expect("it answers");
    let mut rest = String::new();
    trailers.body().read_to_string(&mut rest).expect("text");
    assert!(rest.contains("body") && rest.contains("x-sum: 42"), "{rest:?}");
}

/// The most memory that the daemon has had so far.
fn memory_peak(daemon: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("it is told");
    line.trim().trim_end_matches("kB").trim().parse::<u64>().expect("a number") << 10
}

#[test]
fn long_bodies_take_no_more_memory_than_short_ones() {
    const MEBIBYTES: usize = 192;
    let daemon = Daemon::start();
    let sandbox = serving(&daemon);
    let get = |target: String| {
        by_host(&sandbox, HTTP, "GET", &target).key(&sandbox.key).open(daemon.address).expect("it answers")
    };
    std::io::copy(get("/big?1".into()).body(), &mut std::io::sink()).expect("it comes");
    let before = memory_peak(&daemon);
    let mut big = get(format!("/big?{MEBIBYTES}"));
    // Reads nothing for a moment, so that a daemon that reads ahead would have to keep it.
    until_true("something has come", || uses(&sandbox) == 1);
    let length = std::io::copy(big.body(), &mut std::io::sink()).expect("all of it comes");
    assert_eq!(length, (MEBIBYTES as u64) << 20);

    // Upwards, in pieces of an unknown number.
    let mut stream = TcpStream::connect(daemon.address).expect("it listens");
    stream.set_read_timeout(Some(DEADLINE)).expect("a socket takes it");
    let head = format!(
        "POST /sum HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {}\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n",
        host(&sandbox, HTTP),
        sandbox.key
    );
    stream.write_all(head.as_bytes()).expect("it is taken");
    let (piece, mut digest) = (vec![7; 1 << 20], Sha256::new());
    for _ in 0..MEBIBYTES {
        stream.write_all(b"100000\r\n").expect("it is taken");
        stream.write_all(&piece).expect("it is taken");
        stream.write_all(b"\r\n").expect("it is taken");
        digest.update(&piece);
    }
    stream.write_all(b"0\r\n\r\n").expect("it is taken");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    let digest: String = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(answer.contains(&digest), "{answer}");
    let grown = memory_peak(&daemon).saturating_sub(before);
    assert!(grown < 48 << 20, "{grown} bytes more for {MEBIBYTES} MiB");
}

#[test]
fn servers_that_misbehave_are_reported_and_hold_nothing_up() {
    let daemon = Daemon::start();
    let sandbox = serving(&daemon);
    for get in [by_path, by_host] {
        let get = |port| get(&sandbox, port, "GET", "/").header("x-shoal-key", &sandbox.key);
        get(9).send(daemon.address).expect_refusal(502, "port_closed");
        get(8001).send(daemon.address).expect_refusal(502, "port_bad_answer");
        get(8004).send(daemon.address).expect_refusal(502, "port_bad_answer");
        let mut half = get(8003).open(daemon.address).expect("its head comes");
        let mut rest = Vec::new();
        let read = half.body().read_to_end(&mut rest);
        assert_eq!((half.status, rest.as_slice()), (200, &b"half of it"[..]), "{read:?}");
    }
    // One that never answers is left by its caller, and others are served meanwhile.
    let silent = TcpStream::connect(daemon.address).expect("it listens");
    let head =
        format!("GET / HTTP/1.1\r\nhost: {}\r\nx-shoal-key: {}\r\n\r\n", host(&sandbox, 8002), sandbox.key);
    (&silent).write_all(head.as_bytes()).expect("it is taken");
    until_true("it is connected", || uses(&sandbox) == 1);
    Seen::of(&by_path(&sandbox, HTTP, "GET", "/").send(daemon.address));
    drop(silent);
    until_true("it was let go", || uses(&sandbox) == 0);
    let late = sandbox.request("GET", "/ports?wait=9&wait_seconds=0.05").send(daemon.address);
    late.expect_refusal(504, "port_closed");
}

#[test]
fn a_tunnel_carries_bytes_and_each_side_ends_by_itself() {
    let daemon = Daemon::start();
    let sandbox = serving(&daemon);
    let key = format!("Bearer {}", sandbox.key);
    let tunnel = |port: u16| {
        open(
            &daemon,
            &daemon.address.to_string(),
            &sandbox.path(&format!("/tunnels/{port}")),
            &[("authorization", &key)],
        )
    };
    let mut socket = tunnel(8005).expect("it opens");
    let sent: Vec<u8> = (0..200_000_u32).flat_map(u32::to_le_bytes).collect();
    for piece in sent.chunks(50_000) {
        socket.send(Message::binary(piece.to_vec())).expect("it is taken");
    }
    // The server answers when it has everything, which it knows because this side has ended.
    socket.send(Message::text("end")).expect("it is taken");
    let (mut back, mut ended, mut code) = (Vec::new(), false, None);
    loop {
        match socket.read() {
            Ok(Message::Binary(bytes)) => back.extend_from_slice(&bytes),
            Ok(Message::Text(text)) => ended = text.as_str() == "end",
            Ok(Message::Close(frame)) => code = frame.map(|frame| u16::from(frame.code)),
            Ok(_) => {}
            Err(_) => break,
        }
    }
    assert!(back == sent, "{} of {} bytes", back.len(), sent.len());
    assert_eq!((ended, code), (true, Some(1000)));
    assert_eq!(tunnel(9).err(), Some(502));
    until_true("no use is left", || uses(&sandbox) == 0);
}

#[test]
fn a_download_that_a_crash_cuts_off_works_at_the_next_try() {
    let mut daemon = Daemon::start();
    let sandbox = serving(&daemon);
    let made = link(&sandbox, json!({"port": HTTP}));
    let token = made["token"].as_str().expect("a token").to_owned();
    let mut big =
        by_host(&sandbox, HTTP, "GET", "/big?64").key(&sandbox.key).open(daemon.address).expect("it answers");
    let mut piece = vec![0; 1 << 20];
    big.body().read_exact(&mut piece).expect("some of it comes");
    daemon.crash();
    let mut rest = Vec::new();
    let cut = big.body().read_to_end(&mut rest).map(|_| rest.len());
    assert!(cut.as_ref().is_err() || cut.as_ref().is_ok_and(|length| *length < 63 << 20), "{cut:?}");
    let sandbox = daemon.sandbox_of(&sandbox.id);
    let again =
        by_host(&sandbox, HTTP, "GET", "/big?64").header("x-shoal-token", &token).send(daemon.address);
    assert_eq!((again.status, again.body.len()), (200, 64 << 20));
}

#[test]
fn a_deleted_sandbox_leaves_no_socket_and_many_connections_work_at_once() {
    const AT_ONCE: usize = 1000;
    let daemon = Daemon::start();
    let empty = daemon.audit();
    let sandbox = serving(&daemon);
    let head =
        format!("GET / HTTP/1.1\r\nhost: {}\r\nx-shoal-key: {}\r\n\r\n", host(&sandbox, 8002), sandbox.key);
    let mut open = Vec::new();
    // In steps, because only so many connections may be open before they have shown a key.
    while open.len() < AT_ONCE {
        for _ in 0..100 {
            let stream = TcpStream::connect(daemon.address).expect("it listens");
            (&stream).write_all(head.as_bytes()).expect("it is taken");
            open.push(stream);
        }
        until_true("all are connected", || uses(&sandbox) == open.len() as u64);
    }
    Seen::of(&by_path(&sandbox, HTTP, "GET", "/").send(daemon.address));
    drop(open);
    until_true("all were let go", || uses(&sandbox) == 0);
    sandbox.delete();
    daemon.expect_nothing_beyond(&empty);
    let sockets = std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).expect("it runs").flatten();
    let namespaces = sockets.filter(|entry| {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        target.to_string_lossy().starts_with("socket:")
    });
    assert!(namespaces.count() < 32, "kept sockets were closed");
}

/// The command line beside a daemon, until it is dropped.
struct Running {
    child: Child,
    said: mpsc::Receiver<String>,
}

impl Running {
    fn start(daemon: &Daemon, arguments: &[&str]) -> Self {
        let mut command = Command::new(binary());
        command.args(arguments).env("SHOAL_URL", format!("http://{}", daemon.address));
        command.env("SHOAL_API_KEY", &daemon.key).env("SHOAL_CONFIG", "").stdin(Stdio::null());
        let mut child =
            command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the program can be started");
        let stderr = child.stderr.take().expect("a pipe");
        let (send, said) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        Self { child, said }
    }

    /// The local address that leads to a port.
    fn address(&self, port: u16) -> SocketAddr {
        loop {
            let line = self.said.recv_timeout(DEADLINE).expect("it says what it forwards");
            if let Some(rest) = line.strip_prefix("forwarding ")
                && let Some((local, to)) = rest.split_once(" to port ")
                && to == port.to_string()
            {
                return local.parse().expect("an address");
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        send_signal(self.child.id() as i32, rustix::process::Signal::TERM);
        let _ = self.child.wait();
    }
}

#[test]
fn forwarded_ports_outlive_a_restart_of_the_daemon() {
    let mut daemon = Daemon::start();
    let sandbox = serving(&daemon);
    let forward = Running::start(&daemon, &["forward", &sandbox.id, "0:8000", "0:8005"]);
    let (http, echo) = (forward.address(HTTP), forward.address(8005));
    let get = || Request::new("GET", "/through").try_send(http);
    assert_eq!(Seen::of(&get().expect("it answers")).0["path"], "/through");
    let mut raw = TcpStream::connect(echo).expect("it listens");
    raw.write_all(b"any bytes \x00\xff").expect("it is taken");
    raw.shutdown(std::net::Shutdown::Write).expect("half of it");
    let mut back = Vec::new();
    raw.read_to_end(&mut back).expect("it comes back");
    assert_eq!(back, b"any bytes \x00\xff");
    daemon.keep_address();
    daemon.kill();
    let waiting = std::thread::spawn(move || Request::new("GET", "/later").try_send(http));
    daemon.start_again();
    let answer = waiting.join().expect("it does not panic").expect("it waited for the daemon");
    assert_eq!(Seen::of(&answer).0["path"], "/later");
}

#[test]
fn the_command_line_lists_ports_makes_links_and_forwards_what_a_command_listens_on() {
    let daemon = Daemon::start();
    let sandbox = serving(&daemon);
    let output = |arguments: &[&str]| {
        let mut command = Command::new(binary());
        command.args(arguments).env("SHOAL_URL", format!("http://{}", daemon.address));
        let output =
            command.env("SHOAL_API_KEY", &daemon.key).env("SHOAL_CONFIG", "").output().expect("it runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    };
    let listed: Value = serde_json::from_str(&output(&["ports", &sandbox.id, "--json"])).expect("JSON");
    let ports: Vec<u64> =
        listed["ports"].as_array().expect("a list").iter().filter_map(|port| port["port"].as_u64()).collect();
    assert_eq!(ports, [8000, 8001, 8002, 8003, 8004, 8005]);
    assert!(output(&["ports", &sandbox.id, "--wait", "8000"]).contains("127.0.0.1"));
    let url = output(&["url", &sandbox.id, "8000", "--ttl", "10m", "--label", "mine"]);
    let target = url.trim().split_once(&host(&sandbox, HTTP)).expect("it is of this host").1;
    Seen::of(&by_host(&sandbox, HTTP, "GET", target).send(daemon.address));
    let links = output(&["ports", &sandbox.id, "--links"]);
    let id = links.lines().nth(1).and_then(|line| line.split_whitespace().next()).expect("an id").to_owned();
    output(&["url", &sandbox.id, "--revoke", &id]);
    by_host(&sandbox, HTTP, "GET", target).send(daemon.address).expect_refusal(401, "unauthorized");

    let all = Running::start(&daemon, &["forward", &sandbox.id, "--all"]);
    let address = all.address(HTTP);
    Seen::of(&Request::new("GET", "/").send(address));
    let run = Running::start(&daemon, &["run", "-p", "0:8000", "--", "python3", "-c", SERVER]);
    let address = run.address(HTTP);
    let seen =
        until("the server of the command answers", || Request::new("GET", "/own").try_send(address).ok());
    assert_eq!(Seen::of(&seen).0["path"], "/own");
}
