//! How long a command waits for a caller to attach to it.

use std::time::Duration;

/// How long a command waits for a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Attendance {
    /// Ends the command when no caller was attached for this long; zero: as soon as the last one leaves. `None`: it
    /// keeps running.
    pub unattended: Option<Duration>,
    /// How long it can be found after its end. `None`: as long as there is room.
    pub kept: Option<Duration>,
}
