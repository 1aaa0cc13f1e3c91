//! The network of sandboxes, the daemon's side: asks the launcher for what changes a namespace, and reads the rest itself.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use wire::launch::{Answer, Ask, DESCRIPTORS_MAX, Rootfs};
use wire::network::{Family, Listener, NetworkFault, POLICY_BYTES_MAX, Routes, SOCKETS_MAX};
use wire::{Digest, SandboxId};

use crate::backend::{BackendError, Listeners, ListeningPort, Network};
use crate::ns::cgroup::Cgroups;
use crate::ns::isolation::beside;
use crate::ns::link::{refused, unexpected};
use crate::ns::network::{attempts, ports};
use crate::ns::{NsBackend, QUICK_DEADLINE, packets};
use crate::storage::places::HOST_DIRECTORY;
use crate::storage::trust::{layer_roots, machine_roots, trust_files};

#[async_trait]
impl Network for NsBackend {
    async fn open_network(&self, sandbox: SandboxId, routes: &Routes) -> Result<Listeners, BackendError> {
        const DOING: &str = "open a sandbox's network";
        if !self.can_have_network(sandbox).await? {
            return Err(BackendError::Network { doing: DOING, source: Box::new(NetworkFault::TooOld) });
        }
        let ask = Ask::OpenNetwork { sandbox, routes: routes.clone() };
        self.listeners(DOING, ask).await
    }

    async fn change_routes(&self, sandbox: SandboxId, routes: &Routes) -> Result<(), BackendError> {
        let ask = Ask::ChangeRoutes { sandbox, routes: routes.clone() };
        self.network("change a sandbox's routes", ask).await.map(|_| ())
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

    async fn can_have_network(&self, sandbox: SandboxId) -> Result<bool, BackendError> {
        let place = self.sandbox_directory(sandbox);
        let found = beside(move || {
            let there = |path: &Path| match std::fs::symlink_metadata(path) {
                Ok(_) => Ok(true),
                Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
                Err(e) => Err(e),
            };
            Ok((there(&place)?, there(&place.join(HOST_DIRECTORY))?))
        });
        match found.await.map_err(refused("look at a sandbox's directory"))? {
            (false, _) => Err(BackendError::Gone),
            (true, has) => Ok(has),
        }
    }

    async fn show_policy(&self, sandbox: SandboxId, policy: &[u8]) -> Result<(), BackendError> {
        const DOING: &str = "show a sandbox its policy";
        if policy.len() > POLICY_BYTES_MAX {
            let source =
                io::Error::other(format!("it may have {POLICY_BYTES_MAX} bytes, got {}", policy.len()));
            return Err(refused(DOING)(source));
        }
        if !self.can_have_network(sandbox).await? {
            return Err(BackendError::Network { doing: DOING, source: Box::new(NetworkFault::TooOld) });
        }
        let (directory, policy) = (self.sandbox_directory(sandbox).join(HOST_DIRECTORY), policy.to_vec());
        beside(move || write_whole(&directory, POLICY_NAME, &policy)).await.map_err(refused(DOING))
    }

    async fn show_trust(
        &self,
        sandbox: SandboxId,
        rootfs: &Rootfs,
        ca: &str,
        extra: &str,
    ) -> Result<(), BackendError> {
        const DOING: &str = "show a sandbox what to trust";
        if !self.can_have_network(sandbox).await? {
            return Err(BackendError::Network { doing: DOING, source: Box::new(NetworkFault::TooOld) });
        }
        let directory = self.sandbox_directory(sandbox).join(HOST_DIRECTORY);
        let layers = self.0.config.data_dir.join("images/layers");
        let (rootfs, ca, extra) = (rootfs.clone(), ca.to_owned(), extra.to_owned());
        let write = move || {
            let roots = roots_of(&layers, &rootfs)?;
            for file in trust_files(&roots, &ca, &extra) {
                write_whole(&directory, file.name, file.contents.as_bytes())?;
            }
            Ok(())
        };
        beside(write).await.map_err(refused(DOING))
    }

    async fn start_egress(&self, descriptors: Vec<OwnedFd>) -> Result<(), BackendError> {
        const DOING: &str = "start egress";
        if descriptors.len() > DESCRIPTORS_MAX {
            let what = format!("there may be {DESCRIPTORS_MAX} descriptors, got {}", descriptors.len());
            return Err(refused(DOING)(io::Error::other(what)));
        }
        let id = self.ids().ranges.own_id().map_err(refused("claim an id for egress"))?;
        let id = id.ok_or(BackendError::Full { what: "id ranges" })?;
        match self.exchange(DOING, Ask::StartEgress { id }, descriptors, QUICK_DEADLINE).await? {
            (Answer::Launched { pid }, _) => {
                tracing::info!(pid, id, "egress was started");
                Ok(())
            }
            (other, _) => Err(unexpected(DOING, &other)),
        }
    }

    async fn end_egress(&self) -> Result<(), BackendError> {
        self.ask("end egress", Ask::EndEgress, QUICK_DEADLINE).await.map(|_| ())
    }

    async fn listening(&self, sandbox: SandboxId) -> Result<Vec<ListeningPort>, BackendError> {
        let installation = self.0.config.installation;
        let read = beside(move || ports::read(&Cgroups::look(installation)?, sandbox)).await;
        read.map_err(refused("list a sandbox's ports"))?.ok_or(BackendError::Gone)
    }
}

/// The file in the host's directory that tells the policy.
const POLICY_NAME: &str = "network.json";

/// The roots of an image: those of its uppermost layer that has some, else this machine's.
fn roots_of(layers: &Path, rootfs: &Rootfs) -> io::Result<String> {
    let of_image: &[Digest] = match rootfs {
        Rootfs::Host => &[],
        Rootfs::Layers(digests) | Rootfs::OverHost(digests) => digests,
    };
    for digest in of_image {
        let layer = std::fs::File::open(layers.join(digest.hex()))?;
        if let Some(roots) = layer_roots(layer.as_fd())? {
            return Ok(roots);
        }
    }
    machine_roots()
}

/// Writes a file under another name first, so that a reader sees all of it or none.
fn write_whole(directory: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    use std::io::Write;
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
    let unfinished = directory.join(format!(".{name}"));
    let mut file =
        std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o644).open(&unfinished)?;
    // Whatever the umask is: guests read it under ids of their own.
    file.set_permissions(std::fs::Permissions::from_mode(0o644))?;
    file.write_all(bytes)?;
    std::fs::rename(unfinished, directory.join(name))
}

impl NsBackend {
    fn sandbox_directory(&self, sandbox: SandboxId) -> PathBuf {
        self.0.config.data_dir.join("sandboxes").join(sandbox.to_string())
    }

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
