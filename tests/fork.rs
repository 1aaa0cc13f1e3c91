//! Forks, rollbacks, snapshots and history, through the API and the command line, on a store with snapshots.

use serde_json::{Value, json};
use shoal_tests::daemon::kill_hard;
use shoal_tests::wait::until_true;
use shoal_tests::{Daemon, Request, Sandbox, Spawn};

fn with_store(size: &str) -> Daemon {
    let environment = [("SHOAL_STORE", "loop"), ("SHOAL_STORE_SIZE", size)];
    Spawn {
        environment: environment.map(|(name, value)| (name.into(), value.into())).into(),
        ..Spawn::default()
    }
    .start()
}

fn take(sandbox: &Sandbox, body: Value) -> Value {
    sandbox.request("POST", "/snapshots").json(&body).send(sandbox.address).expect(201)
}

fn roll_back(sandbox: &Sandbox, snapshot: &Value) -> Value {
    let body = json!({"snapshot": snapshot["id"]});
    sandbox.request("POST", "/rollback").json(&body).send(sandbox.address).expect(200)
}

fn remove(daemon: &Daemon, snapshot: &Value) {
    let id = snapshot["id"].as_str().expect("an id");
    assert_eq!(daemon.delete(&format!("/v1/snapshots/{id}")).status, 204);
}

fn fork(daemon: &Daemon, sandbox: &Sandbox, body: Value) -> Vec<Sandbox> {
    let made = sandbox.request("POST", "/fork").json(&body).send(sandbox.address).expect(201);
    let children = made["children"].as_array().expect("a list").iter();
    children.map(|child| daemon.sandbox_of(child["sandbox"]["id"].as_str().expect("a child"))).collect()
}

/// What differs between trees in ways that layers get wrong first: removed, replaced and renamed directories, links, modes.
const CHANGE: &str = "set -e
rm -rf /etc/skel; mkdir -p /workspace/a/b /workspace/old; echo one > /workspace/a/b/f; echo x > /workspace/old/x
ln -s a /workspace/link; mkfifo /workspace/pipe; chmod 1777 /workspace/old; chown 1000:1000 /workspace/old/x
rm -rf /usr/share/doc; mkdir /usr/share/doc; echo mine > /usr/share/doc/mine; mv /usr/share/perl5 /usr/share/moved 2>/dev/null || true";
const LOOK: &str = "cd /; find workspace etc usr/share/doc usr/share/moved usr/share/perl5 -printf '%p %y %m %U %G %l\n' 2>/dev/null \
    | sort | sha256sum; cat /workspace/a/b/f /workspace/old/x";

#[test]
fn children_see_the_live_files_and_are_apart() {
    let daemon = with_store("1Gi");
    let before = daemon.audit();
    let source = daemon.sandbox_with(json!({"env": {"A": "1"}, "labels": {"app": "x"}}));
    source.sh("echo old > /workspace/f").ok();
    take(&source, json!({}));
    source.sh("echo live > /workspace/f").ok();
    source.spawn(json!({"argv": ["sleep", "1000"]}));
    let children = fork(&daemon, &source, json!({"count": 4, "env": {"B": "2"}}));
    assert_eq!(children.len(), 4);
    for (number, child) in children.iter().enumerate() {
        assert_eq!(child.sh("cat /workspace/f; echo $A$B").ok().text(), "live\n12");
        assert_eq!(child.get()["labels"], json!({"app": "x"}));
        child.sh(&format!("echo {number} > /workspace/f; rm -rf /etc/skel")).ok();
        // Processes are not copied, and each child has its own host name.
        assert!(!child.sh("ps ax 2>/dev/null || cat /proc/*/cmdline").text().contains("sleep"));
    }
    let names: Vec<String> =
        children.iter().map(|child| child.sh("cat /etc/hostname; hostname").text()).collect();
    assert_ne!(names[0], names[1]);
    assert_eq!(source.sh("cat /workspace/f; test -d /etc/skel && echo skel").ok().text(), "live\nskel");
    assert_eq!(children[2].sh("cat /workspace/f").ok().text(), "2");
    // A grandchild lies over two snapshots.
    let grandchild = fork(&daemon, &children[3], json!({})).remove(0);
    assert_eq!(grandchild.sh("cat /workspace/f; test -d /etc/skel || echo gone").ok().text(), "3\ngone");
    source.delete();
    children[3].delete();
    assert_eq!(grandchild.sh("cat /workspace/f").ok().text(), "3", "it holds what it needs");
    let tree = grandchild.request("GET", "/tree").send(daemon.address).expect(200);
    let members = tree["members"].as_array().expect("a list");
    assert_eq!(members.len(), 6);
    assert_eq!(members.iter().filter(|member| member.get("state").is_none()).count(), 2, "{tree}");
    for child in children.iter().take(3).chain([&grandchild]) {
        child.delete();
    }
    let left = daemon.get("/v1/tree").expect(200);
    assert_eq!(left["members"], json!([]));
    for snapshot in daemon.get("/v1/snapshots").expect(200)["snapshots"].as_array().expect("a list") {
        remove(&daemon, snapshot);
    }
    daemon.expect_nothing_beyond(&before);
}

#[test]
fn rolling_back_restores_removed_replaced_and_renamed_files_and_keeps_the_sandbox() {
    let daemon = with_store("1Gi");
    let sandbox = daemon.sandbox_with(json!({"name": "work"}));
    sandbox.sh(CHANGE).ok();
    let before = sandbox.sh(LOOK).ok().text();
    let taken = take(&sandbox, json!({"name": "clean"}));
    assert_eq!(
        (taken["state"].as_str(), taken["sandbox_id"].as_str()),
        (Some("ready"), Some(sandbox.id.as_str()))
    );
    assert!(taken["stopped_ms"].as_f64().expect("a number") < 2000.0, "{taken}");
    let again = take(&sandbox, json!({"name": "clean"}));
    assert_eq!(again["id"], taken["id"], "nothing has changed");
    for round in 0..3 {
        let script = "set -e; rm -rf /workspace/a; mkdir -p /workspace/a/b; echo two > /workspace/a/b/f
            mv /workspace/old /workspace/new; rm -rf /usr/share/doc; mkdir -p /etc/skel/x; rm -f /usr/bin/perl";
        sandbox.sh(script).ok();
        assert_ne!(sandbox.sh(LOOK).text(), before);
        let sleeper = sandbox.spawn(json!({"argv": ["sleep", "1000"]}));
        let rolled = roll_back(&sandbox, &taken);
        assert_eq!((rolled["name"].as_str(), rolled["state"].as_str()), (Some("work"), Some("running")));
        assert_eq!(sandbox.sh(LOOK).ok().text(), before, "round {round}");
        assert_eq!(sandbox.ended(&sleeper)["result"]["outcome"], json!("sandbox_gone"), "round {round}");
    }
    // The sandbox can be rolled back to a snapshot that was taken in between, and deeper than the bound of layers.
    let mut last = taken;
    for round in 0..10 {
        sandbox.sh(&format!("echo {round} > /workspace/round")).ok();
        last = take(&sandbox, json!({"name": format!("r{round}")}));
        roll_back(&sandbox, &last);
    }
    sandbox.sh("echo wrong > /workspace/round").ok();
    roll_back(&sandbox, &last);
    assert_eq!(sandbox.sh("cat /workspace/round").ok().text(), "9");
    assert_eq!(sandbox.sh("cat /workspace/a/b/f").ok().text(), "one");
}

#[test]
fn a_new_sandbox_starts_from_a_snapshot_and_a_stranger_finds_nothing() {
    let daemon = with_store("1Gi");
    let source = daemon.sandbox();
    source.sh("echo kept > /workspace/f").ok();
    let taken = take(&source, json!({"name": "base", "labels": {"k": "v"}}));
    assert_eq!(taken["labels"], json!({"k": "v"}));
    source.delete();
    let id = taken["id"].as_str().expect("an id");
    for template in ["base", id] {
        let made = daemon.sandbox_with(json!({"template": template}));
        assert_eq!(made.sh("cat /workspace/f").ok().text(), "kept");
        made.delete();
    }
    let key = daemon.post("/v1/keys", &json!({"owner": "mallory"})).expect(201);
    let secret = key["secret"].as_str().expect("a secret").to_owned();
    let as_mallory = |method: &str, path: &str, body: Option<Value>| {
        let mut request = Request::new(method, path).key(&secret);
        if let Some(body) = body {
            request = request.json(&body);
        }
        request.send(daemon.address)
    };
    let theirs = as_mallory("POST", "/v1/sandboxes", Some(json!({}))).expect(201);
    let theirs = theirs["id"].as_str().expect("an id");
    let code =
        |response: shoal_tests::Response| response.expect(404)["code"].as_str().expect("a code").to_owned();
    assert_eq!(code(as_mallory("GET", &format!("/v1/snapshots/{id}"), None)), "snapshot_not_found");
    assert_eq!(code(as_mallory("DELETE", &format!("/v1/snapshots/{id}"), None)), "snapshot_not_found");
    let rollback = format!("/v1/sandboxes/{theirs}/rollback");
    assert_eq!(code(as_mallory("POST", &rollback, Some(json!({"snapshot": id})))), "snapshot_not_found");
    assert_eq!(
        code(as_mallory("POST", "/v1/sandboxes", Some(json!({"template": id})))),
        "template_not_found"
    );
    let own = daemon.sandbox();
    let other = daemon.sandbox();
    let foreign = take(&other, json!({}));
    let refused =
        own.request("POST", "/rollback").json(&json!({"snapshot": foreign["id"]})).send(daemon.address);
    assert_eq!(refused.expect(409)["code"], "not_an_ancestor");
    assert_eq!(code(as_mallory("POST", &own.path("/fork"), Some(json!({})))), "sandbox_not_found");
}

#[test]
fn a_snapshot_of_much_that_is_not_written_yet_does_not_stop_the_sandbox_for_long() {
    let daemon = with_store("3Gi");
    let sandbox = daemon.sandbox_with(json!({"memory": "2Gi", "disk": "2Gi"}));
    sandbox.sh("head -c 1G /dev/zero > /workspace/big").ok();
    let taken = take(&sandbox, json!({}));
    eprintln!("1 GiB: stood still for {} ms", taken["stopped_ms"]);
    let child = fork(&daemon, &sandbox, json!({})).remove(0);
    assert_eq!(child.sh("wc -c < /workspace/big").ok().text(), "1073741824");
}

#[test]
fn a_fork_over_a_quota_and_a_full_store_fail_with_types_and_leave_the_source_intact() {
    let daemon = with_store("256Mi");
    let key = daemon.post("/v1/keys", &json!({"owner": "small", "sandboxes_max": 3})).expect(201);
    let secret = key["secret"].as_str().expect("a secret").to_owned();
    let ask =
        |path: &str, body: Value| Request::new("POST", path).key(&secret).json(&body).send(daemon.address);
    let source = ask("/v1/sandboxes", json!({})).expect(201);
    let fork = format!("/v1/sandboxes/{}/fork", source["id"].as_str().expect("an id"));
    let made = ask(&fork, json!({"count": 4})).expect(201);
    let children = made["children"].as_array().expect("a list");
    let codes: Vec<&str> = children.iter().filter_map(|child| child["error"]["code"].as_str()).collect();
    assert_eq!(
        (children.len(), codes.as_slice()),
        (4, ["quota_exceeded", "quota_exceeded"].as_slice()),
        "{made}"
    );
    assert_eq!(ask(&fork, json!({"count": 0})).expect(400)["details"]["field"], "count");
    // A full store: whatever comes of the snapshot, the source goes on and can be emptied.
    let full = daemon.sandbox();
    full.sh("head -c 1G /dev/zero > /workspace/big; sync -f /workspace");
    let answer = full.request("POST", "/snapshots").json(&json!({})).send(daemon.address);
    eprintln!("snapshot on a full store: {}", answer.status);
    assert_eq!(full.sh("rm -f /workspace/big; echo on").ok().text(), "on");
}

#[test]
fn killed_in_the_middle_a_fork_and_a_rollback_leave_whole_sandboxes() {
    let mut daemon = with_store("1Gi");
    let sandbox = daemon.sandbox_with(json!({"name": "work"}));
    sandbox.sh("echo one > /workspace/f").ok();
    let taken = take(&sandbox, json!({}));
    for round in 0..6u64 {
        // A daemon that is started again listens elsewhere.
        let sandbox = daemon.sandbox_of(&sandbox.id);
        sandbox.sh("echo two > /workspace/f").ok();
        let body = json!({"snapshot": taken["id"]});
        let (address, request) = (daemon.address, sandbox.request("POST", "/rollback").json(&body));
        let asking = std::thread::spawn(move || request.try_send(address).map(|answer| answer.status).ok());
        std::thread::sleep(std::time::Duration::from_millis(round * 3));
        match round % 2 {
            0 => daemon.crash(),
            _ => daemon.launchers().into_iter().for_each(kill_hard),
        }
        let answered = asking.join().expect("no panic");
        let sandbox = daemon.sandbox_of(&sandbox.id);
        until_true("it runs again", || sandbox.get()["state"] == "running");
        let text = sandbox.sh("cat /workspace/f").ok().text();
        assert!(text == "one" || text == "two", "round {round}: {text} after {answered:?}");
    }
    let sandbox = daemon.sandbox_of(&sandbox.id);
    sandbox.delete();
    remove(&daemon, &taken);
}

#[test]
fn history_undoes_commands_and_takes_no_step_for_those_that_change_nothing() {
    let daemon = with_store("1Gi");
    let sandbox = daemon.sandbox_with(json!({"history": 3}));
    assert_eq!(sandbox.get()["history"], 3);
    for number in 1..=5 {
        sandbox.sh(&format!("echo {number} > /workspace/f")).ok();
    }
    for _ in 0..3 {
        sandbox.sh("cat /workspace/f").ok();
    }
    let steps = sandbox.request("GET", "/history").send(daemon.address).expect(200);
    assert_eq!(steps["steps"].as_array().map(Vec::len), Some(3), "{steps}");
    let undo =
        |steps: u32| sandbox.request("POST", "/undo").json(&json!({"steps": steps})).send(daemon.address);
    sandbox.sh("rm -rf /workspace/f /etc/skel").ok();
    undo(1).expect(200);
    assert_eq!(sandbox.sh("cat /workspace/f; test -d /etc/skel && echo skel").ok().text(), "5\nskel");
    assert_eq!(undo(50).expect(400)["details"]["field"], "steps");
    // The tests' own default is a store of plain directories.
    let refused = Daemon::start().post("/v1/sandboxes", &json!({"history": 2}));
    assert_eq!(refused.expect(409)["code"], "snapshots_not_supported");
}

#[test]
fn a_comparison_survives_what_a_guest_can_make_and_tells_a_stranger_nothing() {
    let daemon = with_store("1Gi");
    let sandbox = daemon.sandbox_with(json!({"name": "work"}));
    sandbox.sh("echo a > /workspace/f").ok();
    let taken = take(&sandbox, json!({"name": "clean"}));
    let made = sandbox.python(
        r"
import os
os.mkfifo('/workspace/pipe')
os.symlink('/etc/shadow', '/workspace/link')
os.symlink('/', '/workspace/root')
open(b'/workspace/\xff\n', 'w').write('x')
os.makedirs('/workspace/' + 'd/' * 120)
open('/workspace/f', 'w').write('b')
",
    );
    made.ok();
    let id = taken["id"].as_str().expect("an id");
    let found = daemon.get(&format!("/v1/diff?a={id}&b=work&content=true")).expect(200);
    assert_eq!(found["complete"], false, "directories too deep inside each other are left out");
    let entries = found["entries"].as_array().expect("a list");
    let entry = |path: &str| entries.iter().find(|entry| entry["path"] == path).unwrap_or(&Value::Null);
    let expected = json!({"path": "/workspace/f", "change": "changed", "kind": "file", "size_before": 2,
        "size_after": 1, "before": "a\n", "after": "b"});
    assert_eq!(*entry("/workspace/f"), expected);
    let kinds = ["/workspace/pipe", "/workspace/link", "/workspace/root", "/workspace/\u{fffd}\n"]
        .map(|path| entry(path)["kind"].as_str().unwrap_or("nothing"));
    assert_eq!(kinds, ["other", "symlink", "symlink", "file"]);
    assert!(
        entries.iter().all(|entry| !entry["path"].as_str().unwrap_or("").starts_with("/workspace/root/"))
    );
    assert!(!found.to_string().contains("root:"), "nothing is read through a link");
    let same = daemon.get("/v1/diff?a=clean&b=clean").expect(200);
    assert_eq!(same, json!({"entries": [], "complete": true}));
    let key = daemon.post("/v1/keys", &json!({"owner": "mallory"})).expect(201);
    let secret = key["secret"].as_str().expect("a secret");
    let stranger = Request::new("GET", &format!("/v1/diff?a={id}&b={id}")).key(secret).send(daemon.address);
    stranger.expect_refusal(404, "snapshot_not_found");
    daemon.get("/v1/diff?a=clean").expect_refusal(400, "invalid_request");
}
