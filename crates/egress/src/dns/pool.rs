//! Synthetic addresses: each name that a sandbox may use gets its own address in both families.
//!
//! They are in the benchmark range 198.18.0.0/15 and in the discard prefix 100:0:0:1::/64, which no network routes. A
//! name's place in the list determines its address; the list only grows, so that an address means one name for all of a
//! sandbox's life.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use crate::policy::Name;

/// The first address that belongs to a name; Shoal itself uses those below.
const FIRST: u32 = 256;
/// The most names of one sandbox. Beyond this, new names are refused; no address is reused.
pub const NAMES_MAX: usize = 100_000;

/// Where synthetic addresses lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pool {
    /// The first IPv4 address of the pool, which has 131,072.
    pub v4: Ipv4Addr,
    /// The first IPv6 address of the pool.
    pub v6: Ipv6Addr,
}

impl Default for Pool {
    fn default() -> Self {
        Self { v4: Ipv4Addr::new(198, 18, 0, 0), v6: Ipv6Addr::new(0x100, 0, 0, 1, 0, 0, 0, 0) }
    }
}

/// What an address of the pool means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// The resolver: `.1`.
    Resolver,
    /// The sandbox's own address: `.2`.
    Own,
    /// The address of names that policy refuses: `.3`.
    Refused,
    /// The place of a name in the list.
    Name(u32),
    /// In the pool, but unused.
    Nothing,
    /// Not in the pool.
    Outside,
}

impl Pool {
    /// What an address means.
    pub fn meaning(&self, address: IpAddr) -> Meaning {
        let offset = match address.to_canonical() {
            IpAddr::V4(v4) => v4.to_bits().checked_sub(self.v4.to_bits()).filter(|offset| *offset < 1 << 17),
            IpAddr::V6(v6) => {
                let offset = v6.to_bits().checked_sub(self.v6.to_bits()).filter(|offset| *offset < 1 << 64);
                // An offset beyond the places of names is unused, but still in the pool.
                offset.map(|offset| u32::try_from(offset).unwrap_or(u32::MAX))
            }
        };
        match offset {
            None => Meaning::Outside,
            Some(1) => Meaning::Resolver,
            Some(2) => Meaning::Own,
            Some(3) => Meaning::Refused,
            Some(offset) if offset >= FIRST && offset - FIRST < NAMES_MAX as u32 => {
                Meaning::Name(offset - FIRST)
            }
            Some(_) => Meaning::Nothing,
        }
    }

    /// The addresses of the name at a place.
    pub fn of_name(&self, place: u32) -> (Ipv4Addr, Ipv6Addr) {
        self.at(FIRST + place)
    }

    /// The addresses of refused names.
    pub fn refused(&self) -> (Ipv4Addr, Ipv6Addr) {
        self.at(3)
    }

    /// The addresses of the resolver.
    pub fn resolver(&self) -> (Ipv4Addr, Ipv6Addr) {
        self.at(1)
    }

    fn at(&self, offset: u32) -> (Ipv4Addr, Ipv6Addr) {
        (
            Ipv4Addr::from_bits(self.v4.to_bits().wrapping_add(offset)),
            Ipv6Addr::from_bits(self.v6.to_bits().wrapping_add(u128::from(offset))),
        )
    }
}

/// The names of one sandbox, each at its place. Only grows.
#[derive(Debug, Clone, Default)]
pub struct Names {
    list: Vec<Name>,
    places: HashMap<Name, u32>,
}

impl Names {
    /// The names that a sandbox had before, in their order.
    pub fn from_list(list: Vec<Name>) -> Self {
        let mut names = Self::default();
        for name in list {
            let place = names.list.len() as u32;
            // A name that is in the list twice keeps both addresses; answers use the first.
            names.places.entry(name.clone()).or_insert(place);
            names.list.push(name);
        }
        names
    }

    /// The place of a name.
    pub fn place(&self, name: &Name) -> Option<u32> {
        self.places.get(name.as_str()).copied()
    }

    /// The name at a place.
    pub fn at(&self, place: u32) -> Option<&Name> {
        self.list.get(place as usize)
    }

    /// Adds a name at the end. `None` when the pool is full.
    pub fn add(&mut self, name: Name) -> Option<u32> {
        if let Some(place) = self.place(&name) {
            return Some(place);
        }
        if self.list.len() >= NAMES_MAX {
            return None;
        }
        let place = self.list.len() as u32;
        self.places.insert(name.clone(), place);
        self.list.push(name);
        Some(place)
    }

    /// All names, in order.
    pub fn list(&self) -> &[Name] {
        &self.list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_lead_back_to_their_places() {
        let pool = Pool::default();
        for place in [0, 1, 255, NAMES_MAX as u32 - 1] {
            let (v4, v6) = pool.of_name(place);
            assert_eq!(pool.meaning(v4.into()), Meaning::Name(place));
            assert_eq!(pool.meaning(v6.into()), Meaning::Name(place));
        }
        assert_eq!(pool.of_name(0), (Ipv4Addr::new(198, 18, 1, 0), "100:0:0:1::100".parse().expect("v6")));
        assert_eq!(pool.refused().0, Ipv4Addr::new(198, 18, 0, 3));
        assert_eq!(pool.meaning("198.18.0.1".parse().expect("v4")), Meaning::Resolver);
        assert_eq!(pool.meaning("198.20.0.0".parse().expect("v4")), Meaning::Outside);
        assert_eq!(pool.meaning("198.17.255.255".parse().expect("v4")), Meaning::Outside);
        assert_eq!(pool.meaning("100:0:0:1:ffff::".parse().expect("v6")), Meaning::Nothing);
        assert_eq!(pool.meaning("100:0:0:2::".parse().expect("v6")), Meaning::Outside);
        assert_eq!(pool.meaning("198.19.255.255".parse().expect("v4")), Meaning::Nothing);
    }

    #[test]
    fn a_name_keeps_its_place() {
        let name = |text: &str| Name::parse(text).expect("a name");
        let mut names = Names::from_list(vec![name("a.example"), name("b.example")]);
        assert_eq!(names.add(name("c.example")), Some(2));
        assert_eq!(names.add(name("a.example")), Some(0));
        assert_eq!(names.at(1), Some(&name("b.example")));
        assert_eq!(names.list().len(), 3);
    }
}
