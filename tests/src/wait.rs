//! Waiting for a condition, never for a time.

use std::time::{Duration, Instant};

/// How long anything may take before it counts as hanging. Generous: two cores run the whole suite.
pub const DEADLINE: Duration = Duration::from_secs(60);
/// Interval between two checks of a condition.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Waits until `look` returns something, and panics with `what` after [`DEADLINE`].
#[track_caller]
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let give_up = Instant::now() + DEADLINE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < give_up, "waited {DEADLINE:?} in vain until {what}");
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Like [`until`] for a condition that is true or not.
#[track_caller]
pub fn until_true(what: &str, mut holds: impl FnMut() -> bool) {
    until(what, || holds().then_some(()));
}
