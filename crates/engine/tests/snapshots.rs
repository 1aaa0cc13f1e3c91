//! Captures of sandboxes that run: they go on afterwards whatever failed, and nothing is left of what nobody wants any more.

use crate::common::*;
use engine::snapshot::{Snapshot, SnapshotSpec, SnapshotState};
use engine::template::TemplateSpec;
use engine::*;
use runtime::fake::{FakeFailure, FakeStep};
use shoal_engine as engine;
use wire::SandboxId;

/// As many of one owner unpack at the same time.
const UNPACKS_MAX: usize = 2;

async fn capture(world: &World, sandbox: SandboxId, name: &str) -> Snapshot {
    let template = TemplateSpec::default();
    let spec = SnapshotSpec {
        name: name.into(),
        tags: Vec::new(),
        template,
        note: String::new(),
        labels: Default::default(),
    };
    world.engine.capture_snapshot(&key(), sandbox, spec).await.expect("it is begun")
}

async fn settled(world: &World, id: &str) -> SnapshotState {
    let mut state = SnapshotState::Building;
    eventually("it is made or not", async || {
        state = world.engine.snapshot(&owner(), id).await.expect("it is there").state;
        state != SnapshotState::Building
    })
    .await;
    state
}

fn is_still(world: &World, sandbox: SandboxId) -> bool {
    world.host.frozen().0.contains(&sandbox)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_goes_on_whatever_fails() {
    let world = World::without_snapshots().await;
    let sandbox = world.create().await.id;
    for (step, made) in [(FakeStep::Still, false), (FakeStep::Unpack, false), (FakeStep::Going, true)] {
        world.host.fail(step, FakeFailure::Refused, 1);
        let id = capture(&world, sandbox, "it").await.id;
        let state = settled(&world, &id).await;
        assert_eq!(state == SnapshotState::Ready, made, "{step:?}: {state:?}");
        assert!(!is_still(&world, sandbox), "it stands still after {step:?} failed");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_waits_for_its_turn_is_not_held_up_and_two_captures_of_one_do_not_meet() {
    let world = World::without_snapshots().await;
    world.host.hold(FakeStep::Unpack);
    let mut ids = Vec::new();
    for _ in 0..UNPACKS_MAX {
        let sandbox = world.create().await.id;
        // The fake host would not let it stand still for both.
        for _ in 0..2 {
            ids.push(capture(&world, sandbox, "busy").await.id);
        }
    }
    eventually("all places are taken", async || world.host.frozen().0.len() == UNPACKS_MAX).await;
    let waits = world.create().await.id;
    ids.push(capture(&world, waits, "waits").await.id);
    let command = world.run(waits, "echo still here").await;
    assert_eq!(outcome(&command.ended().await), Outcome::Exited(0));
    assert!(!is_still(&world, waits));
    world.host.release(FakeStep::Unpack);
    for id in ids {
        assert_eq!(settled(&world, &id).await, SnapshotState::Ready);
    }
    assert_eq!(world.host.frozen(), (Vec::new(), UNPACKS_MAX));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_is_deleted_while_it_is_captured_leaves_nothing() {
    let world = World::without_snapshots().await;
    let sandbox = world.create().await.id;
    world.host.hold(FakeStep::Unpack);
    let id = capture(&world, sandbox, "gone").await.id;
    eventually("it stands still", async || is_still(&world, sandbox)).await;
    world.engine.delete_snapshot(&owner(), &id).await.expect("it is deleted");
    world.host.release(FakeStep::Unpack);
    eventually("it goes on", async || !is_still(&world, sandbox)).await;
    eventually("no template is left of it", async || {
        world.engine.collect_images().await.expect("collected");
        let left = world.engine.snapshots(&owner()).await.expect("a list");
        left.is_empty() && world.engine.images(&owner()).is_empty() && world.host.layers_there().is_empty()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_capture_that_a_crash_interrupts_has_failed_and_its_sandbox_goes_on() {
    let world = World::without_snapshots().await;
    let sandbox = world.create().await.id;
    world.host.hold(FakeStep::Unpack);
    let id = capture(&world, sandbox, "cut").await.id;
    eventually("it stands still", async || is_still(&world, sandbox)).await;
    let world = world.crash().await;
    let SnapshotState::Failed { reason } = settled(&world, &id).await else { panic!("it was cut off") };
    assert!(reason.contains("make it again"), "{reason}");
    assert!(!is_still(&world, sandbox));
    world.host.release(FakeStep::Unpack);
    let id = capture(&world, sandbox, "cut").await.id;
    assert_eq!(settled(&world, &id).await, SnapshotState::Ready);
}
