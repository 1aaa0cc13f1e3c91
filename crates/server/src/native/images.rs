//! Images: pull, import, list, remove, and names for names.
//!
//! A pull or an import answers with its image, or, for a caller that accepts `text/event-stream`, with events on the way there.
//! It stops when everyone who waits for it has left.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::sse::{Event, KeepAlive};
use axum::response::{IntoResponse, Response, Sse};
use engine::images::{Format, InUse, Pull, StoredImage, Upload};
use engine::{Engine, EngineError, Key, Owner};
use futures_util::stream;
use serde::Deserialize;
use tokio::io::AsyncWriteExt;
use utoipa::IntoParams;
use wire::api;

use super::{carried_on, files};
use crate::app::{App, Caller, Stopping};
use crate::auth::require_admin_to;
use crate::body::{self, Query, text_in_path};
use crate::error::ApiError;
use crate::{convert, events};

/// Between two events about how far something is.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Pulls an image from its registry, also when one of that name is here: a tag may mean something else today.
///
/// With `Accept: text/event-stream` the answer is a stream of `ImageEvent`, each under the name of its `type`, and a failure is its
/// last event. Whoever asks for an image that is on its way joins.
#[utoipa::path(post, path = "/v1/images/pull", tag = "images", request_body = api::PullImage, responses(
    (status = 200, body = api::Image),
    (status = 400, description = "Not a reference; or the image cannot be used; or the registry denies it.", body = api::ErrorBody),
    (status = 403, description = "`insecure` with a key that may not.", body = api::ErrorBody),
    (status = 404, description = "The registry has no such image.", body = api::ErrorBody),
    (status = 503, description = "The registry cannot be reached, or is busy.", body = api::ErrorBody),
    (status = 507, description = "The disk is full.", body = api::ErrorBody),
))]
pub async fn pull(
    State(app): State<App>,
    Caller(key): Caller,
    headers: HeaderMap,
    body::Json(body): body::Json<api::PullImage>,
) -> Result<Response, ApiError> {
    if body.insecure {
        require_admin_to(&key, "name an insecure registry")?;
    }
    let spec = convert::pull_spec(body)?;
    let pull = app.engine.pull(&key, spec);
    answer(app, &key, pull, &headers).await
}

/// What is sent.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ImportParams {
    /// What to call the image. Needed where the archive does not say.
    name: Option<String>,
    /// `oci`, `docker` or `rootfs`; what it looks like if left out.
    format: Option<String>,
}

/// Takes the images of an archive: an OCI or Docker archive, or a root file system as a tar stream, compressed or not.
///
/// The body is the file. Answers as a pull does, with a list.
#[utoipa::path(post, path = "/v1/images/import", tag = "images", params(ImportParams),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"), responses(
    (status = 200, body = api::ImageList),
    (status = 400, description = "Not an archive, or not of images that can be used here.", body = api::ErrorBody),
    (status = 403, body = api::ErrorBody),
    (status = 507, description = "The disk is full.", body = api::ErrorBody),
))]
pub async fn import(
    State(app): State<App>,
    Caller(key): Caller,
    Query(params): Query<ImportParams>,
    request: Request,
) -> Result<Response, ApiError> {
    require_admin_to(&key, "import images")?;
    let name = params.name.as_deref().map(convert::reference).transpose()?;
    let format = match params.format.as_deref() {
        None => Format::Auto,
        Some("oci") => Format::Oci,
        Some("docker") => Format::Docker,
        Some("rootfs") => Format::Rootfs,
        Some(_) => return Err(ApiError::invalid("format", "it is `oci`, `docker` or `rootfs`")),
    };
    let (head, body) = request.into_parts();
    let upload = received(&app, &key, &head, body).await?;
    let mut stopping = app.stopping(&key);
    let pull = app.engine.import(upload, name, format);
    if wants_events(&head.headers) {
        return Ok(progress(app, &key, pull));
    }
    let images = finished(&pull, &mut stopping).await?;
    let images = images.iter().filter_map(|image| shown(&app.engine, &key.owner, &image.digest.to_string()));
    Ok(Json(api::ImageList { images: images.collect() }).into_response())
}

/// Takes a body into a file of its own, as far as the disk has room for it.
pub(super) async fn received(app: &App, key: &Key, head: &Parts, body: Body) -> Result<Upload, ApiError> {
    let (upload, room) = app.engine.upload()?;
    let full = || {
        ApiError::new(StatusCode::INSUFFICIENT_STORAGE, "disk_full", "the archive does not fit on the disk")
            .detail("free_bytes", room)
    };
    let announced = head.headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse().ok());
    if announced.is_some_and(|length: u64| length > room) {
        return Err(full());
    }
    let failed = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => full(),
        _ => ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the archive cannot be kept"),
    };
    let mut file = tokio::fs::File::from_std(upload.file.try_clone().map_err(failed)?);
    let mut stopping = app.stopping(key);
    let poured = files::pour(body, &mut stopping, async |mut incoming| {
        let mut length = 0u64;
        while let Some(bytes) = incoming.next().await? {
            length += bytes.len() as u64;
            if length > room {
                return Err(full());
            }
            file.write_all(&bytes).await.map_err(failed)?;
        }
        file.flush().await.map_err(failed)
    });
    poured.await?;
    Ok(upload)
}

async fn answer(app: App, key: &Key, pull: Pull, headers: &HeaderMap) -> Result<Response, ApiError> {
    if wants_events(headers) {
        return Ok(progress(app, key, pull));
    }
    let images = finished(&pull, &mut app.stopping(key)).await?;
    let digest = images.first().map(|image| image.digest.to_string()).unwrap_or_default();
    let image = shown(&app.engine, &key.owner, &digest);
    let image = image.ok_or_else(|| EngineError::ImageNotFound { name: digest })?;
    Ok(Json(image).into_response())
}

/// Waits until the images are here, unless the wait must end before.
async fn finished(pull: &Pull, stopping: &mut Stopping) -> Result<Vec<Arc<StoredImage>>, ApiError> {
    tokio::select! {
        images = pull.finished() => Ok(images?),
        halt = stopping.wait() => Err(halt.into()),
    }
}

fn wants_events(headers: &HeaderMap) -> bool {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    accepted.into_iter().any(|value| value.contains("text/event-stream"))
}

fn shown(engine: &Engine, owner: &Owner, digest: &str) -> Option<api::Image> {
    engine.image(owner, digest).ok().map(convert::image)
}

/// How far it is, until it is over.
fn progress(app: App, key: &Key, pull: Pull) -> Response {
    struct Watch {
        engine: Engine,
        owner: Owner,
        pull: Pull,
        progress: tokio::sync::watch::Receiver<engine::images::PullProgress>,
        stopping: Stopping,
        over: bool,
    }
    let (progress, stopping) = (pull.progress(), app.stopping(key));
    let owner = key.owner.clone();
    let watch = Watch { engine: app.engine, owner, pull, progress, stopping, over: false };
    let events = stream::unfold(watch, async |mut watch| {
        if watch.over {
            return None;
        }
        let event = tokio::select! {
            biased;
            outcome = watch.pull.finished() => {
                watch.over = true;
                match outcome {
                    Ok(images) => {
                        let images = images.iter().filter_map(|image| {
                            shown(&watch.engine, &watch.owner, &image.digest.to_string())
                        });
                        api::ImageEvent::Done { images: images.collect() }
                    }
                    Err(error) => {
                        let error = ApiError::from(error);
                        if let Some(chain) = error.chain() {
                            tracing::info!(error = chain.0, "an image did not come");
                        }
                        api::ImageEvent::Failed(error.into_body())
                    }
                }
            }
            _ = watch.stopping.wait() => return None,
            // Waits for news, and then a moment for more of it.
            Ok(()) = watch.progress.changed() => {
                tokio::select! {
                    () = tokio::time::sleep(PROGRESS_INTERVAL) => {}
                    _ = watch.pull.finished() => {}
                }
                convert::pull_progress(&watch.progress.borrow_and_update())
            }
        };
        Some((Ok::<_, Infallible>(to_event(&event)), watch))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(events::HEARTBEAT)).into_response()
}

fn to_event(event: &api::ImageEvent) -> Event {
    let name = match event {
        api::ImageEvent::Progress { .. } => "progress",
        api::ImageEvent::Done { .. } => "done",
        api::ImageEvent::Failed(_) => "failed",
    };
    // JSON has no line breaks outside of strings and escapes them inside, so that one event is one line.
    let data = serde_json::to_string(event).expect("events are made of types that JSON can write");
    Event::default().event(name).data(data)
}

/// The images that this key's owner may use, newest first. `host` needs no keeping and is not among them.
#[utoipa::path(get, path = "/v1/images", tag = "images", responses((status = 200, body = api::ImageList)))]
pub async fn list(State(app): State<App>, Caller(key): Caller) -> Json<api::ImageList> {
    let images = app.engine.images(&key.owner).into_iter().map(convert::image).collect();
    Json(api::ImageList { images })
}

/// A name in a path, percent-encoded.
pub struct ImagePath(pub String);

impl<S: Send + Sync> FromRequestParts<S> for ImagePath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        text_in_path(parts, state, "image").await.map(Self)
    }
}

/// An alias in a path, percent-encoded.
pub struct AliasPath(pub String);

impl<S: Send + Sync> FromRequestParts<S> for AliasPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        text_in_path(parts, state, "alias").await.map(Self)
    }
}

/// An image.
#[utoipa::path(get, path = "/v1/images/{image}", tag = "images",
    params(("image" = String, Path, description = "A name, an alias, a digest or the first 8 digits of it, percent-encoded.")),
    responses((status = 200, body = api::Image), (status = 404, body = api::ErrorBody)))]
pub async fn get(
    State(app): State<App>,
    Caller(key): Caller,
    ImagePath(name): ImagePath,
) -> Result<Json<api::Image>, ApiError> {
    Ok(Json(convert::image(app.engine.image(&key.owner, &name)?)))
}

/// How to remove.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct RemoveParams {
    /// Take the last name too while sandboxes use the image. They go on; what they need is removed after the last of them.
    force: bool,
}

/// Takes an image's name away, or all its names when it is named by its digest, and removes what nobody uses any more.
#[utoipa::path(delete, path = "/v1/images/{image}", tag = "images", params(
    ("image" = String, Path, description = "A name, a digest or the first 8 digits of it, percent-encoded."),
    RemoveParams,
), responses(
    (status = 200, body = api::CollectedImages),
    (status = 403, description = "It is everyone's, and the key may not.", body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "Sandboxes use it.", body = api::ErrorBody),
))]
pub async fn remove(
    State(app): State<App>,
    Caller(key): Caller,
    ImagePath(name): ImagePath,
    Query(params): Query<RemoveParams>,
) -> Result<Json<api::CollectedImages>, ApiError> {
    let in_use = if params.force { InUse::Release } else { InUse::Refuse };
    let collected = carried_on(async move { app.engine.remove_image(&key, &name, in_use).await }).await?;
    Ok(Json(convert::collected(collected)))
}

/// Removes images without a name and a sandbox, and layers without an image.
#[utoipa::path(post, path = "/v1/images/gc", tag = "images", responses(
    (status = 200, body = api::CollectedImages),
    (status = 403, body = api::ErrorBody),
))]
pub async fn collect(
    State(app): State<App>,
    Caller(key): Caller,
) -> Result<Json<api::CollectedImages>, ApiError> {
    require_admin_to(&key, "collect images")?;
    let collected = carried_on(async move { app.engine.collect_images().await }).await?;
    Ok(Json(convert::collected(collected)))
}

/// All aliases, by name.
#[utoipa::path(get, path = "/v1/image-aliases", tag = "images", responses((status = 200, body = api::ImageAliasList)))]
pub async fn aliases(State(app): State<App>, Caller(_): Caller) -> Json<api::ImageAliasList> {
    let aliases = app.engine.aliases().into_iter().map(convert::image_alias).collect();
    Json(api::ImageAliasList { aliases })
}

/// From now on, whoever asks for this name gets another image. Sandboxes that exist keep theirs.
#[utoipa::path(put, path = "/v1/image-aliases/{alias}", tag = "images", request_body = api::SetImageAlias,
    params(("alias" = String, Path, description = "The name, percent-encoded.")), responses(
    (status = 200, body = api::ImageAlias),
    (status = 400, body = api::ErrorBody),
    (status = 403, body = api::ErrorBody),
))]
pub async fn set_alias(
    State(app): State<App>,
    Caller(key): Caller,
    AliasPath(name): AliasPath,
    body::Json(body): body::Json<api::SetImageAlias>,
) -> Result<Json<api::ImageAlias>, ApiError> {
    require_admin_to(&key, "name images")?;
    let alias = carried_on(async move { app.engine.set_alias(&name, &body.target).await }).await?;
    Ok(Json(convert::image_alias(alias)))
}

/// Ends an alias.
#[utoipa::path(delete, path = "/v1/image-aliases/{alias}", tag = "images",
    params(("alias" = String, Path, description = "The name, percent-encoded.")), responses(
    (status = 204, description = "It is gone."),
    (status = 403, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
))]
pub async fn delete_alias(
    State(app): State<App>,
    Caller(key): Caller,
    AliasPath(name): AliasPath,
) -> Result<StatusCode, ApiError> {
    require_admin_to(&key, "name images")?;
    carried_on(async move { app.engine.delete_alias(&name).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}
