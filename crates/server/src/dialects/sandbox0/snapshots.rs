//! Snapshots of a sandbox's files, going back to one, and forks.
//!
//! A snapshot is one of ours. What the client says of it beyond a name is in its note.

use std::time::Duration;

use axum::extract::{FromRequestParts, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use engine::snapshot::{ForkSpec, Snapshot, SnapshotState, TakeSpec};
use engine::{
    EngineError, Kept, Key, Labels, ListQuery, PauseSpec, Sandbox, SandboxUpdate, Selector, TemplateName,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::answer::{Answer, done, with};
use super::error::Refusal;
use super::names;
use super::notes::Notes;
use super::read::{Body, Meant};
use super::sandboxes::{check_lengths, seconds, show};
use crate::http::app::{App, Caller};
use crate::http::body::text_in_path;
use crate::http::clock::rfc3339;

/// The longest text about a snapshot.
const DESCRIPTION_MAX: usize = 4096;
/// The label of a fork that was asked for under a key, so that the same request finds it.
const FORK_KEY: &str = "sandbox0/fork";
/// The longest such key.
const FORK_KEY_MAX: usize = 255;

/// What is kept of a snapshot beside what the engine knows.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Note {
    name: Option<String>,
    description: Option<String>,
}

impl Note {
    fn of(snapshot: &Snapshot) -> Self {
        serde_json::from_str(&snapshot.note).unwrap_or_default()
    }
}

/// A snapshot of a sandbox.
async fn find(app: &App, key: &Key, text: &str) -> Result<Snapshot, EngineError> {
    let not_found = || EngineError::SnapshotNotFound { name: engine::shown(text) };
    let snapshot = app.engine.snapshot(&key.owner, text).await?;
    // A template can be named as a snapshot too.
    if snapshot.sandbox.is_some() { Ok(snapshot) } else { Err(not_found()) }
}

/// The template that sandboxes with a snapshot's files are made from.
pub async fn template(app: &App, key: &Key, text: &str) -> Result<TemplateName, Refusal> {
    let snapshot = find(app, key, text).await.map_err(|error| match error {
        // Routes of claims list 400, and not 404.
        EngineError::SnapshotNotFound { .. } => Refusal::bad(error.to_string()),
        error => error.into(),
    })?;
    match (snapshot.state, snapshot.template) {
        (SnapshotState::Ready, Some(template)) => Ok(TemplateName::parse(&template.name)?),
        _ => Err(Refusal::conflict("the snapshot is not ready")),
    }
}

/// `POST .../snapshots`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Create {
    name: Option<String>,
    description: Option<String>,
    expires_at: Option<Value>,
}

/// Takes a snapshot of a sandbox that runs or is paused.
pub async fn create(
    State(app): State<App>,
    Meant { key, sandbox }: Meant,
    Body(body): Body<Create>,
) -> Result<Answer, Refusal> {
    if body.description.as_ref().is_some_and(|text| text.len() > DESCRIPTION_MAX) {
        return Err(Refusal::must("description", format!("have at most {DESCRIPTION_MAX} bytes")));
    }
    if body.expires_at.is_some() {
        let message =
            "snapshots do not expire on this server: leave `expires_at` out, and delete the snapshot";
        return Err(Refusal::unsupported(message));
    }
    let name = body.name.filter(|name| !name.is_empty());
    let note = Note { name: name.clone(), description: body.description };
    let note = serde_json::to_string(&note).expect("notes are made of types that JSON can write");
    // Ours have no spaces and colons; the client sees its own.
    let plain = name.map(|name| name.replace(|c: char| c.is_whitespace() || c.is_control() || c == ':', "-"));
    let spec = TakeSpec { name: plain, note, ..TakeSpec::default() };
    let snapshot = app.engine.take_snapshot(&key, sandbox.id, spec).await?;
    Ok(with(StatusCode::CREATED, view(&snapshot)))
}

/// A snapshot as clients see it.
fn view(snapshot: &Snapshot) -> Value {
    let note = Note::of(snapshot);
    let mut view = json!({
        "id": snapshot.id,
        "sandbox_id": snapshot.sandbox.map(names::sandbox).unwrap_or_default(),
        "name": note.name.as_deref().unwrap_or(&snapshot.name),
        "created_at": rfc3339(snapshot.created_at),
    });
    if let Some(description) = note.description {
        view["description"] = description.into();
    }
    view
}

/// The snapshots of a sandbox, newest first.
pub async fn list(State(app): State<App>, Meant { key, sandbox }: Meant) -> Result<Answer, Refusal> {
    let mut shown = Vec::new();
    for snapshot in app.engine.published_snapshots(&key.owner).await? {
        if snapshot.sandbox == Some(sandbox.id) {
            shown.push(view(&snapshot));
        }
    }
    Ok(done(json!({"count": shown.len(), "snapshots": shown})))
}

/// The snapshot that a path names, and the key that asks.
pub struct Named {
    key: Key,
    text: String,
}

impl FromRequestParts<App> for Named {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Refusal> {
        let Caller(key) = Caller::from_request_parts(parts, app).await?;
        Ok(Self { key, text: text_in_path(parts, app, "snapshot").await? })
    }
}

/// A snapshot.
pub async fn get(State(app): State<App>, Named { key, text }: Named) -> Result<Answer, Refusal> {
    Ok(done(view(&find(&app, &key, &text).await?)))
}

/// Deletes a snapshot. What was made from it stays.
pub async fn delete(State(app): State<App>, Named { key, text }: Named) -> Result<Answer, Refusal> {
    let snapshot = find(&app, &key, &text).await?;
    app.engine.delete_snapshot(&key.owner, &snapshot.id).await?;
    Ok(done(json!({"deleted": true})))
}

/// `POST .../rootfs/restore`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Restore {
    snapshot_id: String,
}

fn without_memory() -> PauseSpec {
    PauseSpec { kept: Kept::Dropped, ..PauseSpec::default() }
}

/// Replaces the files of a paused sandbox by those of a snapshot. It stays paused.
pub async fn restore(
    State(app): State<App>,
    Meant { key, sandbox }: Meant,
    Body(body): Body<Restore>,
) -> Result<Answer, Refusal> {
    let snapshot = find(&app, &key, &body.snapshot_id).await?;
    if !matches!(sandbox.state, engine::State::Paused(_)) {
        return Err(Refusal::conflict("only the files of a paused sandbox can be restored: pause it"));
    }
    app.engine.rollback(&key.owner, sandbox.id, &snapshot.id).await?;
    app.engine.pause(&key.owner, sandbox.id, without_memory()).await?;
    let id = names::sandbox(sandbox.id);
    Ok(done(json!({"sandbox_id": id, "snapshot_id": snapshot.id, "status": "paused"})))
}

/// `POST .../fork`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Fork {
    memory: Option<bool>,
    config: Option<ForkConfig>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ForkConfig {
    ttl: Option<i64>,
    hard_ttl: Option<i64>,
}

/// Makes a paused sandbox with the files and the settings of another one.
pub async fn fork(
    State(app): State<App>,
    headers: HeaderMap,
    Meant { key, sandbox }: Meant,
    Body(body): Body<Fork>,
) -> Result<Answer, Refusal> {
    if body.memory == Some(true) {
        return Err(Refusal::unsupported("this server forks files and no memory: leave `memory` out"));
    }
    let before = Notes::of(&sandbox);
    let config = body.config.unwrap_or_default();
    let notes = Notes {
        template: before.template.or_else(|| Some(sandbox.template.clone())),
        ttl: seconds("config.ttl", config.ttl)?.unwrap_or(before.ttl),
        hard_ttl: seconds("config.hard_ttl", config.hard_ttl)?.unwrap_or(before.hard_ttl),
        ..before
    };
    check_lengths(notes.ttl, notes.hard_ttl)?;
    let wanted = headers.get("idempotency-key").map(|wanted| {
        let text = wanted.to_str().ok().filter(|text| !text.is_empty() && text.len() <= FORK_KEY_MAX);
        text.map(|text| format!("{} {text}", sandbox.id)).ok_or_else(|| {
            Refusal::must("Idempotency-Key", format!("have 1 to {FORK_KEY_MAX} plain characters"))
        })
    });
    let wanted = wanted.transpose()?;
    if let Some(label) = &wanted
        && let Some(known) = forked(&app, &key, label).await?
    {
        return answer(&app, &sandbox, &known).await;
    }
    let label = wanted.map(|label| (FORK_KEY.to_owned(), label));
    let spec = ForkSpec { labels: Labels::new(label.into_iter().collect())?, ..ForkSpec::default() };
    let made = app.engine.fork(&key, sandbox.id, spec).await?;
    let child = made.into_iter().next().ok_or_else(Refusal::bug)??;
    let settled = async {
        let update = SandboxUpdate {
            notes: notes.changes(),
            lifetime: Some(notes.rules(notes.ttl, Duration::ZERO)?),
            ..SandboxUpdate::default()
        };
        app.engine.update(&key.owner, child.id, update).await?;
        app.engine.pause(&key.owner, child.id, without_memory()).await
    };
    match settled.await {
        Ok(child) => answer(&app, &sandbox, &child).await,
        Err(error) => {
            // The caller gets an error, so the sandbox must not stay.
            if let Err(left) = app.engine.delete(&key.owner, child.id).await {
                tracing::warn!(sandbox = %child.id, error = %left, "cannot delete a fork that was not finished");
            }
            Err(error.into())
        }
    }
}

/// The fork that was made for the same request before.
async fn forked(app: &App, key: &Key, label: &str) -> Result<Option<Sandbox>, EngineError> {
    let selectors = vec![Selector::Is(FORK_KEY.into(), label.into())];
    let page =
        app.engine.list(&key.owner, ListQuery { limit: Some(1), selectors, ..ListQuery::default() }).await?;
    Ok(page.items.into_iter().next())
}

async fn answer(app: &App, source: &Sandbox, child: &Sandbox) -> Result<Answer, Refusal> {
    let sandbox = show(app, child).await?;
    Ok(with(StatusCode::CREATED, json!({"source_sandbox_id": names::sandbox(source.id), "sandbox": sandbox})))
}
