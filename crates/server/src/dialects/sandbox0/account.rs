//! What a key may do, and how much of that is used.

use axum::extract::{FromRequestParts, State};
use axum::http::request::Parts;
use engine::{Key, ListQuery};
use serde_json::{Value, json};

use super::answer::{Answer, done};
use super::error::Refusal;
use crate::http::app::{App, Caller};
use crate::http::body::text_in_path;
use crate::http::clock::rfc3339;

/// What the vendor limits, with the unit of each and whether it is a rate.
const DIMENSIONS: &[(&str, &str, &str)] = &[
    ("active_sandboxes", "count", "capacity"),
    ("paused_sandboxes", "count", "capacity"),
    ("sandbox_claims", "claims", "rate"),
    ("api_requests", "requests", "rate"),
    ("network_egress_bytes", "bytes", "rate"),
    ("network_ingress_bytes", "bytes", "rate"),
];

/// One of the limits. Only the number of sandboxes has one here.
async fn show(app: &App, key: &Key, (name, unit, kind): (&str, &str, &str)) -> Result<Value, Refusal> {
    let (mut active, mut paused, mut cursor) = (0u64, 0u64, None);
    if kind == "capacity" {
        loop {
            let query = ListQuery { limit: Some(engine::PAGE_MAX), cursor, ..ListQuery::default() };
            let page = app.engine.list(&key.owner, query).await?;
            let resting =
                page.items.iter().filter(|sandbox| matches!(sandbox.state, engine::State::Paused(_))).count()
                    as u64;
            (active, paused) = (active + page.items.len() as u64 - resting, paused + resting);
            match page.next_cursor {
                None => break,
                next => cursor = next,
            }
        }
    }
    let current = match name {
        "active_sandboxes" => Some(active),
        "paused_sandboxes" => Some(paused),
        _ => None,
    };
    // The limit is for both together.
    let limit = key.limits.sandboxes.map(u64::from).filter(|_| name == "active_sandboxes");
    let remaining = limit.map(|limit| limit.saturating_sub(active + paused));
    Ok(json!({
        "team_id": key.owner.as_str(),
        "dimension": name,
        "kind": kind,
        "limit_value": limit,
        "interval_ms": null,
        "burst_value": null,
        "current": current,
        "remaining": remaining,
        "unlimited": limit.is_none(),
        "unit": unit,
        "source": if limit.is_some() { "team_override" } else { "unlimited" },
    }))
}

/// All limits.
pub async fn quotas(State(app): State<App>, Caller(key): Caller) -> Result<Answer, Refusal> {
    let mut all = Vec::with_capacity(DIMENSIONS.len());
    for dimension in DIMENSIONS {
        all.push(show(&app, &key, *dimension).await?);
    }
    Ok(done(all.into()))
}

/// The limit that a path names.
pub struct Named {
    key: Key,
    dimension: (&'static str, &'static str, &'static str),
}

impl FromRequestParts<App> for Named {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Refusal> {
        let Caller(key) = Caller::from_request_parts(parts, app).await?;
        let text = text_in_path(parts, app, "dimension").await?;
        let found = DIMENSIONS.iter().find(|(name, ..)| *name == text);
        let words: Vec<&str> = DIMENSIONS.iter().map(|(name, ..)| *name).collect();
        let dimension =
            *found.ok_or_else(|| Refusal::must("dimension", format!("be one of {}", words.join(", "))))?;
        Ok(Self { key, dimension })
    }
}

/// One limit.
pub async fn quota(State(app): State<App>, Named { key, dimension }: Named) -> Result<Answer, Refusal> {
    Ok(done(show(&app, &key, dimension).await?))
}

/// The key that asks.
pub async fn key(Caller(key): Caller) -> Answer {
    let roles = if key.admin { ["admin"] } else { ["developer"] };
    done(json!({
        "id": key.id,
        "team_id": key.owner.as_str(),
        "name": key.id,
        "scope": "team",
        "roles": roles,
        "is_active": true,
        "created_at": rfc3339(key.created_at),
    }))
}
