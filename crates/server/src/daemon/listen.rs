//! The listener: accepts connections, gives each a place and its limits, and passes it to the router.
//!
//! In plain text or over TLS. A client that sends headers slowly, opens too many connections or sends too much is cut
//! off here or in `connection`, before any key is checked.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use super::connection::Connection;
use crate::config::{Config, TlsFiles};
use crate::http::places::Places;

/// From the connection to the end of the TLS handshake.
const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(10);
/// The protocols that a client of TLS may choose from, the preferred first (RFC 7301).
const ALPN: [&[u8]; 2] = [b"h2", b"http/1.1"];
/// How long a client may leave a response unread.
const UNREAD_MAX: Duration = Duration::from_secs(60);
/// How long to wait when the process has no descriptor left for another connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A bound socket.
pub struct Listener {
    tcp: TcpListener,
    tls: Option<TlsAcceptor>,
    places: Places,
    address: SocketAddr,
}

impl Listener {
    /// Checks the certificate, if there is one. Otherwise [`Self::bind`] can fail only because of the address.
    pub fn check(config: &Config) -> Result<(), ListenError> {
        config.tls.as_ref().map(acceptor).transpose().map(drop)
    }

    /// Binds, and reads the certificate if there is one.
    pub async fn bind(config: &Config) -> Result<Self, ListenError> {
        let tls = config.tls.as_ref().map(acceptor).transpose()?;
        let bind = |source| ListenError::Bind { address: config.listen, source };
        let tcp = TcpListener::bind(config.listen).await.map_err(bind)?;
        let address = tcp.local_addr().map_err(bind)?;
        Ok(Self { tcp, tls, places: Places::new(config.connections_max as usize), address })
    }

    /// The URL for clients on this machine.
    pub fn local_url(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let mut address = self.address;
        if address.ip().is_unspecified() {
            let loopback =
                if address.is_ipv4() { [127, 0, 0, 1].into() } else { std::net::Ipv6Addr::LOCALHOST.into() };
            address.set_ip(loopback);
        }
        format!("{scheme}://{address}")
    }

    /// Accepts until dropped. Cancel-safe: accepted connections live on in their own tasks. `open` counts them and
    /// signals them to finish.
    pub async fn serve(&self, router: Router, open: &Connections) {
        loop {
            let (tcp, peer) = match self.tcp.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, or a connection that broke before it was accepted. Both are temporary.
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let (place, leave) = self.places.take(peer.ip()).await;
            let connection =
                Connection { router: router.clone(), finish: open.0.subscribe(), place, leave, peer };
            let tls = self.tls.clone();
            tokio::spawn(async move {
                let Some(local) = prepare(&tcp) else { return };
                let Some(tls) = tls else { return connection.serve(tcp, local).await };
                let shaken = tokio::select! {
                    shaken = tokio::time::timeout(HANDSHAKE_TIME_MAX, tls.accept(tcp)) => shaken,
                    () = connection.leave.asked() => return,
                };
                match shaken {
                    Ok(Ok(stream)) => connection.serve(stream, local).await,
                    Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
                    Err(_) => tracing::debug!("a TLS handshake took too long"),
                }
            });
        }
    }
}

/// The open connections. One that became a WebSocket no longer counts: its handler closes it.
pub struct Connections(watch::Sender<bool>);

impl Connections {
    /// None yet.
    #[allow(clippy::new_without_default)] // There is nothing default about a listener's connections.
    pub fn new() -> Self {
        Self(watch::Sender::new(false))
    }

    /// Lets each connection finish its current request, and returns when all have.
    pub async fn finish(self) {
        self.0.send_replace(true);
        self.0.closed().await;
    }
}

fn prepare(tcp: &TcpStream) -> Option<SocketAddr> {
    // Responses are small and clients wait for them: never delay one to fill a packet.
    tcp.set_nodelay(true).ok()?;
    // Otherwise a client that sends requests and never reads the responses would hold a connection for ever, without a
    // key.
    rustix::net::sockopt::set_tcp_user_timeout(tcp, UNREAD_MAX.as_millis() as u32).ok()?;
    tcp.local_addr().ok()
}

fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor, ListenError> {
    let pem = |path: &PathBuf| {
        let path = path.clone();
        move |source| ListenError::Pem { path, source }
    };
    let chain = CertificateDer::pem_file_iter(&files.cert)
        .and_then(|certificates| certificates.collect::<Result<Vec<_>, _>>())
        .map_err(pem(&files.cert))?;
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(pem(&files.key))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
        .map_err(|source| ListenError::Certificate { path: files.cert.clone(), source })?;
    config.alpn_protocols = ALPN.iter().map(|protocol| protocol.to_vec()).collect();
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Why the daemon cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The address is in use, or not one of this machine.
    #[error("cannot listen on {address}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// Not a PEM file.
    #[error("cannot read `{}`", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// Why.
        source: rustls::pki_types::pem::Error,
    },
    /// Certificate and key are not a pair, or are of an unknown kind.
    #[error("cannot use the certificate in `{}`", path.display())]
    Certificate {
        /// The file.
        path: PathBuf,
        /// Why.
        source: rustls::Error,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_client_that_reads_nothing_is_given_up_by_the_kernel() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let (client, accepted) =
            tokio::join!(TcpStream::connect(listener.local_addr().expect("it has one")), listener.accept());
        let ours = accepted.expect("it comes").0;
        assert!(prepare(&ours).is_some());
        let milliseconds = rustix::net::sockopt::tcp_user_timeout(&ours).expect("it can be asked");
        assert_eq!(u128::from(milliseconds), UNREAD_MAX.as_millis());
        assert!(ours.nodelay().expect("it can be asked"));
        drop(client);
    }
}
