//! File operations on the fake host: exact bytes, callers that leave, connections that break, daemons that die.

use crate::common::{World, eventually, owner, pattern};
use bytes::Bytes;
use engine::{EngineError, Files};
use runtime::fake::FakeHost;
use shoal_engine as engine;
use wire::SandboxId;
use wire::files::{ByteRange, Condition, Edit, FileErrorKind, LineEnds, Links, WriteOptions};
use wire::guest::Versions;

fn files(world: &World, sandbox: SandboxId) -> Files {
    world.engine.files(&owner(), sandbox, None).expect("the sandbox is there")
}

fn options(path: &str) -> WriteOptions {
    WriteOptions { path: path.into(), mode: None, parents: true, size: None, condition: Condition::None }
}

async fn read(files: &Files, size: u64) -> Result<Vec<u8>, EngineError> {
    let mut reading = files.read(format!("/flood/{size}").as_bytes(), ByteRange::Whole).await?;
    assert_eq!(reading.opened().length, Some(size));
    let mut all = Vec::new();
    while let Some(bytes) = reading.next().await? {
        all.extend_from_slice(&bytes);
    }
    Ok(all)
}

async fn write(files: &Files, size: u64) -> Result<(), EngineError> {
    let mut writing = files.write(options(&format!("/flood/{size}"))).await?;
    let mut at = 0;
    while at < size {
        let length = (size - at).min(100_000);
        writing.write(Bytes::from(pattern(at, length))).await?;
        at += length;
    }
    writing.finish().await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_go_both_ways_as_they_are() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let files = files(&world, sandbox);
    for size in [0, 1, 65_536, 3_000_000] {
        assert!(read(&files, size).await.expect("it is read") == pattern(0, size), "{size} bytes");
        write(&files, size).await.expect("it is written");
    }
    let stat = files.stat(b"/flood/5", Links::Keep).await.expect("it is there");
    assert_eq!(stat.size, 5);
    let missing = files.stat(b"/missing", Links::Keep).await;
    assert!(matches!(missing, Err(EngineError::File { source }) if source.kind == FileErrorKind::NotFound));
    eventually("init has forgotten them all", async || world.host.remembered(sandbox) == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn paths_that_no_kernel_takes_are_refused_here() {
    let world = World::new().await;
    let files = files(&world, world.create().await.id);
    for path in [&b"relative"[..], b"", b"/nul\0", &[b'/'; 5000]] {
        let refused = files.stat(path, Links::Keep).await;
        assert!(
            matches!(refused, Err(EngineError::File { source }) if source.kind == FileErrorKind::InvalidPath)
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_leaves_ends_the_operation() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let files = files(&world, sandbox);
    // In the middle of a read, with a window that is full; of a write; and of something that never answers.
    let mut reading = files.read(b"/flood/100000000", ByteRange::Whole).await.expect("it is read");
    reading.next().await.expect("it comes").expect("there is more");
    let mut writing = files.write(options("/flood/100000000")).await.expect("it is written");
    writing.write(Bytes::from(pattern(0, 200_000))).await.expect("it is taken");
    let hanging =
        tokio::time::timeout(std::time::Duration::from_millis(50), files.stat(b"/hang", Links::Keep)).await;
    assert!(hanging.is_err());
    assert!(world.host.remembered(sandbox) >= 2);
    drop((reading, writing));
    eventually("init has forgotten them all", async || world.host.remembered(sandbox) == 0).await;
    assert_eq!(files.stat(b"/flood/1", Links::Keep).await.expect("others go on").size, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_takes_nothing_holds_up_nobody_and_little_memory() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let files = files(&world, sandbox);
    let slow = files.read(b"/flood/100000000", ByteRange::Whole).await.expect("it is read");
    assert!(read(&files, 2_000_000).await.expect("it is read") == pattern(0, 2_000_000));
    assert!(world.host.unacknowledged(sandbox) <= wire::guest::OUTPUT_WINDOW);
    drop(slow);
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_break_at_any_byte_lose_nothing() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    world.host.break_connections(Some(300_000), 7);
    world.host.disconnect(sandbox);
    let files = files(&world, sandbox);
    for _ in 0..3 {
        assert!(read(&files, 2_000_000).await.expect("it is read") == pattern(0, 2_000_000));
        write(&files, 2_000_000).await.expect("it is written");
    }
    world.host.break_connections(None, 7);
    eventually("init has forgotten them all", async || world.host.remembered(sandbox) == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_daemon_ends_what_it_does_not_know() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let before = files(&world, sandbox);
    let mut reading = before.read(b"/flood/100000000", ByteRange::Whole).await.expect("it is read");
    reading.next().await.expect("it comes").expect("there is more");
    let writing = before.write(options("/flood/1000")).await.expect("it is written");
    let command = world.run_as(sandbox, "kept", "gate door; echo done").await;
    assert!(world.host.remembered(sandbox) >= 3);
    // As a crash: nobody says goodbye.
    std::mem::forget((reading, writing, before, command));
    let world = world.crash().await;
    let after = files(&world, sandbox);
    assert!(read(&after, 100_000).await.expect("it is read") == pattern(0, 100_000));
    eventually("only the command is left", async || world.host.remembered(sandbox) == 1).await;
    world.host.open_gate("door");
    world.command(sandbox, "kept").await.ended().await;
    assert_eq!(world.engine.get(&owner(), sandbox).await.expect("it is there").state.word(), "running");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_init_of_the_version_before_is_not_asked() {
    let host = FakeHost::new();
    host.speak(Versions { min: 1, max: 1 });
    let world = World::on(host).await;
    let sandbox = world.create().await.id;
    let refused = files(&world, sandbox).stat(b"/flood/1", Links::Keep).await;
    assert!(matches!(refused, Err(EngineError::InitTooOld { version: 1, .. })), "{refused:?}");
    let command = world.run(sandbox, "echo still").await;
    command.ended().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_init_without_edits_is_asked_for_all_else() {
    let host = FakeHost::new();
    host.speak(Versions { min: 1, max: 2 });
    let world = World::on(host).await;
    let sandbox = world.create().await.id;
    let files = files(&world, sandbox);
    let edit = Edit {
        path: b"/flood/1".to_vec(),
        old: "a".into(),
        new: "b".into(),
        all: false,
        line_ends: LineEnds::Exact,
        condition: Condition::None,
    };
    let refused = files.edit(edit).await;
    assert!(matches!(refused, Err(EngineError::InitTooOld { version: 2, .. })), "{refused:?}");
    files.stat(b"/flood/1", Links::Keep).await.expect("it is asked");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_goes_ends_its_transfers() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let files = files(&world, sandbox);
    let mut reading = files.read(b"/flood/100000000", ByteRange::Whole).await.expect("it is read");
    let hanging = tokio::spawn({
        let engine = world.engine.clone();
        async move {
            let files = engine.files(&owner(), sandbox, None).expect("it is there");
            files.stat(b"/hang", Links::Keep).await
        }
    });
    eventually("both are under way", async || world.host.remembered(sandbox) == 2).await;
    world.engine.delete(&owner(), sandbox).await.expect("it is deleted");
    assert!(hanging.await.expect("no panic").is_err());
    let mut came = 0;
    let end = loop {
        match reading.next().await {
            Ok(Some(bytes)) => came += bytes.len(),
            end => break end,
        }
    };
    assert!(end.is_err() && came < 100_000_000, "it was cut off, and says so");
    assert!(files.stat(b"/flood/1", Links::Keep).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_init_that_claims_operations_does_no_harm() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    world.host.claim(sandbox, vec![u32::MAX, 1 << 31, (1 << 31) + 1]);
    world.host.disconnect(sandbox);
    // Answered on the new connection, on which they were claimed.
    world.run(sandbox, "true").await.ended().await;
    let files = files(&world, sandbox);
    assert!(read(&files, 1000).await.expect("others go on") == pattern(0, 1000));
    assert_eq!(world.engine.get(&owner(), sandbox).await.expect("it is there").state.word(), "running");
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_takes_nothing_for_too_long_is_let_go() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let files = files(&world, sandbox);
    let mut reading = files.read(b"/flood/100000000", ByteRange::Whole).await.expect("it is read");
    reading.next().await.expect("it comes").expect("there is more");
    tokio::time::sleep(std::time::Duration::from_secs(engine::TAKE_SECONDS * 2 + 1)).await;
    eventually("init has forgotten it", async || world.host.remembered(sandbox) == 0).await;
    let end = reading.next().await;
    assert!(matches!(end, Err(EngineError::FileStalled)), "{end:?}");
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_never_answers_is_not_waited_for() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let files = files(&world, sandbox);
    let stat = files.stat(b"/hang", Links::Keep).await;
    assert!(matches!(stat, Err(EngineError::Unresponsive { .. })), "{stat:?}");
    let mut writing = files.write(options("/hang")).await.expect("it begins");
    let full = loop {
        if let Err(error) = writing.write(Bytes::from_static(&[7; 65_536])).await {
            break error;
        }
    };
    assert!(matches!(full, EngineError::Unresponsive { .. }), "{full:?}");
    drop(writing);
    eventually("init has forgotten them", async || world.host.remembered(sandbox) == 0).await;
}
