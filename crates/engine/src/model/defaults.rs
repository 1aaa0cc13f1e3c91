//! What sandboxes are made from when nobody says otherwise, and the least that any of them may ask for. What people write is in
//! `templates`.

use wire::launch::Limits;

use crate::model::SandboxName;

/// Where a command runs that named no place, in an image and a template that name none.
pub(crate) const WORKSPACE: &str = "/workspace";

/// The name of the built-in template: the machine's own programs under a private writable layer, which need no download.
pub const DEFAULT: &str = "default";

/// What a sandbox may use where nobody says how much.
pub const LIMITS: Limits = Limits {
    // One whole processor: what an interactive command line feels normal with.
    cpu_millis: 1000,
    // Enough for a compiler or a Python process with a data frame; a machine of 24 GiB takes about twenty.
    memory_bytes: 1024 * 1024 * 1024,
    // A parallel build or a browser stays below it; a fork bomb does not exhaust a `pid_max` of 32,768.
    pids: 1024,
    // A project with its packages and a build; a store of the usual size holds several, and none can fill it alone.
    disk_bytes: Some(10 * 1024 * 1024 * 1024),
};

/// Below every image's own, in order. Init adds `HOME`, `USER`, `LOGNAME` and `SHELL` of the user, so they are not set here.
pub(crate) const ENV: &[(&str, &str)] = &[
    ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
    // Programs fall back to ASCII without it; this locale exists in every C library.
    ("LANG", "C.UTF-8"),
];

/// What a sandbox may ask for at least and at most, beside the key's limits and the machine's capacity.
pub(crate) const CPU_MILLIS_MIN: u32 = 10;
/// Init and a shell fit; less would only make sandboxes that die at once.
pub(crate) const MEMORY_BYTES_MIN: u64 = 16 * 1024 * 1024;

/// The first files of a sandbox fit, and a few more.
pub(crate) const DISK_BYTES_MIN: u64 = 16 * 1024 * 1024;
/// More is no limit that anybody means.
pub(crate) const DISK_BYTES_MAX: u64 = 64 << 40;

/// A name for a sandbox that was given none: readable, and unlikely to be taken.
pub(crate) fn made_up_name(random: u64) -> SandboxName {
    const KINDS: [&str; 16] = [
        "amber", "brisk", "calm", "coral", "deep", "eager", "gentle", "keen", "lunar", "merry", "quiet",
        "rapid", "silver", "sunny", "tidal", "vivid",
    ];
    const FISH: [&str; 16] = [
        "anchovy", "bream", "cod", "dory", "eel", "goby", "herring", "koi", "mackerel", "minnow", "perch",
        "pike", "salmon", "sprat", "trout", "tuna",
    ];
    let kind = KINDS[(random & 0xf) as usize];
    let fish = FISH[((random >> 4) & 0xf) as usize];
    let text = format!("{kind}-{fish}-{:06x}", (random >> 8) & 0xff_ffff);
    SandboxName::parse(&text).expect("it is short and plain")
}
