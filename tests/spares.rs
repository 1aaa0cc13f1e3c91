//! Spares, sandboxes that are ready before a request: each is given out once, they end with the daemon, and are never
//! in the way.

use std::collections::BTreeSet;
use std::fs;

use serde_json::{Value, json};
use shoal_tests::Daemon;
use shoal_tests::daemon::{Spawn, kill_hard};
use shoal_tests::wait::until_true;

const SPARES: usize = 3;

fn with_spares() -> Daemon {
    let daemon = Spawn { spares: SPARES, ..Spawn::default() }.start();
    until_ready(&daemon);
    daemon
}

/// Sandboxes on the disk, with or without rows.
fn on_disk(daemon: &Daemon) -> BTreeSet<String> {
    let entries = fs::read_dir(daemon.data_dir.join("sandboxes")).expect("the directory is there");
    entries.map(|entry| entry.expect("it can be read").file_name().to_string_lossy().into_owned()).collect()
}

/// Those without a request.
fn spares(daemon: &Daemon) -> BTreeSet<String> {
    let known: BTreeSet<String> =
        daemon.list().iter().map(|sandbox| sandbox["id"].as_str().expect("an id").to_owned()).collect();
    on_disk(daemon).difference(&known).cloned().collect()
}

/// Asserts that the configured number exists, each with an init.
#[track_caller]
fn until_ready(daemon: &Daemon) {
    until_true("all spares are ready", || {
        let spares = spares(daemon);
        spares.len() == SPARES && spares.iter().all(|id| !daemon.sandbox_of(id).processes().is_empty())
    });
}

#[test]
fn a_create_takes_one_that_stands_ready_and_another_takes_its_place() {
    let daemon = with_spares();
    let before = spares(&daemon);
    let sandbox = daemon.sandbox();
    assert!(before.contains(&sandbox.id), "{} was not among {before:?}", sandbox.id);
    assert_eq!(sandbox.sh("pwd; echo x > /usr/local/x; cat /usr/local/x").ok().text(), "/workspace\nx");
    until_ready(&daemon);
    assert!(!spares(&daemon).contains(&sandbox.id));
    sandbox.delete();
    until_ready(&daemon);
}

#[test]
fn none_is_seen_before_it_is_asked_for() {
    let daemon = with_spares();
    assert_eq!(daemon.list(), [] as [Value; 0]);
    for id in spares(&daemon) {
        let path = format!("/v1/sandboxes/{id}");
        daemon.get(&path).expect(404);
        daemon.post(&format!("{path}/commands"), &json!({"argv": ["true"]})).expect(404);
        daemon.delete(&path).expect(404);
    }
    until_ready(&daemon);
}

#[test]
fn no_two_callers_get_the_same() {
    let daemon = with_spares();
    let made: Vec<String> = std::thread::scope(|scope| {
        let callers: Vec<_> = (0..20).map(|_| scope.spawn(|| daemon.sandbox().id)).collect();
        callers.into_iter().map(|caller| caller.join().expect("it was made")).collect()
    });
    assert_eq!(made.iter().collect::<BTreeSet<_>>().len(), 20);
    for id in &made {
        let sandbox = daemon.sandbox_of(id);
        assert_eq!(sandbox.sh("echo once >> /workspace/f; cat /workspace/f").ok().text(), "once");
    }
    until_ready(&daemon);
}

#[test]
fn other_limits_than_theirs_are_honoured() {
    let daemon = with_spares();
    let before = spares(&daemon);
    let sandbox = daemon.sandbox_with(json!({"memory": "64Mi", "cpu": "500m"}));
    assert!(!before.contains(&sandbox.id), "a spare has other limits");
    let filled = sandbox.sh("python3 -c \"x = bytearray(200 << 20)\"");
    assert_eq!(filled.outcome(), "out_of_memory", "200 MiB do not fit into 64");
}

#[test]
fn one_that_died_is_not_given_out() {
    let daemon = with_spares();
    for id in spares(&daemon) {
        for process in daemon.sandbox_of(&id).processes() {
            kill_hard(process);
        }
        until_true("its init is gone", || daemon.sandbox_of(&id).processes().is_empty());
    }
    for _ in 0..SPARES + 1 {
        assert_eq!(daemon.sandbox().sh("echo alive").ok().text(), "alive");
    }
}

#[test]
fn they_go_when_the_daemon_ends_and_stay_out_of_the_way_when_it_is_killed() {
    let mut daemon = with_spares();
    let sandbox = daemon.sandbox();
    until_ready(&daemon);
    let before = spares(&daemon);
    daemon.kill();
    daemon.start_again();
    until_true("those of the daemon before are gone", || spares(&daemon).is_disjoint(&before));
    until_ready(&daemon);
    assert_eq!(daemon.sandbox_of(&sandbox.id).sh("echo alive").ok().text(), "alive");
    assert!(daemon.stop());
    assert_eq!(on_disk(&daemon), BTreeSet::from([sandbox.id]), "only requested sandboxes are left");
}

#[test]
fn the_launcher_may_die_beside_them() {
    let daemon = with_spares();
    daemon.launchers().into_iter().for_each(kill_hard);
    for _ in 0..SPARES + 1 {
        assert_eq!(daemon.sandbox().sh("echo alive").ok().text(), "alive");
    }
    until_ready(&daemon);
}
