//! Quantities as people write them: `500m` and `1.5` processors, `512Mi` and `2G` bytes.
//!
//! The spelling is that of Kubernetes, without its exponents. A quantity is checked here and is a number from then on.

use std::fmt;

/// Why a text is not a quantity. Reads after the name of the field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadQuantity {
    /// Empty, a sign, a letter where a digit belongs, a suffix that does not exist.
    #[error("`{text}` is not a quantity; write {example}")]
    Malformed {
        /// As it was given, cut to a length that fits a message.
        text: String,
        /// What would have been right.
        example: &'static str,
    },
    /// Zero cannot run anything.
    #[error("it must be more than zero")]
    Zero,
    /// Smaller than the unit it is counted in.
    #[error("`{text}` is finer than {unit}")]
    TooFine {
        /// As it was given.
        text: String,
        /// The smallest unit.
        unit: &'static str,
    },
    /// Beyond what can be counted.
    #[error("`{text}` is too large")]
    TooLarge {
        /// As it was given.
        text: String,
    },
}

/// Processor time, in thousandths of a processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpu {
    /// Thousandths of a processor, never 0.
    pub millis: u64,
}

impl Cpu {
    const EXAMPLE: &'static str = "`2`, `1.5` or `500m`";

    /// Reads `2`, `1.5` or `500m`.
    pub fn parse(text: &str) -> Result<Self, BadQuantity> {
        let (number, per_unit) = match text.strip_suffix('m') {
            Some(number) => (number, 1),
            None => (text, 1000),
        };
        let millis = scaled(text, number, per_unit, Self::EXAMPLE, "a thousandth of a processor")?;
        Ok(Self { millis })
    }
}

impl fmt::Display for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}m", self.millis)
    }
}

/// An amount of memory or storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bytes {
    /// Never 0.
    pub bytes: u64,
}

impl Bytes {
    const EXAMPLE: &'static str = "`512Mi`, `1.5Gi` or `2G`";
    const SUFFIXES: [(&'static str, u64); 12] = [
        ("Ki", 1 << 10),
        ("Mi", 1 << 20),
        ("Gi", 1 << 30),
        ("Ti", 1 << 40),
        ("Pi", 1 << 50),
        ("Ei", 1 << 60),
        ("k", 1_000),
        ("M", 1_000_000),
        ("G", 1_000_000_000),
        ("T", 1_000_000_000_000),
        ("P", 1_000_000_000_000_000),
        ("E", 1_000_000_000_000_000_000),
    ];

    /// Reads `512Mi`, `1.5Gi`, `2G` or plain bytes.
    pub fn parse(text: &str) -> Result<Self, BadQuantity> {
        let (number, per_unit) = Self::SUFFIXES
            .iter()
            .find_map(|(suffix, size)| text.strip_suffix(suffix).map(|number| (number, *size)))
            .unwrap_or((text, 1));
        Ok(Self { bytes: scaled(text, number, per_unit, Self::EXAMPLE, "a byte")? })
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let binary = Self::SUFFIXES[..6].iter().rev().find(|(_, size)| self.bytes.is_multiple_of(*size));
        match binary {
            Some((suffix, size)) => write!(f, "{}{suffix}", self.bytes / size),
            None => write!(f, "{}", self.bytes),
        }
    }
}

/// As many digits as the largest number has; then the arithmetic below stays within 128 bits.
const DIGITS_MAX: usize = 20;
/// How much of a bad text is repeated in the message.
const SHOWN_MAX: usize = 40;

/// `number` (digits with at most one point) times `per_unit`, exactly.
fn scaled(
    text: &str,
    number: &str,
    per_unit: u64,
    example: &'static str,
    unit: &'static str,
) -> Result<u64, BadQuantity> {
    let shown = || text.chars().take(SHOWN_MAX).collect::<String>();
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(fraction) {
        return Err(BadQuantity::Malformed { text: shown(), example });
    }
    let (whole, fraction) = (whole.trim_start_matches('0'), fraction.trim_end_matches('0'));
    if whole.len() > DIGITS_MAX {
        return Err(BadQuantity::TooLarge { text: shown() });
    }
    if fraction.len() > DIGITS_MAX {
        return Err(BadQuantity::TooFine { text: shown(), unit });
    }
    let value = |part: &str| part.bytes().fold(0u128, |sum, b| sum * 10 + u128::from(b - b'0'));
    let fraction_scale = 10u128.pow(fraction.len() as u32);
    let parts = value(fraction) * u128::from(per_unit);
    if !parts.is_multiple_of(fraction_scale) {
        return Err(BadQuantity::TooFine { text: shown(), unit });
    }
    let total = value(whole) * u128::from(per_unit) + parts / fraction_scale;
    match u64::try_from(total) {
        Ok(0) => Err(BadQuantity::Zero),
        Ok(total) => Ok(total),
        Err(_) => Err(BadQuantity::TooLarge { text: shown() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn cpu(text: &str, millis: u64) {
        assert_eq!(Cpu::parse(text), Ok(Cpu { millis }), "{text}");
    }

    #[track_caller]
    fn bytes(text: &str, bytes: u64) {
        assert_eq!(Bytes::parse(text), Ok(Bytes { bytes }), "{text}");
    }

    #[test]
    fn processors_are_read_exactly() {
        cpu("1", 1000);
        cpu("500m", 500);
        cpu("1.5", 1500);
        cpu("0.001", 1);
        cpu("0.1", 100);
        cpu("007", 7000);
        cpu("2.50000000000000000000000000", 2500);
    }

    #[test]
    fn bytes_are_read_exactly() {
        bytes("1", 1);
        bytes("512Mi", 512 << 20);
        bytes("1Gi", 1 << 30);
        bytes("1G", 1_000_000_000);
        bytes("1.5Gi", 3 << 29);
        bytes("0.5Ki", 512);
        bytes("64k", 64_000);
        bytes("15Ei", 15 << 60);
        bytes("18446744073709551615", u64::MAX);
    }

    #[test]
    fn what_is_not_a_quantity_is_refused() {
        for text in [
            "", " ", "-1", "+1", "1 ", " 1", "1.", ".5", "1..2", "1e3", "m", "Mi", "1Mb", "1KI", "0x10", "١",
            "nan",
        ] {
            assert!(matches!(Bytes::parse(text), Err(BadQuantity::Malformed { .. })), "{text:?}");
            assert!(Cpu::parse(text).is_err(), "{text:?}");
        }
        assert!(matches!(Cpu::parse("1Mi"), Err(BadQuantity::Malformed { .. })));
        assert!(matches!(Bytes::parse("100m"), Err(BadQuantity::Malformed { .. })), "a thousandth of a byte");
    }

    #[test]
    fn zero_is_refused() {
        for text in ["0", "0m", "0.0", "000"] {
            assert_eq!(Cpu::parse(text), Err(BadQuantity::Zero), "{text}");
        }
        assert_eq!(Bytes::parse("0Gi"), Err(BadQuantity::Zero));
    }

    #[test]
    fn too_fine_and_too_large_are_refused() {
        assert!(matches!(Cpu::parse("0.0001"), Err(BadQuantity::TooFine { .. })));
        assert!(matches!(Cpu::parse("1.5m"), Err(BadQuantity::TooFine { .. })));
        assert!(matches!(Bytes::parse("0.5"), Err(BadQuantity::TooFine { .. })));
        assert!(matches!(Bytes::parse("16Ei"), Err(BadQuantity::TooLarge { .. })));
        assert!(matches!(Bytes::parse("18446744073709551616"), Err(BadQuantity::TooLarge { .. })));
        assert!(matches!(Cpu::parse(&"9".repeat(5000)), Err(BadQuantity::TooLarge { .. })));
    }

    #[test]
    fn a_quantity_is_written_as_people_would() {
        assert_eq!(Bytes { bytes: 3 << 29 }.to_string(), "1536Mi");
        assert_eq!(Bytes { bytes: 1000 }.to_string(), "1000");
        assert_eq!(Cpu { millis: 1500 }.to_string(), "1500m");
    }
}
