//! Parses the first message of a TLS client without answering it, to learn which server the client wants.
//!
//! All of this input comes from a guest, so every length is checked and the total is bounded.

use crate::policy::Name;

/// A longer hello is rejected. Post-quantum keys take about 2 KiB, session tickets a few more.
pub const HELLO_BYTES_MAX: usize = 32 * 1024;
/// RFC 8446: the most that a record may hold before encryption.
const RECORD_BYTES_MAX: usize = 16 * 1024;

const HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const SERVER_NAME: u16 = 0;
const ENCRYPTED_CLIENT_HELLO: u16 = 0xfe0d;
const HOST_NAME: u8 = 0;

/// The fatal alert `unrecognized_name`, as a record: clients show it by that name.
pub const UNRECOGNIZED_NAME: [u8; 7] = [21, 3, 3, 0, 2, 2, 112];

/// A parsed hello.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The server name, if it names one.
    pub server_name: Option<Name>,
    /// The hello contains an encrypted hello, or bytes that look like one (clients send those to keep the extension
    /// usable).
    pub encrypted: bool,
}

/// The result of parsing the bytes so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// The beginning of a hello.
    More,
    /// Not TLS at all.
    NotTls,
    /// A complete hello.
    Hello(Hello),
    /// A malformed TLS hello.
    Bad(&'static str),
}

/// Parses the bytes so far.
pub fn read_hello(bytes: &[u8]) -> Progress {
    match records(bytes) {
        Ok(Some(message)) => match hello(&message) {
            Ok(hello) => Progress::Hello(hello),
            Err(why) => Progress::Bad(why),
        },
        Ok(None) if bytes.len() >= HELLO_BYTES_MAX => Progress::Bad("the hello is too long"),
        Ok(None) => Progress::More,
        Err(NotHello::NotTls) => Progress::NotTls,
        Err(NotHello::Bad(why)) => Progress::Bad(why),
    }
}

enum NotHello {
    NotTls,
    Bad(&'static str),
}

/// The handshake message in the first records, once it is complete. A hello may be spread over several records.
fn records(mut bytes: &[u8]) -> Result<Option<Vec<u8>>, NotHello> {
    let mut message = Vec::new();
    let mut first = true;
    loop {
        let start = &bytes[..bytes.len().min(3)];
        let fits = start.first().is_none_or(|kind| *kind == HANDSHAKE)
            && start.get(1).is_none_or(|major| *major == 3)
            && start.get(2).is_none_or(|minor| *minor <= 4);
        if !fits {
            return Err(if first { NotHello::NotTls } else { NotHello::Bad("the hello is interrupted") });
        }
        let Some((header, rest)) = bytes.split_first_chunk::<5>() else { return Ok(None) };
        let length = usize::from(u16::from_be_bytes([header[3], header[4]]));
        if length == 0 || length > RECORD_BYTES_MAX {
            return Err(if first {
                NotHello::NotTls
            } else {
                NotHello::Bad("a record of the hello has no right length")
            });
        }
        let here = &rest[..rest.len().min(length)];
        if first && here.first().is_some_and(|kind| *kind != CLIENT_HELLO) {
            return Err(NotHello::Bad("the first message is not a hello"));
        }
        first = false;
        let before = message.len();
        message.extend_from_slice(here);
        if let Some(head) = message.first_chunk::<4>() {
            let wanted =
                4 + usize::from(head[1]) * 65_536 + usize::from(head[2]) * 256 + usize::from(head[3]);
            if wanted > HELLO_BYTES_MAX {
                return Err(NotHello::Bad("the hello is too long"));
            }
            // Based on the announced length and not on the bytes so far, so that the result does not depend on how the
            // bytes arrive.
            if before + length > wanted {
                return Err(NotHello::Bad("something follows the hello in its record"));
            }
            if message.len() == wanted {
                return Ok(Some(message));
            }
        }
        if here.len() < length {
            return Ok(None);
        }
        bytes = &rest[length..];
    }
}

/// Bytes that are taken from the front.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], &'static str> {
        let (front, rest) = self.0.split_at_checked(count).ok_or("the hello is cut off")?;
        self.0 = rest;
        Ok(front)
    }

    fn number(&mut self, bytes: usize) -> Result<usize, &'static str> {
        Ok(self.take(bytes)?.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte)))
    }

    fn list(&mut self, length_bytes: usize) -> Result<Cursor<'a>, &'static str> {
        let length = self.number(length_bytes)?;
        Ok(Cursor(self.take(length)?))
    }
}

fn hello(message: &[u8]) -> Result<Hello, &'static str> {
    let mut body = Cursor(message.get(4..).ok_or("the hello is cut off")?);
    body.take(2 + 32)?;
    body.list(1)?;
    body.list(2)?;
    body.list(1)?;
    let mut found = Hello { server_name: None, encrypted: false };
    if body.0.is_empty() {
        return Ok(found);
    }
    let mut extensions = body.list(2)?;
    if !body.0.is_empty() {
        return Err("something follows the extensions");
    }
    let mut named = false;
    while !extensions.0.is_empty() {
        let kind = extensions.number(2)? as u16;
        let content = extensions.list(2)?;
        match kind {
            SERVER_NAME if named => return Err("the hello names two servers"),
            SERVER_NAME => {
                named = true;
                found.server_name = Some(server_name(content)?);
            }
            ENCRYPTED_CLIENT_HELLO => found.encrypted = true,
            _ => {}
        }
    }
    Ok(found)
}

fn server_name(mut content: Cursor<'_>) -> Result<Name, &'static str> {
    let mut list = content.list(2)?;
    if list.number(1)? != usize::from(HOST_NAME) {
        return Err("the server name is of an unknown kind");
    }
    let name = list.list(2)?;
    if !list.0.is_empty() || !content.0.is_empty() {
        return Err("the hello names two servers");
    }
    let text = std::str::from_utf8(name.0).map_err(|_| "the server name is not a host name")?;
    Name::from_wire(text).map_err(|_| "the server name is not a host name")
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use super::*;

    /// A hello as rustls writes it.
    pub(crate) fn real_hello(name: &str) -> Vec<u8> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        let name = rustls::pki_types::ServerName::try_from(name.to_owned()).expect("a name");
        let mut client = rustls::ClientConnection::new(Arc::new(config), name).expect("a client");
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).expect("bytes");
        bytes
    }

    fn named(name: &str) -> Progress {
        Progress::Hello(Hello { server_name: Some(Name::parse(name).expect("a name")), encrypted: false })
    }

    #[test]
    fn a_real_hello_names_its_server() {
        assert_eq!(read_hello(&real_hello("Example.com")), named("example.com"));
        let nameless = Progress::Hello(Hello { server_name: None, encrypted: false });
        assert_eq!(read_hello(&real_hello("192.0.2.1")), nameless);
    }

    #[test]
    fn every_beginning_asks_for_more() {
        let bytes = real_hello("example.com");
        for length in 0..bytes.len() {
            assert_eq!(read_hello(&bytes[..length]), Progress::More, "{length} bytes");
        }
    }

    #[test]
    fn a_hello_in_many_records_is_one_hello() {
        let bytes = real_hello("example.com");
        for size in [1, 2, 3, 5, 100] {
            let mut cut = Vec::new();
            for piece in bytes[5..].chunks(size) {
                cut.extend_from_slice(&[22, 3, 1, 0, piece.len() as u8]);
                cut.extend_from_slice(piece);
            }
            assert_eq!(read_hello(&cut), named("example.com"), "records of {size}");
        }
    }

    #[test]
    fn other_protocols_are_not_tls() {
        for bytes in [
            &b"GET / HTTP/1.1\r\n"[..],
            b"SSH-2.0-x\r\n",
            b"\x16\x02\x00\x00\x05hello",
            b"\x15\x03\x01\x00\x02\x02\x28",
            b"\x00",
        ] {
            assert_eq!(read_hello(bytes), Progress::NotTls);
        }
    }

    /// A hello with these extensions.
    fn with_extensions(extensions: &[(u16, Vec<u8>)]) -> Vec<u8> {
        let mut list = Vec::new();
        for (kind, content) in extensions {
            list.extend_from_slice(&kind.to_be_bytes());
            list.extend_from_slice(&(content.len() as u16).to_be_bytes());
            list.extend_from_slice(content);
        }
        let mut body = vec![3, 3];
        body.extend_from_slice(&[7; 32]);
        body.extend_from_slice(&[0, 0, 2, 0x13, 1, 1, 0]);
        body.extend_from_slice(&(list.len() as u16).to_be_bytes());
        body.extend_from_slice(&list);
        let mut record = vec![22, 3, 1];
        record.extend_from_slice(&(body.len() as u16 + 4).to_be_bytes());
        record.extend_from_slice(&[1, 0]);
        record.extend_from_slice(&(body.len() as u16).to_be_bytes());
        record.extend_from_slice(&body);
        record
    }

    fn sni(names: &[&str]) -> Vec<u8> {
        let mut list = Vec::new();
        for name in names {
            list.push(0);
            list.extend_from_slice(&(name.len() as u16).to_be_bytes());
            list.extend_from_slice(name.as_bytes());
        }
        [&(list.len() as u16).to_be_bytes()[..], &list].concat()
    }

    #[test]
    fn hellos_that_could_mean_two_servers_are_bad() {
        assert_eq!(read_hello(&with_extensions(&[(0, sni(&["a.example"]))])), named("a.example"));
        for extensions in [
            vec![(0, sni(&["a.example"])), (0, sni(&["b.example"]))],
            vec![(0, sni(&["a.example", "b.example"]))],
            vec![(0, sni(&[""]))],
            vec![(0, sni(&["a.example\0"]))],
            vec![(0, sni(&["127.0.0.1"]))],
            vec![(0, vec![0, 0])],
            vec![(0, vec![])],
        ] {
            let read = read_hello(&with_extensions(&extensions));
            assert!(matches!(read, Progress::Bad(_)), "{extensions:?}: {read:?}");
        }
    }

    #[test]
    fn what_follows_a_hello_in_its_record_is_bad_however_it_arrives() {
        let mut bytes = real_hello("example.com");
        let whole = bytes.len();
        let longer = u16::from_be_bytes([bytes[3], bytes[4]]) + 10;
        bytes[3..5].copy_from_slice(&longer.to_be_bytes());
        bytes.extend_from_slice(&[0; 10]);
        for length in [whole - 1, whole, whole + 1, whole + 10] {
            assert!(matches!(read_hello(&bytes[..length]), Progress::Bad(_)), "{length} bytes");
        }
    }

    #[test]
    fn an_encrypted_hello_is_seen() {
        let read = read_hello(&with_extensions(&[(0, sni(&["a.example"])), (0xfe0d, vec![0; 100])]));
        assert!(matches!(read, Progress::Hello(Hello { encrypted: true, .. })));
    }

    #[test]
    fn a_hello_that_never_ends_is_bad() {
        let long = [&[22, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff][..], &[0; 100]].concat();
        assert!(matches!(read_hello(&long), Progress::Bad(_)));
        let drip: Vec<u8> = std::iter::once([22, 3, 1, 0, 1, 1])
            .chain(std::iter::repeat_n([22, 3, 1, 0, 1, 0], HELLO_BYTES_MAX))
            .flatten()
            .collect();
        // A message of length zero is complete after four bytes and has no body.
        assert!(matches!(read_hello(&drip), Progress::Bad(_)));
    }

    proptest::proptest! {
        #[test]
        fn a_changed_hello_is_read_without_a_panic(at in 0usize..300, value: u8, cut in 0usize..400) {
            let mut bytes = real_hello("example.com");
            let place = at % bytes.len();
            bytes[place] = value;
            bytes.truncate(cut.max(1));
            let _ = read_hello(&bytes);
        }
    }
}
