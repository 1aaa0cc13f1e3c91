//! Daemons and inits of different ages, on the fake host.

use crate::common::*;
use engine::*;
use runtime::fake::FakeHost;
use shoal_engine as engine;
use wire::guest::{VERSION, VERSION_MIN, Versions};

async fn host_of(min: u32, max: u32) -> World {
    let host = FakeHost::new();
    host.speak(Versions { min, max });
    World::on(host).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_init_that_is_newer_speaks_the_daemons_version() {
    let world = host_of(VERSION, VERSION + 5).await;
    let sandbox = world.create().await.id;
    let command = world.run(sandbox, "flood 100000; exit 3").await;
    let read = read_all(command.attach(Offsets::default()), Offsets::default()).await;
    assert_eq!(read.stdout, pattern(0, 100_000));
    assert_eq!(outcome(&command.ended().await), Outcome::Exited(3));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_cannot_be_made_for_want_of_a_version_is_cleaned_up() {
    let world = host_of(VERSION + 1, VERSION + 5).await;
    let refused = world.engine.create(&key(), SandboxSpec::default(), Wait::Ready).await;
    assert!(matches!(refused, Err(EngineError::Create { .. })), "{refused:?}");
    assert_eq!(world.host.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_of_no_common_version_is_left_for_a_daemon_that_speaks_it() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    world.run_as(sandbox, "long", "flood 200000; gate go; flood 200000; exit 5").await;

    // The daemon is of another age now; that init is of another age comes to the same.
    world.host.speak(Versions { min: VERSION + 1, max: VERSION + 5 });
    let world = world.crash().await;
    let get = async |world: &World| world.engine.get(&owner(), sandbox).await.expect("it is known");
    eventually("the two have met", async || matches!(get(&world).await.state, State::Failed { .. })).await;
    let reason = get(&world).await.reason.expect("what failed has a reason");
    assert!(reason.contains(&format!("{} to {}", VERSION + 1, VERSION + 5)), "{reason}");
    let refused = world.engine.run(&owner(), sandbox, script_of("echo no")).await.map(drop);
    let theirs = Versions { min: VERSION + 1, max: VERSION + 5 };
    let ours = Versions { min: VERSION_MIN, max: VERSION };
    match refused {
        Err(EngineError::NoCommonVersion { id, theirs: said, ours: own }) => {
            assert_eq!((id, said, own), (sandbox, theirs, ours));
        }
        other => panic!("{other:?}"),
    }
    let long = world.command(sandbox, "long").await.now();
    assert!(long.ended_at.is_none(), "its command was not given up: {long:?}");

    world.host.speak(ours);
    let world = world.crash().await;
    eventually("it runs again", async || get(&world).await.state == State::Running).await;
    world.host.open_gate("go");
    let long = world.command(sandbox, "long").await;
    assert_eq!(outcome(&long.ended().await), Outcome::Exited(5));
    let read = read_all(long.attach(Offsets::default()), Offsets::default()).await;
    let kept = pattern(read.lost, 400_000 - read.lost);
    assert!(read.stdout == kept, "no byte is lost or doubled but what is kept no more");
    world.engine.delete(&owner(), sandbox).await.expect("it goes");
    assert_eq!(world.host.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_of_no_common_version_can_be_deleted() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    world.host.speak(Versions { min: VERSION + 1, max: VERSION + 5 });
    let world = world.crash().await;
    eventually("the two have met", async || {
        let now = world.engine.get(&owner(), sandbox).await.expect("it is known");
        matches!(now.state, State::Failed { .. })
    })
    .await;
    world.engine.delete(&owner(), sandbox).await.expect("it goes");
    assert_eq!(world.host.leftovers(), []);
    let world = world.crash().await;
    let gone = world.engine.get(&owner(), sandbox).await;
    assert!(matches!(gone, Err(EngineError::SandboxNotFound { .. })), "{gone:?}");
}
