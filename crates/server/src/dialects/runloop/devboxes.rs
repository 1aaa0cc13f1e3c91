//! Devboxes, which are sandboxes: create, wait, get, list, update, suspend, resume, shut down.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use engine::{
    CommandSpec, CommandState, EngineError, Field, GuestUser, IdempotencyKey, Key, LabelChanges, Labels,
    ListQuery, NoteChanges, Outcome, Sandbox, SandboxEnv, SandboxName, SandboxSpec, SandboxUpdate,
    TemplateName, Wait,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;
use wire::files::{Condition, WriteOptions};

use super::error::Refusal;
use super::executions::login_script;
use super::files::Place;
use super::json::{self, AfterIdle, KEEP_ALIVE_SECONDS_DEFAULT, Notes, SHUTDOWN};
use super::read::{Body, Found, Target, request_id};
use super::{NOTES, blueprints, ids};
use crate::dialects::common::{self, pause};
use crate::http::app::{App, Caller};
use crate::http::params::Params;

/// The longest that a wait holds its answer: shorter than the client reads.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// Entries on a page, if the caller does not say.
const PAGE_DEFAULT: u64 = 20;
/// The last characters of a command that failed, for the message.
const SAID_MAX: usize = 2000;
const GIB: u64 = 1 << 30;
const MILLIS: f64 = 1000.0;

/// `POST /v1/devboxes`. What is absent and what is `null` are the same.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Create {
    name: Option<String>,
    metadata: Option<BTreeMap<String, String>>,
    blueprint_id: Option<String>,
    blueprint_name: Option<String>,
    snapshot_id: Option<String>,
    environment_variables: Option<BTreeMap<String, String>>,
    secrets: Option<BTreeMap<String, Value>>,
    entrypoint: Option<String>,
    file_mounts: Option<BTreeMap<String, String>>,
    code_mounts: Option<Vec<Value>>,
    mounts: Option<Vec<Mount>>,
    launch_parameters: Option<Value>,
    tunnel: Option<Value>,
    gateways: Option<BTreeMap<String, Value>>,
    mcp: Option<BTreeMap<String, Value>>,
}

/// One of `mounts`.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Mount {
    FileMount {
        target: String,
        content: String,
    },
    #[serde(other)]
    Other,
}

/// What is understood of `launch_parameters`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Launch {
    resource_size_request: Option<String>,
    custom_cpu_cores: Option<f64>,
    custom_gb_memory: Option<f64>,
    custom_disk_size: Option<f64>,
    keep_alive_time_seconds: Option<u64>,
    after_idle: Option<AfterIdle>,
    lifecycle: Option<Lifecycle>,
    launch_commands: Option<Vec<String>>,
    user_parameters: Option<User>,
    network_policy_id: Option<String>,
    required_services: Option<Vec<Value>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Lifecycle {
    after_idle: Option<AfterIdle>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct User {
    username: Option<String>,
    uid: Option<u32>,
}

impl Launch {
    /// Processors in thousandths, memory and disk in GiB, by the vendor's words for sizes.
    fn size(&self) -> Result<Option<(u32, u64, u64)>, Refusal> {
        let Some(word) = &self.resource_size_request else { return Ok(None) };
        Ok(Some(match word.as_str() {
            "X_SMALL" => (500, 1, 4),
            "SMALL" => (1000, 2, 4),
            "MEDIUM" => (2000, 4, 8),
            "LARGE" => (2000, 8, 16),
            "X_LARGE" => (4000, 16, 16),
            "XX_LARGE" => (8000, 32, 16),
            "CUSTOM_SIZE" => {
                let amount = |field: &str, given: Option<f64>| match given {
                    Some(given) if given > 0.0 && given <= 4096.0 => Ok(given),
                    _ => Err(Refusal::must(field, "be above 0 and at most 4096 for a CUSTOM_SIZE")),
                };
                let disk =
                    self.custom_disk_size.map(|disk| amount("custom_disk_size", Some(disk))).transpose()?;
                let cpu = amount("custom_cpu_cores", self.custom_cpu_cores)? * MILLIS;
                let memory = amount("custom_gb_memory", self.custom_gb_memory)?;
                (cpu as u32, memory.ceil() as u64, disk.map_or(0, |disk| disk.ceil() as u64))
            }
            other => {
                let rule = format!(
                    "be X_SMALL, SMALL, MEDIUM, LARGE, X_LARGE, XX_LARGE or CUSTOM_SIZE, got `{other}`"
                );
                return Err(Refusal::must("launch_parameters.resource_size_request", rule));
            }
        }))
    }
}

/// What is done in a new devbox before its creator gets it.
#[derive(Debug, Default)]
struct Errands {
    files: Vec<(String, String)>,
    commands: Vec<String>,
}

/// Makes a devbox, and answers when it runs.
pub async fn create(
    State(app): State<App>,
    Caller(key): Caller,
    headers: HeaderMap,
    Body(body): Body<Create>,
) -> Result<Json<Value>, Refusal> {
    let (mut spec, errands) = spec(&app, &key, body, &headers).await?;
    let made = match app.engine.create(&key, spec.clone(), Wait::Ready).await {
        // Names need not be unique here. The second time round, the same key finds what was made without the name.
        Err(EngineError::NameTaken { .. } | EngineError::IdempotencyKeyReused) if spec.name.is_some() => {
            spec.name = None;
            app.engine.create(&key, spec, Wait::Ready).await
        }
        made => made,
    };
    let sandbox = made?;
    tracing::Span::current().record("sandbox", tracing::field::display(sandbox.id));
    if let Err(refusal) = errands.run(&app, &key, &sandbox).await {
        // The caller gets an error and no id, so nobody could delete the sandbox later.
        if let Err(error) = app.engine.delete(&key.owner, sandbox.id).await {
            tracing::warn!(%error, "cannot delete a devbox whose commands failed");
        }
        return Err(refusal);
    }
    Ok(Json(json::devbox(&app.engine, &sandbox)))
}

impl Errands {
    async fn run(self, app: &App, key: &Key, sandbox: &Sandbox) -> Result<(), Refusal> {
        let target = Target { key: key.clone(), sandbox: sandbox.clone() };
        if !self.files.is_empty() {
            let place = Place::of(app, &target)?;
            for (path, contents) in self.files {
                let options = WriteOptions {
                    path: place.path(&path).await?,
                    mode: None,
                    parents: true,
                    size: None,
                    condition: Condition::None,
                };
                let mut output = place.files.write(options).await?;
                if !contents.is_empty() {
                    output.write(contents.into()).await?;
                }
                output.finish().await?;
            }
        }
        for text in self.commands {
            let spec = CommandSpec { user: user_of(sandbox)?, ..CommandSpec::new(login_script(&text)?) };
            let command = app.engine.run(&key.owner, sandbox.id, spec).await?;
            let ended = command.ended().await;
            if !matches!(ended.state, CommandState::Ended { outcome: Outcome::Exited(0), .. }) {
                let output = command.output(SAID_MAX).await?;
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                let message = format!("the launch command `{}` failed: {said}", engine::shown(&text));
                return Err(Refusal::new(StatusCode::BAD_REQUEST, "launch_command_failed", message));
            }
        }
        Ok(())
    }
}

async fn spec(
    app: &App,
    key: &Key,
    body: Create,
    headers: &HeaderMap,
) -> Result<(SandboxSpec, Errands), Refusal> {
    let launch: Launch = match &body.launch_parameters {
        None | Some(Value::Null) => Launch::default(),
        Some(given) => serde_json::from_value(given.clone())
            .map_err(|error| Refusal::must("launch_parameters", format!("be valid: {error}")))?,
    };
    let many = |map: &Option<BTreeMap<String, Value>>| map.as_ref().is_some_and(|map| !map.is_empty());
    let mounts = body.mounts.unwrap_or_default();
    for (field, given) in [
        ("snapshot_id", body.snapshot_id.is_some()),
        ("secrets", many(&body.secrets)),
        ("entrypoint", body.entrypoint.as_ref().is_some_and(|text| !text.is_empty())),
        ("code_mounts", body.code_mounts.is_some_and(|mounts| !mounts.is_empty())),
        ("mounts", mounts.iter().any(|mount| matches!(mount, Mount::Other))),
        ("tunnel", body.tunnel.is_some_and(|tunnel| !tunnel.is_null())),
        ("gateways", many(&body.gateways)),
        ("mcp", many(&body.mcp)),
        ("launch_parameters.network_policy_id", launch.network_policy_id.is_some()),
        (
            "launch_parameters.required_services",
            launch.required_services.as_ref().is_some_and(|services| !services.is_empty()),
        ),
    ] {
        if given {
            return Err(Refusal::unsupported(format!("this server does not support `{field}`")));
        }
    }
    let template = match (&body.blueprint_id, &body.blueprint_name) {
        (Some(_), Some(_)) => {
            return Err(Refusal::must("blueprint_id", "be left out if there is `blueprint_name`"));
        }
        (Some(id), None) => blueprints::template_of(app, key, id)?,
        (None, Some(name)) => blueprints::template_named(app, key, name)?,
        (None, None) => TemplateName::built_in(),
    };
    let user = launch.user_parameters.as_ref().and_then(|user| match (&user.username, user.uid) {
        (_, Some(uid)) => Some(uid.to_string()),
        (username, None) => username.clone(),
    });
    if let Some(user) = &user {
        GuestUser::parse(user.clone()).map_err(|must| must.of(Field::User))?;
    }
    let idle = launch.after_idle.or(launch.lifecycle.as_ref().and_then(|lifecycle| lifecycle.after_idle));
    let keep_alive = launch.keep_alive_time_seconds.unwrap_or(KEEP_ALIVE_SECONDS_DEFAULT);
    let size = launch.size()?;
    let notes = Notes {
        name: body.name.clone(),
        user,
        blueprint_id: body.blueprint_id,
        launch_parameters: body.launch_parameters.filter(|given| !given.is_null()),
    };
    let files = body.file_mounts.unwrap_or_default().into_iter();
    let mounted = mounts.into_iter().filter_map(|mount| match mount {
        Mount::FileMount { target, content } => Some((target, content)),
        Mount::Other => None,
    });
    let errands = Errands {
        files: files.chain(mounted).collect(),
        commands: launch.launch_commands.unwrap_or_default(),
    };
    let spec = SandboxSpec {
        // A name that cannot be one here is still the devbox's.
        name: body.name.and_then(|name| SandboxName::parse(&name).ok()),
        template,
        env: SandboxEnv::new(body.environment_variables.unwrap_or_default())
            .map_err(|must| must.of(Field::Env))?,
        cpu_millis: size.map(|(cpu, ..)| cpu),
        memory_bytes: size.map(|(_, memory, _)| memory * GIB),
        // Sizes come with disks that nobody asked for, so only one that was asked for is required.
        disk_bytes: size.and_then(|(.., disk)| launch.custom_disk_size.map(|_| disk * GIB)),
        labels: Labels::new(body.metadata.unwrap_or_default())?,
        lifetime: json::rules(keep_alive, idle)?,
        network_default: common::network::open(),
        notes: engine::Notes::one(NOTES, notes.text())?,
        idempotency_key: request_id(headers).and_then(|id| IdempotencyKey::parse(id).ok()),
        ..SandboxSpec::default()
    };
    Ok((spec, errands))
}

/// The user that executions and file operations of a devbox run as.
pub fn user_of(sandbox: &Sandbox) -> Result<Option<GuestUser>, EngineError> {
    let user = Notes::of(sandbox).user.map(GuestUser::parse).transpose();
    user.map_err(|must| must.of(Field::User))
}

fn show(app: &App, found: &Found) -> Value {
    match found {
        Found::Here(_, sandbox) => json::devbox(&app.engine, sandbox),
        Found::Gone(key, id) => json::gone(&ids::devbox(&app.engine, &key.owner, *id)),
    }
}

/// A devbox.
pub async fn get(State(app): State<App>, found: Found) -> Json<Value> {
    Json(show(&app, &found))
}

/// `POST /v1/devboxes/{devbox}/wait_for_status`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Statuses {
    /// Any of these.
    pub statuses: Vec<String>,
    /// How long.
    pub timeout_seconds: Option<f64>,
}

impl Statuses {
    /// When to give up.
    pub fn deadline(&self, most: Duration) -> Instant {
        let given = self.timeout_seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        Instant::now() + given.unwrap_or(most).min(most)
    }
}

/// Answers when the devbox has one of the statuses.
pub async fn wait(
    State(app): State<App>,
    found: Found,
    Body(body): Body<Statuses>,
) -> Result<Json<Value>, Refusal> {
    let deadline = body.deadline(WAIT_MAX);
    let wanted = |status: &str| body.statuses.iter().any(|wanted| wanted == status);
    let (key, id) = match &found {
        Found::Gone(..) => {
            // What is gone stays gone, so there is nothing to wait for.
            return Ok(Json(show(&app, &found)));
        }
        Found::Here(key, sandbox) => (key.clone(), sandbox.id),
    };
    let mut stopping = app.stopping(&key);
    let mut watcher = app.engine.watch(&key.owner, Some(id), None)?;
    loop {
        let sandbox = match app.engine.get(&key.owner, id).await {
            Err(EngineError::SandboxNotFound { .. }) => {
                return Ok(Json(json::gone(&ids::devbox(&app.engine, &key.owner, id))));
            }
            sandbox => sandbox?,
        };
        if wanted(json::status(sandbox.state)) {
            return Ok(Json(json::devbox(&app.engine, &sandbox)));
        }
        tokio::select! {
            _ = watcher.next() => {}
            () = tokio::time::sleep_until(deadline) => {
                let message = format!("the devbox is {}", json::status(sandbox.state));
                return Err(Refusal::not_yet(message));
            }
            _ = stopping.wait() => return Err(EngineError::Stopping.into()),
        }
    }
}

/// `GET /v1/devboxes`: newest first, a page behind the last id of the page before.
pub async fn list(
    State(app): State<App>,
    Caller(key): Caller,
    mut params: Params,
) -> Result<Json<Value>, Refusal> {
    let limit = params.number("limit", 1..=u64::MAX)?.unwrap_or(PAGE_DEFAULT);
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let after = params.text("starting_after")?.filter(|id| !id.is_empty());
    let status = params.text("status")?.filter(|status| !status.is_empty());
    let after = match after {
        None => None,
        Some(text) => {
            let read = ids::read_devbox(&app.engine, &key.owner, &text);
            let (ids::Devbox::Given(id) | ids::Devbox::Perhaps(id)) =
                read.ok_or_else(|| Refusal::must("starting_after", "be the id of a devbox"))?;
            Some(id)
        }
    };
    let (mut all, mut cursor) = (Vec::new(), None);
    loop {
        let query = ListQuery { limit: Some(engine::PAGE_MAX), cursor, name: None, selectors: Vec::new() };
        let page = app.engine.list(&key.owner, query).await?;
        all.extend(page.items);
        match page.next_cursor {
            None => break,
            next => cursor = next,
        }
    }
    all.retain(|sandbox| status.as_ref().is_none_or(|status| status == json::status(sandbox.state)));
    let total = all.len();
    let first =
        after.map_or(0, |id| all.iter().position(|sandbox| sandbox.id == id).map_or(total, |at| at + 1));
    let has_more = total - first > limit;
    let page = all[first..].iter().take(limit).map(|sandbox| json::devbox(&app.engine, sandbox));
    Ok(Json(json!({"devboxes": page.collect::<Vec<_>>(), "has_more": has_more, "total_count": total})))
}

/// `POST /v1/devboxes/{devbox}`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Update {
    name: Option<String>,
    metadata: Option<BTreeMap<String, String>>,
}

/// Changes the name and the metadata of a devbox.
pub async fn update(
    State(app): State<App>,
    Target { key, sandbox }: Target,
    Body(body): Body<Update>,
) -> Result<Json<Value>, Refusal> {
    let mut update = SandboxUpdate::default();
    if let Some(metadata) = body.metadata {
        let old = sandbox.labels.pairs().keys().map(|key| (key.clone(), None));
        let mut changes: BTreeMap<String, Option<String>> = old.collect();
        changes.extend(metadata.into_iter().map(|(key, value)| (key, Some(value))));
        update.labels = LabelChanges::new(changes)?;
    }
    if let Some(name) = body.name {
        let notes = Notes { name: Some(name), ..Notes::of(&sandbox) };
        update.notes = NoteChanges::set(NOTES, notes.text());
    }
    let sandbox = app.engine.update(&key.owner, sandbox.id, update).await?;
    Ok(Json(json::devbox(&app.engine, &sandbox)))
}

/// Deletes a devbox with all that is in it. Once more does no harm.
pub async fn shutdown(State(app): State<App>, found: Found) -> Result<Json<Value>, Refusal> {
    let mut body = show(&app, &found);
    if let Found::Here(key, sandbox) = found {
        match app.engine.delete(&key.owner, sandbox.id).await {
            Ok(()) | Err(EngineError::SandboxNotFound { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        body["shutdown_reason"] = "api_shutdown".into();
        body["end_time_ms"] = json::milliseconds(std::time::SystemTime::now()).into();
    }
    body["status"] = SHUTDOWN.into();
    Ok(Json(body))
}

/// Stops a devbox and keeps its files.
pub async fn suspend(
    State(app): State<App>,
    Target { key, sandbox }: Target,
) -> Result<Json<Value>, Refusal> {
    let sandbox = pause::stop(&app, &key, &sandbox).await?;
    Ok(Json(json::devbox(&app.engine, &sandbox)))
}

/// Lets a suspended devbox run again.
pub async fn resume(State(app): State<App>, Target { key, sandbox }: Target) -> Result<Json<Value>, Refusal> {
    let sandbox = pause::start(&app, &key, &sandbox).await?;
    Ok(Json(json::devbox(&app.engine, &sandbox)))
}

/// Lets a devbox live as long as if it had just been started.
pub async fn keep_alive(
    State(app): State<App>,
    Target { key, sandbox }: Target,
) -> Result<Json<Value>, Refusal> {
    app.engine.touch(&key.owner, sandbox.id).await?;
    Ok(Json(json!({})))
}
