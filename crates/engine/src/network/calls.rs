//! Calls about the networks of sandboxes: show, explain, events, presets; and what the engine does with networks at its start and end.

use std::sync::Arc;
use std::time::Duration;

use egress::policy::{Asked, Explanation, Policy};
use tracing::warn;
use wire::SandboxId;

use crate::error::chain;
use crate::model::check::page_limit;
use crate::model::network::{NetworkEvent, NetworkEventQuery, NetworkView, PresetHostView};
use crate::model::{Key, Owner};
use crate::{Engine, EngineError, Field, Shared};

/// How long a caller may wait for new events.
pub const EVENTS_WAIT_MAX: Duration = Duration::from_secs(60);

impl Engine {
    /// What a sandbox may reach, and what it has used.
    pub async fn network(&self, owner: &Owner, id: SandboxId) -> Result<NetworkView, EngineError> {
        let live = self.live(owner, id)?;
        let policy = live.view().network.clone();
        let shared = self.shared();
        let hidden = |host: &egress::policy::Name| {
            shared.networks.preset.hosts.iter().any(|preset| preset.private && preset.host == *host)
        };
        let rules = policy.expand(&shared.networks.preset)?;
        let preset = rules
            .preset
            .iter()
            .filter(|rule| !matches!(&rule.target, egress::policy::Target::Host(host) if hidden(host)))
            .map(ToString::to_string);
        let attempts = shared.backend.attempts(id).await.ok();
        let totals = shared.db.network_totals(id).await?;
        Ok(NetworkView { preset: preset.collect(), policy, attempts, totals })
    }

    /// What would happen to a connection, and why. `to` is an address such as `https://example.com`.
    pub async fn explain_network(
        &self,
        owner: &Owner,
        id: SandboxId,
        to: &str,
    ) -> Result<Explanation, EngineError> {
        let live = self.live(owner, id)?;
        let policy = live.view().network.clone();
        let asked = Asked::parse(to).map_err(|error| Field::To.must(must(&error.to_string())))?;
        let networks = &self.shared().networks;
        let policy = Policy::new(policy.expand(&networks.preset)?);
        Ok(policy.explain(asked.query(), &networks.addresses(self.shared())))
    }

    /// Events of a sandbox's network, oldest first. With `wait`, returns when there is at least one, or when the time is over.
    pub async fn network_events(
        &self,
        owner: &Owner,
        id: SandboxId,
        query: NetworkEventQuery,
        wait: Duration,
    ) -> Result<Vec<NetworkEvent>, EngineError> {
        let limit = page_limit(query.limit)?;
        let shared = self.shared();
        let deadline = tokio::time::Instant::now() + wait.min(EVENTS_WAIT_MAX);
        loop {
            self.live(owner, id)?;
            let mut stored = std::pin::pin!(shared.networks.stored.notified());
            stored.as_mut().enable();
            let events = shared.db.network_events(id, query.after, limit, query.refused).await?;
            if !events.is_empty() || tokio::time::Instant::now() >= deadline {
                return Ok(events);
            }
            // Another sandbox's event wakes this too; then nothing is found, and the wait goes on.
            let _ = tokio::time::timeout_at(deadline, stored).await;
        }
    }

    /// The hosts that `registries` opens. Those that only the operator should know are for admins.
    pub fn network_presets(&self, key: &Key) -> Vec<PresetHostView> {
        let found = self.shared().config.network.registries.iter();
        found
            .filter(|found| key.admin || !found.private)
            .map(|found| PresetHostView {
                tool: found.tool.word().into(),
                host: found.host.to_string(),
                ports: found.ports.clone(),
                source: found.source.clone().filter(|_| key.admin),
                private: found.private,
            })
            .collect()
    }
}

/// Whether a policy opens nothing.
pub(crate) fn closes(shared: &Shared, policy: &crate::NetworkPolicy) -> bool {
    let opens_nothing =
        policy.is_none() || policy.expand(&shared.networks.preset).is_ok_and(|rules| rules.is_closed());
    opens_nothing && policy.inject().is_empty()
}

fn must(error: &str) -> String {
    match error.strip_prefix("a destination must ") {
        Some(rule) => rule.into(),
        None => format!("be a destination: {error}"),
    }
}

/// At the engine's start: lets go of sandboxes that an egress of an earlier daemon serves and that should have no network.
pub(crate) async fn tend(shared: Arc<Shared>) {
    let Some(link) = shared.networks.links.living(&shared).await else { return };
    for id in link.egress.greeting().attached.clone() {
        let live = shared.registry().get(id);
        let keeps = live.is_some_and(|live| !closes(&shared, &live.view().network.clone()));
        if keeps || shared.networks.doors().contains_key(&id) {
            continue;
        }
        match link.egress.detach(id).await {
            Ok(_) => link.forget(id),
            Err(error) => warn!(sandbox = %id, error = chain(&error), "cannot take a network away"),
        }
        match shared.backend.close_network(id).await {
            Ok(()) | Err(runtime::BackendError::Gone) => {}
            Err(error) => warn!(sandbox = %id, error = chain(&error), "cannot close a sandbox's network"),
        }
    }
}

/// At the engine's end: an egress that serves nobody ends too.
pub(crate) async fn rest(shared: &Arc<Shared>) {
    shared.networks.links.end_if_idle(shared).await;
}
