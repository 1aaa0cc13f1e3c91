//! Output, stdin and results: exact over crashes, broken connections, slow readers and hostile inits.

use std::time::Duration;

use crate::common::*;
use bytes::Bytes;
use engine::*;
use proptest::prelude::*;
use runtime::fake::{FakeHost, FakeThing};
use shoal_engine as engine;
use wire::frame;
use wire::guest::{End, EndCause, ExitStatus, FromInit, Handle, OUTPUT_WINDOW, StartError, Stream};

#[tokio::test(flavor = "multi_thread")]
async fn every_byte_comes_once_over_crashes_in_the_middle_of_writing() {
    const LENGTH: u64 = 3_000_000;
    let mut world = World::with(FakeHost::new(), 16 << 20, roomy()).await;
    let sandbox = world.create().await.id;
    let script = format!("flood {}; gate on; flood {}; flooderr 5000; exit 4", LENGTH / 2, LENGTH / 2);
    for id in 0..5 {
        world.run_as(sandbox, &format!("c{id}"), &script).await;
    }
    // A reader that comes back after every crash with the offset it has reached.
    let mut read = Vec::new();
    for crash in 0..6 {
        let command = world.command(sandbox, "c0").await;
        let from = Offsets { stdout: read.len() as u64, stderr: 0 };
        let mut output = command.attach(from);
        for _ in 0..4 {
            match output.next().await.expect("it goes on") {
                OutputEvent::Bytes { stream: Stream::Stdout, offset, bytes } => {
                    assert_eq!(offset, read.len() as u64);
                    read.extend_from_slice(&bytes);
                }
                OutputEvent::Lost { .. } | OutputEvent::Stalled | OutputEvent::Ended(_) => {
                    panic!("not yet")
                }
                OutputEvent::Bytes { .. } | OutputEvent::Started { .. } | OutputEvent::StdinAck { .. } => {}
            }
        }
        if crash == 3 {
            world.host.open_gate("on");
        }
        drop(output);
        world = world.crash().await;
    }
    for id in 0..5 {
        let command = world.command(sandbox, &format!("c{id}")).await;
        let rest = read_all(command.attach(Offsets::default()), Offsets::default()).await;
        assert_eq!(rest.stdout, pattern(0, LENGTH), "c{id}");
        assert_eq!(rest.stderr, pattern(0, 5000), "c{id}");
        assert_eq!(outcome(&command.ended().await), Outcome::Exited(4));
        assert_eq!(world.host.starts(sandbox, Handle(id + 1)), 1, "it was started once");
    }
    assert_eq!(read, pattern(0, read.len() as u64));
    eventually("init forgot them", async || world.host.remembered(sandbox) == 0).await;
}

/// Init keeps a result until the daemon confirms that it is stored, so callers need not wait for the store.
#[tokio::test(flavor = "multi_thread")]
async fn an_end_is_told_before_it_is_stored_and_is_the_same_after_a_crash() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let command = world.run_as(sandbox, "c", "echo hello; gate on; exit 4").await;
    let database = world.directory.path().join("shoal.db");
    let other = rusqlite::Connection::open(database).expect("the database opens");
    other.execute_batch("BEGIN IMMEDIATE").expect("nobody else writes");
    world.host.open_gate("on");
    let ended = tokio::time::timeout(Duration::from_secs(60), command.ended()).await;
    assert_eq!(outcome(&ended.expect("a result although no row can be written")), Outcome::Exited(4));
    let read = read_all(command.attach(Offsets::default()), Offsets::default()).await;
    assert_eq!(outcome(&read.ended.expect("the stream ends as well")), Outcome::Exited(4));
    let page = world.engine.commands(&owner(), sandbox, CommandQuery::default()).await.expect("a page");
    assert_eq!(outcome(&page.items[0]), Outcome::Exited(4), "lists say the same");
    assert_eq!(world.host.remembered(sandbox), 1, "init was not told to forget it");
    drop(command);
    other.execute_batch("ROLLBACK").expect("others may write again");
    let world = world.crash().await;
    let ended = world.command(sandbox, "c").await.ended().await;
    assert_eq!(outcome(&ended), Outcome::Exited(4));
    assert_eq!(
        read_all(world.command(sandbox, "c").await.attach(Offsets::default()), Offsets::default())
            .await
            .stdout,
        b"hello\n"
    );
    eventually("init forgot it", async || world.host.remembered(sandbox) == 0).await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_comes_once_over_random_disconnects(
        seed in any::<u64>(), most in 2_000u64..400_000, length in 0u64..600_000, from in 0u64..700_000,
        crash in any::<bool>(),
    ) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.expect("a runtime").block_on(async move {
            let mut world = World::with(FakeHost::new(), 4 << 20, roomy()).await;
            let sandbox = world.create().await.id;
            world.host.break_connections(Some(most), seed);
            world.host.disconnect(sandbox);
            let script = format!("flood {length}; flooderr {}; exit 9", length / 3);
            for id in ["a", "b"] {
                world.run_as(sandbox, id, &script).await;
            }
            if crash {
                world = world.crash().await;
            }
            let offsets = Offsets { stdout: from, stderr: from / 2 };
            for id in ["a", "b"] {
                let command = world.command(sandbox, id).await;
                let whole = read_all(command.attach(Offsets::default()), Offsets::default());
                let part = read_all(command.attach(offsets), offsets);
                let (whole, part) = tokio::join!(whole, part);
                assert_eq!(whole.stdout, pattern(0, length));
                assert_eq!(whole.stderr, pattern(0, length / 3));
                let skip = (from as usize).min(whole.stdout.len());
                assert_eq!(part.stdout, whole.stdout[skip..]);
                assert_eq!((whole.lost, part.lost), (0, 0));
                assert_eq!(outcome(&command.ended().await), Outcome::Exited(9));
            }
            world.host.break_connections(None, 1);
            eventually("init forgot them", async || world.host.remembered(sandbox) == 0).await;
            assert_eq!((world.host.starts(sandbox, Handle(1)), world.host.starts(sandbox, Handle(2))), (1, 1));
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_reader_the_front_falls_off_and_that_is_reported() {
    const LENGTH: u64 = 3 << 20;
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let command = world.run(sandbox, &format!("flood {LENGTH}")).await;
    let ended = command.ended().await;
    assert_eq!(ended.stdout.end, LENGTH);
    let kept = ended.stdout.end - ended.stdout.start;
    assert!((KEPT / 2..=KEPT).contains(&kept), "{kept} bytes are kept");
    let read = read_all(command.attach(Offsets::default()), Offsets::default()).await;
    assert_eq!(read.lost, ended.stdout.start);
    assert_eq!(read.stdout, pattern(ended.stdout.start, kept));
    let gathered = command.output(usize::MAX).await.expect("it is kept");
    assert!(gathered.stdout_cut);
    assert_eq!(gathered.stdout, read.stdout);
    // A restart finds the same.
    let world = world.crash().await;
    let again = world.command(sandbox, ended.id.as_str()).await;
    assert_eq!(again.now().stdout, ended.stdout);
    let reread = read_all(again.attach(Offsets::default()), Offsets::default()).await;
    assert_eq!((reread.lost, reread.stdout), (read.lost, read.stdout));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attached_reader_loses_nothing_and_makes_the_command_wait() {
    const LENGTH: u64 = 8 << 20;
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let command = world.run(sandbox, &format!("gate on; flood {LENGTH}")).await;
    let output = command.attach(Offsets::default());
    world.host.open_gate("on");
    // Nothing is read until the command has been made to wait.
    let bound = KEPT + 2 * OUTPUT_WINDOW as u64;
    eventually("the command waits", async || {
        let span = command.now().stdout;
        world.host.unacknowledged(sandbox) == OUTPUT_WINDOW && span.end > KEPT
    })
    .await;
    // Another command of the same sandbox does not notice.
    assert_eq!(outcome(&world.run(sandbox, "echo quick").await.ended().await), Outcome::Exited(0));
    let span = command.now().stdout;
    assert!(span.start == 0 && span.end <= bound, "{span:?}");
    let read = read_all(output, Offsets::default()).await;
    assert_eq!((read.lost, read.stalled), (0, false));
    assert_eq!(read.stdout, pattern(0, LENGTH));
    assert!(command.now().stdout.start > 0, "the front fell off behind the reader");
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_does_not_move_is_let_go() {
    const LENGTH: u64 = 4 << 20;
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let command = world.run(sandbox, &format!("flood {LENGTH}")).await;
    let mut stuck = command.attach(Offsets::default());
    // Time passes only while nothing else happens, so this is the stall and no more.
    let ended = command.ended().await;
    assert_eq!(ended.stdout.end, LENGTH);
    let mut last = None;
    while let Some(event) = stuck.next().await {
        last = Some(event);
    }
    assert!(matches!(last, Some(OutputEvent::Stalled)), "{last:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn stdin_arrives_once_and_in_order_over_disconnects() {
    let world = World::with(FakeHost::new(), 4 << 20, roomy()).await;
    let sandbox = world.create().await.id;
    let spec = CommandSpec { stdin: true, ..script_of("cat") };
    let command = world.engine.run(&owner(), sandbox, spec).await.expect("it starts");
    let sent = pattern(0, 1_000_000);
    let writer = command.clone();
    let bytes = Bytes::from(sent.clone());
    let host = world.host.clone();
    let writing = tokio::spawn(async move {
        let mut at = 0;
        for (turn, chunk) in bytes.chunks(37_000).enumerate() {
            let chunk = bytes.slice_ref(chunk);
            at = writer.write_stdin(Some(at), chunk.clone()).await.expect("it is taken");
            // Said again, it is not written again.
            let again = writer.write_stdin(Some(at - chunk.len() as u64), chunk).await.expect("it is known");
            assert_eq!(again, at);
            if turn % 5 == 0 {
                host.disconnect(sandbox);
            }
        }
        writer.end_stdin().await.expect("init knows");
        writer.end_stdin().await.expect("asking twice is harmless");
    });
    let read = read_all(command.attach(Offsets::default()), Offsets::default()).await;
    writing.await.expect("no panic");
    assert_eq!(read.stdout, sent);
    let error = command.write_stdin(None, Bytes::from_static(b"x")).await.expect_err("it is over");
    assert!(matches!(error, EngineError::CommandEnded { .. }), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn stdin_goes_on_after_a_crash() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let spec = CommandSpec { id: Some("c".parse().expect("an id")), stdin: true, ..script_of("cat") };
    let command = world.engine.run(&owner(), sandbox, spec).await.expect("it starts");
    let mut output = command.attach(Offsets::default());
    assert_eq!(command.write_stdin(None, Bytes::from_static(b"before ")).await.expect("taken"), 7);
    loop {
        if let OutputEvent::StdinAck { offset: 7 } = output.next().await.expect("it goes on") {
            break;
        }
    }
    drop(output);
    let world = world.crash().await;
    let command = world.command(sandbox, "c").await;
    let error = command.write_stdin(Some(9), Bytes::from_static(b"x")).await.expect_err("a gap");
    assert!(matches!(error, EngineError::Invalid { .. }), "{error:?}");
    assert_eq!(command.write_stdin(Some(4), Bytes::from_static(b"re after")).await.expect("taken"), 12);
    command.end_stdin().await.expect("init knows");
    let read = read_all(command.attach(Offsets::default()), Offsets::default()).await;
    assert_eq!(read.stdout, b"before after");
}

#[tokio::test(start_paused = true)]
async fn stdin_that_nobody_reads_is_refused_in_the_end() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let spec = CommandSpec { stdin: true, ..script_of("hang") };
    let command = world.engine.run(&owner(), sandbox, spec).await.expect("it starts");
    let error =
        command.write_stdin(None, Bytes::from(vec![0; 300_000])).await.expect_err("the window is full");
    assert!(matches!(error, EngineError::StdinStalled { .. }), "{error:?}");
    let closed = world.run(sandbox, "hang").await;
    let error = closed.write_stdin(None, Bytes::from_static(b"x")).await.expect_err("it has no stdin");
    assert!(matches!(error, EngineError::StdinClosed { .. }), "{error:?}");
    let error = closed.resize(10, 10).await.expect_err("it has no terminal");
    assert!(matches!(error, EngineError::NoTerminal { .. }), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn results_say_how_it_ended() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let (kill, terminate) = (ExitStatus::Signal(9), ExitStatus::Signal(15));
    for (script, expected) in [
        ("exit 0", Outcome::Exited(0)),
        ("exit 137", Outcome::Exited(137)),
        ("signal 11", Outcome::Signaled(11)),
        ("signal 9", Outcome::Signaled(9)),
        ("oom", Outcome::OutOfMemory(kill)),
        ("signal 9", Outcome::Signaled(9)),
        ("missing", Outcome::FailedToStart(StartError::ProgramNotFound { program: "missing".into() })),
    ] {
        assert_eq!(outcome(&world.run(sandbox, script).await.ended().await), expected, "{script}");
    }
    let spec = CommandSpec { timeout: Some(Duration::from_millis(5)), ..script_of("hang") };
    let command = world.engine.run(&owner(), sandbox, spec).await.expect("it starts");
    assert_eq!(outcome(&command.ended().await), Outcome::TimedOut(terminate));
    let command = world.run(sandbox, "hang").await;
    command.kill().await.expect("init hears");
    assert_eq!(outcome(&command.ended().await), Outcome::Killed(kill));
    assert!(matches!(command.kill().await, Err(EngineError::CommandEnded { .. })));
    let command = world.run(sandbox, "hang").await;
    command.signal(Signal::parse("INT").expect("a signal")).await.expect("init hears");
    assert_eq!(outcome(&command.ended().await), Outcome::Signaled(2));
    // An out-of-memory that happened while nobody looked is not blamed on a later command.
    let world = world.crash().await;
    assert_eq!(outcome(&world.run(sandbox, "signal 9").await.ended().await), Outcome::Signaled(9));
    assert_eq!(outcome(&world.run(sandbox, "oom").await.ended().await), Outcome::OutOfMemory(kill));
}

/// The kernel counts per sandbox. What it counted before a command began is not the command's.
#[tokio::test(flavor = "multi_thread")]
async fn a_shortage_of_memory_is_not_blamed_on_what_began_after_it() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let run = async |world: &World, script: &str| outcome(&world.run(sandbox, script).await.ended().await);
    assert_eq!(run(&world, "oomchild; oomchild").await, Outcome::Exited(0), "its shell swallowed it");
    assert_eq!(run(&world, "exit 137").await, Outcome::Exited(137));
    assert_eq!(run(&world, "signal 9").await, Outcome::Signaled(9));
    let out_of_memory = Outcome::OutOfMemory(ExitStatus::Signal(9));
    assert_eq!(run(&world, "oom").await, out_of_memory);
    assert_eq!(run(&world, "signal 9").await, Outcome::Signaled(9));
    // At once: each has its own, also over a crash.
    run(&world, "oomchild").await;
    for name in ["a", "b"] {
        world.run_as(sandbox, name, "gate both; oom").await;
    }
    world.run_as(sandbox, "c", "gate last; exit 137").await;
    let world = world.crash().await;
    world.host.open_gate("both");
    for name in ["a", "b"] {
        assert_eq!(outcome(&world.command(sandbox, name).await.ended().await), out_of_memory, "{name}");
    }
    let world = world.crash().await;
    world.host.open_gate("last");
    assert_eq!(
        outcome(&world.command(sandbox, "c").await.ended().await),
        Outcome::Exited(137),
        "both are reported"
    );
    let d = world.run(sandbox, "gate d; exit 137").await;
    world.host.open_gate("d");
    assert_eq!(outcome(&d.ended().await), Outcome::Exited(137));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_id_is_one_command() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let spec = |script: &str| CommandSpec { id: Some("once".parse().expect("an id")), ..script_of(script) };
    let owner = owner();
    let (first, second) = tokio::join!(
        world.engine.run(&owner, sandbox, spec("gate on; echo hi")),
        world.engine.run(&owner, sandbox, spec("gate on; echo hi"))
    );
    let (first, second) = (first.expect("it starts"), second.expect("it is found"));
    let reused = |result: Result<CommandRef, EngineError>| match result {
        Err(EngineError::CommandIdReused { .. }) => {}
        Err(error) => panic!("{error:?}"),
        Ok(_) => panic!("another request was taken for the same"),
    };
    reused(world.engine.run(&owner, sandbox, spec("echo other")).await);
    world.host.open_gate("on");
    assert_eq!(
        (outcome(&first.ended().await), outcome(&second.ended().await)),
        (Outcome::Exited(0), Outcome::Exited(0))
    );
    // The same when it is over, and after a restart.
    let third = world.engine.run(&owner, sandbox, spec("gate on; echo hi")).await.expect("it is found");
    assert_eq!(third.output(100).await.expect("it is kept").stdout, b"hi\n");
    let world = world.crash().await;
    let fourth = world.engine.run(&owner, sandbox, spec("gate on; echo hi")).await.expect("it is found");
    assert_eq!(outcome(&fourth.now()), Outcome::Exited(0));
    reused(world.engine.run(&owner, sandbox, spec("echo other")).await);
    assert_eq!(world.host.starts(sandbox, Handle(1)), 1);
    // In another sandbox the id is free.
    let other = world.create().await.id;
    world.engine.run(&owner, other, spec("echo other")).await.expect("it starts");
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_are_listed_oldest_first_in_pages() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    for id in 0..5 {
        world.run_as(sandbox, &format!("c{id}"), if id == 3 { "hang" } else { "exit 1" }).await;
    }
    eventually("four are over", async || world.host.remembered(sandbox) == 1).await;
    for world in [&world] {
        let mut seen = Vec::new();
        let mut cursor = None;
        loop {
            let query = CommandQuery { limit: Some(2), cursor };
            let page = world.engine.commands(&owner(), sandbox, query).await.expect("a page");
            seen.extend(page.items.into_iter().map(|command| (command.id.to_string(), command.state)));
            cursor = page.next_cursor;
            if cursor.is_none() {
                break;
            }
        }
        let ids: Vec<_> = seen.iter().map(|(id, _)| id.as_str()).collect();
        assert_eq!(ids, ["c0", "c1", "c2", "c3", "c4"]);
        assert!(matches!(seen[3].1, CommandState::Running { .. }));
        assert!(matches!(seen[4].1, CommandState::Ended { outcome: Outcome::Exited(1), .. }));
    }
    let unknown = "nope".parse().expect("an id");
    let error = world.engine.command(&owner(), sandbox, &unknown).await.err();
    assert!(matches!(error, Some(EngineError::CommandNotFound { .. })), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_cannot_be_are_refused_before_a_row_is_written() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    // Each part alone is within its bounds; the types of a request let nothing else through.
    let env = [("A".to_owned(), "x".repeat(15 << 20))].into();
    let huge = CommandSpec {
        env: CommandEnv::new(env).expect("an environment"),
        ..script_of(&"x".repeat(15 << 20))
    };
    for (field, spec) in [(Field::Argv, CommandSpec::new(Program::Default)), (Field::Command, huge)] {
        let error = world.engine.run(&owner(), sandbox, spec).await.err();
        assert!(
            matches!(&error, Some(EngineError::Invalid { field: found, .. }) if *found == field),
            "{error:?}"
        );
    }
    let page = world.engine.commands(&owner(), sandbox, CommandQuery::default()).await.expect("a page");
    assert_eq!(page.items.len(), 0);
    let command = world.run(sandbox, "true").await.now();
    let names: Vec<_> = command.start.env.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["LANG", "PATH"]);
}

/// What a hostile init says, and that a single time is survived while going on like this is not.
async fn check_hostile(what: &str, hostile: impl Fn(&FakeHost, wire::SandboxId, Handle)) {
    let world = World::new().await;
    let (bad, good) = (world.create().await.id, world.create().await.id);
    let command = world.run(bad, "echo mine; hang").await;
    hostile(&world.host, bad, command.now().start.handle);
    world.host.disconnect(bad);
    eventually("the sandbox has failed", async || {
        matches!(
            world.engine.get(&owner(), bad).await.expect("known").state,
            State::Failed { disk: Disk::Whole }
        )
    })
    .await;
    let reason = world.engine.get(&owner(), bad).await.expect("known").reason.expect("a reason");
    assert!(reason.contains("protocol") || reason.contains("version"), "{what}: {reason}");
    assert_eq!(outcome(&command.ended().await), Outcome::SandboxGone, "{what}");
    eventually("nothing of it is left but its disk", async || {
        let left = world.host.leftovers().into_iter().filter(|(id, _)| *id == bad);
        left.map(|(_, thing)| thing).eq([FakeThing::Disk])
    })
    .await;
    assert_eq!(outcome(&world.run(good, "echo hi").await.ended().await), Outcome::Exited(0), "{what}");
    world.engine.delete(&owner(), bad).await.expect("it goes");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_init_that_breaks_the_rules_harms_only_its_sandbox() {
    let message = |message: FromInit| {
        let mut bytes = Vec::new();
        frame::put_message(&message, &mut bytes);
        bytes
    };
    let data = |handle, stream, offset, length: usize| {
        let mut bytes = frame::data_header(handle, stream, offset, length).to_vec();
        bytes.resize(bytes.len() + length, b'x');
        bytes
    };
    let ended = |handle, stdout_end| {
        let end = End { status: ExitStatus::Code(0), cause: EndCause::Itself };
        message(FromInit::Ended { handle, end, stdout_end, stderr_end: 0 })
    };
    check_hostile("rubbish", |host, id, _| host.say(id, vec![0xff; 64])).await;
    check_hostile("a gap", |host, id, handle| host.say(id, data(handle, Stream::Stdout, 1000, 1))).await;
    check_hostile("an offset at the end of all numbers", |host, id, handle| {
        host.say(id, data(handle, Stream::Stdout, u64::MAX - 1, 4));
    })
    .await;
    check_hostile("stdin", |host, id, handle| host.say(id, data(handle, Stream::Stdin, 0, 1))).await;
    check_hostile("an unknown command", |host, id, _| host.say(id, ended(Handle(99), 0))).await;
    check_hostile("handle 0", |host, id, _| host.say(id, ended(Handle(0), 0))).await;
    check_hostile("an end far away", |host, id, handle| host.say(id, ended(handle, u64::MAX))).await;
    check_hostile("an end behind", |host, id, handle| host.say(id, ended(handle, 1))).await;
    check_hostile("another pid", |host, id, handle| {
        host.say(id, message(FromInit::Started { handle, pid: 77 }));
    })
    .await;
    check_hostile("stdin that was not sent", |host, id, handle| {
        host.say(id, message(FromInit::StdinAck { handle, offset: 5 }));
    })
    .await;
    check_hostile("a pong", |host, id, _| host.say(id, message(FromInit::Pong { serial: 1 << 40 }))).await;
    check_hostile("a second hello", |host, id, _| host.say(id, message(FromInit::Hello { version: 1 })))
        .await;
    check_hostile("a command named twice", |host, id, handle| host.claim(id, vec![handle.0])).await;
    check_hostile("an unknown command is known", |host, id, _| host.claim(id, vec![50])).await;
    check_hostile("no common version", |host, id, _| {
        host.say(id, message(FromInit::NoCommonVersion { version_min: 700, version_max: 701 }));
    })
    .await;
    check_hostile("no common version, where there is one", |host, id, _| {
        host.say(id, message(FromInit::NoCommonVersion { version_min: 1, version_max: 2 }));
    })
    .await;
    check_hostile("too many", |host, id, _| host.claim(id, (100..100 + 3000).collect())).await;
    check_hostile("more than the window", |host, id, handle| {
        let mut bytes = Vec::new();
        for at in 0..40 {
            bytes.extend(data(handle, Stream::Stderr, at * 64 * 1024, 64 * 1024));
        }
        // Acknowledged while it is read it would be allowed; said at once it may not be. The end does it surely.
        bytes.extend(ended(handle, 0));
        host.say(id, bytes);
    })
    .await;
}

/// After a restart the daemon must believe init about stdin. There are limits to that.
#[tokio::test(flavor = "multi_thread")]
async fn an_init_that_claims_more_stdin_than_there_can_be_is_not_believed() {
    for taken in [u64::MAX, u64::MAX - 5, 1 << 61] {
        let world = World::new().await;
        let sandbox = world.create().await.id;
        let spec = CommandSpec { id: Some("c".parse().expect("an id")), stdin: true, ..script_of("cat") };
        world.engine.run(&owner(), sandbox, spec).await.expect("it starts");
        world.host.claim_stdin(sandbox, taken);
        let world = world.crash().await;
        eventually("the sandbox has failed", async || {
            let state = world.engine.get(&owner(), sandbox).await.expect("known").state;
            state == State::Failed { disk: Disk::Whole }
        })
        .await;
        let reason = world.engine.get(&owner(), sandbox).await.expect("known").reason.expect("a reason");
        assert!(reason.contains("protocol"), "{taken}: {reason}");
    }
}

/// `kill -9` between the row of an old command and its files.
#[tokio::test(flavor = "multi_thread")]
async fn output_of_commands_that_were_dropped_goes_with_the_next_start() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let kept = world.run_as(sandbox, "kept", "flood 100000").await.ended().await;
    let output = world.directory.path().join("output").join(sandbox.to_string());
    let kept = output.join(kept.start.handle.0.to_string());
    assert!(kept.is_dir());
    let dropped = output.join("4000000");
    std::fs::create_dir(&dropped).expect("a directory");
    std::fs::write(dropped.join("stdout.0"), "old").expect("a file");
    let world = world.crash().await;
    eventually("it is gone", async || !dropped.exists()).await;
    assert!(kept.is_dir());
    let read = read_all(world.command(sandbox, "kept").await.attach(Offsets::default()), Offsets::default());
    assert_eq!(read.await.stdout, pattern(0, 100_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_with_many_writing_commands_is_quick() {
    const SANDBOXES: usize = 50;
    let mut world = World::new().await;
    let mut ids = Vec::new();
    for _ in 0..SANDBOXES {
        let id = world.create().await.id;
        for command in 0..5 {
            world.run_as(id, &format!("c{command}"), "flood 5000; gate on; flood 5000").await;
        }
        ids.push(id);
    }
    let begun = std::time::Instant::now();
    world = world.crash().await;
    // All sandboxes answer again.
    for id in &ids {
        world.run(*id, "true").await.ended().await;
    }
    let took = begun.elapsed();
    world.host.open_gate("on");
    for id in &ids {
        for command in 0..5 {
            let command = world.command(*id, &format!("c{command}")).await;
            let read = read_all(command.attach(Offsets::default()), Offsets::default()).await;
            assert_eq!(read.stdout, pattern(0, 10_000));
        }
    }
    eprintln!("{SANDBOXES} sandboxes with 5 commands each answered after {took:?}");
    assert!(took < Duration::from_secs(10), "{took:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn old_commands_fall_off_when_their_output_is_too_much() {
    // 16 full streams of 64 KiB are kept.
    let world = World::with(FakeHost::new(), 64 * 1024, roomy()).await;
    let sandbox = world.create().await.id;
    for id in 0..90 {
        world.run_as(sandbox, &format!("c{id}"), "flood 60000").await.ended().await;
    }
    let output = world.directory.path().join("output").join(sandbox.to_string());
    eventually("old logs are gone", async || {
        std::fs::read_dir(&output).expect("a directory").count() <= 17 && !output.join("1").exists()
    })
    .await;
    // The command is still known, and says that its output is gone.
    let old = world.command(sandbox, "c0").await.output(100_000).await.expect("it is known");
    assert_eq!((old.stdout.len(), old.stdout_cut), (0, true));
    assert_eq!(world.command(sandbox, "c89").await.output(100_000).await.expect("kept").stdout.len(), 60_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn output_waits_for_a_disk_that_refuses() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    // A file where the directory of logs should be: nothing can be written beneath it.
    let output = world.directory.path().join("output");
    std::fs::write(&output, b"in the way").expect("written");
    let command = world.run(sandbox, "flood 200000; exit 5").await;
    let mut reading = command.attach(Offsets::default());
    let mut got = 0;
    while got < 200_000 {
        if let Some(OutputEvent::Bytes { bytes, .. }) = reading.next().await {
            got += bytes.len();
        }
    }
    // Everything came, and none of it is stored: init may forget nothing, and the command is not over.
    assert_eq!(world.host.unacknowledged(sandbox), 200_000);
    assert!(matches!(command.now().state, CommandState::Running { .. }));
    let quick = world.run(sandbox, "echo short").await.ended().await;
    assert_eq!(outcome(&quick), Outcome::Exited(0));
    std::fs::remove_file(&output).expect("removed");
    assert_eq!(outcome(&command.ended().await), Outcome::Exited(5));
    assert_eq!(command.output(usize::MAX).await.expect("it is kept").stdout, pattern(0, 200_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_commands_hold_no_descriptors() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let output = world.directory.path().join("output");
    let open = || {
        let links = std::fs::read_dir("/proc/self/fd").expect("a list of descriptors");
        let targets = links.filter_map(|link| std::fs::read_link(link.ok()?.path()).ok());
        targets.filter(|target| target.starts_with(&output)).count()
    };
    for _ in 0..200 {
        world.run(sandbox, "flood 10000; hang").await;
    }
    eventually("all of it is stored", async || world.host.unacknowledged(sandbox) == 0).await;
    eventually("no log is open", async || open() == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stdin_that_init_holds_is_not_lost_by_a_crash() {
    let world = World::new().await;
    let sandbox = world.create().await.id;
    let spec =
        CommandSpec { id: Some("c".parse().expect("an id")), stdin: true, ..script_of("gate on; cat") };
    let command = world.engine.run(&owner(), sandbox, spec).await.expect("it starts");
    // The command reads nothing yet, so all of it waits in init.
    let (before, after) = (pattern(0, 150_000), pattern(150_000, 200_000));
    assert_eq!(command.write_stdin(None, Bytes::from(before)).await.expect("taken"), 150_000);
    eventually("init holds it", async || world.host.stdin_held(sandbox) == 150_000).await;
    let world = world.crash().await;
    let command = world.command(sandbox, "c").await;
    let writer = command.clone();
    let writing = tokio::spawn(async move {
        let length = writer.write_stdin(None, Bytes::from(after)).await.expect("taken");
        writer.end_stdin().await.expect("init knows");
        length
    });
    let output = command.attach(Offsets::default());
    world.host.open_gate("on");
    let read = read_all(output, Offsets::default()).await;
    assert_eq!(writing.await.expect("no panic"), 350_000);
    assert_eq!(read.stdout, pattern(0, 350_000));
}
