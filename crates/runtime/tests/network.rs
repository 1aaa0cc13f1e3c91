//! Routes, rules and listeners in real network namespaces. Needs root and a kernel with nf_tables and tproxy; fails loudly without.
//!
//! A test makes a namespace for its own thread. Nothing leaves it: there is only loopback in it.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::process::{Command, Output, Stdio};

use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sendto, socket_with};
use rustix::thread::UnshareFlags;
use shoal_runtime::ns::network;
use shoal_runtime::sys;
use wire::network::{
    Family, Hole, HoleAnswer, Listener, NetworkFault, OWN_V4, Prefix, REFUSED_V4, REFUSED_V6, RESOLVER_V4,
    Routes,
};

/// Runs a test in a thread with a network namespace of its own, as a slot has it.
fn in_namespace(test: impl FnOnce() + Send + 'static) {
    assert!(rustix::process::geteuid().is_root(), "this needs root");
    let run = move || {
        sys::unshare(UnshareFlags::NEWNET).expect("a network namespace");
        sys::loopback_up().expect("loopback comes up");
        // The kernel takes it for the namespace of the thread that writes.
        std::fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0").expect("a setting");
        test();
    };
    if let Err(panic) = std::thread::spawn(run).join() {
        std::panic::resume_unwind(panic);
    }
}

fn prefix(text: &str) -> Prefix {
    let (address, bits) = text.split_once('/').expect("a prefix");
    Prefix { address: address.parse().expect("an address"), bits: bits.parse().expect("a number") }
}

fn listed(list: &[&str]) -> Routes {
    Routes::Listed(list.iter().map(|text| prefix(text)).collect())
}

fn open_but(holes: &[(&str, HoleAnswer)]) -> Routes {
    Routes::Open(holes.iter().map(|(text, answer)| Hole { prefix: prefix(text), answer: *answer }).collect())
}

/// What egress would hold.
struct Held(Vec<(Listener, OwnedFd)>);

impl Held {
    fn open(routes: &Routes) -> Self {
        Self(network::open(routes).expect("the kernel has nf_tables and tproxy"))
    }

    fn socket(&self, wanted: Listener) -> OwnedFd {
        let found = self.0.iter().find(|(listener, _)| *listener == wanted);
        found.expect("it was opened").1.try_clone().expect("a descriptor")
    }

    fn tcp(&self, wanted: Listener) -> TcpListener {
        let listener = TcpListener::from(self.socket(wanted));
        listener.set_nonblocking(false).expect("it is ours");
        listener
    }
}

fn connect(to: &str) -> io::Result<TcpStream> {
    TcpStream::connect(to.parse::<SocketAddr>().expect("an address with a port"))
}

fn errno<T>(result: io::Result<T>) -> i32 {
    match result {
        Ok(_) => 0,
        Err(e) => e.raw_os_error().expect("an error of the kernel"),
    }
}

/// One datagram, and what comes of the socket then.
fn datagram(to: &str) -> io::Result<()> {
    let to: SocketAddr = to.parse().expect("an address with a port");
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(to)?;
    socket.send(b"x")?;
    // The answer of the kernel, if it refuses, is there when the call before returns.
    socket.set_nonblocking(true)?;
    match socket.recv(&mut [0; 16]) {
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(()),
        other => other.map(drop),
    }
}

fn ping(to: IpAddr) -> io::Result<()> {
    let (family, protocol, request) = match to {
        IpAddr::V4(_) => (AddressFamily::INET, ipproto::ICMP, 8),
        IpAddr::V6(_) => (AddressFamily::INET6, ipproto::ICMPV6, 128),
    };
    let socket = socket_with(family, SocketType::RAW, SocketFlags::CLOEXEC, Some(protocol))?;
    let echo = [request, 0, 0xf7, 0xff, 0, 0, 0, 0];
    sendto(&socket, &echo, rustix::net::SendFlags::empty(), &SocketAddr::new(to, 0))?;
    Ok(())
}

/// A Python program in this namespace, as a guest would run it: root of a user namespace that does not own the network namespace.
fn as_guest(program: &str, stdin: Stdio) -> Output {
    let run = Command::new("unshare")
        .args(["--user", "--map-root-user", "/usr/bin/python3", "-c", program])
        .stdin(stdin)
        .output();
    run.expect("unshare(1) and python3 run")
}

fn said(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

fn no_routes() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/net/snmp").expect("readable");
    let mut lines = text.lines().filter(|line| line.starts_with("Ip: "));
    let (names, values) = (lines.next().expect("names"), lines.next().expect("values"));
    let at = names.split(' ').position(|name| name == "OutNoRoutes").expect("it counts");
    let six = std::fs::read_to_string("/proc/thread-self/net/snmp6").expect("readable");
    let six = six.lines().find_map(|line| line.strip_prefix("Ip6OutNoRoutes")).expect("it counts");
    values.split(' ').nth(at).expect("a value").parse::<u64>().expect("a number")
        + six.trim().parse::<u64>().expect("a number")
}

#[test]
fn without_a_route_nothing_can_be_reached_and_every_attempt_is_counted() {
    in_namespace(|| {
        for address in [
            "8.8.8.8:443",
            "10.0.0.1:22",
            "169.254.169.254:80",
            "198.18.0.1:53",
            "[2001:db8::1]:443",
            "[fec0::1]:80",
        ] {
            let before = no_routes();
            assert_eq!(errno(connect(address)), libc::ENETUNREACH, "tcp {address}");
            assert_eq!(errno(datagram(address)), libc::ENETUNREACH, "udp {address}");
            assert!(no_routes() > before, "{address} is not counted");
            let ip = address.parse::<SocketAddr>().expect("an address").ip();
            assert_eq!(errno(ping(ip)), libc::ENETUNREACH, "icmp {address}");
        }
        // Its own loopback is the sandbox's business.
        let server = TcpListener::bind("127.0.0.1:0").expect("a port");
        connect(&server.local_addr().expect("an address").to_string()).expect("loopback works");
    });
}

#[test]
fn any_port_of_what_has_a_route_arrives_with_the_address_that_was_meant() {
    in_namespace(|| {
        let held = Held::open(&listed(&["10.9.0.0/16", "2001:db8::/32"]));
        for (to, listener) in [
            ("198.18.1.0:443", Listener::TcpV4),
            ("198.19.255.255:1", Listener::TcpV4),
            ("10.9.1.1:5432", Listener::TcpV4),
            ("198.18.0.1:53", Listener::TcpV4),
            ("[100:0:0:1::100]:22", Listener::TcpV6),
            ("[2001:db8::7]:65535", Listener::TcpV6),
        ] {
            let mut guest = connect(to).unwrap_or_else(|e| panic!("{to}: {e}"));
            let (mut egress, peer) = held.tcp(listener).accept().expect("it arrives");
            let meant: SocketAddr = to.parse().expect("an address");
            assert_eq!(egress.local_addr().expect("an address"), meant);
            assert_eq!(guest.peer_addr().expect("an address"), meant, "the guest sees what it asked for");
            assert_eq!(peer, guest.local_addr().expect("an address"));
            if to.starts_with(char::is_numeric) {
                assert_eq!(peer.ip(), OWN_V4);
            }
            guest.write_all(b"question").expect("it is open");
            egress.read_exact(&mut [0; 8]).expect("it is read");
            egress.write_all(b"answer").expect("it is open");
            guest.read_exact(&mut [0; 6]).expect("it is read");
        }
        for elsewhere in
            ["10.8.1.1:80", "8.8.8.8:443", "198.17.255.255:80", "[2001:db9::1]:80", "[100:0:0:2::1]:80"]
        {
            assert_eq!(errno(connect(elsewhere)), libc::ENETUNREACH, "{elsewhere}");
        }
        for closed in ["198.18.1.0:443", "10.9.1.1:123", "[100:0:0:1::100]:443"] {
            assert_eq!(errno(datagram(closed)), libc::ECONNREFUSED, "udp {closed}");
        }
        for address in ["198.18.1.0", "10.9.1.1", "100:0:0:1::100"] {
            assert_eq!(errno(ping(address.parse().expect("an address"))), libc::EPERM, "icmp {address}");
        }
        for multicast in ["224.0.0.1:5353", "255.255.255.255:67", "[ff02::1]:5353"] {
            assert_ne!(errno(datagram(multicast)), 0, "{multicast}");
        }
    });
}

#[test]
fn the_refused_address_answers_on_two_ports_and_refuses_the_others_at_once() {
    in_namespace(|| {
        let held = Held::open(&listed(&[]));
        for (address, listener) in
            [(IpAddr::V4(REFUSED_V4), Listener::TcpV4), (IpAddr::V6(REFUSED_V6), Listener::TcpV6)]
        {
            for port in [80, 443] {
                let _guest = TcpStream::connect((address, port)).expect("the page is there");
                let (egress, _) = held.tcp(listener).accept().expect("it arrives");
                assert_eq!(egress.local_addr().expect("an address"), SocketAddr::new(address, port));
            }
            for port in [22, 81, 8443, 61_000] {
                assert_eq!(
                    errno(TcpStream::connect((address, port))),
                    libc::ECONNREFUSED,
                    "{address} {port}"
                );
            }
        }
    });
}

#[test]
fn an_open_network_has_holes_that_say_so() {
    use HoleAnswer::{Prohibited, Unreachable};
    in_namespace(|| {
        let holes = [
            ("10.0.0.0/8", Unreachable),
            ("169.254.0.0/16", Prohibited),
            ("fc00::/7", Unreachable),
            ("fec0::/10", Prohibited),
        ];
        let held = Held::open(&open_but(&holes));
        for (to, listener) in [
            ("8.8.8.8:443", Listener::TcpV4),
            ("198.18.1.0:80", Listener::TcpV4),
            ("[2600::1]:443", Listener::TcpV6),
        ] {
            let _guest = connect(to).unwrap_or_else(|e| panic!("{to}: {e}"));
            let (egress, _) = held.tcp(listener).accept().expect("it arrives");
            assert_eq!(egress.local_addr().expect("an address").to_string(), to);
        }
        assert_eq!(errno(connect("10.1.2.3:80")), libc::EHOSTUNREACH);
        assert_eq!(errno(datagram("10.1.2.3:53")), libc::EHOSTUNREACH);
        assert_eq!(errno(connect("169.254.169.254:80")), libc::EACCES);
        assert_eq!(errno(connect("[fc00::1]:80")), libc::EHOSTUNREACH);
        assert_eq!(errno(connect("[fec0::1]:80")), libc::EACCES);
        assert_eq!(errno(datagram("8.8.8.8:443")), libc::ECONNREFUSED, "QUIC gives up at once");
    });
}

#[test]
fn a_name_server_of_a_programs_own_choice_is_refused_at_once_over_udp() {
    in_namespace(|| {
        let held = Held::open(&open_but(&[]));
        let guest = UdpSocket::bind("0.0.0.0:0").expect("a port");
        guest.connect("8.8.8.8:53").expect("there is a route");
        guest.set_read_timeout(Some(std::time::Duration::from_secs(10))).expect("a timeout");
        guest.send(b"who is").expect("it is sent");
        assert_eq!(errno(guest.recv(&mut [0; 16])), libc::ECONNREFUSED);
        // Our own resolver hears what it is asked.
        let guest = UdpSocket::bind("0.0.0.0:0").expect("a port");
        guest.send_to(b"x", (RESOLVER_V4, 53)).expect("there is a route");
        let resolver = UdpSocket::from(held.socket(Listener::DnsV4));
        resolver.set_nonblocking(false).expect("it is ours");
        let (_, from) = resolver.recv_from(&mut [0; 16]).expect("it arrives");
        assert_eq!(from.ip(), OWN_V4);
    });
}

#[test]
fn a_guests_root_cannot_change_routes_rules_or_listeners() {
    in_namespace(|| {
        let held = Held::open(&listed(&[]));
        let program = r"
import socket, errno, subprocess, struct
def tries(what, work):
    try:
        work()
        print(what, 'worked')
    except OSError as e:
        print(what, errno.errorcode[e.errno])
def program(*words):
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode == 0:
        return
    raise OSError(errno.EPERM if 'not permitted' in done.stderr else errno.EIO, done.stderr)
def netfilter():
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)
    link.send(struct.pack('=IHHIIBBH', 20, 16, 1 | 4, 0, 0, 0, 0, 2560))
    code = struct.unpack('=i', link.recv(4096)[16:20])[0]
    if code: raise OSError(-code, 'netlink')
def transparent():
    socket.socket().setsockopt(0, 19, 1)
def steal(family, address, kind, port):
    taken = socket.socket(family, kind)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if family == socket.AF_INET6:
        taken.setsockopt(socket.IPPROTO_IPV6, 78, 1)
    taken.bind((address, port))
tries('route', lambda: program('ip', 'route', 'add', 'local', '8.8.8.8', 'dev', 'lo', 'table', 'local'))
tries('unroute', lambda: program('ip', 'route', 'del', 'local', '198.18.0.0/15', 'table', 'local'))
tries('address', lambda: program('ip', 'address', 'add', '10.0.0.1/8', 'dev', 'lo'))
tries('link', lambda: program('ip', 'link', 'set', 'lo', 'down'))
tries('netfilter', netfilter)
tries('raw', lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
tries('packet', lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))
tries('ping', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP))
tries('transparent', transparent)
tries('dns', lambda: steal(socket.AF_INET, '198.18.0.1', socket.SOCK_DGRAM, 53))
tries('dns_any', lambda: steal(socket.AF_INET, '0.0.0.0', socket.SOCK_DGRAM, 53))
tries('dns6', lambda: steal(socket.AF_INET6, '100:0:0:1::1', socket.SOCK_DGRAM, 53))
tries('proxy', lambda: steal(socket.AF_INET, '198.18.0.2', socket.SOCK_STREAM, 61000))
tries('low_port', lambda: steal(socket.AF_INET, '0.0.0.0', socket.SOCK_STREAM, 80))
";
        let said = said(&as_guest(program, Stdio::null()));
        let expected = [
            ("route", "EPERM"),
            ("unroute", "EPERM"),
            ("address", "EPERM"),
            ("link", "EPERM"),
            ("netfilter", "EPERM"),
            ("raw", "EPERM"),
            ("packet", "EPERM"),
            ("ping", "EACCES"),
            ("transparent", "EPERM"),
            ("dns", "EADDRINUSE"),
            ("dns_any", "EADDRINUSE"),
            ("dns6", "EADDRINUSE"),
            ("proxy", "EADDRINUSE"),
            ("low_port", "worked"),
        ];
        let expected: Vec<String> =
            expected.iter().map(|(what, outcome)| format!("{what} {outcome}")).collect();
        assert_eq!(said.lines().collect::<Vec<_>>(), expected);
        // And everything is as it was.
        connect("198.18.1.0:443").expect("the route is there");
        held.tcp(Listener::TcpV4).accept().expect("it arrives");
    });
}

#[test]
fn a_guest_that_listens_on_an_address_of_a_name_takes_no_connection_away() {
    in_namespace(|| {
        let held = Held::open(&listed(&[]));
        let _thief = TcpListener::bind("198.18.1.0:443").expect("the address is local");
        let _everywhere = TcpListener::bind("0.0.0.0:8443").expect("a port");
        for to in ["198.18.1.0:443", "198.18.2.0:8443"] {
            let _guest = connect(to).expect("it arrives somewhere");
            let (egress, _) = held.tcp(Listener::TcpV4).accept().expect("with us");
            assert_eq!(egress.local_addr().expect("an address").to_string(), to);
        }
        // What a guest listens on is still reached by its own address.
        let server = TcpListener::bind((OWN_V4, 0)).expect("a port");
        connect(&server.local_addr().expect("an address").to_string()).expect("its own");
        server.accept().expect("it arrives");
    });
}

#[test]
fn routes_change_live_and_what_is_closed_can_be_opened_again() {
    in_namespace(|| {
        let reached = |list: [&str; 4]| list.map(|to| errno(connect(to)));
        let probes = ["198.18.1.0:1", "10.9.1.1:1", "8.8.8.8:1", "[2600::1]:1"];
        let closed = libc::ENETUNREACH;
        let held = Held::open(&listed(&["10.9.0.0/16"]));
        assert_eq!(reached(probes), [0, 0, closed, closed]);
        for _ in 0..2 {
            network::change(&open_but(&[("10.0.0.0/8", HoleAnswer::Unreachable)])).expect("a change");
            assert_eq!(reached(probes), [0, libc::EHOSTUNREACH, 0, 0]);
            network::change(&open_but(&[("10.0.0.0/8", HoleAnswer::Prohibited)])).expect("a change");
            assert_eq!(reached(probes), [0, libc::EACCES, 0, 0]);
        }
        network::change(&listed(&[])).expect("a change");
        assert_eq!(reached(probes), [0, closed, closed, closed]);
        let refused = network::change(&listed(&["10.0.0.1/8"])).expect_err("host bits");
        assert!(matches!(&refused, NetworkFault::Routes { why } if why.contains("10.0.0.1/8")), "{refused}");
        assert_eq!(reached(probes), [0, closed, closed, closed], "the old routes are in force");
        let taken = network::open(&listed(&[])).expect_err("the listeners are held");
        assert_eq!(taken, NetworkFault::PortTaken { port: 61_000 });
        drop(held);
        assert_eq!(errno(connect("198.18.1.0:443")), libc::ECONNREFUSED, "without a holder it fails closed");
        for _ in 0..2 {
            network::close().expect("it closes");
            assert_eq!(reached(probes), [closed; 4]);
        }
        let _held = Held::open(&listed(&[]));
        assert_eq!(reached(probes), [0, closed, closed, closed]);
    });
}

#[test]
fn sockets_made_inside_reach_what_listens_on_loopback_only() {
    in_namespace(|| {
        let four = TcpListener::bind("127.0.0.1:0").expect("a port");
        let six = TcpListener::bind("[::1]:0").expect("a port");
        let port = |listener: &TcpListener| listener.local_addr().expect("an address");
        let (four_at, six_at) = (port(&four), port(&six));
        let sockets = [
            (network::sockets(Family::V4, 2).expect("sockets"), four_at),
            (network::sockets(Family::V6, 200).expect("sockets"), six_at),
        ];
        assert_eq!((sockets[0].0.len(), sockets[1].0.len()), (2, 8), "the count has a bound");
        // Connected from another thread, which is in the host's namespace.
        std::thread::scope(|_| {
            for (sockets, to) in &sockets {
                let host = std::thread::Builder::new();
                let (socket, to) = (sockets[0].try_clone().expect("a descriptor"), *to);
                let connected = host.spawn(move || rustix::net::connect(&socket, &to)).expect("a thread");
                let connected = connected.join().expect("no panic");
                assert!(matches!(connected, Ok(()) | Err(rustix::io::Errno::INPROGRESS)), "{connected:?}");
            }
        });
        four.accept().expect("it arrives");
        six.accept().expect("it arrives");
    });
}

#[test]
fn a_thousand_routes_are_set_and_replaced() {
    in_namespace(|| {
        let many: Vec<Prefix> = (0..1000_u32)
            .map(|n| Prefix { address: Ipv4Addr::from(0x0a00_0000 + (n << 8)).into(), bits: 24 })
            .collect();
        let _held = Held::open(&Routes::Listed(many.clone()));
        connect("10.3.231.9:80").expect("the last one");
        assert_eq!(errno(connect("10.3.232.9:80")), libc::ENETUNREACH);
        network::change(&Routes::Listed(many[500..].to_vec())).expect("a change");
        assert_eq!(errno(connect("10.1.0.9:80")), libc::ENETUNREACH);
        connect("10.3.231.9:80").expect("the last one");
    });
}

#[test]
fn where_ipv6_is_switched_off_there_is_ipv4_only() {
    in_namespace(|| {
        std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1").expect("a setting");
        let held = Held::open(&open_but(&[("fc00::/7", HoleAnswer::Unreachable)]));
        let opened: Vec<Listener> = held.0.iter().map(|(listener, _)| *listener).collect();
        assert_eq!(opened, [Listener::TcpV4, Listener::DnsV4]);
        connect("8.8.8.8:443").expect("it is open");
        held.tcp(Listener::TcpV4).accept().expect("it arrives");
        assert_ne!(errno(connect("[2600::1]:443")), 0);
        assert!(
            network::probe(network::Parts::Ipv6).is_err() && network::probe(network::Parts::Rules).is_ok()
        );
        drop(held);
        network::close().expect("it closes");
        assert_eq!(errno(connect("8.8.8.8:443")), libc::ENETUNREACH);
    });
}

/// Prints what a network costs. Run it with `--ignored --nocapture` on a quiet machine.
#[test]
#[ignore = "a measurement"]
fn what_opening_a_network_costs() {
    const ROUNDS: usize = 200;
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    let (sender, receiver) = std::sync::mpsc::channel();
    for _ in 0..ROUNDS {
        let sender = sender.clone();
        in_namespace(move || {
            let timed = |work: &mut dyn FnMut()| {
                let began = std::time::Instant::now();
                work();
                began.elapsed()
            };
            let mut held = Vec::new();
            let opened = timed(&mut || held = network::open(&listed(&["10.9.0.0/16"])).expect("it opens"));
            let changed = timed(&mut || network::change(&listed(&[])).expect("a change"));
            let sockets = timed(&mut || drop(network::sockets(Family::V4, 3).expect("sockets")));
            sender.send([opened, changed, sockets]).expect("it is heard");
        });
        for (list, time) in times.iter_mut().zip(receiver.recv().expect("times")) {
            list.push(time);
        }
    }
    for (name, list) in ["open", "change", "3 sockets"].iter().zip(&mut times) {
        list.sort();
        println!("{name}: p50 {:?}, p90 {:?}", list[ROUNDS / 2], list[ROUNDS * 9 / 10]);
    }
}
