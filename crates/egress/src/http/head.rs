//! Parses the head of an HTTP/1 request, only far enough to explain a refusal, and to distinguish HTTP from other
//! protocols. `proxy` reads the requests that go upstream.

use crate::policy::Name;

/// A longer head is rejected.
pub const HEAD_BYTES_MAX: usize = 64 * 1024;
/// The longest method of the registry has 17 letters.
const METHOD_BYTES_MAX: usize = 24;

/// Whether some bytes begin an HTTP request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sniff {
    /// They do.
    Yes,
    /// They may; more is needed.
    More,
    /// They do not.
    No,
}

/// A parsed head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// `GET` and so on.
    pub method: String,
    /// The host of the `Host` header, if it is a name.
    pub host: Option<Name>,
    /// Where the head ends.
    pub length: usize,
}

/// Why a head cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadHead {
    /// Longer than [`HEAD_BYTES_MAX`].
    #[error("the head of the request is too long")]
    TooLong,
    /// Not a request.
    #[error("the request does not parse")]
    Malformed,
    /// Two hosts.
    #[error("the request names two hosts")]
    TwoHosts,
}

/// Recognizes HTTP by its first line, which names the protocol. Servers tolerate much before it (empty lines, unknown
/// methods, lower case), so this does too: anything that some server may accept as HTTP goes to the strict parser.
pub fn sniff(bytes: &[u8]) -> Sniff {
    let start = bytes.iter().position(|byte| !matches!(byte, b'\r' | b'\n')).unwrap_or(bytes.len());
    let rest = &bytes[start..];
    let (line, whole) = match rest.iter().position(|byte| *byte == b'\n') {
        Some(end) => (&rest[..end], true),
        None => (rest, false),
    };
    if line.windows(5).any(|window| window.eq_ignore_ascii_case(b"HTTP/")) {
        return Sniff::Yes;
    }
    let text = line.iter().all(|byte| byte.is_ascii_graphic() || matches!(byte, b' ' | b'\t' | b'\r'));
    if whole || !text || bytes.len() >= HEAD_BYTES_MAX { Sniff::No } else { Sniff::More }
}

/// Parses a head. `None` while it is incomplete.
pub fn read_head(bytes: &[u8]) -> Result<Option<Head>, BadHead> {
    let end = bytes.windows(4).take(HEAD_BYTES_MAX).position(|window| window == b"\r\n\r\n");
    let Some(end) = end else {
        return if bytes.len() >= HEAD_BYTES_MAX { Err(BadHead::TooLong) } else { Ok(None) };
    };
    let mut lines =
        bytes[..end].split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    let first = lines.next().and_then(|line| std::str::from_utf8(line).ok()).ok_or(BadHead::Malformed)?;
    let mut words = first.split(' ');
    let (Some(method), Some(_target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(BadHead::Malformed);
    };
    if method.is_empty() || method.len() > METHOD_BYTES_MAX || !version.starts_with("HTTP/1.") {
        return Err(BadHead::Malformed);
    }
    let mut host = None;
    for line in lines {
        let Some(colon) = line.iter().position(|byte| *byte == b':') else { return Err(BadHead::Malformed) };
        if line[..colon].eq_ignore_ascii_case(b"host") {
            if host.is_some() {
                return Err(BadHead::TwoHosts);
            }
            host = Some(std::str::from_utf8(&line[colon + 1..]).map_err(|_| BadHead::Malformed)?.trim());
        }
    }
    let host = host.and_then(host_name);
    Ok(Some(Head { method: method.to_owned(), host, length: end + 4 }))
}

/// The name in `host` or `host:port`.
fn host_name(text: &str) -> Option<Name> {
    let host = text.split_once(':').map_or(text, |(host, _)| host);
    Name::parse(host).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn http_is_told_from_other_protocols() {
        for text in [
            "GET / HTTP/1.1",
            "\r\nPOST / HTTP/1.0\r\n",
            "get / http/1.1",
            "CONNECT a:1 HTTP/1.1",
            "PRI * HTTP/2.0\r\n",
            "X\tHTTP/1.1\n",
        ] {
            assert_eq!(sniff(text.as_bytes()), Sniff::Yes, "{text}");
        }
        for text in ["", "\r\n", "GET /long", "EHLO a.example"] {
            assert_eq!(sniff(text.as_bytes()), Sniff::More, "{text}");
        }
        for bytes in [
            &b"SSH-2.0-x\r\n"[..],
            b"\x16\x03\x01",
            b"EHLO a.example\r\n",
            b"SET a b\r\n",
            b"GET /\r\nHTTP/1.1",
            b"\0",
            b"*1\r\n",
        ] {
            assert_eq!(sniff(bytes), Sniff::No, "{bytes:?}");
        }
        assert_eq!(sniff(&[b'a'; HEAD_BYTES_MAX]), Sniff::No);
    }

    #[track_caller]
    fn check(text: &str, host: Result<Option<&str>, BadHead>) {
        let read = read_head(text.as_bytes());
        let got = read.map(|head| head.expect("a whole head").host.map(|name| name.to_string()));
        assert_eq!(got, host.map(|host| host.map(str::to_owned)), "{text}");
    }

    #[test]
    fn the_host_is_read() {
        check("GET / HTTP/1.1\r\nHost: Example.com\r\n\r\n", Ok(Some("example.com")));
        check("GET / HTTP/1.1\r\nA: b\r\nhOsT:example.com:8080\r\n\r\nbody", Ok(Some("example.com")));
        check("GET / HTTP/1.0\r\n\r\n", Ok(None));
        check("GET / HTTP/1.1\r\nHost: a.example\r\nHost: b.example\r\n\r\n", Err(BadHead::TwoHosts));
        check("GET /\r\n\r\n", Err(BadHead::Malformed));
        check("GET / HTTP/2.0\r\n\r\n", Err(BadHead::Malformed));
        check("GET / HTTP/1.1\r\nno colon\r\n\r\n", Err(BadHead::Malformed));
        assert_eq!(read_head(b"GET / HTTP/1.1\r\nHost: a"), Ok(None));
        assert_eq!(read_head(&[b'A'; HEAD_BYTES_MAX]), Err(BadHead::TooLong));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes: Vec<u8>) {
            let _ = sniff(&bytes);
            let _ = read_head(&bytes);
        }
    }
}
