//! Upstream proxies of closed company networks: HTTP CONNECT and SOCKS5.
//!
//! Such a proxy resolves names itself, so egress cannot check the address that is dialled; only the proxy's own rules
//! protect it then. Literal addresses are checked as always.

use std::io;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::policy::Name;

/// The longest head of a proxy's response.
const ANSWER_BYTES_MAX: usize = 16 * 1024;

/// An upstream proxy.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proxy {
    /// The proxy's protocol.
    pub kind: ProxyKind,
    /// Where it is. Set by the operator, so the table of closed addresses does not apply.
    pub address: SocketAddr,
    /// A user and a password.
    pub login: Option<(String, String)>,
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Proxy")
            .field("kind", &self.kind)
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

/// The protocol of a proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProxyKind {
    /// `CONNECT host:port`.
    Http,
    /// RFC 1928.
    Socks5,
}

/// The destination, as sent to the proxy.
#[derive(Debug, Clone, Copy)]
pub enum Host<'a> {
    /// The proxy resolves it.
    Name(&'a Name),
    /// Sent as it is.
    Address(IpAddr),
}

impl Proxy {
    /// Opens a connection through the proxy.
    pub async fn connect(&self, host: Host<'_>, port: u16) -> io::Result<TcpStream> {
        let mut stream = TcpStream::connect(self.address).await?;
        match self.kind {
            ProxyKind::Http => self.http(&mut stream, host, port).await?,
            ProxyKind::Socks5 => self.socks5(&mut stream, host, port).await?,
        }
        Ok(stream)
    }

    async fn http(&self, stream: &mut TcpStream, host: Host<'_>, port: u16) -> io::Result<()> {
        let authority = match host {
            Host::Name(name) => format!("{name}:{port}"),
            Host::Address(address) => SocketAddr::new(address, port).to_string(),
        };
        let login = self.login.as_ref().map_or(String::new(), |(user, password)| {
            format!("Proxy-Authorization: Basic {}\r\n", base64(format!("{user}:{password}").as_bytes()))
        });
        let head = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n{login}\r\n");
        stream.write_all(head.as_bytes()).await?;
        // Byte by byte, so that no byte of the stream after the response is consumed.
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\n") {
            if answer.len() >= ANSWER_BYTES_MAX {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "the proxy's answer is too long"));
            }
            answer.push(stream.read_u8().await?);
        }
        let line = answer.split(|byte| *byte == b'\r').next().unwrap_or_default();
        let line = String::from_utf8_lossy(line);
        let status = line.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok());
        match status {
            Some(200..=299) => Ok(()),
            _ => Err(io::Error::new(
                io::ErrorKind::ConnectionRefused,
                format!("the upstream proxy answered `{line}`"),
            )),
        }
    }

    async fn socks5(&self, stream: &mut TcpStream, host: Host<'_>, port: u16) -> io::Result<()> {
        let refused = |what: &'static str| io::Error::new(io::ErrorKind::ConnectionRefused, what);
        let method = if self.login.is_some() { 2 } else { 0 };
        stream.write_all(&[5, 1, method]).await?;
        let mut chosen = [0; 2];
        stream.read_exact(&mut chosen).await?;
        if chosen != [5, method] {
            return Err(refused("the upstream proxy does not take this way to log in"));
        }
        if let Some((user, password)) = &self.login {
            let length =
                |text: &str| u8::try_from(text.len()).map_err(|_| refused("the proxy's login is too long"));
            let mut login = vec![1, length(user)?];
            login.extend_from_slice(user.as_bytes());
            login.push(length(password)?);
            login.extend_from_slice(password.as_bytes());
            stream.write_all(&login).await?;
            let mut answer = [0; 2];
            stream.read_exact(&mut answer).await?;
            if answer[1] != 0 {
                return Err(refused("the upstream proxy refused the login"));
            }
        }
        let mut request = vec![5, 1, 0];
        match host {
            Host::Name(name) => {
                request.push(3);
                // A name has at most 253 bytes.
                request.push(name.as_str().len() as u8);
                request.extend_from_slice(name.as_str().as_bytes());
            }
            Host::Address(IpAddr::V4(address)) => {
                request.push(1);
                request.extend_from_slice(&address.octets());
            }
            Host::Address(IpAddr::V6(address)) => {
                request.push(4);
                request.extend_from_slice(&address.octets());
            }
        }
        request.extend_from_slice(&port.to_be_bytes());
        stream.write_all(&request).await?;
        let mut answer = [0; 4];
        stream.read_exact(&mut answer).await?;
        if answer[1] != 0 {
            return Err(refused("the upstream proxy refused the destination"));
        }
        let bound = match answer[3] {
            1 => 4,
            4 => 16,
            3 => usize::from(stream.read_u8().await?),
            _ => return Err(refused("the upstream proxy's answer does not parse")),
        };
        stream.read_exact(&mut vec![0; bound + 2]).await?;
        Ok(())
    }
}

/// RFC 4648, with padding.
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let bits =
            chunk.iter().fold(0u32, |sum, byte| sum << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for at in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * at) & 63) as usize];
            text.push(if at <= chunk.len() { char::from(letter) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn base64_is_as_in_its_rfc() {
        for (bytes, text) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }

    async fn proxied(
        kind: ProxyKind,
        script: &'static [(&'static [u8], &'static [u8])],
    ) -> io::Result<TcpStream> {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
        let address = listener.local_addr().expect("an address");
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a client");
            for (expected, answer) in script {
                let mut got = vec![0; expected.len()];
                stream.read_exact(&mut got).await.expect("a request");
                assert_eq!(got, *expected, "{}", String::from_utf8_lossy(&got));
                stream.write_all(answer).await.expect("answered");
            }
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest).await;
        });
        let name = Name::parse("a.example").expect("a name");
        let proxy = Proxy { kind, address, login: Some(("user".into(), "pass".into())) };
        proxy.connect(Host::Name(&name), 443).await
    }

    #[tokio::test]
    async fn http_proxies_are_asked_to_connect() {
        const REQUEST: &[u8] = b"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example:443\r\nProxy-Authorization: Basic dXNlcjpwYXNz\r\n\r\n";
        let mut stream = proxied(ProxyKind::Http, &[(REQUEST, b"HTTP/1.1 200 ok\r\nA: b\r\n\r\nbytes")])
            .await
            .expect("a way");
        let mut first = [0; 5];
        stream.read_exact(&mut first).await.expect("bytes");
        assert_eq!(&first, b"bytes", "what follows the answer belongs to the stream");
        let refused =
            proxied(ProxyKind::Http, &[(REQUEST, b"HTTP/1.1 403 no\r\n\r\n")]).await.expect_err("refused");
        assert!(refused.to_string().contains("403"), "{refused}");
    }

    #[tokio::test]
    async fn socks5_proxies_resolve_the_name() {
        proxied(
            ProxyKind::Socks5,
            &[
                (&[5, 1, 2], &[5, 2]),
                (b"\x01\x04user\x04pass", &[1, 0]),
                (b"\x05\x01\x00\x03\x09a.example\x01\xbb", &[5, 0, 0, 1, 0, 0, 0, 0, 0, 0]),
            ],
        )
        .await
        .expect("a way");
        proxied(ProxyKind::Socks5, &[(&[5, 1, 2], &[5, 0xff])]).await.expect_err("no common way to log in");
    }
}
