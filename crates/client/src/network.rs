//! Networks of sandboxes.

use http::Method;
use wire::{SandboxId, api};

use crate::error::ClientError;
use crate::transport::Wait;
use crate::{Client, Repeat, in_query, json, plain};

impl Client {
    /// What a sandbox may reach, and what it has used.
    pub async fn network(&self, id: SandboxId) -> Result<api::SandboxNetwork, ClientError> {
        self.read(format!("/v1/sandboxes/{id}/network")).await
    }

    /// Adds a rule to a sandbox's policy. It is in force when this returns.
    pub async fn allow_network(
        &self,
        id: SandboxId,
        rule: &api::NetworkRule,
    ) -> Result<api::NetworkPolicy, ClientError> {
        self.call(json(Method::POST, format!("/v1/sandboxes/{id}/network/rules"), rule), Repeat::Harmless)
            .await
    }

    /// What would happen to a connection, and why.
    pub async fn explain_network(
        &self,
        id: SandboxId,
        to: &str,
    ) -> Result<api::NetworkExplanation, ClientError> {
        self.read(format!("/v1/sandboxes/{id}/network/explain?to={}", in_query(to))).await
    }

    /// Events of a sandbox's network, oldest first: those after an id, or the newest. With `after`, waits up to `wait_seconds` until
    /// there is one.
    pub async fn network_events(
        &self,
        id: SandboxId,
        after: Option<u64>,
        limit: u32,
        refused: bool,
        wait_seconds: u32,
    ) -> Result<api::NetworkEventList, ClientError> {
        let after = after.map(|after| format!("&after={after}")).unwrap_or_default();
        let query = format!("limit={limit}&refused={refused}&wait_seconds={wait_seconds}{after}");
        let mut call = plain(Method::GET, format!("/v1/sandboxes/{id}/network/events?{query}"));
        call.wait = Wait::Forever;
        self.call(call, Repeat::Harmless).await
    }

    /// The hosts that the mode `registries` opens.
    pub async fn network_presets(&self) -> Result<api::NetworkPresets, ClientError> {
        self.read("/v1/network/presets".into()).await
    }
}
