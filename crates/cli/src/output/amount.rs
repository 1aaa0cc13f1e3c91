//! Amounts as the flags take them, so that what is shown can be typed.

/// Processors: `2`, or `500m`.
pub fn cpu(millis: u64) -> String {
    if millis.is_multiple_of(1000) { (millis / 1000).to_string() } else { format!("{millis}m") }
}

/// Memory: `4Gi`, or the largest unit in which it is a whole number.
pub fn memory(bytes: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(1 << 40, "Ti"), (1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")];
    let unit = UNITS.into_iter().find(|(size, _)| bytes > 0 && bytes.is_multiple_of(*size));
    unit.map_or_else(|| bytes.to_string(), |(size, unit)| format!("{}{unit}", bytes / size))
}

/// Bytes that are in use, rounded to what people read at a glance: `1.5Gi`, `34Mi`.
pub fn rounded(bytes: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(1 << 40, "Ti"), (1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")];
    let Some((size, unit)) = UNITS.into_iter().find(|(size, _)| bytes >= *size) else {
        return bytes.to_string();
    };
    let value = bytes as f64 / size as f64;
    let text = if value < 10.0 { format!("{value:.1}") } else { format!("{value:.0}") };
    format!("{}{unit}", text.trim_end_matches(".0"))
}

/// A length of time: `30m`, or the largest unit in which it is a whole number.
pub fn length(seconds: f64) -> String {
    const UNITS: [(f64, &str); 3] = [(86_400.0, "d"), (3600.0, "h"), (60.0, "m")];
    let unit = UNITS.into_iter().find(|(size, _)| seconds > 0.0 && seconds % size == 0.0);
    unit.map_or_else(|| format!("{seconds}s"), |(size, unit)| format!("{}{unit}", seconds / size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_shown_as_they_are_typed() {
        for (millis, text) in [(1000, "1"), (500, "500m"), (1500, "1500m"), (64_000, "64")] {
            assert_eq!(cpu(millis), text);
        }
        for (bytes, text) in [
            (1 << 30, "1Gi"),
            (4 << 30, "4Gi"),
            (1536 << 20, "1536Mi"),
            (1 << 40, "1Ti"),
            (1000, "1000"),
            (0, "0"),
        ] {
            assert_eq!(memory(bytes), text);
        }
        for (bytes, text) in [
            (0, "0"),
            (1000, "1000"),
            (1536, "1.5Ki"),
            (34 << 20, "34Mi"),
            (1 << 30, "1Gi"),
            (3 << 39, "1.5Ti"),
        ] {
            assert_eq!(rounded(bytes), text);
        }
        for (seconds, text) in
            [(600.0, "10m"), (86_400.0, "1d"), (90.0, "90s"), (5400.0, "90m"), (7200.0, "2h"), (0.5, "0.5s")]
        {
            assert_eq!(length(seconds), text);
        }
    }
}
