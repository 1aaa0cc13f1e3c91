//! Pools, as clients up to 0.7.33 have them: sandboxes of a template that stand ready.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use engine::pool::{PoolInfo, PoolName, PoolState, PoolUpdate};
use engine::{EngineError, Key};
use serde::Deserialize;
use serde_json::{Value, json};

use super::error::Refusal;
use super::json::times;
use super::read::{Body, Named};
use crate::http::app::{App, Caller};

/// How long a create waits where the caller does not say, and at most.
const WAIT_SECONDS_DEFAULT: f64 = 30.0;
const WAIT_SECONDS_MAX: f64 = 600.0;

/// `POST /pools`
#[derive(Debug, Deserialize)]
pub struct Create {
    name: String,
    template_name: String,
    replicas: u32,
    #[serde(default)]
    wait_for_ready: Option<bool>,
    #[serde(default)]
    timeout: Option<f64>,
}

/// A template that is not there is a mistake in the request here, and not a missing page.
fn refused(error: EngineError) -> Refusal {
    match error {
        EngineError::TemplateNotFound { .. } => {
            Refusal::new(StatusCode::BAD_REQUEST, "TemplateNotFound", error.to_string())
        }
        error => error.into(),
    }
}

/// Makes a pool, and waits until it is full where the caller asks for that.
pub async fn create(
    State(app): State<App>,
    Caller(key): Caller,
    Body(body): Body<Create>,
) -> Result<(StatusCode, Json<Value>), Refusal> {
    let seconds = body.timeout.unwrap_or(WAIT_SECONDS_DEFAULT);
    if seconds.is_nan() || seconds <= 0.0 {
        return Err(Refusal::invalid("timeout", "it is a number of seconds above zero"));
    }
    let wait = Duration::from_secs_f64(seconds.min(WAIT_SECONDS_MAX));
    let name = PoolName::parse(&body.name)?;
    let made = create_and_wait(app, key, name, body, wait).await?;
    Ok((StatusCode::CREATED, Json(show(&made))))
}

async fn create_and_wait(
    app: App,
    key: Key,
    name: PoolName,
    body: Create,
    wait: Duration,
) -> Result<PoolInfo, Refusal> {
    let made =
        app.engine.create_pool(&key, name, &body.template_name, body.replicas).await.map_err(refused)?;
    if !body.wait_for_ready.unwrap_or(true) {
        return Ok(made);
    }
    let info = app.engine.wait_pool(&key.owner, &body.name, wait).await?;
    let refusal = match info.state {
        PoolState::Ready => return Ok(info),
        PoolState::Failing => {
            let why = info.reason.unwrap_or_else(|| "its sandboxes cannot be made".into());
            Refusal::new(StatusCode::BAD_REQUEST, "SandboxConfig", format!("pool `{}`: {why}", body.name))
        }
        PoolState::Filling | PoolState::Deleting => {
            let message = format!(
                "pool `{}` was not ready within {} s: {} of {} sandboxes stand ready",
                body.name,
                wait.as_secs(),
                info.ready(),
                info.replicas
            );
            Refusal::new(StatusCode::GATEWAY_TIMEOUT, "Timeout", message)
        }
    };
    // Clients ask again after such an answer, and must not find what is left of the first time.
    app.engine.delete_pool(&key.owner, &body.name).await?;
    Err(refusal)
}

/// The pools of the key's owner.
pub async fn list(State(app): State<App>, Caller(key): Caller) -> Json<Value> {
    let pools: Vec<Value> = app.engine.pools(&key.owner).iter().map(show).collect();
    Json(json!({"pools": pools}))
}

/// A pool.
pub async fn get(Named { app, key, name }: Named) -> Result<Json<Value>, Refusal> {
    Ok(Json(show(&app.engine.pool(&key.owner, &name)?)))
}

/// `PATCH /pools/{name}`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Update {
    name: Option<String>,
    replicas: Option<u32>,
}

/// Gives a pool another name, or another size.
pub async fn update(
    Named { app, key, name }: Named,
    Body(body): Body<Update>,
) -> Result<Json<Value>, Refusal> {
    let update =
        PoolUpdate { name: body.name.as_deref().map(PoolName::parse).transpose()?, replicas: body.replicas };
    Ok(Json(show(&app.engine.update_pool(&key, &name, update).await.map_err(refused)?)))
}

/// Deletes a pool and what waits in it.
pub async fn delete(Named { app, key, name }: Named) -> Result<StatusCode, Refusal> {
    app.engine.delete_pool(&key.owner, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A pool as clients see it.
fn show(pool: &PoolInfo) -> Value {
    let (created_at, updated_at) = times(pool.created_at, pool.updated_at);
    json!({
        "id": pool.id.to_string(),
        "name": pool.name.as_str(),
        "template_name": pool.template,
        "replicas": pool.replicas,
        "created_at": created_at,
        "updated_at": updated_at,
    })
}
