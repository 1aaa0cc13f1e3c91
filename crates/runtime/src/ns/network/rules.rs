//! The rules of a sandbox's namespace, as one nf_tables batch. Pure, apart from [`apply`] and [`remove`].
//!
//! The rules are the same for every policy; routes decide what arrives. TPROXY hands a connection to any address and port to our
//! listener, which finds the address it was meant for with getsockname(2). Nothing is tracked and nothing is rewritten, but for
//! questions to name servers that a program chose itself.
//!
//! ```text
//! table inet shoal
//!   chain in   { type filter hook prerouting priority mangle }
//!     to the refused address, port 80 or 443          tproxy, accept
//!     to the refused address                          accept           (no one listens there: refused at once)
//!     tcp, not to this sandbox itself or loopback     tproxy
//!   chain out  { type filter hook output priority mangle }
//!     echo request                                    drop             (the kernel would answer for every address that has a route)
//!     if everything has a route:
//!     udp to port 53 of anyone but us                 port 53 becomes 61053
//!     udp from port 61053                             port 61053 becomes 53
//! ```

use std::io;
use std::net::IpAddr;

use wire::network::{
    ANY_DNS_PORT, DNS_PORT, Family, NetworkFault, OWN_V4, OWN_V6, POOL_V4, POOL_V6, PROXY_PORT, Prefix,
    REFUSED_PORTS, REFUSED_V4, REFUSED_V6, Routes,
};

use super::message::{ACK, APPEND, Attributes, CREATE, Messages};
use super::netlink::{Netlink, Refusal, Subsystem};

/// The table's name.
const TABLE: &str = "shoal";
/// The priority of `mangle`: before anything is delivered.
const PRIORITY: i32 = -150;

/// The address family of a rule: NFPROTO_* of linux/netfilter.h.
const INET: u8 = 1;

/// Where packets pass a chain: NF_INET_*.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Chain {
    In,
    Out,
}

impl Chain {
    fn name(self) -> &'static str {
        match self {
            Self::In => "in",
            Self::Out => "out",
        }
    }

    fn hook(self) -> u32 {
        match self {
            Self::In => 0,
            Self::Out => 3,
        }
    }
}

/// A condition, or what is done when all before it hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Family(Family),
    /// TCP, UDP, ICMP.
    Protocol(u8),
    To(IpAddr),
    NotTo(Prefix),
    /// The kind of an ICMP message.
    IcmpKind(u8),
    FromPort(u16),
    ToPort(u16),
    SetFromPort(u16),
    SetToPort(u16),
    /// To our listener.
    Proxy(Family),
    Accept,
    Drop,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Rule {
    chain: Chain,
    parts: Vec<Part>,
}

const TCP: u8 = libc::IPPROTO_TCP as u8;
const UDP: u8 = libc::IPPROTO_UDP as u8;
const ICMP: u8 = libc::IPPROTO_ICMP as u8;
const ICMP_V6: u8 = libc::IPPROTO_ICMPV6 as u8;
const ECHO_REQUEST: u8 = 8;
const ECHO_REQUEST_V6: u8 = 128;

/// All rules, in their order.
fn rules(open: bool, ipv6: bool) -> Vec<Rule> {
    use Part::*;
    let host = |address: IpAddr| Prefix { address, bits: if address.is_ipv4() { 32 } else { 128 } };
    let loopback_v4 = Prefix { address: std::net::Ipv4Addr::new(127, 0, 0, 0).into(), bits: 8 };
    let loopback_v6 = host(std::net::Ipv6Addr::LOCALHOST.into());
    let mut rules = Vec::new();
    let mut add = |chain: Chain, parts: Vec<Part>| rules.push(Rule { chain, parts });
    let families = [
        (
            wire::network::Family::V4,
            IpAddr::V4(REFUSED_V4),
            IpAddr::V4(OWN_V4),
            loopback_v4,
            POOL_V4,
            ICMP,
            ECHO_REQUEST,
        ),
        (
            wire::network::Family::V6,
            IpAddr::V6(REFUSED_V6),
            IpAddr::V6(OWN_V6),
            loopback_v6,
            POOL_V6,
            ICMP_V6,
            ECHO_REQUEST_V6,
        ),
    ];
    for (family, refused, own, loopback, pool, icmp, echo) in
        families.into_iter().take(if ipv6 { 2 } else { 1 })
    {
        for port in REFUSED_PORTS {
            add(
                Chain::In,
                vec![Family(family), Protocol(TCP), To(refused), ToPort(port), Proxy(family), Accept],
            );
        }
        add(Chain::In, vec![Family(family), To(refused), Accept]);
        add(Chain::In, vec![Family(family), Protocol(TCP), NotTo(host(own)), NotTo(loopback), Proxy(family)]);
        add(Chain::Out, vec![Family(family), Protocol(icmp), IcmpKind(echo), Drop]);
        if open {
            let elsewhere = [Family(family), Protocol(UDP), NotTo(loopback), NotTo(pool)];
            add(Chain::Out, [&elsewhere[..], &[ToPort(DNS_PORT), SetToPort(ANY_DNS_PORT)]].concat());
            add(
                Chain::Out,
                vec![Family(family), Protocol(UDP), FromPort(ANY_DNS_PORT), SetFromPort(DNS_PORT)],
            );
        }
    }
    rules
}

/// Registers: one for addresses and what is compared, one for ports.
const REGISTER: u32 = 1;
const PORT_REGISTER: u32 = 2;
/// Where a packet's bytes are counted from.
const NETWORK_HEADER: u32 = 1;
const TRANSPORT_HEADER: u32 = 2;

/// One expression of a rule.
fn expression(name: &str, data: &Attributes) -> Attributes {
    const NAME: u16 = 1;
    const DATA: u16 = 2;
    const ELEMENT: u16 = 1;
    Attributes::new().nest(ELEMENT, &Attributes::new().text(NAME, name).nest(DATA, data))
}

fn value(bytes: &[u8]) -> Attributes {
    const VALUE: u16 = 1;
    Attributes::new().bytes(VALUE, bytes)
}

/// Loads what the kernel knows about a packet.
fn meta(key: u32) -> Attributes {
    expression("meta", &Attributes::new().number(1, REGISTER).number(2, key))
}

/// Loads bytes of a packet.
fn payload(base: u32, offset: u32, length: u32) -> Attributes {
    expression(
        "payload",
        &Attributes::new().number(1, REGISTER).number(2, base).number(3, offset).number(4, length),
    )
}

/// Goes on if the register has these bytes, or if it has not.
fn compare(equal: bool, bytes: &[u8]) -> Attributes {
    let operation = if equal { 0 } else { 1 };
    expression("cmp", &Attributes::new().number(1, REGISTER).number(2, operation).nest(3, &value(bytes)))
}

/// Keeps the first bits of the register.
fn mask(bits: u8, length: usize) -> Attributes {
    let mask: Vec<u8> = (0..length)
        .map(|byte| !(0xff_u8.checked_shr((u32::from(bits)).saturating_sub(byte as u32 * 8)).unwrap_or(0)))
        .collect();
    let zero = vec![0; length];
    expression(
        "bitwise",
        &Attributes::new()
            .number(1, REGISTER)
            .number(2, REGISTER)
            .number(3, length as u32)
            .nest(4, &value(&mask))
            .nest(5, &value(&zero)),
    )
}

/// Puts bytes into a register.
fn immediate(register: u32, bytes: &[u8]) -> Attributes {
    expression("immediate", &Attributes::new().number(1, register).nest(2, &value(bytes)))
}

fn verdict(code: i32) -> Attributes {
    const VERDICT: u16 = 2;
    const CODE: u16 = 1;
    let verdict = Attributes::new().nest(VERDICT, &Attributes::new().number(CODE, code as u32));
    expression("immediate", &Attributes::new().number(1, 0).nest(2, &verdict))
}

/// Writes a port into a packet and keeps its checksum right.
fn set_port(offset: u32, port: u16) -> Vec<Attributes> {
    const INTERNET_CHECKSUM: u32 = 1;
    /// Where the checksum of UDP is.
    const CHECKSUM: u32 = 6;
    let write = Attributes::new()
        .number(5, REGISTER)
        .number(2, TRANSPORT_HEADER)
        .number(3, offset)
        .number(4, 2)
        .number(6, INTERNET_CHECKSUM)
        .number(7, CHECKSUM);
    vec![immediate(REGISTER, &port.to_be_bytes()), expression("payload", &write)]
}

/// Loads where a packet goes to.
fn destination(address: IpAddr) -> (Attributes, Vec<u8>) {
    match address {
        IpAddr::V4(address) => (payload(NETWORK_HEADER, 16, 4), address.octets().into()),
        IpAddr::V6(address) => (payload(NETWORK_HEADER, 24, 16), address.octets().into()),
    }
}

/// NFPROTO_* of a family.
fn number_of(family: Family) -> u8 {
    match family {
        Family::V4 => 2,
        Family::V6 => 10,
    }
}

impl Part {
    fn expressions(self) -> Vec<Attributes> {
        const META_FAMILY: u32 = 15;
        const META_PROTOCOL: u32 = 16;
        const FROM_PORT: u32 = 0;
        const TO_PORT: u32 = 2;
        match self {
            Self::Family(family) => vec![meta(META_FAMILY), compare(true, &[number_of(family)])],
            Self::Protocol(protocol) => vec![meta(META_PROTOCOL), compare(true, &[protocol])],
            Self::To(address) => {
                let (load, bytes) = destination(address);
                vec![load, compare(true, &bytes)]
            }
            Self::NotTo(prefix) => {
                let (load, bytes) = destination(prefix.address);
                vec![load, mask(prefix.bits, bytes.len()), compare(false, &bytes)]
            }
            Self::IcmpKind(kind) => vec![payload(TRANSPORT_HEADER, 0, 1), compare(true, &[kind])],
            Self::FromPort(port) => {
                vec![payload(TRANSPORT_HEADER, FROM_PORT, 2), compare(true, &port.to_be_bytes())]
            }
            Self::ToPort(port) => {
                vec![payload(TRANSPORT_HEADER, TO_PORT, 2), compare(true, &port.to_be_bytes())]
            }
            Self::SetFromPort(port) => set_port(FROM_PORT, port),
            Self::SetToPort(port) => set_port(TO_PORT, port),
            Self::Proxy(family) => {
                let own: Vec<u8> = match family {
                    Family::V4 => OWN_V4.octets().into(),
                    Family::V6 => OWN_V6.octets().into(),
                };
                let proxy = Attributes::new()
                    .number(1, number_of(family).into())
                    .number(2, REGISTER)
                    .number(3, PORT_REGISTER);
                vec![
                    immediate(REGISTER, &own),
                    immediate(PORT_REGISTER, &PROXY_PORT.to_be_bytes()),
                    expression("tproxy", &proxy),
                ]
            }
            Self::Accept => vec![verdict(libc::NF_ACCEPT)],
            Self::Drop => vec![verdict(libc::NF_DROP)],
        }
    }
}

/// NFNL_SUBSYS_NFTABLES and its messages.
const SUBSYSTEM: u16 = 10;
const NEW_TABLE: u16 = SUBSYSTEM << 8;
const DELETE_TABLE: u16 = (SUBSYSTEM << 8) | 2;
const NEW_CHAIN: u16 = (SUBSYSTEM << 8) | 3;
const NEW_RULE: u16 = (SUBSYSTEM << 8) | 6;
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;

/// A batch, which the kernel takes as a whole or not at all, and which message of it is what.
struct Batch {
    messages: Messages,
    /// The numbers of those that need TPROXY.
    proxies: Vec<u32>,
}

/// nfgenmsg: family, version, subsystem.
fn general(family: u8, subsystem: u16) -> [u8; 4] {
    let [high, low] = subsystem.to_be_bytes();
    [family, 0, high, low]
}

/// Makes our table gone, whether it is there or not, within a batch.
fn push_absence(messages: &mut Messages) {
    let table = Attributes::new().text(1, TABLE);
    messages.push(NEW_TABLE, CREATE, &general(INET, 0), &table);
    messages.push(DELETE_TABLE, ACK, &general(INET, 0), &table);
}

fn batch(rules: &[Rule]) -> Batch {
    let mut messages = Messages::default();
    let mut proxies = Vec::new();
    let none = Attributes::new();
    messages.push(BATCH_BEGIN, 0, &general(0, SUBSYSTEM), &none);
    push_absence(&mut messages);
    messages.push(NEW_TABLE, CREATE, &general(INET, 0), &Attributes::new().text(1, TABLE));
    for chain in [Chain::In, Chain::Out] {
        let hook = Attributes::new().number(1, chain.hook()).number(2, PRIORITY as u32);
        let attributes =
            Attributes::new().text(1, TABLE).text(3, chain.name()).nest(4, &hook).text(7, "filter");
        messages.push(NEW_CHAIN, CREATE, &general(INET, 0), &attributes);
    }
    for (number, rule) in rules.iter().enumerate() {
        let mut bytes = Vec::new();
        for part in &rule.parts {
            bytes.extend(part.expressions());
        }
        let attributes =
            Attributes::new().text(1, TABLE).text(2, rule.chain.name()).nest(4, &Attributes::join(&bytes));
        let last = if number + 1 == rules.len() { ACK } else { 0 };
        let number = messages.push(NEW_RULE, CREATE | APPEND | last, &general(INET, 0), &attributes);
        if rule.parts.iter().any(|part| matches!(part, Part::Proxy(_))) {
            proxies.push(number);
        }
    }
    messages.push(BATCH_END, 0, &general(0, SUBSYSTEM), &none);
    Batch { messages, proxies }
}

/// Puts the rules in force, in place of those that are there.
pub(super) fn apply(routes: &Routes, ipv6: bool) -> Result<(), NetworkFault> {
    let batch = batch(&rules(matches!(routes, Routes::Open(_)), ipv6));
    exchange(&batch.messages).and_then(|refused| judge(&batch, &refused))
}

/// Takes all of them away.
pub(super) fn remove() -> Result<(), NetworkFault> {
    let mut messages = Messages::default();
    messages.push(BATCH_BEGIN, 0, &general(0, SUBSYSTEM), &Attributes::new());
    push_absence(&mut messages);
    messages.push(BATCH_END, 0, &general(0, SUBSYSTEM), &Attributes::new());
    exchange(&messages).and_then(|refused| judge(&Batch { messages, proxies: Vec::new() }, &refused))
}

fn exchange(messages: &Messages) -> Result<Vec<Refusal>, NetworkFault> {
    let kernel = |doing: &str| {
        let doing = doing.to_owned();
        move |e: io::Error| NetworkFault::Kernel { doing, errno: e.raw_os_error().unwrap_or(libc::EIO) }
    };
    let netlink = match Netlink::open(Subsystem::Netfilter) {
        Ok(netlink) => netlink,
        Err(e) if matches!(e.raw_os_error(), Some(libc::EPROTONOSUPPORT | libc::EAFNOSUPPORT)) => {
            return Err(NetworkFault::NoNfTables);
        }
        Err(e) => return Err(kernel("open a socket to nf_tables")(e)),
    };
    netlink.send(messages).map_err(kernel("speak to nf_tables"))
}

/// What the kernel's refusals mean.
fn judge(batch: &Batch, refused: &[Refusal]) -> Result<(), NetworkFault> {
    let Some(first) = refused.first() else { return Ok(()) };
    // The batch itself is refused where no part of the kernel answers for its subsystem.
    if first.number == 0 && matches!(first.errno, libc::EOPNOTSUPP | libc::EINVAL | libc::ENOENT) {
        return Err(NetworkFault::NoNfTables);
    }
    match refused.iter().find(|refusal| batch.proxies.contains(&refusal.number)) {
        Some(Refusal { errno: libc::ENOENT | libc::EOPNOTSUPP, .. }) => Err(NetworkFault::NoTproxy),
        Some(_) | None => Err(NetworkFault::Kernel {
            doing: format!("set rule {} of {}", first.number, batch.messages.count()),
            errno: first.errno,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ns::network::message::{attributes, received};

    #[test]
    fn a_batch_begins_and_ends_and_replaces_the_table_as_a_whole() {
        let batch = batch(&rules(false, true));
        let kinds: Vec<u16> = received(batch.messages.bytes()).map(|message| message.kind).collect();
        assert_eq!(kinds[..6], [BATCH_BEGIN, NEW_TABLE, DELETE_TABLE, NEW_TABLE, NEW_CHAIN, NEW_CHAIN]);
        assert_eq!(kinds.last(), Some(&BATCH_END));
        assert_eq!(kinds.iter().filter(|kind| **kind == NEW_RULE).count(), rules(false, true).len());
        assert_eq!(received(batch.messages.bytes()).next().map(|m| m.body), Some(&[0, 0, 0, 10][..]));
    }

    #[test]
    fn the_refused_address_answers_before_the_general_rule_and_on_two_ports_only() {
        let rules = rules(true, true);
        let position = |wanted: &dyn Fn(&Rule) -> bool| rules.iter().position(wanted).expect("a rule");
        let refused = IpAddr::V4(REFUSED_V4);
        let page = position(&|rule| {
            rule.parts.contains(&Part::To(refused)) && rule.parts.contains(&Part::ToPort(443))
        });
        let rest =
            position(&|rule| rule.parts == [Part::Family(Family::V4), Part::To(refused), Part::Accept]);
        let general = position(&|rule| {
            rule.parts.contains(&Part::Proxy(Family::V4)) && !rule.parts.contains(&Part::To(refused))
        });
        assert!(page < rest && rest < general);
    }

    #[test]
    fn only_an_open_network_rewrites_ports_and_only_two_families_are_spoken_of() {
        let rewrites = |open, ipv6| {
            let sets = |part: &Part| matches!(part, Part::SetToPort(_) | Part::SetFromPort(_));
            rules(open, ipv6).iter().filter(|rule| rule.parts.iter().any(sets)).count()
        };
        assert_eq!([rewrites(false, true), rewrites(true, true), rewrites(true, false)], [0, 4, 2]);
        let speaks_v6 = |rule: &Rule| rule.parts[0] == Part::Family(Family::V6);
        assert!(!rules(true, false).iter().any(speaks_v6));
        assert!(rules(true, true).iter().all(|rule| matches!(rule.parts[0], Part::Family(_))));
    }

    #[test]
    fn a_rule_is_read_back_as_its_expressions() {
        let rule = Rule { chain: Chain::In, parts: vec![Part::NotTo(POOL_V4), Part::Proxy(Family::V4)] };
        let batch = batch(&[rule]);
        let message = received(batch.messages.bytes()).find(|m| m.kind == NEW_RULE).expect("a rule");
        assert_eq!(batch.proxies, [message.number]);
        let parts: Vec<_> = attributes(&message.body[4..]).collect();
        assert_eq!((parts[0], parts[1]), ((1, &b"shoal\0"[..]), (2, &b"in\0"[..])));
        let names: Vec<&[u8]> = attributes(parts[2].1)
            .map(|(_, element)| attributes(element).next().expect("a name").1)
            .collect();
        let expected: [&[u8]; 6] =
            [b"payload\0", b"bitwise\0", b"cmp\0", b"immediate\0", b"immediate\0", b"tproxy\0"];
        assert_eq!(names, expected);
        let bitwise = attributes(parts[2].1).nth(1).expect("it is there").1;
        let data = attributes(bitwise).nth(1).expect("its data").1;
        let mask = attributes(data).find(|(kind, _)| *kind == 4).expect("a mask").1;
        assert_eq!(attributes(mask).next().expect("a value").1, [255, 254, 0, 0]);
    }

    #[test]
    fn a_missing_part_of_the_kernel_is_told_by_name() {
        let batch = batch(&rules(false, false));
        let judged = |number, errno| judge(&batch, &[Refusal { number, errno }]).expect_err("refused");
        assert_eq!(judged(0, libc::EOPNOTSUPP), NetworkFault::NoNfTables);
        assert_eq!(judged(batch.proxies[0], libc::ENOENT), NetworkFault::NoTproxy);
        assert!(matches!(judged(0, libc::EPERM), NetworkFault::Kernel { errno: libc::EPERM, .. }));
        assert!(matches!(judged(4, libc::ENOENT), NetworkFault::Kernel { errno: libc::ENOENT, .. }));
        assert!(judge(&batch, &[]).is_ok());
    }
}
