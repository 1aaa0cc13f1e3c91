//! The WebSocket of a command, as a foreign client would use it.

use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use serde_json::Value;
use tungstenite::client::IntoClientRequest;
use tungstenite::handshake::HandshakeError;
use tungstenite::{Error, Message, WebSocket};

use crate::wait::DEADLINE;

/// A message of the server.
#[derive(Debug, Clone)]
pub enum Said {
    /// A text message.
    Event(Value),
    /// A binary message: bytes of a stream.
    Output {
        /// 1 or 2.
        stream: u8,
        /// Their offset.
        offset: u64,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// The connection is closed, with the close code if there was one.
    Closed(Option<u16>),
}

/// An open WebSocket.
pub struct Socket {
    inner: WebSocket<TcpStream>,
}

impl Socket {
    /// Opens `target` with these headers. Returns the status code if the server rejects it.
    pub fn open(to: SocketAddr, target: &str, headers: &[(&str, &str)]) -> Result<Self, u16> {
        let stream = TcpStream::connect_timeout(&to, DEADLINE).expect("the daemon listens");
        stream.set_nodelay(true).expect("a socket takes this option");
        stream.set_read_timeout(Some(DEADLINE)).expect("a socket takes this option");
        stream.set_write_timeout(Some(DEADLINE)).expect("a socket takes this option");
        let mut request =
            format!("ws://{to}{target}").into_client_request().expect("the target is part of a URL");
        for (name, value) in headers {
            let name: tungstenite::http::HeaderName = name.parse().expect("tests use names of headers");
            request.headers_mut().insert(name, value.parse().expect("tests use values of headers"));
        }
        match tungstenite::client(request, stream) {
            Ok((inner, _)) => Ok(Self { inner }),
            Err(HandshakeError::Failure(Error::Http(answer))) => Err(answer.status().as_u16()),
            Err(other) => panic!("cannot open {target}: {other}"),
        }
    }

    /// Sends a text message.
    #[track_caller]
    pub fn say(&mut self, wish: &Value) {
        self.inner.send(Message::text(wish.to_string())).expect("the socket is open");
    }

    /// Sends a text message that may not be JSON.
    #[track_caller]
    pub fn say_text(&mut self, text: &str) {
        self.inner.send(Message::text(text)).expect("the socket is open");
    }

    /// Sends stdin.
    #[track_caller]
    pub fn write(&mut self, bytes: &[u8]) {
        self.inner.send(Message::binary(bytes.to_vec())).expect("the socket is open");
    }

    /// The next message of the server. A broken connection counts as closed.
    #[track_caller]
    pub fn hear(&mut self) -> Said {
        let give_up = Instant::now() + DEADLINE;
        loop {
            // Pings keep an otherwise silent connection open.
            assert!(Instant::now() < give_up, "the server sent nothing for {DEADLINE:?}");
            match self.inner.read() {
                Ok(Message::Text(text)) => {
                    return Said::Event(serde_json::from_str(&text).expect("text messages are JSON"));
                }
                Ok(Message::Binary(bytes)) => {
                    assert!(bytes.len() > 9, "an output message of {} bytes", bytes.len());
                    assert!(bytes.len() <= 9 + 64 * 1024, "an output message of {} bytes", bytes.len());
                    let offset = u64::from_le_bytes(bytes[1..9].try_into().expect("eight bytes"));
                    return Said::Output { stream: bytes[0], offset, bytes: bytes[9..].to_vec() };
                }
                Ok(Message::Close(close)) => {
                    // The answer to the close goes out with the next read, which also sees the end.
                    while self.inner.read().is_ok() {}
                    return Said::Closed(close.map(|frame| frame.code.into()));
                }
                Ok(_) => {}
                Err(Error::Io(error))
                    if matches!(
                        error.kind(),
                        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                    ) =>
                {
                    panic!("the server sent nothing for {DEADLINE:?}");
                }
                Err(_) => return Said::Closed(None),
            }
        }
    }

    /// The next text message of this type; output and others before it are skipped.
    #[track_caller]
    pub fn wait_for(&mut self, kind: &str) -> Value {
        loop {
            match self.hear() {
                Said::Event(event) if event["type"] == kind => return event,
                Said::Event(_) | Said::Output { .. } => {}
                Said::Closed(code) => panic!("the socket was closed ({code:?}) before {kind:?} came"),
            }
        }
    }

    /// Everything up to the end of the command or of the connection.
    #[track_caller]
    pub fn collect(&mut self, mut so_far: Collected) -> Collected {
        loop {
            match self.hear() {
                Said::Output { stream, offset, bytes } => so_far.add(stream, offset, &bytes),
                Said::Event(event) if event["type"] == "ended" => {
                    so_far.ended = Some(event);
                    return so_far;
                }
                Said::Event(event) if event["type"] == "lost" => so_far.lost.push(event),
                Said::Event(_) => {}
                Said::Closed(code) => {
                    so_far.closed = Some(code);
                    return so_far;
                }
            }
        }
    }
}

/// What came over one or several connections of one command.
#[derive(Debug, Clone, Default)]
pub struct Collected {
    /// All of stdout.
    pub stdout: Vec<u8>,
    /// All of stderr.
    pub stderr: Vec<u8>,
    /// The last event, once it came.
    pub ended: Option<Value>,
    /// The ranges that the server reported as lost.
    pub lost: Vec<Value>,
    /// Whether the last connection closed before the end, and its code.
    pub closed: Option<Option<u16>>,
}

impl Collected {
    /// Adds bytes, which must follow the previous ones: nothing twice, nothing missing.
    #[track_caller]
    pub fn add(&mut self, stream: u8, offset: u64, bytes: &[u8]) {
        let all = match stream {
            1 => &mut self.stdout,
            2 => &mut self.stderr,
            other => panic!("output of stream {other}"),
        };
        assert_eq!(offset, all.len() as u64, "bytes of stream {stream} do not follow what came before");
        all.extend_from_slice(bytes);
    }

    /// The offsets to reconnect with.
    pub fn offsets(&self) -> String {
        format!("stdout_offset={}&stderr_offset={}", self.stdout.len(), self.stderr.len())
    }

    /// The result of the command, asserting that it has ended.
    #[track_caller]
    pub fn result(&self) -> &Value {
        let ended =
            self.ended.as_ref().unwrap_or_else(|| panic!("the connection closed first: {:?}", self.closed));
        &ended["result"]
    }
}
