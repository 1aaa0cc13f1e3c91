//! `GET /v1/events` and `shoal watch`: what happens to sandboxes, as it happens.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver};

use rustix::process::Signal;
use serde_json::{Value, json};
use shoal_tests::daemon::{binary, send_signal};
use shoal_tests::http::{ServerEvent, server_events};
use shoal_tests::{DEADLINE, Daemon, Request, until};

/// A stream of events, read by a thread until it ends.
struct Stream(Receiver<(String, Value)>);

impl Stream {
    fn open(address: SocketAddr, request: Request) -> Self {
        let answer = request.open(address).expect("it answers");
        assert_eq!((answer.status, answer.header("content-type")), (200, Some("text/event-stream")));
        let (send, receive) = mpsc::channel();
        std::thread::spawn(move || {
            // It ends with the test, or with the daemon.
            let _ = server_events(answer, |event: ServerEvent| {
                let _ = send.send((event.id.expect("every event has an id"), event.data));
            });
        });
        Self(receive)
    }

    #[track_caller]
    fn next(&self) -> (String, Value) {
        self.0.recv_timeout(DEADLINE).expect("an event comes")
    }

    /// The next event, as its type and what matters of it.
    #[track_caller]
    fn told(&self) -> String {
        let (_, event) = self.next();
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let detail = match event["type"].as_str().expect("a type") {
            "sandbox" => format!(" {} {}", text(&event["name"]), text(&event["state"])),
            "deleted" => format!(" {}", text(&event["name"])),
            "command_started" => format!(" {}", text(&event["command_id"])),
            "command_ended" => {
                format!(" {} {}", text(&event["command_id"]), text(&event["result"]["exit_code"]))
            }
            _ => String::new(),
        };
        assert!(
            matches!(event["type"].as_str(), Some("ready" | "missed")) || event["at"].is_string(),
            "{event}"
        );
        format!("{}{detail}", text(&event["type"]))
    }
}

fn watch(daemon: &Daemon, query: &str) -> Stream {
    Stream::open(daemon.address, daemon.request("GET", &format!("/v1/events{query}")))
}

fn watch_after(daemon: &Daemon, id: &str) -> Stream {
    Stream::open(daemon.address, daemon.request("GET", "/v1/events").header("Last-Event-ID", id))
}

#[test]
fn a_life_is_told_from_its_beginning_to_its_end() {
    let daemon = Daemon::start();
    let stream = watch(&daemon, "");
    assert_eq!(stream.told(), "ready");
    let sandbox = daemon.sandbox_with(json!({"name": "one"}));
    assert_eq!((stream.told(), stream.told()), ("sandbox one creating".into(), "sandbox one running".into()));
    let only = watch(&daemon, &format!("?sandbox={}", sandbox.id));
    assert_eq!(only.told(), "ready");
    sandbox.run(json!({"id": "c1", "script": "exit 3"}));
    for stream in [&stream, &only] {
        assert_eq!(
            (stream.told(), stream.told()),
            ("command_started c1".into(), "command_ended c1 3".into())
        );
    }
    let other = daemon.sandbox_with(json!({"name": "two"}));
    daemon
        .request("PATCH", &format!("/v1/sandboxes/{}", sandbox.id))
        .json(&json!({"name": "renamed"}))
        .send(daemon.address)
        .expect(200);
    sandbox.delete();
    for told in ["sandbox two creating", "sandbox two running"] {
        assert_eq!(stream.told(), told);
    }
    for stream in [&stream, &only] {
        for told in ["sandbox renamed running", "sandbox renamed deleting", "deleted renamed"] {
            assert_eq!(stream.told(), told);
        }
    }
    other.delete();
}

#[test]
fn a_stream_that_was_cut_goes_on_where_it_was() {
    let mut daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"name": "one"}));
    let stream = watch(&daemon, "");
    let (ready, _) = stream.next();
    sandbox.run(json!({"id": "c1", "argv": ["true"]}));
    let (started, _) = stream.next();
    drop(stream);
    sandbox.run(json!({"id": "c2", "argv": ["true"]}));
    let again = watch_after(&daemon, &started);
    for told in ["ready", "command_ended c1 0", "command_started c2", "command_ended c2 0"] {
        assert_eq!(again.told(), told);
    }
    let by_query = watch(&daemon, &format!("?last_event_id={ready}"));
    assert_eq!((by_query.told(), by_query.told()), ("ready".into(), "command_started c1".into()));
    // So it does after a restart of the daemon. What that one did not write it had told before it died.
    assert!(daemon.stop(), "the daemon ends well");
    daemon.start_again();
    let late = watch_after(&daemon, &started);
    for told in ["ready", "command_ended c1 0", "command_started c2", "command_ended c2 0"] {
        assert_eq!(late.told(), told);
    }
    daemon.sandbox_of(&sandbox.id).run(json!({"id": "c3", "argv": ["true"]}));
    assert_eq!(late.told(), "command_started c3");
    drop(late);
    // A killed daemon may not have stored its last events; the next daemon publishes what became of the sandbox.
    let (last, _) = watch(&daemon, "").next();
    daemon.sandbox_of(&sandbox.id).delete();
    daemon.crash();
    let after = watch_after(&daemon, &last);
    assert_eq!(after.told(), "ready");
    while after.told() != "deleted one" {}
    // A position that was never given is of other events.
    let foreign = watch_after(&daemon, "00000000000000ff-1");
    assert_eq!((foreign.told(), foreign.told()), ("ready".into(), "missed".into()));
}

#[test]
fn events_are_for_their_owner_and_nonsense_is_refused() {
    let daemon = Daemon::start();
    let made = daemon.post("/v1/keys", &json!({"owner": "alice"})).expect(201);
    let secret = made["secret"].as_str().expect("a secret").to_owned();
    let mine = watch(&daemon, "");
    let hers = Stream::open(daemon.address, Request::new("GET", "/v1/events").key(&secret));
    assert_eq!((mine.told(), hers.told()), ("ready".into(), "ready".into()));
    let sandbox = daemon.sandbox_with(json!({"name": "mine"}));
    assert_eq!(mine.told(), "sandbox mine creating");
    let hers_made = Request::new("POST", "/v1/sandboxes").key(&secret).json(&json!({"name": "hers"}));
    hers_made.send(daemon.address).expect(201);
    assert_eq!(hers.told(), "sandbox hers creating");
    let target = format!("/v1/events?sandbox={}", sandbox.id);
    Request::new("GET", &target).key(&secret).send(daemon.address).expect_refusal(404, "sandbox_not_found");
    Request::new("GET", "/v1/events").send(daemon.address).expect_refusal(401, "unauthorized");
    daemon.get("/v1/events?sandbox=nonsense").expect_refusal(400, "invalid_request");
    daemon.get("/v1/events?last_event_id=nonsense").expect_refusal(400, "invalid_request");
    daemon.get("/v1/events?colour=red").expect_refusal(400, "invalid_query");
}

#[test]
fn watch_shows_how_things_are_and_then_what_happens() {
    let mut daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"name": "work"}));
    let data_dir = daemon.data_dir.clone();
    let start = |arguments: &[&str]| {
        let mut child = Command::new(binary())
            .args(arguments)
            .env("SHOAL_DATA_DIR", &data_dir)
            .env_remove("SHOAL_URL")
            .env_remove("SHOAL_API_KEY")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        (child, lines.map(|line| line.expect("text")))
    };
    let (mut all, mut all_lines) = start(&["watch"]);
    let (mut one, mut one_lines) = start(&["watch", "--json", "work"]);
    let mut json_type = || -> String {
        let line = one_lines.next().expect("an event comes");
        serde_json::from_str::<Value>(&line).expect("JSON")["type"].as_str().expect("a type").to_owned()
    };
    let now = all_lines.next().expect("how things are");
    assert!(now.starts_with("now ") && now.ends_with("  work  running"), "{now}");
    assert_eq!(json_type(), "ready");
    sandbox.run(json!({"id": "c1", "script": "exit 5"}));
    let line = all_lines.next().expect("an event comes");
    assert!(line.contains("  work  command c1 started, pid "), "{line}");
    let line = all_lines.next().expect("an event comes");
    assert!(line.ends_with("  work  command c1 exited with 5"), "{line}");
    assert_eq!((json_type(), json_type()), ("command_started".into(), "command_ended".into()));
    // Both go on after a restart, and miss nothing.
    daemon.crash();
    daemon.sandbox_of(&sandbox.id).run(json!({"id": "c2", "argv": ["true"]}));
    assert!(all_lines.any(|line| line.ends_with("  work  command c2 exited with 0")));
    assert_eq!((json_type(), json_type()), ("command_started".into(), "command_ended".into()));
    daemon.sandbox_of(&sandbox.id).delete();
    assert!(all_lines.any(|line| line.ends_with("  work  deleted")));
    assert_eq!((json_type(), json_type()), ("sandbox".into(), "deleted".into()));
    let status = until("the watch of one ends with it", || one.try_wait().expect("a child can be asked"));
    assert!(status.success(), "{status}");
    assert!(all.try_wait().expect("a child can be asked").is_none(), "the watch of all continues");
    send_signal(all.id() as i32, Signal::INT);
    let status = until("Ctrl-C ends it", || all.try_wait().expect("a child can be asked"));
    assert_eq!(status.code(), Some(130));
}

/// A receiver of webhooks on loopback: answers each request with the next of some statuses, and keeps what came.
struct Hook {
    address: SocketAddr,
    received: Receiver<(String, String)>,
}

impl Hook {
    /// The last status is that of all later requests.
    fn start(statuses: &'static [u16]) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a socket");
        let address = listener.local_addr().expect("an address");
        let (send, received) = mpsc::channel();
        std::thread::spawn(move || {
            for (number, stream) in listener.incoming().enumerate() {
                let status = statuses[number.min(statuses.len() - 1)];
                let Some(request) = stream.ok().and_then(|stream| answered(stream, status)) else { continue };
                if send.send(request).is_err() {
                    return; // The test is over.
                }
            }
        });
        Self { address, received }
    }

    /// The head and the body of the next request.
    #[track_caller]
    fn next(&self) -> (String, Value) {
        let (head, body) = self.received.recv_timeout(DEADLINE).expect("a request comes");
        (head, serde_json::from_str(&body).expect("JSON"))
    }
}

/// Reads a request and answers it.
fn answered(mut stream: std::net::TcpStream, status: u16) -> Option<(String, String)> {
    use std::io::{Read, Write};
    let mut bytes = Vec::new();
    let (head, length) = loop {
        let mut some = [0; 4096];
        let count = stream.read(&mut some).ok().filter(|count| *count > 0)?;
        bytes.extend_from_slice(&some[..count]);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, _)) = text.split_once("\r\n\r\n") {
            let head = head.to_ascii_lowercase();
            let length =
                head.lines().find_map(|line| line.strip_prefix("content-length: ")).expect("a length");
            break (head.clone(), length.trim().parse::<usize>().expect("a number"));
        }
    };
    let begun = head.len() + 4;
    while bytes.len() < begun + length {
        let mut some = [0; 4096];
        let count = stream.read(&mut some).ok().filter(|count| *count > 0)?;
        bytes.extend_from_slice(&some[..count]);
    }
    let answer = format!(
        "HTTP/1.1 {status} x\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    );
    stream.write_all(answer.as_bytes()).ok()?;
    Some((head, String::from_utf8(bytes[begun..].to_vec()).expect("text")))
}

#[test]
fn a_webhook_is_told_in_order_and_again_until_it_accepts_and_after_a_restart() {
    let mut daemon = Daemon::start();
    // It is down, and leads elsewhere, before it accepts.
    let receiver = Hook::start(&[500, 302, 204]);
    let url = format!("http://{}/hook?x=1", receiver.address);
    let made =
        daemon.post("/v1/webhooks", &json!({"url": url, "events": ["sandbox", "deleted"]})).expect(201);
    let id = made["id"].as_str().expect("an id").to_owned();
    assert!(made["secret"].as_str().expect("a secret").starts_with("whsec_"));
    let sandbox = daemon.sandbox_with(json!({"name": "one"}));
    sandbox.run(json!({"id": "c1", "argv": ["true"]}));
    let (head, first) = receiver.next();
    assert!(head.starts_with("post /hook?x=1 http/1.1"), "{head}");
    for header in ["webhook-id: ", "webhook-timestamp: ", "webhook-signature: v1,"] {
        assert!(head.contains(header), "{head}");
    }
    assert_eq!((first["type"].as_str(), first["state"].as_str()), (Some("sandbox"), Some("creating")));
    for _ in 0..2 {
        let (_, again) = receiver.next();
        assert_eq!(again, first, "the same event under the same id");
    }
    let (_, second) = receiver.next();
    assert_eq!(second["state"], "running");
    until("it has come so far", || {
        let shown = daemon.get(&format!("/v1/webhooks/{id}")).expect(200);
        (shown["failed_attempts"] == 0 && shown["delivered_at"].is_string()).then_some(())
    });
    assert!(daemon.stop(), "the daemon ends well");
    daemon.start_again();
    daemon.sandbox_of(&sandbox.id).delete();
    let next = || receiver.next().1;
    // What was delivered may come once more, if the daemon had no time to write it.
    let mut told = next();
    while told["state"] == "running" {
        told = next();
    }
    assert_eq!(told["state"], "deleting");
    assert_eq!(next()["type"], "deleted", "commands were not asked for");
    let tested = daemon.post(&format!("/v1/webhooks/{id}/test"), &json!({})).expect(200);
    assert_eq!(tested["delivered"], true, "{tested}");
    assert_eq!(next()["type"], "test");
    assert_eq!(daemon.get(&format!("/v1/webhooks/{id}/dead-letters")).expect(200)["dead_letters"], json!([]));
    assert_eq!(daemon.delete(&format!("/v1/webhooks/{id}")).status, 204);
    daemon.get(&format!("/v1/webhooks/{id}")).expect_refusal(404, "webhook_not_found");
}

#[test]
fn only_an_operator_may_send_events_to_closed_addresses() {
    let daemon = Daemon::start();
    let made = daemon.post("/v1/keys", &json!({"owner": "alice"})).expect(201);
    let secret = made["secret"].as_str().expect("a secret").to_owned();
    for url in
        ["http://127.0.0.1:1/", "http://[::1]/", "http://169.254.169.254/", "http://localhost/", "ftp://x/"]
    {
        let asked = Request::new("POST", "/v1/webhooks").key(&secret).json(&json!({"url": url}));
        asked.send(daemon.address).expect_refusal(400, "invalid_request");
    }
    let asked = daemon.post("/v1/webhooks", &json!({"url": "http://127.0.0.1:1/", "events": ["lunch"]}));
    asked.expect_refusal(400, "invalid_request");
    let mine = daemon.post("/v1/webhooks", &json!({"url": "http://127.0.0.1:1/"})).expect(201);
    let path = format!("/v1/webhooks/{}", mine["id"].as_str().expect("an id"));
    Request::new("GET", &path).key(&secret).send(daemon.address).expect_refusal(404, "webhook_not_found");
    let tested = daemon.post(&format!("{path}/test"), &json!({})).expect(200);
    assert_eq!(tested["delivered"], false, "{tested}");
}
