//! How long ago something was, for people. Programs get the timestamp itself.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

const MINUTE: u64 = 60;
const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;

/// `2 minutes ago`, for a timestamp of the API. One that cannot be read is shown as it is.
pub fn ago(timestamp: &str) -> String {
    match seconds_since(timestamp) {
        Some(seconds) => format!("{} ago", counted(seconds)),
        None => timestamp.to_owned(),
    }
}

/// The same with the timestamp behind it, where there is room for both.
pub fn ago_and_when(timestamp: &str) -> String {
    match seconds_since(timestamp) {
        Some(seconds) => format!("{} ago ({timestamp})", counted(seconds)),
        None => timestamp.to_owned(),
    }
}

/// Whether a timestamp of the API is at most so long ago. One that cannot be read is.
pub fn is_within(timestamp: &str, length: Duration) -> bool {
    seconds_since(timestamp).is_none_or(|seconds| Duration::from_secs(seconds) <= length)
}

fn seconds_since(timestamp: &str) -> Option<u64> {
    let then = UNIX_EPOCH + Duration::from_secs(epoch_seconds(timestamp)?);
    // A clock that was set back makes it zero.
    Some(SystemTime::now().duration_since(then).unwrap_or_default().as_secs())
}

fn counted(seconds: u64) -> String {
    let (number, unit) = match seconds {
        ..MINUTE => (seconds, "second"),
        MINUTE..HOUR => (seconds / MINUTE, "minute"),
        HOUR..DAY => (seconds / HOUR, "hour"),
        DAY.. => (seconds / DAY, "day"),
    };
    format!("{number} {unit}{}", if number == 1 { "" } else { "s" })
}

/// Seconds since 1970 of `2026-01-31T09:05:00.250Z`, the one form that the API writes.
fn epoch_seconds(timestamp: &str) -> Option<u64> {
    let (date, time) = timestamp.strip_suffix('Z')?.split_once('T')?;
    let mut date = date.split('-').map(|part| part.parse::<u64>().ok());
    let mut time = time.split(':').map(|part| part.split('.').next()?.parse::<u64>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let (hour, minute, second) = (time.next()??, time.next()??, time.next()??);
    let in_range = (1970..=9999).contains(&year) && (1..=12).contains(&month) && (1..=31).contains(&day);
    if !in_range || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    // Years begin in March here, so that the leap day is the last of its year.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1;
    // From the first of March of the year 0 to the first of January 1970.
    let days = days.checked_sub(719_468)?;
    Some(days * DAY + hour * HOUR + minute * MINUTE + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_are_read() {
        for (text, seconds) in [
            ("1970-01-01T00:00:00Z", 0),
            ("1970-01-01T00:00:01.999Z", 1),
            ("2000-02-29T12:00:00.000Z", 951_825_600),
            ("2026-01-31T09:05:00.250Z", 1_769_850_300),
            ("2026-11-17T22:00:00Z", 1_794_952_800),
        ] {
            assert_eq!(epoch_seconds(text), Some(seconds), "{text}");
        }
        for text in ["", "built in", "2026-01-31", "2026-13-01T00:00:00Z", "2026-01-31T09:05:00+01:00"] {
            assert_eq!(epoch_seconds(text), None, "{text}");
            assert_eq!(ago(text), text, "shown as it is");
        }
    }

    #[test]
    fn ages_are_short() {
        for (seconds, text) in
            [(0, "0 seconds"), (1, "1 second"), (61, "1 minute"), (7199, "1 hour"), (172_800, "2 days")]
        {
            assert_eq!(counted(seconds), text);
        }
    }
}
