//! Hooks on the fake host: when they run, what their failures do, and what happens when one hangs or a daemon dies.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::common::*;
use engine::*;
use shoal_engine as engine;
use wire::SandboxId;

const DROP: PauseSpec = PauseSpec { kept: Kept::Dropped, grace: Duration::ZERO };

fn hook(script: &str) -> Hook {
    let program = Program::script(script).expect("a script");
    Hook { program, user: None, timeout: Duration::from_secs(20), required: false }
}

fn required(script: &str) -> Hook {
    Hook { required: true, ..hook(script) }
}

fn hooks(all: impl IntoIterator<Item = (HookPoint, Hook)>) -> Hooks {
    Hooks::new(all.into_iter().collect::<BTreeMap<_, _>>()).expect("they are valid")
}

async fn made(world: &World, all: impl IntoIterator<Item = (HookPoint, Hook)>) -> SandboxId {
    let spec = SandboxSpec { hooks: hooks(all), ..SandboxSpec::default() };
    world.engine.create(&key(), spec, Wait::Ready).await.expect("it is made").id
}

/// The points whose hooks ran, and whether they succeeded.
async fn runs(world: &World, sandbox: SandboxId) -> Vec<(HookPoint, bool)> {
    let runs = world.engine.get(&owner(), sandbox).await.expect("it is there").hook_runs;
    runs.into_iter().map(|(point, run)| (point, run.failure.is_none())).collect()
}

fn is_refused<T: std::fmt::Debug>(result: Result<T, EngineError>, point: HookPoint) {
    match result {
        Err(EngineError::HookFailed { hook, .. }) => assert_eq!(hook, point.word()),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hooks_run_at_their_points_and_nowhere_else() {
    use HookPoint::*;
    let world = World::new().await;
    let every = HookPoint::ALL.map(|point| (point, hook("true")));
    let sandbox = made(&world, every).await;
    assert_eq!(runs(&world, sandbox).await, [(AfterCreate, true)]);
    world.engine.pause(&owner(), sandbox, DROP).await.expect("it can be paused");
    assert_eq!(runs(&world, sandbox).await, [(AfterCreate, true), (BeforePause, true)]);
    world.engine.resume(&key(), sandbox).await.expect("it can be resumed");
    assert_eq!(runs(&world, sandbox).await, [(AfterCreate, true), (BeforePause, true), (AfterResume, true)]);
    let fork = snapshot::ForkSpec { count: 1, ..Default::default() };
    let children = world.engine.fork(&key(), sandbox, fork).await.expect("it can be forked");
    let child = children.into_iter().next().expect("one").expect("it is made").id;
    assert_eq!(runs(&world, child).await, [(AfterFork, true)], "a child has a past of its own");
    let taken = world.engine.take_snapshot(&key(), sandbox, Default::default()).await.expect("a snapshot");
    world.engine.rollback(&owner(), sandbox, &taken.id).await.expect("it can be rolled back");
    assert!(runs(&world, sandbox).await.contains(&(AfterRollback, true)));
    for id in [child, sandbox] {
        world.engine.delete(&owner(), id).await.expect("it can be deleted");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_is_an_event_and_is_shown_and_blocks_nothing() {
    let world = World::new().await;
    let mut watcher = world.engine.watch(&owner(), None, None).expect("a watcher");
    let sandbox = made(&world, [(HookPoint::BeforePause, hook("err no room\nexit 3"))]).await;
    let paused = world.engine.pause(&owner(), sandbox, DROP).await.expect("it is paused all the same");
    assert_eq!(paused.state, State::Paused(Kept::Dropped));
    let run = paused.hook_runs[&HookPoint::BeforePause].clone();
    assert_eq!(run.failure.as_deref(), Some("it exited with 3: no room"));
    assert!(run.command.is_some());
    loop {
        let Told::Event(event) = watcher.next().await else { panic!("nothing is missed") };
        if let About::Sandbox(id, Happened::HookFailed { hook, reason }) = &event.about {
            assert_eq!((*id, *hook), (sandbox, HookPoint::BeforePause));
            assert_eq!(reason, "it exited with 3: no room");
            break;
        }
    }
    // A paused sandbox is not resumed only to be deleted.
    let launches = world.host.launches();
    world.engine.delete(&owner(), sandbox).await.expect("it can be deleted");
    assert_eq!(world.host.launches(), launches);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_required_hook_keeps_what_it_comes_before_from_happening() {
    use HookPoint::*;
    let world = World::new().await;
    let sandbox = made(&world, [(BeforePause, required("exit 1")), (BeforeDelete, required("exit 1"))]).await;
    is_refused(world.engine.pause(&owner(), sandbox, DROP).await, BeforePause);
    is_refused(world.engine.delete(&owner(), sandbox).await, BeforeDelete);
    assert_eq!(world.engine.get(&owner(), sandbox).await.expect("it is there").state, State::Running);
    let ended = world.run(sandbox, "echo on").await.ended().await;
    assert_eq!(outcome(&ended), Outcome::Exited(0));
    // An operator is not kept from it.
    world.engine.delete_of_any_owner(sandbox).await.expect("it can be deleted");
    assert_eq!(world.host.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_required_hook_fails_what_it_comes_after_and_the_files_stay() {
    use HookPoint::*;
    let world = World::new().await;
    let spec = SandboxSpec {
        hooks: hooks([(AfterCreate, required("exit 1"))]),
        name: Some(SandboxName::parse("broken").expect("a name")),
        ..SandboxSpec::default()
    };
    is_refused(world.engine.create(&key(), spec, Wait::Ready).await, AfterCreate);
    let broken = world.engine.find(&owner(), "broken").await.expect("it can be looked at");
    assert_eq!(broken.state, State::Failed { disk: Disk::Whole });
    let sandbox = made(&world, [(AfterResume, required("exit 1"))]).await;
    world.engine.pause(&owner(), sandbox, DROP).await.expect("it can be paused");
    is_refused(world.engine.resume(&key(), sandbox).await, AfterResume);
    let failed = world.engine.get(&owner(), sandbox).await.expect("it is there");
    assert_eq!(failed.state, State::Failed { disk: Disk::Whole });
    // Without the hook it runs again.
    let without = SandboxUpdate { hooks: Some(Hooks::default()), ..SandboxUpdate::default() };
    world.engine.update(&owner(), sandbox, without).await.expect("it can be changed");
    world.engine.resume(&key(), sandbox).await.expect("it can be resumed");
    for id in [broken.id, sandbox] {
        world.engine.delete(&owner(), id).await.expect("it can be deleted");
    }
    assert_eq!(world.host.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delete_waits_for_no_other_hook_and_a_hanging_one_is_ended() {
    use HookPoint::*;
    let world = World::new().await;
    let short = |script| Hook { timeout: Duration::from_millis(200), ..hook(script) };
    let sandbox = made(&world, [(BeforePause, hook("hang")), (BeforeDelete, short("hang"))]).await;
    let pausing = tokio::spawn({
        let engine = world.engine.clone();
        async move { engine.pause(&owner(), sandbox, DROP).await }
    });
    eventually("the hook runs", async || {
        !world.engine.running_commands(&owner(), sandbox).expect("it is there").is_empty()
    })
    .await;
    world.engine.delete(&owner(), sandbox).await.expect("it can be deleted");
    assert!(matches!(pausing.await.expect("no panic"), Err(EngineError::WrongState { .. })));
    assert_eq!(world.host.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_hook_that_a_dead_daemon_did_not_finish_runs_again() {
    let world = World::new().await;
    let spec = SandboxSpec {
        hooks: hooks([(HookPoint::AfterCreate, hook("gate g"))]),
        name: Some(SandboxName::parse("waits").expect("a name")),
        ..SandboxSpec::default()
    };
    let made = world.engine.create(&key(), spec, Wait::No).await.expect("its row is written").id;
    eventually("the hook runs", async || {
        world.engine.running_commands(&owner(), made).is_ok_and(|commands| !commands.is_empty())
    })
    .await;
    let world = world.crash().await;
    world.host.open_gate("g");
    eventually("the hook has run", async || runs(&world, made).await == [(HookPoint::AfterCreate, true)])
        .await;
    let world = world.crash().await;
    assert_eq!(runs(&world, made).await, [(HookPoint::AfterCreate, true)], "how it went is kept");
    let kept = world.engine.get(&owner(), made).await.expect("it is there");
    assert_eq!(kept.hooks, hooks([(HookPoint::AfterCreate, hook("gate g"))]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_has_hooks_and_a_history_for_its_sandboxes() {
    let world = World::new().await;
    let name = TemplateName::parse("prepared").expect("a name");
    let template = template::TemplateSpec {
        history: 4,
        hooks: hooks([(HookPoint::AfterCreate, hook("true")), (HookPoint::BeforePause, hook("true"))]),
        ..template::TemplateSpec::default()
    };
    world.engine.create_template(&owner(), name.clone(), template).await.expect("a template");
    let spec = SandboxSpec {
        template: name.clone(),
        hooks: hooks([(HookPoint::BeforePause, hook("exit 1"))]),
        ..SandboxSpec::default()
    };
    let sandbox = world.engine.create(&key(), spec, Wait::Ready).await.expect("it is made");
    assert_eq!(sandbox.history, 4);
    world.engine.pause(&owner(), sandbox.id, DROP).await.expect("it can be paused");
    let ran = runs(&world, sandbox.id).await;
    assert_eq!(ran, [(HookPoint::AfterCreate, true), (HookPoint::BeforePause, false)], "its own goes before");
    let world = world.crash().await;
    let kept = world.engine.template(&owner(), name.as_str()).expect("it is there").spec;
    assert_eq!((kept.history, kept.hooks.all().len()), (4, 2));
}
