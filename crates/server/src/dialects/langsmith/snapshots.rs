//! Snapshots, as clients from 0.7.32 on have them: published under a name and tags, made of an image or captured from a sandbox.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use engine::snapshot::{LATEST, Snapshot, SnapshotSpec, SnapshotState};
use engine::template::{Preparation, TemplateSpec};
use engine::{EngineError, Field, Labels, Sandbox, SandboxEnv};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::error::Refusal;
use super::json::{Notes, RunConfig, listed, times};
use super::read::{Body, Meant, Named};
use crate::http::app::{App, Caller};
use crate::http::params::Params;

/// On a page, if the caller does not say, and at most.
const PAGE_DEFAULT: u64 = 50;
const PAGE_MAX: u64 = 500;
/// Names that are the vendor's own.
const RESERVED: &str = "system/";

/// What is kept of a snapshot beside what the engine knows.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
struct Note {
    fs_capacity_bytes: u64,
    #[serde(skip_serializing_if = "RunConfig::is_empty")]
    run_config: RunConfig,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    labels: BTreeMap<String, String>,
}

/// `POST /snapshots` and `POST /boxes/{sandbox}/snapshot`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Create {
    name: Option<String>,
    docker_image: Option<String>,
    fs_capacity_bytes: Option<u64>,
    tag: Option<String>,
    run_config: Option<RunConfig>,
    description: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    registry_id: Option<String>,
    registry_url: Option<String>,
    include_memory: Option<bool>,
    checkpoint: Option<String>,
}

impl Create {
    fn name(&self) -> Result<String, Refusal> {
        let name = self.name.clone().ok_or_else(|| Refusal::invalid("name", "it is missing"))?;
        if name.starts_with(RESERVED) {
            return Err(Refusal::invalid("name", "names below `system/` are reserved"));
        }
        Ok(name)
    }

    fn note(&self, run_config: &RunConfig) -> Result<String, Refusal> {
        run_config.check()?;
        let note = Note {
            fs_capacity_bytes: self.fs_capacity_bytes.unwrap_or(0),
            run_config: run_config.clone(),
            description: self.description.clone(),
            labels: self.labels.clone().unwrap_or_default(),
        };
        Ok(serde_json::to_string(&note).expect("notes are made of types that JSON can write"))
    }
}

/// Makes a snapshot of an image. Answers at once; the image comes behind that.
pub async fn create(
    State(app): State<App>,
    Caller(key): Caller,
    Body(body): Body<Create>,
) -> Result<(StatusCode, Json<Value>), Refusal> {
    if body.registry_id.is_some() || body.registry_url.is_some() {
        let why = "this server keeps no registries; credentials are in the Docker configuration that the operator names";
        return Err(Refusal::invalid("registry_id", why));
    }
    let name = body.name()?;
    let image = body.docker_image.clone().ok_or_else(|| Refusal::invalid("docker_image", "it is missing"))?;
    let run = body.run_config.clone().unwrap_or_default();
    let note = body.note(&run)?;
    let tags = match &body.tag {
        Some(tag) => vec![tag.clone()],
        None => own_tag(&image).into_iter().chain([LATEST.to_owned()]).collect(),
    };
    let template = with_run_config(TemplateSpec { image, ..TemplateSpec::default() }, run)?;
    let made = app
        .engine
        .create_snapshot(&key, SnapshotSpec { name, tags, template, note, labels: Labels::default() })
        .await;
    let snapshot = made.map_err(|error| Refusal::from(error).renamed("image", "docker_image"))?;
    Ok((StatusCode::CREATED, Json(show(&snapshot))))
}

/// The tag in an image's name, unless it is the usual one.
fn own_tag(image: &str) -> Option<String> {
    let image = image.split('@').next().unwrap_or(image);
    let (_, tag) = image.rsplit('/').next().unwrap_or(image).split_once(':')?;
    (tag != LATEST && !tag.is_empty()).then(|| tag.to_owned())
}

/// Who commands run as, where, and with what, unless the sandbox or the command says otherwise.
fn with_run_config(template: TemplateSpec, run: RunConfig) -> Result<TemplateSpec, EngineError> {
    let cwd = run.work_dir().map_err(|must| must.of(Field::Cwd))?.or(template.cwd);
    let user = run.user().map_err(|must| must.of(Field::User))?.or(template.user);
    let mut env = template.env.into_pairs();
    env.extend(run.env_vars.unwrap_or_default());
    let env = SandboxEnv::new(env).map_err(|must| must.of(Field::Env))?;
    Ok(TemplateSpec { env, cwd, user, ..template })
}

/// Captures a sandbox that runs. Answers at once; its files are read behind that.
pub async fn capture(
    State(app): State<App>,
    Meant { key, sandbox }: Meant,
    Body(body): Body<Create>,
) -> Result<(StatusCode, Json<Value>), Refusal> {
    if body.docker_image.is_some() {
        let why = "this server captures the sandbox's own files, and no image of a Docker daemon inside it";
        return Err(Refusal::invalid("docker_image", why));
    }
    if body.include_memory == Some(true) {
        return Err(Refusal::invalid("include_memory", "this server keeps no memory of sandboxes"));
    }
    if body.checkpoint.as_deref().is_some_and(|name| !name.is_empty()) {
        return Err(Refusal::invalid("checkpoint", "this server has no checkpoints"));
    }
    let name = body.name()?;
    let run = Notes::of(&sandbox).run_config.under(body.run_config.clone().unwrap_or_default());
    let note = body.note(&run)?;
    let tags = vec![body.tag.clone().unwrap_or_else(|| LATEST.to_owned())];
    let template = with_run_config(spec_of(&app, &key.owner, &sandbox), run)?;
    let spec = SnapshotSpec { name, tags, template, note, labels: Labels::default() };
    let snapshot = app.engine.capture_snapshot(&key, sandbox.id, spec).await?;
    Ok((StatusCode::CREATED, Json(show(&snapshot))))
}

/// What sandboxes of a captured one have: what its own template says, and what it was given.
fn spec_of(app: &App, owner: &engine::Owner, sandbox: &Sandbox) -> TemplateSpec {
    let template =
        app.engine.template(owner, &sandbox.template).map(|template| template.spec).unwrap_or_default();
    TemplateSpec {
        cpu_millis: sandbox.limits.cpu_millis,
        memory_bytes: sandbox.limits.memory_bytes,
        // Volumes are no part of what was captured.
        mounts: Vec::new(),
        ..template
    }
}

/// The snapshots of the key's owner, newest first.
pub async fn list(
    State(app): State<App>,
    Caller(key): Caller,
    mut params: Params,
) -> Result<Json<Value>, Refusal> {
    let size = params.number("page_size", 1..=PAGE_MAX)?;
    let limit = params.number("limit", 1..=PAGE_MAX)?.or(size).unwrap_or(PAGE_DEFAULT);
    let cursor = params.text("cursor")?.filter(|cursor| !cursor.is_empty());
    let cursor = cursor.map(|cursor| cursor.parse::<u64>()).transpose();
    let cursor = cursor.map_err(|_| Refusal::invalid("cursor", "it did not come from a page"))?;
    let offset = params.number("offset", 0..=u64::MAX)?.or(cursor).unwrap_or(0);
    let part = params.text("name_contains")?.unwrap_or_default().to_lowercase();
    let status = params.text("status")?;
    let oldest_first = params.text("sort_order")?.is_some_and(|order| order.eq_ignore_ascii_case("asc"));
    let mut found: Vec<Snapshot> = app.engine.snapshots(&key.owner).await?;
    found.retain(|snapshot| {
        snapshot.name.to_lowercase().contains(&part)
            && status.as_deref().is_none_or(|status| word(&snapshot.state) == status)
    });
    found.sort_by_key(|snapshot| std::cmp::Reverse(snapshot.created_at));
    if oldest_first {
        found.reverse();
    }
    let next = offset.saturating_add(limit);
    let next_cursor = (next < found.len() as u64).then(|| next.to_string());
    let from = usize::try_from(offset).unwrap_or(usize::MAX);
    let page = found.iter().skip(from).take(limit as usize).map(show).collect();
    Ok(Json(listed("snapshots", page, next_cursor, offset)))
}

/// A snapshot, by its id, `name:tag` or name.
pub async fn get(Named { app, key, name: reference }: Named) -> Result<Json<Value>, Refusal> {
    Ok(Json(show(&app.engine.snapshot(&key.owner, &reference).await?)))
}

/// Removes a snapshot. Sandboxes that were made from it stay.
pub async fn delete(Named { app, key, name: reference }: Named) -> Result<StatusCode, Refusal> {
    app.engine.delete_snapshot(&key.owner, &reference).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// What the tags of a name mean.
pub async fn tags(Named { app, key, name }: Named) -> Result<Json<Value>, Refusal> {
    let tags = app.engine.snapshot_tags(&key.owner, &name).await?.into_iter();
    let tags: Vec<Value> = tags.map(|(tag, id)| json!({"tag": tag, "snapshot_id": id})).collect();
    Ok(Json(json!({"name": name, "tags": tags})))
}

fn word(state: &SnapshotState) -> &'static str {
    match state {
        SnapshotState::Building => "building",
        SnapshotState::Ready => "ready",
        SnapshotState::Failed { .. } => "failed",
        SnapshotState::Deleting => "deleting",
    }
}

/// A snapshot as clients see it.
fn show(snapshot: &Snapshot) -> Value {
    let note: Note = serde_json::from_str(&snapshot.note).unwrap_or_default();
    let (created_at, updated_at) = times(snapshot.created_at, snapshot.updated_at);
    let reason = match &snapshot.state {
        SnapshotState::Failed { reason } => Some(reason),
        SnapshotState::Building | SnapshotState::Ready | SnapshotState::Deleting => None,
    };
    let digest = snapshot.template.as_ref().and_then(|template| match &template.preparation {
        Preparation::Ready(prepared) => prepared.image.map(|image| image.to_string()),
        Preparation::Preparing | Preparation::Failed { .. } | Preparation::Replaced => None,
    });
    let mut body = json!({
        "id": snapshot.id,
        "name": snapshot.name,
        "status": word(&snapshot.state),
        "status_message": reason,
        "fs_capacity_bytes": note.fs_capacity_bytes,
        "fs_used_bytes": null,
        "docker_image": snapshot.image,
        "image_digest": digest,
        "source_sandbox_id": snapshot.sandbox.map(|sandbox| sandbox.to_string()),
        "registry_id": null,
        "created_by": null,
        "description": note.description,
        "labels": note.labels,
        "tags": snapshot.tags,
        "created_at": created_at,
        "updated_at": updated_at,
    });
    if !note.run_config.is_empty()
        && let Some(object) = body.as_object_mut()
    {
        object.insert("run_config".into(), json!(note.run_config));
    }
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_has_a_tag_of_its_own_or_none() {
        for (image, tag) in [
            ("python:3.12-slim", Some("3.12-slim")),
            ("python", None),
            ("python:latest", None),
            ("localhost:5000/python", None),
            ("localhost:5000/python:3", Some("3")),
            ("python@sha256:00", None),
            ("python:3@sha256:00", Some("3")),
        ] {
            assert_eq!(own_tag(image).as_deref(), tag, "{image}");
        }
    }
}
