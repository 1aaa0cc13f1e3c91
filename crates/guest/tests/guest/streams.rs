//! Output without losses, and stdin.

use std::collections::BTreeMap;

use wire::guest::{ExitStatus, FromInit, Handle, OUTPUT_WINDOW, STDIN_WINDOW, Start, Stream, ToInit};

use crate::support::{Client, Event, Guest, Mode, Outcome, Random, argv, in_both_modes, shell};

/// Prints numbers, one per line, so that every byte shows where it belongs.
fn numbers(handle: u32, count: u32) -> Start {
    argv(handle, &["seq", &count.to_string()])
}

fn expected_numbers(count: u32) -> Vec<u8> {
    (1..=count).flat_map(|number| format!("{number}\n").into_bytes()).collect()
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
                // As late as possible: only a full window, or the end, is acknowledged.
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
                    // The connection was gone before init read the start.
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

/// Stores what came, and sometimes acknowledges a part of it.
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
        // Nothing was acknowledged: the output stops there, and other commands run.
        for handle in 2..12 {
            client
                .run(numbers(handle, 20_000))
                .assert_printed(std::str::from_utf8(&expected_numbers(20_000)).expect("text"));
        }
        client.send(&ToInit::Kill { handle: Handle(1) });
        // Its result waits until the rest of its pipe fits into the window, like all output.
        assert!(client.sync().is_empty());
        let mut outcomes = BTreeMap::from([(Handle(1), Outcome { pid: Some(0), ..Outcome::default() })]);
        outcomes.get_mut(&Handle(1)).expect("just put there").stdout = vec![0; received];
        client.send(&ToInit::Ack { handle: Handle(1), stream: Stream::Stdout, offset: received as u64 });
        while client.take_next(&mut outcomes).is_none() {}
        assert_eq!(outcomes[&Handle(1)].status(), ExitStatus::Signal(9));
    });
}

#[test]
fn a_background_child_neither_delays_the_result_nor_dies_of_it() {
    in_both_modes(|guest| {
        let mut client = guest.connect();
        let fifo = guest.fifo("background");
        let held = fifo.path.display();
        // The child writes more than a pipe holds, to both streams, long after its parent has exited.
        let script = format!(
            "(exec 7>{held}; while kill -0 $$; do :; done; seq 100000; seq 100000 >&2; echo alive >&7) 2>/dev/null &
             echo hi"
        );
        client.run(shell(1, &script)).assert_printed("hi\n");
        assert_eq!(fifo.until_released(), b"alive\n");
        client.run(shell(2, "sleep 1000 & echo hi")).assert_printed("hi\n");
        // It may not have executed its program yet; otherwise it has been killed.
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
}

#[test]
fn stdin_that_was_under_way_when_the_daemon_died_is_not_given_twice() {
    let guest = Guest::start(Mode::Walk);
    let mut client = guest.connect();
    // The command reads nothing until the gate opens, so the pipe fills up and the rest waits in init.
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
        // More than the window: bytes are dropped, not counted.
        client.send_stdin(1, 0, &vec![0; 2 * STDIN_WINDOW]);
        client.send(&ToInit::StdinEnd { handle: Handle(1), offset: 1 });
        client.send(&ToInit::Kill { handle: Handle(1) });
        while client.take_next(&mut outcomes).is_none() {}
        assert_eq!(outcomes[&Handle(1)].status(), ExitStatus::Signal(9));
    });
}
