//! Files over raw HTTP: streams, ranges, conditions, rejected and hostile requests, and callers that disconnect.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use shoal_tests::http::server_events;
use shoal_tests::wait::until_true;
use shoal_tests::{DEADLINE, Daemon, Request, Response, Sandbox, until};

/// Encodes bytes for a query.
fn escaped(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("%{byte:02X}")).collect()
}

fn file(sandbox: &Sandbox, method: &str, path: &str) -> Request {
    sandbox.request(method, &format!("/files?path={}", escaped(path.as_bytes())))
}

#[track_caller]
fn get(sandbox: &Sandbox, path: &str) -> Response {
    file(sandbox, "GET", path).send(sandbox.address)
}

#[track_caller]
fn put(sandbox: &Sandbox, path: &str, bytes: &[u8]) -> Value {
    let answer = file(sandbox, "PUT", path).body(bytes).send(sandbox.address);
    assert!(matches!(answer.status, 200 | 201), "{}", answer.describe());
    answer.json()
}

#[track_caller]
fn ask(sandbox: &Sandbox, method: &str, more: &str) -> Response {
    sandbox.request(method, &format!("/files/{more}")).send(sandbox.address)
}

#[track_caller]
fn stat(sandbox: &Sandbox, path: &str) -> Value {
    ask(sandbox, "GET", &format!("stat?path={}", escaped(path.as_bytes()))).expect(200)
}

/// Sends the head of a request; the test writes the body itself.
fn begin(sandbox: &Sandbox, method: &str, target: &str, headers: &str) -> TcpStream {
    let mut stream = TcpStream::connect(sandbox.address).expect("the daemon listens");
    stream.set_read_timeout(Some(DEADLINE)).expect("a timeout");
    stream.set_write_timeout(Some(DEADLINE)).expect("a timeout");
    let (address, key) = (sandbox.address, &sandbox.key);
    let head = format!(
        "{method} {target} HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {key}\r\n{headers}connection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).expect("the daemon reads");
    stream
}

/// File operations in progress: init's children that are not commands.
fn operations(sandbox: &Sandbox) -> usize {
    let init = sandbox.init();
    sandbox
        .processes()
        .iter()
        .filter(|process| **process != init && !shoal_tests::audit::is_dead(**process))
        .count()
}

fn resident_kib(process: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("it lives");
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("the kernel reports it");
    line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("a number")
}

#[test]
fn a_file_goes_up_and_comes_down_as_it_is() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let bytes: Vec<u8> = (0..200_000u32).map(|at| (at * 7 % 256) as u8).collect();
    let answer = file(&sandbox, "PUT", "/workspace/new/dir/f.bin").body(bytes.clone()).send(sandbox.address);
    let info = answer.expect(201);
    assert_eq!(
        (&info["size"], &info["kind"], &info["mode"]),
        (&json!(200_000), &json!("file"), &json!("0644"))
    );
    assert_eq!(info["path"], "/workspace/new/dir/f.bin");
    assert_eq!(answer.header("etag"), info["etag"].as_str());
    let down = get(&sandbox, "/workspace/new/dir/f.bin");
    assert_eq!((down.status, down.header("content-length")), (200, Some("200000")));
    assert!(down.body == bytes);
    assert_eq!(down.header("x-content-type-options"), Some("nosniff"));
    let sum = sandbox.sh("sha256sum < /workspace/new/dir/f.bin; stat -c %a /workspace/new/dir/f.bin").ok();
    assert!(sum.text().ends_with("644"));
    // The write replaces the existing file, and keeps its permissions.
    sandbox.sh("chmod 700 /workspace/new/dir/f.bin").ok();
    let answer = file(&sandbox, "PUT", "/workspace/new/dir/f.bin").body("short").send(sandbox.address);
    assert_eq!(answer.expect(200)["mode"], "0700");
    assert_eq!(get(&sandbox, "/workspace/new/dir/f.bin").body, b"short");
    put(&sandbox, "/workspace/empty", b"");
    assert_eq!(get(&sandbox, "/workspace/empty").body, b"");
    let moded = sandbox.request("PUT", "/files?path=/workspace/x&mode=4755").body("#!").send(sandbox.address);
    assert_eq!(moded.expect(201)["mode"], "4755");
    file(&sandbox, "DELETE", "/workspace/x").send(sandbox.address).expect(204);
    get(&sandbox, "/workspace/x").expect_refusal(404, "file_not_found");
}

#[test]
fn ranges_and_conditions_are_those_of_http() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let info = put(&sandbox, "/workspace/f", b"0123456789");
    let tag = info["etag"].as_str().expect("a tag").to_owned();
    let range =
        |text: &str| file(&sandbox, "GET", "/workspace/f").header("range", text).send(sandbox.address);
    let part = range("bytes=2-4");
    assert_eq!((part.status, part.header("content-range")), (206, Some("bytes 2-4/10")));
    assert_eq!(part.body, b"234");
    assert_eq!(range("bytes=-3").body, b"789");
    assert_eq!(range("bytes=8-99999999999999999999999").body, b"89");
    for all in ["bytes=5-2", "lines=1-2", "bytes=1-2,4-5", "nonsense"] {
        let answer = range(all);
        assert_eq!((answer.status, answer.body.len()), (200, 10), "{all}");
    }
    for none in ["bytes=10-", "bytes=18446744073709551615-", "bytes=-0", "bytes=99999999999999999999999999-"]
    {
        let answer = range(none);
        answer.expect_refusal(416, "range_not_satisfiable");
        assert_eq!(answer.header("content-range"), Some("bytes */10"), "{none}");
    }
    let with = |name: &str, value: &str| {
        file(&sandbox, "GET", "/workspace/f").header(name, value).send(sandbox.address)
    };
    let fresh = with("if-none-match", &tag);
    assert_eq!((fresh.status, fresh.body.len(), fresh.header("etag")), (304, 0, Some(tag.as_str())));
    assert_eq!(with("if-none-match", "\"other\"").status, 200);
    assert_eq!(with("if-match", &tag).status, 200);
    with("if-match", "\"other\"").expect_refusal(412, "condition_failed");
    let modified = with("if-match", &tag).header("last-modified").expect("a date").to_owned();
    assert_eq!(with("if-modified-since", &modified).status, 304);
    let whole = file(&sandbox, "GET", "/workspace/f")
        .header("range", "bytes=1-2")
        .header("if-range", "\"other\"")
        .send(sandbox.address);
    assert_eq!((whole.status, whole.body.len()), (200, 10));
    // Conditional writes: of two clients that read the same, only one can win.
    let write = |name: &str, value: &str| {
        file(&sandbox, "PUT", "/workspace/f").header(name, value).body("new").send(sandbox.address)
    };
    write("if-none-match", "*").expect_refusal(412, "condition_failed");
    assert_eq!(write("if-match", &tag).status, 200);
    write("if-match", &tag).expect_refusal(412, "condition_failed");
    let remove = file(&sandbox, "DELETE", "/workspace/f").header("if-match", &tag).send(sandbox.address);
    remove.expect_refusal(412, "condition_failed");
    let head =
        file(&sandbox, "HEAD", "/workspace/f").open(sandbox.address).expect("an answer").without_body();
    assert_eq!((head.status, head.header("content-length")), (200, Some("3")));
    let head = file(&sandbox, "HEAD", "/nowhere").open(sandbox.address).expect("an answer").without_body();
    assert_eq!(head.status, 404);
}

#[test]
fn names_may_be_any_bytes() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let name: Vec<u8> = (1..=255).filter(|byte| *byte != b'/').take(200).chain([0xff, 0xfe]).collect();
    let path = [b"/workspace/", name.as_slice()].concat();
    let target = format!("/files?path={}", escaped(&path));
    sandbox.request("PUT", &target).body("odd").send(sandbox.address).expect(201);
    assert_eq!(sandbox.request("GET", &target).send(sandbox.address).body, b"odd");
    let listed = ask(&sandbox, "GET", "list?path=/workspace").expect(200);
    let entry = &listed["entries"][0];
    assert_eq!(entry["name_base64"], BASE64_STANDARD.encode(&name), "{entry}");
    assert!(entry["name"].as_str().is_some_and(|text| text.contains('\u{fffd}')));
    assert_eq!(entry["path_base64"], BASE64_STANDARD.encode(&path));
    let missing = sandbox.request("GET", "/files?path=/a%FF").send(sandbox.address);
    let refusal = missing.expect_refusal(404, "file_not_found");
    assert_eq!(refusal["details"]["path_base64"], BASE64_STANDARD.encode(b"/a\xff"));
}

#[test]
fn what_cannot_be_read_or_written_is_told_apart_and_never_hangs() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    sandbox
        .sh("cd /workspace; mkfifo fifo; mkdir dir; touch dir/x; ln -s loop loop; ln -s fifo link; echo x > file;
            python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"socket\")'")
        .ok();
    for (path, status, code) in [
        ("/workspace/fifo", 409, "not_a_regular_file"),
        ("/workspace/link", 409, "not_a_regular_file"),
        ("/workspace/socket", 409, "not_a_regular_file"),
        ("/dev/zero", 409, "not_a_regular_file"),
        ("/dev/tty", 409, "not_a_regular_file"),
        ("/workspace/dir", 409, "is_directory"),
        ("/workspace/loop", 409, "too_many_links"),
        ("/workspace/file/x", 409, "not_a_directory"),
        ("/", 409, "is_directory"),
        ("relative", 400, "invalid_path"),
        ("", 400, "invalid_path"),
        ("/nul\0", 400, "invalid_path"),
    ] {
        let read = get(&sandbox, path);
        let body = read.expect_refusal(status, code);
        assert!(body["details"]["path"] == path || body["details"]["field"] == "path", "{path}: {body}");
        let written = file(&sandbox, "PUT", path).body("x").send(sandbox.address);
        written.expect_refusal(status, code);
    }
    get(&sandbox, &format!("/{}", "n".repeat(300))).expect_refusal(400, "invalid_path");
    get(&sandbox, &format!("/{}", "n/".repeat(3000))).expect_refusal(400, "invalid_path");
    for (query, code) in [
        ("/files", "invalid_request"),
        ("/files?path=/a&path=/b", "invalid_query"),
        ("/files?path=/a&what=1", "invalid_query"),
        ("/files?path=%zz", "invalid_query"),
    ] {
        sandbox.request("GET", query).send(sandbox.address).expect_refusal(400, code);
    }
    let nobody = sandbox.request("GET", "/files?path=/etc/passwd&user=no-such-user").send(sandbox.address);
    nobody.expect_refusal(400, "unknown_user");
    sandbox.sh("echo secret > /workspace/own; chmod 600 /workspace/own").ok();
    let denied = sandbox.request("GET", "/files?path=/workspace/own&user=nobody").send(sandbox.address);
    let body = denied.expect_refusal(403, "permission_denied");
    assert_eq!(body["details"]["path"], "/workspace/own");
    file(&sandbox, "DELETE", "/workspace/dir")
        .send(sandbox.address)
        .expect_refusal(409, "directory_not_empty");
    file(&sandbox, "PUT", "/proc/x").body("x").send(sandbox.address).expect_refusal(403, "permission_denied");
    assert_eq!(operations(&sandbox), 0, "nothing is left running");
}

#[test]
fn links_lead_nowhere_that_the_guest_could_not_go() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let secret = daemon.home.join("secret-of-the-host");
    std::fs::write(&secret, "the host's own").expect("the test's own directory takes files");
    let secret = secret.to_string_lossy().into_owned();
    let key = daemon.data_dir.join("api.key").to_string_lossy().into_owned();
    sandbox
        .sh(&format!(
            "cd /workspace; ln -s {secret} last; ln -s {key} key; ln -s / root; ln -s /proc/1/root init;
             ln -s /proc/1/fd fds; ln -s ../../../../../../../../.. up"
        ))
        .ok();
    for path in [
        "/workspace/last".to_owned(),
        "/workspace/key".to_owned(),
        format!("/workspace/root{secret}"),
        format!("/workspace/up{secret}"),
        format!("/workspace/init{secret}"),
        format!("/workspace/../../../../../../..{secret}"),
        "/workspace/fds/4".to_owned(),
        "/workspace/fds/3".to_owned(),
        "/proc/self/exe".to_owned(),
        "/proc/self/fd/0".to_owned(),
        "/proc/1/exe".to_owned(),
        "/proc/1/mem".to_owned(),
        "/proc/self/mem".to_owned(),
    ] {
        let answer = file(&sandbox, "GET", &path).try_send(sandbox.address);
        // A response that breaks off is a rejection too: nothing of the file came.
        assert!(answer.as_ref().map_or(true, |answer| answer.status >= 400), "{path} gave {answer:?}");
        let packed = ask(&sandbox, "GET", &format!("tar?path={}", escaped(path.as_bytes())));
        assert!(packed.status >= 400, "{path} gave {}", packed.describe());
    }
    // A write through a link that points outside lands inside.
    put(&sandbox, "/workspace/last", b"inside");
    assert_eq!(std::fs::read_to_string(&secret).expect("it is there"), "the host's own");
    assert_eq!(sandbox.sh(&format!("cat {secret}")).ok().text(), "inside");
    // Two sandboxes see nothing of each other.
    let other = daemon.sandbox();
    get(&other, &secret).expect_refusal(404, "file_not_found");
}

#[test]
fn a_link_swapped_under_a_write_changes_nothing_outside_of_the_sandbox() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let swapper = sandbox.spawn(json!({"argv": ["python3", "-c", "
import os, shutil
os.makedirs('/tmp/other', exist_ok=True)
print('on', flush=True)
while True:
    try:
        os.symlink('/tmp/other', '/workspace/l'); os.rename('/workspace/l', '/workspace/d')
        os.unlink('/workspace/d'); os.mkdir('/workspace/d'); shutil.rmtree('/workspace/d')
    except OSError:
        # A write came in between.
        for name in ('l', 'd'):
            path = '/workspace/' + name
            if os.path.islink(path): os.unlink(path)
            else: shutil.rmtree(path, ignore_errors=True)
"]}));
    sandbox.wrote(&swapper, 3);
    for round in 0..60 {
        let answer = file(&sandbox, "PUT", "/workspace/d/f").body(format!("{round}")).send(sandbox.address);
        // Done or rejected, depending on what the kernel saw at that instant; never an internal error.
        assert!(matches!(answer.status, 200 | 201 | 400..=499), "{}", answer.describe());
    }
    sandbox.kill(&swapper).expect(204);
    assert!(std::fs::metadata("/tmp/other/f").is_err(), "the host has nothing of it");
    let left = sandbox.sh("find /workspace /tmp/other -name '.shoal-*' | wc -l").ok();
    assert_eq!(left.text(), "0");
}

#[test]
fn a_large_file_moves_both_ways_in_constant_memory() {
    const SIZE: usize = 256 << 20;
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let block: Vec<u8> = (0..1 << 20).map(|at: u32| (at % 253) as u8).collect();
    let before = (resident_kib(daemon.pid()), resident_kib(sandbox.init()));
    let target = sandbox.path("/files?path=/workspace/big");
    let mut up = begin(&sandbox, "PUT", &target, &format!("content-length: {SIZE}\r\n"));
    let began = std::time::Instant::now();
    for _ in 0..SIZE / block.len() {
        up.write_all(&block).expect("the daemon takes it");
    }
    let mut answer = String::new();
    up.read_to_string(&mut answer).expect("it answers");
    assert!(answer.starts_with("HTTP/1.1 201"), "{answer}");
    let up_seconds = began.elapsed().as_secs_f64();
    assert_eq!(stat(&sandbox, "/workspace/big")["size"], SIZE);
    let began = std::time::Instant::now();
    let mut down = file(&sandbox, "GET", "/workspace/big").open(sandbox.address).expect("an answer");
    let mut piece = vec![0; 1 << 20];
    for _ in 0..SIZE / block.len() {
        down.body().read_exact(&mut piece).expect("it comes");
        assert!(piece == block, "the download must equal the upload");
    }
    let down_seconds = began.elapsed().as_secs_f64();
    let after = (resident_kib(daemon.pid()), resident_kib(sandbox.init()));
    println!(
        "256 MiB up {:.0} MiB/s, down {:.0} MiB/s; the daemon grew by {} KiB, init by {} KiB",
        256.0 / up_seconds,
        256.0 / down_seconds,
        after.0 - before.0,
        after.1 - before.1
    );
    assert!(after.0 - before.0 < 32 << 10, "the daemon grew from {} to {} KiB", before.0, after.0);
    assert!(after.1 - before.1 < 8 << 10, "init grew from {} to {} KiB", before.1, after.1);
}

#[test]
fn a_caller_that_vanishes_in_an_upload_leaves_nothing() {
    let mut daemon = Daemon::start();
    let mut sandbox = daemon.sandbox();
    put(&sandbox, "/workspace/d/f", b"before");
    let target = sandbox.path("/files?path=/workspace/d/f");
    for headers in ["content-length: 100000000\r\n", "transfer-encoding: chunked\r\n"] {
        let mut up = begin(&sandbox, "PUT", &target, headers);
        let chunk = if headers.starts_with("transfer") { "100000\r\n" } else { "" };
        up.write_all(chunk.as_bytes()).expect("the daemon takes it");
        up.write_all(&vec![b'x'; 600_000]).expect("the daemon takes it");
        until_true("the operation runs", || operations(&sandbox) == 1);
        drop(up);
        until_true("the operation is over", || operations(&sandbox) == 0);
        assert_eq!(get(&sandbox, "/workspace/d/f").body, b"before");
        let listed = ask(&sandbox, "GET", "list?path=/workspace/d").expect(200);
        assert_eq!(listed["entries"].as_array().expect("entries").len(), 1, "{listed}");
    }
    // The daemon itself dies: the next one ends what it finds.
    let mut up = begin(&sandbox, "PUT", &target, "content-length: 100000000\r\n");
    up.write_all(&vec![b'x'; 600_000]).expect("the daemon takes it");
    until_true("the operation runs", || operations(&sandbox) == 1);
    daemon.crash();
    sandbox.address = daemon.address;
    until_true("the operation is over", || operations(&sandbox) == 0);
    assert_eq!(get(&sandbox, "/workspace/d/f").body, b"before");
    assert_eq!(sandbox.sh("ls -A /workspace/d | wc -l").ok().text(), "1");
}

#[test]
fn a_caller_that_vanishes_in_a_download_or_watch_ends_it() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    sandbox.sh("truncate -s 4G /workspace/big").ok();
    let mut down = file(&sandbox, "GET", "/workspace/big").open(sandbox.address).expect("an answer");
    let mut some = vec![0; 1 << 20];
    down.body().read_exact(&mut some).expect("it comes");
    until_true("the operation runs", || operations(&sandbox) == 1);
    drop(down);
    until_true("the operation is over", || operations(&sandbox) == 0);
    let mut packed =
        sandbox.request("GET", "/files/tar?path=/workspace").open(sandbox.address).expect("an answer");
    packed.chunk().expect("it comes").expect("it is not over");
    drop(packed);
    until_true("the operation is over", || operations(&sandbox) == 0);
    let mut watch =
        sandbox.request("GET", "/files/watch?path=/workspace").open(sandbox.address).expect("an answer");
    watch.chunk().expect("it comes").expect("it is not over");
    assert_eq!(operations(&sandbox), 1);
    drop(watch);
    until_true("the operation is over", || operations(&sandbox) == 0);
}

#[test]
fn a_full_disk_in_the_middle_is_said_and_leaves_what_was_there() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"memory": "128Mi"}));
    put(&sandbox, "/dev/shm/f", b"before");
    // /dev/shm is memory, so the upload ends one way or the other.
    let target = sandbox.path("/files?path=/dev/shm/f");
    let size = 512 << 20;
    let mut up = begin(&sandbox, "PUT", &target, &format!("content-length: {size}\r\n"));
    let block = vec![b'x'; 1 << 20];
    for _ in 0..size / block.len() {
        if up.write_all(&block).is_err() {
            break; // It has responded, and accepts no more.
        }
    }
    let mut answer = Vec::new();
    let _ = up.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 507"), "{answer}");
    assert_eq!(get(&sandbox, "/dev/shm/f").body, b"before");
    until_true("the operation is over", || operations(&sandbox) == 0);
    assert_eq!(sandbox.sh("ls -A /dev/shm | wc -l").ok().text(), "1");
    assert_eq!(sandbox.get()["state"], "running");
}

#[test]
fn concurrent_writers_leave_one_whole_file() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4u8)
            .map(|writer| {
                let sandbox = &sandbox;
                scope.spawn(move || {
                    for _ in 0..10 {
                        put(sandbox, "/workspace/shared", &vec![b'a' + writer; 300_000]);
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let answer = get(&sandbox, "/workspace/shared");
                if answer.status == 200 {
                    assert_eq!(answer.body.len(), 300_000);
                    assert!(
                        answer.body.iter().all(|byte| *byte == answer.body[0]),
                        "one writer's bytes alone"
                    );
                }
            }
        });
        for writer in writers {
            writer.join().expect("no writer fails");
        }
        over.store(true, Ordering::Relaxed);
    });
    assert_eq!(sandbox.sh("ls -A /workspace | wc -l").ok().text(), "1");
    // Only one of many may create it.
    let created = std::thread::scope(|scope| {
        let all: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    let put = file(&sandbox, "PUT", "/workspace/once").header("if-none-match", "*");
                    put.body("x").send(sandbox.address).status
                })
            })
            .collect();
        all.into_iter().map(|one| one.join().expect("it answers")).filter(|status| *status == 201).count()
    });
    assert_eq!(created, 1);
}

#[test]
fn a_file_that_changes_while_it_is_read_is_whole_or_cut_off() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let size = 64 << 20;
    for (name, change) in [("grows", "truncate -s 200M"), ("shrinks", "truncate -s 1000")] {
        sandbox.sh(&format!("head -c {size} /dev/zero > /workspace/{name}")).ok();
        let mut down =
            file(&sandbox, "GET", &format!("/workspace/{name}")).open(sandbox.address).expect("an answer");
        assert_eq!(down.header("content-length"), Some(size.to_string().as_str()));
        let mut some = vec![0; 1 << 20];
        down.body().read_exact(&mut some).expect("it comes");
        sandbox.sh(&format!("{change} /workspace/{name}")).ok();
        let mut rest = Vec::new();
        let read = down.body().read_to_end(&mut rest);
        let came = rest.len() + some.len();
        match name {
            "grows" => assert_eq!((read.is_ok(), came), (true, size)),
            _ => assert!(came < size, "fewer bytes than announced, so that the caller notices: {came}"),
        }
    }
    until_true("the operations are over", || operations(&sandbox) == 0);
}

#[track_caller]
fn edit(sandbox: &Sandbox, path: &str, wish: &Value) -> Response {
    let target = format!("/files/edit?path={}", escaped(path.as_bytes()));
    sandbox.request("POST", &target).json(wish).send(sandbox.address)
}

#[test]
fn text_is_replaced_in_a_file_and_what_cannot_be_is_told_apart() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    put(&sandbox, "/workspace/f", "ünö zwei zwei\r\nend".as_bytes());
    sandbox.sh("chmod 640 f; chown 12:34 f; ln -s f link; mkdir d; printf 'a\\377' > binary").ok();
    sandbox.sh("echo one > first; ln first second; mkfifo fifo").ok();
    let answer = edit(&sandbox, "/workspace/link", &json!({"old": "ünö", "new": "eins"}));
    let done = answer.expect(200);
    assert_eq!((&done["replaced"], &done["size"], &done["mode"]), (&json!(1), &json!(19), &json!("0640")));
    assert_eq!((&done["uid"], &done["gid"]), (&json!(12), &json!(34)));
    assert_eq!(answer.header("etag"), done["etag"].as_str());
    assert_eq!(stat(&sandbox, "/workspace/f")["etag"], done["etag"]);

    let several = edit(&sandbox, "/workspace/f", &json!({"old": "zwei", "new": "2"}));
    assert_eq!(several.expect_refusal(409, "several_matches")["details"]["matches"], 2);
    let all = edit(&sandbox, "/workspace/f", &json!({"old": "zwei", "new": "2", "all": true}));
    assert_eq!(all.expect(200)["replaced"], 2);
    let ends = json!({"old": "2\nend", "new": "3\nEnd"});
    edit(&sandbox, "/workspace/f", &ends).expect_refusal(409, "no_match");
    let adapted = json!({"old": "2\nend", "new": "3\nEnd", "adapt_line_ends": true});
    edit(&sandbox, "/workspace/f", &adapted).expect(200);
    assert_eq!(get(&sandbox, "/workspace/f").body, b"eins 2 3\r\nEnd");

    edit(&sandbox, "/workspace/second", &json!({"old": "one", "new": "two"})).expect(200);
    assert_eq!(sandbox.sh("cat first; stat -c %h second").ok().text(), "two\n2", "both names are left");

    let plain = json!({"old": "a", "new": "b"});
    for (path, status, code) in [
        ("/workspace/none", 404, "file_not_found"),
        ("/workspace/d", 409, "is_directory"),
        ("/workspace/binary", 409, "not_text"),
        ("/workspace/fifo", 409, "not_a_regular_file"),
        ("/workspace/f/x", 409, "not_a_directory"),
        ("relative", 400, "invalid_path"),
    ] {
        edit(&sandbox, path, &plain).expect_refusal(status, code);
    }
    for wrong in [
        json!({"old": "", "new": "b"}),
        json!({"old": "a"}),
        json!({"old": "a", "new": "b", "every": true}),
        json!({"old": "a".repeat((1 << 20) + 1), "new": "b"}),
    ] {
        edit(&sandbox, "/workspace/f", &wrong).expect_refusal(400, "invalid_request");
    }
    sandbox.sh("truncate -s 17M large; printf a%.0s $(seq 20) > grows").ok();
    edit(&sandbox, "/workspace/large", &plain).expect_refusal(413, "file_too_large");
    let wide = json!({"old": "a", "new": "b".repeat(1 << 20), "all": true});
    edit(&sandbox, "/workspace/grows", &wide).expect_refusal(413, "file_too_large");
    assert_eq!(sandbox.sh("ls -A | wc -l").ok().text(), "9", "nothing is left beside them");

    let target = "/files/edit?path=/workspace/first";
    let old =
        sandbox.request("POST", target).header("if-match", "\"x\"").json(&json!({"old": "two", "new": "3"}));
    old.send(sandbox.address).expect_refusal(412, "condition_failed");
    let nobody =
        sandbox.request("POST", &format!("{target}&user=nobody")).json(&json!({"old": "two", "new": "3"}));
    nobody.send(sandbox.address).expect_refusal(403, "permission_denied");
}

#[test]
fn edits_of_one_file_at_the_same_time_are_all_done() {
    const EDITS: usize = 40;
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let text: String = (0..EDITS).map(|number| format!("<{number}>\n")).collect();
    put(&sandbox, "/workspace/f", text.as_bytes());
    std::thread::scope(|threads| {
        for number in 0..EDITS {
            let sandbox = &sandbox;
            threads.spawn(move || {
                let wish = json!({"old": format!("<{number}>"), "new": format!("[{number}]")});
                edit(sandbox, "/workspace/f", &wish).expect(200);
            });
        }
    });
    let expected: String = (0..EDITS).map(|number| format!("[{number}]\n")).collect();
    assert_eq!(String::from_utf8(get(&sandbox, "/workspace/f").body).expect("text"), expected);
}

#[test]
fn directories_are_listed_made_moved_copied_and_removed() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    ask(&sandbox, "POST", "mkdir?path=/workspace/a/b&mode=0700").expect(204);
    ask(&sandbox, "POST", "mkdir?path=/workspace/a/b&parents=false").expect_refusal(409, "already_exists");
    for number in 0..25 {
        put(&sandbox, &format!("/workspace/a/{number:02}"), b"x");
    }
    let (mut names, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = ask(&sandbox, "GET", &format!("list?path=/workspace/a&limit=10{cursor}")).expect(200);
        let entries = page["entries"].as_array().expect("entries").clone();
        names.extend(entries.iter().map(|entry| entry["name"].as_str().expect("a name").to_owned()));
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    assert_eq!(names.len(), 26);
    assert!(names.is_sorted());
    ask(&sandbox, "GET", "list?path=/workspace/a&limit=0").expect_refusal(400, "invalid_request");
    ask(&sandbox, "GET", "list?path=/workspace/a/00").expect_refusal(409, "not_a_directory");
    ask(&sandbox, "POST", "move?from=/workspace/a/00&to=/workspace/a/01")
        .expect_refusal(409, "already_exists");
    ask(&sandbox, "POST", "move?from=/workspace/a/00&to=/workspace/a/01&overwrite=true").expect(204);
    ask(&sandbox, "POST", "move?from=/workspace/a&to=/workspace/a/b/c").expect_refusal(409, "into_itself");
    // The image's files are on another file system than the workspace.
    ask(&sandbox, "POST", "copy?from=/usr/bin/env&to=/workspace/env").expect(200);
    ask(&sandbox, "POST", "move?from=/workspace/env&to=/usr/local/env").expect(204);
    sandbox.sh("/usr/local/env true && test ! -e /workspace/env").ok();
    let made = ask(&sandbox, "POST", "copy?from=/workspace/a&to=/workspace/copy&recursive=true").expect(200);
    assert_eq!((&made["entries"], &made["bytes"]), (&json!(26), &json!(24)));
    ask(&sandbox, "POST", "copy?from=/workspace/a&to=/workspace/a2").expect_refusal(409, "is_directory");
    sandbox.sh("cd /workspace/copy && for i in $(seq 300); do mkdir d && cd d; done; ln -s / here").ok();
    sandbox.request("DELETE", "/files?path=/workspace/copy&recursive=true").send(sandbox.address).expect(204);
    ask(&sandbox, "GET", "stat?path=/workspace/copy").expect_refusal(404, "file_not_found");
    // Files of the image can be removed too, even from its read-only layers.
    sandbox.request("DELETE", "/files?path=/usr/share/doc&recursive=true").send(sandbox.address).expect(204);
    sandbox.sh("test ! -e /usr/share/doc && test -e /usr/bin/env").ok();
    assert!(std::path::Path::new("/usr/share/doc").exists(), "the host's own is as it was");
}

#[test]
fn files_and_lines_are_found_within_limits() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    sandbox
        .sh("cd /workspace; mkdir -p src/deep .git; echo 'fn main() {}' > src/main.rs; echo 'fn needle() {}' > src/deep/a.rs;
            echo needle > .git/x.rs; echo Needle > README.md; mkfifo src/fifo; ln -s / src/root")
        .ok();
    let names = |answer: &Value, list: &str| -> Vec<String> {
        let all = answer[list].as_array().expect("a list");
        all.iter().map(|entry| entry["path"].as_str().expect("a path").to_owned()).collect()
    };
    let found = ask(&sandbox, "GET", "glob?path=/workspace&pattern=**/*.rs").expect(200);
    assert_eq!(names(&found, "files"), ["/workspace/src/deep/a.rs", "/workspace/src/main.rs"]);
    assert_eq!(found["cut"], Value::Null);
    let found = ask(&sandbox, "GET", "glob?path=/workspace&pattern=**/*.rs&hidden=true&limit=1").expect(200);
    assert_eq!((names(&found, "files").len(), &found["cut"]), (1, &json!("matches")));
    ask(&sandbox, "GET", "glob?path=/workspace&pattern=%5B").expect_refusal(400, "invalid_pattern");
    let found = ask(&sandbox, "GET", "grep?path=/workspace&pattern=needle").expect(200);
    let only = &found["matches"][0];
    assert_eq!(names(&found, "matches"), ["/workspace/src/deep/a.rs"]);
    assert_eq!(
        (&only["line"], &only["column"], &only["text"]),
        (&json!(1), &json!(3), &json!("fn needle() {}"))
    );
    let found =
        ask(&sandbox, "GET", "grep?path=/workspace&pattern=needle&ignore_case=true&include=*.md").expect(200);
    assert_eq!(names(&found, "matches"), ["/workspace/README.md"]);
    sandbox.sh("printf 'needle\\r\\n' > crlf").ok();
    let with = "grep?path=/workspace&pattern=needle&hidden=true&carriage_returns=true";
    let found =
        ask(&sandbox, "GET", &format!("{with}&exclude_directory=.git&exclude_directory=d*")).expect(200);
    assert_eq!(names(&found, "matches"), ["/workspace/crlf"]);
    assert_eq!((&found["matches"][0]["text"], &found["mixed"]), (&json!("needle\r"), &json!(0)));
    sandbox.sh("rm crlf").ok();
    let found = ask(&sandbox, "GET", "grep?path=/workspace&pattern=%5Efn+%5Cw%2B&regex=true").expect(200);
    assert_eq!(names(&found, "matches").len(), 2);
    ask(&sandbox, "GET", "grep?path=/workspace&pattern=(&regex=true").expect_refusal(400, "invalid_pattern");
    ask(&sandbox, "GET", "grep?path=/nowhere&pattern=x").expect_refusal(404, "file_not_found");
    // The whole machine except /proc and /sys, in bounded time; and a pattern that is meant to take for ever.
    let began = std::time::Instant::now();
    let found =
        ask(&sandbox, "GET", "grep?path=/&pattern=(a*)*%24b&regex=true&timeout_seconds=2").expect(200);
    assert!(found["entries_looked_at"].as_u64().is_some_and(|count| count > 0), "{found}");
    assert!(began.elapsed() < Duration::from_secs(30), "it took {:?}", began.elapsed());
    sandbox.sh("python3 -c \"import os\nfor i in range(3000): open(f'/workspace/m{i}', 'w').write('many\\n' * 5)\"").ok();
    let found = ask(&sandbox, "GET", "grep?path=/workspace&pattern=many&limit=10000").expect(200);
    assert_eq!((names(&found, "matches").len(), &found["cut"]), (10_000, &json!("matches")));
}

#[test]
fn a_watch_tells_what_happens() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    ask(&sandbox, "GET", "watch?path=/nowhere").expect_refusal(404, "file_not_found");
    sandbox.sh("mkdir /workspace/w").ok();
    let events =
        sandbox.request("GET", "/files/watch?path=/workspace/w&recursive=true").open(sandbox.address);
    let events = events.expect("an answer");
    assert_eq!((events.status, events.header("content-type")), (200, Some("text/event-stream")));
    sandbox.sh("cd /workspace/w; echo x > f; mkdir d; mv f g; rm g; cd ..; rm -r w").ok();
    let mut seen = Vec::new();
    server_events(events, |event| seen.push(event.data)).expect("it ends when the watched directory is gone");
    assert_eq!(seen.first().map(|event| &event["type"]), Some(&json!("ready")));
    assert_eq!(seen.last().map(|event| &event["type"]), Some(&json!("gone")));
    for (change, path) in [
        ("created", "/workspace/w/f"),
        ("written", "/workspace/w/f"),
        ("created", "/workspace/w/d"),
        ("moved_to", "/workspace/w/g"),
        ("removed", "/workspace/w/g"),
    ] {
        assert!(
            seen.iter().any(|event| event["change"] == change && event["path"] == path),
            "{change} {path} in {seen:?}"
        );
    }
}

/// A tar header by hand.
fn header(kind: u8, name: &str, link: &str, mode: u32, size: u64) -> Vec<u8> {
    let mut block = vec![0u8; 512];
    let mut put = |at: usize, text: &str| block[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(0, name);
    put(100, &format!("{mode:07o}\0"));
    put(124, &format!("{size:011o}\0"));
    put(136, "00000000000\0");
    put(148, "        ");
    put(157, link);
    put(257, "ustar\x0000");
    block[156] = kind;
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

fn entry(kind: u8, name: &str, link: &str, mode: u32, contents: &[u8]) -> Vec<u8> {
    let mut all = header(kind, name, link, mode, contents.len() as u64);
    all.extend(contents);
    all.resize(all.len().next_multiple_of(512), 0);
    all
}

fn archive(entries: &[Vec<u8>]) -> Vec<u8> {
    [entries.concat(), vec![0; 1024]].concat()
}

#[test]
fn directories_travel_as_tar_streams() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    sandbox
        .sh("mkdir -p /workspace/d/e; echo one > /workspace/d/e/f; ln -s e/f /workspace/d/l; mkfifo /workspace/d/fifo;
            head -c 3000000 /dev/urandom > /workspace/d/big; touch /workspace/d/$(printf '\\377')")
        .ok();
    let down = ask(&sandbox, "GET", "tar?path=/workspace/d");
    assert_eq!((down.status, down.header("content-type")), (200, Some("application/x-tar")));
    let up =
        sandbox.request("PUT", "/files/tar?path=/workspace/new/place").body(down.body).send(sandbox.address);
    let made = up.expect(200);
    assert_eq!((&made["entries"], &made["skipped"]), (&json!(5), &json!(0)));
    sandbox
        .sh("cd /workspace; cmp d/big new/place/big && cmp d/e/f new/place/e/f && test -L new/place/l && test -e new/place/$(printf '\\377')")
        .ok();
    ask(&sandbox, "GET", "tar?path=/nowhere").expect_refusal(404, "file_not_found");
    // tar inside reads the download, and its output can be uploaded.
    let one = ask(&sandbox, "GET", "tar?path=/workspace/d/e/f");
    put(&sandbox, "/workspace/one.tar", &one.body);
    sandbox.sh("cd /tmp && tar xf /workspace/one.tar && cmp f /workspace/d/e/f").ok();
    sandbox.sh("tar cf /workspace/all.tar --format=pax -C /workspace/d e l").ok();
    let all = get(&sandbox, "/workspace/all.tar").body;
    sandbox.request("PUT", "/files/tar?path=/workspace/pax").body(all).send(sandbox.address).expect(200);
    sandbox.sh("cmp /workspace/pax/e/f /workspace/d/e/f").ok();
}

#[test]
fn hostile_archives_do_no_harm() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    sandbox.sh("mkdir /workspace/top; echo kept > /workspace/kept; ln -s /workspace /workspace/top/old").ok();
    let unpack = |archive: Vec<u8>| {
        sandbox.request("PUT", "/files/tar?path=/workspace/top").body(archive).send(sandbox.address)
    };
    for (what, stream) in [
        ("absolute", archive(&[entry(b'0', "/workspace/kept", "", 0o644, b"evil")])),
        ("dots", archive(&[entry(b'0', "../kept", "", 0o644, b"evil")])),
        ("dots inside", archive(&[entry(b'0', "a/../../kept", "", 0o644, b"evil")])),
        (
            "link, then write",
            archive(&[
                entry(b'2', "out", "/workspace", 0o777, b""),
                entry(b'0', "out/kept", "", 0o644, b"evil"),
            ]),
        ),
        ("a link that was there", archive(&[entry(b'0', "old/kept", "", 0o644, b"evil")])),
        (
            "hard link out",
            archive(&[entry(b'1', "h", "../kept", 0o644, b""), entry(b'0', "h", "", 0o644, b"evil")]),
        ),
        ("sparse", archive(&[entry(b'S', "s", "", 0o644, b"")])),
        ("no archive", vec![b'x'; 4096]),
        ("cut off", header(b'0', "cut", "", 0o644, 1 << 30)),
        ("a long name", [header(b'L', "n", "", 0o644, 1 << 33), vec![0; 4096]].concat()),
    ] {
        let answer = unpack(stream);
        let body = answer.expect_refusal(400, "invalid_archive");
        assert!(body["message"].as_str().is_some_and(|text| text.len() < 1000), "{what}: {body}");
        assert_eq!(get(&sandbox, "/workspace/kept").body, b"kept\n", "{what}");
    }
    let made = unpack(archive(&[
        entry(b'0', "twice", "", 0o644, b"one"),
        entry(b'0', "twice", "", 0o6755, b"two"),
        entry(b'3', "null", "", 0o666, b""),
        entry(b'6', "fifo", "", 0o666, b""),
    ]));
    assert_eq!(made.expect(200), json!({"entries": 2, "bytes": 6, "skipped": 2}));
    assert_eq!(
        sandbox.sh("cat /workspace/top/twice; stat -c ' %a' /workspace/top/twice").ok().text(),
        "two 755"
    );
    sandbox.sh("test ! -e /workspace/top/null && test ! -e /workspace/top/fifo").ok();
    assert_eq!(operations(&sandbox), 0);
}

#[test]
fn many_operations_at_once_wait_for_their_turn_and_harm_nobody() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    put(&sandbox, "/workspace/f", b"x");
    sandbox.sh("truncate -s 1G /workspace/big").ok();
    // Readers that read nothing hold a place and a window, and nothing else.
    let slow: Vec<_> = (0..32)
        .map(|_| file(&sandbox, "GET", "/workspace/big").open(sandbox.address).expect("an answer"))
        .collect();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..25 {
                    assert_eq!(get(&sandbox, "/workspace/f").body, b"x");
                }
            });
        }
    });
    sandbox.sh("true").ok();
    drop(slow);
    until_true("the operations are over", || operations(&sandbox) == 0);
}

#[test]
fn another_owner_finds_no_files() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    put(&sandbox, "/workspace/f", b"x");
    let other = daemon.post("/v1/keys", &json!({"owner": "other"})).expect(201);
    let stranger = Sandbox { key: other["secret"].as_str().expect("a secret").into(), ..sandbox.clone() };
    for (method, more) in [
        ("GET", "/files?path=/workspace/f"),
        ("PUT", "/files?path=/workspace/f"),
        ("DELETE", "/files?path=/workspace/f"),
        ("GET", "/files/stat?path=/workspace/f"),
        ("GET", "/files/list?path=/workspace"),
        ("POST", "/files/mkdir?path=/workspace/x"),
        ("POST", "/files/move?from=/workspace/f&to=/workspace/g"),
        ("POST", "/files/copy?from=/workspace/f&to=/workspace/g"),
        ("GET", "/files/glob?path=/workspace&pattern=*"),
        ("GET", "/files/grep?path=/workspace&pattern=x"),
        ("GET", "/files/watch?path=/workspace"),
        ("GET", "/files/tar?path=/workspace"),
        ("PUT", "/files/tar?path=/workspace"),
    ] {
        stranger.request(method, more).send(sandbox.address).expect_refusal(404, "sandbox_not_found");
    }
    assert_eq!(get(&sandbox, "/workspace/f").body, b"x");
}

#[test]
fn a_stuck_init_makes_file_requests_fail_in_time_and_no_others() {
    let daemon = Daemon::start();
    let (stuck, other) = (daemon.sandbox(), daemon.sandbox());
    put(&other, "/workspace/f", b"x");
    let init = stuck.init();
    shoal_tests::daemon::send_signal(init, rustix::process::Signal::STOP);
    let answer = get(&stuck, "/workspace/f");
    answer.expect_refusal(503, "sandbox_unresponsive");
    assert_eq!(get(&other, "/workspace/f").body, b"x");
    shoal_tests::daemon::send_signal(init, rustix::process::Signal::CONT);
    until("it answers again", || (get(&stuck, "/workspace/f").status == 404).then_some(()));
}

#[test]
fn a_deleted_sandbox_ends_its_transfers() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    sandbox.sh("truncate -s 4G /workspace/big").ok();
    let mut down = file(&sandbox, "GET", "/workspace/big").open(sandbox.address).expect("an answer");
    let mut some = vec![0; 1 << 20];
    down.body().read_exact(&mut some).expect("it comes");
    let watch =
        sandbox.request("GET", "/files/watch?path=/workspace").open(sandbox.address).expect("an answer");
    sandbox.delete();
    let mut rest = Vec::new();
    let _ = down.body().take(1 << 32).read_to_end(&mut rest);
    assert!(rest.len() < 1 << 30, "it was cut off");
    let mut last = None;
    server_events(watch, |event| last = Some(event.data)).expect("it ends");
    assert_eq!(last.expect("an event")["type"], "failed");
    get(&sandbox, "/workspace/big").expect_refusal(404, "sandbox_not_found");
}
