//! Templates: create, get, list, update, delete, and their progress.

use std::convert::Infallible;

use axum::Json;
use axum::extract::{FromRequestParts, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::sse::{Event, KeepAlive};
use axum::response::{IntoResponse, Response, Sse};
use engine::image::PullProgress;
use engine::template::{
    Preparation, Template, TemplateName, TemplateSpec, TemplateTold, TemplateUpdate, TemplateWatcher,
};
use engine::{Argv, GuestPath, GuestUser, Labels, TemplateHappened, template as built_in};
use futures_util::stream::{self, Stream};
use wire::api;

use super::common::{bytes, carried_on, cpu_millis, guest_path, guest_user, sandbox_env, template_command};
use super::hooks::{hooks, hooks_of};
use super::images::layer_progress;
use super::network::{policy, policy_of};
use super::volumes::{mount, mount_spec};
use crate::http::app::{App, Caller, Stopping};
use crate::http::body::{self, text_in_path};
use crate::http::clock::rfc3339;
use crate::http::error::ApiError;
use crate::http::sse::{self, HEARTBEAT, PROGRESS_INTERVAL};

/// A name in a path, percent-encoded.
pub struct TemplatePath(pub String);

impl<S: Send + Sync> FromRequestParts<S> for TemplatePath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        text_in_path(parts, state, "template").await.map(Self)
    }
}

/// 201 when it is ready, 202 while it is being prepared.
fn made(template: Template) -> Response {
    let status = match template.preparation {
        Preparation::Ready(_) => StatusCode::CREATED,
        Preparation::Preparing | Preparation::Failed { .. } | Preparation::Replaced => StatusCode::ACCEPTED,
    };
    let body = to_api(template);
    let mut response = (status, Json(&body)).into_response();
    // Only names that fit into a header as they are; for other names there is no link that a client could follow.
    if body.name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte))
        && let Ok(location) = HeaderValue::from_str(&format!("/v1/templates/{}", body.name))
    {
        response.headers_mut().insert(header::LOCATION, location);
    }
    response
}

/// Creates a template. Answers at once; its image is pulled in the background, if it is not here.
#[utoipa::path(post, path = "/v1/templates", tag = "templates", request_body = api::CreateTemplate, responses(
    (status = 201, description = "It is ready.", body = api::Template),
    (status = 202, description = "It is being prepared. `…/events` tells how far it is.", body = api::Template),
    (status = 400, body = api::ErrorBody),
    (status = 409, description = "The name is taken.", body = api::ErrorBody),
))]
pub async fn create(
    State(app): State<App>,
    Caller(key): Caller,
    body::Json(body): body::Json<api::CreateTemplate>,
) -> Result<Response, ApiError> {
    let (name, spec) = template_create(body)?;
    let creating = async move { app.engine.create_template(&key.owner, name, spec).await };
    Ok(made(carried_on(creating).await?))
}

/// The templates of the key's owner by name, the built-in one first.
#[utoipa::path(get, path = "/v1/templates", tag = "templates", responses((status = 200, body = api::TemplateList)))]
pub async fn list(State(app): State<App>, Caller(key): Caller) -> Json<api::TemplateList> {
    let templates = app.engine.templates(&key.owner).into_iter().map(to_api).collect();
    Json(api::TemplateList { templates })
}

/// A template.
#[utoipa::path(get, path = "/v1/templates/{template}", tag = "templates",
    params(("template" = String, Path, description = "Its name, percent-encoded.")), responses(
    (status = 200, body = api::Template),
    (status = 404, body = api::ErrorBody),
))]
pub async fn get(
    State(app): State<App>,
    Caller(key): Caller,
    TemplatePath(name): TemplatePath,
) -> Result<Json<api::Template>, ApiError> {
    Ok(Json(to_api(app.engine.template(&key.owner, &name)?)))
}

/// Makes a template, or gives one that exists just this content. Asking twice changes nothing; what failed is tried again.
#[utoipa::path(put, path = "/v1/templates/{template}", tag = "templates", request_body = api::TemplateSpec,
    params(("template" = String, Path, description = "Its name, percent-encoded.")), responses(
    (status = 201, description = "It is ready.", body = api::Template),
    (status = 202, description = "It is being prepared.", body = api::Template),
    (status = 400, body = api::ErrorBody),
    (status = 409, description = "It is built in.", body = api::ErrorBody),
))]
pub async fn apply(
    State(app): State<App>,
    Caller(key): Caller,
    TemplatePath(name): TemplatePath,
    body::Json(body): body::Json<api::TemplateSpec>,
) -> Result<Response, ApiError> {
    let (name, spec) = (TemplateName::parse(&name)?, template_spec(body)?);
    let applying = async move { app.engine.apply_template(&key.owner, name, spec, None).await };
    Ok(made(carried_on(applying).await?))
}

/// Changes a template. Sandboxes that exist keep the version they were made from.
#[utoipa::path(patch, path = "/v1/templates/{template}", tag = "templates", request_body = api::UpdateTemplate,
    params(("template" = String, Path, description = "Its name, percent-encoded.")), responses(
    (status = 200, body = api::Template),
    (status = 400, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "The name is taken, or it is built in.", body = api::ErrorBody),
))]
pub async fn update(
    State(app): State<App>,
    Caller(key): Caller,
    TemplatePath(name): TemplatePath,
    body::Json(body): body::Json<api::UpdateTemplate>,
) -> Result<Json<api::Template>, ApiError> {
    let update = template_update(body)?;
    let updating = async move { app.engine.update_template(&key.owner, &name, update).await };
    Ok(Json(to_api(carried_on(updating).await?)))
}

/// Deletes a template.
#[utoipa::path(delete, path = "/v1/templates/{template}", tag = "templates",
    params(("template" = String, Path, description = "Its name, percent-encoded.")), responses(
    (status = 204, description = "It is gone."),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "Sandboxes use it, or it is built in.", body = api::ErrorBody),
))]
pub async fn delete(
    State(app): State<App>,
    Caller(key): Caller,
    TemplatePath(name): TemplatePath,
) -> Result<StatusCode, ApiError> {
    carried_on(async move { app.engine.delete_template(&key.owner, &name).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Retries a preparation that failed. Has no effect on any other template.
#[utoipa::path(post, path = "/v1/templates/{template}/prepare", tag = "templates",
    params(("template" = String, Path, description = "Its name, percent-encoded.")), responses(
    (status = 200, body = api::Template),
    (status = 404, body = api::ErrorBody),
))]
pub async fn prepare(
    State(app): State<App>,
    Caller(key): Caller,
    TemplatePath(name): TemplatePath,
) -> Result<Json<api::Template>, ApiError> {
    let preparing = async move { app.engine.prepare_template(&key.owner, &name).await };
    Ok(Json(to_api(carried_on(preparing).await?)))
}

/// How far a template is, as server-sent events, until it is ready or has failed.
///
/// Each event is a `TemplateEvent` in JSON under the name of its `type`. A stream that ends without `ready`, `failed` or `gone` was
/// cut: ask again.
#[utoipa::path(get, path = "/v1/templates/{template}/events", tag = "templates",
    params(("template" = String, Path, description = "Its name, percent-encoded.")), responses(
    (status = 200, body = api::TemplateEvent, content_type = "text/event-stream"),
    (status = 404, body = api::ErrorBody),
))]
pub async fn watch(
    State(app): State<App>,
    Caller(key): Caller,
    TemplatePath(name): TemplatePath,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>> + use<>>, ApiError> {
    let watcher = app.engine.watch_template(&key.owner, &name)?;
    let session = Session { watcher, stopping: app.stopping(&key), over: false, eager: true };
    let events = stream::unfold(session, async |mut session| {
        let event = session.next().await?;
        Some((Ok(to_event(&event)), session))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(HEARTBEAT)))
}

struct Session {
    watcher: TemplateWatcher,
    stopping: Stopping,
    over: bool,
    /// No event was sent yet, so there is no need to wait.
    eager: bool,
}

impl Session {
    async fn next(&mut self) -> Option<api::TemplateEvent> {
        if self.over {
            return None;
        }
        if !std::mem::take(&mut self.eager) {
            // Waits a moment for more progress, so that a quick pull does not flood the client with events.
            tokio::select! {
                () = tokio::time::sleep(PROGRESS_INTERVAL) => {}
                _ = self.stopping.wait() => return None,
            }
        }
        let told = tokio::select! {
            told = self.watcher.next() => told,
            _ = self.stopping.wait() => return None,
        };
        Some(match told {
            Ok(Some(TemplateTold::Progress(progress))) => template_progress(&progress),
            Ok(Some(TemplateTold::Settled(template))) => {
                self.over = true;
                let template = Box::new(to_api(*template));
                match template.state {
                    api::TemplateState::Failed => api::TemplateEvent::Failed(template),
                    // A template that is still being prepared has not settled.
                    api::TemplateState::Ready | api::TemplateState::Preparing => {
                        api::TemplateEvent::Ready(template)
                    }
                }
            }
            Ok(None) => return None,
            Err(error) => {
                self.over = true;
                api::TemplateEvent::Gone(ApiError::from(error).into_body())
            }
        })
    }
}

fn to_event(event: &api::TemplateEvent) -> Event {
    let name = match event {
        api::TemplateEvent::Progress { .. } => "progress",
        api::TemplateEvent::Ready(_) => "ready",
        api::TemplateEvent::Failed(_) => "failed",
        api::TemplateEvent::Gone(_) => "gone",
    };
    sse::event(name, event)
}

/// `POST /v1/templates`
pub fn template_create(body: api::CreateTemplate) -> Result<(TemplateName, TemplateSpec), ApiError> {
    let api::CreateTemplate {
        name,
        image,
        cpu,
        memory,
        disk,
        env,
        cwd,
        user,
        command,
        labels,
        mounts,
        network,
        history,
        hooks,
    } = body;
    let name = TemplateName::parse(&name)?;
    let spec = api::TemplateSpec {
        image,
        cpu,
        memory,
        disk,
        env,
        cwd,
        user,
        command,
        labels,
        mounts,
        network,
        history,
        hooks,
    };
    Ok((name, template_spec(spec)?))
}

/// `PUT /v1/templates/{template}`
pub fn template_spec(body: api::TemplateSpec) -> Result<TemplateSpec, ApiError> {
    let api::TemplateSpec {
        image,
        cpu,
        memory,
        disk,
        env,
        cwd,
        user,
        command,
        labels,
        mounts,
        network,
        history,
        hooks,
    } = body;
    let usual = TemplateSpec::default();
    Ok(TemplateSpec {
        image: image.unwrap_or(usual.image),
        cpu_millis: cpu_millis(cpu)?.unwrap_or(usual.cpu_millis),
        memory_bytes: bytes("memory", memory)?.unwrap_or(usual.memory_bytes),
        disk_bytes: bytes("disk", disk)?,
        env: sandbox_env(env)?,
        cwd: guest_path(cwd)?,
        user: guest_user(user)?,
        command: template_command(command)?,
        labels: Labels::new(labels)?,
        mounts: mounts.into_iter().map(mount_spec).collect(),
        network: network.map(policy_of).transpose()?,
        history: history.unwrap_or(0),
        hooks: hooks_of(hooks)?,
    })
}

/// `PATCH /v1/templates/{template}`
pub fn template_update(body: api::UpdateTemplate) -> Result<TemplateUpdate, ApiError> {
    let api::UpdateTemplate {
        name,
        image,
        cpu,
        memory,
        disk,
        env,
        cwd,
        user,
        command,
        labels,
        mounts,
        network,
        history,
        hooks,
    } = body;
    Ok(TemplateUpdate {
        name: name.as_deref().map(TemplateName::parse).transpose()?,
        image,
        cpu_millis: cpu_millis(cpu)?,
        memory_bytes: bytes("memory", memory)?,
        disk_bytes: disk.map(|disk| bytes("disk", disk)).transpose()?,
        env: env.map(sandbox_env).transpose()?,
        cwd: cwd.map(guest_path).transpose()?,
        user: user.map(guest_user).transpose()?,
        command: command.map(template_command).transpose()?,
        labels: labels.map(Labels::new).transpose()?,
        mounts: mounts.map(|mounts| mounts.into_iter().map(mount_spec).collect()),
        network: network.map(|network| network.map(policy_of).transpose()).transpose()?,
        history,
        hooks: hooks.map(hooks_of).transpose()?,
    })
}

/// A template as clients see it.
pub fn to_api(template: Template) -> api::Template {
    let (state, reason) = template_state(&template.preparation);
    let (resolved, digest) = match &template.preparation {
        Preparation::Ready(prepared) => (Some(engine::image::familiar(&prepared.resolved)), prepared.image),
        Preparation::Preparing | Preparation::Failed { .. } | Preparation::Replaced => (None, None),
    };
    let built = template.id.is_none();
    let spec = template.spec;
    api::Template {
        id: template.id.map(|id| id.to_string()),
        name: template.name,
        version: template.version,
        state,
        reason,
        image_target: resolved.filter(|resolved| *resolved != spec.image),
        image: spec.image,
        image_digest: digest.map(|digest| digest.to_string()),
        limits: api::SandboxLimits {
            cpu_millis: spec.cpu_millis,
            memory_bytes: spec.memory_bytes,
            pids: built_in::LIMITS.pids,
            disk_bytes: None,
        },
        disk_bytes: spec.disk_bytes,
        env: spec.env.into_pairs(),
        cwd: spec.cwd.map(GuestPath::into_string),
        user: spec.user.map(GuestUser::into_string),
        command: spec.command.map(Argv::into_words).unwrap_or_default(),
        labels: spec.labels.pairs().clone(),
        mounts: spec.mounts.into_iter().map(mount).collect(),
        network: spec.network.as_ref().map(policy),
        history: spec.history,
        hooks: hooks(&spec.hooks),
        sandboxes: template.sandboxes as u64,
        built_in: built,
        created_at: (!built).then(|| rfc3339(template.created_at)),
        updated_at: (!built).then(|| rfc3339(template.updated_at)),
    }
}

fn template_state(preparation: &Preparation) -> (api::TemplateState, Option<String>) {
    match preparation {
        // A version that was replaced at this moment has a successor that is being prepared.
        Preparation::Preparing | Preparation::Replaced => (api::TemplateState::Preparing, None),
        Preparation::Ready(_) => (api::TemplateState::Ready, None),
        Preparation::Failed { reason } => (api::TemplateState::Failed, Some(reason.clone())),
    }
}

/// Something that happened to a template.
pub fn template_event(at: String, what: &TemplateHappened) -> api::SandboxEvent {
    let name = what.name.to_string();
    match &what.preparation {
        Some(preparation) => {
            let (state, reason) = template_state(preparation);
            api::SandboxEvent::Template { at, name, version: what.version, state, reason }
        }
        None => api::SandboxEvent::TemplateDeleted { at, name },
    }
}

/// The progress of a template's image.
pub fn template_progress(progress: &PullProgress) -> api::TemplateEvent {
    api::TemplateEvent::Progress { layers: progress.layers.iter().map(layer_progress).collect() }
}
