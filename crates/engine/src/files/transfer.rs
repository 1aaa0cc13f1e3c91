//! One running file operation: bytes straight from init to the caller, and back.
//!
//! A transfer has the streams of a command but is not persistent: no row, no log. Bytes from init wait in memory, at
//! most the window of each stream, until the caller takes them, and are acknowledged then; so a slow caller slows down
//! only its own operation. If the caller goes away, the operation is killed. If the daemon dies, the next one finds an
//! operation that it does not know, and ends it.
//!
//! Handles of transfers are in the upper half of all handles, so that they never collide with those of commands, whose
//! rows outlive the daemon. Handles are assigned in a circle, skipping those in use.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{debug, warn};
use wire::files::{FileDone, FileOp, GrepWith, RESULT_MAX, result_from_bytes};
use wire::guest::{Cwd, End, EndCause, ExitStatus, Handle, Program, Start, StartError, Stream};

use super::kept::KeptWatches;
use super::memory::{Ending, MemorySink, State};
use crate::error::EngineError;
use crate::guest::{ANSWER_SECONDS, AnyLane, Carrier, Guest, Lane, Stdin, Use, Violation};
use crate::model::{GuestUser, Resume};
use crate::observe::metrics::FileMeter;
use crate::observe::timing;

/// The most concurrent file operations in one sandbox. Further ones wait for a moment.
pub const TRANSFERS_MAX: usize = 64;
/// The most concurrent watches in one sandbox. Watches are long-lived, so they must not take the places of other
/// operations.
pub const WATCHES_MAX: usize = 64;
/// How long a caller waits for a place.
const PLACE_SECONDS: u64 = 30;
/// How long the guest may send or accept nothing while the caller waits.
pub const IDLE_SECONDS: u64 = 60;
/// How long the caller may leave waiting bytes untouched.
pub const TAKE_SECONDS: u64 = 60;
/// How much longer than its own limit a search may take before init ends it.
const SEARCH_MARGIN_MS: u64 = 10_000;
/// How long a rehearsal may take. Only a pool waits for it.
const REHEARSAL_SECONDS: u64 = 5;
/// Runs a shell and a program, whichever the template has.
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
    pub(super) guest: Arc<Guest>,
    state: Mutex<TransfersState>,
    places: Arc<Semaphore>,
    watches: Arc<Semaphore>,
    pub(super) kept: KeptWatches,
}

#[derive(Default)]
struct TransfersState {
    closed: bool,
    last: u32,
    live: BTreeMap<Handle, Arc<Transfer>>,
}

impl Transfers {
    pub fn new(guest: Arc<Guest>) -> Arc<Self> {
        Arc::new(Self {
            guest,
            state: Mutex::default(),
            places: Arc::new(Semaphore::new(TRANSFERS_MAX)),
            watches: Arc::new(Semaphore::new(WATCHES_MAX)),
            kept: KeptWatches::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, TransfersState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The transfer with this handle, if it is under way.
    pub fn live(&self, handle: Handle) -> Option<Arc<Transfer>> {
        self.lock().live.get(&handle).cloned()
    }

    /// All running transfers.
    pub fn all(&self) -> Vec<Arc<Transfer>> {
        self.lock().live.values().cloned().collect()
    }

    /// How many transfers are running.
    pub fn count(&self) -> usize {
        self.lock().live.len()
    }

    /// Takes over a transfer that init has and this daemon does not know: it belongs to a daemon that died. It ends as
    /// if its caller had left.
    pub fn adopt_orphan(self: &Arc<Self>, handle: Handle) {
        if self.live(handle).is_some() {
            return;
        }
        let orphan = Transfer::new(self, start(handle, None, None), None);
        orphan.lane.lock().sink.abandon();
        self.lock().live.insert(handle, orphan);
    }

    fn forget(&self, handle: Handle) {
        self.lock().live.remove(&handle);
    }

    /// Rejects new transfers and ends the running ones.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let live = std::mem::take(&mut state.live);
        drop(state);
        for transfer in live.into_values() {
            transfer.end(Ending::SandboxGone);
        }
    }

    /// Transfers may be started again, after a pause.
    pub fn reopen(&self) {
        self.lock().closed = false;
    }

    /// Starts a transfer; `make` builds its request for a handle.
    fn begin(
        self: &Arc<Self>,
        place: Option<OwnedSemaphorePermit>,
        make: impl FnOnce(Handle) -> Start,
    ) -> Result<Arc<Transfer>, EngineError> {
        let mut state = self.lock();
        if state.closed {
            drop(state);
            return Err(self.guest.wrong_state());
        }
        let handle = loop {
            // Assigned in a circle; there are far fewer places than handles, so a free one is found soon.
            state.last = (state.last + 1) & !HANDLE_BIT;
            let handle = Handle(state.last | HANDLE_BIT);
            if !state.live.contains_key(&handle) {
                break handle;
            }
        };
        let transfer = Transfer::new(self, make(handle), place);
        state.live.insert(handle, Arc::clone(&transfer));
        drop(state);
        self.guest.outbox.start(Arc::clone(&transfer) as Arc<dyn AnyLane>);
        Ok(transfer)
    }
}

fn start(handle: Handle, op: Option<FileOp>, user: Option<GuestUser>) -> Start {
    let op = op.unwrap_or(FileOp::Pack { path: Vec::new() });
    // A search ends by itself, unless something in the guest stops it.
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
        user: user.map(GuestUser::into_string),
        terminal: None,
        timeout_ms: timeout_ms.map(|limit| limit.saturating_add(SEARCH_MARGIN_MS)),
        idle_timeout_ms: None,
        grace_ms: 0,
    }
}

/// Runs a command in a sandbox before its first use, to warm caches: the very first command takes a quarter longer than
/// later ones. The outcome does not matter, since a template need not have a shell.
pub(crate) async fn rehearse(transfers: &Arc<Transfers>) {
    let limit = Duration::from_secs(REHEARSAL_SECONDS);
    if timeout(limit, transfers.guest.outbox.version()).await.is_err() {
        return; // The pool's own checks find out.
    }
    let program = Program::Shell { script: REHEARSAL.into() };
    let timeout_ms = Some(REHEARSAL_SECONDS * 1000);
    let begun = transfers.begin(None, |handle| Start { program, timeout_ms, ..start(handle, None, None) });
    let Ok(transfer) = begun else { return };
    if timeout(limit, transfer.lane.over()).await.is_err() {
        transfer.abandon();
    }
}

/// See the module comment.
pub(crate) struct Transfer {
    transfers: Arc<Transfers>,
    lane: Lane<MemorySink>,
}

impl Transfer {
    fn new(transfers: &Arc<Transfers>, start: Start, place: Option<OwnedSemaphorePermit>) -> Arc<Self> {
        let stdin = Stdin::new(start.stdin);
        let lane = Lane::new(start, stdin, MemorySink::new(place));
        Arc::new(Self { transfers: Arc::clone(transfers), lane })
    }

    fn guest(&self) -> &Arc<Guest> {
        &self.transfers.guest
    }

    fn end(&self, ending: Ending) {
        let mut state = self.lane.lock();
        state.sink.ending.get_or_insert(ending);
        state.sink.place = None;
        drop(state);
        self.lane.notify();
    }

    /// Init may forget the transfer; bytes that the caller has not taken are in memory.
    fn forget(&self, ending: Ending) {
        let handle = self.lane.handle();
        self.guest().outbox.acknowledge_result(handle);
        self.transfers.forget(handle);
        self.end(ending);
    }

    /// The caller is gone.
    fn abandon(self: &Arc<Self>) {
        let mut state = self.lane.lock();
        if state.sink.ending.is_some() || state.sink.abandoned {
            return;
        }
        state.sink.abandon();
        state.stdin.close();
        self.offer_acks(&mut state);
        drop(state);
        self.guest().outbox.abandon(self.lane.handle());
        self.lane.notify();
    }

    /// Drops a caller that does not take its bytes. Holds a strong reference to the transfer only while it checks.
    async fn watch_taking(transfer: Weak<Self>) {
        while let Some(again) = transfer.upgrade().and_then(|transfer| transfer.look_at_taking()) {
            tokio::time::sleep_until(again).await;
        }
    }

    /// When to check again; `None` if there is nothing left to check.
    fn look_at_taking(self: &Arc<Self>) -> Option<Instant> {
        let limit = Duration::from_secs(TAKE_SECONDS);
        let now = Instant::now();
        let mut state = self.lane.lock();
        if state.sink.ending.is_some() || state.sink.abandoned {
            return None;
        }
        let deadline = if state.sink.is_waiting() { state.sink.taken_at + limit } else { now + limit };
        if deadline > now {
            return Some(deadline);
        }
        state.sink.stalled = true;
        drop(state);
        warn!(sandbox = %self.guest().id, "a caller that took nothing of a file for {TAKE_SECONDS} s was let go");
        self.abandon();
        None
    }
}

impl Carrier for Transfer {
    type Sink = MemorySink;

    fn lane(&self) -> &Lane<MemorySink> {
        &self.lane
    }

    fn guest(&self) -> &Guest {
        &self.transfers.guest
    }

    fn started(self: &Arc<Self>, _pid: u32) {}

    fn resumed(self: &Arc<Self>, _state: &State) {}

    // The bytes are acknowledged when the caller takes them.
    fn received(self: &Arc<Self>, _state: MutexGuard<'_, State>, _stream: Stream, _length: usize) {}

    fn stdin_sent(&self, _length: usize) {}

    fn failed_to_start(self: &Arc<Self>, error: StartError) -> Result<(), Violation> {
        self.forget(Ending::FailedToStart(error));
        Ok(())
    }

    fn ended(self: &Arc<Self>, end: End, ends: [u64; 2]) -> Result<(), Violation> {
        self.lane.lock().sink.check_ends(self.lane.handle(), ends)?;
        self.forget(Ending::Guest(end));
        Ok(())
    }

    fn lost(self: &Arc<Self>) -> Result<(), Violation> {
        // Removes it from the lists; an init that does not know it ignores this.
        self.forget(Ending::SandboxGone);
        Ok(())
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

/// A transfer held by its caller. Dropping it ends the operation.
pub(crate) struct Running {
    transfer: Arc<Transfer>,
    patience: Patience,
    /// The sandbox's memory kills when the transfer started, if known.
    oom_kills_before: Option<u64>,
    _using: Use,
    /// Set once the transfer has started.
    meter: Option<FileMeter>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.transfer.abandon();
    }
}

/// Which limit the transfer counts against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Short,
    Watch,
}

impl Running {
    /// Starts an operation, and waits until init has it.
    pub async fn start(
        transfers: &Arc<Transfers>,
        op: FileOp,
        user: Option<GuestUser>,
        patience: Patience,
        place: Place,
        resume: Resume,
    ) -> Result<Self, EngineError> {
        let guest = &transfers.guest;
        let meter = FileMeter::start(&guest.metrics, &op);
        let begun = Self::begin(transfers, op, user, patience, place, resume);
        let mut begun = timing::FILE_START.watch(&guest.metrics, guest.id, begun).await;
        match &mut begun {
            Ok(running) => running.meter = Some(meter),
            Err(_) => meter.conclude(&begun),
        }
        begun
    }

    async fn begin(
        transfers: &Arc<Transfers>,
        op: FileOp,
        user: Option<GuestUser>,
        patience: Patience,
        place: Place,
        resume: Resume,
    ) -> Result<Self, EngineError> {
        let guest = &transfers.guest;
        let using = guest.enter(resume).await?;
        if !guest.takes_commands() {
            return Err(guest.wrong_state());
        }
        let (places, limit) = match place {
            Place::Short => (&transfers.places, TRANSFERS_MAX),
            Place::Watch => (&transfers.watches, WATCHES_MAX),
        };
        let waiting = timeout(Duration::from_secs(PLACE_SECONDS), Arc::clone(places).acquire_owned());
        let Ok(Ok(place)) = waiting.await else {
            let what = format!("sandbox `{}` has {limit} file operations under way", guest.id);
            return Err(EngineError::Full { what });
        };
        let deadline = Instant::now() + Duration::from_secs(ANSWER_SECONDS);
        let unresponsive = |_| guest.unresponsive();
        // Waits for a connection first: after a restart, init may have operations whose handles are not known yet.
        let version = timeout_at(deadline, guest.outbox.version()).await.map_err(unresponsive)?;
        if version < op.since() {
            return Err(EngineError::InitTooOld { id: guest.id, version });
        }
        let oom_kills_before = guest.oom_kills().await;
        let transfer = transfers.begin(Some(place), |handle| start(handle, Some(op), user))?;
        let running = Self { transfer, patience, oom_kills_before, _using: using, meter: None };
        timeout_at(deadline, running.transfer.lane.answered()).await.map_err(unresponsive)?;
        debug!(sandbox = %guest.id, handle = running.transfer.lane.handle().0, "file operation started");
        Ok(running)
    }

    /// Watches for a caller that does not take a long stream.
    pub fn watch_taking(&self) {
        let transfer = Arc::downgrade(&self.transfer);
        self.transfer.guest().runtime.spawn(Transfer::watch_taking(transfer));
    }

    async fn patiently<T>(&self, wait: impl Future<Output = T>) -> Result<T, EngineError> {
        let limit = Duration::from_secs(IDLE_SECONDS);
        let mut wait = std::pin::pin!(wait);
        loop {
            let waited = match self.patience {
                Patience::Endless => return Ok(wait.await),
                Patience::Idle => timeout(limit, &mut wait).await,
            };
            match waited {
                Ok(result) => return Ok(result),
                // The time of a frozen guest stands still.
                Err(_) if self.transfer.guest().stood_still(limit) => {}
                Err(_) => return Err(self.transfer.guest().unresponsive()),
            }
        }
    }

    /// The next bytes of stdout; `None` at its end, whether complete or not. Cancel-safe.
    pub async fn next(&self) -> Result<Option<Bytes>, EngineError> {
        let next = self.patiently(self.transfer.lane.until(|state| state.sink.take(0))).await??;
        if let Some(bytes) = &next {
            self.transfer.guest().metrics.file_bytes_out(bytes.len());
            let mut state = self.transfer.lane.lock();
            self.transfer.offer_acks(&mut state);
        }
        Ok(next)
    }

    /// Sends bytes; waits while the window is full. `false`: the operation accepts no more, and its result has the
    /// reason.
    pub async fn give(&self, mut bytes: Bytes) -> Result<bool, EngineError> {
        while !bytes.is_empty() {
            let room = self.transfer.lane.until(|state| {
                if state.stdin.is_closed() || state.sink.ending.is_some() {
                    return ControlFlow::Break(None);
                }
                match state.stdin.room() {
                    0 => ControlFlow::Continue(()),
                    room => ControlFlow::Break(Some(room)),
                }
            });
            let Some(room) = self.patiently(room).await? else { return Ok(false) };
            let fits = room.min(bytes.len());
            let mut state = self.transfer.lane.lock();
            if state.stdin.is_closed() {
                return Ok(false);
            }
            self.transfer.guest().metrics.file_bytes_in(fits);
            state.stdin.push(bytes.split_to(fits));
            self.transfer.offer_stdin(&mut state);
        }
        Ok(true)
    }

    /// Ends the input.
    pub fn end_input(&self) {
        let mut state = self.transfer.lane.lock();
        state.stdin.end();
        self.transfer.offer_stdin(&mut state);
    }

    /// Waits for the operation to end and returns its result. Drops the rest of stdout.
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
            let next = self.transfer.lane.until(|state| {
                // Stdout first: the operation may be waiting for its output to be taken.
                if let ControlFlow::Break(Ok(Some(_))) = state.sink.take(0) {
                    return ControlFlow::Break(Ok(None));
                }
                match state.sink.take(1) {
                    ControlFlow::Break(Ok(Some(bytes))) => ControlFlow::Break(Ok(Some(bytes))),
                    ControlFlow::Break(Ok(None)) => ControlFlow::Break(Ok(Some(Bytes::new()))),
                    ControlFlow::Break(Err(error)) => ControlFlow::Break(Err(error)),
                    ControlFlow::Continue(()) => ControlFlow::Continue(()),
                }
            });
            let next = self.patiently(next).await??;
            {
                let mut state = self.transfer.lane.lock();
                self.transfer.offer_acks(&mut state);
            }
            match next {
                None => {}
                Some(bytes) if bytes.is_empty() => break,
                Some(bytes) if result.len() + bytes.len() > RESULT_MAX => return Err(self.strange()),
                Some(bytes) => result.extend_from_slice(&bytes),
            }
        }
        let ending = self.transfer.lane.lock().sink.ending.clone();
        match ending {
            Some(Ending::FailedToStart(error)) => Err(EngineError::FileNotStarted { why: error }),
            Some(Ending::SandboxGone) | None => Err(self.transfer.guest().wrong_state()),
            Some(Ending::Guest(end)) => match result_from_bytes(&result) {
                Some(Ok(done)) => Ok(done),
                Some(Err(source)) => Err(EngineError::File { source }),
                None => Err(self.without_result(end).await),
            },
        }
    }

    /// The error for a message that init, or a process in its place, must not send.
    pub fn strange(&self) -> EngineError {
        EngineError::FileStrange { id: self.transfer.guest().id }
    }

    /// The operation ended without a result: something killed it.
    async fn without_result(&self, end: End) -> EngineError {
        let guest = self.transfer.guest();
        let killed = end.cause == EndCause::Itself && end.status == ExitStatus::Signal(SIGKILL);
        if killed && guest.claim_oom_kill(self.oom_kills_before).await.is_some() {
            return EngineError::FileOutOfMemory { id: guest.id };
        }
        EngineError::FileKilled { id: guest.id }
    }
}
