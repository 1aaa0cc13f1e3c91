//! The network of a sandbox: what its driver and its callers ask of `network`.

use std::sync::Arc;

use runtime::BackendError;
use wire::launch::Rootfs;
use wire::network::NetworkFault;

use crate::error::EngineError;
use crate::network;
use crate::sandbox::lifecycle::{Kept, State};
use crate::sandbox::live::LiveSandbox;

impl LiveSandbox {
    /// Puts the sandbox's policy in force. Call this whenever the sandbox has got processes: after a launch, a resume, or when it is
    /// adopted. Until then it has no network.
    pub(crate) async fn attach_network(self: &Arc<Self>) -> Result<(), BackendError> {
        network::attach(&self.shared, self.id, &self.owner, || self.view().network.clone()).await
    }

    /// Closes what leads into the sandbox and out of it. Call this before its processes end: an open socket keeps its
    /// network namespace alive.
    pub(crate) async fn detach_network(&self) {
        self.shared.ports.forget(self.id);
        network::detach(&self.shared, self.id).await;
    }

    /// Shows its programs which roots to trust. Needed once; the files stay as long as the sandbox.
    pub(crate) async fn show_trust(&self, rootfs: &Rootfs) -> Result<(), BackendError> {
        let policy = self.view().network.clone();
        match network::closes(&self.shared, &policy) {
            true => Ok(()),
            false => network::show_trust(&self.shared, self.id, rootfs).await,
        }
    }

    /// Puts a policy in force that has just been changed.
    pub(crate) async fn apply_network(self: &Arc<Self>) -> Result<(), EngineError> {
        let policy = || self.view().network.clone();
        let changed = match self.state() {
            State::Running | State::Paused(Kept::Frozen) => self.attach_network().await,
            // It gets the policy when it gets processes, if it has none yet; until then it has no network.
            State::Creating | State::Paused(_) | State::Deleting | State::Failed { .. } => {
                network::change(&self.shared, self.id, &self.owner, policy).await
            }
        };
        let applied = match (changed, self.state()) {
            (Ok(()), State::Running) => {
                let image = self.stored_image();
                self.show_trust(&image.map_or(Rootfs::Host, |image| image.rootfs())).await
            }
            (changed, _) => changed,
        };
        applied.map_err(|source| match source {
            BackendError::Network { source, .. } if *source == NetworkFault::TooOld => {
                EngineError::SandboxTooOld { id: self.id }
            }
            source => EngineError::Network { id: self.id, source },
        })
    }

    /// An error if the sandbox can never have a network.
    pub(crate) async fn check_network(&self) -> Result<(), EngineError> {
        match self.shared.backend.can_have_network(self.id).await {
            // A sandbox that does not exist on the host yet can have one.
            Ok(true) | Err(BackendError::Gone) => Ok(()),
            Ok(false) => Err(EngineError::SandboxTooOld { id: self.id }),
            Err(source) => Err(EngineError::Network { id: self.id, source }),
        }
    }
}
