//! The common part of a command over a WebSocket, for all protocols: the limits of a connection, its close, pings, and
//! the queue between a client's stdin and the command.

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

/// The most stream bytes in one message.
pub const OUTPUT_MESSAGE_MAX: usize = 64 << 10;
/// How long the first message may take.
pub const FIRST_MESSAGE_MAX: Duration = Duration::from_secs(30);
/// How long the queue may be full before stdin is rejected, so that a kill behind it gets through.
const STDIN_FULL_MAX: Duration = Duration::from_secs(5);
/// The same limit in messages, so that empty ones are bounded too.
const STDIN_QUEUE_MESSAGES_MAX: usize = 4096;
/// The most bytes that are passed to the command at once.
pub const STDIN_WRITE_MAX: usize = 64 << 10;
/// How long the stdin of a client that has closed may take to reach the command.
const STDIN_DRAIN_MAX: Duration = Duration::from_secs(10);
/// A client that does not read a message for this long is dropped.
const SEND_STALL_MAX: Duration = Duration::from_secs(30);
/// How often a silent client is pinged.
const PING_INTERVAL: Duration = Duration::from_secs(20);
/// A client that was silent for this long, pings included, is gone.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// How long the client may take to answer a close.
const CLOSE_MAX: Duration = Duration::from_secs(2);

/// The error for a request that does not open a WebSocket.
pub fn needs_upgrade(rejection: WebSocketUpgradeRejection) -> ApiError {
    ApiError::new(StatusCode::UPGRADE_REQUIRED, "upgrade_required", rejection.body_text())
        .hint("open this address as a WebSocket of version 13")
}

/// Limits what a client may send. (Compression is not offered, so a small message cannot become a large one.)
pub fn bounded(upgrade: WebSocketUpgrade, message_max: usize) -> WebSocketUpgrade {
    upgrade
        .max_message_size(message_max)
        .max_frame_size(message_max)
        // Each message is written at once, so that only messages that the client has not read are queued here.
        .write_buffer_size(0)
        .max_write_buffer_size(4 * OUTPUT_MESSAGE_MAX)
}

/// How the daemon closes a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Close {
    /// Everything was sent.
    Ended,
    /// The first message was rejected.
    Refused,
    /// The client should reconnect.
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
    /// Closes and waits a little for the reply: closing the socket at once would drop bytes in flight.
    pub async fn say(self, mut socket: WebSocket) {
        let (code, reason) = match self {
            Self::Ended => (close_code::NORMAL, "that was all"),
            Self::Refused => (close_code::POLICY, "the first message was refused"),
            Self::Restart => (close_code::RESTART, "connect again with the offsets reached"),
            Self::NoKey => (close_code::POLICY, "the api key was deleted"),
        };
        let farewell = async {
            let frame = CloseFrame { code, reason: reason.into() };
            // An error means that the client is gone already.
            if socket.send(Message::Close(Some(frame))).await.is_ok() {
                while let Some(Ok(_)) = socket.recv().await {}
            }
        };
        let _ = timeout(CLOSE_MAX, farewell).await;
    }

    /// Sends a last message, such as an error, before the close. If the client is gone, the message is dropped.
    pub async fn say_after(self, message: Message, mut socket: WebSocket) {
        let _ = timeout(SEND_STALL_MAX, socket.send(message)).await;
        self.say(socket).await;
    }
}

/// The client is gone or does not read.
pub struct Lost;

/// Runs the three parts of a session until one side has finished; returns how to close, if the client is still there.
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
                // Checked here too, and not only where output is written: a client that reads nothing could otherwise
                // continue to act for a while.
                () = key.wait() => break Some(Close::NoKey),
                close = &mut write => break close.ok(),
                () = &mut read => break None,
                () = &mut pump, if pumping => pumping = false,
            }
        }
    };
    // Reading has ended, so the stdin queue has its last entry: bytes that the client sent before it closed still go to
    // the command.
    if close != Some(Close::NoKey) && pumping && timeout(STDIN_DRAIN_MAX, pump).await.is_err() {
        tracing::debug!("stdin of a client that has gone was not read in time");
    }
    close
}

/// The sending half. The client must read messages in time, and must not be silent for too long.
pub struct Line<'a> {
    sink: &'a mut SplitSink<WebSocket, Message>,
    heard: watch::Receiver<Instant>,
    pings: Interval,
}

impl<'a> Line<'a> {
    /// For a client that was just heard from; send on the sender whenever the client sends something.
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

    /// Pings the client, unless it has been silent for too long.
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
    /// The end of stdin.
    End,
}

/// The queue between the client's stdin and the command. Bounded in bytes and messages.
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
    /// Queues the input, waits a while for room, or fails. After the first failure every call fails: later bytes would
    /// hide the gap.
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
                    // The pump has rejected stdin for good and has reported that.
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
