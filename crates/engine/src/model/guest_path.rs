//! Paths and users in a sandbox, as callers name them.

use std::fmt;

use wire::files::PATH_MAX;

use crate::error::{Must, shown};

/// An absolute path in a sandbox: at most [`PATH_MAX`] bytes, none of them NUL.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GuestPath(String);

impl GuestPath {
    /// Checks text.
    pub fn parse(text: impl Into<String>) -> Result<Self, Must> {
        let text = text.into();
        Self::check(text.as_bytes())?;
        Ok(Self(text))
    }

    /// The rule, for paths that need not be text.
    pub fn check(path: &[u8]) -> Result<(), Must> {
        if !path.starts_with(b"/") {
            let given = shown(&String::from_utf8_lossy(&path[..path.len().min(PATH_MAX)]));
            return Err(Must::new(format!("be an absolute path, got `{given}`")));
        }
        if path.contains(&0) {
            return Err(Must::new("not contain a NUL byte"));
        }
        if path.len() > PATH_MAX {
            return Err(Must::new(format!("have at most {PATH_MAX} bytes, got {}", path.len())));
        }
        Ok(())
    }

    /// From a row: what was a path once stays one.
    pub(crate) fn kept(text: String) -> Self {
        Self(text)
    }

    /// As it was written.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// As it was written.
    pub fn into_string(self) -> String {
        self.0
    }
}

impl fmt::Display for GuestPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A user of a sandbox: a name or a number, optionally with `:group`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GuestUser(String);

impl GuestUser {
    /// In bytes: twice the longest name in a passwd file.
    pub const LENGTH_MAX: usize = 256;

    /// Checks text.
    pub fn parse(text: impl Into<String>) -> Result<Self, Must> {
        let text = text.into();
        if !(1..=Self::LENGTH_MAX).contains(&text.len()) {
            let rule =
                format!("be a name or a number of 1 to {} bytes, got {}", Self::LENGTH_MAX, text.len());
            return Err(Must::new(rule));
        }
        if text.contains('\0') {
            return Err(Must::new("not contain a NUL byte"));
        }
        Ok(Self(text))
    }

    /// From a row: what was a user once stays one.
    pub(crate) fn kept(text: String) -> Self {
        Self(text)
    }

    /// As it was written.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// As it was written.
    pub fn into_string(self) -> String {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_absolute_short_and_without_nul() {
        for good in ["/", "/tmp", "/a b/ü", &format!("/{}", "x".repeat(PATH_MAX - 1))] {
            GuestPath::parse(good).expect(good);
        }
        for (bad, rule) in [
            ("tmp", "be an absolute path, got `tmp`"),
            ("", "be an absolute path, got ``"),
            ("/a\0b", "not contain a NUL byte"),
            (&format!("/{}", "x".repeat(PATH_MAX)), "have at most 4095 bytes, got 4096"),
        ] {
            assert_eq!(GuestPath::parse(bad).expect_err(bad).to_string(), rule);
        }
        let long = GuestPath::parse("ä".repeat(PATH_MAX)).expect_err("it is relative").to_string();
        assert!(long.len() < 200, "{long}");
    }

    #[test]
    fn a_user_is_short_and_without_nul() {
        for good in ["root", "1000:1000", &"x".repeat(256)] {
            GuestUser::parse(good).expect(good);
        }
        for bad in ["", "a\0b", &"x".repeat(257)] {
            GuestUser::parse(bad).expect_err(bad);
        }
    }
}
