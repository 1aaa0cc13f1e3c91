//! Secrets that sandboxes use without holding them: encrypted rows, presets, placeholders.
//!
//! [`Secrets`] has all of them in memory, their values encrypted. [`Secrets::credentials`] decrypts those of one sandbox for
//! egress, which adds them to requests. Nothing here returns a value to a caller. `keyring` keeps the keys, `presets` knows
//! services, `ledger` chains the lines about what was used.

pub(crate) mod keyring;
pub(crate) mod ledger;
mod presets;

use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use egress::credential::{Credential, CredentialRule, Value};
use egress::policy::{Action, Protocol, Rule};
use egress::presets::Found;
use serde::{Deserialize, Serialize};
use wire::SandboxId;

use crate::access::signing::Signer;
use crate::error::{EngineError, Field};
use crate::model::Owner;
use crate::model::network::NetworkPolicy;
use crate::model::secret::{
    SECRET_RULES_MAX, SecretHow, SecretRule, SecretSource, SecretSpec, SecretView, VALUE_BYTES_MAX,
};
use keyring::Keyring;

/// The most variables of one secret.
const VARIABLES_MAX: usize = 8;
/// What every placeholder contains.
const PLACEHOLDER_MARK: &str = "shoal";
/// Bytes of the part of a placeholder that tells secrets and families of sandboxes apart.
const PLACEHOLDER_BYTES: usize = 16;

/// What is written in a row beside the value.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Bindings {
    pub rules: Vec<RuleText>,
    pub variables: Vec<String>,
    /// How placeholders begin, for programs that look at the beginning of a key.
    pub prefix: String,
}

/// A rule in a row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct RuleText {
    domain: String,
    #[serde(default)]
    ports: Vec<String>,
    #[serde(default)]
    methods: Vec<String>,
    #[serde(default)]
    paths: Vec<String>,
    how: SecretHow,
}

impl From<SecretRule> for RuleText {
    fn from(rule: SecretRule) -> Self {
        let SecretRule { domain, ports, methods, paths, how } = rule;
        Self { domain, ports, methods, paths, how }
    }
}

impl From<RuleText> for SecretRule {
    fn from(rule: RuleText) -> Self {
        let RuleText { domain, ports, methods, paths, how } = rule;
        Self { domain, ports, methods, paths, how }
    }
}

/// A row.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SecretRow {
    pub id: u128,
    pub owner: Owner,
    pub name: String,
    pub source: &'static str,
    pub origin: String,
    pub sealed: Vec<u8>,
    pub key: String,
    pub bindings: Bindings,
    pub cache_seconds: u64,
    pub version: u32,
    pub created_at: SystemTime,
    pub updated_at: SystemTime,
}

pub(crate) const VALUE: &str = "value";
pub(crate) const FILE: &str = "file";
pub(crate) const ENVIRONMENT: &str = "environment";

struct Secret {
    row: SecretRow,
    rules: Vec<CredentialRule>,
    /// What was last read of a file or a variable, and when.
    read: Mutex<Option<(Instant, Option<Value>)>>,
}

type Table = HashMap<Owner, BTreeMap<String, Arc<Secret>>>;

/// All secrets.
pub(crate) struct Secrets {
    keyring: Keyring,
    signer: Signer,
    registries: Vec<Found>,
    table: Mutex<Table>,
}

impl Secrets {
    pub fn new(keyring: Keyring, signer: Signer, registries: Vec<Found>, rows: Vec<SecretRow>) -> Self {
        let secrets = Self { keyring, signer, registries, table: Mutex::default() };
        for row in rows {
            secrets.put(row);
        }
        secrets
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, owner: &Owner, name: &str) -> Option<Arc<Secret>> {
        self.table().get(owner)?.get(name).cloned()
    }

    /// Whether an owner has a secret of this name.
    pub fn has(&self, owner: &Owner, name: &str) -> bool {
        self.get(owner, name).is_some()
    }

    /// How many secrets an owner has.
    pub fn count(&self, owner: &Owner) -> usize {
        self.table().get(owner).map_or(0, BTreeMap::len)
    }

    /// The row for what a caller wants to keep.
    pub fn row(&self, owner: &Owner, spec: SecretSpec, now: SystemTime) -> Result<SecretRow, EngineError> {
        let before = self.get(owner, spec.name.as_str());
        let mut bindings = match &spec.preset {
            Some(preset) => presets::find(preset, &self.registries)?,
            None => match (&before, presets::find(spec.name.as_str(), &self.registries)) {
                (Some(before), _) => before.row.bindings.clone(),
                (None, Ok(preset)) if spec.rules.is_empty() => preset,
                // A name that is a preset which this version does not serve must not pass for one that it does.
                (None, Err(error)) if spec.rules.is_empty() && presets::is_known(spec.name.as_str()) => {
                    return Err(error);
                }
                (None, _) => Bindings::default(),
            },
        };
        if !spec.rules.is_empty() {
            bindings.rules = spec.rules.into_iter().map(RuleText::from).collect();
        }
        if !spec.variables.is_empty() {
            bindings.variables = spec.variables;
        }
        if bindings.rules.is_empty() {
            let names = presets::NAMES.join(", ");
            let rule = format!("name at least one destination, or a preset ({names})");
            return Err(Field::Rules.must(rule));
        }
        if bindings.rules.len() > SECRET_RULES_MAX {
            return Err(
                Field::Rules.must(format!("be at most {SECRET_RULES_MAX}, got {}", bindings.rules.len()))
            );
        }
        checked(&bindings)?;
        check_variables(&bindings.variables)?;
        let id = before.as_ref().map_or_else(crate::model::random::random_u128, |before| before.row.id);
        let (source, origin, value) = match spec.source {
            SecretSource::Value(value) => {
                check_value(value.bytes())?;
                (VALUE, String::new(), Some(value))
            }
            SecretSource::File(path) => {
                let text = path.to_str().filter(|text| text.starts_with('/') && !text.contains('\0'));
                let text = text.ok_or_else(|| Field::Path.must("be an absolute path"))?;
                (FILE, text.to_owned(), None)
            }
            SecretSource::Environment(name) => {
                check_variables(std::slice::from_ref(&name))?;
                (ENVIRONMENT, name, None)
            }
        };
        let (key, sealed) = match value {
            Some(value) => self.keyring.seal(id, value.bytes()),
            None => (String::new(), Vec::new()),
        };
        Ok(SecretRow {
            id,
            owner: owner.clone(),
            name: spec.name.as_str().to_owned(),
            source,
            origin,
            sealed,
            key,
            bindings,
            cache_seconds: spec.cache.as_secs(),
            version: before.as_ref().map_or(1, |before| before.row.version.saturating_add(1)),
            created_at: before.as_ref().map_or(now, |before| before.row.created_at),
            updated_at: now,
        })
    }

    /// Puts a row in force.
    pub fn put(&self, row: SecretRow) {
        // Rules in rows were checked when they were written; one that this version rejects matches nothing.
        let rules = row.bindings.rules.iter().filter_map(|rule| SecretRule::from(rule.clone()).check().ok());
        let secret = Secret { rules: rules.collect(), read: Mutex::default(), row };
        let (owner, name) = (secret.row.owner.clone(), secret.row.name.clone());
        self.table().entry(owner).or_default().insert(name, Arc::new(secret));
    }

    /// Forgets a secret. `None` if there was none.
    pub fn remove(&self, owner: &Owner, name: &str) -> Option<u128> {
        let mut table = self.table();
        let of_owner = table.get_mut(owner)?;
        let removed = of_owner.remove(name)?;
        if of_owner.is_empty() {
            table.remove(owner);
        }
        Some(removed.row.id)
    }

    /// An owner's secrets by name. `admin`: with paths.
    pub fn list(&self, owner: &Owner, admin: bool) -> Vec<SecretView> {
        let secrets: Vec<_> =
            self.table().get(owner).into_iter().flat_map(BTreeMap::values).cloned().collect();
        secrets.iter().map(|secret| secret.view(admin)).collect()
    }

    /// One of an owner's secrets.
    pub fn view(&self, owner: &Owner, name: &str, admin: bool) -> Option<SecretView> {
        self.get(owner, name).map(|secret| secret.view(admin))
    }

    /// The secrets that a policy names and that exist.
    fn bound(&self, owner: &Owner, policy: &NetworkPolicy) -> Vec<Arc<Secret>> {
        policy.inject().iter().filter_map(|name| self.get(owner, name)).collect()
    }

    /// What a sandbox must be able to reach to use its secrets.
    pub fn opened(&self, owner: &Owner, policy: &NetworkPolicy) -> Vec<Rule> {
        let secrets = self.bound(owner, policy);
        let rules = secrets.iter().flat_map(|secret| &secret.rules);
        rules
            .map(|rule| Rule {
                action: Action::Allow,
                target: rule.target.clone(),
                ports: rule.ports.clone(),
                protocol: Some(Protocol::Tls),
                private: false,
            })
            .collect()
    }

    /// The variables of a sandbox's commands, with placeholders.
    pub fn variables(&self, owner: &Owner, policy: &NetworkPolicy, id: SandboxId) -> Vec<(String, String)> {
        if policy.inject().is_empty() {
            return Vec::new();
        }
        let family = policy.family(id);
        self.bound(owner, policy)
            .iter()
            .flat_map(|secret| {
                let placeholder = self.placeholder(secret, family);
                secret.row.bindings.variables.iter().map(move |name| (name.clone(), placeholder.clone()))
            })
            .collect()
    }

    /// What stands for a secret in a family of sandboxes.
    fn placeholder(&self, secret: &Secret, family: SandboxId) -> String {
        let parts = [secret.row.id.to_be_bytes(), family.bits().to_be_bytes()];
        let tag = self.signer.tag_of_list(parts.iter().map(<[u8; 16]>::as_slice));
        let hex: String = tag[..PLACEHOLDER_BYTES].iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{}{PLACEHOLDER_MARK}{hex}", secret.row.bindings.prefix)
    }

    /// The secrets of a sandbox with their values, for egress. Reads files. Blocks.
    pub fn credentials(&self, owner: &Owner, policy: &NetworkPolicy, id: SandboxId) -> Vec<Credential> {
        if policy.inject().is_empty() {
            return Vec::new();
        }
        let family = policy.family(id);
        let credential = |secret: &Arc<Secret>| Credential {
            id: secret.row.id,
            name: secret.row.name.clone(),
            value: self.value(secret),
            placeholder: self.placeholder(secret, family),
            rules: secret.rules.clone(),
        };
        self.bound(owner, policy).iter().map(credential).collect()
    }

    fn value(&self, secret: &Secret) -> Option<Value> {
        if secret.row.source == VALUE {
            let opened = self.keyring.unseal(secret.row.id, &secret.row.key, &secret.row.sealed);
            if opened.is_none() {
                tracing::error!(secret = secret.row.name, "a secret cannot be decrypted: its key is missing");
            }
            return opened.map(Value::new);
        }
        let mut read = secret.read.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = Duration::from_secs(secret.row.cache_seconds);
        if let Some((at, value)) = read.as_ref()
            && at.elapsed() < fresh
        {
            return value.clone();
        }
        let value = secret.read_source();
        *read = Some((Instant::now(), value.clone()));
        value
    }

    /// Reads the source of a secret again if its time is over, or at once. Returns whether the value has changed.
    pub fn refresh(&self, owner: &Owner, id: u128, at_once: bool) -> bool {
        let secret = self.table().get(owner).and_then(|all| all.values().find(|it| it.row.id == id).cloned());
        let Some(secret) = secret.filter(|secret| secret.row.source != VALUE) else { return false };
        let before = {
            let mut read = secret.read.lock().unwrap_or_else(PoisonError::into_inner);
            match read.as_ref() {
                Some((at, _)) if !at_once && at.elapsed() < Duration::from_secs(secret.row.cache_seconds) => {
                    return false;
                }
                Some((_, value)) => {
                    let value = value.clone();
                    *read = None;
                    value
                }
                // Nothing uses it yet.
                None => return false,
            }
        };
        self.value(&secret) != before
    }

    /// The ids of secrets that are read from elsewhere.
    pub fn read_elsewhere(&self) -> Vec<(Owner, u128)> {
        let table = self.table();
        let all =
            table.iter().flat_map(|(owner, secrets)| secrets.values().map(move |secret| (owner, secret)));
        all.filter(|(_, secret)| secret.row.source != VALUE)
            .map(|(owner, secret)| (owner.clone(), secret.row.id))
            .collect()
    }

    /// The name of a secret.
    pub fn name_of(&self, owner: &Owner, id: u128) -> Option<String> {
        let table = self.table();
        table.get(owner)?.values().find(|secret| secret.row.id == id).map(|secret| secret.row.name.clone())
    }
}

impl Secret {
    fn view(&self, admin: bool) -> SecretView {
        let row = &self.row;
        SecretView {
            name: row.name.clone(),
            source: row.source,
            origin: Some(row.origin.clone()).filter(|origin| admin && !origin.is_empty()),
            rules: row.bindings.rules.iter().cloned().map(SecretRule::from).collect(),
            variables: row.bindings.variables.clone(),
            version: row.version,
            sandboxes: 0,
            created_at: row.created_at,
            updated_at: row.updated_at,
        }
    }

    fn read_source(&self) -> Option<Value> {
        let bytes = match self.row.source {
            FILE => read_file(&self.row.origin),
            // The daemon's own variables are the source that the operator chose.
            _ => std::env::var(&self.row.origin)
                .map(String::into_bytes)
                .map_err(|_| std::io::ErrorKind::NotFound.into()),
        };
        match bytes {
            Ok(mut bytes) => {
                let end =
                    bytes.iter().rposition(|byte| !matches!(byte, b'\n' | b'\r')).map_or(0, |at| at + 1);
                bytes.truncate(end);
                Some(Value::new(bytes)).filter(|value| check_value(value.bytes()).is_ok())
            }
            Err(error) => {
                tracing::error!(secret = self.row.name, %error, "cannot read the source of a secret");
                None
            }
        }
    }
}

fn read_file(path: &str) -> std::io::Result<Vec<u8>> {
    let file = std::fs::File::open(path)?;
    if !file.metadata()?.is_file() {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    let mut bytes = Vec::new();
    file.take(VALUE_BYTES_MAX as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn check_value(bytes: &[u8]) -> Result<(), EngineError> {
    let fits = (1..=VALUE_BYTES_MAX).contains(&bytes.len());
    let plain = bytes.iter().all(|byte| *byte == b'\t' || (*byte >= b' ' && *byte != 0x7f));
    match fits && plain {
        true => Ok(()),
        // Never the value itself.
        false => Err(Field::Value
            .must(format!("be 1 to {VALUE_BYTES_MAX} bytes without line ends and control characters"))),
    }
}

/// The rules, checked.
fn checked(bindings: &Bindings) -> Result<Vec<CredentialRule>, EngineError> {
    let check = |(at, rule): (usize, &RuleText)| {
        let checked = SecretRule::from(rule.clone()).check();
        checked.map_err(|bad| Field::Rules.must(format!("be valid; rule {} is not: {bad}", at + 1)))
    };
    bindings.rules.iter().enumerate().map(check).collect()
}

fn check_variables(names: &[String]) -> Result<(), EngineError> {
    if names.len() > VARIABLES_MAX {
        return Err(Field::Variables.must(format!("be at most {VARIABLES_MAX}, got {}", names.len())));
    }
    for name in names {
        let begins = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'_');
        let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if !begins || !plain || name.len() > 128 {
            let rule = format!("be names of letters, digits and `_`, got `{}`", crate::error::shown(name));
            return Err(Field::Variables.must(rule));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::secret::{CACHE_DEFAULT, SecretName};

    fn secrets() -> (tempfile::TempDir, Secrets) {
        let place = tempfile::tempdir().expect("a directory");
        let keyring = Keyring::open(place.path()).expect("a keyring");
        (place, Secrets::new(keyring, Signer::new([7; 32]), Vec::new(), Vec::new()))
    }

    fn spec(name: &str, value: &str) -> SecretSpec {
        SecretSpec {
            name: SecretName::parse(name).expect("a name"),
            source: SecretSource::Value(Value::new(value.as_bytes().to_vec())),
            preset: None,
            rules: Vec::new(),
            variables: Vec::new(),
            cache: CACHE_DEFAULT,
        }
    }

    fn owner() -> Owner {
        Owner::parse("alice").expect("an owner")
    }

    #[test]
    fn a_row_holds_no_value_and_egress_gets_it() {
        let (_place, secrets) = secrets();
        let row =
            secrets.row(&owner(), spec("openai", "sk-very-secret-value"), SystemTime::now()).expect("a row");
        let text = format!("{row:?}");
        assert!(!text.contains("very-secret") && !row.sealed.windows(6).any(|part| part == b"secret"));
        secrets.put(row);
        let policy = NetworkPolicy::default().with_inject(&["openai".into()]).expect("a policy");
        let id = SandboxId::from_random(1);
        let credentials = secrets.credentials(&owner(), &policy, id);
        assert_eq!(credentials[0].value.as_ref().map(Value::bytes), Some(&b"sk-very-secret-value"[..]));
        let variables = secrets.variables(&owner(), &policy, id);
        assert_eq!(variables, [("OPENAI_API_KEY".to_owned(), credentials[0].placeholder.clone())]);
        assert!(credentials[0].placeholder.starts_with("sk-shoal"));
        let other = Owner::parse("bob").expect("an owner");
        assert!(secrets.credentials(&other, &policy, id).is_empty(), "another owner has no such secret");
    }

    #[test]
    fn a_rotated_secret_keeps_its_id_placeholder_and_rules() {
        let (_place, secrets) = secrets();
        let policy = NetworkPolicy::default().with_inject(&["github".into()]).expect("a policy");
        let id = SandboxId::from_random(1);
        secrets.put(secrets.row(&owner(), spec("github", "first-value"), SystemTime::now()).expect("a row"));
        let before = secrets.credentials(&owner(), &policy, id);
        secrets.put(secrets.row(&owner(), spec("github", "second-value"), SystemTime::now()).expect("a row"));
        let after = secrets.credentials(&owner(), &policy, id);
        assert_eq!((&before[0].id, &before[0].placeholder), (&after[0].id, &after[0].placeholder));
        assert_eq!(before[0].rules, after[0].rules);
        assert_eq!(after[0].value.as_ref().map(Value::bytes), Some(&b"second-value"[..]));
        assert_eq!(secrets.view(&owner(), "github", true).expect("a secret").version, 2);
        let other = secrets.credentials(&owner(), &policy, SandboxId::from_random(2));
        assert_ne!(after[0].placeholder, other[0].placeholder, "each family has its own");
        let child = policy.of_family(id);
        let child = secrets.credentials(&owner(), &child, SandboxId::from_random(3));
        assert_eq!(after[0].placeholder, child[0].placeholder, "a fork has its parent's");
    }

    #[test]
    fn secrets_without_a_destination_and_bad_values_are_refused() {
        let (_place, secrets) = secrets();
        let refused = |spec| secrets.row(&owner(), spec, SystemTime::now()).expect_err("refused").to_string();
        assert!(refused(spec("mine", "value")).contains("preset"));
        assert!(refused(spec("aws", "value")).contains("SigV4"));
        let bad = refused(spec("openai", "two\nlines"));
        assert!(bad.contains("line ends") && !bad.contains("two"), "{bad}");
        let rule = SecretRule {
            domain: "*.com".into(),
            ports: vec![],
            methods: vec![],
            paths: vec![],
            how: SecretHow::Bearer,
        };
        assert!(refused(SecretSpec { rules: vec![rule], ..spec("mine", "value") }).contains("public suffix"));
    }

    #[test]
    fn a_file_is_read_again_after_its_time_or_at_once() {
        let (place, secrets) = secrets();
        let path = place.path().join("token");
        std::fs::write(&path, "first-value\n").expect("written");
        let source = SecretSource::File(path.clone());
        let spec = SecretSpec { source, ..spec("openai", "x") };
        let row = secrets.row(&owner(), spec, SystemTime::now()).expect("a row");
        let id = row.id;
        secrets.put(row);
        let policy = NetworkPolicy::default().with_inject(&["openai".into()]).expect("a policy");
        let value = || {
            let credentials = secrets.credentials(&owner(), &policy, SandboxId::from_random(1));
            credentials[0].value.as_ref().map(|value| String::from_utf8_lossy(value.bytes()).into_owned())
        };
        assert_eq!(value().as_deref(), Some("first-value"));
        std::fs::write(&path, "second-value\n").expect("written");
        assert_eq!(value().as_deref(), Some("first-value"), "its time is not over");
        assert!(!secrets.refresh(&owner(), id, false) && secrets.refresh(&owner(), id, true));
        assert_eq!(value().as_deref(), Some("second-value"));
        std::fs::remove_file(&path).expect("removed");
        assert!(secrets.refresh(&owner(), id, true));
        assert_eq!(value(), None, "a missing file stops requests, it does not keep an old value");
    }
}
