//! What the database can refuse.

use std::path::PathBuf;
use std::sync::Arc;

/// What the database said.
#[derive(Debug, thiserror::Error)]
pub enum DbError {
    /// The file cannot be made.
    #[error("cannot create database `{}`", path.display())]
    Create {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file cannot be opened or brought up to date.
    #[error("cannot open database `{}`", path.display())]
    Open {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: rusqlite::Error,
    },
    /// A newer Shoal wrote it.
    #[error("database `{}` has version {found}, this program knows versions up to {known}", path.display())]
    Newer {
        /// Which file.
        path: PathBuf,
        /// What the file says.
        found: u32,
        /// What this build knows.
        known: u32,
    },
    /// The statement, or the commit that it was in, failed.
    #[error("the database refused")]
    Refused {
        /// Shared by all changes of one commit.
        source: Arc<rusqlite::Error>,
    },
    /// Someone else asked for the same thing at the same time, and this is what came of it.
    #[error(transparent)]
    Shared {
        /// What the other got.
        source: Arc<DbError>,
    },
    /// The row is not as it was left: another daemon owns it, or it is gone.
    #[error("the row is not as this daemon left it: it is gone, or another daemon owns it")]
    Superseded,
    /// The store was closed; the daemon is going down.
    #[error("the database is closed")]
    Closed,
    /// The operating system refused a thread.
    #[error("cannot start a thread for the database")]
    Thread {
        /// Why.
        source: std::io::Error,
    },
}

impl DbError {
    /// Whether it could not be written because the disk is full.
    pub fn is_disk_full(&self) -> bool {
        match self {
            Self::Refused { source } => source.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull),
            Self::Shared { source } => source.is_disk_full(),
            Self::Create { .. }
            | Self::Open { .. }
            | Self::Newer { .. }
            | Self::Superseded
            | Self::Closed
            | Self::Thread { .. } => false,
        }
    }
}
