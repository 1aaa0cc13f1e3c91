//! Returns free memory to the kernel after a burst of requests.
//!
//! The allocator keeps what was freed for the next request. After many large bodies or many connections at once, a
//! daemon would hold hundreds of megabytes for good.

use std::time::Duration;

/// How often the daemon looks at its own size: a read of one small file.
const INTERVAL: Duration = Duration::from_secs(5);
/// Growth from which on it is worth looking for free memory. What a handful of requests need stays.
const GROWTH_MIN: u64 = 16 << 20;
/// Looks between two attempts while the daemon stays large: a burst may end much later than its first attempt, but
/// memory that is in use for good must not cost an attempt every few seconds.
const LOOKS_BETWEEN_MAX: u32 = 12;

/// Runs for as long as the daemon serves. `size` is the daemon's resident memory in bytes.
pub async fn give_back(size: fn() -> Option<u64>) {
    let mut watch = Watch::new(size());
    loop {
        tokio::time::sleep(INTERVAL).await;
        if !watch.is_due(size()) {
            continue;
        }
        // Locks the allocator for a moment, so on a thread of its own.
        if let Err(error) = tokio::task::spawn_blocking(runtime::sys::trim_memory).await {
            tracing::warn!(%error, "cannot return free memory to the kernel");
        }
        watch.trimmed(size());
    }
}

/// Decides when to ask the allocator for its free memory.
struct Watch {
    /// The smallest size ever seen. An attempt in the middle of a burst must not raise it: what the burst still used
    /// would never be asked for again.
    least: Option<u64>,
    /// The size after the last attempt.
    after: Option<u64>,
    /// Looks to skip before the next attempt, unless the daemon grows again.
    skip: u32,
    /// How many were skipped before the last attempt.
    skipped: u32,
}

impl Watch {
    fn new(size: Option<u64>) -> Self {
        Self { least: size, after: None, skip: 0, skipped: 0 }
    }

    fn is_due(&mut self, now: Option<u64>) -> bool {
        if !has_grown(self.least, now) {
            (self.least, self.after) = (self.least.min(now).or(now), None);
            (self.skip, self.skipped) = (0, 0);
            return false;
        }
        if self.skip > 0 && !has_grown(self.after, now) {
            self.skip -= 1;
            return false;
        }
        true
    }

    fn trimmed(&mut self, now: Option<u64>) {
        self.after = now;
        self.skipped = (2 * self.skipped).clamp(1, LOOKS_BETWEEN_MAX);
        self.skip = self.skipped;
    }
}

fn has_grown(least: Option<u64>, now: Option<u64>) -> bool {
    matches!((least, now), (Some(least), Some(now)) if now >= least.saturating_add(GROWTH_MIN))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn memory_is_returned_after_growth_only() {
        assert!(has_grown(Some(MIB), Some(17 * MIB)));
        assert!(!has_grown(Some(2 * MIB), Some(17 * MIB)));
        assert!(!has_grown(Some(64 * MIB), Some(MIB)));
        assert!(!has_grown(None, Some(1 << 30)));
    }

    #[test]
    fn an_attempt_in_the_middle_of_a_burst_is_repeated_after_it() {
        let mut watch = Watch::new(Some(20 * MIB));
        assert!(watch.is_due(Some(200 * MIB)));
        watch.trimmed(Some(190 * MIB)); // In use: the burst goes on.
        assert!(!watch.is_due(Some(190 * MIB)));
        assert!(watch.is_due(Some(190 * MIB)), "the burst may be over");
        watch.trimmed(Some(25 * MIB));
        assert!(!watch.is_due(Some(25 * MIB)));
    }

    #[test]
    fn a_daemon_that_stays_large_is_rarely_asked_and_growth_always_counts() {
        let mut watch = Watch::new(Some(20 * MIB));
        let attempts = (0..200).filter(|_| {
            let due = watch.is_due(Some(500 * MIB));
            if due {
                watch.trimmed(Some(500 * MIB));
            }
            due
        });
        assert!((10..30).contains(&attempts.count()));
        assert!(watch.is_due(Some(520 * MIB)));
    }
}
