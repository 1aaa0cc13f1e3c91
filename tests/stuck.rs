//! One stuck sandbox does not affect others. Times are compared within one run, never with absolute values.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;
use shoal_tests::daemon::send_signal;
use shoal_tests::wait::until_true;
use shoal_tests::{Daemon, Sandbox};

/// How much slower anything may get. Noise on two cores is well below; waiting for a deadline is far above.
const SLOWER_MAX: u32 = 5;
/// Differences below this are noise.
const NOISE: Duration = Duration::from_millis(30);

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn measure(rounds: u32, mut what: impl FnMut()) -> Duration {
    let times = (0..rounds).map(|_| {
        let started = Instant::now();
        what();
        started.elapsed()
    });
    median(times.collect())
}

struct Times {
    list: Duration,
    get: Duration,
    create: Duration,
    run: Duration,
    delete: Duration,
}

fn times(daemon: &Daemon, other: &Sandbox) -> Times {
    let mut made = Vec::new();
    let create = measure(11, || made.push(daemon.sandbox()));
    let mut left = made.into_iter();
    Times {
        list: measure(21, || drop(daemon.list())),
        get: measure(21, || drop(other.get())),
        create,
        run: measure(21, || drop(other.run(json!({"argv": ["true"]})).ok())),
        delete: measure(11, || left.next().expect("as many as were made").delete()),
    }
}

#[track_caller]
fn as_fast(before: &Times, after: &Times) {
    for (what, before, after) in [
        ("list", before.list, after.list),
        ("get", before.get, after.get),
        ("create", before.create, after.create),
        ("run", before.run, after.run),
        ("delete", before.delete, after.delete),
    ] {
        assert!(after <= before * SLOWER_MAX + NOISE, "{what} took {after:?}, before {before:?}");
    }
}

#[test]
fn a_stopped_init_slows_nobody_else_down() {
    let daemon = Daemon::start();
    let (stuck, other) = (daemon.sandbox(), daemon.sandbox());
    let before = times(&daemon, &other);
    let init = stuck.init();
    send_signal(init, Signal::STOP);
    // Requests that hang on the stuck one.
    let hanging: Vec<_> = (0..16)
        .map(|_| {
            let stuck = stuck.clone();
            std::thread::spawn(move || {
                stuck.request("POST", "/commands").json(&json!({"argv": ["true"]})).try_send(stuck.address)
            })
        })
        .collect();
    as_fast(&before, &times(&daemon, &other));
    send_signal(init, Signal::CONT);
    for one in hanging {
        let answer = one.join().expect("no thread panics").expect("the daemon answers");
        assert!(matches!(answer.status, 200 | 503), "{}", answer.describe());
    }
    assert_eq!(stuck.sh("echo back").ok().text(), "back");
}

#[test]
fn a_stopped_init_is_told_of_and_can_be_deleted() {
    let daemon = Daemon::start();
    let stuck = daemon.sandbox();
    send_signal(stuck.init(), Signal::STOP);
    let answer = stuck.post_command(&json!({"argv": ["true"]}));
    answer.expect_refusal(503, "sandbox_unresponsive");
    stuck.delete();
    assert_eq!(stuck.processes(), [] as [i32; 0]);
}

#[test]
fn a_restart_is_not_held_up_by_a_stopped_init() {
    let mut daemon = Daemon::start();
    let (stuck, other) = (daemon.sandbox(), daemon.sandbox());
    let normal = {
        daemon.kill();
        let started = Instant::now();
        daemon.start_again();
        started.elapsed()
    };
    let init = stuck.init();
    send_signal(init, Signal::STOP);
    daemon.kill();
    let started = Instant::now();
    daemon.start_again();
    let other = daemon.sandbox_of(&other.id);
    assert_eq!(other.sh("echo adopted").ok().text(), "adopted");
    let taken = started.elapsed();
    assert!(
        taken <= normal * SLOWER_MAX + Duration::from_secs(1),
        "{taken:?}, without a stuck one {normal:?}"
    );
    send_signal(init, Signal::CONT);
    let stuck = daemon.sandbox_of(&stuck.id);
    until_true("the stopped one is back", || stuck.post_command(&json!({"argv": ["true"]})).status == 200);
}

#[test]
fn a_stopped_launcher_hinders_no_running_sandbox() {
    let daemon = Daemon::start();
    let other = daemon.sandbox();
    let run = |rounds| measure(rounds, || drop(other.run(json!({"argv": ["true"]})).ok()));
    let before = run(21);
    let launchers = daemon.launchers();
    launchers.iter().for_each(|process| send_signal(*process, Signal::STOP));
    let after = run(21);
    let list = measure(11, || drop(daemon.list()));
    launchers.iter().for_each(|process| send_signal(*process, Signal::CONT));
    assert!(after <= before * SLOWER_MAX + NOISE, "{after:?}, before {before:?}");
    assert!(list <= before * SLOWER_MAX + NOISE * 10, "{list:?}");
    assert_eq!(daemon.sandbox().sh("echo new").ok().text(), "new");
}

/// How long SIGTERM takes after a client did something and vanished, in each of the ways in which clients vanish.
#[test]
fn a_stop_is_not_held_up_by_clients_that_have_gone() {
    let stop_after = |client: &dyn Fn(&Daemon)| {
        let mut daemon = Daemon::start();
        client(&daemon);
        let started = Instant::now();
        assert!(daemon.stop());
        started.elapsed()
    };
    let nothing = stop_after(&|daemon| drop(daemon.sandbox()));
    let gone = [
        (
            "a closed stream",
            stop_after(&|daemon| {
                let mut socket = daemon.sandbox().stream(json!({"argv": ["sleep", "1000"]}));
                socket.wait_for("command");
            }),
        ),
        (
            "a closed stream with stdin",
            stop_after(&|daemon| {
                let mut socket = daemon.sandbox().stream(json!({"argv": ["sleep", "1000"], "stdin": true}));
                socket.wait_for("command");
                socket.write(b"never read");
            }),
        ),
        (
            "a closed stream with ended stdin",
            stop_after(&|daemon| {
                let mut socket = daemon.sandbox().stream(json!({"argv": ["sleep", "1000"], "stdin": true}));
                socket.wait_for("command");
                socket.say(&json!({"type": "stdin_end"}));
            }),
        ),
        (
            "a stream of a deleted sandbox",
            stop_after(&|daemon| {
                let sandbox = daemon.sandbox();
                let mut socket = sandbox.stream(json!({"argv": ["sleep", "1000"], "stdin": true}));
                socket.wait_for("command");
                socket.say(&json!({"type": "stdin_end"}));
                sandbox.delete();
            }),
        ),
        (
            "a stream of a deleted sandbox without stdin",
            stop_after(&|daemon| {
                let sandbox = daemon.sandbox();
                let mut socket = sandbox.stream(json!({"argv": ["sleep", "1000"]}));
                socket.wait_for("command");
                sandbox.delete();
            }),
        ),
    ];
    eprintln!("{nothing:?} {gone:?}");
    for (what, taken) in gone {
        assert!(
            taken <= nothing * SLOWER_MAX + Duration::from_secs(1),
            "after {what} the stop took {taken:?}, else {nothing:?}"
        );
    }
}
