//! The sandboxes in which steps of builds run belong to the build: no caller finds them, not even their owner.

use std::io::Write;

use crate::common::*;
use engine::build::{BuildSpec, BuildState};
use engine::snapshot::SnapshotSpec;
use engine::template::{TemplateName, TemplateSpec};
use engine::*;
use shoal_engine as engine;
use wire::{BuildId, SandboxId};

/// A context that has only a Dockerfile, as a tar stream.
fn context(dockerfile: &str) -> Vec<u8> {
    let entry = archive::Entry {
        path: b"Dockerfile".to_vec(),
        kind: archive::EntryKind::File,
        link: Vec::new(),
        size: dockerfile.len() as u64,
        mode: 0o644,
        uid: 0,
        gid: 0,
        modified: 0,
        attributes: Vec::new(),
    };
    let mut tar = archive::entry_header(&entry);
    tar.extend_from_slice(dockerfile.as_bytes());
    tar.resize(tar.len().next_multiple_of(archive::BLOCK) + 2 * archive::BLOCK, 0);
    tar
}

async fn build(world: &World, dockerfile: &str) -> BuildId {
    let upload = world.engine.upload().expect("a file");
    upload.file.try_clone().expect("a file").write_all(&context(dockerfile)).expect("it takes bytes");
    let spec = BuildSpec {
        network: None,
        template: TemplateName::parse("t").expect("a name"),
        spec: TemplateSpec::default(),
        context: upload,
        dockerfile: "Dockerfile".into(),
        target: None,
        arguments: Default::default(),
        secrets: Default::default(),
    };
    world.engine.build(&key(), spec).await.expect("it is begun").id
}

/// The sandbox that exists on the host and is none of these.
async fn hidden(world: &World, known: &[SandboxId]) -> SandboxId {
    let mut found = None;
    eventually("a step runs", async || {
        let left = world.host.leftovers().into_iter().map(|(id, _)| id);
        found = left.into_iter().find(|id| !known.contains(id) && world.host.remembered(*id) > 0);
        found.is_some()
    })
    .await;
    found.expect("the loop ended")
}

async fn over(world: &World, id: BuildId) -> BuildState {
    let mut state = BuildState::Running;
    eventually("the build is over", async || {
        state = world.engine.build_info(&owner(), id).expect("it is there").state;
        state != BuildState::Running
    })
    .await;
    state
}

#[track_caller]
fn not_found<T>(result: Result<T, EngineError>, what: &str) {
    let found = result.err().map(|error| matches!(error, EngineError::SandboxNotFound { .. }));
    assert_eq!(found, Some(true), "{what} reached the sandbox of a build");
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_reaches_the_sandbox_of_a_build() {
    let world = World::new().await;
    let mine = world.create().await.id;
    let id = build(&world, "FROM host\nRUN [\"gate\", \"step\"]\n").await;
    let step = hidden(&world, &[mine]).await;
    for owner in [owner(), Owner::parse("eve").expect("an owner")] {
        let engine = &world.engine;
        not_found(engine.get(&owner, step).await, "get");
        not_found(engine.find(&owner, &step.to_string()).await, "find");
        not_found(engine.run(&owner, step, script_of("echo hi")).await.map(drop), "run");
        not_found(engine.commands(&owner, step, CommandQuery::default()).await, "commands");
        not_found(engine.files(&owner, step, None).map(drop), "files");
        not_found(engine.delete(&owner, step).await, "delete");
        not_found(engine.touch(&owner, step).await, "touch");
        not_found(engine.explain(&owner, step).await, "explain");
        not_found(engine.stats(&owner, step).await, "stats");
        not_found(engine.watch(&owner, Some(step), None).map(drop), "watch");
        let name = SandboxName::parse("stolen").expect("a name");
        not_found(engine.rename(&owner, step, name).await, "rename");
        let template = TemplateSpec::default();
        let spec = SnapshotSpec {
            name: "s".into(),
            tags: Vec::new(),
            template,
            note: String::new(),
            labels: Default::default(),
        };
        let key = key_of(owner.as_str(), KeyLimits::default());
        not_found(engine.capture_snapshot(&key, step, spec).await.map(drop), "capture");
        let listed = engine.list(&owner, ListQuery::default()).await.expect("a list").items;
        assert!(listed.iter().all(|sandbox| sandbox.id == mine), "{listed:?}");
        let stats = engine.stats_page(&owner, ListQuery::default()).await.expect("a list").items;
        assert!(stats.iter().all(|stats| stats.sandbox == mine), "{stats:?}");
        // The label by which such sandboxes were once known leads nowhere.
        let labels = Labels::new([("shoal.build".to_owned(), id.to_string())].into()).expect("labels");
        let made = engine.get_or_create(&key, labels, SandboxSpec::default(), Wait::Ready).await;
        let (made, origin) = made.expect("a sandbox of one's own");
        assert_eq!((origin, made.id == step), (Origin::Made, false));
        engine.delete(&owner, made.id).await.expect("it is the caller's");
    }
    world.host.open_gate("step");
    assert!(matches!(over(&world, id).await, BuildState::Done { .. }));
    eventually("only the caller's is left", async || {
        world.host.leftovers().iter().all(|(sandbox, _)| *sandbox == mine)
    })
    .await;
}

/// The names that builds once used for their sandboxes are ordinary names now: nothing is deleted because it has them.
#[tokio::test(flavor = "multi_thread")]
async fn a_caller_may_use_what_once_marked_the_sandboxes_of_builds() {
    let world = World::new().await;
    let id = build(&world, "FROM host\nRUN [\"gate\", \"step\"]\n").await;
    let step = hidden(&world, &[]).await;
    let spec = SandboxSpec {
        labels: Labels::new([("shoal.build".to_owned(), id.to_string())].into()).expect("labels"),
        idempotency_key: Some(IdempotencyKey::parse(&format!("shoal build {id} 1")).expect("a key")),
        ..SandboxSpec::default()
    };
    let mine = world.engine.create(&key(), spec, Wait::Ready).await.expect("it is made").id;
    assert_ne!(mine, step);
    world.host.open_gate("step");
    assert!(matches!(over(&world, id).await, BuildState::Done { .. }));
    world.engine.delete_build(&owner(), id).await.expect("it is deleted");
    let world = world.crash().await;
    assert_eq!(world.engine.get(&owner(), mine).await.expect("it is still there").state, State::Running);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sandboxes_of_a_build_count_against_the_owners_limits() {
    let world = World::new().await;
    let id = build(&world, "FROM host\nRUN [\"gate\", \"step\"]\n").await;
    hidden(&world, &[]).await;
    let one = key_of("default", KeyLimits { sandboxes: Some(1), ..KeyLimits::default() });
    let refused = world.engine.create(&one, SandboxSpec::default(), Wait::Ready).await;
    assert!(matches!(refused, Err(EngineError::Quota { .. })), "{refused:?}");
    world.host.open_gate("step");
    assert!(matches!(over(&world, id).await, BuildState::Done { .. }));
    world.engine.create(&one, SandboxSpec::default(), Wait::Ready).await.expect("there is room again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_in_the_middle_of_a_build_leaves_no_sandbox() {
    let world = World::new().await;
    let id = build(&world, "FROM host\nRUN [\"gate\", \"step\"]\n").await;
    let step = hidden(&world, &[]).await;
    let world = world.crash().await;
    assert!(matches!(over(&world, id).await, BuildState::Failed { .. }));
    not_found(world.engine.get(&owner(), step).await, "get");
    eventually("nothing is left", async || world.host.leftovers().is_empty()).await;
}
