//! The life of a sandbox through the API: create, get, list, rename, delete, and every rejected request.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::{Value, json};
use shoal_tests::wait::until_true;
use shoal_tests::{Daemon, Request, until};

/// A well-formed id that belongs to nothing.
const NOBODY: &str = "00000000-0000-4000-8000-000000000000";

#[test]
fn a_sandbox_is_created_read_listed_renamed_and_deleted() {
    let daemon = Daemon::start();
    let mut made =
        daemon.post("/v1/sandboxes", &json!({"name": "första", "env": {"COLOUR": "blue"}})).expect(201);
    // Fields that only the response to a create has.
    let created = made.as_object_mut().expect("an object").remove("created");
    assert_eq!(created, Some(true.into()));
    assert_eq!(made["name"], "första");
    assert_eq!(made["state"], "running");
    assert_eq!(made["template"], "default");
    assert_eq!(made["image"], "host");
    assert_eq!(made["env"], json!({"COLOUR": "blue"}));
    for limit in ["cpu_millis", "memory_bytes", "pids"] {
        assert!(made["limits"][limit].as_u64().is_some_and(|value| value > 0), "{made}");
    }
    let sandbox = daemon.sandbox_of(made["id"].as_str().expect("an id"));
    assert_eq!(sandbox.get(), made);
    assert_eq!(daemon.list(), std::slice::from_ref(&made));

    let renamed =
        sandbox.request("PATCH", "").json(&json!({"name": "second"})).send(daemon.address).expect(200);
    assert_eq!(renamed["name"], "second");
    assert_eq!(sandbox.get()["name"], "second");
    assert_eq!(sandbox.sh("echo $COLOUR").ok().text(), "blue");

    sandbox.delete();
    daemon.get(&sandbox.path("")).expect_refusal(404, "sandbox_not_found");
    assert_eq!(daemon.list(), [] as [Value; 0]);
}

#[test]
fn an_empty_request_makes_a_sandbox_with_a_generated_name() {
    let daemon = Daemon::start();
    let made = daemon.post("/v1/sandboxes", &json!({})).expect(201);
    let name = made["name"].as_str().expect("a name");
    assert!(!name.is_empty() && name.len() <= 255, "{name}");
    let other = daemon.request("POST", "/v1/sandboxes").send(daemon.address).expect(201);
    assert_ne!(made["name"], other["name"]);
    assert_ne!(made["id"], other["id"]);
}

#[test]
fn limits_are_taken_as_quantities_and_told_as_numbers() {
    let daemon = Daemon::start();
    let made = daemon.post("/v1/sandboxes", &json!({"cpu": "500m", "memory": "256Mi"})).expect(201);
    assert_eq!(made["limits"]["cpu_millis"], 500);
    assert_eq!(made["limits"]["memory_bytes"], 256 << 20);
}

#[test]
fn a_create_that_does_not_wait_answers_at_once_and_runs_soon() {
    let daemon = Daemon::start();
    let answer = daemon.post("/v1/sandboxes", &json!({"wait": false}));
    assert!(matches!(answer.status, 201 | 202), "{}", answer.describe());
    let made = answer.json();
    assert!(made["state"] == "creating" || made["state"] == "running", "{made}");
    let sandbox = daemon.sandbox_of(made["id"].as_str().expect("an id"));
    until("the sandbox runs", || Some(()).filter(|()| sandbox.get()["state"] == "running"));
    assert_eq!(sandbox.sh("echo here").ok().text(), "here");
}

#[test]
fn a_command_in_a_sandbox_that_is_being_made_waits_or_is_refused_with_its_state() {
    let daemon = Daemon::start();
    let made = daemon.post("/v1/sandboxes", &json!({"wait": false})).json();
    let sandbox = daemon.sandbox_of(made["id"].as_str().expect("an id"));
    let answer = sandbox.post_command(&json!({"argv": ["true"]}));
    match answer.status {
        200 => assert_eq!(answer.json()["result"]["exit_code"], 0),
        _ => assert_eq!(answer.expect_refusal(409, "wrong_state")["details"]["state"], "creating"),
    }
}

#[test]
fn a_delete_in_the_middle_of_a_create_leaves_nothing() {
    let daemon = Daemon::start();
    daemon.sandbox().delete();
    let before = daemon.audit();
    for _ in 0..10 {
        let made = daemon.post("/v1/sandboxes", &json!({"wait": false})).json();
        daemon.sandbox_of(made["id"].as_str().expect("an id")).delete();
    }
    assert_eq!(daemon.list(), [] as [Value; 0]);
    daemon.expect_nothing_beyond(&before);
}

#[test]
fn deleting_twice_is_harmless_or_not_found() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    sandbox.delete();
    daemon.delete(&sandbox.path("")).expect_refusal(404, "sandbox_not_found");
    daemon.delete(&format!("/v1/sandboxes/{NOBODY}")).expect_refusal(404, "sandbox_not_found");
}

#[test]
fn deletes_at_the_same_time_all_end_well() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let answers: Vec<u16> = std::thread::scope(|scope| {
        let asking: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| sandbox.request("DELETE", "").send(sandbox.address).status))
            .collect();
        asking.into_iter().map(|one| one.join().expect("no thread panics")).collect()
    });
    assert!(answers.iter().all(|status| matches!(status, 204 | 404)), "{answers:?}");
    assert!(answers.contains(&204), "{answers:?}");
}

#[test]
fn one_idempotency_key_makes_one_sandbox() {
    let daemon = Daemon::start();
    let ask = |body: Value| {
        daemon
            .request("POST", "/v1/sandboxes")
            .header("idempotency-key", "order-66")
            .json(&body)
            .send(daemon.address)
    };
    let answers: Vec<Value> = std::thread::scope(|scope| {
        let asking: Vec<_> = (0..6).map(|_| scope.spawn(|| ask(json!({"name": "once"})))).collect();
        asking
            .into_iter()
            .map(|one| one.join().expect("no thread panics"))
            .map(|answer| {
                assert!(matches!(answer.status, 200 | 201), "{}", answer.describe());
                answer.json()
            })
            .collect()
    });
    let ids: BTreeSet<String> = answers.iter().map(|made| made["id"].to_string()).collect();
    assert_eq!(ids.len(), 1, "{ids:?}");
    assert_eq!(daemon.list().len(), 1);
    ask(json!({"name": "other"})).expect_refusal(409, "idempotency_key_reused");
}

#[test]
fn an_idempotency_key_holds_over_a_crash() {
    let mut daemon = Daemon::start();
    let ask = |daemon: &Daemon| {
        let request =
            daemon.request("POST", "/v1/sandboxes").header("idempotency-key", "again").json(&json!({}));
        request.send(daemon.address).json()["id"].clone()
    };
    let first = ask(&daemon);
    daemon.crash();
    assert_eq!(ask(&daemon), first);
    assert_eq!(daemon.list().len(), 1);
}

#[test]
fn a_name_is_unique_among_the_living() {
    let daemon = Daemon::start();
    let first = daemon.sandbox_with(json!({"name": "taken"}));
    daemon.post("/v1/sandboxes", &json!({"name": "taken"})).expect_refusal(409, "name_taken");
    let second = daemon.sandbox_with(json!({"name": "free"}));
    second
        .request("PATCH", "")
        .json(&json!({"name": "taken"}))
        .send(daemon.address)
        .expect_refusal(409, "name_taken");
    assert_eq!(second.get()["name"], "free");
    first.delete();
    daemon.sandbox_with(json!({"name": "taken"}));
}

#[test]
fn a_name_is_free_text_and_never_a_path() {
    let daemon = Daemon::start();
    let long = "x".repeat(255);
    let names = ["...", "名前", "%2e%2e%2f", "';drop-table-sandboxes;--", &long];
    for name in names {
        let made = daemon.post("/v1/sandboxes", &json!({"name": name})).expect(201);
        assert_eq!(made["name"], name);
    }
    assert_eq!(daemon.list().len(), names.len());
    // In the path of a URL these lead elsewhere, and in a shell or in `SANDBOX:/path` they mean something else.
    for name in [".", "..", "../../etc/passwd", "/", "a/b", "a:b", " ", "a b", "-x"] {
        daemon.post("/v1/sandboxes", &json!({"name": name})).expect_refusal(400, "invalid_request");
    }
}

#[test]
fn pages_hold_every_sandbox_once_newest_first() {
    let daemon = Daemon::start();
    let mut made: Vec<String> = (0..7).map(|_| daemon.sandbox().id).collect();
    made.reverse();
    let (mut seen, mut target) = (Vec::new(), "/v1/sandboxes?limit=3".to_owned());
    loop {
        let page = daemon.get(&target).expect(200);
        let ids: Vec<&str> = page["sandboxes"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|one| one["id"].as_str().expect("an id"))
            .collect();
        assert!(ids.len() <= 3, "{ids:?}");
        seen.extend(ids.into_iter().map(str::to_owned));
        let Some(cursor) = page["next_cursor"].as_str() else { break };
        target = format!("/v1/sandboxes?limit=3&cursor={cursor}");
    }
    assert_eq!(seen, made);
}

#[test]
fn a_bad_cursor_or_limit_is_refused() {
    let daemon = Daemon::start();
    for query in [
        "limit=0",
        "limit=-1",
        "limit=x",
        "limit=99999999999999999999",
        "cursor=%00",
        "cursor=zzz",
        "colour=red",
    ] {
        let answer = daemon.get(&format!("/v1/sandboxes?{query}"));
        assert_eq!(answer.status, 400, "{query}: {}", answer.describe());
        assert!(answer.json()["code"].is_string(), "{query}: {}", answer.describe());
    }
}

/// Sends a body for a new sandbox that must be rejected.
#[track_caller]
fn refused(daemon: &Daemon, body: Value) {
    let answer = daemon.post("/v1/sandboxes", &body);
    let shown: String = body.to_string().chars().take(100).collect();
    assert_eq!(answer.status, 400, "{shown}: {}", answer.describe());
    let told = answer.expect_refusal(400, "invalid_request");
    assert!(told["details"]["field"].is_string(), "{shown}: {}", answer.describe());
}

#[test]
fn every_wrong_field_of_a_create_is_refused_by_name() {
    let daemon = Daemon::start();
    for name in [
        json!(""),
        json!("x".repeat(256)),
        json!("a\u{0}b"),
        json!("a\nb"),
        json!("\u{7f}"),
        json!(7),
        json!([]),
        json!({}),
    ] {
        refused(&daemon, json!({"name": name}));
    }
    for cpu in ["", "0", "-1", "many", "1e9", "999999999999999999999", "1.0001", "0.5m", " 1", "1 "] {
        refused(&daemon, json!({"cpu": cpu}));
    }
    for memory in ["", "0", "-1Mi", "lots", "1", "99999999999Gi", "1Xi", "Mi"] {
        refused(&daemon, json!({"memory": memory}));
    }
    refused(&daemon, json!({"cpu": 1}));
    refused(&daemon, json!({"memory": 1_000_000}));
    refused(&daemon, json!({"wait": "yes"}));
    refused(&daemon, json!({"colour": "red"}));
    refused(&daemon, json!({"template": 7}));
    for env in [
        json!([]),
        json!("A=b"),
        json!({"A": 1}),
        json!({"": "x"}),
        json!({"A=B": "x"}),
        json!({"A\u{0}": "x"}),
        json!({"A": "x\u{0}"}),
    ] {
        refused(&daemon, json!({"env": env}));
    }
    refused(&daemon, json!({"env": {"A": "x".repeat(4 << 20 >> 3)}}));
    assert_eq!(daemon.list(), [] as [Value; 0], "nothing was made");
}

#[test]
fn an_unknown_template_is_not_found() {
    let daemon = Daemon::start();
    for template in ["nonsense", "../default", "/etc", "DEFAULT"] {
        daemon
            .post("/v1/sandboxes", &json!({"template": template}))
            .expect_refusal(404, "template_not_found");
    }
}

#[test]
fn bodies_that_are_not_json_are_refused() {
    let daemon = Daemon::start();
    let send = |body: &[u8]| {
        daemon
            .request("POST", "/v1/sandboxes")
            .header("content-type", "application/json")
            .body(body)
            .send(daemon.address)
    };
    for body in
        [&b"{"[..], b"nul", b"{} {}", b"\xff\xfe", b"{\"name\": \"\xff\"}", b"{\"name\":\"\\ud800\"}", b"'"]
    {
        let answer = send(body);
        assert_eq!(answer.status, 400, "{body:?}: {}", answer.describe());
    }
    for body in [&b"[]"[..], b"7", b"\"text\"", b"null", b"{\"name\":\"a\",\"name\":\"b\"}"] {
        let answer = send(body);
        assert_eq!(answer.status, 400, "{body:?}: {}", answer.describe());
    }
    let deep = format!("{{\"env\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert_eq!(send(deep.as_bytes()).status, 400);
    let huge = format!("{{\"name\":\"{}\"}}", "x".repeat(8 << 20));
    send(huge.as_bytes()).expect_refusal(413, "body_too_large");
    let wide = format!(
        "{{\"env\":{{{}}}}}",
        (0..100_000).map(|n| format!("\"A{n}\":\"\"")).collect::<Vec<_>>().join(",")
    );
    let answer = send(wide.as_bytes());
    assert!(matches!(answer.status, 400 | 413), "{}", answer.describe());
    assert_eq!(daemon.list(), [] as [Value; 0], "nothing was made");
}

#[test]
fn a_body_that_is_not_called_json_is_refused() {
    let daemon = Daemon::start();
    for kind in
        ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx", ""]
    {
        let answer = daemon
            .request("POST", "/v1/sandboxes")
            .header("content-type", kind)
            .body("{}")
            .send(daemon.address);
        answer.expect_refusal(415, "unsupported_media_type");
    }
    daemon
        .request("POST", "/v1/sandboxes")
        .body("{}")
        .send(daemon.address)
        .expect_refusal(415, "unsupported_media_type");
    daemon
        .request("POST", "/v1/sandboxes")
        .header("content-type", "Application/JSON; charset=utf-8")
        .body("{}")
        .send(daemon.address)
        .expect(201);
}

#[test]
fn unknown_routes_and_wrong_methods_are_told_apart() {
    let daemon = Daemon::start();
    for target in [
        "/v1",
        "/v3/sandboxes",
        "/v1/sandboxes/",
        "/v1/nothing",
        "/v1/../etc/passwd",
        "/%2e%2e/",
        "//v1/sandboxes",
    ] {
        daemon.get(target).expect_refusal(404, "route_not_found");
    }
    // Paths at the root that a foreign client requires are rejected in that client's format.
    let foreign = daemon.get("/v2/sandboxes");
    assert_eq!((foreign.status, foreign.json()["detail"]["error"].as_str()), (404, Some("NotFound")));
    for (method, target) in [
        ("PUT", "/v1/sandboxes"),
        ("DELETE", "/v1/sandboxes"),
        ("POST", "/v1/version"),
        ("PATCH", "/v1/health"),
        ("BREW", "/v1/sandboxes"),
    ] {
        let answer = daemon.request(method, target).send(daemon.address);
        answer.expect_refusal(405, "method_not_allowed");
        assert!(answer.headers.iter().any(|(name, _)| name == "allow"), "{method} {target}");
    }
}

#[test]
fn ids_in_paths_are_checked() {
    let daemon = Daemon::start();
    for id in
        ["x", "..%2f..%2fetc", "%00", &NOBODY.to_uppercase().replace('0', "A"), &"a".repeat(5_000), "%ff"]
    {
        let answer = daemon.get(&format!("/v1/sandboxes/{id}"));
        assert!(matches!(answer.status, 400 | 404), "{id}: {}", answer.describe());
        assert!(answer.json()["code"].is_string(), "{}", answer.describe());
    }
    let name = daemon.get("/v1/sandboxes/work");
    assert!(name.json()["hint"].as_str().is_some_and(|hint| hint.contains("?name=")), "{}", name.describe());
    daemon.get(&format!("/v1/sandboxes/{NOBODY}")).expect_refusal(404, "sandbox_not_found");
    daemon.get(&format!("/v1/sandboxes/{NOBODY}/commands")).expect_refusal(404, "sandbox_not_found");
    daemon
        .post(&format!("/v1/sandboxes/{NOBODY}/commands"), &json!({"argv": ["true"]}))
        .expect_refusal(404, "sandbox_not_found");
}

#[test]
fn a_rename_is_checked_like_a_name() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"name": "kept"}));
    for body in [json!({"name": ""}), json!({"name": "a\tb"}), json!({"name": 1}), json!({"state": "paused"})]
    {
        let answer = sandbox.request("PATCH", "").json(&body).send(daemon.address);
        assert_eq!(answer.status, 400, "{body}: {}", answer.describe());
    }
    assert_eq!(sandbox.get()["name"], "kept");
}

#[test]
fn health_readiness_and_version_answer() {
    let daemon = Daemon::start();
    assert_eq!(daemon.get("/v1/health").expect(200)["status"], "ok");
    assert_eq!(daemon.get("/v1/ready").expect(200)["status"], "ok");
    let version = daemon.get("/v1/version").expect(200);
    assert!(version["version"].is_string() && version["api"].is_string(), "{version}");
}

#[test]
fn the_openapi_document_names_every_route_that_the_tests_use() {
    let daemon = Daemon::start();
    let document = daemon.get("/v1/openapi.json").expect(200);
    assert!(
        document["openapi"].as_str().is_some_and(|version| version.starts_with("3.1")),
        "{}",
        document["openapi"]
    );
    let paths: Vec<&String> = document["paths"].as_object().expect("paths").keys().collect();
    for end in [
        "/v1/sandboxes",
        "/commands",
        "/commands/stream",
        "/stream",
        "/events",
        "/stdin",
        "/signal",
        "/kill",
        "/v1/keys",
    ] {
        assert!(paths.iter().any(|path| path.ends_with(end)), "{end} is not in {paths:?}");
    }
}

/// The daemon's response to these bytes, until it closes.
fn tell(daemon: &Daemon, bytes: &[u8]) -> String {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(daemon.address).expect("the daemon listens");
    stream.write_all(bytes).expect("the socket is open");
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8(answer).expect("answers are text")
}

/// Asserts that an error response says why, in the common format.
#[track_caller]
fn has_words(asked: &[u8], answer: &[u8]) {
    let answer = String::from_utf8_lossy(answer);
    // Bytes that are not HTTP get a bare status.
    if let Some((_, body)) = answer.split_once("\r\n\r\n").filter(|(_, body)| !body.is_empty()) {
        let body: Value =
            serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {asked:?} got {answer}"));
        assert!(body["code"].is_string() && body["message"].is_string(), "{asked:?} got {answer}");
    }
}

#[test]
fn garbage_on_the_port_does_not_disturb_the_daemon() {
    use std::io::{Read, Write};
    let daemon = Daemon::start();
    for bytes in [
        &b"\x00\x01\x02\x03"[..],
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/sandboxes HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/sandboxes HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ] {
        let mut stream = std::net::TcpStream::connect(daemon.address).expect("the daemon listens");
        stream.write_all(bytes).expect("the socket is open");
        stream.shutdown(std::net::Shutdown::Write).expect("the socket is open");
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(!answer.starts_with(b"HTTP/1.1 2") && !answer.starts_with(b"HTTP/1.1 500"), "{bytes:?}");
        has_words(bytes, &answer);
    }
    let many: String = (0..20_000).map(|n| format!("x-{n}: y\r\n")).collect();
    let mut stream = std::net::TcpStream::connect(daemon.address).expect("the daemon listens");
    let _ = stream.write_all(format!("GET /v1/health HTTP/1.1\r\nhost: localhost\r\n{many}\r\n").as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP/1.1 2"), "headers are bounded");
    let answer = tell(&daemon, b"GET / HTTP/1.1\r\nhost: localhost\r\nbad header\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    let many: String = (0..100).map(|n| format!("x-{n}: y\r\n")).collect();
    let answer = tell(
        &daemon,
        format!("GET /v1/health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{many}\r\n").as_bytes(),
    );
    assert!(
        answer.starts_with("HTTP/1.1 431 ") && answer.contains("\"code\":\"headers_too_large\""),
        "{answer}"
    );
    daemon.get("/v1/health").expect(200);
}

#[test]
fn clients_that_never_finish_their_request_disturb_nobody() {
    use std::io::Write;
    let daemon = Daemon::start();
    let slow: Vec<_> = (0..200)
        .map(|_| {
            let mut stream = std::net::TcpStream::connect(daemon.address).expect("the daemon listens");
            stream.write_all(b"POST /v1/sandboxes HTTP/1.1\r\nhost: local").expect("the socket is open");
            stream
        })
        .collect();
    assert_eq!(daemon.sandbox().sh("echo fine").ok().text(), "fine");
    drop(slow);
}

#[test]
fn a_second_daemon_on_the_data_directory_refuses_clearly() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let said = daemon.try_start(&daemon.home.join("second.log")).expect_err("the second must not start");
    assert!(said.contains(daemon.data_dir.to_str().expect("a plain path")), "{said}");
    let lower = said.to_lowercase();
    assert!(lower.contains("another") || lower.contains("already") || lower.contains("in use"), "{said}");
    assert_eq!(sandbox.sh("echo unharmed").ok().text(), "unharmed");
}

#[test]
fn sigterm_leaves_sandboxes_running_and_a_restart_adopts_them() {
    let mut daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"name": "survivor"}));
    sandbox.sh("echo kept > /workspace/file; mkfifo /tmp/gate").ok();
    // Waits without starting anything, so that the same processes exist before and after.
    let command = sandbox.spawn(json!({"script": "read line < /tmp/gate; echo went"}));
    sandbox.running(&command);
    let before = sandbox.processes();
    assert!(daemon.stop(), "SIGTERM ends the daemon with success");
    assert!(before.iter().all(|process| !shoal_tests::audit::is_dead(*process)), "all processes live");
    daemon.start_again();
    let sandbox = daemon.sandbox_of(&sandbox.id);
    assert_eq!(sandbox.get()["state"], "running");
    assert_eq!(sandbox.get()["name"], "survivor");
    assert_eq!(sandbox.sh("cat /workspace/file").ok().text(), "kept");
    sandbox.sh("echo go > /tmp/gate").ok();
    assert_eq!(sandbox.ended(&command)["result"]["exit_code"], 0);
    assert_eq!(sandbox.output(&command).stdout, b"went\n");
}

#[test]
fn sigterm_ends_the_daemon_while_clients_hang_on_it() {
    let mut daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let mut socket = sandbox.stream(json!({"argv": ["sleep", "1000"]}));
    socket.wait_for("command");
    let waiting = {
        let sandbox = sandbox.clone();
        std::thread::spawn(move || {
            sandbox
                .request("POST", "/commands")
                .json(&json!({"argv": ["sleep", "1000"]}))
                .try_send(sandbox.address)
        })
    };
    until_true("both commands run", || {
        let list = daemon.get(&sandbox.path("/commands")).expect(200);
        list["commands"]
            .as_array()
            .is_some_and(|list| list.iter().filter(|one| one["pid"].is_u64()).count() == 2)
    });
    assert!(daemon.stop(), "SIGTERM ends the daemon with success");
    // Whatever the client got must not be a made-up result.
    if let Ok(answer) = waiting.join().expect("no thread panics") {
        assert_ne!(answer.status, 200, "{}", answer.describe());
    }
}

#[test]
fn the_data_directory_and_the_key_are_closed_to_others() {
    use std::os::unix::fs::PermissionsExt;
    let daemon = Daemon::start();
    let mode =
        |path: &std::path::Path| std::fs::metadata(path).expect("it exists").permissions().mode() & 0o777;
    assert_eq!(mode(&daemon.data_dir) & 0o077, 0, "the data directory is open to others");
}

#[test]
fn a_wrong_setting_ends_the_start_with_a_sentence() {
    let home = shoal_tests::daemon::Home::new();
    let serve = |arguments: &[&str]| {
        let output = Command::new(shoal_tests::daemon::binary())
            .args(["serve", "--data-dir"])
            .arg(home.join("data"))
            .args(arguments)
            .stdin(std::process::Stdio::null())
            .output()
            .expect("the program can be started");
        assert!(!output.status.success(), "{arguments:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(serve(&["--listen", "nowhere"]).contains("listen"));
    assert!(serve(&["--listen", "0.0.0.0:0"]).to_lowercase().contains("tls"), "beyond loopback needs TLS");
    let file = home.join("shoal.toml");
    std::fs::write(&file, "listn = \"127.0.0.1:1\"\n").expect("a file");
    assert!(serve(&["--config", file.to_str().expect("a plain path")]).contains("listn"));
}

#[test]
fn every_answer_carries_a_request_id_that_the_log_knows() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let answer = sandbox.post_command(&json!({"argv": ["true"]}));
    let (_, id) = answer.headers.iter().find(|(name, _)| name == "x-request-id").expect("an id").clone();
    until_true("the log names the request and the sandbox", || {
        daemon.logs().lines().any(|line| line.contains(&id) && line.contains(&sandbox.id))
    });
    // A caller's text must not become a second line of the log.
    let evil = Request::new("GET", "/v1/health")
        .key(&daemon.key)
        .header("x-request-id", "a b; forged")
        .send(daemon.address);
    assert!(evil.status < 500);
}
