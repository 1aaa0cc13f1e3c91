//! Secrets that sandboxes use without holding them: set, get, list, delete; and the ledger of their use.

use std::time::Duration;

use axum::Json;
use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use engine::PAGE_MAX;
use engine::secret::{
    CACHE_DEFAULT, CACHE_MAX, LedgerLine, SecretHow, SecretName, SecretRule, SecretSource, SecretSpec,
    SecretValue, SecretView,
};
use utoipa::IntoParams;
use wire::api;

use super::common::carried_on;
use crate::http::app::{App, Caller};
use crate::http::body::{self, text_in_path};
use crate::http::clock::rfc3339;
use crate::http::error::ApiError;
use crate::http::params::Params;

/// A name in a path, percent-encoded.
pub struct SecretPath(pub String);

impl<S: Send + Sync> FromRequestParts<S> for SecretPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        text_in_path(parts, state, "secret").await.map(Self)
    }
}

/// Keeps a secret, or gives it another value. In force in all sandboxes that may use it when this is answered.
#[utoipa::path(put, path = "/v1/secrets/{secret}", tag = "secrets", request_body = api::SetSecret,
    params(("secret" = String, Path, description = "Its name, percent-encoded.")), responses(
    (status = 200, body = api::Secret),
    (status = 400, body = api::ErrorBody),
    (status = 403, description = "Only admins may name files and variables of the daemon.", body = api::ErrorBody),
))]
pub async fn set(
    State(app): State<App>,
    Caller(key): Caller,
    SecretPath(name): SecretPath,
    body::Json(body): body::Json<api::SetSecret>,
) -> Result<Json<api::Secret>, ApiError> {
    let spec = secret_spec(&name, body)?;
    let view = carried_on(async move { app.engine.set_secret(&key, spec).await }).await?;
    Ok(Json(to_api(view)))
}

/// The secrets of the key's owner, by name, without their values.
#[utoipa::path(get, path = "/v1/secrets", tag = "secrets", responses((status = 200, body = api::SecretList)))]
pub async fn list(State(app): State<App>, Caller(key): Caller) -> Json<api::SecretList> {
    Json(api::SecretList { secrets: app.engine.secrets(&key).into_iter().map(to_api).collect() })
}

/// A secret, without its value.
#[utoipa::path(get, path = "/v1/secrets/{secret}", tag = "secrets",
    params(("secret" = String, Path, description = "Its name, percent-encoded.")), responses(
    (status = 200, body = api::Secret),
    (status = 404, body = api::ErrorBody),
))]
pub async fn get(
    State(app): State<App>,
    Caller(key): Caller,
    SecretPath(name): SecretPath,
) -> Result<Json<api::Secret>, ApiError> {
    Ok(Json(to_api(app.engine.secret(&key, &name)?)))
}

/// Deletes a secret. No request carries it any more when this is answered.
#[utoipa::path(delete, path = "/v1/secrets/{secret}", tag = "secrets",
    params(("secret" = String, Path, description = "Its name, percent-encoded.")), responses(
    (status = 204, description = "It is gone."),
    (status = 404, body = api::ErrorBody),
))]
pub async fn delete(
    State(app): State<App>,
    Caller(key): Caller,
    SecretPath(name): SecretPath,
) -> Result<StatusCode, ApiError> {
    carried_on(async move { app.engine.delete_secret(&key, &name).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Which lines to read.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Query)]
#[allow(dead_code)] // For the description of the API; read by hand.
pub struct LedgerParams {
    /// Only lines with a larger number. Without it, the newest lines.
    after: Option<u64>,
    /// The maximum number.
    limit: Option<u32>,
}

/// Requests that carried secrets of the key's owner, oldest first.
#[utoipa::path(get, path = "/v1/ledger", tag = "secrets", params(LedgerParams), responses(
    (status = 200, body = api::LedgerPage),
    (status = 400, body = api::ErrorBody),
))]
pub async fn ledger(
    State(app): State<App>,
    Caller(key): Caller,
    mut params: Params,
) -> Result<Json<api::LedgerPage>, ApiError> {
    let after = params.number("after", 0..=u64::MAX)?;
    let limit = params.number("limit", 1..=u64::from(PAGE_MAX))?.map(|limit| limit as u32);
    params.finish()?;
    let lines = app.engine.ledger(&key.owner, after, limit).await?;
    Ok(Json(api::LedgerPage { lines: lines.into_iter().map(line).collect() }))
}

/// Whether a line of this installation's ledger was changed or removed.
#[utoipa::path(get, path = "/v1/ledger/verify", tag = "secrets", responses(
    (status = 200, body = api::LedgerCheck),
))]
pub async fn verify(State(app): State<App>, Caller(_): Caller) -> Result<Json<api::LedgerCheck>, ApiError> {
    let check = app.engine.verify_ledger().await?;
    let whole = check.broken_at.is_none();
    Ok(Json(api::LedgerCheck { whole, lines: check.lines, broken_at: check.broken_at }))
}

fn secret_spec(name: &str, body: api::SetSecret) -> Result<SecretSpec, ApiError> {
    let api::SetSecret { value, file, environment, command, preset, rules, variables, cache_seconds } = body;
    if command.is_some() {
        let why = "this version does not run commands for the value of a secret; use `file` or `value`";
        return Err(
            ApiError::new(StatusCode::BAD_REQUEST, "source_not_supported", why).detail("field", "command")
        );
    }
    let source = match (value, file, environment) {
        (Some(value), None, None) => SecretSource::Value(SecretValue::new(value.into_bytes())),
        (None, Some(path), None) => SecretSource::File(path.into()),
        (None, None, Some(name)) => SecretSource::Environment(name),
        _ => {
            return Err(ApiError::must(
                "value",
                "be given, or `file`, or `environment`, and only one of them",
            ));
        }
    };
    let cache = cache_seconds.map_or(CACHE_DEFAULT, Duration::from_secs);
    if cache.is_zero() || cache > CACHE_MAX {
        let rule = format!("be between 1 and {}, got {}", CACHE_MAX.as_secs(), cache.as_secs());
        return Err(ApiError::must("cache_seconds", rule));
    }
    let rules = rules.into_iter().map(rule_of).collect();
    Ok(SecretSpec { name: SecretName::parse(name)?, source, preset, rules, variables, cache })
}

fn rule_of(rule: api::SecretRule) -> SecretRule {
    let api::SecretRule { domain, ports, methods, paths, inject } = rule;
    let how = match inject {
        api::SecretInject::Bearer => SecretHow::Bearer,
        api::SecretInject::Basic { user } => SecretHow::Basic { user },
        api::SecretInject::Header { name, prefix } => SecretHow::Header { name, prefix },
        api::SecretInject::Query { name } => SecretHow::Query { name },
        api::SecretInject::Placeholder { header, query, body } => {
            SecretHow::Placeholder { header, query, body }
        }
    };
    SecretRule { domain, ports, methods, paths, how }
}

fn rule_to(rule: SecretRule) -> api::SecretRule {
    let SecretRule { domain, ports, methods, paths, how } = rule;
    let inject = match how {
        SecretHow::Bearer => api::SecretInject::Bearer,
        SecretHow::Basic { user } => api::SecretInject::Basic { user },
        SecretHow::Header { name, prefix } => api::SecretInject::Header { name, prefix },
        SecretHow::Query { name } => api::SecretInject::Query { name },
        SecretHow::Placeholder { header, query, body } => {
            api::SecretInject::Placeholder { header, query, body }
        }
    };
    api::SecretRule { domain, ports, methods, paths, inject }
}

fn to_api(view: SecretView) -> api::Secret {
    api::Secret {
        name: view.name,
        source: view.source.into(),
        origin: view.origin,
        rules: view.rules.into_iter().map(rule_to).collect(),
        variables: view.variables,
        version: view.version,
        sandboxes: view.sandboxes as u64,
        created_at: rfc3339(view.created_at),
        updated_at: rfc3339(view.updated_at),
    }
}

fn line(line: LedgerLine) -> api::LedgerLine {
    api::LedgerLine {
        number: line.number,
        at: rfc3339(line.at),
        sandbox_id: line.sandbox,
        secret: line.secret,
        host: line.host,
        port: line.port,
        method: line.method,
        path: line.path,
        status: line.status,
        sent_bytes: line.sent,
        received_bytes: line.received,
        hash: line.hash.iter().map(|byte| format!("{byte:02x}")).collect(),
    }
}
