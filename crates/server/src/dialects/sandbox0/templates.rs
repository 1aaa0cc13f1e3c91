//! Templates: what sandboxes are made from. Each is a template of ours, or a snapshot that was made for the purpose.

use std::collections::BTreeMap;

use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use engine::snapshot::{Snapshot, SnapshotState, TakeSpec};
use engine::template::{Preparation, Template, TemplateSpec, TemplateUpdate};
use engine::{EngineError, Field, Key, SandboxEnv, TemplateName};
use serde::Deserialize;
use serde_json::{Value, json};
use wire::SnapshotId;

use super::answer::{Answer, done, with};
use super::error::Refusal;
use super::read::Body;
use super::{names, network};
use crate::config::quantity::Bytes;
use crate::dialects::common::amount::bytes_text;
use crate::http::app::{App, Caller};
use crate::http::body::text_in_path;
use crate::http::clock::rfc3339;

/// The template that a claim names.
pub async fn named(app: &App, key: &Key, name: &str) -> Result<TemplateName, Refusal> {
    let unknown = || Refusal::bad(format!("template `{}` does not exist", engine::shown(name)));
    let found = find(app, key, name).await.map_err(|error| match error {
        EngineError::TemplateNotFound { .. } | EngineError::SnapshotNotFound { .. } => unknown(),
        error => error.into(),
    })?;
    match found {
        Found::Template(template) => Ok(TemplateName::parse(&template.name)?),
        Found::Snapshot(snapshot) => match (snapshot.state, snapshot.template) {
            (SnapshotState::Ready, Some(template)) => Ok(TemplateName::parse(&template.name)?),
            _ => {
                let message = format!("template `{}` is not ready yet", engine::shown(name));
                Err(Refusal::new(StatusCode::CONFLICT, "template_not_ready", message))
            }
        },
    }
}

/// What a client calls a template.
enum Found {
    Template(Box<Template>),
    Snapshot(Box<Snapshot>),
}

async fn find(app: &App, key: &Key, name: &str) -> Result<Found, EngineError> {
    match app.engine.template(&key.owner, name) {
        Ok(template) => Ok(Found::Template(Box::new(template))),
        Err(EngineError::TemplateNotFound { .. }) => {
            Ok(Found::Snapshot(Box::new(app.engine.snapshot(&key.owner, name).await?)))
        }
        Err(error) => Err(error),
    }
}

/// The template that a path names, and the key that asks.
pub struct Named {
    key: Key,
    name: String,
}

impl FromRequestParts<App> for Named {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Refusal> {
        let Caller(key) = Caller::from_request_parts(parts, app).await?;
        Ok(Self { key, name: text_in_path(parts, app, "template").await? })
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Resources {
    memory: Option<String>,
    #[serde(rename = "ephemeralStorage")]
    storage: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Variable {
    name: String,
    #[serde(default)]
    value: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Container {
    image: Option<String>,
    resources: Resources,
    env: Option<Vec<Variable>>,
    security_class: Option<String>,
}

/// What a template says.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Spec {
    main_container: Container,
    env_vars: Option<BTreeMap<String, String>>,
    network: Option<Value>,
    ephemeral_mounts: Option<Vec<Value>>,
}

impl Spec {
    fn check(&self) -> Result<(), Refusal> {
        if self.ephemeral_mounts.as_ref().is_some_and(|mounts| !mounts.is_empty()) {
            return Err(Refusal::unsupported("this server mounts no ephemeral storage: write to `/tmp`"));
        }
        if self.main_container.security_class.as_deref().is_some_and(|class| !class.is_empty()) {
            return Err(Refusal::unsupported(
                "this server has one kind of isolation: leave `securityClass` out",
            ));
        }
        Ok(())
    }

    fn env(&self) -> Result<SandboxEnv, EngineError> {
        let listed =
            self.main_container.env.iter().flatten().map(|one| (one.name.clone(), one.value.clone()));
        let mut env: BTreeMap<String, String> = listed.collect();
        env.extend(self.env_vars.clone().unwrap_or_default());
        SandboxEnv::new(env).map_err(|must| must.of(Field::Env))
    }

    fn bytes(field: &str, text: Option<&str>) -> Result<Option<u64>, Refusal> {
        let bytes = text.map(Bytes::parse).transpose();
        Ok(bytes
            .map_err(|error| Refusal::bad(format!("`{field}` is not valid: {error}")))?
            .map(|bytes| bytes.bytes))
    }

    /// For the engine, over what is there already.
    fn over(&self, before: TemplateSpec) -> Result<TemplateSpec, Refusal> {
        self.check()?;
        let resources = &self.main_container.resources;
        Ok(TemplateSpec {
            image: self.main_container.image.clone().unwrap_or(before.image),
            memory_bytes: Self::bytes("resources.memory", resources.memory.as_deref())?
                .unwrap_or(before.memory_bytes),
            disk_bytes: Self::bytes("resources.ephemeralStorage", resources.storage.as_deref())?
                .or(before.disk_bytes),
            env: self.env()?,
            network: self.network.as_ref().map(network::policy).transpose()?,
            ..before
        })
    }
}

/// `POST /templates`
#[derive(Debug, Deserialize)]
pub struct Create {
    template_id: String,
    #[serde(default)]
    spec: Spec,
}

/// Makes a template. Its image comes in the background, if it is not here.
pub async fn create(
    State(app): State<App>,
    Caller(key): Caller,
    Body(body): Body<Create>,
) -> Result<Answer, Refusal> {
    if body.spec.main_container.image.is_none() {
        return Err(Refusal::must("spec.mainContainer.image", "be given"));
    }
    let name = TemplateName::parse(&body.template_id)?;
    let spec = body.spec.over(TemplateSpec::default())?;
    let template = app.engine.create_template(&key.owner, name, spec).await?;
    Ok(with(StatusCode::CREATED, show(&key, &template)))
}

/// `PUT /templates/{template}`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Update {
    spec: Spec,
}

/// Changes a template. Sandboxes keep the version that they were made from.
pub async fn update(
    State(app): State<App>,
    Named { key, name }: Named,
    Body(body): Body<Update>,
) -> Result<Answer, Refusal> {
    let before = app.engine.template(&key.owner, &name)?;
    let spec = body.spec.over(before.spec)?;
    let update = TemplateUpdate {
        image: Some(spec.image),
        memory_bytes: Some(spec.memory_bytes),
        disk_bytes: Some(spec.disk_bytes),
        env: Some(spec.env),
        network: Some(spec.network),
        ..TemplateUpdate::default()
    };
    Ok(done(show(&key, &app.engine.update_template(&key.owner, &name, update).await?)))
}

/// The templates of the key's owner, and the built-in one.
pub async fn list(State(app): State<App>, Caller(key): Caller) -> Result<Answer, Refusal> {
    let all = app.engine.templates(&key.owner);
    let mut shown: Vec<Value> = all
        .iter()
        .filter(|template| !is_of_snapshot(&template.name))
        .map(|template| show(&key, template))
        .collect();
    let captured = app.engine.published_snapshots(&key.owner).await?;
    let mut seen = Vec::new();
    for snapshot in captured.iter().filter(|snapshot| is_template(snapshot)) {
        // The newest of a name is the one that the name means.
        if !seen.contains(&&snapshot.name) {
            seen.push(&snapshot.name);
            shown.push(show_snapshot(&key, snapshot));
        }
    }
    Ok(done(json!({"count": shown.len(), "templates": shown})))
}

/// A template.
pub async fn get(State(app): State<App>, Named { key, name }: Named) -> Result<Answer, Refusal> {
    match find(&app, &key, &name).await {
        Ok(Found::Template(template)) => Ok(done(show(&key, &template))),
        Ok(Found::Snapshot(snapshot)) => Ok(done(show_snapshot(&key, &snapshot))),
        Err(EngineError::SnapshotNotFound { .. }) => Err(EngineError::TemplateNotFound { name }.into()),
        Err(error) => Err(error.into()),
    }
}

/// Deletes a template. Refused while something was made from it.
pub async fn delete(State(app): State<App>, Named { key, name }: Named) -> Result<Answer, Refusal> {
    match find(&app, &key, &name).await {
        Ok(Found::Template(_)) => app.engine.delete_template(&key.owner, &name).await?,
        Ok(Found::Snapshot(snapshot)) => app.engine.delete_snapshot(&key.owner, &snapshot.id).await?,
        Err(EngineError::SnapshotNotFound { .. }) => {
            return Err(EngineError::TemplateNotFound { name }.into());
        }
        Err(error) => return Err(error.into()),
    }
    Ok(done(json!({"message": "the template is deleted"})))
}

/// `POST /templates/from-sandbox`
#[derive(Debug, Deserialize)]
pub struct Capture {
    template_id: String,
    sandbox_id: String,
}

/// How the snapshots that are templates are recognized.
const TEMPLATE_NOTE: &str = "{\"template\":true}";

fn is_template(snapshot: &Snapshot) -> bool {
    snapshot.note == TEMPLATE_NOTE
}

/// Makes a template of a sandbox's files as they are now: a snapshot of that name.
pub async fn capture(
    State(app): State<App>,
    Caller(key): Caller,
    Body(body): Body<Capture>,
) -> Result<Answer, Refusal> {
    let not_found = || EngineError::SandboxNotFound { id: engine::shown(&body.sandbox_id) };
    let sandbox = names::parse_sandbox(&body.sandbox_id).ok_or_else(not_found)?;
    if app.engine.template(&key.owner, &body.template_id).is_ok() {
        return Err(Refusal::conflict(format!(
            "template `{}` exists already",
            engine::shown(&body.template_id)
        )));
    }
    let spec = TakeSpec { name: Some(body.template_id), note: TEMPLATE_NOTE.into(), ..TakeSpec::default() };
    let snapshot = app.engine.take_snapshot(&key, sandbox, spec).await?;
    Ok(with(StatusCode::ACCEPTED, show_snapshot(&key, &snapshot)))
}

/// What belongs to a snapshot is shown as that.
fn is_of_snapshot(name: &str) -> bool {
    name.rsplit_once('@').is_some_and(|(_, id)| id.parse::<SnapshotId>().is_ok())
}

fn spec_view(spec: &TemplateSpec) -> Value {
    let env = spec.env.pairs();
    let mut resources = json!({"memory": bytes_text(spec.memory_bytes)});
    if let Some(disk) = spec.disk_bytes {
        resources["ephemeralStorage"] = bytes_text(disk).into();
    }
    let mut view = json!({
        "mainContainer": {"image": engine::image::familiar(&spec.image), "resources": resources},
        "envVars": env,
    });
    if let Some(policy) = &spec.network {
        view["network"] = network::view(policy);
    }
    view
}

/// What is kept of a template that can be used at once: nothing. The client knows two stages of the others.
fn with_creation(mut view: Value, creation: Option<(&str, &str, Option<&str>)>) -> Value {
    if let Some((state, stage, message)) = creation {
        let mut creation = json!({"state": state, "stage": stage});
        if let Some(message) = message {
            creation["message"] = message.into();
        }
        view["status"] = json!({"creation": creation});
    }
    view
}

/// A template as clients see it.
fn show(key: &Key, template: &Template) -> Value {
    let creation = match &template.preparation {
        Preparation::Ready(_) | Preparation::Replaced => None,
        Preparation::Preparing => Some(("creating", "publishing", None)),
        Preparation::Failed { reason } => Some(("failed", "publishing", Some(reason.as_str()))),
    };
    let view = json!({
        "template_id": template.name,
        "scope": if template.id.is_some() { "team" } else { "public" },
        "team_id": key.owner.as_str(),
        "spec": spec_view(&template.spec),
        "created_at": rfc3339(template.created_at),
        "updated_at": rfc3339(template.updated_at),
    });
    with_creation(view, creation)
}

/// A snapshot that is a template.
fn show_snapshot(key: &Key, snapshot: &Snapshot) -> Value {
    let creation = match &snapshot.state {
        SnapshotState::Ready => None,
        SnapshotState::Building => Some(("creating", "capturing", None)),
        SnapshotState::Failed { reason } => Some(("failed", "capturing", Some(reason.as_str()))),
        SnapshotState::Deleting => Some(("failed", "capturing", Some("it is being deleted"))),
    };
    let spec = snapshot.template.as_ref().map(|template| template.spec.clone()).unwrap_or_default();
    let view = json!({
        "template_id": snapshot.name,
        "scope": "team",
        "team_id": key.owner.as_str(),
        "spec": spec_view(&spec),
        "created_at": rfc3339(snapshot.created_at),
        "updated_at": rfc3339(snapshot.updated_at),
    });
    with_creation(view, creation)
}
