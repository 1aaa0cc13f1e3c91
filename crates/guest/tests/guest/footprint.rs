//! How much memory an idle init uses, in the static build that goes into sandboxes. `cargo bench -p shoal-guest`
//! measures times.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use wire::guest::Handle;

use crate::support::{Guest, Mode, Outcome, PATIENCE, argv, is_root, kib_of, shell, static_init};

/// The most private memory of an idle init.
const IDLE_PRIVATE_KIB_MAX: u64 = 128;

fn private_kib(guest: &Guest) -> (u64, String) {
    let path = format!("/proc/{}/smaps_rollup", guest.pid());
    let rollup = fs::read_to_string(path).expect("root may look");
    (kib_of(&rollup, "Private_Clean:") + kib_of(&rollup, "Private_Dirty:"), rollup)
}

/// Waits until init has returned what it can: its memory falls to the budget, or the wait times out.
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
        println!("skipped: only root can read the memory of a process that is not dumpable");
        return;
    }
    let init = static_init();
    println!("the static init has {} KiB on disk", fs::metadata(&init).expect("it was built").len() / 1024);
    // With two inits that have done the same, the program itself is shared, as it is between sandboxes.
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
