//! What a sandbox can reach, and what it cannot: policies through the public door, a real egress, servers of the tests.
//!
//! The servers are on a loopback address that the daemon's configuration counts as public; a name server of the tests records every
//! question, so that a name that should not leave is seen if it does.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use shoal_tests::daemon::{Spawn, kill_hard};
use shoal_tests::wait::until_true;
use shoal_tests::{Daemon, Finished, Sandbox, until};

/// Where the servers of a test are. The configuration opens this address alone.
pub(crate) const OUTSIDE: Ipv4Addr = Ipv4Addr::new(127, 9, 9, 9);

/// A name server that answers for the names that it knows, and records every question.
pub(crate) struct Names {
    pub(crate) address: SocketAddr,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Names {
    /// Knows these names; all others do not exist.
    pub(crate) fn serve(names: &[(&str, Ipv4Addr)]) -> Self {
        let names: HashMap<String, Ipv4Addr> =
            names.iter().map(|(name, address)| ((*name).to_owned(), *address)).collect();
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port is free");
        let (address, asked) =
            (socket.local_addr().expect("it is bound"), Arc::<Mutex<Vec<String>>>::default());
        let record = Arc::clone(&asked);
        std::thread::spawn(move || {
            let mut packet = [0; 4096];
            while let Ok((length, from)) = socket.recv_from(&mut packet) {
                let question = &packet[..length];
                let (name, kind, end) = read_question(question);
                record.lock().expect("nobody panics with it").push(name.clone());
                let known = names.get(&name);
                let mut answer = question[..2].to_vec();
                answer.extend([0x81, if known.is_some() { 0x80 } else { 0x83 }, 0, 1]);
                let address = known.filter(|_| kind == 1);
                answer.extend([0, u8::from(address.is_some()), 0, 0, 0, 0]);
                answer.extend(&question[12..end]);
                if let Some(address) = address {
                    answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4]);
                    answer.extend(address.octets());
                }
                let _ = socket.send_to(&answer, from);
            }
        });
        Self { address, asked }
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().expect("nobody panics with it").clone()
    }
}

/// The name, the kind and the end of the first question.
fn read_question(packet: &[u8]) -> (String, u16, usize) {
    let (mut at, mut labels) = (12, Vec::new());
    while packet[at] != 0 {
        let length = usize::from(packet[at]);
        labels.push(String::from_utf8_lossy(&packet[at + 1..at + 1 + length]).to_ascii_lowercase());
        at += 1 + length;
    }
    (labels.join("."), u16::from_be_bytes([packet[at + 1], packet[at + 2]]), at + 5)
}

/// A server that answers HTTP with the request's path and host, and counts connections and bytes.
struct Web {
    port: u16,
    connections: Arc<AtomicUsize>,
    bytes: Arc<AtomicUsize>,
}

impl Web {
    fn serve() -> Self {
        Self::serve_at(OUTSIDE)
    }

    fn serve_at(address: Ipv4Addr) -> Self {
        let listener = TcpListener::bind((address, 0)).expect("a port is free");
        let port = listener.local_addr().expect("it is bound").port();
        let web = Self { port, connections: Arc::default(), bytes: Arc::default() };
        let (connections, bytes) = (Arc::clone(&web.connections), Arc::clone(&web.bytes));
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                connections.fetch_add(1, Ordering::Relaxed);
                let bytes = Arc::clone(&bytes);
                std::thread::spawn(move || answer(client, &bytes));
            }
        });
        web
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// Serves one connection: `/ticks` sends a line every tenth of a second until the connection ends, the rest one answer.
fn answer(mut client: TcpStream, bytes: &AtomicUsize) {
    let mut request = Vec::new();
    let mut piece = [0; 4096];
    while !request.windows(4).any(|window| window == b"\r\n\r\n") {
        match client.read(&mut piece) {
            Ok(0) | Err(_) => return,
            Ok(length) => {
                bytes.fetch_add(length, Ordering::Relaxed);
                request.extend(&piece[..length]);
            }
        }
    }
    let text = String::from_utf8_lossy(&request).into_owned();
    let path = text.split(' ').nth(1).unwrap_or("/").to_owned();
    let host = text
        .lines()
        .find_map(|line| line.split_once(": ").filter(|(name, _)| name.eq_ignore_ascii_case("host")));
    let host = host.map_or("-", |(_, host)| host).to_owned();
    if path == "/ticks" {
        let _ = client.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n");
        while client.write_all(b"tick\n").is_ok() {
            std::thread::sleep(Duration::from_millis(100));
        }
        return;
    }
    let body = format!("{path} of {host}\n");
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    let _ = client.write_all((head + &body).as_bytes());
}

/// A daemon whose name server is ours, and that counts our servers' address as public.
fn daemon(names: &Names) -> Daemon {
    let config = format!("network_resolvers = [\"{}\"]\nnetwork_open = [\"{OUTSIDE}/32\"]\n", names.address);
    Spawn { config, ..Spawn::default() }.start()
}

fn allow(hosts: &[&str]) -> Value {
    let rules: Vec<Value> = hosts.iter().map(|host| json!({"to": host})).collect();
    json!({"network": {"mode": "none", "rules": rules}})
}

/// Fetches a page with Python, and prints it or the error.
#[track_caller]
fn fetch(sandbox: &Sandbox, url: &str) -> Finished {
    let program = format!(
        "import urllib.request, urllib.error\ntry:\n    print(urllib.request.urlopen('{url}', timeout=20).read().decode().strip())\n\
         except urllib.error.HTTPError as error:\n    print(error.code, error.headers.get('Shoal-Policy'), error.reason)\n\
         except OSError as error:\n    print('failed:', error)\n"
    );
    sandbox.python(&program).ok()
}

/// Connects to an address, and prints the name of the error, or `OK`.
#[track_caller]
fn connect(sandbox: &Sandbox, address: &str, port: u16) -> String {
    let program = format!(
        "import socket, errno\ntry:\n    s = socket.create_connection(('{address}', {port}), timeout=20)\n    s.sendall(b'GET / HTTP/1.0\\r\\n\\r\\n')\n    \
         data = s.recv(100); print('OK' if b' 200 ' in data else data[:12].decode() or 'CLOSED')\nexcept OSError as error:\n    print(errno.errorcode.get(error.errno, type(error).__name__))\n"
    );
    sandbox.python(&program).ok().text()
}

fn events(sandbox: &Sandbox) -> Vec<Value> {
    let list = sandbox.request("GET", "/network/events").send(sandbox.address).expect(200);
    list["events"].as_array().expect("a list").clone()
}

/// The egress processes of a daemon.
fn egresses(daemon: &Daemon) -> Vec<i32> {
    let own = |process: &i32| {
        std::fs::read(format!("/proc/{process}/cmdline")).is_ok_and(|line| line.ends_with(b"shoal\0egress\0"))
    };
    daemon.scope().processes().into_iter().filter(own).collect()
}

/// The one that runs.
#[track_caller]
fn egress(daemon: &Daemon) -> i32 {
    until("egress runs", || egresses(daemon).first().copied())
}

#[test]
fn a_name_that_the_policy_opens_is_reached_and_others_are_explained_and_not_asked_for() {
    let (names, web) = (Names::serve(&[("web.test", OUTSIDE), ("other.test", OUTSIDE)]), Web::serve());
    let daemon = daemon(&names);
    let sandbox = daemon.sandbox_with(allow(&["web.test"]));
    let port = web.port;
    assert_eq!(
        fetch(&sandbox, &format!("http://web.test:{port}/a")).text(),
        format!("/a of web.test:{port}")
    );
    // On port 80 the refusal explains itself; nothing goes upstream, neither the name nor a connection.
    let refused = fetch(&sandbox, "http://other.test/").text();
    assert!(refused.starts_with("403 denied Refused by Shoal"), "{refused}");
    assert_eq!(connect(&sandbox, "other.test", port), "ECONNREFUSED");
    assert_eq!(fetch(&sandbox, "http://secret-data.other.test/").text().split(' ').next(), Some("403"));
    assert!(names.asked().iter().all(|name| name == "web.test"), "{:?}", names.asked());
    assert_eq!(web.connections(), 1);
    // What was refused is an event with the rule that would open it.
    let refused = until("the refusal is recorded", || {
        events(&sandbox).into_iter().find(|event| event["name"] == "other.test")
    });
    assert_eq!(refused["opens"], "other.test");
    // Opened live: in force when it is answered.
    sandbox
        .request("POST", "/network/rules")
        .json(&json!({"to": "other.test"}))
        .send(sandbox.address)
        .expect(200);
    assert_eq!(
        fetch(&sandbox, &format!("http://other.test:{port}/b")).text(),
        format!("/b of other.test:{port}")
    );
    let shown = sandbox.sh("cat /run/shoal/network.json").ok().text();
    assert!(shown.contains("other.test") && shown.contains("\"mode\":\"none\""), "{shown}");
    assert!(!sandbox.sh("echo x > /run/shoal/network.json").errors().is_empty(), "it can only be read");
}

#[test]
fn without_a_network_nothing_leaves_and_attempts_are_counted() {
    let (names, web) = (Names::serve(&[("web.test", OUTSIDE)]), Web::serve());
    let daemon = daemon(&names);
    let sandbox = daemon.sandbox();
    assert_eq!(sandbox.get()["network"]["mode"], "none");
    let tried = sandbox.python(&format!(
        "import socket\nfor host in ('web.test', '{OUTSIDE}', '8.8.8.8'):\n    try:\n        socket.create_connection((host, {}), timeout=5)\n        print('reached')\n    except OSError:\n        pass\n",
        web.port
    ));
    assert_eq!(tried.text(), "");
    let attempts = tried.body["result"]["network"]["attempts"].as_u64();
    assert!(attempts.is_some_and(|attempts| attempts >= 2), "{:?}", tried.body["result"]);
    assert!(sandbox.sh("true").body["result"]["network"].is_null(), "attempts are told once");
    assert_eq!((names.asked(), web.connections()), (vec![], 0));
    assert_eq!(egresses(&daemon), Vec::<i32>::new(), "no egress is started for sandboxes without a network");
}

#[test]
fn a_literal_address_needs_a_rule_of_its_own() {
    let (names, web) = (Names::serve(&[("web.test", OUTSIDE)]), Web::serve());
    let daemon = daemon(&names);
    let sandbox = daemon.sandbox_with(allow(&["web.test"]));
    // The address of the name that is allowed, without the name. 127/8 would be the sandbox's own loopback.
    for address in ["203.0.113.7", "10.1.2.3", "169.254.169.254", "2001:db8::1", "fd00:ec2::254"] {
        assert_eq!(connect(&sandbox, address, web.port), "ENETUNREACH", "{address}");
    }
    assert_eq!(web.connections(), 0);
}

#[test]
fn an_open_network_reaches_no_private_metadata_or_host_address() {
    let inner = Web::serve_at(Ipv4Addr::LOCALHOST);
    let names = Names::serve(&[
        ("web.test", OUTSIDE),
        ("loopback.test", Ipv4Addr::LOCALHOST),
        ("metadata.test", Ipv4Addr::new(169, 254, 169, 254)),
        ("private.test", Ipv4Addr::new(10, 0, 0, 1)),
    ]);
    let web = Web::serve();
    let daemon = daemon(&names);
    let sandbox = daemon.sandbox_with(json!({"network": "open"}));
    assert_eq!(
        fetch(&sandbox, &format!("http://web.test:{}/", web.port)).text(),
        format!("/ of web.test:{}", web.port)
    );
    for (address, error) in
        [("10.0.0.1", "EHOSTUNREACH"), ("192.168.1.1", "EHOSTUNREACH"), ("169.254.169.254", "EACCES")]
    {
        assert_eq!(connect(&sandbox, address, 80), error, "{address}");
    }
    // Names that lead there are refused when they are dialled, whatever they led to before.
    for name in ["loopback.test", "metadata.test", "private.test"] {
        assert_ne!(connect(&sandbox, name, inner.port), "OK", "{name}");
    }
    // The machine's own address is closed too.
    let own = sandbox.python(&format!(
        "import socket\ns = socket.socket(); s.settimeout(10)\nprint(s.connect_ex(('127.0.0.1', {})) != 0)",
        daemon.address.port()
    ));
    assert_eq!(own.text(), "True", "the daemon is not reached through the sandbox's own loopback");
    assert_eq!((inner.connections(), web.connections()), (0, 1));
}

#[test]
fn one_sandbox_does_not_reach_another() {
    let names = Names::serve(&[]);
    let daemon = daemon(&names);
    let (server, client) =
        (daemon.sandbox_with(json!({"network": "open"})), daemon.sandbox_with(json!({"network": "open"})));
    let id = server.spawn(json!({"argv": ["python3", "-m", "http.server", "8000", "--bind", "0.0.0.0"]}));
    server.running(&id);
    until_true("the server listens", || connect(&server, "127.0.0.1", 8000) == "OK");
    for address in ["198.18.0.2", "127.0.0.1"] {
        assert_ne!(connect(&client, address, 8000), "OK", "{address}");
    }
}

#[test]
fn a_request_for_another_host_or_server_name_does_not_pass() {
    let (names, web) = (Names::serve(&[("web.test", OUTSIDE)]), Web::serve());
    let daemon = daemon(&names);
    let sandbox = daemon.sandbox_with(allow(&["web.test"]));
    let fronted = sandbox
        .python(&format!(
            "import socket\ns = socket.create_connection(('web.test', {}), timeout=20)\n\
             s.sendall(b'GET /leak HTTP/1.1\\r\\nHost: evil.test\\r\\nConnection: close\\r\\n\\r\\n')\n\
             print(s.recv(100).decode(errors='replace').split('\\r\\n')[0])",
            web.port
        ))
        .ok();
    assert!(fronted.text().starts_with("HTTP/1.1 4"), "{fronted:?}");
    let hello = sandbox
        .python(&format!(
            "import socket, ssl\nc = ssl.create_default_context(); c.check_hostname = False; c.verify_mode = ssl.CERT_NONE\n\
             s = socket.create_connection(('web.test', {}), timeout=20)\n\
             try:\n    c.wrap_socket(s, server_hostname='evil.test')\n    print('passed')\nexcept OSError as error:\n    print('refused')",
            web.port
        ))
        .ok();
    assert_eq!(hello.text(), "refused");
    assert_eq!(web.bytes(), 0, "no byte of either went upstream");
    assert!(!names.asked().contains(&"evil.test".to_owned()));
}

#[test]
fn a_change_of_policy_cuts_what_it_no_longer_allows() {
    let (names, web) = (Names::serve(&[("web.test", OUTSIDE)]), Web::serve());
    let daemon = daemon(&names);
    let sandbox = daemon.sandbox_with(allow(&["web.test"]));
    let id = sandbox.spawn(json!({"argv": ["python3", "-uc", format!(
        "import urllib.request\nfor line in urllib.request.urlopen('http://web.test:{}/ticks', timeout=60): print(line.decode().strip())", web.port
    )]}));
    sandbox.wrote(&id, 15);
    let changed =
        sandbox.request("PATCH", "").json(&json!({"network": "none"})).send(sandbox.address).expect(200);
    assert_eq!(changed["network"]["mode"], "none");
    let ended = sandbox.ended(&id);
    assert_ne!(ended["result"]["exit_code"], 0, "a download that was cut does not look complete: {ended}");
    assert_eq!(connect(&sandbox, "198.18.1.0", web.port), "ENETUNREACH");
    // And back, in the same namespace.
    sandbox.request("PATCH", "").json(&allow(&["web.test"])).send(sandbox.address).expect(200);
    assert_eq!(
        fetch(&sandbox, &format!("http://web.test:{}/", web.port)).text(),
        format!("/ of web.test:{}", web.port)
    );
    // A policy that is wrong changes nothing.
    let wrong = json!({"network": {"rules": [{"to": "*.com"}]}});
    sandbox
        .request("PATCH", "")
        .json(&wrong)
        .send(sandbox.address)
        .expect_refusal(400, "invalid_network_policy");
    assert_eq!(
        fetch(&sandbox, &format!("http://web.test:{}/", web.port)).text(),
        format!("/ of web.test:{}", web.port)
    );
}

#[test]
fn a_killed_egress_is_replaced_and_the_next_connection_works() {
    let (names, web) = (Names::serve(&[("web.test", OUTSIDE)]), Web::serve());
    let daemon = daemon(&names);
    let sandbox = daemon.sandbox_with(allow(&["web.test"]));
    let url = format!("http://web.test:{}/", web.port);
    fetch(&sandbox, &url);
    let first = egress(&daemon);
    for line in ["CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"] {
        let status = std::fs::read_to_string(format!("/proc/{first}/status")).expect("it runs");
        assert!(status.contains(line), "{line}\n{status}");
    }
    kill_hard(first);
    // A connection waits in the listener, which the daemon holds, until the next egress takes it.
    assert_eq!(fetch(&sandbox, &url).text(), format!("/ of web.test:{}", web.port));
    assert_ne!(egress(&daemon), first);
    assert_eq!(
        fetch(&sandbox, "http://other.test/").text().split(' ').next(),
        Some("403"),
        "it has the policy"
    );
}

#[test]
fn a_network_goes_on_without_the_daemon_and_with_the_next() {
    let (names, web) = (Names::serve(&[("web.test", OUTSIDE), ("late.test", OUTSIDE)]), Web::serve());
    let mut daemon = daemon(&names);
    let sandbox = daemon.sandbox_with(allow(&["web.test", "late.test"]));
    let program = format!(
        "import urllib.request, time, os\n\
         def get(name): return urllib.request.urlopen(f'http://{{name}}:{}/', timeout=30).read().decode().strip()\n\
         print(get('web.test'), flush=True)\n\
         while not os.path.exists('/tmp/go'): time.sleep(0.02)\n\
         print(get('late.test'), flush=True)\n\
         while not os.path.exists('/tmp/end'): time.sleep(0.02)\n\
         print(get('web.test'), flush=True)\n",
        web.port
    );
    let id = sandbox.spawn(json!({"argv": ["python3", "-uc", program]}));
    sandbox.wrote(&id, 10);
    let gate = sandbox.spawn(json!({"script": "sleep 0.5; touch /tmp/go"}));
    sandbox.running(&gate);
    let before = egress(&daemon);
    daemon.kill();
    until_true("a name is looked up while no daemon runs", || web.connections() >= 2);
    daemon.start_again();
    let sandbox = daemon.sandbox_of(&sandbox.id);
    sandbox.sh("touch /tmp/end").ok();
    assert_eq!(sandbox.ended(&id)["result"]["exit_code"], 0, "{:?}", sandbox.output(&id));
    assert_eq!(egress(&daemon), before, "it is the same egress");
    // Its records reached the next daemon.
    until_true("the connection without a daemon is recorded", || {
        events(&sandbox).iter().any(|event| event["name"] == "late.test" && event["what"] == "opened")
    });
    // A change reaches the egress that was found.
    sandbox.request("PATCH", "").json(&json!({"network": "none"})).send(sandbox.address).expect(200);
    assert_ne!(connect(&sandbox, "web.test", web.port), "OK");
}

#[test]
fn nothing_of_a_network_is_left_after_a_delete() {
    let names = Names::serve(&[("web.test", OUTSIDE)]);
    let web = Web::serve();
    let mut daemon = daemon(&names);
    let first = daemon.sandbox_with(allow(&["web.test"]));
    fetch(&first, &format!("http://web.test:{}/", web.port));
    let egress = egress(&daemon);
    let sockets = || {
        let fds = std::fs::read_dir(format!("/proc/{egress}/fd")).expect("it runs");
        fds.flatten()
            .filter(|fd| {
                std::fs::read_link(fd.path()).is_ok_and(|to| to.to_string_lossy().starts_with("socket:"))
            })
            .count()
    };
    let with_one = sockets();
    let second = daemon.sandbox_with(json!({"network": "open"}));
    second.delete();
    until_true("egress holds nothing of a sandbox that is gone", || sockets() <= with_one);
    first.delete();
    assert!(daemon.stop(), "it ends cleanly");
    until_true("an egress that serves nobody ends with the daemon", || shoal_tests::audit::is_dead(egress));
}

#[test]
fn a_pool_member_has_no_network_and_a_claimed_one_has_its_policy() {
    let (names, web) = (Names::serve(&[("web.test", OUTSIDE)]), Web::serve());
    let daemon = daemon(&names);
    daemon
        .post("/v1/templates", &json!({"name": "t", "network": allow(&["web.test"])["network"]}))
        .expect(201);
    daemon.post("/v1/pools", &json!({"name": "p", "template": "t", "replicas": 1})).expect(201);
    until_true("the pool is ready", || {
        daemon.get("/v1/pools/p?wait_seconds=30").expect(200)["ready"]
            .as_u64()
            .is_some_and(|ready| ready >= 1)
    });
    let claimed = daemon.sandbox_with(json!({"template": "t"}));
    assert_eq!(claimed.get()["claimed_from"], "p");
    assert_eq!(
        fetch(&claimed, &format!("http://web.test:{}/", web.port)).text(),
        format!("/ of web.test:{}", web.port)
    );
    let closed = daemon.sandbox_with(json!({"template": "t", "network": "none"}));
    assert_eq!(closed.get()["network"]["mode"], "none");
    assert_ne!(connect(&closed, "web.test", web.port), "OK");
}

#[test]
fn explain_says_which_rule_decides_and_what_would_open_it() {
    let names = Names::serve(&[]);
    let daemon = daemon(&names);
    let sandbox = daemon.sandbox_with(json!({"network": {"rules": [
        {"to": "*.example.com", "ports": ["443"]},
        {"action": "deny", "to": "secret.example.com"},
    ]}}));
    let explain = |to: &str| {
        sandbox.request("GET", &format!("/network/explain?to={to}")).send(sandbox.address).expect(200)
    };
    assert_eq!(explain("https://example.com")["allowed"], true, "a wildcard covers the name itself");
    assert_eq!(explain("https://secret.example.com")["rule"], "rule 2: deny secret.example.com");
    let refused = explain("ssh://a.example.com");
    assert_eq!((&refused["allowed"], &refused["opens"]), (&json!(false), &json!("a.example.com --port 22")));
    sandbox
        .request("GET", "/network/explain?to=gopher://x")
        .send(sandbox.address)
        .expect_refusal(400, "invalid_request");
    let presets = daemon.get("/v1/network/presets").expect(200);
    assert!(
        presets["hosts"].as_array().is_some_and(|hosts| hosts.iter().any(|host| host["tool"] == "python"))
    );
}

/// Tiny packages, by the ordinary clients, from the registries that this machine is configured for.
#[test]
fn package_managers_install_with_registries() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"network": "registries", "memory": "2Gi"}));
    let pip = sandbox.sh("cd /tmp && pip install --no-input --target /tmp/here six 2>&1");
    assert_eq!(pip.exit_code(), Some(0), "{pip:?}");
    let npm = sandbox.sh("mkdir -p /tmp/n && cd /tmp/n && npm install --no-audit --no-fund is-odd 2>&1");
    assert_eq!(npm.exit_code(), Some(0), "{npm:?}");
    let refused = fetch(&sandbox, "http://example.com/").text();
    assert!(refused.starts_with("403"), "{refused}");
}

#[test]
fn a_refusal_over_https_is_read_by_ordinary_clients() {
    let names = Names::serve(&[]);
    let daemon = daemon(&names);
    let sandbox = daemon.sandbox_with(allow(&["web.test"]));
    let curl = sandbox.sh("curl -sS -o /dev/null -w '%{http_code}' https://refused.test/");
    assert_eq!(curl.text(), "403", "{curl:?}");
    let python = fetch(&sandbox, "https://refused.test/").text();
    assert!(python.starts_with("403 denied"), "{python}");
    let git = sandbox.sh("git ls-remote https://refused.test/x 2>&1");
    assert!(git.text().contains("403") && !git.text().contains("certificate"), "{git:?}");
    // pip hides the page, but it does not try again as it would after a certificate that it does not trust.
    let pip =
        sandbox.sh("pip download --no-input --no-deps -d /tmp/p -i https://refused.test/simple six 2>&1");
    assert!(pip.text().contains("No matching distribution") && !pip.text().contains("SSLError"), "{pip:?}");
    // The variables are a default.
    let own = sandbox.run(json!({"script": "echo $SSL_CERT_FILE", "env": {"SSL_CERT_FILE": "/mine"}}));
    assert_eq!(own.text(), "/mine");
    assert_eq!(names.asked(), Vec::<String>::new());
    // Without a network there is nothing to trust.
    assert_eq!(daemon.sandbox().sh("echo $SSL_CERT_FILE").text(), "");
}
