//! Connections whose TLS ends here, so that requests can get credentials or be checked by rules.
//!
//! Only for hosts that a credential or a rule names. The host is dialled and verified first, with the protocols that the client
//! offers; then the client gets what the host chose. If the host cannot be verified, the client reads why.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::{LazyConfigAcceptor, StartHandshake, TlsConnector};

use super::serve::{Visit, about, copy, refused, with_cause, words};
use super::{Gateway, To};
use crate::ca::Speaks;
use crate::control::{Used, What};
use crate::credential::{Credential, Vault};
use crate::http::{Guard, HEAD_BYTES_MAX, Page, Site, intercept, read_head};
use crate::policy::{Name, Protocol};
use crate::relay::{Metered, Prefixed};

/// How long each of the two handshakes may take.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(15);
/// How much is read at once while a request is awaited that only gets a page.
const PAGE_READ_BYTES: usize = 4096;

/// How hosts are verified: with the roots of the system and the operator's.
#[derive(Debug)]
pub struct Hosts {
    http1: Arc<ClientConfig>,
    any: Arc<ClientConfig>,
}

impl Hosts {
    /// With these roots.
    pub fn new(roots: &ClientConfig) -> Self {
        let with = |protocols: &[Speaks]| {
            let mut config = roots.clone();
            config.alpn_protocols = protocols.iter().map(|speaks| speaks.alpn().to_vec()).collect();
            Arc::new(config)
        };
        Self { http1: with(&[Speaks::Http1]), any: with(&[Speaks::Http2, Speaks::Http1]) }
    }
}

type Client = Prefixed<TcpStream>;

impl Visit<'_> {
    /// Whether requests of this connection must be read.
    pub(super) fn is_terminated(&self) -> bool {
        match &self.to {
            To::Name(name) => self.gateway.vault().covers(name, self.port),
            To::Address(_) => false,
        }
    }

    /// Checks the heads of plain requests: they never carry a credential, and must not carry a placeholder.
    pub(super) fn guard(&self) -> Guard {
        let gateway = Arc::clone(self.gateway);
        Arc::new(move |parts| {
            gateway.vault().check_head(parts).map_err(|refusal| format!("{refusal}, and this is plain HTTP"))
        })
    }

    /// Serves the requests of a connection. Boxed: most connections pass unread and should not carry its state.
    pub(super) fn terminate(
        &self,
        client: &TcpStream,
        server: &TcpStream,
        bytes: Vec<u8>,
    ) -> Pin<Box<dyn Future<Output = Result<(), String>> + Send>> {
        let To::Name(name) = &self.to else {
            return Box::pin(std::future::ready(Err("an address has no certificate".to_owned())));
        };
        let site = Terminated { gateway: Arc::clone(self.gateway), name: name.clone(), port: self.port };
        let (client, server, meter) = (copy(client), copy(server), Arc::clone(&self.meter));
        Box::pin(async move {
            let client = Prefixed::new(bytes, client.map_err(words)?);
            let server = Metered::new(server.map_err(words)?, meter);
            serve(client, server, Arc::new(site)).await
        })
    }
}

async fn serve(client: Client, server: Metered<TcpStream>, site: Arc<Terminated>) -> Result<(), String> {
    let shared = Arc::clone(&site.gateway.shared);
    let acceptor = LazyConfigAcceptor::new(rustls::server::Acceptor::default(), client);
    let start = timeout(HANDSHAKE_DEADLINE, acceptor).await.map_err(late)?.map_err(words)?;
    let config = if offers_http2(&start) { &shared.hosts.any } else { &shared.hosts.http1 };
    let server_name = ServerName::try_from(site.name.to_string()).map_err(|error| error.to_string())?;
    let connecting = TlsConnector::from(Arc::clone(config)).connect(server_name, server);
    let connected =
        timeout(HANDSHAKE_DEADLINE, connecting).await.map_err(late).and_then(|done| done.map_err(words));
    let server = match connected {
        Ok(server) => server,
        Err(error) => {
            let why = format!("cannot verify the host: {error}");
            let explained = timeout(HANDSHAKE_DEADLINE, explain(start, Arc::clone(&site), why.clone())).await;
            if !matches!(explained, Ok(Ok(()))) {
                tracing::debug!(sandbox = %site.gateway.sandbox, "cannot show why a host was not verified");
            }
            return Err(why);
        }
    };
    let speaks = match server.get_ref().1.alpn_protocol() {
        Some(protocol) if protocol == Speaks::Http2.alpn() => Speaks::Http2,
        _ => Speaks::Http1,
    };
    let leaf = shared.ca.config_for(&site.name, speaks).map_err(|error| with_cause(&error))?;
    let accepting = start.into_stream(leaf);
    let client = timeout(HANDSHAKE_DEADLINE, accepting)
        .await
        .map_err(late)?
        .map_err(|error| format!("the sandbox did not accept the certificate: {error}"))?;
    intercept(client, server, speaks, site).await.map_err(|error| with_cause(&error))
}

fn offers_http2(start: &StartHandshake<Client>) -> bool {
    let hello = start.client_hello();
    hello.alpn().is_some_and(|mut offers| offers.any(|offer| offer == Speaks::Http2.alpn()))
}

fn late(_: tokio::time::error::Elapsed) -> String {
    format!("no handshake within {} s", HANDSHAKE_DEADLINE.as_secs())
}

/// Tells the client over TLS why there is no connection.
async fn explain(start: StartHandshake<Client>, site: Arc<Terminated>, why: String) -> io::Result<()> {
    let ca = &site.gateway.shared.ca;
    let leaf = ca.config_for(&site.name, Speaks::Http1).map_err(io::Error::other)?;
    let mut client = start.into_stream(leaf).await?;
    let (mut head, mut buffer) = (Vec::new(), [0; PAGE_READ_BYTES]);
    while matches!(read_head(&head), Ok(None)) && head.len() < HEAD_BYTES_MAX {
        let count = client.read(&mut buffer).await?;
        if count == 0 {
            break;
        }
        head.extend_from_slice(&buffer[..count]);
    }
    client.write_all(&Page::unreachable(&why).bytes()).await?;
    client.shutdown().await
}

/// A host whose requests are read.
struct Terminated {
    gateway: Arc<Gateway>,
    name: Name,
    port: u16,
}

impl Site for Terminated {
    fn name(&self) -> &Name {
        &self.name
    }

    fn port(&self) -> u16 {
        self.port
    }

    fn vault(&self) -> Arc<Vault> {
        self.gateway.vault()
    }

    fn can_record(&self) -> bool {
        self.gateway.shared.outbox.has_room_for_use()
    }

    fn used(&self, of: Arc<Credential>) -> Used {
        Used {
            id: random_id(),
            sandbox: self.gateway.sandbox,
            at_ms: self.gateway.event(What::Opened).at_ms,
            secret: of.id,
            secret_name: of.name.clone(),
            host: self.name.clone(),
            port: self.port,
            method: String::new(),
            path: String::new(),
            status: 0,
            sent: 0,
            received: 0,
        }
    }

    fn record(&self, used: Used) {
        self.gateway.shared.outbox.used(used);
    }

    fn refused(&self, why: &str) {
        let to = To::Name(self.name.clone());
        let mut event = about(&self.gateway, What::Refused, &to, self.port, Some(Protocol::Tls));
        event.why = Some(why.to_owned());
        refused(&self.gateway, event);
    }
}

/// An id for a record. Without randomness, the count and the time still tell records of one process apart.
fn random_id() -> u128 {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let mut bytes = [0; 16];
    if getrandom::fill(&mut bytes).is_err() {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        return now.as_nanos() << 32 | u128::from(COUNT.fetch_add(1, Ordering::Relaxed));
    }
    u128::from_be_bytes(bytes)
}
