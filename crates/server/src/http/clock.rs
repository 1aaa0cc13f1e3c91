//! Times on the wire: RFC 3339 in UTC, to the millisecond.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use wire::files::Timestamp;

/// The last second of the year 9999.
const CALENDAR_MAX: u64 = 253_402_300_799;

/// `2026-01-31T09:05:00.250Z`. A time before 1970 is written as 1970: none of our rows is that old.
pub fn rfc3339(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let millis = since.subsec_millis();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

/// The time of a guest's file. The guest can set any time; a time outside of the calendar is reported as 1970.
pub fn guest_time(time: &Timestamp) -> String {
    let seconds = u64::try_from(time.seconds).ok().filter(|seconds| *seconds <= CALENDAR_MAX).unwrap_or(0);
    rfc3339(UNIX_EPOCH + Duration::new(seconds, time.nanoseconds))
}

/// Year, month and day of a number of days since 1970-01-01, in the proleptic Gregorian calendar.
/// Counted in years that begin in March, so that the leap day is the last of its year.
fn civil(days: u64) -> (u64, u64, u64) {
    const DAYS_IN_400_YEARS: u64 = 146_097;
    const DAYS_FROM_YEAR_0_TO_1970: u64 = 719_468;
    let days = days + DAYS_FROM_YEAR_0_TO_1970;
    let (era, day) = (days / DAYS_IN_400_YEARS, days % DAYS_IN_400_YEARS);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = if month < 10 { (year, month + 3) } else { (year + 1, month - 9) };
    (era * 400 + year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_instants_are_written_as_the_calendar_says() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399, "2000-02-28T23:59:59.000Z"),
            (951_782_400, "2000-02-29T00:00:00.000Z"),
            (1_709_251_199, "2024-02-29T23:59:59.000Z"),
            (1_767_225_599, "2025-12-31T23:59:59.000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(rfc3339(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
        assert_eq!(rfc3339(UNIX_EPOCH + Duration::from_millis(250)), "1970-01-01T00:00:00.250Z");
    }
}
