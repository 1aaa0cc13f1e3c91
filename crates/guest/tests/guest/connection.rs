//! The connection to the daemon beyond the rules in `protocol`: invalid bytes, and how much init buffers.

use std::io::Write;

use proptest::prelude::*;
use wire::frame::put_message;
use wire::guest::{Cwd, FromInit, Handle, Program, Start, Stream, TerminalSize, ToInit};

use crate::support::{Event, Guest, Mode, argv, shell};

#[test]
fn what_was_forgotten_is_not_told_again() {
    let guest = Guest::start(Mode::Walk);
    let mut client = guest.connect();
    // A leftover process keeps part of the command in init.
    client.run(shell(1, "sleep 1000 & echo hi")).assert_printed("hi\n");
    client.send(&ToInit::Resume { handle: Handle(1), stdout: 0, stderr: 0 });
    client.send(&ToInit::AckResult { handle: Handle(1) });
    client.start(shell(1, "echo again"));
    assert!(client.sync().is_empty());
    assert_eq!(guest.connect_knowing().1, []);
}

#[test]
fn questions_without_end_from_somebody_who_does_not_listen_are_not_hoarded() {
    let guest = Guest::start(Mode::Walk);
    let mut client = guest.connect();
    client.stream.set_nonblocking(true).expect("it can be set");
    let mut pings = Vec::new();
    (0..10_000).for_each(|serial| put_message(&ToInit::Ping { serial }, &mut pings));
    let mut taken = 0;
    while let Ok(length) = client.stream.write(&pings) {
        taken += length;
        assert!(taken < 64 * 1024 * 1024, "init must stop listening at some point");
    }
    println!("init and the kernel buffered {taken} bytes");
    assert!(guest.status_kib("VmRSS:") < 16 * 1024);
    guest.connect().sync();
}

fn any_program() -> impl Strategy<Value = Program> {
    let programs = ["true", "cat", "yes", "head -c 3000000 /dev/zero", "sleep 1000", "no-such-program", ""];
    prop_oneof![
        proptest::sample::select(programs.to_vec())
            .prop_map(|line| Program::Argv(line.split(' ').map(String::from).collect())),
        proptest::sample::select(vec![
            "(sleep 1000 &)",
            "yes & echo hi",
            "exec <&-; yes",
            "setsid sleep 1000"
        ])
        .prop_map(|script| Program::Shell { script: script.into() }),
    ]
}

fn any_start() -> impl Strategy<Value = ToInit> {
    let length = || proptest::option::of(0..2_000u64);
    (
        0..8u32,
        any_program(),
        any::<bool>(),
        proptest::option::of((any::<u16>(), any::<u16>())),
        length(),
        length(),
    )
        .prop_map(|(handle, program, stdin, terminal, timeout_ms, idle_timeout_ms)| {
            ToInit::Start(Box::new(Start {
                program,
                stdin,
                terminal: terminal.map(|(rows, columns)| TerminalSize { rows, columns }),
                timeout_ms,
                idle_timeout_ms,
                grace_ms: 10,
                cwd: Cwd::Default("/tmp".into()),
                ..shell(handle, "")
            }))
        })
}

fn any_frame() -> impl Strategy<Value = Vec<u8>> {
    let stream =
        prop_oneof![Just(Stream::Stdin), Just(Stream::Stdin), Just(Stream::Stdout), Just(Stream::Stderr)];
    let handle = || (0..8u32).prop_map(Handle);
    let small = || prop_oneof![0..10u64, 0..3_000_000u64, any::<u64>()];
    let message = prop_oneof![
        4 => any_start(),
        2 => (handle(), small()).prop_map(|(handle, offset)| ToInit::StdinEnd { handle, offset }),
        2 => (handle(), -2..70i32).prop_map(|(handle, signal)| ToInit::Signal { handle, signal }),
        2 => handle().prop_map(|handle| ToInit::Kill { handle }),
        1 => (handle(), any::<u16>(), any::<u16>()).prop_map(|(handle, rows, columns)| ToInit::Resize {
            handle,
            size: TerminalSize { rows, columns },
        }),
        4 => (handle(), stream.clone(), small())
            .prop_map(|(handle, stream, offset)| ToInit::Ack { handle, stream, offset }),
        2 => handle().prop_map(|handle| ToInit::AckResult { handle }),
        4 => (handle(), small(), small())
            .prop_map(|(handle, stdout, stderr)| ToInit::Resume { handle, stdout, stderr }),
        1 => any::<u64>().prop_map(|serial| ToInit::Ping { serial }),
    ];
    let bytes = || proptest::collection::vec(any::<u8>(), 0..300);
    prop_oneof![
        20 => message.prop_map(|message| {
            let mut frame = Vec::new();
            put_message(&message, &mut frame);
            frame
        }),
        4 => (handle(), stream, small(), bytes()).prop_map(|(handle, stream, offset, bytes)| {
            [&wire::frame::data_header(handle, stream, offset, bytes.len())[..], &bytes].concat()
        }),
        1 => bytes(),
    ]
}

#[test]
fn init_survives_whatever_the_connection_brings() {
    let guest = Guest::start(Mode::Walk);
    let runner = |cases| {
        proptest::test_runner::TestRunner::new(ProptestConfig {
            cases,
            failure_persistence: None,
            // A shrunken case would meet an init in another state, so the first failure is more useful.
            max_shrink_iters: 0,
            ..ProptestConfig::default()
        })
    };
    let frames = proptest::collection::vec(any_frame(), 0..40);
    runner(150)
        .run(&frames, |frames| {
            let mut client = guest.connect();
            for frame in frames {
                // Init may have dropped the connection after an earlier message.
                if client.stream.write_all(&frame).is_err() {
                    break;
                }
            }
            // Init reads everything and then finds the end, or has dropped the connection before.
            let _ = client.stream.shutdown(std::net::Shutdown::Write);
            client.until_dropped();
            guest.connect().sync();
            Ok(())
        })
        .expect("init answers after anything");
    // Everything that was started can be ended and forgotten.
    let (mut client, known) = guest.connect_knowing();
    println!("{} commands were left", known.len());
    for (handle, _, _) in &known {
        client.send(&ToInit::Kill { handle: *handle });
        client.send(&ToInit::Resume { handle: *handle, stdout: 0, stderr: 0 });
    }
    let mut left = known.len();
    while left > 0 {
        match client.next() {
            Event::Data { handle, stream, offset, bytes } => {
                let offset = offset + bytes.len() as u64;
                client.send(&ToInit::Ack { handle, stream, offset });
            }
            Event::Message(FromInit::Ended { handle, .. } | FromInit::StartFailed { handle, .. }) => {
                client.send(&ToInit::AckResult { handle });
                left -= 1;
            }
            Event::Message(_) => {}
        }
    }
    client.run(argv(1000, &["echo", "well"])).assert_printed("well\n");
    client.sync();
    assert_eq!(guest.connect_knowing().1, []);
}
