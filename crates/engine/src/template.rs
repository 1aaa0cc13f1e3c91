//! What sandboxes are made from. There is one template so far, built in; nothing here is kept in rows.

use wire::launch::Limits;

use crate::model::SandboxName;

/// Where a command runs that named no place, in an image that names none.
pub(crate) const WORKSPACE: &str = "/workspace";

/// The name of the built-in template.
pub const DEFAULT: &str = "default";

/// What a sandbox starts from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Template {
    pub name: &'static str,
    pub image: &'static str,
    pub limits: Limits,
    /// In order. Init adds `HOME`, `USER`, `LOGNAME` and `SHELL` of the user, so they are not set here.
    pub env: &'static [(&'static str, &'static str)],
}

impl Template {
    /// The template of that name.
    pub fn find(name: &str) -> Option<&'static Self> {
        (name == DEFAULT).then_some(&HOST)
    }

    /// The one that is meant when none is named.
    pub fn usual() -> &'static Self {
        &HOST
    }
}

/// The machine's own programs under a private writable layer: needs no download.
const HOST: Template = Template {
    name: DEFAULT,
    image: "host",
    limits: Limits {
        // One whole processor: what an interactive command line feels normal with.
        cpu_millis: 1000,
        // Enough for a compiler or a Python process with a data frame; a machine of 24 GiB takes about twenty.
        memory_bytes: 1024 * 1024 * 1024,
        // A parallel build or a browser stays below it; a fork bomb does not exhaust a `pid_max` of 32,768.
        pids: 1024,
    },
    env: &[
        ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
        // Programs fall back to ASCII without it; this locale exists in every C library.
        ("LANG", "C.UTF-8"),
    ],
};

/// What a sandbox may ask for at least and at most, beside the key's limits and the machine's capacity.
pub(crate) const CPU_MILLIS_MIN: u32 = 10;
/// Init and a shell fit; less would only make sandboxes that die at once.
pub(crate) const MEMORY_BYTES_MIN: u64 = 16 * 1024 * 1024;

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
