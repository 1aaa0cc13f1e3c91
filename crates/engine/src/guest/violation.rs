//! Messages that init must not send. Init is untrusted once guest code has run.

use wire::frame::FrameError;
use wire::guest::{COMMANDS_MAX, Handle, Versions};

/// A message that init must not send.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Violation {
    #[error("init sent {0}")]
    Frame(#[from] FrameError),
    #[error("init sent bytes at offset {found} where {expected} was next")]
    Gap { expected: u64, found: u64 },
    #[error("init sent bytes up to {end} with only {acknowledged} acknowledged")]
    BeyondWindow { end: u64, acknowledged: u64 },
    #[error("init sent bytes of command {} after its end", handle.0)]
    AfterEnd { handle: Handle },
    #[error("init sent stdin of command {}", handle.0)]
    StdinFromInit { handle: Handle },
    #[error("init speaks of command {}, which it was never told to start", handle.0)]
    UnknownHandle { handle: Handle },
    #[error("init named command {} twice", handle.0)]
    NamedTwice { handle: Handle },
    #[error("init named more than {COMMANDS_MAX} commands")]
    TooManyKnown,
    #[error("init has forgotten command {}", handle.0)]
    Forgotten { handle: Handle },
    #[error("init gave command {} a second process", handle.0)]
    AnotherPid { handle: Handle },
    #[error("init ended a stream of command {} at {end} with {received} received", handle.0)]
    BadEnd { handle: Handle, end: u64, received: u64 },
    #[error("init acknowledged stdin of command {} up to {offset} with {sent} sent", handle.0)]
    BadStdinAck { handle: Handle, offset: u64, sent: u64 },
    #[error("init answered a ping that was never sent")]
    UnknownPong,
    #[error("the engine stops")]
    NobodyListens,
    #[error("init spoke out of turn")]
    OutOfTurn,
    #[error("init chose version {version}, which was not offered")]
    BadVersion { version: u32 },
    #[error("init says that it speaks versions {} to {} alone, which cannot be", theirs.min, theirs.max)]
    BadParting { theirs: Versions },
}
