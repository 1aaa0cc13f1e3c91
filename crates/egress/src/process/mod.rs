//! The program `shoal egress`: from the first packet on its standard input to its end.

mod confine;
mod server;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use crate::ca::{Ca, CaError};
use crate::control::{
    Channel, Failure, FromEgress, SOCKET_FILE, Settings, Start, Started, VERSION, from_bytes, receive_now,
    send_now, to_bytes,
};
use crate::dial::{Dialer, own_addresses};
use crate::dns::Resolver;
use crate::gateway::{Hosts, Shared};
use crate::outbox::Outbox;
use crate::policy::Addresses;

pub use confine::ConfineError;
pub use server::Server;

/// How many daemons may wait to be accepted.
const BACKLOG: i32 = 8;
/// How long the last records may take to reach the daemon at shutdown.
const LAST_RECORDS_DEADLINE: Duration = Duration::from_secs(1);
/// The most worker threads, whatever the daemon asks for.
const THREADS_MAX: u16 = 64;

/// Why egress could not start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The first packet.
    #[error("cannot read the start message from standard input")]
    Start(#[source] io::Error),
    /// The daemon is of another version.
    #[error("the daemon speaks version {theirs}, this egress speaks {VERSION}")]
    Version {
        /// The daemon's version.
        theirs: u32,
    },
    /// A system call.
    #[error("cannot {doing}")]
    Call {
        /// What for.
        doing: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The authority.
    #[error(transparent)]
    Ca(#[from] CaError),
    /// Confinement.
    #[error(transparent)]
    Confine(#[from] ConfineError),
    /// TLS to resolvers and hosts failed to set up.
    #[error("cannot set up TLS for resolvers and hosts")]
    Tls(#[from] rustls::Error),
}

fn cannot<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> ProcessError {
    move |e| ProcessError::Call { doing, source: e.into() }
}

/// Runs egress. Call from `main`, before any thread is created: the user and the filter apply to threads that are
/// created later.
pub fn main() -> Result<(), ProcessError> {
    let socket = io::stdin().as_fd().try_clone_to_owned().map_err(ProcessError::Start)?;
    let null = File::open("/dev/null").map_err(cannot("open /dev/null"))?;
    rustix::stdio::dup2_stdin(&null).map_err(cannot("close standard input"))?;
    let received = receive_now(&socket).map_err(ProcessError::Start)?;
    let (message, _) = received.ok_or_else(|| ProcessError::Start(io::ErrorKind::UnexpectedEof.into()))?;
    let start: Start =
        from_bytes(&message).ok_or_else(|| ProcessError::Start(io::ErrorKind::InvalidData.into()))?;
    let prepared = match prepare(&start) {
        Ok(prepared) => prepared,
        Err(error) => {
            let mut what = error.to_string();
            if let Some(cause) = std::error::Error::source(&error) {
                what = format!("{what}: {cause}");
            }
            // The daemon may be gone; the error is returned in any case.
            let _ = send_now(&socket, 0, &to_bytes(&FromEgress::Started(Err(Failure { what }))), &[]);
            return Err(error);
        }
    };
    run(socket, &start, prepared)
}

/// What is opened before the runtime starts.
struct Prepared {
    shared: Arc<Shared>,
    listener: OwnedFd,
}

fn prepare(start: &Start) -> Result<Prepared, ProcessError> {
    if start.version != VERSION {
        return Err(ProcessError::Version { theirs: start.version });
    }
    confine::raise_descriptor_limit()?;
    // The new user may have no access to the path of the directory, so the process enters it first and never leaves it.
    std::env::set_current_dir(&start.directory).map_err(cannot("enter egress's directory"))?;
    let roots = client_config(&start.settings)?;
    if let Some(identity) = start.identity {
        confine::become_identity(identity)?;
    }
    let here = Path::new(".");
    let ca = Ca::open(here, &start.installation.to_string())?;
    let outbox = Arc::new(Outbox::open(here).map_err(cannot("open the spool"))?);
    let listener = listen_here().map_err(cannot("listen for the next daemon"))?;
    confine::confine()?;
    let own = own_addresses().map_err(cannot("list the addresses of this machine"))?;
    let Settings { upstream, proxy, bind, addresses, pool, extra_roots: _ } = start.settings.clone();
    let resolver = Arc::new(Resolver::new(upstream, Some(Arc::clone(&roots))));
    let dialer = Dialer::new(resolver, Addresses { own, ..addresses }, proxy, bind);
    let shared = Arc::new(Shared {
        dialer,
        ca,
        pool,
        outbox,
        owners: Mutex::new(HashMap::new()),
        hosts: Hosts::new(&roots),
    });
    Ok(Prepared { shared, listener })
}

/// TLS to resolvers and hosts, verified with the roots of the system and the operator's.
fn client_config(settings: &Settings) -> Result<Arc<rustls::ClientConfig>, ProcessError> {
    let mut roots = rustls::RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    let (_, bad) = roots.add_parsable_certificates(found.certs);
    if bad > 0 {
        tracing::debug!(bad, "some roots of the system do not parse");
    }
    for pem in &settings.extra_roots {
        for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
            let certificate = certificate.map_err(|e| cannot("read an extra root")(io::Error::other(e)))?;
            roots.add(certificate)?;
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Arc::new(config))
}

/// The socket for the next daemon. An egress that is being replaced keeps its own socket, which no longer has a name.
fn listen_here() -> io::Result<OwnedFd> {
    match std::fs::remove_file(SOCKET_FILE) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e),
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    bind(&socket, &SocketAddrUnix::new(SOCKET_FILE)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

fn run(socket: OwnedFd, start: &Start, prepared: Prepared) -> Result<(), ProcessError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(start.threads.clamp(1, THREADS_MAX).into())
        .thread_name("egress")
        .enable_all()
        .build()
        .map_err(cannot("start the runtime"))?;
    runtime.block_on(async {
        let Prepared { shared, listener } = prepared;
        let started = Started { version: VERSION, ca_pem: shared.ca.pem().to_owned() };
        let (outbox, server) = (shared.outbox.clone(), Server::new(shared));
        let channel = Channel::new(socket).map_err(cannot("talk to the daemon"))?;
        channel
            .send(&to_bytes(&FromEgress::Started(Ok(started))), &[])
            .await
            .map_err(cannot("answer the daemon"))?;
        tokio::spawn(server.clone().serve(Arc::new(channel)));
        tokio::spawn(server.clone().record_totals());
        tokio::spawn(server.clone().follow_own_addresses());
        let listening = tokio::spawn(server.clone().listen(listener, start.daemon_uid));
        let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())
            .map_err(cannot("wait for signals"))?;
        tokio::select! {
            () = server.done() => {}
            _ = terminate.recv() => {
                server.stop();
                server.done().await;
            }
            ended = listening => {
                if let Ok(Err(source)) = ended {
                    return Err(ProcessError::Call { doing: "listen for the next daemon", source });
                }
            }
        }
        // The daemon may still store the last records; those that it has not acknowledged by then wait for the next
        // egress.
        let _ = tokio::time::timeout(LAST_RECORDS_DEADLINE, outbox.empty()).await;
        outbox.offline();
        Ok(())
    })
}
