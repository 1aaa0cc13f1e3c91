//! Pools: what stands ready is claimed once, by one, and replaced; also through crashes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::common::*;
use engine::pool::{PoolInfo, PoolName, PoolState, PoolUpdate, REPLICAS_MAX, Standing};
use engine::template::{TemplateName, TemplateSpec, TemplateUpdate};
use engine::*;
use runtime::fake::{FakeFailure, FakeStep};
use shoal_engine as engine;
use tokio::task::JoinSet;
use wire::SandboxId;
use wire::guest::Handle;

/// Long enough for anything here, short enough for a test.
const WAIT: Duration = Duration::from_secs(20);
const CALLERS: usize = 25;

fn name(text: &str) -> PoolName {
    PoolName::parse(text).expect("a name")
}

async fn template(world: &World, text: &str) {
    let name = TemplateName::parse(text).expect("a name");
    world.engine.create_template(&owner(), name, TemplateSpec::default()).await.expect("it is made");
}

/// A pool of the template `t`, full.
async fn pool(world: &World, text: &str, replicas: u32) -> PoolInfo {
    world.engine.create_pool(&key(), name(text), "t", replicas).await.expect("it is made");
    full(world, text).await
}

async fn full(world: &World, text: &str) -> PoolInfo {
    let info = world.engine.wait_pool(&owner(), text, WAIT).await.expect("it is there");
    assert_eq!(info.state, PoolState::Ready, "{info:?}");
    info
}

fn of_template() -> SandboxSpec {
    SandboxSpec { template: TemplateName::parse("t").expect("a name"), ..SandboxSpec::default() }
}

fn ids(info: &PoolInfo) -> BTreeSet<SandboxId> {
    info.members.iter().map(|member| member.id).collect()
}

async fn with_pool(replicas: u32) -> World {
    let world = World::new().await;
    template(&world, "t").await;
    pool(&world, "p", replicas).await;
    world
}

async fn listed(world: &World) -> Vec<SandboxId> {
    let all = ListQuery { limit: Some(1000), ..ListQuery::default() };
    let page = world.engine.list(&owner(), all).await.expect("a page");
    page.items.iter().map(|sandbox| sandbox.id).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_claims_what_stands_ready_and_says_so() {
    let world = with_pool(2).await;
    let before = world.engine.pool(&owner(), "p").expect("it is there");
    let labels = Labels::new(BTreeMap::from([("k".into(), "v".into())])).expect("labels");
    let spec = SandboxSpec {
        name: Some(SandboxName::parse("mine").expect("a name")),
        env: SandboxEnv::new(BTreeMap::from([("GREETING".into(), "hello".into())])).expect("an environment"),
        labels: labels.clone(),
        idempotency_key: Some(once()),
        ..of_template()
    };
    let sandbox = world.engine.create(&key(), spec.clone(), Wait::Ready).await.expect("it is claimed");
    assert_eq!(sandbox.id, before.members[0].id, "the one that waited longest");
    const REHEARSAL: Handle = Handle((1 << 31) + 1);
    assert_eq!(world.host.starts(sandbox.id, REHEARSAL), 1, "it has run something before");
    assert_eq!(sandbox.claimed_from.as_deref(), Some("p"));
    assert_eq!((sandbox.name.as_str(), sandbox.state), ("mine", State::Running));
    assert_eq!((&sandbox.env, &sandbox.labels), (spec.env.pairs(), &labels));
    assert!(sandbox.created_at >= before.members[0].created_at);
    let again = world.engine.create(&key(), spec, Wait::Ready).await.expect("it is found");
    assert_eq!(again.id, sandbox.id);
    assert_eq!(listed(&world).await, [sandbox.id]);
    let after = full(&world, "p").await;
    assert!(!ids(&after).contains(&sandbox.id));
    assert_eq!((after.claims, after.misses), (1, 0));

    // All of it holds after a crash.
    let world = world.crash().await;
    let sandbox = world.engine.get(&owner(), sandbox.id).await.expect("it is there");
    assert_eq!((sandbox.name.as_str(), sandbox.claimed_from.as_deref()), ("mine", Some("p")));
    assert_eq!((sandbox.env["GREETING"].as_str(), sandbox.labels), ("hello", labels));
    assert_eq!(ids(&full(&world, "p").await), ids(&after), "what waits is kept");
    world.engine.delete(&owner(), sandbox.id).await.expect("it can be deleted");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_is_nobodys_until_it_is_claimed() {
    let world = with_pool(1).await;
    let id = full(&world, "p").await.members[0].id;
    assert_eq!(listed(&world).await, []);
    for result in [
        world.engine.get(&owner(), id).await.map(drop),
        world.engine.delete(&owner(), id).await,
        world.engine.run(&owner(), id, script_of("true")).await.map(drop),
        world.engine.touch(&owner(), id).await.map(drop),
    ] {
        assert!(matches!(result, Err(EngineError::SandboxNotFound { .. })), "{result:?}");
    }
    // What a pool has ready is just what its template says.
    let other = SandboxSpec { memory_bytes: Some(64 << 20), ..of_template() };
    let made = world.engine.create(&key(), other, Wait::Ready).await.expect("it is made");
    assert_eq!(made.claimed_from, None);
    let stranger = key_of("stranger", KeyLimits::default());
    let made = world.engine.create(&stranger, SandboxSpec::default(), Wait::Ready).await.expect("it is made");
    assert_eq!(made.claimed_from, None);
    assert_eq!(full(&world, "p").await.members[0].id, id);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_claimers_get_one_each_and_those_who_find_none_get_a_new_one() {
    let world = with_pool(10).await;
    let ready = ids(&full(&world, "p").await);
    world.host.hold(FakeStep::Process);
    let mut asking = JoinSet::new();
    for _ in 0..CALLERS {
        let engine = world.engine.clone();
        asking.spawn(async move { engine.create(&key(), of_template(), Wait::Ready).await });
    }
    // Nothing can be made now, so those that have an answer were claimed, and waited for nothing.
    let mut claimed = BTreeSet::new();
    while claimed.len() < ready.len() {
        let sandbox =
            asking.join_next().await.expect("there are more").expect("no panic").expect("an answer");
        assert_eq!(sandbox.claimed_from.as_deref(), Some("p"));
        assert!(claimed.insert(sandbox.id), "{} was given twice", sandbox.id);
    }
    assert_eq!(claimed, ready);
    world.host.release(FakeStep::Process);
    while let Some(answer) = asking.join_next().await {
        assert!(claimed.insert(answer.expect("no panic").expect("an answer").id));
    }
    full(&world, "p").await;
}

/// Requests that mean one sandbox find the claim of the first of them, also before its row is written.
#[tokio::test(flavor = "multi_thread")]
async fn many_who_mean_the_same_sandbox_claim_one() {
    const ASKING: usize = 24;
    let world = with_pool(4).await;
    let waiting = ids(&full(&world, "p").await);
    let thread = Labels::new([("thread".to_owned(), "7".to_owned())].into()).expect("labels");
    let mut asking = tokio::task::JoinSet::new();
    for number in 0..ASKING {
        let (engine, thread) = (world.engine.clone(), thread.clone());
        asking.spawn(async move {
            if number % 2 == 0 {
                let (found, _) =
                    engine.get_or_create(&key(), thread, of_template(), Wait::Ready).await.expect("one");
                ("labels", found)
            } else {
                let spec = SandboxSpec { idempotency_key: Some(once()), ..of_template() };
                ("key", engine.create(&key(), spec, Wait::Ready).await.expect("one"))
            }
        });
    }
    let mut got: BTreeSet<(&str, SandboxId)> = BTreeSet::new();
    while let Some(answer) = asking.join_next().await {
        let (how, sandbox) = answer.expect("no panic");
        assert!(waiting.contains(&sandbox.id), "it was claimed");
        assert_eq!(sandbox.claimed_from.as_deref(), Some("p"));
        got.insert((how, sandbox.id));
    }
    assert_eq!(got.len(), 2, "one for the labels and one for the key: {got:?}");
    assert_eq!(listed(&world).await.len(), 2);
    let reused = SandboxSpec { idempotency_key: Some(once()), ..SandboxSpec::default() };
    let refused = world.engine.create(&key(), reused, Wait::Ready).await;
    assert!(matches!(refused, Err(EngineError::IdempotencyKeyReused)), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_in_the_middle_of_claims_loses_and_doubles_none() {
    let mut world = with_pool(8).await;
    let mut named = 0;
    for round in 0..6 {
        let mut asking = JoinSet::new();
        for _ in 0..CALLERS {
            let (engine, text) = (world.engine.clone(), format!("round-{round}-{named}"));
            named += 1;
            asking.spawn(async move {
                let spec =
                    SandboxSpec { name: Some(SandboxName::parse(&text).expect("a name")), ..of_template() };
                (text, engine.create(&key(), spec, Wait::Ready).await)
            });
        }
        let mut answered = BTreeMap::new();
        for _ in 0..round {
            let (text, answer) = asking.join_next().await.expect("there are more").expect("no panic");
            answered.insert(text, answer.expect("it is claimed or made").id);
        }
        asking.abort_all();
        while asking.join_next().await.is_some() {}
        world = world.crash().await;
        let info = full(&world, "p").await;
        assert_eq!(info.members.len(), 8, "{info:?}");
        let waiting = ids(&info);
        let all = ListQuery { limit: Some(1000), ..ListQuery::default() };
        let sandboxes = world.engine.list(&owner(), all).await.expect("a page").items;
        for sandbox in &sandboxes {
            assert!(!waiting.contains(&sandbox.id), "{} is claimed and waits", sandbox.id);
        }
        for (text, id) in answered {
            let found = sandboxes.iter().find(|sandbox| sandbox.name.as_str() == text);
            assert_eq!(found.map(|sandbox| sandbox.id), Some(id), "{text}");
        }
    }
    for id in listed(&world).await {
        world.engine.delete(&owner(), id).await.expect("it goes");
    }
    world.engine.delete_pool(&owner(), "p").await.expect("it goes");
    assert_eq!(world.host.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_is_scaled_renamed_and_deleted() {
    let world = with_pool(2).await;
    let update = |name: Option<&str>, replicas| PoolUpdate {
        name: name.map(|name| PoolName::parse(name).expect("a name")),
        replicas,
    };
    world.engine.update_pool(&key(), "p", update(Some("q"), Some(5))).await.expect("it is changed");
    assert_eq!(full(&world, "q").await.ready(), 5);
    assert!(matches!(world.engine.pool(&owner(), "p"), Err(EngineError::PoolNotFound { .. })));
    world.engine.update_pool(&key(), "q", update(None, Some(1))).await.expect("it is changed");
    eventually("only one is left", async || {
        world.engine.pool(&owner(), "q").is_ok_and(|info| info.members.len() == 1)
    })
    .await;
    world.engine.update_pool(&key(), "q", update(None, Some(0))).await.expect("it is changed");
    eventually("none is left", async || world.host.leftovers().is_empty()).await;
    let from_pool =
        SandboxSpec { pool: Some(PoolName::parse("q").expect("a name")), ..SandboxSpec::default() };
    let made = world.engine.create(&key(), from_pool.clone(), Wait::Ready).await.expect("one is made");
    assert_eq!((made.template.as_str(), made.claimed_from), ("t", None));
    let world = world.crash().await;
    assert_eq!(full(&world, "q").await.replicas, 0);
    world.engine.update_pool(&key(), "q", update(None, Some(3))).await.expect("it is changed");
    full(&world, "q").await;
    let claimed = world.engine.create(&key(), from_pool.clone(), Wait::Ready).await.expect("it is claimed");
    assert_eq!(claimed.claimed_from.as_deref(), Some("q"));
    world.engine.delete_pool(&owner(), "q").await.expect("it goes");
    let left = world.engine.create(&key(), from_pool, Wait::Ready).await;
    assert!(matches!(left, Err(EngineError::PoolNotFound { .. })), "{left:?}");
    assert_eq!(listed(&world).await.len(), 2, "what was claimed stays");
    for id in listed(&world).await {
        world.engine.delete(&owner(), id).await.expect("it goes");
    }
    assert_eq!(world.host.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_makes_no_sense_is_refused() {
    let world = with_pool(0).await;
    let create = |text: &'static str, template: &'static str, replicas: u32| {
        let engine = world.engine.clone();
        async move { engine.create_pool(&key(), name(text), template, replicas).await }
    };
    assert!(matches!(create("x", "no such", 1).await, Err(EngineError::TemplateNotFound { .. })));
    assert!(matches!(create("p", "t", 1).await, Err(EngineError::PoolNameTaken { .. })));
    let million = create("x", "t", 1_000_000).await;
    assert!(matches!(million, Err(EngineError::Invalid { field: Field::Replicas, .. })), "{million:?}");
    assert!(create("x", "t", REPLICAS_MAX + 1).await.is_err());
    create("x", "default", 0).await.expect("the built-in template will do");
    let rename = PoolUpdate { name: Some(name("p")), ..PoolUpdate::default() };
    let renamed = world.engine.update_pool(&key(), "x", rename).await;
    assert!(matches!(renamed, Err(EngineError::PoolNameTaken { .. })));
    for text in ["", "a\nb", &"x".repeat(256)] {
        PoolName::parse(text).expect_err(text);
    }
    let held = world.engine.delete_template(&owner(), "t").await;
    assert!(matches!(held, Err(EngineError::TemplateInUse { pools: 1, sandboxes: 0, .. })), "{held:?}");
    let odd = SandboxSpec {
        pool: Some(PoolName::parse("p").expect("a name")),
        image: Some("host".into()),
        ..SandboxSpec::default()
    };
    let odd = world.engine.create(&key(), odd, Wait::Ready).await;
    assert!(matches!(odd, Err(EngineError::Invalid { field: Field::Pool, .. })), "{odd:?}");
    let stranger = Owner::parse("stranger").expect("an owner");
    assert!(world.engine.pool(&stranger, "p").is_err());
    assert!(world.engine.pools(&stranger).is_empty());
    world.engine.delete_pool(&owner(), "p").await.expect("it goes");
    world.engine.delete_template(&owner(), "t").await.expect("nothing holds it");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_stays_within_what_the_key_allows() {
    let world = World::new().await;
    let limits = KeyLimits { sandboxes: Some(3), ..KeyLimits::default() };
    let key = key_of("default", limits);
    let refused = world.engine.create_pool(&key, name("p"), "default", 4).await;
    assert!(matches!(refused, Err(EngineError::Quota { .. })), "{refused:?}");
    world.engine.create_pool(&key, name("p"), "default", 2).await.expect("it is made");
    full(&world, "p").await;
    for _ in 0..3 {
        let spec = SandboxSpec::default();
        world.engine.create(&key, spec, Wait::Ready).await.expect("two are claimed, or one and one made");
        eventually("it has three", async || {
            let info = world.engine.pool(&owner(), "p").expect("it is there");
            listed(&world).await.len() + info.ready() == 3
        })
        .await;
    }
    let fourth = world.engine.create(&key, SandboxSpec::default(), Wait::Ready).await;
    assert!(matches!(fourth, Err(EngineError::Quota { .. })), "{fourth:?}");
    eventually("the pool says why it is empty", async || {
        let info = world.engine.pool(&owner(), "p").expect("it is there");
        info.state == PoolState::Failing && info.reason.is_some_and(|reason| reason.contains("limit of 3"))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_breaks_while_it_waits_is_replaced() {
    let world = with_pool(3).await;
    let before = full(&world, "p").await;
    world.host.kill_init(before.members[0].id);
    eventually("it is replaced", async || {
        let info = world.engine.pool(&owner(), "p").expect("it is there");
        info.ready() == 3 && !ids(&info).contains(&before.members[0].id)
    })
    .await;
    // All at once, and claimed at the same moment: each caller gets a living one.
    for member in full(&world, "p").await.members {
        world.host.kill_init(member.id);
    }
    for _ in 0..6 {
        let sandbox = world.engine.create(&key(), of_template(), Wait::Ready).await.expect("an answer");
        if let Ok(command) = world.engine.run(&owner(), sandbox.id, script_of("true")).await {
            drop(command);
        }
    }
    eventually("the pool is whole again", async || {
        world.engine.pool(&owner(), "p").is_ok_and(|info| info.ready() == 3 && info.members.len() == 3)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_update_of_the_template_rolls_the_pool_over() {
    let world = with_pool(3).await;
    let before = ids(&full(&world, "p").await);
    let update = TemplateUpdate {
        cwd: Some(Some(GuestPath::parse("/srv").expect("a path"))),
        ..TemplateUpdate::default()
    };
    world.engine.update_template(&owner(), "t", update).await.expect("it is changed");
    // Never an older one, from the first moment on.
    let sandbox = world.engine.create(&key(), of_template(), Wait::Ready).await.expect("an answer");
    assert_eq!(sandbox.template_version, 2);
    eventually("all are new", async || {
        let info = world.engine.pool(&owner(), "p").expect("it is there");
        info.members.len() == 3
            && info.members.iter().all(|member| {
                member.standing == Standing::Ready
                    && member.template_version == 2
                    && !before.contains(&member.id)
            })
    })
    .await;
    let rename = TemplateUpdate { name: TemplateName::parse("u").ok(), ..TemplateUpdate::default() };
    world.engine.update_template(&owner(), "t", rename).await.expect("it is renamed");
    let spec = SandboxSpec { template: TemplateName::parse("u").expect("a name"), ..SandboxSpec::default() };
    let sandbox = world.engine.create(&key(), spec, Wait::Ready).await.expect("an answer");
    assert_eq!(sandbox.claimed_from.as_deref(), Some("p"), "a name is not part of a template");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_made_is_tried_again_and_the_reason_is_shown() {
    let world = World::new().await;
    template(&world, "t").await;
    world.host.fail(FakeStep::Process, FakeFailure::Refused, 2);
    world.engine.create_pool(&key(), name("p"), "t", 1).await.expect("it is made");
    let info = world.engine.wait_pool(&owner(), "p", WAIT).await.expect("it is there");
    assert_eq!(info.state, PoolState::Failing);
    assert!(info.reason.is_some_and(|reason| reason.contains("cannot create")), "{:?}", info.retry_at);
    assert!(info.retry_at.is_some());
    eventually("it is full in the end", async || {
        world
            .engine
            .pool(&owner(), "p")
            .is_ok_and(|info| info.state == PoolState::Ready && info.reason.is_none())
    })
    .await;
    eventually("nothing of the failures is left", async || {
        world.engine.pool(&owner(), "p").is_ok_and(|info| info.members.len() == 1)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lifetimes_begin_at_the_claim() {
    let world = with_pool(1).await;
    let rule = Rule { since: Since::Creation, after: Duration::from_millis(300), action: Action::Delete };
    let spec = SandboxSpec { lifetime: Lifetime::new(vec![rule]).expect("a rule"), ..of_template() };
    let sandbox = world.engine.create(&key(), spec, Wait::Ready).await.expect("it is claimed");
    assert_eq!(sandbox.claimed_from.as_deref(), Some("p"));
    eventually("its time is over", async || world.engine.get(&owner(), sandbox.id).await.is_err()).await;
    assert_eq!(full(&world, "p").await.ready(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delete_that_a_crash_interrupts_is_finished() {
    let world = with_pool(3).await;
    world.host.fail_teardown(100);
    let engine = world.engine.clone();
    let deleting = tokio::spawn(async move { engine.delete_pool(&owner(), "p").await });
    eventually("it is under way", async || {
        world.engine.pool(&owner(), "p").is_ok_and(|info| info.state == PoolState::Deleting)
    })
    .await;
    deleting.abort();
    let _ = deleting.await; // It was aborted.
    world.host.fail_teardown(0);
    let world = world.crash().await;
    eventually("it is gone", async || world.engine.pools(&owner()).is_empty()).await;
    assert_eq!(world.host.leftovers(), []);
}
