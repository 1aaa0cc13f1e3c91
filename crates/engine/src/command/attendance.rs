//! Ends a command that has had no attached reader for too long, and removes a command some time after its end.
//!
//! A caller is attached while it reads the command's output. No caller can be attached while the daemon is down, so a
//! new daemon restarts the clock and gives attached callers time to reconnect.

use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use super::sink::State;
use super::{CommandRef, LiveCommand};
use crate::error::{EngineError, chain};
use crate::model::Resume;

/// How long the caller that started a command, or that was attached when the daemon died, may take to attach.
const ARRIVAL: Duration = Duration::from_secs(60);

impl LiveCommand {
    /// The command runs, and a caller should attach soon.
    pub(super) fn expect_someone(self: &Arc<Self>, state: &State) {
        if let Some(length) = self.attendance.unattended {
            self.end_unless_attended(state, length.max(ARRIVAL));
        }
    }

    /// A reader has detached.
    pub(super) fn left(self: &Arc<Self>, state: &State) {
        if let Some(length) = self.attendance.unattended {
            self.end_unless_attended(state, length);
        }
    }

    /// Ends the command after this time, unless a caller is attached then or was attached in between.
    fn end_unless_attended(self: &Arc<Self>, state: &State, after: Duration) {
        if !state.sink.readers.is_empty() || state.sink.ending.is_some() {
            return;
        }
        let (command, seen) = (Arc::downgrade(self), state.sink.reader_next);
        self.guest().runtime.spawn(async move {
            let command = loop {
                tokio::time::sleep(after).await;
                let Some(command) = command.upgrade() else { return };
                // While the sandbox is paused no caller can be attached, and nothing works that should end.
                if !command.guest().stood_still(after) {
                    break command;
                }
            };
            {
                let state = command.lane.lock();
                if state.sink.reader_next != seen || !state.sink.readers.is_empty() || state.sink.ending.is_some() {
                    return;
                }
            }
            info!(sandbox = %command.guest().id, command = %command.id, "ends a command that nobody is attached to");
            match CommandRef::new(Arc::clone(&command)).with_resume(Resume::Never).kill().await {
                Ok(()) | Err(EngineError::CommandEnded { .. }) => {}
                Err(error) => {
                    warn!(sandbox = %command.guest().id, command = %command.id, error = chain(&error), "cannot end it");
                }
            }
        });
    }
}
