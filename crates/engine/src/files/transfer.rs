//! One file operation under way: bytes straight from init to the caller, and back.
//!
//! A transfer has the streams of a command and nothing of its permanence: no row, no log. What init sends waits in memory, at
//! most the window of each stream, until the caller takes it, and is acknowledged then; so a slow caller slows the guest down
//! and nobody else. If the caller goes away the operation is killed. If the daemon dies, the next one finds an operation that it
//! does not know, and ends it.
//!
//! Handles of transfers are in the upper half of all handles, so that they never meet those of commands, whose rows outlive the
//! daemon. They are given out in a circle, past those that are in use.

use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{debug, warn};
use wire::files::{FileDone, FileOp, GrepWith, RESULT_MAX, result_from_bytes};
use wire::frame::{self, CHUNK_MAX};
use wire::guest::{
    Cwd, End, EndCause, ExitStatus, Handle, OUTPUT_WINDOW, Program, STDIN_WINDOW, Start, StartError, Stream,
    ToInit,
};

use crate::command::ANSWER_SECONDS;
use crate::error::EngineError;
use crate::guest::{Lane, Violation};
use crate::observe::metrics::FileMeter;
use crate::observe::timing;
use crate::sandbox::activity::Use;
use crate::sandbox::live::LiveSandbox;

/// File operations at once in one sandbox. More wait for a moment.
pub const TRANSFERS_MAX: usize = 64;
/// Watches at once in one sandbox: they stay, and must not keep others from their places.
pub const WATCHES_MAX: usize = 64;
/// How long a caller waits for a place among them.
const PLACE_SECONDS: u64 = 30;
/// How long the guest may give or take nothing while the caller waits for it.
pub const IDLE_SECONDS: u64 = 60;
/// How long the caller may take nothing of what waits for it.
pub const TAKE_SECONDS: u64 = 60;
/// How much longer than its own limit a search may take before init ends it.
const SEARCH_MARGIN_MS: u64 = 10_000;
/// How long a rehearsal may take. Nobody waits for it but a pool.
const REHEARSAL_SECONDS: u64 = 5;
/// A shell and a program, whatever they are in this template.
const REHEARSAL: &str = "exec true";
/// Handles of transfers have this bit.
const HANDLE_BIT: u32 = 1 << 31;
const SIGKILL: i32 = 9;

/// Whether a handle is a transfer's.
pub(crate) fn is_transfer(handle: Handle) -> bool {
    handle.0 & HANDLE_BIT != 0
}

/// A sandbox's transfers.
pub(crate) struct Transfers {
    state: Mutex<TransfersState>,
    places: Arc<Semaphore>,
    watches: Arc<Semaphore>,
}

#[derive(Default)]
struct TransfersState {
    closed: bool,
    last: u32,
    live: BTreeMap<Handle, Arc<Transfer>>,
}

impl Default for Transfers {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            places: Arc::new(Semaphore::new(TRANSFERS_MAX)),
            watches: Arc::new(Semaphore::new(WATCHES_MAX)),
        }
    }
}

impl Transfers {
    fn lock(&self) -> MutexGuard<'_, TransfersState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The transfer with this handle, if it is under way.
    pub fn live(&self, handle: Handle) -> Option<Arc<Transfer>> {
        self.lock().live.get(&handle).cloned()
    }

    /// All that are under way.
    pub fn all(&self) -> Vec<Arc<Transfer>> {
        self.lock().live.values().cloned().collect()
    }

    /// How many are under way.
    pub fn count(&self) -> usize {
        self.lock().live.len()
    }

    /// One that init has and nobody here knows: of a daemon that died. It ends as if its caller had left.
    pub fn adopt_orphan(&self, live: &Arc<LiveSandbox>, handle: Handle) -> Arc<Transfer> {
        let orphan = Transfer::new(live, start(handle, None, None), None);
        orphan.lock().abandoned = true;
        self.lock().live.insert(handle, Arc::clone(&orphan));
        orphan
    }

    fn forget(&self, handle: Handle) {
        self.lock().live.remove(&handle);
    }

    /// No more transfers; those under way end.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let live = std::mem::take(&mut state.live);
        drop(state);
        for transfer in live.into_values() {
            transfer.end(Ending::SandboxGone);
        }
    }

    fn insert(
        &self,
        live: &Arc<LiveSandbox>,
        make: impl FnOnce(Handle) -> Arc<Transfer>,
    ) -> Result<Arc<Transfer>, EngineError> {
        let mut state = self.lock();
        if state.closed {
            drop(state);
            return Err(live.wrong_state());
        }
        let handle = loop {
            // In a circle; there are far fewer places than handles, so a free one is found soon.
            state.last = (state.last + 1) & !HANDLE_BIT;
            let handle = Handle(state.last | HANDLE_BIT);
            if !state.live.contains_key(&handle) {
                break handle;
            }
        };
        let transfer = make(handle);
        state.live.insert(handle, Arc::clone(&transfer));
        Ok(transfer)
    }
}

fn start(handle: Handle, op: Option<FileOp>, user: Option<String>) -> Start {
    let op = op.unwrap_or(FileOp::Pack { path: Vec::new() });
    // A search ends by itself; unless something in the guest stops it.
    let timeout_ms = match &op {
        FileOp::Glob { limits, .. } => Some(limits.milliseconds),
        FileOp::Grep(grep) | FileOp::GrepWith(GrepWith { grep, .. }) => Some(grep.limits.milliseconds),
        _ => None,
    };
    Start {
        handle,
        id: format!("files-{}", handle.0 & !HANDLE_BIT),
        stdin: op.takes_input(),
        program: Program::Files(Box::new(op)),
        env: Vec::new(),
        cwd: Cwd::Default("/".into()),
        user,
        terminal: None,
        timeout_ms: timeout_ms.map(|limit| limit.saturating_add(SEARCH_MARGIN_MS)),
        idle_timeout_ms: None,
        grace_ms: 0,
    }
}

/// Lets a sandbox that nobody uses yet run something, so that its first command finds everything looked up: the first one of all
/// takes a quarter longer than those after it. Whether it succeeds is of no meaning, since a template need not have a shell.
pub(crate) async fn rehearse(live: &Arc<LiveSandbox>) {
    let limit = Duration::from_secs(REHEARSAL_SECONDS);
    if timeout(limit, live.outbox.version()).await.is_err() {
        return; // Whoever looks after the pool finds out.
    }
    let program = Program::Shell { script: REHEARSAL.into() };
    let timeout_ms = Some(REHEARSAL_SECONDS * 1000);
    let begun = live.transfers.insert(live, |handle| {
        Transfer::new(live, Start { program, timeout_ms, ..start(handle, None, None) }, None)
    });
    let Ok(transfer) = begun else { return };
    live.outbox.start(Arc::clone(&transfer) as Arc<dyn Lane>);
    let over = |state: &mut TransferState| match state.ending {
        Some(_) => ControlFlow::Break(()),
        None => ControlFlow::Continue(()),
    };
    if timeout(limit, transfer.until(over)).await.is_err() {
        transfer.abandon();
    }
}

/// See the head of this file.
pub(crate) struct Transfer {
    live: Arc<LiveSandbox>,
    pub handle: Handle,
    pub start: Arc<Start>,
    state: Mutex<TransferState>,
    changed: Notify,
}

struct TransferState {
    pid: Option<u32>,
    ending: Option<Ending>,
    output: [Outgoing; 2],
    input: Input,
    /// Nobody wants it any more: what comes is dropped, and its end is acknowledged.
    abandoned: bool,
    /// The caller took nothing for too long.
    stalled: bool,
    /// When the caller last took something, or there was nothing to take.
    taken_at: Instant,
    ack_queued: bool,
    stdin_queued: bool,
    /// Given back at the end.
    place: Option<OwnedSemaphorePermit>,
}

#[derive(Debug, Clone)]
enum Ending {
    Guest(End),
    FailedToStart(StartError),
    SandboxGone,
}

/// What init sent of a stream.
#[derive(Default)]
struct Outgoing {
    waiting: VecDeque<Bytes>,
    received: u64,
    taken: u64,
    acknowledged: u64,
}

/// What the caller gave, and init has not confirmed.
#[derive(Default)]
struct Input {
    chunks: VecDeque<Bytes>,
    /// Where the chunks begin.
    base: u64,
    accepted: u64,
    given: u64,
    sent: u64,
    end: bool,
    end_sent: bool,
    closed: bool,
}

impl Input {
    fn room(&self) -> u64 {
        (self.given + STDIN_WINDOW as u64).saturating_sub(self.accepted)
    }

    fn is_due(&self) -> bool {
        !self.closed && (self.sent < self.accepted || (self.end && !self.end_sent))
    }

    fn forget_until(&mut self, offset: u64) {
        while let Some(first) = self.chunks.front_mut()
            && self.base < offset
        {
            let length = (offset - self.base).min(first.len() as u64);
            first.advance(length as usize);
            self.base += length;
            if first.is_empty() {
                self.chunks.pop_front();
            }
        }
    }

    /// Appends up to a chunk of what was not sent.
    fn put_chunk(&mut self, handle: Handle, out: &mut Vec<u8>) {
        let length = (self.accepted - self.sent).min(CHUNK_MAX as u64) as usize;
        if length == 0 {
            return;
        }
        out.extend_from_slice(&frame::data_header(handle, Stream::Stdin, self.sent, length));
        let (mut skip, mut left) = ((self.sent - self.base) as usize, length);
        for chunk in &self.chunks {
            if skip >= chunk.len() {
                skip -= chunk.len();
                continue;
            }
            let piece = &chunk[skip..chunk.len().min(skip + left)];
            out.extend_from_slice(piece);
            (skip, left) = (0, left - piece.len());
            if left == 0 {
                break;
            }
        }
        self.sent += length as u64;
    }
}

fn index(stream: Stream) -> Option<usize> {
    match stream {
        Stream::Stdin => None,
        Stream::Stdout => Some(0),
        Stream::Stderr => Some(1),
    }
}

impl Transfer {
    fn new(live: &Arc<LiveSandbox>, start: Start, place: Option<OwnedSemaphorePermit>) -> Arc<Self> {
        Arc::new(Self {
            live: Arc::clone(live),
            handle: start.handle,
            start: Arc::new(start),
            state: Mutex::new(TransferState {
                pid: None,
                ending: None,
                output: [Outgoing::default(), Outgoing::default()],
                input: Input::default(),
                abandoned: false,
                stalled: false,
                taken_at: Instant::now(),
                ack_queued: false,
                stdin_queued: false,
                place,
            }),
            changed: Notify::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, TransferState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn until<T>(&self, mut check: impl FnMut(&mut TransferState) -> ControlFlow<T>) -> T {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // From here on no change is missed.
            changed.as_mut().enable();
            if let ControlFlow::Break(value) = check(&mut self.lock()) {
                return value;
            }
            changed.await;
        }
    }

    // What init says. Untrusted.

    /// It runs.
    pub fn started(&self, pid: u32) -> Result<(), Violation> {
        let mut state = self.lock();
        match state.pid {
            Some(known) if known != pid => return Err(Violation::AnotherPid { handle: self.handle }),
            Some(_) => return Ok(()),
            None => state.pid = Some(pid),
        }
        drop(state);
        self.changed.notify_waiters();
        Ok(())
    }

    /// It did not start.
    pub fn failed_to_start(&self, error: StartError) {
        self.live.outbox.acknowledge_result(self.handle);
        self.live.transfers.forget(self.handle);
        self.end(Ending::FailedToStart(error));
    }

    /// Bytes of a stream.
    pub fn receive(self: &Arc<Self>, stream: Stream, offset: u64, bytes: &[u8]) -> Result<(), Violation> {
        let Some(at) = index(stream) else { return Err(Violation::StdinFromInit { handle: self.handle }) };
        let mut state = self.lock();
        let state = &mut *state;
        let end = offset + bytes.len() as u64;
        let output = &mut state.output[at];
        if state.abandoned {
            // Nobody takes them, and the operation cannot end while they wait.
            output.received = output.received.max(end);
            output.taken = output.received;
            self.offer_acks(state);
            return Ok(());
        }
        if offset > output.received {
            return Err(Violation::Gap { expected: output.received, found: offset });
        }
        if end > output.acknowledged + OUTPUT_WINDOW as u64 {
            return Err(Violation::BeyondWindow { end, acknowledged: output.acknowledged });
        }
        // Bytes that came before are said again on a new connection.
        let known = ((output.received - offset) as usize).min(bytes.len());
        if known == bytes.len() {
            return Ok(());
        }
        if output.waiting.is_empty() {
            state.taken_at = Instant::now();
        }
        output.waiting.push_back(Bytes::copy_from_slice(&bytes[known..]));
        output.received = end;
        self.changed.notify_waiters();
        Ok(())
    }

    /// It is over.
    pub fn ended(&self, end: End, ends: [u64; 2]) -> Result<(), Violation> {
        let state = self.lock();
        for (output, end) in state.output.iter().zip(ends) {
            if !state.abandoned && output.received != end {
                let received = output.received;
                return Err(Violation::BadEnd { handle: self.handle, end, received });
            }
        }
        drop(state);
        // What is left to take is in memory: init may forget it all.
        self.live.outbox.acknowledge_result(self.handle);
        self.live.transfers.forget(self.handle);
        self.end(Ending::Guest(end));
        Ok(())
    }

    /// Input up to `offset` was given to it.
    pub fn stdin_given(self: &Arc<Self>, offset: u64) -> Result<(), Violation> {
        let mut state = self.lock();
        let input = &mut state.input;
        if offset < input.given || offset > input.sent {
            return Err(Violation::BadStdinAck { handle: self.handle, offset, sent: input.sent });
        }
        input.given = offset;
        input.forget_until(offset);
        drop(state);
        self.changed.notify_waiters();
        Ok(())
    }

    /// It wants no more input: it has failed, and says why at its end.
    pub fn stdin_closed(&self) {
        let mut state = self.lock();
        state.input.closed = true;
        state.input.chunks.clear();
        drop(state);
        self.changed.notify_waiters();
    }

    /// A new connection: init has it, and so much of its input. Tells what to say to init.
    pub fn resume(self: &Arc<Self>, pid: Option<u32>, taken: u64) -> Result<Vec<ToInit>, Violation> {
        let handle = self.handle;
        let mut state = self.lock();
        if let (Some(known), Some(pid)) = (state.pid, pid)
            && known != pid
        {
            return Err(Violation::AnotherPid { handle });
        }
        state.pid = state.pid.or(pid);
        let abandoned = state.abandoned;
        let input = &mut state.input;
        if !abandoned {
            if taken < input.base || taken > input.accepted {
                return Err(Violation::BadStdinAck { handle, offset: taken, sent: input.sent });
            }
            (input.sent, input.end_sent) = (taken, false);
        }
        for output in &mut state.output {
            output.acknowledged = output.taken;
        }
        let [stdout, stderr] = [state.output[0].taken, state.output[1].taken];
        self.offer_stdin(&mut state);
        drop(state);
        self.changed.notify_waiters();
        let resume = ToInit::Resume { handle, stdout, stderr };
        Ok(if abandoned { vec![ToInit::Kill { handle }, resume] } else { vec![resume] })
    }

    /// A new connection: init does not have it, and is told again to start it. `false`: it had it once, so it is lost; or nobody
    /// wants it any more.
    pub fn restart(self: &Arc<Self>) -> bool {
        let mut state = self.lock();
        if state.pid.is_some() || state.abandoned {
            return false;
        }
        (state.input.sent, state.input.end_sent) = (state.input.base, false);
        self.offer_stdin(&mut state);
        true
    }

    /// Init has lost it.
    pub fn lost(&self) {
        // Takes it out of the lists, and is of no meaning to an init that does not know it.
        self.live.outbox.acknowledge_result(self.handle);
        self.live.transfers.forget(self.handle);
        self.end(Ending::SandboxGone);
    }

    fn end(&self, ending: Ending) {
        let mut state = self.lock();
        state.ending.get_or_insert(ending);
        state.place = None;
        drop(state);
        self.changed.notify_waiters();
    }

    // What the link sends.

    fn offer_acks(self: &Arc<Self>, state: &mut TransferState) {
        let due = state.output.iter().any(|output| output.taken > output.acknowledged);
        if due && state.ending.is_none() && !state.ack_queued {
            state.ack_queued = self.live.outbox.ack(Arc::clone(self) as Arc<dyn Lane>);
        }
    }

    fn offer_stdin(self: &Arc<Self>, state: &mut TransferState) {
        if state.input.is_due() && state.ending.is_none() && !state.stdin_queued {
            state.stdin_queued = self.live.outbox.stdin(Arc::clone(self) as Arc<dyn Lane>);
        }
    }

    /// Acknowledgements that init has not been told.
    pub fn take_acks(&self, mut put: impl FnMut(ToInit)) {
        let mut state = self.lock();
        state.ack_queued = false;
        if state.ending.is_some() {
            return;
        }
        for (output, stream) in state.output.iter_mut().zip([Stream::Stdout, Stream::Stderr]) {
            if output.taken > output.acknowledged {
                output.acknowledged = output.taken;
                put(ToInit::Ack { handle: self.handle, stream, offset: output.taken });
            }
        }
    }

    /// Appends a chunk of input and its end, where they are due. Tells whether there is more.
    pub fn put_stdin(&self, out: &mut Vec<u8>) -> bool {
        let mut state = self.lock();
        let handle = self.handle;
        let over = state.ending.is_some() || state.abandoned;
        let input = &mut state.input;
        if input.closed || over {
            state.stdin_queued = false;
            return false;
        }
        input.put_chunk(handle, out);
        if input.end && input.sent == input.accepted && !input.end_sent {
            input.end_sent = true;
            frame::put_message(&ToInit::StdinEnd { handle, offset: input.accepted }, out);
        }
        let more = input.is_due();
        state.stdin_queued = more;
        more
    }

    /// The connection is gone, and the link's lists with it.
    pub fn unqueue(&self) {
        let mut state = self.lock();
        (state.ack_queued, state.stdin_queued) = (false, false);
    }

    /// Nobody wants it any more.
    fn abandon(self: &Arc<Self>) {
        let mut state = self.lock();
        if state.ending.is_some() || std::mem::replace(&mut state.abandoned, true) {
            return;
        }
        for output in &mut state.output {
            output.waiting.clear();
            output.taken = output.received;
        }
        state.input.chunks.clear();
        self.offer_acks(&mut state);
        drop(state);
        self.live.outbox.abandon(self.handle);
        self.changed.notify_waiters();
    }

    /// Lets go of a caller that leaves waiting what it asked for. Holds the transfer only while it looks.
    async fn watch_taking(transfer: Weak<Self>) {
        while let Some(again) = transfer.upgrade().and_then(|transfer| transfer.look_at_taking()) {
            tokio::time::sleep_until(again).await;
        }
    }

    /// When to look again; `None` when there is nothing more to look at.
    fn look_at_taking(self: &Arc<Self>) -> Option<Instant> {
        let limit = Duration::from_secs(TAKE_SECONDS);
        let now = Instant::now();
        let mut state = self.lock();
        if state.ending.is_some() || state.abandoned {
            return None;
        }
        let waits = state.output.iter().any(|output| !output.waiting.is_empty());
        let deadline = if waits { state.taken_at + limit } else { now + limit };
        if deadline > now {
            return Some(deadline);
        }
        state.stalled = true;
        drop(state);
        warn!(sandbox = %self.live.id, "a caller that took nothing of a file for {TAKE_SECONDS} s was let go");
        self.abandon();
        None
    }
}

/// How long the guest may be silent while its caller waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    /// [`IDLE_SECONDS`]
    Idle,
    /// As long as the caller stays.
    Endless,
}

/// A transfer in the hands of its caller. Dropping it ends the operation.
pub(crate) struct Running {
    transfer: Arc<Transfer>,
    patience: Patience,
    /// The sandbox's memory kills when it began, where that is known.
    oom_kills_before: Option<u64>,
    _using: Use,
    /// Set once it has begun.
    meter: Option<FileMeter>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.transfer.abandon();
    }
}

/// Among which transfers it is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Short,
    Watch,
}

impl Running {
    /// Starts an operation, and waits until init has it.
    pub async fn start(
        live: &Arc<LiveSandbox>,
        op: FileOp,
        user: Option<String>,
        patience: Patience,
        place: Place,
    ) -> Result<Self, EngineError> {
        let meter = FileMeter::start(&live.shared, &op);
        let begun = Self::begin(live, op, user, patience, place);
        let mut begun = timing::FILE_START.watch(&live.shared.metrics, live.id, begun).await;
        match &mut begun {
            Ok(running) => running.meter = Some(meter),
            Err(_) => meter.conclude(&begun),
        }
        begun
    }

    async fn begin(
        live: &Arc<LiveSandbox>,
        op: FileOp,
        user: Option<String>,
        patience: Patience,
        place: Place,
    ) -> Result<Self, EngineError> {
        if !live.state().takes_commands() {
            return Err(live.wrong_state());
        }
        let using = live.begin_use()?;
        let (places, limit) = match place {
            Place::Short => (&live.transfers.places, TRANSFERS_MAX),
            Place::Watch => (&live.transfers.watches, WATCHES_MAX),
        };
        let waiting = timeout(Duration::from_secs(PLACE_SECONDS), Arc::clone(places).acquire_owned());
        let Ok(Ok(place)) = waiting.await else {
            let what = format!("sandbox `{}` has {limit} file operations under way", live.id);
            return Err(EngineError::Full { what });
        };
        let deadline = Instant::now() + Duration::from_secs(ANSWER_SECONDS);
        let unresponsive = |_| EngineError::Unresponsive { id: live.id };
        // Not before there is a connection: after a restart, init may have operations whose handles are not known yet.
        let version = timeout_at(deadline, live.outbox.version()).await.map_err(unresponsive)?;
        if version < op.since() {
            return Err(EngineError::InitTooOld { id: live.id, version });
        }
        let oom_kills_before = live.oom_kills().await;
        let transfer = live
            .transfers
            .insert(live, |handle| Transfer::new(live, start(handle, Some(op), user), Some(place)))?;
        live.outbox.start(Arc::clone(&transfer) as Arc<dyn Lane>);
        let running = Self { transfer, patience, oom_kills_before, _using: using, meter: None };
        let answered = running.transfer.until(|state| {
            if state.pid.is_some() || state.ending.is_some() {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        timeout_at(deadline, answered).await.map_err(unresponsive)?;
        debug!(sandbox = %live.id, handle = running.transfer.handle.0, "file operation started");
        Ok(running)
    }

    /// Watches over a caller that takes a long stream in its own time.
    pub fn watch_taking(&self) {
        let transfer = Arc::downgrade(&self.transfer);
        self.transfer.live.shared.runtime.spawn(Transfer::watch_taking(transfer));
    }

    async fn patiently<T>(&self, wait: impl Future<Output = T>) -> Result<T, EngineError> {
        match self.patience {
            Patience::Endless => Ok(wait.await),
            Patience::Idle => timeout(Duration::from_secs(IDLE_SECONDS), wait)
                .await
                .map_err(|_| EngineError::Unresponsive { id: self.transfer.live.id }),
        }
    }

    /// The next bytes of stdout; `None` at its end, whatever that is. Cancel-safe.
    pub async fn next(&self) -> Result<Option<Bytes>, EngineError> {
        let next = self.patiently(self.transfer.until(|state| take(state, 0))).await??;
        if let Some(bytes) = &next {
            self.transfer.live.shared.metrics.file_bytes_out(bytes.len());
            let mut state = self.transfer.lock();
            self.transfer.offer_acks(&mut state);
        }
        Ok(next)
    }

    /// Hands over bytes; waits while the window is full. `false`: the operation takes no more, and its result says why.
    pub async fn give(&self, mut bytes: Bytes) -> Result<bool, EngineError> {
        while !bytes.is_empty() {
            let room = self.transfer.until(|state| {
                if state.input.closed || state.ending.is_some() {
                    return ControlFlow::Break(None);
                }
                match state.input.room() {
                    0 => ControlFlow::Continue(()),
                    room => ControlFlow::Break(Some(room)),
                }
            });
            let Some(room) = self.patiently(room).await? else { return Ok(false) };
            let fits = usize::try_from(room).unwrap_or(usize::MAX).min(bytes.len());
            let mut state = self.transfer.lock();
            if state.input.closed {
                return Ok(false);
            }
            self.transfer.live.shared.metrics.file_bytes_in(fits);
            state.input.accepted += fits as u64;
            state.input.chunks.push_back(bytes.split_to(fits));
            self.transfer.offer_stdin(&mut state);
        }
        Ok(true)
    }

    /// No more bytes.
    pub fn end_input(&self) {
        let mut state = self.transfer.lock();
        state.input.end = true;
        self.transfer.offer_stdin(&mut state);
    }

    /// What came of it, when it is over. What is left of stdout is dropped.
    pub async fn result(&self) -> Result<FileDone, EngineError> {
        let result = self.result_unmeasured().await;
        if let Some(meter) = &self.meter {
            meter.conclude(&result);
        }
        result
    }

    async fn result_unmeasured(&self) -> Result<FileDone, EngineError> {
        let mut result = Vec::new();
        loop {
            let next = self.transfer.until(|state| {
                // Stdout first: the operation may wait for somebody to take it.
                if let ControlFlow::Break(Ok(Some(_))) = take(state, 0) {
                    return ControlFlow::Break(Ok(None));
                }
                match take(state, 1) {
                    ControlFlow::Break(Ok(Some(bytes))) => ControlFlow::Break(Ok(Some(bytes))),
                    ControlFlow::Break(Ok(None)) => ControlFlow::Break(Ok(Some(Bytes::new()))),
                    ControlFlow::Break(Err(error)) => ControlFlow::Break(Err(error)),
                    ControlFlow::Continue(()) => ControlFlow::Continue(()),
                }
            });
            let next = self.patiently(next).await??;
            {
                let mut state = self.transfer.lock();
                self.transfer.offer_acks(&mut state);
            }
            match next {
                None => {}
                Some(bytes) if bytes.is_empty() => break,
                Some(bytes) if result.len() + bytes.len() > RESULT_MAX => return Err(self.strange()),
                Some(bytes) => result.extend_from_slice(&bytes),
            }
        }
        let ending = self.transfer.lock().ending.clone();
        match ending {
            Some(Ending::FailedToStart(error)) => Err(EngineError::FileNotStarted { why: error }),
            Some(Ending::SandboxGone) | None => Err(self.transfer.live.wrong_state()),
            Some(Ending::Guest(end)) => match result_from_bytes(&result) {
                Some(Ok(done)) => Ok(done),
                Some(Err(source)) => Err(EngineError::File { source }),
                None => Err(self.without_result(end).await),
            },
        }
    }

    /// Init, or who took its place, says what it may not.
    pub fn strange(&self) -> EngineError {
        EngineError::FileStrange { id: self.transfer.live.id }
    }

    /// It ended without a word: something killed it.
    async fn without_result(&self, end: End) -> EngineError {
        let live = &self.transfer.live;
        let killed = end.cause == EndCause::Itself && end.status == ExitStatus::Signal(SIGKILL);
        if killed && live.claim_oom_kill(self.oom_kills_before).await.is_some() {
            return EngineError::FileOutOfMemory { id: live.id };
        }
        EngineError::FileKilled { id: live.id }
    }
}

/// What waits of a stream. Breaks with `None` at its end.
#[allow(clippy::type_complexity)] // Only the two above see it.
fn take(state: &mut TransferState, at: usize) -> ControlFlow<Result<Option<Bytes>, EngineError>> {
    if state.stalled {
        return ControlFlow::Break(Err(EngineError::FileStalled));
    }
    let output = &mut state.output[at];
    if let Some(bytes) = output.waiting.pop_front() {
        output.taken += bytes.len() as u64;
        state.taken_at = Instant::now();
        return ControlFlow::Break(Ok(Some(bytes)));
    }
    match state.ending {
        Some(_) => ControlFlow::Break(Ok(None)),
        None => ControlFlow::Continue(()),
    }
}
