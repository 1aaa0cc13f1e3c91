//! A line that tells how far something is, for people who wait longer than a moment.
//!
//! On stderr, and only where that is a terminal. What takes less than a second shows nothing.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use crate::output::print;
use crate::terminal;

/// What takes less is not worth a line.
const SHOWN_AFTER: Duration = Duration::from_secs(1);
/// Between two looks.
const STEP_MS: u64 = 200;
/// Between two pictures of something that turns.
const TURN: Duration = Duration::from_millis(100);
const TURNING: [char; 10] = ['⠋', '⠙', '⠹', '⠸', '⠼', '⠴', '⠦', '⠧', '⠇', '⠏'];
/// The bar, at least and at most.
const BAR_MIN: usize = 10;
const BAR_MAX: usize = 40;
/// Goes to the beginning of the line and clears it.
const CLEAR: &str = "\r\x1b[K";

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
            let width = usize::from(terminal::size().columns).saturating_sub(1);
            draw(&line(done, self.total, elapsed, width));
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
            draw("");
        }
    }
}

/// Replaces the line. If it cannot be shown, nothing is lost.
fn draw(line: &str) {
    let _ = write!(std::io::stderr(), "{CLEAR}{line}");
}

fn line(done: u64, total: Option<u64>, elapsed: Duration, width: usize) -> String {
    let rate = done as f64 / elapsed.as_secs_f64().max(0.001);
    let speed = format!("{}/s", size(rate as u64));
    let Some(total) = total.filter(|total| *total > 0) else {
        return print::cut(&format!("{}  {speed}", size(done)), width);
    };
    // A file that grows while it is read is more than was said.
    let part = (done as f64 / total as f64).min(1.0);
    let left = Duration::from_secs_f64(total.saturating_sub(done) as f64 / rate.max(1.0));
    let text =
        format!("{:3.0} %  {} of {}  {speed}  {} left", part * 100.0, size(done), size(total), length(left));
    match width.checked_sub(text.chars().count() + 1) {
        Some(room) if room >= BAR_MIN => {
            let bar = room.min(BAR_MAX);
            let full = (part * bar as f64) as usize;
            format!("{}{} {text}", "━".repeat(full), "─".repeat(bar - full))
        }
        Some(_) | None => print::cut(&text, width),
    }
}

/// Something that takes as long as it takes: says what, on stderr, once a person may wonder. Until it is dropped.
pub struct Waiting {
    state: Arc<Mutex<WaitingState>>,
    task: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct WaitingState {
    shown: bool,
    over: bool,
}

impl Waiting {
    /// For something that begins now, as it reads after "is".
    pub fn new(what: &'static str) -> Self {
        let state = Arc::new(Mutex::new(WaitingState::default()));
        let task = std::io::stderr().is_terminal().then(|| tokio::spawn(turn(what, Arc::clone(&state))));
        Self { state, task }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.over = true;
        if std::mem::take(&mut state.shown) {
            draw("");
        }
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

async fn turn(what: &'static str, state: Arc<Mutex<WaitingState>>) {
    let began = Instant::now();
    tokio::time::sleep(SHOWN_AFTER).await;
    for picture in TURNING.into_iter().cycle() {
        {
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            // Under the lock, so that nothing is drawn after the end.
            if state.over {
                return;
            }
            state.shown = true;
            draw(&format!("{picture} {what}  {}", length(began.elapsed())));
        }
        tokio::time::sleep(TURN).await;
    }
}

/// A length of time for people.
pub fn length(length: Duration) -> String {
    let seconds = length.as_secs();
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, seconds) => format!("{seconds} s"),
        (0, minutes, seconds) => format!("{minutes} min {seconds} s"),
        (hours, minutes, _) => format!("{hours} h {minutes} min"),
    }
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
    fn sizes_and_lengths_are_short() {
        for (bytes, text) in
            [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 20, "5.0 MiB"), (u64::MAX, "16384.0 PiB")]
        {
            assert_eq!(size(bytes), text);
        }
        for (seconds, text) in [(0, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3_660, "1 h 1 min")] {
            assert_eq!(length(Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn the_line_tells_how_much_and_how_fast_and_fits() {
        let second = Duration::from_secs(2);
        let text = " 50 %  4.0 MiB of 8.0 MiB  2.0 MiB/s  2 s left";
        assert_eq!(line(4 << 20, Some(8 << 20), second, 50), text);
        assert_eq!(line(4 << 20, Some(8 << 20), second, 57), format!("━━━━━───── {text}"));
        assert_eq!(line(4 << 20, Some(8 << 20), second, 10), " 50 %  4.…");
        assert_eq!(line(9 << 20, Some(8 << 20), second, 60).chars().next(), Some('━'), "it has grown");
        assert_eq!(line(4 << 20, None, second, 80), "4.0 MiB  2.0 MiB/s");
        assert_eq!(line(0, Some(0), Duration::ZERO, 80), "0 B  0 B/s");
    }
}
