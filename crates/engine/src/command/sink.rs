//! The state under the lock of a command's lane: its logs, its readers, and the progress of its rows.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::time::Instant;
use wire::guest::Handle;

use super::finish::Ending;
use crate::command::log::StreamLog;
use crate::db::{CommandRow, ResultRow};
use crate::error::DbError;
use crate::guest::{LaneState, STREAMS, Sink, Violation};

/// How far a command has come.
pub(super) type State = LaneState<LogSink>;

/// Keeps output on disk. See the head of this file.
pub(crate) struct LogSink {
    pub(super) phase: Phase,
    pub(super) logs: [StreamLog; 2],
    /// Counts chunks of both streams.
    pub(super) serial: u64,
    /// What init last reported about the command's end, or what happened to its sandbox.
    pub(super) ending: Option<Ending>,
    pub(super) readers: BTreeMap<u64, Reader>,
    pub(super) reader_next: u64,
    /// Since when a reader causes too much to be kept.
    pub(super) held_since: Option<Instant>,
    /// A task watches for readers that make no progress.
    pub(super) watched: bool,
    /// The host has killed the command at its timeout, because init had not.
    pub(super) struck: bool,
    /// A pass of the log writers is running or queued.
    pub(super) writing: bool,
    /// A small amount of output waits for more, or for the end of the command, before it is written.
    pub(super) waiting: bool,
    /// How many bytes of it are in the account of the sandbox.
    pub(super) charged: u64,
    /// Init gets no acknowledgements, because the sandbox or its owner keeps too much output.
    pub(super) waits_for_room: bool,
    /// A disk error was logged already.
    pub(super) disk_refused: bool,
}

#[derive(Debug, Clone)]
pub(super) enum Phase {
    /// The row is being written.
    Intended,
    /// The row could not be written.
    Refused(Refusal),
    /// The row is written.
    Committed,
    /// The result is being written. The value is set if callers may have the result already: if this daemon died now,
    /// init would report the same end to the next one.
    Finishing(Option<Box<ResultRow>>),
    /// The result is written.
    Ended(Box<ResultRow>),
}

/// Why a command did not get a row.
#[derive(Debug, Clone)]
pub(crate) enum Refusal {
    /// The id was used before.
    Exists(Arc<CommandRow>),
    /// The sandbox is not running any more.
    NoSandbox,
    /// The store failed.
    Store(Arc<DbError>),
}

pub(super) struct Reader {
    pub(super) at: [u64; 2],
    pub(super) moved: Instant,
    pub(super) let_go: bool,
}

impl LogSink {
    pub(super) fn new(phase: Phase, logs: [StreamLog; 2]) -> Self {
        Self {
            phase,
            logs,
            serial: 0,
            ending: None,
            readers: BTreeMap::new(),
            reader_next: 0,
            held_since: None,
            watched: false,
            struck: false,
            writing: false,
            waiting: false,
            charged: 0,
            waits_for_room: false,
            disk_refused: false,
        }
    }

    /// The first offset of a stream that an attached reader still needs.
    pub(super) fn floor(&self, log: usize) -> Option<u64> {
        self.readers.values().filter(|reader| !reader.let_go).map(|reader| reader.at[log]).min()
    }

    /// The result, once callers may have it.
    pub(super) fn result(&self) -> Option<&ResultRow> {
        match &self.phase {
            Phase::Ended(result) => Some(result),
            Phase::Finishing(told) => told.as_deref(),
            Phase::Intended | Phase::Refused(_) | Phase::Committed => None,
        }
    }

    /// The end of a stream for readers, if it has ended.
    pub(super) fn end(&self, log: usize) -> u64 {
        self.ending.as_ref().map_or(u64::MAX, |ending| ending.ends[log])
    }

    /// How much of both streams is on disk.
    pub(super) fn kept_bytes(&self) -> u64 {
        self.logs.iter().map(StreamLog::kept_bytes).sum()
    }

    /// How many bytes of each stream have arrived.
    pub(super) fn lengths(&self) -> [u64; 2] {
        [self.logs[0].received(), self.logs[1].received()]
    }
}

impl Sink for LogSink {
    fn receive(&mut self, handle: Handle, at: usize, offset: u64, bytes: &[u8]) -> Result<bool, Violation> {
        if matches!(self.phase, Phase::Finishing(_) | Phase::Ended(_)) {
            return Ok(false); // Sent again on a new connection, while the result is being stored.
        }
        if offset + bytes.len() as u64 > self.end(at) {
            return Err(Violation::AfterEnd { handle });
        }
        self.serial += 1;
        let serial = self.serial;
        self.logs[at].receive(offset, bytes, serial)
    }

    fn granted(&self, at: usize) -> u64 {
        self.logs[at].granted()
    }

    fn is_over(&self) -> bool {
        self.ending.is_some()
    }

    fn is_abandoned(&self) -> bool {
        false // Its result is stored, with or without a caller.
    }

    fn is_untouched(&self) -> bool {
        self.ending.is_none() && (0..STREAMS.len()).all(|log| self.logs[log].received() == 0)
    }
}
