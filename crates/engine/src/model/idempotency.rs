//! The key under which a request can be repeated.

use crate::error::Must;

/// 1 to 255 visible ASCII characters, or one that the engine made.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct IdempotencyKey(String);

impl IdempotencyKey {
    /// In bytes.
    pub const LENGTH_MAX: usize = 255;

    /// Checks a caller's key.
    pub fn parse(text: &str) -> Result<Self, Must> {
        let visible = text.bytes().all(|byte| byte.is_ascii_graphic());
        match visible && (1..=Self::LENGTH_MAX).contains(&text.len()) {
            true => Ok(Self(text.into())),
            false => Err(Must::new(format!("be 1 to {} visible ASCII characters", Self::LENGTH_MAX))),
        }
    }

    /// A key of the engine's own. It should contain a space, so that no caller's is the same.
    pub(crate) fn own(text: String) -> Self {
        debug_assert!(text.contains(' '), "a caller could choose {text:?}");
        Self(text)
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
    fn a_key_is_visible_and_cannot_be_one_of_the_engine() {
        for good in ["a", "order-17", &"x".repeat(255)] {
            IdempotencyKey::parse(good).expect(good);
        }
        for bad in ["", "a b", "a\n", "ä", "\0", &"x".repeat(256), "shoal build bld_1 2"] {
            IdempotencyKey::parse(bad).expect_err(bad);
        }
    }
}
