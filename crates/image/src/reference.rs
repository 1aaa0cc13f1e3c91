//! Image references: `python:3.12`, `registry.local:5000/team/app@sha256:…`.
//!
//! The grammar is that of Docker's references, since that is what people write. A reference has one canonical form,
//! with registry and tag or digest; rows store that form. A reference never becomes part of a path.

use std::fmt;
use std::str::FromStr;

use wire::Digest;

/// The registry of names without one.
pub const REGISTRY_DEFAULT: &str = "docker.io";
/// The namespace of images without an owner on it.
const LIBRARY: &str = "library";
/// The tag of names with neither tag nor digest.
const TAG_DEFAULT: &str = "latest";
/// Longest registry and repository together, as registries allow.
const NAME_MAX: usize = 255;
/// Longest tag, as registries allow.
const TAG_MAX: usize = 128;
/// Longest reference: name, tag and digest.
pub const REFERENCE_MAX: usize = NAME_MAX + 1 + TAG_MAX + 1 + 71;

/// A checked reference.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ImageRef {
    registry: String,
    repository: String,
    tag: Option<String>,
    digest: Option<Digest>,
}

/// Why a text is not a reference.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not an image reference: {why}")]
pub struct BadReference {
    /// The beginning of the text.
    pub text: String,
    /// What is wrong.
    pub why: &'static str,
}

impl ImageRef {
    /// Parses a reference in any form.
    pub fn parse(text: &str) -> Result<Self, BadReference> {
        let bad = |why| BadReference { text: text.chars().take(100).collect(), why };
        if text.is_empty() {
            return Err(bad("it is empty"));
        }
        if text.len() > REFERENCE_MAX {
            return Err(bad("it is too long"));
        }
        let (rest, digest) = match text.split_once('@') {
            None => (text, None),
            Some((rest, digest)) => {
                let digest = digest
                    .parse()
                    .map_err(|_| bad("a digest must be `sha256:` followed by 64 of 0-9 a-f"))?;
                (rest, Some(digest))
            }
        };
        // A colon after the last slash begins a tag; a colon before it, a port.
        let (name, tag) = match rest.rsplit_once(':') {
            Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
            Some(_) | None => (rest, None),
        };
        if tag.is_some_and(|tag| !is_tag(tag)) {
            return Err(bad("a tag must be 1 to 128 of A-Z a-z 0-9 _ . -, and must not begin with . or -"));
        }
        let (registry, path) = match name.split_once('/') {
            Some((first, path)) if is_registry_like(first) => (first, path),
            Some(_) | None => (REGISTRY_DEFAULT, name),
        };
        let registry = registry.to_ascii_lowercase();
        let registry = if registry == "index.docker.io" { REGISTRY_DEFAULT.into() } else { registry };
        if !is_host(&registry) {
            return Err(bad("its registry must be a host name with an optional port"));
        }
        let repository = match path.contains('/') || registry != REGISTRY_DEFAULT {
            true => path.to_owned(),
            false => format!("{LIBRARY}/{path}"),
        };
        if !repository.split('/').all(is_component) {
            return Err(bad(
                "a repository must consist of a-z 0-9 with single . _ or - between them, and slashes",
            ));
        }
        if registry.len() + 1 + repository.len() > NAME_MAX {
            return Err(bad("it is too long"));
        }
        let tag = tag.or((digest.is_none()).then_some(TAG_DEFAULT)).map(str::to_owned);
        Ok(Self { registry, repository, tag, digest })
    }

    /// Host and port of the registry, as people write them.
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// The repository on that registry.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The tag, if there is one. A digest beside it takes precedence.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// The digest, if there is one.
    pub fn digest(&self) -> Option<Digest> {
        self.digest
    }

    /// What to request from the registry: the digest, otherwise the tag.
    pub fn wanted(&self) -> String {
        match (self.digest, &self.tag) {
            (Some(digest), _) => digest.to_string(),
            (None, Some(tag)) => tag.clone(),
            (None, None) => TAG_DEFAULT.into(),
        }
    }

    /// The shortest form, for people.
    pub fn familiar(&self) -> String {
        let full = self.to_string();
        let Some(short) = full.strip_prefix("docker.io/") else { return full };
        match short.strip_prefix("library/") {
            // A first part with a dot would be parsed as a registry.
            Some(shorter) if !shorter.contains('/') => shorter.to_owned(),
            Some(_) | None => match short.split_once('/') {
                Some((first, _)) if is_registry_like(first) => full,
                Some(_) | None => short.to_owned(),
            },
        }
    }
}

impl fmt::Display for ImageRef {
    /// The canonical form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        match self.digest {
            Some(digest) => write!(f, "@{digest}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for ImageRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for ImageRef {
    type Err = BadReference;

    fn from_str(text: &str) -> Result<Self, BadReference> {
        Self::parse(text)
    }
}

/// Whether the first part of a name is a registry and not the first part of a repository.
fn is_registry_like(first: &str) -> bool {
    first.contains(['.', ':']) || first == "localhost"
}

/// A host name or an address, with or without a port.
pub(crate) fn is_host(text: &str) -> bool {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((address, "")) => (Err(address), None),
            Some((address, port)) => match port.strip_prefix(':') {
                Some(port) => (Err(address), Some(port)),
                None => return false,
            },
            None => return false,
        },
        None => match text.split_once(':') {
            Some((host, port)) => (Ok(host), Some(port)),
            None => (Ok(text), None),
        },
    };
    let good_port = port.is_none_or(|port| {
        // `parse` alone would accept a sign.
        port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port > 0)
    });
    let label = |label: &str| {
        let inner = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        !label.is_empty() && label.bytes().all(inner) && !label.starts_with('-') && !label.ends_with('-')
    };
    let good_host = match host {
        Ok(name) => name.split('.').all(label),
        Err(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
    };
    good_host && good_port
}

/// Letters and digits, with a dot, one or two underscores, or dashes between them.
fn is_component(component: &str) -> bool {
    let bytes = component.as_bytes();
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let ends = [bytes.first(), bytes.last()];
    if !ends.iter().all(|end| end.is_some_and(|end| plain(*end))) {
        return false;
    }
    component
        .split(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
        .all(|between| matches!(between, "" | "." | "_" | "__") || between.bytes().all(|byte| byte == b'-'))
}

fn is_tag(tag: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    (1..=TAG_MAX).contains(&tag.len())
        && tag.bytes().next().is_some_and(word)
        && tag.bytes().all(|byte| word(byte) || matches!(byte, b'.' | b'-'))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DIGEST: &str = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

    #[test]
    fn every_spelling_has_one_canonical_form() {
        #[track_caller]
        fn check(text: &str, canonical: &str, familiar: &str) {
            let reference = ImageRef::parse(text).expect(text);
            assert_eq!(reference.to_string(), canonical);
            assert_eq!(reference.familiar(), familiar);
            assert_eq!(ImageRef::parse(canonical).expect(canonical), reference);
            assert_eq!(ImageRef::parse(familiar).expect(familiar), reference);
        }
        check("python", "docker.io/library/python:latest", "python:latest");
        check("python:3.12-slim", "docker.io/library/python:3.12-slim", "python:3.12-slim");
        check("bitnami/redis", "docker.io/bitnami/redis:latest", "bitnami/redis:latest");
        check("docker.io/python", "docker.io/library/python:latest", "python:latest");
        check("index.docker.io/a/b", "docker.io/a/b:latest", "a/b:latest");
        check("localhost/a", "localhost/a:latest", "localhost/a:latest");
        check("Reg.Local:5000/a/b/c:T_1", "reg.local:5000/a/b/c:T_1", "reg.local:5000/a/b/c:T_1");
        check("127.0.0.1:5000/a", "127.0.0.1:5000/a:latest", "127.0.0.1:5000/a:latest");
        check("[::1]:5000/a", "[::1]:5000/a:latest", "[::1]:5000/a:latest");
        let pinned = format!("docker.io/library/a@{DIGEST}");
        check(&format!("a@{DIGEST}"), &pinned, &format!("a@{DIGEST}"));
        check(&format!("a:1@{DIGEST}"), &format!("docker.io/library/a:1@{DIGEST}"), &format!("a:1@{DIGEST}"));
        check("a--b__c.d-e", "docker.io/library/a--b__c.d-e:latest", "a--b__c.d-e:latest");
        check("docker.io/x.y/z", "docker.io/x.y/z:latest", "docker.io/x.y/z:latest");
    }

    #[test]
    fn what_is_no_reference_is_refused() {
        let long = "a".repeat(300);
        for text in [
            "",
            " ",
            "/",
            "a/",
            "/a",
            "a//b",
            "A",
            "A/a",
            "a:",
            "a:-x",
            "a:.x",
            ":x",
            "a b",
            "a\n",
            "../a",
            "a/../b",
            "a/./b",
            "a_",
            "_a",
            "a___b",
            "a..b",
            "a._b",
            "-a",
            "a@",
            "a@sha256:12",
            "a@sha512:aa",
            "@x",
            "a@b@c",
            "reg.local:99999/a",
            "reg.local:/a",
            "reg.local:+5/a",
            "-x.y/a",
            "x..y/a",
            "[::1/a",
            "[zz]/a",
            "ü",
            "a:ü",
            "http://x.y/a",
            "x.y/",
            &long,
            &format!("a:{long}"),
        ] {
            ImageRef::parse(text).expect_err(text);
        }
    }

    proptest! {
        #[test]
        fn whatever_parses_prints_and_parses_the_same(text in "[a-zA-Z0-9./:@_\\-\\[\\]]{0,40}") {
            if let Ok(reference) = ImageRef::parse(&text) {
                prop_assert_eq!(ImageRef::parse(&reference.to_string()), Ok(reference.clone()));
                prop_assert_eq!(ImageRef::parse(&reference.familiar()), Ok(reference));
            }
        }
    }
}
