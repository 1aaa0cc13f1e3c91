//! Credentials that egress adds to requests, so that sandboxes never hold them.
//!
//! A [`Credential`] has a value, the destinations that may get it, and a placeholder that stands for it inside the sandbox.
//! [`Vault`] is the set that one sandbox may use. [`apply`](Vault::apply) changes the head of a request, [`Replaced`] and
//! [`Masked`] change bodies while they pass. All of this is pure: nothing here opens a connection.
//!
//! Values are in memory only. They are wiped when they are dropped, and no `Debug` prints them.

mod apply;
mod body;
mod rule;

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use zeroize::Zeroize;

use crate::policy::{Name, Target};

pub use apply::{Applied, Refusal};
pub(crate) use body::mask;
pub use body::{BODY_BUFFER_MAX, BodyError, Masked, Replaced, find_any};
pub use rule::{BadCredentialRule, CredentialRule, CredentialRuleSpec, How, PATHS_MAX};

/// The longest value of a credential.
pub const VALUE_BYTES_MAX: usize = 64 * 1024;
/// The shortest value that is masked in answers: a shorter one would also mask text that has nothing to do with it.
pub const MASKED_BYTES_MIN: usize = 6;

/// The value of a secret. Wiped when it is dropped.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Value(Vec<u8>);

impl Value {
    /// Takes the bytes over.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Value(..)")
    }
}

/// A secret that a sandbox may use, and where.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credential {
    /// The daemon's id of the secret.
    pub id: u128,
    /// Its name, for the ledger and for messages.
    pub name: String,
    /// The value. `None` while the daemon cannot read it: requests that need it are refused.
    pub value: Option<Value>,
    /// What stands for the value inside the sandbox.
    pub placeholder: String,
    /// Which requests get it.
    pub rules: Vec<CredentialRule>,
}

/// The credentials of one sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Vault {
    all: Vec<Arc<Credential>>,
}

impl Vault {
    /// These credentials.
    pub fn new(all: Vec<Credential>) -> Self {
        Self { all: all.into_iter().map(Arc::new).collect() }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Whether requests to a host may get a credential, so that TLS must be terminated.
    pub fn covers(&self, name: &Name, port: u16) -> bool {
        self.rules().any(|(_, rule)| rule.is_for(name, port))
    }

    /// The credential whose placeholder appears in some bytes.
    pub fn placeholder_in(&self, bytes: &[u8]) -> Option<&Arc<Credential>> {
        self.all.iter().find(|credential| find_any(bytes, &[credential.placeholder.as_bytes()]).is_some())
    }

    fn rules(&self) -> impl Iterator<Item = (&Arc<Credential>, &CredentialRule)> {
        self.all.iter().flat_map(|credential| credential.rules.iter().map(move |rule| (credential, rule)))
    }
}

/// Whether a target of a rule covers a name.
fn covers(target: &Target, name: &Name) -> bool {
    match target {
        Target::Host(host) => host == name,
        Target::Suffix(suffix) => {
            name == suffix
                || name.as_str().strip_suffix(suffix.as_str()).is_some_and(|rest| rest.ends_with('.'))
        }
        Target::Block(_) | Target::Any => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_value_is_printed() {
        let credential = Credential {
            id: 1,
            name: "a".into(),
            value: Some(Value::new(b"hunter2".to_vec())),
            placeholder: "p".into(),
            rules: vec![],
        };
        assert!(!format!("{credential:?}").contains("hunter2"));
        assert!(!format!("{credential:?}").contains("104"), "nor as numbers");
    }
}
