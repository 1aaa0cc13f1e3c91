//! How much of a command's output is kept, and who waits for whom.
//!
//! The log writers write output, the oldest output is dropped unless a reader still needs it, and init gets an
//! acknowledgement for stored bytes. Attached readers delay the dropping; when that makes too much, init gets no
//! acknowledgements, and the command waits.

use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use tokio::time::Instant;
use tracing::{error, warn};

use super::sink::{LogSink, Phase, State};
use super::{LiveCommand, STALL_SECONDS};
use crate::command::log::{Again, Append, PATIENCE, Retired, StreamLog, WRITE_MIN, Writes};
use crate::guest::{Carrier, STREAMS};

/// When unstored output is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Due {
    /// There is no unstored output.
    Never,
    /// After [`PATIENCE`], or when there is more output.
    Soon,
    Now,
}

impl LogSink {
    pub(super) fn due(&self) -> Due {
        if self.logs.iter().all(StreamLog::is_stored) {
            return Due::Never;
        }
        // At the end of a command, everything is written except output that fits into its row.
        let last = self.ending.is_some() && !self.logs.iter().all(StreamLog::is_kept);
        if last || self.logs.iter().any(|log| log.unstored_bytes() >= WRITE_MIN) {
            Due::Now
        } else {
            Due::Soon
        }
    }
}

impl LiveCommand {
    /// Drops old output, frees memory, and grants acknowledgements unless a reader blocks them. The caller removes the
    /// files.
    pub(super) fn settle(self: &Arc<Self>, state: &mut State, directory: &Path) -> Vec<PathBuf> {
        let mut files = Vec::new();
        let mut held = false;
        let over = state.sink.ending.is_some();
        // The row records what a finished command keeps, so that no longer changes.
        let finishing = !matches!(state.sink.phase, Phase::Committed);
        if !finishing {
            self.charge(state);
        }
        let no_room = self.commands.account.is_over();
        state.sink.waits_for_room = no_room && !over;
        for log in 0..STREAMS.len() {
            let floor = state.sink.floor(log);
            let retired = if finishing {
                Retired::default()
            } else {
                state.sink.logs[log].retire(directory, self.commands.kept_max, floor)
            };
            // Once the command has ended no more output can arrive, so there is nothing to delay.
            let must_wait = retired.held && !over;
            if !must_wait && (over || !no_room) {
                state.sink.logs[log].grant();
            }
            held |= must_wait;
            files.extend(retired.files);
            state.sink.logs[log].trim(floor);
        }
        match (held, state.sink.held_since) {
            (true, None) => state.sink.held_since = Some(Instant::now()),
            (true, Some(_)) => {}
            (false, _) => state.sink.held_since = None,
        }
        if held && !std::mem::replace(&mut state.sink.watched, true) {
            let command = Arc::clone(self);
            self.guest().runtime.spawn(async move { command.watch_stalled().await });
        }
        if !finishing {
            self.charge(state);
        }
        self.offer_acks(state);
        files
    }

    /// Brings the account of the sandbox up to date with what is on disk.
    pub(super) fn charge(&self, state: &mut State) {
        let kept = state.sink.kept_bytes();
        let before = std::mem::replace(&mut state.sink.charged, kept);
        match kept.checked_sub(before) {
            Some(more) => self.commands.account.add(more),
            None => self.commands.account.subtract(before - kept),
        }
    }

    /// Drops the oldest output of the longer stream, because the sandbox or its owner keeps too much. Returns how much
    /// was freed. Blocks.
    pub(super) fn drop_front(&self) -> u64 {
        let directory = self.directory();
        let mut state = self.lane.lock();
        // While a pass writes, it holds a segment; what a finished command keeps is in its row.
        if state.sink.writing || !matches!(state.sink.phase, Phase::Committed) {
            return 0;
        }
        let longer = usize::from(state.sink.logs[1].kept_bytes() > state.sink.logs[0].kept_bytes());
        let dropped = match state.sink.logs[longer].drop_front(&directory) {
            Ok(dropped) => dropped,
            Err(error) => {
                warn!(sandbox = %self.guest().id, command = %self.id, %error, "cannot drop old output");
                None
            }
        };
        let floor = state.sink.floor(longer);
        state.sink.logs[longer].trim(floor);
        self.charge(&mut state);
        drop(state);
        let Some((file, bytes)) = dropped else { return 0 };
        if let Err(error) = std::fs::remove_file(&file) {
            warn!(sandbox = %self.guest().id, command = %self.id, file = %file.display(), %error,
                "cannot remove old output");
        }
        self.lane.notify();
        bytes
    }

    /// Lets a command go on that waited because too much output was kept.
    pub(super) fn room_was_made(self: &Arc<Self>) {
        let mut state = self.lane.lock();
        let waited = std::mem::take(&mut state.sink.waits_for_room);
        if waited && !std::mem::replace(&mut state.sink.writing, true) {
            drop(state);
            self.commands.logs.schedule(Arc::clone(self) as Arc<dyn Writes>);
        }
    }

    /// Schedules a write when there is enough output, or when output has waited long enough.
    pub(super) fn store_when_due(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        match state.sink.due() {
            Due::Never => {}
            Due::Now => {
                if !std::mem::replace(&mut state.sink.writing, true) {
                    drop(state);
                    self.commands.logs.schedule(Arc::clone(self) as Arc<dyn Writes>);
                }
            }
            Due::Soon => {
                if !std::mem::replace(&mut state.sink.waiting, true) {
                    drop(state);
                    self.store_after_patience();
                }
            }
        }
    }

    fn store_after_patience(self: &Arc<Self>) {
        let command = Arc::downgrade(self);
        self.guest().runtime.spawn(async move {
            tokio::time::sleep(PATIENCE).await;
            if let Some(command) = command.upgrade() {
                command.store_rest();
            }
        });
    }

    /// A small amount of output has waited for more long enough.
    fn store_rest(self: &Arc<Self>) {
        let mut state = self.lane.lock();
        state.sink.waiting = false;
        let over = matches!(state.sink.phase, Phase::Finishing(_) | Phase::Ended(_));
        if state.sink.due() != Due::Never && !over && !std::mem::replace(&mut state.sink.writing, true) {
            drop(state);
            self.commands.logs.schedule(Arc::clone(self) as Arc<dyn Writes>);
        }
    }

    /// A reader advanced or detached: perhaps old output can be dropped now. The log writers remove the files.
    pub(super) fn reader_moved(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        for log in 0..STREAMS.len() {
            let floor = state.sink.floor(log);
            state.sink.logs[log].trim(floor);
        }
        let schedule = state.sink.held_since.is_some() && !std::mem::replace(&mut state.sink.writing, true);
        drop(state);
        if schedule {
            self.commands.logs.schedule(Arc::clone(self) as Arc<dyn Writes>);
        }
    }

    /// Runs while readers block the command: drops readers that have made no progress for too long.
    pub(super) async fn watch_stalled(self: Arc<Self>) {
        while let Some(soonest) = self.let_go_stalled() {
            tokio::time::sleep_until(soonest).await;
        }
    }

    /// Returns when to check again; `None` if no reader blocks the command.
    pub(super) fn let_go_stalled(self: &Arc<Self>) -> Option<Instant> {
        let limit = Duration::from_secs(STALL_SECONDS);
        let kept_max = self.commands.kept_max;
        let now = Instant::now();
        let mut soonest = now + limit;
        let mut let_go = 0;
        let mut state = self.lane.lock();
        let Some(since) = state.sink.held_since else {
            state.sink.watched = false;
            return None;
        };
        let LogSink { logs, readers, .. } = &mut state.sink;
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
            warn!(sandbox = %self.guest().id, command = %self.id, readers = let_go,
                "readers that held up a command for {STALL_SECONDS} s were let go");
            self.reader_moved(state);
            self.lane.notify();
        }
        Some(soonest)
    }
}

impl Writes for LiveCommand {
    fn write_pass(self: Arc<Self>) -> Again {
        let directory = self.directory();
        let appends = {
            let mut state = self.lane.lock();
            if matches!(state.sink.phase, Phase::Ended(_)) {
                state.sink.writing = false;
                drop(state);
                self.lane.notify();
                return Again::Done;
            }
            [state.sink.logs[0].unstored(), state.sink.logs[1].unstored()]
        };
        let segment_max = crate::command::log::segment_max(self.commands.kept_max);
        let mut refused = None;
        let bytes = appends.iter().flatten().map(Append::bytes).sum();
        let has_room = self.commands.account.disk_has_room_for(bytes);
        let began = Instant::now();
        let write = |append: Append| match has_room {
            true => append.write(&directory, segment_max),
            false => Err(std::io::ErrorKind::StorageFull.into()),
        };
        let written = appends.map(|append| match write(append?) {
            Ok(written) => Some(written),
            Err(error) => {
                refused = Some(error);
                None
            }
        });
        crate::observe::timing::LOG_WRITE.check(
            &self.guest().metrics,
            Some(self.guest().id),
            began.elapsed(),
        );
        let mut state = self.lane.lock();
        for (log, written) in written.into_iter().enumerate() {
            if let Some(written) = written {
                state.sink.logs[log].record(written);
            }
        }
        let files = self.settle(&mut state, &directory);
        let due = state.sink.due();
        let reported = std::mem::replace(&mut state.sink.disk_refused, refused.is_some());
        state.sink.writing = due == Due::Now || refused.is_some();
        let wait =
            !state.sink.writing && due == Due::Soon && !std::mem::replace(&mut state.sink.waiting, true);
        drop(state);
        if wait {
            self.store_after_patience();
        }
        for file in files {
            if let Err(error) = std::fs::remove_file(&file) {
                warn!(sandbox = %self.guest().id, command = %self.id, file = %file.display(), %error,
                    "cannot remove old output");
            }
        }
        self.commands.prune_if_due();
        self.finish_if_due();
        self.lane.notify();
        match refused {
            Some(error) => {
                if !reported {
                    error!(sandbox = %self.guest().id, command = %self.id, %error,
                        "cannot store output; the command waits and it is tried again");
                }
                Again::Later
            }
            None if due == Due::Now => Again::Now,
            None => Again::Done,
        }
    }
}
