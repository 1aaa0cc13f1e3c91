//! The protocol between daemon and egress: its types, how packets travel, and the daemon's side.

mod client;
mod message;
mod packet;

pub use client::{ControlError, DETACH_DEADLINE, Egress, Greeting, QUICK_DEADLINE, Records, SOCKET_FILE};
pub use message::{
    Answer, Ask, Attach, Event, Failure, FromEgress, Identity, LISTENERS_MAX, Listener, OwnerLimits, Record,
    Request, Settings, Start, Started, Status, Totals, Used, VERSION, What, from_bytes, listen_addresses,
    to_bytes,
};
pub use packet::{Channel, MESSAGE_BYTES_MAX, Received, receive_now, send_now};
