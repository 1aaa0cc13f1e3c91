//! Events that outlive a daemon: what a watcher sees that goes on after a restart, and what is told of things that are not
//! sandboxes.

use crate::common::*;
use engine::volume::VolumeSpec;
use engine::webhook::WebhookSpec;
use engine::*;
use shoal_engine as engine;

/// The next event, as one word and the name of what it is about.
async fn told(watcher: &mut Watcher) -> String {
    let told = tokio::time::timeout(std::time::Duration::from_secs(20), watcher.next()).await;
    match told.expect("an event comes") {
        Told::Missed(_) => "missed".into(),
        Told::Event(event) => match &event.about {
            About::Sandbox(_, Happened::Sandbox { name, state, .. }) => format!("{name} {}", state.word()),
            About::Sandbox(_, Happened::Deleted { name }) => format!("{name} gone"),
            About::Sandbox(_, Happened::CommandStarted { .. }) => "started".into(),
            About::Sandbox(_, Happened::CommandEnded { outcome, .. }) => format!("{outcome:?}"),
            About::Sandbox(_, Happened::HookFailed { hook, .. }) => format!("{hook} failed"),
            About::Template(template) => format!("template {}", template.name),
            About::Snapshot(snapshot) => {
                format!(
                    "snapshot {} {}",
                    snapshot.name,
                    if snapshot.state.is_some() { "made" } else { "gone" }
                )
            }
            About::Volume(volume) => format!("volume {} {:?}", volume.name, volume.size_bytes),
            About::Pool(pool) => format!("pool {} {:?}", pool.name, pool.replicas),
        },
    }
}

fn named(name: &str) -> SandboxSpec {
    SandboxSpec { name: Some(SandboxName::parse(name).expect("a name")), ..SandboxSpec::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watcher_goes_on_after_a_restart() {
    let world = World::new().await;
    let mut watcher = world.engine.watch(&owner(), None, None).expect("a watcher");
    let place = watcher.place();
    let sandbox = world.engine.create(&key(), named("one"), Wait::Ready).await.expect("it is made").id;
    world.run(sandbox, "exit 3").await.ended().await;
    assert_eq!(told(&mut watcher).await, "one creating");
    let seen = watcher.place();
    // The daemon returns a command's result before it publishes the event, and it writes rows in order.
    assert_eq!(
        (told(&mut watcher).await, told(&mut watcher).await),
        ("one running".into(), "started".into())
    );
    assert_eq!(told(&mut watcher).await, "Exited(3)");
    let last = watcher.place();
    let world = world.crash().await;
    world.engine.delete(&owner(), sandbox).await.expect("it can be deleted");
    let mut again = world.engine.watch(&owner(), None, Some(last)).expect("a watcher");
    assert_eq!((told(&mut again).await, told(&mut again).await), ("one deleting".into(), "one gone".into()));
    let mut earlier = world.engine.watch(&owner(), None, Some(seen)).expect("a watcher");
    assert_eq!(told(&mut earlier).await, "one running");
    let mut first = world.engine.watch(&owner(), None, Some(place)).expect("a watcher");
    assert_eq!(told(&mut first).await, "one creating");
    let deleted = world.engine.deletion(&owner(), sandbox);
    let world = world.crash().await;
    assert_eq!(world.engine.deletion(&owner(), sandbox), deleted, "how it was deleted is known");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_happens_to_all_nouns_is_told() {
    let world = World::new().await;
    let mut watcher = world.engine.watch(&owner(), None, None).expect("a watcher");
    let name = volume::VolumeName::parse("data").expect("a name");
    let spec = VolumeSpec { name, size_bytes: 64 << 20, from: None };
    world.engine.create_volume(&key(), spec).await.expect("a volume");
    assert_eq!(told(&mut watcher).await, format!("volume data Some({})", 64 << 20));
    world.engine.delete_volume(&owner(), "data").await.expect("it can be deleted");
    assert_eq!(told(&mut watcher).await, "volume data None");
    let pool = PoolName::parse("warm").expect("a name");
    world.engine.create_pool(&key(), pool, "default", 0).await.expect("a pool");
    assert_eq!(told(&mut watcher).await, "pool warm Some(0)");
    world.engine.delete_pool(&owner(), "warm").await.expect("it can be deleted");
    assert_eq!(told(&mut watcher).await, "pool warm None");
    let sandbox = world.engine.create(&key(), named("one"), Wait::Ready).await.expect("it is made").id;
    let taken = world.engine.take_snapshot(&key(), sandbox, Default::default()).await.expect("a snapshot");
    world.engine.delete_snapshot(&owner(), &taken.id).await.expect("it can be deleted");
    let mut all = Vec::new();
    while all.last().is_none_or(|last| last != "snapshot one gone") {
        all.push(told(&mut watcher).await);
    }
    assert!(all.contains(&"snapshot one made".to_owned()), "{all:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_webhook_and_how_far_it_has_come_are_kept() {
    let world = World::new().await;
    let spec =
        WebhookSpec { url: "https://example.com/".into(), kinds: vec!["sandbox".into()], anywhere: false };
    let mut webhook = world.engine.create_webhook(&owner(), spec.clone()).await.expect("a webhook");
    world.engine.create(&key(), named("one"), Wait::Ready).await.expect("it is made");
    let mut watcher = world.engine.watch(&owner(), None, Some(webhook.position)).expect("a watcher");
    assert_eq!(told(&mut watcher).await, "one creating");
    (webhook.position, webhook.attempts) = (watcher.place(), 2);
    let dead = webhook::DeadLetter {
        event: watcher.place().to_string(),
        serial: watcher.place().serial(),
        given_up_at: std::time::SystemTime::UNIX_EPOCH,
        attempts: 2,
        reason: "it answered 500".into(),
        body: "{}".into(),
    };
    world.engine.note_webhook(&webhook, Some(dead.clone())).await.expect("it is written");
    let secret = webhook.secret;
    let world = world.crash().await;
    let kept = world.engine.webhook(&owner(), webhook.id).expect("it is there");
    assert_eq!((kept.position, kept.attempts, kept.secret), (webhook.position, 2, secret));
    assert_eq!((kept.url, kept.kinds), (spec.url.clone(), spec.kinds.clone()));
    assert_eq!(world.engine.dead_letters(&owner(), webhook.id).await.expect("a list"), [dead]);
    let other = Owner::parse("other").expect("an owner");
    world.engine.delete_webhook(&other, webhook.id).await.expect_err("it is another's");
    world.engine.delete_webhook(&owner(), webhook.id).await.expect("it can be deleted");
    for _ in 0..webhook::WEBHOOKS_MAX {
        world.engine.create_webhook(&owner(), spec.clone()).await.expect("a webhook");
    }
    let refused = world.engine.create_webhook(&owner(), spec).await.expect_err("there are enough");
    assert!(matches!(refused, EngineError::Quota { .. }), "{refused:?}");
}
