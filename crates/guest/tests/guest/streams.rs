//! Output that loses nothing, and stdin.

use std::collections::BTreeMap;

use wire::guest::{ExitStatus, FromInit, Handle, OUTPUT_WINDOW, STDIN_WINDOW, Start, Stream, ToInit};

use crate::support::{Client, Event, Guest, Mode, Outcome, argv, in_both_modes, shell};

/// Prints numbers, one per line, so that every byte tells where it belongs.
fn numbers(handle: u32, count: u32) -> Start {
    argv(handle, &["seq", &count.to_string()])
}

fn expected_numbers(count: u32) -> Vec<u8> {
    (1..=count).flat_map(|number| format!("{number}\n").into_bytes()).collect()
}

/// Small and good enough to choose offsets: xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound.max(1)
    }
}

#[test]
fn a_long_stream_arrives_whole_in_constant_memory() {
    const LENGTH: u64 = 64 * 1024 * 1024;
    let guest = Guest::start(Mode::Walk);
    let mut client = guest.connect();
    client.run(argv(1, &["true"])).assert_printed("");
    let before = guest.status_kib("VmHWM:");
    client.start(argv(2, &["head", "-c", &LENGTH.to_string(), "/dev/zero"]));
    let (mut stored, mut acked) = (0u64, 0u64);
    loop {
        match client.next() {
            Event::Data { handle, stream: Stream::Stdout, offset, bytes } => {
                assert_eq!((handle, offset), (Handle(2), stored));
                assert!(bytes.iter().all(|byte| *byte == 0));
                stored += bytes.len() as u64;
                assert!(stored - acked <= OUTPUT_WINDOW as u64, "no more is sent than the window holds");
                // As late as can be: only a full window, or the end, is acknowledged.
                if stored - acked == OUTPUT_WINDOW as u64 || stored == LENGTH {
                    acked = stored;
                    client.send(&ToInit::Ack { handle, stream: Stream::Stdout, offset: acked });
                }
            }
            Event::Message(FromInit::Started { .. }) => {}
            Event::Message(FromInit::Ended { stdout_end, stderr_end, .. }) => {
                assert_eq!((stdout_end, stderr_end, stored), (LENGTH, 0, LENGTH));
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    let grown = guest.status_kib("VmHWM:") - before;
    println!("init grew by {grown} KiB while it carried {} MiB", LENGTH >> 20);
    assert!(grown < 4 * 1024, "a window, the pool and some room; it was {grown} KiB");
}

/// What the daemon has stored of one command, across connections.
#[derive(Default)]
struct Stored {
    streams: [Vec<u8>; 2],
    ended: Option<(u64, u64)>,
}

impl Stored {
    fn of(&mut self, stream: Stream) -> &mut Vec<u8> {
        match stream {
            Stream::Stdin => panic!("stdin does not come from init"),
            Stream::Stdout => &mut self.streams[0],
            Stream::Stderr => &mut self.streams[1],
        }
    }
}

#[test]
fn every_byte_arrives_once_over_any_number_of_reconnects() {
    in_both_modes(|guest| {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let count = 400_000;
        let script = format!("seq {count} & seq {count} >&2; wait; exit 3");
        let handles = [Handle(1), Handle(2), Handle(3)];
        let mut client = guest.connect();
        for handle in handles {
            client.start(shell(handle.0, &script));
        }
        let mut stored: BTreeMap<Handle, Stored> = BTreeMap::new();
        let mut connections = 1;
        while handles.iter().any(|handle| stored.get(handle).is_none_or(|stored| stored.ended.is_none())) {
            // Some connections die at once, some live long; some leave a frame half read.
            for _ in 0..random.below(120) {
                let Some(event) = next_or_all_ended(&mut client, &stored, &handles) else { break };
                store(&mut client, event, &mut stored, &mut random);
            }
            let known;
            (client, known) = guest.connect_knowing();
            connections += 1;
            for handle in handles {
                let stored = stored.entry(handle).or_default();
                if known.iter().any(|(known, _, _)| *known == handle) {
                    let (stdout, stderr) = (stored.streams[0].len() as u64, stored.streams[1].len() as u64);
                    client.send(&ToInit::Resume { handle, stdout, stderr });
                } else {
                    // The connection was gone before its start was read.
                    assert!(stored.streams.iter().all(Vec::is_empty));
                    client.start(shell(handle.0, &script));
                }
            }
        }
        println!("over {connections} connections");
        let expected = expected_numbers(count);
        for (handle, stored) in &stored {
            let lengths = (expected.len() as u64, expected.len() as u64);
            assert_eq!(stored.ended, Some(lengths), "{handle:?}");
            assert!(stored.streams[0] == expected, "stdout of {handle:?} is exact");
            assert!(stored.streams[1] == expected, "stderr of {handle:?} is exact");
            client.send(&ToInit::AckResult { handle: *handle });
        }
        client.sync();
        assert_eq!(guest.connect_knowing().1, []);
    });
}

fn next_or_all_ended(
    client: &mut Client,
    stored: &BTreeMap<Handle, Stored>,
    handles: &[Handle],
) -> Option<Event> {
    let over = handles.iter().all(|handle| stored.get(handle).is_some_and(|stored| stored.ended.is_some()));
    if over { None } else { Some(client.next()) }
}

/// Stores what came, and acknowledges some of it, some of the time.
fn store(client: &mut Client, event: Event, stored: &mut BTreeMap<Handle, Stored>, random: &mut Random) {
    match event {
        Event::Data { handle, stream, offset, bytes } => {
            let kept = stored.entry(handle).or_default().of(stream);
            assert_eq!(offset, kept.len() as u64, "what follows begins where the last byte ended");
            kept.extend_from_slice(&bytes);
            let length = kept.len() as u64;
            if random.below(3) > 0 {
                // Some acknowledgements come late, for less than there is.
                let offset = length - random.below(2) * random.below(bytes.len() as u64);
                client.send(&ToInit::Ack { handle, stream, offset });
            }
        }
        Event::Message(FromInit::Ended { handle, end, stdout_end, stderr_end }) => {
            assert_eq!(end.status, ExitStatus::Code(3));
            stored.entry(handle).or_default().ended = Some((stdout_end, stderr_end));
        }
        Event::Message(FromInit::Started { .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_daemon_that_is_away_misses_nothing() {
    let guest = Guest::start(Mode::Walk);
    let fifo = guest.fifo("held");
    let mut client = guest.connect();
    client.start(shell(1, &format!("exec 7>{}; echo before; echo wrong >&2; exit 5", fifo.path.display())));
    drop(client);
    fifo.until_released();
    let mut client = guest.connect();
    client.send(&ToInit::Resume { handle: Handle(1), stdout: 0, stderr: 0 });
    let outcome = client.finish(1);
    assert_eq!((outcome.stdout_text().as_str(), outcome.status()), ("before\n", ExitStatus::Code(5)));
    assert_eq!(outcome.stderr, b"wrong\n");
}

#[test]
fn nothing_of_a_command_is_sent_before_the_daemon_asks_for_it() {
    let guest = Guest::start(Mode::Walk);
    let mut client = guest.connect();
    client.start(shell(1, "echo hi"));
    assert!(matches!(client.message(), FromInit::Started { .. }));
    // It is over, and none of it was acknowledged.
    while !matches!(client.next(), Event::Message(FromInit::Ended { .. })) {}
    let mut client = guest.connect();
    assert!(client.sync().is_empty(), "not before the resume");
    client.send(&ToInit::Resume { handle: Handle(1), stdout: 2, stderr: 0 });
    let expected =
        Event::Data { handle: Handle(1), stream: Stream::Stdout, offset: 2, bytes: b"\n".to_vec() };
    assert_eq!(client.next(), expected);
    assert!(matches!(client.next(), Event::Message(FromInit::Ended { stdout_end: 3, stderr_end: 0, .. })));
}

#[test]
fn a_full_window_blocks_its_own_writer_and_nobody_else() {
    in_both_modes(|guest| {
        let mut client = guest.connect();
        client.start(argv(1, &["yes"]));
        let mut received = 0;
        while received < OUTPUT_WINDOW {
            if let Event::Data { bytes, .. } = client.next() {
                received += bytes.len();
            }
        }
        // Nothing was acknowledged: it stops there, and others run.
        for handle in 2..12 {
            client
                .run(numbers(handle, 20_000))
                .assert_printed(std::str::from_utf8(&expected_numbers(20_000)).expect("text"));
        }
        client.send(&ToInit::Kill { handle: Handle(1) });
        // Its result waits until what it left in the pipe fits, like all output.
        assert!(client.sync().is_empty());
        let mut outcomes = BTreeMap::from([(Handle(1), Outcome { pid: Some(0), ..Outcome::default() })]);
        outcomes.get_mut(&Handle(1)).expect("just put there").stdout = vec![0; received];
        client.send(&ToInit::Ack { handle: Handle(1), stream: Stream::Stdout, offset: received as u64 });
        while client.take_next(&mut outcomes).is_none() {}
        assert_eq!(outcomes[&Handle(1)].status(), ExitStatus::Signal(9));
    });
}

#[test]
fn a_flood_does_not_keep_messages_waiting() {
    let guest = Guest::start(Mode::Walk);
    let mut client = guest.connect();
    for handle in 1..=4 {
        client.start(argv(handle, &["yes"]));
    }
    let mut outcomes: BTreeMap<Handle, Outcome> = BTreeMap::new();
    // Until everybody had many turns, an answer overtakes all but what the kernel has already taken off init's hands.
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
        assert!(overtaken < OUTPUT_WINDOW, "an answer waited for {overtaken} bytes");
    }
    for handle in 1..=4 {
        client.send(&ToInit::Kill { handle: Handle(handle) });
    }
    let mut left = 4;
    while left > 0 {
        left -= usize::from(client.take_next(&mut outcomes).is_some());
    }
}

#[test]
fn a_background_child_neither_delays_the_result_nor_dies_of_it() {
    in_both_modes(|guest| {
        let mut client = guest.connect();
        let fifo = guest.fifo("background");
        let held = fifo.path.display();
        // The child writes more than a pipe holds, to both streams, long after its parent has gone.
        let script = format!(
            "(exec 7>{held}; while kill -0 $$; do :; done; seq 100000; seq 100000 >&2; echo alive >&7) 2>/dev/null &
             echo hi"
        );
        client.run(shell(1, &script)).assert_printed("hi\n");
        assert_eq!(fifo.until_released(), b"alive\n");
        client.run(shell(2, "sleep 1000 & echo hi")).assert_printed("hi\n");
        // It may still be on its way to its program; if it is not, it has been killed.
        let script = "until pgrep -x sleep >/dev/null; do :; done; echo still there";
        client.run(Start { timeout_ms: Some(20_000), ..shell(3, script) }).assert_printed("still there\n");
        std::fs::remove_file(&fifo.path).expect("it is there");
    });
}

#[test]
fn stdin_is_at_its_end_unless_asked_for() {
    let guest = Guest::start(Mode::Walk);
    let mut client = guest.connect();
    client.run(argv(1, &["cat"])).assert_printed("");
    client.run(shell(2, "readlink /proc/self/fd/0")).assert_printed("/dev/null\n");
    client.start(shell(3, "sleep 1000"));
    assert!(matches!(client.message(), FromInit::Started { .. }));
    client.send_stdin(3, 0, b"for nobody");
    assert_eq!(client.message(), FromInit::StdinClosed { handle: Handle(3) });
    client.send_stdin(3, 10, b"and again");
    assert!(client.sync().is_empty(), "it is said once");
}

#[test]
fn stdin_is_carried_exactly_and_ends_where_the_daemon_says() {
    in_both_modes(|guest| {
        let mut client = guest.connect();
        let content = expected_numbers(300_000);
        client.start(Start { stdin: true, ..argv(1, &["cat"]) });
        let mut outcomes: BTreeMap<Handle, Outcome> = BTreeMap::new();
        let mut sent = 0;
        loop {
            let taken = outcomes.get(&Handle(1)).map_or(0, |outcome| outcome.stdin as usize);
            let may = (taken + STDIN_WINDOW).min(content.len());
            if sent < may {
                // Half of it twice: bytes that were sent already are recognised.
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
        assert!(outcome.stdout == content, "what went in came out");
        assert_eq!(outcome.status(), ExitStatus::Code(0));
    });
}

#[test]
fn stdin_that_was_under_way_when_the_daemon_died_is_not_given_twice() {
    let guest = Guest::start(Mode::Walk);
    let mut client = guest.connect();
    // It reads nothing until it is told to, so the pipe fills up and the rest waits in init.
    let gate = guest.path("gate");
    let script = format!("while [ ! -e {} ]; do :; done; wc -c", gate.display());
    client.start(Start { stdin: true, ..shell(1, &script) });
    assert!(matches!(client.message(), FromInit::Started { .. }));
    client.send_stdin(1, 0, &vec![b'x'; STDIN_WINDOW]);
    client.sync();
    let (mut client, known) = guest.connect_knowing();
    let [(Handle(1), Some(_), received)] = known[..] else { panic!("{known:?}") };
    assert_eq!(received, STDIN_WINDOW as u64, "what waits in init counts");
    client.send(&ToInit::Resume { handle: Handle(1), stdout: 0, stderr: 0 });
    client.send_stdin(1, 0, &vec![b'x'; 1000]);
    client.send_stdin(1, received, b"last");
    client.send(&ToInit::StdinEnd { handle: Handle(1), offset: received + 4 });
    std::fs::write(gate, "").expect("the directory is ours");
    let mut outcomes = BTreeMap::from([(Handle(1), Outcome::default())]);
    while client.take_next(&mut outcomes).is_none() {}
    assert_eq!(outcomes[&Handle(1)].stdout_text(), format!("{}\n", received + 4));
}

#[test]
fn a_command_that_closes_its_stdin_is_told_of_and_lives() {
    in_both_modes(|guest| {
        let mut client = guest.connect();
        client.start(Start { stdin: true, ..shell(1, "exec <&-; echo closed; sleep 1000") });
        let mut outcomes = BTreeMap::new();
        while !outcomes.get(&Handle(1)).is_some_and(|outcome: &Outcome| outcome.stdin_closed) {
            client.take_next(&mut outcomes);
        }
        // More than the window: it is dropped, not counted.
        client.send_stdin(1, 0, &vec![0; 2 * STDIN_WINDOW]);
        client.send(&ToInit::StdinEnd { handle: Handle(1), offset: 1 });
        client.send(&ToInit::Kill { handle: Handle(1) });
        while client.take_next(&mut outcomes).is_none() {}
        assert_eq!(outcomes[&Handle(1)].status(), ExitStatus::Signal(9));
    });
}

#[test]
fn stdin_beyond_the_rules_costs_the_connection_and_nothing_else() {
    let guest = Guest::start(Mode::Walk);
    let mut client = guest.connect();
    client.start(Start { stdin: true, ..shell(1, "sleep 1000") });
    client.sync();
    let header = |at| wire::frame::data_header(Handle(1), Stream::Stdin, at, 1).to_vec();
    let offences: [&dyn Fn(&mut Client); 3] = [
        // The pipe takes some; this is beyond window and pipe together. The last write may find the connection gone.
        &|client| {
            let chunk = vec![0; 2 * STDIN_WINDOW];
            let mut frames = Vec::new();
            for (index, piece) in chunk.chunks(wire::frame::CHUNK_MAX).enumerate() {
                let at = (index * wire::frame::CHUNK_MAX) as u64;
                frames.extend(wire::frame::data_header(Handle(1), Stream::Stdin, at, piece.len()));
                frames.extend(piece);
            }
            let _ = std::io::Write::write_all(&mut client.stream, &frames);
        },
        &|client| {
            let _ = std::io::Write::write_all(&mut client.stream, &[header(1 << 40), vec![0]].concat());
        },
        &|client| {
            let other = wire::frame::data_header(Handle(1), Stream::Stdout, 0, 1);
            let _ = std::io::Write::write_all(&mut client.stream, &[&other[..], &[0]].concat());
        },
    ];
    for offence in offences {
        let mut client = guest.connect();
        client.send(&ToInit::Resume { handle: Handle(1), stdout: 0, stderr: 0 });
        offence(&mut client);
        client.until_dropped();
    }
    assert_eq!(guest.connect_knowing().1.len(), 1, "the command is still there");
}
