//! Errors of the database.

use std::path::PathBuf;
use std::sync::Arc;

/// An error of the database.
#[derive(Debug, thiserror::Error)]
pub enum DbError {
    /// The file cannot be created.
    #[error("cannot create database `{}`", path.display())]
    Create {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file cannot be opened or migrated.
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
        /// The version of the file.
        found: u32,
        /// The newest version that this build knows.
        known: u32,
    },
    /// The statement, or the commit that it was in, failed.
    #[error("the database refused")]
    Refused {
        /// Shared by all changes of one commit.
        source: Arc<rusqlite::Error>,
    },
    /// Another caller requested the same change at the same time; both get the same error.
    #[error(transparent)]
    Shared {
        /// The error that the other caller got.
        source: Arc<DbError>,
    },
    /// The row is not as this daemon left it: another daemon owns it, or it was removed.
    #[error("the row is not as this daemon left it: it is gone, or another daemon owns it")]
    Superseded,
    /// The disk is so full that only deletes are written.
    #[error("the rest of the disk is reserved for deletes")]
    Reserved,
    /// The store was closed; the daemon is stopping.
    #[error("the database is closed")]
    Closed,
    /// The operating system could not start a thread.
    #[error("cannot start a thread for the database")]
    Thread {
        /// Why.
        source: std::io::Error,
    },
}

impl DbError {
    /// Whether the write failed because the disk is full.
    pub fn is_disk_full(&self) -> bool {
        match self {
            Self::Refused { source } => source.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull),
            Self::Shared { source } => source.is_disk_full(),
            Self::Reserved => true,
            Self::Create { .. }
            | Self::Open { .. }
            | Self::Newer { .. }
            | Self::Superseded
            | Self::Closed
            | Self::Thread { .. } => false,
        }
    }
}
