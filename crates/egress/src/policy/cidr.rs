//! Blocks of addresses.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A block of addresses. Bits beyond the prefix are zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Cidr {
    address: IpAddr,
    length: u8,
}

/// Why a text is not a block of addresses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadCidr {
    /// Not an address, or not followed by a length.
    #[error("a block of addresses must look like 192.0.2.0/24 or 2001:db8::/32, got `{0}`")]
    Shape(String),
    /// The prefix is longer than the address.
    #[error("the prefix of `{0}` is longer than its address")]
    Length(String),
    /// Bits beyond the prefix are set, which is probably a mistake.
    #[error(
        "`{given}` has bits set beyond its prefix: write {meant} for the block, or {address} for the one address"
    )]
    HostBits {
        /// As written.
        given: String,
        /// The block that contains it.
        meant: String,
        /// The address alone.
        address: IpAddr,
    },
    /// An IPv4 address in IPv6 notation.
    #[error("`{0}` is an IPv4 address written as IPv6: write it as IPv4")]
    Mapped(String),
}

impl Cidr {
    /// The one address.
    pub fn host(address: IpAddr) -> Self {
        Self { address, length: bits(address) }
    }

    /// A block from one of our tables; bits beyond the prefix are dropped.
    pub const fn v4(a: u8, b: u8, c: u8, d: u8, length: u8) -> Self {
        Self { address: IpAddr::V4(Ipv4Addr::new(a, b, c, d)), length }
    }

    /// A block from one of our tables.
    pub const fn v6(address: Ipv6Addr, length: u8) -> Self {
        Self { address: IpAddr::V6(address), length }
    }

    /// The first address.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// How many bits are fixed.
    pub fn length(&self) -> u8 {
        self.length
    }

    /// Whether it is one address.
    pub fn is_host(&self) -> bool {
        self.length == bits(self.address)
    }

    /// Whether `address` lies in it. Families never mix.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.address.is_ipv4() == address.is_ipv4() && masked(address, self.length) == number(self.address)
    }

    /// Whether all of `other` lies in it.
    pub fn covers(&self, other: &Cidr) -> bool {
        other.length >= self.length && self.contains(other.address)
    }
}

/// How many bits addresses of this family have.
pub(super) fn bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits(),
    }
}

/// The first `length` bits of an address, the others zero.
pub(super) fn masked(address: IpAddr, length: u8) -> u128 {
    let free = u32::from(bits(address) - length);
    number(address) & u128::MAX.checked_shl(free).unwrap_or(0)
}

impl FromStr for Cidr {
    type Err = BadCidr;

    fn from_str(text: &str) -> Result<Self, BadCidr> {
        let shape = || BadCidr::Shape(text.chars().take(80).collect());
        let (address, length) = match text.split_once('/') {
            Some((address, length)) => {
                let plain =
                    !length.is_empty() && length.len() <= 3 && length.bytes().all(|b| b.is_ascii_digit());
                (address, Some(length.parse::<u8>().ok().filter(|_| plain).ok_or_else(shape)?))
            }
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| shape())?;
        if let IpAddr::V6(v6) = address
            && v6.to_ipv4_mapped().is_some()
        {
            return Err(BadCidr::Mapped(text.to_owned()));
        }
        let length = length.unwrap_or(bits(address));
        if length > bits(address) {
            return Err(BadCidr::Length(text.to_owned()));
        }
        let network = masked(address, length);
        if network != number(address) {
            let first = match address {
                IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::from_bits(network as u32)),
                IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::from_bits(network)),
            };
            return Err(BadCidr::HostBits {
                given: text.to_owned(),
                meant: format!("{first}/{length}"),
                address,
            });
        }
        Ok(Self { address, length })
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.length)
    }
}

impl fmt::Debug for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl TryFrom<String> for Cidr {
    type Error = BadCidr;

    fn try_from(text: String) -> Result<Self, BadCidr> {
        text.parse()
    }
}

impl From<Cidr> for String {
    fn from(block: Cidr) -> Self {
        block.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_read_and_written() {
        for text in ["10.0.0.0/8", "0.0.0.0/0", "::/0", "2001:db8::/32", "192.0.2.1/32", "::1/128"] {
            assert_eq!(text.parse::<Cidr>().expect("a block").to_string(), text);
        }
        assert_eq!("10.1.2.3".parse::<Cidr>().expect("a block").to_string(), "10.1.2.3/32");
    }

    #[test]
    fn what_is_no_block_is_refused() {
        for text in [
            "",
            "10.0.0.0/33",
            "10.0.0.0/",
            "10.0.0.0/+8",
            "10.0.0/8",
            "::/129",
            "a/8",
            "010.0.0.0/8",
            "10.0.0.0/8/8",
        ] {
            assert!(text.parse::<Cidr>().is_err(), "{text}");
        }
        assert!(matches!("10.1.2.3/8".parse::<Cidr>(), Err(BadCidr::HostBits { .. })));
        assert!(matches!("::ffff:10.0.0.1".parse::<Cidr>(), Err(BadCidr::Mapped(_))));
    }

    proptest::proptest! {
        #[test]
        fn a_block_contains_its_own_addresses_and_no_family_mixes(a: u32, length in 0u8..=32) {
            let address = IpAddr::V4(Ipv4Addr::from_bits(a));
            let block = Cidr { address: IpAddr::V4(Ipv4Addr::from_bits(masked(address, length) as u32)), length };
            proptest::prop_assert!(block.contains(address));
            proptest::prop_assert!(block.covers(&Cidr::host(address)));
            proptest::prop_assert!(!block.contains(IpAddr::V6(Ipv6Addr::from_bits(u128::from(a)))));
            proptest::prop_assert_eq!(block.to_string().parse::<Cidr>(), Ok(block));
        }
    }
}
