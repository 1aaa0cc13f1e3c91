//! Ports of sandboxes: which are open, links to them, and TCP connections to them.

use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use http::Method;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio_tungstenite::tungstenite::Message;
use wire::{LinkId, SandboxId, api};

use crate::error::ClientError;
use crate::transport::{Socket, Wait};
use crate::{ANSWER_TIME_MAX, Client, Patience, Repeat, json, plain};

/// How much is sent in one message.
const MESSAGE: usize = 64 << 10;
/// The text message by which either side says that it sends nothing more.
const END: &str = "end";

impl Client {
    /// Lists the ports that programs of a sandbox listen on.
    pub async fn ports(&self, sandbox: SandboxId) -> Result<Vec<api::PortInfo>, ClientError> {
        let list: api::PortList = self.read(format!("/v1/sandboxes/{sandbox}/ports")).await?;
        Ok(list.ports)
    }

    /// Waits until a program of a sandbox listens on a port.
    pub async fn wait_for_port(
        &self,
        sandbox: SandboxId,
        port: u16,
        wait: Duration,
    ) -> Result<api::PortInfo, ClientError> {
        let seconds = wait.as_secs_f64();
        let path = format!("/v1/sandboxes/{sandbox}/ports?wait={port}&wait_seconds={seconds}");
        let mut call = plain(Method::GET, path);
        call.wait = Wait::AtMost(wait.saturating_add(ANSWER_TIME_MAX));
        let list: api::PortList = self.call(call, Repeat::Harmless).await?;
        let missing = || ClientError::Strange { url: self.url(), what: "the port is not in the list".into() };
        list.ports.into_iter().find(|info| info.port == port).ok_or_else(missing)
    }

    /// Makes a link to a port. Never repeated, because a lost response would leave a link that no caller knows.
    pub async fn create_link(
        &self,
        sandbox: SandboxId,
        wish: &api::CreateLink,
    ) -> Result<api::CreatedLink, ClientError> {
        self.call(json(Method::POST, format!("/v1/sandboxes/{sandbox}/links"), wish), Repeat::Never).await
    }

    /// Lists the links to a sandbox's ports that still work.
    pub async fn links(&self, sandbox: SandboxId) -> Result<Vec<api::PortLink>, ClientError> {
        let list: api::LinkList = self.read(format!("/v1/sandboxes/{sandbox}/links")).await?;
        Ok(list.links)
    }

    /// Revokes a link.
    pub async fn revoke_link(&self, sandbox: SandboxId, link: LinkId) -> Result<(), ClientError> {
        self.act(Method::DELETE, format!("/v1/sandboxes/{sandbox}/links/{link}"), Repeat::Harmless).await
    }

    /// Connects to a port of a sandbox. Waits for a daemon that is away, as other calls do.
    pub async fn tunnel(&self, sandbox: SandboxId, port: u16) -> Result<Tunnel, ClientError> {
        let path = format!("/v1/sandboxes/{sandbox}/tunnels/{port}");
        let mut patience = Patience::new(self.patience);
        loop {
            match self.transport.open(&path).await {
                Ok(socket) => return Ok(Tunnel { socket, url: self.url() }),
                Err(error) if error.is_passing() && self.transport.was_reached() => {
                    if !patience.pause().await {
                        return Err(error);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// A TCP connection to a port of a sandbox.
pub struct Tunnel {
    socket: Socket,
    url: String,
}

/// How one direction has ended.
enum Side {
    /// Its sender has sent everything.
    Ended,
    /// The connection is over.
    Over,
}

impl Tunnel {
    /// Carries bytes between the port and a stream, until both have ended. Each side may end its direction alone.
    pub async fn carry(self, stream: impl AsyncRead + AsyncWrite) -> Result<(), ClientError> {
        let Self { socket, url } = self;
        let (mut sink, mut messages) = socket.split();
        let (mut read, mut write) = tokio::io::split(stream);
        let broken = |source| ClientError::Broken { url: url.clone(), source };
        {
            let outgoing = send(&mut sink, &mut read);
            let incoming = receive(&mut messages, &mut write);
            tokio::pin!(outgoing, incoming);
            let (mut sent, mut received) = (false, false);
            while !(sent && received) {
                tokio::select! {
                    side = &mut outgoing, if !sent => match side.map_err(broken)? {
                        Side::Ended => sent = true,
                        Side::Over => break,
                    },
                    side = &mut incoming, if !received => match side.map_err(broken)? {
                        Side::Ended => received = true,
                        Side::Over => break,
                    },
                }
            }
        }
        // The other side may have left already.
        let _ = sink.close().await;
        Ok(())
    }
}

type Broken = Box<dyn std::error::Error + Send + Sync>;

async fn send<S: AsyncRead + AsyncWrite>(
    sink: &mut SplitSink<Socket, Message>,
    read: &mut ReadHalf<S>,
) -> Result<Side, Broken> {
    let mut buffer = vec![0; MESSAGE];
    loop {
        match read.read(&mut buffer).await {
            Ok(0) => {
                sink.send(Message::text(END)).await?;
                return Ok(Side::Ended);
            }
            Ok(length) => sink.send(Message::Binary(Bytes::copy_from_slice(&buffer[..length]))).await?,
            // The local side has broken its connection, which ends the other too.
            Err(_) => return Ok(Side::Over),
        }
    }
}

async fn receive<S: AsyncRead + AsyncWrite>(
    messages: &mut SplitStream<Socket>,
    write: &mut WriteHalf<S>,
) -> Result<Side, Broken> {
    loop {
        match messages.next().await {
            Some(Ok(Message::Binary(bytes))) => {
                if write.write_all(&bytes).await.is_err() {
                    return Ok(Side::Over);
                }
            }
            Some(Ok(Message::Text(text))) if text.as_str() == END => {
                // A side that has left needs not be told.
                let _ = write.shutdown().await;
                return Ok(Side::Ended);
            }
            Some(Ok(Message::Close(_))) | None => return Ok(Side::Over),
            Some(Ok(Message::Text(_) | Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
            Some(Err(error)) => return Err(error.into()),
        }
    }
}
