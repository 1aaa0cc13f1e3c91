//! Snapshots as OCI archives: written, read by other tools, and made into snapshots again.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};
use shoal_tests::daemon::{Home, kill_hard};
use shoal_tests::images::{Layer, program, skopeo};
use shoal_tests::wait::until_true;
use shoal_tests::{Daemon, Request, Response, Sandbox, Spawn};

/// What archives get wrong first: links of both kinds, modes, owners, long names, removed files, an empty directory.
const CHANGE: &str = "cd /srv 2>/dev/null || { busybox mkdir /srv && cd /srv; }
busybox mkdir -p dir/empty; echo one > dir/f; busybox ln dir/f dir/hard; busybox ln -s dir/f link
busybox chmod 4755 dir/f; busybox chown 1000:1000 dir; busybox mkfifo pipe; rm -rf /home/ada
echo long > 0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789long";
/// Sizes and links of directories are the file system's own.
const LOOK: &str = "cd /; for f in $(find srv home etc/passwd | sort); do if test -d $f; then stat -c '%n %f %u %g' $f; \
    else stat -c '%n %f %u %g %h %s' $f; fi; done; cat srv/dir/hard; readlink srv/link";

fn start(store: &str) -> Daemon {
    let environment = [("SHOAL_STORE", store), ("SHOAL_STORE_SIZE", "1Gi")];
    let environment = environment.map(|(name, value)| (name.into(), value.into()));
    Spawn { environment: environment.into(), ..Spawn::default() }.start()
}

/// A sandbox over a small image, with something written.
fn written(daemon: &Daemon) -> Sandbox {
    let rootfs = Layer::busybox().into_tar();
    daemon.request("POST", "/v1/images/import?name=box:1").body(rootfs).send(daemon.address).expect(200);
    let sandbox = daemon.sandbox_with(json!({"image": "box:1"}));
    sandbox.sh(CHANGE).ok();
    sandbox
}

fn take(sandbox: &Sandbox, name: &str) -> Value {
    let body = json!({"name": name});
    sandbox.request("POST", "/snapshots").json(&body).send(sandbox.address).expect(201)
}

fn export(daemon: &Daemon, snapshot: &str) -> Response {
    daemon.get(&format!("/v1/snapshots/{snapshot}/export"))
}

fn import(daemon: &Daemon, query: &str, archive: &[u8]) -> Response {
    daemon.request("POST", &format!("/v1/snapshots?{query}")).body(archive).send(daemon.address)
}

/// Files of archives that the daemon keeps for the time being.
fn kept(daemon: &Daemon) -> Vec<String> {
    let files = fs::read_dir(daemon.data_dir.join("images/blobs")).expect("a directory");
    files.map(|file| file.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
}

fn comes_back_whole(store: &str) {
    let daemon = start(store);
    let source = written(&daemon);
    let expected = source.sh(LOOK).ok().text();
    let taken = take(&source, "clean");
    // What is written later is not in it, and what lies over its files goes on.
    source.sh("echo later > /srv/later").ok();
    let archive = export(&daemon, "clean").bytes_ok();
    until_true("the archive is removed", || kept(&daemon).is_empty());
    source.delete();
    assert_eq!(daemon.delete(&format!("/v1/snapshots/{}", taken["id"].as_str().expect("an id"))).status, 204);
    let imported = import(&daemon, "name=back&label=k%3Dv", &archive).expect(201);
    assert_eq!((&imported["name"], &imported["state"]), (&json!("back"), &json!("ready")), "{imported}");
    assert_eq!(imported["labels"], json!({"k": "v"}));
    for template in ["back", imported["id"].as_str().expect("an id")] {
        let made = daemon.sandbox_with(json!({"template": template}));
        assert_eq!(made.sh(LOOK).ok().text(), expected);
        // An export of what was imported has the same files.
        let again = take(&made, "again");
        let second = export(&daemon, again["id"].as_str().expect("an id")).bytes_ok();
        assert!(second.len() > 1 << 20);
        made.delete();
    }
}

trait Bytes {
    fn bytes_ok(&self) -> Vec<u8>;
}

impl Bytes for Response {
    #[track_caller]
    fn bytes_ok(&self) -> Vec<u8> {
        assert_eq!(self.status, 200, "{}", self.describe());
        assert_eq!(self.header("content-length"), Some(self.body.len().to_string().as_str()));
        self.body.clone()
    }
}

#[test]
fn an_exported_snapshot_comes_back_whole() {
    comes_back_whole("loop");
}

#[test]
fn an_exported_snapshot_comes_back_whole_without_a_store_with_snapshots() {
    comes_back_whole("directory");
}

#[test]
fn other_tools_read_an_exported_snapshot() {
    let daemon = start("loop");
    let source = written(&daemon);
    take(&source, "clean");
    let directory = Home::new();
    let path = |name: &str| directory.join(name).to_str().expect("text").to_owned();
    fs::write(path("clean.tar"), export(&daemon, "clean").bytes_ok()).expect("written");
    program(&mut skopeo(&[
        &format!("oci-archive:{}", path("clean.tar")),
        &format!("oci:{}:latest", path("layout")),
    ]));
    let image = format!("{}:latest", path("layout"));
    program(Command::new("umoci").args(["unpack", "--image", &image, &path("bundle")]));
    let root = directory.join("bundle/rootfs");
    assert_eq!(fs::read_to_string(root.join("srv/dir/hard")).expect("a file"), "one\n");
    assert!(!root.join("home/ada").exists(), "what was removed is not there");
    assert!(!root.join("run/shoal").exists(), "what belongs to the host is not there");
    let config = fs::read_to_string(directory.join("bundle/config.json")).expect("a file");
    assert!(!config.contains("run/shoal"), "{config}");
}

#[test]
fn the_machines_own_usr_leaves_it_only_if_asked() {
    let daemon = start("loop");
    let source = daemon.sandbox();
    // Of the machine's `/usr`, one program stays, so that the archive is small.
    source
        .sh("cd /usr && set -- bin/true && rm -rf $(ls -A | grep -v '^bin$' | grep -v '^lib') share local")
        .ok();
    source.sh("cd /usr/bin && rm -rf $(ls -A | grep -vE '^(sh|dash|true|rm|ls|grep)$')").ok();
    source.sh("rm -rf /usr/lib*; echo mine > /usr/mine").ok();
    take(&source, "host");
    let refused = export(&daemon, "host").expect_refusal(409, "usr_not_included");
    assert!(refused["hint"].as_str().is_some_and(|hint| hint.contains("usr=include")), "{refused}");
    daemon.get("/v1/snapshots/host/export?usr=maybe").expect_refusal(400, "invalid_request");
    let archive = daemon.get("/v1/snapshots/host/export?usr=include").bytes_ok();
    let contains = |name: &[u8]| archive.windows(name.len()).any(|window| window == name);
    assert!(contains(b"usr/bin/true"), "the machine's own");
    assert!(contains(b"usr/mine"), "the sandbox's own");
    assert!(!contains(b"run/shoal/"), "the host's");
    import(&daemon, "name=elsewhere", &archive).expect(201);
    assert_eq!(daemon.sandbox_with(json!({"template": "elsewhere"})).get()["state"], "running");
}

#[test]
fn bad_archives_strangers_and_limits_are_refused_and_leave_nothing() {
    let daemon = start("loop");
    let source = written(&daemon);
    take(&source, "clean");
    let archive = export(&daemon, "clean").bytes_ok();
    let mut changed = archive.clone();
    let at = changed.len() - 5000;
    changed[at] ^= 1;
    for (query, bytes, code) in [
        ("name=x", b"not an archive".to_vec(), "image_invalid"),
        ("name=x", archive[..archive.len() / 2].to_vec(), "image_invalid"),
        ("name=x", changed, "image_invalid"),
        ("name=x", Layer::busybox().into_tar(), "image_invalid"),
        ("", archive.clone(), "invalid_request"),
        ("name=a%3Ab", archive.clone(), "invalid_request"),
        ("name=x&label=none", archive.clone(), "invalid_request"),
    ] {
        import(&daemon, query, &bytes).expect_refusal(400, code);
    }
    export(&daemon, "nothing").expect_refusal(404, "snapshot_not_found");
    source.sh("echo > /srv/.wh.x").ok();
    take(&source, "reserved");
    export(&daemon, "reserved").expect_refusal(409, "not_exportable");

    let key = daemon.post("/v1/keys", &json!({"owner": "mallory", "snapshots_max": 1})).expect(201);
    let secret = key["secret"].as_str().expect("a secret").to_owned();
    let theirs = |method: &str, path: &str, body: &[u8]| {
        Request::new(method, path).key(&secret).body(body).send(daemon.address)
    };
    theirs("GET", "/v1/snapshots/clean/export", b"").expect_refusal(404, "snapshot_not_found");
    theirs("POST", "/v1/snapshots?name=own", &archive).expect(201);
    theirs("POST", "/v1/snapshots?name=more", &archive).expect_refusal(429, "quota_exceeded");
    let names = |response: Response| -> Vec<String> {
        let list = response.expect(200);
        let all = list["snapshots"].as_array().expect("a list").iter();
        all.map(|snapshot| snapshot["name"].as_str().expect("a name").to_owned()).collect()
    };
    assert_eq!(names(theirs("GET", "/v1/snapshots", b"")), ["own"]);
    assert_eq!(names(daemon.get("/v1/snapshots")), ["reserved", "clean"]);
    until_true("nothing of them is kept", || kept(&daemon).is_empty());
}

#[test]
fn daemons_and_launchers_that_die_during_an_export_or_import_leave_nothing() {
    let mut daemon = start("loop");
    let source = written(&daemon);
    source.sh("head -c 100000000 /dev/urandom > /srv/big").ok();
    take(&source, "clean");
    let archive = export(&daemon, "clean").bytes_ok();
    let layers = |daemon: &Daemon| {
        daemon.post("/v1/images/gc", &json!({})).expect(200);
        let layers = fs::read_dir(daemon.data_dir.join("images/layers")).expect("a directory");
        let mut names: Vec<_> = layers.map(|entry| entry.expect("an entry").file_name()).collect();
        names.sort();
        names
    };
    let before = layers(&daemon);
    let snapshots = daemon.get("/v1/snapshots").expect(200);
    for launcher in [true, false] {
        for exporting in [true, false] {
            let (address, request) = (
                daemon.address,
                match exporting {
                    true => daemon.request("GET", "/v1/snapshots/clean/export"),
                    false => daemon.request("POST", "/v1/snapshots?name=cut").body(archive.clone()),
                },
            );
            let asking = std::thread::spawn(move || request.try_send(address));
            until_true("it is under way", || match exporting {
                true => !kept(&daemon).is_empty(),
                false => {
                    layers_begun(&daemon) || kept(&daemon).iter().any(|name| !name.starts_with("upload"))
                }
            });
            match launcher {
                true => daemon.launchers().into_iter().for_each(kill_hard),
                false => daemon.crash(),
            }
            let answer = asking.join().expect("it asks");
            let what = format!("launcher {launcher}, exporting {exporting}");
            // A launcher that dies early enough is asked again, so a request may succeed all the same.
            if let Ok(answer) = answer
                && launcher
                && answer.status == 201
            {
                assert_eq!(daemon.delete("/v1/snapshots/cut").status, 204, "{what}");
            }
            assert_eq!(daemon.get("/v1/snapshots").expect(200), snapshots, "{what}");
            until_true("nothing is left", || layers(&daemon) == before && kept(&daemon).is_empty());
        }
    }
    assert_eq!(export(&daemon, "clean").bytes_ok(), archive, "the snapshot is whole, and packed alike");
}

fn layers_begun(daemon: &Daemon) -> bool {
    let layers = fs::read_dir(daemon.data_dir.join("images/layers")).expect("a directory");
    layers
        .into_iter()
        .any(|entry| entry.expect("an entry").file_name().to_string_lossy().starts_with("unfinished"))
}
