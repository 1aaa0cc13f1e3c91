//! Dockerfiles on a fake host: what is cached, what is bounded, and what a step gives to later ones.

use std::io::Write;
use std::sync::Arc;

use crate::common::{World, eventually, key, key_of, owner};
use archive::{Entry, EntryKind};
use engine::build::{BuildInfo, BuildSpec, BuildState};
use engine::image::StoredImage;
use engine::template::{TemplateName, TemplateSpec};
use engine::{Engine, EngineError, KeyLimits, SandboxSpec, Wait};
use runtime::fake::FakeFiles;
use shoal_engine as engine;

/// A tar stream of a Dockerfile and these files.
fn context(dockerfile: &str, files: &[(&str, &str)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (path, contents) in [("Dockerfile", dockerfile)].iter().chain(files) {
        let entry = Entry {
            path: path.as_bytes().to_vec(),
            kind: EntryKind::File,
            mode: 0o644,
            size: contents.len() as u64,
            modified: 0,
            link: Vec::new(),
            uid: 0,
            gid: 0,
            attributes: Vec::new(),
        };
        bytes.extend(archive::entry_header(&entry));
        bytes.extend(contents.as_bytes());
        bytes.resize(bytes.len().next_multiple_of(archive::BLOCK), 0);
    }
    bytes.resize(bytes.len() + 2 * archive::BLOCK, 0);
    bytes
}

fn spec(engine: &Engine, dockerfile: &str, files: &[(&str, &str)]) -> BuildSpec {
    let mut upload = engine.upload().expect("a file for the context");
    upload.file.write_all(&context(dockerfile, files)).expect("it can be written");
    BuildSpec {
        network: None,
        template: TemplateName::parse("t").expect("a name"),
        spec: TemplateSpec::default(),
        context: upload,
        dockerfile: "Dockerfile".into(),
        target: None,
        arguments: Default::default(),
        secrets: Default::default(),
    }
}

async fn start(world: &World, dockerfile: &str, files: &[(&str, &str)]) -> Result<BuildInfo, EngineError> {
    world.engine.build(&key(), spec(&world.engine, dockerfile, files)).await
}

async fn ended(world: &World, build: &BuildInfo) -> BuildInfo {
    let mut now = build.clone();
    eventually("the build has ended", async || {
        now = world.engine.build_info(&owner(), build.id).expect("it is remembered");
        now.state != BuildState::Running
    })
    .await;
    now
}

async fn log(world: &World, build: &BuildInfo) -> String {
    let mut log = world.engine.build_log(&owner(), build.id, 0).expect("it has a log");
    let mut bytes = Vec::new();
    while let Some(piece) = log.next(true).await.expect("it can be read") {
        bytes.extend(piece);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Builds, and returns the log. The build must succeed.
async fn build(world: &World, dockerfile: &str, files: &[(&str, &str)]) -> String {
    let started = start(world, dockerfile, files).await.expect("the build starts");
    let build = ended(world, &started).await;
    let log = log(world, &build).await;
    assert!(matches!(build.state, BuildState::Done { .. }), "{log}");
    log
}

/// The image of the template that builds make. Shown to those who have a sandbox of it.
async fn image(world: &World) -> Arc<StoredImage> {
    let spec = SandboxSpec { template: TemplateName::parse("t").expect("a name"), ..SandboxSpec::default() };
    let sandbox = world.engine.create(&key(), spec, Wait::Ready).await.expect("the sandbox is created");
    let digest = sandbox.image_digest.expect("it has an image").to_string();
    let info = world.engine.image(&owner(), &digest).expect("the image exists");
    world.engine.delete(&owner(), sandbox.id).await.expect("the sandbox is deleted");
    info.image
}

/// The files of that image, if its uppermost layer was captured.
async fn files(world: &World) -> FakeFiles {
    let image = image(world).await;
    world.host.files_in(image.layers.last().expect("it has a layer").layer)
}

#[tokio::test(flavor = "multi_thread")]
async fn no_more_builds_run_than_allowed_even_if_they_start_at_once() {
    const RUNNING_MAX: usize = 8;
    let world = World::new().await;
    let starting: Vec<_> = (0..2 * RUNNING_MAX)
        .map(|_| {
            let (engine, spec) =
                (world.engine.clone(), spec(&world.engine, "FROM host\nRUN [\"gate\", \"end\"]", &[]));
            tokio::spawn(async move { engine.build(&key(), spec).await })
        })
        .collect();
    let mut started = Vec::new();
    for start in starting {
        match start.await.expect("no panic") {
            Ok(build) => started.push(build),
            Err(error) => assert!(matches!(error, EngineError::Full { .. }), "{error}"),
        }
    }
    assert_eq!(started.len(), RUNNING_MAX);
    world.host.open_gate("end");
    for build in &started {
        let build = ended(&world, build).await;
        assert!(matches!(build.state, BuildState::Done { .. }), "{:?}", build.state);
    }
    build(&world, "FROM host", &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_follows_the_line_that_says_that_a_log_was_truncated() {
    let world = World::new().await;
    let dockerfile = "FROM host\nRUN [\"flood\", \"17000000\"]\nRUN [\"echo\", \"later\"]\n";
    let log = build(&world, dockerfile, &[]).await;
    let end = "\n[log truncated: it has reached its size limit]\n";
    assert!(log.ends_with(end), "{:?}", &log[log.len() - 200..]);
    assert_eq!(log.matches(end).count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_from_the_host_notices_that_the_host_has_changed() {
    let world = World::new().await;
    let dockerfile = "FROM scratch\nCOPY --from=host /etc/motd /motd\n";
    for (contents, cached) in [("one", false), ("one", true), ("two", false), ("one", true)] {
        world.host.set_host_file("/etc/motd", contents);
        let log = build(&world, dockerfile, &[]).await;
        assert_eq!(log.contains("  cached\n"), cached, "{contents}: {log}");
        assert_eq!(files(&world).await["/motd"].contents.as_deref(), Some(contents.as_bytes()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_reports_what_is_in_layers_that_existed_before() {
    let world = World::new().await;
    for contents in ["one", "two"] {
        build(&world, "FROM scratch\nCOPY a /a\n", &[("a", contents)]).await;
        let entries: Vec<u64> = image(&world).await.layers.iter().map(|layer| layer.facts.entries).collect();
        assert_eq!(entries, [1, 1], "{contents}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_path_is_added_to_the_default_one_if_the_base_image_sets_none() {
    let world = World::new().await;
    build(&world, "FROM scratch\nENV PATH=/opt/bin:$PATH\nENV PATH=$PATH:/last A=${UNSET}x\n", &[]).await;
    let env = image(&world).await.config.env.clone();
    let usual = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    let expected = [("PATH".to_owned(), format!("/opt/bin:{usual}:/last")), ("A".to_owned(), "x".to_owned())];
    assert_eq!(env, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn copied_files_belong_to_the_user_of_chown_without_a_program_of_the_image() {
    let world = World::new().await;
    // The fake init panics if it is asked to run `chown`.
    let dockerfile = "FROM scratch\n\
        COPY old/a /srv/app/a\n\
        COPY --chown=1000 new /srv/app\n\
        COPY --chown=7:8 old/a /opt/new/\n";
    let sent = [("old/a", "old"), ("new/a", "new"), ("new/deep/b", "b")];
    build(&world, dockerfile, &sent).await;
    let files = files(&world).await;
    let check = |path: &str, user: Option<&str>, contents: Option<&str>| {
        let file = files.get(path).unwrap_or_else(|| panic!("{path} is not in {files:?}"));
        assert_eq!(file.user.as_deref(), user, "{path}");
        assert_eq!(file.contents.as_deref(), contents.map(str::as_bytes), "{path}");
    };
    check("/srv/app", None, None);
    check("/srv/app/a", Some("1000:1000"), Some("new"));
    check("/srv/app/deep", Some("1000:1000"), None);
    check("/srv/app/deep/b", Some("1000:1000"), Some("b"));
    check("/opt", None, None);
    check("/opt/new", Some("7:8"), None);
    check("/opt/new/a", Some("7:8"), Some("old"));
    assert!(!files.keys().any(|path| path.contains("shoal-copy")), "{files:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collection_leaves_the_steps_of_recent_builds() {
    let world = World::new().await;
    let dockerfile = "FROM host\nRUN [\"echo\", \"one\"]\nRUN [\"exit\", \"1\"]\n";
    let failed = start(&world, dockerfile, &[]).await.expect("the build starts");
    assert!(matches!(ended(&world, &failed).await.state, BuildState::Failed { .. }));
    let collected = world.engine.collect_images().await.expect("collected");
    assert_eq!((collected.images, collected.layers), (0, 0), "images of stages are none that a person knows");
    let again = start(&world, dockerfile, &[]).await.expect("the build starts");
    let again = ended(&world, &again).await;
    assert_eq!(log(&world, &again).await.matches("  cached\n").count(), 1);

    build(&world, "FROM host\nRUN [\"echo\", \"one\"]\n", &[]).await;
    let collected = world.engine.collect_images().await.expect("collected");
    assert_eq!((collected.images, collected.layers), (0, 0));
    // Layers that nothing refers to go after a restart, which forgets what was recent.
    world.engine.delete_template(&owner(), "t").await.expect("deleted");
    let world = world.crash().await;
    let collected = world.engine.collect_images().await.expect("collected");
    assert_eq!((collected.images, collected.layers), (1, 1));
    assert_eq!(world.host.layers_there(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_for_a_shell_run_in_the_one_that_the_dockerfile_sets() {
    let world = World::new().await;
    // To the fake init, a command is its words in a row.
    let dockerfile = "FROM host AS first\nSHELL [\"echo\", \"by\"]\nRUN hand\nRUN [\"echo\", \"as it is\"]\n\
        FROM first\nCMD more\nENTRYPOINT [\"plain\"]\nCMD again\n";
    let log = build(&world, dockerfile, &[]).await;
    assert!(log.contains("\nby hand\n") && log.contains("\nas it is\n"), "{log}");
    let config = image(&world).await.config.clone();
    assert_eq!(
        (config.entrypoint, config.command),
        (vec!["plain".into()], ["echo", "by", "again"].map(String::from).into())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn caches_outlive_builds_and_belong_to_one_owner() {
    let world = World::new().await;
    let step = |id: &str, word: &str| {
        format!("FROM host\nRUN --mount=type=cache,id={id},target=/cache [\"echo\", \"{word}\"]\n")
    };
    build(&world, &step("pip", "one"), &[]).await;
    build(&world, &step("pip", "two"), &[]).await;
    build(&world, &step("npm", "three"), &[]).await;
    let log = build(&world, &step("pip", "two"), &[]).await;
    assert!(log.contains("  cached\n"), "what is in a cache does not repeat a step: {log}");
    let other = key_of("other", KeyLimits::default());
    let started = world.engine.build(&other, spec(&world.engine, &step("pip", "one"), &[])).await;
    let started = started.expect("the build starts");
    eventually("the other owner's build has ended", async || {
        let info = world.engine.build_info(&other.owner, started.id).expect("it is remembered");
        info.state != BuildState::Running
    })
    .await;
    let mounted = world.host.mounted();
    assert!(mounted.iter().all(|(_, path)| path == "/cache"), "{mounted:?}");
    let volumes: Vec<_> = mounted.iter().map(|(volume, _)| *volume).collect();
    assert_eq!(volumes.len(), 4, "a cached step mounts nothing: {mounted:?}");
    assert_eq!(volumes[0], volumes[1], "one cache for two builds");
    assert!(volumes[2] != volumes[0], "another id is another cache");
    assert!(!volumes[..3].contains(&volumes[3]), "another owner has another cache");
    let names = world.engine.volumes(&owner()).await.expect("a list");
    assert_eq!(names.len(), 2);
    // No sandbox is left that mounts it.
    world.engine.delete_volume(&owner(), names[0].name.as_str()).await.expect("deleted");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_cache_is_used_by_one_step_at_a_time() {
    let world = World::new().await;
    let step = |word: &str| {
        format!("FROM host\nRUN --mount=type=cache,target=/cache,sharing=locked [\"gate\", \"{word}\"]\n")
    };
    let first = start(&world, &step("one"), &[]).await.expect("the build starts");
    eventually("the first step has its sandbox", async || world.host.mounted().len() == 1).await;
    let second = start(&world, &step("two"), &[]).await.expect("the build starts");
    world.host.open_gate("two");
    // The first holds the lock, so the second cannot have ended before it.
    assert!(
        world.engine.build_info(&owner(), first.id).expect("it is remembered").state == BuildState::Running
    );
    assert_eq!(world.host.mounted().len(), 1);
    world.host.open_gate("one");
    for build in [first, second] {
        assert!(matches!(ended(&world, &build).await.state, BuildState::Done { .. }));
    }
    assert_eq!(world.host.mounted().len(), 2);
}
