//! A running command: output in order, each byte once, and stdin, across reconnects.
//!
//! A task holds the connection. It counts what has arrived, and when the connection breaks it opens another one at those
//! offsets; it keeps what was written to stdin until the daemon confirms that the command has it.
//! If the reader does not read, the task waits, and so does the command.
//!
//! Stdin is counted, so that repeated bytes are written once. This works for a single writer: if someone else writes to
//! the same stdin, as two people at one terminal do, counting would mistake their bytes for repeated ones. So counting
//! stops when their bytes are noticed, and from then on the task does not repeat what a broken connection may have lost.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tokio_tungstenite::tungstenite::Message;
use wire::api::{Command, CommandEvent, CommandWish, ErrorBody, OutputStream, RunCommand, TerminalSize};
use wire::{CommandId, SandboxId};

use crate::error::ClientError;
use crate::transport::Socket;
use crate::{Client, Patience, command_path};

/// Events that wait for the reader. Output comes in pieces of at most 64 KiB.
const EVENTS_MAX: usize = 16;
/// Writes to stdin that wait for the task.
const INPUT_MAX: usize = 4;
/// Stdin that was sent and not yet acknowledged. Far less than the daemon's own bound.
const STDIN_UNACKNOWLEDGED_MAX: usize = 256 << 10;
/// Stdin in one message.
const STDIN_MESSAGE_MAX: usize = 64 << 10;
/// The daemon pings every 20 s; a connection that is silent for longer than this is dead.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// How long one message may take to be sent; the daemon always reads.
const SEND_MAX: Duration = Duration::from_secs(30);

/// How much of each stream has been seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Offsets {
    /// Of stdout.
    pub stdout: u64,
    /// Of stderr.
    pub stderr: u64,
}

/// Something that happened to a command.
#[derive(Debug, Clone, PartialEq)]
pub enum StreamEvent {
    /// The command's state: first on each stream, and when it gets its pid.
    Command(Box<Command>),
    /// Output. The pieces of a stream arrive in order, without gaps other than those that `Lost` reports.
    Output {
        /// Which stream.
        stream: OutputStream,
        /// Where the bytes begin.
        offset: u64,
        /// The bytes.
        bytes: Bytes,
    },
    /// The daemon has dropped the bytes from `from` to `to`.
    Lost {
        /// Which stream.
        stream: OutputStream,
        /// The first that is lost.
        from: u64,
        /// The first that is not.
        to: u64,
    },
    /// The daemon rejected a message, for example stdin that the command has closed.
    Refused(ErrorBody),
    /// The command has ended and all output was delivered. The last event.
    Ended(Box<Command>),
}

/// A running command. Dropping it closes the connection and does not end the command.
pub struct CommandStream {
    id: CommandId,
    events: mpsc::Receiver<Result<StreamEvent, ClientError>>,
    input: Input,
    size: watch::Sender<Option<TerminalSize>>,
    connected: watch::Receiver<bool>,
    task: JoinHandle<()>,
}

impl CommandStream {
    pub(crate) fn start(client: Client, sandbox: SandboxId, wish: RunCommand) -> Self {
        let id = wish.id.clone().expect("the client gives every command an id");
        Self::spawn(client, sandbox, id, Some(Box::new(wish)), Offsets::default())
    }

    pub(crate) fn attach(client: Client, sandbox: SandboxId, id: CommandId, from: Offsets) -> Self {
        Self::spawn(client, sandbox, id, None, from)
    }

    fn spawn(
        client: Client,
        sandbox: SandboxId,
        id: CommandId,
        wish: Option<Box<RunCommand>>,
        offsets: Offsets,
    ) -> Self {
        let (event_sender, events) = mpsc::channel(EVENTS_MAX);
        let (input_sender, input_receiver) = mpsc::channel(INPUT_MAX);
        let (size_sender, size_receiver) = watch::channel(None);
        let (connected_sender, connected) = watch::channel(false);
        let stdin = Stdin { at: wish.is_some().then_some(0), ..Stdin::default() };
        let task = Task {
            client,
            sandbox,
            id: id.clone(),
            wish,
            offsets,
            stdin,
            pending: None,
            events: event_sender,
            input: Some(input_receiver),
            size: Some(size_receiver),
            connected: connected_sender,
        };
        let task = tokio::spawn(task.run());
        Self { id, events, input: Input(input_sender), size: size_sender, connected, task }
    }

    /// The command's id, known before it is started.
    pub fn id(&self) -> &CommandId {
        &self.id
    }

    /// Returns the next event, or `None` after the last event or an error. Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<StreamEvent, ClientError>> {
        self.events.recv().await
    }

    /// A way to write to stdin, from anywhere.
    pub fn input(&self) -> Input {
        self.input.clone()
    }

    /// Sets the size of the command's terminal, now and on every later connection. If sizes change faster than they can
    /// be sent, only the last is sent.
    pub fn resize(&self, size: TerminalSize) {
        self.size.send_replace(Some(size));
    }

    /// Whether the daemon is connected at the moment.
    pub fn connected(&self) -> watch::Receiver<bool> {
        self.connected.clone()
    }
}

impl Drop for CommandStream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The command accepts no more input, or the stream has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the command accepts no more input")]
pub struct InputClosed;

/// A command's stdin.
#[derive(Debug, Clone)]
pub struct Input(mpsc::Sender<Wish>);

#[derive(Debug)]
enum Wish {
    Bytes(Bytes),
    End,
    /// Notify when the command has everything before this.
    Taken(oneshot::Sender<()>),
}

impl Input {
    /// Writes; waits while too much is unacknowledged.
    pub async fn write(&self, mut bytes: Bytes) -> Result<(), InputClosed> {
        while !bytes.is_empty() {
            let piece = bytes.split_to(bytes.len().min(STDIN_MESSAGE_MAX));
            self.0.send(Wish::Bytes(piece)).await.map_err(|_| InputClosed)?;
        }
        Ok(())
    }

    /// Returns when the command has everything that was written before.
    pub async fn taken(&self) -> Result<(), InputClosed> {
        let (sender, taken) = oneshot::channel();
        self.0.send(Wish::Taken(sender)).await.map_err(|_| InputClosed)?;
        taken.await.map_err(|_| InputClosed)
    }

    /// Closes stdin.
    pub async fn end(&self) -> Result<(), InputClosed> {
        self.0.send(Wish::End).await.map_err(|_| InputClosed)
    }
}

/// Bytes of stdin that may have to be sent again.
#[derive(Debug, Default)]
struct Stdin {
    /// Where `unacknowledged` begins; `None` if another client writes to stdin too, so that it cannot be counted.
    at: Option<u64>,
    unacknowledged: VecDeque<Bytes>,
    length: usize,
    ended: bool,
    /// Waiters for everything to be acknowledged.
    waiting: Vec<oneshot::Sender<()>>,
}

impl Stdin {
    fn has_room(&self) -> bool {
        self.length < STDIN_UNACKNOWLEDGED_MAX && !self.ended
    }

    fn push(&mut self, bytes: Bytes) {
        self.length += bytes.len();
        self.unacknowledged.push_back(bytes);
    }

    /// Whether the command has more than this client has sent: then another client writes too.
    fn is_beyond(&self, offset: u64) -> bool {
        self.at.is_some_and(|at| offset > at + self.length as u64)
    }

    /// The command has everything before `offset`.
    fn acknowledge(&mut self, offset: u64) {
        match &mut self.at {
            // Without an offset of our own nothing can be sent again, so nothing need be kept.
            None => {
                self.unacknowledged.clear();
                self.length = 0;
            }
            Some(at) => {
                while *at < offset {
                    let Some(first) = self.unacknowledged.front_mut() else { break };
                    let known = first.len().min((offset - *at) as usize);
                    let _ = first.split_to(known);
                    *at += known as u64;
                    self.length -= known;
                    if first.is_empty() {
                        self.unacknowledged.pop_front();
                    }
                }
            }
        }
        self.tell_taken();
    }

    fn tell_taken(&mut self) {
        if self.length == 0 {
            for waiting in self.waiting.drain(..) {
                // A waiter that has left need not be notified.
                let _ = waiting.send(());
            }
        }
    }
}

struct Task {
    client: Client,
    sandbox: SandboxId,
    id: CommandId,
    /// The command to start, until the daemon confirms it.
    wish: Option<Box<RunCommand>>,
    offsets: Offsets,
    stdin: Stdin,
    /// Received and not yet passed to the reader. It outlives its connection: its offset is already counted.
    pending: Option<StreamEvent>,
    events: mpsc::Sender<Result<StreamEvent, ClientError>>,
    input: Option<mpsc::Receiver<Wish>>,
    /// The size that the terminal should have, once set. `None` when it can no longer change.
    size: Option<watch::Receiver<Option<TerminalSize>>>,
    connected: watch::Sender<bool>,
}

/// Why a connection ended.
enum Over {
    /// The whole stream has ended.
    Done,
    /// It cannot be continued.
    Failed(ClientError),
    /// It broke, and the next may continue.
    Broken(ClientError),
    /// The next must be opened in another way.
    Reopen,
}

impl Task {
    async fn run(mut self) {
        let mut patience = Patience::new(self.client.patience);
        loop {
            let over = self.connection(&mut patience).await;
            self.connected.send_replace(false);
            let error = match over {
                Over::Done => return,
                Over::Reopen => continue,
                Over::Failed(error) => error,
                Over::Broken(error) if !self.client.transport.was_reached() => error,
                Over::Broken(error) => {
                    tracing::debug!(%error, "a stream broke");
                    if patience.pause().await {
                        continue;
                    }
                    ClientError::LostPatience { seconds: patience.seconds(), source: Box::new(error) }
                }
            };
            // If the reader is gone, the result is not needed.
            let _ = self.events.send(Err(error)).await;
            return;
        }
    }

    /// One connection from opening to end.
    async fn connection(&mut self, patience: &mut Patience) -> Over {
        let mut socket = match self.client.transport.open(&self.path()).await {
            Ok(socket) => socket,
            Err(error) if error.is_passing() => return Over::Broken(error),
            Err(error) => return Over::Failed(error),
        };
        if let Err(over) = self.greet(&mut socket).await {
            return over;
        }
        let events = self.events.clone();
        let mut heard = Instant::now();
        loop {
            let ready = self.pending.is_some();
            let takes_input = self.stdin.has_room();
            tokio::select! {
                permit = events.reserve(), if ready => {
                    let Ok(permit) = permit else { return Over::Done };
                    let event = self.pending.take().expect("this arm is for something pending");
                    let ended = matches!(event, StreamEvent::Ended(_));
                    permit.send(Ok(event));
                    if ended {
                        return Over::Done;
                    }
                }
                message = socket.next(), if !ready => {
                    heard = Instant::now();
                    match self.hear(message) {
                        Ok(event) => {
                            patience.renew();
                            self.connected.send_if_modified(|connected| !std::mem::replace(connected, true));
                            self.pending = event;
                        }
                        Err(over) => return over,
                    }
                }
                wish = next_wish(&mut self.input), if takes_input => {
                    let message = match wish {
                        Some(Wish::Bytes(bytes)) => {
                            self.stdin.push(bytes.clone());
                            Message::Binary(bytes)
                        }
                        Some(Wish::Taken(waiting)) => {
                            self.stdin.waiting.push(waiting);
                            self.stdin.tell_taken();
                            continue;
                        }
                        Some(Wish::End) => {
                            self.stdin.ended = true;
                            say(&CommandWish::StdinEnd)
                        }
                        None => {
                            // Every writer is gone without closing stdin: stdin stays open, like a file that is not
                            // closed.
                            self.input = None;
                            continue;
                        }
                    };
                    if let Err(over) = self.send(&mut socket, message).await {
                        return over;
                    }
                }
                () = next_size(&mut self.size) => {
                    if let Err(over) = self.send_size(&mut socket).await {
                        return over;
                    }
                }
                () = sleep_until(heard + SILENCE_MAX), if !ready => {
                    return self.broken("the daemon was silent for too long");
                }
            }
        }
    }

    fn path(&self) -> String {
        let Offsets { stdout, stderr } = self.offsets;
        let mut path = match self.wish {
            Some(_) => format!("/v1/sandboxes/{}/commands/stream", self.sandbox),
            None => command_path(self.sandbox, &self.id, "/stream"),
        };
        path.push_str(&format!("?stdout_offset={stdout}&stderr_offset={stderr}"));
        if let Some(at) = self.stdin.at {
            path.push_str(&format!("&stdin_offset={at}"));
        }
        path
    }

    /// The first messages on a connection: the command to start, and the stdin that the previous connection may have
    /// lost.
    async fn greet(&mut self, socket: &mut Socket) -> Result<(), Over> {
        if let Some(wish) = self.wish.clone() {
            self.send(socket, say(&CommandWish::Start(wish))).await?;
        }
        if self.stdin.at.is_some() {
            for bytes in self.stdin.unacknowledged.clone() {
                self.send(socket, Message::Binary(bytes)).await?;
            }
        } else {
            self.stdin.unacknowledged.clear();
            self.stdin.length = 0;
        }
        if self.stdin.ended {
            self.send(socket, say(&CommandWish::StdinEnd)).await?;
        }
        self.send_size(socket).await
    }

    async fn send_size(&mut self, socket: &mut Socket) -> Result<(), Over> {
        let size = self.size.as_mut().and_then(|size| *size.borrow_and_update());
        match size {
            Some(TerminalSize { rows, columns }) => {
                self.send(socket, say(&CommandWish::Resize { rows, columns })).await
            }
            None => Ok(()),
        }
    }

    async fn send(&self, socket: &mut Socket, message: Message) -> Result<(), Over> {
        match tokio::time::timeout(SEND_MAX, socket.send(message)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(self.broken(error)),
            Err(_) => Err(self.broken("the daemon did not take a message in time")),
        }
    }

    fn broken(&self, source: impl Into<crate::Cause>) -> Over {
        Over::Broken(ClientError::Broken { url: self.client.url(), source: source.into() })
    }

    /// Converts a message for the reader.
    fn hear(
        &mut self,
        message: Option<Result<Message, tokio_tungstenite::tungstenite::Error>>,
    ) -> Result<Option<StreamEvent>, Over> {
        match message {
            Some(Ok(Message::Binary(bytes))) => self.hear_output(bytes),
            Some(Ok(Message::Text(text))) => match serde_json::from_str(&text) {
                Ok(event) => self.hear_event(event),
                Err(error) => Err(self.strange(error.to_string())),
            },
            Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => Ok(None),
            Some(Ok(Message::Close(_))) | None => Err(self.broken("the daemon closed the stream")),
            Some(Err(error)) => Err(self.broken(error)),
        }
    }

    fn hear_event(&mut self, event: CommandEvent) -> Result<Option<StreamEvent>, Over> {
        match event {
            CommandEvent::Command(command) => {
                self.wish = None;
                Ok(Some(StreamEvent::Command(command)))
            }
            CommandEvent::Output { .. } => Err(self.strange("output in a text message".into())),
            CommandEvent::Lost { stream, from, to } => {
                *self.offset(stream) = to;
                Ok(Some(StreamEvent::Lost { stream, from, to }))
            }
            CommandEvent::StdinAck { offset } if self.stdin.is_beyond(offset) => {
                self.stdin = Stdin { ended: self.stdin.ended, ..Stdin::default() };
                Err(Over::Reopen)
            }
            CommandEvent::StdinAck { offset } => {
                self.stdin.acknowledge(offset);
                Ok(None)
            }
            CommandEvent::Ended(command) => Ok(Some(StreamEvent::Ended(command))),
            // The daemon has not started it, and will not.
            CommandEvent::Refused(body) if self.wish.is_some() => {
                let error = ClientError::Refused { status: None, body: Box::new(body) };
                Err(if error.is_passing() { Over::Broken(error) } else { Over::Failed(error) })
            }
            CommandEvent::Refused(body) => {
                if body.code.starts_with("stdin_") || body.code == "command_ended" {
                    // Closing the channel notifies writers; stdin in flight is dropped.
                    self.input = None;
                    self.stdin = Stdin::default();
                }
                Ok(Some(StreamEvent::Refused(body)))
            }
        }
    }

    fn hear_output(&mut self, mut message: Bytes) -> Result<Option<StreamEvent>, Over> {
        const PREFIX: usize = 1 + 8;
        if message.len() < PREFIX {
            return Err(self.strange("a binary message without its prefix".into()));
        }
        let prefix = message.split_to(PREFIX);
        let stream = match prefix[0] {
            1 => OutputStream::Stdout,
            2 => OutputStream::Stderr,
            other => return Err(self.strange(format!("output of unknown stream {other}"))),
        };
        let offset = u64::from_le_bytes(prefix[1..].try_into().expect("eight bytes"));
        let seen = *self.offset(stream);
        // Bytes that were seen before are skipped; missing bytes cannot be recovered.
        let Some(known) = seen.checked_sub(offset) else {
            return Err(self.strange(format!("output at offset {offset}, expected {seen}")));
        };
        if known >= message.len() as u64 {
            return Ok(None);
        }
        let bytes = message.split_off(known as usize);
        *self.offset(stream) = seen + bytes.len() as u64;
        Ok(Some(StreamEvent::Output { stream, offset: seen, bytes }))
    }

    fn offset(&mut self, stream: OutputStream) -> &mut u64 {
        match stream {
            OutputStream::Stdout => &mut self.offsets.stdout,
            OutputStream::Stderr => &mut self.offsets.stderr,
        }
    }

    fn strange(&self, what: String) -> Over {
        Over::Failed(ClientError::Strange { url: self.client.url(), what })
    }
}

/// The next item for stdin; never returns once all writers are gone.
async fn next_wish(input: &mut Option<mpsc::Receiver<Wish>>) -> Option<Wish> {
    match input {
        Some(input) => input.recv().await,
        None => std::future::pending().await,
    }
}

/// Returns when there is a size to send; never returns once it can no longer change.
async fn next_size(size: &mut Option<watch::Receiver<Option<TerminalSize>>>) {
    if let Some(receiver) = size
        && receiver.changed().await.is_ok()
    {
        return;
    }
    *size = None;
    std::future::pending().await
}

fn say(wish: &CommandWish) -> Message {
    Message::text(serde_json::to_string(wish).expect("requests are made of types that JSON can write"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task() -> Task {
        let client = Client::new("http://127.0.0.1:1", "key").expect("the URL is valid");
        Task {
            client,
            sandbox: SandboxId::from_random(1),
            id: "c".parse().expect("an id"),
            wish: None,
            offsets: Offsets::default(),
            stdin: Stdin { at: Some(0), ..Stdin::default() },
            pending: None,
            events: mpsc::channel(1).0,
            input: None,
            size: None,
            connected: watch::channel(false).0,
        }
    }

    fn output(stream: u8, offset: u64, bytes: &[u8]) -> Bytes {
        let mut message = vec![stream];
        message.extend_from_slice(&offset.to_le_bytes());
        message.extend_from_slice(bytes);
        message.into()
    }

    #[tokio::test]
    async fn a_byte_that_comes_twice_is_seen_once() {
        let mut task = task();
        let mut seen = Vec::new();
        for (offset, bytes) in [(0, "abc"), (0, "abc"), (1, "bcde"), (5, "f"), (2, "cd")] {
            match task.hear_output(output(1, offset, bytes.as_bytes())) {
                Ok(Some(StreamEvent::Output { bytes, .. })) => seen.extend_from_slice(&bytes),
                Ok(None) => {}
                Ok(Some(_)) | Err(_) => panic!("not what was sent"),
            }
        }
        assert_eq!(seen, b"abcdef");
        assert_eq!(task.offsets, Offsets { stdout: 6, stderr: 0 });
    }

    #[tokio::test]
    async fn a_gap_is_an_error_unless_it_is_named() {
        let mut task = task();
        assert!(matches!(task.hear_output(output(2, 5, b"x")), Err(Over::Failed(_))));
        let lost = CommandEvent::Lost { stream: OutputStream::Stderr, from: 0, to: 5 };
        assert!(task.hear_event(lost).is_ok());
        assert!(task.hear_output(output(2, 5, b"x")).is_ok());
    }

    #[tokio::test]
    async fn rubbish_is_refused_without_a_panic() {
        let mut task = task();
        for message in [&b""[..], b"\x01", b"\x01\0\0\0\0\0\0\0", b"\x03\0\0\0\0\0\0\0\0x"] {
            assert!(task.hear_output(Bytes::from_static(message)).is_err());
        }
        let huge = output(1, u64::MAX, b"x");
        assert!(task.hear_output(huge).is_err());
    }

    #[test]
    fn stdin_is_kept_until_it_is_acknowledged() {
        let mut stdin = Stdin { at: Some(0), ..Stdin::default() };
        stdin.push(Bytes::from_static(b"abc"));
        stdin.push(Bytes::from_static(b"def"));
        stdin.acknowledge(4);
        assert_eq!((stdin.at, stdin.length), (Some(4), 2));
        assert_eq!(stdin.unacknowledged, [Bytes::from_static(b"ef")]);
        stdin.acknowledge(2);
        assert_eq!(stdin.at, Some(4), "an old acknowledgement changes nothing");
        assert!(!stdin.is_beyond(6));
        assert!(stdin.is_beyond(7), "someone else has written");
        stdin.acknowledge(100);
        assert_eq!((stdin.at, stdin.length), (Some(6), 0), "no more can be acknowledged than was sent");
    }
}
