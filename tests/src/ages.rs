//! Programs of other versions: copies of this build that report another version of themselves and of their protocols.
//!
//! The numbers are text in the executable, after a label. Building a second program for each version would take
//! minutes; versions only differ in how two sides negotiate, which these numbers alone decide.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use crate::daemon::{Home, binary, random_hex};

/// What differs in a program. `None`: as built.
#[derive(Debug, Clone, Copy, Default)]
pub struct Age {
    /// The version it reports; as long as the workspace's own.
    pub version: Option<&'static str>,
    /// The oldest and newest protocol version of the init in its sandboxes.
    pub init: Option<(u32, u32)>,
    /// The same for its daemon.
    pub daemon: Option<(u32, u32)>,
}

impl Age {
    /// Writes the program into a test's directory.
    #[track_caller]
    pub fn program(&self, home: &Home) -> PathBuf {
        let mut bytes = fs::read(binary()).expect("the program can be read");
        if let Some(version) = self.version {
            replace(&mut bytes, "shoal version ", version);
        }
        let range = |(min, max)| format!("{min:04}-{max:04}");
        if let Some(init) = self.init {
            replace(&mut bytes, "shoal-init speaks ", &range(init));
        }
        if let Some(daemon) = self.daemon {
            replace(&mut bytes, "shoal-daemon speaks ", &range(daemon));
        }
        let path = home.join(format!("shoal-{}", random_hex(4)));
        fs::write(&path, bytes).expect("the test's own directory takes files");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("it is ours");
        path
    }
}

/// Replaces the number after the label.
#[track_caller]
fn replace(bytes: &mut [u8], label: &str, number: &str) {
    let mut found = 0;
    let mut from = 0;
    while let Some(at) = find(&bytes[from..], label.as_bytes()).map(|at| from + at + label.len()) {
        from = at;
        let Some(place) = bytes.get_mut(at..at + number.len()) else { break };
        if place.iter().all(|byte| byte.is_ascii_digit() || matches!(byte, b'.' | b'-')) {
            place.copy_from_slice(number.as_bytes());
            found += 1;
        }
    }
    assert_eq!(found, 1, "the program must contain `{label}` with a number exactly once");
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    let (first, rest) = wanted.split_first()?;
    let mut from = 0;
    loop {
        let at = from + bytes[from..].iter().position(|byte| byte == first)?;
        if bytes[at + 1..].starts_with(rest) {
            return Some(at);
        }
        from = at + 1;
    }
}
