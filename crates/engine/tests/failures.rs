//! Every step made to fail, deletes at any moment, limits, and what a restart finds.

use std::time::Duration;

use crate::common::*;
use engine::*;
use runtime::fake::{FakeFailure, FakeHost, FakeStep, FakeThing};
use shoal_engine as engine;
use wire::SandboxId;
use wire::guest::ExitStatus;

#[tokio::test(start_paused = true)]
async fn a_failure_at_any_step_leaves_nothing_behind() {
    for step in FakeStep::ALL {
        let world = World::on(FakeHost::failing_at(step)).await;
        let error = world.engine.create(&key(), SandboxSpec::default(), Wait::Ready).await;
        let error = error.expect_err("this step was made to fail");
        let EngineError::Create { id, .. } = &error else { panic!("{step:?} gave {error:?}") };
        assert_eq!(world.host.leftovers(), [], "after a failure at {step:?}");
        let failed = world.engine.get(&owner(), *id).await.expect("the row stays");
        assert_eq!(failed.state, State::Failed { disk: Disk::Lost }, "after a failure at {step:?}");
        assert!(failed.reason.is_some());
        let refused = world.engine.run(&owner(), *id, script_of("true")).await;
        assert!(matches!(refused, Err(EngineError::SandboxFailed { .. })));
        world.engine.delete(&owner(), *id).await.expect("a failed sandbox can be deleted");
        assert!(matches!(world.engine.get(&owner(), *id).await, Err(EngineError::SandboxNotFound { .. })));
    }
}

#[tokio::test(start_paused = true)]
async fn a_launcher_that_dies_once_is_survived_and_twice_is_a_failure() {
    for step in [FakeStep::Disk, FakeStep::Process] {
        let world = World::new().await;
        world.host.fail(step, FakeFailure::LauncherGone, 1);
        let sandbox = world.create().await;
        assert_eq!((sandbox.state, world.host.launches()), (State::Running, 2));
        world.engine.delete(&owner(), sandbox.id).await.expect("it goes");
        world.host.fail(step, FakeFailure::LauncherGone, 2);
        world.engine.create(&key(), SandboxSpec::default(), Wait::Ready).await.expect_err("it died twice");
        assert_eq!(world.host.leftovers(), []);
    }
}

#[tokio::test]
async fn when_cleaning_up_fails_too_both_reasons_are_kept_and_the_sweep_tries_again() {
    let world = World::on(FakeHost::failing_at(FakeStep::Process)).await;
    // Also for the sweep of the start, which may come just now.
    world.host.fail_teardown(100);
    let error = world.engine.create(&key(), SandboxSpec::default(), Wait::Ready).await;
    let Err(EngineError::Create { id, .. }) = error else { panic!("{error:?}") };
    let reason = world.engine.get(&owner(), id).await.expect("the row stays").reason.expect("a reason");
    assert!(reason.contains("start init") && reason.contains("unmount the root"), "{reason}");
    assert_eq!(world.host.leftovers().len(), 3);
    world.host.fail_teardown(0);
    world.engine.sweep().await;
    eventually("the sweep removed the rest", async || world.host.leftovers().is_empty()).await;
    let state = world.engine.get(&owner(), id).await.expect("the row stays").state;
    assert_eq!(state, State::Failed { disk: Disk::Lost });
}

#[tokio::test(start_paused = true)]
async fn a_delete_that_fails_says_so_and_can_be_asked_again() {
    let world = World::new().await;
    let sandbox = world.create().await;
    world.host.fail_teardown(1);
    let error = world.engine.delete(&owner(), sandbox.id).await.expect_err("teardown was made to fail");
    assert!(matches!(error, EngineError::Delete { .. }), "{error:?}");
    let state = world.engine.get(&owner(), sandbox.id).await.expect("it is still there").state;
    assert_eq!(state, State::Deleting);
    world.engine.delete(&owner(), sandbox.id).await.expect("now it goes");
    assert_eq!(world.host.leftovers(), []);
}

/// The sweep comes every minute, which is longer than this waits.
#[tokio::test(flavor = "multi_thread")]
async fn a_delete_that_fails_is_tried_again_by_itself() {
    let world = World::new().await;
    let sandbox = world.create().await;
    world.host.fail_teardown(3);
    world.engine.delete(&owner(), sandbox.id).await.expect_err("teardown was made to fail");
    eventually("it is gone", async || world.engine.get(&owner(), sandbox.id).await.is_err()).await;
    assert_eq!(world.host.leftovers(), []);
}

#[tokio::test(start_paused = true)]
async fn the_processes_of_a_broken_sandbox_are_ended_also_if_that_fails_at_first_or_the_daemon_dies() {
    let world = World::new().await;
    let left = |world: &World, sandbox| -> Vec<FakeThing> {
        let left = world.host.leftovers().into_iter().filter(|(id, _)| *id == sandbox);
        left.map(|(_, thing)| thing).collect()
    };
    let breaks = async |world: &World, sandbox| {
        world.host.say(sandbox, vec![0xff; 64]);
        eventually("the sandbox has failed", async || {
            let state = world.engine.get(&owner(), sandbox).await.expect("known").state;
            state == State::Failed { disk: Disk::Whole }
        })
        .await;
    };
    world.host.fail(FakeStep::End, FakeFailure::LauncherGone, 3);
    let first = world.create().await.id;
    breaks(&world, first).await;
    eventually("its processes are ended", async || left(&world, first) == [FakeThing::Disk]).await;

    world.host.fail(FakeStep::End, FakeFailure::LauncherGone, u32::MAX);
    let second = world.create().await.id;
    breaks(&world, second).await;
    world.host.fail(FakeStep::End, FakeFailure::LauncherGone, 0);
    let world = world.crash().await;
    eventually("its processes are ended", async || left(&world, second) == [FakeThing::Disk]).await;
    let reason = world.engine.get(&owner(), second).await.expect("the row stays").reason;
    assert!(reason.is_some_and(|reason| reason.contains("protocol")), "the reason is kept");
    world.engine.delete_all().await.expect("both go");
    assert_eq!(world.host.leftovers(), []);
}

#[tokio::test(start_paused = true)]
async fn a_timeout_that_init_ignores_is_kept_by_the_host() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    world.host.ignore_timeouts();
    // The first attempts from outside fail.
    world.host.fail(FakeStep::End, FakeFailure::LauncherGone, 3);
    let timed =
        |seconds| CommandSpec { timeout: Some(Duration::from_secs(seconds)), ..script_of("echo hi; hang") };
    let untimed = world.run(sandbox, "hang").await;
    // A clock that is paused leaps to the next timer whenever a thread is waited for. So that it does not leap to the end of
    // what should last, there is always a timer close by.
    let mut steps = tokio::time::interval(Duration::from_millis(5));
    let steps = tokio::spawn(async move {
        loop {
            steps.tick().await;
        }
    });
    let longer = world.engine.run(&owner(), sandbox, timed(30 * 24 * 3600)).await.expect("it starts");
    let command = world.engine.run(&owner(), sandbox, timed(30)).await.expect("it starts");
    let ended = command.ended().await;
    assert_eq!(outcome(&ended), Outcome::TimedOut(ExitStatus::Signal(9)));
    assert_eq!(ended.stdout.end, 3, "init has handed over what it wrote");
    for other in [&untimed, &longer] {
        assert!(matches!(other.now().state, CommandState::Running { .. }));
    }
    longer.kill().await.expect("init hears");
    assert!(matches!(outcome(&longer.ended().await), Outcome::Killed(_)));
    steps.abort();
    // A new daemon keeps watch over what it finds.
    let named = CommandSpec { id: Some("found".parse().expect("an id")), ..timed(30) };
    world.engine.run(&owner(), sandbox, named).await.expect("it starts");
    let world = world.crash().await;
    let found = world.command(sandbox, "found").await;
    assert_eq!(outcome(&found.ended().await), Outcome::TimedOut(ExitStatus::Signal(9)));
}

async fn check_unheard(restart: bool) {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let spec = CommandSpec {
        id: Some("unheard".parse().expect("an id")),
        timeout: Some(Duration::from_secs(30)),
        ..script_of("echo heard; gate more; flood 3000000; hang")
    };
    let command = world.engine.run(&owner(), sandbox, spec).await.expect("it starts");
    eventually("the first line is there", async || command.now().stdout.end == 6).await;
    world.host.silence(sandbox, true);
    world.host.open_gate("more");
    let ended = command.ended().await;
    assert_eq!(outcome(&ended), Outcome::TimedOutUnheard);
    assert_eq!(ended.stdout.end, 6);
    // When init goes on, it gets rid of what nobody waits for, and all else works.
    let world = match restart {
        true => world.crash().await,
        false => world,
    };
    world.host.silence(sandbox, false);
    assert_eq!(outcome(&world.run(sandbox, "echo hi").await.ended().await), Outcome::Exited(0));
    eventually("init has forgotten it", async || world.host.remembered(sandbox) == 0).await;
    assert_eq!(outcome(&world.command(sandbox, "unheard").await.now()), Outcome::TimedOutUnheard);
    assert_eq!(world.engine.get(&owner(), sandbox).await.expect("known").state, State::Running);
}

#[tokio::test(start_paused = true)]
async fn a_timeout_strikes_when_init_is_stopped_and_the_result_says_that_nobody_heard() {
    check_unheard(false).await;
}

#[tokio::test(start_paused = true)]
async fn what_nobody_heard_of_is_let_go_of_by_the_next_daemon_too() {
    check_unheard(true).await;
}

#[tokio::test(start_paused = true)]
async fn a_delete_during_a_create_ends_both_at_once() {
    for step in [FakeStep::Prepare, FakeStep::Disk, FakeStep::Process, FakeStep::Connect] {
        let world = World::new().await;
        world.host.hold(step);
        let engine = world.engine.clone();
        let creating =
            tokio::spawn(async move { engine.create(&key(), SandboxSpec::default(), Wait::Ready).await });
        let mut id = None;
        eventually("the sandbox is listed", async || {
            let page = world.engine.list(&owner(), ListQuery::default()).await.expect("a page");
            id = page.items.first().map(|sandbox| sandbox.id);
            id.is_some()
        })
        .await;
        let id = id.expect("it was listed");
        let engine = world.engine.clone();
        let deleting = tokio::spawn(async move { engine.delete(&owner(), id).await });
        // The create is answered while the step is still held.
        let error = creating.await.expect("no panic").expect_err("it was deleted");
        assert!(matches!(error, EngineError::WrongState { state: "deleting", .. }), "{step:?}: {error:?}");
        world.host.release(step);
        deleting.await.expect("no panic").expect("it goes");
        assert_eq!(world.host.leftovers(), [], "{step:?}");
        assert!(world.engine.get(&owner(), id).await.is_err());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_deletes_of_one_sandbox_are_harmless() {
    let world = World::new().await;
    let sandbox = world.create().await;
    let command = world.run(sandbox.id, "hang").await;
    let deletes: Vec<_> = (0..20)
        .map(|_| {
            let engine = world.engine.clone();
            tokio::spawn(async move { engine.delete(&owner(), sandbox.id).await })
        })
        .collect();
    for delete in deletes {
        match delete.await.expect("no panic") {
            Ok(()) | Err(EngineError::SandboxNotFound { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    assert_eq!(outcome(&command.ended().await), Outcome::SandboxGone);
    assert_eq!(world.host.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_creates_at_once_never_exceed_a_limit() {
    let world = World::with(
        FakeHost::new(),
        KEPT,
        Capacity { sandboxes: 30, cpu_millis: 25_000, memory_bytes: u64::MAX },
    )
    .await;
    let create = |key: Key| {
        let engine = world.engine.clone();
        tokio::spawn(async move { engine.create(&key, SandboxSpec::default(), Wait::Ready).await })
    };
    let limits = KeyLimits { sandboxes: Some(7), ..KeyLimits::default() };
    let small: Vec<_> = (0..50).map(|_| create(key_of("small", limits))).collect();
    let mut made = Vec::new();
    for create in small {
        match create.await.expect("no panic") {
            Ok(sandbox) => made.push(sandbox.id),
            Err(EngineError::Quota { resource: Resource::Sandboxes, limit: 7 }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    assert_eq!(made.len(), 7);
    let others: Vec<_> = (0..50).map(|_| create(key_of("large", KeyLimits::default()))).collect();
    let mut others_made = 0;
    for create in others {
        match create.await.expect("no panic") {
            Ok(_) => others_made += 1,
            Err(EngineError::Full { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    assert_eq!(others_made, 25 - 7, "the machine promises 25 processors");
    // What is deleted can be used again, by anyone.
    let small = Owner::parse("small").expect("an owner");
    world.engine.delete(&small, made[0]).await.expect("it goes");
    create(key_of("small", limits)).await.expect("no panic").expect("there is room for one");
    let error = create(key_of("small", limits)).await.expect("no panic").expect_err("and no more");
    assert!(matches!(error, EngineError::Quota { .. }), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_of_cpu_and_memory_hold_over_a_restart() {
    let world = World::new().await;
    let limits = KeyLimits {
        sandboxes: None,
        cpu_millis: Some(1500),
        memory_bytes: Some(3 << 30),
        ..KeyLimits::default()
    };
    let key = key_of("a", limits);
    let spec = |cpu, memory| SandboxSpec { cpu_millis: cpu, memory_bytes: memory, ..SandboxSpec::default() };
    world.engine.create(&key, spec(Some(500), None), Wait::Ready).await.expect("it fits");
    let world = world.crash().await;
    let error = world.engine.create(&key, spec(Some(1001), None), Wait::Ready).await.expect_err("too much");
    assert!(matches!(error, EngineError::Quota { limit: 1500, .. }), "{error:?}");
    let error = world.engine.create(&key, spec(Some(100), Some(5 << 30)), Wait::Ready).await;
    assert!(matches!(error, Err(EngineError::Quota { resource: Resource::Memory, .. })), "{error:?}");
    world.engine.create(&key, spec(Some(1000), None), Wait::Ready).await.expect("it fits");
    for bad in [spec(Some(1), None), spec(None, Some(1000)), spec(None, Some(u64::MAX))] {
        let error = world.engine.create(&key, bad, Wait::Ready).await.expect_err("not valid");
        assert!(matches!(error, EngineError::Invalid { .. }), "{error:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_unique_per_owner_and_made_up_where_there_is_none() {
    let world = World::new().await;
    let named = |name: &str| SandboxSpec {
        name: Some(SandboxName::parse(name).expect("a name")),
        ..SandboxSpec::default()
    };
    let first = world.engine.create(&key(), named("build"), Wait::Ready).await.expect("it is made");
    let error = world.engine.create(&key(), named("build"), Wait::Ready).await.expect_err("taken");
    assert!(matches!(error, EngineError::NameTaken { .. }), "{error:?}");
    let other = key_of("other", KeyLimits::default());
    world.engine.create(&other, named("build"), Wait::Ready).await.expect("another owner's name is free");
    let second = world.create().await;
    assert_ne!(second.name, first.name);
    let name = |text: &str| SandboxName::parse(text).expect("a name");
    let error = world.engine.rename(&owner(), second.id, name("build")).await.expect_err("taken");
    assert!(matches!(error, EngineError::NameTaken { .. }), "{error:?}");
    world.engine.rename(&owner(), first.id, name("old-build")).await.expect("renamed");
    world.engine.rename(&owner(), second.id, name("build")).await.expect("the name is free now");
    let world = world.crash().await;
    let query = ListQuery { name: Some("build".into()), ..ListQuery::default() };
    let page = world.engine.list(&owner(), query).await.expect("a page");
    assert_eq!(page.items.iter().map(|sandbox| sandbox.id).collect::<Vec<_>>(), [second.id]);
    // Another owner's sandbox looks like none.
    let error = world.engine.get(&other.owner, first.id).await.expect_err("not theirs");
    assert!(matches!(error, EngineError::SandboxNotFound { .. }), "{error:?}");
}

/// Memory and row must not come apart, or a restart would give a sandbox another name.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn renames_at_once_end_with_the_name_that_the_row_has() {
    let world = World::new().await;
    let mut sandboxes = Vec::new();
    for _ in 0..20 {
        sandboxes.push(world.create().await.id);
    }
    let name = |text: String| SandboxName::parse(&text).expect("a name");
    let mut renames = Vec::new();
    for round in 0..20 {
        for (at, id) in sandboxes.iter().copied().enumerate() {
            // To names of its own, there and back, and to one that others want too.
            let wish = name(if round % 5 == 4 { "wanted".into() } else { format!("{at}-{}", round % 3) });
            let engine = world.engine.clone();
            renames.push(tokio::spawn(async move { engine.rename(&owner(), id, wish).await }));
        }
    }
    for rename in renames {
        match rename.await.expect("no panic") {
            Ok(_) | Err(EngineError::NameTaken { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    let names = async |world: &World| -> Vec<SandboxName> {
        let mut names = Vec::new();
        for id in &sandboxes {
            names.push(world.engine.get(&owner(), *id).await.expect("known").name);
        }
        names
    };
    let before = names(&world).await;
    for taken in &before {
        let spec = SandboxSpec { name: Some(taken.clone()), ..SandboxSpec::default() };
        let refused = world.engine.create(&key(), spec, Wait::Ready).await;
        assert!(matches!(refused, Err(EngineError::NameTaken { .. })), "`{taken}` is free: {refused:?}");
    }
    // All others are free again.
    for at in 0..sandboxes.len() {
        for round in 0..3 {
            let free = name(format!("{at}-{round}"));
            if !before.contains(&free) {
                let spec = SandboxSpec { name: Some(free), ..SandboxSpec::default() };
                world.engine.create(&key(), spec, Wait::Ready).await.expect("the name is free");
            }
        }
    }
    let world = world.crash().await;
    assert_eq!(names(&world).await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn asking_twice_with_one_idempotency_key_makes_one_sandbox() {
    let world = World::new().await;
    let spec = |cpu| SandboxSpec { idempotency_key: Some(once()), cpu_millis: cpu, ..SandboxSpec::default() };
    let (engine, key) = (&world.engine, key());
    let (first, second) = tokio::join!(
        engine.create(&key, spec(None), Wait::Ready),
        engine.create(&key, spec(None), Wait::Ready)
    );
    let first = first.expect("it is made");
    assert_eq!(first.id, second.expect("it is found").id);
    let error = engine.create(&key, spec(Some(100)), Wait::Ready).await.expect_err("another request");
    assert!(matches!(error, EngineError::IdempotencyKeyReused), "{error:?}");
    let world = world.crash().await;
    let again = world.engine.create(&key, spec(None), Wait::Ready).await.expect("it is found");
    assert_eq!((again.id, world.host.launches()), (first.id, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_have_pages_newest_first() {
    let world = World::new().await;
    let mut made = Vec::new();
    for _ in 0..5 {
        made.push(world.create().await.id);
    }
    made.reverse();
    let mut seen = Vec::new();
    let mut cursor = None;
    loop {
        let query = ListQuery { limit: Some(2), cursor, ..ListQuery::default() };
        let page = world.engine.list(&owner(), query).await.expect("a page");
        assert!(page.items.len() <= 2);
        seen.extend(page.items.iter().map(|sandbox| sandbox.id));
        cursor = page.next_cursor;
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(seen, made);
    for (limit, cursor) in [(Some(0), None), (Some(1001), None), (None, Some("rubbish".to_owned()))] {
        let query = ListQuery { limit, cursor, ..ListQuery::default() };
        assert!(matches!(world.engine.list(&owner(), query).await, Err(EngineError::Invalid { .. })));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_during_a_create_is_finished_by_the_next_engine() {
    let world = World::new().await;
    world.host.hold(FakeStep::Limits);
    let sandbox =
        world.engine.create(&key(), SandboxSpec::default(), Wait::No).await.expect("the row is written");
    assert_eq!(sandbox.state, State::Creating);
    eventually("it is half made", async || world.host.leftovers().len() == 2).await;
    let World { host, directory, engine, kept_max, capacity } = world;
    drop(engine);
    host.release(FakeStep::Limits);
    let world = World {
        engine: restart(&directory, &host, kept_max, capacity).await,
        host,
        directory,
        kept_max,
        capacity,
    };
    eventually("it runs", async || {
        world.engine.get(&owner(), sandbox.id).await.expect("it is known").state == State::Running
    })
    .await;
    assert_eq!(outcome(&world.run(sandbox.id, "true").await.ended().await), Outcome::Exited(0));
    world.engine.delete(&owner(), sandbox.id).await.expect("it goes");
    assert_eq!(world.host.leftovers(), []);
}

async fn restart(
    directory: &tempfile::TempDir,
    host: &FakeHost,
    output_kept_max: u64,
    capacity: Capacity,
) -> Engine {
    let config = EngineConfig {
        data_dir: directory.path().into(),
        capacity,
        output_kept_max,
        images: Default::default(),
        network: Default::default(),
    };
    Engine::start(config, std::sync::Arc::new(host.clone())).await.expect("the engine starts")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_during_a_delete_is_finished_by_the_next_engine() {
    let world = World::new().await;
    let sandbox = world.create().await;
    world.run(sandbox.id, "flood 1000; hang").await;
    world.host.fail_teardown(1);
    world.engine.delete(&owner(), sandbox.id).await.expect_err("teardown was made to fail");
    let world = world.crash().await;
    eventually("it is gone", async || world.engine.get(&owner(), sandbox.id).await.is_err()).await;
    assert_eq!(world.host.leftovers(), []);
    assert!(!world.directory.path().join("output").join(sandbox.id.to_string()).exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_ended_while_nobody_looked_has_failed_and_so_have_its_commands() {
    let world = World::new().await;
    let sandbox = world.create().await;
    let command = world.run_as(sandbox.id, "c", "echo early; hang").await;
    let mut output = command.attach(Offsets::default());
    while !matches!(output.next().await.expect("more"), OutputEvent::Bytes { .. }) {}
    drop(output);
    let (host, id) = (world.host.clone(), sandbox.id);
    let stored = world.directory.path().join("output").join(id.to_string()).join("1/stdout.0");
    eventually("the bytes are on disk", async || stored.exists()).await;
    host.kill_init(id);
    let world = world.crash().await;
    eventually("it has failed", async || {
        world.engine.get(&owner(), id).await.expect("the row stays").state
            == State::Failed { disk: Disk::Whole }
    })
    .await;
    let command = world.command(id, "c").await;
    assert_eq!(outcome(&command.ended().await), Outcome::SandboxGone);
    assert_eq!(command.output(100).await.expect("it is kept").stdout, b"early\n");
    // The same when it happens under a living engine.
    let second = world.create().await;
    let command = world.run(second.id, "hang").await;
    world.host.kill_init(second.id);
    assert_eq!(outcome(&command.ended().await), Outcome::SandboxGone);
    eventually("it has failed", async || {
        matches!(
            world.engine.get(&owner(), second.id).await.expect("the row stays").state,
            State::Failed { .. }
        )
    })
    .await;
    assert!(matches!(
        world.engine.run(&owner(), second.id, script_of("true")).await,
        Err(EngineError::SandboxFailed { .. })
    ));
    world.engine.delete(&owner(), second.id).await.expect("it goes");
}

#[tokio::test(flavor = "multi_thread")]
async fn strays_are_swept_and_sandboxes_are_not() {
    let world = World::new().await;
    let sandbox = world.create().await;
    world.host.hold(FakeStep::Process);
    let underway = world.engine.create(&key(), SandboxSpec::default(), Wait::No).await.expect("accepted");
    eventually("it is half made", async || world.host.leftovers().len() > 3).await;
    let stray = SandboxId::from_random(7);
    world.host.plant(stray, FakeThing::Disk);
    let logs = world.directory.path().join("output").join(stray.to_string());
    std::fs::create_dir_all(logs.join("1")).expect("a directory");
    assert_eq!(world.engine.sweep().await, 1);
    assert!(world.host.leftovers().iter().all(|(id, _)| *id != stray));
    assert!(!logs.exists());
    world.host.release(FakeStep::Process);
    eventually("the other runs", async || {
        world.engine.get(&owner(), underway.id).await.expect("it is known").state == State::Running
    })
    .await;
    assert_eq!(outcome(&world.run(sandbox.id, "true").await.ended().await), Outcome::Exited(0));
    world.engine.delete_all().await.expect("all go");
    assert_eq!(world.host.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn deleting_all_deletes_what_daemons_before_have_left_too() {
    let world = World::new().await;
    world.create().await;
    // After the sweep of the start, so that only the end can see it.
    eventually("it has swept once", async || world.engine.sweep().await == 0).await;
    world.host.plant(SandboxId::from_random(7), FakeThing::Disk);
    world.engine.delete_all().await.expect("all go");
    assert_eq!(world.host.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bug_in_the_link_does_not_cost_the_sandbox() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let command = world.run(sandbox, "gate on; echo well").await;
    world.host.fail(FakeStep::Connect, FakeFailure::Panic, 2);
    world.host.disconnect(sandbox);
    world.host.open_gate("on");
    assert_eq!(outcome(&command.ended().await), Outcome::Exited(0));
    assert_eq!(world.engine.get(&owner(), sandbox).await.expect("known").state, State::Running);
    // One that shows every time does.
    world.host.fail(FakeStep::Connect, FakeFailure::Panic, u32::MAX);
    world.host.disconnect(sandbox);
    eventually("the sandbox has failed", async || {
        let state = world.engine.get(&owner(), sandbox).await.expect("known").state;
        state == State::Failed { disk: Disk::Whole }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_cannot_be_read_fails_its_sandbox_and_no_other() {
    let world = World::new().await;
    let (bad, good) = (world.create().await.id, world.create().await.id);
    for id in [bad, good] {
        let command = world.run_as(id, "c", "flood 100000; hang").await;
        eventually("it is stored", async || command.now().stdout.end == 100_000).await;
    }
    let handle = world.command(bad, "c").await.now().start.handle.0;
    let directory = world.directory.path().join("output").join(bad.to_string()).join(handle.to_string());
    eventually("its log is there", async || directory.is_dir()).await;
    std::fs::rename(&directory, directory.with_extension("gone")).expect("it moves");
    std::fs::write(&directory, "no directory").expect("a file");
    let world = world.crash().await;
    eventually("the sandbox has failed", async || {
        let state = world.engine.get(&owner(), bad).await.expect("known").state;
        state == State::Failed { disk: Disk::Whole }
    })
    .await;
    let reason = world.engine.get(&owner(), bad).await.expect("known").reason.expect("a reason");
    assert!(reason.contains("output"), "{reason}");
    assert!(matches!(world.command(good, "c").await.now().state, CommandState::Running { .. }));
    assert_eq!(outcome(&world.run(good, "echo hi").await.ended().await), Outcome::Exited(0));
    world.engine.delete(&owner(), bad).await.expect("it goes");
}

#[tokio::test(start_paused = true)]
async fn a_stopped_init_harms_nobody_else() {
    let world = World::new().await;
    let (stuck, well) = (world.create().await.id, world.create().await.id);
    let before = world.run_as(stuck, "before", "hang").await;
    world.host.silence(stuck, true);
    let error = world.engine.run(&owner(), stuck, script_of("echo late")).await.err();
    assert!(matches!(error, Some(EngineError::Unresponsive { .. })), "{error:?}");
    let named = CommandSpec { id: Some("named".parse().expect("an id")), ..script_of("echo late") };
    let error = world.engine.run(&owner(), stuck, named.clone()).await.err();
    assert!(matches!(error, Some(EngineError::Unresponsive { .. })), "{error:?}");
    let error = before.kill().await.expect_err("nobody answers");
    assert!(matches!(error, EngineError::Unresponsive { .. }), "{error:?}");
    // Others do not notice.
    assert_eq!(outcome(&world.run(well, "echo hi").await.ended().await), Outcome::Exited(0));
    assert_eq!(world.engine.list(&owner(), ListQuery::default()).await.expect("a page").items.len(), 2);
    world.create().await;
    // When it goes on, what has a name runs, and what nobody can name does not stay.
    world.host.silence(stuck, false);
    let command = world.engine.run(&owner(), stuck, named).await.expect("it is found");
    assert_eq!(outcome(&command.ended().await), Outcome::Exited(0));
    assert!(matches!(outcome(&before.ended().await), Outcome::Killed(_)));
    eventually("nothing is left running", async || world.host.remembered(stuck) == 0).await;
    // A stopped sandbox can be deleted.
    world.host.silence(stuck, true);
    world.engine.delete(&owner(), stuck).await.expect("it goes");
}

#[tokio::test(start_paused = true)]
async fn a_stopped_init_does_not_hold_up_a_restart() {
    let world = World::new().await;
    let (stuck, well) = (world.create().await.id, world.create().await.id);
    world.host.silence(stuck, true);
    let world = world.crash().await;
    assert_eq!(outcome(&world.run(well, "echo hi").await.ended().await), Outcome::Exited(0));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(world.engine.get(&owner(), stuck).await.expect("it is known").state, State::Running);
    world.host.silence(stuck, false);
    assert_eq!(outcome(&world.run(stuck, "echo hi").await.ended().await), Outcome::Exited(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_open_what_they_should_and_survive_a_restart() {
    let world = World::new().await;
    let alice = Owner::parse("alice").expect("an owner");
    let limits = KeyLimits {
        sandboxes: Some(3),
        cpu_millis: None,
        memory_bytes: Some(1 << 40),
        ..KeyLimits::default()
    };
    let (made, secret) = world
        .engine
        .create_key(KeySpec { owner: alice.clone(), admin: false, metrics_only: false, limits })
        .await
        .expect("a key");
    let bootstrap = KeySecret::parse("operator-chose-this-1").expect("long enough");
    world.engine.set_bootstrap_key(&bootstrap).await.expect("it is set");
    let world = world.crash().await;
    assert_eq!(world.engine.authenticate(secret.reveal()), Some(made.clone()));
    let operator = world.engine.authenticate("operator-chose-this-1").expect("it is a key");
    assert!(operator.admin && operator.owner == Owner::default_owner());
    let second = KeySecret::parse("operator-chose-this-2").expect("long enough");
    world.engine.set_bootstrap_key(&second).await.expect("it is set");
    assert_eq!(world.engine.authenticate("operator-chose-this-1"), None, "it was replaced");
    assert_eq!(world.engine.keys().await.expect("all").len(), 2);
    world.engine.delete_key(&made.id).await.expect("it goes");
    assert_eq!(world.engine.authenticate(secret.reveal()), None);
    let error = world.engine.delete_key(&made.id).await.expect_err("it is gone");
    assert!(matches!(error, EngineError::KeyNotFound { .. }));
    let database = std::fs::read(world.directory.path().join("shoal.db")).expect("the database");
    let log = std::fs::read(world.directory.path().join("shoal.db-wal")).unwrap_or_default();
    for needle in [secret.reveal(), "operator-chose-this"] {
        let within = |hay: &[u8]| hay.windows(needle.len()).any(|part| part == needle.as_bytes());
        assert!(!within(&database) && !within(&log), "a secret is on disk");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_engine_refuses_and_leaves_sandboxes_alone() {
    let world = World::new().await;
    let sandbox = world.create().await;
    let before = world.host.leftovers();
    world.engine.stop().await;
    assert_eq!(world.host.leftovers(), before);
    assert!(matches!(
        world.engine.create(&key(), SandboxSpec::default(), Wait::Ready).await,
        Err(EngineError::Stopping)
    ));
    assert!(matches!(world.engine.delete(&owner(), sandbox.id).await, Err(EngineError::Stopping)));
    let world = world.crash().await;
    assert_eq!(outcome(&world.run(sandbox.id, "true").await.ended().await), Outcome::Exited(0));
}
