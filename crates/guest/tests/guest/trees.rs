//! Ending commands: whole trees, nothing but the tree, and leftovers.

use std::time::{Duration, Instant};

use wire::guest::{EndCause, ExitStatus, FromInit, Handle, Start, ToInit};

use crate::support::{Client, Event, Guest, Mode, argv, in_both_modes, is_root, shell};

const SIGUSR1: i32 = 10;
const SIGTERM: i32 = 15;

/// A tree that does all it can to escape: a new session, a double fork, ignored signals. All of it holds descriptor
/// 7.
fn escape_artist(held: &str) -> String {
    format!(
        "exec 7>{held}
         (setsid sh -c '(trap \"\" TERM HUP INT; setsid sleep 1000) & (sleep 1000 &) ; exit' &)
         (trap '' TERM; sleep 1000) &
         (setsid setsid sleep 1000 &)
         trap '' TERM
         echo ready
         while :; do sleep 1000; done"
    )
}

/// Waits for the first line, so that the whole tree exists.
fn until_ready(client: &mut Client, start: Start) {
    let handle = start.handle;
    client.start(start);
    assert!(matches!(client.message(), FromInit::Started { handle: started, .. } if started == handle));
    let Event::Data { bytes, stream, .. } = client.next() else { panic!("it prints") };
    assert_eq!(bytes, b"ready\n");
    client.send(&ToInit::Ack { handle, stream, offset: 6 });
}

/// The next command to end; its remaining output is ignored.
fn end_of(client: &mut Client) -> (Handle, wire::guest::End) {
    loop {
        match client.next() {
            Event::Message(FromInit::Ended { handle, end, .. }) => {
                client.send(&ToInit::AckResult { handle });
                return (handle, end);
            }
            Event::Message(_) | Event::Data { .. } => {}
        }
    }
}

#[test]
fn a_timeout_takes_the_whole_tree_and_leaves_the_neighbour_alone() {
    in_both_modes(|guest| {
        let mut client = guest.connect();
        let (neighbour, tree) = (guest.fifo("neighbour"), guest.fifo("tree"));
        until_ready(&mut client, shell(1, &escape_artist(neighbour.path.to_str().expect("text"))));
        let start = Start {
            timeout_ms: Some(300),
            grace_ms: 200,
            ..shell(2, &escape_artist(tree.path.to_str().expect("text")))
        };
        let began = Instant::now();
        until_ready(&mut client, start);
        let (handle, end) = end_of(&mut client);
        assert_eq!(handle, Handle(2));
        // It ignores SIGTERM, so the end of the grace killed it.
        assert_eq!((end.status, end.cause), (ExitStatus::Signal(9), EndCause::Timeout));
        assert!(began.elapsed() >= Duration::from_millis(500), "neither came early: {:?}", began.elapsed());
        tree.until_released();
        assert!(neighbour.is_held(), "the neighbour lives");
        client.send(&ToInit::Kill { handle: Handle(1) });
        let (handle, end) = end_of(&mut client);
        assert_eq!((handle, end.status, end.cause), (Handle(1), ExitStatus::Signal(9), EndCause::Killed));
        neighbour.until_released();
        for fifo in [neighbour, tree] {
            std::fs::remove_file(fifo.path).expect("it is there");
        }
    });
}

#[test]
fn a_main_process_that_goes_when_asked_takes_its_stubborn_children_with_it() {
    in_both_modes(|guest| {
        let mut client = guest.connect();
        let fifo = guest.fifo("children");
        let held = fifo.path.display();
        // A grace that no test would wait for: the children must end with the main process.
        let script =
            format!("exec 7>{held}; (trap '' TERM; sleep 1000) & trap 'exit 7' TERM; echo ready; wait");
        let start = Start { timeout_ms: Some(100), grace_ms: 1_000_000, ..shell(1, &script) };
        until_ready(&mut client, start);
        let (_, end) = end_of(&mut client);
        assert_eq!((end.status, end.cause), (ExitStatus::Code(7), EndCause::Timeout));
        fifo.until_released();
        std::fs::remove_file(&fifo.path).expect("it is there");
    });
}

#[test]
fn silence_ends_a_command_and_output_keeps_it_alive() {
    let guest = Guest::start(Mode::Walk);
    let mut client = guest.connect();
    let quiet = |handle, script: &str| Start { idle_timeout_ms: Some(400), ..shell(handle, script) };
    client.start(quiet(1, "while :; do sleep 1000; done"));
    // Writes for three times as long as it may be silent.
    client.start(quiet(2, "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo $i; sleep 0.1; done"));
    let outcomes = client.finish_all(&[1, 2]);
    assert_eq!(outcomes[&Handle(1)].cause(), EndCause::IdleTimeout);
    assert_eq!(outcomes[&Handle(1)].status(), ExitStatus::Signal(15));
    assert_eq!(outcomes[&Handle(2)].cause(), EndCause::Itself);
    assert_eq!(outcomes[&Handle(2)].status(), ExitStatus::Code(0));
}

#[test]
fn a_command_that_waits_for_the_daemon_is_not_silent() {
    let guest = Guest::start(Mode::Walk);
    let mut client = guest.connect();
    let flood = argv(1, &["head", "-c", "3000000", "/dev/zero"]);
    client.start(Start { idle_timeout_ms: Some(50), ..flood });
    // The window is full and the daemon reads nothing, for many times the idle timeout.
    for handle in 2..40 {
        client.start(shell(handle, "sleep 0.02"));
        assert_eq!(end_of(&mut client).0, Handle(handle));
    }
    let mut client = guest.connect();
    client.send(&ToInit::Resume { handle: Handle(1), stdout: 0, stderr: 0 });
    let outcome = client.finish(1);
    assert_eq!((outcome.status(), outcome.stdout.len()), (ExitStatus::Code(0), 3_000_000));
    assert_eq!(outcome.cause(), EndCause::Itself);
}

#[test]
fn signals_reach_the_process_group() {
    in_both_modes(|guest| {
        let mut client = guest.connect();
        until_ready(&mut client, shell(1, "trap 'exit 12' USR1; echo ready; while :; do sleep 0.01; done"));
        client.send(&ToInit::Signal { handle: Handle(1), signal: SIGUSR1 });
        let (_, end) = end_of(&mut client);
        assert_eq!((end.status, end.cause), (ExitStatus::Code(12), EndCause::Itself));
        // Sent together with the start, before the program runs: the signal is delivered when it does.
        client.start(argv(2, &["sleep", "1000"]));
        client.send(&ToInit::Signal { handle: Handle(2), signal: SIGTERM });
        let (_, end) = end_of(&mut client);
        assert_eq!((end.status, end.cause), (ExitStatus::Signal(15), EndCause::Itself));
        client.start(argv(3, &["sleep", "1000"]));
        client.send(&ToInit::Kill { handle: Handle(3) });
        let (_, end) = end_of(&mut client);
        assert_eq!((end.status, end.cause), (ExitStatus::Signal(9), EndCause::Killed));
    });
}

#[test]
fn nothing_inside_can_end_init() {
    in_both_modes(|guest| {
        let mut client = guest.connect();
        client.run(shell(1, "for s in $(seq 1 64); do kill -$s 1; done; exit 0")).assert_printed("");
        // Everything that the guest can see dies, including its own shell.
        let outcome = client.run(shell(2, "kill -9 -1; exit 3"));
        assert!(matches!(outcome.status(), ExitStatus::Signal(9) | ExitStatus::Code(3)), "{outcome:?}");
        client.run(shell(3, "kill -STOP -1; kill -STOP 1; exit 0")).assert_printed("");
        client.run(argv(4, &["echo", "alive"])).assert_printed("alive\n");
    });
}

#[test]
fn orphans_are_reaped() {
    in_both_modes(|guest| {
        let mut client = guest.connect();
        client.run(shell(1, "for i in $(seq 50); do (sleep 0.0$i &) ; done")).assert_printed("");
        let no_zombies =
            "while grep -qs '^State:.Z' /proc/[0-9]*/status || pgrep -x sleep >/dev/null; do :; done";
        client.run(Start { timeout_ms: Some(20_000), ..shell(2, no_zombies) }).assert_printed("");
    });
}

#[test]
fn groups_are_removed_when_the_last_process_is_gone() {
    if !is_root() {
        println!("skipped: this needs a cgroup");
        return;
    }
    let guest = Guest::start(Mode::Groups);
    let mut client = guest.connect();
    for handle in 1..=20 {
        client.run(argv(handle, &["true"])).assert_printed("");
    }
    client.run(argv(21, &["no-such-program"]));
    // The cgroup of the next command is created ahead.
    until_groups_are(&["c22"], &guest, &mut client);
    let fifo = guest.fifo("leftover");
    client
        .run(shell(30, &format!("exec 7>{}; sleep 1000 & echo hi", fifo.path.display())))
        .assert_printed("hi\n");
    // A leftover process keeps its cgroup; the one created ahead for another command is gone.
    until_groups_are(&["c30", "c31"], &guest, &mut client);
    client.send(&ToInit::Kill { handle: Handle(30) });
    fifo.until_released();
    until_groups_are(&["c31"], &guest, &mut client);
}

/// A cgroup is removed when its last process was reaped, which may be a moment after its result.
fn until_groups_are(expected: &[&str], guest: &Guest, client: &mut Client) {
    let deadline = Instant::now() + crate::support::PATIENCE;
    while guest.command_groups() != expected {
        assert!(Instant::now() < deadline, "{:?} are there", guest.command_groups());
        client.sync();
    }
}

#[test]
fn time_that_was_frozen_does_not_count() {
    if !is_root() {
        println!("skipped: this needs a cgroup");
        return;
    }
    let guest = Guest::start(Mode::Groups);
    let mut client = guest.connect();
    let script = "echo ready; i=0; while [ $i -lt 5 ]; do sleep 0.1; i=$((i+1)); done; echo done";
    let start = Start { timeout_ms: Some(2_500), ..shell(1, script) };
    client.start(start);
    while !matches!(client.next(), Event::Data { .. }) {}
    let freeze = guest.group_path().join("cgroup.freeze");
    std::fs::write(&freeze, "1").expect("ours");
    // This waits for time itself to pass: longer than the timeout, by the kernel's clock.
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(3_500) {
        std::thread::park_timeout(Duration::from_millis(100));
    }
    std::fs::write(&freeze, "0").expect("ours");
    let (_, end) = end_of(&mut client);
    assert_eq!((end.status, end.cause), (ExitStatus::Code(0), EndCause::Itself));
}
