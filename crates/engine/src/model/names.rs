//! Names that people choose. One rule for all of them says what is valid.
//!
//! Owns that rule and a type for each kind of name. The named things ensure that names are unique; no name ever
//! becomes part of a path on the host.

use std::fmt;

use crate::error::{EngineError, Field};
use crate::model::defaults::DEFAULT;

macro_rules! names {
    ($($(#[$about:meta])* $name:ident: $check:expr;)*) => {$(
        $(#[$about])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(String);

        impl $name {
            /// In bytes.
            pub const LENGTH_MAX: usize = LENGTH_MAX;

            /// Text of 1 to 255 bytes, not `.` or `..`, without control characters and other characters that this
            /// kind of name excludes.
            pub fn parse(text: &str) -> Result<Self, EngineError> {
                let check: fn(&str) -> Result<(), String> = $check;
                match check_free(text).and_then(|()| check(text)) {
                    Ok(()) => Ok(Self(text.into())),
                    Err(rule) => Err(Field::Name.must(rule)),
                }
            }

            /// From a row: an old name stays valid, even if the rule has become stricter.
            pub(crate) fn kept(text: &str) -> Self {
                Self(text.into())
            }

            /// As it was written.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )*};
}

impl SandboxName {
    /// A name from a dialect, whose clients may choose any text. The command line can name such a sandbox by its id.
    pub fn of_dialect(text: &str) -> Result<Self, EngineError> {
        match check_free(text) {
            Ok(()) => Ok(Self(text.into())),
            Err(rule) => Err(Field::Name.must(rule)),
        }
    }
}

impl TemplateName {
    /// The template that every owner has.
    pub fn built_in() -> Self {
        Self(DEFAULT.into())
    }
}

/// In bytes.
const LENGTH_MAX: usize = 255;

names! {
    /// The name of a sandbox. People type it into shells and scripts, and `SANDBOX:/path` means a file in it.
    SandboxName: check_typed;
    /// The name of a template.
    TemplateName: |_| Ok(());
    /// The name of a pool.
    PoolName: |_| Ok(());
    /// The name of a volume. Without slashes and colons, since `VOLUME:/path` means a file in it.
    VolumeName: check_before_a_path;
}

fn check_free(text: &str) -> Result<(), String> {
    if text.is_empty() {
        Err("not be empty".into())
    } else if text.len() > LENGTH_MAX {
        Err(format!("have at most {LENGTH_MAX} bytes, got {}", text.len()))
    } else if text.chars().any(char::is_control) {
        Err("not contain control characters".into())
    } else if matches!(text, "." | "..") {
        // In a URL both are ways to somewhere else, so that nobody could ask for it.
        Err(format!("not be `{text}`, which is a directory everywhere"))
    } else {
        Ok(())
    }
}

fn check_before_a_path(text: &str) -> Result<(), String> {
    if let Some(sign) = text.chars().find(|sign| matches!(sign, '/' | ':')) {
        Err(format!("not contain `{sign}`"))
    } else {
        Ok(())
    }
}

fn check_typed(text: &str) -> Result<(), String> {
    if text.starts_with('-') {
        Err("not begin with `-`, like an option of a command".into())
    } else if text.contains(char::is_whitespace) {
        Err(format!("not contain spaces, got `{text}`"))
    } else {
        check_before_a_path(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_has_a_name_that_can_be_typed() {
        for text in ["a:b", "a/b", "-x", "bad name", "a\u{a0}b", ""] {
            assert!(SandboxName::parse(text).is_err(), "{text:?}");
        }
        for text in ["work", "silver-spoon.2", "a_b", "ähre", "$(x)"] {
            assert_eq!(SandboxName::parse(text).expect(text).as_str(), text);
        }
        assert_eq!(SandboxName::of_dialect("a b/c").expect("any text").as_str(), "a b/c");
        assert!(SandboxName::of_dialect("").is_err() && SandboxName::of_dialect("a\0").is_err());
        assert_eq!(SandboxName::kept("an old name").as_str(), "an old name", "what is stored stays");
    }

    #[test]
    fn names_are_free_text_within_bounds() {
        for text in ["a", "Ähre und Ähre", "a/b:c", &"x".repeat(255)] {
            assert_eq!(PoolName::parse(text).expect(text).as_str(), text);
        }
        for text in ["", "a\nb", "a\0", ".", "..", &"x".repeat(256)] {
            assert!(PoolName::parse(text).is_err(), "{text:?}");
            assert!(VolumeName::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_volume_is_never_called_like_a_path() {
        for text in ["a/b", "a:b", ".", ".."] {
            assert!(VolumeName::parse(text).is_err(), "{text:?}");
        }
        assert!(VolumeName::parse("data.v1").is_ok());
    }
}
