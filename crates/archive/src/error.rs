//! Why a stream is rejected, by its reader or while it is unpacked.

use std::io;

use rustix::io::Errno;

/// Why unpacking stopped. Entries before the error stay.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// The stream could not be read.
    #[error("cannot read the archive")]
    Read {
        /// Why.
        source: io::Error,
    },
    /// The stream ends in the middle of an entry, or has nothing in it.
    #[error("the archive ends too early")]
    Truncated,
    /// A header is not valid.
    #[error("the archive is damaged or not a tar archive: {why}")]
    Header {
        /// What is wrong.
        why: &'static str,
    },
    /// A name that leads out of the top, or is not valid.
    #[error("the name `{}` is not allowed: {why}", String::from_utf8_lossy(path))]
    Name {
        /// As written in the stream.
        path: Vec<u8>,
        /// What is wrong.
        why: &'static str,
    },
    /// An entry that the rules reject.
    #[error("the archive contains {what}, which is not supported")]
    Unsupported {
        /// The feature.
        what: &'static str,
    },
    /// A parent directory is a link.
    #[error("`{}` leads through a link, which is never followed", String::from_utf8_lossy(path))]
    ThroughLink {
        /// As written in the stream.
        path: Vec<u8>,
    },
    /// A directory where a file should be, or the other way round.
    #[error("`{}` cannot be created: something of another kind exists there", String::from_utf8_lossy(path))]
    InTheWay {
        /// As written in the stream.
        path: Vec<u8>,
    },
    /// Too many entries.
    #[error("the archive must have at most {limit} entries")]
    TooMany {
        /// The limit.
        limit: u64,
    },
    /// The kernel refused.
    #[error("cannot create `{}`", String::from_utf8_lossy(path))]
    Create {
        /// As written in the stream.
        path: Vec<u8>,
        /// Its error.
        source: Errno,
    },
}
