//! A daemon's side of egress, a guest's side, and servers of the world outside.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use egress::control::{Attach, Egress, Identity, Listener, Record, Records, Settings, Start, VERSION};
use egress::dns::{Pool, Upstream};
use egress::limits::Limits;
use egress::policy::{Action, Addresses, Mode, Name, Preset, RuleSpec, Ruleset, Spec};
use hickory_proto::op::{Message, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{RData, RecordType};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use wire::{InstallationId, SandboxId};

pub const IS_EGRESS: &str = "SHOAL_TEST_IS_EGRESS";
/// Nothing here takes this long.
pub const SOON: Duration = Duration::from_secs(20);

/// The world outside: a resolver that records every question.
pub struct World {
    pub resolver: SocketAddr,
    pub asked: Arc<Mutex<Vec<String>>>,
    addresses: Arc<Mutex<HashMap<String, Ipv4Addr>>>,
    /// Roots that egress trusts beside the system's, in PEM.
    pub roots: Vec<String>,
}

impl World {
    pub async fn new() -> Self {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a socket");
        let resolver = socket.local_addr().expect("an address");
        let (asked, addresses) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(HashMap::new())));
        tokio::spawn(resolve(socket, asked.clone(), addresses.clone()));
        Self { resolver, asked, addresses, roots: Vec::new() }
    }

    /// Gives a name an address. Names without one have 127.0.0.1; names that begin with `no` do not exist, and
    /// those that begin with `silent` are never answered.
    pub fn points(&self, name: &str, to: Ipv4Addr) {
        self.addresses.lock().expect("a lock").insert(format!("{name}."), to);
    }
}

async fn resolve(
    socket: UdpSocket,
    asked: Arc<Mutex<Vec<String>>>,
    addresses: Arc<Mutex<HashMap<String, Ipv4Addr>>>,
) {
    let mut buffer = [0; 2048];
    while let Ok((length, from)) = socket.recv_from(&mut buffer).await {
        let question = Message::from_vec(&buffer[..length]).expect("a message");
        let query = question.queries[0].clone();
        let name = query.name().to_ascii();
        asked.lock().expect("a lock").push(name.clone());
        let mut reply = Message::response(question.metadata.id, OpCode::Query);
        reply.add_query(query.clone());
        if name.starts_with("silent") {
            continue;
        }
        if name.starts_with("no") {
            reply.metadata.response_code = ResponseCode::NXDomain;
        } else if query.query_type() == RecordType::A {
            let address =
                addresses.lock().expect("a lock").get(&name).copied().unwrap_or(Ipv4Addr::LOCALHOST);
            let data = RData::A(A(address));
            reply.add_answer(hickory_proto::rr::Record::from_rdata(query.name().clone(), 1, data));
        }
        socket.send_to(&reply.to_vec().expect("bytes"), from).await.expect("sent");
    }
}

/// A server outside, and the port that it and egress's listeners have.
pub struct Echo {
    pub port: u16,
    /// Connections that arrived, and what each sent first.
    pub seen: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Echo {
    /// Sends `greeting`, then everything back.
    pub async fn on(address: Ipv4Addr, greeting: &'static [u8]) -> Self {
        let listener = TcpListener::bind((address, 0)).await.expect("a listener");
        let port = listener.local_addr().expect("an address").port();
        let seen: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
        let log = seen.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let log = log.clone();
                let place = {
                    let mut log = log.lock().expect("a lock");
                    log.push(Vec::new());
                    log.len() - 1
                };
                tokio::spawn(async move {
                    let _ = stream.write_all(greeting).await;
                    let mut buffer = [0; 65_536];
                    while let Ok(count @ 1..) = stream.read(&mut buffer).await {
                        log.lock().expect("a lock")[place].extend_from_slice(&buffer[..count]);
                        if stream.write_all(&buffer[..count]).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        Self { port, seen }
    }

    pub async fn new() -> Self {
        Self::on(Ipv4Addr::LOCALHOST, b"").await
    }

    pub fn connections(&self) -> usize {
        self.seen.lock().expect("a lock").len()
    }
}

pub struct Process {
    pub child: Child,
    pub directory: Arc<tempfile::TempDir>,
    pub pool: Pool,
    pub ca_pem: String,
    /// Whom it has become; `None` where the tests run without root.
    pub identity: Option<Identity>,
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn sandbox(number: u128) -> SandboxId {
    SandboxId::from_random(number)
}

/// A pool that no other test of this executable uses at the same time.
fn pool() -> Pool {
    static NEXT: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(0);
    let own = std::process::id() as u8 / 2 * 2;
    let third = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    // 127.(64..191).x.0: several tests may run at once, in processes of their own.
    let v4 = Ipv4Addr::new(127, 64 + own / 2, third.wrapping_mul(8), 0);
    Pool { v4, ..Pool::default() }
}

/// Starts an egress. The caller must receive its records.
pub async fn start(world: &World) -> (Process, Egress, Records) {
    start_in(world, Arc::new(tempfile::tempdir().expect("a directory")), pool()).await
}

pub async fn start_in(
    world: &World,
    directory: Arc<tempfile::TempDir>,
    pool: Pool,
) -> (Process, Egress, Records) {
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("a pair");
    let child = Command::new(std::env::current_exe().expect("this executable"))
        .args(["--exact", "the_process", "--ignored", "--nocapture", "--test-threads=1"])
        .env(IS_EGRESS, "1")
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .spawn()
        .expect("a process");
    // A user that owns nothing else.
    let identity = rustix::process::getuid().is_root().then_some(Identity { uid: 65_533, gid: 65_533 });
    if let Some(identity) = identity {
        std::os::unix::fs::chown(directory.path(), Some(identity.uid), Some(identity.gid))
            .expect("given away");
    }
    let settings = Settings {
        upstream: Upstream { servers: vec![world.resolver], tls: None },
        addresses: Addresses { opened: vec!["127.0.0.1".parse().expect("a block")], ..Addresses::default() },
        pool,
        extra_roots: world.roots.clone(),
        ..Settings::default()
    };
    let start = Start {
        version: VERSION,
        installation: "0123456789abcdef".parse::<InstallationId>().expect("an id"),
        directory: directory.path().to_str().expect("a path").to_owned(),
        identity,
        daemon_uid: rustix::process::getuid().as_raw(),
        threads: 2,
        settings,
    };
    let (egress, records, started) = Egress::start(ours, &start).await.expect("egress starts");
    (Process { child, directory, pool, ca_pem: started.ca_pem, identity }, egress, records)
}

/// Acknowledges everything and keeps it.
pub fn store(egress: &Arc<Egress>, mut records: Records) -> Arc<Mutex<Vec<Record>>> {
    let kept: Arc<Mutex<Vec<Record>>> = Arc::default();
    let (into, egress) = (kept.clone(), Arc::downgrade(egress));
    tokio::spawn(async move {
        while let Some((sequence, record)) = records.recv().await {
            into.lock().expect("a lock").push(record);
            let Some(egress) = egress.upgrade() else { return };
            if egress.acknowledge(sequence).await.is_err() {
                return;
            }
        }
    });
    kept
}

pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let waiting = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(SOON, waiting).await.unwrap_or_else(|_| panic!("not in time: {what}"));
}

/// A sandbox's side: its resolver and its listeners.
pub struct Guest {
    pub id: SandboxId,
    pub listeners: Vec<(Listener, OwnedFd)>,
    pub resolver: SocketAddr,
}

impl Guest {
    /// Listeners on the resolver's address, on the refused address and on the first addresses of names, for each port.
    pub async fn new(id: u128, pool: Pool, ports: &[u16]) -> Self {
        let udp = UdpSocket::bind((pool.resolver().0, 0)).await.expect("a socket");
        let resolver = udp.local_addr().expect("an address");
        let mut listeners = vec![(Listener::Udp, OwnedFd::from(udp.into_std().expect("a socket")))];
        for port in ports {
            for address in [pool.refused().0, pool.of_name(0).0, pool.of_name(1).0] {
                let listener = std::net::TcpListener::bind((address, *port)).expect("a listener");
                listeners.push((Listener::Tcp, listener.into()));
            }
        }
        Self { id: sandbox(id), listeners, resolver }
    }

    pub fn attach(&self, rules: Ruleset) -> Attach {
        Attach {
            sandbox: self.id,
            listeners: self.listeners.iter().map(|(kind, _)| *kind).collect(),
            rules,
            names: Vec::new(),
            limits: Limits::default(),
            owner: None,
            credentials: vec![],
        }
    }

    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.listeners.iter().map(|(_, descriptor)| descriptor.as_fd()).collect()
    }

    /// The address that the sandbox gets for a name.
    pub async fn look_up(&self, name: &str) -> Result<IpAddr, ResponseCode> {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a socket");
        socket.connect(self.resolver).await.expect("connected");
        let mut message = Message::query();
        let full = hickory_proto::rr::Name::from_ascii(format!("{name}.")).expect("a name");
        message.add_query(Query::query(full, RecordType::A));
        socket.send(&message.to_vec().expect("bytes")).await.expect("sent");
        let mut buffer = [0; 2048];
        let length =
            tokio::time::timeout(SOON, socket.recv(&mut buffer)).await.expect("in time").expect("an answer");
        let reply = Message::from_vec(&buffer[..length]).expect("a message");
        match reply.answers.first().map(|record| &record.data) {
            Some(RData::A(address)) => Ok(IpAddr::V4(address.0)),
            _ => Err(reply.metadata.response_code),
        }
    }

    /// Connects to a name.
    pub async fn connect(&self, name: &str, port: u16) -> TcpStream {
        let address = self.look_up(name).await.expect("an address");
        TcpStream::connect((address, port)).await.expect("a connection")
    }
}

/// Rules from `allow a.example`, `deny *.b.example`, each with an optional protocol.
pub fn rules(mode: Mode, texts: &[&str]) -> Ruleset {
    let rules = texts
        .iter()
        .map(|text| {
            let mut words = text.split(' ');
            let action = if words.next() == Some("allow") { Action::Allow } else { Action::Deny };
            let to = words.next().expect("a target").to_owned();
            RuleSpec { action, to, ports: vec![], protocol: words.next().map(str::to_owned), private: false }
        })
        .collect();
    Spec { mode, rules, audit: false }.expand(&Preset::default()).expect("a policy")
}

pub fn name(text: &str) -> Name {
    Name::parse(text).expect("a name")
}

/// Sends bytes and reads to the end.
pub async fn exchange(mut stream: TcpStream, bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    stream.write_all(bytes).await?;
    let mut answer = Vec::new();
    tokio::time::timeout(SOON, stream.read_to_end(&mut answer)).await.expect("in time")?;
    Ok(answer)
}
