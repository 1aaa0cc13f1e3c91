//! A sandbox from the daemon's end of its link: what commands, file operations and the link itself share.
//!
//! A [`Guest`] is the handle that all three hold. `link` is the task that speaks with init, `outbox` what callers want said,
//! `lane` what the two speak about, `stdin` what a lane sends, `activity` who uses the sandbox, and `violation` whatever init
//! may not say: then the connection is closed and made again, and a sandbox that goes on like this has failed.
//! Callers never touch the connection. Knows neither commands, files nor sandboxes: those implement the traits here.

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

/// Which versions of the protocol this daemon speaks.
#[used]
static SPEAKS: [u8; 29] = speaks("shoal-daemon speaks ");

/// Which versions of the protocol this daemon speaks.
pub(crate) fn versions() -> Versions {
    spoken(&SPEAKS)
}

/// One sandbox, for what runs in it. See the head of this file.
pub(crate) struct Guest {
    pub id: SandboxId,
    pub outbox: Outbox,
    pub uses: Activity,
    pub memory_kills: MemoryKills,
    pub backend: Arc<dyn Backend>,
    pub metrics: Arc<Metrics>,
    pub clock: Arc<dyn Clock>,
    pub runtime: tokio::runtime::Handle,
    /// Weak, because the sandbox holds this.
    pub host: Weak<dyn Host>,
}

/// The sandbox itself, as far as what runs in it needs it.
pub(crate) trait Host: Send + Sync {
    /// Whether its state allows commands and file operations.
    fn takes_commands(&self) -> bool;

    /// Why it does not.
    fn wrong_state(&self) -> EngineError;

    /// Publishes an event to those who may see the sandbox.
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
        // Of a sandbox that is gone, nobody hears.
        if let Some(host) = self.host.upgrade() {
            host.tell(what);
        }
    }

    /// Begins a use, or says that it is too late for one.
    pub fn begin_use(self: &Arc<Self>) -> Result<Use, EngineError> {
        Use::begin(self).ok_or_else(|| self.deleting())
    }

    fn deleting(&self) -> EngineError {
        EngineError::WrongState { id: self.id, state: State::Deleting.word() }
    }

    /// Init did not answer in time.
    pub fn unresponsive(&self) -> EngineError {
        EngineError::Unresponsive { id: self.id }
    }
}
