//! How often the loop reads a flood of output.
//!
//! A program that writes small pieces as fast as it can would wake the loop for every piece, the loop would wake the
//! daemon, and the daemon the client: more time would go into waking than into moving bytes. Once the loop detects
//! this, it sleeps for a moment between two reads, and sends what was written meanwhile as one piece. A program that
//! writes now and then is never delayed.

use std::time::Duration;

/// How long the loop sleeps. Far below what a person or an agent notices, long enough for a pipe to fill.
pub const NAP: Duration = Duration::from_micros(100);
/// Output that came this soon after the loop had begun to wait belongs to a flood.
const SOON: Duration = Duration::from_micros(100);
/// Less than this at once is a dialogue, where every answer counts.
const PIECE_MIN: usize = 1024;
/// Pieces in a row that make a flood.
const PIECES_BEFORE_NAPPING: u8 = 16;

/// Counts pieces that came too fast.
#[derive(Debug, Default)]
pub struct Pace {
    pieces: u8,
}

impl Pace {
    /// Records a turn that began after waiting for `waited` and read `gained` bytes of output. Returns whether to
    /// sleep before the next, after everything has been read.
    pub fn turn(&mut self, waited: Duration, gained: usize) -> bool {
        if gained >= PIECE_MIN && waited <= SOON {
            self.pieces = self.pieces.saturating_add(1);
        } else {
            self.pieces = 0;
        }
        self.pieces >= PIECES_BEFORE_NAPPING
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_told_from_a_conversation() {
        let mut pace = Pace::default();
        let flood = |pace: &mut Pace| (0..1000).filter(|_| pace.turn(Duration::ZERO, 8192)).count();
        assert_eq!(flood(&mut pace), 1000 - usize::from(PIECES_BEFORE_NAPPING - 1));
        assert!(!pace.turn(SOON * 2, 8192), "it paused");
        assert!(flood(&mut pace) > 0);
        assert!(!pace.turn(Duration::ZERO, 80), "a line");
        assert!((0..1000).all(|_| !pace.turn(SOON * 2, 8192)), "steady, but slow");
        assert!((0..1000).all(|_| !pace.turn(Duration::ZERO, 80)), "fast, but small");
    }
}
