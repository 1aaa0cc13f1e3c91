//! Templates, as clients up to 0.7.33 have them: an image and what sandboxes may use, under a name.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use engine::VolumeMount;
use engine::template::{Template, TemplateName, TemplateSpec, TemplateUpdate};
use serde::Deserialize;
use serde_json::{Value, json};
use wire::SnapshotId;
use wire::launch::Access;

use super::error::Refusal;
use super::json::times;
use super::read::{Body, Named};
use crate::config::quantity::{Bytes, Cpu};
use crate::dialects::common::amount::bytes_text;
use crate::http::app::{App, Caller};

/// What a template has where the caller does not say, as the vendor's clients do.
const CPU_DEFAULT: &str = "500m";
const MEMORY_DEFAULT: &str = "512Mi";

/// `POST /templates`
#[derive(Debug, Deserialize)]
pub struct Create {
    name: String,
    image: String,
    #[serde(default)]
    resources: Option<Resources>,
    #[serde(default)]
    volume_mounts: Option<Vec<Mount>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Resources {
    cpu: Option<String>,
    memory: Option<String>,
    storage: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Mount {
    volume_name: String,
    mount_path: String,
}

/// Makes a template. Its image comes in the background, if it is not here.
pub async fn create(
    State(app): State<App>,
    Caller(key): Caller,
    Body(body): Body<Create>,
) -> Result<(StatusCode, Json<Value>), Refusal> {
    let resources = body.resources.unwrap_or_default();
    let cpu = Cpu::parse(resources.cpu.as_deref().unwrap_or(CPU_DEFAULT));
    let cpu = cpu.map_err(|error| Refusal::invalid("resources.cpu", error))?.millis;
    let memory = Bytes::parse(resources.memory.as_deref().unwrap_or(MEMORY_DEFAULT));
    let disk = resources.storage.as_deref().map(Bytes::parse).transpose();
    let mounts = body.volume_mounts.unwrap_or_default().into_iter();
    let spec = TemplateSpec {
        image: body.image,
        cpu_millis: u32::try_from(cpu).map_err(|_| Refusal::invalid("resources.cpu", "it is too large"))?,
        memory_bytes: memory.map_err(|error| Refusal::invalid("resources.memory", error))?.bytes,
        disk_bytes: disk
            .map_err(|error| Refusal::invalid("resources.storage", error))?
            .map(|disk| disk.bytes),
        mounts: mounts
            .map(|mount| VolumeMount {
                volume: mount.volume_name,
                path: mount.mount_path,
                access: Access::ReadWrite,
            })
            .collect(),
        ..TemplateSpec::default()
    };
    let name = TemplateName::parse(&body.name)?;
    let template = app.engine.create_template(&key.owner, name, spec).await?;
    Ok((StatusCode::CREATED, Json(show(&template))))
}

/// The templates of the key's owner.
pub async fn list(State(app): State<App>, Caller(key): Caller) -> Json<Value> {
    let templates = app.engine.templates(&key.owner);
    let templates: Vec<Value> =
        templates.iter().filter(|template| !is_snapshot(template)).map(show).collect();
    Json(json!({"templates": templates}))
}

/// A template.
pub async fn get(Named { app, key, name }: Named) -> Result<Json<Value>, Refusal> {
    Ok(Json(show(&app.engine.template(&key.owner, &name)?)))
}

/// `PATCH /templates/{name}`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Update {
    name: Option<String>,
}

/// Gives a template another name.
pub async fn update(
    Named { app, key, name }: Named,
    Body(body): Body<Update>,
) -> Result<Json<Value>, Refusal> {
    let update = TemplateUpdate {
        name: body.name.as_deref().map(TemplateName::parse).transpose()?,
        ..TemplateUpdate::default()
    };
    Ok(Json(show(&app.engine.update_template(&key.owner, &name, update).await?)))
}

/// Removes a template. Refused while something was made from it.
pub async fn delete(Named { app, key, name }: Named) -> Result<StatusCode, Refusal> {
    app.engine.delete_template(&key.owner, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// What is built in was made by nobody, and what belongs to a snapshot is shown as that.
fn is_snapshot(template: &Template) -> bool {
    let named = template.name.rsplit_once('@').is_some_and(|(_, id)| id.parse::<SnapshotId>().is_ok());
    named || template.id.is_none()
}

/// A template as clients see it.
fn show(template: &Template) -> Value {
    let spec = &template.spec;
    let mounts: Vec<Value> = spec
        .mounts
        .iter()
        .map(|mount| json!({"volume_name": mount.volume, "mount_path": mount.path}))
        .collect();
    let (created_at, updated_at) = times(template.created_at, template.updated_at);
    json!({
        "id": template.id.map(|id| id.to_string()),
        "name": template.name,
        "image": engine::image::familiar(&spec.image),
        "resources": {
            "cpu": cpu_text(spec.cpu_millis),
            "memory": bytes_text(spec.memory_bytes),
            "storage": spec.disk_bytes.map(bytes_text),
        },
        "volume_mounts": mounts,
        "created_at": template.id.map(|_| created_at),
        "updated_at": template.id.map(|_| updated_at),
    })
}

fn cpu_text(millis: u32) -> String {
    if millis.is_multiple_of(1000) { (millis / 1000).to_string() } else { format!("{millis}m") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_written_as_people_write_them() {
        assert_eq!((cpu_text(500), cpu_text(2000)), ("500m".into(), "2".into()));
    }
}
