//! Networks of sandboxes that a real launcher made: what a policy opens, what a sandbox is shown, and that all of it goes.

use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::process::{Command, Output};

use runtime::ns::NsBackend;
use runtime::ns::cgroup::Cgroups;
use runtime::ns::network::held::Sockets;
use runtime::{BackendError, Isolation, Network, Spec};
use wire::SandboxId;
use wire::launch::Processes;
use wire::network::{Family, Listener, NetworkFault, Prefix, Routes};

use super::{Host, spec};

impl Host {
    /// The first process of a sandbox, on the host.
    fn init(&self, sandbox: SandboxId) -> u32 {
        let groups = Cgroups::look(self.installation).expect("the groups are there");
        groups.processes(sandbox).expect("readable")[0]
    }

    /// Runs a Python program as a sandbox's root, in all its namespaces.
    fn inside(&self, sandbox: SandboxId, program: &str) -> Output {
        let init = self.init(sandbox).to_string();
        Command::new("nsenter")
            .args([
                "--target", &init, "--user", "--mount", "--net", "--pid", "--root", "--wd", "--setuid", "0",
                "--setgid", "0",
            ])
            .args(["/usr/bin/python3", "-c", program])
            .output()
            .expect("nsenter(1) runs")
    }

    #[track_caller]
    pub(super) fn says(&self, sandbox: SandboxId, program: &str) -> String {
        let output = self.inside(sandbox, program);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }
}

/// Connects to each, and prints the errors by name.
const CONNECT: &str = "
import errno, socket
def connect(host, port):
    try:
        socket.create_connection((host, port), timeout=5)
        return 'ok'
    except OSError as e:
        return errno.errorcode[e.errno]
";

fn connects(list: &[(&str, u16)]) -> String {
    let calls: Vec<String> = list.iter().map(|(host, port)| format!("connect('{host}', {port})")).collect();
    format!("{CONNECT}\nprint({})", calls.join(", "))
}

async fn made(backend: &NsBackend) -> Spec {
    let spec = spec();
    backend.launch(&spec).await.expect("it is made");
    spec
}

fn tcp(listeners: &[(Listener, OwnedFd)], wanted: Listener) -> TcpListener {
    let (_, socket) = listeners.iter().find(|(listener, _)| *listener == wanted).expect("it is there");
    let listener = TcpListener::from(socket.try_clone().expect("a descriptor"));
    listener.set_nonblocking(false).expect("it is ours");
    listener
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_opens_changes_and_closes_the_network_of_a_running_sandbox() {
    let host = Host::new();
    let backend = host.start().await;
    let sandbox = made(&backend).await.sandbox;
    let probes = [("198.18.1.0", 443), ("10.9.1.1", 5432), ("8.8.8.8", 53), ("100:0:0:1::100", 22)];
    assert_eq!(host.says(sandbox, &connects(&probes)), "ENETUNREACH ENETUNREACH ENETUNREACH ENETUNREACH");
    assert!(backend.attempts(sandbox).await.expect("it is counted") >= 4);
    assert_eq!(
        host.says(
            sandbox,
            "import socket\ntry: socket.getaddrinfo('example.com', 80)\nexcept OSError as e: print('no')"
        ),
        "no"
    );
    let attempts = backend.attempts(sandbox).await.expect("it is counted");
    assert!(attempts >= 5, "a lookup that fails is counted too: {attempts}");

    let prefix = Prefix { address: Ipv4Addr::new(10, 9, 0, 0).into(), bits: 16 };
    let listeners = backend.open_network(sandbox, &Routes::Listed(vec![prefix])).await.expect("it opens");
    assert_eq!(host.says(sandbox, &connects(&probes)), "ok ok ENETUNREACH ok");
    for meant in ["198.18.1.0:443", "10.9.1.1:5432"] {
        let (egress, _) = tcp(&listeners, Listener::TcpV4).accept().expect("it arrives");
        assert_eq!(egress.local_addr().expect("an address").to_string(), meant);
    }
    let taken = backend.open_network(sandbox, &Routes::Listed(Vec::new())).await.expect_err("it is open");
    assert!(
        matches!(&taken, BackendError::Network { source, .. } if matches!(**source, NetworkFault::PortTaken { .. })),
        "{taken:?}"
    );

    backend.change_routes(sandbox, &Routes::Open(Vec::new())).await.expect("it changes");
    assert_eq!(host.says(sandbox, &connects(&probes)), "ok ok ok ok");
    for _ in 0..2 {
        backend.close_network(sandbox).await.expect("it closes");
        assert_eq!(host.says(sandbox, &connects(&probes)), "ENETUNREACH ENETUNREACH ENETUNREACH ENETUNREACH");
    }
    drop(listeners);
    backend.teardown(sandbox).await.expect("it goes");
    let gone = backend.open_network(sandbox, &Routes::Listed(Vec::new())).await;
    assert!(matches!(gone, Err(BackendError::Gone)), "{gone:?}");
    let gone = backend.attempts(sandbox).await;
    assert!(matches!(gone, Err(BackendError::Gone)), "{gone:?}");
    backend.end().await.expect("the launcher ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_sandboxes_share_no_network() {
    let host = Host::new();
    let backend = host.start().await;
    let (one, two) = (made(&backend).await.sandbox, made(&backend).await.sandbox);
    let listeners = backend.open_network(one, &Routes::Open(Vec::new())).await.expect("it opens");
    assert_eq!(host.says(one, &connects(&[("8.8.8.8", 80)])), "ok");
    assert_eq!(
        host.says(two, &connects(&[("8.8.8.8", 80), ("198.18.0.2", 61000)])),
        "ENETUNREACH ENETUNREACH"
    );
    drop(listeners);
    for sandbox in [one, two] {
        backend.teardown(sandbox).await.expect("it goes");
    }
    backend.end().await.expect("the launcher ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_are_listed_with_their_process_and_reached_from_outside() {
    let host = Host::new();
    let backend = host.start().await;
    let sandbox = made(&backend).await.sandbox;
    let _listeners = backend.open_network(sandbox, &Routes::Listed(Vec::new())).await.expect("it opens");
    assert_eq!(backend.listening(sandbox).await.expect("a list"), [], "our own listeners are not told of");

    let init = host.init(sandbox);
    let mut server = Command::new("nsenter")
        .args([
            "--target",
            &init.to_string(),
            "--user",
            "--mount",
            "--net",
            "--pid",
            "--root",
            "--wd",
            "--setuid",
            "0",
            "--setgid",
            "0",
        ])
        .args(["/usr/bin/python3", "-c", SERVER])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("nsenter(1) runs");
    let mut ready = [0; 6];
    server.stdout.as_mut().expect("piped").read_exact(&mut ready).expect("it listens");
    let ports = backend.listening(sandbox).await.expect("a list");
    let found: Vec<(String, u16)> = ports.iter().map(|port| (port.address.to_string(), port.port)).collect();
    assert_eq!(found, [("0.0.0.0".into(), 80), ("127.0.0.1".into(), 8080), ("::1".to_owned(), 8081)]);

    let mut sockets = backend.sockets(sandbox, Family::V4, 2).await.expect("sockets");
    let to = SocketAddr::from((Ipv4Addr::LOCALHOST, 8080));
    let socket = sockets.pop().expect("two of them");
    match rustix::net::connect(&socket, &to) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => {}
        Err(e) => panic!("{e}"),
    }
    let mut stream = TcpStream::from(socket);
    stream.set_nonblocking(false).expect("it is ours");
    let mut said = String::new();
    stream.read_to_string(&mut said).expect("it answers");
    assert_eq!(said, "hello");

    server.kill().expect("it is ours");
    server.wait().expect("it ends");
    drop((sockets, stream, _listeners));
    backend.teardown(sandbox).await.expect("it goes");
    backend.end().await.expect("the launcher ends");
}

/// Listens in three ways and answers one connection.
const SERVER: &str = "
import socket, sys
four, six, low = socket.socket(), socket.socket(socket.AF_INET6), socket.socket()
four.bind(('127.0.0.1', 8080)); six.bind(('::1', 8081)); low.bind(('0.0.0.0', 80))
for s in (four, six, low): s.listen()
print('ready', flush=True)
peer, _ = four.accept()
peer.send(b'hello'); peer.close()
four.accept()
";

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_reads_its_policy_and_cannot_change_it() {
    let host = Host::new();
    let backend = host.start().await;
    let spec = made(&backend).await;
    let sandbox = spec.sandbox;
    assert!(backend.can_have_network(sandbox).await.expect("it is there"));
    for policy in ["{\"mode\":\"none\"}", "{\"mode\":\"open\"}"] {
        backend.show_policy(sandbox, policy.as_bytes()).await.expect("it is shown");
        assert_eq!(host.says(sandbox, "print(open('/run/shoal/network.json').read())"), policy);
    }
    let tries = "
import os
def tries(work):
    try: work(); return 'worked'
    except OSError as e: return e.strerror
print(tries(lambda: open('/run/shoal/network.json', 'w')), tries(lambda: open('/run/shoal/other', 'w')),
      tries(lambda: os.remove('/run/shoal/network.json')), tries(lambda: os.rename('/run/shoal', '/run/mine')), sep='; ')
";
    let read_only = "Read-only file system";
    assert_eq!(
        host.says(sandbox, tries),
        format!("{read_only}; {read_only}; {read_only}; Device or resource busy")
    );
    assert_eq!(
        host.says(sandbox, "print(open('/etc/resolv.conf').read(), end='')"),
        "nameserver 198.18.0.1\nsearch .\noptions timeout:1 attempts:2"
    );
    assert!(host.says(sandbox, "print(open('/etc/hosts').read())").contains("localhost"));

    // One of a version that had no such directory.
    let shown = host.directory.path().join("sandboxes").join(sandbox.to_string()).join("host");
    std::fs::rename(&shown, shown.with_file_name("was")).expect("it can be moved");
    assert!(!backend.can_have_network(sandbox).await.expect("it is there"));
    let old = backend.open_network(sandbox, &Routes::Listed(Vec::new())).await.expect_err("it is too old");
    assert!(
        matches!(&old, BackendError::Network { source, .. } if **source == NetworkFault::TooOld),
        "{old:?}"
    );
    backend.teardown(sandbox).await.expect("it goes");
    backend.end().await.expect("the launcher ends");
}

/// Whether the namespace of a socket still exists, as its holder can tell.
const NAMESPACE_OF: &str = "
import fcntl, os, socket
link = socket.socket(fileno=0)
print(os.fstat(fcntl.ioctl(link, 0x894C)).st_ino)
";

#[tokio::test(flavor = "multi_thread")]
async fn a_listener_that_egress_holds_keeps_the_namespace_of_a_sandbox_that_is_gone_and_is_told_of() {
    let host = Host::new();
    let backend = host.start().await;
    let sandbox = made(&backend).await.sandbox;
    let namespace = std::fs::metadata(format!("/proc/{}/ns/net", host.init(sandbox))).expect("it is there");
    let number = std::os::unix::fs::MetadataExt::ino(&namespace);
    let listeners = backend.open_network(sandbox, &Routes::Listed(Vec::new())).await.expect("it opens");
    // A process that plays egress, with the sandbox's listeners.
    let held = listeners[0].1.try_clone().expect("a descriptor");
    let mut egress = Command::new("sleep").arg("600").stdin(held).spawn().expect("it runs");
    let groups = Cgroups::open(host.installation).expect("the groups are there");
    groups.egress().expect("a group");
    std::fs::write(egress_group(&host).join("cgroup.procs"), egress.id().to_string()).expect("it joins");
    let sockets = Sockets::of(&groups, sandbox).expect("a list");
    backend.end_processes(sandbox, Processes::All).await.expect("they end");
    backend.teardown(sandbox).await.expect("it goes");
    assert_eq!(
        sockets.held(&groups).expect("sockets can be listed"),
        1,
        "the socket that egress holds is found"
    );
    let (_, socket) = &listeners[0];
    let found = Command::new("/usr/bin/python3")
        .args(["-c", NAMESPACE_OF])
        .stdin(socket.try_clone().expect("a descriptor"))
        .output()
        .expect("python3 runs");
    assert_eq!(String::from_utf8_lossy(&found.stdout).trim(), number.to_string(), "a listener keeps it");
    egress.kill().expect("it is ours");
    egress.wait().expect("it ends");
    assert_eq!(sockets.held(&groups).expect("it can be looked at"), 0);
    drop(listeners);
    backend.end().await.expect("the launcher ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn egress_runs_without_rights_under_an_id_of_its_own_and_lives_on() {
    let host = Host::new();
    let backend = host.start().await;
    backend.end_egress().await.expect("there is none");
    // The program waits for a first packet on its socket; until it does, it may not show all of this.
    let status = loop {
        let (reads, writes) = std::io::pipe().expect("a pipe");
        let (ours, theirs) = std::os::unix::net::UnixDatagram::pair().expect("a pair");
        backend.start_egress(vec![theirs.into(), writes.into()]).await.expect("it starts");
        let group = egress_group(&host);
        let pids = std::fs::read_to_string(group.join("cgroup.procs")).expect("its group is there");
        let seen = pids.lines().next().and_then(|pid| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
            let name = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
            let descriptor = std::fs::read_link(format!("/proc/{pid}/fd/3")).ok()?;
            Some((status, name, namespace(pid)?, namespace("self")?, descriptor))
        });
        drop((reads, ours));
        if let Some((status, name, theirs, ours, descriptor)) = seen
            && !name.is_empty()
        {
            assert_eq!(name, b"shoal\0egress\0");
            assert_eq!(theirs, ours, "it sees the machine's own mounts");
            assert!(descriptor.to_string_lossy().starts_with("pipe:"), "{descriptor:?}");
            break status;
        }
    };
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("it is there");
        line.trim_start_matches(':').split_ascii_whitespace().map(str::to_owned).collect::<Vec<String>>()
    };
    let ids = field("Uid");
    let id: u32 = ids[0].parse().expect("a number");
    assert!(id >= 0xf000_0000, "not an id of the machine's: {id}");
    assert!(ids.iter().all(|other| *other == ids[0]) && field("Gid") == ids, "{status}");
    assert_eq!(field("Groups"), Vec::<String>::new());
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(field(set), ["0000000000000000"], "{set}");
    }
    assert_eq!(field("NoNewPrivs"), ["1"]);
    backend.end_egress().await.expect("it ends");
    assert!(!egress_group(&host).exists());
    backend.end().await.expect("the launcher ends");
}

fn egress_group(host: &Host) -> std::path::PathBuf {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("readable");
    let v2 = mounts.lines().find(|line| line.contains(" - cgroup2 ")).expect("there is v2");
    let point = v2.split(' ').nth(4).expect("a mount point");
    std::path::Path::new(point).join(format!("shoal-{}/egress", host.installation))
}
