//! Tests of the database as a whole: threads, versions, and rows that outlive a crash.

use std::time::UNIX_EPOCH;

use bytes::Bytes;
use wire::guest::{ExitStatus, Handle, Start};
use wire::launch::Limits;
use wire::{CommandId, SandboxId};

use super::sandboxes::Loaded;
use super::*;
use crate::model::attendance::Attendance;
use crate::model::dialect_notes::Notes;
use crate::model::labels::Labels;
use crate::model::lifetime::{Action, LastUse, Lifetime, Rule, Since};
use crate::model::state::{Disk, Goal, Kept, State};
use crate::model::{Outcome, Owner, SandboxName, Span};
use crate::observe::clock::{Moment, Stamp};

fn row(id: u128, name: &str) -> SandboxRow {
    SandboxRow {
        over: Default::default(),
        descent: None,
        hooks: HookRows::default(),
        history: 0,
        id: SandboxId::from_random(id),
        incarnation: SandboxId::from_random(id),
        worker: LOCAL.into(),
        generation: GENERATION_FIRST,
        visibility: Visibility::Visible,
        owner: Owner::default_owner(),
        name: SandboxName::parse(name).expect("a name"),
        template: "default".into(),
        template_version: None,
        image: "host".into(),
        image_alias: None,
        image_held: None,
        limits: Limits { cpu_millis: 1, memory_bytes: u64::MAX / 2, pids: 3, disk_bytes: Some(5) },
        mounts: Vec::new(),
        env: [("A".to_owned(), "ü\n".to_owned())].into(),
        state: State::Creating,
        goal: Goal::Running,
        reason: None,
        idempotency_key: Some(name.into()),
        request_digest: [7; 32],
        oom_kills: 0,
        created_at: UNIX_EPOCH + Duration::from_micros(1_234_567),
        labels: Labels::new([("thread".to_owned(), "ü".to_owned())].into()).expect("labels"),
        notes: Notes::one("dialect", "{}".into()).expect("notes"),
        lifetime: lifetime(&[
            (Since::LastUse, 90, Action::Delete),
            (Since::Start, 5, Action::PauseDropMemory),
        ]),
        stamps: Stamps { cpu: Some(Duration::from_micros(12)), ..Stamps::born(Stamp::of(NOW)) },
        network: Default::default(),
        claimed_from: None,
    }
}

const NOW: Moment =
    Moment { wall: UNIX_EPOCH, boot: u128::MAX / 3, since_boot: Duration::from_micros(77_000_001) };

fn lifetime(rules: &[(Since, u64, Action)]) -> Lifetime {
    let rule = |(since, seconds, action): &(Since, u64, Action)| Rule {
        since: *since,
        after: Duration::from_secs(*seconds),
        action: *action,
    };
    Lifetime::new(rules.iter().map(rule).collect()).expect("rules")
}

#[tokio::test]
async fn labels_rules_and_times_are_kept_and_changed_together() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = open(&directory);
    let one = row(1, "one");
    let plain = SandboxRow {
        labels: Labels::default(),
        lifetime: Lifetime::default(),
        idempotency_key: None,
        ..row(2, "two")
    };
    for row in [&one, &plain] {
        store.insert_sandbox(row.clone()).await.expect("written");
    }
    let found = |loaded: Loaded, id| loaded.sandboxes.into_iter().find(|row| row.id == id).expect("a row");
    let kept = found(store.load(NOW).await.expect("it reads"), one.id);
    assert_eq!((&kept.labels, &kept.lifetime, kept.stamps), (&one.labels, &one.lifetime, one.stamps));
    assert_eq!(kept.notes, one.notes);
    let kept = found(store.load(NOW).await.expect("it reads"), plain.id);
    assert_eq!((&kept.labels, &kept.lifetime), (&plain.labels, &plain.lifetime));
    assert_eq!(kept.stamps, Stamps::born(Stamp::of_wall(plain.created_at, NOW)), "only the wall clock knows");

    let stamps = Stamps { started: Some(one.stamps.used.plus(Duration::from_secs(1))), ..one.stamps };
    let change = SandboxChange {
        name: Some(SandboxName::parse("other").expect("a name")),
        labels: Some(Labels::new([("b".to_owned(), String::new())].into()).expect("labels")),
        notes: Some(Notes::default()),
        lifetime: Some(lifetime(&[(Since::Creation, 1, Action::Delete)])),
        stamps: Some(stamps),
        network: None,
    };
    assert!(store.change_sandbox(one.key(), change.clone()).await.expect("written"));
    let clash =
        SandboxChange { name: Some(plain.name.clone()), labels: Some(Labels::default()), ..change.clone() };
    store.change_sandbox(one.key(), clash).await.expect_err("the name is taken");
    let (tell, told) = oneshot::channel();
    let later = stamps.used.plus(Duration::from_secs(9));
    let used = Stamps { used: later, last_use: LastUse::Processor, cpu: None, ..stamps };
    store.note_use(one.key(), used, move |done| drop(tell.send(done)));
    told.await.expect("it answers").expect("written");
    store.close();

    let store = open(&directory);
    let kept = found(store.load(NOW).await.expect("it reads"), one.id);
    assert_eq!(
        (kept.name, Some(kept.labels), Some(kept.lifetime)),
        (change.name.clone().expect("one"), change.labels.clone(), change.lifetime.clone())
    );
    assert_eq!(kept.stamps, used);
    let deleting = store.change_state(one.key(), State::Creating, State::Deleting, Goal::Gone, None);
    deleting.await.expect("written");
    assert!(!store.change_sandbox(one.key(), change).await.expect("it is going"));
    store.delete_sandbox(one.key()).await.expect("written");
    let left = store.question("count", |db| {
        db.query_row("SELECT (SELECT count(*) FROM labels) + (SELECT count(*) FROM rules) + (SELECT count(*) FROM stamps)", [], |row| row.get::<_, i64>(0))
    });
    assert_eq!(left.await.expect("it reads"), 0);
    store.close();
}

#[track_caller]
fn superseded(result: Result<(), EngineError>, why: &str) {
    let superseded = matches!(result, Err(EngineError::Store { source: DbError::Superseded, .. }));
    assert!(superseded, "{why}: {result:?}");
}

/// A daemon that comes back after another one took its sandbox over must not change the row.
#[tokio::test]
async fn a_change_that_names_another_generation_changes_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = open(&directory);
    let sandbox = SandboxRow { generation: 2, ..row(1, "one") };
    store.insert_sandbox(sandbox.clone()).await.expect("written");
    let old = RowKey { generation: 1, ..sandbox.key() };
    let to = |key, to, goal| store.change_state(key, State::Creating, to, goal, None);
    superseded(to(old, State::Running, Goal::Running).await, "the state");
    superseded(store.change_goal(old, State::Creating, Goal::Gone).await, "the goal");
    let change = SandboxChange { labels: Some(Labels::default()), ..SandboxChange::default() };
    assert!(!store.change_sandbox(old, change).await.expect("it answers"), "the labels");
    let (tell, told) = oneshot::channel();
    let used = Stamps { used: sandbox.stamps.used.plus(Duration::from_secs(9)), ..sandbox.stamps };
    store.note_use(old, used, move |done| drop(tell.send(done)));
    told.await.expect("it answers").expect("it is not an error");
    to(sandbox.key(), State::Deleting, Goal::Gone).await.expect("its own generation");
    superseded(store.delete_sandbox(old).await, "the row");
    let left = store.load(NOW).await.expect("it reads").sandboxes;
    assert_eq!((left.len(), left[0].state, left[0].stamps), (1, State::Deleting, sandbox.stamps));
    assert_eq!(left[0].labels, sandbox.labels);
    store.close();
}

#[tokio::test]
async fn only_rows_of_this_daemon_are_loaded() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = open(&directory);
    let (ours, theirs) = (row(1, "ours"), SandboxRow { worker: "other".into(), ..row(2, "theirs") });
    store.insert_sandbox(ours.clone()).await.expect("written");
    store.insert_sandbox(theirs).await.expect("written");
    let loaded = store.load(NOW).await.expect("it reads").sandboxes;
    assert_eq!(loaded.iter().map(|row| row.id).collect::<Vec<_>>(), [ours.id]);
    store.close();
}

/// The state and the goal each have their own kept value: a frozen sandbox may be on its way to keep only its files.
#[tokio::test]
async fn every_state_with_every_goal_is_read_as_it_was_written() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = open(&directory);
    let kept = [Kept::Frozen, Kept::Saved, Kept::Dropped];
    let disks = [Disk::Whole, Disk::Lost].map(|disk| State::Failed { disk });
    let states: Vec<State> = [State::Creating, State::Running, State::Deleting]
        .into_iter()
        .chain(kept.map(State::Paused))
        .chain(disks)
        .collect();
    let goals: Vec<Goal> = [Goal::Running, Goal::Gone].into_iter().chain(kept.map(Goal::Paused)).collect();
    let sandbox = row(1, "one");
    store.insert_sandbox(sandbox.clone()).await.expect("written");
    let mut from = sandbox.state;
    let read = async || {
        let row = store.load(NOW).await.expect("it reads").sandboxes.remove(0);
        (row.state, row.goal)
    };
    for state in states {
        for goal in &goals {
            store.change_state(sandbox.key(), from, state, *goal, None).await.expect("written");
            assert_eq!(read().await, (state, *goal));
            from = state;
            for aimed in &goals {
                store.change_goal(sandbox.key(), state, *aimed).await.expect("written");
                assert_eq!(read().await, (state, *aimed));
            }
        }
    }
    store.close();
}

fn command(sandbox: SandboxId, handle: u32, id: &str) -> CommandRow {
    CommandRow {
        sandbox,
        handle: Handle(handle),
        id: id.parse().expect("an id"),
        request_digest: [handle as u8; 32],
        start: Start::shell(Handle(handle), id, "true"),
        created_at: UNIX_EPOCH,
        oom_kills_before: Some(u64::from(handle)),
        attendance: Attendance::default(),
        not_undoable: handle % 2 == 1,
        result: None,
    }
}

fn disk(directory: &Path) -> Arc<HostDisk> {
    Arc::new(HostDisk::open(directory).expect("the disk can be asked"))
}

fn open(directory: &tempfile::TempDir) -> Db {
    Db::open(
        &directory.path().join("db"),
        tokio::runtime::Handle::current(),
        Arc::default(),
        disk(directory.path()),
    )
    .expect("it opens")
}

async fn insert(store: &Db, row: CommandRow) -> Inserted {
    let (tell, told) = oneshot::channel();
    store.insert_command(row, move |inserted| drop(tell.send(inserted)));
    told.await.expect("it answers").expect("the database takes it")
}

async fn end(store: &Db, sandbox: SandboxId, handle: u32, result: ResultRow) {
    end_killed(store, sandbox, handle, result, 3).await;
}

async fn end_killed(store: &Db, sandbox: SandboxId, handle: u32, result: ResultRow, oom_kills: u64) {
    let (tell, told) = oneshot::channel();
    store.end_command(sandbox, Handle(handle), result, Some(oom_kills), move |done| drop(tell.send(done)));
    told.await.expect("it answers").expect("the database takes it");
}

#[tokio::test]
async fn what_was_answered_is_there_after_a_crash() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = open(&directory);
    let sandbox = row(1, "one");
    store.insert_sandbox(sandbox.clone()).await.expect("written");
    assert!(matches!(insert(&store, command(sandbox.id, 1, "a")).await, Inserted::NoSandbox), "not running");
    let moved = |from, to, goal| store.change_state(sandbox.key(), from, to, goal, None);
    moved(State::Creating, State::Running, Goal::Running).await.expect("written");
    superseded(moved(State::Creating, State::Running, Goal::Running).await, "the row is in another state");
    assert!(matches!(insert(&store, command(sandbox.id, 1, "a")).await, Inserted::Yes));
    assert!(matches!(insert(&store, command(sandbox.id, 2, "b")).await, Inserted::Yes));
    let Inserted::Exists(existing) = insert(&store, command(sandbox.id, 3, "a")).await else {
        panic!("the id was used before")
    };
    assert_eq!(existing.handle, Handle(1));
    let outcomes = [
        Outcome::Exited(-1),
        Outcome::Signaled(9),
        Outcome::TimedOut(ExitStatus::Signal(15)),
        Outcome::TimedOutUnheard,
        Outcome::IdleTimedOut(ExitStatus::Code(1)),
        Outcome::Killed(ExitStatus::Signal(9)),
        Outcome::OutOfMemory(ExitStatus::Code(137)),
        Outcome::FailedToStart(wire::guest::StartError::UnknownUser { user: "eve".into() }),
        Outcome::SandboxGone,
    ];
    let mut results = Vec::new();
    for (handle, outcome) in (10..).zip(outcomes) {
        insert(&store, command(sandbox.id, handle, &format!("c{handle}"))).await;
        let result = ResultRow {
            ended_at: UNIX_EPOCH + Duration::from_secs(u64::from(handle)),
            pid: Some(handle),
            outcome,
            stdout: Span { start: 5, end: 10 },
            stderr: Span::default(),
            bytes: [Some(Bytes::from_static(b"12345")), None],
        };
        end(&store, sandbox.id, handle, result.clone()).await;
        // A second result changes nothing.
        end(&store, sandbox.id, handle, ResultRow { outcome: Outcome::Exited(99), ..result.clone() }).await;
        // Two commands that were killed at once commit in any order: an earlier count does not undo a later one.
        end_killed(&store, sandbox.id, handle, result.clone(), 2).await;
        results.push((handle, result));
    }
    store.close();
    let refused = store.keys().await.err();
    assert!(matches!(refused, Some(EngineError::Store { source: DbError::Closed, .. })));

    let store = open(&directory);
    let loaded = store.load(NOW).await.expect("it reads");
    assert_eq!(loaded.commands.len(), 2);
    assert_eq!(loaded.commands[1].oom_kills_before, Some(2), "as it was written");
    let tally = Tally { handle_max: 18, ended: 9, ended_bytes: 45 };
    assert_eq!(loaded.tallies, [(sandbox.id, tally)]);
    let found = &loaded.sandboxes[0];
    assert_eq!((found.state, found.goal, found.oom_kills), (State::Running, Goal::Running, 3));
    assert_eq!(
        (&found.env, found.limits, found.created_at),
        (&sandbox.env, sandbox.limits, sandbox.created_at)
    );
    for (handle, result) in results {
        let id: CommandId = format!("c{handle}").parse().expect("an id");
        let row = store.command(sandbox.id, id).await.expect("it reads").expect("it is there");
        assert_eq!(row.result, Some(result));
    }
    let dropped = store.drop_oldest_commands(sandbox.id, 2).await.expect("written");
    assert_eq!(dropped, [(Handle(10), 5), (Handle(11), 5)]);
    let emptied = store.drop_oldest_output(sandbox.id, 6).await.expect("written");
    assert_eq!(emptied, [(Handle(12), 5), (Handle(13), 5)]);
    let row =
        store.command(sandbox.id, "c12".parse().expect("an id")).await.expect("it reads").expect("it stays");
    let result = row.result.expect("it has ended");
    assert_eq!(
        (result.stdout.start, result.bytes),
        (result.stdout.end, [None, None]),
        "the row says that it is gone"
    );
    superseded(store.delete_sandbox(sandbox.key()).await, "the row is not being deleted");
    let deleting = store.change_state(sandbox.key(), State::Running, State::Deleting, Goal::Gone, None);
    deleting.await.expect("written");
    store.delete_sandbox(sandbox.key()).await.expect("written");
    assert_eq!(store.commands(sandbox.id, None, 100).await.expect("it reads").len(), 0);
    store.close();
}

/// The order is that of the ends, not of the starts: a long command that has just ended is recent.
#[tokio::test]
async fn the_commands_that_ended_first_are_dropped_first() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = open(&directory);
    let sandbox = SandboxRow { state: State::Running, ..row(1, "one") };
    store.insert_sandbox(sandbox.clone()).await.expect("written");
    for (handle, ended_at) in
        [(1, Some(50)), (2, Some(10)), (3, Some(30)), (4, None), (5, Some(30)), (6, Some(5))]
    {
        insert(&store, command(sandbox.id, handle, &format!("c{handle}"))).await;
        let Some(ended_at) = ended_at else { continue };
        let result = ResultRow {
            ended_at: UNIX_EPOCH + Duration::from_secs(ended_at),
            pid: None,
            outcome: Outcome::Exited(0),
            stdout: Span { start: 0, end: 100 },
            stderr: Span::default(),
            bytes: [None, None],
        };
        end(&store, sandbox.id, handle, result).await;
    }
    let dropped = async |count| -> Vec<u32> {
        let dropped = store.drop_oldest_commands(sandbox.id, count).await.expect("written");
        dropped.into_iter().map(|(handle, _)| handle.0).collect()
    };
    assert_eq!(dropped(1).await, [2], "the highest number stays, although it ended before");
    assert_eq!(dropped(2).await, [3, 5]);
    assert_eq!(dropped(10).await, [1], "what runs stays");
    let left: Vec<u32> = store
        .commands(sandbox.id, None, 10)
        .await
        .expect("it reads")
        .iter()
        .map(|row| row.handle.0)
        .collect();
    assert_eq!(left, [4, 6]);
    store.close();
}

#[tokio::test]
async fn an_answer_that_panics_takes_no_other_with_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = open(&directory);
    store.submit(|_| Ok(()), |_| panic!("a bug in a callback"));
    store.insert_sandbox(row(1, "one")).await.expect("the thread goes on");
    assert_eq!(store.load(NOW).await.expect("it reads").sandboxes.len(), 1);
    store.close();
}

#[tokio::test]
async fn a_change_that_fails_takes_no_other_with_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = open(&directory);
    // Sent together, so that they share a transaction. The second and the fourth conflict with the first.
    let (a, b, c, d, e) = tokio::join!(
        store.insert_sandbox(row(1, "one")),
        store.insert_sandbox(row(2, "one")),
        store.insert_sandbox(row(3, "three")),
        store.insert_sandbox(row(1, "four")),
        store.insert_sandbox(row(5, "five")),
    );
    assert_eq!([a.is_ok(), b.is_ok(), c.is_ok(), d.is_ok(), e.is_ok()], [true, false, true, false, true]);
    assert_eq!(store.load(NOW).await.expect("it reads").sandboxes.len(), 3);
    store.close();
}

#[tokio::test]
async fn a_database_of_a_newer_version_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("db");
    Db::check(&path).expect("none yet");
    assert!(!path.exists(), "a look makes nothing");
    let store = open(&directory);
    Db::check(&path).expect("our own, while it is written to");
    store.close();
    let db = Connection::open(&path).expect("it opens");
    db.pragma_update(None, "user_version", 99).expect("written");
    drop(db);
    let refused = Db::check(&path);
    assert!(matches!(refused, Err(DbError::Newer { found: 99, .. })), "{refused:?}");
    let refused = Db::open(&path, tokio::runtime::Handle::current(), Arc::default(), disk(directory.path()));
    assert!(matches!(refused, Err(DbError::Newer { found: 99, .. })));
}

#[tokio::test]
async fn a_policy_is_read_back_as_it_was_written_and_names_keep_their_places() {
    use crate::model::network::{NetworkAction, NetworkMode, NetworkPolicy, NetworkRule, NetworkSpec};
    let directory = tempfile::tempdir().expect("a directory");
    let store = open(&directory);
    let rule = |action, to: &str, ports: &[&str]| NetworkRule {
        action,
        to: to.into(),
        ports: ports.iter().map(|port| (*port).to_owned()).collect(),
        protocol: Some("tls".into()),
        private: false,
    };
    let rules = vec![
        rule(NetworkAction::Allow, "*.example.com", &["443", "8000-8999"]),
        rule(NetworkAction::Deny, "192.0.2.0/24", &[]),
    ];
    let spec = NetworkSpec { mode: NetworkMode::Registries, rules, audit: true };
    let written = SandboxRow { network: NetworkPolicy::new(spec).expect("a policy"), ..row(1, "one") };
    store.insert_sandbox(written.clone()).await.expect("written");
    store.insert_sandbox(row(2, "two")).await.expect("written");
    let policies =
        |loaded: Loaded| loaded.sandboxes.into_iter().map(|row| (row.id, row.network)).collect::<Vec<_>>();
    let found = policies(store.load(NOW).await.expect("it reads"));
    assert!(found.contains(&(written.id, written.network.clone())));
    assert!(found.contains(&(row(2, "two").id, NetworkPolicy::default())));
    let name = |place, name: &str| egress::control::Record::Name {
        sandbox: written.id,
        place,
        name: egress::policy::Name::parse(name).expect("a name"),
    };
    let records = vec![name(0, "a.example"), name(2, "c.example"), name(0, "other.example")];
    store.store_network_records(records).await.expect("stored");
    let names = store.network_names(written.id).await.expect("it reads");
    assert_eq!(names, ["a.example", "lost-1.invalid", "c.example"], "a place never gets another name");
}
