//! Host names, in the one spelling that is compared: lower case, A-labels, no dot at the end.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// RFC 1035: a name is at most this long, written out and without the dot at the end.
pub const NAME_BYTES_MAX: usize = 253;
/// RFC 1035.
pub const LABEL_BYTES_MAX: usize = 63;

/// The name of a host. Checked once; two names are the same host if they are equal.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(Arc<str>);

/// Why a text is not the name of a host.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadName {
    /// Nothing, or a lone dot.
    #[error("a host name must not be empty")]
    Empty,
    /// Longer than a name can be on the wire.
    #[error(
        "a host name must have at most {NAME_BYTES_MAX} characters, with labels of 1 to {LABEL_BYTES_MAX}, got `{0}`"
    )]
    Length(String),
    /// A character that no host name has.
    #[error("a host name must consist of letters, digits, `-`, `_` and dots, got `{0}`")]
    Character(String),
    /// Not valid under IDNA.
    #[error("`{0}` is not a valid internationalised host name")]
    Idna(String),
    /// Other parsers would read it as an IPv4 address: `127.1`, `2130706433`, `0x7f.1`.
    #[error("`{0}` ends in a number, so it would be read as an address: write the address as four numbers")]
    Number(String),
}

impl Name {
    /// Parses a name as people, rules and headers write it.
    pub fn parse(text: &str) -> Result<Self, BadName> {
        let bare = text.strip_suffix('.').unwrap_or(text);
        if bare.is_empty() {
            return Err(BadName::Empty);
        }
        // A long text is rejected before it is mapped: mapping costs time.
        if bare.len() > 4 * NAME_BYTES_MAX {
            return Err(BadName::Length(shortened(text)));
        }
        let ascii = if bare.is_ascii() && !has_a_label(bare) {
            bare.to_ascii_lowercase()
        } else {
            idna::domain_to_ascii(bare).map_err(|_| BadName::Idna(shortened(text)))?
        };
        Self::checked(&ascii, text)
    }

    /// Parses a name from a packet: ASCII only; an A-label is accepted unchecked, since it is only compared.
    pub fn from_wire(text: &str) -> Result<Self, BadName> {
        let bare = text.strip_suffix('.').unwrap_or(text);
        if bare.is_empty() {
            return Err(BadName::Empty);
        }
        if bare.len() > NAME_BYTES_MAX {
            return Err(BadName::Length(shortened(text)));
        }
        Self::checked(&bare.to_ascii_lowercase(), text)
    }

    fn checked(ascii: &str, given: &str) -> Result<Self, BadName> {
        if ascii.len() > NAME_BYTES_MAX
            || ascii.split('.').any(|label| label.is_empty() || label.len() > LABEL_BYTES_MAX)
        {
            return Err(BadName::Length(shortened(given)));
        }
        if !ascii.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.')) {
            return Err(BadName::Character(shortened(given)));
        }
        let last = ascii.rsplit('.').next().unwrap_or(ascii);
        let hex = last.strip_prefix("0x").is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_hexdigit()));
        if hex || last.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(BadName::Number(shortened(given)));
        }
        Ok(Self(ascii.into()))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name itself and every name above it, the longest first: `a.b.c`, `b.c`, `c`.
    pub fn and_parents(&self) -> impl Iterator<Item = &str> {
        let mut rest = Some(self.as_str());
        std::iter::from_fn(move || {
            let this = rest?;
            rest = this.split_once('.').map(|(_, parent)| parent);
            Some(this)
        })
    }

    /// Whether this is `suffix` or lies below it.
    pub fn is_within(&self, suffix: &Name) -> bool {
        let (name, suffix) = (self.as_str(), suffix.as_str());
        name.strip_suffix(suffix).is_some_and(|front| front.is_empty() || front.ends_with('.'))
    }

    /// Whether anyone can register names directly below this one, as under `com`, `co.uk` or `github.io`. A top-level
    /// name that is not on the public list, such as a company's own, does not count.
    pub fn is_public_suffix(&self) -> bool {
        psl::suffix(self.0.as_bytes())
            .is_some_and(|suffix| suffix.is_known() && suffix.as_bytes() == self.0.as_bytes())
    }

    /// The registered part, such as `example.co.uk` of `a.b.example.co.uk`; the name itself if there is none.
    pub fn registrable(&self) -> &str {
        psl::domain_str(&self.0).unwrap_or(&self.0)
    }

    /// Whether the name has a meaning only in a local network, so that the public tree is never asked about it.
    pub fn is_local_only(&self) -> bool {
        let name = self.as_str();
        !name.contains('.')
            || ["local", "internal", "localhost", "lan", "home.arpa", "onion", "invalid"].iter().any(|top| {
                name.strip_suffix(top).is_some_and(|front| front.is_empty() || front.ends_with('.'))
            })
    }
}

/// Whether some label has the form of an A-label, which IDNA must then check.
fn has_a_label(text: &str) -> bool {
    text.split('.').any(|label| label.get(..4).is_some_and(|start| start.eq_ignore_ascii_case("xn--")))
}

/// The part of a bad text that an error repeats.
fn shortened(text: &str) -> String {
    text.chars().take(80).collect()
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::borrow::Borrow<str> for Name {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Name {
    type Error = BadName;

    fn try_from(text: String) -> Result<Self, BadName> {
        Self::parse(&text)
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.0.as_ref().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: Option<&str>) {
        let read = Name::parse(text);
        assert_eq!(read.as_ref().ok().map(Name::as_str), expected, "{text}: {read:?}");
    }

    #[test]
    fn a_name_has_one_spelling() {
        check("Example.COM", Some("example.com"));
        check("example.com.", Some("example.com"));
        check("Bücher.example", Some("xn--bcher-kva.example"));
        check("XN--BCHER-KVA.example", Some("xn--bcher-kva.example"));
        check("example。com", Some("example.com"));
        check("_http._tcp.example.com", Some("_http._tcp.example.com"));
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for text in [
            "",
            ".",
            "a..b",
            ".a",
            "a b",
            "a/b",
            "a:b",
            "a@b",
            "*.example.com",
            "exa\0mple.com",
            "xn--\u{fe}",
        ] {
            check(text, None);
        }
        check(&"a".repeat(64), None);
        check(&format!("{}.com", "a.".repeat(130)), None);
    }

    #[test]
    fn numbers_that_others_read_as_addresses_are_no_names() {
        for text in
            ["2130706433", "127.1", "0x7f.1", "0x7f000001", "017700000001", "1.2.3.4", "a.0x", "１２７.0.0.1"]
        {
            check(text, None);
        }
    }

    #[test]
    fn public_suffixes_are_known() {
        let is = |text: &str| Name::parse(text).expect("a name").is_public_suffix();
        assert!(is("com") && is("co.uk") && is("github.io"));
        assert!(!is("example.com") && !is("example.org") && !is("corp") && !is("a.github.io"));
    }

    #[test]
    fn the_registrable_part_is_found() {
        let of = |text: &str| Name::parse(text).expect("a name").registrable().to_owned();
        assert_eq!(of("a.b.example.co.uk"), "example.co.uk");
        assert_eq!(of("gitserver"), "gitserver");
    }

    proptest::proptest! {
        #[test]
        fn reading_a_name_twice_changes_nothing(text in "\\PC{0,40}") {
            if let Ok(name) = Name::parse(&text) {
                proptest::prop_assert_eq!(Name::parse(name.as_str()), Ok(name.clone()));
                proptest::prop_assert_eq!(Name::from_wire(name.as_str()), Ok(name));
            }
        }
    }
}
