//! The link to a sandbox's init.
//!
//! `link` is the task that speaks with init, `outbox` what callers want said, `lane` what the two speak about, and `violation`
//! whatever init may not say: then the connection is closed and made again, and a sandbox that goes on like this has failed.
//! Callers never touch the connection. Knows neither commands, files nor sandboxes: those implement `lane`'s traits.

mod lane;
mod link;
mod outbox;
mod violation;

use wire::guest::{Versions, speaks, spoken};

pub(crate) use lane::{Lane, Peer};
pub(crate) use link::{LinkEnd, keep_connected};
pub(crate) use outbox::{Outbox, Unsaid};
pub(crate) use violation::Violation;

/// Which versions of the protocol this daemon speaks.
#[used]
static SPEAKS: [u8; 29] = speaks("shoal-daemon speaks ");

/// Which versions of the protocol this daemon speaks.
pub(crate) fn versions() -> Versions {
    spoken(&SPEAKS)
}
