//! Images: pull, import, list, remove, and aliases.
//!
//! A pull or an import responds with its image, or, for a caller that accepts `text/event-stream`, with events about
//! its progress. It stops when all callers that wait for it have left.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::sse::{Event, KeepAlive};
use axum::response::{IntoResponse, Response, Sse};
use engine::image::{
    Alias, Collected, Credentials, Format, ImageInfo, ImageRef, InUse, LayerProgress, LayerState, Platform,
    Pull, PullProgress, PullSpec, StoredImage, StoredLayer, Transport,
};
use engine::{Engine, EngineError, Key, Owner};
use futures_util::stream;
use serde::Deserialize;
use utoipa::IntoParams;
use wire::api;

use super::common::carried_on;
use crate::http::app::{App, Caller, Stopping};
use crate::http::auth::require_admin_to;
use crate::http::body::{self, Query, text_in_path};
use crate::http::clock::rfc3339;
use crate::http::error::ApiError;
use crate::http::sse::{self, HEARTBEAT, PROGRESS_INTERVAL};
use crate::http::upload::received;

/// Pulls an image from its registry, also when one of that name is here: a tag may mean something else today.
///
/// With `Accept: text/event-stream` the answer is a stream of `ImageEvent`, each under the name of its `type`, and a failure is its
/// last event. A request for an image that is being pulled joins that pull.
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
    let spec = pull_spec(body)?;
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
    /// `oci`, `docker` or `rootfs`; detected by default.
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
    let name = params.name.as_deref().map(reference).transpose()?;
    let format = match params.format.as_deref() {
        None => Format::Auto,
        Some("oci") => Format::Oci,
        Some("docker") => Format::Docker,
        Some("rootfs") => Format::Rootfs,
        Some(_) => return Err(ApiError::must("format", "be `oci`, `docker` or `rootfs`")),
    };
    let (head, body) = request.into_parts();
    let upload = received(&app, &key, &head, body, u64::MAX).await?;
    let mut stopping = app.stopping(&key);
    let pull = app.engine.import(&key, upload, name, format);
    if wants_events(&head.headers) {
        return Ok(progress(app, &key, pull));
    }
    let images = finished(&pull, &mut stopping).await?;
    let images = images.iter().filter_map(|image| shown(&app.engine, &key.owner, &image.digest.to_string()));
    Ok(Json(api::ImageList { images: images.collect() }).into_response())
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

/// Waits until the images are stored, unless the wait must end before.
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
    engine.image(owner, digest).ok().map(to_api)
}

/// Streams the progress of a pull, until it has ended.
fn progress(app: App, key: &Key, pull: Pull) -> Response {
    let (progress, stopping) = (pull.progress(), app.stopping(key));
    let owner = key.owner.clone();
    let watch = Watch { engine: app.engine, owner, pull, progress, stopping, over: false };
    let events = stream::unfold(watch, async |mut watch| {
        let event = watch.next().await?;
        Some((Ok::<_, Infallible>(to_event(&event)), watch))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(HEARTBEAT)).into_response()
}

/// One caller that follows a pull.
struct Watch {
    engine: Engine,
    owner: Owner,
    pull: Pull,
    progress: tokio::sync::watch::Receiver<PullProgress>,
    stopping: Stopping,
    over: bool,
}

impl Watch {
    async fn next(&mut self) -> Option<api::ImageEvent> {
        if self.over {
            return None;
        }
        let outcome = tokio::select! {
            biased;
            outcome = self.pull.finished() => outcome,
            _ = self.stopping.wait() => return None,
            // Waits for progress, and then a moment for more.
            Ok(()) = self.progress.changed() => {
                tokio::select! {
                    () = tokio::time::sleep(PROGRESS_INTERVAL) => {}
                    _ = self.pull.finished() => {}
                }
                return Some(pull_progress(&self.progress.borrow_and_update()));
            }
        };
        // A pull may finish before the caller has seen a single step, so the last step always comes before the end.
        let last = self.progress.borrow_and_update();
        if last.has_changed() {
            return Some(pull_progress(&last));
        }
        self.over = true;
        Some(match outcome {
            Ok(images) => {
                let images = images
                    .iter()
                    .filter_map(|image| shown(&self.engine, &self.owner, &image.digest.to_string()));
                api::ImageEvent::Done { images: images.collect() }
            }
            Err(error) => {
                let error = ApiError::from(error);
                if let Some(chain) = error.chain() {
                    tracing::info!(error = chain.0, "cannot pull an image");
                }
                api::ImageEvent::Failed(error.into_body())
            }
        })
    }
}

fn to_event(event: &api::ImageEvent) -> Event {
    let name = match event {
        api::ImageEvent::Progress { .. } => "progress",
        api::ImageEvent::Done { .. } => "done",
        api::ImageEvent::Failed(_) => "failed",
    };
    sse::event(name, event)
}

/// The images that this key's owner may use, newest first. `host` needs no keeping and is not among them.
#[utoipa::path(get, path = "/v1/images", tag = "images", responses((status = 200, body = api::ImageList)))]
pub async fn list(State(app): State<App>, Caller(key): Caller) -> Json<api::ImageList> {
    let images = app.engine.images(&key.owner).into_iter().map(to_api).collect();
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
    Ok(Json(to_api(app.engine.image(&key.owner, &name)?)))
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
    Ok(Json(collected_to_api(collected)))
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
    Ok(Json(collected_to_api(collected)))
}

/// All aliases, by name.
#[utoipa::path(get, path = "/v1/image-aliases", tag = "images", responses((status = 200, body = api::ImageAliasList)))]
pub async fn aliases(State(app): State<App>, Caller(_): Caller) -> Json<api::ImageAliasList> {
    let aliases = app.engine.aliases().into_iter().map(alias_to_api).collect();
    Json(api::ImageAliasList { aliases })
}

/// From now on, this name means another image. Sandboxes that exist keep theirs.
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
    Ok(Json(alias_to_api(alias)))
}

/// Deletes an alias.
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

/// A reference to an image.
pub fn reference(text: &str) -> Result<ImageRef, ApiError> {
    ImageRef::parse(text).map_err(|error| ApiError::invalid("reference", error))
}

/// `POST /v1/images/pull`
pub fn pull_spec(body: api::PullImage) -> Result<PullSpec, ApiError> {
    let api::PullImage { reference: text, platform, username, password, identity_token, insecure } = body;
    let platform = match platform {
        None => Platform::this(),
        Some(text) => Platform::parse(&text)
            .ok_or_else(|| ApiError::must("platform", "be such as `linux/amd64` or `linux/arm64/v8`"))?,
    };
    let credentials = match (username, password, identity_token) {
        (None, None, None) => Credentials::Anonymous,
        (Some(username), Some(password), None) => {
            Credentials::basic(&username, &password).ok_or_else(|| {
                ApiError::invalid("username", "it or the password cannot be sent to a registry")
            })?
        }
        (None, None, Some(token)) if !token.is_empty() => Credentials::Identity { token },
        _ => {
            let why = "give `username` and `password`, or `identity_token`, or none of them";
            return Err(ApiError::invalid("username", why));
        }
    };
    let transport = if insecure { Transport::Clear } else { Transport::Encrypted };
    Ok(PullSpec { reference: reference(&text)?, platform, credentials, transport })
}

/// An image as clients see it.
pub fn to_api(info: ImageInfo) -> api::Image {
    let image = &info.image;
    let config = &image.config;
    let layer = |layer: &StoredLayer| api::ImageLayer {
        digest: layer.blob.map(|digest| digest.to_string()),
        size_bytes: layer.size,
        unpacked_bytes: layer.facts.bytes,
        entries: layer.facts.entries,
        devices_skipped: layer.facts.devices_skipped,
        owners_changed: layer.facts.owners_changed,
        attributes_dropped: layer.facts.attributes_dropped,
    };
    api::Image {
        digest: image.digest.to_string(),
        names: info.names,
        aliases: info.aliases,
        private: info.owner.is_some(),
        platform: config.platform().map_or_else(|| "unknown".into(), |platform| platform.to_string()),
        size_bytes: image.size(),
        unpacked_bytes: image.unpacked(),
        created_at: rfc3339(image.created_at),
        sandboxes: info.sandboxes as u64,
        config: api::ImageConfig {
            env: config.env.iter().cloned().collect(),
            user: config.user.clone(),
            working_directory: config.working_directory.clone(),
            entrypoint: config.entrypoint.clone(),
            command: config.command.clone(),
            labels: config.labels.clone(),
        },
        layers: image.layers.iter().map(layer).collect(),
    }
}

/// The progress of a pull.
pub fn pull_progress(progress: &PullProgress) -> api::ImageEvent {
    api::ImageEvent::Progress { layers: progress.layers.iter().map(layer_progress).collect() }
}

pub(super) fn layer_progress(layer: &LayerProgress) -> api::LayerProgress {
    api::LayerProgress {
        digest: layer.digest.to_string(),
        state: match layer.state {
            LayerState::Waiting => api::LayerState::Waiting,
            LayerState::Fetching => api::LayerState::Fetching,
            LayerState::Fetched => api::LayerState::Fetched,
            LayerState::Unpacking => api::LayerState::Unpacking,
            LayerState::Done => api::LayerState::Done,
            LayerState::Present => api::LayerState::Present,
        },
        bytes: layer.bytes,
        total_bytes: layer.total,
    }
}

/// What a collection removed.
pub fn collected_to_api(collected: Collected) -> api::CollectedImages {
    let Collected { images, layers, bytes } = collected;
    api::CollectedImages { images: images as u64, layers: layers as u64, bytes }
}

/// An alias as clients see it.
pub fn alias_to_api(alias: Alias) -> api::ImageAlias {
    api::ImageAlias { name: alias.name, target: alias.target, created_at: rfc3339(alias.created_at) }
}
