//! What is kept of a command's output, and who has to wait for whom.
//!
//! Output is written by the log writers, the front falls off where nobody reads it, and init is told what is stored.
//! Readers that are attached hold back the front; when that makes too much, init is not told, and the command waits.

use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use tokio::time::Instant;
use tracing::{error, warn};

use super::{LiveCommand, LiveCommandState, Phase, STALL_SECONDS, STREAMS};
use crate::command::log::{Again, PATIENCE, Retired, StreamLog, WRITE_MIN, Writes};

/// When output that is not stored is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Due {
    /// There is none.
    Never,
    /// After [`PATIENCE`], or when there is more.
    Soon,
    Now,
}

impl LiveCommandState {
    pub(super) fn due(&self) -> Due {
        if self.logs.iter().all(StreamLog::is_stored) {
            return Due::Never;
        }
        // At the end of a command, only what fits into its row need not be written.
        let last = self.ending.is_some() && !self.logs.iter().all(StreamLog::is_kept);
        if last || self.logs.iter().any(|log| log.unstored_bytes() >= WRITE_MIN) {
            Due::Now
        } else {
            Due::Soon
        }
    }
}

impl LiveCommand {
    /// Lets the front fall off, frees memory, and grants acknowledgements unless a reader holds things up.
    /// The files are removed by whoever calls.
    pub(super) fn settle(self: &Arc<Self>, state: &mut LiveCommandState, directory: &Path) -> Vec<PathBuf> {
        let mut files = Vec::new();
        let mut held = false;
        let over = state.ending.is_some();
        // What a finished command keeps is in its row, so it is settled for good.
        let finishing = !matches!(state.phase, Phase::Committed);
        for log in 0..STREAMS.len() {
            let floor = state.floor(log);
            let retired = if finishing {
                Retired::default()
            } else {
                state.logs[log].retire(directory, self.live.shared.config.output_kept_max, floor)
            };
            // When the command is over no more can come, so there is nobody to make wait.
            let must_wait = retired.held && !over;
            if !must_wait {
                state.logs[log].grant();
            }
            held |= must_wait;
            files.extend(retired.files);
            state.logs[log].trim(floor);
        }
        match (held, state.held_since) {
            (true, None) => state.held_since = Some(Instant::now()),
            (true, Some(_)) => {}
            (false, _) => state.held_since = None,
        }
        if held && !std::mem::replace(&mut state.watched, true) {
            let hub = Arc::clone(self);
            self.live.shared.runtime.spawn(async move { hub.watch_stalled().await });
        }
        self.queue_ack(state);
        files
    }

    /// Has output written when there is enough of it, or when it has waited long enough.
    pub(super) fn store_when_due(self: &Arc<Self>, mut state: MutexGuard<'_, LiveCommandState>) {
        match state.due() {
            Due::Never => {}
            Due::Now => {
                if !std::mem::replace(&mut state.writing, true) {
                    drop(state);
                    self.live.shared.logs.schedule(Arc::clone(self) as Arc<dyn Writes>);
                }
            }
            Due::Soon => {
                if !std::mem::replace(&mut state.waiting, true) {
                    drop(state);
                    self.store_after_patience();
                }
            }
        }
    }

    fn store_after_patience(self: &Arc<Self>) {
        let hub = Arc::downgrade(self);
        self.live.shared.runtime.spawn(async move {
            tokio::time::sleep(PATIENCE).await;
            if let Some(hub) = hub.upgrade() {
                hub.store_rest();
            }
        });
    }

    /// A little output has waited for more long enough.
    fn store_rest(self: &Arc<Self>) {
        let mut state = self.lock();
        state.waiting = false;
        let over = matches!(state.phase, Phase::Finishing(_) | Phase::Ended(_));
        if state.due() != Due::Never && !over && !std::mem::replace(&mut state.writing, true) {
            drop(state);
            self.live.shared.logs.schedule(Arc::clone(self) as Arc<dyn Writes>);
        }
    }

    /// Puts the command into the link's list if init may forget more than it was told.
    pub(super) fn queue_ack(self: &Arc<Self>, state: &mut LiveCommandState) {
        // When the command is over, the result's acknowledgement covers everything.
        let due = (0..STREAMS.len()).any(|log| state.ack_due(log) > state.acknowledged[log]);
        if due && state.ending.is_none() && !state.ack_queued {
            state.ack_queued = self.live.outbox.ack(Arc::clone(self) as Arc<dyn crate::guest::Lane>);
        }
    }

    /// A reader moved or left: perhaps the front may fall off now. Files are removed by the log writers.
    pub(super) fn reader_moved(self: &Arc<Self>, mut state: MutexGuard<'_, LiveCommandState>) {
        for log in 0..STREAMS.len() {
            let floor = state.floor(log);
            state.logs[log].trim(floor);
        }
        let schedule = state.held_since.is_some() && !std::mem::replace(&mut state.writing, true);
        drop(state);
        if schedule {
            self.live.shared.logs.schedule(Arc::clone(self) as Arc<dyn Writes>);
        }
    }

    /// While a reader holds the command up: lets go whoever has not moved for too long.
    pub(super) async fn watch_stalled(self: Arc<Self>) {
        while let Some(soonest) = self.let_go_stalled() {
            tokio::time::sleep_until(soonest).await;
        }
    }

    /// Tells when to look again; `None` when nobody holds anything up.
    pub(super) fn let_go_stalled(self: &Arc<Self>) -> Option<Instant> {
        let limit = Duration::from_secs(STALL_SECONDS);
        let kept_max = self.live.shared.config.output_kept_max;
        let now = Instant::now();
        let mut soonest = now + limit;
        let mut let_go = 0;
        let mut state = self.lock();
        let Some(since) = state.held_since else {
            state.watched = false;
            return None;
        };
        let LiveCommandState { logs, readers, .. } = &mut *state;
        for reader in readers.values_mut().filter(|reader| !reader.let_go) {
            let holds = logs.iter().zip(reader.at).any(|(log, at)| log.is_held_by(at, kept_max));
            let deadline = reader.moved.max(since) + limit;
            if holds && deadline <= now {
                reader.let_go = true;
                let_go += 1;
            } else if holds {
                soonest = soonest.min(deadline);
            }
        }
        if let_go > 0 {
            warn!(sandbox = %self.live.id, command = %self.id, readers = let_go,
                "readers that held up a command for {STALL_SECONDS} s were let go");
            self.reader_moved(state);
            self.changed.notify_waiters();
        }
        Some(soonest)
    }
}

impl Writes for LiveCommand {
    fn write_pass(self: Arc<Self>) -> Again {
        let directory = self.directory();
        let appends = {
            let mut state = self.lock();
            if matches!(state.phase, Phase::Ended(_)) {
                state.writing = false;
                drop(state);
                self.changed.notify_waiters();
                return Again::Done;
            }
            [state.logs[0].unstored(), state.logs[1].unstored()]
        };
        let segment_max = crate::command::log::segment_max(self.live.shared.config.output_kept_max);
        let mut refused = None;
        let began = Instant::now();
        let written = appends.map(|append| match append?.write(&directory, segment_max) {
            Ok(written) => Some(written),
            Err(error) => {
                refused = Some(error);
                None
            }
        });
        crate::observe::timing::LOG_WRITE.check(
            &self.live.shared.metrics,
            Some(self.live.id),
            began.elapsed(),
        );
        let mut state = self.lock();
        for (log, written) in written.into_iter().enumerate() {
            if let Some(written) = written {
                state.logs[log].record(written);
            }
        }
        let files = self.settle(&mut state, &directory);
        let due = state.due();
        let reported = std::mem::replace(&mut state.disk_refused, refused.is_some());
        state.writing = due == Due::Now || refused.is_some();
        let wait = !state.writing && due == Due::Soon && !std::mem::replace(&mut state.waiting, true);
        drop(state);
        if wait {
            self.store_after_patience();
        }
        for file in files {
            if let Err(error) = std::fs::remove_file(&file) {
                warn!(sandbox = %self.live.id, command = %self.id, file = %file.display(), %error,
                    "cannot remove old output");
            }
        }
        self.finish_if_due();
        self.changed.notify_waiters();
        match refused {
            Some(error) => {
                if !reported {
                    error!(sandbox = %self.live.id, command = %self.id, %error,
                        "cannot store output; the command waits and it is tried again");
                }
                Again::Later
            }
            None if due == Due::Now => Again::Now,
            None => Again::Done,
        }
    }
}
