//! How long sandboxes live, through the API: rules act, uses and touches renew, and a crash changes neither.
//!
//! Times here are short, and the tests assert no durations, except that nothing comes too early.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use shoal_tests::daemon::binary;
use shoal_tests::wait::until_true;
use shoal_tests::{Daemon, Sandbox, until};

fn delete_after(since: &str, seconds: f64) -> Value {
    json!([{"since": since, "after_seconds": seconds, "action": "delete"}])
}

fn is_gone(sandbox: &Sandbox) -> bool {
    sandbox.request("GET", "").send(sandbox.address).status == 404
}

#[track_caller]
fn goes(sandbox: &Sandbox) {
    until_true("its time is over", || is_gone(sandbox));
}

#[track_caller]
fn explain(sandbox: &Sandbox) -> Value {
    sandbox.request("GET", "/explain").send(sandbox.address).expect(200)
}

#[track_caller]
fn set_lifetime(sandbox: &Sandbox, rules: Value) -> Value {
    sandbox.request("PATCH", "").json(&json!({"lifetime": rules})).send(sandbox.address).expect(200)
}

#[test]
fn each_clock_deletes_a_sandbox_with_all_that_is_in_it() {
    let daemon = Daemon::start();
    daemon.sandbox().delete();
    let before = daemon.audit();
    for since in ["last_use", "start", "creation"] {
        let began = Instant::now();
        let sandbox = daemon.sandbox_with(json!({"lifetime": delete_after(since, 1.0)}));
        sandbox.spawn(json!({"argv": ["sleep", "infinity"]}));
        goes(&sandbox);
        assert!(began.elapsed() >= Duration::from_secs(1), "{since} struck too early");
    }
    daemon.expect_nothing_beyond(&before);
}

#[test]
fn a_command_that_someone_waits_for_is_not_cut_off() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"lifetime": delete_after("last_use", 0.5)}));
    assert_eq!(sandbox.sh("sleep 3; echo done").ok().text(), "done");
    goes(&sandbox);
}

#[test]
fn an_open_stream_keeps_a_sandbox_alive_and_a_hard_limit_does_not_care() {
    let daemon = Daemon::start();
    let body = json!({"lifetime": delete_after("last_use", 0.5)});
    let (watched, control) = (daemon.sandbox_with(body.clone()), daemon.sandbox_with(body));
    let mut stream = watched.stream(json!({"argv": ["sleep", "infinity"]}));
    stream.wait_for("command");
    goes(&control);
    let explained = explain(&watched);
    assert_eq!(explained["uses"], 1, "{explained}");
    assert!(
        explained["sentence"].as_str().is_some_and(|text| text.starts_with("It is in use")),
        "{explained}"
    );
    set_lifetime(&watched, delete_after("creation", 0.5));
    goes(&watched);
}

#[test]
fn a_busy_command_keeps_its_sandbox_alive_and_a_sleeping_one_does_not() {
    let daemon = Daemon::start();
    let body = json!({"lifetime": delete_after("last_use", 1.0)});
    let busy = daemon.sandbox_with(body.clone());
    let work = busy.spawn(json!({"script": "while :; do :; done"}));
    for _ in 0..3 {
        let idle = daemon.sandbox_with(body.clone());
        idle.spawn(json!({"argv": ["sleep", "infinity"]}));
        goes(&idle);
    }
    let explained = explain(&busy);
    assert_eq!(explained["last_use"]["by"], "processor", "{explained}");
    assert_eq!(busy.kill(&work).status, 204);
    goes(&busy);
}

#[test]
fn looking_is_not_a_use() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"lifetime": delete_after("last_use", 1.0)}));
    until_true("it is deleted although its state is read all the time", || {
        daemon.list();
        for more in ["/explain", "/commands", "/stats"] {
            let status = sandbox.request("GET", more).send(sandbox.address).status;
            assert!(matches!(status, 200 | 404 | 409), "{more}: {status}");
        }
        is_gone(&sandbox)
    });
}

#[test]
fn files_are_used_like_commands() {
    let daemon = Daemon::start();
    let body = json!({"lifetime": delete_after("last_use", 1.0)});
    let (used, control) = (daemon.sandbox_with(body.clone()), daemon.sandbox_with(body));
    until_true("an unused one is deleted", || {
        let put = used.request("PUT", "/files?path=/tmp/x").body("x").send(used.address);
        assert!(matches!(put.status, 200 | 201 | 204), "{}", put.describe());
        is_gone(&control)
    });
    used.get();
    goes(&used);
}

#[test]
fn a_touch_renews_and_says_until_when() {
    let daemon = Daemon::start();
    let body = json!({"lifetime": delete_after("start", 1.0)});
    let (touched, control) = (daemon.sandbox_with(body.clone()), daemon.sandbox_with(body));
    until_true("one that is not touched is deleted", || {
        let answer = touched.request("POST", "/touch").send(touched.address).expect(200);
        assert_eq!(answer["end"]["postponed_by"], "touch", "{answer}");
        assert!(answer["end"]["in_seconds"].as_f64().is_some_and(|left| left <= 1.0), "{answer}");
        is_gone(&control)
    });
    touched.get();
    goes(&touched);
    touched.request("POST", "/touch").send(touched.address).expect_refusal(404, "sandbox_not_found");
}

#[test]
fn a_renewal_that_was_answered_never_loses_to_the_end() {
    const LENGTH: Duration = Duration::from_millis(600);
    let daemon = Daemon::start();
    let rounds = std::thread::scope(|scope| {
        let race = |number: u32| {
            let daemon = &daemon;
            move || {
                let (mut won, mut lost) = (0, 0);
                for round in 0..6 {
                    let since = if (number + round).is_multiple_of(2) { "start" } else { "last_use" };
                    let sandbox =
                        daemon.sandbox_with(json!({"lifetime": delete_after(since, LENGTH.as_secs_f64())}));
                    // Ever closer to the deadline, from one renewal to the next.
                    let mut pause = LENGTH * 9 / 10;
                    loop {
                        std::thread::sleep(pause);
                        pause += LENGTH / 60;
                        let asked = Instant::now();
                        let answer = match since {
                            "start" => sandbox.request("POST", "/touch").send(sandbox.address),
                            _ => sandbox.post_command(&json!({"argv": ["true"]})),
                        };
                        match answer.status {
                            200 => {
                                assert_ne!(answer.json()["result"]["outcome"], "sandbox_gone");
                                let state = sandbox.request("GET", "").send(sandbox.address);
                                // A slow machine may take longer than the sandbox lives.
                                if asked.elapsed() < LENGTH {
                                    assert_eq!(state.expect(200)["state"], "running");
                                    won += 1;
                                }
                            }
                            404 => break,
                            _ => {
                                let refused = answer.expect_refusal(409, "wrong_state");
                                assert_eq!(refused["details"]["state"], "deleting");
                                break;
                            }
                        }
                    }
                    lost += 1;
                    goes(&sandbox);
                }
                (won, lost)
            }
        };
        let racing: Vec<_> = (0..6).map(|number| scope.spawn(race(number))).collect();
        racing.into_iter().map(|one| one.join().expect("no thread panics")).collect::<Vec<_>>()
    });
    println!("renewed and gone: {rounds:?}");
    assert!(rounds.iter().map(|(won, _)| won).sum::<u32>() > 0);
}

#[test]
fn rules_hold_over_a_crash() {
    let mut daemon = Daemon::start();
    let hour = daemon.sandbox_with(json!({"lifetime": delete_after("creation", 3600.0)}));
    let short = daemon.sandbox_with(json!({"lifetime": delete_after("creation", 1.0)}));
    let unused = daemon.sandbox_with(json!({"lifetime": delete_after("last_use", 2.0)}));
    let touched = daemon.sandbox_with(json!({"lifetime": delete_after("start", 3600.0)}));
    let ends = |sandbox: &Sandbox| explain(sandbox)["end"]["at"].as_str().expect("an end").to_owned();
    touched.request("POST", "/touch").send(touched.address).expect(200);
    let before = (ends(&hour), ends(&touched));
    daemon.kill();
    daemon.start_again();
    let again = |sandbox: &Sandbox| daemon.sandbox_of(&sandbox.id);
    assert_eq!((ends(&again(&hour)), ends(&again(&touched))), before, "to the millisecond");
    goes(&again(&short));
    goes(&again(&unused));
    again(&hour).sh("true").ok();
}

#[test]
fn time_that_passed_while_nobody_looked_counts() {
    let mut daemon = Daemon::start();
    let over = daemon.sandbox_with(json!({"lifetime": delete_after("creation", 3600.0)}));
    let started = daemon.sandbox_with(json!({"lifetime": delete_after("start", 3600.0)}));
    let stays = daemon.sandbox_with(json!({"lifetime": delete_after("creation", 400_000.0)}));
    let free = daemon.sandbox();
    daemon.kill();
    // For a daemon in this time namespace, the machine has been up for a day more: as after a day of sleep.
    daemon.start_again_through(&["unshare", "--time", "--boottime", "86400"]);
    goes(&daemon.sandbox_of(&over.id));
    goes(&daemon.sandbox_of(&started.id));
    let explained = explain(&daemon.sandbox_of(&stays.id));
    let left = explained["end"]["in_seconds"].as_f64().expect("an end");
    assert!((1.0..400_000.0 - 86_400.0).contains(&left), "{explained}");
    daemon.sandbox_of(&free.id).sh("true").ok();
}

#[test]
fn a_failed_sandbox_stays_until_its_time_is_over() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    shoal_tests::daemon::kill_hard(sandbox.init());
    until_true("it has failed", || sandbox.get()["state"] == "failed");
    let explained = explain(&sandbox);
    assert!(
        explained["sentence"].as_str().is_some_and(|text| text.starts_with("It has failed (")),
        "{explained}"
    );
    set_lifetime(&sandbox, delete_after("start", 0.5));
    goes(&sandbox);
}

#[test]
fn rules_that_make_no_sense_are_refused() {
    let daemon = Daemon::start();
    let rule = |since: &str, after: Value, action: &str| json!([{"since": since, "after_seconds": after, "action": action}]);
    for rules in [
        rule("last_use", json!(0), "delete"),
        rule("last_use", json!(-1), "delete"),
        rule("last_use", json!(1e300), "delete"),
        rule("last_use", json!("1m"), "delete"),
        rule("tomorrow", json!(10), "delete"),
        rule("start", json!(10), "explode"),
        json!([{"since": "start", "after_seconds": 10}]),
        json!([{"since": "start", "after_seconds": 10, "action": "delete", "acts": true}]),
        json!({"since": "start"}),
        json!(vec![json!({"since": "start", "after_seconds": 10, "action": "delete"}); 9]),
    ] {
        daemon.post("/v1/sandboxes", &json!({"lifetime": rules})).expect_refusal(400, "invalid_request");
    }
    assert_eq!(daemon.list(), [] as [Value; 0]);
}

#[test]
fn rules_pause_a_sandbox_and_a_request_resumes_it() {
    let mut daemon = Daemon::start();
    for (action, memory) in [("pause_keep_memory", "keep"), ("pause_drop_memory", "drop")] {
        // What older clients had to say has no effect.
        let rules = json!([
            {"since": "last_use", "after_seconds": 0.5, "action": action, "accept_inactive": true},
            {"since": "paused", "after_seconds": 3600, "action": "delete"},
        ]);
        let sandbox = daemon.sandbox_with(json!({"lifetime": rules}));
        assert_eq!(sandbox.get()["lifetime"][0]["acts"], true);
        for round in 0..2 {
            until_true("it is paused", || sandbox.get()["state"] == "paused");
            let shown = sandbox.get();
            assert_eq!(
                (&shown["memory"], &shown["reason"]),
                (&json!(memory), &json!("nobody has used it for 500 ms"))
            );
            let explained = explain(&sandbox);
            assert_eq!(
                (&explained["end"]["action"], &explained["end"]["rule"]),
                (&json!("delete"), &json!(1))
            );
            let text = sandbox
                .sh(&format!("echo {round} >>/workspace/rounds; wc -l </workspace/rounds"))
                .ok()
                .text();
            assert_eq!(text, (round + 1).to_string());
        }
        // Rules act after a crash as well.
        daemon.crash();
        let sandbox = daemon.sandbox_of(&sandbox.id);
        until_true("it is paused", || sandbox.get()["state"] == "paused");
        set_lifetime(&sandbox, delete_after("paused", 0.2));
        goes(&sandbox);
    }
}

#[test]
fn rules_are_replaced_and_taken_away() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"lifetime": delete_after("creation", 3600.0)}));
    assert_eq!(explain(&sandbox)["end"]["action"], "delete");
    let changed = set_lifetime(&sandbox, json!([]));
    assert_eq!(changed["lifetime"], json!([]));
    let explained = explain(&sandbox);
    assert!(explained["end"].is_null(), "{explained}");
    assert_eq!(explained["sentence"], "It runs and has no lifetime rules, so it lives until it is deleted.");
    set_lifetime(&sandbox, delete_after("last_use", 0.3));
    goes(&sandbox);
    sandbox
        .request("PATCH", "")
        .json(&json!({"lifetime": []}))
        .send(sandbox.address)
        .expect_refusal(404, "sandbox_not_found");
}

fn shoal(daemon: &Daemon, arguments: &[&str]) -> Output {
    let mut command = Command::new(binary());
    command.args(arguments).env_remove("SHOAL_DATA_DIR");
    command.env("SHOAL_URL", format!("http://{}", daemon.address)).env("SHOAL_API_KEY", &daemon.key);
    command.output().expect("the program can be started")
}

#[track_caller]
fn says(daemon: &Daemon, arguments: &[&str]) -> String {
    let output = shoal(daemon, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text").trim_end().to_owned()
}

#[test]
fn a_person_labels_finds_renews_and_asks() {
    let daemon = Daemon::start();
    let id = says(
        &daemon,
        &["create", "--name", "work", "--label", "app=chat", "--idle", "30m", "--hard-ttl", "7d"],
    );
    assert!(says(&daemon, &["explain", "work"]).contains("when nobody has used it for 30 min"));
    assert_eq!(says(&daemon, &["label", "work", "thread=a=b", "app-"]), "thread=a=b");
    let found = says(&daemon, &["ls", "-l", "thread=a=b", "-l", "!app"]);
    assert!(found.contains(&id) && found.contains("LABELS"), "{found}");
    assert!(!says(&daemon, &["ls", "-l", "app"]).contains(&id));
    let again = says(&daemon, &["create", "--get-or-create", "--label", "thread=a=b", "--json"]);
    let again: Value = serde_json::from_str(&again).expect("JSON");
    assert_eq!((&again["id"], &again["created"]), (&json!(id), &json!(false)));
    assert!(says(&daemon, &["touch", "work"]).starts_with("It runs and was last touched a moment ago"));
    assert!(says(&daemon, &["inspect", "work"]).contains("last-use:30m:delete"));
    let sentence = says(&daemon, &["lifetime", "work", "--rule", "start:5m:delete"]);
    assert!(sentence.contains("5 min after its start or last touch"), "{sentence}");
    let explained: Value =
        serde_json::from_str(&says(&daemon, &["explain", "--json", "work"])).expect("JSON");
    assert_eq!(explained["end"]["rule"], 0);
    assert!(says(&daemon, &["lifetime", "work", "--none"]).contains("no lifetime rules"));
    let sentence = says(&daemon, &["lifetime", "work", "--ttl", "1h", "--hard-ttl", "30d"]);
    assert!(sentence.contains("it is paused, with only its files kept, in"), "{sentence}");
    says(&daemon, &["lifetime", "work", "--idle", "300ms"]);
    until("it goes", || Some(()).filter(|()| !shoal(&daemon, &["explain", "work"]).status.success()));
}
