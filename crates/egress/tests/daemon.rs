//! Daemons that come and go, and an egress that takes over from another.

use std::sync::Arc;

use egress::control::Egress;
use egress::policy::Mode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::harness::{Echo, Guest, World, name, rules, start, start_in, store, until};

#[tokio::test]
async fn egress_is_confined() {
    let world = World::new().await;
    let (process, _egress, _records) = start(&world).await;
    // The main thread of the test executable is not egress's; the threads that serve have its name.
    let threads = || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", process.child.id())).expect("threads");
        let statuses =
            tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("status")).ok());
        statuses.filter(|status| status.starts_with("Name:\tegress\n")).collect::<Vec<_>>()
    };
    until("its threads have their names", || threads().len() >= 2).await;
    for status in threads() {
        for line in
            ["NoNewPrivs:\t1", "Seccomp:\t2", "CapEff:\t0000000000000000", "CapPrm:\t0000000000000000"]
        {
            assert!(status.contains(line), "{line} in {status}");
        }
        if let Some(identity) = process.identity {
            let (uid, gid) = (identity.uid, identity.gid);
            assert!(status.contains(&format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n")), "{status}");
            assert!(status.contains(&format!("Gid:\t{gid}\t{gid}\t{gid}\t{gid}\n")), "{status}");
        }
    }
}

#[tokio::test]
async fn connections_survive_a_daemon_that_goes() {
    let world = World::new().await;
    let echo = Echo::new().await;
    let (process, egress, records) = start(&world).await;
    let egress = Arc::new(egress);
    store(&egress, records);
    let guest = Guest::new(1, process.pool, &[echo.port]).await;
    egress
        .attach(guest.attach(rules(Mode::None, &["allow a.example"])), &guest.descriptors())
        .await
        .expect("attached");
    let mut stream = guest.connect("a.example", echo.port).await;
    stream.write_all(b"\0").await.expect("written");
    stream.read_exact(&mut [0]).await.expect("an echo");
    drop(egress);
    stream.write_all(b"\0").await.expect("written");
    stream.read_exact(&mut [0]).await.expect("an echo without a daemon");
    let (egress, _records) = Egress::connect(process.directory.path()).await.expect("the next daemon");
    egress.check_version().expect("the same version");
    egress.set_policy(guest.id, rules(Mode::None, &[])).await.expect("changed");
    stream.read(&mut [0]).await.expect_err("the next daemon is obeyed");
}

#[tokio::test]
async fn a_new_egress_takes_over_and_the_old_one_drains() {
    let world = World::new().await;
    let echo = Echo::new().await;
    let (mut old, egress, records) = start(&world).await;
    let egress = Arc::new(egress);
    store(&egress, records);
    let mut guest = Guest::new(1, old.pool, &[echo.port]).await;
    egress
        .attach(guest.attach(rules(Mode::None, &["allow a.example"])), &guest.descriptors())
        .await
        .expect("attached");
    let mut stream = guest.connect("a.example", echo.port).await;
    stream.write_all(b"\0").await.expect("written");
    stream.read_exact(&mut [0]).await.expect("an echo");
    // The daemon has no copies of its own: the old egress gives its listeners.
    guest.listeners.clear();
    guest.listeners = egress.listeners(guest.id).await.expect("listeners");
    let (new, next, records) = start_in(&world, old.directory.clone(), old.pool).await;
    assert_eq!(new.ca_pem, old.ca_pem, "one authority");
    let next = Arc::new(next);
    store(&next, records);
    egress.drain(60).await.expect("draining");
    let mut attach = guest.attach(rules(Mode::None, &["allow a.example"]));
    attach.names = vec![name("a.example")];
    next.attach(attach, &guest.descriptors()).await.expect("attached");
    let mut fresh =
        tokio::net::TcpStream::connect((old.pool.of_name(0).0, echo.port)).await.expect("accepted");
    fresh.write_all(b"\0").await.expect("written");
    fresh.read_exact(&mut [0]).await.expect("the new one serves");
    stream.write_all(b"\0").await.expect("written");
    stream.read_exact(&mut [0]).await.expect("the old one lets its connection go on");
    drop(stream);
    until("the old one exits", || old.child.try_wait().expect("a status").is_some()).await;
}

#[tokio::test]
async fn a_policy_of_ten_thousand_rules_arrives() {
    let world = World::new().await;
    let (process, egress, records) = start(&world).await;
    let egress = Arc::new(egress);
    store(&egress, records);
    let guest = Guest::new(1, process.pool, &[]).await;
    egress.attach(guest.attach(rules(Mode::None, &[])), &guest.descriptors()).await.expect("attached");
    let texts: Vec<String> = (0..10_000).map(|at| format!("allow host{at}.example")).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    egress.set_policy(guest.id, rules(Mode::None, &texts)).await.expect("changed");
    assert_eq!(guest.look_up("host9999.example").await, Ok(process.pool.of_name(0).0.into()));
}

#[tokio::test]
async fn an_unknown_sandbox_is_a_failure_in_words() {
    let world = World::new().await;
    let (_process, egress, _records) = start(&world).await;
    let id = crate::harness::sandbox(9);
    let error = egress.set_policy(id, rules(Mode::None, &[])).await.expect_err("not attached");
    let cause = std::error::Error::source(&error).expect("a cause").to_string();
    assert!(cause.contains("is not attached"), "{cause}");
}
