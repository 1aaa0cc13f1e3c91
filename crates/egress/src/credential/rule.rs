//! Which requests get a credential, and how.

use http::header::HeaderName;
use http::{Method, Uri};
use serde::{Deserialize, Serialize};

use super::covers;
use crate::policy::{Action, BadRule, Name, Ports, Target};

/// The most path prefixes or methods of one rule.
pub const PATHS_MAX: usize = 64;
/// The longest path prefix.
const PATH_BYTES_MAX: usize = 1024;
/// HTTPS.
const PORT_DEFAULT: u16 = 443;

/// How a credential gets into a request.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum How {
    /// As a header, after a prefix such as `Token `. Replaces what the program sent.
    Header {
        /// The header.
        name: String,
        /// What comes before the value.
        prefix: String,
    },
    /// As `Authorization: Bearer VALUE`.
    Bearer,
    /// As `Authorization: Basic`, with the value as the password.
    Basic {
        /// The user.
        user: String,
    },
    /// As a parameter of the query. Replaces what the program sent.
    Query {
        /// The parameter.
        name: String,
    },
    /// Wherever the program wrote the placeholder.
    Placeholder {
        /// In headers, also inside `Authorization: Basic`.
        header: bool,
        /// In the query.
        query: bool,
        /// In the body.
        body: bool,
    },
}

/// A rule as the user wrote it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CredentialRuleSpec {
    /// `api.example.com` or `*.example.com`.
    pub domain: String,
    /// Ports and ranges; 443 if there are none.
    pub ports: Vec<String>,
    /// Only these methods; all if there are none.
    pub methods: Vec<String>,
    /// Only these paths and what is below them; all if there are none.
    pub paths: Vec<String>,
    /// How.
    pub how: How,
}

/// A rule, checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CredentialRule {
    /// A host or a suffix.
    pub target: Target,
    /// On which ports.
    pub ports: Ports,
    /// For which methods; all if there are none.
    pub methods: Vec<String>,
    /// For which path prefixes; all if there are none.
    pub paths: Vec<String>,
    /// How.
    pub how: How,
}

/// Why a rule is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadCredentialRule {
    /// The domain or a port does not parse.
    #[error(transparent)]
    Rule(#[from] BadRule),
    /// Not a host.
    #[error("a credential must be bound to a host such as `api.example.com` or `*.example.com`, got `{0}`")]
    Domain(String),
    /// Anyone could register a name there.
    #[error("`{0}` is a public suffix: name the host that gets the credential")]
    PublicSuffix(Name),
    /// Not a method.
    #[error("a method must be a word such as GET, got `{0}`")]
    Method(String),
    /// `TRACE` and `CONNECT` send the request back, or elsewhere.
    #[error("`{0}` requests never get a credential")]
    Forbidden(String),
    /// Not a path prefix.
    #[error("a path must begin with `/` and contain no `..`, `?`, `#` or `%`, got `{0}`")]
    Path(String),
    /// Too many of them.
    #[error("a rule has at most {PATHS_MAX} paths and methods")]
    TooMany,
    /// Not a header, or one that has another meaning.
    #[error("a credential cannot be sent as the header `{0}`")]
    Header(String),
    /// Not usable as text in a header.
    #[error("`{0}` must be printable ASCII")]
    Text(&'static str),
    /// A user with a colon would become another user.
    #[error("the user of basic authentication must not contain `:`")]
    User,
    /// It would be replaced nowhere.
    #[error("a placeholder must be replaced in at least one of `header`, `query` and `body`")]
    Nowhere,
}

/// Headers that belong to the connection or say how to read the message.
const RESERVED: [&str; 12] = [
    "connection",
    "content-encoding",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "accept-encoding",
];

impl CredentialRuleSpec {
    /// Parses and checks the rule.
    pub fn check(&self) -> Result<CredentialRule, BadCredentialRule> {
        let shown = |text: &str| text.chars().take(80).collect::<String>();
        let target = Target::parse(&self.domain, Action::Allow)?;
        match &target {
            Target::Host(name) | Target::Suffix(name) if name.is_public_suffix() => {
                return Err(BadCredentialRule::PublicSuffix(name.clone()));
            }
            Target::Host(_) | Target::Suffix(_) => {}
            Target::Block(_) | Target::Any => return Err(BadCredentialRule::Domain(shown(&self.domain))),
        }
        let ports = match self.ports.as_slice() {
            [] => Ports::of(&[PORT_DEFAULT]),
            ports => Ports::parse(ports)?,
        };
        if self.methods.len() > PATHS_MAX || self.paths.len() > PATHS_MAX {
            return Err(BadCredentialRule::TooMany);
        }
        let mut methods = Vec::new();
        for method in &self.methods {
            let upper = method.to_ascii_uppercase();
            let word = !upper.is_empty() && upper.bytes().all(|byte| byte.is_ascii_uppercase());
            if !word || Method::from_bytes(upper.as_bytes()).is_err() {
                return Err(BadCredentialRule::Method(shown(method)));
            }
            if matches!(upper.as_str(), "TRACE" | "CONNECT") {
                return Err(BadCredentialRule::Forbidden(upper));
            }
            methods.push(upper);
        }
        for path in &self.paths {
            let plain = path.bytes().all(|byte| byte.is_ascii_graphic() && !b"?#%\\".contains(&byte));
            if !path.starts_with('/') || !plain || path.len() > PATH_BYTES_MAX || has_dots(path) {
                return Err(BadCredentialRule::Path(shown(path)));
            }
        }
        self.how.check()?;
        Ok(CredentialRule { target, ports, methods, paths: self.paths.clone(), how: self.how.clone() })
    }
}

impl How {
    fn check(&self) -> Result<(), BadCredentialRule> {
        let printable = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
        match self {
            Self::Header { name, prefix } => {
                let known = HeaderName::from_bytes(name.as_bytes());
                match known {
                    Ok(known) if !RESERVED.contains(&known.as_str()) => {}
                    _ => return Err(BadCredentialRule::Header(name.chars().take(80).collect())),
                }
                if !printable(prefix) {
                    return Err(BadCredentialRule::Text("prefix"));
                }
            }
            Self::Basic { user } if user.contains(':') => return Err(BadCredentialRule::User),
            Self::Basic { user } if !printable(user) => return Err(BadCredentialRule::Text("user")),
            Self::Query { name } => {
                let plain =
                    name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.~[]".contains(&byte));
                if name.is_empty() || !plain {
                    return Err(BadCredentialRule::Text("query"));
                }
            }
            Self::Placeholder { header: false, query: false, body: false } => {
                return Err(BadCredentialRule::Nowhere);
            }
            Self::Bearer | Self::Basic { .. } | Self::Placeholder { .. } => {}
        }
        Ok(())
    }
}

impl CredentialRule {
    /// Whether requests to this host and port may match.
    pub fn is_for(&self, name: &Name, port: u16) -> bool {
        covers(&self.target, name) && self.ports.contains(port)
    }

    /// Whether a request matches. The caller has checked that it is for the host.
    pub fn matches(&self, method: &Method, uri: &Uri) -> bool {
        let method = self.methods.is_empty() || self.methods.iter().any(|allowed| allowed == method.as_str());
        method && (self.paths.is_empty() || self.paths.iter().any(|prefix| is_below(uri.path(), prefix)))
    }

    /// More specific rules come first: an exact host, then longer paths, then rules with methods.
    pub(super) fn rank(&self) -> (bool, usize, bool) {
        let longest = self.paths.iter().map(String::len).max().unwrap_or(0);
        (matches!(self.target, Target::Host(_)), longest, !self.methods.is_empty())
    }
}

/// Whether a path lies below a prefix, at the border of a segment. A path that servers could read as another one (dots,
/// encoded slashes) lies below nothing.
fn is_below(path: &str, prefix: &str) -> bool {
    let strange = path.contains('\\') || has_dots(path) || {
        let lower = path.to_ascii_lowercase();
        ["%2e", "%2f", "%5c", "%25", "//"].iter().any(|part| lower.contains(part))
    };
    let trimmed = prefix.strip_suffix('/').unwrap_or(prefix);
    !strange
        && path
            .strip_prefix(trimmed)
            .is_some_and(|rest| rest.is_empty() && !prefix.ends_with('/') || rest.starts_with('/'))
}

fn has_dots(path: &str) -> bool {
    path.split('/').any(|segment| matches!(segment, "." | ".."))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(domain: &str) -> CredentialRuleSpec {
        CredentialRuleSpec {
            domain: domain.into(),
            ports: vec![],
            methods: vec![],
            paths: vec![],
            how: How::Bearer,
        }
    }

    #[test]
    fn a_credential_is_bound_to_hosts_that_one_owner_controls() {
        for domain in ["api.example.com", "*.example.com", "API.Example.com"] {
            spec(domain).check().expect(domain);
        }
        for domain in [
            "*",
            "any",
            "*.com",
            "com",
            "github.io",
            "*.github.io",
            "10.0.0.0/8",
            "10.0.0.1",
            "",
            "localhost",
        ] {
            spec(domain).check().expect_err(domain);
        }
    }

    #[test]
    fn rules_that_could_leak_or_break_a_message_are_refused() {
        let bad = |change: &dyn Fn(&mut CredentialRuleSpec)| {
            let mut rule = spec("a.example.com");
            change(&mut rule);
            rule.check().expect_err("a bad rule")
        };
        for method in ["TRACE", "trace", "CONNECT"] {
            bad(&|rule| rule.methods = vec![method.into()]);
        }
        for path in ["v1", "/a/../b", "/a?b", "/a%2fb", "/a\\b", "/a b"] {
            bad(&|rule| rule.paths = vec![path.into()]);
        }
        for header in ["Host", "Content-Length", "Transfer-Encoding", "bad header", "", "Connection"] {
            bad(&|rule| rule.how = How::Header { name: header.into(), prefix: String::new() });
        }
        bad(&|rule| rule.how = How::Header { name: "x-key".into(), prefix: "a\r\nb".into() });
        bad(&|rule| rule.how = How::Basic { user: "a:b".into() });
        bad(&|rule| rule.how = How::Query { name: "a&b".into() });
        bad(&|rule| rule.how = How::Placeholder { header: false, query: false, body: false });
    }

    #[test]
    fn a_path_lies_below_a_prefix_at_the_border_of_a_segment() {
        for (path, prefix, expected) in [
            ("/v1", "/v1", true),
            ("/v1/x", "/v1", true),
            ("/v1/x", "/v1/", true),
            ("/v1", "/v1/", false),
            ("/v1x", "/v1", false),
            ("/x", "/", true),
            ("/v1/../admin", "/v1", false),
            ("/v1/%2e%2e/admin", "/v1", false),
            ("/v1%2fadmin", "/v1", false),
            ("/v1//x", "/v1", false),
            ("/v1/\\x", "/v1", false),
        ] {
            assert_eq!(is_below(path, prefix), expected, "{path} below {prefix}");
        }
    }
}
