//! Places for connections: how many may be open at once, and which is dropped when all are taken.
//!
//! A connection is a stranger until a request on it has shown a valid key. Strangers cannot keep others out: when all
//! places are taken the oldest stranger is dropped, and the number of strangers per address is limited. A connection
//! that has shown a key keeps its place.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// The most connections of one address that have shown no key. More than a browser or a pool of clients opens before
/// its first request; a proxy in front of the daemon shows keys on its connections.
pub const STRANGERS_PER_PEER_MAX: usize = 256;

/// All places.
#[derive(Debug, Clone)]
pub struct Places(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    free: Arc<Semaphore>,
    strangers: Mutex<Strangers>,
    /// How many connections have shown which key first, by its id.
    of_keys: Mutex<HashMap<String, u32>>,
}

#[derive(Debug, Default)]
struct Strangers {
    next: u64,
    /// The oldest first.
    all: BTreeMap<u64, Stranger>,
    by_peer: HashMap<IpAddr, BTreeSet<u64>>,
}

#[derive(Debug)]
struct Stranger {
    peer: IpAddr,
    leave: Leave,
}

impl Places {
    /// This many places.
    pub fn new(max: usize) -> Self {
        Self(Arc::new(Shared {
            free: Arc::new(Semaphore::new(max)),
            strangers: Mutex::default(),
            of_keys: Mutex::default(),
        }))
    }

    /// Takes a place for a connection from `peer` as soon as there is one, and returns it with the signal to leave.
    pub async fn take(&self, peer: IpAddr) -> (Place, Leave) {
        let peer = network(peer);
        self.0.strangers().make_room_for(peer);
        let permit = match self.0.free.clone().try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => {
                self.0.strangers().drop_oldest();
                self.0.free.clone().acquire_owned().await.expect("the semaphore is never closed")
            }
        };
        let leave = Leave::default();
        let serial = self.0.strangers().add(Stranger { peer, leave: leave.clone() });
        let seat = Seat {
            shared: self.0.clone(),
            serial,
            known: AtomicBool::new(false),
            key: OnceLock::new(),
            _permit: permit,
        };
        (Place(Arc::new(seat)), leave)
    }

    /// How many are free.
    pub fn free(&self) -> usize {
        self.0.free.available_permits()
    }
}

impl Shared {
    fn of_keys(&self) -> MutexGuard<'_, HashMap<String, u32>> {
        self.of_keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open_of(&self, key: &str) -> u32 {
        self.of_keys().get(key).copied().unwrap_or(0)
    }

    fn strangers(&self) -> MutexGuard<'_, Strangers> {
        // No code panics halfway through a change while it holds this lock.
        self.strangers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Strangers {
    fn add(&mut self, stranger: Stranger) -> u64 {
        let serial = self.next;
        self.next += 1;
        self.by_peer.entry(stranger.peer).or_default().insert(serial);
        self.all.insert(serial, stranger);
        serial
    }

    fn remove(&mut self, serial: u64) -> Option<Stranger> {
        let stranger = self.all.remove(&serial)?;
        if let Some(serials) = self.by_peer.get_mut(&stranger.peer) {
            serials.remove(&serial);
            if serials.is_empty() {
                self.by_peer.remove(&stranger.peer);
            }
        }
        Some(stranger)
    }

    fn drop_oldest(&mut self) {
        if let Some(serial) = self.all.keys().next().copied() {
            self.dismiss(serial);
        }
    }

    fn make_room_for(&mut self, peer: IpAddr) {
        let full = self.by_peer.get(&peer).filter(|serials| serials.len() >= STRANGERS_PER_PEER_MAX);
        if let Some(serial) = full.and_then(|serials| serials.first().copied()) {
            self.dismiss(serial);
        }
    }

    fn dismiss(&mut self, serial: u64) {
        if let Some(stranger) = self.remove(serial) {
            stranger.leave.0.notify_one();
        }
    }
}

/// One of the connections that may be open at once. Held by the connection, and by the WebSocket that it becomes.
#[derive(Debug, Clone)]
pub struct Place(Arc<Seat>);

#[derive(Debug)]
struct Seat {
    shared: Arc<Shared>,
    serial: u64,
    known: AtomicBool,
    /// The key that the connection counts for.
    key: OnceLock<String>,
    _permit: OwnedSemaphorePermit,
}

impl Place {
    /// A request on this connection has shown a valid key.
    pub fn keep(&self) {
        if !self.0.known.swap(true, Ordering::Relaxed) {
            self.0.shared.strangers().remove(self.0.serial);
        }
    }

    /// As [`Self::keep`], for a key of which at most `max` connections may be open. `false` if there are more; then the
    /// connection stays a stranger.
    pub fn keep_for(&self, key: &str, max: Option<u32>) -> bool {
        let counts_already = self.0.key.get().is_some_and(|counted| counted == key);
        if self.0.key.get().is_none() {
            let mut of_keys = self.0.shared.of_keys();
            let open = of_keys.get(key).copied().unwrap_or(0);
            if max.is_some_and(|max| open >= max) {
                return false;
            }
            // Set under the lock, so that two requests on one connection count it once.
            if self.0.key.set(key.to_owned()).is_ok() {
                of_keys.insert(key.to_owned(), open + 1);
            }
        } else if !counts_already && max.is_some_and(|max| self.0.shared.open_of(key) >= max) {
            return false;
        }
        self.keep();
        true
    }

    /// Whether [`Self::keep`] was called.
    pub fn is_known(&self) -> bool {
        self.0.known.load(Ordering::Relaxed)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Some(key) = self.key.get() {
            let mut of_keys = self.shared.of_keys();
            match of_keys.get_mut(key) {
                Some(open) if *open > 1 => *open -= 1,
                Some(_) | None => drop(of_keys.remove(key)),
            }
        }
        self.shared.strangers().remove(self.serial);
    }
}

/// The signal for a stranger to leave.
#[derive(Debug, Clone, Default)]
pub struct Leave(Arc<Notify>);

impl Leave {
    /// Returns when the place is needed. Cancel-safe.
    pub async fn asked(&self) {
        self.0.notified().await;
    }
}

/// What counts as one address: with IPv6, every client has a network of 64 bits.
fn network(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V4(v4) => v4.into(),
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX)).into(),
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn peer(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    #[tokio::test]
    async fn the_oldest_stranger_makes_room_and_nobody_else() {
        let places = Places::new(3);
        let (known, known_leaves) = places.take(peer(1)).await;
        known.keep();
        let (old, old_leaves) = places.take(peer(2)).await;
        let (_young, young_leaves) = places.take(peer(3)).await;
        let mut next = std::pin::pin!(places.take(peer(4)));
        assert!(next.as_mut().now_or_never().is_none(), "all places are taken");
        old_leaves.asked().await;
        assert!(young_leaves.asked().now_or_never().is_none());
        assert!(known_leaves.asked().now_or_never().is_none());
        drop(old);
        let (next, _) = next.await;
        assert!(!next.is_known() && known.is_known());
    }

    #[tokio::test]
    async fn a_key_has_so_many_connections() {
        let places = Places::new(10);
        let (first, _) = places.take(peer(1)).await;
        let (second, _) = places.take(peer(1)).await;
        assert!(
            first.keep_for("bob", Some(1)) && first.keep_for("bob", Some(1)),
            "many requests, one connection"
        );
        assert!(!second.keep_for("bob", Some(1)) && !second.is_known());
        assert!(second.keep_for("alice", Some(1)), "another key");
        drop(first);
        let (third, _) = places.take(peer(1)).await;
        assert!(third.keep_for("bob", Some(1)), "the other has left");
    }

    #[tokio::test]
    async fn one_address_has_so_many_strangers() {
        let places = Places::new(10 * STRANGERS_PER_PEER_MAX);
        let mut taken = Vec::new();
        for _ in 0..STRANGERS_PER_PEER_MAX {
            taken.push(places.take(peer(1)).await);
        }
        let (_, other_leaves) = places.take(peer(2)).await;
        assert!(taken[0].1.asked().now_or_never().is_none());
        taken.push(places.take(peer(1)).await);
        taken[0].1.asked().await;
        assert!(taken[1].1.asked().now_or_never().is_none());
        assert!(other_leaves.asked().now_or_never().is_none());
        // Connections that have shown a key do not count.
        let places = Places::new(10 * STRANGERS_PER_PEER_MAX);
        let (first, first_leaves) = places.take(peer(1)).await;
        first.keep();
        let mut others = Vec::new();
        for _ in 0..STRANGERS_PER_PEER_MAX {
            others.push(places.take(peer(1)).await);
        }
        assert!(first_leaves.asked().now_or_never().is_none());
        assert!(others[0].1.asked().now_or_never().is_none());
    }

    #[tokio::test]
    async fn a_place_is_free_again_and_forgotten_when_its_connection_ends() {
        let places = Places::new(1);
        drop(places.take(peer(1)).await);
        assert_eq!(places.free(), 1);
        let strangers = places.0.strangers();
        assert!(strangers.all.is_empty() && strangers.by_peer.is_empty());
    }

    #[test]
    fn a_network_of_ipv6_is_one_address() {
        let parse = |text: &str| network(text.parse().expect("an address"));
        assert_eq!(parse("2001:db8::1"), parse("2001:db8::ffff:0:0:2"));
        assert_ne!(parse("2001:db8:0:1::1"), parse("2001:db8:0:2::1"));
        assert_eq!(parse("::ffff:192.0.2.1"), peer(1));
    }
}
