//! What init costs: memory while it is idle, time for a command, bytes per second.
//!
//! Memory is asserted on the static build that goes into sandboxes. Times are printed by `--ignored` tests and belong to whoever
//! reads them; a machine that runs other tests at the same time proves nothing about them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use wire::guest::{FromInit, Handle, Stream, ToInit};

use crate::support::{Client, Event, Guest, Mode, Outcome, PATIENCE, argv, is_root, kib_of, shell};

/// What an idle init may have for itself.
const IDLE_PRIVATE_KIB_MAX: u64 = 128;

/// Builds init as it goes into sandboxes: static, for size. Cached beside the other builds of this workspace.
fn static_init() -> PathBuf {
    if let Some(init) = std::env::var_os("SHOAL_TEST_INIT") {
        return init.into();
    }
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("static-init");
    let built = Command::new(env!("CARGO"))
        .args([
            "build",
            "--quiet",
            "--offline",
            "--locked",
            "--package",
            "shoal-guest",
            "--bin",
            "shoal-init",
        ])
        .args(["--profile", "release", "--target", "x86_64-unknown-linux-gnu", "--target-dir"])
        .arg(&target)
        .env("CARGO_ENCODED_RUSTFLAGS", "-Ctarget-feature=+crt-static\x1f-Crelocation-model=static")
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "s")
        .env("CARGO_PROFILE_RELEASE_LTO", "fat")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
        .env("CARGO_PROFILE_RELEASE_PANIC", "abort")
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .expect("cargo runs this test");
    assert!(built.success());
    target.join("x86_64-unknown-linux-gnu/release/shoal-init")
}

fn private_kib(guest: &Guest) -> (u64, String) {
    let path = format!("/proc/{}/smaps_rollup", guest.pid());
    let rollup = fs::read_to_string(path).expect("root may look");
    (kib_of(&rollup, "Private_Clean:") + kib_of(&rollup, "Private_Dirty:"), rollup)
}

/// Waits until init has given back what it can: its memory stays at or below the budget, or it never gets there.
fn settled_private_kib(guest: &Guest) -> (u64, String) {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let (private, rollup) = private_kib(guest);
        if private <= IDLE_PRIVATE_KIB_MAX || Instant::now() > deadline {
            return (private, rollup);
        }
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

#[test]
fn an_idle_init_costs_next_to_nothing() {
    if !is_root() {
        println!("skipped: only root may look at the memory of a process that hides");
        return;
    }
    let init = static_init();
    println!("the static init has {} KiB on disk", fs::metadata(&init).expect("it was built").len() / 1024);
    // With two of them that have done the same, the program itself is shared, as it is between sandboxes.
    let other = Guest::try_start(Mode::Walk, &init).expect("it starts");
    other.connect().run(shell(1, "seq 1000000")).status();
    let guest = Guest::try_start(Mode::Walk, &init).expect("it starts");
    let mut client = guest.connect();
    let (fresh, _) = settled_private_kib(&guest);
    client.run(shell(1, "seq 1000000")).status();
    for handle in 2..50 {
        client.run(shell(handle, "echo hi")).assert_printed("hi\n");
    }
    client.sync();
    let (used, rollup) = settled_private_kib(&guest);
    println!("private memory: {fresh} KiB when fresh, {used} KiB idle after use, of which\n{rollup}");
    assert!(fresh <= IDLE_PRIVATE_KIB_MAX, "{fresh} KiB when fresh");
    assert!(used <= IDLE_PRIVATE_KIB_MAX, "{used} KiB after use: {rollup}");
}

/// The median and, for machines that are busy with something else, the tenth percentile.
fn middle(mut times: Vec<Duration>) -> (Duration, Duration) {
    times.sort_unstable();
    (times[times.len() / 2], times[times.len() / 10])
}

#[test]
#[ignore = "a measurement"]
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

/// The floor, from a small process: what a plain fork, exec and wait of the same program costs there.
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

#[test]
#[ignore = "a measurement"]
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
        "{:.2} GB/s end to end; init took {of_init:.2} s of cpu, {:.2} GB/s per core",
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

#[test]
fn memory_comes_back_after_a_flood() {
    let guest = Guest::start(Mode::Walk);
    let mut client = guest.connect();
    client.run(argv(1, &["true"])).assert_printed("");
    let quiet = guest.status_kib("RssAnon:");
    let mut outcomes: BTreeMap<Handle, Outcome> = BTreeMap::new();
    for handle in 2..18 {
        client.start(argv(handle, &["head", "-c", "900000", "/dev/zero"]));
    }
    let mut left = 16;
    while left > 0 {
        left -= usize::from(client.take_next(&mut outcomes).is_some());
    }
    client.sync();
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = guest.status_kib("RssAnon:");
        if now <= quiet + 128 {
            break;
        }
        assert!(Instant::now() < deadline, "it was {quiet} KiB and stays at {now} KiB");
        std::thread::park_timeout(Duration::from_millis(20));
    }
}
