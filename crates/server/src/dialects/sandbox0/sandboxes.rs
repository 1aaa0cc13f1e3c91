//! Sandboxes: claim, list, get, update, delete, pause, resume, refresh.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use engine::{
    Action, EngineError, Explanation, Field, Kept, Key, ListQuery, NoteChanges, PauseSpec, PoolName, Sandbox,
    SandboxEnv, SandboxSpec, SandboxUpdate, TemplateName, Wait,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::answer::{Answer, done, with};
use super::error::Refusal;
use super::notes::{self, Notes, age};
use super::read::{Body, Meant};
use super::{names, network, services, snapshots, templates, volumes};
use crate::config::quantity::Bytes;
use crate::dialects::common::{self, amount::bytes_text};
use crate::http::app::{App, Caller};
use crate::http::clock::rfc3339;
use crate::http::params::Params;

/// Where commands run and relative paths begin.
pub const WORKSPACE: &str = "/workspace";
/// Entries on a page, if the caller does not say, and at most.
const PAGE_DEFAULT: u64 = 50;
const PAGE_MAX: u64 = 200;
/// Lengths in seconds are at most ten years; more is a mistake in units.
const SECONDS_MAX: i64 = 3660 * 86_400;

/// `POST /sandboxes`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Claim {
    template: Option<String>,
    snapshot_id: Option<String>,
    config: Option<Config>,
    mounts: Option<Vec<volumes::Mount>>,
}

/// What a sandbox should be like.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Config {
    env_vars: Option<BTreeMap<String, String>>,
    resources: Option<Resources>,
    ttl: Option<i64>,
    hard_ttl: Option<i64>,
    network: Option<Value>,
    webhook: Option<Value>,
    auto_resume: Option<bool>,
    services: Option<Vec<Value>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Resources {
    memory: Option<String>,
}

impl Resources {
    fn memory_bytes(&self) -> Result<Option<u64>, Refusal> {
        let memory = self.memory.as_deref().map(Bytes::parse).transpose();
        Ok(memory
            .map_err(|error| Refusal::bad(format!("`resources.memory` is not valid: {error}")))?
            .map(|m| m.bytes))
    }
}

/// A length in seconds; 0 for none.
pub fn seconds(field: &str, given: Option<i64>) -> Result<Option<u64>, Refusal> {
    match given {
        None => Ok(None),
        Some(given @ 0..=SECONDS_MAX) => Ok(Some(given.unsigned_abs())),
        Some(given) => {
            Err(Refusal::must(field, format!("be between 0 and {SECONDS_MAX} seconds, got {given}")))
        }
    }
}

/// A sandbox is paused before it is deleted, or not at all.
pub fn check_lengths(ttl: u64, hard_ttl: u64) -> Result<(), Refusal> {
    match hard_ttl > 0 && ttl > hard_ttl {
        true => Err(Refusal::must("ttl", format!("be at most `hard_ttl`, {hard_ttl}, got {ttl}"))),
        false => Ok(()),
    }
}

/// Takes a sandbox from a pool of the template, if there is one, or makes it. Answers when it runs.
pub async fn claim(
    State(app): State<App>,
    Caller(key): Caller,
    Body(body): Body<Claim>,
) -> Result<Answer, Refusal> {
    let named = body.template.unwrap_or_default();
    let config = body.config.unwrap_or_default();
    if named.is_empty() {
        return Err(Refusal::must("template", "be given"));
    }
    if config.webhook.is_some_and(|webhook| !webhook.is_null()) {
        let message = "this server calls no webhooks: leave `config.webhook` out, and watch `GET /v1/events`";
        return Err(Refusal::unsupported(message));
    }
    let mounts = volumes::mounts(&app, &key, body.mounts.unwrap_or_default()).await?;
    let services = config.services.unwrap_or_default();
    services::check(&services)?;
    let notes = Notes {
        template: Some(named.clone()),
        ttl: seconds("ttl", config.ttl)?.unwrap_or(0),
        hard_ttl: seconds("hard_ttl", config.hard_ttl)?.unwrap_or(0),
        auto_resume: config.auto_resume.unwrap_or(true),
        workspace: true,
    };
    check_lengths(notes.ttl, notes.hard_ttl)?;
    let memory_bytes = config.resources.unwrap_or_default().memory_bytes()?;
    let template = match body.snapshot_id.as_deref().filter(|id| !id.is_empty()) {
        Some(snapshot) => snapshots::template(&app, &key, snapshot).await?,
        None => templates::named(&app, &key, &named).await?,
    };
    let policy = config.network.as_ref().map(network::policy).transpose()?;
    let mut spec = SandboxSpec {
        env: SandboxEnv::new(config.env_vars.unwrap_or_default()).map_err(|must| must.of(Field::Env))?,
        memory_bytes,
        lifetime: notes.rules(notes.ttl, Duration::ZERO)?,
        notes: notes.stored()?,
        network: policy,
        network_default: common::network::open(),
        pool: pool_of(&app, &key, &template).filter(|_| memory_bytes.is_none() && mounts.is_empty()),
        mounts,
        ..SandboxSpec::default()
    };
    if spec.pool.is_none() {
        spec.template = template;
    }
    if let Some(network) = &config.network {
        spec.notes = spec.notes.changed(&NoteChanges::set(notes::NETWORK, network.to_string()))?;
    }
    let sandbox = app.engine.create(&key, spec, Wait::Ready).await.map_err(|error| match error {
        // Routes of claims list 400, and not 404.
        EngineError::TemplateNotFound { .. } | EngineError::ImageNotFound { .. } => {
            Refusal::bad(error.to_string())
        }
        error => error.into(),
    })?;
    tracing::Span::current().record("sandbox", tracing::field::display(sandbox.id));
    let ready = async {
        let files = app.engine.files(&key.owner, sandbox.id, None)?;
        files.make_directory(WORKSPACE.as_bytes(), true, None).await?;
        services::publish(&app, &key, &sandbox, services).await
    };
    if let Err(refusal) = ready.await {
        // The caller gets an error and no id, so nobody could delete the sandbox later.
        if let Err(error) = app.engine.delete(&key.owner, sandbox.id).await {
            tracing::warn!(sandbox = %sandbox.id, %error, "cannot delete a sandbox that was not ready");
        }
        return Err(refusal);
    }
    let id = names::sandbox(sandbox.id);
    Ok(with(
        StatusCode::CREATED,
        json!({
            "sandbox_id": id,
            "status": status_word(sandbox.state),
            "runtime_id": id,
            // Before 0.10.1.
            "pod_name": id,
            "template": named,
            "cluster_id": null,
        }),
    ))
}

/// The pool that keeps sandboxes of a template ready.
fn pool_of(app: &App, key: &Key, template: &TemplateName) -> Option<PoolName> {
    let pools = app.engine.pools(&key.owner);
    pools.into_iter().find(|pool| pool.template == template.as_str()).map(|pool| pool.name)
}

/// What the state of a sandbox is called here.
fn status_word(state: engine::State) -> &'static str {
    match state {
        engine::State::Creating => "starting",
        engine::State::Running => "running",
        engine::State::Paused(_) => "paused",
        engine::State::Deleting => "terminating",
        engine::State::Failed { .. } => "failed",
    }
}

/// When a rule acts, if it does.
fn deadline(explained: &Explanation, acts: impl Fn(Action) -> bool) -> Value {
    let at = explained.rules.iter().filter(|now| acts(now.rule.action)).filter_map(|now| now.at).min();
    at.map_or(Value::Null, |at| rfc3339(at).into())
}

/// What all views of a sandbox have.
async fn summary(app: &App, sandbox: &Sandbox) -> Result<Value, EngineError> {
    let explained = app.engine.explain(&sandbox.owner, sandbox.id).await?;
    let notes = Notes::of(sandbox);
    let created = rfc3339(sandbox.created_at);
    Ok(json!({
        "id": names::sandbox(sandbox.id),
        "template_id": notes.template.unwrap_or_else(|| sandbox.template.clone()),
        "status": status_word(sandbox.state),
        "paused": matches!(sandbox.state, engine::State::Paused(_)),
        "runtime_generation": notes::generation(sandbox),
        "cluster_id": null,
        "expires_at": deadline(&explained, |action| action != Action::Delete),
        "hard_expires_at": deadline(&explained, |action| action == Action::Delete),
        "created_at": created,
        "updated_at": sandbox.paused_at.map_or(created, rfc3339),
    }))
}

/// A sandbox as clients see it.
pub async fn show(app: &App, sandbox: &Sandbox) -> Result<Value, Refusal> {
    let mut body = summary(app, sandbox).await?;
    let id = names::sandbox(sandbox.id);
    let object = body.as_object_mut().expect("it was just made as one");
    object.insert("team_id".into(), sandbox.owner.as_str().into());
    object.insert("auto_resume".into(), Notes::of(sandbox).auto_resume.into());
    object.insert("runtime_id".into(), id.clone().into());
    object.insert("pod_name".into(), id.into());
    object.insert("claimed_at".into(), rfc3339(sandbox.created_at).into());
    object.insert("resources".into(), json!({"memory": bytes_text(sandbox.limits.memory_bytes)}));
    object.insert("services".into(), services::written(sandbox).into());
    Ok(body)
}

/// `GET /sandboxes`: newest first.
pub async fn list(
    State(app): State<App>,
    Caller(key): Caller,
    mut params: Params,
) -> Result<Answer, Refusal> {
    let status = params.text("status")?.filter(|status| !status.is_empty());
    if let Some(status) = status.as_deref()
        && !["starting", "running", "paused", "terminating", "failed"].contains(&status)
    {
        return Err(Refusal::must(
            "status",
            format!("be the word for a state, got `{}`", engine::shown(status)),
        ));
    }
    let template = params.text("template_id")?.filter(|template| !template.is_empty());
    let paused = match params.text("paused")? {
        None => None,
        Some(text) => {
            Some(text.parse::<bool>().map_err(|_| Refusal::must("paused", "be `true` or `false`"))?)
        }
    };
    let limit = params.number("limit", 1..=PAGE_MAX)?.unwrap_or(PAGE_DEFAULT) as usize;
    let offset = params.number("offset", 0..=u64::from(u32::MAX))?.unwrap_or(0) as usize;
    let wanted = |sandbox: &Sandbox| {
        let is_paused = matches!(sandbox.state, engine::State::Paused(_));
        let of = Notes::of(sandbox).template.unwrap_or_else(|| sandbox.template.clone());
        status.as_ref().is_none_or(|status| status == status_word(sandbox.state))
            && template.as_ref().is_none_or(|template| *template == of)
            && paused.is_none_or(|paused| paused == is_paused)
    };
    let (mut found, mut cursor) = (Vec::new(), None);
    loop {
        let query = ListQuery { limit: Some(engine::PAGE_MAX), cursor, ..ListQuery::default() };
        let page = app.engine.list(&key.owner, query).await?;
        found.extend(page.items.into_iter().filter(|sandbox| wanted(sandbox)));
        match page.next_cursor {
            None => break,
            next => cursor = next,
        }
    }
    let (count, mut items) = (found.len(), Vec::new());
    for sandbox in found.iter().skip(offset).take(limit) {
        match summary(&app, sandbox).await {
            Ok(summary) => items.push(summary),
            // It was deleted since.
            Err(EngineError::SandboxNotFound { .. } | EngineError::WrongState { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let has_more = offset.saturating_add(limit) < count;
    Ok(done(json!({"sandboxes": items, "count": count, "has_more": has_more})))
}

/// A sandbox.
pub async fn get(State(app): State<App>, meant: Meant) -> Result<Answer, Refusal> {
    Ok(done(show(&app, &meant.sandbox).await?))
}

/// A sandbox in fewer words.
pub async fn status(State(app): State<App>, Meant { sandbox, .. }: Meant) -> Result<Answer, Refusal> {
    let mut body = show(&app, &sandbox).await?;
    let object = body.as_object_mut().expect("it was just made as one");
    object.insert("sandbox_id".into(), names::sandbox(sandbox.id).into());
    // The client takes dates here, and no `null`.
    object.retain(|_, value| !value.is_null());
    Ok(done(body))
}

/// `PUT /sandboxes/{sandbox}`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Update {
    config: Option<Config>,
}

/// Changes lengths, whether a use resumes it, and services.
pub async fn update(
    State(app): State<App>,
    Meant { key, sandbox }: Meant,
    Body(body): Body<Update>,
) -> Result<Answer, Refusal> {
    let config = body.config.unwrap_or_default();
    if let Some(memory) = config.resources.unwrap_or_default().memory_bytes()?
        && memory != sandbox.limits.memory_bytes
    {
        let message = "this server does not change the memory of a sandbox: claim another one with `memory`";
        return Err(Refusal::unsupported(message));
    }
    for (field, given) in [
        ("config.env_vars", config.env_vars.is_some()),
        ("config.network", config.network.is_some()),
        ("config.webhook", config.webhook.is_some()),
    ] {
        if given {
            let message =
                format!("`{field}` is set at the claim; change the network with `update_network_policy`");
            return Err(Refusal::bad(message));
        }
    }
    let (ttl, hard_ttl) = (seconds("ttl", config.ttl)?, seconds("hard_ttl", config.hard_ttl)?);
    let before = Notes::of(&sandbox);
    let notes = Notes {
        ttl: ttl.unwrap_or(before.ttl),
        hard_ttl: hard_ttl.unwrap_or(before.hard_ttl),
        auto_resume: config.auto_resume.unwrap_or(before.auto_resume),
        ..before
    };
    check_lengths(notes.ttl, notes.hard_ttl)?;
    let lifetime = match ttl.is_some() || hard_ttl.is_some() {
        true => Some(notes.rules(notes.ttl, age(&sandbox))?),
        false => None,
    };
    let update = SandboxUpdate { notes: notes.changes(), lifetime, ..SandboxUpdate::default() };
    let mut sandbox = app.engine.update(&key.owner, sandbox.id, update).await?;
    if let Some(services) = config.services {
        services::check(&services)?;
        services::publish(&app, &key, &sandbox, services).await?;
        sandbox = app.engine.get(&key.owner, sandbox.id).await?;
    }
    Ok(done(show(&app, &sandbox).await?))
}

/// Goes with the answer to a deletion.
#[derive(Debug, Clone, Copy)]
pub struct Deleted;

/// Deletes a sandbox with all that is in it.
pub async fn delete(
    State(app): State<App>,
    Meant { key, sandbox }: Meant,
) -> Result<(Extension<Deleted>, Answer), Refusal> {
    app.engine.delete(&key.owner, sandbox.id).await?;
    Ok((Extension(Deleted), with(StatusCode::ACCEPTED, json!({"message": "the sandbox is deleted"}))))
}

/// `POST .../pause` and `.../resume`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Execution {
    /// Whether memory is kept; for a resume, whether it must have been.
    memory: Option<bool>,
}

/// Pauses a sandbox: its processes end and its files stay, or with `memory`, its processes stand still.
pub async fn pause(
    State(app): State<App>,
    Meant { key, sandbox }: Meant,
    Body(body): Body<Execution>,
) -> Result<Answer, Refusal> {
    let kept = if body.memory == Some(true) { Kept::Frozen } else { Kept::Dropped };
    let sandbox =
        app.engine.pause(&key.owner, sandbox.id, PauseSpec { kept, ..PauseSpec::default() }).await?;
    Ok(done(json!({
        "sandbox_id": names::sandbox(sandbox.id),
        "paused": true,
        "status": status_word(sandbox.state),
    })))
}

/// Lets a paused sandbox run, and counts that.
pub async fn wake(app: &App, key: &Key, sandbox: &Sandbox) -> Result<Sandbox, EngineError> {
    // Counted first: clients wait for the next number, and a number too many is harmless.
    let notes = Notes::of(sandbox);
    let rules = notes.rules(notes.ttl, Duration::ZERO)?;
    let pauses = |lifetime: &engine::Lifetime| {
        lifetime.rules().iter().find(|rule| rule.action != Action::Delete).map(|rule| rule.after)
    };
    // A refresh may have given the run before another length; the next one has the configured one.
    let lifetime = match notes.workspace && pauses(&rules) != pauses(&sandbox.lifetime) {
        true => {
            let kept = sandbox.lifetime.rules().iter().filter(|rule| rule.action == Action::Delete);
            let pause = rules.rules().iter().filter(|rule| rule.action != Action::Delete);
            Some(engine::Lifetime::new(pause.chain(kept).copied().collect())?)
        }
        false => None,
    };
    let update =
        SandboxUpdate { notes: notes::next_generation(sandbox), lifetime, ..SandboxUpdate::default() };
    app.engine.update(&key.owner, sandbox.id, update).await?;
    app.engine.resume(key, sandbox.id).await
}

/// Lets a paused sandbox run. One that runs stays as it is.
pub async fn resume(
    State(app): State<App>,
    Meant { key, sandbox }: Meant,
    Body(body): Body<Execution>,
) -> Result<Answer, Refusal> {
    let frozen = sandbox.state == engine::State::Paused(Kept::Frozen);
    if body.memory == Some(true) && sandbox.state == engine::State::Paused(Kept::Dropped) {
        return Err(Refusal::conflict(
            "the sandbox was paused without its memory: resume it without `memory`",
        ));
    }
    let sandbox = match sandbox.state {
        engine::State::Paused(_) => wake(&app, &key, &sandbox).await?,
        _ => app.engine.resume(&key, sandbox.id).await?,
    };
    Ok(done(json!({
        "sandbox_id": names::sandbox(sandbox.id),
        "resumed": true,
        "restored_memory": frozen,
    })))
}

/// `POST .../refresh`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Refresh {
    duration: Option<i64>,
}

/// Begins both lengths again, now.
pub async fn refresh(
    State(app): State<App>,
    Meant { key, sandbox }: Meant,
    Body(body): Body<Refresh>,
) -> Result<Answer, Refusal> {
    let notes = Notes::of(&sandbox);
    let ttl = seconds("duration", body.duration)?.unwrap_or(notes.ttl);
    check_lengths(ttl, notes.hard_ttl)?;
    match notes.workspace {
        true => {
            let lifetime = Some(notes.rules(ttl, age(&sandbox))?);
            app.engine
                .update(&key.owner, sandbox.id, SandboxUpdate { lifetime, ..SandboxUpdate::default() })
                .await?;
        }
        // The rules of another client stay its own.
        false => drop(app.engine.touch(&key.owner, sandbox.id).await?),
    }
    let explained = app.engine.explain(&key.owner, sandbox.id).await?;
    Ok(done(json!({
        "sandbox_id": names::sandbox(sandbox.id),
        "expires_at": deadline(&explained, |action| action != Action::Delete),
        "hard_expires_at": deadline(&explained, |action| action == Action::Delete),
    })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_seconds_in_their_order() {
        assert_eq!(seconds("ttl", Some(0)).expect("it is none"), Some(0));
        assert_eq!(seconds("ttl", None).expect("it is absent"), None);
        for wrong in [-1, i64::MAX] {
            seconds("ttl", Some(wrong)).expect_err("it is no length");
        }
        check_lengths(3600, 0).expect("there is no hard limit");
        check_lengths(3600, 3600).expect("they may be equal");
        check_lengths(3601, 3600).expect_err("it would be deleted before it is paused");
    }
}
