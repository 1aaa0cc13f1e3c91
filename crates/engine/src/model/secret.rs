//! Secrets that egress adds to requests, as callers see and write them.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use crate::error::{EngineError, Field, shown};

pub use egress::credential::{
    CredentialRuleSpec as SecretRule, How as SecretHow, VALUE_BYTES_MAX, Value as SecretValue,
};

/// How long the value of a file is used before it is read again.
pub const CACHE_DEFAULT: Duration = Duration::from_secs(300);
/// The longest such time.
pub const CACHE_MAX: Duration = Duration::from_secs(24 * 60 * 60);
/// The most rules of one secret.
pub const SECRET_RULES_MAX: usize = 64;
/// The most secrets that a sandbox may use.
pub const INJECT_MAX: usize = 32;
/// The most secrets of an owner.
pub const SECRETS_MAX: usize = 1000;

/// The name of a secret.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SecretName(String);

impl SecretName {
    /// The longest name.
    pub const LENGTH_MAX: usize = 64;

    /// 1 to 64 of `A-Z a-z 0-9 - _ .`
    pub fn parse(text: &str) -> Result<Self, EngineError> {
        let plain = text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
        if plain && (1..=Self::LENGTH_MAX).contains(&text.len()) {
            return Ok(Self(text.into()));
        }
        let most = Self::LENGTH_MAX;
        Err(Field::Name
            .must(format!("be 1 to {most} of the characters A-Z a-z 0-9 - _ ., got `{}`", shown(text))))
    }

    /// As it was written.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Where the value of a secret comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SecretSource {
    /// The caller gave it; it is kept encrypted.
    Value(SecretValue),
    /// A file on the daemon's machine, read again after a while.
    File(PathBuf),
    /// A variable of the daemon.
    Environment(String),
}

/// What a caller keeps under a name.
#[derive(Debug, Clone)]
pub struct SecretSpec {
    /// Its name. A secret with this name is replaced, and keeps its id.
    pub name: SecretName,
    /// Where its value comes from.
    pub source: SecretSource,
    /// The name of a preset for rules and variables; the secret's own name if that is one and there are no rules.
    pub preset: Option<String>,
    /// Which requests get it; none to keep those of the preset, or those that it has.
    pub rules: Vec<SecretRule>,
    /// The variables that hold the placeholder inside; none to keep those of the preset, or those that it has.
    pub variables: Vec<String>,
    /// How long a value is used before it is read again.
    pub cache: Duration,
}

/// A secret, without its value. Nothing returns a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretView {
    /// Its name.
    pub name: String,
    /// `value`, `file` or `environment`.
    pub source: &'static str,
    /// The path or the variable; shown to admins only.
    pub origin: Option<String>,
    /// Which requests get it.
    pub rules: Vec<SecretRule>,
    /// The variables that hold the placeholder inside.
    pub variables: Vec<String>,
    /// How often its value was set.
    pub version: u32,
    /// How many sandboxes may use it.
    pub sandboxes: usize,
    /// When it was made.
    pub created_at: SystemTime,
    /// When its value was last set.
    pub updated_at: SystemTime,
}

/// A request that carried a secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedgerLine {
    /// Increases by one from line to line.
    pub number: u64,
    /// When it began.
    pub at: SystemTime,
    /// The sandbox, which may be gone.
    pub sandbox: wire::SandboxId,
    /// The name that the secret had.
    pub secret: String,
    /// The host.
    pub host: String,
    /// The port.
    pub port: u16,
    /// The method.
    pub method: String,
    /// The path, without the query.
    pub path: String,
    /// The status of the answer; `None` if there was none.
    pub status: Option<u16>,
    /// Bytes of the request's body.
    pub sent: u64,
    /// Bytes of the answer's body.
    pub received: u64,
    /// The hash of this line and all before it.
    pub hash: [u8; 32],
}

/// Whether the ledger is whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedgerCheck {
    /// How many lines were checked.
    pub lines: u64,
    /// The first line that was changed, or that follows a removed one.
    pub broken_at: Option<u64>,
}
