//! An OpenTelemetry collector on loopback: receives traces by OTLP over HTTP and stores every span.
//!
//! Parses as much of protobuf as it needs by hand, so that a mistake in the library that writes it is not repeated.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};

/// One span as it arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceSpan {
    /// In hexadecimal, as `traceparent` has it.
    pub trace: String,
    /// In hexadecimal.
    pub id: String,
    /// In hexadecimal; empty for the first of a trace.
    pub parent: String,
    /// Its name.
    pub name: String,
    /// Attributes that are text or numbers.
    pub attributes: Vec<(String, String)>,
}

/// A collector that listens until it is dropped; its threads end with the test.
pub struct Collector {
    /// Where it listens.
    pub address: SocketAddr,
    spans: Arc<Mutex<Vec<TraceSpan>>>,
}

impl Collector {
    /// Starts one.
    #[allow(clippy::new_without_default)] // A default that listens would surprise.
    pub fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
        let address = listener.local_addr().expect("a listener has an address");
        let spans = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&spans);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let kept = Arc::clone(&kept);
                std::thread::spawn(move || while serve(&stream, &kept).is_some() {});
            }
        });
        Self { address, spans }
    }

    /// Everything that has arrived.
    pub fn spans(&self) -> Vec<TraceSpan> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// One request. `None` when the connection is closed.
fn serve(stream: &TcpStream, kept: &Mutex<Vec<TraceSpan>>) -> Option<()> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|length| *length > 0)?;
    assert!(line.starts_with("POST /v1/traces "), "{line}");
    let mut length = 0;
    loop {
        line.clear();
        reader.read_line(&mut line).ok()?;
        let header = line.trim_end().to_ascii_lowercase();
        if header.is_empty() {
            break;
        }
        if let Some(value) = header.strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let spans = spans_of(&body).expect("the body is a request of OTLP");
    kept.lock().unwrap_or_else(PoisonError::into_inner).extend(spans);
    let answer = "HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n";
    (&mut &*stream).write_all(answer.as_bytes()).ok()
}

/// `ExportTraceServiceRequest`: resource spans (1), of which scope spans (2), of which spans (2).
fn spans_of(body: &[u8]) -> Option<Vec<TraceSpan>> {
    let mut all = Vec::new();
    for resource in messages(body, 1)? {
        for scope in messages(resource, 2)? {
            for span in messages(scope, 2)? {
                all.push(span_of(span)?);
            }
        }
    }
    Some(all)
}

fn span_of(span: &[u8]) -> Option<TraceSpan> {
    let one = |number| Some(messages(span, number)?.first().copied().unwrap_or_default());
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let mut attributes = Vec::new();
    for attribute in messages(span, 9)? {
        let key = messages(attribute, 1)?.first().copied()?;
        let value = messages(attribute, 2)?.first().copied()?;
        let value = match fields(value)?.first() {
            Some((_, Field::Bytes(text))) => String::from_utf8_lossy(text).into_owned(),
            Some((_, Field::Number(number))) => number.to_string(),
            None => String::new(),
        };
        attributes.push((String::from_utf8_lossy(key).into_owned(), value));
    }
    Some(TraceSpan {
        trace: hex(one(1)?),
        id: hex(one(2)?),
        parent: hex(one(4)?),
        name: String::from_utf8_lossy(one(5)?).into_owned(),
        attributes,
    })
}

enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// The fields of a message, with their numbers.
fn fields(mut message: &[u8]) -> Option<Vec<(u64, Field<'_>)>> {
    let mut all = Vec::new();
    while !message.is_empty() {
        let tag = number(&mut message)?;
        let field = match tag & 7 {
            0 => Field::Number(number(&mut message)?),
            1 => Field::Bytes(take(&mut message, 8)?),
            2 => {
                let length = usize::try_from(number(&mut message)?).ok()?;
                Field::Bytes(take(&mut message, length)?)
            }
            5 => Field::Bytes(take(&mut message, 4)?),
            _ => return None,
        };
        all.push((tag >> 3, field));
    }
    Some(all)
}

/// The fields with one number that are messages, texts or bytes.
fn messages(message: &[u8], wanted: u64) -> Option<Vec<&[u8]>> {
    let all = fields(message)?.into_iter();
    Some(
        all.filter_map(|(number, field)| match field {
            Field::Bytes(bytes) if number == wanted => Some(bytes),
            Field::Bytes(_) | Field::Number(_) => None,
        })
        .collect(),
    )
}

fn take<'a>(from: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, rest) = from.split_at_checked(length)?;
    *from = rest;
    Some(taken)
}

fn number(from: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = take(from, 1)?[0];
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}
