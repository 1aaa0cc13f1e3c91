//! One task that reads and writes frames, and reconnects when the stream breaks.
//!
//! Reading never waits for a disk, a row or a reader, so a slow command delays no other; the windows of `wire` bound
//! what init may send without an acknowledgement.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use runtime::{BackendError, GuestStream};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, warn};
use wire::frame::{self, Decoder, FrameError, Incoming, MESSAGE_FROM_INIT_MAX};
use wire::guest::{COMMANDS_MAX, FromInit, Handle, Stream, ToInit, Versions};

use super::lane::AnyLane;
use super::outbox::{OUT_TARGET, Outbox, put_start};
use super::violation::Violation;
use super::{Guest, versions};
use crate::error::chain;

/// How long a connection attempt may take.
const CONNECT_SECONDS: u64 = 10;
/// How long init may take to send its hello and list its commands. A stopped init never does, and the link retries.
const HANDSHAKE_SECONDS: u64 = 10;
/// The shortest and the longest delay between two attempts to connect.
const BACKOFF_MIN: Duration = Duration::from_millis(5);
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// After this many violations in a row, the sandbox has failed.
const VIOLATIONS_MAX: u32 = 5;
/// A connection that lasted this long resets the count.
const FORGIVEN_AFTER: Duration = Duration::from_secs(600);
/// After this long without traffic, a link frees its read buffer. A thousand idle sandboxes should cost little.
const IDLE_AFTER: Duration = Duration::from_secs(5);
/// The size of the read buffer while a link is idle.
const SMALL_READ: usize = 256;

/// The sandbox at this end of a link.
pub(crate) trait Peer: Send + Sync + 'static {
    fn guest(&self) -> &Guest;

    /// The lane of a handle. `None`: its result is stored, or its caller is gone; messages about it are ignored.
    fn lane(&self, handle: Handle) -> Result<Option<Arc<dyn AnyLane>>, Violation>;

    /// All commands that have a row but no result, and all file operations that have no result.
    fn lanes(&self) -> Vec<Arc<dyn AnyLane>>;

    /// Init has a file operation of an earlier daemon. It is added to the table, so that it is ended and its handle is
    /// not reused.
    fn adopt_orphan(&self, handle: Handle);
}

/// Why a link ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkEnd {
    /// Init has ended and will not come back.
    #[error("its first process has ended")]
    Gone,
    /// Init violated the protocol too often.
    #[error("its first process breaks the protocol: {0}")]
    Hostile(Violation),
    /// Init and this daemon have no version in common.
    #[error("its first process speaks versions {} to {} of the protocol, this daemon {} to {}",
        theirs.min, theirs.max, versions().min, versions().max)]
    NoCommonVersion { theirs: Versions },
    /// The task panicked.
    #[error("the daemon has a bug that shows with its first process")]
    Bug,
    /// After a restart, the output of its commands cannot be found. Continuing would acknowledge output that is not
    /// stored.
    #[error("the output of its commands cannot be read: {0}")]
    Unreadable(String),
}

/// Keeps a sandbox connected until the link ends. Sends on `ready` after the first handshake.
pub(crate) async fn keep_connected(peer: Arc<dyn Peer>, ready: oneshot::Sender<()>) -> LinkEnd {
    let mut ready = Some(ready);
    let mut backoff = BACKOFF_MIN;
    let mut violations = 0;
    let mut reported = false;
    loop {
        let stream = match connect(peer.as_ref()).await {
            Ok(stream) => stream,
            Err(BackendError::Gone) => return LinkEnd::Gone,
            Err(error) => {
                if !std::mem::replace(&mut reported, true) {
                    warn!(sandbox = %peer.guest().id, error = chain(&error), "cannot connect to init; trying on");
                }
                tokio::time::sleep(backoff).await;
                backoff = (backoff * 2).min(BACKOFF_MAX);
                continue;
            }
        };
        let since = Instant::now();
        let (greeted, end) = {
            // However this ends, also when the task is dropped, no caller may queue messages for a dead connection.
            let _disconnect = Disconnect(&peer.guest().outbox);
            let mut talk = Talk::new(&peer, &mut ready);
            let end = talk.run(stream).await;
            (talk.stage == Stage::Open, end)
        };
        if greeted {
            (backoff, reported) = (BACKOFF_MIN, false);
        }
        if since.elapsed() > FORGIVEN_AFTER {
            violations = 0;
        }
        match end {
            TalkEnd::Closed => debug!(sandbox = %peer.guest().id, "init closed the connection"),
            TalkEnd::Broken(error) => {
                debug!(sandbox = %peer.guest().id, %error, "the connection to init broke")
            }
            TalkEnd::Late => {
                if !std::mem::replace(&mut reported, true) {
                    warn!(sandbox = %peer.guest().id, "init does not say hello; trying on");
                }
            }
            TalkEnd::Violation(violation) => {
                violations += 1;
                peer.guest().metrics.violated();
                warn!(sandbox = %peer.guest().id, %violation, violations, "init broke the protocol; reconnecting");
                if violations >= VIOLATIONS_MAX {
                    return LinkEnd::Hostile(violation);
                }
            }
            TalkEnd::NoCommonVersion { theirs } => return LinkEnd::NoCommonVersion { theirs },
        }
        tokio::time::sleep(backoff).await;
        backoff = (backoff * 2).min(BACKOFF_MAX);
    }
}

async fn connect(peer: &dyn Peer) -> Result<GuestStream, BackendError> {
    let late = |_| BackendError::Late { doing: "connect to init", seconds: CONNECT_SECONDS };
    let guest = peer.guest();
    timeout(Duration::from_secs(CONNECT_SECONDS), guest.backend.connect(guest.id)).await.map_err(late)?
}

struct Disconnect<'a>(&'a Outbox);

impl Drop for Disconnect<'_> {
    fn drop(&mut self) {
        self.0.disconnect();
    }
}

enum TalkEnd {
    Closed,
    Broken(io::Error),
    Late,
    Violation(Violation),
    NoCommonVersion { theirs: Versions },
}

impl From<io::Error> for TalkEnd {
    fn from(error: io::Error) -> Self {
        Self::Broken(error)
    }
}

impl From<Violation> for TalkEnd {
    fn from(violation: Violation) -> Self {
        Self::Violation(violation)
    }
}

impl From<FrameError> for TalkEnd {
    fn from(error: FrameError) -> Self {
        Self::Violation(error.into())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Waiting for init's hello.
    Greeting,
    /// Init lists its commands.
    Listing,
    /// All messages are allowed.
    Open,
}

/// See [`Talk::unwanted`].
#[derive(Default)]
struct Unwanted {
    acks: BTreeMap<Stream, u64>,
    over: bool,
}

/// One connection.
struct Talk<'a> {
    peer: &'a Arc<dyn Peer>,
    ready: &'a mut Option<oneshot::Sender<()>>,
    stage: Stage,
    version: u32,
    known: BTreeMap<Handle, (Option<u32>, u64)>,
    /// Acknowledgements for commands that have their results, and that init has not forgotten.
    unwanted: BTreeMap<Handle, Unwanted>,
    /// Encoded and not yet written.
    out: Vec<u8>,
    written: usize,
}

impl<'a> Talk<'a> {
    fn new(peer: &'a Arc<dyn Peer>, ready: &'a mut Option<oneshot::Sender<()>>) -> Self {
        Self {
            peer,
            ready,
            stage: Stage::Greeting,
            version: versions().min,
            known: BTreeMap::new(),
            unwanted: BTreeMap::new(),
            out: Vec::new(),
            written: 0,
        }
    }

    async fn run(&mut self, stream: GuestStream) -> TalkEnd {
        let Err(end) = self.talk(stream).await else { return TalkEnd::Closed };
        end
    }

    async fn talk(&mut self, stream: GuestStream) -> Result<(), TalkEnd> {
        let (mut reader, mut writer) = tokio::io::split(stream);
        let mut decoder = Decoder::new(MESSAGE_FROM_INIT_MAX);
        let mut buffered = true;
        let mut active = Instant::now();
        let deadline = active + Duration::from_secs(HANDSHAKE_SECONDS);
        let mut idle = std::pin::pin!(sleep_until(active + IDLE_AFTER));
        let Versions { min: version_min, max: version_max } = versions();
        let hello = ToInit::Hello { version_min, version_max };
        frame::put_message(&hello, &mut self.out);
        loop {
            if self.written == self.out.len() {
                self.out.clear();
                self.written = 0;
                // A large buffer should not be kept for ever; each write gathers at most about a chunk more than the
                // target.
                self.out.shrink_to(2 * OUT_TARGET);
                if self.stage == Stage::Open {
                    self.put_unwanted();
                    self.peer.guest().outbox.fill(&mut self.out);
                }
            }
            let unwritten = self.written < self.out.len();
            tokio::select! {
                wrote = writer.write(&self.out[self.written..]), if unwritten => match wrote? {
                    0 => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
                    length => self.written += length,
                },
                read = read_some(&mut reader, &mut decoder, buffered) => {
                    if read? == 0 {
                        return Ok(());
                    }
                    (buffered, active) = (true, Instant::now());
                    self.take_all(&mut decoder)?;
                }
                () = self.peer.guest().outbox.wake.notified(), if !unwritten => {}
                () = sleep_until(deadline), if self.stage != Stage::Open => return Err(TalkEnd::Late),
                () = &mut idle, if buffered => {
                    if active.elapsed() >= IDLE_AFTER {
                        decoder.release_if_empty();
                        self.out.shrink_to(0);
                        buffered = false;
                    }
                    idle.as_mut().reset(active.max(Instant::now()) + IDLE_AFTER);
                }
            }
        }
    }

    fn take_all(&mut self, decoder: &mut Decoder<FromInit>) -> Result<(), TalkEnd> {
        while let Some(incoming) = decoder.next()? {
            match incoming {
                Incoming::Message(FromInit::NoCommonVersion { version_min, version_max }) => {
                    let theirs = Versions { min: version_min, max: version_max };
                    // A sandbox that is believed to be of another version is left running. So this claim is accepted
                    // only as the first message of an init that this daemon has never agreed on a version with, and
                    // only if it is true.
                    let agreed_before = self.stage != Stage::Greeting || self.ready.is_none();
                    if agreed_before || theirs.meet(versions()) {
                        return Err(Violation::BadParting { theirs }.into());
                    }
                    return Err(TalkEnd::NoCommonVersion { theirs });
                }
                Incoming::Message(message) => self.take(message)?,
                Incoming::Data { handle, stream, offset, bytes } => {
                    if self.stage != Stage::Open {
                        return Err(Violation::OutOfTurn.into());
                    }
                    match self.peer.lane(handle)? {
                        Some(lane) => lane.receive(stream, offset, bytes)?,
                        // The bytes are dropped, but init needs the acknowledgement to reach the end.
                        None => {
                            let offset = offset.saturating_add(bytes.len() as u64);
                            self.unwanted(handle)?.acks.insert(stream, offset);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn take(&mut self, message: FromInit) -> Result<(), Violation> {
        match (self.stage, message) {
            (Stage::Greeting, FromInit::Hello { version }) => {
                if !(versions().min..=versions().max).contains(&version) {
                    return Err(Violation::BadVersion { version });
                }
                (self.stage, self.version) = (Stage::Listing, version);
                Ok(())
            }
            (Stage::Listing, FromInit::Known { handle, pid, stdin }) => {
                if self.known.len() >= COMMANDS_MAX {
                    return Err(Violation::TooManyKnown);
                }
                if self.known.insert(handle, (pid, stdin)).is_some() {
                    return Err(Violation::NamedTwice { handle });
                }
                Ok(())
            }
            (Stage::Listing, FromInit::KnownEnd) => self.open(),
            (Stage::Open, message) => self.take_open(message),
            (Stage::Greeting | Stage::Listing, _) => Err(Violation::OutOfTurn),
        }
    }

    /// Compares what both sides know; from here on they are in sync.
    fn open(&mut self) -> Result<(), Violation> {
        // Before new ones may start: their handles must not collide with these.
        for handle in self.known.keys() {
            self.peer.adopt_orphan(*handle);
        }
        self.peer.guest().outbox.connect(self.version);
        self.stage = Stage::Open;
        let lanes = self.peer.lanes();
        let known = std::mem::take(&mut self.known);
        for (handle, (pid, stdin)) in &known {
            let messages = match self.peer.lane(*handle)? {
                Some(lane) => lane.resume(*pid, *stdin)?,
                // It has its result, but init does not know that yet, or has not reported the end: this makes it do so.
                None => vec![ToInit::Resume { handle: *handle, stdout: 0, stderr: 0 }],
            };
            for message in messages {
                frame::put_message(&message, &mut self.out);
            }
        }
        for lane in lanes.iter().filter(|lane| !known.contains_key(&lane.start().handle)) {
            if Arc::clone(lane).missing()? {
                put_start(lane.start(), &mut self.out);
            }
        }
        for handle in self.peer.guest().outbox.abandoned() {
            if known.contains_key(&handle) || lanes.iter().any(|lane| lane.start().handle == handle) {
                frame::put_message(&ToInit::Kill { handle }, &mut self.out);
            } else {
                self.peer.guest().outbox.forget_abandoned(handle); // Neither side knows it: it has ended.
            }
        }
        if let Some(ready) = self.ready.take() {
            let _ = ready.send(()); // No task waits for this when a sandbox is adopted.
        }
        self.peer.guest().metrics.connected();
        debug!(sandbox = %self.peer.guest().id, lanes = lanes.len(), "connected to init");
        Ok(())
    }

    /// The end of a lane that has its result, or whose caller is gone: init may forget it. Repeating this is harmless.
    fn let_go_of(&mut self, handle: Handle) -> Result<(), Violation> {
        self.peer.guest().outbox.forget_abandoned(handle);
        self.unwanted(handle)?.over = true;
        Ok(())
    }

    fn unwanted(&mut self, handle: Handle) -> Result<&mut Unwanted, Violation> {
        // Acknowledgements are merged and not queued, or an init that sends much and reads nothing would fill our
        // memory.
        if self.unwanted.len() >= COMMANDS_MAX && !self.unwanted.contains_key(&handle) {
            return Err(Violation::TooManyKnown);
        }
        Ok(self.unwanted.entry(handle).or_default())
    }

    fn put_unwanted(&mut self) {
        for (handle, Unwanted { acks, over }) in std::mem::take(&mut self.unwanted) {
            if over {
                frame::put_message(&ToInit::AckResult { handle }, &mut self.out);
                continue; // This covers everything.
            }
            for (stream, offset) in acks {
                frame::put_message(&ToInit::Ack { handle, stream, offset }, &mut self.out);
            }
        }
    }

    fn take_open(&mut self, message: FromInit) -> Result<(), Violation> {
        match message {
            FromInit::Started { handle, pid } => match self.peer.lane(handle)? {
                Some(lane) => lane.started(pid),
                None => Ok(()),
            },
            FromInit::StartFailed { handle, error } => match self.peer.lane(handle)? {
                Some(lane) => lane.failed_to_start(error),
                None => self.let_go_of(handle),
            },
            FromInit::StdinAck { handle, offset } => match self.peer.lane(handle)? {
                Some(lane) => lane.stdin_given(offset),
                None => Ok(()),
            },
            FromInit::StdinClosed { handle } => {
                if let Some(lane) = self.peer.lane(handle)? {
                    lane.stdin_closed();
                }
                Ok(())
            }
            FromInit::Ended { handle, end, stdout_end, stderr_end } => match self.peer.lane(handle)? {
                Some(lane) => lane.ended(end, [stdout_end, stderr_end]),
                None => self.let_go_of(handle),
            },
            FromInit::Pong { serial } => self.peer.guest().outbox.answered(serial),
            FromInit::Hello { .. }
            | FromInit::NoCommonVersion { .. }
            | FromInit::Known { .. }
            | FromInit::KnownEnd => Err(Violation::OutOfTurn),
        }
    }
}

/// Reads into the decoder: straight into its buffer, or through a small one while it has none. Cancel-safe.
async fn read_some(
    reader: &mut ReadHalf<GuestStream>,
    decoder: &mut Decoder<FromInit>,
    buffered: bool,
) -> io::Result<usize> {
    if buffered {
        let length = reader.read(decoder.space()).await?;
        decoder.filled(length);
        return Ok(length);
    }
    let mut small = [0; SMALL_READ];
    let length = reader.read(&mut small).await?;
    decoder.space()[..length].copy_from_slice(&small[..length]);
    decoder.filled(length);
    Ok(length)
}
