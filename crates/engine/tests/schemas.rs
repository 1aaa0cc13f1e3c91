//! A database of every schema that ever landed is opened by this build, and what is in it goes on.
//!
//! `fixtures/schema_NN.sql` is a database as a daemon with NN migrations left it, with rows in every table. A fixture is
//! never changed once it has landed. After a new migration:
//!
//! 1. `UPDATE_SCHEMAS=1 cargo nextest run -p shoal-engine -E 'test(schemas::)'` writes the next fixture: the newest one
//!    as the new migration leaves it.
//! 2. Give its new tables and columns rows by hand, as a daemon writes them. A test fails while a table is empty.
//! 3. Say in `goes_on` what must come of them.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use engine::build::BuildState;
use engine::template::Preparation;
use engine::*;
use runtime::fake::FakeHost;
use runtime::{Isolation, Spec, Storage};
use rusqlite::Connection;
use shoal_engine as engine;
use tempfile::TempDir;
use wire::guest::{ExitStatus, StartError};
use wire::launch::{Limits, Rootfs};
use wire::{SandboxId, VolumeId};

use crate::common::*;

/// The database in a data directory.
const DATABASE: &str = "shoal.db";
/// What is in the rows of every fixture.
const LIVING: u128 = 0x1111_1111_1111_1111_1111_1111_1111_1111;
const BROKEN: u128 = 0x2222_2222_2222_2222_2222_2222_2222_2222;
const KEPT_FILES: u128 = 0xcccc_cccc_cccc_cccc_cccc_cccc_cccc_cccc;
const STEP: u128 = 0xdddd_dddd_dddd_dddd_dddd_dddd_dddd_dddd;
const VOLUME: u128 = 0x7777_7777_7777_7777_7777_7777_7777_7777;
const LAYER: &str = "sha256:dac1d7cfa95021764849fd102524e141488c5e3a90f861dbb5a12d9ac8584f85";
const KEY: &str = "shoal_aaaaaaaaaaaa_00112233445566778899aabbccddeeff0011223344556677";
const METRICS_KEY: &str = "shoal_bbbbbbbbbbbb_8899aabbccddeeff001122334455667700112233445566";

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn fixture(version: u32) -> PathBuf {
    fixtures().join(format!("schema_{version:02}.sql"))
}

/// The database of a fixture, in a data directory of its own.
fn planted(version: u32) -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    let path = fixture(version);
    let sql = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let database = open(directory.path());
    database.pragma_update(None, "foreign_keys", "OFF").expect("tables come in no order");
    database.execute_batch(&sql).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    if version >= 17 {
        // Its daemon ran in this boot of the machine: what a restart of the machine does is another test's business.
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("the kernel tells it");
        let boot = u128::from_str_radix(&boot.trim().replace('-', ""), 16).expect("a number");
        database.execute("UPDATE machine SET boot = ?1", [boot.to_be_bytes()]).expect("a row");
    }
    directory
}

fn open(directory: &Path) -> Connection {
    Connection::open(directory.join(DATABASE)).expect("a database")
}

fn version_of(directory: &Path) -> u32 {
    open(directory).pragma_query_value(None, "user_version", |row| row.get(0)).expect("it has a version")
}

/// How many migrations this build has.
async fn newest() -> u32 {
    version_of(fresh().await.path())
}

/// A data directory that this build made.
async fn fresh() -> TempDir {
    let World { engine, directory, .. } = World::new().await;
    engine.stop().await;
    directory
}

/// What a database is made of.
fn schema(directory: &Path) -> Vec<String> {
    texts(&open(directory), "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name")
}

/// A machine on which all lives that the rows of fixtures speak of.
async fn host() -> FakeHost {
    let host = FakeHost::new();
    let limits = Limits { cpu_millis: 2000, memory_bytes: 2 << 30, pids: 512, disk_bytes: None };
    let sandbox = SandboxId::from_bits(LIVING);
    let (over, writable) = Default::default();
    let spec = Spec { sandbox, rootfs: Rootfs::Host, limits, mounts: Vec::new(), over, writable };
    host.launch(&spec).await.expect("the fake host makes it");
    host.create_volume(VolumeId::from_bits(VOLUME), 1 << 30, None).await.expect("the fake host makes it");
    host.plant_layer(LAYER.parse().expect("a digest"));
    host
}

#[tokio::test(flavor = "multi_thread")]
async fn every_schema_has_a_fixture() {
    let newest = newest().await;
    if std::env::var_os("UPDATE_SCHEMAS").is_some() && !fixture(newest).exists() {
        let directory = planted(newest - 1);
        // The rows are migrated first of all. What stands in the way of the images stops the start before anything else
        // is done to them.
        fs::write(directory.path().join("images"), "in the way").expect("the directory takes files");
        let (data_dir, images) = (directory.path().into(), Default::default());
        let config = EngineConfig {
            data_dir,
            capacity: roomy(),
            output_kept_max: KEPT,
            images,
            network: Default::default(),
        };
        assert!(Engine::start(config, Arc::new(FakeHost::new())).await.is_err(), "it starts all the same");
        fs::write(fixture(newest), dump(directory.path())).expect("the fixture can be written");
    }
    let found: BTreeSet<PathBuf> = fs::read_dir(fixtures())
        .expect("there are fixtures")
        .map(|entry| entry.expect("a file").path())
        .collect();
    let expected: BTreeSet<PathBuf> = (1..=newest).map(fixture).collect();
    assert_eq!(
        found, expected,
        "left: what is there; right: one for each migration. See the head of this file"
    );
}

/// A database as SQL, in the order in which its tables were made.
fn dump(directory: &Path) -> String {
    let database = open(directory);
    let texts = |sql: &str| texts(&database, sql);
    let mut sql = String::new();
    for made in texts(
        "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%' ORDER BY rowid",
    ) {
        let _ = writeln!(sql, "{made};");
    }
    for table in texts(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY rowid",
    ) {
        let columns = texts(&format!("SELECT name FROM pragma_table_info('{table}') ORDER BY cid"));
        let quoted: Vec<String> = columns.iter().map(|column| format!("quote({column})")).collect();
        for row in texts(&format!("SELECT {} FROM {table}", quoted.join(" || ', ' || "))) {
            let _ = writeln!(sql, "INSERT INTO {table} ({}) VALUES ({row});", columns.join(", "));
        }
    }
    let _ = writeln!(sql, "PRAGMA user_version = {};", version_of(directory));
    sql
}

/// What a question with one column gives.
fn texts(database: &Connection, sql: &str) -> Vec<String> {
    let mut statement = database.prepare(sql).expect("a question");
    let rows = statement.query_map([], |row| row.get(0)).expect("an answer");
    rows.collect::<Result<_, _>>().expect("texts")
}

#[tokio::test(flavor = "multi_thread")]
async fn every_table_of_every_fixture_has_rows() {
    for version in 1..=newest().await {
        let directory = planted(version);
        assert_eq!(version_of(directory.path()), version);
        let sql = dump(directory.path());
        let named = |start: &str| -> BTreeSet<String> {
            let lines = sql.lines().filter_map(|line| line.strip_prefix(start));
            lines.filter_map(|rest| rest.split([' ', '(']).next()).map(str::to_owned).collect()
        };
        assert_eq!(named("CREATE TABLE "), named("INSERT INTO "), "tables, and tables with rows: {version}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_of_every_schema_goes_on() {
    let fresh = fresh().await;
    let newest = version_of(fresh.path());
    for version in 1..=newest {
        let directory = planted(version);
        let host = host().await;
        let engine = World::in_directory(host.clone(), directory.path()).await;
        goes_on(&engine, version).await;
        let sandbox = SandboxId::from_bits(LIVING);
        let asked = command(&engine, "cmd_asked").await.ended().await;
        assert_eq!(outcome(&asked), Outcome::Exited(0), "what was asked for is begun once: {version}");
        let spec = script_of("echo on");
        let new =
            engine.run(&owner(), sandbox, spec).await.expect("a living sandbox runs commands").ended().await;
        assert_eq!(outcome(&new), Outcome::Exited(0));
        engine.stop().await;
        drop(engine);
        assert_eq!(version_of(directory.path()), newest);
        assert_eq!(schema(directory.path()), schema(fresh.path()), "migrated, and made today: {version}");

        // What this build wrote, it reads.
        let engine = World::in_directory(host, directory.path()).await;
        goes_on(&engine, version).await;
        assert_eq!(outcome(&command(&engine, new.id.as_str()).await.now()), Outcome::Exited(0));
        engine.delete(&owner(), sandbox).await.expect("it can be deleted");
        engine.delete(&owner(), SandboxId::from_bits(BROKEN)).await.expect("it can be deleted");
    }
}

async fn command(engine: &Engine, id: &str) -> CommandRef {
    let id = id.parse().expect("an id");
    engine.command(&owner(), SandboxId::from_bits(LIVING), &id).await.expect("its row is read")
}

/// What must hold of the rows of a fixture of this version.
async fn goes_on(engine: &Engine, version: u32) {
    let since = |first: u32| version >= first;
    let living = engine.get(&owner(), SandboxId::from_bits(LIVING)).await.expect("its row is read");
    assert_eq!((living.name.as_str(), living.state), ("living", State::Running), "{version}");
    assert_eq!(living.env.get("A").map(String::as_str), Some("1"));
    assert_eq!((living.limits.cpu_millis, living.limits.pids), (2000, 512));
    let broken = engine.get(&owner(), SandboxId::from_bits(BROKEN)).await.expect("its row is read");
    assert_eq!(broken.state, State::Failed { disk: Disk::Lost });
    assert_eq!(broken.reason.as_deref(), Some("init ended: signal 9"));
    eventually("what was being deleted is gone", async || engine.find(&owner(), "going").await.is_err())
        .await;

    let exited = command(engine, "cmd_exited").await;
    assert_eq!(outcome(&exited.now()), Outcome::Exited(3));
    let output = exited.output(1000).await.expect("it is kept");
    assert_eq!((output.stdout.as_slice(), output.stderr.as_slice()), (&b"hello\n"[..], &b"oops\n"[..]));
    let killed = command(engine, "cmd_killed").await;
    assert_eq!(outcome(&killed.now()), Outcome::Killed(ExitStatus::Signal(9)));
    let failed = command(engine, "cmd_failed").await;
    let reason = StartError::ProgramNotFound { program: "nope".into() };
    assert_eq!(outcome(&failed.now()), Outcome::FailedToStart(reason));

    let key = engine.authenticate(KEY).expect("a key is good for as long as it is not deleted");
    assert_eq!((&key.owner, key.limits.sandboxes, key.metrics_only), (&owner(), Some(50), false));
    if since(3) {
        assert_eq!(living.labels.pairs().get("team").map(String::as_str), Some("blue"));
        let rules: Vec<Since> = living.lifetime.rules().iter().map(|rule| rule.since).collect();
        assert_eq!(rules, [Since::Creation]);
    }
    if since(4) {
        assert!(engine.authenticate(METRICS_KEY).expect("it is a key").metrics_only);
    }
    if since(6) {
        let image = engine.image(&owner(), "tools").expect("the alias leads to the image");
        assert_eq!((image.names.len(), image.aliases.len(), image.image.size()), (1, 1, 100));
    }
    if since(7) {
        assert_eq!((living.template.as_str(), living.template_version), ("tools", 1));
        let template = engine.template(&owner(), "tools").expect("its row is read");
        assert_eq!((template.version, template.spec.image.as_str()), (2, "registry.example/tools:1"));
        assert!(matches!(template.preparation, Preparation::Ready(_)), "{:?}", template.preparation);
    }
    if since(8) {
        let states: Vec<BuildState> = engine.builds(&owner()).into_iter().map(|build| build.state).collect();
        assert!(states.contains(&BuildState::Done { version: 2 }), "{states:?}");
        let interrupted = |state: &BuildState| matches!(state, BuildState::Failed { .. });
        assert!(
            states.len() == 2 && states.iter().any(interrupted),
            "a build does not outlive its daemon: {states:?}"
        );
    }
    if since(10) {
        assert_eq!(living.limits.disk_bytes, Some(10 << 30));
        assert_eq!(living.mounts.iter().map(|mount| mount.volume.as_str()).collect::<Vec<_>>(), ["data"]);
        let volume = engine.volume(&owner(), "data").await.expect("its row is read");
        assert_eq!((volume.size_bytes, volume.holders.len()), (1 << 30, 1));
    }
    if since(11) {
        assert_eq!(living.claimed_from.as_deref(), Some("ready"));
        assert_eq!(engine.pool(&owner(), "ready").expect("its row is read").replicas, 0);
    }
    if since(12) {
        assert_eq!(living.notes.get("langsmith"), Some("{\"kept\":true}"));
    }
    if since(14) {
        let snapshot = engine.snapshot(&owner(), "saved:latest").await.expect("the tag leads to it");
        assert_eq!(snapshot.sandbox, Some(SandboxId::from_bits(LIVING)));
    }
    if since(16) {
        let kept = SandboxId::from_bits(KEPT_FILES);
        eventually("the goal of a pause is reached", async || {
            engine.get(&owner(), kept).await.expect("its row is read").state == State::Paused(Kept::Dropped)
        })
        .await;
        let step = engine.get(&owner(), SandboxId::from_bits(STEP)).await;
        assert!(
            matches!(step, Err(EngineError::SandboxNotFound { .. })),
            "a build's sandbox is its own: {step:?}"
        );
    }
    if since(17) {
        assert_eq!(living.network.spec().mode, NetworkMode::Registries);
        assert_eq!(living.history, 5);
        let snapshot = engine.snapshot(&owner(), "before").await.expect("its row is read");
        assert_eq!(snapshot.sandbox, Some(SandboxId::from_bits(LIVING)));
        assert_eq!(key.limits.connections, Some(100));
    }
    if since(18) {
        let hook = living.hooks.at(HookPoint::BeforePause).expect("its row is read");
        assert!(hook.required && hook.user.as_ref().is_some_and(|user| user.as_str() == "nobody"));
        let failure = living.hook_runs[&HookPoint::BeforePause].failure.as_deref();
        assert_eq!(failure, Some("it exited with 3"));
        let webhook = engine.webhooks(&owner()).pop().expect("its row is read");
        assert_eq!((webhook.url.as_str(), webhook.attempts), ("https://hooks.example/", 2));
        assert_eq!(engine.dead_letters(&owner(), webhook.id).await.expect("rows").len(), 1);
        let mut watcher = engine.watch(&owner(), None, Some(webhook.position)).expect("a watcher");
        let Told::Event(event) = watcher.next().await else { panic!("the event is kept") };
        assert!(matches!(&event.about, About::Volume(volume) if volume.name == "data"), "{event:?}");
    }
    if since(19) {
        let secrets = engine.secrets(&key);
        assert_eq!((secrets[0].name.as_str(), secrets[0].source, secrets[0].version), ("api", "file", 2));
        assert_eq!(secrets[0].rules[0].domain, "api.example.com");
        let check = engine.verify_ledger().await.expect("its lines are read");
        assert_eq!((check.lines, check.broken_at), (1, None), "lines of an older daemon still verify");
    }
}

/// Builds used to find their sandboxes by a label and an idempotency key, which callers could use too.
#[tokio::test(flavor = "multi_thread")]
async fn sandboxes_of_builds_are_told_from_those_of_callers_that_look_like_them() {
    const BUILD: &str = "66666666-6666-6666-6666-666666666666";
    let directory = planted(15);
    let database = open(directory.path());
    let key = |build: &str| format!("shoal build {build} 1");
    for (id, name, key, label) in [
        (STEP, "step", key(BUILD), BUILD),
        (0xe1, "without its label", format!("{}0", key(BUILD)), "other"),
        (0xe2, "of no build", key("66666666-6666-6666-6666-666666666667"), BUILD),
        (0xe3, "plain", "mine".into(), BUILD),
    ] {
        let id: [u8; 16] = u128::to_be_bytes(id);
        let sql = "INSERT INTO sandboxes SELECT ?1, owner, ?2, template, image, cpu_millis, memory_bytes, pids, env, 'failed',
            'lost', goal, reason, ?3, request_digest, oom_kills, created_at, disk_bytes FROM sandboxes WHERE name = 'broken'";
        database.execute(sql, (id, name, key)).expect("a row");
        database.execute("INSERT INTO labels VALUES (?1, 'shoal.build', ?2)", (id, label)).expect("a label");
    }
    drop(database);
    let engine = World::in_directory(host().await, directory.path()).await;
    for id in [0xe1, 0xe2, 0xe3] {
        engine.get(&owner(), SandboxId::from_bits(id)).await.expect("it is the caller's");
    }
    let step = engine.get(&owner(), SandboxId::from_bits(STEP)).await;
    assert!(matches!(step, Err(EngineError::SandboxNotFound { .. })), "{step:?}");
    eventually("it goes with its build", async || {
        let rows = texts(&open(directory.path()), "SELECT name FROM sandboxes WHERE name = 'step'");
        rows.is_empty()
    })
    .await;
}
