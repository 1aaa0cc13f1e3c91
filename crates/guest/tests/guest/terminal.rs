//! Terminals.

use std::collections::BTreeMap;

use wire::guest::{ExitStatus, FromInit, Handle, Start, TerminalSize, ToInit};

use crate::support::{Client, Guest, Mode, Outcome, in_both_modes, shell};

const SIZE: TerminalSize = TerminalSize { rows: 30, columns: 100 };

fn in_terminal(handle: u32, script: &str) -> Start {
    Start { terminal: Some(SIZE), stdin: true, ..shell(handle, script) }
}

/// Reads until stdout contains the text.
fn until_shown(client: &mut Client, outcomes: &mut BTreeMap<Handle, Outcome>, handle: u32, text: &str) {
    while !outcomes.get(&Handle(handle)).is_some_and(|outcome| outcome.stdout_text().contains(text)) {
        assert_eq!(client.take_next(outcomes), None, "it is over: {outcomes:?}");
    }
}

fn until_over(client: &mut Client, outcomes: &mut BTreeMap<Handle, Outcome>) -> Outcome {
    loop {
        if let Some(handle) = client.take_next(outcomes) {
            return outcomes.remove(&handle).expect("it has one");
        }
    }
}

#[test]
fn a_terminal_echoes_is_resized_and_ends() {
    in_both_modes(|guest| {
        let (mut client, mut outcomes) = (guest.connect(), BTreeMap::new());
        let script = "test -t 0 && test -t 1 && test -t 2 && echo $TERM; stty size; read line; echo got $line
                      stty size; trap 'stty size; echo resized' WINCH; echo waiting; cat >/dev/null; echo at its end";
        client.start(in_terminal(1, script));
        until_shown(&mut client, &mut outcomes, 1, "xterm-256color\r\n30 100\r\n");
        client.send_stdin(1, 0, b"hello\n");
        until_shown(&mut client, &mut outcomes, 1, "hello\r\ngot hello\r\n30 100\r\nwaiting\r\n");
        client.send(&ToInit::Resize { handle: Handle(1), size: TerminalSize { rows: 50, columns: 132 } });
        // In the middle of a line: the end must come nevertheless.
        client.send_stdin(1, 6, b"rest");
        client.send(&ToInit::StdinEnd { handle: Handle(1), offset: 10 });
        let outcome = until_over(&mut client, &mut outcomes);
        let text = outcome.stdout_text();
        assert!(text.contains("50 132\r\nresized\r\n") && text.ends_with("at its end\r\n"), "{text}");
        assert_eq!(outcome.status(), ExitStatus::Code(0));
        assert_eq!((outcome.stderr.len(), outcome.stdin), (0, 10));
    });
}

#[test]
fn keys_make_signals() {
    let guest = Guest::start(Mode::Walk);
    let (mut client, mut outcomes) = (guest.connect(), BTreeMap::new());
    client.start(in_terminal(
        1,
        "trap 'echo interrupted; exit 9' INT; echo ready; while :; do sleep 0.01; done",
    ));
    until_shown(&mut client, &mut outcomes, 1, "ready\r\n");
    client.send_stdin(1, 0, b"\x03");
    let outcome = until_over(&mut client, &mut outcomes);
    assert!(outcome.stdout_text().contains("interrupted\r\n"), "{outcome:?}");
    assert_eq!(outcome.status(), ExitStatus::Code(9));
}

#[test]
fn a_terminal_that_nobody_types_on_is_at_its_end() {
    let guest = Guest::start(Mode::Walk);
    let mut client = guest.connect();
    let outcome = client.run(Start { stdin: false, ..in_terminal(1, "cat; echo over") });
    outcome.assert_printed("over\r\n");
}

#[test]
fn a_terminal_takes_as_much_input_as_its_reader_does() {
    in_both_modes(|guest| {
        let (mut client, mut outcomes) = (guest.connect(), BTreeMap::new());
        let content = vec![b'x'; 200_000];
        client.start(in_terminal(1, "stty raw -echo; echo ready; head -c 200000 | wc -c"));
        until_shown(&mut client, &mut outcomes, 1, "ready\n");
        client.send_stdin(1, 0, &content);
        let outcome = until_over(&mut client, &mut outcomes);
        assert!(outcome.stdout_text().ends_with("200000\n"), "{outcome:?}");
        assert_eq!(outcome.stdin, 200_000);
    });
}

#[test]
fn all_that_was_written_to_a_terminal_arrives() {
    in_both_modes(|guest| {
        let mut client = guest.connect();
        for handle in 1..20 {
            let outcome = client.run(in_terminal(handle, "seq 20000"));
            let expected: String = (1..=20_000).map(|number| format!("{number}\r\n")).collect();
            assert!(
                outcome.stdout_text() == expected,
                "{} of {} bytes",
                outcome.stdout.len(),
                expected.len()
            );
        }
    });
}

#[test]
fn a_background_child_on_a_terminal_does_not_delay_the_result() {
    let guest = Guest::start(Mode::Walk);
    let mut client = guest.connect();
    let outcome = client.run(in_terminal(1, "(trap '' HUP; sleep 1000) & echo hi"));
    outcome.assert_printed("hi\r\n");
    // A resize, input or signal for an ended command has no effect.
    client.send(&ToInit::Resize { handle: Handle(1), size: SIZE });
    client.send_stdin(1, 0, b"x");
    assert!(client.sync().is_empty());
}

#[test]
fn a_terminal_belongs_to_its_user() {
    if !crate::support::is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let guest = Guest::start(Mode::Walk);
    let mut client = guest.connect();
    let start = Start { user: Some("nobody".into()), ..in_terminal(1, "echo by name > $(tty)") };
    client.run(start).assert_printed("by name\r\n");
    client.start(in_terminal(2, "sleep 1000"));
    assert!(matches!(client.message(), FromInit::Started { .. }));
}
