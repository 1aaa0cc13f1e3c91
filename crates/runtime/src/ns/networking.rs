//! The network of sandboxes, the daemon's side: asks the launcher for what changes a namespace, and reads the rest itself.

use std::os::fd::OwnedFd;

use async_trait::async_trait;
use wire::SandboxId;
use wire::launch::{Answer, Ask};
use wire::network::{Family, Listener, NetworkFault, Routes, SOCKETS_MAX};

use crate::backend::{BackendError, Listeners, ListeningPort, Network};
use crate::ns::cgroup::Cgroups;
use crate::ns::isolation::beside;
use crate::ns::link::{refused, unexpected};
use crate::ns::network::{attempts, ports};
use crate::ns::{NsBackend, QUICK_DEADLINE, packets};

#[async_trait]
impl Network for NsBackend {
    async fn open_network(&self, sandbox: SandboxId, routes: &Routes) -> Result<Listeners, BackendError> {
        let ask = Ask::OpenNetwork { sandbox, routes: routes.clone() };
        self.listeners("open a sandbox's network", ask).await
    }

    async fn change_routes(&self, sandbox: SandboxId, routes: &Routes) -> Result<Listeners, BackendError> {
        let ask = Ask::ChangeRoutes { sandbox, routes: routes.clone() };
        self.listeners("change a sandbox's routes", ask).await
    }

    async fn close_network(&self, sandbox: SandboxId) -> Result<(), BackendError> {
        let ask = Ask::CloseNetwork { sandbox };
        self.network("close a sandbox's network", ask).await.map(|_| ())
    }

    async fn sockets(
        &self,
        sandbox: SandboxId,
        family: Family,
        count: u8,
    ) -> Result<Vec<OwnedFd>, BackendError> {
        const DOING: &str = "make sockets in a sandbox";
        let count = count.min(SOCKETS_MAX);
        let (_, sockets) = self.network(DOING, Ask::Sockets { sandbox, family, count }).await?;
        packets::exactly(sockets, count.into()).map_err(refused(DOING))
    }

    async fn attempts(&self, sandbox: SandboxId) -> Result<u64, BackendError> {
        let installation = self.0.config.installation;
        let read = beside(move || attempts::read(&Cgroups::look(installation)?, sandbox)).await;
        read.map_err(refused("count attempts to reach a network"))?.ok_or(BackendError::Gone)
    }

    async fn listening(&self, sandbox: SandboxId) -> Result<Vec<ListeningPort>, BackendError> {
        let installation = self.0.config.installation;
        let read = beside(move || ports::read(&Cgroups::look(installation)?, sandbox)).await;
        read.map_err(refused("list a sandbox's ports"))?.ok_or(BackendError::Gone)
    }
}

impl NsBackend {
    async fn listeners(&self, doing: &'static str, ask: Ask) -> Result<Listeners, BackendError> {
        let (names, sockets) = self.network(doing, ask).await?;
        let sockets = packets::exactly(sockets, names.len()).map_err(refused(doing))?;
        Ok(names.into_iter().zip(sockets).collect())
    }

    async fn network(
        &self,
        doing: &'static str,
        ask: Ask,
    ) -> Result<(Vec<Listener>, Vec<OwnedFd>), BackendError> {
        match self.exchange(doing, ask, Vec::new(), QUICK_DEADLINE).await? {
            (Answer::Network(Ok(names)), descriptors) => Ok((names, descriptors)),
            (Answer::Network(Err(NetworkFault::NotRunning)), _) => Err(BackendError::Gone),
            (Answer::Network(Err(fault)), _) => Err(BackendError::Network { doing, source: Box::new(fault) }),
            (other, _) => Err(unexpected(doing, &other)),
        }
    }
}
