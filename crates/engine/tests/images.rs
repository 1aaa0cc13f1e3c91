//! Images on a fake host: what is kept, what is referred to, and what a failure or a crash leaves.

use std::io::Write;

use crate::common::{World, key, key_of, owner};
use engine::image::{Format, ImageFault, ImageRef, InUse};
use engine::{EngineError, KeyLimits, SandboxSpec, Wait};
use runtime::fake::{FakeFailure, FakeHost, FakeStep};
use shoal_engine as engine;
use wire::Digest;

/// The archive of a root file system with one file in it.
fn archive(contents: &str) -> Vec<u8> {
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::write(directory.path().join("file"), contents).expect("it takes files");
    let mut bytes = Vec::new();
    let top = std::fs::File::open(directory.path()).expect("it opens");
    archive::pack_directory(top.into(), &mut bytes).expect("it can be packed");
    bytes
}

async fn import(world: &World, name: &str, contents: &str) -> Result<Digest, EngineError> {
    let mut upload = world.engine.upload()?;
    upload.file.write_all(&archive(contents)).expect("it takes bytes");
    let name = ImageRef::parse(name).expect("a reference");
    let images = world.engine.import(&key(), upload, Some(name), Format::Auto).finished().await?;
    Ok(images[0].digest)
}

fn of(image: &str) -> SandboxSpec {
    SandboxSpec { image: Some(image.into()), ..SandboxSpec::default() }
}

/// Waits for what happens behind an engine that has just started.
async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..2000 {
        if holds() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    panic!("it did not come true: {what}");
}

fn blobs(world: &World) -> Vec<String> {
    let entries = std::fs::read_dir(world.directory.path().join("images/blobs")).expect("it is there");
    entries.map(|entry| entry.expect("it can be read").file_name().to_string_lossy().into_owned()).collect()
}

#[tokio::test]
async fn what_a_sandbox_was_made_from_stays_until_it_goes() {
    let world = World::new().await;
    let digest = import(&world, "one:1", "one").await.expect("it is taken");
    let sandbox = world.engine.create(&key(), of("one:1"), Wait::Ready).await.expect("it is made");
    assert_eq!((sandbox.image.as_str(), sandbox.image_digest), ("one:1", Some(digest)));
    assert_eq!(world.engine.image(&owner(), "one:1").expect("it is here").sandboxes, 1);
    let admin = engine::Key { admin: true, ..key() };
    let refused = world.engine.remove_image(&admin, "one:1", InUse::Refuse).await;
    assert!(matches!(refused, Err(EngineError::ImageInUse { sandboxes: 1, .. })), "{refused:?}");
    let collected = world.engine.remove_image(&admin, "one:1", InUse::Release).await.expect("its name goes");
    assert_eq!((collected.images, collected.layers), (0, 0), "a sandbox has it");

    // The reference is a row, so a crash does not lose it.
    let world = world.crash().await;
    world.engine.collect_images().await.expect("collected");
    assert_eq!(world.host.layers_there().len(), 2);
    let again = world.engine.get(&owner(), sandbox.id).await.expect("it is there");
    assert_eq!(again.image_digest, Some(digest));
    world.engine.delete(&owner(), sandbox.id).await.expect("deleted");
    let collected = world.engine.collect_images().await.expect("collected");
    assert_eq!((collected.images, collected.layers), (1, 2));
    assert_eq!(world.host.layers_there(), []);
    assert!(world.engine.images(&owner()).is_empty());
}

#[tokio::test]
async fn a_failure_at_any_step_leaves_no_image_and_the_next_try_works() {
    let world = World::new().await;
    world.host.fail(FakeStep::Unpack, FakeFailure::Refused, 1);
    let failed = import(&world, "one:1", "one").await.expect_err("it was made to fail");
    let EngineError::Image { source, .. } = &failed else { panic!("{failed}") };
    assert!(matches!(**source, ImageFault::Layer { number: 1, count: 1, .. }), "{failed}");
    assert!(world.engine.images(&owner()).is_empty() && world.host.layers_there().is_empty());
    assert_eq!(blobs(&world), Vec::<String>::new());
    // Once the layer of the image is there, ours on top fails.
    world.host.fail(FakeStep::Unpack, FakeFailure::LauncherGone, 1);
    import(&world, "one:1", "one").await.expect("a launcher that dies once is asked again");
    assert_eq!(world.host.layers_there().len(), 2);
    assert_eq!(world.engine.images(&owner()).len(), 1);
    // The same contents under another name need no unpacking.
    let before = world.host.unpacked();
    import(&world, "two:1", "one").await.expect("it is taken");
    assert_eq!(world.host.unpacked(), before);
    assert_eq!(world.engine.images(&owner())[0].names, ["one:1", "two:1"]);
}

#[tokio::test]
async fn a_layer_that_is_spoilt_is_refused_for_what_it_is() {
    let world = World::new().await;
    world.host.spoil_layer(image::hash::digest_of(&archive("bad")));
    let failed = import(&world, "bad:1", "bad").await.expect_err("it is refused");
    assert!(matches!(&failed, EngineError::Image { source, .. } if !source.is_disk_full()), "{failed}");
    assert!(world.engine.images(&owner()).is_empty());
    import(&world, "good:1", "good").await.expect("others are not");
}

#[tokio::test]
async fn files_and_rows_that_a_crash_parted_are_brought_together() {
    let world = World::new().await;
    import(&world, "one:1", "one").await.expect("it is taken");
    let stray = Digest::from_bytes([9; 32]);
    world.host.plant_layer(stray);
    let world = world.crash().await;
    until("files without a row are removed", || !world.host.layers_there().contains(&stray)).await;
    assert_eq!(world.host.layers_there().len(), 2, "the others have rows");

    // Files that are gone make an image that has to be pulled again, and does not stay as a broken one.
    let lost = world.host.layers_there()[0];
    world.host.lose_layer(lost);
    let world = world.crash().await;
    until("an image without its files is forgotten", || world.engine.image(&owner(), "one:1").is_err()).await;
    world.engine.collect_images().await.expect("collected");
    import(&world, "one:1", "one").await.expect("it is taken again");
    world.engine.create(&key(), of("one:1"), Wait::Ready).await.expect("it is made");
}

#[tokio::test]
async fn aliases_are_one_step_long_and_outlive_a_crash() {
    let world = World::new().await;
    import(&world, "team/python:3", "python").await.expect("it is taken");
    world.engine.set_alias("python:3", "team/python:3").await.expect("set");
    world.engine.set_alias("ubuntu", "host").await.expect("set");
    for (name, target) in [("x", "x"), ("x", "python:3"), ("team/python:3", "host"), ("X", "host"), ("x", "")]
    {
        let refused = world.engine.set_alias(name, target).await;
        assert!(matches!(refused, Err(EngineError::Invalid { .. })), "{name} {target}");
    }
    let world = world.crash().await;
    let sandbox = world.engine.create(&key(), of("python:3"), Wait::Ready).await.expect("it is made");
    assert_eq!((sandbox.image.as_str(), sandbox.image_alias.as_deref()), ("team/python:3", Some("python:3")));
    let host = world.engine.create(&key(), of("docker.io/library/ubuntu"), Wait::Ready).await.expect("made");
    assert_eq!((host.image.as_str(), host.image_alias.as_deref()), ("host", Some("ubuntu:latest")));
    assert_eq!(world.engine.image(&owner(), "python:3").expect("it is here").aliases, ["python:3"]);
    world.engine.delete_alias("python:3").await.expect("it goes");
    let refused = world.engine.delete_alias("python:3").await;
    assert!(matches!(refused, Err(EngineError::AliasNotFound { .. })));
    let world = world.crash().await;
    let again = world.engine.get(&owner(), sandbox.id).await.expect("it is there");
    assert_eq!(again.image_alias.as_deref(), Some("python:3"), "it was made under that name");
}

#[tokio::test]
async fn everyones_images_are_removed_by_those_who_run_the_machine() {
    let world = World::new().await;
    import(&world, "one:1", "one").await.expect("it is taken");
    let other = key_of("other", KeyLimits::default());
    assert!(world.engine.image(&other.owner, "one:1").is_ok(), "it is everyone's");
    let refused = world.engine.remove_image(&other, "one:1", InUse::Refuse).await;
    assert!(matches!(refused, Err(EngineError::AdminOnly { .. })), "{refused:?}");
    let missing = world.engine.remove_image(&other, "two:1", InUse::Refuse).await;
    assert!(matches!(missing, Err(EngineError::ImageNotFound { .. })));
    let nonsense = world.engine.image(&owner(), "UPPER");
    assert!(matches!(nonsense, Err(EngineError::Invalid { .. })));
}

#[tokio::test]
async fn a_host_that_cannot_remove_files_keeps_no_rows_of_them() {
    let world = World::on(FakeHost::new()).await;
    import(&world, "one:1", "one").await.expect("it is taken");
    world.host.fail(FakeStep::RemoveLayer, FakeFailure::Refused, 2);
    let admin = engine::Key { admin: true, ..key() };
    world.engine.remove_image(&admin, "one:1", InUse::Refuse).await.expect("its rows go");
    assert_eq!(world.host.layers_there().len(), 2, "the files could not");
    let world = world.crash().await;
    until("the next start removes them", || world.host.layers_there().is_empty()).await;
}

#[tokio::test]
async fn a_layer_that_is_made_while_the_layers_are_listed_is_not_lost() {
    let host = FakeHost::new();
    host.hold(FakeStep::ListLayers);
    let world = World::on(host).await;
    until("the layers are being listed", || world.host.listings() == 1).await;
    import(&world, "one:1", "one").await.expect("it is imported");
    world.host.release(FakeStep::ListLayers);
    until("the layers are listed again", || world.host.listings() == 2).await;
    world.engine.collect_images().await.expect("collected");
    assert_eq!(world.host.layers_there().len(), 2);
    world.engine.create(&key(), of("one:1"), Wait::Ready).await.expect("the sandbox is created");
}
