//! Snapshots of running sandboxes, captured through the API that has them (`/v2/sandboxes`), with the daemon killed
//! during the capture.

use std::fs;

use serde_json::{Value, json};
use shoal_tests::wait::until_true;
use shoal_tests::{Daemon, Sandbox, until};

const SNAPSHOTS: &str = "/v2/sandboxes/snapshots";
/// Enough that reading it takes a while.
const FILES: usize = 3000;
/// What is in the filled sandbox.
const LOOK: &str = "ls /srv/many | wc -l; wc -c < /srv/big; test -e /etc/issue || echo gone";

/// A sandbox with something to capture, in which a process keeps running.
fn filled(daemon: &Daemon) -> Sandbox {
    let sandbox = daemon.sandbox();
    let script = format!(
        "mkdir /srv/many && seq 1 {FILES} | (cd /srv/many && xargs touch) && head -c 33554432 /dev/urandom > /srv/big \
         && rm -f /etc/issue"
    );
    sandbox.sh(&script).ok();
    sandbox.spawn(json!({"argv": ["sh", "-c", "while :; do echo >> /tmp/ticks; sleep 0.02; done"]}));
    sandbox
}

fn seen() -> String {
    format!("{FILES}\n33554432\ngone")
}

/// Starts a capture: the snapshot's id.
fn begin(daemon: &Daemon, sandbox: &Sandbox, name: &str) -> String {
    let path = format!("/v2/sandboxes/boxes/{}/snapshot", sandbox.id);
    let begun = daemon.post(&path, &json!({"name": name})).expect(201);
    assert_eq!(begun["status"], "building", "it answers at once: {begun}");
    begun["id"].as_str().expect("an id").to_owned()
}

fn snapshot(daemon: &Daemon, id: &str) -> Value {
    daemon.get(&format!("{SNAPSHOTS}/{id}")).expect(200)
}

/// The result of a capture.
fn settled(daemon: &Daemon, id: &str) -> Value {
    until("the snapshot is made, or is not", || {
        Some(snapshot(daemon, id)).filter(|snapshot| snapshot["status"] != "building")
    })
}

/// Asserts that its processes run.
#[track_caller]
fn goes_on(sandbox: &Sandbox) {
    let ticks = || sandbox.sh("wc -l < /tmp/ticks").ok().text().trim().parse::<u64>().expect("a number");
    let before = ticks();
    until_true("the sandbox continues", || ticks() > before);
}

fn layers(daemon: &Daemon) -> Vec<String> {
    let layers = fs::read_dir(daemon.data_dir.join("images/layers")).expect("a directory");
    layers.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect()
}

fn templates(daemon: &Daemon) -> Vec<String> {
    let list = daemon.get("/v1/templates").expect(200);
    let names = list["templates"].as_array().expect("a list").iter();
    names.map(|template| template["name"].as_str().expect("a name").to_owned()).collect()
}

/// Asserts that nothing of snapshots is left: no template, no name of an image, no layer.
#[track_caller]
fn expect_nothing_left(daemon: &Daemon) {
    assert_eq!(daemon.get(SNAPSHOTS).expect(200)["snapshots"], json!([]));
    assert_eq!(templates(daemon), ["default"]);
    daemon.post("/v1/images/gc", &json!({})).expect(200);
    assert_eq!(daemon.get("/v1/images").expect(200)["images"], json!([]));
    assert_eq!(layers(daemon), Vec::<String>::new());
}

#[test]
fn kills_all_along_a_capture_leave_a_snapshot_whole_or_failed() {
    let mut daemon = Daemon::start();
    let id = filled(&daemon).id;
    let mut made = Vec::new();
    let (mut ready, mut failed) = (0, 0);
    for kill in 0..9 {
        let sandbox = daemon.sandbox_of(&id);
        let before = layers(&daemon).len();
        let snapshot_id = begin(&daemon, &sandbox, "killed");
        // Later each time, by what is visible: at once, with an unfinished layer, with a finished one, and at the
        // end.
        let building = |daemon: &Daemon| snapshot(daemon, &snapshot_id)["status"] == "building";
        match kill % 4 {
            0 => {}
            1 => until_true("a layer is begun", || layers(&daemon).len() > before || !building(&daemon)),
            2 => until_true("a layer is written", || {
                let names = layers(&daemon);
                (names.len() > before && !names.iter().any(|name| name.starts_with("unfinished")))
                    || !building(&daemon)
            }),
            _ => until_true("a template is made", || {
                templates(&daemon).iter().any(|name| name.ends_with(&snapshot_id)) || !building(&daemon)
            }),
        }
        daemon.crash();
        let sandbox = daemon.sandbox_of(&id);
        goes_on(&sandbox);
        let snapshot = settled(&daemon, &snapshot_id);
        let template = templates(&daemon).into_iter().find(|name| name.ends_with(&snapshot_id));
        match snapshot["status"].as_str() {
            Some("ready") => {
                ready += 1;
                let copy = daemon.sandbox_with(json!({"template": template.expect("it is a template")}));
                assert_eq!(copy.sh(LOOK).ok().text(), seen(), "after kill {kill}");
                copy.delete();
            }
            Some("failed") => {
                failed += 1;
                assert!(snapshot["status_message"].as_str().is_some_and(|why| why.contains("daemon ended")));
                assert_eq!(template, None, "after kill {kill}");
            }
            _ => panic!("after kill {kill}: {snapshot}"),
        }
        let unfinished: Vec<String> =
            layers(&daemon).into_iter().filter(|name| name.starts_with("unfinished")).collect();
        assert_eq!(unfinished, Vec::<String>::new(), "after kill {kill}");
        let images = daemon.get("/v1/images").expect(200);
        assert!(!images.to_string().contains("localhost/snapshot"), "no name is left: {images}");
        made.push(snapshot_id);
    }
    assert!(failed > 0, "none of {ready} captures was hit in the middle");

    let sandbox = daemon.sandbox_of(&id);
    let last = begin(&daemon, &sandbox, "killed");
    assert_eq!(settled(&daemon, &last)["status"], "ready");
    let copy = daemon.sandbox_with(json!({"template": format!("killed@{last}")}));
    assert_eq!(copy.sh(LOOK).ok().text(), seen());
    copy.delete();
    for id in made.iter().chain([&last]) {
        daemon.delete(&format!("{SNAPSHOTS}/{id}")).expect(204);
    }
    expect_nothing_left(&daemon);
}

#[test]
fn a_snapshot_that_is_deleted_while_it_is_captured_leaves_nothing() {
    let mut daemon = Daemon::start();
    let id = filled(&daemon).id;
    for crash in [false, true] {
        let sandbox = daemon.sandbox_of(&id);
        let before = layers(&daemon).len();
        let snapshot_id = begin(&daemon, &sandbox, "unwanted");
        until_true("a layer is begun", || {
            layers(&daemon).len() > before || snapshot(&daemon, &snapshot_id)["status"] != "building"
        });
        daemon.delete(&format!("{SNAPSHOTS}/{snapshot_id}")).expect(204);
        assert_eq!(daemon.get(&format!("{SNAPSHOTS}/{snapshot_id}")).status, 404, "it is no longer visible");
        if crash {
            daemon.crash();
        }
        let sandbox = daemon.sandbox_of(&id);
        goes_on(&sandbox);
        until_true("the unfinished snapshot is removed", || {
            daemon.post("/v1/images/gc", &json!({})).expect(200);
            templates(&daemon) == ["default"] && layers(&daemon).is_empty()
        });
        expect_nothing_left(&daemon);
    }
}

#[test]
fn captures_of_one_sandbox_at_once_are_each_whole() {
    let daemon = Daemon::start();
    let sandbox = filled(&daemon);
    let ids: Vec<String> = (0..3).map(|number| begin(&daemon, &sandbox, &format!("side-{number}"))).collect();
    for id in &ids {
        assert_eq!(settled(&daemon, id)["status"], "ready");
    }
    goes_on(&sandbox);
    for (number, id) in ids.iter().enumerate() {
        let copy = daemon.sandbox_with(json!({"template": format!("side-{number}@{id}")}));
        assert_eq!(copy.sh(LOOK).ok().text(), seen());
    }
}
