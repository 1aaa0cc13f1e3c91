//! Attacks that cross owners or go round a limit: layers of others, the daemon as a scanner, slots, keys, compression.

use serde_json::{Value, json};
use shoal_tests::images::{Deed, Layer, MadeImage, Packing, Puppet, digest};
use shoal_tests::wait::until_true;
use shoal_tests::{Daemon, Request, Response, Sandbox, Spawn};

fn daemon_with(config: String) -> Daemon {
    Spawn { config, ..Spawn::default() }.start()
}

fn with_store() -> Daemon {
    let environment = [("SHOAL_STORE", "loop"), ("SHOAL_STORE_SIZE", "512Mi")];
    let environment = environment.map(|(name, value)| (name.into(), value.into())).into();
    Spawn { environment, ..Spawn::default() }.start()
}

/// A key of another owner, with these limits.
fn bob(daemon: &Daemon, mut limits: Value) -> String {
    limits["owner"] = "bob".into();
    daemon.post("/v1/keys", &limits).expect(201)["secret"].as_str().expect("a secret").into()
}

fn post(daemon: &Daemon, key: &str, target: &str, body: &Value) -> Response {
    Request::new("POST", target).key(key).json(body).send(daemon.address)
}

fn pull(daemon: &Daemon, key: &str, reference: &str) -> Response {
    post(daemon, key, "/v1/images/pull", &json!({"reference": reference}))
}

#[test]
fn a_private_layer_is_given_only_to_owners_who_can_fetch_it() {
    let puppet = Puppet::start();
    let daemon = daemon_with(puppet.config());
    let key = bob(&daemon, json!({}));
    let tar = Layer::busybox().file("secret-of-alice", "private bytes of alice").into_tar();
    let image = MadeImage::new(&[(&tar, Packing::Gzip)], json!({}));
    let private = puppet.serve("private", "1", &image);
    let wish = json!({"reference": private, "username": "ada", "password": "secret"});
    assert_eq!(daemon.post("/v1/images/pull", &wish).expect(200)["private"], true);

    // The manifest is known, the layer cannot be fetched.
    let stolen = puppet.serve("steal", "1", &image);
    let layer = image.document()["layers"][0]["digest"].as_str().expect("a digest").to_owned();
    let path = format!("/v2/steal/blobs/{layer}");
    puppet.on(&path, Deed::Answer(404, Vec::new(), Vec::new()));
    pull(&daemon, &key, &stolen).expect_refusal(404, "image_not_found");
    pull(&daemon, &daemon.key, &stolen).expect_refusal(404, "image_not_found");
    // Nor does a blob of one's own prove anything about the contents of another's layer.
    let own = Packing::Gzip.pack(&Layer::busybox().file("own", "own").into_tar());
    let mut document = image.document();
    document["layers"][0]["digest"] = digest(&own).into();
    document["layers"][0]["size"] = own.len().into();
    let manifest = document.to_string().into_bytes();
    let claimed = puppet.serve("claim", "1", &MadeImage { blobs: image.blobs.clone(), manifest });
    puppet.on(&format!("/v2/claim/blobs/{}", digest(&own)), Deed::Serve(own));
    let refused = pull(&daemon, &key, &claimed);
    assert!((400..500).contains(&refused.status), "{}", refused.describe());
    assert!(post(&daemon, &key, "/v1/sandboxes", &json!({"image": claimed})).status >= 400);

    // Whoever can fetch it gets it, and the same layer in another compression too.
    puppet.on(&path, Deed::Serve(image.blobs[&layer].clone()));
    pull(&daemon, &key, &stolen).expect(200);
    let again = MadeImage::new(&[(&tar, Packing::Plain)], json!({}));
    let again = puppet.serve("again", "1", &again);
    let wish = json!({"reference": again, "username": "b", "password": "b"});
    post(&daemon, &key, "/v1/images/pull", &wish).expect(200);
}

#[test]
fn a_key_without_admin_rights_cannot_make_the_daemon_connect_to_internal_addresses() {
    let (puppet, other) = (Puppet::start(), Puppet::start());
    let daemon = daemon_with(puppet.config());
    let key = bob(&daemon, json!({}));
    let port = other.address.port();
    let mut answers = Vec::new();
    // An open port, a closed one, a name, other spellings.
    for host in [
        format!("127.0.0.1:{port}"),
        "127.0.0.1:1".into(),
        format!("localhost:{port}"),
        "127.9.2.3:80".into(),
    ] {
        let body = json!({"reference": format!("{host}/x/y")});
        let refused =
            post(&daemon, &key, "/v1/images/pull", &body).expect_refusal(403, "registry_not_allowed");
        answers.push(refused["message"].as_str().expect("a message").replace(&host, "HOST"));
    }
    answers.dedup();
    assert_eq!(answers.len(), 1, "{answers:?}");
    assert_eq!(other.seen("").len(), 0, "nothing was asked");
    // Not through a registry that the operator allows either: by a redirect, by the realm of a challenge.
    let inside = format!("http://{}/token", other.address);
    puppet.on(
        "/v2/moved/manifests/1",
        Deed::Answer(307, vec![("location".into(), inside.clone())], Vec::new()),
    );
    let challenge = vec![("www-authenticate".into(), format!("Bearer realm=\"{inside}\""))];
    puppet.on("/v2/realm/manifests/1", Deed::Answer(401, challenge, Vec::new()));
    for name in ["moved", "realm"] {
        let reference = format!("{}/{name}:1", puppet.address);
        pull(&daemon, &key, &reference).expect_refusal(403, "registry_not_allowed");
    }
    assert_eq!(other.seen("").len(), 0, "nothing was asked");
    // The operator's own key reaches them.
    let image = MadeImage::of(&Layer::busybox(), json!({}));
    let name = other.serve("internal", "1", &image);
    let body = json!({"reference": name, "insecure": true});
    daemon.post("/v1/images/pull", &body).expect(200);
    // A list leaves nothing but what is in it.
    let daemon = daemon_with(format!("{}image_registries_allowed = [\"docker.io\"]\n", puppet.config()));
    let key = bob(&daemon, json!({}));
    pull(&daemon, &key, &format!("{}/x:1", puppet.address)).expect_refusal(403, "registry_not_allowed");
}

#[test]
fn one_owners_slow_pull_does_not_hold_up_anothers() {
    let puppet = Puppet::start();
    let daemon = daemon_with(puppet.config());
    let key = bob(&daemon, json!({}));
    let tars: Vec<Vec<u8>> = (0..12)
        .map(|number| Layer::default().file(&format!("f{number}"), &"x".repeat(5000)).into_tar())
        .collect();
    let layers: Vec<_> = tars.iter().map(|tar| (&tar[..], Packing::Plain)).collect();
    let slow = MadeImage::new(&layers, json!({}));
    let name = puppet.serve("slow", "1", &slow);
    let document = slow.document();
    for layer in document["layers"].as_array().expect("layers") {
        let blob = layer["digest"].as_str().expect("a digest");
        let deed = Deed::Stall { bytes: slow.blobs[blob].clone(), after: 10 };
        puppet.on(&format!("/v2/slow/blobs/{blob}"), deed);
    }
    let (address, waiting) = (daemon.address, key.clone());
    std::thread::spawn(move || {
        let body = json!({"reference": name});
        let _ = Request::new("POST", "/v1/images/pull").key(&waiting).json(&body).try_send(address);
    });
    until_true("bob's downloads have begun", || puppet.seen("/v2/slow/blobs/").len() >= 6);
    let quick = puppet.serve("quick", "1", &MadeImage::of(&Layer::busybox(), json!({})));
    pull(&daemon, &daemon.key, &quick).expect(200);
    assert!(puppet.seen("/v2/slow/blobs/").len() <= 7, "bob has six places, and the configuration");
}

#[test]
fn one_owners_builds_leave_places_for_others() {
    let daemon = Daemon::start();
    let key = bob(&daemon, json!({"builds_max": 9}));
    let context = Layer::default().file("Dockerfile", "FROM host\nRUN sleep 300\n").into_tar();
    let build = |key: &str, number: usize| {
        let wish = json!({"template": format!("t{number}")}).to_string();
        let request = Request::new("POST", "/v1/builds").key(key).header("Shoal-Build", &wish);
        request.header("Content-Type", "application/x-tar").body(context.clone()).send(daemon.address)
    };
    let begun: Vec<Value> = (0..8).map(|number| build(&key, number).expect(202)).collect();
    build(&key, 8).expect_refusal(503, "no_capacity");
    let mine = build(&daemon.key, 0).expect(202);
    let few = daemon.post("/v1/keys", &json!({"owner": "carol", "builds_max": 1})).expect(201);
    let few = few["secret"].as_str().expect("a secret");
    let hers = build(few, 0).expect(202);
    build(few, 1).expect_refusal(429, "quota_exceeded");
    for (key, build) in begun.iter().map(|build| (&*key, build)).chain([(&*daemon.key, &mine), (few, &hers)])
    {
        let target = format!("/v1/builds/{}", build["id"].as_str().expect("an id"));
        Request::new("DELETE", &target).key(key).send(daemon.address).expect(204);
    }
}

#[test]
fn keys_limit_disk_volumes_output_and_connections_and_show_what_is_used() {
    let daemon = with_store();
    daemon.post("/v1/sandboxes", &json!({"disk": "60Ti"})).expect_refusal(400, "invalid_request");
    let limits = json!({"disk_max": "80Mi", "volumes_max": "24Mi", "output_max": "4Mi"});
    let key = bob(&daemon, limits);
    let made = post(&daemon, &key, "/v1/sandboxes", &json!({"disk": "48Mi"})).expect(201);
    let refused = post(&daemon, &key, "/v1/sandboxes", &json!({"disk": "48Mi"}));
    assert_eq!(refused.expect_refusal(429, "quota_exceeded")["details"]["limit"], 80 << 20);
    post(&daemon, &key, "/v1/volumes", &json!({"name": "a", "size": "16Mi"})).expect(201);
    post(&daemon, &key, "/v1/volumes", &json!({"name": "b", "size": "16Mi"}))
        .expect_refusal(429, "quota_exceeded");
    let grow = Request::new("PATCH", "/v1/volumes/a").key(&key).json(&json!({"size": "32Mi"}));
    grow.send(daemon.address).expect_refusal(429, "quota_exceeded");
    let id = made["id"].as_str().expect("an id");
    let sandbox = Sandbox { key: key.clone(), ..daemon.sandbox_of(id) };
    let command = sandbox.spawn(json!({"script": "head -c 33554432 /dev/zero"}));
    let ended = sandbox.ended(&command);
    assert_eq!((&ended["result"]["exit_code"], &ended["stdout"]["end"]), (&json!(0), &json!(33554432)));
    let used = || {
        let keys = daemon.get("/v1/keys").expect(200);
        let keys = keys["keys"].as_array().expect("a list").clone();
        keys.into_iter().find(|key| key["owner"] == "bob").expect("bob's")["used"].clone()
    };
    until_true("what is kept is within the limit", || used()["output_bytes"].as_u64() <= Some(4 << 20));
    let used = used();
    assert_eq!((&used["sandboxes"], &used["disk_bytes"]), (&json!(1), &json!(48 << 20)), "{used}");
    assert_eq!(used["volume_bytes"], 16 << 20, "{used}");
    // One connection: a stream keeps it, so there is none for a second request.
    let few = daemon.post("/v1/keys", &json!({"owner": "carol", "connections_max": 1})).expect(201);
    let few = few["secret"].as_str().expect("a secret");
    let stream = Request::new("GET", "/v1/events").key(few).open(daemon.address).expect("it opens");
    Request::new("GET", "/v1/sandboxes").key(few).send(daemon.address).expect_refusal(429, "quota_exceeded");
    drop(stream);
    until_true("the place is free again", || {
        Request::new("GET", "/v1/sandboxes").key(few).send(daemon.address).status == 200
    });
}

#[test]
fn cannot_make_the_kernel_compress_files_outside_of_the_cpu_limit() {
    let daemon = with_store();
    daemon.post("/v1/volumes", &json!({"name": "data", "size": "16Mi"})).expect(201);
    let sandbox = daemon.sandbox_with(json!({"mounts": [{"volume": "data", "path": "/data"}]}));
    // FS_IOC_SETFLAGS with FS_COMPR_FL, FS_IOC_FSSETXATTR, file_setattr, and the attribute of btrfs.
    let said = sandbox.python(
        "
import ctypes, fcntl, os, struct
libc = ctypes.CDLL(None, use_errno=True)
for where in ('/workspace', '/data'):
    path = where + '/file'
    open(path, 'wb').write(b'x' * 100000)
    fd = os.open(path, os.O_RDWR)
    for request, argument in ((0x40086602, struct.pack('l', 4)), (0x401c5820, bytes(28))):
        try:
            fcntl.ioctl(fd, request, bytearray(argument))
            print('done')
        except OSError as error:
            print(error.errno == 25)
    print(libc.syscall(469, -100, path.encode(), bytes(24), 24, 0) == -1)
    for value in (b'zlib', b'zstd:15'):
        try:
            os.setxattr(path, 'btrfs.compression', value)
            print('done')
        except OSError as error:
            print(True)
",
    );
    assert_eq!(said.ok().text(), ["True"; 10].join("\n"));
    // A directory takes the attribute, and its files are not compressed for it.
    let said = sandbox.python(
        "
import os
os.mkdir('/data/d')
try:
    os.setxattr('/data/d', 'btrfs.compression', b'zlib')
except OSError:
    pass
open('/data/d/f', 'wb').write(b'x' * (4 << 20))
os.sync()
print(os.stat('/data/d/f').st_blocks * 512 >= 4 << 20)
",
    );
    assert_eq!(said.ok().text(), "True");
}

#[test]
fn a_sandbox_sees_its_own_limits_and_not_the_machines() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"cpu": "1", "memory": "256Mi"}));
    let machine = std::thread::available_parallelism().expect("a number").get();
    let processors = if machine > 1 { 1 } else { machine };
    let said = sandbox.sh(
        "nproc; awk '/^MemTotal/ {print $2}' /proc/meminfo; grep -c ^processor /proc/cpuinfo; grep -c '^cpu[0-9]' /proc/stat; \
         free -b | awk '/^Mem/ {print $2}'",
    );
    let expected = format!("{processors}\n262144\n{processors}\n{processors}\n{}", 256 << 20);
    assert_eq!(said.ok().text(), expected);
    // Python, which sizes pools of workers by it.
    let said = sandbox.python("import os; print(len(os.sched_getaffinity(0)))");
    assert_eq!(said.ok().text(), processors.to_string());
    let refused = sandbox.sh("echo x > /proc/meminfo");
    assert_ne!(refused.exit_code(), Some(0));
    // Sandboxes are spread over the processors.
    let of =
        |sandbox: &Sandbox| sandbox.python("import os; print(sorted(os.sched_getaffinity(0)))").ok().text();
    let others: std::collections::BTreeSet<String> =
        (0..machine).map(|_| of(&daemon.sandbox_with(json!({"cpu": "1", "memory": "256Mi"})))).collect();
    assert!(others.len() > machine / 2, "{others:?}");
    // What has as many processors as the machine sees all.
    let all = daemon.sandbox_with(json!({"cpu": machine.to_string(), "memory": "256Mi"}));
    assert_eq!(all.sh("nproc").ok().text(), machine.to_string());
}

#[test]
fn cannot_read_how_the_host_was_started_or_what_it_does() {
    let daemon = Daemon::start();
    let names = "buddyinfo cmdline config.gz diskstats interrupts modules partitions softirqs zoneinfo";
    let script = format!("cd /proc; for name in {names}; do test -e $name && cat $name; done | wc -c");
    assert_eq!(daemon.sandbox().sh(&script).ok().text(), "0");
}
