//! What an operator may do with the sandboxes of all owners. All of these calls need an admin key.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use engine::sandbox::admin::{AnySandbox, Role};
use utoipa::IntoParams;
use wire::api;

use super::common::{PAGE_MAX, carried_on};
use super::sandboxes::sandbox_state;
use crate::http::app::{App, Caller};
use crate::http::auth::require_admin_to;
use crate::http::body::SandboxPath;
use crate::http::clock::rfc3339;
use crate::http::error::ApiError;
use crate::http::params::Params;

/// What to list.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "the fields describe the parameters, which `list` reads by hand")]
pub struct AdminListParams {
    /// The maximum number of items, 1 to 500.
    limit: Option<u32>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

/// The sandboxes of all owners, newest first, with those that wait in pools and those of builds.
#[utoipa::path(get, path = "/v1/admin/sandboxes", tag = "admin", params(AdminListParams), responses(
    (status = 200, body = api::AdminSandboxPage),
    (status = 400, body = api::ErrorBody),
    (status = 403, body = api::ErrorBody),
))]
pub async fn list(
    State(app): State<App>,
    Caller(key): Caller,
    mut params: Params,
) -> Result<Json<api::AdminSandboxPage>, ApiError> {
    require_admin_to(&key, "list the sandboxes of all owners")?;
    let limit = params.number("limit", 1..=u64::from(PAGE_MAX))?.map(|limit| limit as u32);
    let cursor = params.text("cursor")?;
    params.finish()?;
    let page = app.engine.list_all_owners(limit, cursor).await?;
    let sandboxes = page.items.into_iter().map(to_api).collect();
    Ok(Json(api::AdminSandboxPage { sandboxes, next_cursor: page.next_cursor }))
}

/// Deletes a sandbox of any owner. Responds when it is removed completely.
#[utoipa::path(delete, path = "/v1/admin/sandboxes/{sandbox}", tag = "admin",
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 204, description = "It is gone."),
    (status = 403, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
))]
pub async fn delete(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(id): SandboxPath,
) -> Result<StatusCode, ApiError> {
    require_admin_to(&key, "delete sandboxes of other owners")?;
    carried_on(async move { app.engine.delete_of_any_owner(id).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn to_api(sandbox: AnySandbox) -> api::AdminSandbox {
    api::AdminSandbox {
        id: sandbox.id,
        owner: sandbox.owner.as_str().to_owned(),
        name: sandbox.name.as_str().to_owned(),
        state: sandbox_state(sandbox.state),
        role: match sandbox.role {
            Role::Sandbox => "sandbox",
            Role::PoolMember => "pool",
            Role::Build => "build",
        }
        .to_owned(),
        output_bytes: sandbox.output_bytes,
        created_at: rfc3339(sandbox.created_at),
    }
}
