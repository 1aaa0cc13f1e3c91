//! The key under which a request can be repeated.

use crate::error::Must;

/// 1 to 255 bytes without control characters.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct IdempotencyKey(String);

impl IdempotencyKey {
    /// In bytes.
    pub const LENGTH_MAX: usize = 255;

    /// Checks a caller's key.
    pub fn parse(text: &str) -> Result<Self, Must> {
        let printable = !text.chars().any(char::is_control);
        match printable && (1..=Self::LENGTH_MAX).contains(&text.len()) {
            true => Ok(Self(text.into())),
            false => Err(Must::new(format!("be 1 to {} bytes without control characters", Self::LENGTH_MAX))),
        }
    }

    /// As it was written.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_short_and_printable() {
        for good in ["a", "order-17", "a b", "ä", &"x".repeat(255)] {
            IdempotencyKey::parse(good).expect(good);
        }
        for bad in ["", "a\n", "\0", &"x".repeat(256)] {
            IdempotencyKey::parse(bad).expect_err(bad);
        }
    }
}
