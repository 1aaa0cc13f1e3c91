//! Blueprints: builds from a Dockerfile, and templates that were made otherwise.
//!
//! A blueprint that was made here is a build, which makes a template of its name. Several can share a name, and a devbox is made from
//! the newest one that was built.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use axum::Json;
use axum::extract::{FromRequestParts, State};
use axum::http::request::Parts;
use engine::build::{BuildInfo, BuildState};
use engine::template::{Preparation, Template, TemplateName, TemplateSpec};
use engine::{EngineError, Key};
use serde::Deserialize;
use serde_json::{Value, json};

use super::error::Refusal;
use super::ids;
use super::json::milliseconds;
use super::read::Body;
use crate::dialects::common::dockerfile;
use crate::http::app::{App, Caller};
use crate::http::body::text_in_path;
use crate::http::params::Params;

/// What a blueprint without a Dockerfile begins with.
const BASE: &str = "FROM host";
/// Entries on a page, if the caller does not say.
const PAGE_DEFAULT: u64 = 20;
/// Lines of a log in one answer, the last of them.
const LINES_MAX: usize = 10_000;

/// A blueprint.
#[allow(clippy::large_enum_variant)] // A few exist at a time, for the length of a request.
enum Blueprint {
    Build(BuildInfo),
    Template(Template),
}

impl Blueprint {
    /// All of an owner, newest first. A build whose template is gone is none any more.
    fn all(app: &App, key: &Key) -> Vec<Self> {
        let templates = app.engine.templates(&key.owner);
        let named: BTreeSet<&str> = templates.iter().map(|template| template.name.as_str()).collect();
        let is_one = |build: &BuildInfo| match build.state {
            BuildState::Done { .. } => named.contains(build.template.as_str()),
            BuildState::Running | BuildState::Failed { .. } => true,
        };
        let builds: Vec<BuildInfo> = app.engine.builds(&key.owner).into_iter().filter(is_one).collect();
        let built: BTreeSet<String> = builds.iter().map(|build| build.template.clone()).collect();
        let others =
            templates.into_iter().filter(|template| template.id.is_some() && !built.contains(&template.name));
        let mut all: Vec<Self> =
            builds.into_iter().map(Self::Build).chain(others.map(Self::Template)).collect();
        all.sort_by_key(|blueprint| std::cmp::Reverse(blueprint.created_at()));
        all
    }

    fn find(app: &App, key: &Key, id: &str) -> Result<Self, Refusal> {
        let mut all = Self::all(app, key).into_iter();
        let found = all.find(|blueprint| blueprint.id() == id);
        found.ok_or_else(|| EngineError::TemplateNotFound { name: engine::shown(id) }.into())
    }

    fn created_at(&self) -> SystemTime {
        match self {
            Self::Build(build) => build.created_at,
            Self::Template(template) => template.created_at,
        }
    }

    fn id(&self) -> String {
        match self {
            Self::Build(build) => ids::of_build(build.id),
            Self::Template(template) => template.id.map(ids::of_template).unwrap_or_default(),
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Build(build) => &build.template,
            Self::Template(template) => &template.name,
        }
    }

    fn status(&self) -> &'static str {
        match self {
            Self::Build(build) => match build.state {
                BuildState::Running => "building",
                BuildState::Done { .. } => "build_complete",
                BuildState::Failed { .. } => "failed",
            },
            Self::Template(template) => match template.preparation {
                Preparation::Preparing => "building",
                Preparation::Ready(_) => "build_complete",
                Preparation::Failed { .. } | Preparation::Replaced => "failed",
            },
        }
    }

    fn show(&self) -> Value {
        let status = self.status();
        let mut body = json!({
            "id": self.id(),
            "name": self.name(),
            "status": status,
            "state": "created",
            "create_time_ms": milliseconds(self.created_at()),
            "parameters": {"name": self.name()},
        });
        if status == "failed" {
            body["failure_reason"] = "build_failed".into();
        }
        if let Self::Build(BuildInfo { ended_at: Some(at), .. }) = self {
            body["build_finish_time_ms"] = milliseconds(*at).into();
        }
        body
    }
}

/// The template that a blueprint is, by its id.
pub fn template_of(app: &App, key: &Key, id: &str) -> Result<TemplateName, Refusal> {
    let blueprint = Blueprint::find(app, key, id)?;
    match blueprint.status() {
        "build_complete" => Ok(TemplateName::parse(blueprint.name())?),
        status => Err(Refusal::unsupported(format!(
            "blueprint `{}` is not built: it is {status}",
            blueprint.name()
        ))),
    }
}

/// The template that a blueprint is, by its name.
pub fn template_named(app: &App, key: &Key, name: &str) -> Result<TemplateName, Refusal> {
    Ok(TemplateName::parse(&app.engine.template(&key.owner, name)?.name)?)
}

/// `POST /v1/blueprints`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Create {
    name: String,
    dockerfile: Option<String>,
    system_setup_commands: Option<Vec<String>>,
    base_blueprint_id: Option<String>,
    base_blueprint_name: Option<String>,
    build_args: Option<BTreeMap<String, String>>,
    build_context: Option<Value>,
    code_mounts: Option<Vec<Value>>,
    file_mounts: Option<BTreeMap<String, String>>,
    secrets: Option<BTreeMap<String, Value>>,
    services: Option<Vec<Value>>,
}

/// Starts to build a blueprint.
pub async fn create(
    State(app): State<App>,
    Caller(key): Caller,
    Body(body): Body<Create>,
) -> Result<Json<Value>, Refusal> {
    for (field, given) in [
        ("base_blueprint_id", body.base_blueprint_id.is_some()),
        ("base_blueprint_name", body.base_blueprint_name.is_some()),
        ("build_args", body.build_args.is_some_and(|arguments| !arguments.is_empty())),
        ("build_context", body.build_context.is_some_and(|context| !context.is_null())),
        ("code_mounts", body.code_mounts.is_some_and(|mounts| !mounts.is_empty())),
        ("file_mounts", body.file_mounts.is_some_and(|mounts| !mounts.is_empty())),
        ("secrets", body.secrets.is_some_and(|secrets| !secrets.is_empty())),
        ("services", body.services.is_some_and(|services| !services.is_empty())),
    ] {
        if given {
            return Err(Refusal::unsupported(format!(
                "this server does not support `{field}` of a blueprint"
            )));
        }
    }
    let mut text = body.dockerfile.filter(|text| !text.trim().is_empty()).unwrap_or_else(|| BASE.to_owned());
    for command in body.system_setup_commands.unwrap_or_default() {
        // As a JSON list, so that no character of it means something to the Dockerfile.
        let words =
            serde_json::to_string(&["/bin/sh", "-c", command.as_str()]).map_err(|_| Refusal::bug())?;
        text.push_str(&format!("\nRUN {words}"));
    }
    let name = TemplateName::parse(&body.name)?;
    let build = dockerfile::build(&app, &key, name, TemplateSpec::default(), &text).await?;
    Ok(Json(Blueprint::Build(build).show()))
}

/// A blueprint that a path names, and the key that asks.
pub struct Named {
    app: App,
    key: Key,
    blueprint: Blueprint,
}

impl FromRequestParts<App> for Named {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Refusal> {
        let Caller(key) = Caller::from_request_parts(parts, app).await?;
        let id = text_in_path(parts, app, "name").await?;
        let blueprint = Blueprint::find(app, &key, &id)?;
        Ok(Self { app: app.clone(), key, blueprint })
    }
}

/// A blueprint.
pub async fn get(named: Named) -> Json<Value> {
    Json(named.blueprint.show())
}

/// `GET /v1/blueprints`: newest first, a page behind the last id of the page before.
pub async fn list(
    State(app): State<App>,
    Caller(key): Caller,
    mut params: Params,
) -> Result<Json<Value>, Refusal> {
    let limit =
        usize::try_from(params.number("limit", 1..=u64::MAX)?.unwrap_or(PAGE_DEFAULT)).unwrap_or(usize::MAX);
    let after = params.text("starting_after")?.filter(|id| !id.is_empty());
    let name = params.text("name")?.filter(|name| !name.is_empty());
    let status = params.text("status")?.filter(|status| !status.is_empty());
    let mut all = Blueprint::all(&app, &key);
    all.retain(|blueprint| {
        name.as_ref().is_none_or(|name| name == blueprint.name())
            && status.as_ref().is_none_or(|status| status == blueprint.status())
    });
    let place = |id: &String| all.iter().position(|blueprint| blueprint.id() == *id);
    let first = after.as_ref().map_or(0, |id| place(id).map_or(all.len(), |at| at + 1));
    let has_more = all.len() - first > limit;
    let page: Vec<Value> = all[first..].iter().take(limit).map(Blueprint::show).collect();
    Ok(Json(json!({"blueprints": page, "has_more": has_more, "total_count": all.len()})))
}

/// There are none that belong to everybody.
pub async fn list_public() -> Json<Value> {
    Json(json!({"blueprints": [], "has_more": false, "total_count": 0}))
}

/// Deletes a blueprint: the build, and the template that it made unless something was made from it.
pub async fn delete(Named { app, key, blueprint }: Named) -> Result<Json<Value>, Refusal> {
    let name = blueprint.name().to_owned();
    match app.engine.delete_template(&key.owner, &name).await {
        Ok(()) | Err(EngineError::TemplateNotFound { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    if let Blueprint::Build(build) = &blueprint {
        app.engine.delete_build(&key.owner, build.id).await?;
    }
    Ok(Json(json!({})))
}

/// What a build said.
pub async fn logs(Named { app, key, blueprint }: Named) -> Result<Json<Value>, Refusal> {
    let mut text = Vec::new();
    if let Blueprint::Build(build) = &blueprint {
        let mut log = app.engine.build_log(&key.owner, build.id, 0)?;
        while let Some(piece) = log.next(false).await? {
            text.extend_from_slice(&piece);
        }
        if let BuildState::Failed { reason } = &build.state {
            text.extend_from_slice(format!("\n{reason}\n").as_bytes());
        }
    }
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    let at = milliseconds(blueprint.created_at());
    let shown = lines.iter().skip(lines.len().saturating_sub(LINES_MAX));
    let logs: Vec<Value> =
        shown.map(|line| json!({"level": "info", "message": line, "timestamp_ms": at})).collect();
    Ok(Json(json!({"blueprint_id": blueprint.id(), "logs": logs})))
}
