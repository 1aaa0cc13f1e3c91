//! Labels through the API: set, change, list by them, and get-or-create by them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Mutex;

use serde_json::{Value, json};
use shoal_tests::{Daemon, Request, Response, until};

/// As many requests as a busy chat application has in flight for one thread.
const CALLERS: usize = 50;

fn ids(list: &[Value]) -> Vec<&str> {
    list.iter().map(|sandbox| sandbox["id"].as_str().expect("an id")).collect()
}

#[track_caller]
fn listed(daemon: &Daemon, query: &str) -> Vec<Value> {
    let page = daemon.get(&format!("/v1/sandboxes?{query}")).expect(200);
    page["sandboxes"].as_array().expect("a page has sandboxes").clone()
}

#[test]
fn labels_are_set_at_create_and_changed_later() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"labels": {"app": "chat", "thread": "a/b=c ü", "empty": ""}}));
    assert_eq!(sandbox.get()["labels"], json!({"app": "chat", "thread": "a/b=c ü", "empty": ""}));
    let patch = |body: Value| sandbox.request("PATCH", "").json(&body).send(sandbox.address);
    let changed =
        patch(json!({"labels": {"app": null, "thread": "2", "new": "x", "absent": null}})).expect(200);
    assert_eq!(changed["labels"], json!({"thread": "2", "new": "x", "empty": ""}));
    assert_eq!(sandbox.get()["labels"], changed["labels"]);
    // A change that is not valid as a whole is not applied in part.
    patch(json!({"name": "x".repeat(300), "labels": {"thread": "3"}})).expect_refusal(400, "invalid_request");
    let many: BTreeMap<String, &str> = (0..64).map(|number| (format!("k{number}"), "v")).collect();
    patch(json!({"name": "renamed", "labels": many})).expect_refusal(400, "invalid_request");
    let after = sandbox.get();
    assert_eq!(after["labels"], changed["labels"]);
    assert_ne!(after["name"], "renamed");
}

#[test]
fn labels_that_are_too_many_too_long_or_not_text_are_refused() {
    let daemon = Daemon::start();
    let many: BTreeMap<String, &str> = (0..65).map(|number| (format!("k{number}"), "v")).collect();
    for labels in [
        json!({"": "x"}),
        json!({"a=b": "x"}),
        json!({"a!": "x"}),
        json!({"a\n": "x"}),
        json!({"a": "\u{0}"}),
        json!({"k".repeat(129): "x"}),
        json!({"a": "v".repeat(1025)}),
        json!({"a": 1}),
        json!({"a": null}),
        json!(["a"]),
        json!(many),
    ] {
        for field in ["labels", "match_labels"] {
            daemon.post("/v1/sandboxes", &json!({field: labels})).expect_refusal(400, "invalid_request");
        }
    }
    daemon.post("/v1/sandboxes", &json!({"match_labels": {}})).expect_refusal(400, "invalid_request");
    assert_eq!(daemon.list(), [] as [Value; 0]);
}

#[test]
fn selectors_find_what_they_say_over_all_pages() {
    let daemon = Daemon::start();
    let mut made = Vec::new();
    for number in 0..9 {
        let colour = ["red", "blue", "a b&c=d%"][number % 3];
        let labels = match number {
            8 => json!({"size": "large"}),
            _ => json!({"colour": colour, "odd": (number % 2).to_string()}),
        };
        made.push(daemon.sandbox_with(json!({"labels": labels})).id);
    }
    made.reverse(); // The list is newest first.
    let at = |places: &[usize]| -> Vec<&str> { places.iter().map(|at| made[8 - at].as_str()).collect() };
    for (query, expected) in [
        ("label=colour=red", at(&[6, 3, 0])),
        ("label=colour%3Dred", at(&[6, 3, 0])),
        ("label=colour=red&label=odd=0", at(&[6, 0])),
        ("label=colour=a+b%26c%3Dd%25", at(&[5, 2])),
        ("label=colour!=red", at(&[8, 7, 5, 4, 2, 1])),
        ("label=size", at(&[8])),
        ("label=%21colour", at(&[8])),
        ("label=colour&label=odd!=0&label=colour!=blue", at(&[5, 3])),
        ("label=colour=green", at(&[])),
    ] {
        assert_eq!(ids(&listed(&daemon, query)), expected, "{query}");
        // The same, a page of two at a time.
        let (mut found, mut cursor) = (Vec::new(), String::new());
        loop {
            let page = daemon.get(&format!("/v1/sandboxes?limit=2&{query}{cursor}")).expect(200);
            found.extend(page["sandboxes"].as_array().expect("sandboxes").iter().cloned());
            match page["next_cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => break,
            }
        }
        assert_eq!(ids(&found), expected, "{query} by pages");
    }
    for wrong in ["label=", "label==x", "label=a!b", "label=%21", "label=%ff", "labels=a", "limit=1&limit=2"]
    {
        let answer = daemon.get(&format!("/v1/sandboxes?{wrong}"));
        assert_eq!(answer.status, 400, "{wrong}: {}", answer.describe());
    }
    let many = "label=a&".repeat(33);
    daemon.get(&format!("/v1/sandboxes?{many}")).expect_refusal(400, "invalid_request");
}

#[test]
fn fifty_callers_at_once_get_one_sandbox() {
    let daemon = Daemon::start();
    for round in ["first", "second"] {
        let body = json!({"match_labels": {"thread": round}, "labels": {"app": "chat"}});
        let answers: Vec<Response> = std::thread::scope(|scope| {
            let asking: Vec<_> =
                (0..CALLERS).map(|_| scope.spawn(|| daemon.post("/v1/sandboxes", &body))).collect();
            asking.into_iter().map(|one| one.join().expect("no thread panics")).collect()
        });
        let mut created = 0;
        let mut ids = BTreeSet::new();
        for answer in &answers {
            let sandbox = answer.json();
            assert_eq!(sandbox["state"], "running", "each waits until it is ready: {sandbox}");
            assert_eq!(sandbox["labels"], json!({"thread": round, "app": "chat"}));
            match sandbox["created"].as_bool().expect("the answer says whether it was created") {
                true => assert_eq!(answer.status, 201),
                false => assert_eq!(answer.status, 200),
            }
            created += u32::from(sandbox["created"] == true);
            ids.insert(sandbox["id"].as_str().expect("an id").to_owned());
        }
        assert_eq!((ids.len(), created), (1, 1));
    }
    assert_eq!(daemon.list().len(), 2);
}

#[test]
fn a_daemon_that_dies_among_fifty_callers_leaves_one_sandbox() {
    let mut daemon = Daemon::start();
    let body = json!({"match_labels": {"thread": "7"}});
    let key = daemon.key.clone();
    let address: Mutex<SocketAddr> = Mutex::new(daemon.address);
    let ids: BTreeSet<String> = std::thread::scope(|scope| {
        let ask = || {
            // Like a client: retry until the daemon is back.
            until("someone answers", || {
                let to = *address.lock().expect("nobody panics here");
                let asked = Request::new("POST", "/v1/sandboxes").key(&key).json(&body).try_send(to);
                asked.ok().filter(|answer| matches!(answer.status, 200 | 201))
            })
        };
        let asking: Vec<_> = (0..CALLERS).map(|_| scope.spawn(ask)).collect();
        for _ in 0..3 {
            daemon.crash();
            *address.lock().expect("nobody panics here") = daemon.address;
        }
        let answers = asking.into_iter().map(|one| one.join().expect("no thread panics").json());
        answers.map(|sandbox| sandbox["id"].as_str().expect("an id").to_owned()).collect()
    });
    assert_eq!(ids.len(), 1, "{ids:?}");
    let listed = daemon.list();
    assert_eq!(listed.len(), 1, "{listed:?}");
    assert_eq!(listed[0]["labels"], json!({"thread": "7"}));
    daemon.sandbox_of(ids.first().expect("one")).sh("true").ok();
}

#[test]
fn only_ones_own_sandboxes_are_found() {
    let daemon = Daemon::start();
    let body = json!({"match_labels": {"thread": "1"}});
    let ours = daemon.post("/v1/sandboxes", &body).expect(201);
    let other = daemon.post("/v1/keys", &json!({"owner": "other"})).expect(201);
    let secret = other["secret"].as_str().expect("a secret");
    let theirs =
        Request::new("POST", "/v1/sandboxes").key(secret).json(&body).send(daemon.address).expect(201);
    assert_ne!(ours["id"], theirs["id"]);
    let listed =
        Request::new("GET", "/v1/sandboxes?label=thread=1").key(secret).send(daemon.address).expect(200);
    assert_eq!(ids(listed["sandboxes"].as_array().expect("a list")), [theirs["id"].as_str().expect("an id")]);
    for more in ["/explain", "/touch"] {
        let method = if more == "/touch" { "POST" } else { "GET" };
        let target = format!("/v1/sandboxes/{}{more}", ours["id"].as_str().expect("an id"));
        let answer = Request::new(method, &target).key(secret).send(daemon.address);
        answer.expect_refusal(404, "sandbox_not_found");
    }
}

#[test]
fn a_deleted_sandbox_is_not_found_again() {
    let daemon = Daemon::start();
    let body = json!({"match_labels": {"thread": "1"}});
    let first = daemon.post("/v1/sandboxes", &body).expect(201);
    assert_eq!(daemon.post("/v1/sandboxes", &body).expect(200)["id"], first["id"]);
    daemon.sandbox_of(first["id"].as_str().expect("an id")).delete();
    let second = daemon.post("/v1/sandboxes", &body).expect(201);
    assert_ne!(first["id"], second["id"]);
    // Removing a label puts the sandbox out of reach.
    let sandbox = daemon.sandbox_of(second["id"].as_str().expect("an id"));
    sandbox.request("PATCH", "").json(&json!({"labels": {"thread": null}})).send(daemon.address).expect(200);
    assert_eq!(daemon.post("/v1/sandboxes", &body).expect(201)["created"], true);
}

#[test]
fn a_repeated_request_is_told_the_same_as_the_first() {
    let daemon = Daemon::start();
    let ask = || {
        daemon
            .request("POST", "/v1/sandboxes")
            .header("idempotency-key", "once")
            .json(&json!({"match_labels": {"thread": "1"}}))
            .send(daemon.address)
            .expect(201)
    };
    let (first, again) = (ask(), ask());
    assert_eq!(first, again);
    assert_eq!(first["created"], true);
}

#[test]
fn labels_outlive_the_daemon() {
    let mut daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"labels": {"a": "1", "b": "2"}}));
    sandbox
        .request("PATCH", "")
        .json(&json!({"labels": {"a": null, "c": "3"}}))
        .send(daemon.address)
        .expect(200);
    daemon.crash();
    assert_eq!(ids(&listed(&daemon, "label=b=2&label=c=3")), [sandbox.id.as_str()]);
    assert_eq!(ids(&listed(&daemon, "label=a")), [] as [&str; 0]);
}
