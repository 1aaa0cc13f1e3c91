//! Questions to the resolvers of the machine, with a cache. One resolver serves all sandboxes.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hickory_proto::op::{Edns, Message, MessageType, Query, ResponseCode};
use hickory_proto::rr::{RData, Record, RecordType};
use rustls::pki_types::ServerName;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::policy::Name;

/// How many answers are cached.
pub const CACHE_MAX: usize = 10_000;
/// The longest time that an answer is cached.
const TTL_MAX: Duration = Duration::from_secs(3600);
/// The shortest, so that a name with a TTL of zero is not looked up for every connection of a page.
const TTL_MIN: Duration = Duration::from_secs(2);
/// How long the answer that a name does not exist is cached.
const NEGATIVE_TTL: Duration = Duration::from_secs(30);
/// Concurrent questions of all sandboxes.
const QUESTIONS_MAX: usize = 512;
/// How long one server may take for one attempt.
const TRY_DEADLINE: Duration = Duration::from_secs(2);
/// The number of attempts, over all servers in turn.
const TRIES: usize = 3;
/// The largest answer over UDP that we accept and announce. It fits every path without fragments.
pub const UDP_BYTES_MAX: u16 = 1232;
/// The most servers that are used.
pub const SERVERS_MAX: usize = 8;

/// The servers to ask.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upstream {
    /// Plain servers, in order.
    pub servers: Vec<SocketAddr>,
    /// DNS over TLS instead: address and the name in the server's certificate.
    pub tls: Option<(SocketAddr, String)>,
}

impl Upstream {
    /// The servers of a `resolv.conf`.
    pub fn from_resolv_conf(text: &str) -> Self {
        let servers = text
            .lines()
            .filter_map(|line| line.trim().strip_prefix("nameserver"))
            .filter_map(|rest| rest.trim().split('%').next()?.parse::<IpAddr>().ok())
            .map(|address| SocketAddr::new(address, 53))
            .take(SERVERS_MAX)
            .collect();
        Self { servers, tls: None }
    }
}

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// No server is configured.
    #[error("no resolver is configured on this machine")]
    NoServer,
    /// The name cannot be put into a message.
    #[error("`{0}` does not fit into a question")]
    Unaskable(Name),
    /// Every try failed.
    #[error("no resolver answered for `{name}`")]
    Failed {
        /// What was asked.
        name: Name,
        /// The last failure.
        source: io::Error,
    },
    /// A server returned an error.
    #[error("the resolver answered {code} for `{name}`")]
    Server {
        /// What was asked.
        name: Name,
        /// The server's response code.
        code: ResponseCode,
    },
    /// Too many questions are in progress.
    #[error("too many questions are under way")]
    Busy,
}

/// An answer: whether the name exists, and its records.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Whether the name exists.
    pub exists: bool,
    /// The records, of the asked type and the aliases before them.
    pub records: Vec<Record>,
    until: Instant,
}

/// Asks servers, and caches their answers.
#[derive(Debug)]
pub struct Resolver {
    upstream: Upstream,
    tls: Option<Arc<rustls::ClientConfig>>,
    cache: Mutex<HashMap<(Name, RecordType), Arc<Answer>>>,
    questions: Semaphore,
}

impl Resolver {
    /// A resolver that asks `upstream`; `roots` verify a server over TLS.
    pub fn new(upstream: Upstream, roots: Option<Arc<rustls::ClientConfig>>) -> Self {
        Self { upstream, tls: roots, cache: Mutex::default(), questions: Semaphore::new(QUESTIONS_MAX) }
    }

    /// Asks for records of one type.
    pub async fn ask(&self, name: &Name, kind: RecordType) -> Result<Arc<Answer>, ResolveError> {
        let key = (name.clone(), kind);
        let now = Instant::now();
        let kept = self.cache.lock().expect("nobody panics while holding it").get(&key).cloned();
        if let Some(answer) = kept.filter(|answer| answer.until > now) {
            return Ok(answer);
        }
        let _place = self.questions.try_acquire().map_err(|_| ResolveError::Busy)?;
        let answer = Arc::new(self.ask_servers(name, kind).await?);
        let mut cache = self.cache.lock().expect("nobody panics while holding it");
        if cache.len() >= CACHE_MAX {
            cache.retain(|_, answer| answer.until > now);
        }
        if cache.len() >= CACHE_MAX {
            cache.clear();
        }
        cache.insert(key, answer.clone());
        Ok(answer)
    }

    /// The addresses of a name, alternating between IPv6 and IPv4, IPv6 first.
    pub async fn addresses(&self, name: &Name) -> Result<Vec<IpAddr>, ResolveError> {
        let (v4, v6) = tokio::join!(self.ask(name, RecordType::A), self.ask(name, RecordType::AAAA));
        let of = |answer: &Result<Arc<Answer>, ResolveError>| match answer {
            Ok(answer) => answer.records.iter().filter_map(|record| address(&record.data)).collect(),
            Err(_) => Vec::new(),
        };
        let (four, six): (Vec<IpAddr>, Vec<IpAddr>) = (of(&v4), of(&v6));
        if four.is_empty() && six.is_empty() {
            // One question may have failed while the other found nothing.
            v4?;
            v6?;
        }
        let longest = four.len().max(six.len());
        Ok((0..longest).flat_map(|at| [six.get(at), four.get(at)]).flatten().copied().collect())
    }

    async fn ask_servers(&self, name: &Name, kind: RecordType) -> Result<Answer, ResolveError> {
        let question = question(name, kind)?;
        let mut last = io::Error::from(io::ErrorKind::TimedOut);
        let servers = self.upstream.servers.len().max(usize::from(self.upstream.tls.is_some()));
        if servers == 0 {
            return Err(ResolveError::NoServer);
        }
        for turn in 0..TRIES {
            let tried = match (&self.upstream.tls, &self.tls) {
                (Some((server, host)), Some(config)) => {
                    timeout(2 * TRY_DEADLINE, over_tls(*server, host, config, &question)).await
                }
                (Some(_), None) => return Err(ResolveError::NoServer),
                (None, _) => {
                    let server = self.upstream.servers[turn % servers];
                    timeout(TRY_DEADLINE, plain(server, &question)).await
                }
            };
            match tried {
                Ok(Ok(message)) => match message.metadata.response_code {
                    ResponseCode::NoError | ResponseCode::NXDomain => return Ok(read(message, kind)),
                    code if turn + 1 == TRIES => {
                        return Err(ResolveError::Server { name: name.clone(), code });
                    }
                    _ => {}
                },
                Ok(Err(e)) => last = e,
                Err(_) => {}
            }
        }
        Err(ResolveError::Failed { name: name.clone(), source: last })
    }
}

/// The address in a record, if it has one.
fn address(data: &RData) -> Option<IpAddr> {
    match data {
        RData::A(a) => Some(IpAddr::V4(a.0)),
        RData::AAAA(aaaa) => Some(IpAddr::V6(aaaa.0)),
        _ => None,
    }
}

fn question(name: &Name, kind: RecordType) -> Result<Message, ResolveError> {
    let full = hickory_proto::rr::Name::from_ascii(format!("{name}."));
    let full = full.map_err(|_| ResolveError::Unaskable(name.clone()))?;
    let mut message = Message::query();
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(full, kind));
    let mut edns = Edns::new();
    edns.set_max_payload(UDP_BYTES_MAX);
    message.set_edns(edns);
    Ok(message)
}

fn read(message: Message, kind: RecordType) -> Answer {
    let exists = message.metadata.response_code == ResponseCode::NoError;
    let wanted = |record: &Record| record.record_type() == kind || record.record_type() == RecordType::CNAME;
    let records: Vec<Record> = message.answers.into_iter().filter(wanted).collect();
    let shortest = records.iter().map(|record| Duration::from_secs(record.ttl.into())).min();
    let keep = shortest.unwrap_or(NEGATIVE_TTL).clamp(TTL_MIN, TTL_MAX);
    Answer { exists, records, until: Instant::now() + keep }
}

/// Whether a reply matches a question: same id and same question, so that a forged reply is not accepted.
fn fits(reply: &Message, question: &Message) -> bool {
    reply.metadata.message_type == MessageType::Response
        && reply.metadata.id == question.metadata.id
        && match (reply.queries.as_slice(), question.queries.as_slice()) {
            ([got], [asked]) => got.query_type() == asked.query_type() && got.name() == asked.name(),
            _ => false,
        }
}

fn bad(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

async fn plain(server: SocketAddr, question: &Message) -> io::Result<Message> {
    let packet = question.to_vec().map_err(bad)?;
    // A separate socket for every question: its random port is half of what a forger must guess.
    let any: SocketAddr =
        if server.is_ipv4() { (Ipv4Addr::UNSPECIFIED, 0).into() } else { (Ipv6Addr::UNSPECIFIED, 0).into() };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(server).await?;
    socket.send(&packet).await?;
    let mut buffer = [0; UDP_BYTES_MAX as usize];
    loop {
        let length = socket.recv(&mut buffer).await?;
        let Ok(reply) = Message::from_vec(&buffer[..length]) else { continue };
        if !fits(&reply, question) {
            continue;
        }
        if !reply.metadata.truncation {
            return Ok(reply);
        }
        return over_stream(TcpStream::connect(server).await?, question, &packet).await;
    }
}

async fn over_tls(
    server: SocketAddr,
    host: &str,
    config: &Arc<rustls::ClientConfig>,
    question: &Message,
) -> io::Result<Message> {
    let host = ServerName::try_from(host.to_owned()).map_err(bad)?;
    let stream = TcpStream::connect(server).await?;
    let stream = tokio_rustls::TlsConnector::from(config.clone()).connect(host, stream).await?;
    over_stream(stream, question, &question.to_vec().map_err(bad)?).await
}

async fn over_stream<S>(mut stream: S, question: &Message, packet: &[u8]) -> io::Result<Message>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let length = u16::try_from(packet.len()).map_err(bad)?;
    stream.write_all(&[&length.to_be_bytes(), packet].concat()).await?;
    stream.flush().await?;
    let mut length = [0; 2];
    stream.read_exact(&mut length).await?;
    let mut reply = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut reply).await?;
    let reply = Message::from_vec(&reply).map_err(bad)?;
    if fits(&reply, question) { Ok(reply) } else { Err(io::ErrorKind::InvalidData.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_read_from_resolv_conf() {
        let text = "# comment\nnameserver 192.0.2.53\nsearch example.com\n nameserver fe80::1%eth0\nnameserver nonsense\n";
        let servers = Upstream::from_resolv_conf(text).servers;
        assert_eq!(servers, ["192.0.2.53:53".parse().expect("v4"), "[fe80::1]:53".parse().expect("v6")]);
    }

    #[test]
    fn a_reply_to_another_question_does_not_fit() {
        let name = |text: &str| Name::parse(text).expect("a name");
        let asked = question(&name("a.example"), RecordType::A).expect("a question");
        let mut reply = asked.clone();
        reply.metadata.message_type = MessageType::Response;
        assert!(fits(&reply, &asked));
        let mut other = reply.clone();
        other.metadata.id = asked.metadata.id.wrapping_add(1);
        assert!(!fits(&other, &asked));
        let mut other = question(&name("b.example"), RecordType::A).expect("a question");
        other.metadata.id = asked.metadata.id;
        other.metadata.message_type = MessageType::Response;
        assert!(!fits(&other, &asked));
        assert!(!fits(&asked, &asked), "a question is no reply");
    }
}
