//! Networks of sandboxes: show, explain, allow, events; and the hosts that `registries` means.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use engine::{
    EngineError, NetworkAction, NetworkChange, NetworkEvent, NetworkEventQuery, NetworkMode, NetworkPolicy,
    NetworkRule, NetworkSpec, NetworkTotals, SandboxUpdate,
};
use utoipa::IntoParams;
use wire::api;

use super::common::PAGE_MAX;
use crate::http::app::{App, Caller};
use crate::http::body::{self, FoundSandbox, SandboxPath};
use crate::http::clock::rfc3339;
use crate::http::error::ApiError;
use crate::http::params::Params;

/// What a sandbox may reach, and what it has used.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/network", tag = "network",
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 200, body = api::SandboxNetwork),
    (status = 404, body = api::ErrorBody),
))]
pub async fn get(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(id): SandboxPath,
) -> Result<Json<api::SandboxNetwork>, ApiError> {
    let view = app.engine.network(&key.owner, id).await?;
    let policy = policy(&view.policy);
    Ok(Json(api::SandboxNetwork {
        policy,
        preset: view.preset,
        attempts: view.attempts,
        totals: totals(view.totals),
    }))
}

/// Adds a rule to a sandbox's policy. In force when it is answered.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/network/rules", tag = "network", request_body = api::NetworkRule,
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 200, body = api::NetworkPolicy),
    (status = 400, description = "The rule is wrong. The policy stays as it was.", body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "The sandbox was made before there were networks.", body = api::ErrorBody),
))]
pub async fn allow(
    State(app): State<App>,
    Caller(key): Caller,
    FoundSandbox(id): FoundSandbox,
    body::Json(body): body::Json<api::NetworkRule>,
) -> Result<Json<api::NetworkPolicy>, ApiError> {
    let update =
        SandboxUpdate { network: Some(NetworkChange::Add(rule_spec(body))), ..SandboxUpdate::default() };
    let sandbox = app.engine.update(&key.owner, id, update).await?;
    Ok(Json(policy(&sandbox.network)))
}

/// Which destination to explain.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Query)]
#[allow(dead_code)] // For the description of the API; read by hand.
pub struct ExplainParams {
    /// As `https://example.com`, `ssh://example.com` or `tcp://example.com:5432`.
    to: String,
}

/// What would happen to a connection, and why.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/network/explain", tag = "network",
    params(("sandbox" = String, Path, description = "The sandbox's id."), ExplainParams), responses(
    (status = 200, body = api::NetworkExplanation),
    (status = 400, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
))]
pub async fn explain(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(id): SandboxPath,
    mut params: Params,
) -> Result<Json<api::NetworkExplanation>, ApiError> {
    let to = params
        .text("to")?
        .ok_or_else(|| ApiError::must("to", "be given, as in `?to=https://example.com`"))?;
    params.finish()?;
    let explained = app.engine.explain_network(&key.owner, id, &to).await?;
    Ok(Json(api::NetworkExplanation {
        allowed: explained.allowed,
        audited: explained.audited,
        rule: explained.rule,
        sentence: explained.sentence,
        opens: explained.opens,
    }))
}

/// Which events to read.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Query)]
#[allow(dead_code)] // For the description of the API; read by hand.
pub struct EventParams {
    /// Only events with a larger id. Without it, the newest events.
    after: Option<u64>,
    /// The maximum number of items, 1 to 500.
    limit: Option<u32>,
    /// Only what was refused: `true`.
    refused: Option<bool>,
    /// With `after`: wait up to this many seconds, 0 to 60, until there is an event.
    wait_seconds: Option<u32>,
}

/// What a sandbox reached and what was refused, oldest first.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/network/events", tag = "network",
    params(("sandbox" = String, Path, description = "The sandbox's id."), EventParams), responses(
    (status = 200, body = api::NetworkEventList),
    (status = 400, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
))]
pub async fn events(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(id): SandboxPath,
    mut params: Params,
) -> Result<Json<api::NetworkEventList>, ApiError> {
    let wait_max = engine::network::EVENTS_WAIT_MAX.as_secs();
    let query = NetworkEventQuery {
        after: params.number("after", 0..=u64::MAX)?,
        limit: params.number("limit", 1..=u64::from(PAGE_MAX))?.map(|limit| limit as u32),
        refused: params.flag("refused", false)?,
    };
    let wait = params.number("wait_seconds", 0..=wait_max)?.unwrap_or(0);
    params.finish()?;
    let events = app.engine.network_events(&key.owner, id, query, Duration::from_secs(wait)).await?;
    Ok(Json(api::NetworkEventList { events: events.into_iter().map(event).collect() }))
}

/// The hosts that the mode `registries` opens.
#[utoipa::path(get, path = "/v1/network/presets", tag = "network", responses(
    (status = 200, body = api::NetworkPresets),
))]
pub async fn presets(State(app): State<App>, Caller(key): Caller) -> Json<api::NetworkPresets> {
    let hosts = app.engine.network_presets(&key).into_iter().map(|host| api::PresetHost {
        tool: host.tool,
        host: host.host,
        ports: host.ports,
        source: host.source,
    });
    Json(api::NetworkPresets { hosts: hosts.collect() })
}

/// A policy as clients write it.
pub fn policy_of(network: api::Network) -> Result<NetworkPolicy, EngineError> {
    let api::NetworkPolicy { mode, rules, audit, inject } = match network {
        api::Network::Mode(mode) => api::NetworkPolicy { mode, ..api::NetworkPolicy::default() },
        api::Network::Policy(policy) => policy,
    };
    let mode = match mode {
        api::NetworkMode::None => NetworkMode::None,
        api::NetworkMode::Registries => NetworkMode::Registries,
        api::NetworkMode::Names => NetworkMode::Names,
        api::NetworkMode::Open => NetworkMode::Open,
    };
    NetworkPolicy::new(NetworkSpec { mode, rules: rules.into_iter().map(rule_spec).collect(), audit })?
        .with_inject(&inject)
}

fn rule_spec(rule: api::NetworkRule) -> NetworkRule {
    let api::NetworkRule { action, to, ports, protocol, private } = rule;
    let action = match action {
        api::NetworkAction::Allow => NetworkAction::Allow,
        api::NetworkAction::Deny => NetworkAction::Deny,
    };
    NetworkRule { action, to, ports, protocol, private }
}

/// A policy as clients read it.
pub fn policy(policy: &NetworkPolicy) -> api::NetworkPolicy {
    let spec = policy.spec();
    let mode = match spec.mode {
        NetworkMode::None => api::NetworkMode::None,
        NetworkMode::Registries => api::NetworkMode::Registries,
        NetworkMode::Names => api::NetworkMode::Names,
        NetworkMode::Open => api::NetworkMode::Open,
    };
    let rules = spec.rules.iter().cloned().map(|rule| api::NetworkRule {
        action: match rule.action {
            NetworkAction::Allow => api::NetworkAction::Allow,
            NetworkAction::Deny => api::NetworkAction::Deny,
        },
        to: rule.to,
        ports: rule.ports,
        protocol: rule.protocol,
        private: rule.private,
    });
    api::NetworkPolicy { mode, rules: rules.collect(), audit: spec.audit, inject: policy.inject().to_vec() }
}

fn totals(totals: NetworkTotals) -> api::NetworkTotals {
    let NetworkTotals { sent, received, connections, refused } = totals;
    api::NetworkTotals { sent_bytes: sent, received_bytes: received, connections, refused }
}

fn event(event: NetworkEvent) -> api::NetworkEvent {
    api::NetworkEvent {
        id: event.id,
        at: rfc3339(event.at),
        what: event.what,
        name: event.name,
        address: event.address.map(|address| address.to_string()),
        port: event.port,
        protocol: event.protocol,
        rule: event.rule,
        why: event.why,
        opens: event.opens,
        sent_bytes: event.sent,
        received_bytes: event.received,
    }
}
