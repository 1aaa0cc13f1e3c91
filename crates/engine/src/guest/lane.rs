//! What a link carries, and for whom.
//!
//! A [`Lane`] is one thing that both sides speak about: a command or a file operation. The two differ in what becomes of their bytes,
//! so each implements it in its own folder. A [`Peer`] is the sandbox at this end of the link. Nothing here knows either of them.

use std::sync::Arc;

use runtime::Backend;
use wire::SandboxId;
use wire::guest::{End, Handle, Start, StartError, Stream, ToInit};

use super::outbox::Outbox;
use super::violation::Violation;
use crate::observe::metrics::Metrics;

/// A command or a file operation, as the link sees it.
pub(crate) trait Lane: Send + Sync {
    /// What init is asked to start.
    fn start(&self) -> &Start;

    /// Hands over the acknowledgements that are due.
    fn take_acks(&self, put: &mut dyn FnMut(ToInit));

    /// Appends a chunk of stdin and its end, where they are due. Tells whether there is more.
    fn put_stdin(&self, out: &mut Vec<u8>) -> bool;

    /// The connection is gone, and the link's lists with it.
    fn unqueue(&self);

    /// Init has started it.
    fn started(self: Arc<Self>, pid: u32) -> Result<(), Violation>;

    /// Init could not start it.
    fn failed_to_start(self: Arc<Self>, error: StartError) -> Result<(), Violation>;

    /// Init sent output.
    fn receive(self: Arc<Self>, stream: Stream, offset: u64, bytes: &[u8]) -> Result<(), Violation>;

    /// Init has passed stdin on up to `offset`.
    fn stdin_given(self: Arc<Self>, offset: u64) -> Result<(), Violation>;

    /// Nobody reads its stdin any more.
    fn stdin_closed(&self);

    /// Init says how it ended, and where its streams end.
    fn ended(self: Arc<Self>, end: End, ends: [u64; 2]) -> Result<(), Violation>;

    /// After a new handshake: init still has it. Gives what init must hear to go on.
    fn resume(self: Arc<Self>, pid: Option<u32>, stdin: u64) -> Result<Vec<ToInit>, Violation>;

    /// After a new handshake: init does not have it. Gives whether init should start it again.
    fn missing(self: Arc<Self>) -> Result<bool, Violation>;
}

/// The sandbox at this end of a link.
pub(crate) trait Peer: Send + Sync + 'static {
    /// Which sandbox.
    fn id(&self) -> SandboxId;

    /// What callers want said to its init.
    fn outbox(&self) -> &Outbox;

    /// Who can connect to its init.
    fn backend(&self) -> &dyn Backend;

    /// Where links are counted.
    fn metrics(&self) -> &Metrics;

    /// What a handle means. `None`: its result is stored, or nobody wants it; said again, it is harmless.
    fn lane(&self, handle: Handle) -> Result<Option<Arc<dyn Lane>>, Violation>;

    /// All commands whose rows are written, and all file operations, that have no result.
    fn lanes(&self) -> Vec<Arc<dyn Lane>>;

    /// Init has a file operation of an earlier daemon. It is taken into the table, so that it is ended and its handle is not reused.
    fn adopt_orphan(self: Arc<Self>, handle: Handle);
}
