//! Who may do what: keys, owners, and web pages that must not call the API.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use serde_json::{Value, json};
use shoal_tests::{Daemon, Request, Sandbox, Socket};

/// Every route that names a sandbox, and some that do not, with a valid method and body.
fn routes(sandbox: &str, command: &str) -> Vec<(&'static str, String, Option<Value>)> {
    let base = format!("/v1/sandboxes/{sandbox}");
    vec![
        ("GET", base.clone(), None),
        ("PATCH", base.clone(), Some(json!({"name": "stolen"}))),
        ("GET", format!("{base}/commands"), None),
        ("POST", format!("{base}/commands"), Some(json!({"argv": ["true"]}))),
        ("GET", format!("{base}/commands/{command}"), None),
        ("GET", format!("{base}/commands/{command}/events"), None),
        ("POST", format!("{base}/commands/{command}/stdin"), None),
        ("POST", format!("{base}/commands/{command}/stdin/end"), None),
        ("POST", format!("{base}/commands/{command}/signal"), Some(json!({"signal": "TERM"}))),
        ("POST", format!("{base}/commands/{command}/kill"), None),
        ("DELETE", base, None),
    ]
}

fn ask(
    daemon: &Daemon,
    key: Option<&str>,
    method: &str,
    target: &str,
    body: &Option<Value>,
) -> shoal_tests::Response {
    let mut request = Request::new(method, target);
    if let Some(key) = key {
        request = request.key(key);
    }
    if let Some(body) = body {
        request = request.json(body);
    }
    request.send(daemon.address)
}

fn start() -> (Daemon, Sandbox, String) {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let command = sandbox.spawn(json!({"argv": ["sleep", "1000"], "stdin": true}));
    sandbox.running(&command);
    (daemon, sandbox, command)
}

#[test]
fn without_a_key_nothing_is_told() {
    let (daemon, sandbox, command) = start();
    let mut all = routes(&sandbox.id, &command);
    for target in [
        "/v1/sandboxes",
        "/v1/version",
        "/v1/openapi.json",
        "/v1/keys",
        "/nothing",
        "/v1/healthy",
        "/v1/health/",
        "//",
        "/v1/sandboxes/nonsense",
    ] {
        all.push(("GET", target.into(), None));
    }
    let wrong = daemon.key.replace(|c: char| c.is_ascii_digit(), "0");
    let short = &daemon.key[..daemon.key.len() - 1];
    let long = format!("{}x", daemon.key);
    for (method, target, body) in &all {
        for key in [None, Some(wrong.as_str()), Some(short), Some(long.as_str()), Some(""), Some("null")] {
            let answer = ask(&daemon, key, method, target, body);
            answer.expect_refusal(401, "unauthorized");
        }
    }
    assert_eq!(sandbox.get()["state"], "running");
    assert_eq!(sandbox.command(&command)["state"], "running");
}

#[test]
fn a_key_in_the_url_or_twice_is_nobodys() {
    let daemon = Daemon::start();
    for query in ["key", "api_key", "token", "access_token"] {
        let answer = Request::new("GET", &format!("/v1/version?{query}={}", daemon.key)).send(daemon.address);
        answer.expect_refusal(401, "unauthorized");
    }
    let twice = Request::new("GET", "/v1/version").key(&daemon.key).key("other").send(daemon.address);
    twice.expect_refusal(401, "unauthorized");
    Request::new("GET", "/v1/version").header("x-api-key", &daemon.key).send(daemon.address).expect(200);
}

#[test]
fn probes_and_browsers_need_no_key_and_learn_nothing() {
    let daemon = Daemon::start();
    daemon.sandbox_with(json!({"name": "secret-name"}));
    for path in ["/v1/health", "/v1/ready"] {
        let answer = Request::new("GET", path).send(daemon.address);
        assert_eq!(answer.expect(200), json!({"status": "ok"}), "{path}");
        // A probe with a wrong key is still a probe.
        Request::new("GET", path).key("wrong").send(daemon.address).expect(200);
        Request::new("POST", path).send(daemon.address).expect_refusal(405, "method_not_allowed");
    }
    for (accept, kind) in [("text/html,*/*", "text/html"), ("*/*", "text/plain")] {
        let answer = Request::new("GET", "/").header("accept", accept).send(daemon.address);
        assert_eq!(answer.status, 200);
        assert!(answer.header("content-type").is_some_and(|value| value.starts_with(kind)), "{answer:?}");
        let text = String::from_utf8_lossy(&answer.body).into_owned();
        assert!(text.contains("This is a Shoal daemon") && text.contains("/v1"), "{text}");
        for hidden in ["secret-name", env!("CARGO_PKG_VERSION"), daemon.key.as_str()] {
            assert!(!text.contains(hidden), "{hidden}: {text}");
        }
    }
}

#[test]
fn without_a_key_no_websocket_opens() {
    let (daemon, sandbox, command) = start();
    for target in [sandbox.path("/commands/stream"), sandbox.path(&format!("/commands/{command}/stream"))] {
        assert_eq!(Socket::open(daemon.address, &target, &[]).err(), Some(401));
        assert_eq!(
            Socket::open(daemon.address, &target, &[("authorization", "Bearer wrong")]).err(),
            Some(401)
        );
    }
}

#[test]
fn another_owners_ids_are_the_same_404_as_nobodys() {
    let (daemon, sandbox, command) = start();
    let stranger = daemon.post("/v1/keys", &json!({"owner": "stranger"})).expect(201)["secret"]
        .as_str()
        .expect("a secret")
        .to_owned();
    let nobody = "00000000-0000-4000-8000-000000000000";
    for ((method, theirs, body), (_, nobodys, _)) in
        routes(&sandbox.id, &command).into_iter().zip(routes(nobody, &command))
    {
        let (a, b) = (
            ask(&daemon, Some(&stranger), method, &theirs, &body),
            ask(&daemon, Some(&stranger), method, &nobodys, &body),
        );
        a.expect_refusal(404, "sandbox_not_found");
        b.expect_refusal(404, "sandbox_not_found");
        let text = |answer: &shoal_tests::Response, id: &str| {
            String::from_utf8_lossy(&answer.body).replace(id, "ID")
        };
        assert_eq!(text(&a, &sandbox.id), text(&b, nobody), "{method} {theirs}");
    }
    for target in [sandbox.path("/commands/stream"), sandbox.path(&format!("/commands/{command}/stream"))] {
        let header = format!("Bearer {stranger}");
        match Socket::open(daemon.address, &target, &[("authorization", &header)]) {
            Err(status) => assert_eq!(status, 404),
            Ok(mut socket) => {
                socket.say(&json!({"type": "start", "argv": ["true"]}));
                assert_eq!(socket.wait_for("refused")["code"], "sandbox_not_found");
            }
        }
    }
    let list = Request::new("GET", "/v1/sandboxes").key(&stranger).send(daemon.address).expect(200);
    assert_eq!(list["sandboxes"], json!([]));
    assert_eq!(sandbox.get()["state"], "running");
    assert_eq!(sandbox.command(&command)["state"], "running");
}

#[test]
fn owners_may_use_the_same_names() {
    let daemon = Daemon::start();
    let other = daemon.post("/v1/keys", &json!({"owner": "other"})).expect(201)["secret"]
        .as_str()
        .expect("a secret")
        .to_owned();
    daemon.sandbox_with(json!({"name": "same"}));
    Request::new("POST", "/v1/sandboxes")
        .key(&other)
        .json(&json!({"name": "same"}))
        .send(daemon.address)
        .expect(201);
}

#[test]
fn idempotency_keys_of_owners_do_not_meet() {
    let daemon = Daemon::start();
    let other = daemon.post("/v1/keys", &json!({"owner": "other"})).expect(201)["secret"]
        .as_str()
        .expect("a secret")
        .to_owned();
    let create = |key: &str| {
        Request::new("POST", "/v1/sandboxes")
            .key(key)
            .header("idempotency-key", "k")
            .json(&json!({}))
            .send(daemon.address)
            .expect(201)["id"]
            .clone()
    };
    assert_ne!(create(&daemon.key), create(&other));
}

#[test]
fn only_an_admin_manages_keys_and_secrets_are_shown_once() {
    let daemon = Daemon::start();
    let made = daemon.post("/v1/keys", &json!({"owner": "plain"})).expect(201);
    let (id, secret) = (made["id"].as_str().expect("an id"), made["secret"].as_str().expect("a secret"));
    assert!(secret.len() >= 32, "a secret of {} characters", secret.len());
    for (method, target, body) in [
        ("GET", "/v1/keys".to_owned(), None),
        ("POST", "/v1/keys".into(), Some(json!({"owner": "x"}))),
        ("DELETE", format!("/v1/keys/{id}"), None),
    ] {
        ask(&daemon, Some(secret), method, &target, &body).expect_refusal(403, "admin_required");
    }
    let list = daemon.get("/v1/keys");
    assert!(list.json()["keys"].as_array().is_some_and(|keys| keys.len() == 2), "{}", list.describe());
    assert!(!String::from_utf8_lossy(&list.body).contains(secret));
    daemon.delete(&format!("/v1/keys/{id}")).expect(204);
    Request::new("GET", "/v1/sandboxes").key(secret).send(daemon.address).expect_refusal(401, "unauthorized");
    daemon.delete(&format!("/v1/keys/{id}")).expect_refusal(404, "key_not_found");
}

#[test]
fn wrong_keys_are_refused_by_name() {
    let daemon = Daemon::start();
    for body in [
        json!({}),
        json!({"owner": ""}),
        json!({"owner": "a b"}),
        json!({"owner": "a/b"}),
        json!({"owner": "x".repeat(65)}),
        json!({"owner": "x", "sandboxes_max": -1}),
        json!({"owner": "x", "cpu_max": "none"}),
        json!({"owner": "x", "admin": true}),
    ] {
        let answer = daemon.post("/v1/keys", &body);
        assert_eq!(answer.status, 400, "{body}: {}", answer.describe());
    }
}

#[test]
fn keys_live_on_after_a_restart() {
    let mut daemon = Daemon::start();
    let secret = daemon.post("/v1/keys", &json!({"owner": "lasting"})).expect(201)["secret"]
        .as_str()
        .expect("a secret")
        .to_owned();
    daemon.crash();
    Request::new("GET", "/v1/sandboxes").key(&secret).send(daemon.address).expect(200);
}

#[test]
fn a_foreign_host_or_page_is_refused() {
    let (daemon, sandbox, _) = start();
    let get = |headers: &[(&str, &str)]| {
        let mut request = Request::new("GET", "/v1/sandboxes").key(&daemon.key);
        for (name, value) in headers {
            request = request.header(name, value);
        }
        request.send(daemon.address)
    };
    for host in [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example:7878",
        "metadata.internal",
        "0.0.0.0",
    ] {
        let answer = get(&[("host", host)]);
        assert!(matches!(answer.status, 400 | 403 | 421), "{host}: {}", answer.describe());
        assert!(answer.json()["code"].is_string());
    }
    for host in ["localhost", "127.0.0.1:1", "[::1]"] {
        get(&[("host", host)]).expect(200);
    }
    for origin in ["https://evil.example", "null", "http://localhost:3000", "file://"] {
        get(&[("origin", origin)]).expect_refusal(403, "origin_not_allowed");
        let key = format!("Bearer {}", daemon.key);
        let opened = Socket::open(
            daemon.address,
            &sandbox.path("/commands/stream"),
            &[("authorization", &key), ("origin", origin)],
        );
        assert_eq!(opened.err(), Some(403), "{origin}");
    }
    let key = format!("Bearer {}", daemon.key);
    let opened = Socket::open(
        daemon.address,
        &sandbox.path("/commands/stream"),
        &[("authorization", &key), ("host", "evil.example")],
    );
    assert!(opened.err().is_some_and(|status| status >= 400));
}

#[test]
fn no_answer_lets_pages_read_it() {
    let daemon = Daemon::start();
    let answer = Request::new("OPTIONS", "/v1/sandboxes")
        .header("origin", "https://evil.example")
        .header("access-control-request-method", "POST")
        .send(daemon.address);
    assert!(answer.status >= 400, "{}", answer.describe());
    for answer in [answer, daemon.get("/v1/sandboxes")] {
        assert!(
            !answer.headers.iter().any(|(name, _)| name.starts_with("access-control-")),
            "{:?}",
            answer.headers
        );
    }
}

#[test]
fn the_key_is_nowhere_but_where_it_belongs() {
    let (daemon, sandbox, _) = start();
    Request::new("GET", "/v1/sandboxes?x=1").key("shoal_wrong_presented-by-someone").send(daemon.address);
    sandbox.sh("echo one").ok();
    assert!(!daemon.logs().contains(&daemon.key), "the key is in the log");
    assert!(!daemon.logs().contains("presented-by-someone"), "a presented key is in the log");
    let secret = daemon.key.rsplit('_').next().expect("a key has parts");
    for process in daemon.launchers().into_iter().chain(sandbox.processes()) {
        for file in ["environ", "cmdline"] {
            let text = fs::read(format!("/proc/{process}/{file}")).unwrap_or_default();
            assert!(
                !String::from_utf8_lossy(&text).contains(secret),
                "the key is in {file} of process {process}"
            );
        }
    }
    // Keys are stored as hashes; only a file for the CLI may contain one, readable for its owner alone.
    let mut open = vec![daemon.data_dir.clone()];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(&directory).expect("root may read").map(|entry| entry.expect("readable")) {
            let meta = fs::symlink_metadata(entry.path()).expect("readable");
            if meta.is_dir() && !entry.path().starts_with(daemon.data_dir.join("images")) {
                open.push(entry.path());
            } else if meta.is_file()
                && String::from_utf8_lossy(&fs::read(entry.path()).expect("readable")).contains(secret)
            {
                assert_eq!(meta.permissions().mode() & 0o777, 0o600, "{}", entry.path().display());
                assert!(
                    !entry.path().to_string_lossy().contains("sqlite")
                        && !entry.path().to_string_lossy().ends_with(".db"),
                    "{}",
                    entry.path().display()
                );
            }
        }
    }
}

#[test]
fn a_key_is_made_at_the_first_start_and_kept_for_its_owner() {
    let home = shoal_tests::daemon::Home::new();
    let data = home.join("data");
    let mut child = std::process::Command::new(shoal_tests::daemon::binary())
        .args(["serve", "--listen", "127.0.0.1:0", "--data-dir"])
        .arg(&data)
        .env_remove("SHOAL_API_KEY")
        .env("SHOAL_STORE", "directory")
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("the program can be started");
    let file = shoal_tests::until("the key is there", || {
        let path = data.join("api.key");
        fs::read_to_string(&path).ok().filter(|text| text.trim().len() > 20).map(|_| path)
    });
    assert_eq!(fs::metadata(&file).expect("it is there").permissions().mode() & 0o777, 0o600);
    let _ = child.kill();
    let _ = child.wait();
}

#[test]
fn a_weak_key_ends_the_start() {
    let home = shoal_tests::daemon::Home::new();
    for key in ["", "x", "changeme", "secret", "aaaaaaaaaaaaaaaaaaaaaaaa"] {
        let output = std::process::Command::new(shoal_tests::daemon::binary())
            .args(["serve", "--listen", "127.0.0.1:0", "--data-dir"])
            .arg(home.join("data"))
            .env("SHOAL_API_KEY", key)
            .stdin(std::process::Stdio::null())
            .output();
        let output = output.expect("the program can be started");
        assert!(!output.status.success(), "{key:?} was accepted");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("SHOAL_API_KEY"), "{said}");
        assert!(key.is_empty() || !said.contains(&format!("`{key}`")), "the key is repeated: {said}");
        is_untouched(&home.join("data"));
    }
}

/// Asserts that a daemon that failed to start did nothing to the machine.
#[track_caller]
fn is_untouched(data_dir: &std::path::Path) {
    let installation = shoal_tests::daemon::installation(data_dir);
    let scope = shoal_tests::audit::Scope { installation, data_dir: data_dir.into() };
    assert_eq!((scope.cgroups(), scope.claims()), (Vec::new(), Vec::new()));
}

#[test]
fn an_address_that_is_taken_ends_the_start_before_anything_is_done() {
    let daemon = Daemon::start();
    let home = shoal_tests::daemon::Home::new();
    let output = std::process::Command::new(shoal_tests::daemon::binary())
        .args(["serve", "--listen", &daemon.address.to_string(), "--data-dir"])
        .arg(home.join("data"))
        .env("SHOAL_API_KEY", &daemon.key)
        .stdin(std::process::Stdio::null())
        .output();
    let output = output.expect("the program can be started");
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("cannot listen") && said.contains("--listen"), "{said}");
    is_untouched(&home.join("data"));
}

#[test]
fn a_deleted_key_loses_its_streams_at_once_and_no_other_does() {
    use shoal_tests::{Said, until};
    let daemon = Daemon::start();
    let made = daemon.post("/v1/keys", &json!({"owner": "default"})).expect(201);
    let (id, secret) = (made["id"].as_str().expect("an id"), made["secret"].as_str().expect("a secret"));
    let mine = daemon.sandbox();
    let theirs = Sandbox { key: secret.into(), ..mine.clone() };
    let command = mine.spawn(json!({"script": "echo hi; sleep 1000"}));
    mine.wrote(&command, 3);

    let mut attached = theirs.attach(&command, &Default::default());
    attached.wait_for("command");
    let mut started = theirs.stream(json!({"argv": ["cat"], "stdin": true}));
    started.wait_for("command");
    let mut silent = theirs.open_socket("/commands/stream").expect("it opens");
    // A client that reads nothing although much is sent to it.
    let flood = theirs.stream(json!({"argv": ["yes"]}));
    let kept = mine.attach(&command, &Default::default());
    let long = [
        theirs.events(&command, "").open(daemon.address),
        theirs.request("GET", "/files/watch?path=/workspace").open(daemon.address),
    ];
    let dialect = Request::new("POST", &format!("/langsmith/dp/{}/execute/stream/resume", mine.id))
        .key(secret)
        .json(&json!({"command_id": command}))
        .open(daemon.address);
    let waiting = {
        let theirs = theirs.clone();
        std::thread::spawn(move || theirs.post_command(&json!({"argv": ["sleep", "1000"]})))
    };
    until("all of them have begun", || {
        let list = daemon.get(&mine.path("/commands")).json();
        list["commands"].as_array().filter(|commands| commands.len() == 4).map(|_| ())
    });

    daemon.delete(&format!("/v1/keys/{id}")).expect(204);
    for socket in [&mut attached, &mut started, &mut silent] {
        let code = loop {
            match socket.hear() {
                Said::Closed(code) => break code,
                Said::Event(_) | Said::Output { .. } => {}
            }
        };
        assert_eq!(code, Some(1008));
    }
    for stream in long {
        let mut stream = stream.expect("it was answered");
        assert_eq!(stream.status, 200);
        while stream.chunk().expect("it ends well").is_some() {}
    }
    let told = dialect.expect("it was answered").into_response().expect("it ends well");
    let told = String::from_utf8_lossy(&told.body).into_owned();
    assert!(told.contains("the api key was deleted") && !told.contains("stopping"), "{told}");
    waiting.join().expect("no panic").expect_refusal(401, "unauthorized");
    drop(flood);
    // Other clients are not affected, and neither are the commands.
    let mut kept = kept;
    kept.say(&json!({"type": "signal", "signal": "TERM"}));
    kept.wait_for("ended");
    assert_eq!(mine.ended(&command)["result"]["outcome"], "signaled");
}
