//! Volumes: storage that outlives sandboxes, mounted into any number of them.

use std::io::Write;
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use shoal_tests::daemon::{binary, kill_hard};
use shoal_tests::wait::until_true;
use shoal_tests::{Daemon, Request, Response, Sandbox, Spawn};

/// A daemon whose store enforces the sizes of volumes.
fn with_store() -> Daemon {
    let environment = [("SHOAL_STORE", "loop"), ("SHOAL_STORE_SIZE", "512Mi")]
        .map(|(name, value)| (name.into(), value.into()));
    Spawn { environment: environment.into(), ..Spawn::default() }.start()
}

fn create(daemon: &Daemon, body: Value) -> Response {
    daemon.post("/v1/volumes", &body)
}

fn get(daemon: &Daemon, name: &str) -> Value {
    daemon.get(&format!("/v1/volumes/{name}")).expect(200)
}

fn update(daemon: &Daemon, name: &str, body: Value) -> Response {
    daemon.request("PATCH", &format!("/v1/volumes/{name}")).json(&body).send(daemon.address)
}

fn delete(daemon: &Daemon, name: &str) -> Response {
    daemon.delete(&format!("/v1/volumes/{name}"))
}

fn mounting(daemon: &Daemon, name: &str, mounts: Value) -> Sandbox {
    daemon.sandbox_with(json!({"name": name, "mounts": mounts}))
}

fn names(daemon: &Daemon) -> Vec<String> {
    let list = daemon.get("/v1/volumes").expect(200);
    let list = list["volumes"].as_array().expect("a list").clone();
    list.iter().map(|volume| volume["name"].as_str().expect("a name").to_owned()).collect()
}

/// Everything that can be done to a volume, in any kind of store.
#[track_caller]
fn check_life(daemon: &Daemon) {
    let made = create(daemon, json!({"name": "data", "size": "64Mi"})).expect(201);
    assert_eq!((&made["name"], &made["size_bytes"]), (&json!("data"), &json!(64 << 20)));
    assert_eq!(made["mounted_by"], json!([]));
    create(daemon, json!({"name": "data", "size": "64Mi"})).expect_refusal(409, "name_taken");

    // Two sandboxes with their own ids, one of which mounts read-only.
    let writer = mounting(daemon, "writer", json!([{"volume": "data", "path": "/data"}]));
    let reader =
        mounting(daemon, "reader", json!([{"volume": "data", "path": "/srv/deep/er", "read_only": true}]));
    assert_eq!(writer.get()["mounts"], json!([{"volume": "data", "path": "/data"}]));
    writer.sh("echo one > /data/file && chown 1234:4321 /data/file && chmod 640 /data/file").ok();
    let seen = reader.sh("stat -c '%u:%g %a' /srv/deep/er/file; cat /srv/deep/er/file").ok();
    assert_eq!(seen.text(), "1234:4321 640\none");
    let refused = reader.sh("echo two > /srv/deep/er/other");
    assert!(refused.errors().contains("Read-only file system"), "{}", refused.errors());
    // Root of the sandbox cannot change that.
    let refused = reader.sh("mount -o remount,rw /srv/deep/er");
    assert_ne!(refused.exit_code(), Some(0));
    // Commands of any user may write to a new volume.
    writer.run(json!({"script": "echo two > /data/nobodys", "user": "nobody"})).ok();

    // Deleting is rejected while it is mounted; the error names the sandboxes.
    let refused = delete(daemon, "data").expect_refusal(409, "volume_in_use");
    assert_eq!(refused["details"]["sandboxes"], json!(["reader", "writer"]));
    let holders = get(daemon, "data")["mounted_by"].clone();
    assert_eq!(holders[0]["name"], "reader");
    assert_eq!((&holders[0]["path"], &holders[0]["read_only"]), (&json!("/srv/deep/er"), &json!(true)));

    // A new name and a new size, while it is mounted.
    let renamed = update(daemon, "data", json!({"name": "kept", "size": "96Mi"})).expect(200);
    assert_eq!((&renamed["id"], &renamed["size_bytes"]), (&made["id"], &json!(96 << 20)));
    daemon.get("/v1/volumes/data").expect_refusal(404, "volume_not_found");
    assert_eq!(writer.get()["mounts"][0]["volume"], "kept");
    writer.sh("cat /data/file").ok();

    // The data outlives the sandboxes.
    writer.delete();
    reader.delete();
    let later = mounting(daemon, "later", json!([{"volume": "kept", "path": "/data"}]));
    assert_eq!(later.sh("cat /data/file /data/nobodys").ok().text(), "one\ntwo");
    later.delete();
    delete(daemon, "kept").expect(204);
    delete(daemon, "kept").expect_refusal(404, "volume_not_found");
    assert_eq!(names(daemon), [] as [String; 0]);
}

#[test]
fn a_volume_is_made_mounted_changed_and_deleted_in_a_store() {
    let daemon = with_store();
    check_life(&daemon);
    create(&daemon, json!({"name": "v", "size": "1Mi"})).expect(201);
    assert_eq!(get(&daemon, "v")["size_enforced"], true);
}

#[test]
fn a_volume_is_made_mounted_changed_and_deleted_in_plain_directories() {
    let daemon = Daemon::start();
    check_life(&daemon);
    create(&daemon, json!({"name": "v", "size": "1Mi"})).expect(201);
    assert_eq!(get(&daemon, "v")["size_enforced"], false, "a size that is not enforced is reported as such");
}

#[test]
fn a_full_volume_is_full_for_whoever_writes_and_nobody_else() {
    let daemon = with_store();
    create(&daemon, json!({"name": "small", "size": "16Mi"})).expect(201);
    create(&daemon, json!({"name": "other", "size": "16Mi"})).expect(201);
    let sandbox = mounting(
        &daemon,
        "s",
        json!([{"volume": "small", "path": "/small"}, {"volume": "other", "path": "/other"}]),
    );
    let full = sandbox.sh("head -c 64M /dev/zero > /small/big");
    assert!(
        full.errors().contains("quota exceeded") || full.errors().contains("No space left"),
        "{}",
        full.errors()
    );
    let used = get(&daemon, "small")["used_bytes"].as_u64().expect("a number");
    assert!(((12 << 20)..=(16 << 20)).contains(&used), "{used}");
    sandbox.sh("head -c 8M /dev/zero > /other/fits && head -c 32M /dev/zero > /workspace/fits").ok();
    // Shrinking below the contents is rejected, growing helps at once, deleting does too.
    let refused = update(&daemon, "small", json!({"size": "2Mi"})).expect_refusal(409, "volume_too_small");
    assert_eq!(refused["details"]["used_bytes"].as_u64().map(|bytes| bytes > 2 << 20), Some(true));
    update(&daemon, "small", json!({"size": "80Mi"})).expect(200);
    sandbox.sh("head -c 60M /dev/zero > /small/big").ok();
    sandbox.sh("rm /small/big && sync").ok();
    until_true("the space is counted as free", || {
        get(&daemon, "small")["used_bytes"].as_u64() < Some(1 << 20)
    });
    update(&daemon, "small", json!({"size": "2Mi"})).expect(200);
    let full = sandbox.sh("head -c 4M /dev/zero > /small/again");
    assert_ne!(full.exit_code(), Some(0));
}

#[test]
fn bad_volumes_and_mounts_are_refused_and_leave_nothing() {
    let daemon = with_store();
    for (body, part) in [
        (json!({"name": "a/b", "size": "1Gi"}), "`/`"),
        (json!({"name": "..", "size": "1Gi"}), ".."),
        (json!({"name": "", "size": "1Gi"}), "empty"),
        (json!({"name": "a\u{0}b", "size": "1Gi"}), "control"),
        (json!({"name": "x".repeat(256), "size": "1Gi"}), "255"),
        (json!({"name": "v", "size": "0"}), "size"),
        (json!({"name": "v", "size": "1"}), "left out"),
        (json!({"name": "v", "size": "1Pi"}), "the size of the store"),
        (json!({"name": "v", "size": "-1Gi"}), "size"),
        (json!({"name": "v", "size": "lots"}), "size"),
        (json!({"name": "v"}), "size"),
        (json!({"name": "v", "size": "1Mi", "typo": 1}), "typo"),
    ] {
        let refused = create(&daemon, body.clone()).expect_refusal(400, "invalid_request");
        assert!(refused["message"].as_str().expect("text").contains(part), "{body}: {refused}");
    }
    create(&daemon, json!({"name": "v", "size": "1Mi", "from": "none"}))
        .expect_refusal(404, "volume_not_found");
    create(&daemon, json!({"name": "v", "size": "8Mi"})).expect(201);
    update(&daemon, "v", json!({"size": "0"})).expect_refusal(400, "invalid_request");
    update(&daemon, "v", json!({"size": "1Pi"})).expect_refusal(400, "invalid_request");
    update(&daemon, "v", json!({"name": "a/b"})).expect_refusal(400, "invalid_request");
    for (path, part) in [
        ("/proc", "/proc"),
        ("/proc/self/fd", "/proc"),
        ("/sys/fs", "/sys"),
        ("/dev/shm", "/dev"),
        ("/run/shoal", "/run/shoal"),
        ("/", "`/`"),
        ("data", "absolute"),
        ("", "absolute"),
        ("/a/../proc", ".."),
        ("/a\u{0}b", "NUL"),
    ] {
        let body = json!({"mounts": [{"volume": "v", "path": path}]});
        let refused = daemon.post("/v1/sandboxes", &body).expect_refusal(400, "invalid_request");
        assert!(refused["message"].as_str().expect("text").contains(part), "{path}: {refused}");
    }
    let twice = json!({"mounts": [{"volume": "v", "path": "/a"}, {"volume": "v", "path": "/a//"}]});
    daemon.post("/v1/sandboxes", &twice).expect_refusal(400, "invalid_request");
    let missing = json!({"mounts": [{"volume": "none", "path": "/a"}]});
    let refused = daemon.post("/v1/sandboxes", &missing).expect_refusal(404, "volume_not_found");
    assert_eq!(refused["details"]["volume"], "none");
    assert_eq!(daemon.list(), [] as [Value; 0]);
    assert_eq!(names(&daemon), ["v"]);
    // A mount path that is a link, which the kernel would follow to wherever it leads.
    let through = json!({"mounts": [{"volume": "v", "path": "/bin/data"}]});
    let failed = daemon.post("/v1/sandboxes", &through);
    assert!(failed.status >= 400, "{}", failed.describe());
    assert!(failed.describe().contains("`bin` is a link"), "{}", failed.describe());
}

#[test]
fn a_volume_of_another_owner_is_not_there() {
    let daemon = Daemon::start();
    create(&daemon, json!({"name": "mine", "size": "1Mi"})).expect(201);
    let key = daemon.post("/v1/keys", &json!({"owner": "other"})).expect(201)["secret"]
        .as_str()
        .expect("a key")
        .to_owned();
    let ask = |method: &str, target: &str| Request::new(method, target).key(&key);
    ask("GET", "/v1/volumes/mine").send(daemon.address).expect_refusal(404, "volume_not_found");
    ask("DELETE", "/v1/volumes/mine").send(daemon.address).expect_refusal(404, "volume_not_found");
    ask("GET", "/v1/volumes/mine/tar").send(daemon.address).expect_refusal(404, "volume_not_found");
    let body = json!({"mounts": [{"volume": "mine", "path": "/a"}]});
    ask("POST", "/v1/sandboxes").json(&body).send(daemon.address).expect_refusal(404, "volume_not_found");
    assert_eq!(ask("GET", "/v1/volumes").send(daemon.address).expect(200)["volumes"], json!([]));
}

#[test]
fn a_template_mounts_its_volumes_and_a_request_may_mount_others() {
    let daemon = Daemon::start();
    let template = json!({"name": "t", "mounts": [{"volume": "v", "path": "/v"}]});
    daemon.post("/v1/templates", &template).expect_refusal(404, "volume_not_found");
    create(&daemon, json!({"name": "v", "size": "8Mi"})).expect(201);
    create(&daemon, json!({"name": "w", "size": "8Mi"})).expect(201);
    let made = daemon.post("/v1/templates", &template).expect(201);
    assert_eq!(made["mounts"], template["mounts"]);
    let plain = daemon.sandbox_with(json!({"template": "t"}));
    plain.sh("echo v > /v/file").ok();
    let other = daemon.sandbox_with(json!({
        "template": "t",
        "mounts": [{"volume": "w", "path": "/v/"}, {"volume": "v", "path": "/deep/v", "read_only": true}],
    }));
    assert_eq!(other.sh("ls /v; cat /deep/v/file").ok().text(), "v", "the request's mount wins at one path");
    // Changing a template changes nothing for existing sandboxes.
    let update = daemon.request("PATCH", "/v1/templates/t").json(&json!({"mounts": []}));
    assert_eq!(update.send(daemon.address).expect(200)["mounts"], json!([]));
    plain.sh("cat /v/file").ok();
    let bare = daemon.sandbox_with(json!({"template": "t"}));
    assert_ne!(bare.sh("test -e /v").exit_code(), Some(0));
}

#[test]
fn volumes_and_mounts_survive_a_crash_of_daemon_and_launcher() {
    let mut daemon = with_store();
    create(&daemon, json!({"name": "data", "size": "32Mi"})).expect(201);
    let id = mounting(&daemon, "s", json!([{"volume": "data", "path": "/data"}])).id;
    daemon.sandbox_of(&id).sh("echo before > /data/file").ok();
    daemon.launchers().into_iter().for_each(kill_hard);
    daemon.sandbox_of(&id).sh("echo between >> /data/file").ok();
    let beside = mounting(&daemon, "beside", json!([{"volume": "data", "path": "/data"}]));
    assert_eq!(beside.sh("cat /data/file").ok().text(), "before\nbetween");
    beside.delete();
    daemon.crash();
    let sandbox = daemon.sandbox_of(&id);
    sandbox.sh("echo after >> /data/file").ok();
    delete(&daemon, "data").expect_refusal(409, "volume_in_use");
    // And the end of all of them, with an orderly stop between.
    sandbox.delete();
    assert!(daemon.stop());
    daemon.start_again();
    let later = mounting(&daemon, "later", json!([{"volume": "data", "path": "/data"}]));
    assert_eq!(later.sh("cat /data/file").ok().text(), "before\nbetween\nafter");
    later.sh("head -c 64M /dev/zero > /data/big; test $? != 0").ok();
}

#[test]
fn what_was_being_made_or_deleted_when_the_daemon_died_is_whole_or_gone() {
    let mut daemon = with_store();
    for round in 0..4 {
        let (address, key, made) = (daemon.address, daemon.key.clone(), Arc::new(AtomicUsize::new(0)));
        let count = Arc::clone(&made);
        // Creates and deletes volumes until the daemon is gone, and returns the last response for each.
        let asking = std::thread::spawn(move || {
            let mut told = Vec::new();
            for number in 0.. {
                let name = format!("v{round}-{number}");
                let body = json!({"name": name, "size": "8Mi"});
                let create = Request::new("POST", "/v1/volumes").key(&key).json(&body).try_send(address);
                let created = create.is_ok_and(|answer| answer.status == 201);
                count.fetch_add(1, Ordering::Relaxed);
                let delete =
                    Request::new("DELETE", &format!("/v1/volumes/{name}")).key(&key).try_send(address);
                let deleted = delete.is_ok_and(|answer| answer.status == 204);
                told.push((name, created, deleted));
                if !deleted {
                    return told;
                }
            }
            told
        });
        until_true("some were made", || made.load(Ordering::Relaxed) > 3 + round);
        daemon.crash();
        for (name, _, deleted) in asking.join().expect("it asked") {
            let target = format!("/v1/volumes/{name}");
            if deleted {
                daemon.get(&target).expect_refusal(404, "volume_not_found");
            }
            // Whatever happened to the last one: it can be used, or its name can.
            until_true("the volume is there, or its name is free", || {
                daemon.get(&target).status == 200
                    || create(&daemon, json!({"name": name, "size": "8Mi"})).status == 201
            });
            let sandbox = mounting(&daemon, &name, json!([{"volume": name, "path": "/v"}]));
            sandbox.sh("echo whole > /v/file && cat /v/file").ok();
            sandbox.delete();
            delete(&daemon, &name).expect(204);
        }
    }
    assert_eq!(names(&daemon), [] as [String; 0]);
}

#[test]
fn a_copy_begins_with_the_files_of_another_and_goes_its_own_way() {
    let daemon = with_store();
    create(&daemon, json!({"name": "one", "size": "32Mi"})).expect(201);
    let sandbox = mounting(&daemon, "s", json!([{"volume": "one", "path": "/one"}]));
    sandbox.sh("echo first > /one/file; head -c 4M /dev/urandom > /one/random; sha256sum /one/random").ok();
    create(&daemon, json!({"name": "small", "size": "2Mi", "from": "one"}))
        .expect_refusal(409, "volume_too_small");
    create(&daemon, json!({"name": "two", "size": "32Mi", "from": "one"})).expect(201);
    sandbox.sh("echo second > /one/file").ok();
    let other =
        mounting(&daemon, "o", json!([{"volume": "two", "path": "/two"}, {"volume": "one", "path": "/one"}]));
    assert_eq!(other.sh("cat /two/file /one/file").ok().text(), "first\nsecond");
    other.sh("cmp /one/random /two/random").ok();
    // Plain directories report that they cannot.
    let plain = Daemon::start();
    create(&plain, json!({"name": "one", "size": "32Mi"})).expect(201);
    create(&plain, json!({"name": "two", "size": "32Mi", "from": "one"}))
        .expect_refusal(409, "copies_not_supported");
    assert_eq!(names(&plain), ["one"]);
}

#[test]
fn files_go_in_and_out_as_tar_streams() {
    let daemon = with_store();
    create(&daemon, json!({"name": "one", "size": "32Mi"})).expect(201);
    create(&daemon, json!({"name": "two", "size": "32Mi"})).expect(201);
    let sandbox = mounting(&daemon, "s", json!([{"volume": "one", "path": "/one"}]));
    sandbox
        .sh("mkdir -p /one/a/b && echo deep > /one/a/b/c && ln -s a/b/c /one/link && ln -s /etc /one/etc")
        .ok();
    sandbox.delete();
    let before = daemon.audit();
    let exported = daemon.get("/v1/volumes/one/tar");
    assert_eq!((exported.status, exported.header("content-type")), (200, Some("application/x-tar")));
    let put = |target: &str, body: Vec<u8>| daemon.request("PUT", target).body(body).send(daemon.address);
    put("/v1/volumes/two/tar?path=/in/side", exported.body.clone()).expect(200);
    put("/v1/volumes/two/tar?path=/../etc", exported.body.clone()).expect_refusal(400, "invalid_request");
    put("/v1/volumes/two/tar", b"no archive at all, though long enough to be looked at".repeat(20))
        .expect_refusal(400, "invalid_archive");
    daemon.get("/v1/volumes/one/tar?path=/none").expect_refusal(404, "file_not_found");
    let other = mounting(&daemon, "o", json!([{"volume": "two", "path": "/two"}]));
    assert_eq!(other.sh("cat /two/in/side/link; readlink /two/in/side/etc").ok().text(), "deep\n/etc");
    other.delete();
    // The sandboxes that did the work are gone, so that both can be deleted.
    daemon.expect_nothing_beyond(&before);
    // The kernel's state is removed before the daemon's.
    for name in ["one", "two"] {
        until_true("nothing holds it any more", || delete(&daemon, name).status == 204);
    }
}

#[test]
fn a_caller_that_leaves_while_a_volume_is_opened_leaves_no_sandbox() {
    let daemon = with_store();
    create(&daemon, json!({"name": "one", "size": "32Mi"})).expect(201);
    for request in
        ["GET /v1/volumes/one/tar HTTP/1.1", "PUT /v1/volumes/one/tar HTTP/1.1\r\ncontent-length: 0"]
    {
        for _ in 0..4 {
            let mut caller = TcpStream::connect(daemon.address).expect("it listens");
            write!(caller, "{request}\r\nhost: shoal\r\nauthorization: Bearer {}\r\n\r\n", daemon.key)
                .expect("it reads");
        }
    }
    until_true("it can be deleted", || delete(&daemon, "one").status == 204);
    assert_eq!(daemon.list(), [] as [Value; 0]);
}

#[test]
fn the_command_line_does_all_of_it() {
    let daemon = with_store();
    let shoal = |arguments: &[&str], stdin: Option<&[u8]>| {
        let mut command = Command::new(binary());
        command.args(arguments).env("SHOAL_URL", format!("http://{}", daemon.address));
        command.env("SHOAL_API_KEY", &daemon.key).env("SHOAL_CONFIG", "").current_dir(daemon.home.path());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program can be started");
        let mut pipe = child.stdin.take().expect("stdin is a pipe");
        std::io::Write::write_all(&mut pipe, stdin.unwrap_or_default()).expect("it takes its input");
        drop(pipe);
        child.wait_with_output().expect("it ends")
    };
    let ok = |arguments: &[&str]| {
        let output = shoal(arguments, None);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    };
    assert_eq!(ok(&["volume", "create", "data", "--size", "32Mi"]), "data 32Mi\n");
    std::fs::create_dir_all(daemon.home.join("tree/sub")).expect("a directory");
    std::fs::write(daemon.home.join("tree/sub/file"), "from here").expect("a file");
    ok(&["volume", "cp", "tree", "data:/"]);
    ok(&["volume", "cp", "data:/tree/sub/file", "back"]);
    assert_eq!(std::fs::read_to_string(daemon.home.join("back")).expect("it came back"), "from here");
    assert_eq!(ok(&["volume", "cp", "data:/tree/sub/file", "-"]), "from here");
    assert_eq!(ok(&["run", "--mount", "data:/d:ro", "--", "cat", "/d/tree/sub/file"]), "from here");
    let refused = shoal(&["run", "--mount", "data:/d:ro", "--", "touch", "/d/x"], None);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("Read-only"));
    assert_eq!(ok(&["volume", "create", "copy", "--from", "data"]), "copy 32Mi\n");
    let exported = shoal(&["volume", "export", "data"], None);
    assert!(exported.status.success());
    ok(&["volume", "create", "third", "--size", "16Mi"]);
    let imported = shoal(&["volume", "import", "third", "--json"], Some(&exported.stdout));
    assert!(imported.status.success(), "{}", String::from_utf8_lossy(&imported.stderr));
    assert_eq!(ok(&["volume", "cp", "third:/tree/sub/file", "-"]), "from here");
    ok(&["volume", "rename", "third", "fourth"]);
    ok(&["volume", "resize", "fourth", "20Mi"]);
    let list = ok(&["volume", "ls"]);
    assert!(list.contains("fourth  20Mi") && list.contains("copy"), "{list}");
    let held = ok(&["create", "--name", "holder", "--mount", "data:/data"]);
    let refused = shoal(&["volume", "rm", "data"], None);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("holder"), "{said}");
    ok(&["rm", held.trim()]);
    ok(&["volume", "rm", "data", "copy", "fourth"]);
    assert_eq!(names(&daemon), [] as [String; 0]);
    assert_eq!(daemon.list(), [] as [Value; 0], "the sandboxes that copied are gone");
}
