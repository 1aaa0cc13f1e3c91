//! Defaults of sandboxes, and their smallest limits. `template` has what people define.

use wire::launch::Limits;

use crate::model::SandboxName;

/// Where a command runs if neither it nor the template nor the image gives a directory.
pub(crate) const WORKSPACE: &str = "/workspace";

/// The name of the built-in template: the machine's own programs under a private writable layer, which need no download.
pub const DEFAULT: &str = "default";

/// Default limits of a sandbox.
pub const LIMITS: Limits = Limits {
    // One whole processor, so that an interactive command line feels normal.
    cpu_millis: 1000,
    // Enough for a compiler or a Python process with a data frame; a machine with 24 GiB holds about twenty.
    memory_bytes: 1024 * 1024 * 1024,
    // A parallel build or a browser stays below it; a fork bomb does not exhaust a `pid_max` of 32,768.
    pids: 1024,
    // A project with its packages and a build; a store of the default size holds several, and none can fill it alone.
    disk_bytes: Some(10 * 1024 * 1024 * 1024),
};

/// Lower precedence than every image's own, in order. Init adds `HOME`, `USER`, `LOGNAME` and `SHELL` of the user, so
/// they are not set here.
pub(crate) const ENV: &[(&str, &str)] = &[
    ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
    // Programs fall back to ASCII without it; this locale exists in every C library.
    ("LANG", "C.UTF-8"),
];

/// The smallest and largest limits that a sandbox may request, beside the key's quota and the machine's capacity.
pub(crate) const CPU_MILLIS_MIN: u32 = 10;
/// Enough for init and a shell; with less, sandboxes would die at once.
pub(crate) const MEMORY_BYTES_MIN: u64 = 16 * 1024 * 1024;

/// Enough for the first files of a sandbox, and a few more.
pub(crate) const DISK_BYTES_MIN: u64 = 16 * 1024 * 1024;
/// A larger limit is a typing error.
pub(crate) const DISK_BYTES_MAX: u64 = 64 << 40;

/// A generated name for a sandbox: readable, and unlikely to be taken.
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
