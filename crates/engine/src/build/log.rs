//! The log of a build. The build writes it, and any number of callers read it while it grows.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, PoisonError};

use bytes::Bytes;
use tokio::sync::watch;

use super::builder::Builder;
use super::{BuildState, View};
use crate::error::EngineError;

/// How much of a log is kept. The rest of the output is dropped, and the log says so.
const LOG_MAX: u64 = 16 << 20;
/// The last line of a log that has reached its size limit.
const CUT: &[u8] = b"\n[log truncated: it has reached its size limit]\n";
/// How much of a log is read at once.
const LOG_PIECE: usize = 64 * 1024;

/// The log of a running build.
pub(super) struct LogFile {
    pub(super) file: File,
    /// Whether [`CUT`] was written. Nothing follows it.
    pub(super) is_cut: bool,
}

/// A reader of a log, at its own offset.
pub struct BuildLog {
    pub(super) file: Arc<File>,
    pub(super) at: u64,
    pub(super) view: watch::Receiver<View>,
}

impl BuildLog {
    /// The next piece; `None` at the end. With `follow`, waits for more until the build has ended. Cancel-safe.
    pub async fn next(&mut self, follow: bool) -> Result<Option<Bytes>, EngineError> {
        loop {
            let view = self.view.borrow_and_update().clone();
            if self.at < view.log_bytes {
                let (file, at) = (Arc::clone(&self.file), self.at);
                let length = usize::try_from(view.log_bytes - at).unwrap_or(LOG_PIECE).min(LOG_PIECE);
                let read = tokio::task::spawn_blocking(move || {
                    let mut piece = vec![0; length];
                    file.read_exact_at(&mut piece, at).map(|()| piece)
                });
                let piece = read.await.map_err(|_| EngineError::Stopping)?;
                // The file was truncated or cannot be read any more, so nothing follows.
                let Ok(piece) = piece else { return Ok(None) };
                self.at += piece.len() as u64;
                return Ok(Some(piece.into()));
            }
            if !follow || view.state != BuildState::Running {
                return Ok(None);
            }
            if self.view.changed().await.is_err() {
                return Ok(None);
            }
        }
    }
}

impl Builder {
    /// Writes text to the log.
    pub(super) fn say(&self, text: &str) {
        self.append(text.as_bytes());
    }

    /// Writes bytes to the log. A log that cannot be written does not stop the build.
    pub(super) fn append(&self, bytes: &[u8]) {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.build.view.borrow().log_bytes;
        if log.is_cut {
            return;
        }
        log.is_cut = before + bytes.len() as u64 > LOG_MAX;
        let bytes = if log.is_cut { CUT } else { bytes };
        if log.file.write_all(bytes).is_ok() {
            // A write that failed half way earlier has left more bytes than were counted.
            let grown = before + bytes.len() as u64;
            let grown = log.file.metadata().map_or(grown, |meta| meta.len());
            self.build.view.send_modify(|view| view.log_bytes = grown);
        }
    }
}
