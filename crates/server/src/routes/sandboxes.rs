//! Sandboxes: create, get, list, update, delete.

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use engine::{ListQuery, Wait};
use serde::Deserialize;
use utoipa::IntoParams;
use wire::api;

use super::{carried_on, check_limit};
use crate::app::{App, Caller};
use crate::body::{self, OptionalJson, Query, SandboxPath};
use crate::convert;
use crate::error::ApiError;

/// Creates a sandbox.
#[utoipa::path(post, path = "/v1/sandboxes", tag = "sandboxes", request_body = api::CreateSandbox, params(
    ("Idempotency-Key" = Option<String>, Header, description = "Asking again with the same value and body finds \
        the sandbox of the first time. 1 to 255 visible ASCII characters."),
), responses(
    (status = 201, description = "It runs.", body = api::Sandbox),
    (status = 202, description = "With `wait: false`: it is being made.", body = api::Sandbox),
    (status = 400, body = api::ErrorBody),
    (status = 404, description = "No such template.", body = api::ErrorBody),
    (status = 409, description = "The name is taken, or the idempotency key was used otherwise.", body = api::ErrorBody),
    (status = 429, description = "A limit of the key is reached.", body = api::ErrorBody),
    (status = 503, description = "The machine is full.", body = api::ErrorBody),
))]
pub async fn create(
    State(app): State<App>,
    Caller(key): Caller,
    headers: HeaderMap,
    OptionalJson(body): OptionalJson<api::CreateSandbox>,
) -> Result<Response, ApiError> {
    let (wait, status) = match body.wait {
        None | Some(true) => (Wait::Ready, StatusCode::CREATED),
        Some(false) => (Wait::No, StatusCode::ACCEPTED),
    };
    let spec = convert::sandbox_spec(body, idempotency_key(&headers)?)?;
    let sandbox = carried_on(async move { app.engine.create(&key, spec, wait).await }).await?;
    tracing::Span::current().record("sandbox", tracing::field::display(sandbox.id));
    let location = format!("/v1/sandboxes/{}", sandbox.id);
    let location = HeaderValue::from_str(&location).expect("a sandbox id is made of digits and dashes");
    Ok((status, [(header::LOCATION, location)], Json(convert::sandbox(sandbox))).into_response())
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    const NAME: &str = "Idempotency-Key";
    let mut values = headers.get_all(NAME).iter();
    match (values.next(), values.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => match value.to_str() {
            Ok(text) => Ok(Some(text.to_owned())),
            Err(_) => Err(ApiError::invalid(NAME, "it is not ASCII")),
        },
        (Some(_), Some(_)) => Err(ApiError::invalid(NAME, "it is there more than once")),
    }
}

/// A sandbox.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}", tag = "sandboxes",
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 200, body = api::Sandbox),
    (status = 404, body = api::ErrorBody),
))]
pub async fn get(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(id): SandboxPath,
) -> Result<Json<api::Sandbox>, ApiError> {
    Ok(Json(convert::sandbox(app.engine.get(&key.owner, id).await?)))
}

/// What to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListParams {
    /// At most so many, 1 to 500.
    limit: Option<u32>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// Only the sandbox of this name.
    name: Option<String>,
}

/// The sandboxes of the key's owner, newest first.
#[utoipa::path(get, path = "/v1/sandboxes", tag = "sandboxes", params(ListParams), responses(
    (status = 200, body = api::SandboxPage),
    (status = 400, body = api::ErrorBody),
))]
pub async fn list(
    State(app): State<App>,
    Caller(key): Caller,
    Query(params): Query<ListParams>,
) -> Result<Json<api::SandboxPage>, ApiError> {
    let query = ListQuery { limit: check_limit(params.limit)?, cursor: params.cursor, name: params.name };
    let page = app.engine.list(&key.owner, query).await?;
    let sandboxes = page.items.into_iter().map(convert::sandbox).collect();
    Ok(Json(api::SandboxPage { sandboxes, next_cursor: page.next_cursor }))
}

/// Changes a sandbox. What is left out stays as it is.
#[utoipa::path(patch, path = "/v1/sandboxes/{sandbox}", tag = "sandboxes", request_body = api::UpdateSandbox,
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 200, body = api::Sandbox),
    (status = 400, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "The name is taken.", body = api::ErrorBody),
))]
pub async fn update(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(id): SandboxPath,
    body::Json(body): body::Json<api::UpdateSandbox>,
) -> Result<Json<api::Sandbox>, ApiError> {
    let sandbox = match convert::new_name(&body)? {
        Some(name) => app.engine.rename(&key.owner, id, name).await?,
        None => app.engine.get(&key.owner, id).await?,
    };
    Ok(Json(convert::sandbox(sandbox)))
}

/// Deletes a sandbox with all that is in it. Answers when nothing of it is left.
#[utoipa::path(delete, path = "/v1/sandboxes/{sandbox}", tag = "sandboxes",
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 204, description = "It is gone."),
    (status = 404, body = api::ErrorBody),
))]
pub async fn delete(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(id): SandboxPath,
) -> Result<StatusCode, ApiError> {
    carried_on(async move { app.engine.delete(&key.owner, id).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}
