//! The rules of a sandbox's namespace, as one nf_tables batch. Pure, apart from [`apply`] and [`remove`].
//!
//! The rules are the same for every policy; routes decide what arrives. TPROXY passes a connection to any address and
//! port to our listener, which gets the original address from getsockname(2). Nothing is tracked, and nothing is
//! rewritten.
//!
//! ```text
//! table inet shoal
//!   chain in   { type filter hook prerouting priority mangle }
//!     to the refused address, port 80 or 443          tproxy, accept
//!     to the refused address                          accept           (nothing listens there: refused at once)
//!     tcp, not to this sandbox itself or loopback     tproxy
//!   chain out  { type filter hook output priority mangle }
//!     echo request                                    drop             (the kernel would answer for every address that has a route)
//! ```
//!
//! A table is created whole or not at all, and never changed, so an existing table is complete. Deleting a table makes
//! the kernel wait for all processors, some 10 ms, so no table is deleted to be created again.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use wire::network::{
    Family, NetworkFault, OWN_V4, OWN_V6, PROXY_PORT, Prefix, REFUSED_PORTS, REFUSED_V4, REFUSED_V6,
};

use super::message::{ACK, APPEND, Attributes, CREATE, EXCLUSIVE, Messages};
use super::netlink::{Netlink, Refusal, Subsystem};

/// Our table.
const TABLE: &str = "shoal";
const CHAINS: [Chain; 2] = [Chain::In, Chain::Out];

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

/// A condition, or the action if all conditions before it hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Family(Family),
    /// TCP, UDP, ICMP.
    Protocol(u8),
    To(IpAddr),
    NotTo(Prefix),
    /// The kind of an ICMP message.
    IcmpKind(u8),
    ToPort(u16),
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

/// The rules, in their order.
fn rules(ipv6: bool) -> Vec<Rule> {
    use Part::*;
    let host = |address: IpAddr| Prefix { address, bits: if address.is_ipv4() { 32 } else { 128 } };
    let v4 = Side {
        family: wire::network::Family::V4,
        refused: REFUSED_V4.into(),
        own: host(OWN_V4.into()),
        loopback: Prefix { address: Ipv4Addr::new(127, 0, 0, 0).into(), bits: 8 },
        echo: (libc::IPPROTO_ICMP as u8, 8),
    };
    let v6 = Side {
        family: wire::network::Family::V6,
        refused: REFUSED_V6.into(),
        own: host(OWN_V6.into()),
        loopback: host(Ipv6Addr::LOCALHOST.into()),
        echo: (libc::IPPROTO_ICMPV6 as u8, 128),
    };
    let mut rules = Vec::new();
    for Side { family, refused, own, loopback, echo } in [v4].into_iter().chain(ipv6.then_some(v6)) {
        let mut add = |chain: Chain, parts: &[Part]| {
            rules.push(Rule { chain, parts: [&[Family(family)], parts].concat() });
        };
        for port in REFUSED_PORTS {
            add(Chain::In, &[Protocol(TCP), To(refused), ToPort(port), Proxy(family), Accept]);
        }
        add(Chain::In, &[To(refused), Accept]);
        add(Chain::In, &[Protocol(TCP), NotTo(own), NotTo(loopback), Proxy(family)]);
        add(Chain::Out, &[Protocol(echo.0), IcmpKind(echo.1), Drop]);
    }
    rules
}

/// The parts of rules that depend on the address family.
struct Side {
    family: Family,
    refused: IpAddr,
    own: Prefix,
    loopback: Prefix,
    /// The protocol of echo requests, and their kind.
    echo: (u8, u8),
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

/// Loads the kernel's metadata of a packet.
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

/// Continues if the register has these bytes, or if it does not.
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

/// Loads a packet's destination address.
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
            Self::ToPort(port) => {
                vec![payload(TRANSPORT_HEADER, TO_PORT, 2), compare(true, &port.to_be_bytes())]
            }
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
const GET_TABLE: u16 = (SUBSYSTEM << 8) | 1;
const DELETE_TABLE: u16 = (SUBSYSTEM << 8) | 2;
const NEW_CHAIN: u16 = (SUBSYSTEM << 8) | 3;
const NEW_RULE: u16 = (SUBSYSTEM << 8) | 6;
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;

/// A batch, which the kernel applies as a whole or not at all, and the meaning of its messages.
struct Batch {
    messages: Messages,
    /// The numbers of the messages that need TPROXY.
    proxies: Vec<u32>,
}

/// nfgenmsg: family, version, subsystem.
fn general(family: u8, subsystem: u16) -> [u8; 4] {
    let [high, low] = subsystem.to_be_bytes();
    [family, 0, high, low]
}

/// Creates the table.
fn batch(ipv6: bool) -> Batch {
    let mut messages = Messages::default();
    let mut proxies = Vec::new();
    messages.push(BATCH_BEGIN, 0, &general(0, SUBSYSTEM), &Attributes::new());
    let named = || Attributes::new().text(1, TABLE);
    messages.push(NEW_TABLE, CREATE | EXCLUSIVE | ACK, &general(INET, 0), &named());
    for chain in CHAINS {
        let hook = Attributes::new().number(1, chain.hook()).number(2, PRIORITY as u32);
        let attributes = named().text(3, chain.name()).nest(4, &hook).text(7, "filter");
        messages.push(NEW_CHAIN, CREATE, &general(INET, 0), &attributes);
    }
    for rule in rules(ipv6) {
        let expressions: Vec<Attributes> = rule.parts.iter().flat_map(|part| part.expressions()).collect();
        let attributes = named().text(2, rule.chain.name()).nest(4, &Attributes::join(&expressions));
        let number = messages.push(NEW_RULE, CREATE | APPEND, &general(INET, 0), &attributes);
        if rule.parts.iter().any(|part| matches!(part, Part::Proxy(_))) {
            proxies.push(number);
        }
    }
    messages.push(BATCH_END, 0, &general(0, SUBSYSTEM), &Attributes::new());
    Batch { messages, proxies }
}

/// Applies the rules, which are the same for all routes.
pub(super) fn apply(ipv6: bool) -> Result<(), NetworkFault> {
    let kernel = speak()?;
    if !is_there(&kernel)? {
        let batch = batch(ipv6);
        judge(&batch, &exchange(&kernel, &batch.messages)?)?;
    }
    Ok(())
}

/// Removes our table.
pub(super) fn remove() -> Result<(), NetworkFault> {
    let kernel = speak()?;
    if !is_there(&kernel)? {
        return Ok(());
    }
    let mut messages = Messages::default();
    messages.push(BATCH_BEGIN, 0, &general(0, SUBSYSTEM), &Attributes::new());
    messages.push(DELETE_TABLE, ACK, &general(INET, 0), &Attributes::new().text(1, TABLE));
    messages.push(BATCH_END, 0, &general(0, SUBSYSTEM), &Attributes::new());
    let refused = exchange(&kernel, &messages)?;
    judge(&Batch { messages, proxies: Vec::new() }, &refused)
}

/// Whether this namespace has our table.
fn is_there(kernel: &Netlink) -> Result<bool, NetworkFault> {
    let mut messages = Messages::default();
    messages.push(GET_TABLE, ACK, &general(INET, 0), &Attributes::new().text(1, TABLE));
    match exchange(kernel, &messages)?[..] {
        [] => Ok(true),
        [Refusal { errno: libc::ENOENT, .. }] => Ok(false),
        // The kernel has no handler for this subsystem.
        [Refusal { errno: libc::EINVAL | libc::EOPNOTSUPP, .. }] => Err(NetworkFault::NoNfTables),
        [Refusal { errno, .. }, ..] => Err(NetworkFault::Kernel { doing: "look for rules".into(), errno }),
    }
}

fn speak() -> Result<Netlink, NetworkFault> {
    Netlink::open(Subsystem::Netfilter).map_err(|e| match e.raw_os_error() {
        Some(libc::EPROTONOSUPPORT | libc::EAFNOSUPPORT) => NetworkFault::NoNfTables,
        _ => kernel("open a socket to nf_tables", &e),
    })
}

fn exchange(kernel: &Netlink, messages: &Messages) -> Result<Vec<Refusal>, NetworkFault> {
    kernel.send(messages).map_err(|e| self::kernel("speak to nf_tables", &e))
}

fn kernel(doing: &str, error: &io::Error) -> NetworkFault {
    NetworkFault::Kernel { doing: doing.into(), errno: error.raw_os_error().unwrap_or(libc::EIO) }
}

/// Interprets the kernel's errors.
fn judge(batch: &Batch, refused: &[Refusal]) -> Result<(), NetworkFault> {
    let Some(first) = refused.first() else { return Ok(()) };
    // The batch itself is rejected if the kernel has no handler for its subsystem.
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
    fn a_batch_begins_and_ends_and_makes_whole_tables() {
        let batch = batch(true);
        let kinds: Vec<u16> = received(batch.messages.bytes()).map(|message| message.kind).collect();
        assert_eq!(kinds[..4], [BATCH_BEGIN, NEW_TABLE, NEW_CHAIN, NEW_CHAIN]);
        assert_eq!(kinds.last(), Some(&BATCH_END));
        assert_eq!(kinds.iter().filter(|kind| **kind == NEW_RULE).count(), rules(true).len());
        assert_eq!(received(batch.messages.bytes()).next().map(|m| m.body), Some(&[0, 0, 0, 10][..]));
    }

    #[test]
    fn the_refused_address_answers_before_the_general_rule_and_on_two_ports_only() {
        let rules = rules(true);
        let position = |wanted: &dyn Fn(&Rule) -> bool| rules.iter().position(wanted).expect("a rule");
        let refused = Part::To(REFUSED_V4.into());
        let page = position(&|rule| rule.parts.contains(&refused) && rule.parts.contains(&Part::ToPort(443)));
        let rest = position(&|rule| rule.parts == [Part::Family(Family::V4), refused, Part::Accept]);
        let general =
            position(&|rule| rule.parts.contains(&Part::Proxy(Family::V4)) && !rule.parts.contains(&refused));
        assert!(page < rest && rest < general);
    }

    #[test]
    fn every_rule_is_for_one_family() {
        assert!(rules(true).iter().all(|rule| matches!(rule.parts[0], Part::Family(_))));
        let v4 = rules(false);
        assert!(v4.iter().all(|rule| rule.parts[0] == Part::Family(Family::V4)));
        assert_eq!(v4.len() * 2, rules(true).len(), "both families have the same rules");
    }

    #[test]
    fn a_rule_is_read_back_as_its_expressions() {
        let batch = batch(false);
        let general = *batch.proxies.last().expect("the general rule comes last");
        let message = received(batch.messages.bytes()).find(|m| m.number == general).expect("a rule");
        let parts: Vec<_> = attributes(&message.body[4..]).collect();
        assert_eq!((parts[0], parts[1]), ((1, &b"shoal\0"[..]), (2, &b"in\0"[..])));
        let elements: Vec<(String, &[u8])> = attributes(parts[2].1)
            .map(|(_, element)| {
                let fields: Vec<_> = attributes(element).collect();
                (String::from_utf8_lossy(fields[0].1).trim_end_matches('\0').to_owned(), fields[1].1)
            })
            .collect();
        let names: Vec<&str> = elements.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(
            names.join(" "),
            "meta cmp meta cmp payload bitwise cmp payload bitwise cmp immediate immediate tproxy"
        );
        let value = |element: usize, kind: u16| {
            let nested =
                attributes(elements[element].1).find(|(found, _)| *found == kind).expect("it is there").1;
            attributes(nested).next().expect("a value").1
        };
        // Not to the sandbox itself, not to loopback.
        assert_eq!((value(5, 4), value(6, 3)), (&[255; 4][..], &[198, 18, 0, 2][..]));
        assert_eq!((value(8, 4), value(9, 3)), (&[255, 0, 0, 0][..], &[127, 0, 0, 0][..]));
        // To its listener.
        assert_eq!((value(10, 2), value(11, 2)), (&[198, 18, 0, 2][..], &61_000_u16.to_be_bytes()[..]));
    }

    #[test]
    fn masks_keep_the_first_bits() {
        let bytes = |bits: u8, length: usize| {
            let mask = mask(bits, length);
            let mut messages = Messages::default();
            messages.push(0, 0, &[], &mask);
            let body = received(messages.bytes()).next().expect("a message").body.to_vec();
            let element = attributes(&body).next().expect("an element").1.to_vec();
            let data = attributes(&element).nth(1).expect("its data").1.to_vec();
            let mask = attributes(&data).find(|(kind, _)| *kind == 4).expect("a mask").1.to_vec();
            attributes(&mask).next().expect("a value").1.to_vec()
        };
        assert_eq!(bytes(15, 4), [255, 254, 0, 0]);
        assert_eq!(bytes(32, 4), [255; 4]);
        assert_eq!(bytes(0, 4), [0; 4]);
        assert_eq!(bytes(64, 16), [[255; 8], [0; 8]].concat());
    }

    #[test]
    fn a_missing_part_of_the_kernel_is_told_by_name() {
        let batch = batch(false);
        let judged = |number, errno| judge(&batch, &[Refusal { number, errno }]).expect_err("refused");
        assert_eq!(judged(0, libc::EOPNOTSUPP), NetworkFault::NoNfTables);
        assert_eq!(judged(batch.proxies[0], libc::ENOENT), NetworkFault::NoTproxy);
        assert!(matches!(judged(0, libc::EPERM), NetworkFault::Kernel { errno: libc::EPERM, .. }));
        assert!(matches!(judged(1, libc::ENOENT), NetworkFault::Kernel { errno: libc::ENOENT, .. }));
        assert!(judge(&batch, &[]).is_ok());
    }
}
