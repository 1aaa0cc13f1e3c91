//! How long sandboxes live, on the fake host and with clocks that stand still until they are moved.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::common::clock::StillClock;
use crate::common::*;
use engine::*;
use runtime::Usage;
use runtime::fake::{FakeFailure, FakeHost, FakeStep};
use shoal_engine as engine;
use tempfile::TempDir;
use wire::SandboxId;

/// An engine whose time stands still.
struct Still {
    clock: StillClock,
    host: FakeHost,
    directory: TempDir,
    engine: Engine,
}

impl Still {
    async fn new() -> Self {
        let (clock, host) = (StillClock::new(), FakeHost::new());
        let directory = tempfile::tempdir().expect("a directory");
        let engine = Self::start(&clock, &host, &directory).await;
        Self { clock, host, directory, engine }
    }

    async fn start(clock: &StillClock, host: &FakeHost, directory: &TempDir) -> Engine {
        let config = EngineConfig {
            data_dir: directory.path().into(),
            capacity: roomy(),
            output_kept_max: KEPT,
            images: Default::default(),
            network: Default::default(),
        };
        let started = Engine::start_at(config, Arc::new(host.clone()), Arc::new(clock.clone())).await;
        started.expect("the engine starts")
    }

    /// The daemon dies; something happens; the next one starts.
    async fn crash(self, meanwhile: impl FnOnce(&StillClock)) -> Self {
        let Self { clock, host, directory, engine } = self;
        drop(engine);
        meanwhile(&clock);
        let engine = Self::start(&clock, &host, &directory).await;
        Self { clock, host, directory, engine }
    }

    async fn create(&self, rules: &[(Since, u64, Action)]) -> SandboxId {
        let spec = SandboxSpec { lifetime: lifetime(rules), ..SandboxSpec::default() };
        let made = self.engine.create(&key(), spec, Wait::Ready).await.expect("the sandbox is made").id;
        self.clock.settled().await;
        made
    }

    /// Moves the clock, and lets every task that waited for it run.
    async fn pass(&self, seconds: f64) {
        self.clock.advance(seconds);
        self.clock.settled().await;
    }

    async fn lives(&self, id: SandboxId) -> bool {
        self.engine.get(&owner(), id).await.is_ok_and(|sandbox| sandbox.state != State::Deleting)
    }

    async fn state(&self, id: SandboxId) -> State {
        self.engine.get(&owner(), id).await.expect("it lives").state
    }

    async fn goes(&self, id: SandboxId) {
        eventually("it is gone", async || self.engine.get(&owner(), id).await.is_err()).await;
        assert!(self.host.leftovers().iter().all(|(left, _)| *left != id));
    }

    async fn explain(&self, id: SandboxId) -> Explanation {
        self.engine.explain(&owner(), id).await.expect("it lives")
    }

    async fn left(&self, id: SandboxId) -> Duration {
        self.explain(id).await.end.expect("a rule ends it").left
    }

    async fn run(&self, id: SandboxId, script: &str) -> CommandRef {
        self.engine.run(&owner(), id, script_of(script)).await.expect("the command starts")
    }
}

const DELETE: Action = Action::Delete;

fn lifetime(rules: &[(Since, u64, Action)]) -> Lifetime {
    let rule = |(since, seconds, action): &(Since, u64, Action)| Rule {
        since: *since,
        after: Duration::from_secs(*seconds),
        action: *action,
    };
    Lifetime::new(rules.iter().map(rule).collect()).expect("they are rules")
}

fn cpu(seconds: f64) -> Usage {
    Usage { cpu_time: Duration::from_secs_f64(seconds), ..Usage::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_clock_ends_a_sandbox_at_its_time_and_not_before() {
    for since in [Since::LastUse, Since::Start, Since::Creation] {
        let still = Still::new().await;
        let id = still.create(&[(since, 100, DELETE)]).await;
        still.pass(99.0).await;
        assert!(still.lives(id).await, "{since:?}");
        assert_eq!(still.left(id).await, Duration::from_secs(1));
        still.clock.advance(1.0);
        still.goes(id).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_rules_a_sandbox_stays() {
    let still = Still::new().await;
    let id = still.engine.create(&key(), SandboxSpec::default(), Wait::Ready).await.expect("made").id;
    still.clock.advance(1e9);
    let explanation = still.explain(id).await;
    assert_eq!(explanation.end, None);
    assert!(explanation.sentence.contains("until it is deleted"), "{}", explanation.sentence);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_someone_waits_for_is_a_use_and_a_forgotten_one_is_not() {
    let still = Still::new().await;
    let id = still.create(&[(Since::LastUse, 100, DELETE)]).await;
    let command = still.run(id, "gate later").await;
    let waiting = tokio::spawn({
        let command = command.clone();
        async move { command.ended().await }
    });
    eventually("someone waits", async || still.explain(id).await.uses == 1).await;
    for _ in 0..10 {
        still.pass(99.0).await;
    }
    assert!(still.lives(id).await, "for as long as someone waits");
    waiting.abort();
    eventually("nobody waits", async || still.explain(id).await.uses == 0).await;
    assert_eq!(still.left(id).await, Duration::from_secs(100), "the use has just ended");
    still.pass(99.0).await;
    assert!(still.lives(id).await);
    still.clock.advance(1.0);
    still.goes(id).await;
    assert_eq!(outcome(&command.ended().await), Outcome::SandboxGone);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_stream_is_a_use_and_looking_is_not() {
    let still = Still::new().await;
    let id = still.create(&[(Since::LastUse, 100, DELETE)]).await;
    let command = still.run(id, "hang").await;
    let stream = command.attach(Offsets::default());
    still.pass(1000.0).await;
    assert!(still.lives(id).await);
    drop(stream);
    let files = still.engine.files(&owner(), id, None).expect("it has files");
    still.pass(50.0).await;
    let reading = files.read(b"/flood/10000000", wire::files::ByteRange::Whole).await.expect("it is there");
    still.pass(1000.0).await;
    assert_eq!(still.explain(id).await.uses, 1, "a download is a use");
    drop(reading);
    still.pass(60.0).await;
    // None of these is a use.
    still.engine.get(&owner(), id).await.expect("it lives");
    still.engine.list(&owner(), ListQuery::default()).await.expect("a page");
    still.engine.commands(&owner(), id, CommandQuery::default()).await.expect("a page");
    command.now();
    assert_eq!(still.left(id).await, Duration::from_secs(40));
    command.signal(Signal::parse("USR1").expect("a signal")).await.expect("it runs");
    assert_eq!(still.left(id).await, Duration::from_secs(100), "a signal is a use");
    still.clock.advance(100.0);
    still.goes(id).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_uses_the_processor_keeps_its_sandbox_alive() {
    let still = Still::new().await;
    let id = still.create(&[(Since::LastUse, 80, DELETE)]).await;
    still.run(id, "hang").await;
    let mut used = 0.0;
    for _ in 0..30 {
        used += 0.5; // Half a second in ten: well above what counts.
        still.host.set_usage(id, cpu(used));
        still.pass(10.0).await;
    }
    assert!(still.lives(id).await);
    let explanation = still.explain(id).await;
    assert_eq!(explanation.last_use.map(|(_, by)| by), Some(LastUse::Processor));
    assert!(explanation.sentence.contains("works by itself"), "{}", explanation.sentence);
    // Now it only wakes up now and then.
    for _ in 0..7 {
        used += 0.05;
        still.host.set_usage(id, cpu(used));
        still.pass(10.0).await;
        assert!(still.lives(id).await);
    }
    still.clock.advance(10.0);
    still.goes(id).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_request_used_is_not_counted_again_after_it() {
    let still = Still::new().await;
    let id = still.create(&[(Since::LastUse, 80, DELETE)]).await;
    still.pass(10.0).await;
    still.host.set_usage(id, cpu(1000.0));
    still.run(id, "echo built").await.ended().await;
    still.pass(79.0).await;
    assert_eq!(still.left(id).await, Duration::from_secs(1));
    still.clock.advance(1.0);
    still.goes(id).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_touch_begins_all_clocks_anew_but_that_of_creation() {
    let still = Still::new().await;
    let id = still.create(&[(Since::Start, 100, DELETE), (Since::Creation, 250, DELETE)]).await;
    for _ in 0..2 {
        still.pass(99.0).await;
        let explanation = still.engine.touch(&owner(), id).await.expect("it lives");
        assert!(explanation.end.expect("a rule ends it").left <= Duration::from_secs(100));
    }
    let end = still.explain(id).await.end.expect("a rule ends it");
    assert_eq!((end.rule, end.left, end.renewal), (1, Duration::from_secs(52), Renewal::Nothing));
    still.clock.advance(52.0);
    still.goes(id).await;
    let late = still.engine.touch(&owner(), id).await.expect_err("it is gone");
    assert!(matches!(late, EngineError::SandboxNotFound { .. }), "{late}");
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_can_be_changed_and_taken_away_and_a_new_one_never_strikes_at_once() {
    let still = Still::new().await;
    let id = still.create(&[(Since::LastUse, 100, DELETE)]).await;
    let change = async |rules: &[(Since, u64, Action)]| {
        let update = SandboxUpdate { lifetime: Some(lifetime(rules)), ..SandboxUpdate::default() };
        still.engine.update(&owner(), id, update).await.expect("it lives")
    };
    still.pass(99.0).await;
    let changed = change(&[(Since::LastUse, 10, DELETE), (Since::Start, 20, DELETE)]).await;
    assert_eq!(changed.lifetime.rules().len(), 2);
    assert_eq!(still.left(id).await, Duration::from_secs(10));
    change(&[]).await;
    still.clock.advance(1e6);
    assert_eq!(still.explain(id).await.end, None);
    change(&[(Since::Start, 30, DELETE)]).await;
    still.clock.settled().await;
    still.pass(29.0).await;
    assert!(still.lives(id).await);
    still.clock.advance(1.0);
    still.goes(id).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_pause_a_sandbox_and_a_use_resumes_it() {
    for (action, kept) in [(Action::PauseKeepMemory, Kept::Frozen), (Action::PauseDropMemory, Kept::Dropped)]
    {
        let still = Still::new().await;
        let id = still.create(&[(Since::LastUse, 10, action), (Since::Creation, 100, DELETE)]).await;
        still.pass(9.0).await;
        assert_eq!(still.state(id).await, State::Running);
        for _ in 0..3 {
            still.clock.advance(10.0);
            eventually("it is paused", async || still.state(id).await == State::Paused(kept)).await;
            let reason = still.engine.get(&owner(), id).await.expect("it lives").reason;
            assert_eq!(reason.as_deref(), Some("nobody has used it for 10 s"));
            let explanation = still.explain(id).await;
            assert_eq!(explanation.end.expect("it ends").rule, 1, "{}", explanation.sentence);
            assert!(explanation.sentence.starts_with("It is paused"), "{}", explanation.sentence);
            assert_eq!(outcome(&still.run(id, "echo on").await.ended().await), Outcome::Exited(0));
            assert_eq!(still.state(id).await, State::Running);
        }
        // The clock of creation goes on whatever happens, and deletes a paused sandbox as well.
        still.clock.advance(10.0);
        eventually("it is paused", async || still.state(id).await == State::Paused(kept)).await;
        let launches = still.host.launches();
        still.clock.settled().await;
        still.clock.advance(60.0);
        still.goes(id).await;
        assert_eq!(still.host.launches(), launches, "it was not resumed to be deleted");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_sandbox_gives_its_memory_up_later_and_is_deleted_at_last() {
    let still = Still::new().await;
    let rules = [
        (Since::LastUse, 10, Action::PauseKeepMemory),
        (Since::Paused, 20, Action::PauseDropMemory),
        (Since::LastUse, 300, DELETE),
    ];
    let id = still.create(&rules).await;
    still.clock.advance(10.0);
    eventually("it is frozen", async || still.state(id).await == State::Paused(Kept::Frozen)).await;
    still.clock.settled().await;
    still.clock.advance(20.0);
    eventually("it is dropped", async || still.state(id).await == State::Paused(Kept::Dropped)).await;
    still.clock.settled().await;
    still.clock.advance(270.0);
    still.goes(id).await;
}

/// The last version kept rules to pause without acting on them, however old the sandbox was.
#[tokio::test(flavor = "multi_thread")]
async fn a_rule_that_an_older_version_kept_begins_its_clock_at_the_first_start_that_can_pause() {
    let still = Still::new().await;
    let rules =
        [(Since::Creation, 100, Action::PauseDropMemory), (Since::LastUse, 100, Action::PauseDropMemory)];
    let id = still.create(&rules).await;
    still.pass(1.0).await;
    still.engine.stop().await;
    let db = rusqlite::Connection::open(still.directory.path().join("shoal.db")).expect("a database");
    let acting = "INSERT INTO stamps (sandbox, since, wall_at, boot, since_boot) VALUES (?1, 'acting', 0, zeroblob(16), 0)";
    db.execute(acting, [id.bits().to_be_bytes()]).expect("what the migration writes");
    drop(db);
    let still = still.crash(|clock| clock.advance(10_000.0)).await;
    still.pass(60.0).await;
    assert_eq!(still.state(id).await, State::Running);
    // Another start does not begin it again.
    let still = still.crash(|_| {}).await;
    assert!(still.left(id).await <= Duration::from_secs(40), "{:?}", still.left(id).await);
    still.clock.settled().await;
    still.clock.advance(40.0);
    eventually("it is paused", async || still.state(id).await == State::Paused(Kept::Dropped)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_sets_the_clock_that_counts() {
    let still = Still::new().await;
    let id = still.create(&[(Since::LastUse, 100, DELETE), (Since::Creation, 150, DELETE)]).await;
    for wall in [SystemTime::UNIX_EPOCH, SystemTime::UNIX_EPOCH + Duration::from_secs(9_000_000_000)] {
        still.clock.set_wall(wall);
        still.pass(10.0).await;
        assert!(still.lives(id).await);
    }
    assert_eq!(still.left(id).await, Duration::from_secs(80));
    // Also not while the daemon is away.
    let still = still.crash(|clock| clock.set_wall(SystemTime::UNIX_EPOCH)).await;
    assert!(still.left(id).await >= Duration::from_secs(80));
    let still = still
        .crash(|clock| clock.set_wall(SystemTime::UNIX_EPOCH + Duration::from_secs(9_000_000_000)))
        .await;
    assert!(still.left(id).await >= Duration::from_secs(80));
    still.clock.settled().await;
    still.clock.advance(130.0);
    still.goes(id).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn time_passes_while_the_machine_is_suspended() {
    let still = Still::new().await;
    let id = still.create(&[(Since::Creation, 86_400, DELETE)]).await;
    still.clock.suspend(100_000);
    // Timers stood still, so it is seen at the next look.
    still.clock.advance(60.0);
    still.goes(id).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_hold_over_a_restart() {
    let still = Still::new().await;
    let created = still.create(&[(Since::Creation, 100, DELETE)]).await;
    let started = still.create(&[(Since::Start, 100, DELETE)]).await;
    let refreshed = still.create(&[(Since::Start, 100, DELETE)]).await;
    let unused = still.create(&[(Since::LastUse, 100, DELETE)]).await;
    still.pass(50.0).await;
    still.engine.touch(&owner(), refreshed).await.expect("it lives");
    let still = still.crash(|clock| clock.advance(60.0)).await;
    still.goes(created).await;
    still.goes(started).await;
    assert_eq!(still.left(refreshed).await, Duration::from_secs(40), "a touch that was answered holds");
    assert_eq!(still.left(unused).await, Duration::from_secs(60), "those who used it may come back");
    still.clock.settled().await;
    still.pass(59.0).await;
    still.goes(refreshed).await;
    assert!(still.lives(unused).await);
    still.clock.advance(1.0);
    still.goes(unused).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_use_that_was_under_way_at_a_crash_is_not_forgotten() {
    let still = Still::new().await;
    let id = still.create(&[(Since::LastUse, 1000, DELETE)]).await;
    let command = still.run(id, "hang").await;
    let stream = command.attach(Offsets::default());
    for _ in 0..100 {
        still.pass(60.0).await;
    }
    let looked = still.left(id).await;
    assert_eq!(looked, Duration::from_secs(1000));
    drop(stream);
    drop(command);
    // What the row says may be behind by a look, and the sandbox is given that much.
    let still = still.crash(|clock| clock.advance(10.0)).await;
    assert!(still.left(id).await >= Duration::from_secs(990), "{:?}", still.left(id).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn work_that_went_on_while_the_daemon_was_away_counts() {
    let still = Still::new().await;
    let id = still.create(&[(Since::LastUse, 80, DELETE)]).await;
    still.run(id, "hang").await;
    for _ in 0..5 {
        still.pass(10.0).await;
    }
    let host = still.host.clone();
    let still = still.crash(|clock| clock.advance(1000.0)).await;
    host.set_usage(id, cpu(900.0));
    still.clock.settled().await;
    still.pass(10.0).await;
    assert_eq!(still.explain(id).await.last_use.map(|(_, by)| by), Some(LastUse::Processor));
    still.pass(70.0).await;
    assert!(still.lives(id).await);
    still.clock.advance(10.0);
    still.goes(id).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reboot_with_a_wrong_clock_deletes_nothing_that_a_right_one_would_not() {
    let still = Still::new().await;
    let id = still.create(&[(Since::Creation, 86_400, DELETE)]).await;
    let right = still.clock.now_wall();
    // Up again after a minute, with a clock that is ten years ahead.
    let still = still
        .crash(|clock| {
            clock.reboot(50, 10);
            clock.set_wall(right + Duration::from_secs(3650 * 86_400));
        })
        .await;
    assert!(still.left(id).await <= Duration::from_secs(590));
    still.clock.settled().await;
    still.pass(300.0).await;
    assert!(still.lives(id).await, "the machine is up for five minutes");
    // Somebody puts the clock right.
    still.clock.set_wall(right + Duration::from_secs(360));
    still.pass(600.0).await;
    assert!(still.lives(id).await);
    assert_eq!(still.left(id).await, Duration::from_secs(86_400 - 960));
    // From now on the wall clock says nothing any more.
    still.clock.set_wall(right + Duration::from_secs(3650 * 86_400));
    still.pass(60.0).await;
    assert_eq!(still.left(id).await, Duration::from_secs(86_400 - 1020));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stamp_from_a_clock_that_was_ahead_keeps_nothing_for_ever() {
    let still = Still::new().await;
    let right = still.clock.now_wall();
    still.clock.set_wall(right + Duration::from_secs(3650 * 86_400));
    let id = still.create(&[(Since::Creation, 1000, DELETE)]).await;
    let still = still
        .crash(|clock| {
            clock.reboot(50, 10);
            clock.set_wall(right + Duration::from_secs(60));
        })
        .await;
    assert_eq!(still.left(id).await, Duration::from_secs(1000));
    still.clock.settled().await;
    still.clock.advance(1000.0);
    still.goes(id).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_sandbox_stays_until_its_time_is_over() {
    let still = Still::new().await;
    still.host.fail(FakeStep::Process, FakeFailure::Refused, 1);
    let spec = SandboxSpec { lifetime: lifetime(&[(Since::Start, 100, DELETE)]), ..SandboxSpec::default() };
    let error = still.engine.create(&key(), spec, Wait::Ready).await.expect_err("it was made to fail");
    let EngineError::Create { id: never_ran, .. } = error else { panic!("{error}") };
    let broke = still.create(&[(Since::LastUse, 100, DELETE)]).await;
    still.host.kill_init(broke);
    eventually("it has failed", async || {
        let found = still.engine.get(&owner(), broke).await.expect("its row stays");
        matches!(found.state, State::Failed { .. })
    })
    .await;
    let explanation = still.explain(broke).await;
    assert!(explanation.sentence.starts_with("It has failed ("), "{}", explanation.sentence);
    still.pass(99.0).await;
    assert!(still.lives(broke).await && still.lives(never_ran).await);
    still.clock.advance(1.0);
    still.goes(broke).await;
    still.goes(never_ran).await;
    assert_eq!(still.host.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_is_being_made_is_left_alone() {
    let still = Still::new().await;
    still.host.hold(FakeStep::Process);
    let spec = SandboxSpec { lifetime: lifetime(&[(Since::Creation, 10, DELETE)]), ..SandboxSpec::default() };
    let id = still.engine.create(&key(), spec, Wait::No).await.expect("it is begun").id;
    still.clock.advance(100.0);
    assert_eq!(still.explain(id).await.state, State::Creating);
    still.host.release(FakeStep::Process);
    still.goes(id).await;
    assert_eq!(still.host.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_whose_cleanup_fails_is_finished_by_the_sweep() {
    let still = Still::new().await;
    let id = still.create(&[(Since::Creation, 10, DELETE)]).await;
    still.host.fail_teardown(4);
    still.clock.advance(10.0);
    eventually("it is going, and says why", async || {
        let found = still.engine.get(&owner(), id).await.expect("its cleanup fails a few times");
        found.state == State::Deleting && found.reason.as_deref() == Some("its creation was 10 s ago")
    })
    .await;
    eventually("the sweep has finished it", async || {
        still.engine.sweep().await;
        still.engine.get(&owner(), id).await.is_err()
    })
    .await;
    assert_eq!(still.host.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_use_that_began_is_never_overtaken_by_the_end() {
    let still = Still::new().await;
    let (mut ran, mut late) = (0, 0);
    for round in 0..300 {
        let spec =
            SandboxSpec { lifetime: lifetime(&[(Since::LastUse, 1, DELETE)]), ..SandboxSpec::default() };
        let id = still.engine.create(&key(), spec, Wait::Ready).await.expect("made").id;
        still.clock.settled().await;
        still.pass(0.9).await;
        let using = tokio::spawn({
            let engine = still.engine.clone();
            async move {
                for _ in 0..round % 7 {
                    tokio::task::yield_now().await;
                }
                match round % 2 {
                    0 => match engine.run(&owner(), id, script_of("echo here")).await {
                        Ok(command) => Ok(Some(command.ended().await)),
                        Err(error) => Err(error),
                    },
                    _ => engine.touch(&owner(), id).await.map(|_| None),
                }
            }
        });
        still.clock.advance(0.1);
        match using.await.expect("no panic") {
            Ok(command) => {
                assert!(still.lives(id).await, "round {round}: it was used within this second");
                assert!(
                    command.is_none_or(|command| outcome(&command) == Outcome::Exited(0)),
                    "round {round}"
                );
                ran += 1;
                still.engine.delete(&owner(), id).await.expect("it goes");
            }
            Err(EngineError::WrongState { state: "deleting", .. } | EngineError::SandboxNotFound { .. }) => {
                late += 1
            }
            Err(error) => panic!("round {round}: {error}"),
        }
        still.goes(id).await;
    }
    println!("{ran} in time, {late} too late");
    assert!(ran > 0);
    assert_eq!(still.host.leftovers(), []);
}
