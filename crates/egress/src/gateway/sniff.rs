//! Recognizes the protocol of a connection by its first bytes.

use crate::http;
use crate::policy::Protocol;
use crate::tls::{self, Hello, Progress};

/// The protocol of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A complete TLS hello.
    Tls(Hello),
    /// A TLS hello that could be read in two ways.
    BadTls(&'static str),
    /// Plain HTTP.
    Http,
    /// SSH.
    Ssh,
    /// Anything else.
    Other,
}

impl Kind {
    /// The protocol as named in rules.
    pub fn protocol(&self) -> Protocol {
        match self {
            Self::Tls(_) | Self::BadTls(_) => Protocol::Tls,
            Self::Http => Protocol::Http,
            Self::Ssh => Protocol::Ssh,
            Self::Other => Protocol::Tcp,
        }
    }
}

/// Inspects the bytes so far. `None` while more are needed.
pub fn sniff(bytes: &[u8]) -> Option<Kind> {
    const SSH: &[u8] = b"SSH-";
    if bytes.is_empty() {
        return None;
    }
    match tls::read_hello(bytes) {
        Progress::More => return None,
        Progress::Hello(hello) => return Some(Kind::Tls(hello)),
        Progress::Bad(why) => return Some(Kind::BadTls(why)),
        Progress::NotTls => {}
    }
    if bytes.starts_with(SSH) {
        return Some(Kind::Ssh);
    }
    match http::sniff(bytes) {
        http::Sniff::Yes => Some(Kind::Http),
        http::Sniff::More => None,
        http::Sniff::No => Some(Kind::Other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_bytes_tell_the_protocol() {
        assert_eq!(sniff(b""), None);
        assert_eq!(sniff(b"SSH-2.0-OpenSSH\r\n"), Some(Kind::Ssh));
        assert_eq!(sniff(b"SS"), None);
        assert_eq!(sniff(b"GET / HTTP/1.1\r\n"), Some(Kind::Http));
        assert_eq!(sniff(b"\x00\x00\x00\x08\x04\xd2\x16\x2f"), Some(Kind::Other));
        assert_eq!(sniff(b"\x16\x03\x01"), None);
        assert!(matches!(sniff(&crate::tls::tests::real_hello("a.example")), Some(Kind::Tls(_))));
    }
}
