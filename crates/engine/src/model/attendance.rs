//! How long a command waits for someone to attach to it.

use std::time::Duration;

/// For how long a command waits for someone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Attendance {
    /// Ends it when nobody was attached for so long; zero: as soon as the last one leaves. `None`: it runs on.
    pub unattended: Option<Duration>,
    /// After its end it can be found for so long. `None`: as long as there is room.
    pub kept: Option<Duration>,
}
