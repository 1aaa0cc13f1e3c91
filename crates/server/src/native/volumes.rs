//! Volumes: create, get, list, update, delete, and their files as a tar stream.

use axum::Json;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use engine::VolumeMount;
use engine::volume::{Holder, Volume, VolumeName, VolumeSpec, VolumeUpdate};
use wire::api;
use wire::launch::Access;

use super::common::{bytes, carried_on};
use super::files::files_made;
use crate::http::app::{App, Caller};
use crate::http::body::{self, text_in_path};
use crate::http::clock::rfc3339;
use crate::http::download::{Source, body_of, inert, value};
use crate::http::error::ApiError;
use crate::http::params::Params;
use crate::http::upload::{check_whole, pour};

/// A name in a path, percent-encoded.
pub struct VolumePath(pub String);

impl<S: Send + Sync> FromRequestParts<S> for VolumePath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        text_in_path(parts, state, "volume").await.map(Self)
    }
}

/// Creates a volume. Answers when it can be mounted.
#[utoipa::path(post, path = "/v1/volumes", tag = "volumes", request_body = api::CreateVolume, responses(
    (status = 201, body = api::Volume),
    (status = 400, body = api::ErrorBody),
    (status = 404, description = "The volume to copy does not exist.", body = api::ErrorBody),
    (status = 409, description = "The name is taken, or the copy does not fit.", body = api::ErrorBody),
    (status = 503, description = "The machine has no room.", body = api::ErrorBody),
))]
pub async fn create(
    State(app): State<App>,
    Caller(key): Caller,
    body::Json(body): body::Json<api::CreateVolume>,
) -> Result<Response, ApiError> {
    let spec = volume_spec(body)?;
    let body = to_api(app.engine.create_volume(&key, spec).await?);
    let mut response = (StatusCode::CREATED, Json(&body)).into_response();
    // Only names that fit into a header as they are; for other names there is no link that a client could follow.
    if body.name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte))
        && let Ok(location) = HeaderValue::from_str(&format!("/v1/volumes/{}", body.name))
    {
        response.headers_mut().insert(header::LOCATION, location);
    }
    Ok(response)
}

/// The volumes of the key's owner, by name.
#[utoipa::path(get, path = "/v1/volumes", tag = "volumes", responses((status = 200, body = api::VolumeList)))]
pub async fn list(State(app): State<App>, Caller(key): Caller) -> Result<Json<api::VolumeList>, ApiError> {
    let volumes = app.engine.volumes(&key.owner).await?.into_iter().map(to_api).collect();
    Ok(Json(api::VolumeList { volumes }))
}

/// A volume, with what its files take.
#[utoipa::path(get, path = "/v1/volumes/{volume}", tag = "volumes",
    params(("volume" = String, Path, description = "Its name, percent-encoded.")), responses(
    (status = 200, body = api::Volume),
    (status = 404, body = api::ErrorBody),
))]
pub async fn get(
    State(app): State<App>,
    Caller(key): Caller,
    VolumePath(name): VolumePath,
) -> Result<Json<api::Volume>, ApiError> {
    Ok(Json(to_api(app.engine.volume(&key.owner, &name).await?)))
}

/// Gives a volume another name or size. Sandboxes that mount it notice nothing but the room.
#[utoipa::path(patch, path = "/v1/volumes/{volume}", tag = "volumes", request_body = api::UpdateVolume,
    params(("volume" = String, Path, description = "Its name, percent-encoded.")), responses(
    (status = 200, body = api::Volume),
    (status = 400, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "The name is taken, or more is in it than would fit.", body = api::ErrorBody),
))]
pub async fn update(
    State(app): State<App>,
    Caller(key): Caller,
    VolumePath(name): VolumePath,
    body::Json(body): body::Json<api::UpdateVolume>,
) -> Result<Json<api::Volume>, ApiError> {
    let update = volume_update(body)?;
    Ok(Json(to_api(app.engine.update_volume(&key.owner, &name, update).await?)))
}

/// Deletes a volume with all its files.
#[utoipa::path(delete, path = "/v1/volumes/{volume}", tag = "volumes",
    params(("volume" = String, Path, description = "Its name, percent-encoded.")), responses(
    (status = 204, description = "It is gone."),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "Sandboxes mount it; `details.sandboxes` names them.", body = api::ErrorBody),
))]
pub async fn delete(
    State(app): State<App>,
    Caller(key): Caller,
    VolumePath(name): VolumePath,
) -> Result<StatusCode, ApiError> {
    carried_on(async move { app.engine.delete_volume(&key.owner, &name).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A volume's files as a tar stream.
///
/// Names are relative to `path`. A sandbox that mounts the volume to look at it packs them, and is deleted afterwards. Sockets, FIFOs
/// and devices are left out. If something cannot be read, or becomes shorter while it is read, the connection is cut.
#[utoipa::path(get, path = "/v1/volumes/{volume}/tar", tag = "volumes", params(
    ("volume" = String, Path, description = "Its name, percent-encoded."),
    ("path" = Option<String>, Query, description = "A directory or file of the volume; `/` by default.")), responses(
    (status = 200, content_type = "application/x-tar", body = Vec<u8>),
    (status = 404, body = api::ErrorBody),
))]
pub async fn export(
    State(app): State<App>,
    caller: Caller,
    VolumePath(name): VolumePath,
    mut params: Params,
) -> Result<Response, ApiError> {
    let path = path_of(&mut params)?;
    params.finish()?;
    let volume = app.engine.volume_files(&caller.0, &name, Access::ReadOnly).await?;
    let packing = volume.files.pack(&volume.path(&path)?).await?;
    let source = Source::Volume(Box::new(packing), Box::new(volume));
    let mut answer = body_of(source, &app, &caller.0).into_response();
    answer.headers_mut().insert(header::CONTENT_TYPE, value("application/x-tar"));
    inert(answer.headers_mut());
    Ok(answer)
}

/// Unpacks a tar stream into a volume.
///
/// A sandbox that mounts the volume does it, and is deleted afterwards; so it is as with a sandbox's files: nothing in the stream is
/// trusted, owners are not kept, what came before a refusal stays.
#[utoipa::path(put, path = "/v1/volumes/{volume}/tar", tag = "volumes", params(
    ("volume" = String, Path, description = "Its name, percent-encoded."),
    ("path" = Option<String>, Query, description = "A directory of the volume, created if it is missing; `/` by default.")),
    request_body(content = Vec<u8>, content_type = "application/x-tar"), responses(
    (status = 200, body = api::FilesMade),
    (status = 400, description = "The body is not an archive, or the archive contains an entry that is refused.", body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 507, description = "The volume is full.", body = api::ErrorBody),
))]
pub async fn import(
    State(app): State<App>,
    caller: Caller,
    VolumePath(name): VolumePath,
    mut params: Params,
    request: Request,
) -> Result<Json<api::FilesMade>, ApiError> {
    let path = path_of(&mut params)?;
    params.finish()?;
    let (head, body) = request.into_parts();
    check_whole(&head.headers)?;
    let volume = app.engine.volume_files(&caller.0, &name, Access::ReadWrite).await?;
    let path = volume.path(&path)?;
    let mut stopping = app.stopping(&caller.0);
    let made = pour(body, &mut stopping, async |mut incoming| {
        let mut unpacking = volume.files.unpack(&path).await?;
        while let Some(bytes) = incoming.next().await? {
            unpacking.write(bytes).await?;
        }
        Ok(unpacking.finish().await?)
    });
    let made = made.await?;
    // Before the response, so that the client can delete the volume at once.
    volume.close().await?;
    Ok(Json(files_made(made)))
}

fn path_of(params: &mut Params) -> Result<Vec<u8>, ApiError> {
    Ok(params.text("path")?.unwrap_or_else(|| "/".into()).into_bytes())
}

/// `POST /v1/volumes`
pub fn volume_spec(body: api::CreateVolume) -> Result<VolumeSpec, ApiError> {
    let api::CreateVolume { name, size, from } = body;
    let size_bytes = bytes("size", Some(size))?.unwrap_or(0);
    Ok(VolumeSpec { name: VolumeName::parse(&name)?, size_bytes, from })
}

/// `PATCH /v1/volumes/{volume}`
pub fn volume_update(body: api::UpdateVolume) -> Result<VolumeUpdate, ApiError> {
    let api::UpdateVolume { name, size } = body;
    let name = name.as_deref().map(VolumeName::parse).transpose()?;
    Ok(VolumeUpdate { name, size_bytes: bytes("size", size)? })
}

/// A volume as clients see it.
pub fn to_api(volume: Volume) -> api::Volume {
    let holder = |Holder { sandbox, name, path, access }| api::VolumeHolder {
        sandbox_id: sandbox,
        name,
        path,
        read_only: access == Access::ReadOnly,
    };
    api::Volume {
        id: volume.id.to_string(),
        name: volume.name.to_string(),
        size_bytes: volume.size_bytes,
        size_enforced: volume.enforced,
        used_bytes: volume.used.map(|used| used.bytes),
        mounted_by: volume.holders.into_iter().map(holder).collect(),
        created_at: rfc3339(volume.created_at),
        updated_at: rfc3339(volume.updated_at),
    }
}

/// A mount as the client requested it.
pub fn mount_spec(mount: api::VolumeMount) -> VolumeMount {
    let access = if mount.read_only { Access::ReadOnly } else { Access::ReadWrite };
    VolumeMount { volume: mount.volume, path: mount.path, access }
}

/// A mount as clients see it.
pub fn mount(mount: VolumeMount) -> api::VolumeMount {
    let VolumeMount { volume, path, access } = mount;
    api::VolumeMount { volume, path, read_only: access == Access::ReadOnly }
}
