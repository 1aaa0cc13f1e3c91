//! A command over a WebSocket, as far as every protocol does it the same way: the bounds of a connection, its goodbye, pings, and the
//! queue between a client's stdin and the command.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use axum::http::StatusCode;
use bytes::Bytes;
use engine::KeyEnd;
use futures_util::SinkExt;
use futures_util::stream::SplitSink;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::{Instant, Interval, MissedTickBehavior, timeout};

use crate::http::app::Halt;
use crate::http::error::ApiError;

/// Stream bytes in one message at most.
pub const OUTPUT_MESSAGE_MAX: usize = 64 << 10;
/// How long the first message may take.
pub const FIRST_MESSAGE_MAX: Duration = Duration::from_secs(30);
/// How long the queue may be full: then stdin is refused, so that a kill behind it gets through.
const STDIN_FULL_MAX: Duration = Duration::from_secs(5);
/// As above, in messages, so that empty ones have a bound too.
const STDIN_QUEUE_MESSAGES_MAX: usize = 4096;
/// What is handed to the command at once.
pub const STDIN_WRITE_MAX: usize = 64 << 10;
/// How long stdin of a client that has closed may take to reach the command.
const STDIN_DRAIN_MAX: Duration = Duration::from_secs(10);
/// A message that cannot be written for so long: the client does not read, and is let go.
const SEND_STALL_MAX: Duration = Duration::from_secs(30);
/// How often a silent client is asked whether it is there.
const PING_INTERVAL: Duration = Duration::from_secs(20);
/// A client that was silent for so long, pings included, is gone.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// How long the client may take to answer a close.
const CLOSE_MAX: Duration = Duration::from_secs(2);

/// What someone is told who does not open a WebSocket.
pub fn needs_upgrade(rejection: WebSocketUpgradeRejection) -> ApiError {
    ApiError::new(StatusCode::UPGRADE_REQUIRED, "upgrade_required", rejection.body_text())
        .hint("open this address as a WebSocket of version 13")
}

/// The bounds of what a client may send. (Compression is not offered, so a small message cannot become a large one.)
pub fn bounded(upgrade: WebSocketUpgrade, message_max: usize) -> WebSocketUpgrade {
    upgrade
        .max_message_size(message_max)
        .max_frame_size(message_max)
        // A message is written at once, so that what is queued here is what the client has not read.
        .write_buffer_size(0)
        .max_write_buffer_size(4 * OUTPUT_MESSAGE_MAX)
}

/// How a connection ends, as the daemon's side wishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Close {
    /// All was said.
    Ended,
    /// The first message was refused.
    Refused,
    /// Come again.
    Restart,
    /// The key was deleted.
    NoKey,
}

impl From<Halt> for Close {
    fn from(halt: Halt) -> Self {
        match halt {
            Halt::Daemon => Self::Restart,
            Halt::Key => Self::NoKey,
        }
    }
}

impl Close {
    /// Says goodbye and waits a little for the answer: closing at once would throw away what is still on its way.
    pub async fn say(self, mut socket: WebSocket) {
        let (code, reason) = match self {
            Self::Ended => (close_code::NORMAL, "that was all"),
            Self::Refused => (close_code::POLICY, "the first message was refused"),
            Self::Restart => (close_code::RESTART, "connect again with the offsets reached"),
            Self::NoKey => (close_code::POLICY, "the api key was deleted"),
        };
        let farewell = async {
            let frame = CloseFrame { code, reason: reason.into() };
            // An error means that the client is gone already, which is what this is for.
            if socket.send(Message::Close(Some(frame))).await.is_ok() {
                while let Some(Ok(_)) = socket.recv().await {}
            }
        };
        let _ = timeout(CLOSE_MAX, farewell).await;
    }

    /// The last message before a goodbye, such as a refusal. If the client is gone there is nobody left to tell.
    pub async fn say_after(self, message: Message, mut socket: WebSocket) {
        let _ = timeout(SEND_STALL_MAX, socket.send(message)).await;
        self.say(socket).await;
    }
}

/// The client is gone or does not read.
pub struct Lost;

/// The three things that go on at once, until one side has no more to say: how to say goodbye, if there is anybody left to say it to.
///
/// `read` holds the only sender to the queue that `pump` empties.
pub async fn converse(
    mut key: KeyEnd,
    write: impl Future<Output = Result<Close, Lost>>,
    read: impl Future<Output = ()>,
    pump: impl Future<Output = ()>,
) -> Option<Close> {
    tokio::pin!(pump);
    let mut pumping = true;
    let close = {
        tokio::pin!(write, read);
        loop {
            tokio::select! {
                // Here too, and not only where output is written: whoever reads nothing could go on to act for a while.
                () = key.wait() => break Some(Close::NoKey),
                close = &mut write => break close.ok(),
                () = &mut read => break None,
                () = &mut pump, if pumping => pumping = false,
            }
        }
    };
    // Reading is over, and with it the queue of stdin has got its last entry: what the client sent before it closed still goes to
    // the command.
    if close != Some(Close::NoKey) && pumping && timeout(STDIN_DRAIN_MAX, pump).await.is_err() {
        tracing::debug!("stdin of a client that has gone was not read in time");
    }
    close
}

/// The way to the client. What is sent must be taken in time, and the client must be heard from now and then.
pub struct Line<'a> {
    sink: &'a mut SplitSink<WebSocket, Message>,
    heard: watch::Receiver<Instant>,
    pings: Interval,
}

impl<'a> Line<'a> {
    /// To a client that is heard from now; the sender is told whenever it says something.
    pub fn new(sink: &'a mut SplitSink<WebSocket, Message>) -> (Self, watch::Sender<Instant>) {
        let (hearing, heard) = watch::channel(Instant::now());
        let mut pings = tokio::time::interval_at(Instant::now() + PING_INTERVAL, PING_INTERVAL);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        (Self { sink, heard, pings }, hearing)
    }

    /// Returns when it is time for [`Self::ping`]. Cancel-safe.
    pub async fn ping_due(&mut self) {
        self.pings.tick().await;
    }

    /// Asks a client that was not silent for too long whether it is there.
    pub async fn ping(&mut self) -> Result<(), Lost> {
        if self.heard.borrow().elapsed() > SILENCE_MAX {
            return Err(Lost);
        }
        self.send(Message::Ping(Bytes::new())).await
    }

    /// Sends.
    pub async fn send(&mut self, message: Message) -> Result<(), Lost> {
        match timeout(SEND_STALL_MAX, self.sink.send(message)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(Lost),
        }
    }
}

/// Something for stdin.
pub enum Input {
    /// Bytes.
    Bytes(Bytes),
    /// No more.
    End,
}

/// Between reading stdin from the client and handing it to the command. Bounded in bytes and messages.
pub fn stdin_queue(bytes_max: usize) -> (StdinSender, mpsc::Receiver<Queued>) {
    let (sender, receiver) = mpsc::channel(STDIN_QUEUE_MESSAGES_MAX);
    let room = Arc::new(Semaphore::new(bytes_max));
    (StdinSender { sender, room, bytes_max, overflowed: false }, receiver)
}

/// The end of the queue that the client fills.
pub struct StdinSender {
    sender: mpsc::Sender<Queued>,
    room: Arc<Semaphore>,
    bytes_max: usize,
    overflowed: bool,
}

/// Something for stdin, and the room that it takes in the queue.
pub struct Queued {
    /// What.
    pub input: Input,
    /// Its room in the queue, free again when this is dropped.
    pub room: OwnedSemaphorePermit,
}

impl StdinSender {
    /// Queues, waits a while, or refuses. Once something was refused everything is: later bytes would close over the gap.
    pub async fn push(&mut self, input: Input) -> Result<(), ApiError> {
        let length = match &input {
            Input::Bytes(bytes) => bytes.len(),
            Input::End => 0,
        };
        if !self.overflowed && length <= self.bytes_max {
            let room = self.room.clone().acquire_many_owned(length as u32);
            if let Ok(Ok(room)) = timeout(STDIN_FULL_MAX, room).await {
                match self.sender.try_send(Queued { input, room }) {
                    Ok(()) => return Ok(()),
                    // The pump has refused stdin for good and has said so.
                    Err(mpsc::error::TrySendError::Closed(_)) => return Ok(()),
                    Err(mpsc::error::TrySendError::Full(_)) => {}
                }
            }
        }
        self.overflowed = true;
        Err(ApiError::new(
            StatusCode::TOO_MANY_REQUESTS,
            "stdin_overflow",
            format!("{} bytes of stdin wait for a command that does not read", self.bytes_max),
        )
        .hint("connect again with `stdin_offset` at the last `stdin_ack`, when the command reads"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUEUE_MAX: usize = 1 << 20;

    fn bytes(length: usize) -> Input {
        Input::Bytes(vec![0; length].into())
    }

    #[tokio::test(start_paused = true)]
    async fn stdin_that_nobody_takes_is_refused_in_the_end_and_stays_so() {
        let (mut sender, mut queue) = stdin_queue(QUEUE_MAX);
        sender.push(bytes(QUEUE_MAX)).await.expect("it fits");
        let began = Instant::now();
        let error = sender.push(bytes(1)).await.expect_err("nobody takes it");
        assert_eq!(error.into_body().code, "stdin_overflow");
        assert_eq!(began.elapsed(), STDIN_FULL_MAX);
        assert!(queue.recv().await.is_some());
        sender.push(bytes(1)).await.expect_err("it would close over the gap");
    }

    #[tokio::test(start_paused = true)]
    async fn stdin_waits_while_the_queue_is_full() {
        let (mut sender, mut queue) = stdin_queue(QUEUE_MAX);
        for _ in 0..4 {
            sender.push(bytes(QUEUE_MAX / 4)).await.expect("it fits");
        }
        let take = async { drop(queue.recv().await) };
        let (pushed, ()) = tokio::join!(sender.push(bytes(1000)), take);
        pushed.expect("there is room once something was taken");
        sender.push(bytes(QUEUE_MAX + 1)).await.expect_err("it could never fit");
    }

    #[tokio::test(start_paused = true)]
    async fn empty_messages_have_a_bound_too() {
        let (mut sender, _queue) = stdin_queue(QUEUE_MAX);
        let mut taken = 0;
        while sender.push(bytes(0)).await.is_ok() {
            taken += 1;
        }
        assert_eq!(taken, STDIN_QUEUE_MESSAGES_MAX);
    }
}
