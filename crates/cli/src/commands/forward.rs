//! `shoal forward`, and the ports of `shoal run -p`: local sockets that lead into a sandbox.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use client::{Client, SandboxId};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;

use crate::args::{Forward, Mapping};
use crate::daemon::find;
use crate::environment::Environment;
use crate::output::report::{self, hinted_by};
use crate::terminal::interrupts::Interrupts;

/// How often `--all` looks for new ports.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// How long to wait when no more connections can be accepted for now.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// `shoal forward`
pub async fn forward(arguments: Forward, environment: &Environment) -> anyhow::Result<i32> {
    let mut interrupts = Interrupts::catch()?;
    let client = find::daemon(environment)?;
    let sandbox = find::sandbox(&client, &arguments.sandbox).await?;
    let bound = Bound::bind(&arguments.ports).await?;
    let _forwards = bound.serve(&client, sandbox.id, environment);
    let all = async {
        match arguments.all {
            true => forward_all(&client, sandbox.id, environment).await,
            false => std::future::pending().await,
        }
    };
    tokio::select! {
        ended = all => ended,
        code = interrupts.next() => Ok(code),
    }
}

/// Local sockets that are not served yet.
pub struct Bound(Vec<(TcpListener, u16)>);

impl Bound {
    /// Binds them all, or none.
    pub async fn bind(mappings: &[Mapping]) -> anyhow::Result<Self> {
        let mut bound = Vec::new();
        for Mapping { local, port } in mappings {
            let listener = TcpListener::bind(local).await.map_err(|error| {
                hinted_by(
                    error.into(),
                    format!("cannot listen on {local}"),
                    format!("choose another local port, or any free one with 0:{port}"),
                )
            })?;
            bound.push((listener, *port));
        }
        Ok(Self(bound))
    }

    /// Serves them until the result is dropped.
    pub fn serve(self, client: &Client, sandbox: SandboxId, environment: &Environment) -> Forwards {
        let forwards = self.0.into_iter().map(|(listener, port)| {
            if let Ok(local) = listener.local_addr() {
                eprintln!("forwarding {local} to port {port}");
            }
            spawn(listener, client.clone(), sandbox, port, environment.colour)
        });
        Forwards { _all: forwards.collect() }
    }
}

/// Local sockets that lead into a sandbox. Dropping this ends them and their connections.
pub struct Forwards {
    _all: Vec<Forwarding>,
}

struct Forwarding {
    accepting: AbortHandle,
    connections: Arc<Mutex<Vec<AbortHandle>>>,
}

impl Drop for Forwarding {
    fn drop(&mut self) {
        self.accepting.abort();
        for connection in self.connections.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            connection.abort();
        }
    }
}

fn spawn(listener: TcpListener, client: Client, sandbox: SandboxId, port: u16, colour: bool) -> Forwarding {
    let connections: Arc<Mutex<Vec<AbortHandle>>> = Arc::default();
    let opened = Arc::clone(&connections);
    let told = Arc::new(Mutex::new(None));
    let accepting = tokio::spawn(async move {
        loop {
            let Ok((local, _)) = listener.accept().await else {
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            };
            let carrying =
                tokio::spawn(carry(local, client.clone(), sandbox, port, Arc::clone(&told), colour));
            let mut opened = opened.lock().unwrap_or_else(PoisonError::into_inner);
            opened.retain(|connection| !connection.is_finished());
            opened.push(carrying.abort_handle());
        }
    });
    Forwarding { accepting: accepting.abort_handle(), connections }
}

/// Carries one connection. Says why it cannot, once for each reason.
async fn carry(
    local: TcpStream,
    client: Client,
    sandbox: SandboxId,
    port: u16,
    told: Arc<Mutex<Option<String>>>,
    colour: bool,
) {
    // Without delay is better, and not needed.
    let _ = local.set_nodelay(true);
    let carried = match client.tunnel(sandbox, port).await {
        Ok(tunnel) => {
            *told.lock().unwrap_or_else(PoisonError::into_inner) = None;
            tunnel.carry(local).await
        }
        Err(error) => Err(error),
    };
    if let Err(error) = carried {
        let why = error.to_string();
        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.as_deref() != Some(&why) {
            report::warning(&format!("cannot forward to port {port}: {why}"), colour);
            *told = Some(why);
        }
    }
}

/// Forwards whatever begins to listen, under the same number if that is free here, until it no longer listens.
async fn forward_all(client: &Client, sandbox: SandboxId, environment: &Environment) -> anyhow::Result<i32> {
    let mut open: BTreeMap<u16, Forwards> = BTreeMap::new();
    loop {
        let listening = client.ports(sandbox).await?;
        let reachable = |port: u16| listening.iter().any(|info| info.port == port && info.reachable);
        open.retain(|port, _| {
            let listens = reachable(*port);
            if !listens {
                eprintln!("port {port} was closed");
            }
            listens
        });
        for info in listening.iter().filter(|info| info.reachable) {
            if open.contains_key(&info.port) {
                continue;
            }
            let at = |local: u16| Mapping {
                local: SocketAddr::from((Ipv4Addr::LOCALHOST, local)),
                port: info.port,
            };
            let bound = match Bound::bind(&[at(info.port)]).await {
                Ok(bound) => bound,
                // The number is taken here, so any other will do.
                Err(_) => Bound::bind(&[at(0)]).await?,
            };
            open.insert(info.port, bound.serve(client, sandbox, environment));
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}
