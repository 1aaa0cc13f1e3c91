//! Ports of sandboxes: which ones programs listen on, and links that open one without a key.

use std::fmt;
use std::net::IpAddr;
use std::num::NonZeroU16;
use std::time::{Duration, SystemTime};

use wire::{LinkId, SandboxId};

use crate::error::{EngineError, Field, shown};
use crate::model::Owner;

/// A TCP port, from 1 to 65535.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Port(NonZeroU16);

impl Port {
    /// Rejects 0.
    pub fn new(number: u16) -> Result<Self, EngineError> {
        NonZeroU16::new(number).map(Self).ok_or_else(|| Field::Port.must("be between 1 and 65535, got 0"))
    }

    /// Accepts only digits without a leading zero, so that one port has one spelling in names and paths.
    pub fn parse(text: &str) -> Result<Self, EngineError> {
        let plain = !text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit());
        match text.parse() {
            Ok(number) if plain => Self::new(number),
            _ => Err(Field::Port.must(format!("be a number between 1 and 65535, got `{}`", shown(text)))),
        }
    }

    /// The number.
    pub fn number(self) -> u16 {
        self.0.get()
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A port that a program in a sandbox listens on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenPort {
    /// The port.
    pub port: u16,
    /// The addresses that it listens on, sorted.
    pub addresses: Vec<IpAddr>,
    /// Whether a connection from outside the sandbox can reach it: it listens on 127.0.0.1, ::1 or all addresses.
    pub reachable: bool,
    /// The process that listens, as the host sees it.
    pub process: Option<PortHolder>,
}

/// A process that listens on a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortHolder {
    /// Its id inside the sandbox.
    pub pid: u32,
    /// Its name, as the program chose it.
    pub name: String,
}

/// What a new link should be.
#[derive(Debug, Clone)]
pub struct LinkSpec {
    /// The port that it opens.
    pub port: Port,
    /// What it is for, in the caller's words.
    pub label: Option<String>,
    /// The only methods that it allows; all if empty.
    pub methods: Vec<String>,
    /// How long it works.
    pub ttl: Duration,
    /// Whether it opens the port to everybody, without a token.
    pub public: bool,
}

impl LinkSpec {
    /// The longest life of a link.
    pub const TTL_MAX: Duration = Duration::from_secs(366 * 86_400);
    /// The longest label, in bytes.
    const LABEL_MAX: usize = 200;
    /// The most methods, and the longest one.
    const METHODS_MAX: usize = 16;

    pub(crate) fn check(&self) -> Result<(), EngineError> {
        if self.ttl.is_zero() || self.ttl > Self::TTL_MAX {
            let (days, given) = (Self::TTL_MAX.as_secs() / 86_400, self.ttl.as_secs());
            return Err(Field::Ttl.must(format!("be between 1 second and {days} days, got {given} seconds")));
        }
        if let Some(label) = self.label.as_ref().filter(|label| label.len() > Self::LABEL_MAX) {
            let rule = format!("have at most {} bytes, got {}", Self::LABEL_MAX, label.len());
            return Err(Field::Label.must(rule));
        }
        let is_method = |text: &String| {
            (1..=32).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_uppercase() || b == b'-')
        };
        if self.methods.len() > Self::METHODS_MAX {
            let rule = format!("be at most {}, got {}", Self::METHODS_MAX, self.methods.len());
            return Err(Field::Methods.must(rule));
        }
        match self.methods.iter().find(|text| !is_method(text)) {
            Some(text) => {
                Err(Field::Methods.must(format!("be methods in capitals such as GET, got `{}`", shown(text))))
            }
            None => Ok(()),
        }
    }
}

/// A link that opens one port of one sandbox without a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Its id; not secret.
    pub id: LinkId,
    /// The sandbox.
    pub sandbox: SandboxId,
    /// The sandbox's owner.
    pub owner: Owner,
    /// The port.
    pub port: Port,
    /// The id of the key that made it. The link ends with the key.
    pub key: String,
    /// What it is for.
    pub label: Option<String>,
    /// The only methods that it allows; all if empty.
    pub methods: Vec<String>,
    /// Whether it opens the port to everybody.
    pub public: bool,
    /// When it was made.
    pub created_at: SystemTime,
    /// When it ends.
    pub expires_at: SystemTime,
}

impl Link {
    /// Whether it allows a request of this method.
    pub fn allows(&self, method: &str) -> bool {
        self.methods.is_empty() || self.methods.iter().any(|allowed| allowed == method)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_has_one_spelling() {
        assert_eq!(Port::parse("8080").map(Port::number).ok(), Some(8080));
        for text in ["", "0", "080", "65536", "+80", " 80", "80 ", "-1", "8o", "８０"] {
            assert!(Port::parse(text).is_err(), "{text:?}");
        }
    }
}
