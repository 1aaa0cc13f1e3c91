//! The network of a sandbox: routes, rules and listeners in its namespace, and what can be read about it from the host.
//!
//! A sandbox has a namespace with loopback only, made and owned by the launcher's side. None of this runs when a
//! sandbox is created: a sandbox without a policy has no route, so connect(2) fails at once, and that costs nothing.
//! When a policy opens something, a walker enters the namespace and does the following, with hand-made netlink
//! messages:
//!
//! 1. `rules`: one nf_tables batch, which fails on a kernel that does not support all of it;
//! 2. `routes`, and the addresses that they need: packets with a route are delivered to this same namespace;
//! 3. `listeners`: passed to the daemon, which passes them to egress.
//!
//! Egress needs no privilege for any of this. The guest owns none of it and cannot change it.

pub mod attempts;
pub mod held;
mod init;
mod listeners;
mod message;
mod netlink;
pub mod ports;
mod routes;
mod rules;

use std::io;
use std::os::fd::OwnedFd;

use wire::SandboxId;
use wire::network::{Family, Listener, NetworkFault, Routes, SOCKETS_MAX};

use crate::ns::cgroup::Cgroups;
use init::Init;
use netlink::{Netlink, Subsystem};
use routes::ChangeError;

/// Moves the calling thread into the network namespace of a running sandbox.
pub fn enter(groups: &Cgroups, sandbox: SandboxId) -> Result<(), NetworkFault> {
    let init = Init::find(groups, sandbox).map_err(kernel("find the sandbox's init"))?;
    let init = init.ok_or(NetworkFault::NotRunning)?;
    init.join_network().map_err(|e| match init::is_gone(&e) {
        true => NetworkFault::NotRunning,
        false => kernel("enter the sandbox's network namespace")(e),
    })
}

/// Gives the namespace of the calling thread routes, rules and listeners. A failure leaves nothing behind, unless a
/// port is taken: an egress that still uses the routes may hold it.
pub fn open(routes: &Routes) -> Result<Vec<(Listener, OwnedFd)>, NetworkFault> {
    let ipv6 = has_ipv6()?;
    let opened = set_up(routes, ipv6).and_then(|()| {
        listeners::needed(ipv6).into_iter().map(|wanted| Ok((wanted, listeners::open(wanted)?))).collect()
    });
    if let Err(fault) = &opened
        && !matches!(fault, NetworkFault::PortTaken { .. })
    {
        close()?;
    }
    opened
}

/// Replaces the routes of the namespace of the calling thread. The listeners stay.
pub fn change(routes: &Routes) -> Result<(), NetworkFault> {
    set_up(routes, has_ipv6()?)
}

/// Removes routes, rules and addresses from the calling thread's namespace. Harmless if there are none.
pub fn close() -> Result<(), NetworkFault> {
    let netlink = Netlink::open(Subsystem::Route).map_err(kernel("open a socket to the kernel's routes"))?;
    let there = routes::there(&netlink).map_err(kernel("list routes"))?;
    let mut changes = routes::difference(&there, &Default::default());
    changes.extend(routes::without_addresses(has_ipv6()?));
    // Routes first: without them nothing reaches the rules.
    let gone = routes::apply(&netlink, &changes).map_err(changed);
    gone.and(match rules::remove() {
        // Without nf_tables there are no rules.
        Err(NetworkFault::NoNfTables) => Ok(()),
        other => other,
    })
}

/// TCP sockets in the namespace of the calling thread, not connected.
pub fn sockets(family: Family, count: u8) -> Result<Vec<OwnedFd>, NetworkFault> {
    (0..count.min(SOCKETS_MAX)).map(|_| listeners::unconnected(family)).collect()
}

/// The kernel features that a network needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parts {
    /// nf_tables with tproxy.
    Rules,
    /// IPv6; without it, networks have only IPv4.
    Ipv6,
}

/// Tries a part in the namespace of the calling thread, whose loopback is up.
pub fn probe(part: Parts) -> Result<(), NetworkFault> {
    match part {
        Parts::Rules => rules::apply(has_ipv6()?),
        Parts::Ipv6 if has_ipv6()? => Ok(()),
        Parts::Ipv6 => Err(NetworkFault::Kernel { doing: "use IPv6".into(), errno: libc::EAFNOSUPPORT }),
    }
}

/// Rules, addresses and routes.
fn set_up(routes: &Routes, ipv6: bool) -> Result<(), NetworkFault> {
    let wanted = routes::wanted(routes, ipv6).map_err(|why| NetworkFault::Routes { why })?;
    // Rules first, since they fail on a kernel without the needed features. Without routes they apply to nothing.
    rules::apply(ipv6)?;
    let netlink = Netlink::open(Subsystem::Route).map_err(kernel("open a socket to the kernel's routes"))?;
    let there = routes::there(&netlink).map_err(kernel("list routes"))?;
    let mut changes = routes::addresses(ipv6);
    changes.extend(routes::difference(&there, &wanted));
    routes::apply(&netlink, &changes).map_err(changed)
}

fn has_ipv6() -> Result<bool, NetworkFault> {
    listeners::has_ipv6().map_err(kernel("find out whether there is IPv6"))
}

fn kernel(doing: &'static str) -> impl FnOnce(io::Error) -> NetworkFault {
    move |e| fault(doing.into(), &e)
}

fn changed(ChangeError { doing, source }: ChangeError) -> NetworkFault {
    fault(doing, &source)
}

fn fault(doing: String, source: &io::Error) -> NetworkFault {
    match source.raw_os_error() {
        Some(errno) => NetworkFault::Kernel { doing, errno },
        // Our own message says more than a number.
        None => NetworkFault::Kernel { doing: format!("{doing}: {source}"), errno: libc::EIO },
    }
}
