//! Changes of policy and limits while connections are open.

use std::sync::Arc;

use egress::control::{Record, What};
use egress::limits::Limits;
use egress::policy::Mode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::harness::{Echo, Guest, World, exchange, rules, start, store, until};

#[tokio::test]
async fn a_connection_that_loses_its_rule_is_cut_and_others_go_on() {
    let world = World::new().await;
    let echo = Echo::new().await;
    let (process, egress, records) = start(&world).await;
    let egress = Arc::new(egress);
    let kept = store(&egress, records);
    let guest = Guest::new(1, process.pool, &[echo.port]).await;
    egress
        .attach(
            guest.attach(rules(Mode::None, &["allow a.example", "allow b.example"])),
            &guest.descriptors(),
        )
        .await
        .expect("attached");
    let mut lost = guest.connect("a.example", echo.port).await;
    let mut kept_open = guest.connect("b.example", echo.port).await;
    for stream in [&mut lost, &mut kept_open] {
        stream.write_all(b"\0x").await.expect("written");
        let mut back = [0; 2];
        stream.read_exact(&mut back).await.expect("an echo");
    }
    egress.set_policy(guest.id, rules(Mode::None, &["allow b.example"])).await.expect("changed");
    let ended = lost.read(&mut [0; 10]).await;
    assert_eq!(ended.expect_err("a reset, not an end").kind(), std::io::ErrorKind::ConnectionReset);
    kept_open.write_all(b"y").await.expect("written");
    let mut back = [0; 1];
    kept_open.read_exact(&mut back).await.expect("an echo");
    // The address of the lost name is still known, and leads nowhere.
    exchange(
        tokio::net::TcpStream::connect((process.pool.of_name(0).0, echo.port)).await.expect("accepted"),
        b"\0",
    )
    .await
    .expect_err("reset");
    assert_eq!(guest.look_up("a.example").await, Ok(process.pool.refused().0.into()));
    let cut = |record: &Record| matches!(record, Record::Event(event) if event.what == What::Cut);
    until("the cut is recorded", || kept.lock().expect("a lock").iter().any(cut)).await;
}

#[tokio::test]
async fn detach_leaves_nothing_open() {
    let world = World::new().await;
    let echo = Echo::new().await;
    let (process, egress, records) = start(&world).await;
    let egress = Arc::new(egress);
    store(&egress, records);
    let mut guest = Guest::new(1, process.pool, &[echo.port]).await;
    egress.attach(guest.attach(rules(Mode::Open, &[])), &guest.descriptors()).await.expect("attached");
    let mut stream = guest.connect("a.example", echo.port).await;
    stream.write_all(b"\0").await.expect("written");
    stream.read_exact(&mut [0]).await.expect("an echo");
    guest.listeners.clear();
    let totals = egress.detach(guest.id).await.expect("detached");
    assert_eq!((totals.sent, totals.received, totals.connections), (1, 1, 1));
    stream.read(&mut [0; 10]).await.expect_err("cut");
    let again = tokio::net::TcpStream::connect((process.pool.of_name(0).0, echo.port)).await;
    assert_eq!(again.expect_err("nobody listens").kind(), std::io::ErrorKind::ConnectionRefused);
    let sockets = std::fs::read_dir(format!("/proc/{}/fd", process.child.id()));
    // A process that is not dumpable shows its descriptors to root alone.
    if let Ok(sockets) = sockets {
        assert!(sockets.count() < 30, "descriptors are left");
    }
    assert_eq!(egress.detach(guest.id).await.expect("harmless").sent, 0);
}

#[tokio::test]
async fn detach_does_not_wait_for_a_resolver_that_is_silent() {
    let world = World::new().await;
    let (process, egress, records) = start(&world).await;
    let egress = Arc::new(egress);
    store(&egress, records);
    let guest = Guest::new(1, process.pool, &[]).await;
    egress.attach(guest.attach(rules(Mode::Open, &[])), &guest.descriptors()).await.expect("attached");
    let looking = guest.look_up("silent.example");
    tokio::pin!(looking);
    let asked = until("it is asked", || {
        world.asked.lock().expect("a lock").iter().any(|name| name == "silent.example.")
    });
    tokio::select! {
        () = asked => {}
        answer = &mut looking => panic!("answered: {answer:?}"),
    }
    let detached = tokio::time::timeout(std::time::Duration::from_secs(2), egress.detach(guest.id)).await;
    detached.expect("at once").expect("detached");
}

#[tokio::test]
async fn limits_on_connections_hold() {
    let world = World::new().await;
    let echo = Echo::new().await;
    let (process, egress, records) = start(&world).await;
    let egress = Arc::new(egress);
    store(&egress, records);
    let guest = Guest::new(1, process.pool, &[echo.port]).await;
    let mut attach = guest.attach(rules(Mode::Open, &[]));
    attach.limits = Limits { connections_max: 2, ..Limits::default() };
    egress.attach(attach, &guest.descriptors()).await.expect("attached");
    let mut open = Vec::new();
    for _ in 0..2 {
        let mut stream = guest.connect("a.example", echo.port).await;
        stream.write_all(b"\0").await.expect("written");
        stream.read_exact(&mut [0]).await.expect("an echo");
        open.push(stream);
    }
    let one_too_many = async {
        // The reset may come before the connection is looked at.
        let stream = tokio::net::TcpStream::connect((process.pool.of_name(0).0, echo.port)).await?;
        exchange(stream, b"\0").await
    };
    one_too_many.await.expect_err("one too many");
    egress.set_limits(guest.id, Limits { connections_max: 3, ..Limits::default() }).await.expect("changed");
    let mut third = guest.connect("a.example", echo.port).await;
    third.write_all(b"\0").await.expect("written");
    third.read_exact(&mut [0]).await.expect("an echo");
}
