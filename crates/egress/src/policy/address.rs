//! Addresses that are closed, whatever a policy says about names: the only protection of the host's own network from a
//! sandbox.
//!
//! Egress dials from the host's network, so every address is checked at the moment it is dialled, after resolution.
//! Dangerous addresses are closed; merely unusual ones (documentation ranges, for example) are not.

use std::net::{IpAddr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use super::Cidr;

/// Why an address is closed unless a rule names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Class {
    /// 0.0.0.0/8 and `::`, which reach the machine itself.
    Unspecified,
    /// 127.0.0.0/8 and `::1`.
    Loopback,
    /// An address of this machine.
    Own,
    /// An address where clouds hand out credentials and configuration.
    Metadata,
    /// 169.254.0.0/16 and fe80::/10.
    LinkLocal,
    /// RFC 1918 and unique local addresses.
    Private,
    /// 100.64.0.0/10, shared by carriers and clouds.
    Shared,
    /// Multicast and broadcast.
    Multicast,
    /// An IPv6 address that carries an IPv4 address for a translator: NAT64, 6to4, Teredo, ISATAP, IPv4-compatible.
    Translated,
    /// Reserved, or used by Shoal inside sandboxes.
    Reserved,
    /// On the operator's list.
    Operator,
}

/// How precisely a rule must name an address of a class to open it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Opens {
    /// No rule can open it.
    Never,
    /// A rule for exactly this address.
    ByAddress,
    /// A rule for a block that lies within the closed block.
    ByBlock,
}

impl Class {
    /// The text for events and errors.
    pub fn words(self) -> &'static str {
        match self {
            Self::Unspecified => "an unspecified address",
            Self::Loopback => "a loopback address",
            Self::Own => "an address of the host itself",
            Self::Metadata => "a metadata service",
            Self::LinkLocal => "a link-local address",
            Self::Private => "a private address",
            Self::Shared => "a shared (carrier-grade NAT) address",
            Self::Multicast => "a multicast or broadcast address",
            Self::Translated => "an IPv6 address that stands for an IPv4 address",
            Self::Reserved => "a reserved address",
            Self::Operator => "an address that the operator closed",
        }
    }

    fn opens(self) -> Opens {
        match self {
            Self::Unspecified | Self::Multicast | Self::Translated | Self::Reserved => Opens::Never,
            Self::Loopback | Self::Own | Self::Metadata | Self::LinkLocal => Opens::ByAddress,
            Self::Private | Self::Shared | Self::Operator => Opens::ByBlock,
        }
    }
}

const fn ip6(segments: [u16; 8]) -> Ipv6Addr {
    let [a, b, c, d, e, f, g, h] = segments;
    Ipv6Addr::new(a, b, c, d, e, f, g, h)
}

/// The closed blocks. The first that contains an address decides, so single addresses come before the blocks around
/// them.
const TABLE: &[(Cidr, Class)] = &[
    (Cidr::v4(169, 254, 169, 254, 32), Class::Metadata),
    (Cidr::v4(169, 254, 170, 2, 32), Class::Metadata),
    (Cidr::v4(169, 254, 170, 23, 32), Class::Metadata),
    (Cidr::v4(100, 100, 100, 200, 32), Class::Metadata),
    (Cidr::v4(168, 63, 129, 16, 32), Class::Metadata),
    (Cidr::v4(192, 0, 0, 192, 32), Class::Metadata),
    (Cidr::v6(ip6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254]), 128), Class::Metadata),
    (Cidr::v6(ip6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23]), 128), Class::Metadata),
    (Cidr::v6(ip6([0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254]), 128), Class::Metadata),
    (Cidr::v4(0, 0, 0, 0, 8), Class::Unspecified),
    (Cidr::v4(127, 0, 0, 0, 8), Class::Loopback),
    (Cidr::v4(169, 254, 0, 0, 16), Class::LinkLocal),
    (Cidr::v4(10, 0, 0, 0, 8), Class::Private),
    (Cidr::v4(172, 16, 0, 0, 12), Class::Private),
    (Cidr::v4(192, 168, 0, 0, 16), Class::Private),
    (Cidr::v4(100, 64, 0, 0, 10), Class::Shared),
    (Cidr::v4(224, 0, 0, 0, 4), Class::Multicast),
    (Cidr::v4(255, 255, 255, 255, 32), Class::Multicast),
    (Cidr::v4(240, 0, 0, 0, 4), Class::Reserved),
    // Protocol assignments, the old 6to4 relays, and the benchmark range, which contains the synthetic addresses.
    (Cidr::v4(192, 0, 0, 0, 24), Class::Reserved),
    (Cidr::v4(192, 88, 99, 0, 24), Class::Reserved),
    (Cidr::v4(198, 18, 0, 0, 15), Class::Reserved),
    (Cidr::v6(ip6([0, 0, 0, 0, 0, 0, 0, 0]), 128), Class::Unspecified),
    (Cidr::v6(ip6([0, 0, 0, 0, 0, 0, 0, 1]), 128), Class::Loopback),
    // IPv4-compatible, after the two above.
    (Cidr::v6(ip6([0, 0, 0, 0, 0, 0, 0, 0]), 96), Class::Translated),
    (Cidr::v6(ip6([0, 0, 0, 0, 0xffff, 0, 0, 0]), 96), Class::Translated),
    (Cidr::v6(ip6([0x64, 0xff9b, 0, 0, 0, 0, 0, 0]), 32), Class::Translated),
    (Cidr::v6(ip6([0x2002, 0, 0, 0, 0, 0, 0, 0]), 16), Class::Translated),
    (Cidr::v6(ip6([0x2001, 0, 0, 0, 0, 0, 0, 0]), 32), Class::Translated),
    // Discard-only and ours, dummy prefixes, site-local.
    (Cidr::v6(ip6([0x100, 0, 0, 0, 0, 0, 0, 0]), 32), Class::Reserved),
    (Cidr::v6(ip6([0xfe80, 0, 0, 0, 0, 0, 0, 0]), 10), Class::LinkLocal),
    (Cidr::v6(ip6([0xfec0, 0, 0, 0, 0, 0, 0, 0]), 10), Class::Private),
    (Cidr::v6(ip6([0xfc00, 0, 0, 0, 0, 0, 0, 0]), 7), Class::Private),
    (Cidr::v6(ip6([0xff00, 0, 0, 0, 0, 0, 0, 0]), 8), Class::Multicast),
];

/// What the table cannot know by itself: this machine's addresses, and the operator's settings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Addresses {
    /// The addresses of this machine's interfaces.
    pub own: Vec<IpAddr>,
    /// Blocks that the operator closes in addition.
    pub closed: Vec<Cidr>,
    /// Blocks that the operator treats as public although the table closes them: a company's own range under `open`, for example.
    pub opened: Vec<Cidr>,
}

/// Why an address must not be dialled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{address} is {}", class.words())]
pub struct Closed {
    /// The address.
    pub address: IpAddr,
    /// Its class.
    pub class: Class,
}

impl Addresses {
    /// The class of an address, or `None` for a public one. An IPv4-mapped address has the class of the address that it
    /// maps.
    pub fn class(&self, address: IpAddr) -> Option<Class> {
        let address = address.to_canonical();
        // The machine's own addresses come first, so that no list of the operator opens them by accident.
        if self.own.contains(&address) && !address.is_loopback() {
            return Some(Class::Own);
        }
        if self.opened.iter().any(|block| block.contains(address)) {
            return None;
        }
        if let Some((_, class)) = TABLE.iter().find(|(block, _)| block.contains(address)) {
            return Some(*class);
        }
        if let IpAddr::V6(v6) = address
            && is_isatap(v6)
        {
            return Some(Class::Translated);
        }
        self.closed.iter().any(|block| block.contains(address)).then_some(Class::Operator)
    }

    /// Whether an address may be dialled, given the blocks and the name that the policy's own allow rules state for it.
    ///
    /// A public address may. A closed one may only if a rule names it exactly: private and shared addresses by a block
    /// within the closed block, or by a host rule that is marked `private`; loopback, link-local, metadata and own
    /// addresses only by a rule for the single address. All others may never be dialled.
    pub fn may_dial(&self, address: IpAddr, named: Named<'_>) -> Result<(), Closed> {
        let address = address.to_canonical();
        let Some(class) = self.class(address) else { return Ok(()) };
        let open = match class.opens() {
            Opens::Never => false,
            Opens::ByAddress => named.blocks.iter().any(|block| block.is_host() && block.contains(address)),
            Opens::ByBlock => {
                named.private_host
                    || named
                        .blocks
                        .iter()
                        .any(|block| block.contains(address) && self.is_within_closed(block, class))
            }
        };
        if open { Ok(()) } else { Err(Closed { address, class }) }
    }

    /// Whether a rule's block lies within one closed block of this class, so that it was written with that block in mind:
    /// `10.9.0.0/16` opens what it covers, `0.0.0.0/0` opens no private address.
    fn is_within_closed(&self, block: &Cidr, class: Class) -> bool {
        TABLE.iter().any(|(closed, of)| *of == class && closed.covers(block))
            || (class == Class::Operator && self.closed.iter().any(|closed| closed.covers(block)))
    }
}

/// What the allow rules of a policy state about an address.
#[derive(Debug, Clone, Copy, Default)]
pub struct Named<'a> {
    /// The blocks of allow rules that contain it, for the port in question.
    pub blocks: &'a [Cidr],
    /// Whether the connection's name is allowed by a rule that is marked `private`.
    pub private_host: bool,
}

/// The interface id of ISATAP: `0000:5efe` or `0200:5efe`, then an IPv4 address.
fn is_isatap(address: Ipv6Addr) -> bool {
    let segments = address.segments();
    (segments[4] & 0xfdff) == 0 && segments[5] == 0x5efe
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn here() -> Addresses {
        Addresses { own: vec![ip("203.0.113.9"), ip("2001:db8::9")], ..Addresses::default() }
    }

    #[test]
    fn every_dangerous_address_is_closed() {
        for (text, class) in [
            ("0.0.0.0", Class::Unspecified),
            ("0.1.2.3", Class::Unspecified),
            ("::", Class::Unspecified),
            ("127.0.0.1", Class::Loopback),
            ("127.255.0.9", Class::Loopback),
            ("::1", Class::Loopback),
            ("::ffff:127.0.0.1", Class::Loopback),
            ("10.1.2.3", Class::Private),
            ("172.31.255.255", Class::Private),
            ("192.168.0.1", Class::Private),
            ("::ffff:192.168.0.1", Class::Private),
            ("fd12:3456::1", Class::Private),
            ("fec0::1", Class::Private),
            ("100.64.0.1", Class::Shared),
            ("169.254.1.1", Class::LinkLocal),
            ("fe80::1", Class::LinkLocal),
            ("169.254.169.254", Class::Metadata),
            ("::ffff:169.254.169.254", Class::Metadata),
            ("fd00:ec2::254", Class::Metadata),
            ("100.100.100.200", Class::Metadata),
            ("168.63.129.16", Class::Metadata),
            ("224.0.0.251", Class::Multicast),
            ("255.255.255.255", Class::Multicast),
            ("ff02::fb", Class::Multicast),
            ("64:ff9b::a9fe:a9fe", Class::Translated),
            ("64:ff9b:1::a00:1", Class::Translated),
            ("2002:a00:1::", Class::Translated),
            ("2001::1", Class::Translated),
            ("::10.0.0.1", Class::Translated),
            ("2001:db8::5efe:a00:1", Class::Translated),
            ("2001:db8::200:5efe:a00:1", Class::Translated),
            ("198.18.1.0", Class::Reserved),
            ("100:0:0:1::100", Class::Reserved),
            ("240.0.0.1", Class::Reserved),
            ("203.0.113.9", Class::Own),
            ("2001:db8::9", Class::Own),
            ("::ffff:203.0.113.9", Class::Own),
        ] {
            assert_eq!(here().class(ip(text)), Some(class), "{text}");
            assert!(here().may_dial(ip(text), Named::default()).is_err(), "{text}");
        }
    }

    #[test]
    fn public_and_merely_odd_addresses_are_open() {
        for text in [
            "8.8.8.8",
            "203.0.113.10",
            "192.0.2.1",
            "198.51.100.1",
            "2606:4700::1",
            "2001:db8::1",
            "172.32.0.1",
        ] {
            assert_eq!(here().class(ip(text)), None, "{text}");
        }
    }

    #[track_caller]
    fn check(address: &str, block: &str, opens: bool) {
        let blocks = [block.parse().expect("a block")];
        let named = Named { blocks: &blocks, private_host: false };
        assert_eq!(here().may_dial(ip(address), named).is_ok(), opens, "{block} for {address}");
    }

    #[test]
    fn a_closed_address_opens_only_when_a_rule_names_it_exactly() {
        check("10.9.1.1", "10.9.0.0/16", true);
        check("10.9.1.1", "10.0.0.0/8", true);
        check("10.8.1.1", "10.9.0.0/16", false);
        check("10.9.1.1", "0.0.0.0/0", false);
        check("10.9.1.1", "8.0.0.0/5", false);
        check("fd12::1", "fd12::/16", true);
        check("fd12::1", "::/0", false);
        check("127.0.0.1", "127.0.0.1/32", true);
        check("127.0.0.1", "127.0.0.0/8", false);
        check("169.254.169.254", "169.254.0.0/16", false);
        check("169.254.169.254", "169.254.169.254/32", true);
        check("203.0.113.9", "203.0.113.0/24", false);
        check("203.0.113.9", "203.0.113.9/32", true);
        check("0.0.0.0", "0.0.0.0/32", false);
        check("64:ff9b::a9fe:a9fe", "64:ff9b::a9fe:a9fe/128", false);
        check("224.0.0.1", "224.0.0.1/32", false);
        check("::ffff:10.9.1.1", "10.9.0.0/16", true);
    }

    #[test]
    fn a_private_host_opens_private_addresses_and_no_others() {
        let named = Named { blocks: &[], private_host: true };
        assert!(here().may_dial(ip("10.0.0.1"), named).is_ok());
        assert!(here().may_dial(ip("fd12::1"), named).is_ok());
        for text in
            ["127.0.0.1", "169.254.169.254", "fd00:ec2::254", "203.0.113.9", "0.0.0.0", "::ffff:127.0.0.1"]
        {
            assert!(here().may_dial(ip(text), named).is_err(), "{text}");
        }
    }

    #[test]
    fn the_operator_closes_and_opens_blocks() {
        let mut here = here();
        here.closed = vec!["198.51.100.0/24".parse().expect("a block")];
        here.opened =
            vec!["10.7.0.0/16".parse().expect("a block"), "203.0.113.0/24".parse().expect("a block")];
        assert_eq!(here.class(ip("198.51.100.7")), Some(Class::Operator));
        assert_eq!(here.class(ip("10.7.0.1")), None);
        assert_eq!(here.class(ip("203.0.113.9")), Some(Class::Own), "an own address stays closed");
    }

    proptest! {
        #[test]
        fn mapped_addresses_are_what_they_map(bits: u32) {
            let v4 = Ipv4Addr::from_bits(bits);
            let mapped = IpAddr::V6(v4.to_ipv6_mapped());
            prop_assert_eq!(here().class(IpAddr::V4(v4)), here().class(mapped));
        }

        #[test]
        fn a_block_around_everything_opens_nothing_that_is_closed(bits: u128, four: bool) {
            let (address, block) = if four {
                (IpAddr::V4(Ipv4Addr::from_bits(bits as u32)), Cidr::v4(0, 0, 0, 0, 0))
            } else {
                (IpAddr::V6(Ipv6Addr::from_bits(bits)), Cidr::v6(Ipv6Addr::UNSPECIFIED, 0))
            };
            let named = Named { blocks: &[block], private_host: false };
            prop_assert_eq!(here().may_dial(address, named).is_ok(), here().class(address).is_none());
        }

        #[test]
        fn no_ipv4_address_is_reached_through_a_translator(bits: u32, which in 0usize..4) {
            let v4 = Ipv4Addr::from_bits(bits);
            let [a, b, c, d] = v4.octets();
            let (high, low) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
            let address = [
                ip6([0x64, 0xff9b, 0, 0, 0, 0, high, low]),
                ip6([0x2002, high, low, 0, 0, 0, 0, 1]),
                ip6([0, 0, 0, 0, 0xffff, 0, high, low]),
                ip6([0x2001, 0, high, low, 0, 0, 0, 0]),
            ][which];
            let blocks = [Cidr::host(IpAddr::V6(address))];
            let named = Named { blocks: &blocks, private_host: true };
            prop_assert!(here().may_dial(IpAddr::V6(address), named).is_err());
        }
    }
}
