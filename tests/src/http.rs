//! A client for HTTP/1.1 that sends exactly what the test says, valid or not. One connection per request.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

use crate::wait::DEADLINE;

/// A request, as the bytes to write.
#[derive(Debug, Clone)]
pub struct Request {
    method: String,
    target: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Request {
    /// A request with only its first line.
    pub fn new(method: &str, target: &str) -> Self {
        Self { method: method.into(), target: target.into(), headers: Vec::new(), body: Vec::new() }
    }

    /// Adds a header.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Carries a key.
    pub fn key(self, key: &str) -> Self {
        self.header("authorization", &format!("Bearer {key}"))
    }

    /// Carries JSON.
    pub fn json(self, body: &Value) -> Self {
        self.header("content-type", "application/json").body(body.to_string())
    }

    /// Adds a body without a `Content-Type`.
    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = body.into();
        self
    }

    /// Sends it and reads the whole response.
    #[track_caller]
    pub fn send(&self, to: SocketAddr) -> Response {
        self.try_send(to).unwrap_or_else(|error| panic!("{} {}: {error}", self.method, self.target))
    }

    /// Like [`Self::send`] for a daemon that may die during the request.
    pub fn try_send(&self, to: SocketAddr) -> io::Result<Response> {
        self.open(to)?.into_response()
    }

    /// Sends it and reads the head of the response; the caller reads the body.
    pub fn open(&self, to: SocketAddr) -> io::Result<Streaming> {
        let mut stream = TcpStream::connect_timeout(&to, DEADLINE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(DEADLINE))?;
        stream.set_write_timeout(Some(DEADLINE))?;
        let mut head = format!("{} {} HTTP/1.1\r\n", self.method, self.target);
        let has = |name: &str| self.headers.iter().any(|(known, _)| known.eq_ignore_ascii_case(name));
        if !has("host") {
            head.push_str(&format!("host: {to}\r\n"));
        }
        if !has("content-length")
            && !has("transfer-encoding")
            && (!self.body.is_empty() || self.method != "GET")
        {
            head.push_str(&format!("content-length: {}\r\n", self.body.len()));
        }
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("connection: close\r\n\r\n");
        stream.write_all(head.as_bytes())?;
        // A daemon that rejects a body early responds and closes; the response counts, so it is read nevertheless.
        let written = stream.write_all(&self.body);
        let mut reader = BufReader::new(stream);
        match Streaming::read_head(&mut reader) {
            Ok((status, headers)) => Ok(Streaming { status, headers, reader }),
            Err(error) => Err(written.err().unwrap_or(error)),
        }
    }
}

/// A response whose body is still to come.
#[derive(Debug)]
pub struct Streaming {
    /// The status code.
    pub status: u16,
    headers: Vec<(String, String)>,
    reader: BufReader<TcpStream>,
}

impl Streaming {
    fn read_head(reader: &mut BufReader<TcpStream>) -> io::Result<(u16, Vec<(String, String)>)> {
        let first = line(reader)?;
        let status = first
            .split(' ')
            .nth(1)
            .and_then(|code| code.parse().ok())
            .ok_or_else(|| io::Error::other(format!("not the first line of an answer: {first:?}")))?;
        let mut headers = Vec::new();
        loop {
            let next = line(reader)?;
            if next.is_empty() {
                return Ok((status, headers));
            }
            let (name, value) =
                next.split_once(':').ok_or_else(|| io::Error::other(format!("not a header: {next:?}")))?;
            headers.push((name.to_ascii_lowercase(), value.trim().into()));
        }
    }

    /// A header, its name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// The body as it comes, if it has a length.
    pub fn body(&mut self) -> &mut impl Read {
        &mut self.reader
    }

    /// The response to `HEAD`: a length without a body.
    pub fn without_body(self) -> Response {
        Response { status: self.status, headers: self.headers, body: Vec::new() }
    }

    /// The next piece of a chunked body, or `None` at its end.
    pub fn chunk(&mut self) -> io::Result<Option<Vec<u8>>> {
        let length = usize::from_str_radix(&line(&mut self.reader)?, 16).map_err(io::Error::other)?;
        let mut bytes = vec![0; length];
        self.reader.read_exact(&mut bytes)?;
        line(&mut self.reader)?;
        Ok((length > 0).then_some(bytes))
    }

    /// Waits at most this long for more.
    pub fn set_patience(&self, patience: Duration) -> io::Result<()> {
        self.reader.get_ref().set_read_timeout(Some(patience))
    }

    /// Reads the rest.
    pub fn into_response(mut self) -> io::Result<Response> {
        let mut body = Vec::new();
        if self.header("transfer-encoding").is_some_and(|value| value.contains("chunked")) {
            while let Some(piece) = self.chunk()? {
                body.extend(piece);
            }
        } else if let Some(length) = self.header("content-length") {
            body.resize(length.parse().map_err(io::Error::other)?, 0);
            self.reader.read_exact(&mut body)?;
        } else {
            self.reader.read_to_end(&mut body)?;
        }
        Ok(Response { status: self.status, headers: self.headers, body })
    }
}

fn line(reader: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    line.truncate(line.trim_end_matches(['\r', '\n']).len());
    Ok(line)
}

/// A whole response.
#[derive(Debug, Clone)]
pub struct Response {
    /// The status code.
    pub status: u16,
    /// With names in lower case.
    pub headers: Vec<(String, String)>,
    /// The raw bytes.
    pub body: Vec<u8>,
}

impl Response {
    /// The body as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {}", self.describe()))
    }

    /// The body as JSON, asserting the status.
    #[track_caller]
    pub fn expect(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.describe());
        if self.body.is_empty() { Value::Null } else { self.json() }
    }

    /// Asserts an error response with this status and code, a message, and no internal details.
    #[track_caller]
    pub fn expect_refusal(&self, status: u16, code: &str) -> Value {
        let body = self.expect(status);
        assert_eq!(body["code"], code, "{}", self.describe());
        assert!(body["message"].as_str().is_some_and(|text| !text.is_empty()), "{}", self.describe());
        body
    }

    /// A header, its name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Status and body for people.
    pub fn describe(&self) -> String {
        let text = String::from_utf8_lossy(&self.body);
        format!("status {} with body {}", self.status, text.chars().take(2_000).collect::<String>())
    }
}

/// One server-sent event.
#[derive(Debug, Clone)]
pub struct ServerEvent {
    /// Its `id:` line, where it has one.
    pub id: Option<String>,
    /// Its `data:` lines as JSON.
    pub data: Value,
}

/// Reads all server-sent events up to the end of the response.
pub fn server_events(mut answer: Streaming, mut take: impl FnMut(ServerEvent)) -> io::Result<()> {
    let mut rest = Vec::new();
    while let Some(piece) = answer.chunk()? {
        rest.extend(piece);
        while let Some(end) = rest.windows(2).position(|two| two == b"\n\n") {
            let block: Vec<u8> = rest.drain(..end + 2).collect();
            let block = String::from_utf8(block).map_err(io::Error::other)?;
            let (mut id, mut data) = (None, String::new());
            for line in block.lines() {
                if let Some(value) = line.strip_prefix("id:") {
                    id = Some(value.trim().to_owned());
                } else if let Some(value) = line.strip_prefix("data:") {
                    data.push_str(value.strip_prefix(' ').unwrap_or(value));
                }
            }
            if !data.is_empty() {
                take(ServerEvent { id, data: serde_json::from_str(&data).map_err(io::Error::other)? });
            }
        }
    }
    Ok(())
}
