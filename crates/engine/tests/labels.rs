//! Labels: how sandboxes are found by them, and made once where there is none.

use std::collections::{BTreeMap, BTreeSet};

use crate::common::*;
use engine::*;
use runtime::fake::{FakeFailure, FakeStep};
use shoal_engine as engine;
use tokio::task::JoinSet;
use wire::SandboxId;

/// As many as a busy chat application has under way for one thread.
const CALLERS: usize = 50;

fn labels(pairs: &[(&str, &str)]) -> Labels {
    let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    Labels::new(pairs).expect("they are labels")
}

fn changes(pairs: &[(&str, Option<&str>)]) -> SandboxUpdate {
    let pairs: BTreeMap<_, _> =
        pairs.iter().map(|(key, value)| ((*key).to_owned(), value.map(str::to_owned))).collect();
    SandboxUpdate { labels: LabelChanges::new(pairs).expect("they are changes"), ..SandboxUpdate::default() }
}

fn selectors(texts: &[&str]) -> Vec<Selector> {
    texts.iter().map(|text| Selector::parse(text).expect("a selector")).collect()
}

async fn create(world: &World, pairs: &[(&str, &str)]) -> SandboxId {
    let spec = SandboxSpec { labels: labels(pairs), ..SandboxSpec::default() };
    world.engine.create(&key(), spec, Wait::Ready).await.expect("it is made").id
}

type Answer = Result<(Sandbox, Origin), EngineError>;

fn ask(world: &World, thread: &str, wait: Wait) -> impl Future<Output = Answer> + use<> {
    let (engine, find) = (world.engine.clone(), labels(&[("thread", thread)]));
    async move { engine.get_or_create(&key(), find, SandboxSpec::default(), wait).await }
}

async fn listed(world: &World, texts: &[&str]) -> Vec<SandboxId> {
    let query = ListQuery { selectors: selectors(texts), ..ListQuery::default() };
    let page = world.engine.list(&owner(), query).await.expect("a page");
    page.items.iter().map(|sandbox| sandbox.id).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_callers_get_one_sandbox() {
    let world = World::new().await;
    for round in 0..20 {
        let thread = round.to_string();
        let before = world.host.launches();
        let mut asking: JoinSet<Answer> = (0..CALLERS).map(|_| ask(&world, &thread, Wait::Ready)).collect();
        let (mut ids, mut made) = (BTreeSet::new(), 0);
        while let Some(answer) = asking.join_next().await {
            let (sandbox, origin) = answer.expect("no panic").expect("an answer");
            assert_eq!(sandbox.state, State::Running, "each waits until it is ready");
            assert_eq!(sandbox.labels, labels(&[("thread", &thread)]));
            ids.insert(sandbox.id);
            made += usize::from(origin == Origin::Made);
        }
        assert_eq!((ids.len(), made, world.host.launches() - before), (1, 1, 1), "round {round}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_among_fifty_callers_leaves_one_sandbox_at_most() {
    let world = World::new().await;
    world.host.hold(FakeStep::Process);
    let asking: JoinSet<Answer> = (0..CALLERS).map(|_| ask(&world, "7", Wait::Ready)).collect();
    eventually("it is being made", async || world.host.launches() == 1).await;
    // All of them are cut off, with the daemon.
    drop(asking);
    let host = world.host.clone();
    let world = world.crash().await;
    host.release(FakeStep::Process);
    let again: JoinSet<Answer> = (0..CALLERS).map(|_| ask(&world, "7", Wait::Ready)).collect();
    let answers = again.join_all().await;
    let ids: BTreeSet<_> = answers.into_iter().map(|answer| answer.expect("an answer").0.id).collect();
    assert_eq!(ids.len(), 1);
    assert_eq!(listed(&world, &[]).await, Vec::from_iter(ids));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_failed_or_goes_is_not_found_and_neither_is_anothers() {
    let world = World::new().await;
    world.host.fail(FakeStep::Limits, FakeFailure::Refused, 1);
    ask(&world, "a", Wait::Ready).await.expect_err("it was made to fail");
    let (second, origin) = ask(&world, "a", Wait::Ready).await.expect("another is made");
    assert_eq!(origin, Origin::Made);
    assert_eq!(listed(&world, &["thread=a"]).await.len(), 2, "the failed one is still listed");
    let (again, origin) = ask(&world, "a", Wait::Ready).await.expect("it is found");
    assert_eq!((again.id, origin), (second.id, Origin::Found));

    let stranger = key_of("someone-else", KeyLimits::default());
    let theirs = world.engine.get_or_create(
        &stranger,
        labels(&[("thread", "a")]),
        SandboxSpec::default(),
        Wait::Ready,
    );
    let (theirs, origin) = theirs.await.expect("one is made");
    assert_eq!(origin, Origin::Made);
    assert_ne!(theirs.id, second.id);

    world.host.fail_teardown(1);
    world.engine.delete(&owner(), second.id).await.expect_err("teardown was made to fail");
    let (third, origin) = ask(&world, "a", Wait::Ready).await.expect("another is made");
    assert_eq!(origin, Origin::Made);
    assert_ne!(third.id, second.id);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_is_deleted_while_it_is_awaited_is_replaced() {
    let world = World::new().await;
    world.host.hold(FakeStep::Process);
    let (first, _) = ask(&world, "a", Wait::No).await.expect("it is begun");
    let followers: JoinSet<Answer> = (0..10).map(|_| ask(&world, "a", Wait::Ready)).collect();
    eventually("they wait", async || {
        world.engine.explain(&owner(), first.id).await.is_ok_and(|e| e.uses == 10)
    })
    .await;
    let deleting = tokio::spawn({
        let engine = world.engine.clone();
        async move { engine.delete(&owner(), first.id).await }
    });
    eventually("another is being made", async || world.host.launches() == 2).await;
    world.host.release(FakeStep::Process);
    deleting.await.expect("no panic").expect("it goes");
    let answers = followers.join_all().await;
    let ids: BTreeSet<_> = answers.into_iter().map(|answer| answer.expect("an answer").0.id).collect();
    assert_eq!(ids.len(), 1);
    assert!(!ids.contains(&first.id));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_oldest_that_has_all_labels_is_found() {
    let world = World::new().await;
    create(&world, &[("app", "chat")]).await;
    let oldest = create(&world, &[("app", "chat"), ("thread", "1"), ("more", "x")]).await;
    create(&world, &[("app", "chat"), ("thread", "1")]).await;
    let find = labels(&[("app", "chat"), ("thread", "1")]);
    let (found, _) = world
        .engine
        .get_or_create(&key(), find, SandboxSpec::default(), Wait::Ready)
        .await
        .expect("it is found");
    assert_eq!(found.id, oldest);
    let spec =
        SandboxSpec { labels: labels(&[("app", "other"), ("colour", "red")]), ..SandboxSpec::default() };
    let (made, origin) = world
        .engine
        .get_or_create(&key(), labels(&[("app", "new")]), spec, Wait::Ready)
        .await
        .expect("it is made");
    assert_eq!(origin, Origin::Made);
    assert_eq!(made.labels, labels(&[("app", "new"), ("colour", "red")]), "what it is found by wins");
    let nothing =
        world.engine.get_or_create(&key(), Labels::default(), SandboxSpec::default(), Wait::Ready).await;
    assert!(matches!(nothing, Err(EngineError::Invalid { field: Field::MatchLabels, .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_repeated_is_told_the_same() {
    let world = World::new().await;
    let spec = SandboxSpec { idempotency_key: Some(once()), ..SandboxSpec::default() };
    let ask = async || {
        let find = labels(&[("thread", "1")]);
        world.engine.get_or_create(&key(), find, spec.clone(), Wait::Ready).await.expect("an answer")
    };
    let ((first, made), (again, still_made)) = (ask().await, ask().await);
    assert_eq!((first.id, made), (again.id, still_made));
    assert_eq!(made, Origin::Made);
}

#[tokio::test(flavor = "multi_thread")]
async fn labels_change_together_and_outlive_the_daemon() {
    let world = World::new().await;
    let id = create(&world, &[("a", "1"), ("b", "2")]).await;
    let update = changes(&[("a", None), ("b", Some("3")), ("c", Some(""))]);
    let changed = world.engine.update(&owner(), id, update).await.expect("it lives");
    assert_eq!(changed.labels, labels(&[("b", "3"), ("c", "")]));
    assert_eq!(listed(&world, &["a"]).await, []);
    assert_eq!(listed(&world, &["b=3", "c"]).await, [id]);
    // One part that cannot be done, and nothing is done.
    let name = SandboxName::parse("taken").expect("a name");
    let other = SandboxSpec { name: Some(name.clone()), ..SandboxSpec::default() };
    world.engine.create(&key(), other, Wait::Ready).await.expect("made");
    let both = SandboxUpdate { name: Some(name), ..changes(&[("d", Some("4"))]) };
    world.engine.update(&owner(), id, both).await.expect_err("the name is taken");
    let many: Vec<String> = (0..labels::LABELS_MAX).map(|number| format!("k{number}")).collect();
    let many: Vec<_> = many.iter().map(|key| (key.as_str(), Some("v"))).collect();
    let free = SandboxName::parse("free").expect("a name");
    let too_many = SandboxUpdate { name: Some(free.clone()), ..changes(&many) };
    world.engine.update(&owner(), id, too_many).await.expect_err("too many labels in all");
    let third = SandboxSpec { name: Some(free), ..SandboxSpec::default() };
    world.engine.create(&key(), third, Wait::Ready).await.expect("the name was given back");
    let world = world.crash().await;
    let kept = world.engine.get(&owner(), id).await.expect("it lives");
    assert_eq!(kept.labels, labels(&[("b", "3"), ("c", "")]));
    assert_eq!(listed(&world, &["b=3"]).await, [id]);
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_at_the_same_time_all_hold() {
    let world = World::new().await;
    let id = create(&world, &[]).await;
    let changing: JoinSet<_> = (0..40)
        .map(|number| {
            let engine = world.engine.clone();
            async move {
                engine
                    .update(&owner(), id, changes(&[(&format!("k{number}"), Some("v"))]))
                    .await
                    .expect("set");
                if number % 2 == 0 {
                    engine
                        .update(&owner(), id, changes(&[(&format!("k{number}"), None)]))
                        .await
                        .expect("removed");
                }
            }
        })
        .collect();
    changing.join_all().await;
    let kept = world.engine.get(&owner(), id).await.expect("it lives").labels;
    assert_eq!(kept.pairs().len(), 20);
    for key in kept.pairs().keys() {
        assert_eq!(listed(&world, &[key]).await, [id]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_by_label_are_whole_and_in_order() {
    let world = World::new().await;
    let mut expected = Vec::new();
    for number in 0..30 {
        let colour = if number % 3 == 0 { "red" } else { "blue" };
        let id = create(&world, &[("colour", colour), ("parity", ["even", "odd"][number % 2])]).await;
        if number % 3 == 0 && number % 2 == 0 {
            expected.insert(0, id);
        }
    }
    for texts in [
        &["colour=red", "parity=even"][..],
        &["parity=even", "colour!=blue"],
        &["colour=red", "parity!=odd", "!size"],
    ] {
        let (mut found, mut cursor) = (Vec::new(), None);
        loop {
            let query =
                ListQuery { limit: Some(2), cursor, selectors: selectors(texts), ..ListQuery::default() };
            let page = world.engine.list(&owner(), query).await.expect("a page");
            assert!(page.items.len() <= 2);
            found.extend(page.items.iter().map(|sandbox| sandbox.id));
            cursor = page.next_cursor;
            if cursor.is_none() {
                break;
            }
        }
        assert_eq!(found, expected, "{texts:?}");
    }
    let query = ListQuery { selectors: selectors(&["a"; 33]), ..ListQuery::default() };
    world.engine.list(&owner(), query).await.expect_err("too many selectors");
}
