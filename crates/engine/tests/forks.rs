//! Snapshots in the store, forks, rollbacks, families and history, with every step made to fail.

use crate::common::*;
use engine::snapshot::{ForkSpec, PromoteParent, SnapshotState, TakeSpec};
use engine::*;
use runtime::fake::{FakeFailure, FakeStep};
use shoal_engine as engine;
use wire::SandboxId;

const FILE: &str = "/workspace/a";

async fn take(world: &World, sandbox: SandboxId) -> engine::snapshot::Snapshot {
    world.engine.take_snapshot(&key(), sandbox, TakeSpec::default()).await.expect("it is taken")
}

async fn fork(world: &World, sandbox: SandboxId, count: u32) -> Vec<Result<Sandbox, EngineError>> {
    let spec = ForkSpec { count, ..ForkSpec::default() };
    world.engine.fork(&key(), sandbox, spec).await.expect("it is forked")
}

fn file(world: &World, sandbox: SandboxId) -> Option<String> {
    world.host.file(sandbox, FILE)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_of_what_did_not_change_is_the_one_that_is_there() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    world.host.set_file(sandbox, FILE, "one");
    let first = take(&world, sandbox).await;
    assert_eq!((first.state.clone(), first.sandbox), (SnapshotState::Ready, Some(sandbox)));
    assert!(first.stopped.is_some() && first.size_bytes.is_some());
    assert_eq!(take(&world, sandbox).await.id, first.id);
    let other = TakeSpec { name: Some("other".into()), ..TakeSpec::default() };
    let other = world.engine.take_snapshot(&key(), sandbox, other).await.expect("it is taken");
    assert_ne!(other.id, first.id, "another name is another snapshot");
    world.host.set_file(sandbox, FILE, "two");
    assert_ne!(take(&world, sandbox).await.id, first.id);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_is_made_from_a_snapshot_by_its_name_or_id_also_after_a_restart() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    world.host.set_file(sandbox, FILE, "one");
    let taken = take(&world, sandbox).await;
    world.engine.delete(&owner(), sandbox).await.expect("it is deleted");
    let world = world.crash().await;
    for text in [taken.id.as_str(), taken.name.as_str()] {
        let template = TemplateName::parse(text).expect("a name");
        let spec = SandboxSpec { template, ..SandboxSpec::default() };
        let made = world.engine.create(&key(), spec, Wait::Ready).await.expect("it is made");
        assert_eq!(file(&world, made.id).as_deref(), Some("one"), "{text}");
    }
    let alien = key_of("mallory", KeyLimits::default());
    let spec =
        SandboxSpec { template: TemplateName::parse(&taken.id).expect("a name"), ..SandboxSpec::default() };
    let refused = world.engine.create(&alien, spec, Wait::Ready).await;
    assert!(matches!(refused, Err(EngineError::TemplateNotFound { .. })), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_fails_a_snapshot_leaves_the_source_running_and_nothing_behind() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    for step in [FakeStep::Still, FakeStep::TakeSnapshot] {
        world.host.fail(step, FakeFailure::Refused, 1);
        let failed = world.engine.take_snapshot(&key(), sandbox, TakeSpec::default()).await;
        assert!(failed.is_err(), "{step:?}");
        let failed = world.engine.fork(&key(), sandbox, ForkSpec::default()).await;
        assert!(failed.is_ok(), "only the first call fails: {step:?}");
        for child in failed.expect("it is forked") {
            world.engine.delete(&owner(), child.expect("a child").id).await.expect("it is deleted");
        }
        assert!(world.host.frozen().0.is_empty(), "{step:?}");
    }
    assert!(world.engine.published_snapshots(&owner()).await.expect("a list").is_empty());
    eventually("nothing is left", async || world.host.snapshots_there().is_empty()).await;
    let command = world.run(sandbox, "echo on").await;
    assert_eq!(outcome(&command.ended().await), Outcome::Exited(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn children_see_the_files_of_now_and_are_apart() {
    let world = World::new().await;
    let spec = SandboxSpec {
        labels: Labels::new([("app".to_owned(), "x".to_owned())].into()).expect("labels"),
        env: SandboxEnv::new([("A".to_owned(), "1".to_owned())].into()).expect("an environment"),
        ..SandboxSpec::default()
    };
    let source = world.engine.create(&key(), spec, Wait::Ready).await.expect("it is made");
    world.host.set_file(source.id, FILE, "old");
    take(&world, source.id).await;
    world.host.set_file(source.id, FILE, "live");
    let env = SandboxEnv::new([("B".to_owned(), "2".to_owned())].into()).expect("an environment");
    let spec = ForkSpec { count: 5, env, ..ForkSpec::default() };
    let children = world.engine.fork(&key(), source.id, spec).await.expect("it is forked");
    let children: Vec<Sandbox> = children.into_iter().map(|child| child.expect("a child")).collect();
    for child in &children {
        assert_eq!(file(&world, child.id).as_deref(), Some("live"));
        assert_eq!(child.labels, source.labels);
        assert_eq!((child.env["A"].as_str(), child.env["B"].as_str()), ("1", "2"));
    }
    world.host.set_file(children[0].id, FILE, "mine");
    assert_eq!(file(&world, children[1].id).as_deref(), Some("live"));
    assert_eq!(file(&world, source.id).as_deref(), Some("live"));
    // The family outlives its members, and goes with the last.
    world.engine.delete(&owner(), source.id).await.expect("it is deleted");
    world.engine.delete(&owner(), children[0].id).await.expect("it is deleted");
    let family = world.engine.family(&owner(), Some(children[1].id)).await.expect("a family");
    assert_eq!(family.len(), 6);
    assert_eq!(family.iter().filter(|member| member.state.is_none()).count(), 2);
    assert_eq!(family[0].name, source.name.to_string());
    assert!(family[1..].iter().all(|member| member.parent == Some(source.id)));
    let world = world.crash().await;
    assert_eq!(file(&world, children[1].id).as_deref(), Some("live"));
    for child in &children[1..] {
        world.engine.delete(&owner(), child.id).await.expect("it is deleted");
    }
    assert!(world.engine.family(&owner(), None).await.expect("families").is_empty());
    let snapshots = world.engine.published_snapshots(&owner()).await.expect("a list");
    assert_eq!(snapshots.len(), 1, "the fork's own snapshot is not listed");
    world.engine.delete_snapshot(&owner(), &snapshots[0].id).await.expect("it is deleted");
    eventually("nothing is left", async || world.host.snapshots_there().is_empty()).await;
    assert!(world.engine.is_empty().await.expect("it can be asked"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_over_a_quota_gives_as_many_as_fit_and_an_error_for_each_other() {
    let world = World::new().await;
    let source = world.create().await.id;
    let limited = key_of("default", KeyLimits { sandboxes: Some(3), ..KeyLimits::default() });
    let spec = ForkSpec { count: 4, ..ForkSpec::default() };
    let made = world.engine.fork(&limited, source, spec).await.expect("it is forked");
    assert_eq!(made.iter().filter(|child| child.is_ok()).count(), 2);
    assert!(
        made.iter().filter_map(|child| child.as_ref().err()).all(|e| matches!(e, EngineError::Quota { .. }))
    );
    for count in [0, 101] {
        let spec = ForkSpec { count, ..ForkSpec::default() };
        let refused = world.engine.fork(&key(), source, spec).await;
        assert!(matches!(refused, Err(EngineError::Invalid { .. })), "{refused:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_that_cannot_be_made_leaves_nothing() {
    let world = World::new().await;
    let source = world.create().await.id;
    for step in FakeStep::ALL {
        world.host.fail(step, FakeFailure::Refused, 1);
        let made = fork(&world, source, 2).await;
        let failed = made.iter().filter(|child| child.is_err()).count();
        assert!(failed <= 1, "{step:?}: {failed}");
        for child in made.into_iter().flatten() {
            world.engine.delete(&owner(), child.id).await.expect("it is deleted");
        }
        let left = world.engine.list(&owner(), ListQuery::default()).await.expect("a list").items;
        assert_eq!(left.len(), 1, "{step:?}: {left:?}");
    }
    eventually("nothing is left", async || world.host.snapshots_there().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rolling_back_brings_the_files_back_and_keeps_the_rest() {
    let world = World::new().await;
    let source = world.create().await;
    world.host.set_file(source.id, FILE, "one");
    let taken = take(&world, source.id).await;
    world.host.set_file(source.id, FILE, "two");
    let command = world.run(source.id, "hang").await;
    let rolled = world.engine.rollback(&owner(), source.id, &taken.id).await.expect("it is rolled back");
    assert_eq!((rolled.id, &rolled.name, rolled.state), (source.id, &source.name, State::Running));
    assert_eq!(file(&world, source.id).as_deref(), Some("one"));
    assert_eq!(outcome(&command.ended().await), Outcome::SandboxGone);
    let command = world.run(source.id, "echo on").await;
    assert_eq!(outcome(&command.ended().await), Outcome::Exited(0));
    // Again, by its name, and through a child: a snapshot of its parent is one of its own past.
    world.host.set_file(source.id, FILE, "three");
    let children = fork(&world, source.id, 1).await;
    let child = children.into_iter().next().expect("one").expect("a child").id;
    world.engine.rollback(&owner(), child, &taken.name).await.expect("it is rolled back");
    assert_eq!(file(&world, child).as_deref(), Some("one"));
    assert_eq!(file(&world, source.id).as_deref(), Some("three"));
    // Not of a child or a stranger.
    let of_child = take(&world, child).await;
    let refused = world.engine.rollback(&owner(), source.id, &of_child.id).await;
    assert!(matches!(refused, Err(EngineError::NotAncestor { .. })), "{refused:?}");
    let mallory = Owner::parse("mallory").expect("an owner");
    let refused = world.engine.rollback(&mallory, source.id, &taken.id).await;
    assert!(matches!(refused, Err(EngineError::SandboxNotFound { .. })), "{refused:?}");
    let refused = world.engine.snapshot(&mallory, &taken.id).await;
    assert!(matches!(refused, Err(EngineError::SnapshotNotFound { .. })), "{refused:?}");
    let refused = world.engine.delete_snapshot(&mallory, &taken.id).await;
    assert!(matches!(refused, Err(EngineError::SnapshotNotFound { .. })), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_owner_can_do_nothing_with_a_snapshot() {
    let world = World::new().await;
    let source = world.create().await.id;
    let taken = take(&world, source).await;
    let mallory = key_of("mallory", KeyLimits::default());
    let theirs =
        world.engine.create(&mallory, SandboxSpec::default(), Wait::Ready).await.expect("it is made");
    let refused = world.engine.rollback(&mallory.owner, theirs.id, &taken.id).await;
    assert!(matches!(refused, Err(EngineError::SnapshotNotFound { .. })), "{refused:?}");
    let refused = world.engine.fork(&mallory, source, ForkSpec::default()).await;
    assert!(matches!(refused, Err(EngineError::SandboxNotFound { .. })), "{refused:?}");
    let refused = world.engine.take_snapshot(&mallory, source, TakeSpec::default()).await;
    assert!(matches!(refused, Err(EngineError::SandboxNotFound { .. })), "{refused:?}");
    assert!(world.engine.family(&mallory.owner, None).await.expect("families").is_empty());
    assert!(world.engine.published_snapshots(&mallory.owner).await.expect("a list").is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollback_that_a_crash_interrupts_at_any_step_is_finished() {
    for step in FakeStep::ALL {
        let world = World::new().await;
        let source = world.create().await.id;
        world.host.set_file(source, FILE, "one");
        let taken = take(&world, source).await;
        world.host.set_file(source, FILE, "two");
        let command = world.run_as(source, "c", "hang").await;
        drop(command);
        world.host.hold(step);
        let engine = world.engine.clone();
        let rolling = tokio::spawn(async move { engine.rollback(&owner(), source, &taken.id).await });
        eventually("it has begun", async || {
            world.engine.get(&owner(), source).await.expect("it is there").state == State::Creating
        })
        .await;
        rolling.abort();
        let _ = rolling.await;
        let world = world.crash().await;
        world.host.release(step);
        eventually("it runs again", async || {
            world.engine.get(&owner(), source).await.expect("it is there").state == State::Running
        })
        .await;
        assert_eq!(file(&world, source).as_deref(), Some("one"), "{step:?}");
        let ended = world.command(source, "c").await.ended().await;
        assert_eq!(outcome(&ended), Outcome::SandboxGone, "{step:?}");
        let command = world.run(source, "echo on").await;
        assert_eq!(outcome(&command.ended().await), Outcome::Exited(0), "{step:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollback_that_fails_can_be_tried_again() {
    let world = World::new().await;
    let source = world.create().await.id;
    world.host.set_file(source, FILE, "one");
    let taken = take(&world, source).await;
    world.host.fail(FakeStep::Process, FakeFailure::Refused, 1);
    let failed = world.engine.rollback(&owner(), source, &taken.id).await;
    assert!(matches!(failed, Err(EngineError::Create { .. })), "{failed:?}");
    let rolled = world.engine.rollback(&owner(), source, &taken.id).await.expect("it is rolled back");
    assert_eq!(rolled.state, State::Running);
    assert_eq!(file(&world, source).as_deref(), Some("one"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_stays_as_long_as_anything_lies_over_it() {
    let world = World::new().await;
    let source = world.create().await.id;
    world.host.set_file(source, FILE, "one");
    let first = take(&world, source).await;
    world.engine.rollback(&owner(), source, &first.id).await.expect("it is rolled back");
    world.host.set_file(source, FILE, "two");
    let second = take(&world, source).await;
    assert_eq!(second.parent.map(|id| id.to_string()), Some(first.id.clone()));
    world.engine.delete_snapshot(&owner(), &first.id).await.expect("it is deleted");
    assert_eq!(world.host.snapshots_there().len(), 2, "the sandbox and the second lie over it");
    let gone = world.engine.rollback(&owner(), source, &first.id).await;
    assert!(matches!(gone, Err(EngineError::SnapshotNotFound { .. })), "{gone:?}");
    world.engine.delete(&owner(), source).await.expect("it is deleted");
    let world = world.crash().await;
    assert_eq!(world.host.snapshots_there().len(), 2, "the second still does");
    world.engine.delete_snapshot(&owner(), &second.id).await.expect("it is deleted");
    eventually("both are gone", async || world.host.snapshots_there().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_no_row_is_removed_from_the_store() {
    let world = World::new().await;
    let stray = wire::SnapshotId::from_random(7);
    world.host.plant_snapshot(stray);
    let world = world.crash().await;
    eventually("it is gone", async || world.host.snapshots_there().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_takes_the_place_of_its_parent() {
    let world = World::new().await;
    let spec = SandboxSpec {
        name: Some(SandboxName::parse("main").expect("a name")),
        labels: Labels::new([("app".to_owned(), "x".to_owned())].into()).expect("labels"),
        ..SandboxSpec::default()
    };
    let parent = world.engine.create(&key(), spec, Wait::Ready).await.expect("it is made");
    let children = fork(&world, parent.id, 2).await;
    let ids: Vec<SandboxId> = children.into_iter().map(|child| child.expect("a child").id).collect();
    let promoted =
        world.engine.promote(&owner(), ids[0], PromoteParent::Delete).await.expect("it is promoted");
    assert_eq!((promoted.name.as_str(), &promoted.labels), ("main", &parent.labels));
    let gone = world.engine.get(&owner(), parent.id).await;
    assert!(matches!(gone, Err(EngineError::SandboxNotFound { .. })), "{gone:?}");
    let refused = world.engine.promote(&owner(), ids[1], PromoteParent::Keep).await;
    assert!(matches!(refused, Err(EngineError::NoParent { .. })), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn history_has_a_step_for_each_command_that_found_a_change() {
    let world = World::new().await;
    let spec = SandboxSpec { history: Some(3), ..SandboxSpec::default() };
    let sandbox = world.engine.create(&key(), spec, Wait::Ready).await.expect("it is made").id;
    let steps = async || world.engine.history(&owner(), sandbox).await.expect("a history").len();
    for text in ["1", "2", "3", "4", "5"] {
        world.host.set_file(sandbox, FILE, text);
        // The second finds nothing changed.
        for _ in 0..2 {
            world.run(sandbox, "echo on").await.ended().await;
        }
    }
    assert_eq!(steps().await, 3);
    world.host.set_file(sandbox, FILE, "wrong");
    world.engine.undo(&owner(), sandbox, 1).await.expect("it is undone");
    assert_eq!(file(&world, sandbox).as_deref(), Some("5"));
    assert_eq!(steps().await, 2);
    world.engine.undo(&owner(), sandbox, 2).await.expect("it is undone");
    assert_eq!(file(&world, sandbox).as_deref(), Some("3"));
    for steps in [0, 1, 9] {
        let refused = world.engine.undo(&owner(), sandbox, steps).await;
        assert!(matches!(refused, Err(EngineError::Invalid { .. })), "{steps}: {refused:?}");
    }
    // A command runs even if its step cannot be kept, and says that it cannot be undone.
    world.host.set_file(sandbox, FILE, "6");
    world.host.fail(FakeStep::TakeSnapshot, FakeFailure::Refused, 1);
    let command = world.run(sandbox, "echo on").await;
    let ended = command.ended().await;
    assert_eq!((outcome(&ended), ended.not_undoable), (Outcome::Exited(0), true));
    let listed = world.engine.commands(&owner(), sandbox, Default::default()).await.expect("a list").items;
    assert_eq!(listed.iter().filter(|command| command.not_undoable).count(), 1, "its row says so too");
    assert_eq!(steps().await, 0);
    let after = world.run(sandbox, "echo on").await.ended().await;
    assert!(!after.not_undoable, "the next one has its step again");
    world.engine.delete(&owner(), sandbox).await.expect("it is deleted");
    eventually("nothing is left", async || world.host.snapshots_there().is_empty()).await;
    let spec = SandboxSpec { history: Some(101), ..SandboxSpec::default() };
    let refused = world.engine.create(&key(), spec, Wait::Ready).await;
    assert!(matches!(refused, Err(EngineError::Invalid { .. })), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_snapshots_in_the_store_files_are_copied_and_there_is_no_history() {
    let world = World::without_snapshots().await;
    let source = world.create().await.id;
    world.host.set_file(source, FILE, "one");
    let taken = take(&world, source).await;
    assert_eq!(taken.state, SnapshotState::Ready);
    let children = fork(&world, source, 2).await;
    for child in children {
        assert_eq!(file(&world, child.expect("a child").id).as_deref(), Some("one"));
    }
    let refused = world.engine.rollback(&owner(), source, &taken.id).await;
    assert!(matches!(refused, Err(EngineError::SnapshotsUnsupported { .. })), "{refused:?}");
    let spec = SandboxSpec { history: Some(1), ..SandboxSpec::default() };
    let refused = world.engine.create(&key(), spec, Wait::Ready).await;
    assert!(matches!(refused, Err(EngineError::SnapshotsUnsupported { .. })), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_is_compared_with_a_snapshot_and_nothing_is_left_of_it() {
    let world = World::new().await;
    let source = world.create().await;
    world.host.set_file(source.id, FILE, "one");
    let taken = take(&world, source.id).await;
    world.host.set_file(source.id, FILE, "two");
    world.host.set_file(source.id, "/workspace/b", "new");
    let compared = world.engine.diff(&key(), &taken.id, source.name.as_str(), true).await.expect("compared");
    let texts: Vec<_> =
        compared.entries.iter().map(|entry| (entry.before.as_deref(), entry.after.as_deref())).collect();
    assert_eq!(texts, [(Some("one"), Some("two")), (None, Some("new"))]);
    let mallory = key_of("mallory", KeyLimits::default());
    let refused = world.engine.diff(&mallory, &taken.id, &taken.id, false).await;
    assert!(matches!(refused, Err(EngineError::SnapshotNotFound { .. })), "{refused:?}");
    eventually("only the snapshot is left", async || world.host.snapshots_there().len() == 1).await;
}
