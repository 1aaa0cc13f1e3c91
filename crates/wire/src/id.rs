//! Ids. An id is checked once, where it enters, and is a type from then on.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Ids of 128 random bits, written as a UUID.
macro_rules! random_ids {
    ($($(#[$about:meta])* $id:ident: $word:literal;)*) => {$(
        $(#[$about])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $id(u128);

        impl $id {
            /// An id from random bits. Sets the bits that make it a UUID of version 4, so that strict parsers accept
            /// it.
            pub const fn from_random(bits: u128) -> Self {
                const VERSION: u128 = 0xf << 76;
                const VARIANT: u128 = 0b11 << 62;
                Self((bits & !VERSION & !VARIANT) | (4 << 76) | (0b10 << 62))
            }

            /// An id from the bits of an existing id, as a row or a dialect stores them.
            pub const fn from_bits(bits: u128) -> Self {
                Self(bits)
            }

            /// The bits, for a row or a dialect's own spelling.
            pub const fn bits(self) -> u128 {
                self.0
            }
        }

        impl fmt::Display for $id {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write_uuid(self.0, f)
            }
        }

        impl fmt::Debug for $id {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $id {
            type Err = BadId;

            /// Accepts only the spelling that `Display` writes, so that one thing has one name in paths and logs.
            fn from_str(text: &str) -> Result<Self, BadId> {
                read_uuid(text).map(Self).ok_or(BadId::Random { of: $word })
            }
        }
    )*};
}

random_ids! {
    /// A sandbox. Dialects write the same bits in their own formats, so rows store the bits.
    SandboxId: "sandbox";
    /// A template. Renaming the template keeps it.
    TemplateId: "template";
    /// A pool. Renaming the pool keeps it.
    PoolId: "pool";
    /// A build.
    BuildId: "build";
    /// A volume. Renaming the volume keeps it; the volume's files are stored under it.
    VolumeId: "volume";
    /// A snapshot.
    SnapshotId: "snapshot";
    /// A link to a port of a sandbox.
    LinkId: "link";
    /// An address that events are sent to.
    WebhookId: "webhook";
}

fn write_uuid(b: u128, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    write!(
        f,
        "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        b >> 96,
        (b >> 80) & 0xffff,
        (b >> 64) & 0xffff,
        (b >> 48) & 0xffff,
        b & 0xffff_ffff_ffff
    )
}

fn read_uuid(text: &str) -> Option<u128> {
    let bytes = text.as_bytes();
    if bytes.len() != 36 {
        return None;
    }
    let mut bits = 0u128;
    for (at, byte) in bytes.iter().enumerate() {
        let digit = match (at, byte) {
            (8 | 13 | 18 | 23, b'-') => continue,
            (8 | 13 | 18 | 23, _) => return None,
            (_, b'0'..=b'9') => byte - b'0',
            (_, b'a'..=b'f') => byte - b'a' + 10,
            _ => return None,
        };
        bits = (bits << 4) | u128::from(digit);
    }
    Some(bits)
}

/// Why a text is not an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadId {
    /// Not a UUID in its usual lower-case spelling.
    #[error("a {of} id must be a UUID such as 3f2b8c1e-90ab-4def-8123-456789abcdef")]
    Random {
        /// The kind of thing that the id names.
        of: &'static str,
    },
    /// Not a command id.
    #[error("a command id must be 1 to {max} of the characters A-Z a-z 0-9 . _ : -", max = CommandId::LENGTH_MAX)]
    Command,
    /// Not an installation id.
    #[error("an installation id must be 16 hexadecimal digits")]
    Installation,
}

/// A command: chosen by the caller, or a random UUID. Unique within its sandbox; starting is idempotent on it.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CommandId(String);

impl CommandId {
    /// Long enough for a UUID with a prefix, short enough for a file name and a log line.
    pub const LENGTH_MAX: usize = 128;

    /// The text as the caller wrote it.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// A random id, for callers that chose none.
    pub fn from_random(bits: u128) -> Self {
        Self(SandboxId::from_random(bits).to_string())
    }
}

impl fmt::Display for CommandId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for CommandId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for CommandId {
    type Err = BadId;

    fn from_str(text: &str) -> Result<Self, BadId> {
        let fits = (1..=Self::LENGTH_MAX).contains(&text.len());
        let plain = text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b':' | b'-'));
        if fits && plain && text != "." && text != ".." { Ok(Self(text.into())) } else { Err(BadId::Command) }
    }
}

/// One data directory. Every name that Shoal gives to the kernel or the host contains it, so that two daemons on one
/// machine never touch each other's resources.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InstallationId(u64);

impl InstallationId {
    /// An id from random bits.
    pub fn from_random(bits: u64) -> Self {
        Self(bits)
    }
}

impl fmt::Display for InstallationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for InstallationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for InstallationId {
    type Err = BadId;

    fn from_str(text: &str) -> Result<Self, BadId> {
        let plain = text.len() == 16 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if !plain {
            return Err(BadId::Installation);
        }
        u64::from_str_radix(text, 16).map(Self).map_err(|_| BadId::Installation)
    }
}

/// Text formats write an id as text; the binary formats between Shoal's own processes write its bits or bytes.
macro_rules! serde_as_text {
    ($($id:ty),*) => {$(
        impl Serialize for $id {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $id {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let text = String::deserialize(from)?;
                text.parse().map_err(de::Error::custom)
            }
        }
    )*};
}

serde_as_text!(SandboxId, LinkId, WebhookId, VolumeId, SnapshotId, CommandId, InstallationId);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_id_is_a_uuid_and_reads_back() {
        let id = SandboxId::from_random(u128::MAX);
        assert_eq!(id.to_string(), "ffffffff-ffff-4fff-bfff-ffffffffffff");
        assert_eq!(id.to_string().parse(), Ok(id));
    }

    #[test]
    fn other_spellings_of_a_sandbox_id_are_refused() {
        for text in [
            "",
            "FFFFFFFF-FFFF-4FFF-BFFF-FFFFFFFFFFFF",
            "ffffffffffff4fffbfffffffffffffff",
            "{ffffffff-ffff-4fff-bfff-ffffffffffff}",
            "ffffffff-ffff-4fff-bfff-fffffffffff/",
            "../../../../../../../etc/passwd-----",
        ] {
            assert_eq!(text.parse::<SandboxId>(), Err(BadId::Random { of: "sandbox" }), "{text}");
        }
    }

    #[test]
    fn a_command_id_never_looks_like_a_path() {
        for text in ["", ".", "..", "a/b", "a\0b", "a b", "ä", &"x".repeat(129)] {
            assert_eq!(text.parse::<CommandId>(), Err(BadId::Command), "{text:?}");
        }
        assert!("build:42_final.v1-a".parse::<CommandId>().is_ok());
    }
}
