//! Interfaces, addresses and routes of a sandbox, as messages. Pure, apart from [`apply`].
//!
//! Our routes are in the table `local` and carry our own protocol number, which distinguishes them from the kernel's. A
//! change is the difference between the existing and the wanted routes.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use wire::network::{HoleAnswer, OWN_V4, OWN_V6, POOL_V4, POOL_V6, Prefix, ROUTES_MAX, Routes};

use super::message::{ACK, Attributes, CREATE, DUMP, EXCLUSIVE, Messages, REPLACE, attributes};
use super::netlink::{Netlink, Refusal};

const NEW_LINK: u16 = 16;
const NEW_ADDRESS: u16 = 20;
const DELETE_ADDRESS: u16 = 21;
const NEW_ROUTE: u16 = 24;
const DELETE_ROUTE: u16 = 25;
const GET_ROUTE: u16 = 26;

/// The table that the kernel checks first.
const TABLE_LOCAL: u8 = 255;
/// Marks our routes. No routing program uses this number (rt_protos of iproute2).
const OUR_PROTOCOL: u8 = 83;
/// The scope of a route of kind `local`.
const SCOPE_HOST: u8 = 254;
/// The scope of routes that reject packets.
const SCOPE_UNIVERSE: u8 = 0;
/// Loopback is the first interface of every namespace.
const LOOPBACK: u32 = 1;
/// Messages in one write: even if all fail, their errors fit into the socket.
const CHUNK: usize = 128;

/// One of our routes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Route {
    prefix: Prefix,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// To this machine itself, where the listeners are.
    Local,
    Unreachable,
    Prohibited,
}

impl Kind {
    /// RTN_* of linux/rtnetlink.h.
    fn number(self) -> u8 {
        match self {
            Self::Local => 2,
            Self::Unreachable => 7,
            Self::Prohibited => 8,
        }
    }

    fn from_number(number: u8) -> Option<Self> {
        [Self::Local, Self::Unreachable, Self::Prohibited].into_iter().find(|kind| kind.number() == number)
    }
}

/// One message to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    LoopbackUp,
    AddAddress(IpAddr),
    RemoveAddress(IpAddr),
    Add(Route),
    /// Replaces another route of the same prefix.
    Replace(Route),
    Remove(Route),
}

impl Change {
    /// As it reads after "cannot".
    pub fn describe(&self) -> String {
        match self {
            Self::LoopbackUp => "bring loopback up".into(),
            Self::AddAddress(address) => format!("add the address {address}"),
            Self::RemoveAddress(address) => format!("remove the address {address}"),
            Self::Add(route) | Self::Replace(route) => format!("add a route to {}", route.prefix),
            Self::Remove(route) => format!("remove the route to {}", route.prefix),
        }
    }

    /// Whether this error means that the change was made before.
    fn is_done(&self, errno: i32) -> bool {
        match self {
            Self::LoopbackUp | Self::Replace(_) => false,
            // The kernel has its own route to each address of the sandbox, which leads to the same place.
            Self::AddAddress(_) | Self::Add(_) => errno == libc::EEXIST,
            Self::RemoveAddress(_) => errno == libc::EADDRNOTAVAIL,
            Self::Remove(_) => errno == libc::ESRCH,
        }
    }

    fn push(&self, messages: &mut Messages, flags: u16) -> u32 {
        match self {
            Self::LoopbackUp => {
                // ifinfomsg: family, kind, index, flags, which of them.
                let up = (libc::IFF_UP as u32).to_ne_bytes();
                let body = [&[0; 4][..], &LOOPBACK.to_ne_bytes(), &up, &up].concat();
                messages.push(NEW_LINK, flags, &body, &Attributes::new())
            }
            Self::AddAddress(address) => {
                address_message(messages, NEW_ADDRESS, flags | CREATE | EXCLUSIVE, *address)
            }
            Self::RemoveAddress(address) => address_message(messages, DELETE_ADDRESS, flags, *address),
            Self::Add(route) => route.push(messages, NEW_ROUTE, flags | CREATE | EXCLUSIVE),
            Self::Replace(route) => route.push(messages, NEW_ROUTE, flags | CREATE | REPLACE),
            Self::Remove(route) => route.push(messages, DELETE_ROUTE, flags),
        }
    }
}

fn address_message(messages: &mut Messages, kind: u16, flags: u16, address: IpAddr) -> u32 {
    /// IFA_F_NODAD: usable at once; loopback needs no duplicate address detection.
    const NO_DUPLICATE_CHECK: u8 = 2;
    const ADDRESS: u16 = 1;
    const LOCAL: u16 = 2;
    let (family, bits, bytes) = raw(address);
    let own_flags = if address.is_ipv6() { NO_DUPLICATE_CHECK } else { 0 };
    // ifaddrmsg: family, length of the prefix, flags, scope, index.
    let body = [&[family, bits, own_flags, 0][..], &LOOPBACK.to_ne_bytes()].concat();
    messages.push(kind, flags, &body, &Attributes::new().bytes(LOCAL, &bytes).bytes(ADDRESS, &bytes))
}

/// RTA_* of linux/rtnetlink.h.
const DESTINATION: u16 = 1;
const INTERFACE: u16 = 4;
const PREFERRED_SOURCE: u16 = 7;

impl Route {
    fn push(self, messages: &mut Messages, kind: u16, flags: u16) -> u32 {
        let (family, _, bytes) = raw(self.prefix.address);
        let scope = if self.kind == Kind::Local { SCOPE_HOST } else { SCOPE_UNIVERSE };
        // rtmsg: family, lengths of destination and source, type of service, table, protocol, scope, kind, flags.
        let body = [
            family,
            self.prefix.bits,
            0,
            0,
            TABLE_LOCAL,
            OUR_PROTOCOL,
            scope,
            self.kind.number(),
            0,
            0,
            0,
            0,
        ];
        let mut list = Attributes::new().bytes(DESTINATION, &bytes);
        if self.kind == Kind::Local {
            list = list.native(INTERFACE, LOOPBACK);
            // Otherwise a connection would come from the same address that it goes to.
            if self.prefix.address.is_ipv4() {
                list = list.bytes(PREFERRED_SOURCE, &OWN_V4.octets());
            }
        }
        messages.push(kind, flags, &body, &list)
    }

    /// Parses a route from the body of a kernel message, if the route is ours.
    fn read(body: &[u8]) -> Option<Self> {
        let (header, rest) = body.split_first_chunk::<12>()?;
        let [family, bits, _, _, table, protocol, _, kind, ..] = *header;
        if table != TABLE_LOCAL || protocol != OUR_PROTOCOL {
            return None;
        }
        let destination = attributes(rest).find_map(|(kind, value)| (kind == DESTINATION).then_some(value));
        // A default route has no destination.
        let address = match i32::from(family) {
            libc::AF_INET => {
                let octets = destination.map_or(Some([0; 4]), |value| value.try_into().ok())?;
                IpAddr::V4(Ipv4Addr::from(octets))
            }
            libc::AF_INET6 => {
                let octets = destination.map_or(Some([0; 16]), |value| value.try_into().ok())?;
                IpAddr::V6(Ipv6Addr::from(octets))
            }
            _ => return None,
        };
        Some(Self { prefix: Prefix { address, bits }, kind: Kind::from_number(kind)? })
    }
}

/// Family, length and bytes.
fn raw(address: IpAddr) -> (u8, u8, Vec<u8>) {
    match address {
        IpAddr::V4(address) => (libc::AF_INET as u8, 32, address.octets().into()),
        IpAddr::V6(address) => (libc::AF_INET6 as u8, 128, address.octets().into()),
    }
}

/// The wanted routes, or an error about them.
pub(super) fn wanted(routes: &Routes, ipv6: bool) -> Result<BTreeSet<Route>, String> {
    if routes.count() > ROUTES_MAX {
        return Err(format!("there may be {ROUTES_MAX} routes, got {}", routes.count()));
    }
    let local = |prefix| Route { prefix, kind: Kind::Local };
    let all = |address: IpAddr| local(Prefix { address, bits: 0 });
    let mut wanted = BTreeSet::from([local(POOL_V4), local(POOL_V6)]);
    match routes {
        Routes::Listed(prefixes) => wanted.extend(prefixes.iter().copied().map(local)),
        Routes::Open(holes) => {
            wanted.extend([all(Ipv4Addr::UNSPECIFIED.into()), all(Ipv6Addr::UNSPECIFIED.into())]);
            for hole in holes {
                let kind = match hole.answer {
                    HoleAnswer::Unreachable => Kind::Unreachable,
                    HoleAnswer::Prohibited => Kind::Prohibited,
                };
                // Routes that reject packets take precedence over routes to the listeners, including those for names.
                wanted.remove(&local(hole.prefix));
                wanted.insert(Route { prefix: hole.prefix, kind });
            }
        }
    }
    if let Some(wrong) = wanted.iter().find(|route| !is_prefix(route.prefix)) {
        return Err(format!("`{}` must be a network address without host bits", wrong.prefix));
    }
    wanted.retain(|route| ipv6 || route.prefix.address.is_ipv4());
    Ok(wanted)
}

/// Whether the bits after the prefix are zero.
fn is_prefix(prefix: Prefix) -> bool {
    let bits = u32::from(prefix.bits);
    match prefix.address {
        IpAddr::V4(address) => bits <= 32 && u32::from(address).checked_shl(bits).unwrap_or(0) == 0,
        IpAddr::V6(address) => bits <= 128 && u128::from(address).checked_shl(bits).unwrap_or(0) == 0,
    }
}

/// The changes from the existing to the wanted routes, ordered so that no intermediate state allows anything that
/// neither of them allows.
pub(super) fn difference(there: &BTreeSet<Route>, wanted: &BTreeSet<Route>) -> Vec<Change> {
    let split = |routes: BTreeSet<Route>| -> (Vec<Route>, Vec<Route>) {
        routes.into_iter().partition(|route| route.kind == Kind::Local)
    };
    let (local_gone, holes_gone) = split(there - wanted);
    let (local_new, holes_new) = split(wanted - there);
    // The kernel holds only one route per prefix.
    let among = |routes: &[Route], route: &Route| routes.iter().any(|other| other.prefix == route.prefix);
    let mut changes: Vec<Change> = local_gone.into_iter().map(Change::Remove).collect();
    changes.extend(holes_gone.iter().filter(|hole| among(&local_new, hole)).copied().map(Change::Remove));
    changes.extend(holes_new.iter().map(|hole| match among(&holes_gone, hole) {
        true => Change::Replace(*hole),
        false => Change::Add(*hole),
    }));
    changes.extend(local_new.iter().copied().map(Change::Add));
    let closed_anew = |hole: &Route| among(&local_new, hole) || among(&holes_new, hole);
    changes.extend(holes_gone.iter().filter(|hole| !closed_anew(hole)).copied().map(Change::Remove));
    changes
}

/// The changes that a namespace needs before it can have routes.
pub(super) fn addresses(ipv6: bool) -> Vec<Change> {
    let mut changes = vec![Change::LoopbackUp, Change::AddAddress(OWN_V4.into())];
    changes.extend(ipv6.then_some(Change::AddAddress(OWN_V6.into())));
    changes
}

/// The changes that undo [`addresses`].
pub(super) fn without_addresses(ipv6: bool) -> Vec<Change> {
    let mut changes = vec![Change::RemoveAddress(OWN_V4.into())];
    changes.extend(ipv6.then_some(Change::RemoveAddress(OWN_V6.into())));
    changes
}

/// Our routes in the namespace of the socket.
pub(super) fn there(netlink: &Netlink) -> io::Result<BTreeSet<Route>> {
    let mut request = Messages::default();
    // An rtmsg without a family lists all families.
    request.push(GET_ROUTE, DUMP, &[0; 12], &Attributes::new());
    let mut found = BTreeSet::new();
    netlink.list(&request, |kind, body| {
        if kind == NEW_ROUTE {
            found.extend(Route::read(body));
        }
    })?;
    Ok(found)
}

/// A change that failed.
#[derive(Debug)]
pub(super) struct ChangeError {
    /// As it reads after "cannot".
    pub doing: String,
    /// The error from the kernel.
    pub source: io::Error,
}

/// Makes the changes. A change that was made before is no error.
pub(super) fn apply(netlink: &Netlink, changes: &[Change]) -> Result<(), ChangeError> {
    for chunk in changes.chunks(CHUNK) {
        let mut messages = Messages::default();
        for (number, change) in chunk.iter().enumerate() {
            // The kernel always reports errors; one confirmation is enough to know that it has handled all messages.
            change.push(&mut messages, if number + 1 == chunk.len() { ACK } else { 0 });
        }
        let refused = netlink
            .send(&messages)
            .map_err(|source| ChangeError { doing: "speak to the kernel about routes".into(), source })?;
        for Refusal { number, errno } in refused {
            match chunk.get(number as usize) {
                Some(change) if change.is_done(errno) => {}
                change => {
                    let doing = change.map_or_else(|| "change routes".into(), Change::describe);
                    return Err(ChangeError { doing, source: io::Error::from_raw_os_error(errno) });
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ns::network::message::received;
    use wire::network::Hole;

    fn prefix(text: &str) -> Prefix {
        let (address, bits) = text.split_once('/').expect("a prefix");
        Prefix { address: address.parse().expect("an address"), bits: bits.parse().expect("a number") }
    }

    fn hole(text: &str) -> Hole {
        Hole { prefix: prefix(text), answer: HoleAnswer::Unreachable }
    }

    fn listed(list: &[&str]) -> BTreeSet<Route> {
        wanted(&Routes::Listed(list.iter().map(|text| prefix(text)).collect()), true).expect("routes")
    }

    fn open(holes: &[&str]) -> BTreeSet<Route> {
        wanted(&Routes::Open(holes.iter().map(|text| hole(text)).collect()), true).expect("routes")
    }

    /// Where an address leads by the longest prefix, as the kernel decides.
    fn leads(routes: &BTreeSet<Route>, address: &str) -> Option<Kind> {
        let address: IpAddr = address.parse().expect("an address");
        let within = |prefix: Prefix| match (prefix.address, address) {
            (IpAddr::V4(network), IpAddr::V4(address)) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(prefix.bits)).unwrap_or(0);
                u32::from(address) & mask == u32::from(network)
            }
            (IpAddr::V6(network), IpAddr::V6(address)) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(prefix.bits)).unwrap_or(0);
                u128::from(address) & mask == u128::from(network)
            }
            _ => false,
        };
        routes
            .iter()
            .filter(|route| within(route.prefix))
            .max_by_key(|route| route.prefix.bits)
            .map(|r| r.kind)
    }

    #[test]
    fn a_message_is_read_back_as_the_route_that_it_adds() {
        for route in listed(&["10.9.0.0/16", "2001:db8::/32"]).union(&open(&["10.0.0.0/8", "fc00::/7"])) {
            let mut messages = Messages::default();
            Change::Add(*route).push(&mut messages, 0);
            let message = received(messages.bytes()).next().expect("a message");
            assert_eq!(message.kind, NEW_ROUTE);
            assert_eq!(Route::read(message.body), Some(*route));
        }
    }

    #[test]
    fn the_bytes_of_a_local_route_are_those_that_the_kernel_documents() {
        let mut messages = Messages::default();
        let route = Route { prefix: POOL_V4, kind: Kind::Local };
        Change::Add(route).push(&mut messages, ACK);
        let expected: Vec<u8> = [
            &52_u32.to_ne_bytes()[..],
            &24_u16.to_ne_bytes(),
            // NLM_F_REQUEST, ACK, EXCL, CREATE
            &0x605_u16.to_ne_bytes(),
            &0_u32.to_ne_bytes(),
            &0_u32.to_ne_bytes(),
            // AF_INET, /15, table local, ours, scope host, RTN_LOCAL
            &[2, 15, 0, 0, 255, 83, 254, 2, 0, 0, 0, 0],
            &8_u16.to_ne_bytes(),
            &1_u16.to_ne_bytes(),
            &[198, 18, 0, 0],
            &8_u16.to_ne_bytes(),
            &4_u16.to_ne_bytes(),
            &1_u32.to_ne_bytes(),
            &8_u16.to_ne_bytes(),
            &7_u16.to_ne_bytes(),
            &[198, 18, 0, 2],
        ]
        .concat();
        assert_eq!(messages.bytes(), expected);
    }

    #[test]
    fn routes_of_others_are_not_ours() {
        let mut messages = Messages::default();
        Change::Add(Route { prefix: POOL_V4, kind: Kind::Local }).push(&mut messages, 0);
        let body = received(messages.bytes()).next().expect("a message").body.to_vec();
        assert!(Route::read(&body).is_some());
        for (at, value) in [(4, 254), (5, 2), (7, 1), (0, 7)] {
            let mut other = body.clone();
            other[at] = value;
            assert_eq!(Route::read(&other), None, "byte {at}");
        }
        assert_eq!(Route::read(&body[..8]), None);
    }

    #[test]
    fn without_ipv6_there_are_ipv4_routes_only() {
        let routes =
            wanted(&Routes::Open(vec![hole("fc00::/7"), hole("10.0.0.0/8")]), false).expect("routes");
        assert!(!routes.is_empty() && routes.iter().all(|route| route.prefix.address.is_ipv4()));
        assert!(addresses(false).iter().all(|change| !matches!(change, Change::AddAddress(IpAddr::V6(_)))));
    }

    #[test]
    fn bad_routes_are_refused_with_the_reason() {
        for (text, word) in
            [("10.0.0.1/8", "host bits"), ("10.0.0.0/33", "host bits"), ("2001::/129", "host bits")]
        {
            let refused = wanted(&Routes::Listed(vec![prefix(text)]), true).expect_err("no prefix");
            assert!(refused.contains(word) && refused.contains(text), "{refused}");
        }
        let many = Routes::Listed(vec![prefix("10.0.0.0/8"); ROUTES_MAX + 1]);
        assert!(wanted(&many, true).is_err());
    }

    #[test]
    fn a_hole_takes_names_away_too() {
        let routes = wanted(&Routes::Open(vec![hole("198.18.0.0/15")]), true).expect("routes");
        assert_eq!(leads(&routes, "198.18.1.1"), Some(Kind::Unreachable));
    }

    #[test]
    fn nothing_is_reachable_during_a_change_that_is_not_before_or_after() {
        let prohibited = Hole { answer: HoleAnswer::Prohibited, ..hole("10.0.0.0/8") };
        let prohibited = wanted(&Routes::Open(vec![prohibited]), true).expect("routes");
        let sets = [
            BTreeSet::new(),
            listed(&[]),
            listed(&["10.9.0.0/16", "2001:db8::/32"]),
            listed(&["10.0.0.0/8", "192.168.0.0/16"]),
            open(&[]),
            open(&["10.0.0.0/8", "fc00::/7"]),
            open(&["10.9.0.0/16", "2001:db8::/32", "192.168.0.0/16"]),
            prohibited,
        ];
        let probes = [
            "10.9.1.1",
            "10.8.1.1",
            "192.168.1.1",
            "8.8.8.8",
            "198.18.1.0",
            "2001:db8::1",
            "fc00::1",
            "2600::1",
        ];
        for before in &sets {
            for after in &sets {
                let mut now = before.clone();
                for change in difference(before, after) {
                    match change {
                        Change::Add(route) => {
                            let same = now.iter().any(|other| other.prefix == route.prefix);
                            assert!(!same, "the kernel refuses a second route of a prefix");
                            now.insert(route);
                        }
                        Change::Replace(route) => {
                            let before = now.len();
                            now.retain(|other| other.prefix != route.prefix);
                            assert_eq!(now.len() + 1, before);
                            now.insert(route);
                        }
                        Change::Remove(route) => assert!(now.remove(&route)),
                        other => panic!("{other:?}"),
                    }
                    for probe in probes {
                        let reached = leads(&now, probe) == Some(Kind::Local);
                        let allowed = [before, after].map(|set| leads(set, probe) == Some(Kind::Local));
                        assert!(!reached || allowed.contains(&true), "{probe} in {before:?} to {after:?}");
                    }
                }
                assert_eq!(&now, after);
                assert_eq!(difference(after, after), []);
            }
        }
    }
}
