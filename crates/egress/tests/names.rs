//! Names and their places.

use std::sync::Arc;
use std::time::Duration;

use egress::control::Record;
use egress::policy::Mode;
use hickory_proto::op::ResponseCode;

use crate::harness::{Echo, Guest, World, name, rules, start, store, until};

#[tokio::test]
async fn a_name_is_answered_only_after_the_daemon_has_stored_it() {
    let world = World::new().await;
    let (process, egress, mut records) = start(&world).await;
    let guest = Guest::new(1, process.pool, &[]).await;
    egress
        .attach(guest.attach(rules(Mode::None, &["allow a.example"])), &guest.descriptors())
        .await
        .expect("attached");
    let looking = guest.look_up("a.example");
    tokio::pin!(looking);
    let (sequence, record) = tokio::select! {
        record = records.recv() => record.expect("a record"),
        answer = &mut looking => panic!("answered before it was stored: {answer:?}"),
    };
    assert_eq!(record, Record::Name { sandbox: guest.id, place: 0, name: name("a.example") });
    let early = tokio::time::timeout(Duration::from_millis(100), &mut looking).await;
    assert!(early.is_err(), "not acknowledged yet");
    egress.acknowledge(sequence).await.expect("acknowledged");
    assert_eq!(looking.await, Ok(process.pool.of_name(0).0.into()));
    assert_eq!(
        guest.look_up("a.example").await,
        Ok(process.pool.of_name(0).0.into()),
        "known names need no daemon"
    );
}

#[tokio::test]
async fn refused_names_are_never_asked_upstream_and_lead_to_the_page() {
    let world = World::new().await;
    let (process, egress, records) = start(&world).await;
    let egress = Arc::new(egress);
    let kept = store(&egress, records);
    let guest = Guest::new(1, process.pool, &[]).await;
    egress
        .attach(guest.attach(rules(Mode::None, &["allow a.example"])), &guest.descriptors())
        .await
        .expect("attached");
    assert_eq!(guest.look_up("secret.evil.example").await, Ok(process.pool.refused().0.into()));
    assert_eq!(guest.look_up("host").await, Err(ResponseCode::NXDomain));
    assert!(world.asked.lock().expect("a lock").is_empty(), "nothing was asked");
    let refused = |record: &Record| matches!(record, Record::Event(event) if event.name == Some(name("secret.evil.example")));
    until("the refusal is recorded", || kept.lock().expect("a lock").iter().any(refused)).await;
    let opens = kept.lock().expect("a lock").iter().find_map(|record| match record {
        Record::Event(event) => event.opens.clone(),
        _ => None,
    });
    assert_eq!(opens.as_deref(), Some("secret.evil.example"));
}

#[tokio::test]
async fn names_go_to_disk_while_no_daemon_is_there() {
    let world = World::new().await;
    let echo = Echo::new().await;
    let (process, egress, records) = start(&world).await;
    let guest = Guest::new(1, process.pool, &[echo.port]).await;
    egress
        .attach(guest.attach(rules(Mode::None, &["allow *.example"])), &guest.descriptors())
        .await
        .expect("attached");
    drop((egress, records));
    let address = guest.look_up("a.example").await.expect("egress goes on");
    assert_eq!(address, process.pool.of_name(0).0);
    let (egress, mut records) =
        egress::control::Egress::connect(process.directory.path()).await.expect("the next daemon");
    assert_eq!(egress.greeting().attached, [guest.id]);
    let (sequence, record) = records.recv().await.expect("a record");
    assert_eq!(record, Record::Name { sandbox: guest.id, place: 0, name: name("a.example") });
    assert!(egress.status().await.expect("a status").spool_bytes > 0);
    egress.acknowledge(sequence).await.expect("acknowledged");
    // Requests are served in order, so the acknowledgement has been seen.
    assert_eq!(egress.status().await.expect("a status").spool_bytes, 0);
}
