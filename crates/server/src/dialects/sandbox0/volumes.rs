//! Volumes, as clients before 0.10 have them: storage that outlives sandboxes, mounted at the claim.
//!
//! A volume of theirs has an id and neither a name nor a size; ours has all three, so those are chosen here.

use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use engine::volume::{Volume, VolumeName, VolumeSpec};
use engine::{EngineError, Key, VolumeMount};
use serde::Deserialize;
use serde_json::{Value, json};
use wire::launch::Access;

use super::answer::{Answer, done, with};
use super::error::Refusal;
use crate::http::app::{App, Caller};
use crate::http::body::text_in_path;
use crate::http::clock::rfc3339;

use super::read::Body;

/// What a volume may hold: clients cannot say. Space is taken as it is used.
const SIZE_BYTES: u64 = 10 << 30;
/// The beginning of the names of volumes that clients make.
const NAMES: &str = "sandbox0-";

/// `POST /sandboxvolumes`, and `.../{volume}/fork`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Create {
    snapshot_id: Option<String>,
    backend: Option<String>,
    s3: Option<Value>,
    default_posix_uid: Option<i64>,
    default_posix_gid: Option<i64>,
    access_mode: Option<String>,
}

impl Create {
    fn check(&self) -> Result<(), Refusal> {
        let owned = |id: Option<i64>| id.is_some_and(|id| id != 0);
        for (field, given) in [
            ("snapshot_id", self.snapshot_id.is_some()),
            ("backend", self.backend.as_deref().is_some_and(|backend| backend != "s0fs")),
            ("s3", self.s3.as_ref().is_some_and(|s3| !s3.is_null())),
            ("default_posix_uid", owned(self.default_posix_uid)),
            ("default_posix_gid", owned(self.default_posix_gid)),
            ("access_mode", self.access_mode.as_deref() == Some("ROX")),
        ] {
            if given {
                let message = format!(
                    "this server has volumes on its own disk, for reading and writing: leave `{field}` out"
                );
                return Err(Refusal::unsupported(message));
            }
        }
        Ok(())
    }
}

async fn make(app: &App, key: &Key, from: Option<String>) -> Result<Volume, Refusal> {
    let name = format!("{NAMES}{:016x}", getrandom::u64().map_err(|_| EngineError::Stopping)?);
    let spec = VolumeSpec { name: VolumeName::parse(&name)?, size_bytes: SIZE_BYTES, from };
    Ok(app.engine.create_volume(key, spec).await?)
}

/// Makes a volume.
pub async fn create(
    State(app): State<App>,
    Caller(key): Caller,
    Body(body): Body<Create>,
) -> Result<Answer, Refusal> {
    body.check()?;
    let volume = make(&app, &key, None).await?;
    Ok(with(StatusCode::CREATED, show(&key, &volume, None)))
}

/// The volumes of the key's owner.
pub async fn list(State(app): State<App>, Caller(key): Caller) -> Result<Answer, Refusal> {
    let all = app.engine.volumes(&key.owner).await?;
    Ok(done(all.iter().map(|volume| show(&key, volume, None)).collect()))
}

/// A volume by its id, or by its name.
async fn find(app: &App, key: &Key, text: &str) -> Result<Volume, EngineError> {
    let all = app.engine.volumes(&key.owner).await?;
    let found = all.into_iter().find(|volume| volume.id.to_string() == text || volume.name.as_str() == text);
    found.ok_or_else(|| EngineError::VolumeNotFound { name: engine::shown(text) })
}

/// The volume that a path names, and the key that asks.
pub struct Named {
    key: Key,
    volume: Volume,
}

impl FromRequestParts<App> for Named {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Refusal> {
        let Caller(key) = Caller::from_request_parts(parts, app).await?;
        let text = text_in_path(parts, app, "volume").await?;
        let volume = find(app, &key, &text).await?;
        Ok(Self { key, volume })
    }
}

/// A volume.
pub async fn get(Named { key, volume }: Named) -> Answer {
    done(show(&key, &volume, None))
}

/// Deletes a volume. Refused while a sandbox mounts it.
pub async fn delete(State(app): State<App>, Named { key, volume }: Named) -> Result<Answer, Refusal> {
    app.engine.delete_volume(&key.owner, volume.name.as_str()).await?;
    Ok(done(json!({"deleted": true})))
}

/// Makes a volume with the files of another one.
pub async fn fork(
    State(app): State<App>,
    Named { key, volume }: Named,
    Body(body): Body<Create>,
) -> Result<Answer, Refusal> {
    body.check()?;
    let made = make(&app, &key, Some(volume.name.to_string())).await?;
    Ok(with(StatusCode::CREATED, show(&key, &made, Some(&volume))))
}

/// What a claim mounts.
#[derive(Debug, Deserialize)]
pub struct Mount {
    sandboxvolume_id: String,
    mount_point: String,
}

/// The mounts that a claim asks for.
pub async fn mounts(app: &App, key: &Key, wanted: Vec<Mount>) -> Result<Vec<VolumeMount>, Refusal> {
    let mut mounts = Vec::with_capacity(wanted.len());
    for Mount { sandboxvolume_id, mount_point } in wanted {
        let volume = find(app, key, &sandboxvolume_id).await.map_err(|error| match error {
            // Routes of claims list 400, and not 404.
            EngineError::VolumeNotFound { .. } => Refusal::bad(error.to_string()),
            error => error.into(),
        })?;
        mounts.push(VolumeMount {
            volume: volume.name.to_string(),
            path: mount_point,
            access: Access::ReadWrite,
        });
    }
    Ok(mounts)
}

/// A volume as clients see it.
fn show(key: &Key, volume: &Volume, source: Option<&Volume>) -> Value {
    json!({
        "id": volume.id.to_string(),
        "team_id": key.owner.as_str(),
        "user_id": key.id,
        "backend": "s0fs",
        "access_mode": "RWX",
        "source_volume_id": source.map(|source| source.id.to_string()),
        "created_at": rfc3339(volume.created_at),
        "updated_at": rfc3339(volume.updated_at),
    })
}
