//! Why a stream is refused, by its reader or while it is unpacked.

use std::io;

use rustix::io::Errno;

/// Why a stream was not unpacked to its end. What came before is there.
/// Why unpacking stopped. Earlier entries stay.
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
    #[error("the archive is damaged or is no tar archive: {why}")]
    Header {
        /// What is wrong.
        why: &'static str,
    },
    /// A name that leads out of the top, or is not valid.
    #[error("the name `{}` is refused: {why}", String::from_utf8_lossy(path))]
    Name {
        /// As the stream has it.
        path: Vec<u8>,
        /// What is wrong.
        why: &'static str,
    },
    /// An entry that the rules refuse.
    #[error("the archive has {what}, which is not supported")]
    Unsupported {
        /// What.
        what: &'static str,
    },
    /// A directory on the way is a link.
    #[error("`{}` leads through a link, which is never followed", String::from_utf8_lossy(path))]
    ThroughLink {
        /// As the stream has it.
        path: Vec<u8>,
    },
    /// A directory where a file should be, or the other way round.
    #[error("something else is in the way of `{}`", String::from_utf8_lossy(path))]
    InTheWay {
        /// As the stream has it.
        path: Vec<u8>,
    },
    /// Too many entries.
    #[error("the archive has more than {limit} entries")]
    TooMany {
        /// The limit.
        limit: u64,
    },
    /// The kernel refused.
    #[error("cannot create `{}`", String::from_utf8_lossy(path))]
    Create {
        /// As the stream has it.
        path: Vec<u8>,
        /// Its error.
        source: Errno,
    },
}
