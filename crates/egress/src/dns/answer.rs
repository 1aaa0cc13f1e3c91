//! Answers to a sandbox's DNS questions. Names that policy does not allow are never sent upstream, so names carry
//! nothing out.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::{A, AAAA, PTR};
use hickory_proto::rr::{DNSClass, RData, Record, RecordType};

use super::pool::{Meaning, Pool};
use super::upstream::{ResolveError, Resolver, UDP_BYTES_MAX};
use crate::policy::{Destination, Name, Policy, Protocol, Query as PolicyQuery, Verdict};

/// How long a guest may cache a synthetic address. The address never changes its meaning; the name may be refused
/// later.
const ANSWER_TTL: u32 = 60;
/// How long a guest may cache a refusal: short, since the name may be allowed soon.
const REFUSED_TTL: u32 = 2;
/// The largest answer over UDP to a client that announces no size.
const PLAIN_UDP_BYTES: u16 = 512;
/// The largest question: it has only one name.
pub const QUESTION_BYTES_MAX: usize = 4096;

/// The transport of a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// Answers that are too large are truncated.
    Udp,
    /// Answers have up to 64 KiB.
    Tcp,
}

/// A question and its outcome, for events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// The name.
    pub name: Name,
    /// The verdict of the policy; `None` if something else decided.
    pub verdict: Option<Verdict>,
    /// What was done.
    pub outcome: Outcome,
}

/// The outcome of a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Answered from the list, or with upstream's answer.
    Answered,
    /// Refused by policy.
    Refused,
    /// Refused because too many names below one suffix were asked for.
    OverBudget,
    /// The name does not exist, or is not part of the public tree.
    NoSuchName,
    /// Upstream or the list of names failed.
    Failed,
}

/// Why a name got no address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoPlace {
    /// The pool is full.
    #[error("the sandbox has used all of its {} names", super::pool::NAMES_MAX)]
    Full,
    /// The name could not be stored.
    #[error("the name could not be stored")]
    NotStored,
}

/// What is needed to know about the sandbox for an answer.
#[expect(async_fn_in_trait, reason = "used in this crate only, by callers that need no `Send` bound")]
pub trait Zone {
    /// Where synthetic addresses lie.
    fn pool(&self) -> Pool;
    /// The policy in force.
    fn policy(&self) -> std::sync::Arc<Policy>;
    /// The place of a name that already has one.
    fn place(&self, name: &Name) -> Option<u32>;
    /// The name at a place.
    fn name_at(&self, place: u32) -> Option<Name>;
    /// Whether the budget has room for a question about this name.
    fn within_budget(&self, name: &Name) -> bool;
    /// Assigns a place to a name. The place is stored before this returns.
    async fn assign(&self, name: &Name) -> Result<u32, NoPlace>;
}

/// Answers one packet. `None` if there is nothing to send.
pub async fn answer(
    packet: &[u8],
    transport: Transport,
    zone: &impl Zone,
    resolver: &Resolver,
) -> (Option<Vec<u8>>, Option<Asked>) {
    let request = match read(packet) {
        Read::Question(request) => request,
        Read::Refuse(reply) => return (reply.to_vec().ok(), None),
        Read::Ignore => return (None, None),
    };
    let mut reply = Message::response(request.metadata.id, OpCode::Query);
    reply.metadata.recursion_desired = request.metadata.recursion_desired;
    reply.metadata.recursion_available = true;
    let query = request.queries[0].clone();
    reply.add_query(query.clone());
    if request.edns.is_some() {
        let mut edns = Edns::new();
        edns.set_max_payload(UDP_BYTES_MAX);
        reply.set_edns(edns);
    }
    let asked = fill(&mut reply, &query, zone, resolver).await;
    let room = match transport {
        Transport::Tcp => u16::MAX,
        Transport::Udp => match &request.edns {
            Some(edns) => edns.max_payload().clamp(PLAIN_UDP_BYTES, UDP_BYTES_MAX),
            None => PLAIN_UDP_BYTES,
        },
    };
    let bytes = reply.to_vec().ok().and_then(|bytes| {
        if bytes.len() <= usize::from(room) { Some(bytes) } else { reply.truncate().to_vec().ok() }
    });
    (bytes, asked)
}

/// A parsed packet.
enum Read {
    Question(Box<Message>),
    Refuse(Box<Message>),
    Ignore,
}

/// Reads a packet from a guest.
fn read(packet: &[u8]) -> Read {
    let refuse = |id, op, code| Read::Refuse(Box::new(Message::error_msg(id, op, code)));
    if packet.len() < 12 || packet.len() > QUESTION_BYTES_MAX || packet[2] & 0x80 != 0 {
        return Read::Ignore;
    }
    let id = u16::from_be_bytes([packet[0], packet[1]]);
    let Ok(message) = Message::from_vec(packet) else {
        return refuse(id, OpCode::Query, ResponseCode::FormErr);
    };
    if message.metadata.message_type != MessageType::Query {
        return Read::Ignore;
    }
    if message.metadata.op_code != OpCode::Query {
        return refuse(id, message.metadata.op_code, ResponseCode::NotImp);
    }
    if message.queries.len() != 1 {
        return refuse(id, OpCode::Query, ResponseCode::FormErr);
    }
    if message.edns.as_ref().is_some_and(|edns| edns.version() != 0) {
        return refuse(id, OpCode::Query, ResponseCode::BADVERS);
    }
    Read::Question(Box::new(message))
}

async fn fill(reply: &mut Message, query: &Query, zone: &impl Zone, resolver: &Resolver) -> Option<Asked> {
    if query.query_class() != DNSClass::IN {
        reply.metadata.response_code = ResponseCode::Refused;
        return None;
    }
    let Ok(name) = Name::from_wire(&query.name().to_ascii()) else {
        // The root exists; a name that cannot be a host name does not.
        if !query.name().is_root() {
            reply.metadata.response_code = ResponseCode::NXDomain;
        }
        return None;
    };
    if name.as_str().ends_with(".arpa") {
        pointer(reply, query, &name, zone, resolver).await;
        return None;
    }
    // The guest's own host name: programs look it up, and a refusal would be an event about nothing.
    if wire::network::is_host_name(name.as_str()) {
        synthetic(reply, query, (Ipv4Addr::LOCALHOST, Ipv6Addr::LOCALHOST), ANSWER_TTL);
        return None;
    }
    let policy = zone.policy();
    let verdict = policy.resolves(&host_of(&name));
    let done = |outcome| Some(Asked { name: name.clone(), verdict: Some(verdict.clone()), outcome });
    // Names of local networks exist only if a rule names them: the public tree is not asked about them.
    if name.is_local_only() && !(verdict.allows() && verdict.is_by_written_rule() && !verdict.audited) {
        reply.metadata.response_code = ResponseCode::NXDomain;
        return done(if verdict.allows() { Outcome::NoSuchName } else { Outcome::Refused });
    }
    if !verdict.allows() {
        refuse(reply, query, zone.pool());
        return done(Outcome::Refused);
    }
    match query.query_type() {
        RecordType::A | RecordType::AAAA => {
            let place = match zone.place(&name) {
                Some(place) => Ok(place),
                None if !zone.within_budget(&name) => {
                    refuse(reply, query, zone.pool());
                    return done(Outcome::OverBudget);
                }
                None => new_place(&name, zone, resolver).await,
            };
            match place {
                Ok(place) => {
                    synthetic(reply, query, zone.pool().of_name(place), ANSWER_TTL);
                    done(Outcome::Answered)
                }
                Err(code) => {
                    reply.metadata.response_code = code;
                    done(if code == ResponseCode::NXDomain { Outcome::NoSuchName } else { Outcome::Failed })
                }
            }
        }
        RecordType::CNAME | RecordType::MX | RecordType::TXT | RecordType::SRV => {
            if !zone.within_budget(&name) {
                reply.metadata.response_code = ResponseCode::Refused;
                return done(Outcome::OverBudget);
            }
            done(forward(reply, query, &name, resolver).await)
        }
        // HTTPS and SVCB would carry addresses and keys for Encrypted Client Hello past the synthetic address.
        _ => done(Outcome::Answered),
    }
}

/// The host of a service name such as `_http._tcp.example.com`.
fn host_of(name: &Name) -> Name {
    let mut rest = name.as_str();
    while let Some((label, parent)) = rest.split_once('.')
        && label.starts_with('_')
    {
        rest = parent;
    }
    Name::from_wire(rest).unwrap_or_else(|_| name.clone())
}

/// Assigns a place to a name that has none, if it exists upstream.
async fn new_place(name: &Name, zone: &impl Zone, resolver: &Resolver) -> Result<u32, ResponseCode> {
    match resolver.ask(name, RecordType::A).await {
        // Behind an upstream proxy there may be no resolver; then the proxy resolves names.
        Err(ResolveError::NoServer) => zone.assign(name).await.map_err(no_place),
        Ok(answer) if answer.exists => zone.assign(name).await.map_err(no_place),
        Ok(_) => Err(ResponseCode::NXDomain),
        Err(error) => {
            tracing::debug!(%name, %error, "cannot look up a name");
            Err(ResponseCode::ServFail)
        }
    }
}

fn no_place(why: NoPlace) -> ResponseCode {
    match why {
        NoPlace::Full => ResponseCode::Refused,
        NoPlace::NotStored => ResponseCode::ServFail,
    }
}

/// Answers with the shared address where the refusal is explained. Other types have no records.
fn refuse(reply: &mut Message, query: &Query, pool: Pool) {
    synthetic(reply, query, pool.refused(), REFUSED_TTL);
}

fn synthetic(reply: &mut Message, query: &Query, addresses: (Ipv4Addr, Ipv6Addr), ttl: u32) {
    let data = match query.query_type() {
        RecordType::A => RData::A(A(addresses.0)),
        RecordType::AAAA => RData::AAAA(AAAA(addresses.1)),
        _ => return,
    };
    reply.add_answer(Record::from_rdata(query.name().clone(), ttl, data));
}

async fn forward(reply: &mut Message, query: &Query, name: &Name, resolver: &Resolver) -> Outcome {
    match resolver.ask(name, query.query_type()).await {
        Ok(answer) => {
            reply.add_answers(answer.records.iter().cloned());
            if answer.exists {
                return Outcome::Answered;
            }
            reply.metadata.response_code = ResponseCode::NXDomain;
            Outcome::NoSuchName
        }
        Err(error) => {
            tracing::debug!(%name, %error, "cannot look up a name");
            reply.metadata.response_code = ResponseCode::ServFail;
            Outcome::Failed
        }
    }
}

/// The name of an address: from the list for synthetic ones, from upstream for those that policy opens.
async fn pointer(reply: &mut Message, query: &Query, name: &Name, zone: &impl Zone, resolver: &Resolver) {
    let address = query.name().parse_arpa_name().ok().map(|block| block.addr());
    let full = |block: &IpAddr| match block {
        IpAddr::V4(_) => query.name().num_labels() == 6,
        IpAddr::V6(_) => query.name().num_labels() == 34,
    };
    let Some(address) = address.filter(full).filter(|_| query.query_type() == RecordType::PTR) else {
        reply.metadata.response_code = ResponseCode::NXDomain;
        return;
    };
    match zone.pool().meaning(address) {
        Meaning::Name(place) => {
            let target = zone
                .name_at(place)
                .and_then(|name| hickory_proto::rr::Name::from_ascii(format!("{name}.")).ok());
            match target {
                Some(target) => {
                    let data = RData::PTR(PTR(target));
                    reply.add_answer(Record::from_rdata(query.name().clone(), ANSWER_TTL, data));
                }
                None => reply.metadata.response_code = ResponseCode::NXDomain,
            }
        }
        Meaning::Outside => {
            let verdict = zone.policy().decide(PolicyQuery {
                to: Destination::Address(address),
                port: 443,
                protocol: Protocol::Tls,
            });
            // In audit mode this would ask upstream about addresses that no rule opens, without any use.
            if verdict.allows() && !verdict.audited && zone.within_budget(name) {
                forward(reply, query, name, resolver).await;
            } else {
                reply.metadata.response_code = ResponseCode::NXDomain;
            }
        }
        Meaning::Resolver | Meaning::Own | Meaning::Refused | Meaning::Nothing => {
            reply.metadata.response_code = ResponseCode::NXDomain;
        }
    }
}

/// For the fuzzer: parsing a packet never panics, and a question has one name.
pub fn fuzz_packet(packet: &[u8]) {
    if let Read::Question(message) = read(packet) {
        assert_eq!(message.queries.len(), 1, "a question has one name");
        if let Ok(name) = Name::from_wire(&message.queries[0].name().to_ascii()) {
            assert!(name.as_str().len() <= crate::policy::NAME_BYTES_MAX, "a name within its limit");
            let _ = host_of(&name);
        }
        let _ = message.queries[0].name().parse_arpa_name();
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};
    use std::sync::{Arc, Mutex};

    use tokio::net::UdpSocket;

    use super::super::pool::Names;
    use super::super::upstream::Upstream;
    use super::*;
    use crate::policy::{Action, Mode, Preset, RuleSpec, Spec};

    struct TestZone {
        policy: Arc<Policy>,
        names: Mutex<Names>,
        stores: bool,
        budget: Mutex<super::super::Budget>,
    }

    impl Zone for TestZone {
        fn pool(&self) -> Pool {
            Pool::default()
        }
        fn policy(&self) -> Arc<Policy> {
            self.policy.clone()
        }
        fn place(&self, name: &Name) -> Option<u32> {
            self.names.lock().expect("a lock").place(name)
        }
        fn name_at(&self, place: u32) -> Option<Name> {
            self.names.lock().expect("a lock").at(place).cloned()
        }
        fn within_budget(&self, name: &Name) -> bool {
            self.budget.lock().expect("a lock").allows(name, std::time::Instant::now())
        }
        async fn assign(&self, name: &Name) -> Result<u32, NoPlace> {
            if !self.stores {
                return Err(NoPlace::NotStored);
            }
            self.names.lock().expect("a lock").add(name.clone()).ok_or(NoPlace::Full)
        }
    }

    fn zone(mode: Mode, rules: &[(&str, Action)]) -> TestZone {
        let rules = rules
            .iter()
            .map(|(to, action)| RuleSpec {
                action: *action,
                to: (*to).into(),
                ports: vec![],
                protocol: None,
                private: false,
            })
            .collect();
        let set = Spec { mode, rules, audit: false }.expand(&Preset::default()).expect("a policy");
        TestZone {
            policy: Arc::new(Policy::new(set)),
            names: Mutex::default(),
            stores: true,
            budget: Mutex::default(),
        }
    }

    /// A server on loopback that records every question. Names that begin with `no` do not exist; TXT answers are long.
    async fn recording() -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a socket");
        let address = socket.local_addr().expect("an address");
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        tokio::spawn(async move {
            let mut buffer = [0; 2048];
            while let Ok((length, from)) = socket.recv_from(&mut buffer).await {
                let question = Message::from_vec(&buffer[..length]).expect("a message");
                let query = question.queries[0].clone();
                log.lock().expect("a lock").push(format!("{} {}", query.name(), query.query_type()));
                let mut reply = Message::response(question.metadata.id, OpCode::Query);
                reply.add_query(query.clone());
                if query.name().to_ascii().starts_with("no") {
                    reply.metadata.response_code = ResponseCode::NXDomain;
                } else if query.query_type() == RecordType::A {
                    let data = RData::A(A(Ipv4Addr::new(203, 0, 113, 7)));
                    reply.add_answer(Record::from_rdata(query.name().clone(), 300, data));
                } else if query.query_type() == RecordType::TXT {
                    let text = vec!["x".repeat(200); 4];
                    let data = RData::TXT(hickory_proto::rr::rdata::TXT::new(text));
                    reply.add_answer(Record::from_rdata(query.name().clone(), 300, data));
                }
                socket.send_to(&reply.to_vec().expect("bytes"), from).await.expect("sent");
            }
        });
        (address, seen)
    }

    fn packet(name: &str, kind: RecordType, edns: Option<u16>) -> Vec<u8> {
        let mut message = Message::query();
        message.add_query(Query::query(hickory_proto::rr::Name::from_ascii(name).expect("a name"), kind));
        if let Some(size) = edns {
            let mut edns = Edns::new();
            edns.set_max_payload(size);
            message.set_edns(edns);
        }
        message.to_vec().expect("bytes")
    }

    async fn ask(zone: &TestZone, resolver: &Resolver, name: &str, kind: RecordType) -> Message {
        let (bytes, _) = answer(&packet(name, kind, Some(4096)), Transport::Udp, zone, resolver).await;
        Message::from_vec(&bytes.expect("an answer")).expect("a message")
    }

    fn resolver(address: SocketAddr) -> Resolver {
        Resolver::new(Upstream { servers: vec![address], tls: None }, None)
    }

    fn data(message: &Message) -> Vec<String> {
        message.answers.iter().map(|record| record.data.to_string()).collect()
    }

    #[tokio::test]
    async fn an_allowed_name_gets_a_synthetic_address_in_both_families() {
        let (server, seen) = recording().await;
        let (zone, resolver) = (zone(Mode::None, &[("*.example.com", Action::Allow)]), resolver(server));
        let a = ask(&zone, &resolver, "Www.Example.com.", RecordType::A).await;
        assert_eq!(data(&a), ["198.18.1.0"]);
        let aaaa = ask(&zone, &resolver, "www.example.com.", RecordType::AAAA).await;
        assert_eq!(data(&aaaa), ["100:0:0:1::100"]);
        let pointer = ask(&zone, &resolver, "0.1.18.198.in-addr.arpa.", RecordType::PTR).await;
        assert_eq!(data(&pointer), ["www.example.com."]);
        assert_eq!(*seen.lock().expect("a lock"), ["www.example.com. A"], "one question for both families");
        let missing = ask(&zone, &resolver, "none.example.com.", RecordType::A).await;
        assert_eq!(missing.metadata.response_code, ResponseCode::NXDomain);
    }

    #[tokio::test]
    async fn what_policy_refuses_is_never_asked_upstream() {
        let (server, seen) = recording().await;
        let (zone, resolver) = (zone(Mode::None, &[("ok.example", Action::Allow)]), resolver(server));
        let refused = ask(&zone, &resolver, "secret.evil.example.", RecordType::A).await;
        assert_eq!(data(&refused), ["198.18.0.3"]);
        assert_eq!(
            data(&ask(&zone, &resolver, "secret.evil.example.", RecordType::AAAA).await),
            ["100:0:0:1::3"]
        );
        for kind in [
            RecordType::TXT,
            RecordType::MX,
            RecordType::SRV,
            RecordType::CNAME,
            RecordType::HTTPS,
            RecordType::NULL,
            RecordType::ANY,
        ] {
            let reply = ask(&zone, &resolver, "secret.evil.example.", kind).await;
            assert!(reply.answers.is_empty(), "{kind}");
        }
        for name in [
            "host.",
            "secret.local.",
            "a.internal.",
            "secret.9.113.0.203.in-addr.arpa.",
            "9.113.0.203.in-addr.arpa.",
            "secret.arpa.",
        ] {
            let reply = ask(&zone, &resolver, name, RecordType::PTR).await;
            assert_eq!(reply.metadata.response_code, ResponseCode::NXDomain, "{name}");
        }
        assert!(seen.lock().expect("a lock").is_empty());
    }

    #[tokio::test]
    async fn a_sandboxes_own_host_name_is_loopback_and_no_event() {
        let (address, questions) = recording().await;
        let zone = zone(Mode::None, &[]);
        let reply = ask(&zone, &resolver(address), "sandbox-00ff12ab", RecordType::A).await;
        assert_eq!(data(&reply), ["127.0.0.1"]);
        let reply = ask(&zone, &resolver(address), "sandbox-00ff12ab", RecordType::AAAA).await;
        assert_eq!(data(&reply), ["::1"]);
        let packet = packet("sandbox-00ff12ab", RecordType::A, None);
        let (_, asked) = answer(&packet, Transport::Udp, &zone, &resolver(address)).await;
        assert_eq!(asked, None);
        for other in ["sandbox-00ff12a", "sandbox-00ff12ag", "sandbox-00ff12ab.com", "sandbox-00ff12abc"] {
            let reply = ask(&zone, &resolver(address), other, RecordType::A).await;
            assert_ne!(data(&reply), ["127.0.0.1"], "{other}");
        }
        assert_eq!(*questions.lock().expect("no panic"), Vec::<String>::new());
    }

    #[tokio::test]
    async fn local_names_are_not_asked_for_even_when_all_is_open() {
        let (server, seen) = recording().await;
        let (open, resolver) = (zone(Mode::Open, &[("git.corp.internal", Action::Allow)]), resolver(server));
        for name in ["printer.", "x.local.", "metadata.google.internal.", "foo.localhost."] {
            assert_eq!(
                ask(&open, &resolver, name, RecordType::A).await.metadata.response_code,
                ResponseCode::NXDomain
            );
        }
        assert!(seen.lock().expect("a lock").is_empty());
        assert_eq!(
            data(&ask(&open, &resolver, "git.corp.internal.", RecordType::A).await),
            ["198.18.1.0"],
            "a rule names it"
        );
    }

    #[tokio::test]
    async fn https_records_are_empty_and_text_is_forwarded_and_cut() {
        let (server, seen) = recording().await;
        let (zone, resolver) = (zone(Mode::None, &[("a.example", Action::Allow)]), resolver(server));
        assert!(ask(&zone, &resolver, "a.example.", RecordType::HTTPS).await.answers.is_empty());
        assert!(ask(&zone, &resolver, "_x._tcp.a.example.", RecordType::SVCB).await.answers.is_empty());
        assert!(seen.lock().expect("a lock").is_empty());
        assert_eq!(ask(&zone, &resolver, "a.example.", RecordType::TXT).await.answers.len(), 1);
        let (small, _) =
            answer(&packet("a.example.", RecordType::TXT, None), Transport::Udp, &zone, &resolver).await;
        let small = Message::from_vec(&small.expect("an answer")).expect("a message");
        assert!(small.metadata.truncation && small.answers.is_empty() && small.edns.is_none());
        let (whole, _) =
            answer(&packet("a.example.", RecordType::TXT, None), Transport::Tcp, &zone, &resolver).await;
        assert_eq!(Message::from_vec(&whole.expect("an answer")).expect("a message").answers.len(), 1);
        ask(&zone, &resolver, "_http._tcp.a.example.", RecordType::SRV).await;
        assert!(
            seen.lock().expect("a lock").contains(&"_http._tcp.a.example. SRV".to_owned()),
            "a service of an allowed host"
        );
    }

    #[tokio::test]
    async fn a_name_that_cannot_be_stored_is_a_temporary_failure() {
        let (server, _) = recording().await;
        let zone = TestZone { stores: false, ..zone(Mode::Open, &[]) };
        let reply = ask(&zone, &resolver(server), "a.example.", RecordType::A).await;
        assert_eq!((reply.metadata.response_code, reply.answers.len()), (ResponseCode::ServFail, 0));
    }

    #[tokio::test]
    async fn names_below_a_wildcard_are_limited() {
        let (server, seen) = recording().await;
        let (zone, resolver) = (zone(Mode::None, &[("*.example.com", Action::Allow)]), resolver(server));
        let mut refused = 0;
        for at in 0..200 {
            let reply = ask(&zone, &resolver, &format!("data{at}.example.com."), RecordType::A).await;
            refused += usize::from(data(&reply) == ["198.18.0.3"]);
        }
        assert_eq!(seen.lock().expect("a lock").len(), super::super::NEW_NAMES_PER_MINUTE as usize);
        assert_eq!(refused, 200 - super::super::NEW_NAMES_PER_MINUTE as usize);
    }

    #[tokio::test]
    async fn nonsense_is_refused_or_ignored() {
        let zone = zone(Mode::None, &[]);
        let resolver = Resolver::new(Upstream::default(), None);
        assert_eq!(answer(b"short", Transport::Udp, &zone, &resolver).await.0, None);
        let mut response = packet("a.example.", RecordType::A, None);
        response[2] |= 0x80;
        assert_eq!(
            answer(&response, Transport::Udp, &zone, &resolver).await.0,
            None,
            "no answer to an answer"
        );
        let mut broken = packet("a.example.", RecordType::A, None);
        broken.truncate(20);
        let (bytes, _) = answer(&broken, Transport::Udp, &zone, &resolver).await;
        assert_eq!(
            Message::from_vec(&bytes.expect("an answer")).expect("a message").metadata.response_code,
            ResponseCode::FormErr
        );
    }
}
