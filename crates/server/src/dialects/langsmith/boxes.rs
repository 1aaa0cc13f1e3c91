//! Boxes, which are sandboxes: create, get, list, update, delete, start, stop.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use engine::snapshot::SnapshotState;
use engine::{
    EngineError, Field, Kept, Key, LabelChanges, Labels, ListQuery, NoteChanges, PauseSpec, Sandbox,
    SandboxEnv, SandboxName, SandboxSpec, SandboxUpdate, Selector, TemplateName, Wait,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tracing::Instrument;
use wire::SnapshotId;

use super::NOTES;
use super::error::Refusal;
use super::json::{
    self, DELETE_AFTER_STOP_SECONDS_DEFAULT, IDLE_SECONDS_DEFAULT, Lengths, Notes, RunConfig, length, listed,
    without_secrets,
};
use super::read::{Body, Meant};
use crate::dialects::common;
use crate::http::app::{App, Caller};
use crate::http::params::Params;

/// How long a create waits where the caller does not say.
const WAIT_SECONDS_DEFAULT: f64 = 30.0;
/// And at most: longer than any image should take to arrive.
const WAIT_SECONDS_MAX: f64 = 3600.0;
/// How long processes may take to end at a stop.
const STOP_GRACE: Duration = Duration::from_secs(5);
/// How long a stop or a start may take before it is answered: less than the ten seconds that clients wait.
const ANSWER_MAX: Duration = Duration::from_secs(8);
/// What the vendor calls what sandboxes are made from when nobody says.
const DEFAULT_SNAPSHOT: &str = "system/default";
/// Thousandths in a processor.
const MILLIS: u64 = 1000;

/// `POST /boxes`. What is absent and what is `null` are the same.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Create {
    name: Option<String>,
    template_name: Option<String>,
    snapshot_id: Option<String>,
    snapshot: Option<String>,
    snapshot_name: Option<String>,
    wait_for_ready: Option<bool>,
    timeout: Option<f64>,
    idle_ttl_seconds: Option<i64>,
    delete_after_stop_seconds: Option<i64>,
    ttl_seconds: Option<i64>,
    vcpus: Option<f64>,
    cpu_millicores: Option<u32>,
    mem_bytes: Option<u64>,
    fs_capacity_bytes: Option<u64>,
    persistent: Option<bool>,
    preserve_memory_on_stop: Option<bool>,
    run_config: Option<RunConfig>,
    env_vars: Option<BTreeMap<String, String>>,
    labels: Option<BTreeMap<String, String>>,
    mount_config: Option<Value>,
    mounts: Option<Value>,
    proxy_config: Option<Value>,
    access_delegation: Option<Value>,
    volumes: Option<Vec<Value>>,
    restore_memory: Option<bool>,
}

/// Makes a sandbox. Waits until it is ready where the caller asks for that, at most as long as it says.
pub async fn create(
    State(app): State<App>,
    Caller(key): Caller,
    headers: HeaderMap,
    Body(body): Body<Create>,
) -> Result<Response, Refusal> {
    // Clients that say nothing either know templates and expect it to be ready, or ask for its status by themselves.
    let waits = body.wait_for_ready.unwrap_or(body.template_name.is_some());
    let wait = if waits { Wait::Ready } else { Wait::No };
    let patience = patience(body.timeout)?;
    let spec = spec(&app, &key, body).await?;
    let making = {
        let (app, key) = (app.clone(), key.clone());
        async move { app.engine.create(&key, spec, wait).await }
    };
    // A task of its own, so that what was begun is finished when the caller leaves.
    let mut making = tokio::spawn(making.in_current_span());
    let made = match tokio::time::timeout(patience, &mut making).await {
        Ok(made) => made
            .map_err(|_| Refusal::bug())?
            .map_err(|error| Refusal::from(error).renamed("memory", "mem_bytes").renamed("cpu", "vcpus"))?,
        Err(_) => {
            // The caller gets an error and no id, so nobody could delete the sandbox later.
            tokio::spawn(
                async move {
                    if let Ok(Ok(sandbox)) = making.await
                        && let Err(error) = app.engine.delete(&key.owner, sandbox.id).await
                    {
                        tracing::warn!(sandbox = %sandbox.id, %error, "cannot delete a sandbox that came too late");
                    }
                }
                .in_current_span(),
            );
            let message = format!(
                "the sandbox was not ready within {} s (last status: provisioning)",
                patience.as_secs()
            );
            return Err(Refusal::new(StatusCode::REQUEST_TIMEOUT, "Timeout", message));
        }
    };
    tracing::Span::current().record("sandbox", tracing::field::display(made.id));
    Ok((StatusCode::CREATED, Json(show(&app, &key, &made, &headers))).into_response())
}

fn patience(seconds: Option<f64>) -> Result<Duration, Refusal> {
    let seconds = seconds.unwrap_or(WAIT_SECONDS_DEFAULT);
    if seconds.is_nan() || seconds <= 0.0 {
        return Err(Refusal::invalid("timeout", "it is a number of seconds above zero"));
    }
    Ok(Duration::from_secs_f64(seconds.min(WAIT_SECONDS_MAX)))
}

/// A sandbox as clients see it.
fn show(app: &App, key: &Key, sandbox: &Sandbox, headers: &HeaderMap) -> Value {
    // The template of a snapshot has the snapshot's id in its name; one that was made otherwise is its own snapshot.
    let snapshot = match sandbox.template.rsplit_once('@') {
        Some((_, id)) if id.parse::<SnapshotId>().is_ok() => Some(id.to_owned()),
        _ => {
            let template = app.engine.template(&key.owner, &sandbox.template).ok();
            template.and_then(|template| template.id).map(|id| id.to_string())
        }
    };
    json::sandbox(sandbox, snapshot, &app.origin(headers))
}

async fn spec(app: &App, key: &Key, body: Create) -> Result<SandboxSpec, Refusal> {
    let Create {
        name,
        template_name,
        snapshot_id,
        snapshot,
        snapshot_name,
        wait_for_ready: _,
        timeout: _,
        idle_ttl_seconds,
        delete_after_stop_seconds,
        ttl_seconds,
        vcpus,
        cpu_millicores,
        mem_bytes,
        fs_capacity_bytes,
        persistent,
        preserve_memory_on_stop,
        run_config,
        env_vars,
        labels,
        mount_config,
        mounts,
        proxy_config,
        access_delegation,
        volumes,
        restore_memory,
    } = body;
    for (field, given) in [("mount_config", mount_config), ("mounts", mounts)] {
        check_no_mounts(field, given.as_ref())?;
    }
    if volumes.is_some_and(|volumes| !volumes.is_empty()) {
        return Err(Refusal::invalid("volumes", "this server mounts volumes through templates only"));
    }
    if restore_memory == Some(true) {
        return Err(Refusal::invalid("restore_memory", "this server keeps no memory of sandboxes"));
    }
    let run_config = run_config.unwrap_or_default();
    run_config.check()?;
    let lengths = Lengths {
        idle: length("idle_ttl_seconds", idle_ttl_seconds)?.unwrap_or(IDLE_SECONDS_DEFAULT),
        delete_after_stop: length("delete_after_stop_seconds", delete_after_stop_seconds)?
            .unwrap_or(DELETE_AFTER_STOP_SECONDS_DEFAULT),
        ttl: length("ttl_seconds", ttl_seconds)?.unwrap_or(0),
    };
    let from_template = template_name.is_some();
    let given = [template_name.clone(), snapshot_id, snapshot, snapshot_name];
    if given.iter().flatten().count() > 1 {
        let why = "give one of `template_name`, `snapshot_id`, `snapshot` and `snapshot_name`";
        return Err(Refusal::invalid("snapshot", why));
    }
    let template = match (template_name, given.into_iter().flatten().next()) {
        (Some(template), _) => template,
        (None, Some(reference)) => named_snapshot(app, key, &reference).await?,
        (None, None) => engine::template::DEFAULT.into(),
    };
    // What cannot be a name is the name of nothing.
    let template =
        TemplateName::parse(&template).map_err(|_| EngineError::TemplateNotFound { name: template })?;
    let notes = Notes {
        from_template,
        run_config,
        proxy_config: proxy_config.map(without_secrets),
        access_delegation,
        persistent,
        preserve_memory_on_stop,
        fs_capacity_bytes,
    };
    let mut env = notes.run_config.env_vars.clone().unwrap_or_default();
    env.extend(env_vars.unwrap_or_default());
    Ok(SandboxSpec {
        name: name.as_deref().map(SandboxName::of_dialect).transpose()?,
        template,
        env: SandboxEnv::new(env).map_err(|must| must.of(Field::Env))?,
        cpu_millis: cpu(vcpus, cpu_millicores)?,
        memory_bytes: mem_bytes,
        labels: Labels::new(labels.unwrap_or_default())?,
        lifetime: lengths.rules(&engine::Lifetime::default())?,
        network_default: common::network::names(),
        notes: engine::Notes::one(NOTES, notes.text())?,
        ..SandboxSpec::default()
    })
}

/// The template that a snapshot is.
async fn named_snapshot(app: &App, key: &Key, reference: &str) -> Result<String, Refusal> {
    if reference == DEFAULT_SNAPSHOT
        || reference.split_once(':').is_some_and(|(name, _)| name == DEFAULT_SNAPSHOT)
    {
        return Ok(engine::template::DEFAULT.into());
    }
    let snapshot = app.engine.snapshot(&key.owner, reference).await?;
    match (snapshot.state, snapshot.template) {
        (SnapshotState::Failed { reason }, _) => {
            let message = format!("snapshot `{reference}` could not be made: {reason}");
            Err(Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, "ImagePull", message))
        }
        (_, Some(template)) => Ok(template.name),
        (_, None) => {
            let message = format!("snapshot `{reference}` is not ready yet");
            Err(Refusal::new(StatusCode::CONFLICT, "NotReady", message))
        }
    }
}

fn cpu(vcpus: Option<f64>, millicores: Option<u32>) -> Result<Option<u32>, Refusal> {
    match (millicores, vcpus) {
        (Some(millicores), _) => Ok(Some(millicores)),
        (None, Some(vcpus)) if vcpus > 0.0 && vcpus <= 4096.0 => Ok(Some((vcpus * MILLIS as f64) as u32)),
        (None, Some(_)) => Err(Refusal::invalid("vcpus", "it is a number above zero, and at most 4096")),
        (None, None) => Ok(None),
    }
}

/// A mount that is not made would be a promise about data that is not kept, so it is refused.
fn check_no_mounts(field: &str, config: Option<&Value>) -> Result<(), Refusal> {
    let mounts = match config {
        Some(Value::Object(config)) => config.get("mounts"),
        other => other,
    };
    match mounts {
        None | Some(Value::Null) => Ok(()),
        Some(Value::Array(mounts)) if mounts.is_empty() => Ok(()),
        Some(_) => Err(Refusal::invalid(field, "this server has no mounts of buckets and repositories")),
    }
}

/// What to list.
struct Wanted {
    limit: Option<u32>,
    cursor: Option<String>,
    offset: u64,
    name_contains: Option<String>,
    status: Vec<String>,
    selectors: Vec<Selector>,
}

impl Wanted {
    fn read(mut params: Params) -> Result<Self, Refusal> {
        let page = params.number("page_size", 1..=u64::MAX)?;
        let limit = params.number("limit", 1..=u64::MAX)?.or(page);
        let texts = |values: Vec<Vec<u8>>| -> Vec<String> {
            values.into_iter().map(|value| String::from_utf8_lossy(&value).into_owned()).collect()
        };
        let labels = texts(params.all("label"));
        Ok(Self {
            limit: limit.map(|limit| u32::try_from(limit).unwrap_or(u32::MAX).min(engine::PAGE_MAX)),
            cursor: params.text("cursor")?.filter(|cursor| !cursor.is_empty()),
            offset: params.number("offset", 0..=u64::MAX)?.unwrap_or(0),
            name_contains: params.text("name_contains")?.map(|text| text.to_lowercase()),
            status: texts(params.all("status")),
            selectors: labels.iter().map(|text| Selector::parse(text)).collect::<Result<_, _>>()?,
        })
    }

    fn wants(&self, sandbox: &Sandbox) -> bool {
        let named = self
            .name_contains
            .as_ref()
            .is_none_or(|part| sandbox.name.as_str().to_lowercase().contains(part));
        let status = json::status(sandbox, &Notes::of(sandbox));
        named && (self.status.is_empty() || self.status.iter().any(|wanted| wanted == status))
    }
}

/// The sandboxes of the key's owner, newest first. Clients that do not ask for a page never ask for a second one, so they get all.
pub async fn list(
    State(app): State<App>,
    Caller(key): Caller,
    headers: HeaderMap,
    params: Params,
) -> Result<Json<Value>, Refusal> {
    let wanted = Wanted::read(params)?;
    let mut found = Vec::new();
    let mut cursor = wanted.cursor.clone();
    let mut skip = wanted.offset;
    let limit = wanted.limit.map_or(usize::MAX, |limit| limit as usize);
    let next_cursor = 'pages: loop {
        // A page of one is what a cursor can begin behind, wherever the filter has stopped.
        let paged = wanted.limit.is_some();
        let query = ListQuery {
            limit: Some(if paged { 1 } else { engine::PAGE_MAX }),
            cursor,
            name: None,
            selectors: wanted.selectors.clone(),
        };
        let page = app.engine.list(&key.owner, query).await?;
        for sandbox in page.items.iter().filter(|sandbox| wanted.wants(sandbox)) {
            match skip {
                0 => found.push(show(&app, &key, sandbox, &headers)),
                _ => skip -= 1,
            }
        }
        match page.next_cursor {
            None => break 'pages None,
            Some(next) if found.len() >= limit => break 'pages Some(next),
            Some(next) => cursor = Some(next),
        }
    };
    Ok(Json(listed("sandboxes", found, next_cursor, wanted.offset)))
}

/// A sandbox.
pub async fn get(State(app): State<App>, headers: HeaderMap, meant: Meant) -> Json<Value> {
    Json(show(&app, &meant.key, &meant.sandbox, &headers))
}

/// How far a sandbox is.
pub async fn status(meant: Meant) -> Json<Value> {
    let notes = Notes::of(&meant.sandbox);
    Json(json!({"status": json::status(&meant.sandbox, &notes), "status_message": meant.sandbox.reason}))
}

/// `PATCH /boxes/{sandbox}`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Update {
    name: Option<String>,
    idle_ttl_seconds: Option<i64>,
    delete_after_stop_seconds: Option<i64>,
    ttl_seconds: Option<i64>,
    proxy_config: Option<Value>,
    run_config: Option<RunConfig>,
    access_delegation: Option<Value>,
    vcpus: Option<f64>,
    cpu_millicores: Option<u32>,
    mem_bytes: Option<u64>,
    fs_capacity_bytes: Option<u64>,
    labels: Option<BTreeMap<String, Option<String>>>,
}

/// Changes a sandbox.
pub async fn update(
    State(app): State<App>,
    headers: HeaderMap,
    Meant { key, sandbox }: Meant,
    Body(body): Body<Update>,
) -> Result<Json<Value>, Refusal> {
    let limits = &sandbox.limits;
    let resized = cpu(body.vcpus, body.cpu_millicores)?.is_some_and(|millis| millis != limits.cpu_millis)
        || body.mem_bytes.is_some_and(|bytes| bytes != limits.memory_bytes);
    if resized {
        return Err(Refusal::invalid("vcpus", "this server does not resize a sandbox that exists"));
    }
    let mut lengths = Lengths::of(&sandbox.lifetime);
    lengths.idle = length("idle_ttl_seconds", body.idle_ttl_seconds)?.unwrap_or(lengths.idle);
    lengths.delete_after_stop = length("delete_after_stop_seconds", body.delete_after_stop_seconds)?
        .unwrap_or(lengths.delete_after_stop);
    lengths.ttl = length("ttl_seconds", body.ttl_seconds)?.unwrap_or(lengths.ttl);
    let lifetime =
        (lengths != Lengths::of(&sandbox.lifetime)).then(|| lengths.rules(&sandbox.lifetime)).transpose()?;
    let before = Notes::of(&sandbox);
    let mut notes = before.clone();
    if let Some(above) = body.run_config {
        above.check()?;
        notes.run_config = notes.run_config.under(above);
    }
    if let Some(proxy_config) = body.proxy_config {
        notes.proxy_config = Some(without_secrets(proxy_config));
    }
    notes.access_delegation = body.access_delegation.or(notes.access_delegation);
    notes.fs_capacity_bytes = body.fs_capacity_bytes.or(notes.fs_capacity_bytes);
    let update = SandboxUpdate {
        history: None,
        hooks: None,
        name: body
            .name
            .as_deref()
            .filter(|name| *name != sandbox.name.as_str())
            .map(SandboxName::of_dialect)
            .transpose()?,
        labels: LabelChanges::new(body.labels.unwrap_or_default())?,
        notes: if notes == before { NoteChanges::default() } else { NoteChanges::set(NOTES, notes.text()) },
        lifetime,
        network: None,
    };
    let sandbox = app.engine.update(&key.owner, sandbox.id, update).await?;
    Ok(Json(show(&app, &key, &sandbox, &headers)))
}

/// Deletes a sandbox with all that is in it.
pub async fn delete(State(app): State<App>, Meant { key, sandbox }: Meant) -> Result<StatusCode, Refusal> {
    app.engine.delete(&key.owner, sandbox.id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Has a stopped sandbox run again, or one that has failed. One that runs stays as it is. Clients wait ten seconds for the answer, and
/// then ask for its status.
pub async fn start(
    State(app): State<App>,
    headers: HeaderMap,
    Meant { key, sandbox }: Meant,
) -> Result<Response, Refusal> {
    let sandbox = match sandbox.state {
        engine::State::Creating => sandbox,
        _ => {
            let (app, key) = (app.clone(), key.clone());
            promptly(async move { app.engine.resume(&key, sandbox.id).await }, sandbox).await?
        }
    };
    Ok((StatusCode::ACCEPTED, Json(show(&app, &key, &sandbox, &headers))).into_response())
}

/// Stops a sandbox and keeps its files; its memory too where that was asked for when it was made.
pub async fn stop(
    State(app): State<App>,
    headers: HeaderMap,
    Meant { key, sandbox }: Meant,
) -> Result<Json<Value>, Refusal> {
    let kept = match Notes::of(&sandbox).preserve_memory_on_stop {
        Some(true) => Kept::Frozen,
        Some(false) | None => Kept::Dropped,
    };
    let spec = PauseSpec { kept, grace: STOP_GRACE };
    let sandbox = {
        let (app, owner) = (app.clone(), key.owner.clone());
        promptly(async move { app.engine.pause(&owner, sandbox.id, spec).await }, sandbox).await?
    };
    Ok(Json(show(&app, &key, &sandbox, &headers)))
}

/// Waits for `work` for as long as clients wait for an answer, and lets it go on after that. `sandbox` is the answer then.
async fn promptly(
    work: impl Future<Output = Result<Sandbox, EngineError>> + Send + 'static,
    sandbox: Sandbox,
) -> Result<Sandbox, Refusal> {
    let working = tokio::spawn(work.in_current_span());
    match tokio::time::timeout(ANSWER_MAX, working).await {
        Ok(Ok(done)) => Ok(done?),
        Ok(Err(_)) => Err(Refusal::bug()),
        Err(_) => Ok(sandbox),
    }
}
