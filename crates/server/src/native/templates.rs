//! Templates: create, get, list, update, delete, and how far they are.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::extract::{FromRequestParts, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::sse::{Event, KeepAlive};
use axum::response::{IntoResponse, Response, Sse};
use engine::templates::{Preparation, Template, TemplateName, TemplateTold, TemplateWatcher};
use futures_util::stream::{self, Stream};
use wire::api;

use super::carried_on;
use crate::app::{App, Caller, Stopping};
use crate::body::{self, text_in_path};
use crate::convert;
use crate::error::ApiError;
use crate::events::HEARTBEAT;

/// Between two events about how far something is.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

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
    let body = convert::template(template);
    let mut response = (status, Json(&body)).into_response();
    // A name that no header can carry is none that a client could follow by itself.
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
    let (name, spec) = convert::template_create(body)?;
    let creating = async move { app.engine.create_template(&key.owner, name, spec).await };
    Ok(made(carried_on(creating).await?))
}

/// The templates of the key's owner by name, the built-in one first.
#[utoipa::path(get, path = "/v1/templates", tag = "templates", responses((status = 200, body = api::TemplateList)))]
pub async fn list(State(app): State<App>, Caller(key): Caller) -> Json<api::TemplateList> {
    let templates = app.engine.templates(&key.owner).into_iter().map(convert::template).collect();
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
    Ok(Json(convert::template(app.engine.template(&key.owner, &name)?)))
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
    let (name, spec) = (TemplateName::parse(&name)?, convert::template_spec(body)?);
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
    let update = convert::template_update(body)?;
    let updating = async move { app.engine.update_template(&key.owner, &name, update).await };
    Ok(Json(convert::template(carried_on(updating).await?)))
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

/// Tries a preparation again that failed. Anything else stays as it is.
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
    Ok(Json(convert::template(carried_on(preparing).await?)))
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
    /// Nothing was told yet, so that there is nothing to wait for.
    eager: bool,
}

impl Session {
    async fn next(&mut self) -> Option<api::TemplateEvent> {
        if self.over {
            return None;
        }
        if !std::mem::take(&mut self.eager) {
            // A moment for more news, so that a quick pull is not a flood of events.
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
            Ok(Some(TemplateTold::Progress(progress))) => convert::template_progress(&progress),
            Ok(Some(TemplateTold::Settled(template))) => {
                self.over = true;
                let template = Box::new(convert::template(*template));
                match template.state {
                    api::TemplateState::Failed => api::TemplateEvent::Failed(template),
                    // What is still being prepared has not settled.
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
    // JSON has no line breaks outside of strings and escapes them inside, so that one event is one line.
    let data = serde_json::to_string(event).expect("events are made of types that JSON can write");
    Event::default().event(name).data(data)
}
