//! Installations on one machine never touch each other, and none leaves anything behind.

use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use shoal_tests::{Daemon, Sandbox};

/// One life of a sandbox, with a little of everything in it.
fn cycle(daemon: &Daemon, round: u32) {
    let sandbox = daemon.sandbox();
    let done = sandbox.sh(&format!(
        "echo {round} > /workspace/f; (setsid sleep 1000 &); cat /workspace/f; echo x > /dev/shm/x"
    ));
    assert_eq!(done.ok().text(), round.to_string());
    if round.is_multiple_of(3) {
        sandbox.spawn(json!({"argv": ["sleep", "1000"]}));
    }
    if round.is_multiple_of(5) {
        sandbox.sh("mkdir -p /usr/local/a/b; echo y > /usr/local/a/b/c; rm -f /usr/bin/yes").ok();
    }
    sandbox.delete();
}

#[test]
fn leak_audit_after_some_hundred_lives() {
    let daemon = Daemon::start();
    // The first lives fill caches that are kept on purpose: slots, images, pooled descriptors.
    for round in 0..20 {
        cycle(&daemon, round);
    }
    let before = daemon.audit();
    let (descriptors, namespaces) = (daemon.scope().descriptors(), daemon.scope().network_namespaces().len());
    std::thread::scope(|scope| {
        for worker in 0..3 {
            let daemon = &daemon;
            scope.spawn(move || (0..100).for_each(|round| cycle(daemon, worker * 1000 + round)));
        }
    });
    daemon.expect_nothing_beyond(&before);
    assert_eq!(daemon.list(), [] as [Value; 0]);
    let after = (daemon.scope().descriptors(), daemon.scope().network_namespaces().len());
    assert!(after.0 <= descriptors + 64, "descriptors went from {descriptors} to {}", after.0);
    assert!(after.1 <= namespaces + 16, "network namespaces went from {namespaces} to {}", after.1);
}

#[test]
fn a_stopped_daemon_without_sandboxes_leaves_only_its_data() {
    let mut daemon = Daemon::start();
    for round in 0..5 {
        cycle(&daemon, round);
    }
    assert!(daemon.stop());
    let scope = daemon.scope();
    shoal_tests::wait::until_true("launcher and all are gone", || scope.processes().is_empty());
    assert_eq!(scope.mounts(), [] as [std::path::PathBuf; 0]);
    let groups: Vec<_> = scope
        .cgroups()
        .into_iter()
        .filter(|group| group.to_string_lossy().matches('-').count() > 2)
        .collect();
    assert_eq!(groups, [] as [std::path::PathBuf; 0], "groups of sandboxes are left");
}

#[test]
fn two_daemons_side_by_side_never_touch_each_other() {
    // A short interval, so that both sweep all the time.
    let (mut one, two) = (Daemon::start(), Daemon::start());
    let keepers: Vec<(Sandbox, String)> = [&one, &two]
        .into_iter()
        .flat_map(|daemon| {
            (0..3).map(|n| {
                let sandbox = daemon.sandbox_with(json!({"name": format!("keeper-{n}")}));
                sandbox.sh("echo kept > /workspace/kept").ok();
                let command = sandbox.spawn(json!({"argv": ["sleep", "100000"]}));
                sandbox.running(&command);
                (sandbox, command)
            })
        })
        .collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Threads of `two` continue while `one` is killed and started, each start being a full sweep.
        for worker in 0..2 {
            let (two, stop) = (&two, &stop);
            scope.spawn(move || {
                let mut round = worker * 10_000;
                while !stop.load(Ordering::Relaxed) {
                    cycle(two, round);
                    round += 1;
                }
            });
        }
        for _ in 0..6 {
            for round in 0..3 {
                cycle(&one, round);
            }
            one.crash();
        }
        stop.store(true, Ordering::Relaxed);
    });
    for (sandbox, command) in keepers {
        let daemon = if two.scope().installation == sandbox.scope.installation { &two } else { &one };
        let sandbox = daemon.sandbox_of(&sandbox.id);
        assert_eq!(sandbox.get()["state"], "running");
        assert_eq!(sandbox.command(&command)["state"], "running");
        assert_eq!(sandbox.sh("cat /workspace/kept").ok().text(), "kept");
    }
    assert_eq!(one.list().len(), 3);
    assert_eq!(two.list().len(), 3);
}

#[test]
fn an_orphan_that_no_row_knows_is_swept_at_the_next_start() {
    let mut daemon = Daemon::start();
    daemon.sandbox().delete();
    let kept = daemon.sandbox();
    daemon.kill();
    // What a crash between creating and recording could leave: a cgroup and a directory without a row.
    let scope = daemon.scope();
    let installation = scope.installation.clone().expect("it has one");
    let orphan = "11111111-1111-4111-8111-111111111111";
    let parent = scope
        .cgroups()
        .into_iter()
        .find(|group| group.ends_with(format!("shoal-{installation}")))
        .expect("the installation has a group");
    std::fs::create_dir(parent.join(orphan)).expect("a group can be made");
    std::fs::create_dir_all(daemon.data_dir.join("sandboxes").join(orphan).join("fs/root/deep"))
        .expect("a directory can be made");
    daemon.start_again();
    shoal_tests::wait::until_true("the orphan is gone", || {
        !parent.join(orphan).exists() && !daemon.data_dir.join("sandboxes").join(orphan).exists()
    });
    assert_eq!(daemon.sandbox_of(&kept.id).sh("echo kept").ok().text(), "kept");
}
