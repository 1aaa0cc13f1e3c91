//! Returns free memory to the kernel after a burst of requests.
//!
//! The allocator keeps what was freed for the next request. After many large bodies or many connections at once, a
//! daemon would hold hundreds of megabytes for good.

use std::time::Duration;

/// How often the daemon looks at its own size: a read of one small file.
const INTERVAL: Duration = Duration::from_secs(5);
/// Growth from which on it is worth looking for free memory. What a handful of requests need stays.
const GROWTH_MIN: u64 = 16 << 20;

/// Runs for as long as the daemon serves. `size` is the daemon's resident memory in bytes.
pub async fn give_back(size: fn() -> Option<u64>) {
    let mut least = size();
    loop {
        tokio::time::sleep(INTERVAL).await;
        let now = size();
        if !has_grown(least, now) {
            least = least.min(now).or(now);
            continue;
        }
        // Locks the allocator for a moment, so on a thread of its own.
        if let Err(error) = tokio::task::spawn_blocking(runtime::sys::trim_memory).await {
            tracing::warn!(%error, "cannot return free memory to the kernel");
        }
        least = size();
    }
}

fn has_grown(least: Option<u64>, now: Option<u64>) -> bool {
    matches!((least, now), (Some(least), Some(now)) if now >= least.saturating_add(GROWTH_MIN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_returned_after_growth_only() {
        assert!(has_grown(Some(1 << 20), Some(17 << 20)));
        assert!(!has_grown(Some(2 << 20), Some(17 << 20)));
        assert!(!has_grown(Some(64 << 20), Some(1 << 20)));
        assert!(!has_grown(None, Some(1 << 30)));
    }
}
