//! When commands must end: timeouts, idle timeouts, grace, and the time during which the whole sandbox was frozen.
//!
//! Pure: instants come in as milliseconds, decisions go out. `main` acts on them.
//!
//! A paused sandbox is frozen with init in it, while the kernel's clock keeps running. While any deadline is set, the
//! loop wakes at least every [`TICK_MS`]; if the clock has jumped by more than [`FROZEN_GAP_MS`] between two
//! readings, init did not run in between. Either init was frozen, and the gap does not count; or init waited for the
//! processor because its own commands kept that busy, and then the gap counts, or a command could postpone its end
//! for ever. The kernel tells the two apart: it counts how long a runnable process had to wait, and a frozen process
//! is not runnable.

use std::collections::BTreeSet;

use wire::guest::Handle;

/// How often the loop reads the clock while any deadline is set.
pub const TICK_MS: u64 = 1_000;
/// A longer gap between two readings means that init was frozen: twice the tick, so that a late wake-up is not
/// mistaken for a freeze.
pub const FROZEN_GAP_MS: u64 = 2_000;

/// How old the waiting time may be that a gap is compared with.
const WAITED_AGE_MS: u64 = 500;

/// Time as commands experience it: monotonic, without the gaps in which they were frozen.
#[derive(Debug)]
pub struct Clock {
    last: u64,
    frozen: u64,
    /// Init's total waiting time for the processor at the last reading, and the time of that reading.
    waited: u64,
    asked: Option<u64>,
}

impl Clock {
    /// A clock that starts at the given monotonic instant.
    pub fn new(monotonic: u64) -> Self {
        Self { last: monotonic, frozen: 0, waited: 0, asked: None }
    }

    /// Reads the kernel's clock. `watched` says whether the loop has been ticking since the last reading; if it slept
    /// because no deadline was set, a gap means nothing, and there is no deadline to move. `waited` returns init's
    /// total waiting time for the processor.
    pub fn look(&mut self, monotonic: u64, watched: bool, waited: impl FnOnce() -> u64) -> u64 {
        let gap = monotonic.saturating_sub(self.last);
        let stale = self.asked.is_none_or(|at| monotonic.saturating_sub(at) >= WAITED_AGE_MS);
        if watched && stale {
            let waited = waited();
            if gap > FROZEN_GAP_MS && self.asked.is_some() {
                self.frozen += gap.saturating_sub(waited.saturating_sub(self.waited));
            }
            (self.waited, self.asked) = (waited, Some(monotonic));
        }
        self.last = self.last.max(monotonic);
        self.now()
    }

    /// The time at the last reading.
    pub fn now(&self) -> u64 {
        self.last - self.frozen
    }
}

/// What is due for one command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    Nothing,
    /// Ask its processes to end: it ran too long.
    Timeout,
    /// Ask its processes to end: it was silent too long.
    IdleTimeout,
    /// The grace is over.
    Kill,
}

/// The deadlines of one command.
#[derive(Debug)]
pub struct Deadlines {
    timeout_at: Option<u64>,
    idle_ms: Option<u64>,
    last_output: u64,
    grace_ms: u64,
    /// Set once a timeout has expired.
    kill_at: Option<u64>,
}

impl Deadlines {
    /// Deadlines of a command that starts now.
    pub fn new(now: u64, timeout_ms: Option<u64>, idle_ms: Option<u64>, grace_ms: u64) -> Self {
        let timeout_at = timeout_ms.map(|length| after(now, length));
        Self { timeout_at, idle_ms, last_output: now, grace_ms, kill_at: None }
    }

    /// The command has written something.
    pub fn heard(&mut self, now: u64) {
        self.last_output = now;
    }

    /// When to check again. Output moves this; a check that comes too early has no effect.
    pub fn next(&self) -> Option<u64> {
        match self.kill_at {
            Some(at) => Some(at),
            None => [self.timeout_at, self.idle_at()].into_iter().flatten().min(),
        }
    }

    /// What is due now; a timeout that expires starts the grace. Afterwards [`Self::next`] is later than before, or
    /// `None`.
    pub fn strike(&mut self, now: u64) -> Due {
        if let Some(at) = self.kill_at {
            if now < at {
                return Due::Nothing;
            }
            // The kill is repeated until the command is gone, in case the first one hit a process during a fork.
            self.kill_at = Some(after(now, TICK_MS));
            return Due::Kill;
        }
        let due = if self.timeout_at.is_some_and(|at| at <= now) {
            Due::Timeout
        } else if self.idle_at().is_some_and(|at| at <= now) {
            Due::IdleTimeout
        } else {
            return Due::Nothing;
        };
        self.kill_at = Some(after(now, self.grace_ms));
        due
    }

    fn idle_at(&self) -> Option<u64> {
        self.idle_ms.map(|length| after(self.last_output, length))
    }
}

/// The first whole millisecond at which `length` has certainly passed. `now` is rounded down and up to one
/// millisecond too early; a deadline may come late, but never early.
fn after(now: u64, length: u64) -> u64 {
    now.saturating_add(length).saturating_add(1)
}

/// Which command to check next.
#[derive(Debug, Default)]
pub struct Schedule {
    entries: BTreeSet<(u64, Handle)>,
}

impl Schedule {
    /// Check the command at this time.
    pub fn add(&mut self, at: u64, handle: Handle) {
        self.entries.insert((at, handle));
    }

    /// Whether any command waits for a deadline.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Removes and returns a command whose time has come.
    pub fn take_due(&mut self, now: u64) -> Option<Handle> {
        let (at, _) = *self.entries.first()?;
        if at > now { None } else { self.entries.pop_first().map(|(_, handle)| handle) }
    }

    /// How long the loop may sleep: until the next deadline, and never longer than a tick. `None` means no limit.
    pub fn sleep_ms(&self, now: u64) -> Option<u64> {
        let (at, _) = *self.entries.first()?;
        Some(at.saturating_sub(now).min(TICK_MS))
    }

    /// Undoes [`Self::add`].
    pub fn remove(&mut self, at: u64, handle: Handle) {
        self.entries.remove(&(at, handle));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_strikes_once_and_then_the_grace_runs() {
        let mut deadlines = Deadlines::new(1_000, Some(500), None, 200);
        assert_eq!(deadlines.next(), Some(1_501));
        assert_eq!(deadlines.strike(1_500), Due::Nothing, "it may have begun at 1,000.9");
        assert_eq!(deadlines.strike(1_501), Due::Timeout);
        assert_eq!(deadlines.next(), Some(1_702));
        assert_eq!(deadlines.strike(1_701), Due::Nothing);
        assert_eq!(deadlines.strike(1_702), Due::Kill);
    }

    #[test]
    fn output_moves_the_idle_deadline_but_not_the_timeout() {
        let mut deadlines = Deadlines::new(0, Some(1_000), Some(300), 0);
        deadlines.heard(250);
        assert_eq!(deadlines.strike(300), Due::Nothing);
        assert_eq!(deadlines.next(), Some(551));
        assert_eq!(deadlines.strike(551), Due::IdleTimeout);
        let mut deadlines = Deadlines::new(0, Some(1_000), Some(300), 0);
        deadlines.heard(999);
        assert_eq!(deadlines.strike(1_001), Due::Timeout);
    }

    #[test]
    fn lengths_beyond_all_time_never_strike_and_never_overflow() {
        let mut deadlines = Deadlines::new(5, Some(u64::MAX), Some(u64::MAX), u64::MAX);
        assert_eq!(deadlines.strike(u64::MAX - 1), Due::Nothing);
        assert_eq!(Deadlines::new(5, None, None, 0).next(), None);
    }

    /// No process ever waited for the processor.
    fn idle() -> u64 {
        0
    }

    #[test]
    fn a_gap_while_deadlines_are_set_is_time_frozen() {
        let mut clock = Clock::new(10_000);
        assert_eq!(clock.look(11_000, true, idle), 11_000);
        assert_eq!(clock.look(13_000, true, idle), 13_000, "two seconds are a late wake-up");
        assert_eq!(clock.look(73_000, true, idle), 13_000, "a minute is a freeze");
        assert_eq!(clock.look(74_000, true, idle), 14_000);
    }

    #[test]
    fn a_gap_in_which_init_waited_for_the_processor_counts() {
        let mut clock = Clock::new(0);
        clock.look(1_000, true, || 5);
        assert_eq!(clock.look(31_000, true, || 29_905), 30_900, "the rest of the gap was a freeze");
        assert_eq!(clock.look(61_000, true, || 59_905), 60_900);
    }

    #[test]
    fn a_gap_while_nothing_was_pending_is_just_time() {
        let mut clock = Clock::new(0);
        assert_eq!(clock.look(60_000, false, idle), 60_000);
        assert_eq!(clock.look(59_000, true, idle), 60_000, "and it never runs backwards");
    }

    #[test]
    fn a_frozen_gap_shifts_deadlines() {
        let mut clock = Clock::new(0);
        let mut deadlines = Deadlines::new(clock.now(), Some(4_999), None, 0);
        clock.look(1_000, true, idle);
        clock.look(100_000, true, idle);
        assert_eq!(deadlines.strike(clock.now()), Due::Nothing);
        for second in 1..=3 {
            assert_eq!(deadlines.strike(clock.look(100_000 + second * 1_000, true, idle)), Due::Nothing);
        }
        assert_eq!(deadlines.strike(clock.look(104_000, true, idle)), Due::Timeout);
    }

    #[test]
    fn the_loop_sleeps_to_the_next_deadline_and_at_most_a_tick() {
        let mut schedule = Schedule::default();
        assert_eq!(schedule.sleep_ms(0), None);
        schedule.add(5_000, Handle(1));
        assert_eq!(schedule.sleep_ms(0), Some(TICK_MS));
        assert_eq!(schedule.sleep_ms(4_900), Some(100));
        assert_eq!(schedule.sleep_ms(6_000), Some(0));
        assert_eq!(schedule.take_due(4_999), None);
        schedule.add(4_000, Handle(2));
        assert_eq!(schedule.take_due(5_000), Some(Handle(2)));
        schedule.remove(5_000, Handle(1));
        assert!(schedule.is_empty());
    }
}
