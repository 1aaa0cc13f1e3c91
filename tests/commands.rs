//! Commands: exact bytes, reconnects, stdin, signals, timeouts, and failed starts.

use std::fs;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rustix::process::Signal;
use serde_json::{Value, json};
use shoal_tests::daemon::send_signal;
use shoal_tests::wait::until_true;
use shoal_tests::{Collected, Daemon, Said, Sandbox, until};

/// Writes `count` bytes, all 256 values in turn, to stdout, and the same with every bit inverted to stderr.
const ALL_BYTES: &str = "
import sys
block = bytes(range(256)) * 64
turned = bytes(255 - b for b in block)
left = int(sys.argv[1])
while left > 0:
    n = min(left, len(block))
    sys.stdout.buffer.write(block[:n]); sys.stderr.buffer.write(turned[:n])
    left -= n
";

#[track_caller]
fn is_all_bytes(bytes: &[u8], length: usize, turned: bool) {
    assert_eq!(bytes.len(), length);
    let wrong =
        bytes.iter().enumerate().find(|(at, byte)| **byte != (*at as u8) ^ if turned { 255 } else { 0 });
    assert_eq!(wrong, None, "the first wrong byte");
}

/// Whether a `sleep` with seconds that begin like this runs inside. (A shell has them too, in the text of its
/// script.)
fn lives(sandbox: &Sandbox, seconds: &str) -> bool {
    let line = format!("sleep\0{seconds}");
    sandbox.processes().iter().any(|process| {
        !shoal_tests::audit::is_dead(*process)
            && fs::read(format!("/proc/{process}/cmdline"))
                .is_ok_and(|found| found.starts_with(line.as_bytes()))
    })
}

#[test]
fn a_command_answers_with_its_output_and_code() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let done = sandbox.run(json!({"argv": ["python3", "-c", "print(2 + 2)"]})).ok();
    assert_eq!(done.stdout, b"4\n");
    assert_eq!(done.stderr, b"");
    assert_eq!(done.body["stdout_cut"], false);
    assert!(done.body["pid"].as_u64().is_some_and(|pid| pid > 1), "{}", done.body);
    assert!(done.body["created_at"].as_str().is_some_and(|time| time.ends_with('Z')), "{}", done.body);
    assert!(done.body["ended_at"].is_string());
    let failed = sandbox.sh("echo no >&2; exit 7");
    assert_eq!((failed.outcome(), failed.exit_code()), ("exited", Some(7)));
    assert_eq!(failed.stderr, b"no\n");
}

#[test]
fn arguments_arrive_as_they_are() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let arguments = ["", " ", "a b", "'", "\"", "$HOME", "*", "\\", "\n", "\t", "ä日🦀", "-n", "--", "\u{1}"];
    let mut argv = vec![
        "python3",
        "-c",
        "import sys; sys.stdout.buffer.write(b'\\0'.join(a.encode() for a in sys.argv[1:]))",
    ];
    argv.extend(arguments);
    assert_eq!(sandbox.run(json!({"argv": argv})).ok().stdout, arguments.join("\0").as_bytes());
}

#[test]
fn both_streams_are_exact_bytes_over_http() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let done = sandbox.run(json!({"argv": ["python3", "-c", ALL_BYTES, "100000"]})).ok();
    assert!(done.body["stdout_base64"].is_string(), "binary output comes in base64");
    is_all_bytes(&done.stdout, 100_000, false);
    is_all_bytes(&done.stderr, 100_000, true);
}

#[test]
fn both_streams_are_exact_bytes_over_a_websocket() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let length = 3_000_001;
    let mut socket = sandbox.stream(json!({"argv": ["python3", "-c", ALL_BYTES, length.to_string()]}));
    let all = socket.collect(Collected::default());
    assert_eq!(all.result()["exit_code"], 0);
    is_all_bytes(&all.stdout, length, false);
    is_all_bytes(&all.stderr, length, true);
    match socket.hear() {
        Said::Closed(code) => assert_eq!(code, Some(1000), "after the end the server closes"),
        other => panic!("after the end came {other:?}"),
    }
}

#[test]
fn both_streams_are_exact_bytes_over_server_sent_events() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let length = 300_001;
    let id = sandbox.spawn(json!({"argv": ["python3", "-c", ALL_BYTES, length.to_string()]}));
    let all = events(&sandbox, &id, "");
    assert_eq!(all.result()["exit_code"], 0);
    is_all_bytes(&all.stdout, length, false);
    is_all_bytes(&all.stderr, length, true);
    let rest = {
        let mut rest = Collected::default();
        let answer = sandbox
            .events(&id, "?stdout_offset=300000&stderr_offset=300001")
            .open(sandbox.address)
            .expect("it opens");
        shoal_tests::http::server_events(answer, |event| {
            if event.data["type"] == "output" {
                assert_eq!(event.data["offset"], 300_000, "{}", event.data);
                rest.stdout.extend(output_bytes(&event.data));
            }
        })
        .expect("the events end");
        rest
    };
    assert_eq!(rest.stdout.len(), 1);
}

#[test]
fn a_command_is_told_once_and_again_only_when_it_has_changed() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let id = sandbox.spawn(json!({"argv": ["cat"], "stdin": true}));
    sandbox.running(&id);
    let told = || {
        let answer = sandbox.events(&id, "").open(sandbox.address).expect("the events open");
        let mut states = Vec::new();
        shoal_tests::http::server_events(answer, |event| {
            if event.data["type"] == "command" {
                states.push(event.data["state"].clone());
                sandbox.end_stdin(&id);
            }
        })
        .expect("the events end");
        states
    };
    assert_eq!(told(), ["running"], "while it runs");
    assert_eq!(told(), ["ended"], "after its end");
    // The same over a WebSocket.
    let mut socket = sandbox.attach(&id, &Collected::default());
    let mut commands = 0;
    loop {
        match socket.hear() {
            Said::Event(event) if event["type"] == "command" => commands += 1,
            Said::Closed(_) => break,
            _ => {}
        }
    }
    assert_eq!(commands, 1);
}

fn output_bytes(event: &Value) -> Vec<u8> {
    match (event["text"].as_str(), event["base64"].as_str()) {
        (Some(text), None) => text.as_bytes().to_vec(),
        (None, Some(text)) => BASE64_STANDARD.decode(text).expect("base64 is base64"),
        other => panic!("output is text or base64, not {other:?}"),
    }
}

fn events(sandbox: &Sandbox, id: &str, query: &str) -> Collected {
    let answer = sandbox.events(id, query).open(sandbox.address).expect("the events open");
    assert_eq!(answer.status, 200);
    let mut all = Collected::default();
    shoal_tests::http::server_events(answer, |event| match event.data["type"].as_str() {
        Some("output") => {
            let stream = if event.data["stream"] == "stdout" { 1 } else { 2 };
            let offset = event.data["offset"].as_u64().expect("an offset");
            all.add(stream, offset, &output_bytes(&event.data));
        }
        Some("ended") => all.ended = Some(event.data),
        Some("command") => {}
        other => panic!("an event of type {other:?}"),
    })
    .expect("the events end");
    all
}

#[test]
fn text_that_is_cut_inside_a_character_arrives_whole_over_server_sent_events() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let id = sandbox.spawn(json!({"argv": ["python3", "-c", "import sys\nfor _ in range(40000): sys.stdout.buffer.write('日本'.encode())"]}));
    assert_eq!(events(&sandbox, &id, "").stdout, "日本".repeat(40_000).as_bytes());
}

#[test]
fn a_reconnect_with_offsets_goes_on_byte_for_byte() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let length = 2_000_000;
    let mut socket =
        sandbox.stream(json!({"id": "again", "argv": ["python3", "-c", ALL_BYTES, length.to_string()]}));
    let mut all = Collected::default();
    let mut rounds = 0;
    while all.ended.is_none() {
        // A few messages, then the connection is dropped without a close.
        for _ in 0..7 {
            match socket.hear() {
                Said::Output { stream, offset, bytes } => all.add(stream, offset, &bytes),
                Said::Event(event) if event["type"] == "ended" => {
                    all.ended = Some(event);
                    break;
                }
                Said::Event(_) => {}
                Said::Closed(code) => panic!("closed with {code:?}"),
            }
        }
        drop(socket);
        socket = sandbox.attach("again", &all);
        rounds += 1;
    }
    assert!(rounds > 3, "{rounds} rounds are too few to prove anything");
    is_all_bytes(&all.stdout, length, false);
    is_all_bytes(&all.stderr, length, true);
}

#[test]
fn an_ended_command_can_be_read_again_from_any_offset() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let id = sandbox.sh("printf 0123456789; printf abc >&2").ok().id().to_owned();
    let socket = |query: &str| {
        let mut socket =
            sandbox.open_socket(&format!("/commands/{id}/stream{query}")).expect("the stream opens");
        let (mut bytes, mut first) = (Vec::new(), None);
        loop {
            match socket.hear() {
                Said::Output { stream: 1, offset, bytes: more } => {
                    first.get_or_insert(offset);
                    bytes.extend(more);
                }
                Said::Event(event) if event["type"] == "ended" => return (first, bytes),
                Said::Closed(code) => panic!("closed with {code:?}"),
                Said::Output { .. } | Said::Event(_) => {}
            }
        }
    };
    assert_eq!(socket(""), (Some(0), b"0123456789".to_vec()));
    assert_eq!(socket("?stdout_offset=4"), (Some(4), b"456789".to_vec()));
    assert_eq!(socket("?stdout_offset=10"), (None, Vec::new()));
    for query in
        ["?stdout_offset=11", "?stdout_offset=18446744073709551615", "?stdout_offset=-1", "?stdout_offset=x"]
    {
        match sandbox.open_socket(&format!("/commands/{id}/stream{query}")) {
            Err(status) => assert_eq!(status, 400, "{query}"),
            Ok(mut socket) => match socket.hear() {
                Said::Output { .. } => panic!("bytes beyond the end for {query}"),
                Said::Event(_) | Said::Closed(_) => {}
            },
        }
    }
}

#[test]
fn two_clients_of_one_command_see_the_same() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let mut first = sandbox.stream(json!({"id": "shared", "stdin": true, "script": "cat; echo end >&2"}));
    first.wait_for("command");
    let mut second = sandbox.attach("shared", &Collected::default());
    second.wait_for("command");
    first.write(b"from the first\n");
    let mut heard = Collected::default();
    while heard.stdout.len() < 15 {
        if let Said::Output { stream, offset, bytes } = second.hear() {
            heard.add(stream, offset, &bytes);
        }
    }
    second.write(b"from the second\n");
    second.say(&json!({"type": "stdin_end"}));
    let (one, two) = (first.collect(Collected::default()), second.collect(heard));
    assert_eq!(one.stdout, b"from the first\nfrom the second\n");
    assert_eq!(one.stdout, two.stdout);
    assert_eq!(one.stderr, two.stderr);
    assert_eq!(one.result(), two.result());
}

#[test]
fn stdin_is_at_its_end_unless_asked_for() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    assert_eq!(sandbox.run(json!({"argv": ["cat"]})).ok().stdout, b"");
    let id = sandbox.spawn(json!({"argv": ["sleep", "1000"]}));
    sandbox.write(&id, b"x").expect_refusal(409, "stdin_closed");
    sandbox.kill(&id);
}

#[test]
fn stdin_is_written_and_ended_over_http() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let id = sandbox.spawn(json!({"argv": ["cat"], "stdin": true}));
    let all: Vec<u8> = (0..200_000u32).flat_map(|n| n.to_le_bytes()).collect();
    for piece in all.chunks(100_000) {
        let answer = sandbox.write(&id, piece);
        assert!(matches!(answer.status, 200 | 204), "{}", answer.describe());
    }
    let answer = sandbox.end_stdin(&id);
    assert!(matches!(answer.status, 200 | 204), "{}", answer.describe());
    let output = sandbox.output(&id);
    assert_eq!(output.result()["exit_code"], 0);
    assert!(output.stdout == all, "{} bytes came back of {}", output.stdout.len(), all.len());
}

#[test]
fn a_write_that_is_repeated_with_its_offset_is_written_once() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let id = sandbox.spawn(json!({"argv": ["cat"], "stdin": true}));
    let write = |offset: u64, bytes: &str| {
        let answer = sandbox
            .request("POST", &format!("/commands/{id}/stdin?offset={offset}"))
            .header("content-type", "application/octet-stream")
            .body(bytes)
            .send(sandbox.address);
        assert!(matches!(answer.status, 200 | 204), "{}", answer.describe());
    };
    write(0, "one ");
    write(0, "one ");
    write(4, "two");
    write(4, "two");
    sandbox.end_stdin(&id);
    assert_eq!(sandbox.output(&id).stdout, b"one two");
}

#[test]
fn stdin_beyond_every_window_arrives_whole_over_a_websocket() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let mut socket = sandbox.stream(json!({"argv": ["sha256sum"], "stdin": true}));
    socket.wait_for("command");
    let block: Vec<u8> = (0..64 * 1024u32).map(|n| (n % 251) as u8).collect();
    for _ in 0..128 {
        socket.write(&block);
    }
    socket.say(&json!({"type": "stdin_end"}));
    let all = socket.collect(Collected::default());
    assert_eq!(all.result()["exit_code"], 0);
    let expected = sandbox
        .python("import hashlib; h = hashlib.sha256()\nb = bytes(n % 251 for n in range(65536))\nfor _ in range(128): h.update(b)\nprint(h.hexdigest())")
        .ok()
        .text();
    assert_eq!(String::from_utf8_lossy(&all.stdout).split_whitespace().next(), Some(expected.as_str()));
}

#[test]
fn writing_to_a_command_that_closed_its_stdin_is_told() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let id = sandbox.spawn(json!({"script": "exec <&-; echo closed; sleep 1000", "stdin": true}));
    sandbox.wrote(&id, 7);
    until("a write is refused", || {
        let answer = sandbox.write(&id, &[b'x'; 4096]);
        (answer.status == 409).then(|| answer.expect_refusal(409, "stdin_closed"))
    });
    sandbox.kill(&id);
    sandbox.ended(&id);
    let answer = sandbox.write(&id, b"x");
    assert_eq!(answer.status, 409, "{}", answer.describe());
}

#[test]
fn a_command_that_writes_to_a_closed_pipe_gets_its_signal() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let done = sandbox.sh("set -o pipefail; yes | head -n 1; echo ${PIPESTATUS[0]}").ok();
    assert_eq!(done.text(), "y\n141", "SIGPIPE is as the shell expects it, and not ignored");
}

#[test]
fn a_background_child_neither_delays_the_result_nor_dies() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let started = Instant::now();
    let done = sandbox.sh("sleep 1000.25 & echo hi").ok();
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    assert_eq!(done.stdout, b"hi\n");
    until_true("the child runs", || lives(&sandbox, "1000.25"));
    // What it writes after the end is discarded, and it gets no signal for that.
    let done =
        sandbox.sh("(while :; do echo noise; sleep 0.01; done) & echo first; echo $! > /tmp/noisy").ok();
    assert!(done.text().lines().any(|line| line == "first"), "{}", done.text());
    let length = sandbox.command(done.id())["stdout"]["end"].as_u64();
    assert_eq!(length, Some(done.stdout.len() as u64), "the stream ends where the result says");
    sandbox.sh("for i in $(seq 20); do sleep 0.02; kill -0 $(cat /tmp/noisy) || exit 1; done").ok();
}

/// Starts processes in every way that escapes a naive kill, each marked with `mark` on its command line.
fn forks_everywhere(mark: &str) -> String {
    format!(
        "sleep {mark}1 & setsid sleep {mark}2 & (setsid sh -c 'sleep {mark}3 & setsid sleep {mark}4 &' &) \n\
         nohup sleep {mark}5 >/dev/null 2>&1 & python3 -c 'import os,time\n\
if os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  os.close(0); os.close(1); os.close(2); os.execvp(\"sleep\", [\"sleep\", \"{mark}6\"])\n os._exit(0)\nos.wait()'\n"
    )
}

#[track_caller]
fn all_six_live(sandbox: &Sandbox, mark: &str) {
    until_true("the whole tree lives", || (1..=6).all(|n| lives(sandbox, &format!("{mark}{n}"))));
}

#[test]
fn a_timeout_takes_the_whole_tree_and_nothing_else() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let neighbour = sandbox.spawn(json!({"script": forks_everywhere("7777.") + "wait"}));
    all_six_live(&sandbox, "7777.");
    let done = sandbox
        .run(json!({"script": forks_everywhere("8888.") + "echo ready; sleep 1000", "timeout_seconds": 2}));
    assert_eq!(done.outcome(), "timed_out", "{}", done.body);
    assert_eq!(done.stdout, b"ready\n", "its output is kept");
    until_true("the tree is gone", || !lives(&sandbox, "8888."));
    all_six_live(&sandbox, "7777.");
    assert_eq!(sandbox.command(&neighbour)["state"], "running");
    sandbox.kill(&neighbour).expect(204);
    assert_eq!(sandbox.ended(&neighbour)["result"]["outcome"], "killed");
    until_true("the tree is gone", || !lives(&sandbox, "7777."));
}

#[test]
fn a_command_that_ignores_sigterm_dies_of_its_timeout() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let done = sandbox.run(json!({
        "argv": ["python3", "-c", "import signal,time\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n  except (OSError, ValueError): pass\nprint('deaf', flush=True)\nwhile True: time.sleep(1000)"],
        "timeout_seconds": 1,
    }));
    assert_eq!(done.outcome(), "timed_out");
    assert_eq!(done.stdout, b"deaf\n");
    assert_eq!(done.body["result"]["signal"], 9);
}

#[test]
fn a_command_may_tidy_up_at_its_timeout() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let done = sandbox.run(json!({"script": "trap 'echo tidy; exit 3' TERM; echo ready; while :; do sleep 0.05; done", "timeout_seconds": 0.5}));
    assert_eq!(done.outcome(), "timed_out");
    assert_eq!(done.stdout, b"ready\ntidy\n");
}

#[test]
fn timeouts_of_zero_mean_none() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let done = sandbox
        .run(json!({"script": "sleep 0.2; echo done", "timeout_seconds": 0, "idle_timeout_seconds": 0}));
    assert_eq!(done.ok().stdout, b"done\n");
}

#[test]
fn an_idle_timeout_ends_the_silent_and_spares_the_talking() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let silent = sandbox.run(json!({"script": "echo last words; sleep 1000", "idle_timeout_seconds": 0.5}));
    assert_eq!(silent.outcome(), "idle_timed_out");
    assert_eq!(silent.stdout, b"last words\n");
    let talking = sandbox.run(
        json!({"script": "for i in $(seq 30); do echo $i >&2; sleep 0.1; done", "idle_timeout_seconds": 2}),
    );
    assert_eq!(talking.outcome(), "exited", "{}", talking.body);
}

#[test]
fn a_timeout_strikes_while_the_daemon_is_down() {
    let mut daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let id = sandbox.spawn(json!({"argv": ["sleep", "1000.125"], "timeout_seconds": 1}));
    sandbox.running(&id);
    daemon.kill();
    until_true("init has ended the command by itself", || !lives(&sandbox, "1000.125"));
    daemon.start_again();
    assert_eq!(daemon.sandbox_of(&sandbox.id).ended(&id)["result"]["outcome"], "timed_out");
}

/// Init owns the timers. The host enforces them if init does not.
#[test]
fn a_timeout_strikes_although_init_is_stopped() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let neighbour = sandbox.spawn(json!({"argv": ["sleep", "1000.25"]}));
    let id = sandbox
        .spawn(json!({"script": forks_everywhere("9999.") + "echo ready; sleep 1000", "timeout_seconds": 3}));
    sandbox.wrote(&id, 6);
    let init = sandbox.init();
    send_signal(init, Signal::STOP);
    let ended = sandbox.ended(&id);
    assert_eq!(ended["result"]["outcome"], "timed_out", "{ended}");
    assert!(ended["result"]["exit_code"].is_null(), "how it reacted to the end is unknown: {ended}");
    let message = ended["result"]["message"].as_str().unwrap_or_default();
    assert!(message.contains("did not answer") && message.contains("missing"), "{ended}");
    assert_eq!(ended["stdout"]["end"], 6, "output received so far is kept");
    assert!(!lives(&sandbox, "9999."), "its whole tree is dead");
    assert!(lives(&sandbox, "1000.25"), "and nothing else");
    // When init continues, everything works, and the result stays as it was.
    send_signal(init, Signal::CONT);
    assert_eq!(sandbox.sh("echo well").ok().text(), "well");
    assert_eq!(sandbox.command(&id)["result"], ended["result"]);
    assert_eq!(sandbox.command(&neighbour)["state"], "running");
    assert_eq!(sandbox.get()["state"], "running");
}

#[test]
fn a_timeout_strikes_although_the_command_starves_init() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"cpu": "50m"}));
    let busy = "for i in $(seq 100); do (while :; do :; done) & done; echo ready; while :; do :; done";
    let done = sandbox.run(json!({"script": busy, "timeout_seconds": 2}));
    assert_eq!(done.outcome(), "timed_out", "{}", done.body);
    until_true("all of it is gone", || {
        sandbox.processes().iter().filter(|process| !shoal_tests::audit::is_dead(**process)).count() == 1
    });
    assert_eq!(sandbox.sh("echo well").ok().text(), "well");
}

#[test]
fn signals_reach_the_process_group() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    for (spelling, name) in [("SIGUSR1", "USR1"), ("INT", "INT"), ("15", "TERM"), ("sighup", "HUP")] {
        let id = sandbox.spawn(json!({"script": format!("trap 'echo got {name}; exit 5' {name}; echo ready; while :; do sleep 0.02; done")}));
        sandbox.wrote(&id, 6);
        let answer = sandbox.signal(&id, spelling);
        assert!(matches!(answer.status, 200 | 204), "{spelling}: {}", answer.describe());
        let ended = sandbox.ended(&id);
        assert_eq!(ended["result"]["exit_code"], 5, "{spelling}: {ended}");
        assert_eq!(sandbox.output(&id).stdout, format!("ready\ngot {name}\n").as_bytes());
    }
    let id = sandbox.spawn(json!({"argv": ["sleep", "1000"]}));
    sandbox.running(&id);
    sandbox.signal(&id, "SEGV");
    let result = sandbox.ended(&id)["result"].clone();
    assert_eq!(
        (&result["outcome"], &result["signal"], &result["exit_code"]),
        (&json!("signaled"), &json!(11), &json!(139))
    );
}

#[test]
fn signals_that_do_not_exist_are_refused() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let id = sandbox.spawn(json!({"argv": ["sleep", "1000"]}));
    for signal in ["", "0", "65", "-9", "SIGNOTHING", "9999999999999999999999", "KILL\u{0}"] {
        let answer = sandbox.signal(&id, signal);
        assert_eq!(answer.status, 400, "{signal:?}: {}", answer.describe());
    }
    sandbox.kill(&id).expect(204);
    sandbox.ended(&id);
    sandbox.signal(&id, "INT").expect_refusal(409, "command_ended");
}

#[test]
fn kill_gets_through_while_the_client_reads_nothing() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let mut socket = sandbox.stream(json!({"id": "flood", "argv": ["yes"]}));
    socket.wait_for("command");
    sandbox.wrote("flood", 1 << 20);
    socket.say(&json!({"type": "kill"}));
    assert_eq!(sandbox.ended("flood")["result"]["outcome"], "killed");
}

#[test]
fn a_command_killed_from_inside_is_signaled() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let done = sandbox.sh("kill -9 $$");
    assert_eq!((done.outcome(), done.exit_code()), ("signaled", Some(137)));
    assert_eq!(done.body["result"]["signal"], 9);
}

#[test]
fn scripts_beyond_the_kernels_limit_for_one_argument_run() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    for length in [200 << 10, 10 << 20] {
        let script = format!("data='{}'; echo ${{#data}}", "x".repeat(length));
        assert_eq!(sandbox.sh(&script).ok().text(), length.to_string());
    }
}

#[test]
fn a_long_script_has_its_stdin_and_its_arguments_to_itself() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let script = format!(": '{}'\ncat; echo code $?; exit 9", "x".repeat(300 << 10));
    let done = sandbox.sh(&script);
    assert_eq!((done.text().as_str(), done.exit_code()), ("code 0", Some(9)));
}

#[test]
fn an_argument_of_ten_mebibytes_is_a_typed_failure() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let done = sandbox.run(json!({"argv": ["echo", "x".repeat(10 << 20)]}));
    assert_eq!(done.outcome(), "failed_to_start", "{:?}", done.body["result"]);
    assert!(
        done.body["result"]["message"].as_str().is_some_and(|text| text.contains("too long")),
        "{}",
        done.body["result"]
    );
    assert_eq!(sandbox.sh("echo alive").ok().text(), "alive");
}

#[test]
fn a_body_beyond_the_limit_is_refused() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let answer = sandbox.post_command(&json!({"script": "x".repeat(40 << 20)}));
    answer.expect_refusal(413, "body_too_large");
    let answer = sandbox.post_command(&json!({"script": "x".repeat((16 << 20) + 1)}));
    answer.expect_refusal(400, "invalid_request");
}

#[test]
fn what_cannot_start_says_why_with_the_shells_code() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    sandbox.sh("echo text > /tmp/plain; mkdir /tmp/directory; printf '#!/no/such/interpreter\\n' > /tmp/orphan; chmod +x /tmp/orphan").ok();
    let check = |body: Value, code: Option<i64>, word: &str| {
        let done = sandbox.run(body);
        assert_eq!(done.outcome(), "failed_to_start", "{}", done.body);
        assert_eq!(done.exit_code(), code, "{}", done.body);
        let message = done.body["result"]["message"].as_str().expect("a sentence");
        assert!(message.contains(word), "{message}");
    };
    check(json!({"argv": ["no-such-program"]}), Some(127), "no-such-program");
    check(json!({"argv": ["/no/such/program"]}), Some(127), "/no/such/program");
    check(json!({"argv": ["/tmp/plain"]}), Some(126), "/tmp/plain");
    check(json!({"argv": ["/tmp/directory"]}), Some(126), "/tmp/directory");
    check(json!({"argv": ["/tmp/plain/below"]}), Some(127), "/tmp/plain/below");
    check(json!({"argv": ["true"], "cwd": "/no/such/place"}), None, "/no/such/place");
    check(json!({"argv": ["true"], "cwd": "/tmp/plain"}), None, "/tmp/plain");
    check(json!({"argv": ["true"], "user": "nobody-like-this"}), None, "nobody-like-this");
    let orphan = sandbox.run(json!({"argv": ["/tmp/orphan"]}));
    assert!(matches!(orphan.exit_code(), Some(126 | 127)), "{}", orphan.body);
    // Through a shell these are the shell's own codes.
    assert_eq!(sandbox.sh("no-such-program").exit_code(), Some(127));
    assert_eq!(sandbox.sh("/tmp/plain").exit_code(), Some(126));
    assert_eq!(sandbox.sh("echo (").exit_code(), Some(2));
}

#[test]
fn every_wrong_field_of_a_command_is_refused_by_name() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    for body in [
        json!({}),
        json!({"argv": ["true"], "script": "true"}),
        json!({"argv": []}),
        json!({"argv": [""]}),
        json!({"argv": "true"}),
        json!({"argv": [1]}),
        json!({"argv": ["true", "a\u{0}b"]}),
        json!({"script": "echo a\u{0}b"}),
        json!({"script": 1}),
        json!({"argv": ["true"], "cwd": "relative"}),
        json!({"argv": ["true"], "cwd": ""}),
        json!({"argv": ["true"], "cwd": "/a\u{0}"}),
        json!({"argv": ["true"], "user": ""}),
        json!({"argv": ["true"], "user": "a\u{0}"}),
        json!({"argv": ["true"], "env": {"A=B": "x"}}),
        json!({"argv": ["true"], "env": {"": "x"}}),
        json!({"argv": ["true"], "env": {"A": "\u{0}"}}),
        json!({"argv": ["true"], "env": {"A": null}}),
        json!({"argv": ["true"], "timeout_seconds": -1}),
        json!({"argv": ["true"], "timeout_seconds": 1e300}),
        json!({"argv": ["true"], "timeout_seconds": "1"}),
        json!({"argv": ["true"], "idle_timeout_seconds": -0.001}),
        json!({"argv": ["true"], "id": ""}),
        json!({"argv": ["true"], "id": "a/b"}),
        json!({"argv": ["true"], "id": ".."}),
        json!({"argv": ["true"], "id": "x".repeat(129)}),
        json!({"argv": ["true"], "stdin": "yes"}),
        json!({"argv": ["true"], "terminal": {"rows": 0, "columns": 80}}),
        json!({"argv": ["true"], "terminal": {"rows": 70_000, "columns": 80}}),
        json!({"argv": ["true"], "colour": "red"}),
    ] {
        let answer = sandbox.post_command(&body);
        let shown: String = body.to_string().chars().take(100).collect();
        assert_eq!(answer.status, 400, "{shown}: {}", answer.describe());
        answer.expect_refusal(400, "invalid_request");
    }
    let list = daemon.get(&sandbox.path("/commands")).expect(200);
    assert_eq!(list["commands"], json!([]), "nothing was started");
}

#[test]
fn wrong_messages_on_the_websocket_are_refused_and_the_stream_goes_on() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let mut socket = sandbox.stream(json!({"argv": ["cat"], "stdin": true}));
    socket.wait_for("command");
    for text in [
        "",
        "{",
        "[]",
        "{\"type\":\"dance\"}",
        "{\"type\":\"signal\",\"signal\":\"NOPE\"}",
        "{\"type\":\"resize\",\"rows\":1,\"columns\":1}",
    ] {
        socket.say_text(text);
        let refused = socket.wait_for("refused");
        assert!(refused["code"].is_string() && refused["message"].is_string(), "{text}: {refused}");
    }
    socket.write(b"still here");
    socket.say(&json!({"type": "stdin_end"}));
    assert_eq!(socket.collect(Collected::default()).stdout, b"still here");
}

#[test]
fn a_websocket_whose_first_message_is_wrong_is_told_and_closed() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    for first in [
        "{}",
        "{\"type\":\"kill\"}",
        "{\"type\":\"start\"}",
        "{\"type\":\"start\",\"argv\":[\"true\"],\"script\":\"x\"}",
        "not json",
    ] {
        let mut socket = sandbox.open_socket("/commands/stream").expect("the stream opens");
        socket.say_text(first);
        let mut refused = false;
        loop {
            match socket.hear() {
                Said::Event(event) if event["type"] == "refused" => refused = event["code"].is_string(),
                Said::Event(event) => panic!("{first}: {event}"),
                Said::Output { .. } => panic!("{first}: output"),
                Said::Closed(_) => break,
            }
        }
        assert!(refused, "{first}: closed without an error");
    }
}

#[test]
fn a_chosen_id_starts_once() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let body =
        json!({"id": "only.once:1", "script": "echo run >> /tmp/count; sleep 0.2; wc -l < /tmp/count"});
    let answers: Vec<String> = std::thread::scope(|scope| {
        let asking: Vec<_> = (0..6).map(|_| scope.spawn(|| sandbox.run(body.clone()).ok().text())).collect();
        asking.into_iter().map(|one| one.join().expect("no thread panics")).collect()
    });
    assert_eq!(answers, ["1"; 6]);
    assert_eq!(sandbox.run(body).ok().text(), "1", "also when it is over");
    sandbox
        .post_command(&json!({"id": "only.once:1", "script": "echo other"}))
        .expect_refusal(409, "command_id_reused");
    assert_eq!(sandbox.sh("wc -l < /tmp/count").ok().text(), "1");
}

#[test]
fn commands_are_listed_in_pages_oldest_first() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let made: Vec<String> =
        (0..7).map(|_| sandbox.run(json!({"argv": ["true"]})).ok().id().to_owned()).collect();
    let (mut seen, mut target) = (Vec::new(), sandbox.path("/commands?limit=3"));
    loop {
        let page = daemon.get(&target).expect(200);
        for command in page["commands"].as_array().expect("a list") {
            assert_eq!(command["state"], "ended");
            seen.push(command["id"].as_str().expect("an id").to_owned());
        }
        let Some(cursor) = page["next_cursor"].as_str() else { break };
        target = sandbox.path(&format!("/commands?limit=3&cursor={cursor}"));
    }
    assert_eq!(seen, made);
    daemon.get(&sandbox.path("/commands/unknown")).expect_refusal(404, "command_not_found");
}

#[test]
fn environment_directory_and_user_are_as_asked() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"env": {"A": "sandbox", "B": "sandbox"}}));
    let done = sandbox
        .run(json!({"script": "echo $A $B; pwd; id -un; echo $HOME $USER", "env": {"B": "command"}}))
        .ok();
    assert_eq!(done.text(), "sandbox command\n/workspace\nroot\n/root root");
    let done = sandbox.run(json!({"argv": ["pwd"], "cwd": "/usr/lib"})).ok();
    assert_eq!(done.text(), "/usr/lib");
    let done =
        sandbox.run(json!({"script": "id -u; id -g; id -G; echo $HOME", "user": "nobody", "cwd": "/"})).ok();
    let lines: Vec<String> = done.text().lines().map(str::to_owned).collect();
    assert_eq!(lines[0], "65534");
    assert_ne!(lines[1], "0");
    assert!(!lines[2].split(' ').any(|group| group == "0"), "{lines:?}");
    let done = sandbox.run(json!({"script": "id -u; id -g", "user": "1234:5678", "cwd": "/"})).ok();
    assert_eq!(done.text(), "1234\n5678");
}

#[test]
fn a_removed_default_directory_does_not_stop_commands() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    sandbox.sh("cd / && rm -rf /workspace").ok();
    assert_eq!(sandbox.run(json!({"argv": ["pwd"]})).ok().text(), "/");
}

#[test]
fn the_pid_is_the_guests_own() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let done = sandbox.sh("echo $$").ok();
    assert_eq!(done.text(), done.body["pid"].to_string());
}

#[test]
fn zombies_are_reaped() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    sandbox.sh("for i in $(seq 200); do (setsid true &) ; done").ok();
    until_true("no zombie is left", || {
        let count = sandbox.python(
            "import os\nn = 0\nfor p in os.listdir('/proc'):\n  if p.isdigit():\n    try:\n      n += open(f'/proc/{p}/stat').read().rsplit(')', 1)[1].split()[0] == 'Z'\n    except OSError: pass\nprint(n)",
        );
        count.ok().text() == "0"
    });
}

#[test]
fn a_terminal_is_one() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let mut socket = sandbox.stream(json!({
        "script": "tty -s && stty size; trap 'stty size' WINCH; read line; echo read $line; \
                   until [ -e /tmp/go ]; do sleep 0.02; done; exec sleep 1000.375",
        "stdin": true,
        "terminal": {"rows": 31, "columns": 97},
    }));
    let mut all = Collected::default();
    let mut hear_until = |socket: &mut shoal_tests::Socket, text: &str| loop {
        if String::from_utf8_lossy(&all.stdout).contains(text) {
            return;
        }
        match socket.hear() {
            Said::Output { stream, offset, bytes } => all.add(stream, offset, &bytes),
            Said::Event(_) => {}
            Said::Closed(code) => {
                panic!("closed with {code:?} before {text}: {:?}", String::from_utf8_lossy(&all.stdout))
            }
        }
    };
    hear_until(&mut socket, "31 97");
    socket.write(b"hello\n");
    hear_until(&mut socket, "read hello");
    socket.say(&json!({"type": "resize", "rows": 11, "columns": 22}));
    hear_until(&mut socket, "11 22");
    // A shell that waits for a child may treat an interrupt as meant for the child; a program of its own does not.
    sandbox.sh("touch /tmp/go").ok();
    until_true("the program has the terminal", || lives(&sandbox, "1000.375"));
    socket.write(b"\x03");
    let ended = socket.collect(all);
    assert_eq!((&ended.result()["signal"], &ended.result()["exit_code"]), (&json!(2), &json!(130)));
}

#[test]
fn a_slow_reader_of_one_command_delays_no_other() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    // These have no reader; each fills every buffer on the way.
    let mut stuck: Vec<_> =
        (0..4).map(|n| sandbox.stream(json!({"id": format!("stuck-{n}"), "argv": ["yes"]}))).collect();
    for (n, socket) in stuck.iter_mut().enumerate() {
        socket.wait_for("command");
        sandbox.wrote(&format!("stuck-{n}"), 2 << 20);
    }
    let length = 4_000_000;
    let mut socket = sandbox.stream(json!({"argv": ["python3", "-c", ALL_BYTES, length.to_string()]}));
    let all = socket.collect(Collected::default());
    is_all_bytes(&all.stdout, length, false);
    for _ in 0..20 {
        assert_eq!(sandbox.sh("echo quick").ok().text(), "quick");
    }
    for n in 0..4 {
        sandbox.kill(&format!("stuck-{n}")).expect(204);
        assert_eq!(sandbox.ended(&format!("stuck-{n}"))["result"]["outcome"], "killed");
    }
}

/// More output than is kept, and a slow reader: the command waits for it, or the reader is disconnected and comes
/// back. Either way every byte arrives.
#[test]
fn a_reader_slower_than_the_command_loses_nothing_that_it_can_still_ask_for() {
    let spawn = shoal_tests::Spawn { config: "output_kept = \"1Mi\"\n".into(), ..Default::default() };
    let daemon = spawn.start();
    let sandbox = daemon.sandbox();
    let length = 6_000_000;
    let mut socket =
        sandbox.stream(json!({"id": "slow", "argv": ["python3", "-c", ALL_BYTES, length.to_string()]}));
    socket.wait_for("command");
    // Reads nothing until far more than is kept has been written, or the command waits for its reader.
    let mut last = 0;
    let mut quiet = Instant::now();
    until_true("the command waits or is far ahead", || {
        let end = sandbox.command("slow")["stdout"]["end"].as_u64().expect("a number");
        if end != last {
            (last, quiet) = (end, Instant::now());
        }
        end > 4_000_000 || quiet.elapsed() > Duration::from_secs(1)
    });
    let all = socket.collect(Collected::default());
    assert_eq!(all.closed, None, "the reader makes progress, so it is not disconnected");
    assert!(all.lost.is_empty(), "{:?}", all.lost);
    is_all_bytes(&all.stdout, length, false);
    is_all_bytes(&all.stderr, length, true);
}

/// Resident anonymous memory in KiB.
fn memory_kib(process: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("the process lives");
    let line =
        status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("the kernel reports memory");
    line.trim().trim_end_matches(" kB").trim().parse().expect("a number")
}

#[test]
fn alone_a_stream_of_a_gibibyte_takes_constant_memory() {
    const LENGTH: usize = 1 << 30;
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    sandbox.sh("head -c 8000000 /dev/zero").ok();
    let init = sandbox.init();
    let before = (memory_kib(daemon.pid()), memory_kib(init));
    let mut socket = sandbox.stream(json!({"argv": ["head", "-c", LENGTH.to_string(), "/dev/zero"]}));
    let (mut length, mut most) = (0, before);
    loop {
        match socket.hear() {
            Said::Output { offset, bytes, .. } => {
                assert_eq!(offset, length as u64);
                assert!(bytes.iter().all(|byte| *byte == 0));
                length += bytes.len();
                if length % (8 << 20) < bytes.len() {
                    most.0 = most.0.max(memory_kib(daemon.pid()));
                    most.1 = most.1.max(memory_kib(init));
                }
            }
            Said::Event(event) if event["type"] == "ended" => break,
            Said::Event(event) => assert_eq!(event["type"], "command", "{event}"),
            Said::Closed(code) => panic!("closed with {code:?} after {length} bytes"),
        }
    }
    assert_eq!(length, LENGTH);
    assert!(most.0 < before.0 + (48 << 10), "the daemon grew from {} to {} KiB", before.0, most.0);
    assert!(most.1 < before.1 + (8 << 10), "init grew from {} to {} KiB", before.1, most.1);
}

#[test]
fn what_fell_off_the_front_is_told() {
    let spawn = shoal_tests::Spawn { config: "output_kept = \"1Mi\"\n".into(), ..Default::default() };
    let daemon = spawn.start();
    let sandbox = daemon.sandbox();
    let id = sandbox.spawn(json!({"argv": ["python3", "-c", ALL_BYTES, "8000000"]}));
    let ended = sandbox.ended(&id);
    let (start, end) =
        (ended["stdout"]["start"].as_u64().expect("a number"), ended["stdout"]["end"].as_u64());
    assert_eq!(end, Some(8_000_000));
    // Old output is dropped in pieces, so a little less or more than configured is kept.
    assert!((8_000_000 - (2 << 20)..=8_000_000 - (3 << 18)).contains(&start), "{ended}");
    let mut socket = sandbox.attach(&id, &Collected::default());
    let lost = socket.wait_for("lost");
    assert_eq!((&lost["from"], &lost["to"]), (&json!(0), &json!(start)), "{lost}");
    let answer = sandbox.run(json!({"id": id, "argv": ["python3", "-c", ALL_BYTES, "8000000"]}));
    assert_eq!(answer.body["stdout_cut"], true, "an answer that leaves something out says so");
}

#[test]
fn a_long_answer_says_that_it_is_cut_and_the_stream_has_the_rest() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let done = sandbox.run(json!({"argv": ["head", "-c", "40000000", "/dev/zero"]})).ok();
    assert_eq!(done.body["stdout"]["end"], 40_000_000);
    if done.stdout.len() < 40_000_000 {
        assert_eq!(done.body["stdout_cut"], true);
    }
    assert_eq!(sandbox.output(done.id()).stdout.len(), 40_000_000);
}

#[test]
fn many_commands_at_once_each_have_their_own_output() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    std::thread::scope(|scope| {
        for n in 0..32 {
            let sandbox = &sandbox;
            scope.spawn(move || {
                for round in 0..5 {
                    let done = sandbox.sh(&format!("echo {n}.{round}; echo e{n}.{round} >&2; exit {n}"));
                    assert_eq!(done.stdout, format!("{n}.{round}\n").as_bytes());
                    assert_eq!(done.stderr, format!("e{n}.{round}\n").as_bytes());
                    assert_eq!(done.exit_code(), Some(n));
                }
            });
        }
    });
}

#[test]
fn a_client_that_leaves_does_not_end_its_command() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let mut socket = sandbox
        .stream(json!({"id": "left", "script": "until [ -e /tmp/go ]; do sleep 0.02; done; echo went"}));
    socket.wait_for("command");
    drop(socket);
    sandbox.sh("touch /tmp/go").ok();
    assert_eq!(sandbox.ended("left")["result"]["exit_code"], 0);
    assert_eq!(sandbox.output("left").stdout, b"went\n");
}

#[test]
fn deleting_a_sandbox_ends_the_commands_that_someone_waits_for() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let mut socket = sandbox.stream(json!({"id": "long", "argv": ["sleep", "1000"]}));
    socket.wait_for("command");
    let waiting = {
        let sandbox = sandbox.clone();
        std::thread::spawn(move || sandbox.post_command(&json!({"id": "long", "argv": ["sleep", "1000"]})))
    };
    sandbox.running("long");
    sandbox.delete();
    let heard = socket.collect(Collected::default());
    match &heard.ended {
        Some(ended) => assert_eq!(ended["result"]["outcome"], "sandbox_gone", "{ended}"),
        None => assert!(heard.closed.is_some()),
    }
    let answer = waiting.join().expect("no thread panics");
    match answer.status {
        200 => assert_eq!(answer.json()["result"]["outcome"], "sandbox_gone", "{}", answer.describe()),
        _ => assert!(matches!(answer.status, 404 | 409), "{}", answer.describe()),
    }
}
