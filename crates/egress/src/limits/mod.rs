//! How much a sandbox may do: token buckets. The caller passes the time in, so that tests need not wait.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// What a sandbox, or all sandboxes of an owner together, may use. Zero means no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Connections open at once.
    pub connections_max: u32,
    /// New connections per second; a burst of twice as many passes.
    pub connections_per_second: u32,
    /// Bytes per second, both directions together.
    pub bytes_per_second: u64,
    /// Bytes in all, both directions together.
    pub bytes_max: u64,
}

impl Default for Limits {
    /// Enough for a package manager that opens hundreds of connections, too little for a scan of the internet.
    fn default() -> Self {
        Self { connections_max: 1024, connections_per_second: 200, bytes_per_second: 0, bytes_max: 0 }
    }
}

/// A token bucket. It starts full.
#[derive(Debug, Clone)]
pub struct Bucket {
    per_second: f64,
    room: f64,
    tokens: f64,
    at: Instant,
}

impl Bucket {
    /// `per_second` tokens a second, at most `room` at once.
    pub fn new(per_second: u64, room: u64, now: Instant) -> Self {
        let (per_second, room) = (per_second as f64, room as f64);
        Self { per_second, room, tokens: room, at: now }
    }

    fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.tokens = (self.tokens + passed * self.per_second).min(self.room);
        self.at = self.at.max(now);
    }

    /// Takes `count` tokens if there are that many.
    pub fn take(&mut self, count: u64, now: Instant) -> bool {
        self.refill(now);
        let enough = self.tokens >= count as f64;
        if enough {
            self.tokens -= count as f64;
        }
        enough
    }

    /// Takes `count` tokens in any case, and returns how long to wait until the debt is paid.
    pub fn owe(&mut self, count: u64, now: Instant) -> Duration {
        self.refill(now);
        self.tokens -= count as f64;
        if self.tokens >= 0.0 || self.per_second <= 0.0 {
            return Duration::ZERO;
        }
        Duration::from_secs_f64((-self.tokens / self.per_second).min(DEBT_SECONDS_MAX))
    }
}

/// The longest wait that one debt causes.
const DEBT_SECONDS_MAX: f64 = 60.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_gives_its_room_and_then_its_rate() {
        let start = Instant::now();
        let mut bucket = Bucket::new(10, 20, start);
        assert_eq!((0..30).filter(|_| bucket.take(1, start)).count(), 20);
        let later = start + Duration::from_secs(1);
        assert_eq!((0..30).filter(|_| bucket.take(1, later)).count(), 10);
        let much_later = start + Duration::from_secs(1000);
        assert_eq!((0..30).filter(|_| bucket.take(1, much_later)).count(), 20);
    }

    #[test]
    fn a_debt_takes_its_time() {
        let start = Instant::now();
        let mut bucket = Bucket::new(1000, 1000, start);
        assert_eq!(bucket.owe(1000, start), Duration::ZERO);
        assert_eq!(bucket.owe(500, start), Duration::from_millis(500));
        assert_eq!(bucket.owe(0, start + Duration::from_secs(2)), Duration::ZERO);
    }
}
