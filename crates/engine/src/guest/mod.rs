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

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use runtime::Backend;
use wire::SandboxId;
use wire::guest::{Versions, speaks, spoken};

use crate::error::{EngineError, chain};
use crate::model::Resume;
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
    /// Attempts to reach a network that were reported with the result of a command.
    pub attempts_told: AtomicU64,
    pub backend: Arc<dyn Backend>,
    pub metrics: Arc<Metrics>,
    pub clock: Arc<dyn Clock>,
    pub runtime: tokio::runtime::Handle,
    /// Weak, because the sandbox holds this guest.
    pub host: Weak<dyn Host>,
}

/// How many times a request resumes a sandbox that others pause at the same moment.
const WAKES_MAX: usize = 3;

/// Whether a request can work in a sandbox now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gate {
    /// It runs.
    Open,
    /// It is paused, or about to be.
    Asleep,
    /// It is neither; the request fails.
    Shut,
}

/// The parts of the sandbox that commands and file operations need.
#[async_trait]
pub(crate) trait Host: Send + Sync {
    /// Whether requests can work in it.
    fn gate(&self) -> Gate;

    /// Whether its processes stand still, or were resumed less than `within` ago. Then they had no time to answer.
    fn stood_still(&self, within: Duration) -> bool;

    /// Resumes it, and returns when it runs.
    async fn wake(&self) -> Result<(), EngineError>;

    /// Whether its state allows commands and file operations.
    fn takes_commands(&self) -> bool;

    /// The error if its state does not allow them.
    fn wrong_state(&self) -> EngineError;

    /// Whether its policy opens nothing, so that every attempt to reach a network fails.
    fn has_no_network(&self) -> bool;

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

    /// How often programs of a sandbox without a network tried to reach one, and no result of a command has said so yet. Zero for other
    /// sandboxes, and if the count is not known.
    pub async fn new_attempts(&self) -> u64 {
        if !self.host.upgrade().is_some_and(|host| host.has_no_network()) {
            return 0;
        }
        match self.backend.attempts(self.id).await {
            Ok(count) => count.saturating_sub(self.attempts_told.fetch_max(count, Ordering::Relaxed)),
            Err(runtime::BackendError::Gone) => 0,
            Err(error) => {
                tracing::warn!(sandbox = %self.id, error = chain(&error), "cannot count attempts to reach a network");
                0
            }
        }
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

    /// Begins a use for a request that works in the sandbox, and resumes a paused one first unless the caller does not want that.
    /// Every request for commands and files comes through here. Many at once resume the sandbox once.
    pub async fn enter(self: &Arc<Self>, resume: Resume) -> Result<Use, EngineError> {
        let using = self.begin_use()?;
        for _ in 0..WAKES_MAX {
            let Some(host) = self.host.upgrade() else { break };
            match (host.gate(), resume) {
                (Gate::Open | Gate::Shut, _) => return Ok(using),
                (Gate::Asleep, Resume::Never) => return Err(self.wrong_state()),
                (Gate::Asleep, Resume::Auto) => host.wake().await?,
            }
        }
        Ok(using)
    }

    /// See [`Host::stood_still`].
    pub fn stood_still(&self, within: Duration) -> bool {
        self.host.upgrade().is_some_and(|host| host.stood_still(within))
    }

    fn deleting(&self) -> EngineError {
        EngineError::WrongState { id: self.id, state: State::Deleting.word() }
    }

    /// The error for an init that did not answer in time.
    pub fn unresponsive(&self) -> EngineError {
        EngineError::Unresponsive { id: self.id }
    }
}
