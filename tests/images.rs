//! Images, from a registry to a running sandbox.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Barrier;

use rustix::process::Signal;
use serde_json::{Value, json};
use shoal_tests::daemon::{binary, kill_hard, send_signal};
use shoal_tests::images::{
    Deed, Guard, Layer, MadeImage, Packing, Puppet, Registry, digest, program, skopeo,
};
use shoal_tests::wait::until_true;
use shoal_tests::{Daemon, Response, Sandbox, Spawn};

fn daemon_with(config: String) -> Daemon {
    Spawn { config, ..Spawn::default() }.start()
}

/// A registry and a daemon that is configured for it.
fn ground() -> (Registry, Daemon) {
    let registry = Registry::start();
    let daemon = daemon_with(registry.config());
    (registry, daemon)
}

fn puppet() -> (Puppet, Daemon) {
    let puppet = Puppet::start();
    let daemon = daemon_with(puppet.config());
    (puppet, daemon)
}

fn pull(daemon: &Daemon, reference: &str) -> Response {
    daemon.post("/v1/images/pull", &json!({"reference": reference}))
}

fn in_path(text: &str) -> String {
    text.replace('%', "%25").replace('/', "%2F").replace(':', "%3A").replace('@', "%40")
}

fn image(daemon: &Daemon, name: &str) -> Response {
    daemon.get(&format!("/v1/images/{}", in_path(name)))
}

/// Names in a directory of the daemon's images, sorted.
fn entries(daemon: &Daemon, directory: &str) -> Vec<String> {
    let path = daemon.data_dir.join("images").join(directory);
    let mut names: Vec<String> = fs::read_dir(path)
        .expect("the directory is there")
        .map(|entry| entry.expect("it can be read").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Nothing of a failed image is left, after complete parts were collected.
#[track_caller]
fn expect_nothing_left(daemon: &Daemon) {
    daemon.post("/v1/images/gc", &json!({})).expect(200);
    assert_eq!(entries(daemon, "layers"), Vec::<String>::new());
    assert_eq!(entries(daemon, "trash"), Vec::<String>::new());
    assert_eq!(entries(daemon, "blobs"), Vec::<String>::new());
    assert_eq!(daemon.get("/v1/images").expect(200)["images"], json!([]));
}

fn sandbox_of(daemon: &Daemon, image: &str) -> Sandbox {
    daemon.sandbox_with(json!({"image": image}))
}

#[test]
fn an_image_runs_with_its_own_environment_user_directory_and_entrypoint() {
    let (registry, daemon) = ground();
    let layer = Layer::busybox().entry(b'5', "srv/", 0o755, (1000, 1000), "", b"");
    let config = json!({
        "Env": ["PATH=/bin", "GREETING=from the image"], "User": "ada", "WorkingDir": "/srv",
        "Entrypoint": ["/bin/echo", "entry"], "Cmd": ["cmd"], "Labels": {"maker": "test"},
    });
    let name = registry.push("team/app:1", &MadeImage::of(&layer, config));
    let sandbox = sandbox_of(&daemon, &name);
    let said =
        sandbox.sh("id -u; pwd; echo $GREETING; echo $PATH; echo $HOME; touch here; stat -c %U here").ok();
    assert_eq!(said.text(), "1000\n/srv\nfrom the image\n/bin\n/home/ada\nada");
    assert_eq!(sandbox.run(json!({})).ok().text(), "entry cmd");
    // The settings of a command take precedence over the image's.
    let own = json!({"argv": ["sh", "-c", "id -u; pwd; echo $GREETING"], "user": "root", "cwd": "/etc",
        "env": {"GREETING": "mine"}});
    assert_eq!(sandbox.run(own).ok().text(), "0\n/etc\nmine");
    let shown = sandbox.get();
    assert_eq!(shown["image"], name.as_str());
    let image = image(&daemon, &name).expect(200);
    assert_eq!(image["digest"], shown["image_digest"]);
    assert_eq!(image["sandboxes"], 1);
    assert_eq!(image["config"]["labels"]["maker"], "test");
    assert_eq!(image["config"]["user"], "ada");
}

#[test]
fn an_image_that_says_nothing_runs_as_root_in_the_workspace() {
    let (registry, daemon) = ground();
    let name = registry.push("plain:1", &MadeImage::of(&Layer::busybox(), json!({"WorkingDir": "/"})));
    let sandbox = sandbox_of(&daemon, &name);
    let said = sandbox.sh("id -u; pwd; touch x; cat /etc/hosts; ls /proc/1 >/dev/null && ls /dev/null").ok();
    assert!(said.text().starts_with("0\n/workspace\n127.0.0.1\tlocalhost"), "{said:?}");
    let refused = sandbox.post_command(&json!({})).expect_refusal(400, "invalid_request");
    assert!(
        refused["message"].as_str().expect("text").contains("`argv` must begin with a program"),
        "{refused}"
    );
    // Its mounts are listed as text, as every program expects.
    assert!(sandbox.sh("cat /proc/mounts").ok().body["stdout_text"].is_string());
    // Two of them share what is below and nothing else.
    let other = sandbox_of(&daemon, &name);
    sandbox.sh("echo mine > /etc/passwd").ok();
    assert_eq!(other.sh("wc -l < /etc/passwd").ok().text().trim(), "2");
}

#[test]
fn a_working_directory_that_the_image_lacks_is_made_inside_of_it() {
    let (registry, daemon) = ground();
    let layer = Layer::busybox().link("data", "/srv").file("file", "file");
    for (number, (directory, expected)) in
        [("/data/app/deep", "/srv/app/deep"), ("/file/below", "/"), ("/../../up", "/")]
            .into_iter()
            .enumerate()
    {
        let made = MadeImage::of(&layer, json!({"WorkingDir": directory}));
        let sandbox = sandbox_of(&daemon, &registry.push(&format!("wd:{number}"), &made));
        assert_eq!(sandbox.sh("pwd -P").ok().text(), expected, "{directory}");
    }
}

#[test]
fn layers_mean_together_what_they_mean_elsewhere() {
    let (registry, daemon) = ground();
    let below = Layer::busybox()
        .entry(b'5', "tmp/", 0o1777, (0, 0), "", b"")
        .directory("usr/")
        .directory("usr/lib/")
        .link("lib", "usr/lib")
        .file("a/one", "one")
        .file("a/two", "two")
        .file("b/old", "old")
        .file("b/sub/deep", "deep")
        .file("c/kept", "kept")
        .file("d/x", "x")
        .file("linked", "linked")
        .file("will-be-dir", "file");
    let above = Layer::default()
        .file("a/.wh.one", "")
        .directory("b/")
        .file("b/.wh..wh..opq", "")
        .file("b/new", "new")
        .file(".wh.d", "")
        .directory("d/")
        .file("d/y", "y")
        .file("lib/module", "through the link")
        .file("tmp/file", "in tmp")
        .hard_link("hard", "linked")
        .directory("will-be-dir/")
        .file("will-be-dir/inside", "inside");
    let top = Layer::default()
        .file(".wh.c", "")
        .file("a/three", "three")
        .file("b/.wh.new", "")
        .file("b/newer", "newer");
    let plain = below.tar();
    for (number, packing) in [Packing::Gzip, Packing::Zstd, Packing::Plain].into_iter().enumerate() {
        let layers = [(&plain[..], Packing::Gzip), (&above.tar(), packing), (&top.tar(), packing)];
        let name = registry.push(&format!("layers:{number}"), &MadeImage::new(&layers, json!({})));
        let sandbox = sandbox_of(&daemon, &name);
        let found = sandbox
            .sh("cd / && find a b c d will-be-dir usr/lib hard linked tmp lib 2>/dev/null | sort")
            .ok();
        assert_eq!(
            found.text().lines().collect::<Vec<_>>(),
            [
                "a",
                "a/three",
                "a/two",
                "b",
                "b/newer",
                "d",
                "d/y",
                "hard",
                "lib",
                "linked",
                "tmp",
                "tmp/file",
                "usr/lib",
                "usr/lib/module",
                "will-be-dir",
                "will-be-dir/inside",
            ]
        );
        let said =
            sandbox.sh("cat /lib/module /hard /linked; stat -c %a /tmp; readlink /lib; ls -A /b /a").ok();
        assert_eq!(
            said.text(),
            "through the linklinkedlinked1777\nusr/lib\n/a:\nthree\ntwo\n\n/b:\nnewer",
            "{packing:?}"
        );
        // A removed file stays removed in this sandbox, and exists in the next.
        sandbox.sh("rm -r /a /d && ! test -e /a").ok();
        sandbox.delete();
    }
}

#[test]
fn owners_modes_and_special_files_are_what_the_layer_says_or_what_a_sandbox_allows() {
    let (registry, daemon) = ground();
    let layer = Layer::busybox()
        .entry(b'0', "setuid", 0o4755, (0, 0), "", b"x")
        .entry(b'0', "setgid", 0o2755, (0, 50), "", b"x")
        .entry(b'0', "odd", 0o640, (65_535, 65_534), "", b"x")
        .entry(b'0', "beyond", 0o644, (70_000, 100_000), "", b"x")
        .entry(b'3', "device", 0o666, (0, 0), "", b"")
        .entry(b'4', "disk", 0o666, (0, 0), "", b"")
        .entry(b'6', "fifo", 0o600, (7, 8), "", b"");
    let name = registry.push("odd:1", &MadeImage::of(&layer, json!({})));
    let sandbox = sandbox_of(&daemon, &name);
    let said = sandbox
        .sh("cd / && stat -c '%n %a %u %g %F' setuid setgid odd beyond fifo; ls device disk 2>&1")
        .run_text();
    assert_eq!(
        said,
        "setuid 4755 0 0 regular file\nsetgid 2755 0 50 regular file\nodd 640 65535 65534 regular file\n\
         beyond 644 65534 65534 regular file\nfifo 600 7 8 fifo\nls: device: No such file or directory\n\
         ls: disk: No such file or directory"
    );
    let image = image(&daemon, &name).expect(200);
    assert_eq!(
        (&image["layers"][0]["devices_skipped"], &image["layers"][0]["owners_changed"]),
        (&json!(2), &json!(1))
    );
    // Files on disk have guest ids, so that every sandbox can use them.
    let layers = daemon.data_dir.join("images/layers");
    let on_disk = fs::read_dir(layers).expect("there are layers").any(|layer| {
        use std::os::unix::fs::MetadataExt;
        let odd = layer.expect("it can be read").path().join("odd");
        odd.symlink_metadata().is_ok_and(|meta| (meta.uid(), meta.gid()) == (65_535, 65_534))
    });
    assert!(on_disk);
}

trait RunText {
    fn run_text(&self) -> String;
}

impl RunText for shoal_tests::Finished {
    /// Its output, however it ended.
    fn run_text(&self) -> String {
        format!("{}{}", self.text(), self.errors())
    }
}

#[test]
fn malicious_layers_are_refused_and_reach_nothing() {
    let (registry, daemon) = ground();
    let outside = registry.path("outside");
    fs::create_dir(&outside).expect("it can be made");
    fs::write(outside.join("secret"), "secret").expect("it can be written");
    let outside = outside.to_str().expect("text").to_owned();
    let secret = format!("{outside}/secret");
    let refused = [
        ("up", Layer::default().file("../../../../../../../../../../var/tmp/shoal-evil", "evil")),
        ("up-inside", Layer::default().file("a/../../evil", "evil")),
        ("hard", Layer::default().hard_link("stolen", &secret)),
        ("hard-up", Layer::default().hard_link("stolen", &format!("../../../..{secret}"))),
        ("circle", Layer::default().link("a", "b").link("b", "a").file("a/x", "x")),
        ("whiteout", Layer::default().file(".wh...", "")),
        ("under-file", Layer::default().file("f", "f").file("f/g", "g")),
    ];
    for (tag, layer) in refused {
        let name = registry.push(&format!("evil:{tag}"), &MadeImage::of(&layer, json!({})));
        let said = pull(&daemon, &name).expect_refusal(400, "image_invalid");
        assert!(said["message"].as_str().expect("text").contains("is not allowed"), "{said}");
        expect_nothing_left(&daemon);
    }
    // These stay within the layer.
    let inside = Layer::busybox()
        .link("way-out", &outside)
        .file("way-out/new", "new")
        .link("file-out", &secret)
        .file("file-out", "replaced")
        .file("/absolute", "absolute");
    let name = registry.push("evil:inside", &MadeImage::of(&inside, json!({})));
    let sandbox = sandbox_of(&daemon, &name);
    assert_eq!(
        sandbox.sh(&format!("cat {outside}/new /file-out /absolute")).ok().text(),
        "newreplacedabsolute"
    );
    assert_eq!(fs::read_to_string(&secret).expect("it is there"), "secret");
    assert!(!Path::new(&outside).join("new").exists());
    assert!(!Path::new("/var/tmp/shoal-evil").exists());
}

#[test]
fn an_image_of_many_layers_is_one_file_system() {
    let (registry, daemon) = ground();
    // Fifty is large for an image, and 127 is the limit of other systems.
    for count in [50, 127] {
        let mut tars = vec![Layer::busybox().tar()];
        for number in 1..count {
            let layer = Layer::default()
                .file(&format!("layer-{number}"), &number.to_string())
                .file("last", &number.to_string())
                .file(&format!(".wh.layer-{}", number - 1), "");
            tars.push(layer.tar());
        }
        let layers: Vec<(&[u8], Packing)> = tars.iter().map(|tar| (&tar[..], Packing::Gzip)).collect();
        let name = registry.push(&format!("many:{count}"), &MadeImage::new(&layers, json!({})));
        pull(&daemon, &name).expect(200);
        let sandbox = sandbox_of(&daemon, &name);
        let said = sandbox.sh("cd / && ls -d layer-*; cat last").ok();
        assert_eq!(said.text(), format!("layer-{0}\n{0}", count - 1));
        assert_eq!(image(&daemon, &name).expect(200)["layers"].as_array().map(Vec::len), Some(count + 1));
    }
    let tar = Layer::default().file("x", "x").tar();
    let too_many = MadeImage::new(&vec![(&tar[..], Packing::Gzip); 128], json!({}));
    let name = registry.push("many:128", &too_many);
    pull(&daemon, &name).expect_refusal(400, "image_invalid");
}

#[test]
fn an_image_of_two_gibibytes_is_pulled_and_read() {
    let (registry, daemon) = ground();
    // Mostly zeroes, so that compressing takes seconds; the stream still has its full length.
    let mut contents = vec![0u8; 2 << 30];
    for (number, block) in contents.chunks_mut(64 << 20).enumerate() {
        block[..8].copy_from_slice(&(number as u64).to_le_bytes());
    }
    let sum = digest(&contents);
    let tar = Layer::busybox().entry(b'0', "big", 0o644, (0, 0), "", &contents).into_tar();
    drop(contents);
    let name = registry.push("big:1", &MadeImage::new(&[(&tar, Packing::Gzip)], json!({})));
    drop(tar);
    let image = pull(&daemon, &name).expect(200);
    assert!(image["unpacked_bytes"].as_u64().expect("a number") > 2 << 30, "{image}");
    let sandbox = daemon.sandbox_with(json!({"image": name, "memory": "2Gi"}));
    let said = sandbox.sh("sha256sum /big").ok();
    assert_eq!(format!("sha256:{}", said.text().split(' ').next().expect("a sum")), sum);
}

#[test]
fn twenty_who_pull_at_once_all_get_their_image_and_layers_are_unpacked_once() {
    let (registry, daemon) = ground();
    let base = Layer::busybox().file("base", &"base".repeat(200_000)).tar();
    let names: Vec<String> = (0..4)
        .map(|number| {
            let own = Layer::default().file("own", &number.to_string()).tar();
            let layers = [(&base[..], Packing::Gzip), (&own[..], Packing::Gzip)];
            registry.push(&format!("shared:{number}"), &MadeImage::new(&layers, json!({})))
        })
        .collect();
    let start = Barrier::new(20);
    std::thread::scope(|scope| {
        for number in 0..20 {
            let (daemon, start, name) = (&daemon, &start, &names[number % names.len()]);
            scope.spawn(move || {
                start.wait();
                if number % 2 == 0 {
                    pull(daemon, name).expect(200);
                } else {
                    daemon.post("/v1/sandboxes", &json!({"image": name})).expect(201);
                }
            });
        }
    });
    for (number, name) in names.iter().enumerate() {
        assert_eq!(sandbox_of(&daemon, name).sh("cat /own").ok().text(), number.to_string());
    }
    // One common base, one own layer each, one finishing layer on each.
    assert_eq!(entries(&daemon, "layers").len(), 1 + 4 + 4);
    assert_eq!(entries(&daemon, "blobs"), Vec::<String>::new());
}

#[test]
fn a_transfer_that_breaks_is_resumed_where_it_broke() {
    let (puppet, daemon) = puppet();
    let noise: String = (0..3_000_000u32)
        .map(|n| char::from(b'a' + (n.wrapping_mul(2_654_435_761) >> 27) as u8 % 26))
        .collect();
    let made = MadeImage::new(&[(&Layer::busybox().file("noise", &noise).tar(), Packing::Plain)], json!({}));
    let name = puppet.serve("broken", "1", &made);
    let (blob, bytes) = made.blobs.iter().max_by_key(|(_, bytes)| bytes.len()).expect("there is a layer");
    let path = format!("/v2/broken/blobs/{blob}");
    puppet.on(&path, Deed::Cut { bytes: bytes.clone(), after: 700_000, times: 3 });
    pull(&daemon, &name).expect(200);
    let asked: Vec<_> = puppet.seen(&path).iter().map(|seen| seen.headers.get("range").cloned()).collect();
    let expected = [None, Some("bytes=700000-"), Some("bytes=1400000-"), Some("bytes=2100000-")];
    assert_eq!(asked, expected.map(|range| range.map(str::to_owned)));
    assert_eq!(sandbox_of(&daemon, &name).sh("wc -c < /noise").ok().text().trim(), "3000000");
}

#[test]
fn what_arrived_before_the_daemon_was_killed_is_not_fetched_again() {
    let (puppet, mut daemon) = puppet();
    let filling = "0123456789abcdef".repeat(100_000);
    let made = MadeImage::new(&[(&Layer::busybox().file("f", &filling).tar(), Packing::Plain)], json!({}));
    let name = puppet.serve("stalled", "1", &made);
    let (blob, bytes) = made.blobs.iter().max_by_key(|(_, bytes)| bytes.len()).expect("there is a layer");
    let path = format!("/v2/stalled/blobs/{blob}");
    puppet.on(&path, Deed::Stall { bytes: bytes.clone(), after: 1_000_000 });
    let partial = daemon.data_dir.join("images/blobs").join(format!("{}.partial", &blob[7..]));
    let (address, key) = (daemon.address, daemon.key.clone());
    let body = json!({"reference": name});
    let pulling = std::thread::spawn(move || {
        let request = shoal_tests::Request::new("POST", "/v1/images/pull").key(&key).json(&body);
        request.try_send(address).is_ok()
    });
    until_true("a part has arrived", || fs::metadata(&partial).is_ok_and(|meta| meta.len() >= 1_000_000));
    daemon.crash();
    assert!(!pulling.join().expect("it does not panic"), "the daemon died under it");
    pull(&daemon, &name).expect(200);
    let asked: Vec<_> =
        puppet.seen(&path).iter().filter_map(|seen| seen.headers.get("range").cloned()).collect();
    assert_eq!(asked, ["bytes=1000000-"]);
    assert_eq!(sandbox_of(&daemon, &name).sh("wc -c < /f").ok().text().trim(), "1600000");
    assert_eq!(entries(&daemon, "blobs"), Vec::<String>::new());
}

#[test]
fn a_kill_in_the_middle_of_unpacking_leaves_nothing_half_made() {
    let registry = Registry::start();
    let mut layer = Layer::busybox();
    for number in 0..20_000 {
        layer = layer.file(&format!("many/{}/{number}", number % 100), "some contents of a small file");
    }
    let name = registry.push("many-files:1", &MadeImage::of(&layer, json!({})));
    for victim in ["daemon", "launcher", "unpacker"] {
        let mut daemon = daemon_with(registry.config());
        let (address, key, body) = (daemon.address, daemon.key.clone(), json!({"reference": name}));
        let pulling = std::thread::spawn(move || {
            let request = shoal_tests::Request::new("POST", "/v1/images/pull").key(&key).json(&body);
            request.try_send(address)
        });
        let unfinished = |daemon: &Daemon| {
            entries(daemon, "layers").into_iter().find(|name| name.starts_with("unfinished-"))
        };
        until_true("files are being made", || {
            unfinished(&daemon)
                .is_some_and(|name| daemon.data_dir.join("images/layers").join(name).join("many/7").exists())
        });
        match victim {
            "daemon" => daemon.crash(),
            "launcher" => daemon.launchers().into_iter().take(1).for_each(kill_hard),
            _ => {
                // The directory's name contains the walker; its child unpacks.
                let walker = unfinished(&daemon).and_then(|name| name.split('-').nth(1)?.parse::<i32>().ok());
                let child = walker.and_then(child_of);
                child.into_iter().for_each(|child| send_signal(child, Signal::KILL));
            }
        }
        let answered = pulling.join().expect("it does not panic");
        match (victim, answered) {
            ("daemon", answered) => assert!(answered.is_err(), "the daemon died under it"),
            // A dead launcher is started again, and the layer is unpacked again.
            ("launcher", answered) => drop(answered.expect("the daemon lives").expect(200)),
            (_, answered) => drop(answered.expect("the daemon lives").expect_refusal(500, "unpack_failed")),
        }
        until_true("the unfinished layer is removed", || unfinished(&daemon).is_none());
        pull(&daemon, &name).expect(200);
        assert_eq!(entries(&daemon, "layers").len(), 2, "{victim}");
        assert_eq!(sandbox_of(&daemon, &name).sh("find /many -type f | wc -l").ok().text().trim(), "20000");
    }
}

fn child_of(process: i32) -> Option<i32> {
    let text = fs::read_to_string(format!("/proc/{process}/task/{process}/children")).ok()?;
    text.split_whitespace().next()?.parse().ok()
}

#[test]
fn whatever_a_registry_does_wrong_is_told_apart_and_leaves_nothing() {
    let (puppet, daemon) = puppet();
    let made = MadeImage::of(&Layer::busybox(), json!({}));
    let (layer, bytes) = made.blobs.iter().max_by_key(|(_, bytes)| bytes.len()).expect("there is a layer");
    let config = made.blobs.keys().find(|digest| *digest != layer).expect("there is a configuration").clone();
    let blob = |name: &str, digest: &str| format!("/v2/{name}/blobs/{digest}");
    let manifest = |name: &str| format!("/v2/{name}/manifests/1");
    let json_of = |value: &Value| Deed::Serve(value.to_string().into_bytes());
    let check = |name: &str, status: u16, code: &str, says: &str| {
        let said = pull(&daemon, &format!("{}/{name}:1", puppet.address)).expect_refusal(status, code);
        let message = said["message"].as_str().expect("text");
        assert!(message.contains(says), "{name}: {message}");
        expect_nothing_left(&daemon);
        // Creating a sandbox gives the same error, and leaves no more behind.
        let reference = format!("{}/{name}:1", puppet.address);
        daemon.post("/v1/sandboxes", &json!({"image": reference})).expect_refusal(status, code);
        assert_eq!(daemon.list(), Vec::<Value>::new());
    };

    let mut wrong = bytes.clone();
    wrong[100] ^= 1;
    puppet.serve("wrong-digest", "1", &made);
    puppet.on(&blob("wrong-digest", layer), Deed::Serve(wrong));
    check("wrong-digest", 400, "image_invalid", "has the digest");

    puppet.serve("too-long", "1", &made);
    puppet.on(&blob("too-long", layer), Deed::Serve([&bytes[..], b"more"].concat()));
    check("too-long", 400, "image_invalid", "bytes as the image says");

    puppet.serve("wrong-config", "1", &made);
    puppet.on(&blob("wrong-config", &config), Deed::Serve(b"{}".to_vec()));
    check("wrong-config", 400, "image_invalid", "bytes as the image says");

    puppet.on(&manifest("rubbish"), Deed::Serve(b"<html>".to_vec()));
    check("rubbish", 400, "image_invalid", "cannot be parsed");

    let mut both = made.document();
    both["manifests"] = json!([]);
    puppet.on(&manifest("both"), json_of(&both));
    check("both", 400, "image_invalid", "either an index or a manifest");

    puppet.on(&manifest("endless"), Deed::Serve(vec![b' '; 5 << 20]));
    check("endless", 400, "image_invalid", "more than");

    // Contents that do not match the configuration, found while unpacking.
    let liar = MadeImage::new(&[(&Layer::busybox().file("a", "a").tar(), Packing::Gzip)], json!({}));
    let mut document = liar.document();
    let own = made.document();
    document["layers"] = own["layers"].clone();
    puppet.serve("liar", "1", &made);
    puppet.serve("liar", "1", &liar);
    puppet.on(&manifest("liar"), json_of(&document));
    check("liar", 400, "image_invalid", "its contents must have the digest");

    let bad_tar =
        MadeImage::new(&[(b"this is no tar stream, whatever it is called", Packing::Gzip)], json!({}));
    puppet.serve("bad-tar", "1", &bad_tar);
    check("bad-tar", 400, "image_invalid", "damaged");

    let other = json!({"schemaVersion": 2, "manifests": [
        {"digest": digest(b"x"), "size": 1, "platform": {"os": "linux", "architecture": "s390x"}}]});
    puppet.on(&manifest("other-machine"), json_of(&other));
    check("other-machine", 400, "wrong_platform", "linux/s390x");

    puppet.on(&manifest("busy"), Deed::Answer(429, Vec::new(), b"{}".to_vec()));
    check("busy", 503, "registry_busy", "asks to retry later");

    let words = br#"{"errors": [{"code": "X", "message": "the moon is full"}]}"#.to_vec();
    puppet.on(&manifest("strange"), Deed::Answer(418, Vec::new(), words));
    check("strange", 502, "registry_failed", "the moon is full");

    let elsewhere = vec![("location".to_owned(), "https://127.0.0.1:1/x".to_owned())];
    puppet.on(&manifest("elsewhere"), Deed::Answer(307, elsewhere, Vec::new()));
    check("elsewhere", 503, "registry_unreachable", "cannot be reached");

    check("missing", 404, "image_not_found", "does not exist in its registry");
    let unknown = pull(&daemon, "127.0.0.1:1/nothing:1").expect_refusal(503, "registry_unreachable");
    assert!(unknown["hint"].as_str().expect("a hint").contains("insecure_registries"), "{unknown}");
    for text in ["", "UPPER", "a b", "../../etc", "http://x/y", "x@sha256:12"] {
        pull(&daemon, text).expect_refusal(400, "invalid_request");
    }
    expect_nothing_left(&daemon);
    // After all that, the next pull works.
    let name = puppet.serve("good", "1", &made);
    sandbox_of(&daemon, &name).sh("true").ok();
}

#[test]
fn credentials_go_to_the_registry_and_nowhere_else_and_what_they_open_is_private() {
    let (puppet, daemon) = puppet();
    let made = MadeImage::of(&Layer::busybox(), json!({}));
    let (layer, bytes) = made.blobs.iter().max_by_key(|(_, bytes)| bytes.len()).expect("there is a layer");
    let name = puppet.serve("private", "1", &made);
    // ada:secret
    puppet.guard(Guard::Basic("Basic YWRhOnNlY3JldA==".into()));
    let refused = pull(&daemon, &name).expect_refusal(400, "registry_denied");
    assert!(refused["hint"].as_str().expect("a hint").contains("user name"), "{refused}");
    let with = |password: &str| json!({"reference": name, "username": "ada", "password": password});
    daemon.post("/v1/images/pull", &with("wrong")).expect_refusal(400, "registry_denied");

    // The layer itself is on another host, as with registries in clouds.
    let store = Puppet::start();
    store.on("/layer", Deed::Serve(bytes.clone()));
    let to = format!("http://{}/layer?signed=1", store.address);
    let redirect = Deed::Answer(307, vec![("location".into(), to)], Vec::new());
    puppet.on(&format!("/v2/private/blobs/{layer}"), redirect);
    let image = daemon.post("/v1/images/pull", &with("secret")).expect(200);
    assert_eq!(image["private"], true);
    assert!(store.seen("/layer").iter().all(|seen| !seen.headers.contains_key("authorization")));
    assert_eq!(store.seen("/layer").len(), 1);

    // A caller without credentials neither sees it nor gets it.
    let other = daemon.post("/v1/keys", &json!({"owner": "other"})).expect(201);
    let other = other["secret"].as_str().expect("a secret").to_owned();
    let as_other = |method: &str, target: &str| shoal_tests::Request::new(method, target).key(&other);
    assert_eq!(as_other("GET", "/v1/images").send(daemon.address).expect(200)["images"], json!([]));
    let target = format!("/v1/images/{}", in_path(&name));
    as_other("GET", &target).send(daemon.address).expect_refusal(404, "image_not_found");
    as_other("DELETE", &target).send(daemon.address).expect_refusal(404, "image_not_found");
    let wish = as_other("POST", "/v1/sandboxes").json(&json!({"image": name}));
    wish.send(daemon.address).expect_refusal(400, "registry_denied");
    sandbox_of(&daemon, &name).sh("true").ok();

    // With a token, which is requested once for all layers.
    let guarded = Puppet::start();
    let realm = format!("http://{}/token", guarded.address);
    guarded.guard(Guard::Bearer("opensesame".into(), realm));
    guarded.on("/token", Deed::Serve(br#"{"token": "opensesame"}"#.to_vec()));
    let mut second = daemon_with(guarded.config());
    let reference = guarded.serve("team/app", "1", &made);
    pull(&second, &reference).expect(200);
    let asked = guarded.seen("/token");
    assert_eq!(asked.len(), 1);
    assert_eq!(asked[0].target, "/token?service=test&scope=repository:team/app:pull");
    assert!(!asked[0].headers.contains_key("authorization"));
    let logs = daemon.logs() + &second.logs();
    assert!(!logs.contains("opensesame") && !logs.contains("YWRhOnNlY3JldA"), "a secret was logged");
    second.stop();
}

/// `ada:secret`, as in a Docker configuration.
const ADA: &str = "YWRhOnNlY3JldA==";

#[test]
fn a_real_registry_that_wants_a_password_gets_it_from_the_request_the_environment_or_the_daemons_file() {
    let registry = Registry::start_guarded();
    let made = MadeImage::of(&Layer::busybox().file("x", "x"), json!({}));
    let name = registry.push_with("team/app:1", &made, &["--dest-creds=ada:secret"]);
    let daemon = daemon_with(registry.config());
    pull(&daemon, &name).expect_refusal(400, "registry_denied");
    let wrong = json!({"reference": name, "username": "ada", "password": "wrong"});
    daemon.post("/v1/images/pull", &wrong).expect_refusal(400, "registry_denied");
    let right = json!({"reference": name, "username": "ada", "password": "secret"});
    assert_eq!(daemon.post("/v1/images/pull", &right).expect(200)["private"], true);

    // From the caller's environment.
    daemon.delete(&format!("/v1/images/{}", in_path(&name))).expect(200);
    let mut command = command_of(&daemon, &["image", "pull", &name]);
    command.env("SHOAL_REGISTRY_USERNAME", "ada").env("SHOAL_REGISTRY_PASSWORD", "secret");
    said(command.output().expect("it runs"));
    let mut half = command_of(&daemon, &["image", "pull", &name]);
    let half = half.env("SHOAL_REGISTRY_USERNAME", "ada").output().expect("it runs");
    assert!(String::from_utf8_lossy(&half.stderr).contains("only one of"), "{half:?}");
    assert!(!daemon.logs().contains("secret"), "a secret was logged");

    // From the daemon's own configuration: for keys with admin rights, or for everyone.
    let file = registry.path("docker.json");
    let auths = json!({"auths": {registry.name.clone(): {"auth": ADA}}});
    fs::write(&file, auths.to_string()).expect("it can be written");
    let config = format!("{}docker_config = \"{}\"\n", registry.config(), file.display());
    for shared in [false, true] {
        let second = daemon_with(format!("{config}docker_config_shared = {shared}\n"));
        let bob = second.post("/v1/keys", &json!({"owner": "bob"})).expect(201);
        let bob = bob["secret"].as_str().expect("a secret");
        let as_bob =
            shoal_tests::Request::new("POST", "/v1/images/pull").key(bob).json(&json!({"reference": name}));
        if !shared {
            as_bob.send(second.address).expect_refusal(400, "registry_denied");
        }
        let sandbox = sandbox_of(&second, &name);
        assert_eq!(sandbox.sh("cat /x").ok().text(), "x");
        assert_eq!(
            image(&second, &name).expect(200)["private"],
            !shared,
            "what they open is for those who have them"
        );
        match shared {
            true => drop(as_bob.send(second.address).expect(200)),
            false => drop(as_bob.send(second.address).expect_refusal(400, "registry_denied")),
        }
    }
}

#[test]
fn manifests_and_layers_of_dockers_own_types_are_the_same_to_us() {
    let (registry, daemon) = ground();
    let layers = [Layer::busybox().tar(), Layer::default().file("above", "above").tar()];
    let layers: Vec<_> = layers.iter().map(|tar| (&tar[..], Packing::Gzip)).collect();
    let made = MadeImage::new(&layers, json!({"Env": ["FROM=docker"]}));
    let name = registry.push_with("docker:1", &made, &["--format=v2s2"]);
    let mut inspect = Command::new("skopeo");
    inspect.args(["inspect", "--raw", "--tls-verify=false", &format!("docker://{name}")]);
    let manifest = program(&mut inspect);
    assert!(manifest.contains("application/vnd.docker.distribution.manifest.v2+json"), "{manifest}");
    assert!(manifest.contains("application/vnd.docker.image.rootfs.diff.tar.gzip"), "{manifest}");
    let image = pull(&daemon, &name).expect(200);
    assert_eq!(image["digest"], digest(manifest.as_bytes()));
    let said = sandbox_of(&daemon, &name).sh("cat /above; echo $FROM").ok();
    assert_eq!(said.text(), "abovedocker");
    // The same by digest alone, which no tag can change.
    let pinned = format!("{}/docker@{}", registry.name, digest(manifest.as_bytes()));
    assert_eq!(pull(&daemon, &pinned).expect(200)["digest"], image["digest"]);
}

#[test]
fn a_kill_at_any_step_of_a_pull_leaves_what_the_next_one_can_use() {
    let (puppet, mut daemon) = puppet();
    const LAYERS: usize = 5;
    for step in 0..=LAYERS + 2 {
        let tars: Vec<Vec<u8>> = (0..LAYERS)
            .map(|number| {
                let base = if number == 0 { Layer::busybox() } else { Layer::default() };
                base.file(&format!("of-{step}-{number}"), &"some words ".repeat(20_000)).tar()
            })
            .collect();
        let layers: Vec<_> = tars.iter().map(|tar| (&tar[..], Packing::Plain)).collect();
        let repository = format!("killed-{step}");
        let name = puppet.serve(&repository, "1", &MadeImage::new(&layers, json!({})));
        let (address, key, body) = (daemon.address, daemon.key.clone(), json!({"reference": name}));
        let pulling = std::thread::spawn(move || {
            let request = shoal_tests::Request::new("POST", "/v1/images/pull").key(&key).json(&body);
            request.try_send(address)
        });
        // A manifest, a configuration, and then layers: the kill comes with the n-th of these.
        let part = format!("/v2/{repository}/");
        until_true("the registry was asked", || puppet.seen(&part).len() >= step.clamp(1, LAYERS + 2));
        daemon.crash();
        let _ = pulling.join().expect("it does not panic");
        pull(&daemon, &name).expect(200);
        let sandbox = sandbox_of(&daemon, &name);
        let count = sandbox.sh(&format!("cd / && ls -d of-{step}-* | wc -l; cat of-{step}-* | wc -c")).ok();
        let numbers: Vec<String> = count.text().split_whitespace().map(str::to_owned).collect();
        assert_eq!(numbers, [LAYERS.to_string(), (LAYERS * 220_000).to_string()]);
        sandbox.delete();
        daemon.delete(&format!("/v1/images/{}", in_path(&name))).expect(200);
        expect_nothing_left(&daemon);
    }
}

#[test]
fn a_name_that_is_taken_away_and_pulled_again_at_the_same_time_is_there_or_not_and_never_broken() {
    let (registry, daemon) = ground();
    let name = registry.push("torn:1", &MadeImage::of(&Layer::busybox().file("x", "x"), json!({})));
    let route = format!("/v1/images/{}", in_path(&name));
    for _ in 0..15 {
        std::thread::scope(|scope| {
            scope.spawn(|| pull(&daemon, &name).expect(200));
            scope.spawn(|| {
                let status = daemon.delete(&format!("{route}?force=true")).status;
                assert!([200, 404].contains(&status), "{status}");
            });
            scope.spawn(|| {
                let made = daemon.post("/v1/sandboxes", &json!({"image": name})).expect(201);
                let sandbox = daemon.sandbox_of(made["id"].as_str().expect("an id"));
                assert_eq!(sandbox.sh("cat /x").ok().text(), "x");
                sandbox.delete();
            });
        });
    }
    pull(&daemon, &name).expect(200);
    daemon.delete(&route).expect(200);
    expect_nothing_left(&daemon);
}

#[test]
fn a_registry_is_spoken_to_in_the_clear_only_if_somebody_named_it() {
    let puppet = Puppet::start();
    let name = puppet.serve("clear", "1", &MadeImage::of(&Layer::busybox(), json!({})));
    let daemon = Daemon::start();
    pull(&daemon, &name).expect_refusal(503, "registry_unreachable");
    assert_eq!(puppet.seen("/v2").len(), 0, "nothing was requested without TLS");
    let key = daemon.post("/v1/keys", &json!({"owner": "other"})).expect(201);
    let wish = json!({"reference": name, "insecure": true});
    let asked =
        shoal_tests::Request::new("POST", "/v1/images/pull").key(key["secret"].as_str().expect("a secret"));
    asked.json(&wish).send(daemon.address).expect_refusal(403, "admin_required");
    daemon.post("/v1/images/pull", &wish).expect(200);
}

#[test]
fn a_mirror_is_asked_first_and_the_registry_when_it_has_nothing() {
    let (mirror, origin) = (Puppet::start(), Puppet::start());
    let made = MadeImage::of(&Layer::busybox(), json!({}));
    mirror.serve("both", "1", &made);
    let both = origin.serve("both", "1", &made);
    let only = origin.serve("only-here", "1", &made);
    let config = format!(
        "insecure_registries = [\"{0}\"]\nregistry_mirrors = [\"{0}=http://{1}\", \"{0}=http://127.0.0.1:1\"]\n",
        origin.address, mirror.address
    );
    let daemon = daemon_with(config);
    pull(&daemon, &both).expect(200);
    assert_eq!(origin.seen("/v2").len(), 0, "the mirror had it");
    pull(&daemon, &only).expect(200);
    assert!(!mirror.seen("only-here").is_empty() && !origin.seen("only-here").is_empty());
}

#[test]
fn an_index_is_looked_through_for_this_machine() {
    let (puppet, daemon) = puppet();
    let made = MadeImage::of(&Layer::busybox().file("right", "right"), json!({}));
    puppet.serve("multi", "inner", &made);
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let index = json!({"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.list.v2+json",
    "manifests": [
        {"digest": digest(b"x"), "size": 1, "platform": {"os": "windows", "architecture": architecture}},
        {"digest": digest(b"y"), "size": 1, "platform": {"os": "unknown", "architecture": "unknown"}},
        {"digest": digest(&made.manifest), "size": made.manifest.len(),
         "platform": {"os": "linux", "architecture": architecture}},
    ]});
    puppet.on("/v2/multi/manifests/1", Deed::Serve(index.to_string().into_bytes()));
    let name = format!("{}/multi:1", puppet.address);
    let image = pull(&daemon, &name).expect(200);
    assert_eq!(image["digest"], digest(&made.manifest));
    assert_eq!(sandbox_of(&daemon, &name).sh("cat /right").ok().text(), "right");
    let pinned = format!("{}/multi@{}", puppet.address, digest(&made.manifest));
    assert_eq!(pull(&daemon, &pinned).expect(200)["names"].as_array().map(Vec::len), Some(2));
    let lie = format!("{}/multi@{}", puppet.address, digest(b"something else"));
    puppet.on(
        &format!("/v2/multi/manifests/{}", digest(b"something else")),
        Deed::Serve(made.manifest.clone()),
    );
    pull(&daemon, &lie).expect_refusal(400, "image_invalid");
    let wish = json!({"reference": name, "platform": "linux/s390x"});
    daemon.post("/v1/images/pull", &wish).expect_refusal(400, "wrong_platform");
    daemon
        .post("/v1/images/pull", &json!({"reference": name, "platform": "x"}))
        .expect_refusal(400, "invalid_request");
}

#[test]
fn archives_of_all_kinds_can_be_imported() {
    let registry = Registry::start();
    let daemon = daemon_with(registry.config());
    let made = MadeImage::of(&Layer::busybox().file("mark", "mark"), json!({"Env": ["FROM=archive"]}));
    registry.push("source:1", &made);
    let source = format!("docker://{}/source:1", registry.name);
    let import = |query: &str, body: Vec<u8>| {
        daemon.request("POST", &format!("/v1/images/import{query}")).body(body).send(daemon.address)
    };
    let docker = registry.path("docker.tar");
    program(&mut skopeo(&[&source, &format!("docker-archive:{}:saved/app:7", docker.display())]));
    let images = import("", fs::read(&docker).expect("it was written")).expect(200);
    assert_eq!(images["images"][0]["names"], json!(["saved/app:7"]));
    let said = sandbox_of(&daemon, "saved/app:7").sh("cat /mark; echo $FROM").ok();
    assert_eq!(said.text(), "markarchive");

    let oci = registry.path("oci.tar");
    program(&mut skopeo(&[&source, &format!("oci-archive:{}:7", oci.display())]));
    let oci = fs::read(&oci).expect("it was written");
    import("", oci.clone()).expect_refusal(400, "name_needed");
    import("?name=from-oci:1", Packing::Gzip.pack(&oci)).expect(200);
    assert_eq!(sandbox_of(&daemon, "from-oci:1").sh("cat /mark").ok().text(), "mark");

    let rootfs = Layer::busybox().file("root", "root").tar();
    for (number, packing) in [Packing::Plain, Packing::Gzip, Packing::Zstd].into_iter().enumerate() {
        let name = format!("rootfs:{number}");
        import(&format!("?name={}", in_path(&name)), packing.pack(&rootfs)).expect(200);
        assert_eq!(sandbox_of(&daemon, &name).sh("cat /root").ok().text(), "root");
    }

    for (query, body, code) in [
        ("?name=x:1", b"rubbish".to_vec(), "image_invalid"),
        ("?name=x:1", Vec::new(), "image_invalid"),
        ("?name=x:1", rootfs[..3000].to_vec(), "image_invalid"),
        ("?name=x:1&format=oci", rootfs.clone(), "image_invalid"),
        ("?name=x:1&format=docker", rootfs.clone(), "image_invalid"),
        ("?name=x:1&format=zip", rootfs.clone(), "invalid_request"),
        ("?name=UPPER", rootfs.clone(), "invalid_request"),
        ("", rootfs.clone(), "name_needed"),
        (
            "?name=x:1",
            Layer::default().file("manifest.json", "[{\"Config\": \"../../etc/passwd\"}]").tar(),
            "image_invalid",
        ),
        ("?name=x:1", Layer::default().file("../up", "x").tar(), "image_invalid"),
    ] {
        import(query, body).expect_refusal(400, code);
    }
    let before = entries(&daemon, "layers").len();
    daemon.post("/v1/images/gc", &json!({})).expect(200);
    assert!(entries(&daemon, "layers").len() <= before);
    assert_eq!(entries(&daemon, "blobs"), Vec::<String>::new());
    let other = daemon.post("/v1/keys", &json!({"owner": "other"})).expect(201);
    let asked = shoal_tests::Request::new("POST", "/v1/images/import?name=x").body(rootfs);
    asked
        .key(other["secret"].as_str().expect("a secret"))
        .send(daemon.address)
        .expect_refusal(403, "admin_required");
}

#[test]
fn aliases_stand_for_images_and_are_shown_where_the_image_is() {
    let (registry, daemon) = ground();
    let name =
        registry.push("team/python:3.12", &MadeImage::of(&Layer::busybox().file("which", "ours"), json!({})));
    let set = |alias: &str, target: &str| {
        let route = format!("/v1/image-aliases/{}", in_path(alias));
        daemon.request("PUT", &route).json(&json!({"target": target})).send(daemon.address)
    };
    set("python:3", &name).expect(200);
    set("ubuntu:24.04", "host").expect(200);
    let sandbox = sandbox_of(&daemon, "docker.io/library/python:3");
    assert_eq!(sandbox.sh("cat /which").ok().text(), "ours");
    assert_eq!((&sandbox.get()["image"], &sandbox.get()["image_alias"]), (&json!(name), &json!("python:3")));
    let image = image(&daemon, "python:3").expect(200);
    assert_eq!((&image["names"], &image["aliases"]), (&json!([name]), &json!(["python:3"])));
    let host = sandbox_of(&daemon, "ubuntu:24.04");
    assert_eq!((&host.get()["image"], &host.get()["image_alias"]), (&json!("host"), &json!("ubuntu:24.04")));
    host.sh("python3 -c 'print(1)'").ok();
    for (alias, target) in
        [("a", "a"), ("b", "python:3"), (name.as_str(), "host"), ("UPPER", "host"), ("a", "UPPER")]
    {
        set(alias, target).expect_refusal(400, "invalid_request");
    }
    let listed = daemon.get("/v1/image-aliases").expect(200);
    let names: Vec<_> =
        listed["aliases"].as_array().expect("a list").iter().map(|alias| &alias["name"]).collect();
    assert_eq!(names, [&json!("python:3"), &json!("ubuntu:24.04")]);
    // Aliases are rows, and sandboxes keep the image that they were created with.
    let mut daemon = daemon;
    daemon.crash();
    assert_eq!(daemon.get("/v1/image-aliases").expect(200), listed);
    let route = format!("/v1/image-aliases/{}", in_path("python:3"));
    assert_eq!(daemon.delete(&route).status, 204);
    daemon.delete(&route).expect_refusal(404, "alias_not_found");
    let sandbox = daemon.sandbox_of(&sandbox.id);
    assert_eq!(sandbox.get()["image_alias"], "python:3");
    assert_eq!(sandbox.sh("cat /which").ok().text(), "ours");
}

#[test]
fn an_image_goes_when_its_last_name_and_its_last_sandbox_have_gone() {
    let (registry, mut daemon) = ground();
    let base = Layer::busybox().tar();
    let own = Layer::default().file("own", "own").tar();
    let one = registry.push("one:1", &MadeImage::new(&[(&base, Packing::Gzip)], json!({})));
    let two =
        registry.push("two:1", &MadeImage::new(&[(&base, Packing::Gzip), (&own, Packing::Gzip)], json!({})));
    pull(&daemon, &one).expect(200);
    let sandbox = sandbox_of(&daemon, &two);
    assert_eq!(entries(&daemon, "layers").len(), 4);
    let route = format!("/v1/images/{}", in_path(&two));
    let refused = daemon.delete(&route).expect_refusal(409, "image_in_use");
    assert_eq!(refused["details"]["sandboxes"], 1);
    image(&daemon, &two).expect(200);
    assert_eq!(daemon.delete(&format!("{route}?force=true")).expect(200)["layers"], 0, "a sandbox uses it");
    image(&daemon, &two).expect_refusal(404, "image_not_found");
    assert_eq!(sandbox.sh("cat /own").ok().text(), "own");
    daemon.crash();
    daemon.post("/v1/images/gc", &json!({})).expect(200);
    let sandbox = daemon.sandbox_of(&sandbox.id);
    assert_eq!(sandbox.sh("cat /own; ls /bin/sh").ok().text(), "own/bin/sh");
    sandbox.delete();
    let collected = daemon.post("/v1/images/gc", &json!({})).expect(200);
    assert_eq!((&collected["images"], &collected["layers"]), (&json!(1), &json!(2)));
    assert_eq!(entries(&daemon, "layers").len(), 2, "the other image has the rest");
    sandbox_of(&daemon, &one).sh("true").ok().body["id"].as_str().expect("an id");
    // A name that is pulled again exists again.
    assert_eq!(sandbox_of(&daemon, &two).sh("cat /own").ok().text(), "own");
    let other = daemon.post("/v1/keys", &json!({"owner": "other"})).expect(201);
    let asked = shoal_tests::Request::new("DELETE", &format!("/v1/images/{}", in_path(&one)));
    asked
        .key(other["secret"].as_str().expect("a secret"))
        .send(daemon.address)
        .expect_refusal(403, "admin_required");
}

#[test]
fn a_create_that_does_not_wait_pulls_behind_its_answer() {
    let (puppet, daemon) = puppet();
    let made = MadeImage::of(&Layer::busybox(), json!({}));
    let name = puppet.serve("later", "1", &made);
    let answered = daemon.post("/v1/sandboxes", &json!({"image": name, "wait": false})).expect(202);
    let sandbox = daemon.sandbox_of(answered["id"].as_str().expect("an id"));
    until_true("it runs", || sandbox.get()["state"] == "running");
    sandbox.sh("true").ok();
    let missing = format!("{}/missing:1", puppet.address);
    let answered = daemon.post("/v1/sandboxes", &json!({"image": missing, "wait": false})).expect(202);
    let sandbox = daemon.sandbox_of(answered["id"].as_str().expect("an id"));
    until_true("it failed", || sandbox.get()["state"] == "failed");
    assert!(sandbox.get()["reason"].as_str().expect("a reason").contains("does not exist in its registry"));
    sandbox.delete();
    // A delete stops the pull for a sandbox that is being created.
    let slow = format!("{}/slow:1", puppet.address);
    puppet.on("/v2/slow/manifests/1", Deed::Stall { bytes: vec![b' '; 1000], after: 10 });
    let answered = daemon.post("/v1/sandboxes", &json!({"image": slow, "wait": false})).expect(202);
    let sandbox = daemon.sandbox_of(answered["id"].as_str().expect("an id"));
    until_true("the registry was asked", || !puppet.seen("slow").is_empty());
    sandbox.delete();
}

#[test]
fn a_full_disk_is_told_and_what_was_taken_is_given_back() {
    let puppet = Puppet::start();
    let daemon = Spawn { config: puppet.config(), tmpfs_bytes: Some(256 << 20), ..Spawn::default() }.start();
    // Compresses well without being zeroes: it can be fetched, and does not fit when it is unpacked.
    let filling = "0123456789abcdef".repeat(20 << 20);
    let unpacked = Layer::busybox().file("big", &filling).tar();
    let name = puppet.serve("full", "1", &MadeImage::new(&[(&unpacked, Packing::Gzip)], json!({})));
    let refused = pull(&daemon, &name).expect_refusal(507, "disk_full");
    assert!(refused["hint"].as_str().expect("a hint").contains("gc"), "{refused}");
    expect_nothing_left(&daemon);
    // Does not even fit as it is fetched.
    let name = puppet.serve("full", "2", &MadeImage::new(&[(&unpacked, Packing::Plain)], json!({})));
    pull(&daemon, &name).expect_refusal(507, "disk_full");
    expect_nothing_left(&daemon);
    let small = puppet.serve("small", "1", &MadeImage::of(&Layer::busybox(), json!({})));
    sandbox_of(&daemon, &small).sh("true").ok();
}

#[test]
fn progress_is_told_as_events() {
    let (registry, daemon) = ground();
    let name = registry.push("events:1", &MadeImage::of(&Layer::busybox(), json!({})));
    let events = |reference: &str| {
        let request = daemon.request("POST", "/v1/images/pull").header("accept", "text/event-stream");
        let answer = request.json(&json!({"reference": reference})).send(daemon.address);
        assert_eq!(answer.status, 200);
        let text = String::from_utf8(answer.body).expect("events are text");
        let data = text.lines().filter_map(|line| line.strip_prefix("data:"));
        data.map(|data| serde_json::from_str::<Value>(data).expect("each is JSON")).collect::<Vec<_>>()
    };
    let told = events(&name);
    let last = told.last().expect("there is a last one");
    assert_eq!((&last["type"], &last["images"][0]["names"]), (&json!("done"), &json!([name])));
    let again = events(&name);
    assert!(
        again.iter().any(|event| event["layers"][0]["state"] == "present") || again.len() == 1,
        "{again:?}"
    );
    let failed = events(&format!("{}/missing:1", registry.name));
    assert_eq!(
        (&failed.last().expect("one")["type"], &failed.last().expect("one")["code"]),
        (&json!("failed"), &json!("image_not_found"))
    );
}

fn command_of(daemon: &Daemon, arguments: &[&str]) -> Command {
    let mut command = Command::new(binary());
    command.args(arguments).env_remove("SHOAL_DATA_DIR").env("HOME", daemon.home.path());
    command.env("SHOAL_URL", format!("http://{}", daemon.address)).env("SHOAL_API_KEY", &daemon.key);
    command.stdin(Stdio::null());
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

#[test]
fn the_command_line_does_all_of_it() {
    let (registry, daemon) = ground();
    let made = MadeImage::of(&Layer::busybox().file("x", "x"), json!({"Labels": {"maker": "me"}}));
    let name = registry.push("cli:1", &made);
    assert_eq!(said(shoal(&daemon, &["image", "pull", &name])).trim(), digest(&made.manifest));
    said(shoal(&daemon, &["image", "alias", "set", "nice:1", &name]));
    let listed = said(shoal(&daemon, &["image", "ls"]));
    assert!(listed.contains(&name) && listed.contains("nice:1"), "{listed}");
    let shown = said(shoal(&daemon, &["image", "inspect", "nice:1"]));
    assert!(shown.contains("maker=me") && shown.contains(&digest(&made.manifest)), "{shown}");
    assert_eq!(said(shoal(&daemon, &["run", "--image", "nice:1", "--", "cat", "/x"])), "x");
    let entrypoint =
        MadeImage::of(&Layer::busybox(), json!({"Entrypoint": ["/bin/echo"], "Cmd": ["own words"]}));
    let own = registry.push("cli-own:1", &entrypoint);
    assert_eq!(said(shoal(&daemon, &["run", "--image", &own])), "own words\n");
    let created = said(shoal(&daemon, &["create", "--image", &name, "--name", "kept"]));
    assert!(said(shoal(&daemon, &["ls"])).contains(created.trim()));
    assert!(said(shoal(&daemon, &["inspect", "kept"])).contains(&name));

    // A directory: a root file system with owners, and an OCI layout.
    let rootfs = registry.path("rootfs");
    fs::create_dir_all(rootfs.join("bin")).expect("it can be made");
    for tool in ["busybox", "sh", "cat", "stat"] {
        fs::copy("/bin/busybox", rootfs.join("bin").join(tool)).expect("it can be copied");
    }
    fs::write(rootfs.join("owned"), "owned").expect("it can be written");
    std::os::unix::fs::chown(rootfs.join("owned"), Some(1234), Some(5)).expect("it can be given away");
    said(shoal(&daemon, &["image", "import", "--name", "dir:1", rootfs.to_str().expect("text")]));
    let owner = said(shoal(&daemon, &["run", "--image", "dir:1", "--", "stat", "-c", "%u:%g", "/owned"]));
    assert_eq!(owner.trim(), "1234:5");
    let layout = registry.path("layout");
    made.write_layout(&layout, "1");
    said(shoal(&daemon, &["image", "import", "--name", "layout:1", layout.to_str().expect("text")]));
    assert_eq!(said(shoal(&daemon, &["run", "--image", "layout:1", "--", "cat", "/x"])), "x");

    let failed = shoal(&daemon, &["image", "pull", &format!("{}/missing:1", registry.name)]);
    assert_eq!(failed.status.code(), Some(1));
    let words = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(words.contains("does not exist in its registry") && words.contains("check the name"), "{words}");
    said(shoal(&daemon, &["image", "rm", "dir:1"]));
    assert!(said(shoal(&daemon, &["image", "gc"])).starts_with("removed "));
    said(shoal(&daemon, &["image", "alias", "rm", "nice:1"]));
    assert!(!said(shoal(&daemon, &["image", "ls"])).contains("dir:1"));

    // Credentials from Docker's own file.
    let puppet = Puppet::start();
    let private = puppet.serve("private", "1", &made);
    puppet.guard(Guard::Basic("Basic YWRhOnNlY3JldA==".into()));
    let docker = daemon.home.join(".docker");
    fs::create_dir(&docker).expect("it can be made");
    let auths = json!({"auths": {puppet.address.to_string(): {"auth": "YWRhOnNlY3JldA=="}}});
    fs::write(docker.join("config.json"), auths.to_string()).expect("it can be written");
    said(shoal(&daemon, &["image", "pull", "--insecure", &private]));
    let denied = shoal(&daemon, &["image", "pull", "--insecure", "--anonymous", &private]);
    assert!(String::from_utf8_lossy(&denied.stderr).contains("denies access"), "{denied:?}");
}

#[test]
fn a_terminal_shows_a_bar_for_each_layer_and_a_pipe_shows_none() {
    let (puppet, daemon) = puppet();
    let tars = [Layer::busybox().tar(), Layer::default().file("y", &"y".repeat(300_000)).tar()];
    let made = MadeImage::new(&[(&tars[0], Packing::Plain), (&tars[1], Packing::Plain)], json!({}));
    let name = puppet.serve("bars", "1", &made);
    // Slow by design: each break is followed by a delay.
    for (blob, bytes) in made.blobs.iter().filter(|(_, bytes)| bytes.len() > 10_000) {
        let deed = Deed::Cut { bytes: bytes.clone(), after: bytes.len() / 3, times: 2 };
        puppet.on(&format!("/v2/bars/blobs/{blob}"), deed);
    }
    let typed = format!("{} image pull {name}", binary().display());
    let mut terminal = Command::new("script");
    terminal.args(["--quiet", "--return", "--command", &typed, "/dev/null"]);
    for (variable, value) in command_of(&daemon, &[]).get_envs() {
        match value {
            Some(value) => terminal.env(variable, value),
            None => terminal.env_remove(variable),
        };
    }
    let shown = said(terminal.env("TERM", "xterm").stdin(Stdio::null()).output().expect("it runs"));
    for tar in &tars {
        assert!(shown.contains(&digest(tar)[7..19]), "{shown:?}");
    }
    assert!(shown.contains("fetching") && shown.contains('━'), "{shown:?}");
    assert!(shown.contains(&digest(&made.manifest)), "{shown:?}");
    let quiet = shoal(&daemon, &["image", "pull", &name]);
    assert!(quiet.stderr.is_empty(), "{quiet:?}");
    assert_eq!(said(quiet).trim(), digest(&made.manifest));
}

/// A whole distribution, made by `debootstrap` once and cached, since it takes minutes.
#[test]
fn a_real_distribution_works_as_people_expect() {
    const CACHE: &str = "/var/tmp/shoal-test-cache";
    let tar = Path::new(CACHE).join("debian-12-minbase.tar");
    if !tar.exists() {
        fs::create_dir_all(CACHE).expect("the directory of temporary files takes directories");
        let scratch = format!("{CACHE}/making-{}", std::process::id());
        let mirror = "http://deb.debian.org/debian";
        program(Command::new("debootstrap").args(["--variant=minbase", "bookworm", &scratch, mirror]));
        let unfinished = format!("{scratch}.tar");
        program(Command::new("tar").args(["--numeric-owner", "-C", &scratch, "-cf", &unfinished, "."]));
        fs::rename(&unfinished, &tar).expect("it can be named");
        fs::remove_dir_all(&scratch).expect("it can be removed");
    }
    let (registry, daemon) = ground();
    // As people build images: umoci from a root file system, with a second layer on top.
    let layout = registry.path("umoci");
    let layout = layout.to_str().expect("text");
    let (bundle, image) = (format!("{layout}-bundle"), format!("{layout}:12"));
    let umoci = |arguments: &[&str]| program(Command::new("umoci").args(arguments));
    umoci(&["init", "--layout", layout]);
    umoci(&["new", "--image", &image]);
    umoci(&["unpack", "--image", &image, &bundle]);
    program(
        Command::new("tar").args(["--numeric-owner", "-C", &format!("{bundle}/rootfs"), "-xf"]).arg(&tar),
    );
    umoci(&["repack", "--image", &image, &bundle]);
    fs::write(format!("{bundle}/rootfs/etc/second"), "second").expect("it can be written");
    fs::remove_file(format!("{bundle}/rootfs/etc/issue")).expect("it is there");
    fs::remove_dir_all(format!("{bundle}/rootfs/usr/share/doc")).expect("it is there");
    umoci(&["repack", "--refresh-bundle", "--image", &image, &bundle]);
    umoci(&["config", "--image", &image, "--config.env", "LANG=C.UTF-8", "--config.cmd", "bash"]);
    fs::remove_dir_all(&bundle).expect("it can be removed");
    let name = format!("{}/debian:12", registry.name);
    program(&mut skopeo(&[&format!("oci:{image}"), &format!("docker://{name}")]));
    let sandbox = sandbox_of(&daemon, &name);
    sandbox.sh("grep -q bookworm /etc/os-release && cat /etc/second && ! test -e /etc/issue && ! test -e /usr/share/doc").ok();
    sandbox.sh("dpkg -l | grep -q '^ii  apt ' && apt-get --version > /dev/null").ok();
    sandbox.sh("useradd -m bob && su bob -c id && echo ok > /home/bob/x && chown bob: /home/bob/x").ok();
    sandbox.sh("dpkg --force-all -P tzdata >/dev/null 2>&1; dpkg --audit; perl -e 'print 1+1'").ok();
    let suid = sandbox.sh("stat -c '%a %U %G' /usr/bin/passwd /usr/bin/chage /var/mail").ok();
    assert_eq!(suid.text(), "4755 root root\n2755 root shadow\n2775 root mail");
}
