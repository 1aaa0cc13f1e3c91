//! The names of things. An id is checked once, where it enters, and is a type from then on.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A sandbox: 128 random bits, written as a UUID in the native API.
///
/// Foreign dialects write the same bits in their own shapes, so the bits are what is kept.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SandboxId(u128);

impl SandboxId {
    /// An id from random bits. The bits that make a UUID of version 4 are set, so that strict readers accept it.
    pub fn from_random(bits: u128) -> Self {
        const VERSION: u128 = 0xf << 76;
        const VARIANT: u128 = 0b11 << 62;
        Self((bits & !VERSION & !VARIANT) | (4 << 76) | (0b10 << 62))
    }

    /// An id from bits that were an id before, as a row or a dialect keeps them.
    pub fn from_bits(bits: u128) -> Self {
        Self(bits)
    }

    /// The bits, for a row or a dialect's own spelling.
    pub fn bits(self) -> u128 {
        self.0
    }
}

impl fmt::Display for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_uuid(self.0, f)
    }
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

/// A template: 128 random bits, written as a UUID. It stays the same when the template gets another name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TemplateId(u128);

impl TemplateId {
    /// As with [`SandboxId::from_random`].
    pub fn from_random(bits: u128) -> Self {
        Self(SandboxId::from_random(bits).bits())
    }

    /// An id from bits that were an id before.
    pub const fn from_bits(bits: u128) -> Self {
        Self(bits)
    }

    /// The bits, for a row.
    pub fn bits(self) -> u128 {
        self.0
    }
}

impl fmt::Display for TemplateId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_uuid(self.0, f)
    }
}

impl fmt::Debug for TemplateId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A pool: 128 random bits, written as a UUID. It stays the same when the pool gets another name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolId(u128);

impl PoolId {
    /// As with [`SandboxId::from_random`].
    pub fn from_random(bits: u128) -> Self {
        Self(SandboxId::from_random(bits).bits())
    }

    /// An id from bits that were an id before.
    pub const fn from_bits(bits: u128) -> Self {
        Self(bits)
    }

    /// The bits, for a row.
    pub fn bits(self) -> u128 {
        self.0
    }
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_uuid(self.0, f)
    }
}

impl fmt::Debug for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A build: 128 random bits, written as a UUID.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BuildId(u128);

impl BuildId {
    /// As with [`SandboxId::from_random`].
    pub fn from_random(bits: u128) -> Self {
        Self(SandboxId::from_random(bits).bits())
    }

    /// An id from bits that were an id before.
    pub const fn from_bits(bits: u128) -> Self {
        Self(bits)
    }

    /// The bits, for a row.
    pub fn bits(self) -> u128 {
        self.0
    }
}

impl fmt::Display for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_uuid(self.0, f)
    }
}

impl fmt::Debug for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for BuildId {
    type Err = BadId;

    fn from_str(text: &str) -> Result<Self, BadId> {
        text.parse::<SandboxId>().map(|id| Self(id.bits())).map_err(|_| BadId::Build)
    }
}

/// A volume: 128 random bits, written as a UUID. It stays the same when the volume gets another name, and names its files.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VolumeId(u128);

impl VolumeId {
    /// As with [`SandboxId::from_random`].
    pub fn from_random(bits: u128) -> Self {
        Self(SandboxId::from_random(bits).bits())
    }

    /// An id from bits that were an id before.
    pub const fn from_bits(bits: u128) -> Self {
        Self(bits)
    }

    /// The bits, for a row.
    pub fn bits(self) -> u128 {
        self.0
    }
}

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_uuid(self.0, f)
    }
}

impl fmt::Debug for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for VolumeId {
    type Err = BadId;

    fn from_str(text: &str) -> Result<Self, BadId> {
        text.parse::<SandboxId>().map(|id| Self(id.bits())).map_err(|_| BadId::Volume)
    }
}

/// A snapshot: 128 random bits, written as a UUID.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SnapshotId(u128);

impl SnapshotId {
    /// As with [`SandboxId::from_random`].
    pub fn from_random(bits: u128) -> Self {
        Self(SandboxId::from_random(bits).bits())
    }

    /// An id from bits that were an id before.
    pub const fn from_bits(bits: u128) -> Self {
        Self(bits)
    }

    /// The bits, for a row.
    pub fn bits(self) -> u128 {
        self.0
    }
}

impl fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_uuid(self.0, f)
    }
}

impl fmt::Debug for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for SnapshotId {
    type Err = BadId;

    fn from_str(text: &str) -> Result<Self, BadId> {
        text.parse::<SandboxId>().map(|id| Self(id.bits())).map_err(|_| BadId::Snapshot)
    }
}

/// Why a text is not an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadId {
    /// Not a UUID in its usual lower-case spelling.
    #[error("a sandbox id is a UUID such as 3f2b8c1e-90ab-4def-8123-456789abcdef")]
    Sandbox,
    /// Not a build id.
    #[error("a build id is a UUID such as 3f2b8c1e-90ab-4def-8123-456789abcdef")]
    Build,
    /// Not a volume id.
    #[error("a volume id is a UUID such as 3f2b8c1e-90ab-4def-8123-456789abcdef")]
    Volume,
    /// Not a snapshot id.
    #[error("a snapshot id is a UUID such as 3f2b8c1e-90ab-4def-8123-456789abcdef")]
    Snapshot,
    /// Not a command id.
    #[error("a command id is 1 to {max} of the characters A-Z a-z 0-9 . _ : -", max = CommandId::LENGTH_MAX)]
    Command,
    /// Not an installation id.
    #[error("an installation id is 16 hexadecimal digits")]
    Installation,
}

impl FromStr for SandboxId {
    type Err = BadId;

    /// Reads the one spelling that `Display` writes, so that one sandbox has one name in paths and logs.
    fn from_str(text: &str) -> Result<Self, BadId> {
        let bytes = text.as_bytes();
        if bytes.len() != 36 {
            return Err(BadId::Sandbox);
        }
        let mut bits = 0u128;
        for (at, byte) in bytes.iter().enumerate() {
            let digit = match (at, byte) {
                (8 | 13 | 18 | 23, b'-') => continue,
                (8 | 13 | 18 | 23, _) => return Err(BadId::Sandbox),
                (_, b'0'..=b'9') => byte - b'0',
                (_, b'a'..=b'f') => byte - b'a' + 10,
                _ => return Err(BadId::Sandbox),
            };
            bits = (bits << 4) | u128::from(digit);
        }
        Ok(Self(bits))
    }
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

    /// An id for a caller that chose none.
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

/// One data directory. Every name that Shoal gives to the kernel or the host carries it,
/// so that two daemons on one machine never touch each other's things.
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

/// In text formats an id is its text; in the binary ones between our own processes it is its bits or bytes.
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

serde_as_text!(SandboxId, VolumeId, CommandId, InstallationId);

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
            assert_eq!(text.parse::<SandboxId>(), Err(BadId::Sandbox), "{text}");
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
