//! Pools: ready sandboxes are claimed once, by one caller, and replaced, whatever is killed meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use shoal_tests::daemon::{binary, kill_hard, random_hex, send_signal};
use shoal_tests::wait::{until, until_true};
use shoal_tests::{Audit, DEADLINE, Daemon, Request, Response};

const CALLERS: usize = 24;

fn patch(daemon: &Daemon, name: &str, body: Value) -> Response {
    daemon.request("PATCH", &format!("/v1/pools/{name}")).json(&body).send(daemon.address)
}

fn get(daemon: &Daemon, name: &str) -> Value {
    daemon.get(&format!("/v1/pools/{name}")).expect(200)
}

/// A daemon with the template `small` and a pool of it.
#[track_caller]
fn with_pool(replicas: u32) -> Daemon {
    let daemon = Daemon::start();
    daemon.post("/v1/templates", &json!({"name": "small", "memory": "256Mi", "env": {"A": "1"}})).expect(201);
    daemon.post("/v1/pools", &json!({"name": "p", "template": "small", "replicas": replicas})).expect(201);
    full(&daemon, "p");
    daemon
}

/// The full number is ready, and nothing else is in the pool.
#[track_caller]
fn full(daemon: &Daemon, name: &str) -> Value {
    until("the pool is full", || {
        let pool = daemon.get(&format!("/v1/pools/{name}?wait_seconds=10")).expect(200);
        let members = pool["members"].as_array().expect("its members").len() as u64;
        (pool["state"] == "ready"
            && pool["ready"] == pool["replicas"]
            && Some(members) == pool["replicas"].as_u64())
        .then_some(pool)
    })
}

fn ids(pool: &Value) -> BTreeSet<String> {
    let members = pool["members"].as_array().expect("its members");
    members.iter().map(|member| member["id"].as_str().expect("an id").to_owned()).collect()
}

fn of_small(daemon: &Daemon) -> Value {
    daemon.post("/v1/sandboxes", &json!({"template": "small"})).expect(201)
}

#[test]
fn a_create_claims_what_stands_ready_with_all_that_it_asks_for() {
    let daemon = with_pool(2);
    let before = get(&daemon, "p");
    assert_eq!(daemon.list(), [] as [Value; 0], "what waits is not listed");
    let waiting = before["members"][0]["id"].as_str().expect("an id");
    daemon.get(&format!("/v1/sandboxes/{waiting}")).expect_refusal(404, "sandbox_not_found");
    daemon.delete(&format!("/v1/sandboxes/{waiting}")).expect_refusal(404, "sandbox_not_found");
    let run = json!({"argv": ["true"]});
    daemon.post(&format!("/v1/sandboxes/{waiting}/commands"), &run).expect_refusal(404, "sandbox_not_found");
    let made = daemon
        .post(
            "/v1/sandboxes",
            &json!({"template": "small", "name": "mine", "env": {"B": "2"}, "labels": {"k": "v"},
                "lifetime": [{"after_seconds": 3600, "since": "last_use", "action": "delete"}]}),
        )
        .expect(201);
    assert_eq!((made["id"].as_str(), &made["claimed_from"]), (Some(waiting), &json!("p")));
    assert_eq!(
        (&made["name"], &made["labels"], &made["env"]),
        (&json!("mine"), &json!({"k": "v"}), &json!({"B": "2"}))
    );
    assert_eq!(made["lifetime"].as_array().map(Vec::len), Some(1));
    let sandbox = daemon.sandbox_of(waiting);
    assert_eq!(sandbox.sh("echo $A$B; pwd").ok().text(), "12\n/workspace");
    assert_eq!(daemon.list().len(), 1);
    assert_eq!(daemon.get("/v1/sandboxes?label=k%3Dv").expect(200)["sandboxes"][0]["id"], waiting);
    let after = full(&daemon, "p");
    assert!(!ids(&after).contains(waiting));
    assert_eq!((&after["claims"], &after["misses"]), (&json!(1), &json!(0)));
    let by_pool = daemon.post("/v1/sandboxes", &json!({"pool": "p"})).expect(201);
    assert_eq!((&by_pool["template"], &by_pool["claimed_from"]), (&json!("small"), &json!("p")));
    let other = daemon.post("/v1/sandboxes", &json!({"template": "small", "memory": "300Mi"})).expect(201);
    assert_eq!(other["claimed_from"], Value::Null, "a request with other settings creates a sandbox");
}

#[test]
fn what_makes_no_sense_is_refused_with_a_code() {
    let daemon = with_pool(0);
    let create = |body: Value| daemon.post("/v1/pools", &body);
    let pool = |name: &str, template: &str, replicas: i64| json!({"name": name, "template": template, "replicas": replicas});
    create(pool("q", "none", 1)).expect_refusal(404, "template_not_found");
    create(pool("p", "small", 1)).expect_refusal(409, "name_taken");
    create(pool("q", "small", 1_000_000)).expect_refusal(400, "invalid_request");
    create(pool("q", "small", -1)).expect_refusal(400, "invalid_request");
    create(pool("", "small", 1)).expect_refusal(400, "invalid_request");
    create(json!({"name": "q", "template": "small"})).expect_refusal(400, "invalid_request");
    create(json!({"name": "q", "template": "small", "replicas": 1, "size": 2}))
        .expect_refusal(400, "invalid_request");
    patch(&daemon, "p", json!({"replicas": 1_000_000})).expect_refusal(400, "invalid_request");
    patch(&daemon, "none", json!({"replicas": 1})).expect_refusal(404, "pool_not_found");
    daemon.get("/v1/pools/none").expect_refusal(404, "pool_not_found");
    daemon.get("/v1/pools/p?wait_seconds=301").expect_refusal(400, "invalid_request");
    daemon.delete("/v1/pools/none").expect_refusal(404, "pool_not_found");
    daemon.delete("/v1/templates/small").expect_refusal(409, "template_in_use");
    let sandbox = |body: Value| daemon.post("/v1/sandboxes", &body);
    sandbox(json!({"pool": "none"})).expect_refusal(404, "pool_not_found");
    sandbox(json!({"pool": "p", "template": "small"})).expect_refusal(400, "invalid_request");
    sandbox(json!({"pool": "p", "memory": "1Gi"})).expect_refusal(400, "invalid_request");
    assert_eq!(daemon.delete("/v1/pools/p").status, 204);
    assert_eq!(daemon.delete("/v1/templates/small").status, 204);
    assert_eq!(daemon.get("/v1/pools").expect(200), json!({"pools": []}));
}

#[test]
fn there_is_no_pool_for_a_template_that_mounts_volumes() {
    let daemon = with_pool(1);
    daemon.post("/v1/volumes", &json!({"name": "v", "size": "64Mi"})).expect(201);
    let mounts = json!([{"volume": "v", "path": "/data"}]);
    daemon.post("/v1/templates", &json!({"name": "mounting", "mounts": mounts})).expect(201);
    let pool = json!({"name": "q", "template": "mounting", "replicas": 1});
    let refused = daemon.post("/v1/pools", &pool).expect_refusal(400, "pool_has_volumes");
    assert_eq!(refused["details"]["template"], "mounting");
    let update = json!({"mounts": mounts});
    daemon.request("PATCH", "/v1/templates/small").json(&update).send(daemon.address).expect(200);
    until_true("the pool says that it cannot be filled any more", || {
        let pool = get(&daemon, "p");
        pool["state"] == "failing" && pool["reason"].as_str().is_some_and(|reason| reason.contains("volumes"))
    });
    let update = json!({"mounts": []});
    daemon.request("PATCH", "/v1/templates/small").json(&update).send(daemon.address).expect(200);
    full(&daemon, "p");
}

#[test]
fn a_pool_is_scaled_renamed_deleted_and_leaves_nothing_behind() {
    let daemon = Daemon::start();
    daemon.sandbox().delete();
    let before = daemon.audit();
    daemon.post("/v1/pools", &json!({"name": "p", "template": "default", "replicas": 1})).expect(201);
    full(&daemon, "p");
    assert_eq!(patch(&daemon, "p", json!({"name": "a/b c", "replicas": 4})).expect(200)["name"], "a/b c");
    assert_eq!(full(&daemon, "a%2Fb%20c")["ready"], 4);
    patch(&daemon, "a%2Fb%20c", json!({"replicas": 1})).expect(200);
    full(&daemon, "a%2Fb%20c");
    let metrics = String::from_utf8(daemon.get("/metrics").body).expect("text");
    assert!(metrics.contains("shoal_pool_members{state=\"ready\"} 1"), "{metrics}");
    patch(&daemon, "a%2Fb%20c", json!({"replicas": 0})).expect(200);
    daemon.expect_nothing_beyond(&before);
    patch(&daemon, "a%2Fb%20c", json!({"replicas": 3})).expect(200);
    full(&daemon, "a%2Fb%20c");
    assert_eq!(daemon.delete("/v1/pools/a%2Fb%20c").status, 204);
    daemon.expect_nothing_beyond(&before);
}

#[test]
fn what_waits_survives_the_daemon_and_is_claimed_after() {
    let mut daemon = with_pool(3);
    let before = ids(&get(&daemon, "p"));
    daemon.crash();
    assert_eq!(ids(&full(&daemon, "p")), before, "kill -9 loses none");
    assert!(daemon.stop());
    daemon.start_again();
    assert_eq!(ids(&full(&daemon, "p")), before, "nor does an ordinary end");
    let made = of_small(&daemon);
    assert!(before.contains(made["id"].as_str().expect("an id")), "{made}");
    assert_eq!(
        daemon.sandbox_of(made["id"].as_str().expect("an id")).sh("echo it works").ok().text(),
        "it works"
    );
    daemon.crash();
    let again = daemon.get(&format!("/v1/sandboxes/{}", made["id"].as_str().expect("an id"))).expect(200);
    assert_eq!((&again["name"], &again["claimed_from"]), (&made["name"], &json!("p")));
    full(&daemon, "p");
}

#[test]
fn what_dies_or_hangs_while_it_waits_is_replaced() {
    let daemon = with_pool(2);
    let members: Vec<String> = ids(&get(&daemon, "p")).into_iter().collect();
    kill_hard(daemon.sandbox_of(&members[0]).init());
    until_true("the dead one is replaced", || !ids(&get(&daemon, "p")).contains(&members[0]));
    send_signal(daemon.sandbox_of(&members[1]).init(), Signal::STOP);
    until_true("the one that hangs is replaced", || !ids(&get(&daemon, "p")).contains(&members[1]));
    full(&daemon, "p");
}

#[test]
fn an_update_of_the_template_rolls_the_pool_over() {
    let daemon = with_pool(2);
    let before = ids(&get(&daemon, "p"));
    let update = json!({"env": {"A": "new"}});
    daemon.request("PATCH", "/v1/templates/small").json(&update).send(daemon.address).expect(200);
    let made = of_small(&daemon);
    assert_eq!(made["template_version"], 2);
    let sandbox = daemon.sandbox_of(made["id"].as_str().expect("an id"));
    assert_eq!(sandbox.sh("echo $A").ok().text(), "new");
    until_true("all of them are new", || {
        let pool = full(&daemon, "p");
        ids(&pool).is_disjoint(&before)
            && pool["members"]
                .as_array()
                .expect("its members")
                .iter()
                .all(|member| member["template_version"] == 2)
    });
}

#[test]
fn a_pool_that_cannot_be_filled_says_why_and_goes_on_trying() {
    let daemon = Daemon::start();
    let key = daemon.post("/v1/keys", &json!({"owner": "ada", "sandboxes_max": 2})).expect(201);
    let key = key["secret"].as_str().expect("a key").to_owned();
    let ask = |method: &str, path: &str, body: Value| {
        Request::new(method, path).key(&key).json(&body).send(daemon.address)
    };
    let pool = json!({"name": "p", "template": "default", "replicas": 3});
    ask("POST", "/v1/pools", pool).expect_refusal(429, "quota_exceeded");
    ask("POST", "/v1/pools", json!({"name": "p", "template": "default", "replicas": 2})).expect(201);
    let state = |state: &'static str| {
        until(state, || {
            let pool = Request::new("GET", "/v1/pools/p").key(&key).send(daemon.address).expect(200);
            (pool["state"] == state).then_some(pool)
        })
    };
    state("ready");
    let made = ask("POST", "/v1/sandboxes", json!({"pool": "p"})).expect(201);
    let failing = state("failing");
    assert!(failing["reason"].as_str().is_some_and(|reason| reason.contains("limit of 2")), "{failing}");
    assert!(failing["retry_at"].is_string(), "{failing}");
    Request::new("DELETE", &format!("/v1/sandboxes/{}", made["id"].as_str().expect("an id")))
        .key(&key)
        .send(daemon.address);
    state("ready");
}

#[test]
fn no_sandbox_is_given_to_two_claimers() {
    let daemon = with_pool(8);
    let ready = ids(&get(&daemon, "p"));
    let answers = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..CALLERS {
            scope.spawn(|| {
                let made = of_small(&daemon);
                let sandbox = daemon.sandbox_of(made["id"].as_str().expect("an id"));
                sandbox.sh("test ! -e /tmp/taken && touch /tmp/taken").ok();
                answers.lock().expect("no panic").push(made);
            });
        }
    });
    let answers = answers.into_inner().expect("no panic");
    let given: BTreeSet<_> =
        answers.iter().map(|made| made["id"].as_str().expect("an id").to_owned()).collect();
    assert_eq!(given.len(), CALLERS, "each caller has its own");
    assert!(given.is_superset(&ready), "all ready sandboxes were claimed");
    full(&daemon, "p");
}

/// Keeps claiming under its own names, and records the responses; deletes every other one.
fn claim(
    address: SocketAddr,
    key: &str,
    stop: &AtomicBool,
    next: &AtomicU32,
    answered: &Mutex<BTreeMap<String, String>>,
) {
    while !stop.load(Ordering::Relaxed) {
        let name = format!("claim {}", next.fetch_add(1, Ordering::Relaxed));
        let wish = json!({"template": "small", "name": name});
        let made = Request::new("POST", "/v1/sandboxes").key(key).json(&wish).try_send(address);
        let Ok(made) = made else { continue };
        if made.status != 201 {
            continue;
        }
        let id = made.json()["id"].as_str().expect("an id").to_owned();
        answered.lock().expect("no panic").insert(name.clone(), id.clone());
        if id.ends_with(['0', '2', '4', '6', '8', 'a', 'c', 'e']) {
            // From here on it may exist or not.
            answered.lock().expect("no panic").remove(&name);
            let _ = Request::new("DELETE", &format!("/v1/sandboxes/{id}")).key(key).try_send(address);
        }
    }
}

/// What was returned exists; no claimed sandbox waits; the pool is full; then everything can be deleted.
fn settle(daemon: &Daemon, answered: &BTreeMap<String, String>, replicas: usize) {
    let given: BTreeSet<&String> = answered.values().collect();
    assert_eq!(given.len(), answered.len(), "one sandbox was given to two callers");
    let waiting = ids(&full(daemon, "p"));
    assert_eq!(waiting.len(), replicas);
    until_true("every sandbox has come to rest", || {
        daemon.list().iter().all(|one| one["state"] != "creating" && one["state"] != "deleting")
    });
    let list =
        daemon.get("/v1/sandboxes?limit=500").expect(200)["sandboxes"].as_array().expect("a list").clone();
    for sandbox in &list {
        let id = sandbox["id"].as_str().expect("an id");
        assert!(!waiting.contains(id), "{id} is claimed and waits");
    }
    for (name, id) in answered {
        let found = list.iter().find(|sandbox| sandbox["name"] == *name);
        assert_eq!(
            found.map(|sandbox| sandbox["id"].as_str()),
            Some(Some(id.as_str())),
            "{name} was answered"
        );
    }
    for sandbox in list {
        let handle = daemon.sandbox_of(sandbox["id"].as_str().expect("an id"));
        if sandbox["state"] == "running" {
            assert_eq!(handle.sh("echo usable").ok().text(), "usable");
        }
        handle.delete();
    }
}

fn strike_after(random: &mut u64, microseconds_max: u64) {
    *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    // This is the attack, not a wait for a condition.
    std::thread::sleep(Duration::from_micros((*random >> 33) % microseconds_max));
}

/// What survives a restart of the daemon although it need not: blocks of ids stay claimed, as many as were needed at
/// once.
fn lasting(audit: Audit) -> Audit {
    let lasts = |line: &String| !["process", "mount", "claim"].iter().any(|kind| line.starts_with(kind));
    Audit(audit.0.into_iter().filter(lasts).collect())
}

#[test]
fn leak_audit_after_killing_daemon_and_launcher_inside_claims_and_refills() {
    const REPLICAS: usize = 4;
    let mut daemon = Daemon::start();
    daemon.post("/v1/templates", &json!({"name": "small", "memory": "256Mi"})).expect(201);
    daemon.sandbox().delete();
    let before = lasting(daemon.audit());
    let mut random = u64::from_str_radix(&random_hex(8), 16).expect("hexadecimal");
    eprintln!("the seed of this run is {random}");
    daemon.post("/v1/pools", &json!({"name": "p", "template": "small", "replicas": REPLICAS})).expect(201);
    let next = AtomicU32::new(0);
    for round in 0..8 {
        let (stop, answered) = (AtomicBool::new(false), Mutex::new(BTreeMap::new()));
        let (address, key) = (daemon.address, daemon.key.clone());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| claim(address, &key, &stop, &next, &answered));
            }
            for _ in 0..2 {
                strike_after(&mut random, 80_000);
                daemon.launchers().into_iter().for_each(kill_hard);
            }
            strike_after(&mut random, 150_000);
            if round % 2 == 0 {
                daemon.kill();
            }
            stop.store(true, Ordering::Relaxed);
        });
        if round % 2 == 0 {
            daemon.start_again();
        }
        settle(&daemon, &answered.into_inner().expect("no panic"), REPLICAS);
    }
    assert_eq!(daemon.delete("/v1/pools/p").status, 204);
    let give_up = Instant::now() + DEADLINE;
    loop {
        let left = lasting(daemon.audit()).beyond(&before);
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < give_up, "left behind: {left:#?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn shoal(daemon: &Daemon, arguments: &[&str]) -> std::process::Output {
    let url = format!("http://{}", daemon.address);
    Command::new(binary())
        .args(arguments)
        .env("SHOAL_URL", url)
        .env("SHOAL_API_KEY", &daemon.key)
        .output()
        .expect("it can be started")
}

#[track_caller]
fn said(daemon: &Daemon, arguments: &[&str]) -> String {
    let output = shoal(daemon, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn the_command_line_makes_scales_shows_and_removes_pools() {
    let daemon = Daemon::start();
    let made = said(&daemon, &["pool", "create", "warm", "--replicas", "2", "--wait"]);
    assert_eq!(made, "warm  2 of 2 ready  ready\n");
    let id = said(&daemon, &["create", "--pool", "warm"]);
    assert!(said(&daemon, &["inspect", id.trim()]).contains("from pool warm"));
    assert!(said(&daemon, &["pool", "ls"]).contains("warm"));
    assert!(said(&daemon, &["pool", "scale", "warm", "3", "--wait"]).contains("3 of 3 ready"));
    let shown = said(&daemon, &["pool", "get", "warm"]);
    assert!(shown.contains("ready      3 of 3") && shown.contains("MEMBER"), "{shown}");
    said(&daemon, &["pool", "rename", "warm", "hot"]);
    let refused = shoal(&daemon, &["pool", "scale", "hot", "1000000"]);
    let errors = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && errors.contains("replicas"), "{errors}");
    let listed: Value = serde_json::from_str(&said(&daemon, &["pool", "ls", "--json"])).expect("JSON");
    assert_eq!(listed[0]["name"], "hot");
    said(&daemon, &["pool", "rm", "hot"]);
    assert_eq!(said(&daemon, &["pool", "ls", "--json"]), "[]\n");
}

#[test]
fn top_shows_sandboxes_pools_and_the_machine() {
    let daemon = with_pool(1);
    let sandbox = daemon.sandbox_with(json!({"name": "busy-one"}));
    let shown = said(&daemon, &["top", "--once"]);
    for part in ["busy-one", "POOL", "small", "1 / 1", "memory", "processors"] {
        assert!(shown.contains(part), "{part:?} is not in:\n{shown}");
    }
    assert!(!shown.contains('\x1b'), "no terminal, no escapes: {shown:?}");
    let looked: Value = serde_json::from_str(&said(&daemon, &["top", "--json"])).expect("JSON");
    assert_eq!(looked["pools"][0]["name"], "p");
    assert_eq!(looked["sandboxes"][0]["sandbox_id"].as_str(), Some(sandbox.id.as_str()));
    assert!(looked["machine"]["memory_bytes"].as_u64() > Some(0));
}
