//! The messages between daemon and egress.
//!
//! Each packet on a seqpacket socket holds one message, encoded with postcard. [`Ask::Hello`], [`Ask::Listeners`] and
//! [`Ask::Drain`] with their answers never change, so that a daemon can replace an egress of any other version.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use wire::{InstallationId, SandboxId};

use crate::credential::Credential;
use crate::dial::{Bind, Proxy};
use crate::dns::{Pool, Upstream};
use crate::limits::Limits;
use crate::policy::{Addresses, Name, Protocol, Ruleset};

/// The version of these types.
pub const VERSION: u32 = 2;
/// The most listeners of one sandbox: two families of TCP and UDP, and room for more.
pub const LISTENERS_MAX: usize = 16;

/// The first packet to a new egress, on the socket that it inherits as its standard input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// The daemon's version of these types.
    pub version: u32,
    /// The installation of this egress; part of the authority's name.
    pub installation: InstallationId,
    /// Egress's own directory, which belongs to `uid` and which no other user can read.
    pub directory: String,
    /// The user to switch to. `None` to keep the current user, for example without root.
    pub identity: Option<Identity>,
    /// The user that may connect to the socket in the directory, besides root: the daemon's.
    pub daemon_uid: u32,
    /// Worker threads.
    pub threads: u16,
    /// The operator's settings.
    pub settings: Settings,
}

/// A user of the system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// What the operator sets for all sandboxes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// The resolvers to use.
    pub upstream: Upstream,
    /// An upstream proxy.
    pub proxy: Option<Proxy>,
    /// Local addresses to dial from.
    pub bind: Bind,
    /// Closed and opened blocks. `own` is read from the kernel.
    pub addresses: Addresses,
    /// Where synthetic addresses lie.
    pub pool: Pool,
    /// Extra roots for egress's own connections, in PEM.
    pub extra_roots: Vec<String>,
}

/// A request from the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Returned in the answer.
    pub serial: u64,
    /// The request itself.
    pub ask: Ask,
}

/// The requests of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// The first request on a connection. Never changes.
    Hello {
        /// The daemon's version of these types.
        version: u32,
    },
    /// Returns the listeners of a sandbox, for a daemon that has no copies. The answer carries descriptors. Never
    /// changes.
    Listeners {
        /// Which one.
        sandbox: SandboxId,
    },
    /// Stop accepting, let open connections end, and exit. Never changes.
    Drain {
        /// After this long, cut the remaining connections.
        seconds: u32,
    },
    /// Serve a sandbox. The packet carries its listeners as descriptors, in the order of `listeners`. If the sandbox is
    /// attached already, it gets the new state, and its old listeners are closed.
    Attach(Box<Attach>),
    /// Replace a policy. Connections that lose their rule are cut before the answer.
    SetPolicy {
        /// Which sandbox.
        sandbox: SandboxId,
        /// The new rules.
        rules: Box<Ruleset>,
    },
    /// Replace limits.
    SetLimits {
        /// Which sandbox.
        sandbox: SandboxId,
        /// The new limits.
        limits: Limits,
    },
    /// Stop serving a sandbox. The answer is sent when egress holds nothing of it any more, so that its namespace can
    /// be removed. Harmless if it is not attached.
    Detach {
        /// Which one.
        sandbox: SandboxId,
    },
    /// Records up to this sequence number are stored. Not answered.
    Acknowledge {
        /// The last of them.
        through: u64,
    },
    /// Request the status of egress.
    Status,
    /// Replace the credentials that a sandbox may use. The next request gets the new ones, on open connections too.
    SetCredentials {
        /// Which sandbox.
        sandbox: SandboxId,
        /// All of them.
        credentials: Vec<Credential>,
    },
}

/// A sandbox to serve.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    /// Which one.
    pub sandbox: SandboxId,
    /// What each descriptor is.
    pub listeners: Vec<Listener>,
    /// What it may reach.
    pub rules: Ruleset,
    /// The names that it has looked up, each at its place.
    pub names: Vec<Name>,
    /// What it may use.
    pub limits: Limits,
    /// Its owner, for limits that all of an owner's sandboxes share.
    pub owner: Option<OwnerLimits>,
    /// What it may send without holding it.
    pub credentials: Vec<Credential>,
}

/// Limits of an owner. The latest ones apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerLimits {
    /// A number for the owner, chosen by the daemon.
    pub owner: u64,
    /// What all of its sandboxes together may use.
    pub limits: Limits,
}

/// A listener in a sandbox's network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Listener {
    /// Connections; the local address of each is the guest's destination.
    Tcp,
    /// DNS questions.
    Udp,
}

/// A message from egress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromEgress {
    /// The answer to [`Start`].
    Started(Result<Started, Failure>),
    /// The answer to a request.
    Answer {
        /// The serial of the request.
        serial: u64,
        /// The result of the request.
        result: Result<Answer, Failure>,
    },
    /// A record that the daemon must store and acknowledge. Sent again on the next connection until it is, so the same
    /// record may arrive twice.
    Record {
        /// Increases by one from record to record.
        sequence: u64,
        /// What it is.
        record: Record,
    },
}

/// The first answer of a new egress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    /// Its version of these types.
    pub version: u32,
    /// The authority that sandboxes should trust, in PEM.
    pub ca_pem: String,
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("egress: {what}")]
pub struct Failure {
    /// The reason as text.
    pub what: String,
}

/// The result of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// Never changes.
    Hello {
        /// Egress's version of these types. If it differs, egress only answers the requests that never change.
        version: u32,
        /// The sandboxes that it serves.
        attached: Vec<SandboxId>,
    },
    /// The packet carries descriptors. Never changes.
    Listeners(Vec<Listener>),
    /// Done.
    Done,
    /// Egress holds nothing of the sandbox any more.
    Detached(Totals),
    /// The status of egress.
    Status(Status),
}

/// The status of egress.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Sandboxes that it serves.
    pub sandboxes: u32,
    /// Connections that are open.
    pub connections: u32,
    /// Records that wait for the daemon.
    pub waiting_records: u64,
    /// Their size on disk, in bytes.
    pub spool_bytes: u64,
    /// Events that were dropped because there was no room, since the start.
    pub lost_events: u64,
    /// The authority that sandboxes should trust, in PEM.
    pub ca_pem: String,
    /// What each sandbox has used.
    pub totals: Vec<Totals>,
}

/// A record that the daemon must store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record {
    /// A name was assigned a place. Its address is returned to the guest only after this record was acknowledged or
    /// spooled.
    Name {
        /// Which sandbox.
        sandbox: SandboxId,
        /// The place; it is never assigned to another name.
        place: u32,
        /// The name.
        name: Name,
    },
    /// A decision, or the end of a connection.
    Event(Event),
    /// What a sandbox has used since it was attached.
    Totals(Totals),
    /// Events were dropped here because there was no room.
    Lost {
        /// How many.
        events: u64,
    },
    /// A request carried a credential.
    Used(Box<Used>),
}

/// A request that carried a credential.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Used {
    /// Random, so that a record that arrives twice is stored once.
    pub id: u128,
    /// Which sandbox.
    pub sandbox: SandboxId,
    /// When it began, in milliseconds since 1970.
    pub at_ms: u64,
    /// The daemon's id of the secret.
    pub secret: u128,
    /// The name of the secret at that time.
    pub secret_name: String,
    /// The host.
    pub host: Name,
    /// The port.
    pub port: u16,
    /// The method.
    pub method: String,
    /// The path, without the query.
    pub path: String,
    /// The status of the answer; 0 if there was none.
    pub status: u16,
    /// Bytes of the request's body.
    pub sent: u64,
    /// Bytes of the answer's body.
    pub received: u64,
}

/// What a sandbox has used since it was attached. Absolute numbers, so that repeating a record is harmless.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Which sandbox.
    pub sandbox: SandboxId,
    /// Bytes from the sandbox.
    pub sent: u64,
    /// Bytes to the sandbox.
    pub received: u64,
    /// Connections that were opened.
    pub connections: u64,
    /// Connections and names that were refused.
    pub refused: u64,
    /// Events that were not recorded one by one, because there were too many.
    pub unrecorded: u64,
}

/// One decision, or the end of a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Which sandbox.
    pub sandbox: SandboxId,
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// What happened.
    pub what: What,
    /// The name, if there is one.
    pub name: Option<Name>,
    /// The address: the one that was dialled, or the literal address that the guest requested.
    pub address: Option<IpAddr>,
    /// The port; `None` for questions about names.
    pub port: Option<u16>,
    /// The protocol on the connection.
    pub protocol: Option<Protocol>,
    /// What decided, as text.
    pub rule: String,
    /// Why, as text, if the rule does not explain it.
    pub why: Option<String>,
    /// The arguments of `shoal net allow ID` that would open it.
    pub opens: Option<String>,
    /// Bytes from the sandbox.
    pub sent: u64,
    /// Bytes to the sandbox.
    pub received: u64,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum What {
    /// A connection was opened.
    Opened,
    /// A connection was opened that the rules refuse, because the policy is in audit mode.
    Audited,
    /// A connection was refused.
    Refused,
    /// A name was refused.
    NameRefused,
    /// A connection was allowed but could not be opened.
    Unreachable,
    /// A connection has ended by itself.
    Closed,
    /// A connection was cut, because its rule or its sandbox was removed.
    Cut,
}

/// The addresses where the [`Listener`]s of a sandbox must be reachable, for the side that creates them.
pub fn listen_addresses(pool: &Pool) -> (SocketAddr, SocketAddr) {
    let (v4, v6) = pool.resolver();
    (SocketAddr::new(v4.into(), 53), SocketAddr::new(v6.into(), 53))
}

/// A message as bytes.
pub fn to_bytes<T: Serialize>(message: &T) -> Vec<u8> {
    postcard::to_allocvec(message)
        .expect("these types have no maps or floats that could fail, and memory grows")
}

/// A message from bytes; `None` if they are not a valid message, or if more bytes follow.
pub fn from_bytes<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Option<T> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Some(message),
        _ => None,
    }
}
