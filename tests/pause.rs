//! Pauses and resumes, on a real kernel: frozen processes go on where they were, dropped ones leave their files, requests resume,
//! and crashes in the middle lose nothing.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use shoal_tests::daemon::{binary, kill_hard};
use shoal_tests::wait::until_true;
use shoal_tests::{Collected, Daemon, Response, Said, Sandbox, until};

/// Prints 0, 1, 2, ... one per line and a hundred in a second, up to its argument.
const COUNT: &str = "
import sys, time
for n in range(int(sys.argv[1])):
    print(n, flush=True)
    time.sleep(0.01)
";

fn ask(sandbox: &Sandbox, verb: &str, body: Value) -> Response {
    sandbox.request("POST", &format!("/{verb}")).json(&body).send(sandbox.address)
}

#[track_caller]
fn pause(sandbox: &Sandbox, memory: &str) {
    let paused = ask(sandbox, "pause", json!({"memory": memory})).expect(200);
    assert_eq!((&paused["state"], &paused["memory"]), (&json!("paused"), &json!(memory)), "{paused}");
}

#[track_caller]
fn resume(sandbox: &Sandbox) {
    let resumed = ask(sandbox, "resume", json!({})).expect(200);
    assert_eq!((&resumed["state"], &resumed["memory"]), (&json!("running"), &Value::Null), "{resumed}");
}

fn state(sandbox: &Sandbox) -> String {
    sandbox.get()["state"].as_str().expect("a sandbox has a state").to_owned()
}

/// Processor time that a sandbox has used.
fn cpu(sandbox: &Sandbox) -> f64 {
    let stats = sandbox.request("GET", "/stats").send(sandbox.address).expect(200);
    stats["usage"]["cpu_seconds"].as_f64().expect("a sandbox with processes has used some")
}

#[track_caller]
fn is_count(collected: &Collected, to: u32) {
    let lines: String = (0..to).map(|n| format!("{n}\n")).collect();
    assert_eq!(collected.result()["exit_code"], 0);
    assert!(collected.stdout == lines.as_bytes(), "not the count: {} bytes", collected.stdout.len());
}

#[test]
fn a_frozen_program_goes_on_where_it_was_and_its_client_stays_connected() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let mut stream = sandbox.stream(json!({"argv": ["python3", "-c", COUNT, "300"]}));
    let mut all = Collected::default();
    for _ in 0..10 {
        let enough = all.stdout.len() + 20;
        while all.stdout.len() < enough {
            if let Said::Output { stream, offset, bytes } = stream.hear() {
                all.add(stream, offset, &bytes);
            }
        }
        pause(&sandbox, "keep");
        let before = cpu(&sandbox);
        // What was on its way may still come; then nothing does.
        let listed = daemon.list();
        assert_eq!(listed[0]["state"], "paused");
        assert!(
            sandbox.request("GET", "/explain").send(sandbox.address).expect(200)["sentence"]
                .as_str()
                .is_some_and(|text| text.starts_with("It is paused with its memory"))
        );
        assert_eq!(cpu(&sandbox), before, "a frozen sandbox uses no processor time");
        resume(&sandbox);
    }
    is_count(&stream.collect(all), 300);
}

#[test]
fn time_does_not_pass_for_the_timeouts_of_a_frozen_command() {
    let daemon = Daemon::start();
    let (sandbox, control) = (daemon.sandbox(), daemon.sandbox());
    let id = sandbox.spawn(json!({"script": "echo on; sleep 2; echo over", "timeout_seconds": 4}));
    sandbox.wrote(&id, 3);
    pause(&sandbox, "keep");
    // Longer than the timeout: that of another command strikes meanwhile.
    let timed_out = control.run(json!({"argv": ["sleep", "infinity"], "timeout_seconds": 5}));
    assert_eq!(timed_out.outcome(), "timed_out");
    resume(&sandbox);
    assert_eq!(sandbox.ended(&id)["result"]["exit_code"], 0);
}

#[test]
fn dropping_memory_keeps_files_and_ends_processes_ten_times_in_a_row() {
    let daemon = Daemon::start();
    daemon.sandbox().delete();
    let before = daemon.audit();
    let sandbox = daemon.sandbox_with(json!({"name": "work", "labels": {"a": "b"}, "env": {"WHO": "me"}}));
    let first = sandbox.get();
    sandbox.sh("echo tmp >/tmp/kept; echo shm >/dev/shm/lost; ln -s /tmp/kept /workspace/link; chown nobody /tmp/kept").ok();
    for round in 0..10 {
        let hanging = sandbox.spawn(json!({"argv": ["sleep", "infinity"]}));
        sandbox.running(&hanging);
        pause(&sandbox, "drop");
        assert_eq!(sandbox.processes(), [] as [i32; 0]);
        assert_eq!(sandbox.command(&hanging)["state"], "ended");
        resume(&sandbox);
        let script = "cat /tmp/kept /workspace/link; stat -c %U /tmp/kept; ls /dev/shm; echo $WHO; echo x >>/usr/lines; wc -l </usr/lines";
        let text = sandbox.sh(script).ok().text();
        assert_eq!(text, format!("tmp\ntmp\nnobody\nme\n{}", round + 1), "round {round}");
    }
    let last = sandbox.get();
    for field in ["id", "name", "labels", "env", "limits", "created_at", "image"] {
        assert_eq!(first[field], last[field], "{field}");
    }
    sandbox.delete();
    daemon.expect_nothing_beyond(&before);
}

#[test]
fn processes_get_a_signal_and_time_to_end_and_their_results_are_kept() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let script = "trap 'echo saved >/workspace/saved; exit 7' TERM; echo on; while :; do sleep 0.05; done";
    let polite = sandbox.spawn(json!({"script": script}));
    let rude = sandbox.spawn(json!({"script": "trap '' TERM; echo on; while :; do sleep 0.05; done"}));
    sandbox.wrote(&polite, 3);
    sandbox.wrote(&rude, 3);
    let began = Instant::now();
    ask(&sandbox, "pause", json!({"memory": "drop", "grace_seconds": 1})).expect(200);
    assert!(began.elapsed() >= Duration::from_secs(1), "the grace is over before the kill");
    assert_eq!(sandbox.command(&polite)["result"]["exit_code"], 7);
    assert_eq!(sandbox.command(&rude)["result"]["outcome"], "sandbox_gone");
    assert_eq!(sandbox.sh("cat /workspace/saved").ok().text(), "saved");
    for wrong in [json!({"memory": "half"}), json!({"grace_seconds": 601}), json!({"grace_seconds": -1})] {
        ask(&sandbox, "pause", wrong).expect_refusal(400, "invalid_request");
    }
}

#[test]
fn many_requests_at_once_resume_a_sandbox_and_one_that_does_not_want_to_is_refused() {
    let daemon = Daemon::start();
    for memory in ["keep", "drop"] {
        let sandbox = daemon.sandbox();
        sandbox.sh("echo here >/workspace/file").ok();
        pause(&sandbox, memory);
        let never = |method: &str, more: &str| sandbox.request(method, more).send(sandbox.address);
        never("GET", "/files?path=/workspace/file&resume=never").expect_refusal(409, "wrong_state");
        let refused = sandbox
            .request("POST", "/commands?resume=never")
            .json(&json!({"script": "true"}))
            .send(sandbox.address)
            .expect_refusal(409, "wrong_state");
        assert_eq!(refused["details"]["state"], "paused");
        never("GET", "/files?path=/&resume=perhaps").expect_refusal(400, "invalid_request");
        for more in ["", "/explain", "/stats", "/commands"] {
            never("GET", more).expect(200);
        }
        assert_eq!(state(&sandbox), "paused");
        thread::scope(|scope| {
            for number in 0..16 {
                let sandbox = &sandbox;
                scope.spawn(move || match number % 2 {
                    0 => assert_eq!(sandbox.sh("cat /workspace/file").ok().text(), "here"),
                    _ => {
                        let read =
                            sandbox.request("GET", "/files?path=/workspace/file").send(sandbox.address);
                        assert_eq!((read.status, read.body.as_slice()), (200, &b"here\n"[..]));
                    }
                });
            }
        });
        assert_eq!(state(&sandbox), "running");
    }
}

#[test]
fn a_key_typed_into_a_terminal_resumes_a_frozen_sandbox() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let mut terminal =
        sandbox.stream(json!({"argv": ["cat"], "stdin": true, "terminal": {"rows": 24, "columns": 80}}));
    terminal.wait_for("command");
    pause(&sandbox, "keep");
    terminal.write(b"hello\n");
    let mut text = String::new();
    while !text.contains("hello\r\nhello\r\n") {
        if let Said::Output { bytes, .. } = terminal.hear() {
            text.push_str(&String::from_utf8_lossy(&bytes));
        }
    }
    assert_eq!(state(&sandbox), "running");
}

#[test]
fn an_upload_and_a_download_go_on_after_a_freeze_and_end_with_an_error_when_memory_is_dropped() {
    const LENGTH: usize = 64 << 20;
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    for memory in ["keep", "drop"] {
        // An upload of which the second half comes after the pause.
        let mut upload = TcpStream::connect(sandbox.address).expect("the daemon listens");
        upload.set_read_timeout(Some(shoal_tests::DEADLINE)).expect("a socket takes this option");
        let path = sandbox.path("/files?path=/workspace/big");
        let head = format!(
            "PUT {path} HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {}\r\ncontent-length: {LENGTH}\r\nconnection: close\r\n\r\n",
            sandbox.address, sandbox.key
        );
        upload.write_all(head.as_bytes()).expect("it is read");
        upload.write_all(&vec![b'x'; LENGTH / 2]).expect("it is read");
        pause(&sandbox, memory);
        let mut second = upload.try_clone().expect("a descriptor");
        let writing = thread::spawn(move || second.write_all(&vec![b'y'; LENGTH / 2]));
        if memory == "keep" {
            resume(&sandbox);
        }
        let mut answer = String::new();
        // A daemon that refuses an upload may close the connection before all of it was sent.
        let _ = upload.read_to_string(&mut answer);
        let _ = writing.join().expect("no panic");
        let status = answer.split(' ').nth(1).unwrap_or_default();
        match memory {
            "keep" => {
                assert!(matches!(status, "200" | "201" | "204"), "{answer}");
                assert_eq!(sandbox.sh("wc -c </workspace/big").ok().text(), LENGTH.to_string());
            }
            _ => {
                assert!(!matches!(status, "200" | "201" | "204"), "{answer}");
                let intact = sandbox.sh("wc -c </workspace/big").ok().text();
                assert_eq!(intact, LENGTH.to_string(), "the file from before is whole");
            }
        }
    }
    let mut download =
        sandbox.request("GET", "/files?path=/workspace/big").open(sandbox.address).expect("it opens");
    assert_eq!(download.status, 200);
    let mut some = vec![0; 1 << 20];
    download.body().read_exact(&mut some).expect("some bytes");
    pause(&sandbox, "keep");
    resume(&sandbox);
    let mut rest = vec![0; LENGTH - some.len()];
    download.body().read_exact(&mut rest).expect("the rest");
    assert!(rest.iter().all(|byte| b"xy".contains(byte)), "no byte is another");
}

#[test]
fn frozen_and_dropped_sandboxes_survive_the_death_of_daemon_and_launcher() {
    let mut daemon = Daemon::start();
    let (frozen, dropped) = (daemon.sandbox(), daemon.sandbox());
    let count = frozen.spawn(json!({"argv": ["python3", "-c", COUNT, "200"]}));
    frozen.wrote(&count, 20);
    dropped.sh("echo here >/workspace/file").ok();
    pause(&frozen, "keep");
    pause(&dropped, "drop");
    for _ in 0..2 {
        for launcher in daemon.launchers() {
            kill_hard(launcher);
        }
        daemon.crash();
        let (frozen, dropped) = (daemon.sandbox_of(&frozen.id), daemon.sandbox_of(&dropped.id));
        assert_eq!((state(&frozen), state(&dropped)), ("paused".into(), "paused".into()));
    }
    let (frozen, dropped) = (daemon.sandbox_of(&frozen.id), daemon.sandbox_of(&dropped.id));
    assert_ne!(frozen.command(&count)["state"], "ended");
    let logs = daemon.logs();
    assert!(!logs.contains("does not say hello"), "a frozen init is not called silent");
    resume(&frozen);
    is_count(&frozen.output(&count), 200);
    assert_eq!(dropped.sh("cat /workspace/file").ok().text(), "here");
}

#[test]
fn daemons_and_launchers_that_die_during_pauses_and_resumes_lose_nothing_and_leave_nothing() {
    let mut daemon = Daemon::start();
    daemon.sandbox().delete();
    let before = daemon.audit();
    let id = daemon.sandbox().id.clone();
    daemon.sandbox_of(&id).sh("echo 0 >/workspace/rounds").ok();
    for round in 0..12_u64 {
        let sandbox = daemon.sandbox_of(&id);
        let (verb, body) = match round % 3 {
            0 => ("pause", json!({"memory": "drop", "grace_seconds": 0})),
            1 => ("resume", json!({})),
            _ => ("pause", json!({"memory": "keep"})),
        };
        let asking = {
            let request = sandbox.request("POST", &format!("/{verb}")).json(&body);
            let address = sandbox.address;
            thread::spawn(move || request.try_send(address).map(|answer| answer.status))
        };
        // At another moment of the request in each round.
        thread::sleep(Duration::from_micros(round * 700));
        if round % 2 == 0 {
            for launcher in daemon.launchers() {
                kill_hard(launcher);
            }
        }
        daemon.crash();
        drop(asking.join().expect("no panic")); // It was answered, or the connection broke.
        let sandbox = daemon.sandbox_of(&id);
        until_true("it settles", || matches!(state(&sandbox).as_str(), "running" | "paused" | "failed"));
        if state(&sandbox) == "failed" {
            resume(&sandbox);
        }
        let lines =
            sandbox.sh(&format!("echo {round} >>/workspace/rounds; wc -l </workspace/rounds")).ok().text();
        assert_eq!(lines, (round + 2).to_string(), "every change is there");
    }
    daemon.sandbox_of(&id).delete();
    // The daemon and its launcher have other process ids by now.
    until_true("no process of a sandbox is left", || daemon.scope().inside().is_empty());
    until_true("nothing of a sandbox is left", || {
        daemon.audit().beyond(&before).iter().all(|line| line.starts_with("process "))
    });
}

#[test]
fn two_resumes_and_a_delete_at_once_leave_nothing() {
    let daemon = Daemon::start();
    daemon.sandbox().delete();
    let before = daemon.audit();
    for memory in ["keep", "drop"] {
        for _ in 0..5 {
            let sandbox = daemon.sandbox();
            pause(&sandbox, memory);
            thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        let status = ask(&sandbox, "resume", json!({})).status;
                        assert!(matches!(status, 200 | 404 | 409), "{status}");
                    });
                }
                scope.spawn(|| sandbox.delete());
            });
            assert_eq!(sandbox.request("GET", "").send(sandbox.address).status, 404);
        }
    }
    daemon.expect_nothing_beyond(&before);
}

#[test]
fn a_sandbox_whose_init_was_killed_is_resumed_from_its_files() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    sandbox.sh("echo here >/workspace/file").ok();
    kill_hard(sandbox.init());
    until_true("it has failed", || state(&sandbox) == "failed");
    sandbox.post_command(&json!({"script": "true"})).expect_refusal(409, "sandbox_failed");
    resume(&sandbox);
    assert_eq!(sandbox.sh("cat /workspace/file").ok().text(), "here");
}

#[test]
fn the_owner_of_another_sandbox_cannot_pause_or_resume_it() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let other = daemon.post("/v1/keys", &json!({"owner": "other"})).expect(201);
    let key = other["secret"].as_str().expect("a key has a secret").to_owned();
    for verb in ["pause", "resume"] {
        let request = shoal_tests::Request::new("POST", &sandbox.path(&format!("/{verb}"))).key(&key);
        request.json(&json!({})).send(sandbox.address).expect_refusal(404, "sandbox_not_found");
    }
    assert_eq!(state(&sandbox), "running");
}

#[test]
fn volumes_and_limits_are_there_again_after_a_resume() {
    let daemon = Daemon::start();
    daemon.post("/v1/volumes", &json!({"name": "data", "size": "64Mi"})).expect(201);
    let sandbox = daemon.sandbox_with(json!({
        "memory": "128Mi", "mounts": [{"volume": "data", "path": "/data"}]
    }));
    sandbox.sh("echo here >/data/file").ok();
    pause(&sandbox, "drop");
    resume(&sandbox);
    assert_eq!(sandbox.sh("cat /data/file").ok().text(), "here");
    let eaten = sandbox.python("x = bytearray(512 << 20); print(len(x))");
    assert_eq!(eaten.outcome(), "out_of_memory", "{eaten:?}");
    // The kernel's count of such kills began again at zero, and each is still reported once.
    pause(&sandbox, "drop");
    let eaten = sandbox.python("x = bytearray(512 << 20); print(len(x))");
    assert_eq!(eaten.outcome(), "out_of_memory", "{eaten:?}");
    assert_eq!(sandbox.sh("kill -9 $$").outcome(), "signaled");
}

#[test]
fn events_say_when_a_sandbox_is_paused_and_resumed() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let events = daemon.request("GET", &format!("/v1/events?sandbox={}", sandbox.id));
    let events = events.header("accept", "text/event-stream");
    let mut events = events.open(sandbox.address).expect("a stream");
    let mut said = String::new();
    let mut hear = |until: &str, said: &mut String| {
        while !said.contains(until) {
            let piece = events.chunk().expect("the stream is open").expect("and goes on");
            said.push_str(&String::from_utf8_lossy(&piece));
        }
    };
    hear("ready", &mut said);
    pause(&sandbox, "drop");
    hear("\"paused\"", &mut said);
    said.clear();
    resume(&sandbox);
    hear("\"running\"", &mut said);
}

#[test]
fn a_person_pauses_and_resumes() {
    let daemon = Daemon::start();
    let shoal = |arguments: &[&str]| {
        let mut command = Command::new(binary());
        command.args(arguments).env_remove("SHOAL_DATA_DIR");
        command.env("SHOAL_URL", format!("http://{}", daemon.address)).env("SHOAL_API_KEY", &daemon.key);
        let output = command.output().expect("the program can be started");
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(text).expect("text"))
    };
    assert!(shoal(&["create", "--name", "work"]).0);
    let (ok, said) = shoal(&["pause", "work"]);
    assert!(ok, "{said}");
    assert!(shoal(&["inspect", "work"]).1.contains("paused, with its memory"));
    let (ok, said) = shoal(&["pause", "work", "--drop", "--grace", "1s", "--json"]);
    assert!(ok && said.contains("\"drop\""), "{said}");
    assert!(shoal(&["ls"]).1.contains("paused"));
    let (ok, said) = shoal(&["resume", "work"]);
    assert!(ok, "{said}");
    assert!(!shoal(&["pause", "nothing"]).0);
    assert!(!shoal(&["pause", "work", "--grace", "1s"]).0, "a grace is for --drop");
    until("it runs", || shoal(&["ls"]).1.contains("running").then_some(()));
}
