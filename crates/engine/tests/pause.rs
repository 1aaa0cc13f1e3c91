//! Pauses and resumes on the fake host: what they keep, what they give back, what requests do to a paused sandbox, and what
//! happens when a step fails or a daemon dies in the middle.

use std::time::Duration;

use crate::common::clock::StillClock;
use crate::common::*;
use engine::*;
use runtime::fake::{FakeFailure, FakeStep, FakeThing};
use shoal_engine as engine;
use wire::SandboxId;

const KEEP: PauseSpec = PauseSpec { kept: Kept::Frozen, grace: Duration::ZERO };
const DROP: PauseSpec = PauseSpec { kept: Kept::Dropped, grace: Duration::ZERO };

async fn state(world: &World, sandbox: SandboxId) -> State {
    world.engine.get(&owner(), sandbox).await.expect("it is there").state
}

async fn becomes(world: &World, sandbox: SandboxId, expected: State) {
    eventually(&format!("it is {expected:?}"), async || state(world, sandbox).await == expected).await;
}

fn things(world: &World, sandbox: SandboxId) -> Vec<FakeThing> {
    let left = world.host.leftovers().into_iter();
    left.filter(|(id, _)| *id == sandbox).map(|(_, thing)| thing).collect()
}

async fn pause(world: &World, sandbox: SandboxId, spec: PauseSpec) {
    let paused = world.engine.pause(&owner(), sandbox, spec).await.expect("it can be paused");
    assert_eq!(paused.state, State::Paused(spec.kept));
}

async fn resume(world: &World, sandbox: SandboxId) {
    let resumed = world.engine.resume(&key(), sandbox).await.expect("it can be resumed");
    assert_eq!(resumed.state, State::Running);
}

async fn runs_commands(world: &World, sandbox: SandboxId) {
    let ended = world.run(sandbox, "echo on").await.ended().await;
    assert_eq!(outcome(&ended), Outcome::Exited(0));
}

async fn write(world: &World, sandbox: SandboxId, path: &str) {
    let files = world.engine.files(&owner(), sandbox, None).expect("its files");
    files.make_directory(path.as_bytes(), true, None).await.expect("it is made");
}

async fn has(world: &World, sandbox: SandboxId, path: &str) -> bool {
    let files = world.engine.files(&owner(), sandbox, None).expect("its files");
    files.stat(path.as_bytes(), wire::files::Links::Follow).await.is_ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_sandbox_goes_on_where_it_was() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let command = world.run_as(sandbox, "waits", "gate g\necho on").await;
    for _ in 0..10 {
        pause(&world, sandbox, KEEP).await;
        assert_eq!(world.host.frozen().0, [sandbox]);
        pause(&world, sandbox, KEEP).await;
        resume(&world, sandbox).await;
        assert_eq!(world.host.frozen().0, []);
        resume(&world, sandbox).await;
    }
    world.host.open_gate("g");
    assert_eq!(outcome(&command.ended().await), Outcome::Exited(0));
    assert_eq!(world.host.launches(), 1);
    world.engine.delete(&owner(), sandbox).await.expect("it can be deleted");
    assert_eq!(world.host.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_sandbox_keeps_its_files_and_ends_its_commands() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    write(&world, sandbox, "/workspace/kept").await;
    let hanging = world.run_as(sandbox, "hanging", "hang").await;
    for round in 0..10 {
        pause(&world, sandbox, DROP).await;
        assert_eq!(things(&world, sandbox), [FakeThing::Disk]);
        resume(&world, sandbox).await;
        assert!(has(&world, sandbox, "/workspace/kept").await, "round {round}");
        runs_commands(&world, sandbox).await;
    }
    assert_eq!(outcome(&hanging.ended().await), Outcome::SandboxGone);
    assert_eq!(world.host.launches(), 11);
    // Frozen first, then dropped, then deleted without ever running again.
    pause(&world, sandbox, KEEP).await;
    pause(&world, sandbox, DROP).await;
    assert_eq!(world.host.frozen().0, []);
    world.engine.delete(&owner(), sandbox).await.expect("it can be deleted");
    assert_eq!((world.host.leftovers(), world.host.launches()), (Vec::new(), 11));
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_get_a_grace_and_their_results_are_kept() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let hanging = world.run_as(sandbox, "hanging", "hang").await;
    pause(&world, sandbox, PauseSpec { grace: Duration::from_secs(20), ..DROP }).await;
    // The fake ends a command at SIGTERM, and the pause waits for no longer than that.
    assert_eq!(outcome(&hanging.ended().await), Outcome::Signaled(15));
    let long = PauseSpec { grace: Duration::from_secs(601), ..DROP };
    let refused = world.engine.pause(&owner(), sandbox, long).await.expect_err("it is too long");
    assert!(matches!(refused, EngineError::Invalid { field: Field::GraceSeconds, .. }), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_resume_a_paused_sandbox_once_unless_they_do_not_want_to() {
    for spec in [KEEP, DROP] {
        let world = World::new().await;
        let sandbox = world.create().await.id;
        write(&world, sandbox, "/workspace").await;
        pause(&world, sandbox, spec).await;
        let never = CommandSpec { resume: Resume::Never, ..script_of("echo on") };
        let refused = world.engine.run(&owner(), sandbox, never).await.map(|_| ()).expect_err("it is paused");
        assert!(matches!(refused, EngineError::WrongState { state: "paused", .. }), "{refused:?}");
        let files =
            world.engine.files(&owner(), sandbox, None).expect("its files").with_resume(Resume::Never);
        let refused = files.stat(b"/workspace", wire::files::Links::Follow).await.expect_err("it is paused");
        assert!(matches!(refused, EngineError::WrongState { state: "paused", .. }), "{refused:?}");
        // Looking never resumes it.
        world.engine.list(&owner(), ListQuery::default()).await.expect("a list");
        world.engine.explain(&owner(), sandbox).await.expect("an explanation");
        world.engine.stats(&owner(), sandbox).await.expect("numbers");
        assert_eq!(state(&world, sandbox).await, State::Paused(spec.kept));

        let launches = world.host.launches();
        let mut all = tokio::task::JoinSet::new();
        for number in 0..50 {
            let engine = world.engine.clone();
            all.spawn(async move {
                if number % 2 == 0 {
                    let files = engine.files(&owner(), sandbox, None).expect("its files");
                    files.stat(b"/workspace", wire::files::Links::Follow).await.expect("it is there");
                } else {
                    let command =
                        engine.run(&owner(), sandbox, script_of("echo on")).await.expect("it starts");
                    assert_eq!(outcome(&command.ended().await), Outcome::Exited(0));
                }
            });
        }
        all.join_all().await;
        let more = u64::from(spec == DROP);
        assert_eq!(world.host.launches(), launches + more);
        assert_eq!(state(&world, sandbox).await, State::Running);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn input_and_signals_reach_a_command_of_a_frozen_sandbox() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let hanging = world.run(sandbox, "hang").await;
    pause(&world, sandbox, KEEP).await;
    let refused = hanging.clone().with_resume(Resume::Never).kill().await.expect_err("it is paused");
    assert!(matches!(refused, EngineError::WrongState { state: "paused", .. }), "{refused:?}");
    hanging.kill().await.expect("the kill resumes it");
    hanging.ended().await;
    assert_eq!(state(&world, sandbox).await, State::Running);
    // A command that is over resumes nothing.
    pause(&world, sandbox, KEEP).await;
    hanging.kill().await.expect_err("it is over");
    assert_eq!(state(&world, sandbox).await, State::Paused(Kept::Frozen));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_dropped_sandbox_had_reserved_is_for_others_until_it_runs_again() {
    let limits = KeyLimits { memory_bytes: Some(LIMITS_OF_ONE), ..KeyLimits::default() };
    let capacity = Capacity { memory_bytes: LIMITS_OF_ONE, ..roomy() };
    for (key, capacity) in [(key_of("default", limits), roomy()), (key(), capacity)] {
        let world = World::with(runtime::fake::FakeHost::new(), KEPT, capacity).await;
        let create = async || {
            let spec = SandboxSpec { memory_bytes: Some(LIMITS_OF_ONE), ..SandboxSpec::default() };
            world.engine.create(&key, spec, Wait::Ready).await.map(|sandbox| sandbox.id)
        };
        let first = create().await.expect("there is room for one");
        create().await.expect_err("and for no other");
        pause(&world, first, KEEP).await;
        create().await.expect_err("a frozen one takes its memory");
        pause(&world, first, DROP).await;
        let second = create().await.expect("a dropped one does not");
        let refused = world.engine.resume(&key, first).await.expect_err("there is no room");
        assert!(matches!(refused, EngineError::Quota { .. } | EngineError::Full { .. }), "{refused:?}");
        assert_eq!(state(&world, first).await, State::Paused(Kept::Dropped));
        world.engine.delete(&owner(), second).await.expect("it goes");
        world.engine.resume(&key, first).await.expect("there is room again");
        create().await.expect_err("and now there is not");
        pause(&world, first, DROP).await;
        world.engine.delete(&owner(), first).await.expect("it goes");
        create().await.expect("nothing was counted twice");
    }
}

const LIMITS_OF_ONE: u64 = 256 << 20;

/// The quota of an owner holds for requests that resume a sandbox, too.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_does_not_resume_a_sandbox_beyond_the_quota() {
    let world = World::new().await;
    let limits = KeyLimits { memory_bytes: Some(LIMITS_OF_ONE), ..KeyLimits::default() };
    let spec = KeySpec { owner: owner(), admin: false, metrics_only: false, limits };
    let (key, _) = world.engine.create_key(spec).await.expect("a key");
    let create = async || {
        let spec = SandboxSpec { memory_bytes: Some(LIMITS_OF_ONE), ..SandboxSpec::default() };
        world.engine.create(&key, spec, Wait::Ready).await.expect("there is room").id
    };
    let first = create().await;
    pause(&world, first, DROP).await;
    create().await;
    let refused =
        world.engine.run(&owner(), first, script_of("echo on")).await.map(|_| ()).expect_err("no room");
    assert!(matches!(refused, EngineError::Quota { .. }), "{refused:?}");
    assert_eq!(state(&world, first).await, State::Paused(Kept::Dropped));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resume_that_fails_at_any_step_leaves_the_sandbox_paused_with_its_files() {
    for step in FakeStep::ALL {
        // A failed greeting of a launch is tried for many seconds, and a failed connection too; an init that has gone is not.
        let how = match step {
            FakeStep::Connect | FakeStep::Greet => FakeFailure::Gone,
            _ => FakeFailure::Refused,
        };
        let world = World::new().await;
        let sandbox = world.create().await.id;
        write(&world, sandbox, "/workspace/kept").await;
        pause(&world, sandbox, DROP).await;
        world.host.fail(step, how, 1);
        let failed = world.engine.resume(&key(), sandbox).await.expect_err("a step fails");
        assert!(matches!(failed, EngineError::Resume { .. }), "{step:?}: {failed:?}");
        assert_eq!(state(&world, sandbox).await, State::Paused(Kept::Dropped), "{step:?}");
        eventually("nothing but its files is left", async || things(&world, sandbox) == [FakeThing::Disk])
            .await;
        resume(&world, sandbox).await;
        assert!(has(&world, sandbox, "/workspace/kept").await, "{step:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_launcher_that_dies_during_a_resume_is_asked_again() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    pause(&world, sandbox, DROP).await;
    world.host.fail(FakeStep::Process, FakeFailure::LauncherGone, 1);
    resume(&world, sandbox).await;
    runs_commands(&world, sandbox).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_that_fails_is_undone_or_tried_until_it_is_done() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    world.host.fail(FakeStep::Still, FakeFailure::Refused, 1);
    world.engine.pause(&owner(), sandbox, KEEP).await.expect_err("it cannot be frozen");
    eventually("it is not frozen", async || world.host.frozen().0.is_empty()).await;
    assert_eq!(state(&world, sandbox).await, State::Running);
    runs_commands(&world, sandbox).await;

    world.host.fail(FakeStep::End, FakeFailure::Refused, 2);
    pause(&world, sandbox, DROP).await;
    resume(&world, sandbox).await;

    pause(&world, sandbox, KEEP).await;
    world.host.fail(FakeStep::Going, FakeFailure::Refused, 1);
    world.engine.resume(&key(), sandbox).await.expect_err("it cannot be thawed");
    becomes(&world, sandbox, State::Running).await;
    runs_commands(&world, sandbox).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_cannot_be_thawed_fails_and_can_be_resumed_from_its_files() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    write(&world, sandbox, "/workspace/kept").await;
    pause(&world, sandbox, KEEP).await;
    world.host.fail(FakeStep::Going, FakeFailure::Refused, u32::MAX);
    world.engine.resume(&key(), sandbox).await.expect_err("it cannot be thawed");
    becomes(&world, sandbox, State::Failed { disk: Disk::Whole }).await;
    world.host.fail(FakeStep::Going, FakeFailure::Refused, 0);
    resume(&world, sandbox).await;
    assert!(has(&world, sandbox, "/workspace/kept").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_sandbox_is_resumed_from_its_files() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    write(&world, sandbox, "/workspace/kept").await;
    let hanging = world.run_as(sandbox, "hanging", "hang").await;
    world.host.kill_init(sandbox);
    becomes(&world, sandbox, State::Failed { disk: Disk::Whole }).await;
    // Requests do not: its processes are lost, and the caller should know.
    let refused = world.engine.run(&owner(), sandbox, script_of("echo on")).await.map(|_| ());
    assert!(matches!(refused, Err(EngineError::SandboxFailed { .. })), "{refused:?}");
    world.engine.pause(&owner(), sandbox, DROP).await.expect_err("it does not run");
    resume(&world, sandbox).await;
    assert!(has(&world, sandbox, "/workspace/kept").await);
    runs_commands(&world, sandbox).await;
    assert_eq!(outcome(&hanging.ended().await), Outcome::SandboxGone);
    assert_eq!(world.host.violations(sandbox), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_dies_at_any_step_of_a_resume_leaves_it_paused_and_whole() {
    for step in [FakeStep::Prepare, FakeStep::Disk, FakeStep::Limits, FakeStep::Process, FakeStep::Connect] {
        let world = World::new().await;
        let sandbox = world.create().await.id;
        write(&world, sandbox, "/workspace/kept").await;
        pause(&world, sandbox, DROP).await;
        world.host.hold(step);
        let begun = world.host.launches() + u64::from(step != FakeStep::Prepare);
        let engine = world.engine.clone();
        let resuming = tokio::spawn(async move { engine.resume(&key(), sandbox).await });
        if step != FakeStep::Prepare {
            eventually("it is being launched", async || world.host.launches() == begun).await;
        }
        world.engine.stop().await;
        resuming.await.expect("no panic").expect_err("the daemon is gone");
        world.host.release(step);
        let world = world.crash().await;
        eventually("only its files are left", async || things(&world, sandbox) == [FakeThing::Disk]).await;
        assert_eq!(state(&world, sandbox).await, State::Paused(Kept::Dropped), "{step:?}");
        resume(&world, sandbox).await;
        assert!(has(&world, sandbox, "/workspace/kept").await, "{step:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_dies_during_a_pause_or_a_thaw_finishes_it_at_its_next_start() {
    for (before, spec, step, expected) in [
        (None, Some(KEEP), FakeStep::Still, State::Paused(Kept::Frozen)),
        (None, Some(DROP), FakeStep::End, State::Paused(Kept::Dropped)),
        (Some(KEEP), Some(DROP), FakeStep::End, State::Paused(Kept::Dropped)),
        (Some(KEEP), None, FakeStep::Going, State::Running),
    ] {
        let world = World::new().await;
        let sandbox = world.create().await.id;
        if let Some(before) = before {
            pause(&world, sandbox, before).await;
        }
        world.host.hold(step);
        let engine = world.engine.clone();
        let changing = tokio::spawn(async move {
            match spec {
                Some(spec) => engine.pause(&owner(), sandbox, spec).await.map(|_| ()),
                None => engine.resume(&key(), sandbox).await.map(|_| ()),
            }
        });
        // The goal is in the row once a request for files is turned away, or the processes stand still.
        match (spec, step) {
            (Some(_), FakeStep::Still) => {
                eventually("it is being frozen", async || !world.host.frozen().0.is_empty()).await;
            }
            _ => {
                eventually("the goal is written", async || goal_is_written(&world, sandbox).await).await;
            }
        }
        world.engine.stop().await;
        changing.await.expect("no panic").expect_err("the daemon is gone");
        // What the dead daemon had asked the kernel for may or may not have happened.
        if step == FakeStep::Still {
            runtime::Isolation::freeze(&world.host, sandbox, wire::launch::Motion::Going)
                .await
                .expect("it thaws");
        }
        world.host.release(step);
        let world = world.crash().await;
        becomes(&world, sandbox, expected).await;
        if expected != State::Running {
            resume(&world, sandbox).await;
        }
        runs_commands(&world, sandbox).await;
    }
}

/// Whether the row's goal is not what its state is.
async fn goal_is_written(world: &World, sandbox: SandboxId) -> bool {
    let db = rusqlite::Connection::open(world.directory.path().join("shoal.db")).expect("a database");
    let read = "SELECT state || detail <> goal || COALESCE(goal_kept, '') FROM sandboxes WHERE id = ?1";
    db.query_row(read, [sandbox.bits().to_be_bytes()], |row| row.get(0)).expect("a row")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_was_frozen_when_the_daemon_ended_is_adopted_when_it_thaws() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let command = world.run_as(sandbox, "waits", "gate g\necho on").await;
    drop(command);
    pause(&world, sandbox, KEEP).await;
    let world = world.crash().await;
    assert_eq!(state(&world, sandbox).await, State::Paused(Kept::Frozen));
    world.host.open_gate("g");
    let command = world.command(sandbox, "waits").await;
    assert!(matches!(command.now().state, CommandState::Starting | CommandState::Running { .. }));
    runs_commands(&world, sandbox).await;
    assert_eq!(outcome(&command.ended().await), Outcome::Exited(0));
    assert_eq!(command.output(1000).await.expect("its output").stdout, b"on\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delete_beats_a_pause_with_a_long_grace_and_a_resume() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let hanging = world.run(sandbox, "hang").await;
    world.host.silence(sandbox, true);
    let engine = world.engine.clone();
    let long = PauseSpec { kept: Kept::Dropped, grace: Duration::from_secs(600) };
    let pausing = tokio::spawn(async move { engine.pause(&owner(), sandbox, long).await });
    eventually("the goal is written", async || goal_is_written(&world, sandbox).await).await;
    world.engine.delete(&owner(), sandbox).await.expect("it can be deleted");
    pausing.await.expect("no panic").expect_err("it was deleted");
    drop(hanging);
    assert_eq!(world.host.leftovers(), []);

    let sandbox = world.create().await.id;
    pause(&world, sandbox, DROP).await;
    world.host.hold(FakeStep::Process);
    let resumes = [0, 1].map(|_| {
        let engine = world.engine.clone();
        tokio::spawn(async move { engine.resume(&key(), sandbox).await })
    });
    let engine = world.engine.clone();
    let deleting = tokio::spawn(async move { engine.delete(&owner(), sandbox).await });
    // A delete that came before both resumes waits for no process and may be over already.
    eventually("it is being deleted or gone", async || {
        world.engine.get(&owner(), sandbox).await.map_or(true, |found| found.state == State::Deleting)
    })
    .await;
    world.host.release(FakeStep::Process);
    deleting.await.expect("no panic").expect("it can be deleted");
    for resume in resumes {
        let _ = resume.await.expect("no panic"); // It came before the delete, or after it.
    }
    eventually("nothing is left", async || world.host.leftovers().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pauses_and_resumes_that_cross_each_other_all_come_to_an_end() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let mut all = tokio::task::JoinSet::new();
    for number in 0..40 {
        let engine = world.engine.clone();
        all.spawn(async move {
            match number % 4 {
                0 => drop(engine.pause(&owner(), sandbox, KEEP).await.expect("it is paused")),
                1 => drop(engine.pause(&owner(), sandbox, DROP).await.expect("it is paused")),
                _ => drop(engine.resume(&key(), sandbox).await.expect("it is resumed")),
            }
        });
    }
    all.join_all().await;
    resume(&world, sandbox).await;
    runs_commands(&world, sandbox).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_restart_of_the_machine_sandboxes_are_paused_and_say_so() {
    let (host, clock) = (runtime::fake::FakeHost::new(), StillClock::new());
    let directory = tempfile::tempdir().expect("a directory");
    let start = async || {
        let config = EngineConfig {
            data_dir: directory.path().into(),
            capacity: roomy(),
            output_kept_max: KEPT,
            images: Default::default(),
            network: Default::default(),
        };
        let backend = std::sync::Arc::new(host.clone());
        Engine::start_at(config, backend, std::sync::Arc::new(clock.clone())).await.expect("it starts")
    };
    let engine = start().await;
    let create = async |engine: &Engine| {
        engine.create(&key(), SandboxSpec::default(), Wait::Ready).await.expect("it is made").id
    };
    let (running, frozen) = (create(&engine).await, create(&engine).await);
    engine.pause(&owner(), frozen, KEEP).await.expect("it is paused");
    let hanging = engine.run(&owner(), running, script_of("hang")).await.expect("it starts").now().id;
    engine.stop().await;
    drop(engine);
    host.reboot();
    clock.reboot(60, 30);
    let engine = start().await;
    for sandbox in [running, frozen] {
        eventually("it is paused", async || {
            let found = engine.get(&owner(), sandbox).await.expect("it is there");
            found.state == State::Paused(Kept::Dropped)
                && found.reason.is_some_and(|reason| reason.contains("machine was restarted"))
        })
        .await;
    }
    let hanging = engine.command(&owner(), running, &hanging).await.expect("it is known").ended().await;
    assert_eq!(outcome(&hanging), Outcome::SandboxGone);
    for sandbox in [running, frozen] {
        let resumed = engine.resume(&key(), sandbox).await.expect("it can be resumed");
        assert_eq!((resumed.state, resumed.reason), (State::Running, None));
    }
    // Another start in the same boot changes nothing.
    engine.stop().await;
    let engine = start().await;
    assert_eq!(engine.get(&owner(), running).await.expect("it is there").state, State::Running);
}
