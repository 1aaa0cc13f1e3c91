//! What becomes of a command when nobody looks: it may be ended when nobody is attached to it for too long, and forgotten some time
//! after its end.
//!
//! Attached is whoever reads its output. While the daemon is away nobody can be, so the clock begins anew with it, and gives those who
//! were attached the time to come back.

use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use super::sink::State;
use super::{CommandRef, LiveCommand};
use crate::error::{EngineError, chain};

/// How long whoever started a command, or was attached to it when the daemon died, may take to come.
const ARRIVAL: Duration = Duration::from_secs(60);

impl LiveCommand {
    /// It runs, and somebody should come.
    pub(super) fn expect_someone(self: &Arc<Self>, state: &State) {
        if let Some(length) = self.attendance.unattended {
            self.end_unless_attended(state, length.max(ARRIVAL));
        }
    }

    /// Someone has left.
    pub(super) fn left(self: &Arc<Self>, state: &State) {
        if let Some(length) = self.attendance.unattended {
            self.end_unless_attended(state, length);
        }
    }

    /// Ends it after a while, unless somebody is attached or was meanwhile.
    fn end_unless_attended(self: &Arc<Self>, state: &State, after: Duration) {
        if !state.sink.readers.is_empty() || state.sink.ending.is_some() {
            return;
        }
        let (command, seen) = (Arc::downgrade(self), state.sink.reader_next);
        self.guest().runtime.spawn(async move {
            tokio::time::sleep(after).await;
            let Some(command) = command.upgrade() else { return };
            {
                let state = command.lane.lock();
                if state.sink.reader_next != seen || !state.sink.readers.is_empty() || state.sink.ending.is_some() {
                    return;
                }
            }
            info!(sandbox = %command.guest().id, command = %command.id, "ends a command that nobody is attached to");
            match (CommandRef { command: Arc::clone(&command) }).kill().await {
                Ok(()) | Err(EngineError::CommandEnded { .. }) => {}
                Err(error) => {
                    warn!(sandbox = %command.guest().id, command = %command.id, error = chain(&error), "cannot end it");
                }
            }
        });
    }
}
