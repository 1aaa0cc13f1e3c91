//! Credentials for registries: from the caller, or from a Docker `config.json`.
//!
//! Programs that such a file names (`credHelpers`, `credsStore`) are not run: the daemon starts no foreign program
//! with its own rights. If one would have been needed, the error says so.

use std::collections::HashMap;
use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use crate::reference::REGISTRY_DEFAULT;

/// Largest `config.json`. It has one line per registry.
pub const CONFIG_MAX: usize = 1 << 20;

/// Credentials for a registry. Never printed.
#[derive(Clone, PartialEq, Eq, Default)]
pub enum Credentials {
    /// None.
    #[default]
    Anonymous,
    /// A user name and a password, or a token instead of the password.
    Basic {
        /// The user name.
        username: String,
        /// Secret.
        password: String,
    },
    /// A token to exchange for others.
    Identity {
        /// Secret.
        token: String,
    },
    /// A token to send unchanged.
    Bearer {
        /// Secret.
        token: String,
    },
}

impl Credentials {
    /// A user name and a password, if both can be sent.
    pub fn basic(username: &str, password: &str) -> Option<Self> {
        let sendable =
            |text: &str| !text.is_empty() && text.len() <= 64 * 1024 && !text.contains(['\r', '\n', '\0']);
        (sendable(username) && sendable(password) && !username.contains(':'))
            .then(|| Self::Basic { username: username.into(), password: password.into() })
    }

    /// Whether there are any.
    pub fn is_anonymous(&self) -> bool {
        matches!(self, Self::Anonymous)
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Anonymous => "Anonymous",
            Self::Basic { .. } => "Basic(…)",
            Self::Identity { .. } => "Identity(…)",
            Self::Bearer { .. } => "Bearer(…)",
        })
    }
}

/// The registries of a Docker `config.json`.
#[derive(Debug, Clone, Default)]
pub struct DockerConfig {
    known: HashMap<String, Credentials>,
    helpers: HashMap<String, String>,
    helper: Option<String>,
}

/// Why a `config.json` cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BadDockerConfig {
    /// Not JSON of the right form.
    #[error("it cannot be parsed")]
    Parse {
        /// The parser's error.
        source: serde_json::Error,
    },
    /// An invalid entry.
    #[error("its entry for `{registry}` must be base64 of NAME:PASSWORD")]
    Entry {
        /// The registry.
        registry: String,
    },
    /// Too long.
    #[error("it must have at most {CONFIG_MAX} bytes")]
    TooLong,
}

#[derive(Deserialize)]
struct Written {
    #[serde(default)]
    auths: HashMap<String, WrittenAuth>,
    #[serde(default, rename = "credHelpers")]
    helpers: HashMap<String, String>,
    #[serde(default, rename = "credsStore")]
    store: Option<String>,
}

#[derive(Deserialize)]
struct WrittenAuth {
    #[serde(default)]
    auth: String,
    #[serde(default)]
    username: String,
    #[serde(default)]
    password: String,
    #[serde(default)]
    identitytoken: String,
    #[serde(default)]
    registrytoken: String,
}

impl DockerConfig {
    /// Parses the file's text.
    pub fn parse(text: &[u8]) -> Result<Self, BadDockerConfig> {
        if text.len() > CONFIG_MAX {
            return Err(BadDockerConfig::TooLong);
        }
        let written: Written =
            serde_json::from_slice(text).map_err(|source| BadDockerConfig::Parse { source })?;
        let mut known = HashMap::new();
        for (key, auth) in written.auths {
            let registry = host_of(&key);
            let bad = || BadDockerConfig::Entry { registry: registry.clone() };
            let credentials = if !auth.identitytoken.is_empty() {
                Credentials::Identity { token: auth.identitytoken }
            } else if !auth.registrytoken.is_empty() {
                Credentials::Bearer { token: auth.registrytoken }
            } else if !auth.auth.is_empty() {
                let text =
                    STANDARD.decode(auth.auth.trim()).ok().and_then(|bytes| String::from_utf8(bytes).ok());
                let text = text.ok_or_else(bad)?;
                let (username, password) = text.split_once(':').ok_or_else(bad)?;
                // Old versions of Docker pad with NULs.
                Credentials::basic(username, password.trim_end_matches('\0')).ok_or_else(bad)?
            } else if !auth.username.is_empty() {
                Credentials::basic(&auth.username, &auth.password).ok_or_else(bad)?
            } else {
                continue; // A credential helper has them.
            };
            known.insert(registry, credentials);
        }
        let helpers = written.helpers.into_iter().map(|(key, helper)| (host_of(&key), helper)).collect();
        Ok(Self { known, helpers, helper: written.store })
    }

    /// The credentials for a registry, if the file itself contains any.
    pub fn find(&self, registry: &str) -> Credentials {
        self.known.get(registry).cloned().unwrap_or_default()
    }

    /// The credential helper for this registry, if one is configured.
    pub fn helper_for(&self, registry: &str) -> Option<&str> {
        match self.known.contains_key(registry) {
            true => None,
            false => self.helpers.get(registry).or(self.helper.as_ref()).map(String::as_str),
        }
    }
}

/// The registry that a key of the file refers to: `https://index.docker.io/v1/` is docker.io's.
fn host_of(key: &str) -> String {
    let rest = key.split_once("://").map_or(key, |(_, rest)| rest);
    let host = rest.split('/').next().unwrap_or_default().to_ascii_lowercase();
    match host.as_str() {
        "index.docker.io" | "registry-1.docker.io" => REGISTRY_DEFAULT.into(),
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_docker_config_is_read_as_docker_reads_it() {
        let text = br#"{
            "auths": {
                "https://index.docker.io/v1/": {"auth": "YWRhOnNlY3JldDp4"},
                "reg.local:5000": {"username": "bob", "password": "pass"},
                "token.local": {"identitytoken": "t"},
                "helped.local": {}
            },
            "credHelpers": {"gcr.io": "gcloud"}, "credsStore": "desktop", "HttpHeaders": {"a": "b"}
        }"#;
        let config = DockerConfig::parse(text).expect("it parses");
        let basic = |username: &str, password: &str| Credentials::basic(username, password).expect("good");
        assert_eq!(config.find("docker.io"), basic("ada", "secret:x"));
        assert_eq!(config.find("reg.local:5000"), basic("bob", "pass"));
        assert_eq!(config.find("token.local"), Credentials::Identity { token: "t".into() });
        assert_eq!(config.find("helped.local"), Credentials::Anonymous);
        assert_eq!(config.helper_for("gcr.io"), Some("gcloud"));
        assert_eq!(config.helper_for("helped.local"), Some("desktop"));
        assert_eq!(config.helper_for("docker.io"), None);
        assert!(!format!("{config:?}").contains("secret"));
    }

    #[test]
    fn a_broken_docker_config_is_refused() {
        for text in
            [&b"{"[..], br#"{"auths": {"a": {"auth": "%%"}}}"#, br#"{"auths": {"a": {"auth": "YWRh"}}}"#]
        {
            DockerConfig::parse(text).expect_err("it is refused");
        }
        for (username, password) in [("", "p"), ("a:b", "p"), ("a", ""), ("a\r\nx: y", "p"), ("a", "p\n")] {
            assert_eq!(Credentials::basic(username, password), None);
        }
    }
}
