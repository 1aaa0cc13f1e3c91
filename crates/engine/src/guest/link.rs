//! The link to a sandbox's init: one task that reads and writes frames, and connects again when the stream breaks.
//!
//! Init is untrusted once guest code has run. Whatever it may not say is a [`Violation`]: the connection is closed and
//! made anew, and a sandbox that goes on like this has failed. Reading never waits for a disk, a row or a reader, so a
//! slow command delays no other; what init may send without being acknowledged is bounded by the windows of `wire`.
//!
//! Callers never touch the connection. They put what they want said into the [`Outbox`], which is empty while there is
//! no connection: everything that must survive one (starts, lengths, results) is told again by the handshake.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use runtime::{BackendError, GuestStream};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf};
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, warn};
use wire::frame::{self, Decoder, FrameError, Incoming, MESSAGE_FROM_INIT_MAX};
use wire::guest::{
    COMMANDS_MAX, End, FromInit, Handle, Start, StartError, Stream, ToInit, Versions, speaks, spoken,
};

use crate::command::Hub;
use crate::error::chain;
use crate::home::Home;
use crate::transfer::{Transfer, is_transfer};

/// Which versions of the protocol this daemon speaks.
#[used]
static SPEAKS: [u8; 29] = speaks("shoal-daemon speaks ");

/// Which versions of the protocol this daemon speaks.
pub(crate) fn versions() -> Versions {
    spoken(&SPEAKS)
}

/// How long a connection attempt may take.
const CONNECT_SECONDS: u64 = 10;
/// How long init may take to say hello and name its commands. A stopped init takes for ever, and is tried again.
const HANDSHAKE_SECONDS: u64 = 10;
/// Between two attempts to connect: at first, and at most.
const BACKOFF_MIN: Duration = Duration::from_millis(5);
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// So many violations in a row, and the sandbox has failed.
const VIOLATIONS_MAX: u32 = 5;
/// A connection that held for so long clears the count.
const FORGIVEN_AFTER: Duration = Duration::from_secs(600);
/// Requests of callers that wait for init's answer, in one sandbox.
const REQUESTS_MAX: usize = 1024;
/// Messages that wait for an init that does not listen, beyond which nobody may ask for more. What need not be asked for, starts and
/// results, is bounded by the commands.
const ITEMS_MAX: usize = 4 * COMMANDS_MAX;
/// Frames are gathered up to about this size before they are written.
const OUT_TARGET: usize = 128 * 1024;
/// After so long without traffic, a link gives its read buffer back. A thousand idle sandboxes should cost little.
const IDLE_AFTER: Duration = Duration::from_secs(5);
/// What a link reads into while it has no buffer.
const SMALL_READ: usize = 256;

/// Something init may not say.
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

/// Why something was not said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unsaid {
    /// The connection broke before init's answer.
    Broken,
    /// Too many wait already.
    TooMany,
}

/// What callers want said. Bounded: starts and results by the commands, requests by [`REQUESTS_MAX`], the rest is
/// lists in which a command is once.
#[derive(Default)]
pub(crate) struct Outbox {
    state: Mutex<OutboxState>,
    /// The link has something to send.
    wake: Notify,
    /// There is a connection.
    connected: Notify,
}

#[derive(Default)]
struct OutboxState {
    connected: bool,
    /// What was agreed on with init.
    version: u32,
    items: VecDeque<Item>,
    acks: Vec<Live>,
    stdin: VecDeque<Live>,
    pings: HashMap<u64, oneshot::Sender<()>>,
    serial: u64,
    /// Started without an answer and without a name that anyone knows: to be ended when init can hear.
    abandoned: BTreeSet<Handle>,
}

enum Item {
    Message(ToInit),
    Start(Live),
}

/// What the two sides speak about: a command or a file operation. They differ in what becomes of their bytes.
#[derive(Clone)]
enum Live {
    Command(Arc<Hub>),
    Transfer(Arc<Transfer>),
}

impl Live {
    fn start(&self) -> &Start {
        match self {
            Self::Command(hub) => &hub.start,
            Self::Transfer(transfer) => &transfer.start,
        }
    }

    fn take_acks(&self, put: impl FnMut(ToInit)) {
        match self {
            Self::Command(hub) => hub.take_acks(put),
            Self::Transfer(transfer) => transfer.take_acks(put),
        }
    }

    fn unqueue(&self) {
        match self {
            Self::Command(hub) => hub.unqueue(),
            Self::Transfer(transfer) => transfer.unqueue(),
        }
    }

    /// Appends a chunk of stdin and its end, where they are due. Tells whether there is more.
    fn put_stdin(&self, out: &mut Vec<u8>) -> bool {
        let hub = match self {
            Self::Command(hub) => hub,
            Self::Transfer(transfer) => return transfer.put_stdin(out),
        };
        let taken = hub.take_stdin();
        if !taken.bytes.is_empty() {
            let length = taken.bytes.len();
            hub.home.shared.metrics.stdin(length);
            out.extend_from_slice(&frame::data_header(hub.handle, Stream::Stdin, taken.offset, length));
            out.extend_from_slice(&taken.bytes);
        }
        if let Some(offset) = taken.end {
            frame::put_message(&ToInit::StdinEnd { handle: hub.handle, offset }, out);
        }
        taken.more
    }

    fn started(&self, pid: u32) -> Result<(), Violation> {
        match self {
            Self::Command(hub) => hub.started(pid),
            Self::Transfer(transfer) => transfer.started(pid),
        }
    }

    fn failed_to_start(&self, error: StartError) -> Result<(), Violation> {
        match self {
            Self::Command(hub) => hub.failed_to_start(error),
            Self::Transfer(transfer) => {
                transfer.failed_to_start(error);
                Ok(())
            }
        }
    }

    fn receive(&self, stream: Stream, offset: u64, bytes: &[u8]) -> Result<(), Violation> {
        match self {
            Self::Command(hub) => hub.receive(stream, offset, bytes),
            Self::Transfer(transfer) => transfer.receive(stream, offset, bytes),
        }
    }

    fn stdin_given(&self, offset: u64) -> Result<(), Violation> {
        match self {
            Self::Command(hub) => hub.stdin_given(offset),
            Self::Transfer(transfer) => transfer.stdin_given(offset),
        }
    }

    fn stdin_closed(&self) {
        match self {
            Self::Command(hub) => hub.stdin_closed(),
            Self::Transfer(transfer) => transfer.stdin_closed(),
        }
    }

    fn ended(&self, end: End, ends: [u64; 2]) -> Result<(), Violation> {
        match self {
            Self::Command(hub) => hub.ended(end, ends),
            Self::Transfer(transfer) => transfer.ended(end, ends),
        }
    }
}

/// What there is to send next.
enum Due {
    Item(Item),
    Acks(Vec<Live>),
    Stdin(Live),
}

impl Outbox {
    fn lock(&self) -> MutexGuard<'_, OutboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts something in if there is a connection.
    fn put(&self, put: impl FnOnce(&mut OutboxState)) -> bool {
        let mut state = self.lock();
        let connected = state.connected;
        if connected {
            put(&mut state);
        }
        drop(state);
        if connected {
            self.wake.notify_one();
        }
        connected
    }

    /// A command whose row was just written.
    pub fn start(&self, hub: &Arc<Hub>) {
        self.put(|state| state.items.push_back(Item::Start(Live::Command(Arc::clone(hub)))));
    }

    /// A file operation that was just taken into the table.
    pub fn start_transfer(&self, transfer: &Arc<Transfer>) {
        self.put(|state| state.items.push_back(Item::Start(Live::Transfer(Arc::clone(transfer)))));
    }

    /// As [`Self::ack`].
    pub fn ack_transfer(&self, transfer: &Arc<Transfer>) -> bool {
        self.put(|state| state.acks.push(Live::Transfer(Arc::clone(transfer))))
    }

    /// As [`Self::stdin`].
    pub fn stdin_transfer(&self, transfer: &Arc<Transfer>) -> bool {
        self.put(|state| state.stdin.push_back(Live::Transfer(Arc::clone(transfer))))
    }

    /// The version that init speaks. Waits for a connection; the caller brings the deadline.
    pub async fn version(&self) -> u32 {
        loop {
            let mut connected = std::pin::pin!(self.connected.notified());
            connected.as_mut().enable();
            {
                let state = self.lock();
                if state.connected {
                    return state.version;
                }
            }
            connected.await;
        }
    }

    /// A command has bytes that init may forget. Tells whether it was put in.
    pub fn ack(&self, hub: &Arc<Hub>) -> bool {
        self.put(|state| state.acks.push(Live::Command(Arc::clone(hub))))
    }

    /// A command has stdin to send. Tells whether it was put in.
    pub fn stdin(&self, hub: &Arc<Hub>) -> bool {
        self.put(|state| state.stdin.push_back(Live::Command(Arc::clone(hub))))
    }

    /// A command's result was stored.
    pub fn acknowledge_result(&self, handle: Handle) {
        self.lock().abandoned.remove(&handle);
        self.put(|state| state.items.push_back(Item::Message(ToInit::AckResult { handle })));
    }

    /// Ends a command as soon as init can hear.
    pub fn abandon(&self, handle: Handle) {
        self.lock().abandoned.insert(handle);
        self.put(|state| state.items.push_back(Item::Message(ToInit::Kill { handle })));
    }

    /// Says something and waits until init has read it. Waits for a connection first; the caller brings the deadline.
    pub async fn say(&self, message: Option<ToInit>) -> Result<(), Unsaid> {
        let answered = loop {
            let mut connected = std::pin::pin!(self.connected.notified());
            connected.as_mut().enable();
            if let Some(answered) = self.ask(message.clone())? {
                break answered;
            }
            connected.await;
        };
        answered.await.map_err(|_| Unsaid::Broken)
    }

    fn ask(&self, message: Option<ToInit>) -> Result<Option<oneshot::Receiver<()>>, Unsaid> {
        let mut state = self.lock();
        if !state.connected {
            return Ok(None);
        }
        if state.pings.len() >= REQUESTS_MAX {
            // Those whose caller has left no longer count.
            state.pings.retain(|_, waiting| !waiting.is_closed());
        }
        // What a caller that has left wanted said is said all the same, if init ever listens; so that has a bound of its own.
        if state.pings.len() >= REQUESTS_MAX || state.items.len() >= ITEMS_MAX {
            return Err(Unsaid::TooMany);
        }
        let (tell, told) = oneshot::channel();
        state.serial += 1;
        let serial = state.serial;
        state.items.extend(message.map(Item::Message));
        state.items.push_back(Item::Message(ToInit::Ping { serial }));
        state.pings.insert(serial, tell);
        drop(state);
        self.wake.notify_one();
        Ok(Some(told))
    }

    fn answered(&self, serial: u64) -> Result<(), Violation> {
        let mut state = self.lock();
        if let Some(waiting) = state.pings.remove(&serial) {
            // A caller that left at its deadline needs no answer.
            let _ = waiting.send(());
            return Ok(());
        }
        // Pings whose caller left may have been dropped to make room; those that were never sent were not.
        if serial <= state.serial { Ok(()) } else { Err(Violation::UnknownPong) }
    }

    /// From now on, what is put in is sent. What the handshake tells must be looked up after this, so that nothing
    /// falls between the two; said twice, it is harmless.
    fn connect(&self, version: u32) {
        let mut state = self.lock();
        (state.connected, state.version) = (true, version);
        drop(state);
        self.connected.notify_waiters();
    }

    fn disconnect(&self) {
        let mut state = self.lock();
        state.connected = false;
        state.items.clear();
        state.pings.clear();
        let acks = std::mem::take(&mut state.acks);
        let stdin = std::mem::take(&mut state.stdin);
        drop(state);
        for live in acks.iter().chain(&stdin) {
            live.unqueue();
        }
    }

    /// Whether init can be talked to at this moment.
    pub fn is_connected(&self) -> bool {
        self.lock().connected
    }

    fn due(&self) -> Option<Due> {
        let mut state = self.lock();
        if let Some(item) = state.items.pop_front() {
            return Some(Due::Item(item));
        }
        if !state.acks.is_empty() {
            return Some(Due::Acks(std::mem::take(&mut state.acks)));
        }
        state.stdin.pop_front().map(Due::Stdin)
    }

    /// Encodes what is due, up to about [`OUT_TARGET`].
    fn fill(&self, out: &mut Vec<u8>) {
        while out.len() < OUT_TARGET {
            match self.due() {
                None => return,
                Some(Due::Item(Item::Message(message))) => frame::put_message(&message, out),
                Some(Due::Item(Item::Start(live))) => put_start(live.start(), out),
                Some(Due::Acks(all)) => {
                    for live in all {
                        live.take_acks(|ack| frame::put_message(&ack, out));
                    }
                }
                Some(Due::Stdin(live)) => {
                    if live.put_stdin(out) {
                        self.put(|state| state.stdin.push_back(live)); // After the others: one chunk each in turn.
                    }
                }
            }
        }
    }
}

fn put_start(start: &Start, out: &mut Vec<u8>) {
    frame::put_message(&ToInit::Start(Box::new(start.clone())), out);
}

/// Why there is no link any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkEnd {
    /// There is no init, and there will not be one again.
    #[error("its first process has ended")]
    Gone,
    /// It broke the rules too often.
    #[error("its first process breaks the protocol: {0}")]
    Hostile(Violation),
    /// It is of another age.
    #[error("its first process speaks versions {} to {} of the protocol, this daemon {} to {}",
        theirs.min, theirs.max, versions().min, versions().max)]
    NoCommonVersion { theirs: Versions },
    /// The task panicked.
    #[error("the daemon has a bug that shows with its first process")]
    Bug,
    /// After a restart, what its commands wrote cannot be found: without it, init would be told that it is stored.
    #[error("the output of its commands cannot be read: {0}")]
    Unreadable(String),
}

/// Keeps a sandbox connected until that is over. `ready` is told after the first handshake.
pub(crate) async fn keep_connected(home: Arc<Home>, ready: oneshot::Sender<()>) -> LinkEnd {
    let mut ready = Some(ready);
    let mut backoff = BACKOFF_MIN;
    let mut violations = 0;
    let mut reported = false;
    loop {
        let stream = match connect(&home).await {
            Ok(stream) => stream,
            Err(BackendError::Gone) => return LinkEnd::Gone,
            Err(error) => {
                if !std::mem::replace(&mut reported, true) {
                    warn!(sandbox = %home.id, error = chain(&error), "cannot connect to init; trying on");
                }
                tokio::time::sleep(backoff).await;
                backoff = (backoff * 2).min(BACKOFF_MAX);
                continue;
            }
        };
        let since = Instant::now();
        let (greeted, end) = {
            // However this ends, also when the task is dropped, nobody puts anything in for a dead connection.
            let _disconnect = Disconnect(&home.outbox);
            let mut talk = Talk::new(&home, &mut ready);
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
            TalkEnd::Closed => debug!(sandbox = %home.id, "init closed the connection"),
            TalkEnd::Broken(error) => debug!(sandbox = %home.id, %error, "the connection to init broke"),
            TalkEnd::Late => {
                if !std::mem::replace(&mut reported, true) {
                    warn!(sandbox = %home.id, "init does not say hello; trying on");
                }
            }
            TalkEnd::Violation(violation) => {
                violations += 1;
                home.shared.metrics.violated();
                warn!(sandbox = %home.id, %violation, violations, "init broke the protocol; connecting anew");
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

async fn connect(home: &Home) -> Result<GuestStream, BackendError> {
    let late = |_| BackendError::Late { doing: "connect to init", seconds: CONNECT_SECONDS };
    timeout(Duration::from_secs(CONNECT_SECONDS), home.shared.backend.connect(home.id)).await.map_err(late)?
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
    /// Init names its commands.
    Listing,
    /// Everything may be said.
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
    home: &'a Arc<Home>,
    ready: &'a mut Option<oneshot::Sender<()>>,
    stage: Stage,
    version: u32,
    known: BTreeMap<Handle, (Option<u32>, u64)>,
    /// What is to be said of commands that have their results, and that init has not forgotten.
    unwanted: BTreeMap<Handle, Unwanted>,
    /// Encoded and not yet written.
    out: Vec<u8>,
    written: usize,
}

impl<'a> Talk<'a> {
    fn new(home: &'a Arc<Home>, ready: &'a mut Option<oneshot::Sender<()>>) -> Self {
        Self {
            home,
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
                // A burst should not be held for ever; what is gathered ends within a chunk of the target.
                self.out.shrink_to(2 * OUT_TARGET);
                if self.stage == Stage::Open {
                    self.put_unwanted();
                    self.home.outbox.fill(&mut self.out);
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
                () = self.home.outbox.wake.notified(), if !unwritten => {}
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
                    // What is believed here is left running. So it is believed as the first word of an init that this daemon
                    // has never agreed with, and only where it is true.
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
                    match self.live(handle)? {
                        Some(live) => live.receive(stream, offset, bytes)?,
                        // Nobody wants them, and init must get rid of them to come to the end.
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

    /// Everything both sides know is compared; from here on the two are in step.
    fn open(&mut self) -> Result<(), Violation> {
        // Before anybody may start new ones: their handles must not be those of these.
        for handle in self.known.keys().filter(|handle| is_transfer(**handle)) {
            if self.home.transfers.live(*handle).is_none() {
                self.home.transfers.adopt_orphan(self.home, *handle);
            }
        }
        self.home.outbox.connect(self.version);
        self.stage = Stage::Open;
        let live = self.home.live_commands();
        let known = std::mem::take(&mut self.known);
        for (handle, (pid, stdin)) in &known {
            if let Some(transfer) = self.home.transfers.live(*handle) {
                for message in transfer.resume(*pid, *stdin)? {
                    frame::put_message(&message, &mut self.out);
                }
                continue;
            }
            match self.home.live(*handle)? {
                Some(hub) => frame::put_message(&hub.resume(*pid, *stdin)?, &mut self.out),
                // It has its result, and init has not heard so, or has not told of the end: then it does now.
                None => {
                    let resume = ToInit::Resume { handle: *handle, stdout: 0, stderr: 0 };
                    frame::put_message(&resume, &mut self.out);
                }
            }
        }
        for hub in live.iter().filter(|hub| !known.contains_key(&hub.handle)) {
            if hub.was_started() {
                return Err(Violation::Forgotten { handle: hub.handle });
            }
            hub.restart();
            put_start(&hub.start, &mut self.out);
        }
        for transfer in self.home.transfers.all().iter().filter(|it| !known.contains_key(&it.handle)) {
            if transfer.restart() {
                put_start(&transfer.start, &mut self.out);
            } else {
                transfer.lost();
            }
        }
        let abandoned = self.home.outbox.lock().abandoned.clone();
        for handle in abandoned {
            let is_live = known.contains_key(&handle)
                || self.home.transfers.live(handle).is_some()
                || live.iter().any(|hub| hub.handle == handle);
            if is_live {
                frame::put_message(&ToInit::Kill { handle }, &mut self.out);
            } else {
                self.home.outbox.lock().abandoned.remove(&handle); // Neither side knows it: it has ended.
            }
        }
        if let Some(ready) = self.ready.take() {
            let _ = ready.send(()); // Nobody waits when a sandbox is adopted.
        }
        self.home.shared.metrics.connected();
        debug!(sandbox = %self.home.id, commands = live.len(), "connected to init");
        Ok(())
    }

    /// What a handle means. `None`: its result is stored, or nobody wants it; said again, it is harmless.
    fn live(&self, handle: Handle) -> Result<Option<Live>, Violation> {
        if is_transfer(handle) {
            return Ok(self.home.transfers.live(handle).map(Live::Transfer));
        }
        Ok(self.home.live(handle)?.map(Live::Command))
    }

    /// The end of something that has its result, or that nobody wants: init may forget it. Said twice, it is harmless.
    fn let_go_of(&mut self, handle: Handle) -> Result<(), Violation> {
        self.home.outbox.lock().abandoned.remove(&handle);
        self.unwanted(handle)?.over = true;
        Ok(())
    }

    fn unwanted(&mut self, handle: Handle) -> Result<&mut Unwanted, Violation> {
        // What is to be said is gathered and not queued, or an init that says much and hears nothing would fill our memory.
        if self.unwanted.len() >= COMMANDS_MAX && !self.unwanted.contains_key(&handle) {
            return Err(Violation::TooManyKnown);
        }
        Ok(self.unwanted.entry(handle).or_default())
    }

    fn put_unwanted(&mut self) {
        for (handle, Unwanted { acks, over }) in std::mem::take(&mut self.unwanted) {
            if over {
                frame::put_message(&ToInit::AckResult { handle }, &mut self.out);
                continue; // It covers everything.
            }
            for (stream, offset) in acks {
                frame::put_message(&ToInit::Ack { handle, stream, offset }, &mut self.out);
            }
        }
    }

    fn take_open(&mut self, message: FromInit) -> Result<(), Violation> {
        match message {
            FromInit::Started { handle, pid } => match self.live(handle)? {
                Some(live) => live.started(pid),
                None => Ok(()),
            },
            FromInit::StartFailed { handle, error } => match self.live(handle)? {
                Some(live) => live.failed_to_start(error),
                None => self.let_go_of(handle),
            },
            FromInit::StdinAck { handle, offset } => match self.live(handle)? {
                Some(live) => live.stdin_given(offset),
                None => Ok(()),
            },
            FromInit::StdinClosed { handle } => {
                if let Some(live) = self.live(handle)? {
                    live.stdin_closed();
                }
                Ok(())
            }
            FromInit::Ended { handle, end, stdout_end, stderr_end } => match self.live(handle)? {
                Some(live) => live.ended(end, [stdout_end, stderr_end]),
                None => self.let_go_of(handle),
            },
            FromInit::Pong { serial } => self.home.outbox.answered(serial),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// An init that is stopped with its connection open: every caller leaves at its deadline, and others come.
    #[test]
    fn what_waits_for_an_init_that_does_not_listen_has_a_bound() {
        let outbox = Outbox::default();
        outbox.connect(versions().max);
        let signal = ToInit::Signal { handle: Handle(1), signal: 1 };
        let mut refused = 0;
        for _ in 0..100_000 {
            // Dropped, as by a caller that has left.
            refused += u32::from(outbox.ask(Some(signal.clone())).is_err());
        }
        assert!(refused > 0);
        let state = outbox.lock();
        assert!(state.items.len() <= ITEMS_MAX + 1, "{} messages", state.items.len());
        assert!(state.pings.len() <= REQUESTS_MAX, "{} callers", state.pings.len());
    }
}
