//! The rules of the protocol between daemon and init. Both inits must pass them: the real one, and the fake one that
//! the engine's tests use, so that the two do not drift apart.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use runtime::fake::{FakeHost, Violation, pattern};
use runtime::{Isolation, Spec};
use wire::SandboxId;
use wire::files::{FileOp, Links};
use wire::frame::{CHUNK_MAX, data_header, put_message};
use wire::guest::{
    COMMANDS_MAX, EndCause, ExitStatus, FromInit, Handle, OUTPUT_WINDOW, Program, STDIN_WINDOW, Start,
    StartError, Stream, TerminalSize, ToInit, VERSION, VERSION_MIN,
};
use wire::launch::{Limits, Rootfs};

use crate::support::{Client, Event, Guest, Known, Mode, Outcome, Random, argv, shell};

/// What a command of this suite does, in the language of the init under test.
enum Work {
    /// Writes a line to stdout, one to stderr if there is any, and exits with this code.
    Say { stdout: &'static str, stderr: &'static str, code: i32 },
    /// Writes this many bytes to stdout.
    Flood(u64),
    /// Copies stdin to stdout.
    Cat,
    /// Does nothing until it is ended.
    Hang,
    /// Cannot start.
    Wrong,
}

const HI: Work = Work::Say { stdout: "hi", stderr: "", code: 0 };
const ENDLESS: Work = Work::Flood(u64::MAX);

/// An init under test.
trait UnderTest {
    /// A connection without a hello.
    fn connect_silently(&self) -> Client;

    fn start_of(&self, handle: u32, work: Work) -> Start;

    /// The byte of a flood at this offset.
    fn flood_byte(&self, offset: u64) -> u8;

    /// How many bytes of output may overtake an answer while `streams` of them flood.
    fn overtaken_max(&self, streams: usize) -> usize;

    fn connect_knowing(&self) -> (Client, Vec<Known>) {
        self.connect_silently().greet()
    }

    fn connect(&self) -> Client {
        self.connect_knowing().0
    }
}

impl UnderTest for Guest {
    /// Init reads between two writes, so an answer waits only for what the kernel has accepted.
    fn overtaken_max(&self, _: usize) -> usize {
        OUTPUT_WINDOW
    }

    fn connect_silently(&self) -> Client {
        self.connect_silently()
    }

    fn start_of(&self, handle: u32, work: Work) -> Start {
        match work {
            Work::Say { stdout, stderr: "", code } => shell(handle, &format!("echo {stdout}; exit {code}")),
            Work::Say { stdout, stderr, code } => {
                shell(handle, &format!("echo {stdout}; echo {stderr} >&2; exit {code}"))
            }
            Work::Flood(length) => argv(handle, &["head", "-c", &length.to_string(), "/dev/zero"]),
            Work::Cat => argv(handle, &["cat"]),
            Work::Hang => argv(handle, &["sleep", "1000000"]),
            // Costs no process.
            Work::Wrong => Start { user: Some("?".into()), ..argv(handle, &["true"]) },
        }
    }

    fn flood_byte(&self, _: u64) -> u8 {
        0
    }
}

/// A fake init on a machine of its own, behind a real socket.
struct Fake {
    runtime: tokio::runtime::Runtime,
    host: FakeHost,
    sandbox: SandboxId,
}

impl Fake {
    fn start() -> Self {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let (host, sandbox) = (FakeHost::new(), SandboxId::from_random(1));
        let limits = Limits { cpu_millis: 1000, memory_bytes: 1 << 30, pids: 100, disk_bytes: None };
        let (over, writable) = Default::default();
        let spec = Spec { sandbox, rootfs: Rootfs::Host, limits, mounts: Vec::new(), over, writable };
        runtime.block_on(host.launch(&spec)).expect("nothing was made to fail");
        Self { runtime, host, sandbox }
    }
}

impl UnderTest for Fake {
    /// A task carries the fake's bytes, at times that the scheduler chooses. Only the windows of the streams limit it.
    fn overtaken_max(&self, streams: usize) -> usize {
        streams * OUTPUT_WINDOW + 1
    }

    fn connect_silently(&self) -> Client {
        let mut init = self.runtime.block_on(self.host.connect(self.sandbox)).expect("it lives");
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        theirs.set_nonblocking(true).expect("it can be set");
        self.runtime.spawn(async move {
            let mut theirs = tokio::net::UnixStream::from_std(theirs).expect("it is a socket");
            // Ends when either side ends, as one socket would.
            let _ = tokio::io::copy_bidirectional(&mut theirs, &mut init).await;
        });
        Client::new(ours)
    }

    fn start_of(&self, handle: u32, work: Work) -> Start {
        let script = match work {
            Work::Say { stdout, stderr: "", code } => format!("echo {stdout}; exit {code}"),
            Work::Say { stdout, stderr, code } => format!("echo {stdout}; err {stderr}; exit {code}"),
            Work::Flood(length) => format!("flood {length}"),
            Work::Cat => "cat".into(),
            Work::Hang => "hang".into(),
            Work::Wrong => "missing".into(),
        };
        Start::shell(Handle(handle), &format!("test-{handle}"), &script)
    }

    fn flood_byte(&self, offset: u64) -> u8 {
        pattern(offset)
    }
}

/// Makes each rule a test of both inits.
macro_rules! rules {
    ($($rule:ident),* $(,)?) => {
        mod real {
            use super::{Guest, Mode};
            $(#[test] fn $rule() { super::$rule(&Guest::start(Mode::Walk)); })*
        }

        mod fake {
            $(#[test] fn $rule() { super::$rule(&super::Fake::start()); })*
        }
    };
}

rules![
    nothing_is_said_before_the_hello,
    whatever_comes_before_the_hello_ends_the_connection,
    versions_are_agreed_on_or_the_connection_ends,
    what_the_version_agreed_on_does_not_know_ends_the_connection,
    a_new_connection_replaces_one_that_stopped_in_the_middle_of_a_frame,
    rubbish_ends_the_connection,
    acknowledgements_of_what_was_never_sent_end_the_connection,
    of_commands_that_nobody_knows_nothing_is_said,
    exit_codes_and_both_streams_are_exact,
    a_start_that_is_repeated_starts_once,
    a_repeated_start_on_a_new_connection_asks_for_the_output,
    a_failed_start_is_a_result_that_waits_to_be_acknowledged,
    there_is_a_bound_on_commands,
    commands_end_by_signals_kills_and_timeouts,
    a_daemon_that_is_away_misses_nothing,
    nothing_of_a_command_is_sent_before_the_daemon_asks_for_it,
    what_was_acknowledged_is_not_sent_again,
    a_second_resume_is_no_more_than_an_acknowledgement,
    a_full_window_blocks_its_own_writer_and_nobody_else,
    a_flood_does_not_keep_messages_waiting,
    every_byte_arrives_once_over_any_number_of_reconnects,
    stdin_is_carried_exactly_and_ends_where_the_daemon_says,
    stdin_that_was_not_asked_for_is_refused_once,
    stdin_after_its_end_is_refused,
    stdin_that_waits_in_init_is_not_given_twice,
    stdin_beyond_the_rules_costs_the_connection_and_nothing_else,
];

#[test]
fn the_fake_remembers_which_rule_the_daemon_broke() {
    let fake = Fake::start();
    let mut client = fake.connect();
    client.send(&ToInit::Signal { handle: Handle(1), signal: 65 });
    client.until_dropped();
    assert_eq!(fake.host.violations(fake.sandbox), [Violation::BadSignal(65)]);
}

fn nothing_is_said_before_the_hello(init: &dyn UnderTest) {
    let mut first = init.connect();
    first.start(init.start_of(1, ENDLESS));
    assert!(matches!(first.message(), FromInit::Started { .. }));
    // The flood is running; a silent new connection gets none of it, and the next one gets its hello first.
    let mut silent = init.connect_silently();
    first.until_dropped();
    silent.stream.set_nonblocking(true).expect("it can be set");
    let nothing = silent.stream.read(&mut [0]).expect_err("nothing to read");
    assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock);
    let (_, known) = init.connect_knowing();
    assert_eq!(known.len(), 1);
}

fn whatever_comes_before_the_hello_ends_the_connection(init: &dyn UnderTest) {
    for message in [
        ToInit::Ping { serial: 1 },
        ToInit::Kill { handle: Handle(1) },
        ToInit::Start(Box::new(init.start_of(1, Work::Hang))),
    ] {
        let mut client = init.connect_silently();
        client.send(&message);
        client.until_dropped();
    }
    let mut client = init.connect();
    client.send(&ToInit::Hello { version_min: VERSION, version_max: VERSION });
    client.until_dropped();
    assert_eq!(init.connect_knowing().1, []);
}

fn versions_are_agreed_on_or_the_connection_ends(init: &dyn UnderTest) {
    let mut newer = init.connect_silently();
    newer.send(&ToInit::Hello { version_min: VERSION, version_max: VERSION + 7 });
    assert_eq!(newer.message(), FromInit::Hello { version: VERSION });
    for (version_min, version_max) in [(VERSION + 1, VERSION + 2), (0, VERSION_MIN - 1), (5, 4)] {
        let mut client = init.connect_silently();
        client.send(&ToInit::Hello { version_min, version_max });
        let expected = FromInit::NoCommonVersion { version_min: VERSION_MIN, version_max: VERSION };
        assert_eq!(client.message(), expected);
        client.until_dropped();
    }
}

fn what_the_version_agreed_on_does_not_know_ends_the_connection(init: &dyn UnderTest) {
    let before = wire::files::VERSION_WITH_FILES - 1;
    let mut client = init.connect_silently();
    client.send(&ToInit::Hello { version_min: before, version_max: before });
    assert_eq!(client.message(), FromInit::Hello { version: before });
    assert_eq!(client.message(), FromInit::KnownEnd);
    let operation = FileOp::Stat { path: b"/".to_vec(), links: Links::Follow };
    client.start(Start { program: Program::Files(Box::new(operation)), ..init.start_of(1, HI) });
    client.until_dropped();
    assert_eq!(init.connect_knowing().1, []);
}

fn a_new_connection_replaces_one_that_stopped_in_the_middle_of_a_frame(init: &dyn UnderTest) {
    let mut bytes = Vec::new();
    put_message(&ToInit::Start(Box::new(shell(1, &"x".repeat(200_000)))), &mut bytes);
    for length in [1, 4, 5, 6, 1000, 65_600, 150_000] {
        let mut client = init.connect();
        client.stream.write_all(&bytes[..length]).expect("init reads");
        let mut next = init.connect();
        next.run(init.start_of(100 + length as u32, HI)).assert_printed("hi\n");
        next.sync();
    }
    assert_eq!(init.connect_knowing().1, []);
}

fn rubbish_ends_the_connection(init: &dyn UnderTest) {
    for rubbish in [&[0xff; 64][..], &[0; 64][..]] {
        let mut client = init.connect();
        // Init may have dropped the connection before it has read everything.
        let _ = client.stream.write_all(rubbish);
        client.until_dropped();
    }
    init.connect().sync();
}

fn acknowledgements_of_what_was_never_sent_end_the_connection(init: &dyn UnderTest) {
    let mut client = init.connect();
    client.start(init.start_of(1, Work::Hang));
    client.sync();
    let resume = ToInit::Resume { handle: Handle(1), stdout: 0, stderr: 0 };
    for message in [
        ToInit::Ack { handle: Handle(1), stream: Stream::Stdout, offset: 4 },
        ToInit::Ack { handle: Handle(1), stream: Stream::Stderr, offset: u64::MAX },
        ToInit::Ack { handle: Handle(1), stream: Stream::Stdin, offset: 0 },
        ToInit::Resume { handle: Handle(1), stdout: 100, stderr: 0 },
        ToInit::AckResult { handle: Handle(1) },
        ToInit::Signal { handle: Handle(1), signal: 0 },
        ToInit::Signal { handle: Handle(1), signal: 65 },
        ToInit::Signal { handle: Handle(1), signal: -9 },
    ] {
        let mut client = init.connect();
        client.send(&resume);
        client.send(&message);
        client.until_dropped();
    }
    let mut client = init.connect();
    client.send(&ToInit::Resume { handle: Handle(1), stdout: 0, stderr: 1 });
    client.until_dropped();
    assert_eq!(init.connect_knowing().1.len(), 1, "the command is still there");
}

fn of_commands_that_nobody_knows_nothing_is_said(init: &dyn UnderTest) {
    let mut client = init.connect();
    for handle in [Handle(0), Handle(u32::MAX)] {
        client.send(&ToInit::Ack { handle, stream: Stream::Stdout, offset: 4 });
        client.send(&ToInit::AckResult { handle });
        client.send(&ToInit::Kill { handle });
        client.send(&ToInit::Signal { handle, signal: 9 });
        client.send(&ToInit::StdinEnd { handle, offset: 9 });
        client.send(&ToInit::Resume { handle, stdout: 5, stderr: 5 });
        client.send(&ToInit::Resize { handle, size: TerminalSize { rows: 1, columns: 1 } });
        client.send_stdin(handle.0, 7, b"for nobody");
    }
    assert!(client.sync().is_empty());
}

fn exit_codes_and_both_streams_are_exact(init: &dyn UnderTest) {
    let mut client = init.connect();
    let outcome = client.run(init.start_of(1, Work::Say { stdout: "out", stderr: "err", code: 42 }));
    assert_eq!((outcome.status(), outcome.cause()), (ExitStatus::Code(42), EndCause::Itself));
    assert_eq!((&outcome.stdout[..], &outcome.stderr[..]), (&b"out\n"[..], &b"err\n"[..]));
    assert!(outcome.pid.is_some_and(|pid| pid > 1));
    let handles: Vec<u32> = (2..=50).collect();
    for handle in &handles {
        client.start(init.start_of(*handle, Work::Say { stdout: "hi", stderr: "", code: *handle as i32 }));
    }
    for (handle, outcome) in client.finish_all(&handles) {
        assert_eq!(outcome.status(), ExitStatus::Code(handle.0 as i32));
        assert_eq!(outcome.stdout, b"hi\n");
    }
}

fn a_start_that_is_repeated_starts_once(init: &dyn UnderTest) {
    let mut client = init.connect();
    let start = Start { stdin: true, ..init.start_of(1, Work::Cat) };
    client.start(start.clone());
    assert!(matches!(client.message(), FromInit::Started { handle: Handle(1), .. }));
    client.start(start.clone());
    assert!(client.sync().is_empty(), "a second start has no effect");
    client.send(&ToInit::StdinEnd { handle: Handle(1), offset: 0 });
    let mut outcomes = BTreeMap::new();
    loop {
        match client.next() {
            Event::Message(FromInit::Ended { .. }) => break,
            event => assert_eq!(client.take(event, &mut outcomes), None),
        }
    }
    // Ended, and not acknowledged: init still knows it.
    client.start(start);
    assert!(client.sync().is_empty());
    client.send(&ToInit::AckResult { handle: Handle(1) });
    client.sync();
    assert_eq!(init.connect_knowing().1, []);
}

fn a_repeated_start_on_a_new_connection_asks_for_the_output(init: &dyn UnderTest) {
    let mut client = init.connect();
    client.start(init.start_of(1, HI));
    client.until_ended(1);
    let mut client = init.connect();
    assert!(client.sync().is_empty(), "nothing was requested yet");
    client.start(init.start_of(1, HI));
    client.finish(1).assert_printed("hi\n");
}

fn a_failed_start_is_a_result_that_waits_to_be_acknowledged(init: &dyn UnderTest) {
    let mut client = init.connect();
    client.start(init.start_of(7, Work::Wrong));
    let failed = client.message();
    assert!(matches!(failed, FromInit::StartFailed { handle: Handle(7), .. }), "{failed:?}");
    let (mut client, known) = init.connect_knowing();
    assert_eq!(known, [(Handle(7), None, 0)]);
    client.send(&ToInit::Resume { handle: Handle(7), stdout: 0, stderr: 0 });
    assert_eq!(client.message(), failed);
    client.send(&ToInit::AckResult { handle: Handle(7) });
    client.sync();
    assert_eq!(init.connect_knowing().1, []);
}

fn there_is_a_bound_on_commands(init: &dyn UnderTest) {
    let mut client = init.connect();
    // Commands that fail are remembered too, until they are acknowledged.
    let many = COMMANDS_MAX as u32;
    for handle in 1..=many {
        client.start(init.start_of(handle, Work::Wrong));
        assert!(matches!(client.message(), FromInit::StartFailed { .. }));
    }
    client.start(init.start_of(many + 1, HI));
    let refused = client.message();
    let FromInit::StartFailed { error: StartError::NoRoom { .. }, .. } = refused else {
        panic!("{refused:?}")
    };
    let (mut client, known) = init.connect_knowing();
    assert_eq!(known.len(), COMMANDS_MAX, "the rejected command is not remembered");
    client.send(&ToInit::AckResult { handle: Handle(5) });
    client.run(init.start_of(many + 1, HI)).assert_printed("hi\n");
}

fn commands_end_by_signals_kills_and_timeouts(init: &dyn UnderTest) {
    let mut client = init.connect();
    let ended = |client: &mut Client, handle| {
        let outcome = client.finish(handle);
        (outcome.status(), outcome.cause())
    };
    client.start(init.start_of(1, Work::Hang));
    client.send(&ToInit::Kill { handle: Handle(1) });
    assert_eq!(ended(&mut client, 1), (ExitStatus::Signal(9), EndCause::Killed));
    client.start(init.start_of(2, Work::Hang));
    client.send(&ToInit::Signal { handle: Handle(2), signal: 15 });
    assert_eq!(ended(&mut client, 2), (ExitStatus::Signal(15), EndCause::Itself));
    client.start(Start { timeout_ms: Some(20), ..init.start_of(3, Work::Hang) });
    assert_eq!(ended(&mut client, 3), (ExitStatus::Signal(15), EndCause::Timeout));
    client.start(Start { idle_timeout_ms: Some(20), ..init.start_of(4, Work::Hang) });
    assert_eq!(ended(&mut client, 4), (ExitStatus::Signal(15), EndCause::IdleTimeout));
    // An ended command keeps its result, whatever arrives late.
    client.start(init.start_of(5, HI));
    client.until_ended(5);
    client.send(&ToInit::Kill { handle: Handle(5) });
    client.send(&ToInit::Signal { handle: Handle(5), signal: 15 });
    assert!(client.sync().is_empty());
    let mut client = init.connect();
    client.send(&ToInit::Resume { handle: Handle(5), stdout: 0, stderr: 0 });
    client.finish(5).assert_printed("hi\n");
}

fn a_daemon_that_is_away_misses_nothing(init: &dyn UnderTest) {
    let mut client = init.connect();
    client.start(init.start_of(1, Work::Say { stdout: "before", stderr: "wrong", code: 5 }));
    assert!(matches!(client.message(), FromInit::Started { .. }));
    drop(client);
    let (mut client, known) = init.connect_knowing();
    assert!(matches!(known[..], [(Handle(1), Some(_), 0)]), "{known:?}");
    client.send(&ToInit::Resume { handle: Handle(1), stdout: 0, stderr: 0 });
    let outcome = client.finish(1);
    assert_eq!((outcome.stdout_text().as_str(), outcome.status()), ("before\n", ExitStatus::Code(5)));
    assert_eq!(outcome.stderr, b"wrong\n");
}

fn nothing_of_a_command_is_sent_before_the_daemon_asks_for_it(init: &dyn UnderTest) {
    let mut client = init.connect();
    client.start(init.start_of(1, HI));
    client.until_ended(1);
    let mut client = init.connect();
    assert!(client.sync().is_empty(), "not before the resume");
    client.send(&ToInit::Resume { handle: Handle(1), stdout: 2, stderr: 0 });
    let rest = Event::Data { handle: Handle(1), stream: Stream::Stdout, offset: 2, bytes: b"\n".to_vec() };
    assert_eq!(client.next(), rest);
    assert!(matches!(client.next(), Event::Message(FromInit::Ended { stdout_end: 3, stderr_end: 0, .. })));
}

fn what_was_acknowledged_is_not_sent_again(init: &dyn UnderTest) {
    let mut client = init.connect();
    client.start(init.start_of(1, HI));
    client.until_ended(1);
    client.send(&ToInit::Ack { handle: Handle(1), stream: Stream::Stdout, offset: 2 });
    client.sync();
    // A daemon that has less than it once acknowledged sees from the offset what is missing.
    let mut client = init.connect();
    client.send(&ToInit::Resume { handle: Handle(1), stdout: 0, stderr: 0 });
    let rest = Event::Data { handle: Handle(1), stream: Stream::Stdout, offset: 2, bytes: b"\n".to_vec() };
    assert_eq!(client.next(), rest);
}

fn a_second_resume_is_no_more_than_an_acknowledgement(init: &dyn UnderTest) {
    let mut client = init.connect();
    client.start(init.start_of(1, HI));
    client.until_ended(1);
    client.send(&ToInit::Resume { handle: Handle(1), stdout: 2, stderr: 0 });
    assert!(client.sync().is_empty(), "all of it was sent on this connection");
    let mut client = init.connect();
    client.send(&ToInit::Resume { handle: Handle(1), stdout: 0, stderr: 0 });
    let rest = Event::Data { handle: Handle(1), stream: Stream::Stdout, offset: 2, bytes: b"\n".to_vec() };
    assert_eq!(client.next(), rest);
}

fn a_full_window_blocks_its_own_writer_and_nobody_else(init: &dyn UnderTest) {
    let mut client = init.connect();
    client.start(init.start_of(1, ENDLESS));
    let mut received = 0;
    while received < OUTPUT_WINDOW {
        if let Event::Data { bytes, .. } = client.next() {
            received += bytes.len();
        }
    }
    // Nothing was acknowledged: the output stops there, and other commands run.
    for handle in 2..12 {
        let outcome = client.run(init.start_of(handle, Work::Flood(100_000)));
        assert_eq!((outcome.stdout.len(), outcome.status()), (100_000, ExitStatus::Code(0)));
    }
    assert_eq!(received, OUTPUT_WINDOW);
    client.send(&ToInit::Kill { handle: Handle(1) });
    let mut outcomes = BTreeMap::from([(Handle(1), Outcome { pid: Some(0), ..Outcome::default() })]);
    outcomes.get_mut(&Handle(1)).expect("just put there").stdout = vec![0; received];
    client.send(&ToInit::Ack { handle: Handle(1), stream: Stream::Stdout, offset: received as u64 });
    while client.take_next(&mut outcomes).is_none() {}
    assert_eq!(outcomes[&Handle(1)].status(), ExitStatus::Signal(9));
}

fn a_flood_does_not_keep_messages_waiting(init: &dyn UnderTest) {
    let mut client = init.connect();
    for handle in 1..=4 {
        client.start(init.start_of(handle, ENDLESS));
    }
    let mut outcomes: BTreeMap<Handle, Outcome> = BTreeMap::new();
    // An answer is only delayed by what the kernel has already accepted from init, even after many turns of every
    // stream.
    let mut serial = 0;
    while outcomes.len() < 4 || outcomes.values().any(|outcome| outcome.stdout.len() < 2 * OUTPUT_WINDOW) {
        serial += 1;
        client.send(&ToInit::Ping { serial });
        let mut overtaken = 0;
        loop {
            match client.next() {
                Event::Message(FromInit::Pong { serial: answer }) => {
                    assert_eq!(answer, serial);
                    break;
                }
                other => {
                    if let Event::Data { bytes, .. } = &other {
                        overtaken += bytes.len();
                    }
                    client.take(other, &mut outcomes);
                }
            }
        }
        let limit = init.overtaken_max(4);
        assert!(overtaken < limit, "an answer waited for {overtaken} bytes; the limit is {limit}");
    }
    for handle in 1..=4 {
        client.send(&ToInit::Kill { handle: Handle(handle) });
    }
    let mut left = 4;
    while left > 0 {
        left -= usize::from(client.take_next(&mut outcomes).is_some());
    }
}

fn every_byte_arrives_once_over_any_number_of_reconnects(init: &dyn UnderTest) {
    const LENGTH: u64 = 3_000_000;
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let handles = [Handle(1), Handle(2), Handle(3)];
    let mut client = init.connect();
    handles.iter().for_each(|handle| client.start(init.start_of(handle.0, Work::Flood(LENGTH))));
    let mut stored: BTreeMap<Handle, u64> = BTreeMap::new();
    let mut ended: Vec<Handle> = Vec::new();
    while ended.len() < handles.len() {
        // Some connections die at once, some live long.
        for _ in 0..random.below(60) {
            match client.next() {
                Event::Data { handle, stream, offset, bytes } => {
                    let length = stored.entry(handle).or_default();
                    assert_eq!((stream, offset), (Stream::Stdout, *length), "of {handle:?}");
                    let exact = (offset..).zip(&bytes).all(|(at, byte)| init.flood_byte(at) == *byte);
                    assert!(exact, "{handle:?} at {offset}");
                    *length += bytes.len() as u64;
                    if random.below(3) > 0 {
                        // Some acknowledgements come late, for less than there is.
                        let offset = *length - random.below(2) * random.below(bytes.len() as u64);
                        client.send(&ToInit::Ack { handle, stream, offset });
                    }
                }
                Event::Message(FromInit::Ended { handle, end, stdout_end, .. }) => {
                    assert_eq!((end.status, stdout_end), (ExitStatus::Code(0), LENGTH));
                    ended.push(handle);
                    client.send(&ToInit::AckResult { handle });
                    if ended.len() == handles.len() {
                        break;
                    }
                }
                Event::Message(FromInit::Started { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
        let known;
        (client, known) = init.connect_knowing();
        for handle in handles.into_iter().filter(|handle| !ended.contains(handle)) {
            let stdout = stored.get(&handle).copied().unwrap_or(0);
            match known.iter().any(|(known, _, _)| *known == handle) {
                true => client.send(&ToInit::Resume { handle, stdout, stderr: 0 }),
                // The connection was gone before init read the start.
                false => client.start(init.start_of(handle.0, Work::Flood(LENGTH))),
            }
        }
    }
    assert!(stored.values().all(|length| *length == LENGTH), "{stored:?}");
}

fn stdin_is_carried_exactly_and_ends_where_the_daemon_says(init: &dyn UnderTest) {
    let mut client = init.connect();
    let content: Vec<u8> = (0..2_000_000u32).map(|number| (number % 251) as u8).collect();
    client.start(Start { stdin: true, ..init.start_of(1, Work::Cat) });
    let mut outcomes: BTreeMap<Handle, Outcome> = BTreeMap::new();
    let mut sent = 0;
    loop {
        let taken = outcomes.get(&Handle(1)).map_or(0, |outcome| outcome.stdin as usize);
        let may = (taken + STDIN_WINDOW).min(content.len());
        if sent < may {
            // Half of it twice: init recognises bytes that were sent already.
            let again = sent - (sent - taken) / 2;
            client.send_stdin(1, again as u64, &content[again..may]);
            sent = may;
            if sent == content.len() {
                client.send(&ToInit::StdinEnd { handle: Handle(1), offset: sent as u64 });
            }
        }
        if client.take_next(&mut outcomes).is_some() {
            break;
        }
    }
    let outcome = &outcomes[&Handle(1)];
    assert!(outcome.stdout == content, "the output must equal the input");
    assert_eq!(outcome.status(), ExitStatus::Code(0));
}

fn stdin_that_was_not_asked_for_is_refused_once(init: &dyn UnderTest) {
    let mut client = init.connect();
    client.run(init.start_of(1, Work::Cat)).assert_printed("");
    client.start(init.start_of(2, Work::Hang));
    assert!(matches!(client.message(), FromInit::Started { .. }));
    client.send_stdin(2, 0, b"for nobody");
    assert_eq!(client.message(), FromInit::StdinClosed { handle: Handle(2) });
    client.send_stdin(2, 10, b"and again");
    assert!(client.sync().is_empty(), "it is reported once");
}

fn stdin_after_its_end_is_refused(init: &dyn UnderTest) {
    let mut client = init.connect();
    client.start(Start { stdin: true, ..init.start_of(1, Work::Hang) });
    client.send_stdin(1, 0, b"all");
    client.send(&ToInit::StdinEnd { handle: Handle(1), offset: 3 });
    // The first end stands.
    client.send(&ToInit::StdinEnd { handle: Handle(1), offset: 1000 });
    client.send_stdin(1, 3, b"more");
    client.send_stdin(1, 7, b"and more");
    let closed = FromInit::StdinClosed { handle: Handle(1) };
    let said = client.sync().into_iter().filter(|event| *event == Event::Message(closed.clone())).count();
    assert_eq!(said, 1);
}

fn stdin_that_waits_in_init_is_not_given_twice(init: &dyn UnderTest) {
    let mut client = init.connect();
    client.start(Start { stdin: true, ..init.start_of(1, Work::Hang) });
    assert!(matches!(client.message(), FromInit::Started { .. }));
    client.send_stdin(1, 0, &vec![b'x'; STDIN_WINDOW]);
    client.sync();
    let (mut client, known) = init.connect_knowing();
    let [(Handle(1), Some(_), received)] = known[..] else { panic!("{known:?}") };
    assert_eq!(received, STDIN_WINDOW as u64, "what waits in init counts");
    client.send(&ToInit::Resume { handle: Handle(1), stdout: 0, stderr: 0 });
    // Init reports after the resume how much was delivered to the command, even if that is nothing.
    let FromInit::StdinAck { handle: Handle(1), offset } = client.message() else {
        panic!("init must report what was delivered")
    };
    assert!(offset < received);
    client.send_stdin(1, 0, &vec![b'x'; STDIN_WINDOW]);
    client.sync();
    let [(Handle(1), Some(_), again)] = init.connect_knowing().1[..] else { panic!("it is known") };
    assert_eq!(again, received);
}

fn stdin_beyond_the_rules_costs_the_connection_and_nothing_else(init: &dyn UnderTest) {
    let mut client = init.connect();
    client.start(Start { stdin: true, ..init.start_of(1, Work::Hang) });
    client.sync();
    let frame =
        |stream, at, bytes: &[u8]| [&data_header(Handle(1), stream, at, bytes.len())[..], bytes].concat();
    // More than the window and a pipe together.
    let flood = vec![0; 2 * STDIN_WINDOW];
    let chunks = flood.chunks(CHUNK_MAX).enumerate();
    let flood = chunks.flat_map(|(index, chunk)| frame(Stream::Stdin, (index * CHUNK_MAX) as u64, chunk));
    let offences: [Vec<u8>; 3] =
        [flood.collect(), frame(Stream::Stdin, 1 << 40, &[0]), frame(Stream::Stdout, 0, &[0])];
    for offence in offences {
        let mut client = init.connect();
        client.send(&ToInit::Resume { handle: Handle(1), stdout: 0, stderr: 0 });
        // The last bytes may find the connection closed.
        let _ = client.stream.write_all(&offence);
        client.until_dropped();
    }
    assert_eq!(init.connect_knowing().1.len(), 1, "the command is still there");
}
