//! How much time init takes: a command from start to end, and bytes per second.
//!
//! `cargo bench -p shoal-guest` prints the numbers for people to judge: on a machine that is busy with other work
//! they prove nothing. The tests assert what can be asserted.

#[allow(dead_code)] // What the tests use and this does not.
#[path = "../tests/guest/support.rs"]
mod support;

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use support::{Client, Event, Guest, Mode, argv, shell, static_init};
use wire::guest::{FromInit, Stream, ToInit};

fn main() {
    measure_a_command();
    measure_throughput();
}

/// The median and, for machines that are busy with something else, the tenth percentile.
fn middle(mut times: Vec<Duration>) -> (Duration, Duration) {
    times.sort_unstable();
    (times[times.len() / 2], times[times.len() / 10])
}

fn measure_a_command() {
    const ROUNDS: u32 = 2_000;
    let plain = || {
        let began = Instant::now();
        assert!(Command::new("/bin/true").status().expect("it runs").success());
        began.elapsed()
    };
    let bare = middle((0..ROUNDS).map(|_| plain()).collect());
    println!("spawn and wait of /bin/true from this process: {bare:?}");
    for mode in [Mode::Walk, Mode::Groups] {
        let Some(guest) = Guest::try_start(mode, &static_init()) else { continue };
        let mut client = guest.connect();
        let mut handle = 0;
        let mut run = |client: &mut Client| {
            handle += 1;
            let began = Instant::now();
            client.run(argv(handle, &["/bin/true"]));
            began.elapsed()
        };
        let times = (0..ROUNDS).map(|_| run(&mut client)).collect();
        println!("start to end of /bin/true through init, {mode:?}: {:?}", middle(times));
        let floor = client.run(shell(1_000_000, FORK_FLOOR));
        println!("  fork, exec and wait in the same namespace: {}", floor.stdout_text().trim());
    }
}

/// The lower bound: what a plain fork, exec and wait of the same program costs from a small process.
const FORK_FLOOR: &str = r#"python3 -c '
import os, time
times = []
for _ in range(500):
    began = time.perf_counter()
    pid = os.posix_spawn("/bin/true", ["/bin/true"], {})
    os.waitpid(pid, 0)
    times.append(time.perf_counter() - began)
times.sort()
print("%.0f us (posix_spawn from Python)" % (times[250] * 1e6))
'"#;

fn measure_throughput() {
    const LENGTH: u64 = 4 << 30;
    let guest = Guest::try_start(Mode::Walk, &static_init()).expect("it starts");
    let mut client = guest.connect();
    client.start(argv(1, &["head", "-c", &LENGTH.to_string(), "/dev/zero"]));
    let ticks = |guest: &Guest| {
        let stat = fs::read_to_string(format!("/proc/{}/stat", guest.pid())).expect("init lives");
        let fields: Vec<u64> = stat
            .rsplit(')')
            .next()
            .expect("a stat")
            .split_ascii_whitespace()
            .skip(11)
            .take(2)
            .map(|field| field.parse().expect("a number"))
            .collect();
        fields[0] + fields[1]
    };
    let (before, began) = (ticks(&guest), Instant::now());
    let mut received = 0;
    while received < LENGTH {
        received += count_next(&mut client);
    }
    let elapsed = began.elapsed().as_secs_f64();
    let of_init = (ticks(&guest) - before) as f64 / 100.0;
    let gigabytes = LENGTH as f64 / 1e9;
    println!(
        "{:.2} GB/s end to end; init used {of_init:.2} s of cpu, {:.2} GB/s per core",
        gigabytes / elapsed,
        gigabytes / of_init
    );
}

fn count_next(client: &mut Client) -> u64 {
    match client.next() {
        Event::Data { handle, stream: Stream::Stdout, offset, bytes } => {
            let length = bytes.len() as u64;
            client.send(&ToInit::Ack { handle, stream: Stream::Stdout, offset: offset + length });
            length
        }
        Event::Message(FromInit::Started { .. }) => 0,
        other => panic!("{other:?}"),
    }
}
