//! The store, and the disk limits of sandboxes.

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use serde_json::{Value, json};
use shoal_tests::daemon::kill_hard;
use shoal_tests::wait::{until, until_true};
use shoal_tests::{Daemon, Request, Spawn};

const SIZE: &str = "512Mi";

fn spawn(kind: &str, size: &str) -> Spawn {
    let environment = [("SHOAL_STORE", kind), ("SHOAL_STORE_SIZE", size)];
    Spawn {
        environment: environment.map(|(name, value)| (name.into(), value.into())).into(),
        ..Spawn::default()
    }
}

fn with_store() -> Daemon {
    spawn("loop", SIZE).start()
}

/// The entries of a directory of the store, which only the launcher can see.
fn in_store(daemon: &Daemon, directory: &str) -> Vec<String> {
    // A walker looks like the launcher while it lives, which is for a moment.
    let launcher = until("the launcher has no walker", || match daemon.launchers().as_slice() {
        [launcher] => Some(*launcher),
        _ => None,
    });
    let inside = daemon.data_dir.strip_prefix("/").expect("it is absolute");
    let path = PathBuf::from(format!("/proc/{launcher}/root")).join(inside).join("store").join(directory);
    let entries = fs::read_dir(path).expect("the store is mounted in the launcher's namespace");
    entries.map(|entry| entry.expect("a name").file_name().to_string_lossy().into_owned()).collect()
}

/// Whether a loop device has the store's file.
fn is_attached(daemon: &Daemon) -> bool {
    let image = daemon.data_dir.join("store.img");
    let entries = fs::read_dir("/sys/block").expect("sysfs").map(|entry| entry.expect("a name").path());
    entries
        .filter_map(|device| fs::read_to_string(device.join("loop/backing_file")).ok())
        .any(|file| file.trim_end() == image.to_string_lossy())
}

fn used(sandbox: &shoal_tests::Sandbox) -> u64 {
    let stats = sandbox.request("GET", "/stats").send(sandbox.address).expect(200);
    stats["disk"]["bytes"].as_u64().unwrap_or(0)
}

#[test]
fn a_sandbox_over_its_disk_limit_is_told_so_lives_and_recovers() {
    let daemon = with_store();
    let sandbox = daemon.sandbox_with(json!({"disk": "48Mi"}));
    assert_eq!(sandbox.get()["limits"]["disk_bytes"], 48 << 20);
    let full = sandbox.sh("head -c 128M /dev/zero > /workspace/big");
    assert_ne!(full.exit_code(), Some(0));
    assert!(
        full.errors().contains("quota exceeded") || full.errors().contains("No space left"),
        "{}",
        full.errors()
    );
    // The disk exists, commands run, and usage is reported beside the limit.
    assert_eq!(sandbox.sh("echo alive").ok().text(), "alive");
    let bytes = used(&sandbox);
    assert!(((40 << 20)..=(48 << 20)).contains(&bytes), "{bytes}");
    // All of the sandbox's own files count, wherever they are; the image's do not.
    assert_ne!(sandbox.sh("head -c 16M /dev/zero > /usr/local/more").exit_code(), Some(0));
    sandbox.sh("rm -f /workspace/big /usr/local/more; sync -f /workspace").ok();
    sandbox.sh("head -c 40M /dev/zero > /workspace/fits && rm /workspace/fits").ok();
    // Many small files count too: a limit in bytes also limits names.
    let small = daemon.sandbox_with(json!({"disk": "16Mi"}));
    let many = small.python(
        "
import os
os.chdir('/workspace')
for number in range(1000000):
    os.close(os.open('file-with-a-rather-long-name-that-takes-some-room-' * 4 + str(number), os.O_CREAT | os.O_WRONLY))
",
    );
    assert_ne!(many.exit_code(), Some(0), "names have to end somewhere");
    small.sh("find /workspace -name 'file-*' -delete && echo again > /workspace/file").ok();
    // Other sandboxes are not affected, and one without a setting has the default limit.
    let other = daemon.sandbox();
    other.sh("head -c 64M /dev/zero > /workspace/big").ok();
    assert_eq!(other.get()["limits"]["disk_bytes"], 10u64 << 30);
}

#[test]
fn a_template_limits_the_disk_of_its_sandboxes() {
    let daemon = with_store();
    daemon.post("/v1/templates", &json!({"name": "small", "disk": "32Mi"})).expect(201);
    let sandbox = daemon.sandbox_with(json!({"template": "small"}));
    assert_eq!(sandbox.get()["limits"]["disk_bytes"], 32 << 20);
    assert_ne!(sandbox.sh("head -c 64M /dev/zero > /workspace/big").exit_code(), Some(0));
    let larger = daemon.sandbox_with(json!({"template": "small", "disk": "96Mi"}));
    larger.sh("head -c 64M /dev/zero > /workspace/big").ok();
    for disk in ["0", "1", "1Pi", "lots"] {
        daemon.post("/v1/sandboxes", &json!({"disk": disk})).expect_refusal(400, "invalid_request");
        daemon
            .post("/v1/templates", &json!({"name": "t", "disk": disk}))
            .expect_refusal(400, "invalid_request");
    }
}

#[test]
fn a_store_without_limits_refuses_to_promise_them() {
    let daemon = Daemon::start();
    daemon.post("/v1/sandboxes", &json!({"disk": "1Gi"})).expect_refusal(409, "disk_limits_not_supported");
    daemon.post("/v1/templates", &json!({"name": "t", "disk": "1Gi"})).expect(201);
    let sandbox = daemon.sandbox_with(json!({"template": "t"}));
    assert_eq!(
        sandbox.get()["limits"]["disk_bytes"],
        Value::Null,
        "a limit that is not enforced is not reported"
    );
}

#[test]
fn a_full_store_stops_whoever_writes_and_heals_when_something_goes() {
    let daemon = spawn("loop", "256Mi").start();
    let (one, other) = (daemon.sandbox(), daemon.sandbox());
    assert_ne!(one.sh("head -c 1G /dev/zero > /workspace/big").exit_code(), Some(0));
    assert_ne!(other.sh("head -c 64M /dev/zero > /workspace/big").exit_code(), Some(0));
    assert_eq!(other.sh("echo alive").ok().text(), "alive");
    let machine = daemon.get("/v1/stats").expect(200)["machine"].clone();
    assert!(machine["disk_bytes"].as_u64() <= Some(256 << 20), "it must report the store: {machine}");
    one.delete();
    until_true("the space of a deleted sandbox is free", || {
        other.sh("head -c 64M /dev/zero > /workspace/big && rm /workspace/big").exit_code() == Some(0)
    });
    daemon.sandbox().sh("echo new > /workspace/file").ok();
}

#[test]
fn sandboxes_come_and_go_and_leave_nothing_in_the_store() {
    let daemon = with_store();
    daemon.sandbox().delete();
    let before = daemon.audit();
    for _ in 0..10 {
        let sandbox = daemon.sandbox();
        sandbox.sh("echo hi > /workspace/file; mkdir -p /opt/x; rm -rf /usr/games").ok();
        assert_eq!(in_store(&daemon, "sandboxes"), std::slice::from_ref(&sandbox.id));
        sandbox.delete();
    }
    assert_eq!(in_store(&daemon, "sandboxes"), [] as [String; 0]);
    daemon.expect_nothing_beyond(&before);
}

#[test]
fn the_store_is_found_again_after_crashes_and_let_go_when_all_is_over() {
    let mut daemon = with_store();
    let sandbox = daemon.sandbox().id;
    daemon.sandbox_of(&sandbox).sh("echo kept > /workspace/file").ok();
    for _ in 0..3 {
        daemon.launchers().into_iter().for_each(kill_hard);
        daemon.sandbox().delete();
        daemon.crash();
    }
    assert!(is_attached(&daemon));
    assert_eq!(daemon.sandbox_of(&sandbox).sh("cat /workspace/file").ok().text(), "kept");
    daemon.sandbox_of(&sandbox).sh("head -c 16M /dev/zero > /workspace/more").ok();
    // A sandbox keeps it mounted, whatever happens to daemon and launcher.
    daemon.kill();
    until_true("the launcher is gone", || daemon.launchers().is_empty());
    assert!(is_attached(&daemon), "the sandbox lives in it");
    daemon.start_again();
    daemon.sandbox_of(&sandbox).delete();
    daemon.kill();
    until_true("unused, so the device is detached", || !is_attached(&daemon));
    daemon.start_again();
    daemon.sandbox().sh("echo works").ok();
}

#[test]
fn a_store_that_was_not_unmounted_is_whole() {
    // What a power failure would leave: the file as it is while it is mounted and written to.
    let daemon = with_store();
    daemon.post("/v1/volumes", &json!({"name": "data", "size": "64Mi"})).expect(201);
    let sandbox = daemon.sandbox_with(json!({"mounts": [{"volume": "data", "path": "/data"}]}));
    sandbox.sh("echo durable > /data/file && sync -f /data/file && head -c 8M /dev/zero > /data/later").ok();
    let mut other = with_store();
    other.kill();
    until_true("the other store is detached", || !is_attached(&other));
    fs::copy(daemon.data_dir.join("store.img"), other.data_dir.join("store.img")).expect("it can be copied");
    for name in ["shoal.db", "shoal.db-wal"] {
        fs::copy(daemon.data_dir.join(name), other.data_dir.join(name)).expect("it can be copied");
    }
    let _ = fs::remove_file(other.data_dir.join("shoal.db-shm"));
    drop(daemon);
    other.start_again();
    let found = other.sandbox_with(json!({"mounts": [{"volume": "data", "path": "/data"}]}));
    assert_eq!(found.sh("cat /data/file").ok().text(), "durable");
    found.sh("echo more > /data/more").ok();
}

#[test]
fn a_store_grows_and_does_not_shrink() {
    let mut daemon = spawn("loop", "256Mi").start();
    let sandbox = daemon.sandbox().id;
    daemon.sandbox_of(&sandbox).sh("head -c 32M /dev/zero > /workspace/file").ok();
    let size = |daemon: &Daemon| fs::metadata(daemon.data_dir.join("store.img")).expect("it is there");
    for (wish, bytes) in [("512Mi", 512 << 20), ("300Mi", 512 << 20)] {
        daemon.kill();
        daemon.spawn.environment = spawn("loop", wish).environment;
        daemon.start_again();
        assert_eq!(size(&daemon).len(), bytes, "after {wish}");
        assert!(size(&daemon).blocks() * 512 >= bytes, "all of it is allocated");
    }
    daemon.sandbox_of(&sandbox).sh("head -c 350M /dev/zero > /workspace/file").ok();
    assert!(size(&daemon).blocks() * 512 >= 512 << 20, "nothing is given back");
    daemon.sandbox_of(&sandbox).sh("rm /workspace/file && sync -f /workspace").ok();
    daemon.sandbox_of(&sandbox).delete();
    assert!(size(&daemon).blocks() * 512 >= 512 << 20, "nothing is given back");
}

#[test]
fn a_store_with_something_in_it_is_not_given_up() {
    let mut daemon = with_store();
    let sandbox = daemon.sandbox().id;
    daemon.kill();
    daemon.spawn.environment = spawn("directory", SIZE).environment;
    let said = daemon.try_start(&daemon.log(9)).expect_err("there is a sandbox in it");
    assert!(said.contains("1 sandboxes and 0 volumes") && said.contains("delete them first"), "{said}");
    daemon.spawn.environment = spawn("auto", SIZE).environment;
    daemon.start_again();
    daemon.sandbox_of(&sandbox).delete();
    daemon.kill();
    daemon.spawn.environment = spawn("directory", SIZE).environment;
    daemon.start_again();
    assert!(!daemon.data_dir.join("store.img").exists(), "an empty one goes");
    until_true("the device is detached", || !is_attached(&daemon));
    daemon.sandbox().sh("echo works").ok();
    // And from plain directories to a store: existing files stay where they are.
    daemon.post("/v1/volumes", &json!({"name": "old", "size": "8Mi"})).expect(201);
    let sandbox = daemon.sandbox_with(json!({"mounts": [{"volume": "old", "path": "/old"}]})).id;
    daemon.sandbox_of(&sandbox).sh("echo old > /old/file; echo own > /workspace/file").ok();
    daemon.kill();
    daemon.spawn.environment = spawn("loop", SIZE).environment;
    daemon.start_again();
    assert_eq!(daemon.sandbox_of(&sandbox).sh("cat /old/file /workspace/file").ok().text(), "old\nown");
    let new = daemon.sandbox_with(json!({"mounts": [{"volume": "old", "path": "/old"}]}));
    assert_eq!(new.sh("cat /old/file").ok().text(), "old");
    daemon.sandbox_of(&sandbox).delete();
}

#[test]
fn a_store_that_does_not_fit_is_refused_or_done_without() {
    let small = Spawn { tmpfs_bytes: Some(400 << 20), ..spawn("auto", "300Mi") };
    let daemon = small.start();
    assert!(daemon.logs().contains("plain directories"), "{}", daemon.logs());
    assert!(
        !daemon.data_dir.join("store.img").exists() && !daemon.data_dir.join("store.img.unfinished").exists()
    );
    daemon.sandbox().sh("echo works").ok();
    let mut daemon = daemon;
    daemon.kill();
    daemon.spawn.environment = spawn("loop", "1Gi").environment;
    let said = daemon.try_start(&daemon.log(9)).expect_err("there is no room");
    assert!(said.contains("free bytes"), "{said}");
    assert!(
        !daemon.data_dir.join("store.img").exists() && !daemon.data_dir.join("store.img.unfinished").exists()
    );
}

#[test]
fn a_full_host_disk_takes_nothing_from_the_store() {
    // The store's file is fully allocated, so the space of sandboxes is guaranteed, whatever else is on that disk.
    let daemon = Spawn { tmpfs_bytes: Some(700 << 20), ..spawn("loop", "256Mi") }.start();
    let sandbox = daemon.sandbox();
    let write = "read -r go; head -c 64M /dev/zero > /workspace/big && sync -f /workspace/big && wc -c < /workspace/big > /tmp/size";
    let command = sandbox.spawn(json!({"script": write, "stdin": true}));
    let filler = daemon.data_dir.join("filler");
    let mut file = fs::File::create(&filler).expect("there is room yet");
    let full = loop {
        if let Err(error) = file.write_all(&[1; 1 << 16]) {
            break error;
        }
    };
    assert_eq!(full.kind(), ErrorKind::StorageFull);
    sandbox.write(&command, b"go\n").expect(200);
    let size = || sandbox.request("GET", "/files?path=/tmp/size").send(sandbox.address);
    until_true("the sandbox has written what it may", || {
        let answer = size();
        answer.status == 200 && answer.body.trim_ascii() == b"67108864"
    });
    // Commands are recorded before they run; the database accepts them while it has room.
    let mut answers = (0..5000).map(|_| sandbox.post_command(&json!({"argv": ["true"]})));
    let refused =
        answers.find(|answer| answer.status != 200).expect("no room for so many commands").expect(507);
    assert_eq!(refused["code"], "disk_full", "{refused}");
    drop(file);
    fs::remove_file(filler).expect("it is the test's own");
    assert_eq!(sandbox.ended(&command)["result"]["exit_code"], 0);
    daemon.sandbox().sh("echo works").ok();
}

#[test]
fn a_guest_makes_no_subvolumes_in_its_volume() {
    let daemon = with_store();
    daemon.post("/v1/volumes", &json!({"name": "data", "size": "16Mi"})).expect(201);
    let sandbox = daemon.sandbox_with(json!({"mounts": [{"volume": "data", "path": "/data"}]}));
    // BTRFS_IOC_SUBVOL_CREATE, SNAP_CREATE, SNAP_DESTROY, QUOTA_CTL; then FICLONE, which copies need.
    let said = sandbox.python(
        "
import fcntl, os
d = os.open('/data', os.O_RDONLY)
for request in (0x5000940e, 0x50009401, 0x5000940f, 0xc0109428):
    try:
        fcntl.ioctl(d, request, bytearray(bytes(8) + b'inside' + bytes(4082)))
        print('done')
    except OSError as error:
        print(error.errno)
open('/data/a', 'wb').write(b'x' * 65536)
a, b = os.open('/data/a', os.O_RDONLY), os.open('/data/b', os.O_RDWR | os.O_CREAT)
fcntl.ioctl(b, 0x40049409, a)
print(os.stat('/data/b').st_size, sorted(os.listdir('/data')))
",
    );
    assert_eq!(said.ok().text(), "1\n1\n1\n1\n65536 ['a', 'b']");
}

fn limited_key(daemon: &Daemon, limits: Value) -> (String, String) {
    let mut body = json!({"owner": "bob"});
    body.as_object_mut().expect("an object").extend(limits.as_object().expect("an object").clone());
    let made = daemon.post("/v1/keys", &body).expect(201);
    (made["id"].as_str().expect("an id").to_owned(), made["secret"].as_str().expect("a secret").to_owned())
}

/// The total length of the files in a directory and the directories in it.
fn disk_use(directory: &std::path::Path) -> u64 {
    let Ok(entries) = fs::read_dir(directory) else { return 0 };
    let sizes = entries.map(|entry| {
        let entry = entry.expect("an entry");
        match entry.metadata() {
            Ok(found) if found.is_dir() => disk_use(&entry.path()),
            Ok(found) => found.len(),
            Err(_) => 0, // It was removed meanwhile.
        }
    });
    sizes.sum()
}

/// Writes until the disk is full.
fn fill(path: &std::path::Path) -> fs::File {
    let mut file = fs::File::create(path).expect("there is room yet");
    for block in [1 << 16, 1 << 9] {
        let full = loop {
            if let Err(error) = file.write_all(&vec![1; block]) {
                break error;
            }
        };
        assert_eq!(full.kind(), ErrorKind::StorageFull);
    }
    file
}

#[test]
fn output_of_running_commands_has_a_budget_and_what_is_dropped_is_reported() {
    let daemon = Spawn { tmpfs_bytes: Some(640 << 20), ..Spawn::default() }.start();
    let (_, secret) =
        limited_key(&daemon, json!({"sandboxes_max": 1, "cpu_max": "1", "memory_max": "128Mi"}));
    let request = Request::new("POST", "/v1/sandboxes").key(&secret).json(&json!({"memory": "128Mi"}));
    let id = request.send(daemon.address).expect(201)["id"].as_str().expect("an id").to_owned();
    let sandbox = shoal_tests::Sandbox { key: secret, ..daemon.sandbox_of(&id) };
    let flood = "head -c 67108864 /dev/zero; head -c 67108864 /dev/zero >&2; read -r end";
    let commands: Vec<String> =
        (0..7).map(|_| sandbox.spawn(json!({"script": flood, "stdin": true}))).collect();
    for command in &commands {
        until_true("all of it was taken", || {
            let now = sandbox.command(command);
            now["stdout"]["end"] == 67108864 && now["stderr"]["end"] == 67108864
        });
    }
    let kept = |command: &String| {
        let now = sandbox.command(command);
        let of = |stream: &str| {
            now[stream]["end"].as_u64().unwrap_or(0) - now[stream]["start"].as_u64().unwrap_or(0)
        };
        of("stdout") + of("stderr")
    };
    // An eighth of the disk is the sandbox's. Both what is reported and what is on disk are within that.
    let most = (640 << 20) / 8 + (2 << 20);
    until_true("what is reported is within the budget", || commands.iter().map(kept).sum::<u64>() <= most);
    let files = disk_use(&daemon.data_dir.join("output").join(&id));
    assert!(files <= most, "{files} bytes on disk");
    assert!(files > 16 << 20, "most of the budget is used: {files}");
    daemon.sandbox().sh("echo works").ok();
    // The budget holds over a restart, and the commands go on where they were.
    let mut daemon = daemon;
    daemon.crash();
    let sandbox = shoal_tests::Sandbox { key: sandbox.key.clone(), ..daemon.sandbox_of(&id) };
    for command in &commands {
        sandbox.write(command, b"end\n").expect(200);
        let ended = sandbox.ended(command);
        assert_eq!((&ended["result"]["exit_code"], &ended["stdout"]["end"]), (&json!(0), &json!(67108864)));
    }
    let files = disk_use(&daemon.data_dir.join("output").join(&id));
    assert!(files <= most, "{files} bytes on disk");
}

#[test]
fn a_full_disk_is_emptied_through_the_api() {
    let mut daemon = Spawn { tmpfs_bytes: Some(400 << 20), ..Spawn::default() }.start();
    let (key, secret) = limited_key(&daemon, json!({}));
    let bobs =
        Request::new("POST", "/v1/sandboxes").key(&secret).json(&json!({})).send(daemon.address).expect(201);
    let mine = daemon.sandbox();
    daemon.get("/v1/ready").expect(200);
    let file = fill(&daemon.data_dir.join("filler"));
    // Rows for new things are refused at some point, and the daemon is not ready.
    until_true("the database has no room", || daemon.post("/v1/sandboxes", &json!({})).status == 507);
    until_true("the daemon says that it is not ready", || daemon.get("/v1/ready").status == 507);
    // Keys are revoked and sandboxes deleted, also those of other owners.
    assert_eq!(daemon.delete(&format!("/v1/keys/{key}")).status, 204);
    Request::new("GET", "/v1/sandboxes").key(&secret).send(daemon.address).expect(401);
    let all = daemon.get("/v1/admin/sandboxes").expect(200);
    let owners: Vec<&str> = all["sandboxes"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|found| found["owner"].as_str())
        .collect();
    assert_eq!(owners.len(), 2, "{all}");
    assert!(owners.contains(&"bob") && owners.contains(&"default"), "{owners:?}");
    let of_bob = bobs["id"].as_str().expect("an id");
    assert_eq!(daemon.delete(&format!("/v1/sandboxes/{of_bob}")).status, 404, "only on purpose");
    assert_eq!(daemon.delete(&format!("/v1/admin/sandboxes/{of_bob}")).status, 204);
    mine.delete();
    // Nothing new is accepted while deletes need the rest.
    daemon.post("/v1/sandboxes", &json!({})).expect_refusal(507, "disk_full");
    // The revocation and the deletes hold over a restart.
    drop(file);
    fs::remove_file(daemon.data_dir.join("filler")).expect("it is the test's own");
    daemon.crash();
    Request::new("GET", "/v1/sandboxes").key(&secret).send(daemon.address).expect(401);
    assert_eq!(daemon.get("/v1/admin/sandboxes").expect(200)["sandboxes"], json!([]));
    daemon.get("/v1/ready").expect(200);
    daemon.sandbox().sh("echo works").ok();
}

#[test]
fn only_an_admin_sees_and_deletes_the_sandboxes_of_all_owners() {
    let daemon = Daemon::start();
    let (_, secret) = limited_key(&daemon, json!({}));
    let mine = daemon.sandbox();
    for (method, target) in
        [("GET", "/v1/admin/sandboxes"), ("DELETE", &format!("/v1/admin/sandboxes/{}", mine.id))]
    {
        Request::new(method, target).key(&secret).send(daemon.address).expect_refusal(403, "admin_required");
    }
    assert_eq!(mine.sh("echo alive").ok().text(), "alive");
}

#[test]
fn a_revocation_that_the_disk_refuses_holds_over_a_restart() {
    let mut daemon = Spawn { tmpfs_bytes: Some(400 << 20), ..Spawn::default() }.start();
    let (key, secret) = limited_key(&daemon, json!({}));
    let get = |daemon: &Daemon| Request::new("GET", "/v1/sandboxes").key(&secret).send(daemon.address);
    get(&daemon).expect(200);
    // A disk so full that not even the reserve is left.
    fs::remove_file(daemon.data_dir.join("reserve")).expect("it is there");
    let file = fill(&daemon.data_dir.join("filler"));
    until_true("the database has no room", || daemon.post("/v1/sandboxes", &json!({})).status == 507);
    assert_eq!(
        daemon.delete(&format!("/v1/keys/{key}")).status,
        202,
        "it is revoked, and its row is still there"
    );
    get(&daemon).expect(401);
    let listed = |daemon: &Daemon| daemon.get("/v1/keys").expect(200).to_string().contains(&key);
    assert!(!listed(&daemon));
    daemon.kill();
    drop(file);
    fs::remove_file(daemon.data_dir.join("filler")).expect("it is the test's own");
    daemon.start_again();
    get(&daemon).expect(401);
    assert!(!listed(&daemon));
    daemon.crash();
    get(&daemon).expect(401);
}
