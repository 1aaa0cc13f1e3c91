//! What sandboxes use, on the fake host.

use std::time::Duration;

use crate::common::*;
use engine::*;
use runtime::fake::{FakeFailure, FakeStep};
use runtime::{DiskUsage, Usage};
use shoal_engine as engine;

#[tokio::test(flavor = "multi_thread")]
async fn usage_stands_beside_the_limits() {
    let world = World::new().await;
    let sandbox = world.create().await;
    let usage =
        Usage { cpu_time: Duration::from_millis(1500), memory_bytes: 7 << 20, pids: 3, ..Usage::default() };
    world.host.set_usage(sandbox.id, usage);
    world.host.set_disk_bytes(sandbox.id, 4096);
    let command = world.run(sandbox.id, "gate go").await;
    let stats = world.engine.stats(&owner(), sandbox.id).await.expect("statistics");
    assert_eq!((stats.sandbox, stats.state, stats.limits), (sandbox.id, State::Running, sandbox.limits));
    assert_eq!((stats.usage, stats.commands_live), (Some(usage), 1));
    let disk = stats.disk.expect("the first count is waited for");
    assert_eq!(disk.usage, DiskUsage { bytes: 4096, complete: true });
    world.host.open_gate("go");
    command.ended().await;
    let other = Owner::parse("other").expect("an owner");
    let refused = world.engine.stats(&other, sandbox.id).await.expect_err("it is somebody else's");
    assert!(matches!(refused, EngineError::SandboxNotFound { .. }), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_take_long_to_count_hold_nobody_up() {
    let world = World::new().await;
    let sandbox = world.create().await;
    world.host.hold(FakeStep::DiskUsage);
    let stats = world.engine.stats(&owner(), sandbox.id).await.expect("statistics");
    assert!(stats.usage.is_some() && stats.disk.is_none());
    world.host.release(FakeStep::DiskUsage);
    eventually("the count is reported", async || {
        world.engine.stats(&owner(), sandbox.id).await.expect("statistics").disk.is_some()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_count_that_failed_is_tried_again() {
    let world = World::new().await;
    let sandbox = world.create().await;
    world.host.fail(FakeStep::DiskUsage, FakeFailure::Refused, 1);
    let first = world.engine.stats(&owner(), sandbox.id).await.expect("statistics without the count");
    assert!(first.usage.is_some());
    eventually("the count is reported", async || {
        world.engine.stats(&owner(), sandbox.id).await.expect("statistics").disk.is_some()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_hold_an_owners_sandboxes_and_the_machine_holds_all() {
    let world = World::new().await;
    let mut made = Vec::new();
    for _ in 0..5 {
        made.push(world.create().await);
    }
    let theirs = key_of("other", KeyLimits::default());
    world.engine.create(&theirs, SandboxSpec::default(), Wait::Ready).await.expect("it is made");
    let (mut seen, mut cursor) = (Vec::new(), None);
    loop {
        let query = ListQuery { limit: Some(2), cursor, ..ListQuery::default() };
        let page = world.engine.stats_page(&owner(), query).await.expect("statistics");
        seen.extend(page.items.into_iter().map(|stats| stats.sandbox));
        cursor = page.next_cursor;
        if cursor.is_none() {
            break;
        }
    }
    made.reverse();
    assert_eq!(seen, made.iter().map(|sandbox| sandbox.id).collect::<Vec<_>>());
    let machine = world.engine.machine_stats().await.expect("statistics");
    assert_eq!(machine.sandboxes.get("running"), Some(&6));
    assert_eq!(machine.promised.sandboxes, 6);
    assert_eq!(machine.promised.memory_bytes, 6 * made[0].limits.memory_bytes);
}
