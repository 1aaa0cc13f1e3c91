//! The listener: connections come in, each with its bounds, and go to the router.
//!
//! HTTP/1.1 only for now, in the clear or over TLS. Who sends headers slowly, opens too many connections or sends
//! too much is cut off here, before any key was looked at.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_rustls::TlsAcceptor;

use crate::app::Arrival;
use crate::config::{Config, TlsFiles};
use crate::refusal::Worded;

/// From the first byte, or from the end of the request before, to the end of the headers.
const HEADERS_TIME_MAX: Duration = Duration::from_secs(30);
/// Headers of one request.
const HEADERS_MAX: usize = 64;
/// What one connection buffers while it reads headers, which are thereby bounded too.
const READ_BUFFER_MAX: usize = 64 << 10;
/// From the connection to the end of the TLS handshake.
const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(10);
/// How long a client may leave an answer unread.
const UNREAD_MAX: Duration = Duration::from_secs(60);
/// How long to wait when the process has no descriptor left for another connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A bound socket.
pub struct Listener {
    tcp: TcpListener,
    tls: Option<TlsAcceptor>,
    places: Arc<Semaphore>,
    address: SocketAddr,
}

impl Listener {
    /// Whether the certificate can be used, where there is one. What [`Self::bind`] may find out beyond that is the address.
    pub fn check(config: &Config) -> Result<(), ListenError> {
        config.tls.as_ref().map(acceptor).transpose().map(drop)
    }

    /// Binds, and reads the certificate where there is one.
    pub async fn bind(config: &Config) -> Result<Self, ListenError> {
        let tls = config.tls.as_ref().map(acceptor).transpose()?;
        let bind = |source| ListenError::Bind { address: config.listen, source };
        let tcp = TcpListener::bind(config.listen).await.map_err(bind)?;
        let address = tcp.local_addr().map_err(bind)?;
        Ok(Self { tcp, tls, places: Arc::new(Semaphore::new(config.connections_max as usize)), address })
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

    /// Accepts until dropped. Cancel-safe: connections that were accepted live on in tasks of their own.
    /// `open` counts them and tells them when to finish.
    pub async fn serve(&self, router: Router, open: &Connections) {
        loop {
            let place = self.places.clone().acquire_owned().await.expect("the semaphore is never closed");
            let tcp = match self.tcp.accept().await {
                Ok((tcp, _)) => tcp,
                Err(error) => {
                    // Out of descriptors, or a connection that broke before it was accepted. Neither is for ever.
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let connection = Connection {
                router: router.clone(),
                finish: open.0.subscribe(),
                place: Place(Arc::new(place)),
            };
            let tls = self.tls.clone();
            tokio::spawn(async move {
                match tls {
                    None => connection.start(tcp).await,
                    Some(tls) => connection.start_tls(tcp, tls).await,
                }
            });
        }
    }
}

/// The open connections. One that became a WebSocket is no longer among them: whoever speaks on it sees to its end.
pub struct Connections(watch::Sender<bool>);

impl Connections {
    /// None yet.
    #[allow(clippy::new_without_default)] // There is nothing default about a listener's connections.
    pub fn new() -> Self {
        Self(watch::Sender::new(false))
    }

    /// Lets each finish the request it is at, and returns when all have.
    pub async fn finish(self) {
        self.0.send_replace(true);
        self.0.closed().await;
    }
}

/// One of the connections that may be open at once. Held by the connection, and by what it becomes.
#[derive(Debug, Clone)]
pub struct Place(#[allow(dead_code)] Arc<OwnedSemaphorePermit>);

/// What a connection's task holds.
struct Connection {
    router: Router,
    finish: watch::Receiver<bool>,
    place: Place,
}

impl Connection {
    async fn start(self, tcp: TcpStream) {
        if let Some(local) = prepare(&tcp) {
            self.serve(tcp, local).await;
        }
    }

    async fn start_tls(self, tcp: TcpStream, tls: TlsAcceptor) {
        let Some(local) = prepare(&tcp) else { return };
        match tokio::time::timeout(HANDSHAKE_TIME_MAX, tls.accept(tcp)).await {
            Ok(Ok(stream)) => self.serve(stream, local).await,
            Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
            Err(_) => tracing::debug!("a TLS handshake took too long"),
        }
    }

    async fn serve(
        mut self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        local: SocketAddr,
    ) {
        let router = self.router.layer(axum::Extension(Arrival { local, place: self.place.clone() }));
        let service = TowerToHyperService::new(router);
        let begun = Arc::new(AtomicBool::new(false));
        let stream = Worded::new(stream, Arc::clone(&begun));
        let service = hyper::service::service_fn(move |request: hyper::Request<Incoming>| {
            begun.store(true, Ordering::Relaxed);
            hyper::service::Service::call(&service, request.map(axum::body::Body::new))
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADERS_TIME_MAX)
            .max_headers(HEADERS_MAX)
            .max_buf_size(READ_BUFFER_MAX)
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades();
        tokio::pin!(connection);
        let finish = async {
            // Were the sender gone, that would be the end too.
            let _ = self.finish.wait_for(|finish| *finish).await;
        };
        let done = tokio::select! {
            done = connection.as_mut() => done,
            () = finish => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        // Errors here are the client's: it broke off, or did not speak HTTP. What a handler fails at is logged there.
        if let Err(error) = done {
            tracing::debug!(%error, "a connection ended early");
        }
    }
}

fn prepare(tcp: &TcpStream) -> Option<SocketAddr> {
    // Answers are small and waited for: never hold one back to fill a packet.
    tcp.set_nodelay(true).ok()?;
    // Someone who asks and never reads the answers would otherwise hold a connection for ever, and needs no key for it.
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
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
        .map_err(|source| ListenError::Certificate { path: files.cert.clone(), source })?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Why the daemon cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The address is taken, or not ours.
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
    /// Certificate and key do not make a pair, or are of an unknown kind.
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
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
    use tokio::time::Instant;

    use super::*;

    /// A client on a connection, and the number of connections that may be open beside it.
    fn connected() -> (DuplexStream, Arc<Semaphore>) {
        let places = Arc::new(Semaphore::new(1));
        let place = places.clone().try_acquire_owned().expect("there is one");
        let (client, ours) = tokio::io::duplex(4096);
        // For ever, so that it never finishes by itself.
        let finish = Box::leak(Box::new(watch::Sender::new(false))).subscribe();
        let router = Router::new().fallback(|| async { "here" });
        let connection = Connection { router, finish, place: Place(Arc::new(place)) };
        let local = SocketAddr::from(([127, 0, 0, 1], 1));
        tokio::spawn(connection.serve(ours, local));
        (client, places)
    }

    /// The answer to one request on a connection that stays.
    async fn answer(client: &mut DuplexStream) -> String {
        let mut answer = String::new();
        while !answer.ends_with("here") {
            let mut byte = [0];
            client.read_exact(&mut byte).await.expect("it answers");
            answer.push(byte[0].into());
        }
        answer
    }

    #[tokio::test(start_paused = true)]
    async fn who_sends_headers_slowly_is_cut_off_however_busily() {
        let (mut client, places) = connected();
        let began = Instant::now();
        client.write_all(b"GET / HTTP/1.1\r\n").await.expect("it listens");
        // One more header each second would go on for ever.
        while client.write_all(b"x: y\r\n").await.is_ok() {
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert!(began.elapsed() < HEADERS_TIME_MAX * 2, "it is still listened to");
        }
        assert!(began.elapsed() >= HEADERS_TIME_MAX);
        // And its place is free again.
        drop(places.acquire().await.expect("nobody closes it"));
    }

    #[tokio::test(start_paused = true)]
    async fn who_says_nothing_is_cut_off_also_after_a_request() {
        for requests in [0, 2] {
            let (mut client, places) = connected();
            for _ in 0..requests {
                client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("it listens");
                assert!(answer(&mut client).await.starts_with("HTTP/1.1 200 "));
                // Idle for a while, which is allowed.
                tokio::time::sleep(HEADERS_TIME_MAX / 2).await;
            }
            let began = Instant::now();
            assert_eq!(client.read(&mut [0]).await.expect("it is closed in order"), 0);
            assert!(began.elapsed() <= HEADERS_TIME_MAX);
            drop(places.acquire().await.expect("nobody closes it"));
        }
    }

    #[tokio::test]
    async fn more_headers_than_anyone_needs_are_refused_with_words() {
        let (mut client, _places) = connected();
        let many: String = (0..=HEADERS_MAX).map(|n| format!("x-{n}: y\r\n")).collect();
        client.write_all(format!("GET / HTTP/1.1\r\n{many}\r\n").as_bytes()).await.expect("it listens");
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.expect("it answers and closes");
        assert!(answer.starts_with("HTTP/1.1 431 ") && answer.contains("headers_too_large"), "{answer}");
    }

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
