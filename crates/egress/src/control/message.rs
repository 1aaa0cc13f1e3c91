//! What daemon and egress say to each other.
//!
//! One message per packet on a seqpacket socket, postcard inside. [`Ask::Hello`], [`Ask::Listeners`] and [`Ask::Drain`] with
//! their answers never change, so that a daemon can replace an egress of any other version.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use wire::{InstallationId, SandboxId};

use crate::dial::{Bind, Proxy};
use crate::dns::{Pool, Upstream};
use crate::limits::Limits;
use crate::policy::{Addresses, Name, Protocol, Ruleset};

/// The version of these types.
pub const VERSION: u32 = 1;
/// Listeners of one sandbox: two families of TCP and UDP, and room for more.
pub const LISTENERS_MAX: usize = 16;

/// The first packet to a new egress, on the socket that it inherits as its standard input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// The daemon's version of these types.
    pub version: u32,
    /// Whose egress this is; part of the authority's name.
    pub installation: InstallationId,
    /// Egress's own directory, which belongs to `uid` and nobody else can read.
    pub directory: String,
    /// Whom to become. `None` to stay who it is, as without root.
    pub identity: Option<Identity>,
    /// Users that may connect to the socket in the directory, beside root: the daemon's.
    pub daemon_uid: u32,
    /// Worker threads.
    pub threads: u16,
    /// Everything that the operator sets.
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
    /// Whom to ask for names.
    pub upstream: Upstream,
    /// A proxy on the way out.
    pub proxy: Option<Proxy>,
    /// Own addresses to dial from.
    pub bind: Bind,
    /// Closed and opened blocks. `own` is read from the kernel.
    pub addresses: Addresses,
    /// Where synthetic addresses lie.
    pub pool: Pool,
    /// Extra roots for connections of egress's own, in PEM.
    pub extra_roots: Vec<String>,
}

/// From the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Comes back in the answer.
    pub serial: u64,
    /// What is asked.
    pub ask: Ask,
}

/// What the daemon may ask.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// The first request on a connection. Never changes.
    Hello {
        /// The daemon's version of these types.
        version: u32,
    },
    /// The listeners of a sandbox, for a daemon that has none of its own. Answered with descriptors. Never changes.
    Listeners {
        /// Which one.
        sandbox: SandboxId,
    },
    /// Accept nothing more, let open connections end, and exit. Never changes.
    Drain {
        /// After this long, cut what is left.
        seconds: u32,
    },
    /// Serve a sandbox. Comes with its listeners as descriptors, in the order of `listeners`.
    /// A sandbox that is attached already gets the new state, and its old listeners are closed.
    Attach(Box<Attach>),
    /// Replace a policy. Connections that lose their rule are cut before this is answered.
    SetPolicy {
        /// Whose.
        sandbox: SandboxId,
        /// The new rules.
        rules: Box<Ruleset>,
    },
    /// Replace limits.
    SetLimits {
        /// Whose.
        sandbox: SandboxId,
        /// The new ones.
        limits: Limits,
    },
    /// Stop serving a sandbox. Answered when nothing of it is held any more, so that its namespace can go. Harmless when it is
    /// not attached.
    Detach {
        /// Which one.
        sandbox: SandboxId,
    },
    /// Records up to this sequence number are stored. Not answered.
    Acknowledge {
        /// The last of them.
        through: u64,
    },
    /// How egress does.
    Status,
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
    /// The names that it has had, each at its place.
    pub names: Vec<Name>,
    /// What it may use.
    pub limits: Limits,
    /// Whose it is, for limits that all of an owner's sandboxes share.
    pub owner: Option<OwnerLimits>,
}

/// Limits of an owner. The last that were given hold.
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
    /// Connections; the local address of each is where the guest wanted to go.
    Tcp,
    /// DNS questions.
    Udp,
}

/// From egress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromEgress {
    /// The answer to [`Start`].
    Started(Result<Started, Failure>),
    /// The answer to a request.
    Answer {
        /// Of the request.
        serial: u64,
        /// What came of it.
        result: Result<Answer, Failure>,
    },
    /// Something to be stored and acknowledged. Sent again on the next connection until it is, so the same may come twice.
    Record {
        /// Grows by one from record to record.
        sequence: u64,
        /// What it is.
        record: Record,
    },
}

/// What a new egress is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    /// Its version of these types.
    pub version: u32,
    /// The authority that sandboxes should trust, in PEM.
    pub ca_pem: String,
}

/// Why something could not be done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("egress: {what}")]
pub struct Failure {
    /// In words.
    pub what: String,
}

/// What came of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// Never changes.
    Hello {
        /// Egress's version of these types. If it is another, only the requests that never change are answered.
        version: u32,
        /// The sandboxes that it serves.
        attached: Vec<SandboxId>,
    },
    /// Comes with descriptors. Never changes.
    Listeners(Vec<Listener>),
    /// Done.
    Done,
    /// Nothing of the sandbox is held any more.
    Detached(Totals),
    /// How egress does.
    Status(Status),
}

/// How egress does.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Sandboxes that it serves.
    pub sandboxes: u32,
    /// Connections that are open.
    pub connections: u32,
    /// Records that wait for the daemon.
    pub waiting_records: u64,
    /// Bytes of them on disk.
    pub spool_bytes: u64,
    /// Events that were dropped because there was no room, since the start.
    pub lost_events: u64,
    /// The authority that sandboxes should trust, in PEM.
    pub ca_pem: String,
    /// What it uses.
    pub totals: Vec<Totals>,
}

/// Something that the daemon must store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record {
    /// A name has got its place. Its address is answered only after this was acknowledged or spooled.
    Name {
        /// Whose.
        sandbox: SandboxId,
        /// The place; it never gets another name.
        place: u32,
        /// The name.
        name: Name,
    },
    /// Something was decided or has ended.
    Event(Event),
    /// What a sandbox has used since it was attached.
    Totals(Totals),
    /// Events were dropped here because there was no room.
    Lost {
        /// How many.
        events: u64,
    },
}

/// What a sandbox has used since it was attached. Absolute, so that a repetition does no harm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Whose.
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
    /// Whose.
    pub sandbox: SandboxId,
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// What happened.
    pub what: What,
    /// The name, where there is one.
    pub name: Option<Name>,
    /// The address: what was dialled, or the literal address that was asked for.
    pub address: Option<IpAddr>,
    /// The port; `None` for questions about names.
    pub port: Option<u16>,
    /// What travelled.
    pub protocol: Option<Protocol>,
    /// What decided, in words.
    pub rule: String,
    /// Why, in words, where the rule does not say it.
    pub why: Option<String>,
    /// What `shoal net allow ID` needs to open it.
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
    /// A connection was allowed and could not be opened.
    Unreachable,
    /// A connection has ended by itself.
    Closed,
    /// A connection was cut, because its rule or its sandbox went away.
    Cut,
}

/// Where [`Listener`]s of a sandbox must be reachable, for the side that makes them.
pub fn listen_addresses(pool: &Pool) -> (SocketAddr, SocketAddr) {
    let (v4, v6) = pool.resolver();
    (SocketAddr::new(v4.into(), 53), SocketAddr::new(v6.into(), 53))
}

/// A message as bytes.
pub fn to_bytes<T: Serialize>(message: &T) -> Vec<u8> {
    postcard::to_allocvec(message)
        .expect("these types have no maps or floats that could fail, and memory grows")
}

/// A message from bytes; `None` if it is not one, or if something follows it.
pub fn from_bytes<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Option<T> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Some(message),
        _ => None,
    }
}
