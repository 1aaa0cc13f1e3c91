//! Crashes: `kill -9` of the daemon, the launcher and init, between operations and during them. Nothing is lost,
//! nothing leaks.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use shoal_tests::daemon::kill_hard;
use shoal_tests::wait::until_true;
use shoal_tests::{Audit, Collected, DEADLINE, Daemon, Finished, Request, Said, Sandbox, until};

/// Prints 0, 1, 2, ... one per line, up to its argument, to both streams, so that every byte is predictable.
const COUNT: &str = "
import sys
for n in range(int(sys.argv[1])):
    sys.stdout.write(f'{n}\\n')
    if n % 7 == 0: sys.stderr.write(f'{n}\\n')
    if n % 1000 == 0: sys.stdout.flush(); sys.stderr.flush()
    if len(sys.argv) > 2 and n % 200 == 0:
        import time; time.sleep(float(sys.argv[2]))
";

#[track_caller]
fn is_count(collected: &Collected, to: u32) {
    let lines = |step: usize| (0..to).step_by(step).map(|n| format!("{n}\n")).collect::<String>();
    // Not assert_eq: megabytes of numbers do not help.
    assert!(
        collected.stdout == lines(1).as_bytes(),
        "stdout is not the count, after {} bytes",
        collected.stdout.len()
    );
    assert!(
        collected.stderr == lines(7).as_bytes(),
        "stderr is not the count, after {} bytes",
        collected.stderr.len()
    );
}

/// Collects a command's output over any number of connections, perhaps to different daemons.
fn collect_over_crashes(daemon: &mut Daemon, sandbox: &str, command: &str, crashes: u32) -> Collected {
    let mut all = Collected::default();
    let mut crashed = 0;
    loop {
        let mut socket = daemon.sandbox_of(sandbox).attach(command, &all);
        if crashed < crashes {
            // Some output, then the crash, in the middle of more.
            let enough = all.stdout.len() + 20_000;
            while all.stdout.len() < enough && all.ended.is_none() {
                match socket.hear() {
                    Said::Output { stream, offset, bytes } => all.add(stream, offset, &bytes),
                    Said::Event(event) if event["type"] == "ended" => all.ended = Some(event),
                    Said::Event(_) => {}
                    Said::Closed(code) => panic!("closed with {code:?}"),
                }
            }
            daemon.crash();
            crashed += 1;
        } else {
            all = socket.collect(all);
            assert_eq!(all.closed, None);
        }
        if all.ended.is_some() && crashed == crashes {
            return all;
        }
    }
}

#[test]
fn no_byte_is_lost_when_the_daemon_is_killed_under_a_writing_command() {
    let mut daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let id = sandbox.spawn(json!({"argv": ["python3", "-c", COUNT, "300000", "0.001"]}));
    let all = collect_over_crashes(&mut daemon, &sandbox.id, &id, 8);
    assert_eq!(all.result()["exit_code"], 0);
    is_count(&all, 300_000);
}

#[test]
fn no_byte_is_lost_when_the_command_ends_while_the_daemon_is_down() {
    let mut daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let id = sandbox.spawn(json!({"script": format!("until [ -e /tmp/go ]; do sleep 0.01; done; python3 -c \"$PROGRAM\" 60000; touch /tmp/over; exit 42"), "env": {"PROGRAM": COUNT}}));
    sandbox.running(&id);
    let gate = sandbox.spawn(json!({"script": "sleep 0.3; touch /tmp/go"}));
    sandbox.running(&gate);
    daemon.kill();
    until_true("the command has ended by itself", || {
        sandbox.processes().iter().all(|process| {
            !std::fs::read(format!("/proc/{process}/cmdline"))
                .is_ok_and(|line| String::from_utf8_lossy(&line).contains("60000"))
        }) && sandbox.processes().len() <= 1
    });
    daemon.start_again();
    let sandbox = daemon.sandbox_of(&sandbox.id);
    assert_eq!(sandbox.ended(&id)["result"]["exit_code"], 42);
    is_count(&sandbox.output(&id), 60_000);
}

#[test]
fn a_command_that_outruns_a_dead_daemon_waits_and_goes_on() {
    let mut daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    // Far more than init buffers for an absent daemon: the command must block, not lose output.
    let id = sandbox.spawn(json!({"argv": ["python3", "-c", COUNT, "2000000"]}));
    sandbox.wrote(&id, 1);
    daemon.crash();
    let sandbox = daemon.sandbox_of(&sandbox.id);
    let all = sandbox.output(&id);
    assert_eq!(all.result()["exit_code"], 0);
    is_count(&all, 2_000_000);
}

#[test]
fn stdin_goes_on_after_a_crash() {
    let mut daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let id = sandbox.spawn(json!({"argv": ["cat"], "stdin": true}));
    let write = |daemon: &Daemon, sandbox: &Sandbox, offset: usize, bytes: &[u8]| {
        let answer = daemon
            .request("POST", &sandbox.path(&format!("/commands/{id}/stdin?offset={offset}")))
            .header("content-type", "application/octet-stream")
            .body(bytes)
            .send(daemon.address);
        assert!(matches!(answer.status, 200 | 204), "{}", answer.describe());
    };
    write(&daemon, &sandbox, 0, b"before ");
    daemon.crash();
    // The client does not know whether the first write was accepted, so it repeats it.
    write(&daemon, &sandbox, 0, b"before ");
    write(&daemon, &sandbox, 7, b"after");
    let sandbox = daemon.sandbox_of(&sandbox.id);
    sandbox.end_stdin(&id);
    assert_eq!(sandbox.output(&id).stdout, b"before after");
}

#[test]
fn a_restart_adopts_every_sandbox_and_command() {
    let mut daemon = Daemon::start();
    let sandboxes: Vec<Sandbox> =
        (0..8).map(|n| daemon.sandbox_with(json!({"name": format!("n{n}")}))).collect();
    let mut commands = Vec::new();
    for sandbox in &sandboxes {
        for _ in 0..3 {
            commands.push((
                sandbox.id.clone(),
                sandbox.spawn(json!({"argv": ["python3", "-c", COUNT, "20000", "0.002"]})),
            ));
        }
    }
    daemon.crash();
    assert_eq!(daemon.list().len(), 8);
    assert!(daemon.list().iter().all(|sandbox| sandbox["state"] == "running"), "{:?}", daemon.list());
    for (sandbox, command) in &commands {
        let all = daemon.sandbox_of(sandbox).output(command);
        assert_eq!(all.result()["exit_code"], 0);
        is_count(&all, 20_000);
    }
}

/// Walkers hold the lock of their launcher. The next launcher must wait for them, or what they still create would
/// belong to no one.
#[test]
fn a_launcher_waits_for_what_is_left_of_the_one_before() {
    let mut daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    daemon.kill();
    until_true("the launcher is gone with its daemon", || daemon.launchers().is_empty());
    let path = daemon.data_dir.join("launcher.lock");
    let held = std::fs::File::open(&path).expect("launchers have a lock");
    until_true("it is free", || {
        rustix::fs::flock(&held, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok()
    });
    let cgroups = || -> std::collections::BTreeSet<_> { daemon.scope().cgroups().into_iter().collect() };
    let before = cgroups();
    std::thread::scope(|scope| {
        let starting = scope.spawn(|| daemon.try_start(&daemon.log(99)));
        until_true("the next launcher wants the lock", || {
            let wants = |process: &i32| {
                let open = std::fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
                open.filter_map(|entry| std::fs::read_link(entry.path()).ok()).any(|target| target == path)
            };
            daemon
                .scope()
                .processes()
                .iter()
                .any(|process| *process != std::process::id() as i32 && wants(process))
        });
        assert!(!starting.is_finished(), "it does not begin beside the one before");
        assert_eq!(cgroups(), before, "and has done nothing");
        drop(held);
        let (mut child, _) = starting.join().expect("no panic").expect("it starts once the lock is free");
        let _ = child.kill();
        let _ = child.wait();
    });
    daemon.start_again();
    assert_eq!(daemon.sandbox_of(&sandbox.id).sh("echo adopted").ok().text(), "adopted");
}

#[test]
fn a_killed_launcher_is_replaced() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let command = sandbox.spawn(json!({"argv": ["sleep", "1000"]}));
    sandbox.running(&command);
    for _ in 0..3 {
        let launchers = daemon.launchers();
        assert!(!launchers.is_empty(), "the launcher runs");
        launchers.into_iter().for_each(kill_hard);
        let other = daemon.sandbox();
        assert_eq!(other.sh("echo new").ok().text(), "new");
        other.delete();
    }
    assert_eq!(sandbox.command(&command)["state"], "running", "sandboxes outlive the launcher");
    assert_eq!(sandbox.sh("echo old").ok().text(), "old");
    sandbox.delete();
}

#[test]
fn a_sandbox_whose_init_is_killed_fails_with_a_reason_and_can_be_deleted() {
    let daemon = Daemon::start();
    daemon.sandbox().delete();
    let before = daemon.audit();
    let sandbox = daemon.sandbox();
    let waiting = {
        let sandbox = sandbox.clone();
        std::thread::spawn(move || sandbox.post_command(&json!({"id": "long", "argv": ["sleep", "1000"]})))
    };
    until("the command runs", || {
        let answer = daemon.get(&sandbox.path("/commands/long"));
        (answer.status == 200 && answer.json()["pid"].is_u64()).then_some(())
    });
    kill_hard(sandbox.init());
    let failed =
        until("the sandbox has failed", || Some(sandbox.get()).filter(|now| now["state"] == "failed"));
    assert!(failed["reason"].as_str().is_some_and(|reason| !reason.is_empty()), "{failed}");
    let answer = waiting.join().expect("no thread panics");
    assert_eq!(answer.expect(200)["result"]["outcome"], "sandbox_gone");
    sandbox.post_command(&json!({"argv": ["true"]})).expect_refusal(409, "sandbox_failed");
    assert_eq!(daemon.list().len(), 1, "a failed sandbox keeps its row");
    sandbox.delete();
    daemon.expect_nothing_beyond(&before);
}

#[test]
fn an_init_killed_while_the_daemon_is_down_is_found_out() {
    let mut daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let id = sandbox.spawn(json!({"argv": ["sleep", "1000"]}));
    sandbox.running(&id);
    let init = sandbox.init();
    daemon.kill();
    kill_hard(init);
    daemon.start_again();
    let sandbox = daemon.sandbox_of(&sandbox.id);
    until_true("the sandbox has failed", || sandbox.get()["state"] == "failed");
    assert_eq!(sandbox.ended(&id)["result"]["outcome"], "sandbox_gone");
    sandbox.delete();
}

/// A bounded random delay, to hit at a random moment. This is the attack and not a wait for a condition; the tests
/// wait for conditions after it.
fn strike_after(random: &mut u64, microseconds_max: u64) {
    *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    std::thread::sleep(Duration::from_micros((*random >> 33) % microseconds_max));
}

fn seed() -> u64 {
    let seed = u64::from_str_radix(&shoal_tests::daemon::random_hex(8), 16).expect("hexadecimal");
    eprintln!("the seed of this run is {seed}");
    seed
}

/// Keeps creating, running and deleting until stopped. Any true response is fine; no response from a living daemon is
/// a hang.
fn churn(address: SocketAddr, key: &str, stop: &AtomicBool) {
    let ask = |request: Request| {
        let request = request.key(key);
        match request.try_send(address) {
            Ok(answer) => Some(answer),
            Err(error) => {
                let hangs = matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
                assert!(!hangs, "no answer within {DEADLINE:?} to {request:?}");
                None
            }
        }
    };
    while !stop.load(Ordering::Relaxed) {
        let Some(made) = ask(Request::new("POST", "/v1/sandboxes").json(&json!({}))) else { continue };
        let Ok(made) = serde_json::from_slice::<Value>(&made.body) else { continue };
        let Some(id) = made["id"].as_str() else { continue };
        let script = json!({"script": "echo x; (sleep 1000 &) ; echo y"});
        let run = ask(Request::new("POST", &format!("/v1/sandboxes/{id}/commands")).json(&script));
        if let Some(answer) = run.filter(|answer| answer.status == 200).map(|answer| answer.json())
            && answer["result"]["outcome"] == "exited"
        {
            assert_eq!(answer["stdout_text"], "x\ny\n", "{answer}");
        }
        ask(Request::new("DELETE", &format!("/v1/sandboxes/{id}")));
    }
}

/// After every round: everything listed exists, works or says why not, and can be deleted; then nothing is left.
#[track_caller]
fn settle(daemon: &Daemon, before: &Audit) {
    until_true("every sandbox has come to rest", || {
        daemon.list().iter().all(|one| one["state"] != "creating")
    });
    for sandbox in daemon.list() {
        let handle = daemon.sandbox_of(sandbox["id"].as_str().expect("an id"));
        match sandbox["state"].as_str() {
            Some("running") => assert_eq!(handle.sh("echo usable").ok().text(), "usable"),
            Some("failed") => assert!(sandbox["reason"].is_string(), "{sandbox}"),
            // A delete that was interrupted twice waits for the next sweep, or for another request.
            Some("deleting") => {}
            other => panic!("a sandbox came to rest as {other:?}"),
        }
        let deleted = handle.request("DELETE", "").send(handle.address);
        assert!(matches!(deleted.status, 204 | 404), "{}", deleted.describe());
    }
    assert_eq!(daemon.list(), [] as [Value; 0]);
    until_true("no process of a sandbox is left", || daemon.scope().inside().is_empty());
    let give_up = Instant::now() + DEADLINE;
    loop {
        let left = lasting(daemon.audit()).beyond(before);
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < give_up, "left behind: {left:#?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// What survives a restart of the daemon, without processes and mounts of a launcher, which are new each time.
fn lasting(audit: Audit) -> Audit {
    Audit(
        audit
            .0
            .into_iter()
            .filter(|line| !line.starts_with("process") && !line.starts_with("mount"))
            .collect(),
    )
}

#[test]
fn leak_audit_after_killing_the_daemon_inside_create_run_and_delete() {
    let mut daemon = Daemon::start();
    let mut random = seed();
    daemon.sandbox().delete();
    for _ in 0..12 {
        let before = lasting(daemon.audit());
        let stop = AtomicBool::new(false);
        let (address, key) = (daemon.address, daemon.key.clone());
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| churn(address, &key, &stop));
            }
            strike_after(&mut random, 150_000);
            daemon.kill();
            stop.store(true, Ordering::Relaxed);
        });
        daemon.start_again();
        settle(&daemon, &before);
    }
}

#[test]
fn leak_audit_after_killing_the_launcher_inside_create_run_and_delete() {
    let daemon = Daemon::start();
    let mut random = seed();
    daemon.sandbox().delete();
    for _ in 0..12 {
        let before = lasting(daemon.audit());
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| churn(daemon.address, &daemon.key, &stop));
            }
            for _ in 0..3 {
                strike_after(&mut random, 60_000);
                daemon.launchers().into_iter().for_each(kill_hard);
            }
            stop.store(true, Ordering::Relaxed);
        });
        settle(&daemon, &before);
    }
}

#[test]
fn leak_audit_after_killing_inits_inside_create_run_and_delete() {
    let daemon = Daemon::start();
    let mut random = seed();
    daemon.sandbox().delete();
    for _ in 0..12 {
        let before = lasting(daemon.audit());
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| churn(daemon.address, &daemon.key, &stop));
            }
            for _ in 0..6 {
                strike_after(&mut random, 40_000);
                daemon.scope().inside().into_iter().for_each(kill_hard);
            }
            stop.store(true, Ordering::Relaxed);
        });
        settle(&daemon, &before);
    }
}

#[test]
fn leak_audit_after_killing_daemons_that_are_still_starting() {
    let mut daemon = Daemon::start();
    let mut random = seed();
    daemon.sandbox().delete();
    let before = lasting(daemon.audit());
    let sandboxes: Vec<Sandbox> = (0..4).map(|_| daemon.sandbox()).collect();
    let counting: Vec<(String, String)> = sandboxes
        .iter()
        .map(|sandbox| {
            (sandbox.id.clone(), sandbox.spawn(json!({"argv": ["python3", "-c", COUNT, "100000", "0.004"]})))
        })
        .collect();
    // Including a half-created and a half-deleted one, so that recovery has work.
    daemon.post("/v1/sandboxes", &json!({"wait": false}));
    daemon.kill();
    for round in 0..15 {
        let mut child =
            daemon.command(&daemon.home.join(format!("half-{round}.log"))).spawn().expect("it starts");
        strike_after(&mut random, 60_000);
        child.kill().expect("a child can be killed");
        child.wait().expect("a child can be waited for");
    }
    daemon.start_again();
    for (sandbox, command) in &counting {
        let all = daemon.sandbox_of(sandbox).output(command);
        assert_eq!(all.result()["exit_code"], 0);
        is_count(&all, 100_000);
    }
    settle(&daemon, &before);
}

/// Random reconnects, random crashes, several readers at once: each sees every byte once.
#[test]
fn every_byte_comes_once_over_random_reconnects_and_crashes() {
    let mut daemon = Daemon::start();
    let mut random = seed();
    let sandbox = daemon.sandbox();
    let id = sandbox.spawn(json!({"argv": ["python3", "-c", COUNT, "200000", "0.001"]}));
    let mut readers = vec![Collected::default(); 3];
    let mut crashes = 0;
    while readers.iter().any(|reader| reader.ended.is_none()) {
        for reader in readers.iter_mut().filter(|reader| reader.ended.is_none()) {
            let mut socket = daemon.sandbox_of(&sandbox.id).attach(&id, reader);
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            for _ in 0..(random >> 40) % 12 {
                match socket.hear() {
                    Said::Output { stream, offset, bytes } => reader.add(stream, offset, &bytes),
                    Said::Event(event) if event["type"] == "ended" => {
                        reader.ended = Some(event);
                        break;
                    }
                    Said::Event(_) => {}
                    Said::Closed(code) => panic!("closed with {code:?}"),
                }
            }
        }
        if random >> 61 == 0 && crashes < 10 {
            daemon.crash();
            crashes += 1;
        }
    }
    for reader in &readers {
        assert_eq!(reader.result()["exit_code"], 0);
        is_count(reader, 200_000);
    }
}

#[test]
fn everything_killed_at_once_is_put_in_order_by_the_next_start() {
    let mut daemon = Daemon::start();
    daemon.sandbox().delete();
    let before = lasting(daemon.audit());
    let sandboxes: Vec<Sandbox> = (0..4).map(|_| daemon.sandbox()).collect();
    daemon.kill();
    daemon.launchers().into_iter().for_each(kill_hard);
    daemon.scope().inside().into_iter().for_each(kill_hard);
    daemon.start_again();
    until_true("all have failed", || daemon.list().iter().all(|sandbox| sandbox["state"] == "failed"));
    assert_eq!(daemon.list().len(), sandboxes.len());
    settle(&daemon, &before);
}

#[test]
fn answers_while_a_daemon_dies_are_never_made_up() {
    let mut daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let (address, key, path) = (daemon.address, daemon.key.clone(), sandbox.path("/commands"));
    let asking: Vec<_> = (0..8)
        .map(|n| {
            let (key, path) = (key.clone(), path.clone());
            std::thread::spawn(move || {
                Request::new("POST", &path)
                    .key(&key)
                    .json(&json!({"id": format!("c{n}"), "script": format!("sleep 0.5; echo {n}")}))
                    .try_send(address)
            })
        })
        .collect();
    until_true("all have been asked for", || {
        daemon.get(&sandbox.path("/commands")).expect(200)["commands"]
            .as_array()
            .is_some_and(|list| list.len() == 8)
    });
    daemon.crash();
    for one in asking {
        if let Ok(answer) = one.join().expect("no thread panics") {
            assert_ne!(answer.status, 200, "an answer from a dead daemon: {}", answer.describe());
        }
    }
    let sandbox = daemon.sandbox_of(&sandbox.id);
    for n in 0..8 {
        // A repeated request with the same id starts nothing and returns what happened.
        let done: Finished =
            sandbox.run(json!({"id": format!("c{n}"), "script": format!("sleep 0.5; echo {n}")}));
        assert_eq!(done.ok().text(), n.to_string());
    }
}
