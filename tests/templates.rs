//! Templates: described once, prepared in the background, kept by version.

use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use shoal_tests::daemon::binary;
use shoal_tests::http::server_events;
use shoal_tests::images::{Deed, Layer, MadeImage, Puppet, digest};
use shoal_tests::wait::{until, until_true};
use shoal_tests::{DEADLINE, Daemon, Request, Response, Spawn};

/// A scripted registry, and a daemon that is configured for it.
fn ground() -> (Puppet, Daemon) {
    let puppet = Puppet::start();
    let daemon = Spawn { config: puppet.config(), ..Spawn::default() }.start();
    (puppet, daemon)
}

fn create(daemon: &Daemon, body: Value) -> Response {
    daemon.post("/v1/templates", &body)
}

fn get(daemon: &Daemon, name: &str) -> Value {
    daemon.get(&format!("/v1/templates/{name}")).expect(200)
}

fn update(daemon: &Daemon, name: &str, body: Value) -> Response {
    daemon.request("PATCH", &format!("/v1/templates/{name}")).json(&body).send(daemon.address)
}

fn apply(daemon: &Daemon, name: &str, body: Value) -> Response {
    daemon.request("PUT", &format!("/v1/templates/{name}")).json(&body).send(daemon.address)
}

/// Waits until a template is no longer being prepared.
fn settled(daemon: &Daemon, name: &str) -> Value {
    until("the template settles", || {
        let template = get(daemon, name);
        (template["state"] != "preparing").then_some(template)
    })
}

fn busybox(config: Value) -> MadeImage {
    MadeImage::of(&Layer::busybox().directory("srv/"), config)
}

fn names(daemon: &Daemon) -> Vec<String> {
    let list = daemon.get("/v1/templates").expect(200);
    let list = list["templates"].as_array().expect("a list").clone();
    list.iter().map(|template| template["name"].as_str().expect("a name").to_owned()).collect()
}

#[test]
fn a_template_is_made_shown_changed_renamed_and_deleted() {
    let daemon = Daemon::start();
    assert_eq!(names(&daemon), ["default"]);
    let body = json!({
        "name": "small", "cpu": "500m", "memory": "512Mi", "disk": "5Gi", "env": {"A": "1"}, "cwd": "/tmp",
        "user": "nobody", "command": ["id", "-un"], "labels": {"team": "ml"},
    });
    let made = create(&daemon, body.clone());
    assert_eq!(made.header("location"), Some("/v1/templates/small"));
    let made = made.expect(201);
    assert_eq!((&made["version"], &made["state"]), (&json!(1), &json!("ready")));
    assert_eq!(made["limits"]["cpu_millis"], 500);
    assert_eq!(made["limits"]["memory_bytes"], 512 << 20);
    assert_eq!(made["disk_bytes"], 5u64 << 30);
    assert_eq!(get(&daemon, "small"), made);
    assert_eq!(names(&daemon), ["default", "small"]);
    create(&daemon, body).expect_refusal(409, "name_taken");
    create(&daemon, json!({"name": "default"})).expect_refusal(409, "template_built_in");

    let changed = update(&daemon, "small", json!({"memory": "1Gi", "cwd": null})).expect(200);
    assert_eq!(
        (&changed["version"], &changed["cwd"], &changed["user"]),
        (&json!(2), &Value::Null, &json!("nobody"))
    );
    // A change without effect makes no version, and neither does a new name.
    assert_eq!(update(&daemon, "small", json!({"memory": "1Gi"})).expect(200)["version"], 2);
    let renamed = update(&daemon, "small", json!({"name": "tiny"})).expect(200);
    assert_eq!(
        (&renamed["version"], &renamed["name"], &renamed["id"]),
        (&json!(2), &json!("tiny"), &made["id"])
    );
    daemon.get("/v1/templates/small").expect_refusal(404, "template_not_found");
    create(&daemon, json!({"name": "other"})).expect(201);
    update(&daemon, "other", json!({"name": "tiny"})).expect_refusal(409, "name_taken");
    update(&daemon, "none", json!({})).expect_refusal(404, "template_not_found");
    update(&daemon, "default", json!({"memory": "2Gi"})).expect_refusal(409, "template_built_in");

    daemon.delete("/v1/templates/tiny").expect(204);
    daemon.delete("/v1/templates/tiny").expect_refusal(404, "template_not_found");
    daemon.delete("/v1/templates/default").expect_refusal(409, "template_built_in");
    assert_eq!(names(&daemon), ["default", "other"]);
}

#[test]
fn a_sandbox_has_what_its_template_says_and_what_the_request_says_instead() {
    let daemon = Daemon::start();
    let body = json!({
        "name": "t", "cpu": "250m", "memory": "128Mi", "env": {"A": "template", "B": "template"}, "cwd": "/tmp",
        "user": "nobody", "command": ["sh", "-c", "echo entry $A"], "labels": {"team": "ml", "tier": "low"},
    });
    create(&daemon, body).expect(201);
    let sandbox = daemon.sandbox_with(json!({"template": "t"}));
    let shown = sandbox.get();
    assert_eq!((&shown["template"], &shown["template_version"]), (&json!("t"), &json!(1)));
    assert_eq!(shown["limits"]["cpu_millis"], 250);
    assert_eq!(shown["labels"], json!({"team": "ml", "tier": "low"}));
    assert_eq!(sandbox.sh("pwd; id -un; echo $A $B").ok().text(), "/tmp\nnobody\ntemplate template");
    assert_eq!(sandbox.run(json!({})).ok().text(), "entry template");
    let own = json!({"argv": ["sh", "-c", "pwd; id -un; echo $B"], "cwd": "/", "user": "root", "env": {"B": "own"}});
    assert_eq!(sandbox.run(own).ok().text(), "/\nroot\nown");

    let other = daemon.sandbox_with(json!({
        "template": "t", "cpu": "500m", "memory": "256Mi", "env": {"A": "request"}, "labels": {"tier": "high"},
    }));
    let shown = other.get();
    assert_eq!(shown["limits"]["cpu_millis"], 500);
    assert_eq!(shown["limits"]["memory_bytes"], 256 << 20);
    assert_eq!(shown["labels"], json!({"team": "ml", "tier": "high"}));
    assert_eq!(other.sh("echo $A $B").ok().text(), "request template");
    daemon.post("/v1/sandboxes", &json!({"template": "none"})).expect_refusal(404, "template_not_found");
}

#[test]
fn sandboxes_keep_the_version_they_were_made_from_over_a_restart_too() {
    let mut daemon = Daemon::start();
    create(&daemon, json!({"name": "t", "env": {"V": "one"}, "command": ["sh", "-c", "echo first"]}))
        .expect(201);
    let old = daemon.sandbox_with(json!({"template": "t"}));
    update(&daemon, "t", json!({"env": {"V": "two"}, "command": ["sh", "-c", "echo second"]})).expect(200);
    update(&daemon, "t", json!({"name": "renamed"})).expect(200);
    let new = daemon.sandbox_with(json!({"template": "renamed"}));
    let look = |daemon: &Daemon| {
        let (old, new) = (daemon.sandbox_of(&old.id), daemon.sandbox_of(&new.id));
        assert_eq!(
            (old.sh("echo $V").ok().text(), new.sh("echo $V").ok().text()),
            ("one".into(), "two".into())
        );
        assert_eq!(old.run(json!({})).ok().text(), "first");
        assert_eq!(new.run(json!({})).ok().text(), "second");
        let (old, new) = (old.get(), new.get());
        assert_eq!((&old["template"], &old["template_version"]), (&json!("renamed"), &json!(1)));
        assert_eq!((&new["template"], &new["template_version"]), (&json!("renamed"), &json!(2)));
        let template = get(daemon, "renamed");
        assert_eq!((&template["version"], &template["sandboxes"]), (&json!(2), &json!(2)));
    };
    look(&daemon);
    daemon.crash();
    look(&daemon);
    // Sandboxes of any version hold it.
    let refused = daemon.delete("/v1/templates/renamed").expect_refusal(409, "template_in_use");
    assert_eq!(refused["details"]["sandboxes"], 2);
    daemon.sandbox_of(&new.id).delete();
    daemon.delete("/v1/templates/renamed").expect_refusal(409, "template_in_use");
    daemon.sandbox_of(&old.id).delete();
    daemon.delete("/v1/templates/renamed").expect(204);
}

#[test]
fn a_template_pulls_its_image_and_holds_it_whatever_becomes_of_the_name() {
    let (puppet, daemon) = ground();
    let first = busybox(json!({"Env": ["PATH=/bin", "FROM=first"], "WorkingDir": "/srv"}));
    let name = puppet.serve("app", "1", &first);
    let made = create(&daemon, json!({"name": "t", "image": name})).expect(202);
    assert_eq!(made["state"], "preparing");
    let ready = settled(&daemon, "t");
    assert_eq!(ready["state"], "ready", "{ready}");
    assert_eq!(ready["image_digest"], digest(&first.manifest));
    // From now on the tag means another image, which is pulled under the same name.
    let second = busybox(json!({"Env": ["PATH=/bin", "FROM=second"]}));
    puppet.serve("app", "1", &second);
    daemon.post("/v1/images/pull", &json!({"reference": name})).expect(200);
    let sandbox = daemon.sandbox_with(json!({"template": "t"}));
    assert_eq!(sandbox.sh("echo $FROM; pwd").ok().text(), "first\n/srv");
    assert_eq!(sandbox.get()["image_digest"], ready["image_digest"]);
    sandbox.delete();
    // It cannot be collected while the template holds it, and its files stay.
    daemon.post("/v1/images/gc", &json!({})).expect(200);
    let again = daemon.sandbox_with(json!({"template": "t"}));
    assert_eq!(again.sh("echo $FROM").ok().text(), "first");
    again.delete();
    // Pulled again, the name means the current image.
    let next = update(&daemon, "t", json!({"env": {"NEW": "1"}})).expect(200);
    assert_eq!(next["version"], 2);
    assert_eq!(settled(&daemon, "t")["image_digest"], digest(&second.manifest));
    daemon
        .delete(&format!("/v1/images/{}", name.replace('/', "%2F").replace(':', "%3A")))
        .expect_refusal(409, "image_in_use");
    daemon.delete("/v1/templates/t").expect(204);
    let collected = daemon.post("/v1/images/gc", &json!({})).expect(200);
    assert_eq!(collected["images"], 1, "what nothing holds any more goes: {collected}");
}

#[test]
fn a_preparation_that_fails_keeps_its_reason_and_can_be_tried_again() {
    let (puppet, mut daemon) = ground();
    let name = format!("{}/late:1", puppet.address);
    create(&daemon, json!({"name": "t", "image": name})).expect(202);
    let failed = settled(&daemon, "t");
    assert_eq!(failed["state"], "failed");
    assert!(failed["reason"].as_str().expect("a reason").contains("late"), "{failed}");
    let refused =
        daemon.post("/v1/sandboxes", &json!({"template": "t"})).expect_refusal(409, "template_failed");
    assert!(refused["hint"].as_str().expect("a hint").contains("prepare"));
    daemon.crash();
    assert_eq!(get(&daemon, "t"), failed, "as it was");
    puppet.serve("late", "1", &busybox(json!({"Env": ["PATH=/bin"]})));
    daemon.post("/v1/templates/t/prepare", &json!({})).expect(200);
    let sandbox = daemon.sandbox_with(json!({"template": "t"}));
    assert_eq!(sandbox.sh("echo here").ok().text(), "here");
    let ready = get(&daemon, "t");
    assert_eq!(
        (&ready["state"], &ready["version"], &ready["reason"]),
        (&json!("ready"), &json!(1), &Value::Null)
    );
    // No effect if nothing has failed.
    assert_eq!(daemon.post("/v1/templates/t/prepare", &json!({})).expect(200), get(&daemon, "t"));
}

#[test]
fn a_preparation_that_a_crash_cuts_off_is_taken_up_again() {
    let (puppet, mut daemon) = ground();
    let image = busybox(json!({"Env": ["PATH=/bin"]}));
    let name = puppet.serve("app", "1", &image);
    let (blob, bytes) = image.blobs.iter().max_by_key(|(_, bytes)| bytes.len()).expect("a layer");
    let (blob, bytes) = (blob.clone(), bytes.clone());
    let path = format!("/v2/app/blobs/{blob}");
    puppet.on(&path, Deed::Stall { bytes: bytes.clone(), after: bytes.len() / 2 });
    create(&daemon, json!({"name": "t", "image": name})).expect(202);
    until_true("the layer is on its way", || !puppet.seen(&blob).is_empty());
    assert_eq!(get(&daemon, "t")["state"], "preparing");
    daemon.kill();
    puppet.on(&path, Deed::Serve(bytes));
    daemon.start_again();
    let ready = settled(&daemon, "t");
    assert_eq!(ready["state"], "ready", "{ready}");
    assert_eq!(daemon.sandbox_with(json!({"template": "t"})).sh("echo up").ok().text(), "up");
}

#[test]
fn whoever_creates_while_a_template_is_prepared_waits_for_it() {
    let (puppet, daemon) = ground();
    let image = busybox(json!({"Env": ["PATH=/bin"]}));
    let name = puppet.serve("app", "1", &image);
    let (blob, bytes) = image.blobs.iter().max_by_key(|(_, bytes)| bytes.len()).expect("a layer");
    let (blob, bytes) = (blob.clone(), bytes.clone());
    puppet.on(&format!("/v2/app/blobs/{blob}"), Deed::Cut { after: bytes.len() / 3, bytes, times: 2 });
    create(&daemon, json!({"name": "t", "image": name})).expect(202);
    std::thread::scope(|scope| {
        let waits =
            scope.spawn(|| daemon.sandbox_with(json!({"template": "t"})).sh("echo waited").ok().text());
        let quick = daemon.post("/v1/sandboxes", &json!({"template": "t", "wait": false})).expect(202);
        let quick = daemon.sandbox_of(quick["id"].as_str().expect("an id"));
        until_true("it runs", || quick.get()["state"] == "running");
        assert_eq!(waits.join().expect("it runs"), "waited");
        assert_eq!(quick.get()["template_version"], 1);
    });
    let manifests = puppet.seen("/v2/app/manifests/1").len();
    assert!(manifests <= 2, "one pull for all of them, and not {manifests}");
}

#[test]
fn progress_is_told_as_events_and_so_is_every_state() {
    let (puppet, daemon) = ground();
    let image = busybox(json!({"Env": ["PATH=/bin"]}));
    let name = puppet.serve("app", "1", &image);
    let all = daemon.request("GET", "/v1/events").open(daemon.address).expect("a stream");
    create(&daemon, json!({"name": "t", "image": name})).expect(202);
    let mut told = Vec::new();
    let stream = daemon.request("GET", "/v1/templates/t/events").open(daemon.address).expect("a stream");
    server_events(stream, |event| told.push(event.data)).expect("it ends by itself");
    let last = told.pop().expect("an end");
    assert_eq!((&last["type"], &last["state"]), (&json!("ready"), &json!("ready")));
    for event in &told {
        assert_eq!(event["type"], "progress");
    }
    daemon.delete("/v1/templates/t").expect(204);
    let (send, states) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        // It ends with the test, or with the daemon.
        let _ = server_events(all, |event| {
            let data = event.data;
            let state = match data["type"].as_str() {
                Some("template") => data["state"].as_str().expect("a state").to_owned(),
                Some("template_deleted") => "deleted".to_owned(),
                _ => return,
            };
            let _ = send.send(state);
        });
    });
    for expected in ["preparing", "ready", "deleted"] {
        assert_eq!(states.recv_timeout(DEADLINE).expect("an event comes"), expected);
    }
    daemon.get("/v1/templates/none/events").expect_refusal(404, "template_not_found");
}

#[test]
fn bad_templates_are_refused_and_leave_nothing() {
    let daemon = Daemon::start();
    for (body, part) in [
        (json!({"name": "t", "cpu": "12Q"}), "12Q"),
        (json!({"name": "t", "memory": "12Q"}), "12Q"),
        (json!({"name": "t", "disk": "lots"}), "lots"),
        (json!({"name": "t", "cpu": "1m"}), "at least 10"),
        (json!({"name": "t", "memory": "512"}), "left out"),
        (json!({"name": "t", "cwd": "here"}), "absolute"),
        (json!({"name": "t", "user": ""}), "user"),
        (json!({"name": "t", "command": [""]}), "begin with a program"),
        (json!({"name": "t", "env": {"A=B": "x"}}), "env"),
        (json!({"name": "t", "image": "UPPER//case"}), "image"),
        (json!({"name": ""}), "empty"),
        (json!({"name": "a\nb"}), "control character"),
        (json!({"name": "t", "mounts": [{"volume": "v", "path": "/proc/1"}]}), "/proc/1"),
        (json!({"name": "t", "mounts": [{"volume": "v", "path": "data"}]}), "absolute"),
        (
            json!({"name": "t", "mounts": [{"volume": "v", "path": "/a"}, {"volume": "w", "path": "/a/"}]}),
            "got `/a` twice",
        ),
        (json!({"name": "t", "typo": 1}), "typo"),
        (json!({"image": "host"}), "name"),
    ] {
        let refused = create(&daemon, body.clone()).expect_refusal(400, "invalid_request");
        assert!(refused["message"].as_str().expect("text").contains(part), "{body}: {refused}");
    }
    let volume = json!({"name": "t", "mounts": [{"volume": "v", "path": "/data"}]});
    let refused = create(&daemon, volume.clone()).expect_refusal(404, "volume_not_found");
    assert_eq!(refused["details"]["volume"], "v");
    assert_eq!(names(&daemon), ["default"]);
    create(&daemon, json!({"name": "t"})).expect(201);
    let before = get(&daemon, "t");
    update(&daemon, "t", json!({"memory": "12Q", "name": "other"})).expect_refusal(400, "invalid_request");
    update(&daemon, "t", json!({"mounts": volume["mounts"]})).expect_refusal(404, "volume_not_found");
    assert_eq!(get(&daemon, "t"), before, "all or nothing");
}

#[test]
fn putting_a_template_twice_changes_it_once() {
    let daemon = Daemon::start();
    let first = apply(&daemon, "t", json!({"memory": "256Mi", "env": {"A": "1"}})).expect(201);
    assert_eq!(apply(&daemon, "t", json!({"memory": "256Mi", "env": {"A": "1"}})).expect(201), first);
    let second = apply(&daemon, "t", json!({"memory": "256Mi"})).expect(201);
    assert_eq!((&second["version"], &second["env"]), (&json!(2), &json!({})));
    apply(&daemon, "default", json!({})).expect_refusal(409, "template_built_in");
    // Many versions are not many rows: unused versions are forgotten.
    for number in 0..50 {
        update(&daemon, "t", json!({"env": {"N": number.to_string()}})).expect(200);
    }
    assert_eq!(get(&daemon, "t")["version"], 52);
}

#[test]
fn templates_are_their_owners_own() {
    let daemon = Daemon::start();
    create(&daemon, json!({"name": "mine"})).expect(201);
    let key = daemon.post("/v1/keys", &json!({"owner": "other"})).expect(201);
    let secret = key["secret"].as_str().expect("a secret").to_owned();
    let ask = |method: &str, path: &str| Request::new(method, path).key(&secret);
    ask("GET", "/v1/templates/mine").send(daemon.address).expect_refusal(404, "template_not_found");
    ask("DELETE", "/v1/templates/mine").send(daemon.address).expect_refusal(404, "template_not_found");
    ask("POST", "/v1/sandboxes")
        .json(&json!({"template": "mine"}))
        .send(daemon.address)
        .expect_refusal(404, "template_not_found");
    ask("POST", "/v1/templates").json(&json!({"name": "mine"})).send(daemon.address).expect(201);
}

fn command_of(daemon: &Daemon, arguments: &[&str]) -> Command {
    let mut command = Command::new(binary());
    command.args(arguments).env_remove("SHOAL_DATA_DIR").env("HOME", daemon.home.path());
    command.env("SHOAL_URL", format!("http://{}", daemon.address)).env("SHOAL_API_KEY", &daemon.key);
    command.current_dir(daemon.home.path()).stdin(Stdio::null());
    command
}

fn shoal(daemon: &Daemon, arguments: &[&str]) -> Output {
    command_of(daemon, arguments).output().expect("it runs")
}

#[track_caller]
fn said(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("it speaks text")
}

#[track_caller]
fn complained(output: Output, code: i32) -> String {
    assert_eq!(output.status.code(), Some(code), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr).expect("it speaks text")
}

#[test]
fn the_command_line_does_all_of_it() {
    let (puppet, daemon) = ground();
    let name = puppet.serve("app", "1", &busybox(json!({"Env": ["PATH=/bin"]})));
    let made = said(shoal(
        &daemon,
        &[
            "template", "create", "web", "--image", &name, "--cpu", "500m", "-e", "A=1", "-l", "team=ml",
            "--wait", "--", "echo", "served",
        ],
    ));
    assert_eq!(made, "web  version 1  ready\n");
    assert_eq!(said(shoal(&daemon, &["run", "--template", "web"])), "served\n");
    let shown = said(shoal(&daemon, &["template", "get", "web"]));
    assert!(shown.contains("cpu        500m\n") && shown.contains("env        A=1\n"), "{shown}");
    let list = said(shoal(&daemon, &["template", "ls"]));
    assert!(list.lines().next().expect("a header").starts_with("NAME"), "{list}");
    assert!(list.contains("default") && list.contains("web"), "{list}");
    said(shoal(&daemon, &["template", "update", "web", "-e", "B=2", "-u", "root", "--name", "site"]));
    let json = said(shoal(&daemon, &["template", "get", "--json", "site"]));
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!((&json["env"], &json["version"]), (&json!({"A": "1", "B": "2"}), &json!(2)));
    said(shoal(&daemon, &["template", "update", "site", "--no-env", "-u", ""]));
    assert_eq!((&get(&daemon, "site")["env"], &get(&daemon, "site")["user"]), (&json!({}), &Value::Null));

    let missing = complained(
        shoal(
            &daemon,
            &["template", "create", "bad", "--image", &format!("{}/no:1", puppet.address), "--wait"],
        ),
        1,
    );
    assert!(
        missing.contains("could not be prepared") && missing.contains("shoal template prepare"),
        "{missing}"
    );
    let quantity = complained(shoal(&daemon, &["template", "create", "worse", "--memory", "12Q"]), 1);
    assert!(quantity.contains("`12Q` is not a quantity"), "{quantity}");

    let file = daemon.home.join("shoal.toml");
    std::fs::write(&file, "[templates.a]\nmemory = \"256Mi\"\n\n[templates.b]\nenv = { X = \"1\" }\n")
        .expect("written");
    let applied = said(shoal(&daemon, &["template", "apply", "--wait"]));
    assert_eq!(applied, "a  version 1  ready\nb  version 1  ready\n");
    assert_eq!(said(shoal(&daemon, &["template", "apply"])), applied, "twice is once");
    std::fs::write(&file, "[templates.a]\nmemory = \"256Mi\"\nmemry = 1\n").expect("written");
    let typo = complained(shoal(&daemon, &["template", "apply", "-f", "shoal.toml"]), 1);
    assert!(typo.contains("line 3") && typo.contains("memry"), "{typo}");
    std::fs::write(&file, "[templates.a]\nmemory = \"12Q\"\n[templates.b]\ncpu = \"250m\"\n")
        .expect("written");
    let half = complained(shoal(&daemon, &["template", "apply"]), 1);
    assert!(half.contains("cannot apply template `a`"), "{half}");
    assert_eq!(get(&daemon, "b")["limits"]["cpu_millis"], 250, "the others are applied all the same");
    complained(shoal(&daemon, &["template", "apply", "-f", "none.toml"]), 1);
    said(shoal(&daemon, &["template", "rm", "a", "b", "bad", "site"]));
    let missing = complained(shoal(&daemon, &["template", "rm", "a"]), 1);
    assert!(missing.contains("template `a` does not exist"), "{missing}");
}

#[test]
fn creates_and_deletes_at_once_never_leave_a_sandbox_without_its_template() {
    let daemon = Daemon::start();
    for round in 0..10 {
        create(&daemon, json!({"name": "t", "env": {"R": round.to_string()}})).expect(201);
        std::thread::scope(|scope| {
            let makes: Vec<_> = (0..3)
                .map(|_| scope.spawn(|| daemon.post("/v1/sandboxes", &json!({"template": "t"}))))
                .collect();
            let goes = scope.spawn(|| daemon.delete("/v1/templates/t"));
            let gone = goes.join().expect("it answers").status == 204;
            for made in makes {
                let made = made.join().expect("it answers");
                match made.status {
                    201 => {
                        assert!(!gone, "a template went under its sandbox");
                        daemon.sandbox_of(made.json()["id"].as_str().expect("an id")).delete();
                    }
                    404 => assert!(gone, "{}", made.describe()),
                    other => panic!("{other}: {}", made.describe()),
                }
            }
            if !gone {
                daemon.delete("/v1/templates/t").expect(204);
            }
        });
    }
}
