//! Messages that callers want to send to a sandbox's init.
//!
//! The outbox is empty while there is no connection: the handshake sends everything again that must survive a reconnect
//! (starts, lengths, results).

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, oneshot};
use wire::frame;
use wire::guest::{COMMANDS_MAX, Handle, Start, ToInit};

use super::lane::AnyLane;
use super::violation::Violation;

/// The most requests of callers that wait for init's answer, in one sandbox.
const REQUESTS_MAX: usize = 1024;
/// The most messages that wait for an init that does not read; callers' requests fail beyond that. Starts and results
/// are not requests; the number of commands bounds them.
const ITEMS_MAX: usize = 4 * COMMANDS_MAX;
/// Frames are gathered up to about this size before they are written.
pub(super) const OUT_TARGET: usize = 128 * 1024;

/// Why a message was not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unsaid {
    /// The connection broke before init's answer.
    Broken,
    /// Too many messages are waiting already.
    TooMany,
}

/// The queued messages. Bounded: starts and results by the number of commands, requests by [`REQUESTS_MAX`]; the other
/// lists contain each command at most once.
#[derive(Default)]
pub(crate) struct Outbox {
    state: Mutex<OutboxState>,
    /// Signals that the link has something to send.
    pub(super) wake: Notify,
    /// Signals that there is a connection.
    connected: Notify,
}

#[derive(Default)]
struct OutboxState {
    connected: bool,
    /// The version agreed on with init.
    version: u32,
    items: VecDeque<Item>,
    acks: Vec<Arc<dyn AnyLane>>,
    stdin: VecDeque<Arc<dyn AnyLane>>,
    pings: HashMap<u64, oneshot::Sender<()>>,
    serial: u64,
    /// Commands that were started without an answer and whose id no caller knows: killed as soon as init responds.
    abandoned: BTreeSet<Handle>,
}

enum Item {
    Message(ToInit),
    Start(Arc<dyn AnyLane>),
}

/// What there is to send next.
enum Due {
    Item(Item),
    Acks(Vec<Arc<dyn AnyLane>>),
    Stdin(Arc<dyn AnyLane>),
}

impl Outbox {
    fn lock(&self) -> MutexGuard<'_, OutboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues something if there is a connection.
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

    /// Asks init to start it.
    pub fn start(&self, lane: Arc<dyn AnyLane>) {
        self.put(|state| state.items.push_back(Item::Start(lane)));
    }

    /// The lane has acknowledgements to send. Returns whether it was queued.
    pub fn ack(&self, lane: Arc<dyn AnyLane>) -> bool {
        self.put(|state| state.acks.push(lane))
    }

    /// The lane has stdin to send. Returns whether it was queued.
    pub fn stdin(&self, lane: Arc<dyn AnyLane>) -> bool {
        self.put(|state| state.stdin.push_back(lane))
    }

    /// The version that init speaks. Waits for a connection; the caller sets the deadline.
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

    /// A command's result was stored.
    pub fn acknowledge_result(&self, handle: Handle) {
        self.lock().abandoned.remove(&handle);
        self.put(|state| state.items.push_back(Item::Message(ToInit::AckResult { handle })));
    }

    /// Kills a command as soon as init responds.
    pub fn abandon(&self, handle: Handle) {
        self.lock().abandoned.insert(handle);
        self.put(|state| state.items.push_back(Item::Message(ToInit::Kill { handle })));
    }

    /// Sends a message and waits until init has read it. Waits for a connection first; the caller sets the deadline.
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
            // Requests whose caller has left no longer count.
            state.pings.retain(|_, waiting| !waiting.is_closed());
        }
        // The message of a caller that has left is sent all the same, if init ever reads again; so these have their own
        // limit.
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

    pub(super) fn answered(&self, serial: u64) -> Result<(), Violation> {
        let mut state = self.lock();
        if let Some(waiting) = state.pings.remove(&serial) {
            // A caller that left at its deadline needs no answer.
            let _ = waiting.send(());
            return Ok(());
        }
        // Pings whose caller left may have been dropped to make room; pings that were never sent were not.
        if serial <= state.serial { Ok(()) } else { Err(Violation::UnknownPong) }
    }

    /// From now on, queued messages are sent. The state for the handshake must be read after this call, so that nothing
    /// is missed in between; sending something twice is harmless.
    pub(super) fn connect(&self, version: u32) {
        let mut state = self.lock();
        (state.connected, state.version) = (true, version);
        drop(state);
        self.connected.notify_waiters();
    }

    pub(super) fn disconnect(&self) {
        let mut state = self.lock();
        state.connected = false;
        state.items.clear();
        state.pings.clear();
        let acks = std::mem::take(&mut state.acks);
        let stdin = std::mem::take(&mut state.stdin);
        drop(state);
        for lane in acks.iter().chain(&stdin) {
            lane.unqueue();
        }
    }

    /// The commands to kill as soon as init responds.
    pub(super) fn abandoned(&self) -> BTreeSet<Handle> {
        self.lock().abandoned.clone()
    }

    /// The command has ended, so it need not be killed.
    pub(super) fn forget_abandoned(&self, handle: Handle) {
        self.lock().abandoned.remove(&handle);
    }

    /// Whether there is a connection to init now.
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

    /// Encodes queued messages, up to about [`OUT_TARGET`].
    pub(super) fn fill(&self, out: &mut Vec<u8>) {
        while out.len() < OUT_TARGET {
            match self.due() {
                None => return,
                Some(Due::Item(Item::Message(message))) => frame::put_message(&message, out),
                Some(Due::Item(Item::Start(lane))) => put_start(lane.start(), out),
                Some(Due::Acks(all)) => {
                    for lane in all {
                        lane.take_acks(&mut |ack| frame::put_message(&ack, out));
                    }
                }
                Some(Due::Stdin(lane)) => {
                    if lane.put_stdin(out) {
                        self.put(|state| state.stdin.push_back(lane)); // After the others: one chunk each in turn.
                    }
                }
            }
        }
    }
}

pub(super) fn put_start(start: &Start, out: &mut Vec<u8>) {
    frame::put_message(&ToInit::Start(Box::new(start.clone())), out);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::versions;

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
