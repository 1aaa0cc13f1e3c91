//! TCP connections to ports of a sandbox, many in one WebSocket: yamux in binary messages, whose borders mean nothing.
//!
//! For each connection the client opens a stream and sends three bytes: version 1 and the port. The daemon answers with
//! one byte, and from then on the stream carries the connection's bytes. Both sides keep windows of 256 KiB per stream,
//! so a connection that nobody reads holds up none of the others.

use std::collections::HashMap;
use std::time::Duration;

use axum::Extension;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use engine::port::PortStream;
use engine::{EngineError, Owner, Port};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{AbortHandle, JoinSet};
use tracing::Instrument;
use wire::SandboxId;

use super::error::Refusal;
use super::read::Target;
use crate::http::app::{App, Arrival};
use crate::http::websocket::bounded;

/// What each side may send on a stream before the other has read it.
const WINDOW: u32 = 256 << 10;
/// The most streams of one session at once.
const STREAMS_MAX: usize = 256;
/// The longest message and the longest frame: a window, and its head.
const MESSAGE_MAX: usize = 1 << 20;
/// The most bytes in one frame that we send.
const FRAME_MAX: usize = 64 << 10;
/// Frames that wait to be sent. Each stream adds one at a time.
const OUTGOING_MAX: usize = 64;
/// Pieces that wait for a connection into the sandbox. Their bytes are bounded by the window.
const PIECES_MAX: usize = 4096;
/// How often a silent client is pinged.
const PING_INTERVAL: Duration = Duration::from_secs(20);
/// The length of the head of a frame.
const HEAD: usize = 12;

const DATA: u8 = 0;
const WINDOW_UPDATE: u8 = 1;
const PING: u8 = 2;
const GO_AWAY: u8 = 3;

const SYN: u16 = 1;
const ACK: u16 = 2;
const FIN: u16 = 4;
const RST: u16 = 8;

/// The version of what a client says first on a stream.
const VERSION: u8 = 1;
/// The answers to that.
const OK: u8 = 0;
const NOT_ALLOWED: u8 = 1;
const DIAL_FAILED: u8 = 2;
const BAD_VERSION: u8 = 3;

/// `GET {dataplane}/tunnel`
pub async fn tunnel(
    State(app): State<App>,
    target: Target,
    arrival: Option<Extension<Arrival>>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Refusal> {
    let upgrade = upgrade.map_err(|rejection| {
        Refusal::new(StatusCode::UPGRADE_REQUIRED, "UpgradeRequired", rejection.body_text())
    })?;
    let span = tracing::Span::current();
    let session = move |socket: WebSocket| async move {
        let _place = arrival;
        let mut stopping = app.stopping(&target.key);
        let (sink, stream) = socket.split();
        let (frames, outgoing) = mpsc::channel(OUTGOING_MAX);
        let dial = Dial { app: app.clone(), owner: target.key.owner.clone(), sandbox: target.sandbox.id };
        let session =
            Session { dial, frames, streams: HashMap::new(), tasks: JoinSet::new(), buffer: Vec::new() };
        let mut sink = sink;
        let stopped = tokio::select! {
            () = session.read(stream) => false,
            () = write(&mut sink, outgoing) => false,
            _ = stopping.wait() => true,
        };
        if stopped {
            // A client that is gone needs no farewell.
            let _ = tokio::time::timeout(PING_INTERVAL, sink.close()).await;
        }
    };
    let upgrade = bounded(upgrade, MESSAGE_MAX);
    Ok(upgrade.on_upgrade(move |socket| session(socket).instrument(span)).into_response())
}

/// A frame's head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Head {
    kind: u8,
    flags: u16,
    stream: u32,
    length: u32,
}

impl Head {
    fn parse(bytes: &[u8; HEAD]) -> Option<Self> {
        let [version, kind, f0, f1, s0, s1, s2, s3, l0, l1, l2, l3] = *bytes;
        (version == 0 && kind <= GO_AWAY).then_some(Self {
            kind,
            flags: u16::from_be_bytes([f0, f1]),
            stream: u32::from_be_bytes([s0, s1, s2, s3]),
            length: u32::from_be_bytes([l0, l1, l2, l3]),
        })
    }

    fn write(self) -> [u8; HEAD] {
        let mut bytes = [0; HEAD];
        bytes[1] = self.kind;
        bytes[2..4].copy_from_slice(&self.flags.to_be_bytes());
        bytes[4..8].copy_from_slice(&self.stream.to_be_bytes());
        bytes[8..].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }
}

fn frame(kind: u8, flags: u16, stream: u32, length: u32, body: &[u8]) -> Bytes {
    let head = Head { kind, flags, stream, length }.write();
    Bytes::from([&head[..], body].concat())
}

/// Sends frames, and pings so that a client that is gone is noticed.
async fn write(sink: &mut SplitSink<WebSocket, Message>, mut outgoing: mpsc::Receiver<Bytes>) {
    let mut pings = tokio::time::interval(PING_INTERVAL);
    loop {
        let message = tokio::select! {
            frame = outgoing.recv() => match frame {
                Some(frame) => Message::Binary(frame),
                None => return,
            },
            _ = pings.tick() => Message::Ping(Bytes::new()),
        };
        if sink.send(message).await.is_err() {
            return;
        }
    }
}

/// How a stream's port is reached.
#[derive(Clone)]
struct Dial {
    app: App,
    owner: Owner,
    sandbox: SandboxId,
}

/// One client.
struct Session {
    dial: Dial,
    frames: mpsc::Sender<Bytes>,
    streams: HashMap<u32, Stream>,
    /// Dropped with the session, which ends them.
    tasks: JoinSet<u32>,
    buffer: Vec<u8>,
}

/// A stream, as the reader knows it.
struct Stream {
    pieces: mpsc::Sender<Bytes>,
    /// What we may still send.
    window: std::sync::Arc<Semaphore>,
    /// What the client may still send.
    room: std::sync::Arc<std::sync::atomic::AtomicU32>,
    task: AbortHandle,
}

/// The client broke the protocol, or left.
struct Over;

impl Session {
    async fn read(mut self, mut messages: SplitStream<WebSocket>) {
        loop {
            tokio::select! {
                message = messages.next() => match message {
                    Some(Ok(Message::Binary(bytes))) => {
                        self.buffer.extend_from_slice(&bytes);
                        if self.frames().await.is_err() {
                            return;
                        }
                    }
                    Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                    Some(Ok(Message::Text(_) | Message::Close(_)) | Err(_)) | None => return,
                },
                Some(ended) = self.tasks.join_next(), if !self.tasks.is_empty() => {
                    if let Ok(stream) = ended {
                        self.streams.remove(&stream);
                    }
                }
            }
        }
    }

    /// Handles all whole frames in the buffer.
    async fn frames(&mut self) -> Result<(), Over> {
        let mut at = 0;
        while let Some(head) = self.buffer.get(at..at + HEAD) {
            let head: [u8; HEAD] = head.try_into().map_err(|_| Over)?;
            let head = Head::parse(&head).ok_or(Over)?;
            let length = if head.kind == DATA { head.length as usize } else { 0 };
            if length > MESSAGE_MAX {
                return Err(Over);
            }
            let Some(body) = self.buffer.get(at + HEAD..at + HEAD + length) else { break };
            let body = Bytes::copy_from_slice(body);
            at += HEAD + length;
            self.frame(head, body).await?;
        }
        self.buffer.drain(..at);
        if self.buffer.len() > 2 * MESSAGE_MAX { Err(Over) } else { Ok(()) }
    }

    async fn frame(&mut self, head: Head, body: Bytes) -> Result<(), Over> {
        match head.kind {
            PING if head.flags & SYN != 0 => return self.send(frame(PING, ACK, 0, head.length, &[])).await,
            PING => return Ok(()),
            GO_AWAY => return Err(Over),
            _ => {}
        }
        if head.flags & SYN != 0 {
            self.open(head.stream).await?;
        }
        let Some(stream) = self.streams.get(&head.stream) else {
            // It has ended here, and the client does not know yet.
            return Ok(());
        };
        if head.flags & RST != 0 {
            stream.task.abort();
            self.streams.remove(&head.stream);
            return Ok(());
        }
        if head.kind == WINDOW_UPDATE {
            let more = head.length as usize;
            if stream.window.available_permits().saturating_add(more) > Semaphore::MAX_PERMITS {
                return Err(Over);
            }
            stream.window.add_permits(more);
        } else if !body.is_empty() {
            use std::sync::atomic::Ordering::Relaxed;
            let room = stream.room.load(Relaxed);
            let length = u32::try_from(body.len()).map_err(|_| Over)?;
            // Nobody else takes from it, so it does not shrink in between.
            if length > room {
                return Err(Over);
            }
            stream.room.fetch_sub(length, Relaxed);
            if let Err(mpsc::error::TrySendError::Full(_)) = stream.pieces.try_send(body) {
                return Err(Over);
            }
        }
        if head.flags & FIN != 0
            && let Some(stream) = self.streams.get_mut(&head.stream)
        {
            // The end of the pieces is the end of this direction.
            stream.pieces = mpsc::channel(1).0;
        }
        Ok(())
    }

    async fn send(&self, frame: Bytes) -> Result<(), Over> {
        self.frames.send(frame).await.map_err(|_| Over)
    }

    async fn open(&mut self, id: u32) -> Result<(), Over> {
        // Clients open streams with odd numbers.
        if id.is_multiple_of(2) || self.streams.contains_key(&id) {
            return Err(Over);
        }
        if self.streams.len() >= STREAMS_MAX {
            return self.send(frame(WINDOW_UPDATE, RST, id, 0, &[])).await;
        }
        let (pieces, waiting) = mpsc::channel(PIECES_MAX);
        let window = std::sync::Arc::new(Semaphore::new(WINDOW as usize));
        let room = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(WINDOW));
        let carried = Carried {
            id,
            dial: self.dial.clone(),
            frames: self.frames.clone(),
            window: window.clone(),
            room: room.clone(),
        };
        let task = self.tasks.spawn(async move {
            carried.run(waiting).await;
            id
        });
        self.streams.insert(id, Stream { pieces, window, room, task });
        self.send(frame(WINDOW_UPDATE, ACK, id, 0, &[])).await
    }
}

/// A stream, as its task knows it.
struct Carried {
    id: u32,
    dial: Dial,
    frames: mpsc::Sender<Bytes>,
    window: std::sync::Arc<Semaphore>,
    room: std::sync::Arc<std::sync::atomic::AtomicU32>,
}

impl Carried {
    async fn run(self, mut pieces: mpsc::Receiver<Bytes>) {
        let flags = match self.carry(&mut pieces).await {
            Ok(()) => FIN,
            Err(Over) => RST,
        };
        // If the session is over, so is the stream.
        let _ = self.frames.send(frame(WINDOW_UPDATE, flags, self.id, 0, &[])).await;
    }

    async fn carry(&self, pieces: &mut mpsc::Receiver<Bytes>) -> Result<(), Over> {
        let mut said = Vec::new();
        while said.len() < 3 {
            let piece = pieces.recv().await.ok_or(Over)?;
            self.taken(piece.len()).await?;
            said.extend_from_slice(&piece);
        }
        let rest = Bytes::from(said.split_off(3));
        let (answer, stream) = match (said[0], Port::new(u16::from_be_bytes([said[1], said[2]]))) {
            (VERSION, Ok(port)) => {
                let Dial { app, owner, sandbox } = &self.dial;
                match app.engine.connect_port(owner, *sandbox, port).await {
                    Ok(stream) => (OK, Some(stream)),
                    Err(EngineError::PortConnections { .. }) => (NOT_ALLOWED, None),
                    Err(error) => {
                        tracing::debug!(%error, "a tunnel's stream was not connected");
                        (DIAL_FAILED, None)
                    }
                }
            }
            (VERSION, Err(_)) => (NOT_ALLOWED, None),
            _ => (BAD_VERSION, None),
        };
        self.data(&[answer]).await?;
        let Some(stream) = stream else { return Ok(()) };
        let (read, write) = tokio::io::split(stream);
        let (sent, received) = tokio::join!(self.outwards(read), self.inwards(write, rest, pieces));
        sent.and(received)
    }

    /// From the sandbox to the client.
    async fn outwards(&self, mut read: ReadHalf<PortStream>) -> Result<(), Over> {
        let mut buffer = vec![0; FRAME_MAX];
        loop {
            match read.read(&mut buffer).await {
                Ok(0) => return self.frames.send(frame(DATA, FIN, self.id, 0, &[])).await.map_err(|_| Over),
                Ok(length) => self.data(&buffer[..length]).await?,
                Err(_) => return Err(Over),
            }
        }
    }

    /// From the client to the sandbox.
    async fn inwards(
        &self,
        mut write: WriteHalf<PortStream>,
        first: Bytes,
        pieces: &mut mpsc::Receiver<Bytes>,
    ) -> Result<(), Over> {
        write.write_all(&first).await.map_err(|_| Over)?;
        while let Some(piece) = pieces.recv().await {
            write.write_all(&piece).await.map_err(|_| Over)?;
            self.taken(piece.len()).await?;
        }
        // A server that has closed its end already needs not be told.
        let _ = write.shutdown().await;
        Ok(())
    }

    /// Sends bytes as the client's window allows.
    async fn data(&self, mut bytes: &[u8]) -> Result<(), Over> {
        while !bytes.is_empty() {
            let some = self.window.acquire().await.map_err(|_| Over)?;
            let more = (bytes.len() - 1).min(self.window.available_permits());
            // Nobody else takes from it, so it does not shrink in between.
            let rest = self.window.try_acquire_many(more as u32).map_err(|_| Over)?;
            some.forget();
            rest.forget();
            let (now, later) = bytes.split_at(1 + more);
            self.frames.send(frame(DATA, 0, self.id, now.len() as u32, now)).await.map_err(|_| Over)?;
            bytes = later;
        }
        Ok(())
    }

    /// Gives the client its window back for bytes that have gone on.
    async fn taken(&self, length: usize) -> Result<(), Over> {
        let length = length as u32;
        self.room.fetch_add(length, std::sync::atomic::Ordering::Relaxed);
        self.frames.send(frame(WINDOW_UPDATE, 0, self.id, length, &[])).await.map_err(|_| Over)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_reads_back_and_nonsense_is_refused() {
        let head = Head { kind: DATA, flags: SYN | FIN, stream: 7, length: 70_000 };
        assert_eq!(Head::parse(&head.write()), Some(head));
        let mut wrong = head.write();
        wrong[0] = 1;
        assert_eq!(Head::parse(&wrong), None);
        let mut wrong = head.write();
        wrong[1] = 4;
        assert_eq!(Head::parse(&wrong), None);
    }
}
