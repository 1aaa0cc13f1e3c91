//! A line that tells how far something is, for people who wait longer than a moment.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What takes less is not worth a line.
const SHOWN_AFTER: Duration = Duration::from_secs(1);
/// Between two looks.
const STEP_MS: u64 = 200;

/// Counts bytes, and shows them on stderr where that is a terminal.
pub struct Progress {
    began: Instant,
    total: Option<u64>,
    done: AtomicU64,
    /// When the line was last written, in milliseconds since the beginning.
    shown_at: AtomicU64,
    shown: AtomicBool,
    wanted: bool,
}

impl Progress {
    /// Nothing yet, of so much.
    pub fn new(total: Option<u64>) -> Self {
        Self {
            began: Instant::now(),
            total,
            done: AtomicU64::new(0),
            shown_at: AtomicU64::new(0),
            shown: AtomicBool::new(false),
            wanted: std::io::stderr().is_terminal(),
        }
    }

    /// So much more.
    pub fn add(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let elapsed = self.began.elapsed();
        if !self.wanted || elapsed < SHOWN_AFTER {
            return;
        }
        let now = elapsed.as_millis() as u64;
        let before = self.shown_at.load(Ordering::Relaxed);
        let due = now >= before + STEP_MS;
        if due && self.shown_at.compare_exchange(before, now, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            self.shown.store(true, Ordering::Relaxed);
            // If it cannot be shown, nothing is lost.
            let _ = write!(std::io::stderr(), "\r\x1b[K{}", line(done, self.total, elapsed));
        }
    }

    /// How much it was.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown.load(Ordering::Relaxed) {
            let _ = write!(std::io::stderr(), "\r\x1b[K"); // As above.
        }
    }
}

fn line(done: u64, total: Option<u64>, elapsed: Duration) -> String {
    let rate = done as f64 / elapsed.as_secs_f64().max(0.001);
    let of = match total {
        Some(total) if total > 0 => {
            let percent = done.saturating_mul(100) / total;
            let left = Duration::from_secs_f64(total.saturating_sub(done) as f64 / rate.max(1.0));
            format!(" of {}  {percent:3} %  {} s left", size(total), left.as_secs())
        }
        Some(_) | None => String::new(),
    };
    format!("{}{of}  {}/s", size(done), size(rate as u64))
}

/// Bytes for people.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short() {
        for (bytes, text) in
            [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 20, "5.0 MiB"), (u64::MAX, "16384.0 PiB")]
        {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn the_line_tells_how_much_and_how_fast() {
        let second = Duration::from_secs(2);
        assert_eq!(line(4 << 20, Some(8 << 20), second), "4.0 MiB of 8.0 MiB   50 %  2 s left  2.0 MiB/s");
        assert_eq!(line(4 << 20, None, second), "4.0 MiB  2.0 MiB/s");
        assert_eq!(line(0, Some(0), Duration::ZERO), "0 B  0 B/s");
    }
}
