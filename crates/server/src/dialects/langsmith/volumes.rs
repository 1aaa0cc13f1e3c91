//! Volumes, as clients up to 0.7.33 have them: storage that outlives sandboxes, mounted through templates.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use engine::volume::{Volume, VolumeName, VolumeSpec, VolumeUpdate};
use serde::Deserialize;
use serde_json::{Value, json};

use super::error::Refusal;
use super::json::times;
use super::read::{Body, Named};
use crate::config::quantity::Bytes;
use crate::dialects::common::amount::bytes_text;
use crate::http::app::{App, Caller};

/// `POST /volumes`. It is answered when the volume can be mounted, whether the caller asks for that or not.
#[derive(Debug, Deserialize)]
pub struct Create {
    name: String,
    size: String,
}

fn size(text: &str) -> Result<u64, Refusal> {
    Ok(Bytes::parse(text).map_err(|error| Refusal::invalid("size", error))?.bytes)
}

/// Makes a volume.
pub async fn create(
    State(app): State<App>,
    Caller(key): Caller,
    Body(body): Body<Create>,
) -> Result<(StatusCode, Json<Value>), Refusal> {
    let spec = VolumeSpec { name: VolumeName::parse(&body.name)?, size_bytes: size(&body.size)?, from: None };
    let volume = app.engine.create_volume(&key, spec).await?;
    Ok((StatusCode::CREATED, Json(show(&volume))))
}

/// The volumes of the key's owner.
pub async fn list(State(app): State<App>, Caller(key): Caller) -> Result<Json<Value>, Refusal> {
    let volumes: Vec<Value> = app.engine.volumes(&key.owner).await?.iter().map(show).collect();
    Ok(Json(json!({"volumes": volumes})))
}

/// A volume.
pub async fn get(Named { app, key, name }: Named) -> Result<Json<Value>, Refusal> {
    Ok(Json(show(&app.engine.volume(&key.owner, &name).await?)))
}

/// `PATCH /volumes/{name}`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Update {
    name: Option<String>,
    size: Option<String>,
}

/// Gives a volume another name, or makes it larger.
pub async fn update(
    Named { app, key, name }: Named,
    Body(body): Body<Update>,
) -> Result<Json<Value>, Refusal> {
    let size_bytes = body.size.as_deref().map(size).transpose()?;
    let before = app.engine.volume(&key.owner, &name).await?;
    // The engine would let it shrink to what is in it; the clients of this dialect expect that no volume shrinks.
    if size_bytes.is_some_and(|size| size < before.size_bytes) {
        let message =
            format!("volume `{name}` cannot be made smaller than {}", bytes_text(before.size_bytes));
        return Err(Refusal::new(StatusCode::BAD_REQUEST, "VolumeResize", message));
    }
    let update = VolumeUpdate { name: body.name.as_deref().map(VolumeName::parse).transpose()?, size_bytes };
    Ok(Json(show(&app.engine.update_volume(&key.owner, &name, update).await?)))
}

/// Deletes a volume. Refused while a sandbox mounts it.
pub async fn delete(Named { app, key, name }: Named) -> Result<StatusCode, Refusal> {
    app.engine.delete_volume(&key.owner, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A volume as clients see it.
fn show(volume: &Volume) -> Value {
    let (created_at, updated_at) = times(volume.created_at, volume.updated_at);
    json!({
        "id": volume.id.to_string(),
        "name": volume.name.as_str(),
        "size": bytes_text(volume.size_bytes),
        "storage_class": "default",
        "created_at": created_at,
        "updated_at": updated_at,
    })
}
