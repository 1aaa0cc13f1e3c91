//! Positions of events.

use std::fmt;
use std::str::FromStr;

/// An event's position: what it is counted from, which is another for each owner, and its number. Numbers rise, with gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventId {
    pub(crate) start: u64,
    pub(crate) serial: u64,
}

impl EventId {
    /// Its number among the events of its owner.
    pub fn serial(self) -> u64 {
        self.serial
    }
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{}", self.start, self.serial)
    }
}

/// The text is not an event's id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it must be the id of an event")]
pub struct BadEventId;

impl FromStr for EventId {
    type Err = BadEventId;

    fn from_str(text: &str) -> Result<Self, BadEventId> {
        let (start, serial) = text.split_once('-').ok_or(BadEventId)?;
        let start = u64::from_str_radix(start, 16).map_err(|_| BadEventId)?;
        Ok(Self { start, serial: serial.parse().map_err(|_| BadEventId)? })
    }
}
