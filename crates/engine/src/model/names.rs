//! What people call things. They choose the names, so one rule says what may be one, for all of them.
//!
//! Owns that rule and a type for each kind of name. That names are unique, and among what, is the business of what they name; no
//! name ever reaches a path of the host.

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

            /// Text of 1 to 255 bytes, not `.` or `..`, without control characters and what else this kind of name cannot have.
            pub fn parse(text: &str) -> Result<Self, EngineError> {
                let check: fn(&str) -> Result<(), String> = $check;
                match check_free(text).and_then(|()| check(text)) {
                    Ok(()) => Ok(Self(text.into())),
                    Err(rule) => Err(Field::Name.must(rule)),
                }
            }

            /// From a row: what was a name once stays one, also where the rule has become stricter.
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

impl TemplateName {
    /// The template that every owner has.
    pub fn built_in() -> Self {
        Self(DEFAULT.into())
    }
}

/// In bytes.
const LENGTH_MAX: usize = 255;

names! {
    /// What people call a sandbox.
    SandboxName: |_| Ok(());
    /// What people call a template.
    TemplateName: |_| Ok(());
    /// What people call a pool.
    PoolName: |_| Ok(());
    /// What people call a volume. Without slashes and colons, since `VOLUME:/path` means a file in it.
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

#[cfg(test)]
mod tests {
    use super::*;

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
