//! The time, in a form that survives changed clocks, suspended machines and restarts.
//!
//! Wall time alone cannot say how long ago something was: the clock may have been changed since. So a [`Stamp`] also
//! holds the time since the boot, on a clock that cannot be set and that keeps running while the machine is suspended
//! (CLOCK_BOOTTIME), and the boot's id. Within one boot only that counts. Across a reboot there is only wall time; it
//! is trusted once the machine has been up for [`BOOT_GRACE`], within which time servers correct a wrong clock, and
//! from then on the stamp belongs to this boot too.

use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use rustix::time::{ClockId, clock_gettime};

/// How long after a boot the wall clock is not trusted about the time before the boot.
pub const BOOT_GRACE: Duration = Duration::from_secs(600);

/// Where the kernel reports the boot id, a random number.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Reads the time, and waits. The machine's clocks in a daemon, a manual one in tests.
#[async_trait]
pub trait Clock: Send + Sync + 'static {
    /// Now.
    fn now(&self) -> Moment;

    /// Returns after this long, or somewhat later.
    async fn sleep(&self, length: Duration);
}

/// An instant, on both clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// Wall time. It may jump.
    pub wall: SystemTime,
    /// The boot.
    pub boot: u128,
    /// Time since that boot, including time suspended.
    pub since_boot: Duration,
}

/// The machine's clocks.
#[derive(Debug)]
pub struct SystemClock {
    boot: u128,
}

impl SystemClock {
    /// Reads the boot id.
    pub fn new() -> io::Result<Self> {
        let text = std::fs::read_to_string(BOOT_ID)?;
        let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
        let boot = u128::from_str_radix(&digits, 16).map_err(io::Error::other)?;
        Ok(Self { boot })
    }
}

#[async_trait]
impl Clock for SystemClock {
    fn now(&self) -> Moment {
        let since_boot = clock_gettime(ClockId::Boottime);
        // The kernel counts from the boot, so neither part is negative.
        let since_boot = Duration::new(since_boot.tv_sec as u64, since_boot.tv_nsec as u32);
        Moment { wall: SystemTime::now(), boot: self.boot, since_boot }
    }

    async fn sleep(&self, length: Duration) {
        // This clock stops while the machine is suspended; callers that must not be late check again now and then.
        tokio::time::sleep(length).await;
    }
}

/// A time, as a row stores it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Microseconds since 1970.
    pub wall_micros: i64,
    /// The boot.
    pub boot: u128,
    /// Microseconds since that boot; negative for earlier times that have been settled since.
    pub since_boot_micros: i64,
}

impl Stamp {
    /// Now.
    pub fn of(now: Moment) -> Self {
        Self { wall_micros: wall_micros(now.wall), boot: now.boot, since_boot_micros: micros(now.since_boot) }
    }

    /// A time since the boot, in the boot of `now`.
    pub fn in_this_boot(since_boot: Duration, now: Moment) -> Self {
        let ago = micros(now.since_boot) - micros(since_boot);
        Self {
            wall_micros: wall_micros(now.wall) - ago,
            boot: now.boot,
            since_boot_micros: micros(since_boot),
        }
    }

    /// A wall time of which nothing else is known: the wall clock is trusted as of now.
    pub fn of_wall(wall: SystemTime, now: Moment) -> Self {
        Self { wall_micros: wall_micros(wall), boot: !now.boot, since_boot_micros: 0 }.settled(now)
    }

    /// The wall time.
    pub fn wall(self) -> SystemTime {
        UNIX_EPOCH + Duration::from_micros(u64::try_from(self.wall_micros).unwrap_or(0))
    }

    /// The same on this boot's clock, if that is possible. A time in the future becomes now: a wrong clock must not
    /// keep anything for ever.
    pub fn settled(self, now: Moment) -> Self {
        let here = Self::of(now);
        if self.boot == now.boot {
            return if self.since_boot_micros > here.since_boot_micros { here } else { self };
        }
        if self.wall_micros > here.wall_micros {
            return here;
        }
        if now.since_boot < BOOT_GRACE {
            return self;
        }
        let ago = here.wall_micros - self.wall_micros;
        Self { boot: now.boot, since_boot_micros: here.since_boot_micros - ago, ..self }
    }

    /// How long ago it was.
    pub fn age(self, now: Moment) -> Age {
        let here = Self::of(now);
        let (ago, doubt) = if self.boot == now.boot {
            (here.since_boot_micros - self.since_boot_micros, Duration::ZERO)
        } else {
            (here.wall_micros - self.wall_micros, BOOT_GRACE.saturating_sub(now.since_boot))
        };
        Age { elapsed: Duration::from_micros(u64::try_from(ago).unwrap_or(0)), doubt }
    }

    /// The same, later by this much.
    #[cfg(test)]
    pub fn plus(self, length: Duration) -> Self {
        let length = micros(length);
        Self {
            wall_micros: self.wall_micros.saturating_add(length),
            since_boot_micros: self.since_boot_micros.saturating_add(length),
            ..self
        }
    }
}

/// Now, with the precision of a row.
pub(crate) fn now() -> SystemTime {
    in_micros(SystemTime::now())
}

/// A time with the precision of a row: microseconds.
pub(crate) fn in_micros(time: SystemTime) -> SystemTime {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    UNIX_EPOCH + Duration::from_micros(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}

/// How long ago something was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Age {
    /// As far as is known.
    pub elapsed: Duration,
    /// For how long from now on this must not be acted upon.
    pub doubt: Duration,
}

fn micros(length: Duration) -> i64 {
    i64::try_from(length.as_micros()).unwrap_or(i64::MAX)
}

fn wall_micros(wall: SystemTime) -> i64 {
    wall.duration_since(UNIX_EPOCH).map_or(0, micros)
}

#[cfg(test)]
mod tests {
    use super::*;

    const YEAR: u64 = 365 * 86_400;

    fn moment(boot: u128, since_boot: u64, wall: u64) -> Moment {
        Moment {
            wall: UNIX_EPOCH + Duration::from_secs(wall),
            boot,
            since_boot: Duration::from_secs(since_boot),
        }
    }

    #[track_caller]
    fn check(then: Moment, now: Moment, elapsed: u64, doubt: u64) {
        let age = Stamp::of(then).settled(now).age(now);
        let expected = Age { elapsed: Duration::from_secs(elapsed), doubt: Duration::from_secs(doubt) };
        assert_eq!(age, expected, "from {then:?} to {now:?}");
    }

    #[test]
    fn within_a_boot_nobody_can_set_the_clock_that_counts() {
        let then = moment(1, 5000, 1_000_000);
        check(then, moment(1, 5060, 1_000_060), 60, 0);
        check(then, moment(1, 5060, 1_000_060 + 10 * YEAR), 60, 0);
        check(then, moment(1, 5060, 0), 60, 0);
        // Suspended for a day: the boot's clock kept running.
        check(then, moment(1, 5000 + 86_400, 1_000_060), 86_400, 0);
    }

    #[test]
    fn across_a_reboot_wall_time_counts_once_the_machine_is_up_for_a_while() {
        let then = moment(1, 5000, 1_000_000);
        check(then, moment(2, 600, 1_003_600), 3600, 0);
        // Early after the boot nothing is acted upon, and a wrong time is corrected later.
        check(then, moment(2, 10, 1_000_000 + YEAR), YEAR, 590);
        let early = Stamp::of(then).settled(moment(2, 10, 1_000_000 + YEAR));
        assert_eq!(early.age(moment(2, 700, 1_000_800)).elapsed, Duration::from_secs(800));
    }

    #[test]
    fn what_was_settled_stays_so_when_the_clock_is_set() {
        let settled = Stamp::of(moment(1, 5000, 1_000_000)).settled(moment(2, 700, 1_003_600));
        assert_eq!(settled.age(moment(2, 760, 1_003_600 + YEAR)).elapsed, Duration::from_secs(3660));
        assert_eq!(settled.age(moment(2, 760, 0)).elapsed, Duration::from_secs(3660));
    }

    #[test]
    fn a_stamp_from_the_future_counts_from_now() {
        // The wall clock was years ahead when this was written, and is right since the reboot.
        let now = moment(2, 900, 1_000_000);
        let settled = Stamp::of(moment(1, 5000, 1_000_000 + 10 * YEAR)).settled(now);
        assert_eq!(settled.age(moment(2, 960, 1_000_060)).elapsed, Duration::from_secs(60));
        // As above, seen early after the boot.
        let early = Stamp::of(moment(1, 5000, 1_000_000 + 10 * YEAR)).settled(moment(2, 1, 1_000_000));
        assert_eq!(
            early.age(moment(2, 61, 1_000_060)),
            Age { elapsed: Duration::from_secs(60), doubt: Duration::ZERO }
        );
        // A machine that was reset to an earlier state.
        let settled = Stamp::of(moment(1, 5000, 1_000_000)).settled(moment(1, 4000, 1_000_000));
        assert_eq!(settled.age(moment(1, 4060, 1_000_060)).elapsed, Duration::from_secs(60));
    }

    #[test]
    fn a_wall_time_alone_is_believed_once() {
        let now = moment(1, 5000, 1_000_000);
        let stamp = Stamp::of_wall(UNIX_EPOCH + Duration::from_secs(999_000), now);
        assert_eq!(stamp.age(moment(1, 5010, 7)).elapsed, Duration::from_secs(1010));
    }

    #[tokio::test]
    async fn the_machines_clock_goes_on() {
        let clock = SystemClock::new().expect("the kernel names its boot");
        let first = clock.now();
        clock.sleep(Duration::from_millis(2)).await;
        let second = clock.now();
        assert_eq!(first.boot, second.boot);
        assert!(second.since_boot >= first.since_boot + Duration::from_millis(2));
    }
}
