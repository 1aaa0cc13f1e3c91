//! The driver is the only owner of a sandbox: it finishes or undoes what a crash interrupted, it alone freezes and ends processes,
//! and captures and builds ask it.

use std::path::Path;
use std::time::Duration;

use crate::common::*;
use engine::snapshot::{SnapshotSpec, SnapshotState};
use engine::template::TemplateSpec;
use engine::*;
use runtime::Isolation;
use runtime::fake::{FakeStep, FakeThing};
use rusqlite::Connection;
use shoal_engine as engine;
use wire::SandboxId;
use wire::launch::Motion;

/// The words of a state and of a goal in a row, each with what it keeps.
type Words = (&'static str, &'static str);

/// Stops the engine, writes into the row what a daemon that died in the middle leaves there, and starts the next engine.
async fn found(world: World, sandbox: SandboxId, state: Words, goal: Words) -> World {
    world.engine.stop().await;
    write(world.directory.path(), sandbox, state, goal);
    world.crash().await
}

fn write(directory: &Path, sandbox: SandboxId, state: Words, goal: Words) {
    let db = Connection::open(directory.join("shoal.db")).expect("a database");
    let kept = Some(goal.1).filter(|kept| !kept.is_empty());
    let changed = db
        .execute(
            "UPDATE sandboxes SET state = ?1, detail = ?2, goal = ?3, goal_kept = ?4 WHERE id = ?5",
            (state.0, state.1, goal.0, kept, sandbox.bits().to_be_bytes()),
        )
        .expect("the row can be changed");
    assert_eq!(changed, 1);
}

async fn state(world: &World, sandbox: SandboxId) -> State {
    world.engine.get(&owner(), sandbox).await.expect("it is there").state
}

async fn becomes(world: &World, sandbox: SandboxId, expected: State) {
    eventually(&format!("it is {expected:?}"), async || state(world, sandbox).await == expected).await;
}

fn is_frozen(world: &World, sandbox: SandboxId) -> bool {
    world.host.frozen().0.contains(&sandbox)
}

fn things(world: &World, sandbox: SandboxId) -> Vec<FakeThing> {
    let left = world.host.leftovers().into_iter();
    left.filter(|(id, _)| *id == sandbox).map(|(_, thing)| thing).collect()
}

async fn freeze(world: &World, sandbox: SandboxId) {
    world.host.freeze(sandbox, Motion::Still).await.expect("the fake host freezes it");
}

async fn runs_commands(world: &World, sandbox: SandboxId) {
    let ended = world.run(sandbox, "echo on").await.ended().await;
    assert_eq!(outcome(&ended), Outcome::Exited(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_that_a_crash_interrupts_is_finished() {
    let world = World::new().await;
    let (frozen, dropped) = (world.create().await.id, world.create().await.id);
    let hanging = world.run_as(dropped, "hanging", "hang").await;
    let world = found(world, frozen, ("running", ""), ("paused", "frozen")).await;
    becomes(&world, frozen, State::Paused(Kept::Frozen)).await;
    let world = found(world, dropped, ("running", ""), ("paused", "dropped")).await;
    drop(hanging);
    assert!(is_frozen(&world, frozen));
    becomes(&world, dropped, State::Paused(Kept::Dropped)).await;
    assert_eq!(things(&world, dropped), [FakeThing::Disk], "its processes are gone, its files are not");
    let hanging = world.command(dropped, "hanging").await.ended().await;
    assert_eq!(outcome(&hanging), Outcome::SandboxGone);
    // Asked again by another start, nothing changes.
    let world = world.crash().await;
    assert_eq!(state(&world, frozen).await, State::Paused(Kept::Frozen));
    assert_eq!(state(&world, dropped).await, State::Paused(Kept::Dropped));
    for sandbox in [frozen, dropped] {
        world.engine.delete(&owner(), sandbox).await.expect("a paused sandbox can be deleted");
    }
    assert_eq!(world.host.leftovers(), []);
}

/// What the goal keeps is not what the state keeps. The goal used to be read as if it kept what the state does.
#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_sandbox_that_should_keep_only_its_files_does_so_after_a_crash() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    freeze(&world, sandbox).await;
    let world = found(world, sandbox, ("paused", "frozen"), ("paused", "dropped")).await;
    becomes(&world, sandbox, State::Paused(Kept::Dropped)).await;
    assert_eq!(things(&world, sandbox), [FakeThing::Disk]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resume_that_a_crash_interrupts_is_finished_or_undone() {
    let world = World::new().await;
    let (frozen, dropped) = (world.create().await.id, world.create().await.id);
    freeze(&world, frozen).await;
    let world = found(world, frozen, ("paused", "frozen"), ("running", "")).await;
    becomes(&world, frozen, State::Running).await;
    assert!(!is_frozen(&world, frozen));
    runs_commands(&world, frozen).await;

    // The processes are those of a resume that did not finish. Its files are what they were before, so it stays paused.
    let world = found(world, dropped, ("paused", "dropped"), ("running", "")).await;
    eventually("its processes are ended", async || things(&world, dropped) == [FakeThing::Disk]).await;
    assert_eq!(state(&world, dropped).await, State::Paused(Kept::Dropped));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_that_had_not_saved_the_memory_is_undone() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    freeze(&world, sandbox).await;
    let world = found(world, sandbox, ("running", ""), ("paused", "saved")).await;
    eventually("it runs", async || !is_frozen(&world, sandbox)).await;
    assert_eq!(state(&world, sandbox).await, State::Running);
    runs_commands(&world, sandbox).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delete_is_finished_whatever_the_state_was() {
    for words in [("creating", ""), ("running", ""), ("paused", "frozen"), ("failed", "whole")] {
        let world = World::new().await;
        let sandbox = world.create().await.id;
        let world = found(world, sandbox, words, ("gone", "")).await;
        eventually("it is gone", async || world.engine.get(&owner(), sandbox).await.is_err()).await;
        eventually("nothing is left", async || world.host.leftovers().is_empty()).await;
    }
}

async fn capture(world: &World, sandbox: SandboxId) -> String {
    let template = TemplateSpec::default();
    let spec = SnapshotSpec {
        name: "it".into(),
        tags: Vec::new(),
        template,
        note: String::new(),
        labels: Default::default(),
    };
    world.engine.capture_snapshot(&key(), sandbox, spec).await.expect("it is begun").id
}

async fn captured(world: &World, id: &str) -> SnapshotState {
    let mut state = SnapshotState::Building;
    eventually("it is captured or not", async || {
        state = world.engine.snapshot(&owner(), id).await.expect("it is there").state;
        state != SnapshotState::Building
    })
    .await;
    state
}

#[tokio::test(flavor = "multi_thread")]
async fn a_capture_of_a_paused_sandbox_does_not_resume_it() {
    let world = World::new().await;
    let (frozen, dropped) = (world.create().await.id, world.create().await.id);
    freeze(&world, frozen).await;
    let world = found(world, frozen, ("paused", "frozen"), ("paused", "frozen")).await;
    let world = found(world, dropped, ("running", ""), ("paused", "dropped")).await;
    becomes(&world, dropped, State::Paused(Kept::Dropped)).await;
    for (sandbox, kept) in [(frozen, Kept::Frozen), (dropped, Kept::Dropped)] {
        let id = capture(&world, sandbox).await;
        assert_eq!(captured(&world, &id).await, SnapshotState::Ready);
        assert_eq!(state(&world, sandbox).await, State::Paused(kept));
    }
    assert!(is_frozen(&world, frozen));

    // Nor does a daemon that finds a capture of a paused sandbox which another daemon did not finish.
    world.host.hold(FakeStep::TakeSnapshot);
    let id = capture(&world, frozen).await;
    let world = world.crash().await;
    assert!(matches!(captured(&world, &id).await, SnapshotState::Failed { .. }));
    assert!(is_frozen(&world, frozen));
    assert_eq!(state(&world, frozen).await, State::Paused(Kept::Frozen));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_capture_fails_whose_sandbox_is_deleted_meanwhile() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    world.host.hold(FakeStep::TakeSnapshot);
    let id = capture(&world, sandbox).await;
    eventually("it is frozen", async || is_frozen(&world, sandbox)).await;
    world.engine.delete(&owner(), sandbox).await.expect("a frozen sandbox can be deleted");
    world.host.release(FakeStep::TakeSnapshot);
    let SnapshotState::Failed { reason } = captured(&world, &id).await else { panic!("it was deleted") };
    assert!(reason.contains("did not stay frozen"), "{reason}");
    assert_eq!((world.host.leftovers(), world.host.frozen().0), (Vec::new(), Vec::new()));
}

/// A long capture used to let the host's timeouts kill commands that had not run meanwhile.
#[tokio::test(start_paused = true)]
async fn timeouts_do_not_count_while_a_capture_has_frozen_the_sandbox() {
    // A paused clock leaps to the next timer whenever a thread is waited for. This timer is always close by.
    let mut steps = tokio::time::interval(Duration::from_millis(5));
    let steps = tokio::spawn(async move {
        loop {
            steps.tick().await;
        }
    });
    let world = World::new().await;
    let sandbox = world.create().await.id;
    world.host.ignore_timeouts();
    let spec = CommandSpec { timeout: Some(Duration::from_secs(30)), ..script_of("hang") };
    let command = world.engine.run(&owner(), sandbox, spec).await.expect("it starts");
    world.host.hold(FakeStep::TakeSnapshot);
    let id = capture(&world, sandbox).await;
    eventually("it is frozen", async || is_frozen(&world, sandbox)).await;
    tokio::time::sleep(Duration::from_secs(100)).await;
    let now = command.now().state;
    assert!(matches!(now, CommandState::Running { .. }), "the host has ended a frozen command: {now:?}");
    world.host.release(FakeStep::TakeSnapshot);
    assert_eq!(captured(&world, &id).await, SnapshotState::Ready);
    let thawed = tokio::time::Instant::now();
    assert!(matches!(outcome(&command.ended().await), Outcome::TimedOut(_)));
    let rest = thawed.elapsed();
    assert!(rest > Duration::from_secs(20), "the rest of its time was left to it, not {rest:?}");
    steps.abort();
}
