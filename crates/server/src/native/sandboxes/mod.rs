//! Sandboxes: create, get, list, update, delete.

mod lifetime;
pub mod pause;

use self::lifetime::{explanation, kept_rule, lifetime_of, sandbox_update};
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use engine::{
    EngineError, IdempotencyKey, Labels, ListQuery, NetworkPolicy, Notes, Origin, PoolName, Sandbox,
    SandboxName, SandboxSpec, Selector, State as Life, TemplateName, Wait,
};
use utoipa::IntoParams;
use wire::api;
use wire::launch::Limits;

use super::common::{PAGE_MAX, bytes, carried_on, cpu_millis, sandbox_env};
use super::hooks::{hook_runs, hooks, hooks_of};
use super::network::{policy, policy_of};
use super::volumes::{mount, mount_spec};
use crate::http::app::{App, Caller};
use crate::http::body::{self, FoundSandbox, OptionalJson, SandboxPath};
use crate::http::clock::rfc3339;
use crate::http::error::ApiError;
use crate::http::params::Params;

/// Creates a sandbox.
#[utoipa::path(post, path = "/v1/sandboxes", tag = "sandboxes", request_body = api::CreateSandbox, params(
    ("Idempotency-Key" = Option<String>, Header, description = "Asking again with the same value and body finds \
        the sandbox of the first time. 1 to 255 visible ASCII characters."),
), responses(
    (status = 200, description = "With `match_labels`: it was there before.", body = api::CreatedSandbox),
    (status = 201, description = "It runs.", body = api::CreatedSandbox),
    (status = 202, description = "With `wait: false`: it is being made.", body = api::CreatedSandbox),
    (status = 400, body = api::ErrorBody),
    (status = 404, description = "No such template.", body = api::ErrorBody),
    (status = 409, description = "The name is taken, or the idempotency key was used with another request.", body = api::ErrorBody),
    (status = 429, description = "A limit of the key is reached.", body = api::ErrorBody),
    (status = 503, description = "The machine is full.", body = api::ErrorBody),
))]
pub async fn create(
    State(app): State<App>,
    Caller(key): Caller,
    headers: HeaderMap,
    OptionalJson(body): OptionalJson<api::CreateSandbox>,
) -> Result<Response, ApiError> {
    let wait = if body.wait.unwrap_or(true) { Wait::Ready } else { Wait::No };
    let (spec, find) = sandbox_spec(body, idempotency_key(&headers)?)?;
    // Not finished for a caller that disconnects: the engine finishes by itself what it has begun to create; and a
    // sandbox that it has not begun, because an image or a template is still being prepared, would never be used.
    let (sandbox, origin) = match find {
        Some(labels) => app.engine.get_or_create(&key, labels, spec, wait).await?,
        None => (app.engine.create(&key, spec, wait).await?, Origin::Made),
    };
    let status = match (origin, wait) {
        (Origin::Found, _) => StatusCode::OK,
        (Origin::Made, Wait::Ready) => StatusCode::CREATED,
        (Origin::Made, Wait::No) => StatusCode::ACCEPTED,
    };
    tracing::Span::current().record("sandbox", tracing::field::display(sandbox.id));
    let location = format!("/v1/sandboxes/{}", sandbox.id);
    let location = HeaderValue::from_str(&location).expect("a sandbox id is made of digits and dashes");
    let created = origin == Origin::Made;
    let body = api::CreatedSandbox { sandbox: to_api(sandbox), created };
    Ok((status, [(header::LOCATION, location)], Json(body)).into_response())
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    const NAME: &str = "Idempotency-Key";
    let mut values = headers.get_all(NAME).iter();
    match (values.next(), values.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => match value.to_str() {
            Ok(text) => Ok(Some(text.to_owned())),
            Err(_) => Err(ApiError::must(NAME, "be ASCII")),
        },
        (Some(_), Some(_)) => Err(ApiError::must(NAME, "be given once")),
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
    Ok(Json(to_api(app.engine.get(&key.owner, id).await?)))
}

/// What to list.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ListParams {
    /// The maximum number of items, 1 to 500.
    limit: Option<u32>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// Only the sandbox of this name.
    name: Option<String>,
    /// Only sandboxes with such a label: `key=value`, `key!=value` (another value, or none), `key` (any value), `!key` (not
    /// at all). May be given up to 32 times; all must hold.
    #[param(required = false)]
    label: Vec<String>,
}

impl ListParams {
    /// Read by hand, since `label` may be repeated.
    fn read(mut params: Params) -> Result<Self, ApiError> {
        let text = |bytes| String::from_utf8(bytes).map_err(|_| ApiError::must("label", "be UTF-8"));
        let read = Self {
            limit: params.number("limit", 1..=u64::from(PAGE_MAX))?.map(|limit| limit as u32),
            cursor: params.text("cursor")?,
            name: params.text("name")?,
            label: params.all("label").into_iter().map(text).collect::<Result<_, _>>()?,
        };
        params.finish()?;
        Ok(read)
    }
}

/// The sandboxes of the key's owner, newest first.
#[utoipa::path(get, path = "/v1/sandboxes", tag = "sandboxes", params(ListParams), responses(
    (status = 200, body = api::SandboxPage),
    (status = 400, body = api::ErrorBody),
))]
pub async fn list(
    State(app): State<App>,
    Caller(key): Caller,
    params: Params,
) -> Result<Json<api::SandboxPage>, ApiError> {
    let ListParams { limit, cursor, name, label } = ListParams::read(params)?;
    let selectors = label.iter().map(|text| Selector::parse(text)).collect::<Result<_, _>>()?;
    let query = ListQuery { limit, cursor, name, selectors };
    let page = app.engine.list(&key.owner, query).await?;
    let sandboxes = page.items.into_iter().map(to_api).collect();
    Ok(Json(api::SandboxPage { sandboxes, next_cursor: page.next_cursor }))
}

/// Changes a sandbox. Fields that are left out do not change.
#[utoipa::path(patch, path = "/v1/sandboxes/{sandbox}", tag = "sandboxes", request_body = api::UpdateSandbox,
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 200, body = api::Sandbox),
    (status = 400, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "The name is taken, or it is being deleted.", body = api::ErrorBody),
))]
pub async fn update(
    State(app): State<App>,
    Caller(key): Caller,
    FoundSandbox(id): FoundSandbox,
    body::Json(body): body::Json<api::UpdateSandbox>,
) -> Result<Json<api::Sandbox>, ApiError> {
    let update = sandbox_update(body)?;
    Ok(Json(to_api(app.engine.update(&key.owner, id, update).await?)))
}

/// Renews a sandbox: all clocks of its lifetime start again, except the clock since creation. Returns when the sandbox ends now.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/touch", tag = "sandboxes",
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 200, body = api::Explanation),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "It is being deleted.", body = api::ErrorBody),
))]
pub async fn touch(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(id): SandboxPath,
) -> Result<Json<api::Explanation>, ApiError> {
    Ok(Json(explanation(id, app.engine.touch(&key.owner, id).await?)))
}

/// Why a sandbox lives, and when and how it ends. Asking is not a use.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/explain", tag = "sandboxes",
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 200, body = api::Explanation),
    (status = 404, body = api::ErrorBody),
))]
pub async fn explain(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(id): SandboxPath,
) -> Result<Json<api::Explanation>, ApiError> {
    Ok(Json(explanation(id, app.engine.explain(&key.owner, id).await?)))
}

/// Deletes a sandbox with everything in it. Responds when it is removed completely.
#[utoipa::path(delete, path = "/v1/sandboxes/{sandbox}", tag = "sandboxes",
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 204, description = "It is gone."),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "`hook_failed`: its required hook failed.", body = api::ErrorBody),
))]
pub async fn delete(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(id): SandboxPath,
) -> Result<StatusCode, ApiError> {
    carried_on(async move { app.engine.delete(&key.owner, id).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /v1/sandboxes`
pub fn sandbox_spec(
    body: api::CreateSandbox,
    idempotency_key: Option<String>,
) -> Result<(SandboxSpec, Option<Labels>), ApiError> {
    let api::CreateSandbox {
        name,
        template,
        pool,
        image,
        env,
        cpu,
        memory,
        disk,
        mounts,
        labels,
        match_labels,
        lifetime,
        network,
        inject,
        history,
        hooks,
        wait: _,
    } = body;
    let name = name.as_deref().map(SandboxName::parse).transpose()?;
    let env = sandbox_env(env)?;
    let cpu_millis = cpu_millis(cpu)?;
    let memory_bytes = bytes("memory", memory)?;
    let idempotency_key = idempotency_key.as_deref().map(IdempotencyKey::parse).transpose();
    let idempotency_key = idempotency_key.map_err(|must| ApiError::must("Idempotency-Key", must))?;
    if pool.is_some() && template.is_some() {
        return Err(ApiError::must("pool", "be given without `template`: the pool has one"));
    }
    // A text that cannot be a name names no template.
    let template = match template {
        Some(name) => TemplateName::parse(&name).map_err(|_| EngineError::TemplateNotFound { name })?,
        None => TemplateName::built_in(),
    };
    let pool = match pool {
        Some(name) => Some(PoolName::parse(&name).map_err(|_| EngineError::PoolNotFound { name })?),
        None => None,
    };
    let labels = Labels::new(labels)?;
    let find = match_labels.map(Labels::new).transpose()?;
    let lifetime = lifetime_of(lifetime)?;
    let spec = SandboxSpec {
        name,
        template,
        image,
        env,
        cpu_millis,
        memory_bytes,
        disk_bytes: bytes("disk", disk)?,
        mounts: mounts.into_iter().map(mount_spec).collect(),
        labels,
        notes: Notes::default(),
        lifetime,
        network: network.map(policy_of).transpose()?,
        network_default: NetworkPolicy::default(),
        inject,
        idempotency_key,
        pool,
        history,
        hooks: hooks_of(hooks)?,
    };
    Ok((spec, find))
}

/// A sandbox as clients see it.
pub fn to_api(sandbox: Sandbox) -> api::Sandbox {
    api::Sandbox {
        id: sandbox.id,
        name: sandbox.name.as_str().to_owned(),
        state: sandbox_state(sandbox.state),
        memory: pause::memory(sandbox.state),
        reason: sandbox.reason,
        template: sandbox.template,
        template_version: sandbox.template_version,
        image: sandbox.image,
        image_alias: sandbox.image_alias,
        image_digest: sandbox.image_digest.map(|digest| digest.to_string()),
        limits: sandbox_limits(&sandbox.limits),
        mounts: sandbox.mounts.into_iter().map(mount).collect(),
        env: sandbox.env,
        labels: sandbox.labels.pairs().clone(),
        lifetime: sandbox.lifetime.rules().iter().map(kept_rule).collect(),
        network: policy(&sandbox.network),
        claimed_from: sandbox.claimed_from,
        history: sandbox.history,
        hooks: hooks(&sandbox.hooks),
        hook_runs: hook_runs(sandbox.hook_runs),
        created_at: rfc3339(sandbox.created_at),
    }
}

pub(super) fn sandbox_state(state: Life) -> api::SandboxState {
    match state {
        Life::Creating => api::SandboxState::Creating,
        Life::Running => api::SandboxState::Running,
        Life::Paused(_) => api::SandboxState::Paused,
        Life::Deleting => api::SandboxState::Deleting,
        Life::Failed { .. } => api::SandboxState::Failed,
    }
}

pub(super) fn sandbox_limits(limits: &Limits) -> api::SandboxLimits {
    let Limits { cpu_millis, memory_bytes, pids, disk_bytes } = *limits;
    api::SandboxLimits { cpu_millis, memory_bytes, pids, disk_bytes }
}
