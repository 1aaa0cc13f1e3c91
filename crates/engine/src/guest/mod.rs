//! A sandbox from the daemon's end of its link: what commands, file operations and the link itself share.
//!
//! A [`Guest`] is the handle that all three hold. `link` is the task that talks to init, `outbox` holds the messages
//! that callers want to send, `lane` is what the messages are about, `stdin` holds what a lane sends, `activity` tracks
//! who uses the sandbox, and `violation` lists what init must not send: after a violation the link reconnects, and a
//! sandbox that keeps violating the protocol has failed. Callers never touch the connection. This module does not know
//! commands, files or sandboxes: those implement its traits.

mod activity;
mod lane;
mod link;
mod memory;
mod outbox;
mod stdin;
mod violation;

use std::sync::{Arc, Weak};

use runtime::Backend;
use wire::SandboxId;
use wire::guest::{Versions, speaks, spoken};

use crate::error::EngineError;
use crate::model::state::State;
use crate::observe::clock::Clock;
use crate::observe::events::Happened;
use crate::observe::metrics::Metrics;

pub(crate) use activity::{Activity, Use, UsesNow};
pub(crate) use lane::{AnyLane, Carrier, Lane, LaneState, STREAMS, Sink};
pub(crate) use link::{LinkEnd, Peer, keep_connected};
pub(crate) use memory::MemoryKills;
pub(crate) use outbox::{Outbox, Unsaid};
pub(crate) use stdin::Stdin;
pub(crate) use violation::Violation;

/// How long one request waits for init: a start, a signal, a kill.
pub const ANSWER_SECONDS: u64 = 10;

/// The versions of the protocol that this daemon speaks.
#[used]
static SPEAKS: [u8; 29] = speaks("shoal-daemon speaks ");

/// The versions of the protocol that this daemon speaks.
pub(crate) fn versions() -> Versions {
    spoken(&SPEAKS)
}

/// One sandbox, as seen by what runs in it. See the module comment.
pub(crate) struct Guest {
    pub id: SandboxId,
    pub outbox: Outbox,
    pub uses: Activity,
    pub memory_kills: MemoryKills,
    pub backend: Arc<dyn Backend>,
    pub metrics: Arc<Metrics>,
    pub clock: Arc<dyn Clock>,
    pub runtime: tokio::runtime::Handle,
    /// Weak, because the sandbox holds this guest.
    pub host: Weak<dyn Host>,
}

/// The parts of the sandbox that commands and file operations need.
pub(crate) trait Host: Send + Sync {
    /// Whether its state allows commands and file operations.
    fn takes_commands(&self) -> bool;

    /// The error if its state does not allow them.
    fn wrong_state(&self) -> EngineError;

    /// Publishes an event to the callers that may see the sandbox.
    fn tell(&self, what: Happened);
}

impl Guest {
    /// See [`Host::takes_commands`].
    pub fn takes_commands(&self) -> bool {
        self.host.upgrade().is_some_and(|host| host.takes_commands())
    }

    /// See [`Host::wrong_state`].
    pub fn wrong_state(&self) -> EngineError {
        self.host.upgrade().map_or_else(|| self.deleting(), |host| host.wrong_state())
    }

    /// See [`Host::tell`].
    pub fn tell(&self, what: Happened) {
        // Events of a sandbox that is gone are dropped.
        if let Some(host) = self.host.upgrade() {
            host.tell(what);
        }
    }

    /// Begins a use, or fails if the sandbox is about to be deleted.
    pub fn begin_use(self: &Arc<Self>) -> Result<Use, EngineError> {
        Use::begin(self).ok_or_else(|| self.deleting())
    }

    fn deleting(&self) -> EngineError {
        EngineError::WrongState { id: self.id, state: State::Deleting.word() }
    }

    /// The error for an init that did not answer in time.
    pub fn unresponsive(&self) -> EngineError {
        EngineError::Unresponsive { id: self.id }
    }
}
