//! The network of a sandbox: a walker enters its namespace, works there and ends. See `ns::network`.

use std::os::fd::OwnedFd;

use wire::SandboxId;
use wire::network::{Family, Listener, NetworkFault, Routes};

use super::Launcher;
use crate::ns::network;

/// The sockets that were opened: the answer has their names, and carries their descriptors.
type Handed = Result<Vec<Listener>, NetworkFault>;

impl Launcher {
    pub(super) fn open_network(
        &self,
        sandbox: SandboxId,
        routes: &Routes,
        handed: &mut Vec<OwnedFd>,
    ) -> Handed {
        network::enter(&self.cgroups, sandbox)?;
        Ok(hand(network::open(routes)?, handed))
    }

    pub(super) fn change_routes(&self, sandbox: SandboxId, routes: &Routes) -> Handed {
        network::enter(&self.cgroups, sandbox)?;
        network::change(routes)?;
        Ok(Vec::new())
    }

    pub(super) fn close_network(&self, sandbox: SandboxId) -> Handed {
        network::enter(&self.cgroups, sandbox)?;
        network::close()?;
        Ok(Vec::new())
    }

    pub(super) fn sockets(
        &self,
        sandbox: SandboxId,
        family: Family,
        count: u8,
        handed: &mut Vec<OwnedFd>,
    ) -> Handed {
        network::enter(&self.cgroups, sandbox)?;
        handed.extend(network::sockets(family, count)?);
        Ok(Vec::new())
    }
}

fn hand(opened: Vec<(Listener, OwnedFd)>, handed: &mut Vec<OwnedFd>) -> Vec<Listener> {
    let (listeners, sockets): (Vec<Listener>, Vec<OwnedFd>) = opened.into_iter().unzip();
    handed.extend(sockets);
    listeners
}
