//! How values on the command line are read.

use std::time::Duration;

/// Shorter intervals would measure little but the measuring.
const INTERVAL_MIN: Duration = Duration::from_millis(100);
/// A longer one is a mistake.
const INTERVAL_MAX: Duration = Duration::from_secs(3600);

/// A duration: a number with a unit; seconds where there is none.
pub fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || "a duration is a number with a unit, for example 90s, 30m, 12h or 7d".to_owned();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let seconds = match unit {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        _ => return Err(wrong()),
    };
    let number: f64 = number.parse().map_err(|_| wrong())?;
    Duration::try_from_secs_f64(number * seconds).map_err(|_| wrong())
}

/// The time between two refreshes: short enough to be useful, long enough to cost little.
pub fn interval(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        interval if (INTERVAL_MIN..=INTERVAL_MAX).contains(&interval) => Ok(interval),
        _ => Err("must be between 100ms and 1h".into()),
    }
}

pub fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        Some(_) | None => Err("write NAME=VALUE".into()),
    }
}

pub fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        Some(_) | None => Err("write KEY=VALUE".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_have_units_and_bounds() {
        assert_eq!(interval("2"), Ok(Duration::from_secs(2)));
        assert_eq!(interval("500ms"), Ok(Duration::from_millis(500)));
        for text in ["0", "99ms", "61m", "soon"] {
            assert!(interval(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_have_units() {
        for (text, millis) in [
            ("90", 90_000),
            ("1.5s", 1500),
            ("250ms", 250),
            ("30m", 1_800_000),
            ("2h", 7_200_000),
            ("1d", 86_400_000),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "m", "-1s", "1 s", "1w", "1.2.3", "1e3", "inf", "NaN", "99999999999999999999999d"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }
}
